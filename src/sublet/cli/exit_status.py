"""Ends a command: one exit status, and on failure one sentence of what happened and one of what to do.

======  ==================================================================
status  meaning
======  ==================================================================
0       done
1       failure
2       the command line or the request makes no sense; nothing was done
75      refused, or not granted within the wait (capacity or quota)
76      the lease ended; the reason is on stderr
78      the state folder is a copy of that of an office that runs
130     interrupted (Ctrl-C)
======  ==================================================================

With ``--json`` the error is one JSON document on stderr, and stdout stays empty: a program that reads stdout never
takes an error for an answer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NoReturn

from sublet.cli.show import paint, visible
from sublet.errors import (
    CapacityExceeded,
    InvalidRequest,
    LeaseEnded,
    NotFound,
    OfficeElsewhere,
    QuotaExceeded,
    SubletError,
)
from sublet.invocation import typeable

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 75
ENDED: Final = 76
COPIED: Final = 78
INTERRUPTED: Final = 130


@contextlib.contextmanager
def raised_by_signals(error: Callable[[int], BaseException]) -> Iterator[None]:
    """SIGTERM and SIGHUP raise this on the main thread, as Ctrl-C raises KeyboardInterrupt. A signal that is ignored
    or handled already is left alone."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise error(number)

    before: dict[int, Any] = {}
    for number in (int(signal.SIGTERM), int(signal.SIGHUP)):
        if signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status_of(error: SubletError) -> int:
    """The exit status an error comes to."""
    from sublet.cli.declare import UsageError

    match error:
        case NotFound():
            return FAILED
        case UsageError() | InvalidRequest():
            return USAGE
        case CapacityExceeded() | QuotaExceeded():
            return REFUSED
        case LeaseEnded():
            return ENDED
        case OfficeElsewhere():
            return COPIED
        case _:
            return FAILED


def print_error(error: SubletError, *, as_json: bool) -> int:
    """Say it on stderr; returns the exit status."""
    if as_json:
        sys.stderr.write(json.dumps(error_document(error)) + "\n")
        return status_of(error)
    sys.stderr.write(f"{paint('sublet:', 'red', stream=sys.stderr)} {visible(typeable(error.message))}\n")
    if error.do:
        sys.stderr.write("".join(f"  {visible(line)}\n" for line in typeable(error.do).splitlines()))
    return status_of(error)


def error_document(error: SubletError) -> dict[str, Any]:
    """The same shape the office sends (``ErrorBody``), with the numbers of a refusal where there are any."""
    body: dict[str, Any] = {
        "kind": error.kind,
        "message": typeable(error.message),
        "do": typeable(error.do),
        "transient": error.transient,
        "reason": error.reason,
    }
    if isinstance(error, LeaseEnded):
        end = error.end
        body["end"] = None if end is None else {"reason": str(end.reason), "at": end.at, "detail": end.detail}
    if isinstance(error, CapacityExceeded):
        body["would_fit"] = getattr(error.offer, "offered", None)
        body["estimate"] = error.estimate
    return {"error": body}
