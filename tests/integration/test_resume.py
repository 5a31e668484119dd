"""A lease is taken in the middle of a call, and the call goes on under another: a real office, real workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers, ensure_office
from sublet.errors import InvalidRequest, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease_end import EndReason
from tests.crash.office_process import release_all
from tests.integration import parked_functions
from tests.traces import until

PATIENCE_S = 30.0
WORDS = ("up", "--host-gpus", "1x1GiB", "--foreground")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of one office for all of them, also after it was killed."""
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=WORDS)
    yield home
    with sublet.connect(home=home, start=False) as made:
        made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.fixture
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home, start=False) as made:
        yield made
    release_all(home)


def taken(fabric: sublet.Fabric, lease: sublet.Lease) -> sublet.Lease:
    """Somebody of a higher tier comes, and has the device a few seconds later."""
    other = fabric.gpu(min_vram="64MiB", ttl="60s", wait="60s", renew="always")
    until("the news of its end", lambda: lease.end is not None, PATIENCE_S)  # it comes on a connection of its own
    return other


def spot(fabric: sublet.Fabric) -> sublet.Lease:
    return fabric.gpu(min_vram="64MiB", ttl="60s", spot=True, renew="always")


def test_a_call_in_flight_goes_on_under_another_lease(fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Its holder waits for nothing but its answer. What the worker kept is there, and it is the same process."""
    beat, enough = tmp_path / "beat", tmp_path / "enough"
    lease = spot(fabric)
    pid = lease.run(parked_functions.pid)
    future = lease.submit(parked_functions.count_until, str(beat), str(enough))
    until("a beat", lambda: beat.exists() and beat.stat().st_size > 3, PATIENCE_S)
    other = taken(fabric, lease)
    end = lease.end
    assert end is not None
    assert (end.reason, end.way) == (EndReason.PREEMPTED, "suspend")
    assert "resume=" in end.resume_hint
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size, "it stands still"
    assert not future.done()
    (view,) = [view for view in fabric.leases() if view.parks is not None]
    assert view.parks is not None
    assert (view.parks.of, view.parks.holds) == (lease.id, True)
    assert [guest.state for guest in fabric.guests(view.id)] == ["parked"]
    threading.Timer(0.5, other.release).start()
    again = fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always")
    until("another beat", lambda: beat.stat().st_size > size, PATIENCE_S)
    enough.touch()
    assert future.result(PATIENCE_S) == beat.stat().st_size
    assert again.run(parked_functions.pid) == pid
    assert again.epoch > lease.epoch
    with pytest.raises(LeaseEnded):
        lease.run(parked_functions.pid)
    bill = {line.key: line for line in fabric.bill()}
    assert bill[lease.id].gpu_seconds > 0
    assert bill[lease.id].way == "suspend"
    assert bill[view.id].gpu_seconds == 0
    assert bill[view.id].memory_byte_seconds > 0
    again.release()


OTHER_PROGRAM = """
import sys, sublet
from tests.crash.office_process import release_all
from tests.integration import parked_functions
with sublet.connect(home=sys.argv[1], start=False) as fabric:
    with fabric.gpu(resume=sys.argv[2], ttl="60s", wait="60s") as lease:
        print(lease.run(parked_functions.pid), lease.run(parked_functions.remembered))
"""


def test_another_program_goes_on_with_the_worker_that_was_parked(fabric: sublet.Fabric) -> None:
    """It was idle and is not stopped; the other has but the id. The process is the same, and its modules remember."""
    lease = spot(fabric)
    pid = lease.run(parked_functions.pid)
    lease.run(parked_functions.remember, "what was learned")
    other = taken(fabric, lease)
    assert lease.end is not None
    other.release()
    home = fabric.address.home
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROGRAM, str(home), lease.end.parked],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"{pid} what was learned", done.stderr


def test_an_asyncio_program_goes_on_with_its_workers(fabric: sublet.Fabric) -> None:
    async def program() -> tuple[int, int, str]:
        async with await sublet.aio.connect(home=fabric.address.home, start=False) as mine:
            lease = await mine.gpu(min_vram="64MiB", ttl="60s", spot=True, renew="always")
            first = await lease.run(parked_functions.pid)
            await lease.run(parked_functions.remember, "here")
            other = await mine.gpu(min_vram="64MiB", ttl="60s", wait="60s", renew="always")
            end_s = time.monotonic() + PATIENCE_S
            for _ in iter(lambda: lease.end is None and time.monotonic() < end_s, False):
                await asyncio.sleep(0.02)  # the news of it comes on a connection of its own
            assert lease.end is not None
            await other.release()
            async with await mine.gpu(resume=lease, ttl="60s", wait="60s") as again:
                assert again._blocking_lease is not None
                second = await again.run(parked_functions.pid)
                return first, second, await again.run(parked_functions.remembered)

    first, second, said = asyncio.run(program())
    assert (second, said) == (first, "here")


def test_what_is_parked_can_be_let_go(fabric: sublet.Fabric) -> None:
    """Then there is nothing to go on with, and it is said why. It saves first, which is told of both leases."""
    lease, block = spot(fabric), fabric.block("4MiB", name="kept", renew="always")
    pid = lease.options(volume=block).run(parked_functions.save_in_the_end)
    other = taken(fabric, lease)
    assert lease.end is not None
    parked = lease.end.parked
    name = parked.partition("@")[0]
    fabric.request("POST", f"/v1/leases/{name}/release", {"request_id": "let-go"}, shape=dict)
    until("its end", lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S)
    with pytest.raises((LeaseEnded, NotFound)):
        fabric.gpu(resume=parked, wait=0)
    with pytest.raises(SubletError):
        fabric.gpu(resume=lease, wait=0)
    assert sublet.Durable.restore(block).value == "saved in the end"
    until("word of the save", lambda: saved_at(fabric, name), PATIENCE_S)
    assert saved_at(fabric, lease.id) == saved_at(fabric, name)
    other.release()
    block.release()


def saved_at(fabric: sublet.Fabric, lease: str) -> str | None:
    end = fabric.lease(lease).end
    return None if end is None else end.saved_at


def test_bad_input(fabric: sublet.Fabric) -> None:
    """Before anything is sent where that can be, else by the office; each says what to do."""
    with pytest.raises(InvalidRequest, match="min_vram"):
        fabric.gpu()
    with pytest.raises(InvalidRequest, match="takes its resources from the parked lease"):
        fabric.gpu(resume="l-x@1.1", min_vram="1GiB")
    with pytest.raises(NotFound):
        fabric.gpu(resume="l-nobody")
    with fabric.gpu(min_vram="64MiB") as lease:
        with pytest.raises(InvalidRequest, match="nothing of lease"):
            fabric.gpu(resume=lease)
        with pytest.raises(InvalidRequest, match="no parking lease"):
            fabric.gpu(resume=lease.id)
        with pytest.raises(SubletError):
            fabric.gpu(resume=f"{lease.id}@x")
        with pytest.raises((InvalidRequest, StaleEpoch)):
            fabric.gpu(resume=f"{lease.id}@0.1")


def test_the_office_may_be_killed_while_guests_are_parked(home: Path, fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Its journal has the parking lease, and its supervisor the guests; both go on."""
    beat = tmp_path / "beat"
    lease = spot(fabric)
    future = lease.submit(parked_functions.count_up, str(beat), 100)
    until("a beat", lambda: beat.exists() and beat.stat().st_size > 3, PATIENCE_S)
    other = taken(fabric, lease)
    assert lease.end is not None
    for _ in range(2):
        kill_and_start_again(fabric, home)
        (view,) = [view for view in fabric.leases() if view.parks is not None]
        assert view.parks is not None
        assert view.parks.holds
    other.release()
    again = fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always")
    kill_and_start_again(fabric, home)
    assert future.result(PATIENCE_S) == 100
    assert beat.stat().st_size == 100
    again.release()


def kill_and_start_again(fabric: sublet.Fabric, home: Path) -> None:
    """Its socket takes connections until the last of its threads is gone."""
    os.kill(fabric.status().pid, signal.SIGKILL)
    until("the end of the office", lambda: not answers(socket_path(home.resolve())), PATIENCE_S)
    ensure_office(home, words=WORDS)


def test_the_supervisor_may_be_killed_while_guests_are_parked(fabric: sublet.Fabric, tmp_path: Path) -> None:
    """They end with it, whoever waits is told, and nothing is granted that has nobody in it."""
    beat = tmp_path / "beat"
    lease = spot(fabric)
    future = lease.submit(parked_functions.count_up, str(beat), 10_000)
    until("a beat", lambda: beat.exists() and beat.stat().st_size > 3, PATIENCE_S)
    pid = parked_pid(fabric, lease)
    other = taken(fabric, lease)
    assert lease.end is not None
    supervisor = int(Path(f"/proc/{pid}/status").read_text().partition("PPid:\t")[2].split()[0])
    os.kill(supervisor, signal.SIGKILL)
    with pytest.raises(SubletError):
        future.result(PATIENCE_S)
    until(
        "the end of the parking lease",
        lambda: not [view for view in fabric.leases() if view.parks is not None],
        PATIENCE_S,
    )
    with pytest.raises(SubletError):
        fabric.gpu(resume=lease, wait=0)
    other.release()


def parked_pid(fabric: sublet.Fabric, lease: sublet.Lease) -> int:
    (guest,) = fabric.guests(lease)
    return guest.pid
