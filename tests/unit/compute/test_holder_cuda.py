"""CUDA in the program that holds a lease is seen, and explained before anything is sent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.client.model import LeasedDevice
from sublet.compute import holder_cuda
from sublet.compute.holder_cuda import check_holder, open_cards
from sublet.errors import InvalidRequest
from sublet.guest.cargo import encode
from sublet.values import Kind


def lease(kind: Kind = Kind.GPU, *, host: bool = False) -> Any:
    return SimpleNamespace(devices=(LeasedDevice(id="n/GPU-1", kind=kind, amount=1 << 30, host=host),))


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this process has open, as it were."""
    os.symlink("/dev/null", tmp_path / "0")
    os.symlink("/dev/nvidiactl", tmp_path / "4")
    monkeypatch.setattr(holder_cuda, "open_cards", lambda: open_cards(str(tmp_path)))
    monkeypatch.setitem(sys.modules, "torch", None)
    return tmp_path


def test_who_merely_looks_is_left_alone(cards: Path) -> None:
    check_holder(lease())


def test_an_open_card_is_named(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink("/dev/nvidia0", cards / "5")
    os.symlink("/dev/nvidia-uvm", cards / "6")
    with pytest.raises(InvalidRequest, match="/dev/nvidia-uvm, /dev/nvidia0 open"):
        check_holder(lease())
    check_holder(lease(host=True))
    check_holder(lease(Kind.CPU))
    monkeypatch.setenv(holder_cuda.ALLOWED_BY, "allow")
    check_holder(lease())


def test_torch_that_has_begun_is_named(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", begun)
    with pytest.raises(InvalidRequest, match="torch has begun to use CUDA"):
        check_holder(lease())


@pytest.mark.needs("torch")
def test_a_tensor_on_a_gpu_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here, so a tensor only says that it is on one."""
    import torch

    from sublet.guest import tensors

    class OnGpu(torch.Tensor):  # type: ignore[misc]
        is_cuda = True
        device = "cuda:0"

    real = tensors.tensor_reducers
    monkeypatch.setattr(
        "sublet.guest.cargo.tensor_reducers", lambda table: {**(made := real(table)), OnGpu: made[torch.Tensor]}
    )
    tensor = torch.ones(3).as_subclass(OnGpu)
    with pytest.raises(InvalidRequest, match=r"on cuda:0 cannot travel.*\.cpu\(\)"):
        encode(((tensor,), {}), "(args, kwargs)")
