"""Threads of the notebook are looked at while they run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import types
from typing import Any

import pytest

from sublet.notebook.in_use import THREAD, in_use


class Trash:
    """Garbage, of which only the collector finds out."""

    died: list[int]

    def __init__(self, died: list[int]) -> None:
        self.me, self.died = self, died

    def __del__(self) -> None:
        self.died.append(1)


def names_of_a_notebook() -> dict[str, Any]:
    """Its module has a function that waits, and what that reads."""
    main = types.ModuleType("__main__")
    source = "def wait(done):\n    done.wait()\n    kept.append(1)\nkept = []"
    exec(source, vars(main))  # noqa: S102
    return vars(main)


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_of_threads_are_looked_at(collects: bool) -> None:
    """Its finalizers would give the threads a turn in the middle of it. Afterwards it is collected as before."""
    names, done, died, during = names_of_a_notebook(), threading.Event(), list[int](), list[int]()

    class Waiting(threading.Thread):
        """One that makes garbage when it is asked what it was made with."""

        @property
        def function(self) -> Any:
            kept = [Trash(died) for _ in range(50)]
            kept.clear()
            during.append(len([[] for _ in range(20_000)]))
            during.append(len(died))
            return names["wait"]

    thread = Waiting(target=names["wait"], args=(done,))
    thread.start()
    was, threshold = gc.isenabled(), gc.get_threshold()
    try:
        gc.collect()
        gc.set_threshold(100)
        (gc.enable if collects else gc.disable)()
        found = in_use(names, lambda value: isinstance(value, list))
        assert gc.isenabled() is collects
        gc.enable()
        assert during == [20_000, 0]
        assert found.changing == {"kept": THREAD}
        gc.collect()
        assert len(died) == 50
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was else gc.disable)()
        done.set()
        thread.join()


CHURN = """
import gc, sys, threading, time, types
from sublet.notebook.in_use import in_use

main = types.ModuleType("__main__")
exec('''
def deep(n):
    x = [n]
    return n and deep(n - 1) + len(x)
def go():
    while not stop:
        deep(12)
stop = []
''', vars(main))

class Trash:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)  # the other threads have their turn

threads = [threading.Thread(target=main.go, daemon=True) for _ in range(2)]
sys.setswitchinterval(1e-4)
for one in threads:
    one.start()
gc.set_threshold(5)
for _ in range(int(sys.argv[1])):
    trash = [Trash() for _ in range(20)]
    del trash
    in_use(vars(main), lambda value: isinstance(value, list))
main.stop.append(1)
for one in threads:
    one.join()
print("looked")
"""


def test_threads_that_run_meanwhile_are_looked_at_without_harm() -> None:
    """In CPython 3.11 the process died of this (SIGSEGV) when garbage was collected meanwhile."""
    ran = subprocess.run([sys.executable, "-c", CHURN, "100"], capture_output=True, text=True, timeout=240, check=False)
    assert (ran.returncode, ran.stdout) == (0, "looked\n"), ran.stderr
