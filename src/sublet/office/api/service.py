"""The broker as handlers of the control API use it, and the types of a call and its reply."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from sublet.background import start_task
from sublet.errors import CapacityExceeded, NotFound, SubletError, Unauthorized, Unsupported
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LeaseStatus, SliceState
from sublet.office.access import AccessList, Caller, Origin
from sublet.office.api.processes import PeerConnection
from sublet.office.api.signing import Signer
from sublet.office.api.sse import STREAMS_MAX, STREAMS_TENANT_MAX, EventHub, EventStream
from sublet.office.api.to_wire import lease_view
from sublet.office.counting import Counting
from sublet.office.driver import Driver
from sublet.office.journal.audit import AuditRecord
from sublet.office.journal.history import AuditHistory
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.commands import Command, Revoke, Tick
from sublet.office.ledger.rate_limits import RateLimits, TooMany
from sublet.office.ledger.records import NO_QUOTA, LeaseRecord, Now, ProcessRecord
from sublet.office.policy_file import PolicyLimits
from sublet.office.shared_socket import KEYS_MAX, SharedSocket, TooManyOfUser
from sublet.values import LeaseId, TenantId
from sublet.wire.guests import Guests, ListGuests, Troubles
from sublet.wire.http import AuditReport, LeaseView

JSON: Final = b"application/json"
REFUSAL_EVERY_S: Final = 0.02
"""A tenant, or a user, beyond its rate hears of it this often, on however many connections it asks: a client that asks
again at once would otherwise take the office's one loop, and a core for itself, with requests that come to nothing."""
REFUSAL_MAX_S: Final = 1.0
"""The longest that one of them waits for its refusal."""
_CLOSES: Final = "the office is closing"
_encode = msgspec.json.Encoder().encode


class Archive(Protocol):
    """What the journal can tell about the past."""

    def head(self) -> str:
        """The newest link of the audit chain."""

    def records(self, after: int = 0) -> Iterator[AuditRecord]:
        """The audited entries after this one."""

    def latest(self, most: int, naming: str = "") -> list[AuditRecord]:
        """The newest audited entries, oldest first; may run in a thread of its own."""

    def verify(self) -> AuditReport:
        """Walk the chain; may run in a thread of its own."""

    def backup(self, path: Path) -> int:
        """Copy everything to a new file; its size. May run in a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeIdentity:
    """What the office says of itself."""

    pid: int
    version: str
    home: Path
    embedded: bool
    started_ns: int
    started_wall_ns: int
    host_gpus: str = ""
    """The host devices it was told to have, as `sublet up` takes them; empty if none were declared."""
    shared: str = ""
    """The folder of the sockets for every user of the machine; empty if there are none."""


@dataclass(slots=True)
class ApiCall:
    """One request, checked as far as its route says: who calls, which object, what query, which body."""

    caller: Caller
    id: str
    query: dict[str, str]
    body: Any
    gone: Callable[[], Awaitable[None]]
    """Returns when the caller has closed the connection."""
    recheck: Callable[[], None]
    """Raises ``Unauthorized`` where the caller has lost the rights that this call began with."""
    peer: PeerConnection | None = None
    """The process at the other end, where it is one of this machine."""

    def process(self, holder_pid: int | None) -> ProcessRecord | None:
        """The process that a lease is bound to: the caller's, if it asks for that by its own pid and can be seen."""
        return None if holder_pid is None or self.peer is None else self.peer.process(holder_pid)


class ApiReply(NamedTuple):
    """What goes back: a body, or a stream of events."""

    status: int
    body: bytes
    content_type: bytes = JSON
    stream: EventStream | None = None


class CommandCall(NamedTuple):
    """A call that comes to exactly one command. Its server decides how to wait for the answer."""

    command: Command
    render: Callable[[Answer, Now], Any]
    """The outer form of the answer, made at the moment of the decision."""
    finish: Callable[[Any], ApiReply]
    """The reply, made of that form once it may be known."""
    without: Callable[[Any, Mapping[LeaseId, SubletError]], Any] | None = None
    """What is left of that form where agents did not take some of the leases that it speaks of; else that is an
    error."""


def json_reply(value: object, status: int = 200) -> ApiReply:
    """A message, encoded."""
    return ApiReply(status, _encode(value))


async def _no_file(caller: Caller) -> PolicyLimits:
    raise Unsupported("this office has no file of limits")


@dataclass(kw_only=True)
class ApiService:
    """The parts that handlers need."""

    driver: Driver
    identity: OfficeIdentity
    access: AccessList
    signer: Signer
    archive: Archive
    stop: Callable[[], None]
    """Ends the office, in order; leases stay as they are."""
    rates: Rates = field(default_factory=Rates)
    limits: PolicyLimits = field(default_factory=PolicyLimits)
    """What the operator's policy says."""
    rate_limits: RateLimits = field(init=False)
    shared: SharedSocket = field(default_factory=SharedSocket)
    """What holds for those who come over the shared sockets."""
    connected: dict[PeerConnection, None] = field(default_factory=dict)
    """Open connections over the shared control socket, oldest first."""
    list_guests: Callable[[ListGuests], Awaitable[Guests]] | None = None
    """What runs, of all tenants; None where nothing can run."""
    list_troubles: Callable[[], Awaitable[Troubles]] | None = None
    """What has failed in the supervisor; None where there is none."""
    supervisor_silent_s: Callable[[], float] = lambda: 0.0
    """For how long the supervisor has answered nothing; 0 while it turns."""
    why_no_room: Callable[[], str] = lambda: ""
    """Why the disk has no room for new leases; empty where it has."""
    cut_off: Callable[[TenantId, int], None] = lambda tenant, generation: None
    """The rights of this tenant are of this generation now: data connections of older ones are cut."""
    apply_limits: Callable[[Caller], Awaitable[PolicyLimits]] = _no_file
    """Reads the operator's limits again for this caller, and has all parts go by them."""
    document: Callable[[], bytes] = bytes
    """The OpenAPI document; the server of the routes puts it here."""
    hub: EventHub = field(init=False)
    counting: Counting = field(init=False)
    _turns: dict[TenantId, deque[asyncio.Future[None]]] = field(init=False, default_factory=dict)
    """Of tenants that have had a request carried out in this turn of the loop: what waits for the next."""
    _refused_at_s: dict[TenantId | int | None, float] = field(init=False, default_factory=dict)
    """When the last refusal of each tenant, or user of the machine, beyond its rate is answered, by the clock of the
    loop."""
    requests: int = 0
    """Since the start: tells a reader whether clients still call."""
    closing: bool = False
    ends_for_good: bool = False
    """Its end was asked for and is to leave nothing: the next office does not come back as this one was started."""
    billing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    history: AuditHistory | None = field(default=None, init=False)
    """The past, as far as a bill has read it."""
    _stop_when_empty: bool = field(default=False, init=False)
    _watchers: dict[LeaseId, set[asyncio.Future[None]]] = field(default_factory=dict, init=False)

    def drain_and_stop(self, *, notice: bool, by: TenantId) -> None:
        """End every lease (with the notice of its tier, or at once), empty the queue, then end the office."""
        state, policy = self.driver.ledger.state, self.driver.ledger.policy
        for lease in list(state.leases.values()):
            if lease.status is LeaseStatus.QUEUED:
                self.driver.post(Revoke(by=by, lease=lease.id, detail=_CLOSES))
            elif is_live(lease) and (lease.status is not LeaseStatus.NOTICED or not notice):
                notice_ns = policy.notice_for_ns(lease.tier) if notice else 0
                self.driver.post(Revoke(by=by, lease=lease.id, notice_ns=notice_ns, detail=_CLOSES))
        self._stop_when_empty = True
        self.driver.post(Tick())
        if not state.live_count and not state.queued_count:  # then nothing will happen that could tell us
            self.stop()

    def __post_init__(self) -> None:
        self.counting = Counting(self.driver)
        self.rate_limits = RateLimits(self.limits.rates())
        self.hub = EventHub(self.driver, on_lagged=self.counting.metrics.lagged.inc)
        for tenant in self.driver.ledger.state.tenants.values():
            self.access.put(tenant)
        self.driver.listen(self._note)
        self.driver.on_limit = self.limit

    def set_limits(self, limits: PolicyLimits) -> None:
        """These are the operator's limits from now on."""
        self.limits = limits
        self.rate_limits.set_rates(limits.rates())
        self.shared.set_limits(limits.shared())

    def lease(self, call: ApiCall, *, operator_too: bool = True) -> LeaseRecord:
        """The lease of the call, if the caller may know of it. Another tenant's id and no id at all look the same."""
        lease = self.driver.ledger.state.leases.get(LeaseId(call.id))
        if lease is None or not (lease.tenant == call.caller.tenant or (operator_too and call.caller.operator)):
            raise NotFound(f"there is no lease {call.id[:64]}", do="`sublet lease ls` shows yours.")
        return lease

    def view(self, lease: LeaseRecord, now: Now) -> LeaseView:
        return lease_view(lease, now, self.driver.ledger.state.resources)

    async def changed(self, lease: LeaseRecord, after: str, call: ApiCall, timeout_s: float) -> None:
        """Until the status of the lease differs from ``after``, the time is over or the caller has gone."""
        presence = self.driver.presence
        own = lease.tenant == call.caller.tenant
        if own:
            presence.connected(lease.id)
        try:
            until_s = asyncio.get_running_loop().time() + timeout_s
            await self._watch([lease], lambda lease: lease.status.value != after, call, until_s)
        finally:
            if own:
                presence.disconnected(lease.id, self.driver.clock.now_ns())

    async def ended(self, leases: Sequence[LeaseRecord], call: ApiCall, until_s: float) -> bool:
        """Until all of them have ended, the time is over (by the clock of the loop) or the caller has gone. Whether
        they have."""
        return await self._watch(leases, lambda lease: lease.status is LeaseStatus.ENDED, call, until_s)

    async def _watch(
        self, leases: Sequence[LeaseRecord], is_so: Callable[[LeaseRecord], bool], call: ApiCall, until_s: float
    ) -> bool:
        """One lease after the other: what a call waits for costs no more than a look at each."""
        loop = asyncio.get_running_loop()
        gone = start_task("request_end", call.gone)
        try:
            for lease in leases:
                while not is_so(lease):
                    left_s = until_s - loop.time()
                    if left_s <= 0 or gone.done() or self.closing:
                        return False
                    future: asyncio.Future[None] = loop.create_future()
                    watchers = self._watchers.setdefault(lease.id, set())
                    watchers.add(future)
                    await asyncio.wait((future, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    watchers.discard(future)
                    if not watchers:
                        self._watchers.pop(lease.id, None)
                    call.recheck()
            return True
        finally:
            gone.cancel()

    def check_streams(self, caller: Caller) -> None:
        """Whether one more event stream may be opened."""
        if len(self.hub) >= STREAMS_MAX:
            self.limit("streams")
            raise CapacityExceeded(f"{STREAMS_MAX} event streams are open", do="Close one, or ask without a stream.")
        if self.hub.count(caller.tenant) >= STREAMS_TENANT_MAX:
            self.limit("streams_of_tenant")
            raise CapacityExceeded(f"you have {STREAMS_TENANT_MAX} event streams open", do="Close one of them.")

    def count_leases(self, tenant: TenantId, count: int = 1) -> None:
        """So many leases of this tenant are to begin; raises if it has begun too many of late."""
        try:
            self.rate_limits.lease(tenant, self.driver.clock.now_ns(), count)
        except TooMany:
            self.limit("leases_per_hour_of_tenant")
            raise

    def count_requests(self, tenant: TenantId, count: int = 1, *, keeps: bool) -> None:
        """So many requests of this tenant came, or one message with so many in it; raises if they were too many."""
        try:
            state = self.driver.ledger.state
            group, known = state.group(state.group_of(tenant)), state.tenants.get(tenant)
            own, of_group = (quota.requests_per_minute for quota in (known.quota if known else NO_QUOTA, group.quota))
            self.rate_limits.request(
                tenant,
                self.driver.clock.now_ns(),
                count,
                keeps=keeps,
                own=own,
                group=None if of_group is None else (group.id, of_group),
            )
        except TooMany as error:
            self.limit("requests_of_group" if error.of_group else "requests_of_tenant")
            raise

    def limit(self, name: str) -> None:
        """A named limit was hit: it is counted, the caller says so."""
        self.counting.metrics.limits.inc(name)

    def caller(
        self, authorization: bytes | None, origin: Origin, *, as_tenant: bool = False, keeps: bool = False
    ) -> Caller:
        """The caller (``AccessList.caller``), counted and noted where it comes over a shared socket. ``keeps``: it asks
        to keep, or to give back, what it has; that is not counted, since a renewal that is refused would end a lease.
        """
        if not origin.shared:
            return self.access.caller(authorization, origin, as_tenant=as_tenant)
        now_ns = self.driver.clock.now_ns()
        if not keeps:
            self.count_shared(origin, now_ns)
        try:
            found = self.access.caller(authorization, origin, as_tenant=as_tenant)
        except Unauthorized as error:
            self.shared.refused(origin, error, now_ns)
            raise
        self.shared.known(origin, found.tenant, now_ns)
        return found

    async def turn(self, tenant: TenantId) -> None:
        """Wait until a request of this tenant may be carried out again: one in every second turn of the loop. So a
        tenant that asks a thousand times at one moment, or for a long list, waits for itself, and others are answered
        in between. With one in each turn, two of its requests were carried out before another tenant's was answered.
        """
        loop = asyncio.get_running_loop()
        waiting = self._turns.get(tenant)
        if waiting is None:
            self._turns[tenant] = deque()
            loop.call_soon(loop.call_soon, self._next_turn, tenant)
        else:
            mine: asyncio.Future[None] = loop.create_future()
            waiting.append(mine)
            await mine

    def _next_turn(self, tenant: TenantId) -> None:
        waiting, loop = self._turns[tenant], asyncio.get_running_loop()
        while waiting:
            next_one = waiting.popleft()
            if not next_one.done():  # its caller may have gone
                next_one.set_result(None)
                loop.call_soon(loop.call_soon, self._next_turn, tenant)
                return
        del self._turns[tenant]

    async def pace_refusal(self, error: TooMany | TooManyOfUser) -> None:
        """Wait until this tenant, or user, may hear of one more request that was beyond its rate."""
        whose = error.tenant if isinstance(error, TooMany) else error.uid
        now_s = asyncio.get_running_loop().time()
        next_s = self._refused_at_s.pop(whose, 0.0) + REFUSAL_EVERY_S
        at_s = self._refused_at_s[whose] = min(max(now_s, next_s), now_s + REFUSAL_MAX_S)
        if len(self._refused_at_s) > KEYS_MAX:
            del self._refused_at_s[next(iter(self._refused_at_s))]
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)

    def check_tenant(self, tenant: TenantId, origin: Origin, *, as_tenant: bool = False) -> None:
        """See that this process may show a lease's token of this tenant (``AccessList.check``); counted and noted the
        same way."""
        if not origin.shared:
            self.access.check(tenant, origin, as_tenant=as_tenant)
            return
        now_ns = self.driver.clock.now_ns()
        self.count_shared(origin, now_ns)
        try:
            self.access.check(tenant, origin, as_tenant=as_tenant)
        except Unauthorized as error:
            self.shared.refused(origin, error, now_ns)
            raise
        self.shared.known(origin, tenant, now_ns)

    def count_shared(self, origin: Origin, now_ns: int) -> None:
        """A request came over a shared socket, whosever it is."""
        try:
            self.shared.on_request(origin, now_ns)
        except TooManyOfUser:
            self.limit("shared_requests")
            raise

    def close(self) -> None:
        """Every caller that waits for news is told that there will be none."""
        self.closing = True
        self.hub.close()
        for watchers in list(self._watchers.values()):
            _wake(watchers)

    @property
    def draining(self) -> bool:
        """Whether the office ends once the last lease has ended: then it grants nothing more."""
        return self._stop_when_empty

    @property
    def in_use(self) -> bool:
        """Whether there is a lease, a queue entry, a teardown or a quarantine. A volume that is kept does not count."""
        state = self.driver.ledger.state
        return bool(state.live_count or state.queued_count) or any(
            resource.state is SliceState.QUARANTINED
            or any(piece.state is not SliceState.RETAINED for piece in resource.slices.values())
            for resource in state.resources.values()
        )

    def capability(self, lease: LeaseRecord, caller: Caller) -> tuple[str, int]:
        """A fresh capability token for a lease, and its expiry (nanoseconds of the wall clock). One for an operator
        who acts for the tenant is good for as long as the rights of both are unchanged."""
        generation = self.access.generation(lease.tenant)
        of_actor = 0 if caller.actor is None else self.access.generation(caller.actor)
        if generation is None or of_actor is None:
            raise Unauthorized(f"tenant {lease.tenant} is disabled", do="Ask the operator of this office.")
        actor = None if caller.actor is None else (caller.actor, of_actor)
        return self.signer.mint(lease, self.driver.now(), generation, actor)

    def _cut_off(self, tenant: TenantId, generation: int) -> None:
        """Its news here, what it waits for, and its connections on the machine."""
        self.hub.cut(tenant)
        for watchers in self._watchers.values():
            _wake(watchers)
        self.cut_off(tenant, generation)

    def _note(self, now: Now, events: Sequence[ev.Event]) -> None:
        if self._stop_when_empty and not self.driver.ledger.state.live_count:
            self.stop()
        for event in events:
            if type(event) is ev.TenantSet:
                if self.access.put(event.tenant):
                    self._cut_off(event.tenant.id, event.tenant.generation)
            elif type(event) is ev.TenantRemoved:
                self.access.remove(event.tenant)
                self._cut_off(event.tenant, event.generation)
            elif self._watchers and type(event) is not ev.Queued:  # whose lease is new, and has no watcher
                _wake(self._watchers.get(getattr(event, "lease", None), ()))  # type: ignore[arg-type]


def _wake(watchers: Iterable[asyncio.Future[None]]) -> None:
    for future in watchers:
        if not future.done():
            future.set_result(None)


def is_live(lease: LeaseRecord) -> bool:
    """Whether it holds, or may still hold, hardware."""
    return lease.status not in (LeaseStatus.QUEUED, LeaseStatus.ENDED)
