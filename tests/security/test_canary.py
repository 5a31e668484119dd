"""Whatever guests do in their folders, what root does there afterwards changes nothing outside of them.

Real actions of a guest's user, in any order, between the real functions that the privileged part runs on those folders:
starting guests, taking over after a restart, laying out and publishing a volume, keeping, cleaning and removing. Guests
act before these functions, and in the middle of them: just when the privileged part is about to use a name in a folder
of theirs they may exchange that very name. Beside them lies a tree that nobody was given. `SUBLET_CANARY=20000` tries
so many lives instead of a few, from chance. (What a guest mounts is in its own mount namespace, and never comes here.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.errors import SubletError
from sublet.node.by_descriptor import change, opened_folder
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import GroupLimits
from sublet.node.sandbox import Ids
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.storage import stores_work, volume_folder
from sublet.node.storage.publish import publish
from sublet.node.storage.store import count
from sublet.node.storage.stores_work import StoreNote, make_blocks, put_away
from sublet.node.storage.volume_folder import VolumeAccess, collect, has_files, lay_out, sweep_staging
from sublet.values import MIB, Epoch, Exclusivity, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Part
from sublet.wire.volumes import Collect, Publish, VolumeOpened
from tests.security.kernels import KERNELS, on_kernel
from tests.unit.node.processes.test_lease_runtime import NoGroups

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a privileged part")

GUEST = 1_900_000_123
LIVES = int(os.environ.get("SUBLET_CANARY", "0"))
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Links, rights and owners are the same there, and thousands of folders are made and removed in half of the time."""
LEASE, EPOCH, TENANT = LeaseId("l-1"), Epoch(1, 2), TenantId("ana")
GPU = Part(resource=ResourceId("gpu0"), kind=Kind.GPU, amount=MIB, exclusivity=Exclusivity.SHARED)
BLOCK = Part(resource=ResourceId("block"), kind=Kind.BLOCK, amount=64 * 1024)

NAMES = ("a", "b", "rows", "home", "0", "lock", "checkpoints", "packs", "staging", "1.2", "1.2.holder")
TARGETS = ("CANARY", "CANARY/file", "CANARY/dir", "CANARY/dir/inner", "CANARY/null", "..", "../..", "a", "b")
ROOTS = ("home", "volume", "staging")
USES = frozenset(("open", "os.scandir", "os.truncate")) | {
    f"os.{name}" for name in ("chmod", "chown", "link", "listdir", "mkdir", "remove", "rename", "rmdir")
}
"""Python tells of these just before they are done (``sys.addaudithook``), with the name that is used."""


class Act(NamedTuple):
    """One thing that a guest does: in which folder, what, with which names."""

    root: str
    what: str
    name: str
    other: str
    target: str
    mode: int
    place: int
    """Of the name that is replaced, among those that are there."""


DONE_BY_GUESTS = (
    *("replace", "replace", "folder", "file", "file", "link", "second name", "pipe", "socket", "device", "move"),
    *("rights", "remove"),
)
names = st.one_of(st.sampled_from(NAMES), st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).map("/".join))
acts = st.builds(
    Act,
    st.sampled_from(ROOTS),
    st.sampled_from(DONE_BY_GUESTS),
    names,
    names,
    st.sampled_from(TARGETS),
    st.sampled_from((0o000, 0o400, 0o700, 0o777, 0o1777, 0o4755)),
    st.integers(0, 3),
)
PRIVILEGED = (
    "start",
    "restart",
    "lay out",
    "publish",
    "collect",
    "sweep",
    "count",
    "clean home",
    "keep",
    "put away",
    "end",
)


_at_work: list[World] = []
"""The world in which the privileged part is just doing something."""
_is_told: list[bool] = []


def interfere(event: str, arguments: tuple[object, ...]) -> None:
    if _at_work and event in USES and isinstance(arguments[0], str):
        world = _at_work.pop()
        try:
            world.interfere(arguments[0])
        finally:
            _at_work.append(world)


class World:
    """A lease's folders, and beside them what must stay as it is."""

    def __init__(self, base: Path) -> None:
        if not _is_told:  # it cannot be taken back
            sys.addaudithook(interfere)
            _is_told.append(True)
        self.base = base
        self.between: tuple[int, str] = 0, ""
        """After so many uses of names in their folders by the privileged part, guests put a link to this into the place
        of the name that is used next."""
        self.canary = base / "canary"
        (self.canary / "dir").mkdir(parents=True, mode=0o750)
        (self.canary / "file").write_text("root only")
        (self.canary / "file").chmod(0o640)
        (self.canary / "dir" / "inner").write_text("deep")
        (self.canary / "dir" / "pipe").mkdir()
        os.chown(self.canary / "dir", 0, 12)
        null = self.canary / "null"  # not the machine's: a mistake that this finds must harm nobody
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        null.chmod(0o666)
        self.leases, self.blocks = base / "leases", base / "blocks"
        for folder in (self.leases, self.blocks):
            folder.mkdir(mode=0o700)
        self.store = str(self.blocks / "l-1.1.2")
        self.folders: dict[str, str] = {}
        self.tenancy = self.made()

    def facts(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for folder, _, files in sorted(os.walk(self.canary)):
            for path in (folder, *(os.path.join(folder, name) for name in sorted(files))):
                one = os.lstat(path)
                content: object = one.st_rdev
                if not stat.S_ISCHR(one.st_mode):
                    content = Path(path).read_bytes() if stat.S_ISREG(one.st_mode) else sorted(os.listdir(path))
                found.append((path, one.st_uid, one.st_gid, one.st_mode, one.st_nlink, content))
        return found

    # ---- the guest

    @contextlib.contextmanager
    def as_guest(self) -> Iterator[None]:
        groups = os.getgroups()
        os.setgroups([])
        os.setegid(GUEST)
        os.seteuid(GUEST)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)

    def act(self, act: Act) -> None:
        """As a guest does it: from a descriptor of what it was given, and nothing above."""
        folder = self.folders.get(act.root, "")
        try:
            top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return
        target = act.target.replace("CANARY", str(self.canary))
        try:
            with self.as_guest(), contextlib.suppress(OSError):
                match act.what:
                    case "replace":  # by a link: the trap that most attacks begin with
                        there = sorted(os.listdir(top))
                        name = there[act.place % len(there)] if there else act.name
                        with contextlib.suppress(FileNotFoundError):
                            os.rename(name, f"{name}.aside", src_dir_fd=top, dst_dir_fd=top)
                        os.symlink(target, name, dir_fd=top)
                    case "folder":
                        os.mkdir(act.name, dir_fd=top)
                    case "file":
                        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
                        os.close(os.open(act.name, flags, dir_fd=top))
                    case "link":
                        os.symlink(target, act.name, dir_fd=top)
                    case "second name":
                        os.link(target, act.name, dst_dir_fd=top)
                    case "pipe":
                        os.mkfifo(act.name, dir_fd=top)
                    case "socket":
                        os.mknod(act.name, stat.S_IFSOCK | 0o777, dir_fd=top)
                    case "device":
                        os.mknod(act.name, stat.S_IFCHR | 0o666, os.makedev(1, 7), dir_fd=top)
                    case "move":
                        os.rename(act.name, act.other, src_dir_fd=top, dst_dir_fd=top)
                    case "rights":
                        os.chmod(act.name, act.mode, dir_fd=top)
                    case _:
                        os.unlink(act.name, dir_fd=top)
        finally:
            os.close(top)

    def interfere(self, path: str) -> None:
        """Exchange this name, if it lies in a folder of a guest's."""
        left, target = self.between
        for folder in self.folders.values() if target else ():
            whole = os.path.join(folder, path)  # as it is, or from a descriptor of the folder
            if whole.startswith(f"{folder}/") and os.path.lexists(whole):
                self.between = (left - 1, target) if left else (0, "")
                if not left:
                    self.exchange(whole, target)
                return

    def exchange(self, path: str, target: str) -> None:
        with contextlib.suppress(OSError):
            above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                with self.as_guest():
                    name = os.path.basename(path)
                    os.rename(name, f"{name}.aside", src_dir_fd=above, dst_dir_fd=above)
                    os.symlink(target.replace("CANARY", str(self.canary)), name, dir_fd=above)
            finally:
                os.close(above)

    # ---- root

    def restart(self) -> None:
        """Another supervisor takes over what lies there."""
        self.let_go()
        self.tenancy = self.made()

    def made(self) -> LeaseRuntime:
        made = LeaseRuntime(
            lease=LEASE, tenant=TENANT, epoch=EPOCH, parts=(GPU, BLOCK), deadline_ns=1 << 60, office="o"
        )
        made.open(str(self.leases), NoGroups(), 1, lambda _: (), GroupLimits())
        return made

    def let_go(self) -> None:
        """Of the files that a supervisor has open."""
        self.tenancy.close(lambda _: None, lambda _: None, alone=False)

    def start(self) -> None:
        home, _ = self.tenancy.make_home(Ids(GUEST, GUEST))
        note = StoreNote(lease=LEASE, epoch=EPOCH, tenant=TENANT, parts=(BLOCK,), name="kept")
        made = make_blocks(self.store, note, (GUEST, GUEST))
        volume = made.paths[0] if made.paths else ""
        self.folders = {"home": home, "volume": volume, "staging": f"{volume}/staging/{EPOCH}"}

    def place(self) -> VolumeAccess:
        folder, lock = f"{self.store}/0", f"{self.store}/lock"
        return VolumeAccess(folder=folder, lock=lock, size=BLOCK.amount, counted=True, owner=GUEST, group=GUEST)

    def do(self, what: str, name: str, between: tuple[int, str] = (0, "")) -> None:
        volume = f"{self.store}/0"
        opened = VolumeOpened(lease=LEASE, epoch=EPOCH, name="kept", folder=volume, staging="", size=BLOCK.amount)
        asked = Publish(lease=LEASE, epoch=EPOCH, staging=name, manifest="a", packs=("b",), parent=0)
        acts: dict[str, Callable[[], object]] = {
            "start": self.start,
            "restart": self.restart,
            "lay out": lambda: lay_out(self.place(), opened),
            "publish": lambda: publish(self.place(), asked),
            "collect": lambda: collect(self.place(), Collect(lease=LEASE, epoch=EPOCH, keep=1)),
            "sweep": lambda: sweep_staging(volume),
            "count": lambda: (sum(count(self.tenancy.folder)), has_files(volume)),
            "clean home": lambda: remove_tree(os.path.join(self.tenancy.folder, "home"), keep_top=True),
            "keep": lambda: put_away(self.store, keep=True),
            "put away": lambda: put_away(self.store, keep=False),
            "end": lambda: remove_tree(self.tenancy.folder),
        }
        self.between = between
        _at_work.append(self)
        try:
            with contextlib.suppress(OSError, SubletError):  # a refusal changes nothing either
                acts[what]()
        finally:
            _at_work.pop()


Done = tuple[str, str, tuple[int, str]]
"""Something that the privileged part does, with which name, and which one is exchanged meanwhile."""
Life = tuple[bool, list[Act | Done], tuple[int, str]]
"""Whether it begins with a volume that is laid out; what guests and the privileged part do then; which name is
exchanged during each of the last acts."""
exchanges = st.tuples(st.integers(0, 5), st.sampled_from(("CANARY/file", "CANARY/dir", "CANARY", "")))
done = st.tuples(st.sampled_from(PRIVILEGED), st.sampled_from(NAMES), exchanges)
lives = st.tuples(st.booleans(), st.lists(st.one_of(acts, acts, acts, done), min_size=8, max_size=40), exchanges)
LAST = ("start", "restart", "start", "lay out", "sweep", "keep", "put away", "end")


def changed_by(life: Life) -> str:
    """After which act of the privileged part something outside was another; empty if after none."""
    base = Path(tempfile.mkdtemp(prefix="sublet-canary-", dir=IN_MEMORY))
    world = World(base)
    try:
        before = world.facts()
        world.do("start", "")
        if life[0]:
            world.do("lay out", "")
        for step in life[1]:
            if isinstance(step, Act):
                world.act(step)
                continue
            world.do(*step)
            if world.facts() != before:
                return f"{step}"
        for what in LAST:
            world.do(what, "a", life[2])
            if world.facts() != before:
                return f"{what} at the end"
        return ""
    finally:
        world.let_go()
        shutil.rmtree(base, ignore_errors=True)


def test_nothing_outside_is_changed() -> None:
    met: set[str] = set()

    @settings(
        max_examples=LIVES or 30,
        deadline=None,
        derandomize=not LIVES,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(life=lives, kernel=st.sampled_from(KERNELS))
    def nothing_is_changed(life: Life, kernel: str) -> None:
        met.update((kernel, *(step.what if isinstance(step, Act) else step[0] for step in life[1])))
        with on_kernel(kernel):
            assert changed_by(life) == ""

    nothing_is_changed()
    assert met == {*KERNELS, *DONE_BY_GUESTS, *PRIVILEGED}


# ---- mistakes that such lives show


def before(module: object, name: str, also: Callable[[str], object]) -> Callable[[pytest.MonkeyPatch], None]:
    """This function of the privileged part does something more with the folder that it is given, first."""
    real = getattr(module, name)

    def wrong(folder: str | VolumeAccess | LeaseRuntime, *arguments: object, **named: object) -> object:
        path = folder.folder if isinstance(folder, VolumeAccess | LeaseRuntime) else folder
        with contextlib.suppress(OSError):
            also(path)
        return real(folder, *arguments, **named)

    return lambda patch: patch.setattr(module, name, wrong)


def below(folder: str) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        yield from (os.path.join(where, name) for name in (*folders, *files))


def readable(folder: str) -> None:
    for path in below(folder):
        os.chmod(path, 0o644)


def given_to_the_guest(folder: str) -> None:
    for path in below(folder):
        os.chown(path, GUEST, GUEST)


def readable_if_no_link(folder: str) -> None:
    """It looks first, and a name may be exchanged after that."""
    for path in below(folder):
        if os.path.isfile(path) and not os.path.islink(path):
            os.chmod(path, 0o644)


def emptied(folder: str) -> None:
    for path in below(folder):
        if os.path.isfile(path) and not os.path.islink(path):
            os.truncate(path, 0)


LINK, FILE = (Act("", what, "a", "", "CANARY/file", 0, 0) for what in ("link", "file"))
NEVER = 0, ""
AT_ONCE = 0, "CANARY/file"
MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Life]] = {
    "cleaning, by path in what was staged": (
        before(volume_folder, "_sweep", lambda folder: readable(f"{folder}/staging")),
        (True, [LINK._replace(root="staging"), ("sweep", "a", NEVER)], NEVER),
    ),
    "a start that gives a kept volume away by path": (
        before(stores_work, "make_blocks", given_to_the_guest),
        (False, [LINK._replace(root="volume"), ("keep", "a", NEVER), ("start", "a", NEVER)], NEVER),
    ),
    "a start after a restart, by path in the home": (
        before(LeaseRuntime, "make_home", lambda folder: readable(f"{folder}/home")),
        (False, [LINK._replace(root="home"), ("restart", "a", NEVER), ("start", "a", NEVER)], NEVER),
    ),
    "adoption that looks first, and then changes by path": (
        before(stores_work, "_is_worth_keeping", readable_if_no_link),
        (False, [FILE._replace(root="volume"), ("keep", "a", AT_ONCE)], NEVER),
    ),
    "an end that looks first, and then empties by path": (
        before(stores_work, "_removed", emptied),
        (False, [FILE._replace(root="volume"), ("put away", "a", AT_ONCE)], NEVER),
    ),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_of_the_privileged_part_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as somebody might write it, and a life that shows it. Without the mistake the same life changes nothing."""
    plant, life = MISTAKES[mistake]
    assert changed_by(life) == ""
    plant(monkeypatch)
    monkeypatch.setitem(globals(), "make_blocks", stores_work.make_blocks)
    assert changed_by(life) != ""


# ---- each kind of trap has its effect, and the net catches a mistake


@pytest.fixture
def world() -> Iterator[World]:
    base = Path(tempfile.mkdtemp(prefix="sublet-canary-", dir=IN_MEMORY))
    made = World(base)
    made.do("start", "")
    made.do("lay out", "")
    yield made
    shutil.rmtree(base, ignore_errors=True)


@pytest.mark.parametrize("root", ROOTS)
def test_a_guest_really_acts_in_each_of_its_folders(world: World, root: str) -> None:
    world.act(Act(root, "link", "a", "", "CANARY/file", 0, 0))
    world.act(Act(root, "pipe", "b", "", "a", 0, 0))
    assert os.readlink(f"{world.folders[root]}/a") == str(world.canary / "file")
    assert stat.S_ISFIFO(os.lstat(f"{world.folders[root]}/b").st_mode)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda path: os.chown(path, GUEST, GUEST),
        lambda path: os.chmod(path, 0o777),
        lambda path: Path(path).write_text(""),
        lambda path: os.unlink(os.path.realpath(path)),
    ],
)
def test_a_privileged_part_that_goes_by_name_would_be_caught(world: World, mistake: Callable[[str], object]) -> None:
    before = world.facts()
    world.act(Act("home", "link", "a", "", "CANARY/file", 0, 0))
    mistake(f"{world.folders['home']}/a")
    assert world.facts() != before


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("target", ["CANARY", "CANARY/file", "CANARY/null"])
@pytest.mark.parametrize("where", ["a", "a/dir"])
def test_owner_and_rights_are_never_changed_through_a_link(world: World, target: str, where: str) -> None:
    before = world.facts()
    world.act(Act("home", "link", "a", "", target, 0, 0))
    path = f"{world.folders['home']}/{where}"
    with pytest.raises(OSError, match=r"symbolic link|Not a directory|No such file"):
        change(path, mode=0o777, owner=(GUEST, GUEST))
    with pytest.raises(OSError), opened_folder(path):  # noqa: PT011 - which of them says the kernel
        pass
    assert world.facts() == before


@pytest.mark.usefixtures("kernel")
def test_a_file_with_a_second_name_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.link(tmp_path / "file", tmp_path / "other")
    with pytest.raises(OSError, match="more than one name"):
        change(str(tmp_path / "file"), owner=(GUEST, GUEST))
    (tmp_path / "other").unlink()
    change(str(tmp_path / "file"), owner=(GUEST, GUEST), mode=0o600)
    found = (tmp_path / "file").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (GUEST, 0o600)


@pytest.mark.parametrize("path", ["relative", "/tmp/../etc", ""])
def test_only_plain_absolute_paths_are_walked(path: str) -> None:
    with pytest.raises(OSError, match="not a plain absolute path"):
        change(path, mode=0o600)
