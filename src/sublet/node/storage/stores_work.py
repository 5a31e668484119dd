"""Makes and removes what a lease has of disk or memory; blocking, so it runs in a forked child.

A store is a folder: a note of whose it is, and for each part its place (``0``, ``1``, …), where guests write, with the
image behind it (``0.img``) where the size is enforced.

Best first: an ext4 image of the leased size, mounted; for a tenant's guests a folder with a quota (``project_quota``);
a plain folder whose use is counted where neither can be had. Only that the machine cannot do it leads to the next. A
full disk is no reason: then there is no room, and it is said.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.by_descriptor import change, opened_folder
from sublet.node.prctl import set_pdeathsig
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.storage import project_quota
from sublet.node.storage.mounts import (
    detach_loop,
    loops_of,
    mount_image,
    mount_memory,
    mounts_below,
    take_down,
    why_busy,
)
from sublet.node.storage.volume_folder import has_files, sweep_staging
from sublet.values import MIB, Epoch, Kind, LeaseId, ResourceId, TenantId, format_size
from sublet.wire.codec import dumps, loads
from sublet.wire.disk import disk_reserve, space_of
from sublet.wire.orders import Part
from sublet.wire.system_programs import find_program

IMAGE_MIN: Final = 1 * MIB
"""Below this a file system is mostly about itself; the folder is counted instead."""
JOURNAL_MIN: Final = 64 * MIB
"""A smaller one has no journal, which would take a tenth of it and more."""
NOTE: Final = "note"
KEPT: Final = "kept"
"""What the note is called once its lease has ended and the folder stays."""
REMOVING: Final = "removing"
"""What that is called once the folder is to go for good."""
SEGMENT: Final = "segment"
NAMES_MAX: Final = 64
"""Files that a segment's folder has room for: the segment, and a few."""
_PROBED: Final = ResourceId("probe/block")
_NOBODY: Final = TenantId("doctor")
_CANNOT: Final = frozenset(
    (errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTBLK)
)
"""What the kernel says when a thing cannot be done here at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNote:
    """Whose it is."""

    lease: LeaseId
    epoch: Epoch
    tenant: TenantId
    parts: tuple[Part, ...]
    name: str = ""
    """With a name it is kept when the lease has ended."""

    @property
    def kind(self) -> Kind:
        return self.parts[0].kind if self.parts else Kind.BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of it."""

    paths: tuple[str, ...] = ()
    """What guests use, part by part."""
    counted: str = ""
    """Why the size is not enforced; empty where it is."""
    refused: str = ""
    """Why there is nothing: a sentence for people."""


def why_no_image() -> str:
    """Why images cannot be had here, as far as that is known without trying; empty if it is not."""
    if os.geteuid() != 0:
        return "only root may mount an image"
    if not mkfs():
        return "there is no mkfs.ext4 in the system's folders that root alone can change (package e2fsprogs)"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices (/dev/loop-control)"
    return ""


def mkfs() -> str:
    """Where the program is that makes file systems; empty if nowhere."""
    return find_program("mkfs.ext4", os.environ.get("PATH", os.defpath)) or ""


def read_note(folder: str, name: str = NOTE) -> StoreNote | None:
    """Whose the folder is while it is used, or (``KEPT``) was; ``OSError`` or ``SubletError`` if that cannot be
    read."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return loads(StoreNote, file.read())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def among_forked_jobs(lock: str, *, after_others: bool) -> Iterator[None]:
    """While this goes on, a successor knows that a forked job is at work on the folders; ``after_others`` waits until
    no forked job of a predecessor is. One that was killed during a call is gone only when the call is over."""
    os.makedirs(os.path.dirname(lock), mode=0o700, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if after_others:
            fcntl.flock(fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------------------ making


def make_blocks(folder: str, note: StoreNote, ids: tuple[int, int] | None) -> Made:
    """The folders of the block parts of one lease; with ``ids`` they belong to that user."""
    if held := _held_open(folder):
        return Made(refused=held)
    made: list[tuple[str, str]] = []
    was_kept = os.path.exists(os.path.join(folder, KEPT))
    try:
        _begin(folder, note)
        for number, part in enumerate(note.parts):
            made.append(_make_block(os.path.join(folder, str(number)), part.amount, ids))
    except OSError as error:
        put_away(folder, keep=was_kept)
        return Made(refused=_in_words(error, sum(part.amount for part in note.parts)))
    return Made(paths=tuple(path for path, _ in made), counted=next((why for _, why in made if why), ""))


def make_memory(folder: str, note: StoreNote, ids: tuple[int, int] | None) -> Made:
    """One segment for all memory parts of a lease, in a file system of just that size."""
    _begin(folder, note)
    place, size = os.path.join(folder, "0"), sum(part.amount for part in note.parts)
    os.makedirs(place, mode=0o700, exist_ok=True)
    try:
        mount_memory(place, size, names=NAMES_MAX)
    except OSError as error:
        return Made(counted=f"mounting a file system in memory is refused ({error.strerror})")
    with opened_folder(place) as top:
        fd = os.open(SEGMENT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=top)
        try:
            os.ftruncate(fd, size)
            if ids is not None:
                os.fchown(fd, *ids)
                os.fchown(top, *ids)
        finally:
            os.close(fd)
    return Made(paths=(os.path.join(place, SEGMENT),))


def _begin(folder: str, note: StoreNote) -> None:
    """The note comes first: whatever is made after it is found by it."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _write_note(folder, note)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, KEPT))


def _write_note(folder: str, note: StoreNote) -> None:
    path = os.path.join(folder, NOTE)
    with open(path + "~", "wb") as file:
        file.write(dumps(note))
    os.replace(path + "~", path)


def _make_block(place: str, size: int, ids: tuple[int, int] | None) -> tuple[str, str]:
    """The folder, and why its size is not enforced."""
    image, exists = place + ".img", os.path.isdir(place)
    os.makedirs(place, mode=0o700, exist_ok=True)
    if os.path.exists(image):
        _use_kept(image, place, size)
        why = ""
    elif exists:  # kept, and never an image
        why = "it was made without an image"
    else:
        why = _make_image(image, place, size)
    if why and ids is not None:  # of root itself a quota is not kept
        less = project_quota.limit(place, size)
        why = f"{why}; {less}" if less else ""
    if ids is None:
        change(place, mode=0o700)
    else:  # they may make names in it, and not move away what is ours there: the folder of what is published
        change(place, owner=(os.geteuid(), ids[1]), mode=0o1770)
    return place, why


def _use_kept(image: str, place: str, size: int) -> None:
    kept = os.stat(image).st_size
    if kept != size:
        problem = f"the folder of this name is kept with {format_size(kept)}, and the lease has {format_size(size)}"
        raise OSError(errno.EEXIST, problem)
    change(image, mode=0o600)
    mount_image(image, place)


def _make_image(image: str, place: str, size: int) -> str:
    why = why_no_image()
    if not why and size < IMAGE_MIN:
        why = f"{format_size(size)} is too little for a file system of its own"
    if why:
        return why
    part = image + "~"
    try:
        _reserve(part, size)
        _format(part, size)
        os.rename(part, image)
        mount_image(image, place)
    except OSError as error:
        for path in (part, image):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if error.errno in _CANNOT:
            return f"an image could not be mounted ({error.strerror})"
        raise
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(place, "lost+found"))
    return ""


def _reserve(path: str, size: int) -> None:
    """Allocate the space on the disk now: what is leased is there, and a disk that fills up later does not affect it.
    What is kept back for the journal stays, but for the half that may have been used since the lease was granted."""
    space = space_of(os.path.dirname(path))
    if space.free - size < disk_reserve(space.size).withheld // 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _format(path: str, size: int) -> None:
    journal = () if size >= JOURNAL_MIN else ("-O", "^has_journal")
    lazily = "nodiscard,lazy_itable_init=1,lazy_journal_init=1"
    argv = (mkfs(), "-q", "-F", "-m", "0", "-E", lazily, *journal, path)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, parent)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(errno.EIO, f"mkfs.ext4 failed with {os.waitstatus_to_exitcode(status)}", path)


def _become(argv: tuple[str, ...], parent: int) -> NoReturn:
    try:
        set_pdeathsig(signal.SIGKILL, parent)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.execve(argv[0], argv, {"PATH": os.defpath})
    finally:
        os._exit(127)


def _in_words(error: OSError, size: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the office has no room for {format_size(size)}"
    if error.errno == errno.EEXIST:
        return str(error.strerror)
    return f"the folder of the lease could not be made: {error.strerror or error}"


# --------------------------------------------------------------------------------------------------------- taking away


def put_away(folder: str, *, keep: bool, note: StoreNote | None = None, forced: bool = False) -> str:
    """Take down what is mounted below the folder, and the folder with it, or keep it read-only. What is still there, in
    words; empty if nothing is. Twice is once. ``note``: its last lease, if that is not what its note says; ``forced``:
    although a process has a file of it open."""
    if keep and os.path.exists(os.path.join(folder, NOTE)):
        keep = _is_worth_keeping(folder)
    elif keep and os.path.exists(os.path.join(folder, KEPT)) and not mounts_below(folder):
        return ""
    down = []
    for mount in mounts_below(folder):
        try:
            if take_down(mount.point, unwritten=not keep, forced=forced):
                down.append(mount.point)
        except OSError as error:
            who = why_busy(mount.source) if error.errno == errno.EBUSY else ""
            return f"{mount.point} could not be unmounted ({error.strerror})" + (f": {who}" if who else "")
    loops = loops_of(folder) if _may_have_loops(folder) else []
    for device in loops:
        with contextlib.suppress(OSError):
            detach_loop(device)
    used = _still_used(folder, loops=bool(loops))
    if used and not (forced and _is_shut_down(folder, down)):
        return used
    if used and not keep:
        _empty(folder)
    if not os.path.lexists(folder):
        return ""
    if keep:
        return _keep(folder, note)
    return _removed(folder)


def _is_shut_down(folder: str, down: list[str]) -> bool:
    """A process that has a file of an image open keeps its loop device for as long as it lives. Whether that is all
    that is left: what was shut down, now or when it was kept, is written to no more."""
    images = _images(folder)
    if mounts_below(folder) or not images:
        return False
    was_kept = not os.path.exists(os.path.join(folder, NOTE))
    return was_kept or {os.path.realpath(image).removesuffix(".img") for image in images}.issubset(down)


def _empty(folder: str) -> None:
    """Truncate the images to nothing: then the disk has its space back, and no byte is left of what the lease had, even
    where a process still has a file of it open."""
    for image in _images(folder):
        os.truncate(image, 0)


def _images(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".img")]


def _held_open(folder: str) -> str:
    """Why a volume that is kept cannot be used yet; empty if it can. Its file system was shut down while a process had
    a file of it open, and what that process still has would be written over what a second mount writes."""
    loops = loops_of(folder) if os.path.exists(os.path.join(folder, KEPT)) and not mounts_below(folder) else []
    if not loops:
        return ""
    who = next(filter(None, map(why_busy, loops)), "") or f"{', '.join(loops)} is in use"
    return f"the volume was held open when its last lease ended, and still is: {who}. It can be used once that is over"


def _removed(folder: str) -> str:
    """What is left of it. Its note goes last, so until then it is known again; and what was kept is from the first
    moment on something that is being removed, and never again a volume with less in it."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(os.path.join(folder, KEPT), os.path.join(folder, REMOVING))
    for name in os.listdir(folder):
        if name not in (NOTE, REMOVING):
            left = remove_tree(os.path.join(folder, name))
            if not left.is_clean:
                return str(left)
    left = remove_tree(folder)
    return "" if left.is_clean else str(left)


def _is_worth_keeping(folder: str) -> bool:
    """Whether it holds any file but staged ones, which are removed here. What is in an image that is not mounted is not
    known, so that is kept."""
    mounted = {mount.point for mount in mounts_below(folder)}
    for name in os.listdir(folder):
        place = os.path.join(folder, name)
        if name.endswith(".img") and os.path.realpath(place.removesuffix(".img")) not in mounted:
            return True
        if os.path.isdir(place):
            sweep_staging(place)
            if has_files(place):
                return True
    return False


def _may_have_loops(folder: str) -> bool:
    """Whether a loop device may lie over a file of it. Machines have a hundred of them, and each is a file to read."""
    try:
        note = read_note(folder)
    except (OSError, SubletError):
        return True
    return note is None or note.kind is not Kind.MEMORY


def _still_used(folder: str, *, loops: bool) -> str:
    mounts = [mount.point for mount in mounts_below(folder)]
    if mounts:
        return f"{', '.join(mounts)} is mounted still"
    left = loops_of(folder) if loops else []
    if not left:
        return ""
    who = next(filter(None, map(why_busy, left)), "")
    return f"{', '.join(left)} is in use still" + (f": {who}" if who else "")


def _keep(folder: str, note: StoreNote | None) -> str:
    """From here on no process may write to it. What was only begun is not worth keeping."""
    if not any(name.endswith(".img") or _has_any(os.path.join(folder, name)) for name in os.listdir(folder)):
        return _removed(folder)
    if note is not None and os.path.exists(os.path.join(folder, NOTE)):
        _write_note(folder, note)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith("~"):
            os.unlink(path)
        elif name.endswith(".img"):
            change(path, mode=0o400)
        elif os.path.isdir(path):
            change(path, mode=0o500)
    with contextlib.suppress(FileNotFoundError):
        os.rename(os.path.join(folder, NOTE), os.path.join(folder, KEPT))
    return ""


def _has_any(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except NotADirectoryError:
        return False


def probe(folder: str) -> tuple[str, str]:
    """Try both for real below this folder: why images, and why segments, cannot be had here; empty if they can."""
    return _probed(os.path.join(folder, "block"), make_blocks), _probed(os.path.join(folder, "memory"), make_memory)


def _probed(place: str, make: Callable[[str, StoreNote, tuple[int, int] | None], Made]) -> str:
    parts = (Part(resource=_PROBED, kind=Kind.BLOCK, amount=IMAGE_MIN),)
    try:
        made = make(place, StoreNote(lease=LeaseId("doctor"), epoch=Epoch(0, 0), tenant=_NOBODY, parts=parts), None)
        return made.refused or made.counted or put_away(place, keep=False)
    except OSError as error:
        return str(error.strerror or error)
    finally:
        put_away(place, keep=False)
