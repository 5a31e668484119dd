"""A new supervisor's first act: ends what its predecessor left.

The guests of a supervisor that died have been sent SIGKILL by the kernel (PDEATHSIG), but not what they started. It is
found by the office's control groups, by the office's mark in the initial environment, and from there by descent and by
session. What cleared its environment, left its session and lost its parent is not found where there were no groups;
that is said in ``sublet doctor``, and what holds a device is still found by the device.

    sweep = Sweep(procs, groups, spare={office_pid})
    while not sweep.again() and attempts_left():
        ...                                # wait a little, in the loop
    sweep.found, sweep.left                # lease -> processes
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from sublet.node.processes.cgroups import Groups
from sublet.node.processes.group import Group
from sublet.node.processes.procs import Identity, Procs, Stat, Table
from sublet.node.processes.stuck import why_alive
from sublet.node.processes.tree import LEASE_MARK, OFFICE_MARK
from sublet.values import LeaseId

_STOP_ROUNDS: Final = 6


class Sweep:
    """Finds and ends what is left of the guests of one office, attempt by attempt."""

    def __init__(
        self,
        procs: Procs,
        groups: Groups,
        *,
        noted: Mapping[Identity, LeaseId] | None = None,
        spare: Iterable[int] = (),
        me: int | None = None,
    ) -> None:
        self.found: dict[LeaseId, set[Identity]] = {}
        """All that was met, by lease; with nothing in it where only an empty group was left."""
        self.left: dict[LeaseId, list[Identity]] = {}
        """What the last attempt still saw."""
        self.groups_left: list[str] = []
        """Folders of groups that would not go."""
        self._procs = procs
        self._groups = [groups, *groups.elsewhere()]
        self._office = groups.office
        self._me = os.getpid() if me is None else me
        self._noted = dict(noted or {})
        """First processes of guests, as the predecessor noted them."""
        self._spare = frozenset(spare)
        """The office that has just started, which may itself have been started from inside a guest."""
        self._sessions: dict[int, LeaseId] = {}
        self._found_groups: list[Group] | None = None
        self._found_leases: list[Group] = []

    def again(self) -> bool:
        """One attempt: look, stop, kill, look. True when nothing was left and the groups are gone."""
        self._look()  # first, so that it is known what there was
        for group in self._all_groups():
            self.found.setdefault(group.lease, set())
            group.kill()
        stopped = dict[Identity, None]()
        for _ in range(_STOP_ROUNDS):
            fresh = [stat.identity for stat in self._look() if stat.identity not in stopped]
            for identity in fresh:
                self._procs.send(identity, signal.SIGSTOP)
                stopped[identity] = None
            if not fresh:
                break
        for identity in stopped:
            self._procs.send(identity, signal.SIGKILL)
        self._look()
        self.groups_left = self._remove_groups() if not self.left else []
        return not self.left and not self.groups_left

    def remove_groups(self) -> bool:
        """Where nothing else was left, and the groups would not go: whether they are gone now."""
        for group in self._all_groups():
            group.kill()  # who was put there meanwhile
        self.groups_left = self._remove_groups()
        return not self.groups_left

    def why_left(self, lease: LeaseId) -> str:
        """What keeps those that could not be ended."""
        return "; ".join(filter(None, (why_alive(self._procs, identity) for identity in self.left.get(lease, []))))

    # ---- looking ----

    def _all_groups(self) -> list[Group]:
        """Those that were there at the first look: what is made later is of guests of our own, and is spared."""
        if self._found_groups is None:
            self._found_leases = [group for groups in self._groups for group in groups.leases()]
            self._found_groups = [group for groups in self._groups for group in groups.found()]
        return self._found_groups

    def _look(self) -> list[Stat]:
        table = self._procs.table()
        owners = self._marked(table)
        owners.update((identity.pid, lease) for identity, lease in self._noted.items() if table.find(identity))
        for group in self._all_groups():
            owners.update((pid, group.lease) for pid in group.pids())
        spared = {self._me, *self._spare}
        spared |= {stat.pid for stat in table.below(spared)}
        for pid in spared:  # before sessions are looked at: others in the session of one that is spared are a user's
            owners.pop(pid, None)
        self._spread(table, owners)
        there = [stat for pid in owners if pid not in spared and (stat := table.stats.get(pid)) and not stat.is_gone]
        self.left = {}
        for stat in there:
            lease = owners[stat.pid]
            self.found.setdefault(lease, set()).add(stat.identity)
            self.left.setdefault(lease, []).append(stat.identity)
        return there

    def _marked(self, table: Table) -> dict[int, LeaseId]:
        owners = {}
        for stat in table.stats.values():
            if stat.is_gone:
                continue
            marks = self._procs.marks(stat.pid, "SUBLET_")
            if marks.get(OFFICE_MARK) == self._office and LEASE_MARK in marks:
                owners[stat.pid] = LeaseId(marks[LEASE_MARK])
        return owners

    def _spread(self, table: Table, owners: dict[int, LeaseId]) -> None:
        """What is in a session of theirs, and what descends from any of them."""
        for number, lease in self._theirs(table, owners):
            self._sessions.setdefault(number, lease)
        for stat in table.stats.values():
            if stat.session in self._sessions:
                owners.setdefault(stat.pid, self._sessions[stat.session])
        waiting = list(owners)
        while waiting:
            parent = waiting.pop()
            for child in table.children(parent):
                if child.pid not in owners:
                    owners[child.pid] = owners[parent]
                    waiting.append(child.pid)

    def _theirs(self, table: Table, owners: dict[int, LeaseId]) -> Iterator[tuple[int, LeaseId]]:
        """Their sessions, except one that another process leads: that is a user's terminal."""
        for pid, lease in owners.items():
            stat = table.stats.get(pid)
            if stat is not None and stat.session and (stat.session in owners or stat.session not in table.stats):
                yield stat.session, lease

    def _remove_groups(self) -> list[str]:
        left = [folder for group in (*self._all_groups(), *self._found_leases) for folder in group.remove()]
        for groups in self._groups[1:]:
            left += groups.remove()
        return left
