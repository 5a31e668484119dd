"""Locates an office's state on this machine; office and clients use the same functions.

The state folder (``SUBLET_HOME``) holds what must survive: journal, keys, logs. The sockets lie in the runtime folder.
Both are for the owner only, and so that no other user can put a folder into their place every folder above them belongs
to the owner or root: that is checked, not assumed.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sublet.errors import InvalidRequest
from sublet.wire.unix import check_parents, connect

if TYPE_CHECKING:
    from pathlib import Path

USERS, ROOTS, EARLIER = "/run/user", "/run", "/tmp"
"""Of users who are logged in, of root; and of all others, in earlier versions."""

# `sublet run` asks for the paths as text: what makes a ``Path`` takes as long to load as the rest of its client.


def home_dir(home: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> Path:
    """The state folder: what was given, else ``SUBLET_HOME``, else the user's state folder."""
    from pathlib import Path

    return Path(home_text(home, env))


def home_text(home: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> str:
    """The same, as text."""
    environ = os.environ if env is None else env
    chosen = os.fspath(home) if home is not None else environ.get("SUBLET_HOME", "")
    if not chosen:
        state = environ.get("XDG_STATE_HOME", "")
        chosen = os.path.join(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"), "sublet")
    return os.path.realpath(os.path.expanduser(chosen))


def runtime_dir(home: Path) -> Path:
    """The folder of the socket and of whatever else must not outlive the machine's boot.

    It does not depend on ``XDG_RUNTIME_DIR``: a shell and a cron job of the same user must find the same office. Nor
    does it depend on which users are logged in. ``/run/user/0`` comes and goes with root's logins, so root's is in
    ``/run``. A user who is not logged in has ``run`` in the state folder, and an office that began there is found
    there.

    Never in a folder where others may make theirs first, such as ``/tmp``. An office that an earlier version runs there
    is found as long as it, or its supervisor, listens.
    """
    from pathlib import Path

    return Path(runtime_text(os.fspath(home)))


def runtime_text(home: str) -> str:
    """The same, as text."""
    uid = os.getuid()
    digest = _sha256(os.fsencode(home))[:12]
    own, below = f"{USERS}/{uid}", f"{home}/run"
    earlier = f"{EARLIER}/sublet-{uid}-{digest}"
    if os.path.lexists(earlier) and _is_alive(earlier, uid):
        return earlier
    if uid == 0 and _is_own(ROOTS, uid):
        return f"{ROOTS}/sublet-0-{digest}"
    return f"{own}/sublet-{digest}" if _is_own(own, uid) and not _is_own(below, uid) else below


def socket_path(home: Path) -> Path:
    """The office's control socket."""
    return runtime_dir(home) / "office.sock"


def data_path(home: Path) -> Path:
    """The socket of data connections."""
    return runtime_dir(home) / "data.sock"


def start_lock_path(home: Path) -> Path:
    """The process that starts the office locks this file. It holds how the last office ended (``note_end``)."""
    return runtime_dir(home) / "start.lock"


def note_end(home: Path, *, is_ended: bool) -> None:
    """The office ends because it was told to, and no lease of it goes on; or it begins."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(start_lock_path(home), flags, 0o600)
    try:
        os.write(fd, b"ended\n" if is_ended else b"")
    finally:
        os.close(fd)


def was_ended(home: Path | None) -> bool:
    """Whether the last office of this home was told to end, so that no lease of it goes on. None: it is elsewhere.

    Asked by programs that had leases there: where the file is gone, the office was purged."""
    try:
        return home is not None and start_lock_path(home).stat().st_size > 0
    except FileNotFoundError:
        return True
    except OSError:
        return False


def log_path(home: Path) -> Path:
    """Where an office that was started in the background says what it has to say."""
    return home / "office.log"


def make_private_dir(path: Path) -> Path:
    """Make the folder, or check that it is ours alone; a foreign one is refused, never used and never changed."""
    _check_home_of_root(os.fspath(path))
    try:
        check_parents(os.fspath(path), set())
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat(follow_symlinks=False)
    except OSError as error:
        raise InvalidRequest(
            f"the folder {path} cannot be used: {error.strerror}", do="Set SUBLET_HOME to a folder you can write."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise InvalidRequest(f"{path} is not a folder of yours", do="Set SUBLET_HOME to a folder of your own.")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidRequest(f"others may write into {path}", do=f"Take that right away with `chmod go-w {path}`.")
    check_parents(os.fspath(path), set())  # again: what was made now has the rights that the umask left it
    return path


def _check_home_of_root(path: str) -> None:
    """Under ``sudo`` HOME may still be that of the user who called, who could replace what root keeps there."""
    home = os.environ.get("HOME", "")
    if os.getuid() != 0 or not os.path.isabs(home) or not path.startswith(os.path.realpath(home) + "/"):
        return
    try:
        owner = os.stat(home).st_uid
    except OSError:
        return
    if owner != 0:
        raise InvalidRequest(
            f"root's office would keep its state in {path}, which belongs to uid {owner}, since HOME is {home}",
            do="Use `sudo -H`, or set SUBLET_HOME to a folder of root's, such as /var/lib/sublet.",
        )


def _is_alive(folder: str, uid: int) -> bool:
    """Whether something of this user listens in it."""
    if not _is_own(folder, uid):
        return False
    for name in ("office.sock", "supervisor.sock"):
        try:
            connect(f"{folder}/{name}", timeout_s=1.0).close()
        except OSError:
            continue
        return True
    return False


def _sha256(data: bytes) -> str:
    """By the interpreter's own module where it has one: ``hashlib`` loads OpenSSL, which takes 3 ms or more."""
    name = "_sha2" if sys.version_info >= (3, 12) else "_sha256"
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = importlib.import_module("hashlib")
    digest: str = module.sha256(data).hexdigest()
    return digest


def _is_own(path: str, uid: int) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and os.access(path, os.W_OK)
