"""A device is taken at every step of a cell: never a stale result, always the message, and the next cell right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import Shell, shell_on, stage_on, wait_for
from tests.traces import until

GPU = "%%gpu --vram 64MiB --ttl 60s\n"
CELL = GPU + "x.append(len(x)); a += 1; made = list(x); held = (n for n in x); z"
STEPS = (
    "after gpu",
    "before start",
    "after start",
    "before use",
    "before place",
    "during place",
    "after place",
    "before run",
    "during run",
    "after run",
    "before save",
    "after save",
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office")) as stage:
        yield stage


@pytest.fixture(scope="module")
def shell(stage: OfficeStage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("folder")
    with shell_on(stage, folder, JPY_SESSION_NAME=str(folder / "Stages.ipynb")) as shell:
        assert not shell.run("import numpy as np\nx = []; z = []; a = np.zeros(300_000); b = a; y = {'k': x}")["error"]
        yield shell


def state(shell: Shell) -> tuple[int, int]:
    """How often the cell left its changes; all of them are there, in the objects that were there, or none."""
    n, first, last, same = shell.value("[len(x), float(a[0]), float(a[-1]), y['k'] is x and b is a]")
    assert first == last
    assert same
    return n, int(first)


def send_before(shell: Shell, step: str) -> None:
    """What is new in the notebook is placed on the device before the cell; else all of it is one call."""
    if step.endswith(" place"):
        shell.run("z = [*z, 0]")


def assert_told(answer: dict[str, Any]) -> None:
    assert answer["error"] == "GpuSessionEnded", answer
    assert "Rerun this cell to reacquire" in answer["said"], answer


def revoke(stage: OfficeStage) -> None:
    with sublet.connect(home=stage.office.home) as fabric:
        for lease in fabric.leases():
            if any(part.kind == "gpu" for part in lease.parts):
                fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)


EVERY = bool(os.environ.get("SUBLET_EVERY_STEP"))
"""Each step both ways; otherwise in turn one of the two."""


@pytest.mark.parametrize(
    ("step", "waits"),
    [(step, waits) for n, step in enumerate(STEPS) for waits in (True, False) if EVERY or waits == bool(n % 2)],
    ids=lambda value: value if isinstance(value, str) else ("gone" if value else "going"),
)
def test_a_lease_is_taken_at_a_step(shell: Shell, step: str, waits: bool) -> None:
    before, as_often = state(shell)
    assert before == as_often
    if step in ("after gpu", "before start", "after start", "before use"):  # of a kernel that is new
        shell.run("%gpu release")
    send_before(shell, step)
    answer = shell.run(CELL, step=step, waits=waits)
    assert answer["took"], f"no cell came to {step}"
    after = state(shell)
    if answer["error"]:
        assert_told(answer)
        assert after == (before, before)
    else:
        assert after == (before + 1, before + 1)
        assert shell.value("made") == list(range(before + 1))
    done = after[0]
    answer = shell.run(CELL)
    if answer["error"]:  # the end was under way, and found this one
        assert not waits
        assert_told(answer)
        assert state(shell) == after
        answer = shell.run(CELL)
    assert not answer["error"], answer
    assert state(shell) == (done + 1, done + 1)
    assert shell.value("made") == list(range(done + 1))
    assert shell.run(GPU + "print(next(held), len(x), a[5])")["out"] == f"0 {done + 1} {float(done + 1)}\n"


@pytest.mark.parametrize(
    "rest",
    ["sum(itertools.repeat(1, 10**12))", "while True: pass", "time.sleep(600)"],
    ids=["a long call in C", "a tight loop", "sleep"],
)
def test_a_lease_is_taken_in_the_middle(stage: OfficeStage, shell: Shell, tmp_path: Path, rest: str) -> None:
    before = state(shell)
    begun = tmp_path / "begun"
    shell.ask(f"{CELL}\nimport itertools, pathlib, time\npathlib.Path({str(begun)!r}).touch()\n{rest}")
    wait_for(begun)
    revoke(stage)
    assert_told(shell.answer())
    assert state(shell) == before
    assert not shell.run(CELL)["error"]
    assert state(shell) == (before[0] + 1, before[1] + 1)


def test_a_cell_that_swallows_everything_ends_all_the_same(stage: OfficeStage, shell: Shell, tmp_path: Path) -> None:
    before, begun = state(shell), tmp_path / "begun"
    swallow = "while True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass"
    shell.ask(f"{CELL}\nimport pathlib, time\npathlib.Path({str(begun)!r}).touch()\n{swallow}")
    wait_for(begun)
    revoke(stage)
    assert_told(shell.answer())
    assert state(shell) == before


def test_an_interrupt_in_the_middle_keeps_the_lease_and_what_was_done(shell: Shell, tmp_path: Path) -> None:
    before, begun = state(shell), tmp_path / "begun"
    shell.run(GPU + "1")
    held = shell.run("%gpu")["out"]
    shell.ask(f"{CELL}\nimport pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)")
    wait_for(begun)
    shell.interrupt()
    answer = shell.answer()
    assert answer["error"] == "KeyboardInterrupt"
    assert state(shell) == (before[0] + 1, before[1] + 1)
    assert shell.run("%gpu")["out"].split()[:2] == held.split()[:2]


@pytest.mark.parametrize("step", [step for step in STEPS if step.endswith((" place", " run"))])
def test_an_interrupt_at_a_step_leaves_all_of_a_cell_or_nothing(shell: Shell, step: str) -> None:
    shell.run(GPU + "1")
    before = state(shell)
    send_before(shell, step)
    answer = shell.run(CELL, step=step, how="interrupt")
    assert answer["took"]
    after = state(shell)
    assert answer["error"] in ("", "KeyboardInterrupt"), answer
    assert after in (before, (before[0] + 1, before[1] + 1))
    assert not shell.run(CELL)["error"]
    assert state(shell) == (after[0] + 1, after[1] + 1)
    assert shell.value("made") == list(range(after[0] + 1))
    assert shell.run(GPU + "print(len(x), a[-1])")["out"].split() == [str(after[0] + 1), str(after[1] + 1.0)]


def test_a_request_in_line_is_withdrawn_or_ended(stage: OfficeStage, shell: Shell) -> None:
    """Waiting: an interrupt leaves the line; an operator who ends it is told of; and the next cell has its turn."""
    shell.run("%gpu release")
    before = state(shell)
    with (
        sublet.connect(home=stage.office.home) as fabric,
        fabric.gpu(min_vram="2GiB", exclusivity="device", ttl="60s") as other,
        other.activity("it computes"),  # an idle one would be given up after a while
    ):
        shell.ask(CELL)
        until("a place in line", lambda: any(one.status == "queued" for one in fabric.leases()))
        shell.interrupt()
        assert shell.answer()["error"] == "KeyboardInterrupt"
        until("an empty line", lambda: len([one for one in fabric.leases() if one.status == "queued"]) == 0)
        shell.ask(CELL)
        until("a place in line", lambda: any(one.status == "queued" for one in fabric.leases()))
        queued = next(one for one in fabric.leases() if one.status == "queued")
        fabric.request("POST", f"/v1/leases/{queued.id}/revoke", {}, shape=dict)
        answer = shell.answer()
        assert answer["error"] in ("GpuSessionEnded", "LeaseEnded"), answer
        assert state(shell) == before
        shell.ask(CELL)
        until("a place in line", lambda: any(one.status == "queued" for one in fabric.leases()))
        other.release()
        assert not shell.answer()["error"]
    assert state(shell) == (before[0] + 1, before[1] + 1)


def test_nothing_is_left_behind(stage: OfficeStage, shell: Shell) -> None:
    shell.run("%gpu release")
    until("no residue", lambda: not [one for one in stage.residue if "leases/" not in one])
