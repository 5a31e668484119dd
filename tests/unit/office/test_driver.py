"""The driver keeps the order that promises depend on: decided, durable, ordered, held, answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import Disconnected, LeaseNotActive, NotFound, RenewalRefusal
from sublet.lease.states import LeaseStatus
from sublet.office import core as core_module
from sublet.office import driver as driver_module
from sublet.office.driver import Driver
from sublet.office.ledger.answers import Done, Granted, Outcome
from sublet.office.ledger.commands import Acquire, AgentReport, Command, OpenOffice, Release, Renew, Revoke, Tick
from sublet.office.ledger.events import Claimed, Ended, Renewed
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LOCAL_TENANT, Now, Want
from sublet.office.ledger.state import State
from sublet.testing import FaultName
from sublet.testing.memory import MemoryAgent
from sublet.values import GIB, NS_PER_S, Epoch, Kind, LeaseId, RequestId
from sublet.wire.orders import Held, NotHeld
from tests.unit.office.api.bench import bench, inventory, run, turns


def acquire(name: str, *, kind: Kind = Kind.MEMORY, amount: int = 1 << 20, wait_s: float | None = None) -> Acquire:
    return Acquire(
        tenant=LOCAL_TENANT,
        lease=LeaseId(name),
        request_id=RequestId("r-" + name),
        wants=(Want(kind=kind, amount=amount),),
        ttl_ns=60 * NS_PER_S,
        wait_ns=None if wait_s is None else round(wait_s * NS_PER_S),
    )


def test_commands_of_one_turn_share_one_commit() -> None:
    """Group commit: fifty requests that are ready together cost one sync, and all are answered."""

    async def story() -> None:
        async with bench() as b:
            before = len(b.journal.batches)
            answers = await asyncio.gather(*(b.driver.submit(acquire(f"l{i}")) for i in range(50)))
            assert all(isinstance(answer, Granted) for answer in answers)
            assert len(b.journal.batches) == before + 1
            assert sum(isinstance(event, Claimed) for event in b.journal.batches[-1]) == 50

    run(story)


def test_nothing_is_answered_and_the_office_ends_when_the_journal_cannot_be_written() -> None:
    """What is on disk after a failed sync is not known, so the office dies, its answers withheld, without a retry."""

    async def story() -> None:
        async with bench() as b:
            b.journal.broken = True
            future = b.driver.submit(acquire("l1"))
            await turns()
            assert not future.done()
            assert len(b.deaths) == 1
            assert "no space left" in b.deaths[0]
            assert b.deaths[0].count("\n") == 1, "what happened, and what to do"
            assert b.agent.fence.get(LeaseId("l1")) is None, "an order went out that is not durable"
            b.journal.broken = False
            late = b.driver.submit(acquire("l2"))
            await turns()
            assert not late.done(), "a dead office decided something"

    run(story)


def test_a_ledger_that_raises_ends_the_office_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug may have stopped half-way through a change: neither that change nor a snapshot of it reaches the disk."""

    async def story() -> None:
        async with bench() as b:
            handle = b.driver.ledger.handle

            def breaks(command: Command, now: Any) -> Any:
                if isinstance(command, Renew):
                    raise AssertionError("a bug")
                return handle(command, now)

            monkeypatch.setattr(b.driver.ledger, "handle", breaks)
            monkeypatch.setattr(driver_module, "COMPACT_ON_STOP", 0)
            committed = len(b.journal.batches)
            first = b.driver.submit(acquire("l1"))
            second = b.driver.submit(Renew(tenant=LOCAL_TENANT, lease=LeaseId("l1"), epoch=Epoch(1, 1)))
            await turns()
            assert not first.done()
            assert not second.done()
            assert len(b.journal.batches) == committed
            assert not b.journal.snapshots
            assert "a bug" in b.deaths[0]

    run(story)


@pytest.mark.parametrize("part", ["send", "tick"])
def test_an_agent_that_raises_ends_the_office(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An office that lived on would have neither timers nor answers; the next one finds everything in the journal."""

    async def story() -> None:
        async with bench() as b:

            def breaks(*_: Any) -> None:
                raise RuntimeError("a broken agent")

            monkeypatch.setattr(b.agent, part, breaks)
            future = b.driver.submit(acquire("l1"))
            await turns()
            assert future.done() == (part == "tick"), "what the agent already held was a promise kept, nothing else"
            assert "a broken agent" in b.deaths[0]

    run(story)


def test_a_broken_agent_ends_the_office_also_when_nobody_asks_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the clock meets it too: otherwise no lease would expire until somebody came."""

    async def story() -> None:
        async with bench() as b:
            await b.driver.submit(acquire("l1"))

            def breaks(*_: Any) -> None:
                raise RuntimeError("a broken agent")

            monkeypatch.setattr(b.agent, "tick", breaks)
            await b.pass_time("61s")
            assert len(b.deaths) == 1

    run(story)


def test_orders_go_out_before_the_answers() -> None:
    """Releases of one turn are ordered, and then all of them are answered."""

    async def story() -> None:
        async with bench() as b:
            for i in range(3):
                await b.driver.submit(acquire(f"l{i}"))
            await turns()
            did: list[str] = []
            tick = b.agent.tick

            def ticked(now_ns: int) -> int | None:
                did.append("ordered")
                return tick(now_ns)

            b.agent.tick = ticked  # type: ignore[method-assign]
            for i in range(3):
                released = b.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId(f"l{i}")))
                released.add_done_callback(lambda _: did.append("answered"))
            await turns()
            assert did[:4] == ["ordered", "answered", "answered", "answered"]

    run(story)


def test_a_grant_is_answered_only_once_the_agent_holds_it() -> None:
    """The answer to a claim waits for Held; until then the holder knows nothing of a lease that could end unseen."""

    async def story() -> None:
        async with bench() as b:
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            future = b.driver.submit(acquire("l1"))
            await turns()
            assert not future.done()
            assert b.driver.ledger.state.leases[LeaseId("l1")].status is LeaseStatus.ACTIVE
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")  # orders that were not confirmed are sent again
            assert isinstance(await future, Granted)

    run(story)


def test_an_order_that_was_lost_on_its_way_is_sent_again() -> None:
    """The agent never heard of the lease: without the order there is nothing that it could confirm."""

    async def story() -> None:
        async with bench() as b:
            send, lost = b.agent.send, list[object]()
            b.agent.send = lambda order, **_: lost.append(order)  # type: ignore[method-assign]
            future = b.driver.submit(acquire("l1"))
            await turns()
            assert len(lost) == 1
            b.agent.send = send  # type: ignore[method-assign]
            await b.pass_time("2s")
            assert isinstance(await future, Granted)
            assert b.agent.fence.get(LeaseId("l1")) is not None

    run(story)


def test_the_end_of_the_last_lease_is_sent_again_soon_when_it_was_lost() -> None:
    """Nothing else is due then, and the device would stay unusable until the next slow beat."""

    async def story() -> None:
        async with bench() as b:
            await b.driver.submit(acquire("l1"))
            b.agent.send = lambda order, **_: None  # type: ignore[method-assign]
            await b.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId("l1")))
            b.agent.tick = lambda now_ns: None  # type: ignore[method-assign]
            b.driver._beat()
            await turns()
            resend_ns = b.driver.ledger.next_resend_ns()
            assert resend_ns is not None
            assert b.driver._timer_at_ns <= resend_ns + NS_PER_S

    run(story)


def test_more_commands_than_one_batch_takes_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left over is the next turn's, though nobody comes who would begin one."""
    monkeypatch.setattr(core_module, "BATCH_MAX", 3)

    async def story() -> None:
        async with bench() as b:
            before = len(b.journal.batches)
            answers = await asyncio.gather(*(b.driver.submit(acquire(f"l{i}")) for i in range(10)))
            assert all(isinstance(answer, Granted) for answer in answers)
            assert len(b.journal.batches) >= before + 4

    run(story)


def test_what_time_has_changed_comes_before_a_flood_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline would be noticed only when all that waits has had its turn."""
    monkeypatch.setattr(core_module, "BATCH_MAX", 2)
    handled: list[Command] = []

    def handle(command: Command, now: Now) -> Outcome:
        handled.append(command)
        return Outcome(answer=Done())

    ledger: Any = SimpleNamespace(handle=handle)
    core = core_module.OfficeCore(ledger)
    for n in range(4):
        assert core.take(core_module.PendingCommand(acquire(f"l{n}")))
    core.decide(Now(1, 1), tick=True)
    assert [type(command) for command in handled] == [Tick, Acquire]


def test_an_agent_that_stays_silent_makes_the_answer_unknown_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three-valued outcomes: nobody may conclude that the lease was not granted."""
    monkeypatch.setattr(driver_module, "HOLD_TIMEOUT_S", 0.01)

    async def story() -> None:
        async with bench() as b:
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            with pytest.raises(Disconnected, match="not known"):
                await b.driver.submit(acquire("l1"))

    run(story)


def test_everybody_who_waits_for_an_agent_is_told_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who came later wait as long as the first one, and no longer."""
    monkeypatch.setattr(driver_module, "HOLD_TIMEOUT_S", 0.2)

    async def story() -> None:
        async with bench() as b:
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            futures = []
            for name in ("l1", "l2"):
                futures.append(b.driver.submit(acquire(name)))
                await asyncio.sleep(0.12)
            for future in futures:
                with pytest.raises(Disconnected, match="not known"):
                    await future

    run(story)


def test_a_wait_that_has_run_out_is_over_before_anything_is_given_to_it() -> None:
    """The timer has not fired yet when a device comes free: what time has changed comes first."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.driver.submit(acquire("l1", kind=Kind.GPU, amount=4 * GIB))
            await b.driver.submit(acquire("l2", kind=Kind.GPU, amount=4 * GIB, wait_s=10))
            await turns()
            b.driver.presence.connected(LeaseId("l2"))
            b.clock.advance("11s")
            released = b.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId("l1")))
            await turns()
            assert released.done()
            b.driver._flush()
            await turns()
            waited = b.driver.ledger.state.leases[LeaseId("l2")]
            assert waited.status is LeaseStatus.ENDED
            assert waited.granted_at_ns is None

    run(story)


def test_an_agent_that_does_not_take_the_order_means_that_the_lease_is_over() -> None:
    """NotHeld: the renewal is refused, not unknown."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.driver.submit(acquire("l1"))
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            epoch = granted.lease.epoch
            future = b.driver.submit(Renew(tenant=LOCAL_TENANT, lease=LeaseId("l1"), epoch=epoch))
            await turns()
            number = b.driver.ledger.state.leases[LeaseId("l1")].number
            b.driver.report(NotHeld(node=b.agent.node, lease=LeaseId("l1"), epoch=epoch, number=number))
            await turns(3)
            assert future.done(), "somebody waits for it, so it waits for no other report"
            with pytest.raises(LeaseNotActive) as caught:
                await future
            assert caught.value.reason == RenewalRefusal.NOT_HELD

    run(story)


def test_the_confirmation_of_a_later_order_confirms_those_before_it() -> None:
    """An agent that has the newer one ignores the older when that comes, and never confirms it by itself."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.driver.submit(acquire("l1"))
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            lease, renewals = granted.lease, []
            for _ in range(2):
                b.clock.advance("1s")
                renewals.append(b.driver.submit(Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch)))
                await turns()
            b.driver.report(Held(node=b.agent.node, lease=lease.id, epoch=lease.epoch, number=lease.number))
            await turns()
            assert [isinstance(one.result(), Granted) for one in renewals if one.done()] == [True, True]

    run(story)


def test_a_confirmation_that_a_decision_waits_for_is_handed_to_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a parking lease, whose guests can be parked from then on."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.driver.submit(acquire("l1"))
            handle, handled = b.driver.ledger.handle, list[Command]()

            def handles(command: Command, now: Any) -> Any:
                handled.append(command)
                return handle(command, now)

            monkeypatch.setattr(b.driver.ledger, "handle", handles)
            held = Held(node=b.agent.node, lease=granted.lease.id, epoch=granted.lease.epoch, number=1)
            for waited_for in (False, True):
                monkeypatch.setattr(b.driver.ledger, "confirm", lambda report, waited_for=waited_for: waited_for)
                b.driver.report(held)
                await turns()
            assert handled == [AgentReport(report=held)]

    run(story)


def test_an_office_that_takes_up_its_journal_goes_on_where_it_was() -> None:
    """Who waits in line must give a sign of life to the new one, too; and what was written since the last snapshot
    counts for the next."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.driver.submit(acquire("l1", kind=Kind.GPU, amount=4 * GIB))
            await b.driver.submit(acquire("silent", kind=Kind.GPU, amount=4 * GIB))
            b.driver.stop()
            found = Ledger(Policy(), State.restore(b.driver.ledger.state.snapshot()))
            b.driver = Driver(
                ledger=found,
                journal=b.journal,
                clock=b.clock,
                die=b.deaths.append,
                since_snapshot=driver_module.COMPACT_QUIET + 1,
            )
            b.agent = MemoryAgent(inventory(1), report=b.driver.report, clock=b.clock)
            await b.driver.start(OpenOffice(incarnation=1, clock_domain=b.clock.domain), [b.agent])
            assert not b.journal.snapshots
            await b.pass_time("31s")
            assert len(b.journal.snapshots) == 1
            end = found.state.leases[LeaseId("silent")].end
            assert end is not None
            assert end.reason == "holder_gone"
            assert found.state.leases[LeaseId("l1")].status is LeaseStatus.ACTIVE

    run(story)


def test_the_instant_is_written_down_while_nothing_else_is_and_a_failure_ends_the_office() -> None:
    """What a reboot may add to a lease is as long as this is not written."""

    async def story() -> None:
        async with bench() as b:
            await b.driver.submit(acquire("l1"))
            await b.pass_time("1s")
            assert b.journal.beats[-1] == b.clock.now_ns()
            b.journal.broken = True
            await b.pass_time("1s")
            assert len(b.deaths) == 1
            assert "no space left" in b.deaths[0]

    run(story)


def test_a_renewal_is_answered_when_its_extension_is_held_and_not_when_a_later_notice_is() -> None:
    """The agent confirms a notice by its number, which is higher than that of the extension; it says nothing about the
    deadline. Neither does the confirmation of an earlier order."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.driver.submit(acquire("l1"))
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            lease = granted.lease
            earlier = lease.number
            b.clock.advance("1s")
            renewed = b.driver.submit(Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch))
            await turns()
            extended = lease.number
            await b.driver.submit(Revoke(lease=lease.id, notice_ns=30 * NS_PER_S))
            noticed = lease.number
            assert earlier < extended < noticed

            async def held(number: int, *, told: bool = False) -> None:
                node = b.agent.node
                b.driver.report(Held(node=node, lease=lease.id, epoch=lease.epoch, number=number, told=told))
                await turns()

            await held(noticed, told=True)
            assert not renewed.done(), "the agent holds the notice, and nobody said that it holds the deadline"
            await held(earlier)
            assert not renewed.done(), "the agent holds what it held before"
            await held(extended)
            assert isinstance(await renewed, Granted)

    run(story)


def test_an_answer_says_what_was_decided_for_it_and_not_what_came_later() -> None:
    """Two renewals in one turn: the first caller hears of his own deadline, though the record has moved on since."""

    async def story() -> None:
        async with bench() as b:
            granted = await b.driver.submit(acquire("l1"))
            lease = granted.lease

            def deadline(answer: object, now: object) -> int:
                assert isinstance(lease.deadline_ns, int)
                return lease.deadline_ns

            b.clock.advance("1s")
            renew = Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch, active=True)
            longer = Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch, ttl_ns=100 * NS_PER_S)
            first, second = await asyncio.gather(b.driver.submit(renew, deadline), b.driver.submit(longer, deadline))
            assert second == first + 40 * NS_PER_S

    run(story)


def test_an_answer_has_its_outer_form_before_its_order_goes_out() -> None:
    """The form says what was decided, at that moment; it is given once the agent holds the order."""

    async def story() -> None:
        async with bench() as b:
            seen: list[str] = []
            began_ns = b.clock.now_ns()
            b.agent.send = lambda order, **_: seen.append(f"order {order.lease}")  # type: ignore[method-assign]

            def render(answer: Any, now: Any) -> None:
                seen.append(f"answer {answer.lease.id} at {now.ns - began_ns}")

            asked = [b.driver.submit(acquire(f"l{number}"), render) for number in range(2)]
            await turns()
            assert seen == ["answer l0 at 0", "answer l1 at 0", "order l0", "order l1"]
            assert not any(one.done() for one in asked), "no agent has confirmed its order"

    run(story)


def test_a_mistake_is_told_to_its_caller_and_to_nobody_else() -> None:
    """An error of one command in a batch leaves the others of the batch alone."""

    async def story() -> None:
        async with bench() as b:
            wrong = Release(tenant=LOCAL_TENANT, lease=LeaseId("none"))
            bad, good = b.driver.submit(wrong), b.driver.submit(acquire("l1"))
            assert isinstance(await good, Granted)
            with pytest.raises(NotFound):
                await bad

    run(story)


def test_deadlines_are_kept_without_any_command() -> None:
    """The clock is looked at by timer: a lease that nobody renews ends, and its hardware goes to the next in line."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.driver.submit(acquire("l1", kind=Kind.GPU, amount=4 * GIB))
            await b.driver.submit(acquire("l2", kind=Kind.GPU, amount=4 * GIB))
            leases = b.driver.ledger.state.leases
            assert leases[LeaseId("l2")].status is LeaseStatus.QUEUED
            b.driver.presence.connected(LeaseId("l2"))
            await b.pass_time("61s")
            await b.pass_time("1s")
            assert leases[LeaseId("l1")].status is LeaseStatus.ENDED
            assert leases[LeaseId("l2")].status is LeaseStatus.GRANTED

    run(story)


def test_who_left_the_line_without_a_word_loses_the_place() -> None:
    """Thirty seconds without a sign of life end a queue place as holder_gone; a sign of life keeps it."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.driver.submit(acquire("l1", kind=Kind.GPU, amount=4 * GIB))
            await b.driver.submit(acquire("silent", kind=Kind.GPU, amount=4 * GIB))
            await b.driver.submit(acquire("patient", kind=Kind.GPU, amount=4 * GIB))
            await b.pass_time("29s")
            b.driver.presence.seen(LeaseId("patient"), b.clock.now_ns())
            await b.pass_time("2s")
            leases = b.driver.ledger.state.leases
            assert leases[LeaseId("patient")].status is LeaseStatus.QUEUED
            end = leases[LeaseId("silent")].end
            assert end is not None
            assert end.reason == "holder_gone"

    run(story)


def test_the_state_is_written_down_whole_after_enough_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction bounds what an office has to read when it starts; it happens after a commit, never instead of one."""
    monkeypatch.setattr(driver_module, "COMPACT_EVERY", 10)

    async def story() -> None:
        async with bench() as b:
            for i in range(20):
                await b.driver.submit(acquire(f"l{i}"))
            assert 1 <= len(b.journal.snapshots) <= 6, "each one only after as many events again"
            assert sum(isinstance(e, Claimed) for batch in b.journal.batches for e in batch) == 20

    run(story)


def test_a_quiet_moment_is_used_to_write_the_state_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """While commits come one after another nobody is made to wait for a snapshot that is not urgent."""
    monkeypatch.setattr(driver_module, "COMPACT_QUIET", 10)

    async def story() -> None:
        async with bench() as b:
            for i in range(20):
                await b.driver.submit(acquire(f"l{i}"))
            assert not b.journal.snapshots
            await b.pass_time("2s")
            assert len(b.journal.snapshots) == 1

    run(story)


def test_an_office_with_nothing_to_do_hardly_wakes() -> None:
    """No lease, no queue: the timer is a slow beat, and nothing is written."""

    async def story() -> None:
        async with bench() as b:
            await turns()
            now = b.clock.now_ns()
            assert b.driver._timer_at_ns - now == driver_module.SLOW_BEAT_S * NS_PER_S
            await b.driver.submit(acquire("l1"))
            await turns()
            assert b.driver._timer_at_ns - b.clock.now_ns() <= driver_module.LIVE_BEAT_S * NS_PER_S

    run(story)


def test_a_report_is_handled_in_the_next_turn() -> None:
    """A teardown that is reported gives its device to the request that waits for it, without any other command."""

    async def story() -> None:
        async with bench(gpus=1) as b:
            await b.driver.submit(acquire("l1", kind=Kind.GPU, amount=4 * GIB))
            queued = await b.driver.submit(acquire("l2", kind=Kind.GPU, amount=4 * GIB))
            assert queued.position == 1
            await b.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId("l1")))
            await turns()
            assert b.driver.ledger.state.leases[LeaseId("l2")].status is LeaseStatus.GRANTED

    run(story)


def test_a_listener_that_breaks_stops_neither_the_office_nor_the_other_listeners() -> None:
    """Metrics and streams watch; a bug in one of them must not cost a lease."""

    async def story() -> None:
        async with bench() as b:
            seen: list[object] = []

            def broken(now: object, events: object) -> None:
                raise RuntimeError("a bug in a listener")

            b.driver.listen(broken)
            b.driver.listen(lambda now, events: seen.extend(events))
            granted = await b.driver.submit(acquire("l1"))
            await b.driver.submit(Renew(tenant=LOCAL_TENANT, lease=LeaseId("l1"), epoch=granted.lease.epoch))
            assert any(isinstance(event, Renewed) for event in seen)
            assert not b.deaths

    run(story)


def test_a_read_waits_until_what_it_would_say_is_held() -> None:
    """A lease that is decided but not yet held by its machine is not shown as active to anybody."""

    async def story() -> None:
        async with bench() as b:
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            future = b.driver.submit(acquire("l1"))
            await turns()
            read = asyncio.ensure_future(b.driver.wait_confirmed(LeaseId("l1")))
            await turns()
            assert not read.done()
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            await read
            assert future.done()

    run(story)


def test_a_flood_is_turned_away_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of commands is bounded; whoever finds it full is told so, and nothing of him is kept."""
    monkeypatch.setattr(core_module, "PENDING_MAX", 5)

    async def story() -> None:
        async with bench() as b:
            futures = [b.driver.submit(acquire(f"l{i}")) for i in range(7)]
            answers = await asyncio.gather(*futures, return_exceptions=True)
            assert [isinstance(answer, Disconnected) for answer in answers] == [False] * 5 + [True] * 2
            page = (await b.ask("GET", "/metrics")).body.decode()
            assert 'sublet_limits_hit_total{limit="pending_commands"} 2.0' in page

    run(story)


def test_a_caller_who_went_away_leaves_no_trace() -> None:
    """His command stands; nobody complains that the answer found no reader, and reads do not wait for it for ever."""

    async def story() -> None:
        async with bench() as b:
            b.agent.faults.turn_on(FaultName.LOST_REPORTS)
            future = b.driver.submit(acquire("l1"))
            await turns()
            future.cancel()
            await b.driver.wait_confirmed(LeaseId("l1"))
            b.agent.faults.turn_off(FaultName.LOST_REPORTS)
            await b.pass_time("2s")
            assert b.driver.ledger.state.leases[LeaseId("l1")].status is LeaseStatus.ACTIVE
            await b.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId("l1")))
            await b.pass_time("1s")
            assert any(isinstance(event, Ended) for batch in b.journal.batches for event in batch)

    run(story)
