"""What all tests on pretended cards leave is removed at their end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.longest_first import begin_first
from tests.rig.personalities import FOUR_H100, Personality
from tests.rig.rig import NewRig, Rig, forking_rig, remove_locks

FIRST: Final = (
    "tests/rig/test_office.py",
    "tests/rig/test_office.py, second office",
    "tests/rig/test_rounds.py",
    "test_gpu_suite.py",
    "tests/rig/test_workstation.py",
    "test_machines.py",
    "tests/rig/show",
    "test_schedules.py",
    "test_personalities.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin_first(items, Path(__file__).parent, FIRST)


@pytest.fixture(scope="session", autouse=True)
def _locks_of_cards_that_never_were() -> Iterator[None]:
    """Thousands of files in the machine's folders of locks, where this suite runs often."""
    yield
    remove_locks()


@pytest.fixture(scope="session")
def rig_place() -> Iterator[Path]:
    """For ``forking_rig``. Any user may look into it, as into the folders of a driver."""
    with tempfile.TemporaryDirectory(prefix="sublet-cards-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def new_rig(rig_place: Path) -> Iterator[NewRig]:
    """Makes the machine of a test, which has one."""
    with contextlib.ExitStack() as stack:

        def new(personality: Personality) -> Rig:
            return stack.enter_context(forking_rig(rig_place, personality))

        yield new


@pytest.fixture
def rig(new_rig: NewRig) -> Rig:
    return new_rig(FOUR_H100)
