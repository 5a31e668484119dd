"""A large state saved, restored, and saved again after one part in a hundred changed.

The state is half a numpy array and half a tensor, of random numbers, so nothing shrinks. The limit is a plain write of
the same bytes into one file, and its sync; torch.save, torch.distributed.checkpoint, safetensors and joblib stand
beside it, each with the same sync.
A cold restore is one whose files were dropped from the page cache.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.peers.savers import Savers
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import Saver
from sublet.state.transfer.changes import ChangeFinder
from sublet.state.transfer.codec import encode
from sublet.state.transfer.pages import Pages, process_pages

MIB: Final = int(os.environ.get("SUBLET_BENCH_STATE_MIB", "1024"))
PAIRS: Final = 9
CHANGES: Final = 10
OTHERS: Final = ("safetensors", "joblib")
FULL: Final = "full save"
COLD: Final = "cold restore"
WARM: Final = "warm restore"
TRACKED: Final = "save after 1 % changed, pages tracked, against our full save"
HASHED: Final = "save after 1 % changed, without tracking, against our full save"
PASS: Final = "the same, against one hash pass"
BYTES: Final = "bytes of a save after 1 % changed, against our full save"
ASYNC: Final = "time that a save in the background takes from a loop, against a save it waits for"
CALL: Final = "the call alone that begins a save in the background, against a save it waits for"
LOOK: Final = "look at an unchanged array, pages tracked"
FAULTS: Final = "rewriting all of an array after a look, against rewriting it untracked"


class Ours:
    """One state in one folder."""

    def __init__(self, folder: Path, state: dict[str, Any], pages: Pages | None = None) -> None:
        self.folder = folder
        self.state = state
        self.pages = process_pages() if pages is None else pages
        self.fresh()

    def fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.store = FolderStore(self.folder)
        self.saver = Saver(finder=ChangeFinder(pages=self.pages))
        self.base = self.store.base()

    def save(self) -> tuple[float, int]:
        began = time.perf_counter()
        staging = self.store.stage()
        staged = self.saver.save(self.state, staging=staging, base=self.base, author=self.store.author, wall_ns=0)
        self.store.publish(staged)
        self.base = staged.base
        return time.perf_counter() - began, staged.report.written_bytes

    def restore(self) -> float:
        began = time.perf_counter()
        with self.store.open() as checkpoint:
            checkpoint.load_all()
        return time.perf_counter() - began

    def touch(self, number: int) -> None:
        """One part in a hundred of each half, in some places."""
        for array in self.state.values():
            part = len(array) // 100 // CHANGES
            for n in range(CHANGES):
                start = (n * 10 + number % 10) * (len(array) // 100)
                array[start : start + part] += 1


def measure(bench: Bench) -> list[Figure]:
    np, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    size = bench.either(MIB, 32) << 20
    pairs = bench.either(PAIRS, 2)
    state = _state(size, np, torch)
    bench.note(f"The state has {size >> 20} MiB; SUBLET_BENCH_STATE_MIB sets it.")
    if not process_pages().usable():
        bench.note("This kernel does not track pages; the figures that need it are those of the hash pass.")
    ours, plain = Ours(bench.folder / "ours", state), Plain(bench.folder / "plain", state)
    theirs = Torch(bench.folder / "torch", state, torch)
    with contextlib.ExitStack() as stack:
        savers = _savers(bench, stack, sum(view.nbytes for view in plain.views))
        figures = _full(bench, ours, plain, theirs, savers, pairs)
        figures += _restores(bench, ours, plain, theirs, savers, pairs)
    figures += _changes(bench, ours, state, pairs)
    figures += _loop(bench, _state(size, np, torch), bench.folder / "loop", pairs)  # one that nobody else has looked at
    figures += _tracking(bench, state["a"], pairs)
    return figures


def _state(size: int, np: Any, torch: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"a": generator.random(size // 16), "b": torch.from_numpy(generator.random(size // 8, dtype=np.float32))}


class Plain:
    """One file, written from the memory itself."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path = path
        self.views = encode(state).views

    def save(self) -> float:
        self.path.unlink(missing_ok=True)
        began = time.perf_counter()
        fd = os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600)
        for view in self.views:
            while view:
                view = view[os.write(fd, view[: 4 << 20]) :]
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - began

    def read(self) -> float:
        """Into fresh memory, as any reader must have it."""
        began = time.perf_counter()
        with open(self.path, "rb", buffering=0) as file:
            memory = bytearray(os.fstat(file.fileno()).st_size)
            view = memoryview(memory)
            while view and (n := file.readinto(view[: 4 << 20])):
                view = view[n:]
        return time.perf_counter() - began


class Torch:
    """The two ways that PyTorch has."""

    def __init__(self, folder: Path, state: dict[str, Any], torch: Any) -> None:
        folder.mkdir()
        self.folder, self.file = folder / "distributed", folder / "file"
        self.state = {"a": torch.from_numpy(state["a"]), "b": state["b"]}
        self.torch = torch

    def save(self) -> float:
        self.remove()
        began = time.perf_counter()
        with open(self.file, "wb") as file:
            self.torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began

    def load(self) -> float:
        return _timed(lambda: self.torch.load(self.file))

    def distributed(self) -> float:
        """It syncs by itself."""
        save = importlib.import_module("torch.distributed.checkpoint").save
        self.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            return _timed(lambda: save(self.state, checkpoint_id=self.folder))

    def load_distributed(self) -> float:
        """Into tensors that are there already; it has no other way."""
        load = importlib.import_module("torch.distributed.checkpoint").load
        into = {name: self.torch.empty_like(value) for name, value in self.state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _timed(lambda: load(into, checkpoint_id=self.folder))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.file.unlink(missing_ok=True)


def _savers(bench: Bench, stack: contextlib.ExitStack, size: int) -> Savers | None:
    """None where they cannot be had."""
    try:
        savers = stack.enter_context(Savers.running(bench.folder, size))
    except RuntimeError as error:
        bench.note(f"safetensors and joblib were not run ({error}).")
        return None
    bench.versions.update(savers.versions)
    return savers


def _full(bench: Bench, ours: Ours, plain: Plain, theirs: Torch, savers: Savers | None, pairs: int) -> list[Figure]:
    def full() -> float:
        ours.fresh()
        return ours.save()[0]

    figures = [_pairs(bench, f"{FULL}, against plain write and fsync", full, plain.save, pairs, "write and fsync")]
    for name, save in (("torch.save", theirs.save), ("torch.distributed.checkpoint", theirs.distributed)):
        figures.append(_pairs(bench, f"{FULL}, against {name}", full, save, pairs, name))
    theirs.remove()
    for way, peer in _others(savers, ""):
        figures.append(_pairs(bench, f"{FULL}, against {way}", full, peer, max(pairs // 2, 1), way))
    return figures


def _others(savers: Savers | None, how: str) -> list[tuple[str, Callable[[], float]]]:
    return [] if savers is None else [(way, _first_of(savers, how + way)) for way in OTHERS]


def _first_of(savers: Savers, way: str) -> Callable[[], float]:
    return lambda: savers.save(way)[0]


def _restores(bench: Bench, ours: Ours, plain: Plain, theirs: Torch, savers: Savers | None, pairs: int) -> list[Figure]:
    ours.fresh()
    ours.save()
    plain.save()
    theirs.save()

    def cold(call: Callable[[], float]) -> Callable[[], float]:
        def timed() -> float:
            for path in (*ours.folder.rglob("*"), plain.path, theirs.file, *theirs.folder.rglob("*")):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return call()

        return timed

    figures = [
        _pairs(bench, COLD, cold(ours.restore), cold(plain.read), pairs, "reading one file"),
        _pairs(bench, f"{COLD}, against torch.load", cold(ours.restore), cold(theirs.load), pairs, "torch.load"),
        _pairs(bench, WARM, ours.restore, lambda: _hash_pass(plain.views), pairs, "one hash pass, one thread"),
    ]
    theirs.distributed()
    name, few = "torch.distributed.checkpoint", max(pairs // 2, 1)
    figures.append(
        _pairs(bench, f"{COLD}, against {name}", cold(ours.restore), cold(theirs.load_distributed), few, name)
    )
    theirs.remove()
    for way, peer in _others(savers, "cold "):
        figures.append(_pairs(bench, f"{COLD}, against {way}", cold(ours.restore), peer, few, way))
    return figures


def _hash_pass(views: tuple[memoryview, ...]) -> float:
    blake3 = importlib.import_module("blake3").blake3
    began = time.perf_counter()
    for view in views:
        blake3(view).digest()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Changed:
    """Seconds and bytes of a full save and of those after one part in a hundred changed."""

    full: float
    tracked: float
    hashed: float
    full_bytes: int
    bytes: int


def _changes(bench: Bench, ours: Ours, state: dict[str, Any], pairs: int) -> list[Figure]:
    """All of them in each pair, so that they had the same disk; and the hash pass beside them."""
    untracked = Pages()
    untracked.forget()
    hashed = Ours(bench.folder / "hashed", state, untracked)
    hashed.save()
    numbers = itertools.count()

    def saves() -> _Changed:
        ours.fresh()
        full, full_bytes = ours.save()
        ours.touch(next(numbers))
        tracked, more = ours.save()
        return _Changed(full, tracked, hashed.save()[0], full_bytes, more)

    found, passes = bench.pairs(
        "1 % changed",
        saves,
        lambda: _hash_pass(encode(state).views),
        pairs=pairs,
        show=lambda one, one_pass: (
            f"{one.tracked * 1e3:.1f} ms tracked, {one.hashed * 1e3:.1f} ms hashed; full {one.full * 1e3:.0f} ms, "
            f"hash pass {one_pass * 1e3:.0f} ms; {one.bytes / 1e6:.1f} MB of {one.full_bytes / 1e6:.0f}"
        ),
    )
    fulls, less = [one.full * 1e3 for one in found], [one.hashed * 1e3 for one in found]
    sizes, full_sizes = [one.bytes / 1e6 for one in found], [one.full_bytes / 1e6 for one in found]
    return [
        figure(TRACKED, "ms", [one.tracked * 1e3 for one in found], fulls, peer_name="our full save"),
        figure(HASHED, "ms", less, fulls, peer_name="our full save"),
        figure(PASS, "ms", less, [one * 1e3 for one in passes], peer_name="one hash pass"),
        figure(BYTES, "MB", sizes, full_sizes, peer_name="our full save"),
    ]


class Loop:
    """Steps that compute on other data, on one core."""

    def __init__(self, np: Any) -> None:
        self._sine = np.sin
        self._work = np.random.default_rng(1).random(200_000)

    def step(self) -> float:
        began = time.perf_counter()
        self._sine(self._work)
        return time.perf_counter() - began

    def quiet(self, seconds: float) -> list[float]:
        until = time.perf_counter() + seconds
        found = [self.step()]
        while time.perf_counter() < until:
            found.append(self.step())
        return found

    def beside(self, durable: Durable[Any], around_s: float) -> tuple[float, float]:
        """What a save in the background takes from it: from the call until nothing of the save is left to do, against
        what as many steps took just before and after; and the call alone, which is the least it can be."""
        before = self.quiet(around_s)
        call = _timed(lambda: durable.checkpoint(wait=False))
        rest = threading.Thread(target=durable.flush)
        rest.start()
        meanwhile = []
        while rest.is_alive():
            meanwhile.append(self.step())
        rest.join()
        usual = statistics.fmean(before + self.quiet(around_s))
        return call + max(0.0, sum(meanwhile) - usual * len(meanwhile)), call


def _loop(bench: Bench, state: dict[str, Any], folder: Path, pairs: int) -> list[Figure]:
    """A loop beside which everything is saved, all of it changed."""
    loop = Loop(importlib.import_module("numpy"))
    around_s = bench.either(0.7, 0.2)

    def change() -> None:
        for name in state:
            state[name] += 1

    with Durable(state, folder, keep=1) as durable:

        def behind() -> tuple[float, float]:
            change()
            return loop.beside(durable, around_s)

        def waited() -> float:
            change()
            return _timed(durable.checkpoint)

        found, peer = bench.pairs(
            "a save in the background",
            behind,
            waited,
            pairs=pairs,
            show=lambda one, other: (
                f"{one[0] * 1e3:.0f} ms taken, the call {one[1] * 1e3:.0f} ms of it; waited for {other * 1e3:.0f} ms"
            ),
        )
    waits = [one * 1e3 for one in peer]
    peer_name = "a save that is waited for"
    return [
        figure(ASYNC, "ms", [one * 1e3 for one, _ in found], waits, peer_name=peer_name),
        figure(CALL, "ms", [call * 1e3 for _, call in found], waits, peer_name=peer_name),
    ]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _tracking(bench: Bench, array: Any, pairs: int) -> list[Figure]:
    finder = ChangeFinder()
    buffer = encode(array).buffers[0]
    finder.changed(buffer)
    looks = []
    for _ in range(bench.either(200, 20)):
        began = time.perf_counter()
        finder.changed(buffer)
        looks.append((time.perf_counter() - began) * 1e3)
    after: list[float] = []
    free: list[float] = []
    for number in range(pairs + 1):
        process_pages().written_since(buffer.address, buffer.length, 0)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            array.fill(number)
            times.append((time.perf_counter() - began) * 1e3)
        if number:
            after.append(times[0])
            free.append(times[1])
    return [
        figure(LOOK, "ms", looks, operations=looks),
        figure(FAULTS, "ms", after, free, peer_name="untracked"),
    ]


def _pairs(
    bench: Bench, name: str, ours: Callable[[], float], peer: Callable[[], float], pairs: int, peer_name: str
) -> Figure:
    a, b = bench.pairs(
        name, ours, peer, pairs=pairs, show=lambda a, b: f"{a * 1e3:.0f} ms, {peer_name} {b * 1e3:.0f} ms"
    )
    return figure(name, "ms", [one * 1e3 for one in a], [one * 1e3 for one in b], peer_name=peer_name)


ROW: Final = Row(
    name="save_state",
    title="a large state saved, restored, and saved again after a change",
    goals=[
        Goal(figure=f"{FULL}, against plain write and fsync", of="ratio", at_least=1 / 1.25),
        Goal(figure=COLD, of="ratio", at_least=1 / 1.2),
        Goal(figure=TRACKED, of="ratio", at_least=20),
        Goal(figure=HASHED, of="ratio", at_least=5),
        Goal(figure=PASS, of="ratio", at_least=1 / 1.2),
        Goal(figure=BYTES, of="ratio", at_least=20),
        Goal(figure=ASYNC, of="ratio", at_least=1 / 0.15),
        Goal(figure=LOOK, at_most=1),
    ],
    measure=measure,
    limit_s=900,
    distributions=("sublet", "blake3", "numpy", "torch", "xxhash", "zstandard"),
)
