"""A descriptor that outlives its lease keeps no disk from others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.supervisor.stores_work import why_no_image
from tests.security.conftest import Place
from tests.traces import until

pytestmark = pytest.mark.skipif(bool(why_no_image()), reason=f"no images here: {why_no_image()}")


def folder_of(place: Place, block: sublet.Lease) -> Path:
    """Where its image is mounted, once it has a guest."""
    assert block.start(["sh", "-c", "echo 42 > $SUBLET_BLOCK/answer"], cwd="/").wait(timeout=60) == 0
    found = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    (one,) = [path for path in found if place.home in path.parents]
    return one


def block_device(place: Place) -> dict[str, Any]:
    devices = place.owner.request("GET", "/v1/status", shape=dict)["devices"]
    found: dict[str, Any] = next(one for one in devices if one["kind"] == "block")
    return found


def test_disk_is_given_back_though_a_process_has_a_folder_of_it_open(place: Place) -> None:
    block = place.ben.block("32MiB")
    folder = folder_of(place, block)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        image = folder.with_name(folder.name + ".img")
        backing = os.open(image, os.O_RDONLY)
        try:
            block.release()
            until("an image that is removed", lambda: not image.exists())
            until("a slice that is free", lambda: not block_device(place)["leases"])
            assert place.owner.request("GET", "/v1/fences", shape=list) == []
            assert os.fstat(backing).st_blocks * 512 < 1 << 20, "its room on the disk is given back"
        finally:
            os.close(backing)
        with pytest.raises(OSError, match=r"."):
            os.close(os.open("more", os.O_WRONLY | os.O_CREAT, dir_fd=held))
    finally:
        os.close(held)
