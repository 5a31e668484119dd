"""Root gives a tenant what it made for it, and never what the tenant put in its place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.security.conftest import Place


def facts_of(path: str) -> tuple[int, int, int]:
    found = os.lstat(path)
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


@pytest.mark.parametrize("put", ["a link to a file", "a link to a folder", "a link to a device", "a pipe", "nothing"])
def test_the_next_guest_of_a_lease_changes_the_owner_of_nothing_that_the_first_one_named(
    place: Place, tmp_path: Path, put: str
) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.write_text("root only")
    secret.chmod(0o600)
    folder.mkdir(mode=0o700)
    target = {"a link to a file": str(secret), "a link to a folder": str(folder), "a link to a device": "/dev/full"}
    code = ["set -e;", "rm", "-f", '"$SUBLET_TALLY";']
    if put in target:
        code += ["ln", "-s", target[put], '"$SUBLET_TALLY"']
    elif put == "a pipe":
        code += ["mkfifo", '"$SUBLET_TALLY"']
    before = {path: facts_of(path) for path in (str(secret), str(folder), "/dev/full")}
    with place.ben.gpu(min_vram="64MiB") as lease:
        first = lease.start(["sh", "-c", " ".join(code)], cwd="/")
        assert first.wait(timeout=60) != 0, "the file is put up by itself, and its name is not the guest's to change"
        second = lease.start(
            ["sh", "-c", "ls -ldL $SUBLET_TALLY; cat $SUBLET_TALLY < /dev/null & sleep 0.1; id -u"], cwd="/"
        )
        assert second.wait(timeout=60) == 0
    assert {path: facts_of(path) for path in before} == before
