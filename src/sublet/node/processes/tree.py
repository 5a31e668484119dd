"""Process trees: attributes processes to guests whatever they do to hide, and ends whole trees.

The supervisor is a child subreaper, so nothing that its guests start can leave its process tree: what loses its parent
becomes the supervisor's own child. Every process below it therefore belongs to a guest, which is identified in this
order:

1. it is in the guest's control group, where there is one;
2. it is the guest's first process, or was known as the guest's at the last look;
3. it descends from one of those;
4. it is an orphan of a session in which the guest's processes were at the last look;
5. it is an orphan whose initial environment names the guest (and whose user is the guest's).

What remains below the supervisor is a *stranger*: it cleared its environment, made a session of its own and forked
twice, all between two looks. Whose it is cannot be told, so it is ended, and until it is gone no guest is verified.

A tree without a group is ended in two steps, stop and kill: what stands still cannot fork, so a program that forks
faster than it can be counted loses. Nothing here waits; the caller looks again until nothing is left.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Final, NamedTuple, TypeVar

from sublet.node.processes.group import ControlGroup
from sublet.node.processes.limits import GroupUsage
from sublet.node.processes.procs import NS_PER_TICK, PAGE_BYTES, ProcessInstance, ProcessStat, Procs, Table
from sublet.node.processes.stuck import why_alive
from sublet.values import GuestId, LeaseId

OFFICE_MARK: Final = "SUBLET_OFFICE"
LEASE_MARK: Final = "SUBLET_LEASE"
GUEST_MARK: Final = "SUBLET_GUEST"
"""Variables of a guest's initial environment by which it and its children are known."""

_STOP_ROUNDS: Final = 6
"""Looks within one attempt to end a tree. A tree that stands still is done after two."""
_ASLEEP_IN_KERNEL: Final = ord("D")
_UNKNOWN: Final = GuestId("")
_NO_PROCESSES: Final = frozenset[ProcessInstance]()
"""One for all trees: an empty set takes as much room as one with four in it."""
_FEW: Final = 4
_T = TypeVar("_T")


class Tree:
    """The processes of one guest."""

    __slots__ = (
        *("group", "guest", "known", "lease", "outside", "root", "sessions", "stands_in", "uid"),
        *("_cpu_ns", "_exited_ns", "_inherited", "_peak_bytes"),
    )

    def __init__(
        self,
        guest: GuestId,
        lease: LeaseId,
        root: ProcessInstance,
        *,
        group: ControlGroup | None = None,
        uid: int | None = None,
        stands_in: bool = False,
    ) -> None:
        self.guest = guest
        self.lease = lease
        self.root = root
        """Its first process, a session of its own."""
        self.group = group
        self.uid = uid
        """The user of its processes; marks of another user's orphan are not believed. None: any user."""
        self.stands_in = stands_in
        """Whether the first process only stands for the guest outside of a process namespace (``isolation.init``)."""
        self.known: Collection[ProcessInstance] = (root,)
        """Its processes at the last look."""
        self.sessions: Collection[int] = (root.pid,)
        """Theirs. A session's number is not given anew as long as a process is in it."""
        self.outside: Set[ProcessInstance] = _NO_PROCESSES
        """Those of them that have left the group, as root may."""
        self._inherited: Collection[int] = ()
        """The session it was started in, if it was seen before it made its own: that of a zygote, or ours."""
        self._exited_ns = 0
        self._cpu_ns = 0
        self._peak_bytes = 0

    @property
    def is_boxed(self) -> bool:
        """Whether all of it is in its group, as far as looks have shown."""
        return self.group is not None and not self.outside

    def pids_known(self) -> set[int]:
        """Pids that may be of its processes now."""
        return {self.root.pid, *(identity.pid for identity in self.known)}

    def exited(self, cpu_ns: int, peak_bytes: int) -> None:
        """The supervisor has waited for one of its processes, and ``wait4`` said what it had used."""
        self._exited_ns += cpu_ns
        self._peak_bytes = max(self._peak_bytes, peak_bytes)

    def seen(self, members: Collection[ProcessStat], foreign_session: int, inside: Set[int] | None) -> None:
        """Remember what a look has shown."""
        if not members:
            self.known, self.sessions, self.outside = (), (), _NO_PROCESSES
            return
        self.known = _kept(stat.identity for stat in members)
        if inherited := {one.session for one in members if one.identity == self.root} - {self.root.pid}:
            self._inherited = _kept((*self._inherited, *inherited))
        self.sessions = _kept({stat.session for stat in members}.difference(self._inherited, (foreign_session,)))
        if inside is not None:
            self.outside = frozenset(stat.identity for stat in members if stat.pid not in inside) or _NO_PROCESSES
        self._cpu_ns = max(self._cpu_ns, self._exited_ns + sum(stat.cpu_ticks for stat in members) * NS_PER_TICK)
        self._peak_bytes = max(self._peak_bytes, _resident(members))

    def usage(self, members: Iterable[ProcessStat] = ()) -> GroupUsage:
        """What it has used: by its group where there is one, else as far as the looks have shown.

        Without a group, pages that several processes share count in each, and the time of a process that its parent
        did not wait for is not known.
        """
        if self.group is not None:
            return self.group.usage()
        now = _resident(members)
        peak = max(self._peak_bytes, now)
        return GroupUsage(cpu_ns=max(self._cpu_ns, self._exited_ns), memory_bytes=now, memory_peak_bytes=peak)

    def used(self) -> GroupUsage:
        """The same, once nothing of it runs."""
        return self.group.used() if self.group is not None else self.usage()

    def oom_kills(self) -> int:
        """How many of its processes the kernel ended for want of memory, where its group counts them."""
        return self.group.oom_kills() if self.group is not None else 0


class ProcessSnapshot(NamedTuple):
    """The processes that there are, at one moment."""

    table: Table
    members: Mapping[GuestId, list[ProcessStat]]
    """The living processes of each guest. Those that only wait to be asked for their exit are left out."""
    strangers: list[ProcessStat]
    """Living processes below the supervisor that belong to no guest."""

    def of(self, tree: Tree) -> list[ProcessStat]:
        return self.members.get(tree.guest, [])


class Trees:
    """All trees of one supervisor. One look serves them all: it costs a pass over the process table."""

    def __init__(self, procs: Procs, me: int) -> None:
        self.procs = procs
        self.me = me
        """The supervisor's pid."""
        self.trees: dict[GuestId, Tree] = {}
        self.helpers: dict[int, ProcessInstance] = {}
        """Processes of the supervisor's own, such as zygotes; what is below them, or in their session, is theirs."""

    def add(self, tree: Tree) -> None:
        """A guest was started."""
        self.trees[tree.guest] = tree

    def drop(self, guest: GuestId) -> None:
        """It was verified to be gone."""
        self.trees.pop(guest, None)

    def help(self, identity: ProcessInstance) -> None:
        """This child of the supervisor is its own, and a session of its own."""
        self.helpers[identity.pid] = identity

    def helper_lives(self, pid: int, lives: bool) -> None:
        """A process of the supervisor's own was made, or has ended. Of the end nothing is read: that needs a
        descriptor, and the part that waits for the process's result must hear of it without one too."""
        if not lives:
            self.disown(pid)
        elif (identity := self.procs.identity(pid)) is not None:
            self.help(identity)

    def disown(self, pid: int) -> None:
        """It has ended; what it left below the supervisor is from now on a stranger."""
        self.helpers.pop(pid, None)

    def scan(self, closely: Iterable[Tree] = ()) -> ProcessSnapshot:
        """One pass: which processes there are, of which guest each is, and which belong to none.

        The groups of the trees to be seen ``closely`` (because they are to end) are asked for their processes; the
        others' only if a process is found that seems to belong to no guest. With two hundred guests that is most of the
        work.
        """
        table = self.procs.table()
        inside = {tree.guest: frozenset(tree.group.pids()) for tree in closely if tree.group is not None}
        owners = self._claimed(table, inside)
        strangers = self._claim_orphans(table, owners)
        if strangers:
            strangers = self._claim_by_group(strangers, owners)
        self._descend(table, owners)
        members = self._members(table, owners)
        mine = table.stats.get(self.me)
        for tree in self._all():
            tree.seen(members[tree.guest], mine.session if mine else 0, inside.get(tree.guest))
        lost = [stat for stat in table.below(strangers) if not stat.is_gone and stat.pid not in owners]
        return ProcessSnapshot(table, members, lost)

    def present(self, running: Set[int]) -> Set[GuestId] | None:
        """Of which guests a process is there, by nothing but our own children: every process below us is one of them or
        descends from one. None if that does not tell, and it takes a scan of all: one of them lives and is not known.
        What descends from these first processes (``running``) is theirs, so nothing is asked about them.

        While we read, one may end, and its orphans come to us, behind those that were read. So the list is read again
        until it has no new child: of all that had ended when they were asked, the orphans are in it by then.
        """
        known = {identity: tree.guest for tree in self._all() for identity in (*tree.known, tree.root)}
        examined, found = set[int](), set[GuestId]()
        while True:
            listed = self.procs.children(self.me)
            if listed is None:
                return None
            fresh = [pid for pid in listed if pid not in running and pid not in self.helpers and pid not in examined]
            if not fresh:
                return found
            for pid in fresh:
                examined.add(pid)
                stat = self.procs.stat(pid)
                if stat is None or (not stat.is_gone and stat.identity not in known):
                    return None
                if not stat.is_gone:
                    found.add(known[stat.identity])

    def pids(self, tree: Tree) -> list[int]:
        """The living processes of one guest, by a look of its own."""
        return [stat.pid for stat in self.scan([tree]).of(tree)]

    def guest_of(self, pid: int, uid: int) -> GuestId | None:
        """The guest of this process; None if it has none, or another user than its guest. By a look of its own, if the
        last one has not shown it."""
        identity = self.procs.identity(pid)
        if identity is None:
            return None
        tree = next((tree for tree in self._all() if identity == tree.root or identity in tree.known), None)
        if tree is None:
            members = self.scan().members.items()
            found = next((guest for guest, stats in members if any(stat.identity == identity for stat in stats)), None)
            tree = None if found is None else self.trees[found]
        return None if tree is None or tree.uid not in (None, uid) else tree.guest

    def signal(self, tree: Tree, number: int) -> int:
        """This signal to every process of the guest; how many it reached. What is forked meanwhile may miss it."""
        return self.signal_seen(tree, number, self.scan([tree]))

    def signal_boxed(self, tree: Tree, number: int) -> int:
        """The same, to those that are in its group: all that never left it. No other process need be scanned for it."""
        assert tree.group is not None
        if not tree.stands_in:
            reached = tree.group.signal(number, tree.pids_known())
            return len(reached) + (tree.root.pid not in reached and self.procs.send(tree.root, number))
        inside = tree.group.pids(everywhere=False)
        stats = [self.procs.stat(pid) for pid in dict.fromkeys((tree.root.pid, *inside))]
        members = [stat for stat in stats if stat is not None and not stat.is_gone]
        return self._signal(
            tree, number, [one for one in members if one.pid != tree.root.pid or one.identity == tree.root]
        )

    def signal_seen(self, tree: Tree, number: int, look: ProcessSnapshot) -> int:
        """The same, to those that this look has shown.

        Over a process namespace stand two who hand on what they get. They are left out, or the command would get the
        signal three times, and to many programs a second one means something else than the first.
        """
        return self._signal(tree, number, look.of(tree))

    def _signal(self, tree: Tree, number: int, members: list[ProcessStat]) -> int:
        if tree.stands_in:
            inside = [stat for stat in members if tree.root.pid not in (stat.pid, stat.ppid)]
            members = inside or [stat for stat in members if stat.pid == tree.root.pid]
        return sum(self.procs.send(stat.identity, number) for stat in members)

    def kill(self, trees: Iterable[Tree]) -> None:
        """SIGKILL for all of these trees. Returns at once; whether they are gone, the next looks say.

        Several at a time cost hardly more than one. To be called again as long as a close look shows any of them:
        what has left its group is not met by the first blow, which goes to the group alone.
        """
        trees = list(trees)
        loose = [tree for tree in trees if tree.group is None or tree.outside or tree.group.was_struck]
        for tree in trees:
            if tree.group is not None:
                tree.group.kill(tree.pids_known())
        if loose:
            self._stop_and_kill(loose, lambda look: [stat for tree in loose for stat in look.of(tree)])

    def kill_strangers(self) -> None:
        """The same for processes that belong to no guest."""
        self._stop_and_kill((), lambda look: look.strangers)

    def why_alive(self, members: Iterable[ProcessStat]) -> str:
        """What to say of processes that were killed and are still there."""
        return "; ".join(filter(None, (why_alive(self.procs, stat.identity) for stat in members)))

    # ---- whose is it ----

    def _all(self) -> Iterable[Tree]:
        return self.trees.values()

    def _claimed(self, table: Table, inside: Mapping[GuestId, Set[int]]) -> dict[int, GuestId | None]:
        """Rules 1 and 2: pid → guest, or None for what is the supervisor's own."""
        owners: dict[int, GuestId | None] = {self.me: None}
        owners.update({pid: None for pid, identity in self.helpers.items() if table.find(identity)})
        owners.update({tree.root.pid: tree.guest for tree in self._all() if table.find(tree.root)})
        for guest, pids in inside.items():
            owners.update((pid, guest) for pid in pids)
        for tree in self._all():
            for identity in tree.known:
                if table.find(identity):
                    owners.setdefault(identity.pid, tree.guest)
        return owners

    def _claim_orphans(self, table: Table, owners: dict[int, GuestId | None]) -> list[int]:
        """Rules 4 and 5, for the supervisor's children; returns those that belong to no guest."""
        by_session: dict[int, GuestId | None] = dict.fromkeys(self.helpers)
        by_session.update({number: tree.guest for tree in self._all() for number in tree.sessions})
        strangers = []
        for stat in table.children(self.me):
            if stat.pid in owners or stat.is_gone:
                continue
            if stat.session in by_session and _may_be_in(stat, table, owners, by_session[stat.session]):
                owners[stat.pid] = by_session[stat.session]
            elif (guest := self._marked(stat.pid)) is not None:
                owners[stat.pid] = guest
            else:
                strangers.append(stat.pid)
        return strangers

    def _claim_by_group(self, strangers: list[int], owners: dict[int, GuestId | None]) -> list[int]:
        """Rule 1 again, for those that nothing else tells."""
        for tree in self._all():
            inside = tree.group.pids() if tree.group is not None else []
            owners.update((pid, tree.guest) for pid in inside if pid not in owners)
        return [pid for pid in strangers if pid not in owners]

    def _marked(self, pid: int) -> GuestId | None:
        """Whom its environment names. It can say what it likes, but not under another user's name."""
        tree = self.trees.get(GuestId(self.procs.marks(pid, GUEST_MARK).get(GUEST_MARK, "")))
        if tree is None or (tree.uid is not None and self.procs.uid(pid) != tree.uid):
            return None
        return tree.guest

    def _descend(self, table: Table, owners: dict[int, GuestId | None]) -> None:
        """Rule 3: what is not claimed by itself is its parent's."""
        waiting = [pid for pid in owners if pid != self.me]
        while waiting:
            parent = waiting.pop()
            for child in table.children(parent):
                if child.pid not in owners:
                    owners[child.pid] = owners[parent]
                    waiting.append(child.pid)

    def _members(self, table: Table, owners: Mapping[int, GuestId | None]) -> dict[GuestId, list[ProcessStat]]:
        members: dict[GuestId, list[ProcessStat]] = {tree.guest: [] for tree in self._all()}
        for pid, guest in owners.items():
            stat = table.stats.get(pid) or self.procs.stat(pid)  # in a group since the pass
            if guest is not None and stat is not None and not stat.is_gone:
                members[guest].append(stat)
        return members

    # ---- ending ----

    def _stop_and_kill(self, closely: Iterable[Tree], choose: Callable[[ProcessSnapshot], list[ProcessStat]]) -> None:
        stopped = dict[ProcessInstance, None]()
        for _ in range(_STOP_ROUNDS):
            chosen = choose(self.scan(closely))
            fresh = [stat.identity for stat in chosen if stat.identity not in stopped]
            for identity in fresh:
                self.procs.send(identity, signal.SIGSTOP)
                stopped[identity] = None
            if not fresh and all(stands_still(stat) for stat in chosen):
                break
        for identity in stopped:
            self.procs.send(identity, signal.SIGKILL)


def _may_be_in(stat: ProcessStat, table: Table, owners: Mapping[int, GuestId | None], guest: GuestId | None) -> bool:
    """Whether the session is still the one that was seen: its leader has ended, or is known.

    A leader that is not known made the session anew, under a number that had become free.
    """
    return stat.session not in table.stats or owners.get(stat.session, _UNKNOWN) == guest


def stands_still(stat: ProcessStat) -> bool:
    """Whether it cannot fork before it has seen the next signal."""
    return stat.is_stopped or stat.state == _ASLEEP_IN_KERNEL


def _kept(found: Iterable[_T]) -> Collection[_T]:
    """These, each once. Of nearly every guest they are few, and a set takes four times the room of a few."""
    each = tuple(dict.fromkeys(found))
    return each if len(each) <= _FEW else frozenset(each)


def _resident(members: Iterable[ProcessStat]) -> int:
    return sum(stat.rss_pages for stat in members) * PAGE_BYTES


def marks_of(office: str, lease: LeaseId, guest: GuestId) -> dict[str, str]:
    """What is added to a guest's environment so that its processes are known again."""
    return {OFFICE_MARK: office, LEASE_MARK: lease, GUEST_MARK: guest}
