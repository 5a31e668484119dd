"""What this machine has to lend, as far as it can be declared: host devices, cores, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

import psutil

from sublet.errors import InvalidRequest
from sublet.values import GIB, MIB, Kind, NodeId, ResourceId, parse_size
from sublet.wire.orders import Device, Inventory

__all__ = ["HOST_DEVICE", "HOST_GPUS_MAX", "LOCAL_NODE", "machine_inventory", "memory_bytes", "parse_host_gpus"]

LOCAL_NODE: Final = NodeId("local")
"""The one node of an office on one machine. It is not the host name, which may change under live leases."""
HOST_DEVICE: Final = "host device, no GPU"
HOST_GPUS_MAX: Final = 64
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def parse_host_gpus(text: str) -> tuple[int, ...]:
    """VRAM bytes of each declared host device, from ``2x16GiB`` or ``16GiB``."""
    match = re.fullmatch(r"(?:(\d{1,4})\s*[x×]\s*)?(\S.*)", text.strip())
    do = 'Write a number of host devices and the size of each, such as "2x16GiB".'
    if match is None:
        raise InvalidRequest(f"{text[:40]!r} declares no host devices", do=do)
    count = int(match[1] or 1)
    if not 1 <= count <= HOST_GPUS_MAX:
        raise InvalidRequest(f"{count} host devices cannot be declared, only 1 to {HOST_GPUS_MAX}", do=do)
    return (parse_size(match[2], "size of a host device"),) * count


def memory_bytes() -> int:
    """The memory this process may count on: that of the machine, or of its container if that is less."""
    total: int = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def machine_inventory(home: Path, host_gpus: tuple[int, ...] | None) -> Inventory:
    """Half of the memory stands in for a GPU if none is declared; the other half is lent as what it is."""
    half = max(MIB, memory_bytes() // 2 // MIB * MIB)
    vram = (half,) if host_gpus is None else host_gpus
    devices = [
        Device(id=ResourceId(f"{LOCAL_NODE}/gpu{i}"), kind=Kind.GPU, capacity=size, model=HOST_DEVICE, host=True)
        for i, size in enumerate(vram)
    ]
    devices += [
        Device(id=ResourceId(f"{LOCAL_NODE}/{kind}"), kind=kind, capacity=amount)
        for kind, amount in (
            (Kind.CPU, len(os.sched_getaffinity(0))),
            (Kind.MEMORY, half),
            (Kind.BLOCK, max(GIB, shutil.disk_usage(home).free // GIB * GIB)),
        )
    ]
    return Inventory(node=LOCAL_NODE, domain=LOCAL_NODE, devices=tuple(devices))
