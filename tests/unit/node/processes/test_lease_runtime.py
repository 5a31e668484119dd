"""What a lease has on a machine, as far as files go: made for its guests, and taken away without keeping others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.processes.cgroups import ControlGroup, Groups
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import GroupLimits
from sublet.node.processes.trash import NAMES_AT_ONCE, Trash
from sublet.node.sandbox import remove_tree
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.page import PageWriter


class NoGroups(Groups):
    """A machine without control groups."""

    def __init__(self) -> None:
        pass

    def group(self, *_: object) -> None:
        return None


def opened(place: Path, groups: Groups | None = None) -> LeaseRuntime:
    made = LeaseRuntime(
        lease=LeaseId("l-1"), tenant=TenantId("t"), epoch=Epoch(1, 2), parts=(), deadline_ns=9, office="o", name=""
    )
    made.open(str(place), groups or NoGroups(), 1, lambda _: (), GroupLimits())
    return made


class ForkedJobs:
    """Those that were asked for."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], str]] = []

    def run(self, work: Callable[[], str], _: object) -> None:
        self.asked.append(work)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(SystemClock())
    yield made
    made.close()


def turn_until(loop: Loop, is_over: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_over():
            return
        loop.turn(0.02)
    raise AssertionError("it did not come to that")


def test_its_folder_is_out_of_the_way_at_once_and_gone_soon(tmp_path: Path, loop: Loop) -> None:
    tenancy, forked_jobs = opened(tmp_path), ForkedJobs()
    (tmp_path / "l-1.1.2/tmp/file").touch()
    assert tenancy.close(Trash(loop, forked_jobs).put, ControlGroup.remove) == []  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["~l-1.1.2"]
    turn_until(loop, lambda: not any(tmp_path.iterdir()))
    assert forked_jobs.asked == []


def test_a_folder_that_nobody_can_wait_for_is_a_forked_job(tmp_path: Path, loop: Loop) -> None:
    tenancy, forked_jobs = opened(tmp_path), ForkedJobs()
    for number in range(NAMES_AT_ONCE + 100):
        (tmp_path / f"l-1.1.2/tmp/{number}").touch()
    assert tenancy.close(Trash(loop, forked_jobs).put, ControlGroup.remove) == []  # type: ignore[arg-type]
    turn_until(loop, lambda: bool(forked_jobs.asked))
    (work,) = forked_jobs.asked
    work()
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_put_aside_is_in_the_way(tmp_path: Path, loop: Loop) -> None:
    tenancy = opened(tmp_path)
    (tmp_path / "~l-1.1.2/left").mkdir(parents=True)
    assert tenancy.close(Trash(loop, ForkedJobs()).put, ControlGroup.remove) == [str(tmp_path / "l-1.1.2")]  # type: ignore[arg-type]


def test_of_much_that_was_put_aside_all_is_gone_even_if_one_thing_fails(tmp_path: Path, loop: Loop) -> None:
    aside, done = Trash(loop, ForkedJobs()), list[int]()  # type: ignore[arg-type]

    def act(number: int) -> None:
        if number == 3:
            raise OSError(errno.EIO, "a bad disk")
        done.append(number)

    for number in range(40):
        aside.later(lambda number=number: act(number))  # type: ignore[misc]
    turn_until(loop, lambda: len(done) == 39)
    for number in range(5):
        aside.later(lambda number=number: act(number))  # type: ignore[misc]
    aside.finish()
    assert done[39:] == [0, 1, 2, 4]


def test_without_its_page_no_guest_starts_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that cannot see its lease must not run: the folder alone is not enough."""

    def full(*_: object, **__: object) -> PageWriter:
        raise OSError(errno.ENOSPC, "no space")

    tenancy = LeaseRuntime(
        lease=LeaseId("l-1"), tenant=TenantId("t"), epoch=Epoch(1, 2), parts=(), deadline_ns=9, office="o", name=""
    )
    with monkeypatch.context() as patched:
        patched.setattr(PageWriter, "create", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                tenancy.open(str(tmp_path), NoGroups(), 1, lambda _: (), GroupLimits())
    tenancy.open(str(tmp_path), NoGroups(), 1, lambda _: (), GroupLimits())
    assert Path(tenancy.page_path).stat().st_size == 4096
    assert tenancy.close(remove_tree, ControlGroup.remove) == []
    assert not any(tmp_path.iterdir())


class Boxed(NoGroups):
    """A machine on which there is one group, and who is in it is said."""

    def __init__(self) -> None:
        self.is_in = ""
        self.left: list[object] = []

    def group(self, *_: object) -> Any:
        return SimpleNamespace(
            create=lambda: None, set_limits=lambda limits: [], inhabited=lambda: self.is_in, remove=list
        )


def test_its_group_is_left_once_nobody_is_in_it_and_only_once(tmp_path: Path) -> None:
    groups = Boxed()
    tenancy = opened(tmp_path, groups)
    groups.is_in = "/cg/pids/sublet-o/l-1"
    assert tenancy.close(remove_tree, groups.left.append) == [groups.is_in]
    assert not groups.left
    groups.is_in = ""
    assert tenancy.close(remove_tree, groups.left.append, alone=False) == []
    assert not groups.left, "another one is here under the name of the lease"
    for _ in range(2):
        assert tenancy.close(remove_tree, groups.left.append) == []
        assert len(groups.left) == 1


def test_its_group_is_left_although_its_folder_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be one of its name: of the lease before it was attached to, which made way for this one."""
    groups = Boxed()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    tenancy = LeaseRuntime(
        lease=LeaseId("l-1"), tenant=TenantId("t"), epoch=Epoch(1, 2), parts=(), deadline_ns=9, office="o", name=""
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "makedirs", full)
        with pytest.raises(OSError, match="no space"):
            tenancy.open(str(tmp_path), groups, 1, lambda _: (), GroupLimits())
    assert tenancy.close(remove_tree, groups.left.append) == []
    assert len(groups.left) == 1
