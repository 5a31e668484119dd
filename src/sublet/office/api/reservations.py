"""The control API's reservations: takes their rules, and computes the instants."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from sublet.errors import InvalidRequest, NotFound
from sublet.office.api.service import ApiCall, ApiReply, ApiService, json_reply
from sublet.office.api.to_wire import rfc3339
from sublet.office.driver import Driver
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import Now, ReservationRecord, Span
from sublet.office.ledger.reservation_times import AHEAD_DAYS, instants, parse_rule, zone_of
from sublet.office.ledger.reservations import ready
from sublet.office.ledger.state import State
from sublet.values import NS_PER_S, GroupId, ReservationId, shown, valid_name
from sublet.wire.http import ReservationRequest, ReservationView, SpanView

_log = logging.getLogger(__name__)
_SHOWN: Final = 3
"""Times to come that are shown of each."""
_ENOUGH_NS: Final = AHEAD_DAYS // 2 * 86_400 * NS_PER_S


async def reservations(service: ApiService, call: ApiCall) -> ApiReply:
    """By name, with the times to come and the devices that are kept now."""
    books = service.driver.ledger.state.books
    return json_reply([_view(service, books.reservations[name]) for name in sorted(books.reservations)])


async def add(service: ApiService, call: ApiCall) -> ApiReply:
    """Devices for a group at stated times."""
    request: ReservationRequest = call.body
    spans = spans_of(request.when, request.zone, service.driver.now())
    record = ReservationRecord(
        id=ReservationId(valid_name(request.id, "reservation name")),
        group=GroupId(valid_name(request.group, "group name")),
        gpus=request.gpus,
        model=request.model,
        when=" ".join(request.when.split()),
        zone=request.zone,
        spans=spans,
    )
    command = cmd.SetReservation(by=call.caller.tenant, peer=call.caller.peer, reservation=record)
    await service.driver.submit(command)
    return json_reply(_view(service, record), 201)


async def remove(service: ApiService, call: ApiCall) -> ApiReply:
    """What is kept for it is open to every group again. The answer is how it was."""
    name = ReservationId(call.id)
    known = service.driver.ledger.state.books.reservations.get(name)
    if known is None:
        raise NotFound(f"there is no reservation {shown(call.id)}", do="`sublet reservation ls` shows all.")
    view = _view(service, known)
    await service.driver.submit(cmd.RemoveReservation(by=call.caller.tenant, peer=call.caller.peer, reservation=name))
    return json_reply(view)


def spans_of(when: str, zone_name: str, now: Now) -> tuple[Span, ...]:
    """The instants to come of a rule. Raises ``InvalidRequest``, also for one of a single day on which it is not."""
    rule, zone = parse_rule(when), zone_of(zone_name)
    spans = instants(rule, zone, now.wall_ns)
    if rule.is_once and not spans and not instants(rule, zone, 0):
        raise InvalidRequest(
            f"{shown(when)} does not take place: the clock in {zone_name} jumps over it",
            do="Choose a time that comes on that day.",
        )
    return spans


def plan_recurrences(driver: Driver) -> None:
    """Work out the instants to come of every rule: once as the office starts, since its time-zone database may be a
    newer one by now, and from then on whenever a reservation is over and not much is known of what follows."""

    def note(now: Now, events: Sequence[ev.Event]) -> None:
        for event in events:
            if type(event) is ev.ReservationOver and event.reservation in driver.ledger.state.books.reservations:
                known = driver.ledger.state.books.reservations[event.reservation]
                if _end(known.spans) - now.wall_ns < _ENOUGH_NS:
                    _renew(driver, known, now)

    for known in driver.ledger.state.books.reservations.values():
        _renew(driver, known, driver.now())
    driver.listen(note)


def _renew(driver: Driver, known: ReservationRecord, now: Now) -> None:
    try:
        new = instants(parse_rule(known.when), zone_of(known.zone), now.wall_ns)
    except InvalidRequest as error:  # such as a machine whose time-zone database was removed
        _log.warning("reservation %s goes on with the times that are known: %s", known.id, error)
        return
    old = [span for span in known.spans if span.end_ns > now.wall_ns]
    if tuple(old) != new[: len(old)] or _end(new) > _end(known.spans) + _ENOUGH_NS // 4:
        begun = tuple(span for span in old if span.start_ns <= now.wall_ns)  # one that goes on stays as it is
        later = tuple(span for span in new if span.start_ns > now.wall_ns and span.start_ns >= _end(begun))
        driver.post(cmd.SetReservation(reservation=msgspec.structs.replace(known, spans=begun + later), is_new=False))


def _end(spans: Sequence[Span]) -> int:
    return spans[-1].end_ns if spans else 0


def _view(service: ApiService, record: ReservationRecord) -> ReservationView:
    state: State = service.driver.ledger.state
    wall_ns = service.driver.now().wall_ns
    reserved = state.books.reserved.get(record.id)
    spans = [span for span in record.spans if span.end_ns > wall_ns][:_SHOWN]
    return ReservationView(
        id=record.id,
        group=record.group,
        gpus=record.gpus,
        model=record.model,
        when=record.when,
        zone=record.zone,
        times=[SpanView(begins_at=rfc3339(start), ends_at=rfc3339(end)) for start, end in spans],
        state=_state(record, wall_ns, state),
        devices=[] if reserved is None else list(reserved.resources),
        ready=0 if reserved is None else ready(state, record, reserved),
    )


def _state(record: ReservationRecord, wall_ns: int, state: State) -> str:
    reserved = state.books.reserved.get(record.id)
    if reserved is None:
        return "over" if not record.spans or record.spans[-1].end_ns <= wall_ns else "planned"
    if not reserved.began:
        return "clearing"
    return "lent" if reserved.lends else "kept"
