"""The values of a step: what it is to do, and its outcome."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from blake3 import blake3

from sublet.errors import InvalidRequest
from sublet.state.replicated.checkpoint_record import Save

if TYPE_CHECKING:
    from sublet.wire.device import ModuleKind
    from sublet.wire.scalars import Scalar

_JOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP_MAX: Final = (1 << 63) - 1
_LENGTH: Final = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One step of one job.

    The kernel finds the state as it was saved last (before the first step ``initial``) in front of ``input`` in one
    buffer, and leaves the new state in the first ``output_len`` bytes.
    """

    job_id: str
    step: int
    """Rises from step to step; need not be dense."""
    input: bytes = field(repr=False)
    """The data of this step, without the state."""
    output_len: int
    initial: bytes = field(default=b"", repr=False)
    """The state before the first step. Give it with every step; it is part of what tells two jobs apart."""

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job_id):
            raise InvalidRequest(
                f"{self.job_id[:60]!r} cannot be the id of a job",
                do="Use up to 100 letters, digits, dots, dashes and underscores.",
            )
        if not 0 <= self.step <= _STEP_MAX:
            raise InvalidRequest(f"{self.step} cannot be a step", do=f"Use 0 to {_STEP_MAX}.")
        if self.output_len < 1:
            raise InvalidRequest(f"a state of {self.output_len} bytes keeps nothing", do="Ask for at least one byte.")

    @property
    def prefix(self) -> str:
        """How the keys of its job begin."""
        return f"job:{self.job_id}:step:"

    @property
    def key(self) -> str:
        """Under which the step is reserved, and which its state carries."""
        return f"{self.prefix}{self.step}"

    @property
    def checkpoint_name(self) -> str:
        """Under which the state of its job is saved."""
        return f"job:{self.job_id}:latest"

    def fingerprint(self, module: Mapping[ModuleKind, bytes], launches: Sequence[Launch]) -> str:
        """Of everything that decides what the step does, except the state it goes on from: that is decided by what was
        done before. The same key with another fingerprint is a mistake, and refused."""
        digest = blake3(b"sublet.training.step.v1")
        parts: list[object] = [self.job_id, self.step, self.output_len, bytes(self.input), bytes(self.initial)]
        parts += [part for kind in sorted(module) for part in (kind, module[kind])]
        parts += [repr((launch.kernel, launch.grid, launch.block, launch.args)) for launch in launches]
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(_LENGTH.pack(len(data)))
            digest.update(data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a step. It gets the step (u64), the length of the state (u32) and the buffer, then ``args``."""

    kernel: str
    grid: int | tuple[int, ...] = 1
    block: int | tuple[int, ...] = 1
    args: tuple[Scalar | int | float, ...] = ()
    """More numbers: ``sublet.f32(0.1)``. They are part of what the step is."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The step was done now, and is saved."""

    job_id: str
    step: int
    save: Save = field(repr=False)
    state: bytes = field(repr=False)
    """What was saved."""

    @property
    def version(self) -> int:
        """Of the checkpoint; the next step expects it."""
        return self.save.version


@dataclass(frozen=True, slots=True)
class Recovered:
    """The step had been done and saved by a program that died before it could say so. Nothing was computed."""

    job_id: str
    step: int
    save: Save = field(repr=False)

    @property
    def version(self) -> int:
        """The one with which the step was saved."""
        return self.save.version


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The step was completed before. Nothing was computed."""

    job_id: str
    step: int
    version: int | None
    """The one with which the step was saved; None if it is so long ago that no record is left."""


TrainingStepOutcome: TypeAlias = Completed | Recovered | Duplicate
