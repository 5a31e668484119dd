"""Keeps what stays in the guest's kernel beyond a lease: saves, restores, fetches.

Why only that is saved by itself: whatever else a cell changed is in the notebook when the cell is over. The notebook's
kernel holds it, on a CPU that is not taken away; to write it to a disk as well would cost every cell a copy of its
results, against a loss that the user causes by ending the kernel. (``%gpu checkpoint`` is
for that.) What lives only here, in memory of the device or because it is too large to come back, has no other copy.

When it is saved: after each cell that could have changed it, for then the state is that of a finished cell, which is
what a later cell must find. A cell that is ended in the middle therefore leaves nothing to save, and no notice finds
anything unsaved; only ``sublet.current().checkpoint()`` within a cell says that its state so far is worth keeping.
(Where a cell said that it is not to be saved, a notice saves what it left, or the last moment before the guest leaves.)

Called by name, on the main thread between cells; all but ``checkpoint``, which a cell calls.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from sublet.errors import CheckpointFailed, NotFound, SubletError
from sublet.notebook.checkpoint import (
    GENERATORS,
    NOTICE,
    WITHIN,
    About,
    Key,
    NotebookCheckpoint,
    SavedPart,
    SaveResult,
    key_of,
)
from sublet.notebook.counting import TOO_MANY
from sublet.notebook.environment import CellEnvironment
from sublet.notebook.home import HomeRules
from sublet.notebook.in_place import can_change
from sublet.notebook.namespace_sync import Space
from sublet.notebook.probing import Probe, describe, probe
from sublet.notebook.remote_value import clock_time
from sublet.state.checkpoints.durable import store_of
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.transfer.device_state import devices_are_away
from sublet.state.transfer.memory import Lent
from sublet.values import format_size

_DEVICE: Final = f"{SavedPart.DEVICE}:"
_CELL: Final = f"{SavedPart.CELL}:"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PersistenceNews:
    """The state of the values that stay on the device."""

    held: dict[str, About] = field(default_factory=dict)
    """What is here, by name; saved at ``wall_ns``, 0 where it never was."""
    lost: dict[str, str] = field(default_factory=dict)
    """Of these, what cannot be saved, and why: it goes with the lease."""
    saved: SaveResult | None = None
    number: int = 0
    """Of the last checkpoint that this guest made, 0 for none."""
    took_s: float = 0.0
    failed: str = ""
    """Why the save failed, and what to do."""
    do: str = ""

    def __repr__(self) -> str:
        if self.saved is None:
            return "<nothing to save>"
        sizes = f"{format_size(self.saved.state_bytes)}, {format_size(self.saved.written_bytes)} written"
        return f"<saved at {clock_time(self.saved.wall_ns)}: {sizes}>"


class _State:
    """What this guest knows. There is one."""

    def __init__(self) -> None:
        self.place: str | None = None
        """Where to save; None: nowhere."""
        self.shelf: NotebookCheckpoint | None = None
        self.space: Space | None = None
        self.around: CellEnvironment | None = None
        """Of this kernel: its random generators are saved with what stays here."""
        self.held: dict[str, About] = {}
        self.lost: dict[str, str] = {}
        self.elsewhere: dict[str, bool] = {}
        """Whether some of it is in memory of a device."""
        self.dirty: set[str] = set()
        """Names that a cell since the last save could have changed."""
        self.mates: dict[str, frozenset[str]] = {}
        """Names that share something, by each of them: one is saved with the others."""
        self.gone: set[Key] = set()
        """Keys of names that were let go of since the last save."""
        self.number = 0
        """Of the last checkpoint that was made here."""
        self.good: int | None = None
        """Of the last one that may not go before a new one is whole; None: the newest."""
        self.cell = 0
        self.is_running = False
        self.is_taken = True
        """The notebook has what the last cell left."""
        self.touched: frozenset[str] = frozenset()
        self.moved: set[str] = set()
        """Names that were bound or removed here since the last cell, and by none."""
        self.reads: frozenset[str] = frozenset()
        self.bound: Mapping[str, Callable[[], object]] = {}
        """What each name had when the cell began."""
        self.room: int | None = None


_state = _State()
_turn = threading.Lock()
"""A notice comes on a thread of its own. While it saves no cell begins, and while a cell runs it saves nothing."""


def use(place: str, is_empty: bool = False) -> tuple[int, dict[Key, About]]:
    """Save there: a folder, or with "" the volume that this guest was given. The number of the newest checkpoint and
    what is in it; with ``is_empty`` there is none, and the place is not read."""
    _state.place = place
    _listen()
    return (0, {}) if is_empty else (_shelf().newest, _shelf().found())


def found() -> dict[Key, About]:
    """Everything that is saved."""
    return {} if _state.place is None else _shelf().found()


def prepare(space: Space, handles: Mapping[str, str], alive: Collection[str] | None) -> set[str]:
    """A cell is to begin. ``handles``: names under which it reads what is here, and the names it has here; ``alive``:
    what of it the notebook still has a handle for. The rest is let go of, and its memory with it. Answers with the
    names that were bound or removed here since the last cell."""
    _state.space = space
    if alive is not None:
        drop([name for name in _state.held if name not in alive])
    for alias, name in handles.items():
        if alias != name and name in space.names:
            space.names[alias] = space.names[name]
            _state.moved.add(alias)
    _state.touched = frozenset(handles.values())
    moved, _state.moved = _state.moved, set()
    return moved


def begin(
    cell: int,
    reads: frozenset[str],
    bound: Mapping[str, Callable[[], object]],
    room: int | None,
    around: CellEnvironment | None = None,
) -> None:
    """It begins. ``bound``: what each name has now; ``room``: bytes of the largest that may come back."""
    with _turn:
        _state.cell, _state.reads, _state.bound, _state.room, _state.around = cell, reads, bound, room, around
        _state.is_running, _state.good = True, None


def read_as_well(names: Collection[str], changeable: Iterable[str]) -> None:
    """A running cell has been given these; of what stays on the device it can change ``changeable``."""
    with _turn:
        _state.reads |= frozenset(names)
        _state.touched |= frozenset(changeable)


def rest() -> None:
    """The cell is not run after all."""
    with _turn:
        _state.is_running = False


def stuck() -> dict[str, str]:
    """What could travel and stays all the same, and why: because it is large. Until it is bound anew, or fetched."""
    elsewhere = _state.elsewhere
    return {n: one.why for n, one in _state.held.items() if n not in _state.lost and not elsewhere.get(n)}


def whys() -> dict[str, str]:
    """Why each name that stays here does."""
    return {name: about.why for name, about in _state.held.items()}


def finish(space: Space, stays: Mapping[str, str], came: Collection[str]) -> None:
    """It is over. ``stays``: what cannot come back, and why; ``came``: what did, or is gone."""
    _state.is_running, _state.is_taken = False, False
    with contextlib.suppress(SubletError):  # until its results are taken, what the notebook would go back to stays
        _state.good = 0 if _state.shelf is None else _state.shelf.newest
    was, _state.bound = _state.bound, {}
    for name in [name for name in _state.held if name in came or name not in space.names]:
        _drop_held(name)
    changed = {*stays, *(name for name in _state.touched if name in _state.held)}
    for name in list(changed):
        changed |= _state.mates.get(name, frozenset())
    for name in changed:
        why = stays.get(name) or (_state.held[name].why if name in _state.held else "")
        if why and name in space.names:
            before = was.get(name)
            is_same = before is not None and before() is space.names[name]
            made = _state.held[name].made if is_same and name in _state.held else _state.cell
            was_counted = stays.get(name) == TOO_MANY  # a moment ago
            one = Probe(refused=why) if was_counted else probe(name, space.names[name], is_bounded=True)
            _note(space, name, one, why, made)


def hold(stays: Mapping[str, str]) -> None:
    """These could not be put together where the notebook is, and why: they stay after all."""
    space = _state.space
    for name, why in stays.items():
        if space is not None and name in space.names:
            _note(space, name, probe(name, space.names[name], is_bounded=True), why, _state.cell)


def save(everything: bool = False) -> PersistenceNews:
    """Save what may have changed since the last save. It says how it stands, also when the save failed."""
    with _turn:
        return _save(_names(), everything=everything)


def taken() -> None:
    """The notebook has what the last cell left."""
    _state.is_taken = True


def read_status() -> PersistenceNews:
    """Report the present state, without a save."""
    return PersistenceNews(held=dict(_state.held), lost=dict(_state.lost), number=_state.number)


def restore(names: Iterable[str], handles: Collection[str]) -> dict[str, About]:
    """Bind what was saved of these names, and what was saved together with them as far as the notebook has ``handles``
    for it: they shared something, and do again."""
    shelf, space = _shelf(), _names()
    values = shelf.load([key_of(SavedPart.DEVICE, name) for name in names])
    known = shelf.found()
    together = frozenset(key.removeprefix(_DEVICE) for key in values)
    restored = {}
    for key, value in values.items():
        name = key.removeprefix(_DEVICE)
        if name not in handles:
            continue
        space[name] = value
        _state.moved.add(name)
        _state.held[name] = restored[name] = known[key]
        _state.elsewhere[name] = probe(name, value).is_elsewhere
        _state.mates[name] = together
        _state.dirty.discard(name)
    return restored


def fetch(name: str) -> tuple[bytes, list[Lent]]:
    """The value, as what ``decode`` makes it of again; the notebook does that ``on_host``."""
    names = _names()
    if name not in names:
        raise NotFound(f"{name} is not on the device any more", do=f"Rerun the cell that made {name}.")
    (group,) = encode_roots({name: names[name]}, rules=HomeRules(gpu="copy"))
    return group.encoded.head, [Lent(view) for view in group.encoded.views]


def drop(names: Iterable[str]) -> None:
    """The notebook has no handle for these any more."""
    for name in names:
        _drop_held(name)
        _names().pop(name, None)
        _state.moved.add(name)


def checkpoint() -> PersistenceNews | Literal[False]:
    """``sublet.current().checkpoint()``: save as well what the running cell has made so far.

    Between cells it saves what is not saved; but not while the notebook takes the results of the last one, which then
    has not finished. If a notice asks while a cell runs, nothing is saved: what finished cells left
    is, and half of a cell is not for a later one to find. It may finish within the time that the notice leaves, and so
    it is asked again. False: at a notice, something stays that is not saved.
    """
    from sublet.compute.behind import current

    persistence = current()
    is_cells_own = persistence.is_saving_by_hand  # at the very end a notice is answered on the main thread as well
    with _turn:
        if not _state.is_running:
            if not _state.is_taken:
                persistence.ask_again()
                return read_status()
            news = _save(_names(), everything=False, note=f"{NOTICE}after cell {_state.cell}")
            if news.failed:  # no caller waits for it; so it stands in the log of the guest
                print(f"sublet: not saved when the lease was taken: {news.failed}", file=sys.stderr)  # noqa: T201
            is_whole = not news.failed and all(one.wall_ns for one in news.held.values())
            return news if is_cells_own or is_whole else False  # False: an idle lease lasts as long as its notice
        if not is_cells_own:
            persistence.ask_again()
            return read_status()
        news = _save_inside(_names())
    if news.failed:
        raise CheckpointFailed(news.failed, do=news.do)
    left = ", ".join(f"{name} ({why})" for name, why in news.lost.items())
    if left:
        print(f"sublet: not in this checkpoint, for it cannot be saved: {left}", file=sys.stderr)  # noqa: T201
    return news


# ---- within


def _note(space: Space, name: str, one: Probe, why: str, made: int) -> None:
    if _state.place is None:  # no notice saves it, and an idle lease keeps it for as long as its notice lasts
        _listen()
    _state.lost.pop(name, None)
    _state.elsewhere[name] = one.is_elsewhere
    _state.held[name] = About(
        name=name,
        what=describe(space.names[name]),
        nbytes=one.nbytes,
        why=why,
        cell=_state.cell,
        made=made,
        wall_ns=0,
        needs=tuple(sorted(one.needs)),
        apart=_shared_with(space, one) if not one.refused else (),
    )
    if one.refused:
        _state.lost[name] = one.refused
    else:
        _state.dirty.add(name)


def _shared_with(space: Space, one: Probe) -> tuple[str, ...]:
    """Names that have crossed and hold something of this that can change: when it comes back it has its own."""
    changing = {n: value for n, value in (one.met or {}).items() if can_change(value)}
    return space.crossed_with(changing)


def _save(space: dict[str, Any], *, everything: bool, note: str = "") -> PersistenceNews:
    dirty = {name for name in (_state.held if everything else _state.dirty) if name not in _state.lost}
    dirty &= space.keys()
    if devices_are_away():
        dirty -= _report_unreadable(dirty)
    if _state.place is None or not (dirty or (_state.gone and _state.shelf is not None)):
        return read_status()
    about = {key_of(SavedPart.DEVICE, name): _state.held[name] for name in dirty}
    values = {key_of(SavedPart.DEVICE, name): space[name] for name in dirty}
    return _written(values, about, _state.gone.__contains__, note or f"cell {_state.cell}")


def _report_unreadable(names: Iterable[str]) -> set[str]:
    """What of it is on a device that was taken, and so cannot be read any more: named, and the rest is saved."""
    found = {name for name in names if _state.elsewhere.get(name)}
    if found:
        print(f"sublet: not saved, for its device was taken: {', '.join(sorted(found))}", file=sys.stderr)  # noqa: T201
    return found


def _save_inside(space: dict[str, Any]) -> PersistenceNews:
    """Everything the cell read or has bound: as it is now, whatever the notebook has."""
    nothing = object()
    visible = set() if _state.space is None else _state.space.visible()
    bound = {name for name in visible if _state.bound.get(name, lambda: nothing)() is not space[name]}
    names = bound | _state.reads
    for name in list(names):
        names |= _state.mates.get(name, frozenset())
    names &= space.keys()
    values: dict[Key, Any] = {}
    about: dict[Key, About] = {}
    lost = {}
    for name in sorted(names):
        one = probe(name, space[name], is_bounded=True)
        if one.refused:
            lost[name] = one.refused
            continue
        old = _state.held.get(name)
        why = _why_only_here(old, one)
        key = key_of(SavedPart.DEVICE if why else SavedPart.CELL, name)
        values[key] = space[name]
        about[key] = About(
            name=name,
            what=describe(space[name]),
            nbytes=one.nbytes,
            why=why,
            cell=_state.cell,
            needs=tuple(sorted(one.needs)),
        )
    gone = _state.gone
    news = _written(values, about, lambda key: key in gone or key.startswith(_CELL), f"{WITHIN}cell {_state.cell}")
    return replace(news, lost=lost)


def _why_only_here(old: About | None, one: Probe) -> str:
    """Why a value can only be here; empty if the notebook could have it."""
    if old is not None:
        return old.why
    if one.is_elsewhere:
        return "memory of the device"
    is_large = _state.room is not None and one.nbytes > _state.room
    return f"{format_size(one.nbytes)}, more than {format_size(_state.room or 0)}" if is_large else ""


def _written(
    values: Mapping[Key, Any], about: Mapping[Key, About], drop: Callable[[Key], bool], note: str
) -> PersistenceNews:
    began_s = time.monotonic()
    if values and _state.around is not None:
        values = {**values, GENERATORS: _state.around.generators()}
        about = {**about, GENERATORS: About(name=GENERATORS, cell=_state.cell)}
    try:
        shelf = _shelf()
        saved = shelf.save(values, about, drop=drop, note=note, good=_state.good)
    except SubletError as error:
        return replace(read_status(), failed=error.message, do=error.do)
    except Exception as error:  # noqa: BLE001 - whatever it is, the cell's results must reach the notebook
        return replace(
            read_status(), failed=f"what stays on the device could not be saved: {type(error).__name__}: {error}"
        )
    _state.number = saved.number
    _state.gone.clear()
    for key in about:
        name = key.removeprefix(_DEVICE)
        if not key.startswith(_DEVICE) or name not in _state.held:
            continue
        _state.held[name] = replace(_state.held[name], wall_ns=saved.wall_ns)
        _state.dirty.discard(name)
        _state.mates[name] = frozenset(mate.removeprefix(_DEVICE) for mate in shelf.together_with(key))
    return replace(read_status(), saved=saved, took_s=time.monotonic() - began_s)


def _drop_held(name: str) -> None:
    if _state.held.pop(name, None) is not None:
        _state.gone.add(key_of(SavedPart.DEVICE, name))
    _state.lost.pop(name, None)
    _state.elsewhere.pop(name, None)
    _state.mates.pop(name, None)
    _state.dirty.discard(name)


def _shelf() -> NotebookCheckpoint:
    if _state.place is None:
        raise CheckpointFailed(
            "there is no volume to save to", do="Fetch what is worth keeping (%gpu fetch NAME), or see %gpu."
        )
    if _state.shelf is None:
        _state.shelf = NotebookCheckpoint(store_of(_state.place) if _state.place else _own_volume())
    return _state.shelf


def _names() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _own_volume() -> Any:
    from sublet.compute.behind import current

    return store_of(current().volume)


def _listen() -> None:
    """``sublet.current().checkpoint()`` and the notice come here."""
    from sublet.compute.behind import current

    with contextlib.suppress(SubletError, AttributeError):
        current().on_checkpoint(checkpoint)
