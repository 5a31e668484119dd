"""The messages and the route table of the control API, from which the OpenAPI document is generated.

Sizes are integer bytes, durations are seconds, times are RFC 3339 in UTC. Instants that a program must compare
(``deadline``) are seconds of CLOCK_BOOTTIME and mean something only on the office's machine; the answer to a renewal
therefore carries ``ttl`` as well, and a holder counts from when it *sent* the request.

This, ``http_views`` (what is only ever shown) and ``decoders`` are the parts of ``wire`` that use msgspec.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from sublet.errors import RenewalRefusal
from sublet.values import Epoch
from sublet.wire.http_views import (
    AuditEntry,
    AuditReport,
    BackupAnswer,
    BillLine,
    CheckpointKey,
    ConnectedView,
    DeviceView,
    DownAnswer,
    EndView,
    EstimatesView,
    FenceView,
    GuestEntry,
    Hello,
    LimitChange,
    LimitView,
    Message,
    NeighbourView,
    NodeView,
    NoisyView,
    NoticeView,
    ParksView,
    PartView,
    StatusView,
    TroubleView,
    VolumeView,
)
from sublet.wire.version import WIRE_HEADER, WIRE_OLDEST, WIRE_VERSION

__all__ = [
    "WIRE_HEADER",
    "WIRE_OLDEST",
    "WIRE_VERSION",
    "AcquireRequest",
    "AcquisitionRequest",
    "ActivityRequest",
    "AheadView",
    "AttachRequest",
    "AuditEntry",
    "AuditReport",
    "BackupAnswer",
    "BackupRequest",
    "BillLine",
    "BudgetRequest",
    "BudgetView",
    "CheckpointKey",
    "ClaimRequest",
    "ClearFenceRequest",
    "ConnectedView",
    "DeviceView",
    "DownAnswer",
    "DownRequest",
    "DrainRequest",
    "EndView",
    "EndsAnswer",
    "EndsRequest",
    "ErrorBody",
    "ErrorView",
    "EstimatesView",
    "ExplainAnswer",
    "FailedGrant",
    "FenceView",
    "GrantAnswer",
    "GrantsAnswer",
    "GroupRequest",
    "GroupView",
    "GuestEntry",
    "Hello",
    "LeaseView",
    "LimitChange",
    "LimitView",
    "NeighbourView",
    "News",
    "NodeView",
    "NoisyView",
    "NoticeView",
    "OfferAnswer",
    "ParksView",
    "PartView",
    "PlaceAnswer",
    "PolicyRequest",
    "QuotaView",
    "ReasonView",
    "RefusalAnswer",
    "ReleaseItem",
    "ReleaseRequest",
    "ReleasesAnswer",
    "ReleasesRequest",
    "RenewAnswer",
    "RenewItem",
    "RenewRequest",
    "RenewalsAnswer",
    "RenewalsRequest",
    "ReservationRequest",
    "ReservationView",
    "RevokeRequest",
    "ShareView",
    "StatusView",
    "TenantDisableRequest",
    "TenantRequest",
    "TenantToken",
    "TenantView",
    "TokenView",
    "TroubleView",
    "UnbindRequest",
    "VolumeView",
    "WantBody",
    "WantView",
]


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


# ---- requests ----


class WantBody(_Request, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was not said is not sent, so an office of the version before takes it."""

    kind: str
    """gpu, cpu, memory or block."""
    amount: int
    """Bytes, or cores. 0 of block, with a name: what the volume of that name has."""
    count: int = 1
    exclusivity: str | None = None
    model: str | None = None
    least: int | None = None
    """The smallest amount that would do (an offer may be made)."""
    or_model: str | None = None
    """Models that would do where none of ``model`` is free (an offer may be made); ``*`` is any."""


class AcquireRequest(_Request, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was not said is not sent, so an office of the version before takes it."""

    request_id: str
    """Chosen by the client; sending the same request again has one effect."""
    wants: list[WantBody]
    ttl: float | None = None
    """Seconds (default: that of the kind)."""
    tier: str | None = None
    spot: bool = False
    pay_priority: bool = False
    """Go before the requests of its tier that do not pay, for the rate ``priority`` of the office's prices."""
    wait: float | None = None
    """Seconds in the queue at most; 0 tries once; null waits without bound."""
    expect: float | None = None
    """Seconds it will probably be used, which the quota of GPU-seconds must have room for; charged is what was held."""
    selector: dict[str, str] = {}
    renew: str = "while-busy"
    name: str | None = None
    labels: dict[str, str] = {}
    holder: str = ""
    token: bool = False
    """Whether a capability token should come with the grant."""
    resume: str | None = None
    """Go on with what is parked there: the id of a parking lease, or ``ID@EPOCH``. ``wants`` is empty then."""
    replaces: str | None = None
    """The caller's live lease, ``ID`` or ``ID@EPOCH``, that this one takes the place of. What that one has counts as
    free for this request, and no other request gets it in between. It ends when this one is claimed, or before, when a
    part of it was set aside for this one; while this one waits, and if it is refused, it stays."""
    retain: float | None = None
    """Seconds for which its volume (that of a block with a name) is kept after it; 0 keeps nothing."""
    holder_pid: int | None = None
    """The caller's own pid. With it the lease is bound to that process, and ends when the process ends. It must be the
    process that made this connection, over a unix socket on the office's machine; else the lease is bound to nothing
    (``bound_to`` in the answer says which) and ends by its time to live."""


class AcquisitionRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """Many leases that are alike; known as a whole by the request id."""

    request: AcquireRequest
    """What each of them is to be."""
    count: int
    at_least: int = 1
    """With fewer than this nothing is granted. Above 1 nothing waits in the queue either, and ``wait`` must be 0."""


class ClaimRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    epoch: Epoch | None = None
    token: bool = False
    holder_pid: int | None = None
    """As in ``AcquireRequest``. It replaces what was said there: without it the lease is bound to nothing."""


class RenewRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    epoch: Epoch
    active: bool = True
    busy: float = 0.0
    """Seconds of work since the last word."""
    ttl: float | None = None
    token: bool = False
    lead: float = 0.0
    """Seconds before the deadline at which saving must begin, as this holder reckons; guests are told that early. A
    ``ttl`` that comes with it and is more than there may be is cut down to that."""


class RenewItem(_Request, kw_only=True, forbid_unknown_fields=True):
    lease: str
    epoch: Epoch
    active: bool = True
    busy: float = 0.0
    lead: float = 0.0
    """As in ``RenewRequest``."""


class RenewalsRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """Many renewals in one message; each is answered on its own."""

    items: list[RenewItem]


class ActivityRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    epoch: Epoch
    active: bool
    busy: float = 0.0


class ReleaseRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    request_id: str = ""
    busy: float = 0.0


class ReleaseItem(_Request, kw_only=True, forbid_unknown_fields=True):
    lease: str
    epoch: Epoch | None = None
    """The epoch that is meant; under another one the lease stays as it is. Null: whichever it has."""
    busy: float = 0.0


class ReleasesRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """Many releases in one message; each is answered on its own."""

    items: list[ReleaseItem]


class EndsRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """Which leases are to have ended: those of the caller's tenant with all of these labels."""

    labels: dict[str, str]
    wait: float = 0.0
    """Seconds to wait for the last end, at most 60."""
    all: bool = False
    """Of all tenants (operators)."""


class RevokeRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    request_id: str = ""
    notice: float = 0.0
    """Seconds until it is taken; 0 takes it at once."""
    detail: str = ""


class AttachRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    request_id: str
    holder: str = ""
    token: bool = False
    holder_pid: int | None = None
    """As in ``AcquireRequest``. It replaces the process that the lease was bound to: without it, by nothing."""


class UnbindRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    epoch: Epoch


class QuotaView(_Request, kw_only=True, forbid_unknown_fields=True):
    gpus: int | None = None
    vram_bytes: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    block_bytes: int | None = None
    leases: int | None = None
    gpu_seconds: int | None = None
    queue: int | None = None
    """Requests that wait at once."""
    requests_per_minute: int | None = None
    """Sent to the office."""
    burst_seconds: int | None = None
    """Device time beyond ``gpu_seconds``, as a credit that is used up."""
    burst_refill_seconds: int | None = None
    """What of that credit comes back in an hour."""


class TenantRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """POST makes a tenant, PATCH changes what is given."""

    id: str | None = None
    quota: QuotaView | None = None
    tier_max: str | None = None
    operator: bool | None = None
    new_token: bool = False
    uid: int | None = None
    """The user of the machine who alone may be this tenant over the office's sockets."""
    no_uid: bool = False
    """Any user may be it from now on, by its token."""
    needs_token: bool | None = None
    """False: that user needs no token on the shared socket."""
    group: str | None = None
    weight: int | None = None
    """Of its share within the group."""
    studio: bool | None = None
    """It is a studio, which acts for the others and has nothing of its own. Said when it is made."""


class GroupRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """POST makes a group, PATCH changes what is given."""

    id: str | None = None
    weight: int | None = None
    floor: int | None = None
    """GPUs that it can always have."""
    ceiling: int | None = None
    """GPUs that it never has more of at once."""
    no_ceiling: bool = False
    quota: QuotaView | None = None


class ReservationRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """GPUs for a group at stated times."""

    id: str
    group: str
    gpus: int
    when: str
    """``every Tue 10:00-12:00``, ``every weekday 9:00-10:30 until 2027-02-12`` or ``2026-12-01 09:00-17:00``."""
    zone: str
    """The time zone in which that is meant, as in ``Europe/Berlin``."""
    model: str | None = None
    """Only devices of this model."""


class BudgetRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """The budget of a tenant or of a group for one window: to set it, to add to it, to remove it."""

    tenant: str | None = None
    group: str | None = None
    """Either of the two."""
    per: str = "month"
    """day, month (of UTC) or total."""
    amount: str = ""
    """In the currency of the prices, such as ``12.50``; to remove one, nothing."""
    currency: str | None = None
    """That is meant; another than that of the prices is refused."""
    request_id: str | None = None
    """Of a credit: one that is sent again with the same id counts once. null: each counts."""


class PolicyRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """A file of the operator's, to be checked."""

    text: str
    """Of ``policy.toml``."""


class TenantDisableRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    """Its token stops; its leases end."""

    notice: bool = True
    """With the notice of their tier; false ends them at once."""


class DrainRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    draining: bool = True
    notice: float | None = None


class ClearFenceRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    lease: str | None = None
    vouch: bool = False


class DownRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    how: Literal["idle", "drain", "keep", "now"] = "idle"
    """``idle`` is refused while leases live."""


class BackupRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    path: str
    """A file on the office's machine, which must not exist yet."""


# ---- answers ----


class WantView(Message, kw_only=True):
    """As ``WantBody``."""

    kind: str
    amount: int
    count: int = 1
    exclusivity: str | None = None
    model: str | None = None
    least: int | None = None


class LeaseView(Message, kw_only=True):
    id: str
    tenant: str
    status: str
    name: str | None
    labels: dict[str, str]
    tier: str
    renew: str
    ttl: float
    wants: list[WantView]
    epoch: Epoch | None
    node: str | None
    parts: list[PartView]
    asked_at: str
    granted_at: str | None
    expires_at: str | None
    """For people; it moves if the wall clock does."""
    deadline: float | None
    """Seconds of CLOCK_BOOTTIME on the office's machine."""
    remaining: float | None
    claim_within: float | None
    """Seconds in which a grant from the queue, or an offer, must be claimed."""
    idle: bool
    busy: float
    renewals: int
    notice: NoticeView | None
    end: EndView | None
    holder: str = ""
    """The program that asked, or attached, as it called itself."""
    bound_to: int | None = None
    """The pid of the process that it ends with, on the office's machine; null: it ends by its time to live."""
    peer: str = ""
    """Which user and process of the office's machine asked for it, or attached, as the kernel says it: ``uid 1001, pid
    4242``. Empty for the owner's own."""
    parks: ParksView | None = None
    """It is a parking lease."""
    resume: str | None = None
    """It goes on with what was parked there."""
    pays_priority: bool = False


class GrantAnswer(Message, kw_only=True, tag="grant", tag_field="answer"):
    lease: LeaseView
    token: str | None = None


class PlaceAnswer(Message, kw_only=True, tag="place", tag_field="answer"):
    lease: LeaseView
    position: int
    reason: str
    estimate: float | None


class AheadView(Message, kw_only=True):
    because: str
    """What decides: tier, priority, group, tenant, held or arrival."""
    requests: int
    leases: list[str]
    """The first of them, as far as the caller may know them."""
    tenants: list[str]
    """Whose they are, for operators."""


class ReasonView(Message, kw_only=True):
    kind: str
    text: str
    in_seconds: float | None
    """When it is over, or of a lease that is held, when it begins; left out where time alone does not decide."""
    leases: list[str]


class ShareView(Message, kw_only=True):
    group: str
    group_weight: int
    group_share: float
    """Of everything, as ``GroupView.share``."""
    weight: int
    share: float


class ExplainAnswer(Message, kw_only=True):
    lease: str
    tenant: str
    status: str
    tier: str
    summary: str
    position: int | None
    estimate: float | None
    ahead: list[AheadView]
    reasons: list[ReasonView]
    share: ShareView
    advice: list[str]


class OfferAnswer(Message, kw_only=True, tag="offer", tag_field="answer"):
    lease: LeaseView
    kind: str
    asked: int
    offered: int
    valid: float
    """Seconds."""
    model: str | None = None
    """Of the device that is offered, where it is another than was asked for."""
    estimate: float | None = None
    """Seconds until what was asked for may be granted; null where that cannot be told."""
    price: str | None = None
    """Of what is offered, for an hour, as a decimal number; null where the model is the one that was asked for."""
    asked_price: str | None = None
    """Of what was asked for."""
    currency: str | None = None


class RefusalAnswer(Message, kw_only=True, tag="refusal", tag_field="answer"):
    code: str
    reason: str
    do: str
    would_fit: int | None
    estimate: float | None


class RenewAnswer(Message, kw_only=True):
    lease: str
    epoch: Epoch
    deadline: float
    ttl: float
    """What was granted, counted from when the office got the request; less than the TTL under notice."""
    number: int
    token: str | None = None
    save: float = 0.0
    """Seconds that the last save under it took; 0 if there was none."""


_REASON: Final = (
    "Why, as a word that stays. Of a refused renewal: "
    + ", ".join(RenewalRefusal)
    + " (newer offices may know more). Null where the kind says it all."
)


class ErrorView(Message, kw_only=True):
    kind: str
    """The class of the error tree."""
    message: str
    do: str
    transient: bool
    end: EndView | None = None
    reason: Annotated[str | None, msgspec.Meta(description=_REASON)] = None


class ErrorBody(Message, kw_only=True):
    error: ErrorView


class FailedGrant(Message, kw_only=True):
    """A lease that was granted, and whose machine did not confirm it."""

    lease: str
    error: ErrorView


class GrantsAnswer(Message, kw_only=True, tag="grants", tag_field="answer"):
    """The leases of one request that are held; fewer than were asked for where no more fit."""

    leases: list[LeaseView]
    failed: list[FailedGrant]
    """Those that are not, or may not be: to be given back."""


class ReleasesAnswer(Message, kw_only=True):
    """In the order of the request; each is a lease or an error."""

    items: list[LeaseView | None]
    errors: list[ErrorView | None]


class EndsAnswer(Message, kw_only=True):
    left: int
    """Leases that have not ended; 0 as soon as none is left. One that is ending counts."""


class RenewalsAnswer(Message, kw_only=True):
    """In the order of the request; each is an answer or an error."""

    items: list[RenewAnswer | None]
    errors: list[ErrorView | None]


class TenantView(Message, kw_only=True):
    id: str
    tier_max: str
    operator: bool
    quota: QuotaView
    gpu_seconds_used: float
    """Within the rolling window."""
    leases: int
    queued: int
    burst_seconds_left: int | None = None
    """Of its burst credit; null where it has none."""
    disabled: bool = False
    """It has no rights and gets no leases."""
    uid: int | None = None
    """The user of the machine who alone may be this tenant; null: every user who shows its token."""
    needs_token: bool = True
    """Whether that user needs the token as well."""
    group: str = "default"
    weight: int = 1
    share: float = 0.0
    """Of what it used most of (GPUs, cores or memory), what part of all there is that was, 1 being all of it always;
    what was used counts less the longer ago it was."""
    studio: bool = False
    """It is a studio, which acts for others."""


class GroupView(Message, kw_only=True):
    id: str
    weight: int
    floor: int
    ceiling: int | None
    quota: QuotaView
    tenants: list[str]
    gpus: float
    """Held now; a part of a card is a part of one."""
    share: float
    """As of a tenant."""
    share_of: str
    """Of what: gpu, cpu or memory."""
    queued: int


class SpanView(Message, kw_only=True):
    begins_at: str
    ends_at: str


class ReservationView(Message, kw_only=True):
    id: str
    group: str
    gpus: int
    model: str | None
    when: str
    zone: str
    times: list[SpanView]
    """The next ones."""
    state: str
    """planned, clearing (devices are chosen, others leave them), kept, lent (unused ones are lent as spot) or over."""
    devices: list[str]
    """Kept for the group now."""
    ready: int
    """Of them, those on which there is nothing of another group."""


class BudgetView(Message, kw_only=True):
    """Amounts are exact decimal numbers, as text."""

    id: str
    tenant: str | None
    group: str | None
    per: str
    amount: str
    """In each window."""
    credit: str
    """Added to the present window."""
    used: str
    """Of both; what ``sublet bill`` has for the same time, rounded to a millionth."""
    currency: str
    window: str
    """The present one: 2026-11-21, 2026-11 or total."""
    since: str
    """From when on it is counted."""
    resets_at: str | None
    level: str
    """open, warned (80 % are used) or used_up."""
    lasts_until: str | None
    """When 80 % or all of it will be used, if what is held now is held on; null: not in this window."""


class TenantToken(Message, kw_only=True):
    tenant: TenantView
    token: str | None
    """Shown this once; the office keeps only its hash."""


class TokenView(Message, kw_only=True):
    token: str
    expires_at: str


class News(Message, kw_only=True):
    """One server-sent event: ``event:`` is ``what``, ``data:`` is this."""

    what: str
    """place, ready, offer, active, renewed, notice, spared, attached, ending, ended, node, fence, budget."""
    lease: LeaseView | None = None
    position: int | None = None
    reason: str = ""
    estimate: float | None = None
