"""A tenant that fills the disk of the office ends it for nobody, and it starts on a disk that is full."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.wire.zygote import COLD_VARIABLE
from tests.integration.test_ordinary_users import ADA, ROOT, User

pytestmark = [
    pytest.mark.needs("setpriv"),
    pytest.mark.needs("mkfs.ext4"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the small disk"),
]

MIB: Final = 1 << 20
DISK: Final = 160 * MIB
IN_MEMORY: Final = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
"""Where the image lies of the small disk: that is filled, and has hundreds of commits made durable."""


@contextlib.contextmanager
def small_disk(uid: int) -> Iterator[Path]:
    """A file system of this size; a folder of the user's on it."""
    with (
        tempfile.TemporaryDirectory(prefix="sublet-disk-", dir="/tmp") as folder,
        tempfile.NamedTemporaryFile(prefix="sublet-disk-", dir=IN_MEMORY) as file,
    ):
        place, image = Path(folder), Path(file.name)
        place.chmod(0o755)
        os.posix_fallocate(file.fileno(), 0, DISK)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
        (place / "disk").mkdir()
        subprocess.run(["mount", "-o", "loop", image, place / "disk"], check=True)
        try:
            home = place / "disk" / "office"
            home.mkdir(mode=0o700)
            os.chown(home, uid, uid)
            yield home
        finally:
            subprocess.run(["umount", "-l", place / "disk"], check=True)


@pytest.mark.parametrize("uid", [0, ADA], ids=["root", "ordinary"])
def test_a_full_disk_refuses_new_leases_and_ends_nothing(uid: int) -> None:
    with small_disk(uid) as home, tempfile.TemporaryDirectory(dir="/tmp") as elsewhere:
        os.chown(elsewhere, uid, uid)
        user = User(uid, Path(elsewhere))
        words = [sys.executable, "-m", "tests.security.full_disk_story", str(home)]
        done = subprocess.run(
            user.words(*words) if uid else words,
            env=user.env | {"SUBLET_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", COLD_VARIABLE: "torch,warp"},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        logs = "".join(path.read_text() for path in home.glob("*.log"))
        assert done.returncode == 0, done.stderr[-4000:] + logs[-4000:]
        found = json.loads(done.stdout.splitlines()[-1])
    assert found["offered"] <= DISK - DISK // 8
    assert found["printed"] == 0
    assert found["granted"]
    assert found["same office"]
    assert found["filled"]
    assert "no new lease is granted: the disk of the office is full" in found["refused"]
    assert found["same office when full"]
    assert "not started" not in found
    assert found["renewed by the next office"]
    assert "no new lease is granted: the disk of the office is full" in found["refused by the next office"]
    assert found["file is back"]
    assert found["verified"]
