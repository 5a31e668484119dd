"""Cleans up after a dead supervisor: ends its guests, then removes their folders.

Most of it goes at once. What does not (a frozen guest, for example) is looked for again whenever it is asked about, and
until it is gone its hardware is not reallocated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import Final

from sublet.clock import Clock
from sublet.lease.hardware import Leftover
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.notes import Notes
from sublet.node.processes.procs import Identity, Procs
from sublet.node.processes.tenancy import lease_of_folder
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.supervisor.sweep import Sweep
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
        notes: Notes,
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
        noted = {Identity(note.pid, note.start_ticks): note.lease for note in self._notes}
        self._sweep = Sweep(procs, groups, noted=noted, spare={os.getppid()})
        self._folders = _folders(leases)
        until_ns = clock.now_ns() + PATIENCE_NS
        while not (is_done := self._sweep.again()) and clock.now_ns() < until_ns:
            time.sleep(PAUSE_S)
        self._clear_all()
        if not is_done:
            later(self._go_on)
        for name in damaged:
            notes.discard(name)

    def still_left(self, lease: LeaseId) -> str:
        """What its guests of this lease still have here, in words; empty if nothing. Each question is an attempt."""
        if lease not in self._sweep.left:
            return ""
        self._sweep.again()
        self._clear(lease)
        return (self._sweep.why_left(lease) or "something of it still runs") if lease in self._sweep.left else ""

    def _go_on(self) -> None:
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
