"""``sublet burst`` from end to end: results, resumption, failures, Ctrl-C, listings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import jobs
from sublet.client.office import ensure_office
from tests.commands import run_sublet
from tests.integration.test_client import end_office
from tests.traces import PUT_AWAY_S, until

PATIENCE_S = 60.0 + PUT_AWAY_S
FREE = 30
"""Chunks of the slow ones that do not wait for a word."""
SCRIPT = """
import os, time
def square(x):
    return x * x
def fails(x):
    if x == 2:
        raise ValueError("two")
    return x
def slow(x):
    with open(LOG, "a") as log:
        log.write(f"{x}\\n")
    time.sleep(0.05)
    while x >= FREE and not os.path.exists(LOG + ".go"):
        time.sleep(0.01)
    return x
def size(file):
    return len(file.read())
LOG, FREE = "LOGFILE", FREECHUNKS
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bursts") / "home"
    ensure_office(folder, words=("up", "--foreground", "--host-gpus", "1x1GiB"))
    yield folder
    end_office(folder)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(SCRIPT.replace("LOGFILE", str(tmp_path / "log")).replace("FREECHUNKS", str(FREE)))
    return path


def command(home: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"SUBLET_HOME": str(home)}
    argv = [sys.executable, "-m", "sublet", "burst", *words]
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(home: Path, folder: Path, *words: str) -> tuple[int, str, str]:
    env = os.environ | {"SUBLET_HOME": str(home)}
    done = run_sublet("burst", *words, env=env, cwd=folder, timeout=PATIENCE_S)
    return done.status, done.out.decode(), done.err.decode()


def test_results_are_lines_of_json_and_the_same_command_finds_them_stored(home: Path, script: Path) -> None:
    words = ("work.py::square", "--over", "range(20)", "--want", "2", "--store", "64MiB", "--name", "squares")
    status, out, err = run(home, script.parent, *words)
    assert status == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [{"index": n, "result": n * n} for n in range(20)]
    assert "20 chunks done" in err
    assert err.rstrip().endswith("no lease left")
    again = run(home, script.parent, *words)
    assert again[:2] == (0, out)
    assert "20 of them by an earlier run" in again[2]
    status, listing, _ = run(home, script.parent, "ls", "--json")
    assert status == 0
    assert [one["name"] for one in json.loads(listing)] == ["squares"]
    shown = {}

    def is_counted() -> bool:
        status, said, err = run(home, script.parent, "show", "squares", "--json")
        assert status == 0, err
        shown.update(json.loads(said))
        return shown["results"] is not None

    until("the volume to be put away", is_counted, PUT_AWAY_S)
    assert (shown["results"], shown["leases"]) == (20, 0)


def test_failures_are_named_and_the_rest_is_done(home: Path, script: Path) -> None:
    inputs = script.parent / "items.jsonl"
    inputs.write_text("1\n2\n3\n")
    out = script.parent / "out"
    words = ("work.py::fails", "--over", "items.jsonl", "--out", "out", "--picture", "burst.svg", "--metrics", "m.prom")
    status, printed, err = run(home, script.parent, *words, "--store", "64MiB")
    assert (status, printed) == (1, "")
    assert "its function raised (ValueError: two)" in err
    assert [json.loads(line)["result"] for line in (out / "results.jsonl").read_text().splitlines()] == [1, 3]
    assert json.loads((out / "failures.jsonl").read_text())["index"] == 1
    assert (script.parent / "burst.svg").read_text().startswith("<svg")
    assert "sublet_chunks_done" in (script.parent / "m.prom").read_text()


def test_files_of_a_folder_are_inputs(home: Path, script: Path) -> None:
    folder = script.parent / "texts"
    folder.mkdir()
    (folder / "a").write_text("abc")
    (folder / "b").write_text("abcde")
    status, out, err = run(home, script.parent, "work.py::size", "--over", "texts", "--store", "64MiB")
    assert status == 0, err
    assert [json.loads(line)["result"] for line in out.splitlines()] == [3, 5]


FIRST_BYTE = """(module (memory (export "memory") 1)
  (func (export "init") (param i32) (result i32) (i32.const 0))
  (func (export "run") (param i32 i32) (result i32) (i32.const 0))
  (func (export "finalize") (result i64) (i64.const 1)))"""


@pytest.mark.needs("wasmtime")
def test_a_webassembly_module_runs_over_files(home: Path, script: Path) -> None:
    folder = script.parent / "texts"
    folder.mkdir()
    (folder / "a").write_text("abc")
    (folder / "b").write_text("xyz")
    (script.parent / "first.wat").write_text(FIRST_BYTE)
    words = ("first.wat", "--over", "texts", "--fuel", "1000", "--store", "64MiB")
    status, out, err = run(home, script.parent, *words)
    assert status == 0, err
    results = [json.loads(line)["result"] for line in out.splitlines()]
    assert [one["output"] for one in results] == ["a", "x"]
    (fuel,) = {one["fuel"] for one in results}
    with sublet.connect(home=home) as fabric:  # the last lease tells of it when it is torn down
        until("the fuel to be on the bill", lambda: 2 * fuel in [one.fuel for one in fabric.bill(by="label:job")])
    told = subprocess.run(
        [sys.executable, "-m", "sublet", "bill", "--by", "label:job"],
        env=os.environ | {"SUBLET_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "FUEL" in told.splitlines()[0]
    status, _, err = run(home, script.parent, "first.wat", "--over", "texts", "--entry", "nothing")
    assert status == 1
    assert "nothing" in err


def test_ctrl_c_keeps_what_is_stored_and_the_same_command_goes_on(home: Path, script: Path) -> None:
    log = script.parent / "log"
    log.touch()
    words = ("work.py::slow", "--over", "range(60)", "--want", "2", "--store", "64MiB", "--name", "slow")
    running = command(home, script.parent, *words)
    end_s = time.monotonic() + PATIENCE_S
    while len(log.read_text().splitlines()) < FREE:  # and from there on it does not go on
        assert time.monotonic() < end_s
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, err
    assert "the same command runs only what is missing" in err
    assert "no lease left" in err
    with sublet.connect(home=home) as fabric:
        assert [view for view in fabric.leases() if view.end is None and view.labels.get("job") == "slow"] == []
    before = len(log.read_text().splitlines())
    assert before < 60
    log.with_name("log.go").touch()
    status, out, err = run(home, script.parent, *words)
    assert status == 0, err
    assert [json.loads(line)["result"] for line in out.splitlines()] == list(range(60))
    ran = [int(line) for line in log.read_text().splitlines()]
    assert set(ran) == set(range(60))
    assert len(ran) < 60 + before, "what was stored is not executed again"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("work.py::square",), "--over is missing"),
        (("work.py::nothing", "--over", "range(3)"), "has no function nothing"),
        (("missing.py::f", "--over", "range(3)"), "there is no file"),
        (("work.py::square", "--over", "nowhere"), "there is no nowhere"),
        (("work.py::square", "--over", "range(3)", "--want", "0"), "--want"),
        (("work.py::square", "more", "--over", "range(3)"), "one word too many"),
        (("work.py::square", "--over", "range(3)", "--json"), "--json is for `ls` and `show`"),
        (("work.py::square", "--over", "range(3)", "--picture", "nowhere/a.svg"), "--picture: nowhere/a.svg cannot be"),
        (("work.py::square", "--over", "range(3)", "--metrics", "."), "--metrics: . cannot be written"),
        (("work.py::square", "--over", "range(3)", "--out", "work.py"), "--out: the folder work.py cannot be made"),
    ],
)
def test_what_makes_no_sense_is_refused_with_2(home: Path, script: Path, words: tuple[str, ...], text: str) -> None:
    status, out, err = run(home, script.parent, *words)
    assert (status, out) == (2, ""), err
    assert text in err


def test_files_that_cannot_be_written_at_the_end_are_named_and_no_result_is_lost(home: Path, script: Path) -> None:
    words = ("work.py::square", "--over", "range(3)", "--store", "64MiB", "--name", "unwritten")
    (script.parent / "full.svg").symlink_to("/dev/full")
    status, out, err = run(home, script.parent, *words, "--picture", "full.svg")
    assert (status, len(out.splitlines())) == (1, 3), err
    assert "3 chunks done" in err
    assert "--picture: the file could not be written: No space left on device" in err
    (script.parent / "out").mkdir()
    (script.parent / "out" / "results.jsonl").symlink_to("/dev/full")
    status, _, err = run(home, script.parent, *words, "--out", "out")
    assert status == 1
    assert "--out: the results could not be written: No space left on device" in err
    status, _, err = run(home, script.parent, *words, "--out", "other")
    assert status == 0, err
    assert "3 of them by an earlier run" in err


def test_more_cores_than_any_machine_has_is_refused_with_75(home: Path, script: Path) -> None:
    status, _, err = run(
        home, script.parent, "work.py::square", "--over", "range(3)", "--cores", "4000", "--store", "64MiB"
    )
    assert status == 75, err


def test_no_such_burst_is_said(home: Path, script: Path) -> None:
    status, _, err = run(home, script.parent, "show", "nothing")
    assert status == 1
    assert "there is no burst nothing" in err


def square(x: int) -> int:
    return x * x


def test_a_burst_that_stored_nothing_is_listed_and_other_programs_are_not(home: Path, script: Path) -> None:
    with sublet.connect(home=home) as fabric:
        assert list(jobs.map(square, range(4), want=1, name="unstored", fabric=fabric)) == [0, 1, 4, 9]
        with fabric.cpu(1, labels={"program": "notebook", "job": "a-notebook"}):
            pass
        keys = {"burst,unstored", "notebook,a-notebook"}
        until("both to be on the bill", lambda: keys <= {line.key for line in fabric.bill(by="label:program,job")})
    status, listing, err = run(home, script.parent, "ls", "--json")
    assert status == 0, err
    found = {one["name"]: one for one in json.loads(listing)}
    assert "a-notebook" not in found
    assert (found["unstored"]["leases"], found["unstored"]["volume"]) == (0, None)
    assert found["unstored"]["core_seconds"] > 0
    status, shown, err = run(home, script.parent, "show", "unstored", "--json")
    assert (status, json.loads(shown)["results"]) == (0, None), err
