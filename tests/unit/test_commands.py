"""A command in a fork of the loaded command line is what a command with a start of its own is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Ended, run_sublet
from tests.traces import plain_env


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("config", "path"),
        ("config", "set", "vram", "2GiB"),
        ("config", "set", "vram", "no size"),
        ("status",),
        ("stop",),
        ("no-such-command",),
        ("run", "--no-such-option"),
    ],
    ids=" ".join,
)
def test_a_forked_command_says_and_does_what_a_started_one_does(words: tuple[str, ...], tmp_path: Path) -> None:
    """In a folder of its own, with an environment of its own, and a mask for the files it makes."""
    env = plain_env() | {"SUBLET_HOME": "home", "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "90"}
    told, left = [], []
    for name in ("forked", "started"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "forked":
            told.append(run_sublet(*words, env=env, cwd=folder, umask=0o027))
        else:
            command = [sys.executable, "-m", "sublet", *words]
            done = subprocess.run(
                command, env=env, cwd=folder, umask=0o027, stdin=subprocess.DEVNULL, capture_output=True
            )
            told.append(Ended(done.returncode, done.stdout, done.stderr.replace(b"started", b"forked")))
        left.append({str(path.relative_to(folder)): oct(path.stat().st_mode) for path in folder.rglob("*")})
    forked, started = told
    assert forked == started._replace(out=started.out.replace(b"/started/", b"/forked/"))
    assert left[0] == left[1]


def test_a_command_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    env = plain_env() | {"SUBLET_HOME": str(tmp_path / "home")}
    before = os.listdir("/proc/self/fd")
    with pytest.raises(subprocess.TimeoutExpired):
        run_sublet("top", "--json", "--interval", "1h", env=env, timeout=0)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "but the line to the one that forks"
