"""A lease that takes the place of another, from a program: refused or waiting, the present one stays and is renewed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import aio
from sublet.errors import CapacityExceeded, InvalidRequest
from sublet.lease_end import EndReason
from tests.traces import PATIENCE_S, until


@pytest.fixture(scope="module")
def fabric(two_devices: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=two_devices) as made:
        yield made


def test_what_it_has_itself_counts_as_free(fabric: sublet.Fabric) -> None:
    """Both devices, of which it has one: with ``wait=0``, too."""
    with fabric.gpu(min_vram="32MiB") as old:
        with fabric.gpu(min_vram="32MiB", count=2, wait=0, replaces=old) as new:
            assert len(new.devices) == 2
            assert old.end is not None
            assert old.end.reason is EndReason.RELEASED
        assert new.end is not None


def test_a_refusal_leaves_the_present_lease(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="32MiB") as old:
        with pytest.raises(CapacityExceeded):
            fabric.gpu(min_vram="8GiB", replaces=old)
        with pytest.raises(InvalidRequest, match="is not a lease"):
            fabric.gpu(min_vram="32MiB", replaces="l-1")  # type: ignore[arg-type]
        assert old.end is None
        old.renew()


def test_while_it_waits_the_present_lease_is_renewed(fabric: sublet.Fabric) -> None:
    """Again and again, though nothing runs under it: so it lives for longer than its time to live."""
    found: list[sublet.Lease] = []
    with (
        fabric.gpu(min_vram="32MiB", ttl="60s", renew_every="500ms") as old,
        fabric.gpu(min_vram="32MiB", renew="always") as other,
    ):
        waiting = threading.Thread(
            target=lambda: found.append(fabric.gpu(min_vram="32MiB", count=2, ttl="60s", replaces=old))
        )
        with other.activity():
            waiting.start()
            until("renewals of the present lease", lambda: fabric.lease(old.id).renewals >= 3)
            assert old.end is None
        other.release()
        waiting.join(PATIENCE_S)
        assert len(found) == 1
        assert not old.remaining
        found[0].release()


def test_asyncio_has_it_as_well(fabric: sublet.Fabric) -> None:
    async def work() -> None:
        async with (
            await aio.connect(home=fabric.address.home) as mine,
            mine.gpu(min_vram="32MiB") as old,
            mine.gpu(min_vram="32MiB", count=2, replaces=old) as new,
        ):
            assert len(new.devices) == 2
            assert old.end is not None

    asyncio.run(work())
