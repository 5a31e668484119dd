"""A world for training steps without any office: leases that end when told, a device made of Python, three replicas."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from sublet.errors import GpuError, LeaseExpired
from sublet.replicated import MemoryReplica, Replica, ReplicaGroup, ReplicatedCheckpoint, ReplicatedIdempotencyStore
from sublet.training import Act, Launch, TrainingBatch, TrainingStepOutcome, run_training_step
from sublet.training.step_protocol import StepVerdict
from sublet.values import NS_PER_S, Epoch
from sublet.wire.scalars import Scalar
from tests.left_open import threads_now
from tests.traces import until

JOB: Final = "spot-resnet"
MODULE: Final = "the source of a module"
WORDS: Final = 8
INITIAL: Final = struct.pack(f"<{WORDS}I", *range(WORDS))
PATIENCE_S: Final = 60.0
TWO: Final = (Launch("train_step"), Launch("decay", args=(3,)))


class Killed(BaseException):
    """What stands for a SIGKILL within a process: no ``except Exception`` of the code under test sees it."""


def after_death_before(act: Act) -> StepVerdict:
    """What the next try of the same step comes to, after its program died just before this act."""
    match act:
        case Act.COMPLETE:
            return StepVerdict.SETTLE
        case Act.DONE:
            return StepVerdict.DUPLICATE
        case _:
            return StepVerdict.RUN


class HeldLease:
    """A lease that is over when it is told to be."""

    def __init__(self, n: int, *, believes: bool = False) -> None:
        self.id, self.epoch, self.ttl = f"l-{n}", Epoch(1, n), 60.0
        self.over = False
        self.believes = believes
        """A zombie: it goes on believing in its lease."""
        self.checks = 0
        self.ends_at_check = 0

    def check(self, needs: float | str = 0.0) -> None:
        self.checks += 1
        if self.checks == self.ends_at_check:
            self.over = True
        if self.over and not self.believes:
            raise LeaseExpired(f"lease {self.id} has ended: expired")

    @contextlib.contextmanager
    def activity(self, what: str = "") -> Iterator[None]:
        yield


class PythonDevice:
    """Keeps count of what is on it; everything must be gone in the end. The kernels are arithmetic that does not
    commute, so a step that is missing, doubled or out of order shows."""

    def __init__(self) -> None:
        self.sessions = self.launches = 0
        self.buffers: dict[int, bytearray] = {}
        self.modules: set[int] = set()
        self.fails = ""
        """The call that fails."""

    def open(self, _: Any) -> PythonSession:
        self.sessions += 1
        self._call("open")
        return PythonSession(self)

    def _call(self, name: str) -> None:
        if self.fails == name:
            raise GpuError(f"{name} failed, as it was told", call=name)


class PythonSession:
    def __init__(self, device: PythonDevice) -> None:
        self.device = device
        self.buffers, self.modules = device.buffers, device.modules

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        leaked = bool(self.buffers or self.modules) and _[0] is None
        self.buffers.clear()
        self.modules.clear()
        assert not leaked, "the step left something on the device"

    def mem_alloc(self, size: int) -> int:
        self.device._call("mem_alloc")
        self.buffers[1] = bytearray(size)
        return 1

    def mem_write(self, buffer: int, offset: int, data: bytes) -> None:
        self.buffers[buffer][offset : offset + len(data)] = data

    def mem_read(self, buffer: int, offset: int, length: int) -> bytes:
        return bytes(self.buffers[buffer][offset : offset + length])

    def mem_free(self, buffer: int) -> None:
        del self.buffers[buffer]

    def module_load(self, source: Mapping[Any, bytes]) -> int:
        self.device._call("module_load")
        self.modules.add(7)
        return 7

    def module_unload(self, module: int) -> None:
        self.modules.remove(module)

    def launch(self, module: int, kernel: str, grid: Any, block: Any, args: Sequence[Any]) -> None:
        self.device._call("launch")
        self.device.launches += 1
        step, length, buffer, *more = [int(arg.value if isinstance(arg, Scalar) else arg) for arg in args]
        assert module in self.modules
        data = self.buffers[buffer]
        count = length // 4
        words = struct.unpack_from(f"<{count}I", data)
        extra = more[0] if more else data[-1]
        new = [(word * 31 + step * (at + 1) + extra) & 0xFFFFFFFF for at, word in enumerate(words)]
        struct.pack_into(f"<{count}I", data, 0, *new)

    def sync(self) -> None:
        self.device._call("sync")


class Program:
    """One life of a training program: its lease, its connections to the replicas, its device."""

    def __init__(
        self,
        lease: HeldLease,
        replicas: Sequence[Replica],
        ended: Callable[[str, Epoch], bool],
        *,
        now_ns: Callable[[], int] = lambda: 1_000 * NS_PER_S,
        retain: int = 3,
        patience: float = PATIENCE_S,
    ) -> None:
        self.lease, self.device = lease, PythonDevice()
        self.group = ReplicaGroup(replicas, patience=patience)
        self.checkpoint = ReplicatedCheckpoint(
            "runs", schema="w.v1", replicas=self.group, epoch=lease.epoch, retain=retain
        )
        self.idempotency = ReplicatedIdempotencyStore(
            "runs", replicas=self.group, epoch=lease.epoch, owner=lease.id, lease_ended=ended, wall_ns=now_ns
        )
        self.seen: list[Act] = []

    def step(
        self,
        number: int,
        *,
        die_before: Act | int | None = None,
        expected: int | None = None,
        data: bytes | None = None,
        kernel: str | Sequence[Launch] = TWO,
        watch: Callable[[Act], object] | None = None,
        state: bytes | None = None,
    ) -> TrainingStepOutcome:
        """``die_before``: an act, or the how-manieth."""
        self.seen = []

        def at(act: Act) -> None:
            if die_before in (act, len(self.seen)):
                raise Killed(act)
            self.seen.append(act)
            if watch is not None:
                watch(act)

        return run_training_step(
            self.lease,
            self.checkpoint,
            self.idempotency,
            batch(number, data),
            MODULE,
            kernel,
            expected=expected,
            state=state,
            kind="warp",
            session=self.device.open,
            watch=at,
        )

    def state(self) -> bytes:
        found = self.checkpoint.load(batch(0).checkpoint_name)
        assert found is not None
        return found.data

    def close(self) -> None:
        self.group.close()


def wait_for_replicas(group: ReplicaGroup) -> None:
    """Until each has done what it was asked, whether its answer was waited for or not."""
    until("idle replicas", lambda: not any(worker._waiting for worker in group._workers.values()), PATIENCE_S)
    until("packs that were brought", lambda: not threads_now("sublet-replica-pack"), PATIENCE_S)


class World:
    """Replicas that stay, programs that come and go."""

    def __init__(self, replicas: Sequence[Replica] | None = None) -> None:
        self.replicas = [MemoryReplica() for _ in range(3)] if replicas is None else replicas
        self.ended: set[str] = set()
        self.now_ns = 1_000 * NS_PER_S
        self.programs: list[Program] = []

    def program(self, n: int, *, believes: bool = False, retain: int = 3, patience: float = PATIENCE_S) -> Program:
        """A new program under lease ``n``; those before it have ended."""
        made = Program(
            HeldLease(n, believes=believes),
            self.replicas,
            lambda owner, _: owner in self.ended,
            now_ns=lambda: self.now_ns,
            retain=retain,
            patience=patience,
        )
        self.programs.append(made)
        return made

    def end(self, program: Program) -> None:
        """Its lease ends; the program may not know."""
        self.ended.add(program.lease.id)
        program.lease.over = True

    def close(self) -> None:
        for program in self.programs:
            program.close()


def batch(step: int, data: bytes | None = None) -> TrainingBatch:
    """The data of a step follows from its number."""
    data = bytes((step * 7 + 3) % 256 for _ in range(4)) if data is None else data
    return TrainingBatch(job_id=JOB, step=step, input=data, output_len=len(INITIAL), initial=INITIAL)


def uninterrupted(steps: int) -> bytes:
    """The weights after so many steps, by plain arithmetic that knows no replicas, leases or sessions."""
    words = list(range(WORDS))
    for step in range(1, steps + 1):
        for extra in ((step * 7 + 3) % 256, 3):
            words = [(word * 31 + step * (at + 1) + extra) & 0xFFFFFFFF for at, word in enumerate(words)]
    return struct.pack(f"<{WORDS}I", *words)
