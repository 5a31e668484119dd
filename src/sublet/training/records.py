"""The two records of a job, on one set of replicas, under one lease."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from sublet.errors import Disconnected, NotFound
from sublet.state.replicated.checkpoint import ReplicatedCheckpoint
from sublet.state.replicated.idempotency import ReplicatedIdempotencyStore
from sublet.state.replicated.signing import SigningKey
from sublet.values import Epoch
from sublet.wire.http import CheckpointKey

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.state.replicated.group import ReplicaGroup
    from sublet.state.replicated.policy import ReplicaPolicy
    from sublet.state.replicated.replica import Replica
    from sublet.training.seams import StepLease


class TrainingRecords(NamedTuple):
    """What `run_training_step` writes to. ``with training_records(...) as (checkpoint, idempotency):`` closes them."""

    checkpoint: ReplicatedCheckpoint
    idempotency: ReplicatedIdempotencyStore

    def close(self) -> None:
        """Close the replicas, unless a group of them was given. Harmless twice."""
        self.checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def training_records(
    name: str,
    replicas: ReplicaGroup | Sequence[Replica | str | os.PathLike[str]],
    lease: StepLease,
    *,
    fabric: Fabric | None = None,
    policy: ReplicaPolicy | None = None,
    schema: str = "training-checkpoint.v1",
    office: str = "local",
    retain: int = 3,
    key: SigningKey | None = None,
    older_keys: Sequence[SigningKey] = (),
    unsigned: bool = False,
) -> TrainingRecords:
    """Checkpoint and reservations as they belong together.

    With a ``fabric``, a step of a program that died is taken over as soon as its lease has ended; without, when its
    reservation has run out. And saves are signed with the key that the office keeps for the tenant, unless another
    ``key`` is given: what others put on a replica is refused before it is loaded. ``unsigned``: saves without any
    signature, such as those of before there was a key, are loaded as well.
    """
    if key is None and fabric is not None:
        key = SigningKey.parse(fabric.request("GET", "/v1/checkpoint-key", shape=CheckpointKey).key)
    checkpoint = ReplicatedCheckpoint(
        name,
        schema=schema,
        replicas=replicas,
        epoch=lease.epoch,
        policy=policy,
        office=office,
        retain=retain,
        key=key,
        older_keys=older_keys,
        unsigned=unsigned,
    )
    ended = None if fabric is None else lease_has_ended(fabric)
    return TrainingRecords(
        checkpoint,
        ReplicatedIdempotencyStore(
            name, replicas=checkpoint.group, epoch=lease.epoch, owner=str(lease.id), lease_ended=ended
        ),
    )


def lease_has_ended(fabric: Fabric) -> Callable[[str, Epoch], bool]:
    """For ``ReplicatedIdempotencyStore(lease_ended=...)``: what the office says of another's lease. If it does not know
    or does not answer, that is no end: the reservation then runs out by itself."""

    def ended(owner: str, epoch: Epoch) -> bool:
        try:
            view = fabric.lease(owner)
        except (NotFound, Disconnected):
            return False
        return view.end is not None or (view.epoch is not None and view.epoch > epoch)

    return ended
