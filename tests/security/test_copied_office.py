"""An office on a copy of the state folder of one that runs does not start, and ends nothing of it.

Both have the same id, so the supervisor of the copy would take the guests of the first for what a predecessor left.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.guests import Guest
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers, ensure_office
from sublet.errors import OfficeElsewhere
from sublet.node.supervisor.office_lock import OfficeLock
from tests.integration.test_cli import Shell
from tests.traces import end_office, supervisor_of, until


def up(home: Path) -> None:
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))


def kill_office(home: Path) -> None:
    with sublet.connect(home=home) as fabric:
        office = os.pidfd_open(fabric.status().pid)
    signal.pidfd_send_signal(office, signal.SIGKILL)
    os.close(office)


@contextlib.contextmanager
def guest_of(home: Path) -> Iterator[tuple[sublet.Lease, Guest]]:
    with (
        sublet.connect(home=home) as fabric,
        fabric.cpu(1, memory="64MiB", ttl="5m") as lease,
        lease.start(["sleep", "600"], cwd="/") as guest,
    ):
        yield lease, guest


def test_an_office_on_a_copy_does_not_start_and_ends_nothing_and_a_moved_folder_starts(tmp_path: Path) -> None:
    """One office through all of it: copied, moved, and with its runtime folder removed below a guest."""
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    try:
        up(first)
        with guest_of(first) as (lease, guest):
            shutil.copytree(first, copy)
            supervisor = supervisor_of(runtime_dir(first))
            told = Shell(copy)("up", "--host-gpus", "1x1GiB")
            assert guest.view().state == "running", told
            assert told.status == 78, told
            assert f"{first} (supervisor pid {supervisor}), and {copy} is a copy" in told.err
            assert f"SUBLET_HOME={first} sublet down" in told.err
            assert supervisor_of(runtime_dir(copy)) is None
            lease.renew()
            guest.stop(grace=0)

        kill_office(first)  # its supervisor would wait a minute for another
        first.rename(moved)
        up(moved)

        with guest_of(moved) as (lease, _):  # its supervisor would stay until the deadline
            kill_office(moved)
            supervisor = supervisor_of(runtime_dir(moved))
            assert supervisor is not None
            end = os.pidfd_open(supervisor)
            shutil.rmtree(runtime_dir(moved))
            up(moved)  # no office could reach that supervisor, so it makes way
            until("its end", lambda: select.select([end], [], [], 0)[0])
            os.close(end)
            lease.release()
    finally:
        for home in (moved, first, copy):
            if home.exists() and answers(socket_path(home)):
                with sublet.connect(home=home) as fabric:
                    fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
            end_office(runtime_dir(home))


def test_the_lock_ends_with_its_process_and_not_with_what_that_forked(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    mine, other = (OfficeLock("0a1b", str(tmp_path / name), folders=[str(folder)]) for name in ("mine", "other"))
    (tmp_path / "other").mkdir()
    asks, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        other.take()
        if os.fork() == 0:  # it has the file open, and no lock
            signal.pause()
            os._exit(0)
        os.write(told, b"x")
        signal.pause()
        os._exit(0)
    os.read(asks, 1)
    with pytest.raises(OfficeElsewhere, match=f"{tmp_path / 'other'} .supervisor pid {pid}."):
        mine.take()
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        mine.take()
    finally:
        os.kill(child, signal.SIGKILL)
    mine.release()
    assert list(folder.iterdir()) == []


def test_a_lock_whose_file_was_cleaned_up_is_taken_anew(tmp_path: Path) -> None:
    lock = OfficeLock("0a1b", str(tmp_path), folders=[str(tmp_path)])
    lock.take()
    (file,) = tmp_path.iterdir()
    file.unlink()
    lock.refresh()
    assert file.read_text() == f"{tmp_path}\n"
    lock.release()


def test_a_name_that_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    """Another user may have it in a folder for all: the next folder is taken, by every office of this user."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / f"sublet-office-0a1b.{os.geteuid()}").symlink_to("/etc/passwd")
    lock = OfficeLock("0a1b", str(tmp_path), folders=[str(tmp_path / "a"), str(tmp_path / "b")])
    lock.take()
    assert len(list((tmp_path / "b").iterdir())) == 1
    lock.release()
