"""Watches the memory of cards: ends only guests whose lease uses more than it leased.

A card does not let itself be capped for a process, so this is measured: the office hands on what the driver says each
process has, every few seconds. What a CUDA context takes for itself is allowed besides, for each process. Of a lease
that has too much, the guest with the most on that card is warned, and ended if the next look finds no less than it may;
if it was not that one alone, the look after that sees it. Until then it can have more than it may, and its neighbours
less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from sublet.values import MIB, GuestId, LeaseId, format_size
from sublet.wire.cards import CardUse
from sublet.wire.orders import Part, card_uuid

CONTEXT_BYTES: Final = 768 * MIB
"""What a process may have on a card beside what it allocates: its context, its kernels, what libraries keep."""
_ASKED: Final = "it is ended if it has not freed some in a few seconds"


class Owner(Protocol):
    """Whose a process is."""

    @property
    def id(self) -> GuestId: ...

    @property
    def lease(self) -> LeaseId: ...


class Offender(NamedTuple):
    """A guest to be ended, and what it is told."""

    guest: GuestId
    line: str
    is_warned: bool
    """Whether it was told before, so that it is ended now."""


class VramWatch:
    """Remembers which leases were over what they leased at the last look."""

    def __init__(self) -> None:
        self._over: frozenset[tuple[LeaseId, str]] = frozenset()

    def offenders(
        self, uses: Iterable[CardUse], owners: Mapping[int, Owner], parts: Mapping[LeaseId, tuple[Part, ...]]
    ) -> list[Offender]:
        """Guests to be warned or ended. ``owners``: by pid; a process that belongs to no lease is ignored here."""
        found = _over(uses, owners, parts)
        before, self._over = self._over, frozenset(found)
        return [
            Offender(guest, f"{line} (out_of_memory)" if key in before else f"{line}: {_ASKED}", key in before)
            for key, (guest, line) in found.items()
        ]


def _over(
    uses: Iterable[CardUse], owners: Mapping[int, Owner], parts: Mapping[LeaseId, tuple[Part, ...]]
) -> dict[tuple[LeaseId, str], tuple[GuestId, str]]:
    used: dict[tuple[LeaseId, str], dict[GuestId, int]] = {}
    processes: dict[tuple[LeaseId, str], int] = {}
    for use in uses:
        owner = owners.get(use.pid)
        if owner is None:
            continue
        key = (owner.lease, use.card)
        of_guests = used.setdefault(key, {})
        of_guests[owner.id] = of_guests.get(owner.id, 0) + use.bytes
        processes[key] = processes.get(key, 0) + 1
    found = {}
    for (lease, card), of_guests in used.items():
        leased = sum(part.amount for part in parts.get(lease, ()) if card_uuid(part.resource) == card)
        total = sum(of_guests.values())
        if total <= leased + processes[lease, card] * CONTEXT_BYTES:
            continue
        worst = max(of_guests, key=lambda guest: of_guests[guest])
        line = (
            f"the lease has {format_size(leased)} of {card} and its guests used {format_size(total)}, the most of it "
            "this one"
        )
        found[lease, card] = worst, line
    return found
