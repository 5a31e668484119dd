"""What a tenant's guest has open it cannot hand on: not to its holder, over the connection through which it is called.

Finding: a guest sent the folder of its block and a device of its lease through the holder's own socket; both were still
usable after the lease had ended.
"""

from __future__ import annotations

import os

import pytest

from sublet.errors import SubletError
from sublet.wire import sockets
from tests.security.conftest import Place
from tests.traces import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's office gives tenants a user number")


def send_what_is_open() -> None:
    """In the guest: over each connection that it has, in frames of the protocol. Then it ends, so that its holder need
    not wonder what became of it."""
    import os
    import socket
    import struct

    fds = [os.open(path, os.O_RDONLY) for path in (os.environ.get("SUBLET_BLOCK", "/"), "/dev/zero", "/etc/passwd")]
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
            for fd in fds:
                socket.send_fds(sock, [struct.pack("!BBHII", 1, 6, 1, 0, 0)], [fd], socket.MSG_NOSIGNAL)
    os._exit(3)


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What all descriptors that this process, the holder, is handed are of."""
    found: list[str] = []
    taken = sockets._fds_in

    def note(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
        fds = taken(ancillary)
        found.extend(os.readlink(f"/proc/self/fd/{fd}") for fd in fds)
        return fds

    monkeypatch.setattr(sockets, "_fds_in", note)
    return found


def logs_of(place: Place) -> bytes:
    return b"".join(path.read_bytes() for path in (place.home / "guests").rglob("*.log"))


def test_what_a_guest_sends_its_holder_does_not_arrive(place: Place, came: list[str]) -> None:
    with place.ben.block("16MiB") as block:
        with pytest.raises(SubletError):
            block.run(send_what_is_open)
        assert [path for path in came if not path.startswith("/memfd:")] == [], "shared memory, at most"
        until("why the connection was closed", lambda: b"the descriptor of a folder was sent over it" in logs_of(place))
        assert block.run(sum, (1, 2)) == 3, "a new command has a new connection"


def test_the_owners_own_guest_has_its_holders_connection(place: Place, came: list[str]) -> None:
    """So the proof above is one: without walls the same program hands on what it likes."""
    with place.owner.block("16MiB") as block, pytest.raises(SubletError):
        block.run(send_what_is_open)
    assert any(path.startswith(str(place.home.resolve())) for path in came)


def test_large_arguments_and_results_pass_as_shared_memory(place: Place, came: list[str]) -> None:
    with place.ben.cpu() as lease:
        large = os.urandom(4 << 20)
        assert lease.run(bytes.__add__, large, b"!") == large + b"!"
    assert came
    assert all(path.startswith("/memfd:") for path in came)
