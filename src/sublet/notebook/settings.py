"""The table of settings that notebook and device keep alike: what each is, and how its library reads and sets it.

One row for each setting. A row names the module it belongs to: nothing is read or set before that is imported. What a
row reads is plain data or something that can be pickled; what it writes goes through the library's own setter. The
rows of docs/notebook.md are compared with these by a test.

Libraries add rows of their own through the entry-point group ``sublet.settings``. The entry point's object has
``settings`` and ``generators``, or one of them: each maps a key to a pair of functions, one that returns the present
value and one that sets it. They are looked for when this module is imported, which warm interpreters have done.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import locale
import logging
import os
import re
import site
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sublet.notebook.on_demand import bring
from sublet.notebook.random_state import (
    CudaGenerators,
    NumpyGenerator,
    read_python,
    read_torch,
    write_python,
    write_torch,
)

__all__ = ["Kind", "Setting", "documented", "library_settings", "own_paths", "table", "written"]

Entries = Mapping[str, Any]
ENTRY_POINTS: Final = "sublet.settings"
ALL: Final = ""
"""The one entry of a setting that is a single value."""
OF_THE_LEASE: Final = ("SUBLET_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "MPLBACKEND")
"""Variables that belong to a side: those of its lease, and its plotting backend."""
RECURSION_DEFAULT: Final = 1000
TORCH_PRINT: Final = {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None}


class Kind:
    """When and where a setting is set."""

    GLOBAL: Final = "global"
    LOCAL: Final = "local"
    """It belongs to a thread or a context, and is set in that of the cell."""
    FILES: Final = "files"
    """It names files and folders: it is set before anything else, and not for a guest that does not see ours."""
    GENERATOR: Final = "generator"
    """The state of a random generator: it is set last, and always sent to a new device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row."""

    key: str
    about: str
    """For the docs."""
    read: Callable[[], Entries]
    """Its entries; a single value has one, named ``ALL``. The same object as before is known to be unchanged."""
    write: Callable[[Entries, tuple[str, ...]], object]
    """Set these entries and take those away."""
    module: str = ""
    """Empty: it is always there."""
    default: Callable[[], Entries] | None = None
    """What a fresh device has; None: what the notebook had when it was first looked at."""
    kind: str = Kind.GLOBAL
    starts_alike: bool = False
    """A new device begins with what the notebook has at that moment."""
    stored: tuple[str, ...] = ()
    """Where the library keeps it: the only things outside of the notebook's own objects that a transfer changes."""
    assigned: tuple[str, ...] = ()
    """``library:attribute`` of assignments that this row carries, so that they are no replaced attributes."""


def _value(
    key: str,
    about: str,
    get: Callable[[], Any],
    put: Callable[[Any], object],
    *,
    module: str = "",
    default: Callable[[], Any] | None = None,
    **more: Any,
) -> Setting:
    """A setting of one value. None is "not set": it is not written."""

    def read() -> Entries:
        found = get()
        return {} if found is None else {ALL: found}

    def write(values: Entries, gone: tuple[str, ...]) -> None:
        if ALL in values:
            put(values[ALL])

    first = None if default is None else lambda: {ALL: default()}
    return Setting(key=key, about=about, read=read, write=write, module=module, default=first, **more)


def _nothing() -> Entries:
    return {}


def table(*, is_notebook: bool) -> tuple[Setting, ...]:
    """The rows of one side, in the order in which they are set."""
    settings = (*_of_python(is_notebook), *_of_libraries(), *_of_ipython(), *library_settings())
    return (
        *settings,
        *_warnings(is_notebook),
        *_generators(is_notebook),
    )  # a filter must not meet what a setter warns of


# ------------------------------------------------------------------------------------------------- Python's own


def _of_python(is_notebook: bool) -> Iterable[Setting]:
    environment, search_path = _Environment(), _SearchPath(is_notebook=is_notebook)
    yield _value("working folder", "`os.chdir`, `%cd`", _folder, os.chdir, kind=Kind.FILES, starts_alike=True)
    yield Setting(
        key="environment",
        about="`os.environ`, `%env`, with the time zone; not the lease's variables and not `MPLBACKEND`",
        read=environment.read,
        write=environment.write,
        kind=Kind.FILES,
        starts_alike=True,
        stored=("os.environ",),
    )
    yield _value(
        "sys.path",
        "`sys.path`; the folders of each side's own installation stay",
        search_path.read,
        search_path.write,
        default=lambda: (STDLIB, SITE),
        kind=Kind.FILES,
        stored=("sys.path", "sys.path_importer_cache"),
        assigned=("sys:path",),
    )
    yield _value(
        "sys.argv",
        "`sys.argv`, which `argparse` reads",
        lambda: list(sys.argv),
        lambda given: sys.argv.__setitem__(slice(None), given),
        default=list,
        stored=("sys.argv",),
        assigned=("sys:argv",),
    )
    yield _value(
        "recursion limit",
        "`sys.setrecursionlimit`",
        sys.getrecursionlimit,
        sys.setrecursionlimit,
        default=lambda: RECURSION_DEFAULT,
    )
    yield _value(
        "digits of integers",
        "`sys.set_int_max_str_digits`",
        sys.get_int_max_str_digits,
        sys.set_int_max_str_digits,
        default=lambda: sys.int_info.default_max_str_digits,
    )
    yield Setting(
        key="logging",
        about="`setLevel` of loggers, `logging.disable`",
        read=_levels,
        write=_set_levels,
        default=lambda: {"root": logging.WARNING},
        stored=("logging.root", "logging.Logger.manager"),
    )
    yield Setting(
        key="logging output",
        about="`logging.basicConfig`, `addHandler` of a `StreamHandler`: what loggers write to stdout and stderr",
        read=_stream_handlers,
        write=_set_stream_handlers,
        default=_nothing,
        stored=("logging.root", "logging.Logger.manager"),
    )
    yield _value("csv field limit", "`csv.field_size_limit`", _call("csv.field_size_limit"), _field_limit, module="csv")
    yield _value(
        "locale",
        "`locale.setlocale`",
        lambda: sys.modules["locale"].setlocale(locale.LC_ALL),
        lambda given: locale.setlocale(locale.LC_ALL, given),
        module="locale",
    )
    yield Setting(
        key="decimal",
        about="`decimal.getcontext()`: precision, rounding, traps, flags, limits",
        read=_decimal,
        write=_set_decimal,
        module="decimal",
        default=lambda: _FRESH_DECIMAL,
        kind=Kind.LOCAL,
    )


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


class _Environment:
    """The environment, but what belongs to a side."""

    def __init__(self) -> None:
        self._raw: object = None
        self._entries: Entries = {}

    def read(self) -> Entries:
        raw: dict[Any, Any] = getattr(os.environ, "_data", {})  # 80 µs less than to decode it each time
        if not raw or raw != self._raw:
            self._raw = dict(raw)
            self._entries = {name: one for name, one in os.environ.items() if not name.startswith(OF_THE_LEASE)}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        os.environ.update({name: one for name, one in values.items() if not name.startswith(OF_THE_LEASE)})
        for name in gone:
            if not name.startswith(OF_THE_LEASE):
                os.environ.pop(name, None)
        if "TZ" in values or "TZ" in gone:
            time.tzset()


own_paths: Final[set[str]] = set()
"""Folders of ``sys.path`` that this side was given for itself (``--with``)."""
STDLIB: Final = "\0standard library"
SITE: Final = "\0installed packages"
"""Stand in a search path for the folders of a side's own installation."""


class _SearchPath:
    """``sys.path``, in which the folders of each side's own installation are only marked."""

    def __init__(self, *, is_notebook: bool) -> None:
        is_installed: Callable[[str], bool] = _installed() if is_notebook else set(_texts(sys.path)).__contains__
        self._is_installed = is_installed
        self._shared: set[str] = set()
        """What the other side has named as well: it is nobody's own."""
        self._was: list[str] = []
        self._value: tuple[str, ...] = ()

    def read(self) -> tuple[str, ...]:
        if sys.path != self._was:
            marked = [self._mark(one) for one in _texts(sys.path) if one not in own_paths]
            self._value = tuple(
                one for n, one in enumerate(marked) if one not in (STDLIB, SITE) or one not in marked[:n]
            )
            self._was = list(sys.path)
        return self._value

    def _is_own(self, folder: str) -> bool:
        return folder not in self._shared and self._is_installed(folder)

    def _mark(self, folder: str) -> str:
        if not self._is_own(folder):
            return folder
        return STDLIB if _is_of_the_library(folder) else SITE

    def write(self, value: tuple[str, ...]) -> None:
        self._shared.update(value)
        own: dict[str, list[str]] = {STDLIB: [], SITE: []}
        given = [one for one in _texts(sys.path) if one in own_paths]
        for one in _texts(sys.path):
            if one not in own_paths and self._is_own(one):
                own[self._mark(one)].append(one)
        found = [folder for one in value for folder in (own.pop(one, ()) if one in (STDLIB, SITE) else (one,))]
        found = [*given, *(one for one in found if one not in own_paths)]
        sys.path[:] = [*found, *(folder for left in own.values() for folder in left)]
        self._was = []
        importlib.invalidate_caches()


def _is_of_the_library(folder: str) -> bool:
    library = os.path.dirname(os.__file__)
    inside = folder.startswith(library) and "site-packages" not in folder and "dist-packages" not in folder
    return inside or os.path.basename(folder) == f"python{sys.version_info.major}{sys.version_info.minor}.zip"


def _texts(path: Iterable[object]) -> list[str]:
    return [one for one in path if isinstance(one, str)]


def _installed() -> Callable[[str], bool]:
    """Tells the folders that this interpreter has in ``sys.path`` by itself."""
    library = os.path.dirname(os.__file__)
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    name = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    own = {library, *sites, *(os.path.join(prefix, "lib", name) for prefix in (sys.prefix, sys.base_prefix))}
    for folder in sites:
        own.update(_listed_in(folder))
    below = (library + os.sep, *(one + os.sep for one in sites))
    return lambda one: one in own or one.startswith(below) or os.path.normpath(one) in own


def _listed_in(folder: str) -> Iterable[str]:
    """The folders that ``.pth`` files there add."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".pth")]
    except OSError:
        return
    for name in names:
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield os.path.normpath(os.path.join(folder, line.strip()))


def _warnings(is_notebook: bool) -> Iterable[Setting]:
    filters = _WarningFilters(is_notebook=is_notebook)
    yield _value(
        "warnings",
        "`warnings.filterwarnings`, `simplefilter`",
        filters.read,
        filters.write,
        default=tuple,
        stored=("warnings.filters",),
        assigned=("warnings:filters",),
    )


Filter = tuple[str, tuple[str, int] | None, tuple[str, str], tuple[str, int] | None, int]
"""Action, message as a pattern with its flags, module and name of the category, module as a pattern, line."""


class _WarningFilters:
    """``warnings.filters`` as data. A filter for a category of a module that is not imported here waits for it."""

    def __init__(self, *, is_notebook: bool) -> None:
        self._is_notebook = is_notebook
        self._was: list[Any] = []
        self._value: tuple[Filter, ...] = ()
        self._known: frozenset[Filter] = frozenset()
        """What both sides had when this side was last told."""
        self._own: frozenset[Filter] | None = None
        """What only this side had when it was first told: it stays."""
        self._waiting: tuple[Filter, ...] = ()

    def read(self) -> tuple[Filter, ...]:
        now: list[Any] = list(warnings.filters)
        if self._waiting and any(one[2][0] in sys.modules for one in self._waiting):
            self.write(self._value)
            now = list(warnings.filters)
        if now != self._was:
            self._was = now
            self._value = tuple(filter(None, map(_as_data, now))) + self._waiting
            self._known = frozenset(self._value)
        return self._value

    def write(self, value: tuple[Filter, ...]) -> None:
        here = [(_as_data(one), one) for one in warnings.filters]
        if self._own is None:
            told = self._known if self._is_notebook else frozenset()  # all of its filters go to a new device
            self._own = frozenset(data for data, _ in here if data is not None) - told
        news = frozenset(value)
        self._own -= news
        left = [(data, one) for data, one in here if data not in news]
        added = [one for data, one in left if data is None or (data not in self._known and data not in self._own)]
        kept = [one for data, one in left if data in self._own]
        found = [(data, _as_filter(data)) for data in value]
        self._waiting = tuple(data for data, one in found if one is None)
        warnings.resetwarnings()  # which makes Python look at the new ones
        warnings.filters.extend([*added, *(one for _, one in found if one is not None), *kept])  # type: ignore[attr-defined]
        self._was = list(warnings.filters)
        self._value = tuple(filter(None, map(_as_data, self._was))) + self._waiting
        self._known = frozenset(value)


def _as_data(one: Any) -> Filter | None:
    action, message, category, module, line = one
    if not isinstance(category, type):
        return None
    name = (category.__module__, category.__qualname__)
    if "__main__" in name or "<locals>" in category.__qualname__:
        return None
    return action, _pattern(message), name, _pattern(module), line


def _pattern(one: Any) -> tuple[str, int] | None:
    if one is None:
        return None
    return (one, -1) if isinstance(one, str) else (one.pattern, one.flags)


def _as_filter(data: Filter) -> Any:
    action, message, (module, name), where, line = data
    category: Any = sys.modules.get(module)
    for part in name.split("."):
        category = getattr(category, part, None)
    if not isinstance(category, type):
        return None
    return action, _compiled(message), category, _compiled(where), line


def _compiled(one: tuple[str, int] | None) -> Any:
    if one is None:
        return None
    return one[0] if one[1] < 0 else re.compile(one[0], one[1] & ~re.UNICODE)


DISABLED: Final = "\0disabled"


def _levels() -> Entries:
    loggers: dict[str, Any] = logging.root.manager.loggerDict.copy()
    found = {name: one.level for name, one in loggers.items() if type(one) is not logging.PlaceHolder and one.level}
    found["root"] = logging.root.level
    if logging.root.manager.disable:
        found[DISABLED] = logging.root.manager.disable
    return found


def _set_levels(values: Entries, gone: tuple[str, ...]) -> None:
    for name, level in {**values, **dict.fromkeys(gone, logging.NOTSET)}.items():
        if name == DISABLED:
            logging.disable(level)
        else:
            logging.getLogger(None if name == "root" else name).setLevel(level)


StreamHandler = tuple[str, int, tuple[str | None, str | None, str]]
"""The name of a stream in ``sys``, a level, and a format: of messages, of dates, and its style."""
_STYLES: Final = {"PercentStyle": "%", "StrFormatStyle": "{", "StringTemplateStyle": "$"}


def _stream_handlers() -> Entries:
    """Of each logger that has some; of others than the root also whether it hands records on."""
    loggers: dict[str, Any] = {"root": logging.root, **logging.root.manager.loggerDict}
    found = {}
    for name, one in loggers.items():
        if (handlers := getattr(one, "handlers", ())) and (
            said := tuple(data for handler in handlers if (data := _handler_data(handler)) is not None)
        ):
            found[name] = bool(one.propagate), said
    return found


def _handler_data(handler: logging.Handler) -> StreamHandler | None:
    """None: it writes somewhere else, or is more than its stream and its format tell."""
    if type(handler) is not logging.StreamHandler or handler.filters:
        return None
    stream = next((name for name in ("stderr", "stdout") if handler.stream is getattr(sys, name)), "")
    formatter: Any = handler.formatter or logging.Formatter()
    style = _STYLES.get(type(formatter._style).__name__, "")
    if not stream or not style or type(formatter) is not logging.Formatter:
        return None
    return stream, handler.level, (formatter._fmt, formatter.datefmt, style)


def _set_stream_handlers(values: Entries, gone: tuple[str, ...]) -> None:
    for name, (hands_on, handlers) in {**values, **dict.fromkeys(gone, (True, ()))}.items():
        logger = logging.getLogger(None if name == "root" else name)
        logger.propagate = hands_on
        for handler in [one for one in logger.handlers if _handler_data(one) is not None]:
            logger.removeHandler(handler)
        for stream, level, (text, date, style) in handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            handler.setFormatter(logging.Formatter(text, date, style))
            logger.addHandler(handler)


def _field_limit(given: int) -> None:
    sys.modules["csv"].field_size_limit(given)


_FRESH_DECIMAL: Final[Entries] = {
    "prec": 28,
    "rounding": "ROUND_HALF_EVEN",
    "Emin": -999999,
    "Emax": 999999,
    "capitals": 1,
    "clamp": 0,
    "traps": ("DivisionByZero", "InvalidOperation", "Overflow"),
    "flags": (),
}
_DECIMAL_SIGNALS: Final = ("traps", "flags")
"""Parts of a decimal context that map each signal to whether it is on."""


def _decimal() -> Entries:
    decimal = sys.modules["decimal"]
    context = decimal.getcontext()
    found = {name: getattr(context, name) for name in _FRESH_DECIMAL if name not in _DECIMAL_SIGNALS}
    for name in _DECIMAL_SIGNALS:
        found[name] = tuple(sorted(one.__name__ for one, is_on in getattr(context, name).items() if is_on))
    return found


def _set_decimal(values: Entries, gone: tuple[str, ...]) -> None:
    decimal = sys.modules["decimal"]
    context = decimal.getcontext()
    for name, value in values.items():
        if name in _DECIMAL_SIGNALS:
            signals = getattr(context, name)
            for signal in signals:
                signals[signal] = signal.__name__ in value
        else:
            setattr(context, name, value)


# ------------------------------------------------------------------------------------------------ of libraries


def _call(name: str) -> Callable[..., Any]:
    """The function of that name in a module, looked up when it is called."""
    module, _, function = name.rpartition(".")

    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(sys.modules[module], function)(*args, **keywords)

    return call


def _of_libraries() -> Iterable[Setting]:
    torch = "torch"
    yield _value(
        "torch default dtype",
        "`torch.set_default_dtype`",
        lambda: str(sys.modules[torch].get_default_dtype()).removeprefix("torch."),
        lambda name: sys.modules[torch].set_default_dtype(getattr(sys.modules[torch], name)),
        module=torch,
        default=lambda: "float32",
    )
    yield _value(
        "torch gradients",
        "`torch.set_grad_enabled`",
        _call("torch.is_grad_enabled"),
        _call("torch.set_grad_enabled"),
        module=torch,
        default=lambda: True,
        kind=Kind.LOCAL,
    )
    yield _value(
        "torch anomaly detection",
        "`torch.autograd.set_detect_anomaly`",
        lambda: (torch_module().is_anomaly_enabled(), torch_module().is_anomaly_check_nan_enabled()),
        lambda both: torch_module().autograd.set_detect_anomaly(both[0], check_nan=both[1]),
        module=torch,
        default=lambda: (False, True),
    )
    yield _value(
        "torch determinism",
        "`torch.use_deterministic_algorithms`",
        lambda: (
            torch_module().are_deterministic_algorithms_enabled(),
            torch_module().is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda both: torch_module().use_deterministic_algorithms(both[0], warn_only=both[1]),
        module=torch,
        default=lambda: (False, False),
    )
    cudnn = ("deterministic", "benchmark")
    yield Setting(
        key="torch cudnn",
        about="`torch.backends.cudnn.deterministic`, `benchmark`",
        read=lambda: {name: getattr(torch_module().backends.cudnn, name) for name in cudnn},
        write=_set_cudnn,
        module=torch,
        default=lambda: dict.fromkeys(cudnn, False),
        assigned=tuple(f"torch:{name}" for name in cudnn),
    )
    yield _value(
        "torch matmul precision",
        "`torch.set_float32_matmul_precision`",
        _call("torch.get_float32_matmul_precision"),
        _call("torch.set_float32_matmul_precision"),
        module=torch,
        default=lambda: "highest",
    )
    yield _value(
        "torch threads",
        "`torch.set_num_threads`",
        _call("torch.get_num_threads"),
        _call("torch.set_num_threads"),
        module=torch,
    )
    yield Setting(
        key="torch print options",
        about="`torch.set_printoptions`",
        read=_torch_print,
        write=lambda values, gone: torch_module().set_printoptions(**{**_torch_print(), **values}),
        module=torch,
        default=lambda: TORCH_PRINT,
        stored=("torch._tensor_str.PRINT_OPTS",),
    )
    yield _value(
        "torch hooks",
        "the number of the next hook: a hook never takes the place of one that was added on the other side",
        lambda: torch_module().utils.hooks.RemovableHandle.next_id,
        lambda given: setattr(torch_module().utils.hooks.RemovableHandle, "next_id", given),
        module=torch,
        default=lambda: 0,
        stored=("torch.utils.hooks.RemovableHandle",),
    )
    yield Setting(
        key="NumPy errors",
        about="`numpy.seterr`",
        read=_call("numpy.geterr"),
        write=lambda values, gone: sys.modules["numpy"].seterr(**values),
        module="numpy",
        default=lambda: {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
        kind=Kind.LOCAL,
    )
    yield Setting(
        key="NumPy print options",
        about="`numpy.set_printoptions`",
        read=_call("numpy.get_printoptions"),
        write=_set_numpy_print,
        module="numpy",
        default=lambda: _FRESH_NUMPY_PRINT,
        kind=Kind.LOCAL,
    )
    reloaded = _Reloaded()
    yield Setting(
        key="reloaded modules",
        about="`importlib.reload` of modules of your own",
        read=reloaded.read,
        write=reloaded.write,
        default=_nothing,
        kind=Kind.FILES,
        stored=("sys.modules",),
    )
    accessors = _Accessors()
    yield Setting(
        key="pandas accessors",
        about="`register_dataframe_accessor` and its like, of a class that has a name in the notebook",
        read=accessors.read,
        write=accessors.write,
        module="pandas",
        default=_nothing,
        stored=tuple(f"pandas.{kind}" for kind in PANDAS_KINDS),
    )
    yield _value(
        "tqdm of pandas",
        "`tqdm.pandas()`",
        _tqdm_of_pandas,
        _set_tqdm_of_pandas,
        module="pandas",
        default=lambda: None,
        stored=tuple(f"pandas.{kind}" for kind in PANDAS_KINDS),
    )
    pandas = _PandasOptions()
    yield Setting(
        key="pandas options",
        about="`pandas.set_option`, `pandas.options`",
        read=pandas.read,
        write=pandas.write,
        module="pandas",
        default=pandas.default,
        stored=("pandas._config.config._global_config",),
    )
    parameters = _RcParams()
    yield Setting(
        key="matplotlib parameters",
        about="`rcParams`, `plt.rc`, `plt.style.use`; not the backend",
        read=parameters.read,
        write=parameters.write,
        module="matplotlib",
        default=parameters.default,
        stored=("matplotlib.rcParams",),
        assigned=("matplotlib:rcParams",),
    )
    yield Setting(
        key="scikit-learn",
        about="`sklearn.set_config`",
        read=_call("sklearn.get_config"),
        write=lambda values, gone: sys.modules["sklearn"].set_config(**values),
        module="sklearn",
        default=lambda: _FRESH_SKLEARN,
        kind=Kind.LOCAL,
    )


def torch_module() -> Any:
    """torch, which is imported."""
    return sys.modules["torch"]


def _set_cudnn(values: Entries, gone: tuple[str, ...]) -> None:
    for name, value in values.items():
        setattr(torch_module().backends.cudnn, name, value)


def _torch_print() -> Entries:
    options = sys.modules["torch._tensor_str"].PRINT_OPTS  # torch has no public way to read them
    return {name: getattr(options, name) for name in TORCH_PRINT}


def _set_numpy_print(values: Entries, gone: tuple[str, ...]) -> None:
    sys.modules["numpy"].set_printoptions(**values)


_FRESH_NUMPY_PRINT: Final[Entries] = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
    "legacy": False,
}
_FRESH_SKLEARN: Final[Entries] = {
    "assume_finite": False,
    "working_memory": 1024,
    "print_changed_only": True,
    "display": "diagram",
    "pairwise_dist_chunk_size": 256,
    "enable_cython_pairwise_dist": True,
    "array_api_dispatch": False,
    "transform_output": "default",
    "enable_metadata_routing": False,
    "skip_parameter_validation": False,
}


class _PandasOptions:
    """Every option, by its full name."""

    def __init__(self) -> None:
        self._was: Any = None
        self._entries: Entries = {}

    def read(self) -> Entries:
        now = sys.modules["pandas"].options.d
        if now != self._was:
            self._entries = _flat(now)
            self._was = {group: _copied(one) for group, one in now.items()}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        for name, value in values.items():
            sys.modules["pandas"].set_option(name, value)

    def default(self) -> Entries:
        known = getattr(sys.modules.get("pandas._config.config"), "_registered_options", {})
        return {name: known[name].defval if name in known else one for name, one in self.read().items()}


PANDAS_KINDS: Final = ("DataFrame", "Series", "Index")
MAIN: Final = "__main__"


class ByName:
    """Accessor of pandas: the class that the notebook has under a name, which is looked up when it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: Any) -> Any:
        return self._found()(data)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._found(), attribute)

    def _found(self) -> Any:
        bring(self.name)
        try:
            return getattr(sys.modules[MAIN], self.name)
        except AttributeError:  # pandas would take it for a column that is not there
            raise RuntimeError(
                f"this accessor of pandas is {self.name} of the notebook, which the cell does not have: "
                f"name {self.name} in the cell, or give it with --in"
            ) from None


class _Accessors:
    """Accessors that the notebook's own classes are, by the name of the class; those of libraries come with them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, int]] = {}
        """What was registered, and how often that was another."""

    def read(self) -> Entries:
        pandas, main = sys.modules["pandas"], vars(sys.modules[MAIN])
        found: dict[str, Any] = {}
        for kind in PANDAS_KINDS:
            owner = getattr(pandas, kind)
            for name in owner._accessors:
                accessor = getattr(vars(owner).get(name), "_accessor", None)
                made = accessor.name if type(accessor) is ByName else _own_name(accessor, main)
                if not made:
                    continue
                key = f"{kind}.{name}"
                before, number = self._known.get(key, (None, 0))
                if before is not accessor:
                    self._known[key] = accessor, number + 1
                found[key] = made, self._known[key][1]
        return found

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        pandas: Any = sys.modules["pandas"]
        for key, (made, number) in values.items():
            kind, name = key.split(".")
            with warnings.catch_warnings():  # of one that takes the place of another
                warnings.simplefilter("ignore")
                register = getattr(pandas.api.extensions, f"register_{kind.lower()}_accessor")
                self._known[key] = register(name)(ByName(made)), number
        for key in gone:
            kind, name = key.split(".")
            owner = getattr(pandas, kind)
            if name in vars(owner):
                delattr(owner, name)
            owner._accessors.discard(name)


def _own_name(made: Any, main: Mapping[str, Any]) -> str:
    """Of a class or function of the notebook, if that is what it has under that name."""
    name = getattr(made, "__name__", "") if getattr(made, "__module__", None) == MAIN else ""
    return name if name and main.get(name) is made else ""


def _tqdm_of_pandas() -> Any:
    """The kind of progress bar of ``DataFrame.progress_apply``, and its arguments; None: there is none."""
    added = vars(sys.modules["pandas"].DataFrame).get("progress_apply")
    if added is None:
        return None
    held = inspect.getclosurevars(added).nonlocals
    kind = held.get("cls")
    if not isinstance(kind, type) or kind.__module__ == MAIN:
        return None
    return kind.__module__, kind.__qualname__, dict(held.get("tqdm_kwargs", {}))


def _set_tqdm_of_pandas(value: tuple[str, str, dict[str, Any]]) -> None:
    module, name, given = value
    getattr(importlib.import_module(module), name).pandas(**given)


class _Reloaded:
    """Modules of the notebook's own folders that were loaded again, and how often."""

    def __init__(self) -> None:
        self._installed: Callable[[str], bool] = lambda _: True
        self._count = 0
        self._specs: dict[str, tuple[object, int]] = {}

    def read(self) -> Entries:
        if len(sys.modules) != self._count:
            self._look()
        found = {}
        for name, (spec, number) in list(self._specs.items()):
            now = getattr(sys.modules.get(name), "__spec__", None)
            if now is not spec and now is not None:
                self._specs[name] = now, number + 1
            if self._specs[name][1]:
                found[name] = self._specs[name][1]
        return found

    def _look(self) -> None:
        if not self._count:
            self._installed = _installed()
        self._count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            origin = getattr(spec, "origin", None)
            if (
                name in self._specs
                or name.startswith("sublet.")
                or spec is None
                or not isinstance(origin, str)
                or not origin.endswith(".py")
            ):
                continue
            if not self._installed(os.path.dirname(origin)) and name != MAIN:
                self._specs[name] = spec, 0

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        self.read()
        for name, number in values.items():
            module = sys.modules.get(name)
            if module is None:
                continue
            with contextlib.redirect_stdout(io.StringIO()):  # the other side has shown what it prints
                importlib.reload(module)
            self._specs[name] = module.__spec__, number


def _flat(options: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in options.items():
        if isinstance(one, dict):
            found |= _flat(one, f"{before}{name}.")
        else:
            found[before + name] = one
    return found


def _copied(options: Any) -> Any:
    return {name: _copied(one) for name, one in options.items()} if isinstance(options, dict) else options


class _RcParams:
    """Of 340 parameters some are lists, which can be changed in place: those are compared with copies."""

    OF_THE_SIDE: Final = frozenset({"backend", "backend_fallback", "interactive", "webagg.address", "webagg.port"})

    def __init__(self) -> None:
        self._was: dict[str, Any] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._entries: Entries = {}

    def read(self) -> Entries:
        parameters: Any = sys.modules["matplotlib"].rcParams
        is_same = dict.__eq__(parameters, self._was)
        if is_same is not True or any(one != copy for one, copy in self._lists):
            self._was = dict(dict.items(parameters))
            self._lists = [(one, list(one)) for one in self._was.values() if type(one) is list]
            self._entries = {name: _own(one) for name, one in self._was.items() if name not in self.OF_THE_SIDE}
        return self._entries

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        parameters: Any = sys.modules["matplotlib"].rcParams
        with (
            warnings.catch_warnings()
        ):  # of parameters that are deprecated and have been set by the program all the same
            warnings.simplefilter("ignore")
            for name, value in values.items():
                if name not in self.OF_THE_SIDE:
                    parameters[name] = value

    def default(self) -> Entries:
        found: Any = getattr(sys.modules["matplotlib"], "rcParamsOrig", None)
        if found is None:
            return self.read()
        return {name: _own(one) for name, one in dict.items(found) if name not in self.OF_THE_SIDE}


def _own(one: Any) -> Any:
    return list(one) if type(one) is list else one


# ------------------------------------------------------------------------------------------------- of IPython


def _of_ipython() -> Iterable[Setting]:
    yield Setting(
        key="IPython display",
        about="`%precision`, `%pprint`, `%xmode`, `InteractiveShell.ast_node_interactivity`",
        read=_shell_settings,
        write=_set_shell_settings,
        module="IPython",
        default=lambda: _FRESH_SHELL,
        assigned=("IPython:ast_node_interactivity",),
    )
    yield Setting(
        key="inline figures",
        about="`%config InlineBackend.figure_format` and its `rc`, `close_figures`; `set_matplotlib_formats`",
        read=_inline_settings,
        write=_set_inline_settings,
        module="IPython",
        default=lambda: _FRESH_INLINE,
    )
    yield Setting(
        key="figures as images",
        about="the first figure that `pyplot` makes, `%matplotlib inline`",
        read=_figures_shown,
        write=_show_figures,
        module="matplotlib.figure",
        default=_nothing,
    )
    yield Setting(
        key="interactive figures",
        about="`plt.ion`, `plt.ioff`",
        read=_interactive,
        write=_set_interactive,
        module="matplotlib.pyplot",
        default=_nothing,
    )


_FRESH_SHELL: Final[Entries] = {
    "ast_node_interactivity": "last_expr",
    "sphinxify_docstring": False,
    "show_rewritten_input": True,
    "text.pprint": True,
    "text.max_width": 79,
    "text.max_seq_length": 1000,
    "text.verbose": False,
    "text.float_format": "%r",
    "xmode": "Context",
}
_FRESH_INLINE: Final[Entries] = {
    "figure_formats": ("png",),
    "rc": {},
    "print_figure_kwargs": {"bbox_inches": "tight"},
    "close_figures": True,
}
_INLINE: Final = ("rc", "print_figure_kwargs", "close_figures")


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython()


def _shell_settings() -> Entries:
    shell = _shell()
    if shell is None:
        return {}
    text = shell.display_formatter.formatters["text/plain"]
    found = {name: getattr(*_place_of(name, shell, text)) for name in _FRESH_SHELL if name != "xmode"}
    return found | {"xmode": shell.InteractiveTB.mode}


def _place_of(name: str, shell: Any, text: Any) -> tuple[Any, str]:
    return (text, name.removeprefix("text.")) if name.startswith("text.") else (shell, name)


def _set_shell_settings(values: Entries, gone: tuple[str, ...]) -> None:
    shell = _shell()
    if shell is None:
        return
    text = shell.display_formatter.formatters["text/plain"]
    for name, value in values.items():
        if name == "xmode":
            shell.InteractiveTB.set_mode(value)
        elif name == "text.float_format":
            _set_float_format(text, value)
        else:
            setattr(*_place_of(name, shell, text), value)


def _set_float_format(text: Any, value: str) -> None:
    """Not by ``%precision``, which sets NumPy's print options as well: they have a row of their own."""
    numpy: Any = sys.modules.get("numpy")
    options = None if numpy is None else numpy.get_printoptions()
    text.float_precision = value if value != "%r" else ""
    if options is not None:
        numpy.set_printoptions(precision=options["precision"])


def _inline_settings() -> Entries:
    """Of the backend's configuration; before there is one, what ``%config`` has noted for it."""
    shell = _shell()
    if shell is None:
        return {}
    backend = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    if backend is not None and backend.initialized():
        one = backend.instance()
        return {"figure_formats": _figure_formats(one), **{name: _own_dict(getattr(one, name)) for name in _INLINE}}
    noted = shell.config.get("InlineBackend", {})
    found = {**_FRESH_INLINE, **{name: noted[name] for name in _FRESH_INLINE if name in noted}}
    if noted.get("figure_format"):
        found["figure_formats"] = (noted["figure_format"],)
    return {**found, "figure_formats": tuple(sorted(found["figure_formats"]))}


def _own_dict(one: Any) -> Any:
    return dict(one) if isinstance(one, dict) else one


_FORMATS: Final = {"image/png": "png", "image/jpeg": "jpeg", "image/svg+xml": "svg", "application/pdf": "pdf"}


def _figure_formats(backend: Any) -> tuple[str, ...]:
    """Those that figures are shown in: ``set_matplotlib_formats`` changes them behind the back of the configuration."""
    figure, shell = getattr(sys.modules.get("matplotlib.figure"), "Figure", None), _shell()
    found = []
    if figure is not None and shell is not None:
        for mime, name in _FORMATS.items():
            printer = shell.display_formatter.formatters[mime].type_printers.get(figure)
            if printer is not None:
                called = getattr(getattr(printer, "func", printer), "__name__", "")
                found.append("retina" if called == "retina_figure" else name)
    return tuple(sorted(found or backend.figure_formats))


def _set_inline_settings(values: Entries, gone: tuple[str, ...]) -> None:
    """Until matplotlib is imported the backend knows no shell, and takes this up when it is."""
    shell = _shell()
    if shell is None:
        return
    backend = importlib.import_module("matplotlib_inline.config").InlineBackend.instance(parent=shell)
    for name in _INLINE:
        if name in values:
            setattr(backend, name, values[name])
    if "figure_formats" in values:
        backend.figure_formats = set(values["figure_formats"])
        if backend.shell is not None or _figures_shown():
            _select_formats(shell, backend)  # the formats may have been changed without the configuration


def _select_formats(shell: Any, backend: Any) -> None:
    select = importlib.import_module("IPython.core.pylabtools").select_figure_formats
    select(shell, backend.figure_formats, **backend.print_figure_kwargs)


def _figures_shown() -> Entries:
    """Whether the shell displays a figure as an image: it does so once the plotting backend has been activated."""
    figure, shell = getattr(sys.modules.get("matplotlib.figure"), "Figure", None), _shell()
    if figure is None or shell is None:
        return {}
    formatters = shell.display_formatter.formatters
    return {ALL: True} if any(figure in formatters[mime].type_printers for mime in _FORMATS) else {}


def _interactive() -> Entries:
    """Nothing before the plotting backend has been activated, which switches it on."""
    return {ALL: bool(sys.modules["matplotlib"].is_interactive())} if _figures_shown() else {}


def _set_interactive(values: Entries, gone: tuple[str, ...]) -> None:
    """The backend is activated before: its activation would switch it on again."""
    matplotlib: Any = sys.modules["matplotlib"]
    if not values or not hasattr(_shell(), "kernel"):
        return
    if "inline" in str(dict.get(matplotlib.rcParams, "backend", "")):
        importlib.import_module("matplotlib_inline.backend_inline")
    matplotlib.interactive(values[ALL])


def _show_figures(values: Entries, gone: tuple[str, ...]) -> None:
    """A figure that crossed is displayed as an image where ``pyplot`` has made none yet. Terminals show text."""
    shell = _shell()
    if values and hasattr(shell, "kernel") and not _figures_shown():
        _select_formats(shell, importlib.import_module("matplotlib_inline.config").InlineBackend.instance(parent=shell))


# ------------------------------------------------------------------------------------------- random generators


def _generators(is_notebook: bool) -> Iterable[Setting]:
    numpy, cuda = NumpyGenerator(), CudaGenerators(is_notebook=is_notebook)
    rows = (
        ("random", "`random.seed`", "", read_python, write_python, "random._inst"),
        ("numpy.random", "`numpy.random.seed`", "numpy.random", numpy.read, numpy.write, "numpy.random.mtrand._rand"),
        (
            "torch generator",
            "`torch.manual_seed`, on the CPU",
            "torch",
            read_torch,
            write_torch,
            "torch.default_generator",
        ),
        ("torch CUDA generators", "`torch.manual_seed`, `torch.cuda.manual_seed`", "torch", cuda.read, cuda.write, ""),
    )
    for key, about, module, get, put, stored in rows:
        yield _value(
            key,
            about,
            get,
            put,
            module=module,
            kind=Kind.GENERATOR,
            stored=(stored,) if stored else (),
        )


# ------------------------------------------------------------------------------------------- libraries' own rows

_DECLARED: Final = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def library_settings(declared: Iterable[importlib.metadata.EntryPoint] = _DECLARED) -> Iterable[Setting]:
    """The rows that installed libraries add. Each is read when its library has been imported, and not before."""
    for one in declared:
        yield from (_of_library(one, kind) for kind in (Kind.GLOBAL, Kind.GENERATOR))


def _of_library(declared: importlib.metadata.EntryPoint, kind: str) -> Setting:
    attribute = "generators" if kind == Kind.GENERATOR else "settings"

    def pairs() -> Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
        found: Any = getattr(declared.load(), attribute, {})
        return found if isinstance(found, Mapping) else {}

    def read() -> Entries:
        return {key: get() for key, (get, _) in pairs().items()}

    def write(values: Entries, gone: tuple[str, ...]) -> None:
        known = pairs()
        for key, value in values.items():
            if key in known:
                known[key][1](value)

    return Setting(
        key=f"{declared.name} {attribute}",
        about=f"declared by {declared.name}",
        read=read,
        write=write,
        module=declared.value.partition(":")[0].partition(".")[0],
        kind=kind,
    )


# --------------------------------------------------------------------------------------------------- the table


def written(rows: Iterable[Setting]) -> frozenset[str]:
    """Everything outside of the notebook's own objects that setting these rows may change."""
    return frozenset(name for row in rows for name in row.stored) | {"sys.meta_path"}


def documented(rows: Iterable[Setting]) -> str:
    """The table for docs/notebook.md."""
    lines = ["| setting | what sets it |", "|---|---|"]
    return "\n".join([*lines, *(f"| {row.key} | {row.about} |" for row in rows)])
