"""The leases of a job: asked for while they are of use, given back when they are not."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.client.address import Address
from sublet.client.clocks import client_clock
from sublet.client.fabric import Fabric
from sublet.errors import CapacityExceeded, QuotaExceeded, SubletError
from sublet.jobs import leases
from sublet.jobs.chunks import Needs
from sublet.jobs.leases import Holdings, LeasePool

ONE = Needs()
LONG_S = 30


def test_the_book_keeps_what_is_of_use_and_refuses_the_rest() -> None:
    book = Holdings()
    assert not book.granted(ONE, "early")
    book.want(ONE, 2)
    assert book.missing(ONE) == 2
    assert book.granted(ONE, "a")
    assert book.granted(ONE, "b")
    assert not book.granted(ONE, "c")
    book.remove(ONE, "a")
    book.remove(ONE, "a")
    assert book.missing(ONE) == 1
    assert book.close() == ["b"]
    assert not book.granted(ONE, "late")
    book.want(ONE, 5)
    assert (book.missing(ONE), book.close()) == (0, [])


class Granting:
    """Answers of an office, one after the other; then leases."""

    def __init__(self, *answers: BaseException) -> None:
        self.answers = list(answers)
        self.waits: list[object] = []
        self.released: list[str] = []
        self.refusals: list[tuple[str, bool]] = []
        self.granted: list[Any] = []
        self.changed = threading.Condition()
        self.at_once = 1
        """Leases that a request gets which does not wait."""

    def acquire(self, needs: Needs, wait: float | None) -> Any:
        self.waits.append(wait)
        if self.answers:
            raise self.answers.pop(0)
        count = self.at_once if wait == 0 else 1
        return [Held(self, f"l{len(self.waits)}.{n}") for n in range(count)]

    def lease(self, needs: Needs, lease: Any) -> None:
        with self.changed:
            self.granted.append(lease)
            self.changed.notify_all()

    def refusal(self, needs: Needs, error: SubletError, final: bool) -> None:
        with self.changed:
            self.refusals.append((type(error).__name__, final))
            self.changed.notify_all()

    def until(self, what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(what, LONG_S)


class Held:
    def __init__(self, office: Granting, name: str) -> None:
        self._office, self.id = office, name

    def release(self) -> None:
        with self._office.changed:
            self._office.released.append(self.id)
            self._office.changed.notify_all()


def pool_on(office: Granting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeasePool:
    monkeypatch.setattr(leases, "AGAIN_S", 0.01)
    address = Address(url="unix:///none", socket=tmp_path / "none", home=None)
    asking = Fabric(address, client_clock())
    made = LeasePool(asking, "job", tier="batch", ttl=None, on_lease=office.lease, on_refusal=office.refusal)
    monkeypatch.setattr(made, "_acquire", office.acquire)
    monkeypatch.setattr(made._holding, "release", lambda leases: [lease.release() for lease in leases])
    asking.close()
    return made


def test_capacity_pressure_is_no_error_and_the_next_request_waits_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Granting(CapacityExceeded("full"), QuotaExceeded("yours"))
    pool = pool_on(office, tmp_path, monkeypatch)
    pool.want(ONE, 2)
    office.until(lambda: len(office.granted) == 2)
    assert office.waits == [0, None, None, 0]
    assert office.refusals == [("CapacityExceeded", False), ("QuotaExceeded", False)]
    pool.close()
    assert sorted(office.released) == sorted(lease.id for lease in office.granted)


def test_leases_that_come_together_are_kept_as_far_as_they_are_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Granting()
    office.at_once = 3
    pool = pool_on(office, tmp_path, monkeypatch)
    pool.want(ONE, 5)
    office.until(lambda: len(office.granted) == 5 and len(office.released) == 1)
    pool.close()
    assert office.waits == [0, 0]
    assert len(office.released) == 6


def test_leases_without_work_go_back_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Granting()
    office.at_once = 3
    pool = pool_on(office, tmp_path, monkeypatch)
    messages = list[list[str]]()
    monkeypatch.setattr(pool._holding, "release", lambda given: messages.append([lease.id for lease in given]))
    pool.want(ONE, 3)
    office.until(lambda: len(office.granted) == 3)
    first, second, third = office.granted
    pool.want(ONE, 1)
    pool.give_back([(ONE, first), (ONE, third)])
    assert messages == [[first.id, third.id]]
    pool.close()
    assert messages[1:] == [[second.id]]


def test_what_no_machine_has_is_said_once_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Granting(CapacityExceeded("never", reason="too_big"))
    pool = pool_on(office, tmp_path, monkeypatch)
    pool.want(ONE, 2)
    office.until(lambda: office.refusals == [("CapacityExceeded", True)])
    pool.want(ONE, 3)
    pool.close()
    assert office.waits == [0]


def test_leases_are_asked_for_again_after_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Granting(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError("no memory"))
    pool = pool_on(office, tmp_path, monkeypatch)
    pool.want(ONE, 1)
    office.until(lambda: office.granted)
    pool.close()
    assert len(office.waits) == 3


def test_a_lease_that_is_granted_after_the_end_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Granting()
    pool = pool_on(office, tmp_path, monkeypatch)
    monkeypatch.setattr(leases, "CLOSE_S", 0.01)
    came, go_on = threading.Event(), threading.Event()

    def slow(needs: Needs, wait: float | None) -> list[Held]:
        came.set()
        assert go_on.wait(LONG_S)
        return [Held(office, "late")]

    monkeypatch.setattr(pool, "_acquire", slow)
    pool.want(ONE, 1)
    assert came.wait(LONG_S)
    pool.close()
    go_on.set()
    for thread in pool._threads:
        thread.join(LONG_S)
    assert office.released == ["late"]
    assert office.granted == []


@pytest.mark.parametrize(("needs", "pays"), [(Needs(vram=1 << 30), True), (ONE, None)])
def test_priority_is_paid_for_leases_with_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: Needs, pays: bool | None
) -> None:
    """Chunks of such a job may need cores instead; for those the office sells none."""
    fabric = Fabric(Address(url="unix:///none", socket=tmp_path / "none", home=None), client_clock())
    pool = LeasePool(
        fabric, "job", tier="batch", pay_priority=True, ttl=None, on_lease=lambda *_: None, on_refusal=lambda *_: None
    )
    asked: list[dict[str, Any]] = []

    def ask(*_: Any, **terms: Any) -> list[Any]:
        asked.append(terms)
        return []

    monkeypatch.setattr(pool._holding, "many", lambda _: SimpleNamespace(gpu=ask, cpu=ask))
    pool._book.want(needs, 1)
    pool._acquire(needs, None)
    assert [terms.get("pay_priority") for terms in asked] == [pays]
    pool.close()
    fabric.close()


def test_leases_are_asked_for_again_whenever_they_are_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks ends when there are as many as are of use; and there may be no room for a new one."""
    office = Granting()
    pool = pool_on(office, tmp_path, monkeypatch)
    with monkeypatch.context() as patch:

        def no_room(name: str, work: object, **_: object) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(leases, "start_thread", no_room)
        pool.want(ONE, 1)
    for number in (1, 2, 3):
        for thread in pool._threads:
            thread.join(LONG_S)
        pool.want(ONE, number)
        office.until(lambda: len(office.granted) == number)  # noqa: B023
    pool.close()


def test_a_refusal_is_followed_by_a_rest_that_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An office that refuses is not asked again at once."""
    office = Granting(QuotaExceeded("yours"))
    pool = pool_on(office, tmp_path, monkeypatch)
    monkeypatch.setattr(leases, "AGAIN_S", 1e6)
    pool.want(ONE, 1)
    office.until(lambda: office.refusals)
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)
    assert office.waits == [0]


def test_what_a_closed_fabric_refuses_is_no_refusal_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Granting()
    pool = pool_on(office, tmp_path, monkeypatch)
    came, go_on = threading.Event(), threading.Event()

    def closed(needs: Needs, wait: float | None) -> list[Held]:
        came.set()
        assert go_on.wait(LONG_S)
        raise SubletError("this fabric is closed")

    monkeypatch.setattr(pool, "_acquire", closed)
    pool.want(ONE, 1)
    assert came.wait(LONG_S)
    pool._book.close()
    go_on.set()
    pool.close()
    assert not office.refusals


def test_so_many_leases_are_asked_for_in_one_request_and_none_of_them_is_news_when_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = Fabric(Address(url="unix:///none", socket=tmp_path / "none", home=None), client_clock())
    pool = LeasePool(fabric, "job", tier="batch", ttl=None, on_lease=lambda *_: None, on_refusal=lambda *_: None)
    asked: list[int] = []
    lease = SimpleNamespace(_held=SimpleNamespace(quiet=False))

    def many(count: int) -> Any:
        asked.append(count)
        return SimpleNamespace(cpu=lambda *_, **__: [lease])

    monkeypatch.setattr(pool._holding, "many", many)
    assert not pool._acquire(ONE, 0), "none is of use any more"
    pool._book.want(ONE, leases.MANY_MAX + 1)
    assert len(pool._acquire(ONE, 0)) == 1
    assert asked == [leases.MANY_MAX]
    assert lease._held.quiet
