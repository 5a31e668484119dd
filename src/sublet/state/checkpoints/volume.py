"""The volume of a block lease as a checkpoint store: this process writes, the supervisor publishes.

A save is written into a folder of its own and epoch (``staging/EPOCH/…``); the supervisor checks it, makes sure that it
can no longer be written to, and publishes it. It alone knows which (lease, epoch) lives, so a program that was stopped
past the end of its lease and goes on cannot save any more: ``StaleEpoch``, or why the lease ended.

A guest reaches the supervisor over a socket, a holder over its connection (``VolumeLine``). Reading needs neither:
packs and manifests are files. A holder that runs as another user than the office may not enter the volume's folder:
the supervisor opens files for it (``HandedVolume``). It writes a save into a folder of its own first (``TMPDIR``), then
into files of its staging that come as descriptors; from there on publication is the same for all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast, runtime_checkable

from sublet.errors import CheckpointDamaged, CheckpointFailed, Disconnected, NotFound
from sublet.state.checkpoints.atomic_files import read_whole
from sublet.state.checkpoints.format import MANIFEST_MAX, CheckpointManifest
from sublet.state.checkpoints.packs import Packs
from sublet.state.checkpoints.store import Copied, FolderStore, manifest_in
from sublet.state.checkpoints.writer import Author, Staged
from sublet.values import Epoch, LeaseId
from sublet.wire.refusals import Refusal, error_of
from sublet.wire.volumes import (
    COPIED,
    FILES_MAX,
    Collect,
    Collected,
    CopiedIn,
    CopyIn,
    ListVolume,
    OpenFiles,
    OpenVolume,
    Publish,
    Published,
    VolumeCall,
    VolumeListed,
    VolumeOpened,
    VolumeReply,
    bytes_below,
)

T = TypeVar("T")

COPY_BYTES: Final = 8 << 20
_PLACE: Final = "place"
"""An empty file that makes a folder of the staging be there."""
AGAIN_S: Final = 0.2
"""Pause before the outcome of a publication is looked up after its connection broke."""


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
    """Packs of a volume (``packs.PackSource``): published ones, or those in one folder of the staging."""

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


class VolumeLine(Protocol):
    """The way to the supervisor. Safe to use from several threads."""

    def pair(self) -> tuple[LeaseId | str, Epoch | None]:
        """For which (lease, epoch) of the volume this asks, as of now; ``("", None)`` where the supervisor knows."""

    def ask(self, call: VolumeCall) -> VolumeReply:
        """One question, one answer. Raises ``Disconnected`` where none came."""


@runtime_checkable
class VolumePlace(Protocol):
    """What has a volume: a lease of blocks, or what ``sublet.current().volume`` is."""

    def volume_line(self) -> VolumeLine: ...


class VolumeStore(FolderStore):
    """A ``CheckpointStore`` in a volume."""

    def __init__(self, line: VolumeLine) -> None:
        """Asks the supervisor, which makes the folders. Raises what it refuses with."""
        self._line = line
        self._opened = self._open()
        self._handed: HandedVolume | None = None
        if self._opened.by_descriptor:
            self._handed = HandedVolume(cast("FilesLine", line))
            self.by_descriptor = True
        super().__init__(self._opened.folder, create=False)
        self._began_ns: dict[Path, int] = {}
        self._keep = 0
        """How many checkpoints were asked to be kept last: the next publication sees to it in the same go."""

    @property
    def name(self) -> str:
        """What the volume is called; empty if it goes with its lease."""
        return self._opened.name

    @property
    def size(self) -> int:
        """Its size in bytes, of which the file system itself needs some."""
        return self._opened.size

    @property
    def author(self) -> Author:
        """As of now: a guest whose lease was attached goes on under its new epoch."""
        opened = self._current()
        return Author(lease=opened.lease, epoch=opened.epoch)

    @property
    def room(self) -> int:
        """Bytes that may still be written."""
        if self._handed is not None:
            return self._handed.listed().room
        if self._opened.counted:
            return max(0, self._opened.size - bytes_below(self.folder))
        try:
            found = os.statvfs(self.folder)
        except FileNotFoundError:
            raise self._why_closed() from None
        return found.f_bavail * found.f_frsize

    def numbers(self) -> list[int]:
        """A lease may end at any moment, and its volume go before this process is told: then nothing is damaged."""
        if self._handed is not None:
            return list(self._handed.listed().numbers)
        try:
            return super().numbers()
        except CheckpointDamaged as error:
            found = error
        if not self.folder.is_dir():
            self._opened = self._open()
        raise found

    @property
    def pack_source(self) -> Packs:
        return self.packs if self._handed is None else HandedFiles(self._handed)

    def manifest_bytes(self, number: int) -> bytes:
        if self._handed is None:
            return super().manifest_bytes(number)
        name = self.manifest_path(number).name
        try:
            return self._handed.read(name, MANIFEST_MAX)
        except NotFound as error:
            raise FileNotFoundError(errno.ENOENT, error.message, name) from error

    def freed_by(self, keep: int) -> int:
        return super().freed_by(keep) if self._handed is None else self._handed.listed(keep).freed

    def stage(self, needed: int = 0) -> Path:
        opened = self._current()
        within = Path(opened.staging) if self._handed is None else self._handed.local_folder()
        folder = within / secrets.token_hex(8)
        try:
            self.check_room(needed)
            folder.mkdir(mode=0o700)
        except FileNotFoundError:
            raise self._why_closed() from None
        except OSError as error:
            raise self._failed(error) from error
        self._began_ns[folder] = time.monotonic_ns()
        return folder

    def discard(self, folder: Path) -> None:
        self._began_ns.pop(folder, None)
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def staging_folder(self, needed: int = 0) -> Iterator[Path]:
        """A lease may end at any moment, also while its holder writes: then the folder goes from under it, and that a
        file was not found there helps no reader."""
        folder = self.stage(needed)
        try:
            yield folder
        except (CheckpointFailed, CheckpointDamaged):
            if not folder.is_dir():
                raise self._why_closed() from None
            raise
        finally:
            self.discard(folder)

    def publish(self, staged: Staged) -> None:
        manifest = staged.manifest
        took_ns = staged.capture_ns + time.monotonic_ns() - self._began_ns.get(staged.folder, time.monotonic_ns())
        if self._handed is not None:
            self._stage_handed(self._handed, staged)
        request = Publish(
            lease=manifest.lease,
            epoch=manifest.epoch,
            staging=staged.folder.name,
            manifest=staged.manifest_path.name,
            packs=tuple(pack.name for pack in staged.packs),
            parent=manifest.parent,
            save_ns=took_ns,
            keep=self._keep,
        )
        try:
            self._ask(request, Published)
        except Disconnected:
            if not self._is_published(staged):
                raise
        self.discard(staged.folder)

    def _stage_handed(self, handed: HandedVolume, staged: Staged) -> None:
        """Into the volume, what was written here. Packs that were copied from another volume are there."""
        names = [path.name for path in (staged.manifest_path, *staged.packs) if path.exists()]
        try:
            handed.stage(staged.folder, names)
        except OSError as error:
            raise self._failed(error) from error

    def collect(self, keep: int) -> None:
        self._keep = keep
        if len(self.numbers()) > keep:
            self.collect_once(keep)

    def collect_once(self, keep: int) -> None:
        author = self.author
        self._ask(Collect(lease=author.lease, epoch=author.epoch, keep=keep), Collected)

    def inspect(self, source: str, *, passing: str = "") -> CopiedIn:
        author = self.author
        request = CopyIn(lease=author.lease, epoch=author.epoch, volume=source, passing=passing)
        return self._ask(request, CopiedIn)

    @contextmanager
    def copied(self, source: str, *, passing: str = "") -> Iterator[Copied | None]:
        """``source`` is a ticket for a volume of the same tenant on the same machine."""
        with self.staging_folder() as folder:
            author = self.author
            request = CopyIn(
                lease=author.lease, epoch=author.epoch, volume=source, staging=folder.name, passing=passing
            )
            if self._handed is not None:
                yield self._copied_handed(self._handed, request, folder)
                return
            done = self._ask(request, CopiedIn)
            yield Copied(manifest_in(folder), folder) if done.number else None

    def _copied_handed(self, handed: HandedVolume, request: CopyIn, folder: Path) -> Copied | None:
        for fd in handed.open_files([_PLACE], staging=folder.name, write=True):  # which makes the folder there
            os.close(fd)
        if not self._ask(request, CopiedIn).number:
            return None
        manifest = CheckpointManifest.parse(handed.read(COPIED, MANIFEST_MAX, staging=folder.name))
        return Copied(manifest, folder, HandedFiles(handed, folder.name))

    def _why_closed(self) -> CheckpointFailed:
        """The volume is put away, or another lease's by now. The supervisor knows, and refuses with what it is; where
        it does not, one may save again."""
        self._opened = self._open()
        return CheckpointFailed("the folder to write into is gone", do="Save again.")

    def _is_published(self, staged: Staged) -> bool:
        """Whether it was published: the record tells. The same number with other bytes is another save's."""
        time.sleep(AGAIN_S)
        with contextlib.suppress(OSError):
            mine = read_whole(staged.manifest_path, MANIFEST_MAX)
            return self.manifest_bytes(staged.manifest.number) == mine
        return False

    def _current(self) -> VolumeOpened:
        """Opened anew where the epoch has changed."""
        lease, epoch = self._line.pair()
        if lease and (lease, epoch) != (self._opened.lease, self._opened.epoch):
            self._opened = self._open()
        return self._opened

    def _open(self) -> VolumeOpened:
        lease, epoch = self._line.pair()
        return self._ask(OpenVolume(lease=lease, epoch=epoch), VolumeOpened)

    def _ask(self, call: VolumeCall, kind: type[T]) -> T:
        answer = self._line.ask(call)
        if isinstance(answer, Refusal):
            raise error_of(answer)
        if not isinstance(answer, kind):
            raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
        return answer
