"""Reads a list of people from a CSV file, and reports every fault by line. Pure.

The first line names the columns. ``name`` is needed and becomes the person's name; ``tenant`` is the tenant of the
line, where the list is not for one tenant; ``uid`` is the user of this machine, by number or login name, whom that
tenant is bound to. Other columns are left alone.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.studio.people import OWNER_TENANT, PEOPLE_MAX
from sublet.values import shown, valid_name

BYTES_MAX: Final = 4 << 20
NAME_MAX: Final = 63
UID_MAX: Final = (1 << 32) - 2
UNREADABLE_MAX: Final = 100
"""After so many lines that are no CSV no further one is read."""
NO_USERS: Final[Mapping[str, int]] = MappingProxyType({})
_SEPARATORS: Final = re.compile(r"[-._]")
_NO_NAME: Final = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Roster:
    """What a list says."""

    new: tuple[tuple[str, str], ...]
    """Name and tenant of each person who is to be added, in the order of the list."""
    known: tuple[str, ...]
    """Names of people who are there already."""
    left_alone: tuple[str, ...]
    """Columns that say nothing to a studio."""
    tenants: tuple[tuple[str, int | None], ...] = ()
    """Tenants that are to be made, each with the user that it is bound to, if any."""
    bound: tuple[tuple[str, int], ...] = ()
    """Tenants that are there and are to be bound to these users."""


class RosterRefused(InvalidRequest):
    """The list has lines that cannot be taken, so none was."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = tuple(lines)
        """One sentence for each line that is wrong, in the order of the list."""
        many = "1 line of the list is" if len(lines) == 1 else f"{len(lines)} lines of the list are"
        super().__init__(f"{many} wrong, and nothing was added", do="Correct the list and add it again.")


def read_roster(
    data: bytes,
    *,
    tenant: str | None,
    tenants: Collection[str],
    known: Mapping[str, str],
    skip_known: bool = False,
    make: bool = False,
    users: Mapping[str, int] = NO_USERS,
    number_of: Callable[[str], int | None] = lambda _: None,
) -> Roster:
    """The people of a list. ``tenant``: of all of them; None where the list has a column for it. ``tenants``: those
    that there are; with ``make`` others are to be made. ``users``: the user that a tenant is bound to already.
    ``number_of``: the number of a user by login name. ``known``: name → tenant of the people who are there; with
    ``skip_known`` they may be in the list. Raises ``InvalidRequest``, and ``RosterRefused`` where lines are wrong."""
    head, rows, unreadable = _rows(data)
    columns = [column.strip().lower() for column in head]
    wanted = ["name"] if tenant is not None else ["name", "tenant"]
    if [column for column in wanted if columns.count(column) != 1]:
        raise InvalidRequest(
            f"the first line of the list does not have one column {' and one column '.join(wanted)}: "
            f"{shown(', '.join(head))}",
            do="Let the first line name the columns, such as `name,tenant`; with --tenant, `name` is enough.",
        )
    if tenant is not None and "tenant" in columns:
        raise InvalidRequest("the list has a column tenant, and --tenant is given", do="Take one of them away.")
    if columns.count("uid") > 1 or (tenant is not None and "uid" in columns):
        raise InvalidRequest(
            "one tenant is bound to one user of the machine at most, and a list for one tenant to none",
            do="Let the list have a column tenant, and one column uid.",
        )
    lines = _Lines(tenants, known, make=make)
    bindings = _Bindings(users, number_of)
    wrong = {number: f"line {number}: it cannot be read: {why}" for number, why in unreadable.items()}
    new: list[tuple[str, str]] = []
    existing: list[str] = []
    for number, row in rows:
        if len(row) != len(columns):
            fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
            wrong[number] = f"line {number}: it has {fields} where the first line has {len(columns)}; is it cut off?"
            continue
        values = {column: value.strip() for column, value in zip(columns, row, strict=True)}
        name, whose = values["name"], values["tenant"] if tenant is None else tenant
        if why := lines.wrong(number, name, whose) or bindings.wrong(number, whose, values.get("uid", "")):
            wrong[number] = f"line {number}: {why}"
        elif name not in known:
            new.append((name, whose))
        elif skip_known and known[name] == whose:
            existing.append(name)
        else:
            wrong[number] = f"line {number}: there is a person {name} already, of tenant {known[name]}"
    if wrong:
        raise RosterRefused([wrong[number] for number in sorted(wrong)])
    if not rows:
        raise InvalidRequest("the list has no people in it", do="Give one line for each person below the first line.")
    if len(known) + len(new) > PEOPLE_MAX:
        raise InvalidRequest(
            f"the list has {len(new)} new people, and a studio has at most {PEOPLE_MAX}", do="Remove some first."
        )
    left_alone = tuple(column for column in columns if column not in ("name", "tenant", "uid"))
    missing = dict.fromkeys(whose for _, whose in new if whose not in tenants)
    bound = [(whose, uid) for whose, uid in bindings.found.items() if whose not in missing and whose not in users]
    made = tuple((whose, bindings.found.get(whose)) for whose in missing)
    return Roster(tuple(new), tuple(existing), left_alone, made, tuple(bound))


class _Lines:
    """The lines that were met, and what is wrong with one that comes after them."""

    def __init__(self, tenants: Collection[str], known: Mapping[str, str], *, make: bool) -> None:
        self._tenants, self._make = tenants, make
        self._known = {_sound(name): name for name in known}
        self._met: dict[str, tuple[int, str]] = {}

    def wrong(self, number: int, name: str, tenant: str) -> str:
        """One sentence; empty if nothing is wrong."""
        line, before = self._met.setdefault(_sound(name), (number, name))
        known = self._known.get(_sound(name), name)
        if why := _wrong_name(name):
            return why
        if not tenant:
            return "no tenant is named"
        if tenant not in self._tenants:
            if not self._make:
                return f"there is no tenant {shown(tenant)}"
            if why := _wrong_name(tenant, "tenant name"):
                return why
        if tenant == OWNER_TENANT:
            return f"tenant {tenant} is the owner's, and its person is not added by a list"
        if line != number:
            return (
                f"{name} is in line {line} already" if before == name else _mistaken(name, f"{before} of line {line}")
            )
        return _mistaken(name, f"{known}, who is there already") if known != name else ""


@dataclass
class _Bindings:
    """Which user of the machine each tenant is bound to, by the lines that were met."""

    users: Mapping[str, int]
    """As it is now."""
    number_of: Callable[[str], int | None]
    found: dict[str, int] = field(default_factory=dict)
    _lines: dict[int, tuple[int, str]] = field(default_factory=dict)

    def wrong(self, line: int, tenant: str, text: str) -> str:
        """One sentence; empty if nothing is wrong."""
        if not text:
            return ""
        uid = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else self.number_of(text)
        if uid is None or not 0 <= uid <= UID_MAX:
            return f"there is no user {shown(text)} on this machine"
        if uid == 0:
            return "root has the rights of the office's owner, and is no tenant's user"
        now = self.found.setdefault(tenant, self.users.get(tenant, uid))
        if now != uid:
            return f"tenant {tenant} is bound to user {now} already"
        before, other = self._lines.setdefault(uid, (line, tenant))
        if other != tenant:
            return f"user {uid} is that of tenant {other} in line {before}"
        taken = next((name for name, number in self.users.items() if number == uid and name != tenant), None)
        return f"user {uid} is that of tenant {taken} already" if taken is not None else ""


def _rows(data: bytes) -> tuple[list[str], list[tuple[int, list[str]]], dict[int, str]]:
    """The first line, each further one that is not empty with its number, and why others cannot be read."""
    if len(data) > BYTES_MAX:
        raise InvalidRequest(f"the list has more than {BYTES_MAX >> 20} MiB", do="Give the list of people alone.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(
            f"line {line} of the list is not UTF-8 (byte 0x{data[error.start]:02x})", do="Save the list as UTF-8."
        ) from None
    lines = list(io.StringIO(text, newline=""))
    delimiter = ";" if lines and ";" in lines[0] and "," not in lines[0] else ","
    found: list[tuple[int, list[str]]] = []
    unreadable: dict[int, str] = {}
    number = 1
    while number <= len(lines) and len(unreadable) < UNREADABLE_MAX:
        first = number
        reader = csv.reader(lines[first - 1 :], delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if any(value.strip() for value in row):
                    found.append((number, row))
                number = first + reader.line_num  # where the next row begins; a quoted value may span lines
        except csv.Error as error:
            if not found:
                raise InvalidRequest(
                    f"line {number} of the list cannot be read: {error}", do="Save it as CSV again."
                ) from None
            # A quotation mark that is not closed takes lines behind it; they are read for themselves.
            has_taken_others = first + reader.line_num - 1 > number or "unexpected end" in str(error)
            unreadable[number] = "a quotation mark is not closed" if has_taken_others else str(error)
            number += 1
    if not found:
        raise InvalidRequest("the list is empty", do="Let its first line name the columns, such as `name,tenant`.")
    return found[0][1], found[1:], unreadable


def _wrong_name(name: str, what: str = "person's name") -> str:
    try:
        valid_name(name, what)
    except InvalidRequest as error:
        better = _name_like(name)
        return f"{error.message}; {better} would be" if better else error.message
    return ""


def _mistaken(name: str, other: str) -> str:
    return f"{name} can be mistaken for {other}"


def _sound(name: str) -> str:
    """What people do not tell apart in a name: its separators, and its capitals."""
    return _SEPARATORS.sub("", name.casefold())


def _name_like(text: str) -> str:
    """A name that a studio takes, of what a person is called; empty where there is none."""
    plain = unicodedata.normalize("NFKD", text.replace("ß", "ss")).encode("ascii", "ignore").decode("ascii").lower()
    return _NO_NAME.sub("-", plain).strip("-._")[:NAME_MAX].strip("-._")
