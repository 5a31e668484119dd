"""``%%gpu`` and ``%gpu``: parse, call, render, and nothing else."""

from __future__ import annotations

import sys
from typing import Any, Final

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from sublet.client.fabric import connect
from sublet.errors import InvalidRequest
from sublet.notebook.cells import Cells
from sublet.notebook.commands import completions, run_command
from sublet.notebook.commands import help_text as commands_text
from sublet.notebook.error_display import without_traceback
from sublet.notebook.options import CellOptions, configured, help_text, parse_line
from sublet.notebook.output import CellFailed
from sublet.notebook.routing import is_about_shell

ASKS: Final = ("-h", "--help", "?", "help")
"""Behind ``%%gpu``: show the help and run nothing."""
EMPTY_DO: Final = (
    "Put the code that is to run on the GPU below that line. %gpu, with one percent sign, shows the status."
)


@magics_class
class GpuMagics(Magics):
    """Cells on leased devices."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.cells = Cells(shell, connect)
        self.defaults = ""
        """Options of the kernelspec or the job, as one line: they go before those of ``sublet config``."""
        self._local_debug = shell.find_line_magic("debug")

    @cell_magic
    def gpu(self, line: str, cell: str) -> None:
        """Run this cell on a leased device."""
        if line.strip() in ASKS:
            print(f"%%gpu runs a cell on a leased device.\n{help_text()}")  # noqa: T201
            return
        with without_traceback(above=1):
            if line.strip() == "explain":
                print(self.cells.explained(cell))  # noqa: T201
                return
            options = self.options(line)
            if not cell.strip():
                raise InvalidRequest("there is no code below %%gpu", do=EMPTY_DO)
            if options.over:
                from sublet.notebook.mapped import map_cell

                map_cell(self.cells, cell, options, parse_line(line))
                return
            self.cells.run(cell, options)

    def options(self, line: str) -> CellOptions:
        """Of a cell with this line: its own, else the kernelspec's, else those of ``sublet config``."""
        return parse_line(line, parse_line(self.defaults, configured()))

    @line_magic("gpu")  # type: ignore[arg-type]  # IPython takes a name as well
    def gpu_line(self, line: str) -> None:
        """Show the status: ``%gpu help`` lists the commands."""
        with without_traceback():
            print(run_command(self.cells, self.shell, line))  # noqa: T201

    @line_magic("debug")  # type: ignore[arg-type]
    def debug_line(self, line: str) -> None:
        """Open the debugger where the last error was raised: on the device, if a leased cell raised it."""
        if line.strip() or not isinstance(getattr(sys, "last_value", None), CellFailed):
            self._local_debug(line)
            return
        with without_traceback():
            self.cells.debug()

    gpu.__doc__ = f"Run this cell on a leased device.\n\n{help_text()}"
    gpu_line.__doc__ = f"Show the status of the notebook's lease.\n\n{commands_text()}"  # type: ignore[assignment]

    def complete(self, _shell: Any, event: Any) -> list[str]:
        """For TAB behind ``%gpu``."""
        return completions(self.cells, event.line)


def with_a_body(lines: list[str]) -> list[str]:
    """A cell that is only a line with ``%%gpu``, so that our messages are shown: IPython says that a cell magic needs a
    body, and asks whether ``%gpu`` was meant. One that is about the notebook's shell runs there, as it stands."""
    text = "".join(lines).strip()
    words = text.split()
    if words[:1] == ["%%gpu"] and is_about_shell(text.splitlines()[1:]):
        return [f"# {line}" if line.lstrip().startswith("%%gpu") else line for line in lines]
    if words[:1] != ["%%gpu"] or len(text.splitlines()) != 1:
        return lines
    return ["%gpu help\n"] if len(words) == 2 and words[1] in ASKS else [f"{text}\n", "\n"]


# IPython leaves such a transformer out while it asks whether more lines are to come: at a terminal's prompt the first
# line of a cell would look like a whole one.
with_a_body.has_side_effects = True  # type: ignore[attr-defined]


def load(shell: Any) -> str:
    """Make the magics known to a shell; the line that says so."""
    if "GpuMagics" not in shell.magics_manager.registry:  # a job has them before the notebook asks for them
        magics = GpuMagics(shell)
        shell.register_magics(magics)
        shell.set_hook("complete_command", magics.complete, str_key="%gpu")
        shell.input_transformers_cleanup.insert(0, with_a_body)
    return "sublet: %%gpu runs a cell on a leased device; nothing is held in between (%gpu help)"
