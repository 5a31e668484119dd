"""S4 and S6: nothing lies idle that a request could use, and no request waits for a lease that should make room.

Asked by a dumb second look at the books, in the cases that need no cleverness: one want, one device. What is only
passing (an order on its way, a look that comes once a second) is not held against the scheduler: the same thing must
have been so for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from sublet.lease.states import LeaseStatus, SliceState
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import kinds_of
from sublet.office.ledger.records import LeaseRecord, NodeRecord, Want
from sublet.values import Exclusivity, Kind, LeaseId, Tier
from tests.simulation.sharing import held_millis

if TYPE_CHECKING:
    from sublet.office.ledger.state import State

_S: Final = 1_000_000_000
PATIENCE_NS: Final = 8 * _S
_ON_THE_MOVE: Final = frozenset({LeaseStatus.NOTICED, LeaseStatus.GRANTED})


class IdleHands:
    """Remembers since when each waiting lease could have been served."""

    def __init__(self, fail: Callable[[str, str], None], policy: Policy) -> None:
        self._fail = fail
        self._policy = policy
        self._since: dict[tuple[str, LeaseId], int] = {}

    def forget(self) -> None:
        """The office was not able to act: begin anew."""
        self._since.clear()

    def look(self, state: State, now_ns: int) -> None:
        """Once a second, while the office is awake."""
        if not state.queued_count:
            self._since.clear()
            return
        old_ns = now_ns - self._policy.gang_patience_ns
        waiting = (lease for lease in state.queue_listing() if lease.asked_at_ns <= old_ns)
        patient = [lease for lease in waiting if _leases_are_in_its_way(state, lease)]
        served = [("S4", lease) for lease in _would_fit(state)] + [
            ("S6", lease) for lease in _goes_before(state, now_ns)
        ]
        found = {(rule, lease.id) for rule, lease in served if not _is_kept_back(lease, patient)}
        self._since = {key: self._since.get(key, now_ns) for key in found}
        for (rule, lease), since_ns in self._since.items():
            if now_ns - since_ns > PATIENCE_NS:
                what = "there is room for it" if rule == "S4" else "a spot lease runs on what it could have"
                self._fail(rule, f"{lease} has waited for {(now_ns - since_ns) / _S:.0f} s although {what}")


def _is_kept_back(lease: LeaseRecord, patient: Iterable[LeaseRecord]) -> bool:
    """By another request that has waited long enough to do so: of its tier or a higher one, for a thing of its kind."""
    kinds = kinds_of(lease)
    return any(
        other is not lease and other.tier.rank >= lease.tier.rank and not kinds.isdisjoint(kinds_of(other))
        for other in patient
    )


def _leases_are_in_its_way(state: State, lease: LeaseRecord) -> bool:
    """Whether it could be served somewhere if they all ended. Else it waits for a person and may keep no other back."""
    return any(all(_has(state, node, want) for want in lease.wants) for node in state.nodes.values() if not node.lost)


def _has(state: State, node: NodeRecord, want: Want) -> bool:
    rooms = []
    for resource in map(state.resources.__getitem__, node.resources):
        if resource.device.kind is want.kind and resource.state is SliceState.FREE:
            stays = [piece for piece in resource.slices.values() if piece.state is SliceState.QUARANTINED]
            if want.kind is not Kind.GPU or not stays:
                rooms.append(resource.device.capacity - sum(piece.part.amount for piece in stays))
    return sum(room >= want.amount for room in rooms) >= want.count


def _plain(state: State, kind: Kind) -> Iterator[LeaseRecord]:
    """Waiting requests for one thing of this kind, while nothing is promised to any."""
    if state.promises:
        return
    for lease in state.queue_listing():
        want = lease.wants[0]
        anywhere = not lease.selector and lease.resume is None
        if len(lease.wants) == 1 and want.kind is kind and want.count == 1 and anywhere and is_unbounded(state, lease):
            yield lease


def _is_within_floor(state: State, lease: LeaseRecord) -> bool:
    """Whether its group, without it, would have less than its floor."""
    group = state.books.groups.get(state.group_of(lease.tenant))
    own = sum(part.millis for part in lease.parts)
    return group is not None and held_millis(state, group.id) - own < 1000 * group.floor


def is_unbounded(state: State, lease: LeaseRecord) -> bool:
    """Whether no ceiling, budget or reservation may keep from it what is free."""
    group = state.books.groups.get(state.group_of(lease.tenant))
    is_bounded = group is not None and group.ceiling is not None
    return not (is_bounded or state.books.reserved or state.books.budgets)


def _would_fit(state: State) -> Iterator[LeaseRecord]:
    """S4: cores are free for it, or a whole device."""
    rooms: dict[Kind, list[int]] = {Kind.CPU: [], Kind.GPU: []}
    for resource in state.resources.values():
        kind, is_whole = resource.device.kind, not resource.slices
        if resource.state is SliceState.FREE and (kind is Kind.CPU or (kind is Kind.GPU and is_whole)):
            rooms[kind].append(resource.device.capacity - resource.used)
    for kind, free in rooms.items():
        most = max(free, default=0)
        yield from (lease for lease in _plain(state, kind) if lease.wants[0].amount <= most)


def _goes_before(state: State, now_ns: int) -> Iterator[LeaseRecord]:
    """S6: an interactive request for a device, a spot lease that has one for itself, and nothing on its way out."""
    gpus = [resource for resource in state.resources.values() if resource.device.kind is Kind.GPU]
    if any(piece.state is SliceState.TEARDOWN for gpu in gpus for piece in gpu.slices.values()):
        return
    victims = [
        state.leases[piece.lease]
        for gpu in gpus
        if gpu.state is SliceState.FREE and len(gpu.slices) == 1
        for piece in gpu.slices.values()
        if piece.state is SliceState.LEASED
    ]
    spots = [
        lease
        for lease in victims
        if lease.status is LeaseStatus.ACTIVE and lease.tier is Tier.SPOT and not _is_within_floor(state, lease)
    ]
    if not spots or any(lease.status in _ON_THE_MOVE for lease in state.leases.values()):
        return
    for lease in _plain(state, Kind.GPU):
        goes_first = lease.tier is Tier.INTERACTIVE and lease.wants[0].exclusivity is not Exclusivity.SHARED
        if goes_first and any(not state.is_cooling(lease.tenant, spot.tenant, now_ns) for spot in spots):
            yield lease
