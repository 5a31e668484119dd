"""Persistent notes for the next supervisor: which guests there were, on which hardware.

One small file for each guest, in a folder that a reboot empties, as it empties the process table. It is written before
the guest runs and taken away when its last process was seen to be gone, so a note without a guest is possible and
harmless, and a guest without a note is not. Nothing is synced to disk: the page cache outlives a process.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import Profile
from sublet.wire.orders import Part

if TYPE_CHECKING:
    from sublet.node.processes.guest import GuestProcess

_SUFFIX = ".note"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestNote:
    """What another process needs to find and end this guest, without having known it."""

    guest: GuestId
    lease: LeaseId
    epoch: Epoch
    tenant: TenantId
    profile: Profile
    parts: tuple[Part, ...]
    pid: int
    start_ticks: int
    """When the process started, in the kernel's ticks: with the pid it names one process for good."""
    group: str
    """Its control group, if it has one."""


class GuestRecords:
    """The folder of notes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def write(self, note: GuestNote) -> None:
        """From here on it will be found."""
        path = self._path(note.guest)
        with open(path + "~", "wb") as file:
            file.write(dumps(note))
        os.replace(path + "~", path)

    def drop(self, guest: GuestId) -> None:
        """It is gone; harmless if there was none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(guest))

    def discard(self, name: str) -> None:
        """This file was no note."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.folder, name))

    def read_all(self) -> tuple[list[GuestNote], list[str]]:
        """Every note, and the names of files that are none."""
        notes: list[GuestNote] = []
        damaged: list[str] = []
        for name in sorted(os.listdir(self.folder)):
            if not name.endswith(_SUFFIX):  # one that was being written: its guest never ran
                damaged.append(name)
                continue
            try:
                with open(os.path.join(self.folder, name), "rb") as file:
                    notes.append(loads(GuestNote, file.read()))
            except (OSError, SubletError):
                damaged.append(name)
        return notes, damaged

    def _path(self, guest: GuestId) -> str:
        return os.path.join(self.folder, guest + _SUFFIX)


def note_of(guest: GuestProcess, parts: tuple[Part, ...]) -> GuestNote:
    """What has to be known of this guest, which has these parts."""
    group = guest.tree.group
    return GuestNote(
        guest=guest.id,
        lease=guest.lease,
        epoch=guest.epoch,
        tenant=guest.tenant,
        profile=guest.profile,
        parts=parts,
        pid=guest.tree.root.pid,
        start_ticks=guest.tree.root.start_ticks,
        group=group.name if group is not None else "",
    )
