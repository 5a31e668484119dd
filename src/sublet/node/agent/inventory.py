"""What this machine can lend: cards, or host devices instead; cores, memory, disk.

Which devices an office lends follows from what it was told, in this order:

1. **Host devices were declared** (``--host-gpus 2x16GiB``): exactly these. An operator who declares devices wants to
   know what there is, also on a machine with cards; a request must never be placed on a CPU by chance because a card
   and a host device are offered side by side. The cards are neither lent nor locked then: another office may lend them.
2. **There are cards**: all of them, by UUID. A card that is split (MIG) is lent as its instances.
3. **There is a driver, and it does not answer**: no device at all. Work that was meant for a card would run on a CPU,
   and its user would not know why it takes long; the trouble is on the node's label instead, and in ``sublet doctor``.
4. **There is no card**: one host device with half of the memory.

Half of the memory stands in for a GPU in the last case; in every case the other half is lent as what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sublet.devices.cuda_driver import has_bindings
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.limits import block_bytes, memory_bytes, usable_cores
from sublet.node.agent.nvml import Card, Survey, survey
from sublet.values import MIB, TEXT_MAX, Kind, NodeId, ResourceId, Suspend, parse_size
from sublet.wire.orders import Device, Inventory

LOCAL_NODE: Final = NodeId("local")
"""The one node of an office on one machine. It is not the host name, which may change under live leases."""
HOST_DEVICE: Final = "host device, no GPU"
HOST_GPUS_MAX: Final = 64
DRIVER_LABEL: Final = "driver"
TROUBLE_LABEL: Final = "gpu-trouble"
LIBRARY_LABEL: Final = "gpu-libraries"
NO_BINDINGS: Final = "sessions on GPUs need sublet[gpu], which is not installed here"
_DECLARED: Final = re.compile(r"(?:(\d{1,4})\s*[x×]\s*)?([^\s@][^@]*?)\s*(?:@(.*))?", re.ASCII)
_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_DO: Final = 'Write a number of host devices and the size of each, such as "2x16GiB".'
_NAMESPACE_DO: Final = (
    'Write a name that the offices of this machine share behind the @, such as "2x16GiB@lab": up to 32 small letters, '
    "digits and dashes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """Declared host devices: so many of this size.

    With a ``namespace`` they are things of the whole machine: device 0 of ``lab`` is the same for every office that
    declares it, and only one at a time lends it, as it is with a real card. Without one they are the office's own.
    """

    count: int
    size: int
    namespace: str = ""

    def __str__(self) -> str:
        """Exact, as one program hands it to another: a size for people is rounded."""
        return f"{self.count}x{self.size}B" + (f"@{self.namespace}" if self.namespace else "")

    def devices(self, node: NodeId = LOCAL_NODE) -> Iterator[Device]:
        """As an inventory lists them."""
        for index in range(self.count):
            name = f"{self.namespace}-gpu{index}" if self.namespace else f"gpu{index}"
            yield Device(
                id=ResourceId(f"{node}/{name}"),
                kind=Kind.GPU,
                capacity=self.size,
                model=HOST_DEVICE,
                host=True,
                suspend=Suspend.SAME_TYPE,  # its memory is that of its guests, so there is nothing to copy
                machine_id=f"host-{self.namespace}-{index}" if self.namespace else "",
            )


def parse_host_gpus(text: str) -> HostGpus:
    """``2x16GiB``, ``16GiB``, or ``2x16GiB@lab`` for devices that all offices of the machine know as ``lab``'s."""
    match = _DECLARED.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text[:40]!r} declares no host devices", do=_DO)
    count = int(match[1] or 1)
    if not 1 <= count <= HOST_GPUS_MAX:
        raise InvalidRequest(f"{count} host devices cannot be declared, only 1 to {HOST_GPUS_MAX}", do=_DO)
    namespace = match[3]
    if namespace is not None and _NAMESPACE.fullmatch(namespace) is None:
        raise InvalidRequest(f"{namespace[:40]!r} is no name for host devices", do=_NAMESPACE_DO)
    size = parse_size(match[2], "size of a host device")
    return HostGpus(count=count, size=size, namespace=namespace or "")


def machine_inventory(
    home: Path, host_gpus: HostGpus | None, *, found: Survey | None = None, root: str = "/", disk_kept_back: int = 0
) -> Inventory:
    """What the office of ``home`` lends. ``found`` is what a search for cards brought, if there was one already; with
    declared host devices there is no search. ``disk_kept_back``: so much of the disk is not lent, or more."""
    half = max(MIB, memory_bytes(root) // 2 // MIB * MIB)
    devices: list[Device] = []
    labels: dict[str, str] = {}
    if host_gpus is not None:
        devices += host_gpus.devices()
    else:
        seen = survey(root=root) if found is None else found
        devices += map(_device, seen.cards)
        labels = _labels(seen)
        if not seen.cards and not seen.split and not seen.troubles:
            devices += HostGpus(count=1, size=half).devices()
    devices += (
        Device(id=ResourceId(f"{LOCAL_NODE}/{kind}"), kind=kind, capacity=amount)
        for kind, amount in (
            (Kind.CPU, usable_cores(root)),
            (Kind.MEMORY, half),
            (Kind.BLOCK, block_bytes(home, disk_kept_back)),
        )
    )
    return Inventory(node=LOCAL_NODE, domain=LOCAL_NODE, labels=labels, devices=tuple(devices))


def card_of(device: Device) -> str:
    """The UUID under which the driver knows it; empty if it is no card."""
    return "" if device.kind is not Kind.GPU or device.host else device.id.rpartition("/")[2]


def _device(card: Card) -> Device:
    return Device(
        id=ResourceId(f"{LOCAL_NODE}/{card.uuid}"),
        kind=Kind.GPU,
        capacity=card.capacity,
        model=card.model,
        partition=card.is_instance,
        machine_id=card.physical,
        nodes=card.nodes,
    )


def _labels(seen: Survey) -> dict[str, str]:
    labels = {DRIVER_LABEL: seen.driver} if seen.driver else {}
    if seen.troubles:
        labels[TROUBLE_LABEL] = seen.troubles[0].message[:TEXT_MAX]
    if seen.cards and not has_bindings():
        labels[LIBRARY_LABEL] = NO_BINDINGS
    return labels
