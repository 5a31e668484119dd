"""Bugs of suspending and resuming, put into the real parts while a seed runs (see ``mutants``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sublet.lease.node import Node
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import holders
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.state import State
from sublet.office.ledger.unconfirmed_orders import Unconfirmed
from sublet.testing.machine import Machine
from sublet.testing.pretended import PretendedHardware
from sublet.values import Epoch, LeaseId, ResourceId
from sublet.wire.orders import End, Grant, Parking, Resumed
from tests.simulation.disk import Disk
from tests.simulation.mutant import Mutant


def _any_epoch_goes_on(_original: Any) -> Any:
    def check_epoch(lease: LeaseRecord, command: cmd.Acquire) -> None:
        return

    return check_epoch


def _gone_when_it_begins(original: Any) -> Any:
    def is_there(self: PretendedHardware, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> bool:
        return lease not in self._parking and bool(original(self, resource, lease, epoch))

    return is_there


def _both_are_charged(original: Any) -> Any:
    def meter(self: State, lease: LeaseRecord, sign: int, now: Now) -> None:
        if sign > 0 or lease.parked_under is None:
            original(self, lease, sign, now)

    return meter


def _forgets_who_is_parked(original: Any) -> Any:
    def recover(self: Disk) -> State:
        state: State = original(self)
        for lease in state.leases.values():
            lease.parks = None
        return state

    return recover


def _stays_parked_for_ever(original: Any) -> Any:
    def is_there(self: Machine, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> bool:
        return not self.parked(lease) and bool(original(self, resource, lease, epoch))

    return is_there


def _hands_on_and_keeps(original: Any) -> Any:
    def resume(self: Node, under: Parking, order: Grant, now_ns: int) -> None:
        self._hardware.resume(under, order.lease, order.epoch)
        self._report(Resumed(node=self.name, lease=order.lease, epoch=order.epoch, under=under))

    return resume


def _keeps_its_warning(_original: Any) -> Any:
    def _warn_who_expires(self: Node, now_ns: int) -> None:
        asked, warned = self._expiring.due(now_ns)
        for lease in asked:
            self._parking.runs_out(lease, now_ns)
        for lease in warned:
            live = self.fence.get(lease)
            if live is not None and not self._hardware.parked(lease):
                self._hardware.warn(lease, live.epoch, live.deadline_ns)

    return _warn_who_expires


def _has_no_time_to_save(original: Any) -> Any:
    def _end(self: Node, order: End, now_ns: int) -> None:
        is_parked = order.park is None and self._hardware.parked(order.lease)
        original(self, replace(order, grace_ns=0) if is_parked else order, now_ns)

    return _end


def _waits_for_no_agent(_original: Any) -> Any:
    def holds(self: Unconfirmed, lease: LeaseId) -> bool:
        return True

    return holds


def _needs_no_rest(_original: Any) -> Any:
    def idle_before_yielding_ns(self: Policy, moving_ns: int, save_ns: int) -> int:
        return 0

    return idle_before_yielding_ns


PARKING: Final[dict[str, Mutant]] = {
    "G1": Mutant(
        "what is parked goes on for whoever names it, by whatever epoch",
        "Kleppmann on Redlock",
        ((holders, "check_epoch", _any_epoch_goes_on),),
    ),
    "G2": Mutant(
        "a device is free when its guest begins to be parked",
        "kubernetes #141471",
        ((PretendedHardware, "is_there", _gone_when_it_begins),),
    ),
    "G3": Mutant(
        "a suspended lease is charged for its device beside its parking lease",
        "meters that stop with the process",
        ((State, "meter", _both_are_charged),),
    ),
    "G4": Mutant(
        "a restart takes a parking lease for one of plain memory",
        "etcd #17132",
        ((Disk, "recover", _forgets_who_is_parked),),
    ),
    "G5": Mutant(
        "the end of a parking lease ends nobody",
        "orphans of suspended jobs",
        ((Machine, "is_there", _stays_parked_for_ever),),
    ),
    "G6": Mutant(
        "what is parked goes on under a new lease, and the parking lease lives",
        "leases that are copied instead of moved",
        ((Node, "_resume", _hands_on_and_keeps),),
    ),
    "G7": Mutant(
        "what is parked is killed where it lies when its parking lease ends",
        "schedulers that kill what they had suspended",
        ((Node, "_warn_who_expires", _keeps_its_warning), (Node, "_end", _has_no_time_to_save)),
    ),
    "G8": Mutant(
        "an idle holder yields before its agent holds the parking lease",
        "state that is promised before it is stored",
        ((Unconfirmed, "holds", _waits_for_no_agent),),
    ),
    "G9": Mutant(
        "a holder yields in the pause between two cells",
        "schedulers that thrash",
        ((Policy, "idle_before_yielding_ns", _needs_no_rest),),
    ),
}
