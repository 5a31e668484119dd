"""Known ways to get a job of chunks wrong, put into the real parts while a seed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from sublet.jobs import core, volume_store
from sublet.jobs.core import ChunkBatch, Coordinator, RunFailed
from sublet.jobs.leases import Holdings
from sublet.jobs.states import Cause, RetryVerdict, When, verdict_of
from tests.simulation.mutant import Mutant, in_force


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force(MUTANTS[name].changes if name is not None else ())


def _whole_batch(original: Any) -> Any:
    """Every chunk of the batch is charged for the worker's death."""

    def lost(self: Coordinator, batch: ChunkBatch, failed: RunFailed, *, begun: bool, now_ns: int) -> None:
        if not batch.is_open:
            return
        rest = batch.rest
        self._close(batch)
        for work in rest.singles():
            self._run_failed(work, failed, When.EXECUTING, now_ns, 0)

    return lost


def _retried(original: Any) -> Any:
    def verdict(cause: Cause, when: When) -> RetryVerdict:
        return RetryVerdict.RETRY if cause is Cause.RAISED else verdict_of(cause, when)

    return verdict


def _overwritten(original: Any) -> Any:
    """The store takes whatever comes last."""

    def is_first(chunk: object, known: Mapping[Any, object]) -> bool:
        return True

    return is_first


def _late_taken(original: Any) -> Any:
    """A batch that was closed still brings results."""

    def results(self: Coordinator, batch: ChunkBatch, outcomes: Sequence[Any], now_ns: int) -> list[tuple[Any, Any]]:
        if batch.is_open:
            found: list[tuple[Any, Any]] = original(self, batch, outcomes, now_ns)
            return found
        works = batch.works.subset(0, len(outcomes))
        made = [type(one) is not RunFailed for one in outcomes[: len(works)]]
        return [(works.where(made), [one for one in outcomes[: len(works)] if type(one) is not RunFailed])]

    return results


def _index_trusted(original: Any) -> Any:
    """Whatever has an index is there."""

    def whole(names: Mapping[str, object]) -> list[int]:
        return sorted(int(name.removeprefix("index/")) for name in names if name.startswith("index/"))

    return whole


def _kept_after_close(original: Any) -> Any:
    """What is granted after the end is kept."""

    def granted(self: Holdings, needs: Any, lease: Any) -> bool:
        return True

    return granted


def _not_in_the_list(original: Any) -> Any:
    """The last lease is forgotten when all are given back."""

    def close(self: Holdings) -> list[Any]:
        found: list[Any] = original(self)
        return found[:-1]

    return close


MUTANTS: Final[dict[str, Mutant]] = {
    "B1": Mutant(
        "the whole batch is blamed for its worker", "distributed#5234", ((Coordinator, "lost", _whole_batch),)
    ),
    "B2": Mutant("a permanent error is retried", "lithops#1248", ((core, "verdict_of", _retried),)),
    "B3": Mutant(
        "a late result overwrites",
        "at-least-once queues",
        ((Coordinator, "results", _late_taken), (volume_store, "is_first", _overwritten)),
    ),
    "B4": Mutant(
        "resume trusts an index whose data is missing", "ours", ((volume_store, "whole_segments", _index_trusted),)
    ),
    "B5": Mutant("a lease that is granted late is kept", "lithops#1217", ((Holdings, "granted", _kept_after_close),)),
    "B6": Mutant("a lease is forgotten at the end", "ray#616", ((Holdings, "close", _not_in_the_list),)),
}
"""Name → what is wrong, where it was seen, and what it replaces."""
