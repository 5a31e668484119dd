"""The machine's hardware behind the port of the node's rules: real processes, folders and groups.

The law (``lease.node``) decides; here it is done. What takes time is begun here and seen to be over by ``is_there``,
which is asked again when a guest is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from importlib import import_module
from typing import Final

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.hardware import Clean, Leftover, Need, NotYet, Unclean, Verdict
from sublet.lease_end import EndReason
from sublet.node.forked_jobs import ANSWER_FD, ANSWERED, ForkedJobs
from sublet.node.loop import log_trouble
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.trash import HeldMemory, Trash
from sublet.node.sandbox import remove_tree
from sublet.node.storage.stores import Stores
from sublet.node.supervisor.parking import Parker
from sublet.values import NS_PER_S, Epoch, LeaseId, ResourceId, TenantId
from sublet.wire.cards import NVML, CardFound
from sublet.wire.codec import loads
from sublet.wire.guests import GuestNews
from sublet.wire.orders import Metered, Notify, Parking, Part, Saved, StoredVolume, VolumeRef, card_uuid
from sublet.wire.zygote import run_here

KILL_AGAIN_NS: Final = (100_000_000, 100_000_000, 500_000_000, 1 * NS_PER_S, 2 * NS_PER_S)
"""How long after each attempt to end a guest it is looked at the latest. One that exits is seen at once."""
LOOK_AGAIN_NS: Final = 50_000_000
METERED_KEPT: Final = 4096
"""Leases whose counts are kept after their end: an office that was away asks again for what it has not heard."""


class RealHardware:
    """Every lease that is on this machine, until nothing of it is left. Implements ``lease.hardware.Hardware``."""

    def __init__(
        self,
        *,
        guests: GuestTable,
        stores: Stores,
        forked_jobs: ForkedJobs,
        aside: Trash,
        held: HeldMemory,
        parker: Parker,
        office: str,
        now_ns: Callable[[], int],
        cut: Callable[[LeaseId], None],
        on_moved: Callable[[LeaseId], None],
        still_left: Callable[[LeaseId], str],
        name_of: Callable[[LeaseId], str],
        saved_of: Callable[[LeaseId], Saved | None],
    ) -> None:
        """``cut`` ends every connection of a lease. ``on_moved`` is told when the guests of a lease were taken off its
        devices alive, or when that failed. ``remaining`` says what a predecessor's guests of a lease still have here,
        empty if nothing; ``name_of`` what its holder calls a lease; ``saved_of`` what was published for it."""
        self.tenancies: dict[LeaseId, LeaseRuntime] = {}
        """The newest of each lease."""
        self._still_left = still_left
        self._name_of = name_of
        self._stores = stores
        self._aside = aside
        self._held = held
        self._parker = parker
        self._saved_of = saved_of
        self._on_moved = on_moved
        self._guests = guests
        self._office = office
        self._now_ns = now_ns
        self._cut = cut
        self.left: Iterable[Leftover] = ()
        """What a predecessor had on which resources."""
        self._older: list[LeaseRuntime] = []
        """Ended, and not yet gone when their lease was granted anew."""
        self._kills: dict[tuple[LeaseId, ResourceId], int] = {}
        self._metered: dict[LeaseId, Metered] = {}
        self.cards = CardCleaning(forked_jobs, begun_ns=now_ns())

    # ---- while a lease lives ----

    def grant(
        self, lease: LeaseId, tenant: TenantId, epoch: Epoch, parts: tuple[Part, ...], deadline_ns: int, /
    ) -> None:
        for card in filter(None, (card_uuid(part.resource) for part in parts)):
            self.cards.before_use(card, self._now_ns())
        tenancy = self.tenancies.get(lease)
        if tenancy is None or tenancy.over is not None:  # what was ended before does not go on under this epoch
            self.tenancies[lease] = LeaseRuntime(
                lease=lease,
                tenant=tenant,
                epoch=epoch,
                parts=parts,
                deadline_ns=deadline_ns,
                office=self._office,
                name=self._name_of(lease),
            )
            if tenancy is not None:
                self._older.append(tenancy)
            return
        if tenancy.epoch != epoch:  # attached: another program holds it now, and the first one's connections are over
            self._cut(lease)
            tenancy.since = epoch
        tenancy.epoch, tenancy.parts, tenancy.deadline_ns = epoch, parts, deadline_ns
        for guest in tenancy.running():
            guest.epoch = epoch
        tenancy.show(self._now_ns())

    def extend(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        tenancy = self.tenancies.get(lease)
        if tenancy is not None:
            tenancy.deadline_ns = deadline_ns
            tenancy.show(self._now_ns())

    def notice(self, lease: LeaseId, notice: Notify | None, /) -> None:
        tenancy = self.tenancies.get(lease)
        if tenancy is None:
            return
        tenancy.notice = notice
        tenancy.show(self._now_ns())
        for guest in tenancy.running():
            if notice is None:
                guest.stdio.write_notice("the lease is not taken after all")
                guest.notify(GuestNews(guest=guest.id, what="spared"))
            else:
                self._announce(guest, notice)

    def notify_guests(self, lease: LeaseId, line: str) -> None:
        """Tell all guests of the lease."""
        tenancy = self.tenancies.get(lease)
        for guest in tenancy.running() if tenancy is not None else ():
            guest.stdio.write_notice(line)

    def _announce(self, guest: GuestProcess, notice: Notify) -> None:
        take_at_ns = notice.take_at_ns or 0
        left_s = max(0.0, (take_at_ns - self._now_ns()) / NS_PER_S)
        because = f": {notice.detail}" if notice.detail else ""
        guest.stdio.write_notice(f"this lease is taken in {left_s:.0f} s ({notice.reason}{because}); save now")
        guest.notify(
            GuestNews(guest=guest.id, what="notice", reason=notice.reason, take_at_ns=take_at_ns, detail=notice.detail)
        )

    def warn(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        tenancy = self.tenancies.get(lease)
        if tenancy is None:
            return
        tenancy.warn(self._now_ns())
        left_s = max(0.0, (deadline_ns - self._now_ns()) / NS_PER_S)
        if tenancy.is_parked:
            line = f"its parking lease runs out in {left_s:.1f} s; it goes on without its device, to save and leave"
            self._let_leave(tenancy, line, EndReason.EXPIRED)
            return
        line = f"this lease runs out in {left_s:.1f} s and is not being renewed; save and leave now"
        self._guests.terminate(tenancy.running(), line, None)
        for guest in tenancy.running():
            guest.notify(GuestNews(guest=guest.id, what="notice", reason=EndReason.EXPIRED, take_at_ns=deadline_ns))

    def _let_leave(self, tenancy: LeaseRuntime, line: str, reason: EndReason) -> None:
        """What is parked goes on for as long as it takes to save. Its page says that it has no device, and the signal
        to leave is the first thing that it meets."""
        self._guests.terminate(tenancy.running(), line, reason)
        self._parker.resume_to_end(tenancy)

    def cancel_warning(self, lease: LeaseId, epoch: Epoch, /) -> None:
        tenancy = self.tenancies.get(lease)
        if tenancy is None or tenancy.is_parked:  # a guest that was told to leave is leaving
            return
        tenancy.expiring = False
        tenancy.show(self._now_ns())
        for guest in tenancy.running():
            guest.stdio.write_notice("the lease was renewed after all")
            guest.notify(GuestNews(guest=guest.id, what="spared"))

    # ---- parking ----

    def need(self, lease: LeaseId, epoch: Epoch, /) -> Need:
        tenancy = self.tenancies.get(lease)
        if tenancy is None or tenancy.closed or tenancy.epoch > epoch:
            return Need()
        return self._parker.need(tenancy)

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking, room: int, until_ns: int, now_ns: int, /) -> bool:
        tenancy, other = self.tenancies.get(lease), self.tenancies.get(under.lease)
        if tenancy is None or other is None or tenancy.closed or tenancy.epoch > epoch:
            return False

        reason = tenancy.notice.reason if tenancy.notice is not None else EndReason.PREEMPTED

        def moved() -> None:
            tenancy.over = reason
            self._on_moved(lease)
            if other.expiring:  # since it came, its parking lease has nearly run out
                self.warn(other.lease, other.epoch, other.deadline_ns)

        def failed(why: str) -> None:
            detail = f"its device was taken, and it could not be parked: {why}"
            self.announce_end(lease, epoch, reason, until_ns, detail, self._now_ns())
            self._on_moved(lease)

        return self._parker.park(tenancy, other, room, until_ns, moved=moved, failed=failed)

    def parked(self, under: LeaseId, /) -> bool:
        tenancy = self.tenancies.get(under)
        return tenancy is not None and tenancy.is_parked and any(True for _ in tenancy.running())

    def resume(self, under: Parking, lease: LeaseId, epoch: Epoch, /) -> None:
        parked, tenancy = self.tenancies[under.lease], self.tenancies[lease]
        self._parker.resume(parked, tenancy, self._now_ns())
        parked.over = EndReason.RELEASED

    # ---- when it is over ----

    def announce_end(
        self, lease: LeaseId, epoch: Epoch, reason: EndReason, kill_at_ns: int, detail: str, now_ns: int, /
    ) -> None:
        tenancy = self.tenancies.get(lease)
        if tenancy is None or tenancy.over is not None or tenancy.epoch > epoch:
            return
        tenancy.over, tenancy.detail = reason, detail
        tenancy.show(now_ns)
        because = f": {detail}" if detail else ""
        line = f"the lease is over ({reason}{because})"
        grace_s = (kill_at_ns - now_ns) / NS_PER_S
        if grace_s > 0:
            line += f"; what still runs in {grace_s:.1f} s is ended"
        if not tenancy.is_parked:
            self._guests.terminate(tenancy.running(), line, reason)
        elif grace_s > 0:
            self._let_leave(tenancy, f"its parking {line}", reason)
        else:  # it stands still, and there is no time for it to do anything
            self._guests.kill(tenancy.running(), reason)

    def kill(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> int | None:
        attempt = self._kills.get((lease, resource), 0)
        self._kills[lease, resource] = (attempt + 1) % len(KILL_AGAIN_NS)
        for tenancy in self._of(lease, epoch):
            self._guests.kill(tenancy.running(), tenancy.over or EndReason.EXPIRED)
        return now_ns + KILL_AGAIN_NS[attempt]

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> bool:
        for tenancy in self._of(lease, epoch):
            for guest in tenancy.guests.values():
                if not guest.is_gone:
                    return True
        return bool(self._still_left(lease))

    def why_alive(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> str:
        found = [guest for tenancy in self._of(lease, epoch) for guest in tenancy.running()]
        return self._guests.why_alive(found) if found else self._still_left(lease)

    def verify(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> Verdict:
        if self._guests.strangers:
            return NotYet(
                what=f"{self._guests.strangers} processes run here and hide whose they are",
                again_ns=now_ns + LOOK_AGAIN_NS,
            )
        for tenancy in tuple(self._of(lease, epoch)):
            self._stores.leave(tenancy)
            leave = partial(self._held.leave, tenancy.tenant)
            left = tenancy.close(self._aside.put, leave, alone=self._is_alone(tenancy))
            if left:
                return NotYet(what=f"{', '.join(left)} could not be removed", again_ns=now_ns + LOOK_AGAIN_NS)
            self._remember(tenancy)
            self._drop(tenancy)
        store = self._stores.remaining(resource, lease, epoch)
        if store:  # what the lease had elsewhere need not wait for it
            return NotYet(what=store, again_ns=now_ns + LOOK_AGAIN_NS)
        self._kills.pop((lease, resource), None)
        metered, saved = self._metered.get(lease), self._saved_of(lease)
        card = card_uuid(resource)
        if not card:  # its memory was memory of its guests, and went back to the kernel with them
            return Clean(metered=metered, saved=saved)
        neighbours = any(one.lease != lease and resource in one.resources for one in self._all())
        verdict = self.cards.verify(card, lease, epoch, neighbours=neighbours, now_ns=now_ns)
        return replace(verdict, metered=metered, saved=saved) if isinstance(verdict, Clean) else verdict

    def _remember(self, tenancy: LeaseRuntime) -> None:
        """What it did, until the office has heard of its end, and for some time after."""
        if tenancy.metered is not None:
            self._metered[tenancy.lease] = tenancy.metered
            while len(self._metered) > METERED_KEPT:
                del self._metered[next(iter(self._metered))]

    def forget(self, resource: ResourceId, lease: LeaseId, /) -> None:
        for tenancy in tuple(self._all()):
            if tenancy.lease == lease and tenancy.over is not None and not any(tenancy.running()):
                self._drop(tenancy)
        card = card_uuid(resource)
        if card and not any(resource in tenancy.resources for tenancy in self._all()):
            self.cards.vouched(card)

    def leave(self) -> None:
        """The supervisor ends: where no guest is left, neither folder nor group stays."""
        self._held.finish()
        self._aside.finish()
        for tenancy in tuple(self._all()):
            if not any(tenancy.running()):
                tenancy.close(
                    remove_tree, ControlGroup.remove, alone=self._is_alone(tenancy)
                )  # no caller is left to wait

    # ---- volumes ----

    def volumes(self) -> Iterable[StoredVolume]:
        return self._stores.volumes()

    def volume_epoch(self, volume: VolumeRef, /) -> Epoch | None:
        return self._stores.volume_epoch(volume)

    def remove_volume(self, volume: VolumeRef, epoch: Epoch, now_ns: int, /) -> None:
        self._stores.remove_volume(volume, epoch)

    # ---- which ----

    @property
    def everything(self) -> Iterator[LeaseRuntime]:
        """Each of which something may be here."""
        return self._all()

    def _is_alone(self, tenancy: LeaseRuntime) -> bool:
        newest = self.tenancies.get(tenancy.lease, tenancy)
        return newest is tenancy and not any(one.lease == tenancy.lease and one is not tenancy for one in self._older)

    def _all(self) -> Iterator[LeaseRuntime]:
        yield from self._older
        yield from self.tenancies.values()

    def _of(self, lease: LeaseId, epoch: Epoch) -> Iterator[LeaseRuntime]:
        """What there is of the lease, up to this epoch."""
        for one in tuple(self._older):
            if one.lease == lease and one.epoch <= epoch:
                yield one
        tenancy = self.tenancies.get(lease)
        if tenancy is not None and tenancy.epoch <= epoch:
            yield tenancy

    def _drop(self, tenancy: LeaseRuntime) -> None:
        if self.tenancies.get(tenancy.lease) is tenancy:
            del self.tenancies[tenancy.lease]
        else:
            self._older.remove(tenancy)

    # ---- at any time ----

    def leftovers(self) -> Iterable[Leftover]:
        return self.left

    def fault(self, resource: ResourceId, /) -> str | None:
        return None


# -------------------------------------------------------------------------------------------------------- card cleaning
#
# Cleans a card between two leases: no process on it, memory at baseline, settings restored, memory overwritten.
#
# The driver is asked, and the card overwritten, by a short-lived process of its own (``sublet.node.agent.clean_card``):
# a driver may block its caller, and a process that has once used CUDA keeps a piece of the card. This module only
# starts that process and reads its answer. A card that was not seen to be clean is not free.


AGAIN_NS: Final = 200_000_000
"""Between two looks while the program runs, or a card comes to rest."""
PROGRAM: Final = "sublet.node.agent.clean_card"
LOADED: Final = (PROGRAM, "ctypes.util", "string")
"""What the program imports of ours and of Python's own, and what the binding of NVML does: a third of what a forked job
takes. A supervisor with cards has 2 MiB more for it. What is installed is imported by forked jobs alone."""

Run = Callable[[Sequence[str]], str]
"""What a forked job does to have the program run: its answer is what that writes."""


@dataclass(slots=True)
class _Look:
    """One look at one card, for one lease."""

    is_done: bool = False
    found: CardFound | None = None
    """None once it is done: it failed, and it is not known why."""


@dataclass(slots=True)
class _Card:
    settings: str = ""
    """Those it had when it was lent; empty where guests cannot change them."""
    since_ns: int | None = None
    """Since when it is lent without having been seen clean."""
    rest: int | None = None
    """The fewest bytes that were in use when it was seen clean."""
    looks: dict[tuple[LeaseId, Epoch], _Look] = field(default_factory=dict)


class CardCleaning:
    """All cards of this machine."""

    def __init__(
        self,
        forked_jobs: ForkedJobs,
        run: Run | None = None,
        *,
        is_root: bool | None = None,
        begun_ns: int | None = None,
    ) -> None:
        """``is_root``: whether guests may change the settings of a card. Where they may not, whatever changes them is
        an operator, or the card itself. ``begun_ns``: when this supervisor began; no guest had a card before, but for
        what ``was_lent``."""
        self._forked_jobs = forked_jobs
        self._run = run or run_program
        self._is_root = os.geteuid() == 0 if is_root is None else is_root
        self._begun_ns = begun_ns
        self.lends_beside = False
        """Whether programs of others that were on a card when it was lent may stay there."""
        self.shows_pids: bool | None = None
        """``LeaseCaps.shows_pids``."""
        self._cards: dict[str, _Card] = {}

    def before_use(self, card: str, now_ns: int) -> None:
        """It is about to be used: what it is set to now is what it is set to again afterwards, and what draws with it
        now may go on."""
        known = self._cards.setdefault(card, _Card())
        if known.since_ns is not None:
            return
        known.since_ns, known.settings = now_ns, ""
        for module in LOADED:
            import_module(module)
        if not self._is_root:
            return

        def on_settings(output: str | None) -> None:
            found = _found_in(output)
            known.settings = found.settings if found is not None else ""

        self._forked_jobs.run(lambda: self._run((card, "--look")), on_settings)

    def was_lent(self, card: str, since_ns: int) -> None:
        """An earlier supervisor had guests on it since then, or since before."""
        self._cards.setdefault(card, _Card(since_ns=since_ns))

    def vouched(self, card: str) -> None:
        """An operator says that nothing of a lease is on it. What it is set to then, and what uses it then, is theirs:
        the next lease begins anew."""
        known = self._cards.get(card)
        if known is not None:
            known.since_ns, known.settings = None, ""

    def verify(self, card: str, lease: LeaseId, epoch: Epoch, *, neighbours: bool, now_ns: int) -> Verdict:
        """How far it has come. With neighbours on the card nothing can be said of its memory as a whole, and nothing
        is overwritten: tenants that share a card have agreed to that."""
        if neighbours:
            return Clean()
        known = self._cards.setdefault(card, _Card(since_ns=self._begun_ns))
        look = known.looks.get((lease, epoch))
        if look is None:
            look = known.looks[lease, epoch] = self._begin(card, known)
        if not look.is_done:
            return NotYet(what=f"{card} is still being cleaned", again_ns=now_ns + AGAIN_NS, is_working=True)
        del known.looks[lease, epoch]
        verdict = _verdict(card, look.found, now_ns)
        if isinstance(verdict, Clean):
            known.since_ns = None
            if look.found is not None:
                known.rest = min(look.found.in_use, look.found.in_use if known.rest is None else known.rest)
            if look.found is not None and look.found.note:
                log_trouble(f"{card}: {look.found.note}", None)
        return verdict

    def _begin(self, card: str, known: _Card) -> _Look:
        look = _Look()

        def on_cleaned(output: str | None) -> None:
            look.is_done, look.found = True, _found_in(output)

        settings = ("--settings", known.settings) if known.settings else ()
        since = ("--since", str(known.since_ns)) if known.since_ns is not None else ()
        rest = ("--rest", str(known.rest)) if known.rest else ()
        beside = ("--beside", "1") if self.lends_beside else ()
        sees = () if self.shows_pids is None else ("--sees", str(int(self.shows_pids)))
        words = (card, "--scrub", *settings, *since, *rest, *beside, *sees)
        self._forked_jobs.run(lambda: self._run(words), on_cleaned)
        return look


def _verdict(card: str, found: CardFound | None, now_ns: int) -> Verdict:
    if found is None:
        return NotYet(what=f"{card} could not be looked at: the program for it failed", again_ns=now_ns + AGAIN_NS)
    if found.failed:
        return Unclean(detail=f"{card}: {found.failed}", hard=found.is_hard)
    if found.left:
        return NotYet(what=f"{card}: {found.left}", again_ns=now_ns + AGAIN_NS)
    return Clean(scrub_ns=found.scrub_ns)


def _found_in(output: str | None) -> CardFound | None:
    try:
        return loads(CardFound, (output or "").encode())
    except SubletError:
        return None


def run_program(arguments: Sequence[str]) -> str:
    """What the program writes, run in a forked job, or in its place: it is the job that is known, and ended when it
    takes too long."""
    return run_here(PROGRAM, arguments, ANSWER_FD, ANSWERED, needed=NVML)
