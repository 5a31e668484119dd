"""Settings as an operator writes them: TOML tables whose keys are declared once. Pure: text in, values out.

A file is taken as a whole or refused as a whole, with the line of the mistake and the nearest key that there is.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from sublet.errors import InvalidRequest
from sublet.values import NS_PER_S, parse_duration_ns, parse_size, shown, valid_name

FILE_BYTES_MAX: Final = 64 * 1024


class SettingKey(Protocol):
    """One setting, of a table of the file."""

    @property
    def table(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str:
        """``table.name``."""


_K = TypeVar("_K", bound=SettingKey)
_V = TypeVar("_V")


def read_tables(
    text: str,
    name: str,
    keys: Mapping[str, _K],
    check: Callable[[_K, Any], _V],
    *,
    do: str,
    named: Sequence[str] = (),
) -> tuple[dict[str, _V], dict[str, int]]:
    """What a file sets, by path, and the line of each.

    ``keys`` are all that there are, by path; ``check`` makes a value of what stands there, or raises
    ``InvalidRequest``; ``do`` says how such a file is written. Raises ``InvalidRequest``, which names file and line.
    ``named`` are tables of which there may be many, each with a name, as ``[group.course]``. What they set has a path
    such as ``group/course/weight``, and the table itself a line under ``group/course``.
    """
    if len(text.encode("utf-8", "surrogateescape")) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{name} has more than {FILE_BYTES_MAX} bytes", do="Shorten it.")
    try:
        read = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{name} is not TOML: {error}", do=do) from error
    tables = tuple(dict.fromkeys(key.table for key in keys.values() if key.table not in named))
    given: dict[str, _V] = {}
    lines: dict[str, int] = {}
    where = _Lines(text)
    for path, value in _entries(read, tables, named):
        line = where.of(path)
        try:
            table = _named_table(path, named)
            if table:
                own = "/".join((*table, valid_name(path[len(table)], "name")))
                if len(path) == len(table) + 1:
                    if not isinstance(value, dict):
                        raise InvalidRequest(f"{shown('.'.join(path))} is no table", do=f"Write [{'.'.join(path)}].")
                    lines[own] = line
                    continue
                key = keys.get(".".join((*table, path[-1])))
                if key is None:
                    raise _unknown_key(".".join(table), path[-1], keys)
                given[f"{own}/{key.name}"] = check(key, value)
                lines[f"{own}/{key.name}"] = line
                continue
            if path[0] in {one.partition(".")[0] for one in named}:
                raise _unnamed(path, named, do)
            if len(path) == 1:
                raise _unknown_table(path[0], value, keys, tables, named, do)
            key = keys.get(".".join(path))
            if key is None:
                raise _unknown_key(path[0], path[1], keys)
            given[key.path] = check(key, value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}:{line}: {error.message}", do=error.do) from error
        lines[key.path] = line
    return given, lines


# ---- values


def whole_number(key: SettingKey, value: Any) -> int:
    """Of a key that counts something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key.path} = {shown(value)} is not a whole number", do=f"Write {key.name} = 4.")
    return value


def size_bytes(key: SettingKey, value: Any) -> int:
    """Of a key whose value is a text with a unit, ``"512MiB"``."""
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not a size", do=f'Write it with a unit: {key.name} = "512MiB".'
        )
    return parse_size(value, key.path)


def duration_s(key: SettingKey, value: Any) -> int:
    """Of a key whose value is a duration as a text, ``"30m"``."""
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not a duration", do=f'Write it with a unit: {key.name} = "30m".'
        )
    return parse_duration_ns(value, key.path) // NS_PER_S


def meant(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that names the nearest of these names; empty where none is near."""
    close = difflib.get_close_matches(name[:100].replace("-", "_").lower(), list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ---- within


def _entries(
    read: Mapping[str, Any], tables: tuple[str, ...], named: Sequence[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Whatever is set, and tables that are none of ours, empty or named."""
    for name, inside in read.items():
        at = (*path, name)
        table = ".".join(at)
        if table in named and isinstance(inside, dict):
            for own, below in inside.items():
                yield (*at, own), below
                yield from (((*at, own, key), value) for key, value in below.items()) if isinstance(below, dict) else ()
        elif isinstance(inside, dict) and any(one.startswith(f"{table}.") for one in named):
            yield from _entries(inside, (), named, at)
        elif path or not isinstance(inside, dict) or name not in tables:
            yield at, inside
        else:
            yield from (((name, key), value) for key, value in inside.items())


def _named_table(path: tuple[str, ...], named: Sequence[str]) -> tuple[str, ...]:
    """The named table to which a path belongs, without the name; empty: to none."""
    for one in named:
        table = tuple(one.split("."))
        if path[: len(table)] == table and len(table) < len(path):
            return table
    return ()


def _unnamed(path: tuple[str, ...], named: Sequence[str], do: str) -> InvalidRequest:
    text, all_of = ".".join(path), [one for one in named if one.partition(".")[0] == path[0]]
    if text in all_of or (len(path) == 1 and path[0] in all_of):
        return InvalidRequest(f"{text} is a table with a name", do=f"Write [{text}.NAME], and its keys below it.")
    listed = " and ".join(f"[{one}.NAME]" for one in all_of)
    return InvalidRequest(f"there is no table [{shown(text)}]{meant(text, all_of)}", do=f"There are {listed}.")


def _unknown_key(table: str, name: str, keys: Mapping[str, _K]) -> InvalidRequest:
    names = [known.name for known in keys.values() if known.table == table]
    return InvalidRequest(f"[{table}] has no key {shown(name)}{meant(name, names)}", do=f"It has {', '.join(names)}.")


def _unknown_table(
    name: str, value: Any, keys: Mapping[str, _K], tables: tuple[str, ...], named: Sequence[str], do: str
) -> InvalidRequest:
    if isinstance(value, dict):
        tops = (*tables, *dict.fromkeys(one.partition(".")[0] for one in named))
        listed = ", ".join((*(f"[{one}]" for one in tables), *(f"[{one}.NAME]" for one in named)))
        return InvalidRequest(f"there is no table [{shown(name)}]{meant(name, tops)}", do=f"There are {listed}.")
    if name in tables:
        return InvalidRequest(f"{name} is a table", do=f"Write [{name}], and its keys below it.")
    at = [known.table for known in keys.values() if known.name == name]
    names = [known.name for known in keys.values()]
    where = f"; it belongs below [{at[0]}]" if at else meant(name, names)
    return InvalidRequest(f"{shown(name)} stands outside of a table{where}", do=do)


class _Lines:
    """Which line sets a key: TOML's own reader does not say. Found by one walk over the lines that looks at nothing but
    what stands before the first equals sign, so a multi-line text can mislead it, and then the line is 0 or near by;
    no value of ours is one."""

    def __init__(self, text: str) -> None:
        self._at: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.split("\n"), start=1):
            stripped = line.strip()
            if header := _HEADER.match(stripped):
                table = _names(header[1])
                for length in range(1, len(table) + 1):
                    self._at.setdefault(table[:length], number)
            elif setting := _SETTING.match(stripped):
                path = (*table, *_names(setting[1]))
                for length in range(len(table) + 1, len(path) + 1):
                    self._at.setdefault(path[:length], number)

    def of(self, path: tuple[str, ...]) -> int:
        """1-based; that of the table, if the key itself is not seen; 0 if nothing is."""
        return self._at.get(path) or self._at.get(path[:-1], 0)


_NAME: Final = r"""(?:[^\s"'=.\[\]#]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED: Final = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER: Final = re.compile(rf"\[{{1,2}}\s*({_DOTTED})\s*\]")
_SETTING: Final = re.compile(rf"({_DOTTED})\s*=")


def _names(dotted: str) -> tuple[str, ...]:
    """The parts of a dotted key, without their quotation marks and escapes."""
    return tuple(_unquoted(part) for part in re.findall(_NAME, dotted))


def _unquoted(part: str) -> str:
    if part[:1] not in ('"', "'"):
        return part
    read: Callable[[str], dict[str, Any]] = tomllib.loads
    try:
        return next(iter(read(f"{part} = 0")))
    except (tomllib.TOMLDecodeError, ValueError):
        return part
