"""The operator's limits: ``policy.toml`` in the state folder. Pure: text in, limits out.

Each key is declared once, with its unit, its default, its range and what it means (``KEYS``); the documentation's table
is a copy of that. A file is taken as a whole or refused as a whole, with the line and the nearest key that there is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from sublet import settings
from sublet.broker.policy import Policy
from sublet.broker.rate_limits import RequestRates
from sublet.broker.records import Quota
from sublet.broker.shared_socket import SharedLimits
from sublet.errors import InvalidRequest
from sublet.values import BYTES_MAX, GIB, MIB, format_size, shown
from sublet.wire.caps import WALLS, LeaseCaps

FILE: Final = "policy.toml"
_COUNT_MAX: Final = 1_000_000_000
_S_MAX: Final = 366 * 24 * 3600


class Unit(enum.StrEnum):
    """How the value of a key is written."""

    COUNT = "count"
    """A whole number."""
    SIZE = "size"
    """A text with a unit, ``"512MiB"``."""
    SECONDS = "seconds"
    """A duration as a text, ``"30m"``."""
    WALLS = "walls"
    """A list of names of ``WALLS``; as a number, one bit for each."""


class Key(NamedTuple):
    """One limit."""

    table: str
    name: str
    unit: Unit
    default: int | None
    """In bytes, seconds or pieces; None: no limit, or what the machine has."""
    least: int
    """A smaller value is refused: what is there would not run."""
    says: str
    unset: str = "no limit"
    """What no value means, for people."""

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}"

    def shown(self, value: int | None) -> str:
        """As a person writes it."""
        if value is None:
            return self.unset
        match self.unit:
            case Unit.SIZE:
                return format_size(value)
            case Unit.SECONDS:
                return f"{value}s"
            case Unit.WALLS:
                return ", ".join(_walls(value)) or "none"
            case Unit.COUNT:
                return str(value)


_C, _B, _S = Unit.COUNT, Unit.SIZE, Unit.SECONDS
_MACHINE: Final = "what the machine has"

KEYS: Final[Mapping[str, Key]] = {
    key.path: key
    for key in (
        Key("lease", "cores", _C, 1, 1, "cores of a lease that has neither cores nor a device"),
        Key("lease", "cores_per_gpu", _C, 4, 1, "cores for each device of a lease without cores"),
        Key("lease", "memory_per_core", _B, 512 * MIB, 64 * MIB, "memory for each core, where none was leased"),
        Key("lease", "memory_per_card", _B, 8 * GIB, 512 * MIB, "host memory for each card, beside its VRAM"),
        Key("lease", "processes_per_core", _C, 256, 16, "processes and threads for each core"),
        Key("lease", "home", _B, 256 * MIB, MIB, "home folder of each guest, which is memory of its lease"),
        Key("lease", "allow_missing", Unit.WALLS, 0, 0, "walls that a tenant's guest may do without"),
        Key("tenant", "gpus", _C, None, 0, "GPUs at once"),
        Key("tenant", "vram", _B, None, 0, "GPU memory at once"),
        Key("tenant", "cores", _C, None, 0, "cores at once"),
        Key("tenant", "memory", _B, None, 0, "memory at once"),
        Key("tenant", "block", _B, None, 0, "storage at once, volumes included"),
        Key("tenant", "gpu_time", _S, None, 0, "device time within a rolling hour"),
        Key("tenant", "leases", _C, 1000, 1, "leases at once"),
        Key("tenant", "leases_per_hour", _C, 3000, 1, "leases that begin, which bounds the journal's growth"),
        Key("tenant", "queue", _C, 1000, 1, "requests that wait at once"),
        Key("tenant", "volumes", _C, 1000, 1, "named volumes at once"),
        Key("tenant", "requests_per_minute", _C, 6000, 60, "requests to the office"),
        Key("office", "memory", _B, None, 512 * MIB, "memory of all guests together", "15/16 of the machine's"),
        Key("office", "cores", _C, None, 1, "cores of all guests together", _MACHINE),
        Key("office", "processes", _C, None, 256, "processes of all guests together", "half of the kernel's numbers"),
        Key("office", "leases", _C, 2_000_000, 1, "leases of all tenants at once"),
        Key("office", "queue", _C, 10_000, 1, "requests of all tenants that wait at once"),
        Key("office", "disk_reserve", _B, None, 0, "disk that is not lent, at least", "chosen by the size of the disk"),
        Key("user", "connections", _C, None, 4, "connections of one user to one socket", "a quarter of all"),
        Key("user", "requests_per_minute", _C, 6000, 60, "requests of one user over the shared socket"),
        Key("user", "log_lines_per_minute", _C, 60, 1, "lines of the office's log about one user"),
    )
}
TABLES: Final = tuple(dict.fromkeys(key.table for key in KEYS.values()))


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds: the values of the file, and the defaults of the rest."""

    given: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    """Of what is given, the line of the file."""

    def value(self, path: str) -> int | None:
        return self.given.get(path, KEYS[path].default)

    def number(self, path: str) -> int:
        """The same, of a key that has a default; 0 for one that has none."""
        return self.value(path) or 0

    def source(self, path: str) -> str:
        """Where the value comes from, for people."""
        return f"{FILE} line {self.lines[path]}" if path in self.given else "default"

    def caps(self) -> LeaseCaps:
        """For the supervisor."""
        return LeaseCaps(
            cores=self.number("lease.cores"),
            cores_per_gpu=self.number("lease.cores_per_gpu"),
            memory_per_core_bytes=self.number("lease.memory_per_core"),
            memory_per_card_bytes=self.number("lease.memory_per_card"),
            processes_per_core=self.number("lease.processes_per_core"),
            home_bytes=self.number("lease.home"),
            office_memory_bytes=self.number("office.memory"),
            office_cores=self.number("office.cores"),
            office_processes=self.number("office.processes"),
            allow_missing=_walls(self.number("lease.allow_missing")),
        )

    def quota(self) -> Quota:
        """Of a tenant that has none of its own."""
        return Quota(
            gpus=self.value("tenant.gpus"),
            vram_bytes=self.value("tenant.vram"),
            cores=self.value("tenant.cores"),
            memory_bytes=self.value("tenant.memory"),
            block_bytes=self.value("tenant.block"),
            leases=self.value("tenant.leases"),
            gpu_seconds=self.value("tenant.gpu_time"),
        )

    def rates(self) -> RequestRates:
        return RequestRates(
            requests_per_minute=self.number("tenant.requests_per_minute"),
            leases_per_hour=self.number("tenant.leases_per_hour"),
        )

    def shared(self) -> SharedLimits:
        """Of each user of the machine, over the shared socket."""
        return SharedLimits(
            requests_per_minute_of_user=self.number("user.requests_per_minute"),
            log_lines_per_minute_of_user=self.number("user.log_lines_per_minute"),
        )

    def policy(self, policy: Policy) -> Policy:
        """The office's durations with these limits."""
        return msgspec.structs.replace(
            policy,
            quota_default=self.quota(),
            queue_max=self.number("office.queue"),
            queue_tenant_max=self.number("tenant.queue"),
            leases_max=self.number("office.leases"),
            volumes_tenant_max=self.number("tenant.volumes"),
        )


def parse_policy(text: str, name: str = FILE) -> Limits:
    """The limits of a file. Raises ``InvalidRequest``, which names file and line; nothing of a file with a mistake in
    it is taken."""
    limits = Limits(*settings.read_tables(text, name, KEYS, _number, do=_DO))
    _check_together(limits, name)
    return limits


_DO: Final = 'Write tables such as [tenant], and below them lines such as: leases = 100, memory = "8GiB".'


def _number(key: Key, value: Any) -> int:
    what, found, most = key.path, 0, _COUNT_MAX
    match key.unit:
        case Unit.COUNT:
            found = settings.whole_number(key, value)
        case Unit.SIZE:
            found, most = settings.size_bytes(key, value), BYTES_MAX
        case Unit.SECONDS:
            found, most = settings.duration_s(key, value), _S_MAX
        case Unit.WALLS:
            found = _walls_in(key, value)
    if found < key.least:
        raise InvalidRequest(
            f"{what} = {shown(value)} is less than what runs needs",
            do=f"Give at least {key.shown(key.least)}: {key.says}.",
        )
    if found > most:
        raise InvalidRequest(f"{what} = {shown(value)} is more than any machine has", do=f"Give at most {most}.")
    return found


def _walls_in(key: Key, value: Any) -> int:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not a list of names", do=f'Write {key.name} = ["{WALLS[-1]}"].'
        )
    for one in value:
        if one not in WALLS:
            raise InvalidRequest(
                f"{key.path} has {shown(one)}, which is no wall{settings.meant(one, WALLS)}",
                do=f"There are {', '.join(WALLS)}.",
            )
    return sum(1 << WALLS.index(one) for one in set(value))


def _walls(mask: int) -> tuple[str, ...]:
    return tuple(name for bit, name in enumerate(WALLS) if mask >> bit & 1)


def _check_together(limits: Limits, name: str) -> None:
    """Values that contradict each other."""
    for low, high in (
        ("tenant.queue", "office.queue"),
        ("tenant.leases", "office.leases"),
        ("lease.home", "lease.memory_per_core"),
        ("lease.memory_per_core", "office.memory"),
        ("lease.processes_per_core", "office.processes"),
        ("lease.cores", "office.cores"),
    ):
        less, more = limits.value(low), limits.value(high)
        if less is not None and more is not None and less > more and (low in limits.given or high in limits.given):
            line = max(limits.lines.get(low, 0), limits.lines.get(high, 0))
            raise InvalidRequest(
                f"{name}:{line}: {low} ({KEYS[low].shown(less)}) is above {high} ({KEYS[high].shown(more)})",
                do="Make the first at most the second.",
            )
