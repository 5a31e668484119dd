"""Offices of ordinary users: two of them and one device; and what the other real-process tests show, once without root.

Played by root, who gives every right away but that of reading: an interpreter may lie where other users cannot reach.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.node.agent.starting import package_folder
from sublet.wire.zygote import COLD_VARIABLE
from tests.traces import end_office, until

pytestmark = [
    pytest.mark.needs("setpriv"),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root"),
]

ROOT: Final = Path(__file__).parents[2]
ADA: Final = 65534
BEN: Final = 65533
PATIENCE_S: Final = 60.0
READS: Final = "-all,+dac_read_search"
FEW_ROUNDS: Final = {"SUBLET_KILL_ROUNDS": "10", "SUBLET_RACE_ROUNDS": "12", "SUBLET_RACE_SEED": "6"}
"""Of kills, in which each victim is met, and of the race, in which leases end in each way."""
MANY: Final = os.environ.get("SUBLET_ORDINARY_ROUNDS", "")
ROUNDS: Final = {"SUBLET_KILL_ROUNDS": MANY, "SUBLET_RACE_ROUNDS": MANY} if MANY else FEW_ROUNDS
FILES: Final = ("test_run.py", "test_supervisor_life.py", "test_kill_rounds.py", "test_revoke_race.py")
SHARED: Final = (
    "test_supervisor_life or books_agree or last_holder"
    " or (test_run and (output or exit or signal or released or deadline))"
)
"""Those of their tests that an ordinary user's office is to pass."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with a folder and an office of his own."""

    uid: int
    home: Path

    def words(self, *argv: str) -> list[str]:
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return ["setpriv", *ids, f"--inh-caps={READS}", f"--ambient-caps={READS}", *argv]

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.home),
            "SUBLET_HOME": str(self.home / "office"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "PYTHONPATH": package_folder(),
            COLD_VARIABLE: os.environ.get(COLD_VARIABLE, ""),
        }

    def sublet(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(sys.executable, "-m", "sublet", *argv),
            env=self.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sublet("status", "--json").stdout)
        return found


@contextlib.contextmanager
def user(uid: int) -> Iterator[User]:
    home = Path(tempfile.mkdtemp(prefix="sublet-user-", dir="/tmp"))  # below tmp_path nobody else could come near it
    os.chown(home, uid, uid)
    found = User(uid, home)
    try:
        yield found
    finally:
        found.sublet("down", "--now")
        for runtime in offices_below(home):
            end_office(runtime)
        shutil.rmtree(home, ignore_errors=True)


def offices_below(home: Path) -> Iterator[Path]:
    """The runtime folders of offices whose state lies in here. Another test may run as the same user just now."""
    for folder, _, _ in os.walk(home):
        runtime = Path(folder) / "run"
        if runtime.exists():
            yield runtime


@pytest.fixture
def ada() -> Iterator[User]:
    with user(ADA) as found:
        yield found


@pytest.fixture
def ben() -> Iterator[User]:
    with user(BEN) as found:
        yield found


def test_of_two_users_with_one_device_one_has_it_and_the_other_is_told_who(ada: User, ben: User) -> None:
    card = f"1x4GiB@pair{os.getpid()}"
    for one in (ada, ben):
        done = one.sublet("up", "--host-gpus", card)
        assert done.returncode == 0, done.stderr
    mine = ada.sublet("run", "--gpu", "1GiB", "--", "id", "-u")
    assert (mine.returncode, mine.stdout.strip()) == (0, str(ADA))
    refused = ben.sublet("run", "--gpu", "1GiB", "--wait", "0", "--", "id", "-u")
    assert refused.returncode == 75, refused
    assert refused.stdout == "", "nothing of it has run"
    told = refused.stderr + ben.sublet("status").stdout + ben.sublet("doctor").stdout
    assert f"{ada.home}/office" in told, told
    assert "nobody" in told
    assert ada.sublet("down", "--now").returncode == 0

    def is_his() -> bool:
        done = ben.sublet("run", "--gpu", "1GiB", "--wait", "0", "--", "id", "-u")
        return (done.returncode, done.stdout.strip()) == (0, str(BEN))

    until("the device is free for the other", is_his, PATIENCE_S)


@pytest.mark.timeout(900)  # whole files of tests
def test_an_office_without_root_keeps_what_roots_keeps(ada: User) -> None:
    """The same tests, with everything that they start: runs, ends, kills at chance moments, the race for a device."""
    names = [str(ROOT / "tests" / "integration" / name) for name in FILES]
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={ada.home}/tests", "-k", SHARED]
    done = subprocess.run(
        ada.words(sys.executable, "-m", "pytest", *words, *names),
        env=ada.env | ROUNDS | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
    )
    last_words = [path.read_text() for path in sorted(ada.home.rglob("supervisor.log"))]
    assert done.returncode == 0, "\n".join([done.stdout[-6000:], *last_words])
    assert " passed" in done.stdout
