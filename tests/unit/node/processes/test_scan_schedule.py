"""When processes are looked at, and whether all of the machine's or only the supervisor's children."""

from __future__ import annotations

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.processes.scan_schedule import ScanSchedule


def test_a_scan_that_nothing_needed_does_not_make_the_next_look_a_scan() -> None:
    """The supervisor asks for a scan at intervals, also while no guest runs. The end of the next lease would wait for
    it: one read for each process of the machine."""
    loop = Loop(SystemClock())
    looks: list[bool] = []
    guests: list[str] = []
    looking = ScanSchedule(loop, looks.append, lambda: bool(guests))
    try:
        looking.soon(at_all=True)
        loop.turn(0)
        guests.append("g-1")
        looking.soon()
        loop.turn(0)
        assert looks == [False]
    finally:
        loop.close()


def test_a_scan_that_was_asked_for_before_the_look_is_one() -> None:
    loop = Loop(SystemClock())
    looks: list[bool] = []
    looking = ScanSchedule(loop, looks.append, lambda: True)
    try:
        looking.soon(at_all=True)
        looking.soon()
        loop.turn(0)
        assert looks == [True]
    finally:
        loop.close()
