"""Whole notebooks with real kernels and a real office: run, killed at any point, preempted, stopped, gone on with."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import sublet
from sublet.cli import main
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.errors import InvalidRequest
from sublet.notebook.batch import detached
from sublet.notebook.batch.job_states import JobState
from sublet.notebook.batch.jobs import Job, JobSpec, find_job, make_job
from sublet.notebook.batch.kernels import python_of
from sublet.notebook.batch.progress import JobProgress
from sublet.notebook.batch.runner import Runner
from sublet.notebook.example import Neighbour
from sublet.values import NS_PER_S

pytestmark = [
    pytest.mark.slow,  # real kernels: one second each
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"),
]
PATIENCE_S = 180.0
V4: Any = nbformat.v4


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    before = os.environ.get("SUBLET_HOME")
    os.environ["SUBLET_HOME"] = str(made)
    ensure_office(made, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)
    os.environ.pop("SUBLET_HOME")
    if before is not None:
        os.environ["SUBLET_HOME"] = before


@pytest.fixture(autouse=True)
def _no_loop_is_left() -> Iterator[None]:
    """nbclient and tornado ask for the thread's loop; ours are closed by ``asyncio.run``."""
    yield
    asyncio.set_event_loop(None)


def write(path: Path, *cells: str) -> Path:
    made = V4.new_notebook()
    for source in cells:
        tags = ["parameters"] if source.startswith("# defaults") else []
        made.cells.append(V4.new_code_cell(source, metadata={"tags": tags} if tags else {}))
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    return path


def texts(path: Path) -> list[str]:
    """What each cell says, all of its outputs as one text."""
    found = []
    for cell in nbformat.read(path, as_version=4).cells:  # type: ignore[no-untyped-call]
        said = ""
        for output in cell.outputs:
            said += output.get("text", "") or output.get("data", {}).get("text/plain", "")
        found.append(said)
    return found


def until(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing came of: {what}")


def job_of(
    folder: Path, *cells: str, lease: str = "cells", kernel: str = "", background: bool = False, **asked: Any
) -> Job:
    path = write(folder / "work.ipynb", *cells)
    spec = JobSpec(
        notebook=str(path),
        folder=str(folder),
        name="work",
        kernel=kernel,
        lease=lease,
        asked=asked,
        label=f"nb-{os.urandom(4).hex()}",
        waits_its_turn=background,
    )
    return make_job(spec, path.read_bytes(), len(cells), wall_ns=0)


# --------------------------------------------------------------------------------------------------------------- run


def test_a_notebook_runs_with_parameters_on_a_device_and_is_written_with_its_bill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a person sees it, and what lies on disk afterwards."""
    path = write(
        tmp_path / "work.ipynb",
        "#SUBLET --vram 256MiB\nimport os",
        "# defaults\nfactor = 2",
        "base = [1, 2]; same = base; stuck = (n for n in base)",
        "%%gpu\nscaled = [factor * n for n in base]\nprint('on', __import__('sublet').device())",
        "scaled, same is base, os.getcwd()",
    )
    before = path.read_bytes()
    out = tmp_path / "new" / "done.ipynb"
    assert main(["nb", "run", str(path), "-o", str(out), "--param", "factor=10"]) == 0
    said = capsys.readouterr().out
    assert "ok   [6/6]" in said
    assert "%%gpu: scaled" in said
    assert re.search(r"for n in base\]  [\d.]+m?s\b", said), "the seconds on the device"
    assert "stuck: a generator" in said
    assert str(out) in said
    assert path.read_bytes() == before
    found = texts(out)
    assert "on cpu" in found[4]
    assert found[5].split() == ["([10,", "20],", "True,", f"'{tmp_path}')"]
    page = out.with_suffix(".html").read_text()
    for word in ("The bill", "6 of 6 cells", "1 lease", "<b>work</b>", "scaled = [factor"):
        assert word in page
    assert "<script src=" not in page
    with sublet.connect() as fabric:  # they were given back, and what ran under them ends in a moment
        until(lambda: not fabric.leases(), "nothing is held any more")


def test_a_failing_cell_stops_the_run_with_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "bad.ipynb", "x = 1", "def f():\n    return x / 0\nf()", "open('never', 'w')")
    assert main(["nb", "run", str(path)]) == 1
    said = capfd.readouterr()
    assert "fail [2/3]" in said.out
    assert "return x / 0" in said.err
    assert "sublet: cell 2 of 3 failed: ZeroDivisionError: division by zero" in said.err
    assert "\x1b" not in said.err
    assert not (tmp_path / "never").exists()
    written = nbformat.read(tmp_path / "bad.executed.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    assert written.cells[1].outputs[0].ename == "ZeroDivisionError"
    assert "failed" in (tmp_path / "bad.executed.html").read_text()


def test_what_is_not_to_be_had_ends_with_75_and_a_command_line_that_is_wrong_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "much.ipynb", "x = 1", "%%gpu --vram 64GiB --no-wait\nx")
    assert main(["nb", "run", str(path)]) == 75
    assert "64GiB" in capsys.readouterr().err
    assert main(["nb", "run", str(path), "--gpu", "64GiB", "--lease", "whole", "--no-wait"]) == 75
    assert "sublet:" in capsys.readouterr().err
    for words, says in (
        (["nb", "run", str(tmp_path / "none.ipynb")], "cannot be read"),
        (["nb", "run", str(path), "--param", "x"], "not a parameter"),
        (["nb", "run", str(path), "-o", str(path)], "the notebook itself"),
        (["nb", "run", str(path), "--kernel", "no-such"], "no kernel"),
        (["nb", "run", str(path), "--wait", "1m", "--no-wait"], "contradict"),
        (["nb", "run", str(path), "--gpu", "1GiB", "--lease", "whole"], "cell 2 asks for VRAM 64GiB"),
    ):
        assert main(words) == 2, words
        assert says in capsys.readouterr().err
    monkeypatch.setenv("SUBLET_SESSION", "thesis")
    assert main(["nb", "run", str(path), "--lease", "whole"]) == 2
    assert "no part of a session" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ killed

KILLED = """
import os, signal, sys
from pathlib import Path
from sublet.notebook.batch.jobs import Job
from sublet.notebook.batch.runner import Runner
folder, name, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def point(here):
    if here == name and runner.record.done == at:
        os.kill(os.getpid(), signal.SIGKILL)
runner = Runner(Job(folder), point=point)
runner.run()
"""
CELLS = (
    "import random; random.seed(7); class_made = 0\nlog = open('ran', 'a'); print('a', file=log, flush=True)",
    (
        "class Thing:\n    pass\nthing = Thing(); thing.values = [random.random()]; same = thing\n"
        "print('b', file=open('ran', 'a')); print(len(thing.values))"
    ),
    (
        "same.values.append(random.random()); print('c', file=open('ran', 'a'))\n"
        "print(len(thing.values), thing is same, type(thing) is Thing)"
    ),
    "thing.values == [random.Random(7).random(), thing.values[1]], round(sum(thing.values), 9)",
)


def run_killed(job: Job, point: str, at: int) -> int:
    words = [sys.executable, "-c", KILLED, str(job.folder), point, str(at)]
    return subprocess.run(words, capture_output=True, timeout=PATIENCE_S, check=False).returncode


def check_whole(job: Job) -> None:
    """What a dead runner leaves can be gone on with: the record, the outputs and the variables agree."""
    record = job.record()
    assert record.state in (JobState.RUNNING, JobState.QUEUED)
    if record.done:
        assert (job.state / "checkpoints" / f"{record.checkpoint:016d}.manifest").exists()
        nbformat.read(job.executed, as_version=4)  # type: ignore[no-untyped-call]
    assert job.runner == 0


def the_story(folder: Path, kills: list[tuple[str, int]]) -> None:
    job = job_of(folder, *CELLS)
    for point, at in kills:
        assert run_killed(job, point, at) == -signal.SIGKILL, (point, at)
        check_whole(job)
    assert run_killed(job, "never", 0) == 0
    record = job.record()
    assert (record.state, record.done, record.runs) == (JobState.DONE, len(CELLS), len(kills) + 1), record
    assert texts(job.executed)[1:3] == ["1\n", "2 True True\n"]
    assert texts(job.executed)[3].startswith("(True, ")
    ran = (folder / "ran").read_text().split()
    for number, name in enumerate("abc"):
        again = sum(point in ("ran", "outputs", "saved") and at == number for point, at in kills)
        assert ran.count(name) == 1 + again, f"cell {name} is run again only if it was not counted: {ran}"
    shutil.rmtree(folder)


def every_point() -> Iterator[list[tuple[str, int]]]:
    for at in range(len(CELLS)):
        yield from ([(point, at), (point, at)] for point in ("before", "ran", "outputs", "saved"))
        yield [("counted", at + 1)]
    yield [("saved", 1)] * 5
    for at in range(len(CELLS)):
        yield [("counted", at), ("begun", at)] if at else [("begun", 0), ("begun", 0)]


STORIES = list(every_point()) if os.environ.get("SUBLET_CRASH_ALL") else [[("ran", 1), ("saved", 1), ("counted", 2)]]


@pytest.mark.parametrize("kills", STORIES, ids=str)
def test_a_runner_that_is_killed_at_any_point_is_gone_on_with_from_the_last_finished_cell(
    tmp_path: Path, kills: list[tuple[str, int]]
) -> None:
    """SIGKILL between the durable acts of a cell, one after the other, in one job; then it finishes, and everything is
    as if nothing had been. With SUBLET_CRASH_ALL: at every point of every cell, mostly twice."""
    folder = tmp_path / "work"
    folder.mkdir()
    the_story(folder, kills)


def test_a_cell_that_needs_what_could_not_be_saved_is_reached_again_from_the_first(tmp_path: Path) -> None:
    """A generator outlives no kernel. Nobody goes on without it in silence, and nobody is left with a NameError."""
    job = job_of(tmp_path, "print('a', file=open('ran', 'a'))\nstuck = (n for n in [7, 8])", "next(stuck)")
    assert run_killed(job, "counted", 1) == -signal.SIGKILL
    assert job.record().unsaved == ("stuck: a generator",)
    record = Runner(job).run()
    assert (record.state, record.done, record.again) == (JobState.DONE, 2, 1)
    assert texts(job.executed)[1] == "7"
    assert (tmp_path / "ran").read_text().split() == ["a", "a"]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second: it went between the opening and the reading
        return False


# --------------------------------------------------------------------------------------------------------- preempted


class Taking(JobProgress):
    """Ends every lease there is while a cell runs, once."""

    def __init__(self, at: int, mark: Path) -> None:
        self.at, self.mark, self.told = at, mark, list[str]()

    def cell(self, number: int, source: str) -> None:
        if number == self.at and not self.told:
            self.told.append("begun")
            words = [sys.executable, "-c", REVOKE, str(self.mark)]
            self.other = subprocess.Popen(words)

    def again(self, number: int, why: str) -> None:
        self.told.append(why)


REVOKE = """
import sys, time, sublet
from pathlib import Path
with sublet.connect() as fabric:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    for lease in fabric.leases():
        if lease.status == "active" and lease.wants[0].kind == "gpu":
            Path(sys.argv[1]).with_name("bound").write_text(str(lease.bound_to))
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
"""
LOSES = (
    "kept = [1]",
    (
        "{gpu}import time\nfrom pathlib import Path\nfirst = not Path('mark').exists()\nPath('mark').touch()\n"
        "kept.append(2)\nif first: time.sleep(60)"
    ),
    (
        "import os, sys\n%load_ext sublet\n%gpu\n"
        "kept, os.environ['OF_THE_USER'], os.environ['OF_THE_KERNEL'], sys._xoptions"
    ),
)


@pytest.mark.parametrize(("lease", "background"), [("cells", True), ("whole", False)])
def test_a_cell_that_loses_its_lease_is_run_again_from_what_the_one_before_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: str, background: bool
) -> None:
    """In a guest of one lease as in an ordinary kernel whose cells have their own; both have the user's environment,
    and the interpreter and the variables that are installed for the kernel.
    The leases of a job in the background are bound to no process, since it goes on under another one; those of a job in
    the foreground are."""
    monkeypatch.setenv("OF_THE_USER", "seen")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -X own "$@"\n')
    interpreter.chmod(0o755)
    install_kernel(tmp_path, str(interpreter), "-m", "ipykernel_launcher", "-f", "{connection_file}")
    cells = [cell.format(gpu="%%gpu\n" if lease == "cells" else "") for cell in LOSES]
    asked = {"vram_bytes": 256 << 20, "ttl_ns": 60 * NS_PER_S}
    job = job_of(tmp_path, *cells, lease=lease, kernel="own", background=background, **asked)
    taking = Taking(2, tmp_path / "mark")
    record = Runner(job, taking).run()
    taking.other.wait(PATIENCE_S)
    assert (record.state, record.done, record.again, record.runs) == (JobState.DONE, 3, 1, 1), record
    *_, held, last = texts(job.executed)[2].splitlines()
    assert last == "([1, 2], 'seen', 'seen-there', {'own': True})"
    if lease == "whole":
        assert held.startswith("every cell runs under one lease, on local/gpu0, ")
    else:
        assert held.startswith("local/gpu0 (host device, no GPU), 1GiB, ")
    assert "operator" in taking.told[1]
    assert "2 leases" in job.page.read_text()
    assert (tmp_path / "bound").read_text() == ("None" if background else str(os.getpid()))
    with sublet.connect() as fabric:
        until(lambda: not fabric.leases(), "nothing is held any more")


def install_kernel(place: Path, *argv: str) -> None:
    """One called ``own``, for programs with this folder in JUPYTER_PATH."""
    (place / "kernels" / "own").mkdir(parents=True, exist_ok=True)
    spec = {"argv": argv, "display_name": "own", "language": "", "env": {"OF_THE_KERNEL": "${OF_THE_USER}-there"}}
    (place / "kernels" / "own" / "kernel.json").write_text(json.dumps(spec))


def test_a_kernel_that_cannot_be_a_guest_is_refused_before_a_lease_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(InvalidRequest, match="no kernel 'own'"):
        python_of("own")
    for argv in (
        ("R", "--slave", "-e", "IRkernel::main()"),
        ("conda", "run", "python", "-m", "other"),
        ("python", "-m"),
    ):
        install_kernel(tmp_path, *argv)
        with pytest.raises(InvalidRequest, match="'own' is not started by `python -m ipykernel_launcher`"):
            python_of("own")
    monkeypatch.setenv("OF_THE_USER", "seen")
    for program, python in (("python3", ""), (sys.executable, ""), ("/opt/env/bin/python", "/opt/env/bin/python")):
        install_kernel(tmp_path, program, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}")
        assert python_of("own") == (python, {"OF_THE_KERNEL": "seen-there"})


class Hearing(JobProgress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def waiting(self, why: str) -> None:
        self.told.append(why)


if os.environ.get("SUBLET_CRASH_ALL"):  # a notice of five seconds is waited for

    def test_under_one_lease_a_cell_that_is_suspended_goes_on_where_it_was(tmp_path: Path) -> None:
        """A neighbour takes the device; the cell stands still in its loop, and every turn of it happens once."""
        cell = "import time\nturns = []\nfor n in range(90): time.sleep(0.1); turns.append(n)"
        job = job_of(tmp_path, cell, "len(turns), turns == sorted(set(turns))", lease="whole", tier="spot")
        hearing, neighbour = Hearing(), Neighbour(after_s=0.5)
        record = Runner(job, hearing).run()
        assert (record.state, record.again) == (JobState.DONE, 0), record
        assert texts(job.executed)[1] == "(90, True)"
        assert any("stands still" in one for one in hearing.told)
        assert "has given it back" in neighbour.story()


# --------------------------------------------------------------------------------------------------- in the background


def test_a_submitted_notebook_survives_its_runner_and_its_state_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Submitted, killed in the middle of a cell, gone on with by itself; then fetched, and opened as a notebook."""
    monkeypatch.setattr(detached, "BEGINS_S", PATIENCE_S)
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "long.ipynb",
        "numbers = [1, 2, 3]",
        "import os, time\nfrom pathlib import Path\nPath('pid').write_text(f'{os.getpid()} ')\n"
        "while not Path('enough').exists(): time.sleep(0.05)",
        "numbers.append(4); print(numbers)",
    )
    assert main(["nb", "submit", "long.ipynb", "--json"]) == 0
    number = json.loads(capsys.readouterr().out)["id"]
    job = find_job(number)
    until(lambda: job.record().done == 1, "the first cell is done")
    first = job.runner
    kernel = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the second runs"))
    assert first > 0
    os.kill(first, signal.SIGKILL)
    until(lambda: not _is_alive(kernel), "its kernel does not outlive it: every cell would be done twice")
    until(lambda: job.runner not in (0, first) and job.record().runs == 2, "another runner has it")
    (tmp_path / "enough").touch()
    until(lambda: job.record().is_over, "it is over")
    assert main(["nb", "status", number, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["done"], shown["runs"], shown["exit_code"]) == ("done", 3, 2, 0)
    assert main(["nb", "status"]) == 0
    assert "long" in capsys.readouterr().out
    assert main(["nb", "fetch", number, "here"]) == 0
    assert texts(tmp_path / "here" / "long.executed.ipynb")[2] == "[1, 2, 3, 4]\n"
    assert (tmp_path / "here" / "long.executed.html").exists()
    assert main(["nb", "open", number]) == 0
    opened = nbformat.read(tmp_path / "long.continued.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    assert main(["nb", "open", number]) == 2, "it is not written over"
    again = job_of(tmp_path / "here", opened.cells[1].source, "sum(numbers)")
    assert Runner(again).run().state is JobState.DONE
    assert "restored" in texts(again.executed)[0]
    assert texts(again.executed)[1] == "10"


def test_a_job_can_be_stopped_and_one_that_nobody_runs_is_started_by_whoever_asks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "BEGINS_S", PATIENCE_S)
    write(tmp_path / "ever.ipynb", "x = 1", "import time\nwhile True: time.sleep(0.1)")
    assert main(["nb", "submit", str(tmp_path / "ever.ipynb"), "--name", "ever", "--json"]) == 0
    job = find_job(json.loads(capfd.readouterr().out)["id"])
    until(lambda: job.record().done == 1, "the first cell is done")
    runner = job.runner
    minder = int(Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(minder, signal.SIGKILL)
    os.kill(runner, signal.SIGKILL)
    until(lambda: not job.runner, "nobody has it")
    assert job.record().state is JobState.RUNNING
    assert main(["nb", "status", job.id]) == 0
    assert "had lost its runner" in capfd.readouterr().err
    until(lambda: job.runner and job.record().runs == 2, "another runner has it")
    assert detached.launch(job) == job.runner, "a second one finds it taken and leaves"
    assert main(["nb", "stop", job.id]) == 0
    assert f"Job {job.id} is stopped: 1 of 2 cells ran." in capfd.readouterr().out
    assert job.record().state is JobState.STOPPED
    until(lambda: not job.runner, "the second one, which may have come as late as this, leaves as well")
    assert main(["nb", "stop", job.id]) == 0
    assert main(["nb", "resume", job.id]) == 2
