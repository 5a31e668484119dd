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
from sublet.cli.demo import notebook_scene, story, training_scene
from sublet.cli.demo.child import DemoOffice
from sublet.client.home import runtime_dir

pytestmark = pytest.mark.slow  # about ten seconds: a notice of five is waited for


def test_the_demo_holds_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Every act is there, every claim held, and neither process, folder nor socket is left; the user's own state folder
    is not touched."""
    temporary, own = tmp_path / "tmp", tmp_path / "own"
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary), "SUBLET_HOME": str(own), "SUBLET_TOKEN": "of-another-office"}
    env["XDG_STATE_HOME"] = str(own)
    started = time.monotonic()
    words = [sys.executable, "-m", "sublet", "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert time.monotonic() - started < 180  # under a minute where nobody else works
    acts = re.findall(r"^(\d+)/(\d+)  ", done.stdout, re.MULTILINE)
    assert acts == [(str(n + 1), str(len(acts))) for n in range(len(acts))]
    assert len(acts) >= 10
    for word in (
        "Rerun this cell to reacquire",
        "restored what was saved and went on at row",
        "2 leases, device time",
        "status 76",
        "nothing left of either",
        "and not a line of its output was lost",
        "place 1",
        "preempted",
        "offers 1GiB instead of 2GiB",
        "SIGKILL",
        "same deadlines",
        "The audit chain",
    ):
        assert word in done.stdout.replace("\n     ", " ")
    claims = re.search(r"(\d+) claims checked", done.stdout)
    assert claims is not None
    assert int(claims[1]) == len(re.findall(r"^ok   ", done.stdout, re.MULTILINE)) > 15
    assert "\x1b" not in done.stdout
    for pid in re.findall(r"pid (\d+)", done.stdout):
        assert not os.path.exists(f"/proc/{pid}")
    assert list(temporary.iterdir()) == []
    assert not own.exists()
    page = (tmp_path / "out" / "five-minute-gpu.html").read_text()
    for word in ("GpuSessionEnded", "The bill", "9 of 9 cells", "2 leases"):
        assert word in page
    assert (tmp_path / "out" / "five-minute-gpu.ipynb").exists()


def test_a_demo_that_does_not_hold_says_so_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another device than the story tells of, the first claim is false."""
    offices: list[DemoOffice] = []

    class Other(DemoOffice):
        def __init__(self, folder: Path, host_gpus: str) -> None:
            super().__init__(folder, "1x8GiB")
            offices.append(self)

    monkeypatch.setattr(story, "DemoOffice", Other)
    monkeypatch.setattr(notebook_scene, "can_play", lambda: False)
    monkeypatch.setattr(training_scene, "can_play", lambda: False)
    assert main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("sublet: the demo cannot say that")
    assert "ok   " not in said.out
    assert not offices[0].home.exists()
    assert not runtime_dir(offices[0].home).exists(), "the folder of its socket"


WITHOUT_NOTEBOOK = """
import sys
from sublet.cli import main
from sublet.cli.demo import notebook_scene, training_scene
notebook_scene.can_play = training_scene.can_play = lambda: False
sys.exit(main(["demo"]))
"""


MOMENTS = [pytest.param(["-c", WITHOUT_NOTEBOOK], "place 1", id="while somebody waits in the queue")]
if os.environ.get("SUBLET_CRASH_ALL"):  # it takes as long again
    words = ["-m", "sublet", "demo", "--out", "{out}"]
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
    until = time.monotonic() + 20
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
