"""Plays the supervisor for guests that simply live and end: statuses, signals, terminals, errors, what is left.

python isolation_life.py root|ordinary
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sublet.node import sandbox as isolation
from sublet.node.prctl import set_child_subreaper, set_pdeathsig
from sublet.node.sandbox.probe import probe_abilities
from tests.integration.isolation_stage import TENANT, become

PATIENCE_S = 30.0
UNIQUE = f"{os.getpid():07d}"
"""After the point of the seconds that a command sleeps: by it this run's are told from another's."""


class Stage:
    def __init__(self, kind: str) -> None:
        self.base = tempfile.mkdtemp(prefix="sublet-isolation-")
        os.chmod(self.base, 0o755)
        if os.geteuid() == 0 and kind != "root":
            os.chown(self.base, 65534, 65534)
        become(kind)
        self.kind = kind
        self.own = f"{self.base}/own"
        os.mkdir(f"{self.base}/guest", 0o700)
        os.mkdir(self.own, 0o700)
        if kind == "root":
            os.chown(self.own, TENANT, TENANT)
        self.abilities = probe_abilities()

    def plan(self, **wanted: Any) -> isolation.SandboxPlan:
        ids = isolation.Ids(TENANT, TENANT)
        given = {"folder": f"{self.base}/guest", "writable": (self.own,), "readable": (sys.base_prefix,)}
        wish = isolation.Wish(**{"ids": ids, **given, **wanted})
        plan = isolation.plan(isolation.SandboxProfile.TENANT, self.abilities, wish)
        assert isinstance(plan, isolation.SandboxPlan), plan
        return plan

    def start(self, plan: isolation.SandboxPlan, *argv: str, stdio: int = -1, cwd: str = "") -> tuple[int, int]:
        """Its pid, and a pipe that ends at the exec or says which step failed."""
        read, write = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                for fd in range(3):
                    if stdio >= 0:
                        os.dup2(stdio, fd)
                if stdio >= 0 and os.isatty(stdio):
                    isolation_take(stdio)
                above = isolation.enter(plan, parent=parent)
                os.chdir(cwd or self.own)
                set_pdeathsig(signal.SIGKILL, above)
                os.execve(argv[0], list(argv), isolation.clean_env("mallory", home=self.own))
            except OSError as error:
                os.write(write, f"{getattr(error, 'step', 'exec')}\0{error.errno}".encode())
            finally:
                os._exit(126)
        os.close(write)
        return pid, read

    def run(self, *argv: str, plan: isolation.SandboxPlan | None = None) -> tuple[int, str]:
        """How it ended, and what it said."""
        out, into = os.pipe2(os.O_CLOEXEC)
        pid, failure = self.start(plan or self.plan(), *argv, stdio=into)
        os.close(into)
        said = read_all(out)
        failed = read_all(failure)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said or failed


def isolation_take(fd: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


def read_all(fd: int, until: bytes = b"") -> str:
    said, deadline = b"", time.monotonic() + PATIENCE_S
    while not (until and until in said):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return said.decode() + "LATE"
        try:
            piece = os.read(fd, 4096)
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal says that it ended
                raise
            piece = b""
        if not piece:
            break
        said += piece
    if not until:
        os.close(fd)
    return said.decode()


def marked(mark: str) -> list[int]:
    """The processes whose command line has this in it."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid():
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(name))
    return found


def asleep(seconds: int) -> str:
    return f"sleep\0{seconds}.{UNIQUE}"


def came(mark: str) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not marked(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(marked(mark))


def gone(mark: str) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not marked(mark)


# ------------------------------------------------------------------------------------------------------- what happens


def statuses(stage: Stage) -> list[int]:
    commands = ("exit 0", "exit 7", "exit 255", "kill -9 $$", "kill -15 $$", "kill -6 $$", "kill -1 $$")
    return [stage.run("/bin/sh", "-c", command)[0] for command in commands]


def a_term_ends_a_command_that_does_nothing_about_it(stage: Stage) -> list[Any]:
    out, into = os.pipe2(os.O_CLOEXEC)
    pid, _ = stage.start(stage.plan(), "/bin/sh", "-c", f"echo up; exec sleep 61.{UNIQUE}", stdio=into)
    os.close(into)
    read_all(out, until=b"up")
    os.kill(pid, signal.SIGTERM)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), gone(asleep(61))]


def a_term_to_the_group_comes_once(stage: Stage) -> list[Any]:
    script = "n=0; trap 'n=$((n+1)); echo got $n' TERM; trap 'exit $n' USR1; echo up; while :; do sleep 0.02; done"
    out, into = os.pipe2(os.O_CLOEXEC)
    pid, _ = stage.start(stage.plan(), "/bin/sh", "-c", script, stdio=into)
    os.close(into)
    read_all(out, until=b"up")
    os.killpg(pid, signal.SIGTERM)
    read_all(out, until=b"got 1")
    time.sleep(0.1)
    os.kill(pid, signal.SIGUSR1)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def a_kill_of_the_stand_in_ends_everything(stage: Stage) -> list[Any]:
    script = f"trap '' TERM HUP INT; (setsid sleep 62.{UNIQUE} &) ; (sleep 62.{UNIQUE} &) ; echo up; sleep 62.{UNIQUE}"
    out, into = os.pipe2(os.O_CLOEXEC)
    pid, _ = stage.start(stage.plan(), "/bin/sh", "-c", script, stdio=into)
    os.close(into)
    read_all(out, until=b"up")
    there = came(asleep(62))
    os.kill(pid, signal.SIGKILL)
    return [there, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), gone(asleep(62))]


def the_end_of_the_command_ends_what_it_left(stage: Stage) -> list[Any]:
    code, _ = stage.run("/bin/sh", "-c", f"(setsid sleep 63.{UNIQUE} >/dev/null 2>&1 &); exit 3")
    return [code, not marked(asleep(63))]  # at once: the status comes after everything is gone


def the_end_of_the_supervisor_ends_everything(stage: Stage) -> list[Any]:
    set_child_subreaper()
    out, into = os.pipe2(os.O_CLOEXEC)
    supervisor = os.fork()
    if supervisor == 0:
        stage.start(
            stage.plan(), "/bin/sh", "-c", f"(setsid sleep 64.{UNIQUE} &); echo up; sleep 64.{UNIQUE}", stdio=into
        )
        time.sleep(PATIENCE_S)
        os._exit(0)
    os.close(into)
    read_all(out, until=b"up")
    there = came(asleep(64))
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    rest = read_all(out)  # reaches its end when the last holder of the pipe is gone
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)
    return [there, rest.strip(), gone(asleep(64))]


def the_guest_ends_its_output(stage: Stage) -> str:
    """The stand-ins must not hold the pipe open: this would wait for ever."""
    out, into = os.pipe2(os.O_CLOEXEC)
    pid, _ = stage.start(
        stage.plan(), "/bin/sh", "-c", f"echo said; exec >/dev/null 2>&1 <&1; sleep 65.{UNIQUE}", stdio=into
    )
    os.close(into)
    said = read_all(out)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return said.strip()


def the_terminal_is_the_commands(stage: Stage) -> list[Any]:
    master, slave = pty.openpty()
    script = "trap 'echo interrupted; exit 9' INT; (: >/dev/tty) && echo mine; while :; do sleep 0.02; done"
    pid, _ = stage.start(stage.plan(), "/bin/sh", "-c", script, stdio=slave)
    os.close(slave)
    mine = "mine" in read_all(master, until=b"mine")
    os.write(master, b"\x03")
    interrupted = "interrupted" in read_all(master, until=b"interrupted")
    return [mine, interrupted, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def a_failing_step_is_named(stage: Stage) -> list[Any]:
    missing = stage.run("/bin/true", plan=stage.plan(writable=(f"{stage.base}/nowhere",)))
    os.symlink("/etc", f"{stage.base}/link")
    links = [stage.run("/bin/true", plan=stage.plan(writable=(f"{stage.base}/{at}",))) for at in ("link", "link/ssl")]
    device = stage.run("/bin/true", plan=stage.plan(devices=("/etc/passwd",)))
    return [missing, *links, device, stage.run("/no/such/program")]


def the_own_folder_stays_and_the_rest_does_not(stage: Stage) -> list[Any]:
    first, _ = stage.run(
        "/bin/sh",
        "-c",
        "echo kept > kept && echo x > ../guest/x && echo x > /tmp/x && echo x > /dev/shm/x && echo x > /var/tmp/x",
    )
    _, said = stage.run(
        "/bin/sh",
        "-c",
        "cat kept; ls -A ../guest /tmp /dev/shm /var/tmp | grep -x x; id -u; hostname; ulimit -c; umask",
    )
    return [first, said.split(), os.stat(f"{stage.own}/kept").st_uid]


def a_device_of_the_lease_is_there(stage: Stage) -> list[Any]:
    nodes = [node for node in ("/dev/fuse", "/dev/userfaultfd", "/dev/vsock", "/dev/hwrng") if os.path.exists(node)][:1]
    with_it = [stage.run("/bin/sh", "-c", f"test -c {node}", plan=stage.plan(devices=(node,)))[0] for node in nodes]
    without = [stage.run("/bin/sh", "-c", f"test -e {node}")[0] for node in nodes]
    return [with_it, without]


def python_runs(stage: Stage) -> list[Any]:
    """With what programs commonly want: locks in shared memory, terminals, loopback, the threads' names."""
    program = (
        "import ctypes, multiprocessing, os, socket\n"
        "lock, pair, server = multiprocessing.Lock(), os.openpty(), socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname())\n"
        "print(os.ttyname(pair[1]), os.listdir('/dev/pts'), os.cpu_count() > 0)"
    )
    ours = os.path.realpath(sys.executable)  # which an ordinary user may not be able to reach
    return list(stage.run(ours if os.access(ours, os.X_OK) else "/usr/bin/python3", "-I", "-c", program))


def hidden_folders_stay_hidden(stage: Stage) -> list[Any]:
    """Even where a readable folder would show them; what is given below one is shown all the same."""
    for name in ("state", "state/given", "work"):
        os.makedirs(f"{stage.base}/{name}", exist_ok=True)
        Path(f"{stage.base}/{name}/text").write_text(name)
    wanted = {"readable": (stage.base, f"{stage.base}/state/given"), "hidden": (f"{stage.base}/state",)}
    script = f"cd {stage.base}; cat work/text; cat state/text 2>/dev/null; cat state/given/text; echo; ls state"
    _, said = stage.run("/bin/sh", "-c", script, plan=stage.plan(**wanted))
    return said.split()


def milliseconds(stage: Stage) -> dict[str, float]:
    plan = stage.plan()
    local = isolation.plan(isolation.SandboxProfile.LOCAL, stage.abilities, isolation.Wish(folder=stage.own))
    assert isinstance(local, isolation.SandboxPlan)
    times: dict[str, list[float]] = {"local": [], "tenant": []}
    for _ in range(50):  # in turns, so that a busy machine is as busy for the one as for the other
        for name, one in (("local", local), ("tenant", plan)):
            before = time.perf_counter()
            pid, failure = stage.start(one, "/bin/true")
            os.waitpid(pid, 0)
            times[name].append((time.perf_counter() - before) * 1000)
            os.close(failure)
    return {name: round(sorted(these)[25], 2) for name, these in times.items()}


SCENES: tuple[Callable[[Stage], Any], ...] = (
    statuses,
    a_term_ends_a_command_that_does_nothing_about_it,
    a_term_to_the_group_comes_once,
    a_kill_of_the_stand_in_ends_everything,
    the_end_of_the_command_ends_what_it_left,
    the_end_of_the_supervisor_ends_everything,
    the_guest_ends_its_output,
    the_terminal_is_the_commands,
    a_failing_step_is_named,
    the_own_folder_stays_and_the_rest_does_not,
    a_device_of_the_lease_is_there,
    python_runs,
    hidden_folders_stay_hidden,
)


def main(kind: str) -> None:
    stage = Stage(kind)
    scenes = SCENES if len(sys.argv) < 3 else tuple(globals()[name] for name in sys.argv[2:])
    try:
        results = {scene.__name__: scene(stage) for scene in scenes}
    finally:
        left = isolation.remove_tree(stage.own)
        shutil.rmtree(stage.base, ignore_errors=True)
    print(json.dumps({**results, "left": str(left)}))


if __name__ == "__main__":
    main(sys.argv[1])
