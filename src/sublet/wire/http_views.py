"""The control API's read-only messages.

``http`` has all the others and re-exports these, so importers need not know on which side a message lies.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sublet.errors import InvalidRequest
from sublet.values import Epoch, shown


class Message(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What the office says."""


class PartView(Message, kw_only=True):
    resource: str
    kind: str
    amount: int
    model: str = ""
    host: bool = False
    exclusivity: str | None = None


class NoticeView(Message, kw_only=True):
    reason: str
    in_seconds: float
    at: str
    detail: str = ""


class EndView(Message, kw_only=True):
    reason: str
    at: str
    detail: str = ""
    way: str = ""
    """How its devices were taken back, where guests were on them: ``suspend`` or ``not saved``."""
    parked: str = ""
    """Where they live on, as an acquire names it in ``resume``; with that, ``resume_hint`` says what to do."""
    resume_hint: str = ""
    saved_at: str | None = None
    """When the last checkpoint was published under it; known once nothing is left of it."""
    saved_version: int | None = None
    """The number of that checkpoint in its volume."""
    saved_volume: str = ""
    """The name of the volume; empty: the checkpoint went with the lease, or there is none."""


class ParksView(Message, kw_only=True):
    """What makes a lease of memory a parking lease."""

    of: str
    """The lease whose guests it is for."""
    holds: bool
    """Whether they are there; before that it is set aside for them."""
    resumed_by: str | None


class DeviceView(Message, kw_only=True):
    id: str
    node: str
    kind: str
    model: str
    host: bool
    capacity: int
    free: int
    state: str
    detail: str
    leases: list[str]
    suspend: str = "none"
    """Whether guests can be taken off it alive, and where they can go on: ``none``, ``same_device``, ``same_type``."""


class NodeView(Message, kw_only=True):
    id: str
    domain: str
    labels: dict[str, str]
    state: str


class FenceView(Message, kw_only=True):
    """One quarantined slice or device."""

    resource: str
    lease: str | None
    epoch: Epoch | None
    amount: int
    detail: str
    hard: bool
    """True needs an operator's word (``--vouch``)."""


class Hello(Message, kw_only=True):
    wire: int
    wire_oldest: int
    version: str
    """Told to people whose client does not fit."""
    pid: int = 0
    """Always 0: clients of before want the field. Operators find the process in the status."""
    studios: bool = False
    """Whether studios have a right of their own here. Offices of before do not say it."""


class CheckpointKey(Message, kw_only=True):
    key: str
    """What the caller's tenant signs checkpoints with: the text of a ``SigningKey``."""

    def __repr__(self) -> str:
        return "CheckpointKey()"


class EstimatesView(Message, kw_only=True):
    """How well the estimates of requests that waited agreed with what came, of the last that were granted."""

    requests: int
    median_error: float
    """Seconds between the estimate, as it was when the request came, and the wait; of half of them it was no more."""
    p90_error: float
    early: float
    """The share of those that were granted before the estimate."""


class StatusView(Message, kw_only=True):
    """The office as the caller may know it. A caller who is no operator gets its own leases counted, 0 for ``pid``, and
    nothing in ``home`` and ``audit_head``."""

    pid: int
    version: str
    wire: int
    home: str
    incarnation: int
    started_at: str
    uptime: float
    embedded: bool
    """Started by itself; ends itself when idle."""
    nodes: list[NodeView]
    devices: list[DeviceView]
    live: int
    queued: int
    quarantined: int
    audit_head: str
    host_gpus: str = ""
    """The host devices that `sublet up` declared, such as ``2x4294967296B``; empty if it declared none."""
    shared: str = ""
    """The folder of the sockets for every user of the machine; empty if there are none."""
    supervisor_silent: float = 0.0
    """Seconds for which the supervisor has answered nothing; 0 while it turns. No deadline is enforced meanwhile."""
    disk_short: str = ""
    """Why no new lease is granted for want of disk space; empty if there is enough."""
    estimates: EstimatesView | None = None
    """None before a request that was given an estimate has been granted, and for those who are no operators."""
    tenant: str = ""
    """As which the caller asks. An older office does not say."""


class LimitView(Message, kw_only=True):
    """One limit that the operator can set."""

    key: str
    """``table.name``, as in ``policy.toml``."""
    value: int | None
    """In bytes, seconds or pieces; null: none was set, and ``shown`` says what holds."""
    shown: str
    source: str
    """``default``, the line of the file, or whose quota it is."""
    says: str


class LimitChange(Message, kw_only=True):
    """A limit that was changed while the office runs."""

    key: str
    before: str
    """As a person writes it."""
    now: str


class TroubleView(Message, kw_only=True):
    """The failures of one background loop since its process was started."""

    part: str
    """``office`` or ``supervisor``: the process."""
    loop: str
    shortages: int
    """Times it waited for descriptors, memory or processes."""
    errors: int
    """Times it failed otherwise; the log of the process has the details."""
    failing: int
    """How many loops of this name do not work now."""
    last: str
    """The last error."""


class GuestEntry(Message, kw_only=True):
    """A command that runs under a lease, or ran under one that is remembered."""

    id: str
    lease: str
    epoch: Epoch
    tenant: str
    name: str
    argv: list[str]
    """Of a very long command line only the beginning, and an ellipsis."""
    profile: str
    state: str
    pid: int
    processes: int
    started_at: str | None
    ended_at: str | None
    exit_code: int | None
    """Of its main process: 128+n for signal n; null while it runs."""
    reason: str | None
    """Why it was ended, if it did not end by itself."""
    cpu: float
    """Seconds of CPU time."""
    peak_bytes: int
    log_bytes: int
    log_dropped: int
    number: int
    """In this order they are listed; ``after`` asks for those that follow."""


BILL_GROUPINGS: Final = ("lease", "tenant", "group", "device", "session")
BILL_PERIODS: Final = ("day", "month")
BILL_COLUMNS: Final = (
    *("key", "tenant", "leases", "held_seconds", "busy_seconds", "gpu_seconds", "core_seconds"),
    *("memory_byte_seconds", "block_byte_seconds", "vram_byte_seconds", "launches", "launch_errors", "bytes_moved"),
    *("uncounted", "cost", "currency", "end", "live", "way", "bytes_saved", "saves", "fuel"),
    *("period", "waited_seconds", "ended", "priority_cost", "vram_leased_byte_seconds", "ended_at"),
)
"""Of a bill as CSV: the fields of a line, in an order that never changes. New ones come last."""
SESSION_LABEL: Final = "sublet-session"
"""The label of the leases of a session; its value is the session's id."""


def check_grouping(by: str, per: str | None = None) -> None:
    """Raises ``InvalidRequest`` for what a bill cannot be grouped by."""
    if by not in BILL_GROUPINGS and not (by.startswith("label:") and len(by) > len("label:")):
        known = ", ".join(BILL_GROUPINGS)
        raise InvalidRequest(f"a bill by {shown(by)} cannot be made", do=f"Ask by {known} or label:KEY.")
    if per is not None and per not in BILL_PERIODS:
        raise InvalidRequest(f"a bill per {shown(per)} cannot be made", do="Ask per day or per month.")


class BillLine(Message, kw_only=True):
    """One row of a bill: a lease, or a sum over leases."""

    key: str
    """Lease id (of what is kept without one: ``volume/TENANT/NAME``), tenant, group, device or label value."""
    tenant: str | None
    leases: int
    held_seconds: float
    """Of a session: for how long it had its GPUs."""
    busy_seconds: float
    """Of leases with GPUs or cores; what has only disk or memory does no work."""
    gpu_seconds: float
    core_seconds: float
    memory_byte_seconds: float
    block_byte_seconds: float
    cost: float
    currency: str = ""
    """In which the office reckons; the same in every line. An older office does not say."""
    vram_byte_seconds: int = 0
    """Allocated through Sublet; what was leased is in ``vram_leased_byte_seconds``."""
    launches: int | None = 0
    """By sessions; null where none was counted, and a framework or a command may have launched some."""
    launch_errors: int = 0
    """Operations that failed, launches among them."""
    bytes_moved: int = 0
    """Between programs and devices."""
    uncounted: int = 0
    """Leases of devices on which something ran that is not counted: the four fields above leave that out."""
    end: str | None = None
    live: bool = False
    way: str = ""
    """How its devices were taken back, where guests were on them: ``suspend`` or ``not saved``."""
    bytes_saved: int = 0
    """Written by checkpoints that were published."""
    saves: int = 0
    fuel: int = 0
    """That WASM tasklets used."""
    period: str = ""
    """The day or month in UTC, where it was asked for."""
    waited_seconds: float = 0.0
    """In the queue, before what was granted in this window."""
    ended: dict[str, int] = {}
    """Leases that ended in this window, by reason."""
    priority_cost: float = 0.0
    """The part of the cost that was paid for priority."""
    vram_leased_byte_seconds: float = 0.0
    """GPU memory that was leased, in bytes, times how long."""
    ended_at: str | None = None
    """When, where the line is of one lease that has ended: the bill knows that for as long as there is a bill."""


class ConnectedView(Message, kw_only=True):
    """One process of another user that is connected over the shared socket."""

    uid: int | None
    """None: the kernel did not say."""
    pid: int | None
    """None: it cannot be seen from here, as one of a container."""
    tenants: list[str]
    """Whose requests came; empty until one was accepted."""
    connections: int
    since: str
    """When the oldest of them was opened."""


class NeighbourView(Message, kw_only=True):
    """A tenant that disturbs others, and the rule that says so."""

    tenant: str
    group: str
    rule: str
    says: str
    """What it did, with the numbers that the rule is about."""
    figures: dict[str, float]


class NoisyView(Message, kw_only=True):
    """The noisy neighbours of a window."""

    rules: dict[str, str]
    """By name, what a tenant did that is named."""
    neighbours: list[NeighbourView]


class VolumeView(Message, kw_only=True):
    """The storage that a tenant finds again by name."""

    name: str
    tenant: str
    state: str
    """``live``, ``retained``, ``removing``, ``lost``, or (in the answer to its removal) ``removed``."""
    size: int
    node: str
    resource: str
    lease: str | None
    """The lease that has it now."""
    last_lease: str
    epoch: Epoch
    """Under which it is held, or was held last."""
    made_at: str
    kept_at: str | None
    """Since when no lease has it."""
    keep_until: str | None
    """When it is removed, unless a lease takes it before."""
    remaining: float | None
    """Seconds until then."""
    retain: float
    """Seconds for which it is kept after each lease."""
    detail: str


class AuditReport(Message, kw_only=True):
    ok: bool
    records: int
    head: str
    problem: str | None = None


class AuditEntry(Message, kw_only=True):
    """One record of the audit chain."""

    seq: int
    at: str
    kind: str
    """What happened: the type of the event."""
    by: str
    """Whose doing it was: ``tenant:ID``, ``operator:ID``, or ``office`` for what time, an agent or the scheduler did.
    Empty where the record is older than this field."""
    event: dict[str, Any]
    """The event as it is hashed; what has its usual value is left out."""


class DownAnswer(Message, kw_only=True):
    leases: int
    """How many lived when it was asked."""


class BackupAnswer(Message, kw_only=True):
    path: str
    bytes: int
