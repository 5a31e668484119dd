"""The teachers' page as text: what it says of members, entitlement and plan, and that no text becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sublet.errors import InvalidRequest, NotFound
from sublet.studio.course_page import SHOWN_MAX, Course, course_page, course_part
from sublet.studio.overview import Overview
from sublet.studio.people import Person
from sublet.studio.plan import CoursePlan, Queue
from sublet.wire.http import GroupView, LeaseView, PlaceAnswer
from sublet.wire.http_views import SESSION_LABEL
from tests.unit.studio.markup import Elements
from tests.unit.studio.test_overview_page import EVIL, lease, moment, overview


def person(name: str, tenant: str, **more: Any) -> Person:
    return Person(id=f"p-{name}", name=name, tenant=tenant, **more)


TEACHER = person("tea", "staff", teaches=("ml1",))


def group(name: str, tenants: list[str], **more: Any) -> GroupView:
    said = {
        "id": name, "weight": 1, "floor": 0, "ceiling": None, "quota": {}, "tenants": tenants, "gpus": 0.0,
        "share": 0.25, "share_of": "gpu", "queued": 0, **more,
    }  # fmt: skip
    return msgspec.convert(said, GroupView)


def of(tenant: str, ident: str, **more: Any) -> LeaseView:
    return msgspec.convert(
        {**lease(ident), "labels": {SESSION_LABEL: ident}, "tenant": tenant, "notice": None, "tier": "batch", **more},
        LeaseView,
    )


def queued(tenant: str, ident: str, since_s: float = 60) -> LeaseView:
    return of(tenant, ident, status="queued", granted_at=None, asked_at=moment(since_s), parts=[])


def place(waiting: LeaseView, position: int, estimate: float | None = None) -> PlaceAnswer:
    return PlaceAnswer(lease=waiting, position=position, reason=f"because of {position}", estimate=estimate)


def course(**more: Any) -> Course:
    seen: Overview = replace(
        overview(),
        groups=[group("ml1", ["red", "blue"]), group("lab", ["other"], weight=3)],
        leases=[],
        queue=[],
        reservations=[],
    )
    seen = replace(seen, **{name: more.pop(name) for name in list(more) if hasattr(seen, name)})
    members = [person("ana", "red"), person("bob", "blue"), person("cid", "blue")]
    return Course(**{"group": "ml1", "seen": seen, "members": members, "owners": {}, "plan": None, **more})


def text_of(part: str) -> str:
    return " ".join(" ".join(Elements(part).texts).split())


def test_a_course_without_members_says_how_they_are_added() -> None:
    empty = text_of(course_part(course(members=[])))
    assert "No members yet. The operator adds them with sublet person enrol FILE --group ml1 ." in empty
    assert "No member of the course has a GPU" in text_of(course_part(course()))


def test_a_lease_that_was_granted_and_not_taken_is_not_called_in_use() -> None:
    """As that of an offer without an answer yet."""
    assert "not taken yet" in text_of(course_part(course(leases=[of("red", "s-x", status="granted")])))
    assert "in use" in text_of(course_part(course(leases=[of("red", "s-x")])))


def test_members_are_told_apart_by_what_they_have() -> None:
    """By the session of a lease, else by the tenant, where one person alone has it. Of others nothing is shown."""
    near, far = queued("blue", "s-cid"), queued("blue", "s-far")
    shown = text_of(
        course_part(
            course(
                leases=[of("red", "s-x"), near, far, of("other", "s-secret"), queued("other", "s-waits")],
                queue=[place(queued("other", "s-waits"), 1), place(near, 2, 600)],
                owners={"s-cid": "cid"},
            )
        )
    )
    assert "3 members; 1 with a GPU, 2 waiting." in shown
    assert re.search(r"With a GPU .* ana 1GiB of GPU memory, tier batch \S+ \S+ UTC about 2m in use", shown)
    assert re.search(r"2 cid 1GiB of GPU memory, tier batch .* about 10m because of 2 - tenant blue", shown)
    assert "far behind in the queue" in shown
    assert "Without a request (1) bob" in shown
    assert "other" not in shown
    assert "because of 1" not in shown


def test_a_notice_goes_first_and_says_when_and_why() -> None:
    notice = {"reason": "fair_share", "in_seconds": 30.0, "at": moment(-30), "detail": ""}
    leases = [of("red", "s-1", granted_at=moment(900)), of("blue", "s-2", notice=notice), of("blue", "s-3", idle=True)]
    shown = text_of(course_part(course(leases=leases, owners={"s-2": "bob", "s-3": "cid"})))
    assert re.search(r"Now bob .* ends in less than a minute: fair_share ana .* in use cid .* idle", shown)


def test_use_stands_beside_what_the_course_is_entitled_to() -> None:
    groups = [
        group("ml1", ["red"], weight=2, floor=1, ceiling=4, gpus=2.5, share=0.125),
        group("lab", ["other"], weight=6),
    ]
    shown = text_of(course_part(course(groups=groups)))
    assert "has now 2.5 GPUs" in shown
    assert "entitled to 1 GPU whenever it asks, 4 GPUs at most" in shown
    assert "used 12.5% of all GPUs; 25.0% is its part while all groups ask (weight 2 of 8)" in shown
    half = [group("ml1", [], gpus=0.5)]
    assert "has now 0.5 of a GPU entitled to no GPU is kept for it, no ceiling" in text_of(
        course_part(course(groups=half))
    )


def test_an_empty_course_says_so_and_reservations_of_others_are_not_its() -> None:
    other = overview().reservations
    shown = text_of(course_part(course(reservations=other)))
    assert "No member of the course has a GPU or waits for one." in shown
    assert "Nothing is reserved for the course." in shown
    mine = [msgspec.structs.replace(other[0], group="ml1")]
    assert "Nothing is reserved" not in text_of(course_part(course(reservations=mine)))


def test_the_plan_is_the_last_one_with_its_date() -> None:
    now = Queue(gpus=8, at_once=0.991, median_s=0.2, p95_s=75.0, longest=12)
    less = Queue(gpus=7, at_once=0.9, median_s=30.0, p95_s=600.0, longest=40)
    both = CoursePlan(made_at="2026-03-01T10:00:00Z", now=now, less=less)
    shown = text_of(course_part(course(plan=both)))
    assert "8 99.1% of cells 0s 1m 15s 12 requests 7 90.0% of cells 30s 10m 40 requests" in shown
    assert "As planned on 2026-03-01 10:00 UTC." in shown
    one = CoursePlan(made_at="2026-03-01T10:00:00Z", now=now, less=None)
    assert "With one GPU less there would be none." in text_of(course_part(course(plan=one)))
    assert "Not planned yet." in text_of(course_part(course()))
    broken = InvalidRequest("the saved plan cannot be read", do="Make it again: `sublet simulate`.")
    assert "The saved plan cannot be read." in text_of(course_part(course(plan=broken)))


def test_a_course_of_hundreds_is_cut_off_and_says_by_how_much() -> None:
    held = [of("red", f"s-{number}") for number in range(SHOWN_MAX + 5)]
    part = course_part(course(leases=held))
    assert "and 5 more" in text_of(part)
    assert Elements(part).names.count("tr") == 1 + SHOWN_MAX + 1


def test_no_text_becomes_markup() -> None:
    """Names, reasons and ids are the office's and its users'; each of them is evil here."""
    evil = overview(EVIL)
    groups = [group(EVIL, [EVIL])]
    waiting = queued(EVIL, EVIL)
    seen = replace(evil, groups=groups, leases=[*evil.leases, waiting], queue=[place(waiting, 1)])
    names = [person(EVIL, EVIL), person(f"{EVIL}2", "none")]
    made = Course(group=EVIL, seen=seen, members=names, owners={EVIL: EVIL}, plan=InvalidRequest(EVIL, do=EVIL))
    page = course_page(person(EVIL, EVIL, teaches=(EVIL,)), made, "token")
    elements = Elements(page)
    assert "img" not in elements.names
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    assert any(EVIL in text for text in elements.texts)


def test_a_group_that_is_gone_is_named() -> None:
    with pytest.raises(NotFound, match="there is no group 'ml1' in the office"):
        course_part(course(groups=[]))


def test_the_page_leads_back_and_an_operator_to_the_office() -> None:
    assert 'href="/office"' not in course_page(TEACHER, course(), "token")
    assert 'href="/office"' in course_page(person("op", "staff", is_operator=True), course(), "token")
    assert 'data-live="/course/ml1/live"' in course_page(TEACHER, course(), "token")
