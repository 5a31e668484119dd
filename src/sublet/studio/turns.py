"""Runs work that asks the office on threads, bounded per person, per tenant, in all, and in time.

What is answered from the studio's own files does not come this way, so an office that does not answer keeps no sign-in
waiting. Work that takes long makes the office be probed: where it does not answer that either, all that waits is told
so at once, and what comes is told before it begins, until a probe is answered. Where it does, that work alone is slow,
and what it occupies is no more than its person's and its tenant's share of the threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from sublet.background import start_thread
from sublet.errors import Disconnected, SubletError

PERSON_MAX: Final = 4
"""Threads in which one person's requests are at once; one more waits for its turn."""
TENANT_MAX: Final = 16
ALL_MAX: Final = 64
SLOW_S: Final = 2.0
"""What takes longer makes the office be probed."""
STEP_S: Final = 0.5
"""From then on each looks so often whether the office answers; not before, since hundreds may wait at once."""
AGAIN_S: Final = 1.0
"""Between two probes of an office that did not answer."""
PAUSE_S: Final = 0.04
"""After a request has come no page is begun for so long: most reach the office in that time."""
PAUSE_SHARE: Final = 4
"""Pauses take one part in so many of the time, however many requests come."""
_T = TypeVar("_T")


class OfficeWatch:
    """Whether the office answers. Safe to use from several threads."""

    def __init__(self, probe: Callable[[], object], *, may_start: bool = True) -> None:
        """``probe`` raises ``SubletError`` where the office does not answer in its time. ``may_start``: a request to an
        office that is not there starts one, so that only one that is there and does not answer is silent."""
        self._probe, self._may_start = probe, may_start
        self._lock = threading.Lock()
        self._is_probing = False
        self._is_silent = threading.Event()
        self._over = threading.Event()

    @property
    def is_silent(self) -> bool:
        """It did not answer the last probe."""
        return self._is_silent.is_set()

    def check(self) -> None:
        """Raise ``Disconnected`` while it does not answer."""
        if self.is_silent:
            raise silent()

    def start_probing(self) -> None:
        """Something takes long: probe until it answers, in a thread, if that is not done already."""
        with self._lock:
            if self._is_probing:
                return
            self._is_probing = True
        start_thread("studio_probe", self._probe_until_answered)

    def means_silence(self, error: SubletError) -> bool:
        """Whether a probe that ended so will not end otherwise before the office does something."""
        return isinstance(error, Disconnected) and (is_slow(error) or not self._may_start)

    def close(self) -> None:
        """Probe no more."""
        self._over.set()

    def _probe_until_answered(self) -> None:
        try:
            while not self._over.is_set():
                try:
                    self._probe()
                except SubletError as error:
                    if self.means_silence(error):
                        self._is_silent.set()
                        self._over.wait(AGAIN_S)
                        continue
                return
        finally:
            with self._lock:
                self._is_silent.clear()
                self._is_probing = False


class PagePause:
    """While a request is on its way to the office, pages wait. For one event loop.

    One thread of Python computes at a time. A request stops and goes on some twenty times, and where eight pages are
    made meanwhile it waits for each of them each time.
    """

    def __init__(self) -> None:
        self._until_s = self._next_s = -math.inf

    def request_came(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_s:
            self._until_s, self._next_s = now_s + PAUSE_S, now_s + PAUSE_SHARE * PAUSE_S

    async def over(self) -> None:
        """Wait until it is over."""
        left_s = self._until_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)


class Turns:
    """Decides which request may ask the office now. For one event loop."""

    def __init__(
        self,
        watch: OfficeWatch,
        *,
        pause: PagePause | None = None,
        person: int = PERSON_MAX,
        tenant: int = TENANT_MAX,
        everything: int = ALL_MAX,
    ) -> None:
        """How much is done at once: of one person, of one tenant, and in all. Nothing is begun in a ``pause``."""
        self._watch, self._person_max, self._tenant_max, self._pause = watch, person, tenant, pause
        self._pool = ThreadPoolExecutor(everything, thread_name_prefix="sublet-studio")
        self._all = asyncio.Semaphore(everything)
        self._lines: dict[Hashable, _Line] = {}

    async def run(self, person: str, tenant: str, work: Callable[[], _T], limit_s: float) -> _T:
        """The result of this work, in its turn. Raises ``Disconnected`` where the office does not answer, or it takes
        longer than ``limit_s``; work that has begun goes on then, and what had not begun is not done."""
        self._watch.check()
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._in_turn(person, tenant, work))
        began_s, wait_s = loop.time(), min(SLOW_S, limit_s)
        try:
            while not (await asyncio.wait((task,), timeout=wait_s))[0]:
                took_s, wait_s = loop.time() - began_s, STEP_S
                if took_s >= SLOW_S:
                    self._watch.start_probing()
                    self._watch.check()
                if took_s >= limit_s:
                    raise Disconnected(
                        f"the office did not answer within {limit_s:g} s",
                        do="Look how it is now before you ask again: what was asked for may still come.",
                    )
            return task.result()
        finally:
            task.cancel()

    async def _in_turn(self, person: str, tenant: str, work: Callable[[], _T]) -> _T:
        places: list[_Line | asyncio.Semaphore] = []

        def leave(_: object = None) -> None:
            for place in places:
                place.release()

        try:
            for key, most in ((("person", person), self._person_max), (("tenant", tenant), self._tenant_max)):
                line = self._lines.setdefault(key, _Line(self._lines, key, most))
                await line.acquire()
                places.append(line)
            await self._all.acquire()
            places.append(self._all)
            if self._pause is not None:
                await self._pause.over()
        except BaseException:
            leave()
            raise
        # The places are left when the thread is done, not when its result is waited for no more.
        # with what is known of the request: under which path its browser sees the studio
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(work))
        future.add_done_callback(leave)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)


class _Line:
    """The places of one person or tenant; it is forgotten when it is empty."""

    def __init__(self, lines: dict[Hashable, _Line], key: Hashable, most: int) -> None:
        self._lines, self._key = lines, key
        self._free = asyncio.Semaphore(most)
        self._users = 0

    async def acquire(self) -> None:
        self._users += 1
        try:
            await self._free.acquire()
        except BaseException:
            self._leave()
            raise

    def release(self) -> None:
        self._free.release()
        self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            del self._lines[self._key]


def silent() -> Disconnected:
    """What people are told while the office does not answer."""
    return Disconnected(
        "the office does not answer now", do="Try again in a moment: leases and what waits are not affected."
    )


def is_slow(error: BaseException) -> bool:
    """Whether the office was there and did not answer in time."""
    why: BaseException | None = error
    while isinstance(why, Disconnected):
        why = why.__cause__
    return isinstance(why, TimeoutError)
