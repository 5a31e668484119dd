"""The bound that PyTorch is given: when, how much, and on which card. With a module in its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.guest.caps import cap_torch

CARDS = ("local/GPU-a", "local/gpu7", "local/MIG-b")


class PretendedCuda:
    def __init__(self, begun: bool, count: int = 2) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.fractions: dict[int, float] = {}
        self.begun, self.count = begun, count

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, ordinal: int) -> Any:
        return SimpleNamespace(total_memory=1000 * (1 + ordinal))

    def set_per_process_memory_fraction(self, fraction: float, ordinal: int) -> None:
        self.fractions[ordinal] = fraction

    def _lazy_call(self, call: Callable[[], None]) -> None:
        if self.begun:
            call()
        else:
            self.waiting.append(call)


def test_one_that_is_loaded_is_bounded_when_cuda_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host devices have no ordinal; and nothing begins CUDA for it."""
    cuda = PretendedCuda(begun=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cap_torch(CARDS, (250, 1, 1000))
    assert not cuda.fractions
    cuda.waiting.pop()()
    assert cuda.fractions == {0: 0.25, 1: 0.5}


def test_more_than_there_is_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(begun=True, count=1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setenv("SUBLET_VRAM", "5000,1,1")
    cap_torch(CARDS)
    assert cuda.fractions == {0: 1.0}


def test_one_that_is_imported_later_is_bounded_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("cuda = None\ndef told(): return cuda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found: list[Any] = []
    monkeypatch.setattr("sublet.guest.caps._cap", lambda module, caps: found.append((module, list(caps))))
    before = list(sys.meta_path)
    assert cap_torch(CARDS, (250, 1, 1000))
    module = importlib.import_module("torch")
    assert found == [(module, [250, 1000])]
    assert sys.meta_path == before
    del sys.modules["torch"]  # for good: what was there before comes back by itself


def test_without_a_card_there_is_nothing_to_bound() -> None:
    before = list(sys.meta_path)
    assert not cap_torch(("local/gpu0",), (1,))
    assert not cap_torch((), ())
    assert sys.meta_path == before
