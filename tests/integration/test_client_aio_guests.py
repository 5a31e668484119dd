"""Commands under a lease of an asyncio program, against a real office and supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

import sublet
from sublet import aio

WAIT_S = 120.0


@pytest.fixture(scope="module")
def home(one_device: Path) -> Path:
    return one_device


def run(home: Path, story: Callable[[aio.Lease], Awaitable[None]]) -> None:
    """In a loop of its own, in debug mode, with a lease."""

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            await aio.connect(home=home) as fabric,
            fabric.cpu(1, ttl="1m") as lease,
        ):
            await story(lease)

    asyncio.run(main(), debug=True)


async def said(pieces: AsyncIterator[sublet.client.guests.Output], stream: str = "stdout") -> bytes:
    return b"".join([piece.data async for piece in pieces if piece.stream == stream])


def test_a_command_runs_and_says_what_it_says(home: Path, tmp_path: Path) -> None:
    async def story(lease: aio.Lease) -> None:
        guest = await lease.start(["sh", "-c", "pwd; echo $MINE >&2; exit 3"], cwd=tmp_path, env={"MINE": "x"})
        assert await guest.wait() == 3
        assert (guest.exit_code, guest.reason, guest.lease_id) == (3, None, lease.id)
        assert await said(guest.output()) == f"{os.path.realpath(tmp_path)}\n".encode()  # noqa: ASYNC240 - a name
        assert await said(guest.output(), "stderr") == b"x\n"
        assert (await guest.view()).pid == guest.pid
        assert guest.id in {one.id for one in await cast("aio.Fabric", lease._fabric).guests(lease, ended=True)}
        await guest.close()

    run(home, story)


def test_who_stopped_a_guest_need_not_wait_for_the_news_of_its_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears of ends gets no processor meanwhile, as on a busy machine."""

    async def story(lease: aio.Lease) -> None:
        monkeypatch.setattr(lease._fabric._watch, "add", lambda conversation, hear: conversation.close())
        async with await lease.start(["sleep", "300"], stdio="null") as guest:
            in_use = lease.busy
        assert (in_use, lease.busy) == (True, False)
        assert await guest.wait() == 143

    run(home, story)


def test_many_talk_at_once_and_one_is_given_something_to_read(home: Path) -> None:
    """More than there are threads to wait on."""

    async def story(lease: aio.Lease) -> None:
        blob = os.urandom(1 << 20)
        talkers = [await lease.start(["sh", "-c", f"sleep 0.2; echo {n}"]) for n in range(24)]
        async with await lease.start(["cat"]) as cat:

            async def give() -> None:
                await cat.write(blob)
                await cat.close_stdin()

            *heard, back, _ = await asyncio.gather(*(said(one.output()) for one in talkers), said(cat.output()), give())
            assert back == blob
            assert heard == [f"{n}\n".encode() for n in range(24)]
            assert await cat.wait() == 0
        for one in talkers:
            await one.close()

    run(home, story)


def test_the_lease_is_in_use_while_it_runs_and_not_longer(home: Path) -> None:
    async def story(lease: aio.Lease) -> None:
        async with await lease.start(["sleep", "1000"]) as guest:
            assert lease._held.holder.busy
            await guest.send_signal(signal.SIGTERM)
            assert await guest.wait() == 128 + signal.SIGTERM
            assert not lease._held.holder.busy

    run(home, story)


def test_who_is_cancelled_leaves_nothing_running(home: Path) -> None:
    async def story(lease: aio.Lease) -> None:
        for pause_s in (0.0, 0.002, 0.005, 0.02, 0.5):
            task = asyncio.ensure_future(lease.start(["sleep", "1000"]))
            await asyncio.sleep(pause_s)
            task.cancel()
            if isinstance((await asyncio.gather(task, return_exceptions=True))[0], aio.Guest):
                guest = task.result()
                await guest.stop(0)
                await guest.close()
        while [one for one in await cast("aio.Fabric", lease._fabric).guests(lease) if one.state != "gone"]:  # noqa: ASYNC110 - elsewhere
            await asyncio.sleep(0.02)

    run(home, story)


def test_what_cannot_be_run_is_refused_and_the_lease_is_not_in_use(home: Path) -> None:
    async def story(lease: aio.Lease) -> None:
        with pytest.raises(sublet.InvalidRequest):
            await lease.start(["/no/such/command"])
        with pytest.raises(sublet.InvalidRequest):
            await lease.start("a string")
        await asyncio.sleep(0)
        assert not lease._held.holder.busy

    run(home, story)
