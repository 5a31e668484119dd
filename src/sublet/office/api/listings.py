"""The control API's listings: guests, and the queue with places and reasons.

Both are questions about many leases at once. Asked one by one they would be many messages, and asking after a waiting
lease is a sign of life of its holder, which an onlooker is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import Final

from sublet import background
from sublet.errors import Disconnected, SubletError
from sublet.office.access import Origin
from sublet.office.api.from_wire import flag, number
from sublet.office.api.processes import PeerConnection
from sublet.office.api.service import ApiCall, ApiReply, ApiService, json_reply
from sublet.office.api.to_wire import explain_answer, place_answer, rfc3339, seconds
from sublet.office.ledger.queue_order import InOrder
from sublet.wire.guests import GuestView, ListGuests
from sublet.wire.http import ConnectedView, GuestEntry, PlaceAnswer, TroubleView

COMMAND_MAX: Final = 2000
"""Characters of a command line that are shown."""
GUESTS_MAX: Final = 1000
"""Guests in one answer; for more ask again, ``after`` the last."""
NUMBER_MAX: Final = 1 << 53
PLACES_MAX: Final = 1000
"""Places in one answer; behind the next thousand there is no estimate either."""
ANSWER_S: Final = 3.0
"""How long the supervisor may take. It answers in a millisecond; a caller should not hang where it does not."""

TROUBLES_S: Final = 1.0
"""The same for what is shown beside other things."""


async def guests(service: ApiService, call: ApiCall) -> ApiReply:
    """What runs, oldest first; a tenant sees what is its own, an operator everything."""
    most = int(number(call.query, "limit", most=GUESTS_MAX)) or GUESTS_MAX
    request = ListGuests(ended=flag(call.query, "all"), after=int(number(call.query, "after", most=NUMBER_MAX)))
    if "lease" in call.query:
        call.id = call.query["lease"]
        request = replace(request, lease=service.lease(call).id)
    found: list[GuestEntry] = []
    if service.list_guests is None:
        return json_reply(found)
    me = call.caller
    try:
        async with asyncio.timeout(ANSWER_S):
            while len(found) < most:
                page = await service.list_guests(request)
                found += [_entry(guest) for guest in page.guests if me.operator or guest.tenant == me.tenant]
                if not page.more:
                    break
                request = replace(request, after=page.more)
    except TimeoutError:
        raise Disconnected("the supervisor of this machine does not answer", do="Try again in a moment.") from None
    return json_reply(found[:most])


async def troubles(service: ApiService, call: ApiCall) -> ApiReply:
    """What has failed in background loops of the office and of the supervisor."""
    return json_reply(await all_troubles(service))


async def all_troubles(service: ApiService) -> list[TroubleView]:
    """The same. A supervisor that does not answer is left out."""
    found = [
        TroubleView(
            part="office",
            loop=one.name,
            shortages=one.shortages,
            errors=one.errors,
            failing=one.failing,
            last=one.last,
        )
        for one in background.troubles()
    ]
    if service.list_troubles is not None:
        with contextlib.suppress(SubletError, TimeoutError):
            async with asyncio.timeout(TROUBLES_S):
                noted = (await service.list_troubles()).troubles
            found += [
                TroubleView(
                    part="supervisor",
                    loop=one.loop,
                    shortages=one.shortages,
                    errors=one.errors,
                    failing=one.failing,
                    last=one.last,
                )
                for one in noted
            ]
    return found


async def connections(service: ApiService, call: ApiCall) -> ApiReply:
    """Which processes of other users are connected over the shared socket."""
    found: dict[Origin, list[PeerConnection]] = {}
    for peer in service.connected:
        found.setdefault(peer.origin, []).append(peer)
    return json_reply(
        [
            ConnectedView(
                uid=origin.uid,
                pid=origin.pid or None,
                tenants=sorted(set[str]().union(*(one.tenants for one in peers))),
                connections=len(peers),
                since=rfc3339(min(one.since_wall_ns for one in peers)),
            )
            for origin, peers in sorted(found.items(), key=lambda item: (item[0].uid or 0, item[0].pid))
        ]
    )


async def queue(service: ApiService, call: ApiCall) -> ApiReply:
    """The queue, the next request first."""
    most = int(number(call.query, "limit", most=PLACES_MAX)) or PLACES_MAX
    ledger, now, caller = service.driver.ledger, service.driver.now(), call.caller
    in_line = InOrder(ledger.state, now.ns, ledger.policy)
    own = (
        (position, lease.id)
        for position, lease in enumerate(in_line, 1)
        if caller.operator or lease.tenant == caller.tenant
    )
    found: list[PlaceAnswer] = []
    for position, lease in list(itertools.islice(own, most)):
        await service.turn(caller.tenant)  # an estimate takes part of a millisecond in a long line
        now = service.driver.now()
        place = ledger.place_of(lease, now, position)
        if place is not None:
            found.append(place_answer(place, service.view(place.lease, now)))
    return json_reply(found)


async def explain(service: ApiService, call: ApiCall) -> ApiReply:
    """Why a request waits, or what may end a lease. Looking is no sign of life of its holder."""
    await service.driver.wait_confirmed(service.lease(call).id)
    lease, now, ledger = service.lease(call), service.driver.now(), service.driver.ledger
    caller = None if call.caller.operator else call.caller.tenant
    return json_reply(explain_answer(ledger.explain(lease, now), ledger.state, now, caller))


def _entry(guest: GuestView) -> GuestEntry:
    """In the units of every document."""
    return GuestEntry(
        id=guest.id,
        lease=guest.lease,
        epoch=guest.epoch,
        tenant=guest.tenant,
        name=guest.name,
        argv=_beginning(guest.argv),
        profile=guest.profile.value,
        state=guest.state,
        pid=guest.pid,
        processes=guest.processes,
        started_at=rfc3339(guest.started_at) if guest.started_at else None,
        ended_at=rfc3339(guest.ended_at) if guest.ended_at else None,
        exit_code=None if guest.exit_code < 0 else guest.exit_code,
        reason=guest.reason or None,
        cpu=seconds(guest.cpu_ns),
        peak_bytes=guest.peak_bytes,
        log_bytes=guest.log_bytes,
        log_dropped=guest.log_dropped,
        number=guest.number,
    )


def _beginning(argv: tuple[str, ...]) -> list[str]:
    """A command line may have megabytes, and two thousand of them are listed."""
    shown: list[str] = []
    left = COMMAND_MAX
    for word in argv:
        if len(word) > left:
            return [*shown, word[:left] + "…"]
        shown.append(word)
        left -= len(word) + 1
    return shown
