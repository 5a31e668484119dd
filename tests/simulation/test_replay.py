"""The generated workload looks like the published one, and goes through the real ledger with every invariant on."""

from __future__ import annotations

from pathlib import Path
from statistics import quantiles

import pytest

from sublet.errors import InvalidRequest
from sublet.sim import replay
from sublet.sim.replay import Replay
from sublet.sim.workload import COLUMNS, DURATION_MIN, Cell, Session, generate, quantile, read_trace

TRACE = """session,session_start_min,session_stop_min,cell_start_min,cell_duration_min,gpus,vram_gb,cpus
b,10,500,20,30,1,2.5,3
a,0,100,5,2,0,0,1
a,0,100,9,10,2,4.0,1
"""


def test_the_same_seed_generates_the_same_sessions() -> None:
    """A workload is named by its seed."""
    assert generate(3, sessions=5, days=2) == generate(3, sessions=5, days=2)
    assert generate(3, sessions=5, days=2) != generate(4, sessions=5, days=2)


def test_generated_cells_are_distributed_as_published() -> None:
    """Medians and upper quantiles of durations, sizes and pauses are near the table's; exactness is not claimed."""
    cells = [cell for seed in range(6) for session in generate(seed, sessions=80, days=30) for cell in session.cells]
    ones = sorted(cell.duration_min for cell in cells if cell.gpus == 1)
    assert 2 < ones[len(ones) // 2] < 5
    assert 7 < ones[len(ones) * 9 // 10] < 18
    pauses = quantiles([cell.pause_min for cell in cells if cell.pause_min > 0], n=20)
    assert 1.5 < pauses[9] < 8, "median of the pauses"
    assert 20 < pauses[17] < 250, "ninetieth percentile of the pauses"
    without = sum(cell.gpus == 0 for cell in cells) / len(cells)
    assert 0.30 < without < 0.38
    big = sum(cell.gpus == 8 for cell in cells) / sum(cell.gpus > 0 for cell in cells)
    assert 0.1 < big < 0.5


def test_quantiles_hit_the_points_of_the_table_and_rise_between_them() -> None:
    """Piecewise straight lines on a logarithmic scale."""
    table = DURATION_MIN[1]
    for share, value in table:
        assert quantile(table, share) == pytest.approx(value)
    values = [quantile(table, share / 200) for share in range(201)]
    assert values == sorted(values)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "seed"), [(16, 1), (8, 2)])
def test_a_generated_workload_holds_every_invariant_and_saves_most_of_the_time(gpus: int, seed: int) -> None:
    """The books are walked after every command; leases cost less than reservation and not less than what was used."""
    result = Replay(generate(seed, sessions=12, days=2), gpus=gpus).run()
    assert result.cells > 50
    assert len(result.waits_ns) == result.cells
    assert result.used_ns <= result.leased_ns < 0.7 * result.reserved_ns
    assert result.warm > 0


def test_every_cell_is_served_even_where_there_is_one_gpu() -> None:
    """Three sessions, one device: they take turns, wait, and all come through."""
    sessions = [Session(f"s{i}", 0.0, (Cell(0, 8, 1), Cell(2, 45, 1), Cell(1, 3, 1)), 300.0) for i in range(3)]
    result = Replay(sessions, gpus=1).run()
    assert result.cells == 9
    assert result.wait_s(0.99) > 60
    assert result.at_once < 1.0
    assert sum(result.preemptions.values()) > 0, "who held it for half an hour had to let others in"
    assert result.used_ns >= 3 * 56 * 60 * 10**9


def test_a_cell_that_fits_no_node_is_left_out_and_said() -> None:
    """Eight GPUs on a machine with two."""
    result = Replay([Session("s", 0.0, (Cell(0, 5, 8), Cell(0, 5, 2)), 20.0)], gpus=2).run()
    assert (result.cells, result.impossible) == (1, 1)
    assert "1 left out" in str(result)


def test_a_trace_is_read_in_the_order_of_its_sessions(tmp_path: Path) -> None:
    """Pauses are what lies between the end of one cell and the start of the next; other columns are ignored."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    first, second = read_trace(path)
    assert first == Session("a", 0.0, (Cell(5.0, 2.0, 0, 0.0), Cell(2.0, 10.0, 2, 4.0)), 100.0)
    assert second.cells == (Cell(10.0, 30.0, 1, 2.5),)
    assert Replay([first, second], gpus=2).run().cells == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no cell_duration_min"),
        ("session,gpus\na,1\n", "has no cell_duration_min"),
        (TRACE.replace("30,1", "thirty,1"), "line 2"),
        (TRACE.replace("20,30", "20,-30"), "below zero"),
        (TRACE.replace("20,30", "20,nan"), "below zero or none"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, content: str, says: str) -> None:
    """Nothing is guessed: missing columns, words, negative and undefined numbers."""
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=says):
        read_trace(path)


def test_the_command_replays_a_trace_and_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 and the table; 2 and one sentence where there is no such file."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    assert replay.main(["--trace", str(path), "--gpus", "2"]) == 0
    assert "2 GPU cells of 2 sessions" in capsys.readouterr().out
    assert replay.main(["--trace", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert set(COLUMNS) <= set(TRACE.splitlines()[0].split(","))
