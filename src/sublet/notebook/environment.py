"""What crosses beside the variables: random states, settings, folder, environment, search path.

Each side compares the rows of the table (``settings``) with what they were when the sides last agreed, and sends what
has changed since. The sides take turns, so the one that ran the last cell has the last word. A row whose library is not
imported on the other side waits there, and is set at the end of the import.

What has been sent is plain bytes: nothing is imported, and nothing unpickled, before it is set.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Final, NamedTuple

from sublet.errors import Unpicklable
from sublet.lazy_dataclass import dataclass
from sublet.notebook.import_hook import ImportHook, is_imported
from sublet.notebook.settings import Setting, SettingKind, table
from sublet.state.transfer.codec import encode
from sublet.state.transfer.loading import decode

Entries = Mapping[str, Any]
LOCK_S: Final = 1.0
"""So long an import on another thread waits for an exchange. What it does not set the next exchange sets."""
_entered: contextvars.ContextVar[object] = contextvars.ContextVar("sublet_cell")
UNKNOWN: Final = object()
"""What the other side has of an entry after an exchange that failed: equal to nothing."""


class Packed(NamedTuple):
    """What has changed of one row."""

    head: bytes
    buffers: tuple[bytes, ...]
    names: tuple[str, ...]
    gone: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(map(len, self.buffers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one side sends to the other."""

    rows: dict[str, tuple[Packed, ...]] = field(default_factory=dict)
    is_whole: bool = False
    """It is everything: what it does not name is as it was at first, and what differs is to be sent back."""
    problems: dict[str, str] = field(default_factory=dict)
    """What could not be sent, or set on this side, and why."""
    sees_files: bool = True
    """Whether both sides see the same files."""
    modules: tuple[str, ...] = ()
    """What was imported on this side and had not been told. Some modules draw a random number when they are imported,
    which one process does once."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for packed in self.rows.values() for one in packed)


class _Track:
    """One row on this side."""

    def __init__(self, row: Setting) -> None:
        self.row = row
        self.first: Entries | None = None
        """What it was at first; None: its library has not been seen yet."""
        self.agreed: Entries = {}
        """What it was here when the sides last agreed."""
        self.touched: set[str] = set()
        """Entries that have crossed."""
        self.waiting: list[Packed] = []
        """What came before the library was imported here, or for a thread that is not this one."""
        self.seen: Entries | None = None
        """What it was at the end of the cell, of a row that belongs to the cell's context."""

    @property
    def is_local(self) -> bool:
        return self.row.kind == SettingKind.LOCAL


class CellEnvironment:
    """Those of one side."""

    def __init__(self, *, is_notebook: bool, rows: Iterable[Setting] | None = None, in_cells: bool = False) -> None:
        """``in_cells``: rows of the cell's context are set by ``enter``, which is called within a cell."""
        found = table(is_notebook=is_notebook) if rows is None else rows
        self._tracks = {row.key: _Track(row) for row in found}
        self._locals = [track for track in self._tracks.values() if track.is_local]
        self._is_notebook = is_notebook
        self._in_cells = in_cells
        self._is_whole = is_notebook
        self._sees_files = True
        self._ready: set[str] = {""}
        self._problems: dict[str, str] = {}
        self._reported: set[str] = set()
        self._mark: object = None
        """Of the context in which the cell began."""
        self._lock = threading.RLock()
        """The end of an import may come on any thread."""
        self._modules: set[str] = set()
        """What the other side was told of."""
        self._hook = ImportHook(self._imported, self.undrawn)
        for track in self._tracks.values():
            self._hook.watch(track.row.module)
            if self._is_ready(track.row):
                self._first_seen(track)
        self._hook.install()

    @property
    def assigned(self) -> frozenset[str]:
        """``library:attribute`` of assignments that the table carries."""
        return frozenset(name for track in self._tracks.values() for name in track.row.assigned)

    def close(self) -> None:
        """Imports are not watched any more."""
        self._hook.remove()

    # ---- what is sent

    def begin(self, *, sees_files: bool) -> None:
        """The notebook has a new device: it has nothing yet but what each of them begins with."""
        with self._lock:
            self._sees_files, self._is_whole = sees_files, True
            self._modules.clear()
            self._hook.elsewhere.clear()
            for track in self._tracks.values():
                if self._is_ready(track.row):
                    self._first_seen(track)
                    now = self._read(track)
                    starts_alike = track.row.starts_alike and now is not None
                    track.agreed = (now if starts_alike else self._of_a_device(track)) or {}

    def send_all_next(self) -> None:
        """An exchange failed: it is unknown what the other side has, and the next one brings everything."""
        with self._lock:
            self._is_whole = True
            self._modules.clear()
            for track in self._tracks.values():
                if track.first is not None:
                    track.agreed = {**self._of_a_device(track), **dict.fromkeys(track.touched, UNKNOWN)}

    def changes(self) -> Changes | None:
        """What has changed here since the sides last agreed. None: nothing. From now on they agree on that."""
        with self._lock:
            rows: dict[str, tuple[Packed, ...]] = {}
            for track in self._tracks.values():
                found = self._changed(track)
                if found:
                    rows[track.row.key] = found
            problems, self._problems = self._problems, {}
            is_whole, self._is_whole = self._is_whole, False
            if not rows and not problems and not is_whole:
                return None
            imported: set[str] = set()
            if len(sys.modules) != len(self._modules):
                imported = sys.modules.keys() - self._modules
                self._modules |= imported
            return Changes(
                rows=rows,
                is_whole=is_whole,
                problems=problems,
                sees_files=self._sees_files,
                modules=tuple(imported),
            )

    def generators(self) -> Changes:
        """The states of the random generators, to be kept."""
        return self.whole(lambda row: row.kind == SettingKind.GENERATOR)

    def whole(self, wanted: Callable[[Setting], bool] = lambda _: True) -> Changes:
        """Everything of the wanted rows that is not as it was at first, to be kept."""
        with self._lock:
            rows: dict[str, tuple[Packed, ...]] = {}
            for track in (one for one in self._tracks.values() if wanted(one.row)):
                now = self._read(track) if self._is_ready(track.row) else None
                if now is None:
                    found: list[Packed] = list(track.waiting)
                else:
                    before = (track.first or {}) if track.row.starts_alike else self._of_a_device(track)
                    found = self._packed(track, *_difference(before, now))
                if found:
                    rows[track.row.key] = tuple(found)
            return Changes(rows=rows)

    def _changed(self, track: _Track) -> tuple[Packed, ...]:
        if track.row.kind == SettingKind.FILES and not self._sees_files:
            return ()
        if track.row.module not in self._ready and not self._is_ready(track.row):
            return tuple(track.waiting) if self._is_whole else ()
        if track.waiting:
            self._set_waiting(track)
        now = self._read(track)
        if now is None or now is track.agreed:
            return ()
        values, gone = _difference(track.agreed, now)
        track.agreed = now
        if not values and not gone:
            return ()
        track.touched.update(values, gone)
        return tuple(self._packed(track, values, gone))

    def _packed(self, track: _Track, values: Entries, gone: tuple[str, ...]) -> list[Packed]:
        if not values and not gone:
            return []
        try:
            return [_pack(values, gone)]
        except Unpicklable as error:
            if len(values) == 1:
                self._trouble(track.row, next(iter(values)), f"it holds {error.what or 'what cannot be sent'}")
                return self._packed(track, {}, gone)
        parts = [self._packed(track, {name: one}, ()) for name, one in values.items()]
        return [one for part in (*parts, self._packed(track, {}, gone)) for one in part]

    def _of_a_device(self, track: _Track) -> Entries:
        """What a new one has by itself, as far as the notebook knows. Nothing of random generators: they are sent."""
        if track.row.kind == SettingKind.GENERATOR and self._is_notebook:
            return {}
        return track.first or {}

    # ---- what arrives

    def apply(self, changes: Changes, *, files: bool) -> None:
        """Set it here: what names files first (``files``), and the rest once everything else has arrived."""
        with self._lock:
            self._hook.elsewhere.update(changes.modules)
            if changes.is_whole and files:
                self._sees_files = changes.sees_files
                for track in self._tracks.values():
                    track.agreed = dict(track.first or {})
            for key, packed in changes.rows.items():
                track_or_none = self._tracks.get(key)
                if track_or_none is not None and (track_or_none.row.kind == SettingKind.FILES) == files:
                    self._take(track_or_none, packed)

    def apply_deferred(self) -> None:
        """A cell is over: what waited for a library that another thread has imported meanwhile is set."""
        with self._lock:
            for track in self._tracks.values():
                if track.waiting and self._is_ready(track.row):
                    self._set_waiting(track)

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Restore the random generators at the end of the block."""
        generators = [
            one for one in self._tracks.values() if one.row.kind == SettingKind.GENERATOR and self._is_ready(one.row)
        ]
        before = [(track, self._read(track)) for track in generators]
        try:
            yield
        finally:
            for track, state in before:
                if state is not None and _difference(state, self._read(track) or {})[0]:
                    self._write(track.row, state, ())

    def restore(self, kept: Changes) -> None:
        """Set what was kept. A device that is there gets it with the next cell."""
        self.apply(kept, files=True)
        self.apply(kept, files=False)
        self.send_all_next()

    def _take(self, track: _Track, packed: tuple[Packed, ...]) -> None:
        for one in packed:
            names = {*one.names, *one.gone}
            track.touched |= names
            track.waiting = [had for had in track.waiting if not names.issuperset((*had.names, *had.gone))]
            track.waiting.append(one)
        if self._is_ready(track.row):
            self._set_waiting(track)

    def _set_waiting(self, track: _Track, *, in_cell: bool = False) -> None:
        if not track.waiting or (track.is_local and not _is_main_thread()):
            return
        self._first_seen(track)
        packed, track.waiting = track.waiting, []
        for one in packed:
            values = self._unpacked(track.row, one)
            if track.is_local and self._in_cells and not in_cell:  # ``enter`` sets what is agreed
                track.agreed = {**{name: v for name, v in track.agreed.items() if name not in one.gone}, **values}
                continue
            self._write(track.row, values, one.gone)
            if self._is_whole:  # it came from an earlier device, and this one is still to get it
                continue
            now = self._read(track) or {}
            kept = {name: v for name, v in track.agreed.items() if name not in one.gone and name not in values}
            track.agreed = {**kept, **{name: now[name] for name in values if name in now}}

    def _unpacked(self, row: Setting, packed: Packed) -> Entries:
        try:
            values: Entries = decode(packed.head, [memoryview(one) for one in packed.buffers])
        except Exception as error:  # noqa: BLE001 - whatever a value's own methods raise
            for name in packed.names:
                self._trouble(row, name, f"{type(error).__name__}: {error}")
            return {}
        return values

    def _write(self, row: Setting, values: Entries, gone: tuple[str, ...]) -> None:
        try:
            row.write(values, gone)
        except Exception as error:  # noqa: BLE001 - whatever the library says to a value
            if len(values) + len(gone) > 1:
                for name, one in values.items():
                    self._write(row, {name: one}, ())
                for name in gone:
                    self._write(row, {}, (name,))
                return
            for name in (*values, *gone):
                self._trouble(row, name, f"{type(error).__name__}: {error}")

    # ---- around a cell, for rows of its context

    def enter(self) -> None:
        """A cell begins, and this is its context."""
        self._mark = object()
        _entered.set(self._mark)
        with self._lock:
            self._set_local()

    def _set_local(self) -> None:
        for track in self._local():
            self._set_waiting(track)
            track.seen = None
            now = self._read(track)
            if now is None or now == track.agreed:
                continue
            values, gone = _difference(now, track.agreed)
            self._write(track.row, values, gone)
            track.agreed = self._read(track) or {}

    def end_cell(self) -> None:
        """It is over. A cell with ``await`` had a context of its own, and what it set there went with that."""
        with self._lock:
            if _entered.get(None) is not self._mark:
                self._set_local()
            for track in self._local():
                track.seen = None
                track.seen = self._read(track)

    def _local(self) -> list[_Track]:
        return [track for track in self._locals if self._is_ready(track.row)]

    # ---- libraries

    def _is_ready(self, row: Setting) -> bool:
        if row.module in self._ready:
            return True
        if is_imported(row.module):
            self._ready.add(row.module)
            return True
        return False

    def _imported(self, module: str) -> None:
        if not self._lock.acquire(timeout=-1 if _is_main_thread() else LOCK_S):
            return
        try:
            self._ready.add(module)
            for track in self._tracks.values():
                if track.row.module == module:
                    self._first_seen(track)
                    self._set_waiting(track, in_cell=True)
        finally:
            self._lock.release()

    def _first_seen(self, track: _Track) -> None:
        if track.first is not None:
            return
        first: Entries | None = None
        try:
            if self._is_notebook and track.row.default is not None:
                first = track.row.default()
        except Exception:  # noqa: BLE001 - a library of another version: what it has now will do
            first = None
        track.first = (self._read(track) or {}) if first is None else first
        track.agreed = track.first if not self._is_notebook else self._of_a_device(track)

    def _read(self, track: _Track) -> Entries | None:
        """None: it cannot be read, which is said once."""
        if track.seen is not None:
            return track.seen
        try:
            return track.row.read()
        except Exception as error:  # noqa: BLE001 - whatever the library says
            self._trouble(track.row, "", f"{type(error).__name__}: {error}")
            return None

    def _trouble(self, row: Setting, name: str, why: str) -> None:
        what = " ".join(filter(None, (row.key, name)))
        if what not in self._reported:
            self._reported.add(what)
            self._problems[what] = why

    def problems(self) -> dict[str, str]:
        """What went wrong since this was last asked, each thing once."""
        with self._lock:
            found, self._problems = self._problems, {}
            return found


def _difference(before: Entries, now: Entries) -> tuple[Entries, tuple[str, ...]]:
    """Entries that are new or another, and names of those that are gone."""
    try:
        if before == now:
            return {}, ()
    except Exception:  # noqa: BLE001 - values that do not compare: each by itself then
        pass
    values = {name: one for name, one in now.items() if name not in before or not _is_same(before[name], one)}
    return values, tuple(name for name in before if name not in now)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - what does not compare is not the same
        return False


def _pack(values: Entries, gone: tuple[str, ...]) -> Packed:
    encoded = encode(dict(values))
    return Packed(encoded.head, tuple(bytes(view) for view in encoded.views), tuple(values), gone)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
