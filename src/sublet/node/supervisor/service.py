"""The supervisor itself: puts its parts together and runs its loop. ``core`` decides what it does for its office.

It lives as long as anything it must look after: an office, a live lease, a guest, a teardown. No guest outlives
it, and that relies on no promise: guests are sent SIGKILL by the kernel, and what they started is found and ended by
the next supervisor before anything becomes free.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from sublet.background import troubles
from sublet.errors import CapacityExceeded, InvalidRequest, LeaseNotActive, QuotaExceeded, SubletError, Unauthorized
from sublet.lease.node import Node
from sublet.lease_end import EndReason
from sublet.node.forked_jobs import ForkedJobs
from sublet.node.loop import Accepting, Timer, log_internal_error
from sublet.node.output_budget import OutputBudget
from sublet.node.prctl import set_child_subreaper
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.files import FILES_WANTED, allowance
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guest_limits import GUESTS_MAX
from sublet.node.processes.guest_records import GuestRecords
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.launch import GuestLauncher
from sublet.node.processes.lease_limits import office_limits
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.memory_watch import MemoryWatch, VramWatch
from sublet.node.processes.procs import Procs
from sublet.node.processes.trash import Trash
from sublet.node.processes.tree import ProcessSnapshot, Trees
from sublet.node.processes.zygotes import Zygotes
from sublet.node.storage.store import StoredFolder
from sublet.node.storage.stores import Stores
from sublet.node.supervisor.core import SupervisorCore
from sublet.node.supervisor.guarded_hardware import GuardedHardware
from sublet.node.supervisor.holder_link import HolderLink
from sublet.node.supervisor.locks import AGAIN_NS, Claims, DeviceLocks
from sublet.node.supervisor.office_link import OfficeLink
from sublet.node.supervisor.parking import Parker
from sublet.node.supervisor.real_hardware import RealHardware
from sublet.node.supervisor.recovery import Predecessor
from sublet.node.supervisor.suspending import Suspending
from sublet.node.supervisor.volume_service import VolumeService
from sublet.values import NS_PER_S, Epoch, LeaseId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import CardUse
from sublet.wire.guests import (
    Admit,
    Configure,
    Configured,
    EndGuest,
    ListGuests,
    ListProcesses,
    Orders,
    Processes,
    Quit,
    Revoke,
    TroubleNote,
    Troubles,
)
from sublet.wire.guests import Guests as GuestList
from sublet.wire.link_events import PeerHello
from sublet.wire.orders import Inventory, Saved
from sublet.wire.settings import SupervisorSettings
from sublet.wire.sockets import peer_of

SOCKET_NAME: Final = "supervisor.sock"
BEAT_S: Final = 1.0
"""How often pages get the present time, and it is checked whether this process is still needed."""
QUIT_NS: Final = 5 * NS_PER_S
"""How long guests may take to be ended when it is told to end at once."""
QUIT_LOOK_S: Final = 0.05
HOLDERS_MAX: Final = 2048
"""Connections of holders; each takes a descriptor, of which the guests need most."""
HOLDERS_PER_TENANT_MAX: Final = 1024


class Supervisor:
    """One for each office and machine."""

    def __init__(
        self,
        settings: SupervisorSettings,
        zygotes: Zygotes,
        *,
        files: int = FILES_WANTED,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        """``zygotes``: the first may have been begun already, in the loop in which everything is done. ``files``: how
        many descriptors there may be. ``refresh``: called every few seconds."""
        self._refresh = refresh
        set_child_subreaper()
        self.settings = settings
        self.loop = zygotes.loop
        self.clock = clock = self.loop.clock
        self._started_ns = clock.now_ns()
        self._core = SupervisorCore(
            make_law=self._make_law,
            arm=self._arm,
            now_ns=self._started_ns,
            on_reports_sent=self._restore_priority,
        )
        self._groups = Groups.probe(settings.office)
        self._notes = GuestRecords(os.path.join(settings.runtime, "notes"))
        self._procs = Procs()
        self._trees = Trees(self._procs, os.getpid())
        forked_jobs = ForkedJobs(self.loop, self._trees.helper_lives)
        self._launch = GuestLauncher(
            loop=self.loop,
            office=settings.office,
            runtime=settings.runtime,
            state=settings.state,
            groups=self._groups,
            trees=self._trees,
            zygotes=zygotes,
            forked_jobs=forked_jobs,
            aside=Trash(self.loop, forked_jobs),
            stores=Stores(
                loop=self.loop,
                forked_jobs=forked_jobs,
                state=settings.state,
                runtime=settings.runtime,
                on_gone=self._guest_gone,
                on_leave=self._store_leaves,
                on_stuck=self._store_stuck,
            ),
            pinned=lambda: [one.pinned for one in self.premises.everything],
            door=self._open_door,
        )
        self.guests = GuestTable(
            loop=self.loop,
            clock=clock,
            trees=self._trees,
            notes=self._notes,
            launch=self._launch,
            logs=os.path.join(settings.state, "guests"),
            on_gone=self._guest_gone,
            on_look=self._on_scan,
        )
        self._allowed = allowance(files, guests_max=GUESTS_MAX, holders_max=HOLDERS_MAX)
        self.guests.room.guests_max, self.guests.room.why = self._allowed.guests, self._allowed.why
        self._claims = Claims(DeviceLocks(settings.state))
        self._claim_again_ns = 0
        self._holders: set[HolderLink] = set()
        self.unread = OutputBudget()
        self._timer: Timer | None = None
        self._predecessor = Predecessor(
            procs=self._procs,
            groups=self._groups,
            notes=self._notes,
            leases=self._launch.leases,
            clock=clock,
            put_away=self._launch.aside.put,
            later=self._launch.aside.later,
        )
        self._suspending = Suspending(self.loop, self._launch.helper_lives)
        self._parker = Parker(self.loop, self._trees, self._notes, self._suspending, self._lost)
        self._vram_watch = VramWatch()
        self.premises = RealHardware(
            guests=self.guests,
            stores=self._launch.stores,
            forked_jobs=self._launch.forked_jobs,
            aside=self._launch.aside,
            held=self._launch.held,
            parker=self._parker,
            office=settings.office,
            now_ns=self.loop.now_ns,
            cut=self._cut,
            on_moved=self._guest_gone,
            still_left=self._predecessor.remaining,
            name_of=lambda lease: "" if self.node is None else self.node.names.get(lease, ""),
            saved_of=self._saved_of,
        )
        self._launch.stores.begin()
        self._volumes = VolumeService(
            loop=self.loop,
            launch=self._launch,
            guests=self.guests,
            trees=self._trees,
            tenancies=self.premises.tenancies,
            runtime=settings.runtime,
            fence=self._check_live,
            on_saved=self._saved,
        )
        self._memory = MemoryWatch(self.guests, self._procs, lambda: self.premises.everything)

    @property
    def node(self) -> Node | None:
        """The law; None until the first office has said what this machine has."""
        return self._core.law

    # ---- what parts tell parts that are made after them ----

    def _restore_priority(self) -> None:
        self.guests.priority.back()

    def _store_leaves(self, store: StoredFolder) -> None:
        self._volumes.publishing.lease_ended(store)

    def _store_stuck(self, store: StoredFolder) -> None:
        self._volumes.on_stuck(store)

    def _open_door(self) -> str:
        return self._volumes.open_door()

    def _on_scan(self, look: ProcessSnapshot) -> None:
        self._memory.check(look)

    def _saved_of(self, lease: LeaseId) -> Saved | None:
        return self._volumes.publishing.saved.get(lease)

    # ---- life ----

    def serve(self, listening: socket.socket) -> None:
        """Serve until this process is no longer needed."""
        self._accepting = Accepting(self.loop, "supervisor_door", listening, self._accept)
        self._accepting.begin()
        self._beat()
        try:
            self.loop.run()
        finally:
            self._launch.zygotes.close()
            self._volumes.close()
            self._launch.stores.close()
            self._suspending.close()
            self._claims.close()
            self.premises.leave()
            self._groups.remove()
            for folder in (self._launch.leases, self._notes.folder):
                with contextlib.suppress(OSError):  # something is in it, and is there for the next one
                    os.rmdir(folder)

    def _accept(self, sock: socket.socket) -> None:
        if peer_of(sock).uid != os.getuid():
            sock.close()
            return
        OfficeLink(self.loop, sock, self, self._office_gone)

    def _office_gone(self, link: OfficeLink) -> None:
        self._core.office_gone(link, self.loop.now_ns())

    def _beat(self) -> None:
        """Whatever of it fails, the rest is done, and it comes again."""
        self.loop.after(BEAT_S, self._beat)
        now_ns = self.loop.now_ns()
        for tenancy in tuple(self.premises.tenancies.values()):
            self._safely(lambda tenancy=tenancy: tenancy.show(now_ns))  # type: ignore[misc]
            self._safely(lambda tenancy=tenancy: self._cut_tally(tenancy))  # type: ignore[misc]
        self._safely(self.guests.scan)
        self._safely(self._measure_stores)
        self._safely(lambda: self._claim_again(now_ns))
        self._safely(self._stop_if_idle)

    def _cut_tally(self, tenancy: LeaseRuntime) -> None:
        if not tenancy.cut_tally():
            return
        for guest in tenancy.running():
            guest.stdio.write_notice(
                "it wrote into the file of what its lease has counted, which is not for data, and is ended"
            )
        self.guests.kill(tenancy.running(), EndReason.GUEST_FAILED)

    def _measure_stores(self) -> None:
        for lease, line in self._launch.stores.measure():
            self.premises.notify_guests(lease, line)

    def _safely(self, call: Callable[[], None]) -> None:
        """Call it; an internal error in it is logged and has no further effect."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the law alone may end this process
            log_internal_error(error)

    def _mistaken(self, lease: LeaseId) -> None:
        """What the guests of this lease had to be told could not be: a guest that cannot be told of an end must not
        run on."""
        tenancy = self.premises.tenancies.get(lease)
        for guest in tuple(tenancy.running()) if tenancy is not None else ():
            self.guests.fail_guest(guest.id)

    def _claim_again(self, now_ns: int) -> None:
        """What another office has may be free by now."""
        if now_ns >= self._claim_again_ns:
            self._claim_again_ns = now_ns + AGAIN_NS
            self._safely(self._refresh)
            self._core.report(*self._claims.again())
            self._core.send_reports()

    def _stop_if_idle(self) -> None:
        if not self._is_needed(self.loop.now_ns()):
            self.loop.stop()
        elif self._core.may_quit:  # for what is left to look after, which may be one card in quarantine
            self._claims.keep_only(self._core.used())

    def _is_needed(self, now_ns: int) -> bool:
        at = (os.path.join(self.settings.runtime, SOCKET_NAME), self.settings.state)  # else it was removed, or moved
        return self._core.is_needed(
            now_ns,
            has_guests=any(True for _ in self.guests.of(None)),
            can_be_found=all(map(os.path.lexists, at)),
        )

    # ---- for the office ----

    def configure(self, link: OfficeLink, request: Configure) -> Configured:
        if request.office != self.settings.office:
            raise InvalidRequest(
                f"this is the supervisor of office {self.settings.office}, not of {request.office}",
                do="Stop it with `sublet down`, or use another SUBLET_HOME.",
            )
        self._cap(request.caps)
        is_new = self._core.configure(link, request.inventory, self.loop.now_ns())
        self._core.report(*self._claims.configure(request.inventory))
        devices = request.inventory.devices
        self._launch.card_nodes = {device.id: device.nodes for device in devices if device.nodes}
        self._launch.card_troubles = {device.id: device.walled_trouble for device in devices if device.walled_trouble}
        self._step()
        assert self.node is not None
        return Configured(
            pid=os.getpid(),
            version=self.settings.version,
            started_ns=self._started_ns,
            live=tuple(live.lease for live in self.node.fence),
            guests=sum(1 for _ in self.guests.of(None)),
            lines=tuple(
                f"{description.part}: {'active' if description.is_active else 'NOT active'}, {description.text}"
                for description in self._groups.describe()
            ),
            is_new=is_new,
        )

    def _make_law(self, inventory: Inventory) -> Node:
        """Over what a dead supervisor left."""
        left = self._predecessor.leftovers(inventory.devices)
        for card, since_ns in self._predecessor.cards_since().items():
            self.premises.cards.was_lent(card, since_ns)
        self.premises.left = [*left, *self._launch.stores.leftovers()]
        return Node(inventory, GuardedHardware(self.premises, self._mistaken), report=self._core.report)

    def _check_live(self, lease: LeaseId, epoch: Epoch) -> None:
        """Raises unless the lease lives under this epoch."""
        if self.node is None:
            raise LeaseNotActive("the office has not sent the inventory of this machine yet")
        self.node.check(lease, epoch, self.loop.now_ns())

    def _cap(self, caps: LeaseCaps) -> None:
        """Leases that begin from now on have these caps, and all guests together have theirs at once."""
        self._launch.caps = caps
        cards = self.premises.cards
        cards.lends_beside = caps.lend_beside
        cards.shows_pids = caps.shows_pids
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/sys/kernel/pid_max", "rb") as file:
            pids_max = int(file.read(32))
        limits = office_limits(caps, memory_bytes=memory_bytes, cores=os.cpu_count() or 1, pids_max=pids_max)
        self._groups.cap_office(limits)  # `sublet doctor` says what cannot be capped here

    def obey(self, orders: Orders) -> None:
        self._core.obey(orders, self.loop.now_ns())

    def are_leaving(self) -> bool:
        return self._core.has_gone or bool(self.guests.leaving)

    def admit(self, request: Admit, fd: int) -> None:
        if self.node is None:
            raise LeaseNotActive("the office has not sent the inventory of this machine yet")
        front = request.front
        self._check_holders(front.tenant)
        holder = HolderLink(
            loop=self.loop,
            sock=socket.socket(fileno=os.dup(fd)),
            hello=PeerHello(request.oldest, request.newest, b""),
            front=front,
            node=self.node,
            premises=self.premises,
            guests=self.guests,
            on_over=self._holders.discard,
            unread=self.unread,
            volumes=self._volumes,
            warm=self._launch.zygotes.wish,
        )
        self._holders.add(holder)

    def _check_holders(self, tenant: TenantId) -> None:
        tenants = [holder.front.tenant for holder in self._holders]
        for guest in self.guests.of(None):
            tenants += guest.visits.tenants if guest.visits is not None else ()
        if len(tenants) >= self._allowed.holders:
            raise CapacityExceeded(
                f"{self._allowed.holders} connections to commands are open on this machine, and that is the most",
                do=self._allowed.why or "Wait until some have ended.",
            )
        if tenants.count(tenant) >= HOLDERS_PER_TENANT_MAX:
            raise QuotaExceeded(
                f"tenant {tenant} has {HOLDERS_PER_TENANT_MAX} connections to commands open, and that is the most",
                do="Close some; one connection can attend many commands.",
            )

    def revoke(self, request: Revoke) -> None:
        changed = Unauthorized("the rights of this tenant have changed")
        self._cut_those(request.tenant, None, changed, request.generation)

    def list_guests(self, request: ListGuests) -> GuestList:
        found = self.guests.of(None, lease=request.lease, guest=request.guest, ended=request.ended)
        return self.guests.page(found, request.after)

    def list_processes(self, request: ListProcesses) -> Processes:
        look = self._trees.scan()
        if request.uses:
            self._parker.uses = request.uses
            self._end_offenders(request.uses, look)
            if self.node is not None:
                self.node.counted(self.loop.now_ns())
                self._step()
        if request.let_go:
            self._suspending.end_if_idle()
        guests = (stat.pid for stats in look.members.values() for stat in stats)
        return Processes(pids=(os.getpid(), *self._trees.helpers, *guests))

    def list_troubles(self) -> Troubles:
        return Troubles(
            troubles=tuple(
                TroubleNote(
                    loop=one.name, shortages=one.shortages, errors=one.errors, failing=one.failing, last=one.last
                )
                for one in troubles()
            )
        )

    def _end_offenders(self, uses: tuple[CardUse, ...], look: ProcessSnapshot) -> None:
        """Guests that have more of a card than their lease: each is warned once before it is ended."""
        running = list(self.guests.of(None))
        owners = {stat.pid: guest for guest in running for stat in look.of(guest.tree)}
        parts = {one.lease: one.parts for one in self.premises.everything}
        for offender in self._vram_watch.offenders(uses, owners, parts):
            guest = self.guests.by_id[offender.guest]
            if not offender.is_warned:
                guest.stdio.write_notice(offender.line)
                continue
            if not guest.is_warned_of_memory:
                guest.is_warned_of_memory = True
                guest.stdio.write_notice(offender.line)
            self.guests.kill([guest], EndReason.OUT_OF_MEMORY)

    def _lost(self, guest: GuestProcess, why: str) -> None:
        guest.stdio.write_notice(f"it could not be put back on its device, and is ended: {why}")
        self.guests.kill([guest], EndReason.DEVICE_LOST)

    def end_guest(self, request: EndGuest) -> None:
        self.guests.end_alone(self.guests.get(request.guest, None), request.grace_ns)

    def quit(self, request: Quit) -> None:
        self._core.may_quit = True
        if request.now:
            self._end_all(self.loop.now_ns() + QUIT_NS)
        self.loop.soon(self._stop_if_idle)

    def _end_all(self, until_ns: int) -> None:
        """Of what is not gone in time the next supervisor finds a note."""
        left = list(self.guests.of(None))
        self.guests.kill(left, EndReason.OPERATOR)
        if left and self.loop.now_ns() < until_ns:
            self.loop.after(QUIT_LOOK_S, lambda: self._end_all(until_ns))
        else:
            self.loop.stop()

    # ---- the law's turn ----

    def _saved(self, lease: LeaseId, save_ns: int) -> None:
        if self.node is not None:
            self.node.saved(lease, save_ns)

    def _guest_gone(self, lease: LeaseId) -> None:
        """Guests that are gone at once are reported together."""
        if self._core.guest_gone(lease):
            self.loop.soon(lambda: self._core.process_gone_guests(self.loop.now_ns()))

    def _step(self) -> None:
        self._core.step(self.loop.now_ns())

    def _arm(self, wake_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_ns is not None:
            self._timer = self.loop.at(wake_ns, self._step)

    def _cut(self, lease: LeaseId) -> None:
        self._cut_those(None, lease, LeaseNotActive(f"lease {lease} is held by another program now"))

    def _cut_those(
        self, tenant: TenantId | None, lease: LeaseId | None, error: SubletError, generation: int = 0
    ) -> None:
        """``generation``: only those that were let in before it; 0: all."""
        for holder in tuple(self._holders):
            front = holder.front
            if (tenant is None or front.is_by(tenant, generation)) and (lease is None or front.lease == lease):
                holder.cut(error)
        for guest in self.guests.of(None):
            if guest.visits is not None:
                guest.visits.cut(tenant, lease, generation)
