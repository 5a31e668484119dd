"""Messages about checkpoints in a volume: between a program that saves and the supervisor, which alone publishes.

A guest asks on a socket of its own kind (``SUBLET_PUBLISH``), one message for each question and one for each answer,
and is known by its process. A holder asks on its connection (``wire.guests``). Either way a question names the
(lease, epoch) of the volume, which is compared with what is live when it comes and again when it is its turn.

Standard library only: the supervisor reads these.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import field
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, LeaseId
from sublet.wire.compat import later
from sublet.wire.frames import FDS_MAX
from sublet.wire.refusals import Refusal

PUBLISH_VARIABLE: Final = "SUBLET_PUBLISH"
"""Where a guest finds the socket."""
VOLUME_VARIABLE: Final = "SUBLET_VOLUME"
"""Where it finds the folder of its volume."""
MESSAGE_MAX: Final = 64 * 1024
"""Bytes of one message."""

CHECKPOINTS: Final = "checkpoints"
PACKS: Final = "packs"
STAGING: Final = "staging"
LOCK: Final = "lock"
COPIED: Final = "copied.manifest"
"""What lies in the folder of a volume (docs/format.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVolume:
    """I am going to save there: see that the folders are there."""

    lease: str = ""
    """Empty: the volume that I was started with, else the one of my own lease."""
    epoch: Epoch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeOpened:
    """They are there."""

    lease: LeaseId
    epoch: Epoch
    name: str
    """As its holder calls it; empty if it goes with its lease."""
    folder: str
    staging: str
    """Where this asker, under this epoch, may make folders to write into."""
    size: int
    """Bytes of the volume."""
    counted: bool = False
    """Whether its size is only counted, so that writers must see to it."""
    by_descriptor: bool = later(False)
    """The asker is another user than the office, and may not enter its folders: it lists with ``ListVolume``, and reads
    and stages what ``OpenFiles`` opens for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Make this a checkpoint. Files are named without their folder, which is one of those in the asker's staging."""

    lease: LeaseId
    epoch: Epoch
    staging: str
    manifest: str
    packs: tuple[str, ...] = ()
    """New ones; the others that the manifest names are there already."""
    parent: int = 0
    """The newest checkpoint, as far as the asker knows; if there is another by now, nothing is published."""
    save_ns: int = 0
    """How long it has taken so far: the notice before a deadline is made long enough for another such."""
    keep: int = 0
    """If it is more, older checkpoints than so many are removed in the same go, as far as that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """It is durable, and the newest."""

    number: int
    wall_ns: int
    size: int
    """Bytes of what is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """Remove all but the newest ``keep`` checkpoints, and what only the others needed."""

    lease: LeaseId
    epoch: Epoch
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed."""

    checkpoints: tuple[int, ...]
    packs: int
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn:
    """Put what a checkpoint of another volume of the same tenant is made of into a folder of my staging. Nothing is
    published by that: what comes there is staged as if the asker had written it."""

    lease: LeaseId
    epoch: Epoch
    volume: str = field(repr=False)
    """The ticket that its holder was given for reading (``LendVolume``)."""
    staging: str = ""
    """Empty: only say what there is."""
    passing: str = ""
    """Checkpoints whose note begins so are passed over, if there is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedIn:
    """Its packs lie there under their names, and its manifest as ``COPIED``."""

    number: int
    """Of the checkpoint, in the volume that it is of; 0: nothing has been saved there."""
    wall_ns: int = 0
    size: int = 0
    """Bytes of all of it."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendVolume:
    """A guest of another lease is to save to the volume of the connection's (lease, epoch)."""

    reads: bool = False
    """Only its checkpoints are to be read (``CopyIn``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeLent:
    """A ticket. Shown at the start of a guest of the same tenant (``Start.volume``), it lends that guest the volume
    for as long as the (lease, epoch) lives."""

    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListVolume:
    """What is published there? Only for holders that may not enter the folder."""

    lease: LeaseId
    epoch: Epoch
    keep: int = 0
    """If it is more: how much is freed when only so many checkpoints are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeListed:
    """The answer."""

    numbers: tuple[int, ...]
    """Of all checkpoints, in order."""
    room: int
    """Bytes that may still be written."""
    freed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """Open these files of the volume for me. Only for holders that may not enter the folder."""

    lease: LeaseId
    epoch: Epoch
    names: tuple[str, ...]
    """Without their folder, ``FILES_MAX`` at most: manifests and packs, or what lies in ``staging``."""
    staging: str = ""
    """A folder of my staging; empty: what is published."""
    write: bool = False
    """They are new, and will be written to; the folder is made if it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOpened:
    """Their descriptors come beside this, in the same order."""

    names: tuple[str, ...]


FILES_MAX: Final = FDS_MAX
"""Files that are opened at a time: as many descriptors as one message takes."""

VolumeCall = OpenVolume | Publish | Collect | CopyIn
VolumeReply = VolumeOpened | Published | Collected | CopiedIn | Refusal
HolderVolumeCall = LendVolume | OpenVolume | Publish | Collect | CopyIn | ListVolume | OpenFiles
HolderVolumeReply = VolumeLent | VolumeOpened | Published | Collected | CopiedIn | VolumeListed | FilesOpened
"""On a holder's connection a refusal is the connection's own."""


def bytes_below(folder: str | os.PathLike[str]) -> int:
    """What all the files of a volume take, in whatever folder; those that go meanwhile are not counted."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
