"""How the end of a cell is waited for, with a kernel that says what a test wants it to say."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_client.jsonutil import extract_dates
from jupyter_client.session import Session

from sublet.notebook.kernel_line import KernelLine, Message, read_message

ASKED = "asked-1"


def said(channel: str, kind: str, parent: str = ASKED, **content: Any) -> tuple[str, Message]:
    return channel, {"parent_header": {"msg_id": parent}, "header": {"msg_type": kind}, "content": content}


REPLY = said("shell", "execute_reply", status="ok")
IDLE = said("iopub", "status", execution_state="idle")


def interrupted(number: int, *, late: bool) -> tuple[str, Message]:
    return said("control", "interrupt_reply", f"interrupt-{number}", late=late)


class Line(KernelLine):
    """Hears one of these after the other."""

    def __init__(self, *rounds: list[tuple[str, Message]]) -> None:
        self.rounds = list(rounds)
        self.interrupts: list[str] = []

    def wait(self, *_: Any) -> list[tuple[str, Message]]:
        return self.rounds.pop(0)

    def interrupt(self, asked: str = "") -> str:
        self.interrupts.append(asked)
        return f"interrupt-{len(self.interrupts)}"


class Interrupts:
    """So many come, one in each round."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.were_put_back = 0

    def take(self) -> bool:
        self.count -= 1
        return self.count >= 0

    def put_back(self) -> None:
        self.were_put_back += 1


def finish(line: Line, interrupts: Any = None, show: Any = lambda *_: None) -> Message:
    return line.finish(ASKED, show, interrupts=interrupts)


@pytest.mark.parametrize("rounds", [([REPLY], [IDLE]), ([IDLE], [REPLY]), ([IDLE, REPLY],)])
def test_a_cell_is_over_with_its_reply_and_when_the_kernel_is_idle(rounds: Any) -> None:
    line = Line(*rounds)
    assert finish(line) == REPLY[1]
    assert line.rounds == []


def test_an_interrupt_that_was_passed_on_is_answered_before_the_cell_is_over() -> None:
    """Else its answer, or the interrupt itself, would come into the next cell."""
    line, interrupts = Line([REPLY, IDLE], [], [interrupted(1, late=False)]), Interrupts(1)
    assert finish(line, interrupts) == REPLY[1]
    assert (line.rounds, line.interrupts, interrupts.were_put_back) == ([], [ASKED], 0)


@pytest.mark.parametrize("late", [(True, False), (False, True), (False, False)])
def test_an_interrupt_that_came_too_late_for_the_cell_is_put_back_for_the_next(late: tuple[bool, bool]) -> None:
    """One of two is enough: the user pressed it for something."""
    line = Line([], [REPLY, IDLE], *([interrupted(n + 1, late=is_late)] for n, is_late in enumerate(late)))
    interrupts = Interrupts(2)
    finish(line, interrupts)
    assert interrupts.were_put_back == any(late)


def test_what_cannot_be_shown_stops_the_cell_and_is_raised_once_it_is_over() -> None:
    """What comes after it is not shown, and the next cell does not find this one running."""
    stream = said("iopub", "stream", text="x")
    line = Line([stream, stream], [REPLY, IDLE], [interrupted(1, late=False)])
    shown: list[str] = []

    def show(channel: str, message: Message) -> None:
        shown.append(channel)
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        finish(line, show=show)
    assert (shown, line.rounds, line.interrupts) == (["iopub"], [], [ASKED])


@pytest.mark.parametrize(
    "content",
    [{"name": "stdout", "text": "a\udcffb é \0"}, {"data": {"image/png": "iVBO"}, "n": [1, 2.5, None, True]}, {}],
)
@pytest.mark.parametrize("buffers", [(), (b"", b"\x00\xff", b"{}")])
def test_a_message_says_what_jupyter_reads_in_it(content: dict[str, Any], buffers: tuple[bytes, ...]) -> None:
    """But for the dates, which stay as they are written."""
    session = Session(key=b"secret")
    parent = session.msg("execute_request", {"code": "1"})
    parts = session.serialize(session.msg("stream", content, parent=parent, metadata={"a": 1}), [b"stream", b"topic"])
    names, rest = session.feed_identities([*parts, *buffers])
    assert names == [b"stream", b"topic"]
    expected, found = session.deserialize(rest), read_message([*parts, *buffers])
    for part in ("header", "parent_header"):
        assert isinstance(found[part]["date"], str)
        found[part] = extract_dates(found[part])
    assert found == expected
    with pytest.raises(ValueError, match="unpack"):
        read_message(parts[:-1])
