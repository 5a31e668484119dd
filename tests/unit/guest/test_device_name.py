"""What PyTorch and Warp are told to compute on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sublet
from sublet.errors import NotFound, Unsupported
from sublet.guest import current as current_module
from sublet.guest.current import note_host_device
from sublet.values import NS_PER_S, Epoch, LeaseId
from sublet.wire.cards import card_environment, prefer_cards
from sublet.wire.page import PageView, PageWriter, time_namespace

Guest = Callable[..., None]


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    """This process as a guest with these devices."""
    writers: list[PageWriter] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def become(*devices: str) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        path = str(tmp_path / f"page{len(writers)}")
        view = PageView(
            lease=LeaseId("l"),
            epoch=Epoch(1, 1),
            deadline_ns=now_ns + 60 * NS_PER_S,
            now_ns=now_ns,
            devices=devices,
            namespace=time_namespace(),
        )
        writers.append(PageWriter.create(path, view))
        monkeypatch.setenv(current_module.PAGE_VARIABLE, path)

    yield become
    for writer in writers:
        writer.close()


def test_a_host_device_is_the_cpu(guest: Guest) -> None:
    guest("node/gpu0", "node/gpu1")
    assert sublet.device() == sublet.device(1) == "cpu"
    with pytest.raises(NotFound):
        sublet.device(2)
    guest()
    assert sublet.device() == "cpu"


def test_cards_are_counted_as_the_process_sees_them(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    guest("node/GPU-bb", "node/GPU-aa")
    assert (sublet.device(), sublet.device(1)) == ("cuda:0", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-cc,GPU-bb")
    assert (sublet.device(), sublet.device(1)) == ("cuda:2", "cuda:0")
    monkeypatch.setenv("SUBLET_DEVICE", "1")
    assert (sublet.device(), sublet.device(0)) == ("cuda:0", "cuda:2"), "its own, where it was given one"


def test_outside_of_a_guest_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(current_module.PAGE_VARIABLE, raising=False)
    with pytest.raises(Unsupported):
        sublet.device()


def test_the_leased_cards_come_first_and_the_others_stay_visible(tmp_path: Path) -> None:
    for number, uuid in enumerate(("GPU-aa", "GPU-bb", "GPU-cc")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\n")
    (tmp_path / "0000:09:00.0").mkdir()
    (tmp_path / "0000:09:00.0" / "information").write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    assert prefer_cards(["GPU-cc"], str(tmp_path)) == "GPU-cc,GPU-aa,GPU-bb", "CUDA stops at a name that is none"
    assert prefer_cards(["MIG-1", "MIG-2"], str(tmp_path)) == "MIG-1"
    assert prefer_cards([], str(tmp_path)) == ""
    assert prefer_cards(["GPU-cc"], str(tmp_path / "none")) == "GPU-cc"


@pytest.mark.parametrize("holders", [None, "", "-1", "0", "GPU-other", "GPU-bb,GPU-other"])
def test_the_cards_of_the_lease_are_those_that_a_guest_is_shown(holders: str | None) -> None:
    """Whatever the holder's own process was shown: it may be kept off all cards, or have one of its own."""
    given = {} if holders is None else {"CUDA_VISIBLE_DEVICES": holders}
    found = card_environment({"GPU-bb": 3 << 30, "GPU-cc": 2 << 30}, given)
    assert found["CUDA_VISIBLE_DEVICES"].startswith("GPU-bb,GPU-cc")
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert found["CUPY_GPU_MEMORY_LIMIT"] == str(2 << 30)


def test_a_holder_may_choose_among_the_cards_of_the_lease() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-cc", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    found = card_environment({"GPU-bb": 1, "GPU-cc": 1}, chosen)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-cc"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in found
    assert card_environment({}, chosen) == {}
    found = card_environment({"GPU-bb": 1, "GPU-cc": 1}, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, "GPU-cc")
    assert found["CUDA_VISIBLE_DEVICES"].startswith("GPU-cc,GPU-bb"), "a worker with a card of its own finds that first"


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "said",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "[Errno 2] No such file or directory: 'nvidia-smi'",
    ],
)
def test_an_error_for_want_of_a_gpu_is_noted_on_a_host_device_once(guest: Guest, said: str) -> None:
    guest("node/gpu0")
    error = RuntimeError(said)
    note_host_device(error)
    note_host_device(error)
    (note,) = error.__notes__
    assert "sublet.device()" in note


def test_other_errors_and_other_leases_get_no_such_note(guest: Guest) -> None:
    errors = [RuntimeError("Torch not compiled with CUDA enabled"), ValueError("x"), Wordless()]
    note_host_device(errors[0])  # outside a guest
    guest("node/gpu0")
    note_host_device(errors[1])
    note_host_device(errors[2])
    for devices in ((), ("node/GPU-bb",)):  # of cores, and of a card
        guest(*devices)
        note_host_device(errors[0])
    assert not [error for error in errors if hasattr(error, "__notes__")]
