"""A tenant's guest reads nothing of the machine's control groups, nor of the one that it is in itself.

Finding: guests of an ordinary user's office saw the names, processes and memory of all groups of the machine.
"""

from __future__ import annotations

from tests.security.conftest import Place

LOOKS = "find /sys/fs/cgroup /sys/fs/cgroup/*; cat /proc/self/cgroup /proc/1/cgroup; grep cgroup /proc/self/mountinfo"


def test_a_guest_finds_no_group_of_the_machine(place: Place) -> None:
    with place.ben.cpu(1) as lease:
        guest = lease.start(["sh", "-c", f"({LOOKS}) 2> /dev/null; echo looked"], cwd="/")
        said = b"".join(piece.data for piece in guest.output()).decode()
        assert said.endswith("looked\n")
        assert "0::/" in said or ":memory:/" in said, "it is told of groups, and that its own is the topmost"
        for one in ("sublet-", lease.id, "/sys/fs/cgroup/"):
            assert one not in said
