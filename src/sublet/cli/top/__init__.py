"""``sublet top``: devices, leases, guests and the queue, live or once."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import Annotated, Final

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson

__all__ = ["top"]

PLAIN_COLUMNS: Final = 160
"""Where there is no terminal, and COLUMNS says nothing."""


def top(
    *, once: Annotated[bool, Opt("--once", help="Print everything once and exit.")] = False, as_json: AsJson = False
) -> int:
    """Show devices, leases, guests, the queue and costs live.

    Arrow keys (or j, k) scroll, Tab goes to the next part, q quits. Where output goes to a file or a pipe it is printed
    once. An operator sees every tenant's, a tenant its own. Looking starts nothing; if the office goes away, what was
    known stays on the screen until it is back.
    """
    if once and as_json:
        raise UsageError("--once and --json are two forms of the same", do="Give one of them.")
    from sublet.cli.top.reading import OfficeReader, document

    with closing(OfficeReader(CommandOffice.reach(start=False).address)) as reader:
        known = reader.read()
        if as_json:
            from sublet.cli.show import document as print_document

            print_document(document(known))
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
            from sublet.cli.show import colour_on
            from sublet.cli.top.paint import simple, styled
            from sublet.cli.top.screen import whole

            colour, encoding = colour_on(sys.stdout), sys.stdout.encoding or "ascii"
            for line in whole(known, _columns(), known.at_s):
                print(simple(styled(line, colour=colour), encoding))
        else:
            from sublet.cli.top.live import run_live

            return run_live(reader, known)
    return DONE


def _columns() -> int:
    import shutil

    return max(40, shutil.get_terminal_size((PLAIN_COLUMNS, 0)).columns)
