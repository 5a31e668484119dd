"""Parks guests: stops them, moves them under another lease, and continues them.

Three steps, of which the law (``lease.parking``) is told when all of them are done: everything of the guests stands
still; what they have on cards is copied by the driver (``suspending``), once they have saved, and less what frameworks
only keep (``caches``), which on a host device is nothing, since its memory is theirs; and page, folder and groups
become the parking lease's.
A guest in the middle of work goes on standing still. One that serves calls and has none to answer is let go: it reads
on its page that it has no device, and refuses. When the parking lease ends, all of them are set going so that they can
save what is not on a device, and leave.

Between the first step and the last nothing of a guest runs, so no instant is left at which it could act under a lease
that is over, or see two.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.hardware import Need
from sublet.lease.parking import copy_ns
from sublet.lease.states import GuestEvent, GuestState
from sublet.node.loop import Loop, log_internal_error
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guest_records import GuestRecords, note_of
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.procs import PAGE_BYTES, ProcessInstance, ProcessStat
from sublet.node.processes.tree import Trees, stands_still
from sublet.node.supervisor.suspending import Suspending
from sublet.values import MIB, NS_PER_S, GuestId, LeaseId, format_size
from sublet.wire.cards import UNSEEN, CardUse
from sublet.wire.guests import GuestNews, Service, Visit
from sublet.wire.jupyter import KERNEL_ENTRY
from sublet.wire.orders import card_uuid

LOOK_AGAIN_S: Final = 0.005
"""While they are brought to a stand: the kernel needs a moment to freeze, and forks are met by the next look."""
GO_AGAIN_S: Final = 0.1
"""Between two attempts to set a guest going."""
STAND_NS: Final = 5 * NS_PER_S
"""A process that does not stand still by then sleeps in the kernel where no signal reaches, and is ended instead."""
SAVE_NS: Final = 5 * NS_PER_S
"""How long guests that are saving into a volume are waited for before the driver is asked: it may fail in them, and
what was not saved is lost then. Less where the copy needs the time."""
LOCK_NS: Final = 5 * NS_PER_S
"""How long the work of guests on their cards may take to come to an end; what is left of the time is for copying."""
SAVE_LOOK_S: Final = 0.05
"""While their saves are waited for."""
SPARE_BYTES: Final = 96 * MIB
"""What they may grow by between the notice and the end, beside an eighth of what they have. A kernel that imports in
these seconds what its cell needs grows by that much; with 16 MiB one in three of them could not be parked."""
SESSIONS: Final = "sublet.guest.device_service:main"
"""The guest of a holder's sessions on a device, which end with the lease."""
SERVES_CALLS: Final = frozenset({"sublet.guest.worker:main", SESSIONS})
"""Guests that hold a lock on the tally of their lease while they answer a call (``wire.usage_counters``)."""

SAYS_WHAT_IS_SAVED: Final = SERVES_CALLS | {KERNEL_ENTRY}
"""Guests that do nothing between two calls or cells, and hold a lock on the tally while they have something to save."""


LEAVING: Final = "it was told to save and leave before, and leaves"


@dataclass(slots=True)
class _Leaving:
    tenancy: LeaseRuntime
    under: LeaseRuntime
    until_ns: int
    failed: Callable[[str], None]
    moved: Callable[[], None]


class Parker:
    """Parks and resumes, for all leases of one supervisor."""

    def __init__(
        self,
        loop: Loop,
        trees: Trees,
        notes: GuestRecords,
        suspending: Suspending,
        on_lost: Callable[[GuestProcess, str], None],
    ) -> None:
        """``on_lost`` is called with a guest that could not be resumed on its cards, and the reason: it has to end."""
        self._on_lost = on_lost
        self.uses: tuple[CardUse, ...] = ()
        """What each process has of a card, as the driver last said."""
        self._suspending = suspending
        self._loop = loop
        self._trees = trees
        self._notes = notes
        self._freezer = GuestFreezer(trees)
        self._caches = Caches(loop)
        self._leaving: dict[LeaseId, _Leaving] = {}

    def need(self, tenancy: LeaseRuntime) -> Need:
        """What its guests would need, if they are not to end."""
        used = self._used(tenancy)
        if not used:
            return Need()
        if tenancy.is_leaving():
            return Need(why_not=LEAVING)
        entries = {guest.spec.entry for guest in tenancy.running()}
        has_no_session = SESSIONS not in entries or not tenancy.uses_devices()
        return Need(
            amount=used + used // 8 + SPARE_BYTES,
            is_whole=has_no_session,
            outlives=not entries <= SERVES_CALLS,
            is_safe=has_no_session and entries <= SAYS_WHAT_IS_SAVED and not tenancy.is_unsaved(),
        )

    def park(
        self,
        tenancy: LeaseRuntime,
        under: LeaseRuntime,
        room: int,
        until_ns: int,
        *,
        moved: Callable[[], None],
        failed: Callable[[str], None],
    ) -> bool:
        """Begin. One of the two is called when it is done; not before this returns. False: it is not even begun."""
        need = self.need(tenancy)
        if not need.amount or under.folder or under.closed or self._used(tenancy) > room:
            return False
        tenancy.parking = True
        leaving = _Leaving(tenancy, under, min(until_ns, self._loop.now_ns() + STAND_NS), failed, moved)
        self._leaving[tenancy.lease] = leaving
        try:
            if _cards_of(tenancy):
                self._suspend(leaving, until_ns)
            else:
                self._stop(leaving)  # the first signals at once; what follows from them after the law's turn
        except BaseException:  # the law is told that it was not begun
            tenancy.parking = False
            self._leaving.pop(tenancy.lease, None)
            raise
        return True

    def _suspend(self, leaving: _Leaving, until_ns: int) -> None:
        """The driver works inside the processes, so they may stand still only afterwards; their calls of it wait."""
        guests = list(leaving.tenancy.running())
        for guest in guests:
            if guest.state is GuestState.RUNNING:
                guest.now(GuestEvent.PARK)

        def on_suspended(answer: Mapping[str, Any]) -> None:
            self._safely(leaving, lambda: suspended(answer))

        def suspended(answer: Mapping[str, Any]) -> None:
            if "failed" in answer:
                self._give_up(leaving, str(answer["failed"]))
                if answer.get("stuck"):  # its calls of the driver wait for ever, so it can save nothing of its card
                    for guest in guests:
                        self._on_lost(guest, str(answer["failed"]))
                return
            leaving.tenancy.suspended = tuple(answer["done"])
            kept = self._on_cards(leaving.tenancy) & set(self._pids(guests)) - set(leaving.tenancy.suspended)
            if kept:  # the driver passed it over, and its memory is still there
                self._give_up(leaving, f"process {min(kept)} has memory on a card, and the driver did not take it off")
                return
            leaving.until_ns = self._loop.now_ns() + STAND_NS
            self._stop(leaving)

        def saved() -> None:
            within_s = max(0, until_ns - self._loop.now_ns()) / 4 / NS_PER_S
            self._caches.free(guests, within_s, lambda: self._safely(leaving, freed))

        def freed() -> None:
            size, left_ns = self._on_their_cards(leaving.tenancy), until_ns - self._loop.now_ns()
            lock_ns = min(LOCK_NS, left_ns - copy_ns(size))
            if lock_ns <= 0:
                left = f"{max(0, left_ns) / NS_PER_S:.0f} s"
                self._give_up(leaving, f"{format_size(size)} on cards cannot be copied in the {left} that are left")
                return
            programs = _programs(guests, self._pids)
            self._suspending.suspend(
                self._pids(guests),
                max(1, lock_ns // 1_000_000),
                on_suspended,
                copy_s=(left_ns - lock_ns) / NS_PER_S,
                groups=[pids for pids in programs if len(pids) > 1],
            )

        spare_ns = until_ns - self._loop.now_ns() - copy_ns(self._on_their_cards(leaving.tenancy)) - LOCK_NS
        self._once_saved(leaving, self._loop.now_ns() + min(SAVE_NS, spare_ns), saved)

    def _once_saved(self, leaving: _Leaving, until_ns: int, then: Callable[[], None]) -> None:
        """The notice told them to save. Without a volume there is nowhere to, and nothing is waited for."""
        tenancy = leaving.tenancy
        has_volume = any(guest.volumes for guest in tenancy.running())
        if has_volume and tenancy.notice is not None and tenancy.is_unsaved() and self._loop.now_ns() < until_ns:
            self._loop.after(
                SAVE_LOOK_S, lambda: self._safely(leaving, lambda: self._once_saved(leaving, until_ns, then))
            )
        else:
            then()

    def resume_to_end(self, tenancy: LeaseRuntime) -> None:
        """What is parked there was told to leave, and goes on so that it can: with what that sends in this turn, and
        without its cards. Calls of the driver go on waiting."""

        def go() -> None:
            for guest in tenancy.running():
                self._thaw(guest)

        self._loop.soon(go)

    def is_leaving(self, lease: LeaseId) -> bool:
        """Whether it is being parked."""
        return lease in self._leaving

    def resume(self, tenancy: LeaseRuntime, onto: LeaseRuntime, now_ns: int) -> None:
        """What is parked there goes on under the other lease. What it had on cards is put back while its calls of the
        driver wait."""
        pids, had = tenancy.suspended, tenancy.cards
        tenancy.move_to(onto, is_parked=False)
        for guest in onto.running():
            self._now_under(guest, onto, GuestEvent.RESUME)
        onto.show(now_ns)
        for guest in onto.running():
            self._thaw(guest)
        if not pids:
            self._resumed(onto, {})
            return
        pairs = tuple(zip(had, _cards_of(onto), strict=False))
        self._suspending.resume(pids, pairs, lambda answer: self._resumed(onto, answer))

    def _resumed(self, tenancy: LeaseRuntime, answer: Mapping[str, Any]) -> None:
        for guest in tenancy.running():
            if guest.state is not GuestState.RESUMING:
                continue
            if "failed" in answer:
                self._on_lost(guest, str(answer["failed"]))
                continue
            guest.now(GuestEvent.RESUMED)
            guest.stdio.write_notice(f"it goes on, under lease {tenancy.lease}")
            guest.notify(GuestNews(guest=guest.id, what="resumed"))

    # ---- within ----

    def _safely(self, leaving: _Leaving, call: Callable[[], None]) -> None:
        """Call it. What fails of it, for want of a descriptor mostly, costs this parking, and not the supervisor, whose
        end would be that of all guests."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the law alone may end this process
            log_internal_error(error)
            if self._leaving.get(leaving.tenancy.lease) is leaving:
                self._give_up(leaving, f"the supervisor failed on it ({error})")

    def _thaw(self, guest: GuestProcess) -> None:
        """Set it going. What could not be, for want of a descriptor, is tried again: it would stand still for ever."""
        if not self._freezer.thaw(guest) and not guest.is_gone:
            self._loop.after(GO_AGAIN_S, lambda: self._thaw_again(guest))

    def _thaw_again(self, guest: GuestProcess) -> None:
        if self._freezer.is_going(guest.id):  # else it was brought to a stand anew, or is gone
            self._thaw(guest)

    def _stop(self, leaving: _Leaving) -> None:
        """Again and again, until all of them stand."""
        guests = list(leaving.tenancy.running())
        for guest in guests:
            if guest.state is GuestState.RUNNING:
                guest.now(GuestEvent.PARK)
        parking = [guest for guest in guests if guest.state is GuestState.PARKING]
        try:  # a guest that just starts, or is just being ended alone, is waited for
            is_still = self._freezer.is_still(parking) and len(parking) == len(guests)
        except OSError:  # no descriptor or memory for a look: nothing is concluded
            is_still = False
        if is_still:
            self._loop.soon(lambda: self._safely(leaving, lambda: self._move(leaving)))
        elif self._loop.now_ns() >= leaving.until_ns:
            self._loop.soon(lambda: self._give_up(leaving, "it could not be brought to a stand"))
        else:
            self._loop.after(LOOK_AGAIN_S, lambda: self._safely(leaving, lambda: self._stop(leaving)))

    def _move(self, leaving: _Leaving) -> None:
        tenancy, under = leaving.tenancy, leaving.under
        if under.closed:
            self._give_up(leaving, f"the parking lease {under.lease} is over")
            return
        if not any(tenancy.running()):
            self._give_up(leaving, "it ended by itself")
            return
        if any(guest.state is not GuestState.PARKING for guest in tenancy.running()):
            self._give_up(leaving, "it is being ended")
            return
        if tenancy.is_leaving():  # set going again under another lease, it would end there
            self._give_up(leaving, LEAVING)
            return
        del self._leaving[tenancy.lease]
        cards = _cards_of(tenancy)
        is_idle = tenancy.is_at_rest() and all(
            guest.spec.serves and guest.spec.entry in SERVES_CALLS for guest in tenancy.running()
        )
        tenancy.move_to(under, is_parked=True)
        under.cards = cards
        try:
            for guest in under.running():
                self._now_under(guest, under, GuestEvent.PARKED)
            under.show(self._loop.now_ns())
            for guest in under.running():
                if is_idle:
                    self._thaw(guest)
                guest.stdio.write_notice(
                    f"its device was taken, and it is parked: `sublet lease acquire --resume {under.lease}` goes on "
                    "with it"
                )
                guest.notify(GuestNews(guest=guest.id, what="parked"))
        finally:  # even if a guest could not be notified: they are there by now
            leaving.moved()

    def _give_up(self, leaving: _Leaving, why: str) -> None:
        """They stay where they are, and are told to leave like other guests."""
        self._leaving.pop(leaving.tenancy.lease, None)
        leaving.tenancy.parking = False
        if leaving.tenancy.suspended:  # they cannot end in order with their calls of the driver waiting
            self._suspending.resume(leaving.tenancy.suspended, (), lambda _: None)
            leaving.tenancy.suspended = ()
        for guest in leaving.tenancy.running():
            if guest.state is GuestState.PARKING:
                guest.now(GuestEvent.STAYED)
            self._thaw(guest)
        leaving.failed(why)

    def _now_under(self, guest: GuestProcess, tenancy: LeaseRuntime, event: GuestEvent) -> None:
        guest.lease, guest.epoch = tenancy.lease, tenancy.epoch
        guest.on_gone = lambda: self._is_gone(guest, tenancy)
        if guest.visits is not None:
            guest.visits.now_under(tenancy.lease, tenancy.epoch)
        if guest.state is not GuestState.ENDING:
            guest.now(event)
        try:
            self._notes.write(note_of(guest, tenancy.parts))
        except OSError as error:  # the old one names the same process, which is what it is for
            log_internal_error(error)

    def _is_gone(self, guest: GuestProcess, tenancy: LeaseRuntime) -> None:
        tenancy.guests.pop(guest.id, None)
        self._freezer.forget(guest.id)

    def _used(self, tenancy: LeaseRuntime) -> int:
        """Bytes: by their groups where they are counted, else as the process table has it."""
        guests = list(tenancy.running())
        if not guests:
            return 0
        look = self._trees.scan([])
        stats = [stat for guest in guests for stat in look.of(guest.tree)]
        seen = sum(stat.rss_pages for stat in stats) * PAGE_BYTES
        on_cards = self._of_cards(tenancy, {stat.pid for stat in stats})
        return max(1, seen, sum(guest.usage().memory_bytes for guest in guests)) + on_cards

    def _on_their_cards(self, tenancy: LeaseRuntime) -> int:
        return self._of_cards(tenancy, set(self._pids(tenancy.running())))

    def _of_cards(self, tenancy: LeaseRuntime, pids: Collection[int]) -> int:
        """Bytes of cards that these processes of the lease have."""
        found = sum(use.bytes for use in self.uses if use.pid in pids)
        unseen = {use.card: use.bytes for use in self.uses if use.pid == UNSEEN}
        for part in tenancy.parts:  # at most all that is in use there, and at most what was leased
            found += min(part.amount, unseen.get(card_uuid(part.resource), 0))
        return found

    def _on_cards(self, tenancy: LeaseRuntime) -> set[int]:
        """Processes that have memory on its cards, as the driver last said: of any lease."""
        cards = _cards_of(tenancy)
        return {use.pid for use in self.uses if use.card in cards and use.bytes}

    def _pids(self, guests: Iterable[GuestProcess]) -> list[int]:
        look = self._trees.scan([])
        return [stat.pid for guest in guests for stat in look.of(guest.tree)]


def _cards_of(tenancy: LeaseRuntime) -> tuple[str, ...]:
    return tuple(filter(None, (card_uuid(part.resource) for part in tenancy.parts)))


def _programs(
    guests: Sequence[GuestProcess], pids_of: Callable[[list[GuestProcess]], list[int]]
) -> Iterator[list[int]]:
    """The processes of each program: of a guest, or of all those that have one of the lease's devices each, since
    these compute together."""
    ranks = [guest for guest in guests if guest.spec.device >= 0]
    yield pids_of(ranks)
    yield from (pids_of([guest]) for guest in guests if guest.spec.device < 0)


# ------------------------------------------------------------------------------------------------------------- freezing
#
# Stops whole guests for a while, and continues them.
#
# A guest with a control group of the second version is frozen: it does not notice, nothing of it can fork on, and it
# can still be killed. Where there is none, and for what has left its group, each process is stopped; that is done again
# until a scan finds all of them stopped, since a process that runs may fork meanwhile and a stopped one cannot. A
# process that was stopped before, by another process, is not resumed.


class GuestFreezer:
    """Freezes guests of one supervisor, and thaws them."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._frozen: set[GuestId] = set()
        self._stopped: dict[GuestId, dict[ProcessInstance, None]] = {}
        self._going: set[GuestId] = set()
        """Guests that were to go on, of which something still stands."""

    def is_still(self, guests: Iterable[GuestProcess]) -> bool:
        """Freeze them; returns whether all of them stand still. To be called again until they do."""
        guests = list(guests)
        for guest in guests:
            self._going.discard(guest.id)
            self._freeze(guest)
        look = self._trees.scan([guest.tree for guest in guests])
        still = True
        for guest in guests:
            group, frozen = guest.tree.group, guest.id in self._frozen
            inside = set(group.pids()) if group is not None and frozen else set()
            still &= not frozen or (group is not None and group.is_frozen())
            for stat in look.of(guest.tree):
                if stat.pid not in inside:
                    still &= self._stop(guest.id, stat)
        return still

    def thaw(self, guest: GuestProcess) -> bool:
        """Continue it; harmless where it does not stand still. Returns whether all of it runs; else it is to be called
        again: a process is continued through a descriptor, and there may be none."""
        self._going.add(guest.id)
        if guest.id in self._frozen and guest.tree.group is not None:
            if not guest.tree.group.thaw():
                return False
            self._frozen.discard(guest.id)
        stopped = self._stopped.get(guest.id, {})
        try:
            for identity in tuple(stopped):
                self._trees.procs.send(identity, signal.SIGCONT)
                del stopped[identity]
        except OSError as error:
            log_internal_error(error)
            return False
        self.forget(guest.id)
        return True

    def is_going(self, guest: GuestId) -> bool:
        """Whether it was to go on, and something of it still stands."""
        return guest in self._going

    def forget(self, guest: GuestId) -> None:
        """It is gone."""
        self._frozen.discard(guest)
        self._stopped.pop(guest, None)
        self._going.discard(guest)

    def _freeze(self, guest: GuestProcess) -> None:
        group = guest.tree.group
        if guest.id not in self._frozen and group is not None and group.can_freeze and group.freeze():
            self._frozen.add(guest.id)

    def _stop(self, guest: GuestId, stat: ProcessStat) -> bool:
        """Whether it stands still; if it does not, it is told to. One that sleeps in the kernel stands
        when it wakes, but only if the signal waits for it."""
        stopped = self._stopped.setdefault(guest, {})
        if stat.is_stopped or (stands_still(stat) and stat.identity in stopped):
            return True
        stopped[stat.identity] = None
        self._trees.procs.send(stat.identity, signal.SIGSTOP)
        return False


# --------------------------------------------------------------------------------------------------------------- caches
#
# Asks guests that are to leave their cards to free what their frameworks cache.
#
# A guest that serves is sent a connection for that purpose and hangs it up when it is done. It is waited for a short
# while, and no answer is no obstacle: what is not given back is copied along.


WAIT_S: Final = 2.0
"""How long they may take, all together; a part of the notice if that is short."""
HANG_UP: Final = select.EPOLLRDHUP


class Caches:
    """Of one supervisor."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def free(self, guests: Iterable[GuestProcess], within_s: float, then: Callable[[], None]) -> None:
        """Ask them; ``then`` is called once all have answered or the time is over, and not before this returns."""
        waiting: dict[int, socket.socket] = {}
        is_over = False

        def over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                for fd in tuple(waiting):
                    drop(fd)
                then()

        def drop(fd: int) -> None:
            self._loop.forget(fd)
            waiting.pop(fd).close()

        def answered(fd: int) -> None:
            drop(fd)
            if not waiting:
                timer.cancel()
                over()

        for guest in guests:
            ours = _ask(guest)
            if ours is not None:
                fd = ours.fileno()
                waiting[fd] = ours
                self._loop.watch(fd, HANG_UP, lambda _, fd=fd: answered(fd))  # type: ignore[misc]
        timer = self._loop.after(min(WAIT_S, within_s) if waiting else 0.0, over)


def _ask(guest: GuestProcess) -> socket.socket | None:
    """Our end of the connection it is to hang up; None where it takes none."""
    if guest.visits is None or not guest.main_runs:
        return None
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:  # no descriptor: what is not given back is copied along
        log_internal_error(error)
        return None
    visit = Visit(service=Service.CACHES, tenant=guest.tenant, lease=guest.lease, epoch=guest.epoch, operations=())
    try:
        guest.visits.pass_socket(visit, theirs)
    except SubletError:
        ours.close()
        return None
    finally:
        theirs.close()
    return ours
