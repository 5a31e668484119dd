"""What a container or a service leaves of the machine, read from pretended trees of both kinds of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sublet.node.agent import limits
from sublet.node.agent.limits import block_bytes, disk_bytes, memory_bytes, offer_again, usable_cores
from sublet.values import GIB, MIB

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
CORES = len(os.sched_getaffinity(0))

V2 = "0::/a.slice/b.service\n"
V1 = "4:cpu,cpuacct:/a\n3:memory:/a/b\n1:name=systemd:/x\n0::/\n"


def tree(root: Path, own: str, **files: str) -> str:
    """A machine in which this process is in ``own``; ``__`` in a name stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("·", ".").replace("ˌ", ",")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, WHOLE),
        (V2, {"memory·max": "max"}, WHOLE),
        (V2, {"memory·max": str(64 * MIB)}, 64 * MIB),
        (V2, {"a·slice__memory·max": str(32 * MIB), "memory·max": str(64 * MIB)}, 32 * MIB),
        (V2, {"a·slice__b·service__memory·max": str(16 * MIB), "a·slice__memory·max": str(32 * MIB)}, 16 * MIB),
        (V2, {"other__memory·max": str(MIB)}, WHOLE),
        (V1, {"memory__a__b__memory·limit_in_bytes": str(8 * MIB)}, 8 * MIB),
        (V1, {"memory__memory·limit_in_bytes": str(9223372036854771712)}, WHOLE),
        (V1, {"unified__memory·max": str(4 * MIB)}, 4 * MIB),
        ("0::/../../elsewhere\n", {"memory·max": str(2 * MIB)}, 2 * MIB),
        ("nonsense\n\n7\n", {"memory·max": "nonsense"}, WHOLE),
    ],
)
def test_the_least_bound_on_memory_counts(tmp_path: Path, own: str, files: dict[str, str], expected: int) -> None:
    assert memory_bytes(tree(tmp_path, own, **files)) == expected


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        (V2, {}, CORES),
        (V2, {"a·slice__cpu·max": "max 100000"}, CORES),
        (V2, {"a·slice__cpu·max": "100000 100000"}, 1),
        (V2, {"a·slice__b·service__cpu·max": "50000 100000"}, 1),
        (V2, {"a·slice__cpu·max": "100000 0"}, CORES),
        (V1, {"cpuˌcpuacct__a__cpu·cfs_quota_us": "150000", "cpuˌcpuacct__a__cpu·cfs_period_us": "100000"}, 1),
        (V1, {"cpu__cpu·cfs_quota_us": "-1", "cpu__cpu·cfs_period_us": "100000"}, CORES),
        (V1, {"cpu__a__cpu·cfs_quota_us": "100000", "cpu__a__cpu·cfs_period_us": "100000"}, 1),
    ],
)
def test_a_quota_of_time_is_worth_so_many_whole_cores_and_at_least_one(
    tmp_path: Path, own: str, files: dict[str, str], most: int
) -> None:
    assert usable_cores(tree(tmp_path, own, **files)) == min(CORES, most)


def test_the_real_machine_has_something(tmp_path: Path) -> None:
    assert 1 <= usable_cores() <= CORES
    assert MIB < memory_bytes() <= WHOLE
    assert block_bytes(tmp_path) % GIB == 0
    assert block_bytes(tmp_path) <= disk_bytes(tmp_path)


def test_an_operator_may_keep_back_more_of_the_disk_and_never_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = os.statvfs_result((4096, 4096, *[100 * GIB // 4096] * 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: there)
    assert [block_bytes(tmp_path, asked) // GIB for asked in (0, GIB, 5 * GIB, 30 * GIB, 200 * GIB)] == [
        95,
        95,
        95,
        70,
        0,
    ]


def test_what_is_lent_or_kept_already_is_not_taken_off_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images have their room on the disk, and the books know of them: both would count them."""
    monkeypatch.setattr(limits, "GIB", MIB)
    free = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    before = block_bytes(tmp_path)
    for place in ("leases/l-1.1.5", "named/ann/ckpt"):
        folder = tmp_path / "blocks" / place
        folder.mkdir(parents=True)
        with (folder / "0.img").open("wb") as image:
            os.posix_fallocate(image.fileno(), 0, 2 * MIB)
    assert before + 4 * MIB <= block_bytes(tmp_path) <= before + 5 * MIB


@pytest.mark.parametrize(
    ("free", "offered"),
    [
        (0, 0),
        (MIB - 1, 0),
        (12 * MIB, 10 * MIB),
        (40 * MIB + 5, 35 * MIB),
        (GIB, GIB - 128 * MIB),
        (16 * GIB, 15 * GIB),
        (400 * GIB, 380 * GIB),
    ],
)
def test_no_more_of_a_disk_is_offered_than_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, offered: int
) -> None:
    class Small:
        f_bavail, f_frsize, f_blocks = free, 1, free

    monkeypatch.setattr(os, "statvfs", lambda _: Small)
    assert block_bytes(tmp_path) == offered


@pytest.mark.parametrize(
    ("before", "there", "changes"),
    [
        (100, 100, False),
        (100, 99, True),
        (100, 103, False),
        (100, 106, True),
        (0, 0, False),
        (0, 1, True),
        (5, 6, True),
    ],
)
def test_less_is_offered_at_once_and_more_when_it_is_worth_it(before: int, there: int, changes: bool) -> None:
    assert offer_again(before, there) is changes
