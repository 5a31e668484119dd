"""Leases that the office has, or may have, for this program although nothing in the program holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.values import Epoch, LeaseId, RequestId

if TYPE_CHECKING:
    from sublet.client.held import Held
    from sublet.client.steps import Call
    from sublet.wire.http import AcquireRequest, AcquisitionRequest


class Owed:
    """A lease, or a place in the queue, that must be given back unless it gets a handle.

    It is in ``Book.owed`` from before the request is sent until the handle is handed over, and again from the release
    until the office has confirmed it. An interrupt may come between any two bytecodes, so the fields that say what is
    left to do are plain stores: none of them takes a call, in which an interrupt could come before the store.
    """

    __slots__ = (
        "asked",
        "attaching",
        "busy_s",
        "done",
        "epoch",
        "held",
        "is_held",
        "lease",
        "left",
        "members",
        "release_id",
        "retry_ns",
        "tries",
        "under_way",
        "until_ns",
    )

    def __init__(self, release_id: RequestId) -> None:
        self.release_id = release_id
        """Of the release, the same for every thread and retry."""
        self.asked: tuple[Call, AcquireRequest | AcquisitionRequest] | None = None
        """The request that may have been sent: sent again unchanged, it tells which lease it became."""
        self.members: tuple[Owed, ...] | None = None
        """The leases that a request for many became, each to be given back by itself; None before it is answered."""
        self.attaching: str | None = None
        """The holder that an attach has named, while it is not answered."""
        self.lease: LeaseId | None = None
        self.epoch: Epoch | None = None
        """Of the grant that is meant, where it is known."""
        self.held: Held | None = None
        self.is_held: Callable[[LeaseId, Epoch | None], bool] = _never
        """Whether this program holds a lease under an epoch by another handle."""
        self.busy_s = 0.0
        """How long it was busy without the office having been told."""
        self.left = False
        """The caller has given up: the keeper, ``close()`` or the end of the program gives it back."""
        self.done = False
        """There is nothing at the office any more."""
        self.under_way = False
        """The keeper is at it."""
        self.tries = 0
        self.retry_ns = 0
        self.until_ns: int | None = None
        """After this it has ended by its time to live."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent, so that the office cannot have anything."""
        return self.asked is None and self.lease is None

    @property
    def is_plain(self) -> bool:
        """Whether it is a lease that this program knows to be its own, so that it is released by one message."""
        return self.lease is not None and self.attaching is None


def _never(lease: LeaseId, epoch: Epoch | None) -> bool:
    return False
