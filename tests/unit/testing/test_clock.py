"""A clock that stands still until it is told otherwise."""

from __future__ import annotations

import pytest

from sublet.clock import Clock
from sublet.errors import InvalidRequest
from sublet.testing import HeldClock
from sublet.values import NS_PER_S


def test_time_stands_still_until_it_is_moved() -> None:
    """Instants and wall time move together."""
    clock = HeldClock()
    now, wall = clock.now_ns(), clock.wall_ns()
    assert (clock.now_ns(), clock.wall_ns()) == (now, wall)
    assert clock.advance("1m30s") == now + 90 * NS_PER_S
    assert clock.advance(0.5) == clock.now_ns() == now + 90_500_000_000
    assert clock.wall_ns() == wall + 90_500_000_000


def test_an_instant_never_goes_back() -> None:
    """Moving backwards is a mistake in the test, and said."""
    clock = HeldClock()
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance_ns(-1)
    with pytest.raises(InvalidRequest):
        clock.advance(-1)


def test_the_wall_clock_jumps_alone() -> None:
    """Somebody set it; no instant moves."""
    clock = HeldClock()
    now, wall = clock.now_ns(), clock.wall_ns()
    clock.jump_wall(-3600)
    assert clock.now_ns() == now
    assert clock.wall_ns() == wall - 3600 * NS_PER_S


def test_a_reboot_starts_another_domain_with_small_instants() -> None:
    """Old and new instants do not compare, and the domain says so."""
    clock: Clock = HeldClock()
    assert isinstance(clock, HeldClock)
    domain, wall = clock.domain, clock.wall_ns()
    clock.reboot(down_s=60)
    assert clock.domain != domain
    assert clock.now_ns() == NS_PER_S
    assert clock.wall_ns() == wall + 60 * NS_PER_S
