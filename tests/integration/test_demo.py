"""`sublet demo`: what a newcomer sees first. It asserts what it shows, so that it runs is most of the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.cli.demo import story
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
    done = subprocess.run([sys.executable, "-m", "sublet", "demo"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert time.monotonic() - started < 40
    assert re.findall(r"^(\d)/9  ", done.stdout, re.MULTILINE) == list("123456789")
    for word in (
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
    assert main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("sublet: the demo cannot say that")
    assert "ok   " not in said.out
    assert not offices[0].home.exists()
    assert not runtime_dir(offices[0].home).exists(), "the folder of its socket"


def test_ctrl_c_ends_the_demo_and_its_office(tmp_path: Path) -> None:
    """In the middle of the story, while somebody waits in the queue."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "sublet", "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid = ""
    for line in process.stdout:
        pid = pid or "".join(re.findall(r"answers \(pid (\d+)\)", line))
        if "place 1" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert pid
    assert not os.path.exists(f"/proc/{pid}")
    assert list(tmp_path.iterdir()) == []
