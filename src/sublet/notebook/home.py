"""Gives functions and classes of a notebook the namespace of the side on which they are used.

cloudpickle would take along a copy of every global that a function reads. Then two functions that share a counter would
each have one of their own, and what a cell rebinds no function would see. Here a function goes without its globals and
finds, where it arrives, the namespace there; which names it will look for is noted, so that they can be sent before.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import importlib.machinery
import logging
import multiprocessing.connection
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import field
from typing import Any, Final

from sublet.durable import rebuild
from sublet.lazy_dataclass import dataclass
from sublet.notebook.lookups import words_of_annotations, words_of_code
from sublet.notebook.reading import names_of
from sublet.state.checkpoints.object_groups import StandsFor
from sublet.state.transfer.names import MAINS
from sublet.state.transfer.reducers import (
    RUN_AT_LOADING,
    EncodingRules,
    GpuRule,
    ReductionRefused,
    contents_of,
    loaded,
)

CONNECTIONS: Final = (multiprocessing.connection._ConnectionBase, weakref.WeakSet)
"""What pickle can encode without use: a file descriptor of another process, and weak references to what has no
holder there."""
RLOCK: Final = type(threading.RLock())
LOCKS: Final = frozenset({type(threading.Lock()), RLOCK})
BOUND_TO_PROCESS: Final = (
    *(subprocess.Popen, concurrent.futures.Future, logging.Handler, threading.Thread, weakref.finalize),
)
"""What belongs to its process, for as long as it runs or always."""
NAMED: Final = {"Connection": "an end of a pipe", "WeakSet": "a set of weak references"}
READ_ANY: Final = frozenset({"eval", "exec", "globals"})


@dataclass(slots=True)
class Reads:
    """What functions and classes read of the namespace they are used in."""

    needs: set[str] = field(default_factory=set)
    """Global names that the functions read."""
    opaque: set[str] = field(default_factory=set)
    """Functions that may read any."""
    maybe: set[str] = field(default_factory=set)
    """Words in strings of functions and in type hints, which may be names that they look up."""
    loads: set[str] = field(default_factory=set)
    """Of ``needs`` those that are read while an instance of one of the classes is put together."""
    files: set[str] = field(default_factory=set)
    """Names of the files that functions were defined in: mostly cells."""

    def note_function(self, value: types.FunctionType) -> None:
        """One of the notebook's."""
        code = value.__code__
        names, is_opaque = names_of(code)
        self.needs |= names
        self.files.add(code.co_filename)
        self.maybe |= words_of_code(code) | words_of_annotations(value)
        if is_opaque:
            self.opaque.add(value.__qualname__)

    def note_class(self, value: type) -> None:
        """One that goes by value."""
        self.maybe |= words_of_annotations(value)
        for name in RUN_AT_LOADING & vars(value).keys():
            method = vars(value)[name]
            code = getattr(getattr(method, "__func__", method), "__code__", None)
            self.loads |= set() if code is None else names_of(code)[0]

    def add(self, other: Reads) -> None:
        """What others read as well."""
        self.needs |= other.needs
        self.opaque |= other.opaque
        self.maybe |= other.maybe
        self.loads |= other.loads
        self.files |= other.files


class HomeRules(EncodingRules):
    """The rules for values of one notebook."""

    remembers = True

    def __init__(
        self, *, gpu: GpuRule = "refuse", compact: frozenset[int] = frozenset(), reads: Reads | None = None
    ) -> None:
        super().__init__(gpu=gpu, compact=compact)
        self.reads = Reads() if reads is None else reads
        """Of the functions and classes among the values."""

    @property
    def needs(self) -> set[str]:
        """Global names that functions among the values read."""
        return self.reads.needs

    @property
    def reads_any(self) -> bool:
        """Whether a function among the values may look up any name as it runs."""
        return not self.needs.isdisjoint(READ_ANY)

    def anew(self, compact: frozenset[int] = frozenset()) -> HomeRules:
        """For another part of the same values: what is noted is noted together."""
        found = type(self)(gpu=self.gpu, compact=compact, reads=self.reads)
        found.figures, found.classes = self.figures, self.classes
        return found

    def part(self) -> HomeRules:
        """With notes of its own, which ``note`` adds."""
        found = self.anew()
        found.reads = Reads()
        return found

    def note(self, part: EncodingRules) -> None:
        if isinstance(part, HomeRules):
            self.reads.add(part.reads)

    def _parts(self, value: types.FunctionType) -> tuple[Any, Any, Any]:
        if is_at_home(value):
            space: StandsFor = _HOME
            self.reads.note_function(value)
        elif (module := module_of(value)) is not None:
            space = _ModuleGlobals(module)
        else:
            return super()._parts(value)
        # What cloudpickle would answer, less the globals. It goes through all loaded modules for every function.
        slots = {
            "__name__": "".join(value.__name__),  # a string of its own: whether it is interned must not show
            "__qualname__": "".join(value.__qualname__),
            "__annotations__": value.__annotations__,
            "__kwdefaults__": value.__kwdefaults__,
            "__defaults__": value.__defaults__,
            "__module__": value.__module__,
            "__doc__": value.__doc__,
            "__closure__": value.__closure__,
            "_cloudpickle_submodules": submodules_used(value),
            "__globals__": {},
        }
        attributes = {"".join(name): held for name, held in value.__dict__.items()}
        return rebuild.function, (value.__code__, space, None, None, None), (attributes, slots)

    def _bases(self) -> set[type]:
        found: set[Any] = {*super()._bases(), *CONNECTIONS, *LOCKS, *BOUND_TO_PROCESS, importlib.machinery.ModuleSpec}
        for module, name in (("comm.base_comm", "BaseComm"), ("IPython.core.interactiveshell", "InteractiveShell")):
            found.add(getattr(sys.modules.get(module), name, None))
        return found

    def _find_rule(self, kind: type) -> Any:
        if issubclass(kind, CONNECTIONS):
            return self._refused
        comms = sys.modules.get("comm.base_comm")
        if comms is not None and issubclass(kind, comms.BaseComm):
            return self._comm
        if kind in LOCKS:
            return self._lock
        if issubclass(kind, BOUND_TO_PROCESS):
            return self._idle
        if kind is importlib.machinery.ModuleSpec:
            return self._spec
        shell = sys.modules.get("IPython.core.interactiveshell")
        if shell is not None and issubclass(kind, shell.InteractiveShell):
            return self._shell
        numpy = loaded("numpy")
        return self._map if numpy is not None and kind is numpy.memmap else super()._find_rule(kind)

    def _refused(self, value: Any) -> Any:
        raise ReductionRefused(NAMED.get(type(value).__name__, f"a {type(value).__qualname__}"))

    def _comm(self, value: Any) -> Any:
        raise ReductionRefused("a widget's connection to the front end")

    def _spec(self, value: Any) -> Any:
        """The dict of a module holds the dict of all builtins, and ``exec`` puts it into the dict that it is given. A
        copy of them is worth nothing, and functions that were defined there would read a copy of that dict."""
        if value is builtins.__spec__:
            raise ReductionRefused("the names of a module, or a namespace that exec has run code in")
        return NotImplemented

    def _lock(self, value: Any) -> Any:
        """One that no thread holds is the same as a new one."""
        if not value.acquire(blocking=False):
            raise ReductionRefused("a thread lock that is held")
        value.release()
        if type(value) is RLOCK and value._is_owned():  # type: ignore[attr-defined]
            raise ReductionRefused("a thread lock that is held")
        return (threading.RLock if type(value) is RLOCK else threading.Lock), ()

    def _idle(self, value: Any) -> Any:
        """What a thread or another process is going to change stays with its process; what has ended is data."""
        match value:
            case subprocess.Popen() if value.returncode is None:
                raise ReductionRefused("a running process")
            case concurrent.futures.Future() if not value.done():
                raise ReductionRefused("a future that is not done")
            case logging.Handler():
                raise ReductionRefused("a handler of logging")
            case weakref.finalize() if value.alive:  # who calls it is the process that has noted it
                raise ReductionRefused("a finalizer of weakref")
            case threading.Thread() if value.is_alive():
                raise ReductionRefused("a running thread")
            case threading.Thread():
                state = {name: held for name, held in vars(value).items() if name not in rebuild.OF_NEW_THREAD}
                return rebuild.idle_thread, (type(value),), state
            case _:
                return NotImplemented

    def _shell(self, value: Any) -> Any:
        """What ``get_ipython()`` gives: each side has its own."""
        return (rebuild.shell, ()) if value is type(value).instance() else NotImplemented

    def _map(self, value: Any) -> Any:
        """A file that is mapped as an array is opened there, unless changes of it are to stay with their maker."""
        root = value
        while type(root.base) is type(value):
            root = root.base
        if root.filename is None or root.mode not in ("r", "r+", "w+"):
            return self._array(value)
        if root is value:
            order = "C" if value.flags.c_contiguous else "F"
            mode = "r" if value.mode == "r" else "r+"
            return rebuild.file_map, (str(value.filename), value.dtype, mode, value.offset, value.shape, order)
        at = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return rebuild.map_view, (root, value.dtype, value.shape, value.strides, at)

    def _class(self, value: type) -> Any:
        """With what it has lost since it was there last."""
        reduced = super()._class(value)
        if isinstance(reduced, tuple):
            self.reads.note_class(value)
        if not isinstance(reduced, tuple) or len(reduced) < 6:
            return reduced
        make, arguments, state, *_ = reduced
        if make is rebuild.make_class:
            own, slots = state
            state = self._methods_first(value, own), slots
        return make, arguments, state, None, None, rebuild.set_class


def is_at_home(value: types.FunctionType) -> bool:
    """Whether a function reads the notebook's own namespace."""
    return value.__globals__ is vars(sys.modules["__main__"])


def submodules_used(value: types.FunctionType) -> list[types.ModuleType]:
    """Loaded modules that a function reaches as attributes of the packages it names: to unpickle one imports it."""
    spaces, code = value.__globals__, value.__code__
    held: list[Any] = [spaces[name] for name in names_of(code)[0] if name in spaces]
    held += [one for cell in value.__closure__ or () for one in contents_of(cell)]
    packages = [one for one in held if isinstance(one, types.ModuleType) and getattr(one, "__package__", None)]
    if not packages:
        return packages
    found: dict[str, types.ModuleType] = {}
    attributes = set(code.co_names)
    while packages:
        package = packages.pop()
        for attribute in attributes:
            name = f"{package.__name__}.{attribute}"
            module = sys.modules.get(name)
            if module is not None and name not in found:
                found[name] = module
                packages.append(module)
    return [found[name] for name in sorted(found)]


def module_of(value: types.FunctionType) -> str | None:
    """Of a function that was made within a library's function (by a decorator, say): the module whose namespace it has,
    there as well."""
    name: str = value.__globals__.get("__name__", "")
    is_its = name not in MAINS and vars(sys.modules.get(name, _NO_MODULE)) is value.__globals__
    return name if is_its else None


_NO_MODULE = types.ModuleType("none")


class _ModuleGlobals(StandsFor):
    """Stands for the namespace of a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return rebuild.module_globals, (self._name,)


class _Home(StandsFor):
    """Stands for the namespace, and is it where it arrives."""

    def __reduce__(self) -> Any:
        return rebuild.home, ()


_HOME = _Home()
