"""One job from its first lease to the check that none is left; shared by `map`, `Executor` and `JobCoordinator`."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from sublet.client.fabric import Fabric, connect
from sublet.clock import SystemClock
from sublet.compute.options import options_of
from sublet.compute.posting import check_is_holder
from sublet.compute.worker_guest import Options
from sublet.errors import Disconnected, InvalidRequest, JobFailed
from sublet.jobs.chunks import Needs, needs_stated
from sublet.jobs.core import ChunkFailed, Coordinator, JobEvent, SavedChunk
from sublet.jobs.identity import ChunkId
from sublet.jobs.leases import LABEL, LeasePool, leases_left
from sublet.jobs.metrics import Metrics
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.running import LINGER_S, Delivered, PoolMaker, RunningJob
from sublet.jobs.states import FailReason
from sublet.jobs.stores import JobOutputStore
from sublet.values import NS_PER_S, Tier, parse_duration_ns, shown, valid_name

if TYPE_CHECKING:
    from sublet.wire.http import BillLine

Errors = Literal["raise", "collect"]
WANT_MAX: Final = 100_000
OPTIONS: Final = frozenset(("cwd", "env", "python", "timeout"))
"""What can be said of workers, as with ``lease.options``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """How a job is run, checked."""

    name: str
    is_named: bool
    want: int
    needs: Needs
    tier: str
    pay_priority: bool
    ttl: float | str | None
    policy: RetryPolicy
    collect: bool
    deadline_ns: int | None
    options: Options
    fabric: Fabric | None
    on_event: Callable[[JobEvent], object] | None


def terms_of(
    *,
    name: str | None = None,
    want: int = 64,
    cores: int = 1,
    memory: int | str | None = None,
    gpu: int | str | None = None,
    tier: str = "batch",
    pay_priority: bool = False,
    ttl: float | str | None = None,
    policy: RetryPolicy | None = None,
    errors: str = "raise",
    deadline: float | str | None = None,
    fabric: Fabric | None = None,
    on_event: Callable[[JobEvent], object] | None = None,
    options: Mapping[str, Any] | None = None,
) -> SessionTerms:
    """Checked before anything is acquired."""
    count: object = want
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= WANT_MAX:
        raise InvalidRequest(
            f"want cannot be {shown(want)}", do=f"Give the number of leases to use at most, from 1 to {WANT_MAX}."
        )
    if errors not in ("raise", "collect"):
        raise InvalidRequest(f"errors cannot be {shown(errors)}", do='Use "raise" or "collect".')
    given: object = policy
    if given is not None and not isinstance(given, RetryPolicy):
        raise InvalidRequest(f"{shown(policy)} is not a RetryPolicy", do="Give sublet.jobs.RetryPolicy(...).")
    if fabric is not None and not isinstance(fabric, Fabric):
        raise InvalidRequest(f"{shown(fabric)} is not a fabric", do="Give what sublet.connect() returns.")
    extra: Any = {} if options is None else options
    if not isinstance(extra, Mapping) or not extra.keys() <= OPTIONS:
        raise InvalidRequest(
            f"options cannot be {shown(options)}", do=f"Give a dict with some of: {', '.join(sorted(OPTIONS))}."
        )
    if tier not in {member.value for member in Tier}:
        raise InvalidRequest(f"tier cannot be {shown(tier)}", do='Use "batch", "spot" or "interactive".')
    if pay_priority not in (True, False):
        raise InvalidRequest(
            f"pay_priority={shown(pay_priority)} is neither True nor False",
            do="Write pay_priority=True, or leave it out.",
        )
    if pay_priority and gpu is None:
        raise InvalidRequest("pay_priority= needs gpu=: priority is paid for by the GPU", do="Leave pay_priority= out.")
    return SessionTerms(
        name=valid_name(name, "name") if name is not None else f"burst-{secrets.token_hex(4)}",
        is_named=name is not None,
        want=want,
        needs=needs_stated(cores, memory, gpu),
        tier=tier,
        pay_priority=pay_priority,
        ttl=ttl if ttl is None else parse_duration_ns(ttl, "ttl") / NS_PER_S,
        policy=RetryPolicy() if policy is None else policy,
        collect=errors == "collect",
        deadline_ns=None if deadline is None else parse_duration_ns(deadline, "deadline"),
        options=options_of(**extra),
        fabric=fabric,
        on_event=on_event,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What came of a job."""

    name: str
    aggregate: Any
    """What the aggregating function returned."""
    chunks_succeeded: int
    chunks_failed: int
    chunks_skipped: int
    """Their results were stored by an earlier run."""
    retries: int
    failures: tuple[ChunkFailed, ...]
    leases_before: int
    """Leases with this job's label when it began, as the office says."""
    leases_after: int
    """The same at its end, those that are still ending included; the office was asked."""
    leases_most: int
    """How many it held at once at most."""
    bill: BillLine | None
    """What its leases consumed, earlier runs of this name included; None where the office could not be asked."""
    metrics: Metrics
    history: tuple[tuple[int, int, int], ...]
    """(nanoseconds since the start, leases held, chunks done)."""
    duration_s: float


class JobSession:
    """A job that runs. Close it: that gives the leases back and asks the office whether one is left."""

    def __init__(
        self,
        terms: SessionTerms,
        deliver: Callable[[list[Delivered]], object],
        *,
        store: JobOutputStore | None = None,
        saved: Mapping[ChunkId, SavedChunk] | None = None,
        keeps_ids: bool = True,
        linger_s: float = LINGER_S,
        admit: Callable[[Any], bool] | None = None,
        phase: str = "",
        make_pool: PoolMaker | None = None,
    ) -> None:
        self.terms = terms
        self._clock = SystemClock()
        self._chance = random.Random()
        began_ns = self._clock.now_ns()
        self._deadline_ns = None if terms.deadline_ns is None else began_ns + terms.deadline_ns
        self._counts = [0, 0, 0, 0]
        self._failures: list[ChunkFailed] = []
        self._office = terms.fabric
        self._is_closed = False
        self.leases_before = self.leases_after = 0
        self.is_given_back = False
        """Whether the office has said that no lease of it is left."""
        self.bill: BillLine | None = None
        with contextlib.ExitStack() as stack:
            if make_pool is None:
                check_is_holder()  # else it would wait for leases that the burst it runs in has
                if self._office is None:
                    self._office = connect()
                    stack.callback(self._office.close)
                self.leases_before = leases_left(self._office, terms.name, wait=0)
                make_pool = self._pool
            core = self.core(saved=saved, keeps_ids=keeps_ids)
            self.running = RunningJob(
                core,
                make_pool,
                deliver,
                store=store,
                want=terms.want,
                options=terms.options,
                linger_s=linger_s,
                clock=self._clock,
                phase=phase,
                admit=admit,
                on_events=None if terms.on_event is None else self._emit,
            )
            stack.pop_all()

    def core(self, *, saved: Mapping[ChunkId, SavedChunk] | None = None, keeps_ids: bool = True) -> Coordinator:
        """A coordinator on these terms, for one phase."""
        return Coordinator(
            self.terms.policy,
            collect=self.terms.collect,
            deadline_ns=self._deadline_ns,
            chance=self._chance.random,
            saved=saved,
            keeps_ids=keeps_ids,
        )

    def fold_phase(self) -> list[ChunkFailed]:
        """Count a phase that is over; its failures."""
        core = self.running.core
        counts = core.counts
        for n, value in enumerate((counts.succeeded, counts.failed, counts.skipped, counts.retries)):
            self._counts[n] += value
        self._failures += core.failures
        return list(core.failures)

    def close(self) -> None:
        """Give everything back, and ask the office what is left. Harmless twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.running.close()
        finally:
            office = self._office
            if office is not None:
                with contextlib.suppress(Disconnected):
                    self.leases_after = leases_left(office, self.terms.name)
                    self.is_given_back = self.leases_after == 0
                    lines = office.bill(by=f"label:{LABEL}", own=True)
                    self.bill = next((line for line in lines if line.key == self.terms.name), None)
                if self.terms.fabric is None:
                    office.close()

    def result(self, aggregate: Any) -> JobResult:
        """After ``close``."""
        succeeded, failed, skipped, retries = self._counts
        running = self.running
        now_ns = self._clock.now_ns()
        return JobResult(
            name=self.terms.name,
            aggregate=aggregate,
            chunks_succeeded=succeeded,
            chunks_failed=failed,
            chunks_skipped=skipped,
            retries=retries,
            failures=tuple(self._failures),
            leases_before=self.leases_before,
            leases_after=self.leases_after,
            leases_most=running.leases_most,
            bill=self.bill,
            metrics=running.metrics,
            history=tuple((at_ns - running.began_ns, leases, done) for at_ns, leases, done in running.history),
            duration_s=(now_ns - running.began_ns) / NS_PER_S,
        )

    def _pool(self, on_lease: Callable[..., object], on_refusal: Callable[..., object]) -> LeasePool:
        assert self._office is not None
        return LeasePool(
            self._office,
            self.terms.name,
            tier=self.terms.tier,
            pay_priority=self.terms.pay_priority,
            ttl=self.terms.ttl,
            on_lease=on_lease,
            on_refusal=on_refusal,
        )

    def _emit(self, events: Sequence[JobEvent]) -> None:
        assert self.terms.on_event is not None
        for event in events:
            self.terms.on_event(event)


def raise_failure(failures: Sequence[ChunkFailed], *, as_itself: bool = False) -> None:
    """Raise the failure that stopped the job. ``as_itself``: as the exception of the chunk, where there is one."""
    first = next((one for one in failures if one.reason is not FailReason.CANCELLED), failures[0])
    if as_itself and first.error is not None and first.reason in (FailReason.RAISED, FailReason.REFUSED):
        first.error.add_note(f"This was chunk {first.index} ({first.chunk.hex()[:12]}).")
        raise first.error
    others = len(failures) - 1
    more = f", and {others} more chunks have no result" if others else ""
    cause = first.error if isinstance(first.error, BaseException) else None
    raise JobFailed(f"{first}{more}", failures=failures) from cause
