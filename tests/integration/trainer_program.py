"""A program that trains with PyTorch, and dies at a line of Sublet's. ``python -m tests.integration.trainer_program``

reads one life per line, as JSON, forks a process for it, and answers with its exit status; nothing is loaded after the
fork that was not loaded before. A life is killed when one of the lines that its step consists of is executed for the
so manieth time, in whichever thread: the line has not been executed then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
import torch._dynamo  # the first optimizer of a process loads it
from torch import nn
from torch.utils.data import DataLoader

import sublet
from sublet.training import PreemptibleTrainer

__all__ = ["EPOCHS", "ROOMS", "Life", "live"]

ROWS: Final = 12
EPOCHS: Final = 1 << 20
SOURCE: Final = Path(sublet.__file__).parent
ROOMS: Final = (str(SOURCE / "training"), str(SOURCE / "state"))


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one process is to do."""

    place: str
    steps: int
    seed: int
    kill_at: int | None = None
    """Lines of ours, counted from the first step of this life."""
    waits: bool = False
    """It waits for each save, as it does before it leaves; otherwise it trains on meanwhile."""
    list_lines: str = ""
    """A file for all that are executed, instead."""


class Enough(Exception):
    """So many steps are done."""


class Rows(torch.utils.data.Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.full((4,), float(n)) + torch.rand(4)


def train(life: Life, began: Callable[[], None]) -> str:
    """Until so many steps are done; the weights, as text."""
    random.seed(life.seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
    trainer = PreemptibleTrainer(model, optimizer, scheduler=scheduler, place=life.place, save_every=2, keep=2)
    began()
    try:
        with trainer:
            for _ in trainer.epochs(EPOCHS):
                for batch in trainer.batches(DataLoader(Rows(), 4, shuffle=True)):
                    if trainer.steps >= life.steps:
                        raise Enough
                    trainer.step(model(batch).square().mean())
                    scheduler.step()
                    if life.waits:
                        trainer._saves.wait()
    except Enough:
        return json.dumps([parameter.tolist() for parameter in model.parameters()])
    raise AssertionError("there are more epochs than that")


class Tracer:
    """Counts lines of ours, and kills at one."""

    def __init__(self, life: Life) -> None:
        self.life, self.lines, self.seen = life, 0, set[str]()
        self._lock = threading.Lock()
        self._ours: dict[CodeType, bool] = {}

    def begin(self) -> None:
        threading.settrace(self)
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in self._ours:
            self._ours[code] = code.co_filename.startswith(ROOMS)
        return self._line if self._ours[code] else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            with self._lock:
                self.lines += 1
                if self.lines == self.life.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.life.list_lines:
                    self.seen.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line


def live(life: Life) -> int:
    tracer = Tracer(life)
    try:
        weights = train(life, tracer.begin)
        sys.settrace(None)
        (Path(life.place) / "weights").write_text(weights)
        if life.list_lines:
            Path(life.list_lines).write_text("\n".join([str(tracer.lines), *sorted(tracer.seen)]))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Serve lives until nobody asks for more."""
    torch.set_num_threads(1)
    torch.optim.AdamW(nn.Linear(1, 1).parameters())
    for line in sys.stdin:
        life = Life(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(0)
                code = live(life)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
