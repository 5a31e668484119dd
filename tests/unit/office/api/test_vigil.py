"""The office stays awake only where that pays, never for long, and not at all where nothing comes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

import pytest

from sublet.engines import local
from sublet.office.ledger.commands import Acquire
from sublet.office.ledger.records import LOCAL_TENANT, Want
from sublet.office.vigil import ASLEEP, MOMENT_NS, SHORT_LEAST, WAITS, Vigil
from sublet.values import NS_PER_S, Kind, LeaseId, RequestId
from tests.unit.office.api.bench import bench, run, turns

LOOK_NS = 1_000


class Pretended:
    """A loop in which a look takes 1 µs, and time passes by nothing else."""

    def __init__(self, moment_ns: int = MOMENT_NS) -> None:
        self.now_ns = 0
        self.looks = 0
        self.calls: list[Callable[[], None]] = []
        self.vigil = Vigil(moment_ns, call_soon=self.calls.append, now_ns=lambda: self.now_ns, give_way=self._look)

    def _look(self) -> None:
        self.looks += 1
        self.now_ns += LOOK_NS

    def wait(self, wait_ns: int) -> int:
        """Something was done, and the next thing comes after so long; the time of it that the loop was awake."""
        until_ns = self.now_ns + wait_ns
        before = self.looks
        self.vigil.done()
        while self.calls and self.now_ns < until_ns:
            self.calls.pop(0)()
        self.now_ns = until_ns
        self.vigil.came()
        return (self.looks - before) * LOOK_NS

    def rest(self) -> None:
        """What is left of the turn after something came."""
        while self.calls:
            self.calls.pop(0)()


def test_it_sleeps_until_short_waits_have_shown_that_it_pays() -> None:
    loop = Pretended()
    assert [loop.wait(100_000) for _ in range(SHORT_LEAST + 2)] == [0] * SHORT_LEAST + [100_000] * 2


def test_it_is_awake_for_a_moment_at_the_most() -> None:
    loop = Pretended()
    for _ in range(WAITS):
        loop.wait(100_000)
    assert loop.wait(NS_PER_S) == pytest.approx(MOMENT_NS, abs=LOOK_NS)
    assert not loop.calls, "nothing is left that keeps the loop from sleeping"


def test_long_waits_end_it_and_what_they_cost_is_bounded() -> None:
    loop = Pretended()
    for _ in range(WAITS):
        loop.wait(100_000)
    awake = [loop.wait(2 * MOMENT_NS) for _ in range(100)]
    assert sum(time_ns > 0 for time_ns in awake) == WAITS - SHORT_LEAST + 1
    assert awake[-1] == 0


@pytest.mark.parametrize("short_of_four", [0, 1, 2])
def test_it_does_not_pay_where_many_waits_are_long(short_of_four: int) -> None:
    """So it is with many renewals: their orders are confirmed in no time, the next of them takes its time."""
    loop = Pretended()
    waits = [100_000] * short_of_four + [NS_PER_S] * (4 - short_of_four)
    assert sum(loop.wait(one) for _ in range(50) for one in waits) == 0


def test_it_is_awake_in_vain_for_a_quarter_of_the_waits_at_most() -> None:
    """Whatever the waits are."""
    for period in range(1, 2 * WAITS):
        loop = Pretended()
        for number in range(WAITS * period):
            loop.wait(NS_PER_S if number % period == 0 else 1)
        in_vain = sum(loop.wait(NS_PER_S if n % period == 0 else 1) == MOMENT_NS for n in range(WAITS * period))
        assert in_vain <= (WAITS - SHORT_LEAST) * period, period


def test_what_came_ends_the_looking_within_the_turn() -> None:
    loop = Pretended()
    for _ in range(WAITS + 1):
        loop.wait(100_000)
    looks = loop.looks
    loop.rest()
    assert loop.looks == looks, "while something is done nobody looks"
    assert loop.wait(100_000) == 100_000, "and then it goes on"


@pytest.mark.parametrize("at_once", [1, 24])
def test_what_passes_in_one_turn_was_waited_for_once(at_once: int) -> None:
    """Twenty renewals are confirmed together 0.3 ms after they were sent, and the next twenty come 50 ms later: that is
    as many long waits as short ones."""
    loop = Pretended()
    for _ in range(50):
        assert loop.wait(50_000_000) == 0
        assert loop.wait(300_000) == 0
        for _ in range(at_once):
            loop.vigil.passes()
        loop.rest()


def test_what_passes_is_waited_for_like_everything_else() -> None:
    loop = Pretended()
    for _ in range(WAITS):
        loop.vigil.passes()
        loop.rest()
        loop.now_ns += 100_000
    loop.vigil.passes()
    [passed] = loop.calls
    loop.calls.clear()
    passed()
    assert len(loop.calls) == 1, "it looks"
    assert loop.wait(100_000) == 100_000


def test_where_several_ask_at_a_time_it_sleeps() -> None:
    """So that more of them gather."""
    loop = Pretended()
    for _ in range(WAITS + 1):
        loop.wait(100_000)
    loop.rest()
    loop.vigil.done(1)
    assert len(loop.calls) == 1, "one alone is waited for"
    loop.vigil.came()
    loop.rest()
    loop.vigil.done(2)
    loop.vigil.came()
    assert [loop.wait(100_000) > 0 for _ in range(SHORT_LEAST + 1)] == [False] * (SHORT_LEAST - 1) + [True] * 2


def test_two_things_done_in_one_turn_do_not_look_twice() -> None:
    loop = Pretended()
    for _ in range(WAITS):
        loop.wait(100_000)
    loop.rest()
    loop.vigil.done()
    loop.vigil.came()
    loop.vigil.done()
    assert len(loop.calls) == 1


def test_left_off_it_never_looks() -> None:
    loop = Pretended(moment_ns=0)
    assert sum(loop.wait(0) for _ in range(50)) == 0


def test_the_driver_says_when_it_has_something_to_do() -> None:
    """Every turn and every confirmation that somebody may wait for; each that came is done."""
    said: list[str] = []

    class Heard(Vigil):
        def __init__(self) -> None:
            """It hears, and does nothing."""

        def passes(self) -> None:
            said.append("passes")

        def came(self) -> None:
            said.append("came")

        def done(self, asked: int = 0) -> None:
            said.append(f"done for {asked}")

    def acquire(name: str) -> Acquire:
        return Acquire(
            tenant=LOCAL_TENANT,
            lease=LeaseId(name),
            request_id=RequestId(name),
            wants=(Want(kind=Kind.MEMORY, amount=1 << 20),),
            ttl_ns=60 * NS_PER_S,
        )

    async def story() -> None:
        async with bench() as b:
            await turns()
            b.driver._vigil = Heard()
            await asyncio.gather(b.driver.submit(acquire("l1")), b.driver.submit(acquire("l2")))
            await turns()
            # A turn for both; two confirmations, which an agent in this process gives from inside of it.
            assert said == ["came", "passes", "passes", "done for 2"]

    run(story)


def test_a_real_loop_that_is_kept_awake_serves_everybody_else() -> None:
    """It only ever asks for another turn, in which sockets and timers have their place."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        vigil = Vigil(NS_PER_S, now_ns=time.perf_counter_ns, call_soon=loop.call_soon, give_way=os.sched_yield)
        for _ in range(WAITS):
            vigil.done()
            vigil.came()
        vigil.done()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            loop.call_later(0.001, theirs.send, b"next")
            assert await asyncio.wait_for(loop.sock_recv(ours, 4), 60) == b"next"
        vigil.came()

    asyncio.run(story())


@pytest.mark.parametrize(("cores", "is_asleep"), [(1, True), (2, False)])
def test_an_office_with_one_processor_sleeps(monkeypatch: pytest.MonkeyPatch, cores: int, is_asleep: bool) -> None:
    """Whoever is waited for could not run while it is awake."""
    monkeypatch.setattr(local, "usable_cores", lambda: cores)

    async def made() -> Vigil:
        return local._vigil()

    assert (asyncio.run(made()) is ASLEEP) == is_asleep
