"""The units of ``examples/deploy``, carried out as systemd would, in folders of their own."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sublet.client.home import runtime_dir
from tests.commands import run_sublet, start_piped
from tests.traces import end_office, plain_env

__all__ = ["DEPLOY", "INSTALLED", "PATIENCE_S", "PROGRAM", "ROOT", "Machine", "machine_stage", "unit"]

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "examples" / "deploy"
INSTALLED: Final = "/opt/sublet/bin/sublet"
PROGRAM: Final = (sys.executable, "-m", "sublet")
PATIENCE_S: Final = 60.0


def unit(name: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(DEPLOY / f"{name}.service")
    return parsed


class Machine:
    """Folders in place of the machine's, and the processes that its units started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, (folder / "state").resolve()
        self.places = {"/var/lib/sublet": str(self.home), "/etc/sublet": str(folder / "etc")}
        self.env = plain_env() | {"XDG_STATE_HOME": str(folder / "anchors"), "PYTHONPATH": str(ROOT / "src")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "etc").mkdir()
        shutil.copy(ROOT / "examples" / "studio.toml", folder / "etc" / "studio.toml")

    def here(self, text: str) -> str:
        for there, ours in self.places.items():
            text = text.replace(there, ours)
        return text

    def words(self, command: str) -> list[str]:
        """A command of a unit, as it is run here."""
        first, *more = shlex.split(self.here(command))
        return [*(PROGRAM if first in (INSTALLED, "sublet") else (first,)), *more]

    def start(self, name: str, *more: str) -> None:
        """The unit; what it says goes to a file."""
        service = unit(name)["Service"]
        variable, _, value = self.here(service["Environment"]).partition("=")
        with open(self.folder / name, "ab") as said:
            words, out = [*self.words(service["ExecStart"]), *more], said.fileno()
            self.running[name] = start_piped(words, {**self.env, variable: value}, stdout=out, stderr=out)

    def start_office(self, *more: str) -> None:
        self.start("sublet-office", str(self.folder / "shared"), "--host-gpus", "1x1GiB", *more)

    def stop(self, name: str) -> int:
        """As `systemctl stop` with ``KillMode=process``, or for a unit of one process; its exit status."""
        self.running[name].terminate()
        return self.running.pop(name).wait(PATIENCE_S)

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = run_sublet(*words, env={**self.env, "SUBLET_HOME": str(self.home)}, timeout=PATIENCE_S)
        return subprocess.CompletedProcess(words, done.status, done.out.decode(), done.err.decode())

    @property
    def address(self) -> str:
        """Of the studio that was started last."""
        found: list[str] = re.findall(r"http://127\.0\.0\.1:\d+", self.said("sublet-studio"))
        return found[-1]

    def readiness(self) -> tuple[int, list[str]]:
        try:
            with urllib.request.urlopen(f"{self.address}/readyz", timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)["failing"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["failing"]

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        end_office(runtime_dir(self.home))


@contextmanager
def machine_stage() -> Iterator[Machine]:
    """Below a folder that every user may enter, as the shared socket asks for."""
    with tempfile.TemporaryDirectory(prefix="sublet-deploy-", dir="/tmp") as text:
        Path(text).chmod(0o755)
        made = Machine(Path(text))
        try:
            yield made
        finally:
            made.close()
