"""Files of a volume that are opened for a holder of another user: only what is published, and its own staging."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.node.storage.handed_files import STAGED_FOLDERS_MAX, list_volume, open_files, take_handed
from sublet.node.storage.volume_folder import VolumeAccess, lay_out
from sublet.values import Epoch, LeaseId
from sublet.wire.volumes import FILES_MAX, FilesOpened, ListVolume, OpenFiles, VolumeOpened
from tests.left_open import nothing_left_open
from tests.unit.node.storage.test_publish import Bench, big

LEASE, EPOCH = LeaseId("l-1"), Epoch(1, 2)
PACK = "ab" * 32 + ".pack"
MANIFEST = "0000000000000001.manifest"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[VolumeAccess]:
    folder = tmp_path / "volume"
    folder.mkdir()
    made = VolumeAccess(
        folder=str(folder),
        lock=f"{folder}.lock",
        size=1 << 20,
        counted=True,
        owner=os.geteuid(),
        group=os.getegid(),
        apart=True,
    )
    opened = VolumeOpened(
        lease=LEASE, epoch=EPOCH, name="", folder=str(folder), staging="", size=1 << 20, counted=True
    )  # fmt: skip
    lay_out(made, opened)
    (folder / "packs" / PACK).write_bytes(b"pack")
    (folder / "checkpoints" / MANIFEST).write_bytes(b"manifest")
    (tmp_path / "secret").write_text("secret")
    with nothing_left_open():
        yield made


def opened(place: VolumeAccess, *names: str, staging: str = "", write: bool = False) -> list[bytes]:
    """What the files hold, one after the other; new ones get their name as content."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, its:
        try:
            asked = OpenFiles(lease=LEASE, epoch=EPOCH, names=names, staging=staging, write=write)
            assert open_files(place, asked, EPOCH, its.fileno()) == FilesOpened(names=names)
        finally:
            fds = take_handed(mine)
    found = []
    for name, fd in zip(names, fds, strict=True):
        with open(fd, "r+b" if write else "rb") as file:
            if write:
                file.write(name.encode())
            file.seek(0)
            found.append(file.read())
    return found


def test_what_is_published_is_read_and_what_is_staged_is_written(place: VolumeAccess) -> None:
    assert opened(place, PACK, MANIFEST) == [b"pack", b"manifest"]
    assert opened(place, "a", "b", staging="s", write=True) == [b"a", b"b"]
    assert opened(place, "b", staging="s") == [b"b"]
    assert (Path(place.folder) / "staging" / f"{EPOCH}.holder" / "s" / "a").read_bytes() == b"a"
    listed = list_volume(place, ListVolume(lease=LEASE, epoch=EPOCH))
    assert listed.numbers == (1,)
    assert 0 < listed.room < 1 << 20


@pytest.mark.parametrize(
    ("names", "staging", "write"),
    [
        (("../secret",), "", False),
        (("/etc/passwd",), "", False),
        (("lock",), "", False),
        (("..",), "", False),
        (("x" * 300 + ".pack",), "", False),
        ((MANIFEST + "\0",), "", False),
        ((PACK,), "", True),
        ((), "", False),
        ((PACK,) * (FILES_MAX + 1), "", False),
        (("../../packs/x",), "s", True),
        (("x",), "..", True),
        (("x",), "../../packs", True),
        (("x",), "/tmp", True),
        (("",), "s", True),
        (("link",), "s", False),
        (("link",), "s", True),
        (("pipe",), "s", False),
        (("x",), "elsewhere", True),
    ],
)
def test_no_name_leads_elsewhere(place: VolumeAccess, names: tuple[str, ...], staging: str, write: bool) -> None:
    """Also where whoever has the volume put links and pipes into the way."""
    own = Path(place.folder) / "staging" / f"{EPOCH}.holder"
    (own / "s").mkdir()
    (own / "s" / "link").symlink_to(Path(place.folder).parent / "secret")
    os.mkfifo(own / "s" / "pipe")
    (own / "elsewhere").symlink_to("/tmp")
    with pytest.raises(InvalidRequest):
        opened(place, *names, staging=staging, write=write)
    assert (Path(place.folder).parent / "secret").read_text() == "secret"


def test_what_is_not_there_is_said_so(place: VolumeAccess) -> None:
    with pytest.raises(NotFound):
        opened(place, "0000000000000002.manifest")
    with pytest.raises(NotFound):
        opened(place, "x", staging="never")


def test_a_folder_in_place_of_ours_is_refused(place: VolumeAccess) -> None:
    packs = Path(place.folder) / "packs"
    packs.rename(packs.with_name("mine"))
    packs.symlink_to("/etc")
    with pytest.raises(SubletError):
        opened(place, PACK)


def test_a_new_file_is_new(place: VolumeAccess) -> None:
    opened(place, "a", staging="s", write=True)
    with pytest.raises(InvalidRequest):
        opened(place, "a", staging="s", write=True)


def test_of_saves_that_are_never_ended_only_the_newest_are_kept(place: VolumeAccess) -> None:
    for number in range(STAGED_FOLDERS_MAX + 5):
        opened(place, "a", staging=f"s{number}", write=True)
    kept = os.listdir(Path(place.folder) / "staging" / f"{EPOCH}.holder")
    assert len(kept) == STAGED_FOLDERS_MAX
    assert f"s{STAGED_FOLDERS_MAX + 4}" in kept


def test_what_a_collection_would_free_is_only_what_the_checkpoints_that_stay_do_not_need(tmp_path: Path) -> None:
    """A holder of another user cannot look itself, and saves anew once there is room."""
    bench = Bench(tmp_path / "volume").open()
    sizes: list[int] = []
    for number in range(3):
        bench.save(big(number))
        there = sum(path.stat().st_size for path in (bench.folder / "packs").iterdir())
        sizes.append(there - sum(sizes))
    for keep, freed in ((0, 0), (3, 0), (1, sum(sizes[:2]))):
        assert list_volume(bench.place, ListVolume(lease=LEASE, epoch=EPOCH, keep=keep)).freed == freed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_none_of_ours(place: VolumeAccess) -> None:
    os.chown(Path(place.folder) / "packs" / PACK, 65_534, 65_534)
    with pytest.raises(InvalidRequest, match="is no file of Sublet's"):
        opened(place, PACK)
