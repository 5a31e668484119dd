"""Turns messages into commands: checks every text, number and choice before the ledger sees it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, TypeVar

from sublet.errors import InvalidRequest
from sublet.office.access import Caller
from sublet.office.ledger.commands import Acquire, AcquireMany
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import ProcessRecord, Quota, Want
from sublet.values import (
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    RenewMode,
    RequestId,
    Tier,
    parse_duration_ns,
    parse_size,
    valid_labels,
    valid_name,
)
from sublet.wire.http import AcquireRequest, AcquisitionRequest, QuotaView, WantBody

TEXT_MAX: Final = 128
"""Length of a request id, and of what a holder says of itself."""
_QUOTA_MAX: Final = 1 << 62

_Choice = TypeVar("_Choice", bound=enum.StrEnum)


def acquire_command(
    request: AcquireRequest, caller: Caller, lease: LeaseId, policy: Policy, process: ProcessRecord | None = None
) -> Acquire:
    """The command of an acquire message, under a lease id that was not used before. The lease is bound to
    ``process``."""
    wants = tuple(_want(want) for want in request.wants)
    if not wants and request.resume is None:
        raise InvalidRequest("the request wants nothing", do="Ask for a gpu, cpu, memory or block.")
    tier = Tier.INTERACTIVE if request.tier is None else choice(Tier, request.tier, "tier")
    if request.spot:
        if request.tier is not None and tier is not Tier.SPOT:
            raise InvalidRequest(f"spot contradicts tier {tier}", do="Say one of the two.")
        tier = Tier.SPOT
    parked = None if request.resume is None else _with_epoch(request.resume, "resume")
    replaces = None if request.replaces is None else _with_epoch(request.replaces, "replaces")
    if request.ttl is None:
        kinds = [want.kind for want in wants] or [Kind.GPU]  # what is parked was on one
        ttl_ns = min(policy.ttl_default_ns(kind) for kind in kinds)
    else:
        ttl_ns = parse_duration_ns(request.ttl, "ttl")
    return Acquire(
        tenant=caller.tenant,
        operator=caller.operator,
        peer=caller.peer,
        lease=lease,
        request_id=request_id(request.request_id),
        wants=wants,
        ttl_ns=ttl_ns,
        tier=tier,
        wait_ns=None if request.wait is None else parse_duration_ns(request.wait, "wait", zero_ok=True),
        expect_ns=None if request.expect is None else parse_duration_ns(request.expect, "expect"),
        selector=valid_labels(request.selector) if request.selector else {},
        renew=choice(RenewMode, request.renew, "renew mode"),
        name=None if request.name is None else valid_name(request.name, "lease name"),
        labels=valid_labels(request.labels) if request.labels else {},
        holder=text(request.holder, "holder"),
        resume=None if parked is None else parked[0],
        resume_epoch=None if parked is None else parked[1],
        replaces=None if replaces is None else replaces[0],
        replaces_epoch=None if replaces is None else replaces[1],
        retain_ns=None if request.retain is None else parse_duration_ns(request.retain, "retain", zero_ok=True),
        process=process,
        pays_priority=request.pay_priority,
    )


def acquire_many_command(
    request: AcquisitionRequest,
    caller: Caller,
    new_lease: Callable[[], LeaseId],
    policy: Policy,
    process: ProcessRecord | None = None,
) -> AcquireMany:
    """The same for many leases in one message, each with an id of its own."""
    count = request.count
    if not 1 <= count <= policy.many_max:
        raise InvalidRequest(
            f"{count} leases in one request are not possible", do=f"Ask for 1 to {policy.many_max} at a time."
        )
    leases = tuple(new_lease() for _ in range(count))
    each = acquire_command(request.request, caller, leases[0], policy, process)
    return AcquireMany(tenant=each.tenant, operator=each.operator, each=each, leases=leases, at_least=request.at_least)


def _with_epoch(name: str, what: str) -> tuple[LeaseId, Epoch | None]:
    """``ID`` or ``ID@EPOCH``."""
    lease, at, epoch = text(name, what).rpartition("@")
    return (LeaseId(lease), Epoch.parse(epoch)) if at else (LeaseId(epoch), None)


def _want(want: WantBody) -> Want:
    kind = choice(Kind, want.kind, "kind")
    return Want(
        kind=kind,
        amount=0 if kind is Kind.BLOCK and want.amount == 0 else _amount(kind, want.amount, "amount"),
        count=want.count,
        exclusivity=None if want.exclusivity is None else choice(Exclusivity, want.exclusivity, "exclusivity"),
        model=None if want.model is None else text(want.model, "model"),
        least=None if want.least is None else _amount(kind, want.least, "least amount"),
        other=None if want.or_model is None else text(want.or_model, "other model"),
    )


def _amount(kind: Kind, amount: int, what: str) -> int:
    if kind is not Kind.CPU:
        return parse_size(amount, what)
    if amount < 1:
        raise InvalidRequest(f"the {what} must be at least one core, not {amount}", do="Ask for one core or more.")
    return amount


def quota(view: QuotaView) -> Quota:
    """Limits as the operator set them; zero is a limit too."""
    limits = {name: getattr(view, name) for name in view.__struct_fields__}
    for name, value in limits.items():
        if value is not None and not 0 <= value <= _QUOTA_MAX:
            raise InvalidRequest(f"a quota of {name} = {value} makes no sense", do="Give a whole number from 0.")
    return Quota(**limits)


def choice(options: type[_Choice], value: str, what: str) -> _Choice:
    """One of a closed list, or an error that names the list."""
    try:
        return options(value)
    except ValueError:
        listed = ", ".join(options)
        raise InvalidRequest(f"{value[:40]!r} is not a {what}", do=f"Use one of: {listed}.") from None


def request_id(value: str) -> RequestId:
    """What makes a repeated request one request."""
    if not value:
        raise InvalidRequest("the request id is empty", do="Choose a new random one for every new request.")
    return RequestId(text(value, "request id"))


def text(value: str, what: str) -> str:
    """A short text that can be printed anywhere."""
    if len(value) > TEXT_MAX or not value.isprintable():
        raise InvalidRequest(
            f"the {what} is too long or has control characters", do=f"Keep it to {TEXT_MAX} printable characters."
        )
    return value


def busy_ns(seconds: float) -> int:
    """Seconds of work, as reported by a holder."""
    return parse_duration_ns(seconds, "busy time", zero_ok=True) if seconds else 0


def number(query: dict[str, str], name: str, *, most: float) -> float:
    """A query parameter in seconds; 0 if it is not there."""
    return seconds(query.get(name, "0"), name, most=most)


def seconds(text: str | float, name: str, *, most: float) -> float:
    """A number of seconds from 0 to ``most``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:  # also false for NaN
        raise InvalidRequest(f"{name}={str(text)[:40]} is not a number from 0 to {most:g}", do=f"Correct {name}.")
    return value


def flag(query: dict[str, str], name: str) -> bool:
    """A query parameter that is 1 (also ``true``) or 0."""
    value = query.get(name, "0").lower()
    if value not in ("0", "1", "true", "false", ""):
        raise InvalidRequest(f"{name}={value[:40]} is neither 1 nor 0", do=f"Correct {name}.")
    return value in ("1", "true")
