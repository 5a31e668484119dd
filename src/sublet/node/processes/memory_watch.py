"""Watches the memory of leases: ends guests over the limit, and reports what the kernel killed.

Where a control group caps it, the kernel ends a process, and here it is only said. Elsewhere it is measured once a
second: what the processes have resident, and if that seems too much, their fair shares, since memory that a process
shares with its children would otherwise count in each. Between two looks a guest can have more than it may.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from sublet.lease_end import EndReason
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.messages import out_of_memory
from sublet.node.processes.procs import PAGE_BYTES, ProcessStat, Procs
from sublet.node.processes.tree import ProcessSnapshot
from sublet.values import MIB, GuestId, LeaseId, format_size
from sublet.wire.cards import CardUse
from sublet.wire.orders import Part, card_uuid

ASK_S: Final = 0.5
"""Between two checks whether the kernel has killed a process of a guest that runs on without it."""
SHARES_MAX: Final = 64
"""Processes whose fair share is asked for in one look; it takes the kernel a while. Others count as they stand."""
_PSS: Final = b"Pss:"
_KIB: Final = 1024


class MemoryWatch:
    """Looks at the leases that have a cap on memory."""

    def __init__(self, guests: GuestTable, procs: Procs, tenancies: Callable[[], Iterable[LeaseRuntime]]) -> None:
        self._guests = guests
        self._procs = procs
        self._tenancies = tenancies
        self._ask_at = 0.0

    def check(self, look: ProcessSnapshot) -> None:
        """The guests' own look has just been taken. There may be very many: a group that counts by itself is asked
        less."""
        now = time.monotonic()
        asks = now >= self._ask_at
        if asks:
            self._ask_at = now + ASK_S
        for tenancy in self._tenancies():
            if not tenancy.memory_max or not tenancy.folder:
                continue
            if "memory" in tenancy.unlimited:
                self._measure(tenancy, look)
            elif asks and tenancy.over is None:  # of many that end at once none needs this, and all wait for it
                self._ask(tenancy)

    def _measure(self, tenancy: LeaseRuntime, look: ProcessSnapshot) -> None:
        stats = [stat for guest in tenancy.running() for stat in look.of(guest.tree)]
        if sum(stat.rss_pages for stat in stats) * PAGE_BYTES <= tenancy.memory_max:
            return
        used = share_of(stats, self._procs.root)
        if used <= tenancy.memory_max:
            return
        for guest in tenancy.running():
            if not guest.is_warned_of_memory:
                guest.is_warned_of_memory = True
                guest.stdio.write_notice(out_of_memory(tenancy.memory_max, used))
        self._guests.kill(tenancy.running(), EndReason.OUT_OF_MEMORY)

    def _ask(self, tenancy: LeaseRuntime) -> None:
        """The kernel ended one of its processes, and the guest may go on without."""
        for guest in tenancy.running():
            if not guest.is_warned_of_memory and guest.tree.oom_kills():
                guest.is_warned_of_memory = True
                guest.stdio.write_notice(out_of_memory(tenancy.memory_max))


def share_of(stats: Iterable[ProcessStat], proc: str = "/proc") -> int:
    """Bytes that these processes have together; what several share is divided among them."""
    found = 0
    largest = sorted(stats, key=lambda stat: -stat.rss_pages)
    for number, stat in enumerate(largest):
        share = _share(f"{proc}/{stat.pid}/smaps_rollup") if number < SHARES_MAX else None
        found += stat.rss_pages * PAGE_BYTES if share is None else share
    return found


def _share(path: str) -> int | None:
    """None where it is not told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, 4096)
    except OSError:  # it ended
        return 0
    finally:
        os.close(fd)
    line = next((line for line in text.splitlines() if line.startswith(_PSS)), b"")
    fields = line.split()
    return int(fields[1]) * _KIB if len(fields) > 1 and fields[1].isdigit() else None


# ----------------------------------------------------------------------------------------------------------- vram watch
#
# Watches the memory of cards: ends only guests whose lease uses more than it leased.
#
# A card does not let itself be capped for a process, so this is measured: the office hands on what the driver says each
# process has, every few seconds. What a CUDA context takes for itself is allowed besides, for each process. Of a lease
# that has too much, the guest with the most on that card is warned, and ended if the next look finds no less than it
# may; if it was not that one alone, the look after that sees it. Until then it can have more than it may, and its
# neighbours less.


CONTEXT_BYTES: Final = 768 * MIB
"""What a process may have on a card beside what it allocates: its context, its kernels, what libraries keep."""
_WARNING: Final = "it is ended if it has not freed some in a few seconds"


class ProcessOwner(Protocol):
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
        self, uses: Iterable[CardUse], owners: Mapping[int, ProcessOwner], parts: Mapping[LeaseId, tuple[Part, ...]]
    ) -> list[Offender]:
        """Guests to be warned or ended. ``owners``: by pid; a process that belongs to no lease is ignored here."""
        found = _over(uses, owners, parts)
        before, self._over = self._over, frozenset(found)
        return [
            Offender(guest, f"{line} (out_of_memory)" if key in before else f"{line}: {_WARNING}", key in before)
            for key, (guest, line) in found.items()
        ]


def _over(
    uses: Iterable[CardUse], owners: Mapping[int, ProcessOwner], parts: Mapping[LeaseId, tuple[Part, ...]]
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
