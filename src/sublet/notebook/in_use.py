"""Finds what outlives its cell on the device, and which names and objects it uses.

A thread, an asyncio task, a timer, a callback of the shell, of a widget or of a signal goes on when its cell is over.
The names that its functions read must stay visible, and the objects that it may still change must not be copied: the
notebook's copy would be out of date at once, and would take the place of the original with the next cell.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.notebook.memories import is_array
from sublet.notebook.reading import names_of, names_set_by
from sublet.notebook.untouchable import Untouchable
from sublet.state.transfer.reducers import loaded

THREAD: Final = "in use by a running thread"
TASK: Final = "in use by a running task"
CALLBACK: Final = "in use by a callback"
OBJECTS_MAX: Final = 20_000
"""Objects that are followed from what a thread holds; beyond that nothing is looked at."""
WORK_QUEUE: Final = "work_queue"
"""As the threads of ``concurrent.futures`` call it."""
_NO_CODE: Final = frozenset({type(None), tuple, dict, signal.Handlers})
"""Most of what threads and signals have."""
_LEAVES: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, types.CodeType, types.ModuleType, types.FrameType}
)


@dataclass(slots=True)
class InUse:
    """What is used, and by what."""

    names: dict[str, str] = field(default_factory=dict)
    """Names of the namespace that running code reads, and why."""
    changing: dict[str, str] = field(default_factory=dict)
    """Of these, what stays on the device: names that are bound by running code, or that have an object which it may
    change."""
    objects: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """What running code may change, by its id, and why: it stays as well where a name only holds something with it."""

    def why(self, values: Iterable[Any]) -> str:
        """Why a group of objects cannot leave the device; empty if it can."""
        for value in values:
            one = value
            while one is not None:
                if id(one) in self.objects:
                    return self.objects[id(one)][1]
                one = getattr(one, "base", None) if is_array(one) else None
        return ""


NOTHING: Final = InUse()
_SHARED_KINDS: Final = (types.FunctionType, type, logging.Logger)
"""Code runs in threads and elsewhere at once, and each side has its own loggers."""


def in_use(names: dict[str, Any], can_change: Callable[[Any], bool]) -> InUse:
    """As of now. ``names``: the namespace whose functions are looked for."""
    roots = list(_roots(names))
    if not roots:
        return NOTHING
    found = InUse()
    untouchable = Untouchable()
    for why, root in roots:
        _follow(root, why, names, untouchable, can_change, found)
    return found


def _roots(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where running code begins: what each thread, task and callback of this namespace holds."""
    for root in _running(names):
        yield THREAD, root
    loop = _loop()
    if loop is not None:
        for task in asyncio.all_tasks(loop):
            chain = list(_awaited(task.get_coro()))
            if any(frame.f_globals is names for frame in chain):
                yield TASK, [_Frame(frame) for frame in chain]
        for handle in (*getattr(loop, "_scheduled", ()), *getattr(loop, "_ready", ())):
            callback = getattr(handle, "_callback", None)
            if _is_of(names, callback):
                yield CALLBACK, [callback, getattr(handle, "_args", None)]
    for callback in _registered():
        if _is_of(names, callback):
            yield CALLBACK, callback


def _running(names: dict[str, Any]) -> list[Any]:
    """What each thread of this namespace holds.

    No garbage is collected meanwhile: in CPython 3.11 a frame of another thread becomes an object only when it is asked
    for, and if finalizers give that thread a turn in the middle of it, its frame is gone and the process dies.
    """
    found: list[Any] = []
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
        main = threading.main_thread().ident
        for thread in threading.enumerate():
            if thread.ident == main or thread.ident == threading.get_ident():
                continue
            stack = list(_stack(frames.get(thread.ident or 0)))
            own = [getattr(thread, part, None) for part in _OWN]
            calls = [one for one in own if _is_of(names, one)]
            if calls or any(frame.f_globals is names for frame in stack) or _queued(stack, names):
                found.append([own, [_Frame(frame) for frame in stack]])
    finally:
        if collects:
            gc.enable()
    return found


_OWN: Final = ("_target", "function", "_args", "args", "_kwargs", "kwargs")
"""Where a thread or a timer has what it was made with."""


class _Frame:
    """Code that runs, with its variables."""

    def __init__(self, frame: types.FrameType) -> None:
        self.code, self.globals, self.locals = frame.f_code, frame.f_globals, dict(frame.f_locals)


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited(coroutine: Any) -> Iterator[types.FrameType]:
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None)


def _queued(stack: list[types.FrameType], names: dict[str, Any]) -> bool:
    """Whether a thread of a pool has functions of this namespace in front of it."""
    for frame in stack:
        queue = frame.f_locals.get(WORK_QUEUE) if WORK_QUEUE in frame.f_code.co_varnames else None
        if queue is not None and any(_is_of(names, getattr(item, "fn", None)) for item in gc.get_referents(queue)):
            return True
    return False


def _loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        ioloop = sys.modules.get("tornado.ioloop")
        current = None if ioloop is None else ioloop.IOLoop.current(instance=False)
        found: asyncio.AbstractEventLoop | None = getattr(current, "asyncio_loop", None)
        return found


def _registered() -> Iterator[Any]:
    """Callbacks of the shell, of signals and of widgets, and what libraries call for objects of theirs."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    for callbacks in getattr(getattr(shell, "events", None), "callbacks", {}).values():
        yield from callbacks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        yield signal.getsignal(number)
    widgets = sys.modules.get("ipywidgets.widgets.widget")
    for widget in list(getattr(widgets, "_instances", {}).values()):
        for held in (widget._trait_notifiers, getattr(widget, "_click_handlers", None), widget._msg_callbacks):
            yield from _callables_in(held)
    pandas = loaded("pandas")
    for kind in () if pandas is None else (pandas.DataFrame, pandas.Series, pandas.Index):
        for name in getattr(kind, "_accessors", ()):
            yield getattr(vars(kind).get(name), "_accessor", None)
    modules = sys.modules.get("torch.nn.modules.module")
    for part in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        yield from getattr(modules, part, {}).values()


def _callables_in(held: Any, depth: int = 4) -> Iterator[Any]:
    if callable(held):
        yield held
    elif depth and isinstance(held, dict):
        for one in held.values():
            yield from _callables_in(one, depth - 1)
    elif depth and (isinstance(held, list | tuple) or hasattr(held, "callbacks")):
        for one in getattr(held, "callbacks", held):
            yield from _callables_in(one, depth - 1)


def _is_of(names: dict[str, Any], value: Any) -> bool:
    """Whether it is a function, method or class of the namespace, however wrapped."""
    if type(value) in _NO_CODE:
        return False
    for _ in range(8):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            if type(value.__self__).__module__ == "__main__":
                return True
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            break
    if isinstance(value, type):
        return value.__module__ == "__main__"
    return isinstance(value, types.FunctionType) and value.__globals__ is names


def _follow(
    root: Any,
    why: str,
    names: dict[str, Any],
    untouchable: Untouchable,
    can_change: Callable[[Any], bool],
    found: InUse,
) -> None:
    """Everything that running code reaches: through its variables, and through the global names that it reads."""
    waiting: list[Any] = [root]
    seen: dict[int, Any] = {}
    while waiting and len(seen) < OBJECTS_MAX:
        one = waiting.pop()
        if type(one) in _LEAVES or id(one) in seen or one is names or untouchable.has(one):
            continue
        seen[id(one)] = one
        if isinstance(one, _Frame):
            waiting += one.locals.values()
            if one.globals is names:
                waiting += _read_by(one.code, why, names, found)
        elif isinstance(one, types.FunctionType):
            waiting += [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__, one.__dict__]
            if one.__globals__ is names:
                waiting += _read_by(one.__code__, why, names, found)
        elif isinstance(one, type):
            waiting += vars(one).values()
        else:
            waiting += gc.get_referents(one)
            waiting.append(type(one))
    for key, value in seen.items():
        if not isinstance(value, _SHARED_KINDS) and can_change(value):
            found.objects.setdefault(key, (value, why))
    for name, value in list(names.items()):
        if id(value) in found.objects and id(value) in seen:
            found.changing.setdefault(name, why)


def _read_by(code: types.CodeType, why: str, names: dict[str, Any], found: InUse) -> Iterable[Any]:
    for name in names_of(code)[0]:
        if name in names:
            found.names.setdefault(name, why)
            yield names[name]
    for name in names_set_by(code):
        found.names.setdefault(name, why)
        if name in names:
            found.changing.setdefault(name, why)
