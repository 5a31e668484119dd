"""The owner of a state: (tenant, name), in a volume of that name.

The name is the path of the notebook, where Jupyter or VS Code gives it; otherwise it is what ``%gpu name X`` says. A
notebook without a name saves all the same, for as long as its kernel lives. So does a second kernel of a name that
another one has: it gets a volume of its own, without a name, and its person is told; and, when asked, a copy of what
the first left with its last finished cell, which goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import CapacityExceeded, InvalidRequest, LeaseEnded, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.notebook.remote_value import clock_time
from sublet.state.checkpoints.durable import store_of
from sublet.state.checkpoints.store import CheckpointStore, FolderStore
from sublet.values import GIB, MIB, LeaseId, parse_size, valid_name

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.notebook.checkpoint import NotebookCheckpoint

FOLDER_VARIABLE: Final = "SUBLET_NOTEBOOK_STATE"
"""A folder to save in instead of a volume: where the office lends no disk."""
SIZES: Final = (1 * GIB, 256 * MIB, 64 * MIB)
"""Of a volume that is made: the first there is room for, unless ``%gpu name X SIZE`` says otherwise."""
TTL: Final = "5m"
"""Renewed as long as the kernel lives; so long a kernel that was killed keeps others from its volume."""
WAIT_S: Final = 5.0
"""For a lease of this name that is just ending."""
NAME_MAX: Final = 40
"""Letters of the notebook's own name in that of its volume."""
DEAD: Final = ("Z", "X")
"""States of a process that only waits for its parent to look."""
HOLDER: Final = re.compile(r".*\[(\d+)\]@(.*)")
"""As clients call themselves."""


@dataclass(slots=True, kw_only=True, eq=False)
class KernelVolume:
    """Where this kernel saves."""

    name: str
    """Empty: it goes with the kernel."""
    lease: Lease | None = None
    folder: str = ""
    """Instead of a lease."""
    message: str = ""
    """What the person should know of it."""
    lock: int = -1
    """Held on the folder."""
    is_empty: bool = False
    """It was made just now: to look into it would cost the time to set it up, before anything is saved."""
    other: str = ""
    """Of whom its name is, where that is another kernel: a volume's name, or a folder."""
    is_tight: bool = False
    """It was said that it is too small for as many checkpoints as are kept elsewhere."""
    committed: int | None = None
    """The number of the checkpoint of the last cell that is known to have finished; None: as it is found."""
    _store: CheckpointStore | None = None

    @property
    def store(self) -> CheckpointStore:
        """For this process. The first look at a volume may set it up, which takes a moment."""
        if self._store is None:
            self._store = FolderStore(self.folder) if self.lease is None else store_of(self.lease)
        return self._store

    @property
    def is_over(self) -> bool:
        """Its lease has ended, or is about to hear of it: where a supervisor was killed the folder goes first. It may
        be there again, without what was in it: a lease that lives on has its room anew."""
        if self.lease is None:
            return False
        store = self._store
        return self.lease.end is not None or (
            isinstance(store, FolderStore) and not store.by_descriptor and self._is_bare(store.checkpoints)
        )

    def _is_bare(self, checkpoints: Path) -> bool:
        try:
            return not os.listdir(checkpoints) and bool(self.committed)
        except OSError:
            return True

    def release(self) -> None:
        """What is in it stays, if it has a name."""
        if self.lease is not None:
            with contextlib.suppress(SubletError):  # it is tried again until its time to live ends
                self.lease.release()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


class Owner:
    """Of one kernel's state."""

    def __init__(
        self,
        user_ns: Mapping[str, Any],
        environ: Mapping[str, str] = os.environ,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """``labels``: more of them, for the lease of the volume."""
        self._user_ns = user_ns
        self._environ = environ
        self._labels = {"program": "notebook", **(labels or {})}
        self._name = ""
        self.size = 0
        """Of its volume, where a person has said one."""
        self.volume: KernelVolume | None = None
        self.trouble = ""
        """Why there is none, where there is none."""

    @property
    def name(self) -> str:
        """As the volume is called; empty where none was given."""
        return self._name or (volume_name(path) if (path := self.path) else "")

    @property
    def path(self) -> str:
        """Of the notebook, if it is known."""
        return notebook_path(self._user_ns, self._environ)

    @property
    def has_own_name(self) -> bool:
        """Whether a person named it (``%gpu name``)."""
        return bool(self._name)

    def rename(self, name: str, size: str = "") -> None:
        """Say whose state it is from now on."""
        self._name = valid_name(name, "name")
        self.size = parse_size(size) if size else 0
        self.release_volume()

    def release_volume(self) -> None:
        """Let go of the volume; what is in it stays."""
        volume = self.volume
        if volume is not None:
            volume.release()
        self.volume = None

    def tight(self) -> str:
        """What to say when checkpoints went because the volume is small: once of each volume."""
        volume = self.volume
        if volume is None or volume.is_tight:
            return ""
        volume.is_tight = True
        return "the volume is small for this state, so fewer older checkpoints of it are kept"

    def take(self, fabric: Fabric) -> KernelVolume | None:
        """The volume, taken when it is first asked for. None where none is to be had, and ``trouble`` says why: cells
        run all the same."""
        if self.volume is not None and not self.volume.is_over:
            return self.volume
        self.release_volume()
        self.trouble = ""
        folder = self._environ.get(FOLDER_VARIABLE, "")
        try:
            self.volume = self._in_folder(folder) if folder else self._leased(fabric)
        except SubletError as error:
            self.volume, self.trouble = None, error.message
        return self.volume

    # ---- a folder

    def _in_folder(self, folder: str) -> KernelVolume:
        name = self.name
        if name:
            path = os.path.join(folder, name)
            lock = _locked(path)
            if lock >= 0:
                return KernelVolume(name=name, folder=path, lock=lock)
        own = os.path.join(folder, f"kernel-{os.getpid()}")
        second = KernelVolume(name="", folder=own, lock=_locked(own), other=os.path.join(folder, name) if name else "")
        if name:
            second.message = _second(name, self._last_saved(None, second))
        return second

    # ---- a lease of blocks

    def _leased(self, fabric: Fabric) -> KernelVolume:
        name = self.name
        if not name:
            return self._made(fabric, "")
        return self._of_name(fabric, name) or self._beside(fabric, name)

    def _beside(self, fabric: Fabric, name: str) -> KernelVolume:
        """Of a second kernel: with room for what the first has, if there is any."""
        with contextlib.suppress(CapacityExceeded, NotFound):
            if (size := fabric.volume(name).size) > SIZES[0] and not self.size:
                return self._with_other(fabric, self._made(fabric, "", size=size), name)
        return self._with_other(fabric, self._made(fabric, ""), name)

    def _with_other(self, fabric: Fabric, second: KernelVolume, name: str) -> KernelVolume:
        second.other = name
        second.message = _second(name, self._last_saved(fabric, second))
        return second

    # ---- what another kernel of the name has saved

    def _last_saved(self, fabric: Fabric | None, second: KernelVolume) -> int:
        """When it saved last; 0 if it has not, or that cannot be told now."""
        from sublet.notebook.checkpoint import NotebookCheckpoint

        try:
            with self._read(fabric, second) as source:
                return NotebookCheckpoint(second.store).inspect(source).wall_ns
        except SubletError:
            return 0

    def import_from(
        self, fabric: Fabric, shelf: NotebookCheckpoint, is_bound: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """A copy of what the kernel that has the name left with its last finished cell, into this kernel's volume.
        Names that could not come along."""
        volume = self.volume
        if volume is None or not volume.other:
            return ()
        try:
            with self._read(fabric, volume) as source:
                left = shelf.import_from(source, is_bound)
        except NotFound:  # it has saved nothing, or is gone with what it had
            return ()
        volume.is_empty = False
        volume.committed = shelf.newest
        return left

    @contextlib.contextmanager
    def _read(self, fabric: Fabric | None, volume: KernelVolume) -> Iterator[str]:
        if volume.folder or fabric is None:
            yield volume.other
            return
        from sublet.client.fabric import readable_volume

        with readable_volume(fabric, volume.other) as ticket:
            yield ticket

    def _of_name(self, fabric: Fabric, name: str) -> KernelVolume | None:
        """The volume of this name, found or made; None where another kernel has it."""
        until_s = time.monotonic() + WAIT_S
        while True:
            is_late = time.monotonic() > until_s
            try:
                found = fabric.volume(name)
            except NotFound:
                return self._made(fabric, name)
            try:
                if found.lease is None:
                    return KernelVolume(name=name, lease=_allocated(fabric.block(name=name, **self._terms())))
                if _is_gone(fabric, found.lease):
                    return KernelVolume(name=name, lease=_allocated(fabric.attach(found.lease, renew="always")))
            except (CapacityExceeded, NotFound, LeaseEnded):  # it is being put away, or was in this moment
                if is_late:
                    raise
            else:
                if is_late or not _is_ending(fabric, found.lease):
                    return None
            time.sleep(0.1)

    def _terms(self) -> dict[str, Any]:
        return {"ttl": TTL, "wait": 0, "renew": "always", "labels": self._labels}

    def _made(self, fabric: Fabric, name: str, *, size: int = 0) -> KernelVolume:
        sizes = (size or self.size,) if size or self.size else SIZES
        for size in sizes:
            try:
                lease = _allocated(fabric.block(size, name=name or None, **self._terms()))
            except CapacityExceeded:
                if size == sizes[-1]:
                    raise
            else:
                return KernelVolume(name=name, lease=lease, is_empty=True)
        raise AssertionError


def _allocated(lease: Lease) -> Lease:
    """See that the space is there, and not only promised: the disk may have less than the office lends."""
    try:
        lease.volume_line().lend()
    except BaseException:
        with contextlib.suppress(SubletError):
            lease.release()
        raise
    return lease


def _is_gone(fabric: Fabric, lease: LeaseId) -> bool:
    """Whether who holds it was a process of this machine that is no more: then it is ours to go on with."""
    holder = HOLDER.fullmatch(fabric.lease(lease).holder)
    if holder is None or holder[2] != socket.gethostname():
        return False
    if int(holder[1]) == os.getpid():  # of this very kernel, before it was called otherwise
        return False
    try:
        with open(f"/proc/{holder[1]}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False
    return state in DEAD


def _is_ending(fabric: Fabric, lease: LeaseId) -> bool:
    """Whether its holder has let go of it."""
    view = fabric.lease(lease)
    return view.status in ("ending", "ended") or view.notice is not None


def _locked(path: str) -> int:
    """A lock on a folder, -1 if another process has it. It goes with the process."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(os.path.join(path, "in-use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot hold what is saved: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _second(name: str, saved_ns: int) -> str:
    offer = f"; %gpu restore brings a copy of what that one saved at {clock_time(saved_ns)}" if saved_ns else ""
    return (
        f"another kernel has {name} open, so this one saves for itself and keeps nothing when it ends; %gpu name X "
        f"gives it a name of its own{offer}"
    )


def notebook_path(user_ns: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Where the notebook lies, as VS Code or the Jupyter server tells its kernel; empty if neither does. VS Code goes
    first: on a server it gives every session a name of its own, and no other kernel would find what one has saved."""
    for path in (user_ns.get("__vsc_ipynb_file__"), environ.get("JPY_SESSION_NAME")):
        if isinstance(path, str) and path.endswith(".ipynb"):
            return path if "\\" in path else os.path.realpath(path)  # Windows, at the other end
    return ""


def volume_name(path: str) -> str:
    """Dull, as names of volumes must be, and another one for each path: ``nb-training-3f0c2a91``."""
    stem = re.split(r"[/\\]", path)[-1].removesuffix(".ipynb").lower()
    plain = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:NAME_MAX].strip("-") or "notebook"
    return f"nb-{plain}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}"
