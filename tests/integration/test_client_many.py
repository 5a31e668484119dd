"""Many leases of one request from a real office: renewed, used and given back together, and gone with their holder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import aio
from tests.traces import until

HOLDER = """
import sys, time
import sublet
fabric = sublet.connect(home=sys.argv[1], start=False)
leases = fabric.many(20).memory("1MiB", ttl="10m", labels={"of": "holder"})
print(len(leases), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def home(two_devices: Path) -> Path:
    return two_devices


@pytest.fixture
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home, start=False) as fabric:
        yield fabric


def test_two_hundred_leases_live_and_end_together(fabric: sublet.Fabric) -> None:
    with fabric.many(200, at_least=200).memory(
        "1MiB", ttl="5m", renew="always", renew_every="1s", labels={"of": "many"}
    ) as leases:
        assert len({lease.id for lease in leases}) == len({lease.epoch for lease in leases}) == 200
        first = leases[0]
        until("renewals of all", lambda: all(one.renewals > 1 for one in fabric.leases()), 60)
        assert all(lease.end is None for lease in leases)
        leases[7].release()
        assert first.end is None
    assert fabric.wait_ended({"of": "many"}) == 0
    assert [one for one in fabric.leases() if one.status in ("active", "noticed")] == []
    assert {lease.end.reason for lease in leases if lease.end is not None} == {"released"}
    leases.release()  # twice is harmless
    fabric.release(leases)


def test_functions_run_under_each(fabric: sublet.Fabric) -> None:
    with fabric.many(2).cpu(1, memory="64MiB", ttl="5m") as leases:
        assert {kind for device in leases[0].devices for kind in [device.kind.value]} == {"cpu", "memory"}
        pids = {lease.run(os.getpid) for lease in leases}
    assert len(pids) == len(leases)


def test_a_program_that_is_killed_leaves_none(home: Path, fabric: sublet.Fabric) -> None:
    """They are bound to their holder's process, as single ones are."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(home)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "20\n"
        assert len([one for one in fabric.leases() if one.labels.get("of") == "holder"]) == 20
        holder.send_signal(signal.SIGKILL)
    until("none of them", lambda: not [one for one in fabric.leases() if one.labels.get("of") == "holder"], 60)


def test_a_fabric_that_closes_gives_all_back(home: Path, fabric: sublet.Fabric) -> None:
    with sublet.connect(home=home, start=False) as other:
        kept = other.many(50).memory("1MiB", labels={"of": "closed"})
        assert len(kept) == 50
    live = [one for one in fabric.leases() if one.labels.get("of") == "closed" and one.end is None]
    assert live == []


def test_leases_of_another_fabric_are_refused_and_stay(home: Path, fabric: sublet.Fabric) -> None:
    with sublet.connect(home=home, start=False) as other, other.many(2).memory("1MiB") as theirs:
        for bad in (theirs, ["l-1"], [None]):
            with pytest.raises(sublet.InvalidRequest, match="not a lease of this fabric"):
                fabric.release(bad)  # type: ignore[arg-type]
        assert all(lease.end is None for lease in theirs)


def test_the_same_for_asyncio(home: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with await aio.connect(home=home, start=False) as fabric:
            async with fabric.many(30, at_least=30).memory("1MiB", ttl="5m") as leases:
                assert len({lease.epoch for lease in leases}) == 30
                await leases[3].release()
            assert all(lease.end is not None for lease in leases)
            some = await fabric.many(5).memory("1MiB", labels={"of": "aio"})
            await fabric.release(some[:2])
            assert [lease.end is None for lease in some] == [False, False, True, True, True]
            assert await fabric.wait_ended({"of": "aio"}, timeout=0) in range(3, 6)
            await some.release()
            assert await fabric.wait_ended({"of": "aio"}) == 0
            with pytest.raises(sublet.CapacityExceeded):
                await fabric.many(9, at_least=9).cpu(4096)

    asyncio.run(story())
