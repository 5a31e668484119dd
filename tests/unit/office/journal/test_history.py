"""From events to usages: what a lease held, by the rules of grants and ends."""

from __future__ import annotations

import csv
import dataclasses
import io
import random
from decimal import Decimal
from typing import Final

import msgspec
import pytest

from sublet.errors import JournalError
from sublet.lease_end import EndReason
from sublet.office.journal.history import AuditHistory, wire_lines
from sublet.office.ledger import events as ev
from sublet.office.ledger.bills import Bill, Holding, Line, Rates, fold, reconcile, to_csv
from sublet.office.ledger.records import EndRecord, TenantRecord
from sublet.values import GIB, Epoch, GroupId, Kind, LeaseId, NodeId, ResourceId, TenantId
from sublet.wire.http_views import BILL_GROUPINGS, SESSION_LABEL
from sublet.wire.orders import Device, Metered, Part, Saved
from tests.unit.office.journal.making import (
    GPU,
    OPENED,
    Place,
    at,
    ended,
    ending,
    granted,
    joined,
    part,
    queued,
    renewed,
)

Told = list[tuple[int, ev.Event]]


def history(place: Place, told: Told) -> AuditHistory:
    """Through the real journal: what is not in the chain cannot be on a bill."""
    with place.open() as journal:
        for ns, event in told:
            journal.commit([event], at(ns))
        return AuditHistory().read(journal.records())


def held(past: AuditHistory, now_ns: int) -> dict[str, list[tuple[int, int]]]:
    return {u.lease: [(h.start_ns, h.stop_ns) for h in u.holdings] for u in past.usages(now_ns)}


def test_a_lease_is_held_from_its_grant_until_its_end_begins(place: Place) -> None:
    """Waiting costs nothing before, teardown nothing after; a renewal in between changes nothing."""
    past = history(
        place,
        [(1, queued("a")), (10, granted("a", 1)), (20, renewed("a")), (40, ending("a", 40, 7)), (90, ended("a", 90))],
    )
    (usage,) = past.usages(1000)
    assert [(h.start_ns, h.stop_ns, h.wall_ns) for h in usage.holdings] == [(10, 40, at(10).wall_ns)]
    assert (usage.busy_ns, usage.end, usage.live) == (7, "released", False)


def test_a_live_lease_is_billed_up_to_now(place: Place) -> None:
    past = history(place, [(1, queued("a")), (10, granted("a", 1))])
    (usage,) = past.usages(25, {LeaseId("a"): 4})
    assert [(h.start_ns, h.stop_ns) for h in usage.holdings] == [(10, 25)]
    assert (usage.live, usage.busy_ns, usage.end) == (True, 4, None)


def test_a_request_that_was_never_granted_is_on_no_bill(place: Place) -> None:
    assert held(history(place, [(1, queued("a")), (9, ended("a", 9))]), 99) == {}


def test_the_group_on_the_bill_is_that_at_the_request(place: Place) -> None:
    """Whoever moves to another group later takes along nothing of what was held before."""

    def moved(group: str | None) -> ev.Event:
        return ev.TenantSet(tenant=TenantRecord(id=TenantId("ada"), group=None if group is None else GroupId(group)))

    told: Told = [(1, queued("a")), (2, moved("lab")), (3, queued("b")), (4, moved(None)), (5, queued("c"))]
    told += [(10 + number, granted(name, number + 1)) for number, name in enumerate("abc")]
    assert {u.lease: u.group for u in history(place, told).usages(99)} == {"a": "default", "b": "lab", "c": "default"}


def test_the_wait_is_from_the_request_to_the_first_grant_whatever_clock_came_between(place: Place) -> None:
    """A machine that was started anew counts instants from another beginning."""
    rebased = ev.Rebased(clock_domain="boot-2", shift_ns=-1_000, extended_ns=0)
    told: Told = [(1_000, queued("a")), (10, rebased), (40, granted("a", 1)), (90, ended("a", 90))]
    (usage,) = history(place, told).usages(200)
    assert usage.waited_ns == 40


def test_an_offer_costs_nothing_until_it_is_accepted(place: Place) -> None:
    """One that is declined is on no bill; of one that is accepted the time before that was a wait."""
    told: Told = [
        (1, queued("a")),
        (10, offered("a", 1)),
        (15, ev.Ungranted(lease=LeaseId("a"), detail="declined")),
        (30, offered("a", 2)),
        (40, ev.Claimed(lease=LeaseId("a"), deadline_ns=99, number=1)),
        (50, ending("a", 50)),
    ]
    assert held(history(place, told[:4]), 35) == {}, "one that is open costs nothing either"
    past = history(place, told)
    assert held(past, 99) == {"a": [(40, 50)]}
    assert [usage.waited_ns for usage in past.usages(99)] == [39]
    assert reconcile(past.usages(99), past.devices(99)).ok


def offered(name: str, n: int, *parts: Part) -> ev.Granted:
    return msgspec.structs.replace(granted(name, n, *parts), offered=True)


def test_nothing_was_worked_under_an_offer_that_was_declined(place: Place) -> None:
    told: Told = [
        (1, queued("a")),
        (10, granted("a", 1)),
        (15, ev.Ungranted(lease=LeaseId("a"), detail="declined")),
        (20, ended("a", 20)),
    ]
    (usage,) = history(place, told).usages(99)
    assert (usage.busy_ns, usage.end, usage.live) == (0, "released", False)


def test_an_end_that_came_while_the_office_was_down_counts_from_then(place: Place) -> None:
    """The agent ended it at its deadline; the journal heard of it later."""
    base: Told = [(1, queued("a")), (10, granted("a", 1))]
    assert held(history(place, [*base, (80, ending("a", 60))]), 99) == {"a": [(10, 60)]}


@pytest.mark.parametrize(("said", "counts"), [(5, 10), (95, 80)])
def test_an_end_outside_the_holding_is_bounded_by_it(place: Place, said: int, counts: int) -> None:
    told: Told = [(1, queued("a")), (10, granted("a", 1)), (80, ending("a", said))]
    assert held(history(place, told), 99) == {"a": [(10, counts)]}


def test_another_clock_moves_what_is_held_but_lengthens_nothing(place: Place) -> None:
    """Held 30 before a reboot and 12 after it: 42, wherever the clocks started."""
    told: Told = [
        (1000, queued("old")),
        (1000, granted("old", 1)),
        (1010, ending("old", 1010)),
        (1000, queued("a")),
        (1000, granted("a", 2)),
        (5, ev.Rebased(clock_domain="boot-2", shift_ns=5 - 1030, extended_ns=0)),
        (17, ending("a", 17)),
    ]
    past = history(place, told)
    assert {name: stop - start for name, [(start, stop)] in held(past, 99).items()} == {"old": 10, "a": 42}
    assert past.devices(99)[GPU, Kind.GPU] == 1000 * 52


def test_the_model_is_that_of_the_device_at_the_grant(place: Place) -> None:
    def card(model: str) -> Device:
        return Device(id=GPU, kind=Kind.GPU, capacity=1, model=model)

    told: Told = [
        (1, joined(card("A"))),
        (2, queued("a")),
        (3, granted("a", 1)),
        (4, ending("a", 4)),
        (5, joined(card("B"))),
        (6, queued("b")),
        (7, granted("b", 2)),
    ]
    models = [u.holdings[0].charges[0].model for u in history(place, told).usages(9)]
    assert models == ["A", "B"]


def test_a_chain_that_was_touched_gives_no_bill(place: Place) -> None:
    with place.open() as journal:
        journal.commit([OPENED, queued("a"), granted("a", 1)], at(1))
        records = list(journal.records())
    records[2] = records[2]._replace(body=records[2].body.replace(b"ada", b"bob"))
    with pytest.raises(JournalError, match="no bill can be made"):
        AuditHistory().read(records)


def test_history_can_be_read_in_parts(place: Place) -> None:
    """As an office does that keeps it and reads what is new."""
    with place.open() as journal:
        journal.commit([queued("a"), granted("a", 1)], at(10))
        past = AuditHistory().read(journal.records())
        journal.commit([renewed("a"), ending("a", 20)], at(20))
        past.read(journal.records(after=past.seq))
        assert held(past, 99) == held(AuditHistory().read(journal.records()), 99) == {"a": [(10, 20)]}


SEEDS: Final = range(40)


class RandomPast:
    """Random requests, grants, offers, ends, checkpoints and reboots, with and without sessions; and a naive sum."""

    def __init__(self, seed: int) -> None:
        self.chance, self.told = random.Random(seed), Told()
        self.ns, self.naive = 1000, 0
        self.live: dict[str, tuple[int, int]] = {}
        """Since when, and thousandths of devices."""
        self.open_offers: dict[str, int] = {}
        for number in range(80):
            self.ns += self.chance.randrange(0, 50)
            self._step(number)
        self.naive += sum(millis * (self.ns - start) for start, millis in self.live.values())

    def _step(self, number: int) -> None:
        chance, ns = self.chance, self.ns
        match chance.randrange(8):
            case 0 | 1 | 2:
                self._ask(f"l{number}", number)
            case 3 if self.live:
                name = chance.choice(sorted(self.live))
                start, millis = self.live.pop(name)
                stop = max(start, ns - chance.randrange(0, 30))
                self.naive += millis * (stop - start)
                busy_ns = chance.randrange(0, stop - start + 1)
                end = EndRecord(reason=chance.choice(list(EndReason)), at_ns=stop, wall_ns=at(stop).wall_ns)
                self._tell(ev.Ending(lease=LeaseId(name), end=end, number=2, busy_ns=busy_ns))
                counts = Metered(
                    vram_byte_seconds=chance.randrange(99),
                    launches=chance.randrange(99),
                    failures=chance.randrange(9),
                    bytes_in=chance.randrange(99),
                    fuel=chance.randrange(99),
                    is_whole=chance.random() < 0.5,
                )
                self._tell(ev.Metered(lease=LeaseId(name), counts=counts))
            case 4 if self.live:
                lease = LeaseId(chance.choice(sorted(self.live)))
                self._tell(
                    ev.Saved(lease=lease, saved=Saved(version=1, wall_ns=ns, size=chance.randrange(99), count=3))
                )
            case 5 if self.open_offers:
                name = chance.choice(sorted(self.open_offers))
                millis = self.open_offers.pop(name)
                if chance.random() < 0.5:
                    self._tell(ev.Ungranted(lease=LeaseId(name), detail=""))
                else:
                    self._tell(ev.Claimed(lease=LeaseId(name), deadline_ns=ns + 99, number=1))
                    self.live[name] = (ns, millis)
            case 6:
                size = chance.randrange(1, 99)
                ada, name, block = TenantId("ada"), f"v{chance.randrange(3)}", ResourceId("n/block")
                epoch, lease = Epoch(1, 1), LeaseId("x")
                kept = ev.VolumeKept(tenant=ada, name=name, resource=block, size=size, lease=lease, epoch=epoch)
                gone = ev.VolumeRemoved(tenant=ada, name=name, resource=block, size=size)
                self._tell(chance.choice((kept, gone)))
                group = chance.choice((None, GroupId("lab")))
                self._tell(ev.TenantSet(tenant=TenantRecord(id=TenantId("ada"), group=group)))
            case 7:
                shift = chance.randrange(-900, 900)
                self.ns += shift
                self._tell(ev.Rebased(clock_domain=f"boot-{number}", shift_ns=shift, extended_ns=0))
                self.live = {name: (start + shift, millis) for name, (start, millis) in self.live.items()}
            case _:
                pass

    def _ask(self, name: str, number: int) -> None:
        """A lease of one or two GPUs; or a volume, or the memory of a suspended program, beside that."""
        chance = self.chance
        labels = {SESSION_LABEL: f"s-{chance.randrange(4)}"} if chance.random() < 0.6 else {}
        gpus = [ResourceId(f"n/gpu{index}") for index in chance.sample(range(3), chance.randrange(1, 3))]
        parts = [part(gpu, millis=chance.choice((125, 500, 1000)), amount=chance.randrange(1, 99)) for gpu in gpus]
        parts.append(part(ResourceId("n/cpu"), Kind.CPU, amount=chance.randrange(1, 9)))
        if chance.random() < 0.4:
            kind = chance.choice((Kind.BLOCK, Kind.MEMORY))
            parts = [part(ResourceId(f"n/{kind}"), kind, amount=chance.randrange(1, 99))]
        request = queued(name, chance.choice(("ada", "bob")), labels)
        paying = msgspec.structs.replace(request.lease, pays_priority=chance.random() < 0.3)
        self._tell(msgspec.structs.replace(request, lease=paying))
        self.ns += chance.randrange(0, 30)
        millis = sum(one.millis for one in parts)
        if chance.random() < 0.3:
            self._tell(offered(name, number, *parts))
            self.open_offers[name] = millis
        else:
            self._tell(granted(name, number, *parts))
            self.live[name] = (self.ns, millis)

    def _tell(self, event: ev.Event) -> None:
        self.told.append((self.ns, event))


AMOUNTS: Final = {one.name for one in dataclasses.fields(Line) if one.type in ("int", int)} - {"leases", "uncounted"}
"""What is added up. The others count leases, of which one may have several devices."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sum_is_the_same_for_any_past(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tenants and devices by two ways and a naive third; every amount of a bill by whatever it is grouped, also in a
    window that cuts leases, with a line for what is of no session."""
    made = RandomPast(seed)
    past = history(Place(tmp_path_factory.mktemp("past")), made.told)
    usages = past.usages(made.ns)
    account = reconcile(usages, past.devices(made.ns))
    assert account.ok, (seed, account)
    assert account.tenants[Kind.GPU] == made.naive, seed
    lasted = [one for usage in usages for one in usage.holdings]
    if not lasted:
        return
    first, last = min(one.wall_ns for one in lasted), max(one.wall_ns + one.held_ns for one in lasted)
    third = (last - first) // 3
    for since_ns, until_ns in ((None, None), (first + third, first + 2 * third + 1)):
        total = fold(usages, rates=Rates(priority=7), since_ns=since_ns, until_ns=until_ns).total
        for by in BILL_GROUPINGS:
            lines = fold(usages, by=by, rates=Rates(priority=7), since_ns=since_ns, until_ns=until_ns).lines
            for name in AMOUNTS:
                assert sum(getattr(line, name) for line in lines) == getattr(total, name), (seed, by, name)
            assert all(line.busy_ns <= line.held_ns for line in lines), (seed, by)
            if by != "device":
                assert sum(line.leases for line in lines) == total.leases, (seed, by)
                assert sum(sum(line.ended.values()) for line in lines) == sum(total.ended.values()), (seed, by)


def test_a_bill_goes_over_the_wire_in_seconds(place: Place) -> None:
    told: Told = [(1, queued("a")), (0, granted("a", 1, part(millis=500))), (4_000_000_000, ending("a", 4_000_000_000))]
    (line,) = wire_lines(fold(history(place, told).usages(5_000_000_000)))
    assert (line.key, line.tenant, line.held_seconds, line.gpu_seconds, line.end) == ("a", "ada", 4.0, 2.0, "released")
    assert line.cost == pytest.approx(2 / 3600, abs=1e-6)
    assert line.currency == "credits"
    assert line.ended_at == "2023-11-14T22:13:24.000Z", "as long after the grant, on the wall clock, as it was held"
    assert line.vram_leased_byte_seconds == 4 * part(millis=500).amount > 0


def test_every_field_of_a_bill_is_on_the_wire_and_in_the_table() -> None:
    """No two values are alike, so what is left out or put into another column is noticed."""
    line = Line(
        key="k",
        tenant=TenantId("ada"),
        leases=2,
        held_ns=3 * 10**9,
        busy_ns=4 * 10**9,
        gpu_milli_ns=5 * 10**12,
        core_ns=6 * 10**9,
        memory_byte_ns=7 * 10**9,
        block_byte_ns=8 * 10**9,
        vram_byte_seconds=9,
        launches=10,
        failures=11,
        bytes_moved=12,
        bytes_saved=13,
        saves=14,
        fuel=17,
        uncounted=15,
        grains=16 * 1000 * GIB * 3600 * 10**9 * 10**6,
        priority_grains=21 * 1000 * GIB * 3600 * 10**9 * 10**6,
        end="released",
        live=True,
        way="told",
        period="2026-11",
        waited_ns=18 * 10**9,
        vram_leased_byte_ns=22 * 10**9,
        ended_wall_ns=1_750_000_000_250_000_000,
        ended={"released": 19, "lost": 20},
    )
    bill = Bill(by="lease", currency="credits", lines=(line,), total=line)
    (sent,) = wire_lines(bill)
    expected: dict[str, str | int | bool | dict[str, int]] = {
        "key": "k",
        "tenant": "ada",
        "leases": 2,
        "held_seconds": 3,
        "busy_seconds": 4,
        "gpu_seconds": 5,
        "core_seconds": 6,
        "memory_byte_seconds": 7,
        "block_byte_seconds": 8,
        "vram_byte_seconds": 9,
        "launches": 10,
        "launch_errors": 11,
        "bytes_moved": 12,
        "bytes_saved": 13,
        "saves": 14,
        "fuel": 17,
        "uncounted": 15,
        "cost": 16,
        "priority_cost": 21,
        "currency": "credits",
        "end": "released",
        "live": True,
        "way": "told",
        "period": "2026-11",
        "waited_seconds": 18,
        "vram_leased_byte_seconds": 22,
        "ended_at": "2025-06-15T15:06:40.250Z",
        "ended": {"released": 19, "lost": 20},
    }
    assert msgspec.structs.asdict(sent) == expected
    (row,) = csv.DictReader(io.StringIO(to_csv(bill)))
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, bool):
            assert row[name] == "yes"
        elif isinstance(value, int):
            assert Decimal(row[name]) == value, name
        elif isinstance(value, dict):
            assert row[name] == "lost:20 released:19"
        else:
            assert row[name] == value, name


def test_a_holding_says_how_long_it_was() -> None:
    assert Holding(start_ns=3, stop_ns=10, wall_ns=0, charges=()).held_ns == 7


def _volume(kind: str, **more: object) -> ev.Event:
    fields = {"tenant": TenantId("ann"), "name": "ckpt", "resource": ResourceId("n1/block"), **more}
    return getattr(ev, f"Volume{kind}")(**fields)  # type: ignore[no-any-return]


def test_what_is_kept_is_billed_to_its_tenant_from_one_lease_to_the_next_and_to_its_end(place: Place) -> None:
    """As block byte-seconds, by the byte: once, whether a lease has it or nobody, and not beyond its removal."""
    lease, size = LeaseId("x"), 1000
    kept = {"lease": lease, "epoch": Epoch(1, 1), "size": size}
    told: Told = [
        (10, _volume("Kept", **kept)),
        (20, _volume("Missed")),
        (25, _volume("Kept", **kept)),
        (40, _volume("Taken", **kept, node=NodeId("n1"), retain_ns=1)),
        (70, _volume("Kept", **kept)),
        (90, _volume("Removing", detail="")),
        (95, _volume("Removed", size=size)),
    ]
    past = history(place, told)
    (usage,) = past.usages(200)
    assert [(h.start_ns, h.stop_ns) for h in usage.holdings] == [(10, 40), (70, 95)]
    (line,) = wire_lines(fold(past.usages(200)))
    assert (line.key, line.tenant, line.leases) == ("volume/ann/ckpt", "ann", 0)
    assert line.block_byte_seconds == 55 * size / 1e9
    assert reconcile(past.usages(200), past.devices(200)).ok


def test_a_volume_that_is_found_is_billed_from_then_and_one_that_is_lost_until_then(place: Place) -> None:
    found = {"node": NodeId("n1"), "lease": LeaseId("f"), "epoch": Epoch(2, 1), "retain_ns": 1}
    told: Told = [
        (10, _volume("Found", **found, size=5)),
        (30, _volume("Found", **found, size=7)),
        (60, _volume("Lost", size=7)),
    ]
    past = history(place, told)
    (usage,) = past.usages(100)
    assert [(h.start_ns, h.stop_ns, h.charges[0].units) for h in usage.holdings] == [(10, 30, 5), (30, 60, 7)]
    assert not usage.live
    assert reconcile(past.usages(100), past.devices(100)).ok


def test_what_was_saved_is_on_the_bill_of_its_lease(place: Place) -> None:
    saved = ev.Saved(lease=LeaseId("a"), saved=Saved(version=3, wall_ns=5, size=400, count=2))
    past = history(place, [(1, queued("a")), (10, granted("a", 1)), (40, ending("a", 40)), (41, saved)])
    (line,) = wire_lines(fold(past.usages(99)))
    assert (line.saves, line.bytes_saved) == (2, 400)
