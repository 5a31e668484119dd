"""``run_training_step``: does one training step exactly once. The order of its acts is in ``law``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, assert_never

from blake3 import blake3

from sublet.compute.session import GpuSession
from sublet.compute.session_data import sources_of
from sublet.errors import (
    CheckpointFailed,
    Disconnected,
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    StepPending,
    SubletError,
    VersionConflict,
)
from sublet.state.replicated.checkpoint import ReplicatedCheckpoint
from sublet.state.replicated.checkpoint_record import Effect, Save
from sublet.state.replicated.idempotency import ReplicatedIdempotencyStore
from sublet.state.replicated.idempotency_record import Completed as Reserved
from sublet.state.replicated.idempotency_record import New, Pending, Reservation
from sublet.state.replicated.signing import SigningKey
from sublet.training.batch import Completed, Duplicate, Launch, Recovered, TrainingBatch, TrainingStepOutcome
from sublet.training.step_protocol import Act, StepVerdict, decide, what_is_saved
from sublet.values import Epoch
from sublet.wire.http import CheckpointKey
from sublet.wire.scalars import u32, u64

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.compute.session_data import KindText
    from sublet.state.replicated.group import ReplicaGroup
    from sublet.state.replicated.policy import ReplicaPolicy
    from sublet.state.replicated.replica import Replica

STATE_MAX: Final = (1 << 32) - 1
"""Bytes; a kernel is told the length as u32."""
TIDY_EVERY: Final = 128
"""Steps after which what was completed is forgotten, except the last so many. A store holds some thousand of them."""


def run_training_step(
    lease: StepLease,
    checkpoint: ReplicatedCheckpoint,
    idempotency: ReplicatedIdempotencyStore,
    batch: TrainingBatch,
    module: str | bytes | Mapping[Any, str | bytes],
    kernel: str | Launch | Sequence[Launch] = "train_step",
    *,
    expected: int | None = None,
    state: bytes | None = None,
    kind: KindText | None = None,
    needs: float | str = 0.0,
    session: OpenStepSession = GpuSession,
    watch: Callable[[Act], object] | None = None,
) -> TrainingStepOutcome:
    """Do one step of a job under a lease, save its state, and see to it that it counts once.

    Whatever happens (the lease ends, the program is killed, the step is asked for twice), the same call is safe to make
    again, by this program or the next: it does the step, or says `Recovered` or `Duplicate`. Whatever is raised before
    the state is saved, nothing happened; `CheckpointFailed` with ``reason`` ``"unknown"`` says that it may have, and
    the same call finds out.

    ``module`` is given as to `GpuSession.module_load`; a kernel gets the step (u64), the length of the state (u32) and
    the buffer. ``expected`` is the version of the checkpoint from which the step goes on (0: there is none yet; None:
    whatever is there); ``state`` is what the program believes to be saved there (``outcome.state`` of the step before),
    and spares reading it if it is. ``needs`` is how long the step takes, so that none begins which cannot be finished.
    ``watch`` is called before each act.

    Raises `LeaseNotActive` before anything is touched if the lease is over, `StepPending` if another program is at
    the step, `IdempotencyConflict` if the step was to do something else, `VersionConflict` if the state is not the
    expected one or already beyond the step, `StaleEpoch` if a newer lease has opened the checkpoint.
    """
    step = _Step(lease, checkpoint, idempotency, batch, sources_of(module, kind), _launches(kernel))
    step.session, step.needs, step.expected, step.believed = session, needs, expected, state
    step.at = watch if watch is not None else _unwatched
    step.check_active()
    with lease.activity(f"step {batch.step} of {batch.job_id}"):
        return step.run()


class _Step:
    session: OpenStepSession
    needs: float | str
    expected: int | None
    believed: bytes | None
    at: Callable[[Act], object]

    def __init__(
        self,
        lease: StepLease,
        checkpoint: ReplicatedCheckpoint,
        idempotency: ReplicatedIdempotencyStore,
        batch: TrainingBatch,
        module: Mapping[Any, bytes],
        launches: Sequence[Launch],
    ) -> None:
        self.lease, self.checkpoint, self.idempotency = lease, checkpoint, idempotency
        self.batch, self.module, self.launches = batch, module, launches
        self.epoch = lease.epoch
        self.fingerprint = batch.fingerprint(module, launches)
        self.name = batch.checkpoint_name

    def run(self) -> TrainingStepOutcome:
        saves = self.opened()
        self.at(Act.RESERVE)
        reserved = self.idempotency.reserve(
            self.batch.key, self.fingerprint, ttl=self.lease.ttl, epoch=self.epoch, step=self.batch.step
        )
        verdict = self.verdict(reserved, saves)
        if verdict is StepVerdict.LOST:
            # It may have been saved and completed between our two looks; then we are fenced, or see it now.
            saves = self.opened()
            verdict = self.verdict(reserved, saves)
        match verdict:
            case StepVerdict.RUN:
                return self.done_now(saves[0] if saves else None)
            case StepVerdict.SETTLE:
                save = self.mine(saves)
                self.complete(save)
                return Recovered(self.batch.job_id, self.batch.step, save)
            case StepVerdict.RECOVERED:
                return Recovered(self.batch.job_id, self.batch.step, self.mine(saves))
            case StepVerdict.DUPLICATE:
                return Duplicate(self.batch.job_id, self.batch.step, _version(reserved))
            case _:
                error = self.refusal(verdict, reserved, saves)
                if isinstance(reserved, New):  # ours, for this very step, and not used
                    self.give_back(error)
                raise error

    # ---- before anything is done ----

    def check_active(self) -> None:
        """Nothing is touched under a lease that is over, whatever ended it."""
        self.at(Act.CHECK)
        try:
            self.lease.check(self.needs)
        except LeaseNotActive:
            raise
        except LeaseEnded as error:
            raise LeaseNotActive(error.message, end=error.end, do=error.do, reason=error.reason) from error

    def opened(self) -> list[Save]:
        """Fence older leases; then what is saved, newest first, as far as it matters for this step."""
        self.at(Act.OPEN)
        latest = self.checkpoint.open(self.name, epoch=self.epoch)
        if latest is None:
            return []
        if latest.effect is not None and latest.effect.step < self.batch.step:
            return [latest]  # steps only rise, so this one is nowhere behind it
        return self.checkpoint.versions(self.name)

    def verdict(self, reserved: Reservation, saves: Sequence[Save]) -> StepVerdict:
        found = what_is_saved(saves, self.batch.key, self.fingerprint, self.batch.step, self.expected)
        return decide(reserved, found)

    def mine(self, saves: Sequence[Save]) -> Save:
        """The save that carries this step. With a key, only one that is signed proves that the step was done."""
        found = self.checkpoint.find(self.name, self.batch.key)
        return found or next(save for save in saves if save.effect and save.effect.key == self.batch.key)

    def refusal(self, verdict: StepVerdict, reserved: Reservation, saves: Sequence[Save]) -> SubletError:
        step, job, version = self.batch.step, self.batch.job_id, saves[0].version if saves else 0
        last = max((save.effect.step for save in saves if save.effect is not None), default=None)
        match verdict:
            case StepVerdict.WAIT:
                assert isinstance(reserved, Pending)
                return StepPending(
                    f"step {step} of {job} is reserved under the lease {reserved.owner or 'of another program'}",
                    owner=reserved.owner,
                    until_ns=reserved.until_ns,
                )
            case StepVerdict.TOO_LATE:
                return VersionConflict(
                    f"step {step} of {job} comes too late: step {last} is saved already",
                    do="Load the checkpoint and go on from the step after it.",
                )
            case StepVerdict.UNEXPECTED:
                future = " which is not written yet" if (self.expected or 0) > version else ""
                return VersionConflict(
                    f"the checkpoint of {job} has version {version}, not {self.expected}{future}",
                    do="Load it, and go on from the step after the one that it carries.",
                )
            case StepVerdict.CONFLICT:
                return IdempotencyConflict(
                    f"step {step} of {job} was begun with another input, module or kernel",
                    do="Give it what it was begun with, or start another job.",
                )
            case StepVerdict.LOST:
                return CheckpointFailed(
                    f"step {step} of {job} was completed, but the checkpoint knows only "
                    + ("nothing" if last is None else f"step {last}"),
                    do="See whether these are the replicas on which it was saved, before anything is written.",
                )
            case StepVerdict.RUN | StepVerdict.SETTLE | StepVerdict.RECOVERED | StepVerdict.DUPLICATE:
                raise AssertionError(verdict)
            case _:
                assert_never(verdict)

    # ---- the step itself ----

    def done_now(self, latest: Save | None) -> TrainingStepOutcome:
        try:
            state = self.computed(self.loaded(latest))
            self.at(Act.CHECK_AGAIN)
            self.lease.check()
        except Exception as error:
            self.give_back(error)
            raise
        save = self.saved(state, latest)
        self.complete(save, before=latest)
        return Completed(self.batch.job_id, self.batch.step, save, state)

    def loaded(self, latest: Save | None) -> bytes:
        """The state from which the step goes on: exactly that of the version that the opening found."""
        self.at(Act.LOAD)
        if latest is None:
            return bytes(self.batch.initial)
        if self.believed is not None and blake3(self.believed).hexdigest() == latest.hash:
            return bytes(self.believed)
        saved = self.checkpoint.load(self.name, latest.version)
        if saved is None or saved.save.hash != latest.hash:
            raise VersionConflict(
                f"the checkpoint of {self.batch.job_id} was written by others since it was opened",
                do="Let one program at a time train a job.",
            )
        return saved.data

    def computed(self, state: bytes) -> bytes:
        """Run the kernels. Nothing of the step is left on the device afterwards."""
        whole = state + bytes(self.batch.input)
        length = self.batch.output_len
        size = max(len(whole), length)
        if size > STATE_MAX:
            raise InvalidRequest(f"a step of {size} bytes is too large", do=f"Keep it to {STATE_MAX} bytes.")
        self.at(Act.BEGIN)
        with self.session(self.lease) as gpu:
            self.at(Act.ALLOCATE)
            buffer = gpu.mem_alloc(size)
            self.at(Act.WRITE)
            gpu.mem_write(buffer, 0, whole)
            self.at(Act.MODULE)
            module = gpu.module_load(self.module)
            self.launch(gpu, module, buffer)
            self.at(Act.READ)
            gpu.sync()
            out = gpu.mem_read(buffer, 0, length)
            self.at(Act.UNLOAD)
            gpu.module_unload(module)
            self.at(Act.FREE)
            gpu.mem_free(buffer)
            self.at(Act.END)
        return out

    def launch(self, gpu: StepSession, module: Any, buffer: Any) -> None:
        """Each kernel, under a lease that was looked at just before."""
        head = (u64(self.batch.step), u32(self.batch.output_len), buffer)
        for one in self.launches:
            self.at(Act.LAUNCH)
            self.lease.check()
            gpu.launch(module, one.kernel, one.grid, one.block, [*head, *one.args])

    # ---- what lasts ----

    def saved(self, state: bytes, latest: Save | None) -> Save:
        self.at(Act.SAVE)
        return self.checkpoint.save_bytes(
            self.name,
            state,
            expected=latest.version if latest is not None else 0,
            epoch=self.epoch,
            effect=Effect(self.batch.key, self.fingerprint, self.batch.step),
        )

    def complete(self, save: Save, before: Save | None = None) -> None:
        """Close the reservation. If that fails the step is saved all the same, and its next ``run`` finds that."""
        self.at(Act.COMPLETE)
        try:
            self.idempotency.complete(self.batch.key, self.fingerprint, _outcome(save), epoch=self.epoch)
            self.forget_old(before)
        except SubletError as error:
            error.add_note(f"step {self.batch.step} is saved as version {save.version}, and asking again settles it")
            raise
        self.at(Act.DONE)

    def forget_old(self, before: Save | None) -> None:
        """Now and then, forget what is completed and lies far behind what is saved."""
        step = self.batch.step
        last = before.effect.step if before is not None and before.effect is not None else step
        if step // TIDY_EVERY != last // TIDY_EVERY:
            self.idempotency.expire(below=step - TIDY_EVERY, prefix=self.batch.prefix)

    def give_back(self, error: Exception) -> None:
        """Nothing was saved, so the next may do it at once. If this fails too, the next waits until the reservation
        ends."""
        try:
            self.idempotency.release(self.batch.key)
        except SubletError as failed:
            error.add_note(f"step {self.batch.step} stays reserved for a while: {failed}")


def _launches(kernel: str | Launch | Sequence[Launch]) -> tuple[Launch, ...]:
    if isinstance(kernel, str):
        return (Launch(kernel),)
    found = (kernel,) if isinstance(kernel, Launch) else tuple(kernel)
    if not found:
        raise InvalidRequest("a step without a kernel does nothing", do="Name a kernel of the module.")
    return found


def _outcome(save: Save) -> str:
    return json.dumps({"version": save.version, "hash": save.hash}, separators=(",", ":"))


def _version(reserved: Reservation) -> int | None:
    """The version that was noted when a step was completed."""
    if not isinstance(reserved, Reserved) or not reserved.outcome:
        return None
    try:
        version = json.loads(reserved.outcome)["version"]
    except (ValueError, KeyError, TypeError):
        return None  # completed by another program, in its own words
    return version if isinstance(version, int) else None


def _unwatched(_: Act) -> None:
    """No watcher was given."""


# -------------------------------------------------------------------------------------------------------------- records
#
# The two records of a job, on one set of replicas, under one lease.


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


# ---------------------------------------------------------------------------------------------------------------- seams
#
# The interfaces of lease and device session that a step needs. Tests of programs implement them.


class StepLease(Protocol):
    """A lease, as `sublet.Lease` is one."""

    @property
    def id(self) -> Any: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def ttl(self) -> float: ...
    def check(self, needs: float | str = 0.0) -> None:
        """Raise `LeaseEnded` if it is over, or if work that takes so long must not begin on it."""

    def activity(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Something runs under it, so it is renewed."""


class StepSession(Protocol):
    """A session on one device of the lease, as `sublet.GpuSession` is one.

    It is used from one thread, as a context manager: left in peace, it has freed everything, or raises; left by an
    error, it does nothing more, frees what it can, and lets the error pass.
    """

    def mem_alloc(self, size: int, /) -> Any: ...
    def mem_write(self, buffer: Any, offset: int, data: bytes, /) -> None: ...
    def mem_read(self, buffer: Any, offset: int, length: int, /) -> bytes: ...
    def mem_free(self, buffer: Any, /) -> None: ...
    def module_load(self, source: Mapping[Any, bytes], /) -> Any: ...
    def module_unload(self, module: Any, /) -> None: ...
    def launch(self, module: Any, kernel: str, grid: Any, block: Any, args: Sequence[Any], /) -> None: ...
    def sync(self) -> None: ...


class OpenStepSession(Protocol):
    """Opens a session on a lease; ``sublet.GpuSession`` itself is one."""

    def __call__(self, lease: Any, /) -> contextlib.AbstractContextManager[StepSession]: ...
