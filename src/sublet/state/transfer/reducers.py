"""Reduces objects that plain pickle cannot encode, or only by copying their memory.

Asked for every object that is not a number, text or plain container, so that one function of ``__main__`` among a
million plain objects costs what one function costs. Libraries are looked up among those that the program has loaded;
none is imported. What each rule makes is put together again by ``rebuild``.
"""

from __future__ import annotations

import array
import collections
import copyreg
import datetime as dt
import decimal
import enum
import fractions
import functools
import gc
import importlib
import itertools
import operator
import os
import pathlib
import random
import re
import struct
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pickle import PickleBuffer
from typing import Any, ClassVar, Final, Literal

from sublet.durable import rebuild
from sublet.state.transfer import figures
from sublet.state.transfer.device_state import devices_are_away
from sublet.state.transfer.memory import address_of, lend, memory_at
from sublet.state.transfer.names import MAINS, found_by_name

GpuRule = Literal["copy", "refuse"]
Rule = Callable[[Any], Any]

BY_CLOUDPICKLE: Final[tuple[type, ...]] = (
    *(types.ModuleType, types.CodeType, types.MethodType),
    *(classmethod, staticmethod, property, weakref.WeakSet),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
"""Parts of functions and classes that pickle has no form for and cloudpickle has."""

UNNAMED: Final = frozenset(kind for kind in vars(types).values() if isinstance(kind, type)) - {
    *(type(None), type(...), type(NotImplemented))
}
"""Types of the interpreter that stand in no module under their own name; cloudpickle knows where."""
OWNERS: Final = (bytearray, array.array)
"""A view of their memory is a view of it after loading as well, if both travel together."""
HEAP_TYPE: Final = 1 << 9
"""The flag of classes that were made while the program ran."""
RUN_AT_LOADING: Final = frozenset(
    {
        *("__new__", "__init__", "__setstate__", "__reduce__", "__reduce_ex__", "__setattr__", "__getattr__"),
        *("__getattribute__", "__hash__", "__eq__", "__setitem__", "append", "extend", "add", "update"),
    }
)
"""Methods that may run while an object is unpickled."""
RULED: Final[tuple[type, ...]] = (
    *(type, memoryview, BaseException, types.FunctionType, types.CellType, types.MappingProxyType),
    *(functools._lru_cache_wrapper, functools.cached_property, typing.NewType, typing.TypeVar),
    *(re.Match, itertools.groupby, weakref.ProxyType, weakref.CallableProxyType, struct.Struct),
    collections.Counter,
)
"""Of Python's own classes those that rules are for, beside ``BY_CLOUDPICKLE``."""
RULED_MODULES: Final = (*MAINS, "typing", "unittest.mock")
"""Modules whose classes may have a rule whatever their bases are."""
RULED_BY_NAME: Final = (
    *(("PIL.ImageDraw", "ImageDraw"), ("PIL.Image", "Image")),
    *(("pandas._libs.internals", "Block"), ("pandas.core.arrays.arrow.array", "ArrowExtensionArray")),
)
"""Modules and classes in them that rules are for. They need not be loaded whole."""


SINGLE_DISPATCH: Final = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]
"""Of the function that ``functools.singledispatch`` makes: around it are weak references, which it can do without."""


class ReductionRefused(TypeError):
    """A rule says that this object cannot travel; the text says what it is."""


PLAIN_KINDS: Final = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict})
ARROW_PADDING_BYTES: Final = 4096
"""What the buffers of an array of Arrow may have beyond its values: each is padded to a multiple of 64 bytes."""


class ClassRules:
    """What was found out about classes. It holds as long as no code of the program runs."""

    __slots__ = ("bases", "of_kinds")

    def __init__(self) -> None:
        self.of_kinds: dict[type, tuple[Rule | str | None, Mapping[int, tuple[str, str]]]] = {}
        """Of each class that was met its rule, or the name of that if it is a method, and its objects that modules have
        under a name."""
        self.bases: frozenset[type] = frozenset()
        """The classes that rules are for, of the libraries that are loaded; empty: not looked for yet."""


class EncodingRules:
    """The rules of one encoding, with what it has to remember."""

    remembers: ClassVar[bool] = False
    """Whether what was encoded is to say which objects it met (``Encoded.met``)."""

    def __init__(self, *, gpu: GpuRule = "copy", compact: frozenset[int] = frozenset()) -> None:
        self.gpu = gpu
        self.compact = compact
        """Arrays (by id) that see so little of their memory that only that little is copied."""
        self.sparse: dict[int, tuple[int, int]] = {}
        """Address of a window that an array sees with gaps → the array's id, and the bytes that it sees."""
        self.private: set[int] = set()
        """Ids of buffers that share with no other, even where their addresses overlap."""
        self.keep: list[object] = []
        """What was made for this encoding and must live as long."""
        self.temporary: set[int] = set()
        """Ids of objects that were made for this encoding alone and are none of the program's."""
        self.columns: set[int] = set()
        """Addresses of the Arrow memory that pandas columns see."""
        self.owned: frozenset[int] = frozenset()
        """Ids of byte arrays that travel, and whose memory something else that travels looks at."""
        self._rules: dict[type, Rule | None] = {}
        self.classes = ClassRules()
        """``anew`` hands them on, for encodings of the same values."""
        self._cells: set[int] = set()
        """Ids of variables around functions that are encoded: what they hold goes with the functions."""
        self._alike: dict[tuple[int, int], tuple[types.FunctionType, Any, Any, Any]] = {}
        """By the ids of code and globals: a function without parts of its own, and how it was taken apart."""
        self._storages: dict[int, Any] = {}
        self._blocks: set[int] = set()
        self.figures: dict[int, figures.FigurePickle] = {}
        """Figures that were pickled, by id; ``anew`` hands them on, for encodings of the same values."""
        self.units: list[figures.FigurePickle] = []
        """Those of this encoding, in its order."""
        self._helper: Any = None
        self.chain: list[tuple[Any, Any]] | None = None
        """Objects whose attributes are still to be taken apart; None: each is, before what stands behind it."""
        self._flat: dict[type, bool] = {}

    def anew(self, compact: frozenset[int] = frozenset()) -> EncodingRules:
        """The same rules for another encoding."""
        found = type(self)(gpu=self.gpu, compact=compact)
        found.figures, found.classes = self.figures, self.classes
        return found

    def part(self) -> EncodingRules:
        """The same for one of several encodings, each of which may be used again without being run."""
        return self.anew()

    def note(self, part: EncodingRules) -> None:
        """What was encoded by those is one of these values."""

    @property
    def has_met_objects(self) -> bool:
        """Whether anything was met that is no number, text or plain container."""
        return bool(self._rules)

    def reduce(self, value: Any) -> Any:
        """What ``reducer_override`` answers."""
        kind = type(value)
        try:
            rule = self._rules[kind]
        except KeyError:
            rule = self._rules[kind] = self._rule_of(kind)
        if rule is not None:
            return rule(value)
        return NotImplemented if self.chain is None else self._empty(value, kind)

    def _rule_of(self, kind: type) -> Rule | None:
        """Looked for once for all encodings of the same values: that takes longer than to ask it."""
        of_kinds = self.classes.of_kinds
        if kind not in of_kinds:
            found: Rule | str | None = self._rule_for(kind)
            if isinstance(found, types.MethodType) and found.__self__ is self:
                found = found.__name__
            of_kinds[kind] = found, _of_modules(kind)
        rule, known = of_kinds[kind]
        rule = getattr(self, rule) if isinstance(rule, str) else rule
        return self._unless_of_module(kind, rule, known) if known else rule

    def _unless_of_module(self, kind: type, rule: Rule | None, known: Mapping[int, tuple[str, str]]) -> Rule:
        """An object that its library has under a name, such as ``matplotlib.rcParams``, is the library's own: it goes
        by that name. ``rule`` is for all others of the class; ``known``: those of modules."""

        def reduce(value: Any) -> Any:
            module, name = known.get(id(value), ("", ""))
            if module and vars(sys.modules.get(module, types)).get(name) is value:
                return rebuild.of_module, (module, name)
            if rule is not None:
                return rule(value)
            return NotImplemented if self.chain is None else self._empty(value, kind)

        return reduce

    def has_rule_for(self, kind: type) -> bool:
        """Whether objects of this class are not just taken apart by pickle."""
        return self._rule_for(kind) not in (None, self._made_before)

    def flatten(self) -> list[tuple[Any, Any]]:
        """From here on objects are taken apart without their attributes, which are left in the answer."""
        self.chain = []
        return self.chain

    def _empty(self, value: Any, kind: type) -> Any:
        """An object whose class leaves it to Python how it is pickled, and whose hash does not depend on its
        attributes: it may be put into a dict before it has any."""
        can_wait = self._flat.get(kind)
        if can_wait is None:
            can_wait = self._flat[kind] = has_plain_state(kind)
        if not can_wait or self.chain is None:
            return NotImplemented
        make, arguments, state, *rest = (*value.__reduce_ex__(4), None, None, None)[:5]
        if rest != [None, None]:
            return NotImplemented
        if state is not None:
            self.chain.append((value, state))
        return make, arguments

    def _made_before(self, value: Any) -> Any:
        """An object of a class of which pickle would call a method of the program's to make or to fill it: that has run
        when the program made the object, and would be given what it had made of its arguments."""
        kind = type(value)
        core = _core_of(kind)
        reduced = NotImplemented if self.chain is None else self._empty(value, kind)
        make, arguments, *parts = value.__reduce_ex__(4) if reduced is NotImplemented else reduced
        if core in (list, set):
            state, items = parts[0], list(core.__iter__(value))
            return core.__new__, (kind,), (state, items), None, None, rebuild.fill_container
        if core is frozenset:
            return core.__new__, (kind, *arguments), *parts
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return NotImplemented
        fields = core is tuple and hasattr(kind, "_fields")
        return core.__new__, (kind, *((arguments[1:],) if fields else arguments[1:])), *parts

    @staticmethod
    def _with_attributes(core: Any, value: Any) -> Any:
        """pickle would call the program's class with what makes a bare value, and leave the attributes behind."""
        kind = type(value)
        _, arguments, *_ = core.__reduce_ex__(value, 4)
        if issubclass(core, pathlib.PurePath):  # what it is made of, ``__init__`` keeps
            return kind, arguments, vars(value) or None
        return core.__new__, (kind, *arguments), vars(value) or None

    @staticmethod
    def _random(value: random.Random) -> Any:
        """pickle leaves the attributes of a program's own class of random generators behind, too."""
        state = value.getstate(), dict(vars(value))
        return random.Random.__new__, (type(value),), state, None, None, rebuild.set_random

    def _rule_for(self, kind: type) -> Rule | None:
        """Most classes have none, and their bases show it. To ask for one rule after the other takes far longer."""
        bases = self.classes.bases
        if not bases:
            bases = self.classes.bases = frozenset(self._bases())
        if bases.isdisjoint(kind.__mro__) and kind.__module__ not in RULED_MODULES:
            return self._plotted if "matplotlib.figure" in sys.modules and figures.is_part_kind(kind) else None
        return self._find_rule(kind)

    def _rule_of_program(self, kind: type) -> Rule | None:
        for core in (collections.deque, collections.defaultdict):
            if issubclass(kind, core) and kind.__reduce__ is core.__reduce__:
                return self._collection
        if issubclass(kind, random.Random) and _is_pickled_as(kind, random.Random):
            return self._random
        for base in _WITHOUT_ATTRIBUTES:
            if issubclass(kind, base) and kind.__dictoffset__ and _is_pickled_as(kind, base):
                return functools.partial(self._with_attributes, base)
        return self._made_before if core_made_by(kind) is not None else None

    def _bases(self) -> set[type]:
        """Classes of which, and of whose subclasses, ``_find_rule`` may find a rule. Of no others, but of those of
        ``RULED_MODULES``."""
        found: set[Any] = {*BY_CLOUDPICKLE, *RULED}
        if (numpy := loaded("numpy")) is not None:
            found |= {numpy.ndarray, numpy.ufunc, numpy.dtypes.VoidDType}
        if (torch := loaded("torch")) is not None:
            found |= {torch.storage.TypedStorage, torch.UntypedStorage, torch.Tensor, torch.optim.Optimizer}
            found |= {torch.utils.hooks.RemovableHandle, weakref.ReferenceType}
            if "torch.nn.utils.parametrize" in sys.modules:
                found.add(torch.nn.Module)
        for module, name in RULED_BY_NAME:
            found.add(getattr(sys.modules.get(module), name, None))
        if (pandas := loaded("pandas")) is not None:
            found |= {pandas.core.generic.NDFrame, pandas.Index}
        return found

    def _find_rule(self, kind: type) -> Rule | None:
        if issubclass(kind, type):
            return self._class
        if kind is types.FunctionType:
            return self._function
        if kind is types.CellType:
            return self._cell
        if kind is types.MappingProxyType:
            return self._mapping_proxy
        if kind is memoryview:
            return self._memoryview
        if issubclass(kind, BaseException):
            return self._exception
        if kind is functools._lru_cache_wrapper:
            return self._remembering
        if kind is functools.cached_property:
            return self._cached_property
        if issubclass(kind, dict) and kind.__module__ in MAINS and kind.__setitem__ is not dict.__setitem__:
            return self._mapping_of_program
        if issubclass(kind, collections.Counter) and kind.__reduce__ is collections.Counter.__reduce__:
            return self._collection
        if kind.__module__ in MAINS and (rule := self._rule_of_program(kind)) is not None:
            return rule
        if kind is typing.NewType:
            return self._new_type
        if kind is typing.TypeVar:
            return self._type_var
        if kind is re.Match:
            return self._match
        if kind is itertools.groupby:
            return self._groupby
        if kind in (weakref.ProxyType, weakref.CallableProxyType):
            return self._weak_proxy
        if kind is struct.Struct:
            return lambda value: (struct.Struct, (value.format,))
        if kind.__module__ == "unittest.mock" and kind.__qualname__ == "_Call":
            return self._mock_call
        if issubclass(kind, BY_CLOUDPICKLE) or kind.__module__ == "typing":
            return self._by_table(kind)
        if (numpy := loaded("numpy")) is not None:
            if kind is numpy.ndarray or kind is numpy.memmap:
                return self._array
            if issubclass(kind, numpy.ndarray):
                return self._array_of_kind
            if kind is numpy.ufunc:
                return self._ufunc
            if kind is numpy.dtypes.VoidDType:
                return self._structured_dtype
        if (torch := loaded("torch")) is not None:
            if kind is torch.storage.TypedStorage:
                return self._typed_storage
            if kind is torch.UntypedStorage:
                return self._storage
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                return self._tensor
            if issubclass(kind, torch.optim.Optimizer) and kind.__getstate__ is torch.optim.Optimizer.__getstate__:
                return self._optimizer
            if _is_parametrized(torch, kind):
                return self._parametrized
            if kind is torch.utils.hooks.RemovableHandle:
                return self._hook_handle
            if kind is weakref.ReferenceType:
                return self._weak_reference
        if "matplotlib.figure" in sys.modules and figures.is_part_kind(kind):
            return self._plotted
        if (drawing := sys.modules.get("PIL.ImageDraw")) is not None and kind is drawing.ImageDraw:
            return self._image_draw
        if (pillow := sys.modules.get("PIL.Image")) is not None and issubclass(kind, getattr(pillow, "Image", ())):
            return self._image
        if (internals := sys.modules.get("pandas._libs.internals")) is not None and issubclass(kind, internals.Block):
            return self._pandas_block
        if (arrow := sys.modules.get("pandas.core.arrays.arrow.array")) is not None:
            column = arrow.ArrowExtensionArray
            if issubclass(kind, column) and kind.__getstate__ is column.__getstate__:
                return self._arrow_column
        if (pandas := loaded("pandas")) is not None:
            frame = pandas.core.generic.NDFrame
            if issubclass(kind, frame) and _is_pickled_as(kind, frame):
                return self._pandas_frame
            if issubclass(kind, pandas.Index):
                return self._pandas_index
        return None

    # ---- functions and classes ----

    def _class(self, value: type) -> Any:
        if found_by_name(value) or (not value.__flags__ & HEAP_TYPE and value not in UNNAMED):
            return NotImplemented  # what is defined in C, pickle finds or refuses
        if (parameters := _parameters_of(value)) is not None:
            return operator.getitem, parameters
        reduced = self._cloudpickle().reducer_override(value)
        if len(reduced) < 6:
            return reduced
        _, arguments, (attributes, slots), *others = reduced
        if isinstance(value, enum.EnumMeta):
            return self._enumeration(value, arguments, attributes, slots, others)
        kind, name, bases, given, *rest = arguments
        if value.__qualname__ != name:  # cloudpickle leaves it out, and a data class shows it
            given = {**given, "__qualname__": "".join(value.__qualname__)}
        is_named = typing.NamedTuple in vars(value).get("__orig_bases__", ())  # makes its slots itself
        if "__slots__" in vars(value) and not is_named:  # cloudpickle makes one without slots of it
            given = {**given, "__slots__": value.__dict__["__slots__"]}
        return rebuild.make_class, (kind, name, bases, given, *rest), (_whole(value, attributes), slots), *others

    def _enumeration(self, value: Any, arguments: Any, attributes: dict[str, Any], slots: Any, others: Any) -> Any:
        """With second names of members, which cloudpickle leaves out, and with the attributes of members."""
        every: dict[str, Any] = dict(value.__members__)
        members = {name: member.value for name, member in every.items()}
        core, extra = _core_of(value), {}
        is_of_program = isinstance(value._new_member_, types.FunctionType) or value._member_type_.__flags__ & HEAP_TYPE
        if is_of_program:  # then the program says what contents and value each has
            extra = {name: () if core is object else core.__getnewargs__(one) for name, one in every.items()}
        attributes = {name: one for name, one in attributes.items() if name not in members}
        attributes[rebuild.MEMBERS] = {one.name: rebuild.attributes_of_member(one) for one in value}
        self.temporary.update(map(id, (attributes[rebuild.MEMBERS], *attributes[rebuild.MEMBERS].values())))
        made = (*arguments[:3], members, *arguments[4:-1], extra)
        return rebuild.make_enum, made, (attributes, slots), *others

    def _methods_first(self, value: type, own: dict[str, Any]) -> dict[str, Any]:
        """The attributes of a class, for ``rebuild.set_class``. Where objects of its own may be among them its methods
        come before the others."""
        methods = _methods_needed(own)
        if not methods:
            return own
        first = _Made((rebuild.methods_first, (value, methods)))
        self.keep.append(first)
        self.temporary.update((id(first), id(methods)))
        return {rebuild.METHODS_FIRST: first, **own}

    def _collection(self, value: Any) -> Any:
        """Of a class of which pickle leaves attributes behind, or which it would make with its contents."""
        kind: Any = type(value)
        state = object.__getstate__(value)
        if isinstance(value, collections.deque):
            extra, items = value.maxlen, list(collections.deque.__iter__(value))
        else:
            extra, items = getattr(value, "default_factory", None), list(dict.items(value))
        return _core_of(kind).__new__, (kind,), (state, extra, items), None, None, rebuild.fill_collection

    def _mapping_of_program(self, value: Any) -> Any:
        """pickle would set the items with the class' own ``__setitem__``, before the attributes; and call the class
        without arguments, if it is an ordered dict."""
        kind = type(value)
        make, arguments, state, _, items = (*value.__reduce_ex__(4), None, None, None)[:5]
        is_known = (make is kind and arguments == ()) or (make is copyreg.__newobj__ and arguments == (kind,))  # type: ignore[attr-defined]
        if not is_known:
            return NotImplemented
        new: Any = copyreg.__newobj__  # type: ignore[attr-defined]
        return new, (kind,), (state, list(items or ())), None, None, rebuild.fill_mapping

    def _type_var(self, value: typing.TypeVar) -> Any:
        if found_by_name(value):
            return NotImplemented
        rule = self._by_table(typing.TypeVar)
        reduced = NotImplemented if rule is None else rule(value)
        if not isinstance(reduced, tuple):
            return reduced
        return rebuild.type_var, (reduced[0], reduced[1], value.__module__)

    def _match(self, value: re.Match[Any]) -> Any:
        """It is found once more where it arrives: at its place in the text, or, of other ways to match there, as long
        as it is. Else it cannot be pickled."""
        for where in ("match", value.start(), value.endpos), ("fullmatch", value.start(), value.end()):
            again = rebuild.match(value.re, value.string, *where)
            if again is not None and again.regs == value.regs:
                return rebuild.match, (value.re, value.string, *where)
        return NotImplemented

    def _mock_call(self, value: Any) -> Any:
        """A call that a mock has noted: any attribute of one is another call, so pickle cannot ask it for its state."""
        return rebuild.mock_call, (tuple(tuple.__iter__(value)), dict(object.__getattribute__(value, "__dict__")))

    def _function(self, value: types.FunctionType) -> Any:
        """As cloudpickle does it, but variables around it stay what they are: shared by the functions that share them.

        They are made empty, since a function may be found in one of its own.
        """
        if found_by_name(value):
            return NotImplemented
        if value.__code__ is SINGLE_DISPATCH and callable(getattr(value, "dispatch", None)):
            found = dict(value.registry)  # type: ignore[attr-defined]
            return rebuild.single_dispatch, (found.pop(object),), found, None, None, rebuild.fill_dispatch
        cells = value.__closure__ or ()
        contents = tuple(map(contents_of, cells))
        self._cells.update(map(id, cells))
        make, arguments, state = self._parts_like(value, contents)
        if cells:
            arguments = (*arguments[:4], cells)
        return make, arguments, (state, contents), None, None, rebuild.fill_function

    def forget_parts(self) -> None:
        """After an encoding: what only it held is told by reference counts, and these must not be held longer."""
        self._alike.clear()

    def _parts_like(self, value: types.FunctionType, contents: tuple[tuple[Any, ...], ...]) -> tuple[Any, Any, Any]:
        """Functions that one ``def`` or ``lambda`` made over and over mostly differ in the variables around them alone:
        the first is taken apart, and the parts of the others are the very same."""
        key = id(value.__code__), id(value.__globals__)
        known = self._alike.get(key)
        is_bare = _is_bare(value, contents)
        if known is not None and is_bare and _is_named_like(value, known[0]):
            return known[1:]
        make, arguments, state = self._parts(value)
        if contents:
            state = (state[0], {**state[1], "__closure__": None})
        if is_bare:
            del state[1]["__annotations__"]  # one dict for all would be one for all where it arrives
            self._alike.setdefault(key, (value, make, arguments, state))
        return make, arguments, state

    def _parts(self, value: types.FunctionType) -> tuple[Any, Any, Any]:
        _, arguments, state, *_ = self._cloudpickle().reducer_override(value)
        return rebuild.function, arguments, state

    def _cell(self, value: types.CellType) -> Any:
        if id(value) in self._cells:
            return rebuild.cell, ()
        return rebuild.cell, (), contents_of(value), None, None, rebuild.fill_cell

    def _mapping_proxy(self, value: Any) -> Any:
        return types.MappingProxyType, (behind(value),)

    def _remembering(self, value: Any) -> Any:
        """A function that remembers its results; they are not saved and not sent."""
        if found_by_name(value):
            return NotImplemented
        given = value.cache_parameters()
        made = rebuild.remembering, (value.__wrapped__, given["maxsize"], given["typed"])
        return *made, attributes_of_remembering(value), None, None, rebuild.set_remembering

    def _cached_property(self, value: Any) -> Any:
        """Without the lock that it has in older Pythons."""
        attributes = {name: held for name, held in vars(value).items() if name not in ("lock", "func")}
        return functools.cached_property, (value.func,), attributes, None, None, rebuild.set_attributes

    def _new_type(self, value: Any) -> Any:
        if found_by_name(value):
            return NotImplemented
        return rebuild.new_type, (value.__qualname__, value.__supertype__, value.__module__)

    def _exception(self, value: BaseException) -> Any:
        """With what it was raised from, which pickle leaves behind. Tracebacks stay where they are."""
        reduced: Any = (copyreg.__newobj__, (type(value), *value.args), vars(value) or None)  # type: ignore[attr-defined]
        if not _is_made_by_init(type(value)):
            reduced = value.__reduce_ex__(5)
        chain = (value.__cause__, value.__context__, value.__suppress_context__)
        if chain == (None, None, False) or not isinstance(reduced, tuple) or len(reduced) > 3:
            return reduced
        make, arguments, state, *_ = (*reduced, None)
        return make, arguments, (state, *chain), None, None, rebuild.set_chain

    def _by_table(self, kind: type) -> Rule | None:
        table = type(self._cloudpickle()).dispatch_table
        found: Rule | None = table.get(kind)
        return found

    def _cloudpickle(self) -> Any:
        """cloudpickle's own pickler, asked how it would take one object apart. It never sees the rest."""
        if self._helper is None:
            cloudpickle = importlib.import_module("cloudpickle")
            self._helper = cloudpickle.Pickler(_Nowhere(), protocol=5)
        return self._helper

    # ---- memory ----

    def _memoryview(self, value: memoryview) -> Any:
        if not value.contiguous or not value.c_contiguous or value.format is None:
            raise ReductionRefused("a memoryview with gaps")
        owner = value.obj
        if id(owner) in self.owned and value.nbytes:
            at = address_of(value) - address_of(memoryview(owner))
            return rebuild.memory_view_on, (owner, at, value.nbytes, value.format, value.shape)
        return rebuild.memory_view, (lend(value), value.format, value.shape)

    def _array(self, value: Any) -> Any:
        """Every array is a window on memory, so that arrays which overlap still do after loading."""
        dtype = value.dtype
        if not value.size and dtype.itemsize and not dtype.hasobject and value.flags.writeable:
            return rebuild.array, (None, dtype, value.shape, None, 0)  # numpy's own could not be written
        if not value.size or not dtype.itemsize:
            return NotImplemented
        if dtype.hasobject:
            return self._objects(value)
        if self.owned and id(owner := owner_of(value)) in self.owned:
            at = value.__array_interface__["data"][0] - address_of(memoryview(owner))
            return rebuild.array_on, (owner, dtype, value.shape, value.strides, at)
        flags = value.flags
        if flags.c_contiguous:
            flat, strides, offset = value.reshape(-1).view("u1"), None, 0
        elif flags.f_contiguous:
            flat, strides, offset = value.T.reshape(-1).view("u1"), value.strides, 0
        elif id(value) in self.compact:
            copy = value.copy()
            return rebuild.array, (PickleBuffer(copy.reshape(-1).view("u1")), dtype, value.shape, None, 0)
        else:
            flat, offset = self._span(value)
            strides = value.strides
        return rebuild.array, (
            lend(flat) if type(flat) is memoryview else PickleBuffer(flat),
            dtype,
            value.shape,
            strides,
            offset,
        )

    def _objects(self, value: Any) -> Any:
        """An array of objects; one that looks at another's goes on doing so."""
        base = value.base
        alike = type(base) is type(value) and base.dtype == value.dtype and base.flags.c_contiguous
        if not alike or value.dtype.names:
            return NotImplemented
        at = (value.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // value.itemsize
        return rebuild.object_view, (base, at, value.shape, value.strides)

    def _array_of_kind(self, value: Any) -> Any:
        """Of a class that adds attributes to arrays."""
        numpy = sys.modules["numpy"]
        kind = type(value)
        if kind.__reduce__ is not numpy.ndarray.__reduce__ and not isinstance(value, numpy.ma.MaskedArray):
            return NotImplemented
        plain = value.view(numpy.ndarray)
        reduced = self._array(plain)
        if reduced is NotImplemented:
            return NotImplemented
        self.keep.append(plain)
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        return rebuild.array_of_kind, (kind, _Made(reduced)), attributes, None, None, rebuild.set_attributes

    def _structured_dtype(self, value: Any) -> Any:
        """Its table of fields cannot change, so arrays of one dtype do not share it."""
        make, arguments, state = value.__reduce__()
        self.temporary.update(id(part) for part in state if type(part) is dict)
        return make, arguments, state

    def _ufunc(self, value: Any) -> Any:
        if getattr(sys.modules["numpy"], value.__name__, None) is value:
            return NotImplemented
        raise ReductionRefused("a numpy.ufunc of one's own")

    def _span(self, value: Any) -> tuple[memoryview, int]:
        """All memory between an array's first and last byte, and where in it the array's own first element lies."""
        steps = [(n - 1) * step for n, step in zip(value.shape, value.strides, strict=True)]
        below = -sum(step for step in steps if step < 0)
        length = below + sum(step for step in steps if step > 0) + value.itemsize
        address = value.__array_interface__["data"][0] - below
        if value.nbytes * 2 <= length:
            self.sparse[address] = (id(value), value.nbytes)
        view = memory_at(address, length)
        self.keep.append(value)
        return (view if value.flags.writeable else view.toreadonly()), below

    # ---- PyTorch ----

    def _tensor(self, value: Any) -> Any:
        """As PyTorch does it, and with the gradient, which it leaves behind.

        The graph of one that was computed from others stays where it is. What arrives has the values, the name of the
        last operation and a gradient that it retained; ``backward`` through it says where the graph is.
        """
        if not value.is_leaf:
            plain = self._temporary(value.detach())
            if value.layout is sys.modules["torch"].strided and not value.is_quantized:
                made = rebuild.computed_tensor, (plain, rebuild.operation_of(value), value.retains_grad)
                attributes, grad = dict(vars(value)), value.grad if value.retains_grad else None
                if not attributes and grad is None:
                    return made
                return (*made, (attributes, grad, None, None), None, None, rebuild.set_tensor_parts)
            value = plain
        parts = dict(vars(value)), value.grad, *rebuild.hooks_of(value)
        is_whole = value.is_inference() or value.is_quantized
        if not is_whole and any(one is not None and one != {} for one in (parts[0], *parts[2:])):
            reduced = self._with_typed_storage(self._bare(value).__reduce_ex__(5))
            return (*reduced, parts, None, None, rebuild.set_tensor_parts)
        reduced = self._with_typed_storage(value.__reduce_ex__(5))
        if value.is_inference():
            return rebuild.inference_tensor, reduced[:2]
        if value.is_quantized:
            return rebuild.quantized_tensor, reduced[:2]
        if len(reduced) != 2 or not value.is_leaf or value.grad is None:
            return reduced
        return (*reduced, value.grad, None, None, rebuild.set_grad)

    def _with_typed_storage(self, reduced: Any) -> Any:
        """PyTorch reduces a tensor of a younger type (float8, uint16) to a call that only its own reader can make: it
        gives the storage without a type, and what is called wants one with a type."""
        torch = sys.modules["torch"]
        make, arguments, *more = reduced
        if make is not torch._utils._rebuild_tensor_v3 or type(arguments[0]) is not torch.UntypedStorage:
            return reduced
        storage = rebuild.torch_typed_storage(arguments[0], torch.uint8)
        self.keep.append(storage)
        return (make, (storage, *arguments[1:]), *more)

    def _bare(self, value: Any) -> Any:
        """A tensor on the same memory without hooks, which PyTorch leaves behind with a warning, and without
        attributes: it pickles these before the tensor, which they may hold."""
        plain = self._temporary(value.detach().requires_grad_(value.requires_grad))
        is_parameter = type(value) is not sys.modules["torch"].Tensor
        return self._temporary(type(value)(plain, value.requires_grad)) if is_parameter else plain

    def _temporary(self, value: Any) -> Any:
        self.keep.append(value)
        self.temporary.add(id(value))
        return value

    def _typed_storage(self, value: Any) -> Any:
        return rebuild.torch_typed_storage, (value._untyped_storage, value.dtype)

    def _storage(self, value: Any) -> Any:
        first = self._storages.setdefault(value._cdata, value)
        if first is not value:
            return rebuild.itself, (first,)
        device = str(value.device)
        if value.device.type != "cpu":
            if self.gpu == "refuse":
                raise ReductionRefused(f"memory on {device}")
            if devices_are_away():
                raise ReductionRefused(f"memory on {device}, which was taken before it could be read")
            value = value.cpu()
            self.keep.append(value)
        length = value.nbytes()
        view = memory_at(value.data_ptr(), length) if length else memoryview(b"")
        return rebuild.torch_storage, (lend(view), device)

    def _optimizer(self, value: Any) -> Any:
        """With all that it has: of itself it leaves its hooks behind, and the ``step`` that a scheduler of learning
        rates has given it to count by."""
        return rebuild.new_optimizer, (type(value),), dict(vars(value))

    def _parametrized(self, value: Any) -> Any:
        """A module of PyTorch some of whose tensors are computed from others. It has a class of its own, which refuses
        to be pickled and is made anew where the module arrives."""
        base: Any = type(value).__base__
        return rebuild.parametrized_module, (base, tuple(value.parametrizations)), base.__getstate__(value)

    def _image_draw(self, value: Any) -> Any:
        """What draws on an image of Pillow. Two parts of it, in C, look at the image's memory, and are made anew."""
        if value._image._im is not value.im:
            return NotImplemented  # the image was given other memory since, and this draws on the old
        state = {name: held for name, held in vars(value).items() if name not in rebuild.DRAWS_ON}
        return rebuild.image_draw, (value._image, value.mode), state

    def _image(self, value: Any) -> Any:
        """An image of Pillow, with what its own state leaves out: texts of its file, its type, its tables. One of
        several frames is opened again, at the frame where it stands."""
        frames = _frames_of(value)
        call, arguments, state, *more = value.__reduce_ex__(2)  # that may read the file
        if more != [None, None] or type(state) is not list:
            return NotImplemented
        known = rebuild.SAVED_WITH
        left = {name: held for name, held in vars(value).items() if type(held) in PLAIN_KINDS and name not in known}
        if frames == 1:
            return call, arguments, (state, left), None, None, rebuild.set_image
        file = value.filename
        if not isinstance(file, str | os.PathLike) or not os.path.isfile(file):
            raise ReductionRefused(f"an image of {frames} frames that is in no file")
        return rebuild.image_frame, (os.path.abspath(file), value.tell()), state, None, None, rebuild.set_frame

    def _hook_handle(self, value: Any) -> Any:
        """It knows its dicts by weak references; those that are gone it cannot restore itself."""
        extra = tuple(found for one in value.extra_dict_ref if (found := one()) is not None)
        state = value.hooks_dict_ref(), value.id, extra
        return copyreg.__newobj__, (type(value),), state, None, None, rebuild.set_hook_handle  # type: ignore[attr-defined]

    def _weak_proxy(self, value: Any) -> Any:
        """It hands on the question how it is pickled, so that its copy would be an object instead of a proxy."""
        raise ReductionRefused("a weak reference")

    def _groupby(self, value: Any) -> Any:
        """Python forgets within which group it is once the group's first item was taken, and would begin it again."""
        reduced = value.__reduce__()
        refers_to_more = len(gc.get_referents(value)) > 2  # than to its iterator and its key function
        if refers_to_more and len(reduced) == 2:
            raise ReductionRefused("an itertools.groupby that is within a group")
        return reduced

    def _weak_reference(self, value: Any) -> Any:
        """Of an optimizer: it is in the ``step`` that a scheduler gave it, so the optimizer goes with it."""
        found = value()
        is_optimizer = isinstance(found, sys.modules["torch"].optim.Optimizer) and value.__callback__ is None
        return (weakref.ref, (found,)) if is_optimizer else NotImplemented

    # ---- matplotlib ----

    def _plotted(self, value: Any) -> Any:
        """A figure is one unit, and an object of it is known by its number there."""
        figure = figures.figure_of(value)
        if figure is None:
            figure = next((one for one in self.figures.values() if one.number_of(value) is not None), None)
            figure = None if figure is None else figure.parts[0]
        if figure is None:
            return NotImplemented
        try:
            unit = figures.unit_of(figure, self.figures, self._rule_for)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise ReductionRefused(f"a figure that cannot be pickled ({error})") from error
        if value is figure:
            if unit not in self.units:
                self.units.append(unit)
                self.temporary.update(map(id, (unit.state, *unit.state)))
            return figures.figure, (type(value),), unit.state, None, None, figures.fill_figure
        number = unit.number_of(value)
        return NotImplemented if number is None else (figures.part_of, (figure, type(value), number))

    # ---- pandas ----

    def _pandas_frame(self, value: Any) -> Any:
        """The pickle of a frame or series holds ``_metadata``, a list of its class, so all frames would share it.
        Where it is the class' own it is left out, and is found there again. Attributes that a program gave it the
        pickle leaves out."""
        kind = type(value)
        state = {**attributes_of_frame(value), **value.__getstate__()}
        if state.get("_metadata") == kind._metadata:
            del state["_metadata"]
        return copyreg.__newobj__, (kind,), state  # type: ignore[attr-defined]

    def _pandas_index(self, value: Any) -> Any:
        """The labels in an index cannot change, so frames that were made of one another do not share them."""
        reduced = value.__reduce__()
        match reduced:
            case (_, (_, {"data": data}), *_) if type(data).__module__.startswith("pandas."):
                self.temporary.add(id(data))
        return reduced

    def _arrow_column(self, value: Any) -> Any:
        """pandas copies a column of Arrow's for each pickle, since a slice of one would bring the whole with it. Where
        it is whole it goes as it is, on memory that is told to be unchanged by where it lies."""
        chunks = value._pa_array.chunks
        if len(chunks) != 1 or chunks[0].get_total_buffer_size() > chunks[0].nbytes + ARROW_PADDING_BYTES:
            return NotImplemented
        self.columns.update(one.address for one in chunks[0].buffers() if one is not None)
        state = {**vars(value), "_pa_array": chunks[0], "_cache": {}}
        return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]

    def _pandas_block(self, value: Any) -> Any:
        """The values of a frame, apart from every other frame's.

        pandas lets frames share memory until one of them is written to, and remembers it in the process. A pickle
        forgets, so frames that were put together again on shared memory would change each other.
        """
        maker, (values, *rest) = value.__reduce__()
        numpy = sys.modules["numpy"]
        seen = id(values) in self._blocks
        self._blocks.add(id(values))
        if type(values) is not numpy.ndarray:
            return maker, (values.copy() if seen else values, *rest)
        own = values.copy() if values.dtype.hasobject and seen else values.view()
        self.keep.append(own)
        reduced = self._array(own)
        if reduced is NotImplemented:
            return maker, (own, *rest)
        buffer = reduced[1][0]
        self.private.add(id(buffer))
        self.keep.append(buffer)
        return maker, (_Made(reduced), *rest)


def _frames_of(image: Any) -> int:
    """Of an opened image of Pillow; one that is closed, or was not opened, has the one that it shows.

    To count them, some readers go through the file and read the present frame again: what was drawn on it would be
    lost. So where the image has not counted them yet, another image of the same file does.
    """
    has_counted = not hasattr(type(image), "n_frames") or vars(image).get("_n_frames") is not None
    file = getattr(image, "filename", None)
    try:
        opened = getattr(image, "fp", None) or getattr(image, "_fp", None)
        is_in_file = isinstance(file, str | os.PathLike) and os.path.isfile(file)
        if has_counted or not is_in_file or opened is None or opened.closed:
            return int(getattr(image, "n_frames", 1))
        with sys.modules["PIL.Image"].open(file) as another:
            return int(another.n_frames)
    except Exception:  # noqa: BLE001 - its file is closed or damaged
        return 1


def has_plain_state(kind: type) -> bool:
    """Whether a class has no say in how its instances are pickled and hashed."""
    own = ("__reduce_ex__", "__reduce__", "__getstate__")
    return (
        all(getattr(kind, name, None) is getattr(object, name, None) for name in own)
        and not any(hasattr(kind, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__"))
        and getattr(kind, "__hash__", None) in _BY_IDENTITY
        and kind.__module__ not in ("builtins", "copyreg")
    )


def core_made_by(kind: type) -> type | None:
    """Of a class with a ``__new__`` of the program's, or another method that pickle calls while it makes an instance:
    the type of Python's whose instance it is, if the class has no say in how that is pickled, so that contents and
    attributes are all there is to it."""
    core = _core_of(kind)
    above = kind.__mro__[: kind.__mro__.index(core)]
    called = _CALLED_BY_PICKLE.get(core, ("__new__",))
    makers = [one for one in above if not vars(one).keys().isdisjoint(called)]
    named = makers[-1] if makers and _is_named_tuple(makers[-1]) else core
    if core not in _CORES or not makers or any(one.__module__ not in MAINS for one in makers if one is not named):
        return None
    own = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")
    return core if all(getattr(kind, name, None) is getattr(named, name, None) for name in own) else None


def _core_of(kind: type) -> Any:
    return next(one for one in kind.__mro__ if not one.__flags__ & HEAP_TYPE)


def _is_named_tuple(kind: type) -> bool:
    """As ``collections.namedtuple`` makes them."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


_CALLED_BY_PICKLE: Final = {list: ("__new__", "append", "extend"), set: ("__new__", "__init__")}
_CORES: Final = frozenset({object, int, float, complex, str, bytes, tuple, frozenset, list, dict, set})
_WITHOUT_ATTRIBUTES: Final = (
    *(dt.datetime, dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath),
)
"""Values of Python's own of which pickle takes no attributes along."""
_BY_IDENTITY: Final[tuple[Any, ...]] = (object.__hash__, None)


def _parameters_of(kind: type) -> tuple[Any, Any] | None:
    """Of a model of pydantic that is a generic one with parameters, as ``Box[int]`` is: that one, and the parameters.
    Pydantic keeps those that it has made, so ``Box[int]`` is the same class wherever a program writes it; one that was
    put together by value would be another."""
    metadata = vars(kind).get("__pydantic_generic_metadata__")
    if not isinstance(metadata, dict) or metadata.get("origin") is None:
        return None
    return metadata["origin"], metadata["args"]


def _is_pickled_as(kind: type, base: type) -> bool:
    """Whether a class has no other say in that than its base."""
    return all(getattr(kind, name) is getattr(base, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__"))


def _is_made_by_init(kind: type[BaseException]) -> bool:
    """Whether a class of exceptions has an ``__init__`` of its own, which may want other arguments than those that it
    hands on to ``Exception``, and all that it sets is in the attributes and in ``args``."""
    in_c = next(one for one in kind.__mro__ if not one.__flags__ & HEAP_TYPE)
    return (
        isinstance(kind.__init__, types.FunctionType)
        and kind.__new__ is in_c.__new__
        and in_c.__basicsize__ == BaseException.__basicsize__
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


class FlatRoot:
    """A value, and the attributes of the objects in it: in the order in which these are met, each on its own."""

    def __init__(self, value: object, chain: list[tuple[Any, Any]]) -> None:
        self._value, self._chain = value, chain

    def __reduce__(self) -> Any:
        return rebuild.Flat, (self._value,), None, None, self._items()

    def _items(self) -> Iterator[tuple[Any, Any]]:
        """pickle asks for an item before it has taken the last one apart, in which there may be more: so it is given
        nothing now and then, and is asked again."""
        while True:
            if self._chain:
                yield self._chain.pop()
                continue
            yield None, None
            if not self._chain:
                return


def _whole(kind: type, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a class in their order, with those that are just what a base has: the base may change.

    cloudpickle leaves these out, and sorts. As it does, each name is a new string, so that the pickle of a class does
    not depend on which strings happen to be one object."""
    descriptors = types.GetSetDescriptorType | types.MemberDescriptorType
    own = {
        "".join(name): value
        for name, value in vars(kind).items()
        if name in attributes or not (name in _NOT_SENT or name.startswith("_abc_") or isinstance(value, descriptors))
    }
    return {**own, **{name: value for name, value in attributes.items() if name not in own or name == "_abc_impl"}}


_NOT_SENT: Final = frozenset({"__dict__", "__weakref__", "__annotate_func__", "__static_attributes__"})


def _methods_needed(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a class needs before its other attributes are put together, if objects of its own may be among these: its
    methods, where some of them run while an object is unpickled, numbers and texts that these may read, and what
    decorators such as ``dataclass`` noted."""
    if RUN_AT_LOADING.isdisjoint(own) or all(type(one) in _NO_OBJECTS for one in own.values()):
        return {}
    return {name: one for name, one in own.items() if type(one) in _NO_OBJECTS or _DUNDER.fullmatch(name)}


_DUNDER: Final = re.compile("__.*__")
_METHODS: Final = frozenset({types.FunctionType, staticmethod, classmethod, property})
_NO_OBJECTS: Final = _METHODS | {type(None), bool, int, float, complex, str, bytes, types.GenericAlias}


class _Made:
    """Stands for an object that was taken apart already."""

    __slots__ = ("_reduced",)

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


class _Behind:
    """Is compared with something, and so learns what that is."""

    found: Any = None

    def __eq__(self, other: object) -> bool:
        self.found = other
        return True

    __hash__ = None  # type: ignore[assignment]


def loaded(name: str) -> Any:
    """A module, if the program has it whole: another thread may be importing it just now."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def behind(proxy: Any) -> Any:
    """The mapping that a mapping proxy shows; it is not said otherwise."""
    probe = _Behind()
    return probe.found if proxy == probe and probe.found is not None else dict(proxy)


def attributes_of_frame(value: Any) -> dict[str, Any]:
    """What a program has set on a frame or series of pandas besides columns."""
    return {name: held for name, held in vars(value).items() if not name.startswith("_")}


def attributes_of_remembering(value: Any) -> dict[str, Any]:
    """Attributes of what ``functools.lru_cache`` made, less those that it gives itself."""
    return {name: held for name, held in vars(value).items() if name not in ("__wrapped__", "cache_parameters")}


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """Of a variable: its value, or nothing."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _is_bare(value: types.FunctionType, contents: Iterable[tuple[Any, ...]]) -> bool:
    """Whether a function has nothing of its own but its names and the variables around it. (Of a module in one of
    these cloudpickle looks at what the function uses of it.)"""
    if value.__defaults__ or value.__kwdefaults__ or value.__dict__ or value.__annotations__:
        return False
    return not any(isinstance(one[0], types.ModuleType) for one in contents if one)


def _is_named_like(value: types.FunctionType, other: types.FunctionType) -> bool:
    return (value.__name__, value.__qualname__, value.__module__, value.__doc__) == (
        *(other.__name__, other.__qualname__, other.__module__, other.__doc__),
    )


def owner_of(memory: Any) -> Any:
    """Whose memory an array or a view looks at, in the end."""
    numpy = loaded("numpy")
    while True:
        if isinstance(memory, memoryview):
            memory = memory.obj
        elif numpy is not None and isinstance(memory, numpy.ndarray) and memory.base is not None:
            memory = memory.base
        else:
            return memory


def has_named_objects(kind: type) -> bool:
    """Whether the library of a class has objects of it under names."""
    return bool(_of_modules(kind))


def named_in_library(value: Any) -> bool:
    """Whether an object is one of these: then it goes by its name."""
    module, name = _of_modules(type(value)).get(id(value), ("", ""))
    return bool(module) and vars(sys.modules.get(module, types)).get(name) is value


def _of_modules(kind: type) -> Mapping[int, tuple[str, str]]:
    """Objects of this class, by id, that the class' own library has under a name, in the module of the class or in a
    package around it."""
    home = kind.__module__
    if type(home) is not str or home in MAINS or home == "builtins" or not _is_installed(home.partition(".")[0]):
        return _NONE
    known = _known_of_modules.get(id(kind))
    if known is None or known[:2] != (kind, home):
        parts = home.split(".")
        known = kind, home, tuple(".".join(parts[:n]) for n in range(len(parts), 0, -1)), -1, _NONE
    found = [vars(one) for one in map(sys.modules.get, known[2]) if isinstance(one, types.ModuleType)]
    count = sum(map(len, found))
    if known[3] != count:
        named = {
            id(value): (str(names["__name__"]), name)
            for names in reversed(found)
            for name, value in list(names.items())
            if type(value) is kind
        }
        known = _known_of_modules[id(kind)] = (*known[:3], count, named)
    return known[4]


_NONE: Final[Mapping[int, tuple[str, str]]] = types.MappingProxyType({})
_known_of_modules: Final[dict[int, tuple[type, str, tuple[str, ...], int, Mapping[int, tuple[str, str]]]]] = {}
"""By the id of a class: it, the name of its module, names of that module and of the packages around it, how many names
these have, and what of the class is among these."""


@functools.cache
def _is_installed(library: str) -> bool:
    """Whether a module is Python's or was installed: of the program's own modules objects go by what they hold."""
    file = getattr(sys.modules.get(library), "__file__", None)
    paths = sysconfig.get_paths()
    folders = tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return file is None or file.startswith(folders) or "site-packages" in file or "dist-packages" in file


def _is_parametrized(torch: Any, kind: type) -> bool:
    """Whether PyTorch made the class for one module, when a tensor of that was first parametrized."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if not hasattr(parametrize, "_inject_new_class") or not issubclass(kind, torch.nn.Module):
        return False
    return getattr(vars(kind).get("__getstate__"), "__module__", None) == "torch.nn.utils.parametrize"
