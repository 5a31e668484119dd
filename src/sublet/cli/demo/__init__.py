"""``sublet demo``: the whole thing in under a minute, in a temporary folder, on host devices, with nothing asked."""

from __future__ import annotations

import errno
import os
from typing import Annotated

from sublet.cli.declare import Opt
from sublet.cli.exits import DONE
from sublet.errors import InvalidRequest

__all__ = ["demo"]


def _writable(folder: str) -> str:
    """The folder, which is made. Whoever names one is not given another at the end of the demo."""
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be written to ({error.strerror})", do="Name another folder, or leave --out away."
        ) from error
    return folder


def demo(
    *,
    out: Annotated[
        str | None,
        Opt(
            "--out",
            "-o",
            metavar="FOLDER",
            parse=_writable,
            help="Folder for the executed notebook and its page (default: sublet-demo).",
        ),
    ] = None,
) -> int:
    """Watch a notebook lose its GPU and go on, and two tenants share one: under a minute, no question asked.

    Offices are opened in a temporary folder and removed afterwards; nothing of yours is touched, and no GPU is needed.
    What stays is the notebook that was run, and an HTML page of it with the bill: in the folder sublet-demo, unless
    told otherwise. Everything that is claimed on the way is checked; the exit status is 1 if anything does not hold.
    """
    from sublet.cli.demo.story import tell

    tell("sublet-demo" if out is None else out)
    return DONE
