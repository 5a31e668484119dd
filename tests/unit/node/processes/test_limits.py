"""What the guests of a lease on devices are told of its memory, and where what they do is counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sublet.guest.usage_counters import SharedAccount
from sublet.lease_end import EndReason
from sublet.node.processes.cgroups import ControlGroup, Groups
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import GroupLimits
from sublet.values import GIB, MIB, Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Metered, Part
from sublet.wire.usage_counters import TALLY_BYTES, TallyFile, UsageRow

HOST = Part(resource=ResourceId("local/gpu0"), kind=Kind.GPU, amount=64 * MIB)
CARD = Part(resource=ResourceId("local/GPU-1b4e28ba"), kind=Kind.GPU, amount=40 * GIB)
MEMORY = Part(resource=ResourceId("local/memory"), kind=Kind.MEMORY, amount=2 * GIB)


def tenancy(*parts: Part) -> LeaseRuntime:
    return LeaseRuntime(
        lease=LeaseId("l-1"), tenant=TenantId("local"), epoch=Epoch(1, 7), parts=parts, deadline_ns=0, office="o"
    )


def test_guests_learn_how_much_of_each_device_is_theirs_and_where_it_is_counted(tmp_path: Path) -> None:
    made = tenancy(HOST, MEMORY, CARD)
    made.open(str(tmp_path), Groups.none("o"), 0, lambda count: (), GroupLimits())
    found = made.environment()
    assert found["SUBLET_VRAM"] == f"{64 * MIB},{40 * GIB}"
    tally = TallyFile.open(found["SUBLET_TALLY"])
    assert tally is not None
    tally.write(1, UsageRow(pid=7, launches=3, bytes_in=4, byte_ns=5 * 10**9))
    tally.close()
    made.over = EndReason.RELEASED
    assert made.close(shutil.rmtree, ControlGroup.remove) == []
    assert made.metered == Metered(launches=3, bytes_in=4, vram_byte_seconds=5, is_whole=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fuel", [0, 9])
def test_a_lease_without_devices_counts_the_fuel_of_tasklets_alone(tmp_path: Path, fuel: int) -> None:
    made = tenancy(MEMORY)
    made.open(str(tmp_path), Groups.none("o"), 0, lambda count: (), GroupLimits())
    found = made.environment()
    assert "SUBLET_VRAM" not in found
    tally = TallyFile.open(found["SUBLET_TALLY"])
    assert tally is not None
    row = tally.claim(7, 0, 0)
    tally.write_fuel(row, fuel)
    tally.close()
    made.close(shutil.rmtree, ControlGroup.remove)
    assert made.metered == (Metered(fuel=9, is_whole=True) if fuel else None), "else nothing is written for its end"


@pytest.mark.parametrize(("others", "counting", "is_whole"), [(0, 0, True), (1, 0, False), (2, 2, True), (2, 1, False)])
def test_all_is_counted_where_each_guest_counts(tmp_path: Path, others: int, counting: int, is_whole: bool) -> None:
    """A guest that is killed had counted; its row is used again by the next one."""
    made = tenancy(CARD)
    made.open(str(tmp_path), Groups.none("o"), 0, lambda count: (), GroupLimits())
    made.others = others
    for _ in range(counting):
        tally = TallyFile.open(made.tally_path)
        assert tally is not None
        account = SharedAccount(GIB, tally, 0)
        account.begin_counting()
        account.count(launches=3, failures=0, bytes_in=0, bytes_out=0)
        tally.close()
    made.close(shutil.rmtree, ControlGroup.remove)
    assert made.metered is not None
    assert (made.metered.is_whole, made.metered.launches) == (is_whole, 3 * counting)


def test_what_a_guest_claims_to_have_done_is_bounded(tmp_path: Path) -> None:
    made = tenancy(HOST)
    made.open(str(tmp_path), Groups.none("o"), 0, lambda count: (), GroupLimits())
    made.others = 1
    path = Path(made.tally_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:64] + b"\xff" * (len(raw) - 64))
    made.close(shutil.rmtree, ControlGroup.remove)
    assert made.metered is not None
    assert max(made.metered.launches, made.metered.vram_byte_seconds, made.metered.peak_bytes) < 1 << 62
    assert not made.metered.is_whole


def test_what_a_guest_writes_beyond_the_tally_is_cut_off(tmp_path: Path) -> None:
    made = tenancy(HOST)
    made.open(str(tmp_path), Groups.none("o"), 0, lambda count: (), GroupLimits())
    assert not made.cut_tally()
    path = Path(made.tally_path)
    with path.open("ab") as file:
        file.write(b"x")
    assert made.cut_tally()
    assert path.stat().st_size == TALLY_BYTES
    assert not made.cut_tally()
    made.close(shutil.rmtree, ControlGroup.remove)
    assert not made.cut_tally()
