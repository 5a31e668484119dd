"""``sublet lease``: lists, renews, releases and revokes leases. Acquiring is in ``acquire``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Opt
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, LeaseArg, duration, duration_or_zero, epoch, name
from sublet.cli.show import Json, amount, burst_of, document, paint, seconds, table, visible, where
from sublet.cli.show import epoch as show_epoch
from sublet.invocation import typed
from sublet.values import Kind, Tier

NAMED_MAX = 3
"""Leases that one line of an explanation names."""


def ls(
    *,
    everything: Annotated[bool, Opt("--all", help="Include leases that have ended, with the reason.")] = False,
    tenant: Annotated[
        str | None,
        Opt("--tenant", metavar="NAME", parse=name, help="Only leases of this tenant (default for operators: all)."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List live leases and the queue."""
    found = CommandOffice.listing("/v1/leases", live=not everything, all=1 if everything else None, tenant=tenant)
    if as_json:
        document(found)
        return DONE
    if not found:
        print("No leases." if everything else "No live leases.")
        print(f"  Acquire one: {typed('sublet lease acquire --gpu 1GiB')}")
        return DONE
    print(listing(found))
    return DONE


def show(*, lease: LeaseArg, as_json: AsJson = False) -> int:
    """Show one lease in full."""
    answer: Json = CommandOffice.reach().get(f"/v1/leases/{CommandOffice.quote(lease)}")
    if as_json:
        document(answer["lease"])
        return DONE
    view = answer["lease"]
    facts = [
        ("lease", view["id"]),
        ("status", _status(view)),
        ("asked for", _requested(view)),
        ("holds", " + ".join(f"{_amount(part)} of {where(part)}" for part in view["parts"]) or "nothing"),
        ("tenant", view["tenant"]),
        ("tier", view["tier"] + (", pays for priority" if view.get("pays_priority") else "")),
        ("epoch", show_epoch(view["epoch"])),
        ("time to live", seconds(view["ttl"])),
        ("asked at", view["asked_at"]),
        ("granted at", view["granted_at"] or "-"),
        ("ends", _ends(view)),
        *([("holder", _holder(view))] if view["end"] is None else []),
        *([("asked by", view["peer"])] if view.get("peer") else []),
        ("renewals", f"{view['renewals']}, renewed {view['renew']}"),
        ("busy for", seconds(view["busy"])),
        ("name", view["name"] or "-"),
        ("labels", ", ".join(f"{key}={value}" for key, value in view["labels"].items()) or "-"),
    ]
    if view.get("parks"):
        facts.insert(2, ("parks", _parks(view)))
    if view.get("resume"):
        facts.insert(2, ("goes on with", view["resume"]))
    if answer["answer"] == "place":
        facts.insert(2, ("queue", _place(answer)))
    width = max(len(fact) for fact, _ in facts)
    for fact, value in facts:
        print(f"{paint(fact.ljust(width), 'dim')}  {visible(str(value))}")
    return DONE


def explain(*, lease: LeaseArg, as_json: AsJson = False) -> int:
    """Explain why a request waits, or what may end a lease."""
    found: Json = CommandOffice.reach().get(f"/v1/leases/{CommandOffice.quote(lease)}/explain")
    if as_json:
        document(found)
        return DONE
    share = found["share"]
    about = "" if found["estimate"] is None else f", in about {seconds(found['estimate'])}"
    facts = [
        *([("place", f"{found['position']}{about}")] if found["position"] else []),
        *(("goes first", _ahead(ahead)) for ahead in found["ahead"]),
        *(("because", f"{r['text']}{_named(r['leases'])}") for r in found["reasons"] if r["text"] != found["summary"]),
        ("share", f"{share['share']:.1%} (weight {share['weight']})"),
        (f"group {share['group']}", f"{share['group_share']:.1%} (weight {share['group_weight']})"),
        *(("you can", advice) for advice in found["advice"]),
    ]
    print(visible(f"Lease {found['lease']} is {found['status']}: {found['summary']}."))
    width, last = max(len(fact) for fact, _ in facts), ""
    for fact, value in facts:
        print(f"  {paint(('' if fact == last else fact).ljust(width), 'dim')}  {visible(value)}")
        last = fact
    return DONE


def renew(
    *,
    lease: LeaseArg,
    ttl: Annotated[
        float | None, Opt("--ttl", metavar="DURATION", parse=duration, help="New, longer time to live.")
    ] = None,
    at_epoch: Annotated[
        list[int] | None,
        Opt("--epoch", metavar="EPOCH", parse=epoch, help="Expected epoch of the lease; any other is refused."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Renew a lease: its time to live starts again."""
    office = CommandOffice.reach()
    path = f"/v1/leases/{CommandOffice.quote(lease)}"
    known = office.get(path)["lease"]
    office.post(f"{path}/renew", {"epoch": at_epoch or known["epoch"], "ttl": ttl})
    view = office.get(path)["lease"]
    return print_lease(
        view, f"Lease {view['id']} was renewed: it ends in {seconds(view['remaining'])}.", as_json=as_json
    )


def release(*, lease: LeaseArg, as_json: AsJson = False) -> int:
    """Release a lease, or leave the queue."""
    view: Json = CommandOffice.reach().post(
        f"/v1/leases/{CommandOffice.quote(lease)}/release", {"request_id": CommandOffice.request_id()}
    )
    return print_lease(view, f"Lease {view['id']} is {view['status']}{_because(view)}.", as_json=as_json)


def revoke(
    *,
    lease: LeaseArg,
    notice: Annotated[
        float,
        Opt(
            "--notice",
            metavar="DURATION",
            parse=duration_or_zero,
            help="Notice to the holder before the lease ends (default: 0).",
        ),
    ] = 0.0,
    detail: Annotated[str, Opt("--detail", metavar="TEXT", help="Explanation for the holder.")] = "",
    as_json: AsJson = False,
) -> int:
    """End a lease of another holder (operators)."""
    body = {"request_id": CommandOffice.request_id(), "notice": notice, "detail": detail}
    view: Json = CommandOffice.reach().post(f"/v1/leases/{CommandOffice.quote(lease)}/revoke", body)
    if view["notice"]:
        text = f"The holder of {view['id']} has notice: the lease ends in {seconds(view['notice']['in_seconds'])}."
    else:
        text = f"Lease {view['id']} is {view['status']}{_because(view)}."
    return print_lease(view, text, as_json=as_json)


_GOES_FIRST = {
    "tier": "of a higher tier",
    "priority": "with priority, which they pay for or have waited for",
    "group": "of groups with a smaller share per weight",
    "tenant": "of tenants of the same group with a smaller share per weight",
    "held": "for holders that have held for less time",
    "arrival": "that came before",
}


def _ahead(view: Json) -> str:
    count = view["requests"]
    by = f" ({', '.join(view['tenants'])})" if view["tenants"] else ""
    because = _GOES_FIRST[view["because"]]
    return f"{count} request{'' if count == 1 else 's'} {because}{by}{_named(view['leases'])}"


def _named(leases: list[str]) -> str:
    more = len(leases) - NAMED_MAX
    text = ", ".join(leases[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return f": {text}" if leases else ""


def listing(leases: Iterable[Json]) -> str:
    """A table of leases."""
    heads = ["LEASE", "TENANT", "WHAT", "WHERE", "STATUS", "ENDS IN", "NAME"]
    return table(heads, [_row(lease) for lease in leases])


def print_lease(view: Json, sentence: str, *, as_json: bool) -> int:
    """The lease as a document, or a sentence about it."""
    if as_json:
        document(view)
    else:
        print("\n".join(visible(line) for line in sentence.splitlines()))
    return DONE


def _row(view: Mapping[str, Any]) -> list[str]:
    return [
        view["id"],
        view["tenant"],
        _what(view),
        ", ".join(where(part) for part in view["parts"]) or "-",
        _status(view),
        seconds(view["remaining"]) if view["end"] is None else "-",
        view["name"] or burst_of(view),
    ]


def _what(view: Mapping[str, Any]) -> str:
    """What it holds, or as long as it holds nothing, what it asked for: they differ after an offer, and where a whole
    device is reserved."""
    return " + ".join(_amount(part) for part in view["parts"]) or _requested(view)


def _requested(view: Mapping[str, Any]) -> str:
    """``2 × 4GiB gpu + 4 cores``."""
    wants = ((want["count"], _amount(want)) for want in view["wants"])
    return " + ".join(f"{count} × {what}" if count > 1 else what for count, what in wants)


def _amount(thing: Mapping[str, Any]) -> str:
    text = amount(thing["kind"], thing["amount"])
    return text if thing["kind"] == Kind.CPU else f"{text} {thing['kind']}"


def _status(view: Mapping[str, Any]) -> str:
    """``active``, with what else is worth knowing at a glance: its tier unless it is the usual one, notice, end."""
    if view["end"] is not None:
        return f"{view['status']}: {view['end']['reason']}"
    parts = [view["status"]]
    if view["notice"] is not None:
        parts[0] += f": {view['notice']['reason']} in {seconds(view['notice']['in_seconds'])}"
    if view["tier"] != Tier.INTERACTIVE:
        parts.append(view["tier"])
    if view["idle"]:
        parts.append("idle")
    return ", ".join(parts)


def _ends(view: Mapping[str, Any]) -> str:
    if view["end"] is not None:
        parked = view["end"].get("parked", "")
        go_on = f"; go on: {typed('sublet lease acquire --resume')} {parked}" if parked else ""
        saved = f"; last saved at {view['end']['saved_at']}" if view["end"].get("saved_at") else ""
        return f"{view['end']['at']}{_because(view)}{saved}{go_on}"
    return f"{view['expires_at']}, in {seconds(view['remaining'])}" if view["expires_at"] else "-"


def _holder(view: Mapping[str, Any]) -> str:
    pid = view.get("bound_to")
    return f"bound to process {pid}" if pid else "not bound to a process: ends by TTL if the client dies"


def _because(view: Mapping[str, Any]) -> str:
    end = view["end"]
    if end is None:
        return ""
    return f" ({end['reason']}: {end['detail']})" if end["detail"] else f" ({end['reason']})"


def _place(answer: Mapping[str, Any]) -> str:
    estimate = answer["estimate"]
    about = "" if estimate is None else f", in about {seconds(estimate)}"
    return f"place {answer['position']}{about}: {answer['reason']}"


def _parks(view: Json) -> str:
    """For whom a parking lease is, and how far that is."""
    parks = view["parks"]
    if parks["resumed_by"]:
        return f"what ran under {parks['of']}, which {parks['resumed_by']} goes on with"
    state = "what ran under" if parks["holds"] else "nothing yet; it is set aside for what runs under"
    go_on = f" (go on: {typed('sublet lease acquire --resume')} {view['id']})" if parks["holds"] else ""
    return f"{state} {parks['of']}{go_on}"
