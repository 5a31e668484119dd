"""Interrupts where the notebook is: none is lost, none tears what is under way."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.notebook.interrupts import Interrupts, interrupts_wait
from sublet.notebook.kernel_line import VOID_S, Call, KernelLine, Message


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with interrupts_wait() as made:
        yield made
        made.take()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_one_that_waits_is_raised_where_it_may_be(interrupts: Interrupts) -> None:
    interrupt()
    with pytest.raises(KeyboardInterrupt), interrupts.open():
        raise AssertionError("it goes no further")
    assert interrupts.take()
    with interrupts.open():
        pass


def test_one_that_comes_in_the_open_is_raised_there_and_once(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.open():
        interrupt()
    interrupt()  # not open any more


def test_a_wait_is_cut_short_and_what_cut_it_is_still_to_be_dealt_with(interrupts: Interrupts) -> None:
    gone_by: list[str] = []
    interrupts.cut_short(lambda: gone_by.append("a"))
    interrupts.cut_short(lambda: gone_by.extend("b" for _ in iter(interrupt, "never")))
    interrupts.cut_short(lambda: gone_by.append("c"))
    assert gone_by == ["a"]
    assert interrupts.are_waiting


def test_where_somebody_looks_for_them_not_even_one_that_insists_is_raised(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [5.0]
    monkeypatch.setattr("sublet.notebook.interrupts.time.monotonic", lambda: now_s[0])
    with interrupts.patient():
        for _ in range(3):
            interrupt()
            now_s[0] += 10
    with pytest.raises(KeyboardInterrupt):
        interrupt()


# ---- a line to a kernel that says what a test wants it to


class Pretended(KernelLine):
    """What comes is a list; what is sent is noted."""

    def __init__(self, *comes: Message | None) -> None:
        self.comes = deque(comes)
        """None: an interrupt, while nothing comes."""
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, channel: str, kind: str, content: Any, **_: Any) -> str:
        self.sent.append((kind, dict(content)))
        return f"message-{len(self.sent)}"

    def wait(
        self, timeout_s: float, interrupts: Interrupts | None = None, call: Call | None = None
    ) -> list[tuple[str, Message]]:
        if not self.comes:
            raise AssertionError("it waits for ever")
        came = self.comes.popleft()
        if came is None:
            interrupt()
            return []
        return [(came["channel"], came)]


def message(channel: str, kind: str, parent: str = "cell", **content: Any) -> Message:
    return {"channel": channel, "header": {"msg_type": kind}, "parent_header": {"msg_id": parent}, "content": content}


REPLY = message("shell", "execute_reply", status="error", ename="KeyboardInterrupt")
IDLE = message("iopub", "status", execution_state="idle")
OUTPUT = message("iopub", "stream", text="on")
QUESTION = message("stdin", "input_request", prompt="who?")


def answer(number: int, *, late: bool = False) -> Message:
    return message("control", "interrupt_reply", f"message-{number}", late=late)


def finished(line: Pretended, interrupts: Interrupts) -> list[str]:
    """What is shown until the cell is over."""
    shown: list[str] = []
    with interrupts.patient():
        line.finish("cell", lambda _, one: shown.append(one["header"]["msg_type"]), interrupts=interrupts)
    return shown


def test_an_interrupt_is_passed_on_for_the_cell_that_is_meant_and_nothing_is_forgotten(interrupts: Interrupts) -> None:
    line = Pretended(OUTPUT, None, OUTPUT, answer(1), REPLY, IDLE)
    assert finished(line, interrupts) == ["stream", "stream"]
    assert line.sent == [("interrupt_request", {"of": "cell"})]
    assert not interrupts.are_waiting


def test_one_that_comes_between_the_reply_and_the_end_waits(interrupts: Interrupts) -> None:
    line = Pretended(REPLY, None, IDLE)
    finished(line, interrupts)
    assert line.sent == []
    assert interrupts.are_waiting


def test_one_that_the_kernel_did_not_have_a_cell_for_waits(interrupts: Interrupts) -> None:
    line = Pretended(None, REPLY, IDLE, answer(1, late=True))
    finished(line, interrupts)
    assert interrupts.are_waiting


def test_a_question_that_crossed_with_an_interrupt_is_put_to_nobody(interrupts: Interrupts) -> None:
    line = Pretended(None, QUESTION, answer(1), REPLY, IDLE)
    assert finished(line, interrupts) == []


def test_unless_the_cell_goes_on(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=VOID_S)
    monkeypatch.setattr("sublet.notebook.kernel_line.time.monotonic", lambda: next(seconds))
    line = Pretended(None, QUESTION, answer(1), OUTPUT, REPLY, IDLE)
    assert finished(line, interrupts) == ["input_request", "stream"]
