"""The stage of ``test_zygote``: a process of its own that takes in orphans, keeps zygotes and asks them for guests.

``python -m tests.integration.zygote_stage SCENE [ARGUMENT…]`` plays one scene and prints what came of it as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest import mock

from sublet.clock import SystemClock
from sublet.errors import SubletError
from sublet.lease_end import EndReason
from sublet.node.loop import Loop
from sublet.node.prctl import set_child_subreaper
from sublet.node.processes.procs import Procs
from sublet.node.processes.spawn import Child
from sublet.node.processes.tree import Trees
from sublet.node.processes.zygote_policy import ZygoteKey, ZygoteState, walled_key
from sublet.node.processes.zygotes import Zygotes
from sublet.values import NS_PER_S, Epoch, LeaseId
from sublet.wire.page import PageState, PageView, PageWriter, time_namespace
from sublet.wire.zygote import LATER, Fork, Limit, fingerprint

PATIENCE_S: Final = 60.0
SCENES: Final[dict[str, Callable[..., object]]] = {}


def scene(play: Callable[..., object]) -> Callable[..., object]:
    SCENES[play.__name__] = play
    return play


class Stage:
    """A supervisor's part of it, with one kind of zygote."""

    def __init__(self, *imports: str, python: str = sys.executable, **env: str) -> None:
        set_child_subreaper()
        self.env = {**os.environ, **env}
        self.key = ZygoteKey(python, imports, fingerprint(self.env))
        self.loop = Loop(SystemClock())
        self.zygotes = Zygotes(self.loop)
        self.zygotes.want(self.key)

    def until(self, is_so: Callable[[], object]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < limit, self.zygotes.lines()
            self.loop.turn(0.05)

    def settled(self) -> str:
        """Wait until it is ready or discarded; what is said of it."""
        self.until(lambda: self.zygotes.shelf.entries[self.key].state in (ZygoteState.READY, ZygoteState.DISCARDED))
        return self.zygotes.lines()[0]

    def child(self, *argv: str, stdio: tuple[int, int, int] = (0, 1, 2), **more: Any) -> Child | SubletError:
        """A guest that waits for its word."""
        self.until(lambda: self.zygotes.ready(self.key))
        fork = Fork(**{"argv": argv, "env": self.env, "cwd": os.getcwd(), **more})
        got: list[Child | SubletError] = []
        self.zygotes.fork(self.key, fork, stdio, got.append)
        self.until(lambda: got)
        return got[0]

    def run(self, *argv: str, stdin: bytes = b"", **more: Any) -> dict[str, Any]:
        """A guest from start to end."""
        ends = [os.pipe() for _ in range(3)]
        child = self.child(*argv, stdio=(ends[0][0], ends[1][1], ends[2][1]), **more)
        assert isinstance(child, Child), child
        for fd in (ends[0][0], ends[1][1], ends[2][1]):
            os.close(fd)
        os.write(ends[0][1], stdin)
        os.close(ends[0][1])
        child.let_run()
        return {"pid": child.pid, **finish(child, ends[1][0], ends[2][0])}


def finish(child: Child, out: int, err: int) -> dict[str, Any]:
    said = read_both(out, err)
    failure = os.read(child.failure, 4096).decode().replace("\0", " ")
    _, status, _ = os.wait4(child.pid, 0)
    for fd in (out, err, child.failure, child.pidfd):
        os.close(fd)
    return {"out": said[out], "err": said[err], "failure": failure, "code": os.waitstatus_to_exitcode(status)}


def read_both(*fds: int) -> dict[int, str]:
    said, poll = dict.fromkeys(fds, b""), select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    waiting = set(fds)
    while waiting:
        for fd, _ in poll.poll():
            piece = os.read(fd, 65536)
            said[fd] += piece
            if not piece:
                poll.unregister(fd)
                waiting.discard(fd)
    return {fd: text.decode() for fd, text in said.items()}


LOOK = """
import json, os, signal, sys, ctypes, threading
wish = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(wish), 0, 0, 0)
links = {}
for fd in os.listdir("/proc/self/fd"):
    try: links[fd] = os.readlink("/proc/self/fd/" + fd)
    except OSError: pass
print(json.dumps(dict(
    ppid=os.getppid(), sid=os.getsid(0), argv=sys.argv, path0=sys.path[0], cwd=os.getcwd(), env=dict(os.environ),
    wish=wish.value, sigterm=str(signal.getsignal(signal.SIGTERM)), sigint=str(signal.getsignal(signal.SIGINT)),
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), fds=links, stdin=sys.stdin.read(),
    shown=open("/proc/self/environ").read().split("\\0"), title=open("/proc/self/cmdline").read(),
    threads=len(os.listdir("/proc/self/task")), umask=os.umask(0), limit=__import__("resource").getrlimit(7),
    cpus=sorted(os.sched_getaffinity(0)), main=sorted(vars(sys.modules["__main__"]))[:3],
)))
"""


@scene
def look() -> object:
    stage = Stage()
    cpu = min(os.sched_getaffinity(0))
    seen = stage.run(
        "-c", LOOK, "one", "two words",
        stdin=b"given", cwd="/tmp", umask=0o027, cpus=(cpu,),
        env={**stage.env, "SUBLET_LEASE": "l-7", "COLOUR": "blue"},
        limits=(Limit(resource=7, soft=100, hard=200),),
    )  # fmt: skip
    return {"keeper": os.getpid(), "pid": seen["pid"], "cpu": cpu, "err": seen["err"], **json.loads(seen["out"])}


@scene
def run_all(commands: str) -> object:
    """Several command lines, one after the other."""
    stage = Stage("json", "decimal")
    return [stage.run(*argv) for argv in json.loads(commands)]


@scene
def entries(calls: str) -> object:
    stage = Stage()
    return [stage.run(entry=entry, args=args) for entry, args in json.loads(calls)]


@scene
def proof(*imports: str) -> object:
    """What is said of a zygote with these imports."""
    return Stage(*imports).settled()


@scene
def terminal() -> object:
    """A guest with a terminal of its own."""
    stage = Stage()
    ours, theirs = os.openpty()
    code = """
import os, sys
print(os.ttyname(0) == os.ttyname(2), os.tcgetpgrp(0) == os.getpid(), sys.stdout.line_buffering, input())
os.kill(0, 0)
open("/dev/tty", "w").write("by name\\n")
"""
    child = stage.child("-c", code, stdio=(theirs, theirs, theirs), terminal=True)
    assert isinstance(child, Child), child
    os.close(theirs)
    child.let_run()
    os.write(ours, b"typed\n")
    _, status, _ = os.wait4(child.pid, 0)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while b"by name" not in said and select.select([ours], [], [], PATIENCE_S)[0]:  # it comes in pieces
            said += os.read(ours, 4096)
    return said.decode(), os.waitstatus_to_exitcode(status)


@scene
def other_user(folder: str) -> object:
    """A guest of another user (of the same one, if we may not), in a group that only we may fill."""
    stage = Stage()
    is_root = os.geteuid() == 0
    uid, gid = (65534, 65534) if is_root else (os.geteuid(), -1)
    procs = os.open(os.path.join(folder, "cgroup.procs"), os.O_WRONLY | os.O_CREAT, 0o600)
    out, err = os.pipe(), os.pipe()
    code = """
import ctypes, os
wish = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(wish), 0, 0, 0)
print(os.getresuid(), os.getgroups(), wish.value, len(os.listdir("/proc/self/fd")))
"""
    got: list[Any] = []
    stage.until(lambda: stage.zygotes.ready(stage.key))
    fork = Fork(argv=("-c", code), env=stage.env, cwd="/", uid=uid, gid=gid, groups=(gid,) if is_root else ())
    stage.zygotes.fork(stage.key, fork, (0, out[1], err[1]), got.append, groups=(procs,))
    stage.until(lambda: got)
    os.close(out[1])
    os.close(err[1])
    got[0].let_run()
    done = finish(got[0], out[0], err[0])
    with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as file:
        return uid, is_root, done, file.read()


@scene
def many(count: str) -> object:
    """Asked for all at once: each has its own descriptors and no other's, and none of ours is left open."""
    stage = Stage()
    stage.until(lambda: stage.zygotes.ready(stage.key))
    before = len(os.listdir("/proc/self/fd"))
    got: dict[int, Any] = {}
    ends: dict[int, int] = {}
    for n in range(int(count)):
        ends[n], write = os.pipe()
        code = f"import os; print({n}, len(os.listdir('/proc/self/fd')))"
        fork = Fork(argv=("-c", code), env=stage.env)
        stage.zygotes.fork(stage.key, fork, (0, write, 2), lambda child, n=n: got.update({n: child}))  # type: ignore[misc]
        os.close(write)
    stage.until(lambda: len(got) == int(count))
    said = []
    for n, child in got.items():
        assert isinstance(child, Child), child
        child.let_run()
        said.append(read_both(ends[n])[ends[n]])
        os.wait4(child.pid, 0)
        for fd in (ends[n], child.pidfd, child.failure):
            os.close(fd)
    return said, len(os.listdir("/proc/self/fd")) - before


@scene
def no_python(program: str) -> object:
    """It is tried a few times, at growing intervals, and then no more."""
    stage = Stage(python=program)
    entry = stage.zygotes.shelf.entries[stage.key]

    def given_up() -> bool:
        entry = stage.zygotes.shelf.entries[stage.key]
        entry.again_ns = min(entry.again_ns, stage.loop.now_ns()) if entry.state is ZygoteState.DIED else entry.again_ns
        stage.zygotes.want(stage.key)
        return entry.state is ZygoteState.DISCARDED

    assert entry.state is ZygoteState.STARTING
    stage.until(given_up)
    return stage.zygotes.lines()[0]


@scene
def last_word() -> object:
    """What goes wrong before the program began, and a guest that is never let go."""
    stage = Stage()
    nowhere = stage.run("-c", "print(1)", cwd="/nowhere/at/all")
    child = stage.child("-c", "open('/dev/stderr','w').write('ran')")
    assert isinstance(child, Child)
    child.forget()
    _, status, _ = os.wait4(child.pid, 0)
    return nowhere, os.waitstatus_to_exitcode(status)


@scene
def malformed() -> object:
    """Requests that make no sense: what the guest says of them, or the zygote, and whether the next one is served."""
    stage = Stage()
    wrong: tuple[dict[str, Any], ...] = ({"entry": "no entry"}, {"entry": "json:dumps", "args": "[]"}, {})
    said = [stage.run(**more) for more in wrong]
    broken = []
    for body in (b"", b"{}", b'{"is":"Fork","argv":7}', b"\xff" * 100):
        with mock.patch("sublet.node.processes.zygotes.sealed_request", partial(in_memory, body)):
            broken.append(stage.run("-c", "print('it ran')"))
    zygote = stage.zygotes._running[stage.key]
    few = answer_of(stage, zygote, zygote._link.call(b"", ()))
    return said, broken, few, stage.run("-c", "print('served')")["out"]


def in_memory(body: bytes, _: Fork) -> int:
    made = os.memfd_create("request", os.MFD_CLOEXEC)
    os.write(made, body)
    return made


def answer_of(stage: Stage, zygote: Any, call: int) -> str:
    """Ask by hand, past the driver."""
    got: list[str] = []
    old = zygote._refuse
    zygote._refuse = lambda number, error: got.append(str(error)) if number == call else old(number, error)
    zygote._push()
    stage.until(lambda: got)
    zygote._refuse = old
    return got[0]


@scene
def later() -> object:
    """What may be imported later, where it can be and where it cannot: guests come from both at once."""
    code = "import sys; print(*(name in sys.modules for name in ('decimal', 'colorsys')))"
    stage = Stage("decimal", LATER, "colorsys")
    first = [stage.run("-c", code)["out"].split()]
    other = Stage("decimal", LATER, "no_such_module")
    first.append(other.run("-c", code)["out"].split())
    places = len(stage.zygotes.shelf.stamps(stage.key))
    stage.until(lambda: len(stage.zygotes.shelf.stamps(stage.key)) > places)
    other.until(lambda: other.zygotes.shelf.entries[other.key].state is ZygoteState.DISCARDED)
    return first, stage.run("-c", code)["out"].split(), other.zygotes.lines()[0]


@scene
def outdated(watched: str) -> object:
    """A folder its imports came from changes: it is made anew."""
    stage = Stage(PYTHONPATH=watched)
    stage.settled()
    first = stage.zygotes._running[stage.key]._child.pid
    with open(os.path.join(watched, "newcomer.py"), "w", encoding="utf-8") as file:
        file.write("x = 1\n")
    was_ready = stage.zygotes.ready(stage.key)
    stage.settled()
    return was_ready, first, stage.zygotes._running[stage.key]._child.pid


@scene
def killed() -> object:
    """A zygote is killed: its guests go on, guests start plainly meanwhile, and it comes back."""
    stage = Stage()
    read, write = os.pipe()
    child = stage.child("-c", "import sys; sys.stdin.read()", stdio=(read, 2, 2))
    assert isinstance(child, Child)
    os.close(read)
    child.let_run()
    os.kill(stage.zygotes._running[stage.key]._child.pid, signal.SIGKILL)
    stage.until(lambda: not stage.zygotes.shelf.is_ready(stage.key))
    line = stage.zygotes.lines()[0]
    refused: list[object] = []
    stage.zygotes.fork(stage.key, Fork(argv=("-c", "1")), (0, 1, 2), refused.append)
    os.close(write)
    _, status, _ = os.wait4(child.pid, 0)

    def back() -> bool:
        stage.zygotes.want(stage.key)
        return stage.zygotes.ready(stage.key)

    stage.until(back)
    return line, str(refused[0]), os.waitstatus_to_exitcode(status)


@scene
def in_advance() -> object:
    """The copy that waits: who it is, whose it counts as, and what becomes of it."""
    stage = Stage("decimal")
    stage.settled()
    zygote = stage.zygotes._running[stage.key]._child.pid
    trees = Trees(Procs(), os.getpid())
    identity = trees.procs.identity(zygote)
    assert identity is not None
    trees.help(identity)

    def waiting() -> list[int]:
        return [
            stat.pid
            for stat in trees.procs.table().children(os.getpid())
            if stat.session == zygote != stat.pid and not stat.is_gone
        ]

    stage.until(waiting)
    first = waiting()
    strangers = len(trees.scan().strangers)

    def links() -> list[str]:
        found = []
        for name in sorted(os.listdir(f"/proc/{first[0]}/fd")):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{first[0]}/fd/{name}"))
        return found

    stage.until(lambda: sum(link.startswith("socket:") for link in links()) == 1)  # it closes what is the zygote's
    fds = links()
    begun = stage.run("-c", "import sys; print(len(sys.argv))")
    stage.until(waiting)
    second = waiting()
    os.kill(second[0], signal.SIGKILL)
    os.waitpid(second[0], 0)
    after_its_death = stage.run("-c", "print('here')")
    stage.until(waiting)
    third = waiting()
    large = stage.run("-c", "import os; print(len(os.environ['LARGE']))", env={**stage.env, "LARGE": "x" * 100_000})
    stage.until(waiting)
    last = waiting()
    os.kill(zygote, signal.SIGKILL)
    os.waitpid(zygote, 0)
    os.wait4(last[0], 0)
    return {
        "counts": [len(one) for one in (first, second, third, last)],
        "strangers": strangers,
        "fds": fds,
        "became": [begun["pid"] == first[0], large["pid"] == third[0]],
        "said": [begun["out"], after_its_death["out"], large["out"]],
        "codes": [begun["code"], after_its_death["code"], large["code"]],
    }


@scene
def in_standby(*imports: str) -> object:
    """Modules of which one has something to do in a copy that waits, and another fails at it: where each was called."""
    stage = Stage(*imports)
    stage.settled()
    zygote = stage.zygotes._running[stage.key]._child.pid
    procs = Procs()
    stage.until(lambda: any(one.session == zygote != one.pid for one in procs.table().children(os.getpid())))
    done = stage.run("-c", "import os, sys; print(os.getpid(), *sys.called_in)")
    return done["out"].split(), done["code"]


@scene
def orphan() -> object:
    """The keeper says who its guest is and waits to be killed. The guest ignores every signal it can."""
    stage = Stage()
    code = """
import os, signal, time
for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
while True: time.sleep(1000)
"""
    child = stage.child("-c", code)
    assert isinstance(child, Child)
    child.let_run()
    stage.until(lambda: False)
    return None


@scene
def noticed(folder: str, code: str, state: str, pythonpath: str = "") -> object:
    """A guest with a page is sent SIGTERM once it says that it is up, and again when it says so again. Beside its page
    there is then a file for each."""
    path = os.path.join(folder, "page")
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    view = PageView(
        lease=LeaseId("l-7"), epoch=Epoch(1, 42), deadline_ns=now_ns + 600 * NS_PER_S, now_ns=now_ns,
        namespace=time_namespace(), reason=EndReason.PREEMPTED, detail="by interactive", state=PageState(state),
    )  # fmt: skip
    stage = Stage(**({"PYTHONPATH": pythonpath} if pythonpath else {}))
    with PageWriter.create(path, view):
        out, err = os.pipe(), os.pipe()
        env = {**stage.env, "SUBLET_PAGE": path}
        child = stage.child("-c", code, stdio=(0, out[1], err[1]), env=env)
        assert isinstance(child, Child), child
        os.close(out[1])
        os.close(err[1])
        child.let_run()
        said, sent = b"", 0
        while piece := os.read(out[0], 1):
            said += piece
            if said.endswith(b"up\n"):
                signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)
                sent += 1
                with open(f"{path}.{sent}", "w"):
                    pass
        done = finish(child, out[0], err[0])
    return {**done, "out": said.decode()}


@scene
def bare(python: str) -> object:
    """Another interpreter, with nothing of ours installed."""
    stage = Stage(python=python)
    code = """
import sys, sublet
found = {}
for name in ("msgspec", "psutil", "hypothesis", "sublet.errors", "sublet.wire.page"):
    try: __import__(name); found[name] = True
    except ImportError: found[name] = False
import json
print(json.dumps([sys.prefix, found, sys.path]))
"""
    return stage.settled(), json.loads(stage.run("-c", code)["out"])


@scene
def remembered(*imports: str) -> object:
    """What of requests of all sizes is in the memory of the zygote and of the copy that waits, afterwards."""
    stage = Stage(*imports)
    for size in (300, 1_000, 3_000, 30_000, 100_000):
        mark = f"MARKER{size:06d}"
        piece = (mark + "-" + "x" * 20) * (size // 32 + 1)
        stage.run("-c", "import sys; print(len(sys.argv))", piece, env={**stage.env, "MARK": piece})
        stage.run(entry="json:dumps", args=json.dumps({"obj": piece}))
    zygote = stage.zygotes._running[stage.key].pid

    def waiting() -> list[int]:
        table = Procs().table().children(os.getpid())
        return [stat.pid for stat in table if stat.session == zygote != stat.pid and not stat.is_gone]

    stage.until(waiting)
    return {"waiting": len(waiting()), "found": [marks_in(pid) for pid in (zygote, *waiting())]}


def marks_in(pid: int) -> dict[str, int]:
    found: dict[str, int] = {"bytes": 0, "marks": 0}
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(start)
                piece = memory.read(end - start) or b""
                found["bytes"] += len(piece)
                found["marks"] += len(re.findall(rb"MARKER[0-9]{6}", piece))
    return found


@scene
def isolated() -> object:
    """From an interpreter for tenants' guests: its options, and what a guest takes for its own folder all the same."""
    key = walled_key("a:b", "", (), {})
    assert key is not None
    stage = Stage()
    stage.zygotes.want(key)
    stage.key = key
    code = "import os, sys; print(sys.flags.isolated, sys.flags.no_site, sys.path[0], 'PYTHONPATH' in os.environ)"
    return [
        stage.run("-c", code, env={"PYTHONPATH": "/tmp", **more}, cwd="/")["out"].split()
        for more in ({}, {"PYTHONSAFEPATH": "1"})
    ]


@scene
def memory(count: str, *imports: str) -> object:
    """What so many warm interpreters of tenants cost, in KiB: memory that no file backs, of each; and of all together,
    the shared one and the copies in advance among them, what is theirs alone and their parts of the rest (PSS)."""
    key = walled_key("a:b", "", imports, {})
    assert key is not None
    stage = Stage()
    stage.zygotes.shelf.tenant_bytes = 1 << 40
    keys = [replace(key, tenant=f"tenant-{n}") for n in range(int(count))]
    for one in keys:
        stage.zygotes.want(one)
    stage.until(lambda: all(stage.zygotes.shelf.is_ready(one) for one in keys))
    stage.until(lambda: len(below()) == 2 * len(stage.zygotes._running))  # each with its copy in advance
    private = sorted(kib_of(stage.zygotes._running[one].pid)["Anonymous"] for one in keys)
    all_pss = sum(kib_of(pid)["Pss"] for pid in below())
    return {"imports": imports, "private_kib": private, "median_kib": private[len(private) // 2], "pss_kib": all_pss}


def below() -> list[int]:
    """All processes that this one has started, and those that they have."""
    me = os.getpid()
    return [stat.pid for stat in Procs().table().below({me}) if stat.pid != me and not stat.is_gone]


def kib_of(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        next(file)
        return {name: int(size.split()[0]) for name, size in (line.split(":") for line in file)}


@scene
def compute(*imports: str) -> object:
    """A child computes with the threads of its libraries, several times, and the zygote stays as it was. Another draws
    random numbers from each of them."""
    stage = Stage(*imports)
    computes = """
from sublet.guest.zygote_checks import compute_a_little
import decimal
print([compute_a_little() for _ in range(3)], decimal.Decimal(2).sqrt())
"""
    draws = """
import random, sys
drawn = [random.random()]
for name in ("numpy", "torch"):
    if name in sys.modules:
        module = sys.modules[name]
        drawn.append(float(module.random.rand() if name == "numpy" else module.rand(1)))
print(*drawn)
"""
    said = stage.settled()
    results = [stage.run("-c", computes)["out"] for _ in range(3)]
    return said, results, [stage.run("-c", draws)["out"].split() for _ in range(3)]


if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]](*sys.argv[2:])), flush=True)
