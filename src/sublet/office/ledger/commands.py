"""The ledger's commands. A command is checked as a whole before anything changes."""

from __future__ import annotations

from typing import Final

import msgspec

from sublet.lease_end import EndReason
from sublet.office.ledger.records import (
    DeclaredRecord,
    GroupRecord,
    PricesRecord,
    ProcessRecord,
    Quota,
    ReservationRecord,
    Span,
    Want,
)
from sublet.values import (
    BudgetWindow,
    Epoch,
    GroupId,
    LeaseId,
    NodeId,
    RenewMode,
    RequestId,
    ReservationId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.orders import Inventory, Report

OFFICE: Final = "office"
"""The actor where no caller asked: time, an agent, the scheduler."""


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    @property
    def actor(self) -> str:
        """Whose doing is what comes of it, as the audit records say it."""
        return OFFICE


class _Tenants(_Command, frozen=True, kw_only=True):
    """Asked by a tenant about what is its own."""

    tenant: TenantId
    operator: bool = False
    """Whether the caller has an operator's rights; it decides nothing here and is only recorded."""
    peer: str = ""
    """Which user and process of the machine it was, as the kernel says, where it was not the owner's own."""

    @property
    def actor(self) -> str:
        return _actor("operator" if self.operator else "tenant", self.tenant, self.peer)


class _Operators(_Command, frozen=True, kw_only=True):
    """Asked by an operator, about what is any tenant's."""

    by: TenantId | None = None
    """None: the office itself, on its way out."""
    peer: str = ""
    """As for tenants."""

    @property
    def actor(self) -> str:
        return OFFICE if self.by is None else _actor("operator", self.by, self.peer)


def _actor(kind: str, tenant: TenantId, peer: str) -> str:
    return f"{kind}:{tenant} ({peer})" if peer else f"{kind}:{tenant}"


class OpenOffice(_Command, frozen=True, kw_only=True):
    """The first command after the journal was read: says which clock instants belong to from here on."""

    incarnation: int
    clock_domain: str
    last_ns: int | None = None
    """The last instant the journal knows of the old clock; only used if the clock domain changed."""
    slack_ns: int = 0
    """How long the old clock may have run on after that instant."""
    restored: bool = False
    """The journal came out of a backup: no lease in it may go on."""


class Acquire(_Tenants, frozen=True, kw_only=True):
    lease: LeaseId
    """A fresh id, made by the driver; an accepted request is known by it."""
    request_id: RequestId
    wants: tuple[Want, ...]
    ttl_ns: int
    tier: Tier = Tier.INTERACTIVE
    wait_ns: int | None = None
    """0 tries once, None waits without bound."""
    expect_ns: int | None = None
    """How long it will probably be used: what the tenant's device time must still have room for. None: any."""
    selector: dict[str, str] = {}
    renew: RenewMode = RenewMode.WHILE_BUSY
    name: str | None = None
    labels: dict[str, str] = {}
    holder: str = ""
    resume: LeaseId | None = None
    """Go on with what is parked under this lease. It says what is needed, so ``wants`` is left empty."""
    resume_epoch: Epoch | None = None
    """The epoch that is meant; an older one is refused. None: whichever it has."""
    replaces: LeaseId | None = None
    """The lease of the same tenant that it takes the place of."""
    replaces_epoch: Epoch | None = None
    """The epoch of that one which is meant; an older one is refused. None: whichever it has."""
    retain_ns: int | None = None
    """How long its volume is kept after the lease. None: as before, or as the policy has it."""
    pays_priority: bool = False
    """It pays the rate for priority."""
    process: ProcessRecord | None = None
    """The process whose end is the end of the lease; None: no process."""


class AcquireMany(_Tenants, frozen=True, kw_only=True):
    """Many leases that are alike, in one request: as many as fit now, and no fewer than ``at_least``."""

    each: Acquire
    """What each of them is to be. Its lease and its request id are those of the first."""
    leases: tuple[LeaseId, ...]
    """Fresh ids, as many as are asked for."""
    at_least: int = 1


class Claim(_Tenants, frozen=True, kw_only=True):
    """Take a grant that came out of the queue, or an offer."""

    lease: LeaseId
    epoch: Epoch | None = None
    """The grant that is meant; an older one is refused."""
    process: ProcessRecord | None = None
    """As in ``Acquire``; it replaces what was said there."""


class Decline(_Tenants, frozen=True, kw_only=True):
    """Say no to an offer: back into the line, if the request may still wait."""

    lease: LeaseId


class Renew(_Tenants, frozen=True, kw_only=True):
    lease: LeaseId
    epoch: Epoch
    active: bool = True
    """Whether work runs under it now."""
    busy_ns: int = 0
    """Busy time since the last word."""
    ttl_ns: int | None = None
    lead_ns: int = 0
    """How long before the deadline its saving must begin, as the holder reckons."""


class NoteActivity(_Tenants, frozen=True, kw_only=True):
    """The holder says that its lease became busy or idle, without renewing."""

    lease: LeaseId
    epoch: Epoch
    active: bool
    busy_ns: int = 0


class Attach(_Tenants, frozen=True, kw_only=True):
    lease: LeaseId
    request_id: RequestId
    holder: str = ""
    process: ProcessRecord | None = None
    """As in ``Acquire``; it replaces the process that had the lease before."""


class Unbind(_Tenants, frozen=True, kw_only=True):
    """The lease no longer ends with its holder's process."""

    lease: LeaseId
    epoch: Epoch


class Release(_Tenants, frozen=True, kw_only=True):
    """Give it back, or leave the queue."""

    lease: LeaseId
    epoch: Epoch | None = None
    """The epoch that is meant; under another one it stays as it is. None: whichever it has."""
    busy_ns: int = 0
    gone: bool = False
    """The driver says that the holder left the line without a word. Once it was granted, this changes nothing."""

    @property
    def actor(self) -> str:
        return OFFICE if self.gone else super().actor


class RemoveVolume(_Tenants, frozen=True, kw_only=True):
    """Give up what is kept under this name."""

    name: str
    owner: TenantId | None = None
    """Whose it is, where an operator asks; else the asker's own."""


class Revoke(_Operators, frozen=True, kw_only=True):
    """Operator: take it, at once or with notice."""

    lease: LeaseId
    reason: EndReason = EndReason.OPERATOR
    notice_ns: int = 0
    detail: str = ""


class AddTenant(_Operators, frozen=True, kw_only=True):
    tenant: TenantId
    token_hash: str
    quota: Quota = Quota()
    tier_max: Tier = Tier.INTERACTIVE
    operator: bool = False
    uid: int | None = None
    needs_token: bool = True
    group: GroupId | None = None
    """None: the default group."""
    weight: int = 1
    studio: bool = False


class SetTenant(_Operators, frozen=True, kw_only=True):
    """Change what is given; None leaves a field as it is."""

    tenant: TenantId
    quota: Quota | None = None
    tier_max: Tier | None = None
    operator: bool | None = None
    token_hash: str | None = None
    uid: int | None = None
    no_uid: bool = False
    """It is bound to no user any more, and so needs its token."""
    needs_token: bool | None = None
    group: GroupId | None = None
    weight: int | None = None


class DisableTenant(_Operators, frozen=True, kw_only=True):
    """Take away its rights and, with notice, its leases."""

    tenant: TenantId
    notice: bool = True
    """The notice of each lease's tier; False takes them at once."""


class EnableTenant(_Operators, frozen=True, kw_only=True):
    """Give its rights back, under a new access token."""

    tenant: TenantId
    token_hash: str


class RemoveTenant(_Operators, frozen=True, kw_only=True):
    """Forget a tenant that has nothing any more. What it used stays in the bill."""

    tenant: TenantId


class SetGroup(_Operators, frozen=True, kw_only=True):
    """Make a group, or change one as a whole."""

    group: GroupRecord
    is_new: bool | None = None
    """True: there must be none of the name yet; False: there must be one. The default group is always there."""


class RemoveGroup(_Operators, frozen=True, kw_only=True):
    """Forget a group in which no tenant is."""

    group: GroupId


class SetReservation(_Operators, frozen=True, kw_only=True):
    """Make a reservation; or (``is_new=False``) replace the instants of one, worked out anew from its rule."""

    reservation: ReservationRecord
    is_new: bool = True


class RemoveReservation(_Operators, frozen=True, kw_only=True):
    """Forget a reservation. Devices that are kept for it are open to every group again."""

    reservation: ReservationId


class SetPrices(_Operators, frozen=True, kw_only=True):
    """The office opens with these prices."""

    prices: PricesRecord
    missing: tuple[str, ...] = ()
    """Those that ``rates.toml`` does not give."""


class _Budgets(_Operators, frozen=True, kw_only=True):
    """About the budget of a tenant or of a group, for one window."""

    tenant: TenantId | None = None
    group: GroupId | None = None
    per: BudgetWindow


class SetBudget(_Budgets, frozen=True, kw_only=True):
    """Make a budget, or change its amount. What was used of it stays used."""

    amount: int
    """Millionths of a unit of money."""
    currency: str | None = None
    """That is meant; another than that of the prices is refused. None: whichever it is."""
    missing: tuple[str, ...] = ()
    """Prices that ``rates.toml`` does not give."""


class CreditBudget(_Budgets, frozen=True, kw_only=True):
    """Add to what may be spent in the present window."""

    amount: int
    request_id: RequestId = RequestId("")
    """A credit that is sent again with it counts once. Empty: each counts."""


class RemoveBudget(_Budgets, frozen=True, kw_only=True):
    """Nothing is counted for it any more."""


class ClearFence(_Operators, frozen=True, kw_only=True):
    """Ask for a new verification, or (``vouch``) take the operator's word for it."""

    resource: ResourceId
    lease: LeaseId | None = None
    vouch: bool = False


class Drain(_Operators, frozen=True, kw_only=True):
    node: NodeId
    draining: bool = True
    notice_ns: int | None = None
    """None gives each lease the notice of its tier."""


class ApplyPolicy(_Operators, frozen=True, kw_only=True):
    """The operator's file was read again and is about to hold, as a whole or not at all."""

    changed: dict[str, str]
    """Limits, which are not in the books."""
    declared: DeclaredRecord | None = None
    """Its groups, reservations and budgets. None: they stay as they are."""
    spans: dict[ReservationId, tuple[Span, ...]] = {}
    """The instants of its reservations."""
    missing: tuple[str, ...] = ()
    """Prices that ``rates.toml`` does not give."""


class NodeUp(_Command, frozen=True, kw_only=True):
    """An agent reported in, for the first time or again."""

    inventory: Inventory


class NodeGone(_Command, frozen=True, kw_only=True):
    node: NodeId
    detail: str = ""


class HolderGone(_Command, frozen=True, kw_only=True):
    """A holder's process has ended, and these leases were bound to it."""

    process: ProcessRecord
    leases: tuple[LeaseId, ...]


class HolderUnseen(_Command, frozen=True, kw_only=True):
    """The office can no longer see whether this process lives, so these leases end by their time to live."""

    process: ProcessRecord
    leases: tuple[LeaseId, ...]


class AgentReport(_Command, frozen=True, kw_only=True):
    report: Report


class Tick(_Command, frozen=True, kw_only=True):
    """Time has passed."""


Command = (
    OpenOffice
    | Acquire
    | AcquireMany
    | Claim
    | Decline
    | Renew
    | NoteActivity
    | Attach
    | Unbind
    | Release
    | RemoveVolume
    | Revoke
    | AddTenant
    | SetTenant
    | DisableTenant
    | EnableTenant
    | RemoveTenant
    | SetGroup
    | RemoveGroup
    | SetReservation
    | RemoveReservation
    | SetPrices
    | SetBudget
    | CreditBudget
    | RemoveBudget
    | ClearFence
    | Drain
    | ApplyPolicy
    | NodeUp
    | NodeGone
    | HolderGone
    | HolderUnseen
    | AgentReport
    | Tick
)
