"""The thin parts around a guest's start: the fork and its steps, what is refused before it, notes of it, its exit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.errors import InvalidRequest
from sublet.node.loop import Loop
from sublet.node.processes.guest_records import GuestNote, GuestRecords
from sublet.node.processes.launch import ARGUMENTS_MAX, check_spec
from sublet.node.processes.reaper import ProcessExit, Reaper
from sublet.node.processes.spawn import Child, SpawnFailed, SpawnPlan, read_failure, spawn
from sublet.values import Epoch, GuestId, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.guests import GuestSpec, Profile
from sublet.wire.orders import Part

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PATH = os.environ.get("PATH", os.defpath)


# ---- the fork ----


def plan(*argv: str, **changes: Any) -> SpawnPlan:
    made = SpawnPlan(
        take_stdio=lambda: None,
        join=(),
        limit=lambda: None,
        enter=lambda parent: parent,
        cwd="/",
        umask=0o022,
        argv=argv or ("true",),
        env={"PATH": PATH},
    )
    return replace(made, **changes)


def outcome(child: Child) -> tuple[SpawnFailed | None, int]:
    """What the pipe said, and how it ended."""
    select.select([child.failure], [], [], 120)
    failed = read_failure(child.failure, "it")
    _, status = os.waitpid(child.pid, 0)
    os.close(child.failure)
    os.close(child.pidfd)
    return failed, os.waitstatus_to_exitcode(status)


def run(made: SpawnPlan) -> tuple[SpawnFailed | None, int]:
    child = spawn(made)
    child.let_run()
    return outcome(child)


def broken(*_: object) -> Any:
    raise PermissionError(1, "no")


def test_a_command_runs_once_it_is_told_to() -> None:
    child = spawn(plan("sh", "-c", "exit 3"))
    assert select.select([child.failure], [], [], 0.05)[0] == [], "it waits"
    child.let_run()
    assert outcome(child) == (None, 3)


def test_who_is_forgotten_never_runs(tmp_path: Path) -> None:
    child = spawn(plan("touch", str(tmp_path / "it-ran")))
    child.forget()
    os.waitpid(child.pid, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        ("terminal", {"take_stdio": broken}),
        ("group", {"join": ("/nowhere/tasks",)}),
        ("limits", {"limit": broken}),
        ("isolation", {"enter": broken}),
        ("folder", {"cwd": "/nowhere"}),
        ("parent", {"enter": lambda parent: 1 << 22}),
    ],
)
def test_the_step_that_failed_is_named(step: str, changes: dict[str, Any]) -> None:
    failed, code = run(plan("true", **changes))
    assert isinstance(failed, SpawnFailed)
    assert (failed.step, failed.exit_code, code) == (step, 126, 126)
    assert step in str(failed) or step == "folder"


def test_a_command_that_does_not_exist_is_127_and_one_that_may_not_run_126(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for argv, expected in ((("no-such-command",), 127), ((str(tmp_path / "none"),), 127), ((str(plain),), 126)):
        failed, _ = run(plan(*argv))
        assert isinstance(failed, SpawnFailed)
        assert (failed.step, failed.exit_code) == ("exec", expected), argv


# ---- what is refused before ----


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"argv": ()}, "a command or a Python callable"),
        ({"entry": "a:b"}, "a command or a Python callable"),
        ({"argv": ("",)}, "no name"),
        ({"argv": ("a\0b",)}, "zero byte"),
        ({"cwd": "here"}, "not absolute"),
        ({"env": {"": "x"}}, "not the name"),
        ({"env": {"A=B": "x"}}, "not the name"),
        ({"env": {"A": "x\0"}}, "zero byte"),
        ({"env": {"A\0": "x"}}, "zero byte"),
        ({"rows": 0}, "rows"),
        ({"cols": 4097}, "columns"),
        ({"umask": 0o1000}, "umask"),
        ({"grace_ns": -1}, "negative"),
        ({"argv": ("a", "b" * ARGUMENTS_MAX)}, "bytes or more"),
        ({"argv": ("a", *["b" * 100_000] * 9)}, "at most"),
        ({"env": {f"V{n}": "x" * 100_000 for n in range(9)}}, "at most"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(changes: dict[str, Any], word: str) -> None:
    check_spec(GuestSpec(argv=("true",)))
    with pytest.raises(InvalidRequest, match=word) as refused:
        check_spec(replace(GuestSpec(argv=("true",)), **changes))
    assert refused.value.do


# ---- notes ----


def note(guest: str = "g-1", pid: int = 7) -> GuestNote:
    return GuestNote(
        guest=GuestId(guest),
        lease=LeaseId("l"),
        epoch=Epoch(1, 2),
        tenant=TenantId("local"),
        profile=Profile.LOCAL,
        parts=(Part(resource=ResourceId("n/gpu0"), kind=Kind.GPU, amount=1),),
        pid=pid,
        start_ticks=8,
        group="sublet-o/l/g-1",
    )


def test_notes_are_read_as_they_were_written_until_they_are_dropped(tmp_path: Path) -> None:
    notes = GuestRecords(str(tmp_path / "notes"))
    notes.write(note("g-1"))
    notes.write(note("g-2"))
    notes.write(note("g-2", pid=9))
    assert GuestRecords(notes.folder).read_all() == ([note("g-1"), note("g-2", pid=9)], [])
    notes.drop(GuestId("g-1"))
    notes.drop(GuestId("g-1"))
    assert notes.read_all() == ([note("g-2", pid=9)], [])


def test_damaged_and_foreign_files_hide_no_note(tmp_path: Path) -> None:
    """Every truncation of a note is damaged, never another note."""
    notes = GuestRecords(str(tmp_path / "notes"))
    notes.write(note("g-1"))
    whole = (tmp_path / "notes" / "g-1.note").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "notes" / "g-2.note").write_bytes(whole[:length])
        assert notes.read_all() == ([note("g-1")], ["g-2.note"]), length
    (tmp_path / "notes" / "g-2.note").write_bytes(b"\xff\x00")
    (tmp_path / "notes" / "g-3.note~").write_bytes(whole[:5])  # was being written when its writer died
    (tmp_path / "notes" / "README").write_bytes(b"x")
    (tmp_path / "notes" / "g-4.note").mkdir()
    assert notes.read_all() == ([note("g-1")], ["README", "g-2.note", "g-3.note~", "g-4.note"])
    for name in ("README", "g-2.note", "g-3.note~", "g-4.note", "none"):
        notes.discard(name)
    assert notes.read_all() == ([note("g-1")], ["g-4.note"])


# ---- exits ----


def test_every_child_is_reaped_and_told_of_to_whom_it_concerns() -> None:
    loop, rounds = Loop(SystemClock()), list[int]()
    reaper = Reaper(loop, lambda: rounds.append(1))
    exits: dict[int, ProcessExit] = {}

    def told(how: ProcessExit) -> None:
        exits[how.pid] = how

    try:
        for command in ("exit 5", "kill -9 $$"):
            child = spawn(plan("sh", "-c", command))
            reaper.expect(child.pid, told)
            child.let_run()
            os.close(child.failure)
            os.close(child.pidfd)
        nobodys = spawn(plan("true"))
        nobodys.let_run()
        _turn_until(loop, lambda: len(exits) == 2)
        assert sorted(how.code for how in exits.values()) == [5, 128 + signal.SIGKILL]
        assert all(how.peak_bytes > 0 for how in exits.values())
        _turn_until(loop, lambda: not _is_child(nobodys.pid))
        os.close(nobodys.failure)
        os.close(nobodys.pidfd)
        assert rounds
        reaper.reap()  # with no child at all
    finally:
        reaper.close()
        loop.close()


def _turn_until(loop: Loop, is_so: Callable[[], bool]) -> None:
    limit = loop.now_ns() + 120_000_000_000
    while not is_so():
        assert loop.now_ns() < limit
        loop.turn(0.1)


def _is_child(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False
