"""What a trainer refuses, says and counts; what it does when saving fails, and when SIGTERM comes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from sublet.errors import CheckpointFailed, InvalidRequest, LeaseInterrupt
from sublet.lease_end import EndReason
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import Staged
from sublet.training import Preempted, PreemptibleTrainer
from sublet.training.progress import Sieve, TrainingProgress
from sublet.training.progress_events import SEPARATOR, Account, ProgressWriter
from sublet.training.trainer import part_of, put_back
from tests.unit.training.test_trainer import Lease, Program, Rows, same, shuffled

pytestmark = pytest.mark.needs("torch")

ROOT: Final = Path(__file__).parents[3]


def trainer_at(place: Any, **more: Any) -> Any:
    """Of one number that is learnt."""
    import torch

    model = torch.nn.Linear(1, 1)
    return PreemptibleTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), place=place, **more), model


def step(trainer: Any, model: Any) -> None:
    import torch

    trainer.step(model(torch.ones(1)).sum())


def train(trainer: Any, model: Any, batches: Any, each: Callable[[int], object] = lambda _: None) -> None:
    """One pass, and the end."""
    with trainer:
        for n, _ in enumerate(trainer.batches(batches)):
            step(trainer, model)
            each(n)


# ---- when it saves ----


class Counting(FolderStore):
    """Counts, and fails when it is told to."""

    fails = False
    published = 0

    def publish(self, staged: Staged) -> None:
        if self.fails:
            raise CheckpointFailed("the disk is full, as it was told")
        super().publish(staged)
        self.published += 1


class HeldClock:
    """Goes on by a second with each step."""

    domain = "test"

    def __init__(self) -> None:
        self.seconds = 0

    def now_ns(self) -> int:
        return self.seconds * 1_000_000_000

    def wall_ns(self) -> int:
        return self.now_ns()


def test_it_saves_every_so_many_steps_and_when_it_is_done(tmp_path: Path) -> None:
    """In the background; what is still being written is waited for at the end, and not in between."""
    store = Counting(tmp_path)
    trainer, model = trainer_at(store, save_every=3)
    with trainer:
        for _ in trainer.batches(range(10)):
            step(trainer, model)
    assert 2 <= store.published <= 4
    assert trainer.account.saves == store.published
    assert trainer.account.bytes_saved > 0
    again, _ = trainer_at(store)
    assert (again.steps, again.resumed, again.account.saves) == (10, True, store.published)
    again.close()


def test_a_metric_may_be_called_loss(tmp_path: Path) -> None:
    """And a loss that is given by name is still one."""
    import torch

    trainer, model = trainer_at(tmp_path)
    with trainer:
        weight = model.weight.item()
        for n, _ in enumerate(trainer.batches(range(2))):
            loss = model(torch.ones(1)).sum()
            if n == 0:
                trainer.step(loss, loss=0.5)
            else:
                trainer.step(loss=loss, error=2)
            assert model.weight.item() < weight
            weight = model.weight.item()
        assert trainer.metrics == {"loss": 0.5, "error": 2}


def test_it_saves_every_so_many_seconds(tmp_path: Path) -> None:
    store, clock = Counting(tmp_path), HeldClock()
    trainer, model = trainer_at(store, save_every="4s", clock=clock)
    seen = []
    for _ in trainer.batches(range(9)):
        step(trainer, model)
        clock.seconds += 1
        trainer._saves.wait()
        seen.append(store.published)
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert store.published == 3, "and once at the end"
    trainer.close()


def test_a_save_in_the_background_that_fails_is_raised_at_the_next_step(tmp_path: Path) -> None:
    """And what was saved before is whole."""
    store = Counting(tmp_path)
    trainer, model = trainer_at(store, save_every=2)

    def each(n: int) -> None:
        if n < 5:
            trainer._saves.wait()
        store.fails = n >= 5
        if n > 8:
            trainer._saves._durable._queue.drain()

    with pytest.raises(CheckpointFailed, match="as it was told"):
        train(trainer, model, range(100), each)
    assert trainer.steps < 20
    store.fails = False
    again, _ = trainer_at(store)
    assert again.steps == 4
    again.close()


def test_a_save_before_leaving_that_fails_is_raised_instead_of_leaving(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    store.fails = True
    trainer, model = trainer_at(store, lease=Lease(looks=1))
    with pytest.raises(CheckpointFailed):
        train(trainer, model, range(9))


def test_a_step_that_is_asked_to_be_saved_is(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    trainer, model = trainer_at(store)
    for n in trainer.batches(range(4)):
        step(trainer, model)
        if n == 1:
            trainer.save()
        trainer._saves.wait()
        assert store.published == (n > 1)
    trainer.close()


# ---- how it leaves ----


def test_leaving_is_no_exception_that_is_swallowed_by_accident(tmp_path: Path) -> None:
    """It is an end of the program with a status, and the end of a lease."""
    trainer, model = trainer_at(tmp_path, lease=Lease(looks=0))

    def careless() -> None:
        for _ in trainer.batches(range(9)):
            with contextlib.suppress(Exception):
                step(trainer, model)

    with pytest.raises(SystemExit) as left:
        careless()
    assert isinstance(left.value, Preempted)
    assert isinstance(left.value, LeaseInterrupt)
    assert left.value.code == 76
    assert str(left.value) == "step 1 is saved; the lease ends: preempted"
    assert left.value.end.saved_at
    with pytest.raises(InvalidRequest, match="closed"):
        trainer.step()


def test_behind_the_last_batch_nobody_leaves(tmp_path: Path) -> None:
    """Or the next life would find its loop empty, and the names of its body undefined. It is saved, though."""
    store = Counting(tmp_path)
    lives = []
    for _ in range(9):
        trainer, model = trainer_at(store, lease=Lease(looks=0))
        try:
            with trainer:
                for _ in trainer.epochs(2):
                    ran = 0
                    for _ in trainer.batches([1, 2]):
                        step(trainer, model)
                        ran += 1
                    lives.append(ran)
                break
        except Preempted:
            continue
    assert lives == [1, 1]
    assert store.published > 4


def test_sigterm_under_a_lease_that_goes_on_is_no_preemption(tmp_path: Path) -> None:
    """Somebody wants the program to end (Ctrl-C at `sublet train`, say); it saves, and nothing is said of the lease."""
    trainer, model = trainer_at(tmp_path, lease=Lease())
    with pytest.raises(Preempted) as left:
        train(trainer, model, range(9), lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (left.value.code, left.value.end.reason) == (143, EndReason.RELEASED)
    assert str(left.value) == "step 1 is saved; SIGTERM came"


SCRIPT: Final = """
import os, signal, sys, torch
from sublet.training import PreemptibleTrainer
model = torch.nn.Linear(1, 1)
trainer = PreemptibleTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), place=sys.argv[1])
for n in trainer.batches(range(6)):
    if n == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    trainer.step(model(torch.ones(1)).sum())
    print(n, flush=True)
"""


def test_sigterm_without_any_lease_is_a_notice(tmp_path: Path) -> None:
    """As Slurm and Kubernetes send it: the step is finished and saved, and the status is that of the signal."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    first = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (first.returncode, first.stdout, first.stderr) == (143, "0\n1\n2\n3\n", "")
    trainer, model = trainer_at(tmp_path)
    assert trainer.steps == 4
    train(trainer, model, range(6))
    assert trainer.steps == 6


# ---- what it refuses ----


def test_gradients_that_are_still_being_added_up_are_not_left_behind(tmp_path: Path) -> None:
    """A body without ``step`` belongs to the next one that has it: nothing is saved, and nobody leaves, in between."""
    import torch

    found, left = [], []
    model: Any = None
    for place, looks in (("alone", 1 << 30), ("preempted", 0)):
        for _ in range(9):
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = PreemptibleTrainer(model, optimizer, place=tmp_path / place, lease=Lease(looks))
            left.append(trainer.steps)
            try:
                for n in trainer.batches(range(12)):
                    (model(torch.full((1,), float(n))).sum() / 3).backward()
                    if n % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
                        trainer.step()
            except Preempted:
                continue
            trainer.close()
            break
        found.append([parameter.item() for parameter in model.parameters()])
    assert found[0] == found[1]
    assert left == [0, 0, 1, 2, 3]


def test_a_loop_that_never_makes_a_step_is_told(tmp_path: Path) -> None:
    trainer, _ = trainer_at(tmp_path)
    with pytest.raises(InvalidRequest, match=r"step\(\) was never called"):
        for _ in trainer.batches(range(3)):
            pass
    trainer.close()


def test_loops_that_could_not_be_gone_on_with_are_refused(tmp_path: Path) -> None:
    trainer, model = trainer_at(tmp_path / "a")
    for _ in trainer.batches(range(2)):
        step(trainer, model)
    with pytest.raises(InvalidRequest, match=r"epochs\(n\)"):
        trainer.batches(range(2))
    trainer.close()
    trainer, model = trainer_at(tmp_path / "b")
    for _ in trainer.epochs(1):
        for _ in trainer.batches(range(2)):
            step(trainer, model)
        with pytest.raises(InvalidRequest, match="one epoch"):
            trainer.batches(range(2))
    with pytest.raises(InvalidRequest, match="once"):
        trainer.epochs(3)
    trainer.close()


def once(place: Path, loader: Any, **more: Any) -> None:
    """A step or two, and away."""
    with pytest.raises(Preempted):
        again(place, loader, lease=Lease(looks=1), **more)


def again(place: Path, loader: Any, **more: Any) -> None:
    trainer, model = trainer_at(place, **more)
    with trainer:
        for _ in trainer.epochs(2):
            for _ in trainer.batches(loader):
                step(trainer, model)


def batches_of(count: int, size: int, seed: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(Rows(count), size, shuffle=True, generator=torch.Generator().manual_seed(seed))


class Counter:
    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + 6))


def test_other_data_are_noticed_before_a_step_is_made_of_them(tmp_path: Path) -> None:
    """More of it, another batch size, another order; a list of another length; a stream of other things; fewer."""
    once(tmp_path / "a", batches_of(24, 4, 1))
    for other in (batches_of(28, 4, 1), batches_of(24, 6, 1), batches_of(4, 4, 1)):
        with pytest.raises(InvalidRequest, match="place in the data"):
            again(tmp_path / "a", other)
    again(tmp_path / "a", batches_of(24, 4, 1))
    once(tmp_path / "b", [1, 2, 3])
    with pytest.raises(InvalidRequest, match="place in the data"):
        again(tmp_path / "b", [1, 2, 3, 4])
    with pytest.raises(InvalidRequest, match="by place"):
        again(tmp_path / "b", Counter(1))
    again(tmp_path / "b", [1, 2, 3])
    once(tmp_path / "c", Counter(1))
    with pytest.raises(InvalidRequest, match="others now"):
        again(tmp_path / "c", Counter(2))
    again(tmp_path / "c", Counter(1))


def test_loaders_in_which_nobody_finds_the_way_are_refused(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    trainer, _ = trainer_at(tmp_path)
    rows: Any = Rows()
    for loader, why in (
        (iter([1, 2]), "read only once"),
        ((n for n in range(3)), "read only once"),
        (7, "has no batches"),
        (DataLoader(rows, num_workers=1, persistent_workers=True), "random numbers"),
        (DataLoader(rows, num_workers=1, in_order=False), "in_order"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            trainer.batches(loader)
        trainer._passes = 0
    trainer.close()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    """Another model, another set of parts, another schema, another loop: by name, and with what to do."""
    import torch

    once(tmp_path, [1, 2, 3], state={"ema": {}})
    with pytest.raises(InvalidRequest, match=r"has state\['ema'\], which this program has not"):
        trainer_at(tmp_path)
    with pytest.raises(InvalidRequest, match="lacks scaler"):
        trainer_at(tmp_path, state={"ema": {}}, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(InvalidRequest, match="schema"):
        trainer_at(tmp_path, state={"ema": {}}, schema="another")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidRequest, match="does not fit this program's model"):
        PreemptibleTrainer(model, torch.optim.SGD(model.parameters()), place=tmp_path, state={"ema": {}})
    trainer, _ = trainer_at(tmp_path, state={"ema": {}})
    with pytest.raises(InvalidRequest, match="another loop"):
        trainer.batches([1, 2, 3])
    trainer.close()


def test_what_a_trainer_is_given_is_looked_at_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot say where it stands"):
        trainer_at(tmp_path, state={"it": object()})
    for wrong in (0, -1, True, 1.5, "soon"):
        with pytest.raises(InvalidRequest, match="save_every"):
            trainer_at(tmp_path, save_every=wrong)
    with pytest.raises(InvalidRequest, match="no place to save was named"):
        trainer_at(None)


def test_a_gradient_scaler_takes_part(tmp_path: Path) -> None:
    """Its scale is state like everything else."""
    import torch

    scales = []
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        trainer, model = trainer_at(tmp_path, scaler=scaler, lease=Lease(looks=3))
        with pytest.raises(Preempted):
            train(trainer, model, range(100))
        scales.append(scaler.get_scale())
    assert scales[1] > scales[0] > 65536


def test_parts_of_all_kinds_are_put_back_where_they_are() -> None:
    """The objects stay the same; only what they hold changes."""
    import torch

    things: dict[str, Any] = {
        "python": random.Random(1),
        "numpy": np.random.default_rng(2),
        "old numpy": np.random.RandomState(3),
        "torch": torch.Generator().manual_seed(4),
        "dict": {"a": 1},
        "list": [1, 2],
        "module": torch.nn.Linear(1, 1),
    }
    parts = {name: part_of(name, thing) for name, thing in things.items()}
    saved = {name: part.get() for name, part in parts.items() if name != "module"}
    saved["module"] = {name: value.clone() for name, value in parts["module"].get().items()}

    def drawn() -> list[float]:
        return [
            things["python"].random(),
            things["numpy"].random(),
            things["old numpy"].rand(),
            torch.rand(1, generator=things["torch"]).item(),
        ]

    before = drawn()
    things["dict"]["b"], things["list"][:] = 2, []
    put_back(parts, saved)
    assert drawn() == before
    assert (things["dict"], things["list"]) == ({"a": 1}, [1, 2])


# ---- what it tells ----


def test_what_is_told_is_taken_out_of_what_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """However it is cut into pieces; and what only looks like it is left in."""
    teller = ProgressWriter({"SUBLET_TRAIN": "1"})
    teller.write(Account(steps=3), loss=0.5, began=True)
    line = capfd.readouterr().err.encode()
    assert line.startswith(SEPARATOR)
    said = b"a\x1e not ours\nb" + line + b"c\n" + line
    for size in (1, 2, 7, len(said)):
        sieve, shown, told = Sieve(), b"", []
        for at in range(0, len(said), size):
            more, records = sieve.feed(said[at : at + size])
            shown += more
            told += records
        assert shown + sieve.rest() == b"a\x1e not ours\nbc\n"
        assert [(one["steps"], one["loss"]) for one in told] == [(3, 0.5)] * 2
    sieve = Sieve()
    assert sieve.feed(b"x\x1ehalf") == (b"x", [])
    assert sieve.rest() == b"\x1ehalf"
    long = SEPARATOR + b"y" * 100_000
    assert sieve.feed(long)[0] + sieve.rest() == long
    assert not ProgressWriter({}).listens


def test_progress_adds_up_over_lives() -> None:
    """Steps that were not saved and are done again are counted as such, bytes and saves of every life once."""
    progress = TrainingProgress()
    progress.new_life()
    progress.take({"steps": 5, "saves": 2, "bytes_saved": 100, "lost_seconds": 1.0, "began": True, "saved_steps": 5})
    progress.take({"steps": 9, "saves": 3, "bytes_saved": 150, "lost_seconds": 4.0, "saved_steps": 8, "loss": 0.5})
    progress.new_life()  # killed: of its last save the checkpoint does not know the bytes
    progress.take({"steps": 8, "saves": 3, "bytes_saved": 120, "lost_seconds": 4.0, "began": True, "saved_steps": 8})
    progress.take({"steps": 12, "saves": 4, "bytes_saved": 160, "lost_seconds": 6.0, "left": "preempted"})
    assert (progress.steps, progress.first_step, progress.steps_here, progress.steps_again) == (12, 5, 7, 1)
    assert (progress.saves, progress.bytes_saved, progress.lost_seconds) == (2, 90, 5.0)
    assert (progress.left, progress.saved_steps, progress.loss) == ("preempted", 8, 0.5)


def test_a_network_that_is_killed_without_a_word_goes_on_from_its_last_save(tmp_path: Path) -> None:
    """What was done behind it is done again, the same way."""
    expected = Program(tmp_path / "alone", shuffled).run()

    class Killed(BaseException):
        pass

    class Dying(list[float]):
        def append(self, _: float) -> None:
            super().append(_)
            if len(self) == 5:
                raise Killed

    found: dict[str, Any] = {}
    lives = -1
    while not found:
        lives += 1
        program = Program(tmp_path / "killed", shuffled, save_every=1, losses=Dying(), seed=lives)
        try:
            found = program.run()
        except Killed:
            continue
    assert lives >= 2
    assert same(expected, found)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
