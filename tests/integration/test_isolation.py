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

from sublet.supervisor.isolation import Part
from tests.integration.isolation_attempts import ATTEMPTS, Attempt

HERE: Final = Path(__file__).parent
KINDS: Final = ("root", "ordinary", "confined")
_FOUND: Final[dict[tuple[str, str], Any]] = {}


def stage(script: str, kind: str) -> Any:
    """What came of everything, once for each kind."""
    if kind == "root" and os.geteuid() != 0:
        pytest.skip("only root can play a supervisor of root")
    if (script, kind) not in _FOUND:
        command = [sys.executable, str(HERE / script), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        _FOUND[script, kind] = json.loads(done.stdout) if done.returncode == 0 else done.stderr
    found = _FOUND[script, kind]
    assert not isinstance(found, str), found
    return found


def walls_that_stand(attempt: Attempt, found: Any) -> set[str]:
    stand = {part.value for part in attempt.walls} & set(found["active"])
    if found["abi"] < attempt.landlock_abi:
        stand.discard(Part.LANDLOCK.value)
    return stand


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_attempt_gets_out_where_a_wall_is_said_to_stand(kind: str, name: str) -> None:
    found, attempt = stage("isolation_stage.py", kind), ATTEMPTS[name]
    result = found["results"][name]
    assert result["alive"], "the neighbour did not survive it"
    if result["control"] is not None:
        assert result["control"].startswith("GOT"), f"without walls it must succeed: {result['control']}"
    if attempt.walls and not walls_that_stand(attempt, found):
        for part in attempt.walls:
            [line] = [line for line in found["lines"] if line.startswith(f"{part.value} ")]
            assert "not active" in line or (part is Part.LANDLOCK and "(without" in line), line
        return
    assert result["guest"].startswith("refused"), result["guest"]


@pytest.mark.slow
def test_an_ordinary_user_is_told_what_he_lacks() -> None:
    found = stage("isolation_stage.py", "confined")
    assert set(found["missing"]) >= {"uid", "pid", "ipc", "mount", "net"}
    for part in ("userns", "pid", "ipc", "mount", "proc", "net", "uts"):
        [line] = [line for line in found["lines"] if line.startswith(f"{part} ")]
        assert "not active" in line
        assert "To mend:" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_most_attempts_have_a_control(kind: str) -> None:
    """Else this file would prove little."""
    results = stage("isolation_stage.py", kind)["results"]
    assert len(results) >= 40
    assert sum(result["control"] is not None for result in results.values()) >= 40
