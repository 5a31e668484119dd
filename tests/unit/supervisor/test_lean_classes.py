"""A class that is written when it is needed does all that one does which is written at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from sublet.agent.starting import package_folder

BEGIN: Final = """
from __future__ import annotations
import sys
sys.path.insert(0, sys.argv[1])
import dataclasses, pickle
real = dataclasses.dataclass
if sys.argv[2] == "lean":
    from sublet.supervisor import lean_classes
    lean_classes.install()
    assert dataclasses.dataclass is not real
from dataclasses import dataclass, field

__name__ = "sublet.tried"
sys.modules[__name__] = sys.modules["__main__"]

def tried(of):
    try:
        return of()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
CLASSES: Final = """
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    name: str
    parts: tuple[str, ...] = ()
    at: int = field(default=0, compare=False)
    key: str = field(default="k", repr=False)
    marks: dict[str, int] = field(default_factory=dict, hash=False)

@dataclass(frozen=True, slots=True)
class Mixed:
    first: int
    second: int = 2
    third: int = field(default=3, kw_only=True)
    sum: int = field(default=7, init=False)
    made: list[int] = field(default_factory=list, init=False, compare=False)

@dataclass(slots=True)
class Open:
    number: int
    log: list[int] = field(default_factory=list)
    total: int = field(init=False)

    def __post_init__(self):
        self.total = self.number * 2

@dataclass
class Loose:
    number: int = 1

@dataclass(frozen=True)
class Empty:
    pass

@dataclass(frozen=True)
class Shown:
    number: int
    def __repr__(self):
        return f"<{self.number}>"

@dataclass(frozen=True, slots=True, eq=False)
class Itself:
    number: int

@dataclass(frozen=True, slots=True, order=True)
class Ordered:
    number: int

@dataclass(frozen=True)
class Above:
    number: int

class Below(Above):
    pass

@dataclass(frozen=True)
class Longer(Above):
    more: int = 4
"""
USE: Final = """
one = Lease(name="a", parts=("x",))
below = Below(3)
for of in (
    lambda: one,
    lambda: (one == Lease(name="a", parts=("x",), at=9), one == Lease(name="b"), one != one, one == "a"),
    lambda: hash(one) == hash(Lease(name="a", parts=("x",), marks={"a": 1})),
    lambda: one == Lease(name="a", parts=("x",), marks={"a": 1}),
    lambda: len({one, Lease(name="a", parts=("x",)), Lease(name="c")}),
    lambda: Lease(), lambda: Lease("a"), lambda: Lease(name="a", other=1), lambda: Mixed(), lambda: Mixed(1, 2, 3),
    lambda: (Mixed(1), Mixed(1, second=4, third=5), Mixed(1).made is Mixed(1).made),
    lambda: Lease(name="a").marks is Lease(name="a").marks,
    lambda: (Open(2), Open(2) == Open(2), Open(2) == Open(3), Open.__hash__),
    lambda: hash(Open(2)),
    lambda: (Loose(), Loose(4), Loose() == Loose(1), vars(Loose(5))),
    lambda: (Empty() == Empty(), hash(Empty()) == hash(Empty()), Empty()),
    lambda: (Shown(3), Shown(3) == Shown(3)),
    lambda: (Itself(1) == Itself(1), hash(Itself(1)) == hash(Itself(1))),
    lambda: sorted([Ordered(3), Ordered(1)]),
    lambda: (below, below == Below(3), below == Above(3), Longer(1), Longer(1, 5) == Longer(1, more=5)),
    lambda: type(setattr(one, "name", "b")), lambda: setattr(one, "new", 1), lambda: delattr(one, "name"),
    lambda: setattr(below, "number", 4), lambda: (setattr(below, "new", 4), below.new),
    lambda: (delattr(below, "new"), hasattr(below, "new")), lambda: delattr(below, "number"),
    lambda: setattr(Open(1), "number", 5), lambda: setattr(Open(1), "other", 5), lambda: setattr(Loose(), "other", 5),
    lambda: dataclasses.replace(one, name="z"), lambda: dataclasses.replace(Mixed(1), sum=1),
    lambda: dataclasses.asdict(Mixed(1)), lambda: [f.name for f in dataclasses.fields(Open)],
    lambda: (Lease.__match_args__, Mixed.__match_args__, Mixed.__slots__, hasattr(one, "__dict__")),
    lambda: [pickle.loads(pickle.dumps(of)) for of in (one, Mixed(1), Open(2), Loose(3), Empty(), Itself(1))][:5],
    lambda: pickle.dumps(one, 5).hex(),
    lambda: [str(c.__dataclass_params__) for c in (Lease, Mixed, Open, Loose, Shown, Itself)],
    lambda: Lease.__init__(one, name="again") or one,
):
    said = str(tried(of))
    no = said.startswith(("FrozenInstanceError", "TypeError: super(")) or "object has no attribute 'other'" in said
    print("refused" if no else said)  # Python stumbles over `super` when it refuses a new name
"""


def _said(how: str, program: str) -> str:
    words = [sys.executable, "-I", "-S", "-c", program, package_folder(), how]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_is_like_any_other() -> None:
    lean = _said("lean", BEGIN + CLASSES + USE)
    assert lean == _said("plain", BEGIN + CLASSES + USE)
    assert lean.count("refused") >= 6


@pytest.mark.parametrize(("how", "compiled"), [("lean", False), ("plain", True)])
def test_nothing_is_written_before_it_is_needed(how: str, compiled: bool) -> None:
    watch = """
def names(code):
    inner = [one for one in code.co_consts if hasattr(one, "co_consts")]
    return {code.co_name}.union(*map(names, inner))

texts = set()
sys.addaudithook(lambda event, args: event == "exec" and texts.update(names(args[0])))
"""
    plain = CLASSES.partition("@dataclass(frozen=True)\nclass Shown")[0]
    assert _said(how, f"{BEGIN}\n{watch}\n{plain}\nprint('__init__' in texts)") == f"{compiled}\n"


def test_what_is_not_ours_is_left_alone() -> None:
    theirs = BEGIN.replace('"sublet.tried"', '"theirs"') + CLASSES
    asked = """
import inspect
print(inspect.signature(Lease), inspect.signature(Loose))
"""
    assert _said("lean", theirs + asked) == _said("plain", theirs + asked)
