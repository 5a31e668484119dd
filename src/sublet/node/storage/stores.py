"""Disk and memory of leases on this machine: a folder per block lease, a segment per memory lease.

They are made when the first guest of the lease starts, which waits for them, and taken away when the lease is over,
which is verified. Both are done by forked jobs; here it is known how far each has come.

Folders of blocks lie in the state folder: ``blocks/leases/<hash>``, and with a name, which is kept when its lease ends,
``blocks/named/<tenant>/<name>``. Segments lie in the runtime folder, ``memory/<hash>``. It is a keyed hash of lease and
epoch: root mounts file systems there, and every user can read where. The note in the folder says whose it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from sublet.errors import CapacityExceeded, InvalidRequest, SubletError
from sublet.lease.hardware import Leftover
from sublet.node.fair_slots import AWAITED
from sublet.node.forked_jobs import ForkedJobs
from sublet.node.keyed_names import keyed_names
from sublet.node.loop import Loop
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.storage.store import FolderCount, StoredFolder, StoreState
from sublet.node.storage.stores_work import (
    KEPT,
    NOTE,
    REMOVING,
    Made,
    StoreNote,
    among_forked_jobs,
    make_blocks,
    make_memory,
    put_away,
    read_note,
    why_no_image,
)
from sublet.values import MIB, Epoch, Kind, LeaseId, ResourceId, TenantId, valid_name
from sublet.wire.codec import dumps, loads
from sublet.wire.orders import StoredVolume, VolumeRef

COUNTED_AT_ONCE: Final = 1000
COUNTED_MIN: Final = 20
"""Names that are looked at in one turn, of all leases together, and of one at least: 1000 take a few milliseconds."""
AGAIN_NS: Final = (50_000_000, 200_000_000, 1_000_000_000)
"""Between one attempt to put a store away and the next."""
FORCED_AFTER: Final = 3
"""Attempts after which what is not kept goes although a process has a file of it open. Until then guests that borrowed
it have been ended, and processes that were about to end have ended."""
_SHORTAGES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
_NOBODY: Final = TenantId("nobody")

Ids = tuple[int, int] | None
Then = Callable[[SubletError | None], None]
"""Told once the stores of a lease are there, or why they are not."""


class Stores:
    """All of one supervisor."""

    def __init__(
        self,
        *,
        loop: Loop,
        forked_jobs: ForkedJobs,
        state: str,
        runtime: str,
        on_gone: Callable[[LeaseId], None],
        on_leave: Callable[[StoredFolder], None],
        on_stuck: Callable[[StoredFolder], None],
    ) -> None:
        """``on_leave`` is told when a store is about to be put away, ``on_stuck`` when it could not be, because a
        process still uses it, and ``on_gone`` when one of this lease was."""
        self._on_gone = on_gone
        self._on_leave = on_leave
        self._on_stuck = on_stuck
        self._loop = loop.guarded(lambda _: None)
        self._forked_jobs = forked_jobs
        self.blocks: Final = os.path.join(state, "blocks")
        self.memory: Final = os.path.join(runtime, "memory")
        self.lock: Final = os.path.join(self.blocks, "lock")
        self._hash = keyed_names()
        self._all: list[StoredFolder] = list(self._found())

    # ---- making ----

    def open(self, tenancy: LeaseRuntime, ids: Ids, then: Then) -> bool:
        """Make the stores of this lease; ``then`` is told when they are there. False: they are there now (or there are
        none to make), and ``then`` is not called. Raises for what can be said at once."""
        if not tenancy.has_stores:
            tenancy.stores = self._begun(tenancy)
            tenancy.has_stores = True
            for store in tenancy.stores:
                self._make(store, ids)
        stores = tenancy.stores
        if all(store.is_made for store in stores):
            self._check(tenancy, stores)
            return False
        self._wait(tenancy, stores, then)
        return True

    def _wait(self, tenancy: LeaseRuntime, stores: list[StoredFolder], then: Then) -> None:
        is_answered = False

        def answer_when_made() -> None:
            nonlocal is_answered
            if is_answered or not all(store.is_made for store in stores):
                return
            is_answered = True
            try:
                self._check(tenancy, stores)
            except SubletError as error:
                then(error)
            else:
                then(None)

        for store in stores:
            store.waiting.append(answer_when_made)

    def _check(self, tenancy: LeaseRuntime, stores: list[StoredFolder]) -> None:
        """Whether all is there; if it is, guests learn of it. What was refused may be asked for again."""
        refused = next((store for store in stores if store.made.refused), None)
        if refused is not None:
            if tenancy.stores is stores:
                self.leave(tenancy)
                tenancy.has_stores = False
            raise CapacityExceeded(refused.made.refused, do="Make room, or ask for another size or name.")
        block = next((store for store in stores if store.note.kind is Kind.BLOCK), None)
        memory = next((store for store in stores if store.note.kind is Kind.MEMORY), None)
        tenancy.blocks = block.made.paths if block is not None else ()
        tenancy.segment = memory.made.paths[0] if memory is not None and memory.made.paths else ""
        tenancy.writable = (
            *tenancy.blocks,
            *((os.path.dirname(tenancy.segment),) if memory is not None and memory.segment < 0 else ()),
        )

    def _begun(self, tenancy: LeaseRuntime) -> list[StoredFolder]:
        found = []
        name = self._hash(f"{tenancy.lease}.{tenancy.epoch}")
        for kind, base in ((Kind.BLOCK, os.path.join(self.blocks, "leases")), (Kind.MEMORY, self.memory)):
            parts = tuple(part for part in tenancy.parts if part.kind is kind)
            if parts:
                folder, called = os.path.join(base, name), ""
                if kind is Kind.BLOCK and tenancy.name:
                    folder, called = self._named(tenancy.tenant, tenancy.name), tenancy.name
                note = StoreNote(
                    lease=tenancy.lease, epoch=tenancy.epoch, tenant=tenancy.tenant, parts=parts, name=called
                )
                found.append(StoredFolder(folder, note, StoreState.MAKING))
        for store in found:
            self._check_free(store)
        self._all += found
        return found

    def _named(self, tenant: TenantId, name: str) -> str:
        folder = os.path.join(self.blocks, "named", valid_name(tenant, "tenant"))
        return os.path.join(folder, valid_name(name, "name"))

    def _check_free(self, store: StoredFolder) -> None:
        other = next(
            (one for one in self._all if one.folder == store.folder and one.state is not StoreState.GONE), None
        )
        if other is not None and other.state is StoreState.LEAVING:
            raise CapacityExceeded(
                "what this lease, or one of the same name, had on disk is still being put away",
                do="Try again in a moment.",
            )
        if other is not None:
            raise InvalidRequest(
                f"the folder named {store.note.name} is used by lease {other.note.lease}",
                do="Choose another name, or wait until that lease is over.",
            )

    def _make(self, store: StoredFolder, ids: Ids) -> None:
        if store.note.kind is Kind.MEMORY and (ids is None or os.geteuid() != 0):
            self._hold_segment(store)  # for a user who can see this process's descriptors: no mount, no forked job
        elif store.note.kind is Kind.BLOCK and why_no_image() and not store.is_named:
            try:
                store.made = make_blocks(store.folder, store.note, ids)  # a plain folder is made in no time
            except OSError as error:
                store.made = Made(refused=f"the folder of the lease could not be made: {error.strerror or error}")
            self._is_made(store)
        else:
            work = make_memory if store.note.kind is Kind.MEMORY else make_blocks
            store.has_job = True

            def make() -> str:
                with among_forked_jobs(self.lock, after_others=False):
                    return dumps(work(store.folder, store.note, ids)).decode("utf-8", "surrogateescape")

            self._forked_jobs.run(
                make, lambda reply: self._was_made(store, reply), tenant=store.note.tenant, by_ns=AWAITED
            )

    def _was_made(self, store: StoredFolder, reply: str | None) -> None:
        store.has_job = False
        if reply is None:
            store.made = Made(refused=f"the folder of the lease could not be made: {self._forked_jobs.why_failed}")
        else:
            store.made = loads(Made, reply.encode("utf-8", "surrogateescape"))
        if store.note.kind is Kind.MEMORY and store.made.counted:
            self._hold_segment(store)
        else:
            self._is_made(store)

    def _hold_segment(self, store: StoredFolder) -> None:
        """A file in memory that can be neither longer nor shorter, and goes with this process."""
        try:
            store.segment = make_segment(sum(part.amount for part in store.note.parts))
        except OSError as error:
            store.made = Made(refused=f"a segment of memory could not be made: {error.strerror}")
        else:
            store.made = Made(paths=(segment_path(store.segment),))
        self._is_made(store)

    def _is_made(self, store: StoredFolder) -> None:
        store.is_made = True
        if store.state is StoreState.MAKING:
            store.state = StoreState.REFUSED if store.made.refused else StoreState.THERE
        waiting, store.waiting = store.waiting, []
        for call in waiting:
            call()
        if store.state is StoreState.LEAVING:  # the lease ended meanwhile
            self._put_away(store)

    # ---- taking away ----

    def leave(self, tenancy: LeaseRuntime) -> None:
        """The lease is over and no guest uses its stores any more: they go, soon."""
        for store in tenancy.stores:
            if store.state not in (StoreState.LEAVING, StoreState.GONE):
                store.state = StoreState.LEAVING
                store.note = replace(store.note, epoch=tenancy.epoch)
                self._on_leave(store)
                self._put_away(store)

    def on_idle(self, store: StoredFolder) -> None:
        """No forked job is at work in it any more."""
        if store.state is StoreState.LEAVING:
            self._put_away(store)

    def remaining(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> str:
        """What of the lease is still on this resource, in words; empty if nothing. Each question may be an attempt."""
        now_ns = self._loop.now_ns()
        for store in tuple(self._all):
            if store.note.lease != lease or store.note.epoch > epoch or not store.covers(resource):
                continue
            if store.state is StoreState.LEAVING:
                if not store.has_job and now_ns >= store.again_ns:
                    self._put_away(store)
                if store.state is StoreState.LEAVING:
                    return store.why or f"{store.folder} is being {'put away' if store.is_named else 'removed'}"
        return ""

    def leftovers(self) -> list[Leftover]:
        """What a predecessor had, on which resources."""
        return [
            Leftover(lease=store.note.lease, epoch=store.note.epoch, part=part)
            for store in self._all
            if store.state is StoreState.LEAVING
            for part in store.note.parts
        ]

    def measure(self) -> list[tuple[LeaseId, str]]:
        """Where sizes are only counted, count on; what there is to say to the guests of which lease."""
        counted = [store for store in self._all if store.state is StoreState.THERE and store.made.counted]
        found = []
        for store in counted:
            for number, part in enumerate(store.note.parts[: len(store.made.paths)]):
                count = store.counts.setdefault(number, FolderCount(store.made.paths[number], part.amount))
                line = count.step(max(COUNTED_MIN, COUNTED_AT_ONCE // len(counted)))
                if line:
                    found.append((store.note.lease, line))
        return found

    def begin(self) -> None:
        """Put away what a predecessor left. To be called once its guests were ended."""
        for store in tuple(self._all):
            if store.state is StoreState.LEAVING:
                self._put_away(store)

    def close(self) -> None:
        """This process ends, so now it may wait: whatever is still there is put away."""
        self._forked_jobs.close()
        for store in self._all:
            if store.segment >= 0:
                os.close(store.segment)
            with contextlib.suppress(OSError):
                put_away(store.folder, keep=store.is_named)
        for folder in (os.path.join(self.blocks, "leases"), self.memory):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def _put_away(self, store: StoredFolder) -> None:
        if store.has_job:
            return
        if store.at_work:
            store.why = "a checkpoint is just being published in it, or read"
            return
        if store.segment >= 0:
            self._let_go_of_segment(store)
            return
        store.has_job = True

        def away() -> str:
            with among_forked_jobs(self.lock, after_others=store.is_left):
                note = None if store.is_left else store.note
                return put_away(store.folder, keep=store.is_named, note=note, forced=store.tries >= FORCED_AFTER)

        self._forked_jobs.run(away, lambda reply: self._was_put_away(store, reply), tenant=store.note.tenant)

    def _let_go_of_segment(self, store: StoredFolder) -> None:
        """Not while another process has it. To free a large one takes long, so a forked job does that."""
        if is_segment_used(store.segment):
            self._was_put_away(store, "the segment of the lease is in use still")
        elif segment_bytes(store.segment) > IN_PASSING_MAX:
            store.has_job = True
            path = segment_path(store.segment)
            self._forked_jobs.run(
                lambda: empty(path), lambda reply: self._was_put_away(store, reply), tenant=store.note.tenant
            )
        else:
            self._was_put_away(store, "")

    def _was_put_away(self, store: StoredFolder, reply: str | None) -> None:
        store.has_job = False
        if reply == "":
            if store.segment >= 0:
                os.close(store.segment)
                store.segment = -1
            store.state = StoreState.GONE
            self._all.remove(store)
            self._loop.soon(lambda: self._on_gone(store.note.lease))  # not while the caller is still at work
            return
        store.why = reply or f"{store.folder} could not be removed: {self._forked_jobs.why_failed}"
        store.again_ns = self._loop.now_ns() + AGAIN_NS[min(store.tries, len(AGAIN_NS) - 1)]
        store.tries += 1
        self._on_stuck(store)

    # ---- volumes ----

    def volumes(self) -> list[StoredVolume]:
        """The volumes that are kept under a name, and that no lease has now."""
        found, named = [], os.path.join(self.blocks, "named")
        for tenant in _names(named):
            for name in _names(os.path.join(named, tenant)):
                ref = VolumeRef(tenant=TenantId(tenant), name=name)
                note = _read(os.path.join(named, tenant, name), KEPT)
                if note is not None and note.parts and self._of_volume(ref) is None:
                    part = note.parts[0]
                    where, size = part.resource, part.amount
                    found.append(
                        StoredVolume(volume=ref, resource=where, size=size, lease=note.lease, epoch=note.epoch)
                    )
        return found

    def volume_epoch(self, volume: VolumeRef) -> Epoch | None:
        """The epoch of the lease that had, or has, the volume of this name; None if there is none."""
        store = self._of_volume(volume)
        if store is not None:
            return store.note.epoch
        folder = self._named(volume.tenant, volume.name)
        note = _read(folder, KEPT)
        return note.epoch if note is not None else Epoch(0, 0) if os.path.lexists(folder) else None

    def remove_volume(self, volume: VolumeRef, epoch: Epoch) -> None:
        """It goes, if no lease has it and none had it under a newer epoch. ``volume_epoch`` says when it is gone."""
        was = self.volume_epoch(volume)
        if was is None or was > epoch or self._of_volume(volume) is not None:
            return
        folder = self._named(volume.tenant, volume.name)
        note = _read(folder, KEPT) or StoreNote(lease=LeaseId(""), epoch=was, tenant=volume.tenant, parts=())
        store = StoredFolder(folder, replace(note, name=""), StoreState.LEAVING)
        store.tries = FORCED_AFTER  # no lease has it, so no process is waited for
        self._all.append(store)
        self._put_away(store)

    def _of_volume(self, volume: VolumeRef) -> StoredFolder | None:
        folder = self._named(volume.tenant, volume.name)
        gone = (StoreState.GONE, StoreState.REFUSED)
        return next((one for one in self._all if one.folder == folder and one.state not in gone), None)

    # ---- what a predecessor left ----

    def _found(self) -> Iterator[StoredFolder]:
        for base in (os.path.join(self.blocks, "leases"), self.memory):
            for name in _names(base):
                folder = os.path.join(base, name)
                note = _read(folder) or StoreNote(lease=LeaseId(""), epoch=Epoch(0, 0), tenant=_NOBODY, parts=())
                yield StoredFolder(folder, note, StoreState.LEAVING)
        named = os.path.join(self.blocks, "named")
        for tenant in _names(named):
            for name in _names(os.path.join(named, tenant)):
                folder = os.path.join(named, tenant, name)
                if (going := _read(folder, REMOVING)) is not None:
                    yield StoredFolder(folder, replace(going, name=""), StoreState.LEAVING)
                elif not os.path.exists(os.path.join(folder, KEPT)):
                    begun = StoreNote(lease=LeaseId(""), epoch=Epoch(0, 0), tenant=_NOBODY, parts=(), name=name)
                    yield StoredFolder(folder, _read(folder) or begun, StoreState.LEAVING)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(folder: str, name: str = NOTE) -> StoreNote | None:
    """None if there is none that can be read. That there are no descriptors left says nothing of it, and is raised."""
    try:
        return read_note(folder, name)
    except (OSError, SubletError) as error:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            raise
        return None


# -------------------------------------------------------------------------------------------------------------- segment
#
# A shared memory segment: a file without a name, sealed at its size, freed with its last descriptor.
#
# To make or to remove one takes no mount and no process. Whether another process still has it open or mapped, the
# kernel tells: it grants a write lease on a file only while no other has it open.


IN_PASSING_MAX: Final = 64 * MIB
"""Bytes that are freed while the whole loop waits: some milliseconds."""
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_BLOCK: Final = 512


def make_segment(size: int) -> int:
    """A descriptor of a new one."""
    made = os.memfd_create("sublet-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, size)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_CLOEXEC)  # one that the kernel counts as a user
    finally:
        os.close(made)


def segment_path(fd: int) -> str:
    """Where others of our user open it."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def segment_bytes(fd: int) -> int:
    """Bytes of memory that it has taken."""
    return os.fstat(fd).st_blocks * _BLOCK


def is_segment_used(fd: int) -> bool:
    """Whether another process has it open or mapped."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:  # no such leases here: then its users are known by their processes alone
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def empty(path: str) -> str:
    """Give back what it has taken. The work of a forked job, which says nothing in the end."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
    finally:
        os.close(fd)
    return ""
