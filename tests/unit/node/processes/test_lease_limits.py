"""Which caps a lease means: nothing of what it does not have is unlimited."""

from __future__ import annotations

import itertools

import pytest

from sublet.node.processes.lease_limits import BASELINE_BYTES, OWNER, limits_for, office_limits
from sublet.node.processes.limits import GroupLimits
from sublet.values import GIB, MIB, Kind, ResourceId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.orders import Part

ANA = TenantId("ana")
HOST = Part(resource=ResourceId("local/gpu0"), kind=Kind.GPU, amount=64 * MIB)
OTHER = Part(resource=ResourceId("local/lab-gpu1"), kind=Kind.GPU, amount=GIB)
CARD = Part(resource=ResourceId("local/GPU-1b4e28ba"), kind=Kind.GPU, amount=40 * GIB)
MEMORY = Part(resource=ResourceId("local/memory"), kind=Kind.MEMORY, amount=2 * GIB)
CORES = Part(resource=ResourceId("local/cpu"), kind=Kind.CPU, amount=3)
BLOCK = Part(resource=ResourceId("local/block"), kind=Kind.BLOCK, amount=1)
CAPS = LeaseCaps()


@pytest.mark.parametrize(
    ("parts", "cores", "memory", "weight"),
    [
        ((), 1, 512 * MIB, 10),
        ((BLOCK,), 1, 512 * MIB, 10),
        ((MEMORY,), 1, 2 * GIB, 10),
        ((CORES,), 3, 3 * 512 * MIB, 300),
        ((CORES, MEMORY), 3, 2 * GIB, 300),
        ((HOST,), 4, 64 * MIB + BASELINE_BYTES, 100),
        ((HOST, OTHER), 8, 64 * MIB + GIB + BASELINE_BYTES, 200),
        ((HOST, CORES), 3, 64 * MIB + BASELINE_BYTES, 300),
        ((HOST, MEMORY), 4, 64 * MIB + 2 * GIB + BASELINE_BYTES, 100),
        ((CARD,), 4, 48 * GIB, 100),
        ((CARD, CARD), 8, 96 * GIB, 200),
        ((CARD, MEMORY), 4, 2 * GIB, 100),
        ((CARD, CORES, BLOCK), 3, 48 * GIB, 300),
    ],
)
def test_the_caps_of_a_tenants_lease(parts: tuple[Part, ...], cores: int, memory: int, weight: int) -> None:
    found = limits_for(parts, CAPS, tenant=ANA)
    assert (found.cores, found.memory_bytes, found.pids_max, found.cpu_weight, found.swap) == (
        cores,
        memory,
        256 * cores,
        weight,
        False,
    )
    assert found.home_bytes == 256 * MIB


def test_no_lease_of_a_tenant_leaves_anything_open() -> None:
    kinds = (HOST, OTHER, CARD, MEMORY, CORES, BLOCK)
    for number in range(len(kinds) + 1):
        for parts in itertools.combinations(kinds, number):
            found = limits_for(parts, CAPS, tenant=ANA)
            assert min(found.cores, found.memory_bytes, found.pids_max, found.cpu_weight, found.home_bytes) > 0, parts


@pytest.mark.parametrize(
    ("parts", "cores", "memory"),
    [
        ((), 0, 0),
        ((HOST,), 0, 64 * MIB + BASELINE_BYTES),
        ((CARD,), 0, 0),
        ((CARD, MEMORY), 0, 2 * GIB),
        ((CORES,), 3, 0),
    ],
)
def test_the_owner_has_what_was_leased_as_its_cap_and_otherwise_that_of_the_office(
    parts: tuple[Part, ...], cores: int, memory: int
) -> None:
    found = limits_for(parts, CAPS, tenant=OWNER)
    assert (found.cores, found.memory_bytes, found.pids_max, found.home_bytes) == (cores, memory, 8192, 0)


def test_no_lease_has_more_cores_than_the_office() -> None:
    found = limits_for((HOST, OTHER), CAPS, tenant=ANA, cores_max=2)
    assert (found.cores, found.pids_max) == (2, 512)


def test_a_home_is_never_larger_than_the_memory_it_is_made_of() -> None:
    small = Part(resource=ResourceId("local/memory"), kind=Kind.MEMORY, amount=32 * MIB)
    assert limits_for((small,), CAPS, tenant=ANA).home_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        (LeaseCaps(), GroupLimits(memory_bytes=15 * GIB, pids_max=16384, cpu_weight=800)),
        (
            LeaseCaps(office_memory_bytes=GIB, office_cores=2, office_processes=999),
            GroupLimits(memory_bytes=GIB, cores=2, pids_max=999, cpu_weight=200),
        ),
        (LeaseCaps(office_cores=8), GroupLimits(memory_bytes=15 * GIB, pids_max=16384, cpu_weight=800)),
    ],
)
def test_the_caps_of_all_guests_together(caps: LeaseCaps, expected: GroupLimits) -> None:
    assert office_limits(caps, memory_bytes=16 * GIB, cores=8, pids_max=32768) == expected


def test_a_machine_with_hardly_any_memory_gives_half_of_it() -> None:
    assert office_limits(CAPS, memory_bytes=300 * MIB, cores=1, pids_max=32768).memory_bytes == 150 * MIB
