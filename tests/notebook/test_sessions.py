"""Sessions as people use them: the command, and kernels with ``SUBLET_SESSION``, on a real office."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.cli import main
from sublet.errors import NotFound
from sublet.studio import FabricOffice, NotebookSession, SessionState, open_sessions
from sublet.studio import Session as StudioSession
from sublet.studio.records import Started, Terms
from sublet.values import GIB
from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import shell_on, stage_on
from tests.traces import plain_env, until

pytestmark = pytest.mark.slow  # real kernels: one second each


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office"), "1x2GiB") as stage:
        yield stage


class Session:
    """``sublet session`` beside the office of the stage, in this process, and what it would show."""

    def __init__(self, stage: OfficeStage, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._env = {**plain_env(), **stage.office.env(), "SUBLET_HOME": str(stage.office.home)}
        self.fabric = sublet.connect(home=stage.office.home)
        self._sessions = open_sessions(FabricOffice(self.fabric), home=str(stage.office.home))
        patch.setenv("SUBLET_HOME", str(stage.office.home))
        patch.setattr("sublet.client.fabric.connect", lambda: self.fabric)

    def __call__(self, *words: str, status: int = 0) -> str:
        self._capsys.readouterr()
        assert main(["session", *words]) == status
        said = self._capsys.readouterr()
        return said.out if status == 0 else said.err

    def of_its_own(self, *words: str) -> str:
        """The same in a process, which ends when the command is done."""
        done = subprocess.run(
            [sys.executable, "-m", "sublet", "session", *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done
        return done.stdout

    def view(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("show", name, "--json"))
        return found

    def newest_terms(self) -> Terms:
        """Of the session that was started last, whatever became of it."""
        return [one.record for one in self._sessions.entries(0) if isinstance(one.record, Started)][-1].terms

    def now(self, name: str) -> StudioSession:
        self._sessions.reconcile()
        return self._sessions.find(name)

    def state(self, name: str) -> SessionState | None:
        """None where there is no session of this name."""
        self._sessions.reconcile()
        return next((one.state for one in self._sessions.all() if one.name == name), None)

    def is_idle(self, name: str) -> bool:
        lease = self.now(name).lease
        return lease is not None and self.fabric.lease(lease.id).idle


def ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def session(
    stage: OfficeStage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    made = Session(stage, capsys, monkeypatch)
    yield made
    made.fabric.close()


def test_a_session_goes_from_kernel_to_kernel_and_has_one_lease_at_a_time(
    stage: OfficeStage, session: Session, tmp_path: Path
) -> None:
    """Started by the command; taken over by the first cell; refused to a second kernel; found again when the kernel was
    killed; resumed by the next one, which has its name and volume; rested; ended."""
    assert session("ls") == "No sessions.\n  Start one: sublet session start NAME --vram 8GiB\n"
    assert "Session thesis is active" in session.of_its_own("start", "thesis", "--vram", "256MiB", "--ttl", "10m")
    first = session.view("thesis")
    session("start", "later", "--vram", "256MiB", "--later")
    assert session.view("later")["tenant"] == "local"
    session("end", "later")
    assert "there is a session thesis already" in session("start", "thesis", "--vram", "1GiB", status=2)
    with shell_on(stage, tmp_path / "a", SUBLET_SESSION="thesis") as one:
        answer = one.run("%%gpu\nimport os\nlease = os.environ['SUBLET_LEASE']")
        assert answer["error"] == "", answer
        assert one.value("lease") == first["lease"], "the lease that was there is taken over"
        held = session.view("thesis")
        assert held["leases"][-1]["epoch"] > first["leases"][-1]["epoch"], "under a new epoch"
        assert one.run("%gpu name")["out"].strip() == held["volume"]
        assert "saved at" in one.run("%gpu checkpoint")["out"]
        where = {"volume": held["volume"], "number": 1}
        until("what was saved is on record", lambda: session.view("thesis")["checkpoint"] == where)
        with shell_on(stage, tmp_path / "b", SUBLET_SESSION="thesis") as two:
            answer = two.run("%%gpu\n1")
            assert "session thesis is held by" in answer["said"], answer
            one.kill()
            until(
                "the lease of a kernel that was killed is over", lambda: session.state("thesis") is SessionState.RESTING
            )
            answer = two.run("%%gpu\nimport os\nlease = os.environ['SUBLET_LEASE']")
            assert answer["error"] == "", answer
            went_on = session.view("thesis")
            assert two.value("lease") == went_on["lease"] != first["lease"]
            assert [lease["reason"] for lease in went_on["leases"]] == ["holder_gone", ""]
            until("nothing runs in it", lambda: session.is_idle("thesis"))
            assert "Session thesis is resting" in session("rest", "thesis")
            assert "last lease" in session("explain", "thesis")
            assert "Session thesis is ended" in session("end", "thesis")
            until("its kernel is told", lambda: "session thesis has ended" in two.run("%%gpu\n1")["said"])
    ended = session.view("thesis")
    whole = ended["bill"]
    assert ended["checkpoint"] == where, "and stays there"
    assert whole["leases"] == 2
    lines = json.loads(session("bill", "thesis", "--json"))
    assert [one["end"] for one in lines if one["cell"] is None] == ["holder_gone", "released"]
    for what, unit in (("cost", 10**6), ("gpu_seconds", 10**9), ("held_seconds", 10**9)):
        assert sum(round(one[what] * unit) for one in lines) == round(whole[what] * unit), what
    assert session("bill", "thesis", "--csv").startswith("session,name,cell,lease,")
    assert session("ls").startswith("No sessions.")
    assert "there is no session nothing" in session("show", "nothing", status=1)
    with pytest.raises(NotFound, match="there is no session s-0123456789ab"):  # a cell began one of that name
        NotebookSession("s-0123456789ab", session.fabric, Terms(vram=GIB))


def test_a_session_that_waits_says_its_place_and_goes_on_when_it_is_granted(
    stage: OfficeStage, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is held by another; a new session is not granted within its wait, and rests. The first cell of a name
    that was never used starts a session with what it asks for: it waits, is seen to wait and why, and runs when the
    device is free. Where its program is suspended, no command takes a lease beside it. Names that cannot be and
    sessions that are not there are refused."""
    held = session.fabric.gpu(min_vram="1GiB", ttl="5m")
    with held.activity():
        said = session("start", "second", "--vram", "1GiB", "--wait", "0", status=75)
        assert "GPU unavailable" in said
        assert "Session second is there and rests" in said
        said = session("resume", "second", "--wait", "1s", status=75)
        assert "queued, place 1" in said
        assert re.search(r"place 1 in the queue, with about .+ to go: .*`--wait \d+m`", said)
        assert "more than any node has" in session("start", "big", "--vram", "80GiB", status=75)
        assert session.state("big") is None, "it was never started"
        assert "last asked" in session("show", "second")
        with monkeypatch.context() as patch:
            patch.setattr("sublet.studio.Sessions.acquire", ctrl_c)
            assert "Session third is there and rests" in session("start", "third", "--vram", "1GiB", status=130)
        assert "It saved nothing" in session("end", "third")
        assert session.state("second") is SessionState.RESTING
        assert "last asked" in session("explain", "second")
        before = session("ls", "--all")
        for word in ("☃", "", " ", "s-0123456789ab", "x" * 200):
            assert "there is no session" in session("rest", word, "--now", status=1)
            assert "there is no session" in session("end", word, "--now", status=1)
        for word in ("☃ ", "", " ", "../up", "x" * 200, "s-0123456789ab"):
            assert session("start", word, "--vram", "1GiB", "--later", status=2)
        for words, said in {
            ("--vram", "1KiB"): "less than 1MiB",
            ("--vram", "1GiB", "--or-model", "any"): "--or-model needs --model",
            ("--vram", "1GiB", "--at-least", "1GiB"): "--at-least needs --smaller-ok",
            ("--vram", "1GiB", "--smaller-ok", "--at-least", "2GiB"): "--at-least is more than --vram",
        }.items():
            assert said in session("start", "wrong", *words, status=2)
        assert session("ls", "--all") == before, "and nothing was changed"
        with shell_on(stage, tmp_path / "c", SUBLET_SESSION="fresh") as shell:
            assert "more than any node has" in shell.run("%%gpu --vram 80GiB\n1")["said"]
            assert session.state("fresh") is None, "what can never be granted starts none"
            assert "no device here is called 'H900'" in shell.run("%%gpu --model H900 --smaller-ok\n1")["said"]
            asked = session.newest_terms()
            assert (asked.model, asked.or_smaller) == ("H900", True), "all that the first cell asks for"
            shell.ask("%%gpu --vram 512MiB\n1")
            until("the cell waits", lambda: session.state("fresh") is SessionState.WAITING)
            until("it has a place", lambda: session.view("fresh")["position"] == 1)
            assert "waiting, place 1" in session("ls")
            assert session.now("fresh").terms.vram == GIB // 2, "what the cell asks for"
            fresh = session.view("fresh")["volume"]
            held.release()
            assert shell.answer()["error"] == ""
            assert session.state("fresh") is SessionState.ACTIVE
            assert shell.run("%gpu name")["out"].strip() == fresh
            assert session.state("second") is SessionState.RESTING
            assert shell.run("%%gpu\nturns = iter([10, 20])\nx = next(turns)")["error"] == ""  # it cannot be saved
            with session.fabric.gpu(min_vram="1GiB", ttl="5m"):
                until("the idle session yields", lambda: session.state("fresh") is SessionState.RESTING)
                said = session("explain", "fresh")
                assert "goes on with the suspended program" in said
                assert "session resume" not in said
                assert "is suspended, and process" in session("resume", "fresh", "--wait", "0", status=2)
                assert "is suspended, and would be lost" in session("end", "fresh", status=2)
            assert shell.run("%%gpu\nx = next(turns)")["error"] == ""
            assert shell.value("x") == 20
            assert session.state("fresh") is SessionState.ACTIVE
    session("end", "second")
    assert session.now("second").is_over
    session("end", "fresh", "--now")
