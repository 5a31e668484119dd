"""Control groups on pretended machines: v2 only, v1 only, both, and none; a folder that behaves as the kernel's."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from sublet.node.processes.cgroups import ControlGroup, Groups
from sublet.node.processes.cgroups_places import CgroupFiles, enter_child_group
from sublet.node.processes.lease_limits import office_limits
from sublet.node.processes.limits import BASIC_DEVICES, DeviceNode, GroupLimits, GroupUsage
from sublet.values import GuestId, LeaseId
from sublet.wire.caps import LeaseCaps
from tests.left_open import nothing_left_open

V1: Final = ("memory", "pids", "cpu", "cpuset", "devices", "freezer", "cpuacct")
V1_FILES: Final = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    "pids": ("pids.max",),
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.shares"),
    "cpuset": ("cpuset.cpus", "cpuset.mems"),
    "devices": ("devices.deny", "devices.allow"),
    "freezer": ("freezer.state",),
    "cpuacct": ("cpuacct.usage",),
}
V2_FILES: Final = (
    *("cgroup.controllers", "cgroup.subtree_control", "cgroup.kill", "cgroup.freeze", "cgroup.events", "cpu.stat"),
    *("memory.max", "memory.current", "memory.peak", "memory.events", "pids.max", "cpu.max", "cpuset.cpus"),
    *("cpu.weight", "memory.swap.max"),
)
LEASE: Final = LeaseId("l1")
GUEST: Final = GuestId("g1")


class Machine(CgroupFiles):
    """Folders below ``root`` that answer like hierarchies of control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[tuple[str, str]] = []
        self.locked: set[str] = set()
        self.own: list[str] = []
        self.mounts: list[str] = []
        (root / "proc/self").mkdir(parents=True)

    def v1(self, name: str, own: str = "/") -> None:
        self._mount(f"cg/{name}", f"cgroup cgroup rw,{name}", f"1:{name}:{own}", own)

    def v2(self, where: str, controllers: str, own: str = "/") -> None:
        point = self._mount(where, "cgroup2 cgroup2 rw", f"0::{own}", own)
        (point / "cgroup.controllers").write_text(controllers)

    def _mount(self, where: str, kind: str, line: str, own: str) -> Path:
        point = self.root / where
        (self.root / where).mkdir(parents=True)
        self._furnish(str(point))
        self.mounts.append(f"30 20 0:{len(self.mounts)} / {point} rw - {kind}\n")
        self.own.append(line + "\n")
        (self.root / "proc/self/mountinfo").write_text("20 1 0:1 / / rw - ext4 x rw\n" + "".join(self.mounts))
        (self.root / "proc/self/cgroup").write_text("".join(self.own))
        folder = point
        for part in own.strip("/").split("/") if own != "/" else []:
            folder /= part
            self.make(str(folder))
        return point

    def probe(self) -> Groups:
        return Groups.probe("k3", proc=str(self.root / "proc"), files=self, named=str)

    def put(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def get(self, path: str) -> str:
        return (self.root / path).read_text()

    # ---- as the kernel does it ----

    def make(self, folder: str) -> None:
        if any(folder.startswith(locked) for locked in self.locked):
            raise PermissionError(errno.EACCES, "Permission denied")
        if not os.path.exists(folder):
            super().make(folder)
            self._furnish(folder)

    def _furnish(self, folder: str) -> None:
        name = os.path.relpath(folder, self.root).split("/")[1:2]
        files = V1_FILES.get(name[0] if name else "", V2_FILES)
        for file in ("cgroup.procs", *(("tasks",) if files is not V2_FILES else ()), *files):
            Path(folder, file).touch()
        above = Path(folder).parent / "cgroup.subtree_control"
        if files is V2_FILES and above.exists():
            Path(folder, "cgroup.controllers").write_text(above.read_text())
            Path(folder, "cgroup.type").write_text(self._kind(above) + "\n")

    def _kind(self, above: Path) -> str:
        """Below a group with processes in it which hands on what threads can share, nobody can be."""
        busy = (above.parent / "cgroup.type").exists() and (above.parent / "cgroup.procs").read_text()
        return "domain invalid" if busy and above.read_text() else "domain"

    def remove(self, folder: str) -> None:
        if self.folders(folder) or self.read(f"{folder}/cgroup.procs"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        for entry in os.scandir(folder):
            os.unlink(entry.path)
        super().remove(folder)

    def write(self, path: str, text: str) -> None:
        self.said.append((os.path.relpath(path, self.root), text))
        name, folder = os.path.basename(path), os.path.dirname(path)
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        if name == "cgroup.subtree_control":
            is_root = not os.path.exists(f"{folder}/cgroup.type")
            shared = {"+cpu", "+cpuset", "+pids"}
            if self.read(f"{folder}/cgroup.procs") and not is_root and not set(text.split()) <= shared:
                raise OSError(errno.EBUSY, "Device or resource busy")
            there = {*(self.read(path) or "").split(), *(part.lstrip("+") for part in text.split())}
            if not there <= set((self.read(f"{folder}/cgroup.controllers") or "").split()):
                raise OSError(errno.ENOENT, "No such file")
            text = " ".join(sorted(there))
        elif name == "cgroup.procs" and text == "0":  # the only process there is here
            Path(folder).parent.joinpath(name).write_text("")
            text = "77\n"
        elif name == "cgroup.procs":
            text = (self.read(path) or "") + text + "\n"
        Path(path).write_text(text)

    def may_write(self, path: str) -> bool:
        return path not in self.locked and not any(path.startswith(f"{locked}/") for locked in self.locked)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def limited(groups: Groups, limits: GroupLimits) -> list[str]:
    lease, guest = groups.group(LEASE), groups.group(LEASE, GUEST)
    assert lease is not None
    assert guest is not None
    lease.create()
    left = lease.set_limits(limits)
    guest.create()
    return left


ALL: Final = GroupLimits(memory_bytes=1 << 30, pids_max=99, cores=2, cpus=(3, 1), devices=(DeviceNode("c", 195),))


def test_a_machine_without_groups_says_so(machine: Machine) -> None:
    groups = machine.probe()
    assert not groups.is_active
    assert groups.group(LEASE, GUEST) is None
    assert groups.found() == []
    assert groups.elsewhere() == []
    first, *rest = groups.describe()
    assert first.text == "by descent, session and environment only: no hierarchy of control groups is mounted"
    assert not any(said.is_active for said in (first, *rest))


def test_none_is_a_choice(machine: Machine) -> None:
    groups = Groups.none("k3")
    assert not groups.is_active
    assert groups.group(LEASE) is None


def test_v2_hands_its_controllers_down_to_the_guest(machine: Machine) -> None:
    machine.v2("cg", "cpu cpuset memory pids hugetlb")
    groups = machine.probe()
    assert limited(groups, ALL) == ["devices"]
    assert machine.get("cg/cgroup.subtree_control") == "cpu cpuset memory pids"
    assert machine.get("cg/sublet-k3/l1/g1/cgroup.controllers") == "cpu cpuset memory pids"
    lease = "cg/sublet-k3/l1"
    assert machine.get(f"{lease}/memory.max") == str(1 << 30)
    assert machine.get(f"{lease}/pids.max") == "99"
    assert machine.get(f"{lease}/cpu.max") == "200000 100000"
    assert machine.get(f"{lease}/cpuset.cpus") == "1,3"
    active = {said.part: said.is_active for said in groups.describe()}
    assert active.pop("devices") is False
    assert all(active.values())


def test_v2_kills_counts_and_goes(machine: Machine) -> None:
    machine.v2("cg", "memory")
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    assert [os.path.relpath(path, machine.root) for path in group.join_paths()] == ["cg/sublet-k3/l1/g1/cgroup.procs"]
    group.add(4242)
    machine.make(str(machine.root / "cg/sublet-k3/l1/g1/inner"))
    machine.put("cg/sublet-k3/l1/g1/inner/cgroup.procs", "4243\n4242\n")
    assert group.pids() == [4242, 4243]
    assert not group.is_empty()
    group.kill()
    assert machine.get("cg/sublet-k3/l1/g1/cgroup.kill") == "1"
    machine.put("cg/sublet-k3/l1/g1/cpu.stat", "usage_usec 12\nuser_usec 7\n")
    machine.put("cg/sublet-k3/l1/g1/memory.current", "5\n")
    machine.put("cg/sublet-k3/l1/g1/memory.peak", "9\n")
    machine.put("cg/sublet-k3/l1/g1/memory.events", "oom 3\noom_kill 2\n")
    assert group.usage() == GroupUsage(cpu_ns=12_000, memory_bytes=5, memory_peak_bytes=9, oom_kills=2)
    left = [os.path.relpath(path, machine.root) for path in group.remove()]
    assert left == ["cg/sublet-k3/l1/g1/inner", "cg/sublet-k3/l1/g1"]
    for folder in left:
        machine.put(f"{folder}/cgroup.procs", "")
    assert group.is_empty()
    assert group.remove() == []
    assert group.remove() == []


def test_v2_looks_upwards_for_a_group_that_hands_controllers_on(machine: Machine) -> None:
    """Our own holds processes, so it cannot; the one above it can."""
    machine.v2("cg", "memory pids", own="/user/scope")
    machine.put("cg/user/scope/cgroup.procs", "1\n")
    machine.put("cg/user/cgroup.controllers", "memory pids")
    machine.put("cg/user/scope/cgroup.controllers", "memory pids")
    groups = machine.probe()
    assert groups.v2 is not None
    assert os.path.relpath(groups.v2.base, machine.root) == "cg/user"
    assert groups.has("memory")


def test_v2_without_the_right_to_go_up_ends_but_does_not_limit(machine: Machine) -> None:
    machine.v2("cg", "memory", own="/user/scope")
    machine.put("cg/user/scope/cgroup.procs", "1\n")
    machine.put("cg/user/scope/cgroup.controllers", "memory")
    machine.locked.add(str(machine.root / "cg/user/cgroup.procs"))
    groups = machine.probe()
    assert groups.is_active
    assert not groups.has("memory")
    said = {said.part: said for said in groups.describe()}
    assert said["ending a guest as a whole"].is_active
    assert said["memory"].text.endswith("does not hand the controller memory on to groups below it")


def test_a_group_with_processes_in_it_is_not_made_one_that_nobody_can_be_below(machine: Machine) -> None:
    """It would hand on ``cpu`` and ``pids``, which threads can share, and then groups made in it take no processes."""
    machine.v2("cg", "cpu memory pids", own="/user/scope")
    machine.put("cg/user/scope/cgroup.procs", "1\n")
    machine.put("cg/user/scope/cgroup.controllers", "cpu memory pids")
    machine.locked.add(str(machine.root / "cg/user/cgroup.procs"))
    groups = machine.probe()
    assert machine.get("cg/user/scope/cgroup.subtree_control") == ""
    assert machine.get("cg/user/scope/sublet-k3/cgroup.type") == "domain\n"
    assert groups.v2 is not None
    assert not any(groups.has(name) for name in ("cpu", "memory", "pids"))


def test_a_group_that_nobody_can_be_below_is_not_used(machine: Machine) -> None:
    machine.v2("cg", "cpu memory", own="/scope")
    machine.put("cg/scope/cgroup.procs", "1\n")
    machine.put("cg/scope/cgroup.subtree_control", "cpu")
    machine.locked.add(str(machine.root / "cg/cgroup.procs"))
    groups = machine.probe()
    assert not groups.is_active
    assert groups.describe()[0].text.endswith("takes no processes (it is domain invalid)")
    assert not (machine.root / "cg/scope/sublet-k3").exists()


def settled(machine: Machine) -> Groups:
    """A supervisor whose number is 77."""
    enter_child_group(str(machine.root / "proc"), machine, pid=77)
    own = machine.root / "proc/self/cgroup"
    if (machine.root / "cg/scope/supervisor").exists():
        own.write_text(own.read_text().replace("/scope", "/scope/supervisor"))
    return machine.probe()


def test_a_group_of_its_own_hands_everything_on_once_the_supervisor_is_in_one_below(machine: Machine) -> None:
    machine.v2("cg", "cpu memory pids", own="/scope")
    machine.put("cg/scope/cgroup.procs", "77\n")
    machine.put("cg/scope/cgroup.controllers", "cpu memory pids")
    groups = settled(machine)
    assert groups.v2 is not None
    assert os.path.relpath(groups.v2.base, machine.root) == "cg/scope"
    assert limited(groups, GroupLimits(memory_bytes=1 << 30, pids_max=9, cores=1)) == []
    assert machine.get("cg/scope/sublet-k3/l1/memory.max") == str(1 << 30)


@pytest.mark.parametrize("why", ["others are in it", "it is not ours", "it has nothing to hand on", "all are in it"])
def test_a_supervisor_stays_where_it_is_if_nothing_is_gained(machine: Machine, why: str) -> None:
    machine.v2("cg", "memory", own="/" if why == "all are in it" else "/scope")
    folder = "cg" if why == "all are in it" else "cg/scope"
    machine.put(f"{folder}/cgroup.procs", "76\n77\n" if why == "others are in it" else "77\n")
    machine.put(f"{folder}/cgroup.controllers", "" if why == "it has nothing to hand on" else "memory")
    if why == "it is not ours":
        machine.locked.add(str(machine.root / "cg/scope"))
    enter_child_group(str(machine.root / "proc"), machine, pid=77)
    assert not (machine.root / folder / "supervisor").exists()


def test_v1_makes_a_guest_where_it_is_counted_or_ended_and_joins_what_limits_its_lease(machine: Machine) -> None:
    for name in V1:
        machine.v1(name, own="/us" if name == "memory" else "/")
    for name in ("cpus", "mems"):
        machine.put(f"cg/cpuset/cpuset.{name}", "0-3\n")
    groups = machine.probe()
    assert limited(groups, GroupLimits(cpus=(1,), devices=(DeviceNode("c", 195, 0),))) == []
    group = groups.group(LEASE, GUEST)
    assert group is not None
    joined = {os.path.relpath(path, machine.root) for path in group.join_paths()}
    own, shared = ("freezer", "cpuacct", "memory/us"), ("cpuset", "devices")
    assert joined == {
        *(f"cg/{folder}/sublet-k3/l1/g1/tasks" for folder in own),
        *(f"cg/{folder}/sublet-k3/l1/tasks" for folder in shared),
    }
    assert machine.get("cg/cpuset/sublet-k3/l1/cpuset.cpus") == "1"
    assert machine.get("cg/cpuset/sublet-k3/l1/cpuset.mems") == "0-3"
    said = [text for path, text in machine.said if path.endswith(("devices.allow", "devices.deny"))]
    assert said == ["a", *(device.text for device in BASIC_DEVICES), "c 195:0 rwm"]


def test_v1_limits(machine: Machine) -> None:
    for name in V1:
        machine.v1(name)
    groups = machine.probe()
    machine.put("cg/cpuset/cpuset.cpus", "0-3")
    assert limited(groups, ALL) == []
    assert machine.get("cg/memory/sublet-k3/l1/memory.limit_in_bytes") == str(1 << 30)
    assert machine.get("cg/pids/sublet-k3/l1/pids.max") == "99"
    assert machine.get("cg/cpu/sublet-k3/l1/cpu.cfs_quota_us") == "200000"
    assert all(said.is_active for said in groups.describe())


UNLEASED: Final = GroupLimits(memory_bytes=1 << 29, swap=False, cores=1, pids_max=256, cpu_weight=10)


def test_swap_and_the_share_of_time_are_capped_by_v2(machine: Machine) -> None:
    machine.v2("cg", "cpu memory pids")
    assert limited(machine.probe(), UNLEASED) == []
    lease = "cg/sublet-k3/l1"
    assert (machine.get(f"{lease}/memory.swap.max"), machine.get(f"{lease}/cpu.weight")) == ("0", "10")


def test_swap_and_the_share_of_time_are_capped_by_v1(machine: Machine) -> None:
    """A kernel that does not count swap has no file for it, and memory is capped all the same."""
    for name in V1:
        machine.v1(name)
    assert limited(machine.probe(), UNLEASED) == []
    assert machine.get("cg/cpu/sublet-k3/l1/cpu.shares") == "102"
    assert machine.get("cg/memory/sublet-k3/l1/memory.limit_in_bytes") == str(1 << 29)
    assert not (machine.root / "cg/memory/sublet-k3/l1/memory.memsw.limit_in_bytes").exists()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_all_guests_of_an_office_are_capped_in_the_group_above_their_leases(machine: Machine, version: str) -> None:
    if version == "v2":
        machine.v2("cg", "cpu memory pids")
    else:
        for name in V1:
            machine.v1(name)
    machine.probe().cap_office(GroupLimits(memory_bytes=1 << 33, cores=3, pids_max=16384))
    top = {name: "cg/sublet-k3" if version == "v2" else f"cg/{name}/sublet-k3" for name in V1}
    memory, cpu = ("memory.max", "cpu.max") if version == "v2" else ("memory.limit_in_bytes", "cpu.cfs_quota_us")
    assert machine.get(f"{top['memory']}/{memory}") == str(1 << 33)
    assert machine.get(f"{top['pids']}/pids.max") == "16384"
    assert machine.get(f"{top['cpu']}/{cpu}").startswith("300000")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_all_guests_of_an_office_weigh_as_much_as_its_cores_beside_other_processes(
    machine: Machine, version: str
) -> None:
    """Each process beside the group has the weight of one core. An office that had a cap has none any more."""
    if version == "v2":
        machine.v2("cg", "cpu memory pids")
        share, weight, cap, capped, uncapped = "cpu.weight", "400", "cpu.max", "200000 100000", "max 100000"
    else:
        for name in V1:
            machine.v1(name)
        share, weight, cap, capped, uncapped = "cpu.shares", "4096", "cpu.cfs_quota_us", "200000", "-1"
    top, groups = f"cg/{'' if version == 'v2' else 'cpu/'}sublet-k3", machine.probe()
    groups.cap_office(office_limits(LeaseCaps(office_cores=2), memory_bytes=1 << 34, cores=4, pids_max=32768))
    assert machine.get(f"{top}/{cap}") == capped
    groups.cap_office(office_limits(LeaseCaps(), memory_bytes=1 << 34, cores=4, pids_max=32768))
    assert (machine.get(f"{top}/{share}"), machine.get(f"{top}/{cap}")) == (weight, uncapped)


def test_without_groups_an_office_has_no_cap_of_its_own() -> None:
    Groups.none("k3").cap_office(UNLEASED)


def frozen(machine: Machine) -> list[str]:
    return [text for path, text in machine.said if path.endswith("freezer.state")]


def forking(machine: Machine, monkeypatch: pytest.MonkeyPatch, generations: int) -> tuple[ControlGroup, list[int]]:
    """A group in which each list shows somebody new, so often; and who was sent SIGKILL."""
    for name in ("freezer", "memory"):
        machine.v1(name)
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    born, struck = list[int](), list[int]()
    by_fd = dict[int, int]()

    def read(path: str) -> str | None:
        if not path.endswith("/g1/cgroup.procs"):
            return CgroupFiles.read(machine, path)
        if len(born) < generations:
            born.append(4_000_000_000 + len(born))  # no pid is so large
        return "".join(f"{pid}\n" for pid in born)

    def opened(pid: int) -> int:
        fd = os.open(os.devnull, os.O_RDONLY)
        by_fd[fd] = pid
        return fd

    monkeypatch.setattr(machine, "read", read)
    monkeypatch.setattr("sublet.node.processes.group.pidfd_open", opened)
    monkeypatch.setattr("sublet.node.processes.group.pidfd_send_signal", lambda fd, _: struck.append(by_fd[fd]))
    return group, struck


@pytest.mark.parametrize("generations", [0, 1, 3])
def test_v1_kills_at_once_and_freezes_who_is_still_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, generations: int
) -> None:
    group, struck = forking(machine, monkeypatch, generations)
    group.kill()
    assert len(struck) == len(set(struck)) == generations
    assert not frozen(machine)
    group.kill()
    assert struck == struck[:generations] * 2
    assert frozen(machine) == ["FROZEN", "THAWED"]


def test_v1_freezes_who_forks_so_fast_that_not_all_are_met(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    group, struck = forking(machine, monkeypatch, 12)
    group.kill()
    assert frozen(machine) == ["FROZEN", "THAWED"]
    assert len(set(struck)) == 12


@pytest.mark.parametrize(
    ("known", "lists"), [((), 2), ((4_000_000_000,), 1), ((4_000_000_000, 77), 1), ((77,), 2)], ids=str
)
def test_who_is_known_is_signalled_by_one_list_and_nobody_who_is_not_in_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, known: tuple[int, ...], lists: int
) -> None:
    group, struck = forking(machine, monkeypatch, 1)
    read, seen = machine.read, list[str]()

    def counted(path: str) -> str | None:
        seen.extend([path] if path.endswith("/g1/cgroup.procs") else [])
        return read(path)

    monkeypatch.setattr(machine, "read", counted)
    with nothing_left_open():
        assert group.signal(15, known) == {4_000_000_000}
    assert struck == [4_000_000_000]
    assert len(seen) == lists


def test_v1_counts(machine: Machine) -> None:
    for name in ("cpuacct", "memory"):
        machine.v1(name)
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    machine.put("cg/cpuacct/sublet-k3/l1/g1/cpuacct.usage", "123\n")
    machine.put("cg/memory/sublet-k3/l1/g1/memory.usage_in_bytes", "7\n")
    machine.put("cg/memory/sublet-k3/l1/g1/memory.max_usage_in_bytes", "8\n")
    machine.put("cg/memory/sublet-k3/l1/g1/memory.oom_control", "under_oom 0\noom_kill 1\n")
    assert group.usage() == GroupUsage(cpu_ns=123, memory_bytes=7, memory_peak_bytes=8, oom_kills=1)


def test_a_process_that_left_one_hierarchy_is_still_in_the_group(machine: Machine) -> None:
    for name in ("freezer", "memory"):
        machine.v1(name)
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    group.add(4242)
    machine.put("cg/freezer/sublet-k3/l1/g1/cgroup.procs", "")
    assert group.pids() == [4242]


@pytest.mark.parametrize("version", [1, 2])
def test_whether_somebody_is_in_it_is_seen_by_one_list_wherever_below_he_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    if version == 1:
        for name in ("memory", "pids", "freezer"):
            machine.v1(name)
    else:
        machine.v2("cg/only", "memory pids")
    groups = machine.probe()
    limited(groups, GroupLimits(pids_max=9))
    lease, guest = groups.group(LEASE), groups.group(LEASE, GUEST)
    assert lease is not None
    assert guest is not None
    lease.create(GroupLimits(pids_max=9))
    guest.create()
    where, shared = ("cg/freezer", "cg/pids") if version == 1 else ("cg/only", "cg/only")
    own, is_blank, seen = f"{where}/sublet-k3/l1/g1", machine.is_blank, list[str]()

    def counted(path: str) -> bool:
        seen.append(path)
        return is_blank(path)

    monkeypatch.setattr(machine, "is_blank", counted)
    assert (guest.inhabited(), lease.inhabited()) == ("", "")
    assert len(seen) == (2 if version == 1 else 3), seen
    machine.put(f"{own}/cgroup.procs", "4242\n")
    assert guest.inhabited() == f"{machine.root}/{own}"
    machine.put(f"{own}/cgroup.procs", "")
    machine.make(f"{machine.root}/{own}/inner")
    machine.put(f"{own}/inner/cgroup.procs", "4242\n")
    assert guest.inhabited() == f"{machine.root}/{own}/inner"
    machine.put(f"{own}/inner/cgroup.procs", "")
    assert (guest.inhabited(), lease.inhabited()) == ("", "")
    machine.put(f"{shared}/sublet-k3/l1/cgroup.procs", "4242\n")
    assert lease.inhabited() == f"{machine.root}/{shared}/sublet-k3/l1"
    machine.put(f"{shared}/sublet-k3/l1/cgroup.procs", "")
    assert guest.remove() == lease.remove() == []
    assert (guest.inhabited(), lease.inhabited()) == ("", "")


@pytest.mark.parametrize("act", ["open", "scandir"])
def test_what_cannot_be_looked_into_counts_as_inhabited(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """No descriptor is left, say: nothing is concluded from it."""
    machine.v1("freezer")
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    machine.make(f"{machine.root}/cg/freezer/sublet-k3/l1/g1/inner")
    assert group.inhabited() == ""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("sublet.node.processes.cgroups_places.os", SimpleNamespace(**{**vars(os), act: refuse}))
    assert group.inhabited() == f"{machine.root}/cg/freezer/sublet-k3/l1/g1"


def test_a_group_that_went_while_it_was_looked_at_is_nobodys(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.v1("freezer")
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    group.create()
    machine.put("cg/freezer/sublet-k3/l1/g1/cgroup.procs", "4242\n")

    def gone(*_: object) -> bytes:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr("sublet.node.processes.cgroups_places.os", SimpleNamespace(**{**vars(os), "read": gone}))
    assert group.inhabited() == ""


def test_nobody_is_in_a_group_that_was_never_made(machine: Machine) -> None:
    machine.v1("memory")
    group = machine.probe().group(LEASE, GUEST)
    assert group is not None
    assert group.inhabited() == ""


@pytest.mark.parametrize("is_lonely", [True, False])
def test_both_the_unified_one_is_used_where_nothing_else_freezes(machine: Machine, is_lonely: bool) -> None:
    machine.v1("memory")
    if not is_lonely:
        machine.v1("freezer")
    machine.v2("cg/unified", "")
    groups = machine.probe()
    assert (groups.v2 is not None) is is_lonely
    assert groups.has("memory")
    [end] = [said for said in groups.describe() if said.part == "ending a guest as a whole"]
    assert ("cgroup v2" in end.text) is is_lonely


def test_what_may_not_be_written_is_not_used_and_the_reason_is_told(machine: Machine) -> None:
    machine.v1("memory")
    machine.v1("pids")
    machine.locked.add(str(machine.root / "cg/memory"))
    groups = machine.probe()
    said = {said.part: said for said in groups.describe()}
    assert said["pids"].is_active
    assert not said["memory"].is_active
    assert said["memory"].text == f"no right to make groups in {machine.root}/cg/memory"
    assert limited(groups, GroupLimits(memory_bytes=1)) == ["memory"]


def test_groups_are_found_again_here_and_elsewhere(machine: Machine) -> None:
    machine.v1("freezer")
    groups = machine.probe()
    limited(groups, GroupLimits())
    later = machine.probe()
    assert [(group.name, group.is_guests) for group in later.found()] == [("sublet-k3/l1/g1", True)]
    assert [group.name for group in later.leases()] == ["sublet-k3/l1"]
    assert later.remove() != []
    machine.make(str(machine.root / "cg/freezer/scope"))
    for part in ("", "/l7", "/l7/g7"):
        machine.make(str(machine.root / f"cg/freezer/scope/sublet-k3{part}"))
    machine.make(str(machine.root / "cg/freezer/scope/sublet-other"))
    [elsewhere] = later.elsewhere()
    assert [group.name for group in elsewhere.found()] == ["sublet-k3/l7/g7"]


def test_a_name_tells_no_id_and_is_another_one_for_every_supervisor(machine: Machine) -> None:
    """Every user of the machine can read it."""
    machine.v1("freezer")
    ids = [f"l-{number:016x}" for number in range(1000)]
    names = []
    for _ in range(2):
        groups = Groups.probe("k3", proc=str(machine.root / "proc"), files=machine)
        found = [groups.group(LeaseId(one), GuestId(f"g-{one}")) for one in ids]
        names += [group.name for group in found if group is not None]
        assert groups.group(LeaseId(ids[0]), GuestId(f"g-{ids[0]}")).name == names[-1000]  # type: ignore[union-attr]
    assert len({part for name in names for part in name.split("/")[1:]}) == 4 * len(ids)
    assert all(re.fullmatch("sublet-k3/[0-9a-f]{16}/[0-9a-f]{16}", name) for name in names)
    assert not [name for name in names if any(one[2:] in name for one in ids)]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_a_name_that_is_no_name_is_refused(machine: Machine, name: str) -> None:
    machine.v1("freezer")
    with pytest.raises(ValueError, match="cannot name a control group"):
        machine.probe().group(LeaseId(name))


def test_a_second_attempt_that_fails_forgets_nothing_of_the_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor nothing can be made, and what is there already has to go in the end all the same."""
    for name in V1:
        machine.v1(name)
    group = machine.probe().group(LEASE)
    assert group is not None
    group.create()
    made = [folder for folder in (f"{machine.root}/cg/{name}/sublet-k3/l1" for name in V1) if os.path.isdir(folder)]
    assert len(made) > 1

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(machine, "make", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            group.create()
    assert group.remove() == []
    assert [folder for folder in made if os.path.isdir(folder)] == []
