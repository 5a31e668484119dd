"""A client without an office: a clock to hold, views to hand out, and a script that answers what a program asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive, Step
from sublet.errors import Disconnected
from sublet.values import NS_PER_S, Epoch
from sublet.wire.http import (
    EndView,
    ErrorBody,
    ErrorView,
    GrantAnswer,
    LeaseView,
    NoticeView,
    OfferAnswer,
    PartView,
    PlaceAnswer,
    RefusalAnswer,
    WantView,
)

T = TypeVar("T")
Answer = HttpReply | BaseException | Callable[[HttpCall], "HttpReply | BaseException"]

SILENCE = Disconnected("the office did not answer in time", sent=True)
NOBODY = Disconnected("nothing runs behind its socket", sent=False)


class HeldClock:
    """Stands still until it is moved."""

    domain = "a test"

    def __init__(self) -> None:
        self.ns = 1_000 * NS_PER_S

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return 1_790_000_000 * NS_PER_S + self.ns

    def go(self, seconds: float) -> None:
        self.ns += round(seconds * NS_PER_S)


@dataclass
class Script:
    """Runs programs: each call takes the next answer, pauses move the clock, and everything is written down."""

    clock: HeldClock
    answers: list[Answer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    takes_s: float = 0.01
    """How long each answer takes."""

    def run(self, program: Program[T]) -> T:
        try:
            step = next(program)
            while True:
                self.steps.append(step)
                outcome = self._carry_out(step)
                step = program.throw(outcome) if isinstance(outcome, BaseException) else program.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _carry_out(self, step: Step) -> HttpReply | BaseException | None:
        match step:
            case Pause(seconds):
                self.clock.go(seconds)
                return None
            case Revive():
                return None
            case HttpCall():
                sent_ns = self.clock.now_ns()
                assert self.answers, f"nothing was scripted for {step.method} {step.path}"
                answer = self.answers.pop(0)
                outcome = answer(step) if callable(answer) else answer
                if isinstance(outcome, Disconnected) and outcome.sent:
                    self.clock.go(step.timeout_s)
                else:
                    self.clock.go(self.takes_s)
                return outcome._replace(sent_ns=sent_ns) if isinstance(outcome, HttpReply) else outcome

    @property
    def calls(self) -> list[HttpCall]:
        return [step for step in self.steps if isinstance(step, HttpCall)]

    @property
    def asked(self) -> list[str]:
        """What was asked, as a story."""
        return [f"{call.method} {call.path}" for call in self.calls]


def reply(answer: object, status: int = 200) -> HttpReply:
    return HttpReply(status, msgspec.json.encode(answer), 0)


def error(kind: str, message: str = "so it is", *, status: int = 400, end: EndView | None = None) -> HttpReply:
    view = ErrorView(kind=kind, message=message, do="Do this.", transient=False, end=end)
    return reply(ErrorBody(error=view), status)


def view(status: str = "active", **changes: Any) -> LeaseView:
    """A lease as the office shows it."""
    facts: dict[str, Any] = {
        "id": "l-1",
        "tenant": "local",
        "status": status,
        "name": None,
        "labels": {},
        "tier": "interactive",
        "renew": "while-busy",
        "ttl": 100.0,
        "wants": [WantView(kind="gpu", amount=1 << 30)],
        "epoch": Epoch(1, 7),
        "node": "local",
        "parts": [PartView(resource="local/gpu0", kind="gpu", amount=1 << 30, model="host device, no GPU", host=True)],
        "asked_at": "2026-11-21T07:00:00.000Z",
        "granted_at": None,
        "expires_at": None,
        "deadline": None,
        "remaining": 100.0,
        "claim_within": None,
        "idle": False,
        "busy": 0.0,
        "renewals": 0,
        "notice": None,
        "end": None,
    }
    return LeaseView(**(facts | changes))


def ended(reason: str, detail: str = "", **changes: Any) -> LeaseView:
    end = EndView(reason=reason, at="2026-11-21T07:01:00.000Z", detail=detail)
    return view("ended", end=end, epoch=None, parts=[], remaining=None, **changes)


def noticed(in_seconds: float, reason: str = "preempted", **changes: Any) -> LeaseView:
    notice = NoticeView(reason=reason, in_seconds=in_seconds, at="2026-11-21T07:00:30.000Z", detail="for l-9")
    return view("noticed", notice=notice, **changes)


def grant(lease: LeaseView | None = None) -> HttpReply:
    return reply(GrantAnswer(lease=lease or view()), 201)


def place(position: int = 1, reason: str = "all devices are held", estimate: float | None = 60.0) -> HttpReply:
    lease = view("queued", epoch=None, parts=[], remaining=None)
    return reply(PlaceAnswer(lease=lease, position=position, reason=reason, estimate=estimate), 202)


def offer(offered: int = 1 << 29) -> HttpReply:
    lease = view("granted", claim_within=30.0, remaining=None)
    return reply(OfferAnswer(lease=lease, kind="gpu", asked=1 << 30, offered=offered, valid=30.0))


def refusal(code: str = "capacity", would_fit: int | None = None, estimate: float | None = None) -> HttpReply:
    answer = RefusalAnswer(code=code, reason="1GiB is not free", do="Wait.", would_fit=would_fit, estimate=estimate)
    return reply(answer, 409)


def told(steps: Sequence[Step]) -> list[str]:
    return [type(step).__name__ for step in steps]
