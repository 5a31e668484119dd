"""Offices to look at: made-up snapshots, and the transcript of what a terminal shows of them.

A transcript is a text file of looks at one scene. A line that begins with ``>`` says how large the terminal is, where
one looks and how much later; the screen follows, between bars that show where the terminal ends. Run the tests with
``SUBLET_REWRITE=1`` to write what is really shown, then read the difference.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sublet.cli.show import Json
from sublet.cli.top.screen import ScreenView, screen
from sublet.cli.top.snapshot import EndedLease, OfficeSnapshot, apply_news
from sublet.cli.top.text import plain, width_of
from sublet.values import GIB

__all__ = ["SCENES", "device", "guest", "lease", "looked_at", "place", "snapshot", "tenant"]

ASKED: Final = "2026-03-01T12:00:00.000Z"
WALL_S: Final = 1772366580.0
"""Three minutes later."""

# ---- documents as an office sends them ----


def device(name: str, capacity: int, free: int, **changes: Any) -> Json:
    facts: Json = {
        "id": name,
        "node": "local",
        "kind": "gpu",
        "model": "NVIDIA H200",
        "host": False,
        "capacity": capacity,
        "free": free,
        "state": "free",
        "detail": "",
        "leases": [],
    }
    return facts | changes


def lease(number: int, tenant: str = "ana", **changes: Any) -> Json:
    resource = changes.pop("of", "local/gpu0")
    facts: Json = {
        "id": f"l-{number:016x}",
        "tenant": tenant,
        "status": "active",
        "name": None,
        "labels": {},
        "tier": "interactive",
        "renew": "while-busy",
        "ttl": 300.0,
        "wants": [{"kind": "gpu", "amount": 8 * GIB, "count": 1}],
        "epoch": [1, number],
        "node": "local",
        "parts": [{"resource": resource, "kind": "gpu", "amount": 8 * GIB, "model": "", "host": False}],
        "asked_at": ASKED,
        "granted_at": ASKED,
        "expires_at": "2026-03-01T12:05:00.000Z",
        "deadline": 100.0,
        "remaining": 250.0,
        "claim_within": None,
        "idle": False,
        "busy": 10.0,
        "renewals": 3,
        "notice": None,
        "end": None,
        "holder": "train.py[4711]@box",
    }
    return facts | changes


def waiting(number: int, tenant: str = "bob", **changes: Any) -> Json:
    none: Json = {"status": "queued", "parts": [], "epoch": None, "granted_at": None, "expires_at": None}
    return lease(number, tenant, **(none | {"deadline": None, "remaining": None} | changes))


def place(number: int, position: int, reason: str, estimate: float | None, **changes: Any) -> Json:
    view = waiting(number, **changes)
    return {"answer": "place", "lease": view, "position": position, "reason": reason, "estimate": estimate}


def guest(number: int, under: int, **changes: Any) -> Json:
    facts: Json = {
        "id": f"g-{number:010x}",
        "lease": f"l-{under:016x}",
        "epoch": [1, under],
        "tenant": "ana",
        "name": "",
        "argv": ["python", "train.py", "--epochs", "30"],
        "profile": "local",
        "state": "running",
        "pid": 4711,
        "processes": 1,
        "started_at": "2026-03-01T12:01:00.000Z",
        "ended_at": None,
        "exit_code": None,
        "reason": None,
        "cpu": 118.2,
        "peak_bytes": 1300 << 20,
        "log_bytes": 10,
        "log_dropped": 0,
    }
    return facts | changes


def tenant(name: str, used_s: float, leases: int = 1, queued: int = 0, **changes: Any) -> Json:
    facts: Json = {"id": name, "tier_max": "interactive", "operator": False, "quota": {}, "gpu_seconds_used": used_s}
    return facts | {"leases": leases, "queued": queued} | changes


def bill(name: str, gpu_s: float, cost: float) -> Json:
    return {"key": name, "tenant": name, "leases": 3, "gpu_seconds": gpu_s, "cost": cost, "currency": "credits"}


def snapshot(**parts: Any) -> OfficeSnapshot:
    """With a status that fits the rest."""
    leases = tuple(parts.pop("leases", ()))
    queue = tuple(parts.pop("queue", ()))
    status: Json = {
        "pid": 812,
        "version": "0.1.0",
        "home": "/srv/sublet",
        "uptime": 4210.0,
        "nodes": [{"id": "local", "domain": "local", "labels": {}, "state": "up"}],
        "devices": [],
        "live": sum(one["status"] != "queued" for one in leases),
        "queued": len(queue),
        "quarantined": 0,
    }
    status |= parts.pop("status", {})
    everything: Json = {"guests": (), "bill": (), "tenants": (), "at_s": 100.0, "wall_s": WALL_S}
    return OfficeSnapshot(
        status=status, leases=(*leases, *(p["lease"] for p in queue)), queue=queue, **(everything | parts)
    )


# ---- scenes ----

MACHINE: Final = [
    device("local/cpu", 32, 28, kind="cpu", model=""),
    device("local/memory", 256 * GIB, 192 * GIB, kind="memory", model=""),
]


def nothing() -> OfficeSnapshot:
    host = device("local/gpu0", 16 * GIB, 16 * GIB, host=True, model="host device, no GPU")
    return snapshot(status={"devices": [*MACHINE, host]})


def three() -> OfficeSnapshot:
    """An ordinary afternoon: one of three has notice, two commands run, one waits."""
    taken = {"reason": "preempted", "in_seconds": 25.0, "at": ASKED, "detail": "by an interactive lease of eve"}
    leases = [
        lease(3, "bob", tier="spot", name="sweep-17", notice=taken, status="noticed", ttl=600.0, remaining=25.0),
        lease(2, "ana", name="notebook", idle=True, remaining=44.0, holder="ipykernel[99]@laptop"),
        lease(1, "local", of="local/cpu", remaining=300.0, parts=[_cores(4)]),
    ]
    gpu = device("local/gpu0", 139 * GIB, 123 * GIB, leases=[leases[0]["id"], leases[1]["id"]])
    return snapshot(
        status={"devices": [*MACHINE, gpu]},
        leases=leases,
        guests=(guest(1, 3, tenant="bob"), guest(2, 1, argv=["make", "-j4", "all"], pid=902, processes=9, cpu=431.0)),
        queue=[place(9, 1, "a whole GPU is not free now; yours is next", 25.0, tenant="eve", tier="interactive")],
        tenants=(
            tenant("local", 0.0, operator=True),
            tenant("ana", 600.0),
            tenant("bob", 1800.0),
            tenant("eve", 0.0, leases=0, queued=1),
            tenant("zoe", 0.0, leases=0),
        ),
        bill=(bill("ana", 600, 0.5), bill("bob", 5400.0, 4.5), bill("local", 0, 0.0042)),
    )


def crowd() -> OfficeSnapshot:
    """More than fits: eight cards, a hundred leases, two hundred commands, forty who wait, a dozen tenants."""
    names = [f"team-{letter}" for letter in "abcdefghijkl"]
    leases = [
        lease(n, names[n % 12], of=f"local/gpu{n % 8}", remaining=3.0 * n, name=f"run-{n}") for n in range(103, 0, -1)
    ]
    return snapshot(
        status={
            "devices": [
                *(
                    device(
                        f"local/gpu{n}", 139 * GIB, 35 * GIB, leases=[x["id"] for x in leases if x["epoch"][1] % 8 == n]
                    )
                    for n in range(8)
                ),
                *MACHINE,
            ],
        },
        leases=leases,
        guests=[guest(2 * n + i, n, pid=5000 + 2 * n + i) for n in range(103, 0, -1) for i in range(2)],
        queue=[place(200 + n, n + 1, "a GPU with 8GiB is not free now", 12.0 * n) for n in range(40)],
        tenants=tuple(tenant(name, 100.0 * at, leases=9) for at, name in enumerate(names)),
        bill=tuple(bill(name, 1000.0 * at, 0.3 * at) for at, name in enumerate(names)),
    )


def trouble() -> OfficeSnapshot:
    """Everything that can be wrong with a device, a lease or a guest."""
    over = {"reason": "expired", "at": ASKED, "detail": ""}
    lost = {"reason": "device_lost", "at": ASKED, "detail": "Xid 79: it has fallen off the bus"}
    leases = [
        lease(5, "ana", status="granted", remaining=None, claim_within=20.0),
        lease(4, "bob", status="ending", remaining=None, end=over, tier="batch"),
    ]
    known = snapshot(
        status={
            "devices": [
                device("local/gpu0", 139 * GIB, 0, state="quarantined", detail="memory of pid 77 is still there"),
                device("local/gpu1", 139 * GIB, 0, state="lost", detail="it has fallen off the bus"),
                device("local/gpu2", 139 * GIB, 99 * GIB, detail="40GiB are held by pid 4242 (jupyter, user carl)"),
                device("local/gpu3", 139 * GIB, 131 * GIB, leases=[leases[1]["id"]]),
                device("far/gpu0", 16 * GIB, 0, state="draining", node="far", host=True),
                device("far/gpu1", 16 * GIB, 16 * GIB, node="far"),
            ],
            "nodes": [{"id": "local", "state": "up"}, {"id": "far", "state": "draining"}],
            "quarantined": 2,
        },
        leases=leases,
        fences=({"resource": "local/gpu3", "lease": "l-1"}, {"resource": "local/gpu0", "lease": None}),
        guests=(
            guest(1, 4, state="ending", reason="expired"),
            guest(2, 4, state="left behind", exit_code=0, processes=3, name="server"),
            guest(3, 1, state="ending", exit_code=137, reason="out_of_memory", peak_bytes=0),
        ),
        tenants=(tenant("ana", 0.0), tenant("bob", 3600.0)),
    )
    return known._replace(ended=(EndedLease(98.0, lease(2, "eve", status="ended", remaining=None, end=lost)),))


def own() -> OfficeSnapshot:
    """What a tenant sees that is no operator: others have most of it, and are nobody's business."""
    mine = lease(1, "ana", name="notebook")
    gpus = [device("local/gpu0", 139 * GIB, 100 * GIB, leases=[mine["id"]]), device("local/gpu1", 139 * GIB, 0)]
    return snapshot(
        status={"devices": [*gpus, *MACHINE], "live": 7, "queued": 2},
        leases=[mine],
        guests=None,
        queue=[place(8, 2, "one request is ahead of yours", None, tenant="ana")],
        tenants=None,
        bill=(bill("ana", 300.0, 0.25),),
    )


def hostile() -> OfficeSnapshot:
    """Names that move the cursor, ring the bell, run backwards, take two cells each, or stack accents."""
    evil = "\x1b[2J\x1b[31mroot\x07\r\n\x9b1m\u202etxt.exe\ud800"
    wide = "深層学習の実験をまとめて走らせる" * 3
    tall = "z\u0335\u0321\u0322\u0327\u0328\u0324a\u0301"
    leases = [
        lease(3, "ana", name=evil, holder=evil),
        lease(2, "ana", name=wide, holder=wide),
        lease(1, "ana", name=tall),
    ]
    gpu = device("local/gpu0", 139 * GIB, 123 * GIB, model=wide, detail=evil)
    guests = (
        guest(1, 3, argv=["sh", "-c", evil]),
        guest(2, 2, argv=[wide], name="深"),
        guest(3, 1, argv=[tall * 40]),
        guest(4, 1, argv=["🦊🦊 cafe\u0301 \u0301"], name=evil),
    )
    waits = place(8, 1, evil, None, tenant="ana")
    return snapshot(status={"devices": [gpu], "home": evil}, leases=leases, guests=guests, queue=[waits])


def lost() -> OfficeSnapshot:
    """The office has not answered for a while; what was known goes on counting down."""
    why = "the office at /run/sublet/office.sock did not answer in time"
    return three()._replace(lost_s=112.0, lost_why=why)


def news() -> OfficeSnapshot:
    """What was heard since the last reading: an end, a grant from the queue, and a new place in it."""
    known = three()
    end = {"reason": "released", "at": ASKED, "detail": ""}
    known = apply_news(
        known, "ended", {"lease": lease(2, status="ended", remaining=None, end=end, name="notebook")}, 104.0
    )
    known = apply_news(known, "active", {"lease": lease(9, "eve", remaining=300.0)}, 104.0)
    known = apply_news(known, "place", place(10, 1, "yours is next", 60.0, tenant="zoe"), 104.0)
    return apply_news(known, "weather", {"lease": None}, 104.0)


def _cores(count: int) -> Json:
    return {"resource": "local/cpu", "kind": "cpu", "amount": count, "model": "", "host": False}


SCENES: Final = {made.__name__: made for made in (nothing, three, crowd, trouble, own, hostile, lost, news)}

# ---- transcripts ----

_LOOK: Final = re.compile(r"> (\d+)x(\d+)(?: at=(\w+))?(?: scroll=(\d+))?(?: after=(\d+)s)?")


def looked_at(name: str, told: str) -> str:
    """The transcript with what is really shown at each look."""
    lines: list[str] = []
    for line in told.splitlines():
        if line.startswith("> "):
            lines += [line, *_shown(name, line), ""]
        elif line.startswith("#"):
            lines.append(line)
        elif line and not line.startswith("|"):
            raise ValueError(f"a line of a transcript is a look, a comment, or a line of a screen: {line!r}")
    return "\n".join(lines)


def _shown(name: str, look: str) -> list[str]:
    found = _LOOK.fullmatch(look)
    assert found is not None, look
    columns, rows = int(found[1]), int(found[2])
    made = screen(
        SCENES[name](), ScreenView(found[3] or "leases", int(found[4] or 0)), columns, rows, 100.0 + int(found[5] or 0)
    )
    return [f"|{text}{' ' * (columns - width_of(text))}|" for text in map(plain, made.lines)]
