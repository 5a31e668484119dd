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

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import InvalidRequest, NotFound, Unsupported
from sublet.invocation import installing
from sublet.notebook.error_display import without_traceback
from sublet.notebook.options import parse_line
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
        with without_traceback():
            self._cells.run(cell, self._options(""), is_whole=True)


def main(words: Sequence[str] | None = None) -> None:
    """Be such a kernel: the words of ipykernel, and behind ``--`` the options of ``%%gpu`` for all cells."""
    from ipykernel.kernelapp import IPKernelApp

    from sublet.compute.behind import kernel_class

    arguments = list(sys.argv[1:] if words is None else words)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    line = shlex.join(arguments[at + 1 :])
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
    app.initialize(arguments[:at])
    from sublet.notebook.magic import GpuMagics  # what it loads may load doctest, which must find ipykernel's debugger

    magics = GpuMagics(app.shell)
    app.shell.register_magics(magics)
    app.kernel.mode = KernelMode(app.shell, magics, line)
    app.start()


# ----------------------------------------------------------------------------------------------------------- kernelspec
#
# Installs a kernelspec for a kernel whose cells run on a device (``kernel_mode``).


MODULE: Final = "sublet.notebook.kernel_mode"
_NAME: Final = re.compile(r"[a-z0-9._-]{1,64}")
_LOGO: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">
<rect x="6" y="6" width="52" height="52" rx="9" fill="#1f2937"/>
<path d="M32 15a17 17 0 1 1-14.7 8.5" fill="none" stroke="#22c55e" stroke-width="5" stroke-linecap="round"/>
<path d="M32 22v11l7 5" fill="none" stroke="#f9fafb" stroke-width="4" stroke-linecap="round" stroke-linejoin="round"/>
</svg>
"""
"""A clock that runs: what is lent is lent for a time."""


def kernel_json(options: Sequence[str], *, python: str = sys.executable) -> dict[str, Any]:
    """What Jupyter reads. Raises ``InvalidRequest`` for options that ``%%gpu`` does not have."""
    cell_options = parse_line(shlex.join(options))
    return {
        "argv": [python, "-m", MODULE, "-f", "{connection_file}", "--", *options],
        "display_name": f"Python on a leased GPU ({cell_options})" if options else "Python on a leased GPU",
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": {"debugger": False},
    }


def install(name: str, options: Sequence[str], *, user: bool = False, prefix: str | None = None) -> Path:
    """Put it where Jupyter looks; its folder. One of ours of the same name is replaced, another one never."""
    if importlib.util.find_spec("ipykernel") is None:
        raise _needs("ipykernel")
    spec = kernel_json(options)
    target = folder_of(name, user=user, prefix=prefix)
    if target.exists() and not _is_ours(target):
        raise InvalidRequest(
            f"there is a kernel {name!r} in {target} that is not Sublet's", do="Choose another --name."
        )
    made = target.with_name(f".{name}.{os.getpid()}")
    try:
        made.mkdir(parents=True)
        (made / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        (made / "logo-svg.svg").write_text(_LOGO)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise Unsupported(
            f"{target} cannot be written ({error.strerror})", do="Give --user, or --prefix with a folder of yours."
        ) from error
    return target


def uninstall(name: str, *, user: bool = False, prefix: str | None = None) -> Path:
    """Take it away; the folder it was in."""
    target = folder_of(name, user=user, prefix=prefix)
    if not target.exists():
        raise NotFound(f"there is no kernel {name!r} in {target.parent}", do="See `jupyter kernelspec list`.")
    if not _is_ours(target):
        raise InvalidRequest(
            f"the kernel {name!r} in {target} is not Sublet's", do=f"See `jupyter kernelspec remove {name}`."
        )
    shutil.rmtree(target)
    return target


def folder_of(name: str, *, user: bool = False, prefix: str | None = None) -> Path:
    """Where a kernel of this name is, or would be: below ``prefix``, or the user's, or where neither is said those of
    the environment that this Python belongs to (the user's, where there is none)."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a kernel", do="Use small letters, digits, dots, hyphens and underscores."
        )
    if user and prefix is not None:
        raise InvalidRequest("--user and --prefix contradict each other", do="Give one of them.")
    if prefix is None and not user and sys.prefix != sys.base_prefix:
        prefix = sys.prefix
    if prefix is not None:
        return Path(prefix).expanduser().absolute() / "share" / "jupyter" / "kernels" / name
    return _users_folder() / name


def _users_folder() -> Path:
    try:
        from jupyter_core.paths import jupyter_data_dir
    except ImportError as error:
        raise _needs("jupyter_core") from error
    return Path(jupyter_data_dir()) / "kernels"


def _needs(module: str) -> Unsupported:
    return Unsupported(
        f"{sys.executable} has no {module}, which a kernel needs",
        do=f"Install it: `{installing('sublet[notebook]')}`.",
    )


def _is_ours(folder: Path) -> bool:
    try:
        return MODULE in json.loads((folder / "kernel.json").read_text())["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


if __name__ == "__main__":
    main()
