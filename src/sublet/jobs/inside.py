"""Runs one chunk in a worker, and encodes its result.

A worker executes the chunks of a batch one after the other, in one process. A chunk that raises is an outcome like any
other, so the rest of its batch goes on. Each result becomes bytes here, so that one that cannot be serialized is that
chunk's own failure.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from sublet.errors import InvalidRequest, LeaseInterrupt, RemoteError, Unpicklable
from sublet.jobs.identity import File

_UNPICKLABLE: Final = (pickle.PicklingError, AttributeError, TypeError, NotImplementedError, RecursionError)
_NO_RESULTS: Final = (types.GeneratorType, types.AsyncGeneratorType)


class Raised(NamedTuple):
    """How a chunk ended that brought no result."""

    pickled: bytes | None
    """The exception, where it can travel."""
    type_name: str
    text: str
    trace: str
    refused: bool = False
    """Its result cannot be handed over; its function did not raise."""


class Task:
    """A function as workers execute it; the outcome is bytes, or `Raised`.

    ``raw``: the function returns bytes, which are the result as they are. ``spread``: an item is a tuple of arguments.
    """

    __slots__ = ("function", "raw", "spread")

    def __init__(self, function: Callable[..., Any], *, raw: bool = False, spread: bool = False) -> None:
        self.function = function
        self.raw = raw
        self.spread = spread

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What the caller gave, for messages."""
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        return _task, (self.function, self.raw, self.spread)

    def __call__(self, item: Any) -> bytes | Raised:
        try:
            found = self.function(*item) if self.spread else self.function(item)
            if type(found) is types.CoroutineType:
                import asyncio  # a tenth of a second, often in vain

                found = asyncio.run(found)
        except (KeyboardInterrupt, LeaseInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - an outcome of the chunk, SystemExit too
            if _left:
                _come_back()
            return _raised(error)
        if _left:
            _come_back()
        if self.raw:
            if isinstance(found, bytes | bytearray | memoryview):
                return bytes(found)
            return _refused(f"the function returned a {type(found).__name__} instead of bytes")
        if type(found) in _NO_RESULTS:
            return _refused("a generator cannot be the result of a chunk")
        try:
            data = pickle.dumps(found, 5)
        except _UNPICKLABLE:
            return _by_value(found)
        return _by_value(found) if b"__main__" in data else data


class OverInputs:
    """A WASM tasklet over inputs that are files or JSON values: a file's content, or the JSON text, is its input."""

    __slots__ = ("tasklet",)

    def __init__(self, tasklet: Any) -> None:
        self.tasklet = tasklet

    def __reduce__(self) -> tuple[Any, ...]:
        return OverInputs, (self.tasklet,)

    def __call__(self, item: Any) -> Any:
        return self.tasklet(item.read() if isinstance(item, File) else json.dumps(item).encode())

    @property
    def fuel(self) -> int:
        """The most that one input may use."""
        fuel: int = self.tasklet.fuel
        return fuel


def call_chunk(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that travels with its arguments."""
    return function(*args, **kwargs)


def load_result(data: bytes) -> Any:
    """What the function returned. Holder and worker are one program, so the bytes are its own."""
    return pickle.loads(data)  # noqa: S301


def error_of(raised: Raised) -> BaseException:
    """The exception as itself where it can be had, with the worker's traceback as a note; else what it said."""
    if raised.refused:
        return Unpicklable(raised.text, what=raised.type_name, do="Return plain data: numbers, texts, lists, arrays.")
    error: BaseException | None = None
    if raised.pickled is not None:
        try:
            found = pickle.loads(raised.pickled)  # noqa: S301 - as above
        except Exception:  # noqa: BLE001 - its class is not here, or does not take what it kept
            found = None
        if isinstance(found, BaseException):
            error = found
    if error is None:
        error = RemoteError(
            f"{raised.type_name}: {raised.text}", type_name=raised.type_name, traceback=raised.trace, do=""
        )
    error.add_note(f"In the worker:\n{raised.trace}")
    return error


def _task(function: Callable[..., Any], raw: bool, spread: bool) -> Task:
    """Of a worker: from its first chunk on it comes back to its working folder after each."""
    _keep_watch()
    return Task(function, raw=raw, spread=spread)


def _come_back() -> None:
    """A fork that comes out of the chunk's function ends here, or it would execute the rest of the batch as well. A
    process that has left its working folder returns to it."""
    if "process" in _left:
        os._exit(0)
    os.fchdir(_folder[0])
    _left.clear()


_folder: list[int] = []
_left: set[str] = set()
"""What a chunk's function has left: the worker's process, its working folder. Asking the kernel after each chunk would
cost as much as all else that is done for it here."""


def _keep_watch() -> None:
    if _folder:
        return
    os.register_at_fork(after_in_child=lambda: _left.add("process"))
    try:
        _folder.append(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:  # the folder is gone or may not be read; then there is none to come back to
        _folder.append(-1)
        return

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.chdir":
            _left.add("folder")

    sys.addaudithook(watch)


def _by_value(found: Any) -> bytes | Raised:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(found, 5)
    except ImportError:
        return _refused(f"the result, a {type(found).__name__}, needs cloudpickle, which the worker does not have")
    except Exception as error:  # noqa: BLE001 - a value may raise anything while it is taken apart
        name = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
        return _refused(f"the result, a {name}, cannot be serialized ({type(error).__name__}: {error})")
    return data


def _refused(why: str) -> Raised:
    return Raised(None, InvalidRequest.__name__, why, "", refused=True)


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, trace)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - what has no text has none
        text = "(it has no text)"
    pickled: bytes | None = None
    try:
        pickled = pickle.dumps(error.with_traceback(None), 5)
        if b"__main__" in pickled:
            import cloudpickle

            pickled = cloudpickle.dumps(error, 5)
        pickle.loads(pickled)  # noqa: S301 - made in the line above; one that cannot be read goes as its text
    except Exception:  # noqa: BLE001 - what cannot travel as itself goes as its text
        pickled = None
    return Raised(pickled, type(error).__qualname__, text, "".join(lines))
