"""Work that asks the office: slow work of one person or tenant keeps no other waiting, nor does a silent office."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from sublet.errors import Disconnected, SubletError
from sublet.studio import turns
from sublet.studio.turns import PERSON_MAX, TENANT_MAX, OfficeWatch, PagePause, Turns, is_slow
from tests.traces import until

PATIENCE_S = 60.0
FOREVER_S = 1e6


def slow() -> Disconnected:
    error = Disconnected("no answer")
    error.__cause__ = TimeoutError()
    return error


class Slow:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Semaphore(0)
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        self.begun.release()
        assert self.may_end.wait(PATIENCE_S)
        return "late"


async def begun(work: Slow, times: int) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(work.begun.acquire, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("slow_one", "other"),
    [(("ana", "physics"), ("bob", "physics")), (("ana", "physics"), ("bob", "biology"))],
    ids=["another person", "another tenant"],
)
def test_slow_work_of_one_person_keeps_no_other_waiting(slow_one: tuple[str, str], other: tuple[str, str]) -> None:
    """However much of it there is; and what is done at once is no more than that person's share."""

    async def play() -> None:
        turn, work = Turns(OfficeWatch(lambda: None)), Slow()
        late = [asyncio.create_task(turn.run(*slow_one, work, FOREVER_S)) for _ in range(3 * PERSON_MAX)]
        await begun(work, PERSON_MAX)
        assert [await turn.run(*other, lambda: "quick", FOREVER_S) for _ in range(5)] == ["quick"] * 5
        assert work.count == PERSON_MAX
        work.may_end.set()
        assert await asyncio.gather(*late) == ["late"] * len(late)
        assert not turn._lines, "what is empty is forgotten"

    asyncio.run(play())


def test_slow_work_of_a_whole_tenant_keeps_no_other_waiting() -> None:
    async def play() -> None:
        turn, work = Turns(OfficeWatch(lambda: None)), Slow()
        late = [asyncio.create_task(turn.run(f"p-{n}", "course", work, FOREVER_S)) for n in range(3 * TENANT_MAX)]
        await begun(work, TENANT_MAX)
        assert await turn.run("bob", "biology", lambda: "quick", FOREVER_S) == "quick"
        assert work.count == TENANT_MAX
        work.may_end.set()
        await asyncio.gather(*late)

    asyncio.run(play())


def test_a_request_that_is_given_up_while_it_waits_keeps_no_place() -> None:
    """A browser that has closed its page must not cost its person a place for good."""

    async def play() -> None:
        turn, work = Turns(OfficeWatch(lambda: None), person=2, tenant=1), Slow()
        late = asyncio.create_task(turn.run("ana", "physics", work, FOREVER_S))
        await begun(work, 1)
        for _ in range(3):
            waiting = asyncio.create_task(turn.run("ana", "physics", lambda: "never", FOREVER_S))
            for _ in range(5):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        work.may_end.set()
        assert await late == "late"
        assert not turn._lines
        assert await turn.run("ana", "physics", lambda: "quick", FOREVER_S) == "quick"

    asyncio.run(play())


def test_work_is_broken_off_at_its_limit_and_what_had_not_begun_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had begun goes on and keeps its place until it is done."""
    monkeypatch.setattr(turns, "STEP_S", 0.001)

    async def play() -> None:
        turn, work = Turns(OfficeWatch(lambda: None)), Slow()
        first = [asyncio.create_task(turn.run("ana", "physics", work, FOREVER_S)) for _ in range(PERSON_MAX - 1)]
        await begun(work, PERSON_MAX - 1)
        broken = [asyncio.create_task(turn.run("ana", "physics", work, 0.01)) for _ in range(5)]
        for one in broken:
            with pytest.raises(Disconnected, match=r"did not answer within 0\.01 s"):
                await one
        assert work.count == PERSON_MAX
        work.may_end.set()
        await asyncio.gather(*first)
        assert await turn.run("ana", "physics", lambda: "quick", FOREVER_S) == "quick"
        assert work.count == PERSON_MAX, "the other four were never begun"

    asyncio.run(play())


def test_no_page_is_begun_for_a_moment_after_a_request_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on meanwhile, and the pause is over in its time."""
    monkeypatch.setattr(turns, "PAUSE_S", 0.2)

    async def play() -> None:
        pause, done = PagePause(), list[str]()
        requests, pages = Turns(OfficeWatch(lambda: None)), Turns(OfficeWatch(lambda: None), pause=pause)
        await pages.run("ana", "physics", lambda: done.append("before"), FOREVER_S)
        pause.request_came()
        page = asyncio.create_task(pages.run("ana", "physics", lambda: done.append("page"), FOREVER_S))
        await requests.run("bob", "biology", lambda: done.append("request"), FOREVER_S)
        await page
        assert done == ["before", "request", "page"]

    asyncio.run(play())


def test_pauses_take_a_part_of_the_time_however_many_requests_come() -> None:
    """A request in each millisecond of a minute: pages have three quarters of it."""

    class Loop(asyncio.SelectorEventLoop):
        now_s = 0.0

        def time(self) -> float:
            return self.now_s

    async def play() -> None:
        pause, paused_ms, loop = PagePause(), 0, asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        for _ in range(60_000):
            loop.now_s += 0.001
            pause.request_came()
            over = pause.over()
            try:
                over.send(None)
            except StopIteration:
                pass
            else:
                paused_ms += 1
            over.close()
        assert paused_ms / 60_000 == pytest.approx(1 / turns.PAUSE_SHARE, abs=0.02)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(play())


def test_a_request_that_waits_is_not_looked_at_before_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds may wait at once, and the loop has to serve the others."""
    monkeypatch.setattr(turns, "SLOW_S", FOREVER_S)
    looks: list[float | None] = []
    wait = asyncio.wait

    def counted(tasks: set[asyncio.Task[str]], **how: float | None) -> object:
        looks.append(how["timeout"])
        return wait(tasks, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "wait", counted)

    async def play() -> None:
        turn, work = Turns(OfficeWatch(lambda: None)), Slow()
        late = [asyncio.create_task(turn.run("ana", "physics", work, 2 * FOREVER_S)) for _ in range(2 * PERSON_MAX)]
        await begun(work, PERSON_MAX)
        work.may_end.set()
        assert await asyncio.gather(*late) == ["late"] * len(late)

    asyncio.run(play())
    assert looks == [FOREVER_S] * 2 * PERSON_MAX


def test_an_office_that_answers_no_probe_is_told_at_once_to_all_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also to those who wait already; nothing more is begun meanwhile, and one thread probes."""
    monkeypatch.setattr(turns, "STEP_S", 0.001)
    monkeypatch.setattr(turns, "SLOW_S", 0.0)
    monkeypatch.setattr(turns, "AGAIN_S", 0.001)
    answers, probing, most = threading.Event(), [0], [0]

    def probe() -> None:
        probing[0] += 1
        most[0] = max(most[0], probing[0])
        try:
            if not answers.is_set():
                raise slow()
        finally:
            probing[0] -= 1

    async def play() -> None:
        watch, work = OfficeWatch(probe), Slow()
        turn = Turns(watch)
        waiting = [asyncio.create_task(turn.run(f"p-{n}", f"t-{n}", work, FOREVER_S)) for n in range(100)]
        for one in waiting:
            with pytest.raises(Disconnected, match="does not answer now"):
                await one
        count = work.count
        with pytest.raises(Disconnected, match="does not answer now"):
            await turn.run("bob", "biology", work, FOREVER_S)
        assert work.count == count
        answers.set()
        work.may_end.set()
        await asyncio.to_thread(until, "it answers", lambda: not watch.is_silent)
        assert await turn.run("bob", "biology", lambda: "quick", FOREVER_S) == "quick"
        assert most == [1]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("why", "is_silent"),
    [
        (TimeoutError, True),
        (ConnectionRefusedError, False),
        (FileNotFoundError, False),
    ],
)
def test_an_office_that_is_not_there_is_not_silent(why: Callable[[], Exception], is_silent: bool) -> None:
    """It refuses at once, and the next request may start it."""
    error = Disconnected("no answer")
    error.__cause__ = Disconnected("no answer")
    error.__cause__.__cause__ = why()
    assert is_slow(error) is is_silent
    assert not is_slow(SubletError("something else"))
    looked = threading.Event()

    def probe() -> None:
        if looked.is_set():
            return
        looked.set()
        raise error

    watch = OfficeWatch(probe)
    watch.start_probing()
    assert looked.wait(PATIENCE_S)
    if not is_silent:
        watch.check()
    watch.close()
    assert watch.means_silence(error) is is_silent
    assert OfficeWatch(probe, may_start=False).means_silence(error), "no request starts it, so that none is to wait"


def test_errors_of_work_are_those_of_its_caller() -> None:
    async def play() -> None:
        turn = Turns(OfficeWatch(lambda: None))

        def fails() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await turn.run("ana", "physics", fails, FOREVER_S)
        assert not turn._lines

    asyncio.run(play())
