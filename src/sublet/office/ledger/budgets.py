"""Budgets: what a tenant or a group may spend in a window, and what happens when it is spent.

At 80 % there is a warning. When all is used up nothing that costs something is granted to the account: requests that
wait end, grants that are not claimed end, and leases end with the notice of their tier. What is kept of them stays, and
goes on being paid for: volumes are kept as long as they would be, and guests that were parked may stay to the end of
the time to live of their parking lease, which is not renewed. Credit, a larger amount or the next window bring the
budget back, and leases that have notice for it stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from sublet.errors import IdempotencyConflict, InvalidRequest, NotFound
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done, Refusal, RefusalCode
from sublet.office.ledger.bills import Rates, micros_of
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import BudgetRecord, LeaseRecord, Now, PricesRecord
from sublet.office.ledger.spending import Standing, account_of, budget_id, cost, rates_of, standing, window_of
from sublet.office.ledger.state import State
from sublet.values import (
    NS_PER_S,
    BudgetLevel,
    BudgetWindow,
    GroupId,
    Kind,
    TenantId,
    shown,
)

if TYPE_CHECKING:
    from sublet.office.ledger.transaction import Transaction

AMOUNT_MAX: Final = 10**15
"""A thousand million units of money, in millionths."""
_LONGER: Final = (BudgetWindow.DAY, BudgetWindow.MONTH, BudgetWindow.TOTAL)
_AMOUNT: Final = re.compile(r"(-?)(\d{1,12})(?:\.(\d{1,6}))?", re.ASCII)
_DO_PRICES: Final = "Write a price per hour of gpu, cpu, memory and block into rates.toml, and start the office again."


# ---- what operators ask ----


def set_prices(step: Transaction, command: cmd.SetPrices) -> Answer:
    """The prices of this start. They are in the journal, so that a fold of it counts as the office did."""
    check_prices(step.state, rates_of(command.prices), command.missing)
    if step.state.rates != rates_of(command.prices):
        step.emit(ev.PricesSet(prices=command.prices))
    return Done()


def check_prices(state: State, rates: Rates, missing: tuple[str, ...]) -> None:
    """Refuse prices by which the budgets that are there cannot be counted; raises InvalidRequest."""
    for budget in state.books.budgets.values():
        if budget.currency != rates.currency:
            raise InvalidRequest(
                f"rates.toml counts in {rates.currency}, and the budget of {account_text(budget)} is in "
                f"{budget.currency}",
                do=f"Write the prices in {budget.currency} again; with them, `sublet budget rm` removes budgets.",
            )
    if state.books.budgets:
        check_complete(rates, missing)


def check_complete(rates: Rates, missing: tuple[str, ...]) -> None:
    """See that a budget can be counted by these prices; raises InvalidRequest."""
    if missing:
        raise InvalidRequest(
            f"rates.toml has no price of {' and '.join(missing)}, and a budget needs each of them", do=_DO_PRICES
        )
    if not any((rates.gpu, *rates.models.values(), rates.cpu, rates.memory, rates.block)):
        raise InvalidRequest("all prices are zero, so a budget would never be used", do=_DO_PRICES)


def set_budget(step: Transaction, command: cmd.SetBudget) -> Answer:
    """Make one, which counts from this moment on; or change the amount of one."""
    state, rates = step.state, step.state.rates
    _check_account(state, command.tenant, command.group)
    check_amount(command.amount, least=0)
    check_complete(rates, command.missing)
    if command.currency not in (None, rates.currency):
        raise InvalidRequest(
            f"the prices are in {rates.currency}, not in {shown(command.currency or '')}",
            do=f"Give the amount in {rates.currency}.",
        )
    name = budget_id(command.tenant, command.group, command.per)
    known = state.books.budgets.get(name)
    budget = BudgetRecord(
        id=name,
        tenant=command.tenant,
        group=command.group,
        per=command.per,
        amount=command.amount,
        currency=rates.currency,
        since_wall_ns=step.now.wall_ns if known is None else known.since_wall_ns,
        credits={} if known is None else known.credits,
        credited={} if known is None else known.credited,
    )
    check_windows([budget, *state.budgets_of.get(account_of(command.tenant, command.group), ())])
    if budget != known:
        step.emit(ev.BudgetSet(budget=budget))
    return Done()


def check_windows(budgets: Sequence[BudgetRecord]) -> None:
    """Of one account, a longer window has at least as much as a shorter one. The first of each window counts."""
    of_window = {budget.per: budget for budget in reversed(budgets)}
    found = [of_window[per] for per in _LONGER if per in of_window]
    for shorter, longer in pairwise(found):
        if shorter.amount > longer.amount:
            raise InvalidRequest(
                f"{account_text(shorter)} would have {money(shorter.amount, shorter.currency)} {_per(shorter)} and "
                f"{money(longer.amount, longer.currency)} {_per(longer)}, which is less",
                do="Give the longer window at least as much.",
            )


def credit_budget(step: Transaction, command: cmd.CreditBudget) -> Answer:
    """For the present window alone; the next one begins with its amount."""
    budget = _known(step.state, command)
    check_amount(command.amount, least=1)
    if command.request_id and command.request_id in budget.credited:
        if budget.credited[command.request_id] != command.amount:
            raise IdempotencyConflict("this request id was used for a credit of another amount")
        return Done()
    window, _, _ = window_of(budget.per, step.now.wall_ns)
    check_amount(budget.amount + budget.credits.get(window, 0) + command.amount, least=0)
    step.emit(ev.BudgetCredited(budget=budget.id, window=window, amount=command.amount, request_id=command.request_id))
    return Done()


def remove_budget(step: Transaction, command: cmd.RemoveBudget) -> Answer:
    step.emit(ev.BudgetRemoved(budget=_known(step.state, command).id))
    return Done()


def _known(state: State, command: cmd.CreditBudget | cmd.RemoveBudget) -> BudgetRecord:
    _check_account(state, command.tenant, command.group)
    known = state.books.budgets.get(budget_id(command.tenant, command.group, command.per))
    if known is None:
        who = account_of(command.tenant, command.group).replace("/", " ")
        raise NotFound(f"{who} has no budget {_PER[command.per]}", do="`sublet budget ls` shows all.")
    return known


def _check_account(state: State, tenant: TenantId | None, group: GroupId | None) -> None:
    if (tenant is None) == (group is None):
        raise InvalidRequest("a budget is of one tenant or of one group", do="Name either of the two.")
    if tenant is not None and tenant not in state.tenants:
        raise NotFound(f"there is no tenant {tenant[:64]}", do="`sublet tenant ls` shows all.")
    if group is not None and group != DEFAULT_GROUP and group not in state.books.groups:
        raise NotFound(f"there is no group {group[:64]}", do="`sublet group ls` shows all.")


def check_amount(amount: int, *, least: int) -> None:
    """See that it is an amount of money that a budget can have."""
    if not least <= amount <= AMOUNT_MAX:
        wanted = "zero or more" if least == 0 else "more than zero"
        raise InvalidRequest(
            "the amount of a budget or credit is negative, nothing or too large",
            do=f"Give {wanted}, and at most {money(AMOUNT_MAX, '').strip()}.",
        )


# ---- what is granted ----


def used_up(state: State, lease: LeaseRecord, now: Now) -> BudgetRecord | None:
    """A budget that does not allow this lease, or this request: one that is used up and would pay for it."""
    if not state.budgets_of:
        return None
    group = lease.group or state.group_of(lease.tenant)
    accounts = (account_of(lease.tenant, None), account_of(None, group))
    budgets = [budget for account in accounts for budget in state.budgets_of.get(account, ())]
    over = next((budget for budget in budgets if _is_used_up(state, budget, now)), None)
    return over if over is not None and _costs(state, lease) else None


def refusal(state: State, lease: LeaseRecord, now: Now) -> Refusal | None:
    """Of a request, before anything is granted."""
    over = used_up(state, lease, now)
    if over is None:
        return None
    resets = window_of(over.per, now.wall_ns)[2] is not None
    return Refusal(
        code=RefusalCode.QUOTA,
        reason=sentence(over, now),
        do=f"{'Ask again then, or ask' if resets else 'Ask'} an operator for credit: `sublet budget credit`.",
    )


def sentence(budget: BudgetRecord, now: Now) -> str:
    """The reason of a refusal or an end. It says nothing of what others have used."""
    window, _, ends_wall_ns = window_of(budget.per, now.wall_ns)
    limit = money(budget.amount + budget.credits.get(window, 0), budget.currency)
    text = f"the budget of {account_text(budget)} is used up: {limit} {_per(budget)}"
    return text if ends_wall_ns is None else f"{text}; it begins anew at {_minute(ends_wall_ns)}"


def reached(budget: BudgetRecord, event: ev.BudgetReached) -> str:
    """The news of it. What others have used is in no sentence."""
    limit = f"{money(event.limit, budget.currency)} {_per(budget)}"
    match event.level:
        case BudgetLevel.WARNED:
            return f"80 % of the budget of {account_text(budget)} are used ({limit})"
        case BudgetLevel.USED_UP:
            return f"the budget of {account_text(budget)} is used up ({limit})"
        case BudgetLevel.OPEN:
            return f"less than 80 % of the budget of {account_text(budget)} are used ({limit})"


def _is_used_up(state: State, budget: BudgetRecord, now: Now) -> bool:
    spent = state.books.spent[budget.id]
    return spent.level is BudgetLevel.USED_UP and spent.window == window_of(budget.per, now.wall_ns)[0]


def _costs(state: State, lease: LeaseRecord) -> bool:
    """Whether anything of what it has, or asks for, has a price."""
    held, rates = state.books.held.get(lease.id), state.rates
    if held is not None and held.units:  # an offer has none yet
        return cost(held.units, rates) > 0
    kinds = {want.kind for want in lease.wants}
    if lease.pays_priority and rates.priority:
        return True
    return any(rates.of(kind) for kind in kinds) or (Kind.GPU in kinds and any(rates.models.values()))


# ---- what happens by itself ----


def standing_now(state: State, budget: BudgetRecord, now: Now) -> Standing:
    """How it stands at this moment."""
    held = state.held_on.get(account_of(budget.tenant, budget.group), {})
    return standing(budget, state.books.spent[budget.id], held.values(), state.rates, now)


def update_budget(step: Transaction, budget: BudgetRecord) -> Standing:
    """Take note of what is used, and do what follows: once it is used up, and once it no longer is."""
    state = step.state
    found = standing_now(state, budget, step.now)
    spent = state.books.spent[budget.id]
    before = spent.level if spent.window == found.window else BudgetLevel.OPEN
    if found.level is not before:
        step.emit(
            ev.BudgetReached(
                budget=budget.id,
                window=found.window,
                level=found.level,
                used=micros_of(found.used),
                limit=micros_of(found.limit),
            )
        )
    for lease in _of(state, budget):
        if found.level is BudgetLevel.USED_UP:
            _end(step, lease, budget)
        elif lease.notice is not None and lease.notice.budget == budget.id and lease.status is LeaseStatus.NOTICED:
            step.cancel_notice(lease)
    return found


def lift(step: Transaction) -> None:
    """A budget is gone: leases that had notice for it stay."""
    books = step.state.books
    for lease in step.state.leases.values():
        named = lease.notice.budget if lease.status is LeaseStatus.NOTICED and lease.notice is not None else None
        if named is not None and named not in books.budgets:
            step.cancel_notice(lease)


def _of(state: State, budget: BudgetRecord) -> list[LeaseRecord]:
    """Leases that it pays for, and requests of its account that wait."""
    held = state.held_on.get(account_of(budget.tenant, budget.group), {})
    found = [state.leases[name] for name in held if name in state.leases]
    if state.queued_count:
        group = budget.group
        found += [
            lease
            for lease in state.queue_listing()
            if lease.tenant == budget.tenant or (group is not None and (lease.group or DEFAULT_GROUP) == group)
        ]
    return found


def _end(step: Transaction, lease: LeaseRecord, budget: BudgetRecord) -> None:
    """What does not go on: at once where nothing runs yet, else with the notice of its tier."""
    if not _costs(step.state, lease):
        return
    why = sentence(budget, step.now)
    notice_ns = step.policy.notice_for_ns(lease.tier)
    match lease.status:
        case LeaseStatus.QUEUED | LeaseStatus.GRANTED:
            step.end(lease, EndReason.BUDGET, why)
        case LeaseStatus.ACTIVE if lease.parks is None:
            step.notice(lease, EndReason.BUDGET, notice_ns, why, budget=budget.id)
        case LeaseStatus.NOTICED if lease.notice is not None and lease.notice.take_at_ns > step.now.ns + notice_ns:
            # One that was told of a later end, as for a drain in an hour. Where another request or a reservation is to
            # have its device it has the notice of its tier, or as long as its last save took.
            if lease.notice.beneficiary is None and lease.notice.reservation is None and lease.parks is None:
                step.cancel_notice(lease)
                step.notice(lease, EndReason.BUDGET, notice_ns, why, budget=budget.id)
        case _:
            pass


# ---- in words ----

_PER: Final = {BudgetWindow.DAY: "a day", BudgetWindow.MONTH: "a month", BudgetWindow.TOTAL: "in all"}


def _per(budget: BudgetRecord) -> str:
    return _PER[budget.per]


def account_text(budget: BudgetRecord) -> str:
    """Tenant or group, with its name."""
    return account_of(budget.tenant, budget.group).replace("/", " ")


def money(micros: int, currency: str) -> str:
    """With at least two decimals, and as many as it has."""
    whole, rest = divmod(abs(micros), 1_000_000)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micros < 0 else ''}{whole}.{decimals} {currency}"


def parse_amount(text: str) -> int:
    """Millionths, exactly, of a decimal text. Raises ``InvalidRequest``."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            f"{shown(text)} is not an amount of money", do='Write it with at most six decimals, as in "12.50".'
        )
    sign, whole, rest = found.groups()
    amount = int(whole) * 1_000_000 + int((rest or "").ljust(6, "0"))
    if sign and amount:
        raise InvalidRequest(f"the amount {text} is negative", do="Give zero or more.")
    return amount


def prices_record(rates: Rates) -> PricesRecord:
    """As the journal has them."""
    return PricesRecord(
        currency=rates.currency,
        gpu=rates.gpu,
        models=dict(rates.models),
        cpu=rates.cpu,
        memory=rates.memory,
        block=rates.block,
        priority=rates.priority,
    )


def _minute(wall_ns: int) -> str:
    return f"{datetime.fromtimestamp(wall_ns // NS_PER_S, UTC):%Y-%m-%d %H:%M} UTC"
