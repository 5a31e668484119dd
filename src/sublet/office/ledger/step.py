"""One command being carried out: its changes so far, and the only functions that may change state.

Each verb makes one transition, for every caller, and says what must follow from it: the events, the order to the agent,
the consequences for others. The handlers (``holders``, ``operators``, ``reports``, ``scheduler``) only choose verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from sublet.lease.states import LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger import admission, burst_credit, parking, replacement, volumes
from sublet.office.ledger import events as ev
from sublet.office.ledger.commands import OFFICE
from sublet.office.ledger.fold import apply
from sublet.office.ledger.groups import gpu_millis
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import EndRecord, LeaseRecord, NoticeRecord, Now
from sublet.office.ledger.state import State
from sublet.values import BudgetId, LeaseId, NodeId, ReservationId, Way
from sublet.wire import orders
from sublet.wire.orders import Order, Parking, Part


class Step:
    """The state, the moment, and what came of the command."""

    def __init__(
        self,
        state: State,
        policy: Policy,
        now: Now,
        by: str = OFFICE,
        is_held: Callable[[LeaseId], bool] = lambda _: False,
    ) -> None:
        self.state, self.policy, self.now = state, policy, now
        self.by = by
        """Whose doing it is."""
        self.events: list[ev.Event] = []
        self.orders: list[Order] = []
        self.holds: tuple[tuple[LeaseId, int], ...] = ()
        """(lease, number): what agents must hold before the answer is given."""
        self.is_held = is_held
        """Whether the agent has confirmed the deadline of a lease, as the books had it before this command."""

    def emit(self, event: ev.Event) -> None:
        """Take a fact into the state and into the journal."""
        if type(event) in ev.AUDITED:
            event = replace(event, by=self.by)
        apply(self.state, event, self.now)
        self.events.append(event)

    def act_as_system(self) -> None:
        """What follows is no caller's request: a time that came, or what the scheduler makes of the new situation."""
        self.by = OFFICE

    # ---- the way in ----

    def grant(self, lease: LeaseRecord, node: NodeId, parts: Sequence[Part], *, offered: bool = False) -> None:
        """Set hardware aside under a new epoch. Victims that are no more needed keep theirs.

        What is less than was asked for is an offer, also when it comes out of the line.
        """
        victims, offered = lease.victims, offered or bool(lease.full_wants)
        is_beyond = admission.over_own_seconds(self.state, lease, self.now) is not None
        window_ns = self.policy.offer_valid_ns if offered else self.policy.claim_window_ns
        self.emit(
            ev.Granted(
                lease=lease.id,
                node=node,
                epoch=self.state.next_epoch(),
                parts=tuple(parts),
                claim_by_ns=self.now.ns + window_ns,
                offered=offered,
            )
        )
        if is_beyond:
            self.draw(lease, gpu_millis(lease.parts))
        volumes.after_grant(self, lease)
        self._spare(lease.id, victims)

    def draw(self, lease: LeaseRecord, millis: int) -> None:
        """It begins to draw on the burst credit of its tenant, or (0) no longer does."""
        if lease.draws != millis:
            before = burst_credit.account(self.state, lease.tenant, self.now.ns)
            self.emit(ev.BurstDrawn(lease=lease.id, millis=millis, before=before))

    def claim(self, lease: LeaseRecord) -> None:
        """The holder has it; the clock runs, and the agent must know before the holder does."""
        self.emit(ev.Claimed(lease=lease.id, deadline_ns=self.now.ns + lease.ttl_ns, number=lease.number + 1))
        self.order_grant(lease)
        self.end_present(lease)

    def end_present(self, lease: LeaseRecord) -> None:
        """This lease, or what it was promised, takes the place of its holder's present one."""
        old = replacement.present(self.state, lease)
        if old is None:
            return
        until_ns = lease.wait_until_ns
        if until_ns is not None:  # to clear what it had takes a moment, however short the holder would wait
            until_ns = max(until_ns, self.now.ns + self.policy.suspend_ns)
        self.emit(ev.Replaced(lease=lease.id, old=old.id, wait_until_ns=until_ns))
        self.end(old, EndReason.RELEASED, f"replaced by {lease.id}")

    def replace(self, lease: LeaseRecord, node: NodeId, parts: Sequence[Part]) -> None:
        """Promise a waiting request these parts, some of which its holder's present lease has, and end that."""
        old = replacement.present(self.state, lease)
        assert old is not None, "nothing is there to be replaced"
        self.emit(ev.Promised(lease=lease.id, node=node, parts=tuple(parts), victims=(old.id,)))
        self.end_present(lease)

    def ungrant(self, lease: LeaseRecord, detail: str) -> None:
        """An offer came to nothing; its slices are verified like any others before they are free."""
        epoch, parts = lease.epoch, lease.parts
        assert epoch is not None
        volume = volumes.ref_of(self.state, parts, str(epoch))
        self.emit(ev.Ungranted(lease=lease.id, detail=detail))
        self.orders.append(
            orders.End(
                lease=lease.id,
                epoch=epoch,
                number=lease.number,
                parts=parts,
                reason=EndReason.WITHDRAWN,
                grace_ns=0,
                detail=detail,
                volume=volume,
            )
        )

    def order_grant(self, lease: LeaseRecord) -> None:
        """Tell the agent all there is to know; it may have known some of it."""
        self.orders.append(grant_order(lease, self.now.ns))
        self.holds = ((lease.id, lease.number),)

    # ---- the way out ----

    def end(
        self,
        lease: LeaseRecord,
        reason: EndReason,
        detail: str = "",
        *,
        grace_ns: int | None = None,
        way: Way | None = None,
        park: Parking | None = None,
    ) -> None:
        """Out of the queue at once; otherwise into teardown, which the agent has to verify. With ``park`` its guests
        are to live on there."""
        if lease.promise:
            self.drop_promise(lease)
        end = EndRecord(reason=reason, at_ns=self.now.ns, wall_ns=self.now.wall_ns, detail=detail, way=way, resume=park)
        if lease.status is LeaseStatus.QUEUED:
            self.emit(ev.Ended(lease=lease.id, end=end))
            return
        self.emit(
            ev.Ending(lease=lease.id, end=end, number=lease.number + 1, busy_ns=lease.busy_ns, renewals=lease.renewals)
        )
        assert lease.epoch is not None
        self.orders.append(
            orders.End(
                lease=lease.id,
                epoch=lease.epoch,
                number=lease.number,
                parts=lease.parts,
                reason=reason,
                grace_ns=self.policy.grace_ns(lease.ttl_ns) if grace_ns is None else grace_ns,
                detail=detail,
                park=park,
                volume=volumes.ref_of(self.state, lease.parts, str(lease.epoch)),
            )
        )
        parking.after_end(self, lease)

    def expire(self, lease: LeaseRecord) -> None:
        """The deadline came. A lease that was idle, or was refused a renewal, ends for that reason."""
        idle = EndReason.IDLE if lease.idle_since_ns is not None else EndReason.EXPIRED
        why, way = "its time ran out without a renewal", None
        if idle is EndReason.IDLE and lease.unsaved:
            why, way = f"{why}; not parked: {lease.unsaved}", Way.NOT_SAVED
        self.end(lease, lease.fate or idle, why, grace_ns=0, way=way)

    def end_when_due(self, lease: LeaseRecord) -> None:
        """Time alone ends a live lease: by its notice or by its deadline, whichever was first."""
        assert lease.deadline_ns is not None
        if lease.notice is not None and lease.notice.take_at_ns <= min(lease.deadline_ns, self.now.ns):
            parking.take(self, lease, lease.notice)
        else:
            self.expire(lease)

    def finish(self, lease: LeaseRecord) -> None:
        """If nothing of the lease is left to tear down, it has ended."""
        if lease.status is LeaseStatus.ENDING and not any(
            piece.state is SliceState.TEARDOWN for piece in self.state.slices_of(lease)
        ):
            assert lease.end is not None
            self.emit(ev.Ended(lease=lease.id, end=lease.end))

    # ---- notices and promises ----

    def notice(
        self,
        lease: LeaseRecord,
        reason: EndReason,
        notice_ns: int,
        detail: str = "",
        *,
        beneficiary: LeaseId | None = None,
        when_safe: bool = False,
        reservation: ReservationId | None = None,
        budget: BudgetId | None = None,
    ) -> None:
        """Announce that the lease will be taken; ``when_safe``: as soon as nothing would be lost by it."""
        take_at_ns = self.now.ns + notice_ns
        notice = NoticeRecord(
            reason=reason,
            take_at_ns=take_at_ns,
            detail=detail,
            beneficiary=beneficiary,
            when_safe=when_safe,
            reservation=reservation,
            budget=budget,
        )
        self.emit(ev.Noticed(lease=lease.id, notice=notice, number=lease.number + 1))
        self.orders.append(notify_order(lease))

    def extend(self, lease: LeaseRecord) -> None:
        """Another time to live from now on, without its holder's asking."""
        deadline_ns = max(lease.deadline_ns or 0, self.now.ns + lease.ttl_ns)
        self.emit(ev.Renewed(lease=lease.id, deadline_ns=deadline_ns, number=lease.number + 1))
        self.orders.append(extend_order(lease, self.now.ns))

    def cancel_notice(self, lease: LeaseRecord) -> None:
        """The reason for the notice went away before it was due."""
        self.emit(ev.Spared(lease=lease.id, number=lease.number + 1))
        self.orders.append(notify_order(lease))
        parking.not_needed(self, lease, "its lease was spared")

    def drop_promise(self, lease: LeaseRecord) -> None:
        """The request will not get (or does not want) what was promised; leases that have only notice may stay."""
        victims = lease.victims
        self.emit(ev.PromiseDropped(lease=lease.id))
        self._spare(lease.id, victims)

    def _spare(self, beneficiary: LeaseId, victims: Sequence[LeaseId]) -> None:
        for victim_id in victims:
            victim = self.state.leases.get(victim_id)
            notice = None if victim is None or victim.status is not LeaseStatus.NOTICED else victim.notice
            if victim is not None and notice is not None and notice.beneficiary == beneficiary:
                self.cancel_notice(victim)


def grant_order(lease: LeaseRecord, now_ns: int) -> orders.Grant:
    """The order that says everything an agent must know of a live lease."""
    assert lease.epoch is not None and lease.deadline_ns is not None
    return orders.Grant(
        lease=lease.id,
        epoch=lease.epoch,
        number=lease.number,
        tenant=lease.tenant,
        parts=lease.parts,
        deadline_ns=lease.deadline_ns,
        ttl_ns=max(0, lease.deadline_ns - now_ns),
        name=lease.name or "",
        parked=lease.parks is not None and lease.parks.holds,
        resume=None if lease.resumed else lease.resume,
        kept=lease.takes,
    )


def extend_order(lease: LeaseRecord, now_ns: int, lead_ns: int = 0) -> orders.Extend:
    """The order that moves a deadline. ``lead_ns``: what its holder reckons with for saving."""
    assert lease.epoch is not None and lease.deadline_ns is not None
    return orders.Extend(
        lease=lease.id,
        epoch=lease.epoch,
        number=lease.number,
        deadline_ns=lease.deadline_ns,
        ttl_ns=max(0, lease.deadline_ns - now_ns),
        lead_ns=lead_ns,
    )


def notify_order(lease: LeaseRecord) -> orders.Notify:
    """The order that announces, or takes back, a notice."""
    assert lease.epoch is not None
    notice = lease.notice
    return orders.Notify(
        lease=lease.id,
        epoch=lease.epoch,
        number=lease.number,
        reason=notice.reason if notice else EndReason.PREEMPTED,
        take_at_ns=notice.take_at_ns if notice else None,
        detail=notice.detail if notice else "",
    )
