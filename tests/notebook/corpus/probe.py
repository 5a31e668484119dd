"""Looks at a kernel after a cell: its names with a digest of each value, and the settings of the modules it loaded.

It is loaded into the notebook's kernel by its path and imports only what is loaded there already, runs no code of the
notebook's classes, draws no random number, and leaves nothing in the namespace. What is computed for a notebook with
``%%gpu`` is computed by the same lines as for the plain one.
"""

from __future__ import annotations

import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import hashlib
import json
import logging
import os
import pathlib
import random
import re
import sys
import types
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

__all__ = ["LIBRARIES", "look"]

SHELL_NAMES: Final = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open", "_oh", "_dh", "_sh", "_ih"))
"""What IPython keeps in the namespace for itself."""
RESULTS: Final = frozenset(("_", "__", "___"))
LIBRARIES: Final = ("numpy", "torch", "pandas", "matplotlib", "matplotlib.pyplot", "sklearn")
"""Libraries whose settings are looked at once they are loaded."""
BY_NAME: Final = (
    *("matplotlib", "mpl_toolkits", "IPython", "ipykernel", "traitlets", "threading", "asyncio", "logging", "weakref"),
    *(
        "ipywidgets",
        "tqdm",
        "contextvars",
        "itertools",
        "_thread",
        "unittest",
        "concurrent",
        "multiprocessing",
        "sqlite3",
    ),
)
"""Libraries whose objects are told by their type alone: what one sees of them is in the outputs."""
SAME_AS_TYPE: Final = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
ATOMS: Final = frozenset(SAME_AS_TYPE)
PLAIN: Final = (dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID)
NODES_MAX: Final = 500_000
"""Objects that are looked at of one value. A longer walk ends here, on both sides at the same place. A container of
nothing but numbers and texts counts as one, and all of it is looked at."""
LIBRARY_FILTERS: Final = re.compile(
    "SymPyDeprecationWarning|SpecialFunctionWarning|the matrix subclass|RankWarning|torch::jit::fuser|TracerWarning"
)
"""Filters of warnings that SymPy, SciPy, NumPy and PyTorch add when they or parts of them are imported. They come with
the import, on either side: where a warm interpreter had PyTorch loaded, its filters are the last and not the first."""
NOT_RESTORED: Final = "_deprecated_key_to_warnings"
"""Of scikit-learn's Bunch, whose ``__setstate__`` leaves its attributes out. It reads an absent one as an empty one."""
SHORT: Final = 2_000
"""Settings that are written longer than this are told by their digest."""
NOT_PART_OF_A_CLASS: Final = frozenset(
    (
        *("__dict__", "__weakref__", "__module__", "__firstlineno__", "__static_attributes__", "_abc_impl"),
        *("__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "_member_map_", "_member_names_"),
        *("_value2member_map_", "__annotations_cache__", "__annotate_func__", "__hash__", "__slotnames__"),
    )
)


# ------------------------------------------------------------------------------------------------------------- values


class Digest:
    """A hash over one value: walked without recursion, so a list of 100,000 linked nodes is no trouble."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=10)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """Objects made on the way: while they live, their ids are not used again."""
        self._nodes = 0
        self.trace: list[str] | None = None
        """Where it is wanted: all that was put into the hash, to be read."""

    def of(self, value: Any) -> str:
        todo = [value]
        while todo and self._nodes < NODES_MAX:
            self._nodes += 1
            todo.extend(reversed(self._step(todo.pop())))
        return self._hash.hexdigest()

    def _say(self, *words: object) -> None:
        self._hash.update(repr(words).encode("utf-8", "surrogatepass"))
        if self.trace is not None:
            self.trace.append(repr(words)[:SHORT])

    def _step(self, value: Any) -> list[Any]:
        """Put the object itself into the hash, and hand back its parts."""
        kind = type(value)
        if kind in SAME_AS_TYPE:
            self._say(kind.__name__, value)
            return []
        if kind is types.CodeType:  # a value: whether two functions share it makes no difference
            self._say("code", code_digest(value))
            return []
        # Tuples and pandas' indexes are values: no program changes them.
        if kind is not tuple and not str(kind.__module__).startswith("pandas.core.indexes"):
            if id(value) in self._seen:
                self._say("seen", self._seen[id(value)])
                return []
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
        self._say(type_name(value))
        if str(kind.__module__).startswith("sublet."):
            return []
        if isinstance(value, (int, float, str, bytes)):  # of a class of its own
            base = next(one for one in (int, float, str, bytes) if isinstance(value, one))
            self._say(base.__repr__(value))
        return self._parts(value, kind)

    def _parts(self, value: Any, kind: type) -> list[Any]:
        if isinstance(value, type):
            return self._of_class(value)
        if found := self._of_library(value, kind):
            return found[0]
        if isinstance(value, types.ModuleType):
            self._say(value.__name__)
            return []
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        match value:
            case types.MethodType():
                return [value.__self__, value.__func__]
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                self._say(value.__qualname__)
                return []
            case property():
                return [value.fget, value.fset, value.fdel]
            case staticmethod() | classmethod():
                return [value.__func__]
            case functools.partial():
                return [value.func, value.args, value.keywords]
            case re.Pattern():
                return [value.pattern, value.flags]
            case enum.Enum() if not isinstance(value, (int, str)):
                return [value.name]
            case bytearray() | memoryview() | array.array():
                return [bytes(value)]
            case pathlib.PurePath():
                return [os.fspath(value)]
            case _ if isinstance(value, PLAIN):
                return [str(value)]
            case range() | slice():
                return [value.start, value.stop, value.step]
            case _:
                pass
        if hasattr(kind, "cache_info") and hasattr(value, "__wrapped__"):
            return [value.__wrapped__]  # functools.lru_cache; what it has kept is not looked at
        return [*self._of_container(value), *self._of_object(value, kind)]

    def _of_container(self, value: Any) -> list[Any]:
        """Through the builtin type's own methods: a subclass may do anything in its own."""
        if isinstance(value, dict):
            self._say("dict", len(value))
            items = (
                collections.OrderedDict.items(value)
                if isinstance(value, collections.OrderedDict)
                else dict.items(value)
            )
            return self._unless_atoms([part for item in items for part in item])
        if isinstance(value, (list, tuple, collections.deque)):
            walked = list(type(value).__iter__(value) if isinstance(value, collections.deque) else _items(value))
            self._say("items", len(walked))
            return self._unless_atoms(walked)
        if isinstance(value, (set, frozenset)):
            members = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
            found = list(members)
            self._say("set", len(found))
            return self._unless_atoms(sorted(found, key=self._place_in_set))
        return []

    def _unless_atoms(self, parts: list[Any]) -> list[Any]:
        """The parts that are to be walked: none where all are atoms; those are put into the hash at once."""
        if not ATOMS.issuperset(map(type, parts)):
            return parts
        self._say(parts)
        return []

    def _place_in_set(self, member: Any) -> str:
        """A set has no order: its members are walked by what they are, not by where they lie in memory."""
        if type(member) in SAME_AS_TYPE:
            return f"{type(member).__name__} {member!r}"
        if isinstance(member, (tuple, frozenset)):
            return f"{type(member).__name__} {sorted(map(self._place_in_set, member))}"
        if id(member) in self._seen:
            return f" seen {self._seen[id(member)]:09}"
        own = getattr(member, "__dict__", None) or {}
        simple = sorted(f"{name} {one!r}" for name, one in own.items() if type(one) in SAME_AS_TYPE)
        return f"{type_name(member)} {getattr(member, '__qualname__', '')} {simple}"

    def _of_object(self, value: Any, kind: type) -> list[Any]:
        if str(kind.__module__).partition(".")[0] in BY_NAME:
            return []
        parts: list[Any] = []
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            items = [item for item in own.items() if item != (NOT_RESTORED, {})]
            parts += [part for item in sorted(items, key=lambda item: str(item[0])) for part in item]
        for name in _slots(kind):
            try:
                parts += [name, getattr(value, name)]
            except AttributeError:
                continue
        if kind.__module__ != "__main__" and not parts and not isinstance(value, (list, dict, tuple, set, frozenset)):
            parts = _reduced(value)
        return parts

    def _of_function(self, value: types.FunctionType) -> list[Any]:
        if value.__module__ != "__main__":
            self._say(value.__module__, value.__qualname__)
            return []
        cells = [_cell(one) for one in value.__closure__ or ()]
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, *cells, dict(vars(value))]

    def _of_class(self, value: type) -> list[Any]:
        self._say(value.__module__, value.__qualname__)
        if value.__module__ != "__main__":
            return []
        if isinstance(value, enum.EnumMeta):
            return [[(one.name, one._value_) for one in type.__getattribute__(value, "_member_map_").values()]]
        own = {name: one for name, one in vars(value).items() if name not in NOT_PART_OF_A_CLASS}
        own = {name: one for name, one in own.items() if not isinstance(one, (types.MemberDescriptorType,))}
        ordered = sorted(own)  # their order is looked at apart
        bases = [(one.__module__, one.__qualname__) for one in value.__bases__]
        return [bases, ordered, *(own[name] for name in ordered)]

    def _of_library(self, value: Any, kind: type) -> tuple[list[Any]] | None:
        for name, parts in (("numpy", _of_numpy), ("torch", _of_torch), ("pandas", _of_pandas)):
            if (library := sys.modules.get(name)) is not None:
                found = parts(library, value, kind)
                if found is not None:
                    return (found,)
        return None


def code_digest(code: types.CodeType) -> str:
    """Of a function's code, without the places of its lines."""
    consts = [code_digest(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    parts = (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return Digest().of([*parts, consts])


def _of_numpy(np: Any, value: Any, kind: type) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        shape = [str(value.dtype), value.shape]
        if str(kind.__module__).partition(".")[0] == "pandas":
            return None
        return [*shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.tobytes()]
    if isinstance(value, np.dtype):
        return [str(value)]
    if isinstance(value, np.random.Generator):
        return [value.bit_generator.state]
    if isinstance(value, np.random.RandomState):
        return [value.get_state(legacy=False)]
    if isinstance(value, np.ufunc):
        return [value.__name__]
    if isinstance(value, np.lib.npyio.NpzFile):  # its attribute f raises for any attribute, also __class__
        return [value.files]
    return None


def _numbers_of(torch: Any, value: Any) -> object:
    """As bytes; of an unusual kind of tensor as what its numbers can be had in."""
    if value.is_nested:
        return [_numbers_of(torch, part) for part in value.unbind()]
    if value.layout is torch.strided and (value.is_meta or not value.untyped_storage().nbytes()):
        return b""  # it has a shape, and no numbers
    if value.is_quantized:
        value = value.dequantize()
    flat = value if value.layout is torch.strided else value.to_dense()
    flat = flat.resolve_conj().resolve_neg()
    plain = flat.contiguous().reshape(-1).as_subclass(torch.Tensor)
    return bytes(plain.view(torch.uint8).numpy()) if flat.numel() else b""


def _of_torch(torch: Any, value: Any, kind: type) -> list[Any] | None:
    if not hasattr(torch, "Tensor"):  # it is being imported
        return None
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return ["its shape is not known yet"]
        found: list[Any] = [
            str(value.dtype),
            [value.size(0)] if value.is_nested else list(value.shape),
            str(value.device),
        ]
        found.append(_numbers_of(torch, value.detach()))
        # How it was computed is looked at apart: the graph behind a result stays in the process that computed it.
        return [*found, "leaf", value.grad] if value.is_leaf and value.requires_grad else found
    if isinstance(value, torch.optim.Optimizer):  # as it saves itself; the rest is notes to itself
        return [value.defaults, dict(value.state), value.param_groups]
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return [str(value)]
    return None


def _of_pandas(pd: Any, value: Any, kind: type) -> list[Any] | None:
    if not hasattr(pd, "DataFrame"):
        return None
    if isinstance(value, pd.DataFrame):
        columns = [_column(value.iloc[:, at]) for at in range(value.shape[1])]
        return [value.index, value.columns, *columns, dict(value.attrs)]
    if isinstance(value, pd.Series):
        return [value.name, value.index, *_column(value)]
    if isinstance(value, pd.Index):
        return [list(value.names), str(value.dtype), value.tolist()]
    if isinstance(value, pd.api.extensions.ExtensionArray):
        return [str(value.dtype), value.tolist()]
    if str(kind.__module__).startswith("pandas") and not isinstance(value, tuple):
        return [str(value)] if isinstance(value, (pd.Timestamp, pd.Timedelta, pd.Period)) else []
    return None


def _column(series: Any) -> list[Any]:
    values = series.to_numpy()
    return [str(series.dtype), values.tolist() if values.dtype.hasobject else values.tobytes()]


def _items(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _reduced(value: Any) -> list[Any]:
    """An object of a library without ``__dict__``, as pickle would take it apart."""
    try:
        found = value.__reduce_ex__(4)
    except Exception:  # then its type is all that can be told
        return []
    if not isinstance(found, tuple) or found[:2] in ((iter, ([],)), (iter, ((),))):
        return []  # an iterator that has come to its end keeps nothing, also not where it stood
    return [part for part in found[:3] if part is not None] + [list(part) for part in found[3:5] if part is not None]


def type_name(value: Any) -> str:
    """Its type; a remote value of Sublet's says only that it is one."""
    kind = type(value)
    return "remote value" if str(kind.__module__).startswith("sublet.") else f"{kind.__module__}.{kind.__qualname__}"


def names_of(space: dict[str, Any]) -> dict[str, list[str]]:
    """Of everything that the notebook defined: type, digest, the other name of the same object, and what is apart."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, value in list(space.items()):
        if name in SHELL_NAMES or re.fullmatch(r"_i{1,3}|_i?\d+", name) or name in RESULTS:
            continue
        if name.startswith("__") and name.endswith("__"):
            continue
        alias = "" if type(value) in SAME_AS_TYPE or type(value) is tuple else first.setdefault(id(value), name)
        found[name] = [type_name(value), Digest().of(value), "" if alias == name else alias, *_apart(value)]
    for number, value in dict(space.get("Out", {})).items():
        found[f"Out[{number}]"] = [type_name(value), "", "", "", ""]
    return found


def _apart(value: Any) -> tuple[str, str]:
    """What is compared under a key of its own: the order of a class's attributes, and how a tensor was computed."""
    if isinstance(value, type):
        return " ".join(one for one in vars(value) if not one.startswith("_")), ""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "Tensor") and isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return "", f"{type(value.grad_fn).__name__}{', retains its gradient' if value.retains_grad else ''}"
    return "", ""


# ----------------------------------------------------------------------------------------------------- module settings


def settings() -> dict[str, str]:
    """Key by key, in words that can be compared and read."""
    found: dict[str, object] = {
        "random: generator": Digest().of(random.getstate()),
        "decimal: context": repr(decimal.getcontext()),
        "warnings: filters": [one for one in map(_filter, warnings.filters) if not LIBRARY_FILTERS.search(one)],
        "logging: root level": logging.getLogger().level,
        "logging: disabled": logging.root.manager.disable,
        "sys: recursion limit": sys.getrecursionlimit(),
        "sys: path": list(sys.path),
        "os: working folder": os.getcwd(),
    }
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            found[f"logging: level of {name}"] = logger.level
    found |= {f"builtins: {name}": type_name(value) for name, value in vars(sys.modules["builtins"]).items()}
    found |= {f"os.environ: {name}": value for name, value in os.environ.items()}
    for name, read in READERS.items():
        if name in sys.modules:
            found |= {f"{name}: {key}": value for key, value in read(sys.modules[name]).items()}
    return {key: _short(value) for key, value in found.items()}


def _filter(one: tuple[Any, ...]) -> str:
    action, message, category, module, line = one
    said = (getattr(message, "pattern", message), category.__name__, getattr(module, "pattern", module), line)
    return f"{action} {said}"


def _of_ipython(_: Any) -> dict[str, object]:
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    found: dict[str, object] = {}
    if shell is not None:
        found["ast_node_interactivity"] = shell.ast_node_interactivity
        found["xmode"] = shell.InteractiveTB.mode
        text = shell.display_formatter.formatters["text/plain"]
        found["precision"] = text.float_format
        found["number of input transformers"] = len(shell.input_transformers_post)
        inline: Any = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
        is_there = inline is not None and inline.initialized()
        found["figure formats"] = sorted(inline.instance().figure_formats if is_there else {"png"})
    return found


def _of_numpy_settings(np: Any) -> dict[str, object]:
    return {
        "generator": Digest().of(np.random.get_state(legacy=False)),
        "errstate": np.geterr(),
        "print options": np.get_printoptions(),
    }


def _of_torch_settings(torch: Any) -> dict[str, object]:
    return {
        "generator": Digest().of(torch.get_rng_state()),
        "default dtype": torch.get_default_dtype(),
        "gradients on": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "print options": vars(torch._tensor_str.PRINT_OPTS),
    }


def _of_pandas_settings(_: Any) -> dict[str, object]:
    options = sys.modules["pandas._config.config"]._global_config
    return dict(_flat("", options))


def _flat(prefix: str, options: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _of_matplotlib_settings(matplotlib: Any) -> dict[str, object]:
    return {name: dict.__getitem__(matplotlib.rcParams, name) for name in matplotlib.rcParams if "backend" not in name}


def _of_sklearn_settings(sklearn: Any) -> dict[str, object]:
    return dict(sklearn.get_config())


READERS: Final[dict[str, Callable[[Any], dict[str, object]]]] = {
    "IPython": _of_ipython,
    "numpy": _of_numpy_settings,
    "torch": _of_torch_settings,
    "pandas": _of_pandas_settings,
    "matplotlib": _of_matplotlib_settings,
    "sklearn": _of_sklearn_settings,
}


def _short(value: object) -> str:
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", value if isinstance(value, str) else repr(value))
    return (
        text if len(text) <= SHORT else f"{text[:SHORT]}… {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    )


def look(space: dict[str, Any], path: str, load: Iterable[str] = (), trace: str = "") -> None:
    """Write down what is there now. ``load``: libraries to import first, so that their settings can be compared at the
    end of a notebook also where only the device's process had imported them. ``trace``: a name whose value is written
    down part by part."""
    import importlib

    for name in load:
        importlib.import_module(name)
    deep, level = sys.getrecursionlimit(), settings()
    found = {"names": names_of(space), "settings": level, "loaded": [one for one in LIBRARIES if one in sys.modules]}
    assert sys.getrecursionlimit() == deep
    if trace in space:
        walk = Digest()
        walk.trace = []
        walk.of(space[trace])
        found["trace"] = walk.trace
    pathlib.Path(path).write_text(json.dumps(found))
