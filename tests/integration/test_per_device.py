"""`sublet run --per-device`: one process for each device of a lease, begun and ended together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.office_process import release_all
from tests.integration.test_run import Shell, finished, first_line, runs, until

PYTHON = sys.executable
TWO = ("run", "--gpus", "2", "--gpu", "64MiB", "--per-device")


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("office"))
    started = shell("up", "--host-gpus", "2x1GiB")
    assert started.status == 0, started
    yield shell
    shell.end()


@pytest.fixture
def sublet(office: Shell) -> Iterator[Shell]:
    yield office
    release_all(office.home)


def test_each_process_has_its_rank_and_only_the_first_reads(sublet: Shell) -> None:
    script = 'read line; echo "$RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT: $line"'
    done = sublet(*TWO, "--", "sh", "-c", script, given=b"hello\n")
    assert (done.status, done.err) == (0, "")
    first, second = sorted(done.out.decode().splitlines())
    port = first.partition("127.0.0.1:")[2].partition(":")[0]
    assert int(port) > 0
    assert first == f"0 0 of 2 2 at 127.0.0.1:{port}: hello"
    assert second == f"1 1 of 2 2 at 127.0.0.1:{port}: "


def test_when_one_dies_the_others_are_ended_and_it_is_named(sublet: Shell, tmp_path: Path) -> None:
    """Also one that does not listen, and what it has forked."""
    script = """
        if [ $RANK = 1 ]; then while [ ! -e forked ]; do sleep 0.05; done; kill -SEGV $$; fi
        trap '' TERM; sleep 600 & echo $$ $! > pids; mv pids forked; while :; do sleep 0.1; done
    """
    done = sublet(*TWO, "--grace", "1s", "--", "sh", "-c", script, cwd=tmp_path)
    assert done.status == 128 + signal.SIGSEGV
    assert "sublet: rank 1 of 2 ended by SIGSEGV, and rank 0 was ended with it\n" in done.err
    for pid in (tmp_path / "forked").read_text().split():
        until(lambda: not runs(int(pid)))  # noqa: B023


def test_the_end_of_the_lease_ends_all(sublet: Shell) -> None:
    process = sublet.start(*TWO, "--", "sh", "-c", "trap 'exit 9' TERM; echo $$; while :; do sleep 0.1; done")
    pids = [int(first_line(process)) for _ in range(2)]
    (lease,) = sublet.json("lease", "ls")
    assert sublet("lease", "revoke", lease["id"], "--notice", "0s").status == 0
    done = finished(process)
    assert done.status == 76
    assert "rank" not in done.err
    for pid in pids:
        until(lambda: not runs(pid))  # noqa: B023


def test_ctrl_c_reaches_all_and_is_no_failure_of_one(sublet: Shell) -> None:
    process = sublet.start(*TWO, "--", PYTHON, "-c", "import time; print(1, flush=True); time.sleep(600)")
    for _ in range(2):
        first_line(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert err.count(b"KeyboardInterrupt") == 2
    assert b"rank" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_for_the_command_is_one_for_each_process(sublet: Shell, number: signal.Signals) -> None:
    heard = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(0)); print(1, flush=True); signal.pause()"
    process = sublet.start(*TWO, "--", PYTHON, "-c", heard.format(int(number)))
    for _ in range(2):
        first_line(process)
    process.send_signal(number)
    assert finished(process).status == 0


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--per-device", "--gpu", "64MiB", "--", "true"), 2, "--per-device needs --gpus N"),
        (("--per-device", "--gpus", "0", "--gpu", "64MiB", "--", "true"), 2, "not a count"),
        (("--per-device", "--gpus", "3", "--gpu", "64MiB", "--no-wait", "--", "true"), 75, "more than any node has"),
        (("--per-device", "--gpus", "2", "--gpu", "64MiB", "--", "no-such-thing"), 127, "no command no-such-thing"),
        (("--per-device", "--gpus", "2", "--gpu", "64MiB", "--", "/etc/passwd"), 126, "cannot be executed"),
    ],
)
def test_what_cannot_be_begun_is_refused(sublet: Shell, words: tuple[str, ...], status: int, said: str) -> None:
    done = sublet("run", *words)
    assert done.status == status
    assert said in done.err


@pytest.mark.needs("torch")
def test_a_program_for_torchrun_runs_unchanged(sublet: Shell, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("""
import os, torch
torch.distributed.init_process_group("gloo", init_method="env://")
mine = torch.ones(1) * (1 + torch.distributed.get_rank())
torch.distributed.all_reduce(mine)
os.write(1, b"%d\\n" % mine.item())  # in one piece
torch.distributed.destroy_process_group()
""")
    done = sublet(*TWO, "--", PYTHON, str(script))
    assert (done.status, done.out) == (0, b"3\n3\n"), done


def test_a_guest_of_a_process_that_has_a_device_has_none_of_its_own(sublet: Shell) -> None:
    """What it was given is not handed on to the guests it holds itself."""
    inner = [PYTHON, "-m", "sublet", "run", "--cpu", "1", "--", "sh", "-c", "echo [$SUBLET_DEVICE]"]
    done = sublet(*TWO, "--", *inner, env=sublet.env | {"PATH": os.environ["PATH"]})
    assert (done.status, done.out) == (0, b"[]\n[]\n"), done
