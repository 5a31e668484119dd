"""Steps of a job through both stores: reserved, done, saved with its effect, completed; by programs that stop anywhere.

The two stores' law runs here (``Book``, ``SaveHistory``), on two registers that are plain variables with compare and
swap, as ``linearizable`` shows the real ones to be. Each program stands between any two of its calls for any time, dies
there, or goes on after its lease has ended. The model of the job is a list of the steps that were applied to it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from sublet.errors import IdempotencyConflict, InvalidRequest, StaleEpoch, VersionConflict
from sublet.state.replicated.checkpoint_record import Effect, Save, SaveHistory
from sublet.state.replicated.idempotency_record import Book, Completed, KeyRecord, New
from sublet.values import Epoch
from tests.simulation.mutant import in_force

STEPS: Final = 6
RETAIN: Final = 3


class StepBroken(Exception):
    """A rule was broken."""


class _Register:
    """A variable with a version, and the highest epoch that opened it."""

    def __init__(self, value: Any) -> None:
        self.version, self.value, self.epoch = 0, value, Epoch(0, 0)

    def open(self, epoch: Epoch) -> tuple[int, Any]:
        if epoch < self.epoch:
            raise StaleEpoch("a newer lease has opened it")
        self.epoch = epoch
        return self.version, self.value

    def swap(self, expected: int, value: Any, epoch: Epoch) -> bool:
        if epoch < self.epoch:
            raise StaleEpoch("a newer lease has opened it")
        if expected != self.version:
            return False
        self.version, self.value = self.version + 1, value
        return True


class _Job:
    """Both registers, and what is known from outside."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"steps/{seed}")
        self.checkpoint, self.effects = _Register(SaveHistory()), _Register(Book())
        self.model: tuple[int, ...] = ()
        """The steps that the last save contains."""
        self.contents: dict[int, tuple[int, ...]] = {0: ()}
        self.outcomes: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.now = 0
        self.leases = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Until all steps are done."""
        live: dict[int, Generator[None, None, None]] = {}
        for moment in range(3_000):
            self.now += self.random.randrange(3)
            if not live or (len(live) < 4 and self.random.random() < 0.05):
                self.leases += self.random.random() < 0.8
                live[moment] = self._program(f"p{moment}", Epoch(1, max(1, self.leases)))
            chosen = self.random.choice(sorted(live))
            try:
                next(live[chosen])
            except StopIteration:
                del live[chosen]
                if self.model == tuple(range(1, STEPS + 1)):
                    return
                continue
            if self.random.random() < 0.03:
                self.seen["died"] += 1
                del live[chosen]
        raise StepBroken(f"only {self.model} came about")

    def _program(self, name: str, epoch: Epoch) -> Generator[None, None, None]:
        """One holder of a lease: it opens the checkpoint and does steps until there are none, or it is fenced."""
        try:
            version, history = self.checkpoint.open(epoch)
            yield
            while (step := len(self.contents[version]) + 1) <= STEPS:
                if step > 1 and self.random.random() < 0.5:
                    step -= 1  # a step may be handed out twice
                done = yield from self._step(name, epoch, version, history, step)
                if not done:
                    yield
                version, history = self.checkpoint.open(epoch)
                yield
        except (StaleEpoch, VersionConflict, IdempotencyConflict, InvalidRequest) as error:
            self.seen[type(error).__name__] += 1

    def _step(
        self, name: str, epoch: Epoch, version: int, history: SaveHistory, step: int
    ) -> Generator[None, None, bool]:
        key = f"job/{step}"
        said = yield from self._reserve(name, epoch, key, step)
        self.seen[type(said).__name__] += 1
        if isinstance(said, Completed):
            if not any(step in self.contents[v] for v in range(self.checkpoint.version + 1)):
                raise StepBroken(f"step {step} is completed and is in no checkpoint")
            return True
        if not isinstance(said, New):
            return False
        # A successor looks for the effect first.
        _, history_now = self.checkpoint.open(epoch)
        there = history_now.with_effect(key)
        yield
        if there is None:
            effect = Effect(key, "f", step)
            if history.admits(effect) is None:
                save = Save(
                    version=version + 1,
                    size=0,
                    hash="",
                    schema="s",
                    policy="",
                    epoch=epoch,
                    wall_ns=self.now,
                    effect=effect,
                )
                if not self.checkpoint.swap(version, history.then(save, RETAIN), epoch):
                    return False
                self.contents[version + 1] = (*self.contents[version], step)
                self._check_model(version + 1)
                yield
        else:
            self.seen["recovered"] += 1
        yield from self._complete(name, epoch, key)
        return True

    def _reserve(self, name: str, epoch: Epoch, key: str, step: int) -> Generator[None, None, Any]:
        while True:
            version, book = self.effects.version, self.effects.value
            yield
            claim = KeyRecord("f", name, name, epoch, self.now + 5, step)
            after, said = book.reserve(key, claim, now_ns=self.now)
            if after is book or self.effects.swap(version, after, Epoch(0, 0)):
                if isinstance(said, New):
                    self.owners[key] = name
                return said

    def _complete(self, name: str, epoch: Epoch, key: str) -> Generator[None, None, None]:
        while True:
            version, book = self.effects.version, self.effects.value
            yield
            after = book.complete(key, name, epoch, "f", name)
            if self.effects.swap(version, after, Epoch(0, 0)):
                break
        if self.owners[key] != name:
            raise StepBroken(f"{key} was completed by {name}, and {self.owners[key]} has it")
        if self.outcomes.setdefault(key, name) != name:
            raise StepBroken(f"{key} has two outcomes")

    def _check_model(self, version: int) -> None:
        self.model = self.contents[version]
        if list(self.model) != list(range(1, len(self.model) + 1)):
            raise StepBroken(f"version {version} has the steps {self.model}")


def run_step_seed(seed: int) -> Counter[str]:
    """One seed; what was seen."""
    job = _Job(seed)
    job.run()
    return job.seen


# ---- known bugs ----


def _anybody_completes(_original: Any) -> Any:
    def complete(self: Book, key: str, claimant: str, epoch: Epoch, fingerprint: str, outcome: str) -> Book:
        there = self.records[key]
        return Book({**self.records, key: replace(there, outcome=outcome)}, self.floors)

    return complete


def _swaps_anything(_original: Any) -> Any:
    def swap(self: _Register, expected: int, value: Any, epoch: Epoch) -> bool:
        self.version, self.value = self.version + 1, value
        return True

    return swap


STEP_MUTANTS: Final[dict[str, tuple[str, type, str, Callable[[Any], Any]]]] = {
    "Z24": ("complete is taken from an old owner", Book, "complete", _anybody_completes),
    "S1": ("the registers neither compare nor fence", _Register, "swap", _swaps_anything),
}


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force([STEP_MUTANTS[name][1:]] if name is not None else ())
