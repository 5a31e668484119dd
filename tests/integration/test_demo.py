"""`sublet demo`: what a newcomer sees first. It asserts what it shows, so that it runs is most of the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.cli.demo import notebook_step, play, training_step
from sublet.cli.demo.office import DemoOffice
from sublet.client.home import runtime_dir

pytestmark = pytest.mark.slow  # a notice of five seconds is waited for

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)  # half a minute where nothing else runs
def test_the_demo_is_one_page_ends_with_a_command_that_works_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Every step is there and every check passed; neither process, folder nor socket is left, the user's own state
    folder is not touched, and the last line is typed as it was printed."""
    temporary, own = tmp_path / "tmp", tmp_path / "own"
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary), "SUBLET_HOME": str(own), "SUBLET_TOKEN": "of-another-office"}
    env["XDG_STATE_HOME"] = str(own)
    env["PATH"] = "/usr/local/bin:/usr/bin:/bin"  # nothing of ours, and in the folder of the environment's project
    script = Path(sys.executable).parent / "sublet"
    done = subprocess.run(
        [script, "demo", "--out", str(tmp_path / "out")],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    steps = re.findall(r"^(\d+)/(\d+)  ", done.stdout, re.MULTILINE)
    assert steps == [(str(n + 1), str(len(steps))) for n in range(len(steps))]
    assert len(steps) >= 5
    assert len(lines) <= 45, done.stdout
    assert [line for line in lines if len(line) > 100 and str(tmp_path) not in line] == []
    for words in (
        "ended, with the reason: preempted",
        "its variables back, and went on at row",
        "both processes were killed",
        "at place 1 of the queue",
        "his late renewal was refused",
        "same leases, deadlines and queue",
        "is complete",
        "credits, summed by user as by lease",
    ):
        assert words in done.stdout.replace("\n     ", " "), done.stdout
    checks = re.search(r"All (\d+) checks passed", done.stdout)
    assert checks is not None
    assert int(checks[1]) > 30
    assert "\x1b" not in done.stdout
    assert list(temporary.iterdir()) == []
    assert not own.exists()
    for name in ("five-minute-gpu.html", "five-minute-gpu.ipynb"):
        assert f"     {tmp_path / 'out' / name}" in done.stdout
    page = (tmp_path / "out" / "five-minute-gpu.html").read_text()
    for word in ("GpuSessionEnded", "The bill", "9 of 9 cells", "2 leases"):
        assert word in page
    env = env | {"SUBLET_HOME": str(tmp_path / "first")}
    del env["SUBLET_TOKEN"]
    try:
        first = subprocess.run(["sh", "-c", lines[-1]], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (first.returncode, first.stdout) == (0, "hello from a leased device\n"), first.stderr
    finally:
        subprocess.run([script, "down", "--now"], env=env, capture_output=True, timeout=60, check=True)


def test_verbose_prints_every_check_with_what_it_found(tmp_path: Path) -> None:
    """The steps with two users and their commands; the notebook's checks are printed by the same line of code."""
    temporary, where = tmp_path / "tmp", tmp_path / "where"
    temporary.mkdir()
    where.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NOTEBOOK, "--verbose"],
        env=os.environ | {"TMPDIR": str(temporary)},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = re.search(r"All (\d+) checks passed", done.stdout)
    assert checks is not None
    assert int(checks[1]) == len(re.findall(r"^   \+ ", done.stdout, re.MULTILINE)) > 20
    for word in ("status 76", "expired", "offers 1GiB instead of 2GiB", "SIGKILL", "audit log is whole", "END"):
        assert word in done.stdout.replace("\n     ", " ")
    pids = re.findall(r"pids? (\d+)", done.stdout)
    assert len(pids) >= 5
    assert not [pid for pid in pids if is_of_demo(pid, temporary)]
    assert list(temporary.iterdir()) == []
    assert list(where.iterdir()) == [], "no folder is made for a notebook that is not run"


def is_of_demo(pid: str, temporary: Path) -> bool:
    """Its number may be another process's by now: this one is told by the folder in its environment."""
    try:
        return os.fsencode(temporary) in Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("where", ["/proc/nothing", "a-file"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    monkeypatch.setattr(play, "Report", None)  # nothing is printed, and nothing started
    assert main(["demo", "--out", where]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"sublet: the folder {where} for the executed notebook cannot be written")
    assert "--out" in said.err.splitlines()[1]


def test_a_demo_that_does_not_hold_says_so_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another device than the steps expect, the first check fails."""
    offices: list[DemoOffice] = []

    class Other(DemoOffice):
        def __init__(self, folder: Path, host_gpus: str) -> None:
            super().__init__(folder, "1x8GiB")
            offices.append(self)

    monkeypatch.setattr(play, "DemoOffice", Other)
    monkeypatch.setattr(notebook_step, "can_play", lambda: False)
    monkeypatch.setattr(training_step, "can_play", lambda: False)
    assert main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("sublet: a check of the demo failed: ")
    assert "ok   " not in said.out
    assert not offices[0].home.exists()
    assert not runtime_dir(offices[0].home).exists(), "the folder of its socket"


WITHOUT_NOTEBOOK = """
import sys
from sublet.cli import main
from sublet.cli.demo import notebook_step, training_step
notebook_step.can_play = training_step.can_play = lambda: False
sys.exit(main(["demo", *sys.argv[1:]]))
"""


MOMENTS = [pytest.param(["-c", WITHOUT_NOTEBOOK, "--verbose"], "place 1", id="while a request waits in the queue")]
if os.environ.get("SUBLET_CRASH_ALL"):  # it takes as long again
    words = ["-m", "sublet", "demo", "--verbose", "--out", "{out}"]
    MOMENTS.append(pytest.param(words, "[4/9]", id="while the notebook runs"))


@pytest.mark.parametrize(("words", "at"), MOMENTS)
def test_ctrl_c_ends_the_demo_and_its_office(tmp_path: Path, words: list[str], at: str) -> None:
    """In the middle of it. Nothing of it runs on, and nothing is left but the folder that was asked for."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-u", *(word.format(out=tmp_path / "out") for word in words)],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if at in line:
            break
    left = _descendants(process.pid)
    assert left
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    until = time.monotonic() + 60
    while time.monotonic() < until and any(os.path.exists(f"/proc/{pid}") for pid in left):
        time.sleep(0.05)  # who was orphaned is waited for by another
    assert [pid for pid in left if os.path.exists(f"/proc/{pid}")] == []
    assert list(temporary.iterdir()) == []


def _descendants(pid: int) -> set[int]:
    parents = {}
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(found.name)] = int((found / "stat").read_text().rpartition(")")[2].split()[1])
    below = {pid}
    for _ in parents:
        more = {one for one, parent in parents.items() if parent in below} - below
        if not more:
            break
        below |= more
    return below - {pid}
