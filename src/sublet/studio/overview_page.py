"""Renders the operators' page: what the office has, holders, the queue, and what needs an operator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from sublet.lease.states import LeaseStatus
from sublet.studio.overview import NOISY_H, Overview
from sublet.studio.page import Html, form_of, header, live_page, moment, tag, whole_page
from sublet.studio.people import Person
from sublet.studio.presence import PersonPresence
from sublet.studio.views import about
from sublet.values import NS_PER_S, Kind, device_state, format_duration, format_size
from sublet.wire.http import (
    AuditEntry,
    ConnectedView,
    DeviceView,
    FenceView,
    GroupView,
    LeaseView,
    NoisyView,
    PlaceAnswer,
    ReservationView,
    TenantView,
)
from sublet.wire.http_views import SESSION_LABEL

HOUR_S: Final = 3600.0
STEP_S: Final = 15.0
"""The timeline goes on in such steps, so that a page does not change each second."""
TENANTS_SHOWN: Final = 50
LEASES_SHOWN: Final = 100
PEOPLE_SHOWN: Final = 50
_LEFT, _WIDTH, _ROW, _BAR = 160, 800, 26, 18
"""The timeline's sizes: names, hour, row, bar."""
_OWN_TOKEN: Final = (
    tag("label", "Your access token of the office", for_="token"),
    tag("input", id="token", name="token", type="password", autocomplete="current-password", required="required"),
)
"""An operator's: the studio has no right to what only operators may do, and keeps this nowhere."""
_OF_KIND: Final[Mapping[str, str]] = {Kind.GPU: "GPU memory", Kind.MEMORY: "memory", Kind.BLOCK: "disk"}
_KINDS: Final[Mapping[str, str]] = {Kind.GPU: "GPUs", Kind.CPU: "cores", Kind.MEMORY: "memory", Kind.BLOCK: "disk"}
_HELD: Final = (LeaseStatus.ACTIVE, LeaseStatus.NOTICED, LeaseStatus.GRANTED)
_ENTITLED: Final = tag(
    "p",
    "Entitled to: the part by weight while all groups ask, and within a group all of its tenants. What others do not "
    "ask for may be used beyond that.",
    class_="dim",
)


def overview_page(person: Person, seen: Overview, people: Sequence[PersonPresence], form: str) -> str:
    """The operator's page. ``form`` is the token of its forms."""
    part = overview_part(seen, people, form)
    links = (("Audit log", "/office/audit"), ("Your sessions", "/"))
    return live_page(person, form, part, live="/office/live", links=links, title="Office", broad=True)


def overview_part(seen: Overview, people: Sequence[PersonPresence], form: str) -> str:
    """What of the page changes by itself."""
    parts = [
        tag("h2", "Office"),
        tag("p", _summary(seen)),
        *(tag("p", text, class_="error", role="alert") for text in _troubles(seen)),
        *section("In quarantine", [_fence(fence, form) for fence in seen.fences]),
        _timeline(seen),
        *section(
            "Devices",
            cards(("Device", "State", "Free", "Leases"), (_device(one, seen.fences) for one in seen.status.devices)),
        ),
        tag("h2", "Nodes"),
        *(_node(seen, node.id, node.state, form) for node in seen.status.nodes),
        *section(
            "Queue", cards(("Place", "Tenant", "Asks for", "Waits since", "Estimate", "Why"), map(_place, seen.queue))
        ),
        *section("Leases", cards(("Lease", "Tenant", "Has", "Tier", "Since", "Left"), _leases(seen.leases))),
        *section(
            "Reservations",
            cards(("Reservation", "Group", "GPUs", "When", "State", "Next"), map(reservation_row, seen.reservations)),
        ),
        *section(
            "Groups",
            [
                *table(
                    ("Group", "Weight", "Share used", "Entitled to", "GPUs", "Floor", "Ceiling", "Waiting"),
                    (_group(one, seen.groups) for one in seen.groups),
                ),
                _ENTITLED,
            ],
        ),
        *section(
            "Tenants",
            table(
                ("Tenant", "Group", "Weight", "Share used", "Entitled to", "Leases", "Waiting"),
                _tenants(seen.tenants, seen.groups),
            ),
        ),
        *_noisy(seen.noisy),
        *section("People", table(("Person", "Tenant", "User", "Role", "Connected"), _people(people, seen))),
        *section(
            "Connected to the office",
            cards(("User", "Process", "Tenant", "Connections", "Since"), _processes(seen.connected)),
        ),
    ]
    return "".join(parts)


def audit_page(person: Person, of: str, entries: Sequence[AuditEntry] | None, form: str) -> str:
    """The newest records of the audit log; None: they were not asked for yet."""
    search = form_of(
        "/office/audit",
        form,
        tag("label", "Lease, tenant or device", for_="of"),
        tag("input", id="of", name="of", value=of, maxlength="100"),
        *_OWN_TOKEN,
        tag("button", "Search"),
        class_="sign-in",
    )
    found: Sequence[Html] = ()
    if entries is not None:
        none = tag("p", "No such records." if of else "No records yet.", class_="none")
        found = cards(("Number", "At", "By", "What", "Of"), map(_record, entries)) or [none]
    main = tag("main", tag("h2", "Audit log"), search, *found)
    return whole_page(header(person, form, (("Office", "/office"),)), main, title="Audit log", broad=True)


def ask_page(person: Person, form: str, question: str, button: str, path: str, **hidden: str) -> str:
    """A question before something that others feel. The operator's own token confirms it."""
    insists = form_of(path, form, *_OWN_TOKEN, tag("button", button, class_="danger"), class_="sign-in", **hidden)
    back = tag("p", tag("a", "No, back to the office", href="/office"))
    return whole_page(header(person, form, (("Office", "/office"),)), tag("main", tag("p", question), insists, back))


# ---- within


def _summary(seen: Overview) -> str:
    status = seen.status
    summary = f"{many(status.live, 'live lease')}, {status.queued} waiting, {status.quarantined} in quarantine."
    if status.estimates is not None:
        error = format_duration(round(status.estimates.p90_error) * NS_PER_S)
        summary += (
            f" Of the last {many(status.estimates.requests, 'request')} that waited, nine tenths were granted within "
            f"{error} of their estimate."
        )
    return summary


def _troubles(seen: Overview) -> Iterable[str]:
    if seen.status.supervisor_silent:
        silent = format_duration(round(seen.status.supervisor_silent) * NS_PER_S)
        yield f"The supervisor has not answered for {silent}: no deadline is enforced until it goes on."
    if seen.status.disk_short:
        yield f"No new lease is granted: {seen.status.disk_short}."


def section(title: str, parts: Sequence[Html]) -> Sequence[Html]:
    """A heading and what is below it; nothing where there is nothing to show."""
    return [tag("h2", title), *parts] if parts else ()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Sequence[Html]:
    """For numbers: on a phone it is moved sideways."""
    return _table(heads, [tag("tr", *(tag("td", cell) for cell in row)) for row in rows], "")


def cards(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Sequence[Html]:
    """For sentences: on a phone each row is a card, with the heads beside its cells."""
    made = [
        tag("tr", *(tag("td", cell, data_head=head) for head, cell in zip(heads, row, strict=True) if cell))
        for row in rows
    ]
    return _table(heads, made, "cards")


def _table(heads: Sequence[str], rows: Sequence[Html], class_: str) -> Sequence[Html]:
    if not rows:
        return ()
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads)))
    return [tag("div", tag("table", head, tag("tbody", *rows), class_=class_), class_="wide")]


def _fence(fence: FenceView, form: str) -> Html:
    vouch = form_of(
        "/office/clear",
        form,
        tag("button", "Clear it on your word", class_="danger"),
        resource=fence.resource,
        vouch="1",
    )
    again = form_of("/office/clear", form, tag("button", "Verify again"), resource=fence.resource)
    do = (
        "It was found broken: look at the hardware, then clear it."
        if fence.hard
        else "Its teardown could not be verified. It is verified again by itself, or now."
    )
    return tag(
        "article",
        tag("h3", fence.resource, " ", tag("span", "quarantined", class_="state quarantined")),
        tag("p", fence.detail),
        tag("p", do, class_="dim"),
        tag("div", *((vouch,) if fence.hard else (again,)), class_="buttons"),
    )


def _device(device: DeviceView, fences: Sequence[FenceView]) -> Sequence[str]:
    state = device_state(
        device.state, device.detail, capacity=device.capacity, free=device.free, is_leased=bool(device.leases)
    )
    if any(fence.resource == device.id for fence in fences):
        state = "in quarantine"
    return (
        _named(device),
        state,
        f"{_amount(device.kind, device.free)} of {_amount(device.kind, device.capacity)}",
        ", ".join(device.leases) or "-",
    )


def _place(place: PlaceAnswer) -> Sequence[str]:
    estimate = "not known" if place.estimate is None else about(place.estimate)
    lease = place.lease
    return str(place.position), lease.tenant, wants(lease), moment(lease.asked_at), estimate, place.reason


def _leases(leases: Sequence[LeaseView]) -> Iterable[Sequence[str]]:
    held = [lease for lease in leases if lease.status in _HELD]
    for lease in held[:LEASES_SHOWN]:
        has = ", ".join(f"{part.resource}: {_amount(part.kind, part.amount)}" for part in lease.parts)
        left = "-" if lease.remaining is None else about(lease.remaining)
        if lease.notice is not None:
            left = f"{left}; {lease.notice.reason} in {about(lease.notice.in_seconds)}"
        elif lease.idle:
            left = f"{left}; idle"
        name = lease.id if lease.name is None else f"{lease.id} ({lease.name})"
        yield name, lease.tenant, has, lease.tier, moment(lease.granted_at or lease.asked_at), left
    if len(held) > LEASES_SHOWN:
        yield f"and {len(held) - LEASES_SHOWN} more", "", "", "", "", ""


def _group(group: GroupView, groups: Sequence[GroupView]) -> Sequence[str]:
    ceiling = "none" if group.ceiling is None else str(group.ceiling)
    used, entitled = share_of(group), f"{entitlement(group, groups):.1%}"
    now, floor = f"{group.gpus:g}", str(group.floor)
    return group.id, str(group.weight), used, entitled, now, floor, ceiling, str(group.queued)


def entitlement(group: GroupView, groups: Sequence[GroupView]) -> float:
    """Its part by weight of all there is, 1 being all of it, while all groups ask."""
    return group.weight / max(1, sum(one.weight for one in groups))


def share_of(group: GroupView) -> str:
    """What the group used lately, of the kind of which it used most."""
    return f"{group.share:.1%} of all {_KINDS.get(group.share_of, group.share_of)}"


def _tenants(tenants: Sequence[TenantView], groups: Sequence[GroupView]) -> Iterable[Sequence[str]]:
    """Those that use most come first."""
    ordered = sorted(tenants, key=lambda one: (-one.share, one.id))
    of_groups = {one.id: entitlement(one, groups) for one in groups}
    weights: Counter[str] = Counter()
    for one in tenants:
        weights[one.group] += one.weight if _may_ask(one) else 0
    for one in ordered[:TENANTS_SHOWN]:
        name = f"{one.id} (disabled)" if one.disabled else one.id
        part = of_groups.get(one.group, 0.0) * one.weight / max(1, weights[one.group])
        entitled = f"{part:.1%}" if _may_ask(one) else "-"
        yield name, one.group, str(one.weight), f"{one.share:.1%}", entitled, str(one.leases), str(one.queued)
    if len(ordered) > TENANTS_SHOWN:
        yield f"and {len(ordered) - TENANTS_SHOWN} more", "", "", "", "", "", ""


def _may_ask(tenant: TenantView) -> bool:
    """A studio asks for others alone."""
    return not tenant.disabled and not tenant.studio


def _noisy(noisy: NoisyView) -> Sequence[Html]:
    """Tenants that disturbed others, each with the rule by which it is named."""
    rows = ((one.tenant, one.group, one.says) for one in noisy.neighbours)
    met = {one.rule for one in noisy.neighbours}
    rules = [
        tag("p", f"{name}: a tenant that {rule}.", class_="dim") for name, rule in noisy.rules.items() if name in met
    ]
    found = table(("Tenant", "Group", f"What it did in {NOISY_H} h"), rows)
    return section("Noisy neighbours", [*found, *rules])


def _people(people: Sequence[PersonPresence], seen: Overview) -> Iterable[Sequence[str]]:
    """Those who are connected come first."""
    users = {tenant.id: tenant for tenant in seen.tenants}
    for one in people[:PEOPLE_SHOWN]:
        person, tenant = one.person, users.get(one.person.tenant)
        role = f"teacher of {', '.join(person.teaches)}" if person.teaches else "member"
        role = "operator" if person.is_operator else role
        user = "-" if tenant is None or tenant.uid is None else str(tenant.uid)
        yield person.name, person.tenant, user, role, _connected(one, seen.at_s)
    if len(people) > PEOPLE_SHOWN:
        yield f"and {len(people) - PEOPLE_SHOWN} more", "", "", "", ""


def _processes(connected: Sequence[ConnectedView]) -> Iterable[Sequence[str]]:
    """Those of other users of the machine, over the shared socket."""
    for one in connected[:PEOPLE_SHOWN]:
        user, process = ("-" if number is None else str(number) for number in (one.uid, one.pid))
        yield user, process, ", ".join(one.tenants) or "-", str(one.connections), moment(one.since)
    if len(connected) > PEOPLE_SHOWN:
        yield f"and {len(connected) - PEOPLE_SHOWN} more", "", "", "", ""


def _connected(one: PersonPresence, now_s: float) -> str:
    if one.pages:
        return many(one.pages, "open page")
    if one.last_request_s is None:
        return "not since the studio was started"
    return f"{about(max(0.0, now_s - one.last_request_s))} ago, with token {one.label}"


def reservation_row(one: ReservationView) -> Sequence[str]:
    following = moment(one.times[0].begins_at) if one.times else "-"
    state = f"{one.state}, {one.ready} of {len(one.devices)} ready" if one.devices else one.state
    return one.id, one.group, str(one.gpus), f"{one.when} ({one.zone})", state, following


def _node(seen: Overview, node: str, state: str, form: str) -> Html:
    live = sum(lease.node == node and lease.status in _HELD for lease in seen.leases)
    is_draining = state == "draining"
    label = "End the drain" if is_draining else "Drain: grant nothing here, give notice to holders"
    button = tag("button", label, class_="" if is_draining else "quiet")
    hidden = {"node": node, "draining": "" if is_draining else "1"}
    return tag(
        "article",
        tag("h3", node, " ", tag("span", state, class_=f"state {state}")),
        *((tag("p", f"{many(live, 'live lease')} here", class_="dim"),) if live else ()),
        tag("div", form_of("/office/drain", form, button, **hidden), class_="buttons"),
    )


def _record(entry: AuditEntry) -> Sequence[str]:
    event = entry.event
    named = (event.get(key) for key in ("lease", "tenant", "name", "resource", "node"))
    of = " ".join(str(one["id"] if isinstance(one, dict) and "id" in one else one) for one in named if one)
    return str(entry.seq), f"{entry.at[:10]} {entry.at[11:19]} UTC", entry.by or "not recorded", entry.kind, of


def _timeline(seen: Overview) -> Html:
    """The GPUs in the last hour: one row for each device, one bar for each lease."""
    devices = [device for device in seen.status.devices if device.kind == Kind.GPU]
    if not devices:
        return Html("")
    now_s = math.ceil(seen.at_s / STEP_S) * STEP_S
    shapes: list[Html] = []
    for row, device in enumerate(devices):
        top = row * _ROW
        shapes.append(tag("text", _short(device.id), x="0", y=str(top + _BAR - 4)))
        shapes.append(_rect(_LEFT, top, _WIDTH, "room"))
        for lease in seen.leases:
            amount = sum(part.amount for part in lease.parts if part.resource == device.id)
            if amount and lease.granted_at is not None:
                shapes += _bar(lease, top, amount / max(1, device.capacity or amount), now_s)
        # A phone shows the end of the hour, and the name there.
        near = {"x": str(_LEFT + _WIDTH - 4), "y": str(top + _BAR - 4), "text_anchor": "end"}
        shapes.append(tag("text", _short(device.id), class_="near", aria_hidden="true", **near))
    height = len(devices) * _ROW
    for minutes in (60, 45, 30, 15, 0):
        x = _LEFT + _WIDTH - minutes * 60 / HOUR_S * _WIDTH
        label = "now" if not minutes else f"−{minutes} min"
        shapes.append(tag("text", label, x=f"{x:.0f}", y=str(height + 12), text_anchor="middle"))
    drawing = tag(
        "svg",
        *shapes,
        viewBox=f"0 0 {_LEFT + _WIDTH + 30} {height + 18}",
        role="img",
        class_="timeline",
        aria_label="Leases of the last hour, by device",
    )
    return Html(tag("h2", "The last hour") + tag("div", drawing, class_="wide"))


def _bar(lease: LeaseView, top: int, part: float, now_s: float) -> list[Html]:
    begins_s = max(_epoch_s(lease.granted_at or ""), now_s - HOUR_S)
    ends_s = min(now_s, _epoch_s(lease.end.at)) if lease.end is not None else now_s
    if ends_s <= now_s - HOUR_S or ends_s < begins_s:
        return []
    x = _LEFT + (begins_s - now_s + HOUR_S) / HOUR_S * _WIDTH
    width = max(1.0, (ends_s - begins_s) / HOUR_S * _WIDTH)
    over = "" if lease.end is None else f", ended: {lease.end.reason}"
    session = lease.labels.get(SESSION_LABEL, "")
    title = f"{lease.tenant}, lease {lease.id}{f', session {session}' if session else ''}{over}"
    drawn = "held" if lease.end is None else "ended"
    return [_rect(x, top, width, drawn, min(1.0, part), title)]


def _rect(x: float, top: int, width: float, drawn: str, part: float = 1.0, title: str = "") -> Html:
    """A lease of a part of a device is a lower bar."""
    height = max(4.0, _BAR * part)
    return tag(
        "rect",
        *((tag("title", title),) if title else ()),
        x=f"{x:.1f}",
        y=f"{top + _BAR - height:.1f}",
        width=f"{width:.1f}",
        height=f"{height:.1f}",
        class_=drawn,
    )


def _epoch_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _short(resource: str) -> str:
    """The end of an id that is too long for its row."""
    return resource if len(resource) <= 22 else f"…{resource[-21:]}"


def _named(device: DeviceView) -> str:
    if device.kind != Kind.GPU:
        return device.id
    return f"{device.id} ({'host device, no GPU' if device.host else device.model or 'GPU'})"


def wants(lease: LeaseView) -> str:
    """In the words of a session's own page."""
    parts = []
    for want in lease.wants:
        one = _amount(want.kind, want.amount)
        one = one if want.kind == Kind.CPU else f"{one} of {_OF_KIND.get(want.kind, want.kind)}"
        parts.append(f"{want.count} × {one}" if want.count > 1 else one)
    return f"{', '.join(parts)}, tier {lease.tier}"


def _amount(kind: str, amount: int) -> str:
    return many(amount, "core") if kind == Kind.CPU else format_size(amount)


def many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
