"""The socket at which guests ask for their volumes: who is let in, who waits, and what one guest may take."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.storage import publish_door
from sublet.node.storage.publish_door import PER_GUEST_MAX, PublishDoor
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.refusals import Refusal
from sublet.wire.volumes import Collected, OpenVolume, Publish, VolumeReply

PATIENCE_S = 30.0
ANSWER = Collected(checkpoints=(), packs=0, freed_bytes=0)


class Bench:
    """A door, one guest, and answers that a test gives when it likes."""

    def __init__(self, place: Path) -> None:
        self.loop = Loop(SystemClock())
        self.guest: Any = SimpleNamespace(tenant="local")
        self.answers: list[Callable[[Any], None]] = []
        publishing: Any = SimpleNamespace(ask=lambda asker, call, then: self.answers.append(then))
        self.door = PublishDoor(self.loop, str(place), publishing, lambda peer: self.guest, lambda guest: Any)  # type: ignore[arg-type, return-value]
        self.path = self.door.open()
        self.peers: list[socket.socket] = []

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(0.0)
        sock.connect(self.path)
        self.peers.append(sock)
        return sock

    def until(self, is_so: Callable[[], object]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end_s
            self.loop.turn(0.01)

    def answer_to(self, sock: socket.socket) -> Any:
        """What comes there; None if it is hung up."""
        found: list[bytes] = []

        def came() -> bool:
            try:
                found.append(sock.recv(1 << 16))
            except BlockingIOError:
                return False
            return True

        self.until(came)
        return loads(VolumeReply, found[0]) if found[0] else None

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.until(lambda: not self.door._turned)
        self.door.close()
        self.loop.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_second_question_waits_for_the_answer_to_the_first(bench: Bench) -> None:
    """Whoever asks in advance is not hung up on, and has one question under way at a time."""
    guest = bench.connect()
    guest.send(dumps(OpenVolume()))
    guest.send(dumps(OpenVolume()))
    bench.until(lambda: bench.answers)
    for _ in range(5):
        bench.loop.turn(0.0)
    assert len(bench.answers) == 1
    bench.answers[0](ANSWER)
    assert isinstance(bench.answer_to(guest), Collected)
    bench.until(lambda: len(bench.answers) == 2)
    bench.answers[1](ANSWER)
    assert isinstance(bench.answer_to(guest), Collected)


def test_an_answer_for_a_guest_that_has_gone_harms_nobody(bench: Bench) -> None:
    gone, there = bench.connect(), bench.connect()
    gone.send(dumps(OpenVolume()))
    bench.until(lambda: bench.answers)
    gone.close()
    bench.until(lambda: len(bench.door._lines) == 1)
    bench.answers.pop()(ANSWER)
    there.send(dumps(OpenVolume()))
    bench.until(lambda: bench.answers)
    bench.answers.pop()(ANSWER)
    assert isinstance(bench.answer_to(there), Collected)


def test_one_guest_has_so_many_connections_and_the_next_is_told_why(bench: Bench) -> None:
    """Else it takes those of all others."""
    for _ in range(PER_GUEST_MAX):
        bench.connect()
    bench.until(lambda: len(bench.door._lines) == PER_GUEST_MAX)
    refused = bench.answer_to(bench.connect())
    assert isinstance(refused, Refusal)
    assert f"{PER_GUEST_MAX} connections" in refused.message


def test_who_was_refused_and_does_not_leave_is_hung_up_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who stay take places in which others would be told a reason."""
    monkeypatch.setattr(publish_door, "TURNED_S", 0.01)
    monkeypatch.setattr(publish_door, "TURNED_MAX", 1)
    bench.guest = None
    for _ in range(2):
        stranger = bench.connect()
        refused = bench.answer_to(stranger)
        assert isinstance(refused, Refusal), "each is told why"
        assert bench.answer_to(stranger) is None


def test_after_a_connection_that_was_costly_to_identify_the_next_one_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that connects again and again must not keep the supervisor from its work."""
    monkeypatch.setattr(publish_door, "QUICK_NS", -1)
    monkeypatch.setattr(publish_door, "REST_SHARE", 1e6)
    bench.connect()
    bench.until(lambda: bench.door._lines)
    bench.connect()
    for _ in range(5):
        bench.loop.turn(0.01)
    assert len(bench.door._lines) == 1


def test_where_many_are_refused_at_once_the_others_are_hung_up_on_without_a_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_door, "TURNED_MAX", 1)
    bench.guest = None
    first, second = bench.connect(), bench.connect()
    assert isinstance(bench.answer_to(first), Refusal)
    assert bench.answer_to(second) is None
    first.close()


def test_who_was_refused_and_leaves_without_reading_why_leaves_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when the time for it is over."""
    monkeypatch.setattr(publish_door, "TURNED_S", 1e6)
    bench.guest = None
    stranger = bench.connect()
    bench.until(lambda: bench.door._turned)
    stranger.close()
    bench.until(lambda: not bench.door._turned)


@pytest.mark.parametrize(
    ("bound", "says"),
    [("CONNECTIONS_MAX", "connections to volumes are open"), ("PER_TENANT_MAX", "this tenant's guests")],
)
def test_connections_are_bounded_in_all_and_for_a_tenant(
    bound: str, says: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_door, bound, 2)
    one, other = SimpleNamespace(tenant="local"), SimpleNamespace(tenant="local")
    for guest in (one, other):
        bench.guest = guest
        bench.connect()
        bench.until(lambda: guest in [line.guest for line in bench.door._lines])  # noqa: B023
    bench.guest = SimpleNamespace(tenant="local")
    refused = bench.answer_to(bench.connect())
    assert isinstance(refused, Refusal)
    assert says in refused.message
    if bound == "PER_TENANT_MAX":
        bench.guest = SimpleNamespace(tenant="another")
        bench.connect()
        bench.until(lambda: len(bench.door._lines) == 3)


def test_a_question_that_is_too_long_is_refused_as_such(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names many packs: what it was cut to could not be read, which would say nothing of how to go on."""
    monkeypatch.setattr(publish_door, "MESSAGE_MAX", 100)
    guest = bench.connect()
    guest.send(dumps(Publish(lease=LeaseId("l-a"), epoch=Epoch(1, 1), staging="s", manifest="m", packs=("p" * 80,))))
    refused = bench.answer_to(guest)
    assert isinstance(refused, Refusal)
    assert (refused.message, refused.do) == ("a question has more than 100 bytes", "Name fewer packs.")
    guest.send(dumps(OpenVolume()))
    bench.until(lambda: bench.answers)


def test_a_guest_that_does_not_read_its_answers_is_hung_up_on(bench: Bench) -> None:
    """It takes no memory and no turn of others."""
    guest = bench.connect()
    answer = Collected(checkpoints=tuple(range(8000)), packs=0, freed_bytes=0)
    bench.until(lambda: bench.door._lines)
    while bench.door._lines:
        guest.send(dumps(OpenVolume()))
        bench.until(lambda: bench.answers or not bench.door._lines)
        while bench.answers:
            bench.answers.pop()(answer)
