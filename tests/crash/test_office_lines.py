"""The lines on which the crash tests ask an office."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from sublet.client.home import socket_path
from tests.crash.office_process import Line, OfficeProcess
from tests.traces import until

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


def test_a_line_that_was_idle_for_too_long_is_another_for_the_next_request() -> None:
    """On a slow machine two requests of a test may be minutes apart, and the office has closed it."""
    with tempfile.TemporaryDirectory(prefix="sublet-line-") as folder, contextlib.ExitStack() as stack:
        office = OfficeProcess(Path(folder))
        path = socket_path(office.home)
        path.parent.mkdir(parents=True, mode=0o700)
        stack.callback(shutil.rmtree, path.parent)
        there = stack.enter_context(socket.socket(socket.AF_UNIX))
        there.bind(os.fspath(path))
        there.listen()
        there.settimeout(30.0)

        def answer_each_on_a_line_of_its_own() -> None:
            for _ in range(2):
                with there.accept()[0] as line:
                    line.recv(1 << 16)
                    line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        serving = threading.Thread(target=answer_each_on_a_line_of_its_own)
        serving.start()
        try:
            for _ in range(2):
                assert office.ask("GET", "/v1/status").status == 200
                until("it was closed", lambda: office.lines[0].was_closed)
        finally:
            serving.join()
            office.lines[0].close()
