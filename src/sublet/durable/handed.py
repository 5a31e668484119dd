"""A volume whose folder this process may not enter: the supervisor lists it, and hands over its files, opened.

So it is for a holder that runs as another user than the office. What it saves it writes into a folder of its own first
(``TMPDIR``), then into files of its staging in the volume, which come as descriptors; from there on publication is the
same for all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from sublet.errors import Disconnected
from sublet.values import Epoch, LeaseId
from sublet.wire.volumes import FILES_MAX, ListVolume, OpenFiles, VolumeListed

COPY_BYTES: Final = 8 << 20


class FilesLine(Protocol):
    """The way to the supervisor for a holder of another user."""

    def pair(self) -> tuple[LeaseId | str, Epoch | None]: ...

    def list_volume(self, call: ListVolume) -> VolumeListed: ...

    def open_files(self, call: OpenFiles) -> list[int]:
        """The descriptors are the caller's to close."""


class HandedVolume:
    """The files of one volume. ``lease`` and ``epoch`` are given with each question: a lease may be attached."""

    def __init__(self, line: FilesLine) -> None:
        self._line = line
        self._local: Path | None = None

    def listed(self, keep: int = 0) -> VolumeListed:
        """What is published, and the room that is left."""
        lease, epoch = self._pair()
        return self._line.list_volume(ListVolume(lease=lease, epoch=epoch, keep=keep))

    def open_files(self, names: Sequence[str], *, staging: str = "", write: bool = False) -> list[int]:
        """Descriptors, in order; the caller closes them."""
        lease, epoch = self._pair()
        found: list[int] = []
        try:
            for start in range(0, len(names), FILES_MAX):
                some = tuple(names[start : start + FILES_MAX])
                call = OpenFiles(lease=lease, epoch=epoch, names=some, staging=staging, write=write)
                found += self._line.open_files(call)
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def read(self, name: str, limit: int, *, staging: str = "") -> bytes:
        """A small file, up to one byte more than ``limit``."""
        (fd,) = self.open_files([name], staging=staging)
        with open(fd, "rb") as file:
            return file.read(limit + 1)

    def local_folder(self) -> Path:
        """A folder of this process's own to write into first; it goes with the process."""
        if self._local is None or not self._local.is_dir():
            self._held = tempfile.TemporaryDirectory(prefix="sublet-save-", ignore_cleanup_errors=True)
            self._local = Path(self._held.name)
        return self._local

    def stage(self, folder: Path, names: Sequence[str]) -> None:
        """Copy these files, which lie in a folder of ``local_folder``, into the staging folder of the same name. Their
        descriptors are closed when this returns, so that what is published can be sealed."""
        fds = self.open_files(names, staging=folder.name, write=True)
        try:
            for name, fd in zip(names, fds, strict=True):
                with open(folder / name, "rb") as source:
                    _copy(source.fileno(), fd)
        finally:
            for fd in fds:
                os.close(fd)

    def discard(self, folder: Path) -> None:
        """What was written for a save is not needed any more."""
        shutil.rmtree(folder, ignore_errors=True)

    def _pair(self) -> tuple[LeaseId, Epoch]:
        lease, epoch = self._line.pair()
        if epoch is None:
            raise Disconnected("the lease of this volume is not known any more")
        return LeaseId(lease), epoch


class HandedFiles:
    """Packs of a volume (``durable.packs.PackSource``): published ones, or those in one folder of the staging."""

    def __init__(self, volume: HandedVolume, staging: str = "") -> None:
        self._volume = volume
        self._staging = staging

    def open_files(self, names: Sequence[str]) -> list[int]:
        return self._volume.open_files(names, staging=self._staging)


def _copy(source: int, to: int) -> None:
    size, done = os.fstat(source).st_size, 0
    while done < size:
        sent = os.sendfile(to, source, done, min(COPY_BYTES, size - done))
        if not sent:
            raise OSError("a staged file became shorter while it was copied")
        done += sent
