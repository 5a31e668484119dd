"""Disks that keep some of what was not synced, and not the rest, after each call of publications and collections in a
volume (``test_pack_reorder`` says what such disks are)."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.errors import SubletError
from sublet.node.storage.volume_folder import VolumeAccess
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.values import Epoch
from sublet.wire.volumes import Publish
from tests.crash import volume_program as program
from tests.crash.test_pack_reorder import ALL, SEED, Disk, Recorder, after_crash, lay_out

pytestmark = [pytest.mark.crash, pytest.mark.slow]

PER_POINT: Final = 40 if ALL else 6
SAVES: Final = 4


class DescriptorRecorder(Recorder):
    """The same for code that names files below descriptors of their folders."""

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            where = [path_of(args, kwargs, n) for n in range(1 if name in ("write", "fsync", "unlink") else 2)]
            plain = args if name in ("write", "fsync") else where
            found = real(*args, **kwargs) if name != "unlink" else None
            getattr(self, name)(*plain, found)
            self.states.append((self.disk.copy(), self.answered))
            return real(*args, **kwargs) if name == "unlink" else found

        return call

    def rename(self, source: Any, target: Any, _: None) -> None:
        super().rename(source, target, None)
        self.named(source, None)


def path_of(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> Any:
    fd = kwargs.get(("src_dir_fd", "dst_dir_fd")[n] if len(args) > 1 else "dir_fd")
    return args[n] if fd is None else os.path.join(os.readlink(f"/proc/self/fd/{fd}"), args[n])


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    place = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
        yield Path(folder)


def recorded(home: Path, forgets: str = "", writer: str = "syncs") -> list[tuple[Disk, int]]:
    recorder = DescriptorRecorder(home, forgets)
    home.parent.mkdir(parents=True, exist_ok=True)
    left_open: list[int] = []

    def answered(note: dict[str, object]) -> None:
        recorder.answered = int(str(note["saved"]))

    def staged(place: VolumeAccess, epoch: Epoch) -> Publish:
        recorder.forgets = forgets if writer == "syncs" else "files"
        asked = real_staged(place, epoch)
        recorder.forgets = forgets
        if writer == "has it open":
            own = Path(place.folder) / "staging" / str(epoch) / asked.staging
            left_open.extend(os.open(own / pack, os.O_RDWR) for pack in asked.packs)
        return asked

    real_staged = program.staged
    with pytest.MonkeyPatch.context() as patch:
        recorder.patch(patch)
        patch.setattr(program, "staged", staged)
        program.save(home, answered, Epoch(1, 9), SAVES)
    for fd in left_open:
        os.close(fd)
    return recorder.states


@pytest.mark.parametrize("writer", ["syncs", "syncs nothing", "has it open"])
def test_no_reordered_disk_loses_what_was_answered_or_shows_what_was_not_published(writer: str, memory: Path) -> None:
    """The guest that stages may sync what it wrote, or not. Where it still has the file open a copy is published."""
    states, chance = recorded(memory / writer.replace(" ", "-"), writer=writer), random.Random(SEED)
    assert len(states) > 10 * SAVES
    for at, (disk, answered) in enumerate(states):
        for _ in range(PER_POINT):
            files = after_crash(disk, chance)
            try:
                judge(lay_out(memory / "after", files), answered)
            except AssertionError as error:
                raise AssertionError(f"after call {at} (SUBLET_CRASH_SEED={SEED}), {sorted(files)}: {error}") from error
    print(f"{len(states)} calls")


@pytest.mark.parametrize("forgets", ["files", "folders"])
def test_a_forgotten_sync_is_found(forgets: str, memory: Path) -> None:
    states, chance = recorded(memory / f"without-{forgets}", forgets), random.Random(SEED)
    with pytest.raises((AssertionError, SubletError)):
        judge_all(states, chance, memory / "after")


def judge_all(states: list[tuple[Disk, int]], chance: random.Random, place: Path) -> None:
    for disk, answered in states:
        for _ in range(PER_POINT):
            judge(lay_out(place, after_crash(disk, chance)), answered)


def judge(store: FolderStore, answered: int) -> None:
    newest = store.newest()
    assert answered <= newest <= answered + 1, f"checkpoint {answered} was answered, the newest is {newest}"
    if not newest:
        return
    with store.open() as checkpoint:
        assert checkpoint.load("value") == program.state_at(newest)
    verdict = verify(store.folder)
    assert verdict.ok, verdict.problems
