"""The supervisor stays when everything else goes, so it is small: under 20 MB, and without what makes it big."""

from __future__ import annotations

import subprocess
import sys

from sublet.agent.starting import package_folder

MOST_BYTES = 20_000_000
BIG = (
    "ast",  # a megabyte, by way of ``inspect``
    "asyncio",
    "concurrent",
    "dis",
    "hashlib",  # a megabyte of names, and libcrypto
    "http",
    "logging",
    "msgspec",
    "random",
    "secrets",
    "ssl",
    "subprocess",
    "tempfile",
    "tokenize",
    "urllib",
)
LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
import sublet.supervisor.__main__
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmRSS")), *sys.modules)
"""


def test_what_it_loads_is_small() -> None:
    """As it is started, without ``site``."""
    words = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOOK, package_folder()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    loaded = {name.partition(".")[0] for name in words[1:]}
    assert not loaded.intersection(BIG)
    assert int(words[0]) * 1024 < MOST_BYTES


MORE = """
import sys
sys.path.insert(0, sys.argv[1])
import sublet.supervisor.__main__
import dataclasses, inspect

@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    number: int = 3

assert dataclasses.replace(Plain(), number=4).number == 4
assert "tokenize" not in sys.modules
assert inspect.isfunction(len) is False
assert list(inspect.signature(lambda one: one).parameters) == ["one"]
import inspect
assert inspect.getmodulename("/a/b.py") == "b"
"""


def test_whoever_needs_more_of_a_lean_module_gets_all_of_it() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", MORE, package_folder()], check=True, timeout=60)
