"""Tables of cases that are one test: a failure names its case, as the test's id otherwise would.

A test of its own costs milliseconds in each process of the suite, many times what a case of such a table takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["case"]


@contextlib.contextmanager
def case(*parts: object) -> Iterator[None]:
    """Whatever fails inside names these."""
    try:
        yield
    except BaseException as error:  # pytest's own failures are no `Exception`
        error.add_note(f"case: {', '.join(map(repr, parts))}")
        raise
