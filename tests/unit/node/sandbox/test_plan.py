"""Which walls, in which order, and what is refused. All of it from tables; nothing is built here."""

from __future__ import annotations

import itertools

import pytest

from sublet.errors import InvalidRequest, Unsupported
from sublet.node.sandbox import landlock
from sublet.node.sandbox.abilities import Abilities, PartFinding, SandboxPart
from sublet.node.sandbox.carried import from_text, to_text
from sublet.node.sandbox.enter import _DO
from sublet.node.sandbox.plan import (
    Ids,
    SandboxPlan,
    SandboxPolicy,
    SandboxProfile,
    SandboxRefusal,
    SandboxStep,
    Wish,
    plan,
)

WISH = Wish(folder="/lease/own", tenant="ada", ids=Ids(70001, 70001))
ALL = frozenset(SandboxPart)


def abilities(parts: frozenset[SandboxPart] = ALL, *, abi: int = 7) -> Abilities:
    findings = {part: PartFinding(part in parts, "" if part in parts else "it said no") for part in SandboxPart}
    abi = abi if SandboxPart.LANDLOCK in parts else 0
    return Abilities(findings=findings, is_root=SandboxPart.UID in parts, landlock_abi=abi)


def planned(
    parts: frozenset[SandboxPart] = ALL, wish: Wish = WISH, policy: SandboxPolicy | None = None, *, abi: int = 7
) -> SandboxPlan:
    made = plan(SandboxProfile.TENANT, abilities(parts, abi=abi), wish, policy)
    assert isinstance(made, SandboxPlan), made
    return made


def test_a_local_guest_only_loses_descriptors() -> None:
    made = plan(SandboxProfile.LOCAL, abilities(frozenset()), WISH)
    assert isinstance(made, SandboxPlan)
    assert made.steps == (SandboxStep.DESCRIPTORS,)
    assert not made.forks


ROOT = (
    *(
        SandboxStep.INIT,
        SandboxStep.NAMESPACES,
        SandboxStep.LOOPBACK,
        SandboxStep.HOST_NAME,
        SandboxStep.ROOT,
        SandboxStep.COMMAND,
        SandboxStep.LIMITS,
        SandboxStep.BOUNDING,
    ),
    *(
        SandboxStep.UID,
        SandboxStep.NO_NESTED,
        SandboxStep.NO_NEW_PRIVS,
        SandboxStep.LANDLOCK,
        SandboxStep.KEYRING,
        SandboxStep.SYSTEM_CALLS,
        SandboxStep.CAPABILITIES,
    ),
    SandboxStep.DESCRIPTORS,
)
EVERY_NAME = frozenset(part.value for part in SandboxPart)
ANYTHING = SandboxPolicy(allow_missing=EVERY_NAME)


@pytest.mark.parametrize(
    ("lacking", "policy", "steps"),
    [
        (set(), SandboxPolicy(), ROOT),
        (
            {SandboxPart.UID},
            SandboxPolicy(),
            (SandboxStep.USER_NS, *(step for step in ROOT if step is not SandboxStep.UID)),
        ),
        (set(), SandboxPolicy(network="host"), tuple(step for step in ROOT if step is not SandboxStep.LOOPBACK)),
        ({SandboxPart.USER_NS}, SandboxPolicy(), tuple(step for step in ROOT if step is not SandboxStep.NO_NESTED)),
        (
            {SandboxPart.UTS, SandboxPart.CGROUP_NS},
            SandboxPolicy(),
            tuple(step for step in ROOT if step is not SandboxStep.HOST_NAME),
        ),
        ({SandboxPart.LANDLOCK}, SandboxPolicy(), tuple(step for step in ROOT if step is not SandboxStep.LANDLOCK)),
        (
            {SandboxPart.PID},
            ANYTHING,
            tuple(step for step in ROOT if step not in (SandboxStep.INIT, SandboxStep.COMMAND, SandboxStep.NO_NESTED)),
        ),
        (
            ALL - {SandboxPart.LANDLOCK, SandboxPart.NO_NEW_PRIVS},
            ANYTHING,
            (
                *(SandboxStep.LIMITS, SandboxStep.BOUNDING, SandboxStep.NO_NEW_PRIVS, SandboxStep.LANDLOCK),
                *(SandboxStep.KEYRING, SandboxStep.CAPABILITIES, SandboxStep.DESCRIPTORS),
            ),
        ),
        (
            ALL,
            ANYTHING,
            (
                SandboxStep.LIMITS,
                SandboxStep.BOUNDING,
                SandboxStep.KEYRING,
                SandboxStep.CAPABILITIES,
                SandboxStep.DESCRIPTORS,
            ),
        ),
    ],
)
def test_the_steps_and_their_order(
    lacking: set[SandboxPart], policy: SandboxPolicy, steps: tuple[SandboxStep, ...]
) -> None:
    assert planned(ALL - lacking, policy=policy).steps == steps


MUST = (
    SandboxPart.PID,
    SandboxPart.IPC,
    SandboxPart.MOUNT,
    SandboxPart.PROC,
    SandboxPart.NET,
    SandboxPart.NO_NEW_PRIVS,
    SandboxPart.SECCOMP,
)


@pytest.mark.parametrize("part", MUST)
def test_a_wall_that_must_hold_and_cannot_is_a_refusal_that_names_it(part: SandboxPart) -> None:
    refusal = plan(SandboxProfile.TENANT, abilities(ALL - {part}), WISH)
    assert isinstance(refusal, SandboxRefusal)
    assert refusal.part is part
    assert part.value in refusal.message
    assert "it said no" in refusal.message
    assert f'in policy.toml: [lease] allow_missing = ["{part.value}"]' in refusal.do
    assert isinstance(refusal.error(), Unsupported)


@pytest.mark.parametrize("part", MUST)
def test_the_operator_may_allow_that_it_is_missing_and_the_plan_says_so(part: SandboxPart) -> None:
    made = planned(ALL - {part}, policy=SandboxPolicy(allow_missing=frozenset({part.value})))
    assert made.missing == (part,)


def test_a_part_that_is_none_is_not_allowed_to_be_missing() -> None:
    with pytest.raises(InvalidRequest, match="'nett'"):
        SandboxPolicy(allow_missing=frozenset({"nett", "pid"}))


@pytest.mark.parametrize(
    ("lacking", "part"),
    [
        ({SandboxPart.UID, SandboxPart.USER_NS}, SandboxPart.UID),
        ({SandboxPart.MOUNT, SandboxPart.LANDLOCK}, SandboxPart.MOUNT),
        ({SandboxPart.PID, SandboxPart.PROC}, SandboxPart.PID),
    ],
)
def test_what_stands_in_for_what(lacking: set[SandboxPart], part: SandboxPart) -> None:
    refusal = plan(SandboxProfile.TENANT, abilities(ALL - lacking), WISH)
    assert isinstance(refusal, SandboxRefusal)
    assert refusal.part is part


@pytest.mark.parametrize(
    "lacking",
    [{SandboxPart.UID}, {SandboxPart.USER_NS}, {SandboxPart.LANDLOCK}, {SandboxPart.UTS}, {SandboxPart.CGROUP_NS}],
)
def test_what_may_be_missing_without_leave(lacking: set[SandboxPart]) -> None:
    assert planned(ALL - lacking).missing == ()


def test_without_a_file_system_of_its_own_landlock_must_hold() -> None:
    refusal = plan(
        SandboxProfile.TENANT,
        abilities(ALL - {SandboxPart.MOUNT, SandboxPart.PROC, SandboxPart.LANDLOCK}),
        WISH,
        SandboxPolicy(allow_missing=frozenset({"mount"})),
    )
    assert isinstance(refusal, SandboxRefusal)
    assert refusal.part is SandboxPart.LANDLOCK


def test_a_network_of_the_host_is_not_missing() -> None:
    assert planned(ALL - {SandboxPart.NET}, policy=SandboxPolicy(network="host")).missing == ()
    assert not planned(policy=SandboxPolicy(network="host")).landlock_tcp


def test_landlock_refuses_tcp_where_the_network_could_not_be_parted() -> None:
    assert planned(ALL - {SandboxPart.NET}, policy=SandboxPolicy(allow_missing=frozenset({"net"}))).landlock_tcp
    assert not planned().landlock_tcp


def test_every_combination_is_either_refused_or_has_every_wall_that_must_hold() -> None:
    """All 4096 machines there can be."""
    for size in range(len(SandboxPart) + 1):
        for parts in itertools.combinations(SandboxPart, size):
            made = plan(SandboxProfile.TENANT, abilities(frozenset(parts)), WISH)
            whole = set(MUST) <= set(parts) and ({SandboxPart.UID, SandboxPart.USER_NS} & set(parts))
            assert isinstance(made, SandboxPlan) is bool(whole), parts
            anything = plan(SandboxProfile.TENANT, abilities(frozenset(parts)), WISH, ANYTHING)
            assert isinstance(anything, SandboxPlan)
            assert list(anything.steps) == [step for step in SandboxStep if step in anything.steps]
            assert (
                (SandboxStep.INIT in anything.steps)
                == (SandboxStep.COMMAND in anything.steps)
                == (SandboxPart.PID in parts)
            )


def test_every_step_can_be_done() -> None:
    assert set(_DO) == set(SandboxStep)


def test_as_root_a_tenant_without_a_number_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="user number"):
        plan(SandboxProfile.TENANT, abilities(), Wish(folder="/lease/own"))


def test_a_folder_comes_before_what_lies_in_it() -> None:
    wish = Wish(folder="/a/b/c/own", ids=Ids(1, 1), readable=("/a/b/page", "/a"), writable=("/a/b/block",))
    paths = [bind.path for bind in planned(wish=wish).binds]
    for path, above in itertools.combinations(paths, 2):
        assert not above.startswith(f"{path}/") or paths.index(path) < paths.index(above)
    assert [bind.path for bind in planned(wish=wish).binds if bind.writable] == ["/a/b/block"]


def test_a_writable_folder_within_another_is_not_put_up_again() -> None:
    """The outer one is the guest's, who may have put a link in its place."""
    wish = Wish(folder="/lease/own", ids=Ids(1, 1), writable=("/lease/block", "/lease/block/staging"))
    assert [bind.path for bind in planned(wish=wish).binds if bind.writable] == ["/lease/block"]


@pytest.mark.parametrize(
    ("readable", "hidden", "covers"),
    [
        ((), ("/var/lib/office",), ()),
        (("/var/lib",), ("/var/lib/office",), ("/var/lib/office",)),
        (("/var/lib/office",), ("/var/lib/office",), ()),
        (("/var/libel",), ("/var/lib",), ()),
        (("/",), ("/people/ada", "/state"), ("/state", "/people/ada")),
        ((), ("/etc/office",), ("/etc/office",)),
    ],
)
def test_what_is_hidden_is_covered_only_where_it_would_show(
    readable: tuple[str, ...], hidden: tuple[str, ...], covers: tuple[str, ...]
) -> None:
    wish = Wish(folder="/lease/own", ids=Ids(1, 1), readable=readable, hidden=hidden)
    assert planned(wish=wish).covers == covers


def test_no_private_folder_is_in_the_rules_where_it_is_not_private() -> None:
    made = planned(ALL - {SandboxPart.MOUNT, SandboxPart.PROC}, policy=ANYTHING)
    assert made.writes == ("/lease/own",)
    assert not made.binds
    assert not {"/dev/pts", "/dev/ptmx", "/dev/shm", "/tmp"} & {*made.writes, *made.nodes}


def test_processes_are_counted_by_the_kernel_only_where_no_group_does() -> None:
    assert planned().processes_max == SandboxPolicy().processes_max
    assert planned(wish=Wish(folder="/x", ids=Ids(1, 1), counted=True)).processes_max == 0


@pytest.mark.parametrize(
    ("abi", "fs", "net", "scopes"),
    [
        (1, 0x1FFF, 0, 0),
        (2, 0x3FFF, 0, 0),
        (3, 0x7FFF, 0, 0),
        (4, 0x7FFF, 3, 0),
        (5, 0xFFFF, 3, 0),
        (6, 0xFFFF, 3, 3),
        (9, 0xFFFF, 3, 3),
    ],
)
def test_landlock_is_asked_only_for_what_its_version_knows(abi: int, fs: int, net: int, scopes: int) -> None:
    assert landlock.handled_fs(abi) == fs
    assert landlock.handled_net(abi, no_tcp=True) == net
    assert landlock.handled_net(abi, no_tcp=False) == 0
    assert landlock.handled_scopes(abi) == scopes


def test_doctor_has_a_line_for_each_part() -> None:
    lines = abilities().lines()
    assert [line.split()[0] for line in lines] == [part.value for part in SandboxPart]
    assert all("not active" not in line for line in lines)


def test_doctor_says_why_not_and_what_mends_it() -> None:
    for line in abilities(frozenset()).lines():
        assert "not active, it said no" in line
        assert "To fix: " in line


def test_doctor_says_what_an_old_landlock_lacks() -> None:
    [line] = [line for line in abilities(abi=3).lines() if line.startswith("landlock ")]
    assert "version 3 (without TCP ports, device calls, signals and abstract sockets" in line
    [line] = [line for line in abilities(abi=7).lines() if line.startswith("landlock ")]
    assert line.endswith("active, version 7")


@pytest.mark.parametrize(
    "lacking", [set(), {SandboxPart.UID}, {SandboxPart.LANDLOCK}, {SandboxPart.PID, SandboxPart.MOUNT}]
)
def test_a_plan_that_is_carried_is_the_same_plan(lacking: set[SandboxPart]) -> None:
    wish = Wish(
        folder="/lease/own", ids=Ids(7, 8), readable=("/data \u00e4",), devices=("/dev/nvidia0",), hidden=("/usr/x",)
    )
    made = planned(ALL - lacking, wish, SandboxPolicy(allow_missing=EVERY_NAME, network="host", tmp_bytes=5))
    assert from_text(to_text(made)) == made


def test_half_a_plan_is_none() -> None:
    text = to_text(planned())
    for broken in (text.replace('"steps"', '"step"'), text.replace('"ids"', '"id"'), text[:-1], "{}", "[]", ""):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            from_text(broken)
