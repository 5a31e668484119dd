"""Kernel mode: a Jupyter kernel whose cells all run on a leased device, except those marked ``%%cpu``.

The kernel is an ordinary ipykernel on the CPU that holds nothing and never stops. Each cell is handed to what stands
behind ``%%gpu``, with the options of the kernelspec: a lease is bound when the cell begins and left idle when it ends,
so that it is the first to yield; the cell's process is a guest of that lease, with its cap on memory, and the
variables it shares with the notebook travel as they do for ``%%gpu``. If the device was taken in between, by
suspending or by saving, the next cell goes on from there.

Why not one process that is on the device during cells and off it between them? Off means that the driver copied its
memory out and let go, and that this was verified; that takes longer than most pauses between cells, cannot be had on
every card, and on a host device there is nothing to be off of. And the supervisor could never end the process at the
end of a lease without ending the notebook. With two processes the guest can be ended, parked and billed like any other.

Why the cell and not ``pre_run_cell`` takes the lease: what a callback raises is shown, and then the cell runs all the
same. A cell that got no lease must not run. The event is used for what it is good for: it says where the text of the
user's cell ends and code of others begins.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublet.notebook.options import parse_line
from sublet.notebook.plain import said_plainly
from sublet.notebook.routing import MAGIC, routed

if TYPE_CHECKING:
    from sublet.notebook.magic import GpuMagics


class KernelMode:
    """One shell in which every cell of the user's is for the device."""

    def __init__(self, shell: Any, magics: GpuMagics, line: str) -> None:
        self.is_users = False
        """Whether what is read next is a cell of the user's, and not something that a front end or a magic runs."""
        self._cells = magics.cells
        self._options = magics.options
        magics.defaults = line
        shell.register_magic_function(self._run, "cell", MAGIC)
        shell.input_transformers_cleanup.insert(0, self._read)
        shell.events.register("pre_run_cell", self._begun)

    def _read(self, lines: list[str]) -> list[str]:
        return routed(lines) if self.is_users else lines

    def _begun(self, info: object) -> None:
        self.is_users = False

    def _run(self, line: str, cell: str) -> None:
        with said_plainly():
            self._cells.run(cell, self._options(""), is_whole=True)


def main(words: Sequence[str] | None = None) -> None:
    """Be such a kernel: the words of ipykernel, and behind ``--`` the options of ``%%gpu`` for all cells."""
    from ipykernel.kernelapp import IPKernelApp

    from sublet.compute.behind import kernel_class

    said = list(sys.argv[1:] if words is None else words)
    at = said.index("--") if "--" in said else len(said)
    line = shlex.join(said[at + 1 :])
    options = parse_line(line)

    class LeasedKernel(kernel_class()):  # type: ignore[misc]  # one that is made when it is wanted
        mode: KernelMode

        @property
        def banner(self) -> str:
            return f"{super().banner}\nEvery cell runs on a leased device ({options}); %%cpu keeps one here.\n"

        async def do_execute(
            self, code: str, silent: bool, store_history: bool = True, *rest: Any, **named: Any
        ) -> dict[str, Any]:
            # What front ends run for themselves leaves no history, and is no reason to lease anything.
            self.mode.is_users = store_history and not silent
            try:
                done: dict[str, Any] = await super().do_execute(code, silent, store_history, *rest, **named)
            finally:
                self.mode.is_users = False
            return done

    app: Any = IPKernelApp.instance(kernel_class=LeasedKernel)
    app.initialize(said[:at])
    from sublet.notebook.magic import GpuMagics  # what it loads may load doctest, which must find ipykernel's debugger

    magics = GpuMagics(app.shell)
    app.shell.register_magics(magics)
    app.kernel.mode = KernelMode(app.shell, magics, line)
    app.start()


if __name__ == "__main__":
    main()
