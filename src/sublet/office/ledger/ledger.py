"""The ledger: which lease has what, which requests wait, and what must happen now.

``handle(command, now)`` takes a command to its answer. It reads no clock, file or socket; it returns what must become
durable (events), what agents must be told (orders), and the answer, in the order that ``answers.Outcome`` states. A
mistake of the caller is an answer too (a ``SubletError``), never an exception.

Orders are level-triggered. Whatever an agent has not confirmed stays on a list here and is sent again until it is
confirmed or out of date. The list is not journalled: after a restart it is made anew from the books.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sublet.errors import SubletError
from sublet.office.ledger import (
    bound_leases,
    budgets,
    holders,
    operators,
    parking,
    renewals,
    reports,
    reservations,
    volumes,
)
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Answer, Done, Outcome, Place
from sublet.office.ledger.explain import Explanation, explain
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.office.ledger.unconfirmed_orders import Unconfirmed
from sublet.values import LeaseId, NodeId
from sublet.wire.orders import Held, Order, TornDown


class Ledger:
    """Books, scheduler and unconfirmed orders of one office."""

    def __init__(self, policy: Policy, state: State | None = None) -> None:
        self.state = state or State.fresh(policy)
        self._schedule = Schedule(policy, self.state)
        self.set_policy(policy)
        self._unconfirmed = Unconfirmed(self.state, policy.resend_every_ns)

    def set_policy(self, policy: Policy) -> None:
        """Decide by this policy from the next command on. What was granted stays."""
        self.policy = policy
        self._schedule.set_policy(policy)
        self.state.quota_default = policy.quota_default

    def handle(self, command: cmd.Command, now: Now) -> Outcome:
        """Carry out one command."""
        step = Step(self.state, self.policy, now, command.actor, self._unconfirmed.holds)
        answer: Answer | SubletError
        if type(command) is cmd.AgentReport and type(command.report) is Held:
            self._unconfirmed.confirm(command.report)
        if type(command) is not cmd.OpenOffice:
            if self._schedule.is_reservation_due(now):
                step.act_as_system()
                self._schedule.update_reservations(step)
            if self._schedule.is_budget_due(self.state, now):
                step.act_as_system()
                self._schedule.update_budgets(step)
            step.by = command.actor
        try:
            answer = _HANDLERS[type(command)](step, self._schedule, command)
        except SubletError as error:
            answer = error
        step.act_as_system()
        self._schedule.schedule(step)
        if type(command) in _BRINGS_AGENTS:
            self._unconfirmed.rebuild(step)
        if type(command) is cmd.AgentReport and type(command.report) is TornDown:
            self._unconfirmed.torn_down(command.report)
        to_send = self._unconfirmed.add(step.orders, now.ns)
        return Outcome(answer=answer, events=tuple(step.events), orders=to_send, holds=step.holds)

    def confirm(self, report: Held) -> bool:
        """Take the confirmation for what it changes at once, the list of unconfirmed orders. Returns whether something
        is to be decided because of it: then the report is to be handled as a command as well."""
        self._unconfirmed.confirm(report)
        return parking.waited_for(self.state, report) is not None

    def next_wake_ns(self, now: Now | None = None) -> int | None:
        """When a ``Tick`` will have something to do, if no command comes before."""
        return self._schedule.next_wake_ns(self.state, now)

    def next_resend_ns(self) -> int | None:
        """When ``orders_due`` will have something, if nothing is confirmed before."""
        return self._unconfirmed.next_due_ns()

    def orders_due(self, now: Now) -> tuple[Order, ...]:
        """Unconfirmed orders that it is time to send again."""
        return self._unconfirmed.due(now.ns)

    def node_of(self, order: Order) -> NodeId | None:
        """Where an order goes; None if its lease is gone meanwhile."""
        return self._unconfirmed.node_of(order)

    def is_held(self, lease: LeaseId) -> bool:
        """Whether the agent has confirmed the deadline in the books; until it has, no caller may be told of it."""
        return self._unconfirmed.holds(lease)

    def save_ns(self, lease: LeaseId) -> int:
        """How long the last save under it took, as its agent said; 0 if it said nothing."""
        return self.state.saves.get(lease, 0)

    def place_of(self, lease_id: LeaseId, now: Now, position: int | None = None) -> Place | None:
        """The place of a waiting lease as of now. ``position``: where it stands, if that is known."""
        lease = self.state.leases.get(lease_id)
        if lease is None:
            return None
        try:
            answer = holders.answer_now(Step(self.state, self.policy, now), lease, position)
        except SubletError:
            return None
        return answer if isinstance(answer, Place) else None

    def answer_for(self, lease: LeaseRecord, now: Now) -> Answer | SubletError:
        """What an acquire of this lease would be answered if it were repeated now."""
        try:
            return holders.answer_now(Step(self.state, self.policy, now), lease)
        except SubletError as error:
            return error

    def explain(self, lease: LeaseRecord, now: Now) -> Explanation:
        """Why it waits, or what may end it."""
        return explain(lease, self._schedule.rooms_for(self.state, lease, now.ns), self.state, now, self.policy)


def _tick(step: Step, schedule: Schedule, command: cmd.Tick) -> Answer:
    schedule.tick(step)
    return Done()


def _plain(function: Callable[[Step, Any], Answer]) -> Callable[[Step, Schedule, Any], Answer]:
    """For handlers that do not look at the line."""
    return lambda step, _schedule, command: function(step, command)


_BRINGS_AGENTS: Final = frozenset({cmd.OpenOffice, cmd.NodeUp})
"""After these an agent may know less than was confirmed before."""

_HANDLERS: Final[dict[type, Callable[[Step, Schedule, Any], Answer]]] = {
    cmd.Acquire: holders.acquire,
    cmd.AcquireMany: holders.acquire_many,
    cmd.Claim: holders.claim,
    cmd.Decline: holders.decline,
    cmd.Renew: renewals.renew,
    cmd.NoteActivity: renewals.note_activity,
    cmd.Attach: holders.attach,
    cmd.Unbind: _plain(bound_leases.unbind),
    cmd.Release: holders.release,
    cmd.Tick: _tick,
    cmd.OpenOffice: _plain(operators.open_office),
    cmd.RemoveVolume: _plain(volumes.remove),
    cmd.AddTenant: _plain(operators.add_tenant),
    cmd.SetTenant: _plain(operators.set_tenant),
    cmd.DisableTenant: _plain(operators.disable_tenant),
    cmd.EnableTenant: _plain(operators.enable_tenant),
    cmd.RemoveTenant: _plain(operators.remove_tenant),
    cmd.SetGroup: _plain(operators.set_group),
    cmd.RemoveGroup: _plain(operators.remove_group),
    cmd.SetReservation: _plain(reservations.set_reservation),
    cmd.RemoveReservation: _plain(reservations.remove),
    cmd.SetPrices: _plain(budgets.set_prices),
    cmd.SetBudget: _plain(budgets.set_budget),
    cmd.CreditBudget: _plain(budgets.credit_budget),
    cmd.RemoveBudget: _plain(budgets.remove_budget),
    cmd.Revoke: _plain(operators.revoke),
    cmd.Drain: _plain(operators.drain),
    cmd.ClearFence: _plain(operators.clear_fence),
    cmd.ApplyPolicy: _plain(operators.apply_policy),
    cmd.NodeUp: _plain(reports.node_up),
    cmd.NodeGone: _plain(reports.node_gone),
    cmd.HolderGone: _plain(bound_leases.holder_gone),
    cmd.HolderUnseen: _plain(bound_leases.holder_unseen),
    cmd.AgentReport: reports.agent_report,
}
