"""Runs Python code where a guest would run: a trial of what guests are offered. The code is ours.

    python -m sublet.node.sandbox.trial --guest local 4711 GPU-1b4e28ba-… nvidia0 "print('inside')"
    python -m sublet.node.sandbox.trial GPU-1b4e28ba-… nvidia0 "print('inside')"

The first starts a guest of profile ``local`` or ``tenant`` as a supervisor does: a lease of one card, which has these
device files of its own, a control group with the limits of such a lease, and for ``tenant`` the walls. It waits for the
guest's end, or ends it when the process that started this one (4711) is gone, and leaves nothing.

The second becomes a guest behind the walls of a tenant, for who suspends it: what is suspended can only be killed, so
nothing is made that would be left then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from sublet.errors import Unsupported
from sublet.node.prctl import ParentGone, set_pdeathsig
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
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import card_environment
from sublet.wire.guests import GuestSpec, Profile
from sublet.wire.orders import Part

GUEST: Final = "--guest"
UNPRIVILEGED: Final = 65_534
HOME: Final = "/tmp/trial"
NOWHERE: Final = "/tmp/trial-office"
"""In the place of an office's folders, which are hidden from guests."""
TENANT: Final = TenantId("trial")
PYTHONPATH: Final = "PYTHONPATH"
ANYTHING_LESS: Final = frozenset(part.value for part in SandboxPart)
"""Whether guests may do without a part is decided where they are started; one that may not is refused there."""
LASTS_NS: Final = 3600 * NS_PER_S
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


class _Ended(Exception):
    """The process that wanted the trial is gone."""


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


def run_guest(profile: Profile, parent: int, card: str, nodes: Sequence[str], code: str, words: Sequence[str]) -> int:
    """The exit status of the code in such a guest. Where it could not be started, or was ended, it says why on its
    standard output, and the status is 1."""
    signal.signal(signal.SIGTERM, _end)
    set_pdeathsig(signal.SIGTERM, parent)
    enter_child_group()  # as a supervisor that was given a group
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    lease = _lease(LeaseRuntime, card, OWNER if profile is Profile.LOCAL else TENANT, now_ns)
    groups = Groups.probe(f"trial-{os.getpid()}")
    folder = f"/tmp/sublet-trial-{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    try:
        limits = limits_for(lease.parts, LeaseCaps(), tenant=lease.tenant)
        lease.open(folder, groups, now_ns, lambda count: choose(count, os.sched_getaffinity(0), ()), limits)
        if profile is Profile.LOCAL:
            room = SandboxRoom(env=dict(os.environ), cwd="/", enter=lambda parent: parent, ids=None)
        else:
            spec = GuestSpec(argv=(sys.executable,), python=sys.executable)
            room = _walled(lease, nodes, folder, spec, counted=groups.has("pids"))
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
            argv=(sys.executable, "-I", "-S", "-c", code, *words),
            env={**room.env, **card_environment({card: 1}, room.env), **lease.environment()},
        )
        return _run_to_end(plan, group)
    except Unsupported as error:
        sys.stdout.write(f"{error.message}\n")
        return 1
    finally:
        lease.close(remove_tree, ControlGroup.remove)
        groups.remove()
        remove_tree(folder)


def _end(*_: object) -> NoReturn:
    raise _Ended


def _run_to_end(plan: SpawnPlan, group: ControlGroup | None) -> int:
    child = spawn(plan)
    is_reaped = False
    try:
        child.let_run()
        poll = select.poll()
        poll.register(child.failure)
        poll.poll()  # until it runs, or could not
        failure = read_failure(child.failure, "it")
        _, status = os.waitpid(child.pid, 0)
        is_reaped = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left to do is done to its end
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


# ---- the program ----


def main(arguments: Sequence[str]) -> NoReturn:
    """The program. Where such a guest could not be started, it says why, and its status is 1."""
    if arguments[0] == GUEST:
        _, profile, parent, card, nodes, code, *words = arguments
        try:
            status = run_guest(Profile(profile), int(parent), card, nodes.split(","), code, words)
        except (_Ended, ParentGone):
            status = 1
        sys.exit(status)
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
