"""All guests of one supervisor: starts, watches, notifies and ends them, and verifies that they are gone.

A guest is *gone* when a look has shown that none of its processes is there, and no stranger (whose might have been its
own) either. A look follows the end of a process; between looks nothing is assumed. Mostly a look reads only the list
of the supervisor's own children; where that does not suffice, it reads all processes of the machine.

An internal error with one guest ends that guest (``fail_guest``) and no other: it is no longer supervised, so it must
not run on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from sublet.clock import Clock
from sublet.errors import LeaseNotActive, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import GuestEvent, GuestState
from sublet.lease_end import EndReason
from sublet.node.connections import internal_error
from sublet.node.loop import READ, Loop, log_internal_error
from sublet.node.priority import Priority
from sublet.node.processes.guest import GuestProcess, page_of
from sublet.node.processes.guest_connections import GuestConnections
from sublet.node.processes.guest_limits import EndedGuests, GuestRoom
from sublet.node.processes.guest_records import GuestRecords, note_of
from sublet.node.processes.launch import GuestLauncher, Prepared
from sublet.node.processes.lease_runtime import Borrowed, LeaseRuntime
from sublet.node.processes.logs import GuestLog, LogRoom
from sublet.node.processes.messages import out_of_memory, refused_by_machine
from sublet.node.processes.reaper import ProcessExit, Reaper
from sublet.node.processes.scan_schedule import UNSEEN_S, ScanSchedule
from sublet.node.processes.spawn import Child, SpawnFailed, read_failure
from sublet.node.processes.termination import Terminations
from sublet.node.processes.tree import ProcessSnapshot, Tree, Trees
from sublet.values import NS_PER_S, GuestId, LeaseId, TenantId
from sublet.wire.guests import GuestSpec, Profile

DRAIN_NS: Final = 2 * NS_PER_S
"""Time limit for reading what an ended guest left in its pipes, for readers that want all of it."""
AT_ONCE_MAX: Final = 8
"""Ended guests that are put away in one turn."""

Begun = Callable[[GuestProcess | None, SpawnFailed | SubletError | None], None]
"""Told the guest if it runs; else why not: its command cannot be run, or the machine or the lease is at fault."""


@dataclass(slots=True)
class _Starting:
    guest: GuestProcess
    child: Child
    begun: Begun


class GuestTable:
    """Guests by id, and everything that is done to them."""

    def __init__(
        self,
        *,
        loop: Loop,
        clock: Clock,
        trees: Trees,
        notes: GuestRecords,
        launch: GuestLauncher,
        logs: str,
        on_gone: Callable[[LeaseId], None],
        on_look: Callable[[ProcessSnapshot], None],
    ) -> None:
        """``on_gone`` is told when the last process of a guest of this lease is gone, ``on_look`` what each look has
        shown."""
        self.by_id: dict[GuestId, GuestProcess] = {}
        self._on_gone = on_gone
        self._on_look = on_look
        self.priority = Priority()
        self.strangers = 0
        """Processes below the supervisor whose guest is unknown; while there are any, nothing is verified."""
        self.leaving: dict[GuestId, GuestProcess] = {}
        """Seen to be gone, and not yet put away."""
        self._loop = loop
        self._clock = clock
        self._trees = trees
        self._notes = notes
        self._launch = launch
        self._logs = logs
        self._log_room = LogRoom(os.path.dirname(logs))
        self._scans = ScanSchedule(loop, self._see, lambda: any(True for _ in self.of(None)))
        self._reaper = Reaper(loop, self._scans.soon)
        self._starting: dict[int, _Starting] = {}
        self._kept = EndedGuests()
        self.room = GuestRoom()
        """How many there may be."""
        self._count = 0
        self._will_put_away = False
        self._terminations = Terminations(loop, trees, self.priority, killed=self._struck, safely=self._safely)

    # ---- starting ----

    def start(
        self, tenancy: LeaseRuntime, profile: Profile, spec: GuestSpec, begun: Begun, volume: Borrowed | None = None
    ) -> None:
        """Run it; ``begun`` is told when it runs, or why it cannot. Raises for what can be said at once. ``volume``: of
        another lease, where it may save."""
        if tenancy.closed:
            raise LeaseNotActive(f"lease {tenancy.lease} is {tenancy.closed}")
        self.room.check(tenancy.tenant, self.of(None))

        def room_made(error: SubletError | None) -> None:
            try:
                if error is not None:
                    raise error
                if tenancy.closed:
                    raise LeaseNotActive(f"lease {tenancy.lease} is {tenancy.closed}")
                self.room.check(tenancy.tenant, self.of(None))
                self._start(tenancy, profile, spec, begun, volume)
            except SubletError as refused:
                begun(None, refused)
            except Exception as error:  # noqa: BLE001 - the call returned long ago, and its caller must be told
                log_internal_error(error)
                begun(None, internal_error())

        if not self._launch.make_room(tenancy, profile, spec, room_made, volume):
            self._start(tenancy, profile, spec, begun, volume)

    def _start(
        self, tenancy: LeaseRuntime, profile: Profile, spec: GuestSpec, begun: Begun, volume: Borrowed | None
    ) -> None:
        id_ = GuestId("g-" + os.urandom(5).hex())
        folder = os.path.join(self._logs, id_)
        bound = self._kept.log_bound(tenancy.tenant, (guest.log.bound for guest in self.of(tenancy.tenant)))
        loop = self._loop.guarded(partial(self.fail_guest, id_))
        try:
            prepared = self._launch.prepare(
                tenancy,
                profile,
                spec,
                id_,
                log=lambda: GuestLog(folder, self._clock, bound, self._log_room),
                on_done=partial(self._all_read, id_),
                loop=loop,
                volume=volume,
            )
        except OSError as error:
            raise refused_by_machine(error) from error
        self._launch.fork(prepared, lambda child: self._on_forked(tenancy, profile, id_, prepared, child, begun))

    def _on_forked(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        id_: GuestId,
        prepared: Prepared,
        child: Child | OSError,
        begun: Begun,
    ) -> None:
        """Whatever goes wrong from here on, it ends, and the caller is told."""
        try:
            self._forked(tenancy, profile, id_, prepared, child, begun)
        except Exception as error:  # noqa: BLE001 - this may be a zygote's turn, or a holder's, and is neither's fault
            log_internal_error(error)
            is_reported = isinstance(child, Child) and child.failure in self._starting
            if isinstance(child, Child) and not is_reported:
                child.forget()
            if id_ not in self.by_id:
                self._never_ran(prepared, begun, internal_error())
                return
            self.fail_guest(id_)
            if not is_reported:
                begun(None, internal_error())

    def _forked(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        id_: GuestId,
        prepared: Prepared,
        child: Child | OSError,
        begun: Begun,
    ) -> None:
        """It is there and waits. If its lease ended meanwhile, it has never run."""
        if isinstance(child, OSError):
            self._never_ran(prepared, begun, refused_by_machine(child))
            return
        if tenancy.closed:
            child.forget()
            self._never_ran(prepared, begun, LeaseNotActive(f"lease {tenancy.lease} is {tenancy.closed}"))
            return
        tree = self._tree(id_, tenancy.lease, child.pid, prepared)
        guest = GuestProcess(
            id=id_,
            lease=tenancy.lease,
            epoch=tenancy.epoch,
            tenant=tenancy.tenant,
            profile=profile,
            spec=prepared.spec,
            tree=tree,
            stdio=prepared.stdio,
            log=prepared.log,
            wall_ns=self._clock.wall_ns(),
        )
        try:
            self._note(guest, tenancy)
        except OSError as error:
            child.forget()
            self._never_ran(prepared, begun, refused_by_machine(error))
            return
        self._count += 1
        guest.number = self._count
        guest.memory_max = tenancy.memory_max
        if prepared.volume is not None:
            guest.volumes[prepared.volume.tenancy.lease] = prepared.volume.epoch
        if prepared.stdio.inbox >= 0:
            refused = None if profile is Profile.LOCAL else lambda error: guest.stdio.write_notice(str(error))
            guest.visits = GuestConnections(prepared.loop, prepared.stdio.inbox, refused)
        tenancy.guests[id_] = self.by_id[id_] = guest
        guest.on_gone = partial(tenancy.guests.pop, id_, None)
        self._trees.add(tree)
        self._reaper.expect(child.pid, partial(self._reaped, guest))
        guest.stdio.started()
        self._starting[child.failure] = _Starting(guest, child, begun)
        prepared.loop.watch(child.failure, READ, lambda _: self._began(child.failure))
        child.let_run()

    def _never_ran(self, prepared: Prepared, begun: Begun, error: SubletError) -> None:
        self._launch.undo(prepared)
        begun(None, error)

    def _tree(self, id_: GuestId, lease: LeaseId, pid: int, prepared: Prepared) -> Tree:
        identity = self._trees.procs.identity(pid)
        assert identity is not None, "a child that was not waited for is always there"
        return Tree(id_, lease, identity, group=prepared.group, uid=prepared.uid, stands_in=prepared.stands_in)

    def _note(self, guest: GuestProcess, tenancy: LeaseRuntime) -> None:
        self._notes.write(note_of(guest, tenancy.parts))

    def _began(self, failure: int) -> None:
        """The pipe closed at the exec, or says why there was none."""
        starting = self._starting[failure]
        guest = starting.guest
        failed = read_failure(failure, guest.spec.argv[0] if guest.spec.argv else guest.spec.entry)
        if failed is not None:
            guest.exit_code, guest.has_run = failed.exit_code, False
        elif guest.state is GuestState.STARTING:
            guest.now(GuestEvent.STARTED)
        guest.spec = replace(guest.spec, env={}, args="")  # it has them, and they are most of what is kept of it
        self._has_begun(starting)
        starting.begun(guest if failed is None else None, failed)

    def _has_begun(self, starting: _Starting) -> None:
        """What was held only until it is known whether it runs is let go."""
        failure = starting.child.failure
        del self._starting[failure]
        self._loop.forget(failure)
        starting.child.forget()

    # ---- seeing ----

    page = staticmethod(page_of)

    def get(self, id_: str, tenant: TenantId | None, *, lease: LeaseId | None = None) -> GuestProcess:
        """The guest, if it is this tenant's (None: of any tenant), and under this lease (None: any)."""
        guest = self.by_id.get(GuestId(id_))
        if guest is None or (tenant is not None and guest.tenant != tenant) or lease not in (None, guest.lease):
            raise NotFound(f"there is no guest {id_}", do="`sublet ps` lists yours; `--all` shows ended ones too.")
        return guest

    def of(
        self, tenant: TenantId | None, *, lease: str = "", guest: str = "", ended: bool = False
    ) -> Iterator[GuestProcess]:
        """Those of the tenant that fit, oldest first."""
        for found in self.by_id.values():
            if tenant is not None and found.tenant != tenant:
                continue
            if (lease and found.lease != lease) or (guest and found.id != guest):
                continue
            if ended or guest or not found.is_gone:
                yield found

    def fail_guest(self, id_: GuestId, why: Exception | None = None) -> None:
        """End a guest that cannot be looked after any more because of an internal error; the log names it."""
        guest = self.by_id.get(id_)
        if guest is None:
            return
        if guest.is_gone:
            try:
                guest.give_up()
            except Exception as error:  # noqa: BLE001 - the listeners are not told, and the rest is done
                log_internal_error(error)
            return
        self._terminations.kill_until_gone(guest)
        for starting in tuple(self._starting.values()):
            if starting.guest is guest:
                self._has_begun(starting)
                starting.begun(None, internal_error())
        if not guest.is_broken:
            guest.is_broken = True
            self.kill([guest], EndReason.GUEST_FAILED)
            try:
                guest.stdio.write_notice(
                    "internal error in the supervisor; this command is ended (see the supervisor's log)"
                )
            except Exception as error:  # noqa: BLE001 - perhaps it is this that is broken
                log_internal_error(error)

    def _safely(self, guest: GuestProcess, call: Callable[[], object]) -> None:
        """Do this for the guest; a failure ends that guest and no other."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - see the head of the module
            log_internal_error(error)
            self.fail_guest(guest.id)

    def scan(self) -> None:
        """Called at intervals: reads all processes, to measure what cannot be capped here and find unnoticed ends."""
        self._terminations.beat()
        self._scans.soon(at_all=True)

    def _see(self, at_all: bool) -> None:
        guests = list(self.of(None))
        closely = [guest.tree for guest in guests if guest.kills > 1 or guest.hides]
        present = None
        if not closely and not at_all:
            present = self._trees.present({guest.tree.root.pid for guest in guests if guest.main_runs})
        if present is None:
            self._see_all(guests, closely)
        else:
            self.strangers = 0
        for guest in guests:
            if guest.main_runs:
                continue
            if present is not None:
                guest.processes = max(guest.processes, 1) if guest.id in present else 0
            if guest.processes and guest.spec.serves and guest.state is not GuestState.ENDING:
                self._end_left_behind(guest)
            if not guest.processes and not self.strangers:
                self.leaving[guest.id] = guest
        if self.leaving:
            self._put_away_soon()

    def _see_all(self, guests: Iterable[GuestProcess], closely: Iterable[Tree]) -> None:
        look = self._trees.scan(closely)
        try:
            self._on_look(look)
        except Exception as error:  # noqa: BLE001 - what is measured besides must not hide who is gone
            log_internal_error(error)
        self.strangers = len(look.strangers)
        if look.strangers:
            self._trees.kill_strangers()
        for guest in guests:
            guest.processes = len(look.of(guest.tree))

    def _end_left_behind(self, guest: GuestProcess) -> None:
        """What a command leaves behind runs on under the lease. A guest that serves is its main process: no caller can
        reach what that leaves behind, and the next guest needs the place."""
        self._terminations.kill_until_gone(guest)
        self.kill([guest], EndReason.GUEST_FAILED)

    def _put_away_soon(self) -> None:
        if not self._will_put_away:
            self._will_put_away = True
            self._loop.soon(self._put_away)

    def _put_away(self) -> None:
        """A few in each turn, so that of many that are gone at once the first need not wait for the last."""
        self._will_put_away = False
        for guest in tuple(self.leaving.values())[:AT_ONCE_MAX]:
            del self.leaving[guest.id]
            if guest.is_gone or guest.processes or self.strangers:  # the last look was another one
                continue
            if self._is_out_of_its_group(guest):
                self._on_exit(guest)
        if self.leaving:
            self._put_away_soon()

    def _is_out_of_its_group(self, guest: GuestProcess) -> bool:
        """The closest look, at its group: a process in it that nothing else has shown is found, and ended, by later
        looks that ask the group."""
        group = guest.tree.group
        if group is not None:
            guest.hides = bool(group.inhabited())
            if guest.hides:
                self._loop.after(UNSEEN_S, self._scans.soon)
        return not guest.hides

    def _reaped(self, guest: GuestProcess, how: ProcessExit) -> None:
        self._safely(guest, lambda: self._main_exited(guest, how))

    def _main_exited(self, guest: GuestProcess, how: ProcessExit) -> None:
        failed = guest.exit_code >= 0  # it never ran: the failure pipe said so, and why
        if not failed:
            guest.exited(how)
            if guest.reason is EndReason.OUT_OF_MEMORY and not guest.is_warned_of_memory:
                guest.is_warned_of_memory = True
                guest.stdio.write_notice(out_of_memory(guest.memory_max))

    def _on_exit(self, guest: GuestProcess) -> None:
        """Nothing of it runs. What it still had to say is read to the end. Each step is done whatever the others do."""
        guest.now(GuestEvent.EXITED)
        guest.ended_wall_ns = self._clock.wall_ns()
        self._terminations.is_gone(guest)
        for step in (
            guest.release_live_state,
            lambda: self._trees.drop(guest.id),
            lambda: self._launch.aside.leave(guest.tree.group, guest.count, partial(self._notes.drop, guest.id)),
            lambda: self._drain_output(guest),
            lambda: self._keep(guest),
            lambda: self._on_gone(guest.lease),
        ):
            self._safely(guest, step)

    def _drain_output(self, guest: GuestProcess) -> None:
        if guest.is_broken:
            guest.give_up()
        elif guest.stdio.is_done:
            self._all_read(guest.id)
        else:
            guest.stdio.drain_until(self._loop.now_ns() + DRAIN_NS)

    def _all_read(self, id_: GuestId) -> None:
        """Its outputs are at their end. If nothing of it runs any more, that was all."""
        guest = self.by_id.get(id_)
        if guest is not None and guest.is_gone:
            guest.stdio.close()
            guest.notify(guest.last_news())

    def _keep(self, guest: GuestProcess) -> None:
        let_go = self._kept.add(guest.tenant, guest.id, guest.log.size) if guest.has_run else [guest.id]
        for oldest in let_go:
            del self.by_id[oldest]
            self._launch.aside.later(partial(self._launch.remove, os.path.join(self._logs, oldest)))

    # ---- ending ----

    def terminate(self, guests: Iterable[GuestProcess], line: str, reason: EndReason | None) -> None:
        """A line on stderr and SIGTERM, for whole trees."""
        self._terminations.terminate(guests, line, reason)

    def kill(self, guests: Iterable[GuestProcess], reason: EndReason) -> None:
        """Their end, now. Whether they are gone is seen by the next look; one that was seen to be gone needs none."""
        self._terminations.kill((guest for guest in guests if guest.id not in self.leaving), reason)

    def end_alone(self, guest: GuestProcess, grace_ns: int) -> None:
        """End one guest under a lease that goes on."""
        self._terminations.alone(guest, grace_ns)

    def signal(self, guest: GuestProcess, number: int, *, tree: bool) -> None:
        """To its main process, or to all it has; harmless once it is gone."""
        if tree:
            self._trees.signal(guest.tree, number)
        else:
            self._trees.procs.send(guest.tree.root, number)

    def why_alive(self, guests: Iterable[GuestProcess]) -> str:
        """What to say of guests that were killed and are still there."""
        look = self._trees.scan()
        return self._trees.why_alive(stat for guest in guests for stat in look.of(guest.tree))

    def _struck(self) -> None:
        """Some were killed: those that ended are reaped at once, and the others are looked for."""
        self._reaper.reap()
        self._scans.soon()
