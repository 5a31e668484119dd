"""Removes a folder of a hostile user, whose processes may still be swapping names in it.

Every name is used relative to a descriptor of its folder, no symbolic link is followed, and a folder is gone into only
through a descriptor that was compared: on the same mount as the top. So whatever is swapped, only names inside the
folder are ever removed. A swap can cost us the removal of that name, and then it is said to be left.

Depth is no weapon: a folder too deep down is moved up beneath the top, by descriptors again, and removed from there.
Count is none either: there is a bound, and what is beyond it is left for the next call. Nor are new names for those
that were removed: root takes each folder over before it looks into it, so no other user puts more there. After some
passes that meet names again (of processes of our own user) the rest is left for the next call too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from dataclasses import field
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.node.by_descriptor import opened

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_HOLD: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH_MAX: Final = 32
"""So many descriptors are open at most; deeper folders are moved up."""
_PASSES_MAX: Final = 16
"""Each but the first looks only for what was put there meanwhile. Those that go further down into a tree that is too
deep are not counted."""
_NAMED_MAX: Final = 16
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_IMMUTABLE: Final = 0x10
_FS_APPEND: Final = 0x20


@dataclass(slots=True, kw_only=True)
class Left:
    """What is left and why; nothing, if all went well."""

    removed: int = 0
    left: int = 0
    """Names that could not be removed."""
    named: list[str] = field(default_factory=list)
    """The first few of them, with the reason."""
    is_cut_short: bool = False
    """The bound on the count or on the passes was met; the same call again goes on."""

    @property
    def is_clean(self) -> bool:
        return not self.left and not self.is_cut_short

    def __str__(self) -> str:
        if self.is_clean:
            return "nothing is left"
        more = f" and {self.left - len(self.named)} more" if self.left > len(self.named) else ""
        cut = "; more was put there meanwhile, or there was too much to remove at once" if self.is_cut_short else ""
        return f"left: {', '.join(self.named)}{more}{cut}" if self.left else cut.lstrip("; ")


def remove_tree(path: str, *, dir_fd: int | None = None, keep_top: bool = False, count_max: int = 10_000_000) -> Left:
    """Remove a folder and all below it. A link on the way there is not followed, and its content is not trusted.
    ``dir_fd``: ``path`` is a name in this folder."""
    left = Left()
    if dir_fd is not None:
        _remove_top(path, dir_fd, left, keep_top=keep_top, count_max=count_max)
        return left
    whole = os.path.abspath(path)
    name = os.path.basename(whole)
    try:
        with opened(os.path.dirname(whole)) as parent:
            _remove_top(name, parent, left, keep_top=keep_top, count_max=count_max)
    except (FileNotFoundError, NotADirectoryError):
        return left
    except OSError as error:
        _note(left, whole, error)
    return left


def _remove_top(name: str, parent: int, left: Left, *, keep_top: bool, count_max: int) -> None:
    try:
        top = _open_folder(name, parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            _Cleaning(left, count_max, keep_top, parent, -1).unlink(name, parent, name)
        else:
            _note(left, name, error)
        return
    try:
        cleaning = _Cleaning(left, count_max, keep_top, top, _mount_of(top))
        cleaning.all_below_top()
    finally:
        os.close(top)
    if left.is_clean and not keep_top:
        cleaning.remove_folder(name, parent, name)


@dataclass(slots=True)
class _Cleaning:
    left: Left
    count_max: int
    keep_top: bool
    top: int
    mount: int
    moved: int = 0

    def all_below_top(self) -> None:
        """Folders that were moved up come to lie here, so it is looked at again until a pass removes nothing."""
        passes = 0
        while True:
            before, self.left.left = self.left.removed, 0
            self.left.named.clear()
            moved = self.moved
            self._folder(self.top, "", 1)
            if self.left.is_cut_short or (self.left.removed == before and self.moved == moved):
                return
            if not os.listdir(self.top):
                self.left.left = 0
                self.left.named.clear()
                return
            went_deeper = self.moved > moved and self.left.removed - before >= _DEPTH_MAX - 1
            passes += not went_deeper
            if passes == _PASSES_MAX:
                self.left.is_cut_short = True
                return

    def _folder(self, fd: int, path: str, depth: int) -> None:
        if fd != self.top or not self.keep_top:
            _take_over(fd)
        for name in os.listdir(fd):
            if self.left.removed + self.left.left >= self.count_max:
                self.left.is_cut_short = True
                return
            entry_path = f"{path}{name}"
            try:
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            except FileNotFoundError:
                continue
            except OSError as error:
                _note(self.left, entry_path, error)
                continue
            if stat.S_ISDIR(mode):
                self._subfolder(name, fd, entry_path, depth)
            else:
                self.unlink(name, fd, entry_path)

    def _subfolder(self, name: str, parent: int, path: str, depth: int) -> None:
        if depth >= _DEPTH_MAX and self._move_up(name, parent):
            return
        try:
            with contextlib.suppress(OSError):  # empty, which most are: nothing needs to be opened
                os.rmdir(name, dir_fd=parent)
                self.left.removed += 1
                return
            fd = _open_folder(name, parent)
        except FileNotFoundError:
            return
        except OSError as error:  # it became something else in the meantime, or may not be opened
            _note(self.left, path, error)
            return
        try:
            if _mount_of(fd) != self.mount:
                _note(self.left, path, OSError(errno.EXDEV, "something is mounted there"))
                return
            self._folder(fd, f"{path}/", depth + 1)
        finally:
            os.close(fd)
        if not self.left.is_cut_short:
            self.remove_folder(name, parent, path)

    def remove_folder(self, name: str, parent: int, path: str) -> None:
        self._remove(name, parent, path, is_folder=True)

    def unlink(self, name: str, parent: int, path: str) -> None:
        self._remove(name, parent, path, is_folder=False)

    def _remove(self, name: str, parent: int, path: str, *, is_folder: bool) -> None:
        for attempt in range(2):
            try:
                if is_folder:
                    os.rmdir(name, dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)
                self.left.removed += 1
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno == errno.ENOTEMPTY and self.left.left:
                    return  # what is in it has been named
                if attempt == 0 and error.errno in (errno.EPERM, errno.EACCES) and _loosen(name, parent):
                    continue
                _note(self.left, path, error)
                return

    def _move_up(self, name: str, parent: int) -> bool:
        self.moved += 1
        try:
            _make_writable(parent)
            os.rename(name, f".moved-{os.getpid()}-{self.moved}", src_dir_fd=parent, dst_dir_fd=self.top)
        except OSError:  # then it is tried where it is
            self.moved -= 1
            return False
        return True


def _open_folder(name: str, parent: int) -> int:
    """Open it for reading; if its own rights forbid that, change them, on that very folder."""
    try:
        fd = os.open(name, _OPEN, dir_fd=parent)
    except PermissionError:
        held = os.open(name, _HOLD | os.O_DIRECTORY, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{held}", stat.S_IRWXU)  # not by name, which may mean something else by now
            return os.open(f"/proc/self/fd/{held}", _OPEN & ~os.O_NOFOLLOW)
        finally:
            os.close(held)
    _make_writable(fd)
    return fd


def _take_over(fd: int) -> None:
    """From now on no other user puts anything into it; which only root can see to."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.fchown(fd, 0, 0)
            os.fchmod(fd, stat.S_IRWXU)


def _make_writable(fd: int) -> None:
    """A folder of our own without the rights to change it; root needs none."""
    mode = os.fstat(fd).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(OSError):
            os.fchmod(fd, stat.S_IRWXU)


def _loosen(name: str, parent: int) -> bool:
    """Take away what makes a file or its folder unchangeable (as root). Whether anything was taken away."""
    loosened = _clear_flags(parent)
    with contextlib.suppress(OSError):
        held = os.open(name, _HOLD, dir_fd=parent)
        try:
            if stat.S_IFMT(os.fstat(held).st_mode) in (stat.S_IFREG, stat.S_IFDIR):  # opening a device may do something
                fd = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    loosened = _clear_flags(fd) or loosened
                finally:
                    os.close(fd)
        finally:
            os.close(held)
    return loosened


def _clear_flags(fd: int) -> bool:
    try:
        flags: int = struct.unpack("@l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(struct.calcsize("@l"))))[0]
        if not flags & (_FS_IMMUTABLE | _FS_APPEND):
            return False
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("@l", flags & ~(_FS_IMMUTABLE | _FS_APPEND)))
    except OSError:  # another file system, or not ours to change
        return False
    return True


def _mount_of(fd: int) -> int:
    """The mount a descriptor lies on. The device number would not tell a folder mounted from the same file system."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise OSError(errno.ENOSYS, "the kernel does not say on which mount a descriptor lies")


def _note(left: Left, path: str, error: OSError) -> None:
    left.left += 1
    if len(left.named) < _NAMED_MAX:
        left.named.append(f"{path!r} ({error.strerror})")
