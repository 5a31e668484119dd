"""The saved state of a notebook: one volume with three kinds of names.

``device``: what lives only in the guest and is a handle in the notebook. ``cell``: what a cell that was under way had
made by the time it asked for a checkpoint. ``notebook``: the notebook's own, when a save of them was asked for. The
guest saves the first two and the notebook the third, each on what the other left: a save takes over every record that
it does not replace, without loading it.

Nothing here decides what is saved; it is written as it is given. What is known of each name (``About``) is saved beside
it and can be read without loading any value, which may be for a device that is not here.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sublet.clock import Clock, SystemClock
from sublet.errors import CheckpointFailed, NotFound, SubletError, Unpicklable
from sublet.lazy_dataclass import dataclass
from sublet.notebook.home import HomeRules
from sublet.state.checkpoints.object_groups import ObjectGroup, encode_roots
from sublet.state.checkpoints.packs import file_name
from sublet.state.checkpoints.reader import CheckpointReader
from sublet.state.checkpoints.records import EncodedGroup
from sublet.state.checkpoints.save_size import needed_bytes
from sublet.state.checkpoints.store import CheckpointStore
from sublet.state.checkpoints.writer import Base, Saver, Staged
from sublet.values import MIB, format_size

if TYPE_CHECKING:
    from sublet.wire.volumes import CopiedIn

KEEP: Final = 3
"""Checkpoints that stay, as long as there is room: that of the last finished cell, the last that a running cell asked
for, and that of a cell whose results were not taken yet (``roll_back_to``)."""
WITHIN: Final = "within "
"""Begins the note of a checkpoint that a running cell asked for."""
NOTICE: Final = "notice "
"""And of one that was made between cells, because the lease was to be taken."""
ABOUT: Final = "about"
Key = str
"""A part and a name of the notebook: ``device:weights``."""


class SavedPart(enum.StrEnum):
    """The side that a saved name belongs to."""

    DEVICE = "device"
    CELL = "cell"
    NOTEBOOK = "notebook"
    BESIDE = "beside"
    """No name of a variable: what is saved with the variables of either side."""


def key_of(part: SavedPart, name: str) -> Key:
    return f"{part}:{name}"


GENERATORS: Final[Key] = key_of(SavedPart.BESIDE, "random generators")
"""The states of the random generators (``CellEnvironment.generators``) of the side that saved last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known of a saved name without loading it."""

    name: str
    what: str = ""
    """What it is, in a few words: ``Tensor (3, 4) float32``."""
    nbytes: int = 0
    why: str = ""
    """Why it stayed on the device."""
    cell: int = 0
    """The number of the cell that left it so."""
    made: int = 0
    """And of the one that bound it."""
    wall_ns: int = 0
    """When it was saved."""
    needs: tuple[str, ...] = ()
    """Names of the notebook that functions in it read."""
    apart: tuple[str, ...] = ()
    """Names with which it shared something that can change, and shares it no more when it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What one save did."""

    number: int
    wall_ns: int
    written_bytes: int
    state_bytes: int
    let_go: int = 0
    """Older checkpoints that went, because there was no room beside them."""


class NotebookCheckpoint:
    """One side's access to the volume; not thread-safe."""

    def __init__(self, store: CheckpointStore, clock: Clock | None = None) -> None:
        self._store = store
        self._clock: Clock = SystemClock() if clock is None else clock
        self._saver = Saver()
        self._base: Base | None = None
        self._open: CheckpointReader | None = None

    def found(self) -> dict[Key, About]:
        """Everything that is saved. Raises ``CheckpointDamaged``."""
        checkpoint = self._newest()
        if checkpoint is None or ABOUT not in checkpoint.records:
            return {}
        abouts: dict[Key, dict[str, Any]] = checkpoint.load(ABOUT)
        return {key: _about(one) for key, one in abouts.items()}

    def together_with(self, key: Key) -> tuple[Key, ...]:
        """What is loaded when this is."""
        checkpoint = self._newest()
        if checkpoint is None:
            raise NotFound(f"nothing is saved of {key}")
        return checkpoint.together_with(key)

    def load(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """The values, and those of all keys that come with them: each byte compared with what was saved."""
        loaded: dict[Key, Any] = {}
        try:
            for key in keys:
                if key not in loaded:
                    mates = self.together_with(key)
                    assert self._open is not None
                    loaded |= {mate: self._open.load(mate) for mate in mates}
        finally:
            self._close()  # it would hold the values, and so memory of the device
        return loaded

    def save(
        self,
        values: Mapping[Key, object],
        about: Mapping[Key, About],
        *,
        drop: Callable[[Key], bool] = lambda _key: False,
        note: str = "",
        good: int | None = None,
    ) -> SaveResult:
        """Save these, keep what else there is, but for what is to be dropped. Whole or not at all: it raises
        ``CheckpointFailed`` then, and what was saved before is as it was. ``good``: the number of the last checkpoint
        that must stay until then; None: the newest."""
        began_ns, base = time.monotonic_ns(), self._base_now()
        carry, rest = self._kept(values, drop)
        everything = {**values, **rest}
        now_ns = self._clock.wall_ns()
        stays = {*rest, *(key for record in carry for key in record.names)}
        abouts = {key: one for key, one in self.found().items() if key in stays}
        abouts |= {key: _at(one, now_ns) for key, one in about.items() if key in values}
        groups = [*_groups(everything), *encode_roots({ABOUT: {key: asdict(one) for key, one in abouts.items()}})]
        groups.sort(key=lambda group: group.names[0])
        was = self.found()
        same_as = {key: was[key] for key in values} if not rest and was.keys() >= values.keys() else None
        good = base.number if good is None else good
        return self._write(groups, base, carry, now_ns, note, same_as=same_as, began_ns=began_ns, good=good)

    def inspect(self, source: str) -> CopiedIn:
        """What ``import_from`` would find in another place: what a finished cell left."""
        return self._store.inspect(source, passing=WITHIN)

    def import_from(self, source: str, is_bound: Callable[[Key], bool]) -> tuple[str, ...]:
        """Take over what another notebook has saved, as one save. What is here under the same name stays if the
        notebook ``is_bound`` to it, or if it is newer. Names that could not come, because they share something with
        one that stays. Raises what has no room, before anything is written."""
        with self._store.copied(source, passing=WITHIN) as copied:
            if copied is None:
                return ()
            mine, base = self.found(), self._base_now()
            old = self._records()
            with copied.open() as checkpoint:
                abouts: dict[Key, dict[str, Any]] = checkpoint.load(ABOUT) if ABOUT in checkpoint.records else {}
                theirs, new = {key: _about(one) for key, one in abouts.items()}, _by_names(checkpoint)
            where = Base.read(copied.manifest, copied.source).where
            joined = join(
                old,
                new,
                lambda key: not is_bound(key) and key in theirs and mine[key].wall_ns < theirs[key].wall_ns,
            )
            about = {key: mine[key] for names in joined.kept for key in names}
            about |= {key: theirs[key] for names in joined.taken for key in names}
            groups = encode_roots({ABOUT: {key: asdict(one) for key, one in about.items()}})
            present = set() if base.manifest is None else {ref.name for ref in base.manifest.packs}
            packs = [path for name, path in copied.packs().items() if name not in present]
            both = Base(manifest=base.manifest, packs_folder=base.packs_folder, where={**where, **base.where})
            carry = [*(old[names] for names in joined.kept), *(new[names] for names in joined.taken)]
            note = f"a copy of {copied.manifest.number}"
            self._write(groups, both, carry, self._clock.wall_ns(), note, brought=(copied.folder, packs))
            return joined.left

    def roll_back_to(self, number: int, *, is_final: bool = False) -> int:
        """See that the newest checkpoint is of this number: the last whose cell is known to have finished, its results
        taken. What was saved since by a cell that then was ended is given up, unless the cell itself had asked for it,
        or a notice between cells: then the newest is the last of those. ``is_final``: that has been looked for, and
        what came later counts no more. The number that is the newest now."""
        newest = self._store.newest()
        good = () if is_final else (WITHIN, NOTICE)
        wanted = next((n for n in range(newest, number, -1) if self._note(n).startswith(good)), number)
        if wanted >= newest:
            return newest
        base = self._store.base()
        carry: list[EncodedGroup] = []
        if wanted:
            with self._store.open(wanted) as checkpoint:
                carry = list({id(one): one for one in checkpoint.records.values()}.values())
                older = Base.read(checkpoint.manifest, base.packs_folder)
            base.where = {**older.where, **base.where}
        return self._write([], base, carry, self._clock.wall_ns(), f"as {wanted}").number

    @property
    def newest(self) -> int:
        """The number of the newest checkpoint, 0 for none."""
        return self._store.newest()

    def close(self) -> None:
        """Let go of the files. Harmless twice."""
        self._close()

    def _write(
        self,
        groups: list[ObjectGroup],
        base: Base,
        carry: list[EncodedGroup],
        now_ns: int,
        note: str,
        same_as: Mapping[Key, About] | None = None,
        began_ns: int | None = None,
        good: int | None = None,
        brought: tuple[Path, Sequence[Path]] | None = None,
    ) -> SaveResult:
        """``same_as``: what is known of these in the newest checkpoint. If all would be as it is there, that is it.
        ``good``: checkpoints before this one may go, if there is no room beside them; None: none may. ``brought``: a
        folder of the staging, and packs in it that are part of the base and are published with it, where needed."""
        capture = self._saver.capture(groups, base)
        capture.took_ns = 0 if began_ns is None else time.monotonic_ns() - began_ns
        needed = needed_bytes(capture, base, self._store.room)
        try:
            let_go = 0 if good is None else make_room(self._store, needed, most=KEEP, good=good)
            into = self._store.staging_folder(needed) if brought is None else nullcontext(brought[0])
            with into as staging:
                spare = self._store.room - needed - SPARE if brought is None else 0
                staged = self._saver.write(
                    capture,
                    staging=staging,
                    base=base,
                    author=self._store.author,
                    wall_ns=now_ns,
                    note=note,
                    carry=carry,
                    spare=max(0, spare),
                )
                if brought is not None:
                    named = {file_name(ref.name) for ref in staged.manifest.packs}
                    packs = [*staged.packs, *(path for path in brought[1] if path.name in named)]
                    staged = replace(staged, packs=packs)
                if same_as and self._is_newest(staged):
                    then_ns = min(one.wall_ns for one in same_as.values())
                    return SaveResult(
                        number=base.number, wall_ns=then_ns, written_bytes=0, state_bytes=capture.state_bytes
                    )
                self._store.publish(staged)
        finally:
            self._forget()
        self._base = staged.base
        self._store.collect(KEEP)
        report = staged.report
        return SaveResult(
            number=report.number,
            wall_ns=now_ns,
            written_bytes=report.written_bytes,
            state_bytes=report.state_bytes,
            let_go=let_go,
        )

    def _is_newest(self, staged: Staged) -> bool:
        """Whether nothing differs from the newest checkpoint but what is known of it."""
        checkpoint = self._newest()
        if checkpoint is None:
            return False
        about_names = (ABOUT,)
        new = {tuple(one.names): list(one.blobs) for one in staged.records if tuple(one.names) != about_names}
        old = {
            tuple(one.names): list(one.blobs) for one in checkpoint.records.values() if tuple(one.names) != about_names
        }
        return new == old

    def _note(self, number: int) -> str:
        try:
            with self._store.open(number) as checkpoint:
                return checkpoint.manifest.note
        except NotFound:
            return ""

    def _kept(
        self, values: Mapping[Key, object], drop: Callable[[Key], bool]
    ) -> tuple[list[EncodedGroup], dict[Key, Any]]:
        """Records that stay as they are; and the values of names that stood in a record with one that does not."""
        checkpoint = self._newest()
        if checkpoint is None:
            return [], {}
        carry: list[EncodedGroup] = []
        rest: dict[Key, Any] = {}
        for record in {id(one): one for one in checkpoint.records.values()}.values():
            staying = [name for name in record.names if name != ABOUT and name not in values and not drop(name)]
            if len(staying) == len(record.names):
                carry.append(record)
            else:
                rest |= {name: checkpoint.load(name) for name in staying}
        return carry, rest

    def _base_now(self) -> Base:
        newest = self._store.newest()
        if self._base is None or self._base.number != newest:
            self._base = self._store.base()
        return self._base

    def _records(self) -> dict[tuple[str, ...], EncodedGroup]:
        checkpoint = self._newest()
        return {} if checkpoint is None else _by_names(checkpoint)

    def _newest(self) -> CheckpointReader | None:
        number = self._store.newest()
        if self._open is not None and self._open.number != number:
            self._close()
        if self._open is None and number:
            self._open = self._store.open(number)
        return self._open

    def _forget(self) -> None:
        self._base = None
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _groups(values: Mapping[Key, object]) -> list[ObjectGroup]:
    """Each part by itself: what is for the notebook must not be loaded together with what is for a device."""
    groups: list[ObjectGroup] = []
    for part in SavedPart:
        mine = {key: value for key, value in values.items() if key.startswith(f"{part}:")}
        if mine:
            try:
                groups += encode_roots(mine, rules=HomeRules(gpu="copy"))
            except Unpicklable as error:
                raise CheckpointFailed(
                    f"{error.path.partition(':')[2] or error.path} cannot be saved: {error.what}", do=error.do
                ) from error
            except SubletError:
                raise
            except Exception as error:  # a library's own, for instance of a device that is gone
                raise CheckpointFailed(f"the state could not be read: {error}", do="Run the cell again.") from error
    return groups


def _about(record: Mapping[str, Any]) -> About:
    known = {field.name for field in fields(About)}
    return About(**{key: value for key, value in record.items() if key in known})


def _by_names(checkpoint: CheckpointReader) -> dict[tuple[str, ...], EncodedGroup]:
    """Its records, but for what is known of all of them."""
    found = {tuple(record.names): record for record in checkpoint.records.values()}
    found.pop((ABOUT,), None)
    return found


def _at(about: About, wall_ns: int) -> About:
    return About(**{**asdict(about), "wall_ns": wall_ns})


# -------------------------------------------------------------------------------------------------------------- joining
#
# Merges two states of one name, ours and a copy that another kernel saved: which one is kept.
#
# Names are saved in records, one for all that share something, and a record is kept or taken as a whole. What is here
# is never lost to what comes: a record goes only if all of its names are to be had anew.


Names = tuple[str, ...]
"""Of one record."""


class JoinedNames(NamedTuple):
    """What becomes of them."""

    kept: tuple[Names, ...]
    """Records that are here and stay."""
    taken: tuple[Names, ...]
    """Records that come."""
    left: tuple[str, ...]
    """Names that could have come, but for what they share a record with."""


def join(own: Iterable[Names], incoming: Iterable[Names], may_go: Callable[[str], bool]) -> JoinedNames:
    """``may_go``: whether what is here under a name may give way to what comes."""
    own, incoming = tuple(own), tuple(incoming)
    firm = {name for names in own if not all(map(may_go, names)) for name in names}
    taken = tuple(names for names in incoming if firm.isdisjoint(names))
    new = {name for names in taken for name in names}
    kept = tuple(names for names in own if new.isdisjoint(names) or not firm.isdisjoint(names))
    has = new | {name for names in kept for name in names}
    return JoinedNames(kept, taken, tuple(sorted({name for names in (*incoming, *own) for name in names} - has)))


# ------------------------------------------------------------------------------------------------------------ retention
#
# How many checkpoints of a notebook to keep: fewer where a new one needs their room.
#
# The last good one is never let go of before the new one is whole: a write may be torn at any byte. So what is saved
# last and what is to be saved must fit beside each other. Where they do not, nothing is let go of in vain, nothing is
# written, and it is said how large a volume would do.


SPARE: Final = 64 << 10
"""Bytes that a save leaves free: ``NotebookCheckpoint.roll_back_to`` writes a manifest."""


class Kept(Protocol):
    """Where checkpoints are, as far as their room goes."""

    @property
    def room(self) -> int: ...
    @property
    def size(self) -> int:
        """Of all of it; 0 where it was not said."""

    def numbers(self) -> Sequence[int]: ...
    def freed_by(self, keep: int) -> int: ...
    def collect_once(self, keep: int) -> None: ...


def how_many(needed: int, room: int, freed: Callable[[int], int], *, most: int, least: int) -> int:
    """As many as may be kept, so that there is room for so much; 0 if there is none even where the fewest are kept."""
    for keep in range(most, least - 1, -1):
        if needed <= room + freed(keep):
            return keep
    return 0


def make_room(kept: Kept, needed: int, *, most: int, good: int) -> int:
    """Make room for so much; returns how many checkpoints were dropped for it. ``good``: the number of the last good
    one, which stays, as does what is newer. Raises ``CheckpointFailed``; nothing was let go of then."""
    if needed + SPARE <= kept.room:
        return 0
    numbers = kept.numbers()
    least = max(1, sum(number >= good for number in numbers))
    keep = how_many(needed + SPARE, kept.room, kept.freed_by, most=max(most, least), least=least)
    if not keep:
        raise _too_small(kept, needed, least)
    kept.collect_once(keep)
    return max(0, len(numbers) - keep)


def _too_small(kept: Kept, needed: int, least: int) -> CheckpointFailed:
    room = kept.room + kept.freed_by(least)
    beside = "" if not kept.numbers() else " beside what was saved last, which stays until the new one is whole"
    problem = f"the checkpoint needs up to {format_size(needed)}{beside}, and there is room for {format_size(room)}"
    if not kept.size:
        return CheckpointFailed(problem, do="Make room on that disk, then save again; what was saved last is whole.")
    twice = needed if beside else 2 * needed  # the next one must fit beside this one
    more = kept.size - room + twice + SPARE + twice // 16  # a larger file system is more about itself
    size = -(-more // (16 * MIB)) * 16 * MIB
    return CheckpointFailed(
        f"{problem}: the volume has {format_size(kept.size)}, and it takes {format_size(size)}",
        do=f"Bring it to the notebook (%gpu fetch NAME), then save in a larger one: %gpu name X {format_size(size)}. "
        "What was saved last is whole.",
    )
