"""What an office leaves on a machine, read from the machine itself: processes by the marks in their environments,
groups by their folders, files by looking. No table of ours is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from sublet.node.processes.cgroups_places import CgroupFiles, find_places
from sublet.node.processes.procs import ProcessInstance, Procs
from sublet.node.processes.tree import LEASE_MARK, OFFICE_MARK
from sublet.values import LeaseId
from sublet.wire.zygote import COLD_VARIABLE

T = TypeVar("T")

PATIENCE_S: Final = 90.0
PUT_AWAY_S: Final = 100.0
"""A volume that is an image is put away when nothing has it mounted: guests of another test that runs at the same time
have a copy of its mount for as long as they live."""
NAP_S: Final = 0.002
NAP_MAX_S: Final = 0.02
NAP_PER_LOOK: Final = 3.0
"""Who looks more often takes the time from what he waits for: a look at all processes is some milliseconds of work."""

LETS_GO: Final = (
    "while read -r _ _ _ _ point rest; do "
    'case "$rest" in *" - ext4 /dev/loop"*) umount -l "$point";; esac; done < /proc/self/mountinfo; '
)
"""First of all for a shell in a mount namespace of its own: it was born with a copy of every volume that another test
has mounted just now, and for as long as it lived none of them could be put away."""


def plain_env() -> dict[str, str]:
    """Ours, without the office that we may be in; what its warm interpreters do without stays."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SUBLET_")}
    return ours | {name: value for name, value in os.environ.items() if name == COLD_VARIABLE}


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def until(what: str, is_so: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Wait for a condition, not for a time. Returns what made it true."""
    limit, nap_s = time.monotonic() + patience_s, NAP_S
    while True:
        began_s = time.thread_time()
        if found := is_so():
            return found
        assert time.monotonic() < limit, f"never came to be: {what}"
        time.sleep(max(nap_s, NAP_PER_LOOK * (time.thread_time() - began_s)))
        nap_s = min(nap_s * 1.25, NAP_MAX_S)


def supervisor_of(runtime: Path) -> int | None:
    """The pid of whoever serves the supervisor's socket there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if sock.connect_ex(str(runtime / "supervisor.sock")) != 0:
            return None
        pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


def office_of(supervisor: int) -> str:
    """The id of the office that it serves, as it was told when it was started."""
    words = Procs().text(supervisor, "cmdline").split("\0")
    settings: dict[str, str] = json.loads(words[-2])
    return settings["office"] or Path(settings["runtime"], "supervisor.lock").read_text()


def end_office(runtime: Path) -> None:
    """The office has ended: its supervisor ends as well, with all that it runs, and the folder goes."""
    supervisor = supervisor_of(runtime)
    if supervisor is not None:
        traces = Traces(office_of(supervisor), runtime)
        identity = traces.procs.identity(supervisor)
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, number)
        until("a dead supervisor", lambda: identity is None or not traces.procs.is_there(identity))
        traces.clear()
    shutil.rmtree(runtime, ignore_errors=True)


class Traces:
    """Those of one office."""

    def __init__(self, office: str, runtime: Path) -> None:
        self.office = office
        self.runtime = runtime
        self.procs = Procs()

    def marked(self, lease: LeaseId | None = None) -> list[ProcessInstance]:
        """The living processes that carry the office's mark (and the lease's)."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir(self.procs.root))):
            if f"{OFFICE_MARK}={self.office}" not in self.procs.text(pid, "environ"):
                continue
            stat, marks = self.procs.stat(pid), self.procs.marks(pid, "SUBLET_")
            if stat is None or stat.is_gone:
                continue
            if marks.get(OFFICE_MARK) == self.office and lease in (None, marks.get(LEASE_MARK)):
                found.append(stat.identity)
        return found

    def groups(self) -> list[str]:
        """Folders of control groups that are the office's."""
        files = CgroupFiles()
        found = []
        for place in find_places():
            for base in {place.base, place.top}:
                found += [folder for folder in files.folders(base) if folder.endswith(f"/sublet-{self.office}")]
        return found

    def lease_groups(self) -> list[str]:
        files = CgroupFiles()
        return [folder for office in self.groups() for folder in files.folders(office)]

    def residue(self) -> list[str]:
        """What no lease may leave: processes, groups, folders, pages, notes."""
        left = [f"process {one.pid}: {self.procs.text(one.pid, 'cmdline')!r}" for one in self.marked()]
        left += self.lease_groups()
        for name in ("leases", "notes"):
            for at, folders, files in os.walk(self.runtime / name):  # what goes meanwhile is passed over
                left += [f"{at}/{found}" for found in (*folders, *files)]
        return left

    def clear(self) -> None:
        """Nothing of it is left, however the test went."""
        until("the end of what is marked", self._end_marked)
        until("removed groups", self._remove_groups)

    def _end_marked(self) -> bool:
        left = self.marked()
        for identity in left:
            self.procs.send(identity, signal.SIGKILL)
        return not left

    def _remove_groups(self) -> bool:
        files = CgroupFiles()
        left = self.groups()
        for office in left:
            for lease in files.folders(office):
                for guest in files.folders(lease):
                    with contextlib.suppress(OSError):
                        files.remove(guest)
                with contextlib.suppress(OSError):
                    files.remove(lease)
            with contextlib.suppress(OSError):
                files.remove(office)
        return not left
