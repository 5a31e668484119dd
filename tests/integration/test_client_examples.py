"""What the documentation shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from tests.commands import run_sublet

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDE = ROOT / "docs" / "how-to-lease.md"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """State folders of offices that the first example starts: for those with torch, those with Warp, and all others.
    Each kind of warm interpreter imports what its office has warm, and torch takes seconds."""
    found = {name: tmp_path_factory.mktemp(name) / "home" for name in ("torch", "warp", "cold")}
    yield found
    for home in found.values():
        run_sublet("down", "--now", env={**os.environ, "SUBLET_HOME": str(home)})


def _examples() -> Iterator[Any]:
    for path in EXAMPLES:
        found = re.search("import (torch|warp)", path.read_text())
        marks = [pytest.mark.warm(found[1], "numpy")] if found else []
        yield pytest.param(path, marks=marks, id=path.stem)


PREEMPTIONS = os.environ.get("SUBLET_PREEMPTIONS", "2")
MORE = {"preemptible_training": ("80", "0.01", PREEMPTIONS), "burst_sklearn": ("2",)}
"""So that who takes its device away so often may stand still for five seconds, and still finds it at work; and for two
cores, each of which first imports scikit-learn."""

LONGEST_S = 280
"""An example that hangs is told from one that is slow beside others only by the limit of a test, and ends before it."""


@pytest.mark.parametrize("example", list(_examples()))
def test_an_example_runs_and_leaves_nothing_behind(
    example: Path, homes: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """From a folder of its own, with warnings as errors, as a reader would try it."""
    warm = request.node.get_closest_marker("warm")
    home = homes[warm.args[0] if warm else "cold"]
    env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(example), *MORE.get(example.stem, ())]
    done = subprocess.run(command, env=env, cwd=home.parent, capture_output=True, text=True, timeout=LONGEST_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    with sublet.connect(home=home) as fabric:
        assert [view.id for view in fabric.leases() if view.end is None] == []


def test_the_guide_names_what_there_is() -> None:
    """Every attribute of `sublet`, a fabric or a lease that it names exists; ``test_docs`` runs its blocks."""
    for owner, name in set(re.findall(r"\b(sublet|fabric|lease)\.([a-zA-Z_]+)", GUIDE.read_text())):
        known = {"sublet": sublet, "fabric": sublet.Fabric, "lease": sublet.Lease}[owner]
        assert hasattr(known, name) or name == "example", f"the guide names {owner}.{name}, which there is not"
