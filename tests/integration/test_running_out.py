"""Descriptors, memory, processes and disk run out, at random moments, while work goes on; then there are some again.

Afterwards everything works again without a restart, or the process that could not go on has ended with one line, and
the next client has started it anew. Nothing was promised that was not kept: no two guests were on one device, every
save that was acknowledged is readable, the bills add up to the time of the devices, and no lease or process is left.

The limits of live processes are lowered (``prlimit``): of the office, the supervisor, a holder, a guest, a kernel. For
processes it is their control group, since root has no other limit, and in an office of an ordinary user the limit that
a system sets for one (``RLIMIT_NPROC``); for the disk the state folder is a small file system in memory.
``SUBLET_SCARCE_ROUNDS`` says how many rounds (17: each once), ``SUBLET_SCARCE_SEED`` with which seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.node.processes.procs import Procs
from sublet.office.journal.files import JOURNAL_NAME, Anchors
from sublet.office.journal.history import AuditHistory
from sublet.office.journal.journal import verify_file
from sublet.office.journal.reader import JournalReader
from sublet.office.ledger.bills import reconcile
from sublet.office.ledger.checks import check_books
from tests.crash.office_judge import folded
from tests.integration.test_cli import Shell
from tests.integration.test_ordinary_users import User, user
from tests.traces import PATIENCE_S, Traces, end_office, office_of, supervisor_of, until

ROUNDS: Final = int(os.environ.get("SUBLET_SCARCE_ROUNDS", "17"))
SEED: Final = int(os.environ.get("SUBLET_SCARCE_SEED", "1"))
DISK: Final = 96 << 20
MIB: Final = 1 << 20
AGAIN_S: Final = 30.0
"""How long it may take until there is progress again. It takes a second or two; the machine may be busy."""
REMOVED_S: Final = 100.0
"""The supervisor looks again at a control group that it could not remove after a minute at the latest."""
WORKS: Final = ("calls", "saves", "cells")
PIDS: Final = Path("/sys/fs/cgroup/pids")

LIMITS: Final = {
    "descriptors": resource.RLIMIT_NOFILE,
    "memory": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
}
CARL: Final = 65531
"""An ordinary user whom no other test plays: the limit is of one process, what is counted are all of the user's."""


def _may_mount() -> bool:
    return os.geteuid() == 0


class Stage:
    """An office, programs that work with it, and a hand on their limits."""

    def __init__(self, place: Path, rng: random.Random, owner: User | None = None) -> None:
        """``owner``: whose office it is (default: that of the user who runs the tests)."""
        self.rng = rng
        self.owner = owner
        self.place = place / "place"
        self.home = place / "home"
        for folder in (self.place, self.home):
            folder.mkdir(mode=0o700)
            if owner is not None:
                os.chown(folder, owner.uid, owner.uid)
        self.runtime = runtime_dir(self.home.resolve()) if owner is None else self.home / "run"
        self.env = Shell(self.home).env if owner is None else owner.env | {"SUBLET_HOME": str(self.home)}
        self.procs = Procs()
        self.programs: dict[str, subprocess.Popen[str]] = {}
        self.accounts: list[tuple[str, dict[str, Any]]] = []
        self.met: Counter[str] = Counter()
        self.said: list[str] = []
        self.ballast = self.home / "ballast"
        self.group: Path | None = None
        self.traces: Traces | None = None

    # ---- life ----

    def start(self) -> None:
        if self.owner is None and _may_mount():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", self.home], check=True)
        if self.owner is None and (PIDS / "cgroup.procs").exists() and os.access(PIDS, os.W_OK):
            self.group = PIDS / f"sublet-test-{os.getpid()}"
            self.group.mkdir()
        assert self._command("up", "--host-gpus", "2x256MiB").returncode == 0
        until("a supervisor", lambda: supervisor_of(self.runtime))
        supervisor = supervisor_of(self.runtime)
        assert supervisor is not None
        self.traces = Traces(office_of(supervisor), self.runtime)
        for kind in WORKS:
            self.begin(kind)
        for kind in WORKS:
            self.progress(kind)

    def begin(self, kind: str) -> None:
        words = [sys.executable, "-m", "tests.integration.scarce_holder"]
        words += [kind, str(self.home), str(self.place), kind]
        with open(self.place / f"{kind}.log", "ab") as log:
            self.programs[kind] = subprocess.Popen(
                self._enter(words), env=self.env, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _enter(self, words: list[str]) -> list[str]:
        if self.owner is not None:
            return self.owner.words(*words)
        if self.group is None:
            return words
        return [sys.executable, "-c", _ENTER, str(self.group / "cgroup.procs"), *words]

    def _command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self._enter([sys.executable, "-m", "sublet", *words])
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=90)

    def close(self) -> None:
        self.give_back_disk()
        self.give_back_processes()
        for program in self.programs.values():
            if program.poll() is None:
                program.kill()
            program.wait()
            assert program.stdout is not None
            program.stdout.close()
        office = self.office()
        if office is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(office, signal.SIGKILL)
            until("a dead office", lambda: self.office() is None)
        end_office(self.runtime)
        if self.traces is not None:
            self.traces.clear()
        if self.group is not None:
            self._remove(self.group)
        if self.owner is None and _may_mount():
            subprocess.run(["umount", "-l", self.home], check=False)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _remove(self, group: Path) -> None:
        for inner in sorted(group.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                inner.rmdir()
        until("a removed group", lambda: self._rmdir(group))

    def _rmdir(self, group: Path) -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    # ---- who there is ----

    def office(self) -> int | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            if sock.connect_ex(str(self.runtime / "office.sock")) != 0:
                return None
            return int(struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def guests(self, *, kernels: bool) -> list[int]:
        assert self.traces is not None
        found = [one.pid for one in self.traces.marked()]
        return [pid for pid in found if ("kernel" in self.procs.text(pid, "cmdline")) is kernels]

    def target(self, who: str) -> int | None:
        match who:
            case "office":
                return self.office()
            case "supervisor":
                return supervisor_of(self.runtime)
            case "holder":
                program = self.programs[self.rng.choice(WORKS)]
                return program.pid if program.poll() is None else None
            case _:
                found = self.guests(kernels=who == "kernel") or self.guests(kernels=who != "kernel")
                return self.rng.choice(found) if found else None

    # ---- what runs out ----

    @contextlib.contextmanager
    def scarce(self, what: str, who: str) -> Iterator[None]:
        if what == "disk":
            self.fill_disk(self.rng.choice((0, 0, 4096, 65_536, 300_000)))
            yield
            self.give_back_disk()
        elif what == "processes":
            self.take_processes(self.rng.choice((0, 0, 1, 2, 4)))
            yield
            self.give_back_processes()
        elif what == "tasks":
            found = self.target(who) if who != "all" else None
            pids = list(self.owned()) if who == "all" else [found] if found is not None else []
            self.allow_tasks(pids, self.tasks() + self.rng.choice((0, 0, 1, 2, 5)))
            yield
            for _ in range(2):  # what is started meanwhile has the limit as well
                self.allow_tasks(self.owned())
        else:
            found = self.target(who)
            before = self.lower(found, what) if found is not None else None
            yield
            if found is not None and before is not None:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(found, LIMITS[what], before)

    def lower(self, pid: int, what: str) -> tuple[int, int] | None:
        try:
            before = resource.prlimit(pid, LIMITS[what])
            if what == "descriptors":
                now = len(os.listdir(f"/proc/{pid}/fd")) + self.rng.choice((0, 0, 1, 2, 5))
            else:
                name = "VmSize:" if what == "memory" else "VmData:"
                text = Path(f"/proc/{pid}/status").read_text()
                line = next(line for line in text.splitlines() if line.startswith(name))
                now = int(line.split()[1]) * 1024 + self.rng.choice((0, 64 << 10, MIB, 8 * MIB))
            resource.prlimit(pid, LIMITS[what], (now, before[1]))
        except (OSError, StopIteration):  # it has just ended
            return None
        return before

    def allow_tasks(self, pids: Iterable[int], most: int = -1) -> None:
        """How many processes and threads their user may have for each of these to begin another. Root itself may not
        say that of another user's processes everywhere, their user may."""
        assert self.owner is not None
        words = [sys.executable, "-I", "-S", "-c", _ALLOW, str(most), *map(str, pids)]
        subprocess.run(self.owner.words(*words), check=True, timeout=90)

    def owned(self) -> Iterator[int]:
        """The processes of the owner. Some belong to root in the listing, since nobody may look into them."""
        assert self.owner is not None
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if f"\nUid:\t{self.owner.uid}\t" in Path(f"/proc/{pid}/status").read_text():
                    yield pid

    def tasks(self) -> int:
        """The processes and threads of the owner."""
        found = 0
        for pid in self.owned():
            with contextlib.suppress(OSError):
                found += len(os.listdir(f"/proc/{pid}/task"))
        return found

    def fill_disk(self, leave: int) -> None:
        free = os.statvfs(self.home)
        with contextlib.suppress(OSError), open(self.ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - leave))

    def give_back_disk(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def take_processes(self, more: int) -> None:
        assert self.group is not None
        now = int((self.group / "pids.current").read_text())
        (self.group / "pids.max").write_text(str(now + more))

    def give_back_processes(self) -> None:
        if self.group is not None and self.group.exists():
            (self.group / "pids.max").write_text("max")

    # ---- what must be so ----

    def done(self, kind: str) -> int:
        try:
            return int((self.place / f"{kind}.done").read_text() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    def progress(self, kind: str) -> None:
        """The program gets something done, now."""
        if self.programs[kind].poll() is not None:
            self.ended(kind)
            self.begin(kind)
        before = self.done(kind)
        limit = time.monotonic() + AGAIN_S + PATIENCE_S
        while self.done(kind) <= before:
            assert self.programs[kind].poll() is None, f"{kind} has ended: {self.log(kind)}"
            if time.monotonic() > limit:
                self.programs[kind].send_signal(signal.SIGUSR1)
                time.sleep(1)
                raise AssertionError(f"{kind} makes no progress\n{self.tell()}")
            time.sleep(0.02)

    def ended(self, kind: str) -> None:
        """A program that could not go on has said why in its last line."""
        said = self.log(kind).strip().splitlines()
        assert said, f"{kind} has ended and said nothing ({self.programs[kind].returncode})"
        self.said.append(f"{kind}: {said[-1]}")
        self.met[f"{kind} ended"] += 1
        out = self.programs[kind].stdout
        assert out is not None
        out.close()

    def log(self, kind: str) -> str:
        return (self.place / f"{kind}.log").read_text(errors="replace")

    def tell(self) -> str:
        logs = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.place.glob("*.log"))]
        logs += [f"--- {path}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(self.home.glob("*.log"))]
        logs += [self._command(*words).stdout for words in (("status",), ("lease", "ls"), ("fence", "ls"))]
        return "\n".join((f"seed {SEED}, met {dict(self.met)}, said {self.said}", *logs))

    def finish(self) -> None:
        """Every program stops in order and gives its account."""
        (self.place / "stop").touch()
        for kind, program in self.programs.items():
            out, _ = program.communicate(timeout=AGAIN_S + PATIENCE_S)
            assert program.returncode == 0, f"{kind} ended with {program.returncode}: {self.log(kind)[-3000:]}"
            self.accounts.append((kind, json.loads(out.strip().splitlines()[-1])))

    def nothing_is_left(self) -> None:
        assert self.traces is not None
        with sublet.connect(f"unix://{self.runtime / 'office.sock'}") as fabric:

            def leases() -> list[Any]:
                found: list[Any] = fabric.request("GET", "/v1/leases", shape=list)
                return found

            until("an end of all leases", lambda: not leases(), REMOVED_S)
            limit = time.monotonic() + REMOVED_S
            while (left := self.traces.residue()) and time.monotonic() < limit:
                time.sleep(0.1)
            assert not left, f"{left}\n{self.tell()}"

            def gpus() -> list[Any]:
                devices: Any = fabric.request("GET", "/v1/status", shape=dict)["devices"]
                return [(device["state"], device["free"]) for device in devices if device["kind"] == "gpu"]

            until("free devices", lambda: gpus() == [("free", 256 * MIB)] * 2, REMOVED_S)

            def fences() -> list[Any]:
                # A volume that is an image is mounted, and whoever makes a mount namespace here, such as another test's
                # guests, has a copy of that mount for as long as it lives.
                found: Any = fabric.request("GET", "/v1/fences", shape=list)
                return [fence for fence in found if "copied the mounts" not in fence["detail"]]

            until("no fences", lambda: not fences(), REMOVED_S)  # the office hears later that all was seen to be gone
            status: Any = fabric.request("GET", "/v1/status", shape=dict)
            assert status["embedded"] is False, "an office that was started again is the same one"
            saved = next((account["saved"] for kind, account in self.accounts if kind == "saves"), 0)
            with fabric.block("960KiB", name="saves", wait=AGAIN_S) as lease:
                value: Any = sublet.Durable.restore(lease).value
                assert value["n"] >= saved, f"{saved} was acknowledged, {value['n']} is there"
            until("an end of all leases", lambda: not leases(), REMOVED_S)
        self.books_add_up()

    def books_add_up(self) -> None:
        """The journal of the whole story: its chain holds, a device is free before it is granted anew, and what tenants
        are billed is what devices were held for. The office has ended by then: what it still wrote between two looks,
        at its files and at the anchor, would be missing from one of them."""
        done = self._command("down", "--now")
        assert done.returncode == 0, done
        until("the end of the office", lambda: self.office() is None)
        path = self.place / "copy" / JOURNAL_NAME
        path.parent.mkdir()
        for file in self.home.glob(JOURNAL_NAME + "*"):
            shutil.copyfile(file, path.parent / file.name)
        state, _ = folded(path)
        check_books(state)
        anchors = Anchors(Path(self.env["XDG_STATE_HOME"]) / "sublet-anchors", self.home)
        verdict = verify_file(path, anchors)
        assert verdict.ok, verdict.problem
        reader = JournalReader(path)
        records = list(reader.records())
        reader.close()
        held: dict[str, str] = {}
        for record in records:
            fact = json.loads(record.body)
            for part in fact["parts"] if record.kind == "granted" else ():
                if part["kind"] == "gpu":
                    assert part["resource"] not in held, f"{part['resource']} was granted twice: {held}, {fact}"
                    held[part["resource"]] = fact["lease"]
            if record.kind == "torn_down":
                held.pop(fact["resource"], None)
        assert not held
        history = AuditHistory().read(records)
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        account = reconcile(history.usages(now_ns), history.devices(now_ns))
        assert account.ok, f"the bill does not reconcile: {account}"


_ENTER: Final = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"

_ALLOW: Final = """if True:
    import contextlib, resource, sys
    for pid in map(int, sys.argv[2:]):
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_NPROC)[1]
            most = int(sys.argv[1]) if sys.argv[1] != "-1" else hard
            resource.prlimit(pid, resource.RLIMIT_NPROC, (most, hard))
"""


@contextlib.contextmanager
def started(made: Stage) -> Iterator[Stage]:
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_what_runs_out_comes_back_and_no_promise_is_broken(tmp_path: Path) -> None:
    with started(Stage(tmp_path, random.Random(SEED))) as stage:
        play(stage, ROUNDS)


@pytest.mark.needs("setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")
def test_an_ordinary_user_who_may_have_no_more_processes_goes_on_when_some_have_ended() -> None:
    with user(CARL) as carl, started(Stage(carl.home, random.Random(SEED), carl)) as stage:
        play(stage, max(1, ROUNDS * 6 // 17))


def play(stage: Stage, rounds: int) -> None:
    whats = ["descriptors", "memory", "data"]
    whats += ["disk"] if _may_mount() else []
    whats += ["processes"] if stage.group is not None else []
    whats = whats if stage.owner is None else ["tasks"]
    whos = ["office", "supervisor", "holder", "guest", "kernel"]
    everywhere = {"disk": ["all"], "processes": ["all"], "tasks": [*whos, "all"]}
    pairs = [(what, who) for what in whats for who in everywhere.get(what, whos)]
    order = [stage.rng.sample(pairs, len(pairs)) for _ in range(rounds // len(pairs) + 1)]
    for what, who in [pair for some in order for pair in some][:rounds]:
        stage.met[f"{what} of {who}"] += 1
        stage.said.append(f"{time.monotonic():.2f} {what} of {who}")
        with stage.scarce(what, who):
            time.sleep(stage.rng.uniform(0.05, 0.6))
        stage.progress(stage.rng.choice(WORKS))
        assert not (stage.place / "overlaps").exists(), (stage.place / "overlaps").read_text()
    for kind in WORKS:
        stage.progress(kind)
    stage.finish()
    for kind, account in stage.accounts:
        assert not account["odd"], f"seed {SEED}: {kind}: " + "\n".join(account["odd"])
        print(kind, account)
    stage.nothing_is_left()
    print(dict(stage.met), stage.said)
