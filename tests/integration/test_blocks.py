"""What leases have of disk and memory: of the leased size, found by guests, and gone without a trace.

What is there is read from the machine: mounts and loop devices from the kernel, files by looking.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.errors import CapacityExceeded, SubletError
from sublet.lease_end import EndReason
from sublet.node.storage.mounts import loops_of, mounts_below
from sublet.node.storage.stores_work import KEPT, why_no_image
from sublet.values import (
    GIB,
    MIB,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    ResourceId,
    TenantId,
)
from sublet.wire.codec import dumps
from sublet.wire.guests import Admit, Front, Guests, GuestView, ListGuests, Profile
from sublet.wire.orders import Device, End, Grant, Held, Inventory, Part, TornDown
from sublet.wire.settings import SupervisorSettings
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from tests.integration import supervisor_stage
from tests.integration.supervisor_stage import TENANT, HolderLine, SupervisorStage, supervisor_at
from tests.traces import PUT_AWAY_S, now_ns, until

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6, E7 = Epoch(1, 5), Epoch(1, 6), Epoch(1, 7)
S = 1_000_000_000
LEASES: Final = int(os.environ.get("SUBLET_BLOCK_LEASES", "30"))
"""That come and go at once; the soak has a hundred."""
SIZES: Final = {Kind.BLOCK: GIB, Kind.MEMORY: 4 * GIB, Kind.CPU: 64}
needs_images = pytest.mark.skipif(bool(why_no_image()), reason=f"needs images: {why_no_image()}")
STARTED: Final = (
    "import os, sys; sys.path.insert(0, sys.argv[1])\n"
    "from sublet.node.supervisor import __main__ as program\n"
    "from sublet.node.processes.cgroups import Groups\n"
    "{code}\n"
    "sys.exit(program.main(sys.argv[2]))\n"
)
WITHOUT_GROUPS: Final = "Groups.probe = classmethod(lambda cls, office, **_: cls.none(office))"
WITHOUT_ROOT: Final = (
    "from sublet.node.supervisor.office_lock import OfficeLock; OfficeLock.take = lambda self: None; "
    "os.geteuid = lambda: 65534"
)
"""The lock would find that what it makes is root's after all."""


def inventory() -> Inventory:
    devices = tuple(Device(id=ResourceId(f"bench/{kind}"), kind=kind, capacity=size) for kind, size in SIZES.items())
    return Inventory(node=NodeId("bench"), domain="bench", devices=devices)


def stage_at(place: Path) -> contextlib.AbstractContextManager[SupervisorStage]:
    return supervisor_at(place, inventory=inventory())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with stage_at(tmp_path) as found:
        yield found


def stage_of(
    code: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> contextlib.AbstractContextManager[SupervisorStage]:
    """One whose supervisor finds less of a machine than there is."""

    def command(settings: SupervisorSettings) -> list[str]:
        argv = (STARTED.format(code=code), settings.package, dumps(settings).decode())
        return [sys.executable, "-I", "-S", "-c", *argv]

    monkeypatch.setattr(supervisor_stage, "command", command)
    return stage_at(place)


@pytest.fixture
def bare_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorStage]:
    """A supervisor that has no control groups."""
    with stage_of(WITHOUT_GROUPS, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def plain_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorStage]:
    """Nor the rights of root, as far as it asks."""
    with stage_of(f"{WITHOUT_GROUPS}; {WITHOUT_ROOT}", tmp_path, monkeypatch) as found:
        yield found


def part(kind: Kind, amount: int) -> Part:
    return Part(resource=ResourceId(f"bench/{kind}"), kind=kind, amount=amount)


def grant(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, *parts: Part, name: str = "") -> None:
    order = Grant(
        lease=lease,
        epoch=epoch,
        number=1,
        tenant=TENANT,
        parts=parts,
        deadline_ns=now_ns() + 300 * S,
        ttl_ns=300 * S,
        name=name,
    )
    stage.office_line.order(order)


def held(stage: SupervisorStage, lease: LeaseId) -> None:
    def is_held() -> bool:
        stage.office_line.wait(0.02)
        return any(isinstance(one, Held) and one.lease == lease for one in stage.office_line.reports)

    until(f"a held {lease}", is_held)


def end(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, *parts: Part) -> None:
    stage.office_line.order(End(lease=lease, epoch=epoch, number=9, parts=parts, reason=EndReason.RELEASED, grace_ns=0))


def torn_down(stage: SupervisorStage, count: int) -> None:
    def is_heard() -> bool:
        stage.office_line.wait(0.02)
        return sum(isinstance(report, TornDown) for report in stage.office_line.reports) >= count

    until(f"{count} verified ends", is_heard)


def python(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, code: str) -> Callable[[], Any]:
    """Run this in a guest; the answer is what it hands to ``say``."""
    out = stage.state / f"answer-{os.urandom(4).hex()}"
    head = f"import json, os, sys\ndef say(it):\n    open({str(out) + '~'!r}, 'w').write(json.dumps(it))\n"
    head += f"    os.rename({str(out) + '~'!r}, {str(out)!r})\n"
    stage.holder(lease, epoch).start(sys.executable, "-I", "-S", "-c", head + code)

    def answer() -> Any:
        until("an answer of the guest", out.exists)
        return json.loads(out.read_text())

    return answer


def view(stage: SupervisorStage, lease: LeaseId) -> GuestView:
    found = stage.office_line.ask(ListGuests(lease=lease, ended=True))
    assert isinstance(found, Guests)
    return found.guests[-1]


def log_of(stage: SupervisorStage, lease: LeaseId) -> str:
    folder = stage.state / "guests" / view(stage, lease).id
    return "".join(path.read_bytes().decode(errors="replace") for path in sorted(folder.glob("*")))


def traces(stage: SupervisorStage) -> list[str]:
    """What stores leave on a machine."""
    found = stage.residue()
    for base in (stage.state, stage.runtime):
        found += [f"mount {mount.point}" for mount in mounts_below(str(base))]
        found += loops_of(str(base))
    for base in (stage.state / "blocks" / "leases", stage.runtime / "memory"):
        for folder, folders, files in os.walk(base):  # what goes meanwhile is no trace
            found += [os.path.join(folder, name) for name in (*folders, *files)]
    return found


FILL = """
import errno
path = os.environ["SUBLET_BLOCK"]
room = os.statvfs(path)
total, why = 0, 0
try:
    with open(path + "/full", "wb", buffering=0) as file:
        while total < (64 << 20):
            total += file.write(bytes(1 << 16))
except OSError as error:
    why = error.errno
say({"path": path, "size": room.f_blocks * room.f_frsize, "total": total, "why": errno.errorcode.get(why, why)})
import time; time.sleep(1000)
"""


@needs_images
def test_a_block_has_its_size_and_is_gone_with_its_lease(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 8 * MIB)
    grant(stage, A, E5, size)
    answer = python(stage, A, E5, FILL)()
    assert answer["why"] == "ENOSPC"
    assert 6 * MIB < answer["total"] < 8 * MIB
    assert answer["size"] < 8 * MIB
    (mount,) = mounts_below(str(stage.state))
    assert mount.point == os.path.realpath(answer["path"])
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        line = next(line for line in file if mount.point in line)
    assert "nosuid" in line
    assert "nodev" in line
    (stage.state / "beside").write_bytes(b"there is room for others")
    end(stage, A, E5, size)
    torn_down(stage, 1)
    until("no trace", lambda: traces(stage) == [])


def test_a_block_too_small_for_a_file_system_is_counted_and_said(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 65536)
    grant(stage, A, E5, size)
    assert python(stage, A, E5, FILL)()["why"] == 0
    until("a line that it is too full", lambda: "64KiB are leased" in log_of(stage, A))
    assert log_of(stage, A).count("are leased") == 1
    end(stage, A, E5, size)
    torn_down(stage, 1)
    until("no trace", lambda: traces(stage) == [])


@pytest.mark.parametrize("amount", [65536, pytest.param(2 * MIB, marks=needs_images)])
def test_a_folder_with_a_name_outlives_its_lease(stage: SupervisorStage, amount: int) -> None:
    size = part(Kind.BLOCK, amount)
    grant(stage, A, E5, size, name="ckpt")
    write = "path = os.environ['SUBLET_BLOCK']; open(path + '/x', 'w').write('saved'); say(path)"
    path = Path(python(stage, A, E5, write)())
    grant(stage, B, E6, size, name="ckpt")  # the older lease is one that a restored office forgot
    held(stage, B)
    assert python(stage, B, E6, "say(open(os.environ['SUBLET_BLOCK'] + '/x').read())")() == "saved"
    end(stage, A, E5, size)
    end(stage, B, E6, size)
    torn_down(stage, 2)
    until("no trace", lambda: traces(stage) == [])
    folder = stage.state / "blocks" / "named" / "local" / "ckpt"
    assert (folder / KEPT).exists()
    for kept in (path, *folder.glob("*.img")):
        assert not kept.stat().st_mode & 0o222
    again = LeaseId("lease-c")
    grant(stage, again, E7, size, name="ckpt")
    assert python(stage, again, E7, "say(open(os.environ['SUBLET_BLOCK'] + '/x').read())")() == "saved"
    end(stage, again, E7, size)
    torn_down(stage, 3)


def test_a_folder_with_a_name_that_was_never_used_is_not_kept(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 65536)
    grant(stage, A, E5, size, name="ckpt")
    stage.holder(A, E5).start("sleep", "1000")
    end(stage, A, E5, size)
    torn_down(stage, 1)
    assert not (stage.state / "blocks" / "named" / "local" / "ckpt").exists()


@needs_images
def test_what_is_kept_with_another_size_is_not_touched(stage: SupervisorStage) -> None:
    size, other = part(Kind.BLOCK, 2 * MIB), part(Kind.BLOCK, 4 * MIB)
    grant(stage, A, E5, size, name="ckpt")
    python(stage, A, E5, "open(os.environ['SUBLET_BLOCK'] + '/x', 'w').write('saved'); say(1)")()
    end(stage, A, E5, size)
    torn_down(stage, 1)
    grant(stage, B, E6, other, name="ckpt")
    with pytest.raises(CapacityExceeded, match="kept with 2MiB, and the lease has 4MiB"):
        stage.holder(B, E6).start("true")
    end(stage, B, E6, other)
    torn_down(stage, 2)
    until("no trace", lambda: traces(stage) == [])
    assert (stage.state / "blocks" / "named" / "local" / "ckpt" / "0.img").stat().st_size == 2 * MIB


@needs_images
def test_a_disk_without_room_refuses_the_guest_and_leaves_nothing(stage: SupervisorStage) -> None:
    free = os.statvfs(stage.state)
    size = part(Kind.BLOCK, min(1 << 50, free.f_blocks * free.f_frsize * 2))
    stage.inventory = Inventory(
        node=NodeId("bench"),
        domain="bench",
        devices=(Device(id=size.resource, kind=Kind.BLOCK, capacity=1 << 60),),
    )
    stage.hang_up()
    stage.connect()
    grant(stage, A, E5, size)
    with pytest.raises(SubletError, match=r"has no room for|could not be made"):
        stage.holder(A, E5).start("true")
    end(stage, A, E5, size)
    torn_down(stage, 1)
    until("no trace", lambda: traces(stage) == [])


def test_many_leases_leave_nothing(stage: SupervisorStage) -> None:
    """Each with a folder, some with a segment as well; several at once come and go."""
    code = 'test -d "$SUBLET_BLOCK" && : > "$SUBLET_BLOCK/x"; sleep 1000'
    leases = {
        LeaseId(f"lease-{n}"): (
            Epoch(1, 100 + n),
            (part(Kind.BLOCK, MIB), *((part(Kind.MEMORY, 16 * MIB),) if n % 5 == 0 else ())),
        )
        for n in range(LEASES)
    }
    for lease, (epoch, parts) in leases.items():
        grant(stage, lease, epoch, *parts)
    lines = {lease: stage.holder(lease, epoch) for lease, (epoch, _) in leases.items()}
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda line: line.start("sh", "-c", code), lines.values()))) == len(leases)
    for lease, (epoch, parts) in leases.items():
        end(stage, lease, epoch, *parts)

    def verified() -> int:
        stage.office_line.wait(0.02)
        return sum(len(one.resources) for one in stage.office_line.reports if isinstance(one, TornDown))

    every = sum(len(parts) for _, parts in leases.values())
    until("every verified end", lambda: verified() == every, patience_s=180)
    until("no trace", lambda: traces(stage) == [], patience_s=180)


@needs_images
def test_a_supervisor_that_was_killed_leaves_its_images_to_the_next(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 2 * MIB)
    assert "Error" not in tenants_guest(stage, size, part(Kind.MEMORY, 64 * MIB))
    grant(stage, B, E6, size, name="ckpt")
    python(stage, B, E6, "open(os.environ['SUBLET_BLOCK'] + '/x', 'w').write('saved'); say(1)")()
    assert len(mounts_below(str(stage.state))) == 2
    assert len(mounts_below(str(stage.runtime))) == 1
    stage.kill()
    stage.start()
    stage.connect()
    all_of_it = part(Kind.BLOCK, GIB)
    whole = LeaseId("lease-whole")
    grant(stage, whole, E7, all_of_it)
    held(stage, whole)
    assert [one for one in traces(stage) if "mount" in one] == []
    until("free loop devices", lambda: not loops_of(str(stage.state)), PUT_AWAY_S)
    until("no trace of the lease", lambda: not [one for one in traces(stage) if "lease-a" in one])
    assert (stage.state / "blocks" / "named" / "local" / "ckpt" / KEPT).exists()


# ---------------------------------------------------------------------------------------------------------- memory

GROW = """
import errno, mmap
path = os.environ["SUBLET_MEMORY"]
fd = os.open(path, os.O_RDWR)
size = os.fstat(fd).st_size
found = mmap.mmap(fd, size)
found[-1:] = b"x"
try:
    for at in range(0, size * 2, 1 << 20):
        os.pwrite(fd, bytes(1 << 20), at)
    more = "it grew"
except OSError as error:
    more = errno.errorcode[error.errno]
say({"path": path, "size": size, "more": more})
import time; time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["bare_stage", "plain_stage"])
def test_memory_is_a_segment_of_just_its_size(kind: str, request: pytest.FixtureRequest) -> None:
    """Without groups, whose cap on guests and segment together would be met first. That of a tenant is a file system
    (below)."""
    found: SupervisorStage = request.getfixturevalue(kind)
    size = part(Kind.MEMORY, 32 * MIB)
    grant(found, A, E5, size)
    answer = python(found, A, E5, GROW)()
    assert answer["size"] == 32 * MIB
    assert answer["more"] == "EPERM"
    assert os.path.exists(answer["path"])
    end(found, A, E5, size)
    torn_down(found, 1)
    until("no trace", lambda: traces(found) == [])
    assert not os.path.exists(answer["path"])


@pytest.mark.parametrize("kind", ["bare_stage", "plain_stage"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_memory_that_somebody_else_has_is_not_free(kind: str, flags: int, request: pytest.FixtureRequest) -> None:
    """A program that is no guest has mapped the segment: it is not said to be gone before that is."""
    found: SupervisorStage = request.getfixturevalue(kind)
    size = part(Kind.MEMORY, 32 * MIB)
    grant(found, A, E5, size)
    fd = os.open(python(found, A, E5, GROW)()["path"], flags)
    with mmap.mmap(fd, 32 * MIB, prot=mmap.PROT_READ | (mmap.PROT_WRITE if flags else 0)):
        os.close(fd)
        end(found, A, E5, size)
        until("the guest is gone", lambda: view(found, A).state == "gone")
        for _ in range(6):
            found.office_line.wait(0.05)
        assert not any(isinstance(one, TornDown) for one in found.office_line.reports)
    torn_down(found, 1)
    until("no trace", lambda: traces(found) == [])


def test_a_segment_with_much_in_it_is_freed_by_a_forked_job(bare_stage: SupervisorStage) -> None:
    size = part(Kind.MEMORY, 96 * MIB)
    grant(bare_stage, A, E5, size)
    assert python(bare_stage, A, E5, GROW)()["more"] == "EPERM"
    end(bare_stage, A, E5, size)
    torn_down(bare_stage, 1)
    until("no trace", lambda: traces(bare_stage) == [])


TENANTS_GUEST = """
import json, os
found = {}
for name in ("BLOCK", "MEMORY"):
    path = os.environ["SUBLET_" + name]
    with open(path + ("/x" if name == "BLOCK" else ""), "r+b" if name == "MEMORY" else "wb") as file:
        file.write(b"mine")
    found[name] = os.stat(path + ("/x" if name == "BLOCK" else "")).st_uid
found["uid"] = os.getuid()
found["beside"] = os.listdir(os.path.dirname(os.environ["SUBLET_BLOCK"]))
here = os.statvfs(os.path.dirname(os.environ["SUBLET_MEMORY"]))
found["room"] = here.f_blocks * here.f_frsize
print(json.dumps(found), flush=True)
import time; time.sleep(1000)
"""


def tenants_guest(stage: SupervisorStage, *parts: Part) -> str:
    """Start it; what it has said."""
    anna = TenantId("anna")
    stage.office_line.order(
        Grant(lease=A, epoch=E5, number=1, tenant=anna, parts=parts, deadline_ns=now_ns() + 300 * S, ttl_ns=300 * S)
    )
    mine, theirs = socket.socketpair()
    front = Front(tenant=anna, operator=False, profile=Profile.TENANT, lease=A, epoch=E5, operations=("run", "logs"))
    stage.office_line.ask(Admit(front=front, oldest=WIRE_OLDEST, newest=WIRE_VERSION), (theirs.detach(),))
    with contextlib.closing(HolderLine(mine)) as holder:
        holder.start("/usr/bin/python3", "-I", "-S", "-c", TENANTS_GUEST)
        until("an answer", lambda: "beside" in log_of(stage, A) or "Error" in log_of(stage, A))
        return log_of(stage, A)


@needs_images
def test_a_tenants_guest_may_write_to_what_its_lease_has_and_sees_nothing_beside(stage: SupervisorStage) -> None:
    parts = (part(Kind.BLOCK, 2 * MIB), part(Kind.MEMORY, 64 * MIB))
    text = tenants_guest(stage, *parts)
    assert "Error" not in text, text
    found = json.loads(text[text.index('{"') : text.rindex("}") + 1])
    assert found["BLOCK"] == found["MEMORY"] == found["uid"] != 0
    assert found["beside"] == ["0"]
    assert found["room"] == 64 * MIB, "a file system of its own, of just that size"
    end(stage, A, E5, *parts)
    torn_down(stage, 1)
    until("no trace", lambda: traces(stage) == [])


def test_an_ordinary_user_has_folders_whose_size_is_counted(plain_stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 2 * MIB)
    grant(plain_stage, A, E5, size)
    assert python(plain_stage, A, E5, FILL)()["why"] == 0
    until("a line that it is too full", lambda: "2MiB are leased" in log_of(plain_stage, A))
    end(plain_stage, A, E5, size)
    torn_down(plain_stage, 1)
    until("no trace", lambda: traces(plain_stage) == [])


HUNGRY = """
import time
found = []
for _ in range(64):
    found.append(bytearray(b"x") * (4 << 20))
    time.sleep(0.01)
say("all of it")
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["stage", "bare_stage"])
def test_who_takes_more_memory_than_leased_is_ended_and_told_why(kind: str, request: pytest.FixtureRequest) -> None:
    """By its control group where there is one, and else by looking once a second."""
    found: SupervisorStage = request.getfixturevalue(kind)
    grant(found, A, E5, part(Kind.MEMORY, 48 * MIB))
    python(found, A, E5, HUNGRY)
    until("the end of the guest", lambda: view(found, A).state == "gone")
    seen = view(found, A)
    assert seen.reason == EndReason.OUT_OF_MEMORY
    assert seen.exit_code == 137
    assert "the lease has 48MiB of memory" in log_of(found, A)
    assert "out_of_memory" in log_of(found, A)
    end(found, A, E5, part(Kind.MEMORY, 48 * MIB))
    torn_down(found, 1)


FORKED = """
import time
found = bytearray(b"x") * (32 << 20)
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    children.append(pid)
time.sleep(2.5)
say("still here")
time.sleep(1000)
"""


def test_memory_that_children_share_counts_once(bare_stage: SupervisorStage) -> None:
    grant(bare_stage, A, E5, part(Kind.MEMORY, 128 * MIB))
    assert python(bare_stage, A, E5, FORKED)() == "still here"


# ----------------------------------------------------------------------------------------------------------- cores

AFFINITY = "say(sorted(os.sched_getaffinity(0))); import time; time.sleep(1000)"


def test_without_groups_guests_are_kept_on_the_cores_used_least(bare_stage: SupervisorStage) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    grant(bare_stage, A, E5, part(Kind.CPU, 1))
    grant(bare_stage, B, E6, part(Kind.CPU, 1))
    first = python(bare_stage, A, E5, AFFINITY)()
    second = python(bare_stage, B, E6, AFFINITY)()
    assert first == allowed[:1]
    assert second == (allowed[1:2] or first)
    again = python(bare_stage, A, E5, AFFINITY)()
    assert again == first, "all guests of a lease share its cores"


BUSY = """
import time
for _ in range(2):
    if os.fork() == 0:
        while True:
            pass
time.sleep(1000)
"""


def test_a_lease_of_one_core_uses_one(stage: SupervisorStage) -> None:
    """Two that never rest, under one core: by time where a group caps it, by place elsewhere."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, to see that only one is used")
    grant(stage, A, E5, part(Kind.CPU, 1))
    stage.holder(A, E5).start(sys.executable, "-I", "-S", "-c", "import os" + BUSY)
    until("some work", lambda: view(stage, A).cpu_ns > S // 5)
    began_ns, used_ns = now_ns(), view(stage, A).cpu_ns
    until("some time", lambda: now_ns() - began_ns > 3 * S // 2)
    cores = (view(stage, A).cpu_ns - used_ns) / (now_ns() - began_ns)
    assert cores < 1.35
    end(stage, A, E5, part(Kind.CPU, 1))
    torn_down(stage, 1)
