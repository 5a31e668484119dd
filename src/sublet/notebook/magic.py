"""``%%gpu`` and ``%gpu``: parse, call, render, and nothing else."""

from __future__ import annotations

from typing import Any, Final

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

import sublet
from sublet.notebook.cells import Cells
from sublet.notebook.commands import completions, run_command
from sublet.notebook.commands import help_text as commands_text
from sublet.notebook.options import CellOptions, help_text, parse_line
from sublet.notebook.plain import said_plainly

__all__ = ["GpuMagics", "asks_for_help", "load"]

ASKS: Final = ("-h", "--help", "?", "help")
"""Behind ``%%gpu``: what it can do, and nothing is run."""


@magics_class
class GpuMagics(Magics):
    """Cells on leased devices."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.cells = Cells(shell, sublet.connect)
        self.defaults = CellOptions()
        """What holds for every ``%%gpu`` that does not say otherwise."""

    @cell_magic
    def gpu(self, line: str, cell: str) -> None:
        """Run this cell on a leased device."""
        if line.strip() in ASKS:
            print(f"%%gpu runs a cell on a leased device.\n{help_text()}")  # noqa: T201
            return
        with said_plainly(above=1):
            if line.strip() == "explain":
                print(self.cells.explained(cell))  # noqa: T201
                return
            self.cells.run(cell, parse_line(line, self.defaults))

    @line_magic("gpu")  # type: ignore[arg-type]  # IPython takes a name as well
    def gpu_line(self, line: str) -> None:
        """How it stands, and what can be done: ``%gpu help``."""
        with said_plainly():
            print(run_command(self.cells, self.shell, line))  # noqa: T201

    gpu.__doc__ = f"Run this cell on a leased device.\n\n{help_text()}"
    gpu_line.__doc__ = f"How it stands, and what can be done.\n\n{commands_text()}"  # type: ignore[assignment]

    def complete(self, _shell: Any, event: Any) -> list[str]:
        """For TAB behind ``%gpu``."""
        return completions(self.cells, event.line)


def asks_for_help(lines: list[str]) -> list[str]:
    """A cell that is ``%%gpu --help`` and nothing else: IPython says of it that a cell magic needs a body."""
    said = "".join(lines).split()
    return ["%gpu help\n"] if len(said) == 2 and said[0] == "%%gpu" and said[1] in ASKS else lines


def load(shell: Any) -> str:
    """Make the magics known to a shell; the line that says so."""
    if "GpuMagics" not in shell.magics_manager.registry:  # a job has them before the notebook asks for them
        magics = GpuMagics(shell)
        shell.register_magics(magics)
        shell.set_hook("complete_command", magics.complete, str_key="%gpu")
        shell.input_transformers_cleanup.insert(0, asks_for_help)
    return "sublet: %%gpu runs a cell on a leased device; nothing is held in between (%gpu help)"
