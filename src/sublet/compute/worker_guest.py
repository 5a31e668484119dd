"""A worker as a guest of a lease: starts it, connects to it, and explains why it ended."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from sublet.client.guests import end_known_to_office, environment, start_spec
from sublet.compute.shown import folder_for, interpreter_for
from sublet.errors import InvalidRequest, OutOfMemory, SubletError, WorkerLost
from sublet.lease.states import GuestState
from sublet.lease.value import ended_error, rfc3339
from sublet.lease_end import EndReason, LeaseEnd
from sublet.wire.guests import GuestSpec, GuestView, StdioKind
from sublet.wire.zygote import LEASE_ENDED

if TYPE_CHECKING:
    from sublet.client.guests import Guest
    from sublet.client.handle import LeaseHandle
    from sublet.client.volume_line import HasVolume

ENTRY: Final = "sublet.guest.worker:main"
IMPORTS: Final = ("sublet.guest.worker", "sublet.jobs.inside?", "asyncio", "cloudpickle?", "numpy?", "torch?", "warp?")
"""What a worker's warm interpreter has loaded, where it is there."""
END_REPORTED_S: Final = 5.0
"""How long it may take the supervisor to say how a worker ended."""
LEASE_ENDED_S: Final = 1.0
"""And the office, that the lease has ended."""
LEFT_BEHIND_S: Final = 0.5
"""How long the rest of a worker's processes are waited for, for its last words."""
PAUSE_S: Final = 0.02
TAIL_BYTES: Final = 1500
"""Of what it said last, in the error."""
PYTHON_WITHIN_S: Final = 20.0
_SIGNALLED: Final = 128


class Words(NamedTuple):
    """What the process is called in the error that says that it is gone."""

    who: str
    work: str
    fresh: str


CALL: Final = Words(
    "the worker", "call", "the next call gets a fresh worker; what functions had kept in memory is gone"
)
CELL: Final = Words(
    "the cell's process",
    "cell",
    "the next cell gets a fresh process; what finished cells left is in the notebook",
)


def start_worker(lease: LeaseHandle, options: Options) -> Guest:
    """Start one. It is not counted as use of the lease; its calls are."""
    check_python(options.python)
    spec = GuestSpec(
        entry=ENTRY,
        imports=IMPORTS,
        python=interpreter_for(lease, options.python),
        cwd=folder_for(lease, options.cwd),
        env=environment(lease, None if options.env is None else dict(options.env)),
        stdio=StdioKind.NULL,
        serves=True,
        name=options.name or "worker",
        device=options.device,
    )
    return start_spec(lease, spec, busy=False, volume=options.volume)


def parked_worker(lease: LeaseHandle) -> Guest | None:
    """The worker that another program left parked, where this lease goes on with it; once. With it come the state of
    its modules and what its functions kept; None where there is none, and then one is started."""
    from sublet.client.guests import Guest, list_guests

    if not lease._takes_up:
        return None
    lease._takes_up = False
    address = lease._fabric.address
    for view in list_guests(address, lease.id, ended=False):
        if view.argv == (ENTRY,) and view.exit_code < 0:
            return Guest(view.id, view.pid, lease.id, address)
    return None


def end_worker(guest: Guest) -> None:
    """Now, whatever it does."""
    with contextlib.suppress(SubletError):
        guest.send_signal(signal.SIGKILL, tree=True)
    guest.close()


@functools.lru_cache(maxsize=32)
def check_python(python: str, needs: str = "") -> None:
    """Raise if this is no Python that can be a worker, or if it has no module ``needs``."""
    if not python:
        return
    if not os.path.isabs(python) or not os.access(python, os.X_OK) or os.path.isdir(python):
        raise InvalidRequest(
            f"python={python!r} is not the path of a program", do="Give the whole path, such as /opt/env/bin/python."
        )
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PYTHON_WITHIN_S,
            check=False,
        )
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        raise InvalidRequest(f"python={python!r} is not a Python", do="Give the path of an interpreter.") from None
    if (major, minor) < (3, 11):
        raise InvalidRequest(f"python={python!r} is Python {major}.{minor}", do="Workers need Python 3.11 or later.")
    if needs and not _has_module(python, needs):
        raise InvalidRequest(f"{python} has no {needs}", do=f"Install it there: {python} -m pip install {needs}")


def _has_module(python: str, module: str) -> bool:
    """Whether it can be found there; where that cannot be told, the start of the guest shows it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        found = subprocess.run(
            [python, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PYTHON_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return found.returncode != 1


def why_lost(lease: LeaseHandle, guest: Guest, when: str = "", words: Words = CALL) -> SubletError:
    """Why a worker's connection broke: with the lease, or with the process."""
    try:
        return _why_lost(lease, guest, when or f"in the middle of the {words.work}", words)
    finally:
        guest.close()  # what it was asked on


def _why_lost(lease: LeaseHandle, guest: Guest, when: str, words: Words) -> SubletError:
    view = _last_view(lease, guest)
    end = lease.end
    reason = None if view is None else _reason_of(view)
    if reason is EndReason.OUT_OF_MEMORY:
        return OutOfMemory(
            f"{words.who} used more memory than its lease has, and was ended (out_of_memory)",
            do=f"Use less at once, or lease more. {words.fresh[0].upper()}{words.fresh[1:]}.",
        )
    if end is None and reason is not None and reason not in (EndReason.GUEST_FAILED, EndReason.OPERATOR):
        end = LeaseEnd(reason=reason, at=rfc3339(time.time_ns()))
    if end is None and view is not None and (view.exit_code == LEASE_ENDED or reason is EndReason.OPERATOR):
        end = end_known_to_office(lease)
    if end is not None:
        return ended_error(lease.id, end)
    if view is None or view.exit_code < 0:
        return WorkerLost(
            f"the connection to {words.who} broke, and its fate is unknown (was the supervisor ended?)",
            do=f"Try again: while the lease lives, {words.fresh}. If that fails as well, see `sublet status`.",
        )
    tail = _tail(guest, view)
    return WorkerLost(
        f"{words.who} ended{_how(view.exit_code)} {when}{tail}",
        exit_code=view.exit_code,
        do=f"The lease lives, and {words.fresh}.",
    )


def _how(exit_code: int) -> str:
    if exit_code == LEASE_ENDED:
        return " as at the end of its lease, of which it had been warned; the lease was renewed too late for it,"
    number = exit_code - _SIGNALLED
    if number <= 0:
        return f" with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        if number == signal.SIGKILL:
            return f" by {name} (it was killed, or the machine was out of memory)"
        return f" by {name}"
    return f" by signal {number}"


def _last_view(lease: LeaseHandle, guest: Guest) -> GuestView | None:
    """What the supervisor says of it once it has seen its end; None where it cannot be asked."""
    began_s = time.monotonic()
    pause_s = PAUSE_S
    while True:
        waited_s = time.monotonic() - began_s
        if lease.end is not None:
            return None
        try:
            view = guest.view()
        except SubletError:
            if waited_s > LEASE_ENDED_S:  # the supervisor is gone as well; the office may still tell of the lease
                return None
        else:
            if view.exit_code >= 0 or waited_s > END_REPORTED_S:
                return view
        time.sleep(pause_s)
        pause_s = min(0.2, 1.5 * pause_s)


def _reason_of(view: GuestView) -> EndReason | None:
    with contextlib.suppress(ValueError):
        return EndReason(view.reason)
    return None


def _is_gone(guest: Guest) -> bool:
    """Whether nothing of it runs any more; it is given a moment."""
    until_s = time.monotonic() + LEFT_BEHIND_S
    while not (is_gone := guest.view().state == GuestState.GONE) and time.monotonic() < until_s:
        time.sleep(PAUSE_S)
    return is_gone


def _tail(guest: Guest, view: GuestView) -> str:
    """The last of what it wrote below Python: there the C library and the interpreter say why they abort."""
    output = b""
    with contextlib.suppress(SubletError, OSError):
        is_gone = _is_gone(guest)  # else a child that it has left behind may be there for long
        for piece in guest.output(offset=max(0, view.log_bytes - TAIL_BYTES), lossless=False, follow=is_gone):
            output += piece.data if piece.stream in ("stderr", "sublet") else b""
    text = output[-TAIL_BYTES:].decode("utf-8", "replace").strip()
    return f". It said last:\n{text}\n" if text else ""


class Options(NamedTuple):
    """Which worker, and how a call of it is made."""

    python: str = ""
    env: tuple[tuple[str, str], ...] | None = None
    cwd: str = ""
    name: str = ""
    timeout_ns: int | None = None
    volume: HasVolume | None = None
    device: int = -1
    """The device of the lease that is the worker's own, by number; -1: none in particular."""

    @property
    def place(self) -> Options:
        """What decides which worker it is."""
        return self._replace(timeout_ns=None, name="")
