"""The control API's budgets: amounts as decimal text, since money is never a floating-point number."""

from __future__ import annotations

from typing import Any, Final

from sublet.errors import InvalidRequest, NotFound
from sublet.office.api.asking import choice, request_id
from sublet.office.api.service import Call, Reply, Service, json_reply
from sublet.office.api.views import rfc3339
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.bills import micros_of
from sublet.office.ledger.budgets import money, parse_amount, stands
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

FAR_NS: Final = 1000 * 366 * 86_400 * NS_PER_S
"""A moment beyond this is none that a person waits for, and a calendar ends with the year 9999."""


async def budgets(service: Service, call: Call) -> Reply:
    """By name. A tenant sees those that are its own; of a group's, in which others spend too, it sees nothing."""
    now = service.driver.now()
    books = service.driver.ledger.state.books
    mine = None if call.caller.operator else call.caller.tenant
    found = [books.budgets[name] for name in sorted(books.budgets)]
    return json_reply([_view(service, budget, now) for budget in found if mine is None or budget.tenant == mine])


async def set_budget(service: Service, call: Call) -> Reply:
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


async def credit(service: Service, call: Call) -> Reply:
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


async def remove(service: Service, call: Call) -> Reply:
    """It limits nothing any more. The answer is how it was."""
    request: BudgetRequest = call.body
    command = cmd.RemoveBudget(**_which(call, request))
    known = service.driver.ledger.state.books.budgets.get(budget_id(command.tenant, command.group, command.per))
    view = None if known is None else _view(service, known, service.driver.now())
    await service.driver.submit(command)
    return json_reply(view)


def _which(call: Call, request: BudgetRequest) -> dict[str, Any]:
    if (request.tenant is None) == (request.group is None):
        raise InvalidRequest("a budget is of one tenant or of one group", do="Name either of the two.")
    return {
        "by": call.caller.tenant,
        "peer": call.caller.peer,
        "tenant": None if request.tenant is None else TenantId(valid_name(request.tenant, "tenant name")),
        "group": None if request.group is None else GroupId(valid_name(request.group, "group name")),
        "per": choice(BudgetWindow, request.per, "window"),
    }


def _answer(service: Service, command: cmd.SetBudget | cmd.CreditBudget) -> Reply:
    name = budget_id(command.tenant, command.group, command.per)
    known = service.driver.ledger.state.books.budgets.get(name)
    if known is None:  # another operator removed it in between
        raise NotFound(f"{account_of(command.tenant, command.group)} has no budget any more", do="Set it again.")
    return json_reply(_view(service, known, service.driver.now()))


def _view(service: Service, budget: BudgetRecord, now: Now) -> BudgetView:
    state = service.driver.ledger.state
    found = stands(state, budget, now)
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
