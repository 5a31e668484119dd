"""The documents speak the truth: their Python blocks run, their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(#[^)\s]*)?\)")


def test_there_are_pages_with_blocks() -> None:
    """Otherwise the other tests would pass for want of anything to look at."""
    assert BLOCK.search((ROOT / "docs/tutorial.md").read_text())
    assert len(PAGES) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """A relative link names a file that is there."""
    for target, _ in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: str(p.relative_to(ROOT))
)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page make one program; it runs against an office of its own."""
    program = "\n".join(BLOCK.findall(page.read_text()))
    environment = {**os.environ, "SUBLET_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-W", "error", "-c", program]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    finally:
        down = [sys.executable, "-m", "sublet", "down", "--now"]
        subprocess.run(down, env=environment, capture_output=True, timeout=30, check=False)
    assert run.returncode == 0, f"{page.name}:\n{run.stdout}\n{run.stderr}"
