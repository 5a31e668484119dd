"""``%%gpu --map``: a cell once for each item, on leases of its own; what is finished is not run again."""

from __future__ import annotations

import json
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import sublet
from sublet.errors import InvalidRequest, JobFailed, Unpicklable
from sublet.jobs import ChunkFailed, ChunkId
from sublet.jobs.states import FailReason
from sublet.notebook import mapped
from sublet.notebook.bill import NotebookBill
from sublet.notebook.mapped import MappedCell, items_of
from sublet.notebook.status import CellBill, Mapped, as_html, as_text
from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import Shell, shell_on, stage_on
from tests.traces import until

# ---- items


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (7, "params is 7, which --map cannot take"),
        ({"lr": [1, 2]}, "which --map cannot take"),
        ("text", "which --map cannot take"),
        ((n for n in [{"lr": 1}]), "which --map cannot take"),
        (None, "which --map cannot take"),
        ([], "params is empty"),
        ((), "params is empty"),
        (pd.DataFrame({"lr": []}), "params is empty"),
        ([{"lr": 1}, 3], r"params\[1\] is 3, and no dict"),
        ([{1: 2}], r"params\[0\] has the key 1, which is no name"),
        ([{"a b": 2}], r"params\[0\] has the key 'a b'"),
        ([{"class": 2}], r"params\[0\] has the key 'class'"),
        (pd.DataFrame({"learning rate": [1]}), "has the key 'learning rate'"),
    ],
)
def test_what_is_no_list_of_dicts_is_refused(value: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        items_of({"params": value}, "params")


def test_a_list_that_is_not_there_is_named_with_what_was_probably_meant() -> None:
    with pytest.raises(InvalidRequest, match=r"no variable param; did you mean params\?"):
        items_of({"params": [{}]}, "param")


def test_rows_of_a_frame_and_dicts_of_a_tuple_are_items() -> None:
    frame = pd.DataFrame({"lr": [0.1, 0.2], "name": ["a", "b"]}, index=[7, 9])
    assert items_of({"params": frame}, "params") == [{"lr": 0.1, "name": "a"}, {"lr": 0.2, "name": "b"}]
    assert items_of({"params": ({"n": 1},)}, "params") == [{"n": 1}]


# ---- a cell as workers execute it


class Module(types.ModuleType):
    """A notebook's module, in the place of this program's own."""

    def run(self, source: str) -> None:
        exec(source, vars(self))  # noqa: S102

    def cell(self, source: str, *names: str, gives: tuple[str, ...]) -> MappedCell:
        found, head, views = mapped._all_that_is_read(vars(self), set(names), frozenset())
        self.found = found
        made = MappedCell(source, 0, head, views, gives, ())
        again = pickle.loads(pickle.dumps(made, 5))  # noqa: S301 - as a worker has it
        assert type(again) is MappedCell
        return again


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def run(cell: MappedCell, **item: Any) -> dict[str, Any]:
    return mapped._unpacked(cell(mapped._packed(item)))


def test_functions_of_the_notebook_see_the_items_values_as_globals(main: Module) -> None:
    main.run("lr, base = None, 100\ndef step(x):\n    return scale(x) + base\ndef scale(x):\n    return x * lr")
    cell = main.cell("loss = step(x)", "step", gives=("loss",))
    assert main.found == {"step", "scale", "base", "lr"}
    assert run(cell, lr=3, x=2) == {"loss": 106}
    assert vars(main)["lr"] is None


def test_no_item_sees_what_another_one_did(main: Module) -> None:
    vars(main).update(seen=[], array=np.zeros(1000))
    cell = main.cell("seen.append(n)\narray += n\ntotal = array.sum()", "seen", "array", gives=("seen", "total"))
    assert run(cell, n=1) == {"seen": [1], "total": 1000.0}
    assert run(cell, n=2) == {"seen": [2], "total": 2000.0}
    assert vars(main)["seen"] == []
    assert sys.modules["__main__"] is main


def test_an_instance_of_a_class_of_the_notebook_comes_back_as_one(main: Module) -> None:
    main.run("class Model:\n    def __init__(self, n):\n        self.n = n")
    found = run(main.cell("model = Model(n)", "Model", gives=("model",)), n=5)["model"]
    assert (type(found), found.n) == (vars(main)["Model"], 5)


def test_a_cell_may_await_and_what_it_raises_names_its_line(main: Module) -> None:
    assert run(main.cell("import asyncio\nx = await asyncio.sleep(0, n)", gives=("x",)), n=5) == {"x": 5}
    with pytest.raises(ZeroDivisionError) as caught:
        run(main.cell("# %%gpu\nx = 1 / n", gives=("x",)), n=0)
    lines = [(frame.name, frame.lineno) for frame in caught.traceback if str(frame.path) == mapped.FILE]
    assert lines == [("<module>", 2)] or caught.traceback[-1].lineno == 1
    assert sys.modules["__main__"] is main


def test_a_cell_that_ends_without_a_value_that_is_asked_for_fails(main: Module) -> None:
    with pytest.raises(NameError, match="without a value for x, which --out names"):
        run(main.cell("if n:\n    x = 1", gives=("x",)), n=0)


def test_what_cannot_be_sent_is_named(main: Module) -> None:
    main.run("import threading\nlock = threading.Lock()\nlock.acquire()\ndef f():\n    return lock")
    with pytest.raises(Unpicklable, match="lock: a thread lock"):
        main.cell("f()", "f", gives=("x",))
    with pytest.raises(Unpicklable, match=r"params\[1\]: .*a thread lock"):
        mapped._chunks([{"n": 1}, {"n": vars(main)["lock"]}], b"cell", "params")


# ---- ids


def ids(items: list[dict[str, Any]]) -> list[ChunkId]:
    return [one.chunk_id() for one in mapped._chunks(items, b"cell", "params")]


def test_items_are_known_by_their_content_wherever_they_stand_and_equal_ones_are_told_apart() -> None:
    a, b = {"lr": 1.0, "x": np.ones(3)}, {"lr": 2.0}
    assert ids([a, b]) == ids([b, a])[::-1]
    assert len(set(ids([a, a, a]))) == 3
    assert ids([a, a])[0] == ids([a])[0]
    assert ids([{"n": 1}]) != ids([{"n": True}])
    assert mapped._chunks([a], b"other", "params")[0].chunk_id() not in ids([a])


def test_a_value_whose_content_has_no_digest_counts_by_what_is_sent() -> None:
    keys = {"a": 1, "b": 2}.keys()
    with pytest.raises(Unpicklable):
        mapped._digest(keys)
    assert mapped._content("keys", keys) == mapped._content("keys", {"a": 3, "b": 4}.keys())
    assert mapped._content("keys", keys) != mapped._content("keys", {"a": 1}.keys())


# ---- what is said


def failure(index: int, error: BaseException | None, reason: FailReason = FailReason.RAISED) -> ChunkFailed:
    return ChunkFailed(chunk=ChunkId(b"x" * 16), index=index, reason=reason, error=error, retries=0, detail="why")


def test_failures_are_told_by_their_reason_with_the_lines_of_the_first() -> None:
    error = ValueError("two")
    frames = '  File "/ours.py", line 1\n  File "<cell>", line 3, in <module>\nValueError: two'
    error.add_note(f"In the worker:\nTraceback\n{frames}")
    found = mapped._failed({n: failure(n, error) for n in range(2, 9)} | {11: failure(11, None)}, 12, ["loss"])
    assert isinstance(found, JobFailed)
    assert found.message == "8 of 12 items failed: items 2, 3, 4, 5, 6 and 2 more: ValueError: two; item 11: why"
    assert found.do.endswith('Traceback of item 2:\n  File "<cell>", line 3, in <module>\nValueError: two')
    assert "/ours.py" not in found.do
    assert [one.index for one in found.failures if isinstance(one, ChunkFailed)] == [*range(2, 9), 11]


def test_the_line_of_a_mapped_cell_says_how_far_it_is_and_what_came_of_it() -> None:
    runs = Mapped(done=3, total=8, failed=1, skipped=0, leases=2)
    assert as_text(runs) == "sublet: 3 of 8 items · 1 failed · 2 leases · an interrupt keeps what is finished"
    begins = Mapped(done=0, total=1, failed=0, skipped=0, leases=0)
    assert as_text(begins) == "sublet: 0 of 1 item · an interrupt keeps what is finished"
    waits = Mapped(done=0, total=1, failed=0, skipped=0, leases=0, waits=True)
    assert as_text(waits) == "sublet: 0 of 1 item · waiting for a device · an interrupt keeps what is finished"
    over = Mapped(
        done=8, total=8, failed=0, skipped=3, leases=2, took_s=61, bill=CellBill(cost=1.5, currency="credits")
    )
    assert as_text(over) == "sublet: 8 items in 1m 1s · 3 finished by an earlier run · up to 2 leases · 1.5000 credits"
    colours = {as_html(one).split("solid ")[1][:7] for one in (runs, waits, over)}
    assert len(colours) == 3


def test_a_mapped_cell_has_one_row_in_the_bill_at_the_price_it_had() -> None:
    bills = NotebookBill()
    bills.add(1, "lease-1", CellBill(held_s=2.0))
    bills.add_burst(2, "nb-sweep", CellBill(held_s=10.0, busy_s=8.0, cost=0.5, currency="credits"))
    rows = [line.split() for line in bills.text().splitlines()]
    assert rows[0] == ["cell", "lease", "busy", "VRAM", "GiB·s", "credits"]
    assert rows[2] == ["[2]", "10.0s", "8.0s", "0", "0.5000"]
    assert rows[3][1] == "12.0s"


# ---- in a notebook, on two devices


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office"), "2x1GiB") as stage:
        yield stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def shell(stage: OfficeStage, folder: Path) -> Iterator[Shell]:
    with shell_on(stage, folder, JPY_SESSION_NAME=str(folder / "Sweep.ipynb")) as shell:
        yield shell


MAP = "%%gpu --map params --vram 64MiB --out "
NOTE = "with open(LOG, 'a') as log:\n    log.write(f'{n}\\n')\n"


def leases(stage: OfficeStage) -> list[str]:
    with sublet.connect(home=stage.office.home) as fabric:
        return [str(view.id) for view in fabric.leases() if view.end is None and view.labels.get("program") == "burst"]


def ran(log: Path) -> list[int]:
    return sorted(int(line) for line in log.read_text().splitlines())


def billed(shell: Shell) -> int:
    """Rows of the notebook's bill."""
    return sum(line.lstrip().startswith("[") for line in shell.run("%gpu bill")["out"].splitlines())


def test_a_cell_runs_once_for_each_item_and_what_is_finished_is_not_run_again(
    stage: OfficeStage, folder: Path, shell: Shell
) -> None:
    log = folder / "log"
    log.touch()
    set_up = f"LOG = {str(log)!r}\nparams = [{{'n': n}} for n in range(4)]\ndef f():\n    return 10 * n"
    cell = f"{MAP}loss,pair\n{NOTE}loss = f()\npair = (n, os.getpid())"
    assert not shell.run(set_up + "\nimport os\nn = -1")["error"]
    answer = shell.run(cell)
    assert not answer["error"], answer
    assert "sublet: 4 items in" in answer["err"]
    assert shell.value("[loss, [one for one, _ in pair], n]") == [[0, 10, 20, 30], [0, 1, 2, 3], -1]
    assert shell.value("all(pid != os.getpid() for _, pid in pair)")
    assert ran(log) == [0, 1, 2, 3]
    shell.run("params.insert(0, {'n': 9})")
    assert "4 finished by an earlier run" in shell.run(cell)["err"]
    assert shell.value("loss") == [90, 0, 10, 20, 30]
    assert ran(log) == [0, 1, 2, 3, 9]
    assert leases(stage) == []
    bill = shell.run("%gpu bill")["out"].splitlines()
    assert len(bill) == 4, "a head, a row for each mapped cell, the sum"
    with shell_on(stage, folder, JPY_SESSION_NAME=str(folder / "Sweep.ipynb")) as other:  # as after a restart
        other.run(f"{set_up}\nimport os\nn = -1")
        assert "4 finished by an earlier run" in other.run(cell)["err"]
        assert other.value("loss") == [0, 10, 20, 30]
    assert ran(log) == [0, 1, 2, 3, 9]
    shell.run("def f():\n    return 11 * n")
    assert "earlier run" not in shell.run(cell)["err"], "a function that the cell calls has changed"
    assert shell.value("loss") == [99, 0, 11, 22, 33]


def test_items_that_fail_are_named_and_the_others_are_bound(stage: OfficeStage, shell: Shell) -> None:
    shell.run("params = [{'n': n} for n in range(3)]")
    answer = shell.run(f"{MAP}back\nif n == 1:\n    raise KeyError('one')\nback = n")
    assert answer["error"] == "JobFailed", answer
    assert "1 of 3 items failed: item 1: KeyError: 'one'" in answer["said"]
    assert '  File "<cell>", line 3, in <module>' in answer["said"]
    assert shell.value("[back[0], repr(back[1].error), back[2]]") == [0, "KeyError('one')", 2]
    assert leases(stage) == []


def test_an_interrupt_stops_all_and_keeps_what_is_finished(stage: OfficeStage, folder: Path, shell: Shell) -> None:
    log, go_on = folder / "log-2", folder / "go-on"
    log.touch()
    shell.run(f"LOG, GO_ON = {str(log)!r}, {str(go_on)!r}\nparams = [{{'n': n}} for n in range(4)]\nkept = 'before'")
    waits = "while n > 1 and not os.path.exists(GO_ON):\n    time.sleep(0.01)\n"
    cell = f"{MAP}kept\nimport os, time\n{NOTE}{waits}kept = n"
    rows = billed(shell)
    shell.ask(cell)
    until("items 2 and 3 to begin", lambda: len(ran(log)) == 4)
    shell.interrupt()
    answer = shell.answer()
    assert answer["error"] == "KeyboardInterrupt", answer
    assert "finished items are kept" in answer["err"]
    assert shell.value("kept") == "before"
    assert leases(stage) == []
    assert billed(shell) == rows + 1  # what it used is on the bill, though it ended early
    go_on.touch()
    answer = shell.run(cell)
    assert "2 finished by an earlier run" in answer["err"], answer
    assert shell.value("kept") == [0, 1, 2, 3]
    assert ran(log) == [0, 1, 2, 2, 3, 3], "only what was executing runs again"


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%gpu --map nothing --out x\nx = 1", "there is no variable nothing"),
        ("%%gpu --map params\nx = 1", "--map needs --out"),
        ("%%gpu --map params --out y\nx = 1", "the cell gives no value to y"),
        ("%%gpu --map params --out params\nparams = 1", "would replace the list"),
        ("%%gpu --map params --out x --gpus 2\nx = 1", "--gpus is not for --map"),
        ("%%gpu --map params --out x --shared\nx = 1", "--shared is not for --map"),
        ("%%gpu --map params --out x --no-wait\nx = 1", "--wait is not for --map"),
        ("%%gpu --map a,b --out x\nx = 1", "'a,b' is no name of a variable"),
        ("%%gpu --map params --out x\n!ls\nx = 1", "without magics and !commands"),
        ("%%gpu --map params --out x\nx = = 1", ""),
        ("%%gpu --map params --out x\nx = lock", "lock: a thread lock"),
        ("%%gpu --map params --out x --in nobody\nx = 1", "there is no variable nobody"),
        ("%%gpu --map params --out x --vram 64GiB\nx = 1", "Free now: local/gpu0"),
        ("%%gpu --map params --out x --pay-priority\nx = 1", "priority is not for sale in this office"),
        ("%%gpu --map params --out x --with /nowhere\nx = 1", "--with /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(stage: OfficeStage, shell: Shell, cell: str, says: str) -> None:
    shell.run("import threading\nlock = threading.Lock()\nlock.acquire()\nparams = [{'n': 1}, {'n': 2}]")
    answer = shell.run(cell)
    assert answer["error"], answer
    assert says in answer["said"], answer
    assert leases(stage) == []


def test_a_value_that_is_on_the_device_is_named_and_a_cell_without_a_name_keeps_its_results(
    stage: OfficeStage, tmp_path: Path
) -> None:
    with shell_on(stage, tmp_path) as shell:
        assert not shell.run("%%gpu --vram 64MiB\nfar = (n for n in range(3))")["error"]
        shell.run("params = [{'n': 1}]")
        answer = shell.run(f"{MAP}x\nx = next(far)")
        assert "%gpu fetch far" in answer["said"], answer
        shell.run("%gpu release")
        for times in ("", "1 finished by an earlier run"):
            answer = shell.run(f"{MAP}x\nx = n")
            assert not answer["error"]
            assert times in answer["err"], answer
        assert json.loads(json.dumps(shell.value("x"))) == [1]
