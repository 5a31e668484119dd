"""Plants small mistakes in Sublet's source, one at a time, and looks which of them no test notices.

    python tools/mutants.py                       the whole sample: 400 mistakes in the drivers, 400 in the cores
    python tools/mutants.py --number 20           a smaller one, the first of the same order
    python tools/mutants.py --files 'client/*'    only those of the sample in such files
    python tools/mutants.py --survivors           those that survived, once more
    python tools/mutants.py --depth first         only the first tests that reach it: quick, and what survives is open
    python tools/mutants.py --report              what is known, without running anything

Each mistake is tested against the tests that reach its statement, the most particular first, and if it survives those,
against all tests of its room (``ROOMS``). Nothing in the checkout is touched: tests run on a copy, in namespaces of
their own (processes, mounts, /tmp), since a mistake in what kills processes and removes folders must harm nobody. One
process there collects the tests once, and forks for each mistake (`tools/forked_tests.py`).
What is known is kept in tests/mutants/results.jsonl after each mistake, so a run goes on where the one before stopped;
a result holds as long as the function that the mistake stands in is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import queue
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.planting import Mutant, is_python, mutants_of, planted, probed  # noqa: E402

WORK: Final = ROOT / ".mutants"
"""Copies of the checkout, and which statements each test reaches. It may be removed at any time."""
KNOWN: Final = ROOT / "tests" / "mutants"
SEED: Final = 15
NUMBER: Final = 400

# ------------------------------------------------------------------------------------------------- what is looked at

DRIVERS: Final = (
    *("client/transport.py", "client/aio_transport.py", "client/renewal_thread.py", "client/aio_keeper.py"),
    *("client/handle.py", "client/lease.py", "client/aio_lease.py", "client/fabric.py", "client/aio_fabric.py"),
    *("client/driver.py", "client/aio_driver.py", "client/operations.py", "client/lease_table.py"),
    *(
        "client/guests.py",
        "client/aio_guests.py",
        "client/guest_watch.py",
        "client/background_requests.py",
        "client/line.py",
    ),
    *("office/driver.py", "office/journal/[!h]*.py"),
    *("office/api/[!aft]*.py", "office/api/app.py"),
    *(
        "node/supervisor/holder_link.py",
        "node/supervisor/office_link.py",
        "node/supervisor/service.py",
        "node/supervisor/recovery.py",
    ),
    *(
        "node/storage/publish_queue.py",
        "node/storage/publish_door.py",
        "node/storage/publish.py",
        "node/processes/guests.py",
        "node/processes/group.py",
    ),
    *(
        "node/supervisor/office_link.py",
        "node/processes/stdio_pipes.py",
        "node/processes/guest_records.py",
        "node/loop.py",
    ),
    *(
        "node/agent/supervised.py",
        "node/agent/data_door.py",
        "node/agent/health.py",
        "node/agent/starting.py",
        "node/agent/tokens.py",
    ),
)
"""What stands between the cores and the machine; the simulation has other code in its place."""

CORES: Final = ("lease/*.py", "office/*.py", "node/*/core.py")
"""What decides; of the first two rooms all that is no driver."""

LEFT_ALONE: Final = ("lease/drawing.py", "office/api/openapi.py", "*/__init__.py", "*/__main__.py")
"""Documentation made from tables, and what only names others."""

ROOMS: Final[dict[str, tuple[str, ...]]] = {
    "lease": (
        "tests/unit/lease",
        "tests/transcripts",
        "tests/unit/node/agent",
        "tests/unit/testing",
        "tests/unit/client",
    ),
    "office": (
        *("tests/unit/office", "tests/transcripts"),
        *("tests/integration/test_office_http.py", "tests/integration/test_client.py"),
        *("tests/crash/test_journal_crash.py", "tests/crash/test_home_reorder.py", "tests/integration/test_resume.py"),
        *("tests/integration/test_tenant_matrix.py",),
    ),
    "client": (
        *("tests/unit/client", "tests/integration/test_client.py", "tests/integration/test_client_aio.py"),
        *("tests/integration/test_client_guests.py", "tests/integration/test_client_aio_guests.py"),
        *("tests/integration/test_client_tls.py", "tests/integration/test_bad_days.py"),
        *("tests/integration/test_lease_run.py", "tests/integration/test_lease_run_aio.py"),
        *("tests/integration/test_moved_clocks.py", "tests/integration/test_arranging.py"),
        *("tests/integration/test_client_many.py",),
    ),
    "node": (
        *("tests/unit/node", "tests/integration/test_supervisor_life.py"),
        *("tests/integration/test_supervisor_bounds.py", "tests/integration/test_supervisor_mistakes.py"),
        *("tests/integration/test_adoption.py", "tests/integration/test_lines.py", "tests/integration/test_trees.py"),
        *("tests/integration/test_volumes_published.py", "tests/integration/test_volumes_saved.py"),
        *("tests/integration/test_client_guests.py", "tests/integration/test_gpu_sessions.py"),
        *("tests/integration/test_agent_conformance.py", "tests/integration/test_cards.py"),
        *("tests/integration/test_warming.py", "tests/integration/test_supervisor_fences.py"),
        *("tests/integration/test_holders.py",),
    ),
}
"""All tests of a room: what a mistake meets that survived the tests which reach it."""

RUNGS: Final = ("tests/unit", "tests/transcripts", "tests/crash", "tests/integration")
"""Cheapest first. The simulation is beyond the price: it meets a mistake by one seed in hundreds, or by accident."""


def price(test: str) -> int:
    return next((at for at, rung in enumerate(RUNGS) if test.startswith(rung)), len(RUNGS))


DEPTHS: Final[dict[str, str]] = {
    "first": "the most particular unit tests that reach it, for a few seconds",
    "unit": "all unit tests that reach it",
    "reached": "all tests that reach it",
    "room": "all tests of its room",
}
"""How far a mistake is followed that no test has noticed. Up to the last it stays open."""
FIRST_TESTS: Final = 40
FIRST_S: Final = 8.0
CASES_FIRST: Final = 2
"""The tests that a mistake meets first, and so many cases of each."""
REACHED_S: Final = 30.0
"""Seconds of those that reach it: where thousands do, the most particular of them."""
ALONE_S: Final = 60.0
"""What a single test may take; the slowest takes a third of it."""
SLACK_S: Final = 6.0
TIMES: Final = 6
"""What a test may take is so many times of what it took without a mistake, and some seconds more."""
WHOLE_S: Final = 1200.0
"""What all tests that a mistake meets may take together."""
START_S: Final = 60.0
"""What a pytest of its own may take until its first test begins."""


def tests_in(paths: Iterable[str]) -> list[str]:
    found = (sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else [ROOT / path] for path in paths)
    return [path.relative_to(ROOT).as_posix() for paths in found for path in paths if path.exists()]


def sources() -> dict[str, list[str]]:
    """The files of each group, as parts of src/sublet."""
    source = ROOT / "src" / "sublet"
    files = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*.py"))]
    files = [name for name in files if not any(fnmatch(name, pattern) for pattern in LEFT_ALONE)]
    drivers = [name for name in files if any(fnmatch(name, pattern) for pattern in DRIVERS)]
    cores = [name for name in files if any(fnmatch(name, pattern) for pattern in CORES) and name not in drivers]
    return {"drivers": drivers, "cores": cores}


def sample(
    files: Sequence[str], texts: dict[str, str], seed: int, number: int, known: Container[str] = ()
) -> list[Mutant]:
    """The first ``number`` in an order that the seed gives; another mistake elsewhere does not change who is chosen.

    Those that are known come first: a file that moves gives its mutants other keys, and so another order.
    """
    ranked = sorted(
        (mutant for name in files for mutant in mutants_of(name, texts[name])),
        key=lambda mutant: (mutant.key not in known, hashlib.sha256(f"{seed}:{mutant.key}".encode()).digest()),
    )
    chosen: list[Mutant] = []
    for mutant in ranked:
        if len(chosen) == number:
            break
        if is_python(texts[mutant.file], mutant):
            chosen.append(mutant)
    return chosen


# ---------------------------------------------------------------------------------------------------- a place to test

INSIDE: Final = r"""
set -e
sed -n 's:^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .* - [^ ]* /dev/loop.*:\1:p' /proc/self/mountinfo | while read -r image; do
    umount -l "$image" || true
done
mount --bind "$ROOT/.venv" "$PLACE/copy/.venv"
mount -o remount,bind,ro "$PLACE/copy/.venv"
case "$PREFIX" in
"$ROOT"/*) ;;
/tmp/*)
    mkdir -p "$PLACE/$TEMPORARY${PREFIX#/tmp}"
    mount --rbind "$PREFIX" "$PLACE/$TEMPORARY${PREFIX#/tmp}" ;;
esac
case "$ROOT" in
/tmp/*)
    mkdir -p "$PLACE/$TEMPORARY${ROOT#/tmp}"
    mount --rbind "$PLACE/copy" "$PLACE/$TEMPORARY${ROOT#/tmp}"
    mount --rbind "$PLACE/$TEMPORARY" /tmp ;;
*)
    mount --rbind "$PLACE/$TEMPORARY" /tmp
    mount --rbind "$PLACE/copy" "$ROOT" ;;
esac
mount -o remount,bind,ro / 2>/dev/null || true
cd "$ROOT"
set +e
sh -c '"$@"; exit $?' sh "$@"
exit $?
"""
"""For the first process of the namespaces: the copy stands where the checkout is, everything else is read-only. A mount
that was copied would keep the image of a volume, of an office that runs beside, from being put away. The tests have
another process above them, as they have elsewhere: it is spared with all below it by what ends the processes of a
killed office, and below the first process are orphans as well."""


class Place:
    """A copy of the checkout, in which one mistake at a time is tested."""

    def __init__(self, name: str) -> None:
        self.path = WORK / name
        self.copy = self.path / "copy"
        self._changed: dict[str, str] = {}
        self._versions = int(time.time())
        self._make()

    def _make(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.copy / name)
        (self.copy / ".venv").mkdir()

    def write(self, name: str, text: str) -> None:
        """With a date of its own: bytecode is held to be current by the date in seconds and the size of its source."""
        path = self.copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self._versions += 1
        os.utime(path, (self._versions, self._versions))

    def run(self, tests: Sequence[str], limit_s: float, *options: str) -> tuple[int | None, str]:
        """Exit status and output of a pytest of its own; ``None`` where it did not end in time."""
        program = self.start("tmp", tests, *options)
        try:
            said, _ = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            program.kill()
            said, _ = program.communicate()
            return None, said
        except BaseException:
            program.kill()
            raise
        return program.returncode, said

    def start(
        self, temporary: str, tests: Sequence[str], *options: str, line: socket.socket | None = None
    ) -> subprocess.Popen[str]:
        """``temporary``: the folder that is /tmp for it; ``line``: for the plugin `tools/forked_tests.py`."""
        folder = self.path / temporary
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "home").mkdir(parents=True)
        folder.chmod(0o1777)
        for name in ("reached", "reach.jsonl"):
            (folder / name).write_bytes(b"")
            (folder / name).chmod(0o666)
        (folder / "arguments").write_text("\n".join(tests))
        user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
        walls = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc"]
        pytest = [str(ROOT / ".venv/bin/python"), "-m", "pytest", *OPTIONS, *options, "@/tmp/arguments"]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SUBLET_", "PYTHON", "PYTEST_"))
        }
        environment |= {
            "ROOT": str(ROOT),
            "PREFIX": sys.prefix,
            "PLACE": str(self.path),
            "TEMPORARY": temporary,
            "HOME": "/tmp/home",
            "TMPDIR": "/tmp",
        }
        if line is not None:
            environment |= {"MUTANTS_LINE": str(line.fileno()), "MUTANTS_OUTSIDE": os.readlink("/proc/self/ns/pid")}
        return subprocess.Popen(
            [*walls, "sh", "-c", INSIDE, "sh", *pytest],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            pass_fds=() if line is None else (line.fileno(),),
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    outcome: str
    """passed, failed, time-out, or elsewhere: the mistake cannot be planted in what is loaded."""
    by: str


class LoadedTests:
    """A process that has collected tests, and runs some of them in a fork of it for each mistake."""

    def __init__(self, place: Place, files: Sequence[str], *options: str) -> None:
        self.place = place
        self.names: list[str] = []
        self._files = files
        self._options = options
        self._start()

    def _start(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            plugin = ("-p", "tools.forked_tests", *self._options)
            self._program = self.place.start("loaded", self._files, *plugin, line=theirs)
        assert self._program.stdout is not None
        self._said = ReadsAlong(self._program.stdout)
        self._words = self._line.makefile("rw")
        first = self._words.readline()
        if not first:
            raise RuntimeError(f"the tests cannot be collected:\n{self._said.text()}")
        self.names = json.loads(first)["tests"]

    def run(
        self, limits: Mapping[str, float], mutant: Mutant | None = None, sound: str = "", *, stop: bool = True
    ) -> Answer:
        """``limits``: seconds that each test may take; all together may take no more than their sum."""
        mistake = None
        if mutant is not None:
            mistake = {
                "module": f"sublet.{mutant.file.removesuffix('.py').replace('/', '.')}",
                "path": str(ROOT / "src/sublet" / mutant.file),
                "sound": sound,
                "mistaken": planted(sound, mutant),
            }
        order = {"limits": limits, "limit_s": min(sum(limits.values()), WHOLE_S), "mistake": mistake, "stop": stop}
        try:
            print(json.dumps(order), file=self._words, flush=True)
            answer = self._words.readline()
        except OSError:
            answer = ""
        if answer:
            return Answer(**json.loads(answer))
        self.end()  # the mistake ended what would have answered
        self._start()
        return Answer(outcome="elsewhere", by="")

    def end(self) -> None:
        self._program.kill()
        self._program.wait()
        self._line.close()


class ReadsAlong(threading.Thread):
    """Keeps the end of what a program says, so that it never waits for a reader."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=60)
        self.start()

    def run(self) -> None:
        self._lines.extend(self._stream)

    def text(self) -> str:
        self.join()
        return "".join(self._lines)


OPTIONS: Final = (
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "--tb=line",
    "--show-capture=no",
    f"--timeout={ALONE_S:.0f}",
)


FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\n]+?)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)

# ---------------------------------------------------------------------------------------- which tests reach a statement

REACHED: Final = """
import mmap, os
try:
    _fd = os.open("/tmp/reached", os.O_RDWR)
    if os.fstat(_fd).st_size < {size}:
        os.ftruncate(_fd, {size})
    REACHED = mmap.mmap(_fd, {size})
    os.close(_fd)
except OSError:
    REACHED = bytearray({size})  # behind walls: what is reached there is not seen
"""

PLUGIN: Final = """
import json, re, time
import pytest
from _reached import REACHED

failed = set()

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    REACHED[:] = bytes(len(REACHED))
    began = time.monotonic()
    result = yield
    took = time.monotonic() - began
    hits = [found.start() for found in re.finditer(rb"\\x01", bytes(REACHED))]
    with open("/tmp/reach.jsonl", "a") as file:
        file.write(json.dumps([item.nodeid, took, item.nodeid not in failed, hits]) + "\\n")
    return result

def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        failed.add(report.nodeid)
"""


@dataclass(kw_only=True)
class Test:
    name: str
    seconds: float
    passed: bool
    reaches: int
    """How many statements; a test of few is a particular one."""

    @property
    def function(self) -> str:
        """Without the case, where it has several."""
        return self.name.partition("[")[0]

    @property
    def order(self) -> tuple[int, int, float]:
        return price(self.name), self.reaches, self.seconds


@dataclass
class Reach:
    """Which tests reach a statement, as recorded once for each file of tests."""

    by_statement: dict[str, list[Test]] = field(default_factory=lambda: defaultdict(list))
    passed: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    """What each test took."""

    def load(self, recorded: dict[str, Any]) -> None:
        tests = [Test(name=name, seconds=s, passed=ok, reaches=n) for name, s, ok, n in recorded["tests"]]
        self.passed |= {test.name for test in tests if test.passed}
        self.seconds |= {test.name: test.seconds for test in tests}
        for statement, numbers in recorded["reach"].items():
            self.by_statement[statement] += [tests[number] for number in numbers if tests[number].passed]

    def of(self, mutant: Mutant) -> list[Test]:
        """Outside of functions, those that reach any function of the file."""
        if mutant.reached_by:
            tests = self.by_statement.get(f"{mutant.file}:{mutant.reached_by}", [])
        else:
            of_file = (some for key, some in self.by_statement.items() if key.startswith(f"{mutant.file}:"))
            tests = list({test.name: test for some in of_file for test in some}.values())
        seen: Counter[str] = Counter()
        early: list[Test] = []
        late: list[Test] = []
        for test in sorted(tests, key=lambda test: test.order):
            seen[test.function] += 1
            (early if seen[test.function] <= CASES_FIRST else late).append(test)
        return early + late


def is_in(test: str, path: str) -> bool:
    return test.startswith((f"{path}::", f"{path}/"))


def text_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def recorded_at(test: str) -> Path:
    return WORK / "reach" / (test.replace("/", "__") + ".json")


def record(tests: Sequence[str]) -> Reach:
    """Runs each file of tests that is not known yet, on sources that mark what they reach, in whatever process."""
    reach = Reach()
    todo = []
    for test in tests:
        path = recorded_at(test)
        if path.exists() and (known := json.loads(path.read_text()))["hash"] == text_hash(ROOT / test):
            reach.load(known)
        else:
            todo.append(test)
    if not todo:
        return reach
    place = Place("record")
    keys: list[str] = []
    for name in (name for names in sources().values() for name in names):
        marked, more = probed((ROOT / "src/sublet" / name).read_text(), len(keys))
        keys += [f"{name}:{key}" for key in more]
        place.write(f"src/sublet/{name}", marked)
    place.write("src/_reached.py", REACHED.format(size=len(keys)))
    place.write("src/_reach_plugin.py", PLUGIN)
    loaded = LoadedTests(place, todo, "-p", "_reach_plugin")
    found = place.path / "loaded" / "reach.jsonl"
    for number, test in enumerate(todo, 1):
        say(f"recording what is reached, {number} of {len(todo)}: {test}")
        found.write_text("")
        loaded.run({name: ALONE_S for name in loaded.names if is_in(name, test)}, stop=False)
        lines = [json.loads(line) for line in found.read_text().splitlines()]
        by_statement: dict[str, list[int]] = defaultdict(list)
        for at, (_, _, _, hits) in enumerate(lines):
            for hit in hits:
                by_statement[keys[hit]].append(at)
        told = [[name, round(took, 3), ok, len(hits)] for name, took, ok, hits in lines]
        known = {"hash": text_hash(ROOT / test), "tests": told, "reach": by_statement}
        recorded_at(test).parent.mkdir(parents=True, exist_ok=True)
        recorded_at(test).write_text(json.dumps(known))
        reach.load(known)
    loaded.end()
    return reach


# ------------------------------------------------------------------------------------------------- testing one mistake


@dataclass(frozen=True, kw_only=True)
class Outcome:
    outcome: str
    """caught, time-out (which is caught as well), survived, or open: the tests of its room were not run yet."""
    by: str
    """The test that failed."""
    reached: int
    """How many tests were known to reach it."""
    seconds: float
    depth: str = "room"
    """How far it was followed, of ``DEPTHS``."""


class Judge:
    """Says of one mistake after the other what becomes of it, in a place of its own."""

    def __init__(
        self,
        place: Place,
        files: Sequence[str],
        reach: Reach,
        texts: dict[str, str],
        depth: str = "room",
    ) -> None:
        """``files``: of tests, loaded once."""
        self.place = place
        self.loaded = LoadedTests(place, files)
        self.reach = reach
        self.texts = texts
        self.depth = depth
        self.doubtful: set[str] = set()
        """Tests that fail here without a mistake, or not each time: they catch nothing."""
        self.good = set(reach.passed)

    def judge(self, mutant: Mutant) -> Outcome:
        began = time.monotonic()
        tests = self.reach.of(mutant)
        self.put(mutant)
        try:
            outcome, by = self._stages(mutant, tests)
        finally:
            self.take_back(mutant)
        return Outcome(
            outcome=outcome, by=by, reached=len(tests), seconds=round(time.monotonic() - began, 1), depth=self.depth
        )

    def put(self, mutant: Mutant) -> None:
        self.place.write(f"src/sublet/{mutant.file}", planted(self.texts[mutant.file], mutant))

    def take_back(self, mutant: Mutant) -> None:
        self.place.write(f"src/sublet/{mutant.file}", self.texts[mutant.file])

    def _stages(self, mutant: Mutant, tests: list[Test]) -> tuple[str, str]:
        first: list[Test] = []
        rest: list[Test] = []
        seconds = 0.0
        for test in tests:
            seconds += test.seconds
            if len(first) < FIRST_TESTS and seconds < FIRST_S:
                first.append(test)
            elif seconds < REACHED_S or not first:
                rest.append(test)
        done: set[str] = set()
        for some in (first,) if self.depth == "first" else (first, rest):
            names = by_files([test.name for test in some])
            done.update(names)
            if names and (found := self._run(mutant, names)):
                return found
        if self.depth != "room":
            return "open", ""
        room = ROOMS[mutant.file.partition("/")[0]]
        names = [name for name in self.loaded.names if name not in done and any(is_in(name, path) for path in room)]
        return self._run(mutant, names) or ("survived", "")

    def _run(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str] | None:
        while wanted := [test for test in tests if test not in self.doubtful]:
            answer = self._ask(mutant, wanted)
            if answer.outcome == "passed":
                return None
            if answer.outcome == "time-out":
                return "time-out", answer.by
            if self._is_sure(mutant, answer.by):
                return "caught", answer.by
            self.doubtful.add(answer.by)
        return None

    def _ask(self, mutant: Mutant, tests: Sequence[str]) -> Answer:
        """Where the mistake is outside of functions, or cannot be planted in what is loaded, of a pytest of its own."""
        if mutant.reached_by:
            answer = self.loaded.run(self._limits(tests), mutant, self.texts[mutant.file])
            if answer.outcome != "elsewhere":
                return answer
        while True:
            status, said = self.place.run(tests, START_S + min(sum(self._limits(tests).values()), WHOLE_S), "-x")
            if status is None:
                return Answer(outcome="time-out", by="a time-out")
            if status in (0, 5):
                return Answer(outcome="passed", by="")
            if status == 4 and (files := sorted({name.partition("::")[0] for name in tests})) != tests:
                tests = files  # a name is gone, or its file cannot be imported any more
                continue
            failed = FAILED.search(said)
            return Answer(outcome="failed", by=failed[1] if failed else last_line(said))

    def _limits(self, tests: Sequence[str]) -> dict[str, float]:
        times = self.reach.seconds
        return {test: min(ALONE_S, SLACK_S + TIMES * times.get(test, ALONE_S)) for test in tests}

    def _is_sure(self, mutant: Mutant, by: str) -> bool:
        """Whether it passes without the mistake, and fails twice with it: clocks may fail a test as well."""
        if not by.startswith("tests/"):
            return True  # pytest itself came to its end
        if by not in self.good:
            self.take_back(mutant)
            sound = self.loaded.run(self._limits([by]))
            self.put(mutant)
            if sound.outcome != "passed":
                return False
            self.good.add(by)
        return "::" not in by or self._ask(mutant, [by]).outcome != "passed"


def by_files(tests: Sequence[str]) -> list[str]:
    """Tests of one file stand together, so that what is made once for their file is."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return sorted(tests, key=lambda test: files.index(test.partition("::")[0]))


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing")


# ---------------------------------------------------------------------------------------------------- what is known


@dataclass
class Results:
    """What is known of each mistake of the sample, in a file that is committed."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        results = cls(path)
        if path.exists():
            first, *rest = path.read_text().splitlines()
            results.about = json.loads(first)
            results.found = {(one := json.loads(line))["key"]: one for line in rest}
        return results

    def knows(self, mutant: Mutant, depth: str = "room") -> bool:
        """Whether nothing is left to do about it. What is open is known as far as it was followed."""
        one = self.found.get(mutant.key)
        if one is None or one["source"] != mutant.source_hash:
            return False
        depths = list(DEPTHS)
        return one["outcome"] != "open" or depths.index(one.get("depth", "first")) >= depths.index(depth)

    def add(self, group: str, mutant: Mutant, outcome: Outcome) -> None:
        self.found[mutant.key] = {
            "key": mutant.key,
            "group": group,
            "file": mutant.file,
            "line": mutant.line,
            "where": mutant.where,
            "operator": mutant.operator,
            "before": mutant.before,
            "after": mutant.after,
            "statement": mutant.statement,
            "source": mutant.source_hash,
            "outcome": outcome.outcome,
            "by": outcome.by,
            "reached": outcome.reached,
            "seconds": outcome.seconds,
        }
        if outcome.outcome == "open":
            self.found[mutant.key]["depth"] = outcome.depth

    def save(self) -> None:
        ordered = sorted(self.found.values(), key=lambda one: (one["group"], one["file"], one["line"], one["key"]))
        lines = [json.dumps(one, ensure_ascii=False) for one in (self.about, *ordered)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n")
        beside.replace(self.path)

    @property
    def survivors(self) -> list[dict[str, Any]]:
        return [one for one in self.found.values() if one["outcome"] == "survived"]


def explanations(path: Path) -> dict[str, str]:
    """The reason why no test need notice it, by the key of the mutant."""
    return {key: one["why"] for key, one in tomllib.loads(path.read_text()).items()} if path.exists() else {}


def table(results: Results, known: dict[str, str]) -> Iterator[str]:
    """The page that is committed: by file how many were planted and caught, and each survivor with its explanation."""
    about = results.about

    def outcome(one: dict[str, Any]) -> str:
        """What is explained needs no further test."""
        return "survived" if one["outcome"] == "open" and one["key"] in known else str(one["outcome"])

    yield "# Mistakes planted, and which of them the tests notice"
    yield ""
    yield (
        f"Written by `make mutants`. Seed {about.get('seed')}, {about.get('number')} of each group, Python "
        f"{about.get('python')}; {'complete' if about.get('complete') else 'not complete yet'}."
    )
    for group in ("drivers", "cores"):
        some = [one for one in results.found.values() if one["group"] == group]
        counts = Counter(outcome(one) for one in some)
        caught = counts["caught"] + counts["time-out"]
        yield ""
        told = f"{len(some)} planted, {caught} caught, {counts['survived']} survived, {counts['open']} open"
        yield f"## {group.capitalize()}: {told}"
        yield ""
        yield "| file | planted | caught | survived | open |"
        yield "|---|---|---|---|---|"
        for name in sorted({one["file"] for one in some}):
            of = Counter(outcome(one) for one in some if one["file"] == name)
            yield f"| `{name}` | {of.total()} | {of['caught'] + of['time-out']} | {of['survived']} | {of['open']} |"
    yield ""
    yield "Open: no test that reaches it failed, and the other tests of its room were not run yet."
    yield ""
    yield "## Survivors"
    survivors = [one for one in results.found.values() if outcome(one) == "survived"]
    for one in sorted(survivors, key=lambda one: (one["file"], one["where"], one["key"])):
        yield ""
        change = f"{one['operator']}: `{one['before']}` → `{one['after']}`"
        yield f"- `{one['key']}` {one['file']}, `{one['where']}`, {change}"
        yield f"  {known.get(one['key'], 'NOT EXPLAINED')}"


def say(text: str) -> None:
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------------- the command


def run(
    wanted: list[tuple[str, Mutant]],
    results: Results,
    texts: dict[str, str],
    jobs: int,
    depth: str,
) -> None:
    todo: queue.SimpleQueue[tuple[str, Mutant]] = queue.SimpleQueue()
    for one in wanted:
        todo.put(one)
    paths = {path for room in {mutant.file.partition("/")[0] for _, mutant in wanted} for path in ROOMS[room]}
    files = sorted(dict.fromkeys(tests_in(paths)), key=lambda test: (price(test), test))
    if depth in ("first", "unit"):
        files = [test for test in files if price(test) <= RUNGS.index("tests/transcripts")]
    reach = record(files)
    lock, stop, times, began = threading.Lock(), threading.Event(), [], time.monotonic()

    def work(number: int) -> None:
        judge = Judge(Place(f"place{number}"), files, reach, texts, depth)
        while not stop.is_set():
            try:
                group, mutant = todo.get_nowait()
            except queue.Empty:
                return
            outcome = judge.judge(mutant)
            with lock:
                times.append(outcome.seconds)
                results.add(group, mutant, outcome)
                results.save()
                left_s = statistics.fmean(times) * (len(wanted) - len(times)) / jobs
                say(
                    f"{len(times)}/{len(wanted)} {outcome.outcome:8} {outcome.seconds:5.0f} s, "
                    f"about {left_s / 60:.0f} min left | {mutant.file}:{mutant.line} {mutant.where} "
                    f"{mutant.operator}: {mutant.before[:60]} → {mutant.after[:60]} | {outcome.by}"
                )

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(min(jobs, len(wanted)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stop.set()
        say("Stopped; the same command goes on from here.")
        raise SystemExit(130) from None
    say(f"{len(wanted)} tested in {(time.monotonic() - began) / 60:.0f} min.")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Plants small mistakes and looks which of them no test notices.")
    parser.add_argument("--number", type=int, default=NUMBER, help="of each group (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="chooses which (default: %(default)s)")
    parser.add_argument("--files", default="*", help="only those in such files, for example 'client/*'")
    parser.add_argument("--jobs", type=int, default=1, help="places to test in at the same time (default: 1)")
    parser.add_argument("--survivors", action="store_true", help="test again what survived")
    parser.add_argument("--depth", choices=DEPTHS, default="room", help="tests to meet (default: all of its room)")
    parser.add_argument("--report", action="store_true", help="what is known; test nothing")
    parser.add_argument("--results", type=Path, default=KNOWN / "results.jsonl", help="where results are kept")
    chosen = parser.parse_args(arguments)

    results = Results.load(chosen.results)
    if not chosen.report:
        groups = sources()
        texts = {name: (ROOT / "src/sublet" / name).read_text() for names in groups.values() for name in names}
        if results.about.get("seed", chosen.seed) != chosen.seed:
            results.found.clear()
        samples = {
            group: sample(names, texts, chosen.seed, chosen.number, results.found) for group, names in groups.items()
        }
        mixed = [(group, one) for group, some in samples.items() for one in some]
        mixed.sort(key=lambda one: hashlib.sha256(f"{chosen.seed}:{one[1].key}".encode()).digest())
        in_sample = {mutant.key for _, mutant in mixed}
        if chosen.number >= results.about.get("number", 0):
            results.found = {key: one for key, one in results.found.items() if key in in_sample}
        results.about = {"seed": chosen.seed, "number": chosen.number, "python": platform.python_version()}
        survived = {one["key"] for one in results.survivors}
        wanted = [
            (group, mutant)
            for group, mutant in mixed
            if fnmatch(mutant.file, chosen.files)
            and (mutant.key in survived if chosen.survivors else not results.knows(mutant, chosen.depth))
        ]
        say(f"seed {chosen.seed}: {len(mixed)} mistakes, {len(wanted)} to test")
        if wanted:
            run(wanted, results, texts, chosen.jobs, chosen.depth)
        results.about["complete"] = all(results.knows(mutant) for _, mutant in mixed)
        results.save()
    known = explanations(chosen.results.with_name("explanations.toml"))
    page = chosen.results.with_name("table.md")
    page.write_text("\n".join(table(results, known)) + "\n")
    left = [one for one in results.survivors if one["key"] not in known]
    for one in left:
        say(f"not explained: {one['key']} {one['file']}:{one['line']} {one['where']}: {one['before']} → {one['after']}")
    counts = Counter(one["outcome"] for one in results.found.values())
    say(
        f"{len(results.found)} planted, {counts['caught'] + counts['time-out']} caught, {counts['survived']} survived "
        f"({len(left)} of these without a test or an explanation), {counts['open']} open; see {page}"
    )
    return 1 if left else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
