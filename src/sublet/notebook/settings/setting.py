"""One row of the table: a setting, and how its library reads and sets it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from sublet.lazy_dataclass import dataclass

Entries = Mapping[str, Any]
ALL: Final = ""
"""The one entry of a setting that is a single value."""
MAIN: Final = "__main__"


class SettingKind:
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
    kind: str = SettingKind.GLOBAL
    starts_alike: bool = False
    """A new device begins with what the notebook has at that moment."""
    stored: tuple[str, ...] = ()
    """Where the library keeps it: the only things outside of the notebook's own objects that a transfer changes."""
    assigned: tuple[str, ...] = ()
    """``library:attribute`` of assignments that this row carries, so that they are no replaced attributes."""


def single(
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


def nothing() -> Entries:
    return {}


def call_of(name: str) -> Callable[..., Any]:
    """The function of that name in a module, looked up when it is called."""
    module, _, function = name.rpartition(".")

    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(sys.modules[module], function)(*args, **keywords)

    return call
