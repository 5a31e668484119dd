"""Volumes on a real machine: by the client, by asyncio and by the command line, through ends that nobody asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet import aio
from sublet.errors import CapacityExceeded, InvalidRequest, LeaseNotActive, NotFound
from sublet.lease.states import VolumeState
from tests.commands import run_sublet
from tests.traces import PUT_AWAY_S, until

SIZE: Final = "4MiB"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One office for all of it; each test has names of its own."""
    place = tmp_path_factory.mktemp("volumes") / "home"
    try:
        yield place
    finally:
        run(place, "down", "--now")


@pytest.fixture(scope="module")
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home) as found:
        yield found


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SUBLET_HOME": str(home)}
    done = run_sublet(*words, env=environment, timeout=60)
    return subprocess.CompletedProcess(words, done.status, done.out.decode(), done.err.decode())


def is_kept(fabric: sublet.Fabric, name: str) -> bool:
    return fabric.volume(name).state is VolumeState.RETAINED


def write(block: sublet.Lease, text: str) -> None:
    assert block.start(["sh", "-c", f"echo {text} > $SUBLET_BLOCK/said"]).wait() == 0


def reads(block: sublet.Lease, text: str) -> bool:
    return block.start(["sh", "-c", f'test "$(cat $SUBLET_BLOCK/said)" = {text}']).wait() == 0


def test_what_is_written_under_a_name_is_found_again_whole_by_the_next_lease(fabric: sublet.Fabric) -> None:
    with fabric.block(SIZE, name="plain", retain="1h") as block:
        write(block, "one")
        live = fabric.volume("plain")
        assert (live.state, live.lease, live.retain) == (VolumeState.LIVE, block.id, 3600)
        with pytest.raises(CapacityExceeded, match=block.id):
            fabric.block(name="plain")
        with pytest.raises(InvalidRequest, match="in use"):
            fabric.remove_volume("plain")
    with fabric.block(name="plain") as block:  # at once: it waits until it is put away
        assert reads(block, "one")
        assert block.devices[0].amount == 4 << 20
        assert block.epoch > live.epoch
    until("a volume that was put away", lambda: is_kept(fabric, "plain"), PUT_AWAY_S)
    with pytest.raises(InvalidRequest, match="4MiB, and 8MiB were asked for"):
        fabric.block("8MiB", name="plain")
    with pytest.raises(NotFound, match="no volume nothing"):
        fabric.block(name="nothing")


def test_attach_takes_a_lease_or_a_volume_by_itself_or_by_name(fabric: sublet.Fabric) -> None:
    first = fabric.block(SIZE, name="attached")
    write(first, "two")
    by_name = fabric.attach("attached")
    assert by_name.id == first.id
    assert by_name.epoch > first.epoch
    by_name.release()
    until("a volume that was put away", lambda: is_kept(fabric, "attached"), PUT_AWAY_S)
    with fabric.attach(fabric.volume("attached")) as again:
        assert again.id != first.id
        assert reads(again, "two")
    with pytest.raises(NotFound, match="there is no lease nothing"):
        fabric.attach("nothing")


def test_the_same_with_asyncio(home: Path) -> None:
    async def story() -> None:
        async with await aio.connect(home=str(home)) as fabric:
            async with fabric.block(SIZE, name="awaited") as block:
                assert await (await block.start(["sh", "-c", "echo x > $SUBLET_BLOCK/x"])).wait() == 0
            async with fabric.attach("awaited"):
                assert ("awaited", VolumeState.LIVE) in [(one.name, one.state) for one in await fabric.volumes()]
            deadline = time.monotonic() + PUT_AWAY_S
            for _ in iter(lambda: time.monotonic() < deadline, False):
                if (await fabric.volume("awaited")).state is VolumeState.RETAINED:
                    break
                await asyncio.sleep(0.02)
            assert (await fabric.remove_volume("awaited")).state in (VolumeState.REMOVING, VolumeState.REMOVED)

    asyncio.run(story())


def test_what_is_given_up_is_off_the_disk_and_its_name_is_free(fabric: sublet.Fabric, home: Path) -> None:
    with fabric.block(SIZE, name="gone") as block:
        write(block, "three")
    until("a volume that was put away", lambda: is_kept(fabric, "gone"), PUT_AWAY_S)
    folder = home / "blocks/named/local/gone"
    assert folder.exists()
    fabric.remove_volume("gone")
    until("a volume that is gone", lambda: "gone" not in [volume.name for volume in fabric.volumes()], PUT_AWAY_S)
    assert not folder.exists()
    with pytest.raises(NotFound):
        fabric.remove_volume("gone")
    with fabric.block("8MiB", name="gone") as block:
        assert block.devices[0].amount == 8 << 20
    # Nothing was written into it.
    until("a volume that is gone", lambda: "gone" not in [volume.name for volume in fabric.volumes()], PUT_AWAY_S)


def test_the_command_line_shows_checks_and_removes(fabric: sublet.Fabric, home: Path) -> None:
    made = run(home, "run", "--block", SIZE, "--name", "shown", "--", "sh", "-c", "echo 1 > $SUBLET_BLOCK/x")
    assert made.returncode == 0, made.stderr
    until("a volume that was put away", lambda: is_kept(fabric, "shown"), PUT_AWAY_S)
    views: list[dict[str, Any]] = json.loads(run(home, "volume", "ls", "--json").stdout)
    (view,) = [view for view in views if view["name"] == "shown"]
    assert (view["state"], view["size"], view["lease"]) == ("retained", 4 << 20, None)
    assert json.loads(run(home, "volume", "show", "shown", "--json").stdout)["name"] == "shown"
    checked = run(home, "volume", "verify", "shown", "--json")
    assert (checked.returncode, json.loads(checked.stdout)[0]["ok"]) == (0, True), checked.stderr
    until("a volume that was put away", lambda: is_kept(fabric, "shown"), PUT_AWAY_S)
    assert run(home, "volume", "rm", "shown").returncode == 0
    until("a volume that is gone", lambda: "shown" not in [volume.name for volume in fabric.volumes()], PUT_AWAY_S)
    audit = run(home, "audit", "log", "--lines", "50").stdout  # and it says of which volume
    assert re.search(r"operator:local +volume_removing +local shown ", audit), audit
    assert re.search(r"office +volume_removed +local shown ", audit), audit
    for words in (("show", "shown"), ("rm", "shown"), ("verify", "shown")):
        gone = run(home, "volume", *words)
        assert (gone.returncode, "there is no volume shown" in gone.stderr) == (1, True), gone


def test_what_was_last_saved_is_copied_while_its_holder_goes_on(fabric: sublet.Fabric, home: Path) -> None:
    with fabric.block(SIZE, name="original") as block:
        state = sublet.Durable({"n": 1}, block)
        with pytest.raises(NotFound, match="volume original has no checkpoint"):
            fabric.copy_volume("original", "copied")
        state.checkpoint()
        assert fabric.copy_volume("original", "copied").size == fabric.volume("original").size
        state.value["n"] = 2
        state.checkpoint()
        with pytest.raises(InvalidRequest, match="there is a volume called copied already"):
            fabric.copy_volume("original", "copied")
    with fabric.attach("copied") as copy:
        again = sublet.Durable.restore(copy)
        assert again.value == {"n": 1}
        again.value["n"] = 7
        again.checkpoint()
    done = run(home, "volume", "cp", "original", "by-hand", "--size", "2MiB")
    assert (done.returncode, done.stdout) == (0, "Volume by-hand has what was last saved in original.\n"), done
    with fabric.attach("by-hand") as copy, fabric.attach("original") as block:
        assert sublet.Durable.restore(copy).value == sublet.Durable.restore(block).value == {"n": 2}
        with sublet.connect(home=home) as other:  # one of the same tenant; another's volume is not found by its name
            token = other.request("POST", "/v1/tenants", {"id": "eve"}, shape=dict)["token"]
        with (
            sublet.connect(home=home, token=token, as_tenant=True) as eve,
            pytest.raises(NotFound, match="no volume original"),
        ):
            eve.copy_volume("original", "mine")
        too_large = {"much": os.urandom(3 << 20)}
        sublet.Durable(too_large, block).checkpoint()
        with pytest.raises(CapacityExceeded, match=r"the copy needs 3\.\d*MiB, and the volume has room for"):
            fabric.copy_volume("original", "small", size="960KiB")
    # Nothing was written there.
    until("a volume that is gone", lambda: "small" not in [volume.name for volume in fabric.volumes()], PUT_AWAY_S)

    async def awaited() -> int:
        async with await aio.connect(home=home) as there:
            return (await there.copy_volume("by-hand", "awaited-copy")).size

    assert asyncio.run(awaited()) == 2 << 20


@pytest.mark.parametrize("name", ["Ünï", "a/b", "..", "", "x" * 10_000])
def test_what_is_no_name_is_told_before_anything_is_asked(fabric: sublet.Fabric, home: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a valid name"):
        fabric.block(SIZE, name=name)
    for call in (fabric.volume, fabric.remove_volume):
        with pytest.raises(InvalidRequest, match="not a valid name"):
            call(name)
    if name == "a/b":
        assert run(home, "volume", "rm", name).returncode == 2


def test_a_volume_survives_the_kill_of_its_supervisor_and_of_the_office(tmp_path: Path) -> None:
    """Both at once, while a guest is in it: what was written is there, and the books and the disk agree."""
    home = tmp_path / "home"
    try:
        with sublet.connect(home=home) as fabric:
            block = fabric.block(SIZE, name="kept", ttl="10m", renew="always")
            write(block, "four")
            status = fabric.status()
            victims = [status.pid, *_supervisors(home)]
            assert len(victims) == 2
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        with sublet.connect(home=home) as fabric:
            until("an office that answers", lambda: fabric.volume("kept").name == "kept", PUT_AWAY_S)
            with contextlib.suppress(NotFound, LeaseNotActive):  # the program above may have given it back after all
                fabric.attach(block.id).release()
            until("a volume that was put away", lambda: is_kept(fabric, "kept"), PUT_AWAY_S)
            with fabric.block(name="kept") as again:
                assert reads(again, "four")
    finally:
        run(home, "down", "--now")


def _supervisors(home: Path) -> list[int]:
    """Whose settings name this folder."""
    mark = f'"state":"{home}"'.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if b"sublet.node.supervisor" in words and mark in words:
                    found.append(int(entry.name))
    return found
