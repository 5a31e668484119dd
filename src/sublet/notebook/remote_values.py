"""The notebook's handles for objects that stay on the device, and how they are kept current.

A handle is live while its guest is there. When the guest went with its lease, the next cell that reads the handle has
the value restored where it runs; nothing else is loaded. What could not be saved is lost, and the handle says so.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from sublet.durable import rebuild
from sublet.errors import InvalidRequest, SubletError, Unpicklable
from sublet.lazy_dataclass import dataclass
from sublet.notebook import guest_persistence
from sublet.notebook.checkpoint import GENERATORS, About, Key, NotebookCheckpoint, SavedPart, SaveResult, key_of
from sublet.notebook.home import HomeRules
from sublet.notebook.probing import MODULE, describe, probe
from sublet.notebook.remote_value import RemoteValue, any_handles, clock_time, lost_handle
from sublet.notebook.resume import is_parked
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.transfer.loading import decode

if TYPE_CHECKING:
    from sublet.compute.kernel_guest import KernelGuest
    from sublet.notebook.environment import Changes
    from sublet.notebook.ownership import KernelVolume

NAMES_MAX: Final = 12
"""Names in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came back."""

    names: tuple[str, ...] = ()
    wall_ns: int = 0
    """The oldest moment among them."""
    newest_ns: int = 0
    apart: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of these names, which others they no longer share anything with."""
    within: int = 0
    """They are as they were in the middle of this cell."""
    kept: tuple[str, ...] = ()
    """Names that are saved as well, for which the notebook has a newer value of its own."""
    generators: Changes | None = None
    """The states of the random generators that were saved with them."""

    def __str__(self) -> str:
        if not self.names:
            return ""
        when = clock_time(self.wall_ns)
        if self.newest_ns > self.wall_ns and clock_time(self.newest_ns) != when:
            when += f" to {clock_time(self.newest_ns)}"
        where = f", within cell {self.within}" if self.within else ""
        text = f"restored {_some(self.names)} (saved {when}{where})"
        if self.apart:
            text += "; " + "; ".join(f"{name} is apart from {', '.join(o)} now" for name, o in self.apart.items())
        if self.kept:
            text += f"; newer in the notebook: {_some(self.kept)}"
        return text


def _some(names: Iterable[str]) -> str:
    """As many names as a line has room for."""
    found = sorted(names)
    more = f" and {len(found) - NAMES_MAX} more" if len(found) > NAMES_MAX else ""
    return f"{', '.join(found[:NAMES_MAX])}{more}"


class RemoteValues:
    """Those of one notebook."""

    def __init__(self, names: dict[str, Any]) -> None:
        """``names`` is the namespace itself."""
        self._names = names
        self._kernel: KernelGuest | None = None
        self._saved: dict[Key, About] = {}
        """What is in the volume."""
        self._volume: KernelVolume | None = None
        self._open: NotebookCheckpoint | None = None
        self._is_new = True
        """Nothing was seen of the volume yet."""
        self._inside: dict[str, bytes] = {}
        """Names that a cell that was ended had saved, with a print of what the notebook has under them."""
        self._is_loaded = False
        """It was said what of the cell that was ended is saved. Its guest may have been saving even then, and what came
        after that has no part here: only together with the notebook's names could it be gone on from."""

    # ---- as handles ask

    def is_live(self, kernel: Any) -> bool:
        mine = self._kernel
        return mine is not None and kernel is mine and not mine.is_lost and not is_parked(mine.lease)

    def is_parked(self, kernel: Any) -> bool:
        mine = self._kernel
        return mine is not None and kernel is mine and not mine.is_lost and is_parked(mine.lease)

    def fetch(self, handle: RemoteValue) -> Any:
        """A copy in the notebook's own memory: from the device, or from what was saved."""
        if handle.is_live and self._kernel is not None:
            head, buffers = self._kernel.call(guest_persistence.fetch, handle.value_name)
            with rebuild.on_host():
                return decode(head, [memoryview(one) for one in buffers])[handle.value_name]
        key = key_of(SavedPart.DEVICE, handle.value_name)
        if not handle.is_saved or self._shelf is None or key not in self._shelf.found():
            if handle.is_parked:
                raise InvalidRequest(
                    f"{handle.value_name} is parked without its device, and was not saved",
                    do="Run a cell on a device: it goes on there.",
                )
            raise lost_handle(handle)
        with rebuild.on_host():
            return self._shelf.load([key])[key]

    # ---- a guest comes and goes

    def attach_kernel(self, kernel: KernelGuest, volume: KernelVolume | None) -> None:
        """There is a new guest, and this volume, in which it finds what is saved."""
        self._kernel, self._saved, self._is_loaded = kernel, {}, False
        if volume is None:
            return
        number, self._saved = kernel.call(guest_persistence.use, volume.folder, volume.is_empty)
        for one in self.all().values():  # a notice may have saved it since
            about = self._saved.get(key_of(SavedPart.DEVICE, one.value_name))
            if about is not None and not one.is_saved and about.cell == one.value_about.cell:
                one.is_now(about, None)
        volume.is_empty = False
        if volume.committed is None:
            volume.committed = number

    def save_in(self, volume: KernelVolume | None) -> NotebookCheckpoint | None:
        """The notebook's own hand on the volume."""
        if volume is not self._volume:
            self._volume, self._open = volume, None
        return self._shelf

    @property
    def _shelf(self) -> NotebookCheckpoint | None:
        """Opened when it is first needed."""
        if self._open is None and self._volume is not None:
            self._open = NotebookCheckpoint(self._volume.store)
        return self._open

    def discard_uncollected(self) -> int | None:
        """What a cell had saved that was ended before its results were taken is not for the next cell to find. The
        number of the newest checkpoint now; None: it was not read."""
        volume = self._volume
        if volume is None or volume.committed is None or volume.is_empty:
            return None
        shelf = self._shelf
        assert shelf is not None
        volume.committed = shelf.roll_back_to(volume.committed, is_final=self._is_loaded)
        self._close()
        return volume.committed

    def first_sight(self) -> str:
        """What to say of what another kernel saved under this name; once, and nothing where there is nothing."""
        is_first, self._is_new = self._is_new, False
        names = {one.name for key, one in self._saved.items() if one.what != MODULE and key != GENERATORS}
        if not is_first or not names:
            return ""
        when = clock_time(max(one.wall_ns for one in self._saved.values()))
        return f"{_some(names)} {'is' if len(names) == 1 else 'are'} saved from {when}: %gpu restore brings it here"

    def detach_kernel(self) -> None:
        """The guest is gone."""
        self._kernel = None

    def live(self) -> set[str]:
        """Names in the guest that the notebook has handles for."""
        return {one.value_name for one in self.all().values() if one.is_live}

    def all(self) -> dict[str, RemoteValue]:
        """Every handle, by the name it has in the notebook."""
        if not any_handles():
            return {}
        names = self._names.copy()
        return {name: value for name, value in names.items() if type(value) is RemoteValue}

    # ---- around a cell

    def prepare(
        self, read: Mapping[str, RemoteValue], kernel: KernelGuest, *, must: bool
    ) -> tuple[dict[str, str], Restored]:
        """See that what a cell reads is on its device: under which names it is there, and what was restored. ``must``:
        the cell names them, so one that is lost is an error."""
        dead = {name: one for name, one in read.items() if not one.is_of(kernel)}
        saved = {key.removeprefix(f"{SavedPart.DEVICE}:") for key in self._saved}
        lost = {name: one for name, one in dead.items() if not one.is_saved or one.value_name not in saved}
        if lost and must:
            raise lost_handle(next(iter(lost.values())))
        wanted = sorted({one.value_name for name, one in dead.items() if name not in lost})
        restored = self._restore(wanted, kernel) if wanted else Restored()
        return {name: one.value_name for name, one in read.items() if name not in lost}, restored

    def record_left(self, stays: Mapping[str, str], kernel: KernelGuest, cell: int) -> None:
        """A cell left these on the device, and why."""
        for name, why in stays.items():
            old = self._names.get(name)
            about = About(name=name, why=why, cell=cell, made=cell)
            if type(old) is RemoteValue and old.value_name == name:
                old.is_now(replace(old.value_about, wall_ns=0, cell=cell), kernel, lost=old.why_lost)
            else:
                self._names[name] = RemoteValue(about, kernel, self)

    def on_news(self, news: guest_persistence.PersistenceNews, kernel: KernelGuest) -> None:
        """The guest says how it stands, and the notebook has what the cell left."""
        if news.number and self._volume is not None:
            self._volume.committed = news.number
        for one in self.all().values():
            about = news.held.get(one.value_name)
            if about is not None and one.is_of(kernel):
                one.is_now(about, kernel, lost=news.lost.get(one.value_name, ""))
                if about.wall_ns:
                    self._saved[key_of(SavedPart.DEVICE, about.name)] = about

    def save(self, *, everything: bool = False) -> guest_persistence.PersistenceNews | None:
        """Save what stays on the device, now; None where there is nothing."""
        kernel = self._kernel
        if kernel is None or not self.live():
            return None
        try:
            news: guest_persistence.PersistenceNews = kernel.call(guest_persistence.save, everything)
        except SubletError:
            if kernel.is_lost:  # it went in this moment
                return None
            raise
        self.on_news(news, kernel)
        return news

    def forget_committed(self) -> None:
        """The end of a save was not waited for: whatever is found counts."""
        if self._volume is not None:
            self._volume.committed = None

    def _restore(self, names: list[str], kernel: KernelGuest) -> Restored:
        handles = self.all()
        mine = {one.value_name for one in handles.values() if not one.is_of(kernel)}
        came: dict[str, About] = kernel.call(guest_persistence.restore, names, mine)
        for one in handles.values():
            if one.value_name in came and not one.is_of(kernel):
                one.is_now(came[one.value_name], kernel)
        return _restored(came.values())

    # ---- a cell was ended

    def ended(self, began_wall_ns: int) -> dict[str, About]:
        """The cell that was under way since then is no more. What of it was saved, because it asked for that."""
        self._kernel = None
        found = self._found_in_the_end()
        found.pop(GENERATORS, None)
        inside = {one.name: one for key, one in found.items() if one.wall_ns >= began_wall_ns}
        for key, one in found.items():
            if one.name not in inside or not key.startswith(f"{SavedPart.DEVICE}:"):
                continue
            value = self._names.get(one.name)
            if type(value) is RemoteValue:
                value.is_now(one, None)
            elif one.name not in self._names:
                self._names[one.name] = RemoteValue(one, None, self)
        cell = [one.name for key, one in found.items() if one.name in inside and key.startswith(f"{SavedPart.CELL}:")]
        self._inside = {name: self._print(name) for name in cell}
        return inside

    def _found_in_the_end(self) -> dict[Key, About]:
        """What is saved, and from here on that is what there is."""
        with contextlib.suppress(SubletError, OSError):  # else before the next cell, which then is told
            while True:
                newest = self.discard_uncollected()
                found = self._saved_values()
                if newest is None or self._shelf is None or self._shelf.newest == newest:
                    self._is_loaded = True
                    return found
        return self._saved_values()

    def resume(self) -> Restored:
        """Before the next cell: what the ended one had saved, unless the notebook has made something newer since."""
        inside, self._inside = self._inside, {}
        if not inside or self._shelf is None:
            return Restored()
        found = self._saved_values()
        same = [name for name, was in inside.items() if self._print(name) == was]
        keys = [key for name in same if (key := key_of(SavedPart.CELL, name)) in found]
        if not keys:
            return Restored()
        self._bind(self._shelf.load(keys), same)
        done = _restored(found[key] for key in keys)
        newer = tuple(sorted(inside.keys() - set(same)))
        return Restored(
            names=done.names,
            wall_ns=done.wall_ns,
            newest_ns=done.newest_ns,
            within=found[keys[0]].cell,
            kept=newer,
        )

    # ---- the notebook's own

    def checkpoint(
        self, names: Iterable[str], shelf: NotebookCheckpoint, cell: int, generators: Changes
    ) -> tuple[SaveResult | None, dict[str, str]]:
        """Save these of the notebook's own variables, and the states of random generators; what cannot be saved, and
        why."""
        values: dict[Key, Any] = {}
        about: dict[Key, About] = {}
        lost: dict[str, str] = {}
        for name in names:
            value = self._names.get(name)
            if name not in self._names or type(value) is RemoteValue:
                continue
            one = probe(name, value)
            if one.refused:
                lost[name] = one.refused
                continue
            key = key_of(SavedPart.NOTEBOOK, name)
            values[key] = value
            about[key] = About(name=name, what=describe(value), nbytes=one.nbytes, cell=cell)
        if not values:
            return None, lost
        values[GENERATORS], about[GENERATORS] = generators, About(name=GENERATORS, cell=cell)
        older = f"{SavedPart.CELL}:", f"{SavedPart.NOTEBOOK}:"
        saved = shelf.save(values, about, drop=lambda key: key.startswith(older), note=f"by hand, cell {cell}")
        if self._volume is not None:
            self._volume.committed = saved.number
        return saved, lost

    def is_bound(self, key: Key) -> bool:
        """Whether the notebook has something under this name, so that what is saved of it stays."""
        name = key.partition(":")[2]
        return name in self._names or any(one.value_name == name for one in self.all().values())

    def restore(self, shelf: NotebookCheckpoint) -> Restored:
        """Into a kernel that is new: what is saved, but for names it has a value of its own for."""
        found = shelf.found()
        self._saved, self._is_new = dict(found), False
        generators = shelf.load([GENERATORS])[GENERATORS] if found.pop(GENERATORS, None) is not None else None
        mine = {name for name in self._names if not name.startswith("_")}
        latest: dict[str, Key] = {}
        for key, one in found.items():
            if one.name not in latest or found[latest[one.name]].wall_ns < one.wall_ns:
                latest[one.name] = key
        taken = {name: key for name, key in latest.items() if name not in mine}
        host = [key for key in taken.values() if not key.startswith(f"{SavedPart.DEVICE}:")]
        self._bind(shelf.load(host), taken)
        for name, key in taken.items():
            if key.startswith(f"{SavedPart.DEVICE}:"):
                self._names[name] = RemoteValue(found[key], None, self)
        done = _restored(found[key] for key in taken.values())
        kept = tuple(sorted(name for name in latest.keys() - taken.keys() if found[latest[name]].what != MODULE))
        return replace(done, kept=kept, generators=generators)

    def _bind(self, values: Mapping[Key, Any], names: Iterable[str]) -> None:
        wanted = set(names)
        for key, value in values.items():
            name = key.partition(":")[2]
            if name in wanted:
                self._names[name] = value

    def _saved_values(self) -> dict[Key, About]:
        try:
            return {} if self._shelf is None else self._shelf.found()
        except (SubletError, OSError):  # it is told when something of it is asked for
            return {}
        finally:
            self._close()

    def _close(self) -> None:
        """What is open for reading here has its room still when the guest lets go of it."""
        if self._open is not None:
            self._open.close()

    def _print(self, name: str) -> bytes:
        """Of what the notebook has under a name: another one when it was changed or bound anew."""
        if name not in self._names:
            return b""
        try:
            (group,) = encode_roots({name: self._names[name]}, rules=HomeRules())
        except Unpicklable:
            return str(id(self._names[name])).encode()
        print_ = hashlib.blake2b(group.encoded.head, digest_size=16)
        for view in group.encoded.views:
            print_.update(view)
        return print_.digest()


def _restored(abouts: Iterable[About]) -> Restored:
    found = [one for one in abouts if one.what != MODULE]
    return Restored(
        names=tuple(sorted(one.name for one in found)),
        wall_ns=min((one.wall_ns for one in found), default=0),
        newest_ns=max((one.wall_ns for one in found), default=0),
        apart={one.name: one.apart for one in found if one.apart},
    )
