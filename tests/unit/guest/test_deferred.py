"""What a call leaves behind is done when it is answered: once, in order, whatever one of them raises."""

from __future__ import annotations

import pytest

from sublet.guest.deferred import afterwards, answering


def test_without_a_call_it_is_done_at_once() -> None:
    done: list[int] = []
    afterwards(lambda: done.append(1))
    assert done == [1]


def test_it_is_done_behind_the_answer_and_in_order() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("heard by nobody")

    with answering():
        afterwards(lambda: done.append("one"))
        afterwards(fail)
        afterwards(lambda: done.append("two"))
        done.append("answer")
    assert done == ["answer", "one", "two"]
    with answering():
        pass
    assert done == ["answer", "one", "two"]


def test_it_is_done_though_the_answer_could_not_be_given() -> None:
    done: list[int] = []

    def answers() -> None:
        with answering():
            afterwards(lambda: done.append(1))
            raise OSError("hung up")

    with pytest.raises(OSError, match="hung up"):
        answers()
    assert done == [1]
