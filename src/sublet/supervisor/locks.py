"""One office at a time lends a device of this machine, and whoever comes second is told who it is.

A lock is a file of one's own that is locked with flock: ``sublet-device-<what>.<uid>``, in a folder that belongs to
root and in which everybody may make files but nobody may remove those of others (the sticky bit). To take a device is
to lock the own file *first*, and then to look for a locked file of anybody else for the same device. Two who come at
the same moment therefore see each other, both let go, and try again after a moment of chance.

One file for all would be shorter, and could not be trusted: whoever made it may also remove it while another has it
locked. So nobody depends on a file that is not his own. *Who* has a device is told by the owner of the locked file,
which cannot be forged; what the file says (pid, folder, since when) is his own word and is shown, nothing more.
Anybody can keep a device from others by locking it for nothing; that is said with his name on it.

The lock belongs to the open file: it is gone with the process, however that ends. It must not be inherited, and an
``exec`` closes it; a process that forks without one has to call ``forget`` in the child.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from sublet.errors import InvalidRequest, SubletError

__all__ = ["DeviceLocks", "DeviceTaken", "Holder", "LockUnusable", "all_held", "lock_folder", "who_has"]

FOLDERS: Final = ("/run/lock", "/var/lock", "/tmp")
"""Tried in this order. What is chosen depends on the folders alone, not on who asks, so all users agree on it."""
PREFIX: Final = "sublet-device-"
TRIES: Final = 12
PAUSE_S: Final = 0.02
TEXT_MAX: Final = 4096
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STICKY_FOR_ALL: Final = 0o1003


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has a device."""

    device: str
    uid: int
    """The owner of the locked file."""
    pid: int = 0
    """0 where it is not told."""
    home: str = ""
    since: str = ""

    def __str__(self) -> str:
        told = [f"pid {self.pid}"] if self.pid else []
        told += [text for text in (self.home, self.since and f"since {self.since}") if text]
        return f"the office of {_user(self.uid)}" + (f" ({', '.join(told)})" if told else "")


class DeviceTaken(SubletError):
    """Another office lends this device."""

    transient = True
    scope: ClassVar[Literal["lease", "work", "request", "office"]] = "office"
    default_do = "Use that office, or have it end; a device that is not lent by anybody is taken up by itself."

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"{holder.device} is lent by {holder}")
        self.holder = holder


class LockUnusable(SubletError):
    """The name of the own file is in somebody else's hands, or the folder is of no use."""

    scope: ClassVar[Literal["lease", "work", "request", "office"]] = "office"


def lock_folder(folders: Iterable[str] = FOLDERS) -> str:
    """The folder of the locks on this machine."""
    for folder in folders:
        try:
            found = os.stat(folder)  # /var/lock is a link on many machines, and root's
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and found.st_mode & _STICKY_FOR_ALL == _STICKY_FOR_ALL:
            return os.path.realpath(folder)
    raise LockUnusable(
        f"none of {', '.join(folders)} is a folder of root's in which everybody may make files",
        do="Fix one of them: chmod 1777 /tmp.",
    )


def who_has(device: str, folder: str | None = None) -> Holder | None:
    """Who lends the device now, this process included. It looks, and disturbs nobody for more than a moment."""
    for path in _files_of(device, lock_folder() if folder is None else folder):
        holder = _holder(device, path)
        if holder is not None:
            return holder
    return None


def all_held(folder: str | None = None) -> list[Holder]:
    """Everything that is lent on this machine and has a name there, by whoever it is."""
    where = lock_folder() if folder is None else folder
    names = sorted(name for name in os.listdir(where) if name.startswith(PREFIX) and name.rpartition(".")[2].isdigit())
    found = ((name.removeprefix(PREFIX).rpartition(".")[0], os.path.join(where, name)) for name in names)
    return [holder for device, path in found if (holder := _holder(device, path)) is not None]


class DeviceLocks:
    """What the office of this process has taken, until it lets go or ends."""

    def __init__(self, home: str, *, pid: int | None = None, since: str = "", folder: str | None = None) -> None:
        """``home`` and ``since`` are what others are told."""
        self.folder = lock_folder() if folder is None else folder
        self._told = _written(os.getpid() if pid is None else pid, home, since)
        self._files: dict[str, int] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """What is taken now."""
        return tuple(self._files)

    def take(self, device: str, *, tries: int = TRIES, pause: Callable[[float], None] = time.sleep) -> None:
        """Take the device; raises ``DeviceTaken`` if another office has it, harmless if it is ours already.

        Who looks at a lock holds it for a moment, and two who come together both let go: so nobody is believed to have
        it who does not have it for a while. ``pause`` waits for that, a quarter of a second in all; who will ask
        again anyway, and must not wait, asks with ``tries=1``.
        """
        if _ID.fullmatch(device) is None:
            raise InvalidRequest(f"{device[:40]!r} is no name for a device", do="Use letters, digits, dots and dashes.")
        if device in self._files:
            return
        while True:
            found = self._try(device)
            if isinstance(found, int):
                self._files[device] = found
                return
            tries -= 1
            if tries < 1:
                raise DeviceTaken(found)
            pause(PAUSE_S * (os.urandom(1)[0] + 1) / 256)

    def refresh(self) -> dict[str, SubletError]:
        """Show that the files are in use, so that nothing sweeps them away; and if something did, take them anew.

        To be called now and then, at least daily. What came into other hands meanwhile, or cannot be locked any more,
        is in the answer, and no longer held.
        """
        lost: dict[str, SubletError] = {}
        for device, file in tuple(self._files.items()):
            if _is_same(file, self._path(device)):
                os.utime(file)
                continue
            del self._files[device]
            try:
                self.take(device, tries=1)
            except SubletError as error:
                lost[device] = error
            os.close(file)
        return lost

    def let_go(self, device: str) -> None:
        """Others may take it; harmless if it was not ours. The file stays, as a name that is ours."""
        file = self._files.pop(device, None)
        if file is not None:
            os.ftruncate(file, 0)
            fcntl.flock(file, fcntl.LOCK_UN)  # first, in case a child of ours still has the open file
            os.close(file)

    def close(self) -> None:
        """Let go of everything."""
        for device in self.held:
            self.let_go(device)

    def forget(self) -> None:
        """For a child that was forked without an exec: close the files, and leave the locks to the parent."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _path(self, device: str) -> str:
        return os.path.join(self.folder, f"{PREFIX}{device}.{os.geteuid()}")

    def _try(self, device: str) -> int | Holder:
        """The locked file, or who is in the way."""
        path = self._path(device)
        file = _open_own(path)
        keep = False
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(device, file)
            if not _is_same(file, path):  # it was removed between our opening and our locking: it guards nothing
                return Holder(device=device, uid=os.geteuid())
            os.ftruncate(file, 0)
            for other in _files_of(device, self.folder):
                holder = None if other == path else _holder(device, other)
                if holder is not None:
                    return holder
            os.pwrite(file, self._told, 0)
            keep = True
            return file
        finally:
            if not keep:
                os.close(file)


def _open_own(path: str) -> int:
    """Our own file, made if need be. Whatever else lies under its name is not touched, and not followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        try:
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(file, 0o644)  # whatever the umask: others must be able to see that it is locked
        except FileExistsError:
            file = os.open(path, flags)
    except OSError as error:
        raise LockUnusable(f"{path} cannot be opened: {error.strerror}", do=_whose(path)) from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        raise LockUnusable(f"{path} is not a file of ours", do=_whose(path))
    return file


def _whose(path: str) -> str:
    with contextlib.suppress(OSError):
        return f"Have it removed: it belongs to {_user(os.lstat(path).st_uid)}."
    return "Fix the permissions of its folder."


def _files_of(device: str, folder: str) -> Iterator[str]:
    """The files in which somebody may have locked the device."""
    start = f"{PREFIX}{device}."
    for name in os.listdir(folder):
        if name.startswith(start) and name[len(start) :].isdigit():
            yield os.path.join(folder, name)


def _holder(device: str, path: str) -> Holder | None:
    """Who has locked this file, if anybody has. The number in its name is not asked to be its owner's: in another
    user namespace the two differ."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None  # gone, a link, or not for our eyes: no lock of ours is made so
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(device, file)
        return None
    finally:
        os.close(file)


def _is_same(file: int, path: str) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _written(pid: int, home: str, since: str) -> bytes:
    return "\n".join((str(pid), _dull(home), _dull(since), "")).encode("utf-8", "replace")


def _read(device: str, file: int) -> Holder:
    """What the owner says of himself, as far as it makes sense."""
    uid = os.fstat(file).st_uid
    lines = os.pread(file, TEXT_MAX, 0).decode("utf-8", "replace").split("\n")
    pid, home, since = (*lines, "", "", "")[:3]
    number = int(pid) if pid.isascii() and pid.isdigit() and len(pid) < 11 else 0
    return Holder(device=device, uid=uid, pid=number, home=_dull(home), since=_dull(since))


def _dull(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text[:512])


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
