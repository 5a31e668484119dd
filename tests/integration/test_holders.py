"""Leases that are bound to a process, with real processes: killed, forked, attached to, and an office that was away."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sublet
from sublet import aio
from sublet.client.home import socket_path
from sublet.wire.http import LeaseView
from tests.integration.test_client import home as home
from tests.integration.test_client import until

PROMPT_S = 60.0
"""Seen by its pidfd, a process is gone at once; a busy machine takes a while to say so. It is less than any time to
live by which the same leases would have ended."""


class Program:
    """A holder of its own. It says what it has in one line, and goes on until it is ended."""

    def __init__(self, code: str, home: Path) -> None:
        env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
        text = "import os, sys, time, sublet\nfabric = sublet.connect()\n" + textwrap.dedent(code) + "\ntime.sleep(600)"
        self._program = subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._program.pid

    def says(self) -> list[str]:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, "it has ended"
        return line.split()

    def kill(self) -> None:
        self._program.kill()
        self._program.wait()

    def close(self) -> None:
        self.kill()
        self._program.communicate()


Begin = Callable[..., Program]


@pytest.fixture
def begin(two_devices: Path) -> Iterator[Begin]:
    begun: list[Program] = []

    def program(code: str, home: Path = two_devices) -> Program:
        begun.append(Program(code, home))
        return begun[-1]

    yield program
    for one in begun:
        one.close()


@pytest.fixture
def fabric(two_devices: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=two_devices) as found:
        yield found


def ends(fabric: sublet.Fabric, lease: str) -> LeaseView:
    """As it ended, soon."""

    def ended() -> LeaseView | None:
        view = fabric.lease(lease)
        return view if view.end is not None else None

    found: LeaseView = until(ended, PROMPT_S)
    return found


def goes_on(fabric: sublet.Fabric, lease: str) -> bool:
    time.sleep(0.3)
    return fabric.lease(lease).end is None


def reason(view: LeaseView) -> str:
    assert view.end is not None
    return view.end.reason


def test_all_that_a_killed_program_had_ends_at_once(fabric: sublet.Fabric, begin: Begin) -> None:
    """Its leases of every kind, and its place in the queue; the next gets the device, and not after a time to live."""
    program = begin("""
        import threading
        one = fabric.gpu(min_vram="4GiB", ttl="10m")
        two = fabric.gpu(min_vram="4GiB", ttl="10m")
        busy = [one.activity(), two.activity()]
        for lease in busy:
            lease.__enter__()  # what is idle would be taken for the one that waits
        memory, disk = fabric.memory("1MiB", ttl="10m"), fabric.block("1MiB", ttl="10m")
        told = threading.Event()
        def wait():
            fabric.gpu(min_vram="4GiB", wait="10m", on_place=lambda place: told.set())
        threading.Thread(target=wait, daemon=True).start()
        told.wait()
        print(one.id, two.id, memory.id, disk.id, flush=True)
    """)
    leases = program.says()
    views = {view.id: view for view in fabric.leases()}
    queued = [view.id for view in views.values() if view.status == "queued" and view.bound_to == program.pid]
    assert len(queued) == 1
    assert {views[lease].bound_to for lease in leases} == {program.pid}
    program.kill()
    fabric.gpu(min_vram="4GiB", wait="1m").release()
    for lease in (*leases, *queued):
        end = ends(fabric, lease).end
        assert end is not None
        assert (end.reason, end.detail) == ("holder_gone", f"its process {program.pid} has ended")


def test_a_program_that_says_otherwise_leaves_its_leases_to_time(fabric: sublet.Fabric, begin: Begin) -> None:
    """For one lease, or for all of a fabric; and where somebody else is to attach, once the holder left it."""
    program = begin("""
        free = sublet.connect(bound=False)
        kept = [fabric.memory("1MiB", bound=False), free.memory("1MiB"), fabric.memory("1MiB")]
        kept[2].leave()
        bound = free.memory("1MiB", ttl="10m", bound=True)
        print(*[lease.id for lease in kept], bound.id, flush=True)
    """)
    *kept, bound = program.says()
    assert [fabric.lease(lease).bound_to for lease in (*kept, bound)] == [None, None, None, program.pid]
    program.kill()
    assert reason(ends(fabric, bound)) == "holder_gone"
    for lease in kept:
        assert goes_on(fabric, lease)
        fabric.attach(lease).release()


def test_a_fork_holds_nothing_until_it_attaches(fabric: sublet.Fabric, begin: Begin) -> None:
    """The child lives on. What it attached to is its own, and survives its parent; the rest is gone."""
    program = begin("""
        kept, lost = fabric.memory("1MiB", ttl="10m"), fabric.memory("1MiB", ttl="10m")
        read, write = os.pipe()
        if not os.fork():
            lease = fabric.attach(kept.id)
            os.write(write, b"!")
            time.sleep(600)
        os.read(read, 1)
        print(kept.id, lost.id, flush=True)
    """)
    kept, lost = program.says()
    child = fabric.lease(kept).bound_to
    assert child not in (None, program.pid)
    assert fabric.lease(lost).bound_to == program.pid
    program.kill()
    assert reason(ends(fabric, lost)) == "holder_gone"
    assert goes_on(fabric, kept)
    os.kill(child, signal.SIGKILL)
    assert reason(ends(fabric, kept)) == "holder_gone"


def test_whoever_attaches_is_the_holder(fabric: sublet.Fabric, begin: Begin) -> None:
    """The end of the program that had it before changes nothing any more."""
    program = begin("""
        leases = [fabric.memory("1MiB", ttl="10m") for _ in range(2)]
        print(*[lease.id for lease in leases], flush=True)
    """)
    _, lease = program.says()
    mine = fabric.attach(lease)
    assert fabric.lease(lease).bound_to == os.getpid()
    program.kill()
    assert goes_on(fabric, lease)
    mine.renew()
    mine.release()


def test_the_office_goes_and_comes_back(home: Path, begin: Begin) -> None:
    """With a living holder everything goes on. Of one that died meanwhile, the returning office ends the lease."""
    with sublet.connect(home=home) as fabric:
        stays = begin('lease = fabric.memory("1MiB", ttl="10m"); print(lease.id, flush=True)', home)
        goes = begin('lease = fabric.memory("1MiB", ttl="10m"); print(lease.id, flush=True)', home)
        (kept,), (lost,) = stays.says(), goes.says()
        deadline = fabric.lease(kept).deadline
        os.kill(fabric.status().pid, signal.SIGKILL)
        goes.kill()
        assert reason(ends(fabric, lost)) == "holder_gone", "looked again, and found it gone"
        after = fabric.lease(kept)
        assert (after.status, after.deadline, after.bound_to) == ("active", deadline, stays.pid)
        stays.kill()
        assert reason(ends(fabric, kept)) == "holder_gone", "and watched on"


def test_the_same_with_asyncio(fabric: sublet.Fabric, two_devices: Path, begin: Begin) -> None:
    program = begin("""
        import asyncio
        from sublet import aio
        async def main():
            async with await aio.connect() as fabric:
                bound = await fabric.memory("1MiB", ttl="10m")
                free = await fabric.memory("1MiB", ttl="10m", bound=False)
                left = await fabric.memory("1MiB", ttl="10m")
                left.leave()
                while (await fabric.lease(left.id)).bound_to is not None:
                    await asyncio.sleep(0.01)
                print(bound.id, free.id, left.id, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """)
    bound, free, left = program.says()
    program.kill()
    assert reason(ends(fabric, bound)) == "holder_gone"
    for lease in (free, left):
        assert goes_on(fabric, lease)

    async def take_over() -> None:
        async with await aio.connect(home=two_devices) as mine:
            for lease in (free, left):
                taken = await mine.attach(lease)
                assert (await mine.lease(lease)).bound_to == os.getpid()
                await taken.release()
            handed_over = await mine.memory("1MiB", ttl="1m")
            handed_over.leave()
        assert fabric.lease(handed_over.id).bound_to is None, "closing waits until the office knows"
        fabric.attach(handed_over.id).release()

    asyncio.run(take_over())


def test_what_cannot_be_seen_is_bound_to_nothing(fabric: sublet.Fabric, two_devices: Path) -> None:
    """A caller that names another pid than its own (a proxy does), and one without any: their leases end by time."""
    wants = [{"kind": "memory", "amount": 1 << 20}]
    for pid in (os.getpid() + 1, 0, -1, None):
        body = {"request_id": os.urandom(4).hex(), "wants": wants, "ttl": 60, "holder_pid": pid}
        lease = fabric.request("POST", "/v1/leases", body, shape=dict)["lease"]
        assert lease["bound_to"] is None
        fabric.attach(lease["id"]).release()


@pytest.mark.parametrize("how", ["keep-alive", "close"])
def test_plain_http_may_ask_for_it(fabric: sublet.Fabric, two_devices: Path, how: str) -> None:
    """By its own pid, on either way through the office's server."""
    wants = [{"kind": "memory", "amount": 1 << 20}]
    body = json.dumps({"request_id": os.urandom(4).hex(), "wants": wants, "holder_pid": os.getpid()}).encode()
    head = f"POST /v1/leases HTTP/1.1\r\nhost: o\r\nconnection: {how}\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(socket_path(two_devices)))
        sock.sendall(head.encode() + body)
        with http.client.HTTPResponse(sock) as answer:  # its head and its body may come one after the other
            answer.begin()
            lease = json.loads(answer.read())["lease"]
    assert lease["bound_to"] == os.getpid()
    assert goes_on(fabric, lease["id"]), "the process is what counts, and not the connection"
    fabric.attach(lease["id"]).release()


def test_a_process_that_runs_another_program_is_the_same_holder(fabric: sublet.Fabric, begin: Begin) -> None:
    """exec keeps the process; what it was bound to lives as long."""
    program = begin("""
        lease = fabric.memory("1MiB", ttl="10m")
        print(lease.id, flush=True)
        os.execv(sys.executable, [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(600)"])
    """)
    (lease,) = program.says()
    assert program.says() == ["on"]
    assert goes_on(fabric, lease)
    program.kill()
    assert reason(ends(fabric, lease)) == "holder_gone"


def test_hundreds_of_leases_of_one_program_end_together(fabric: sublet.Fabric, two_devices: Path, begin: Begin) -> None:
    """They share one descriptor in the office."""
    pid = fabric.status().pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    program = begin("""
        leases = [fabric.memory("1MiB", ttl="10m") for _ in range(200)]
        print(len(leases), flush=True)
    """)
    program.says()
    assert len(os.listdir(f"/proc/{pid}/fd")) < before + 20
    program.kill()
    until(lambda: not [view for view in fabric.leases() if view.bound_to == program.pid], PROMPT_S)
    found = [view for view in fabric.leases(all=True) if view.bound_to == program.pid]
    assert len(found) == 200
    assert {reason(view) for view in found} == {"holder_gone"}
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, PROMPT_S)
