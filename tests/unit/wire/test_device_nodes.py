"""Which device files a guest needs for the cards of its lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.wire.cards import device_nodes

CARDS = {"GPU-aa": 0, "GPU-bb": 3}


@pytest.fixture
def machine(tmp_path: Path) -> tuple[str, Path]:
    """Two cards, whose numbers are not their places, and all their files."""
    known, dev = tmp_path / "gpus", tmp_path / "dev"
    dev.mkdir()
    for uuid, minor in CARDS.items():
        folder = known / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
        (dev / f"nvidia{minor}").touch()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (dev / name).touch()
    return str(known), dev


def names(leased: list[str], machine: tuple[str, Path]) -> list[str]:
    known, dev = machine
    return sorted(path.removeprefix(f"{dev}/") for path in device_nodes(leased, known, str(dev)))


def test_a_guest_is_given_its_own_cards_and_no_others(machine: tuple[str, Path]) -> None:
    assert names(["GPU-bb"], machine) == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia3", "nvidiactl"]
    assert names(["GPU-aa", "GPU-bb"], machine) == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia3", "nvidiactl"]


def test_a_card_whose_file_is_not_found_is_told_from_one_that_needs_none(machine: tuple[str, Path]) -> None:
    assert names(["GPU-cc"], machine) == []
    assert names(["MIG-1"], machine) == []
    (machine[1] / "nvidia3").unlink()
    assert names(["GPU-bb"], machine) == []


def test_wsl_has_one_file_for_all_cards(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    assert device_nodes(["GPU-aa"], str(tmp_path / "none"), str(tmp_path)) == (f"{tmp_path}/dxg",)
