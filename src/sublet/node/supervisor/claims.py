"""Which devices of the inventory this office may lend: those whose lock it holds.

A device that another office has stays in the inventory, all of it in use by others (``Foreign``), and is taken up by
itself as soon as the other office is gone. Nothing is lent without its lock, so what cannot be locked for whatever
reason counts as taken, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sublet.errors import SubletError
from sublet.node.supervisor.locks import TRIES, DeviceLocks
from sublet.values import NS_PER_S
from sublet.wire.orders import Device, Foreign, Inventory

AGAIN_NS: Final = 5 * NS_PER_S
"""So often it is tried again, and looked whether the locks are still there."""


class Claims:
    """The locks of one inventory, and what is to be said of them."""

    def __init__(self, locks: DeviceLocks) -> None:
        self._locks = locks
        self._inventory: Inventory | None = None
        self._taken: dict[str, str] = {}
        """What others have, by its name on the machine, with the sentence that says who."""

    def configure(self, inventory: Inventory) -> list[Foreign]:
        """Take what this inventory needs, let go of the rest; says of every device with a name how it stands."""
        self._inventory = inventory
        wanted = {device.machine_id for device in inventory.devices if device.machine_id}
        for device in self._locks.wanted:
            if device not in wanted:
                self._locks.let_go(device)
        self._taken = {device: said for device in sorted(wanted) if (said := self._take(device, TRIES))}
        return [self._says(device) for device in self._named()]

    def again(self) -> list[Foreign]:
        """Try once more for what others have, and look after what is held; says what changed. It does not wait."""
        before = dict(self._taken)
        self._taken.update({device: error.message for device, error in self._locks.refresh().items()})
        for device in tuple(self._taken):
            said = self._take(device, 1)
            if said:
                self._taken[device] = said
            else:
                del self._taken[device]
        changed = {name for name in {*before, *self._taken} if before.get(name) != self._taken.get(name)}
        return [self._says(device) for device in self._named() if device.machine_id in changed]

    def close(self) -> None:
        """Let others have all of it."""
        self._locks.close()

    def _named(self) -> Sequence[Device]:
        return [] if self._inventory is None else [d for d in self._inventory.devices if d.machine_id]

    def _take(self, device: str, tries: int) -> str:
        """Empty if it is ours now; otherwise why not."""
        try:
            self._locks.take(device, tries=tries)
        except SubletError as error:
            return error.message
        return ""

    def _says(self, device: Device) -> Foreign:
        assert self._inventory is not None
        said = self._taken.get(device.machine_id)
        if said is None:
            return Foreign(node=self._inventory.node, resource=device.id)
        return Foreign(node=self._inventory.node, resource=device.id, amount=device.capacity, blocks=True, detail=said)
