"""Random programs of session operations: host device and plain model never part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.devices.account import MemoryAccount
from sublet.devices.host import HostDevice
from sublet.devices.memory import MemoryPiece, MemoryTable
from sublet.testing.device_conformance import KERNELS
from tests.device_programs import CAP_BYTES, run_program
from tests.unit.guest.session_stage import Stage

PROGRAMS = 150
SOAK = 10_000


@pytest.fixture
def stage(tmp_path: Path, kernel_cache: str) -> Iterator[Stage]:
    """With a device that keeps the kernels loaded, so that a program's own load costs nothing."""
    made = Stage(tmp_path, kernel_cache, CAP_BYTES)
    keeper = HostDevice("keeper", MemoryAccount(1), cache=kernel_cache)
    keeper.load(KERNELS)
    yield made
    made.close()
    keeper.close()


def run(stage: Stage, seeds: range) -> int:
    done = 0
    for seed in seeds:
        session = stage.session()
        done += run_program(session, seed)
        session.close()
        assert stage.account.used_bytes == 0, f"seed {seed} left something"
    return done


@pytest.mark.slow
def test_random_programs_do_what_the_model_says(stage: Stage) -> None:
    """Over a connection, batch by batch; right operations and wrong ones."""
    assert run(stage, range(PROGRAMS)) > 30 * PROGRAMS


@pytest.mark.soak
def test_ten_thousand_programs_do_what_the_model_says(stage: Stage) -> None:
    run(stage, range(PROGRAMS, PROGRAMS + SOAK))


def off_by_one(self: HostDevice, target: MemoryPiece, at: int, source: MemoryPiece, offset: int, length: int) -> None:
    target.owner[at : at + length - 1] = source.owner[offset : offset + length - 1]


def forgets_a_pattern(self: HostDevice, piece: MemoryPiece, offset: int, length: int, pattern: bytes) -> None:
    piece.owner[offset : offset + length] = (pattern[:1] * length)[:length]


def lets_everything_pass(self: MemoryTable, handle: Any, offset: int, length: int, call: str) -> MemoryPiece:
    return self.get(handle, call)


def gives_nothing_back(self: MemoryAccount, size: int) -> None:
    self.used_bytes = min(self.used_bytes, self.cap_bytes)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (HostDevice, "_copy", off_by_one),
        (HostDevice, "_fill", forgets_a_pattern),
        (MemoryTable, "span", lets_everything_pass),
        (MemoryAccount, "give", gives_nothing_back),
    ],
)
def test_programs_find_a_device_that_is_wrong(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any
) -> None:
    """What could not fail would prove nothing. Beyond its own bounds a host device finds Python's."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        run(stage, range(100))
