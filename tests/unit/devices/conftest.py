"""What tests of devices share."""

from __future__ import annotations

import pytest

from sublet.devices.warp_modules import has_warp, warp


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One folder for compiled kernels in each worker: the first compilation in an empty one takes a second or two."""
    cache = str(tmp_path_factory.mktemp("kernels") / "cache")
    if has_warp():  # a guest goes without; here are many modules in one process, and it ends as Python does
        warp(cache).config.use_precompiled_headers = True
    return cache
