"""What the planner found for a course, as it is kept."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from sublet.errors import InvalidRequest, JournalError
from sublet.studio.plan import BYTES_MAX, CoursePlan, Queue, last_plan, save_plan

EIGHT = Queue(gpus=8, at_once=0.991, median_s=0.0, p95_s=75.0, longest=12)
PLAN = CoursePlan(made_at="2026-03-01T10:00:00Z", now=EIGHT, less=None)


def test_the_last_one_of_a_group_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "studio"
    assert last_plan(folder, "ml1") is None
    save_plan(folder, "ml1", PLAN)
    later = CoursePlan(made_at="2026-03-02T10:00:00Z", now=EIGHT, less=msgspec.structs.replace(EIGHT, gpus=7))
    path = save_plan(folder, "ml1", later)
    assert last_plan(folder, "ml1") == later
    assert last_plan(folder, "ml2") is None
    assert [one.name for one in path.parent.iterdir()] == ["ml1.json"], "no temporary file stays"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 2}', b"\xff", b"{" * 5000, b'"' + b"x" * (2 * BYTES_MAX) + b'"'],
    ids=["empty", "half", "list", "newer", "no-text", "deep", "huge"],
)
def test_a_file_that_is_no_plan_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    save_plan(tmp_path, "ml1", PLAN).write_bytes(content)
    with pytest.raises(InvalidRequest, match="the saved plan of ml1 cannot be read"):
        last_plan(tmp_path, "ml1")


@pytest.mark.parametrize("group", ["../people", "a/b", "", ".", "x" * 200])
def test_a_name_that_is_no_groups_names_no_file(tmp_path: Path, group: str) -> None:
    with pytest.raises(InvalidRequest):
        save_plan(tmp_path, group, PLAN)
    with pytest.raises(InvalidRequest):
        last_plan(tmp_path, group)
    assert not list(tmp_path.rglob("*.json"))


def test_what_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path = save_plan(tmp_path, "ml1", PLAN)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError, match="cannot be written"):
        save_plan(tmp_path, "ml1", PLAN)
    assert [one.name for one in path.parent.iterdir()] == ["ml1.json"]
