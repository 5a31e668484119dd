"""The isolation of a tenant's guest: user, namespaces, home, and environment."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from sublet.errors import Unsupported
from sublet.lazy_dataclass import dataclass
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.sandbox import (
    Blocks,
    Ids,
    SandboxPart,
    SandboxPlan,
    SandboxPolicy,
    SandboxRefusal,
    Uids,
    Wish,
    clean_env,
    enter,
    plan,
)
from sublet.node.sandbox import SandboxProfile as IsolationProfile
from sublet.node.sandbox.plan import SYSTEM_PATHS
from sublet.values import Kind, ResourceId, TenantId
from sublet.wire.cards import device_nodes
from sublet.wire.guests import GuestSpec
from sublet.wire.orders import card_uuid
from sublet.wire.unix import replaceable

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Where our own modules lie, of which a guest's interpreter is lent what it needs."""

CONFIG_MAX = 16 * 1024
"""Bytes of a ``pyvenv.cfg`` that are read."""
DEPTH_MAX = 4
"""Virtual environments that stand on one another."""
SEEN_MAX = 256
"""Interpreters of which it is remembered."""
LIBRARY = "libcuda.so.1"
LIBRARY_PATH = "LD_LIBRARY_PATH"


@dataclass(frozen=True, slots=True)
class SandboxRoom:
    """Where one guest lives."""

    env: dict[str, str]
    cwd: str
    enter: Callable[[int], int]
    ids: Ids | None
    stands_in: bool = False
    """Whether the process that is forked only stands for the command, which is in a namespace of its own."""
    plan: SandboxPlan | None = None
    """What ``enter`` builds; None: nothing."""


class Walls:
    """What this machine can build, and the user numbers of the tenants."""

    def __init__(self, *, runtime: str, state: str, policy: SandboxPolicy | None = None) -> None:
        self._seen: dict[str, tuple[str, ...]] = {}
        own = os.path.dirname(os.path.dirname(sys.executable))
        self._own = (own, os.path.realpath(own))
        from sublet.node.sandbox.probe import probe_abilities

        self.abilities = probe_abilities()
        self.policy = policy or SandboxPolicy()
        self._hidden = (runtime, state, os.path.expanduser("~"))
        self._uids: Uids | None = None
        self._has_looked = False
        self.driver = ""
        """The folder of the driver's libraries, once a guest with cards was to be shown it; see ``driver_folder``."""
        self.card_nodes: Mapping[ResourceId, tuple[str, ...]] = {}
        """The device files that each card has for itself, as the office found them."""
        self.card_troubles: Mapping[ResourceId, str] = {}
        """Why a guest of a tenant could not use a card when the office tried that."""
        if self.abilities.has(SandboxPart.UID):
            self._uids = Uids(os.path.join(state, "uids"), blocks=Blocks.of_machine())

    def allow(self, missing: tuple[str, ...]) -> None:
        """From now on guests may do without these, as the operator says."""
        self.policy = replace(self.policy, allow_missing=frozenset(missing))

    def behind(self, tenant: TenantId) -> _Behind:
        """For one tenant. Raises ``Unsupported`` if a wall that must stand cannot be built here."""
        ids = self.ids(tenant)
        self.plan(Wish(folder="/", tenant=tenant, ids=ids))
        return _Behind(self, tenant, ids)

    def ids(self, tenant: TenantId) -> Ids | None:
        """Whose the files of this tenant's guests are; None: our own user's."""
        return self._uids.ids(tenant) if self._uids is not None else None

    def plan(self, wish: Wish, policy: SandboxPolicy | None = None) -> SandboxPlan:
        """The steps for one guest."""
        found = plan(IsolationProfile.TENANT, self.abilities, wish, policy or self.policy)
        if isinstance(found, SandboxRefusal):
            raise found.error()
        return found

    # ---- interpreters that tenants name ----

    def needs_inspection(self, python: str) -> bool:
        """Whether it has to be inspected before each guest of a tenant that is given it: users that may read it may
        have changed it. A guest is shown our own installation anyway, and the system's."""
        is_named = os.path.isabs(python) and os.path.dirname(os.path.dirname(os.path.normpath(python))) != "/usr"
        return is_named and python != sys.executable

    def inspect(self, python: str) -> str:
        """Look at it, which may take as long as its file system likes: not in the supervisor's own process. What was
        found is for ``on_inspected``."""
        try:
            return json.dumps({"prefixes": prefix_of(python, self._hidden)})
        except Unsupported as error:
            return json.dumps({"message": error.message, "do": error.do})

    def on_inspected(self, python: str, found: str | None) -> None:
        """What ``inspect`` has found; None if it came to no end. Raises ``Unsupported`` where it may not be shown."""
        self._seen.pop(python, None)
        if found is None:
            raise Unsupported(
                f"the interpreter {python} could not be looked at", do="Use one of the system's (/usr/bin/python3)."
            )
        answer = json.loads(found)
        if "message" in answer:
            raise Unsupported(answer["message"], do=answer["do"])
        while len(self._seen) >= SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[python] = tuple(answer["prefixes"])

    def shown_with(self, python: str) -> tuple[str, ...]:
        """The folders that a guest is shown because it runs in this interpreter, as they were seen."""
        if python == sys.executable:
            return self._own
        if not self.needs_inspection(python):
            return ()
        seen = self._seen.get(python)
        if seen is None:
            raise Unsupported(f"the interpreter {python} was not looked at", do="Start the guest again.")
        return seen

    def nodes(self, tenancy: LeaseRuntime) -> tuple[str, ...]:
        """Device files of its cards. Raises ``Unsupported`` where they are not found: it would see no card at all."""
        cards = [part.resource for part in tenancy.parts if card_uuid(part.resource)]
        for card in cards:
            if trouble := self.card_troubles.get(card):
                raise Unsupported(
                    f"a guest of a tenant cannot use {card_uuid(card)}, as was found when it was tried out: {trouble}",
                    do="`sublet doctor --gpu` tries it again; once it can, start the office again.",
                )
        found = device_nodes([self.card_nodes.get(card, ()) for card in cards]) if cards else ()
        if cards and not found:
            raise Unsupported(
                f"the device files of {card_uuid(cards[0])} cannot be found, so a guest of a tenant would see no GPU",
                do="Look for /dev/nvidia* (`nvidia-modprobe -u -c0` makes them) and, for a part of a card (MIG), "
                "/dev/nvidia-caps; then start the office again.",
            )
        return found

    def with_driver(self, spec: GuestSpec, tenancy: LeaseRuntime) -> GuestSpec:
        """The guest, told where the driver's libraries are if the loader does not find them by itself. Raises
        ``Unsupported`` where it may not be shown them."""
        if not any(card_uuid(part.resource) for part in tenancy.parts):
            return spec
        if not self._has_looked:
            self.driver = driver_folder(os.environ.get(LIBRARY_PATH, ""), self._hidden)
            self._has_looked = True
        if not self.driver:
            return spec
        own = spec.env.get(LIBRARY_PATH, "")
        return replace(spec, env={**spec.env, LIBRARY_PATH: f"{own}:{self.driver}" if own else self.driver})

    @property
    def hidden(self) -> tuple[str, ...]:
        """Folders that no guest of a tenant may see."""
        return self._hidden


class _Behind:
    """The walls for guests of one tenant."""

    def __init__(self, walls: Walls, tenant: TenantId, ids: Ids | None) -> None:
        self._walls = walls
        self._tenant = tenant
        self._ids = ids

    def room(
        self, tenancy: LeaseRuntime, spec: GuestSpec, *, counted: bool, lent: tuple[str, ...] = (), door: str = ""
    ) -> SandboxRoom:
        """Home and temporary files are the guest's own memory, and go with it. ``lent``: folders of another lease;
        ``door``: where it may ask for publication."""
        home, counts = tenancy.make_home(self._ids)
        readable = {tenancy.page_path, sys.prefix, sys.base_prefix, *self._walls.shown_with(spec.python)}
        readable |= {door} if door else set()
        nodes = self._walls.nodes(tenancy)
        readable |= {self._walls.driver} if nodes and self._walls.driver else set()
        if spec.entry:  # which is ours, wherever it is installed
            readable.add(PACKAGE)
        steps = self._walls.plan(
            Wish(
                folder=home,
                tenant=self._tenant,
                ids=self._ids,
                readable=tuple(sorted(readable)),
                writable=(*tenancy.writable, *lent),
                written=(counts,) if counts else (),
                hidden=self._walls.hidden,
                devices=nodes,
                counted=counted,
            ),
            policy_for(tenancy, self._walls.policy, lends=bool(lent)),
        )
        term = spec.env.get("TERM", "dumb")
        env = clean_env(self._tenant, home=home, term=term, extra=spec.env)
        return SandboxRoom(
            env, spec.cwd or home, lambda parent: enter(steps, parent=parent), self._ids, steps.forks, steps
        )


def policy_for(tenancy: LeaseRuntime, policy: SandboxPolicy, *, lends: bool = False) -> SandboxPolicy:
    """The same for the guests of one lease: nothing that they can fill is larger than what the lease may use.

    Where a control group caps memory, what lies in these folders is counted there. Where none does it is not counted
    at all, so that each of the four has only its part. ``lends``: it may write to the volume of another lease.
    """
    limits = tenancy.limits
    if not limits.memory_bytes:
        return policy
    each = limits.memory_bytes if "memory" not in tenancy.unlimited else limits.memory_bytes // 4
    blocks = [part.amount for part in tenancy.parts if part.kind is Kind.BLOCK]
    return replace(
        policy,
        tmp_bytes=min(policy.tmp_bytes, each),
        shm_bytes=min(policy.shm_bytes, each),
        home_bytes=min(limits.home_bytes or policy.home_bytes, each),
        file_bytes=policy.file_bytes or (0 if lends else max([limits.memory_bytes, *blocks])),
        processes_max=limits.pids_max or policy.processes_max,
    )


def driver_folder(paths: str, hidden: Iterable[str]) -> str:
    """The folder in which the loader finds the driver's libraries by ``LD_LIBRARY_PATH`` (``paths``), links followed;
    empty where that names none, and the loader finds them by itself or not at all.

    A guest of a tenant has nothing of the supervisor's environment, and is shown this one folder. So all users must be
    able to read it, with nothing hidden in it, and no other user to change it. Raises ``Unsupported``.
    """
    named = (folder for folder in paths.split(":") if os.path.isabs(folder))
    found = next((path for folder in named if os.path.exists(path := os.path.join(folder, LIBRARY))), "")
    if not found:
        return ""
    folder = os.path.dirname(os.path.realpath(found))
    own = (sys.prefix, sys.base_prefix, *SYSTEM_PATHS)
    if not os.path.exists(os.path.join(folder, LIBRARY)):
        why = f"{found} leads to {folder}, where it has another name"
    elif any(_is_in(folder, os.path.realpath(path)) for path in own):
        return folder
    elif any(_is_in(folder, path) or _is_in(path, folder) for path in map(os.path.realpath, hidden)):
        why = f"{folder} lies in a folder of the office or of its owner"
    elif not _is_everybodys(folder):
        why = f"other users cannot read {folder}"
    else:
        why = _changeable(folder)
    if why:
        raise Unsupported(
            f"a tenant's guest cannot be shown the driver's libraries, which are found by {LIBRARY_PATH} alone: {why}",
            do="Install them where all users may read and none but root may write, or have the loader find them "
            "(/etc/ld.so.conf.d and `ldconfig`); then start the office again.",
        )
    return folder


def prefix_of(python: str, hidden: Iterable[str], *, depth: int = 0) -> tuple[str, ...]:
    """The folder that this interpreter was installed in, to be shown to the guest.

    The tenant names it, and what is shown is shown past the rights of the folders above it, and where there is one user
    for all, past those of its files. So it has to be an installation that all users may read, with nothing hidden in
    it; or the one that Sublet itself runs from. And no other user may be able to change it: between this look and the
    mount a folder could be exchanged for a link to something private, and a file that is read here for a pipe.
    """
    if not os.path.isabs(python):
        return ()
    prefix = os.path.realpath(os.path.dirname(os.path.dirname(os.path.normpath(python))))
    if prefix == os.path.realpath(os.path.dirname(os.path.dirname(sys.executable))):
        return (os.path.dirname(os.path.dirname(sys.executable)), prefix)
    if any(_is_in(prefix, path) for path in SYSTEM_PATHS):
        return ()
    if why := _changeable(prefix):
        raise Unsupported(
            f"a tenant's guest cannot be shown the interpreter {python}: {why}",
            do="Use one of the system's (/usr/bin/python3), or one that root, or the office's owner, has installed.",
        )
    hides = any(_is_in(prefix, path) or _is_in(path, prefix) for path in map(os.path.realpath, hidden))
    if hides or not _is_installed(prefix) or not _is_everybodys(prefix):
        raise Unsupported(
            f"a tenant's guest cannot be shown the interpreter {python}",
            do="Use one of the system's (/usr/bin/python3), or one that is installed where all users may read.",
        )
    return (prefix, *_below(prefix, hidden, depth=depth + 1))


def _below(venv: str, hidden: Iterable[str], *, depth: int) -> tuple[str, ...]:
    """A virtual environment stands on an installation, to which the same applies; ours is shown anyway."""
    home = ""
    for line in _configuration(venv).splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            home = value.strip()
    base = os.path.realpath(os.path.dirname(home))
    if not os.path.isabs(home) or base in (os.path.realpath(sys.base_prefix), venv):
        return ()
    if depth > DEPTH_MAX:
        raise Unsupported(
            f"the virtual environment {venv} stands on another one, and that on another, {DEPTH_MAX} times",
            do="Make it anew from an interpreter that is installed.",
        )
    return prefix_of(os.path.join(home, "python3"), hidden, depth=depth)


def _configuration(venv: str) -> str:
    """The ``pyvenv.cfg``, if it is a file: nothing else that may lie there is waited for or read."""
    try:
        fd = os.open(os.path.join(venv, "pyvenv.cfg"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.read(fd, CONFIG_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _changeable(folder: str) -> str:
    """Why users other than root and our own could change what the folder is; empty if none could."""
    try:
        if os.lstat(folder).st_mode & stat.S_IWOTH:
            return f"other users can write {folder}"
        why = replaceable(os.path.join(folder, "bin"), set())
    except OSError as error:
        return error.strerror or str(error)
    return why and f"what is in it {why}"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_installed(prefix: str) -> bool:
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        return True
    try:
        return any(name.startswith("python3") for name in os.listdir(os.path.join(prefix, "lib")))
    except OSError:
        return False


def _is_everybodys(folder: str) -> bool:
    """Whether any user of this machine could get there and read."""
    try:
        if not os.stat(folder).st_mode & stat.S_IROTH:
            return False
        while os.stat(folder).st_mode & stat.S_IXOTH:
            if folder == "/":
                return True
            folder = os.path.dirname(folder)
    except OSError:
        pass
    return False
