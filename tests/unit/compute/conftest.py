"""Where kernels are kept that were compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.compute.session_pair import SessionPair


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One folder for all tests of a process."""
    return str(tmp_path_factory.mktemp("kernels") / "cache")


@pytest.fixture
def pair(tmp_path: Path, kernel_cache: str) -> Iterator[SessionPair]:
    made = SessionPair(tmp_path, kernel_cache)
    yield made
    made.close()
