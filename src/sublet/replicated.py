"""State on several replicas, for writers whose leases end.

::

    from sublet.replicated import FolderReplica, ReplicatedCheckpoint

    replicas = [FolderReplica(f"/disk{n}/replica") for n in (1, 2, 3)]
    checkpoints = ReplicatedCheckpoint("training", schema="weights.v1", replicas=replicas, epoch=lease.epoch)
    checkpoints.save_bytes("job-7", data, expected=0)

Everything stands on one register: compare-and-swap on a quorum (pure), carried out by ``ReplicaGroup`` on
replicas in folders, in an object store or in memory. docs/replicated.md says what is promised and draws the bytes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.state.replicated.checkpoint import Checkpoint, ReplicatedCheckpoint
    from sublet.state.replicated.checkpoint_record import Effect, Save
    from sublet.state.replicated.folder import FolderReplica
    from sublet.state.replicated.group import ReplicaGroup, ReplicaRole, ReplicaView
    from sublet.state.replicated.idempotency import ReplicatedIdempotencyStore
    from sublet.state.replicated.idempotency_record import Completed, Conflict, New, Pending, Reservation
    from sublet.state.replicated.memory import MemoryReplica
    from sublet.state.replicated.policy import Placement, ReplicaPolicy
    from sublet.state.replicated.replica import FailureDomain, Replica, ReplicaHealth
    from sublet.state.replicated.s3 import S3Replica
    from sublet.state.replicated.signing import SigningKey

__all__ = [
    "Checkpoint",
    "Completed",
    "Conflict",
    "Effect",
    "FailureDomain",
    "FolderReplica",
    "MemoryReplica",
    "New",
    "Pending",
    "Placement",
    "Replica",
    "ReplicaGroup",
    "ReplicaHealth",
    "ReplicaPolicy",
    "ReplicaRole",
    "ReplicaView",
    "ReplicatedCheckpoint",
    "ReplicatedIdempotencyStore",
    "Reservation",
    "S3Replica",
    "Save",
    "SigningKey",
]

_LAZY: Final[dict[str, str]] = {
    **dict.fromkeys(("Checkpoint", "ReplicatedCheckpoint"), "checkpoint"),
    **dict.fromkeys(("Effect", "Save"), "checkpoint_record"),
    "FolderReplica": "folder",
    **dict.fromkeys(("ReplicaGroup", "ReplicaRole", "ReplicaView"), "group"),
    "ReplicatedIdempotencyStore": "idempotency",
    **dict.fromkeys(("Completed", "Conflict", "New", "Pending", "Reservation"), "idempotency_record"),
    "MemoryReplica": "memory",
    **dict.fromkeys(("Placement", "ReplicaPolicy"), "policy"),
    **dict.fromkeys(("FailureDomain", "Replica", "ReplicaHealth"), "replica"),
    "S3Replica": "s3",
    "SigningKey": "signing",
}


def __getattr__(name: str) -> object:
    """Fetch a public name on first use, and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"sublet.state.replicated.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
