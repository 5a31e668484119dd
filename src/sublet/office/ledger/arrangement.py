"""Compares groups, reservations and budgets with what ``policy.toml`` says, as a whole.

A key that the file has holds from the moment at which it is applied, whatever a command said before. A key that it no
longer has goes back to its default, and what it no longer names is removed, unless a command has changed it since.
What it never named is left alone. So all of it is worked out first (``planned``), checked as one, and only then written
down (``apply``), or merely shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from sublet.errors import InvalidRequest, NotFound
from sublet.lazy_dataclass import dataclass
from sublet.office.ledger import budgets, reservations
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import BudgetRecord, DeclaredRecord, GroupRecord, Quota, ReservationRecord, Span
from sublet.office.ledger.spending import account_of
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.values import MILLIS_PER_DEVICE, BudgetId, BudgetWindow, GroupId, ReservationId, TenantId, shown

WEIGHT_MAX: Final = 10_000
GPUS_MAX: Final = 1 << 31
REQUESTS_MIN: Final = 60
"""A minute: leases have to be renewed, and their state to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """All groups but a default one that was never changed, who is in which, all reservations and budgets."""

    groups: Mapping[GroupId, GroupRecord]
    members: Mapping[TenantId, GroupId]
    """Of tenants that are there."""
    reservations: Mapping[ReservationId, ReservationRecord]
    budgets: Mapping[BudgetId, BudgetRecord]


def present(state: State) -> Arrangement:
    return Arrangement(
        groups=state.books.groups,
        members={tenant.id: tenant.group or DEFAULT_GROUP for tenant in state.tenants.values()},
        reservations=state.books.reservations,
        budgets=state.books.budgets,
    )


# ---- what the file makes of it ----


def planned(
    state: State,
    new: DeclaredRecord,
    spans: Mapping[ReservationId, tuple[Span, ...]],
    missing: tuple[str, ...],
    wall_ns: int,
) -> Arrangement:
    """How it would be with this file. Raises ``InvalidRequest`` where a part contradicts another, or what there is."""
    now, old = present(state), state.books.declared
    groups = _groups(state, now, old, new)
    target = Arrangement(
        groups=groups,
        members=_members(now, old, new),
        reservations=_reservations(now, old, new, spans),
        budgets=_budgets(state, now, old, new, wall_ns),
    )
    for name, group in target.groups.items():
        if now.groups.get(name) != group:
            check_group(group)
    check_floors(state, target.groups)
    reservations.check(state, target.reservations, target.groups, wall_ns)
    _check_names(state, now, target, new)
    if target.budgets != now.budgets:
        if new.budgets:
            budgets.check_complete(state.rates, missing)
        accounts = {account_of(each.tenant, each.group) for each in target.budgets.values()}
        for account in sorted(accounts):
            mine = [each for each in target.budgets.values() if account_of(each.tenant, each.group) == account]
            for each in mine:
                budgets.check_amount(each.amount, least=0)
            budgets.check_windows(mine)
    return target


def _groups(state: State, now: Arrangement, old: DeclaredRecord, new: DeclaredRecord) -> Mapping[GroupId, GroupRecord]:
    found = dict(now.groups)
    for name in old.groups.keys() - new.groups.keys():
        if name != DEFAULT_GROUP:
            found.pop(name, None)
    for name in old.groups.keys() | new.groups.keys():
        if name not in new.groups and name not in found:
            continue
        before, fields = old.groups.get(name, {}), new.groups.get(name, {})
        group = found.get(name) or state.group(name)
        unused = GroupRecord(id=name)
        lapsed = {
            field: field_of(unused, field)
            for field, value in before.items()
            if field not in fields and field_of(group, field) == value
        }
        changed = with_fields(group, {**lapsed, **fields})
        if changed != group or (name in new.groups and name != DEFAULT_GROUP):
            found[name] = changed
    return found


def _members(now: Arrangement, old: DeclaredRecord, new: DeclaredRecord) -> Mapping[TenantId, GroupId]:
    found = dict(now.members)
    for tenant, group in old.members.items():
        if tenant not in new.members and found.get(tenant) == group:
            found[tenant] = DEFAULT_GROUP
    return found | {tenant: group for tenant, group in new.members.items() if tenant in found}


def _reservations(
    now: Arrangement,
    old: DeclaredRecord,
    new: DeclaredRecord,
    spans: Mapping[ReservationId, tuple[Span, ...]],
) -> Mapping[ReservationId, ReservationRecord]:
    found = {
        name: known
        for name, known in now.reservations.items()
        if name in new.reservations or name not in old.reservations or _rule(known) != old.reservations[name]
    }
    for name, wanted in new.reservations.items():
        if name not in found or _rule(found[name]) != wanted:
            found[name] = msgspec.structs.replace(wanted, spans=spans.get(name, ()))
    return found


def _rule(reservation: ReservationRecord) -> ReservationRecord:
    return msgspec.structs.replace(reservation, spans=())


def _budgets(
    state: State, now: Arrangement, old: DeclaredRecord, new: DeclaredRecord, wall_ns: int
) -> Mapping[BudgetId, BudgetRecord]:
    found = {
        name: known
        for name, known in now.budgets.items()
        if name in new.budgets or name not in old.budgets or known.amount != old.budgets[name]
    }
    for name, amount in new.budgets.items():
        tenant, _, _ = of_budget(name)
        if tenant is not None and tenant not in now.members:
            continue  # it has it from the moment on at which it is added
        known = found.get(name)
        found[name] = (
            new_budget(name, amount, state.rates.currency, wall_ns)
            if known is None
            else msgspec.structs.replace(known, amount=amount, currency=state.rates.currency)
        )
    return found


def new_budget(name: BudgetId, amount: int, currency: str, wall_ns: int) -> BudgetRecord:
    """One of which nothing is used."""
    tenant, group, per = of_budget(name)
    return BudgetRecord(
        id=name,
        tenant=tenant,
        group=group,
        per=per,
        amount=amount,
        currency=currency,
        since_wall_ns=wall_ns,
    )


def of_budget(name: BudgetId) -> tuple[TenantId | None, GroupId | None, BudgetWindow]:
    """Whose it is, and for which window."""
    sort, whose, per = name.split("/")
    if sort == "tenant":
        return TenantId(whose), None, BudgetWindow(per)
    return None, GroupId(whose), BudgetWindow(per)


# ---- checks, of commands and of the file ----


def check_group(group: GroupRecord) -> None:
    """See that nothing of a group contradicts itself."""
    check_weight(group.weight, f"group {group.id}")
    check_quota(group.quota)
    if group.quota.burst_seconds is not None or group.quota.burst_refill_seconds is not None:
        raise InvalidRequest("burst credit is for tenants, not for groups", do="Set it for its tenants.")
    if not 0 <= group.floor < GPUS_MAX or (group.ceiling is not None and not 0 <= group.ceiling < GPUS_MAX):
        raise InvalidRequest("a floor or a ceiling is a number of GPUs, zero or more", do="Correct it.")
    most = reservations.most_gpus(group)
    if most is not None and group.floor > most:
        gpus = "1 GPU" if group.floor == 1 else f"{group.floor} GPUs"
        raise InvalidRequest(
            f"group {group.id} would have a floor of {gpus} above its {most} at most",
            do="Lower the floor, or raise the ceiling.",
        ).about(*reservations.keys_of_most(group), f"group/{group.id}/floor")


def check_weight(weight: int, whose: str) -> None:
    if not 1 <= weight <= WEIGHT_MAX:
        raise InvalidRequest(
            f"a weight of {weight} for {whose} is not possible",
            do=f"Give 1 to {WEIGHT_MAX}; a tenant that is to get nothing gets a quota of zero.",
        )


def check_quota(quota: Quota) -> None:
    for name in quota.__struct_fields__:
        value = getattr(quota, name)
        if value is not None and not 0 <= value < 1 << 62:
            raise InvalidRequest(f"the quota {name} = {value} is not possible", do="Give zero or more.")
    if quota.requests_per_minute is not None and quota.requests_per_minute < REQUESTS_MIN:
        raise InvalidRequest(
            f"{quota.requests_per_minute} requests a minute are less than what runs needs",
            do=f"Give at least {REQUESTS_MIN}.",
        )


def check_floors(state: State, groups: Mapping[GroupId, GroupRecord]) -> None:
    """See that no floor rises above what the nodes that answer have. One that stays or falls is right while a device
    is away, too."""
    rises = next((group for name, group in groups.items() if group.floor > state.group(name).floor), None)
    if rises is None:
        return
    devices, floors = state.capacity[0] // MILLIS_PER_DEVICE, sum(group.floor for group in groups.values())
    if floors > devices:
        most = max(0, devices - floors + rises.floor)
        raise InvalidRequest(
            f"floors would add up to {floors} GPUs, and there are {devices}",
            do=f"Give group {rises.id} at most {most}, or lower the floor of another.",
        ).about(*(f"group/{name}/floor" for name in groups))


def _check_names(state: State, now: Arrangement, target: Arrangement, new: DeclaredRecord) -> None:
    """Tenants in a group that does not exist, or that pay for one."""
    gone = now.groups.keys() - target.groups.keys()
    for tenant, group in target.members.items():
        if group in gone:
            raise InvalidRequest(
                f"group {group} would be removed, and {tenant} is in it",
                do=f"`sublet tenant set {tenant} --group default` puts it into the default group.",
            )
    for budget in target.budgets.values():
        if budget.group in gone and budget.id not in new.budgets:  # set by command: the file does not decide over it
            raise InvalidRequest(
                f"group {budget.group} would be removed, and it has a budget",
                do=f"`sublet budget rm --group {budget.group} --per {budget.per}` removes that first.",
            )
    for group in new.members.values():
        if group != DEFAULT_GROUP and group not in target.groups:
            raise NotFound(f"there is no group {shown(group)}", do=f"Write [group.{group}] as well.")
    for budget in target.budgets.values():
        if budget.group not in (None, DEFAULT_GROUP, *target.groups):
            error = NotFound(f"there is no group {shown(budget.group)}", do=f"Write [group.{budget.group}] as well.")
            raise error.about(f"budget/{budget.id}")


# ---- fields of a group ----


def field_of(group: GroupRecord, field: str) -> int | None:
    """One that the file may have: of the group, or of its quota."""
    found: int | None = getattr(group if field in GroupRecord.__struct_fields__ else group.quota, field)
    return found


def with_fields(group: GroupRecord, fields: Mapping[str, int | None]) -> GroupRecord:
    own = {name: value for name, value in fields.items() if name in GroupRecord.__struct_fields__}
    quota = {name: value for name, value in fields.items() if name not in own}
    return msgspec.structs.replace(group, **own, quota=msgspec.structs.replace(group.quota, **quota))


# ---- written down ----


def apply(step: Step, command: cmd.ApplyPolicy) -> bool:
    """Go by the file's groups, reservations and budgets, all or nothing. Returns whether it says anything new."""
    if command.declared is None:
        return False
    state, wall_ns = step.state, step.now.wall_ns
    target = planned(state, command.declared, command.spans, command.missing, wall_ns)
    now = present(state)
    before = Arrangement(  # the books change below
        groups=dict(now.groups), members=now.members, reservations=dict(now.reservations), budgets=dict(now.budgets)
    )
    for name, known in before.reservations.items():
        if target.reservations.get(name) != known:
            reservations.forget(step, known)
    for budget in sorted(before.budgets.keys() - target.budgets.keys()):
        step.emit(ev.BudgetRemoved(budget=budget))
    for group in target.groups.values():
        if before.groups.get(group.id) != group:
            step.emit(ev.GroupSet(group=group))
    for tenant, into in target.members.items():
        if before.members[tenant] != into:
            step.emit(ev.TenantSet(tenant=msgspec.structs.replace(state.tenants[tenant], group=into)))
    for name, reservation in target.reservations.items():
        if before.reservations.get(name) != reservation:
            step.emit(ev.ReservationSet(reservation=reservation))
    for budget, wanted in target.budgets.items():
        if before.budgets.get(budget) != wanted:
            step.emit(ev.BudgetSet(budget=wanted))
    for gone in sorted(before.groups.keys() - target.groups.keys()):
        step.emit(ev.GroupRemoved(group=gone))
    return command.declared != state.books.declared


def declared_group(state: State, tenant: TenantId) -> GroupId | None:
    """Where a tenant that is added belongs, as the file says."""
    group = state.books.declared.members.get(tenant)
    return group if group in state.books.groups else None


def apply_to_new_tenant(step: Step, tenant: TenantId) -> None:
    """A tenant that the file named was added: its budgets hold from here on."""
    state = step.state
    for name, amount in state.books.declared.budgets.items():
        if of_budget(name)[0] == tenant and name not in state.books.budgets:
            step.emit(ev.BudgetSet(budget=new_budget(name, amount, state.rates.currency, step.now.wall_ns)))
