"""CUDA in the program that holds a lease is seen, and explained before anything is sent."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.client.model import LeasedDevice
from sublet.compute import posting
from sublet.compute.posting import check_holder
from sublet.errors import InvalidRequest
from sublet.guest.cargo import encode
from sublet.values import Kind


def lease(kind: Kind = Kind.GPU, *, host: bool = False) -> Any:
    return SimpleNamespace(devices=(LeasedDevice(id="n/GPU-1", kind=kind, amount=1 << 30, host=host),))


class Driver:
    """libcuda as ``ctypes`` has it, in a process with contexts on these cards."""

    def __init__(self, *active: bool, begun: bool = True) -> None:
        self.active, self.begun = active, begun

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.active)
        return 0 if self.begun else 3

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = self.active[device]
        return 0


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("driver", [None, Driver(), Driver(True, begun=False), Driver(False, False)])
def test_who_has_no_context_is_left_alone(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """``torch.cuda.is_available()`` begins CUDA and makes none."""
    monkeypatch.setattr(posting, "loaded_driver", lambda: driver)
    check_holder(lease())


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(("driver", "said"), [(Driver(False, True), "on a card"), (Driver(True, True), "on 2 cards")])
def test_a_context_is_named(monkeypatch: pytest.MonkeyPatch, driver: Driver, said: str) -> None:
    monkeypatch.setattr(posting, "loaded_driver", lambda: driver)
    with pytest.raises(InvalidRequest, match=said):
        check_holder(lease())
    check_holder(lease(host=True))
    check_holder(lease(Kind.CPU))
    monkeypatch.setenv(posting.ALLOWED_BY, "allow")
    check_holder(lease())


def test_torch_that_has_begun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", begun)
    with pytest.raises(InvalidRequest, match="torch has begun to use CUDA"):
        check_holder(lease())


@pytest.mark.needs("torch")
def test_a_tensor_on_a_gpu_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here, so a tensor only says that it is on one."""
    import torch

    from sublet.guest import cargo

    class OnGpu(torch.Tensor):  # type: ignore[misc]
        is_cuda = True
        device = "cuda:0"

    real = cargo.tensor_reducers
    monkeypatch.setattr(
        "sublet.guest.cargo.tensor_reducers", lambda table: {**(made := real(table)), OnGpu: made[torch.Tensor]}
    )
    tensor = torch.ones(3).as_subclass(OnGpu)
    with pytest.raises(InvalidRequest, match=r"on cuda:0 cannot travel.*\.cpu\(\)"):
        encode(((tensor,), {}), "(args, kwargs)")
