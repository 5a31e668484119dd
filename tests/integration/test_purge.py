"""`sublet purge` on real offices: with live leases, mounted volumes, jobs that run, and processes that were killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.client.home import runtime_dir
from tests.integration.test_cli import Shell, runs
from tests.traces import until


@pytest.fixture
def sublet(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "home")
    yield shell
    shell.end()


def mounted(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(f"{folder}/")]


@pytest.fixture
def sleeper(sublet: Shell) -> Iterator[subprocess.Popen[bytes]]:
    """A command that has a volume, which is mounted where that is allowed."""
    words = ["run", "--block", "64MiB", "--name", "results", "--", "sh", "-c", 'echo x > "$SUBLET_BLOCK/x"; sleep 600']
    with subprocess.Popen(sublet.command(*words), env=sublet.env, stderr=subprocess.DEVNULL) as process:
        try:
            until("a file in it", (sublet.home / "blocks/named/local/results/0/x").exists)
            yield process
        finally:
            process.kill()


def supervisor_of(home: Path) -> int:
    """By its command line, which names the runtime folder."""
    name = str(runtime_dir(home)).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"sublet.node.supervisor" in command and name in command:
                return int(entry.name)
    raise AssertionError("there is no supervisor")


def test_live_leases_are_not_ended_unless_that_is_said(sublet: Shell, sleeper: subprocess.Popen[bytes]) -> None:
    """And then all goes: office, supervisor, what runs, volumes with their mounts, and both folders."""
    (guest,) = sublet("ps", "--json").json
    office, supervisor = sublet("status", "--json").json["pid"], supervisor_of(sublet.home)
    refused = sublet("purge", "--yes")
    assert refused.status == 1
    assert "1 lease is live or in the queue" in refused.err
    assert "--now" in refused.err
    assert runs(office)
    assert sublet("volume", "ls", "--json").json
    done = sublet("purge", "--yes", "--now")
    assert (done.status, done.err) == (0, ""), done
    assert "volumes and checkpoints" in done.out
    assert "with 1 live lease" in done.out
    assert not sublet.home.exists(), (done, sorted(sublet.home.iterdir()))
    assert not runtime_dir(sublet.home).exists()
    assert mounted(sublet.home) == []
    until("their end", lambda: not [pid for pid in (office, supervisor, guest["pid"]) if runs(pid)])
    assert sleeper.wait(60) != 0


def test_a_program_that_had_a_lease_starts_no_office_where_there_was_one(
    sublet: Shell, sleeper: subprocess.Popen[bytes]
) -> None:
    """It was stopped meanwhile, so it finds neither the office nor a word of how that ended."""
    sleeper.send_signal(signal.SIGSTOP)
    done = sublet("purge", "--yes", "--now")
    assert (done.status, done.err) == (0, ""), done
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(60) != 0
    assert not sublet.home.exists(), sorted(sublet.home.iterdir())
    assert not runtime_dir(sublet.home).exists()


def test_after_kills_what_stayed_mounted_is_removed(sublet: Shell, sleeper: subprocess.Popen[bytes]) -> None:
    """`rm -rf` says "Device or resource busy" of such a folder."""
    left = mounted(sublet.home)
    supervisor = supervisor_of(sublet.home)
    office = sublet("status", "--json").json["pid"]
    sleeper.send_signal(signal.SIGSTOP)  # it would start another office
    os.kill(office, signal.SIGKILL)
    sleeper.kill()
    refused = sublet("purge", "--yes")
    assert refused.status == 1
    assert "leases of an earlier one may go on" in refused.err
    os.kill(supervisor, signal.SIGKILL)
    until("its end", lambda: not runs(supervisor))
    assert mounted(sublet.home) == left
    done = sublet("purge", "--yes")
    assert (done.status, done.err) == (0, ""), done
    assert ("unmounted first" in done.out) is bool(left)
    assert not sublet.home.exists(), (done, sorted(sublet.home.iterdir()))
    assert mounted(sublet.home) == []


LEAVES: Final = """
import os, subprocess, sys, time
left = subprocess.Popen(["sleep", "6000"], start_new_session=True)
with open(sys.argv[1] + "~", "w") as file:
    file.write(str(left.pid))
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(6000)
"""


def test_after_kills_what_guests_have_started_is_ended(sublet: Shell, tmp_path: Path) -> None:
    """The kernel ends a guest with its supervisor, and not what the guest has started: a process that left its session,
    and the control groups. No supervisor comes after a purge, so it must look for them."""
    told = tmp_path / "pid"
    words = ["run", "--cpu", "1", "--", sys.executable, "-c", LEAVES, str(told)]
    left = 0
    with subprocess.Popen(sublet.command(*words), env=sublet.env, stderr=subprocess.DEVNULL) as command:
        try:
            until("its child", told.exists)
            left = os.pidfd_open(int(told.read_text()))
            (guest,) = sublet("ps", "--json").json
            supervisor, office = supervisor_of(sublet.home), sublet("status", "--json").json["pid"]
            name = f"sublet-{(runtime_dir(sublet.home) / 'supervisor.lock').read_text()}"
            command.send_signal(signal.SIGSTOP)  # it would start another office
            os.kill(office, signal.SIGKILL)
            os.kill(supervisor, signal.SIGKILL)
            command.kill()
            until("their end", lambda: not [pid for pid in (office, supervisor, guest["pid"]) if runs(pid)])
            assert not has_ended(left), "nothing else ends it"
            done = sublet("purge", "--yes")
            assert (done.status, done.err) == (0, ""), done
            assert "that commands under leases had left." in done.out
            until("its end", lambda: has_ended(left))
            assert [folder for folder, *_ in os.walk("/sys/fs/cgroup") if os.path.basename(folder) == name] == []
            assert not sublet.home.exists()
        finally:
            command.kill()
            if left:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(left, signal.SIGKILL)
                os.close(left)


def has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])


def test_a_supervisor_without_an_office_is_ended_with_now(sublet: Shell) -> None:
    assert sublet("lease", "acquire", "--cpu", "1", "--ttl", "5m").status == 0
    supervisor = supervisor_of(sublet.home)
    assert sublet("down", "--keep").status == 0
    done = sublet("purge", "--yes", "--now")
    assert (done.status, done.err) == (0, ""), done
    until("its end", lambda: not runs(supervisor))  # its socket went before
    assert not sublet.home.exists(), (done, sorted(sublet.home.iterdir()))


RUNNER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, str(os.getpid()).encode(), 0)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_notebook_in_the_background_is_not_ended_unless_that_is_said(sublet: Shell) -> None:
    job = sublet.home / "jobs" / "1"
    job.mkdir(parents=True, mode=0o700)
    (sublet.home / "config.toml").touch()
    (job / "record.json").touch()
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(job / "lock")], stdout=subprocess.PIPE) as runner:
        try:
            assert runner.stdout is not None
            assert runner.stdout.readline() == b"ready\n"
            refused = sublet("purge", "--yes")
            assert refused.status == 1
            assert "1 notebook runs in the background" in refused.err
            assert runner.poll() is None
            done = sublet("purge", "--yes", "--now")
            assert (done.status, done.err) == (0, ""), done
            assert runner.wait(60) == -signal.SIGKILL
            assert not sublet.home.exists()
        finally:
            runner.kill()
