"""A client program in the pretended world: it asks, waits, claims, works, renews by the real manager, and lets go.

It is honest (it starts nothing that its ``Holder`` does not allow) and unreliable: it is paused, dies in the middle,
repeats requests whose answers were lost, and sometimes just stops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from sublet.errors import LeaseEnded, NotFound, StaleEpoch
from sublet.lease.holder import HELD_STATES, Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.renewal import RenewalBatch, RenewalManager
from sublet.lease.states import LeaseStatus
from sublet.lease.value import (
    Attempt,
    HolderWord,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import ProcessRecord, Want
from sublet.values import Epoch, Kind, LeaseId, RequestId, TenantId, Tier
from sublet.wire.orders import Parking
from tests.simulation.asking import RESEND_NS, AskingProcess
from tests.simulation.job import Job
from tests.simulation.process import MachineClock

if TYPE_CHECKING:
    from tests.simulation.office import OfficeProcess
    from tests.simulation.replies import Reply
    from tests.simulation.world import World

_S: Final = 1_000_000_000
LOOK_NS: Final = 4 * _S
IDLE_REPORTED_AFTER_NS: Final = _S // 5


class HolderProcess(AskingProcess):
    """One program, one lease at a time."""

    def __init__(self, world: World, name: str, clock: MachineClock, tenant: TenantId) -> None:
        super().__init__(world, name, clock)
        self.tenant = tenant
        self.tier = world.random.choice(tuple(Tier))
        self.asked_at_true: int | None = None
        """Since when it waits for a first answer to its request; None if it does not."""
        self.retired = False
        """It asks for nothing more."""
        self.parked: Parking | None = None
        """Where the guests of its last lease live on, as it was told."""
        self._requests = 0
        self.is_bound = world.scenario.bound and random.Random(f"{world.scenario.seed}/{name}").random() < 0.7
        self.process: ProcessRecord | None = None
        """What its leases are bound to, if they are."""
        self._forget()

    def _forget(self) -> None:
        self.manager = RenewalManager(_nobody, clock=self.clock)
        self.holder: Holder | None = None
        self.job = None
        self.lease: LeaseId | None = None
        self.forget_requests()
        self._wake_ns: int | None = None
        self._working = False
        self._said_idle = False
        """Whether the office was told that nothing runs."""
        self.let_go = False
        """Whether it is giving its lease back."""

    def begin(self) -> None:
        super().begin()
        self._forget()
        if self.is_bound:
            self.process = self.world.programs.began(int(self.name[1:]), self.boot, self.clock.domain)
        self.asked_at_true = None
        self.after(int(self.world.random.random() * 10 * _S), self._want)

    def crash(self) -> None:
        if self.holder is not None:
            self.world.in_jeopardy.discard(self.holder.lease)
        super().crash()
        if self.process is not None:
            process, self.process = self.process, None
            self.world.programs.ended(process, self.world.now)
            office = self.world.office
            self.world.push(self.world.now, office, office.process_ended, (process,))

    # ---- asking ----

    def retire(self) -> None:
        """Ask for nothing more, and bring to an end what there is."""
        self.retired = True
        if self.job is not None:
            self.job.rounds = 0
            self.job.ending = 0.0
        if self.holder is not None:
            self._stop_working()
        elif self.lease is not None:
            self._leave()

    def _leave(self) -> None:
        """Out of the line."""
        assert self.lease is not None
        self.ask(cmd.Release(tenant=self.tenant, lease=self.lease), self._released)

    def come_back(self) -> None:
        """Ask again, as a new process, first of all for one core."""
        self.crash()
        self.begin()
        self.retired = False
        self._want(wants=(Want(kind=Kind.CPU, amount=1),))

    def _want(self, *, wants: tuple[Want, ...] | None = None) -> None:
        if self.retired or self.job is not None:
            return
        world = self.world
        self._requests += 1
        job = Job(world, RequestId(f"{self.name}-{self.boot}-{self._requests}"))
        if wants is not None:
            job.wants, job.name = wants, None
        elif self.parked is not None:
            self._go_on(job, self.parked)
        self.job = job
        self.asked_at_true = world.now
        wait = world.random.random() if wants is None else 1.0
        one = cmd.Acquire(
            tenant=self.tenant,
            lease=LeaseId(f"{self.name}.{self.boot}.{self._requests}"),
            request_id=job.request,
            wants=job.wants,
            ttl_ns=world.scenario.ttl_ns(world),
            tier=self.tier,
            wait_ns=0 if wait < 0.15 else None if wait < 0.3 else int(wait * 90 * _S),
            renew=job.mode,
            name=job.name if job.resume is None else None,
            resume=job.resume,
            resume_epoch=job.resume_epoch,
            process=self.process,
        )
        if wants is None and world.sharing is not None:
            one = world.sharing.altered(self.name, one, job)
        self.ask(self._many(one) if wants is None and world.scenario.many else one, self._acquired)

    def _many(self, one: cmd.Acquire) -> cmd.Acquire | cmd.AcquireMany:
        """Sometimes several of it; drawn apart. What is not needed is given back at once."""
        draw = random.Random(f"many/{self.world.scenario.seed}/{one.request_id}")
        if draw.random() < 0.5 or one.name is not None or one.resume is not None:
            return one
        self.world.coverage.seen["asked for many"] += 1
        count = draw.choice((2, 3, 5))
        at_least = draw.choice((1, 1, 2))
        each = replace(
            one,
            wants=tuple(replace(want, least=None) for want in one.wants),
            wait_ns=one.wait_ns if at_least == 1 else 0,
        )
        leases = (one.lease, *(LeaseId(f"{one.lease}.{index}") for index in range(1, count)))
        return cmd.AcquireMany(tenant=one.tenant, each=each, leases=leases, at_least=at_least)

    def _go_on(self, job: Job, parked: Parking) -> None:
        """Ask for a device for what is parked; or give it up, or forget about it; sometimes another comes first."""
        self.parked = None
        fate = self.world.random.random()
        if fate < 0.8:
            job.wants, job.resume, job.resume_epoch = (), parked.lease, parked.epoch
        elif fate < 0.9:
            self.ask(cmd.Release(tenant=self.tenant, lease=parked.lease), lambda _: None)
        if 0.6 < fate < 0.8:
            again = RequestId(f"{self.name}-{self.boot}-{self._requests}-over")
            command = cmd.Attach(tenant=self.tenant, lease=parked.lease, request_id=again, process=self.process)
            self.post(self.open_request(lambda _: None, None), command)

    def _acquired(self, reply: Reply) -> None:
        self.asked_at_true = None
        self._placed(reply)

    def _placed(self, reply: Reply) -> None:
        """How the request stands."""
        job = self.job
        if job is None or self.holder is not None:
            return
        if reply.lease is not None:
            self.lease = reply.lease
        for other, _ in reply.others:
            self.world.coverage.seen["granted beside another"] += 1
            assert other.lease is not None
            self.ask(cmd.Release(tenant=self.tenant, lease=other.lease, epoch=other.epoch), lambda _: None)
        match reply.kind:
            case "granted":
                self._hold(reply)
            case "ready":
                late_ns = 9 * _S if job.claimed_late else 0
                self.after(late_ns, self._claim, reply.epoch)
            case "offer" if self.world.random.random() < 0.6:
                self._claim(reply.epoch)
            case "offer":
                assert self.lease is not None
                self.ask(cmd.Decline(tenant=self.tenant, lease=self.lease), self._placed)
            case "place" if self.retired:  # it went home before it heard of its place
                self._leave()
            case "place":
                self.after(LOOK_NS, self._look)
            case _:
                self.done()

    def _look(self) -> None:
        """Still in the line?"""
        if self.lease is None or self.holder is not None:
            return
        token = self.open_request(self._placed, None)
        office = self.world.office_of(self)
        self.world.net.send(self, office, office.look, self, self.boot, token, self.tenant, self.lease)
        self.after(RESEND_NS, self._look_again, token, self.lease)

    def _look_again(self, token: int, lease: LeaseId) -> None:
        if self.drop_request(token) and self.lease == lease:
            self._look()

    def _claim(self, epoch: Epoch | None) -> None:
        if self.lease is not None and self.holder is None:
            claim = cmd.Claim(tenant=self.tenant, lease=self.lease, epoch=epoch, process=self.process)
            self.ask(claim, self._claimed)

    def _claimed(self, reply: Reply) -> None:
        if reply.kind == "error" and not reply.ended and isinstance(reply.error, StaleEpoch | LeaseEnded):
            self._look()  # too late for that grant; there may be another
        else:
            self._placed(reply)

    # ---- holding ----

    def _hold(self, reply: Reply) -> None:
        job = self.job
        assert job is not None and reply.lease is not None and reply.epoch is not None
        holder = Holder(
            reply.lease, ttl_ns=self.world.scenario.ttl_asked_ns, stamp=self.manager.stamp, policy=self._policy(job)
        )
        now_ns = self.clock.now_ns()
        self.holder, job.node = holder, str(reply.node)
        if not holder.held(now_ns, sent_ns=self.last_sent_ns, granted_ns=reply.left_ns, epoch=reply.epoch):
            self.done()
            return
        self.manager.add(holder)
        self.world.watch.believes(self, holder, self.last_sent_ns, reply.left_ns)
        self._take_notice(reply, now_ns)
        if holder.status in HELD_STATES:
            self._work(holder.lease)
        self._look_at_time()

    def _policy(self, job: Job) -> RenewalPolicy:
        return RenewalPolicy(mode=job.mode)

    def _work(self, lease: LeaseId) -> None:
        job, holder = self.job, self.holder
        if job is None or holder is None or holder.lease != lease or holder.status not in HELD_STATES:
            return
        if job.rounds == 0:
            self._stop_working()
            return
        job.rounds -= 1
        self._working = True
        if self._said_idle:
            self._say_activity(active=True)
        with self.manager.change(holder.lease) as entry:
            entry.begin(self.clock.now_ns())
        self._effect()
        self.after(job.busy_ns, self._rest, holder.lease)
        self._look_at_time()
        if job.attach and job.rounds == 1:
            self._attach()

    def _rest(self, lease: LeaseId) -> None:
        job, holder = self.job, self.holder
        if job is None or holder is None or holder.lease != lease:
            return
        self._working = False
        if holder.lease in self.manager:
            with self.manager.change(holder.lease) as entry:
                entry.finish(self.clock.now_ns())
            self._look_at_time()
            self.after(IDLE_REPORTED_AFTER_NS, self._say_idle, lease)
            self.after(job.idle_ns, self._work, lease)

    def _say_idle(self, lease: LeaseId) -> None:
        """Nothing has run for a while: the office is told, as the keeper of a program does."""
        holder = self.holder
        is_idle = not self._working and not self._said_idle
        if is_idle and holder is not None and holder.lease == lease and holder.status in HELD_STATES:
            self._say_activity(active=False)

    def _say_activity(self, *, active: bool) -> None:
        holder = self.holder
        if holder is None or holder.epoch is None:
            return
        self._said_idle = not active
        command = cmd.NoteActivity(tenant=self.tenant, lease=holder.lease, epoch=holder.epoch, active=active)
        self.post(self.open_request(lambda _: None, None), command)

    def _effect(self) -> None:
        """One call on the device. The question and the act are apart, as they are in life."""
        holder, job = self.holder, self.job
        if holder is None or job is None or not self._working:
            return
        now_ns = self.clock.now_ns()
        if self.may_start(holder, now_ns):
            node = self.world.node_by_name.get(job.node)
            if node is not None and holder.epoch is not None:
                self.world.watch.starts(self, holder)
                self.world.net.send(
                    self, node, node.effect, self, self.boot, holder.lease, holder.epoch, self.world.now,
                    lease=holder.lease,
                )  # fmt: skip
        self.after(int((0.3 + self.world.random.random() * 3) * _S), self._effect)

    def may_start(self, holder: Holder, now_ns: int) -> bool:
        """The holder's own word."""
        return holder.may_start(now_ns)

    def effect_answered(self, lease: LeaseId, epoch: Epoch, taken: bool) -> None:
        """The device took the call, or the fence refused it."""
        if taken:
            self.world.coverage.seen["effect taken"] += 1
        else:
            self.world.coverage.seen["effect refused"] += 1

    def _attach(self) -> None:
        if self.lease is not None:
            request = RequestId(f"{self.name}-{self.boot}-{self._requests}-again")
            attach = cmd.Attach(tenant=self.tenant, lease=self.lease, request_id=request, process=self.process)
            self.ask(attach, self._attached)

    def _attached(self, reply: Reply) -> None:
        holder = self.holder
        if reply.kind != "granted" or holder is None or reply.epoch is None or holder.lease not in self.manager:
            return
        with self.manager.change(holder.lease) as entry:
            taken = entry.held(
                self.clock.now_ns(), sent_ns=self.last_sent_ns, granted_ns=reply.left_ns, epoch=reply.epoch
            )
        if taken:
            self.world.watch.believes(self, holder, self.last_sent_ns, reply.left_ns)
        self._look_at_time()

    def _stop_working(self) -> None:
        """Done: give it back, or, as programs do, just stop."""
        holder, job = self.holder, self.job
        if holder is None or job is None:
            return
        if job.ending < 0.7:
            self.let_go = True
            if holder.lease in self.manager:
                with self.manager.change(holder.lease) as entry:
                    entry.begin_release(self.clock.now_ns())
            self.ask(cmd.Release(tenant=self.tenant, lease=holder.lease), self._released)
        elif job.ending < 0.8:
            self.done()  # it forgets about it altogether

    def _released(self, _reply: Reply) -> None:
        self.done()

    def done(self) -> None:
        if self.holder is not None:
            self.world.in_jeopardy.discard(self.holder.lease)
            self.manager.unregister(self.holder.lease)
        self.holder = self.job = self.lease = None
        self._working = self._said_idle = self.let_go = False
        self.asked_at_true = None
        if self.parked is not None and self.world.random.random() < 0.9:
            self.after(int(self.world.random.random() * 8 * _S), self._want)
            return
        self.after(int(self.world.random.random() * self.world.scenario.think_ns), self._want)

    # ---- time and news ----

    def _look_at_time(self) -> None:
        """Let the manager do what is due, and come back when it says."""
        now_ns = self.clock.now_ns()
        for attempt in self.manager.collect(now_ns).attempts:
            self._renew(attempt)
        self._hear(now_ns)
        wake_ns = self.manager.next_wake_ns()
        if wake_ns is not None and (self._wake_ns is None or wake_ns < self._wake_ns):
            self._wake_ns = wake_ns
            self.at(wake_ns, self._timer, wake_ns)

    def _timer(self, wake_ns: int) -> None:
        if self._wake_ns == wake_ns:
            self._wake_ns = None
            self._look_at_time()

    def _renew(self, attempt: Attempt) -> None:
        assert attempt.epoch is not None
        command = cmd.Renew(
            tenant=self.tenant,
            lease=attempt.lease,
            epoch=attempt.epoch,
            active=attempt.active,
            busy_ns=attempt.busy_ns,
            ttl_ns=attempt.ttl_ns,
        )
        token = self.open_request(lambda reply: self._renewed(attempt, reply), command)
        self.post(token, command)

    def _renewed(self, attempt: Attempt, reply: Reply) -> None:
        outcome = self.outcome_of(reply)
        holder = self.holder
        self.manager.record_outcomes(RenewalBatch((attempt,)), [outcome], self.clock.now_ns())
        if holder is not None and isinstance(outcome, RenewalGranted) and holder.lease == attempt.lease:
            self.world.watch.believes(self, holder, attempt.sent_ns, outcome.granted_ns)
            self._take_notice(reply, self.clock.now_ns())
        self._look_at_time()

    def outcome_of(self, reply: Reply) -> Outcome:
        """What an answer to a renewal means."""
        if reply.kind == "granted":
            return RenewalGranted(granted_ns=reply.left_ns)
        if reply.kind != "error":
            return RenewalUnknown(detail=reply.kind)
        if reply.ended or isinstance(reply.error, NotFound | StaleEpoch):
            reason = reply.reason or EndReason.OPERATOR
            return RenewalRefused(
                reason=reason, end=LeaseEnd(reason=reason, at=self.manager.stamp(self.clock.now_ns()))
            )
        return RenewalRefused(reason=EndReason.QUOTA)

    def news(self, office: OfficeProcess, event: ev.Event, at_office_ns: int) -> None:
        """The stream of events of the office it is connected to; a replaced one's is closed with its connection."""
        if office is not self.world.office_of(self):
            return
        holder = self.holder
        now_ns = self.clock.now_ns()
        if holder is None:
            if isinstance(event, ev.Granted) and event.lease == self.lease and self.job is not None:
                self._look()
            return
        if holder.lease not in self.manager or holder.lease != getattr(event, "lease", None):
            return
        with self.manager.change(holder.lease) as entry:
            match event:
                case ev.Noticed():
                    entry.notice(now_ns, reason=event.notice.reason, in_ns=event.notice.take_at_ns - at_office_ns)
                case ev.Spared():
                    entry.cancel_notice(now_ns)
                case ev.Ending() | ev.Ended():
                    self._hear_of_parking(event)
                    entry.ended(LeaseEnd(reason=event.end.reason, at=self.manager.stamp(now_ns)), now_ns)
                case _:
                    pass
        self._look_at_time()

    def _hear_of_parking(self, event: ev.Ending | ev.Ended) -> None:
        """What was there lives on, or it turned out that it does not."""
        self.parked = event.end.resume
        if self.parked is not None:
            self.world.watch.parked.told(self.parked)

    def _take_notice(self, reply: Reply, now_ns: int) -> None:
        holder = self.holder
        if holder is not None and reply.notice is not None and holder.lease in self.manager:
            with self.manager.change(holder.lease) as entry:
                entry.notice(now_ns, reason=reply.notice[0], in_ns=reply.notice[1])

    def _hear(self, now_ns: int) -> None:
        summary = self.manager.drain()
        holder = self.holder
        for said in summary.news:
            match said.word:
                case HolderWord.JEOPARDY:
                    self.world.in_jeopardy.add(said.lease)
                case HolderWord.RECOVERED | HolderWord.OVER:
                    self.world.in_jeopardy.discard(said.lease)
                    if said.word is HolderWord.OVER:
                        self.over(said.lease, now_ns)
                case _:
                    pass
        if holder is not None and holder.status is LeaseStatus.ENDING:
            self.world.in_jeopardy.discard(holder.lease)

    def over(self, lease: LeaseId, now_ns: int) -> None:
        """The lease is over for this holder: stop working, and say so to the office, in case it does not know."""
        holder = self.holder
        if holder is None or holder.lease != lease:
            return
        self._working = False
        self.world.watch.gave_up(self, holder)
        self.done()


def _nobody(_attempts: Sequence[Attempt]) -> Sequence[Outcome]:
    raise AssertionError("the pretended holder sends its renewals itself")
