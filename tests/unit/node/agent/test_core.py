"""What an agent decides about its supervisor, without a connection or a clock."""

from __future__ import annotations

import pytest

from sublet.errors import Disconnected, OfficeElsewhere, SubletError, Unauthorized, Unsupported
from sublet.lease_end import EndReason
from sublet.node.agent.core import AGAIN_S, EVERY_NS, ORDERS_MAX, SILENT_NS, AgentCore, LinkLoss
from sublet.values import Epoch, LeaseId, NodeId, TenantId
from sublet.wire.guests import Configured, Front, Orders, Profile
from sublet.wire.orders import End, Extend, Held, Order, Report

TAKEN_OVER = Unauthorized("another office of the same home took over")


class Stage:
    """A core, and what the office heard."""

    def __init__(self) -> None:
        self.heard: list[Report] = []
        self.core = AgentCore(report=self.heard.append, incarnation=lambda: 3)

    def join(self, *, is_new: bool = True, generations: dict[TenantId, int] | None = None) -> bool:
        """Up to where the grants were sent; whether it is a successor."""
        self.core.joining()
        configured = Configured(pid=1, version="", started_ns=0, live=(), guests=0, is_new=is_new)
        joined = self.core.configured(configured, lambda: generations or {})
        assert joined.revoke == ({} if is_new else generations or {})
        assert self.core.grants_sent(joined)
        return joined.is_successor

    def messages(self) -> list[Orders]:
        """All that there is to send."""
        found = []
        while (message := self.core.next_message()) is not None:
            found.append(message)
        return found


@pytest.fixture
def stage() -> Stage:
    return Stage()


def extend(number: int, lease: str = "l") -> Extend:
    return Extend(lease=LeaseId(lease), epoch=Epoch(1, 1), number=number, deadline_ns=number, ttl_ns=1)


def end(n: int) -> Order:
    return End(lease=LeaseId(f"l-{n}"), epoch=Epoch(1, n), number=n, parts=(), reason=EndReason.RELEASED, grace_ns=0)


def held(number: int) -> Held:
    return Held(node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 1), number=number)


def front(tenant: str, actor: str = "") -> Front:
    return Front(tenant=TenantId(tenant), actor=actor or tenant, operator=False, profile=Profile.TENANT)


def test_orders_go_out_in_order_in_messages_of_a_bounded_size(stage: Stage) -> None:
    stage.join()
    ordered = [end(n) for n in range(2 * ORDERS_MAX + 1)]
    for order in ordered:
        stage.core.send(order)
    messages = stage.messages()
    assert [order for message in messages for order in message.orders] == ordered
    assert [len(message.orders) for message in messages] == [ORDERS_MAX, ORDERS_MAX, 1]
    assert {message.incarnation for message in messages} == {3}
    assert not stage.core._out


def test_a_repeated_order_takes_the_place_of_the_one_before(stage: Stage) -> None:
    """Each lease, epoch and kind of order by itself."""
    stage.join()
    for order in (extend(1), end(1), extend(2, "other"), extend(3)):
        stage.core.send(order)
    (message,) = stage.messages()
    assert message.orders == (extend(3), end(1), extend(2, "other"))


def test_an_order_of_another_epoch_takes_no_place(stage: Stage) -> None:
    """After an attach the end of the older epoch is still to be said: each is confirmed by itself."""
    stage.join()
    older, newer = (
        End(lease=LeaseId("l"), epoch=Epoch(1, n), number=n, parts=(), reason=EndReason.RELEASED, grace_ns=0)
        for n in (1, 2)
    )
    stage.core.send(older)
    stage.core.send(newer)
    (message,) = stage.messages()
    assert message.orders == (older, newer)


def test_a_question_to_a_supervisor_that_is_gone_is_not_held_against_the_next(stage: Stage) -> None:
    """Else the operator is told that one stands still which was never asked."""
    stage.join()
    stage.core.watchdog.is_ping_due(0)
    assert stage.core.watchdog.is_ping_due(2 * EVERY_NS)
    assert stage.core.watchdog.silent_ns(2 * EVERY_NS + SILENT_NS)
    stage.core.lost(None)
    stage.join()
    assert not stage.core.watchdog.silent_ns(2 * EVERY_NS + SILENT_NS)
    stage.core.watchdog.is_ping_due(3 * EVERY_NS + SILENT_NS)
    assert stage.core.watchdog.is_ping_due(4 * EVERY_NS + SILENT_NS), "and it is asked itself"


def test_without_a_supervisor_orders_are_forgotten_and_a_joining_one_gets_none(stage: Stage) -> None:
    """A successor is told of what lives: an older order beside that would be one too many."""
    stage.join()
    stage.core.send(extend(1))
    stage.core.lost(None)
    assert stage.messages() == []
    stage.core.turn_over()
    stage.core.joining()
    stage.core.send(extend(2))
    assert stage.messages() == []
    stage.core.turn_over()
    assert stage.join()
    assert stage.messages() == []


def test_reports_wait_until_the_office_listens(stage: Stage) -> None:
    stage.join()
    stage.core.on_reports((held(1), held(2)))
    assert stage.heard == []
    stage.core.listen()
    stage.core.on_reports((held(3),))
    assert stage.heard == [held(1), held(2), held(3)]


def test_only_who_comes_after_another_is_a_successor(stage: Stage) -> None:
    assert not stage.join()
    stage.core.lost(None)
    assert stage.join()


def test_old_rights_are_cut_where_connections_may_be_left(stage: Stage) -> None:
    """A new supervisor has no connections yet."""
    assert not stage.join(is_new=False, generations={TenantId("ann"): 2})
    stage.core.lost(None)
    assert stage.join(is_new=True, generations={TenantId("ann"): 2})


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (None, LinkLoss.JOIN_AGAIN),
        (Disconnected("it left too much unread"), LinkLoss.JOIN_AGAIN),
        (SubletError("internal error"), LinkLoss.JOIN_AGAIN),
        (TAKEN_OVER, LinkLoss.REPLACED),
    ],
    ids=["it ended", "it hung up", "a mistake", "another office"],
)
def test_what_follows_a_loss(stage: Stage, error: SubletError | None, then: LinkLoss) -> None:
    stage.join()
    assert stage.core.lost(error) is then
    assert not stage.core.is_joined
    assert not stage.core.is_informed


def test_a_connection_that_is_lost_before_it_was_joined_or_after_the_end_is_no_loss(stage: Stage) -> None:
    stage.core.joining()
    assert stage.core.lost(None) is LinkLoss.WHILE_JOINING
    stage.join()
    stage.core.close()
    assert stage.core.lost(None) is LinkLoss.WHILE_JOINING


def test_an_office_that_starts_gives_up_soon_and_says_why(stage: Stage) -> None:
    pauses = [stage.core.pause_s(Disconnected("it was just about to end")) for _ in range(4)]
    assert pauses == [*AGAIN_S[:3], None]


@pytest.mark.parametrize("error", [OfficeElsewhere("a copy"), Unsupported("another version"), MemoryError()], ids=repr)
def test_an_office_that_starts_tries_no_second_time_what_will_not_change(stage: Stage, error: BaseException) -> None:
    assert stage.core.pause_s(error) is None


def test_an_office_that_runs_goes_on_trying_ever_more_slowly(stage: Stage) -> None:
    stage.join()
    for _ in range(2):
        stage.core.lost(None)
        errors = (None, Disconnected(""), OSError(24, ""), MemoryError(), Unsupported(""), TimeoutError())
        pauses = [stage.core.pause_s(error) for error in errors]
        assert pauses == [*AGAIN_S, AGAIN_S[-1], AGAIN_S[-1]]
        stage.join()  # from now on it begins anew


def test_an_internal_error_while_joining_is_not_tried_again(stage: Stage) -> None:
    stage.join()
    assert stage.core.pause_s(ZeroDivisionError()) is None


def test_the_supervisor_is_told_once_the_grants_are_on_their_way(stage: Stage) -> None:
    """Else it would deny the leases of the holders that are admitted."""
    stage.core.joining()
    joined = stage.core.configured(Configured(pid=1, version="", started_ns=0, live=(), guests=0))
    stage.core.turn_over()
    assert not stage.core.is_informed
    assert stage.core.grants_sent(joined)
    assert stage.core.next_message() is None
    assert not stage.core.is_informed, "not before the turn that ordered them is over"
    stage.core.turn_over()
    assert stage.core.next_message() is None
    assert stage.core.is_informed


def test_no_holder_is_admitted_before_the_last_grant_is_out(stage: Stage) -> None:
    """Thousands of grants are several messages, and what a holder asks would come before those that wait for room."""
    stage.core.joining()
    joined = stage.core.configured(Configured(pid=1, version="", started_ns=0, live=(), guests=0))
    for n in range(ORDERS_MAX + 1):
        stage.core.send(end(n))
    stage.core.grants_sent(joined)
    stage.core.turn_over()
    told = []
    while stage.core.next_message() is not None:
        told.append(stage.core.is_informed)
    assert told == [False, True]
    stage.core.send(end(0))
    assert stage.core.is_informed, "an order of another turn is not waited for"


def test_grants_that_were_handed_in_for_one_that_is_gone_do_not_count_for_the_next(stage: Stage) -> None:
    stage.core.joining()
    joined = stage.core.configured(Configured(pid=1, version="", started_ns=0, live=(), guests=0))
    stage.core.lost(None)
    stage.core.joining()
    stage.core.configured(Configured(pid=2, version="", started_ns=0, live=(), guests=0))
    assert not stage.core.grants_sent(joined)
    stage.core.turn_over()
    assert stage.messages() == []
    assert not stage.core.is_informed


def test_a_holder_is_admitted_while_its_lease_is_known_and_its_rights_are_what_they_were(stage: Stage) -> None:
    ann, page = front("ann"), front("bob", actor="ann")
    rights = {one.tenant: stage.core.rights(one) for one in (ann, page)}
    with pytest.raises(Disconnected):
        stage.core.check_admission(ann, rights[ann.tenant])
    stage.join()
    stage.core.turn_over()
    assert stage.messages() == []
    for one in (ann, page):
        stage.core.check_admission(one, rights[one.tenant])
    stage.core.cut_off(TenantId("ann"))
    for one in (ann, page):
        with pytest.raises(Unauthorized):
            stage.core.check_admission(one, rights[one.tenant])
    stage.core.check_admission(ann, stage.core.rights(ann))
    stage.core.check_admission(front("cid"), stage.core.rights(front("cid")))
