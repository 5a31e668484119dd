"""What is killed: publication in a volume, its collection, and the removal of the volume, in the supervisor's forked
jobs.

``python -m tests.crash.volume_program`` reads one order per line and carries it out in a fork
that it traces, as ``journal_program`` does. Everything is deterministic, so what any checkpoint must hold is known from
its number alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sublet.errors import SubletError
from sublet.node.storage.publish import publish, run_and_encode
from sublet.node.storage.stores_work import KEPT, NOTE, StoreNote, make_blocks, put_away
from sublet.node.storage.volume_folder import VolumeAccess, collect, lay_out
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import Author, Saver
from sublet.values import Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.codec import loads
from sublet.wire.orders import Part
from sublet.wire.refusals import Refusal, error_of
from sublet.wire.volumes import Collect, Publish, VolumeOpened, VolumeReply
from tests.crash.serving import serve

KEEP: Final = 2
A: Final = LeaseId("l-a")
TENANT: Final = TenantId("local")
SIZE: Final = 1 << 19
"""Below what a file system of its own is made for."""
Note = Callable[[dict[str, object]], None]


def part() -> Part:
    return Part(resource=ResourceId("bench/block"), kind=Kind.BLOCK, amount=SIZE)


def note_of(epoch: Epoch) -> StoreNote:
    return StoreNote(lease=A, epoch=epoch, tenant=TENANT, parts=(part(),), name="ckpt")


def state_at(number: int) -> dict[str, Any]:
    """What checkpoint ``number`` holds: something changes, and much never."""
    return {"number": number, "now": random.Random(number).randbytes(9_000), "never": random.Random(5).randbytes(9_000)}


def place_of(folder: Path) -> VolumeAccess:
    place, lock = str(folder / "0"), str(folder / "lock")
    return VolumeAccess(folder=place, lock=lock, size=SIZE, counted=False, owner=os.geteuid(), group=os.getegid())


def done(work: Callable[[], object]) -> None:
    """As a forked job answers; what it refuses is raised here."""
    answer = loads(VolumeReply, run_and_encode(work).encode("utf-8", "surrogateescape"))
    if isinstance(answer, Refusal):
        raise error_of(answer)


def opened(folder: Path, epoch: Epoch) -> VolumeAccess:
    """The lease has it, and somebody is going to save."""
    made = make_blocks(str(folder), note_of(epoch), None)
    if made.refused:
        raise SubletError(made.refused)
    place = place_of(folder)
    said = VolumeOpened(lease=A, epoch=epoch, name="ckpt", folder=place.folder, staging="", size=SIZE)
    done(lambda: lay_out(place, said))
    return place


def staged(place: VolumeAccess, epoch: Epoch) -> Publish:
    """The next checkpoint, written and not published."""
    store = FolderStore(place.folder, create=False)
    base = store.base()
    folder = store.staging / str(epoch) / f"s{base.number + 1}"
    folder.mkdir(exist_ok=True)
    for name in os.listdir(folder):
        os.unlink(folder / name)
    value = {"value": state_at(base.number + 1)}
    made = Saver().save(value, staging=folder, base=base, author=Author(lease=A, epoch=epoch), wall_ns=0)
    return Publish(
        lease=A,
        epoch=epoch,
        staging=folder.name,
        manifest="manifest",
        packs=tuple(pack.name for pack in made.packs),
        parent=base.number,
    )


def save(folder: Path, note: Note, epoch: Epoch, count: int) -> None:
    place = opened(folder, epoch)
    for _ in range(count):
        asked = replace(staged(place, epoch), keep=KEEP if epoch.n % 2 else 0)
        done(lambda asked=asked: publish(place, asked))  # type: ignore[misc]
        note({"saved": asked.parent + 1})
        done(lambda: collect(place, Collect(lease=A, epoch=epoch, keep=KEEP)))


def saves(folder: Path, note: Note) -> None:
    """Everything: taken, opened, published, collected, kept. The staging itself is the guest's."""
    save(folder, note, Epoch(1, 9), 2)
    left = put_away(str(folder), keep=True, note=note_of(Epoch(1, 9)))
    if left:
        raise SubletError(left)
    note({"kept": True})


def copies(folder: Path, note: Note) -> None:
    """A publication of files that somebody has open for writing."""
    epoch = Epoch(1, 9)
    place = opened(folder, epoch)
    asked = staged(place, epoch)
    path = FolderStore(place.folder, create=False).staging / str(epoch) / asked.staging / asked.packs[0]
    with open(path, "r+b"):
        done(lambda: publish(place, asked))
    note({"saved": asked.parent + 1})


def removes(folder: Path, note: Note) -> None:
    """The end of the volume."""
    left = put_away(str(folder), keep=False)
    if left:
        raise SubletError(left)
    note({"removed": True})


STORIES: Final[dict[str, Callable[[Path, Note], None]]] = {"saves": saves, "copies": copies, "removes": removes}


def prepare(folder: Path) -> None:
    """A volume that is kept, with what crashes left behind in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    save(folder, lambda _: None, Epoch(1, 5), 3)
    packs = folder / "0" / "packs"
    (packs / ("0" * 40 + ".pack")).write_bytes(b"a pack that nobody came to name")
    (packs / f"~{'1' * 40}.pack").write_bytes(b"half of a copy")
    (folder / "0" / "checkpoints" / "~4").write_bytes(b"half of a manifest")
    assert not put_away(str(folder), keep=True)
    assert (folder / KEPT).exists()
    assert not (folder / NOTE).exists()


def main() -> None:
    warm_up()
    serve(STORIES, refused=(SubletError, OSError))


def warm_up() -> None:
    """Whatever is loaded at first use is loaded now."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "named" / "local" / "ckpt")
        saves(Path(folder) / "named" / "local" / "ckpt", lambda _: None)
        removes(Path(folder) / "named" / "local" / "ckpt", lambda _: None)


if __name__ == "__main__":
    main()
