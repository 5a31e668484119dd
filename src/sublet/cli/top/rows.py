"""The rows of the live view: one per device, lease, guest, waiting request and tenant. Pure.

On a narrow terminal some columns are left out, never the reason of anything.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from sublet.cli.show import Json, burst_of, cost_head, plural
from sublet.cli.top.snapshot import OfficeSnapshot, remaining
from sublet.cli.top.text import WIDE, WIDER, Column, Entry, Line, StyledSpan, age, bar, size, span_line, table, width_of
from sublet.cli.top.text import fit as fitted
from sublet.invocation import typed
from sublet.values import Kind, Tier

BAR: Final = 8
_TROUBLE: Final = {"quarantined": "red", "lost": "red", "teardown": "yellow", "draining": "yellow"}


class ScreenRow(NamedTuple):
    """A line, and what it is about: for counting those that do not fit."""

    line: Line
    noun: str
    """Empty if it only goes on with the row above."""


class Section(NamedTuple):
    """One part of the screen."""

    name: str
    heading: Line
    rows: tuple[ScreenRow, ...]
    floor: int
    """Rows it gets before another one gets more than its own."""
    beyond: Mapping[str, int] = {}
    """How many more there are of what, for which no line was made."""


def sections(known: OfficeSnapshot, width: int, now_s: float, reach: int | None = None) -> tuple[Section, ...]:
    """All parts that have something in them, and always the leases. ``reach`` says how many leases may come to be seen;
    with ten thousand of them the others are only counted."""
    elapsed_s = max(0.0, now_s - known.at_s)
    found = (
        _devices(known, width),
        _leases(known, width, elapsed_s, reach),
        _queue(known, width, elapsed_s),
        _tenants(known, width),
    )
    return tuple(section for section in found if section.rows)


# ---- devices ----


def _devices(known: OfficeSnapshot, width: int) -> Section:
    columns = (
        Column("DEVICE", 40 if width >= WIDE else 30),
        Column("SIZE", 8, right=True),
        Column("USED", BAR + 8),
        Column("STATE", 60),
        Column("BY", 0),
    )
    tenant_of = {lease["id"]: lease["tenant"] for lease in (*known.leases, *(end.lease for end in known.ended))}
    nodes = {node["id"]: node["state"] for node in known.status["nodes"]}
    fences = Counter(fence["resource"] for fence in known.fences or () if fence["lease"])
    devices = sorted(known.status["devices"], key=_gpus_first)
    entries = [_device(device, tenant_of, nodes, fences, is_wide=width >= WIDE) for device in devices]
    heading, lines = table(f"DEVICES ({len(entries)})", columns, entries, width)
    rows: list[ScreenRow] = []
    for device, line in zip(devices, lines, strict=True):
        rows.append(ScreenRow(line, "device"))
        if device["detail"] and width < WIDE:
            rows.append(_reason(device["detail"], width))
    return Section("devices", heading, tuple(rows), 5)


def _reason(reason: str, width: int) -> ScreenRow:
    """On a line of its own, where the columns leave no room for it."""
    return ScreenRow(span_line((StyledSpan("   └ ", "dim"), StyledSpan(reason)), width), "")


def _gpus_first(device: Json) -> tuple[bool, bool]:
    """Then those in trouble before those in order."""
    return device["kind"] != Kind.GPU, device["state"] == "free" and not device["detail"]


def _device(
    device: Json, tenant_of: Mapping[str, str], nodes: Mapping[str, str], fences: Mapping[str, int], *, is_wide: bool
) -> Entry:
    capacity, used = device["capacity"], device["capacity"] - device["free"]
    in_service = device["state"] == "free"
    return (
        _device_name(device),
        _amount(device["kind"], capacity),
        (*bar(used / capacity if capacity else 0.0, BAR, "cyan"), StyledSpan(f" {_short(device['kind'], used):>7}"))
        if in_service
        else StyledSpan("-" * 3, "dim"),
        _device_state(device, nodes, fences, is_wide=is_wide),
        _by(device, tenant_of),
    )


def _device_name(device: Json) -> str:
    if device["kind"] != Kind.GPU:
        return str(device["id"])
    return f"{device['id']} {'host device, no GPU' if device['host'] else device['model'] or 'GPU'}"


def _device_state(device: Json, nodes: Mapping[str, str], fences: Mapping[str, int], *, is_wide: bool) -> StyledSpan:
    state, node = str(device["state"]), nodes.get(device["node"], "up")
    detail = f": {device['detail']}" if device["detail"] and is_wide else ""
    if state != "free":
        return StyledSpan(state.upper() + detail, _TROUBLE.get(state, "yellow"))
    if node != "up":
        return StyledSpan(f"node {node}", "red" if node == "lost" else "yellow")
    if fences.get(device["id"]):
        return StyledSpan(f"{plural(fences[device['id']], 'slice')} QUARANTINED", "red")
    if device["detail"]:
        return StyledSpan(f"used by others{detail}", "yellow")
    if not device["capacity"]:
        return StyledSpan("full", "red")
    if device["free"] == device["capacity"]:
        return StyledSpan("free", "green")
    return StyledSpan("partly lent" if device["free"] else "lent")


def _by(device: Json, tenant_of: Mapping[str, str]) -> str:
    """Tenants, with how many leases each. What this caller may not see counts all the same; of a disk it is most often
    under no lease, and kept."""
    counted = Counter(tenant_of.get(lease, "?") for lease in device["leases"])
    tenants = [f"{tenant} ×{count}" if count > 1 else tenant for tenant, count in sorted(counted.items())]
    if not tenants and device["state"] == "free" and device["free"] < device["capacity"] and not device["detail"]:
        return "volumes" if device["kind"] == Kind.BLOCK else "others"
    return ", ".join(tenants)


# ---- leases and what runs under them ----


def _leases(known: OfficeSnapshot, width: int, elapsed_s: float, reach: int | None) -> Section:
    columns = (
        Column("LEASE", 18),
        Column("TENANT", 24 if width >= WIDE else 8),
        Column("HOLDS", 36 if width >= WIDE else 11),
        Column("TIER", 11, since=WIDE),
        Column("TIME LEFT", BAR + 8),
        Column("STATUS", 48 if width >= WIDER else 30),
        Column("NAME", 24, since=WIDER),
        Column("HOLDER" if width >= WIDER else "NAME", 0),
    )
    live = [lease for lease in known.leases if lease["status"] != "queued"]
    listed = _bursts_as_one(live)
    under: dict[str, list[Json]] = {}
    for guest in known.guests or ():
        under.setdefault(guest["lease"], []).append(guest)
    shown, unseen = listed[:reach], listed[len(listed[:reach]) :]
    entries = [_lease(lease, elapsed_s, width) for lease in shown]
    entries += [_ended(end.lease, width) for end in known.ended]
    title = f"LEASES ({len(live)})" if live else "LEASES"
    heading, lines = table(title, columns, entries, width)
    rows: list[ScreenRow] = []
    wall_s = known.wall_s + elapsed_s
    for lease, line in zip([*shown, *(end.lease for end in known.ended)], lines, strict=True):
        rows.append(ScreenRow(line, "lease"))
        if "of_burst" in lease:
            for one in lease["of_burst"]:
                under.pop(one, None)
        rows += _guests(under.pop(lease["id"], ()), width, wall_s, lease["name"])
    uncounted = sum(len(under.pop(id_, ())) for lease in unseen for id_ in lease.get("of_burst", (lease["id"],)))
    for left in under.values():
        rows += _guests(left, width, wall_s)
    if not rows:
        nothing = f"Nothing is lent. Borrow something: {typed('sublet run --gpu 1GiB -- COMMAND')}"
        rows.append(ScreenRow(span_line((StyledSpan(nothing, "dim"),), width), "line"))
    return Section("leases", heading, tuple(rows), 8, {"lease": len(unseen), "guest": uncounted})


def _bursts_as_one(leases: Sequence[Json]) -> list[Json]:
    """The same, with one line for all leases of a burst of which there is nothing else to say. It has the shortest time
    that is left, and stands where the newest of them stood."""
    bursts: dict[tuple[str, str, str], list[Json]] = {}
    for lease in leases:
        if lease["status"] == "active" and lease["notice"] is None and (name := burst_of(lease)):
            bursts.setdefault((name, lease["tenant"], lease["tier"]), []).append(lease)
    listed: list[Json] = []
    for lease in leases:
        name = burst_of(lease)
        found = bursts.get((name, lease["tenant"], lease["tier"]), ())
        if len(found) < 2 or lease["status"] != "active" or lease["notice"] is not None:
            listed.append({**lease, "name": lease["name"] or name or None})
        elif lease is found[0]:
            amounts: Counter[tuple[str, str]] = Counter()
            for part in (part for one in found for part in one["parts"]):
                amounts[part["kind"], part["resource"]] += part["amount"]
            parts = [{"kind": kind, "resource": place, "amount": amount} for (kind, place), amount in amounts.items()]
            soonest = min(found, key=lambda one: one["remaining"] or 0.0)
            every = [one["id"] for one in found]
            id_ = plural(len(found), "lease")
            listed.append({**soonest, "id": id_, "parts": parts, "name": name, "of_burst": every})
    return listed


def _lease(lease: Json, elapsed_s: float, width: int) -> Entry:
    return (
        lease["id"],
        lease["tenant"],
        _holds(lease, is_wide=width >= WIDE),
        lease["tier"],
        _time_left(lease, elapsed_s),
        _lease_status(lease, elapsed_s, is_wide=width >= WIDE),
        lease["name"] or "-",
        StyledSpan(_who(lease, is_wide=width >= WIDER), "dim"),
    )


def _ended(lease: Json, width: int) -> Entry:
    end = lease["end"] or {"reason": "over", "detail": ""}
    outcome = f"ended: {end['reason']}" + (f" ({end['detail']})" if end["detail"] else "")
    texts = (lease["id"], lease["tenant"], _holds(lease, is_wide=width >= WIDE), lease["tier"], "-", outcome)
    return tuple(
        StyledSpan(text, "dim") for text in (*texts, lease["name"] or "-", _who(lease, is_wide=width >= WIDER))
    )


def _holds(lease: Json, *, is_wide: bool) -> str:
    """What, and where there is room also of which device."""
    parts = lease["parts"]
    if not parts:
        return " + ".join(_want(want) for want in lease["wants"])
    if is_wide:
        return " + ".join(f"{_amount(part['kind'], part['amount'])} of {part['resource']}" for part in parts)
    return " + ".join(_kind(part["kind"], part["amount"]) for part in parts)


def _want(want: Json) -> str:
    text = _kind(want["kind"], want["amount"])
    return f"{want['count']} × {text}" if want["count"] > 1 else text


def _time_left(lease: Json, elapsed_s: float) -> str | Line:
    if lease["claim_within"] is not None:
        return f"claim in {age(lease['claim_within'] - elapsed_s)}"
    left_s = remaining(lease, elapsed_s)
    if left_s is None:
        return "-"
    part = left_s / lease["ttl"] if lease["ttl"] else 0.0
    style = "red" if lease["notice"] is not None else "green" if part > 0.25 else "yellow"
    return (*bar(part, BAR - 2, style), StyledSpan(f" {age(left_s):>7}"))


def _lease_status(lease: Json, elapsed_s: float, *, is_wide: bool) -> StyledSpan:
    """What one must know comes first: a notice with its reason and moment, then what is unusual."""
    notice = lease["notice"]
    if notice is not None:
        in_s = age(notice["in_seconds"] - elapsed_s)
        if not is_wide:
            return StyledSpan(f"NOTICE: {notice['reason']} {in_s}", "bold red")
        detail = f" ({notice['detail']})" if notice["detail"] else ""
        return StyledSpan(f"NOTICE: {notice['reason']} in {in_s}{detail}", "bold red")
    text = str(lease["status"])
    if lease["end"] is not None:
        text += f": {lease['end']['reason']}"
    if lease["tier"] != Tier.INTERACTIVE and not is_wide:
        text += f", {lease['tier']}"
    if lease["idle"]:
        return StyledSpan(f"{text}, idle", "yellow")
    return StyledSpan(text, "yellow" if lease["status"] == "ending" else "")


def _who(lease: Json, *, is_wide: bool) -> str:
    """Where there is one column for both, the name stands for the holder, for that is what people chose."""
    holder = str(lease.get("holder") or "-")
    return holder if is_wide else str(lease["name"] or holder)


def _guests(guests: Iterable[Json], width: int, wall_s: float, known_as: str | None = None) -> Iterator[ScreenRow]:
    """Indented below their lease, the command with as much room as is left."""
    for guest in guests:
        command = " ".join(guest["argv"])
        left = f"  └ {guest['id']}  "
        facts, style = _guest_facts(guest, wall_s, is_wide=width >= WIDE)
        if width < 64:
            facts = f"pid {guest['pid']}"
        if guest["name"] and guest["name"] != known_as:
            command = f"{guest['name']}: {command}"
        room = max(0, width - width_of(left) - width_of(facts) - 2)
        spans = (StyledSpan(left, "dim"), StyledSpan(fitted(command, room)), StyledSpan("  "), StyledSpan(facts, style))
        yield ScreenRow(span_line(spans, width), "guest")


def _guest_facts(guest: Json, wall_s: float, *, is_wide: bool) -> tuple[str, str]:
    """``pid 4711  cpu 12s  1.2GiB  4m 10s``, and before it what is not as usual."""
    text, style = "", ""
    if guest["state"] != "running" or guest["exit_code"] is not None:
        text, style = str(guest["state"]), "yellow"
        if guest["exit_code"] is not None:
            text = f"exit {guest['exit_code']}" if guest["state"] in ("running", "gone") else text
        if guest["reason"] and is_wide:  # else it stands beside the lease
            text += f": {guest['reason']}"
        text += "  "
    processes = f"+{guest['processes'] - 1}" if guest["processes"] > 1 else ""
    pid = f"pid {guest['pid']}{processes}"
    memory = size(guest["peak_bytes"]) if guest["peak_bytes"] else "-"
    since_s = _since(guest["started_at"], wall_s)
    return f"{text}{pid:<9}  {age(guest['cpu']):>7} cpu  {memory:>7}  {age(since_s):>7}", style


# ---- who waits ----


def _queue(known: OfficeSnapshot, width: int, elapsed_s: float) -> Section:
    columns = (
        Column("#", 4, right=True),
        Column("LEASE", 18),
        Column("TENANT", 24 if width >= WIDE else 8),
        Column("WANTS", 36 if width >= WIDE else 10),
        Column("TIER", 11, since=WIDE),
        Column("SINCE", 7, right=True, since=WIDE),
        Column("IN ABOUT", 8, right=True),
        Column("BECAUSE", 0, since=WIDE),
    )
    entries = [_place(place, known.wall_s, elapsed_s) for place in known.queue]
    waiting = max(len(entries), sum(lease["status"] == "queued" for lease in known.leases))
    heading, lines = table(f"QUEUE ({waiting})", columns, entries, width)
    # Of a long line the office lists the beginning; of the rest only the number is known.
    beyond = {"waiting": waiting - len(entries)}
    rows: list[ScreenRow] = []
    for place, line in zip(known.queue, lines, strict=True):
        rows.append(ScreenRow(line, "waiting"))
        if width < WIDE:
            rows.append(_reason(place["reason"], width))
    return Section("queue", heading, tuple(rows), 3, beyond)


def _place(place: Json, wall_s: float, elapsed_s: float) -> Entry:
    lease, estimate = place["lease"], place["estimate"]
    return (
        str(place["position"]),
        lease["id"],
        lease["tenant"],
        " + ".join(_want(want) for want in lease["wants"]),
        lease["tier"],
        age(_since(lease["asked_at"], wall_s + elapsed_s)),
        "?" if estimate is None else age(estimate - elapsed_s),
        place["reason"],
    )


# ---- tenants ----


def _tenants(known: OfficeSnapshot, width: int) -> Section:
    cost = cost_head(known.bill)
    columns = (
        Column("TENANT", 24),
        Column("LEASES", 7, right=True),
        Column("WAIT", 5, right=True),
        Column("SHARE, LAST HOUR", BAR + 10),
        Column("GPU TIME", 8, right=True),
        Column(cost, max(14, width_of(cost)), right=True),
        Column("", 0),
    )
    entries = _operators_view(known) if known.tenants is not None else _own_view(known)
    heading, lines = table(f"TENANTS ({len(entries)})", columns, entries, width)
    return Section("tenants", heading, tuple(ScreenRow(line, "tenant") for line in lines), 2)


def _operators_view(known: OfficeSnapshot) -> list[Entry]:
    """Tenants by their use in the last hour, the most first; those that have nothing and used nothing are left out."""
    bills = {line["key"]: line for line in known.bill}
    tenants = [
        tenant
        for tenant in known.tenants or ()
        if tenant["leases"] or tenant["queued"] or tenant["gpu_seconds_used"] or tenant["id"] in bills
    ]
    tenants.sort(key=lambda tenant: (-tenant["gpu_seconds_used"], -tenant["leases"], tenant["id"]))
    total_s = sum(tenant["gpu_seconds_used"] for tenant in tenants)
    return [
        (
            tenant["id"],
            str(tenant["leases"]),
            str(tenant["queued"]),
            _share(tenant["gpu_seconds_used"] / total_s if total_s else 0.0),
            *_billed(bills.get(tenant["id"])),
            StyledSpan("operator", "dim") if tenant["operator"] else "",
        )
        for tenant in tenants
    ]


def _own_view(known: OfficeSnapshot) -> list[Entry]:
    """A tenant sees its own bill, and is not told what part of the whole that is."""
    held = Counter(lease["tenant"] for lease in known.leases if lease["status"] != "queued")
    waits = Counter(lease["tenant"] for lease in known.leases if lease["status"] == "queued")
    bills = {line["key"]: line for line in known.bill}
    names = sorted({*held, *waits, *bills})
    return [
        (name, str(held[name]), str(waits[name]), StyledSpan("-", "dim"), *_billed(bills.get(name)), "")
        for name in names
    ]


def _share(part: float) -> Line:
    return (*bar(part, BAR, "cyan"), StyledSpan(f" {part:>5.0%}"))


def _billed(line: Json | None) -> tuple[str, str]:
    """GPU time and cost, of all time."""
    return ("-", "-") if line is None else (age(line["gpu_seconds"]), f"{line['cost']:.4f}")


# ---- amounts and times ----


def _amount(kind: str, number: int) -> str:
    return plural(number, "core") if kind == Kind.CPU else size(number)


def _short(kind: str, number: int) -> str:
    return str(number) if kind == Kind.CPU else size(number)


def _kind(kind: str, number: int) -> str:
    return _amount(kind, number) if kind == Kind.CPU else f"{size(number)} {kind}"


def _since(moment: str | None, wall_s: float) -> float | None:
    began_s = None if moment is None else _wall_s(moment)
    return None if began_s is None else max(0.0, wall_s - began_s)


@functools.lru_cache(maxsize=4096)
def _wall_s(moment: str) -> float | None:
    """Seconds of an RFC 3339 time, if it is one."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return None
