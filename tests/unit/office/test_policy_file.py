"""The operator's limits as a file: every key, and every way in which a file is wrong."""

from __future__ import annotations

import json

import msgspec
import pytest

from sublet.errors import InvalidRequest
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.plan import _MUST as MUST
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import DeclaredRecord, Quota, ReservationRecord
from sublet.office.policy_file import DURATIONS, KEYS, TTL_MAX_S, PolicyKey, PolicyLimits, PolicyUnit, parse_policy
from sublet.office.shared_socket import SharedLimits
from sublet.settings import FILE_BYTES_MAX
from sublet.values import GIB, MIB, NS_PER_S, BudgetId, GroupId, ReservationId, TenantId
from sublet.wire.caps import WALLS, LeaseCaps


def written(key: PolicyKey, value: int) -> str:
    """As TOML."""
    match key.unit:
        case PolicyUnit.COUNT:
            return str(value)
        case PolicyUnit.SIZE:
            return f'"{value}B"'
        case PolicyUnit.SWITCH:
            return {0: "false", 1: "true"}.get(value, str(value))
        case PolicyUnit.SECONDS:
            return f'"{value}s"'
        case _:
            names = [name for bit, name in enumerate(WALLS) if value >> bit & 1]
            return json.dumps([*names, "more than there are"] if value >> len(WALLS) else names)


def refused(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_policy(text)
    return f"{caught.value.message}. {caught.value.do}"


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_each_key_is_taken_from_the_line_that_sets_it(key: PolicyKey) -> None:
    value = 1 if key.unit is PolicyUnit.SWITCH else max(key.least, key.default or 0, 2)
    found = parse_policy(f"# limits\n\n[{key.table}]\n{key.name} = {written(key, value)}\n")
    assert found.value(key.path) == value
    assert found.source(key.path) == "policy.toml line 4"
    others = [path for path in KEYS if path != key.path]
    assert all(found.value(path) == KEYS[path].default and found.source(path) == "default" for path in others)


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_value_of_another_kind_is_refused_with_its_line(key: PolicyKey) -> None:
    true = "1" if key.unit is PolicyUnit.SWITCH else "true"
    for wrong in (true, "1.5", "[4]", "{}", "1979-05-27", '"many"', '""', "nan", '"٤"', '"-1GiB"'):
        said = refused(f"[{key.table}]\n{key.name} = {wrong}")
        assert said.startswith("policy.toml:2: "), f"{wrong}: {said}"
        assert key.name in said or key.path in said, f"{wrong}: {said}"


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_size_without_a_unit_and_a_number_with_one_are_refused(key: PolicyKey) -> None:
    wrong = "8" if key.unit is not PolicyUnit.COUNT else '"8GiB"'
    assert refused(f"[{key.table}]\n{key.name} = {wrong}").startswith("policy.toml:2: ")


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_huge_value_is_refused(key: PolicyKey) -> None:
    for huge in (10**12, 2**63, 10**40):
        value = huge if key.unit is PolicyUnit.COUNT else huge * 10**9
        assert refused(f"[{key.table}]\n{key.name} = {written(key, value)}").startswith("policy.toml:"), huge


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.least > 0], ids=lambda key: key.path)
def test_a_value_below_what_runs_is_refused_with_what_would_do(key: PolicyKey) -> None:
    said = refused(f"[{key.table}]\n{key.name} = {written(key, key.least - 1)}")
    assert said.startswith("policy.toml:2: ")
    if key.least > 1 or key.unit is PolicyUnit.COUNT:
        assert "less than what runs needs" in said
        assert key.says in said


@pytest.mark.parametrize(
    "key", [key for key in KEYS.values() if key.unit is PolicyUnit.COUNT], ids=lambda key: key.path
)
def test_a_negative_number_is_refused(key: PolicyKey) -> None:
    assert refused(f"[{key.table}]\n{key.name} = -1").startswith("policy.toml:2: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenant]\n\nleasez = 4", "policy.toml:3: [tenant] has no key 'leasez'; did you mean leases?"),
        ("[tenant]\nLEASES = 4", "policy.toml:2: [tenant] has no key 'LEASES'; did you mean leases?"),
        (
            '[lease]\n"memory-per-core" = 4',
            "policy.toml:2: [lease] has no key 'memory-per-core'; did you mean",
        ),
        ("# x\n[tenants]\nleases = 4", "policy.toml:2: there is no table ['tenants']; did you mean tenant?"),
        ("leases = 4", "policy.toml:1: 'leases' stands outside of a table; it belongs below [tenant]"),
        ("tenant = 4", "policy.toml:1: tenant is a table"),
        ("[[tenant]]\nleases = 4", "policy.toml:1: tenant is a table"),
        ("[tenant]\nübrig = 4", "policy.toml is not TOML"),
        ('[tenant]\n"übrig" = 4', "policy.toml:2: [tenant] has no key 'übrig'"),
        ('[tenant]\n"\\u001b[31m" = 4', "policy.toml:2: [tenant] has no key '\\x1b[31m'"),
        ("[tenant]\nleases = 4\nleases = 5", "policy.toml is not TOML"),
        ("[tenant]\nleases = 4\n[tenant]\nqueue = 5", "policy.toml is not TOML"),
        ("[tenant", "policy.toml is not TOML"),
        ("[a.b.c]\nx = 1", "policy.toml:1: there is no table ['a']"),
        ("[grup.film]\nweight = 2", "policy.toml:1: there is no table ['grup']; did you mean group?"),
        ("\n[tenant.leases]\nx = 1", "policy.toml:2: tenant.leases = "),
        ("tenant.leases = true", "policy.toml:1: tenant.leases = True is not a whole number"),
        ("tenant = {leases = true}", "policy.toml:1: tenant.leases = True is not a whole number"),
        ("[tenant]\nqueue = 11000", "policy.toml:2: tenant.queue (11000) is above office.queue (10000)"),
        ('[lease]\nhome = "1GiB"', "policy.toml:2: lease.home (1GiB) is above lease.memory_per_core (512MiB)"),
        ("[lease]\ncores = 4\n[office]\ncores = 2", "policy.toml:4: lease.cores (4) is above office.cores (2)"),
        (
            '[office]\nnotice = "2m"\nmax_hold = "1m"',
            "policy.toml:3: office.notice (120s) is above office.max_hold (60s)",
        ),
        ('[office]\nnotice_spot = "40s"', "policy.toml:2: office.notice_spot (40s) is above office.notice (30s)"),
        ('[office]\nttl_gpu = "25h"', "policy.toml:2: office.ttl_gpu (90000s) is longer than any lease may ask for"),
        ("[tenant]\nleases = " + "1" * 5000, "policy.toml is not TOML"),
        (
            '[lease]\nallow_missing = ["net", "land-lock"]',
            "policy.toml:2: lease.allow_missing has 'land-lock', which is no wall; did you mean landlock?",
        ),
        ("#" * FILE_BYTES_MAX + "#", f"policy.toml has more than {FILE_BYTES_MAX} bytes"),
        ("a = " + "[" * 5000, "policy.toml is not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_as_a_whole(text: str, said: str) -> None:
    assert refused(text).startswith(said)


RESERVATION = '[reservation.lab]\ngroup = "course"\ngpus = 1\nwhen = "every Tue 10:00-12:00"\nzone = "UTC"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[group.course]\n\nwieght = 4", "policy.toml:3: [group] has no key 'wieght'; did you mean weight?"),
        ("[group.course]\nweight = 0", "policy.toml:2: group.weight = 0 is less than what runs needs"),
        ("[group.course]\nweight = 20000", "policy.toml:1: a weight of 20000 for group course is not possible"),
        ("[group.course]\nfloor = 3\nceiling = 2", "policy.toml:1: group course would have a floor of 3 GPUs above"),
        ("[group.course]\nfloor = 3\ngpus = 2", "policy.toml:1: group course would have a floor of 3 GPUs above"),
        ("[group.course]\nfloor = -1", "policy.toml:2: group.floor = -1 is less"),
        ("[group.course]\nfloor = 1.5", "policy.toml:2: group.floor = 1.5 is not a whole number"),
        ("[group.course]\nmemory = 8", "policy.toml:2: group.memory = 8 is not a size"),
        ("[group.Course]", "policy.toml:1: 'Course' is not a valid name"),
        ("[group]\nweight = 4", "policy.toml:2: 'group.weight' is no table"),
        ("group = 4", "policy.toml:1: group is a table with a name"),
        ("[[group]]\nweight = 4", "policy.toml:1: group is a table with a name"),
        ('[group.a]\nmembers = "ann"', "policy.toml:2: group.members = 'ann' is no list"),
        ('[group.a]\nmembers = ["Ann"]', "policy.toml:2: 'Ann' is not a valid tenant name"),
        (
            '[group.a]\nmembers = ["ann"]\n[group.b]\nmembers = ["ben", "ann"]',
            "policy.toml:4: tenant ann would be in groups a and b",
        ),
        ('[group.a]\nmembers = ["ann", "ann"]', "policy.toml:2: tenant ann would be in group a twice"),
        ('[group.a]\nmembers = ["local"]', "policy.toml:2: tenant local is the owner"),
        (RESERVATION.replace("gpus = 1\n", ""), "policy.toml:1: reservation lab has no gpus"),
        (RESERVATION.replace("gpus = 1", "gpus = 0"), "policy.toml:3: reservation.gpus = 0 is less"),
        (RESERVATION.replace("Tue", "Tus"), "policy.toml:4: 'tus' is no day of the week; did you mean tuesday?"),
        (RESERVATION.replace("UTC", "Europe/Berlni"), "policy.toml:5: there is no time zone 'Europe/Berlni'; did you"),
        (RESERVATION + 'modell = "A100"', "policy.toml:6: [reservation] has no key 'modell'; did you mean model?"),
        ("[budget.group.a]\nmonth = -5", "policy.toml:2: the amount -5 is negative"),
        ("[budget.group.a]\nmonth = 12.5", "policy.toml:2: budget.group.month = 12.5 is not an amount of money"),
        ('[budget.group.a]\nmonth = "12.1234567"', "policy.toml:2: '12.1234567' is not an amount of money"),
        ('[budget.group.a]\nday = "9"\nmonth = "8"', "policy.toml:1: group a would have 9.00  a day and 8.00"),
        ('[budget.group.a]\nweek = "9"', "policy.toml:2: [budget.group] has no key 'week'"),
        (
            '[budget.groups.a]\nday = "9"',
            "policy.toml:1: there is no table ['budget.groups']; did you mean budget.group?",
        ),
        ("[budget]\nx = 1", "policy.toml:2: there is no table ['budget.x']"),
        ("budget = 1", "policy.toml:1: there is no table ['budget']"),
    ],
)
def test_a_group_reservation_or_budget_with_a_mistake_is_refused_with_its_line(text: str, said: str) -> None:
    assert refused(text).startswith(said)


def test_groups_reservations_and_budgets_are_taken_as_they_stand_there() -> None:
    found = parse_policy(
        '[tenant]\nleases = 7\n[group.course]\nweight = 2\nmemory = "8GiB"\ngpu_time = "2h"\nmembers = ["ann"]\n'
        '[group."lab.2"]\n[budget.tenant.ann]\nday = 2\ntotal = "10.50"\n' + RESERVATION
    )
    assert found.given == {"tenant.leases": 7}
    assert found.declared == DeclaredRecord(
        groups={
            GroupId("course"): {"weight": 2, "memory_bytes": 8 * GIB, "gpu_seconds": 7200},
            GroupId("lab.2"): {},
        },
        members={TenantId("ann"): GroupId("course")},
        reservations={
            ReservationId("lab"): ReservationRecord(
                id=ReservationId("lab"),
                group=GroupId("course"),
                gpus=1,
                when="every Tue 10:00-12:00",
                zone="UTC",
            )
        },
        budgets={BudgetId("tenant/ann/day"): 2_000_000, BudgetId("tenant/ann/total"): 10_500_000},
    )
    assert (found.lines["group/lab.2"], found.lines["group/course/weight"]) == (8, 4)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet", "[tenant]", "[lease]\n[office]", "\ufeff"[:0]])
def test_an_empty_file_has_the_defaults(text: str) -> None:
    assert parse_policy(text) == PolicyLimits()


def test_a_line_is_found_however_the_key_is_written() -> None:
    found = parse_policy('tenant."leases" = 7\n[  office  ]\n\'queue\' = 2_000\n"leases"=0x10000 # many\n')
    assert [(path, found.lines[path]) for path in found.given] == [
        ("tenant.leases", 1),
        ("office.queue", 3),
        ("office.leases", 4),
    ]


def test_what_the_parts_of_an_office_are_given() -> None:
    found = parse_policy(
        '[lease]\ncores = 2\nhome = "64MiB"\n[tenant]\nleases = 5\ngpu_time = "10m"\nvolumes = 3\n'
        'requests_per_minute = 600\n[office]\nmemory = "4GiB"\nprocesses = 999\n'
    )
    assert found.caps() == LeaseCaps(cores=2, home_bytes=64 * MIB, office_memory_bytes=4 * GIB, office_processes=999)
    assert found.quota() == Quota(leases=5, gpu_seconds=600)
    policy = found.policy(Policy())
    assert (policy.quota_default, policy.volumes_tenant_max) == (Quota(leases=5, gpu_seconds=600), 3)
    assert (found.rates().requests_per_minute, found.rates().leases_per_hour) == (600, 3000)


def test_the_durations_of_an_office_are_its_policy() -> None:
    """Each by its key; those that the file does not name stay as they were."""
    values = {path: KEYS[path].least + 60 for path in DURATIONS}
    values["office.max_hold"] = 120
    found = parse_policy("[office]\n" + "".join(f'{path[7:]} = "{value}s"\n' for path, value in values.items()))
    policy = found.policy(Policy())
    assert {path: getattr(policy, field) for path, field in DURATIONS.items()} == {
        path: value * NS_PER_S for path, value in values.items()
    }
    assert policy.turn_least_ns == policy.max_hold_ns, "a further turn is no longer than a first one"
    short = Policy(max_hold_ns=90 * NS_PER_S, ttl_gpu_ns=7 * NS_PER_S)
    assert parse_policy('[office]\nttl_cores = "9s"\n').policy(short) == msgspec.structs.replace(
        PolicyLimits().policy(short), ttl_cpu_ns=9 * NS_PER_S
    )


def test_the_defaults_of_durations_are_those_of_the_policy() -> None:
    assert {path: KEYS[path].default for path in DURATIONS} == {
        path: getattr(Policy(), field) // NS_PER_S for path, field in DURATIONS.items()
    }
    assert Policy().ttl_max_ns == TTL_MAX_S * NS_PER_S
    assert PolicyLimits().policy(Policy()).turn_least_ns == Policy().turn_least_ns


def test_each_lowest_duration_gives_an_office_its_policy() -> None:
    text = "[office]\n" + "".join(f'{path[7:]} = "{KEYS[path].least}s"\n' for path in DURATIONS)
    parse_policy(text).policy(Policy())


def test_the_limits_of_users_are_those_of_the_shared_socket() -> None:
    found = parse_policy("[user]\nrequests_per_minute = 120\nlog_lines_per_minute = 7\n")
    assert found.shared() == SharedLimits(requests_per_minute_of_user=120, log_lines_per_minute_of_user=7)
    assert PolicyLimits().shared() == SharedLimits()


def test_the_walls_that_may_be_missing_are_those_that_the_isolation_asks_for() -> None:
    assert frozenset(WALLS) == {part.value for part in (SandboxPart.UID, SandboxPart.LANDLOCK, *MUST)}
    found = parse_policy('[lease]\nallow_missing = ["landlock", "net", "net"]')
    assert found.caps().allow_missing == ("net", "landlock")
    assert KEYS["lease.allow_missing"].shown(found.number("lease.allow_missing")) == "net, landlock"


def test_the_defaults_are_those_of_the_supervisor() -> None:
    """So that nothing of them has to be sent to a supervisor that a version without them has started."""
    assert PolicyLimits().caps() == LeaseCaps()
