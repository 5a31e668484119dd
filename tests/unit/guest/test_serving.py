"""What frameworks keep of a device is given back, by their own calls, and only where they have begun to use it."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.devices import primary_contexts
from sublet.devices.warp_modules import warp as begin_warp
from sublet.guest import serving
from sublet.guest.inbox import Inbox
from sublet.guest.serving import free_caches
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.guests import Service, Visit
from tests.traces import PATIENCE_S


def torch(calls: list[str], *, begun: bool) -> Any:
    cuda = SimpleNamespace(is_initialized=lambda: begun, empty_cache=lambda: calls.append("torch"))
    return SimpleNamespace(cuda=cuda)


def cupy(calls: list[str]) -> Any:
    pool = SimpleNamespace(free_all_blocks=lambda: calls.append("cupy"))
    return SimpleNamespace(get_default_memory_pool=lambda: pool, get_default_pinned_memory_pool=lambda: pool)


class WarpDevice(SimpleNamespace):
    def __str__(self) -> str:
        return "cuda:0"


def warp(calls: list[str], *, pools: bool = True, begun: bool = True, used: bool = True, old: bool = False) -> Any:
    context = SimpleNamespace(runtime=object() if begun else None)
    return SimpleNamespace(
        **({"context": context} if old else {"_src": SimpleNamespace(context=context)}),
        get_cuda_devices=lambda: [WarpDevice(has_context=used)],
        is_mempool_enabled=lambda device: pools,
        get_mempool_release_threshold=lambda device: 7,
        set_mempool_release_threshold=lambda device, most: calls.append(f"{device} keeps {most}"),
        synchronize_device=lambda device: calls.append(f"{device} waited for"),
    )


@pytest.fixture
def with_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has one on a card."""
    monkeypatch.setattr(primary_contexts, "contexts", lambda driver: 1)


@pytest.mark.usefixtures("with_context")
def test_each_that_is_loaded_and_has_begun_is_asked() -> None:
    calls: list[str] = []
    loaded = {"torch": torch(calls, begun=True), "cupy": cupy(calls), "warp": warp(calls)}
    assert free_caches(loaded) == ("torch", "cupy", "warp")
    assert calls == ["torch", "cupy", "cupy", "cuda:0 keeps 0", "cuda:0 waited for", "cuda:0 keeps 7"]
    assert free_caches({"warp": warp(calls, old=True)}) == ("warp",)


@pytest.mark.parametrize("which", ["torch", "cupy", "warp", "warp elsewhere", "without pools"])
def test_asking_does_not_begin_anything(which: str) -> None:
    calls: list[str] = []
    loaded = {
        "torch": {"torch": torch(calls, begun=False)},
        "cupy": {"cupy": cupy(calls)},
        "warp": {"warp": warp(calls, begun=False)},
        "warp elsewhere": {"warp": warp(calls, used=False)},
        "without pools": {"warp": warp(calls, pools=False)},
    }[which]
    assert free_caches(loaded) == ()
    assert not calls


def test_torch_is_asked_again_once_its_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a capture it refuses; what it kept was then copied along with the guest."""
    calls: list[str] = []

    def empty_cache() -> None:
        calls.append("asked")
        if len(calls) < 3:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    fake = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, empty_cache=empty_cache))
    assert free_caches({"torch": fake}) == ("torch",)
    assert calls == ["asked"] * 3
    calls.clear()
    monkeypatch.setattr(serving, "CAPTURE_S", 0.0)
    assert free_caches({"torch": fake}) == (), "one that does not come to an end is not waited for"


@pytest.mark.usefixtures("with_context")
def test_one_that_fails_does_not_keep_the_others_from_it() -> None:
    calls: list[str] = []
    broken = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: 1 / 0))
    assert free_caches({"torch": broken, "cupy": cupy(calls)}) == ("cupy",)


def test_a_guest_that_serves_frees_them_and_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(serving, "free_caches", lambda: freed.append(True))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking, given = socket.socketpair()
    inbox = Inbox(theirs)
    visit = Visit(
        service=Service.CACHES, tenant=TenantId("local"), lease=LeaseId("l-1"), epoch=Epoch(1, 1), operations=()
    )
    thread = serving.start_serving(inbox, {})
    with ours, asking:
        socket.send_fds(ours, [dumps(visit)], [given.fileno()])
        given.close()
        asking.settimeout(PATIENCE_S)
        assert asking.recv(1) == b""
        assert freed
    thread.join(PATIENCE_S)
    inbox.close()


def test_the_frameworks_that_are_here_answer_to_these_names(tmp_path: Path) -> None:
    """So that a version that has renamed one of the calls is noticed where there is no GPU."""
    warp_here = pytest.importorskip("warp", reason="warp is not installed")
    for name in ("get_cuda_devices", "is_mempool_enabled", "get_mempool_release_threshold", "synchronize_device"):
        assert callable(getattr(warp_here, name))
    begin_warp(str(tmp_path / "kernels"))
    assert serving._has_begun(warp_here)
    assert isinstance(type(warp_here.get_device("cpu")).has_context, property)
    assert set(serving._FREE) == {"torch", "cupy", "warp"}
