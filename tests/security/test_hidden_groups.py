"""A tenant's guest reads nothing of the machine's control groups, and other users read no id in their names.

Findings: guests of an ordinary user's office saw the names, processes and memory of all groups of the machine; and
every user of the machine saw the ids of leases in the names of groups, and of folders where root had mounted something.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from tests.security.conftest import Place

LOOKS = "find /sys/fs/cgroup; echo told; cat /proc/[1s]*/cgroup; grep cgroup /proc/self/mountinfo; echo looked"


def test_a_guest_finds_no_group_of_the_machine(place: Place) -> None:
    with place.ben.cpu(1) as lease:
        guest = lease.start(["sh", "-c", f"exec 2> /dev/null; {LOOKS}"], cwd="/")
        said = b"".join(piece.data for piece in guest.output()).decode()
    listed, _, told = said.partition("told\n")
    assert listed.strip() in ("", "/sys/fs/cgroup"), "covered, or not there"
    assert "0::/\n" in told or ":memory:/\n" in told, "its own group is the topmost that it is told of"
    assert "looked" in told
    assert "sublet-" not in said
    assert lease.id not in said


READABLE = """
cat /proc/[0-9]*/cgroup /proc/[0-9]*/cmdline /proc/self/mountinfo /proc/net/unix /sys/block/*/loop/backing_file
find /sys/fs/cgroup -type d
"""
"""What every user of the machine reads of others' processes, mounts, sockets, images and groups."""
STRANGER = 65534


def test_no_other_user_of_the_machine_reads_the_id_of_a_lease_or_guest(place: Place) -> None:
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        who = {"user": STRANGER, "group": STRANGER, "extra_groups": ()}
    with (
        place.ben.cpu(1, memory="64MiB") as lease,
        place.ben.block("16MiB") as block,
        lease.start(["sleep", "600"], cwd="/") as guest,
        block.start(["sleep", "600"], cwd="/") as other,
    ):
        looks = subprocess.run(["sh", "-c", READABLE], capture_output=True, cwd="/", **who)
        told = looks.stdout.decode(errors="replace")
        assert "sleep\x00600\x00" in told
        assert "0::/" in told
        assert [one for one in (lease.id, block.id, guest.id, other.id) if one in told] == []
