"""What a guest may write is mounted from the descriptor that was looked at, and no link on the way is followed.

On kernels with ``openat2`` and on those without it, or in containers whose filter refuses that call.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.node import by_descriptor
from sublet.node.prctl import set_no_new_privs
from sublet.node.sandbox import root, syscalls
from sublet.node.sandbox.plan import Bind, Ids, SandboxPlan, SandboxProfile, Wish, plan
from sublet.node.sandbox.probe import probe_abilities

OPENAT2: Final = 437
ALLOW: Final = 0x7FFF0000
REFUSE: Final = 0x00050000
mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root may copy mounts here")


@pytest.fixture
def way(tmp_path: Path) -> Path:
    """A folder below others, with a file in it."""
    made = tmp_path / "a" / "b" / "c"
    made.mkdir(parents=True)
    (made / "file").write_text("his")
    return made


@functools.cache
def walls() -> SandboxPlan:
    wish = Wish(folder="/", tenant="ana", ids=Ids(1_900_000_001, 1_900_000_001))
    found = plan(SandboxProfile.TENANT, probe_abilities(), wish)
    assert isinstance(found, SandboxPlan)
    return found


def shown(path: Path, *, file: bool = False) -> int:
    """What a guest would find there: the descriptor that is to be mounted."""
    taken: list[int] = []

    def keep(tree: int, at: str, *, is_folder: bool) -> None:
        assert at
        assert is_folder != file
        taken.append(tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "_put_up", keep)
        piece = root._shown(Bind(str(path), writable=True, optional=False, file=file), walls())
        assert piece is not None
        piece.put("somewhere")
    return taken[0]


@pytest.mark.usefixtures("kernel")
@mounts
def test_a_folder_and_a_file_are_shown(way: Path) -> None:
    for path in (way, way / "file"):
        tree = shown(path, file=path != way)
        assert os.path.samestat(os.fstat(tree), path.stat())
        os.close(tree)


@pytest.mark.usefixtures("kernel")
@mounts
@pytest.mark.parametrize("turned", ["c", "b", "a"])
def test_a_link_anywhere_on_the_way_is_refused(way: Path, turned: str) -> None:
    folder = next(one for one in (way, *way.parents) if one.name == turned)
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved")
    with pytest.raises(OSError, match=f"symbolic link.*{turned}'") as told:
        shown(way)
    assert told.value.errno == errno.ELOOP


@pytest.mark.usefixtures("kernel")
@mounts
def test_what_was_looked_at_is_what_is_mounted(way: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is exchanged in the moment between the two."""
    before, secret = way.stat(), way.parent / "secret"
    secret.mkdir()

    @contextlib.contextmanager
    def exchanged(path: str) -> Iterator[int]:
        with by_descriptor.opened(path) as fd:
            way.rename(way.with_name("moved"))
            secret.rename(way)
            yield fd

    monkeypatch.setattr(root, "opened", exchanged)
    tree = shown(way)
    assert os.path.samestat(os.fstat(tree), before)
    os.close(tree)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_container_whose_filter_refuses_the_call_is_walked_step_by_step(way: Path, number: int) -> None:
    """As the real kernel answers there."""
    (way / "link").symlink_to("file")
    lines = ((0x20, 0, 0, 0), (0x15, 0, 1, OPENAT2), (0x06, 0, 0, REFUSE | number), (0x06, 0, 0, ALLOW))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            set_no_new_privs()
            syscalls.filter_system_calls(b"".join(struct.pack("HBBI", *line) for line in lines))
            with pytest.raises(OSError) as refused:  # noqa: PT011 - the number is compared
                syscalls.openat2("/", os.O_PATH, dir_fd=-100, resolve=0)
            with by_descriptor.opened(str(way / "file")) as fd:
                same = os.path.samestat(os.fstat(fd), (way / "file").stat())
            with pytest.raises(OSError, match="symbolic link"):
                by_descriptor.change(str(way / "link"), mode=0o777)
            status = 0 if same and refused.value.errno == number else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_this_kernel_has_the_call_or_is_older(way: Path) -> None:
    """So that the tests of kernels with it are not all of the other kind unnoticed."""
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 6):
        pytest.skip("openat2 came with Linux 5.6")
    top = os.open("/", os.O_PATH)
    try:
        fd = syscalls.openat2(str(way).lstrip("/"), os.O_PATH, dir_fd=top, resolve=by_descriptor._NO_LINKS)
    except PermissionError:
        pytest.skip("the filter of this container refuses openat2")
    finally:
        os.close(top)
    assert os.path.samestat(os.fstat(fd), way.stat())
    os.close(fd)
