"""``sublet.jobs.map``: a function over many items, on as many leases as are free, as a lazy iterator."""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypedDict, TypeVar, Unpack

from sublet.compute.functions import PackedFunction
from sublet.errors import InvalidRequest
from sublet.jobs.core import ChunkFailed, Works
from sublet.jobs.identity import ID_BYTES, ChunkId, check_stable, function_digest, positioned_ids
from sublet.jobs.inside import Task, load_result
from sublet.jobs.metrics import Metrics
from sublet.jobs.running import Delivered, load_state
from sublet.jobs.session import Errors, JobResult, JobSession, SessionTerms, raise_failure, terms_of
from sublet.jobs.stores import JobOutputStore
from sublet.values import shown

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.jobs.core import JobEvent
    from sublet.jobs.policy import RetryPolicy
    from sublet.jobs.running import PoolMaker

R = TypeVar("R")
_BYTES: Final = {bytes}
TOP_UP_EVERY: Final = 256
"""Results between two looks whether more items are to be read."""
READ_FOR_S: Final = 0.005
"""Items of an iterable are read for so long before what was read goes to the workers, and results to the consumer."""


class ExecutorTerms(TypedDict, total=False):
    """How a job is run, but for what its class has an argument of its own for."""

    name: str | None
    """Names the burst: its leases, its bill, and what a store is for. With a store, the same name resumes."""
    cores: int
    """Cores of each lease (default: 1)."""
    memory: int | str | None
    """Memory of each lease."""
    gpu: int | str | None
    """GPU memory of each lease, instead of cores."""
    tier: str
    """Scheduling tier (default: ``"batch"``)."""
    pay_priority: bool
    """Go before requests of the tier that do not pay, for the office's rate. With ``gpu=`` only."""
    ttl: float | str | None
    """Time to live of each lease; renewed while the job runs."""
    errors: Errors
    """``"raise"`` stops at the first chunk that failed, ``"collect"`` goes on (default: ``"raise"``)."""
    deadline: float | str | None
    """How long the whole may take."""
    fabric: Fabric | None
    """The office to lease from (default: ``sublet.connect()``)."""
    on_event: Callable[[JobEvent], object] | None
    """Called with each event, on a thread of the job."""
    options: Mapping[str, Any] | None
    """As ``lease.options(...)`` takes them: ``timeout=`` of one chunk, ``python=``, ``env=``, ``cwd=``."""


class CoordinatorTerms(ExecutorTerms, total=False):
    """How a job is run, but for its policy."""

    want: int
    """Leases to hold at most (default: 64)."""


class JobTerms(CoordinatorTerms, total=False):
    """How a job is run."""

    policy: RetryPolicy | None
    """How chunks are retried."""


class MapIterator(Generic[R]):
    """Results of ``map``, as they are asked for. Nothing is acquired before the first is.

    Close it (or use it as a context manager) to stop early; leaving a ``for`` loop and dropping the iterator does as
    well. After the last result, or after ``close``, ``result`` tells what it came to.
    """

    def __init__(
        self,
        function: Callable[..., R],
        items: Iterable[Any],
        terms: SessionTerms,
        *,
        ordered: bool,
        store: JobOutputStore | None,
        make_pool: PoolMaker | None = None,
    ) -> None:
        self._feeder = _Feeder(function, items, terms, store, ordered, make_pool)
        self._results = self._feeder.results()

    def __iter__(self) -> Iterator[R]:
        return self._results  # directly: a million results pass here

    def __next__(self) -> R:
        value: R = next(self._results)
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop, keep what is stored, and give all leases back. Harmless twice."""
        self._results.close()

    def stop_soon(self) -> None:
        """From another thread: the results end here for the thread that waits for the next one."""
        self._feeder.stop_soon()

    @property
    def result(self) -> JobResult | None:
        """What it came to; None while it runs."""
        return self._feeder.result


class _Feeder:
    """Reads items and hands out results, both in the consumer's thread and no faster than it consumes."""

    def __init__(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        terms: SessionTerms,
        store: JobOutputStore | None,
        ordered: bool,
        make_pool: PoolMaker | None,
    ) -> None:
        self.result: JobResult | None = None
        self._terms = terms
        self._items = iter(items)
        self._has_all = isinstance(items, Sized)
        """A list or its like, whose items cost nothing to read: so many are read that all leases are asked for at once.
        Of what may be slow, or large, as much as the leases need that are held."""
        self._at_least = 2 * terms.want if self._has_all else 1
        self._task = PackedFunction(Task(function))
        self._counts_fuel = hasattr(function, "fuel")
        """A WASM tasklet, whose results say what they used."""
        self._store = store
        self._ordered = ordered
        self._make_pool = make_pool
        self._digest = function_digest(function) if store is not None else b""
        self._fed = 0
        self._given = 0
        self._is_read = False
        self._is_stopped = False
        self._is_complete = False
        """The job knows that all is read."""
        self._changed = threading.Condition()
        self._delivered: deque[list[Delivered]] = deque()
        self._early: dict[int, Sequence[Any]] = {}
        """What came before its turn, by the position of the first: results as bytes, an id (in a tuple) of one that
        the store has, or a failure."""
        self._metrics = Metrics()

    def results(self) -> Generator[Any, None, None]:
        first = self._read(self._at_least)
        if not first:  # nothing is acquired for nothing
            return
        saved = {} if self._store is None else load_state(self._store.begin(self._name))[1]
        session: JobSession | None = None
        self._task.prepare()
        try:
            session = JobSession(
                self._terms, self._deliver, store=self._store, saved=saved, keeps_ids=False, make_pool=self._make_pool
            )
            self._metrics = session.running.metrics
            session.running.feed(first)
            found: Sequence[Any] = ()
            while not (self._is_read and self._given >= self._fed) and not self._is_stopped:
                may_read_on = self._top_up(session, grows=len(found) > 0)
                found = self._next_ones(session, wait=not may_read_on)
                for start in range(0, len(found), TOP_UP_EVERY):
                    some = found[start : start + TOP_UP_EVERY]
                    self._given += len(some)
                    self._top_up(session, grows=True)
                    if self._counts_fuel or set(map(type, some)) != _BYTES:
                        yield from map(self._value, some)
                    else:
                        yield from map(pickle.loads, some)
        finally:
            if session is not None:
                if not (self._is_read and self._given >= self._fed):
                    session.running.stop()
                session.close()
                # its arrays may be large, and what holds it here is found by the collector alone
                self._task.close(is_unused=session.is_given_back)
                session.fold_phase()
                self.result = session.result(None)

    @property
    def _name(self) -> str:
        return self._terms.name if self._terms.is_named else ""

    def _top_up(self, session: JobSession, *, grows: bool) -> bool:
        """Read items where there is room for a good many. Whether there still is. ``grows``: results were consumed."""
        if not self._is_read and (room := self._room(session, grows)) and (works := self._read(room)):
            session.running.feed(works)
        if self._is_read and not self._is_complete:
            self._is_complete = True
            session.running.complete()
        return not self._is_read and self._room(session, grows) > 0

    def _room(self, session: JobSession, grows: bool) -> int:
        """How many items may be read now; 0 as long as it would be few."""
        window = session.running.window(self._at_least, grows=grows)
        room = window - (self._fed - self._given)
        return 0 if room < window // 4 and self._fed > self._given else room

    def _read(self, most: int) -> Works:
        """The next items, as chunks."""
        first = self._fed
        items: list[Any] = []
        if self._has_all:
            items += islice(self._items, most)
            self._is_read = len(items) < most
        else:
            until_s = time.monotonic() + READ_FOR_S
            self._is_read = True
            for item in self._items:
                items.append(item)
                if len(items) >= most or time.monotonic() >= until_s:
                    self._is_read = False
                    break
        self._fed = first + len(items)
        indexes = list(range(first, self._fed))
        if self._store is None:
            keys = [ChunkId(index.to_bytes(ID_BYTES, "big")) for index in indexes]
        else:
            keys = positioned_ids(self._digest, items, first)
        return Works(keys, indexes, items, self._task, self._terms.needs)

    def _deliver(self, finished: list[Delivered]) -> None:
        """On the job's thread."""
        with self._changed:
            self._delivered.append(finished)
            self._changed.notify()

    def stop_soon(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _next_ones(self, session: JobSession, *, wait: bool) -> Sequence[Any]:
        """What may be given now; none where only the room for items has changed, or where it is not to wait."""
        with self._changed:
            while wait and not self._delivered and not self._is_stopped:
                self._changed.wait()
            if self._is_stopped or not self._delivered:
                return ()
            delivered = self._delivered.popleft()
        if session.running.error is not None:
            raise session.running.error
        if not self._terms.collect:
            for one in delivered:
                if one.failure is not None:  # the first is what stopped the job; those that it cancelled come after it
                    raise_failure([one.failure], as_itself=True)
        ready: list[Any] = []
        for one in delivered:
            if self._ordered:
                self._put_early(one)
            else:
                ready += _outcomes(one)
        place = self._given
        while (next_ones := self._early.pop(place, None)) is not None:
            ready += next_ones
            place += len(next_ones)
        return ready

    def _put_early(self, one: Delivered) -> None:
        indexes, outcomes = one.indexes, _outcomes(one)
        first = indexes[0]
        if indexes == list(range(first, first + len(indexes))):  # as they were read, nearly always
            self._early[first] = outcomes
        else:
            self._early.update((index, (outcome,)) for index, outcome in zip(indexes, outcomes, strict=True))

    def _value(self, outcome: Any) -> Any:
        kind = type(outcome)
        if kind is bytes:
            value = load_result(outcome)
            if self._counts_fuel:
                self._metrics.fuel += getattr(value, "fuel", 0)
            return value
        if kind is ChunkFailed:
            return outcome
        assert self._store is not None
        return load_result(self._store.get(*outcome))


def _outcomes(one: Delivered) -> Sequence[Any]:
    if one.failure is not None:
        return (one.failure,)
    return [(key,) for key in one.keys] if one.results is None else one.results


def map_items(
    fn: Callable[[Any], R],
    items: Iterable[Any],
    *,
    ordered: bool = True,
    store: JobOutputStore | None = None,
    make_pool: PoolMaker | None = None,
    **terms: Unpack[JobTerms],
) -> MapIterator[R]:
    """Call ``fn`` for each item, on up to ``want`` leases; results come in order, or as they are made.

    Nothing is acquired before the first result is asked for, and items are read as results are consumed, a bounded
    number ahead. The job runs with the leases it gets and gives them back at its end. Equal items are different chunks:
    the position is part of the id. With a ``store`` (and a ``name``) results that are stored are not computed again. A
    chunk that failed raises its exception here; with ``errors="collect"`` a `ChunkFailed` stands in its place.
    """
    if not callable(fn):
        raise InvalidRequest(f"{shown(fn)} cannot be called", do="Give a function: map(f, items).")
    if isinstance(items, str | bytes) or not (hasattr(items, "__iter__") or hasattr(items, "__getitem__")):
        raise InvalidRequest(f"{shown(items)} cannot be mapped over", do="Give a list, a range or another iterable.")
    if store is not None and not isinstance(store, JobOutputStore):
        raise InvalidRequest(
            f"{shown(store)} is no output store", do="Give MemoryOutputStore() or VolumeOutputStore()."
        )
    found = terms_of(**terms)
    if store is not None and found.is_named:
        check_stable(fn, f"the function {getattr(fn, '__qualname__', '')}".strip())
    return MapIterator(fn, items, found, ordered=ordered, store=store, make_pool=make_pool)
