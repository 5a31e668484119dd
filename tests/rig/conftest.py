"""What all tests on pretended cards leave is removed at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig.rig import remove_locks


@pytest.fixture(scope="session", autouse=True)
def _locks_of_cards_that_never_were() -> Iterator[None]:
    """Thousands of files in the machine's folders of locks, where this suite runs often."""
    yield
    remove_locks()
