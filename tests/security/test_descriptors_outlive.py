"""A descriptor that outlives its lease keeps no disk from others."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.errors import CapacityExceeded
from sublet.node.storage.mounts import loops_of
from sublet.node.storage.stores_work import why_no_image
from tests.security.conftest import Place
from tests.traces import until

pytestmark = pytest.mark.skipif(bool(why_no_image()), reason=f"no images here: {why_no_image()}")


def folder_of(place: Place, block: sublet.Lease) -> Path:
    """Where its image is mounted, once it has a guest."""
    before = mounted(place)
    assert block.start(["sh", "-c", "echo 42 > $SUBLET_BLOCK/answer"], cwd="/").wait(timeout=60) == 0
    (one,) = mounted(place) - before
    return one


def mounted(place: Place) -> set[Path]:
    """The office is shared with other tests, whose images may be there as well."""
    found = (Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines())
    return {path for path in found if place.home in path.parents}


def block_device(place: Place) -> dict[str, Any]:
    devices = place.owner.request("GET", "/v1/status", shape=dict)["devices"]
    found: dict[str, Any] = next(one for one in devices if one["kind"] == "block")
    return found


def fences_of(place: Place, lease: sublet.Lease) -> list[Any]:
    """What is quarantined of the lease or of the whole disk; what other tests left may be late, and clears itself."""
    fences = place.owner.request("GET", "/v1/fences", shape=list)
    return [one for one in fences if one["lease"] in (lease.id, None)]


def test_disk_is_given_back_though_a_process_has_a_folder_of_it_open(place: Place) -> None:
    with place.ben.block("32MiB") as block:
        folder = folder_of(place, block)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            image = folder.with_name(folder.name + ".img")
            backing = os.open(image, os.O_RDONLY)
            try:
                block.release()
                until("an image that is removed", lambda: not image.exists())
                until("a slice that is free", lambda: block.id not in block_device(place)["leases"])
                assert fences_of(place, block) == []
                assert os.fstat(backing).st_blocks * 512 < 1 << 20, "its room on the disk is given back"
            finally:
                os.close(backing)
            with pytest.raises(OSError, match=r"."):
                os.close(os.open("more", os.O_WRONLY | os.O_CREAT, dir_fd=held))
        finally:
            os.close(held)


def content(block: sublet.Lease) -> bytes:
    guest = block.start(["sh", "-c", "cat $SUBLET_BLOCK/answer"], cwd="/")
    assert guest.wait(timeout=60) == 0
    return b"".join(piece.data for piece in guest.output())


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_volume_that_is_held_open_is_kept_and_waits_for_that_process(place: Place, how: str) -> None:
    """Its room is never quarantined, its name is refused with who has it, and it clears itself."""
    name = f"held-{how}"
    with place.ben.block("32MiB", name=name) as block:
        folder = folder_of(place, block)
        file = os.open(folder / "answer", os.O_RDWR)
        mapped = mmap.mmap(file, 3) if how == "mapped" else None
        try:
            if mapped is not None:
                os.close(file)
            block.release()
            until("a slice that is free", lambda: block.id not in block_device(place)["leases"])
            assert fences_of(place, block) == []
            assert name in [volume["name"] for volume in place.ben.request("GET", "/v1/volumes", shape=list)]
            who = rf"process {os.getpid()} \(.*, user 0\) has .*answer open"
            with place.ben.block("32MiB", name=name) as again, pytest.raises(CapacityExceeded, match=who):
                again.start(["true"], cwd="/")
            until("another slice that is free", lambda: again.id not in block_device(place)["leases"])
            assert fences_of(place, again) == []
            if mapped is None:
                with pytest.raises(OSError, match=r"."):
                    os.write(file, b"43\n")
        finally:
            if mapped is not None:
                mapped.close()
            else:
                os.close(file)
    # A guest that another test is just starting may have a copy of our mounts for a moment.
    until("a volume that no process has", lambda: not loops_of(str(folder.parent)))
    with place.ben.block("32MiB", name=name) as last:
        assert content(last) == b"42\n"


def test_a_volume_that_is_held_open_can_be_removed(place: Place) -> None:
    with place.ben.block("32MiB", name="gone") as block:
        folder = folder_of(place, block)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            block.release()
            until("a slice that is free", lambda: block.id not in block_device(place)["leases"])
            image = folder.with_name(folder.name + ".img")
            assert image.exists()
            place.ben.remove_volume("gone")
            until("an image that is removed", lambda: not image.exists())
        finally:
            os.close(held)
