"""A plugin of pytest for `tools/mutants.py`: collects all tests once, and runs some in a fork of it for each request.

A request is a line of JSON on the socket whose number is in ``MUTANTS_LINE``; the answer is one as well. A mistake is
planted in the fork: each loaded function of the module gets the code that it has in the source with the mistake. What
the tests start, and what is not loaded yet, reads the same mistake from the file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import pytest
from _pytest.main import pytest_runtestloop as run_all

TEMPORARY: Final = Path("/tmp")


def code_with_mistake(sound: str, mistaken: str, path: str) -> dict[CodeType, CodeType]:
    """For the code of each function of a source, that of the same function in the source with the mistake."""
    pairs: dict[CodeType, CodeType] = {}

    def add(old: CodeType, new: CodeType) -> None:
        for one in (inner for inner in old.co_consts if isinstance(inner, CodeType)):
            alike = [other for other in old.co_consts if isinstance(other, CodeType) and other.co_name == one.co_name]
            others = [other for other in new.co_consts if isinstance(other, CodeType) and other.co_name == one.co_name]
            if len(alike) == len(others):
                twin = others[next(at for at, other in enumerate(alike) if other is one)]
                pairs[one] = twin
                add(one, twin)

    add(compile(sound, path, "exec", dont_inherit=True), compile(mistaken, path, "exec", dont_inherit=True))
    return {old: new for old, new in pairs.items() if old != new}


def functions_by_file(source: str) -> dict[str, list[FunctionType]]:
    """All functions that are loaded from files below this folder."""
    found: dict[str, list[FunctionType]] = {}
    gc.unfreeze()  # or they would not be among the objects
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(source):
            found.setdefault(one.__code__.co_filename, []).append(one)
    gc.freeze()
    return found


class Failures:
    """Notes the first test that fails, and ends the process with it."""

    def __init__(self, answer: int, *, stop: bool) -> None:
        self._answer = answer
        self._stop = stop

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self._stop:
            os.write(self._answer, report.nodeid.encode())
            os._exit(1)


class ForkedTests:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._functions: dict[str, list[FunctionType]] = {}
        self._spared = self._ancestors()
        self._kept = {entry.name for entry in TEMPORARY.iterdir()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_name = {item.nodeid: item for item in session.items}
        source = os.path.join(os.getcwd(), "src", "sublet")
        self._functions = functions_by_file(source)
        with self._line.makefile("rw") as line:
            print(json.dumps({"tests": list(by_name), "errors": session.testsfailed}), file=line, flush=True)
            for text in line:
                order = json.loads(text)
                session.items = [by_name[name] for name in order["limits"] if name in by_name]
                print(json.dumps(self._run(session, order)), file=line, flush=True)
        return True

    def _run(self, session: pytest.Session, order: dict[str, Any]) -> dict[str, Any]:
        answer, told = os.pipe()
        if (child := os.fork()) == 0:
            self._line.close()
            os.close(answer)
            try:
                if not self._plant(order["mistake"]):
                    os._exit(2)
                for item in session.items:
                    item.add_marker(pytest.mark.timeout(order["limits"][item.nodeid]), append=False)
                session.config.pluginmanager.register(Failures(told, stop=order["stop"]))
                run_all(session)
                os._exit(0)
            except BaseException as error:
                os.write(told, f"{type(error).__name__}: {error}"[:1000].encode())
                raise
            finally:
                os._exit(1)
        os.close(told)
        ended = os.pidfd_open(child)
        try:
            in_time = bool(select.select([ended], [], [], order["limit_s"])[0])
            self._end_all_others()
            _, status = os.waitpid(child, 0)
            self._reap()
            by = os.read(answer, 1 << 16).decode()
        finally:
            os.close(ended)
            os.close(answer)
            self._clear()
        if not in_time:
            return {"outcome": "time-out", "by": "a time-out"}
        code = os.waitstatus_to_exitcode(status)
        if code == 2:
            return {"outcome": "elsewhere", "by": ""}
        return {"outcome": "passed" if code == 0 else "failed", "by": by or ("" if code == 0 else f"status {code}")}

    def _plant(self, mistake: dict[str, str] | None) -> bool:
        """Whether it could be planted in what is loaded: not where a function has fewer variables by it."""
        if mistake is None or mistake["module"] not in sys.modules:
            return True
        codes = code_with_mistake(mistake["sound"], mistake["mistaken"], mistake["path"])
        count = 0
        for function in self._functions.get(mistake["path"], ()):
            if (code := codes.get(function.__code__)) is not None:
                try:
                    function.__code__ = code
                except ValueError:
                    return False
                count += 1
        return count > 0

    def _ancestors(self) -> set[int]:
        """This process and those above it, which are spared when all others are ended."""
        outside = os.environ["MUTANTS_OUTSIDE"]
        if os.readlink("/proc/self/ns/pid") == outside or os.readlink("/proc/self") != str(os.getpid()):
            raise RuntimeError("This plugin ends all other processes, so it runs in namespaces of its own only.")
        found, at = set(), os.getpid()
        while at > 0:
            found.add(at)
            at = int(Path(f"/proc/{at}/stat").read_text().rpartition(")")[2].split()[1])
        return found

    def _end_all_others(self) -> None:
        """Twice in a row none is left: one that forks might be missed once."""
        none = 0
        while none < 2:
            others = [pid for pid in self._others() if pid not in self._spared]
            none = 0 if others else none + 1
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if others:
                time.sleep(0.002)

    def _others(self) -> Iterator[int]:
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        yield int(entry)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _clear(self) -> None:
        """Removes what the tests left in the folder for temporary files, and what they mounted there."""
        for entry in TEMPORARY.iterdir():
            if entry.name in self._kept:
                continue
            for mount in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
                if (where := mount.split()[4]).startswith(f"{entry}/"):
                    subprocess.run(["umount", "-l", where], check=False, capture_output=True)
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    line = socket.socket(fileno=int(os.environ.pop("MUTANTS_LINE")))
    line.set_inheritable(False)
    config.pluginmanager.register(ForkedTests(line))
