"""Slurm of one node, as Debian packages it (``apt-get install slurm-wlm``), without systemd and without a database.

Its three daemons (munged, slurmctld, slurmd) run in a folder of the row, on loopback ports that were free. It takes
root, as slurmd does. The configuration is the least that runs a command: no accounting, no cgroups, processes found by
their session, and every interval at its default, so what is compared is the way from `srun` to the command and back.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.procs import Child, free_port, wait_until

__all__ = ["Slurm"]

START_WITHIN_S: Final = 60
_CONFIG: Final = """
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=bench Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of this machine alone."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            raise RuntimeError("slurm's daemons need root.")
        _find_programs()
        self._folder = folder / "slurm"
        for name in ("", "state", "spool", "munge"):
            (self._folder / name).mkdir(mode=0o755)
        config = self._folder / "slurm.conf"
        munge = self._folder / "munge" / "socket"
        config.write_text(
            _CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                munge=munge,
                controller=free_port(),
                daemon=free_port(),
                folder=self._folder,
                cores=os.cpu_count(),
            )
        )
        self.env = {"PATH": os.environ.get("PATH", os.defpath), "SLURM_CONF": str(config)}
        self.version = _version(self.env)
        self._children: list[Child] = []
        try:
            self._start_munge(munge)
            self._start("slurmctld", "-D", "-i", "-f", str(config))
            self._start("slurmd", "-D", "-f", str(config))
            wait_until(self._runs, within_s=START_WITHIN_S, what="slurm ran nothing", every_s=0.3)
        except BaseException:
            self.end()
            raise

    def command(self, *argv: str) -> list[str]:
        """Run this on the cluster, as a person would."""
        return ["srun", "--quiet", *argv]

    def _start_munge(self, path: Path) -> None:
        place = path.parent
        key = place / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = (f"--{name}-file={place / name}" for name in ("pid", "log", "seed"))
        self._start("munged", "--foreground", f"--key-file={key}", f"--socket={path}", "--force", *files)
        wait_until(path.exists, within_s=10, what="munged made no socket")

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        assert program is not None
        self._children.append(Child([program, *arguments], name=name, env=self.env, folder=self._folder))

    def _runs(self) -> bool:
        for child in self._children:
            if not child.alive:
                raise RuntimeError(f"{child.name} ended: {child.complaint()}")
        done = subprocess.run(
            self.command("--immediate=2", "true"), env=self.env, capture_output=True, timeout=20, check=False
        )
        return done.returncode == 0

    def end(self) -> None:
        """Last started, first ended."""
        while self._children:
            self._children.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _find_programs() -> None:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(name, path=path) is None:
            raise RuntimeError(f"{name} is not installed; `apt-get install slurm-wlm` brings it.")


def _version(env: dict[str, str]) -> str:
    said = subprocess.run(["srun", "--version"], env=env, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+[.\d]*", said)
    return found[0] if found else "unknown"
