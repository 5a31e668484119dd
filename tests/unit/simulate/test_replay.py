"""The generated workload looks like the published one, and goes through the real ledger with every invariant on."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import quantiles

import pytest
from msgspec.structs import replace

from sublet.errors import InvalidRequest
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.budgets import prices_record
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Quota
from sublet.office.policy_file import parse_policy
from sublet.simulate import workload
from sublet.simulate.peers import PEERS, run_peer
from sublet.simulate.replay import POLICY, Costs, ModelGpus, Replay, ReplayHardware, Rules, fluid_bound_ns, read_costs
from sublet.simulate.results import HOUR_NS, Result, compare
from sublet.simulate.workload import (
    COLUMNS,
    DURATION_MIN,
    Cell,
    Lab,
    WorkloadSession,
    course,
    generate,
    merged,
    parse_lab,
    paying,
    peak_gpus,
    quantile,
    read_jobs,
    read_trace,
    resample,
)
from sublet.values import NS_PER_S, Tier

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
    result = Replay(generate(seed, sessions=12, days=2), ReplayHardware(gpus=gpus), check_every=1).run()
    assert result.cells > 50
    assert len(result.waits_ns) == result.cells
    assert result.used_ns <= result.held_ns < 0.7 * result.reserved_ns
    assert result.warm > 0


def test_every_cell_is_served_even_where_there_is_one_gpu() -> None:
    """Three sessions, one device: they take turns, wait, and all come through."""
    sessions = [WorkloadSession(f"s{i}", 0.0, (Cell(0, 8, 1), Cell(2, 45, 1), Cell(1, 3, 1)), 300.0) for i in range(3)]
    result = Replay(sessions, ReplayHardware(gpus=1), check_every=1).run()
    assert result.cells == 9
    assert result.wait_s(0.99) > 60
    assert result.at_once < 1.0
    assert sum(result.preemptions.values()) > 0, "who held it for half an hour had to let others in"
    assert result.used_ns >= 3 * 56 * 60 * 10**9


def test_a_cell_that_fits_no_node_is_left_out_and_said() -> None:
    """Eight GPUs on a machine with two; 90 GiB on devices of 80."""
    cells = (Cell(0, 5, 8), Cell(0, 5, 1, 90.0), Cell(0, 5, 2))
    result = Replay([WorkloadSession("s", 0.0, cells, 20.0)], ReplayHardware(gpus=2)).run()
    assert (result.cells, result.impossible) == (1, 2)
    assert result.at_once == pytest.approx(1 / 3), "who was left out did not start"


MIXED = ReplayHardware(
    gpus=1, model="A100", vram_gib=40.0, beside=(ModelGpus(gpus=2, model="T4", vram_gib=16.0),), per_node=4
)


def test_each_cell_runs_on_a_model_that_it_takes_and_that_is_large_enough() -> None:
    """What wants 30 GiB needs the A100; a preference is followed while that model is free; no other model is taken."""
    sessions = [
        WorkloadSession("large", 0.0, (Cell(0, 10, 1, 30.0),), 20.0),
        WorkloadSession("small", 1.0, (Cell(0, 10, 1, 4.0, model="T4"),), 20.0),
        WorkloadSession("either", 2.0, (Cell(0, 10, 1, 4.0, model="A100|T4"),), 20.0),
        WorkloadSession("waits", 3.0, (Cell(0, 5, 1, 4.0, model="T4"), Cell(0, 5, 1, 20.0)), 40.0),
        WorkloadSession("never", 3.0, (Cell(0, 5, 1, 20.0, model="T4"), Cell(0, 5, 2, 4.0, model="A100")), 40.0),
    ]
    result = Replay(sessions, MIXED, check_every=1).run()
    assert (result.gpus, result.cells, result.impossible) == (3, 5, 2)
    waits = {tenant: took - run for tenant, run, took in result.done}
    assert waits["large"] == waits["small"] == waits["either"] == 0
    assert max(result.waits_ns) > 0, "both of the T4 are held when the third one comes"
    assert result.held_by_model["A100"] >= 15 * 60 * NS_PER_S, "both cells with more than 16 GiB"
    assert sum(result.held_by_model.values()) == result.held_ns
    rates = Rates(currency="EUR", gpu=10_000_000, cpu=0, memory=0, block=0, models={"A100": 4_000_000, "T4": 500_000})
    hours = {model: held / HOUR_NS for model, held in result.held_by_model.items()}
    assert result.cost(rates) == pytest.approx(4 * hours["A100"] + 0.5 * hours["T4"])
    assert result.figures()["gpu_hours"]["held_by_model"] == pytest.approx(hours)
    for peer in PEERS:
        other = run_peer(peer, sessions, MIXED)
        assert (other.gpus, other.cells, other.impossible) == (3, 5, 2), peer.name
        assert set(other.held_by_model) <= {"A100", "T4"}


def test_a_warm_lease_serves_a_cell_only_where_its_device_is_what_the_cell_wants() -> None:
    cells = (Cell(0, 5, 1, 4.0, model="T4"), Cell(1, 5, 1, 8.0), Cell(1, 5, 1, 30.0), Cell(1, 5, 1, 4.0, model="T4"))
    result = Replay([WorkloadSession("s", 0.0, cells, 40.0)], MIXED, check_every=1).run()
    assert (result.cells, result.warm) == (4, 1), "8 GiB fit the T4 that is held; 30 do not, and an A100 is no T4"


def test_interactive_cells_get_the_cheapest_model_where_the_policy_says_so() -> None:
    sessions = [WorkloadSession("s", 0.0, (Cell(0, 10, 1, 4.0),), 20.0)]
    for cheap, dear in (("A100", "T4"), ("T4", "A100")):
        rates = Rates(currency="EUR", gpu=1, cpu=0, memory=0, block=0, models={cheap: 500_000, dear: 4_000_000})
        rules = Rules(policy=replace(POLICY, cheapest_first=True), prices=prices_record(rates))
        assert set(Replay(sessions, MIXED, rules=rules).run().held_by_model) == {cheap}


def test_a_trace_may_name_models(tmp_path: Path) -> None:
    """In a column of its own; jobs in one that is named."""
    path = tmp_path / "trace.csv"
    heads, *rows = TRACE.replace(",cpus", ",model").splitlines()
    path.write_text(
        "\n".join([heads, rows[0].removesuffix(",3") + ",H200|A100", *(row[:-2] + "," for row in rows[1:])])
    )
    assert [cell.model for session in read_trace(path) for cell in session.cells] == [None, None, "H200|A100"]
    path.write_text(heads + "\n" + rows[0].removesuffix(",3") + ",H200|\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(path)
    path.write_text("submit,run,n,card\n0,60,1,T4\n0,60,1,\n")
    columns = {"start": "submit", "duration": "run", "gpus": "n", "model": "card"}
    assert [job.cells[0].model for job in read_jobs(path, columns)] == ["T4", None]


def test_a_trace_is_read_in_the_order_of_its_sessions(tmp_path: Path) -> None:
    """Pauses are what lies between the end of one cell and the start of the next; other columns are ignored."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    first, second = read_trace(path)
    assert first == WorkloadSession("a", 0.0, (Cell(5.0, 2.0, 0, 0.0), Cell(2.0, 10.0, 2, 4.0)), 100.0)
    assert second.cells == (Cell(10.0, 30.0, 1, 2.5),)
    assert Replay([first, second], ReplayHardware(gpus=2)).run().cells == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no cell_duration_min"),
        (TRACE.splitlines()[0], "has no rows"),
        ("session,gpus\na,1\n", "has no cell_duration_min"),
        (TRACE.replace("30,1", "thirty,1"), "line 2"),
        (TRACE.replace("20,30", "20,-30"), "below zero"),
        (TRACE.replace("20,30", "20,nan"), "below zero"),
        (TRACE.replace("a,0,100,9", "a,101,100,109"), "the session stops before its start"),
        (TRACE.replace("20,30", "20,1e300"), "too large"),
        (TRACE.replace("20,30,1", "20,30,1.5"), r"1\.5 GPUs"),
        (TRACE.replace("20,30,1", "20,30"), "line 2"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, content: str, says: str) -> None:
    """Nothing is guessed: missing columns, words, negative and undefined numbers."""
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=says):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [("s\xe9ance\n".encode("latin-1") + TRACE.encode(), "not in UTF-8"), (TRACE.encode("utf-16"), "not in UTF-8")],
)
def test_a_trace_in_another_encoding_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=says):
        read_trace(path)
    path.write_bytes(TRACE.encode("utf-8-sig"))
    assert len(read_trace(path)) == 2, "spreadsheets write a mark before UTF-8"


def test_a_million_cells_are_refused_before_they_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CELLS_MAX", 50)
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + "a,0,100,5,2,0,0,1\n" * 60 + "never read\n")
    with pytest.raises(InvalidRequest, match="more than 50 cells"):
        read_trace(path)
    with pytest.raises(InvalidRequest, match="more than 50 cells"):
        generate(1, sessions=64, days=2)


def test_a_tenant_pays_for_priority_in_all_of_its_sessions_or_in_none() -> None:
    labs = [parse_lab("Tue 10:00-12:00"), parse_lab("Thu 10:00-12:00")]
    paid = paying(course(1, students=10, labs=labs), 0.25, 1)
    by_tenant = {session.owner: {one.pays_priority for one in paid if one.owner == session.owner} for session in paid}
    assert sorted(by_tenant.values(), key=str) == [{False}] * 7 + [{True}] * 3


def test_what_was_taken_from_idle_holders_is_no_preempted_cell() -> None:
    """No cell ran there. One column says so; the document has both."""
    result = Result(name="leases", gpus=1, sessions=1, preemptions={"idle": 5, "fair_share": 2, "preempted": 1})
    (row,) = [row for row in compare([result])[1] if row[0] == "cells preempted"]
    assert row[1] == "3"
    assert result.figures()["preemptions"]["idle"] == 5


def test_too_many_sessions_or_students_are_refused_before_they_are_all_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A course of a million took more than a minute and gigabytes before it was refused."""
    monkeypatch.setattr(workload, "CELLS_MAX", 50)
    with pytest.raises(InvalidRequest, match="more than 50 cells"):
        generate(1, sessions=10**12, days=2)
    with pytest.raises(InvalidRequest, match="more than 50 cells"):
        course(1, students=10**12, labs=[parse_lab("Tue 10:00-12:00")])


@pytest.mark.needs("material")
@pytest.mark.slow
def test_the_two_day_trace_comes_out_as_it_did() -> None:
    """64 GPUs: 1,369 of 5,070 reserved GPU-hours leased, and all but a few cells start at once."""
    sessions = read_trace(Path(os.environ["SUBLET_MATERIAL"], "data", "notebook-trace-2days.csv"))
    result = Replay(sessions, ReplayHardware(gpus=64)).run()
    assert (result.sessions, result.cells) == (59, 518)
    assert round(result.held_ns / HOUR_NS) == 1369
    assert round(result.reserved_ns / HOUR_NS) == 5070
    assert result.at_once >= 0.998
    reserved = run_peer(PEERS[0], sessions, ReplayHardware(gpus=256))
    assert reserved.held_ns == reserved.reserved_ns == result.reserved_ns, "with room for all, nothing waits"


@pytest.mark.needs("material")
@pytest.mark.slow
def test_with_the_gpus_that_a_batch_queue_needs_newcomers_start_within_a_notice() -> None:
    """48 GPUs: the fewest from which on FIFO starts at least 85 % of the cells at once. Long cells take turns there."""
    sessions = read_trace(Path(os.environ["SUBLET_MATERIAL"], "data", "notebook-trace-2days.csv"))
    fewer, enough = (run_peer(PEERS[3], sessions, ReplayHardware(gpus=gpus)).at_once for gpus in (47, 48))
    assert fewer < 0.85 <= enough
    result = Replay(sessions, ReplayHardware(gpus=48)).run()
    assert result.start_within(result.notice_ns) >= 0.99
    assert result.at_once >= 0.95
    assert result.held_ns < 0.3 * result.reserved_ns


def test_a_short_cell_does_not_wait_for_the_turns_of_long_ones() -> None:
    """Three long cells take turns on two GPUs. Short ones come at any moment, and each starts within five minutes and a
    notice; before there were further turns one waited for half an hour."""
    long = [WorkloadSession(f"long{n}", 0.0, (Cell(0, 600, 1),), 600.0) for n in range(3)]
    short = [WorkloadSession(f"short{n}", 180.0 + 47 * n, (Cell(0, 3, 1),), 190.0 + 47 * n) for n in range(8)]
    longest = []
    for policy in (POLICY, replace(POLICY, turn_least_ns=POLICY.max_hold_ns)):
        result = Replay([*long, *short], ReplayHardware(gpus=2), rules=Rules(policy=policy), check_every=1).run()
        waits = [took - run for tenant, run, took in result.done if tenant.startswith("short")]
        assert len(waits) == 8
        longest.append(max(waits) // NS_PER_S)
    assert longest[0] <= 5 * 60 + 34
    assert longest[1] > 10 * 60


def test_short_cells_beside_a_run_of_hours_find_their_gpu_after_a_pause() -> None:
    """One GPU; a run of eight hours, and a person whose cells take half a minute, with two minutes of thought between
    them. When the run got the GPU back in each pause, it was taken from it ninety times, and half of the cells waited
    for more than three minutes."""
    run = WorkloadSession("run", 0.0, (Cell(0, 480, 1),), 480.0)
    person = WorkloadSession("person", 60.0, (Cell(2, 0.5, 1),) * 90, 600.0)
    taken, waits_s = [], []
    for policy in (POLICY, replace(POLICY, pause_ns=1)):
        result = Replay([run, person], ReplayHardware(gpus=1), rules=Rules(policy=policy), check_every=1).run()
        taken.append(result.preemptions["fair_share"])
        waits_s.append(result.wait_s(0.5))
        assert result.finished_ns <= 12.5 * HOUR_NS
    assert (waits_s[0], taken[0]) <= (0, 40)
    assert waits_s[1] > 180
    assert taken[1] > 80


def test_a_trace_of_our_own_comes_out_as_counted_by_hand() -> None:
    """One cell of an hour in a session of ten: an hour used, five minutes more held, ten hours reserved."""
    [result] = [Replay([WorkloadSession("s", 0.0, (Cell(60, 60, 2),), 600.0)], ReplayHardware(gpus=2)).run()]
    assert result.used_ns == 2 * HOUR_NS
    assert 2 * HOUR_NS < result.held_ns <= 2 * HOUR_NS + 2 * HOUR_NS // 12
    assert result.reserved_ns == 20 * HOUR_NS
    assert result.waits_ns == [0]
    assert result.done == [("s", HOUR_NS, HOUR_NS)]


def test_an_idle_lease_is_kept_for_the_time_to_live_of_the_policy() -> None:
    """One cell of an hour; with a minute to live instead of five less is held after it."""
    session = [WorkloadSession("s", 0.0, (Cell(0, 60, 1),), 600.0)]
    short = replace(POLICY, ttl_gpu_ns=60 * NS_PER_S)
    minute, five = (
        Replay(session, ReplayHardware(gpus=1), rules=Rules(policy=policy)).run() for policy in (short, POLICY)
    )
    assert HOUR_NS < minute.held_ns <= HOUR_NS + 60 * NS_PER_S < five.held_ns


# ---- courses, jobs, other seeds ----


def test_a_lab_is_a_day_and_two_times() -> None:
    assert parse_lab("Tue 10:00-12:00") == Lab(1440 + 600, 1440 + 720)
    for wrong in (
        "Tue",
        "Tuesday 10:00-12:00",
        "Tue 12:00-10:00",
        "Tue 10:61-12:00",
        "Xxx 10:00-12:00",
        "Tue 23:00-25:00",
    ):
        with pytest.raises(InvalidRequest, match="is not the time of a lab"):
            parse_lab(wrong)


def test_students_come_within_ten_minutes_and_share_devices() -> None:
    """A tenant for each, a third of the cells without GPU, parts of devices; the same seed gives the same course."""
    found = course(1, students=60, labs=[parse_lab("Tue 10:00-12:00")])
    assert found == course(1, students=60, labs=[parse_lab("Tue 10:00-12:00")])
    labs = [session for session in found if session.start_min < 11]
    assert len({session.owner for session in labs}) == 60
    nights = [session for session in found if session.start_min > 2 * 1440]
    assert 15 < len(nights) < 45
    cells = [cell for session in found for cell in session.cells]
    assert 0.25 < sum(cell.gpus == 0 for cell in cells) / len(cells) < 0.42
    assert all(cell.shared and 0 < cell.vram_gib <= 16 for cell in cells if cell.gpus)
    result = Replay(labs, ReplayHardware(gpus=1), check_every=7).run()
    assert result.cells == sum(cell.gpus for session in labs for cell in session.cells)
    assert result.held_ns < HOUR_NS * 3, "one device, in parts, for two hours and what was left to do after them"
    alone = run_peer(PEERS[3], labs, ReplayHardware(gpus=1))
    assert alone.wait_s(0.5) > result.wait_s(0.5), "a queue of whole devices"


def test_jobs_of_a_batch_cluster_run_in_the_background(tmp_path: Path) -> None:
    """Their columns are named, they wait for notebooks, and a job that was preempted goes on."""
    path = tmp_path / "jobs.csv"
    path.write_text("submit,run,n,vc\n0,7200,2,a\n60,60,0,b\n86400000,60,1,a\n")
    columns = {"start": "submit", "duration": "run", "gpus": "n", "user": "vc"}
    jobs = read_jobs(path, columns)
    assert [job.cells[0].duration_min for job in jobs] == [120.0, 1.0], "one needs no GPU"
    assert {(job.owner, job.tier) for job in jobs} == {("user-a", Tier.BATCH)}
    both = merged([WorkloadSession("s", 15.0, (Cell(0, 10, 2),), 60.0)], jobs)
    assert len(both) == 2, "the second job comes after everything"
    result = Replay(both, ReplayHardware(gpus=2), costs=Costs(move_ns=5 * NS_PER_S), check_every=1).run()
    assert result.preemptions == {"preempted": 1, "idle": 1}, "the job, and then the notebook that had nothing to run"
    assert result.moving_ns == 2 * 5 * NS_PER_S
    assert result.used_ns == 2 * 130 * 60 * NS_PER_S + result.moving_ns
    assert result.waits_ns[1] <= 35 * NS_PER_S, "the notebook waits for the notice, not for the job"
    for wrong, says in (
        ({"start": "submit"}, "duration, gpus are not named"),
        (columns | {"color": "red"}, "jobs have no"),
        (columns | {"unit": "weeks"}, "not a unit"),
        (columns | {"tier": "interactive"}, "no tier of background work"),
        (columns | {"gpus": "cards"}, "has no cards"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            read_jobs(path, wrong)


def test_jobs_without_a_column_of_users_are_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("start,dur,gpus\n0,60,1\n60,120,2\n")
    found = read_jobs(path, {"start": "start", "duration": "dur", "gpus": "gpus"})
    assert {job.owner for job in found} == {"jobs"}
    assert [job.cells[0].gpus for job in found] == [1, 2]


def test_another_seed_of_a_trace_draws_whole_sessions() -> None:
    sessions = [WorkloadSession(f"s{n}", float(n), (Cell(0, 1 + n, 1),), 9.0 + n) for n in range(20)]
    assert resample(sessions, 1) == sessions
    other = resample(sessions, 2)
    assert len(other) == 20
    assert other == resample(sessions, 2)
    assert {one.cells for one in other} < {one.cells for one in sessions}
    assert len({one.owner for one in other}) == 20
    assert peak_gpus(sessions, 80.0) == max(sum(n <= at < 2 * n + 1 for n in range(20)) for at in range(60))


# ---- what holds in the replay ----


@pytest.mark.parametrize(("gpus", "warm"), [((2, 1), 1), ((1, 1), 1), ((1, 2), 0)])
def test_a_cell_goes_on_with_what_its_session_holds_if_that_is_enough(gpus: tuple[int, int], warm: int) -> None:
    session = WorkloadSession("s", 0.0, tuple(Cell(1, 5, count) for count in gpus), 20.0)
    result = Replay([session], ReplayHardware(gpus=2), check_every=1).run()
    assert (result.cells, result.warm) == (2, warm)


def test_a_cell_beyond_a_quota_is_left_out_and_one_within_it_waits() -> None:
    """The limits of a policy are the ledger's own."""
    cells = (Cell(0, 5, 2), Cell(0, 5, 1))
    both = [WorkloadSession(f"s{n}", 0.0, cells, 20.0, tenant="ana") for n in range(2)]
    result = Replay(
        both, ReplayHardware(gpus=4), rules=Rules(policy=Policy(quota_default=Quota(gpus=1))), check_every=1
    ).run()
    assert (result.cells, result.refused) == (2, 2)
    assert result.fluid_ns > 0
    assert result.bound_ns is None, "it counts the work that was left out"
    first, second = sorted(result.waits_ns)
    assert first == 0
    assert second >= 5 * NS_PER_S, "of one tenant, one at a time"


RESERVED = """
[group.course]
[reservation.lab]
group = "course"
gpus = 1
when = "every Mon 01:00-02:00"
zone = "Europe/Berlin"
"""


@pytest.mark.parametrize(("text", "wait_s"), [("[group.course]", 32), (RESERVED, 0)])
def test_a_reservation_of_the_policy_is_free_when_the_course_comes(text: str, wait_s: int) -> None:
    """Without it the student waits for the notice of whom else holds the GPU, and for its clearing."""
    other = WorkloadSession("other", 0.0, (Cell(0.0, 180.0, 1, 1.0),), 300.0)
    student = WorkloadSession("student", 60.0, (Cell(0.0, 1.0, 1, 1.0),), 70.0, group="course")
    rules = Rules(declared=parse_policy(text).declared)
    result = Replay([other, student], ReplayHardware(gpus=1), rules=rules, check_every=1).run()
    assert sorted(result.waits_ns) == [0, wait_s * NS_PER_S]
    assert ("preempted" if wait_s == 0 else "fair_share") in result.preemptions


def test_members_of_a_group_are_held_to_its_ceiling() -> None:
    """Those that the policy names, and no others."""
    both = [WorkloadSession(name, 0.0, (Cell(0.0, 10.0, 1, 1.0),), 20.0) for name in ("ana", "ben", "cleo")]
    declared = parse_policy('[group.course]\nceiling = 1\nmembers = ["ana", "ben"]').declared
    result = Replay(both, ReplayHardware(gpus=3), rules=Rules(declared=declared), check_every=1).run()
    assert sum(wait > 0 for wait in result.waits_ns) == 1
    assert Rules(declared=parse_policy("[group.a]\nfloor = 2\n[group.b]\nfloor = 1").declared).least == 3


def test_a_cell_begins_once_it_has_started_on_its_gpus() -> None:
    """The start is part of its wait and of what its GPUs are used for; one that finds them still held needs none."""
    sessions = [WorkloadSession("s", 0.0, (Cell(0, 1, 1), Cell(1, 1, 1)), 3.0)]
    result = Replay(sessions, ReplayHardware(gpus=1), costs=Costs(start_ns=2 * NS_PER_S), check_every=1).run()
    assert list(result.waits_ns) == [2 * NS_PER_S, 0]
    assert result.warm == 1
    assert result.used_ns == 122 * NS_PER_S
    assert result.start_within(NS_PER_S) == 0.5


def test_costs_are_read_from_a_measured_file(tmp_path: Path) -> None:
    path = tmp_path / "taken.json"
    figures = [("from the notice to a free device", 140.0), ("from the grant to the first line", 600.0)]
    said = ", ".join(f'{{"name": "{name}", "ours": {{"median": {ms}}}}}' for name, ms in figures)
    path.write_text(f'{{"figures": [{said}]}}')
    costs = read_costs(path)
    assert (costs.clear_ns, costs.start_ns, costs.move_ns) == (140_000_000, 600_000_000, 740_000_000)
    assert "taken.json" in costs.source
    for wrong in ("", "[]", '{"figures": []}', f'{{"figures": [{said.replace("140.0", "-1")}]}}'):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest, match="no result of the benchmark"):
            read_costs(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_costs(tmp_path / "none.json")


# ---- the models beside it ----

TWO = [
    WorkloadSession("a", 0.0, (Cell(0, 10, 2), Cell(100, 10, 1)), 200.0),
    WorkloadSession("b", 5.0, (Cell(0, 10, 1),), 50.0),
]


@pytest.mark.parametrize(
    ("peer", "held_min", "waits_min"),
    [
        ("reservation", 2 * 200 + 45, [0, 0, 195]),
        ("cull 90m", 2 * 100 + 2 * 90 + 45, [0, 95, 35]),
        ("cull 30m", 2 * 40 + 2 * 40 + 40, [0, 35, 0]),
        ("FIFO", 20 + 10 + 10, [0, 5, 0]),
        ("backfill", 20 + 10 + 10, [0, 5, 0]),
    ],
)
def test_models_of_others_come_out_as_counted_by_hand(peer: str, held_min: int, waits_min: list[int]) -> None:
    """Two sessions on two GPUs."""
    [model] = [one for one in PEERS if one.name == peer]
    result = run_peer(model, TWO, ReplayHardware(gpus=2))
    assert result.cells == 3
    assert result.held_ns / (60 * NS_PER_S) == held_min
    assert [wait // (60 * NS_PER_S) for wait in result.waits_ns] == waits_min


def test_fifo_lets_nobody_pass_and_backfill_only_who_delays_nobody() -> None:
    """Two GPUs, one busy for ten minutes, then a cell for both: a short one may pass, a long one may not."""
    sessions = [
        WorkloadSession("busy", 0.0, (Cell(0, 10, 1),), 10.0),
        WorkloadSession("both", 1.0, (Cell(0, 10, 2),), 11.0),
        WorkloadSession("long", 2.0, (Cell(0, 20, 1),), 22.0),
        WorkloadSession("short", 3.0, (Cell(0, 5, 1),), 8.0),
    ]
    waits = {}
    for name in ("FIFO", "backfill"):
        [model] = [one for one in PEERS if one.name == name]
        result = run_peer(model, sessions, ReplayHardware(gpus=2))
        waits[name] = {tenant: (took - run) // (60 * NS_PER_S) for tenant, run, took in result.done}
    assert waits["FIFO"] == {"busy": 0, "both": 9, "long": 18, "short": 17}
    assert waits["backfill"] == {"busy": 0, "both": 9, "long": 18, "short": 0}


# ---- figures ----


def test_figures_are_those_of_what_was_noted() -> None:
    result = Result(gpus=2, start_ns=0, end_ns=10 * HOUR_NS, planned_ns=10 * HOUR_NS, used_ns=5 * HOUR_NS)
    result.waits_ns = [0, 5 * NS_PER_S, 6 * NS_PER_S, 61 * NS_PER_S]
    result.done = [("a", 60 * NS_PER_S, 60 * NS_PER_S), ("b", HOUR_NS, 3 * HOUR_NS)]
    for at_ns, by in ((HOUR_NS, 2), (3 * HOUR_NS, -1), (5 * HOUR_NS, -1)):
        result.note_queue(at_ns, by)
    assert (result.at_once, result.start_within(60 * NS_PER_S)) == (0.5, 0.75)
    assert result.load == 0.25
    assert [mean for _, mean, _ in result.queue(10)] == [0, 2, 2, 1, 1, 0, 0, 0, 0, 0]
    assert [most for _, _, most in result.queue(2)] == [2, 0]
    assert result.worst() == ("b", 3.0)
    assert result.jain() == pytest.approx((1 + 1 / 3) ** 2 / (2 * (1 + 1 / 9)))
    assert result.slowdowns() == [("up to 5 min", 1, 1.0, 1.0), ("30 min to 4 h", 1, 3.0, 3.0)]
    assert set(COLUMNS) <= set(TRACE.splitlines()[0].split(","))


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_no_policy_is_through_before_the_fluid_bound(gpus: int) -> None:
    """Whatever shares the GPUs; and on ample ones without a pause the bound is what the last cell takes."""
    sessions, hardware = generate(3, sessions=6, days=1), ReplayHardware(gpus=gpus, per_node=4)
    results = [Replay(sessions, hardware).run(), *(run_peer(peer, sessions, hardware) for peer in PEERS)]
    for result in results:
        assert result.fluid_ns <= result.finished_ns, result.name
        assert result.bound_ns == result.fluid_ns == results[0].fluid_ns
    figures = results[0].figures()["through_after_days"]
    assert figures["measured"] >= figures["fluid_bound"] > 0


def test_long_cells_are_less_than_four_times_slower_near_nine_tenths_of_the_devices() -> None:
    """A generated week but one, whose cells use 24 GPUs for 87 % of the time; the bound from demand alone is printed
    beside what was measured."""
    result = Replay(generate(2, sessions=40, days=6), ReplayHardware(gpus=24)).run()
    assert 0.85 < result.used_ns / (24 * result.planned_ns) < 0.9
    lengths, slow = zip(*((run, took / run) for _, run, took in result.done if run > 4 * HOUR_NS), strict=True)
    assert len(lengths) >= 15
    assert quantiles(slow, n=20)[18] < 4
    assert 0.99 * result.planned_ns < result.fluid_ns <= result.finished_ns


def test_the_fluid_bound_by_hand() -> None:
    """Two GPUs; four hours of work that all comes at minute 0 take two hours, and a late short cell more than that."""
    crowd = [WorkloadSession(f"s{n}", 0.0, (Cell(0, 60, 1),), 60.0) for n in range(4)]
    hardware = ReplayHardware(gpus=2)
    assert fluid_bound_ns(crowd, hardware) == pytest.approx(120 * 60 * NS_PER_S)
    late = WorkloadSession("late", 0.0, (Cell(110, 20, 1), Cell(0, 5, 64), Cell(5, 30, 1)), 200.0)
    bound_ns = fluid_bound_ns([*crowd, late], hardware)
    assert bound_ns == pytest.approx((110 + 20 + 5 + 30) * 60 * NS_PER_S), "a cell that fits no node is left out"
    assert Replay(crowd, hardware).run().finished_ns >= 120 * 60 * NS_PER_S
