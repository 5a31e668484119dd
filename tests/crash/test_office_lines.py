"""The lines on which the crash tests ask an office."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from tests.crash.office_process import Line

pytestmark = pytest.mark.crash


def test_a_line_waits_for_an_office_whose_backlog_is_full() -> None:
    """On a slow machine the office takes its connections late; that is no office that has ended."""
    with tempfile.TemporaryDirectory(prefix="sublet-line-") as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "s"
        there = stack.enter_context(socket.socket(socket.AF_UNIX))
        there.bind(os.fspath(path))
        there.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(os.fspath(path))
        room = threading.Timer(0.05, lambda: stack.enter_context(there.accept()[0]))
        room.start()
        try:
            stack.callback(Line(path).close)
        finally:
            room.join()
