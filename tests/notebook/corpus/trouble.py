"""A notebook with ``%%gpu`` on all cells, and trouble at random moments: the device is taken, or the guest, the office,
the supervisor or the notebook's own kernel is killed.

A cell that fails names what happened and is run again. After a dead kernel the notebook is run anew, as a person does
it. In the end everything is as in a plain run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import sublet.errors
from tests.notebook.corpus.notebooks import Notebook
from tests.notebook.corpus.run import Cell, Kernel, KernelDied, Run, kernel_on, with_gpu

__all__ = ["TROUBLES", "Story", "Trouble", "run_in_trouble"]

Trouble = Literal["revoke", "guest", "office", "supervisor", "kernel"]
TROUBLES: Final[tuple[Trouble, ...]] = ("revoke", "guest", "office", "supervisor", "kernel")
TRIES: Final = 4
"""Of one cell, the first of them with trouble."""
NAMED: Final = frozenset(
    name for name, one in vars(sublet.errors).items() if isinstance(one, type) and issubclass(one, Exception)
)
"""Errors of Sublet's own: what a cell that lost its device may fail with."""


@dataclass(slots=True, kw_only=True)
class Story:
    """What happened, for who reads a failure."""

    seed: int
    lines: list[str] = field(default_factory=list)
    met: set[tuple[Trouble, bool]] = field(default_factory=set)
    """Each trouble, and whether a cell failed of it."""

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.lines])


class _Strike:
    """One trouble, a while after the cell was sent."""

    def __init__(self, what: Callable[[], object], delay_s: float) -> None:
        self._what = what
        self._timer = threading.Timer(delay_s, self._do)
        self.error: BaseException | None = None

    def _do(self) -> None:
        try:
            self._what()
        except BaseException as error:  # told where it is waited for
            self.error = error

    def start(self) -> None:
        self._timer.start()

    def wait(self) -> None:
        self._timer.join()
        if self.error is not None:
            raise self.error


def run_in_trouble(
    notebook: Notebook,
    plain: Run,
    folder: Path,
    env: Mapping[str, str],
    story: Story,
    *,
    troubles: Sequence[Trouble],
    strike: Callable[[Trouble], object],
    come_back: Callable[[], object] = lambda: None,
    share: float = 1.0,
    options: str = "",
) -> Run:
    """Run it; ``strike`` does everything but killing the kernel. ``share``: of cells that meet trouble; each trouble is
    met at least once where there are cells enough."""
    chance = random.Random(f"{notebook.name} {story.seed}")
    numbers = list(range(len(notebook.cells)))
    planned: dict[int, Trouble] = dict(
        zip(chance.sample(numbers, min(len(troubles), len(numbers))), troubles, strict=False)
    )
    for number in numbers:
        if number not in planned and chance.random() < share:
            planned[number] = chance.choice(troubles)
    run = Run(notebook=notebook.name, mode="all", seed=story.seed, folder=folder)
    while len(run.cells) < len(notebook.cells):
        with kernel_on(notebook, folder, env, is_plain=False) as kernel:
            done = run.cells
            run.cells = []
            try:
                for number, source in enumerate(notebook.cells):
                    trouble = planned.get(number) if number >= len(done) else None
                    planned.pop(number, None)
                    cell = _one(
                        kernel, number, with_gpu(source, options), trouble, plain, chance, story, strike, come_back
                    )
                    run.cells.append(cell)
                kernel.look(run.cells[-1], tuple(plain.loaded))
            except KernelDied:
                come_back()
    return run


def _one(
    kernel: Kernel,
    number: int,
    source: str,
    trouble: Trouble | None,
    plain: Run,
    chance: random.Random,
    story: Story,
    strike: Callable[[Trouble], object],
    come_back: Callable[[], object],
) -> Cell:
    """Run one cell until it is through."""
    before = plain.cells[number]
    for attempt in range(TRIES):
        cell = _struck(kernel, source, trouble if attempt == 0 else None, before.took_s, chance, story, strike, number)
        if trouble is not None and attempt == 0:
            come_back()
        if cell.error == before.error or cell.error is None or cell.error[0] not in NAMED:
            return cell
        story.lines.append(f"cell {number}, attempt {attempt}: {cell.error[0]}: {cell.error[1]}")
        if trouble is not None:
            story.met.add((trouble, True))
    raise AssertionError(f"cell {number} does not get through after {trouble}\n{story}")


def _struck(
    kernel: Kernel,
    source: str,
    trouble: Trouble | None,
    plain_s: float,
    chance: random.Random,
    story: Story,
    strike: Callable[[Trouble], object],
    number: int,
) -> Cell:
    if trouble is None:
        return kernel.run(source)
    delay_s = chance.choice((0.0, 0.002, 0.01, 0.03, 0.1, 0.3)) + chance.random() * plain_s
    pid = kernel.pid
    planned = _Strike(
        (lambda: os.kill(pid, signal.SIGKILL)) if trouble == "kernel" else (lambda: strike(trouble)), delay_s
    )
    story.lines.append(f"cell {number}: {trouble} after {delay_s * 1000:.0f} ms")
    try:
        cell = kernel.run(source, planned.start)
    except KernelDied:
        story.met.add((trouble, True))
        planned.wait()
        raise
    planned.wait()
    story.met.add((trouble, False))
    if trouble == "kernel":  # the cell was quicker
        raise KernelDied
    return cell
