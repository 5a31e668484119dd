"""A small network trained through notices at every step, with every kind of loader: bit for bit the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from sublet.lease_end import EndReason
from sublet.training import Preempted, PreemptibleTrainer

pytestmark = pytest.mark.needs("torch")

EPOCHS: Final = 2
SAMPLES: Final = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The network is tiny: to share it among threads would cost more than it is."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Notice:
    reason: EndReason = EndReason.PREEMPTED
    detail: str = "a test"


@dataclass
class Lease:
    """Says that it will be taken once it was asked so many times."""

    looks: int = 1 << 30

    @property
    def noticed(self) -> Notice | None:
        self.looks -= 1
        return Notice() if self.looks < 0 else None


@dataclass
class Program:
    """One life of a training program. Nothing of it outlives it but what is at the place."""

    place: Path
    make: Callable[[], Any]
    lease: Lease = field(default_factory=Lease)
    save_every: int | str = "1h"
    keywords: dict[str, Any] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seed: int = 0

    def live(self, epochs: int = EPOCHS) -> tuple[Preempted | None, dict[str, Any]]:
        """How it left, or what it came to."""
        try:
            return None, self.run(epochs)
        except Preempted as left:
            return left, {}

    def run(self, epochs: int = EPOCHS) -> dict[str, Any]:
        """To the end, or to `Preempted`; the weights and everything else that was trained."""
        import torch

        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(self.seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        warm = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        own = np.random.default_rng(3)
        ema: dict[str, Any] = {}
        trainer = PreemptibleTrainer(
            model,
            optimizer,
            scheduler=warm,
            state={"own": own, "ema": ema},
            place=self.place,
            lease=self.lease,
            save_every=self.save_every,
        )
        loader = self.make()
        with trainer:
            for epoch in trainer.epochs(epochs):
                shift = torch.rand(1) * epoch  # drawn before the first batch, so it must be drawn again
                for batch in trainer.batches(loader, **self.keywords):
                    batch = torch.as_tensor(np.asarray(batch))
                    x = batch.float().reshape(-1, 4) + shift + torch.randn(1) * random.random() + own.random()
                    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
                    trainer.step(loss, seen=float(batch.float().sum()))
                    warm.step()  # behind the step, in the same body
                    ema["loss"] = 0.9 * ema.get("loss", 0.0) + 0.1 * loss.item()
                    self.seen.append(int(batch.float().sum()))
                    self.losses.append(loss.item())
                trainer.metrics.setdefault("epochs", []).append(epoch)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return state | {
            "lr": optimizer.param_groups[0]["lr"],
            "ema": dict(ema),
            "own": own.random(),
            "next": (random.random(), float(np.random.rand()), float(torch.rand(1))),
            "epochs": list(trainer.metrics["epochs"]),
            "steps": trainer.steps,
        }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


class Rows:
    """A data set with indices that draws random numbers, as augmentation does."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        import torch

        return torch.full((4,), float(n)) + torch.rand(4).round(decimals=2) * 0.01


class Stream:
    """A loader that knows where it stands, and keeps it in a way of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[float]]:
        while self.at < 6:
            self.at += 1
            yield [float(self.at + k) for k in range(16)]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Twice:
    """Nothing but an iterable, shuffled by the global random numbers each time."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(6))
        random.shuffle(order)
        return iter([np.full(8, n, np.float32) for n in order])


def shuffled(**more: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Rows(), batch_size=4, shuffle=True, **more)


def seeded() -> Any:
    import torch

    return shuffled(generator=torch.Generator().manual_seed(9))


def sampled() -> Any:
    import torch
    from torch.utils.data import DataLoader, WeightedRandomSampler

    weights = torch.arange(1.0, SAMPLES + 1)
    return DataLoader(Rows(), batch_size=4, sampler=WeightedRandomSampler(weights.tolist(), SAMPLES), drop_last=True)


def endless() -> Any:
    """Draws its indices little by little, and not all at once."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    own = torch.Generator().manual_seed(4)
    return DataLoader(Rows(), batch_size=4, sampler=RandomSampler(Rows(), True, 40, generator=own))


def distributed() -> Any:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    return DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, 1, seed=5))


def iterable() -> Any:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Numbers(IterableDataset[Any]):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return (torch.full((4,), n) + torch.rand(4) for n in range(SAMPLES))

    return DataLoader(Numbers(), batch_size=4)


LOADERS: Final[dict[str, Callable[[], Any]]] = {
    "shuffled": shuffled,
    "with a generator": seeded,
    "weighted": sampled,
    "drawn little by little": endless,
    "distributed sampler": distributed,
    "iterable": iterable,
    "stateful": Stream,
    "list": lambda: [[float(n + k) for k in range(16)] for n in range(6)],
    "array": lambda: np.arange(96, dtype=np.float32).reshape(6, 16),
    "anything": Twice,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_network_is_the_same_after_a_notice_at_every_step(tmp_path: Path, name: str) -> None:
    """The losses one after the other too; and no batch comes twice, none is left out."""
    make = LOADERS[name]
    alone = Program(tmp_path / "alone", make)
    expected = alone.run()
    seen: list[int] = []
    losses: list[float] = []
    found: dict[str, Any] = {}
    for life in range(200):
        program = Program(tmp_path / "preempted", make, Lease(looks=1), seed=life)
        left, found = program.live()
        seen += program.seen
        losses += program.losses
        if left is None:
            break
        assert (left.code, left.step) == (76, len(seen))
    assert life >= len(alone.seen) // 2
    assert seen == alone.seen
    assert losses == alone.losses
    assert same(expected, found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_workers_go_on_where_they_were(tmp_path: Path, deterministic: bool) -> None:
    """Random numbers that workers draw are drawn again, unless the program says that there are none."""
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": deterministic}

    def make() -> Any:
        from torch.utils.data import DataLoader

        rows = [np.full(4, n, np.float32) for n in range(SAMPLES)]
        return DataLoader(rows if deterministic else Rows(), 4, shuffle=True, **workers)

    keywords = {"deterministic": True} if deterministic else {}
    alone = Program(tmp_path / "alone", make, keywords=keywords)
    expected = alone.run(2)
    seen: list[int] = []
    found: dict[str, Any] = {}
    for life in range(20):
        program = Program(tmp_path / "preempted", make, Lease(looks=4), keywords=keywords, seed=life)
        left, found = program.live(2)
        seen += program.seen
        if left is None:
            break
    assert life >= 2
    assert seen == alone.seen
    assert same(expected, found)


def test_a_finished_program_that_is_run_again_does_nothing_more(tmp_path: Path) -> None:
    expected = Program(tmp_path, shuffled).run()
    again = Program(tmp_path, shuffled, seed=5)
    found = again.run()
    assert again.seen == []
    assert found["steps"] == expected["steps"]
    assert same(
        {k: v for k, v in found.items() if k not in ("next", "own")},
        {k: expected[k] for k in found if k not in ("next", "own")},
    )
    more = Program(tmp_path, shuffled)
    assert more.run(EPOCHS + 1)["steps"] == expected["steps"] * (EPOCHS + 1) // EPOCHS
    assert len(more.seen) == expected["steps"] // EPOCHS
