"""What every test stands on: nothing is left out silently, no test meets the user's own office, chance is repeatable.

A test that needs a program says so, and is left out where the program is missing::

    @pytest.mark.needs("strace")
    def test_a_kill_at_any_system_call_of_a_grant_loses_nothing() -> None: ...

The run then closes with one plain line per missing program and the tests it cost. With ``SUBLET_REQUIRE_ALL=1``, as CI
sets it, anything left out but GPU tests and tests on other people's material fails the run, so a missing program cannot
pass for a green suite.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import shutil
import signal
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Final

import pytest

from tests.again import Again
from tests.commands import anew, fork_for_all, fork_offices

# Who reads notebooks loads jsonschema, and with it, if it is there, a package that makes forty parsers of addresses in
# all alphabets, for more than a second in each process of the suite. No test has such an address.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

NEED: Final = "sublet-need"
"""The key under which a left-out test's report carries what it needed; such properties survive pytest-xdist."""

MAY_BE_LEFT_OUT: Final = frozenset(("gpu", "material", "mock-nvml"))
"""Needs that no set-up of ours can meet; each test on other people's material has a twin that always runs."""

DEBIAN_PACKAGE: Final = {
    "etcd": "etcd-server",
    "strace": "strace",
    "chromium": "chromium-headless-shell",
    "wrk": "wrk",
    "systemd-analyze": "systemd",
    "prometheus": "prometheus",
}
"""Where a program comes from when its package has another name, for the closing line."""


def _has_gpu() -> bool:
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))


def _has_warp() -> bool:
    return importlib.util.find_spec("warp") is not None


def _has_material() -> bool:
    """Other people's notebooks, which are no part of the project."""
    return os.path.isdir(os.path.join(os.environ.get("SUBLET_MATERIAL", "/nowhere"), "data", "notebooks"))


def _has_mock_nvml() -> bool:
    """NVIDIA's mock of NVML, which is no part of the project."""
    return os.path.isfile(os.path.join(os.environ.get("SUBLET_MATERIAL", "/nowhere"), "gpu-rig", "libnvidia-ml.so.1"))


def _has_chromium() -> bool:
    from tests.browser.lab import PROGRAMS

    return any(map(shutil.which, PROGRAMS))


def _has_wasmtime() -> bool:
    return importlib.util.find_spec("wasmtime") is not None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _has_tracer() -> bool:
    from tests.crash.tracer import works

    return not works()


def _has_hub() -> bool:
    place = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv", "hub", "node_modules")
    has_proxy = os.path.exists(os.path.join(place, ".bin", "configurable-http-proxy"))
    return has_proxy and shutil.which("node") is not None and importlib.util.find_spec("jupyterhub") is not None


CAPABILITIES: Final[dict[str, Callable[[], bool]]] = {
    "gpu": _has_gpu,
    "warp": _has_warp,
    "material": _has_material,
    "mock-nvml": _has_mock_nvml,
    "torch": _has_torch,
    "chromium": _has_chromium,
    "wasmtime": _has_wasmtime,
    "tracer": _has_tracer,
    "hub": _has_hub,
}
"""Needs that are not programs on the PATH, each with its probe. A probe asks one thing and lets errors through."""

# ------------------------------------------------------------------------------------------------- what is left out


def _needs_of(item: pytest.Item) -> list[str]:
    needs = [name for mark in item.iter_markers("needs") for name in mark.args]
    if item.get_closest_marker("gpu"):
        needs.append("gpu")
    return needs


def _is_there(need: str) -> bool:
    probe = CAPABILITIES.get(need)
    return probe() if probe else shutil.which(need) is not None


STARTED_IN: Final = os.getcwd()


LEFT_OPEN: Final = "sublet-left-open"

IMPORTED_MUCH: Final = 100
"""Modules that a test has imported, after which all that is there is left out when garbage is looked for: PyTorch alone
is half a million objects that stay, and each test that looks for all garbage would walk through them."""


def freeze() -> None:
    """Look for all garbage once, and from now on only among what is made later."""
    gc.collect()
    gc.freeze()


class LeavesNothing:
    """What a test leaves behind is found at its own end, not by the next test that happens to run in the process."""

    def __init__(self) -> None:
        self._loops = NotesLoops()
        asyncio.set_event_loop_policy(self._loops)  # type: ignore[deprecated]
        self._dropped_by: list[str] = []
        self._modules = len(sys.modules)

    def pytest_collection_finish(self) -> None:
        self._modules = len(sys.modules)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Garbage is looked for among what is new, so that a warning given as it goes names the test that left it."""
        gc.collect(1)
        if self._loops.count_dropped():
            item.user_properties.append((LEFT_OPEN, "an event loop"))
        if len(sys.modules) >= self._modules + IMPORTED_MUCH:
            self._modules = len(sys.modules)
            freeze()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and any(key == LEFT_OPEN for key, _ in report.user_properties):
            self._dropped_by.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._dropped_by:
            terminalreporter.write_line(f"left open: {test} dropped an event loop that it had not closed")


class NotesLoops(asyncio.DefaultEventLoopPolicy):
    """Knows the event loops that were made since it was asked last.

    A loop that was dropped without being closed may have grown old: then the look at what is new does not find it, and
    the warning comes in whichever later test looks for all garbage."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        self._made.append(weakref.ref(loop))
        return loop

    def count_dropped(self) -> int:
        """How many of them are open and garbage. One that is still held, by a fixture of its file, is closed later."""
        made, self._made = self._made, []
        still_open = [ref for ref in made if _is_open(ref)]
        if still_open:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # it would be given to the test that comes next
                gc.collect()
        return sum(not _is_open(ref) for ref in still_open)


def _is_open(ref: weakref.ref[asyncio.AbstractEventLoop]) -> bool:
    loop = ref()
    return loop is not None and not loop.is_closed()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """A test that leaves another working folder behind breaks those that start a program in this one. One that leaves
    an exception being handled (an exception raised by a trace function inside an ``except`` clause does, in CPython)
    gives it as the context to every later one."""
    yield
    found = _folder_now()
    if found != STARTED_IN:
        os.chdir(STARTED_IN)
        raise AssertionError(f"{item.nodeid} left the working folder at {found}")
    if (handled := sys.exc_info()[1]) is not None:
        raise AssertionError(f"{item.nodeid} left an exception as if it were still handled: {handled!r}")


def _folder_now() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _say_what_stays_cold(item)
    anew.wanted = item.get_closest_marker("anew") is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # saves ignore it for good, and some tests save in this process
    missing = [need for need in _needs_of(item) if not _is_there(need)]
    if missing:
        item.user_properties += [(NEED, need) for need in missing]
        pytest.skip(f"needs {', '.join(missing)}")


COLD: Final = ("torch", "warp", "matplotlib_inline")
COMPUTES_IN_GUESTS: Final = "tests/notebook/"
"""Where many guests use numpy: their warm interpreter has it, so that not each of them imports it."""


def _say_what_stays_cold(item: pytest.Item) -> None:
    """Seconds of a processor in each office that has guests, for what most of these tests never look at: 2 s for torch,
    0.4 s for figures (in kernels), 0.1 s for numpy. What is warm for all users is so again where a test needs it, or
    says that it wants an office as its users have it; or some of it, by name."""
    mark = item.get_closest_marker("warm")
    warm = set(mark.args) if mark else set()
    if (mark and not warm) or {"torch", "warp", "gpu"}.intersection(_needs_of(item)):
        os.environ.pop("SUBLET_COLD", None)
    else:
        numpy = [] if item.nodeid.startswith(COMPUTES_IN_GUESTS) else ["numpy"]
        os.environ["SUBLET_COLD"] = ",".join(name for name in (*COLD, *numpy) if name not in warm)


class LeftOut:
    """Counts, in the process that reports, which tests were left out and why."""

    def __init__(self, *, require_all: bool) -> None:
        self.require_all = require_all
        self.by_need: dict[str, Counter[str]] = {}
        self.unexplained: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        needs = [str(value) for key, value in report.user_properties if key == NEED]
        if not needs:
            self.unexplained.append(report.nodeid)
        for need in needs:
            self.by_need.setdefault(need, Counter())[report.nodeid.partition("::")[0]] += 1

    @property
    def breaks_the_promise(self) -> bool:
        return self.require_all and bool(self.unexplained or self.by_need.keys() - MAY_BE_LEFT_OUT)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.breaks_the_promise and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        for need, files in sorted(self.by_need.items()):
            where = ", ".join(f"{count} in {file}" for file, count in sorted(files.items()))
            yield f"left out: {_tests(files.total())} for want of {_named(need)} ({where})"
        if self.unexplained:
            yield f"left out: {_tests(len(self.unexplained))} for a reason of their own ({', '.join(self.unexplained)})"
        if self.breaks_the_promise:
            yield (
                "SUBLET_REQUIRE_ALL is set, so this run FAILS: only GPU tests and tests on other people's material "
                "may be left out."
            )


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _named(need: str) -> str:
    if need == "gpu":
        return "a GPU"
    if need == "material":
        return "other people's notebooks, in the folder that SUBLET_MATERIAL names"
    if need == "mock-nvml":
        return "NVIDIA's mock of NVML, in the folder that SUBLET_MATERIAL names"
    if need == "warp":
        return "Warp, which sublet[kernels] brings"
    if need == "hub":
        return "JupyterHub's proxy, which `make setup` and `make test` install where there are nodejs and npm"
    if need == "torch":
        return "PyTorch, which `make test` installs unless TORCH=skip"
    if need == "tracer":
        from tests.crash.tracer import works

        return f"a way to trace ({works()})"
    return f"{need}, which `apt install {DEBIAN_PACKAGE.get(need, need)}` brings"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself as a whole would be counted by nobody, so it is an error."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid} skips itself as a whole; mark its tests with pytest.mark.needs(...) instead."
        )
    return report


# -------------------------------------------------------------------------------------- which tests run in one process


def _shares_what_its_file_set_up(item: pytest.Item) -> bool:
    """Whether the test stands on something that is made once for its file, an office or a kernel for instance."""
    return bool(_made_once(item, "module"))


def _made_once(item: pytest.Item, scope: str) -> list[str]:
    """The names of the test's fixtures that are made once in this scope."""
    info = getattr(item, "_fixtureinfo", None)
    return [name for name, one in info.name2fixturedefs.items() if one and one[-1].scope == scope] if info else []


TORCH_WITHIN: Final = "tests/notebook/test_kinds.py"
"""Holds tensors in the process of the suite itself, or in the second one that plays the device."""
CORPUS: Final = "tests/notebook/test_corpus.py"
"""Its kernels load PyTorch, each for itself."""
WARP_WITHIN: Final = "tests/unit/compute"
WITHIN: Final = ("tests/unit/", "tests/notebook/")


def _loads_much(item: pytest.Item) -> str | None:
    """The group of those that do so in this process. Elsewhere it is guests and programs that load it."""
    if not item.nodeid.startswith(WITHIN):
        return None
    needs = _needs_of(item)
    if item.nodeid.startswith(CORPUS):
        return CORPUS
    if "torch" in needs or "other" in _made_once(item, "session"):
        return TORCH_WITHIN
    return WARP_WITHIN if "warp" in needs or "kernel_cache" in getattr(item, "fixturenames", ()) else None


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the ids
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Such tests stay together: their office starts once, not once in each process, and their order is the file's. So
    do those that import PyTorch: with its compiler, which the first optimizer wants, that takes four seconds of a
    processor in each process. So do those that compile kernels, which takes a process some seconds as well, once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if group := _loads_much(item):
            item.add_marker(pytest.mark.xdist_group(group))
        elif _shares_what_its_file_set_up(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = _by_turns(items)
        _say_groups(items)


def _say_groups(items: list[pytest.Item]) -> None:
    """By the ids, where ``--dist=loadgroup`` finds them. pytest-xdist 3.8 would do it, and sets what pytest 9.2 no
    longer reads: every process then sets up every file for itself."""
    for item in items:
        group, found = item.get_closest_marker("xdist_group"), getattr(item, "_id", None)
        if group is not None and found is not None:
            item._id = type(found).parse(f"{item.nodeid}@{group.args[0]}")


SEEDS: Final = "tests/simulation/test_seeds.py::test_seeds_break_no_rule"
COMPUTES: Final = "tests/simulation/"
LAST: Final = ("tests/unit/", "benchmarks/")


def _by_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Where several processes run, tests that only compute are spread among those that mostly wait for others, or cores
    would stand idle first and be fought for afterwards. The longest of all begins first, the many short ones end it."""
    last = [item for item in items if item.nodeid.startswith(LAST)]
    computing = [item for item in items if item.nodeid.startswith(COMPUTES)]
    computing.sort(key=lambda item: not item.nodeid.startswith(SEEDS))
    waiting = [item for item in items if not item.nodeid.startswith((COMPUTES, *LAST))]
    waiting.sort(key=lambda item: not item.nodeid.startswith(TORCH_WITHIN))  # the longest of what stays together
    spread = [(at / len(some), item) for some in (computing, waiting) for at, item in enumerate(some)]
    return [item for _, item in sorted(spread, key=lambda one: one[0])] + last


# ----------------------------------------------------------------------------------------------- what every test gets


def pytest_collectstart() -> None:
    """Thousands of tests and all that they import stay until the end: nothing of it is worth looking for garbage in,
    neither while it is made nor each time that a test looks for its own."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


LOOK_AFTER: Final = (20_000, 20, 1_000)
"""As good as never at everything: where a test has imported PyTorch or drawn a figure, or where all reports are kept,
that is a walk through half a million objects that stay. A test that wants garbage gone says so."""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """pytest looks for garbage five times more. What tests imported is none, and is walked through once."""
    freeze()


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*LOOK_AFTER)
    hands_out = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if config.pluginmanager.hasplugin("hypothesispytest") and not hands_out:  # a bare GPU machine may be without it
        _same_examples_on_every_run()
    # Started with `nohup`, or in the background by a script, the suite sees what it always sees: what is ignored there
    # would be ignored in every program that a test starts.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(LeavesNothing(), "sublet-leaves-nothing")
    config.pluginmanager.register(LeftOut(require_all=os.environ.get("SUBLET_REQUIRE_ALL") == "1"), "sublet-left-out")
    if config.pluginmanager.hasplugin("xdist"):
        from tests.handing_out import HandingOut, Reporting

        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(Reporting() if is_worker else HandingOut(), "sublet-handing-out")
    if hands_out:
        fork_for_all()
    if os.environ.get("SUBLET_AGAIN") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(), "sublet-again")


def _same_examples_on_every_run() -> None:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    slow = [HealthCheck.too_slow]  # how long it takes to make examples is the machine's business, too
    settings.register_profile("sublet", derandomize=True, max_examples=40, deadline=None, suppress_health_check=slow)
    settings.register_profile("soak", max_examples=10_000, deadline=None, suppress_health_check=slow, print_blob=True)
    profile = os.environ.get("HYPOTHESIS_PROFILE", "sublet")
    settings.load_profile(profile)
    if profile == "sublet":
        # Hypothesis draws also from the constants in the source of all modules that are loaded, and which those are
        # depends on the tests that ran before in the same process.
        none = Constants()
        providers._get_local_constants = lambda: none


@pytest.fixture(scope="session", autouse=True)
def _offices_are_forked() -> None:
    """Those that the programs under test start in the background, and the supervisors, as ``tests.commands`` says."""
    fork_offices()


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_users_own_office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test that forgets to say where its office lives must not find the one of the person running it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("URL", "TOKEN", "LEASE", "EPOCH", "DEADLINE", "DEVICES", "PAGE"):
            patch.delenv(f"SUBLET_{name}", raising=False)
        patch.setenv("SUBLET_HOME", str(tmp_path_factory.mktemp("home")))
        # Root's offices give user numbers to tenants. All of this run share one file of them, and /etc stays as it is.
        base = tmp_path_factory.getbasetemp()
        patch.setenv(
            "SUBLET_UIDS", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "uids" / "uids")
        )
        # As in an activated environment: messages name commands as they can be typed, which here is plain `sublet`.
        bin_folder = os.path.dirname(sys.executable)
        patch.setenv("PATH", os.pathsep.join((bin_folder, os.environ.get("PATH", os.defpath))))
        yield
