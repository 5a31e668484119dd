"""The folder of the shared sockets: every user may enter it, only the office's owner may change it.

Clients ask for the same before they send a token (``wire.unix``), so what would not pass there is refused here, when
the office starts, with what to do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest
from sublet.values import shown
from sublet.wire.unix import replaceable, short_path

ROOTS_FOLDER: Final = "/run/sublet"
"""Of root's office, where none is named."""
BACKLOG: Final = 1024
_MODE: Final = 0o755
_OTHERS_WRITE: Final = 0o022
_OTHERS_ENTER: Final = 0o001


def parse_shared_folder(text: str) -> Path:
    """The folder of ``--shared``; empty: the usual one."""
    if text:
        if "\0" in text:
            raise InvalidRequest(f"{shown(text)} is no folder", do="Name a folder, such as /srv/sublet.")
        return Path(os.path.abspath(os.path.expanduser(text)))
    if os.geteuid() != 0:
        raise InvalidRequest(
            "there is no folder that other users look into for the sockets of an office of yours",
            do="Name one: --shared /srv/sublet. All users must be able to enter it, and only you to change it.",
        )
    return Path(ROOTS_FOLDER)


def prepare(folder: Path, home: Path) -> Path:
    """Make the folder, or see that it will do. One that will not is refused and not changed."""
    path = os.fspath(folder)
    if folder == home or folder in home.parents or home in folder.parents:
        raise InvalidRequest(
            f"the shared folder {folder} and the state folder {home} lie within each other",
            do="Name a folder for the sockets alone, such as /srv/sublet.",
        )
    _check_parents(path)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, _MODE)
            _set_rights(path, stat.S_IFDIR, _MODE)  # whatever the umask is
        found = os.lstat(path)
    except OSError as error:
        raise InvalidRequest(
            f"the shared folder {folder} cannot be made: {error.strerror}",
            do="Make its parent first, or name another folder.",
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{folder} is not a folder", do="Name a folder, not a link to one.")
    if found.st_uid != os.geteuid():
        raise InvalidRequest(
            f"the shared folder {folder} belongs to user {found.st_uid}, so clients would not trust it",
            do="Name one of yours, or one that does not exist yet.",
        )
    if found.st_mode & _OTHERS_WRITE:
        raise InvalidRequest(
            f"other users may write into the shared folder {folder}, and could put their sockets into it",
            do=f"Take that right away: `chmod 755 {folder}`.",
        )
    if not found.st_mode & _OTHERS_ENTER:
        raise InvalidRequest(
            f"other users cannot enter the shared folder {folder}", do=f"Let them: `chmod 755 {folder}`."
        )
    return folder


def listen_for_all(path: Path) -> socket.socket:
    """A socket to which every user may connect, in place of one that an office which has ended left there."""
    text = os.fspath(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(text).st_mode):
            raise InvalidRequest(f"{path} is in the way of the office's socket", do="Move it away.")
        if _is_served(text):
            raise InvalidRequest(
                f"another office serves {path}", do="Name another folder: --shared FOLDER; or end that one."
            )
        os.unlink(text)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_path(text) as address:
            listening.bind(address)
        _set_rights(text, stat.S_IFSOCK, 0o666)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _set_rights(path: str, kind: int, mode: int) -> None:
    """Of what we just made there: by its descriptor, and only if it is ours and of that kind."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.geteuid():
            raise InvalidRequest(
                f"{path} was replaced while it was made",
                do="Name a folder below ones that only root or you can change, such as /srv/sublet.",
            )
        os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def _check_parents(path: str) -> None:
    if why := replaceable(path, set()):
        raise InvalidRequest(
            f"the shared folder {path} {why}, so another one could be put into its place",
            do="Name a folder below ones that only root or you can change, such as /srv/sublet.",
        )
    nearest = Path(os.path.realpath(os.path.dirname(path)))
    for parent in (nearest, *nearest.parents):
        try:
            mode = parent.stat().st_mode
        except OSError as error:
            raise InvalidRequest(
                f"the shared folder {path} cannot be made: {parent}: {error.strerror}", do="Make its parent first."
            ) from error
        if not stat.S_ISDIR(mode) or not mode & _OTHERS_ENTER:
            raise InvalidRequest(
                f"the shared folder {path} lies below {parent}, which other users cannot enter",
                do="Name one that they can reach, such as /srv/sublet.",
            )


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.setblocking(False)
        with short_path(path) as address:
            try:
                asking.connect(address)
            except BlockingIOError:  # an office that many ask at once: its backlog is full
                return True
            except OSError:
                return False
    return True
