"""Foreign use of a lent device: processes that Sublet did not start, and other offices. Pure.

Memory that other processes use cannot be lent, and a device that other processes use cannot be leased exclusively
(``session``, ``device``), unless the operator allows it. The count is made so that whatever is lent is really free:
what is in use and under none of our leases belongs to others, also where no process can be seen that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.node.agent.nvml import MPS_SERVER, CardReading, UsedBy
from sublet.values import MIB, NS_PER_S, NodeId, ResourceId, format_size
from sublet.wire.orders import Foreign

STEP: Final = 64 * MIB
"""Amounts are rounded up to this: a few bytes more or less are no news."""
NAMED_MAX: Final = 3
REPEAT_NS: Final = 60 * NS_PER_S

NameOf = Callable[[int], tuple[str, str]]
"""The command and the user of a process; empty where they cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What is ours on a device."""

    pids: frozenset[int] = frozenset()
    """Every process under a lease of ours, whether it uses the device or not."""
    leased: int = 0
    """Bytes under leases of ours here, those that are being torn down included: no other lease gets these anyway."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process on the device that Sublet did not start."""

    pid: int
    name: str = ""
    user: str = ""

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        user = f" of user {self.user}" if self.user else ""
        return f"process {self.pid}{name}{user}"


def foreign_use(
    reading: CardReading,
    own: Own,
    *,
    node: NodeId,
    resource: ResourceId,
    capacity: int,
    name_of: NameOf = lambda _pid: ("", ""),
    sees_processes: bool = True,
    allowed: bool = False,
) -> Foreign:
    """What others have of this card.

    ``sees_processes`` is False where the pids of the driver are not ours to compare with (a container): then all that
    is known is how much is in use. ``allowed``: the operator lends a card for itself even if others are on it. What
    only draws (a desktop) keeps its memory, and keeps no lease from the card: a workstation always has it. Nor does an
    MPS server: where there is one, every program computes through it. Where the driver does not tell whose memory is in
    use (WSL), it is not lent, and keeps no lease from the card either.
    """
    listed: Sequence[UsedBy] = reading.processes if sees_processes else ()
    strangers = [process for process in listed if process.pid not in own.pids]
    named = sum(process.bytes or 0 for process in strangers)
    ours = sum(process.bytes or 0 for process in listed if process.pid in own.pids)
    used = reading.used if reading.used is not None else named + ours
    unnamed = max(0, used - named - max(ours, own.leased))
    beyond = max(0, ours - own.leased)  # no stranger's, and yet not free
    amount = min(capacity, -(-(named + unnamed + beyond) // STEP) * STEP)
    if not strangers and not amount:
        return Foreign(node=node, resource=resource)
    all_named = [Stranger(process.pid, *name_of(process.pid)) for process in strangers]
    who = all_named[:NAMED_MAX]
    computes = [not process.draws and one.name != MPS_SERVER for process, one in zip(strangers, all_named, strict=True)]
    if unnamed and not strangers and not reading.is_attributed:
        detail = f"{format_size(amount)} of {reading.uuid} is used, and the driver does not tell by whom"
    elif strangers or unnamed:
        detail = _sentence(reading.uuid, amount, who, more=len(strangers) - len(who))
    else:
        detail = f"{format_size(amount)} of {reading.uuid} is used by guests beyond what their leases have"
    is_hidden = bool(unnamed) and reading.is_attributed
    blocks = (is_hidden or any(computes)) and not allowed
    return Foreign(node=node, resource=resource, amount=amount, blocks=blocks, detail=detail)


def merged(first: Foreign, second: Foreign) -> Foreign:
    """What two say of the same device: its processes, and whether another office lends it."""
    return Foreign(
        node=first.node,
        resource=first.resource,
        amount=max(first.amount, second.amount),
        blocks=first.blocks or second.blocks,
        detail="; ".join(detail for detail in (first.detail, second.detail) if detail),
    )


class ForeignNews:
    """What of all this is news: what changed, everything at first, and everything again once a minute."""

    def __init__(self) -> None:
        self._reported: dict[ResourceId, Foreign] = {}
        self._all_again_ns = 0

    def of(self, found: Iterable[Foreign], now_ns: int) -> list[Foreign]:
        """What to report now."""
        again = now_ns >= self._all_again_ns
        if again:
            self._all_again_ns = now_ns + REPEAT_NS
        news = [foreign for foreign in found if again or self._reported.get(foreign.resource) != foreign]
        self._reported.update({foreign.resource: foreign for foreign in news})
        return news


def _sentence(uuid: str, amount: int, who: Sequence[Stranger], *, more: int) -> str:
    if not who:
        return f"{format_size(amount)} of {uuid} is used by processes that cannot be seen from here"
    strangers = [str(stranger) for stranger in who] + ([f"{more} more"] if more else [])
    names = f"{', '.join(strangers[:-1])} and {strangers[-1]}" if len(strangers) > 1 else strangers[0]
    share = f"{format_size(amount)} of {uuid}" if amount else uuid
    return f"{share} is used by {names}, which Sublet did not start"
