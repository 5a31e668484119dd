"""Prepares a guest's start: environment, stdio, groups, isolation. Everything is checked first, so a bad request
leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sublet.errors import InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.fair_slots import AWAITED
from sublet.node.forked_jobs import ForkedJobs
from sublet.node.loop import Loop
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.lease_limits import limits_for
from sublet.node.processes.lease_runtime import Borrowed, LeaseRuntime
from sublet.node.processes.limits import choose, pin
from sublet.node.processes.logs import GuestLog
from sublet.node.processes.spawn import Child, SpawnPlan, spawn
from sublet.node.processes.stdio import Stdio
from sublet.node.processes.stdio_pipes import child_setup
from sublet.node.processes.trash import HeldMemory, Trash
from sublet.node.processes.tree import Trees, marks_of
from sublet.node.processes.zygote_policy import ZygoteKey, arguments_of, is_python, walled_key
from sublet.node.processes.zygotes import Zygotes
from sublet.node.sandbox import SandboxPlan, remove_tree
from sublet.node.sandbox.carried import TASK, to_text
from sublet.node.sandbox.walls import SandboxRoom, Walls
from sublet.node.storage.stores import Stores
from sublet.values import GuestId, Kind, ResourceId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import COUNT_VARIABLE, OWN_DEVICE, card_environment
from sublet.wire.guests import GuestSpec, Profile, StdioKind
from sublet.wire.orders import card_uuid
from sublet.wire.volumes import PUBLISH_VARIABLE, VOLUME_VARIABLE
from sublet.wire.zygote import WARM_WITHIN_S, Fork, fingerprint, python_argv

ARGUMENTS_MAX: Final = 128 * 1024
"""Bytes of one argument or variable: the kernel's own limit, said in words."""
ARGUMENTS_TOTAL_MAX: Final = 768 * 1024
"""Bytes of all of them together, so that they fit into one message."""
SESSIONS_ENTRY: Final = "sublet.guest.device_service:main"
UNCOUNTED: Final = ("", SESSIONS_ENTRY, "sublet.guest.ranks:main")
"""Guests that do not count what frameworks launch in them: commands, which are any program; sessions, which count
themselves; the parent of one process per device."""
"""The program that is the far end of sessions and nothing else."""
WINDOW_MAX: Final = 4096
"""Rows or columns of a terminal."""
"""After that it goes with the group of its lease."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but the fork."""

    spec: GuestSpec
    loop: Loop
    """An internal error in it ends this guest and no other."""
    plan: SpawnPlan
    stdio: Stdio
    log: GuestLog
    tenant: TenantId
    uid: int | None
    """Whose processes they will be; None: the supervisor's own user."""
    cores: tuple[int, ...] = ()
    """The cores it is pinned to; empty: any."""
    stands_in: bool = False
    """Whether its first process only stands for the command."""
    group: ControlGroup | None = None
    """Made for it."""
    volume: Borrowed | None = None
    """Of another lease, and it may save there."""
    walls: SandboxPlan | None = None
    """Behind which it lives."""


class GuestLauncher:
    """Prepares guests on one machine, and forks them: from a warm interpreter where there is one, else plainly."""

    def __init__(
        self,
        *,
        loop: Loop,
        office: str,
        runtime: str,
        state: str,
        groups: Groups,
        trees: Trees,
        zygotes: Zygotes,
        forked_jobs: ForkedJobs,
        aside: Trash,
        stores: Stores,
        pinned: Callable[[], Iterable[tuple[int, ...]]],
        door: Callable[[], str],
    ) -> None:
        """``pinned``: on which cores leases are kept now, one by one. ``door``: where guests ask for publication;
        opened with the first that may."""
        self._loop = loop.guarded(lambda _: None)
        self._office = office
        self._runtime = runtime
        self.leases: Final = os.path.join(runtime, "leases")
        """Below it each lease that has guests has its folder."""
        self._state = state
        self._groups = groups
        self._walls: Walls | None = None
        self.card_nodes: Mapping[ResourceId, tuple[str, ...]] = {}
        """The device files that each card has for itself, as the office found them."""
        self.card_troubles: Mapping[ResourceId, str] = {}
        """Why a guest of a tenant could not use a card when the office tried that."""
        self.caps = LeaseCaps()
        """Of what a lease does not have, as the office said."""
        self._pinned = pinned
        self.helper_lives: Callable[[int, bool], None] = trees.helper_lives
        """Told of each process that is the supervisor's own, when it was made and when it has ended."""
        self._door = door
        self.forked_jobs = forked_jobs
        self.aside = aside
        self.held = HeldMemory(loop, aside)
        self.stores = stores
        self.zygotes = zygotes
        self.zygotes.subscribe(self.helper_lives)

    @property
    def walls(self) -> Walls:
        """Probed when the first tenant's guest starts, or at the first question: it takes some tens of milliseconds."""
        if self._walls is None:
            self._walls = Walls(runtime=self._runtime, state=self._state)
        self._walls.allow(self.caps.allow_missing)
        self._walls.card_nodes = self.card_nodes
        self._walls.card_troubles = self.card_troubles
        return self._walls

    def make_room(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        spec: GuestSpec,
        then: Callable[[SubletError | None], None],
        volume: Borrowed | None = None,
    ) -> bool:
        """See to the disk and memory of the lease and to the interpreter that a tenant names, which may take a moment,
        and wait for a warm one where the guest would rather: then ``then`` is told. False: nothing has to be waited
        for. Raises for what can be said at once."""
        check_spec(spec)
        if profile is not Profile.TENANT or not self.walls.needs_inspection(spec.python):
            return self._make_room(tenancy, profile, spec, then, volume)

        def on_inspected(found: str | None) -> None:
            try:
                self.walls.on_inspected(spec.python, found)
                if not self._make_room(tenancy, profile, spec, then, volume):
                    then(None)
            except SubletError as error:
                then(error)

        self.forked_jobs.run(
            lambda: self.walls.inspect(spec.python), on_inspected, tenant=tenancy.tenant, by_ns=AWAITED
        )
        return True

    def _make_room(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        spec: GuestSpec,
        then: Callable[[SubletError | None], None],
        volume: Borrowed | None,
    ) -> bool:
        is_walled = profile is Profile.TENANT
        if is_walled:
            spec = self.walls.with_driver(spec, tenancy)
        key = self._zygote(spec, tenancy.tenant, is_walled=is_walled) if spec.patient else None
        if key is None:
            return self._open_stores(tenancy, profile, then, volume)
        if not self.zygotes.ready(key):
            self.zygotes.want(key)

        def and_a_zygote(error: SubletError | None) -> None:
            if error is not None or not self._await(key, then):
                then(error)

        return self._open_stores(tenancy, profile, and_a_zygote, volume) or self._await(key, then)

    def _await(self, key: ZygoteKey, then: Callable[[SubletError | None], None]) -> bool:
        """If one is being made, ``then`` is told when that has come to an end, whichever, or has taken too long."""

        def known() -> None:
            if late.call is not None:
                late.cancel()
                then(None)

        late = self._loop.after(WARM_WITHIN_S, lambda: then(None))
        is_coming = self.zygotes.call_when_known(key, known)
        if not is_coming:
            late.cancel()
        return is_coming

    def _open_stores(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        then: Callable[[SubletError | None], None],
        volume: Borrowed | None,
    ) -> bool:
        ids = self.walls.ids(tenancy.tenant) if profile is Profile.TENANT else None
        if volume is None:
            return self.stores.open(tenancy, ids, then)

        def and_the_volume(error: SubletError | None) -> None:
            try:
                if error is not None or not self.stores.open(volume.tenancy, ids, then):
                    then(error)
            except SubletError as refused:
                then(refused)

        return self.stores.open(tenancy, ids, and_the_volume) or self.stores.open(volume.tenancy, ids, then)

    def prepare(
        self,
        tenancy: LeaseRuntime,
        profile: Profile,
        spec: GuestSpec,
        guest: GuestId,
        *,
        log: Callable[[], GuestLog],
        on_done: Callable[[], None],
        loop: Loop,
        volume: Borrowed | None = None,
    ) -> Prepared:
        """Raises ``InvalidRequest`` or ``Unsupported`` before anything is made. Whatever it raises, nothing of the
        guest's own stays; what is the lease's does, and is used by the next one."""
        check_spec(spec)
        gpus = [part for part in tenancy.parts if part.kind is Kind.GPU]
        if spec.device >= len(gpus):
            raise InvalidRequest(
                f"the lease has no device of number {spec.device}: it has {len(gpus)}, counted from 0",
                do="Name one of them, or none.",
            )
        behind = self.walls.behind(tenancy.tenant) if profile is Profile.TENANT else None
        if behind is not None:
            spec = self.walls.with_driver(spec, tenancy)
        if not tenancy.folder:
            self.held.check(tenancy.tenant)
            lease_group = self._groups.group(tenancy.lease)
            self.held.make_way(lease_group)
            self.aside.make_way(lease_group)
        limits = limits_for(tenancy.parts, self.caps, tenant=tenancy.tenant, cores_max=self.caps.office_cores)
        tenancy.open(self.leases, self._groups, self._loop.now_ns(), self._cores, limits)
        tenancy.others += spec.entry != SESSIONS_ENTRY
        marks = {**tenancy.environment(), **marks_of(self._office, tenancy.lease, guest)}
        if behind is not None and os.path.dirname(tenancy.segment) not in tenancy.writable:
            marks.pop("SUBLET_MEMORY", None)  # a descriptor of ours, which it cannot see from where it lives
        lent = volume.tenancy.blocks[:1] if volume is not None else ()
        door = self._door() if lent or tenancy.blocks else ""
        if door:
            marks[PUBLISH_VARIABLE] = door
            marks[VOLUME_VARIABLE] = (*lent, *tenancy.blocks)[0]
        group = self._groups.group(tenancy.lease, guest)
        with contextlib.ExitStack() as undo:
            if group is not None:
                undo.callback(group.remove)
                group.create()
            kept = log()
            stdio = _stdio(spec, loop, kept, on_done)
            undo.callback(stdio.close)
            ends = stdio.child
            if behind is not None:
                room = behind.room(tenancy, spec, counted=self._groups.has("pids"), lent=lent, door=door)
                if room.ids is not None:
                    stdio.give_to(*room.ids)
            else:
                room = SandboxRoom(env=dict(spec.env), cwd=spec.cwd or "/", enter=_stay, ids=None)
            room.env.pop(OWN_DEVICE, None)  # of another guest, that is this one's holder
            if spec.device >= 0:
                marks[OWN_DEVICE] = str(spec.device)
            shares = {uuid: part.amount for part in gpus if (uuid := card_uuid(part.resource))}
            own = card_uuid(gpus[spec.device].resource) if spec.device >= 0 else ""
            room.env.pop(COUNT_VARIABLE, None)
            if shares and self.caps.count_launches and spec.entry not in UNCOUNTED:
                marks[COUNT_VARIABLE] = "1"
            plan = SpawnPlan(
                take_stdio=lambda: child_setup(ends),
                join=group.join_paths() if group is not None else (),
                limit=lambda: pin(tenancy.pinned),
                enter=room.enter,
                cwd=room.cwd,
                umask=spec.umask,
                argv=_argv(spec),
                env={**room.env, **card_environment(shares, room.env, own), **marks},
            )
            undo.pop_all()
        uid = room.ids.uid if room.ids is not None else None
        return Prepared(
            spec=spec,
            loop=loop,
            plan=plan,
            stdio=stdio,
            log=kept,
            tenant=tenancy.tenant,
            uid=uid,
            cores=tenancy.pinned,
            stands_in=room.stands_in,
            group=group,
            volume=volume,
            walls=room.plan,
        )

    def undo(self, prepared: Prepared) -> None:
        """It has never run: what was made for it goes."""
        prepared.stdio.close()
        self.remove(prepared.log.folder)
        if prepared.group is not None:
            self.aside.leave(prepared.group)  # a child that came from a warm interpreter may be in it

    def _cores(self, count: int) -> tuple[int, ...]:
        return choose(count, os.sched_getaffinity(0), self._pinned())

    def fork(self, prepared: Prepared, forked: Callable[[Child | OSError], None]) -> None:
        """Make the process; it waits for ``let_run``. From a warm interpreter it comes a moment later."""
        key = self._zygote(prepared.spec, prepared.tenant, is_walled=prepared.walls is not None)
        if key is not None:
            if self.zygotes.ready(key):
                self._fork_warm(key, prepared, forked)
                return
            self.zygotes.want(key)
        forked(_forked(prepared.plan))

    def _zygote(self, spec: GuestSpec, tenant: TenantId, *, is_walled: bool) -> ZygoteKey | None:
        """From which warm interpreter it should come; None where a fresh one is needed."""
        key = _warm(spec, self.walls.driver if is_walled else None)
        return self.zygotes.for_tenant(key, tenant) if key is not None and is_walled else key

    def _fork_warm(self, key: ZygoteKey, prepared: Prepared, forked: Callable[[Child | OSError], None]) -> None:
        spec, plan, child = prepared.spec, prepared.plan, prepared.stdio.child
        fork = Fork(
            argv=arguments_of(spec.argv) or () if spec.argv else (),
            entry=spec.entry,
            args=spec.args or "{}",
            env=dict(plan.env),
            cwd=plan.cwd,
            umask=plan.umask,
            terminal=spec.stdio is StdioKind.PTY,
            walls="" if prepared.walls is None else to_text(prepared.walls),
            enter="" if prepared.walls is None else TASK,
        )
        groups: list[int] = []

        def done(found: Child | SubletError) -> None:
            if isinstance(found, Child):
                pin(prepared.cores, found.pid)  # it waits, and has one thread
            forked(_forked(plan) if isinstance(found, SubletError) else found)

        try:
            for path in plan.join:
                groups.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401 - each is closed, if one fails
            self.zygotes.fork(key, fork, (child.stdin, child.stdout, child.stderr), done, groups=groups)
        except OSError as error:  # no descriptor left, or the group went: nothing was asked yet
            forked(error)
        finally:
            for fd in groups:
                os.close(fd)

    def remove(self, folder: str) -> None:
        """Take away what was kept of a guest."""
        with contextlib.suppress(OSError):  # what is left costs space, and no guest may fail for it
            remove_tree(folder)


def _forked(plan: SpawnPlan) -> Child | OSError:
    try:
        return spawn(plan)
    except OSError as error:
        return error


def _warm(spec: GuestSpec, driver: str | None) -> ZygoteKey | None:
    """Which warm interpreter would do; None where a fresh one is needed, or was not asked to be warm. ``driver``: what
    ``Walls.driver`` is, for a guest of a tenant."""
    if driver is not None:
        return walled_key(spec.entry, spec.python, spec.imports, spec.env, driver)
    if spec.argv:
        if not (spec.imports and is_python(spec.argv[0]) and arguments_of(spec.argv)):
            return None
        python = _found_on(spec.argv[0], spec.env.get("PATH", os.defpath))
    else:
        python = spec.python or sys.executable
    return ZygoteKey(python, spec.imports, fingerprint(spec.env)) if python else None


def _found_on(program: str, path: str) -> str:
    """Where a shell would find it; empty if nowhere."""
    if os.sep in program:
        return program
    found = (os.path.join(folder, program) for folder in path.split(os.pathsep))
    return next((file for file in found if os.access(file, os.X_OK)), "")


def _argv(spec: GuestSpec) -> tuple[str, ...]:
    """A Python callable runs in its interpreter, which is lent the part of Sublet that a guest needs."""
    if not spec.entry:
        return spec.argv
    return python_argv(spec.python or sys.executable, "sublet.guest.bootstrap", spec.entry, spec.args or "{}")


def _stay(parent: int) -> int:
    """Profile ``local``: the same user, nothing hidden."""
    return parent


def _stdio(spec: GuestSpec, loop: Loop, log: GuestLog, on_done: Callable[[], None]) -> Stdio:
    if spec.serves:
        return Stdio.serving(loop, log, on_done)
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
    if spec.serves and spec.stdio is not StdioKind.NULL:
        raise InvalidRequest("a guest that takes connections has no stdin", do='Start it with stdio="null".')
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
