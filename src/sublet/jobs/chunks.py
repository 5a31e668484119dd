"""Chunks: the pieces that a job is made of, and what each of them needs to run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

from sublet.errors import InvalidRequest
from sublet.jobs.identity import ChunkId, chunk_id_of, content_digest, function_digest
from sublet.values import format_size, parse_memory, shown

CORES_MAX: Final = 4096


class Needs(NamedTuple):
    """What a chunk needs, and so what its lease is asked for: no more."""

    cores: int = 1
    memory: int = 0
    """Bytes; 0: not said, and not limited."""
    vram: int = 0
    """Bytes of GPU memory; 0: no GPU."""

    def __str__(self) -> str:
        parts = [f"{self.cores} core{'s' * (self.cores != 1)}"]
        parts += [f"{format_size(self.memory)} of memory"] * bool(self.memory)
        parts += [f"a GPU with {format_size(self.vram)}"] * bool(self.vram)
        return ", ".join(parts)


def needs_stated(cores: object = 1, memory: int | str | None = None, gpu: int | str | None = None) -> Needs:
    """Checked, as the user wrote it. A GPU lease has no cores of its own."""
    if isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= CORES_MAX:
        raise InvalidRequest(f"cores cannot be {shown(cores)}", do=f"Give a whole number from 1 to {CORES_MAX}.")
    memory_bytes = 0 if memory is None else parse_memory(memory, "memory")
    vram_bytes = 0 if gpu is None else parse_memory(gpu, "gpu")
    if vram_bytes and memory_bytes:
        raise InvalidRequest("a chunk on a GPU cannot ask for memory= as well", do="Leave one of them out.")
    return Needs(cores, memory_bytes, vram_bytes)


@runtime_checkable
class WorkChunk(Protocol):
    """One piece of work, as the coordinator sees it.

    ``chunk_id`` follows from the content of the work alone (function or module, arguments, every parameter that changes
    the result) and has at least 16 bytes; two chunks with one id must be the same work. A chunk may have an attribute
    ``needs`` (`Needs`) where it needs more than the job's others.
    """

    def chunk_id(self) -> bytes:
        """Its id, the same in every process."""

    def to_bytes(self) -> bytes:
        """What the function that executes it is given."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The chunk again."""


class Chunk:
    """A function with its arguments, as a chunk.

    ``cores``, ``memory`` and ``gpu`` are what it needs; they do not count for its id, so a chunk that is run on a
    larger lease is the same chunk.
    """

    __slots__ = ("args", "function", "kwargs", "needs")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cores: int = 1,
        memory: int | str | None = None,
        gpu: int | str | None = None,
    ) -> None:
        if not callable(function):
            raise InvalidRequest(f"{shown(function)} cannot be called", do="Give a function: Chunk(f, (1, 2)).")
        self.function = function
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.needs = needs_stated(cores, memory, gpu)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"<Chunk {name} {self.chunk_id().hex()[:12]}>"

    def chunk_id(self) -> ChunkId:
        """Digest of the function's code, defaults and closure, and of the arguments."""
        return self.id_with(function_digest(self.function))

    def id_with(self, function: bytes) -> ChunkId:
        """The id, where the digest of the function is known: one that holds a large array is hashed once for all of
        its chunks."""
        return chunk_id_of(
            function,
            content_digest((self.args, dict(sorted(self.kwargs.items()))), "the chunk's arguments"),
        )

    def to_bytes(self) -> bytes:
        """Function and arguments. A function that cannot be imported where this is read goes by value."""
        from cloudpickle import dumps

        data: bytes = dumps((self.function, self.args, self.kwargs, tuple(self.needs)), 5)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Chunk:
        """The chunk again. The bytes are code: read only what this program wrote."""
        function, args, kwargs, needs = pickle.loads(data)  # noqa: S301 - written by to_bytes of the same program
        made = cls(function, args, kwargs)
        made.needs = Needs(*needs)
        return made

    def run(self) -> Any:
        """Call it here."""
        return self.function(*self.args, **self.kwargs)


def is_work_chunk(value: object) -> bool:
    """Whether it has what `WorkChunk` asks for."""
    return isinstance(value, WorkChunk) and not isinstance(value, type)


def needs_of(chunk: object, otherwise: Needs) -> Needs:
    """What this chunk needs; the job's own where it does not say."""
    needs = getattr(chunk, "needs", None)
    if needs is None:
        return otherwise
    if not isinstance(needs, Needs):
        raise InvalidRequest(
            f"the needs of a chunk are {shown(needs)}", do="Give sublet.jobs.Needs(cores=2), or leave them out."
        )
    return needs
