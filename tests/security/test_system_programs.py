"""Root runs the system's own programs, whatever its caller has in ``PATH``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sublet.wire import system_programs
from sublet.wire.system_programs import find_program


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the system's."""
    folder = tmp_path / "sbin"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(system_programs, "SYSTEM_FOLDERS", (str(folder),))
    return folder


def laid(folder: Path, mode: int = 0o755) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / "mkfs.ext4"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    return program


def test_root_does_not_look_where_its_caller_says(tmp_path: Path, system: Path) -> None:
    callers, ours = laid(tmp_path / "caller"), laid(system)
    path = f"{callers.parent}{os.pathsep}{os.defpath}"
    assert find_program("mkfs.ext4", path, uid=0) == str(ours)
    assert find_program("mkfs.ext4", path, uid=1000) == str(callers)


def test_what_lies_in_no_folder_of_the_systems_root_does_not_have(tmp_path: Path, system: Path) -> None:
    callers = laid(tmp_path / "caller")
    assert find_program("mkfs.ext4", str(callers.parent), uid=0) is None
    assert find_program("mkfs.ext4", "caller:.:", uid=1000) is None, "a folder that is not named in full"


@pytest.mark.parametrize("who", ["a file that others write", "a folder that others write", "a folder of a user's"])
def test_what_others_could_have_put_there_root_does_not_run(system: Path, who: str) -> None:
    ours = laid(system)
    assert find_program("mkfs.ext4", "", uid=0) == str(ours)
    if who == "a file that others write":
        ours.chmod(0o757)
    elif who == "a folder that others write":
        system.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(system, 65534, 65534)
    else:
        pytest.skip("only root can give a folder away")
    assert find_program("mkfs.ext4", "", uid=0) is None


def test_a_link_counts_by_where_it_leads(tmp_path: Path, system: Path) -> None:
    shared = tmp_path / "shared"
    other = laid(shared)
    shared.chmod(0o777)
    (system / "mkfs.ext4").symlink_to(other)
    assert find_program("mkfs.ext4", "", uid=0) is None


def test_the_systems_own_is_found() -> None:
    assert find_program("sh", "", uid=0) in ("/usr/bin/sh", "/bin/sh", "/run/current-system/sw/bin/sh")
