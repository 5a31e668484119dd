"""Bills add up: over windows, over tenants and over devices, to the last unit."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.engines.local import _rates
from sublet.errors import InvalidRequest
from sublet.office.journal.history import wire_lines
from sublet.office.ledger.bills import Bill, Charge, Holding, Line, Rates, Usage, fold, parse_rates, reconcile, to_csv
from sublet.values import GIB, NS_PER_S, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.http_views import BILL_COLUMNS, BILL_GROUPINGS, SESSION_LABEL, BillLine
from sublet.wire.orders import Metered

HOUR: Final = 3600 * NS_PER_S


def holding(start: int, stop: int, *charges: Charge, wall: int | None = None) -> Holding:
    return Holding(start_ns=start, stop_ns=stop, wall_ns=start if wall is None else wall, charges=charges)


def gpu(millis: int = 1000, model: str = "A", name: str = "n/gpu0") -> Charge:
    return Charge(resource=ResourceId(name), kind=Kind.GPU, units=millis, model=model)


def usage(lease: str, *holdings: Holding, tenant: str = "ada", busy: int = 0, **labels: str) -> Usage:
    return Usage(lease=LeaseId(lease), tenant=TenantId(tenant), holdings=holdings, busy_ns=busy, labels=labels)


def test_a_bill_counts_what_was_held() -> None:
    """Half a device for two hours is one device for one hour; each kind has its own unit."""
    memory = Charge(resource=ResourceId("n/memory"), kind=Kind.MEMORY, units=4 * GIB)
    cores = Charge(resource=ResourceId("n/cpu"), kind=Kind.CPU, units=8)
    block = Charge(resource=ResourceId("n/block"), kind=Kind.BLOCK, units=GIB)
    bill = fold([usage("a", holding(0, 2 * HOUR, gpu(500), memory, cores, block), busy=HOUR)])
    (line,) = bill.lines
    assert (line.leases, line.held_ns, line.busy_ns) == (1, 2 * HOUR, HOUR)
    assert line.gpu_milli_ns == 1000 * HOUR
    assert (line.core_ns, line.memory_byte_ns, line.block_byte_ns) == (16 * HOUR, 8 * GIB * HOUR, 2 * GIB * HOUR)
    assert line.cost == Decimal(1) + 16 * Decimal("0.02") + 8 * Decimal("0.002") + 2 * Decimal("0.0001")
    assert bill.total.cost == line.cost


def test_models_have_prices_of_their_own() -> None:
    rates = Rates(gpu=2_000_000, models={"B": 5_000_000})
    bill = fold(
        [usage("a", holding(0, HOUR, gpu(model="A"))), usage("b", holding(0, HOUR, gpu(model="B")))], rates=rates
    )
    assert [line.cost for line in bill.lines] == [2, 5]


def test_lines_are_sums_by_tenant_or_label() -> None:
    usages = [
        usage("a", holding(0, 10, gpu()), tenant="ada", course="x"),
        usage("b", holding(0, 20, gpu()), tenant="bob", course="x"),
        usage("c", holding(0, 40, gpu()), tenant="ada"),
    ]
    assert [(line.key, line.tenant, line.leases, line.held_ns) for line in fold(usages, by="tenant").lines] == [
        ("ada", "ada", 2, 50),
        ("bob", "bob", 1, 20),
    ]
    assert [(line.key, line.tenant, line.held_ns) for line in fold(usages, by="label:course").lines] == [
        ("", None, 40),
        ("x", None, 30),
    ]


def test_lines_are_sums_by_several_labels_at_once() -> None:
    usages = [
        usage("a", holding(0, 10, gpu()), program="burst", job="x"),
        usage("b", holding(0, 20, gpu()), program="notebook", job="x"),
        usage("c", holding(0, 40, gpu()), program="burst", job="x"),
        usage("d", holding(0, 80, gpu()), job="x"),
    ]
    assert [(line.key, line.held_ns) for line in fold(usages, by="label:program,job").lines] == [
        (",x", 80),
        ("burst,x", 50),
        ("notebook,x", 20),
    ]


def whole_usage(n: int) -> Usage:
    """Something of everything, and no two amounts alike."""
    names = ("memory", "cpu", "block")
    others = [
        Charge(resource=ResourceId(f"n/{name}"), kind=Kind(name), units=n * units)
        for name, units in zip(names, (3 * GIB, 5, 7 * GIB), strict=True)
    ]
    counts = Metered(
        vram_byte_seconds=n * 11, launches=n * 13, failures=n * 17, bytes_in=n * 19, bytes_out=n * 23, fuel=n * 29
    )
    return Usage(
        lease=LeaseId(f"l{n}"),
        tenant=TenantId("ada"),
        labels={"course": "x"},
        holdings=(holding(0, n * HOUR, replace(gpu(n * 100), has_priority=True, vram=n * 41), *others),),
        busy_ns=n * HOUR // 2,
        counts=counts,
        end="released",
        live=True,
        way="told",
        waited_ns=n * 37,
        saved_bytes=n * 29,
        saves=n * 31,
    )


AMOUNTS: Final = tuple(one.name for one in dataclasses.fields(Line) if one.type in ("int", int))


@pytest.mark.parametrize("by", ["tenant", "label:course"])
def test_every_amount_of_a_line_is_part_of_the_sum(by: str) -> None:
    """Derived from the fields of a line, so that a new amount is not forgotten in a sum."""
    usages = [whole_usage(1), whole_usage(2)]
    rates = Rates(priority=7)
    rows, bill = fold(usages, rates=rates).lines, fold(usages, by=by, rates=rates)
    (line,) = bill.lines
    for name in AMOUNTS:
        one, two = (getattr(row, name) for row in rows)
        assert one > 0, name
        assert two > 0, name
        assert getattr(line, name) == getattr(bill.total, name) == one + two, name
    assert line.live


@pytest.mark.parametrize(("by", "per"), [("", None), ("leases", None), ("label:", None), ("lease", "year")])
def test_a_bill_by_something_else_is_refused(by: str, per: str | None) -> None:
    with pytest.raises(InvalidRequest, match="cannot be made"):
        fold([], by=by, per=per)


def test_lines_by_session_are_of_sessions_alone() -> None:
    """A label that a tenant calls `session` is the tenant's own."""
    usages = [
        replace(usage("a", holding(0, 10, gpu())), labels={SESSION_LABEL: "s-1"}),
        replace(usage("b", holding(0, 20, gpu())), labels={SESSION_LABEL: "s-1"}),
        usage("c", holding(0, 40, gpu()), session="s-1"),
    ]
    assert [(line.key, line.held_ns) for line in fold(usages, by="session").lines] == [("", 40), ("s-1", 30)]


def test_a_session_held_what_it_had_a_gpu_for_and_its_volume_beside_that() -> None:
    """The time of its volume's lease was added, so that it had held more than it ever had its GPU."""
    block = Charge(resource=ResourceId("n/block"), kind=Kind.BLOCK, units=GIB)
    usages = [
        replace(usage("a", holding(0, 10 * HOUR, gpu())), labels={SESSION_LABEL: "s-1"}),
        replace(usage("b", holding(0, 90 * HOUR, block)), labels={SESSION_LABEL: "s-1"}),
        usage("c", holding(0, 7 * HOUR, block)),
    ]
    rates = parse_rates("gpu = 1\nblock = 0.5\n")
    bills = {by: fold(usages, by=by, rates=rates) for by in ("session", "tenant", "lease")}
    none, own = bills["session"].lines
    assert (own.key, own.held_ns, own.gpu_milli_ns, own.leases) == ("s-1", 10 * HOUR, 10_000 * HOUR, 2)
    assert own.block_byte_ns == 90 * HOUR * GIB
    assert none.held_ns == 7 * HOUR, "of what is of no session it is said as in any bill"
    for name in ("grains", "held_ns"):
        assert len({sum(getattr(line, name) for line in bill.lines) for bill in bills.values()}) == 1, name


def test_lines_by_group_are_of_the_group_at_the_request() -> None:
    usages = [
        replace(usage("a", holding(0, 10, gpu()), tenant="ada"), group="lab", waited_ns=3, end="preempted"),
        replace(usage("b", holding(0, 20, gpu()), tenant="bob"), group="course", waited_ns=4, end="released"),
        replace(usage("c", holding(5, 9, gpu()), tenant="ada"), group="course", waited_ns=5, end="preempted"),
    ]
    course, lab = fold(usages, by="group").lines
    assert (course.key, course.leases, course.held_ns, course.waited_ns) == ("course", 2, 24, 9)
    assert (course.ended, lab.ended) == ({"preempted": 1, "released": 1}, {"preempted": 1})
    assert lab.key == "lab"


def test_by_device_a_lease_stands_with_each_of_its_devices() -> None:
    """What was held of each is exact; what is known of the lease alone is divided between its GPUs."""
    cores = Charge(resource=ResourceId("n/cpu"), kind=Kind.CPU, units=8)
    usages = [
        replace(
            usage("a", holding(0, HOUR, gpu(), gpu(name="n/gpu1", model="B"), cores), busy=HOUR),
            counts=Metered(launches=7),
        ),
        usage("b", holding(0, HOUR, gpu(500)), busy=10),
    ]
    bill = fold(usages, by="device", rates=Rates(models={"B": 5_000_000}))
    cpu, first, second = bill.lines
    assert [line.key for line in bill.lines] == ["n/cpu", "n/gpu0", "n/gpu1"]
    assert (first.gpu_milli_ns, second.gpu_milli_ns, cpu.core_ns) == (1500 * HOUR, 1000 * HOUR, 8 * HOUR)
    assert (first.cost, second.cost, cpu.cost) == (Decimal("1.5"), Decimal(5), Decimal("0.16"))
    assert (first.launches, second.launches, cpu.launches) == (3, 4, 0)
    assert (first.held_ns, second.held_ns, cpu.held_ns) == (HOUR // 2 + HOUR, HOUR // 2, 0)
    assert (first.uncounted, second.uncounted, cpu.uncounted) == (2, 1, 0), (
        "of neither it is known that all was counted"
    )
    assert (first.leases, second.leases, cpu.leases, bill.total.leases) == (2, 1, 1, 2)


DAY: Final = 24 * HOUR


def test_days_and_months_have_lines_of_their_own() -> None:
    """A lease over a new year: each part in its day, and in UTC."""
    new_year = 1_767_225_600 * NS_PER_S  # 2026-01-01T00:00:00Z
    long = replace(usage("a", holding(0, 36 * HOUR, gpu(), wall=new_year - HOUR)), end="released", waited_ns=7)
    days = fold([long], per="day").lines
    assert [(line.period, line.held_ns // HOUR) for line in days] == [
        ("2025-12-31", 1),
        ("2026-01-01", 24),
        ("2026-01-02", 11),
    ]
    assert [line.waited_ns for line in days] == [7, 0, 0]
    assert [line.ended for line in days] == [{}, {}, {"released": 1}]
    months = fold([long], by="tenant", per="month")
    assert [(line.period, line.key, line.held_ns // HOUR) for line in months.lines] == [
        ("2025-12", "ada", 1),
        ("2026-01", "ada", 35),
    ]
    assert months.total.leases == 1
    assert [line.period for line in fold([long], per="day", since_ns=new_year, until_ns=new_year + 1).lines] == [
        "2026-01-01"
    ]


HELD: Final = (
    *("gpu_milli_ns", "core_ns", "memory_byte_ns", "block_byte_ns", "vram_leased_byte_ns"),
    *("grains", "priority_grains", "held_ns", "busy_ns", "waited_ns"),
)
COUNTS: Final = ("vram_byte_seconds", "launches", "failures", "bytes_moved", "fuel", "bytes_saved", "saves")


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 70 * DAY), st.integers(0, 40 * DAY), st.integers(0, 3), st.integers(0, 99)), max_size=6
    ),
    window=st.tuples(st.integers(0, 50 * DAY), st.integers(1, 90 * DAY)),
)
def test_every_grouping_and_period_has_the_same_sums(
    spans: list[tuple[int, int, int, int]], window: tuple[int, int]
) -> None:
    """By lease, tenant, group, device, session, each as a whole, per day and per month: to the unit."""
    usages = []
    for number, (start, held, device, count) in enumerate(spans):
        held_of = [replace(gpu(700, name=f"n/gpu{index}"), vram=GIB + count) for index in range(device)]
        others = [Charge(resource=ResourceId("n/memory"), kind=Kind.MEMORY, units=GIB + number)]
        stretch = holding(start, start + held, *held_of, *others)
        labels = {SESSION_LABEL: f"s-{number % 2}"} if number % 3 else {}
        made = usage(f"l{number}", stretch, tenant=f"t{number % 2}", busy=held // 3)
        counts = Metered(launches=count, failures=count // 2, bytes_in=count * 3, fuel=count * 5)
        usages.append(
            replace(made, labels=labels, counts=counts, group=f"g{number % 3}", saves=count, waited_ns=count * 7)
        )
    since, until = window[0], window[0] + window[1]
    whole = fold(usages, since_ns=since, until_ns=until).total
    for by in BILL_GROUPINGS:
        for per in (None, "day", "month"):
            lines = fold(usages, by=by, per=per, since_ns=since, until_ns=until).lines
            for name in (*HELD, *COUNTS):
                assert sum(getattr(line, name) for line in lines) == getattr(whole, name), (by, per, name)


def test_what_has_disk_or_memory_alone_is_not_busy() -> None:
    """A session's volume is active as long as its GPU is: the session was busy for that time once."""
    block = Charge(resource=ResourceId("n/block"), kind=Kind.BLOCK, units=GIB)
    memory = Charge(resource=ResourceId("n/memory"), kind=Kind.MEMORY, units=GIB)
    cores = Charge(resource=ResourceId("n/cpu"), kind=Kind.CPU, units=2)
    usages = [
        usage("card", holding(0, 100, replace(gpu(), vram=4 * GIB)), busy=60),
        usage("disk", holding(0, 100, block), busy=90),
        usage("parked", holding(0, 100, memory), busy=90),
        usage("cores", holding(0, 100, cores, memory), busy=30),
    ]
    bill = fold(usages)
    assert {line.key: line.busy_ns for line in bill.lines} == {"card": 60, "cores": 30, "disk": 0, "parked": 0}
    assert (bill.total.busy_ns, bill.total.vram_leased_byte_ns) == (90, 400 * GIB)


def test_a_window_clips_exactly() -> None:
    """From since up to until; what lies outside has no line."""
    usages = [usage("a", holding(100, 200, gpu()), busy=50), usage("b", holding(200, 300, gpu()))]
    bill = fold(usages, since_ns=150, until_ns=200)
    assert [(line.key, line.held_ns, line.busy_ns) for line in bill.lines] == [("a", 50, 25)]
    assert fold(usages, since_ns=300).lines == ()
    with pytest.raises(InvalidRequest, match="ends before it begins"):
        fold(usages, since_ns=5, until_ns=5)


def test_a_wall_clock_that_jumps_makes_nothing_longer() -> None:
    """A holding lies where it began on the wall clock, and lasts as long as the boot clock says."""
    bill = fold([usage("a", holding(100, 200, gpu(), wall=5000))], since_ns=5050)
    assert bill.total.held_ns == 50


holdings = st.builds(
    lambda start, held, wall, millis: holding(start, start + held, gpu(millis), wall=wall),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(1, 1000),
)
usages_of = st.lists(
    st.builds(
        lambda n, tenant, busy, parts: usage(f"l{n}", *parts, tenant=tenant, busy=busy, course=tenant),
        st.integers(0, 10**6),
        st.sampled_from(["ada", "bob", "cid"]),
        st.integers(0, 3000),
        st.lists(holdings, min_size=1, max_size=4),
    ),
    max_size=8,
    unique_by=lambda u: u.lease,
)
SUMMED: Final = ("held_ns", "busy_ns", "gpu_milli_ns", "grains")


def amounts(line: Line) -> list[int]:
    return [getattr(line, name) for name in SUMMED]


@given(usages_of, st.lists(st.integers(-10, 2500), min_size=1, max_size=5, unique=True))
def test_windows_that_meet_add_up(usages: list[Usage], cuts: list[int]) -> None:
    """However a stretch of time is cut, the parts give together what the whole gives; busy time too."""
    edges = [None, *sorted(cuts), None]
    parts = [fold(usages, since_ns=a, until_ns=b).total for a, b in itertools.pairwise(edges)]
    whole = fold(usages).total
    assert [sum(getattr(part, name) for part in parts) for name in SUMMED] == amounts(whole)
    assert all(part.busy_ns <= part.held_ns for part in parts)


@given(usages_of)
def test_every_way_to_sum_has_the_same_total(usages: list[Usage]) -> None:
    for by in ("lease", "tenant", "label:course", "label:none"):
        bill = fold(usages, by=by)
        assert [sum(getattr(line, name) for line in bill.lines) for name in SUMMED] == amounts(bill.total)


@given(usages_of, st.integers(0, 10**9))
def test_a_cost_is_the_fraction_it_should_be(usages: list[Usage], micros: int) -> None:
    """Computed again in fractions, rounded half to even."""
    exact = sum(
        (
            Fraction(charge.units, 1000) * Fraction(h.held_ns, HOUR) * micros
            for u in usages
            for h in u.holdings
            for charge in h.charges
        ),
        start=Fraction(0),
    )
    assert fold(usages, rates=Rates(gpu=micros)).total.cost == Decimal(round(exact)).scaleb(-6)


def test_a_huge_bill_is_exact() -> None:
    """More digits than a float, or the usual decimal context, has."""
    years = 10 * 365 * 24 * HOUR
    block = Charge(resource=ResourceId("n/block"), kind=Kind.BLOCK, units=(1 << 60) - 1)
    bill = fold([usage(f"l{n}", holding(1, years, block)) for n in range(3)])
    assert bill.total.block_byte_ns == 3 * ((1 << 60) - 1) * (years - 1)
    row = next(csv.DictReader(io.StringIO(to_csv(bill))))
    assert Fraction(row["block_byte_seconds"]) == Fraction(((1 << 60) - 1) * (years - 1), NS_PER_S)


# ---- reconcile ----


def test_reconcile_notices_a_nanosecond() -> None:
    usages = [usage("a", holding(0, 10, gpu(500))), usage("b", holding(3, 10, gpu(250)), tenant="bob")]
    devices = {(ResourceId("n/gpu0"), Kind.GPU): 500 * 10 + 250 * 7}
    assert reconcile(usages, devices).ok
    devices[ResourceId("n/gpu0"), Kind.GPU] += 1
    assert not reconcile(usages, devices).ok


# ---- rates ----


def test_rates_are_read_from_toml() -> None:
    rates = parse_rates('currency = "EUR"\ngpu = 1.5\ncpu = 0\n[models]\n"NVIDIA H200" = 3.250001\n')
    assert (rates.currency, rates.gpu, rates.cpu, rates.memory) == ("EUR", 1_500_000, 0, Rates().memory)
    assert rates.models == {"NVIDIA H200": 3_250_001}
    assert parse_rates("") == Rates()
    assert (rates.priority, parse_rates("priority = 0.5").priority) == (None, 500_000)


@pytest.mark.parametrize(
    "text",
    [
        *("gpu = ", "gpu = -1", "gpu = nan", "gpu = inf", "gpu = true", 'gpu = "1"', "gpu = 0.0000001", "gpu = 1e30"),
        *("gpus = 1", "models = 3", "currency = 3", 'currency = ""', 'currency = "a\\tb"', 'currency = " "'),
        '[models]\nx = "a"',
        *("priority = 0", "priority = -1", 'priority = "high"', "[priority]"),
    ],
)
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="rate"):
        parse_rates(text)


def test_an_office_names_the_file_of_rates_that_it_cannot_use(tmp_path: Path) -> None:
    """Also where only a word in it is wrong; and none at all is a price list, too."""
    assert _rates(tmp_path / "rates.toml") == Rates()
    (tmp_path / "rates.toml").write_text("gpu = -1\n")
    with pytest.raises(InvalidRequest, match=r"rates\.toml cannot be used: the rate of 'gpu' is -1"):
        _rates(tmp_path / "rates.toml")


# ---- showing ----


@pytest.mark.parametrize("evil", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "＝1"])
def test_no_cell_of_the_csv_begins_like_a_formula(evil: str) -> None:
    """Labels are written by tenants and opened by whoever pays."""
    bill = fold([usage("a", holding(0, 10, gpu()), course=evil)], by="label:course")
    row = next(csv.DictReader(io.StringIO(to_csv(bill))))
    assert row["key"] == "'" + evil


def test_the_csv_has_each_field_of_a_line_once() -> None:
    assert sorted(BILL_COLUMNS) == sorted(BillLine.__struct_fields__)


def test_the_csv_has_every_digit_and_survives_odd_labels() -> None:
    bill = fold([usage("a", holding(0, 1, gpu(1)), course='he said "a,b"')], by="label:course")
    row = next(csv.DictReader(io.StringIO(to_csv(bill))))
    assert (row["key"], row["gpu_seconds"], row["held_seconds"]) == ('he said "a,b"', "0.000000000001", "0.000000001")
    assert (row["cost"], row["currency"], row["live"]) == ("0.000000", "credits", "no")


def test_an_empty_bill_is_a_bill() -> None:
    bill = fold([usage("never granted")])
    assert bill == Bill(by="lease", currency="credits", lines=(), total=Line(key="total"))
    assert to_csv(bill).count("\n") == 1


def counted(lease: str, counts: Metered | None, *holdings: Holding) -> Usage:
    return replace(usage(lease, *holdings), counts=counts)


def test_what_was_done_on_devices_is_summed_and_what_nobody_counted_is_said() -> None:
    """A lease without devices has nothing to count; one of which nothing was told is not counted as nothing."""
    cores = Charge(resource=ResourceId("n/cpu"), kind=Kind.CPU, units=8)
    exact = Metered(vram_byte_seconds=7, launches=10, failures=1, bytes_in=3, bytes_out=4, is_whole=True)
    partly = Metered(launches=5, is_whole=False)
    bill = fold(
        [
            counted("a", exact, holding(0, HOUR, gpu())),
            counted("b", partly, holding(0, HOUR, gpu())),
            counted("c", None, holding(0, HOUR, gpu())),
            counted("d", None, holding(0, HOUR, cores)),
        ]
    )
    assert [line.uncounted for line in bill.lines] == [0, 1, 1, 0]
    total = bill.total
    assert (total.launches, total.failures, total.bytes_moved, total.vram_byte_seconds) == (15, 1, 7, 7)
    assert total.uncounted == 2
    rows = list(csv.DictReader(io.StringIO(to_csv(bill))))
    assert [(row["launches"], row["launch_errors"], row["bytes_moved"], row["uncounted"]) for row in rows] == [
        ("10", "1", "7", "0"),
        ("5", "0", "0", "1"),
        ("not counted", "0", "0", "1"),
        ("0", "0", "0", "0"),
    ]
    assert [line.launches for line in wire_lines(bill)] == [10, 5, None, 0], "never 0 where some may have run"


@given(st.integers(1, 1 << 70), st.lists(st.integers(1, 3 * HOUR), min_size=1, max_size=5))
def test_counts_of_windows_that_meet_add_up(launches: int, cuts: list[int]) -> None:
    """Each window has its share, and nothing is lost between them."""
    usages = [counted("a", Metered(launches=launches), holding(0, HOUR, gpu()), holding(2 * HOUR, 3 * HOUR, gpu()))]
    edges = [None, *sorted(set(cuts)), None]
    shares = [fold(usages, since_ns=low, until_ns=high).total.launches for low, high in itertools.pairwise(edges)]
    assert sum(shares) == launches
