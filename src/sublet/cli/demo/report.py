"""Prints the demo: its steps, the checks behind each sentence, and progress."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from sublet.cli.progress_line import LiveLine
from sublet.cli.show import paint, plural, seconds
from sublet.errors import SubletError
from sublet.invocation import typeable, typed

BUSY: Final = "If this machine is very busy, try again when it is not; otherwise please report it."
_WIDTH: Final = 98
_INDENT: Final = "     "


class CheckFailed(SubletError):
    """What the demo was about to print is not true."""


class Report:
    """Numbered steps. ``result`` prints a sentence that the checks before it (``check``) have shown to be true."""

    def __init__(self, steps: int, *, verbose: bool) -> None:
        self._steps = steps
        self._step = 0
        self._verbose = verbose
        self._line = LiveLine(sys.stdout) if sys.stdout.isatty() else None
        self.checks = 0

    def __enter__(self) -> Self:
        if self._line is not None:
            self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.__exit__(kind, error, trace)

    def open(self, text: str) -> None:
        self._print(textwrap.fill(text, _WIDTH))

    def step(self, title: str, about: str) -> None:
        """Begin the next step: what is about to happen."""
        self._step += 1
        self._print(f"\n{paint(f'{self._step}/{self._steps}', 'cyan', 'bold')}  {paint(title, 'bold')}")
        self._print(textwrap.fill(about, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))

    def progress(self, text: str) -> None:
        """What runs now, with the seconds since, on the last line of a terminal."""
        if self._line is not None:
            self._line.set(lambda waited: f"{_INDENT}{text}, {waited:.0f} s")

    def check(self, holds: bool, text: str, *, but: object = "") -> None:
        """Go on if it holds; otherwise end the demo. ``but`` is what was found instead."""
        if not holds:
            raise CheckFailed(
                f"a check of the demo failed: {text.rstrip('.')}" + (f": found {but}" if but else ""),
                do="That is a bug in Sublet. Please report it with everything printed above.",
            )
        self.checks += 1
        if self._verbose:
            self._print(_hanging("   + ", text))

    def result(self, text: str) -> None:
        """What the checks of this step have shown."""
        self._print(paint("ok", "green") + _hanging(_INDENT, text)[2:])

    def print_block(self, text: str) -> None:
        """Something to look at, such as a table."""
        self._print(textwrap.indent(text, _INDENT))

    def detail(self, text: str) -> None:
        """The same, with --verbose only."""
        if self._verbose:
            self.print_block(text)

    def close(self, took_s: float, left: list[tuple[str, str]]) -> None:
        """The end: what was left behind, and what to type next."""
        if self._line is not None:
            self._line.set(lambda _: "")
        ended = paint(f"All {plural(self.checks, 'check')} passed in {took_s:.0f} s.", "green", "bold")
        if left:
            self._print(f"\n{ended} It leaves two files:")
            width = max(len(path) for path, _ in left)
            for path, what in left:
                self._print(f"{_INDENT}{path.ljust(width)}  {what}")
        else:
            self._print(f"\n{ended}")
        self._print(f"Next, run a command under a lease:\n{_INDENT}{paint(first_command(), 'bold')}")

    def wait(self, what: str, ready: Callable[[], bool], *, within_s: float, estimate_s: float) -> float:
        """Wait until it is ready, with a countdown; returns how long it took."""
        start = time.monotonic()
        if self._line is not None:
            self._line.set(lambda waited: f"{_INDENT}{what}, {seconds(round(max(0.0, estimate_s - waited)))} left")
        while not ready():
            if time.monotonic() - start > within_s:
                raise CheckFailed(f"{what} took more than {within_s:.0f} s", do=BUSY)
            time.sleep(0.05)
        return time.monotonic() - start

    def _print(self, text: str) -> None:
        if self._line is None:
            print(typeable(text), flush=True)
        else:
            self._line.print_above(typeable(text))


def first_command() -> str:
    """It runs as it stands: it needs no file, and names a Python that is there."""
    python = next((name for name in ("python3", "python") if shutil.which(name)), sys.executable)
    program = "print('hello from a leased device')"
    return f'{typed("sublet run --gpu 1GiB")} -- {shlex.quote(python)} -c "{program}"'


def _hanging(first: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=_INDENT, break_on_hyphens=False, break_long_words=False
    )
