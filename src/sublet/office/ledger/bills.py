"""Bills: what was held and what it costs, in integers throughout.

A *usage* is what one lease held and when; ``office.journal.history`` makes usages from the audit chain, and this module
folds them into lines. Nothing is rounded on the way: device time is counted in thousandths of a device times
nanoseconds, the rest in cores or bytes times nanoseconds, and money in a unit so small that every rate divides it. Only
what is shown is rounded, once, so the sum over the lines of any bill is the sum over tenants, and that is the sum over
devices (``reconcile`` computes both sides in different ways and compares). A holding lies on the wall clock where it
began, and lasts as long as the boot clock says. A wall clock that jumps therefore makes nothing longer or shorter, and
two windows that meet give together exactly what one window gives.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.values import GIB, MILLIS_PER_DEVICE, NS_PER_S, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.http_views import BILL_COLUMNS, SESSION_LABEL, check_grouping
from sublet.wire.orders import Metered

# ---- what was used ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """So much of one resource."""

    resource: ResourceId
    kind: Kind
    units: int
    """Thousandths of a device, cores, or bytes."""
    model: str = ""
    has_priority: bool = False
    """A GPU whose holder pays for priority."""
    vram: int = 0
    """Of a GPU: the bytes of its memory that are leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One stretch from a grant to the beginning of its end."""

    start_ns: int
    stop_ns: int
    wall_ns: int
    """Where on the wall clock it began."""
    charges: tuple[Charge, ...]

    @property
    def held_ns(self) -> int:
        return self.stop_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one lease held, up to its end or up to now."""

    lease: LeaseId
    tenant: TenantId
    labels: Mapping[str, str] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    busy_ns: int = 0
    counts: Metered | None = None
    """What was done on its devices, as far as it was counted; known once it has ended."""
    end: str | None = None
    """The reason, once it ended."""
    live: bool = False
    way: str = ""
    """How its devices were taken back, where guests were on them."""
    is_volume: bool = False
    """It is no lease, but what was kept of one."""
    saved_bytes: int = 0
    """Written by the checkpoints that were published under it."""
    saves: int = 0
    group: str = ""
    """That its tenant was in when it was asked for."""
    waited_ns: int = 0
    """From the request to the first grant."""


# ---- what it costs ----

_NS_PER_HOUR: Final = 3600 * NS_PER_S
_MICRO: Final = 1_000_000
GRAINS_PER_MICRO: Final = MILLIS_PER_DEVICE * GIB * _NS_PER_HOUR
"""Grains in one unit of money: a millionth per hour divides evenly for any thousandth, byte and nanosecond."""
_PER_UNIT: Final = {Kind.GPU: GIB, Kind.CPU: MILLIS_PER_DEVICE * GIB, Kind.MEMORY: MILLIS_PER_DEVICE}
_PER_UNIT[Kind.BLOCK] = _PER_UNIT[Kind.MEMORY]
_RATE_MAX: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Prices in millionths of a unit of money, per hour."""

    currency: str = "credits"
    """What a unit of it is called, wherever a cost is shown."""
    gpu: int = _MICRO
    """One whole device of a model that has no price of its own."""
    models: Mapping[str, int] = field(default_factory=dict)
    cpu: int = 20_000
    """One core."""
    memory: int = 2_000
    """One GiB."""
    block: int = 100
    """One GiB."""

    priority: int | None = None
    """What a device costs more where its holder pays for priority. None: priority is not for sale."""

    missing: tuple[str, ...] = field(default=(), compare=False)
    """Prices that a file of rates does not give, so that the ones above hold. A budget needs all of them."""

    def of(self, kind: Kind, model: str = "") -> int:
        """The price of a device, a core or a GiB for an hour."""
        match kind:
            case Kind.GPU:
                return self.models.get(model, self.gpu)
            case Kind.CPU:
                return self.cpu
            case Kind.MEMORY:
                return self.memory
            case Kind.BLOCK:
                return self.block

    def grains(self, kind: Kind, model: str = "") -> int:
        """The price of one thousandth of a device, core or byte for a nanosecond, in parts of a millionth of a unit of
        money; ``GRAINS_PER_MICRO`` of them are one millionth."""
        return self.of(kind, model) * _PER_UNIT[kind]

    @property
    def priority_grains(self) -> int:
        """What a thousandth of a device costs more, for a nanosecond, where its holder pays for priority."""
        return (self.priority or 0) * _PER_UNIT[Kind.GPU]


def parse_rates(text: str) -> Rates:
    """From TOML, prices per hour::

    currency = "EUR"
    gpu = 1.50          # a device of any model not named below
    cpu = 0.02          # a core
    memory = 0.002      # a GiB
    block = 0.0001      # a GiB
    priority = 0.50     # a device whose holder pays for priority, beside its price (default: not for sale)

    [models]
    "NVIDIA H200" = 3.25
    """
    try:
        table = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"the rates cannot be read ({error})", do="Write them as TOML.") from error
    models = table.pop("models", {})
    currency = table.pop("currency", Rates().currency)
    if not isinstance(models, dict):
        raise InvalidRequest("the rates need [models] as a table", do=_RATES_DO)
    if not isinstance(currency, str) or len(currency) > 16 or not currency.strip() or not currency.isprintable():
        raise InvalidRequest("the currency of the rates cannot be shown", do='Give a short word, such as "EUR".')
    priority = None if "priority" not in table else _micros(table.pop("priority"), "priority")
    if priority == 0:
        raise InvalidRequest(
            "the rate of 'priority' is 0", do="Give a price per hour above 0, or leave it out: then none is for sale."
        )
    unknown = table.keys() - set(_PRICES)
    if unknown:
        raise InvalidRequest(f"the rates have an unknown entry {min(unknown)!r}", do=_RATES_DO)
    prices = {name: _micros(price, name) for name, price in table.items()}
    missing = tuple(name for name in _PRICES if name not in prices)
    models = {name: _micros(price, name) for name, price in models.items()}
    return Rates(currency=currency, models=models, priority=priority, missing=missing, **prices)


_PRICES: Final = ("gpu", "cpu", "memory", "block")
_RATES_DO: Final = "Give gpu, cpu, memory, block and [models] as prices per hour, with at most six decimals."


def _micros(price: object, name: str) -> int:
    if isinstance(price, bool) or not isinstance(price, int | Decimal):
        raise InvalidRequest(f"the rate of {name!r} is not a number", do=_RATES_DO)
    micros = Decimal(price) * _MICRO
    if not micros.is_finite() or not 0 <= micros <= _RATE_MAX * _MICRO or micros != micros.to_integral_value():
        raise InvalidRequest(f"the rate of {name!r} is {price}", do=_RATES_DO)
    return int(micros)


# ---- the fold ----


@dataclass(slots=True, kw_only=True)
class Line:
    """One row: a lease, or a sum over leases. Every amount is exact."""

    key: str
    tenant: TenantId | None = None
    leases: int = 0
    held_ns: int = 0
    busy_ns: int = 0
    gpu_milli_ns: int = 0
    core_ns: int = 0
    memory_byte_ns: int = 0
    block_byte_ns: int = 0
    vram_byte_seconds: int = 0
    """Allocated through Sublet, which is not what was leased."""
    vram_leased_byte_ns: int = 0
    """Bytes of GPU memory that were leased, times how long."""
    launches: int = 0
    failures: int = 0
    bytes_moved: int = 0
    """Between programs and devices."""
    bytes_saved: int = 0
    """By checkpoints."""
    saves: int = 0
    fuel: int = 0
    """That WASM tasklets used."""
    waited_ns: int = 0
    """In the queue, of leases whose first grant lies in the window."""
    uncounted: int = 0
    """Leases of devices on which something ran that is not counted (a framework, a command), or of which nothing was
    told yet: the four numbers before this one leave that out."""
    grains: int = 0
    """The price, exact; ``cost`` is for showing."""
    priority_grains: int = 0
    """The part of it that was paid for priority."""
    period: str = ""
    ended: dict[str, int] = field(default_factory=dict)
    """Leases whose end lies in the window, by reason."""
    end: str | None = None
    ended_wall_ns: int | None = None
    """When, where the line is of one lease that has ended."""
    live: bool = False
    way: str = ""

    @property
    def cost(self) -> Decimal:
        """Rounded to a millionth, half to even; computed in integers, so no amount is too large for it."""
        return _scaled(micros_of(self.grains), 6)

    @property
    def priority_cost(self) -> Decimal:
        """The part of the cost that was paid for priority, rounded in the same way."""
        return _scaled(micros_of(self.priority_grains), 6)

    def charge(self, charge: Charge, part_ns: int, rates: Rates) -> None:
        """Add what was held of one resource for so long, and its price."""
        self.add(charge.kind, charge.units * part_ns)
        self.vram_leased_byte_ns += charge.vram * part_ns
        extra = charge.units * part_ns * rates.priority_grains if charge.has_priority else 0
        self.grains += charge.units * part_ns * rates.grains(charge.kind, charge.model) + extra
        self.priority_grains += extra

    @property
    def known_launches(self) -> int | None:
        """None where none was counted though there may have been some: frameworks and commands count none."""
        return None if self.uncounted and not self.launches else self.launches

    def add(self, kind: Kind, unit_ns: int) -> None:
        match kind:
            case Kind.GPU:
                self.gpu_milli_ns += unit_ns
            case Kind.CPU:
                self.core_ns += unit_ns
            case Kind.MEMORY:
                self.memory_byte_ns += unit_ns
            case Kind.BLOCK:
                self.block_byte_ns += unit_ns

    def of(self, kind: Kind) -> int:
        """Units times nanoseconds."""
        match kind:
            case Kind.GPU:
                return self.gpu_milli_ns
            case Kind.CPU:
                return self.core_ns
            case Kind.MEMORY:
                return self.memory_byte_ns
            case Kind.BLOCK:
                return self.block_byte_ns


def micros_of(grains: int) -> int:
    """Millionths of a unit of money, half to even."""
    micros, rest = divmod(grains, GRAINS_PER_MICRO)
    return micros + (2 * rest > GRAINS_PER_MICRO or (2 * rest == GRAINS_PER_MICRO and micros % 2 == 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Lines in the order of their keys, and their sum."""

    by: str
    currency: str
    lines: tuple[Line, ...]
    total: Line


def fold(
    usages: Iterable[Usage],
    *,
    by: str = "lease",
    per: str | None = None,
    rates: Rates | None = None,
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> Bill:
    """Sum by one of ``GROUPINGS``, ``label:KEY`` or ``label:KEY,KEY``, from ``since`` up to ``until`` of wall time.

    A lease that held nothing in the window has no part in the bill. Leases without the label share the line ""; the
    values of several labels are joined with commas. With ``per`` each day or month (UTC) has lines of its own. By
    device a lease of two devices stands in both lines: what it held of each, and its price, are exact; what is known of
    the lease alone (how long it was held, busy time, launches) is divided between its GPUs, or where it had none
    between all that it held. So every amount adds up to the same in every grouping. What counts leases (``leases``,
    ``ended``, ``uncounted``) is no amount: a lease counts in each line, of a device or a period, that it has a part in.
    """
    rates = rates or Rates()
    check_window(since_ns, until_ns)
    check_grouping(by, per)
    lines: dict[tuple[str, str], Line] = {}
    total = Line(key="total")
    for usage in usages:
        row = _row(usage, rates, since_ns, until_ns)
        if row is None:
            continue
        _sum(total, row)
        for period, low_ns, high_ns in _periods(usage, per, since_ns, until_ns):
            part = _row(usage, rates, low_ns, high_ns) if per else row
            if part is None:
                continue
            part.period = period
            shares = _by_device(usage, part, rates, low_ns, high_ns) if by == "device" else {_key(usage, by): part}
            if by == "lease" and (period, usage.lease) not in lines:  # a volume has one usage for each of its groups
                lines[period, usage.lease] = part
                continue
            for key, share in shares.items():
                tenant = usage.tenant if by == "tenant" else None
                _sum(lines.setdefault((period, key), Line(key=key, period=period, tenant=tenant)), share)
    return Bill(by=by, currency=rates.currency, lines=tuple(lines[key] for key in sorted(lines)), total=total)


def check_window(since_ns: int | None, until_ns: int | None) -> None:
    """Raises ``InvalidRequest`` for a window that ends before it begins."""
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise InvalidRequest("the window of the bill ends before it begins", do="Give since before until.")


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _key(usage: Usage, by: str) -> str:
    match by:
        case "tenant":
            return usage.tenant
        case "lease":
            return usage.lease
        case "group":
            return usage.group
        case "session":
            return usage.labels.get(SESSION_LABEL, "")
        case _:
            return ",".join(usage.labels.get(key, "") for key in by.removeprefix("label:").split(","))


def _periods(
    usage: Usage, per: str | None, since_ns: int | None, until_ns: int | None
) -> Iterator[tuple[str, int | None, int | None]]:
    """The days or months in which it held something: name, beginning and end, within the window."""
    if per is None:
        yield "", since_ns, until_ns
        return
    begun: set[int] = set()
    for holding in usage.holdings:
        at_ns = holding.wall_ns if since_ns is None else max(since_ns, holding.wall_ns)
        end_ns = holding.wall_ns + holding.held_ns
        end_ns = end_ns if until_ns is None else min(until_ns - 1, end_ns)
        while at_ns <= end_ns:
            name, low_ns, high_ns = period_of(at_ns, per)
            if low_ns not in begun:
                begun.add(low_ns)
                low = low_ns if since_ns is None else max(low_ns, since_ns)
                yield name, low, high_ns if until_ns is None else min(high_ns, until_ns)
            at_ns = high_ns


def period_of(wall_ns: int, per: str) -> tuple[str, int, int]:
    """The day or month (UTC) of an instant: its name, its beginning and its end."""
    at = _EPOCH + timedelta(seconds=wall_ns // NS_PER_S)
    low = at.replace(hour=0, minute=0, second=0)
    if per == "day":
        return f"{low:%Y-%m-%d}", _wall_ns(low), _wall_ns(low + timedelta(days=1))
    low = low.replace(day=1)
    return f"{low:%Y-%m}", _wall_ns(low), _wall_ns((low + timedelta(days=31)).replace(day=1))


def _wall_ns(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(seconds=1) * NS_PER_S


_WORKING: Final = (Kind.GPU, Kind.CPU)
"""What is busy. Disk and memory alone are beside a GPU of the same program, whose time would be counted twice."""


def _row(usage: Usage, rates: Rates, since_ns: int | None, until_ns: int | None) -> Line | None:
    row = Line(
        key=usage.lease,
        tenant=usage.tenant,
        leases=0 if usage.is_volume else 1,
        end=usage.end,
        live=usage.live,
        way=usage.way,
    )
    held_ns = sum(holding.held_ns for holding in usage.holdings)
    # A session has its volume beside its GPU, and a suspended program of it has none: that is no time of its own.
    is_beside = bool(usage.labels.get(SESSION_LABEL)) and not _has_device(usage)
    can_be_busy = any(charge.kind in _WORKING for holding in usage.holdings for charge in holding.charges)
    busy_ns = min(usage.busy_ns, held_ns) if can_be_busy and not is_beside else 0
    inside, before_ns = False, 0
    for holding in usage.holdings:
        low_ns, high_ns = _clip(holding, since_ns, until_ns)
        if high_ns > low_ns or (not holding.held_ns and _within(holding.wall_ns, since_ns, until_ns)):
            inside = True
            part_ns = high_ns - low_ns
            row.held_ns += 0 if is_beside else part_ns
            # Busy time is known of the lease, not of each moment: a window has its share of it. Rounding the running
            # sums, not the shares, lets windows that meet add up.
            row.busy_ns += _share(busy_ns, before_ns + high_ns, held_ns) - _share(busy_ns, before_ns + low_ns, held_ns)
            _count(row, usage, before_ns + low_ns, before_ns + high_ns, held_ns)
            for charge in holding.charges:
                row.charge(charge, part_ns, rates)
        before_ns += holding.held_ns
    if inside:
        first, last = usage.holdings[0], usage.holdings[-1]
        if usage.end is not None and not usage.is_volume:
            row.ended_wall_ns = last.wall_ns + last.held_ns
        if _within(first.wall_ns, since_ns, until_ns):
            row.waited_ns = usage.waited_ns
        if usage.end is not None and not usage.is_volume and _within(last.wall_ns + last.held_ns, since_ns, until_ns):
            row.ended[usage.end] = 1
    return row if inside else None


def _by_device(
    usage: Usage, row: Line, rates: Rates, since_ns: int | None, until_ns: int | None
) -> dict[ResourceId, Line]:
    """Divide the row of a lease between the devices that it held in the window; their sum is the row."""
    found: dict[ResourceId, Line] = {}
    gpus: dict[ResourceId, None] = {}
    for holding in usage.holdings:
        low_ns, high_ns = _clip(holding, since_ns, until_ns)
        if high_ns > low_ns or (not holding.held_ns and _within(holding.wall_ns, since_ns, until_ns)):
            for charge in holding.charges:
                found.setdefault(charge.resource, Line(key=charge.resource)).charge(charge, high_ns - low_ns, rates)
            cards = dict.fromkeys(charge.resource for charge in holding.charges if charge.kind is Kind.GPU)
            gpus |= cards
            if row.held_ns:
                bearers = cards or dict.fromkeys(charge.resource for charge in holding.charges)
                for resource, part_ns in _divided(high_ns - low_ns, bearers):
                    found[resource].held_ns += part_ns
    for line in found.values():
        line.leases, line.live, line.ended = row.leases, row.live, dict(row.ended)
    for resource in gpus or found:
        found[resource].uncounted = row.uncounted
    for name in ("busy_ns", "waited_ns", *_COUNTED, "bytes_saved", "saves"):
        for resource, part in _divided(getattr(row, name), gpus or found):
            setattr(found[resource], name, part)
    return found


def _divided(whole: int, bearers: Iterable[ResourceId]) -> Iterator[tuple[ResourceId, int]]:
    """Equal shares of an amount, which come to the whole."""
    names = list(bearers)
    for index, resource in enumerate(names):
        yield resource, whole * (index + 1) // len(names) - whole * index // len(names)


_COUNTED: Final[Mapping[str, Callable[[Metered], int]]] = {
    "vram_byte_seconds": lambda counts: counts.vram_byte_seconds,
    "launches": lambda counts: counts.launches,
    "failures": lambda counts: counts.failures,
    "bytes_moved": lambda counts: counts.bytes_in + counts.bytes_out,
    "fuel": lambda counts: counts.fuel,
}


def _has_device(usage: Usage) -> bool:
    return any(charge.kind is Kind.GPU for holding in usage.holdings for charge in holding.charges)


def _count(row: Line, usage: Usage, low_ns: int, high_ns: int, held_ns: int) -> None:
    """What was counted, and a window's share of it, as with busy time: exact of a lease as a whole."""
    counts = usage.counts
    row.uncounted = int(_has_device(usage) and (counts is None or not counts.is_whole))
    amounts = {"bytes_saved": usage.saved_bytes, "saves": usage.saves}
    if counts is not None:
        amounts |= {name: of(counts) for name, of in _COUNTED.items()}
    for name, amount in amounts.items():
        share = _share(amount, high_ns, held_ns) - _share(amount, low_ns, held_ns)
        setattr(row, name, getattr(row, name) + share)


def _clip(holding: Holding, since_ns: int | None, until_ns: int | None) -> tuple[int, int]:
    """The part of a holding inside the window, counted from its beginning."""
    low = 0 if since_ns is None else min(max(since_ns - holding.wall_ns, 0), holding.held_ns)
    high = holding.held_ns if until_ns is None else min(max(until_ns - holding.wall_ns, 0), holding.held_ns)
    return low, high


def _within(wall_ns: int, since_ns: int | None, until_ns: int | None) -> bool:
    return (since_ns is None or since_ns <= wall_ns) and (until_ns is None or wall_ns < until_ns)


def _share(busy_ns: int, part_ns: int, whole_ns: int) -> int:
    return busy_ns * part_ns // whole_ns if whole_ns else 0


def _sum(line: Line, row: Line) -> None:
    line.leases += row.leases
    line.held_ns += row.held_ns
    line.busy_ns += row.busy_ns
    line.grains += row.grains
    line.priority_grains += row.priority_grains
    line.vram_leased_byte_ns += row.vram_leased_byte_ns
    line.uncounted += row.uncounted
    line.waited_ns += row.waited_ns
    for name in (*_COUNTED, "bytes_saved", "saves"):
        setattr(line, name, getattr(line, name) + getattr(row, name))
    for reason, count in row.ended.items():
        line.ended[reason] = line.ended.get(reason, 0) + count
    line.live = line.live or row.live
    for kind in Kind:
        line.add(kind, row.of(kind))


# ---- both sides of the account ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Units times nanoseconds by kind: what tenants held, and what was held of the devices."""

    tenants: Mapping[Kind, int]
    devices: Mapping[Kind, int]

    @property
    def ok(self) -> bool:
        return self.tenants == self.devices


def reconcile(usages: Iterable[Usage], devices: Mapping[tuple[ResourceId, Kind], int]) -> Reconciliation:
    """Compare the sum over tenants with the sum over devices, which must be equal to the nanosecond.

    ``devices`` has been computed without ever looking at a lease's interval (``office.journal.history`` says how).
    """
    bill = fold(usages, by="tenant")
    by_kind = dict.fromkeys(Kind, 0)
    for (_, kind), unit_ns in devices.items():
        by_kind[kind] += unit_ns
    return Reconciliation(tenants={kind: sum(line.of(kind) for line in bill.lines) for kind in Kind}, devices=by_kind)


# ---- showing it ----


def _scaled(amount: int, decimals: int) -> Decimal:
    """``amount / 10**decimals``, exactly; the usual context of 28 digits would round a long bill."""
    with localcontext() as context:
        context.prec = max(1, len(str(amount)))
        return Decimal(amount).scaleb(-decimals)


NOT_COUNTED: Final = "not counted"
"""In the place of a number in the CSV."""


def to_csv(bill: Bill) -> str:
    """All digits, one row per line, and no total: a table program would count it twice."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(BILL_COLUMNS)
    for line in bill.lines:
        writer.writerow(
            (
                _escape_formula(line.key),
                _escape_formula(line.tenant or ""),
                line.leases,
                f"{_scaled(line.held_ns, 9):f}",
                f"{_scaled(line.busy_ns, 9):f}",
                f"{_scaled(line.gpu_milli_ns, 12):f}",
                f"{_scaled(line.core_ns, 9):f}",
                f"{_scaled(line.memory_byte_ns, 9):f}",
                f"{_scaled(line.block_byte_ns, 9):f}",
                line.vram_byte_seconds,
                NOT_COUNTED if line.known_launches is None else line.launches,
                line.failures,
                line.bytes_moved,
                line.uncounted,
                f"{line.cost:f}",
                _escape_formula(bill.currency),
                line.end or "",
                "yes" if line.live else "no",
                line.way,
                line.bytes_saved,
                line.saves,
                line.fuel,
                line.period,
                f"{_scaled(line.waited_ns, 9):f}",
                " ".join(f"{reason}:{count}" for reason, count in sorted(line.ended.items())),
                f"{line.priority_cost:f}",
                f"{_scaled(line.vram_leased_byte_ns, 9):f}",
                "" if line.ended_wall_ns is None else rfc3339(line.ended_wall_ns),
            )
        )
    return out.getvalue()


def _escape_formula(text: str) -> str:
    """Labels come from tenants, and a table program would run a cell that begins like a formula."""
    first = text.lstrip()[:1]
    return "'" + text if (first and first in "=+-@＝＋－＠") or text[:1] in ("\t", "\r", "\n") else text
