"""What a supervisor decides for its office, without connections, guests or a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import SubletError, Unauthorized
from sublet.node.supervisor.core import ALONE_NS, REPORTS_MAX, SupervisorCore
from sublet.values import Epoch, LeaseId, NodeId
from sublet.wire.guests import Orders, Reports
from sublet.wire.orders import Extend, Held, Inventory, Report

INVENTORY = Inventory(node=NodeId("n"), domain="d", devices=())


def held(number: int) -> Held:
    return Held(node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 1), number=number)


class Law:
    """Notes what it is told, and has this to say at its next turn."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.fence: list[Any] = []
        self.down: tuple[Any, ...] = ()
        self.wake_ns: int | None = None

    def send(self, order: Extend, *, now_ns: int, incarnation: int) -> None:
        self.told.append(f"{incarnation}: order {order.number} at {now_ns}")

    def tick(self, now_ns: int) -> int | None:
        self.told.append(f"tick at {now_ns}")
        return self.wake_ns

    def hardware_changed(self, now_ns: int, *leases: LeaseId) -> int | None:
        self.told.append(f"gone at {now_ns}: {' '.join(sorted(leases))}")
        return self.wake_ns

    def inventory_changed(self, inventory: Inventory) -> None:
        self.told.append("inventory")

    def resend_reports(self, now_ns: int) -> None:
        self.told.append(f"again at {now_ns}")

    def teardowns(self) -> tuple[Any, ...]:
        return self.down


class Office:
    """Its end of the connection."""

    def __init__(self) -> None:
        self.messages: list[tuple[Report, ...]] = []
        self.errors: list[SubletError] = []

    def report(self, reports: Reports, at_once: bool = False) -> None:
        self.messages.append(reports.reports)

    def cut(self, error: SubletError) -> None:
        self.errors.append(error)


class Stage:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.armed: list[int | None] = []
        self.said = 0
        self.law = Law(self.told)
        self.core: SupervisorCore[Any] = SupervisorCore(
            make_law=self._make_law, arm=self.armed.append, now_ns=0, on_reports_sent=self._on_said
        )

    def _make_law(self, inventory: Inventory) -> Any:
        self.told.append("made")
        return self.law

    def _on_said(self) -> None:
        self.said += 1


@pytest.fixture
def stage() -> Stage:
    return Stage()


def extend(number: int) -> Extend:
    return Extend(lease=LeaseId("l"), epoch=Epoch(1, 1), number=number, deadline_ns=1, ttl_ns=1)


def test_the_first_office_says_what_there_is_and_the_next_takes_over(stage: Stage) -> None:
    """What is still true is said again to each of them; the one before is hung up on."""
    first, second = Office(), Office()
    assert stage.core.configure(first, INVENTORY, 1)
    assert stage.told == ["made", "again at 1"]
    assert first.errors == []
    assert not stage.core.configure(second, INVENTORY, 2)
    assert stage.told[2:] == ["inventory", "again at 2"]
    assert [type(error) for error in first.errors] == [Unauthorized]
    assert second.errors == []
    stage.core.report(held(1))
    stage.core.send_reports()
    assert (first.messages, second.messages) == ([], [(held(1),)])


def test_before_that_nothing_is_obeyed(stage: Stage) -> None:
    stage.core.obey(Orders(orders=(extend(1),), incarnation=1), 1)
    stage.core.step(2)
    stage.core.guest_gone(LeaseId("a"))
    stage.core.process_gone_guests(3)
    assert (stage.told, stage.armed) == ([], [])


def test_orders_are_obeyed_in_order_and_then_comes_what_is_due(stage: Stage) -> None:
    stage.core.configure(Office(), INVENTORY, 1)
    del stage.told[:]
    stage.law.wake_ns = 9
    stage.core.obey(Orders(orders=(extend(1), extend(2)), incarnation=4), 5)
    assert stage.told == ["4: order 1 at 5", "4: order 2 at 5", "tick at 5"]
    assert stage.armed == [9]


def test_of_guests_that_are_gone_at_once_all_are_told_in_one_go(stage: Stage) -> None:
    stage.core.configure(Office(), INVENTORY, 1)
    del stage.told[:]
    has_gone = [stage.core.has_gone]
    assert [stage.core.guest_gone(LeaseId(lease)) for lease in "aba"] == [True, False, False]
    has_gone.append(stage.core.has_gone)
    stage.core.process_gone_guests(3)
    assert stage.told == ["gone at 3: a b"]
    assert stage.armed == [None]
    assert [*has_gone, stage.core.has_gone] == [False, True, False]
    assert stage.core.guest_gone(LeaseId("a")), "the next one is a first one again"


def test_many_reports_go_in_messages_of_a_bounded_size(stage: Stage) -> None:
    office = Office()
    stage.core.configure(office, INVENTORY, 1)
    reports = [held(number) for number in range(REPORTS_MAX + 1)]
    stage.core.report(*reports)
    assert office.messages == []
    stage.core.send_reports()
    assert office.messages == [tuple(reports[:REPORTS_MAX]), tuple(reports[REPORTS_MAX:])]
    assert stage.said == 1
    stage.core.send_reports()
    assert (len(office.messages), stage.said) == (2, 1), "there was nothing to say"


def test_what_no_office_can_hear_is_not_kept(stage: Stage) -> None:
    """What is still true is said again when one comes; it would fill the memory until then."""
    first, second = Office(), Office()
    stage.core.configure(first, INVENTORY, 1)
    stage.core.office_gone(first, 2)
    stage.core.report(held(1))
    stage.core.send_reports()
    stage.core.configure(second, INVENTORY, 3)
    stage.core.send_reports()
    assert (first.messages, second.messages, stage.said) == ([], [], 0)


def test_the_end_of_a_connection_that_another_took_over_is_not_the_end_of_that(stage: Stage) -> None:
    first, second = Office(), Office()
    stage.core.configure(first, INVENTORY, 1)
    stage.core.configure(second, INVENTORY, 2)
    stage.core.office_gone(first, 3)
    stage.core.report(held(1))
    stage.core.send_reports()
    assert second.messages == [(held(1),)]


def is_needed(stage: Stage, now_ns: int, *, guests: bool = False, found: bool = True) -> bool:
    return stage.core.is_needed(now_ns, has_guests=guests, can_be_found=found)


def test_it_waits_a_while_for_an_office(stage: Stage) -> None:
    assert is_needed(stage, ALONE_NS - 1)
    assert not is_needed(stage, ALONE_NS)
    office = Office()
    stage.core.configure(office, INVENTORY, ALONE_NS)
    assert is_needed(stage, 5 * ALONE_NS)
    stage.core.office_gone(office, 5 * ALONE_NS)
    assert is_needed(stage, 6 * ALONE_NS - 1)
    assert not is_needed(stage, 6 * ALONE_NS)


def test_it_waits_for_none_that_cannot_find_it(stage: Stage) -> None:
    assert not is_needed(stage, 1, found=False)
    assert is_needed(stage, 1, guests=True, found=False)
    office = Office()
    stage.core.configure(office, INVENTORY, 1)
    assert is_needed(stage, 2, found=False), "this one has found it"


def test_it_stays_for_what_lives_or_is_being_torn_down(stage: Stage) -> None:
    office = Office()
    stage.core.configure(office, INVENTORY, 1)
    stage.core.may_quit = True
    assert not is_needed(stage, 2)
    assert is_needed(stage, 2, guests=True)
    stage.law.fence = ["l"]
    assert is_needed(stage, 2)
    stage.law.fence, stage.law.down = [], ("l",)
    assert is_needed(stage, 2)
    stage.law.down = ()
    assert not is_needed(stage, 2)


def test_it_knows_what_is_used_or_not_clean_yet(stage: Stage) -> None:
    assert stage.core.used() == set()
    stage.core.configure(Office(), INVENTORY, 1)
    stage.law.fence = [SimpleNamespace(parts=(SimpleNamespace(resource="a"), SimpleNamespace(resource="b")))]
    stage.law.down = (SimpleNamespace(part=SimpleNamespace(resource="c")),)
    assert stage.core.used() == {"a", "b", "c"}


def test_an_office_that_comes_after_one_told_it_to_quit_needs_it(stage: Stage) -> None:
    stage.core.configure(Office(), INVENTORY, 1)
    stage.core.may_quit = True
    stage.core.configure(Office(), INVENTORY, 2)
    assert is_needed(stage, 3)
