"""The harness itself: what it calls met, how it compares, how it reads an answer. `pytest benchmarks` runs these."""

from __future__ import annotations

import itertools
import math
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import harness
from benchmarks.harness import Bench, Goal, Report, figure, judge
from benchmarks.load import closed, paced
from benchmarks.load.closed import ClosedLoop
from benchmarks.load.http1 import BadAnswer, Request, Step, Template, ask, connect, take_answer
from benchmarks.load.paced import Due, Paced
from benchmarks.machine import Disk, this_machine
from benchmarks.peers.null import NullServer
from benchmarks.procs import cpu_seconds, tree, wait_until
from benchmarks.record import as_text, number, to_dict
from benchmarks.stats import compare, percentile, summarise
from tests.left_open import left_of


def test_percentiles_lie_between_the_samples() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_a_summary_has_p99_only_of_single_operations() -> None:
    assert summarise([1.0, 2.0, 3.0]).p99 is None
    assert summarise([1.0], operations=range(101)).p99 == 99.0


def test_a_ratio_above_one_is_better_whatever_the_unit() -> None:
    assert compare([10.0, 20.0], [5.0, 5.0], higher_is_better=True).ratio == 3.0
    assert compare([10.0], [5.0], higher_is_better=False).ratio == 0.5
    assert compare([0.0], [5.0], higher_is_better=False).ratio == math.inf
    with pytest.raises(ValueError, match="not pairs"):
        compare([1.0], [1.0, 2.0], higher_is_better=True)


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        (Goal(figure="x", at_most=10), "met"),
        (Goal(figure="x", at_most=9.9), "not met"),
        (Goal(figure="x", of="ratio", at_least=2), "met"),
        (Goal(figure="x", of="ratio", at_least=2.1), "not met"),
        (Goal(figure="x", of="difference", at_most=-10), "met"),
        (Goal(figure="y", at_most=1), "not measured"),
        (Goal(figure="alone", of="ratio", at_least=0), "not measured"),
    ],
)
def test_a_goal_is_met_or_not_and_never_skipped(goal: Goal, said: str) -> None:
    figures = [figure("x", "ms", [10.0], [20.0], peer_name="p"), figure("alone", "ms", [1.0])]
    assert judge(goal, figures).said == said


def test_a_goal_has_exactly_one_bound() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Goal(figure="x")
    with pytest.raises(ValueError, match="exactly one"):
        Goal(figure="x", at_most=1, at_least=1)


def test_pairs_alternate_and_the_first_pair_only_warms_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    bench = Bench(row="r", folder=tmp_path)
    monkeypatch.setattr(harness, "busy_with_others", lambda: lambda: 0.0)

    def one(name: str) -> int:
        order.append(name)
        return len(order)

    ours, peer = bench.pairs("x", lambda: one("A"), lambda: one("B"), pairs=2, show=lambda a, b: "")
    assert order == ["A", "B", "A", "B", "A", "B"]
    assert (ours, peer) == ([3, 5], [4, 6])


@pytest.mark.parametrize(
    ("disturbed", "kept", "noted"),
    [
        ([0, 0.9, 0.1, 0.9, 0.2], [2, 4], True),
        ([0, 0.1, 0.2], [1, 2], False),
        ([0, 0.9, 0.8, 0.9, 0.7, 0.9, 0.9, 0.9, 0.9], [2, 4], True),
    ],
    ids=["one came twice", "all quiet", "never quiet"],
)
def test_a_disturbed_pair_is_measured_again_whatever_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: list[float], kept: list[int], noted: bool
) -> None:
    bench = Bench(row="r", folder=tmp_path)
    levels, numbers = iter(disturbed), itertools.count()
    monkeypatch.setattr(harness, "busy_with_others", lambda: lambda: next(levels))
    ours, peer = bench.pairs("x", lambda: next(numbers), lambda: 0, pairs=2, show=lambda a, b: "")
    assert (ours, peer) == (kept, [0, 0])
    assert bool(bench.notes) == noted


def test_numbers_are_short() -> None:
    assert [number(one) for one in (0, 0.0123, 0.5, 12.34, 123.4, 12345.6)] == [
        "0",
        "0.0123",
        "0.50",
        "12.3",
        "123",
        "12,346",
    ]


def test_a_request_fills_its_placeholders_and_counts_its_body() -> None:
    made = Template(Step(path="/a/<<id>>", body='{"n":"<<n>>"}')).request({"id": b"x1", "n": b"7"})
    assert made.startswith(b"POST /a/x1 HTTP/1.1\r\n")
    assert made.endswith(b'Content-Length: 9\r\n\r\n{"n":"7"}')


def test_an_answer_is_taken_only_whole() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 3\r\n\r\nabc"
    for cut in range(len(whole)):
        assert take_answer(whole[:cut]) is None
    found = take_answer(whole)
    assert found is not None
    assert (found.status, found.body) == (200, b"abc")
    with pytest.raises(BadAnswer, match="behind"):
        take_answer(whole + b"x")
    with pytest.raises(BadAnswer, match="Content-Length"):
        take_answer(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")


def test_clients_in_a_closed_loop_count_what_they_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a millisecond with each look at it: a busy machine finishes little in a short time."""
    moments = itertools.count(0, 1_000_000)
    held = SimpleNamespace(perf_counter_ns=lambda: next(moments), process_time=time.process_time, time_ns=time.time_ns)
    monkeypatch.setattr(closed, "time", held)
    with NullServer(tmp_path) as server:
        load = ClosedLoop(server.address, server.cycle(), [{}] * 3)
        sample = load.run(0.2)
        assert sample.cycles == len(sample.cycle_ns) > 10
        assert 0 <= sample.requests - 2 * sample.cycles <= 3
        few = load.run(5, cycles_max=7, keep_taken=True)
        assert few.cycles == 7
        assert {one["id"] for one in few.taken} == {"0123456789abcdef"}
        load.close()


def test_an_answer_that_the_script_does_not_allow_stops_the_run(tmp_path: Path) -> None:
    with NullServer(tmp_path) as server:
        load = ClosedLoop(server.address, [Step(expect='"answer":"refusal"')], [{}])
        with pytest.raises(BadAnswer, match="step 1 was answered 200"):
            load.run(0.2)
        load.close()


def test_a_paced_load_keeps_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on only while no answer is under way."""
    now_ns = [0]
    held = SimpleNamespace(perf_counter_ns=lambda: now_ns[0], process_time=time.process_time)
    monkeypatch.setattr(paced, "time", held)
    with NullServer(tmp_path) as server:
        request = Request(method="POST", path="/", body="{}")
        schedule = [Due(at_s=n * 0.02, period_s=0.1, request=request, expect='"grant"') for n in range(5)]
        load = Paced(server.address, schedule, connections=2)
        epoll = load._epoll

        def poll(seconds: float) -> list[tuple[int, int]]:
            if load._out:
                return epoll.poll(60)
            now_ns[0] += round(seconds * 1e9)
            return []

        monkeypatch.setattr(load, "_epoll", SimpleNamespace(poll=poll, close=epoll.close))
        assert load.run(0.55).requests == 28
        load.close()
        assert ask(server.address, request).status == 200


def test_a_client_that_leaves_its_answer_unread_keeps_no_other_from_its_own(tmp_path: Path) -> None:
    with NullServer(tmp_path) as server:
        request = Request(method="POST", path="/", body="{}")
        with connect(server.address) as sock:
            sock.sendall(request.to_bytes())
            assert select.select([sock], [], [], 60) == ([sock], [], []), "no answer came"
        assert ask(server.address, request, timeout_s=60).status == 200


def test_processor_time_of_another_process_is_read(tmp_path: Path) -> None:
    threads = frozenset(threading.enumerate())
    with NullServer(tmp_path) as server:
        before = cpu_seconds(server.child.pid)
        load = ClosedLoop(server.address, server.cycle(), [{}])
        wait_until(
            lambda: load.run(0.2).cycles >= 0 and cpu_seconds(server.child.pid) > before, within_s=60, what="its time"
        )
        load.close()
        assert server.child.pid in tree(server.child.pid)
    assert not server.child.alive
    assert not left_of(lambda: frozenset(threading.enumerate()), threads)


def test_a_report_is_plain_json_with_few_digits() -> None:

    found = figure("x", "ms", [1.23456789], [0.0], peer_name="nothing")
    goal = Goal(figure="x", at_most=2)
    report = Report(
        row="r",
        title="t",
        figures=[found],
        verdicts=[judge(goal, [found])],
        notes=[],
        versions={},
        machine=this_machine(),
        disk=Disk(filesystem="ext4", fsync_us=1.0),
        busy_before=0.0,
        busy_during=0.0,
        sublet="0",
        measured_at="",
        took_s=0.0,
        quick=False,
    )
    made = to_dict(report)
    assert made["figures"][0]["ours"]["median"] == 1.2346
    assert made["figures"][0]["comparison"]["ratio"] == 0.0
    assert made["verdicts"][0]["said"] == "met"
    assert "| x, ms | 1.23 | 0 (nothing) | 0× |" in as_text(report)


def test_what_left_its_parent_is_still_counted_as_ours() -> None:
    """As an office in the background does. In a process of its own, which the adoption would outlive here."""
    script = """if True:
        import os, time
        from benchmarks import machine
        machine.adopt_orphans()
        before = machine._own_seconds()
        if os.fork() == 0:
            if os.fork() == 0:
                while time.process_time() < 0.3: pass
            os._exit(0)
        time.sleep(0.05)
        while machine.tree(os.getpid())[1:]:
            time.sleep(0.02)
            machine._own_seconds()
        assert machine._own_seconds() - before >= 0.3
    """
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True, timeout=60)


def test_the_work_of_a_worker_that_ended_is_ours_while_its_supervisor_lives() -> None:
    """The supervisor has waited for it, and so it is in nobody's count of the living."""
    script = """if True:
        import os
        from benchmarks import machine
        before = machine._own_seconds()
        ended, told = os.pipe()
        may_end, end = os.pipe()
        if (supervisor := os.fork()) == 0:
            os.close(end)
            if (worker := os.fork()) == 0:
                while os.times().user < 0.3: pass
                os._exit(0)
            os.waitpid(worker, 0)
            os.write(told, b".")
            os.read(may_end, 1)
            os._exit(0)
        os.read(ended, 1)
        assert machine._own_seconds() - before >= 0.25
        os.close(end)
    """
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True, timeout=60)


def test_a_row_that_takes_an_hour_is_run_by_its_name_alone() -> None:
    from benchmarks.__main__ import all_rows

    assert [name for name, row in all_rows().items() if not row.is_in_all] == ["studio_curve"]
