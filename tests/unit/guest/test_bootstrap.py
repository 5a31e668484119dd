"""The bootstrap in a fresh interpreter, and what it and the zygote need to be there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import LeaseInterrupt
from sublet.guest.bootstrap import EndOfLease
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, LeaseId
from sublet.wire.page import PageReader, PageState, PageView, PageWriter, time_namespace
from sublet.wire.usage_counters import TallyFile
from sublet.wire.zygote import python_argv

BOOTSTRAP: Final = "sublet.guest.bootstrap"
WORK: Final = """
import sys, time
def main(code=0, said="x"):
    print(said, sys.argv)
    sys.exit(code)
def wait():
    print("up", flush=True)
    time.sleep(999)
"""


SAVES: Final = """
import os, signal, time, sublet
def save():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    print("saved", flush=True)
def main():
    sublet.current().on_checkpoint(save)
"""
LEFT: Final = """
from sublet.errors import LeaseInterrupt
from sublet.lease_end import LeaseEnd
from sublet.lease_end import EndReason
class Left(LeaseInterrupt, SystemExit):
    code = 143
def main():
    raise Left(LeaseEnd(reason=EndReason.RELEASED, at=""))
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "work.py").write_text(WORK)
    return subprocess.run(
        [sys.executable, "-m", BOOTSTRAP, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (["work:main"], 0, "x ['work:main']\n"),
        (["work:main", '{"code": 5, "said": "y"}'], 5, "y ['work:main']\n"),
        (["--", "-c", "import sys; print(sys.argv, len(sys.path[0]))", "a"], 0, "['-c', 'a'] 0\n"),
        (["--", "-m", "work"], 0, ""),
    ],
)
def test_it_runs_an_entry_point_or_a_command(tmp_path: Path, arguments: list[str], code: int, out: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


@pytest.mark.parametrize("arguments", [[], ["-x"], ["--"], ["a:b", "{}", "more"], ["nothing"], ["work:main", "[]"]])
def test_what_cannot_be_run_is_told_in_words(tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_page_that_is_none_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_PAGE", str(tmp_path / "nowhere"))
    done = run("work:main", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no page at" in done.stderr


def test_who_leaves_by_himself_when_the_lease_is_over_is_held_until_it_is_saved(tmp_path: Path) -> None:
    """Before the signal came: that one interrupts no save."""
    (tmp_path / "work.py").write_text(SAVES)
    view = PageView(
        lease=LeaseId("l-a"),
        epoch=Epoch(1, 5),
        deadline_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 60 * NS_PER_S,
        now_ns=0,
        state=PageState.OVER,
        reason=EndReason.OPERATOR,
        namespace=time_namespace(),
    )
    PageWriter.create(str(tmp_path / "page"), view)
    done = subprocess.run(
        [sys.executable, "-m", BOOTSTRAP, "work:main"],
        cwd=tmp_path,
        env={**os.environ, "SUBLET_PAGE": str(tmp_path / "page")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr


def test_the_end_of_a_lease_is_one_line_and_76(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    view = PageView(
        lease=LeaseId("l-7"),
        epoch=Epoch(1, 42),
        deadline_ns=now_ns + 600 * NS_PER_S,
        now_ns=now_ns,
        namespace=time_namespace(),
        state=PageState.NOTICED,
        reason=EndReason.EXPIRED,
    )
    page = str(tmp_path / "page")
    with PageWriter.create(page, view):
        guest = subprocess.Popen(
            [sys.executable, "-m", BOOTSTRAP, "work:wait"],
            cwd=tmp_path,
            env={**os.environ, "SUBLET_PAGE": page},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert guest.stdout is not None
        assert guest.stdout.readline() == "up\n"
        guest.send_signal(signal.SIGTERM)
        _, err = guest.communicate(timeout=60)
    assert guest.returncode == 76
    assert err == "sublet: the lease ended: expired. Acquire a new lease and go on from the last checkpoint.\n"


def test_who_leaves_with_a_status_of_his_own_has_it_and_nothing_is_said(tmp_path: Path) -> None:
    """As a trainer that was told to stop: its lease goes on, so no end of it is told."""
    (tmp_path / "left.py").write_text(LEFT)
    done = run("left:main", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


def loaded_by(*argv: str) -> set[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["sublet.guest.zygote", "sublet.guest.bootstrap", "sublet.guest.current"])
def test_what_runs_in_a_guest_needs_the_standard_library_alone(module: str, tmp_path: Path) -> None:
    """In an interpreter without any installed package, ours included; nothing is added to its search path."""
    argv = list(python_argv(sys.executable, "probe_main", options=("-I", "-S")))
    at = argv.index("-c") + 1
    argv[at] = argv[at].replace(
        "import_module(sys.argv[2]).main(sys.argv[3:])",
        f"import_module({module!r}); print(*sys.modules, *(f'path:{{one}}' for one in sys.path))",
    )
    loaded = loaded_by(*argv)
    ours = {name for name in loaded if name.startswith("sublet.")}
    assert {name.split(".")[1] for name in ours} <= {
        "guest",
        "wire",
        "lease",
        "lease_end",
        "values",
        "errors",
        "clock",
        "invocation",
        "lazy_dataclass",
    }
    assert not any(name.startswith("path:") and "site-packages" in name for name in loaded)
    assert "sublet.wire.http" not in loaded
    assert "asyncio" not in loaded


FORKS = """
import multiprocessing as mp, os, signal, sys
from sublet.guest.bootstrap import arrange_interrupt
arrange_interrupt()
mp.set_start_method("fork")
is_ours = callable(signal.getsignal(signal.SIGTERM))
def default(said):
    said.put(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signal.pthread_sigmask(signal.SIG_BLOCK, []))
said = mp.SimpleQueue()
child = mp.Process(target=default, args=(said,))
child.start()
child.join()
pid = os.fork()
if pid == 0:
    os._exit(callable(signal.getsignal(signal.SIGTERM)))
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(is_ours, said.get(), code, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


LATE: Final = """
import os, signal, sys
from sublet.guest.bootstrap import arrange_interrupt
arrange_interrupt()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("busy", flush=True)
for line in sys.stdin:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("goes on", flush=True)
"""
"""What gets no processor, or is in a call into C, meets a signal late."""


@pytest.mark.parametrize("state", [PageState.LIVE, PageState.PARKED, PageState.NOTICED])
def test_a_warning_that_was_taken_back_before_it_was_met_ends_nothing(tmp_path: Path, state: PageState) -> None:
    """The lease was renewed after all, or what runs was parked, or will be taken later. The next SIGTERM is an ordinary
    one."""
    live = PageView(lease=LeaseId("l-a"), epoch=Epoch(1, 5), deadline_ns=1 << 60, now_ns=0)
    page = PageWriter.create(str(tmp_path / "page"), live)
    env = {**os.environ, "SUBLET_PAGE": str(tmp_path / "page")}
    words = [sys.executable, "-c", LATE]
    with page, subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guest:
        assert guest.stdin is not None
        assert guest.stdout is not None
        assert guest.stdout.readline() == "busy\n"
        page.write(replace(live, state=PageState.NOTICED, reason=EndReason.EXPIRED, warnings=1))
        guest.send_signal(signal.SIGTERM)
        page.write(replace(live, state=state, reason=EndReason.PREEMPTED, warnings=1))
        guest.stdin.write("met\n")
        guest.stdin.flush()
        assert guest.stdout.readline() == "goes on\n"
        page.write(replace(live, warnings=1))
        guest.send_signal(signal.SIGTERM)
        guest.stdin.write("met\n")
        guest.stdin.flush()
        assert guest.wait(60) == -signal.SIGTERM


def test_what_caught_its_warning_and_stays_may_be_parked_and_is_told_again(tmp_path: Path) -> None:
    """As a kernel whose cell was interrupted by it; until then its supervisor is told that it leaves."""
    view = PageView(lease=LeaseId("l-a"), epoch=Epoch(1, 5), deadline_ns=1 << 60, now_ns=0)
    ending = replace(view, state=PageState.NOTICED, reason=EndReason.EXPIRED)
    tally = TallyFile.create(str(tmp_path / "tally"))
    with PageWriter.create(str(tmp_path / "page"), view) as page:
        handler = EndOfLease(PageReader(str(tmp_path / "page")), str(tmp_path / "tally"))
        for number in (1, 2):
            page.write(replace(ending, warnings=number))
            with pytest.raises(LeaseInterrupt):
                handler(signal.SIGTERM, None)
            assert tally.is_leaving()
            handler(signal.SIGTERM, None)  # once only
            handler.stays()
            assert not tally.is_leaving()
    tally.close()
    assert handler._tally is not None
    handler._tally.close()


def test_a_process_of_multiprocessing_is_terminated_as_anywhere(tmp_path: Path) -> None:
    """A handler in Python would be run late where it waits for a lock, and ``Pool.terminate`` waits for it."""
    page = PageWriter.create(
        str(tmp_path / "page"), PageView(lease=LeaseId("l-a"), epoch=Epoch(1, 5), deadline_ns=1 << 60, now_ns=0)
    )
    env = {**os.environ, "SUBLET_PAGE": str(tmp_path / "page")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, timeout=60)
    page.close()
    assert done.stdout.strip() == "True True 1 set()", done.stderr
