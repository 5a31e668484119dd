"""Sessions as people use them: the command, and kernels with ``SUBLET_SESSION``, on a real office."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import shell_on, stage_on
from tests.traces import plain_env, until

pytestmark = pytest.mark.slow  # real kernels: one second each


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office"), "1x2GiB") as stage:
        yield stage


class Session:
    """``sublet session`` beside the office of the stage."""

    def __init__(self, stage: OfficeStage) -> None:
        self._env = {**plain_env(), **stage.office.env(), "SUBLET_HOME": str(stage.office.home)}

    def __call__(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sublet", "session", *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == status, done
        return done.stdout if status == 0 else done.stderr

    def view(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("show", name, "--json"))
        return found

    def state(self, name: str) -> str:
        return str(self.view(name)["state"])


def test_a_session_goes_from_kernel_to_kernel_and_has_one_lease_at_a_time(stage: OfficeStage, tmp_path: Path) -> None:
    """Started by the command; taken over by the first cell; refused to a second kernel; found again when the kernel was
    killed; resumed by the next one, which has its name and volume; rested; ended."""
    session = Session(stage)
    assert session("ls") == "No sessions.\n  Start one: sublet session start NAME --vram 8GiB\n"
    assert "Session thesis is active" in session("start", "thesis", "--vram", "256MiB", "--ttl", "1m")
    first = session.view("thesis")
    assert "there is a session thesis already" in session("start", "thesis", "--vram", "1GiB", status=2)
    with shell_on(stage, tmp_path / "a", SUBLET_SESSION="thesis") as one:
        answer = one.run("%%gpu\nimport os\nlease = os.environ['SUBLET_LEASE']")
        assert answer["error"] == "", answer
        assert one.value("lease") == first["lease"], "the lease that was there is taken over"
        held = session.view("thesis")
        assert held["leases"][-1]["epoch"] > first["leases"][-1]["epoch"], "under a new epoch"
        assert one.run("%gpu name")["out"].strip() == held["volume"]
        with shell_on(stage, tmp_path / "b", SUBLET_SESSION="thesis") as two:
            answer = two.run("%%gpu\n1")
            assert "session thesis is held by" in answer["said"], answer
            one.kill()
            until("the lease of a kernel that was killed is over", lambda: session.state("thesis") == "resting")
            answer = two.run("%%gpu\nimport os\nlease = os.environ['SUBLET_LEASE']")
            assert answer["error"] == "", answer
            went_on = session.view("thesis")
            assert two.value("lease") == went_on["lease"] != first["lease"]
            assert [lease["reason"] for lease in went_on["leases"]] == ["holder_gone", ""]
            until("nothing runs in it", lambda: not session.view("thesis")["busy"])
            assert "Session thesis is resting" in session("rest", "thesis")
            assert "last lease" in session("explain", "thesis")
            assert "Session thesis is ended" in session("end", "thesis")
            until("its kernel is told", lambda: "session thesis has ended" in two.run("%%gpu\n1")["said"])
    assert session.view("thesis")["bill"]["leases"] == 2
    assert session("ls").startswith("No sessions.")
    assert "there is no session nothing" in session("show", "nothing", status=1)


def test_a_session_that_waits_says_its_place_and_leaves_the_queue(stage: OfficeStage, tmp_path: Path) -> None:
    """The device is held by another session; a new one waits, is told why, and is not granted within its wait."""
    session = Session(stage)
    session("start", "first", "--vram", "1GiB", "--ttl", "5m")
    said = session("start", "second", "--vram", "1GiB", "--wait", "0", status=75)
    assert "GPU unavailable" in said
    assert session.state("second") == "resting"
    assert "last asked" in session("explain", "second")
    with shell_on(stage, tmp_path / "c", SUBLET_SESSION="second") as shell:
        shell.ask("%%gpu\n1")
        until("the cell waits", lambda: session.view("second")["position"] == 1)
        assert session.state("second") == "waiting"
        assert "waiting, place 1" in session("ls")
        session("end", "first")
        assert shell.answer()["error"] == ""
        assert session.state("second") == "active"
    session("end", "second")
