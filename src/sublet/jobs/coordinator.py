"""`JobCoordinator`: runs explicit chunks with a store, a function for each chunk and one for the results."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Unpack

from sublet.compute.functions import PackedFunction
from sublet.errors import InvalidRequest
from sublet.jobs.chunks import Chunk, Needs, is_work_chunk, needs_of
from sublet.jobs.core import SavedChunk, Works
from sublet.jobs.identity import ChunkId, check_stable, content_digest, function_digest, valid_id
from sublet.jobs.inside import Task
from sublet.jobs.mapping import READ_FOR_S, CoordinatorTerms
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.running import Delivered, load_state
from sublet.jobs.session import JobResult, JobSession, SessionTerms, raise_failure, terms_of
from sublet.jobs.stores import JobOutputStore
from sublet.values import shown

if TYPE_CHECKING:
    from sublet.jobs.chunks import WorkChunk
    from sublet.jobs.running import PoolMaker

FEED: Final = 4096
"""Chunks that are handed on together."""
READ: Final = 16
"""The same of an iterable that may be slow, or without an end."""
FUNCTIONS_MAX: Final = 256
"""Functions of chunks that are known by what they were taken apart into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One step of a job: its chunks, and the function that executes each."""

    name: str
    chunks: Iterable[WorkChunk] | Callable[[Outputs], Iterable[WorkChunk]]
    """The chunks, or a function that makes them of the outputs of the phase before."""
    exec_fn: Callable[[bytes], bytes] | None = None
    """Executes a chunk's bytes; not needed for `Chunk`, which brings its function."""


class _Functions:
    """What executes the chunks of a job: each function is taken apart, hashed and sent to a worker once."""

    def __init__(self, *, is_named: bool) -> None:
        self._is_named = is_named
        self._found: dict[int, tuple[Callable[..., Any], bytes, PackedFunction]] = {}
        """By address; each is kept, so the address stays its own."""
        self._bare: list[PackedFunction] = []

    def of_bytes(self, function: Callable[[bytes], bytes]) -> PackedFunction:
        """Of a phase that has a function for all of its chunks."""
        self._bare.append(PackedFunction(Task(function, raw=True)))
        return self._bare[-1]

    def of_chunk(self, chunk: Chunk, index: int) -> tuple[ChunkId, PackedFunction]:
        """The chunk's id, and what executes it. Raises where another process could not compute an id that is needed."""
        known = self._found.get(id(chunk.function))
        if known is None:
            if self._is_named:
                check_stable(chunk.function, f"the function of chunk {index}")
            if len(self._found) >= FUNCTIONS_MAX:  # chunks that wait may need it, so it is closed when they are gone
                self._found.pop(next(iter(self._found)))
            task = PackedFunction(Task(chunk.function, spread=True))
            known = self._found[id(chunk.function)] = (chunk.function, function_digest(chunk.function), task)
        _, digest, task = known
        if chunk.kwargs:
            task = PackedFunction(Task(functools.partial(chunk.function, **chunk.kwargs), spread=True))
        return chunk.id_with(digest) if type(chunk) is Chunk else valid_id(chunk.chunk_id()), task

    def close(self, *, is_unused: bool) -> None:
        """Let go of them. ``is_unused``: no worker has them any more, so memory of their arrays can be used again."""
        for task in (*self._bare, *(task for _, _, task in self._found.values())):
            task.close(is_unused=is_unused)


class Outputs(Sequence[bytes]):
    """Results of a phase in the order of its chunks, read from the store when they are asked for."""

    def __init__(self, store: JobOutputStore, chunks: Sequence[ChunkId]) -> None:
        self._store = store
        self.chunks = tuple(chunks)

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Outputs(self._store, self.chunks[index])
        return self._store.get(self.chunks[index])

    def __iter__(self) -> Iterator[bytes]:
        return (self._store.get(chunk) for chunk in self.chunks)


class JobCoordinator:
    """Runs chunks over CPU leases, retries what is worth it, and never runs a finished chunk again::

        result = JobCoordinator(RetryPolicy(max_retries=3), want=64).run(chunks, store, exec_fn, agg_fn)

    The other arguments are those of `sublet.jobs.map`. ``make_pool`` is for tests.
    """

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        make_pool: PoolMaker | None = None,
        **terms: Unpack[CoordinatorTerms],
    ) -> None:
        self._terms: SessionTerms = terms_of(policy=policy, **terms)
        self._make_pool = make_pool

    def run(
        self,
        chunks: Iterable[WorkChunk],
        store: JobOutputStore,
        exec_fn: Callable[[bytes], bytes] | None,
        agg_fn: Callable[[Outputs], Any],
    ) -> JobResult:
        """Execute each chunk that the store lacks, then aggregate the results in the order of the chunks.

        ``exec_fn`` gets the chunk's bytes in a worker and returns bytes. Without it the chunks are `Chunk`, and their
        results are pickles of what their functions return (`sublet.jobs.load_result`). Raises `JobFailed` at the first
        chunk that failed, or, with ``errors="collect"``, aggregates what there is.
        """
        return self.run_phases([Phase(name="chunks", chunks=chunks, exec_fn=exec_fn)], store, agg_fn)

    def run_phases(
        self, phases: Sequence[Phase], store: JobOutputStore, finalize: Callable[[Outputs], Any]
    ) -> JobResult:
        """Run phases one after the other on the same leases: each makes its chunks of the outputs of the one before.
        ``finalize`` gets the outputs of the last."""
        if not phases:
            raise InvalidRequest("a job needs at least one phase", do="Give a list of Phase(...).")
        _check_store(store)
        phase_before, saved = load_state(store.begin(self._terms.name if self._terms.is_named else ""))
        session: JobSession | None = None
        progress = threading.Event()
        functions = _Functions(is_named=self._terms.is_named)
        try:
            outputs = Outputs(store, ())
            for phase in phases:
                again = saved if phase.name == phase_before else {}
                chunks = phase.chunks(outputs) if callable(phase.chunks) else phase.chunks
                is_sequence = isinstance(chunks, Sequence)
                works = self._works(phase, chunks, functions, is_sequence)
                if is_sequence:  # then all of them are looked at before anything runs
                    works = _checked(works)
                if session is None:
                    first = next(works, None)
                    if first is None:
                        raise InvalidRequest("there are no chunks", do="Give at least one chunk.")
                    works = itertools.chain((first,), works)
                    session = self._begun(store, again, phase, progress)
                else:
                    session.running.next_phase(session.core(saved=again), phase.name)
                outputs = Outputs(store, self._phase(session, works, store, progress, is_sequence))
            assert session is not None
            session.close()
            return session.result(finalize(outputs))
        finally:
            if session is not None:
                session.close()
                functions.close(is_unused=session.is_given_back)

    def _begun(
        self, store: JobOutputStore, saved: dict[ChunkId, SavedChunk], phase: Phase, progress: threading.Event
    ) -> JobSession:
        def deliver(_: list[Delivered]) -> None:
            """Results are read from the store at the end."""
            progress.set()

        return JobSession(self._terms, deliver, store=store, saved=saved, phase=phase.name, make_pool=self._make_pool)

    def _phase(
        self,
        session: JobSession,
        works: Iterator[tuple[Works, list[bytes]]],
        store: JobOutputStore,
        progress: threading.Event,
        is_sequence: bool,
    ) -> list[ChunkId]:
        """Feed one phase, and wait for its end. The chunks that have results, in order, each once."""
        running = session.running
        keys: dict[ChunkId, None] = {}
        for some, contents in works:
            keys |= dict.fromkeys(some.keys)
            running.feed(some, contents)
            while running.backlog >= running.window(FEED if is_sequence else 0) and not running.is_stopped:
                progress.wait()
                progress.clear()
            if running.is_stopped:
                break
        running.complete()
        while not running.wait_over(1.0):
            pass
        failures = session.fold_phase()
        if running.error is not None:
            raise running.error
        if failures and not self._terms.collect:
            session.close()
            raise_failure(failures)
        return [key for key in keys if key in store]

    def _works(
        self, phase: Phase, chunks: Iterable[Any], functions: _Functions, is_sequence: bool
    ) -> Iterator[tuple[Works, list[bytes]]]:
        """The chunks, those together that one call executes on leases of one size; and what their ids stand for. Of an
        iterable that is slow none waits until the next is read."""
        most, until_s = (FEED, math.inf) if is_sequence else (READ, 0.0)
        task = None if phase.exec_fn is None else functions.of_bytes(_callable(phase.exec_fn))
        works: Works | None = None
        contents: list[bytes] = []
        for index, chunk in enumerate(_iterated(chunks)):
            needs: Needs = needs_of(chunk, self._terms.needs)
            if isinstance(chunk, Chunk) and task is None:
                key, made = functions.of_chunk(chunk, index)
                item: Any = chunk.args
                content = bytes(key)  # derived from all of its content here
                needs = chunk.needs if chunk.needs != Needs() else self._terms.needs
            elif is_work_chunk(chunk):
                if task is None:
                    raise InvalidRequest(
                        f"chunk {index} has no function of its own", do="Give exec_fn, or chunks of type Chunk."
                    )
                made, key = task, valid_id(chunk.chunk_id())
                data = chunk.to_bytes()
                if not isinstance(data, bytes):
                    raise InvalidRequest(f"to_bytes() of chunk {index} returned {shown(data)}", do="Return bytes.")
                item, content = data, content_digest(data)
            else:
                raise InvalidRequest(
                    f"item {index} is {shown(chunk)}, which is no chunk",
                    do="Give Chunk(function, args), or objects with chunk_id(), to_bytes() and from_bytes().",
                )
            if works is not None and (works.call is not made or works.needs != needs or len(works) >= most):
                yield works, contents
                works = None
            if works is None:
                works, contents = Works([], [], [], made, needs), []
            works.keys.append(key)
            works.indexes.append(index)
            works.items.append(item)
            contents.append(content)
            if time.monotonic() >= until_s:
                yield works, contents
                works, until_s = None, time.monotonic() + READ_FOR_S
        if works is not None:
            yield works, contents


def _checked(works: Iterator[tuple[Works, list[bytes]]]) -> Iterator[tuple[Works, list[bytes]]]:
    """All of them, read now. Raises where one id has two contents."""
    found = list(works)
    known: dict[ChunkId, bytes] = {}
    for some, contents in found:
        for key, index, content in zip(some.keys, some.indexes, contents, strict=True):
            if known.setdefault(key, content) != content:
                raise InvalidRequest(
                    f"chunk {index} has the id {key.hex()} of another chunk, with another content",
                    do="Derive chunk_id() from everything that changes the result. Nothing was begun.",
                )
    return iter(found)


def _callable(function: Any) -> Callable[..., Any]:
    if not callable(function):
        raise InvalidRequest(f"exec_fn is {shown(function)}, which cannot be called", do="Give a function of bytes.")
    return function  # type: ignore[no-any-return]


def _iterated(chunks: Any) -> Iterator[Any]:
    try:
        return iter(chunks)
    except TypeError:
        raise InvalidRequest(f"{shown(chunks)} holds no chunks", do="Give a list or another iterable.") from None


def _check_store(store: object) -> None:
    if not isinstance(store, JobOutputStore):
        raise InvalidRequest(
            f"{shown(store)} is no output store", do="Give MemoryOutputStore() or VolumeOutputStore(block_lease)."
        )
