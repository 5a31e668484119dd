"""What a supervisor does again and again, unasked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sublet.node.supervisor.locks import AGAIN_NS
from sublet.node.supervisor.service import Supervisor


class Beating:
    """What a supervisor's beat needs, on a held clock."""

    def __init__(self) -> None:
        self.now_ns = AGAIN_NS
        self.reported: list[object] = []
        self.did: list[str] = []
        self.failing = ""
        self.stage: Any = SimpleNamespace(
            loop=SimpleNamespace(after=lambda *_: self.do("next beat"), now_ns=lambda: self.now_ns),
            premises=SimpleNamespace(tenancies={}),
            guests=SimpleNamespace(scan=lambda: self.do("scan")),
            _claims=SimpleNamespace(again=lambda: ("free by now",)),
            _core=SimpleNamespace(report=lambda *told: self.reported.extend(told), send_reports=lambda: None),
            _beat=None,
            _claim_again_ns=0,
            _refresh=lambda: self.do("refresh"),
            _measure_stores=lambda: self.do("measure"),
            _stop_if_idle=lambda: self.do("stop if idle"),
        )
        for name in ("_safely", "_claim_again"):
            setattr(self.stage, name, getattr(Supervisor, name).__get__(self.stage))

    def do(self, what: str) -> None:
        self.did.append(what)
        if what == self.failing:
            raise KeyError(what)

    def beat(self) -> None:
        Supervisor._beat(self.stage)


def test_devices_that_another_office_had_are_asked_for_again_now_and_then() -> None:
    """The other office says nothing when it lets one go."""
    beating = Beating()
    beating.beat()
    beating.now_ns += AGAIN_NS - 1
    beating.beat()
    assert beating.reported == ["free by now"]
    beating.now_ns += 1
    beating.beat()
    assert beating.reported == ["free by now"] * 2


def test_a_beat_in_which_something_fails_does_the_rest_and_comes_again() -> None:
    for failing in ("scan", "measure", "refresh"):
        beating = Beating()
        beating.failing = failing
        beating.beat()
        assert beating.did == ["next beat", "scan", "measure", "refresh", "stop if idle"]
        assert beating.reported == ["free by now"]
