"""A supervisor that does not answer is silent; an office or a machine that stood still itself says nothing of it."""

from __future__ import annotations

from sublet.node.agent.core import EVERY_NS, SILENT_NS, Watchdog
from sublet.values import NS_PER_S


def test_it_is_asked_every_second_and_one_question_at_a_time() -> None:
    watch = Watchdog()
    assert not watch.is_ping_due(0), "it was just found, and answered"
    assert not watch.is_ping_due(EVERY_NS - 1)
    assert watch.is_ping_due(EVERY_NS)
    assert not watch.is_ping_due(2 * EVERY_NS)
    watch.answered(2 * EVERY_NS)
    assert not watch.is_ping_due(3 * EVERY_NS - 1)
    assert watch.is_ping_due(3 * EVERY_NS)


def test_silence_counts_from_the_question() -> None:
    watch = Watchdog()
    for n in range(2):
        watch.is_ping_due(n * NS_PER_S)
    asked_ns = NS_PER_S
    assert watch.silent_ns(asked_ns + SILENT_NS - 1) == 0
    assert watch.silent_ns(asked_ns + SILENT_NS) == SILENT_NS
    watch.answered(asked_ns + SILENT_NS)
    assert watch.silent_ns(asked_ns + 2 * SILENT_NS) == 0


def test_a_pause_of_the_office_is_no_silence_of_the_supervisor() -> None:
    """The machine slept, or the office was stopped: both are found by the time since the look before."""
    watch = Watchdog()
    for n in range(3):
        watch.is_ping_due(n * NS_PER_S)
    later_ns = 3600 * NS_PER_S
    assert not watch.is_ping_due(later_ns)
    assert watch.silent_ns(later_ns) == 0
    for n in range(1, 12):
        watch.is_ping_due(later_ns + n * NS_PER_S)
    assert watch.silent_ns(later_ns + 11 * NS_PER_S) == 11 * NS_PER_S, "and then it is"


def test_a_new_supervisor_starts_anew() -> None:
    watch = Watchdog()
    for n in range(20):
        watch.is_ping_due(n * NS_PER_S)
    assert watch.silent_ns(20 * NS_PER_S)
    watch.disconnected()
    assert watch.silent_ns(21 * NS_PER_S) == 0
    assert not watch.is_ping_due(22 * NS_PER_S)
