"""The folder of the shared sockets: what will not do is refused with what to do, and is not changed."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.engines.shared_folder import ROOTS_FOLDER, listen_for_all, parse_shared_folder, prepare
from sublet.errors import InvalidRequest

HOME = Path("/nowhere/at/all")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that others can enter, as the folders of tests usually are not."""
    with tempfile.TemporaryDirectory(prefix="sublet-folder-") as text:
        os.chmod(text, 0o755)
        yield Path(text)


def test_a_folder_is_made_that_everybody_may_enter_and_only_the_owner_change(open_folder: Path) -> None:
    before = os.umask(0o077)
    made = open_folder / "shared"
    try:
        for _ in range(2):
            assert prepare(made, HOME) == made
            assert stat.S_IMODE(made.stat().st_mode) == 0o755
        with listen_for_all(made / "office.sock"):
            assert stat.S_IMODE((made / "office.sock").stat().st_mode) == 0o666
    finally:
        os.umask(before)


def _private(folder: Path) -> Path:
    (folder / "shared").mkdir(mode=0o700)
    return folder / "shared"


def _writable(folder: Path) -> Path:
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    return folder / "shared"


def _below_private(folder: Path) -> Path:
    (folder / "mine").mkdir(mode=0o700)
    return folder / "mine" / "shared"


def _below_writable(folder: Path) -> Path:
    (folder / "all").mkdir()
    (folder / "all").chmod(0o777)
    return folder / "all" / "shared"


def _link(folder: Path) -> Path:
    (folder / "there").mkdir()
    (folder / "shared").symlink_to(folder / "there")
    return folder / "shared"


def _file(folder: Path) -> Path:
    (folder / "shared").touch()
    return folder / "shared"


def _without_parent(folder: Path) -> Path:
    return folder / "none" / "shared"


@pytest.mark.parametrize(
    ("make", "said", "do"),
    [
        (_private, "other users cannot enter the shared folder", "chmod 755"),
        (_writable, "other users may write into", "chmod 755"),
        (_below_private, "mine, which other users cannot enter", "they can reach"),
        (_below_writable, "which other users can write", "only root or you"),
        (_link, "is not a folder", "not a link"),
        (_file, "is not a folder", ""),
        (_without_parent, "cannot be made", "parent first"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_and_left_as_it_was(
    open_folder: Path, make: Callable[[Path], Path], said: str, do: str
) -> None:
    folder = make(open_folder)
    before = [(path, path.lstat().st_mode) for path in sorted(open_folder.rglob("*"))]
    with pytest.raises(InvalidRequest) as refused:
        prepare(folder, HOME)
    assert said in refused.value.message
    assert do in refused.value.do
    assert [(path, path.lstat().st_mode) for path in sorted(open_folder.rglob("*"))] == before


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder can only be given away by root")
def test_another_users_folder_is_refused(open_folder: Path) -> None:
    (open_folder / "shared").mkdir()
    os.chown(open_folder / "shared", 65534, 65534)
    with pytest.raises(InvalidRequest, match="belongs to user 65534"):
        prepare(open_folder / "shared", HOME)


@pytest.mark.parametrize("shared", [".", "..", "below"])
def test_it_lies_apart_from_the_state_folder(open_folder: Path, shared: str) -> None:
    home = open_folder / "home"
    with pytest.raises(InvalidRequest, match="lie within each other"):
        prepare(Path(os.path.normpath(home / shared)), home)


def test_a_socket_that_another_office_serves_is_left_alone_and_a_stale_one_is_not(open_folder: Path) -> None:
    path = open_folder / "office.sock"
    with listen_for_all(path):
        with pytest.raises(InvalidRequest, match="another office serves"):
            listen_for_all(path)
        assert path.is_socket()
    with listen_for_all(path), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
    path.unlink()
    path.write_text("mine")
    with pytest.raises(InvalidRequest, match="in the way"):
        listen_for_all(path)
    assert path.read_text() == "mine"


def test_root_has_a_usual_folder_and_others_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert parse_shared_folder("") == Path(ROOTS_FOLDER)
    assert parse_shared_folder("/srv/../srv/sublet") == Path("/srv/sublet")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InvalidRequest, match="no folder"):
        parse_shared_folder("")
    with pytest.raises(InvalidRequest):
        parse_shared_folder("a\0b")


def test_an_office_that_many_ask_at_once_keeps_its_socket(open_folder: Path) -> None:
    """Its backlog is full, so no connection is made; it is served all the same."""
    path = open_folder / "office.sock"
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(listen_for_all(path))
        served.listen(0)
        asking = stack.enter_context(socket.socket(socket.AF_UNIX))
        asking.connect(os.fspath(path))
        with pytest.raises(InvalidRequest, match="another office serves"):
            listen_for_all(path)
        assert path.is_socket()
