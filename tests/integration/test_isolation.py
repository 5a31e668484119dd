"""What a tenant's guest cannot do: every way out is tried in a guest, and without walls, where it must succeed.

Three kinds of supervisor are played: one of root, one of an ordinary user, and one of an ordinary user on a machine
that allows nobody a user namespace. Where a wall is not to be had, what is said of it (the lines of ``sublet doctor``)
must say so; where it is said to be active, the attempt must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.node.sandbox import SandboxPart
from tests.cases import case
from tests.integration.isolation_attempts import ATTEMPTS

HERE: Final = Path(__file__).parent


def by_group(*kinds: str) -> list[Any]:
    """All tests of one kind in one process of the suite: what they look at is played once, not once in each."""
    return [pytest.param(kind, marks=pytest.mark.xdist_group(f"isolation-{kind}")) for kind in kinds]


KINDS: Final = by_group("root", "ordinary", "confined")
LIVING: Final = by_group("root", "ordinary")
_FOUND: Final[dict[tuple[str, str], Any]] = {}


def stage(script: str, kind: str) -> Any:
    """What came of everything, once for each kind."""
    if kind == "root" and os.geteuid() != 0:
        pytest.skip("only root can play a supervisor of root")
    if (script, kind) not in _FOUND:
        command = [sys.executable, str(HERE / script), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
        _FOUND[script, kind] = json.loads(done.stdout) if done.returncode == 0 else done.stderr
    found = _FOUND[script, kind]
    assert not isinstance(found, str), found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_attempt_gets_out_where_a_wall_is_said_to_stand(kind: str) -> None:
    found = stage("isolation_stage.py", kind)
    for name, attempt in ATTEMPTS.items():
        with case(name):
            result = found["results"][name]
            assert result["alive"], "the neighbour did not survive it"
            if result["control"] is not None:
                assert result["control"].startswith("GOT"), f"without walls it must succeed: {result['control']}"
            if not attempt.walls or attempt.standing(found["active"], found["abi"]):
                assert result["guest"].startswith("refused"), result["guest"]
                continue
            for part in attempt.walls:
                [line] = [line for line in found["lines"] if line.startswith(f"{part.value} ")]
                assert "not active" in line or (part is SandboxPart.LANDLOCK and "(without" in line), line


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_group("confined"))
def test_an_ordinary_user_is_told_what_he_lacks(kind: str) -> None:
    found = stage("isolation_stage.py", kind)
    assert set(found["missing"]) >= {"uid", "pid", "ipc", "mount", "net"}
    for part in ("userns", "pid", "ipc", "mount", "proc", "net", "uts"):
        [line] = [line for line in found["lines"] if line.startswith(f"{part} ")]
        assert "not active" in line
        assert "To fix:" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_most_attempts_have_a_control(kind: str) -> None:
    """Else this file would prove little."""
    results = stage("isolation_stage.py", kind)["results"]
    assert len(results) >= 40
    assert sum(result["control"] is not None for result in results.values()) >= 40


LIVES: Final = {
    "statuses": [0, 7, 255, -9, -15, -6, -1],
    "a_term_ends_a_command_that_does_nothing_about_it": [-15, True],
    "a_term_to_the_group_comes_once": [1],
    "a_kill_of_the_stand_in_ends_everything": [True, -9, True],
    "the_end_of_the_command_ends_what_it_left": [3, True],
    "the_end_of_the_supervisor_ends_everything": [True, "", True],
    "the_guest_ends_its_output": "said",
    "the_terminal_is_the_commands": [True, True, 9],
    "a_failing_step_is_named": [
        [126, "file system\0002"],  # no such folder
        *([126, "file system\00040"] for _ in range(2)),  # a link is not followed, at the end or on the way
        [126, "file system\00019"],  # a file is not a device
        [126, "exec\0002"],
    ],
    "python_runs": [0, "/dev/pts/0 ['0', 'ptmx'] True\n"],
    "hidden_folders_stay_hidden": ["workstate/given", "given"],
    "left": "nothing is left",
}
"""What must come of each scene of ``isolation_life.py``, where every wall can be had."""


@pytest.mark.slow
@pytest.mark.parametrize("scene", LIVES)
@pytest.mark.parametrize("kind", LIVING)
def test_a_guest_lives_and_ends_within_its_walls(kind: str, scene: str) -> None:
    assert stage("isolation_life.py", kind)[scene] == LIVES[scene]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIVING)
def test_what_a_guest_keeps_is_in_its_own_folder(kind: str) -> None:
    code, said, owner = stage("isolation_life.py", kind)["the_own_folder_stays_and_the_rest_does_not"]
    assert code == 0
    assert said == ["kept", str(owner), "guest", "0", "0077"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIVING)
def test_a_guest_has_the_devices_of_its_lease_and_no_others(kind: str) -> None:
    given, not_given = stage("isolation_life.py", kind)["a_device_of_the_lease_is_there"]
    assert set(given) <= {0}
    assert set(not_given) <= {1}
