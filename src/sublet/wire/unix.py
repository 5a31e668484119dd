"""Unix sockets: who may own a path, and paths too long for the kernel.

A client sends its token to whatever listens, and loads what comes back. So before the first byte it checks that only
this user (or root) could have put a socket there: the folder and every folder above it belong to trusted users and
cannot be written by others, as ``sshd`` asks of its files, and the process that listens runs as one of those users.

The address of a unix socket has room for 107 bytes. A longer path is opened by its folder's descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import Final

from sublet.errors import InvalidRequest
from sublet.wire.sockets import peer_of

ADDRESS_BYTES_MAX: Final = 107
"""What ``sun_path`` takes, less the zero at its end."""
ROOT: Final = 0
LINKS_MAX: Final = 40
BACKLOG_PAUSE_S: Final = 0.01
"""Until a connection is tried again for which the listener's backlog had no room."""
_OTHERS_WRITE: Final = 0o022
_ACL: Final = "system.posix_acl_access"


def connect(path: str, *, timeout_s: float | None, named: bool = False) -> socket.socket:
    """A connection to the socket at ``path``, once folder and listener were found to be this user's or root's.

    ``named``: the user wrote this path down (``SUBLET_URL``), so the owner of its folder is trusted.
    Raises `OSError` where nothing listens (`TimeoutError` where the connections that wait for it stayed too many), and
    ``InvalidRequest`` where others could listen: then nothing was sent.
    """
    owner = check_folder(os.path.dirname(path), named=named)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        connect_waiting(sock, path)
        check_listener(sock, path, owner)
    except BaseException:
        sock.close()
        raise
    return sock


def connect_waiting(sock: socket.socket, path: str) -> None:
    """Connect this socket, for as long as its time-out says where the listener's backlog is full.

    Raises `TimeoutError` where it stayed full: there is a listener all the same.
    """
    timeout_s = sock.gettimeout()
    until = None if timeout_s is None else time.monotonic() + timeout_s
    with short_path(path) as address:
        while True:
            try:
                return sock.connect(address)
            except BlockingIOError:  # only a socket without a time-out waits for room in the kernel
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError("too many connections wait to be accepted") from None
                time.sleep(BACKLOG_PAUSE_S)


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A name of the same socket that fits into an address, for ``bind`` and ``connect``."""
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield path
        return
    folder, name = os.path.split(path)
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def check_folder(folder: str, *, named: bool = False) -> int:
    """See that only trusted users can put a socket into the folder, and return the uid of its owner.

    Raises `FileNotFoundError` where there is none.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise _untrusted(folder, "is not a folder")
    if not named and found.st_uid not in (ROOT, os.getuid()):
        raise _untrusted(folder, f"belongs to {named_user(found.st_uid)}, not to you")
    if found.st_mode & _OTHERS_WRITE:
        raise _untrusted(folder, "can be written by other users")
    check_parents(folder, {found.st_uid})
    return found.st_uid


def check_parents(folder: str, owners: set[int]) -> None:
    """See that only the ``owners``, this user and root can put another folder into its place (``replaceable``)."""
    if why := replaceable(folder, owners):
        raise _untrusted(folder, why)


def replaceable(folder: str, owners: set[int]) -> str:
    """Why another user than the ``owners``, this user and root could put another folder into its place; empty if none
    could. Folders on the way that do not exist yet are passed over.

    It goes down from the root, and where a link stands along it: what is above has been looked at before, so no
    other user can exchange it between one look and the next. The owner of a link can lead it elsewhere later, and
    counts as well.
    """
    trusted = owners | {ROOT, os.getuid()}
    path, links = "/", 0
    ahead = os.path.dirname(os.path.abspath(folder)).split("/")[::-1]
    while ahead:
        name = ahead.pop()
        if name in (".", ".."):
            path = os.path.dirname(path) if name == ".." else path
            continue
        at = os.path.join(path, name) if name else path
        try:
            found = os.lstat(at)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        if found.st_uid not in trusted and not stands_for_root(found.st_uid):
            return f"lies in {at}, which belongs to {named_user(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > LINKS_MAX:
                return f"lies behind more than {LINKS_MAX} links"
            target = os.readlink(at)
            path = "/" if target.startswith("/") else path
            ahead += reversed(target.split("/"))
            continue
        if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX and not _is_private_group(at, found):
            return f"lies in {at}, which other users can write"
        path = at
    return ""


def check_listener(sock: socket.socket, path: str, owner: int) -> None:
    """See that the process that listens belongs to the folder's owner, or to root."""
    uid = peer_of(sock).uid
    if uid not in (ROOT, owner):
        raise _untrusted(path, f"is served by a process of {named_user(uid)}, not of its folder's owner")


def _untrusted(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} {why}; nothing was sent to it",
        do="Remove it or set its rights right, or set SUBLET_HOME to a folder that only you can write.",
    )


def named_user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _is_private_group(path: str, found: os.stat_result) -> bool:
    """Whether the only right beyond the owner's is that of the owner's own group, which has no other member: with a
    umask of 0002, the habit of several distributions, every folder of a user looks like this."""
    if found.st_mode & 0o002 or found.st_uid == ROOT:
        return False
    import grp
    import pwd

    with contextlib.suppress(OSError):
        os.getxattr(path, _ACL)
        return False  # then the group's bits are those of the list, which may name any user
    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group.gr_gid)}
    return owner.pw_gid == group.gr_gid and members <= {owner.pw_name}


def stands_for_root(uid: int) -> bool:
    """In a user namespace without a root, root's folders belong to the overflow user."""
    try:
        with open("/proc/self/uid_map", "rb") as mapped, open("/proc/sys/kernel/overflowuid", "rb") as overflow:
            return uid == int(overflow.read()) and all(int(line.split()[0]) != ROOT for line in mapped)
    except OSError:
        return False
