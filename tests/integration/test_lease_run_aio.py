"""Python functions under a lease, awaited."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import aio
from sublet.errors import CallTimeout, WorkerLost
from tests.traces import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def home(two_devices: Path) -> Path:
    return two_devices


async def _until(what: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.02)


def test_calls_are_awaited(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.compute.calls.GRACE_S", PATIENCE_S)  # to leave an interrupted call in
    monkeypatch.setattr("sublet.compute.worker_guest.END_REPORTED_S", PATIENCE_S)  # to say how a process has ended
    entered, left = tmp_path / "entered", tmp_path / "left"

    def add(x: int, y: int) -> int:
        return x + y

    async def twice(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    def numbers(n: int) -> Iterator[int]:
        yield from range(n)

    async def letters() -> AsyncIterator[str]:
        for letter in "abc":
            yield letter

    def leave() -> None:
        os._exit(3)

    def slow(entered: str, left: str) -> None:
        try:
            Path(entered).touch()
            time.sleep(60)
        finally:
            Path(left).touch()

    async def program() -> None:
        async with await aio.connect(home=home) as fabric, fabric.cpu(1, ttl="1m") as lease:
            assert await lease.run(add, 1, y=2) == 3
            assert await lease.run(twice, 4) == 8
            assert [n async for n in await lease.run(numbers, 5)] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
            assert [n async for n in await lease.run(letters)] == ["a", "b", "c"]
            assert [n async for n in lease.map(pow, range(50), [2] * 50)] == [n * n for n in range(50)]
            assert await asyncio.gather(*(lease.submit(add, n, 1) for n in range(50))) == list(range(1, 51))
            await asyncio.to_thread(until, "the loop has heard of the end", lambda: not lease.busy)
            pid = await lease.run(os.getpid)
            with pytest.raises(ZeroDivisionError):
                await lease.run(lambda: 1 // 0)
            with pytest.raises(CallTimeout):
                await lease.options(timeout=0.2).run(time.sleep, 60)
            waiting = lease.submit(slow, str(entered), str(left))
            await _until(entered.exists)
            await _until(lambda: lease.busy)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await _until(left.exists)
            assert await lease.run(os.getpid) == pid
            with pytest.raises(WorkerLost, match="exit code 3"):
                await lease.run(leave)
            assert await lease.run(os.getpid) != pid

    asyncio.run(program())


def test_the_loop_goes_on_meanwhile(home: Path, tmp_path: Path) -> None:
    """The call ends only when the loop has done something else meanwhile."""

    def wait_for(entered: str, ticked: str) -> None:
        Path(entered).touch()
        until_s = time.monotonic() + 60
        while not Path(ticked).exists():
            assert time.monotonic() < until_s, "the loop stood still"
            time.sleep(0.01)

    async def program() -> None:
        async with await aio.connect(home=home) as fabric, fabric.cpu(1, ttl="1m") as lease:
            entered, ticked = tmp_path / "entered", tmp_path / "ticked"

            async def tick() -> None:
                await _until(entered.exists)
                for _ in range(10):
                    await asyncio.sleep(0.01)
                ticked.touch()

            ticking = asyncio.create_task(tick())
            await lease.run(wait_for, str(entered), str(ticked))
            await ticking

    asyncio.run(program())


def test_the_end_of_the_lease_is_raised(home: Path, tmp_path: Path) -> None:
    entered = tmp_path / "entered"

    def work(entered: str) -> None:
        Path(entered).touch()
        time.sleep(60)

    before = set(threading.enumerate())

    async def program() -> None:
        async with await aio.connect(home=home) as fabric:
            lease = await fabric.cpu(1, ttl="1m")
            waiting = lease.submit(work, str(entered))
            await _until(entered.exists)
            await lease.release()
            with pytest.raises(sublet.LeaseEnded) as ended:
                await waiting
            assert ended.value.end is not None

    asyncio.run(program())
    assert len(set(threading.enumerate()) - before) < 10
