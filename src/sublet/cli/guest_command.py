"""Shared by `run` and `exec`: starts a command as a guest with our folder, environment, umask and terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import FAILED, print_error
from sublet.cli.messages import Json, is_older, message, read
from sublet.cli.parsing import duration
from sublet.cli.terminal import size_of
from sublet.errors import InvalidRequest, SubletError
from sublet.values import NS_PER_S

if TYPE_CHECKING:
    from sublet.cli.attach import Attendance
    from sublet.cli.direct_request import Direct
    from sublet.wire.conversation import Conversation


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"{text[:40]!r} is not NAME=VALUE", do="Write it as --env NAME=VALUE.")
    return name, value


Env = Annotated[
    list[tuple[str, str]],
    Opt("--env", metavar="NAME=VALUE", parse=_pair, help="Environment variable for the command. Repeatable."),
]
GuestName = Annotated[str | None, Opt("--name", metavar="NAME", help="Name in listings.")]
Grace = Annotated[
    float | None,
    Opt("--grace", metavar="DURATION", parse=duration, help="Time between SIGTERM and SIGKILL (default: 5s)."),
]
Tty = Annotated[bool, Opt("--tty", "-t", help="Allocate a pty even if stdout is not a terminal.")]
NoTty = Annotated[bool, Opt("--no-tty", "-T", help="Use pipes even if stdin and stdout are a terminal.")]
CommandWords = Annotated[
    list[str], Arg("COMMAND", is_rest=True, help="Command and its arguments; `--` before it is optional.")
]


NOT_FOUND: Final = 127
"""The exit status of a command that is not there, as in a shell."""
_SIGPIPE: Final = 128 + 13
"""And of one that this signal has ended. (To load the module ``signal`` takes a millisecond.)"""


class CommandNotStarted(SubletError):
    """The command could not be run; nothing of it is left."""

    def __init__(self, message: str, *, do: str, exit_code: int) -> None:
        super().__init__(message, do=do)
        self.exit_code = exit_code


def spec_of(
    words: Sequence[str],
    *,
    tenant: str,
    env: Sequence[tuple[str, str]],
    name: str | None,
    grace: float | None,
    terminal: bool,
) -> Json:
    """What to run. A guest of another tenant's begins with an empty environment, so ours stays here."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise InvalidRequest("the folder this was called from is gone", do="`cd` into one that exists.") from None
    rows, cols = size_of(sys.stdout.fileno()) if terminal else (24, 80)
    spec: Json = {
        "argv": list(words),
        "cwd": folder,
        "env": _environment(tenant, env, terminal=terminal),
        "stdio": "pty" if terminal else "pipes",
        "rows": rows,
        "cols": cols,
        "name": name or "",
        "umask": _umask(),
    }
    if grace is not None:
        spec["grace_ns"] = round(grace * NS_PER_S)
    return spec


def per_device_spec(spec: Json, *, tenant: str) -> Json:
    """The same command as one process for each device of its lease; the guest's first process starts them."""
    import json

    from sublet.lease.ranks import ENTRY, GRACE_S
    from sublet.wire.cards import VISIBLE

    args = {"argv": spec["argv"], "grace_s": spec["grace_ns"] / NS_PER_S if "grace_ns" in spec else GRACE_S}
    python = spec.get("python") or ("" if tenant == "local" else sys.executable)
    env = {name: value for name, value in spec["env"].items() if name != VISIBLE}  # each has a card of its own
    return {**spec, "argv": [], "entry": ENTRY, "args": json.dumps(args), "python": python, "env": env}


def wants_terminal(tty: bool, no_tty: bool) -> bool:
    """One on both sides, or what was said. Without a terminal to read from there is none to hand through."""
    _have_all_three()
    if tty and no_tty:
        raise UsageError("--tty and --no-tty contradict each other", do="Give one of them.")
    if tty and not os.isatty(0):
        raise UsageError("--tty needs a terminal to read from, and stdin is not one", do="Leave it out.")
    if no_tty or not os.isatty(0):
        return False
    return (tty or os.isatty(1)) and os.tcgetpgrp(0) == os.getpgrp()


def start(direct: Direct, token: str, spec: Json, *, on_host: bool = False) -> tuple[Conversation, Attendance]:
    """Run it under the lease of this token, and be attached. ``on_host``: the lease is of a host device."""
    from sublet.cli.attach import Attendance

    conversation = direct.connect_data(capability=token)
    try:
        answer = _started(conversation, spec)
        if answer["is"] == "NotStarted":
            raise _not_started(answer, (spec["argv"] or [spec["entry"]])[0], on_host=on_host)
        attendance = Attendance(conversation, answer["guest"], terminal=spec["stdio"] == "pty")
        attendance.attach()
    except BaseException:
        conversation.close()
        raise
    return conversation, attendance


def _not_started(answer: Json, program: str, *, on_host: bool) -> CommandNotStarted:
    """The supervisor's answer, with a better hint where a program is known to be called otherwise here."""
    failed = CommandNotStarted(answer["message"], do=answer["do"], exit_code=int(answer["exit_code"]))
    if failed.exit_code != NOT_FOUND:
        return failed
    from shutil import which

    from sublet.devices.no_gpu import NO_GPU_PROGRAMS

    if on_host and os.path.basename(program) in NO_GPU_PROGRAMS:
        failed.do = "This lease is of a host device, which is a CPU; `sublet top` shows what it is used for."
    elif program == "python" and which("python3"):
        failed.do = "Did you mean python3? This machine has no `python`."
    return failed


def _started(conversation: Conversation, spec: Json) -> Json:
    """The answer. A supervisor from before an upgrade cannot make the command wait until a reader is attached: then of
    one that says more at once than is kept the beginning may be lost, as it always was."""
    try:
        return read(conversation.call(message("Start", spec=spec, awaits=True)).body)
    except InvalidRequest as refused:
        if not is_older(refused):
            raise
    return read(conversation.call(message("Start", spec=spec)).body)


def with_what_was_lost(attendance: Attendance, code: int) -> int:
    """The exit status once more: output that could not be written here is no success, and is said."""
    if not attendance.unwritten:
        return code
    message = f"output of the command could not be written: {attendance.unwritten}"
    print_error(SubletError(message, do="Make room, and run it again."), as_json=False)
    return FAILED if code in (0, _SIGPIPE) else code  # with that signal we have ended the command


def _environment(tenant: str, extra: Sequence[tuple[str, str]], *, terminal: bool) -> dict[str, str]:
    found: Mapping[str, str] = os.environ if tenant == "local" else {}
    env = {**found, **dict(extra)}
    if terminal and "TERM" in os.environ:
        env.setdefault("TERM", os.environ["TERM"])
    return env


def _have_all_three() -> None:
    """Where one of the three is closed, the next file or socket would take its number and be mistaken for it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
