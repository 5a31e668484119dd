"""The hardware behind its shield: whatever fails, the law goes on, and nothing becomes free by it."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from sublet.lease.hardware import Hardware, NotYet
from sublet.lease_end import EndReason
from sublet.node.supervisor.guarded_hardware import GuardedHardware
from sublet.values import Epoch, LeaseId, ResourceId, TenantId
from sublet.wire.orders import VolumeRef

A, E5, R = LeaseId("a"), Epoch(1, 5), ResourceId("r")


class Broken:
    """Fails whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> NoReturn:
            raise RuntimeError(name)

        return fail


def test_a_mistake_is_told_once_for_each_thing_said_and_raises_nothing() -> None:
    told: list[LeaseId] = []
    shield = GuardedHardware(cast("Hardware", Broken()), told.append)
    shield.grant(A, TenantId("t"), E5, (), 0)
    shield.extend(A, E5, 0)
    shield.notice(A, None)
    shield.warn(A, E5, 0)
    shield.cancel_warning(A, E5)
    shield.announce_end(A, E5, EndReason.EXPIRED, 0, "", 0)
    assert told == [A] * 6


def test_what_cannot_be_answered_is_answered_so_that_nothing_becomes_free() -> None:
    shield = GuardedHardware(cast("Hardware", Broken()))
    assert shield.is_there(R, A, E5)
    verdict = shield.verify(R, A, E5, 7)
    assert isinstance(verdict, NotYet)
    assert verdict.again_ns is not None
    assert verdict.again_ns > 7
    again_ns = shield.kill(R, A, E5, 7)
    assert again_ns is not None
    assert again_ns > 7
    assert "log" in shield.why_alive(R, A, E5)
    assert shield.fault(R) is None
    assert shield.volumes() is None, "which is not that there are none"
    assert shield.volume_epoch(VolumeRef(tenant=TenantId("t"), name="v")) is not None
    shield.forget(R, A)


def test_a_mistake_in_what_is_told_of_mistakes_raises_nothing() -> None:
    def fail(_: LeaseId) -> None:
        raise RuntimeError("again")

    GuardedHardware(cast("Hardware", Broken()), fail).extend(A, E5, 0)
