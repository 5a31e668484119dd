"""Plots of a kernel in a guest are seen, whatever its warm interpreter had imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os
{early}
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
from sublet.guest.kernel import plot_where_told
plot_where_told()
import matplotlib
print(matplotlib.get_backend())
"""


@pytest.mark.parametrize("early", ["", "import matplotlib", "import matplotlib.pyplot as plt; plt.get_backend()"])
def test_the_backend_is_the_one_that_was_said_last(early: str) -> None:
    code = CODE.format(early=early)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "inline" in done.stdout
