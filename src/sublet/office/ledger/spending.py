"""The state of a budget: what was spent in its window, and when it reaches the warning or its end.

A cost accrues while something is held, at so many *grains* a nanosecond (``bills`` says what a grain is). So
the use of a budget is a straight line between two events, and the moment at which it reaches 80 % or all of the budget
is a division, rounded up: it is computed and waited for, not looked for.

The rule is the bill's, to the grain: a holding lies on the wall clock where it began and lasts as long as the boot
clock says, and a window has the part of it that lies inside. Of what was held when the budget was set, the part before
that moment is left out; what began later counts whole, also where a wall clock that was set back puts it before that
moment, or else nothing would be counted until the wall clock is there again. What is over is kept as units times
nanoseconds, by window, and priced when it is asked for, since a bill prices the past by the present rates too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.bills import GRAINS_PER_MICRO, Rates, period_of
from sublet.office.ledger.records import BudgetRecord, HeldRecord, Now, PricesRecord, SpentRecord
from sublet.values import BudgetId, BudgetLevel, BudgetWindow, GroupId, Kind, TenantId
from sublet.wire.orders import Part

THRESHOLDS: Final = ((100, BudgetLevel.USED_UP), (80, BudgetLevel.WARNED))
"""Percent of the budget from which on it has this level, the highest first."""
PRIORITY: Final = "priority"
"""Under which the devices stand for which priority is paid; no kind is called so."""
WINDOWS_KEPT: Final = 40
"""Windows of which the past is remembered: a wall clock that is set back finds them as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A budget at one moment."""

    window: str
    ends_wall_ns: int | None
    """When the next window begins; None: never."""
    used: int
    """Grains."""
    limit: int
    """Grains, with what was added."""
    level: BudgetLevel
    next_ns: int | None
    """The instant at which the level rises, or the line bends, if nothing happens before; None: never."""


def budget_id(tenant: TenantId | None, group: GroupId | None, per: BudgetWindow) -> BudgetId:
    """Under what it is filed; no name has a slash in it."""
    return BudgetId(f"{account_of(tenant, group)}/{per}")


def account_of(tenant: TenantId | None, group: GroupId | None) -> str:
    """Whose it is."""
    return f"group/{group}" if tenant is None else f"tenant/{tenant}"


def accounts_of(held: HeldRecord) -> tuple[str, str]:
    """Whose budgets pay for it."""
    return account_of(held.tenant, None), account_of(None, held.group)


def window_of(per: BudgetWindow, wall_ns: int) -> tuple[str, int | None, int | None]:
    """The window of an instant of the wall clock: its name, its beginning and its end."""
    return (str(per), None, None) if per is BudgetWindow.TOTAL else period_of(wall_ns, per)


def bounds(budget: BudgetRecord, wall_ns: int) -> tuple[str, int, int | None]:
    """The part of the present window that counts."""
    name, low_ns, high_ns = window_of(budget.per, wall_ns)
    return name, max(budget.since_wall_ns, low_ns or 0), high_ns


def units_of(parts: Iterable[Part], model_of: Mapping[str, str], *, pays_priority: bool = False) -> dict[str, int]:
    """What is held, by what it is priced by."""
    found: dict[str, int] = {}
    for part in parts:
        model = model_of.get(part.resource, "") if part.kind is Kind.GPU else ""
        what = f"{part.kind}/{model}" if model else str(part.kind)
        found[what] = found.get(what, 0) + (part.millis if part.kind is Kind.GPU else part.amount)
        if pays_priority and part.kind is Kind.GPU:
            found[PRIORITY] = found.get(PRIORITY, 0) + part.millis
    return found


def rates_of(prices: PricesRecord | None) -> Rates:
    """As bills take them. None: no others than those that hold without a file."""
    if prices is None:
        return Rates()
    return Rates(
        currency=prices.currency,
        gpu=prices.gpu,
        models=prices.models,
        cpu=prices.cpu,
        memory=prices.memory,
        block=prices.block,
        priority=prices.priority,
    )


def cost(units: Mapping[str, int], rates: Rates) -> int:
    """Grains for these units, each held for a nanosecond."""
    total = 0
    for what, amount in units.items():
        kind, _, model = what.partition("/")
        total += amount * (rates.priority_grains if kind == PRIORITY else rates.grains(Kind(kind), model))
    return total


def add_past(budget: BudgetRecord, spent: SpentRecord, held: HeldRecord, stop_ns: int) -> None:
    """A holding is over: each window has its part of it."""
    ran_ns = max(0, stop_ns - held.start_ns)
    for window, part_ns in _by_window(budget.per, held.wall_ns, ran_ns, _counts_from(budget, spent, held)):
        past = spent.past.setdefault(window, {})
        for what, units in held.units.items():
            past[what] = past.get(what, 0) + units * part_ns
    for old in sorted(spent.past)[:-WINDOWS_KEPT]:
        del spent.past[old]


def standing(
    budget: BudgetRecord, spent: SpentRecord, holdings: Iterable[HeldRecord], rates: Rates, now: Now
) -> Standing:
    """How it stands now, of all that is held now and was held before."""
    window, low_ns, high_ns = window_of(budget.per, now.wall_ns)
    used = cost(spent.past.get(window, {}), rates)
    slope, bends = 0, []
    for held in holdings:
        each = cost(held.units, rates)
        ran_ns = max(0, now.ns - held.start_ns)
        begin_ns = max(0, max(low_ns or 0, _counts_from(budget, spent, held)) - held.wall_ns)
        end_ns = None if high_ns is None else max(0, high_ns - held.wall_ns)
        used += each * max(0, (ran_ns if end_ns is None else min(ran_ns, end_ns)) - begin_ns)
        if ran_ns < begin_ns:  # the wall clock was set back since the budget is there
            bends.append(held.start_ns + begin_ns)
        elif end_ns is None:
            slope += each
        elif ran_ns < end_ns:
            slope += each
            bends.append(held.start_ns + end_ns)
    limit = (budget.amount + budget.credits.get(window, 0)) * GRAINS_PER_MICRO
    level = _level(used, limit)
    if slope and level is not BudgetLevel.USED_UP:
        percent = 80 if level is BudgetLevel.OPEN else 100
        bends.append(now.ns + -(-(-(-limit * percent // 100) - used) // slope))
    return Standing(
        window=window,
        ends_wall_ns=high_ns,
        used=used,
        limit=limit,
        level=level,
        next_ns=min((at for at in bends if at > now.ns), default=None),
    )


def _level(used: int, limit: int) -> BudgetLevel:
    return next((level for percent, level in THRESHOLDS if used * 100 >= limit * percent), BudgetLevel.OPEN)


def _counts_from(budget: BudgetRecord, spent: SpentRecord, held: HeldRecord) -> int:
    """The instant of the wall clock from which on the budget counts a holding."""
    began_later = spent.since_ns is not None and held.start_ns >= spent.since_ns
    return held.wall_ns if began_later else budget.since_wall_ns


def _by_window(per: BudgetWindow, wall_ns: int, ran_ns: int, from_ns: int) -> Iterator[tuple[str, int]]:
    """The windows of a holding, and for how long it was in each from this instant on, where it was."""
    at_ns, stop_ns = max(wall_ns, from_ns), wall_ns + ran_ns
    while at_ns < stop_ns:
        name, _, high_ns = window_of(per, at_ns)
        until_ns = stop_ns if high_ns is None else min(stop_ns, high_ns)
        yield name, until_ns - at_ns
        at_ns = until_ns
