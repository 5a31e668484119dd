"""Sessions as documents: the same words and numbers for command line, API and page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from msgspec import structs, to_builtins

from sublet.client.fabric import Fabric
from sublet.errors import SubletError
from sublet.lease.value import rfc3339
from sublet.studio.look import SessionsSnapshot, by_session
from sublet.studio.office import offer_of, seen_as
from sublet.studio.records import CellRecord, LeaseRecord, Session
from sublet.studio.states import SessionState
from sublet.values import GIB, NS_PER_S, format_cost, format_duration, format_size
from sublet.wire.http import ExplainAnswer, LeaseView

Json: TypeAlias = dict[str, Any]


def session_views(fabric: Fabric, listed: Sequence[Session], seen: SessionsSnapshot | None = None) -> list[Json]:
    """These sessions, each with its live lease, place in the queue and bill so far, as the office has it now or
    was ``seen``."""
    if not listed:
        return []
    if seen is None:
        leases, bills = by_session(fabric.leases()), {line.key: line for line in fabric.bill(by="session")}
        estimates = fabric.status().estimates if any(_waits(one) for many in leases.values() for one in many) else None
        seen = SessionsSnapshot(began_s=0.0, leases=leases, places={}, bills=bills, estimates=estimates)
    return [_view(fabric, one, seen) for one in listed]


def leases_of(session: Session, seen: SessionsSnapshot) -> list[LeaseView]:
    """What the session has, or waits for, in the office."""
    if session.is_over:
        return []
    return [one for one in seen.leases.get(session.id, ()) if session.tenant in ("", one.tenant)]


def _view(fabric: Fabric, session: Session, seen: SessionsSnapshot) -> Json:
    leases, bill = leases_of(session, seen), seen.bills.get(session.id)
    lease = next((one for one in leases if one.parks is None), None)
    is_busy = lease is not None and seen_as(lease).is_busy
    view: Json = {
        "id": session.id,
        "name": session.name,
        "state": session.state.value,
        "end": None if session.end is None else session.end.value,
        "person": session.person,
        "tenant": session.tenant,
        "terms": structs.asdict(session.terms),
        "started_at": _moment(session.started_ns),
        "changed_at": _moment(session.changed_ns),
        "active_at": _moment(time.time_ns() if is_busy else session.active_ns),
        "volume": session.volume,
        "saved_at": session.saved_at,
        "checkpoint": None if session.checkpoint is None else structs.asdict(session.checkpoint),
        "lease": None if lease is None else lease.id,
        "remaining": None if lease is None else lease.remaining,
        "busy": is_busy,
        "suspended": session.state is SessionState.RESTING and any(one.parks is not None for one in leases),
        "position": None,
        "estimate": None,
        "estimate_error": None,
        "reason": session.refused,
        "offer": _offer_view(session),
        "leases": [_lease_view(one) for one in session.leases],
        "cells": [_cell_view(one) for one in session.cells],
        "bill": None if bill is None else to_builtins(bill),
    }
    if lease is not None and _waits(lease):
        if seen.estimates is not None:
            view["estimate_error"] = seen.estimates.p90_error
        if (place := seen.places.get(lease.id)) is not None:
            return view | {"position": place.position, "estimate": place.estimate, "reason": place.reason}
        with contextlib.suppress(SubletError):  # it was granted, or withdrawn, in this moment
            why = fabric.request("GET", f"/v1/leases/{lease.id}/explain", shape=ExplainAnswer)
            view |= {"position": why.position, "estimate": why.estimate, "reason": why.summary}
    return view


def _waits(lease: LeaseView) -> bool:
    return lease.granted_at is None


def _offer_view(session: Session) -> Json | None:
    offer = session.offer
    if offer is None:
        return None
    view = structs.asdict(offer)
    del view["valid_s"], view["until_ns"]
    view["estimate"] = view.pop("estimate_s")
    return view | {"until": _moment(offer.until_ns), "accepted": session.is_accepted, "text": str(offer_of(offer))}


def _lease_view(lease: LeaseRecord) -> Json:
    return {
        "id": lease.id,
        "epoch": list(lease.epoch),
        "devices": list(lease.devices),
        "from": _moment(lease.at_ns),
        "until": None if lease.ended_ns is None else _moment(lease.ended_ns),
        "reason": lease.reason,
        "detail": lease.detail,
        "saved_at": lease.saved_at,
    }


def _cell_view(cell: CellRecord) -> Json:
    return {
        "cell": cell.cell,
        "lease": cell.lease,
        "at": _moment(cell.at_ns),
        "held_seconds": cell.held_s,
        "busy_seconds": cell.busy_s,
        "vram_leased_byte_seconds": cell.vram_byte_s,
        "launches": cell.launches,
        "bytes_saved": cell.bytes_saved,
        "waited_seconds": cell.waited_s,
        "failed": cell.failed,
    }


CELL_HEADS: Final = ("Cell", "Ended", "Held", "Busy", "GPU memory", "Launches", "Saved", "In the queue")


def cell_row(cell: Json) -> tuple[str, ...]:
    """One cell in a table with ``CELL_HEADS``."""
    return (
        f"[{cell['cell']}]{' failed' if cell['failed'] else ''}",
        f"{cell['at'][:10]} {cell['at'][11:19]} UTC",
        _duration(cell["held_seconds"]),
        format_duration(round(cell["busy_seconds"] * NS_PER_S)),
        memory_time(cell["vram_leased_byte_seconds"]),
        count_of(cell["launches"]),
        format_size(cell["bytes_saved"]) if cell["bytes_saved"] else "-",
        _duration(cell["waited_seconds"]),
    )


def memory_time(byte_seconds: float) -> str:
    """GPU memory that was leased, times how long."""
    return f"{byte_seconds / GIB:.1f} GiB·s" if byte_seconds else "-"


def count_of(number: int | None) -> str:
    """Of launches or their errors; None is not 0."""
    return "not counted" if number is None else str(number)


def about(seconds: float) -> str:
    """Coarse, so that a page does not change each second."""
    if seconds < 60:
        return "less than a minute"
    return f"about {format_duration(round(seconds / 60) * 60 * NS_PER_S)}"


def state(view: Json) -> str:
    """``active``, with what else is worth knowing at a glance."""
    text: str = view["state"]
    if view["end"]:
        return text if view["end"] == text else f"{text}: {view['end']}"
    if view["position"]:
        return f"{text}, place {view['position']}"
    if view["suspended"]:
        return f"{text}, suspended"
    return f"{text}, busy" if view["busy"] else text


def refusal(text: str) -> str:
    """Why there was no lease when it was last asked for, without the code that programs go by."""
    code, _, detail = text.partition(": ")
    return detail if detail and code.isidentifier() else text


def place(view: Json) -> str:
    """The place in the queue with its estimate and reason."""
    return f"place {view['position']}{estimate_of(view)}: {view['reason']}"


def estimate_of(view: Json) -> str:
    """``, in about 5m``, and how accurate such estimates were; empty where there is none."""
    if view["estimate"] is None:
        return ""
    text = f", in {about(view['estimate'])}"
    if view["estimate_error"] is not None:
        text += f" (nine tenths of such estimates were within {about(view['estimate_error'])})"
    return text


def offer_facts(offer: Json) -> list[tuple[str, str]]:
    """What is offered, at which price, and until when it may be accepted."""
    facts = [("offered", offer["text"])]
    if offer["price"] is not None:
        price, asked_price = (format_cost(float(offer[name]), offer["currency"]) for name in ("price", "asked_price"))
        facts.append(("price", f"{price} an hour instead of {asked_price}"))
    open_until = "accepted; it is handed over" if offer["accepted"] else f"until {offer['until'][11:19]} UTC"
    return [*facts, ("offer open", open_until)]


def last_saved(view: Json) -> str:
    """When, and as which checkpoint; empty where nothing was saved."""
    if not view["saved_at"]:
        return ""
    at, where = f"{view['saved_at'][:10]} {view['saved_at'][11:16]} UTC", view["checkpoint"]
    if where is None:
        return at
    volume = "" if where["volume"] == view["volume"] else f" of volume {where['volume']}"
    return f"{at}, checkpoint {where['number']}{volume}"


def the_bill(line: Json) -> str:
    """What a session has cost so far."""
    parts = [
        f"{line['leases']} lease{'' if line['leases'] == 1 else 's'}",
        f"{_duration(line['gpu_seconds'])} of GPU",
        f"{_duration(line['busy_seconds'])} busy",
        f"{_duration(line['waited_seconds'])} in the queue",
    ]
    if line["vram_leased_byte_seconds"]:
        parts.insert(2, f"{memory_time(line['vram_leased_byte_seconds'])} of GPU memory")
    if line["launches"] is None:
        parts.append("launches not counted")
    elif line["launches"]:
        failed = f" ({line['launch_errors']} failed)" if line["launch_errors"] else ""
        parts.append(f"{line['launches']} launches{failed}")
    if line["saves"]:
        parts.append(f"{format_size(line['bytes_saved'])} saved")
    if preempted := line["ended"].get("preempted", 0) + line["ended"].get("fair_share", 0):
        parts.append(f"given up to others {'once' if preempted == 1 else f'{preempted} times'}")
    if line["cost"]:
        parts.append(format_cost(line["cost"], line["currency"]))
    return ", ".join(parts)


def advice(view: Json) -> str:
    """What can be done with a session that has no lease; empty where nothing can. Commands stand in backticks."""
    if view["end"]:
        return ""
    if view["offer"] and not view["offer"]["accepted"]:
        name = view["name"]
        return f"accept the offer, `sublet session accept {name}`, or decline it: `sublet session decline {name}`"
    if view["suspended"]:
        return (
            "run the next cell of its notebook, which goes on with the suspended program; or give that up: "
            f"`sublet session end {view['name']} --now`"
        )
    if ": " in view["reason"] and not view["leases"]:  # the office refused it: it may be more than there is
        name = view["name"]
        return (
            f"ask again when that may have changed, `sublet session resume {name}`, or start it anew with other sizes: "
            f"`sublet session end {name}`, then `sublet session start {name} --vram SIZE`"
        )
    return f"run a cell of its notebook, or `sublet session resume {view['name']}`"


def _duration(seconds: float) -> str:
    return format_duration(round(seconds) * NS_PER_S) if seconds >= 0.5 else "0s"


def _moment(wall_ns: int) -> str:
    return rfc3339(wall_ns)
