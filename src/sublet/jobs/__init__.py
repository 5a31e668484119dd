"""Bursts: many chunks over every free core, then no lease left.

::

    from sublet import jobs

    for value in jobs.map(simulate, range(1000), want=64):
        ...

A chunk whose result is stored is never run again, only a chunk that was executing is charged for the loss of a worker,
and at the end the office is asked whether a lease of the job is left. docs/burst.md walks through it.
"""

# states, policy         what can happen to a chunk and what is retried, as tables
# identity, chunks       ids out of content; Chunk, File, what a chunk needs
# core                   the coordinator, pure: which chunk runs next, what becomes of a failed run
# stores, index,         where results live; their index on disk; in a volume
#   volume_store
# inside, wasm           what a worker executes: Python, WebAssembly
# leases, running,       acquiring; the thread around the core; one job from its first lease to its last
#   session
# mapping, executor,     the ways in; for asyncio; for joblib
#   coordinator, aio,
#   joblib_backend
# metrics, svg, drawing  figures, the picture of a burst, the tables in the docs

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.jobs.chunks import Chunk, Needs, WorkChunk
    from sublet.jobs.coordinator import JobCoordinator, Outputs, Phase
    from sublet.jobs.core import ChunkFailed, JobEvent
    from sublet.jobs.executor import Executor
    from sublet.jobs.identity import ChunkId, File
    from sublet.jobs.inside import load_result
    from sublet.jobs.joblib_backend import register as register_joblib
    from sublet.jobs.mapping import MapIterator
    from sublet.jobs.mapping import map_items as map  # noqa: A004 - the name it has everywhere else
    from sublet.jobs.policy import RetryPolicy
    from sublet.jobs.session import JobResult
    from sublet.jobs.stores import JobOutputStore, MemoryOutputStore
    from sublet.jobs.svg import picture
    from sublet.jobs.volume_store import VolumeOutputStore
    from sublet.jobs.wasm import TaskletResult, WasmTasklet

__all__ = [
    "Chunk",
    "ChunkFailed",
    "ChunkId",
    "Executor",
    "File",
    "JobCoordinator",
    "JobEvent",
    "JobOutputStore",
    "JobResult",
    "MapIterator",
    "MemoryOutputStore",
    "Needs",
    "Outputs",
    "Phase",
    "RetryPolicy",
    "TaskletResult",
    "VolumeOutputStore",
    "WasmTasklet",
    "WorkChunk",
    "load_result",
    "map",
    "picture",
    "register_joblib",
]

_LAZY: Final[dict[str, str]] = {
    **dict.fromkeys(("Chunk", "Needs", "WorkChunk"), "chunks"),
    **dict.fromkeys(("JobCoordinator", "Outputs", "Phase"), "coordinator"),
    **dict.fromkeys(("ChunkFailed", "JobEvent"), "core"),
    "Executor": "executor",
    **dict.fromkeys(("ChunkId", "File"), "identity"),
    "load_result": "inside",
    "picture": "svg",
    "register_joblib": "joblib_backend",
    **dict.fromkeys(("MapIterator", "map"), "mapping"),
    "RetryPolicy": "policy",
    "JobResult": "session",
    **dict.fromkeys(("JobOutputStore", "MemoryOutputStore"), "stores"),
    "VolumeOutputStore": "volume_store",
    **dict.fromkeys(("TaskletResult", "WasmTasklet"), "wasm"),
}
_RENAMED: Final = {"map": "map_items", "register_joblib": "register"}
"""Public name → name in its module, where that is another."""


def __getattr__(name: str) -> object:
    """Fetch a public name on first use, and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"sublet.jobs.{_LAZY[name]}"), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
