"""Renders Sublet's own errors for a notebook: what happened, and what to do.

A traceback through our files says nothing to the cell's author, and losing a device is news, not a crash. The cell
fails all the same, with the same class and the same attributes; only what is shown is short.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Final

from sublet.errors import LeaseEnded, SubletError
from sublet.invocation import typeable
from sublet.notebook.output import failed_cell

_RED, _AMBER, _BOLD, _END = "\x1b[31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"
SHOWN_BY_IPYTHON: Final = "_render_traceback_"
"""Where an exception has this, IPython shows what it returns."""


@contextlib.contextmanager
def without_traceback(*, above: int = 0) -> Iterator[None]:
    """What is raised in here is shown without its traceback. ``above``: lines of the cell before what is read."""
    try:
        yield
    except KeyboardInterrupt as error:
        setattr(error, SHOWN_BY_IPYTHON, lambda: [f"{_BOLD}{_RED}KeyboardInterrupt{_END}"])
        raise
    except SubletError as error:
        setattr(error, SHOWN_BY_IPYTHON, functools.partial(short, error))
        raise
    except SyntaxError as error:  # of the cell, which was read before anything was asked for
        error.filename, error.lineno = "the cell", (error.lineno or 1) + above
        lines = "".join(traceback.format_exception_only(error)).splitlines()
        content = {"ename": type(error).__name__, "evalue": error.msg, "traceback": lines}
        raise failed_cell(content) from None


def short(error: SubletError) -> list[str]:
    """The lines that are shown."""
    colour = _AMBER if isinstance(error, LeaseEnded) else _RED
    headline = f"{_BOLD}{colour}{type(error).__name__}{_END}: {typeable(error.message)}"
    return [headline, *typeable(error.do).splitlines()]
