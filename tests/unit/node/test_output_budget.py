"""What holders do not read, all together."""

from __future__ import annotations

from sublet.errors import SubletError
from sublet.node.output_budget import UNREAD_BYTES, UNREAD_BYTES_MAX, UNREAD_LEAST_BYTES, OutputBudget


class Line:
    """A connection."""

    def __init__(self, unread: OutputBudget) -> None:
        self.unread = unread
        self.error: SubletError | None = None

    def cut(self, error: SubletError | None = None) -> None:
        self.error = error
        self.unread.now(self, 0)


def test_who_reads_nothing_takes_no_room_from_others() -> None:
    unread = OutputBudget()
    greedy = [Line(unread) for _ in range(1000)]
    waiting = dict.fromkeys(greedy, 0)
    for _ in range(3):
        for line in greedy:
            waiting[line] += unread.room(waiting[line])
            unread.now(line, waiting[line])
    assert unread.used <= UNREAD_BYTES + 1000 * UNREAD_LEAST_BYTES
    assert unread.room(0) == UNREAD_LEAST_BYTES, "who comes now goes on"
    for line in greedy:
        unread.now(line, 0)
    assert unread.used == 0
    assert unread.room(0) == UNREAD_BYTES


def test_who_leaves_most_is_cut_off_and_told_and_counted() -> None:
    unread = OutputBudget()
    worst, other = Line(unread), Line(unread)
    unread.now(other, UNREAD_BYTES_MAX // 2)
    unread.now(worst, UNREAD_BYTES_MAX // 2)
    unread.relieve()
    assert worst.error is None
    unread.now(worst, UNREAD_BYTES_MAX // 2 + 1)
    unread.relieve()
    assert "unread" in str(worst.error)
    assert other.error is None
    assert unread.cut == 1
