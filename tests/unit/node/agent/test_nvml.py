"""Which device files a guest needs for the cards of its lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.node.agent.nvml import survey
from sublet.wire.cards import device_nodes
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml

SHARED = ["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"]


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """The files of two cards, one of which is split, and of the rights to two of its parts."""
    dev = tmp_path / "dev"
    (dev / "nvidia-caps").mkdir(parents=True)
    for name in (*SHARED, "nvidia10", "nvidia11", *(f"nvidia-caps/nvidia-cap{number}" for number in (21, 22, 30, 31))):
        (dev / name).touch()
    rights = tmp_path / "proc/driver/nvidia/capabilities/gpu11/mig"
    for gpu, numbers in ((1, (21, 22)), (2, (30, 31))):
        for folder, number in zip((f"gi{gpu}", f"gi{gpu}/ci0"), numbers, strict=True):
            (rights / folder).mkdir(parents=True, exist_ok=True)
            (rights / folder / "access").write_text(f"DeviceFileMinor: {number}\nDeviceFileMode: 292\n")
    return dev


def names(*leased: tuple[str, ...], dev: Path) -> list[str]:
    return sorted(path.removeprefix(f"{dev}/") for path in device_nodes(leased, str(dev)))


def test_a_guest_is_given_its_own_cards_and_no_others(dev: Path) -> None:
    """The number of a file is the driver's, and not the place of the card in a list."""
    first, second = survey(FakeNvml([FakeCard(0), FakeCard(1)])).cards
    assert names(second.nodes, dev=dev) == sorted((*SHARED, "nvidia11"))
    assert names(first.nodes, second.nodes, dev=dev) == sorted((*SHARED, "nvidia10", "nvidia11"))


def test_a_guest_of_a_part_is_given_the_rights_to_it_and_to_no_other_part(dev: Path) -> None:
    """Parts of cards could be lent to tenant local alone."""
    split = FakeCard(1, instances={0: 10 << 30, 1: 10 << 30})
    parts = survey(FakeNvml([split]), root=str(dev.parent)).cards
    found = [names(part.nodes, dev=dev) for part in parts]
    assert found[0] == sorted((*SHARED, "nvidia11", "nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap22"))
    assert found[1] == sorted((*SHARED, "nvidia11", "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31"))
    (dev / "nvidia-caps/nvidia-cap31").unlink()
    assert names(parts[1].nodes, dev=dev) == [], "without all of them it would see no card"


def test_a_card_whose_file_is_not_found_is_told_from_one_that_needs_none(dev: Path) -> None:
    (card,) = survey(FakeNvml([FakeCard(7)])).cards
    assert names(card.nodes, dev=dev) == []
    assert names((), dev=dev) == [], "the driver did not tell"
    silent = FakeCard(0)
    silent.unknown.add("nvmlDeviceGetMinorNumber")
    (card,) = survey(FakeNvml([silent])).cards
    assert card.nodes == ()


def test_wsl_has_one_file_for_all_cards(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    assert device_nodes([()], str(tmp_path)) == (f"{tmp_path}/dxg",)
