"""The quiet line of somebody who waits."""

from __future__ import annotations

import io

from sublet.client.model import Place
from sublet.client.progress import QueueLine
from sublet.values import LeaseId


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_on_a_terminal_and_it_is_wiped_away() -> None:
    """A shorter text covers the longer one before it."""
    terminal = Terminal()
    line = QueueLine(terminal)
    assert line.wanted
    line.show(Place(lease=LeaseId("l-1"), position=12, reason="all devices are held", estimate=270.0))
    line.show(Place(lease=LeaseId("l-1"), position=1, reason="yours is next", estimate=None))
    line.clear()
    line.clear()
    first, second, blank, rest = terminal.getvalue().split("\r")[1:]
    assert first == "sublet: queued, place 12, about 4m 30s: all devices are held"
    assert second.rstrip() == "sublet: queued, place 1: yours is next"
    assert len(second) == len(first)
    assert (blank.strip(), rest) == ("", "")


def test_nothing_where_nobody_looks() -> None:
    assert not QueueLine(io.StringIO()).wanted


def test_a_terminal_that_went_away_costs_no_lease() -> None:
    terminal = Terminal()
    line = QueueLine(terminal)
    terminal.close()
    line.show(Place(lease=LeaseId("l-1"), position=1, reason="x", estimate=None))
    line.clear()
