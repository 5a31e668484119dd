"""Known bugs of other systems, put into the real parts while a seed runs, to see that the seeds would find them.

Z1 to Z22, G1 to G9 of parked guests, K1 to K4 of volumes, B1 of leases that are bound to a process, A1 of answers; each
says whose bug it was, or of which kind. Nothing of it is in the product: a mutant replaces one method or function of a
part for as long as its context lasts. Where the bug needs machinery that this design does not have, the nearest thing
that could happen here stands for it, and says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from sublet.errors import LeaseExpired
from sublet.lease.fence import FenceEntry, FenceTable
from sublet.lease.hardware import Leftover
from sublet.lease.holder import Holder
from sublet.lease.node import Node
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState
from sublet.lease_end import EndReason, LeaseEnd
from sublet.office.core import Holds, PendingCommand
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger import promised_parts
from sublet.office.ledger.answers import Granted, Outcome
from sublet.office.ledger.bound_leases import BoundLeases
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.testing.machine import Machine
from sublet.testing.pretended import PretendedHardware
from sublet.values import Epoch, LeaseId, ResourceId
from sublet.wire.orders import End, Extend, Grant, Held, Order
from tests.simulation.disk import Disk
from tests.simulation.holder import HolderProcess
from tests.simulation.mutant import Mutant, in_force
from tests.simulation.parking_mutants import PARKING
from tests.simulation.volume_mutants import VOLUMES

__all__ = ["MUTANTS", "Mutant", "switched_on"]

_S: Final = 1_000_000_000


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force(MUTANTS[name].changes if name is not None else ())


# ---- the processes of holders ----


def _not_restored(_original: Any) -> Any:
    def restored(self: BoundLeases, lease: LeaseRecord) -> None:
        return

    return restored


# ---- the fence and the epochs ----


def _no_epoch_check(original: Any) -> Any:
    def check(self: FenceTable, lease: LeaseId, epoch: Epoch, now_ns: int) -> FenceEntry:
        live = self.get(lease)
        if live is None:
            found: FenceEntry = original(self, lease, epoch, now_ns)
            return found
        if now_ns >= live.deadline_ns:
            raise LeaseExpired(f"lease {lease} ran out")
        return live

    return check


def _epochs_in_memory(original: Any) -> Any:
    def recover(self: Disk) -> State:
        state: State = original(self)
        state.books.next_n = 1
        return state

    return recover


def _wall_of_each_command(original: Any) -> Any:
    def handle(self: Ledger, command: cmd.Command, now: Now) -> Outcome:
        _WALL[id(self.state)] = now.wall_ns
        outcome: Outcome = original(self, command, now)
        return outcome

    return handle


_WALL: dict[int, int] = {}


def _epoch_from_wall_clock(_original: Any) -> Any:
    def next_epoch(self: State) -> Epoch:
        return Epoch(self.books.incarnation, _WALL.get(id(self), 1 << 62) // 1_000_000)

    return next_epoch


def _obeys_old_offices(kinds: tuple[type[Order], ...]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def send(self: Node, order: Order, *, now_ns: int, incarnation: int | None = None) -> None:
            replaced = incarnation is not None and incarnation < self.incarnation
            obeyed = replaced and isinstance(order, kinds)
            original(self, order, now_ns=now_ns, incarnation=None if obeyed else incarnation)

        return send

    return make


# ---- renewals ----


def _race_answers_ok(original: Any) -> Any:
    def handle(self: Ledger, command: cmd.Command, now: Now) -> Outcome:
        if isinstance(command, cmd.Renew):
            lease = self.state.leases.get(command.lease)
            if lease is not None and lease.status is LeaseStatus.ENDING and lease.epoch == command.epoch:
                return Outcome(answer=Granted(lease=lease))
        outcome: Outcome = original(self, command, now)
        return outcome

    return handle


def _resurrects(original: Any) -> Any:
    def handle(self: Ledger, command: cmd.Command, now: Now) -> Outcome:
        if isinstance(command, cmd.Renew):
            lease = self.state.leases.get(command.lease)
            expired = lease is not None and lease.end is not None and lease.end.reason is EndReason.EXPIRED
            if lease is not None and expired and lease.status is LeaseStatus.ENDING:
                _bring_back(self.state, lease, now)
        outcome: Outcome = original(self, command, now)
        return outcome

    return handle


def _bring_back(state: State, lease: LeaseRecord, now: Now) -> None:
    lease.status, lease.end, lease.deadline_ns = LeaseStatus.ACTIVE, None, now.ns + 1
    lease.notice = None
    for piece in state.slices_of(lease):
        piece.state = SliceState.LEASED
    state.held[lease.tenant].add(lease.parts, +1)
    state.meter(lease, +1, now)
    state.arm(lease)


def _a_notice_confirms_a_deadline(_original: Any) -> Any:
    def held(self: Holds, report: Held) -> list[PendingCommand]:
        return self._take(report.lease, report.number, None)

    return held


# ---- restarts ----


def _time_anew(every: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        opened = 0

        def handle(self: Ledger, command: cmd.Command, now: Now) -> Outcome:
            nonlocal opened
            outcome: Outcome = original(self, command, now)
            if isinstance(command, cmd.OpenOffice):
                opened += 1
                for lease in self.state.leases.values():
                    if lease.status in LIVE_STATES and opened % every == 0:
                        lease.deadline_ns = now.ns + lease.ttl_ns
            return outcome

        return handle

    return make


def _drops_expiries(original: Any) -> Any:
    def pop_due(self: State, now_ns: int) -> LeaseRecord | None:
        lease: LeaseRecord | None = original(self, now_ns)
        while self.timers and self.timers[0][0] <= now_ns:
            heapq.heappop(self.timers)  # the channel has room for one
        return lease

    return pop_due


# ---- holders ----


def _counts_from_reply(original: Any) -> Any:
    def grant(self: Holder, now_ns: int, sent_ns: int, granted_ns: int, event: Any) -> None:
        original(self, now_ns, now_ns, granted_ns, event)

    return grant


def _no_request_timeout(_original: Any) -> Any:
    def deadline_after_ns(self: RenewalPolicy, granted_ns: int) -> int:
        return int(granted_ns - granted_ns * self.rate_error)

    return deadline_after_ns


def _own_ttl(_original: Any) -> Any:
    def deadline_ns(self: Node, order: Grant | Extend, now_ns: int) -> int:
        return now_ns + 15 * _S

    return deadline_ns


def _silence_is_loss(original: Any) -> Any:
    def unanswered(self: Holder, now_ns: int) -> None:
        self.ended(LeaseEnd(reason=EndReason.EXPIRED, at="", detail="no answer"), now_ns)

    return unanswered


def _deaf_to_the_end(_original: Any) -> Any:
    def over(self: HolderProcess, lease: LeaseId, now_ns: int) -> None:
        return None

    return over


def _never_asks(_original: Any) -> Any:
    def may_start(self: HolderProcess, holder: Holder, now_ns: int) -> bool:
        return True

    return may_start


# ---- teardown ----


def _free_at_once(original: Any) -> Any:
    def end(self: Step, lease: LeaseRecord, *arguments: Any, **named: Any) -> None:
        original(self, lease, *arguments, **named)
        _let_go(self, lease)

    return end


def _free_after_a_while(original: Any) -> Any:
    def tick(self: Schedule, step: Step) -> None:
        original(self, step)
        for lease in list(step.state.leases.values()):
            if lease.status is LeaseStatus.ENDING and lease.end is not None and step.now.ns > lease.end.at_ns + 5 * _S:
                _let_go(step, lease)

    return tick


def _let_go(step: Step, lease: LeaseRecord) -> None:
    if lease.status is LeaseStatus.ENDING:
        for piece in list(step.state.slices_of(lease)):
            step.emit(ev.TornDown(resource=piece.resource, lease=piece.lease, epoch=piece.epoch))
        step.finish(lease)


def _everybody_leaves(original: Any) -> Any:
    def leave(self: Machine, resource: ResourceId, lease: LeaseId) -> None:
        for resident in self.residents(resource):
            original(self, resource, resident.lease)

    return leave


def _kept_without_looking(_original: Any) -> Any:
    def can_be_kept(state: State, lease: LeaseRecord) -> bool:
        return True

    return can_be_kept


# ---- an office and its supervisor ----


def _adopted_without_deadlines(original: Any) -> Any:
    def resend_reports(self: Node, now_ns: int) -> None:
        original(self, now_ns)
        self.fence._deadlines.clear()

    return resend_reports


def _takes_the_hardware_for_empty(_original: Any) -> Any:
    def leftovers(self: PretendedHardware) -> list[Leftover]:
        return []

    return leftovers


def _takes_its_journal_for_held(original: Any) -> Any:
    came_back = False

    def handle(self: Ledger, command: cmd.Command, now: Now) -> Outcome:
        nonlocal came_back
        if isinstance(command, cmd.OpenOffice):
            came_back = bool(self.state.leases)
        outcome: Outcome = original(self, command, now)
        return replace(outcome, holds=()) if came_back else outcome

    return handle


MUTANTS: Final[dict[str, Mutant]] = {
    "Z1": Mutant("the agent compares no epochs", "Kleppmann on Redlock", ((FenceTable, "check", _no_epoch_check),)),
    "Z2": Mutant("epochs are kept in memory only", "many lock services", ((Disk, "recover", _epochs_in_memory),)),
    "Z3": Mutant(
        "epochs come from the wall clock",
        "timestamps as fencing tokens",
        ((Ledger, "handle", _wall_of_each_command), (State, "next_epoch", _epoch_from_wall_clock)),
    ),
    "Z4": Mutant(
        "a renewal that races with a revocation is answered with yes",
        "etcd lessor",
        ((Ledger, "handle", _race_answers_ok),),
    ),
    "Z5": Mutant("a renewal brings an expired lease back", "etcd, ZOOKEEPER-1496", ((Ledger, "handle", _resurrects),)),
    "Z6": Mutant(
        "a replaced office ends leases (stands for a deposed broker that revokes)",
        "etcd #12528",
        ((Node, "send", _obeys_old_offices((End,))),),
    ),
    "Z7": Mutant(
        "a replaced office renews leases (stands for a deposed broker that renews)",
        "etcd #15247",
        ((Node, "send", _obeys_old_offices((Extend, Grant))),),
    ),
    "Z8": Mutant(
        "every restart gives leases their whole time again", "etcd #9395", ((Ledger, "handle", _time_anew(1)),)
    ),
    "Z9": Mutant("the third restart loses what time was left", "etcd #17132", ((Ledger, "handle", _time_anew(3)),)),
    "Z10": Mutant("expiries are dropped when several are due", "etcd #10686", ((State, "pop_due", _drops_expiries),)),
    "Z11": Mutant("the holder counts from the reply", "noobaa #9765", ((Holder, "_grant", _counts_from_reply),)),
    "Z12": Mutant(
        "the request time-out is not subtracted",
        "noobaa #9765",
        ((RenewalPolicy, "deadline_after_ns", _no_request_timeout),),
    ),
    "Z13": Mutant(
        "the agent counts by a TTL of its own, not by the lease's",
        "fabric8 #7258",
        ((Node, "_deadline_ns", _own_ttl),),
    ),
    "Z14": Mutant(
        "silence is taken for a refusal", "etcd #2660, consul #912", ((Holder, "_unanswered", _silence_is_loss),)
    ),
    "Z15": Mutant(
        "the work loop does not hear of the end",
        "kubernetes #23731",
        ((HolderProcess, "over", _deaf_to_the_end), (HolderProcess, "may_start", _never_asks)),
    ),
    "Z16": Mutant(
        "a slice is free before its teardown is confirmed", "kubernetes #141471", ((Step, "end", _free_at_once),)
    ),
    "Z17": Mutant(
        "a teardown that takes long ends as free", "forced deletes", ((Schedule, "tick", _free_after_a_while),)
    ),
    "Z18": Mutant(
        "the end of one lease clears its neighbours off a shared device",
        "kubernetes #140212",
        ((Machine, "leave", _everybody_leaves),),
    ),
    "Z19": Mutant(
        "a promise is kept without looking again whether it can be",
        "Jepsen on etcd 3.4.3",
        ((promised_parts, "can_be_kept", _kept_without_looking),),
    ),
    "Z20": Mutant(
        "a supervisor that another office takes over forgets its deadlines",
        "timers that die with a connection",
        ((Node, "resend_reports", _adopted_without_deadlines),),
    ),
    "Z21": Mutant(
        "a new supervisor takes the hardware for empty",
        "lost state that is taken for none",
        ((PretendedHardware, "leftovers", _takes_the_hardware_for_empty),),
    ),
    "Z22": Mutant(
        "an office that came back takes what its journal says for what its supervisor holds",
        "caches that are warmed from disk",
        ((Ledger, "handle", _takes_its_journal_for_held),),
    ),
    **PARKING,
    **VOLUMES,
    "B1": Mutant(
        "an office that came back does not look again at the processes that leases are bound to",
        "watches that end with the process that set them",
        ((BoundLeases, "restored", _not_restored),),
    ),
    "A1": Mutant(
        "the confirmation of a notice is taken for that of an extension that was ordered before it",
        "cumulative acknowledgements of two streams",
        ((Holds, "held", _a_notice_confirms_a_deadline),),
    ),
}
