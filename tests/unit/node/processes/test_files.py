"""Descriptors: as many as may be had, and what they are room for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sublet.node.processes.files import FILES_WANTED, allowance

LOOK = """
import os, resource, sys
from sublet.node.processes.files import give_back, raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
if os.geteuid() == 0:
    os.setuid(65534)
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
give_back()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 16_384])
def test_what_is_allowed_fits_and_is_said_if_it_is_little(limit: int) -> None:
    found = allowance(limit, guests_max=2048, holders_max=2048)
    assert found.guests >= 1
    assert found.holders >= 1
    assert limit < 256 or found.guests * 6 + found.holders + 96 <= limit
    assert bool(found.why) == (found.guests < 2048 or found.holders < 2048)
    assert not found.why or str(limit) in found.why


def test_what_is_wanted_is_enough_for_all() -> None:
    assert allowance(FILES_WANTED, guests_max=2048, holders_max=2048) == (2048, 2048, "")


def test_the_limit_is_raised_as_far_as_it_may_and_guests_get_what_was_before() -> None:
    said = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines() == ["4096 4096 4096"] * 2 + ["64 4096"]
