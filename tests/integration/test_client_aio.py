"""The asyncio twin against a real office: the same core, so only what is its own is tried here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

import sublet
from sublet import aio
from sublet.client.office import ensure_office

WAIT_S = 120.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An office with two host devices of 4 GiB."""
    folder = tmp_path_factory.mktemp("aio") / "home"
    ensure_office(folder, words=("up", "--foreground", "--host-gpus", "2x4GiB"))
    yield folder
    with sublet.connect(home=folder) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)


async def until(ask: Callable[[], Awaitable[T]], true: Callable[[T], bool]) -> T:
    """Ask until it is so; the time-out of the whole story is the bound."""
    while not true(found := await ask()):  # noqa: ASYNC110 - the office is another process
        await asyncio.sleep(0.01)
    return found


def run(home: Path, story: Callable[[aio.Fabric], Awaitable[None]]) -> None:
    """In a loop of its own, in debug mode: what is never awaited, or left open, is an error."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), await aio.connect(home=home) as fabric:
            await story(fabric)
            await until(fabric.leases, lambda views: views == [])

    asyncio.run(main(), debug=True)


def test_a_lease_from_acquire_to_release(home: Path) -> None:
    async def story(fabric: aio.Fabric) -> None:
        async with fabric.gpu(min_vram="1GiB", ttl="1m", name="first") as lease:
            assert lease.status is sublet.LeaseStatus.ACTIVE
            await lease.renew()
            assert [view.id for view in await fabric.leases()] == [lease.id]
        assert lease.end is not None
        await lease.release()
        awaited = await fabric.cpu(1)
        await awaited.release()
        with pytest.raises(sublet.LeaseNotActive):
            await lease.renew()

    run(home, story)


def test_busy_leases_are_renewed_and_idle_ones_end_as_idle(home: Path) -> None:
    async def story(fabric: aio.Fabric) -> None:
        ended: asyncio.Queue[sublet.LeaseEnd] = asyncio.Queue()
        async with fabric.gpu(min_vram="1GiB", ttl="5m", renew_every="500ms") as busy:
            reasons: list[str] = []
            for ttl in ("2s", "20s"):  # a machine that stands still may sleep through a short one, and say nothing
                async with fabric.gpu(min_vram="1GiB", ttl=ttl) as idle:
                    idle.on_end(ended.put)
                    with busy.activity():
                        end = await ended.get()
                        busy.check()
                view = await until(partial(fabric.lease, idle.id), lambda found: found.end is not None)
                assert view.end is not None
                reasons = [end.reason, view.end.reason]
                if reasons == ["idle", "idle"]:
                    break
            assert reasons == ["idle", "idle"]
            await until(lambda: fabric.lease(busy.id), lambda found: found.renewals >= 1)

    run(home, story)


def test_many_leases_at_once_over_one_loop(home: Path) -> None:
    """Forty programs share two devices; each waits its turn in the queue, and nobody is left over."""

    async def story(fabric: aio.Fabric) -> None:
        held: set[str] = set()
        most = 0
        are_two = asyncio.Event()

        async def one() -> None:
            nonlocal most
            async with fabric.gpu(min_vram="1GiB") as lease:
                with lease.activity():  # an idle lease would be given up for one that waits
                    held.add(lease.id)
                    most = max(most, len(held))
                    if most == 2:
                        are_two.set()
                    await are_two.wait()
                    await asyncio.sleep(0.02)
                    held.discard(lease.id)

        await asyncio.gather(*(one() for _ in range(40)))
        assert most == 2

    run(home, story)


def test_a_cancelled_wait_leaves_the_queue(home: Path) -> None:
    async def story(fabric: aio.Fabric) -> None:
        places: asyncio.Queue[sublet.Place] = asyncio.Queue()
        async with fabric.gpu(min_vram="1GiB", count=2) as both:

            async def wait() -> None:
                await fabric.gpu(min_vram="1GiB", on_place=places.put_nowait)

            with both.activity():  # an idle lease would be given up for the one that waits
                waiting = asyncio.create_task(wait())
                place = await places.get()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            view = await until(lambda: fabric.lease(place.lease), lambda found: found.end is not None)
            assert view.end is not None
            assert view.end.reason == "withdrawn"
            assert [view.id for view in await fabric.leases()] == [both.id]

    run(home, story)


def test_events_tell_the_notice_and_the_end(home: Path) -> None:
    async def story(fabric: aio.Fabric) -> None:
        notices: asyncio.Queue[sublet.Notice] = asyncio.Queue()
        lease = await fabric.gpu(min_vram="1GiB", renew="always")
        lease.on_notice(notices.put)
        changes = lease.events()
        revoke = f"/v1/leases/{lease.id}/revoke"
        await fabric.request("POST", revoke, {"notice": 60.0, "detail": "why"}, shape=dict)
        assert (await notices.get()).detail == "why"
        await fabric.request("POST", revoke, {"notice": 0.0, "detail": "why"}, shape=dict)
        assert [change.what async for change in changes] == ["notice", "ended"]
        with pytest.raises(sublet.LeaseRevoked):
            lease.check()

    run(home, story)


def test_a_killed_office_is_started_again_by_the_keeper(tmp_path: Path) -> None:
    async def story(fabric: aio.Fabric) -> None:
        async with fabric.gpu(min_vram="1GiB", ttl="1m", renew_every="500ms") as lease:
            with lease.activity():
                pid = (await fabric.status()).pid
                os.kill(pid, signal.SIGKILL)
                await until(lambda: fabric.lease(lease.id), lambda view: view.renewals > 0)
            assert (await fabric.status()).pid != pid

    run(tmp_path / "home", story)
    with sublet.connect(home=tmp_path / "home") as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
