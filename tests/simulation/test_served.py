"""A served program from a seed: the real `Served`, beside a program, an office and readers that do what they like.

After every step nothing is in a state that cannot be, each request was answered at most once and given to a program's
run at most once, and no lease is asked for while there is one. In the end every request has an answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from sublet.studio.serving import (
    PROGRAM_TABLE,
    AcquireLease,
    Break,
    Cancel,
    Effect,
    GiveUp,
    LaunchProgram,
    Limits,
    ProgramEvent,
    ProgramState,
    ProgramTransitionError,
    Say,
    Send,
    Served,
    Why,
    Withdraw,
)

STEPS: Final = 120
SEEDS: Final = range(300)
MET: Counter[tuple[ProgramState, str]] = Counter()
SAID: Counter[Why] = Counter()
STATE, EVENT = ProgramState, ProgramEvent


class World:
    """Who asks, the office, and the program under its lease."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        concurrent, waiting = self.chance.choice((1, 2, 4)), self.chance.choice((2, 6))
        self.served = Served(Limits(concurrent=concurrent, waiting=waiting, patience_s=20, answer_s=30))
        self.number = 0
        self.open: set[int] = set()
        """Asked, and not answered."""
        self.begun: set[int] = set()
        """Of those, a part of the answer has gone out."""
        self.given: Counter[int] = Counter()
        """How often a program began to work at each."""
        self.inside: list[int] = []
        """What the present program has, and has not begun."""
        self.works: list[int] = []
        self.asks = self.holds = self.runs = self.saves = self.gives_up = False

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case AcquireLease():
                    assert not self.asks, "asked for twice"
                    assert not self.holds, "asked for while there is one"
                    self.asks = True
                case Withdraw():
                    if self.asks:
                        self.asks = False
                        self.do(self.served.refused("withdrawn", self.now_s))
                case LaunchProgram():
                    assert self.holds
                    self.runs = True
                case Send(number):
                    assert self.runs, "sent to no program"
                    self.inside.append(number)
                case Cancel(number):
                    assert number in (*self.inside, *self.works)
                case Say(number, why):
                    assert number not in self.begun, "an answer had begun"
                    self.open.remove(number)
                    SAID[why] += 1
                case Break(number):
                    self.begun.remove(number)
                    self.open.remove(number)
                case GiveUp():
                    assert self.holds, "there is nothing to give up"
                    self.gives_up = True

    def die(self) -> None:
        self.holds = self.runs = self.saves = self.gives_up = False
        self.inside, self.works = [], []
        self.do(self.served.lost("ended", self.now_s))

    def steps(self) -> list[str]:
        """What can happen now."""
        can = ["arrive", "wait", "wait", "mend"]
        if self.open:
            can.append("hang up")
        if self.asks:
            can += ["grant", "grant", "refuse"]
        if self.runs and self.served.state is STATE.LOADING:
            can += ["load", "load", "load", "cannot load"]
        if self.holds:
            can += ["die"] + ["die"] * (9 * self.gives_up)
        if self.runs and self.served.state is STATE.SERVING:
            can += ["notice", "nonsense"] if self.chance.random() < 0.3 else []
        if self.saves and not self.works and self.served.state is STATE.SERVING:
            can += ["leave"] * 3
        if self.inside:
            can += ["turn away"] * 3 if self.saves else ["begin"] * 3
        if self.works:
            can += ["head", "end", "end", "raise"]
        return can

    def step(self) -> None:
        what, served = self.chance.choice(self.steps()), self.served
        MET[served.state, what] += 1
        match what:
            case "arrive":
                self.number += 1
                self.open.add(self.number)
                self.do(served.arrived(self.number, self.now_s))
            case "wait":
                self.now_s += self.chance.choice((0.1, 1, 8, 31, 130))
                self.do(served.tick(self.now_s))
            case "hang up":
                number = self.chance.choice(sorted(self.open))
                self.open.discard(number)
                self.begun.discard(number)
                self.do(served.disconnected(number, self.now_s))
            case "grant":
                self.asks, self.holds = False, True
                self.do(served.granted(self.now_s))
            case "refuse":
                self.asks = False
                self.do(served.refused("quota", self.now_s, why=self.chance.choice((Why.REFUSED, Why.IMPOSSIBLE))))
            case "load":
                self.do(served.loaded(self.now_s))
            case "mend":
                served.retry_load()
            case "cannot load":
                self.do(served.failed("SyntaxError", self.now_s))
            case "nonsense":
                self.do(served.failed("no frame", self.now_s))
            case "die":
                self.die()
            case "notice":
                self.saves = True
            case "leave":
                self.do(served.leaving(self.now_s))
            case "turn away":
                self.do(served.requeue(self.inside.pop(0), self.now_s))
            case "begin":
                number = self.inside.pop(0)
                self.given[number] += 1
                assert self.given[number] == 1, "a request was begun twice"
                self.works.append(number)
            case _:
                self._answer(what)
        served.check()

    def _answer(self, what: str) -> None:
        number, served = self.chance.choice(self.works), self.served
        if what == "head":
            try:
                passes = served.begun(number, self.now_s)
            except ProgramTransitionError:
                assert number in self.begun or number not in self.open
                return
            if passes:
                assert number in self.open
                self.begun.add(number)
            return
        self.works.remove(number)
        if what == "raise":
            self.do(served.erred(number, "ValueError", self.now_s))
            return
        if number in self.begun:
            self.begun.remove(number)
            self.open.remove(number)
        self.do(served.ended(number, self.now_s))


def test_every_request_is_answered_once_whatever_happens() -> None:
    """The seeds meet each event of the table, and each reason for which a request is answered without the program. An
    idle end in the moment of a request is a request turned away."""
    for seed in SEEDS:
        world = World(seed)
        try:
            for _ in range(STEPS):
                world.step()
            if world.asks:
                world.do(world.served.refused("closing", world.now_s))
            for _ in range(3):  # nothing but time passes
                world.now_s += 1000
                world.do(world.served.tick(world.now_s))
                world.served.check()
            assert not world.open, f"never answered: {world.open}"
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    for state in STATE:
        assert MET[state, "arrive"], state
    for what in ("turn away", "nonsense", "cannot load", "leave", "hang up"):
        assert any(count for (_, name), count in MET.items() if name == what), what
    for state in (STATE.LOADING, STATE.SERVING, STATE.LEAVING):
        assert MET[state, "die"], state
    assert SAID.keys() == set(Why)


def test_an_event_that_the_table_does_not_know_changes_nothing() -> None:
    told: dict[ProgramEvent, Callable[[Served], object]] = {
        EVENT.GRANT: lambda served: served.granted(0),
        EVENT.REFUSE: lambda served: served.refused("", 0),
        EVENT.FAIL: lambda served: served.failed("", 0),
        EVENT.LEAVE: lambda served: served.leaving(0),
        EVENT.LOSE: lambda served: served.lost("", 0),
    }
    for state in STATE:
        for event, tell in told.items():
            served = Served(Limits())
            served.state = state
            if (state, event) in PROGRAM_TABLE:
                continue
            with pytest.raises(ProgramTransitionError, match=f"is {state} cannot {event}"):
                tell(served)
            assert served.state is state
