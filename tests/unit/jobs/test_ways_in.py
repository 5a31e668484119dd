"""The other ways into a job: asyncio, joblib, the picture, metrics, the tables in the docs, the words of a command."""

from __future__ import annotations

import asyncio
import itertools
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import pytest

from sublet import aio, jobs
from sublet.cli import burst
from sublet.cli.burst import burst_name, inputs_of, target_of
from sublet.cli.declare import UsageError
from sublet.cli.progress_line import LiveLine
from sublet.compute import posting
from sublet.errors import InvalidRequest
from sublet.jobs import joblib_backend
from sublet.jobs.core import JobEvent
from sublet.jobs.drawing import page_with_tables
from sublet.jobs.metrics import Metrics, write_metrics
from tests.unit.jobs.stage import FakePool, pool

__all__ = ["pool"]

ROOT = Path(__file__).parents[3]


def square(x: int) -> int:
    return x * x


def fails(x: int) -> int:
    raise ValueError(f"no {x}")


# ---- asyncio


def test_a_map_is_awaited(pool: FakePool) -> None:
    async def main() -> list[int]:
        return [value async for value in aio.jobs.map(square, range(300), make_pool=pool.make)]

    assert asyncio.run(main()) == [x * x for x in range(300)]
    assert pool.is_closed


def test_an_awaited_map_can_be_left_early_and_raises_what_its_chunk_raised(pool: FakePool) -> None:
    async def main() -> None:
        async with aio.jobs.map(square, itertools.count(), make_pool=pool.make) as results:
            assert [await anext(results) for _ in range(100)] == [x * x for x in range(100)]
        assert pool.is_closed
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        with pytest.raises(ValueError, match=r"no \d"):
            await anext(aio.jobs.map(fails, range(3), make_pool=FakePool().make))

    asyncio.run(main())


def test_an_executor_is_awaited(pool: FakePool) -> None:
    async def main() -> list[int]:
        async with aio.jobs.Executor(2, make_pool=pool.make) as executor:
            return await asyncio.gather(*(executor.submit(square, n) for n in range(20)))

    assert asyncio.run(main()) == [n * n for n in range(20)]
    assert pool.is_closed


# ---- joblib


def test_joblib_runs_on_leases(pool: FakePool) -> None:
    jobs.register_joblib()
    with joblib.parallel_backend("sublet", make_pool=pool.make):
        found = joblib.Parallel(n_jobs=2)(joblib.delayed(square)(n) for n in range(50))
    assert found == [n * n for n in range(50)]
    assert pool.is_closed


def test_a_call_that_raises_raises_from_parallel(pool: FakePool) -> None:
    jobs.register_joblib()
    with joblib.parallel_backend("sublet", make_pool=pool.make), pytest.raises(ValueError, match="no "):
        joblib.Parallel(n_jobs=2)(joblib.delayed(fails)(n) for n in range(5))


def test_parallel_calls_inside_a_chunk_run_one_after_the_other() -> None:
    backend = joblib_backend._backend_class(joblib)()
    nested, _ = backend.get_nested_backend()
    assert isinstance(nested, joblib.parallel.SequentialBackend)


def test_a_chunk_that_asks_for_the_backend_by_name_runs_its_calls_itself(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could wait for ever for the leases that the burst it runs in has."""
    monkeypatch.setattr(posting, "is_worker", lambda: True)
    jobs.register_joblib()
    with joblib.parallel_backend("sublet", make_pool=pool.make):
        found = joblib.Parallel(n_jobs=2)(joblib.delayed(square)(n) for n in range(5))
    assert found == [n * n for n in range(5)]
    assert pool.made == 0


def test_joblib_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "joblib", None)
    with pytest.raises(jobs_error(), match="pip install joblib"):
        jobs.register_joblib()


def jobs_error() -> type[Exception]:
    from sublet.errors import Unsupported

    return Unsupported


# ---- picture, metrics, tables


def test_the_picture_is_well_formed_and_ends_without_a_lease(pool: FakePool) -> None:
    results = jobs.map(square, range(500), make_pool=pool.make, name="pretty")
    list(results)
    assert results.result is not None
    drawing = ET.fromstring(jobs.picture(results.result))
    lines = [node.get("points", "").split() for node in drawing.iter("{http://www.w3.org/2000/svg}polyline")]
    floor = lines[0][0].split(",")[1]
    assert lines[0][-1].split(",")[1] == floor, "leases end where they began: at none"
    heights = [float(point.split(",")[1]) for point in lines[1]]
    assert heights == sorted(heights, reverse=True), "finished chunks only rise"
    assert "500 chunks" in (drawing.findtext("{http://www.w3.org/2000/svg}title") or "")


def test_metrics_count_what_happened_in_the_text_format(tmp_path: Path) -> None:
    metrics = Metrics()
    for what, count in (
        ("done", 5),
        ("skipped", 2),
        ("failed", 1),
        ("retry", 3),
        ("leases", 4),
        ("returned", 9),
        ("cancelled", 5),
    ):
        metrics.on_event(JobEvent(0, what, count))
    metrics.add_duration(3_000_000, 2)
    text = metrics.prometheus('a "job"', 10)
    path = tmp_path / "job.prom"
    write_metrics(str(path), text)
    said = dict(line.rsplit(" ", 1) for line in path.read_text().splitlines() if not line.startswith("#"))
    job = '{job="a \\"job\\""}'
    assert said[f"sublet_chunks_total{job}"] == "10"
    assert said[f"sublet_chunks_done{job}"] == "8"
    assert said[f"sublet_chunks_retry_total{job}"] == "3"
    assert said[f"sublet_cpu_leases_active{job}"] == "4"
    assert said[f"sublet_tasklet_duration_ms_count{job}"] == "2"
    buckets = [int(value) for key, value in said.items() if "_bucket" in key]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_of_the_docs_has_the_tables_of_the_code() -> None:
    """If this fails: ``python -m sublet.jobs.drawing docs/burst.md``."""
    page = (ROOT / "docs" / "burst.md").read_text(encoding="utf-8")
    assert page_with_tables(page) == page
    with pytest.raises(InvalidRequest, match="has no place for 'chunk'"):
        page_with_tables("# nothing")


# ---- the command's words


def test_inputs_are_a_range_lines_or_files(tmp_path: Path) -> None:
    assert inputs_of("range(5)") == (range(5), 5)
    assert inputs_of("range( 10, 0, -3 )") == (range(10, 0, -3), 4)
    lines = tmp_path / "items.jsonl"
    lines.write_text('{"a": 1}\n\n[2]\n')
    found, total = inputs_of(str(lines))
    assert (list(found), total) == ([{"a": 1}, [2]], 2)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b").write_text("b")
    (folder / "a").write_text("a")
    (folder / "inner").mkdir()
    files: Any = inputs_of(str(folder))[0]
    assert [Path(file.path).name for file in files] == ["a", "b"]


@pytest.mark.parametrize(
    ("over", "text"),
    [("range(1, 5, 0)", "has step 0"), ("missing.jsonl", "there is no"), ("bad", "line 2 of .* is not JSON")],
)
def test_inputs_that_cannot_be_read_are_refused(
    over: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("1\nno\n3\n")
    with pytest.raises(UsageError, match=text):
        inputs_of(over)


@pytest.mark.parametrize("text", ["script.py", "missing.py::f", "os:no_such", "no.such.module:f", "os:", "::f"])
def test_a_target_that_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        target_of(text)


def test_a_target_is_a_function_of_a_script_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "one_script.py").write_text("def double(x):\n    return 2 * x\n")
    assert target_of(f"{tmp_path}/one_script.py::double")(4) == 8
    assert target_of("os.path:basename")("a/b") == "b"


def test_the_same_command_in_the_same_folder_has_the_same_name() -> None:
    name = burst_name(["a/Script Ü.py::f", "range(3)"], "/x")
    assert name == burst_name(["a/Script Ü.py::f", "range(3)"], "/x")
    assert name != burst_name(["a/Script Ü.py::f", "range(4)"], "/x")
    assert name.startswith("script-py-f-")


def test_a_burst_goes_on_where_its_metrics_cannot_be_written(tmp_path: Path) -> None:
    watch = burst._Watch(LiveLine(), 3, 2, "pi", str(tmp_path / "gone" / "pi.prom"))
    watch.on_event(JobEvent(10**12, "done", 3))
    assert "No such file" in str(watch.unwritten)
    (tmp_path / "gone").mkdir()
    watch.on_event(JobEvent(2 * 10**12, "done", 3))
    assert str(watch.unwritten) == "None"
    assert 'sublet_chunks_done{job="pi"} 6' in (tmp_path / "gone" / "pi.prom").read_text()
