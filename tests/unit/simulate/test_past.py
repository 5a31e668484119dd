"""What an office's journal says of its past is a workload that can be run again on other hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.errors import InvalidRequest
from sublet.office.journal.journal import Journal
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.commands import Command
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import Now
from sublet.simulate import replay
from sublet.simulate.past import read_journal
from sublet.simulate.replay import ModelGpus, Replay, ReplayHardware
from sublet.simulate.workload import Cell, WorkloadSession
from sublet.values import Tier

SESSIONS = [
    WorkloadSession("a", 0.0, (Cell(0, 3, 1, 2.0),), 10.0, tenant="ana", pays_priority=True),
    WorkloadSession("b", 1.0, (Cell(0, 20, 2, 4.0),), 40.0, tenant="ben", tier=Tier.BATCH),
    WorkloadSession("c", 2.0, (Cell(0, 1, 1, 1.0, shared=True),), 40.0, tenant="ana"),
]


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of an office with three GPUs, in which these sessions ran."""
    return record(tmp_path, monkeypatch, SESSIONS, ReplayHardware(gpus=4, per_node=4, vram_gib=16.0))


def record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: list[WorkloadSession], hardware: ReplayHardware
) -> Path:
    """A backup of the journal of an office with this hardware, in which these sessions ran."""
    with Journal.open(tmp_path / "home", wall_ns=0) as journal:
        journal.recover()

        class Recorded(Ledger):
            def handle(self, command: Command, now: Now) -> Outcome:
                outcome = super().handle(command, now)
                if outcome.events:
                    journal.commit(outcome.events, now)
                return outcome

        monkeypatch.setattr(replay, "Ledger", Recorded)
        Replay(sessions, hardware).run()
        monkeypatch.undo()
        journal.backup(tmp_path / "past.db")
    return tmp_path / "past.db"


def test_the_past_comes_back_as_it_was(past: Path) -> None:
    """When, who, how much, in which tier, for how long and with what priority; and the hardware there was."""
    found, hardware = read_journal(past)
    assert hardware == ReplayHardware(gpus=4, per_node=4, vram_gib=16.0)
    assert [(one.start_min, one.owner, one.tier) for one in found] == [
        (0.0, "t-ana", Tier.INTERACTIVE),
        (1.0, "t-ben", Tier.BATCH),
        (2.0, "t-ana", Tier.INTERACTIVE),
    ]
    assert [one.pays_priority for one in found] == [True, False, False]
    assert [cell for one in found for cell in one.cells] == [cell for one in SESSIONS for cell in one.cells]


def test_models_of_the_past_and_preferences_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = (ModelGpus(gpus=1, model="A100", vram_gib=40.0),)
    hardware = ReplayHardware(gpus=2, model="T4", vram_gib=16.0, beside=beside, per_node=2)
    cells = (Cell(0, 3, 1, 2.0, model="A100|T4"), Cell(0, 3, 1, 30.0))
    sessions = [WorkloadSession(f"s{number}", float(number), (cell,), 10.0) for number, cell in enumerate(cells)]
    past = record(tmp_path, monkeypatch, sessions, hardware)
    found, known = read_journal(past)
    assert known == hardware
    assert [session.cells[0].model for session in found] == ["A100|T4", None]
    assert main(["simulate", "--journal", str(past), "--gpus", "2"]) == 2, "of which model?"
    assert main(["simulate", "--journal", str(past), "--gpus", "1xT4-16GiB,1xA100-40GiB"]) == 0


def test_one_card_less_is_asked_on_the_command_line(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--journal", str(past), "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["results"][0]
    assert (asked["gpus"], asked["start_within"]["at_once"]) == (4, 1.0)
    assert main(["simulate", "--journal", str(past), "--gpus", "2", "--json"]) == 0
    fewer = json.loads(capsys.readouterr().out)["results"][0]
    assert fewer["cells"] == 3
    assert fewer["start_within"]["at_once"] < 1.0


def test_a_file_that_is_no_journal_is_refused(past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None, text, one that was changed, and one of an office in which nothing ran."""
    text = tmp_path / "text.db"
    text.write_text("nothing")
    with Journal.open(tmp_path / "new", wall_ns=0) as journal:
        journal.recover()
        journal.backup(tmp_path / "new.db")
    with pytest.raises(InvalidRequest, match="no lease with a GPU has ended"):
        read_journal(tmp_path / "new.db")
    changed = tmp_path / "changed.db"
    changed.write_bytes(past.read_bytes().replace(b'"t-ben"', b'"t-bem"'))
    for path, says in ((tmp_path / "none.db", "is no file"), (text, "journal"), (changed, "does not hold")):
        assert main(["simulate", "--journal", str(path)]) != 0
        assert says in capsys.readouterr().err
