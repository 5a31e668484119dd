"""Ray, of one machine, in an environment of its own: how long until a new actor with a library has answered.

One program keeps the cluster and makes an actor for each line it reads; ray leaves warm worker processes about, which
is how people have it. Without ray the published figure is all there is to compare with.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.peers.venv import python_with, version_in
from benchmarks.procs import Child

__all__ = ["PUBLISHED_S", "Ray"]

PUBLISHED_S: Final = 0.34
"""What is published for the start of an actor."""
_PROGRAM: Final = """
import importlib, json, logging, os, sys, time
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
import ray
ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
         object_store_memory=100 * 1024 * 1024, _temp_dir=sys.argv[1])
@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, library, beside):
        sys.path.append(beside)
        self.library = importlib.import_module(library)
    def ready(self):
        return str(self.library.__version__)
    def nothing(self):
        pass
print("up", flush=True)
standing = None
for line in sys.stdin:
    if line.startswith("call"):
        standing = standing or Actor.remote(*sys.argv[2:4])
        ray.get(standing.ready.remote())
        times = []
        for _ in range(int(line.split()[1])):
            began = time.perf_counter()
            ray.get(standing.nothing.remote())
            times.append(time.perf_counter() - began)
        print(json.dumps(sorted(times)[len(times) // 2]), flush=True)
        continue
    began = time.perf_counter()
    actor = Actor.remote(*sys.argv[2:4])
    ray.get(actor.ready.remote())
    took = time.perf_counter() - began
    ray.kill(actor)
    print(json.dumps(took), flush=True)
ray.shutdown()
"""


class Ray:
    """A cluster of one machine."""

    def __init__(self, python: Path, folder: Path, library: str = "numpy") -> None:
        self.version = version_in(python, "ray")
        temporary = folder / "ray"
        temporary.mkdir()
        command = [str(python), "-c", _PROGRAM, str(temporary), library, _beside(library)]
        self._child = Child(command, name="ray", pipes=True)
        up = self._child.ask("")
        if up.strip() != "up":
            raise RuntimeError(f"ray did not start: {self._child.complaint()}")
        self._child.answer()  # to the empty line, which has made a first actor

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, library: str = "numpy") -> Iterator[Ray]:
        """Whose actors import this library. Raises ``RuntimeError`` where ray cannot be installed or started."""
        ray = cls(python_with("ray", folder, "numpy"), folder, library)
        try:
            yield ray
        finally:
            ray._child.end()

    def call_s(self, count: int) -> float:
        """A call of an actor that is there and does nothing: the median of so many, one after the other."""
        said = self._child.ask(f"call {count}")
        if not said:
            raise RuntimeError(f"ray ended: {self._child.complaint()}")
        took: float = json.loads(said)
        return took

    def actor_s(self) -> float:
        """A new actor, until its first answer."""
        said = self._child.ask("another")
        if not said:
            raise RuntimeError(f"ray ended: {self._child.complaint()}")
        took: float = json.loads(said)
        return took


def _beside(library: str) -> str:
    """Where our own interpreter has it: what is large is not installed a second time."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise RuntimeError(f"{library} is not here.")
    return str(Path(found.origin).parents[1])
