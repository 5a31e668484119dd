"""Settings of Python and its standard library: folder, environment, ``sys``, logging, warnings, decimal and more."""

from __future__ import annotations

import contextlib
import importlib
import io
import locale
import logging
import os
import re
import site
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

from sublet.notebook.settings.setting import MAIN, Entries, Setting, SettingKind, call_of, nothing, single
from sublet.wire.cards import OF_CARDS

OF_THE_LEASE: Final = ("SUBLET_", *OF_CARDS, "NVIDIA_VISIBLE_DEVICES", "MPLBACKEND")
"""Variables that belong to a side: those of its lease, and its plotting backend."""
RECURSION_DEFAULT: Final = 1000


def of_python(is_notebook: bool) -> Iterable[Setting]:
    environment, search_path = _Environment(), _SearchPath(is_notebook=is_notebook)
    yield single("working folder", "`os.chdir`, `%cd`", _folder, os.chdir, kind=SettingKind.FILES, starts_alike=True)
    yield Setting(
        key="environment",
        about="`os.environ`, `%env`, with the time zone; not the lease's variables and not `MPLBACKEND`",
        read=environment.read,
        write=environment.write,
        kind=SettingKind.FILES,
        starts_alike=True,
        stored=("os.environ",),
    )
    yield single(
        "sys.path",
        "`sys.path`; the folders of each side's own installation stay",
        search_path.read,
        search_path.write,
        default=lambda: (STDLIB, SITE),
        kind=SettingKind.FILES,
        stored=("sys.path", "sys.path_importer_cache"),
        assigned=("sys:path",),
    )
    yield single(
        "sys.argv",
        "`sys.argv`, which `argparse` reads",
        lambda: list(sys.argv),
        lambda given: sys.argv.__setitem__(slice(None), given),
        default=list,
        stored=("sys.argv",),
        assigned=("sys:argv",),
    )
    yield single(
        "recursion limit",
        "`sys.setrecursionlimit`",
        sys.getrecursionlimit,
        sys.setrecursionlimit,
        default=lambda: RECURSION_DEFAULT,
    )
    yield single(
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
        default=nothing,
        stored=("logging.root", "logging.Logger.manager"),
    )
    yield single(
        "csv field limit",
        "`csv.field_size_limit`",
        call_of("csv.field_size_limit"),
        call_of("csv.field_size_limit"),
        module="csv",
    )
    yield single(
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
        kind=SettingKind.LOCAL,
    )
    reloaded = _Reloaded()
    yield Setting(
        key="reloaded modules",
        about="`importlib.reload` of modules of your own",
        read=reloaded.read,
        write=reloaded.write,
        default=nothing,
        kind=SettingKind.FILES,
        stored=("sys.modules",),
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
        """What the other side has named as well: it belongs to neither side alone."""
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


def of_warnings(is_notebook: bool) -> Iterable[Setting]:
    filters = _WarningFilters(is_notebook=is_notebook)
    yield single(
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
        current = [(_as_data(one), one) for one in warnings.filters]
        if self._own is None:
            inherited = self._known if self._is_notebook else frozenset()  # all of its filters go to a new device
            self._own = frozenset(data for data, _ in current if data is not None) - inherited
        news = frozenset(value)
        self._own -= news
        left = [(data, one) for data, one in current if data not in news]
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
            streams := tuple(data for handler in handlers if (data := stream_handler(handler)) is not None)
        ):
            found[name] = bool(one.propagate), streams
    return found


def stream_handler(handler: logging.Handler) -> StreamHandler | None:
    """None: it writes somewhere else, or is more than its stream and its format tell."""
    if type(handler) is not logging.StreamHandler or handler.filters:
        return None
    formatter: Any = handler.formatter or logging.Formatter()
    if type(formatter) is not logging.Formatter:  # as those of the many loggers of torch
        return None
    stream = next((name for name in ("stderr", "stdout") if handler.stream is getattr(sys, name)), "")
    style = _STYLES.get(type(formatter._style).__name__, "")
    if not stream or not style:
        return None
    return stream, handler.level, (formatter._fmt, formatter.datefmt, style)


def _set_stream_handlers(values: Entries, gone: tuple[str, ...]) -> None:
    for name, (hands_on, handlers) in {**values, **dict.fromkeys(gone, (True, ()))}.items():
        logger = logging.getLogger(None if name == "root" else name)
        logger.propagate = hands_on
        for handler in [one for one in logger.handlers if stream_handler(one) is not None]:
            logger.removeHandler(handler)
        for stream, level, (text, date, style) in handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            handler.setFormatter(logging.Formatter(text, date, style))
            logger.addHandler(handler)


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


class _Reloaded:
    """Modules of the notebook's own folders that were loaded again, and how often."""

    def __init__(self) -> None:
        self._installed: Callable[[str], bool] = lambda _: True
        self._count = 0
        self._specs: dict[str, tuple[object, int]] = {}
        self._others: dict[str, object] = {}
        """The specs of modules that are not of the notebook's own folders."""

    def read(self) -> Entries:
        if len(sys.modules) != self._count:
            self._refresh()
        found = {}
        for name, (spec, number) in list(self._specs.items()):
            now = getattr(sys.modules.get(name), "__spec__", None)
            if now is not spec and now is not None:
                self._specs[name] = now, number + 1
            if self._specs[name][1]:
                found[name] = self._specs[name][1]
        return found

    def _refresh(self) -> None:
        if not self._count:
            self._installed = _installed()
        self._count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name in self._specs or (spec is not None and self._others.get(name) is spec):
                continue
            origin = getattr(spec, "origin", None)
            self._others[name] = spec
            if name.startswith("sublet.") or spec is None or not isinstance(origin, str) or not origin.endswith(".py"):
                continue
            is_installed = self._installed(origin) or self._installed(os.path.dirname(origin))
            if not is_installed and name != MAIN:
                self._specs[name] = spec, 0
                del self._others[name]

    def write(self, values: Entries, gone: tuple[str, ...]) -> None:
        self.read()
        for name, number in values.items():
            module = sys.modules.get(name)
            if module is None:
                continue
            with contextlib.redirect_stdout(io.StringIO()):  # the other side has shown what it prints
                importlib.reload(module)
            self._specs[name] = module.__spec__, number
