"""That what leaks is seen, and what others close or open for a moment is not."""

from __future__ import annotations

import os
import threading

import pytest

from tests import left_open
from tests.left_open import nothing_left_open, some_fd


def test_what_stays_open_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_open, "PATIENCE_S", 0.05)
    with pytest.raises(AssertionError, match=r"left open: .*memfd:leaked"), nothing_left_open():
        fd = os.memfd_create("leaked")
    os.close(fd)


def test_what_others_close_meanwhile_hides_nothing_and_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    old = some_fd()
    with nothing_left_open():
        os.close(old)
    old = some_fd()
    monkeypatch.setattr(left_open, "PATIENCE_S", 0.05)
    with pytest.raises(AssertionError, match="memfd:leaked"), nothing_left_open():
        fd = _instead_of(old)
    os.close(fd)


def test_what_another_thread_has_open_for_a_moment_is_waited_for() -> None:
    with nothing_left_open():
        passing = threading.Timer(0.1, os.close, (some_fd(),))
        passing.start()
    passing.join()


def _instead_of(old: int) -> int:
    """With the same number."""
    os.close(old)
    return os.memfd_create("leaked")
