"""The doctor says what is broken and how to mend it, and a check that fails does not keep the others from theirs."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.cli.doctor import SOCKET_PATH_MAX


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("SUBLET_HOME", str(folder))
    return folder


def findings(capsys: pytest.CaptureFixture[str], *, broken: bool) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json"]) == (1 if broken else 0)
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_machine_without_anything_of_ours_is_whole(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, broken=False)
    assert found["office"]["state"] == "note"
    assert found["journal"]["text"] == "none yet"
    assert not home.exists(), "looking changes nothing"
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "Nothing is broken."


def test_a_folder_that_others_may_write_is_broken_with_its_remedy(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    home.chmod(0o777)
    finding = findings(capsys, broken=True)["state folder"]
    assert finding["state"] == "broken"
    assert finding["do"] == f"Take that right away: chmod go-w {home}"


def test_a_file_in_the_place_of_the_folder_is_broken_and_the_rest_is_still_checked(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_text("a file")
    found = findings(capsys, broken=True)
    assert found["state folder"]["state"] == "broken"
    assert found["platform"]["state"] == "ok"
    assert main(["doctor"]) == 1
    assert "broken" in capsys.readouterr().out


def test_a_folder_of_somebody_else_is_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    assert "not to you" in findings(capsys, broken=True)["state folder"]["text"]


def test_a_journal_that_is_none_is_broken(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir(mode=0o700)
    (home / "journal.db").write_bytes(b"not a journal")
    finding = findings(capsys, broken=True)["journal"]
    assert "damaged" in finding["text"]
    assert "restore" in finding["do"]


def test_a_journal_from_a_newer_version_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sublet.broker.journal_schema import APPLICATION_ID, VERSION

    home.mkdir(mode=0o700)
    db = sqlite3.connect(home / "journal.db")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.execute("CREATE TABLE t (x)")
    db.close()
    assert f"version {VERSION + 1}" in findings(capsys, broken=True)["journal"]["text"]


def test_a_python_that_is_too_old_and_a_platform_that_is_none_are_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.cli.doctor.sys.version_info", (3, 10, 0))
    assert findings(capsys, broken=True)["Python"]["state"] == "broken"
    monkeypatch.undo()
    monkeypatch.setenv("SUBLET_HOME", str(home))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert findings(capsys, broken=True)["platform"]["state"] == "broken"


def test_a_wall_clock_that_nobody_set_is_noted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.cli.doctor.time.gmtime", lambda: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    assert findings(capsys, broken=False)["clock"]["state"] == "note"


def test_a_socket_path_that_is_too_long_is_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.cli.doctor.socket_path", lambda _: Path("/" + "x" * SOCKET_PATH_MAX))
    assert "107" in findings(capsys, broken=True)["socket"]["text"]


def test_a_slow_disk_is_noted(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.cli.doctor.SYNC_SLOW_S", 0.0)
    assert "faster disk" in findings(capsys, broken=False)["disk"]["do"]


def test_a_driver_that_does_not_answer_is_broken_and_none_at_all_is_noted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    def failing(code: int) -> None:
        def fail() -> None:
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(pynvml, "nvmlInit", fail)

    failing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert "no NVIDIA driver: host devices" in findings(capsys, broken=False)["GPU"]["text"]
    failing(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert findings(capsys, broken=True)["GPU"]["do"] == "See `nvidia-smi`."
