"""``sublet demo``: leases, preemption, a crash and a bill in half a minute, on host devices, in a temporary folder."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.declare import Opt
from sublet.cli.exit_status import DONE

__all__ = ["demo"]


def demo(
    *,
    out: Annotated[
        str, Opt("--out", "-o", metavar="FOLDER", help="Folder for the notebook and its page (default: sublet-demo).")
    ] = "sublet-demo",
    verbose: Annotated[bool, Opt("--verbose", "-v", help="Print every check, with what it found.")] = False,
) -> int:
    """See a notebook cell lose its GPU and go on, and two users share a device. It takes half a minute.

    It starts offices of its own in a temporary folder and removes them; your own office and files are not touched, and
    no GPU is needed. It leaves the executed notebook and an HTML page of it with the bill, in the folder sublet-demo
    unless --out names another. Everything it prints was checked; the exit status is 1 if a check fails.
    """
    from sublet.cli.demo.play import play

    play(out, verbose=verbose)
    return DONE
