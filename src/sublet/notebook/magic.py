"""``%%gpu`` and ``%gpu``: parse, call, render, and nothing else."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

import sublet
from sublet.errors import InvalidRequest
from sublet.notebook.cells import Cells
from sublet.notebook.options import CellOptions, help_text, parse_line

__all__ = ["GpuMagics", "load"]

WORDS = ("release", "bill", "explain")


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
        if line.strip() in ("-h", "--help", "?"):
            print(f"%%gpu runs a cell on a leased device.\n{help_text()}")  # noqa: T201
            return
        self.cells.run(cell, parse_line(line, self.defaults))

    @line_magic("gpu")  # type: ignore[arg-type]  # IPython takes a name as well
    def gpu_line(self, line: str) -> None:
        """How it stands; or ``release``, ``bill``, ``explain CODE``."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                lease = self.cells.lease
                said = "no lease is held" if lease is None or lease.end is not None else repr(lease)
            case "release":
                self.cells.release()
                said = "no lease is held"
            case "bill":
                said = " · ".join(self.cells.bill.parts())
            case "explain":
                said = self.cells.explain(rest)
            case _:
                raise InvalidRequest(f"%gpu does not know {word!r}", do=f"Use %gpu alone, or with {', '.join(WORDS)}.")
        print(said)  # noqa: T201


def load(shell: Any) -> str:
    """Make the magics known to a shell; the line that says so."""
    shell.register_magics(GpuMagics(shell))
    return "sublet: %%gpu runs a cell on a leased device; nothing is held in between (%%gpu --help)"
