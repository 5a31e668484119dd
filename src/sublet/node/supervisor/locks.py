"""Device locks: one office of the machine lends a device, and a second one learns which office it is.

Each office locks a file of its own with flock: ``sublet-device-<what>.<uid>``, in a folder that belongs to root and in
which every user may create files but none may remove those of others (the sticky bit). To take a device, an office
locks its own file *first*, and then looks for a locked file of another office for the same device. Two offices that try
at the same moment therefore see each other, both let go, and retry after a random pause.

One file for all would be shorter, and could not be trusted: the user who created it may also remove it while another
has it locked. So no office depends on a file of another user. The holder of a device is the owner of the locked file,
or, where ``/proc/locks`` shows it, of the process that locked it: to lock a file of another user it is enough to be
allowed to read it. What the file says (pid, folder, since when) is the holder's own claim and is shown, nothing more.

On a shared machine the office of root goes first: ``counts`` is the whole rule. Root locks a file that only root can
open, in a folder that only root can write. Every other office looks there before it takes a device, and again every few
seconds, and gives the device up; whether that file is locked it sees in ``/proc/locks`` or, from another container, by
the time of its last use. A lock of an ordinary user keeps root from a device for ``TAKEOVER_S`` at the most, and keeps
no other user from one whose node that user may not open. Among users who may open it, one can keep it from the others
by locking it without using it; the error then gives that user's name.

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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import ClassVar, Final, Literal

from sublet.errors import InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.by_descriptor import change
from sublet.values import NS_PER_S, ResourceId
from sublet.wire.orders import Device, Foreign, Inventory

FOLDERS: Final = ("/run/lock", "/var/lock", "/tmp")
"""Tried in this order. What is chosen depends on the folders alone, not on the user, so all users agree on it."""
ROOTS: Final = "/run/sublet-locks"
"""Where root notes what its offices lend. Only root can write there, all users can read."""
TAKEOVER_S: Final = 30.0
"""How long after root noted its claim the lock of an ordinary user still keeps it from the device. An office looks
every five seconds, so one that works gives the device up long before."""
NOTED_S: Final = 30.0
"""How long a claim of root's counts after its last use, where it cannot be seen whether it is locked."""
UNKNOWN: Final = 65534
"""The user of a lock whose process is gone."""
NODES: Final = "/dev"
_CARD: Final = re.compile(r"nvidia[0-9]+")
PREFIX: Final = "sublet-device-"
TRIES: Final = 12
PAUSE_S: Final = 0.02
TEXT_MAX: Final = 4096
LOOKS: Final = 4
"""How often ``/proc/locks`` is read for a lock. The kernel hands the list out in pieces and finds its place by
counting, so where another process unlocks something between two of them it skips a lock that is held: one of 150 reads
did, beside processes that lock all the time."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STICKY_FOR_ALL: Final = 0o1003


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The holder of a device."""

    device: str
    uid: int
    """The owner of the locked file."""
    pid: int = 0
    """0 where it is not told."""
    home: str = ""
    since: str = ""

    def __str__(self) -> str:
        details = [f"pid {self.pid}"] if self.pid else []
        details += [text for text in (self.home, self.since and f"since {self.since}") if text]
        return f"the office of {_user(self.uid)}" + (f" ({', '.join(details)})" if details else "")


class DeviceLocked(SubletError):
    """Another office lends this device."""

    transient = True
    scope: ClassVar[Literal["lease", "work", "request", "office"]] = "office"
    default_do = "Use that office, or have it end; a device that no office lends is taken up by itself."

    def __init__(self, holder: LockHolder, note: str = "") -> None:
        super().__init__(f"{holder.device} is lent by {holder}{note}")
        self.holder = holder


class LockUnusable(SubletError):
    """The path of the own file belongs to another user, or the folder is unusable."""

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
        f"none of {', '.join(folders)} is a folder of root's in which all users may make files",
        do="Fix one of them: chmod 1777 /tmp.",
    )


def counts(other: int, *, mine: int, is_noted: bool, may_open: bool, waited_s: float) -> bool:
    """Whether a lock of user ``other`` keeps an office of user ``mine`` from a device.

    ``is_noted``: ``mine`` is root and its claim stands where only root can write, since ``waited_s``. ``may_open``:
    whether ``other`` may open the device's node at all.
    """
    if other == 0 or other == mine:
        return True
    return may_open and not (is_noted and waited_s >= TAKEOVER_S)


def may_open(uid: int, device: str, nodes: str = NODES) -> bool:
    """Whether this user may open the node of a card. Yes where that is not known: a device without a node, or a node
    with an access list. Which card has which node only the driver knows, so one that may be opened is enough."""
    if not device.startswith(("GPU-", "MIG-")):
        return True
    found = [name for name in os.listdir(nodes) if _CARD.fullmatch(name)]
    return not found or any(_may_open(uid, os.path.join(nodes, name)) for name in found)


def noted_by_root(device: str, roots: str | None = ROOTS) -> LockHolder | None:
    """Whether an office of root lends the device, or is about to."""
    found = (_noted(device, path, _locker) for path in _files_of(device, _trusted(roots)))
    return next((holder for holder in found if holder is not None), None)


def all_held(folder: str | None = None, roots: str | None = ROOTS) -> list[LockHolder]:
    """The holders of all devices that are lent on this machine and have a lock file there, of all users."""
    listed = dict(_listed_locks())  # once for all files: machines whose cards change keep many
    found: dict[tuple[str, int], LockHolder] = {}
    for path in _files_of(None, _trusted(roots)):
        if (holder := _noted(_device_of(path), path, lambda file: listed.get(_as_listed(file)))) is not None:
            found.setdefault((holder.device, holder.uid), holder)
    for path in _files_of(None, lock_folder() if folder is None else folder):
        if (holder := _holder(_device_of(path), path)) is not None:
            found.setdefault((holder.device, holder.uid), holder)
    return [found[key] for key in sorted(found)]


class DeviceLocks:
    """What the office of this process has taken, until it lets go or ends."""

    def __init__(
        self,
        home: str,
        *,
        pid: int | None = None,
        since: str = "",
        folder: str | None = None,
        roots: str | None = ROOTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``home`` and ``since`` are what others are told. ``roots``: where root notes what it lends."""
        self.folder = lock_folder() if folder is None else folder
        self.roots = roots
        self._clock = clock
        self._own_note = _written(os.getpid() if pid is None else pid, home, since)
        self._files: dict[str, int] = {}
        """What is taken: the locked file in the folder of all."""
        self._noted: dict[str, tuple[int, float]] = {}
        """Of root: the locked file in root's folder, since when. Before the device is taken and as long as it is."""

    @property
    def held(self) -> tuple[str, ...]:
        """What is taken now."""
        return tuple(self._files)

    @property
    def wanted(self) -> tuple[str, ...]:
        """What is taken, or claimed for root."""
        return tuple({**self._files, **self._noted})

    def take(self, device: str, *, tries: int = TRIES, pause: Callable[[float], None] = time.sleep) -> None:
        """Take the device; raises ``DeviceLocked`` if another office has it, harmless if it is ours already.

        A process that looks at a lock holds it for a moment, and two that come together both let go: so the device
        counts as taken only if it still is after several tries. ``pause`` waits between them, a quarter of a second in
        all; a caller that will ask again anyway, and must not wait, passes ``tries=1``.
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
                note = f"; root's office takes it over within {TAKEOVER_S:.0f} s" if found.uid and self._noted else ""
                raise DeviceLocked(found, note)
            pause(PAUSE_S * (os.urandom(1)[0] + 1) / 256)

    def refresh(self) -> dict[str, SubletError]:
        """Show that the files are in use, so that nothing sweeps them away; and if something did, take them anew.

        To be called every few seconds, since root may want a device. What came into other hands meanwhile, or cannot
        be locked any more, is in the answer, and no longer held.
        """
        lost: dict[str, SubletError] = {}
        for device, (file, _) in tuple(self._noted.items()):
            if not is_same(file, _own_path(self.roots or "", device)):
                os.close(self._noted.pop(device)[0])
                self._note(device)
            else:
                os.utime(file)
        for device, file in tuple(self._files.items()):
            claim = self._claim_of_root(device)
            if claim is not None:
                self.unlock(device)
                lost[device] = DeviceLocked(claim)
                continue
            if is_same(file, self._path(device)):
                os.utime(file)
                continue
            del self._files[device]
            try:
                self.take(device, tries=1)
            except SubletError as error:
                lost[device] = error
            os.close(file)
        return lost

    def unlock(self, device: str) -> None:
        """Others may take it; harmless if it was not ours. The file stays, as a name that is ours."""
        noted, _ = self._noted.pop(device, (None, 0.0))
        for file in (self._files.pop(device, None), noted):
            if file is not None:
                os.ftruncate(file, 0)
                if file == noted:
                    os.utime(file, (0, 0))  # its last use is over
                fcntl.flock(file, fcntl.LOCK_UN)  # first, in case a child of ours still has the open file
                os.close(file)

    def close(self) -> None:
        """Let go of everything."""
        for device in self.wanted:
            self.unlock(device)

    def forget(self) -> None:
        """For a child that was forked without an exec: close the files, and leave the locks to the parent."""
        for file in (*self._files.values(), *(file for file, _ in self._noted.values())):
            os.close(file)
        self._files.clear()
        self._noted.clear()

    def _path(self, device: str) -> str:
        return _own_path(self.folder, device)

    def _claim_of_root(self, device: str) -> LockHolder | None:
        """The office of root that wants the device, if it is another than this."""
        return None if device in self._noted else noted_by_root(device, self.roots)

    def _note(self, device: str) -> LockHolder | None:
        """As root: note the claim where only root can. Returns the office of root that was first, if it is another."""
        if device in self._noted or os.geteuid() or self.roots is None:
            return None
        with contextlib.suppress(OSError):  # as root of a container it may not be ours to make: then there is none
            os.mkdir(self.roots, 0o755)
            change(self.roots, mode=0o755)  # whatever the umask
        if not _trusted(self.roots):
            return None
        found = _locked(_own_path(self.roots, device), device, 0o600)
        if isinstance(found, LockHolder):
            return found
        os.pwrite(found, self._own_note, 0)
        self._noted[device] = found, self._clock()
        return None

    def _try(self, device: str) -> int | LockHolder:
        """The locked file, or the holder that is in the way."""
        first = self._note(device) or self._claim_of_root(device)
        if first is not None:
            return first
        noted = self._noted.get(device)
        waited_s = 0.0 if noted is None else self._clock() - noted[1]
        path = self._path(device)
        try:
            found = _locked(path, device)
        except LockUnusable:
            if noted is None:
                raise
            found = LockHolder(device=device, uid=_owner(path))
        if isinstance(found, LockHolder):
            # Its name in the folder of all is in the way. What counts for root is the claim.
            is_over = noted is not None and found.uid != 0 and waited_s >= TAKEOVER_S
            return os.dup(noted[0]) if noted is not None and is_over else found
        keep = False
        try:
            for other in _files_of(device, self.folder):
                holder = None if other == path else _holder(device, other)
                if holder is not None and counts(
                    holder.uid,
                    mine=os.geteuid(),
                    is_noted=noted is not None,
                    may_open=may_open(holder.uid, device),
                    waited_s=waited_s,
                ):
                    return holder
            claim = self._claim_of_root(device)  # it may have come while we looked
            if claim is not None:
                return claim
            os.pwrite(found, self._own_note, 0)
            keep = True
            return found
        finally:
            if not keep:
                os.close(found)


def _locked(path: str, device: str, mode: int = 0o644) -> int | LockHolder:
    """Our own file, locked and empty; or its present holder."""
    file, keep = open_own(path, mode), False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(device, file)
        if not is_same(file, path):  # it was removed between our opening and our locking: it guards nothing
            return LockHolder(device=device, uid=os.geteuid())
        os.ftruncate(file, 0)
        keep = True
        return file
    finally:
        if not keep:
            os.close(file)


def _own_path(folder: str, device: str) -> str:
    return os.path.join(folder, f"{PREFIX}{device}.{os.geteuid()}")


def _trusted(roots: str | None) -> str:
    """Root's folder, if there is one that only root can write; else nothing."""
    if roots is None:
        return ""
    try:
        found = os.lstat(roots)
    except OSError:
        return ""
    is_roots = stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and not found.st_mode & 0o022
    return roots if is_roots else ""


def _may_open(uid: int, node: str) -> bool:
    import pwd

    try:
        found = os.stat(node)
        if uid == 0 or "system.posix_acl_access" in os.listxattr(node):
            return True
    except OSError:
        return True
    if found.st_uid == uid:
        return found.st_mode & 0o600 == 0o600
    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, pwd.getpwuid(uid).pw_gid)
    except KeyError:
        groups = []  # a user number without a name is in no group that is known
    wanted = 0o060 if found.st_gid in groups else 0o006
    return found.st_mode & wanted == wanted


def open_own(path: str, mode: int) -> int:
    """Our own file, made if need be. Whatever else lies under its name is not touched, and not followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        try:
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(file, mode)  # whatever the umask: others must be able to see that it is locked
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


def _files_of(device: str | None, folder: str) -> Iterator[str]:
    """The files by which an office may have locked this device, or any device (None)."""
    start = PREFIX if device is None else f"{PREFIX}{device}."
    for name in sorted(name for name in os.listdir(folder) if name.startswith(start)) if folder else ():
        end = name.rpartition(".")[2]
        if end.isdigit() and (device is None or name == start + end):
            yield os.path.join(folder, name)


def _device_of(path: str) -> str:
    return os.path.basename(path).removeprefix(PREFIX).rpartition(".")[0]


def _noted(device: str, path: str, locker: Callable[[os.stat_result], int | None]) -> LockHolder | None:
    """The office of root whose note this is; None if it is over. ``locker`` tells which process has locked a file."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    pid = locker(found)
    if pid is None and time.time() - found.st_mtime >= NOTED_S:
        return None
    try:  # root may read what root's office says of itself
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return LockHolder(device=device, uid=0, pid=pid or 0)
    try:
        return _read(device, file)
    finally:
        os.close(file)


def _holder(device: str, path: str) -> LockHolder | None:
    """The office that has locked this file; None if it is not locked. The uid in its name need not be its owner's: in
    another user namespace the two differ."""
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


def _locker(found: os.stat_result) -> int | None:
    """The process that locked this file, by ``/proc/locks``; None where that does not show it."""
    wanted = _as_listed(found)
    return next((pid for file, pid in _listed_locks() if file == wanted), None)


def _as_listed(found: os.stat_result) -> bytes:
    """How ``/proc/locks`` names a file."""
    return b"%02x:%02x:%d" % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)


def _listed_locks() -> Iterator[tuple[bytes, int]]:
    """The files that are locked with flock, and by which process; each as often as the list is read."""
    with contextlib.suppress(OSError, ValueError):
        for _ in range(LOOKS):
            with open("/proc/locks", "rb") as file:
                for line in file:
                    words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:1a:42 0 EOF
                    if len(words) > 5 and words[1] == b"FLOCK":
                        yield words[5], int(words[4])


def _user_of(found: os.stat_result) -> int:
    """Whose lock it is: of the user that locked it, where that is to be seen, else of the file's owner. As root all is
    to be seen: a lock that outlived the process is not the owner's on the file's word alone."""
    pid = _locker(found)
    try:
        return found.st_uid if pid is None else os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return found.st_uid if os.geteuid() else UNKNOWN


def _owner(path: str) -> int:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return 0


def is_same(file: int, path: str) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _written(pid: int, home: str, since: str) -> bytes:
    return "\n".join((str(pid), on_one_line(home), on_one_line(since), "")).encode("utf-8", "replace")


def _read(device: str, file: int) -> LockHolder:
    """What the owner wrote about itself, as far as it is valid."""
    uid = _user_of(os.fstat(file))
    lines = os.pread(file, TEXT_MAX, 0).decode("utf-8", "replace").split("\n")
    pid, home, since = (*lines, "", "", "")[:3]
    number = int(pid) if pid.isascii() and pid.isdigit() and len(pid) < 11 else 0
    return LockHolder(device=device, uid=uid, pid=number, home=on_one_line(home), since=on_one_line(since))


def on_one_line(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text[:512])


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# --------------------------------------------------------------------------------------------------------------- claims
#
# Which devices of the inventory this office may lend: those whose lock it holds.
#
# A device that another office has stays in the inventory, all of it in use by others (``Foreign``), and is taken up by
# itself as soon as the other office is gone. Nothing is lent without its lock, so what cannot be locked for whatever
# reason counts as taken, with the reason.


AGAIN_NS: Final = 5 * NS_PER_S
"""So often it is tried again, and looked whether the locks are still there."""


class Claims:
    """The locks of one inventory, and what is to be said of them."""

    def __init__(self, locks: DeviceLocks) -> None:
        self._locks = locks
        self._inventory: Inventory | None = None
        self._taken: dict[str, str] = {}
        """What others have, by its name on the machine, with the sentence that says who."""

    def configure(self, inventory: Inventory) -> list[Foreign]:
        """Take what this inventory needs, let go of the rest; says of every device with a name how it stands."""
        self._inventory = inventory
        wanted = {device.machine_id for device in inventory.devices if device.machine_id}
        for device in self._locks.wanted:
            if device not in wanted:
                self._locks.unlock(device)
        self._taken = {device: reason for device in sorted(wanted) if (reason := self._take(device, TRIES))}
        return [self._foreign_use(device) for device in self._named()]

    def again(self) -> list[Foreign]:
        """Try once more for what others have, and look after what is held; says what changed. It does not wait."""
        before = dict(self._taken)
        self._taken.update({device: error.message for device, error in self._locks.refresh().items()})
        for device in tuple(self._taken):
            reason = self._take(device, 1)
            if reason:
                self._taken[device] = reason
            else:
                del self._taken[device]
        changed = {name for name in {*before, *self._taken} if before.get(name) != self._taken.get(name)}
        return [self._foreign_use(device) for device in self._named() if device.machine_id in changed]

    def keep_only(self, used: Container[ResourceId]) -> None:
        """No office needs the rest any more: others may have it, until an office comes and says again what it needs."""
        for device in self._named():
            if device.id not in used:
                self._locks.unlock(device.machine_id)
                self._taken.pop(device.machine_id, None)

    def close(self) -> None:
        """Let others have all of it."""
        self._locks.close()

    def _named(self) -> Sequence[Device]:
        return [] if self._inventory is None else [d for d in self._inventory.devices if d.machine_id]

    def _take(self, device: str, tries: int) -> str:
        """Empty if it is ours now; otherwise why not."""
        try:
            self._locks.take(device, tries=tries)
        except SubletError as error:
            return error.message
        return ""

    def _foreign_use(self, device: Device) -> Foreign:
        assert self._inventory is not None
        reason = self._taken.get(device.machine_id)
        if reason is None:
            return Foreign(node=self._inventory.node, resource=device.id)
        return Foreign(
            node=self._inventory.node, resource=device.id, amount=device.capacity, blocks=True, detail=reason
        )
