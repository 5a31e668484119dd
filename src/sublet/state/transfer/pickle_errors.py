"""Names the object that cannot be pickled, with the path to it.

The fast pickler only says "cannot pickle '_thread.lock' object". So when it has failed, the value is walked once more
by the pickler written in Python, under the same rules, which knows at every moment how it came to where it is. Its
output is thrown away, so it can step over what fails and find everything that would.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sublet.durable import rebuild
from sublet.errors import Unpicklable

if TYPE_CHECKING:
    from sublet.state.transfer.reducers import EncodingRules

FOUND_MAX: Final = 10
"""How many are named; a value with more is not mended by a longer list."""
REASON_MAX: Final = 100
"""Characters of what an object's own method said when it refused; some libraries write a paragraph."""
PLAIN_NAMES: Final[dict[str, str]] = {
    "_thread.lock": "a thread lock",
    "_thread.RLock": "a thread lock",
    "_thread._local": "thread-local data",
    "_thread._ThreadHandle": "a running thread",
    "builtins.generator": "a generator",
    "builtins.coroutine": "a coroutine",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.frame": "a frame of a running function",
    "builtins.traceback": "a traceback",
    "builtins.module": "a module",
    "weakref.ReferenceType": "a weak reference",
    "_io.TextIOWrapper": "an open file",
    "_io.BufferedReader": "an open file",
    "_io.BufferedWriter": "an open file",
    "_io.BufferedRandom": "an open file",
    "_io.FileIO": "an open file",
    "socket.socket": "a socket",
    "_socket.socket": "a socket",
    "ssl.SSLContext": "a TLS context",
    "sqlite3.Connection": "a database connection",
    "sqlite3.Cursor": "a database cursor",
    "mmap.mmap": "a memory map",
    "_asyncio.Task": "an asyncio task",
    "_asyncio.Future": "an asyncio future",
    "select.epoll": "an epoll object",
    "_hashlib.HASH": "a running hash",
    "zlib.Compress": "a running compressor",
}


ROOT: Final = re.compile(r"^value\[(['\"])(.*?)\1\]")


class Blocker:
    """One object that cannot travel."""

    __slots__ = ("path", "what", "why")

    def __init__(self, path: str, what: str, why: str) -> None:
        self.path = path
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def named(value: object, error: Exception, rules: EncodingRules, *, roots: bool = False) -> Unpicklable:
    """The error to raise, once pickling has failed with ``error``."""
    if isinstance(error, Unpicklable):
        return error
    root = "value"
    found = blockers(value, rules, roots=roots)
    if not found:
        if isinstance(error, RecursionError):
            message = f"{root} is nested too deeply to be saved or sent"
            return Unpicklable(
                message, path=root, what="nested too deeply", do="Make it flatter: a list instead of a chain."
            )
        found = [Blocker(root, describe(value), str(error))]
    first, *others = found
    more = "" if not others else "; also " + ", ".join(str(one) for one in others)
    return Unpicklable(
        f"this cannot be saved or sent: {first}{more}",
        path=first.path,
        what=first.what,
        blockers=[(one.path, one.what) for one in found],
    )


def blockers(value: object, rules: EncodingRules, *, roots: bool = False) -> list[Blocker]:
    """Everything in the value that cannot travel, up to a bound. ``roots``: it is a dict of named values."""
    root = "value"
    walk = _Walk(rules)
    try:
        walk.dump(value)
    except (_Enough, RecursionError):
        pass
    except Exception as error:  # noqa: BLE001 - whatever an object's own method raised; the walk found what it could
        if not walk.found:
            return [Blocker(root, describe(value), str(error))]
    found = [Blocker(path_of(chain, root), what, why) for chain, what, why in walk.found]
    if roots:
        for one in found:
            one.path = ROOT.sub(lambda match: match[2], one.path, count=1)
    return found


def describe(value: object, error: BaseException | None = None) -> str:
    """An object in plain words."""
    from sublet.state.transfer.reducers import ReductionRefused

    if isinstance(error, ReductionRefused):
        return str(error)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in PLAIN_NAMES:
        return PLAIN_NAMES[name]
    if isinstance(value, types.FunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    words = f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {name}"
    text = str(error or "cannot be pickled")
    if f"cannot pickle '{kind.__qualname__}'" in text or "cannot be pickled" in text:
        return words
    first, *others = text.splitlines() or [""]
    if others or len(first) > REASON_MAX:
        first = first[: REASON_MAX - 1].rstrip() + "…"
    return f"{words} ({type(error).__name__}: {first})"


class _Enough(Exception):
    """As many were found as are named."""


_PythonPickler: Any = pickle._Pickler


class _Walk(_PythonPickler):  # type: ignore[misc]
    """Pickles into nothing, knows the way, and steps over what fails."""

    def __init__(self, rules: EncodingRules) -> None:
        super().__init__(io.BytesIO(), 5, buffer_callback=lambda _: None)
        self.chain: list[object] = []
        self.found: list[tuple[Sequence[object], str, str]] = []
        """The way, what it is, and why. Never the error itself: it holds this frame and all that called it, so it would
        be a circle, and Python 3.11 cannot take a circle apart in which a view of memory is lent out."""
        self.reducer_override = rules.reduce

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        self.chain.append(obj)
        try:
            super().save(obj, save_persistent_id)
        except (RecursionError, MemoryError, _Enough):
            raise
        except Exception as error:  # noqa: BLE001 - whatever an object's own method raised
            self.found.append((tuple(self.chain), describe(obj, error), str(error)))
            self.memoize_anything(obj)
            if len(self.found) >= FOUND_MAX:
                raise _Enough from None
        finally:
            self.chain.pop()

    def memoize_anything(self, obj: object) -> None:
        """One lock in a hundred places is named once."""
        if id(obj) not in self.memo:
            self.memo[id(obj)] = len(self.memo), obj


def path_of(chain: Sequence[object], root: str) -> str:
    """From the objects that were passed on the way to a path as one would write it in Python.

    Between an object and what it holds stand pieces that only the pickler sees: tuples of arguments, dicts of state.
    Such a piece is passed over, but its keys are names of attributes.
    """
    path, parent, pieces = root, chain[0], [chain[0]]
    for held in chain[1:]:
        if isinstance(parent, types.FunctionType):
            step = function_step(parent, held)
        else:
            step = next(
                (found for piece in reversed(pieces) if (found := step_to(piece, held, parent)) is not None), None
            )
        if step is None:
            pieces.append(held)
            continue
        path += step
        parent, pieces = held, [held]
    return path


def step_to(holder: object, held: object, parent: object) -> str | None:
    """How ``held`` is reached from ``holder``, or None: then it is a piece of the pickler's own."""
    if isinstance(holder, dict):
        for key, value in dict.items(holder):
            if value is held and key != rebuild.METHODS_FIRST:
                return key_step(key, attribute=holder is not parent)
            if key is held:
                return f" key {short(key)}"
    elif isinstance(holder, list | tuple):
        if holder is not parent:
            return None
        for n, value in enumerate(holder):
            if value is held:
                return f"[{n}]"
    elif isinstance(holder, set | frozenset) and any(value is held for value in holder):
        return " element"
    return attribute_step(holder, held)


def key_step(key: object, *, attribute: bool) -> str:
    if attribute and isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{short(key)}]"


def attribute_step(holder: object, held: object) -> str | None:
    if isinstance(holder, types.MethodType):
        return ".__self__" if held is holder.__self__ else None
    for name, value in own_attributes(holder):
        if value is held:
            return f".{name}"
    return None


def function_step(function: types.FunctionType, held: object) -> str | None:
    """A function holds what its body names: variables around it, and globals."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        if contents(cell) is held:
            return f" (variable {name})"
    for name in function.__code__.co_names:
        if name in function.__globals__ and function.__globals__[name] is held:
            return f" (global {name})"
    for n, default in enumerate(function.__defaults__ or ()):
        if default is held:
            return f" (default {n})"
    for name, value in vars(function).items():
        if value is held:
            return f".{name}"
    return None


def contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def own_attributes(holder: object) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    read: Callable[..., Any] = object.__getattribute__
    with contextlib.suppress(AttributeError, TypeError):
        found += dict(read(holder, "__dict__")).items()
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                found.append((name, read(holder, name)))
            except (AttributeError, TypeError):
                continue
    return found


def short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an object's own __repr__ may raise anything
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= 40 else text[:37] + "…'"
