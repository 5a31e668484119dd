"""Programs that save into volumes, with an office and without: the holder, guests it lent the volume to, and one that
was paused past its lease's end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import sublet
from tests.traces import PATIENCE_S, PUT_AWAY_S, until


@pytest.fixture(scope="module")
def home(one_device: Path) -> Path:
    return one_device


@pytest.fixture(scope="module")
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home) as made:
        yield made


def count_up(by: int) -> Any:
    """In a worker."""
    import sublet

    here = sublet.current()
    state = sublet.Durable.restore(here.volume)
    here.on_checkpoint(state.checkpoint)
    state.mutate(lambda it: it.update(n=it["n"] + by))
    report: Any = here.checkpoint()
    return here.volume.name, here.volume.lease, report.number


SAVES = """
import sublet, sys
state = sublet.Durable.restore(sublet.current().volume)
state.value["n"] = 100
state.checkpoint()
sys.stdin.read()
"""


def test_what_is_saved_is_found_under_its_name_and_the_end_says_when(fabric: sublet.Fabric) -> None:
    with fabric.block("4MiB", name="found") as block:
        with sublet.Durable({"n": 1}, block) as state:
            state.checkpoint()
        with fabric.cpu(1) as cpu:
            assert cpu.options(volume=block).run(count_up, 5) == ("found", block.id, 2)
            with cpu.start([sys.executable, "-c", SAVES], volume=block) as guest:
                until("a third checkpoint", lambda: sublet.Durable.restore(block).value["n"] == 100)
                assert block.busy, "who runs a program that saves there uses it"
                guest.close_stdin()
                assert guest.wait(PATIENCE_S) == 0
    for lease in (block, cpu):
        until("the time of the last save", lambda lease=lease: saved_at(fabric, lease.id), PUT_AWAY_S)  # type: ignore[misc]
    with fabric.block("4MiB", name="found") as again:
        assert again.epoch > block.epoch
        assert sublet.Durable.restore(again).value == {"n": 100}


def saved_at(fabric: sublet.Fabric, lease: str) -> str | None:
    end = fabric.lease(lease).end
    return None if end is None else end.saved_at


def test_an_asyncio_program_lends_a_volume_too(fabric: sublet.Fabric, home: Path) -> None:
    code = "import sublet; sublet.Durable(7, sublet.current().volume).checkpoint()"

    async def run() -> int:
        async with (
            await sublet.aio.connect(home=home) as there,
            await there.block("4MiB", name="aio") as block,
            await there.cpu(1) as cpu,
        ):
            guest = await cpu.start([sys.executable, "-c", code], volume=block)
            code_of: int = await guest.wait()
            return code_of

    assert asyncio.run(run()) == 0
    with fabric.block("4MiB", name="aio") as block:
        assert sublet.Durable.restore(block).value == 7


def test_only_a_lease_of_blocks_has_a_volume(fabric: sublet.Fabric) -> None:
    with fabric.cpu(1) as cpu:
        with pytest.raises(sublet.InvalidRequest, match="has no blocks"):
            sublet.Durable(1, cpu)
        with pytest.raises(sublet.InvalidRequest, match="has no blocks"):
            cpu.start(["true"], volume=cpu)
        with pytest.raises(sublet.InvalidRequest, match="volume= is a str"):
            cpu.start(["true"], volume="ckpt")  # type: ignore[arg-type]
        with pytest.raises(sublet.Unsupported, match="does not run under a lease"):
            sublet.current()


PAUSED = """
import os, signal, sys, sublet
fabric = sublet.connect(home=sys.argv[1])
block = fabric.block("4MiB", name=sys.argv[2], ttl=sys.argv[3], renew="always")  # as long as it is not paused
state = sublet.Durable({"n": 1}, block)
state.checkpoint()
print(block.id, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
state.value["n"] = 666
for act in (state.checkpoint, lambda: sublet.Durable({"n": 667}, block), lambda: block.start(["true"])):
    try:
        act()
        print("done", flush=True)
    except sublet.SubletError as error:
        print(type(error).__name__, flush=True)
os._exit(0)
"""


def paused_program(home: Path) -> tuple[subprocess.Popen[str], str, str]:
    """The program, its lease and its volume. On a busy machine a program may not come to renew a short lease in time,
    and is over before it is paused."""
    for ttl in ("3s", "12s", "48s"):
        name = f"paused-{ttl}"
        paused = subprocess.Popen(
            [sys.executable, "-c", PAUSED, str(home), name, ttl],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert paused.stdout is not None
        if lease := paused.stdout.readline().strip():
            return paused, lease, name
        paused.stdout.close()
        paused.wait(PATIENCE_S)
    raise AssertionError("it ended each time before it was paused")


def test_a_program_that_was_paused_past_its_end_changes_nothing(fabric: sublet.Fabric, home: Path) -> None:
    paused, lease, name = paused_program(home)
    try:
        assert paused.stdout is not None
        until("its end", lambda: fabric.lease(lease).end is not None, 120)
        with fabric.block("4MiB", name=name, wait=PUT_AWAY_S) as block:
            state = sublet.Durable.restore(block)
            state.value["n"] = 2
            state.checkpoint()
            paused.send_signal(signal.SIGCONT)
            said = paused.stdout.read().split()
            assert len(said) == 3
            assert set(said) <= {"StaleEpoch", "LeaseExpired", "LeaseNotActive"}
            assert sublet.Durable.restore(block).value == {"n": 2}
            state.close()
    finally:
        paused.kill()
        paused.wait(PATIENCE_S)
        assert paused.stdout is not None
        paused.stdout.close()


def test_saving_needs_no_office(fabric: sublet.Fabric) -> None:
    with fabric.block("4MiB", name="alone") as block:
        state = sublet.Durable(1, block)
        state.checkpoint()
        pid = fabric.status().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for n in range(3):
                state.value = n
                state.checkpoint()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert sublet.Durable.restore(block).value == 2
        state.close()


class Slow:
    """Something that takes two seconds to save."""

    def __reduce__(self) -> Any:
        time.sleep(2)
        return Slow, ()


def test_saves_that_take_long_raise_the_time_that_the_lease_asks_for(fabric: sublet.Fabric) -> None:
    """Of its own accord, by what was measured where it is published; the office has it in its books."""
    with fabric.block("4MiB", name="slow", ttl="10s", renew="always", renew_every="1s") as block:
        assert block.ttl == 10
        with sublet.Durable(Slow(), block) as state:
            state.checkpoint()
        until("a longer time to live", lambda: block.ttl >= 12)
        until("it is granted", lambda: fabric.lease(block.id).ttl >= 12)
        assert block.status is not sublet.LeaseStatus.ENDED


def test_an_asyncio_program_saves_beside_its_loop(home: Path) -> None:
    """In the loop it is said how; guests and workers of its leases may be lent the volume as well."""

    async def main() -> tuple[Any, ...]:
        async with await sublet.aio.connect(home=home) as fabric, fabric.block("4MiB", name="awaited") as block:
            with pytest.raises(sublet.InvalidRequest, match="keep this event loop waiting"):
                sublet.Durable({"n": 1}, block)
            state = await asyncio.to_thread(sublet.Durable, {"n": 1}, block)
            with pytest.raises(sublet.InvalidRequest, match="keep this event loop waiting"):
                state.checkpoint()
            await asyncio.to_thread(state.checkpoint)
            async with fabric.cpu(1) as cpu:
                found = await cpu.options(volume=block).run(count_up, 5)
            again = await asyncio.to_thread(sublet.Durable.restore, block)
            return found, again.value

    assert asyncio.run(main()) == (("awaited", ANY, 2), {"n": 6})
