"""What tests of devices share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One folder for compiled kernels in each worker: the first compilation in an empty one takes a second or two."""
    return str(tmp_path_factory.mktemp("kernels") / "cache")
