"""What the demo says, and the rule that it may only say what it has just checked."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from typing import Final

from sublet.cli.live import LiveLine
from sublet.cli.show import paint, seconds
from sublet.errors import SubletError
from sublet.invocation import typed

__all__ = ["BUSY", "ClaimFailed", "Stage"]

BUSY: Final = "If this machine is very busy, try again when it is not; otherwise please report it."
_WIDTH: Final = 100
_INDENT: Final = "     "
_PAUSE_S: Final = 0.8
"""Between acts, for people who read. A program that watches is not made to wait."""


class ClaimFailed(SubletError):
    """The demo was about to say something that is not so."""


class Stage:
    """Acts with numbers, sentences for people, and claims that are checked."""

    def __init__(self, acts: int) -> None:
        self._acts = acts
        self._act = 0
        self.claims = 0

    def open(self, text: str) -> None:
        print(paint(text, "bold"))

    def close(self, text: str) -> None:
        print(f"\n{paint(text, 'green', 'bold')}\n")
        print(f"Your turn:  {typed('sublet run --gpu 1GiB -- python3 your_program.py')}")

    def act(self, title: str) -> None:
        if self._act and sys.stdout.isatty():
            time.sleep(_PAUSE_S)
        self._act += 1
        print(f"\n{paint(f'{self._act}/{self._acts}', 'cyan', 'bold')}  {paint(title, 'bold')}")

    def tell(self, text: str) -> None:
        print(textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))

    def claim(self, holds: bool, text: str, *, but: object = "") -> None:
        """Say it if it holds; otherwise end the demo. ``but`` is what was found instead."""
        if not holds:
            raise ClaimFailed(
                f"the demo cannot say that {text[0].lower()}{text[1:].rstrip('.')}" + (f": found {but}" if but else ""),
                do="That is a bug in Sublet. Please report it with everything printed above.",
            )
        self.claims += 1
        said = textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        print(f"{paint('ok', 'green')}{said[2:]}")

    def exhibit(self, text: str) -> None:
        """Something to look at, such as a table."""
        print(textwrap.indent(text, _INDENT))

    def count_down(self, what: str, ready: Callable[[], bool], *, within_s: float, estimate_s: float) -> float:
        """Wait until it is ready, with a countdown; returns how long it took."""
        start = time.monotonic()
        with LiveLine(sys.stdout) as line:
            line.set(lambda waited: f"{_INDENT}{what}, {seconds(round(max(0.0, estimate_s - waited), 1))} to go")
            while not ready():
                if time.monotonic() - start > within_s:
                    raise ClaimFailed(f"{what} took more than {within_s:.0f} s", do=BUSY)
                time.sleep(0.05)
        return time.monotonic() - start
