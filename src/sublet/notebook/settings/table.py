"""The table of one side: its rows in order, with random generators and libraries' own entries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from sublet.notebook.random_state import (
    CudaGenerators,
    NumpyGenerator,
    read_python,
    read_torch,
    write_python,
    write_torch,
)
from sublet.notebook.settings.libraries import of_libraries
from sublet.notebook.settings.process import of_python, of_warnings
from sublet.notebook.settings.setting import Entries, Setting, SettingKind, single
from sublet.notebook.settings.shell import of_ipython

ENTRY_POINTS: Final = "sublet.settings"


def table(*, is_notebook: bool) -> tuple[Setting, ...]:
    """The rows of one side, in the order in which they are set."""
    settings = (*of_python(is_notebook), *of_libraries(), *of_ipython(), *library_settings())
    return (
        *settings,
        *of_warnings(is_notebook),
        *_generators(is_notebook),
    )  # a filter must not meet what a setter warns of


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
        yield single(
            key,
            about,
            get,
            put,
            module=module,
            kind=SettingKind.GENERATOR,
            stored=(stored,) if stored else (),
        )


_DECLARED: Final = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def library_settings(declared: Iterable[importlib.metadata.EntryPoint] = _DECLARED) -> Iterable[Setting]:
    """The rows that installed libraries add. Each is read when its library has been imported, and not before."""
    for one in declared:
        yield from (_of_library(one, kind) for kind in (SettingKind.GLOBAL, SettingKind.GENERATOR))


def _of_library(declared: importlib.metadata.EntryPoint, kind: str) -> Setting:
    attribute = "generators" if kind == SettingKind.GENERATOR else "settings"

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


def written(rows: Iterable[Setting]) -> frozenset[str]:
    """Everything outside of the notebook's own objects that setting these rows may change."""
    return frozenset(name for row in rows for name in row.stored) | {"sys.meta_path"}


def documented(rows: Iterable[Setting]) -> str:
    """The table for docs/notebook.md."""
    lines = ["| setting | what sets it |", "|---|---|"]
    return "\n".join([*lines, *(f"| {row.key} | {row.about} |" for row in rows)])
