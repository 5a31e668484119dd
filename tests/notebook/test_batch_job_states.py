"""A job's states, what it asks for, its parameters and its folder: values, tables and files, without a kernel."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.cli import main
from sublet.cli.declare import UsageError
from sublet.cli.nb import target_of
from sublet.errors import CheckpointDamaged, InvalidRequest, NotFound
from sublet.notebook.batch import jobs
from sublet.notebook.batch.job_options import (
    JobLeaseOptions,
    cell_options,
    for_one_lease,
    from_cell,
    in_words,
    read_options,
)
from sublet.notebook.batch.job_states import ENDED, TABLE, Happening, JobRecord, JobState, after
from sublet.notebook.batch.jobs import AT_ONCE, LOOKS, Job, JobSpec, Turn, all_jobs, find_job, make_job
from sublet.notebook.batch.page import first_line
from sublet.notebook.batch.prepare import (
    code_cells,
    has_gpu_cells,
    read_notebook,
    unknown_parameters,
    with_parameters,
)
from sublet.notebook.options import CellOptions, parse_line
from sublet.values import GIB, NS_PER_S, Tier

V4: Any = nbformat.v4

# ------------------------------------------------------------------------------------------------------------ states


@pytest.mark.parametrize(("state", "what"), list(itertools.product(JobState, Happening)))
def test_only_what_the_table_knows_can_happen(state: JobState, what: Happening) -> None:
    """An event that the table does not know names state and event, and leaves everything as it was."""
    done = 3 if state is JobState.DONE or what is Happening.FINISHED else 1
    record = JobRecord(state=state, cells=3, done=done)
    if (state, what) in TABLE:
        assert after(record, what).state is TABLE[state, what]
    else:
        with pytest.raises(InvalidRequest, match=state.value):
            after(record, what)


def test_no_way_leads_out_of_an_end_and_every_state_can_be_reached() -> None:
    assert not [state for state, _ in TABLE if state in ENDED]
    reached = {JobState.QUEUED}
    for _ in JobState:
        reached |= {to for (state, _), to in TABLE.items() if state in reached}
    assert reached == set(JobState)


@given(st.lists(st.sampled_from(Happening), max_size=40))
def test_whatever_happens_cells_only_ever_become_finished_one_by_one(story: list[Happening]) -> None:
    record = JobRecord(cells=3)
    for what in story:
        try:
            found = after(record, what)
        except InvalidRequest:
            continue
        assert found.done - record.done in (0, 1) or (what is Happening.REWOUND and not found.done)
        assert found.done <= found.cells
        assert found.runs >= record.runs
        assert (found.state is not JobState.DONE) or found.done == found.cells
        record = found


def test_a_notebook_is_not_done_before_its_last_cell() -> None:
    with pytest.raises(InvalidRequest, match="2 of them finished"):
        after(JobRecord(state=JobState.RUNNING, cells=3, done=2), Happening.FINISHED)


# ----------------------------------------------------------------------------------------------------------- asking


def test_options_stand_in_comments_of_the_first_cell_and_the_command_line_goes_before_them() -> None:
    asked, notes = from_cell("#SUBLET --vram 8GiB --tier spot --pay-priority\n# SUBLET: --lease whole\nimport torch")
    assert (asked.vram_bytes, asked.tier, asked.lease, notes) == (8 * GIB, Tier.SPOT, "whole", ())
    assert "pays for priority" in in_words(asked)
    over = JobLeaseOptions(vram_bytes=GIB).over(asked)
    assert (over.vram_bytes, over.tier) == (GIB, Tier.SPOT)


def test_what_people_write_for_sbatch_is_taken_as_far_as_it_means_something_and_told_where_not() -> None:
    asked, notes = from_cell("#SBATCH --gres=gpu:v100:2\n#SBATCH -J night --time=2:00:00\n#SBATCH -p long")
    assert (asked.gpus, asked.name) == (2, "night")
    assert notes == (
        "#SBATCH --time=2:00:00 means nothing here",
        "#SBATCH --partition=long means nothing here",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--vrma 8GiB", "did you mean --vram"),
        ("--vram", "needs a value"),
        ("--tier sport", "did you mean spot"),
        ("--lease hole", "did you mean whole"),
        ("--gpus many", "not a number"),
        ("--spot --tier batch", "contradicts"),
        ("--vram lots", "lots"),
    ],
)
def test_a_mistake_in_an_option_names_the_nearest_good_one(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_options(text.split())


CELLS: Final = (
    *("x = 1", "\n %%gpu --vram 8GiB\nx", "%%gpu --gpus 2 --vram 2GiB\nx"),
    *("%%gpu --vram {size}\nx", "%%gpus\nx"),
)


def test_one_lease_for_all_cells_has_the_most_that_one_of_them_asks_for() -> None:
    """What the job says goes before what is set for all cells (`sublet config`), as for a lease of each."""
    configured = CellOptions(vram_bytes=4 * GIB, ttl_ns=90 * NS_PER_S, tier=Tier.SPOT, smaller_ok=True)
    found = for_one_lease(JobLeaseOptions(tier=Tier.BATCH), CELLS, configured)
    assert (found.vram_bytes, found.gpus, found.ttl_ns) == (8 * GIB, 2, 90 * NS_PER_S)
    assert (found.tier, found.smaller_ok, found.wait_ns) == (Tier.BATCH, True, None)
    assert for_one_lease(JobLeaseOptions(), CELLS[:1], configured).vram_bytes == 4 * GIB
    assert for_one_lease(JobLeaseOptions(), CELLS[:1], CellOptions()).vram_bytes == GIB
    asked = JobLeaseOptions(vram_bytes=8 * GIB, gpus=2)
    assert for_one_lease(asked, CELLS, CellOptions()) == asked


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%gpu --vram 8GiB\nx", r"cell 2 asks for VRAM 8GiB, more than the one lease .*\(--vram 4GiB\)"),
        ("%%gpu --gpus 2\nx", r"cell 2 asks for 2 devices, .*\(--gpus 1\)"),
        ("%%gpu --map rows --out y\nx", "cell 2 has --map, which only a cell with a lease of its own"),
        ("%%gpu --model H200\nx", "cell 2 has --model"),
        ("%%gpu --python /usr/bin/python3\nx", "cell 2 has --python"),
        ("%%gpu --with lib\nx", "cell 2 has --with"),
        ("%%gpu --vrma 1GiB\nx", "cell 2: .* --vrma; did you mean --vram"),
    ],
)
def test_a_cell_that_would_not_get_what_it_asks_for_under_one_lease_is_refused(cell: str, says: str) -> None:
    """Nothing runs: the cell would run on less than it needs, or as another one, and nobody would be told."""
    with pytest.raises(InvalidRequest, match=says):
        for_one_lease(JobLeaseOptions(vram_bytes=4 * GIB, gpus=1), ["x = 1", cell], CellOptions())


def test_quotation_marks_left_open_are_said() -> None:
    with pytest.raises(InvalidRequest, match="#SUBLET --name"):
        from_cell("#SUBLET --name 'x")


@given(
    st.builds(
        JobLeaseOptions,
        vram_bytes=st.none() | st.integers(1, 1 << 40),
        gpus=st.none() | st.integers(1, 8),
        ttl_ns=st.none() | st.integers(2, 10**6).map(lambda n: n * 10**7),
        tier=st.none() | st.sampled_from(Tier),
        pay_priority=st.none() | st.just(True),
        wait_ns=st.none() | st.just(0) | st.integers(1, 10**5).map(lambda n: n * NS_PER_S),
        smaller_ok=st.none() | st.just(True),
    )
)
def test_a_cell_that_says_nothing_asks_for_exactly_what_the_job_does(asked: JobLeaseOptions) -> None:
    found = parse_line(cell_options(asked))
    assert (found.vram_bytes, found.ttl_ns, found.tier) == (asked.vram_bytes, asked.ttl_ns, asked.tier)
    assert (found.gpus, found.wait_ns) == (asked.gpus or 1, asked.wait_ns)
    assert (found.smaller_ok, found.pay_priority) == (bool(asked.smaller_ok), bool(asked.pay_priority))
    assert JobLeaseOptions.from_json(json.loads(json.dumps(asked.as_json()))) == asked


# ------------------------------------------------------------------------------------------------------- parameters


def notebook(*cells: str | tuple[str, str]) -> Any:
    made = V4.new_notebook()
    for cell in cells:
        source, tag = (cell, "") if isinstance(cell, str) else cell
        made.cells.append(V4.new_code_cell(source, metadata={"tags": [tag]} if tag else {}))
    return made


def sources(made: Any) -> list[str]:
    return [made.cells[n].source for n in code_cells(made)]


def test_parameters_go_behind_the_cell_that_is_tagged_and_again_in_place_of_the_last_ones() -> None:
    made = with_parameters(notebook("import x", ("lr = 1\nname = 'a'", "parameters"), "use(lr)"), ["lr=0.5", "name=b"])
    assert sources(made) == ["import x", "lr = 1\nname = 'a'", "# Parameters\nlr = 0.5\nname = 'b'", "use(lr)"]
    again = with_parameters(made, ["lr=2"])
    assert sources(again) == ["import x", "lr = 1\nname = 'a'", "# Parameters\nlr = 2", "use(lr)"]


def test_without_a_tagged_cell_they_go_first_but_behind_comments() -> None:
    assert sources(with_parameters(notebook("y = x"), ["x=[1, 2]"])) == ["# Parameters\nx = [1, 2]", "y = x"]
    made = with_parameters(notebook("#SUBLET --vram 1GiB\n", "y = x"), ["x=true"])
    assert sources(made)[1:] == ["# Parameters\nx = True", "y = x"]


def test_without_a_tagged_cell_they_are_not_undone_by_a_cell_that_gives_them_a_value() -> None:
    made = with_parameters(notebook("#SUBLET --vram 1GiB\nlr = 0.1\nname: str = 'a'", "use(lr)"), ["lr=2"])
    assert sources(made)[1:] == ["# Parameters\nlr = 2", "use(lr)"]
    again = with_parameters(made, ["lr=3"])
    assert sources(again)[1:] == ["# Parameters\nlr = 3", "use(lr)"]
    with pytest.raises(InvalidRequest, match="cell 2 assigns lr itself, and then uses it"):
        with_parameters(notebook("import x", "lr = 0.1\nmodel = build(lr)"), ["lr=2"])
    with pytest.raises(InvalidRequest, match="cell 3 assigns n itself"):
        with_parameters(notebook("lr = 0.1", "use(lr)", "n = 3"), ["lr=2", "n=4"])
    assert sources(with_parameters(notebook("setup()", "n = 3", "lr = 1"), ["lr=2", "n=4"]))[3].startswith("# Para")
    inside = "def f():\n    lr = 3\nfor lr2 in a: pass"  # is another lr
    assert sources(with_parameters(notebook(inside), ["lr=2"]))[0] == "# Parameters\nlr = 2"


@pytest.mark.parametrize(
    ("text", "says"),
    [("lrr=1", "did you mean lr"), ("lr", "not a parameter"), ("1x=2", "not a parameter")],
)
def test_a_parameter_that_would_change_nothing_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        with_parameters(notebook(("lr = 1", "parameters"), "x"), [text])
    with pytest.raises(InvalidRequest, match="twice"):
        with_parameters(notebook("x"), ["a=1", "a=2"])


def test_a_parameter_that_no_cell_has_a_word_of_is_told() -> None:
    made = with_parameters(notebook("steps = 3", "%run train.py --lr {rate}\nuse(steps)"), ["stepz=1"])
    assert unknown_parameters(made, ["steps=1", "rate=2"]) == []
    said = "no cell of the notebook uses the parameter stepz; did you mean steps?"
    assert unknown_parameters(made, ["stepz=1", "rate=2"]) == [said]


def test_what_is_no_notebook_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "b.ipynb").write_bytes(b"\xff\xfe")
    nbformat.write(V4.new_notebook(), tmp_path / "c.ipynb")  # type: ignore[no-untyped-call]
    for name, says in {"a": "not a notebook", "b": "not text", "c": "no code cell", "d": "cannot be read"}.items():
        with pytest.raises(InvalidRequest, match=says):
            read_notebook(tmp_path / f"{name}.ipynb")


def test_a_cell_is_called_by_its_first_line_that_says_something() -> None:
    assert first_line("# why\n\nx = 1\ny = 2") == "x = 1"
    assert first_line("%%gpu --vram 1GiB\nx = f()") == "%%gpu --vram 1GiB: x = f()"
    assert len(first_line("x" * 200)) == 60
    assert has_gpu_cells(notebook("x", "\n%%gpu\ny"))
    assert not has_gpu_cells(notebook("'%%gpu'"))


# ----------------------------------------------------------------------------------------------------------- folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def a_job(**facts: Any) -> Job:
    spec = JobSpec(notebook="/x/a.ipynb", folder="/x", name="a", asked={"tier": "batch", "gpus": 2}, **facts)
    return make_job(spec, b"{}", 3, wall_ns=7)


def test_what_was_asked_for_and_how_far_it_is_are_read_as_they_were_written(home: Path) -> None:
    job = a_job(parameters=("lr=1",), waits_its_turn=True)
    assert job.id == "1"
    assert job.spec().leases == JobLeaseOptions(tier=Tier.BATCH, gpus=2)
    assert (job.spec().parameters, job.spec().waits_its_turn) == (("lr=1",), True)
    record = after(job.record(), Happening.BEGUN, unsaved=("g: a generator",))
    job.write(record)
    assert find_job("1").record() == record
    assert [one.id for one in (a_job(), *all_jobs())] == ["2", "1", "2"]
    with pytest.raises(NotFound, match="no job 9"):
        find_job("9")
    with pytest.raises(NotFound):
        find_job("../1")


def test_a_job_is_found_by_a_name_that_is_its_own(home: Path) -> None:
    """Of several with one name the number has to be said."""
    one = a_job()
    assert find_job("a").id == one.id
    a_job()
    with pytest.raises(NotFound, match="2 jobs are called a: 1, 2"):
        find_job("a")
    with pytest.raises(NotFound, match="there is no job b"):
        find_job("b")


def test_where_nothing_can_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    source = tmp_path / "a.ipynb"
    source.touch()
    with pytest.raises(UsageError, match=r"--out: /proc/x\.ipynb cannot be written"):
        target_of(str(source), "/proc/x.ipynb")
    assert target_of(str(source), None) == tmp_path / "a.executed.ipynb"
    assert list(tmp_path.iterdir()) == [source]


def test_a_flipped_bit_anywhere_in_a_record_is_noticed(home: Path) -> None:
    """Or changes nothing, as in the spaces between two fields."""
    job = a_job()
    path = job.folder / "record.json"
    whole, before = path.read_bytes(), job.record()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert job.record() == before
        except CheckpointDamaged:
            continue
    path.write_bytes(whole[:-9])
    with pytest.raises(CheckpointDamaged):
        job.record()


HOLDS = """
import sys
from pathlib import Path
from sublet.notebook.batch.jobs import Job
with Job(Path(sys.argv[1])).taken():
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_two_never_run_one_job_and_a_runner_that_is_killed_holds_nothing(home: Path) -> None:
    job = a_job()
    words = [sys.executable, "-c", HOLDS, str(job.folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        assert job.runner == other.pid
        with pytest.raises(InvalidRequest, match="being run already"), job.taken():
            pass
        other.kill()
        other.wait()
    assert job.runner == 0
    with job.taken():
        assert job.runner > 0


def test_a_runner_waits_for_a_process_that_tests_the_lock_and_stands_still(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sublet nb status` holds the lock for a moment; it may be stopped just then, and the job must have its runner."""
    job = a_job()
    with job.taken():
        pass
    tester = os.open(job.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(tester, fcntl.LOCK_SH)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        assert job.runner == 0, "testers do not see one another"
        if len(naps) == 3 * LOOKS:
            os.close(tester)

    monkeypatch.setattr("sublet.notebook.batch.jobs.time", SimpleNamespace(sleep=nap, monotonic=lambda: sum(naps)))
    with job.taken():
        assert job.runner == os.getpid()
    assert len(naps) == 3 * LOOKS


IGNORES: Final = HOLDS.replace("import sys", "import signal, sys").replace(
    "with Job", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwith Job"
)


def test_a_job_that_does_not_stop_is_told_with_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job()
    job.write(after(job.record(), Happening.BEGUN))
    words = [sys.executable, "-c", IGNORES, str(job.folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == "has it\n"
        assert main(["nb", "stop", job.id, "--wait", "0"]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert f"job 1 was asked to stop and has not done so: process {runner.pid} is in cell 1 of 3" in said.err
        assert "sublet nb stop 1 --wait 5m" in said.err
        assert f"`kill -9 {runner.pid}` ends it" in said.err
        runner.kill()
    assert main(["nb", "stop", job.id]) == 0
    assert "Job 1 is stopped: 0 of 3 cells ran." in capsys.readouterr().out


def test_only_so_many_run_at_once_and_the_oldest_goes_first(home: Path) -> None:
    turns = [Turn(a_job()) for _ in range(AT_ONCE + 1)]
    assert [turn.come() for turn in turns] == [*[True] * AT_ONCE, False]
    turns[1].over()
    waits = Turn(a_job())
    with find_job(str(AT_ONCE + 1)).taken():  # it has a runner, so it is before the one that came later
        assert not waits.come()
        assert waits.ahead == 1
        assert turns[-1].come()
    for turn in turns:
        turn.over()


def test_a_job_that_has_its_turn_is_not_waited_for_and_one_that_waits_again_is(home: Path) -> None:
    """The one has not said yet that it runs; the other was interrupted in its turn, and was here before."""
    first, later = Turn(a_job()), Turn(a_job())
    with find_job("1").taken():
        assert first.come()
        assert later.come()
        later.over()
        first.over()
        assert not later.come()
        assert later.ahead == 1


def test_a_job_that_is_over_stays_while_its_runner_has_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be about to write what it came to."""
    monkeypatch.setattr(jobs, "KEPT_MAX", 0)
    job = a_job()
    job.write(after(job.record(), Happening.STOPPED))
    with job.taken():
        a_job()
        assert find_job("1").record().is_over
    a_job()
    with pytest.raises(NotFound):
        find_job("1")


def test_a_job_whose_maker_was_interrupted_is_none(home: Path) -> None:
    job = a_job()
    (job.folder.parent / "2").mkdir()
    assert [one.id for one in all_jobs()] == ["1"]
    assert a_job().id == "3", "its number is not used again"
