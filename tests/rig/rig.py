"""Pretended cards beneath the true ``cuda.bindings`` and ``pynvml``: a folder with the three libraries and their state.

Who has the folder in ``LD_LIBRARY_PATH`` is on that machine. The state is mapped here as well, so a test looks at the
cards and changes them while whole offices run on them::

    rig = make_rig(tmp_path, FOUR_H100)
    rig.state.cards[2].uncorrected += 1
    rig.trouble("nvmlDeviceGetName", code=999)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sublet.node.supervisor.locks import PREFIX, ROOTS, lock_folder
from sublet.node.supervisor.real_hardware import LOADED
from tests.commands import fork_where
from tests.rig.personalities import Personality

__all__ = ["SOON_MS", "NewRig", "Rig", "State", "build", "forking_rig", "make_rig", "remove_locks"]

CARDS: Final = 16
PROCESSES: Final = 64
PIECES: Final = 4096
TROUBLES: Final = 32
XIDS: Final = 64
NAME: Final = 64
SOURCES: Final = {
    "libcuda.so.1": ("cuda.c", "modules.c", "state.c"),
    "libnvidia-ml.so.1": ("nvml.c", "state.c"),
    "libcupti.so.13": ("cupti.c", "state.c"),
}
FLAGS: Final = "-shared -fPIC -O1 -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -pthread"
HERE: Final = Path(__file__).parent

_U64: Final = ctypes.c_uint64


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, _U64) for name in names]


class Card(ctypes.Structure):
    """``struct card`` of state.h; so are the next ones."""

    _fields_ = [
        ("uuid", ctypes.c_uint8 * 16),
        ("model", ctypes.c_char * NAME),
        *_numbers(
            "present",
            "hidden",
            "split",
            "parent",
            "memory",
            "reserved",
            "idle",
            "context",
            "major",
            "minor",
            "node",
            "code",
        ),
        *_numbers("compute_mode", "persistence", "power_mw", "uncorrected", "retiring"),
        *_numbers("remapped", "remap_pending", "remap_failed", "busy"),
    ]

    @property
    def name(self) -> str:
        """Its UUID, as NVML writes it."""
        text = bytes(self.uuid).hex()
        return f"{'MIG' if self.parent else 'GPU'}-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Process(ctypes.Structure):
    _fields_ = [
        *_numbers("taken", "pid", "pretended", "list", "untold", "ended_ns"),
        ("contexts", _U64 * CARDS),
        *_numbers("state", "order", "outcome", "calls", "launches"),
        ("becomes", _U64 * CARDS),
    ]


class Piece(ctypes.Structure):
    _fields_ = _numbers("bytes", "card", "process", "offset", "address")


class Trouble(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_char * NAME),
        *_numbers("code", "delay_ms", "hangs", "kills", "pid", "skip", "times", "met"),
    ]


class Xid(ctypes.Structure):
    _fields_ = _numbers("card", "number")


class State(ctypes.Structure):
    _fields_ = [
        *_numbers("size"),
        ("driver", ctypes.c_char * NAME),
        *_numbers("cuda", "nodes", "lingers_ms", "init_code", "nvml_code", "namespaced", "mps", "xids_come"),
        ("cards", Card * CARDS),
        ("processes", Process * PROCESSES),
        ("pieces", Piece * PIECES),
        ("troubles", Trouble * TROUBLES),
        ("xids", Xid * XIDS),
    ]


class Rig:
    """One pretended machine."""

    def __init__(self, folder: Path, personality: Personality) -> None:
        """Use ``make_rig``."""
        self.folder = folder
        self.personality = personality
        self.desktop: list[Process] = []
        """The rows of the programs that draw on its first card."""
        self._programs: list[subprocess.Popen[bytes]] = []
        with open(folder / "state", "r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self.state = State.from_buffer(self._map)

    @property
    def env(self) -> dict[str, str]:
        """What a program needs to be on this machine."""
        variables = {line.field: line.value for line in self.personality.variables}
        return {"LD_LIBRARY_PATH": str(self.folder), **variables}

    def card(self, index: int) -> Card:
        """The card with this number on the machine itself."""
        found: Card = self.state.cards[index]
        return found

    def trouble(self, call: str, **how: int) -> Trouble:
        """From now on this entry point goes wrong, as ``struct trouble`` says. ``clear`` of it ends that."""
        row = next(row for row in self.state.troubles if not row.call)
        ctypes.memset(ctypes.addressof(row), 0, ctypes.sizeof(row))
        for name, value in how.items():
            setattr(row, name, value)
        row.call = call.encode()
        found: Trouble = row
        return found

    def draws(self, card: int, amount: int, pid: int, *, is_told: bool = True) -> Process:
        """A desktop in this process; it has so much of the card. ``taken = 0`` ends it."""
        row = next(row for row in self.state.processes if not row.taken)
        row.pid, row.pretended, row.list, row.untold = pid, 1, 1, not is_told
        row.contexts[card] = amount
        row.taken = 1
        found: Process = row
        return found

    def begin_desktop(self) -> None:
        """The programs of the personality that draw: processes with their names, until ``close``."""
        for line in self.personality.desktop:
            words = ("sh", "-c", f"printf {line.field} >/proc/$$/comm; echo; read _")
            program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert program.stdout is not None
            program.stdout.readline()  # it has its name
            self._programs.append(program)
            self.desktop.append(self.draws(0, line.value, program.pid))

    def close(self) -> None:
        """End what draws on it."""
        for program in self._programs:
            program.communicate()

    def xid(self, card: int, number: int) -> None:
        """The driver reports this of a card."""
        row = self.state.xids[self.state.xids_come % XIDS]
        row.card, row.number = card, number
        self.state.xids_come += 1

    def can_be_reset(self) -> bool:
        """Whether no process has the driver open. Else `nvidia-smi -r` says "in use by another client"."""
        with open(self.folder / "control", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def dirty(self, card: int, *, but: bytes = b"") -> bool:
        """Whether anything but zeros, and these bytes, lies in its memory, whoever wrote it."""
        return any(piece.strip(b"\0" + but) for piece in self._written(card))

    def wipe(self, card: int) -> None:
        """Zeros in all its memory, as if it had never been used."""
        os.truncate(self.folder / f"card{card}", 0)
        os.truncate(self.folder / f"card{card}", self.card(card).memory)

    def _written(self, card: int) -> Iterator[bytes]:
        """Those parts that were ever touched: the rest is a hole in the file."""
        with open(self.folder / f"card{card}", "rb") as file:
            at, end = 0, os.fstat(file.fileno()).st_size
            while at < end:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:  # nothing but holes from here
                    return
                until = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                while at < until:
                    piece = os.pread(file.fileno(), min(until - at, 1 << 24), at)
                    at += len(piece)
                    yield piece


SOON_MS: Final = 20
"""For tests in which it says nothing how long the memory of an ended process stays in use: each end of a lease then
takes one look and not two."""
NewRig = Callable[[Personality], Rig]
JOBS_LOAD: Final = ("pynvml", *LOADED)
"""What cleans cards: each time a lease has ended a supervisor forks it."""
COMMANDS_LOAD: Final = (
    *JOBS_LOAD,
    "cuda.bindings.driver",
    "sublet.devices.cuda",
    "sublet.devices.suspend",
    "sublet.node.agent.health",
    "sublet.node.agent.rehearsal",
    "sublet.node.agent.suspend_probe",
    "sublet.node.sandbox.trial",
)
"""What programs of the tests ask the driver by. The bindings load its library only when they are asked something."""


def clear(trouble: Trouble) -> None:
    """It goes well again, and who hangs in it goes on."""
    trouble.hangs = 0
    trouble.call = b""


_numbers_of_rigs: Final = itertools.count()
_made: Final[set[str]] = set()
"""The UUIDs of all cards that this process made."""


def remove_locks() -> None:
    """The files by which offices locked the cards that this process made. An office leaves them, as names that are its
    user's; there will never be such a card again. To be called when those offices have ended."""
    for folder in (lock_folder(), ROOTS):
        for card in _made:
            Path(folder, f"{PREFIX}{card}.{os.geteuid()}").unlink(missing_ok=True)
    _made.clear()


def make_rig(place: Path, personality: Personality) -> Rig:
    """A machine of this kind, with nobody on its cards."""
    folder, number = place / "rig", next(_numbers_of_rigs)
    folder.mkdir()
    for name, path in build().items():
        shutil.copy(path, folder / name)
    (folder / "lock").touch()
    (folder / "control").touch()
    state = State(size=ctypes.sizeof(State))
    for field, value in personality.machine.items():
        setattr(state, field, value)
    for index, kind in enumerate(personality.cards):
        card = state.cards[index]
        for field, value in kind.fields.items():
            setattr(card, field, value)
        card.present, card.node, card.hidden = 1, index, index in personality.hidden
        # Of all the machine's offices only one may lend a card, so no two tests may have the same.
        card.uuid[:] = hashlib.blake2b(f"{folder} {number} {index}".encode(), digest_size=16).digest()
        with open(folder / f"card{index}", "wb") as file:
            file.truncate(card.memory)
    (folder / "state").write_bytes(bytes(state))
    rig = Rig(folder, personality)
    _made.update(rig.card(index).name for index in range(len(personality.cards)))
    for answer in personality.answers:
        rig.trouble(answer.field, code=answer.value)
    rig.begin_desktop()
    return rig


@contextlib.contextmanager
def forking_rig(place: Path, personality: Personality) -> Iterator[Rig]:
    """A machine whose offices, commands and programs are forked (``tests.commands``). All such machines of this process
    lie in one place, one after the other: where a process looks for libraries is settled when it begins."""
    fork_where(commands_load=COMMANDS_LOAD, jobs_load=JOBS_LOAD, LD_LIBRARY_PATH=str(place / "rig"))
    rig = make_rig(place, personality)
    try:
        yield rig
    finally:
        rig.close()
        shutil.rmtree(rig.folder)


def build() -> dict[str, Path]:
    """All libraries, compiled once for each state of the sources."""
    names = sorted({name for names in SOURCES.values() for name in names} | {"modules.h", "state.h"})
    text = b"".join((HERE / name).read_bytes() for name in names) + FLAGS.encode()
    folder = Path(tempfile.gettempdir(), f"sublet-rig-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}")
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix="sublet-rig-"))
        for library, sources in SOURCES.items():
            paths = [str(HERE / source) for source in sources]
            subprocess.run(
                ["gcc", *FLAGS.split(), f"-Wl,-soname,{library}", "-o", str(made / library), *paths], check=True
            )
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(made)
    return {library: folder / library for library in SOURCES}
