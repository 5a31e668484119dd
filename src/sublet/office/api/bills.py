"""The control API's bills: folded from the audit chain only, for the operator or for one tenant.

Reading the chain is work for a thread, since it is long. What was read is kept, so the next bill reads only what is
new.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

from sublet.errors import InvalidRequest, NotFound
from sublet.office.api.from_wire import choice, flag, request_id
from sublet.office.api.service import ApiCall, ApiReply, ApiService, is_live, json_reply
from sublet.office.api.to_wire import rfc3339
from sublet.office.journal.history import AuditHistory, wire_lines
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.bills import Usage, check_window, fold, micros_of, to_csv
from sublet.office.ledger.budgets import money, parse_amount, standing_now
from sublet.office.ledger.neighbours import RULES, noisy
from sublet.office.ledger.records import BudgetRecord, Now
from sublet.office.ledger.spending import account_of, bounds, budget_id
from sublet.values import (
    NS_PER_S,
    BudgetLevel,
    BudgetWindow,
    GroupId,
    RequestId,
    TenantId,
    shown,
    valid_name,
)
from sublet.wire.http import BudgetRequest, BudgetView
from sublet.wire.http_views import NeighbourView, NoisyView

USAGES_KEPT: Final = 100_000
"""Leases that may be kept in memory between two bills; with more of them each bill reads the chain from its start."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


async def bill(service: ApiService, call: ApiCall) -> ApiReply:
    """What was consumed. A tenant sees its own leases, an operator all, or with ``own`` those of its own tenant."""
    form = call.query.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest(f"a bill cannot be had as {form[:40]}", do="Ask for format=json or format=csv.")
    since_ns, until_ns = _wall_ns(call, "since"), _wall_ns(call, "until")
    mine = None if call.caller.operator and not flag(call.query, "own") else call.caller.tenant
    usages = [usage for usage in await _usages(service) if mine is None or usage.tenant == mine]
    by, per = call.query.get("by", "lease"), call.query.get("per")
    folded = await asyncio.to_thread(
        fold, usages, by=by, per=per, rates=service.rates, since_ns=since_ns, until_ns=until_ns
    )
    if form == "csv":
        return ApiReply(200, to_csv(folded).encode(), b"text/csv; charset=utf-8")
    return json_reply(wire_lines(folded))


async def neighbours(service: ApiService, call: ApiCall) -> ApiReply:
    """Which tenants disturb others, by rules that are told with them."""
    since_ns, until_ns = _wall_ns(call, "since"), _wall_ns(call, "until")
    check_window(since_ns, until_ns)
    usages, state = await _usages(service), service.driver.ledger.state
    groups = {usage.tenant: state.group_of(usage.tenant) for usage in usages}
    group_weights = {group: state.group(group).weight for group in groups.values()}
    weights = {tenant: 1 if (known := state.tenants.get(tenant)) is None else known.weight for tenant in groups}
    found = await asyncio.to_thread(
        noisy,
        usages,
        group_of=groups.__getitem__,
        weight_of_tenant=weights.__getitem__,
        weight_of_group=group_weights.__getitem__,
        since_ns=since_ns,
        until_ns=until_ns,
    )
    views = [
        NeighbourView(
            tenant=one.tenant, group=groups[one.tenant], rule=one.rule, says=one.says, figures=dict(one.figures)
        )
        for one in found
    ]
    return json_reply(NoisyView(rules=dict(RULES), neighbours=views))


async def _usages(service: ApiService) -> list[Usage]:
    """Everything that was ever held, up to now: the clock is read after the chain, so that it is not behind it."""
    async with service.billing:
        history = service.history or AuditHistory()
        service.history = None  # if reading fails half-way, what was read is not kept
        await asyncio.to_thread(history.read, service.archive.records(history.seq))
        now_ns = service.driver.clock.now_ns()
        leases = service.driver.ledger.state.leases.values()
        usages = history.usages(now_ns, {lease.id: lease.busy_ns for lease in leases if is_live(lease)})
        if len(usages) <= USAGES_KEPT:
            service.history = history
    return usages


def _wall_ns(call: ApiCall, name: str) -> int | None:
    text = call.query.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidRequest(
            f"{name}={text[:40]} is not a moment", do="Write it with its zone, such as 2026-11-21T10:00:00Z."
        )
    since = moment - _EPOCH
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


# -------------------------------------------------------------------------------------------------------------- budgets
#
# The control API's budgets: amounts as decimal text, since money is never a floating-point number.


FAR_NS: Final = 1000 * 366 * 86_400 * NS_PER_S
"""A moment beyond this is none that a person waits for, and a calendar ends with the year 9999."""


async def budgets(service: ApiService, call: ApiCall) -> ApiReply:
    """By name. A tenant sees those that are its own; of a group's, in which others spend too, it sees nothing."""
    now = service.driver.now()
    books = service.driver.ledger.state.books
    mine = None if call.caller.operator else call.caller.tenant
    found = [books.budgets[name] for name in sorted(books.budgets)]
    return json_reply([_view(service, budget, now) for budget in found if mine is None or budget.tenant == mine])


async def set_budget(service: ApiService, call: ApiCall) -> ApiReply:
    """From this moment on it is counted; or it has another amount from now on."""
    request: BudgetRequest = call.body
    command = cmd.SetBudget(
        amount=parse_amount(request.amount),
        currency=request.currency,
        missing=service.rates.missing,
        **_which(call, request),
    )
    await service.driver.submit(command)
    return _answer(service, command)


async def credit(service: ApiService, call: ApiCall) -> ApiReply:
    """More for the present window, once for each request id."""
    request: BudgetRequest = call.body
    command = cmd.CreditBudget(
        amount=parse_amount(request.amount),
        request_id=RequestId("") if request.request_id is None else request_id(request.request_id),
        **_which(call, request),
    )
    known = service.driver.ledger.state.books.budgets.get(budget_id(command.tenant, command.group, command.per))
    if request.currency is not None and known is not None and request.currency != known.currency:
        raise InvalidRequest(
            f"the budget is in {known.currency}, not in {shown(request.currency)}",
            do=f"Give the amount in {known.currency}.",
        )
    await service.driver.submit(command)
    return _answer(service, command)


async def remove(service: ApiService, call: ApiCall) -> ApiReply:
    """It limits nothing any more. The answer is how it was."""
    request: BudgetRequest = call.body
    command = cmd.RemoveBudget(**_which(call, request))
    known = service.driver.ledger.state.books.budgets.get(budget_id(command.tenant, command.group, command.per))
    view = None if known is None else _view(service, known, service.driver.now())
    await service.driver.submit(command)
    return json_reply(view)


def _which(call: ApiCall, request: BudgetRequest) -> dict[str, Any]:
    if (request.tenant is None) == (request.group is None):
        raise InvalidRequest("a budget is of one tenant or of one group", do="Name either of the two.")
    return {
        "by": call.caller.tenant,
        "peer": call.caller.peer,
        "tenant": None if request.tenant is None else TenantId(valid_name(request.tenant, "tenant name")),
        "group": None if request.group is None else GroupId(valid_name(request.group, "group name")),
        "per": choice(BudgetWindow, request.per, "window"),
    }


def _answer(service: ApiService, command: cmd.SetBudget | cmd.CreditBudget) -> ApiReply:
    name = budget_id(command.tenant, command.group, command.per)
    known = service.driver.ledger.state.books.budgets.get(name)
    if known is None:  # another operator removed it in between
        raise NotFound(f"{account_of(command.tenant, command.group)} has no budget any more", do="Set it again.")
    return json_reply(_view(service, known, service.driver.now()))


def _view(service: ApiService, budget: BudgetRecord, now: Now) -> BudgetView:
    state = service.driver.ledger.state
    found = standing_now(state, budget, now)
    window, since_wall_ns, ends_wall_ns = bounds(budget, now.wall_ns)
    next_wall_ns = None if found.next_ns is None else found.next_ns - now.ns + now.wall_ns
    if next_wall_ns is not None and next_wall_ns >= (now.wall_ns + FAR_NS if ends_wall_ns is None else ends_wall_ns):
        next_wall_ns = None
    return BudgetView(
        id=budget.id,
        tenant=budget.tenant,
        group=budget.group,
        per=budget.per,
        amount=money(budget.amount, "").strip(),
        credit=money(budget.credits.get(window, 0), "").strip(),
        used=money(micros_of(found.used), "").strip(),
        currency=budget.currency,
        window=window,
        since=rfc3339(since_wall_ns),
        resets_at=None if ends_wall_ns is None else rfc3339(ends_wall_ns),
        level=found.level,
        lasts_until=None if found.level is BudgetLevel.USED_UP or next_wall_ns is None else rfc3339(next_wall_ns),
    )
