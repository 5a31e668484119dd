"""The ``sublet`` command.

Each command is declared once (``declare``, ``table``) and reached two ways: the short one (``short``, standard library
only) runs what is complete and correct, the full one (``full``, typer and rich) has the help, the completion and the
patience for everything else. `sublet status` is asked by prompts and scripts, many times a minute; it takes the short
way and is done in well under 100 ms.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    if argv is not None:
        return _main(list(argv))
    status = _main(sys.argv[1:])
    if "threading" not in sys.modules and "_SUBLET_COMPLETE" not in os.environ:
        # Nothing is open that needs closing, and taking the interpreter apart would cost 6 ms.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never open
                stream.flush()
        os._exit(status)
    return status


def _main(words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that the terminal does not know is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    from sublet.cli import exit_status
    from sublet.errors import SubletError

    try:
        status = _dispatch(words)
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
    except SubletError as error:
        return exit_status.print_error(error, as_json="--json" in words and words[0] not in ("run", "exec"))
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return exit_status.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`). Python would complain once more while shutting down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status.FAILED
    return status


def _dispatch(words: Sequence[str]) -> int:
    if list(words) == ["--version"]:
        from sublet import __version__

        print(f"sublet {__version__}")
        return 0
    from sublet.cli import declare, table

    if words[:1] == ["--as-tenant"]:
        from sublet.wire.version import AS_TENANT_VARIABLE

        os.environ[AS_TENANT_VARIABLE] = "1"  # also for the programs that this one starts
        words = words[1:]
    found = None if "_SUBLET_COMPLETE" in os.environ else table.find(words)
    if found is not None:
        path, rest = found
        command = table.load(path)
        try:
            raw = declare.parse(command, command.spelt_out(rest))
        except declare.NotUnderstood:
            pass
        else:
            return command.run(raw)
    from sublet.cli import full_parser

    return full_parser.run(words)
