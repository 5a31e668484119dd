"""The operators' page as text: every text that comes from outside stays text, and the drawing shows the last hour."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest
from msgspec import structs

from sublet.studio.overview import Overview
from sublet.studio.overview_page import ask_page, audit_page, overview_page, overview_part
from sublet.studio.people import Person
from sublet.studio.presence import PersonPresence
from sublet.values import GIB
from sublet.wire.http import (
    AuditEntry,
    ConnectedView,
    FenceView,
    GroupView,
    LeaseView,
    NoisyView,
    PlaceAnswer,
    ReservationView,
    StatusView,
    TenantView,
)
from tests.unit.studio.markup import Elements

EVIL: Final = "<img src=x onerror=alert(1)>\"'&"
PERSON: Final = Person(id="p-1", name="ana", tenant="physics", is_operator=True)
NOW_S: Final = 1_764_000_000.0
PEOPLE: Final = [PersonPresence(person=PERSON, pages=0, last_request_s=None, label="")]


def moment(before_s: float) -> str:
    from sublet.lease.value import rfc3339

    return rfc3339(round((NOW_S - before_s) * 1e9))


def lease(text: str = "l-1", *, begun_s: float = 600, ended_s: float | None = None, amount: int = GIB) -> Any:
    over = None if ended_s is None else {"reason": text, "at": moment(ended_s), "detail": text}
    return {
        "id": text,
        "tenant": text,
        "status": "active" if over is None else "ended",
        "name": text,
        "labels": {"session": text},
        "tier": text,
        "renew": text,
        "ttl": 300.0,
        "wants": [{"kind": "gpu", "amount": GIB}],
        "epoch": [1, 1],
        "node": "n",
        "parts": [{"resource": "n/gpu0", "kind": "gpu", "amount": amount}],
        "asked_at": moment(begun_s),
        "granted_at": moment(begun_s),
        "expires_at": None,
        "deadline": None,
        "remaining": 120.0,
        "claim_within": None,
        "idle": False,
        "busy": 0.0,
        "renewals": 0,
        "notice": {"reason": text, "in_seconds": 30.0, "at": moment(-30), "detail": text},
        "end": over,
    }


def overview(text: str = "text", leases: list[Any] | None = None, **status: Any) -> Overview:
    """An office in which every text is this one."""
    device = {
        "id": "n/gpu0", "node": "n", "kind": "gpu", "model": text, "host": False, "capacity": 4 * GIB, "free": GIB,
        "state": text, "detail": text, "leases": [text],
    }  # fmt: skip
    said = {
        "pid": 1, "version": text, "wire": 1, "home": text, "incarnation": 1, "started_at": text, "uptime": 1.0,
        "embedded": False, "nodes": [{"id": text, "domain": text, "labels": {}, "state": text}], "devices": [device],
        "live": 1, "queued": 1, "quarantined": 1, "audit_head": text, **status,
    }  # fmt: skip
    quota: dict[str, Any] = {}
    group = {
        "id": text, "weight": 1, "floor": 0, "ceiling": None, "quota": quota, "tenants": [text], "gpus": 0.5,
        "share": 0.25, "share_of": text, "queued": 1,
    }  # fmt: skip
    tenant = {
        "id": text, "tier_max": text, "operator": False, "quota": quota, "gpu_seconds_used": 1.0, "leases": 1,
        "queued": 1, "group": text,
    }  # fmt: skip
    kept = {
        "id": text, "group": text, "gpus": 1, "model": None, "when": text, "zone": text,
        "times": [{"begins_at": text, "ends_at": text}], "state": text, "devices": [text], "ready": 0,
    }  # fmt: skip
    noisy = {"tenant": text, "group": text, "rule": "use", "says": text, "figures": {}}
    fence = {"resource": text, "lease": text, "epoch": [1, 1], "amount": GIB, "detail": text, "hard": True}
    place = {"answer": "place", "lease": lease(text), "position": 1, "reason": text, "estimate": 60.0}
    return Overview(
        at_s=NOW_S,
        status=msgspec.convert(said, StatusView),
        leases=msgspec.convert([lease(text)] if leases is None else leases, list[LeaseView]),
        queue=msgspec.convert([place], list[PlaceAnswer]),
        tenants=msgspec.convert([tenant], list[TenantView]),
        groups=msgspec.convert([group], list[GroupView]),
        reservations=msgspec.convert([kept], list[ReservationView]),
        fences=msgspec.convert([fence, {**fence, "hard": False}], list[FenceView]),
        noisy=msgspec.convert({"rules": {"use": text, "churn": "x"}, "neighbours": [noisy]}, NoisyView),
        connected=[ConnectedView(uid=1001, pid=4711, tenants=[text], connections=2, since=text)],
    )


def test_no_text_of_the_office_becomes_markup() -> None:
    entry = {"seq": 1, "at": EVIL, "kind": EVIL, "by": EVIL, "event": {"lease": {"id": EVIL}, "name": EVIL, "node": 3}}
    entries = msgspec.convert([entry], list[AuditEntry])
    evil = Person(id="p-2", name=EVIL, tenant=EVIL, teaches=(EVIL,))
    people = [PersonPresence(person=evil, pages=0, last_request_s=NOW_S, label=EVIL)]
    pages = (
        overview_page(PERSON, overview(EVIL, disk_short=EVIL, supervisor_silent=5.0), people, "f"),
        audit_page(PERSON, EVIL, entries, "f"),
        ask_page(PERSON, "f", EVIL, EVIL, "/office/drain", node=EVIL),
    )
    for page in pages:
        found = Elements(page)
        assert "img" not in found.names
        assert found.names.count("script") <= 1, "the page's own"
        assert EVIL.partition(" ")[0] in "".join(found.texts), "it is shown as it is"
        assert not any(name.startswith("on") for name, _ in found.attributes)


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (lease(begun_s=1800), [("held", 400, 560)]),
        (lease(begun_s=7200), [("held", 800, 160)]),
        (lease(begun_s=1800, ended_s=900), [("ended", 200, 560)]),
        (lease(begun_s=7200, ended_s=1800), [("ended", 400, 160)]),
        (lease(begun_s=9000, ended_s=7200), []),
        (lease(begun_s=1800) | {"granted_at": None}, []),
        (lease(begun_s=1800) | {"parts": []}, []),
    ],
)
def test_the_last_hour_is_drawn_to_scale(made: Any, drawn: list[tuple[str, int, int]]) -> None:
    """800 wide from 160 on; a lease of a quarter of the device is lower."""
    page = overview_part(overview(leases=[made]), PEOPLE, "f")
    found = [
        (kind, round(float(width)), round(float(x)))
        for x, width, kind in re.findall(
            r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*class="(held|ended)"', page
        )
    ]
    assert found == drawn


def test_what_needs_an_operator_comes_first() -> None:
    page = overview_part(overview("text", disk_short="no room on /srv", supervisor_silent=5.0), PEOPLE, "f")
    places = [
        page.index(text) for text in ("The supervisor has not answered for 5s", "no room on /srv", "In quarantine")
    ]
    assert places == sorted(places)
    assert places[-1] < page.index("<h2>Devices")
    assert page.count("Clear it on your word") == 1, "what was found broken"
    assert page.count("Verify again") == 1


def test_a_device_in_quarantine_is_not_called_lent() -> None:
    seen = overview("text")
    (device,), fence = seen.status.devices, seen.fences[0]
    page = overview_part(replace(seen, fences=[structs.replace(fence, resource=device.id)]), PEOPLE, "f")
    assert '<td data-head="State">in quarantine</td>' in page
    assert "in quarantine</td>" not in overview_part(seen, PEOPLE, "f")


def test_a_card_that_only_others_use_is_called_that_as_in_the_status_command() -> None:
    """It was "lent", under no lease, and who has it was not said."""
    seen = overview("text")
    device = structs.replace(seen.status.devices[0], state="free", detail="4GiB is used by process 9 (Xorg)", leases=[])
    page = overview_part(replace(seen, status=structs.replace(seen.status, devices=[device]), fences=[]), PEOPLE, "f")
    assert '<td data-head="State">used by others: 4GiB is used by process 9 (Xorg)</td>' in page
    leased = structs.replace(device, leases=["l-1"])
    page = overview_part(replace(seen, status=structs.replace(seen.status, devices=[leased]), fences=[]), PEOPLE, "f")
    assert '<td data-head="State">partly lent</td>' in page


def test_long_lists_are_cut_and_say_so() -> None:
    page = overview_part(overview(leases=[lease(f"l-{number}") for number in range(130)]), PEOPLE, "f")
    assert "and 30 more" in page
    assert "l-99 (" in page
    assert "l-100 (" not in page


def test_tenants_that_disturb_others_are_named_with_the_rule() -> None:
    page = overview_part(overview("text"), PEOPLE, "f")
    assert "Noisy neighbours" in page
    assert "use: a tenant that text." in page
    assert "churn: a tenant" not in page, "that rule named none"
    quiet = replace(overview("text"), noisy=NoisyView(rules={"use": "x"}, neighbours=[]))
    assert "Noisy neighbours" not in overview_part(quiet, PEOPLE, "f")


def test_groups_and_tenants_are_shown_with_the_share_they_are_entitled_to() -> None:
    """By weight; a tenant's is a part of its group's. Who cannot ask for anything has none and takes none."""
    seen = overview("text")
    groups = [
        structs.replace(seen.groups[0], id=name, weight=weight, share=share, share_of="gpu")
        for name, weight, share in (("ml1", 3, 0.5), ("lab", 1, 0.25))
    ]
    tenants = [
        structs.replace(seen.tenants[0], id=name, group=group, weight=weight, share=share, disabled=off, studio=studio)
        for name, group, weight, share, off, studio in (
            ("ana", "ml1", 2, 0.4, False, False),
            ("ben", "ml1", 1, 0.1, False, False),
            ("cem", "ml1", 1, 0.05, True, False),
            ("tara", "lab", 1, 0.02, False, False),
            ("studio", "lab", 1, 0.0, False, True),
        )
    ]
    page = overview_part(replace(seen, groups=groups, tenants=tenants), PEOPLE, "f")

    def rows(title: str) -> list[list[str]]:
        part = page.partition(f"<h2>{title}")[2].partition("<h2>")[0]
        return [re.findall(r"<td>([^<]*)", row)[:5] for row in part.split("<tr>")[2:]]

    assert [(row[0], row[2], row[3]) for row in rows("Groups")] == [
        ("ml1", "50.0% of all GPUs", "75.0%"),
        ("lab", "25.0% of all GPUs", "25.0%"),
    ]
    assert [(row[0], row[3], row[4]) for row in rows("Tenants")] == [
        ("ana", "40.0%", "50.0%"),
        ("ben", "10.0%", "25.0%"),
        ("cem (disabled)", "5.0%", "-"),
        ("tara", "2.0%", "25.0%"),
        ("studio", "0.0%", "-"),
    ]


def test_people_are_shown_with_user_role_and_whether_they_are_connected() -> None:
    tenant = structs.replace(overview("text").tenants[0], id="physics", uid=2001)
    seen = replace(overview("text"), tenants=[tenant])
    bob = Person(id="p-2", name="bob", tenant="biology", teaches=("ml1",))
    people = [
        PersonPresence(person=PERSON, pages=2, last_request_s=NOW_S, label="main"),
        PersonPresence(person=bob, pages=0, last_request_s=NOW_S - 300, label="laptop"),
        PersonPresence(person=replace(bob, name="cem", teaches=()), pages=0, last_request_s=None, label=""),
    ]
    page = overview_part(seen, people, "f")
    rows = [re.findall(r"<td>([^<]*)", row) for row in page.partition("<h2>People")[2].split("<tr>")[2:5]]
    assert [row[:5] for row in rows] == [
        ["ana", "physics", "2001", "operator", "2 open pages"],
        ["bob", "biology", "-", "teacher of ml1", "about 5m ago, with token laptop"],
        ["cem", "biology", "-", "member", "not since the studio was started"],
    ]
    assert "and 10 more" in overview_part(seen, people * 20, "f")


def test_processes_at_the_shared_socket_are_shown_with_user_and_tenant() -> None:
    seen = [
        ConnectedView(uid=2001, pid=4711, tenants=["physics"], connections=2, since=moment(60)),
        ConnectedView(uid=None, pid=None, tenants=[], connections=1, since=moment(60)),
    ]
    page = overview_part(replace(overview("text"), connected=seen), PEOPLE, "f")
    rows = [
        re.findall(r"<td[^>]*>([^<]*)", row) for row in page.partition("Connected to the office")[2].split("<tr>")[2:4]
    ]
    assert [row[:4] for row in rows] == [["2001", "4711", "physics", "2"], ["-", "-", "-", "1"]]
    assert "Connected to the office" not in overview_part(replace(overview("text"), connected=[]), PEOPLE, "f")
    assert "and 1 more" in overview_part(replace(overview("text"), connected=seen[:1] * 51), PEOPLE, "f")
