"""`sublet top` with a real office, on a real terminal: what it shows, and that the terminal is as it was afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.cli.top.live import ENTER, LEAVE
from tests.integration.test_cli import Shell
from tests.traces import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """An office with a lease of a tenant, somebody who waits, and a command that runs."""
    shell = Shell(tmp_path_factory.mktemp("office"))
    started = shell("up", "--host-gpus", "1x4GiB")
    assert started.status == 0, started
    ana = shell.with_token(shell("tenant", "add", "ana").out.strip())
    lent = ana("lease", "acquire", "--gpu", "4GiB", "--ttl", "1h", "--name", "held", "--json")
    assert lent.status == 0, lent
    # The command and the one who waits are processes of ours.
    held = [
        subprocess.Popen(shell.command("run", "--cpu", "1", "--ttl", "1h", "--", "sleep", "3600"), **quiet(shell)),
        subprocess.Popen(ana.command("lease", "acquire", "--gpu", "1GiB", "--wait", "1h"), **quiet(ana)),
    ]
    try:
        until("guests and a queue", lambda: in_full(shell)["guests"] and in_full(shell)["queue"], PATIENCE_S)
        yield shell
    finally:
        for process in held:  # first: who waits starts an office again where one was ended
            process.kill()
            process.wait()
        shell.end()


def quiet(shell: Shell) -> dict[str, Any]:
    null = subprocess.DEVNULL
    return {"env": shell.env, "stdin": null, "stdout": null, "stderr": null}


def in_full(shell: Shell) -> Any:
    return shell("top", "--json").json


# ---- once ----


def test_as_one_document_it_says_everything(office: Shell) -> None:
    shown = in_full(office)
    assert shown.keys() == {"status", "leases", "queue", "guests", "tenants", "fences", "bill"}
    [guest] = shown["guests"]
    assert guest["argv"] == ["sleep", "3600"]
    assert guest["lease"] in {lease["id"] for lease in shown["leases"]}
    assert [place["position"] for place in shown["queue"]] == [1]
    assert {tenant["id"] for tenant in shown["tenants"]} == {"local", "ana"}


def test_once_and_into_a_pipe_it_is_plain_text(office: Shell) -> None:
    for words in (("top", "--once"), ("top",)):
        done = office(*words)
        assert (done.status, done.err) == (0, "")
        assert "\x1b" not in done.out
        for said in ("local/gpu0 host device, no GPU", "sleep 3600", "held", "QUEUE (1)", "TENANTS (2)"):
            assert said in done.out
        assert max(map(len, done.out.splitlines())) <= 200


def test_a_terminal_without_unicode_gets_what_it_knows(office: Shell) -> None:
    shell = Shell(office.home, PYTHONIOENCODING="ascii", COLUMNS="80")
    done = shell("top", "--once")
    assert done.out.isascii()
    assert "##" in done.out


def test_a_tenant_sees_its_own(office: Shell) -> None:
    token = json.loads(office("tenant", "set", "ana", "--new-token", "--json").out)["token"]
    shown = in_full(office.with_token(token))
    assert {lease["tenant"] for lease in shown["leases"]} == {"ana"}
    assert (shown["guests"], shown["tenants"]) == ([], None)


def test_without_an_office_it_says_so_and_starts_none(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "none")
    done = shell("top")
    assert (done.status, done.out) == (1, "")
    assert "no office is running" in done.err
    assert not (tmp_path / "none").exists()


def test_two_forms_at_once_are_refused(office: Shell) -> None:
    assert office("top", "--once", "--json").status == 2


# ---- live ----


class Tty:
    """A person at a terminal who runs it."""

    def __init__(self, shell: Shell, *, rows: int = 24, columns: int = 80) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(theirs)
        env = {**shell.env, "TERM": "xterm", "LANG": "C.UTF-8"}
        env.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            shell.command("top"), stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        self.theirs = theirs
        self.said = ""

    def __enter__(self) -> Tty:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def read(self, wait_s: float = 0.1) -> str:
        if select.select([self.ours], [], [], wait_s)[0]:
            self.said += os.read(self.ours, 65536).decode("utf-8", "replace")
        return self.said

    def until(self, pattern: str) -> None:
        """Until it has said this since it was last asked."""
        until_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.read())) is None:
            assert time.monotonic() < until_s, f"no {pattern!r} in {self.said!r}"
            assert self.process.poll() is None or select.select([self.ours], [], [], 0)[0], self.said
        self.said = self.said[found.end() :]

    def ended(self) -> int:
        """The exit status; what is left to read is read."""
        until_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < until_s, "it does not end"
        while select.select([self.ours], [], [], 0.1)[0]:
            self.read()
        status: int = self.process.returncode
        return status

    def assert_restored(self) -> None:
        assert self.said.endswith(LEAVE)
        assert termios.tcgetattr(self.theirs) == self.before


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda tty: tty.press(b"q"), 0),
        (lambda tty: tty.press(b"\x03"), 130),
        (lambda tty: tty.process.send_signal(signal.SIGINT), 130),
        (lambda tty: tty.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda tty: tty.process.send_signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "Ctrl-C", "SIGINT", "SIGTERM", "SIGHUP"],
)
def test_however_it_ends_the_terminal_is_as_it_was(office: Shell, end: Callable[[Tty], None], status: int) -> None:
    with Tty(office) as tty:
        tty.until(re.escape(ENTER))
        tty.until("q.* quit")
        assert termios.tcgetattr(tty.theirs) != tty.before
        end(tty)
        assert tty.ended() == status
        tty.assert_restored()


def test_keys_and_sizes_change_what_is_shown_and_a_stop_is_survived(office: Shell) -> None:
    """Tab looks elsewhere, a larger window is filled, and after Ctrl-Z all is drawn anew."""
    with Tty(office) as tty:
        tty.until(r"\[leases\]")
        tty.press(b"\t")
        tty.until(r"\[queue\]")
        tty.resize(40, 150)
        tty.process.send_signal(signal.SIGWINCH)
        tty.until(r"\x1b\[2J.*?pid")  # the first: what was drawn by now may be more than once the whole
        tty.until(r"\x1b\[40;1H")
        tty.press(b"\x1a")  # nobody could continue it in a session of its own, so the system does not stop it
        tty.until(re.escape(LEAVE))
        tty.until(re.escape(ENTER))
        tty.until("sleep 3600")
        tty.press(b"q")
        assert tty.ended() == 0
        tty.assert_restored()


def test_what_happens_is_seen_when_it_happens(office: Shell) -> None:
    with Tty(office) as tty:
        tty.until(r"\[leases\]")
        office("lease", "acquire", "--memory", "1MiB", "--name", "brandnew", "--ttl", "10m")
        tty.until("brandnew")
        lease = next(one["id"] for one in in_full(office)["leases"] if one["name"] == "brandnew")
        office("lease", "release", lease)
        tty.until("ended: released")
        tty.press(b"q")
        assert tty.ended() == 0


def test_an_office_that_goes_away_is_missed_until_it_is_back(tmp_path: Path) -> None:
    """What was known stays; nothing is started by looking; and the view goes on by itself."""
    shell = Shell(tmp_path / "home")
    try:
        assert shell("up", "--host-gpus", "1x4GiB").status == 0
        assert shell("lease", "acquire", "--gpu", "1GiB", "--ttl", "1h", "--name", "stays").status == 0
        with Tty(shell) as tty:
            tty.until("stays")
            assert shell("down", "--keep").status == 0
            tty.until("No answer for")
            assert shell("status").status == 1
            tty.press(b"\x0c")
            tty.until("stays")
            assert shell("up", "--host-gpus", "1x4GiB").status == 0
            tty.until(r"up \d+s|up \d+")
            tty.press(b"q")
            assert tty.ended() == 0
            tty.assert_restored()
    finally:
        shell.end()


def test_a_terminal_that_is_gone_ends_it(office: Shell) -> None:
    """The other side hangs up without a word."""
    ours, theirs = pty.openpty()
    env = {**office.env, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, *office.command("top")], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    try:
        os.close(theirs)
        said = b""
        while b"quit" not in said:
            assert select.select([ours], [], [], PATIENCE_S)[0]
            said += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(PATIENCE_S) in (0, 128 + signal.SIGHUP, -signal.SIGHUP)
    finally:
        process.kill()
        process.wait()


LEADER = """
import os, sys, fcntl, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY)
os.execv(sys.argv[1], sys.argv[1:])
"""
