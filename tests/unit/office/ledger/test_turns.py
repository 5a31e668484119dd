"""Further turns: who was taken after the maximum and goes on yields to who has not had the maximum yet."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sublet.errors import LeaseRevoked
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.explain import ReasonKind
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import has_smaller_share, share_crosses_ns, yields_after_maximum
from sublet.office.ledger.records import GroupRecord, LeaseRecord, Want
from sublet.values import GroupId, Kind, LeaseId, RequestId, TenantId, Tier
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory, seconds

CLEO = TenantId("cleo")
POLICY = Policy(
    max_hold_ns=seconds(600), turn_least_ns=seconds(100), min_run_batch_ns=seconds(200), pause_ns=seconds(40)
)
FULL_S = 86_000.0


def office(*, tier: Tier = Tier.INTERACTIVE) -> tuple[Bench, LeaseRecord]:
    """Ann held the one GPU for the maximum, Ben took it, and Ann asked again at once. Ben is through after 50 s, and
    Ann is on her second turn. Returns it."""
    bench = Bench(gpus=1, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    first = bench.granted(tenant=ANN, ttl_s=FULL_S, tier=tier)
    bench.wait(600)
    second = bench.queued(tenant=BEN, ttl_s=FULL_S, tier=tier)
    assert bench.lease(first.id).status is LeaseStatus.NOTICED
    bench.wait(30)
    assert bench.lease(first.id).end is not None
    bench.claim(bench.lease(second.id))
    again = bench.queued(tenant=ANN, ttl_s=FULL_S, tier=tier)
    assert bench.lease(again.id).attained_ns == seconds(630)
    assert bench.lease(again.id).goes_on == first.id
    bench.wait(50)
    bench.release(bench.lease(second.id))
    bench.claim(bench.lease(again.id))
    return bench, bench.lease(again.id)


@pytest.mark.parametrize(("tier", "least_s"), [(Tier.INTERACTIVE, 100), (Tier.BATCH, 200)])
def test_a_newcomer_takes_a_further_turn_after_its_least_run(tier: Tier, least_s: int) -> None:
    """And not before; a batch lease keeps its minimum run."""
    bench, turn = office(tier=tier)
    new = bench.queued(tenant=CLEO, ttl_s=FULL_S, tier=tier)
    begun_s = bench.now_ns / seconds(1)
    assert bench.lease(turn.id).status is LeaseStatus.ACTIVE
    reasons = bench.ledger.explain(bench.lease(new.id), bench.now).reasons
    (room,) = [reason for reason in reasons if reason.kind is ReasonKind.ROOM]
    assert room.at_ns == seconds(begun_s + least_s), "explain knows the moment"
    bench.wait(least_s - 1)
    assert bench.lease(turn.id).status is LeaseStatus.ACTIVE
    bench.wait(1)
    notice = bench.lease(turn.id).notice
    assert notice is not None
    assert (notice.reason, notice.beneficiary) == (EndReason.FAIR_SHARE, new.id)
    bench.wait(30)
    bench.claim(bench.lease(new.id))
    assert bench.lease(new.id).status is LeaseStatus.ACTIVE


def claimed_at_its_turn(bench: Bench, lease: LeaseRecord) -> None:
    """The request waits until it is granted."""
    for _ in range(1000):
        if bench.lease(lease.id).status is LeaseStatus.QUEUED:
            bench.wait(1)
    bench.claim(bench.lease(lease.id))
    assert bench.lease(lease.id).status is LeaseStatus.ACTIVE


def pause(*, tier: Tier = Tier.INTERACTIVE) -> tuple[Bench, LeaseRecord, LeaseRecord]:
    """Cleo, a newcomer, took the GPU from Ann's further turn, for which Ann has asked again. Now Ann has waited long
    enough to preempt others, and Cleo's cell is over. Returns Cleo's lease and Ann's request."""
    if tier is Tier.SPOT:  # one turn is as good as two, since it yields at any time
        bench = Bench(gpus=1, policy=POLICY)
        bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
        turn = bench.granted(tenant=ANN, ttl_s=FULL_S, tier=tier)
        bench.wait(650)
    else:
        bench, turn = office(tier=tier)
    claimed_at_its_turn(bench, bench.queued(tenant=CLEO, ttl_s=FULL_S, lease="cleo"))
    assert bench.lease(turn.id).end is not None
    again = bench.queued(tenant=ANN, ttl_s=FULL_S, tier=tier)
    assert again.attained_ns > POLICY.max_hold_ns
    bench.wait(100)
    bench.idle(bench.lease("cleo"))
    return bench, bench.lease("cleo"), bench.lease(again.id)


def test_an_idle_further_turn_yields_to_any_request_and_is_said_to() -> None:
    """Its pause is kept from none."""
    bench, turn = office()
    bench.idle(turn)
    bench.wait(20)
    (idle,) = [one for one in bench.ledger.explain(turn, bench.now).reasons if one.kind is ReasonKind.IDLE]
    assert idle.text == "it is idle: any request that waits may have it, once its state is safe"


@pytest.mark.parametrize("tier", [Tier.INTERACTIVE, Tier.BATCH])
def test_a_newcomer_keeps_its_gpu_in_a_pause_between_two_cells(tier: Tier) -> None:
    """A further turn that took it in each pause would run for its least time, and the next cell wait for so long."""
    bench, held, again = pause(tier=tier)
    begun_s = bench.now_ns / seconds(1)
    bench.wait(20)
    reasons = bench.ledger.explain(again, bench.now).reasons
    (room,) = [reason for reason in reasons if reason.kind is ReasonKind.ROOM]
    assert room.at_ns == seconds(begun_s + 40), "explain knows the moment"
    (idle,) = [one for one in bench.ledger.explain(held, bench.now).reasons if one.kind is ReasonKind.IDLE]
    assert idle.text.endswith("; requests for further turns in 20s")
    bench.renew(held)
    bench.wait(60)
    assert (held.status, again.status) == (LeaseStatus.ACTIVE, LeaseStatus.QUEUED)
    bench.idle(held)
    bench.wait(39)
    assert held.status is LeaseStatus.ACTIVE
    bench.wait(1)
    assert held.end is not None, "the pause is over"
    assert again.status is LeaseStatus.GRANTED


@pytest.mark.parametrize(
    "by", ["a newcomer", "spot", "its floor", "its smaller share", "its long wait", "another further turn"]
)
def test_a_pause_is_kept_from_further_turns_alone(by: str) -> None:
    """From those that can yield at short notice not, nor from a group that has its floor, nor for ever."""
    if by == "another further turn":  # both have had the maximum
        bench, _ = office()
        for tenant in (BEN, ANN):
            claimed_at_its_turn(bench, bench.queued(tenant=tenant, ttl_s=FULL_S, lease=f"of {tenant}"))
        held, again = bench.lease("of ann"), bench.queued(tenant=BEN, ttl_s=FULL_S)
        bench.wait(100)
        bench.idle(held)
    else:
        bench, held, again = pause(tier=Tier.SPOT if by == "spot" else Tier.INTERACTIVE)
    if by == "a newcomer":
        again = bench.queued(tenant=BEN, ttl_s=FULL_S)
    elif by == "its floor":
        bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("lab"), floor=1)))
        bench.do(cmd.SetTenant(tenant=ANN, group=GroupId("lab")))
    elif by == "its smaller share":
        bench.do(cmd.SetTenant(tenant=ANN, weight=1000))
    elif by == "its long wait":
        bench.renew(held)
        bench.wait(499)
        bench.idle(held)
    bench.wait(2)
    assert held.end is not None
    assert again.status is LeaseStatus.GRANTED


@pytest.mark.parametrize(
    "other_is", ["held for the maximum", "idle", "of a larger share", "of a lower tier", "above the floor"]
)
def test_a_request_for_a_further_turn_preempts_no_lease_at_first(other_is: str) -> None:
    """Otherwise one newcomer would interrupt many long cells, one after the other. A tenant that has used more yields
    to it at once, and so do a lower tier, and every holder to a request inside the floor of its group."""
    bench = Bench(gpus=2, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    first = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(1500)
    tier = Tier.BATCH if other_is == "of a lower tier" else Tier.INTERACTIVE
    other = bench.granted(tenant=BEN, ttl_s=FULL_S, tier=tier)
    bench.wait(105)
    claimed_at_its_turn(bench, bench.queued(tenant=CLEO, ttl_s=FULL_S))
    bench.wait(466)
    if other_is == "idle":
        bench.idle(other)
    again = bench.queued(tenant=ANN, ttl_s=FULL_S)
    assert again.goes_on == first.id
    asked_s = bench.now_ns / seconds(1)
    if other_is == "of a larger share":
        bench.do(cmd.SetTenant(tenant=ANN, weight=1000))
    elif other_is == "above the floor":
        bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("lab"), floor=1)))
        bench.do(cmd.SetTenant(tenant=ANN, group=GroupId("lab")))
    if other_is in ("held for the maximum", "idle"):
        reasons = bench.ledger.explain(again, bench.now).reasons
        (room,) = [reason for reason in reasons if reason.kind is ReasonKind.ROOM]
        assert room.at_ns == seconds(asked_s + 40), "explain knows the moment"
        bench.wait(39)
        assert (other.status, other.notice) == (LeaseStatus.ACTIVE, None)
    bench.wait(1)
    assert other.notice is not None
    assert other.notice.beneficiary == again.id


def test_who_has_had_the_maximum_takes_no_further_turn() -> None:
    """Of two that take turns each has its maximum: the office is busy with their work, and not with their moves."""
    bench, turn = office()
    bench.wait(590)
    other = bench.queued(tenant=BEN, ttl_s=FULL_S)  # a new piece of work, so it is served
    assert bench.lease(turn.id).status is LeaseStatus.NOTICED
    bench.wait(30)
    bench.claim(bench.lease(other.id))
    third = bench.queued(tenant=ANN, ttl_s=FULL_S)
    assert bench.lease(third.id).attained_ns > seconds(1200), "what was held before counts on"
    bench.wait(599)
    assert bench.lease(other.id).status is LeaseStatus.ACTIVE, "Ben has not had his maximum"
    bench.wait(1)
    assert bench.lease(other.id).status is LeaseStatus.NOTICED
    bench.wait(30)
    bench.claim(bench.lease(third.id))
    fourth = bench.queued(tenant=BEN, ttl_s=FULL_S)
    bench.wait(599)
    assert bench.lease(third.id).status is LeaseStatus.ACTIVE, "both are on further turns"
    bench.wait(1)
    assert bench.lease(third.id).status is LeaseStatus.NOTICED
    assert bench.lease(fourth.id).promise


@pytest.mark.parametrize("how", ["another amount", "another tier", "too late", "released long ago", "idle"])
def test_only_the_same_work_goes_on(how: str) -> None:
    """A request that is no continuation of what was taken is a new piece of work, which has its maximum before it."""
    bench = Bench(gpus=1, policy=POLICY)
    first = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(600)
    if how == "released long ago":
        bench.release(first)
        bench.wait(600)
    else:
        if how == "idle":
            bench.idle(first)
        second = bench.queued(tenant=BEN, ttl_s=FULL_S)
        bench.wait(30)
        bench.claim(bench.lease(second.id))
        bench.release(bench.lease(second.id))
    assert bench.lease(first.id).end is not None
    if how == "too late":
        bench.wait(601)
    wants = (gpu(4),) if how == "another amount" else ()
    tier = Tier.BATCH if how == "another tier" else Tier.INTERACTIVE
    again = bench.granted(*wants, tenant=ANN, ttl_s=FULL_S, tier=tier)
    assert (again.attained_ns, again.goes_on) == (0, None)


def test_each_that_was_taken_goes_on_once() -> None:
    """The first request like it goes on with it, the next is new."""
    bench, turn = office()
    released = bench.state.taken.pop(BEN)
    assert not bench.state.taken
    bench.state.taken[BEN] = released
    bench.wait(600)
    bench.queued(tenant=CLEO, ttl_s=FULL_S)
    bench.wait(30)
    assert bench.state.taken == {BEN: released, ANN: [turn.id]}
    assert bench.folded().taken == bench.state.taken
    assert type(bench.state).restore(bench.state.snapshot()).taken == bench.state.taken
    once, twice = (bench.queued(tenant=ANN, ttl_s=FULL_S, lease=name) for name in ("once", "twice"))
    assert once.goes_on == turn.id
    assert (twice.goes_on, twice.attained_ns) == (None, 0)
    assert bench.state.taken == {BEN: released}
    assert type(bench.state).restore(bench.state.snapshot()).taken == {BEN: released}


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_is_released_before_the_maximum_and_asked_for_anew_goes_on(is_idle: bool) -> None:
    """Otherwise a holder that gives its lease back a moment before the maximum would be a newcomer each time: no other
    newcomer takes its lease, and in others' pauses it takes theirs. The time in which nothing ran counts off, so who
    rests for as long begins anew."""
    bench = Bench(gpus=1, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    first = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(540)
    if is_idle:
        bench.idle(first)
        bench.wait(20)
    bench.release(first)
    bench.wait(20)
    again = bench.granted(tenant=ANN, ttl_s=FULL_S)
    attained_s = 540 - 20 - 20 * is_idle
    assert (again.attained_ns, again.goes_on) == (seconds(attained_s), first.id)
    bench.wait(500)
    bench.release(again)
    third = bench.granted(tenant=ANN, ttl_s=FULL_S)
    assert third.attained_ns == seconds(attained_s + 500) > POLICY.max_hold_ns
    bench.queued(tenant=CLEO, ttl_s=FULL_S)
    bench.wait(100)
    assert bench.lease(third.id).status is LeaseStatus.NOTICED, "a newcomer takes it after its least run"
    other = type(bench.state).restore(bench.state.snapshot())
    assert bench.folded().taken == other.taken == bench.state.taken


def test_what_was_replaced_and_what_has_no_gpu_does_not_go_on() -> None:
    """The work of a lease that was replaced goes on in the other one, and counts there."""
    bench = Bench(inventory("n", device("gpu0"), device("gpu1"), device("cpu", Kind.CPU)), policy=POLICY)
    first = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(60)
    second = LeaseId("second")
    asked = cmd.Acquire(
        tenant=ANN,
        lease=second,
        request_id=RequestId("second"),
        wants=(gpu(),),
        ttl_ns=seconds(FULL_S),
        replaces=first.id,
    )
    assert isinstance(bench.do(asked).answer, Granted)
    assert bench.lease(first.id).end is not None
    bench.release(bench.lease(second))
    assert bench.state.taken == {ANN: [second]}
    assert type(bench.state).restore(bench.state.snapshot()).taken == bench.folded().taken == bench.state.taken
    bench.release(bench.granted(Want(kind=Kind.CPU, amount=1), tenant=BEN, ttl_s=FULL_S))
    assert BEN not in bench.state.taken


def test_room_that_is_kept_for_a_further_turn_lets_newcomers_past_until_it_has_waited_for_the_maximum() -> None:
    """Patience keeps room from those who have had theirs; nothing keeps a large request out for ever."""
    bench = Bench(gpus=2, policy=Policy(max_hold_ns=seconds(600), gang_patience_ns=seconds(60)))
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    both = bench.granted(gpu(16, count=2), tenant=ANN, ttl_s=FULL_S)
    bench.wait(600)
    bench.queued(tenant=BEN, ttl_s=FULL_S, lease="ben")
    bench.wait(30)
    bench.claim(bench.lease("ben"))
    again = bench.queued(gpu(16, count=2), tenant=ANN, ttl_s=FULL_S)
    assert again.goes_on == both.id
    bench.wait(300)
    bench.granted(tenant=CLEO, ttl_s=FULL_S)  # for 300 s more no one takes it from her
    bench.release(bench.lease("ben"))
    bench.release(bench.granted(tenant=BEN, ttl_s=FULL_S, tier=Tier.BATCH))
    bench.wait(299)
    bench.release(bench.granted(tenant=BEN, ttl_s=FULL_S, tier=Tier.BATCH))
    bench.wait(3)
    late = bench.queued(tenant=BEN, ttl_s=FULL_S, tier=Tier.BATCH)  # behind it in the queue
    assert late.status is LeaseStatus.QUEUED, "it would fit, and the room is kept"
    assert bench.lease(again.id).status is LeaseStatus.QUEUED
    bench.wait(330)
    assert bench.lease(again.id).granted_at_ns is not None


def beside(weight: int, other: int) -> tuple[Bench, LeaseRecord, LeaseRecord]:
    """Ben's group holds the one GPU, and Ann's waits for it from the first moment on."""
    bench = Bench(gpus=1, policy=POLICY)
    for tenant, name, each in ((BEN, "lab", weight), (ANN, "course", other)):
        bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId(name), weight=each)))
        bench.do(cmd.SetTenant(tenant=tenant, group=GroupId(name)))
    return bench, bench.granted(tenant=BEN, ttl_s=FULL_S), bench.queued(tenant=ANN, ttl_s=FULL_S)


@pytest.mark.parametrize(("weight", "other", "at_s"), [(1, 1, 600), (1, 3, 600), (3, 1, 800), (3, 2, 600)])
def test_a_holder_of_more_weight_keeps_its_lease_until_its_share_is_the_larger_one(
    weight: int, other: int, at_s: int
) -> None:
    """It is looked at every 100 s, the shortest turn; until then it is renewed, and explain knows the moment."""
    bench, held, waits = beside(weight, other)
    if at_s > 600:
        bench.wait(600)
        assert isinstance(bench.renew(held), Granted)
    reasons = bench.ledger.explain(bench.lease(waits.id), bench.now).reasons
    (room,) = [reason for reason in reasons if reason.kind is ReasonKind.ROOM]
    assert room.at_ns == seconds(1000 + at_s)
    bench.wait(1000 + at_s - 1 - bench.now_ns / seconds(1))
    assert bench.lease(held.id).status is LeaseStatus.ACTIVE
    bench.wait(1)
    notice = bench.lease(held.id).notice
    assert notice is not None
    assert (notice.reason, notice.beneficiary) == (EndReason.FAIR_SHARE, waits.id)


def test_no_weight_keeps_a_request_waiting_for_more_than_eight_turns() -> None:
    bench, held, waits = beside(1000, 1)
    bench.wait(8 * 600 - 1)
    assert isinstance(bench.renew(held), Granted)
    bench.wait(1)
    assert bench.lease(held.id).status is LeaseStatus.NOTICED
    bench.wait(30)
    assert bench.lease(waits.id).granted_at_ns is not None


def test_nothing_happens_at_a_moment_of_a_lease_that_has_ended() -> None:
    """Nor at one at which an interactive lease could be taken only for a floor, which no group has: the office is woken
    when Ann's lease has been held for the maximum, and not before."""
    bench = Bench(gpus=3, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    begun_ns = bench.now_ns
    held = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(5)
    short = [bench.granted(tenant=tenant, ttl_s=FULL_S) for tenant in (BEN, CLEO)]
    bench.idle(short[0])
    bench.wait(5)
    for lease in short:
        bench.release(lease)
    waiting = bench.queued(gpu(8, count=3), tenant=BEN, ttl_s=FULL_S)
    woken = []
    while (wake_ns := bench.ledger.next_wake_ns()) is not None and bench.lease(held.id).status is LeaseStatus.ACTIVE:
        bench.wait((wake_ns - bench.now_ns) / seconds(1))
        woken.append((bench.now_ns - begun_ns) // seconds(1))
    assert woken == [10 + POLICY.gang_patience_ns // seconds(1), 600]
    assert bench.lease(held.id).notice is not None
    assert bench.lease(waiting.id).promise


def test_a_group_that_gets_a_floor_takes_what_has_run_for_the_minimum() -> None:
    """Also where no group had one as the lease began: the moment is known from then on."""
    bench = Bench(gpus=1, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    begun_ns = bench.now_ns
    held = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(10)
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("course"), floor=1)))
    bench.do(cmd.SetTenant(tenant=CLEO, group=GroupId("course")))
    bench.queued(tenant=CLEO, ttl_s=FULL_S)
    while bench.lease(held.id).status is LeaseStatus.ACTIVE:
        wake_ns = bench.ledger.next_wake_ns()
        assert wake_ns is not None
        bench.wait((wake_ns - bench.now_ns) / seconds(1))
    assert bench.now_ns == begun_ns + POLICY.min_run_batch_ns


def test_a_pause_is_kept_until_its_holder_has_no_longer_used_less() -> None:
    """Ann is on a further turn. Cleo has used less, and pauses ten seconds before that changes: then, and not at the
    end of the pause, Ann gets the GPU. Before, nothing made the office look at that moment."""
    bench = Bench(gpus=1, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    first = bench.granted(tenant=CLEO, ttl_s=FULL_S)
    bench.wait(300)
    bench.release(first)
    turn = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(600)
    ben = bench.queued(tenant=BEN, ttl_s=FULL_S)
    bench.wait(30)
    assert bench.lease(turn.id).end is not None
    bench.claim(bench.lease(ben.id))
    cleo = bench.queued(tenant=CLEO, ttl_s=FULL_S)
    again = bench.queued(tenant=ANN, ttl_s=FULL_S)
    bench.release(bench.lease(ben.id))
    bench.claim(bench.lease(cleo.id))
    at_ns = share_crosses_ns(bench.state, CLEO, ANN, bench.now_ns, bench.now_ns + seconds(500), POLICY)
    assert at_ns is not None
    assert has_smaller_share(bench.state, CLEO, ANN, at_ns - seconds(1), POLICY)
    assert not has_smaller_share(bench.state, CLEO, ANN, at_ns, POLICY)
    assert share_crosses_ns(bench.state, CLEO, ANN, bench.now_ns, at_ns - seconds(1), POLICY) is None
    bench.wait((at_ns - bench.now_ns) / seconds(1) - 10)
    bench.idle(bench.lease(cleo.id))
    bench.wait(9)
    assert bench.lease(cleo.id).status is LeaseStatus.ACTIVE
    bench.wait(2)
    assert bench.lease(cleo.id).end is not None
    assert bench.lease(again.id).status is LeaseStatus.GRANTED


# ---- what counts when it is decided whether a holder of more weight yields


def both_of_them() -> tuple[Bench, list[LeaseRecord], list[LeaseRecord]]:
    """Ben's group, of weight 3, holds both GPUs; of Ann's two batch requests none is served yet."""
    bench = Bench(gpus=2, policy=POLICY)
    for tenant, name, weight in ((BEN, "lab", 3), (ANN, "course", 1)):
        bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId(name), weight=weight)))
        bench.do(cmd.SetTenant(tenant=tenant, group=GroupId(name)))
    held = [bench.granted(tenant=BEN, ttl_s=FULL_S) for _ in range(2)]
    return bench, held, [bench.queued(tenant=ANN, ttl_s=FULL_S, tier=Tier.BATCH) for _ in range(2)]


def test_a_lease_that_is_not_renewed_any_more_counts_for_those_that_wait() -> None:
    """One GPU of the two is what Ann's group has a right to now: the second lease is renewed."""
    bench, (first, second), _ = both_of_them()
    bench.wait(600)
    refused = bench.renew(first)
    assert isinstance(refused, LeaseRevoked)
    assert refused.reason == EndReason.FAIR_SHARE
    assert bench.lease(first.id).status is LeaseStatus.ACTIVE
    check_books(type(bench.state).restore(bench.state.snapshot()))  # an office that starts again counts it as well
    assert isinstance(bench.renew(second), Granted)


def test_a_victim_that_has_ended_is_not_counted_a_second_time() -> None:
    """Its device is not verified free yet, and its holder has it no more: that is in the account already."""
    bench, held, _ = both_of_them()
    waits = [bench.queued(tenant=ANN, ttl_s=FULL_S) for _ in range(2)]
    bench.wait(600)
    [stays] = [lease for lease in held if bench.lease(lease.id).status is LeaseStatus.ACTIVE]
    [leaves] = [lease for lease in held if lease is not stays]
    bench.obedient = False
    bench.release(leaves)
    assert bench.lease(leaves.id).status is LeaseStatus.ENDING
    [request] = [lease for lease in waits if not bench.lease(lease.id).promise]
    own, other = bench.lease(stays.id), bench.lease(request.id)
    for after_s, yields in ((300, False), (500, True)):
        assert yields_after_maximum(bench.state, own, other, bench.now_ns + seconds(after_s), POLICY) is yields


def test_a_holder_of_no_more_weight_than_the_request_yields_after_the_maximum_whatever_was_used() -> None:
    """Cleo's weight makes weights differ; Ann and Ben have the same, and take turns though Ben has used more."""
    bench = Bench(gpus=1, policy=POLICY)
    bench.do(cmd.AddTenant(tenant=CLEO, token_hash="cleo"))
    bench.do(cmd.SetTenant(tenant=CLEO, weight=3))
    for wait_s in (590, 590):
        first = bench.granted(tenant=BEN, ttl_s=FULL_S)
        bench.wait(wait_s)
        bench.release(first)
    held = bench.granted(tenant=ANN, ttl_s=FULL_S)
    waits = bench.queued(tenant=BEN, ttl_s=FULL_S)
    bench.wait(599)
    assert bench.lease(held.id).status is LeaseStatus.ACTIVE
    bench.wait(1)
    notice = bench.lease(held.id).notice
    assert notice is not None
    assert (notice.reason, notice.beneficiary) == (EndReason.FAIR_SHARE, waits.id)


def test_a_maximum_that_the_operator_shortens_or_lengthens_holds_for_leases_that_are_there() -> None:
    """And the ledger wakes at the moment that it gives, not at that of the policy before."""
    for maximum_s in (300, 900):
        bench = Bench(gpus=1, policy=POLICY)
        held = bench.granted(tenant=ANN, ttl_s=FULL_S)
        bench.wait(50)
        bench.queued(tenant=BEN, ttl_s=FULL_S)
        bench.ledger.set_policy(replace(POLICY, max_hold_ns=seconds(maximum_s)))
        bench.do(cmd.Tick())
        bench.wait(maximum_s - 50 - 1)
        assert bench.lease(held.id).status is LeaseStatus.ACTIVE
        bench.wait(1)
        assert bench.lease(held.id).status is LeaseStatus.NOTICED
