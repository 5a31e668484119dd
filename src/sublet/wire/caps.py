"""Limits for a lease's guests on what the lease itself does not have: set by the office, enforced by the supervisor.

A lease of blocks has no cores, a lease of cores no memory. Its guests need a little of both all the same, and a little
is what they get: nothing that was not leased is unlimited. The owner's own leases are capped by the office as a whole.
"""

from __future__ import annotations

from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.values import GIB, MIB
from sublet.wire.compat import later

WALLS: Final = ("uid", "pid", "ipc", "mount", "proc", "net", "no_new_privs", "seccomp", "landlock")
"""Parts of the isolation without which a tenant's guest is refused, unless the operator allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCaps:
    """Caps for each lease of a tenant other than the owner, and for all leases of the office together."""

    cores: int = 1
    """Cores' worth of time where neither cores nor a device were leased."""
    cores_per_gpu: int = 4
    """The same for each device of a lease without cores."""
    memory_per_core_bytes: int = 512 * MIB
    """Memory for each core, leased or not, where neither memory nor the memory of a host device was leased."""
    memory_per_card_bytes: int = 8 * GIB
    """Host memory for each card beside as much as its leased VRAM, which it needs to be suspended."""
    processes_per_core: int = 256
    """Processes and threads for each core, leased or not."""
    home_bytes: int = 256 * MIB
    """The size of a guest's home folder. What lies there is memory, and counted as the guest's."""
    office_memory_bytes: int = 0
    """Memory of all guests of the office together; 0: what the machine has, less a reserve."""
    office_cores: int = 0
    """Cores' worth of time of all guests together; 0: as many as there are."""
    office_processes: int = 0
    """Processes and threads of all guests together; 0: half of what the kernel has numbers for."""
    allow_missing: tuple[str, ...] = later(())
    """Of ``WALLS``, those that a tenant's guest may do without."""
    lend_beside: bool = later(False)
    """Whether cards on which other programs compute are lent for oneself all the same."""
    count_launches: bool = later(False)
    """Whether guests count what frameworks launch on their cards, by CUPTI where it is at hand."""
    shows_pids: bool | None = later(None)
    """Whether the driver names processes as this machine does, as was found when the cards were tried out; None: it was
    not found out."""
