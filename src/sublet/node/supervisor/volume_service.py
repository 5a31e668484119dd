"""The supervisor's volumes: which guests may save where, over which connection, and what blocks their end.

A guest may save to the blocks of its own lease, and to those it was lent at its start; a holder to those of the lease
that its connection is of. The end of a lease ends that right. It ends no guest of another lease, unless that keeps the
volume from being put away: then each guest that still uses it is ended, like every guest whose lease is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from sublet.errors import InvalidRequest, Unauthorized
from sublet.lease_end import EndReason
from sublet.node.forked_jobs import ForkedJobs
from sublet.node.loop import Loop
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.launch import GuestLauncher
from sublet.node.processes.lease_runtime import Borrowed, LeaseRuntime
from sublet.node.processes.tree import Trees
from sublet.node.storage.publish_door import PublishDoor
from sublet.node.storage.publish_queue import AnyCall, AnyReply, Asker, Fence, Handed, LentVolume, Publishing
from sublet.node.storage.store import StoredFolder
from sublet.values import Epoch, LeaseId
from sublet.wire.guests import Front, Profile
from sublet.wire.sockets import PeerProcess

PUBLICATION_S: Final = 600.0
"""What takes longer is a disk that hangs."""
WRITE: Final = "write"
READ: Final = "read"


class VolumeService:
    """All of it, for ``Supervisor``."""

    def __init__(
        self,
        *,
        loop: Loop,
        launch: GuestLauncher,
        guests: GuestTable,
        trees: Trees,
        tenancies: Mapping[LeaseId, LeaseRuntime],
        runtime: str,
        fence: Fence,
        on_saved: Callable[[LeaseId, int], None],
    ) -> None:
        """``fence`` raises unless a lease lives under an epoch. ``on_saved`` is told how long a save took, for the
        notice before the deadline of a lease."""
        self._launch = launch
        self._guests = guests
        self._trees = trees
        self._tenancies = tenancies
        self._loop = loop.guarded(lambda _: None)
        self._forked_jobs = ForkedJobs(loop, launch.helper_lives, longest_s=PUBLICATION_S)
        self.publishing: Final = Publishing(
            loop=loop,
            forked_jobs=self._forked_jobs,
            stores=launch.stores,
            tenancies=tenancies,
            fence=fence,
            on_saved=on_saved,
        )
        self._door = PublishDoor(loop, runtime, self.publishing, who=self._guest_of, asker=self._of_guest)

    def open_door(self) -> str:
        """Where guests ask for publication; opened with the first that may."""
        return self._door.open()

    def close(self) -> None:
        """The supervisor ends."""
        self._door.close()
        self._forked_jobs.close()

    def of_holder(self, front: Front, uid: int, call: AnyCall, then: Callable[[AnyReply | Handed], None]) -> None:
        """A holder asks, whose process is this user's."""
        lease, epoch = self._pair(front)
        is_stranger = uid not in (0, os.geteuid())
        ids = self._ids(front.profile, lease)
        asker = Asker(leases={lease: epoch}, ids=ids, holder=True, is_stranger=is_stranger)
        self.publishing.ask(asker, call, then)

    def lend(self, front: Front, *, reads: bool) -> str:
        """A ticket for the volume of this connection; ``reads``: to read what is published there, and no more."""
        lease, epoch = self._pair(front, READ if reads else WRITE)
        return self.publishing.lend(LentVolume(lease=lease, epoch=epoch, tenant=front.tenant, reads=reads))

    def borrowed(self, front: Front, ticket: str) -> Borrowed | None:
        """What the ticket stands for; None without one."""
        return self.publishing.borrowed(ticket, front.tenant) if ticket else None

    def _pair(self, front: Front, operation: str = WRITE) -> tuple[LeaseId, Epoch]:
        if front.lease is None or front.epoch is None:
            raise InvalidRequest("this connection is not of a lease", do="Connect with the lease's capability token.")
        if not front.operator and operation not in front.operations:
            raise Unauthorized(f"this connection may not {operation}", do="Ask for a token that allows it.")
        return front.lease, front.epoch

    def _ids(self, profile: Profile, lease: LeaseId) -> tuple[int, int] | None:
        tenancy = self._tenancies.get(lease)
        if profile is not Profile.TENANT or tenancy is None:
            return None
        return self._launch.walls.ids(tenancy.tenant)

    def _guest_of(self, peer: PeerProcess) -> GuestProcess | None:
        found = self._trees.guest_of(peer.pid, peer.uid)
        return None if found is None else self._guests.by_id.get(found)

    def _of_guest(self, guest: GuestProcess) -> Asker:
        return Asker(
            leases={**guest.volumes, guest.lease: None},
            ids=self._ids(guest.profile, guest.lease),
            under=guest.lease,
        )

    def on_stuck(self, store: StoredFolder) -> None:
        """A store could not be put away. Guests of its own lease are gone by now; a borrower may be in the way."""
        tenancy = self._tenancies.get(store.note.lease)
        reason = tenancy.over if tenancy is not None and tenancy.over is not None else EndReason.RELEASED
        users = [guest for guest in self._guests.of(None) if store.note.lease in guest.volumes]
        for guest in users:
            guest.stdio.write_notice("the lease of the volume that this command uses is over, so it is ended")
        self._guests.kill(users, reason)
