"""Sends functions to a worker: by name where it can import the same one, else by value, once per content.

By name only if the worker's module is the same file, as it was when both looked: else it would run another function
than the one that was handed over. For packages that are installed, and for Python's own, the worker's interpreter is
trusted to have its own. Everything else (``__main__``, notebooks, closures, lambdas, methods) goes by value.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from sublet.background import start_thread
from sublet.compute.buffer_cache import LENT_MIN, BufferCache, LentFile, lent_memory
from sublet.errors import InvalidRequest, Unpicklable, Unsupported
from sublet.guest.cargo import Cargo, PlacedBuffers, encode, place_buffers
from sublet.wire.frames import close_all
from sublet.wire.work import Flag, HolderMessage, OutgoingMessage, Where, pack, pack_numbers

Stamp = tuple[str | None, tuple[int, int]]
OWN: Final = "sublet."
FUNCTIONS_MAX: Final = 256
"""Functions a worker keeps for one holder."""


class PeerInterpreter(NamedTuple):
    """The interpreter on the other side."""

    python: tuple[int, int, int]
    executable: str
    cloudpickle: bool


class PackedFunction:
    """A function by value, as it is when it is first sent, for any number of workers: it is taken apart once, and what
    it holds of large arrays lies in memory that all of them share, the largest in memory that is used again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._lock = threading.Lock()
        self._placed: PlacedBuffers | None = None
        self._let_go: Callable[[], object] = _nothing
        self._lent: list[LentFile] = []

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def close(self, *, is_unused: bool = False) -> None:
        """Let go of the function and of its arrays: no worker needs it any more. Harmless twice. ``is_unused``: it is
        known that no worker has it any more, so that the memory can be used again."""
        with self._lock:
            self.function, self._placed = _nothing, None
            self._let_go()
            lent, self._lent = self._lent, []
        if is_unused and lent:
            lent_memory.give_back(lent)

    def prepare(self) -> None:
        """Take it apart while the workers that need it are still being started: large arrays are copied meanwhile."""

        def work() -> None:
            with contextlib.suppress(Exception):  # whatever it is, it shows where the first worker needs it
                self._taken_apart()

        with contextlib.suppress(RuntimeError):  # no room for a thread
            start_thread("burst_function", work)

    def _taken_apart(self) -> PlacedBuffers:
        with self._lock:
            if self._placed is None:
                self._placed = place_buffers(encoded(self.function), lend=self._lend)
                self._let_go = weakref.finalize(self, close_all, self._placed.fds)
            return self._placed

    def _lend(self, view: memoryview) -> int:
        if view.nbytes < LENT_MIN:
            return -1
        self._lent.append(lent_memory.holding(view))
        return os.dup(self._lent[-1].fd)

    def definition(self, number: int) -> OutgoingMessage:
        """What makes it function ``number`` of a worker. The descriptors are the caller's."""
        placed = self._taken_apart()
        body = pack(HolderMessage.DEFINE, subject=number, pieces=placed.pieces, inline=placed.inline)
        return OutgoingMessage(body, tuple(map(os.dup, placed.fds)))


class Functions:
    """What one worker has been given. Used by one thread at a time."""

    def __init__(self, peer: PeerInterpreter, kept: BufferCache) -> None:
        self._peer = peer
        self._kept = kept
        self._numbers: OrderedDict[object, int] = OrderedDict()
        self._last = 0
        self._unlike: set[tuple[object, ...]] = set()
        """Modules, as their files looked, that are others there."""
        self._own: dict[str, Stamp] = {}

    def refer(self, function: Callable[..., object]) -> tuple[int, list[OutgoingMessage]]:
        """The number it has there, and what must be said before it is used. The descriptors are the caller's."""
        if isinstance(function, PackedFunction):
            if known := self._known(function):
                return known, []
            self._check_peer(function.function)
            number = self._last + 1
            definition = function.definition(number)
            return self._new(function), [definition]
        named = name_of(function)
        if named is not None:
            path, stamp = self._stamped(named[0])
            if (named[0], path, stamp) not in self._unlike:
                return self._by_name(named, path, stamp)
        constant = _constant_key(function)
        if constant is not None and (known := self._known(constant)):
            return known, []
        return self._by_value(function, constant, None if named is None else named[0])

    def send_by_value(self, function: Callable[..., object]) -> bool:
        """The worker says that its module is another; False if it went by value already."""
        named = name_of(function)
        if named is None:
            return False
        key = (named[0], *self._stamped(named[0]))
        is_news = key not in self._unlike
        self._unlike.add(key)
        return is_news

    def _stamped(self, module: str) -> Stamp:
        """Of our own modules as it was when this worker first heard of them: those are not edited while it runs, and a
        notebook asks for them with every cell."""
        if not module.startswith(OWN):
            return _stamped(module)
        found = self._own.get(module)
        if found is None:
            found = self._own[module] = _stamped(module)
        return found

    def to_forget(self) -> list[OutgoingMessage]:
        """What must be said so that the worker lets go of the oldest."""
        old = []
        while len(self._numbers) > FUNCTIONS_MAX:
            _, number = self._numbers.popitem(last=False)
            old.append(number)
        return (
            [OutgoingMessage(pack(HolderMessage.FORGET, flags=Flag.FUNCTIONS, inline=(pack_numbers(old),)))]
            if old
            else []
        )

    def forget_all(self) -> OutgoingMessage:
        """What must be said so that the worker lets go of everything; each function is then defined anew."""
        numbers = list(dict.fromkeys(self._numbers.values()))
        self._numbers.clear()
        return OutgoingMessage(pack(HolderMessage.FORGET, flags=Flag.FUNCTIONS, inline=(pack_numbers(numbers),)))

    def _by_name(
        self, named: tuple[str, str], path: str | None, stamp: tuple[int, int]
    ) -> tuple[int, list[OutgoingMessage]]:
        key = ("name", *named, stamp)
        if known := self._known(key):
            return known, []
        facts = {"file": path, "stamp": stamp, "library": path is not None and is_library(path)}
        wish = json.dumps({"module": named[0], "name": named[1], **facts}).encode()
        number = self._new(key)
        return number, [OutgoingMessage(pack(HolderMessage.DEFINE, flags=Flag.NAMED, subject=number, inline=(wish,)))]

    def _by_value(
        self, function: Callable[..., object], constant: object, module: str | None
    ) -> tuple[int, list[OutgoingMessage]]:
        self._check_peer(function)
        placed = place_buffers(encode(function, _shown(function), of=sys.modules.get(module or "")), self._kept)
        digest = hashlib.blake2b(digest_size=16)
        for part in placed.inline:
            digest.update(part)
        is_all_kept = all(piece.where is not Where.SHARED for piece in placed.pieces)
        key = (digest.digest(), *(piece.number for piece in placed.pieces))
        if is_all_kept and (known := self._known(key)):
            return known, []
        number = self._new(key)
        if constant is not None:
            self._numbers[constant] = number
        body = pack(HolderMessage.DEFINE, subject=number, pieces=placed.pieces, inline=placed.inline)
        return number, [OutgoingMessage(body, placed.fds)]

    def _known(self, key: object) -> int:
        number = self._numbers.get(key, 0)
        if number:
            self._numbers.move_to_end(key)
        return number

    def _new(self, key: object) -> int:
        self._last += 1
        self._numbers[key] = self._last
        return self._last

    def _check_peer(self, function: object) -> None:
        if self._peer.python[:2] != sys.version_info[:2]:
            own, remote = (".".join(map(str, version[:2])) for version in (sys.version_info, self._peer.python))
            raise Unsupported(
                f"{_shown(function)} goes by value, and code of Python {own} does not run on the worker's {remote}",
                do=f"Put it into a module that both can import, or choose a Python {own} with options(python=...).",
            )
        if not self._peer.cloudpickle:
            raise Unsupported(
                f"{_shown(function)} goes by value, and the worker's Python has no cloudpickle",
                do=f"Install it for {self._peer.executable}, or put the function into a module that both can import.",
            )


def checked_callable(function: object) -> Callable[..., Any]:
    """What was handed over, if it can be called."""
    if not callable(function):
        raise InvalidRequest(
            f"{type(function).__name__} {_brief(function)} cannot be called",
            do="Hand over the function and its arguments: lease.run(train, model, lr=1e-3).",
        )
    return function


def encoded(function: Any) -> Cargo:
    """A function as bytes. Raises ``Unpicklable`` with the path to what cannot travel."""
    try:
        return encode(function, _shown(function))
    except Unpicklable:
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:  # what the caller gave: the path to what cannot travel begins there
            encode(inner, _shown(inner))
        raise


def name_of(function: Any) -> tuple[str, str] | None:
    """Module and name under which importing gives this very function; None if there is no such name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "__mp_main__"):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is function and found is not None else None


def _constant_key(function: Any) -> object:
    """What the content of the simplest functions hangs on; None for all others, whose pickle alone tells."""
    if type(function) is not types.FunctionType:
        return None
    plain = function.__closure__ is None and function.__defaults__ is None and function.__kwdefaults__ is None
    if not plain or function.__dict__ or function.__annotations__:
        return None
    names = _names_used(function.__code__)
    return None if names is None or not names.isdisjoint(function.__globals__) else function.__code__


@functools.lru_cache(maxsize=1024)
def _names_used(code: types.CodeType) -> frozenset[str] | None:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_used(constant) or set()
    return frozenset(found)


def _stamped(module: str) -> Stamp:
    """Where its file is, and how that looks now."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return None, (0, 0)
    try:
        found = os.stat(file)
    except OSError:
        return _real(file), (0, 0)
    return _real(file), (found.st_mtime_ns, found.st_size)


def _real(file: str) -> str:
    """Of a module that was imported, and mostly found out before."""
    return _real_absolute(file) if os.path.isabs(file) else os.path.realpath(file)


@functools.lru_cache(maxsize=1024)
def _real_absolute(file: str) -> str:
    return os.path.realpath(file)


def is_library(path: str) -> bool:
    """Whether it is part of an interpreter: Python's own, or installed for it."""
    return (
        "site-packages" in path
        or "dist-packages" in path
        or path.startswith(os.path.dirname(os.__file__))
        or (path.endswith(".zip") and path.startswith((sys.prefix, sys.base_prefix)))
    )


def _shown(function: object) -> str:
    name = getattr(function, "__qualname__", None)
    return f"the function {name}" if isinstance(name, str) else f"the {type(function).__name__}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _nothing() -> None:
    return
