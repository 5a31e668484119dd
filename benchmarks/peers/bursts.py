"""What runs many small calls over the cores of one machine: Ray, Dask, joblib's loky, `ProcessPoolExecutor`.

Each is a program of its own, in an environment of its own where it needs one, and does what one line asks: it keeps as
many workers as it is told, warm after the first line, and answers with seconds. They are used as their own pages show
it: `ray.get` of all tasks, `Client.map` and `gather`, `Parallel(n_jobs=...)`, and `Executor.map`, one call a task.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.peers.venv import python_with, version_in
from benchmarks.procs import Child, memory_of, tree

__all__ = ["NAMES", "BurstPeer"]

_DISTRIBUTIONS: Final = {"ray": "ray", "dask": "distributed", "joblib": "joblib", "ProcessPoolExecutor": ""}
NAMES: Final = tuple(_DISTRIBUTIONS)
_PROGRAM: Final = """
import json, os, sys, time
name, workers, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if name == "ray":
    import ray, logging
elif name == "dask":
    from distributed import Client, LocalCluster
elif name == "joblib":
    from joblib import Parallel, delayed
else:
    import concurrent.futures
import numpy


def nothing(item):
    return None

def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def part(array, index):
    return float(array[index * 1000 : index * 1000 + 1000].sum())

began = time.perf_counter()
if name == "ray":
    ray.init(
        num_cpus=workers, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder,
        object_store_memory=3 << 30, _node_ip_address="127.0.0.1",
    )
    remote = {function: ray.remote(function) for function in (nothing, spin, part)}

    def run(function, items):
        task = remote[function]
        return ray.get([task.remote(item) for item in items])

    def shared(array, count):
        task, stored = remote[part], ray.put(array)
        return ray.get([task.remote(stored, index) for index in range(count)])
elif name == "dask":
    cluster = LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=folder,
        host="127.0.0.1",
    )
    client = Client(cluster)

    def run(function, items):
        return client.gather(client.map(function, items, pure=False, batch_size=10_000))

    def shared(array, count):
        stored = client.scatter(array, broadcast=True)
        return client.gather(
            client.map(lambda index, array: part(array, index), range(count), array=stored, pure=False)
        )
elif name == "joblib":
    def run(function, items):
        return Parallel(n_jobs=workers, backend="loky")(delayed(function)(item) for item in items)

    def shared(array, count):
        return Parallel(n_jobs=workers, backend="loky")(delayed(part)(array, index) for index in range(count))
else:
    pool = concurrent.futures.ProcessPoolExecutor(workers)

    def run(function, items):
        return list(pool.map(function, items))

    def shared(array, count):
        return list(pool.map(part, [array] * count, range(count)))
assert len(run(nothing, [0])) == 1
print(json.dumps(time.perf_counter() - began), flush=True)  # from the start of it to its first result
array = None
for line in sys.stdin:
    what, *numbers = line.split()
    numbers = [float(number) for number in numbers]
    if what == "array":
        array = numpy.ones(int(numbers[0]) // 8)
        print("0", flush=True)
        continue
    began = time.perf_counter()
    if what == "nothing":
        found = run(nothing, range(int(numbers[0])))
    elif what == "spin":
        found = run(spin, [numbers[1]] * int(numbers[0]))
    else:
        found = shared(array, int(numbers[0]))
        assert sum(found) == 1000 * len(found)
    took = time.perf_counter() - began
    assert len(found) == int(numbers[0])
    print(json.dumps(took), flush=True)
"""


class BurstPeer:
    """One of them, running."""

    def __init__(self, name: str, python: Path, folder: Path, workers: int) -> None:
        self.name = name
        self.version = version_in(python, _DISTRIBUTIONS[name]) if _DISTRIBUTIONS[name] else ""
        place = folder / f"{name[:4]}{time.monotonic_ns() % 10**6}"  # sockets lie in it, and their paths must be short
        place.mkdir()
        self._child = Child([str(python), "-c", _PROGRAM, name, str(workers), str(place)], name=name, pipes=True)
        first = self._child.answer()
        if not first:
            complaint = self._child.complaint()
            self._child.end()
            raise RuntimeError(f"{name} did not start: {complaint}")
        self.first_s: float = json.loads(first)
        """From its start, imports not counted, to its first result."""

    @classmethod
    @contextlib.contextmanager
    def running(cls, name: str, folder: Path, workers: int) -> Iterator[BurstPeer]:
        """Raises ``RuntimeError`` where it cannot be installed or started."""
        distribution = _DISTRIBUTIONS[name]
        python = python_with(distribution, folder, "numpy") if distribution else Path(sys.executable)
        peer = cls(name, python, folder, workers)
        try:
            yield peer
        finally:
            peer._child.end()

    def nothing_s(self, count: int) -> float:
        """So many calls that do nothing."""
        return self._ask(f"nothing {count}")

    def spin_s(self, count: int, each_s: float) -> float:
        """So many calls that keep a core for so long."""
        return self._ask(f"spin {count} {each_s}")

    def make_array(self, size: int) -> None:
        """An array of so many bytes, which ``array_s`` hands to every call."""
        self._ask(f"array {size}")

    def array_s(self, count: int) -> float:
        """So many calls that read a part of the array."""
        return self._ask(f"shared {count}")

    def memory(self) -> int:
        """Bytes of memory that it and its workers have, what they share counted once."""
        return sum(memory_of(pid).share for pid in tree(self._child.pid))

    def _ask(self, line: str) -> float:
        said = self._child.ask(line)
        if not said:
            raise RuntimeError(f"{self.name} ended: {self._child.complaint()}")
        took: float = json.loads(said)
        return took
