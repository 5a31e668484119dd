"""Offices that several files use: each process of tests starts one of a kind, when the first test asks for it.

A test may use one that leaves it as it found it: its leases are released when it ends, and its tenants, labels and
names of volumes are no other test's. One that kills an office, configures it or needs warm interpreters of its own
starts its own.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.wire.zygote import COLD_VARIABLE
from tests.conftest import COLD


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of an office with one host device of 1 GiB."""
    with _office(tmp_path_factory, "1x1GiB") as home:
        yield home


@pytest.fixture(scope="session")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of an office with two host devices of 4 GiB."""
    with _office(tmp_path_factory, "2x4GiB") as home:
        yield home


@contextlib.contextmanager
def _office(folders: pytest.TempPathFactory, devices: str) -> Iterator[Path]:
    home = folders.mktemp("office")
    with pytest.MonkeyPatch.context() as patch:  # the first test may be one that wants torch, and the others none
        patch.setenv(COLD_VARIABLE, ",".join((*COLD, "numpy")))
        ensure_office(home, words=("up", "--host-gpus", devices, "--foreground"))
    yield home
    with sublet.connect(home=home, start=False) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)
