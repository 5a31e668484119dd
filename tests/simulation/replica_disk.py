"""A folder replica on a pretended disk: what was not synced may be lost, in any part and any order.

The replica's own code runs on it. A call may fail, the process may be killed between two calls, or the power may go:
then of every sector that was written and not synced either the old or the new content is there, and of every name that
was not synced likewise. After a sync that failed the pages count as clean, as Linux has it: a second sync succeeds and
writes nothing.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import (
    EMPTY,
    Accept,
    AcceptedWrite,
    Install,
    Prepare,
    Query,
    ReplicaCell,
    Request,
    answer,
)
from sublet.state.replicated.files import RealFiles
from sublet.state.replicated.folder import FolderReplica
from sublet.state.replicated.folder_log import FolderLog
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.replica import PackName, ReplicaFaulty, ReplicaSilent
from sublet.values import Epoch
from tests.simulation.mutant import in_force

SECTOR: Final = 512
ROOT: Final = Path("/replica")


class Killed(BaseException):
    """The process ends between two calls."""


class DiskBroken(Exception):
    """A rule was broken."""


@dataclass(slots=True)
class _File:
    number: int
    data: bytearray = field(default_factory=bytearray)
    """As every process sees it."""
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)
    """Sectors that the disk does not have yet."""
    marked: bool = False


class Disk:
    """What several processes share, and what is left of it after a power cut."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.names: dict[Path, _File] = {}
        self.durable_names: dict[Path, _File] = {}
        self.boots = 0
        self._numbers = 0

    def new_file(self) -> _File:
        """With a number that no file ever had."""
        self._numbers += 1
        return _File(self._numbers)

    def power_cut(self) -> None:
        """What was not synced is there or not, each piece by chance."""
        self.boots += 1
        names = dict(self.durable_names)
        for path in dict.fromkeys((*self.names, *names)):  # as they came: packs have names by chance on their way
            if self.names.get(path) is not names.get(path) and self.random.random() < 0.5:
                if path in self.names:
                    names[path] = self.names[path]
                else:
                    names.pop(path, None)
        for file in {id(file): file for file in (*self.names.values(), *names.values())}.values():
            content = bytearray(file.durable)
            for sector in sorted(file.dirty):
                if self.random.random() < 0.5:
                    end = min((sector + 1) * SECTOR, len(file.data))
                    content = content.ljust(end, b"\0")
                    content[sector * SECTOR : end] = file.data[sector * SECTOR : end]
            file.data, file.durable, file.dirty = content, bytes(content), set()
        self.names, self.durable_names = dict(names), dict(names)


class PretendFiles(RealFiles):
    """One process's door to the disk. ``fail`` is asked before each call and may raise."""

    def __init__(self, disk: Disk, fail: Callable[[str], None]) -> None:
        self._disk, self._fail = disk, fail
        self._open: dict[int, _File] = {}
        self._fds = 100

    def make_folder(self, path: Path) -> None:
        self._fail("mkdir")

    def open(self, path: Path, *, create: bool = False, fresh: bool = False) -> int:
        self._fail("open")
        names = self._disk.names
        if path not in names:
            if not (create or fresh):
                raise FileNotFoundError(errno.ENOENT, "no such file")
            names[path] = self._disk.new_file()
        if fresh:
            names[path].data.clear()
            names[path].dirty.clear()
        self._fds += 1
        self._open[self._fds] = names[path]
        return self._fds

    def close(self, fd: int) -> None:
        del self._open[fd]

    def read(self, fd: int, size: int, at: int) -> bytes:
        return bytes(self._open[fd].data[at : at + size])

    def write(self, fd: int, data: bytes, at: int) -> None:
        file = self._open[fd]
        try:
            self._fail("write")
        except BaseException:
            self._put(file, data[: self._disk.random.randrange(len(data) + 1) // SECTOR * SECTOR], at)
            raise
        self._put(file, data, at)

    def _put(self, file: _File, data: bytes, at: int) -> None:
        if len(file.data) < at + len(data):
            file.data.extend(bytes(at + len(data) - len(file.data)))
        file.data[at : at + len(data)] = data
        if data:
            file.dirty.update(range(at // SECTOR, (at + len(data) - 1) // SECTOR + 1))

    def datasync(self, fd: int) -> None:
        file = self._open[fd]
        try:
            self._fail("sync")
        except OSError:
            file.dirty.clear()
            raise
        if file.dirty:
            content = bytearray(file.durable).ljust(len(file.data), b"\0")
            for sector in file.dirty:
                content[sector * SECTOR : (sector + 1) * SECTOR] = file.data[sector * SECTOR : (sector + 1) * SECTOR]
            file.durable, file.dirty = bytes(content[: len(file.data)]), set()

    def sync(self, fd: int) -> None:
        self.datasync(fd)

    def sync_folder(self, path: Path) -> None:
        self._fail("sync folder")
        disk = self._disk
        kept = {p: file for p, file in disk.durable_names.items() if p.parent != path}
        disk.durable_names = kept | {p: file for p, file in disk.names.items() if p.parent == path}

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename")
        self._disk.names[target] = self._disk.names.pop(source)

    def remove(self, path: Path) -> None:
        self._disk.names.pop(path, None)

    def names(self, path: Path) -> list[str]:
        return sorted(p.name for p in self._disk.names if p.parent == path)

    def size(self, fd: int) -> int:
        return len(self._open[fd].data)

    def which(self, fd: int) -> tuple[int, int]:
        return self._open[fd].number, 7

    def state(self, path: Path, number: int) -> str:
        file = self._disk.names.get(path)
        if file is None or file.number != number:
            return "other"
        return "marked" if file.marked else "same"

    def mark(self, fd: int) -> None:
        self._open[fd].marked = True

    def lock(self, fd: int) -> bool:
        self._fail("lock")
        return True

    def unlock(self, fd: int) -> None:
        return

    def boot(self) -> bytes:
        return self._disk.boots.to_bytes(8, "big")


class _World:
    """One replica, two processes, and what was answered."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"disk/{seed}")
        self.disk = Disk(self.random)
        self.calls = 0
        self.kill_rate = self.random.choice((0.0, 0.005, 0.02))
        self.sync_failure = self.random.choice((0.0, 0.0, 0.01))
        self.write_failure = self.random.choice((0.0, 0.02))
        self.may_be_faulty = False
        self.faulty = False
        """It said so, and the power was on ever since."""
        self.replicas: list[FolderReplica | None] = [None, None]
        self.model: dict[str, ReplicaCell] = {}
        """What was answered last, for each key."""
        self.doubt: dict[str, list[ReplicaCell]] = {}
        """What may be there besides, after a request that was not answered."""
        self.packs: dict[str, bytes] = {}
        self.known: ReplicaSet | None = None
        self.counter = 0

    def fail(self, call: str) -> None:
        """Before each call of either process."""
        self.calls += 1
        draw = self.random.random()
        if draw < self.kill_rate:
            raise Killed
        if call.startswith("sync") and draw < self.kill_rate + self.sync_failure:
            self.may_be_faulty = True
            raise OSError(errno.EIO, "pretended")
        if call in ("write", "open", "rename") and draw < self.kill_rate + self.write_failure:
            raise OSError(errno.ENOSPC, "pretended")

    def run(self, steps: int = 60) -> None:
        """To the end, or to the first broken rule."""
        for _ in range(steps):
            which = self.random.randrange(2)
            try:
                self._one(which)
            except Killed:
                self.replicas[which] = None
                if self.random.random() < 0.6:
                    self._power_cut()
            except ReplicaFaulty as error:
                if not self.may_be_faulty:
                    raise DiskBroken(f"it calls itself damaged, and nothing had failed: {error.message}") from None
                self.faulty = True
            except (ReplicaSilent, InvalidRequest):
                continue

    def _one(self, which: int) -> None:
        replica = self.replicas[which]
        if replica is None:
            replica = FolderReplica(ROOT, log_bytes=1 << 14, files=PretendFiles(self.disk, self.fail))
            if self.known is None:
                self.known = ReplicaSet(1, Seats((replica.identity,), 1, 1))
            replica.ask([("", Install(self.known))])
            self._look(replica)
            self.replicas[which] = replica
        elif self.random.random() < 0.1:
            self._power_cut()
        else:
            self._ask(replica)

    def _power_cut(self) -> None:
        self.disk.power_cut()
        self.replicas, self.faulty = [None, None], False

    def _look(self, replica: FolderReplica) -> None:
        """Whatever was answered is there."""
        assert self.known is not None
        for key in ("a", "b", "c"):
            (here,) = replica.ask([(key, Query(1))])
            if self.faulty:
                raise DiskBroken("it answers, and had called itself faulty")
            found = ReplicaCell(here.promised, here.accepted)  # type: ignore[union-attr]
            if found not in (self.model.get(key, EMPTY), *self.doubt.get(key, ())):
                raise DiskBroken(f"{key} is {found}, not {(self.model.get(key), *self.doubt.get(key, ()))}")
            # From here on it is settled: what was told now must be told again.
            self.model[key], self.doubt[key] = found, []
            for pack in found.accepted.packs if found.accepted is not None else ():
                if replica.read_pack(key, pack) != self.packs[pack]:
                    raise DiskBroken(f"{key} was taken with {pack}, which is not there")

    def _ask(self, replica: FolderReplica) -> None:
        if any(self.doubt.values()):
            self._look(replica)
        requests = [self._request(replica) for _ in range(self.random.choice((1, 1, 3)))]
        cells = dict(self.model)
        for key, request in requests:
            assert isinstance(request, Prepare | Accept)
            assert self.known is not None
            cells[key], _ = answer(cells.get(key, EMPTY), self.known, request)
            self.doubt.setdefault(key, []).append(cells[key])
        said = replica.ask(requests)
        self._settle(replica, requests, said)

    def _settle(self, replica: FolderReplica, requests: list[tuple[str, Request]], said: list[Any]) -> None:
        for key in dict.fromkeys(key for key, _ in requests):
            (here,) = replica.ask([(key, Query(1))])
            if self.faulty:
                raise DiskBroken("it answers, and had called itself faulty")
            found = ReplicaCell(here.promised, here.accepted)  # type: ignore[union-attr]
            if found not in (self.model.get(key, EMPTY), *self.doubt[key]):
                raise DiskBroken(f"{key} became {found}")
            self.model[key], self.doubt[key] = found, []

    def _request(self, replica: FolderReplica) -> tuple[str, Request]:
        self.counter += 1
        key = self.random.choice("abc")
        ballot = Ballot(1, "o", Epoch(1, self.counter), 0, b"12345678")
        if self.random.random() < 0.3:
            return key, Prepare(1, ballot)
        packs: tuple[str, ...] = ()
        if self.random.random() < 0.3:
            name = str(PackName(1, 1, self.counter, "s", f"{self.counter:032x}"))
            self.packs[name] = self.random.randbytes(self.random.choice((10, 3000)))
            replica.put_pack(key, name, self.packs[name])
            packs = (name,)
        value = self.random.randbytes(self.random.choice((0, 10, 600, 3000)))
        return key, Accept(1, AcceptedWrite(WriteStamp(ballot, 0), value, packs))


def run_disk_seed(seed: int) -> int:
    """One seed; the calls that were made."""
    world = _World(seed)
    world.run()
    return world.calls


# ---- known bugs ----


def _does_nothing(_original: Any) -> Any:
    return lambda self, *_: None


def _retries(_original: Any) -> Any:
    def sync(self: FolderLog) -> None:
        try:
            self.files.datasync(self._fd)
        except OSError:
            self.files.datasync(self._fd)

    return sync


def _believes(_original: Any) -> Any:
    return lambda self, number: True


def _goes_on(_original: Any) -> Any:
    return lambda self: None


DISK_MUTANTS: Final[dict[str, tuple[str, type, str, Callable[[Any], Any]]]] = {
    "Z20": ("a file is renamed without being synced", PretendFiles, "sync", _does_nothing),
    "Z21": ("a name is not made durable", PretendFiles, "sync_folder", _does_nothing),
    "Z22": ("a sync that failed is tried again", FolderLog, "_sync", _retries),
    "D1": ("a write is acknowledged before its sync", FolderLog, "_sync", _goes_on),
    "D2": ("a torn entry is left where the next one goes", FolderLog, "_mend", _does_nothing),
    "D3": ("another process's entry is believed to be on the disk", FolderLog, "_is_synced", _believes),
    "D4": ("a replica goes on after a failed sync", FolderLog, "_mark", _goes_on),
}


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force([DISK_MUTANTS[name][1:]] if name is not None else ())
