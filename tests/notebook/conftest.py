"""Two namespaces that follow each other: the notebook's here, the device's in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.sides import Notebook, Other


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()


@pytest.fixture
def nb(other: Other) -> Notebook:
    return Notebook(other)
