"""``sublet demo``: the whole thing in under a minute, in a temporary folder, on host devices, with nothing asked."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.declare import Opt
from sublet.cli.exits import DONE

__all__ = ["demo"]


def demo(
    *,
    out: Annotated[
        str, Opt("--out", "-o", metavar="FOLDER", help="Where the executed notebook and its page are left.")
    ] = "sublet-demo",
) -> int:
    """Watch a notebook lose its GPU and go on, and two tenants share one: under a minute, no question asked.

    Offices are opened in a temporary folder and removed afterwards; nothing of yours is touched, and no GPU is needed.
    What stays is the notebook that was run, and an HTML page of it with the bill: in the folder sublet-demo, unless
    told otherwise. Everything that is claimed on the way is checked; the exit status is 1 if anything does not hold.
    """
    from sublet.cli.demo.story import tell

    tell(out)
    return DONE
