"""The queue of a worker's main thread: what comes between two calls."""

from __future__ import annotations

import os
import signal

import pytest

from sublet.guest import main_thread as desk_module
from sublet.guest.main_thread import MainThreadQueue


class Done(BaseException):
    """Nothing more is to be done."""


def test_a_signal_that_means_nothing_any_more_is_met_once_and_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a warning that was taken back before the main thread came to it."""
    monkeypatch.setattr(desk_module, "_workers", set())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    met, done = [], []

    def over() -> None:
        raise Done

    try:
        signal.signal(signal.SIGTERM, lambda number, frame: met.append(number))
        main_queue = MainThreadQueue()
        main_queue.arrange()
        os.kill(os.getpid(), signal.SIGTERM)
        assert met == []
        for job in (lambda: done.append("first"), lambda: done.append("second"), over):
            main_queue.put(job)
        with pytest.raises(Done):
            main_queue.work()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (met, done) == ([signal.SIGTERM], ["first", "second"])
    assert not main_queue.is_ending
