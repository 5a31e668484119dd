"""The limits that a lease sets for its guests: its own amounts, and defaults for the rest. Pure.

| the lease has | cores | memory | processes |
|---|---|---|---|
| cores | as many | 512 MiB for each | 256 for each |
| memory | 1 | as much | 256 |
| a host device | 4 for each | its VRAM and 512 MiB | 1024 for each |
| a card | 4 for each | as much as its VRAM and 8 GiB | 1024 for each |
| blocks alone | 1 | 512 MiB | 256 |

The numbers are those of ``wire.caps``. The guests of the owner's own leases have what was leased as their cap and
otherwise none of their own: they are the person whose machine it is, and share the cap of the whole office.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sublet.node.processes.limits import GroupLimits
from sublet.values import MIB, Kind, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.orders import Part, card_uuid

OWNER: Final = TenantId("local")
"""The tenant of leases that are asked for over the owner's own socket."""
PIDS_MAX: Final = 8192
"""Processes and threads of all guests of one lease of the owner's."""
BASELINE_BYTES: Final = 512 * MIB
"""What the guests of a lease on host devices may use beyond its VRAM, all together: interpreters, libraries."""
WEIGHT_OF_CORE: Final = 100
"""The share of processor time of one core that was leased, when all are busy; the kernel's own default."""
WEIGHT_UNLEASED: Final = 10
"""The share of a lease that has neither cores nor a device."""
OFFICE_RESERVE_MIN: Final = 256 * MIB
OFFICE_RESERVE_PART: Final = 16
"""This part of the machine's memory is not for guests, and at least ``OFFICE_RESERVE_MIN`` is not."""


def limits_for(parts: Iterable[Part], caps: LeaseCaps, *, tenant: TenantId, cores_max: int = 0) -> GroupLimits:
    """The caps of one lease. ``cores_max``: what the office may use, which no lease is given more than; 0: any."""
    parts = tuple(parts)
    memory = sum(part.amount for part in parts if part.kind is Kind.MEMORY)
    cores = sum(part.amount for part in parts if part.kind is Kind.CPU)
    devices = [part for part in parts if part.kind is Kind.GPU]
    cards = [part.amount for part in devices if card_uuid(part.resource)]
    vram = sum(part.amount for part in devices) - sum(cards)
    host_bytes = vram + BASELINE_BYTES if vram else 0
    if tenant == OWNER:
        return GroupLimits(
            memory_bytes=memory + host_bytes,
            cores=cores,
            pids_max=PIDS_MAX,
            cpu_weight=WEIGHT_OF_CORE * cores,
        )
    capped = cores or max(caps.cores, caps.cores_per_gpu * len(devices))
    capped = min(capped, cores_max) if cores_max else capped
    if memory or vram:
        memory_bytes = memory + host_bytes
    elif cards:
        memory_bytes = sum(cards) + caps.memory_per_card_bytes * len(cards)
    else:
        memory_bytes = caps.memory_per_core_bytes * capped
    return GroupLimits(
        memory_bytes=memory_bytes,
        swap=False,
        cores=capped,
        pids_max=caps.processes_per_core * capped,
        cpu_weight=WEIGHT_OF_CORE * (cores or len(devices)) or WEIGHT_UNLEASED,
        home_bytes=min(caps.home_bytes, memory_bytes),
    )


def office_limits(caps: LeaseCaps, *, memory_bytes: int, cores: int, pids_max: int) -> GroupLimits:
    """The caps of all guests together, on a machine with so much memory, so many cores and process numbers.

    Their weight is that of all cores they may use. With the kernel's default they would all together count as one of
    the processes beside their group, and have a fraction of what was leased wherever those keep the cores busy.
    """
    reserve = max(OFFICE_RESERVE_MIN, memory_bytes // OFFICE_RESERVE_PART)
    capped = caps.office_cores if 0 < caps.office_cores < cores else 0
    return GroupLimits(
        memory_bytes=caps.office_memory_bytes or max(memory_bytes - reserve, memory_bytes // 2),
        cores=capped,
        cpu_weight=WEIGHT_OF_CORE * (capped or cores),
        pids_max=caps.office_processes or pids_max // 2,
    )
