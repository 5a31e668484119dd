"""Server-sent events: places, readiness, notices and ends, derived from the ledger's facts.

A reader who is too slow must cost the others nothing, so each stream has a bounded queue. When it overflows, what is
in it is thrown away and the reader is told ``lagged``: read the state again, nothing that matters was only in the
news. Places move whenever another request leaves the line, so they are looked at once a second at most and said only if
they changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

import msgspec

from sublet.lease.states import LeaseStatus
from sublet.office.access import Caller
from sublet.office.api.to_wire import lease_view, seconds
from sublet.office.driver import Driver
from sublet.office.ledger import events as ev
from sublet.office.ledger.budgets import reached
from sublet.office.ledger.queue_order import InOrder
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.values import LeaseId, TenantId
from sublet.wire.http import LeaseView, News

QUEUE_MAX: Final = 256
"""Events waiting for one slow reader."""
STREAMS_MAX: Final = 1024
"""Open streams of one office."""
STREAMS_TENANT_MAX: Final = 256
"""Open streams of one tenant."""
KEEP_ALIVE_S: Final = 15.0
"""A comment is sent after this long without news, so that a dead connection is noticed."""
PLACES_EVERY_S: Final = 1.0
PLACES_MAX: Final = 256
"""Places looked at in one go."""

_MOVES_THE_QUEUE: Final = (ev.Queued, ev.Granted, ev.Ungranted, ev.Ended, ev.Promised, ev.PromiseDropped)
_encode = msgspec.json.Encoder().encode


class EventStream:
    """One reader."""

    def __init__(self, caller: Caller, lease: LeaseId | None, everything: bool, tells_places: bool = True) -> None:
        self.caller = caller
        self.lease = lease
        self.everything = everything
        """An operator who asked for the news of all tenants."""
        self.tells_places = tells_places
        self.places: dict[LeaseId, tuple[int, str]] = {}
        self.closed = False
        self.lagged = 0
        self._queue: deque[bytes] = deque()
        self._ready = asyncio.Event()

    def wants(self, lease: LeaseRecord) -> bool:
        """Whether news of this lease belong here."""
        if self.lease is not None:
            return lease.id == self.lease
        return self.everything or lease.tenant == self.caller.tenant

    def put(self, frame: bytes) -> bool:
        """Queue a frame; False says that the reader was too slow and lost what was waiting."""
        fits = len(self._queue) < QUEUE_MAX
        if not fits:
            self._queue.clear()
            self.places.clear()
            self.lagged += 1
            self._queue.append(event_frame(News(what="lagged", reason="you read too slowly; read the state again")))
        self._queue.append(frame)
        self._ready.set()
        return fits

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self._ready.set()

    async def next(self) -> bytes | None:
        """What is waiting, all of it at once; None after the end."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._ready.wait()
        except TimeoutError:
            return b": still here\n\n"
        self._ready.clear()
        if self.closed and not self._queue:
            return None
        if self.closed:
            self._ready.set()
        frames = b"".join(self._queue)
        self._queue.clear()
        return frames


class EventHub:
    """Takes the driver's facts to the streams."""

    def __init__(self, driver: Driver, *, on_lagged: Callable[[], None]) -> None:
        self._driver = driver
        self._on_lagged = on_lagged
        self._streams: set[EventStream] = set()
        self._places_due: asyncio.TimerHandle | None = None
        self._closed = False
        driver.listen(self.note)

    def __len__(self) -> int:
        return len(self._streams)

    def count(self, tenant: TenantId) -> int:
        """Open streams of one tenant."""
        return sum(stream.caller.tenant == tenant for stream in self._streams)

    def open(self, caller: Caller, lease: LeaseId | None, everything: bool, tells_places: bool = True) -> EventStream:
        """A new stream; a stream of one lease begins with how it is now, so that nothing falls between."""
        stream = EventStream(caller, lease, everything, tells_places)
        self._streams.add(stream)
        if self._closed:
            stream.close()
        now = self._driver.now()
        for record in self._queued_for(stream):
            self._put_place(stream, record, now)
        if lease is not None:
            record = self._driver.ledger.state.leases[lease]
            if record.status is not LeaseStatus.QUEUED:
                what = "offer" if record.offered else _WHAT_IS[record.status]
                self._put(stream, News(what=what, lease=self._view(record, now)))
        return stream

    def leave(self, stream: EventStream) -> None:
        """Its reader went away."""
        self._streams.discard(stream)

    def cut(self, tenant: TenantId) -> None:
        """The rights of this tenant have changed: its streams end, also those that it opened for another tenant, and a
        client that may still read opens a new one."""
        for stream in self._streams:
            if tenant in (stream.caller.tenant, stream.caller.actor):
                stream.close()

    def close(self) -> None:
        """The office is closing: every stream ends."""
        self._closed = True
        for stream in self._streams:
            stream.close()
        if self._places_due is not None:
            self._places_due.cancel()

    def note(self, now: Now, events: Sequence[ev.Event]) -> None:
        """One batch of facts, in order."""
        if not self._streams:
            return
        moved = False
        for event in events:
            moved = moved or isinstance(event, _MOVES_THE_QUEUE)
            what = _WHAT.get(type(event))
            if what is not None:
                self._lease_news(what, event, now)
            elif isinstance(event, ev.NodeJoined | ev.NodeLost | ev.NodeReturned | ev.NodeDrained):
                node = event.inventory.node if isinstance(event, ev.NodeJoined) else event.node
                self._operator_news("node", f"{_VERB[type(event)]} {node}")
            elif isinstance(event, ev.BudgetReached):
                self._budget_news(event)
            elif isinstance(event, _HARDWARE):
                self._operator_news("fence", f"{_VERB[type(event)]} {event.resource}")
        if moved and self._places_due is None:
            self._places_due = asyncio.get_running_loop().call_later(PLACES_EVERY_S, self._send_places)

    def _lease_news(self, what: str, event: ev.Event, now: Now) -> None:
        lease = self._driver.ledger.state.leases.get(_lease_of(event))
        if lease is None:
            return
        if isinstance(event, ev.Granted):
            if lease.status is not LeaseStatus.GRANTED:
                return  # claimed, or over, within the same batch: that is the news
            what = "offer" if event.offered else "ready"
        readers = [s for s in self._streams if s.wants(lease)]
        if what == "renewed":
            readers = [s for s in readers if s.lease is not None]
        if readers:
            news = News(what=what, lease=self._view(lease, now), reason=_reason(event))
            frame = event_frame(news)
            for stream in readers:
                stream.places.pop(lease.id, None)
                self._put_frame(stream, frame)

    def _budget_news(self, event: ev.BudgetReached) -> None:
        """To the tenant whose it is, to those of the group, and to operators who asked for the news of all tenants."""
        state = self._driver.ledger.state
        budget = state.books.budgets.get(event.budget)
        if budget is None:
            return
        news = News(what="budget", reason=reached(budget, event))
        for stream in self._streams:
            tenant = stream.caller.tenant
            is_theirs = tenant == budget.tenant or state.group_of(tenant) == budget.group
            if stream.lease is None and (stream.everything or is_theirs):
                self._put(stream, news)

    def _operator_news(self, what: str, reason: str) -> None:
        for stream in self._streams:
            if stream.everything and stream.lease is None:
                self._put(stream, News(what=what, reason=reason))

    def _send_places(self) -> None:
        """Each place as one walk along the line finds it: there may be a stream for each request in it."""
        self._places_due = None
        now, ledger = self._driver.now(), self._driver.ledger
        position_of = {lease.id: at for at, lease in enumerate(InOrder(ledger.state, now.ns, ledger.policy), 1)}
        for stream in list(self._streams):
            for lease in self._queued_for(stream):
                self._put_place(stream, lease, now, position_of.get(lease.id))

    def _queued_for(self, stream: EventStream) -> Iterable[LeaseRecord]:
        if not stream.tells_places:
            return []
        state = self._driver.ledger.state
        if stream.lease is not None:
            watched = state.leases.get(stream.lease)
            return [watched] if watched is not None and watched.status is LeaseStatus.QUEUED else []
        return list(islice(state.queue_listing(None if stream.everything else stream.caller.tenant), PLACES_MAX))

    def _put_place(self, stream: EventStream, lease: LeaseRecord, now: Now, position: int | None = None) -> None:
        place = self._driver.ledger.place_of(lease.id, now, position)
        if place is None:  # it left the line just now, and that is news of its own
            return
        if stream.places.get(lease.id) == (place.position, place.reason):
            return
        estimate = None if place.estimate_ns is None else seconds(place.estimate_ns)
        view = self._view(lease, now)
        self._put(
            stream, News(what="place", lease=view, position=place.position, reason=place.reason, estimate=estimate)
        )
        stream.places[lease.id] = (place.position, place.reason)

    def _view(self, lease: LeaseRecord, now: Now) -> LeaseView:
        return lease_view(lease, now, self._driver.ledger.state.resources)

    def _put(self, stream: EventStream, news: News) -> None:
        self._put_frame(stream, event_frame(news))

    def _put_frame(self, stream: EventStream, frame: bytes) -> None:
        if not stream.put(frame):
            self._on_lagged()


def event_frame(news: News) -> bytes:
    """One event on the wire: JSON has no line breaks, so one ``data:`` line is enough."""
    return b"event: " + news.what.encode() + b"\ndata: " + _encode(news) + b"\n\n"


def _lease_of(event: ev.Event) -> LeaseId:
    lease: LeaseId = getattr(event, "lease")  # noqa: B009 - every fact in _WHAT has one; a union of ten says it worse
    return lease


def _reason(event: ev.Event) -> str:
    match event:
        case ev.Noticed():
            return event.notice.reason.value
        case ev.Ending() | ev.Ended():
            return event.end.reason.value
        case _:
            return ""


_WHAT: Final[dict[type, str]] = {
    ev.Granted: "ready",
    ev.Claimed: "active",
    ev.Renewed: "renewed",
    ev.Noticed: "notice",
    ev.Spared: "spared",
    ev.Attached: "attached",
    ev.Ending: "ending",
    ev.Ended: "ended",
}
_WHAT_IS: Final[dict[LeaseStatus, str]] = {
    LeaseStatus.GRANTED: "ready",
    LeaseStatus.ACTIVE: "active",
    LeaseStatus.NOTICED: "notice",
    LeaseStatus.ENDING: "ending",
    LeaseStatus.ENDED: "ended",
}
_HARDWARE: Final = ev.Quarantined | ev.Cleared | ev.ResourceFaulted | ev.ResourceLost | ev.ResourceReturned
_VERB: Final[dict[type, str]] = {
    ev.NodeJoined: "joined",
    ev.NodeLost: "lost",
    ev.NodeReturned: "returned",
    ev.NodeDrained: "drained",
    ev.Quarantined: "quarantined",
    ev.Cleared: "cleared",
    ev.ResourceFaulted: "fault of",
    ev.ResourceLost: "lost",
    ev.ResourceReturned: "returned",
}
