"""The threads and tasks of a fabric, sync and asyncio: no failure of a turn ends the renewing, or loses what is to
be given back."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from sublet import background
from sublet.client import background_requests, lease_table
from sublet.client.aio_keeper import AioKeeper
from sublet.client.handle import CallbackThread
from sublet.client.lease_table import LeaseTable
from sublet.client.operations import OfficeOperations, ReceivedGrant
from sublet.client.renewal_thread import RenewalThread
from sublet.client.steps import HttpCall, HttpReply
from sublet.clock import SystemClock
from sublet.errors import Disconnected, SubletError
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.values import NS_PER_S, Epoch, RenewMode
from sublet.wire.http import GrantAnswer, RenewalsAnswer, RenewAnswer
from tests.traces import until as until_it_is
from tests.unit.client.script import ended, reply, view

TTL_S: Final = 60.0
ERRORS: Final = [
    *(OSError(number, os.strerror(number)) for number in sorted(background.SHORTAGES)),
    MemoryError("no memory"),
    KeyError("a mistake"),
]


class Flight:
    """A request that is answered already."""

    def __init__(self, answer: HttpReply) -> None:
        self._answer = answer
        self.status, self.complete = answer.status, False
        self.sent_ns = SystemClock().now_ns()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"!")

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> bytes:
        self.complete = True
        self.close()
        return self._answer.body

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Office:
    """Renews and takes back whatever it is asked to; the far side of both transports."""

    def __init__(self) -> None:
        self.renewals = 0
        self.released: set[str] = set()

    def answer(self, call: HttpCall) -> HttpReply:
        if call.path.endswith("/release"):
            self.released.add(call.path.split("/")[-2])
            return reply(ended("released", id=call.path.split("/")[-2]))
        if call.path == "/v1/leases/l-2":
            return reply(GrantAnswer(lease=view(id="l-2")))
        if "renew" not in call.path:
            raise Disconnected("this office only renews", sent=True)
        self.renewals += 1
        answer = RenewAnswer(lease="l-1", epoch=Epoch(1, 7), deadline=0.0, ttl=TTL_S, number=self.renewals)
        return reply(RenewalsAnswer(items=[answer], errors=[None]))

    def launch(self, call: HttpCall) -> Flight:
        return Flight(self.answer(call))

    async def exchange(self, call: HttpCall) -> HttpReply:
        found = self.answer(call)
        return found._replace(sent_ns=SystemClock().now_ns())

    async def open_stream(self, path: str, timeout_s: float) -> None:
        raise Disconnected("no news here", sent=False)

    def close(self) -> None:
        pass


class Failing:
    """A function that fails so many times, and works then."""

    def __init__(self, works: Callable[..., Any], error: BaseException, times: int = 3) -> None:
        self._works, self._error, self.left = works, error, times

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self._error
        return self._works(*args, **named)


class Failed:
    """A program that fails at its first step."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def send(self, value: object) -> Any:
        raise self._error

    throw = send

    def __next__(self) -> Any:
        raise self._error


class Desk:
    """One lease that is due for renewal at every moment, and one that was dropped, and is to be given back."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.core, self.book = OfficeOperations(self.clock), LeaseTable(self.clock, lambda: "r-release")
        self.office = Office()
        grant = ReceivedGrant(view=view(ttl=TTL_S, remaining=TTL_S), sent_ns=self.clock.now_ns())
        policy = RenewalPolicy(mode=RenewMode.ALWAYS, every=0.02, backoff_first=0.01, backoff_max=0.02)
        self.held = self.book.open(grant, policy)
        grant = ReceivedGrant(view=view(id="l-2", ttl=TTL_S, remaining=TTL_S), sent_ns=self.clock.now_ns())
        self.book.dropped.append(self.book.open(grant, RenewalPolicy(mode=RenewMode.NEVER)))

    def fail_at(self, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException) -> Failing:
        where, name = {
            "collect": (self.book, "collect"),
            "pending_activity_reports": (self.book, "pending_activity_reports"),
            "record_outcomes": (self.book, "record_outcomes"),
            "next_wake": (self.book, "next_wake_ns"),
            "poll": (select, "poll"),
            "launch": (self.office, "launch"),
            "exchange": (self.office, "exchange"),
            "program": (background_requests, "renew"),
        }[place]
        failing = Failing(getattr(where, name), error)
        if place == "program":

            def broken(*args: Any) -> Any:
                try:
                    return failing(*args)
                except BaseException as found:
                    return Failed(found)

            monkeypatch.setattr(background_requests, "renew", broken)
        else:
            monkeypatch.setattr(where, name, failing)
        return failing


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))
    monkeypatch.setattr(lease_table, "RETURN_AGAIN_NS", NS_PER_S // 100)


@pytest.mark.parametrize(
    "place", ["collect", "pending_activity_reports", "record_outcomes", "next_wake", "poll", "launch", "program"]
)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failed_turn_of_the_thread_ends_no_renewing(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    desk = Desk()
    keeper = RenewalThread(desk.book, desk.core, desk.office, desk.clock, threading.RLock(), lambda: None)  # type: ignore[arg-type]
    failing = desk.fail_at(monkeypatch, place, error)
    keeper.start()
    try:
        until(lambda: failing.left == 0)
        seen = desk.office.renewals
        until(lambda: desk.office.renewals >= seen + 2)
        until(lambda: desk.held.holder.status is LeaseStatus.ACTIVE)
        until(lambda: desk.office.released == {"l-2"})
    finally:
        keeper.stop(20)


@pytest.mark.parametrize(
    "place", ["collect", "pending_activity_reports", "record_outcomes", "next_wake", "exchange", "program"]
)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failed_turn_of_the_task_ends_no_renewing(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    async def nobody() -> None:
        pass

    async def story() -> None:
        desk = Desk()
        keeper = AioKeeper(desk.book, desk.core, desk.office, desk.clock, nobody)  # type: ignore[arg-type]
        failing = desk.fail_at(monkeypatch, place, error)
        keeper.start()
        try:
            async with asyncio.timeout(60):
                while failing.left:  # noqa: ASYNC110 - what is waited for is no event
                    await asyncio.sleep(0.002)
                seen = desk.office.renewals
                while desk.office.renewals < seen + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                while desk.office.released != {"l-2"} or desk.held.holder.status is not LeaseStatus.ACTIVE:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        finally:
            await keeper.stop()

    asyncio.run(story())


def until(is_so: Callable[[], object]) -> None:
    until_it_is("what the thread is to do", is_so, 60)


def test_a_turn_of_the_thread_takes_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes one is refused; then the renewals still come."""
    monkeypatch.setattr(select, "epoll", Failing(select.epoll, OSError(errno.EMFILE, "Too many open files"), 10**9))
    desk = Desk()
    keeper = RenewalThread(desk.book, desk.core, desk.office, desk.clock, threading.RLock(), lambda: None)  # type: ignore[arg-type]
    keeper.start()
    until(lambda: desk.office.renewals >= 3)
    keeper.stop(20)


def test_a_thread_that_has_died_is_started_by_the_next_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    keeper = RenewalThread(desk.book, desk.core, desk.office, desk.clock, threading.RLock(), lambda: None)  # type: ignore[arg-type]
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    monkeypatch.setattr(keeper, "_thread", dead)
    keeper.start()
    until(lambda: desk.office.renewals >= 1)
    keeper.stop(20)


def test_where_no_thread_can_be_started_the_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    keeper = RenewalThread(desk.book, desk.core, desk.office, desk.clock, threading.RLock(), lambda: None)  # type: ignore[arg-type]
    start = Failing(threading.Thread.start, RuntimeError("can't start new thread"), 1)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: start(thread))  # noqa: PLW0108 - a method
    with pytest.raises(SubletError, match="could not be started"):
        keeper.start()
    keeper.start()
    until(lambda: desk.office.renewals >= 1)
    keeper.stop(20)


def test_callbacks_come_after_one_that_ends_its_thread() -> None:
    callbacks, told = CallbackThread(), list[object]()

    def leave(_: object) -> None:
        raise SystemExit(1)

    callbacks.deliver(leave, 1)
    callbacks.deliver(told.append, 2)
    until(lambda: told == [2])


def test_callbacks_come_once_there_is_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks, told = CallbackThread(), list[object]()
    start = Failing(threading.Thread.start, RuntimeError("can't start new thread"), 1)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: start(thread))  # noqa: PLW0108 - a method
    callbacks.deliver(told.append, 1)
    callbacks.deliver(told.append, 2)
    until(lambda: told == [1, 2])
