"""What a trainer is given, looked at before anything is trained; and what it says to programs that cannot be kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from sublet.errors import InvalidRequest, Unsupported
from sublet.training.parts import Part, part_of
from sublet.values import parse_duration_ns

SAVE_EVERY: Final = "SUBLET_SAVE_EVERY"
"""Set by `sublet train --save-every`."""


def parts_of(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, state: Mapping[str, Any] | None, metrics: dict[str, Any]
) -> dict[str, Part]:
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    found = {name: part_of(f"the {name}", thing) for name, thing in named.items() if thing is not None}
    found["metrics"] = part_of("metrics", metrics)
    for name, thing in (state or {}).items():
        found[f"state[{name!r}]"] = part_of(f"state[{name!r}]", thing)
    return found


def interval_of(save_every: int | str | None) -> tuple[int | None, int]:
    """Every so many steps, or every so many nanoseconds."""
    if save_every is None:
        said = os.environ.get(SAVE_EVERY, "")
        save_every = int(said) if said.isascii() and said.isdigit() else said or "1m"
    if isinstance(save_every, bool) or not isinstance(save_every, int | str):
        raise InvalidRequest(
            f"save_every cannot be {save_every!r}", do='Give a number of steps, or a duration such as "30s".'
        )
    if isinstance(save_every, str):
        return None, parse_duration_ns(save_every, "save_every")
    if save_every < 1:
        raise InvalidRequest("save_every needs at least one step", do="Give 1 or more, or a duration.")
    return save_every, 0


def refuse_many_processes() -> None:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise Unsupported(
            "PreemptibleTrainer keeps the state of one process, and this is one of several",
            do="Train in one process, or save with torch.distributed.checkpoint.",
        )


def no_steps() -> InvalidRequest:
    return InvalidRequest(
        "batches were taken and trainer.step() was never called, so nothing could be saved",
        do="Call trainer.step(loss) for each batch, or trainer.step() behind a step of your own.",
    )


def other_loop() -> InvalidRequest:
    return InvalidRequest(
        "the checkpoint was made by a program with another loop around its batches",
        do="Keep `for epoch in trainer.epochs(n)` as it was, or begin under another name.",
    )
