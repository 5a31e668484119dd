"""The operator's file ``policy.toml``: text in; limits, groups, reservations and budgets out.

Each key is declared once, with its unit, its default, its range and what it means (``KEYS`` for limits, ``NAMED_KEYS``
for tables with a name, such as ``[group.course]``); the documentation's tables are a copy of that. A file is taken as a
whole or refused as a whole, with the line and the nearest key that there is. What it says of time zones is looked up in
the machine's database; nothing else is read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final, NamedTuple

import msgspec

from sublet import settings
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.arrangement import check_group, new_budget, with_fields
from sublet.office.ledger.budgets import check_amount, check_windows, money, parse_amount
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.rate_limits import RequestRates
from sublet.office.ledger.records import LOCAL_TENANT, DeclaredRecord, GroupRecord, Quota, ReservationRecord
from sublet.office.ledger.reservation_times import parse_rule, zone_of
from sublet.office.shared_socket import SharedLimits
from sublet.values import (
    BYTES_MAX,
    GIB,
    MIB,
    NS_PER_S,
    BudgetId,
    GroupId,
    ReservationId,
    TenantId,
    format_duration,
    format_size,
    shown,
    valid_name,
)
from sublet.wire.caps import WALLS, LeaseCaps

FILE: Final = "policy.toml"
_COUNT_MAX: Final = 1_000_000_000
_S_MAX: Final = 366 * 24 * 3600
TTL_MAX_S: Final = 24 * 3600
"""``Policy.ttl_max_ns``."""


class PolicyUnit(enum.StrEnum):
    """How the value of a key is written."""

    COUNT = "count"
    """A whole number."""
    SIZE = "size"
    """A text with a unit, ``"512MiB"``."""
    SECONDS = "seconds"
    """A duration as a text, ``"30m"``."""
    WALLS = "walls"
    """A list of names of ``WALLS``; as a number, one bit for each."""
    SWITCH = "switch"
    """``true`` or ``false``; as a number, 1 or 0."""
    MONEY = "money"
    """A text with at most six decimals, ``"12.50"``, or a whole number; as a number, millionths."""
    TEXT = "text"
    NAMES = "names"
    """A list of names."""


class PolicyKey(NamedTuple):
    """One limit."""

    table: str
    name: str
    unit: PolicyUnit
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
            case PolicyUnit.SIZE:
                return format_size(value)
            case PolicyUnit.SECONDS:
                return f"{value}s"
            case PolicyUnit.WALLS:
                return ", ".join(_walls(value)) or "none"
            case PolicyUnit.MONEY:
                return money(value, "").strip()
            case PolicyUnit.SWITCH:
                return "true" if value else "false"
            case PolicyUnit.COUNT | PolicyUnit.TEXT | PolicyUnit.NAMES:
                return str(value)


_C, _B, _S = PolicyUnit.COUNT, PolicyUnit.SIZE, PolicyUnit.SECONDS
_MACHINE: Final = "what the machine has"

KEYS: Final[Mapping[str, PolicyKey]] = {
    key.path: key
    for key in (
        PolicyKey("lease", "cores", _C, 1, 1, "cores of a lease that has neither cores nor a device"),
        PolicyKey("lease", "cores_per_gpu", _C, 4, 1, "cores for each device of a lease without cores"),
        PolicyKey("lease", "memory_per_core", _B, 512 * MIB, 64 * MIB, "memory for each core, where none was leased"),
        PolicyKey("lease", "memory_per_card", _B, 8 * GIB, 512 * MIB, "host memory for each card, beside its VRAM"),
        PolicyKey("lease", "processes_per_core", _C, 256, 16, "processes and threads for each core"),
        PolicyKey("lease", "home", _B, 256 * MIB, MIB, "home folder of each guest, which is memory of its lease"),
        PolicyKey("lease", "allow_missing", PolicyUnit.WALLS, 0, 0, "walls that a tenant's guest may do without"),
        PolicyKey("tenant", "gpus", _C, None, 0, "GPUs at once"),
        PolicyKey("tenant", "vram", _B, None, 0, "GPU memory at once"),
        PolicyKey("tenant", "cores", _C, None, 0, "cores at once"),
        PolicyKey("tenant", "memory", _B, None, 0, "memory at once"),
        PolicyKey("tenant", "block", _B, None, 0, "storage at once, volumes included"),
        PolicyKey("tenant", "gpu_time", _S, None, 0, "device time within a rolling hour"),
        PolicyKey("tenant", "burst", _S, None, 0, "device time beyond `gpu_time`, as a credit that is used up", "none"),
        PolicyKey("tenant", "burst_refill", _S, None, 0, "of that credit, what comes back in an hour", "nothing"),
        PolicyKey("tenant", "leases", _C, 1000, 1, "leases at once"),
        PolicyKey("tenant", "leases_per_hour", _C, 3000, 1, "leases that begin, which bounds the journal's growth"),
        PolicyKey("tenant", "queue", _C, 1000, 1, "requests that wait at once"),
        PolicyKey("tenant", "volumes", _C, 1000, 1, "named volumes at once"),
        PolicyKey("tenant", "requests_per_minute", _C, 6000, 60, "requests to the office"),
        PolicyKey("office", "memory", _B, None, 512 * MIB, "memory of all guests together", "15/16 of the machine's"),
        PolicyKey("office", "cores", _C, None, 1, "cores of all guests together", _MACHINE),
        PolicyKey(
            "office", "processes", _C, None, 256, "processes of all guests together", "half of the kernel's numbers"
        ),
        PolicyKey("office", "leases", _C, 2_000_000, 1, "leases of all tenants at once"),
        PolicyKey("office", "queue", _C, 10_000, 1, "requests of all tenants that wait at once"),
        PolicyKey(
            "office",
            "cheapest_first",
            PolicyUnit.SWITCH,
            0,
            0,
            "interactive requests of no model get the cheapest",
        ),
        PolicyKey(
            "office", "lend_beside", PolicyUnit.SWITCH, 0, 0, "cards are lent for oneself beside programs of others"
        ),
        PolicyKey(
            "office", "count_launches", PolicyUnit.SWITCH, 0, 0, "what frameworks launch on cards is counted, by CUPTI"
        ),
        PolicyKey(
            "office", "disk_reserve", _B, None, 0, "disk that is not lent, at least", "chosen by the size of the disk"
        ),
        PolicyKey(
            "office", "max_hold", _S, 1800, 60, "a holder yields after this long without a break, if others wait"
        ),
        PolicyKey("office", "min_run", _S, 600, 1, "a batch lease is not taken for another request before"),
        PolicyKey("office", "idle", _S, 5, 1, "an idle lease yields after this long at most, whatever moving it takes"),
        PolicyKey("office", "pause", _S, 240, 1, "an idle lease is kept this long from who had `max_hold` already"),
        PolicyKey("office", "notice", _S, 30, 1, "notice before a lease is taken"),
        PolicyKey("office", "notice_spot", _S, 5, 1, "notice before a spot lease is taken"),
        PolicyKey("office", "ttl_gpu", _S, 300, 2, "time to live of GPU leases, where none is asked for"),
        PolicyKey("office", "ttl_cores", _S, 120, 2, "time to live of leases of cores"),
        PolicyKey("office", "ttl_memory", _S, 300, 2, "time to live of leases of memory"),
        PolicyKey("office", "ttl_block", _S, 3600, 2, "time to live of block leases"),
        PolicyKey("user", "connections", _C, None, 4, "connections of one user to one socket", "a quarter of all"),
        PolicyKey("user", "requests_per_minute", _C, 6000, 60, "requests of one user over the shared socket"),
        PolicyKey("user", "log_lines_per_minute", _C, 60, 1, "lines of the office's log about one user"),
    )
}
TABLES: Final = tuple(dict.fromkeys(key.table for key in KEYS.values()))

FIELDS: Final = {
    "vram": "vram_bytes",
    "memory": "memory_bytes",
    "block": "block_bytes",
    "gpu_time": "gpu_seconds",
}
"""What a key of a group, or of a tenant's quota, is called in the records, where it is called otherwise there."""

DURATIONS: Final[Mapping[str, str]] = {
    "office.max_hold": "max_hold_ns",
    "office.min_run": "min_run_batch_ns",
    "office.idle": "idle_most_ns",
    "office.pause": "pause_ns",
    "office.notice": "notice_ns",
    "office.notice_spot": "notice_spot_ns",
    "office.ttl_gpu": "ttl_gpu_ns",
    "office.ttl_cores": "ttl_cpu_ns",
    "office.ttl_memory": "ttl_memory_ns",
    "office.ttl_block": "ttl_block_ns",
}
"""What a key is called in `Policy`."""

_M, _T = PolicyUnit.MONEY, PolicyUnit.TEXT
NAMED_KEYS: Final[Mapping[str, PolicyKey]] = {
    key.path: key
    for key in (
        PolicyKey("group", "weight", _C, 1, 1, "share beside other groups that wait"),
        PolicyKey("group", "floor", _C, 0, 0, "GPUs that the group can always have"),
        PolicyKey("group", "ceiling", _C, None, 0, "GPUs that the group never has more of at once"),
        PolicyKey("group", "members", PolicyUnit.NAMES, None, 0, "tenants of the group", "none"),
        PolicyKey("group", "gpus", _C, None, 0, "GPUs at once, of all its tenants"),
        PolicyKey("group", "vram", _B, None, 0, "GPU memory at once"),
        PolicyKey("group", "cores", _C, None, 0, "cores at once"),
        PolicyKey("group", "memory", _B, None, 0, "memory at once"),
        PolicyKey("group", "block", _B, None, 0, "storage at once, volumes included"),
        PolicyKey("group", "gpu_time", _S, None, 0, "device time within a rolling hour"),
        PolicyKey("group", "leases", _C, None, 0, "leases at once"),
        PolicyKey("group", "queue", _C, None, 0, "requests that wait at once"),
        PolicyKey("group", "requests_per_minute", _C, None, 60, "requests to the office"),
        PolicyKey("reservation", "group", _T, None, 0, "group that the GPUs are for", "needed"),
        PolicyKey("reservation", "gpus", _C, None, 1, "GPUs", "needed"),
        PolicyKey("reservation", "when", _T, None, 0, "times, such as `every Tue 10:00-12:00`", "needed"),
        PolicyKey("reservation", "zone", _T, None, 0, "time zone of these times, such as `Europe/Berlin`", "needed"),
        PolicyKey("reservation", "model", _T, None, 0, "only devices of this model", "any"),
        *(
            PolicyKey(f"budget.{whose}", per, _M, None, 0, f"what the {whose} may spend {window}", "none")
            for whose in ("group", "tenant")
            for per, window in (("day", "a day"), ("month", "a month"), ("total", "in all"))
        ),
    )
}
NAMED: Final = tuple(dict.fromkeys(key.table for key in NAMED_KEYS.values()))
"""Tables that stand in the file with a name, once for each group, reservation and budget."""
_NEEDED: Final = ("group", "gpus", "when", "zone")
"""Of a reservation."""


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What holds: the values of the file, and the defaults of the rest."""

    given: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    """Of what is given, the line of the file. Of a table with a name, as ``group/course`` and ``group/course/weight``,
    with the names of the file."""
    declared: DeclaredRecord = field(default_factory=DeclaredRecord)
    """Its groups, reservations and budgets."""

    def value(self, path: str) -> int | None:
        return self.given.get(path, KEYS[path].default)

    def number(self, path: str) -> int:
        """The same, of a key that has a default; 0 for one that has none."""
        return self.value(path) or 0

    def source(self, path: str) -> str:
        """Where the value comes from, for people."""
        return f"{FILE} line {self.lines[path]}" if path in self.given else "default"

    def with_lines(self, error: InvalidRequest) -> InvalidRequest:
        """What contradicts another part of the file, or what there is, with the lines that say so."""
        lines = sorted({self.lines[path] for path in error.parts if path in self.lines})
        if not lines:
            return error
        numbers = str(lines[0]) if len(lines) == 1 else f"{', '.join(map(str, lines[:-1]))} and {lines[-1]}"
        where = f"line{'' if len(lines) == 1 else 's'} {numbers}"
        return type(error)(f"{error.message} ({where})", do=error.do)

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
            lend_beside=bool(self.number("office.lend_beside")),
            count_launches=bool(self.number("office.count_launches")),
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
            burst_seconds=self.value("tenant.burst"),
            burst_refill_seconds=self.value("tenant.burst_refill"),
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
        durations = {field: self.given[path] * NS_PER_S for path, field in DURATIONS.items() if path in self.given}
        if "max_hold_ns" in durations:  # a further turn is no longer than a first one
            durations["turn_least_ns"] = min(policy.turn_least_ns, durations["max_hold_ns"])
        return msgspec.structs.replace(
            policy,
            **durations,
            quota_default=self.quota(),
            queue_max=self.number("office.queue"),
            queue_tenant_max=self.number("tenant.queue"),
            leases_max=self.number("office.leases"),
            cheapest_first=bool(self.number("office.cheapest_first")),
            volumes_tenant_max=self.number("tenant.volumes"),
        )


def parse_policy(text: str, name: str = FILE) -> PolicyLimits:
    """The limits of a file. Raises ``InvalidRequest``, which names file and line; nothing of a file with a mistake in
    it is taken."""
    given, lines = settings.read_tables(text, name, {**KEYS, **NAMED_KEYS}, _checked, do=_DO, named=NAMED)
    numbers = {path: value for path, value in given.items() if path in KEYS and isinstance(value, int)}
    limits = PolicyLimits(numbers, lines, _declared(given, lines, name))
    _check_together(limits, name)
    return limits


_DO: Final = 'Write tables such as [tenant], and below them lines such as: leases = 100, memory = "8GiB".'


def _checked(key: PolicyKey, value: Any) -> int | str | tuple[str, ...]:
    match key.unit:
        case PolicyUnit.TEXT:
            return _text(key, value)
        case PolicyUnit.NAMES:
            if not isinstance(value, list):
                raise InvalidRequest(f"{key.path} = {shown(value)} is no list", do=f'Write {key.name} = ["ana"].')
            return tuple(valid_name(one, "tenant name") for one in value)
        case PolicyUnit.MONEY:
            return _amount(key, value)
        case _:
            return _number(key, value)


def _text(key: PolicyKey, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 200:
        raise InvalidRequest(f"{key.path} = {shown(value)} is no text", do=f'Write {key.name} = "...": {key.says}.')
    if key.name == "group":
        return valid_name(value, "group name")
    if key.name == "when":
        parse_rule(value)
    if key.name == "zone":
        zone_of(value)
    return " ".join(value.split())


def _amount(key: PolicyKey, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(
            f"{key.path} = {shown(value)} is not an amount of money", do=f'Write it as text: {key.name} = "12.50".'
        )
    amount = parse_amount(str(value))
    check_amount(amount, least=0)
    return amount


def _number(key: PolicyKey, value: Any) -> int:
    what, found, most = key.path, 0, _COUNT_MAX
    match key.unit:
        case PolicyUnit.COUNT:
            found = settings.whole_number(key, value)
        case PolicyUnit.SIZE:
            found, most = settings.size_bytes(key, value), BYTES_MAX
        case PolicyUnit.SECONDS:
            found, most = settings.duration_s(key, value), _S_MAX
        case PolicyUnit.WALLS:
            found = _walls_in(key, value)
        case PolicyUnit.SWITCH:
            if not isinstance(value, bool):
                raise InvalidRequest(f"{what} = {shown(value)} is not true or false", do=f"Write {key.name} = true.")
            found = int(value)
        case _:
            raise ValueError(f"{key.path} is no number")
    if found < key.least:
        raise InvalidRequest(
            f"{what} = {shown(value)} is less than what runs needs",
            do=f"Give at least {key.shown(key.least)}: {key.says}.",
        )
    if found > most:
        raise InvalidRequest(f"{what} = {shown(value)} is more than any machine has", do=f"Give at most {most}.")
    return found


def _declared(given: Mapping[str, Any], lines: Mapping[str, int], name: str) -> DeclaredRecord:
    """Groups, reservations and budgets, each right in itself."""
    tables: dict[str, dict[str, dict[str, Any]]] = {table: {} for table in NAMED}
    for path in lines:
        if "/" in path:
            own, key = path.rpartition("/")[::2] if path in given else (path, "")
            table, _, called = own.rpartition("/")
            keys = tables[table.replace("/", ".")].setdefault(called, {})
            if key:
                keys[key] = given[path]
    members: dict[TenantId, GroupId] = {}
    groups: dict[GroupId, dict[str, int]] = {}
    reservations: dict[ReservationId, ReservationRecord] = {}
    budgets: dict[BudgetId, int] = {}
    at = ""
    try:
        for own, keys in tables["group"].items():
            at = f"group/{own}"
            group = GroupId(own)
            groups[group] = {FIELDS.get(key, key): value for key, value in keys.items() if key != "members"}
            check_group(with_fields(GroupRecord(id=group), groups[group]))
            at = f"group/{own}/members"
            for tenant in map(TenantId, keys.get("members", ())):
                _check_member(tenant, group, members)
                members[tenant] = group
        for own, keys in tables["reservation"].items():
            at = f"reservation/{own}"
            missing = [key for key in _NEEDED if key not in keys]
            if missing:
                raise InvalidRequest(f"reservation {own} has no {missing[0]}", do=f"It needs {', '.join(_NEEDED)}.")
            reservations[ReservationId(own)] = ReservationRecord(id=ReservationId(own), **keys)
        for whose in ("group", "tenant"):
            for own, keys in tables[f"budget.{whose}"].items():
                at = f"budget/{whose}/{own}"
                found = {BudgetId(f"{whose}/{own}/{per}"): amount for per, amount in keys.items()}
                check_windows([new_budget(budget, amount, "", 0) for budget, amount in found.items()])
                budgets.update(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}:{lines[at]}: {error.message}", do=error.do) from error
    return DeclaredRecord(groups=groups, members=members, reservations=reservations, budgets=budgets)


def _check_member(tenant: TenantId, group: GroupId, members: Mapping[TenantId, GroupId]) -> None:
    other = members.get(tenant)
    if tenant == LOCAL_TENANT:
        raise InvalidRequest("tenant local is the owner of the office", do="Leave it out: it is in the default group.")
    if other is not None:
        where = f"groups {other} and {group}" if other != group else f"group {group} twice"
        raise InvalidRequest(f"tenant {tenant} would be in {where}", do="Name it in one of them, once.")


def _walls_in(key: PolicyKey, value: Any) -> int:
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


def _check_together(limits: PolicyLimits, name: str) -> None:
    """Values that contradict each other, or what an office can do."""
    for path, field_name in DURATIONS.items():
        value = limits.given.get(path, 0)
        if field_name.startswith("ttl_") and value > TTL_MAX_S:
            raise InvalidRequest(
                f"{name}:{limits.lines[path]}: {path} ({KEYS[path].shown(value)}) is longer than any lease may ask for",
                do=f"Give at most {format_duration(TTL_MAX_S * NS_PER_S)}: a lease in use is renewed anyway.",
            )
    for low, high in (
        ("tenant.queue", "office.queue"),
        ("tenant.leases", "office.leases"),
        ("lease.home", "lease.memory_per_core"),
        ("lease.memory_per_core", "office.memory"),
        ("lease.processes_per_core", "office.processes"),
        ("lease.cores", "office.cores"),
        ("office.notice_spot", "office.notice"),
        ("office.notice", "office.max_hold"),
    ):
        less, more = limits.value(low), limits.value(high)
        if less is not None and more is not None and less > more and (low in limits.given or high in limits.given):
            line = max(limits.lines.get(low, 0), limits.lines.get(high, 0))
            raise InvalidRequest(
                f"{name}:{line}: {low} ({KEYS[low].shown(less)}) is above {high} ({KEYS[high].shown(more)})",
                do="Make the first at most the second.",
            )
