"""Offices that look at their cards ten times as often: a test that waits for a look waits a tenth of the time.

What an office does with a look is the same. Those of ``test_rounds`` and ``test_machines`` look as often as a user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from sublet.client.home import socket_path
from sublet.client.office import answers
from tests.commands import start_program
from tests.integration.test_run import Shell
from tests.traces import PATIENCE_S, until

__all__ = ["quick_office"]

OFFICE: Final = """
import sys
from sublet.node.agent import health
health.LOOK_EVERY_NS //= 10
from sublet.cli import main
sys.exit(main(["up", "--foreground"]))
"""


@contextlib.contextmanager
def quick_office(shell: Shell) -> Iterator[Shell]:
    """The office of this shell, which has answered."""
    path = socket_path(shell.home.resolve())
    with open(shell.home / "said", "wb") as said:
        office = start_program(OFFICE, env=shell.env, out=said, err=said)
    try:
        until("an office", lambda: office.poll() is not None or answers(path))
        assert office.poll() is None, (shell.home / "said").read_text()
        yield shell
        shell.end()
        office.wait(PATIENCE_S)
    finally:
        office.kill()
        office.wait(PATIENCE_S)
