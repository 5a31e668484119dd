"""Offices that look at their cards ten times as often: a test that waits for a look waits a tenth of the time.

What an office does with a look is the same. That of ``test_rounds`` looks as often as a user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from tests.commands import start_program
from tests.traces import PATIENCE_S, end_office, plain_env, until

__all__ = ["quick_office"]

OFFICE: Final = """
import sys
from sublet.node.agent import health
health.LOOK_EVERY_NS //= 10
from sublet.cli import main
sys.exit(main(["up", "--foreground"]))
"""


@contextlib.contextmanager
def quick_office(home: Path, machine: Mapping[str, str]) -> Iterator[None]:
    """Runs one that has answered, on the machine of these variables. It was told to end before this does."""
    home = home.resolve()
    env = {**plain_env(), **machine, "SUBLET_HOME": str(home)}
    with open(home / "said", "wb") as said:
        office = start_program(OFFICE, env=env, out=said, err=said)
    try:
        until("an office", lambda: office.poll() is not None or answers(socket_path(home)))
        assert office.poll() is None, (home / "said").read_text()
        yield
        office.wait(PATIENCE_S)
    finally:
        office.kill()
        office.wait(PATIENCE_S)
        end_office(runtime_dir(home))
