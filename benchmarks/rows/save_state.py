"""A large state saved, restored, and saved again after one part in a hundred changed.

The state is half a numpy array and half a tensor, of random numbers, so nothing shrinks. The limit is a plain write of
the same bytes into one file, and its sync; torch.save, safetensors and joblib stand beside it, each with the same sync.
A cold restore is one whose files were dropped from the page cache.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.peers.savers import Savers
from sublet.durable.changes import ChangeFinder
from sublet.durable.codec import encode
from sublet.durable.durable import Durable
from sublet.durable.pages import Pages, process_pages
from sublet.durable.saving import Saver
from sublet.durable.store import FolderStore

MIB: Final = int(os.environ.get("SUBLET_BENCH_STATE_MIB", "256"))
PAIRS: Final = 9
CHANGES: Final = 10
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
        staged = self.saver.save(self.state, staging=staging, base=self.base, who=self.store.who, wall_ns=0)
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
    generator = np.random.default_rng(0)
    state = {"a": generator.random(size // 16), "b": torch.from_numpy(generator.random(size // 8, dtype=np.float32))}
    bench.note(f"The state has {size >> 20} MiB; SUBLET_BENCH_STATE_MIB sets it.")
    if not process_pages().usable():
        bench.note("This kernel does not track pages; the figures that need it are those of the hash pass.")
    ours, plain = Ours(bench.folder / "ours", state), Plain(bench.folder / "plain", state)
    figures = [*_full(bench, ours, plain, pairs, torch), *_restores(bench, ours, plain, pairs)]
    figures += _changes(bench, ours, state, pairs)
    figures += _loop(bench, state, bench.folder / "loop", pairs)
    figures += _tracking(bench, state["a"], pairs)
    return figures


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


def _full(bench: Bench, ours: Ours, plain: Plain, pairs: int, torch: Any) -> list[Figure]:
    def full() -> float:
        ours.fresh()
        return ours.save()[0]

    def torch_save() -> float:
        began = time.perf_counter()
        with open(bench.folder / "torch", "wb") as file:
            torch.save({"a": torch.from_numpy(ours.state["a"]), "b": ours.state["b"]}, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began

    figures = [_pairs(bench, f"{FULL}, against plain write and fsync", full, plain.save, pairs, "write and fsync")]
    figures.append(_pairs(bench, f"{FULL}, against torch.save", full, torch_save, pairs, "torch.save"))
    (bench.folder / "torch").unlink()
    try:
        with Savers.running(bench.folder, sum(view.nbytes for view in plain.views)) as savers:
            bench.versions.update(savers.versions)
            for way in ("safetensors", "joblib"):
                peer = _first_of(savers, way)
                figures.append(_pairs(bench, f"{FULL}, against {way}", full, peer, max(pairs // 2, 1), way))
    except RuntimeError as error:
        bench.note(f"safetensors and joblib were not run ({error}).")
    return figures


def _first_of(savers: Savers, way: str) -> Callable[[], float]:
    return lambda: savers.save(way)[0]


def _restores(bench: Bench, ours: Ours, plain: Plain, pairs: int) -> list[Figure]:
    ours.fresh()
    ours.save()
    plain.save()

    def cold(call: Callable[[], float]) -> Callable[[], float]:
        def timed() -> float:
            for path in (*ours.folder.rglob("*"), plain.path):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return call()

        return timed

    return [
        _pairs(bench, COLD, cold(ours.restore), cold(plain.read), pairs, "reading one file"),
        _pairs(bench, WARM, ours.restore, lambda: _hash_pass(plain.views), pairs, "one hash pass, one thread"),
    ]


def _hash_pass(views: tuple[memoryview, ...]) -> float:
    blake3 = importlib.import_module("blake3").blake3
    began = time.perf_counter()
    for view in views:
        blake3(view).digest()
    return time.perf_counter() - began


def _changes(bench: Bench, ours: Ours, state: dict[str, Any], pairs: int) -> list[Figure]:
    untracked = Pages()
    untracked.forget()
    hashed = Ours(bench.folder / "hashed", state, untracked)
    hashed.save()
    tracked: list[float] = []
    less: list[float] = []
    fulls: list[float] = []
    passes: list[float] = []
    sizes: list[float] = []
    full_sizes: list[float] = []
    for number in range(pairs + 1):
        ours.fresh()
        seconds, size = ours.save()
        ours.touch(number)
        again, more = ours.save()
        slow, _ = hashed.save()
        one_pass = _hash_pass(encode(state).views)
        bench.say(
            f"1 % changed: {again * 1e3:.1f} ms tracked, {slow * 1e3:.1f} ms hashed; full {seconds * 1e3:.0f} ms, "
            f"hash pass {one_pass * 1e3:.0f} ms; {more / 1e6:.1f} MB of {size / 1e6:.0f}"
        )
        if number:
            tracked.append(again * 1e3)
            less.append(slow * 1e3)
            fulls.append(seconds * 1e3)
            passes.append(one_pass * 1e3)
            sizes.append(more / 1e6)
            full_sizes.append(size / 1e6)
    return [
        figure(TRACKED, "ms", tracked, fulls, peer_name="our full save"),
        figure(HASHED, "ms", less, fulls, peer_name="our full save"),
        figure(PASS, "ms", less, passes, peer_name="one hash pass"),
        figure(BYTES, "MB", sizes, full_sizes, peer_name="our full save"),
    ]


def _loop(bench: Bench, state: dict[str, Any], folder: Path, pairs: int) -> list[Figure]:
    """A loop that computes on other data, on one core: how much longer it takes for a save of everything in it."""
    np = importlib.import_module("numpy")
    work = np.random.default_rng(1).random(200_000)

    def compute(steps: int, at: int, save: Callable[[], object] | None) -> float:
        began = time.perf_counter()
        for n in range(steps):
            if n == at and save is not None:
                save()
            np.sin(work)
        return time.perf_counter() - began

    steps = 200
    while compute(steps, -1, None) < bench.either(1.5, 0.3):
        steps *= 2
    added: list[float] = []
    calls: list[float] = []
    taken: list[float] = []
    waited: list[float] = []
    with Durable(state, folder, keep=1) as durable:
        for number in range(pairs + 1):
            for name in state:
                state[name] += 1  # everything has changed
            plain = compute(steps, -1, None)
            behind = compute(steps, 10, lambda: taken.append(_timed(lambda: durable.checkpoint(wait=False)))) - plain
            durable.flush()
            for name in state:
                state[name] += 1
            began = time.perf_counter()
            durable.checkpoint()
            waiting = time.perf_counter() - began
            bench.say(f"in the background {behind * 1e3:.0f} ms more, waited for {waiting * 1e3:.0f} ms")
            if number:
                added.append(behind * 1e3)
                calls.append(taken[-1] * 1e3)
                waited.append(waiting * 1e3)
    peer_name = "a save that is waited for"
    return [
        figure(ASYNC, "ms", added, waited, peer_name=peer_name),
        figure(CALL, "ms", calls, waited, peer_name=peer_name),
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
        process_pages().look(buffer.address, buffer.length, 0)
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
    distributions=("sublet", "blake3", "numpy", "torch", "zstandard"),
)
