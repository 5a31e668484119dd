"""Groups, reservations and budgets of the operator's file: all of it or nothing, and what commands said beside it."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.errors import InvalidRequest, SubletError
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.arrangement import present
from sublet.office.ledger.records import GroupRecord, Quota, Span
from sublet.office.policy_file import parse_policy
from sublet.values import BudgetId, BudgetWindow, GroupId, NodeId, ReservationId, TenantId
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, seconds

COURSE, LAB = GroupId("course"), GroupId("lab")
CLEO = TenantId("cleo")
SPANS: dict[str, tuple[int, int]] = {
    "tuesday": (10_000, 10_600),
    "exam": (20_000, 20_600),
    "test": (20_300, 20_900),
    "past": (1, 2),
}

FILE = """
[group.course]
weight = 2
floor = 1
gpus = 2
members = ["ann", "cleo"]
[group.lab]
members = ["ben"]
[reservation.tuesday]
group = "course"
gpus = 2
when = "every Tue 10:00-12:00"
zone = "UTC"
[budget.group.course]
day = "2.50"
month = 50
[budget.tenant.cleo]
total = "7"
"""


def apply(bench: Bench, text: str) -> object:
    declared = parse_policy(text).declared
    wall_ns = bench.now.wall_ns
    spans: dict[ReservationId, tuple[Span, ...]] = {
        name: (Span(wall_ns + seconds(SPANS[name][0]), wall_ns + seconds(SPANS[name][1])),)
        for name in declared.reservations
    }
    if "past" in spans:
        spans[ReservationId("past")] = (Span(1, 2),)
    return bench.do(cmd.ApplyPolicy(changed={}, declared=declared, spans=spans, by=LOCAL)).answer


def office(text: str = FILE, gpus: int = 3) -> Bench:
    bench = Bench(gpus=gpus)
    assert not isinstance(answer := apply(bench, text), SubletError), answer
    return bench


def whole(bench: Bench) -> dict[str, Any]:
    found = present(bench.state)
    return {
        "groups": {name: group for name, group in found.groups.items() if group != GroupRecord(id=name)},
        "members": {tenant: group for tenant, group in found.members.items() if group != "default"},
        "reservations": set(found.reservations),
        "budgets": {name: budget.amount for name, budget in found.budgets.items()},
    }


def test_a_file_holds_as_a_whole_and_a_second_time_changes_nothing() -> None:
    bench = office()
    assert whole(bench) == {
        "groups": {COURSE: GroupRecord(id=COURSE, weight=2, floor=1, quota=Quota(gpus=2))},
        "members": {ANN: COURSE, BEN: LAB},
        "reservations": {"tuesday"},
        "budgets": {"group/course/day": 2_500_000, "group/course/month": 50_000_000},
    }
    before = bench.state.snapshot()
    bench.wait(60)
    again = parse_policy(FILE).declared
    outcome = bench.do(cmd.ApplyPolicy(changed={}, declared=again))
    assert [type(event).__name__ for event in outcome.events] == [], "as an office does that starts again"
    assert bench.state.snapshot() == before
    assert bench.folded().snapshot() == before


def test_a_tenant_that_is_added_later_has_what_the_file_says() -> None:
    bench = office()
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    assert whole(bench)["members"][CLEO] == COURSE
    assert whole(bench)["budgets"]["tenant/cleo/total"] == 7_000_000
    bench.do(cmd.RemoveTenant(tenant=CLEO))
    assert "tenant/cleo/total" not in whole(bench)["budgets"]
    assert not isinstance(apply(bench, FILE), SubletError), "an office starts with a file that names who is not there"


def test_what_the_file_no_longer_has_goes_and_what_commands_made_stays() -> None:
    bench = office()
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("own"), weight=9)))
    bench.do(cmd.SetTenant(tenant=BEN, group=GroupId("own")))
    bench.do(cmd.SetBudget(tenant=ANN, per=BudgetWindow.DAY, amount=5))
    course = bench.state.group(COURSE)
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE, weight=7, floor=1, ceiling=2, quota=course.quota)))
    assert not isinstance(apply(bench, '[group.course]\nfloor = 1\nmembers = ["ann"]'), SubletError)
    assert whole(bench) == {
        "groups": {
            COURSE: GroupRecord(id=COURSE, weight=7, floor=1, ceiling=2),
            "own": GroupRecord(id=GroupId("own"), weight=9),
        },
        "members": {ANN: COURSE, BEN: "own"},
        "reservations": set(),
        "budgets": {"tenant/ann/day": 5},
    }
    assert LAB not in bench.state.books.groups
    assert not isinstance(apply(bench, ""), SubletError)
    assert whole(bench)["members"] == {BEN: "own"}
    assert COURSE not in bench.state.books.groups


def test_a_group_with_a_budget_that_was_set_by_command_is_not_removed() -> None:
    """The budget went with it, and leases of its tenants went on outside of any."""
    bench = office()
    bench.do(cmd.SetBudget(group=COURSE, per=BudgetWindow.DAY, amount=5))
    before = whole(bench)
    refused = apply(bench, "")
    assert isinstance(refused, SubletError)
    assert "group course would be removed, and it has a budget" in str(refused)
    assert "`sublet budget rm --group course --per day`" in str(refused.do)
    assert whole(bench) == before
    bench.do(cmd.RemoveBudget(group=COURSE, per=BudgetWindow.DAY))
    assert not isinstance(apply(bench, ""), SubletError)
    assert COURSE not in bench.state.books.groups


def test_a_key_of_the_file_holds_against_an_earlier_command() -> None:
    bench = office()
    bench.do(cmd.SetGroup(group=GroupRecord(id=COURSE, weight=9, floor=1, quota=Quota(gpus=2, cores=4))))
    bench.do(cmd.SetTenant(tenant=ANN, group=LAB))
    bench.do(cmd.RemoveReservation(reservation=ReservationId("tuesday")))
    assert not isinstance(apply(bench, FILE), SubletError)
    assert bench.state.group(COURSE) == GroupRecord(id=COURSE, weight=2, floor=1, quota=Quota(gpus=2, cores=4))
    assert whole(bench)["members"][ANN] == COURSE
    assert whole(bench)["reservations"] == {"tuesday"}


def test_parts_that_only_go_together_are_taken_together() -> None:
    """One after the other, the second floor would be refused in either order of the commands but one."""
    bench = office("[group.a]\nfloor = 2\n[group.b]\nfloor = 1")
    assert not isinstance(apply(bench, "[group.b]\nfloor = 2\n[group.a]\nfloor = 1"), SubletError)
    assert not isinstance(apply(bench, "[group.b]\nfloor = 3\n"), SubletError)
    assert [group.floor for group in bench.state.books.groups.values()] == [3]


RES = '[reservation.{}]\ngroup = "{}"\ngpus = {}\nwhen = "2026-12-01 09:00-17:00"\nzone = "UTC"\n'


@pytest.mark.parametrize(
    ("text", "said", "where"),
    [
        (
            "[group.a]\nfloor = 2\n[group.b]\nfloor = 2",
            "floors would add up to 4 GPUs, and there are 3",
            "lines 2 and 4",
        ),
        ('[group.course]\nweight = 3\n[budget.group.b]\nday = "1"', "there is no group 'b'", "line 4"),
        (RES.format("exam", "nobody", 1), "there is no group 'nobody'", "line 2"),
        ("[group.a]\nceiling = 1\n" + RES.format("exam", "a", 2), "may have 1 GPU, fewer than the 2", "lines 2 and 5"),
        ("[group.a]\n[group.b]\nfloor = 2\n" + RES.format("exam", "a", 2), "add up to 4 GPUs", "lines 3 and 6"),
        ("[group.a]\n" + RES.format("exam", "a", 4), "4 GPUs are more than there are (3)", "line 4"),
        ("[group.a]\n" + RES.format("past", "a", 1), "all times of reservation past are past", "line 5"),
        (
            "[group.a]\n" + RES.format("exam", "a", 1) + RES.format("test", "a", 1),
            "reservation exam would overlap with test of the same group",
            "lines 5 and 10",
        ),
        (
            "[group.course]\n[group.lab]\ngpus = 1\nweight = 2\n" + RES.format("exam", "lab", 2),
            "group lab may have",
            "lines 3 and 7",
        ),
        ("", "group course would be removed, and cleo is in it", ""),
    ],
)
def test_a_file_in_which_parts_contradict_each_other_changes_nothing(text: str, said: str, where: str) -> None:
    """The lines of the file that contradict one another are said."""
    bench = office()
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo", group=COURSE))
    apply(bench, FILE.replace(', "cleo"', ""))
    bench.do(cmd.SetTenant(tenant=CLEO, group=COURSE))
    before = bench.state.snapshot()
    answer = apply(bench, text)
    assert isinstance(answer, InvalidRequest)
    assert said in answer.message
    message = parse_policy(text).with_lines(answer).message
    assert message == (f"{answer.message} ({where})" if where else answer.message)
    assert bench.state.snapshot() == before


def test_a_file_that_held_holds_while_a_device_is_away() -> None:
    """So does a change of a group whose floor stays."""
    bench = office("[group.a]\nfloor = 3\n[group.b]")
    bench.do(cmd.NodeGone(node=NodeId("n1")))
    assert bench.state.capacity[0] == 0
    assert not isinstance(apply(bench, "[group.a]\nfloor = 3\n[group.b]\nweight = 4"), SubletError)
    changed = cmd.SetGroup(group=GroupRecord(id=GroupId("a"), floor=3, weight=5))
    assert not isinstance(bench.do(changed).answer, SubletError)
    assert not isinstance(bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("a"), floor=2))).answer, SubletError)
    assert isinstance(bench.do(changed).answer, SubletError), "it rises again"


def test_a_budget_needs_all_prices() -> None:
    bench = office("")
    declared = parse_policy('[budget.tenant.ann]\nday = "1"').declared
    answer = bench.do(cmd.ApplyPolicy(changed={}, declared=declared, missing=("cpu",))).answer
    assert isinstance(answer, SubletError)
    assert "no price of cpu" in answer.message
    assert BudgetId("tenant/ann/day") not in bench.state.books.budgets
