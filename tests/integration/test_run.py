"""`sublet run` and its sisters against a real office and supervisor: what a person at a shell sees and gets back."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sublet.client.home import runtime_dir
from tests.commands import run_sublet, start_piped
from tests.crash.office_process import release_all
from tests.traces import plain_env
from tests.traces import until as until_it_is

PATIENCE_S = 60.0
PYTHON = sys.executable


class Done(NamedTuple):
    status: int
    out: bytes
    err: str


class Shell:
    """Runs `sublet` as a person's shell would."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = plain_env()
        self.env |= {"SUBLET_HOME": str(home), "COLUMNS": "200"}

    def command(self, *words: str) -> list[str]:
        return [PYTHON, "-m", "sublet", *words]

    def __call__(self, *words: str, **more: Any) -> Done:
        done = run_sublet(*words, **{"env": self.env, **more})
        assert b"Traceback" not in done.err, done.err.decode()
        return Done(done.status, done.out, done.err.decode())

    def start(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        if more.keys() <= {"stdin", "stdout", "stderr"}:
            return start_piped(self.command(*words), self.env, **more)
        more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(self.command(*words), env=self.env, **more)

    def json(self, *words: str) -> Any:
        done = self(*words, "--json")
        assert done.status == 0, done
        return json.loads(done.out)

    def end(self) -> None:
        self("down", "--now")
        shutil.rmtree(runtime_dir(self.home.resolve()), ignore_errors=True)


def until(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait for something to become true."""
    return until_it_is("what the command line is to say", what, patience_s)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("office"))
    started = shell("up", "--host-gpus", "1x4GiB")
    assert started.status == 0, started
    yield shell
    shell.end()


@pytest.fixture
def sublet(office: Shell) -> Iterator[Shell]:
    """The same office, with no lease before and none left behind."""
    yield office
    release_all(office.home)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def finished(process: subprocess.Popen[bytes]) -> Done:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert b"Traceback" not in err, err.decode()
    return Done(process.returncode, out, err.decode())


# ---- what comes back ----


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_the_exit_status_is_the_commands_own(sublet: Shell, script: str, status: int) -> None:
    done = sublet("run", "--", "sh", "-c", script)
    assert (done.status, done.out, done.err) == (status, b"", "")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["/no/such/thing"], 127, "No such file"),
        (["no-such-command-anywhere"], 127, "PATH"),
        (["/etc/passwd"], 126, "Permission denied"),
        (["/"], 126, "could not be run"),
    ],
)
def test_what_cannot_be_run_is_126_or_127_with_a_sentence(
    sublet: Shell, words: list[str], status: int, said: str
) -> None:
    done = sublet("run", "--", *words)
    assert done.status == status
    assert said in done.err
    assert done.err.startswith("sublet: ")
    until(lambda: sublet.json("lease", "ls") == [])


def test_python_that_is_only_python3_here_is_said(sublet: Shell, tmp_path: Path) -> None:
    """As on Debian. The hint is given only where it is true."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    only = sublet("run", "--", "python", "train.py", env=sublet.env | {"PATH": str(tmp_path / "bin")})
    assert (only.status, "Did you mean python3?" in only.err) == (127, True), only.err
    (tmp_path / "bin" / "python3").unlink()
    neither = sublet("run", "--", "python", "train.py", env=sublet.env | {"PATH": str(tmp_path / "bin")})
    assert (neither.status, "python3" in neither.err) == (127, False), neither.err


def test_a_command_that_looks_for_a_gpu_on_a_host_device_is_told_what_that_is(sublet: Shell, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit('AssertionError: Torch not compiled with CUDA enabled')")
    for words in (["nvidia-smi"], [PYTHON, str(tmp_path / "x.py")]):
        done = sublet("run", "--gpu", "64MiB", "--", *words)
        assert done.status in (1, 127)
        assert "host device" in done.err.splitlines()[-1]
    done = sublet("run", "--", PYTHON, str(tmp_path / "x.py"))
    assert "host device" not in done.err, "nobody asked for a GPU"


def test_defaults_of_config_toml_hold_where_nothing_is_said(sublet: Shell) -> None:
    """What is set is asked for; an option overrides it; a mistake in the file is told with its line."""
    say = ["sh", "-c", 'sublet=$1; shift; "$sublet" -m sublet lease show --json "$SUBLET_LEASE"', "sh", PYTHON]
    config = sublet.home / "config.toml"
    config.write_text('vram = "128MiB"\nttl = "77s"\ntier = "spot"\nshared = true\nwait = "30s"\n')
    try:
        view = json.loads(sublet("run", "--gpus", "1", "--", *say).out)
        (part,) = view["parts"]
        assert (part["amount"], view["ttl"], view["tier"]) == (128 << 20, 77.0, "spot")
        assert view["wants"][0]["exclusivity"] == "shared"
        said = ("--gpu", "64MiB", "--exclusive", "--ttl", "50s", "--tier", "batch")
        view = json.loads(sublet("run", *said, "--", *say).out)
        (part,) = view["parts"]
        assert part["amount"] > 64 << 20, "the whole device"
        assert (view["ttl"], view["tier"], view["wants"][0]["exclusivity"]) == (50.0, "batch", None)
        view = json.loads(sublet("run", "--", *say).out)
        assert [part["kind"] for part in view["parts"]] == ["cpu"], "a default is no request for a GPU"
        config.write_text('tier = "spot"\nttl = 5 minutes\n')
        done = sublet("run", "--", "true")
        assert done.status == 2
        assert "config.toml is not TOML" in done.err
        assert "line 2" in done.err
        config.write_text('tier = "spot"\n\nvram = 8\n')
        assert "config.toml:3: the vram 8 has no unit" in sublet("run", "--", "true").err
    finally:
        config.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--shared", "--exclusive", "--gpu", "1GiB", "--", "true"], "contradict"),
        (["run", "--shared", "--", "true"], "--shared needs --gpu size as well"),
        (["run"], "missing argument"),
        (["run", "--"], "missing argument"),
        (["run", "--gpus", "2", "--", "true"], "--gpus"),
        (["run", "--wait", "1s", "--no-wait", "--", "true"], "contradict"),
        (["run", "--tty", "--", "true"], "terminal"),
        (["run", "--env", "=x", "--", "true"], "name=value"),
        (["run", "--renew", "sometimes", "--", "true"], "sometimes"),
        (["run", "--bogus", "--", "true"], "--bogus"),
        (["exec", "l-1"], "missing argument"),
        (["stop", "g-1", "--now", "--grace", "1s"], "contradict"),
        (["logs", "g-1", "--offset", "-1"], "bytes"),
    ],
)
def test_a_command_line_without_sense_is_2_and_asks_for_nothing(sublet: Shell, words: list[str], said: str) -> None:
    done = sublet(*words)
    assert (done.status, done.out) == (2, b"")
    assert said in done.err.lower()


def test_words_behind_the_command_are_its_own(sublet: Shell) -> None:
    """With ``--`` or without, and also where they look like ours."""
    for words in (["--"], []):
        done = sublet("run", "--name", "x", *words, "printf", "%s|", "--gpu", "--json", "--", "-h")
        assert (done.status, done.out) == (0, b"--gpu|--json|--|-h|")


def test_folder_environment_and_umask_are_the_callers(sublet: Shell, tmp_path: Path) -> None:
    script = 'pwd; umask; echo "$MINE $THEIRS"; echo "$SUBLET_LEASE" | cut -c1-2; test -r "$SUBLET_PAGE" && echo page'
    done = sublet(
        *("run", "--env", "MINE=a=b", "--", "sh", "-c", script),
        cwd=tmp_path,
        env={**sublet.env, "MINE": "x", "THEIRS": "y"},
        umask=0o027,
    )
    assert done.out.decode().split("\n") == [str(tmp_path.resolve()), "0027", "a=b y", "l-", "page", ""]


def test_a_python_may_be_named(sublet: Shell, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    done = sublet("run", "--python", PYTHON, "--", "x.py", "-v", cwd=tmp_path)
    assert done.out.decode().split() == [PYTHON, "['-v']"]


@pytest.mark.parametrize(
    ("python", "status", "said"),
    [
        ("/no/such/python", 127, "there is no /no/such/python"),
        ("no-such-python-anywhere", 127, "there is no no-such-python"),
        ("/bin/true", 126, "no Python 3"),
        ("/bin/echo", 126, "no Python 3"),
        ("/etc/passwd", 126, "may not be executed"),
        (os.path.dirname(PYTHON), 126, "is a folder"),
        (sys.prefix, 126, "bin/python"),
    ],
)
def test_what_is_no_python_is_said_before_a_lease_is_asked_for(
    sublet: Shell, python: str, status: int, said: str
) -> None:
    ended = len(sublet.json("lease", "ls", "--all"))
    done = sublet("run", "--python", python, "--", "x.py")
    assert done.status == status
    assert said in done.err
    assert len(sublet.json("lease", "ls", "--all")) == ended


def test_a_python_is_found_as_a_shell_finds_it(sublet: Shell, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    asks = ["-c", "import sys; print(sys.prefix)"]
    expected = f"{(tmp_path / 'venv').resolve()}\n".encode()
    assert sublet("run", "--python", "venv/bin/python", "--", *asks, cwd=tmp_path).out == expected
    on_path = {**sublet.env, "PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin"}
    assert sublet("run", "--python", "python", "--", *asks, env=on_path).out == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="the tenant's guest has a user of its own only where the office is root")
def test_a_tenant_may_name_a_python_that_everybody_may_read(sublet: Shell) -> None:
    token = sublet("tenant", "add", "ann").out.decode().strip()
    ann = {**sublet.env, "SUBLET_TOKEN": token, "SUBLET_AS_TENANT": "1"}
    asks = ["-c", "import sys; print(sys.prefix)"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        venv.create(f"{place}/venv", with_pip=False)
        done = sublet("run", "--python", f"{place}/venv/bin/python", "--", *asks, env=ann, cwd="/")
        assert (done.status, done.out) == (0, f"{place}/venv\n".encode()), done
        os.chmod(place, 0o700)
        done = sublet("run", "--python", f"{place}/venv/bin/python", "--", *asks, env=ann, cwd="/")
        assert done.status != 0
        assert "cannot be shown" in done.err
        os.chmod(place, 0o755)
        hidden = sublet("run", "--", "true", env=ann, cwd=place)
        assert "hidden from the commands of a tenant" in hidden.err


def test_another_token_cuts_what_the_old_one_has_opened(sublet: Shell) -> None:
    token = sublet("tenant", "add", "bob").out.decode().strip()
    process = subprocess.Popen(
        sublet.command("run", "--", "sh", "-c", "cd /; echo ready; sleep 1000"),
        env={**sublet.env, "SUBLET_TOKEN": token, "SUBLET_AS_TENANT": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    assert first_line(process) == b"ready\n"
    assert sublet("tenant", "set", "bob", "--new-token").status == 0
    done = finished(process)
    assert done.status == 76
    assert "rights of this tenant have changed" in done.err
    for lease in sublet.json("lease", "ls"):
        sublet("lease", "revoke", lease["id"])


def test_stdout_and_stderr_stay_apart(sublet: Shell) -> None:
    done = sublet("run", "--", "sh", "-c", "echo one; echo two >&2")
    assert (done.out, done.err) == (b"one\n", "two\n")


def test_an_environment_too_large_is_refused_in_words(sublet: Shell) -> None:
    large = {f"V{n}": "x" * 100_000 for n in range(12)}
    done = sublet("run", "--", "true", env={**sublet.env, **large})
    assert done.status == 2
    assert "environment" in done.err
    until(lambda: sublet.json("lease", "ls") == [])


def test_a_folder_that_is_gone_is_said(sublet: Shell, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = finished(sublet.start("run", "--", "true", cwd=gone, preexec_fn=gone.rmdir))
    assert done.status == 2
    assert "folder" in done.err


# ---- streams ----


def test_twenty_megabytes_go_in_and_come_out_as_they_were(sublet: Shell) -> None:
    blob = os.urandom(1 << 20) * 20
    done = sublet("run", "--", "cat", given=blob)
    assert done.status == 0
    assert hashlib.sha256(done.out).digest() == hashlib.sha256(blob).digest()


def test_the_end_of_stdin_reaches_the_command(sublet: Shell) -> None:
    done = sublet("run", "--", "sh", "-c", "wc -c; echo done", given=b"12345")
    assert done.out.split() == [b"5", b"done"]


def test_stdin_that_is_closed_is_an_empty_one(sublet: Shell) -> None:
    done = finished(sublet.start("run", "--", "wc", "-c", preexec_fn=lambda: os.close(0)))
    assert (done.status, done.out.split()) == (0, [b"0"])


def test_a_closed_stdout_is_none(sublet: Shell) -> None:
    closed = ["sh", "-c", '"$@" >&-', "sh", *sublet.command("run", "--", "true")]
    done = subprocess.run(closed, env=sublet.env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_a_full_disk_does_not_take_is_said(sublet: Shell) -> None:
    full = ["sh", "-c", '"$@" >/dev/full', "sh", *sublet.command("run", "--", "echo", "lost")]
    done = subprocess.run(full, env=sublet.env, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"could not be written: No space left" in done.stderr
    lease = sublet.json("lease", "acquire", "--cpu", "1")["id"]
    for words in (["exec", lease, "--", "echo", "lost"], ["logs", sublet.json("ps", "--all")[-1]["id"]]):
        full = ["sh", "-c", '"$@" >/dev/full', "sh", *sublet.command(*words)]
        done = subprocess.run(full, env=sublet.env, capture_output=True, timeout=60)
        assert done.returncode == 1, words
        assert b"could not be written: No space left" in done.stderr


def test_a_reader_that_has_seen_enough_ends_it_quietly(sublet: Shell) -> None:
    """As in `yes | head`; also for a program that does not know SIGPIPE."""
    stubborn = "import signal, sys\nsignal.signal(13, signal.SIG_IGN)\nwhile True: sys.stdout.write('y\\n')"
    for words in (["yes"], [PYTHON, "-c", stubborn]):
        process = sublet.start("run", "--grace", "1s", "--", *words)
        assert process.stdout is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(PATIENCE_S) != 0
        assert process.stderr is not None
        assert b"sublet: the command" not in process.stderr.read()
        process.stderr.close()
        until(lambda: sublet.json("lease", "ls") == [])


def test_a_reader_that_stands_still_holds_the_command_back_and_loses_nothing(sublet: Shell) -> None:
    """More than pipe, credit and log hold together."""
    # Buffered, whatever the environment says: a program that is stopped within a write has written a part of it.
    script = "out = open(1, 'wb')\nfor n in range(40): out.write(bytes([n]) * (1 << 20))\nout.flush()"
    process = sublet.start("run", "--", PYTHON, "-c", script)
    assert process.stdout is not None
    time.sleep(0.5)
    out = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0
    assert hashlib.sha256(out).digest() == hashlib.sha256(b"".join(bytes([n]) * (1 << 20) for n in range(40))).digest()
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def test_what_the_command_leaves_behind_ends_with_the_lease(sublet: Shell) -> None:
    done = sublet("run", "--", "sh", "-c", "sleep 300 & echo $!")
    assert done.status == 0
    pid = int(done.out)
    until(lambda: not runs(pid))


# ---- signals ----


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 9), (signal.SIGTERM, 7), (signal.SIGUSR1, 5)])
def test_a_signal_goes_to_the_command(sublet: Shell, number: int, status: int) -> None:
    script = "trap 'exit 9' INT; trap 'exit 7' TERM; trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done"
    process = sublet.start("run", "--", "sh", "-c", script)
    assert first_line(process) == b"ready\n"
    process.send_signal(number)
    assert finished(process).status == status


def test_ctrl_c_twice_ends_what_ignores_it(sublet: Shell) -> None:
    """The first is the command's own affair; the second ends the whole tree, after its grace."""
    script = "trap 'echo once' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done"
    process = sublet.start("run", "--grace", "300ms", "--", "sh", "-c", script)
    assert first_line(process) == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert first_line(process) == b"once\n"
    process.send_signal(signal.SIGINT)
    assert finished(process).status == 137
    until(lambda: sublet.json("lease", "ls") == [])


def test_a_hang_up_ends_the_command(sublet: Shell) -> None:
    process = sublet.start(
        "run", "--grace", "300ms", "--", "sh", "-c", "trap '' HUP TERM; echo $$; sleep 300; sleep 300"
    )
    pid = int(first_line(process))
    process.send_signal(signal.SIGHUP)
    assert finished(process).status == 137
    assert not runs(pid)


# ---- a terminal ----


class Seat:
    """Somebody at a terminal, with `sublet run` in its foreground."""

    def __init__(self, shell: Shell, *words: str) -> None:
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(PYTHON, shell.command(*words), shell.env)
        self.resize(30, 100)
        self.modes = termios.tcgetattr(self.fd)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def expect(self, text: bytes) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < end_s, self.seen
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536)
                except OSError:
                    assert text in self.seen, self.seen
        self.seen = self.seen.partition(text)[2]

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def leave(self) -> int:
        """The exit status, with the terminal as it was found."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end_s, self.seen
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # EIO: nobody is at the other end any more
                    self.seen += os.read(self.fd, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def seat(sublet: Shell) -> Iterator[Callable[..., Seat]]:
    taken: list[Seat] = []

    def sit(*words: str) -> Seat:
        taken.append(Seat(sublet, *words))
        return taken[-1]

    yield sit
    for one in taken:
        one.close()


def test_at_a_terminal_the_command_has_one_of_its_own_that_follows_ours(seat: Callable[..., Seat]) -> None:
    script = "import os, signal, sys\n"
    script += "signal.signal(signal.SIGWINCH, lambda *_: print('now', *os.get_terminal_size(), flush=True))\n"
    script += "print('tty', *(os.isatty(n) for n in (0, 1, 2)), flush=True)\n"  # only now may the size change
    script += "for line in sys.stdin: print('got', repr(line), flush=True)\nsys.exit(4)"
    at = seat("run", "--", PYTHON, "-c", script)
    at.expect(b"tty True True True\r\n")
    at.resize(41, 123)
    at.expect(b"now 123 41\r\n")
    at.type(b"hello\r")
    at.expect(b"got 'hello\\n'\r\n")
    at.type(b"\x04")
    assert at.leave() == 4


def test_the_terminal_is_given_back_as_it_was_found(seat: Callable[..., Seat]) -> None:
    """Whoever looks afterwards, from the shell that goes on, finds lines and echo again."""
    at = seat("run", "-T", "--", "true")
    assert at.leave() == 0
    flags = termios.tcgetattr(at.fd)[3]
    assert flags & termios.ICANON
    assert flags & termios.ECHO


def test_ctrl_c_at_a_terminal_is_the_commands_and_twice_ends_it(seat: Callable[..., Seat]) -> None:
    script = "trap 'echo once' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done"
    at = seat("run", "--grace", "300ms", "--", "sh", "-c", script)
    at.expect(b"ready")
    at.type(b"\x03")
    at.expect(b"once")
    at.type(b"\x03")
    assert at.leave() == 137
    assert termios.tcgetattr(at.fd)[3] & termios.ICANON


# ---- leases ----


def test_what_is_not_granted_is_75_with_the_reason(sublet: Shell) -> None:
    done = sublet("run", "--gpu", "500GiB", "--", "true")
    assert (done.status, done.out) == (75, b"")
    assert "GPU unavailable" in done.err
    held = sublet.json("lease", "acquire", "--gpu", "4GiB")
    for words in (["--no-wait"], ["--wait", "300ms"]):
        done = sublet("run", "--gpu", "1GiB", *words, "--", "true")
        assert (done.status, done.out) == (75, b""), done
    sublet("lease", "release", held["id"])


def test_who_has_to_wait_is_told_why_and_gets_it(sublet: Shell) -> None:
    held = sublet.json("lease", "acquire", "--gpu", "4GiB")
    process = sublet.start("run", "--gpu", "1GiB", "--", "echo", "mine")
    assert process.stderr is not None
    assert b"queued, place 1" in process.stderr.readline()
    sublet("lease", "release", held["id"])
    done = finished(process)
    assert (done.status, done.out) == (0, b"mine\n")


def test_who_waits_and_is_ended_leaves_the_queue(sublet: Shell) -> None:
    held = sublet.json("lease", "acquire", "--gpu", "4GiB")
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = sublet.start("run", "--gpu", "1GiB", "--", "true")
        assert process.stderr is not None
        assert b"queued, place 1" in process.stderr.readline()
        process.send_signal(number)
        assert finished(process).status == status
        assert [lease["id"] for lease in sublet.json("lease", "ls")] == [held["id"]]
    sublet("lease", "release", held["id"])


def test_the_lease_is_renewed_and_busy_while_the_command_runs(sublet: Shell) -> None:
    script, ttls = "echo $SUBLET_LEASE; read go; echo after", ["40s", "6s"]
    while True:  # one that gets no processor for two seconds may renew the shorter too late
        process = sublet.start("run", "--ttl", ttls.pop(), "--", "sh", "-c", script, stdin=subprocess.PIPE)
        lease, began_s = first_line(process).decode().strip(), time.monotonic()
        if lease and until(lambda lease=lease: renewed_or_over(sublet, lease))["end"] is None:  # type: ignore[misc]
            break
        process.kill()
        process.communicate()
    assert sublet.json("lease", "show", lease)["idle"] is False
    passed_s = time.monotonic() - began_s
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    done = finished(process)
    assert (done.status, done.out) == (0, b"after\n"), done
    end = sublet.json("lease", "show", lease)
    assert end["end"]["reason"] == "released"
    assert end["busy"] > passed_s - 0.1


def renewed_or_over(sublet: Shell, lease: str) -> Any:
    view = sublet.json("lease", "show", lease)
    return view if view["renewals"] or view["end"] else None


def test_a_lease_that_is_not_renewed_ends_the_command_with_76(sublet: Shell) -> None:
    done = sublet(
        "run", "--ttl", "2s", "--renew", "never", "--", "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"
    )
    assert done.status == 76
    assert "expired" in done.err.splitlines()[-2]
    assert "--ttl" in done.err.splitlines()[-1]


def test_a_lease_taken_by_the_operator_ends_the_command_with_76(sublet: Shell) -> None:
    process = sublet.start("run", "--", "sh", "-c", "echo $SUBLET_LEASE; while :; do sleep 0.1; done")
    lease = first_line(process).decode().strip()
    assert sublet("lease", "revoke", lease, "--detail", "fire drill").status == 0
    done = finished(process)
    assert done.status == 76
    said = done.err.splitlines()
    assert "operator" in said[-2]
    assert "fire drill" in said[-2]


def test_a_holder_that_is_killed_does_not_keep_its_command_alive(sublet: Shell) -> None:
    """The lease ends with `sublet run`, however long it had to live, and the command with the lease, after its grace
    where it ignores that it is asked to leave."""
    script = "trap '' TERM HUP; echo $$ $SUBLET_LEASE; while :; do sleep 0.1; done"
    process = sublet.start("run", "--ttl", "1h", "--", "sh", "-c", script)
    pid, lease = first_line(process).decode().split()
    assert f"bound to process {process.pid}" in sublet("lease", "show", lease).out.decode()
    assert sublet.json("lease", "show", lease)["bound_to"] == process.pid
    process.kill()
    process.communicate()
    until(lambda: sublet.json("lease", "show", lease)["status"] != "active")
    assert sublet.json("lease", "show", lease)["end"]["reason"] == "holder_gone"
    until(lambda: not runs(int(pid)), 30)


def test_a_lease_taken_from_a_shell_is_bound_to_no_process(sublet: Shell) -> None:
    """The command that takes it ends at once; the lease goes on, and says what it ends by."""
    lease = sublet.json("lease", "acquire", "--cpu", "1", "--ttl", "1m")
    assert lease["bound_to"] is None
    said = sublet("lease", "show", lease["id"]).out.decode()
    assert "not bound to a process: ends by TTL if the client dies" in said
    assert sublet.json("lease", "release", lease["id"])["status"] in ("ending", "ended")
    assert "TTL if the client" not in sublet("lease", "show", lease["id"]).out.decode()


# ---- the others ----


def test_ps_logs_exec_and_stop(sublet: Shell, tmp_path: Path) -> None:
    assert sublet.json("ps") == []
    script = "echo $SUBLET_LEASE; echo oops >&2; trap '' INT; while :; do sleep 0.05; done"
    process = sublet.start("run", "--name", "loop", "--", "sh", "-c", script)
    lease = first_line(process).decode().strip()
    (guest,) = sublet.json("ps")
    assert (guest["lease"], guest["name"], guest["exit_code"], guest["state"]) == (lease, "loop", None, "running")
    assert guest["argv"] == ["sh", "-c", script]
    assert b"loop" in sublet("ps").out
    assert sublet.json("ps", "--lease", "l-other") == []

    until(lambda: sublet("logs", guest["id"]).err)  # it is said after the line that was read
    logs = sublet("logs", guest["id"])
    assert (logs.status, logs.out, logs.err) == (0, f"{lease}\n".encode(), "oops\n")
    assert sublet("logs", guest["id"], "--offset", "2").out == f"{lease}\n".encode()[2:]

    for target in (lease, guest["id"]):
        done = sublet("exec", target, "--", "sh", "-c", "echo $SUBLET_LEASE $PWD; exit 6", cwd=tmp_path)
        assert (done.status, done.out.decode().split()) == (6, [lease, str(tmp_path.resolve())])
    assert sublet("exec", "l-none", "--", "true").status == 1
    assert sublet("exec", "g-none", "--", "true").status == 1
    assert sublet("exec", lease, "--", "no-such-thing").status == 127

    following = sublet.start("logs", guest["id"], "--follow")
    assert first_line(following) == f"{lease}\n".encode()
    stopped = sublet("stop", guest["id"], "--grace", "30s")
    assert (stopped.status, stopped.out) == (0, f"Guest {guest['id']} is gone: exit status 143.\n".encode())
    assert finished(process).status == 143
    assert finished(following).status == 0
    assert sublet.json("ps") == []
    assert guest["id"] in {one["id"] for one in sublet.json("ps", "--all")}
    assert sublet("logs", guest["id"]).out == f"{lease}\n".encode()
    assert sublet("stop", guest["id"]).status == 0
    assert sublet("logs", "g-none").status == 1


def test_logs_say_where_something_is_missing(sublet: Shell) -> None:
    script = "import os; print('x' * (24 << 20)); print('end')"
    assert sublet("run", "--", PYTHON, "-c", script).status == 0
    guest = sublet.json("ps", "--all")[-1]["id"]
    done = sublet("logs", guest)
    assert done.out.endswith(b"xxx\nend\n")
    assert len(done.out) < 20 << 20
    assert "no longer kept" in done.err


def test_there_is_no_office(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "none")
    for words in (["logs", "g-1"], ["stop", "g-1"], ["exec", "l-1", "--", "true"]):
        done = shell(*words)
        assert (done.status, done.out) == (1, b"")
        assert "no office is running" in done.err
    assert not (tmp_path / "none").exists()


# ---- when parts die ----


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Shell]:
    """An office of one's own, to be harmed."""
    shell = Shell(tmp_path / "home")
    assert shell("up", "--host-gpus", "1x1GiB").status == 0
    yield shell
    shell.end()


def test_an_office_that_is_closing_says_so_to_who_asks(own: Shell) -> None:
    holds = own.start("run", "--grace", "1s", "--", "sh", "-c", "trap '' TERM; echo ready; sleep 1000")
    first_line(holds)
    closing = own.start("down", "--drain")
    until(lambda: own.json("lease", "ls")[0]["status"] == "noticed")
    refused = own("run", "--no-wait", "--", "true")
    assert (refused.status, "the office is closing" in refused.err) == (75, True)
    waits = own.start("run", "--", "true")
    assert waits.stderr is not None
    assert b"the office is closing" in waits.stderr.readline()
    waits.send_signal(signal.SIGINT)
    assert waits.wait(PATIENCE_S) == 130
    own("down", "--now")
    finished(closing)
    finished(holds)
    waits.communicate()


def test_the_command_goes_on_while_the_office_is_killed(own: Shell) -> None:
    """Its output still arrives, its status too, and the lease is given back to the office that comes."""
    script = "echo ready; read line; for n in 1 2 3 4 5; do echo $n; sleep 0.1; done; exit 5"
    process = own.start("run", "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert first_line(process) == b"ready\n"
    os.kill(own.json("status")["pid"], signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    done = finished(process)
    assert (done.status, done.out) == (5, b"1\n2\n3\n4\n5\n"), done


def test_a_supervisor_that_dies_is_said(own: Shell) -> None:
    process = own.start("run", "--", "sh", "-c", "echo $PPID; echo ready; while :; do sleep 0.1; done")
    supervisor = int(first_line(process))
    assert first_line(process) == b"ready\n"
    os.kill(supervisor, signal.SIGKILL)
    done = finished(process)
    assert done.status == 76
    assert "supervisor" in done.err
