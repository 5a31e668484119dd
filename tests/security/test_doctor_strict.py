"""`sublet doctor --strict` fails where a machine would not hold several tenants, and each line says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.cli import doctor as module
from sublet.cli import main
from sublet.cli.doctor_strict import NEEDED, judged, strict_checks
from sublet.client.home import runtime_text
from tests.security.conftest import Place
from tests.traces import LETS_GO

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="what belongs to another user only root can make")
STRANGER = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sublet-strict-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str, str]]:
    """What the ordinary checks find: all that is needed is there."""
    found = dict.fromkeys(NEEDED, ("ok", "there", ""))
    monkeypatch.setattr(module, "_checks", lambda: {s: lambda s=s: found[s] for s in found})
    monkeypatch.setattr("sublet.cli.doctor_strict.strict_checks", dict)
    return found


@pytest.mark.parametrize("subject", NEEDED)
def test_each_thing_that_tenants_need_fails_it_by_itself(
    subject: str, checks: dict[str, tuple[str, str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--strict"]) == 0
    assert "would hold" in capsys.readouterr().out
    checks[subject] = ("note", "missing here", "Do this.")
    assert main(["doctor"]) == 0, "on one's own machine it is worth knowing, and no more"
    capsys.readouterr()
    assert main(["doctor", "--strict"]) == 1
    said = capsys.readouterr().out
    assert f"missing here; {NEEDED[subject]}" in " ".join(said.split())
    assert "Do this." in said


def test_what_is_not_needed_stays_a_note() -> None:
    found = judged([("GPU", "note", "none", ""), ("disk", "ok", "much", "")], lambda *line: line)
    assert found == [("GPU", "note", "none", ""), ("disk", "ok", "much", "")]


def test_every_subject_of_the_table_is_one_that_the_doctor_has() -> None:
    if sys.platform == "linux":
        assert set(NEEDED) <= set(module._checks())


def run(home: Path, **env: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "sublet", "doctor", "--strict", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "SUBLET_HOME": str(home), **env},
    )
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)}


def test_a_supervisor_that_was_started_before_an_upgrade_is_named(
    place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It outlives the office, and guests are walled in by it."""
    monkeypatch.setenv("SUBLET_HOME", str(place.home))
    with place.ben.block("1B") as lease:
        assert lease.start(["true"], cwd="/").wait(timeout=60) == 0
        check = strict_checks()["strict: running program"]
        assert check()[0] == "ok"
        with monkeypatch.context() as patched:
            patched.setattr("sublet.node.agent.starting.package_folder", lambda: str(folder))
            (folder / "sublet").mkdir()
            (folder / "sublet" / "program.py").touch()
            assert check()[0] == "broken", "another installation"
        with monkeypatch.context() as patched:
            patched.setattr("sublet.cli.doctor_strict.time.time", lambda: 0.0)
            state, text, *do = check()
        assert state == "broken", "changed since"
        assert "was started by an earlier program" in text
        assert "sublet down" in do[0]


@needs_root
def test_folders_of_others_are_named_with_the_remedy(folder: Path) -> None:
    his = folder / "his"
    his.mkdir()
    os.chown(his, STRANGER, STRANGER)
    status, found = run(his / "state", HOME=str(his), PYTHONPATH=str(his))
    assert status == 1
    parents = found["strict: state folder's parents"]
    assert (parents["state"], str(his) in parents["text"]) == ("broken", True)
    assert "SUBLET_HOME" in parents["do"]
    home = found["strict: HOME"]
    assert (home["state"], "sudo -H" in home["do"]) == ("broken", True)
    files = found["strict: program files"]
    assert (files["state"], str(his) in files["text"]) == ("broken", True)
    assert found["strict: environment"]["state"] == "note"


SPOILED: Final = r"""
import json, subprocess, sys
def doctor():
    argv = [sys.executable, "-m", "sublet", "doctor", "--strict", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)}
subprocess.run(["sh", "-c", sys.argv[1]], check=True)
before = doctor()
groups = before[1]["guests: memory"]["do"].removeprefix("Mount them: ")
rights = before[1]["state folder"]["do"].partition(": ")[2]
for remedy in (groups, rights, *sys.argv[2:]):
    subprocess.run(["sh", "-c", remedy], check=True)
print(json.dumps([*before, *doctor()]))
"""
"""Spoils a mount namespace of its own, asks, does what it is told to, and asks again."""


@needs_root
@pytest.mark.needs("unshare")
def test_a_spoiled_machine_is_broken_line_by_line_until_the_remedies_are_typed(folder: Path) -> None:
    home = folder / "spoiled"
    env = {**os.environ, "SUBLET_HOME": str(home), "H": str(home), "R": runtime_text(str(home))}
    spoil = (
        "umount -R -l /sys/fs/cgroup; set -e; mkdir $H; mount -t tmpfs -o size=16m,mode=777 small $H;"
        "printf '[tenant]\\nleases = 900\\n[office]\\nleases = 1000\\n' > $H/policy.toml;"
        "head -c 15500k /dev/zero > $H/file; mkdir -p $R; chown 65534 $R"
    )
    remedies = ("sed -i s/900/400/ $H/policy.toml", "rm $H/file", "chown root $R && chmod 700 $R")
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", LETS_GO + 'exec "$@"', "sh", sys.executable, "-c", SPOILED, spoil, *remedies],
            capture_output=True,
            text=True,
            env=env,
        )
    finally:
        shutil.rmtree(env["R"], ignore_errors=True)
    assert done.returncode == 0, done.stderr
    status, before, status_after, after = json.loads(done.stdout)
    broken = {name: one for name, one in before.items() if one["state"] == "broken"}
    assert status == 1
    assert broken.keys() >= {
        *(f"guests: {part}" for part in ("ending a guest as a whole", "memory", "pids", "cpu")),
        *("strict: reserve of the journal", "strict: limits of tenants", "state folder", "socket", "disk"),
    }
    assert all(one["do"] for one in broken.values()), "each has its remedy"
    assert {name for name in broken if after[name]["state"] == "broken"} <= {"disk"}, "which is small still"
    assert [after[subject]["state"] for subject in strict_checks()] == ["ok"] * len(strict_checks())
    broken_still = [one for one in after.values() if one["state"] == "broken"]
    assert status_after == (1 if broken_still else 0)
    assert all(one["do"] for one in broken_still)
