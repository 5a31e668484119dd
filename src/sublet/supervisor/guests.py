"""All guests of one supervisor: started, watched, told, ended, and looked for until nothing of them runs.

A guest is *gone* when a look over the process table has shown that none of its processes is there, and no stranger
(whose might have been its own) either. Looks happen when somebody ended; between them nothing is assumed.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from sublet.clock import Clock
from sublet.errors import CapacityExceeded, LeaseNotActive, NotFound, QuotaExceeded, SubletError
from sublet.lease.states import GuestEvent, GuestState
from sublet.supervisor.cgroups import Groups
from sublet.supervisor.guest import Guest
from sublet.supervisor.launch import Launch, Prepared
from sublet.supervisor.logs import GuestLog
from sublet.supervisor.loop import READ, Loop, Timer
from sublet.supervisor.notes import GuestNote, Notes
from sublet.supervisor.reaper import Exit, Reaper
from sublet.supervisor.spawn import Child, SpawnFailed, read_failure
from sublet.supervisor.tenancy import Tenancy
from sublet.supervisor.tree import Look, Tree, Trees
from sublet.supervisor.visits import Visits
from sublet.values import NS_PER_S, EndReason, GuestId, LeaseId, TenantId, format_size
from sublet.wire.guests import GuestSpec, Profile

__all__ = ["ENDED_KEPT", "GUESTS_MAX", "GUESTS_PER_TENANT_MAX", "Guests", "out_of_memory", "what_to_do"]

GUESTS_MAX: Final = 2048
"""Guests that run at once on one machine."""
GUESTS_PER_TENANT_MAX: Final = 512
ENDED_KEPT: Final = 256
"""Ended guests that are still listed, with their logs."""
KILL_AGAIN_NS: Final = NS_PER_S // 2
"""Between two attempts to end one guest alone (the end of a lease has its own rhythm)."""
UNSEEN_S: Final = 0.2
"""After a look that could not be taken, for want of descriptors or memory: nothing is concluded from it."""
DRAIN_NS: Final = 2 * NS_PER_S
"""How long what a guest left in its pipes may take to be read by those who want all of it."""
REST_MAX_NS: Final = 20_000_000
ENDED_ALONE_GRACE_NS: Final = 5 * NS_PER_S

Begun = Callable[[Guest | None, SpawnFailed | SubletError | None], None]
"""Told the guest if it runs; else why not: its command cannot be run, or the machine or the lease is at fault."""


@dataclass(slots=True)
class _Starting:
    guest: Guest
    child: Child
    begun: Begun


class Guests:
    """Guests by id, and everything that is done to them."""

    def __init__(
        self, *, loop: Loop, clock: Clock, trees: Trees, groups: Groups, notes: Notes, launch: Launch, logs: str
    ) -> None:
        self.by_id: dict[GuestId, Guest] = {}
        self.on_gone: Callable[[LeaseId], None] = lambda _: None
        """Told when the last process of a guest of this lease is gone."""
        self.on_look: Callable[[Look], None] = lambda _: None
        """Told what each look has shown."""
        self.strangers = 0
        """Processes below the supervisor that are nobody's; while there are any, nothing is verified."""
        self._loop = loop
        self._clock = clock
        self._trees = trees
        self._groups = groups
        self._notes = notes
        self._launch = launch
        self._logs = logs
        self._reaper = Reaper(loop, self.look_soon)
        self._starting: dict[int, _Starting] = {}
        self._ended: deque[GuestId] = deque()
        self._will_look = False
        self._rest_until_ns = 0
        """After a look as much time is left for other things, so that of many that end one by one most are met by one
        look."""
        self._forced: dict[GuestId, Timer] = {}
        """Those that are ended alone, and when that is forced."""
        self._to_tell: list[Guest] = []
        self._to_kill: list[Guest] = []
        self._will_act = False

    # ---- starting ----

    def start(self, tenancy: Tenancy, profile: Profile, spec: GuestSpec, begun: Begun) -> None:
        """Run it; ``begun`` is told when it runs, or why it cannot. Raises for what can be said at once."""
        self._check_room(tenancy.tenant)

        def room_made(error: SubletError | None) -> None:
            try:
                if error is not None:
                    raise error
                if tenancy.over is not None:
                    raise LeaseNotActive(f"lease {tenancy.lease} is over")
                self._check_room(tenancy.tenant)
                self._start(tenancy, profile, spec, begun)
            except SubletError as refused:
                begun(None, refused)

        if not self._launch.make_room(tenancy, profile, spec, room_made):
            self._start(tenancy, profile, spec, begun)

    def _start(self, tenancy: Tenancy, profile: Profile, spec: GuestSpec, begun: Begun) -> None:
        id_ = GuestId("g-" + os.urandom(5).hex())
        folder = os.path.join(self._logs, id_)
        try:
            prepared = self._launch.prepare(
                tenancy, profile, spec, id_, lambda: GuestLog(folder, self._clock), lambda: self._all_read(id_)
            )
        except OSError as error:
            self._launch.remove(folder)
            raise _refused_by_machine(error) from error
        self._launch.fork(prepared, lambda child: self._forked(tenancy, profile, id_, prepared, child, begun))

    def _forked(
        self,
        tenancy: Tenancy,
        profile: Profile,
        id_: GuestId,
        prepared: Prepared,
        child: Child | OSError,
        begun: Begun,
    ) -> None:
        """It is there and waits. If its lease ended meanwhile, it has never run."""
        if isinstance(child, OSError):
            self._never_ran(prepared, begun, _refused_by_machine(child))
            return
        if tenancy.over is not None:
            child.forget()
            self._never_ran(prepared, begun, LeaseNotActive(f"lease {tenancy.lease} is over"))
            return
        tree = self._tree(id_, tenancy.lease, child.pid, prepared)
        guest = Guest(
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
            self._never_ran(prepared, begun, _refused_by_machine(error))
            return
        guest.memory_max = tenancy.memory_max
        if prepared.stdio.inbox >= 0:
            guest.visits = Visits(self._loop, prepared.stdio.inbox)
        tenancy.guests[id_] = self.by_id[id_] = guest
        guest.on_gone = lambda: tenancy.guests.pop(id_, None)
        self._trees.add(tree)
        self._reaper.expect(child.pid, lambda how: self._main_exited(guest, how))
        guest.stdio.started()
        self._starting[child.failure] = _Starting(guest, child, begun)
        self._loop.watch(child.failure, READ, lambda _: self._began(child.failure))
        child.go()

    def _never_ran(self, prepared: Prepared, begun: Begun, error: SubletError) -> None:
        prepared.stdio.close()
        self._launch.remove(prepared.log.folder)
        begun(None, error)

    def _check_room(self, tenant: TenantId) -> None:
        running = [guest for guest in self.by_id.values() if not guest.is_gone]
        if len(running) >= GUESTS_MAX:
            raise CapacityExceeded(
                f"{GUESTS_MAX} guests run on this machine, and that is the most", do="Wait until some have ended."
            )
        if sum(guest.tenant == tenant for guest in running) >= GUESTS_PER_TENANT_MAX:
            raise QuotaExceeded(
                f"tenant {tenant} has {GUESTS_PER_TENANT_MAX} guests running, and that is the most",
                do="End some with `sublet stop`, or run several commands in one guest.",
            )

    def _tree(self, id_: GuestId, lease: LeaseId, pid: int, prepared: Prepared) -> Tree:
        identity = self._trees.procs.identity(pid)
        assert identity is not None, "a child that was not waited for is always there"
        group = self._groups.group(lease, id_)
        return Tree(id_, lease, identity, group=group, uid=prepared.uid, stands_in=prepared.stands_in)

    def _note(self, guest: Guest, tenancy: Tenancy) -> None:
        group = guest.tree.group
        self._notes.write(
            GuestNote(
                guest=guest.id,
                lease=guest.lease,
                epoch=guest.epoch,
                tenant=guest.tenant,
                profile=guest.profile,
                parts=tenancy.parts,
                pid=guest.tree.root.pid,
                start_ticks=guest.tree.root.start_ticks,
                group=group.name if group is not None else "",
            )
        )

    def _began(self, failure: int) -> None:
        """The pipe closed at the exec, or says why there was none."""
        starting = self._starting.pop(failure)
        self._loop.forget(failure)
        guest = starting.guest
        failed = read_failure(failure, guest.spec.argv[0] if guest.spec.argv else guest.spec.entry)
        os.close(failure)
        if failed is not None:
            guest.exit_code = failed.exit_code
        elif guest.state is GuestState.STARTING:
            guest.now(GuestEvent.STARTED)
        guest.spec = replace(guest.spec, env={}, args="")  # it has them, and they are most of what is kept of it
        os.close(starting.child.pidfd)
        starting.begun(guest if failed is None else None, failed)

    # ---- seeing ----

    def get(self, id_: str, tenant: TenantId | None, *, lease: LeaseId | None = None) -> Guest:
        """The guest, if it is this tenant's (None: anybody's), and under this lease (None: any)."""
        guest = self.by_id.get(GuestId(id_))
        if guest is None or (tenant is not None and guest.tenant != tenant) or lease not in (None, guest.lease):
            raise NotFound(f"there is no guest {id_}", do="`sublet ps` lists yours; `--all` shows ended ones too.")
        return guest

    def of(self, tenant: TenantId | None, *, lease: str = "", guest: str = "", ended: bool = False) -> Iterator[Guest]:
        """Those of the tenant that fit, oldest first."""
        for found in self.by_id.values():
            if tenant is not None and found.tenant != tenant:
                continue
            if (lease and found.lease != lease) or (guest and found.id != guest):
                continue
            if ended or guest or not found.is_gone:
                yield found

    def look_soon(self) -> None:
        """Somebody ended: look who is left, once in this turn."""
        if not self._will_look and any(not guest.is_gone for guest in self.by_id.values()):
            self._will_look = True
            if self._loop.now_ns() >= self._rest_until_ns:
                self._loop.soon(self._look)
            else:
                self._loop.at(self._rest_until_ns, self._look)

    def look_after(self) -> None:
        """Once in a while: what cannot be capped here is measured, and whoever ended unnoticed is found."""
        self.look_soon()

    def _look(self) -> None:
        self._will_look = False
        try:
            self._see()
        except OSError:
            self._loop.after(UNSEEN_S, self.look_soon)

    def _see(self) -> None:
        began_ns = self._loop.now_ns()
        look = self._trees.look(guest.tree for guest in self.of(None) if guest.state is GuestState.ENDING)
        self.on_look(look)
        now_ns = self._loop.now_ns()
        self._rest_until_ns = now_ns + min(now_ns - began_ns, REST_MAX_NS)
        self.strangers = len(look.strangers)
        if look.strangers:
            self._trees.kill_strangers()
        for guest in tuple(self.by_id.values()):
            if guest.is_gone:
                continue
            guest.processes = len(look.of(guest.tree))
            if not guest.processes and not guest.main_runs and not self.strangers:
                self._gone(guest)

    def _main_exited(self, guest: Guest, how: Exit) -> None:
        failed = guest.exit_code >= 0  # it never ran: the failure pipe said so, and why
        if not failed:
            guest.exited(how)
            if guest.reason is EndReason.OUT_OF_MEMORY and not guest.is_told_of_memory:
                guest.is_told_of_memory = True
                guest.stdio.say(out_of_memory(guest.memory_max))

    def _gone(self, guest: Guest) -> None:
        """Nothing of it runs. What it still had to say is read to the end."""
        guest.now(GuestEvent.EXITED)
        guest.ended_wall_ns = self._clock.wall_ns()
        guest.settle()
        if (forced := self._forced.pop(guest.id, None)) is not None:
            forced.cancel()
        self._trees.drop(guest.id)
        if guest.tree.group is not None:
            guest.tree.group.remove()
        self._notes.drop(guest.id)
        if guest.stdio.is_done:
            self._all_read(guest.id)
        else:
            guest.stdio.drain_until(self._loop.now_ns() + DRAIN_NS)
        self._keep(guest)
        self.on_gone(guest.lease)

    def _all_read(self, id_: GuestId) -> None:
        """Its outputs are at their end. If nothing of it runs any more, that was all."""
        guest = self.by_id.get(id_)
        if guest is not None and guest.is_gone:
            guest.stdio.close()
            guest.tell(guest.last_news())

    def _keep(self, guest: Guest) -> None:
        self._ended.append(guest.id)
        while len(self._ended) > ENDED_KEPT:
            oldest = self.by_id.pop(self._ended.popleft())
            self._launch.remove(os.path.join(self._logs, oldest.id))

    # ---- ending ----

    def tell(self, guests: Iterable[Guest], line: str, reason: EndReason | None) -> None:
        """A line on stderr and SIGTERM, for whole trees."""
        for guest in guests:
            guest.stdio.hold_no_longer()
            guest.stdio.say(line)
            if reason is not None:
                guest.reason = guest.reason or reason
                if guest.state is not GuestState.ENDING:
                    guest.now(GuestEvent.END)
            self._to_tell.append(guest)
            self._act_soon()

    def signal(self, guest: Guest, number: int, *, tree: bool) -> None:
        """To its main process, or to all it has; harmless once it is gone."""
        if tree:
            self._trees.signal(guest.tree, number)
        else:
            self._trees.procs.send(guest.tree.root, number)

    def kill(self, guests: Iterable[Guest], reason: EndReason) -> None:
        """Their end, now. Whether they are gone is seen by the next look."""
        chosen = [guest for guest in guests if not guest.is_gone]
        for guest in chosen:
            guest.reason = guest.reason or reason
            guest.kills += 1
            if guest.state is not GuestState.ENDING:
                guest.now(GuestEvent.END)
        if chosen:
            self._to_kill += chosen
            self._act_soon()

    def _act_soon(self) -> None:
        """Of many that end at once the process table is read once."""
        if not self._will_act:
            self._will_act = True
            self._loop.soon(self._act)

    def _act(self) -> None:
        self._will_act = False
        told, self._to_tell = self._to_tell, []
        killed, self._to_kill = self._to_kill, []
        try:
            self._reach(told, killed)
        except OSError:
            self._to_tell, self._to_kill = told + self._to_tell, killed + self._to_kill
            self._loop.after(UNSEEN_S, self._act_soon)

    def _reach(self, told: list[Guest], killed: list[Guest]) -> None:
        if told:
            look = self._trees.look(guest.tree for guest in told)
            for guest in told:
                self._trees.signal_seen(guest.tree, signal.SIGTERM, look)
        if killed:
            self._trees.kill(guest.tree for guest in killed)
            self._reaper.reap()
            self.look_soon()

    def end_alone(self, guest: Guest, grace_ns: int) -> None:
        """End one guest under a lease that goes on."""
        if guest.is_gone:
            return
        if grace_ns < 0:
            grace_ns = guest.spec.grace_ns or ENDED_ALONE_GRACE_NS
        if grace_ns:
            self.tell([guest], "this command is being stopped", EndReason.OPERATOR)
        self._force_at(guest, self._loop.now_ns() + grace_ns)

    def _force_at(self, guest: Guest, at_ns: int) -> None:
        """However often it is asked for, one timer; the soonest counts."""
        before = self._forced.get(guest.id)
        if before is None or at_ns < before.at_ns:
            if before is not None:
                before.cancel()
            self._forced[guest.id] = self._loop.at(at_ns, lambda: self._force(guest))

    def _force(self, guest: Guest) -> None:
        self._forced.pop(guest.id, None)
        if not guest.is_gone:
            self.kill([guest], EndReason.OPERATOR)
            self._force_at(guest, self._loop.now_ns() + KILL_AGAIN_NS)

    def why_alive(self, guests: Iterable[Guest]) -> str:
        """What to say of guests that were killed and are still there."""
        look = self._trees.look()
        return self._trees.why_alive(stat for guest in guests for stat in look.of(guest.tree))


def _refused_by_machine(error: OSError) -> CapacityExceeded:
    return CapacityExceeded(
        f"no process could be started here: {error.strerror or error}",
        do="`sublet doctor` says what this machine allows; it may have too little memory, disk or descriptors.",
    )


def out_of_memory(allowed: int, used: int = 0) -> str:
    """The line for a guest that had too little: what its lease allows, and what was used if that was measured."""
    if not allowed:
        return "the machine has no memory left, and the kernel ended a process of this guest (out_of_memory)"
    if used:
        return f"the lease has {format_size(allowed)} of memory and its guests used {format_size(used)} (out_of_memory)"
    return f"the lease has {format_size(allowed)} of memory and needed more; the kernel ended a process (out_of_memory)"


def what_to_do(failed: SpawnFailed, profile: Profile) -> str:
    """For a person whose command did not come to run."""
    if profile is Profile.TENANT and failed.number == errno.ENOENT and failed.step in ("exec", "folder"):
        return (
            "Commands of a tenant see the system's folders (/usr, /etc, /opt and such) and what came with the lease, "
            "and no other file of this machine: `cd /` first, and name a program that lies there."
        )
    return {
        "exec": "Check the spelling and the PATH; a script needs a first line with #! and the right to be executed.",
        "folder": "Choose a working folder that exists and that you may enter.",
    }.get(failed.step, "`sublet doctor` says what this machine allows.")
