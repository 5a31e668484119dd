"""Other ways to write Python state to a file: safetensors, joblib, dill, cloudpickle; in an environment of their own.

One program holds the state and, for each line it reads, saves it in one way, syncs the file, and says how long it took
and how many bytes there are; or reads back what it saved, once the file has been dropped from the page cache. None of
them syncs by itself, so the sync is ours and is the same for all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.peers.venv import python_with, version_in
from benchmarks.procs import Child

__all__ = ["Savers"]

DISTRIBUTIONS: Final = ("numpy", "joblib", "dill", "cloudpickle")
_PROGRAM: Final = """
import json, os, pickle, sys, time
import numpy as np, joblib, dill, cloudpickle, safetensors.numpy
folder, large = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
state = {"a": rng.random(large // 16), "b": rng.random(large // 8, dtype=np.float32)}
small = {f"v{n}": {"n": n, "text": str(n), "half": n * 0.5} for n in range(10_000)}
path = os.path.join(folder, "theirs")
def fresh():
    if os.path.exists(path):
        os.unlink(path)
def synced(write):
    fresh()
    began = time.perf_counter()
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began, os.path.getsize(path)
def by_name(write):
    fresh()
    began = time.perf_counter()
    write(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - began, os.path.getsize(path)
def cold(way, load):
    ways[way]()
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    load(path)
    return time.perf_counter() - began, os.path.getsize(path)
ways = {
    "safetensors": lambda: by_name(lambda path: safetensors.numpy.save_file(state, path)),
    "joblib": lambda: synced(lambda file: joblib.dump(state, file)),
    "cold safetensors": lambda: cold("safetensors", safetensors.numpy.load_file),
    "cold joblib": lambda: cold("joblib", joblib.load),
    "small joblib": lambda: synced(lambda file: joblib.dump(small, file)),
    "small dill": lambda: synced(lambda file: dill.dump(small, file)),
    "small cloudpickle": lambda: synced(lambda file: cloudpickle.dump(small, file)),
}
print("up", flush=True)
for line in sys.stdin:
    print(json.dumps(ways[line.strip()]()), flush=True)
"""


class Savers:
    """The program, with its state in memory."""

    def __init__(self, python: Path, folder: Path, large: int) -> None:
        self.versions = {name: version_in(python, name) for name in ("safetensors", *DISTRIBUTIONS)}
        place = folder / "savers"
        place.mkdir()
        self._child = Child([str(python), "-c", _PROGRAM, str(place), str(large)], name="savers", pipes=True)
        up = self._child.answer()
        if up.strip() != "up":
            raise RuntimeError(f"the other savers did not start: {self._child.complaint()}")

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, large: int) -> Iterator[Savers]:
        """Raises ``RuntimeError`` where they cannot be installed."""
        savers = cls(python_with("safetensors", folder, *DISTRIBUTIONS), folder, large)
        try:
            yield savers
        finally:
            savers._child.end()

    def save(self, way: str) -> tuple[float, int]:
        """Seconds, and bytes on disk."""
        said = self._child.ask(way)
        if not said:
            raise RuntimeError(f"the other savers ended: {self._child.complaint()}")
        seconds, size = json.loads(said)
        return seconds, size
