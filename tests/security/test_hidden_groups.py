"""A tenant's guest reads nothing of the machine's control groups, nor of the one that it is in itself.

Finding: guests of an ordinary user's office saw the names, processes and memory of all groups of the machine.
"""

from __future__ import annotations

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
