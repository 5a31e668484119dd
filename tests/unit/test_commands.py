"""A command in a fork of the loaded command line is what a command with a start of its own is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from sublet.client.home import runtime_dir
from tests.commands import Ended, anew, command_file, fork_where, run_program, run_sublet, start_piped
from tests.crash.office_process import office_at
from tests.traces import end_office, plain_env, supervisor_of


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("config", "path"),
        ("config", "set", "vram", "2GiB"),
        ("config", "set", "vram", "no size"),
        ("status",),
        ("stop",),
        ("no-such-command",),
        ("run", "--no-such-option"),
    ],
    ids=" ".join,
)
def test_a_forked_command_says_and_does_what_a_started_one_does(words: tuple[str, ...], tmp_path: Path) -> None:
    """In a folder of its own, with an environment of its own, and a mask for the files it makes."""
    env = plain_env() | {"SUBLET_HOME": "home", "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "90"}
    told, left = [], []
    for name in ("forked", "started"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "forked":
            told.append(run_sublet(*words, env=env, cwd=folder, umask=0o027))
        else:
            command = [sys.executable, "-m", "sublet", *words]
            done = subprocess.run(
                command, env=env, cwd=folder, umask=0o027, stdin=subprocess.DEVNULL, capture_output=True
            )
            told.append(Ended(done.returncode, done.stdout, done.stderr.replace(b"started", b"forked")))
        left.append({str(path.relative_to(folder)): oct(path.stat().st_mode) for path in folder.rglob("*")})
    forked, started = told
    assert forked == started._replace(out=started.out.replace(b"/started/", b"/forked/"))
    assert left[0] == left[1]


@pytest.mark.parametrize("starts", [False, True], ids=["forked", "started"])
def test_scripts_call_a_forked_command_as_they_call_a_started_one(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the script's folder and environment, with its streams and exit statuses."""
    monkeypatch.setattr(anew, "wanted", starts)
    env = plain_env() | {"SUBLET_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command_file(tmp_path / "sublet", env)
    (tmp_path / "data").mkdir()
    script = (
        "cd data; sublet config path > path; SUBLET_HOME=$PWD sublet config path; sublet no-such-command || echo $?"
    )
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (tmp_path / "data" / "path").read_text().startswith(str(tmp_path / "home"))
    path, status = done.stdout.splitlines()
    assert path.startswith(str(tmp_path / "data"))
    assert (done.returncode, status) == (0, "2")
    assert "no-such" in done.stderr


def test_a_command_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    env = plain_env() | {"SUBLET_HOME": str(tmp_path / "home")}
    before = os.listdir("/proc/self/fd")
    with pytest.raises(subprocess.TimeoutExpired):
        run_sublet("top", "--json", "--interval", "1h", env=env, timeout=0)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "but the line to the one that forks"


ECHOES: Final = "import sys; print(sys.stdin.readline()); print(sys.argv[1:], file=sys.stderr); sys.exit(3)"


def test_a_forked_program_is_talked_to_by_pipes_as_a_started_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir("/proc/self/fd")
    came: list[object] = []
    for wanted in (False, True):
        monkeypatch.setattr(anew, "wanted", wanted)
        with start_piped([sys.executable, "-c", ECHOES, "word"], plain_env(), stdin=subprocess.PIPE) as told:
            assert told.poll() is None
            came.append((told.communicate(b"line\n"), told.returncode))
        with start_piped([sys.executable, "-c", "input()"], plain_env(), stdin=subprocess.PIPE) as killed:
            killed.terminate()
            came.append((killed.communicate(), killed.wait(), killed.poll()))
        with start_piped([sys.executable, "-c", "input()"], plain_env(), stderr=subprocess.STDOUT) as silent:
            out, err = silent.communicate()
            came.append((out.splitlines()[-1], err, silent.returncode))
    told_so = (b"line\n\n", b"['word']\n")
    at_its_end = (b"EOFError: EOF when reading a line", None, 1)
    assert came == [(told_so, 3), ((b"", b""), -15, -15), at_its_end] * 2
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "but the line to the one that forks"


@pytest.mark.needs("gcc")
def test_what_is_forked_finds_its_libraries_where_it_was_said_to_fork(tmp_path: Path) -> None:
    """Whatever lies there at the time; and nobody else looks there."""
    folder, source = tmp_path / "libraries", tmp_path / "number.c"
    fork_where(LD_LIBRARY_PATH=str(folder))
    for number in (1, 2):
        folder.mkdir()
        source.write_text(f"int number(void) {{ return {number}; }}")
        subprocess.run(["gcc", "-shared", "-o", folder / "libsubletnumber.so", source], check=True)
        code = "import ctypes, sys; print(sys.modules['sublet'] and ctypes.CDLL('libsubletnumber.so').number())"
        done = run_program(code, env=plain_env() | {"LD_LIBRARY_PATH": str(folder)})
        assert done == Ended(0, b"%d\n" % number, b""), "and it finds Sublet loaded: it is a fork"
        assert b"cannot open shared object" in run_program(code, env=plain_env()).err
        shutil.rmtree(folder)


LAST_SIGNAL: Final = 31
"""Those after it are the C library's own, and ``posix_spawn`` leaves them ignored."""


def open_files(proc: Path) -> list[tuple[int, str]]:
    """By two looks that find the same: between the listing and the look at one, the process may close it."""
    found, before = list[tuple[int, str]](), None
    while found != before:
        before, found = found, []
        for fd in (proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append((int(fd.name), os.readlink(fd).split("[")[0]))
    return sorted(found)


def shown(pid: int) -> dict[str, object]:
    """What the machine shows of a process, where it does not change while that runs."""
    proc = Path("/proc", str(pid))
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    names = ("Name", "Umask", "Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Threads")
    signals = {name: int(status[name], 16) % (1 << LAST_SIGNAL) for name in ("SigBlk", "SigIgn", "SigCgt")}
    files = open_files(proc)
    return {
        **{name: status[name] for name in names},
        **signals,
        **{name: (proc / name).read_text() for name in ("cmdline", "limits", "oom_score_adj", "cgroup")},
        "environ": sorted((proc / "environ").read_text().split("\0")),
        "cwd": os.readlink(proc / "cwd"),
        "leads its session": os.getsid(pid) == pid,
        "is in ours": os.getsid(pid) == os.getsid(0),
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "streams": [where for _, where in files[:3]],
        "files": sorted({where for _, where in files[3:]}),
    }


def office_as_shown(place: Path) -> list[object]:
    """One that is started in the foreground, with its supervisor; then one in the background, which finds that."""
    seen: list[object] = []
    with office_at(place) as office:
        assert office.start(), office.said
        runtime = runtime_dir(office.home)
        supervisor = supervisor_of(runtime)
        assert supervisor is not None
        seen += [shown(office.pid), shown(supervisor), sorted(office.ask("GET", "/v1/status").doc)]
        office.stop()
        seen += [office.said, sorted(path.name for path in office.home.iterdir()), os.listdir(runtime)]
        env = office.env()
        try:
            up = run_sublet("up", "--json", env=env)
            assert up.status == 0, up
            pid = json.loads(up.out)["pid"]
            seen.append(shown(pid))
            with open(f"/proc/{pid}/stat") as file:
                seen.append(int(file.read().rpartition(")")[2].split()[1]))
        finally:
            run_sublet("down", "--now", env=env)
    return seen


LOADS: Final = """
import os, signal, sys
before = set(sys.modules)
from sublet.engines.local import run_office
run_office(host_gpus="1x64MiB", ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
print(sorted(name for name in set(sys.modules) - before if name.startswith("sublet")))
"""


def test_a_forked_office_finds_all_of_sublet_loaded_that_it_needs(tmp_path: Path) -> None:
    """Else a fork is no faster than a start: three quarters of what an office takes of a processor are imports."""
    home = tmp_path / "home"
    try:
        assert run_program(LOADS, env=plain_env() | {"SUBLET_HOME": str(home)}) == Ended(0, b"[]\n", b"")
    finally:
        end_office(runtime_dir(home))


DIFFERS: Final = re.compile(r"pid \d+|[0-9a-f]{32}")
"""From one office to the next: pids, and the ids of offices."""


def test_a_forked_office_and_supervisor_look_and_end_as_started_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever looks at processes: their command lines, environments, descriptors, limits, signals, sessions, parent.
    And what they print, and leave behind."""
    place = tmp_path / "office"
    seen = []
    for wanted in (False, True):
        monkeypatch.setattr(anew, "wanted", wanted)
        seen.append(json.loads(DIFFERS.sub("", json.dumps(office_as_shown(place)))))
        shutil.rmtree(place)
    forked, started = seen
    assert forked == started
