"""The control API's policy: present values with their sources, and what a file would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from sublet.errors import InvalidRequest, NotFound, Unauthorized
from sublet.office.access import Caller
from sublet.office.api.reservations import spans_of
from sublet.office.api.service import ApiCall, ApiReply, ApiService, json_reply
from sublet.office.ledger.arrangement import Arrangement, field_of, new_budget, planned, present, with_fields
from sublet.office.ledger.budgets import money
from sublet.office.ledger.commands import ApplyPolicy
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import LOCAL_TENANT, GroupRecord, Now, Quota
from sublet.office.policy_file import FIELDS, FILE, KEYS, NAMED_KEYS, PolicyKey, PolicyLimits, PolicyUnit, parse_policy
from sublet.values import GroupId, TenantId, shown
from sublet.wire.http import LimitChange, LimitView, PolicyRequest

OF_QUOTA: Final = {
    "tenant.gpus": "gpus",
    "tenant.vram": "vram_bytes",
    "tenant.cores": "cores",
    "tenant.memory": "memory_bytes",
    "tenant.block": "block_bytes",
    "tenant.leases": "leases",
    "tenant.gpu_time": "gpu_seconds",
    "tenant.burst": "burst_seconds",
    "tenant.burst_refill": "burst_refill_seconds",
    "tenant.queue": "queue",
    "tenant.requests_per_minute": "requests_per_minute",
}
"""Which of the limits a tenant may have of its own."""
OF_GROUP: Final = tuple(field for field in Quota.__struct_fields__ if not field.startswith("burst"))
NOT_OWNER: Final = ("tenant.", "lease.")
"""Tables that say nothing of the owner's leases."""


def policy(service: ApiService, call: ApiCall) -> ApiReply:
    """The limits of the office, or of one tenant. A caller who is no operator sees its own."""
    name, caller = call.query.get("tenant", ""), call.caller
    if not caller.operator:
        if name and name != caller.tenant:
            raise Unauthorized("the limits of others are for operators", do="Leave the tenant out.")
        name = caller.tenant
    quota = None
    if name:
        record = service.driver.ledger.state.tenants.get(TenantId(name))
        if record is None:
            raise NotFound(f"there is no tenant {shown(name)}", do="See `sublet tenant ls`.")
        quota = record.quota
    found = limit_views(service.limits, quota, tenant=name)
    views = [view for view in found if caller.operator or view.key.startswith(NOT_OWNER)]
    if caller.operator and not name:
        state = service.driver.ledger.state
        views += arrangement_views(service.limits, present(state), state.rates.currency)
    return json_reply(views)


async def apply(service: ApiService, call: ApiCall) -> ApiReply:
    """The file as it is now, from now on. With a mistake in it nothing changes."""
    state = service.driver.ledger.state
    before = _all_shown(service.limits, present(state))
    limits = await service.apply_limits(call.caller)
    return json_reply(_changes(before, _all_shown(limits, present(state))))


async def check(service: ApiService, call: ApiCall) -> ApiReply:
    """What a file with this text would change, without a change. It is refused as it would be when applied."""
    request: PolicyRequest = call.body
    limits, state = parse_policy(request.text), service.driver.ledger.state
    command = to_apply(limits, {}, service.driver.now(), service.rates.missing)
    try:
        target = planned(state, limits.declared, command.spans, command.missing, service.driver.now().wall_ns)
    except InvalidRequest as error:
        raise limits.with_lines(error) from error
    return json_reply(_changes(_all_shown(service.limits, present(state)), _all_shown(limits, target)))


def to_apply(
    limits: PolicyLimits, changed: Mapping[str, str], now: Now, missing: tuple[str, ...], caller: Caller | None = None
) -> ApplyPolicy:
    """The one command by which a file holds."""
    declared = limits.declared
    return ApplyPolicy(
        by=None if caller is None else caller.tenant,
        peer="" if caller is None else caller.peer,
        changed=dict(changed),
        declared=declared,
        spans={name: spans_of(each.when, each.zone, now) for name, each in declared.reservations.items()},
        missing=missing,
    )


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[LimitChange]:
    return [
        LimitChange(key=path, before=before.get(path, "-"), now=now.get(path, "-"))
        for path in {**before, **now}
        if before.get(path) != now.get(path)
    ]


def _all_shown(limits: PolicyLimits, found: Arrangement) -> dict[str, str]:
    """Each key with its value: of the limits all, of the others those that have not their default."""
    shown_limits = {path: key.shown(limits.value(path)) for path, key in KEYS.items()}
    return shown_limits | {path.replace("/", "."): row.text for path, row in _rows(found).items()}


def limit_views(limits: PolicyLimits, quota: Quota | None = None, *, tenant: str = "") -> Iterator[LimitView]:
    """Every key with its value and source; with a tenant's quota, what holds for that tenant."""
    for path, key in KEYS.items():
        value, source, unset = limits.value(path), limits.source(path), key.unset
        own = getattr(quota, OF_QUOTA[path]) if quota is not None and path in OF_QUOTA else None
        if own is not None:
            value, source = own, f"quota of {tenant}"
        elif tenant == LOCAL_TENANT and path.startswith(NOT_OWNER):
            value, source, unset = None, "owner", "no limit"
        text = unset if value is None else key.shown(value)
        yield LimitView(key=path, value=value, shown=text, source=source, says=key.says)


# ---- groups, reservations and budgets ----


class _Row(NamedTuple):
    key: PolicyKey
    value: int | None
    text: str


def arrangement_views(
    limits: PolicyLimits, found: Arrangement | None = None, currency: str = ""
) -> Iterator[LimitView]:
    """Each key of groups, reservations and budgets that has not its default, and where it is from; ``found``: as they
    are in the office, which has this currency. None: as they will be in the next one."""
    declared = limits.declared
    wanted = Arrangement(
        groups={name: with_fields(GroupRecord(id=name), fields) for name, fields in declared.groups.items()},
        members=declared.members,
        reservations=declared.reservations,
        budgets={name: new_budget(name, amount, currency, 0) for name, amount in declared.budgets.items()},
    )
    absent: set[str] = set()
    if found is None:
        found = wanted
    else:  # what is kept for tenants that are to be added belongs to what holds
        absent = {tenant for tenant in declared.members if tenant not in found.members}
        members = {tenant: group for tenant, group in declared.members.items() if tenant in absent}
        later = {
            name: each
            for name, each in wanted.budgets.items()
            if each.tenant is not None and each.tenant not in found.members
        }
        found = replace(found, members={**found.members, **members}, budgets={**found.budgets, **later})
    given = frozenset(limits.lines)
    holds, file = _rows(found, given), _rows(wanted, given)
    for path, row in {**holds, **{path: row for path, row in file.items() if path in given}}.items():
        now, in_file, line = holds.get(path), file.get(path), limits.lines.get(path)
        says, text = row.key.says, "none" if now is None else now.text
        if line is None or in_file is None:
            source = "default" if row.value is not None and row.value == row.key.default else "command"
        elif text == in_file.text:
            source = f"{FILE} line {line}"
        else:
            source = f"command ({FILE} line {line} has {in_file.text})"
        if row.key.unit is PolicyUnit.NAMES and (few := sorted(absent.intersection(text.split(", ")))):
            says = f"{says}; not there yet: {', '.join(few)}"
        yield LimitView(
            key=path.replace("/", "."), value=None if now is None else now.value, shown=text, source=source, says=says
        )


_KEY_OF_FIELD: Final = {field: name for name, field in FIELDS.items()}


def _rows(found: Arrangement, given: frozenset[str] = frozenset()) -> dict[str, _Row]:
    """By the path that ``PolicyLimits.lines`` has: what has not its default, what is ``given``, and the weight of each
    group."""
    rows: dict[str, _Row] = {}

    def add(table: str, name: str, key_name: str, value: int | None, text: str | None = None) -> None:
        key = NAMED_KEYS[f"{table}.{key_name}"]
        path = f"{table.replace('.', '/')}/{name}/{key_name}"
        if text is not None or value != key.default or key_name == "weight" or path in given:
            rows[path] = _Row(key, value, key.shown(value) if text is None else text)

    members: dict[GroupId, list[TenantId]] = {}
    for tenant in sorted(found.members):
        members.setdefault(found.members[tenant], []).append(tenant)
    members.pop(DEFAULT_GROUP, None)
    for group_id in sorted(found.groups.keys() | members.keys()):
        group = found.groups.get(group_id) or GroupRecord(id=group_id)
        for field in ("weight", "floor", "ceiling", *OF_GROUP):
            add("group", group_id, _KEY_OF_FIELD.get(field, field), field_of(group, field))
        if group_id in members:
            add("group", group_id, "members", None, ", ".join(members[group_id]))
    for name, reservation in sorted(found.reservations.items()):
        for field in ("group", "gpus", "when", "zone", "model"):
            value = getattr(reservation, field)
            if value not in (None, ""):
                add("reservation", name, field, value if isinstance(value, int) else None, str(value))
    for _, budget in sorted(found.budgets.items()):
        whose = "group" if budget.tenant is None else "tenant"
        text = money(budget.amount, budget.currency).strip()
        add(f"budget.{whose}", str(budget.tenant or budget.group), budget.per, budget.amount, text)
    return rows
