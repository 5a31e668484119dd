"""Our decorator makes what the standard one makes, later."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from sublet.lazy_dataclass import dataclass as ours

SOURCES: Final = Path(__file__).parents[2] / "src"
BOTH: Final = {"standard": dataclasses.dataclass, "ours": ours}
OPTIONS: Final[tuple[dict[str, bool], ...]] = (
    {},
    {"slots": True},
    {"slots": True, "eq": False},
    {"kw_only": True},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "kw_only": True},
    {"frozen": True, "slots": True, "kw_only": True, "eq": False},
)


def plain() -> type:
    class Plain:
        a: int
        b: str = "b"

    return Plain


def with_everything() -> type:
    class Everything:
        COUNT: ClassVar[int] = 3
        a: int
        _: KW_ONLY
        b: list[int] = field(default_factory=list)
        c: int = field(default=4, init=False)
        d: dict[str, int] = field(default_factory=lambda: {"made": 1}, init=False)
        e: int = field(default=5, repr=False)
        f: int = field(default=6, compare=False)
        g: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "g", self.a + 1)

    return Everything


def of_one_field() -> type:
    class One:
        a: Any

    return One


def of_none() -> type:
    class Nothing:
        pass

    return Nothing


def with_methods_of_its_own() -> type:
    class Own:  # noqa: PLW1641 - as the decorators find it
        a: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self))

        def __repr__(self) -> str:
            return "own"

    return Own


def with_a_hash_of_its_own() -> type:
    class Hashed:
        a: int

        def __hash__(self) -> int:
            return 7

    return Hashed


def with_an_init_of_its_own() -> type:
    class Init:
        a: int

        def __init__(self, a: int) -> None:
            object.__setattr__(self, "a", 2 * a)

    return Init


SHAPES: Final = (
    plain,
    with_everything,
    of_one_field,
    of_none,
    with_methods_of_its_own,
    with_a_hash_of_its_own,
    with_an_init_of_its_own,
)


def found(act: Callable[[], object]) -> object:
    """What comes of it: a value, or the error as it is said."""
    try:
        value = act()
    except Exception as error:
        return type(error), str(error)
    return value


def facts(cls: Any) -> dict[str, object]:
    """What can be seen of a class and of its objects."""
    has_a = any(one.name == "a" for one in dataclasses.fields(cls))
    named = {"a": 1} if has_a else {}
    one, same = cls(**named), cls(**named)
    other = cls(a=2) if has_a else None

    def put() -> None:
        one.a = 3

    def drop() -> None:
        del same.a

    return {
        "shown": repr(one).rpartition(".")[2],
        "by position": found(lambda: repr(cls(1)).rpartition(".")[2]),
        "without": found(lambda: repr(cls()).rpartition(".")[2]),
        "unknown": found(lambda: cls(**named, unknown=1)),
        "one too many": found(lambda: cls(1, 2, 3, 4)),
        "equal": (one == one, one == same, one == other, one != same, one == 1),
        "hash": found(lambda: (hash(one) == hash(same), len({one, same, other}))),
        "as a mapping": dataclasses.asdict(one),
        "replaced": found(lambda: repr(dataclasses.replace(one, **named)).rpartition(".")[2]),
        "copied": found(lambda: repr(copy.copy(one)).rpartition(".")[2]),
        "copied deeply": found(lambda: copy.deepcopy(one) == one),
        "state": found(lambda: pickle_state(one)),
        "match": cls.__match_args__,
        "slots": getattr(cls, "__slots__", None),
        "fields": [(f.name, f.init, f.compare, f.repr, f.kw_only) for f in dataclasses.fields(cls)],
        "put": has_a and found(put),
        "then": repr(one).rpartition(".")[2],
        "dropped": has_a and found(drop),
    }


def pickle_state(one: Any) -> object:
    return one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "no options")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_class_is_as_the_standard_decorator_makes_it(shape: Callable[[], type], options: dict[str, bool]) -> None:
    assert facts(ours(**options)(shape())) == facts(dataclasses.dataclass(**options)(shape()))


def derived(decorate: Any) -> tuple[Any, Any, Any]:
    @decorate(frozen=True, slots=True)
    class Base:
        a: int
        b: int = 2

    @decorate(frozen=True, slots=True)
    class Derived(Base):
        c: int = 3

    class Free(Base):
        """Not decorated, so it may have attributes of its own."""

    return Base, Derived, Free


@pytest.mark.parametrize("decorate", BOTH.values(), ids=BOTH)
def test_a_subclass_has_the_fields_of_both(decorate: Any) -> None:
    base, more, free = derived(decorate)
    assert (more(1).a, more(1).b, more(1, c=4).c) == (1, 2, 4)
    assert more(1) != base(1)
    assert base(1) == base(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        free(1).a = 2


def test_a_subclass_of_a_frozen_class_has_attributes_of_its_own() -> None:
    """With the standard decorator Python's own code fails here, where there are slots."""
    one = derived(ours)[2](1)
    one.other = 5
    assert one.other == 5
    del one.other
    assert not hasattr(one, "other")


@pytest.mark.parametrize("decorate", BOTH.values(), ids=BOTH)
def test_an_object_that_holds_itself_is_shown(decorate: Any) -> None:
    one = decorate(slots=True)(of_one_field())(None)
    one.a = [one]
    assert repr(one).endswith("One(a=[...])")


@pytest.mark.parametrize("decorate", BOTH.values(), ids=BOTH)
def test_an_argument_that_does_not_fit_is_said_with_the_class(decorate: Any) -> None:
    cls = decorate(frozen=True, slots=True)(of_one_field())
    for _ in range(2):  # the first one compiles it
        with pytest.raises(TypeError, match=r"One.__init__\(\) missing 1 required positional argument: 'a'"):
            cls()


def test_nothing_is_compiled_before_the_first_object() -> None:
    cls: Any = ours(frozen=True, slots=True)(plain())
    written = [name for name, value in vars(cls).items() if _file_of(value) == "<string>"]
    assert written == []
    cls(1)
    assert _file_of(cls.__init__) == "<string>"


def _file_of(value: object) -> str:
    code = getattr(value, "__code__", None)
    return code.co_filename if code is not None else ""


def test_only_classes_that_users_call_are_standard_ones() -> None:
    """And those with options that ours does not have."""
    import sublet
    from sublet import jobs, replicated, testing, training

    modules = (sublet, jobs, replicated, testing, training)
    named = [getattr(module, name) for module in modules for name in module.__all__]
    public = {one.__module__ for one in named if isinstance(one, type)}
    others = []
    for path in sorted(SOURCES.rglob("*.py")):
        text, name = path.read_text(), ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        uses = "@dataclass" in text and "from sublet.lazy_dataclass import dataclass" not in text
        if uses and name not in public and "order=True" not in text and "repr=False" not in text:
            others.append(name)
    assert others == []
