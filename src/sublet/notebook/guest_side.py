"""Runs in the guest around a cell: takes variables in, and returns what changed.

Called by name, on the main thread between cells; the namespace is the kernel's, which is that of ``__main__``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sublet.compute.behind import afterwards, run_cell
from sublet.errors import Unpicklable
from sublet.notebook import guest_persistence, on_demand
from sublet.notebook.additions import Additions
from sublet.notebook.counting import has_too_many
from sublet.notebook.environment import CellEnvironment, Changes
from sublet.notebook.in_place import can_change
from sublet.notebook.in_use import CALLBACK, TASK, THREAD, in_use
from sublet.notebook.in_use import NOTHING as NOTHING_USED
from sublet.notebook.lodging import Lodged, Word
from sublet.notebook.namespace import BoundNames, EncodedNames, NamesDecoder, visible_among
from sublet.notebook.namespace_sync import BESIDE, GUEST, Outgoing, Parcel, Space, Taken
from sublet.notebook.parcels import NO_WORD
from sublet.notebook.sources import CellSource, compiler_flags, keep_sources, set_compiler_flags

RESULT_BYTES: Final = 1 << 20
"""A result with more is not taken along for the shell's sake alone."""
NO_MODULE: Final = re.compile(r"No module named '([\w.]+)'")
RESULT: Final = re.compile(r"_\d+")
LAST_RESULTS: Final = frozenset({"_", "__", "___"})
"""The shell here binds these as well: a cell has changed one only if its text binds it."""
TO_DELETE: Final = object()
"""Stands for what a cell may only delete."""
IN_USE: Final = frozenset({THREAD, TASK, CALLBACK})
NO_SOURCES: Final[Mapping[str, CellSource]] = MappingProxyType({})
NO_HANDLES: Final[Mapping[str, str]] = MappingProxyType({})


class _Before(NamedTuple):
    """What there was before a cell."""

    reads: frozenset[str]
    aside: dict[str, Any]
    """What an earlier cell left under names that this one does not read: the notebook may have something newer. It is
    put back where the cell binds nothing in its place."""
    number: int = 0
    """Of the cell."""
    deletes: frozenset[str] = frozenset()
    """What it may delete and does not read."""
    is_open: bool = False
    """It was not collected."""
    unders: frozenset[str] = frozenset()
    """Of ``_``, ``__`` and ``___`` those that its text binds, as in ``for _ in range(3)``."""


_space: Space | None = None
_before = _Before(frozenset(), {})
_bound = BoundNames({})
"""What each name had before it."""
_names_sent, _steady_names_sent = NamesDecoder(), NamesDecoder()
_results: Final[set[str]] = set()
"""Names under which the shell here keeps what the last cell gave."""
_surroundings: CellEnvironment | None = None
_additions: Additions | None = None


def look_around() -> None:
    """Look at everything here for the first time. Called as soon as there is a kernel, so that the first cell does not
    wait for it."""
    seen()
    surroundings_here()


def place(
    parcels: list[Parcel],
    gone: tuple[str, ...],
    reads: frozenset[str] | EncodedNames,
    binds: frozenset[str],
    number: int = 0,
    handles: Mapping[str, str] = NO_HANDLES,
    alive: Collection[str] | None = None,
    room: int | None = None,
    word: Word = NO_WORD,
    is_quiet: bool = False,
    deletes: frozenset[str] = frozenset(),
    steady: frozenset[str] | EncodedNames = frozenset(),
    surroundings: Changes | None = None,
    sources: Mapping[str, CellSource] = NO_SOURCES,
    flags: int = 0,
    fetches: bool = False,
) -> Taken:
    """Take in what a cell needs. ``reads``: all names that it or its functions may read; ``binds``: may bind;
    ``number``: that of the cell, which tracebacks name; ``handles``, ``alive``, ``room``: of what is and will be here
    (``holding``); ``word``: of memory that was lent (``lodging``); ``is_quiet``: its last line's value is not shown;
    ``deletes``: names that the notebook has and that the cell may delete without reading them. They are not sent: what
    an earlier cell left under one stays, so that deleting it frees its memory at once, else a placeholder is bound;
    ``steady``: names that have no old value here; ``surroundings``: random states and settings that the notebook has
    changed; ``sources``, ``flags``: texts of cells, and the compiler's flags; ``fetches``: the notebook can be
    asked for a name while the cell runs (``on_demand``).

    Every other name of the notebook that is here may have an old value, and is set aside until the cell is over, unless
    something that runs on uses it (``in_use``)."""
    global _before
    space, around = seen(), surroundings_here()
    if surroundings is not None:
        around.apply(surroundings, files=True)
    if _before.is_open:  # it was given up, and never collected: what it bound is not reported
        _put_back(space)
        _bound.noted(space.names, _bound.rebound(space.names))
    reads = _names_sent.decode(reads) if isinstance(reads, EncodedNames) else reads
    keep_sources(sources)
    set_compiler_flags(flags)
    space.on_pool_message(word)
    with around.undrawn() if parcels else contextlib.nullcontext():
        taken = space.take(parcels, gone, afterwards=afterwards)
    _bound.noted(space.names, (*taken.changed, *taken.rebound, *gone))
    _check(taken)
    _bound.noted(space.names, guest_persistence.prepare(space, handles, alive))
    reads = reads | handles.keys() if handles else reads
    steady = _steady_names_sent.decode(steady) if isinstance(steady, EncodedNames) else steady
    hidden = (space.visible() - reads - steady) | (binds - reads)
    hidden -= deletes | in_use(space.names, can_change).names.keys() if hidden else deletes
    aside = {name: space.names.pop(name) for name in list(space.names) if name in hidden} if hidden else {}
    space.names.update(dict.fromkeys(deletes - space.names.keys(), TO_DELETE))
    old = {name: NotKept(0) for name in _results - reads if name in space.names}
    space.names.update(old)  # so that this cell's result is new, also if it is the same object under the same name
    _results.clear()
    space.note_read(reads)
    _before = _Before(reads, aside, number, deletes, is_open=True, unders=binds & LAST_RESULTS)
    _bound.noted(space.names, (*aside, *deletes, *old))
    guest_persistence.begin(number, reads, _bound, room, around)
    shell = sys.modules["IPython"].get_ipython() if number else None
    if shell is not None:
        shell.execution_count = number
        shell.displayhook.quiet = lambda: is_quiet  # IPython looks at its history, and a cell has none here
    if surroundings is not None:  # last, so that nothing that arrived has drawn a number since
        around.apply(surroundings, files=False)
    taken.problems = around.problems()
    if fetches:
        on_demand.begin(_may_be_fetched, lambda: _bound.rebound(space.names))
    return taken


def run(
    placing: tuple[Any, ...], request: dict[str, Any], only: frozenset[str] | None = None, room: int | None = None
) -> Coroutine[Any, Any, tuple[Any, ...]]:
    """Run a cell and ``collect`` what it changed. ``placing``: arguments of ``place``, where nothing had to be sent
    before."""
    placed = place(*placing) if placing else None
    return run_cell(request, lambda: (placed, collect(only, room)))


def _may_be_fetched(name: str) -> bool:
    """A name that was here when the cell began was removed by the cell."""
    return _before.is_open and name not in _before.reads and name not in _before.deletes


def place_fetched(
    parcels: list[Parcel],
    names: frozenset[str],
    word: Word,
    sources: Mapping[str, CellSource],
    handles: Mapping[str, str],
) -> Taken:
    """Take in what a running cell has looked up. ``names``: all that may be seen from here on; ``handles``: of these
    what is here under another name or the same. What the cell has had from its begin on is newer here, and stays."""
    global _before
    space = seen()
    keep_sources(sources)
    space.on_pool_message(word)
    back = {name: value for name, value in _before.aside.items() if name in names and name not in space.names}
    held = {name: _before.aside.get(of, space.names.get(of)) for name, of in handles.items()}
    space.names.update(back | held)
    with surroundings_here().undrawn():
        taken = space.take(parcels, newer=_before.reads)
    _bound.noted(space.names, (*taken.changed, *taken.rebound, *back, *held))
    aside = {name: value for name, value in _before.aside.items() if name not in names and name not in held}
    more = names | held.keys()
    space.note_read(more, _before.reads)
    _before = _before._replace(reads=_before.reads | more, aside=aside)
    guest_persistence.read_as_well(names, handles.values())
    _check(taken)
    on_demand.answer()
    return taken


def not_fetched(why: str) -> None:
    """The notebook cannot send what a running cell has looked up, or has no such name."""
    on_demand.answer(why)


def place_late(parcels: list[Parcel], word: Word = NO_WORD) -> Taken:
    """Take in late what turned out to have changed after all."""
    global _before
    space = seen()
    space.on_pool_message(word)
    aside = _before.aside
    space.names.update(aside)
    taken = space.take(parcels, afterwards=afterwards)
    _bound.noted(space.names, (*taken.changed, *taken.rebound))
    _check(taken)
    _before = _before._replace(aside={name: space.names.pop(name) for name in aside})
    _bound.noted(space.names, aside)
    return taken


def given_up() -> None:
    """Undo the preparation of a cell that is not run after all."""
    on_demand.end()
    _put_back(seen())
    guest_persistence.rest()


def _check(taken: Taken) -> None:
    for name, why in taken.broken.items():
        if why != BESIDE:
            raise Unpicklable(
                f"{name} cannot be put together on the device: {why}", path=name, what=why, do=_way_out(why)
            )


def _way_out(why: str) -> str | None:
    """Where a module is missing: how the device gets it. Else what is said of any such object."""
    missing = NO_MODULE.search(why)
    if missing is None:
        return None
    library = missing[1].partition(".")[0]
    return (
        f"The device cannot import {library}. If it is yours, name its folder: %%gpu --with FOLDER; "
        f"else install it there: {sys.executable} -m pip install {library}"
    )


def keep(lent: list[Lodged]) -> None:
    """Take memory in which arrays are going to come."""
    seen().keep(lent)


def collect(only: frozenset[str] | None = None, room: int | None = None) -> Outgoing:
    """What the cell changed: of what it read, and of whatever is bound anew; or ``only`` these names. What is new there
    and has more bytes than there is ``room`` for stays here."""
    on_demand.end()
    space = seen()
    changes = surroundings_here().changes()  # first, before anything that is sent can draw a number
    every = _bound.rebound(space.names)
    try:
        with space.looking():
            found = _collected(space, set(every), only, room)
        found.surroundings = changes
        found.flags = compiler_flags()
        found.added = tuple(_additions_here().fresh())
        return found
    finally:
        _bound.noted(space.names, (*every, f"_{_before.number}"))


def _collected(space: Space, every: set[str], only: frozenset[str] | None, room: int | None) -> Outgoing:
    rebound = visible_among(space.names, every) | _small_result(space, every) | _small_unders(space)
    gone = [name for name in _before.reads | _before.deletes if name not in space.names]
    _put_back(space)
    if only is not None:
        found = space.outgoing(
            only, new=only, room=room, stuck=guest_persistence.stuck(), held=guest_persistence.whys()
        )
        found.gone = ()
        guest_persistence.finish(space, found.stays, found.names)
        return found
    whys = guest_persistence.whys()
    reads = _before.reads - LAST_RESULTS
    is_any = bool(reads or rebound or whys)
    in_use_now = in_use(space.names, can_change) if is_any else NOTHING_USED
    used = in_use_now.changing
    back = {name for name, why in whys.items() if why in IN_USE and name not in used}
    stuck = {name: why for name, why in guest_persistence.stuck().items() if name not in rebound | back}
    rebound |= back & space.names.keys()
    wanted = reads | rebound
    wanted |= space.names_with_new_gradients(wanted)
    if wanted and not is_any:  # gradients alone
        in_use_now = in_use(space.names, can_change)
        used = in_use_now.changing
    running = {name: why for name, why in used.items() if name in wanted or name in whys}
    found = space.outgoing(
        wanted,
        lost_of=_before.reads - running.keys(),
        new=rebound,
        room=room,
        stuck=stuck,
        staying=running,
        held=guest_persistence.whys(),
        used=in_use_now,
    )
    found.gone = tuple(sorted({*found.gone, *gone}))
    guest_persistence.finish(space, found.stays, {*found.names, *found.gone})
    space.sent(found)
    return found


def _put_back(space: Space) -> None:
    """What was set aside, where nothing was bound in its place."""
    global _before
    aside = {name: value for name, value in _before.aside.items() if name not in space.names}
    space.names.update(aside)
    kept = [name for name in _before.deletes if space.names.get(name) is TO_DELETE]
    for name in kept:
        del space.names[name]
    _bound.noted(space.names, (*aside, *kept))
    _before = _before._replace(aside={}, is_open=False)


def again(names: frozenset[str], stuck: Mapping[str, str], room: int | None = None) -> Outgoing:
    """Send these again, without what could not be put together in the notebook."""
    space = seen()
    space.invalidate(names)
    found = space.outgoing(names - stuck.keys(), new=names, room=room, stuck=stuck, staying=stuck)
    found.gone = ()
    space.sent(found)
    return found


def _small_result(space: Space, rebound: set[str]) -> set[str]:
    """The name under which the shell keeps what the last line gave, if that can go to the notebook at no cost. A cell
    that wants more than that kept gives it a name."""
    kept = [name for name in rebound if RESULT.fullmatch(name)]
    if not kept or not _before.number:
        return set()
    name, value = f"_{_before.number}", space.names.pop(kept[0])  # versions of IPython count differently here
    space.names[name] = value
    if not _is_small(space, name):
        space.names[name] = NotKept(_before.number)
    _results.add(name)
    return {name}


def _small_unders(space: Space) -> set[str]:
    """Of ``_`` and its like those that the cell's text has bound, each as if it was a result."""
    found = {name for name in _before.unders if name in space.names}
    for name in found:
        if not _is_small(space, name):
            space.names[name] = NotKept(_before.number)
    return found


def _is_small(space: Space, name: str) -> bool:
    return not has_too_many(space.names[name]) and 0 < space.nbytes_of(name) <= RESULT_BYTES


class NotKept:
    """Stands in ``_`` and ``Out`` for a result that cannot travel, or is too large to be sent unread."""

    def __init__(self, cell: int) -> None:
        self.cell = cell

    def __repr__(self) -> str:
        return f"<the result of cell {self.cell} stayed on the device and was not kept; give it a name>"


def surroundings_here() -> CellEnvironment:
    """The settings and random states of this kernel; first looked at when they are first asked for."""
    global _surroundings
    if _surroundings is None:
        interpreter = sys.modules.get("IPython")
        shell = None if interpreter is None else interpreter.get_ipython()
        _surroundings = CellEnvironment(is_notebook=False, in_cells=shell is not None)
        if shell is not None:
            shell.events.register("pre_run_cell", lambda _: surroundings_here().enter())
            shell.events.register("post_run_cell", lambda _: surroundings_here().end_cell())
    return _surroundings


def _additions_here() -> Additions:
    """What cells add to this process; looked for from the first cell on."""
    global _additions
    if _additions is None:
        interpreter = sys.modules.get("IPython")
        _additions = Additions(None if interpreter is None else interpreter.get_ipython())
    return _additions


def seen() -> Space:
    """The namespace of this kernel; made when it is first asked for."""
    global _space, _bound
    main: dict[str, Any] = vars(sys.modules["__main__"])
    if _space is None or _space.names is not main:
        _space, _bound = Space(main, GUEST), BoundNames(main)
    return _space


# ---------------------------------------------------------------------------------------------------------- in terminal
#
# Hides the notebook from programs in a guest whose cells are shown in a terminal.
#
# The guest is a Jupyter kernel whatever shows its output. But tqdm and rich look at IPython to choose between a widget
# and text, and a widget in a terminal is the word ``Output()``.


def be_plain() -> None:
    """Look like an IPython in a terminal. Called by name in the guest, between cells."""
    shell: Any = sys.modules["IPython"].get_ipython()
    shell.config.pop("IPKernelApp", None)  # tqdm used to look for this
    kind = type(shell)
    # The name of its class: rich knows that of a notebook's kernel, and tqdm takes one with "qt" in it for a console.
    shell.__class__ = type("ConsoleLikeQt", (kind,), {"__module__": kind.__module__})
