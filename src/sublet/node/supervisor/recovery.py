"""Cleans up after a dead supervisor: ends its guests, then removes their folders.

Most of it goes at once. What does not (a frozen guest, for example) is looked for again whenever it is asked about, and
until it is gone its hardware is not reallocated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sublet.clock import Clock
from sublet.lease.hardware import Leftover
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.guest_records import GuestNote, GuestRecords
from sublet.node.processes.lease_runtime import lease_of_folder
from sublet.node.processes.procs import ProcessInstance, ProcessStat, Procs, Table
from sublet.node.processes.stuck import why_alive
from sublet.node.processes.tree import LEASE_MARK, OFFICE_MARK
from sublet.node.sandbox.cleaning import remove_tree
from sublet.values import NS_PER_S, Epoch, Exclusivity, LeaseId
from sublet.wire.orders import Device, Part, card_uuid

PATIENCE_NS: Final = 1 * NS_PER_S
"""How long a new supervisor ends what is left before it listens; then it goes on beside its work."""
PAUSE_S: Final = 0.01


class Predecessor:
    """Made before the first guest of our own."""

    def __init__(
        self,
        *,
        procs: Procs,
        groups: Groups,
        notes: GuestRecords,
        leases: str,
        clock: Clock,
        put_away: Callable[[str], object] = remove_tree,
        later: Callable[[Callable[[], object]], object] = lambda _: None,
    ) -> None:
        """``leases`` is the folder of what leases have here. ``put_away`` removes a folder, some time: very much may be
        in it, and no caller may have to wait for that. ``later`` calls its argument in a while, and again until it does
        not raise ``OSError``."""
        self._store = notes
        self._put_away = put_away
        self._notes, damaged = notes.read_all()
        self._sweep = Sweep(procs, groups, notes=self._notes, spare={os.getppid()})
        self._folders = _folders(leases)
        until_ns = clock.now_ns() + PATIENCE_NS
        while not (is_done := self._sweep.again()) and clock.now_ns() < until_ns:
            time.sleep(PAUSE_S)
        self._clear_all()
        if not is_done:
            later(self._retry)
        for name in damaged:
            notes.discard(name)

    def remaining(self, lease: LeaseId) -> str:
        """What its guests of this lease still have here, in words; empty if nothing. Each question is an attempt."""
        if lease not in self._sweep.left:
            return ""
        self._sweep.again()
        self._clear(lease)
        return (self._sweep.why_left(lease) or "something of it still runs") if lease in self._sweep.left else ""

    def _retry(self) -> None:
        """Try again unasked, since no question comes for what has no device, or is nothing but a group. Where no
        process is left none is looked for: by now the number of their session may belong to a stranger."""
        is_done = self._sweep.again() if self._sweep.left else self._sweep.remove_groups()
        self._clear_all()
        if not is_done:
            raise OSError(errno.EBUSY, "something of an earlier supervisor is left")

    def _clear_all(self) -> None:
        for lease in {note.lease for note in self._notes} | self._folders.keys():
            self._clear(lease)

    def leftovers(self, devices: tuple[Device, ...]) -> list[Leftover]:
        """What it had on which hardware: each lease and resource once, under the newest epoch.

        What a guest without a note has is not known, so it blocks all devices.
        """
        found: dict[tuple[LeaseId, str], Leftover] = {}
        for note in self._notes:
            for part in note.parts:
                key = (note.lease, part.resource)
                if key not in found or found[key].epoch < note.epoch:
                    found[key] = Leftover(lease=note.lease, epoch=note.epoch, part=part)
        for lease in self._sweep.left.keys() - {note.lease for note in self._notes}:
            for device in devices:
                found[lease, device.id] = Leftover(lease=lease, epoch=Epoch(0, 0), part=_all_of(device))
        return list(found.values())

    def cards_since(self) -> dict[str, int]:
        """For each card since when, at the latest, one of its guests was there: what is older is none of theirs."""
        found: dict[str, int] = {}
        for note in self._notes:
            began_ns = note.start_ticks * NS_PER_S // os.sysconf("SC_CLK_TCK")
            for card in filter(None, (card_uuid(part.resource) for part in note.parts)):
                found[card] = min(began_ns, found.get(card, began_ns))
        return found

    def _clear(self, lease: LeaseId) -> None:
        """If nothing of its guests of this lease runs any more, its notes and folders go, too."""
        if lease in self._sweep.left:
            return
        for note in self._notes:
            if note.lease == lease:
                self._store.drop(note.guest)
        for folder in self._folders.pop(lease, ()):
            self._put_away(folder)


def _folders(leases: str) -> dict[LeaseId, list[str]]:
    found: dict[LeaseId, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(leases):
            found.setdefault(lease_of_folder(name), []).append(os.path.join(leases, name))
    return found


def _all_of(device: Device) -> Part:
    return Part(
        resource=device.id, kind=device.kind, amount=device.capacity, millis=1000, exclusivity=Exclusivity.DEVICE
    )


# ---------------------------------------------------------------------------------------------------------------- sweep
#
# A new supervisor's first act: ends what its predecessor left.
#
# The guests of a supervisor that died have been sent SIGKILL by the kernel (PDEATHSIG), but not what they started. It
# is found by the office's control groups, by the office's mark in the initial environment, and from there by descent
# and by session. What cleared its environment, left its session and lost its parent is not found where there were no
# groups; that is said in ``sublet doctor``, and what holds a device is still found by the device.
#
#     sweep = Sweep(procs, groups, spare={office_pid})
#     while not sweep.again() and attempts_left():
#         ...                                # wait a little, in the loop
#     sweep.found, sweep.left                # lease -> processes


_STOP_ROUNDS: Final = 6


class Sweep:
    """Finds and ends what is left of the guests of one office, attempt by attempt."""

    def __init__(
        self,
        procs: Procs,
        groups: Groups,
        *,
        notes: Iterable[GuestNote] = (),
        spare: Iterable[int] = (),
        me: int | None = None,
    ) -> None:
        """``notes``: those of the predecessor's guests; each names the lease of a first process and of a lease's group.
        A process in a group of a lease that no note names belongs to the lease in its environment, else to one with the
        name of the group (in the version before, that was the lease's id)."""
        self.found: dict[LeaseId, set[ProcessInstance]] = {}
        """All that was met, by lease."""
        self.left: dict[LeaseId, list[ProcessInstance]] = {}
        """What the last attempt still saw."""
        self.groups_left: list[str] = []
        """Folders of groups that would not go."""
        self._procs = procs
        self._groups = [groups, *groups.elsewhere()]
        self._office = groups.office
        self._me = os.getpid() if me is None else me
        self._noted = {ProcessInstance(note.pid, note.start_ticks): note.lease for note in notes}
        self._lease_of_group = {os.path.dirname(note.group): note.lease for note in notes}
        self._spare = frozenset(spare)
        """The office that has just started, which may itself have been started from inside a guest."""
        self._sessions: dict[int, LeaseId] = {}
        self._found_groups: list[ControlGroup] | None = None
        self._found_leases: list[ControlGroup] = []

    def again(self) -> bool:
        """One attempt: look, stop, kill, look. True when nothing was left and the groups are gone."""
        self._scan()  # first, so that it is known what there was
        for group in self._all_groups():
            group.kill()
        stopped = dict[ProcessInstance, None]()
        for _ in range(_STOP_ROUNDS):
            fresh = [stat.identity for stat in self._scan() if stat.identity not in stopped]
            for identity in fresh:
                self._procs.send(identity, signal.SIGSTOP)
                stopped[identity] = None
            if not fresh:
                break
        for identity in stopped:
            self._procs.send(identity, signal.SIGKILL)
        self._scan()
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

    def _all_groups(self) -> list[ControlGroup]:
        """Those that were there at the first look: what is made later is of guests of our own, and is spared."""
        if self._found_groups is None:
            self._found_leases = [group for groups in self._groups for group in groups.leases()]
            self._found_groups = [group for groups in self._groups for group in groups.found()]
        return self._found_groups

    def _scan(self) -> list[ProcessStat]:
        table = self._procs.table()
        owners = self._marked(table)
        owners.update((identity.pid, lease) for identity, lease in self._noted.items() if table.find(identity))
        for group in self._all_groups():
            of_lease = os.path.dirname(group.name)
            lease, named = self._lease_of_group.get(of_lease), LeaseId(os.path.basename(of_lease))
            owners.update((pid, lease or owners.get(pid, named)) for pid in group.pids())
        spared = {self._me, *self._spare}
        spared |= {stat.pid for stat in table.below(spared)}
        for pid in spared:  # before sessions are looked at: others in the session of one that is spared are a user's
            owners.pop(pid, None)
        self._spread(table, owners)
        guest_processes = [
            stat for pid in owners if pid not in spared and (stat := table.stats.get(pid)) and not stat.is_gone
        ]
        self.left = {}
        for stat in guest_processes:
            lease = owners[stat.pid]
            self.found.setdefault(lease, set()).add(stat.identity)
            self.left.setdefault(lease, []).append(stat.identity)
        return guest_processes

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
