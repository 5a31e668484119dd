"""All teardowns in progress on a node: what blocks each, and what the office is told.

``TornDown`` and ``Failed`` answer an ``End`` or a ``Verify`` and are given again each time that order comes. What was
clean is forgotten at once: asked again, it is looked at again. What failed stays until it comes clean or an operator
vouches for it, and is never lost on an office that does not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from sublet.lease.hardware import Hardware
from sublet.lease.teardown import Bounds, Teardown, TeardownPhase
from sublet.values import Epoch, Kind, LeaseId, NodeId, ResourceId
from sublet.wire.orders import End, Failed, Part, Report, TornDown, Verify, VolumeRef


class Teardowns:
    """The teardowns of one node, one for each lease and resource."""

    def __init__(
        self,
        node: NodeId,
        hardware: Hardware,
        bounds: Bounds,
        report: Callable[[Report], None],
        may_be_answered: Callable[[LeaseId], bool],
    ) -> None:
        """``may_be_answered``: whether the office was told of this lease's end, and may still order what follows."""
        self._node = node
        self._hardware = hardware
        self._bounds = bounds
        self._report = report
        self._may_be_answered = may_be_answered
        self._all: dict[tuple[LeaseId, ResourceId], Teardown] = {}

    def __iter__(self) -> Iterator[Teardown]:
        return iter(tuple(self._all.values()))

    def get(self, lease: LeaseId, resource: ResourceId) -> Teardown | None:
        """What is being done about this lease on this resource."""
        return self._all.get((lease, resource))

    def of(self, lease: LeaseId, parts: Sequence[Part]) -> list[Teardown]:
        """The teardowns of the lease on these parts."""
        found = (self._all.get((lease, part.resource)) for part in parts)
        return [down for down in found if down is not None]

    def leaving(self, resource: ResourceId) -> list[Part]:
        """The parts on this resource that may not be given to others yet."""
        return [down.part for down in self._all.values() if down.holds(resource)]

    def next_ns(self) -> int | None:
        """When the next step is due."""
        if not self._all:
            return None
        return min((down.due_ns for down in self._all.values() if down.due_ns is not None), default=None)

    def are_parking(self, under: LeaseId) -> bool:
        """Whether guests are just being taken off a device, to live on under this lease."""
        return any(down.park is not None and down.park.lease == under and not down.is_settled for down in self)

    def begin(
        self,
        lease: LeaseId,
        epoch: Epoch,
        part: Part,
        *,
        grace_until_ns: int,
        ordered: bool,
        end: End | None = None,
        volume: VolumeRef | None = None,
    ) -> bool:
        """Take the lease off this part, or go on with it; whether it is new. ``end`` is the order, if there is one,
        ``volume`` what the lease has otherwise."""
        park = end.park if end is not None else None
        volume = (end.volume if end is not None else volume) if part.kind is Kind.BLOCK else None
        down = self._all.get((lease, part.resource))
        if down is not None:  # a restored office may ask by an older epoch; what is said of the newer one holds too
            down.epoch, down.park = max(down.epoch, epoch), down.park or park
            down.volume = down.volume or volume
            down.ordered = down.ordered or ordered
            down.answered = False
            return False
        down = Teardown(lease=lease, epoch=epoch, part=part, grace_until_ns=grace_until_ns, park=park, volume=volume)
        down.ordered = ordered
        if ordered:
            self._take_over_failure(down)
        self._all[lease, part.resource] = down
        return True

    def verify_again(self, lease: LeaseId, epoch: Epoch, part: Part, now_ns: int) -> None:
        """From the start, unless it is still being done; then what comes of that is the answer."""
        down = self._all.get((lease, part.resource))
        if down is not None and down.is_settled:
            del self._all[lease, part.resource]
            epoch = max(epoch, down.epoch)
        self.begin(lease, epoch, part, grace_until_ns=now_ns, ordered=True)

    def failed_in_the_way(self, wanted: Sequence[Part], epoch: Epoch) -> Teardown | None:
        """A failed teardown in the way of a grant. If the office was told of it, the operator has vouched for the
        resource since, and that clears whatever is not seen to be there still. If not, the end of the refused lease
        will tell it (see ``_take_over_failure``)."""
        resources = {part.resource for part in wanted}
        for down in self:
            is_there = down.phase is TeardownPhase.FAILED and down.part.resource in resources and down.epoch <= epoch
            if is_there and not self._forget(down, epoch):
                return down
        return None

    def vouched(self, order: Verify) -> None:
        """An operator vouches for these parts: what the lease left there, and what an earlier one did that the office
        was told with it, is not counted any more, unless a guest is seen to be there still."""
        resources = {part.resource for part in order.parts}
        for down in self:
            is_meant = down.lease == order.lease or not self._may_be_answered(down.lease)
            if down.phase is TeardownPhase.FAILED and down.part.resource in resources and is_meant:
                self._forget(down, order.epoch)

    def _forget(self, down: Teardown, epoch: Epoch) -> bool:
        """What failed up to this epoch, and the office was told of. Whether it is forgotten."""
        if down.epoch > epoch or not down.answered:
            return False
        if self._hardware.is_there(down.part.resource, down.lease, down.epoch):
            return False
        self._hardware.forget(down.part.resource, down.lease)
        del self._all[down.lease, down.part.resource]
        return True

    def resend_all(self) -> None:
        """A restored office: it may not know what its predecessor was told."""
        for down in self._all.values():
            down.ordered = down.answered = False

    def advance(self, teardowns: Iterable[Teardown], now_ns: int) -> None:
        """Take every step that is due, and say what came of it."""
        torn: dict[tuple[LeaseId, Epoch], list[Teardown]] = {}
        for down in teardowns:
            if down.due_ns is not None and down.due_ns > now_ns and not down.is_settled:
                continue
            down.advance(now_ns, self._hardware, self._bounds)
            if down.phase is TeardownPhase.CLEAN and not down.ordered:
                del self._all[down.lease, down.part.resource]  # if the office asks, it looks again
            elif down.is_settled and down.ordered and (not down.answered or down.phase is TeardownPhase.CLEAN):
                down.answered = True
                if down.phase is TeardownPhase.CLEAN:
                    torn.setdefault((down.lease, down.epoch), []).append(down)
                    del self._all[down.lease, down.part.resource]  # asked again, it looks again
                else:
                    self._report(self._failed(down))
        for downs in torn.values():
            self._report(self._torn_down(downs))

    def hardware_changed(self, leases: Collection[LeaseId], now_ns: int) -> None:
        """The hardware has changed, for these leases (none: for any): see at once whether a step is done."""
        concerned = [down for down in self._all.values() if not leases or down.lease in leases]
        for down in concerned:
            down.hardware_changed(now_ns, self._hardware)
        self.advance(concerned, now_ns)

    def _take_over_failure(self, down: Teardown) -> None:
        """What an earlier lease left unclean, and this office was never told, is told with the end of this one: of an
        ``End`` alone the agent can be sure that it is repeated until the answer was heard."""
        for other in self._all.values():
            untold = (
                other.phase is TeardownPhase.FAILED and not other.ordered and other.part.resource == down.part.resource
            )
            if untold and not self._may_be_answered(other.lease):
                other.ordered = other.answered = True
                down.fail(f"{other.detail} (left by lease {other.lease})", hard=other.hard)

    def _torn_down(self, downs: Sequence[Teardown]) -> TornDown:
        """Of one lease. Its parts were taken down side by side, so of each step the longest counts."""
        steps: dict[str, int] = {}
        for down in downs:
            for step, took_ns in down.steps.items():
                steps[str(step)] = max(took_ns, steps.get(step, 0))
        return TornDown(
            node=self._node,
            lease=downs[0].lease,
            epoch=downs[0].epoch,
            resources=tuple(down.part.resource for down in downs),
            metered=next((down.metered for down in downs if down.metered is not None), None),
            steps=steps,
            parked=any(down.park is not None and self._hardware.parked(down.park.lease) for down in downs),
            kept=all(down.volume is None or self._hardware.volume_epoch(down.volume) is not None for down in downs),
            saved=next((down.saved for down in downs if down.saved is not None), None),
        )

    def _failed(self, down: Teardown) -> Failed:
        return Failed(
            node=self._node,
            lease=down.lease,
            epoch=down.epoch,
            resource=down.part.resource,
            detail=down.detail,
            hard=down.hard,
        )
