"""Runs Python code where a guest would run: a trial of what guests are offered. The code is ours.

    python -m sublet.node.sandbox.trial --serve
    python -m sublet.node.sandbox.trial GPU-1b4e28ba-… nvidia0 "print('inside')"

The first is asked for guests by its standard input, a socket of packets, until the other end is closed. A request is
JSON (``GuestTrial``), with three descriptors: standard input and output of the guest, and a pipe for its exit status. A
guest is started as a supervisor does it: a lease of one card, which has these device files of its own, a control group
with the limits of such a lease, and for profile ``tenant`` the walls. It is ended when the other end of that pipe
is closed. Nothing of it is left.

The second becomes such a guest itself, behind the walls of a tenant, so that suspending can be tried on it. A suspended
process can only be killed, so it makes nothing that would be left behind then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from sublet.errors import Unsupported
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.cgroups_places import enter_child_group
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.lease_limits import OWNER, limits_for
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import choose, pin
from sublet.node.processes.spawn import SpawnPlan, read_failure, spawn
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.sandbox.plan import Ids, SandboxPolicy
from sublet.node.sandbox.walls import SandboxRoom, Walls
from sublet.values import NS_PER_S, Epoch, GuestId, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.cards import VISIBLE, GuestTrial, card_environment
from sublet.wire.codec import loads
from sublet.wire.guests import GuestSpec, Profile
from sublet.wire.orders import Part

SERVE: Final = "--serve"
UNPRIVILEGED: Final = 65_534
HOME: Final = "/tmp/trial"
NOWHERE: Final = "/tmp/trial-office"
"""In the place of an office's folders, which are hidden from guests."""
TENANT: Final = TenantId("trial")
PYTHONPATH: Final = "PYTHONPATH"
ANYTHING_LESS: Final = frozenset(part.value for part in SandboxPart)
"""Whether guests may do without a part is decided where they are started; one that may not is refused there."""
LASTS_NS: Final = 3600 * NS_PER_S
READY: Final = b"!"
REQUEST_MAX: Final = 64 * 1024
GONE_S: Final = 5.0
"""What the guest has started is gone after so long, or a driver keeps it."""
LOOK_S: Final = 0.01


class _TrialWalls(Walls):
    """Of a tenant that has no user number of its own, since it has no office."""

    def ids(self, tenant: TenantId) -> Ids | None:
        return Ids(UNPRIVILEGED, UNPRIVILEGED)


class _TrialLease(LeaseRuntime):
    """A lease of one card, which leaves nothing on the disk."""

    def make_home(self, ids: Ids | None) -> tuple[str, str]:
        return HOME, ""


class _Unwanted(Exception):
    """The process that wanted the guest is gone."""


def _lease(made: type[LeaseRuntime], card: str, tenant: TenantId, now_ns: int = 0) -> LeaseRuntime:
    return made(
        lease=LeaseId("trial"),
        tenant=tenant,
        epoch=Epoch(1, 1),
        parts=(Part(resource=ResourceId(f"trial/{card}"), kind=Kind.GPU, amount=1),),
        deadline_ns=now_ns + LASTS_NS,
        office="trial",
    )


def _walled(lease: LeaseRuntime, nodes: Sequence[str], runtime: str, spec: GuestSpec, *, counted: bool) -> SandboxRoom:
    """The room of a tenant's guest with the card of this lease, which has these files. Raises ``Unsupported``."""
    walls = _TrialWalls(runtime=runtime, state=NOWHERE, policy=SandboxPolicy(allow_missing=ANYTHING_LESS))
    walls.card_nodes = {part.resource: tuple(nodes) for part in lease.parts}
    room = walls.behind(TENANT).room(lease, walls.with_driver(spec, lease), counted=counted)
    if PYTHONPATH in os.environ:  # where our own modules may lie, which the code may use
        room.env[PYTHONPATH] = os.environ[PYTHONPATH]
    return room


# ---- a guest, as a supervisor starts it ----


def run_guest(trial: GuestTrial, wanted: int) -> int:
    """The exit status of the code in such a guest. Where it could not be started, or was killed, the reason is on its
    standard output, and the status is 1. ``wanted``: a pipe whose other end is open as long as the guest is wanted."""
    card, is_local = trial.card, trial.profile == Profile.LOCAL
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    lease = _lease(LeaseRuntime, card, OWNER if is_local else TENANT, now_ns)
    groups = Groups.probe(f"trial-{os.getpid()}")
    folder = f"/tmp/sublet-trial-{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    try:
        limits = limits_for(lease.parts, trial.caps, tenant=lease.tenant)
        lease.open(folder, groups, now_ns, lambda count: choose(count, os.sched_getaffinity(0), ()), limits)
        if is_local:
            room = SandboxRoom(env=dict(os.environ), cwd="/", enter=lambda parent: parent, ids=None)
        else:
            spec = GuestSpec(argv=(sys.executable,), python=sys.executable)
            room = _walled(lease, trial.nodes, folder, spec, counted=groups.has("pids"))
        group = groups.group(lease.lease, GuestId("guest"))
        if group is not None:
            group.create()
        plan = SpawnPlan(
            take_stdio=os.setsid,
            join=group.join_paths() if group is not None else (),
            limit=lambda: pin(lease.pinned),
            enter=room.enter,
            cwd=room.cwd,
            umask=0o022,
            argv=(sys.executable, "-I", "-S", "-c", trial.code, *trial.words),
            env={**room.env, **card_environment({card: 1}, room.env), **lease.environment()},
        )
        return _run_to_end(plan, group, wanted)
    except (OSError, Unsupported) as error:
        sys.stdout.write(f"{error.message if isinstance(error, Unsupported) else error}\n")
        return 1
    finally:
        lease.close(remove_tree, ControlGroup.remove)
        groups.remove()
        remove_tree(folder)


def _await(readable: int, wanted: int) -> None:
    """Raises ``_Unwanted`` if the guest is wanted no more."""
    poll = select.poll()
    poll.register(readable, select.POLLIN)
    poll.register(wanted, 0)  # that its other end was closed is told in any case
    if any(fd == wanted for fd, _ in poll.poll()):
        raise _Unwanted


def _run_to_end(plan: SpawnPlan, group: ControlGroup | None, wanted: int) -> int:
    child = spawn(plan)
    is_reaped = False
    try:
        child.let_run()
        _await(child.failure, wanted)  # until it runs, or could not
        failure = read_failure(child.failure, "it")
        _await(child.pidfd, wanted)
        _, status = os.waitpid(child.pid, 0)
        is_reaped = True
    finally:
        if group is not None:
            group.kill()
        if not is_reaped:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        until_s = time.monotonic() + GONE_S
        while group is not None and not group.is_empty() and time.monotonic() < until_s:
            time.sleep(LOOK_S)
    code = os.waitstatus_to_exitcode(status)
    if failure is not None or code < 0:
        sys.stdout.write(f"{failure if failure is not None else f'it ended with signal {-code}'}\n")
        return 1
    return code


def serve(requests: socket.socket) -> None:
    """Start a guest for each request, in a fork of its own."""
    os.environ.pop(VISIBLE, None)  # a supervisor has none
    enter_child_group()  # as a supervisor that was given a group
    os.write(1, READY)
    while True:
        text, fds, _, _ = socket.recv_fds(requests, REQUEST_MAX, 3)
        if not text:
            return
        if not os.fork():
            _answer(text, fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # one that has told its status


def _answer(text: bytes, fds: Sequence[int]) -> NoReturn:
    try:
        taken, given, tells = fds
        os.dup2(taken, 0)
        os.dup2(given, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
        status = run_guest(loads(GuestTrial, text), tells)
        sys.stdout.flush()
        os.write(tells, str(status).encode())
        os._exit(0)
    finally:
        os._exit(1)


# ---- the program ----


def main(arguments: Sequence[str]) -> NoReturn:
    """The program. Where such a guest could not be started, it says why, and its status is 1."""
    if arguments[0] == SERVE:
        with socket.socket(fileno=0) as requests:
            serve(requests)
        sys.exit(0)
    card, nodes, code, *words = arguments
    lease = _lease(_TrialLease, card, TENANT)
    lease.folder = HOME
    try:
        room = _walled(lease, nodes.split(","), NOWHERE, GuestSpec(entry=f"{__name__}:main"), counted=False)
    except Unsupported as error:
        sys.stdout.write(f"{error.message}\n")
        sys.exit(1)
    room.enter(os.getppid())
    os.chdir(room.cwd)
    os.execve(sys.executable, (sys.executable, "-c", code, *words), room.env | card_environment({card: 1}, room.env))


if __name__ == "__main__":
    main(sys.argv[1:])
