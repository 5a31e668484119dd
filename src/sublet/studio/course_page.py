"""Renders a teacher's page: which members have a GPU or wait for one, and the course's entitlement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sublet.errors import NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LeaseStatus
from sublet.studio.overview import Overview
from sublet.studio.overview_page import cards, entitlement, many, reservation_row, section, share_of, wants
from sublet.studio.page import Html, error_part, live_page, moment, tag, with_commands
from sublet.studio.people import Person
from sublet.studio.plan import CoursePlan, Queue
from sublet.studio.views import about
from sublet.values import NS_PER_S, Kind, format_duration, shown
from sublet.wire.http import GroupView, LeaseView, PlaceAnswer
from sublet.wire.http_views import SESSION_LABEL

SHOWN_MAX: Final = 200
"""Rows of a table; its last row counts the rest."""
_HELD: Final = (LeaseStatus.ACTIVE, LeaseStatus.NOTICED, LeaseStatus.GRANTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A group of the office, as its teachers see it."""

    group: str
    seen: Overview
    members: Sequence[Person]
    """Those whose tenant is in the group."""
    owners: Mapping[str, str]
    """By session, whose it is: of the leases that are held or waited for."""
    plan: CoursePlan | SubletError | None
    """What was saved last, or why it cannot be read."""


def course_page(person: Person, course: Course, form: str) -> str:
    """The teacher's page. ``form`` is the token of its forms."""
    links = (("Office", "/office"),) if person.is_operator else ()
    live = f"/course/{course.group}/live"
    title, all_links = f"Course {course.group}", (*links, ("Your sessions", "/"))
    return live_page(person, form, course_part(course), live=live, links=all_links, title=title, broad=True)


def course_part(course: Course) -> str:
    """What of the page changes by itself."""
    group = group_of(course.seen, course.group)
    tenants = frozenset(group.tenants)
    leases = [one for one in course.seen.leases if one.tenant in tenants and _is_gpu(one)]
    held = [one for one in leases if one.status in _HELD]
    queue = [one for one in leases if one.status == LeaseStatus.QUEUED]
    holding = {_member(course, one) for one in held}
    waiting = {_member(course, one) for one in queue}
    others = sorted(one.name for one in course.members if one.name not in holding | waiting)
    parts = [
        tag("h2", f"Course {course.group}"),
        tag(
            "p",
            f"{many(len(course.members), 'member')}; {len(holding)} with a GPU, {len(waiting)} waiting.",
        ),
        tag("dl", *_entitlement(group, course.seen.groups)),
        *section(
            "Waiting",
            cards(
                ("Place", "Member", "Asks for", "Waits since", "Estimate", "Why"),
                _cut(_waiting(course, queue), len(queue)),
            ),
        ),
        *section("With a GPU", cards(("Member", "Has", "Since", "Left", "Now"), _cut(_held(course, held), len(held)))),
    ]
    if not course.members and not held and not queue:
        text = f"No members yet. The operator adds them with `sublet person enrol FILE --group {course.group}`."
        parts.append(tag("p", *with_commands(text), class_="none"))
    elif not held and not queue:
        parts.append(tag("p", "No member of the course has a GPU or waits for one.", class_="none"))
    if others:
        shown = ", ".join(others[:SHOWN_MAX]) + (" …" if len(others) > SHOWN_MAX else "")
        parts.append(tag("details", tag("summary", f"Without a request ({len(others)})"), tag("p", shown)))
    mine = [one for one in course.seen.reservations if one.group == course.group]
    rows = (reservation_row(one) for one in mine)
    parts += section("Reservations", cards(("Reservation", "Group", "GPUs", "When", "State", "Next"), rows))
    if not mine:
        parts.append(tag("p", "Nothing is reserved for the course.", class_="dim"))
    return "".join([*parts, *_planned(course)])


def group_of(seen: Overview, group: str) -> GroupView:
    """Raises ``NotFound``."""
    for one in seen.groups:
        if one.id == group:
            return one
    raise NotFound(f"there is no group {shown(group)} in the office", do="Ask the operator (`sublet group ls`).")


# ---- within


def _is_gpu(lease: LeaseView) -> bool:
    return any(want.kind == Kind.GPU for want in lease.wants)


def _member(course: Course, lease: LeaseView) -> str:
    """The person, or the tenant where the lease is of no session: a program may ask without one."""
    owner = course.owners.get(lease.labels.get(SESSION_LABEL, ""))
    if owner:
        return owner
    of_tenant = [one.name for one in course.members if one.tenant == lease.tenant]
    return of_tenant[0] if len(of_tenant) == 1 else f"tenant {lease.tenant}"


def _entitlement(group: GroupView, groups: Sequence[GroupView]) -> Iterable[Html]:
    """Use beside what weight, floor and ceiling give."""
    whole = sum(one.weight for one in groups)
    floor = f"{many(group.floor, 'GPU')} whenever it asks" if group.floor else "no GPU is kept for it"
    ceiling = "no ceiling" if group.ceiling is None else f"{many(group.ceiling, 'GPU')} at most"
    part = f"{entitlement(group, groups):.1%} is its part while all groups ask"
    unit = "of a GPU" if 0 < group.gpus < 1 else "GPU" if group.gpus == 1 else "GPUs"
    facts = (
        ("has now", f"{group.gpus:g} {unit}"),
        ("entitled to", f"{floor}, {ceiling}"),
        ("share", f"used {share_of(group)}; {part} (weight {group.weight} of {whole})"),
    )
    return [Html(tag("dt", name) + tag("dd", value)) for name, value in facts]


def _waiting(course: Course, queue: Sequence[LeaseView]) -> list[Sequence[str]]:
    """In the order of their places; of those far behind only the first are told theirs."""
    places: dict[str, PlaceAnswer] = {one.lease.id: one for one in course.seen.queue}
    last = max((one.position for one in places.values()), default=0) + 1

    def row(lease: LeaseView) -> Sequence[str]:
        place = places.get(lease.id)
        who = (_member(course, lease), wants(lease), moment(lease.asked_at))
        if place is None:
            return "-", *who, "not known", "far behind in the queue"
        estimate = "not known" if place.estimate is None else about(place.estimate)
        return str(place.position), *who, estimate, place.reason

    def order(lease: LeaseView) -> tuple[int, str]:
        place = places.get(lease.id)
        return (last if place is None else place.position), lease.asked_at

    return [row(lease) for lease in sorted(queue, key=order)[:SHOWN_MAX]]


def _held(course: Course, held: Sequence[LeaseView]) -> list[Sequence[str]]:
    """Those with notice first, then those that have theirs longest."""
    rows: list[Sequence[str]] = []
    for lease in sorted(held, key=lambda one: (one.notice is None, one.granted_at or one.asked_at))[:SHOWN_MAX]:
        if lease.status == LeaseStatus.GRANTED:
            now = "not taken yet"
        elif lease.notice is not None:
            now = f"ends in {about(lease.notice.in_seconds)}: {lease.notice.reason}"
        else:
            now = "idle" if lease.idle else "in use"
        left = "-" if lease.remaining is None else about(lease.remaining)
        rows.append((_member(course, lease), wants(lease), moment(lease.granted_at or lease.asked_at), left, now))
    return rows


def _cut(rows: Sequence[Sequence[str]], count: int) -> Sequence[Sequence[str]]:
    if count <= SHOWN_MAX or not rows:
        return rows
    return [*rows, (f"and {count - SHOWN_MAX} more", *("" for _ in rows[0][1:]))]


def _planned(course: Course) -> Iterable[Html]:
    yield tag("h2", "With one GPU less")
    plan = course.plan
    if isinstance(plan, SubletError):
        yield error_part(plan)
    elif plan is None:
        text = f"Not planned yet. The operator does it with `sublet simulate … --save {course.group}`."
        yield tag("p", *with_commands(text), class_="dim")
    else:
        lines = [plan.now, *((plan.less,) if plan.less is not None else ())]
        heads = ("GPUs", "Start at once", "Median wait", "p95 of the wait", "Longest queue")
        yield from cards(heads, map(_line, lines))
        less = "" if plan.less is not None else " With one GPU less there would be none."
        yield tag("p", f"As planned on {moment(plan.made_at)}.{less}", class_="dim")


def _line(queue: Queue) -> Sequence[str]:
    return (
        str(queue.gpus),
        f"{queue.at_once:.1%} of cells",
        format_duration(round(queue.median_s) * NS_PER_S) if queue.median_s >= 1 else "0s",
        format_duration(round(queue.p95_s) * NS_PER_S) if queue.p95_s >= 1 else "0s",
        many(queue.longest, "request"),
    )
