"""The supervisor stays when everything else goes, so it is small: under 32 MB with 200 guests (which are started in
``tests/integration/test_supervisor_bounds.py``), and without what makes it big."""

from __future__ import annotations

import subprocess
import sys

from sublet.node.agent.starting import package_folder

MOST_BYTES = 24_000_000
"""Before the first guest."""
BIG = (
    "asyncio",
    "concurrent",
    "hashlib",  # a megabyte of names, and libcrypto
    "http",
    "logging",
    "msgspec",
    "random",
    "secrets",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib",
)
LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
import sublet.node.supervisor.__main__, sublet.node.supervisor.service
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmRSS")), *sys.modules)
"""


def test_what_it_loads_is_small() -> None:
    """As it is started, without ``site``. The first to load a new checkout compiles it as well, which takes memory."""
    look = [sys.executable, "-I", "-S", "-c", LOOK, package_folder()]
    subprocess.run(look, capture_output=True, check=True, timeout=60)
    words = subprocess.run(look, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    loaded = {name.partition(".")[0] for name in words[1:]}
    assert not loaded.intersection(BIG)
    assert int(words[0]) * 1024 < MOST_BYTES
