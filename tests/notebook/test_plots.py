"""Plots of a kernel in a guest are seen, whatever its warm interpreter had imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, matplotlib
{early}
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
from sublet.guest.kernel import set_backend_of_environment
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.enable_gui = lambda gui=None: None  # a kernel has one
shell.display_formatter.active_types = shell.display_formatter.format_types
set_backend_of_environment(shell)
import matplotlib.pyplot as plt
figure = plt.plot([1, 2])[0].figure  # an empty one is no picture
print(matplotlib.get_backend(), *shell.display_formatter.format(figure)[0])
"""


@pytest.mark.parametrize(
    "early", ["import matplotlib_inline.backend_inline", "import matplotlib.pyplot as p; p.get_backend()"]
)
def test_the_backend_is_the_one_that_was_said_last(early: str) -> None:
    code = CODE.format(early=early)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "inline" in done.stdout
    assert "image/png" in done.stdout


def test_doctest_runs_where_a_warm_interpreter_had_imported_it_before_the_kernel_began() -> None:
    program = """
import doctest, pdb, sys, types
from sublet.guest.kernel import forget_doctest
forget_doctest()
class Own(pdb.Pdb):    # as ipykernel puts one in its place
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.theme()
    def theme(self): pass
pdb.Pdb = Own
import doctest
main = sys.modules["__main__"]
main.area = types.FunctionType((lambda: None).__code__, vars(main), "area")
main.area.__doc__ = ">>> 1 + 1\\n2"
main.area.__module__ = "__main__"
print(doctest.testmod(main))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert ran.stdout == "TestResults(failed=0, attempted=1)\n", ran.stderr
