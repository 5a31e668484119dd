"""Saves and restores random generators: Python, NumPy and torch, on the CPU and on every card.

A program that goes on from a checkpoint must draw what it would have drawn. Only the global generators are here; one
that a program made itself is a part of its state, and is named as such.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

PYTHON: Final = "python"
NUMPY: Final = "numpy"
TORCH: Final = "torch"
CUDA: Final = "cuda"


def chance_now() -> dict[str, Any]:
    """Where every global generator stands."""
    import torch

    found: dict[str, Any] = {PYTHON: random.getstate(), TORCH: torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found[NUMPY] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[CUDA] = torch.cuda.get_rng_state_all()
    return found


def set_chance(state: Mapping[str, Any]) -> None:
    """Put them back there. Of cards there may be fewer now, or none: those that are there get theirs."""
    import torch

    random.setstate(state[PYTHON])
    torch.set_rng_state(state[TORCH])
    if NUMPY in state:
        import numpy as np

        np.random.set_state(state[NUMPY])
    if torch.cuda.is_available():
        for number, one in enumerate(state.get(CUDA, ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, number)


def generators_of(loader: Any) -> list[Any]:
    """The generators that a ``DataLoader`` and its samplers were given, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found: list[Any] = []
    for owner in owners:
        one = getattr(owner, "generator", None)
        if hasattr(one, "get_state") and not any(one is other for other in found):
            found.append(one)
    return found


def set_generators(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Put them back; there are as many as there were, or the loader is another one and its batches will say so."""
    for one, state in zip(generators, states, strict=False):
        one.set_state(state)


class Apart:
    """Random numbers of their own for whatever is drawn within ``with apart:``, so that it can be drawn again without
    what the program draws in between. Those of cards stay common."""

    def __init__(self) -> None:
        """Begun from one number that is drawn from the common ones."""
        import torch

        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self._outside = chance_now()
        random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        if NUMPY in self._outside:
            sys.modules["numpy"].random.seed(seed % (1 << 32))
        self._inside = self._swap(self._outside)

    def __enter__(self) -> None:
        self._outside = self._swap(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._swap(self._outside)

    @staticmethod
    def _swap(state: dict[str, Any]) -> dict[str, Any]:
        before = chance_now()
        set_chance({name: one for name, one in state.items() if name != CUDA})
        return before
