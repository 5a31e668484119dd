"""The state table and rules of a served program. Pure: no clock, socket or guest.

A program has a lease while requests come. ``Served`` is told what happens and answers with what is to be done now; its
driver (``serve``) does it and tells the outcome. A request is begun by the program at most once: one that the program
refused, since its lease was about to end, waits for the next lease; one whose outcome is not known is answered as such,
and never sent again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

from sublet.lazy_dataclass import dataclass


class ProgramState(enum.StrEnum):
    """Where a served program is."""

    COLD = "cold"
    """It has no lease. What it saved is kept."""
    WAITING = "waiting"
    """A lease was asked for."""
    LOADING = "loading"
    """It has a lease; it is imported, and what it saved is restored."""
    SERVING = "serving"
    """It takes requests."""
    LEAVING = "leaving"
    """It begins nothing more; its lease is about to end."""


class ProgramEvent(enum.StrEnum):
    """What can happen to a served program."""

    ASK = "ask"
    """A request came while it had no lease."""
    GRANT = "grant"
    REFUSE = "refuse"
    """The office refused, or the request for a lease was withdrawn."""
    LOAD = "load"
    """It is loaded."""
    FAIL = "fail"
    """It cannot be loaded, broke the protocol, or hangs."""
    LEAVE = "leave"
    """It has saved, since its lease is about to end."""
    LOSE = "lose"
    """Its lease has ended, and with it all of its processes; or they ended by themselves."""


class ProgramTransitionError(ValueError):
    """The table does not know this event in this state."""


_S, _E = ProgramState, ProgramEvent
PROGRAM_TABLE: Final[Mapping[tuple[ProgramState, ProgramEvent], ProgramState]] = {
    (_S.COLD, _E.ASK): _S.WAITING,
    (_S.WAITING, _E.GRANT): _S.LOADING,
    (_S.WAITING, _E.REFUSE): _S.COLD,
    (_S.LOADING, _E.LOAD): _S.SERVING,
    (_S.LOADING, _E.FAIL): _S.LEAVING,
    (_S.LOADING, _E.LEAVE): _S.LEAVING,
    (_S.LOADING, _E.LOSE): _S.COLD,
    (_S.SERVING, _E.FAIL): _S.LEAVING,
    (_S.SERVING, _E.LEAVE): _S.LEAVING,
    (_S.SERVING, _E.LOSE): _S.COLD,
    (_S.LEAVING, _E.LEAVE): _S.LEAVING,
    (_S.LEAVING, _E.FAIL): _S.LEAVING,
    (_S.LEAVING, _E.LOSE): _S.COLD,
}
"""A state and an event to the next state; an event that is not here is an error and changes nothing."""


class Why(enum.StrEnum):
    """Why a request is answered by the server and not by the program."""

    NO_LEASE = "no_lease"
    """None was granted in time; it may be asked for again."""
    LOADING = "loading"
    """It has a lease, and was not loaded in time."""
    LEAVING = "leaving"
    """Its lease was about to end all the time."""
    REFUSED = "refused"
    """The office refuses a lease now."""
    IMPOSSIBLE = "impossible"
    """It can never grant one of this size."""
    BUSY = "busy"
    """As many requests wait as may, or the program answered others all the time."""
    BROKEN = "broken"
    """The program cannot be loaded."""
    LOST = "lost"
    """The lease or the program ended while it answered. Whether it did what was asked is not known."""
    LATE = "late"
    """It did not answer in time."""
    WRONG = "wrong"
    """It raised, or answered with what is no answer."""


STATUS: Final[Mapping[Why, int]] = {
    Why.NO_LEASE: 503,
    Why.LOADING: 503,
    Why.LEAVING: 503,
    Why.REFUSED: 503,
    Why.IMPOSSIBLE: 500,
    Why.BUSY: 503,
    Why.BROKEN: 500,
    Why.LOST: 503,
    Why.LATE: 504,
    Why.WRONG: 500,
}


_WAITED_FOR: Final[Mapping[ProgramState, Why]] = {
    _S.WAITING: Why.NO_LEASE,
    _S.LOADING: Why.LOADING,
    _S.SERVING: Why.BUSY,
    _S.LEAVING: Why.LEAVING,
}
"""What a request has waited for in vain. Where a program is cold, none waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a served program may take."""

    concurrent: int = 8
    """Requests that the program answers at once."""
    waiting: int = 64
    """Requests that wait for it."""
    patience_s: float = 20.0
    """So long a request waits for a lease and for the program to load."""
    answer_s: float = 60.0
    """So long the program may take to begin an answer, and between two pieces of it."""
    load_s: float = 300.0
    retry_s: float = 15.0
    """A program that could not be loaded is tried again after this long, or when it has changed, if it is asked for."""
    place_s: float = 120.0
    """A place in the queue is kept for this long after the last request."""

    def __post_init__(self) -> None:
        if self.concurrent < 1 or self.waiting < 1:
            raise ValueError("a served program answers at least one request at a time, and one waits")
        if min(self.patience_s, self.answer_s, self.load_s, self.retry_s, self.place_s) <= 0:
            raise ValueError("each time of a served program is above zero")


# ---- what is to be done


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Ask for a lease."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nothing wants the lease any more that was asked for."""


@dataclass(frozen=True, slots=True)
class LaunchProgram:
    """Start the program under the lease, and load it."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give this request to the program."""

    request: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the program that nothing reads this answer any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Say:
    """Answer the request without the program. Nothing of an answer has gone out yet."""

    request: int
    why: Why
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Break:
    """Cut off an answer of which a part has gone out: its reader sees that it is not whole."""

    request: int
    why: Why


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the program and give its lease back."""


Effect: TypeAlias = AcquireLease | Withdraw | LaunchProgram | Send | Cancel | Say | Break | GiveUp


@dataclass(slots=True)
class _Request:
    """One that is not answered yet, or whose place in the program is not free yet."""

    since_s: float
    moved_s: float
    """When it last got on."""
    is_sent: bool = False
    is_begun: bool = False
    """A part of its answer has gone out."""
    is_over: bool = False
    """It was answered without the program, which still works at it."""


class Served:
    """One served program."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = ProgramState.COLD
        self._requests: dict[int, _Request] = {}
        self._since_s = 0.0
        """When the state was entered."""
        self._last_request_s = 0.0
        """When the last request came."""
        self._broken = ""
        self._broken_until_s = 0.0
        self._gives_up = False

    @property
    def waiting(self) -> int:
        """Requests that the program has not been given."""
        return sum(not one.is_sent for one in self._requests.values())

    @property
    def inside(self) -> int:
        """Requests that the program works at."""
        return sum(one.is_sent for one in self._requests.values())

    # ---- requests

    def arrived(self, request: int, now_s: float) -> list[Effect]:
        """A new request, under a number that was not used before."""
        assert request not in self._requests, f"request {request} came twice"
        self._last_request_s = now_s
        if self.waiting >= self.limits.waiting:
            return [Say(request, Why.BUSY)]
        if self._broken and self.state in (_S.COLD, _S.LEAVING) and now_s < self._broken_until_s:
            return [Say(request, Why.BROKEN, self._broken)]
        self._requests[request] = _Request(now_s, now_s)
        return self._advance(now_s)

    def retry_load(self) -> None:
        """The program has changed since it could not be loaded: it is tried again."""
        self._broken = ""

    def disconnected(self, request: int, now_s: float) -> list[Effect]:
        """Its caller has hung up."""
        one = self._requests.get(request)
        if one is None or one.is_over:
            return []
        if not one.is_sent:
            del self._requests[request]
            return []
        one.is_over = True
        return [Cancel(request)]

    # ---- the lease

    def granted(self, now_s: float) -> list[Effect]:
        self._enter(_E.GRANT, now_s)
        return [LaunchProgram()]

    def refused(self, detail: str, now_s: float, *, why: Why = Why.REFUSED) -> list[Effect]:
        """There is no lease: refused by the office, or withdrawn."""
        self._enter(_E.REFUSE, now_s)
        return self._answer_waiting(why, detail)

    def lost(self, detail: str, now_s: float) -> list[Effect]:
        """The program is gone, and its lease with it or given back. What it was not given waits for the next."""
        was_loading = self.state is _S.LOADING
        self._enter(_E.LOSE, now_s)
        self._gives_up = False
        effects = [effect for number in self._sent() for effect in self._drop(number, Why.LOST, detail)]
        if was_loading:
            effects += self._answer_waiting(Why.LOST, detail)
        return effects + self._advance(now_s)

    # ---- the program

    def loaded(self, now_s: float) -> list[Effect]:
        if self.state is not _S.LOADING:
            return []
        self._enter(_E.LOAD, now_s)
        self._broken = ""
        return self._advance(now_s)

    def failed(self, detail: str, now_s: float) -> list[Effect]:
        """It cannot be loaded, or what it sends is no protocol: it is ended."""
        was_loading = self.state is _S.LOADING
        self._enter(_E.FAIL, now_s)
        effects: list[Effect] = []
        if was_loading:
            self._broken, self._broken_until_s = detail or "it cannot be loaded", now_s + self.limits.retry_s
            effects += self._answer_waiting(Why.BROKEN, self._broken)
        return effects + self._fail_waiting()

    def leaving(self, now_s: float) -> list[Effect]:
        """It has saved and begins nothing more."""
        self._enter(_E.LEAVE, now_s)
        return self._advance(now_s)

    def begun(self, request: int, now_s: float) -> bool:
        """The head of an answer came; whether it is one to pass on; ``ProgramTransitionError`` where none may come."""
        one = self._inside(request)
        if one.is_begun:
            raise ProgramTransitionError(f"request {request} is answered already")
        one.is_begun, one.moved_s = True, now_s
        return not one.is_over

    def moved(self, request: int, now_s: float) -> bool:
        """A piece of an answer came, or its reader took one; whether it is to be passed on."""
        one = self._inside(request)
        if not one.is_begun:
            raise ProgramTransitionError(f"request {request} has no head of an answer")
        one.moved_s = now_s
        return not one.is_over

    def ended(self, request: int, now_s: float) -> list[Effect]:
        """An answer is whole."""
        one = self._inside(request)
        if not one.is_begun and not one.is_over:
            effects: list[Effect] = [Say(request, Why.WRONG, "it sent no answer")]
        else:
            effects = []
        del self._requests[request]
        return effects + self._advance(now_s)

    def erred(self, request: int, detail: str, now_s: float) -> list[Effect]:
        """The program raised at this request, and goes on."""
        self._inside(request)
        return self._drop(request, Why.WRONG, detail) + self._advance(now_s)

    def requeue(self, request: int, now_s: float) -> list[Effect]:
        """The program did not begin it, since its lease is about to end: it waits for the next one."""
        one = self._inside(request)
        if one.is_begun:
            raise ProgramTransitionError(f"request {request} is being answered")
        if one.is_over:
            del self._requests[request]
        else:
            one.is_sent = False
        return self._advance(now_s)

    # ---- time

    def tick(self, now_s: float) -> list[Effect]:
        """What is due."""
        limits, effects = self.limits, list[Effect]()
        for number, one in list(self._requests.items()):
            if not one.is_sent and now_s - one.since_s >= limits.patience_s:
                del self._requests[number]
                effects.append(Say(number, _WAITED_FOR[self.state]))
            elif one.is_sent and not one.is_over and now_s - one.moved_s >= limits.answer_s:
                one.is_over = True
                effects += [Cancel(number), Break(number, Why.LATE) if one.is_begun else Say(number, Why.LATE)]
        hangs = sum(one.is_over and now_s - one.moved_s >= limits.answer_s for one in self._requests.values())
        if self.state is _S.SERVING and hangs >= limits.concurrent:
            effects += self.failed("it answers nothing any more", now_s)
        elif self.state is _S.LOADING and now_s - self._since_s >= limits.load_s:
            effects += self.failed(f"it was not loaded within {limits.load_s:g} s", now_s)
        elif self.state is _S.WAITING and not self._requests and now_s - self._last_request_s >= limits.place_s:
            effects.append(Withdraw())
        return effects

    # ---- within

    def check(self) -> None:
        """Raise ``AssertionError`` where this is a state that cannot be."""
        has_program = self.state in (_S.SERVING, _S.LEAVING)
        assert has_program or not self.inside, f"{self.state}: a request is in a program that is not there"
        assert self.inside <= self.limits.concurrent
        assert self.waiting <= self.limits.waiting + self.limits.concurrent
        assert all(one.is_sent for one in self._requests.values() if one.is_begun or one.is_over)

    def _enter(self, event: ProgramEvent, now_s: float) -> None:
        try:
            self.state = PROGRAM_TABLE[self.state, event]
        except KeyError:
            raise ProgramTransitionError(f"a served program that is {self.state} cannot {event}") from None
        self._since_s = now_s

    def _advance(self, now_s: float) -> list[Effect]:
        """What can be done for requests that wait."""
        waiting = [number for number, one in self._requests.items() if not one.is_sent]
        if not waiting:
            return []
        match self.state:
            case _S.COLD:
                self._enter(_E.ASK, now_s)
                return [AcquireLease()]
            case _S.LEAVING:
                return [] if self.inside else self._fail_waiting()
            case _S.SERVING:
                chosen = waiting[: max(0, self.limits.concurrent - self.inside)]
                for number in chosen:
                    self._requests[number].is_sent, self._requests[number].moved_s = True, now_s
                return [Send(number) for number in chosen]
            case _:
                return []

    def _fail_waiting(self) -> list[Effect]:
        if self._gives_up:
            return []
        self._gives_up = True
        return [GiveUp()]

    def _inside(self, request: int) -> _Request:
        one = self._requests.get(request)
        if one is None or not one.is_sent:
            raise ProgramTransitionError(f"the program was not given request {request}")
        return one

    def _sent(self) -> list[int]:
        return [number for number, one in self._requests.items() if one.is_sent]

    def _drop(self, number: int, why: Why, detail: str) -> list[Effect]:
        one = self._requests.pop(number)
        if one.is_over:
            return []
        return [Break(number, why) if one.is_begun else Say(number, why, detail)]

    def _answer_waiting(self, why: Why, detail: str) -> list[Effect]:
        numbers = [number for number, one in self._requests.items() if not one.is_sent]
        for number in numbers:
            del self._requests[number]
        return [Say(number, why, detail) for number in numbers]
