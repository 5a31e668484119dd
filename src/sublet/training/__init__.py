"""Training on leases that may be taken: each step is applied once, saved, and survives its program.

::

    from sublet import training

    checkpoint, idempotency = training.training_records("runs", replicas, lease, fabric=fabric)
    batch = training.TrainingBatch(job_id="resnet", step=42, input=data, output_len=len(weights), initial=weights)
    outcome = training.run_training_step(lease, checkpoint, idempotency, batch, module)

or, around a training loop of PyTorch's that stays as it is, `PreemptibleTrainer`. docs/training.md walks through both
and says what is promised.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.training.batch import Completed, Duplicate, Launch, Recovered, TrainingBatch, TrainingStepOutcome
    from sublet.training.leaving import Preempted
    from sublet.training.progress_events import Account
    from sublet.training.step_protocol import Act
    from sublet.training.steps import TrainingRecords, lease_has_ended, run_training_step, training_records
    from sublet.training.trainer import PreemptibleTrainer

__all__ = [
    "Account",
    "Act",
    "Completed",
    "Duplicate",
    "Launch",
    "Preempted",
    "PreemptibleTrainer",
    "Recovered",
    "TrainingBatch",
    "TrainingRecords",
    "TrainingStepOutcome",
    "lease_has_ended",
    "run_training_step",
    "training_records",
]

_LAZY: Final[dict[str, str]] = {
    **dict.fromkeys(("Completed", "Duplicate", "Launch", "Recovered", "TrainingBatch", "TrainingStepOutcome"), "batch"),
    "Act": "step_protocol",
    **dict.fromkeys(("TrainingRecords", "lease_has_ended", "training_records"), "steps"),
    "run_training_step": "steps",
    "Preempted": "leaving",
    "PreemptibleTrainer": "trainer",
    "Account": "progress_events",
}


def __getattr__(name: str) -> object:
    """Fetch a public name on first use, and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"sublet.training.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
