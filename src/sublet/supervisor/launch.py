"""What a guest gets when it starts: environment, stdio, groups, and how far it is kept apart. Checked before anything
is made, so that a bad request leaves nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sublet.errors import InvalidRequest, Unsupported
from sublet.supervisor.cgroups import Groups
from sublet.supervisor.ends import child_setup
from sublet.supervisor.limits import pin
from sublet.supervisor.logs import GuestLog
from sublet.supervisor.loop import Loop
from sublet.supervisor.spawn import SpawnPlan
from sublet.supervisor.stdio import Stdio
from sublet.supervisor.tenancy import Tenancy
from sublet.supervisor.tree import marks_of
from sublet.values import GuestId
from sublet.wire.guests import GuestSpec, Profile, StdioKind

__all__ = ["Launch", "Prepared", "check_spec"]

ARGUMENTS_MAX: Final = 128 * 1024
"""Bytes of one argument or variable: the kernel's own limit, said in words."""
ARGUMENTS_TOTAL_MAX: Final = 768 * 1024
"""Bytes of all of them together, so that they fit into one message."""
WINDOW_MAX: Final = 4096
"""Rows or columns of a terminal."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but the fork."""

    plan: SpawnPlan
    stdio: Stdio
    log: GuestLog
    uid: int | None
    """Whose processes they will be; None: the supervisor's own user."""


class Launch:
    """Prepares guests on one machine."""

    def __init__(self, *, loop: Loop, office: str, folder: str, groups: Groups, package: str) -> None:
        self._loop = loop
        self._office = office
        self._folder = folder
        """Of the leases, in the runtime folder."""
        self._groups = groups
        self._package = package
        """Where ``sublet`` lies, for interpreters that do not have it."""

    def prepare(
        self,
        tenancy: Tenancy,
        profile: Profile,
        spec: GuestSpec,
        guest: GuestId,
        log: Callable[[], GuestLog],
        on_done: Callable[[], None],
    ) -> Prepared:
        """Raises ``InvalidRequest`` or ``Unsupported`` before anything is made."""
        check_spec(spec)
        if profile is not Profile.LOCAL:
            raise Unsupported(
                "guests of tenants other than `local` need the isolation profile, which is not wired in yet",
                do="Start it as the local user.",
            )
        tenancy.open(self._folder, self._groups, self._loop.now_ns())
        join: list[str] = []
        group = self._groups.group(tenancy.lease, guest)
        if group is not None:
            group.create()
            join = group.join_paths()
        kept = log()
        stdio = _stdio(spec, self._loop, kept, on_done)
        ends = stdio.child
        env = {**spec.env, **tenancy.environment(), **marks_of(self._office, tenancy.lease, guest)}
        plan = SpawnPlan(
            take_stdio=lambda: child_setup(ends),
            join=join,
            limit=lambda: pin(tenancy.pinned),
            enter=_stay,
            cwd=spec.cwd or "/",
            umask=spec.umask,
            argv=self._argv(spec),
            env=env,
        )
        return Prepared(plan, stdio, kept, None)

    def remove(self, folder: str) -> None:
        """Take away what was kept of a guest."""
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            os.unlink(os.path.join(folder, name))
        if os.path.isdir(folder):
            os.rmdir(folder)

    def _argv(self, spec: GuestSpec) -> tuple[str, ...]:
        """A Python entry point runs in its interpreter, which finds the part of Sublet that a guest needs last on its
        path, so that its own packages come first."""
        if not spec.entry:
            return spec.argv
        code = f"import sys; sys.path.append({self._package!r}); from sublet.guest.bootstrap import main; main()"
        return (spec.python or sys.executable, "-c", code, spec.entry, spec.args or "{}")


def _stay() -> None:
    """Profile ``local``: the same user, nothing hidden."""


def _stdio(spec: GuestSpec, loop: Loop, log: GuestLog, on_done: Callable[[], None]) -> Stdio:
    match spec.stdio:
        case StdioKind.PTY:
            return Stdio.pty(loop, log, on_done, rows=spec.rows, cols=spec.cols)
        case StdioKind.NULL:
            return Stdio.null(loop, log, on_done)
        case _:
            return Stdio.pipes(loop, log, on_done)


def check_spec(spec: GuestSpec) -> None:
    """Whether it can be run at all, as far as its text says."""
    if bool(spec.argv) == bool(spec.entry):
        raise InvalidRequest("a guest runs a command or a Python callable", do="Give one of the two.")
    if spec.argv and not spec.argv[0]:
        raise InvalidRequest("the command has no name", do="Say what to run.")
    for text in (*spec.argv, spec.entry, spec.args, spec.python, spec.cwd, spec.name):
        _check_text(text, "an argument")
    _check_env(spec.env)
    total = sum(map(len, spec.argv)) + sum(len(name) + len(value) for name, value in spec.env.items())
    if total > ARGUMENTS_TOTAL_MAX:
        raise InvalidRequest(
            f"arguments and environment have {total} bytes, and at most {ARGUMENTS_TOTAL_MAX} are taken",
            do="Pass large things in files.",
        )
    if not (1 <= spec.rows <= WINDOW_MAX and 1 <= spec.cols <= WINDOW_MAX):
        raise InvalidRequest(f"a terminal of {spec.rows} rows and {spec.cols} columns", do="Use 1 to 4096 of each.")
    if not 0 <= spec.umask <= 0o777:
        raise InvalidRequest(f"{spec.umask:#o} is not a umask", do="Use 0 to 0o777.")
    if spec.cwd and not os.path.isabs(spec.cwd):
        raise InvalidRequest(f"the working folder {spec.cwd!r} is not absolute", do="Give the whole path.")
    if spec.grace_ns < 0:
        raise InvalidRequest("a grace cannot be negative", do="Leave it out, or give a duration.")


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"{name!r} is not the name of a variable", do="Write NAME=VALUE.")
        _check_text(name, "a variable's name")
        _check_text(value, f"the variable {name}")


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidRequest(f"{what} has a zero byte in it", do="Take it out.")
    if len(os.fsencode(text)) >= ARGUMENTS_MAX:
        raise InvalidRequest(f"{what} has {ARGUMENTS_MAX} bytes or more", do="Pass large things in files.")
