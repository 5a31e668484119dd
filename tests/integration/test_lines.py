"""Connections of holders to guests that serve: handed on by the supervisor, and cut by it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.guests import environment, start_spec
from sublet.client.line import open_line
from sublet.errors import Disconnected, InvalidRequest, NotFound, SubletError, Unsupported
from sublet.wire.conversation import Conversation
from sublet.wire.guests import GuestSpec, Service, StdioKind
from sublet.wire.link_events import Over
from sublet.wire.sealed_memory import SharedBuffer, map_shared
from tests.traces import until

PATIENCE_S = 90.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fabric(one_device: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=one_device) as made:
        yield made


@pytest.fixture
def lease(fabric: sublet.Fabric) -> Iterator[sublet.Lease]:
    with fabric.cpu(1, ttl="5m") as lease:
        yield lease


def serving(lease: sublet.Lease, imports: tuple[str, ...] = ()) -> sublet.Guest:
    spec = GuestSpec(
        entry="tests.integration.line_guest:main",
        imports=imports,
        cwd=str(ROOT),
        env=environment(lease, None),
        stdio=StdioKind.NULL,
        serves=True,
    )
    return start_spec(lease, spec, busy=False)


def is_cut(line: Conversation) -> bool:
    return any(isinstance(one, Over) for one in line.wait(PATIENCE_S))


@pytest.mark.parametrize("warm", ["fresh", "warm"])
def test_a_line_leads_to_the_guest_and_nobody_else(lease: sublet.Lease, warm: str) -> None:
    """Bytes and descriptors, both ways; from a fresh interpreter and from a warm one."""
    imports = ("json", "there_is_no_such_module?") if warm == "warm" else ()
    if imports:  # the first one asks for a warm interpreter, and does not wait for it
        until("a warm interpreter", lambda: _is_warm(lease, imports))
    with serving(lease, imports) as guest, open_line(lease, guest.id, Service.WORK) as line:
        assert line.call(b"hello").body == f"{lease.id} work '' {warm} hello".encode()
        with SharedBuffer.create(1 << 20) as made:
            made.view[:5] = b"large"
            fd = made.publish()
        back = line.call(b"take", (fd,)).fds
        assert bytes(map_shared(back[0], 0, 1 << 20)[:5]) == b"large"
        os.close(back[0])
        assert not lease.busy


def _is_warm(lease: sublet.Lease, imports: tuple[str, ...]) -> bool:
    with serving(lease, imports) as guest, open_line(lease, guest.id, Service.WORK) as line:
        return b" warm " in line.call(b"hello").body


def test_several_lines_and_their_ends(lease: sublet.Lease) -> None:
    with serving(lease) as guest:
        one, other = (open_line(lease, guest.id, Service.WORK) for _ in range(2))
        with one, other:
            with pytest.raises(Disconnected):
                one.call(b"leave")  # the guest hangs up, though the supervisor has a duplicate
            assert other.call(b"still").body.endswith(b"still")
            other.link.call(b"exit")
            other.flush()
            assert is_cut(other)
        assert guest.wait(PATIENCE_S) == 7
        with pytest.raises(NotFound):
            open_line(lease, guest.id, Service.WORK)


def test_the_end_of_the_lease_cuts_it(fabric: sublet.Fabric) -> None:
    lease = fabric.cpu(1, ttl="5m")
    guest = serving(lease)
    line = open_line(lease, guest.id, Service.WORK)
    assert line.call(b"hello").body.endswith(b"hello")
    lease.release()
    assert is_cut(line)
    line.close()
    with pytest.raises(SubletError):
        open_line(lease, guest.id, Service.WORK)


def test_a_stopped_guest_holds_no_line(lease: sublet.Lease) -> None:
    guest = serving(lease)
    with guest, open_line(lease, guest.id, Service.WORK) as line:
        guest.send_signal(signal.SIGKILL)
        assert is_cut(line)


def test_what_does_not_serve_says_so(lease: sublet.Lease) -> None:
    with lease.start(["sleep", "30"], stdio="null") as guest, pytest.raises(Unsupported):
        open_line(lease, guest.id, Service.WORK)
    with serving(lease) as guest, open_line(lease, guest.id, Service.DEVICE) as line:
        assert is_cut(line)
    with pytest.raises(InvalidRequest):
        start_spec(lease, GuestSpec(argv=("true",), serves=True))


def test_another_lease_of_the_same_tenant_does_not_open_it(fabric: sublet.Fabric, lease: sublet.Lease) -> None:
    with serving(lease) as guest, fabric.cpu(1) as other, pytest.raises(NotFound):
        open_line(other, guest.id, Service.WORK)


def test_there_are_only_so_many(lease: sublet.Lease) -> None:
    from sublet.node.processes.guest_connections import VISITS_MAX

    with serving(lease) as guest:
        lines = [open_line(lease, guest.id, Service.WORK) for _ in range(VISITS_MAX)]
        with pytest.raises(SubletError, match="the most"):
            open_line(lease, guest.id, Service.WORK)
        lines.pop().close()
        until("a line that opens", lambda: _opens(lease, guest, lines))
        for line in lines:
            line.close()


def _opens(lease: sublet.Lease, guest: sublet.Guest, lines: list[Conversation]) -> bool:
    try:
        lines.append(open_line(lease, guest.id, Service.WORK))
    except SubletError:
        return False
    return True
