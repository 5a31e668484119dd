"""Process trees, played with real processes, each scene on a stage (``tree_stage``) of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from sublet.node.processes.cgroups_places import find_places

ROOT: Final = Path(__file__).parents[2]
IS_ROOT: Final = os.getuid() == 0
HAS_GROUPS: Final = IS_ROOT and os.access("/sys/fs/cgroup", os.W_OK)
HAS_UNIFIED: Final = IS_ROOT and any(place.is_v2 and not place.why_not for place in find_places())

EVERYWHERE: Final = (
    *("forks", "double_forks", "new_sessions", "deaf", "listening", "stopped", "nobodys", "zombies"),
    *("another_with_its_number", "accounted", "swept"),
)


def play(scene: str, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.tree_stage", scene, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_GROUPS, reason="only root may make control groups here")
@pytest.mark.parametrize("scene", [*EVERYWHERE, "fork_bomb", "leaves_its_group", "limited"])
def test_with_groups(scene: str) -> None:
    play(scene, "groups")


@pytest.mark.skipif(not HAS_UNIFIED, reason="only root may make groups, in a hierarchy of cgroup v2")
@pytest.mark.parametrize("scene", ["forks", "nobodys", "zombies", "leaves_its_group", "swept"])
def test_with_groups_of_v2_alone(scene: str) -> None:
    play(scene, "unified")


@pytest.mark.skipif(not IS_ROOT, reason="the scenes of root need root")
@pytest.mark.parametrize("scene", ["nobodys", "swept", "double_forks"])
def test_as_root_without_groups(scene: str) -> None:
    play(scene, "none")


@pytest.mark.parametrize("scene", [*EVERYWHERE, "fork_bomb"])
def test_as_an_ordinary_user(scene: str) -> None:
    play(scene, "user")


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/freezer", os.W_OK), reason="needs a freezer of cgroup v1, and root")
@pytest.mark.parametrize("how", ["groups", "none"])
def test_what_is_frozen_by_somebody_else_is_shown_until_it_is_thawed(how: str) -> None:
    play("frozen", how)
