"""The plain messages of `sublet run` are those that ``wire.guests`` defines."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.cli import declare, guest_command
from sublet.cli.attach import Outlet
from sublet.cli.messages import OUTPUT_HEAD_BYTES, STREAM_STDOUT, greeting, message, output_head, read
from sublet.cli.table import load
from sublet.errors import Disconnected, InvalidRequest
from sublet.lease_end import EndReason
from sublet.values import GuestId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import (
    OUTPUT_HEAD,
    STDOUT,
    Attach,
    EndGuest,
    Greeting,
    GuestNews,
    GuestSpec,
    HolderCall,
    ListGuests,
    NotStarted,
    Resize,
    SignalGuest,
    Start,
    Started,
    StdioKind,
)

G = GuestId("g-1")
SPEC = {"argv": ["a", "\udcff"], "cwd": "/", "env": {"A": "ü"}, "stdio": "pty", "rows": 3, "cols": 4, "umask": 7}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (message("Attach", guest=G, offset=3, follow=False, stdin=True, lossless=True), None),
        (message("EndGuest", guest=G, grace_ns=-1), EndGuest(guest=G)),
        (message("SignalGuest", guest=G, number=2, tree=True), SignalGuest(guest=G, number=2, tree=True)),
        (message("Resize", guest=G, rows=1, cols=2), Resize(guest=G, rows=1, cols=2)),
        (message("ListGuests", lease="", ended=True), ListGuests(ended=True)),
        (message("Start", spec=SPEC), None),
    ],
)
def test_what_is_said_is_understood(said: bytes, meant: HolderCall | None) -> None:
    expected = {
        "Attach": Attach(guest=G, offset=3, follow=False, stdin=True, lossless=True),
        "Start": Start(
            spec=GuestSpec(argv=("a", "\udcff"), cwd="/", env={"A": "ü"}, stdio=StdioKind.PTY, rows=3, cols=4, umask=7)
        ),
    }
    found = loads(HolderCall, said)
    assert found == (meant or expected[type(found).__name__])


class Older:
    """A conversation with a supervisor from before ``Start.awaits``."""

    def __init__(self, refusal: str = "Start has no field 'awaits'") -> None:
        self.asked: list[object] = []
        self.refusal = refusal

    def call(self, body: bytes) -> SimpleNamespace:
        self.asked.append(loads(HolderCall, body))
        if b"awaits" in body:
            raise InvalidRequest(self.refusal)
        return SimpleNamespace(body=dumps(Started(guest=G, pid=1)))


def test_a_supervisor_from_before_an_upgrade_is_asked_as_it_understands() -> None:
    older: Any = Older()
    assert guest_command._started(older, SPEC)["guest"] == G
    assert [getattr(asked, "awaits", None) for asked in older.asked] == [True, False]
    other: Any = Older("Start.spec.argv is 3, not a list")
    with pytest.raises(InvalidRequest, match="argv"):
        guest_command._started(other, SPEC)
    assert len(other.asked) == 1


def test_who_connects_is_understood() -> None:
    assert loads(Greeting, greeting(capability="c")) == Greeting(capability="c")
    assert loads(Greeting, greeting(access="a")) == Greeting(access="a")
    assert loads(Greeting, greeting(access=None)) == Greeting()


def test_what_is_answered_is_read() -> None:
    answer = read(dumps(NotStarted(exit_code=127, message="m", do="d")))
    assert answer == {"is": "NotStarted", "exit_code": 127, "message": "m", "do": "d"}
    news = read(dumps(GuestNews(guest=G, what="exited", exit_code=3, reason=EndReason.OUT_OF_MEMORY)))
    assert (news["what"], news["exit_code"], news["reason"]) == ("exited", 3, "out_of_memory")


def test_the_head_of_a_piece_of_output() -> None:
    assert OUTPUT_HEAD.size == OUTPUT_HEAD_BYTES
    assert STDOUT == STREAM_STDOUT
    assert output_head(OUTPUT_HEAD.pack(STDOUT, 1 << 40) + b"x") == (STDOUT, 1 << 40)


def test_what_is_too_large_or_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is the most"):
        message("Start", spec={"env": {"A": "x" * (1 << 20)}})
    for body in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(Disconnected):
            read(body)


# ---- the words of somebody else's command ----


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["true"], ["true"]),
        (["--", "true"], ["true"]),
        (["--gpu", "1GiB", "-T", "python", "-c", "x", "--gpu", "2"], ["python", "-c", "x", "--gpu", "2"]),
        (["--gpu=1GiB", "--", "--odd"], ["--odd"]),
        (["--", "a", "--", "b"], ["a", "--", "b"]),
        (["-", "x"], ["-", "x"]),
    ],
)
def test_the_command_begins_at_the_first_word_that_is_not_ours(words: list[str], command: list[str]) -> None:
    assert declare.parse(load("run"), words)["command"] == command


def test_a_target_may_come_before_the_command() -> None:
    raw = declare.parse(load("exec"), ["--name", "n", "l-1", "--", "ls", "-l"])
    assert (raw["lease"], raw["name"], raw["command"]) == ("l-1", "n", ["ls", "-l"])


@pytest.mark.parametrize("words", [[], ["--"], ["--bogus", "true"], ["--gpu"], ["--no-wait=1", "true"], ["-h"]])
def test_what_is_not_complete_and_correct_is_left_to_the_full_way(words: list[str]) -> None:
    with pytest.raises(declare.NotUnderstood):
        declare.parse(load("run"), words)


# ---- writing without waiting ----


def test_an_outlet_never_waits_and_keeps_the_order() -> None:
    reading, writing = os.pipe()
    done: list[int] = []
    try:
        outlet = Outlet(writing)
        blob = os.urandom(1 << 20)
        outlet.write(blob, lambda: done.append(1))
        outlet.write(b"end", lambda: done.append(2))
        assert done == []
        got = b""
        while len(done) < 2:
            assert outlet.waits
            outlet.ready()
            got += os.read(reading, 1 << 20)
        assert got == blob + b"end"
        assert done == [1, 2]
    finally:
        os.close(reading)
        os.close(writing)


def test_an_outlet_whose_reader_has_gone_drops_what_it_is_given() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    said: list[str] = []
    try:
        outlet = Outlet(writing, on_broken=lambda: said.append("broken"))
        outlet.write(b"x", lambda: said.append("dropped"))
        outlet.ready()
        outlet.write(b"y", lambda: said.append("dropped"))
        assert not outlet.waits
        assert said == ["broken", "dropped", "dropped"]
    finally:
        os.close(writing)
