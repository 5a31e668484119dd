"""The command, the search for a number of GPUs, and the plots."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.errors import InvalidRequest
from sublet.simulate.find import Point, _may_meet, find, late, parse_goal
from sublet.simulate.replay import Replay, ReplayHardware
from sublet.simulate.results import Result
from sublet.simulate.workload import Cell, WorkloadSession
from sublet.values import NS_PER_S

HEADS = "session,session_start_min,session_stop_min,cell_start_min,cell_duration_min,gpus,vram_gb\n"
TRACE = HEADS + "".join(f"s{n},{n},{n + 90},{n + 1},{5 + n},{1 + n % 2},2.0\n" for n in range(8))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def found(share_of: dict[int, float], most: int = 60, goal: str = "start_within(10s) >= 0.9") -> tuple[int, set[int]]:
    """The answer for a curve given by its steps, and the counts that were tried."""

    def run(gpus: int, seed: int) -> Result:
        share = max((at, share) for at, share in share_of.items() if at <= gpus)[1]
        return Result(waits_ns=[0] * round(100 * share) + [3600 * NS_PER_S] * round(100 * (1 - share)))

    answer = find(parse_goal(goal), most, [1], run)
    return answer.gpus, {point.gpus for point in answer.points}


# ---- the search ----


def test_the_smallest_number_is_found_on_a_curve_that_rises() -> None:
    gpus, tried = found({1: 0.2, 17: 0.95})
    assert gpus == 17
    assert 16 in tried
    assert {18, 19, 20, 21} <= tried


def test_a_curve_that_falls_again_moves_the_answer_up() -> None:
    """17 meets the goal and 19 does not: whoever buys 17 is told so, and the answer is 23."""
    gpus, tried = found({1: 0.2, 17: 0.95, 19: 0.5, 23: 0.96})
    assert gpus == 23
    assert len(tried) < 41


def test_few_numbers_are_tried_of_many() -> None:
    """Halving: a range ten times as large costs three or four runs more."""
    counts = [len(found({1: 0.2, most // 3: 0.95}, most)[1]) for most in (60, 600, 6000)]
    assert counts[2] <= counts[1] + 5 <= counts[0] + 10
    assert counts[2] <= 25


def test_a_number_far_above_the_answer_that_misses_moves_it_up() -> None:
    """17 meets the goal, and so do those right above it; 38, which is half-way to the largest, does not."""
    gpus, tried = found({1: 0.2, 17: 0.95, 38: 0.5, 42: 0.96})
    assert gpus == 42
    assert 38 in tried


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_a_seed_that_is_left_out_could_not_have_helped(count: int) -> None:
    """Whatever the others came to: compared with many drawn shares."""
    goal, rng = parse_goal("start_within(10s) >= 0.9"), random.Random(count)
    for _ in range(3000):
        shares = [rng.choice((rng.random(), rng.uniform(0.85, 1.0), 1.0)) for _ in range(count)]
        tried = next((n for n in range(1, count + 1) if not _may_meet(goal, shares[:n], count)), count)
        if tried < count:
            assert not Point(1, tuple(shares)).meets(goal), f"{shares} meet it, and {tried} of them were tried"
            assert not Point(1, tuple(shares[:tried])).meets(goal)


def test_the_first_count_can_be_the_answer() -> None:
    assert found({1: 1.0})[0] == 1


def test_a_goal_that_no_number_reaches_is_refused_with_the_best() -> None:
    with pytest.raises(InvalidRequest, match=r"no number of GPUs up to 60 reaches .*; the best is 70\.0%, with"):
        found({1: 0.2, 20: 0.7})


def test_chance_counts_against_the_goal() -> None:
    """The lower end of the interval over seeds must meet it, not the mean."""
    goal = parse_goal("start_within(10s) >= 90%")
    assert not Point(3, (0.85, 0.99, 0.99)).meets(goal)
    assert Point(3, (0.96, 0.97, 0.98)).meets(goal)
    low, high = Point(3, (0.96, 0.97, 0.98)).interval
    assert (low, high) == pytest.approx((0.97 - 4.30 * 0.01 / 3**0.5, 0.97 + 4.30 * 0.01 / 3**0.5))


def test_one_run_may_lie_further_from_the_mean_than_the_mean_of_all_is_unsure() -> None:
    """The prediction interval; of one seed, nothing is known of another run."""
    low, high = Point(3, (0.96, 0.97, 0.98)).one_run
    assert (low, high) == pytest.approx((0.97 - 4.30 * 0.01 * (4 / 3) ** 0.5, 1.0))
    assert Point(3, (0.96,)).one_run == (0.0, 1.0)


def test_a_run_is_stopped_when_it_is_certain_to_miss_the_goal() -> None:
    """Ten cells of ten minutes for one GPU at once; the first four say enough."""
    sessions = [WorkloadSession(f"s{n}", 0.0, (Cell(0, 10, 1),), 60.0) for n in range(10)]
    goal = parse_goal("start_within(10s) >= 0.9")
    bound = late(goal, 10)
    assert bound == (10 * NS_PER_S, 3)
    stopped = Replay(sessions, ReplayHardware(gpus=1), late=bound).run()
    assert stopped.stopped
    assert 4 <= stopped.cells < 10
    assert not Replay(sessions, ReplayHardware(gpus=10), late=bound).run().stopped
    seeds: list[int] = []

    def run(gpus: int, seed: int) -> Result:
        seeds.append(seed)
        return Replay(sessions, ReplayHardware(gpus=gpus), late=bound).run()

    answer = find(goal, 10, [1, 2], run)
    assert answer.gpus == 9
    first = answer.points[0]
    assert (first.gpus, first.stopped) == (5, True)
    assert first.shares == pytest.approx((0.7,))
    assert len(seeds) < 2 * len(answer.points), "no second seed where the first was stopped"


@pytest.mark.parametrize(
    "wrong", ["", "start_within(10s)", "start_within(10) > 0.9", "wait(10s) >= 0.9", "start_within(x) >= 0.9",
              "start_within(10s) >= 1.5", "start_within(10s) >= 0", "start_within(10s) >= 0.9.5"]
)  # fmt: skip
def test_a_goal_that_says_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_goal(wrong)


# ---- the command ----


def test_the_command_compares_leases_with_what_others_do(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with a column for each, and every assumption on a line."""
    assert main(["simulate", "--trace", trace, "--gpus", "4"]) == 0
    said = capsys.readouterr().out
    assert "8 sessions, 8 GPU cells" in said
    for head in ("leases", "reservation", "cull 90m", "cull 30m", "FIFO", "backfill"):
        assert head in said
    assert "- 4 GPUs of 80 GiB, all alike, on nodes of 8" in said
    assert "- a device is clear 2 s after its lease (assumed)" in said


def test_the_document_has_what_the_table_has(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates, policy = tmp_path / "rates.toml", tmp_path / "policy.toml"
    rates.write_text('currency = "EUR"\ngpu = 2.0\n')
    policy.write_text("[tenant]\ngpus = 1\n")
    words = ["simulate", "--trace", trace, "--gpus", "4", "--json", "--rates", str(rates)]
    assert main([*words, "--second-policy", str(policy)]) == 0
    document = json.loads(capsys.readouterr().out)
    ours, second, reserved = document["results"][:3]
    assert document["find"] is None
    assert (ours["name"], second["name"], reserved["name"]) == ("leases", "policy 2", "reservation")
    assert ours["cells"] == 8
    assert (second["cells"], second["refused"]) == (4, 4), "no tenant may have two GPUs"
    assert ours["gpu_hours"]["used"] < ours["gpu_hours"]["held"] < reserved["gpu_hours"]["held"]
    assert ours["cost"] == {"amount": pytest.approx(2 * ours["gpu_hours"]["held"]), "currency": "EUR"}
    assert document["assumptions"]


def test_the_command_finds_the_number_and_draws_it(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many GPUs as it names the goal holds, and the plots are SVG that can be read."""
    plots = tmp_path / "plots"
    words = [
        "simulate",
        "--trace",
        trace,
        "--find",
        "gpus",
        "--such-that",
        "start_within(10s) >= 0.6",
        "--seeds",
        "3",
        "--gpus",
        "16",
    ]
    assert main([*words, "--json", "--svg", str(plots)]) == 0
    document = json.loads(capsys.readouterr().out)
    answer = document["find"]
    assert 2 <= answer["gpus"] <= 16
    assert document["results"][0]["gpus"] == answer["gpus"]
    [point] = [one for one in answer["points"] if one["gpus"] == answer["gpus"]]
    assert point["low"] >= 0.6
    assert len(point["seeds"]) == 3
    assert point["one_run"]["low"] <= point["low"] <= point["high"] <= point["one_run"]["high"]
    assert sorted(path.name for path in plots.iterdir()) == ["find.svg", "gpu-hours.svg", "queue.svg", "waits.svg"]
    for path in plots.iterdir():
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.findall("{http://www.w3.org/2000/svg}text")
        assert "nan" not in path.read_text()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{answer['gpus']} GPUs for start_within(10s) >= 0.6, over 3 seeds. One such workload has a share" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the number of GPUs is missing"),
        (("--gpus", "0"), "is not a count"),
        (("--gpus", "2", "--course", "5"), "belong together"),
        (("--gpus", "2", "--course", "5", "--lab", "noon"), "is not the time of a lab"),
        (("--gpus", "2", "--find", "gpus"), "belong together"),
        (("--gpus", "2", "--trace", "none.csv"), "cannot be read"),
        (("--gpus", "2", "--trace", "none.csv", "--days", "3"), "are for generated sessions"),
        (("--gpus", "2", "--jobs", "none.csv"), "belong together"),
        (("--gpus", "2", "--jobs", "none.csv", "--job-columns", "start"), "needs NAME=COLUMN"),
        (("--gpus", "2", "--policy", "none.toml"), "cannot be read"),
        (("--gpus", "2", "--days", "1", "--sessions", "1", "--svg", "/dev/null/x"), "cannot be written"),
        (("--find", "gpus", "--such-that", "much"), "is not a goal"),
        (("--gpus", "2", "--pay-priority", "120%"), "'120%' is not a share"),
        (("--gpus", "2", "--pay-priority", "some"), "'some' is not a share"),
        (("--gpus", "2", "--pay-priority", "nan"), "'nan' is not a share"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) in (1, 2)
    assert says in capsys.readouterr().err


def test_tenants_that_pay_for_priority_wait_for_less_and_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU, twelve cells of five minutes that come at once; a quarter of the tenants pay."""
    path, rates = tmp_path / "trace.csv", tmp_path / "rates.toml"
    path.write_text(HEADS + "".join(f"s{n},0,600,0,5,1,2.0\n" for n in range(12)))
    rates.write_text('currency = "EUR"\ngpu = 2.0\npriority = 1.0\n')
    words = ["simulate", "--trace", str(path), "--gpus", "1", "--rates", str(rates)]
    assert main([*words, "--pay-priority", "25%", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ours, others = document["results"][0], document["results"][1:]
    assert ours["priority"]["paying"]["p95"] < ours["priority"]["others"]["p50"]
    assert all("priority" not in other for other in others), "other systems sell none"
    held = ours["gpu_hours"]["held"]
    assert 2 * held < ours["cost"]["amount"] < 3 * held
    assert "25% of the tenants pay for priority, for all of their cells, drawn by the seed" in document["assumptions"]
    assert main([*words, "--pay-priority", "0.25"]) == 0
    assert "p95, paying / others" in capsys.readouterr().out
    rates.write_text('currency = "EUR"\ngpu = 2.0\n')
    assert main([*words, "--pay-priority", "25%"]) == 2
    assert "priority is not for sale by these rates" in capsys.readouterr().err
    assert main(words) == 0
    assert "paying / others" not in capsys.readouterr().out


def test_a_course_has_its_floor_and_its_labs_reserved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside batch jobs that would have all GPUs; and a group that the file has not is refused."""
    jobs, file = tmp_path / "jobs.csv", tmp_path / "policy.toml"
    jobs.write_text("start,dur,gpus\n" + "".join(f"{n},4,1\n" for n in range(12)))
    file.write_text(
        "[group.course]\nfloor = 1\n[reservation.lab]\ngroup = 'course'\ngpus = 2\n"
        "when = 'every Tue 10:00-11:00'\nzone = 'Europe/Berlin'\n"
    )
    words = ["simulate", "--course", "6", "--lab", "Tue 10:00-11:00", "--gpus", "2", "--jobs", str(jobs)]
    words += ["--job-columns", "start=start,duration=dur,gpus=gpus,unit=h", "--policy", str(file), "--json"]
    shares = []
    for more in ([], ["--group", "course"]):
        assert main([*words, *more]) == 0
        document = json.loads(capsys.readouterr().out)
        shares.append(document["results"][0]["start_within"]["at_once"])
        assert "minute 0 is Tue 10:00 in the time zone of the reservations, in January" in document["assumptions"]
    assert shares[0] < shares[1]
    assert main([*words, "--group", "corse"]) == 2
    assert "there is no group corse in the file of --policy" in capsys.readouterr().err


def test_a_goal_out_of_reach_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten cells come at once, and there are never more than two GPUs."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADS + "".join(f"s{n},0,90,1,60,1,2.0\n" for n in range(10)))
    words = ["--find", "gpus", "--such-that", "start_within(10s) >= 0.9", "--gpus", "2", "--seeds", "1"]
    assert main(["simulate", "--trace", str(path), *words]) == 2
    assert "no number of GPUs up to 2 reaches start_within(10s) >= 0.9; all are below 70%" in capsys.readouterr().err


# ---- several models ----


def test_the_number_of_one_model_is_found_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that want a T4 beside one that no T4 can run; the A100 stay as they are."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"s{n},0,90,1,20,1,4,T4\n" for n in range(3)) + "large,0,90,1,20,1,30,\n"
    path.write_text(HEADS.replace("vram_gb", "vram_gb,model") + rows)
    words = ["simulate", "--trace", str(path), "--gpus", "1xA100-40GiB,8xT4-16GiB", "--seeds", "1"]
    goal = ["--such-that", "start_within(10s) >= 0.95"]
    assert main([*words, "--find", "gpus:T4", *goal, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["find"]["model"], answer["find"]["gpus"]) == ("T4", 3)
    assert answer["results"][0]["gpus"] == 4, "all of them"
    assert main([*words, "--find", "gpus:T4", *goal]) == 0
    assert "3 GPUs of model T4, beside 1xA100-40GiB, for start_within(10s) >= 0.95" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "4xA100"], "neither a number of GPUs nor a list of models"),
        (["--gpus", "xA100-40GiB"], "neither a number"),
        (["--gpus", "0xA100-40GiB"], "not a count"),
        (["--gpus", "1xT4-16GiB,1xT4-8GiB"], "a model twice"),
        (["--gpus", "1xT4-16GiB", "--vram", "8GiB"], "--vram is for GPUs of one model"),
        (["--gpus", "1xT4-16GiB", "--find", "gpus:V100", "--such-that", "start_within(1s) >= 1"], "there is no 'V100'"),
        (["--gpus", "1", "--find", "cards", "--such-that", "start_within(1s) >= 1"], "cannot be found"),
    ],
)
def test_what_is_no_list_of_models_is_refused(
    trace: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", trace, *words]) == 2
    assert says in capsys.readouterr().err


def test_a_policy_that_names_a_model_holds_on_hardware_that_has_it(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[group.lab]\n[reservation.lab]\ngroup = "lab"\ngpus = 1\nwhen = "every Tue 10:00-12:00"\nzone = "UTC"\n'
        'model = "A100"\n'
    )
    words = ["simulate", "--trace", trace, "--policy", str(policy), "--json", "--gpus"]
    assert main([*words, "2xA100-40GiB,1xT4-16GiB"]) == 0
    assert main([*words, "3"]) == 2
    said = capsys.readouterr().err
    assert "reservation lab is for GPUs called 'A100', and --gpus names none" in said
    assert "--gpus 3xA100-80GiB" in said
    policy.write_text(policy.read_text().replace("gpus = 1", "gpus = 4"))
    assert main([*words, "3xA100-40GiB"]) == 2
    assert "4 GPUs called 'A100' are more than there are (3)" in capsys.readouterr().err


def test_a_column_shows_what_it_is_worth_that_idle_holders_yield(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU, idle after a cell of a minute: the next person gets it after seconds, else when its time is over."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADS + "a,0,90,0,1,1,4\nb,0,90,2,1,1,4\n")
    assert main(["simulate", "--trace", str(path), "--gpus", "1", "--no-yield", "--json"]) == 0
    ours, without = json.loads(capsys.readouterr().out)["results"][:2]
    assert (ours["name"], without["name"]) == ("leases", "no yield")
    assert ours["wait_s"]["p99"] < 10
    assert without["wait_s"]["p99"] > 150
