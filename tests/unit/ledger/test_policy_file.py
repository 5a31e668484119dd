"""The operator's limits as a file: every key, and every way in which a file is wrong."""

from __future__ import annotations

import json

import pytest

from sublet.broker.policy import Policy
from sublet.broker.policy_file import KEYS, Key, Limits, Unit, parse_policy
from sublet.broker.records import Quota
from sublet.broker.shared_socket import SharedLimits
from sublet.errors import InvalidRequest
from sublet.settings import FILE_BYTES_MAX
from sublet.supervisor.isolation.abilities import Part
from sublet.supervisor.isolation.plan import _MUST as MUST
from sublet.values import GIB, MIB
from sublet.wire.caps import WALLS, LeaseCaps


def written(key: Key, value: int) -> str:
    """As TOML."""
    match key.unit:
        case Unit.COUNT:
            return str(value)
        case Unit.SIZE:
            return f'"{value}B"'
        case Unit.SECONDS:
            return f'"{value}s"'
        case Unit.WALLS:
            names = [name for bit, name in enumerate(WALLS) if value >> bit & 1]
            return json.dumps([*names, "more than there are"] if value >> len(WALLS) else names)


def refused(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_policy(text)
    return f"{caught.value.message}. {caught.value.do}"


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_each_key_is_taken_from_the_line_that_sets_it(key: Key) -> None:
    value = max(key.least, key.default or 0, 2)
    found = parse_policy(f"# limits\n\n[{key.table}]\n{key.name} = {written(key, value)}\n")
    assert found.value(key.path) == value
    assert found.source(key.path) == "policy.toml line 4"
    others = [path for path in KEYS if path != key.path]
    assert all(found.value(path) == KEYS[path].default and found.source(path) == "default" for path in others)


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
@pytest.mark.parametrize("wrong", ["true", "1.5", "[4]", "{}", "1979-05-27", '"many"', '""', "nan", '"٤"', '"-1GiB"'])
def test_a_value_of_another_kind_is_refused_with_its_line(key: Key, wrong: str) -> None:
    said = refused(f"[{key.table}]\n{key.name} = {wrong}")
    assert said.startswith("policy.toml:2: "), said
    assert key.name in said or key.path in said


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_size_without_a_unit_and_a_number_with_one_are_refused(key: Key) -> None:
    wrong = "8" if key.unit is not Unit.COUNT else '"8GiB"'
    assert refused(f"[{key.table}]\n{key.name} = {wrong}").startswith("policy.toml:2: ")


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
@pytest.mark.parametrize("huge", [10**12, 2**63, 10**40])
def test_a_huge_value_is_refused(key: Key, huge: int) -> None:
    value = huge if key.unit is Unit.COUNT else huge * 10**9
    assert refused(f"[{key.table}]\n{key.name} = {written(key, value)}").startswith("policy.toml:")


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.least > 0], ids=lambda key: key.path)
def test_a_value_below_what_runs_is_refused_with_what_would_do(key: Key) -> None:
    said = refused(f"[{key.table}]\n{key.name} = {written(key, key.least - 1)}")
    assert said.startswith("policy.toml:2: ")
    if key.least > 1 or key.unit is Unit.COUNT:
        assert "less than what runs needs" in said
        assert key.says in said


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.unit is Unit.COUNT], ids=lambda key: key.path)
def test_a_negative_number_is_refused(key: Key) -> None:
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
        ("\n[tenant.leases]\nx = 1", "policy.toml:2: tenant.leases = "),
        ("tenant.leases = true", "policy.toml:1: tenant.leases = True is not a whole number"),
        ("tenant = {leases = true}", "policy.toml:1: tenant.leases = True is not a whole number"),
        ("[tenant]\nqueue = 11000", "policy.toml:2: tenant.queue (11000) is above office.queue (10000)"),
        ('[lease]\nhome = "1GiB"', "policy.toml:2: lease.home (1GiB) is above lease.memory_per_core (512MiB)"),
        ("[lease]\ncores = 4\n[office]\ncores = 2", "policy.toml:4: lease.cores (4) is above office.cores (2)"),
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


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet", "[tenant]", "[lease]\n[office]", "\ufeff"[:0]])
def test_an_empty_file_has_the_defaults(text: str) -> None:
    assert parse_policy(text) == Limits()


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


def test_the_limits_of_users_are_those_of_the_shared_socket() -> None:
    found = parse_policy("[user]\nrequests_per_minute = 120\nlog_lines_per_minute = 7\n")
    assert found.shared() == SharedLimits(requests_per_minute_of_user=120, log_lines_per_minute_of_user=7)
    assert Limits().shared() == SharedLimits()


def test_the_walls_that_may_be_missing_are_those_that_the_isolation_asks_for() -> None:
    assert frozenset(WALLS) == {part.value for part in (Part.UID, Part.LANDLOCK, *MUST)}
    found = parse_policy('[lease]\nallow_missing = ["landlock", "net", "net"]')
    assert found.caps().allow_missing == ("net", "landlock")
    assert KEYS["lease.allow_missing"].shown(found.number("lease.allow_missing")) == "net, landlock"


def test_the_defaults_are_those_of_the_supervisor() -> None:
    """So that nothing of them has to be sent to a supervisor that a version without them has started."""
    assert Limits().caps() == LeaseCaps()
