"""Finds who could change the files that this program runs from.

What root runs another user must not be able to change, or that user is root: neither the interpreter, nor a library,
nor the package, nor a folder above one of them. So root's office and its supervisor look before they begin, as ``sshd``
does with its keys. It is asked of the files that were really loaded, and of every folder from which more may be.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from sublet.errors import InvalidRequest

ROOT: Final = 0
LINKS_MAX: Final = 40
_ACL: Final = "system.posix_acl_access"
_WHOLE_MAP: Final = ["0", "0", "4294967295"]
_PATHS: Final = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Where interpreter and loader look for more: what no other user can change stays."""
_NOT_INHERITED: Final = frozenset({"PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE"})


_right: Final[set[str]] = set()
"""What was looked at and can be changed by root alone. None but root could make that untrue, so it is not asked again
when more of the program is loaded."""
_installed_is_right = False
"""Whether all that is installed was looked at; from then on only root could add to it."""


def check_program() -> None:
    """As root: raise ``InvalidRequest`` where another user could change what this process runs from."""
    global _installed_is_right
    if not is_root():
        return
    for path in _absolute(_loaded()) if _installed_is_right else program_files():
        if path not in _right and (why := _changeable(os.path.normpath(path), _right, LINKS_MAX)):
            raise InvalidRequest(
                f"as root Sublet does not run from files that another user can change: {why}",
                do="Install it where only root can write, such as `python3 -m venv /opt/sublet`, or take the "
                "files over (`chown -R root:root` and `chmod -R go-w`), or start the office as their owner.",
            )
    _installed_is_right = True


def program_files() -> list[str]:
    """The interpreter, its folders, where modules are looked for, each module that is loaded, all of this package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found: list[object] = [
        sys.executable,
        sys.prefix,
        sys.base_prefix,
        os.path.join(sys.prefix, "pyvenv.cfg"),
        package,
    ]
    for folder, _, names in os.walk(package):
        found += [folder, *(f"{folder}/{name}" for name in names)]
    return _absolute([*found, *_loaded()])


def _loaded() -> list[object]:
    """Where modules are looked for, and what was loaded of them."""
    found: list[object] = [*sys.path]
    for module in tuple(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        found += [getattr(module, "__file__", None) or "", getattr(spec, "cached", None) or ""]
    return found


def _absolute(found: Iterable[object]) -> list[str]:
    return [path for path in dict.fromkeys(found) if isinstance(path, str) and path.startswith("/")]


def changeable(path: str, seen: set[str] | None = None) -> str:
    """Why a user other than root could change what is at ``path``, or put something else there; empty if none could.

    Every folder on the way is looked at, and where a link leads. ``seen``: what was looked at before, and was right.
    """
    return _changeable(os.path.abspath(path), set() if seen is None else seen, LINKS_MAX)


def environment_for_root(env: Mapping[str, str]) -> dict[str, str]:
    """What root's office takes over of its caller's environment: nothing that loads code from elsewhere. Folders of
    libraries and modules stay where only root can change them, since drivers of cards are found by such."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in _NOT_INHERITED and (name in _PATHS or not name.startswith("LD_"))
    }
    seen: set[str] = set()
    for name in _PATHS:
        if name in kept:
            folders = [f for f in kept[name].split(os.pathsep) if os.path.isabs(f) and not changeable(f, seen)]
            kept[name] = os.pathsep.join(folders)
            if not folders:
                del kept[name]
    return kept


def is_root() -> bool:
    """Whether this process is root of the machine. Root of a user namespace has the rights of an ordinary user, and to
    it the machine's own files belong to the overflow user."""
    if os.geteuid() != ROOT:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == _WHOLE_MAP
    except OSError:
        return True


def _changeable(path: str, seen: set[str], links: int) -> str:
    """Of a path without dots, as there are two thousand at each start."""
    if path in seen:
        return ""
    parent = path[: path.rindex("/")] or "/"
    if parent != path and (why := _changeable(parent, seen, links)):
        return why
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        seen.add(path)
        return ""  # and who may make it there was just looked at
    if found.st_uid != ROOT:
        return f"{path} belongs to {_user(found.st_uid)}"
    if stat.S_ISLNK(found.st_mode):
        if not links:
            return f"{path} is one link too many"
        target = os.path.normpath(os.path.join(os.path.realpath(parent), os.readlink(path)))
        if why := _changeable(target, seen, links - 1):
            return why
    elif (
        found.st_mode & 0o022
        and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
        and (found.st_mode & 0o002 or not _is_roots_alone(path, found.st_gid))
    ):
        return f"{path} can be written by other users"
    seen.add(path)
    return ""


def _is_roots_alone(path: str, gid: int) -> bool:
    """Whether the right of this group is root's alone: it has no other member, and there is no access list."""
    import grp
    import pwd

    try:
        os.getxattr(path, _ACL)
    except OSError:
        pass
    else:
        return False
    try:
        members: Iterable[str] = grp.getgrgid(gid).gr_mem
    except KeyError:
        members = ()
    names = {*members, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    return all(pwd.getpwnam(name).pw_uid == ROOT for name in names)


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
