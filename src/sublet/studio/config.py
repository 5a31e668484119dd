"""The studio's settings: ``studio.toml`` in the state folder, or the file that ``--config`` names. Pure.

Each key is declared once, with its default, its range and what it means (``KEYS``); the documentation's table and the
commented example are compared with that. What does not depend on the socket is taken over without a restart.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from sublet import settings
from sublet.client.address import find_address
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.logs import LogFormat
from sublet.values import NS_PER_S, format_duration, shown, valid_name
from sublet.wire.unix import ADDRESS_BYTES_MAX

FILE: Final = "studio.toml"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
PORT: Final = 8320
HUB_API: Final = "/hub/api"
"""How the address of a JupyterHub's API ends."""
NAMES_MAX: Final = 1000
"""Entries in a table of names."""
Value: TypeAlias = "int | str | Mapping[str, str]"


class Unit(enum.StrEnum):
    """How the value of a key is written."""

    COUNT = "count"
    """A whole number."""
    SECONDS = "seconds"
    """A duration as a text, ``"12h"``."""
    ADDRESS = "address"
    """A loopback address and a port, ``"127.0.0.1:8320"``."""
    PATH = "path"
    """Where a file or a unix socket is; from / on, since the studio may be started anywhere."""
    LOG = "log"
    """How a log is written, ``"text"`` or ``"json"``."""
    HUB_API = "hub_api"
    """Where a JupyterHub answers its services, ``"http://127.0.0.1:8081/hub/api"``."""
    NAME = "name"
    """A name."""
    FLAG = "flag"
    """``true`` or ``false``."""
    NAMES = "names"
    """A table of names, ``{ "students" = "ml1" }``."""


class Key(NamedTuple):
    """One setting."""

    table: str
    name: str
    unit: Unit
    default: Value | None
    """In seconds or pieces; None: it is not set."""
    least: int
    most: int
    says: str
    restart: bool = False
    """It is read when the studio starts, and not again."""

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}"

    def shown(self, value: Value | None) -> str:
        """As a person writes it, without quotation marks."""
        if value is None:
            return "not set"
        if self.unit is Unit.FLAG:
            return "true" if value else "false"
        if isinstance(value, Mapping):
            return ", ".join(f"{one} = {other}" for one, other in value.items()) or "none"
        return format_duration(int(value) * NS_PER_S).replace(" ", "") if self.unit is Unit.SECONDS else str(value)


_DAY_S: Final = 86_400
_NO_NAMES: Final[Mapping[str, str]] = {}
KEYS: Final[Mapping[str, Key]] = {
    key.path: key
    for key in (
        Key("listen", "address", Unit.ADDRESS, f"127.0.0.1:{PORT}", 0, 0, "loopback address to listen on", True),
        Key("listen", "socket", Unit.PATH, None, 0, 0, "unix socket to listen on, in place of an address", True),
        Key(
            "log", "format", Unit.LOG, "text", 0, 0, "how the log is written: text, or json for one object a line", True
        ),
        Key("person", "sessions", Unit.COUNT, 100, 1, 10_000, "sessions of one person that have not ended"),
        Key("person", "records", Unit.COUNT, 200_000, 1000, 10_000_000, "records of one person; a lease takes four"),
        Key("person", "sign_in", Unit.SECONDS, 12 * 3600, 60, 30 * _DAY_S, "a browser is asked for its token again"),
        Key("studio", "waiting", Unit.COUNT, 1000, 1, 10_000, "requests that wait at once, of all people"),
        Key("studio", "connections", Unit.COUNT, 4096, 64, 32_768, "connections at once; an open page is one", True),
        Key("studio", "answer", Unit.SECONDS, 20, 5, 300, "a request that takes longer is answered with 503"),
        Key("studio", "update", Unit.SECONDS, 2, 1, 60, "longest time until an open page shows a change"),
        Key("hub", "api", Unit.HUB_API, None, 0, 0, "API of the JupyterHub whose users are people here", True),
        Key("hub", "token_file", Unit.PATH, None, 0, 0, "file with the token that the hub knows the studio by", True),
        Key("hub", "service", Unit.NAME, "studio", 0, 0, "name of the studio among the services of the hub", True),
        Key("hub", "create_people", Unit.FLAG, 1, 0, 0, "add users of the hub as people"),
        Key("hub", "tenants", Unit.NAMES, _NO_NAMES, 0, 0, "tenant of users who have none, by group of the hub"),
        Key("hub", "teachers", Unit.NAMES, _NO_NAMES, 0, 0, "group of the office that each group of the hub teaches"),
        Key("hub", "answer", Unit.SECONDS, 5, 1, 60, "a hub that takes longer did not answer; it is asked again then"),
        Key("hub", "recheck", Unit.SECONDS, 300, 1, 3600, "a browser's sign-in is checked with the hub again"),
        Key("hub", "report", Unit.SECONDS, 60, 1, 3600, "the hub is told in which servers something runs"),
        Key(
            "hub",
            "server_token",
            Unit.SECONDS,
            3600,
            300,
            _DAY_S,
            "how long a token outlives its server",
        ),
    )
}
_DO: Final = 'Write tables such as [person], and below them lines such as: sessions = 20, sign_in = "12h".'


@dataclass(frozen=True, slots=True)
class StudioSettings:
    """What holds: the values of the file, and the defaults of the rest."""

    given: Mapping[str, Value]

    def value(self, path: str) -> Value | None:
        return self.given.get(path, KEYS[path].default)

    @property
    def address(self) -> tuple[str, int]:
        return parse_address(str(self.value("listen.address")))

    @property
    def socket(self) -> str | None:
        path = self.value("listen.socket")
        return None if path is None else str(path)

    @property
    def log_format(self) -> LogFormat:
        return LogFormat(str(self.value("log.format")))

    @property
    def sessions_max(self) -> int:
        return self._number("person.sessions")

    @property
    def records_max(self) -> int:
        return self._number("person.records")

    @property
    def cookie_s(self) -> int:
        return self._number("person.sign_in")

    @property
    def waiting_max(self) -> int:
        return self._number("studio.waiting")

    @property
    def connections_max(self) -> int:
        return self._number("studio.connections")

    @property
    def answer_s(self) -> int:
        return self._number("studio.answer")

    @property
    def update_s(self) -> int:
        return self._number("studio.update")

    @property
    def hub_api(self) -> str | None:
        api = self.value("hub.api")
        return None if api is None else str(api)

    @property
    def hub_token_file(self) -> str:
        return str(self.value("hub.token_file"))

    @property
    def hub_service(self) -> str:
        return str(self.value("hub.service"))

    @property
    def hub_creates_people(self) -> bool:
        return bool(self.value("hub.create_people"))

    @property
    def hub_tenants(self) -> Mapping[str, str]:
        return self._names("hub.tenants")

    @property
    def hub_teachers(self) -> Mapping[str, str]:
        return self._names("hub.teachers")

    @property
    def hub_answer_s(self) -> int:
        return self._number("hub.answer")

    @property
    def hub_recheck_s(self) -> int:
        return self._number("hub.recheck")

    @property
    def hub_report_s(self) -> int:
        return self._number("hub.report")

    @property
    def hub_token_s(self) -> int:
        return self._number("hub.server_token")

    def _number(self, path: str) -> int:
        value = self.value(path)
        assert isinstance(value, int)
        return value

    def _names(self, path: str) -> Mapping[str, str]:
        value = self.value(path)
        assert isinstance(value, Mapping)
        return value


DEFAULTS: Final = StudioSettings({})


def parse_config(text: str, name: str = FILE) -> StudioSettings:
    """The settings of a file. Raises ``InvalidRequest``, which names file and line; nothing of a file with a mistake
    in it is taken."""
    given, lines = settings.read_tables(text, name, KEYS, _checked, do=_DO)
    if "listen.address" in given and "listen.socket" in given:
        line = max(lines["listen.address"], lines["listen.socket"])
        raise InvalidRequest(
            f"{name}:{line}: listen.address and listen.socket contradict each other", do="Keep one of them."
        )
    if ("hub.api" in given) != ("hub.token_file" in given):
        has, lacks = ("api", "token_file") if "hub.api" in given else ("token_file", "api")
        line = lines[f"hub.{has}"]
        raise InvalidRequest(f"{name}:{line}: hub.{has} needs hub.{lacks} beside it", do=f"Add {lacks}: see the docs.")
    return StudioSettings(given)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of a loopback address."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host not in LOOPBACK:
        raise InvalidRequest(
            f"{shown(text)} is not an address of this machine alone, and tokens would travel in the clear",
            do="Use 127.0.0.1:PORT, and put a proxy that speaks TLS before it.",
        )
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise InvalidRequest(f"{shown(port)} is not a port", do="Use a number up to 65535; 0 takes a free one.")
    return host, int(port)


def parse_log_format(value: Any, name: str = "--log-format") -> str:
    """One of the words."""
    if value not in list(LogFormat):
        raise InvalidRequest(f"{name} = {shown(value)} is no format of a log", do="Write text or json.")
    return str(value)


def changes(before: StudioSettings, now: StudioSettings) -> list[str]:
    """What is otherwise now, one sentence for each key."""
    sentences = []
    for key in KEYS.values():
        old, new = before.value(key.path), now.value(key.path)
        if old != new:
            later = ", from the next start on" if key.restart else ""
            sentences.append(f"{key.path} is {key.shown(new)} now, and was {key.shown(old)}{later}.")
    return sentences


def _checked(key: Key, value: Any) -> Value:
    match key.unit:
        case Unit.COUNT:
            return _in_range(key, settings.whole_number(key, value))
        case Unit.SECONDS:
            return _in_range(key, settings.duration_s(key, value))
        case Unit.ADDRESS:
            return _address(key, value)
        case Unit.PATH:
            return _path(key, value)
        case Unit.LOG:
            return parse_log_format(value, key.path)
        case Unit.HUB_API:
            return _hub_api(key, value)
        case Unit.NAME:
            return valid_name(value, key.path)
        case Unit.FLAG:
            if not isinstance(value, bool):
                raise InvalidRequest(f"{key.path} = {shown(value)} is neither true nor false", do="Write one of them.")
            return int(value)
        case Unit.NAMES:
            return _names(key, value)


def _in_range(key: Key, found: int) -> int:
    if not key.least <= found <= key.most:
        raise InvalidRequest(
            f"{key.path} = {key.shown(found) if abs(found) <= 10 * key.most else shown(found)} is out of range",
            do=f"Give {key.shown(key.least)} to {key.shown(key.most)}: {key.says}.",
        )
    return found


def _address(key: Key, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not an address", do=f'Write {key.name} = "127.0.0.1:{PORT}".'
        )
    try:
        parse_address(value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{key.path}: {error.message}", do=error.do) from error
    return value


def _hub_api(key: Key, value: Any) -> str:
    if not isinstance(value, str) or not value.rstrip("/").endswith(HUB_API):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not the API of a JupyterHub",
            do=f'Write it as {key.name} = "http://127.0.0.1:8081{HUB_API}".',
        )
    try:
        address = find_address(value, None, None, {})
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{key.path} = {shown(value)} would have tokens travel in the clear, or is no address",
            do="Use https, or http only to this machine.",
        ) from error
    return f"{address.url.rstrip('/')}"


def _names(key: Key, value: Any) -> Mapping[str, str]:
    is_table = isinstance(value, dict) and len(value) <= NAMES_MAX
    if not is_table or not all(isinstance(one, str) for one in value.values()):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not a table of names", do=f'Write {key.name} = {{ "students" = "ml1" }}.'
        )
    return {one: valid_name(other, f"name in {key.path}") for one, other in value.items()}


def _path(key: Key, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not a whole path",
            do=f'Write it from / on: {key.name} = "/run/{key.name}".',
        )
    if key.name == "socket" and len(value.encode()) > ADDRESS_BYTES_MAX:
        raise InvalidRequest(
            f"{key.path} has more than {ADDRESS_BYTES_MAX} bytes, which is all that the kernel takes", do="Shorten it."
        )
    return value
