"""Orders publications per volume: requests of guests and holders are fenced and done one after another.

A question is compared with what is live when it comes, and again when it is its turn: what waits behind another may
have waited past the end of its lease. What is under way when a lease ends or is attached is finished first (or stopped,
if it takes too long), and until then no later request is served: so a holder of a newer epoch never finds that a
checkpoint of an older one has appeared meanwhile.

The work itself is done in forked jobs, in which tenants take turns, and a tenant's most urgent save is first.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, assert_never

from sublet.errors import (
    CapacityExceeded,
    CheckpointFailed,
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    StaleEpoch,
    SubletError,
    Unauthorized,
)
from sublet.lazy_dataclass import dataclass
from sublet.node.connections import internal_error
from sublet.node.fair_slots import NO_DEADLINE
from sublet.node.forked_jobs import HANDED_FD, ForkedJobs
from sublet.node.loop import Loop, log_internal_error
from sublet.node.processes.lease_runtime import Borrowed, LeaseRuntime
from sublet.node.storage.copying_work import copy_in
from sublet.node.storage.handed_files import list_volume, open_files, publish_and_forget, take_handed
from sublet.node.storage.publish import publish, run_and_encode
from sublet.node.storage.store import StoredFolder, StoreState
from sublet.node.storage.stores import Stores
from sublet.node.storage.stores_work import among_forked_jobs
from sublet.node.storage.volume_folder import VolumeAccess, collect, lay_out, staging_of
from sublet.values import NS_PER_S, Epoch, Kind, LeaseId, TenantId
from sublet.wire.codec import loads
from sublet.wire.frames import close_all
from sublet.wire.orders import Saved
from sublet.wire.refusals import refusal_of
from sublet.wire.volumes import (
    LOCK,
    STAGING,
    Collect,
    CopyIn,
    FilesOpened,
    ListVolume,
    OpenFiles,
    OpenVolume,
    Publish,
    Published,
    VolumeCall,
    VolumeListed,
    VolumeOpened,
    VolumeReply,
)

WAITING_MAX: Final = 64
"""Questions about one volume that wait for their turn."""
STOPPED_AFTER_S: Final = 2.0
"""How long what is under way may go on when its lease is over."""
TICKETS_MAX: Final = 64
"""Of one lease; the oldest is let go. A ticket is used at once."""
SAVE_MAX_NS: Final = 3600 * NS_PER_S
SAVED_KEPT: Final = 4096
"""Leases of which it is remembered what they saved, until the office has heard of their end and beyond."""

Ids = tuple[int, int] | None
AnyCall = VolumeCall | ListVolume | OpenFiles
AnyReply = VolumeReply | VolumeListed | FilesOpened


class Handed(NamedTuple):
    """An answer with descriptors beside it, which are its receiver's to close."""

    reply: FilesOpened
    fds: tuple[int, ...]


Then = Callable[[AnyReply | Handed], None]
Fence = Callable[[LeaseId, Epoch], object]
"""Raises unless this pair is live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LentVolume:
    """A volume that a guest of another lease may save to."""

    lease: LeaseId
    epoch: Epoch
    tenant: TenantId
    reads: bool = False
    """Nothing is saved with it: what is published there may be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """The guest that asks, and its leases."""

    leases: Mapping[LeaseId, Epoch | None]
    """With which epoch of each; None: whichever is live. The first is meant where none is named."""
    ids: Ids = None
    """Whose files guests of this tenant write; None: our own user's."""
    holder: bool = False
    """Whether it is a holder, whose own files are our user's, and not a guest."""
    under: LeaseId | None = None
    """The lease of the guest itself."""
    is_stranger: bool = False
    """A holder that runs as another user than ours: it may not enter our folders."""


@dataclass(slots=True, kw_only=True)
class _Job:
    store: StoredFolder
    asker: Asker
    pair: tuple[LeaseId, Epoch]
    call: AnyCall
    then: Then
    source: Borrowed | None = None
    """What is copied from."""
    handed: tuple[socket.socket, socket.socket] | None = None
    """Through which the forked job sends what it has opened."""

    @property
    def stores(self) -> tuple[StoredFolder, ...]:
        """Which none of may be put away meanwhile."""
        return (self.store,) if self.source is None else (self.store, _store(self.source.tenancy))


@dataclass(slots=True, kw_only=True)
class _Running:
    key: object
    stores: tuple[StoredFolder, ...]


class Publishing:
    """All of one supervisor."""

    def __init__(
        self,
        *,
        loop: Loop,
        forked_jobs: ForkedJobs,
        stores: Stores,
        tenancies: Mapping[LeaseId, LeaseRuntime],
        fence: Fence,
        on_saved: Callable[[LeaseId, int], None],
    ) -> None:
        """``fence`` raises unless a lease lives under an epoch. ``on_saved`` is called with each lease for which
        something was saved, and how long that took."""
        self._fence = fence
        self.saved: dict[LeaseId, Saved] = {}
        """What was published for each lease: the volume's own, and that of the guest which saved."""
        self._loop = loop.guarded(lambda _: None)
        self._forked_jobs = forked_jobs
        self._stores = stores
        self._tenancies = tenancies
        self._on_saved = on_saved
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: dict[str, _Running] = {}
        self._tickets: dict[LeaseId, dict[str, LentVolume]] = {}

    # ---- lending ----

    def lend(self, lent: LentVolume) -> str:
        """A ticket that stands for this right."""
        self._fence(lent.lease, lent.epoch)
        self._block_of(lent.lease)
        ticket = os.urandom(16).hex()
        mine = self._tickets.setdefault(lent.lease, {})
        mine[ticket] = lent
        while len(mine) > TICKETS_MAX:
            del mine[next(iter(mine))]
        return ticket

    def borrowed(self, ticket: str, tenant: TenantId, *, reads: bool = False) -> Borrowed:
        """What the ticket stands for; ``reads``: one that is only for reading will do. Raises if that is over, or
        another tenant's."""
        lent = next((mine[ticket] for mine in self._tickets.values() if ticket in mine), None)
        if lent is None or lent.tenant != tenant or (lent.reads and not reads):
            raise Unauthorized("this volume was not lent", do="Give the lease of blocks itself as volume=.")
        (self._still_read if reads else self._fence)(lent.lease, lent.epoch)
        return Borrowed(self._block_of(lent.lease), lent.epoch)

    def _still_read(self, lease: LeaseId, epoch: Epoch) -> None:
        """The asker that copies holds another lease, so the advice of the fence would not apply to it."""
        try:
            self._fence(lease, epoch)
        except (LeaseEnded, StaleEpoch) as error:
            error.message = f"the volume changed hands while it was copied: {error.message}"
            error.do = "Nothing of it was changed. Copy it again."
            raise

    # ---- asking ----

    def ask(self, asker: Asker, call: AnyCall, then: Then) -> None:
        """``then`` is told the answer, at once or later, and never twice."""
        try:
            self._ask(asker, call, then)
        except SubletError as error:
            then(refusal_of(error))
        except Exception as error:  # noqa: BLE001 - what one guest asks must not be able to end the others
            log_internal_error(error)
            then(refusal_of(internal_error()))

    def _ask(self, asker: Asker, call: AnyCall, then: Then) -> None:
        if isinstance(call, ListVolume | OpenFiles) and not asker.is_stranger:
            raise InvalidRequest("files are opened for other users only", do="Open them in the volume's folder.")
        pair = self._pair(asker, call)
        self._check(asker, pair)
        tenancy = self._block_of(pair[0])
        source = self.borrowed(call.volume, tenancy.tenant, reads=True) if isinstance(call, CopyIn) else None
        if source is not None and source.tenancy is tenancy:
            raise InvalidRequest("a volume is not copied into itself", do="Name another one.")

        def on_open(error: SubletError | None) -> None:
            try:
                if error is not None:
                    raise error
                job = _Job(store=_store(tenancy), asker=asker, pair=pair, call=call, then=then, source=source)
                self._queue(job)
            except SubletError as refused:
                then(refusal_of(refused))

        def on_own_open(error: SubletError | None) -> None:
            try:
                if error is not None or source is None or not self._stores.open(source.tenancy, asker.ids, on_open):
                    on_open(error)
            except SubletError as refused:
                then(refusal_of(refused))

        if not self._stores.open(tenancy, asker.ids, on_own_open):
            on_own_open(None)

    def _pair(self, asker: Asker, call: AnyCall) -> tuple[LeaseId, Epoch]:
        lease, epoch = LeaseId(call.lease), call.epoch
        if not lease:
            lease = next((one for one in asker.leases if self._has_block(one)), LeaseId(""))
            if not lease:
                raise NotFound(
                    "there is no volume here", do="Start the program under a lease of blocks, or with volume=."
                )
            epoch = asker.leases[lease]
        tenancy = self._tenancies.get(lease)
        if epoch is None:
            if tenancy is None:
                raise LeaseNotActive(f"lease {lease} is over")
            epoch = tenancy.epoch
        return lease, epoch

    def _check(self, asker: Asker, pair: tuple[LeaseId, Epoch]) -> None:
        lease, epoch = pair
        if lease not in asker.leases:
            raise Unauthorized(f"nothing may be saved here under lease {lease}", do="Start it with volume=.")
        self._fence(lease, epoch)
        mine = asker.leases[lease]
        if mine is not None and mine != epoch:
            raise StaleEpoch(f"the volume was lent under epoch {mine}, and not under {epoch}")

    def _has_block(self, lease: LeaseId) -> bool:
        tenancy = self._tenancies.get(lease)
        return tenancy is not None and any(part.kind is Kind.BLOCK for part in tenancy.parts)

    def _block_of(self, lease: LeaseId) -> LeaseRuntime:
        if not self._has_block(lease):
            raise InvalidRequest(f"lease {lease} has no blocks to save in", do='Ask for `fabric.block("2GiB")`.')
        return self._tenancies[lease]

    # ---- one after the other ----

    def _queue(self, job: _Job) -> None:
        waiting = self._waiting.setdefault(job.store.folder, deque())
        if len(waiting) >= WAITING_MAX:
            raise CapacityExceeded(f"the volume's request queue is full ({WAITING_MAX})", do="Try again later.")
        waiting.append(job)
        self._next(job.store.folder)

    def _next(self, folder: str) -> None:
        while folder not in self._running and self._waiting.get(folder):
            job = self._waiting[folder].popleft()
            try:
                self._check(job.asker, job.pair)
                if job.source is not None:
                    self._still_read(job.source.tenancy.lease, job.source.epoch)
                for store in job.stores:
                    if store.state is not StoreState.THERE:
                        raise LeaseNotActive(f"the volume of lease {store.note.lease} is being put away")
                self._begin(job)
            except SubletError as error:
                job.then(refusal_of(error))
            except Exception as error:  # noqa: BLE001 - and those behind it come next
                log_internal_error(error)
                job.then(refusal_of(internal_error()))
        if not self._waiting.get(folder):
            self._waiting.pop(folder, None)

    def _begin(self, job: _Job) -> None:
        work, stores = self._work(job), job.stores
        lock = self._stores.lock

        def run_among_forked_jobs() -> str:
            with among_forked_jobs(lock, after_others=False):
                return run_and_encode(work)

        began_ns = self._loop.now_ns()
        keep = -1
        if isinstance(job.call, OpenFiles):
            job.handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            keep = job.handed[1].fileno()
        key = self._forked_jobs.run(
            run_among_forked_jobs,
            lambda reply: self._done(job, reply, self._loop.now_ns() - began_ns),
            tenant=job.store.note.tenant,
            by_ns=self._due_ns(job),
            keep=keep,
        )
        for store in stores:
            store.at_work += 1
        self._running[job.store.folder] = _Running(key=key, stores=stores)

    def _due_ns(self, job: _Job) -> int:
        """When the first of its leases ends or is taken: that of the volume, or of the guest that saves."""
        due = [NO_DEADLINE]
        for lease in (job.pair[0], job.asker.under):
            tenancy = None if lease is None else self._tenancies.get(lease)
            if tenancy is not None:
                due.append(tenancy.deadline_ns)
                if tenancy.notice is not None and tenancy.notice.take_at_ns is not None:
                    due.append(tenancy.notice.take_at_ns)
        return min(due)

    def _work(self, job: _Job) -> Callable[[], object]:
        call, place = job.call, self._place(job)
        match call:
            case OpenVolume():
                opened = self._opened(job, place)
                return lambda: lay_out(place, opened)
            case Publish():
                done = publish_and_forget if job.asker.is_stranger else publish
                return lambda: done(place, call)
            case Collect():
                return lambda: collect(place, call)
            case ListVolume():
                return lambda: list_volume(place, call)
            case OpenFiles():
                epoch = job.pair[1]
                return lambda: open_files(place, call, epoch, HANDED_FD)
            case CopyIn():
                folder = job.stores[-1].made.paths[0]
                return lambda: copy_in(place, folder, call)
            case _:
                assert_never(call)

    def _place(self, job: _Job) -> VolumeAccess:
        store, ids = job.store, job.asker.ids
        apart = job.asker.holder and ids is not None
        owner = (os.geteuid(), os.getegid()) if ids is None or apart else ids
        return VolumeAccess(
            folder=store.made.paths[0],
            lock=os.path.join(store.folder, LOCK),
            size=store.note.parts[0].amount,
            counted=bool(store.made.counted),
            owner=owner[0],
            group=owner[1],
            apart=apart,
        )

    def _opened(self, job: _Job, place: VolumeAccess) -> VolumeOpened:
        lease, epoch = job.pair
        own = staging_of(epoch, apart=place.apart)
        return VolumeOpened(
            lease=lease,
            epoch=epoch,
            name=job.store.note.name,
            folder=place.folder,
            staging=os.path.join(place.folder, STAGING, own),
            size=place.size,
            counted=place.counted,
            by_descriptor=job.asker.is_stranger,
        )

    def _done(self, job: _Job, reply: str | None, took_ns: int) -> None:
        stores = self._running.pop(job.store.folder).stores
        for store in stores:
            store.at_work -= 1
        try:
            answer = self._answer(job, reply, took_ns)
            fds = self._handed(job)
            if isinstance(answer, FilesOpened) and len(fds) == len(answer.names):
                job.then(Handed(answer, fds))
            else:
                close_all(fds)
                job.then(refusal_of(internal_error()) if isinstance(answer, FilesOpened) else answer)
        finally:
            for store in stores:
                self._stores.on_idle(store)
            self._next(job.store.folder)

    @staticmethod
    def _handed(job: _Job) -> tuple[int, ...]:
        """What the forked job has opened."""
        if job.handed is None:
            return ()
        mine, its = job.handed
        its.close()
        fds = take_handed(mine)
        mine.close()
        return fds

    def _answer(self, job: _Job, reply: str | None, took_ns: int) -> AnyReply:
        if reply is None:
            failed = Disconnected("what was asked of the volume was cut off, and may have been done", sent=True)
            return refusal_of(failed if isinstance(job.call, Publish) else CheckpointFailed(failed.message))
        answer: AnyReply = loads(AnyReply, reply.encode("utf-8", "surrogateescape"))
        if isinstance(answer, Published) and isinstance(job.call, Publish):
            self._was_saved(job, answer, min(SAVE_MAX_NS, max(0, job.call.save_ns)) + took_ns)
        return answer

    def _was_saved(self, job: _Job, done: Published, save_ns: int) -> None:
        """For the lease of the volume, and for that of the guest: the one that is taken is told what was saved."""
        for lease in dict.fromkeys((job.pair[0], job.asker.under)):
            if lease is None:
                continue
            before = self.saved.pop(lease, None)
            now = Saved(version=done.number, wall_ns=done.wall_ns, size=done.size, volume=job.store.note.name)
            if before is not None:
                now = replace(now, size=before.size + done.size, count=before.count + 1)
            self.saved[lease] = now
            self._on_saved(lease, save_ns)
        while len(self.saved) > SAVED_KEPT:
            del self.saved[next(iter(self.saved))]

    # ---- the end ----

    def lease_ended(self, store: StoredFolder) -> None:
        """Its lease is over. What waits is refused, what is under way has a moment to come to its end."""
        self._tickets.pop(store.note.lease, None)
        for running in self._running.values():
            if store in running.stores:
                self._loop.after(STOPPED_AFTER_S, lambda key=running.key: self._forked_jobs.stop(key))  # type: ignore[misc]
        for job in self._waiting.pop(store.folder, ()):
            job.then(refusal_of(LeaseNotActive(f"lease {job.pair[0]} is over")))


def _store(tenancy: LeaseRuntime) -> StoredFolder:
    found = next((one for one in tenancy.stores if one.note.kind is Kind.BLOCK), None)
    if found is None or not found.made.paths:
        raise LeaseNotActive(f"the volume of lease {tenancy.lease} is gone")
    return found
