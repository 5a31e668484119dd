"""Two namespaces that follow each other: the notebook's, and that of the kernel on the device.

Each side keeps, of every group of names that share objects, what both had when they last agreed. What is encoded now
and was so then does not travel. Large memory is compared by the change finder, chunk by chunk, so an array not written
to is neither sent nor, where the kernel tracks pages, read.

Objects have a name that both sides know (``Tag``): what stands under a number in the head of a parcel is the same thing
on the side it came from and on the side it came to. So a change is written into the object that was changed, wherever
it is held, and a new object replaces none (``merging``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, Final, ParamSpec, TypeVar

from sublet.errors import Unpicklable
from sublet.notebook.counting import TOO_MANY, has_too_many
from sublet.notebook.groups import (
    ContainerSnapshot,
    ObjectIds,
    blamed,
    blamed_beside,
    digest,
    has_room,
    is_covered_by_digest,
    snapshot,
    without_handles,
)
from sublet.notebook.home import HomeRules
from sublet.notebook.identity import Identities
from sublet.notebook.in_place import can_change, taken_over
from sublet.notebook.in_use import NOTHING as NOTHING_USED
from sublet.notebook.in_use import InUse
from sublet.notebook.lending import PoolOwner
from sublet.notebook.lodging import Freed, Key, Lodged, PoolUser, Word
from sublet.notebook.memories import is_array, is_memory
from sublet.notebook.namespace import HIDDEN, Shared, results, visible, visible_among
from sublet.notebook.object_graphs import Graph, graphs_of, is_flat, joined
from sublet.notebook.parcels import BESIDE, LOST, Outgoing, Parcel, ReceivedParcel, Taken, drop_temporaries
from sublet.notebook.reading import names_of
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.sources import sources_of
from sublet.state.checkpoints.object_groups import (
    CHANGING,
    LARGE_BYTES,
    PLAIN,
    Encodings,
    ObjectGroup,
    Order,
    StandsFor,
    Still,
    encode_roots,
    has_identity,
    is_long,
)
from sublet.state.transfer.changes import ChangeFinder
from sublet.state.transfer.codec import ATOMS, can_travel, encode
from sublet.state.transfer.encoded import BufferKind, Encoded, EncodedBuffer
from sublet.state.transfer.figures import is_part_kind
from sublet.state.transfer.names import found_by_name
from sublet.state.transfer.reducers import ClassRules

__all__ = ["BESIDE", "GUEST", "NOTEBOOK", "Outgoing", "Parcel", "Space", "Taken"]

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], object]
Found = tuple[ObjectGroup, tuple[bytes, ...]]
"""What has changed, and the hashes of each of its buffers."""
NOTEBOOK, GUEST = 0, 1
"""The two sides."""
NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})
NO_WHYS: Final[Mapping[str, str]] = types.MappingProxyType({})
NOT_AGREED: Final = (b"", None)
_CODE: Final = (type, types.FunctionType, types.CellType, types.ModuleType)
_NONE: Final = object()
"""What a name has that is not there."""
QUICK_BYTES: Final = 256 * 1024
"""What is no more than this is remembered in no time."""
ORDERED_MIN: Final = 1024
"""Of so many names the order is worth remembering."""
ROUNDS_MAX: Final = 64
"""Functions that read functions that read functions: each step finds more names; no program needs more steps."""


def _at_once(job: Job) -> None:
    job()


def _unmet(values: list[Any], groups: Iterable[ObjectGroup]) -> list[Any]:
    """Those of these values that no group holds."""
    met = {id(value) for group in groups for value in (group.plain or group.encoded.met or {}).values()}
    met.update(id(held) for value in values if (held := getattr(value, "__dict__", None)) is not None)
    met.update(id(value.base) for value in values if is_array(value))  # what an array looks at goes with it
    left = [value for value in values if id(value) not in met]
    return _unheld(left, groups) if left else []


def _unheld(values: list[Any], groups: Iterable[ObjectGroup]) -> list[Any]:
    """Those of these values that no object of a group holds without pickling it: memory that arrays look at, caches."""
    held: set[int] = set()
    for value in (one for group in groups for one in (group.encoded.met or {}).values()):
        base = value.base if is_array(value) else None
        while base is not None:
            held.add(id(base))
            base = getattr(base, "base", None)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            held.update(map(id, attributes.values()))
        held |= _of_code(value)
    return [value for value in values if id(value) not in held]


def _can_be_lost(value: Any) -> bool:
    """Of what crossed: a library's function and a module are found by their names, a part of a figure goes with the
    figure."""
    if isinstance(value, StandsFor) or (type(value) is types.FunctionType and found_by_name(value)):
        return False
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return False
    return not is_part_kind(type(value)) and can_change(value)


def _of_code(value: Any) -> set[int]:
    """Ids of what a function or a class has beside what is pickled of it where that is empty: its annotations, and the
    namespace that a function was made in."""
    if type(value) is types.FunctionType:
        return {id(value.__annotations__), id(value.__globals__)}
    return {id(vars(value).get("__annotations__"))} if isinstance(value, type) else set()


def _which(value: Any) -> tuple[type, int]:
    """Names an object without keeping it alive."""
    return type(value), id(value)


def _ids_of(groups: Iterable[ObjectGroup]) -> set[int]:
    """Of the objects that groups hold."""
    return {id(value) for group in groups for value in (group.plain or group.encoded.met or {}).values()}


def _stays_with(group: ObjectGroup, used: InUse, found: Outgoing) -> bool:
    """Whether something in it is in use; then all of its names stay."""
    why = used.why((group.plain or group.encoded.met or {}).values())
    found.stays |= dict.fromkeys(group.names, why) if why else {}
    return bool(why)


def _names_read(group: ObjectGroup) -> frozenset[str]:
    """Global names that the notebook's functions in it read, as far as it was noted what is in it."""
    namespace = vars(sys.modules["__main__"])
    functions = [one for one in (group.encoded.met or {}).values() if type(one) is types.FunctionType]
    return frozenset().union(*(names_of(one.__code__)[0] for one in functions if one.__globals__ is namespace))


def _sendable(values: list[Any]) -> list[Any]:
    """Those of these values that can be encoded, found by halves: mostly it is all of them or all but a few."""
    if not values or can_travel(values, HomeRules()):
        return values
    half = len(values) // 2
    return [*_sendable(values[:half]), *_sendable(values[half:])] if half else []


def _without_collections(method: Callable[P, T]) -> Callable[P, T]:
    """Hold back garbage collection meanwhile: many objects are made, nearly all of them to stay, and each collection
    looks through all of them again."""

    @functools.wraps(method)
    def held(*args: P.args, **named: P.kwargs) -> T:
        if not gc.isenabled():
            return method(*args, **named)
        gc.disable()
        try:
            return method(*args, **named)
        finally:
            gc.enable()

    return held


def _in_one_look(method: Callable[P, T]) -> Callable[P, T]:
    """What is encoded meanwhile is not used after it."""

    @functools.wraps(method)
    def in_one_look(*args: P.args, **named: P.kwargs) -> T:
        try:
            return method(*args, **named)
        finally:
            space = args[0]
            assert isinstance(space, Space)
            if not space._is_looking:
                space._forget_figures()

    return in_one_look


class Space:
    """One side."""

    def __init__(
        self,
        names: dict[str, Any],
        side: int,
        finder: ChangeFinder | None = None,
        lender: PoolOwner | None = None,
    ) -> None:
        """``names`` is the namespace itself; the two sides have different numbers. ``lender``: of memory for large
        arrays; the side that starts the other may have one."""
        self.names = names
        self._identities = Identities(side, names)
        self._finder = ChangeFinder() if finder is None else finder
        self._agreed: dict[tuple[str, ...], tuple[bytes, ObjectIds | None]] = {}
        """Groups, and what each was when the sides agreed: its digest, and its objects if it was encoded here. Its
        memory the finder remembers."""
        self._figures: dict[int, Any] = {}
        """Figures that were pickled for what is being looked at: no code of the program runs meanwhile."""
        self._classes = ClassRules()
        """The rules that were found for classes, for as long."""
        self._kept: Encodings | None = None
        """What was encoded, for as long; None outside of a look that says when it is over."""
        self._is_looking = False
        """Whether the caller says when that is (``looking``)."""
        self._still: dict[str, ContainerSnapshot] = {}
        """Large containers of atoms that were agreed on, by name."""
        self._graphs: dict[str, Graph] = {}
        """Of names whose values can be told to be unchanged without encoding them, what they were when they were
        agreed on."""
        self._surveyed: dict[str, Graph] = {}
        """The same as of now, of what is being encoded. It is looked at before: then what a thread changes meanwhile
        counts as changed."""
        self._untold: dict[str, int] = {}
        """Names of values that only their encoding tells to be unchanged, and the ids of these values: mostly the next
        look would find the same."""
        self._verdicts: dict[Graph, bool] = {}
        """Which of the graphs were found to be unchanged: no code of the program runs meanwhile."""
        self._group_of: dict[str, tuple[str, ...]] = {}
        """The group in which each name was agreed on last."""
        self._large: set[tuple[str, ...]] = set()
        """Those of these groups that had much in them."""
        self._joined: set[tuple[str, ...]] = set()
        """Those of these groups whose names share objects: to find that out again takes three encodings."""
        self._reads: dict[tuple[str, ...], frozenset[str]] = {}
        """Names that the functions in each of these groups read."""
        self._values: dict[str, Any] = {}
        """What each name had when it was agreed on, but for long texts."""
        self._shared = Shared()
        """Names that the other side has."""
        self._files: set[str] = set()
        """Cells whose text the other side has."""
        self._order = Order()
        self._lodging: PoolOwner | PoolUser = PoolUser() if lender is None else lender
        self.on_group: Callable[[Collection[str], int], object] | None = None
        """Told, before it is encoded or merged, of each group: its names, and its bytes if they are known (else 0)."""
        self._refused: dict[str, tuple[tuple[type, int], str]] = {}
        """Names whose objects could not be encoded: which, and why."""
        self._first: set[str] = set()
        """Names that code reads which runs while other names are unpickled: they cross before those."""
        self._owed: list[tuple[list[str], Mapping[tuple[str, ...], Parcel]]] = []
        """What was taken and is still to be remembered."""
        self._written: set[int] = set()
        """Ids of what may have changed in groups that are being sent."""
        self._led_to: set[int] = set()
        """Ids of what names without a graph led to when the cell began that reads them (``note_read``)."""

    def visible(self) -> set[str]:
        """The names that are the notebook's own."""
        return visible(self.names)

    def named(self, names: Iterable[str]) -> set[str]:
        """What of these a cell that names them means: names of the notebook's own, and results the shell keeps."""
        return visible_among(self.names, names) | self.results(names)

    def results(self, names: Iterable[str]) -> set[str]:
        """Of these those under which the shell keeps what cells gave and were: they travel if they are named."""
        return results(self.names, names)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """No code of the program runs meanwhile, so what is encoded is used for every question."""
        self._remember_owed()
        self._begin_look()
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False
            self._forget_figures()

    @_without_collections
    def nbytes_of(self, name: str) -> int:
        """Of what its value comes to when it is sent; 0 if it cannot be."""
        groups = self._encoded({name}, HomeRules(), Outgoing(), must=False, anew={name})
        return sum(group.encoded.nbytes for group in groups)

    @_without_collections
    @_in_one_look
    def outgoing(
        self,
        wanted: Iterable[str],
        *,
        must: bool = False,
        lost_of: Iterable[str] = (),
        new: Iterable[str] = (),
        room: int | None = None,
        stuck: Mapping[str, str] = NO_WHYS,
        requested: Iterable[str] | None = None,
        late: bool = False,
        maybe: frozenset[str] | None = None,
        staying: Mapping[str, str] = NO_WHYS,
        held: Collection[str] = (),
        used: InUse = NOTHING_USED,
    ) -> Outgoing:
        """What of these names, and of what functions among them read, differs from what the other side has.

        ``must``: what cannot travel is raised (``Unpicklable``), not noted. ``lost_of``: objects that came for these
        names and that nothing holds any more go as well, if they were changed before they were let go of: on the other
        side other objects may hold them. ``new``: names that were bound anew, and go even if they stand for what was
        agreed on before: the other side may have bound them otherwise since. ``room``: bytes; what has more stays,
        unless the other side has it already, and so do what has too many objects and was bound anew, and what is
        ``stuck``, which stayed before, and why. ``requested``:
        all names, there or not, that will be asked for; None: any. That others are gone may be told later.
        ``late``: the caller is going to ask for ``changed_late`` as well. ``maybe``: words that may be names which are
        looked up; with those that stand in functions they are sent if they can be. None: none is looked up.
        ``staying``: names that are not sent, whatever reads them, and why. ``held``: names of which the other side has
        no value, since it stayed here. ``used``: objects that are not sent, whatever holds them.
        """
        self._remember_owed()
        if not self._is_looking:
            self._begin_look()
        found = Outgoing(stays=dict(staying))
        names = without_handles(self.names, wanted, found)
        bound = frozenset(new)
        if room is not None:
            anew_here = bound.union(held)
            fresh = [name for name in names if name in anew_here or not self._shared.has_any((name,))]
            found.stays |= {name: TOO_MANY for name in fresh if has_too_many(self.names[name])}
            names -= found.stays.keys()
        anew = bound.union(stuck)
        rules = HomeRules()
        groups: list[ObjectGroup] = []
        guessed = self._read_before(names, bound) - found.stays.keys()
        names |= guessed
        for _ in range(ROUNDS_MAX):
            rules = HomeRules()
            groups = self._encoded(names, rules, found, must=must, anew=anew)
            if not guessed <= rules.needs:  # what was read before is not any more
                names -= guessed
                guessed = set()
                continue
            more = without_handles(self.names, rules.needs - HIDDEN, found)
            more -= names | found.stays.keys()
            if not more:
                break
            names |= more
            guessed = set()
        if maybe is not None:
            groups, rules = self._with_looked_up(names, maybe, groups, rules, found, must=must, anew=anew)
        if used.objects:
            groups = [group for group in groups if not _stays_with(group, used, found)]
        lost = self._lost(groups, lost_of)
        named: set[int] | None = None
        if lost:
            named = _ids_of(groups)
            joined = {group.names for group in groups if group.is_joined}
            like = [group.names for group in groups if not group.is_still]
            groups = self._encoded(names, rules, found, must=must, beside=lost, anew=anew, like=like)
            groups = [replace(one, is_joined=True) if one.names in joined else one for one in groups]
        if room is not None:
            groups = [group for group in groups if has_room(group, room, stuck, self._shared, found)]
        found.names = frozenset(names - found.stays.keys() if found.stays else names)
        found.opaque = tuple(sorted(rules.reads.opaque))
        found.sources = sources_of(rules.reads.files - self._files)
        self._files |= rules.reads.files
        if requested is None or rules.reads.opaque or found.handles:
            found.gone = self._shared.deleted(self.names)
        else:
            found.gone = self._shared.deleted_among(self.names, rules.needs.union(requested))
        found.late = [group.remembering(rules) for group in groups if late and self._can_wait(group)]
        waiting = {group.names for group in found.late}
        bound |= {LOST} if lost else frozenset()  # they are known to have changed
        self._written = set()
        looked = [
            (group, *self._compare_group(group, must=not bound.isdisjoint(group.names)))
            for group in groups
            if group.names not in waiting
        ]
        changed = [one for one in looked if not one[1] or not bound.isdisjoint(one[0].names)]
        ready = [(group.remembering(rules), hashes) for group, _, hashes in changed]
        self._fill(found, self._in_order(ready) if self._first else ready, named)
        self._doubt_beside(found)
        return found

    def _with_looked_up(
        self,
        names: set[str],
        maybe: frozenset[str],
        groups: list[ObjectGroup],
        rules: HomeRules,
        found: Outgoing,
        *,
        must: bool,
        anew: frozenset[str],
    ) -> tuple[list[ObjectGroup], HomeRules]:
        """The same with names that may be looked up, and with what functions among those read. None of them keeps the
        others from being sent."""
        strict = frozenset(names)
        words = self.visible() if rules.reads_any else visible_among(self.names, maybe | rules.reads.maybe)
        more = {
            name
            for name in words - names
            if not (type(self.names[name]) is RemoteValue and not self.names[name].is_live)
        }
        more = without_handles(self.names, more, found)
        while more:
            names |= more
            rules = HomeRules()
            groups = self._encoded(names, rules, found, must=must, strict=strict, anew=anew)
            more = without_handles(self.names, rules.needs - HIDDEN, found) - names - found.stays.keys()
        if must:
            names.difference_update(found.stays)
            found.unsent, found.stays = found.stays, {}
        found.looked_up = frozenset(names - strict)
        return groups, rules

    def changed_late(self, what: Outgoing) -> list[Found]:
        """Of what may have changed in its memory alone what has: to look at that takes time, in which the other side
        can take in everything else. ``what`` must have been ``sent`` before this is turned into ``parcels_of`` it."""
        late, what.late = what.late, []  # their memory must not be kept alive longer than that
        return [
            (group, hashes)
            for group, (same, hashes) in zip(late, map(self._compare_group, late), strict=True)
            if not same
        ]

    @_without_collections
    def parcels_of(self, changed: list[Found]) -> Outgoing:
        """These have changed."""
        found = Outgoing(names=frozenset(name for group, _ in changed for name in group.names))
        self._fill(found, changed)
        return found

    def keep(self, lent: Iterable[Lodged]) -> None:
        """Memory that the other side lends."""
        for one in lent:
            if isinstance(self._lodging, PoolUser):
                self._lodging.add_file(one)

    def on_pool_message(self, word: Word) -> None:
        """What the other side says of the memory that it lent."""
        if isinstance(self._lodging, PoolUser):
            self._lodging.on_pool_message(word)

    def on_freed(self, freed: Freed) -> None:
        """Memory that was lent and is not used any more."""
        self._lodging.free(freed)

    def trim_pool(self) -> None:
        """A cell is over: let go of what is too much."""
        self._lodging.trim()

    def sent(self, what: Outgoing) -> None:
        """The other side has it now."""
        self._lodging.sent()
        self._shared.add(what.names)
        self._forget_names(what.gone)

    @_without_collections
    def take(
        self,
        parcels: Iterable[Parcel],
        gone: Iterable[str] = (),
        *,
        afterwards: Callable[[Job], object] = _at_once,
        newer: Collection[str] = (),
    ) -> Taken:
        """Merge what arrived. ``afterwards``: runs a little later, but before any code writes to it, what need not
        be done at once. ``newer``: names whose objects, as far as they have crossed, are newer here than what comes:
        they are not written to."""
        self._remember_owed()
        settled = frozenset(map(id, self._identities.came_for(newer)))
        try:
            taken = self._take(parcels, gone, settled)
        finally:
            self._lodging.reclaim()
        taken.freed = self._lodging.take_freed()
        (afterwards if taken.nbytes <= QUICK_BYTES else _at_once)(self._remember_owed)
        return taken

    @_without_collections
    def _remember_owed(self) -> None:
        while self._owed:
            names, came = self._owed[-1]
            try:
                self._agree(names, came)
            except BaseException:
                self.invalidate(names)
                raise
            self._owed.pop()

    def _take(self, parcels: Iterable[Parcel], gone: Iterable[str], settled: frozenset[int]) -> Taken:
        changed: list[str] = []
        rebound: list[str] = []
        nbytes = 0
        others: set[int] = set()
        crossed = []
        idle: set[tuple[str, ...]] = set()
        broken: dict[str, str] = {}
        for parcel in parcels:
            names = [name for name in parcel.names if not name.startswith(LOST)]
            same = self._same(parcel)
            if same is not None:
                crossed.append((parcel, same))
                idle.add(parcel.names)
                changed += names
                continue
            if self.on_group is not None:
                self.on_group(parcel.names, parcel.nbytes)
            came = ReceivedParcel(parcel, self._lodging.view, self._identities.find)
            if came.broken:
                broken |= came.broken
                continue
            try:
                values, anew, written = taken_over(self.names, self._identities, came, settled)
            except Exception as error:  # noqa: BLE001 - an object's own method, or an object that cannot be written to
                why = error.what if isinstance(error, Unpicklable) else f"{type(error).__name__}: {error}"
                broken |= dict.fromkeys(names, why or str(error))
                continue
            crossed.append((parcel, values))
            rebound += anew
            others |= written
            changed += names
            nbytes += parcel.nbytes
        for parcel, values in crossed:
            self._identities.note(parcel.names, parcel.own, values, parcel.known)
        for name in gone:
            self.names.pop(name, None)
        self._forget_names(gone)
        self._doubt(self._identities.names_with(self._identities.shared(others)).difference(changed))
        self._shared.add(changed)
        self._owed.append((changed, {one.names: one for one, _ in crossed}))
        if settled:
            mixed = {one.names for one, values in crossed if not settled.isdisjoint(map(id, values.values()))}
            self._owed[-1] = changed, {one.names: one for one, _ in crossed if one.names not in mixed}
            self._remember_owed()
            self._agreed = {names: one for names, one in self._agreed.items() if names not in mixed}  # it goes back
            self._forget_graphs({name for names in mixed for name in names})
        news = tuple(name for name in changed if not any(name in names for names in idle)) if idle else tuple(changed)
        return Taken(
            changed=news, rebound=tuple(sorted(set(rebound))), nbytes=nbytes, broken=broken, idle=frozenset(idle)
        )

    def _same(self, parcel: Parcel) -> dict[int, Any] | None:
        """Of a parcel that was sent because it may have changed: what it holds, if that is here and just so."""
        self._figures, self._classes = {}, ClassRules()
        lodged = [one for one in parcel.buffers if isinstance(one, Lodged)]
        if not lodged or parcel.names not in self._agreed or not self.names.keys() >= set(parcel.names):
            return None
        rules = HomeRules()
        groups = self._encoded(set(parcel.names), rules, Outgoing(), must=False, like=[parcel.names])
        if len(groups) != 1 or groups[0].encoded.head != parcel.head:
            return None
        group = groups[0].remembering(rules)
        met = group.encoded.met or {}
        known = self._identities.known(met)
        objects = [n for n, one in met.items() if can_change(one)]
        if any(n not in known or known[n] != parcel.known.get(n) for n in objects):
            return None  # one of them is new there, or another
        for n, (buffer, one) in enumerate(zip(group.encoded.buffers, parcel.buffers, strict=True)):
            if isinstance(one, Lodged):
                same = self._lodging.is_same((group.names, n), one, buffer)
            else:
                same = memoryview(one).cast("B") == buffer.view
            if not same:
                return None
        for one in lodged:
            self._lodging.idle(one)
        return dict(met)

    @_in_one_look
    def _agree(self, names: Iterable[str], came: Mapping[tuple[str, ...], Parcel]) -> None:
        """Both sides have the same of these now: remember how it is encoded here."""
        self._begin_look()
        rules = HomeRules()
        known = {name for name in names if name in self.names}
        like = []
        arriving = [(tuple(name for name in one.names if not name.startswith(LOST)), one) for one in came.values()]
        for named, arrived in arriving:
            if named and arrived.is_joined:
                self._note_group(named, is_joined=True)
        if len(known) < ORDERED_MIN:
            self._survey(known)
        for named, arrived in arriving:
            if named and (self._is_agreed_at_once(named, arrived) or self._is_known_by_graph(named, arrived)):
                known.difference_update(named)
            elif named:
                like.append(named)
                self._note_group(named, is_joined=arrived.is_joined)
        groups = self._encoded(known, rules, Outgoing(), must=False, like=like)
        met, encoded = _ids_of(groups), {name for group in groups for name in group.names}
        for arrived in came.values():
            if encoded.issuperset(arrived.names):
                self._identities.on_arrival(arrived.names, met)
        for group in groups:
            parcel = came.get(group.names)
            if parcel is None or parcel.head != group.encoded.head or len(parcel.hashes) != len(parcel.buffers):
                self._record_agreed(group, digest(group))
                for n, buffer in enumerate(group.encoded.buffers):
                    self._lodging.forget_key((group.names, n))
                    if buffer.kind is not BufferKind.SMALL:
                        self._finder.changed(buffer)
                continue
            self._record_agreed(group, digest(group))
            for n, (buffer, one) in enumerate(zip(group.encoded.buffers, parcel.buffers, strict=True)):
                if buffer.kind is BufferKind.SMALL:
                    continue
                if isinstance(one, Lodged) and self._lodging.confirm((group.names, n), one, buffer):
                    self._finder.forget_buffer(buffer)
                elif isinstance(one, Lodged):
                    self._finder.changed(buffer)
                else:
                    self._lodging.forget_key((group.names, n))
                    self._finder.believe(buffer, parcel.hashes[n])

    def _is_agreed_at_once(self, names: tuple[str, ...], arrived: Parcel) -> bool:
        """Whether it is a large container of atoms, which can be told to be unchanged without being encoded here: then
        it counts as what came. Where a set lists its items in another order than the other side's, it is sent once more
        than needed when it has changed and was changed back."""
        value = self.names.get(names[0])
        if not arrived.is_plain or arrived.buffers or len(names) > 1 or not is_long(value):
            return False
        encoded = Encoded(head=arrived.head, buffers=())
        group = ObjectGroup(names=names, encoded=encoded, plain={names[0]: value})
        self._record_agreed(group, digest(group))
        return True

    def _is_known_by_graph(self, names: tuple[str, ...], arrived: Parcel) -> bool:
        """The same of what can be told to be unchanged without being encoded at all."""
        if arrived.buffers or not self._surveyed.keys() >= set(names):
            return False
        graph = joined(map(self._surveyed.__getitem__, names))
        if names == arrived.names:
            self._identities.on_arrival(names, graph.reached)
        met = graph.part(frozenset(names)).held
        group = ObjectGroup(
            names=names, encoded=Encoded(head=arrived.head, buffers=(), met=met), is_joined=arrived.is_joined
        )
        self._record_agreed(group, digest(group), is_known_by_graph=True)
        return True

    def _doubt_beside(self, what: Outgoing) -> None:
        """Of names that are not sent and share what has changed, those that are not as they were agreed on."""
        sent = {name for one in what.parcels for name in one.names}
        beside = self._identities.names_with(self._identities.shared(self._written)) - sent
        self._written = set()
        groups = {self._group_of[name] for name in beside if name in self._group_of} & self._agreed.keys()
        self._doubt({name for group in groups if not self._is_as_agreed(group) for name in group})

    def _is_as_agreed(self, names: tuple[str, ...]) -> bool:
        if not self.names.keys() >= set(names):
            return False
        if self._graphs.keys() >= set(names):
            return all(map(self._has_same, names))
        groups = self._encoded(set(names), HomeRules(), Outgoing(), must=False, like=[names])
        return [one.names for one in groups] == [names] and self._is_agreed(groups[0])

    def _doubt(self, names: Set[str]) -> None:
        """The other side has these with something in them that crossed with others. What was agreed on is not what both
        have, also if here it is the same again one day."""
        if not names:
            return
        self._agreed = {group: one for group, one in self._agreed.items() if names.isdisjoint(group)}
        self._still = {name: one for name, one in self._still.items() if name not in names}
        self._forget_graphs(names)

    def invalidate(self, names: Iterable[str]) -> None:
        """The other side may have changed these and not said so: they are sent again when they are wanted."""
        doubtful = set(names).union(*(names for names, _ in self._owed))
        self._owed.clear()
        self._lodging.undo()
        self._files.clear()
        self._agreed = {group: one for group, one in self._agreed.items() if doubtful.isdisjoint(group)}
        self._forget_graphs(doubtful)

    def unchanged(self, groups: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
        """Of these groups those that the other side has; they may have changed since."""
        return {group for group in groups if self._shared.has_all(group)}

    def forget(self) -> None:
        """The other side has nothing any more."""
        self._owed.clear()
        self._agreed.clear()
        self._still.clear()
        self._graphs.clear()
        self._untold.clear()
        self._group_of.clear()
        self._values.clear()
        self._large.clear()
        self._joined.clear()
        self._reads.clear()
        self._shared.clear()
        self._files.clear()
        self._first.clear()
        self._refused.clear()
        self._finder.forget()
        self._identities.forget()
        self._lodging.forget()

    def crossed_with(self, values: Mapping[int, Any]) -> tuple[str, ...]:
        """Names that the other side has and that hold some of these objects."""
        return self._identities.names_of(values)

    def _lost(self, groups: Iterable[ObjectGroup], names: Iterable[str]) -> dict[str, Any]:
        came = self._identities.came_for(names)
        if not came:
            return {}
        groups = list(groups)
        if _ids_of(groups).issuperset(map(id, came)):
            return {}
        unchanged = self._unchanged_before(names)
        for graph in {id(one): one for one in map(self._graphs.get, names) if one is not None}.values():
            unchanged |= graph.reached if self._is_same(graph) else set()
        came = [value for value in came if id(value) not in unchanged and _can_be_lost(value)]
        lost = _unmet(came, groups) if came else []
        if lost:  # names that crossed together with these may hold them, and are not looked at
            beside = self._identities.crossed_with(names).difference(*(group.names for group in groups))
            beside &= self.names.keys()
            held = [self.names[name] for name in beside]
            found_at_once = set(map(id, held)).union(*map(_of_code, held))
            left = [value for value in lost if id(value) not in found_at_once]
            left = _unmet(left, self._encoded(beside, HomeRules(), Outgoing(), must=False)) if left else []
            led_to = self._changed_before(names).union(self._led_to, map(id, left))
            lost = [value for value in lost if id(value) in led_to]
        found = _sendable([value for value in lost if not self._is_untouched(value)])
        return {LOST: found} if found else {}  # one by one each would have to say again what they share

    def note_read(self, names: Set[str], before: Set[str] = frozenset()) -> None:
        """A cell is about to read these names; ``before``: what it has read already, nothing as it begins. Objects that
        crossed with them may be held by names that it does not read as well, so it is noted what these lead to now,
        where their graphs do not tell it."""
        reads = names | before
        mixed = {
            name
            for name in names & self.names.keys() - self._graphs.keys()
            if not is_part_kind(type(self.names[name])) and not self._identities.crossed_with((name,)) <= reads
        }
        self._led_to = (self._led_to if before else set()) | (self._ids_held_by(mixed) if mixed else set())

    def _changed_before(self, names: Iterable[str]) -> set[int]:
        """Ids of what these names led to when they were agreed on, and what is not as it was."""
        graphs = {name: graph for name in names if (graph := self._graphs.get(name)) is not None}
        return {changed for name, graph in graphs.items() for changed in graph.changed(name)}

    def _unchanged_before(self, names: Iterable[str]) -> set[int]:
        """Ids of the objects that some of these names held when they were agreed on, where they hold others now and
        nothing has changed in the old ones."""
        found: set[int] = set()
        rebound = {name for name in names if name in self._values and self.names.get(name) is not self._values[name]}
        for group in {self._group_of[name] for name in rebound if name in self._group_of} & self._agreed.keys():
            values = {name: self._values[name] for name in group if name in self._values}
            if len(values) < len(group):
                continue
            if self._still.keys() >= values.keys() and self._still[group[0]].is_of(values[group[0]]):
                found.add(id(values[group[0]]))
                continue
            rules = HomeRules()
            try:
                (old,) = encode_roots(values, rules=rules, together=[group])
            except Unpicklable:
                continue
            # Large memory is compared object by object.
            if all(one.kind is BufferKind.SMALL for one in old.encoded.buffers) and self._is_agreed(old):
                found |= _ids_of([old.remembering(rules)])
        return found

    def _is_untouched(self, value: Any) -> bool:
        """Of an array or a tensor: its memory is all there is to it, and costs too much to send for nothing."""
        if not is_memory(value) or (is_array(value) and value.dtype.hasobject):
            return False
        buffers = encode(value, gpu="copy").buffers
        if any(one.kind is BufferKind.SMALL for one in buffers):
            return False
        return not any(self._compared(((LOST,), 0), one)[0] for one in buffers)

    def _encoded(
        self,
        names: set[str],
        rules: HomeRules,
        found: Outgoing,
        *,
        must: bool,
        beside: Mapping[str, Any] = NOTHING,
        strict: frozenset[str] | None = None,
        anew: Set[str] | None = None,
        like: Collection[tuple[str, ...]] | None = None,
    ) -> list[ObjectGroup]:
        """``must``: names that cannot be sent are an error; of these only, where they are said to be ``strict``.
        ``anew``: all others need not be encoded if they are known to be unchanged; None: all are encoded. ``like``:
        groups that came from the other side; None: large ones of the last time stay as they are if nothing in them has
        changed."""
        rules.figures, rules.classes = self._figures, self._classes
        left = names - found.stays.keys() if found.stays else names
        few = len(left) < ORDERED_MIN
        namespace: dict[str, Any] = {name: self.names[name] for name in left} if few else self.names.copy()
        line = list(namespace) if few else list(filter(left.__contains__, namespace))
        still: list[Still] = []
        if anew is not None:
            still = self._unchanged_values(left, anew, rules, is_few=few)
        placed = {name for one in still for name in one.names}
        if few and anew is not None and like is None:
            self._survey(left - placed, left & placed)
        namespace |= beside
        line += beside

        def is_wanted(name: str) -> bool:
            return must and name != LOST and (strict is None or name in strict)

        for name in self._refused_before(line):
            if not is_wanted(name):
                found.stays[name] = self._refused[name][1]
                line.remove(name)
        on_group = self.on_group
        before = None if on_group is None else lambda names: on_group(names, 0)
        while True:
            parts = self._joined_before(line, placed) if like is None else set()
            known = self._among(line, self._large | self._joined if like is None else like, placed)
            alone = self._alone(line) if few and like is None else ()
            try:
                groups = encode_roots(
                    namespace,
                    names=line,
                    rules=rules,
                    order=None if few else self._order,
                    still=still,
                    together=[*known, *parts],
                    stays=functools.partial(self._stays, parts) if like is None else lambda _: True,
                    before=before,
                    apart=self._first,
                    alone=alone,
                    kept=self._kept,
                )
                for group in groups if self._kept is None else self._kept.fresh:
                    if isinstance(group.encoded.met, dict) and group.plain is None and not group.is_still:
                        drop_temporaries(group.encoded.met)
                if self._read_first(rules.reads.loads):
                    continue
                return [replace(one, is_joined=True) if one.names in parts else one for one in groups]
            except Unpicklable as error:
                values = {name: namespace[name] for name in line}
                name, error = blamed(error, values)
                if is_wanted(name):
                    raise error from None
                stuck = blamed_beside(error, values) | {name: error.what or error.message}
                for one, why in stuck.items():
                    if is_wanted(one):
                        continue
                    line.remove(one)
                    if one != LOST:
                        found.stays[one] = why
                        self._refused[one] = _which(namespace[one]), why

    def _refused_before(self, names: Collection[str]) -> list[str]:
        """Of these names those that still have what could not be encoded, and cannot be now. Asked of each by itself
        that takes as long as the way to its obstacle; among others, each takes an encoding of all."""
        known = self._refused.keys() & names if self._refused else ()
        for name in [one for one in known if one in self.names]:
            value = self.names[name]
            if self._refused[name][0] != _which(value) or can_travel({name: value}, HomeRules()):
                del self._refused[name]
        return [name for name in names if name in self._refused] if self._refused else []

    def _among(
        self, names: Iterable[str], groups: Collection[tuple[str, ...]], but: Collection[str]
    ) -> list[tuple[str, ...]]:
        """Of these groups those that hold none but these names. Names that are read first stand apart from others,
        unless it is known that they share objects with them."""
        left = set(names).difference(but) if groups else set()
        first = self._first
        found = [group for group in groups if left.issuperset(group)]
        return [one for one in found if one in self._joined or first.isdisjoint(one) or first.issuperset(one)]

    def _alone(self, names: Iterable[str]) -> set[str]:
        """Names that come out large, as far as it can be told beforehand: those that stood in a large group, and those
        of long containers. And those that can be told to be unchanged: if they stood with others, a change of one would
        be a change of all."""
        large = {name for group in self._large for name in group}
        values, surveyed = self.names, self._surveyed
        return {
            name
            for name in names
            if name in large or name in surveyed or type(values.get(name)) not in PLAIN or is_long(values.get(name))
        }

    def _joined_before(self, names: Collection[str], but: Collection[str]) -> set[tuple[str, ...]]:
        """What is left of joined groups without names that rarely are what joins the others: results of cells (which
        often share objects with what they were computed from), functions and classes."""
        left = set(names).difference(but) if self._joined else set()
        found = set()
        for group in self._joined:
            part = tuple(name for name in group if name in left)
            if 1 < len(part) < len(group) and all(name in left or self._joins_rarely(name) for name in group):
                found.add(part)
        return found

    def _joins_rarely(self, name: str) -> bool:
        return name.startswith("_") or isinstance(self.names.get(name), (type, types.FunctionType))

    def _read_before(self, names: Set[str], bound: Set[str]) -> set[str]:
        """Names that functions among these read, and functions among those, as far as it is known from the last time:
        what is not known beforehand is found by encoding everything once more. What is ``bound`` anew holds something
        else than the last time, and what that read may be old here."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            value = self.names.get(name)
            if type(value) is types.FunctionType and value.__globals__ is self.names:
                read = names_of(value.__code__)[0]
            elif name in bound:
                continue
            else:
                read = self._reads.get(self._group_of.get(name, ()), frozenset())
            new = {one for one in read - HIDDEN - names - found if type(self.names.get(one, value)) is not RemoteValue}
            found |= new & self.names.keys()
            waiting += new & self.names.keys()
        return found

    def _stays(self, parts: Collection[tuple[str, ...]], group: ObjectGroup) -> bool:
        """A small group that has changed is sent as a whole: to find out whether its names still share objects takes
        longer."""
        return group.names in parts or group.encoded.nbytes <= LARGE_BYTES or self._is_agreed(group)

    def _is_agreed(self, group: ObjectGroup, now: bytes = b"") -> bool:
        """Whether it is as it was agreed on, with the very same objects; ``now``: its digest, if that is known."""
        before, objects = self._agreed.get(group.names, NOT_AGREED)
        return before == (now or digest(group)) and objects is not None and objects.are_of(group)

    def _read_first(self, names: Iterable[str]) -> bool:
        """Functions and classes among these read others in turn. Whether any is new."""
        waiting = [name for name in names if name not in self._first and name in self.names]
        is_any = bool(waiting)
        while waiting:
            name = waiting.pop()
            self._first.add(name)
            value = self.names[name]
            codes = [value, *vars(value).values()] if isinstance(value, type) else [value]
            for one in codes:
                code = getattr(one, "__code__", None)
                read = names_of(code)[0] if isinstance(code, types.CodeType) else ()
                waiting += [more for more in read if more not in self._first and more in self.names]
        return is_any

    def _in_order(self, groups: Iterable[Found]) -> list[Found]:
        """What others need while they are unpickled comes first, and of that what needs nothing."""
        first = self._first
        return sorted(groups, key=lambda one: (not first.issuperset(one[0].names), one[0].plain is None))

    def _compare_group(self, group: ObjectGroup, *, must: bool = False) -> tuple[bool, tuple[bytes, ...]]:
        """Whether it is as it was, and the hashes of its buffers; from here on it counts as agreed. ``must``: it is
        sent in any case, and that takes the hashes of all buffers."""
        if group.is_still:
            return True, ()
        now = digest(group)
        same = self._is_agreed(group, now)
        if not same:
            self._written |= self._written_in(group)
        if not must and group.names not in self._agreed and self._is_within_agreed(group.names):
            return True, ()
        looked = [self._compared((group.names, n), buffer) for n, buffer in enumerate(group.encoded.buffers)]
        self._record_agreed(group, now)
        return same and not any(changed for changed, _ in looked), tuple(hashes for _, hashes in looked)

    def _written_in(self, group: ObjectGroup) -> set[int]:
        """Ids of objects in it that may be others than when it was agreed on. Where no graph tells them, functions and
        classes count as they were: most of what holds an instance holds its class. So does what cannot change: all
        frames hold the types of their columns."""
        before = {name: self._graphs.get(name) for name in group.names}
        if None not in before.values():
            return {key for name, graph in before.items() if graph is not None for key in graph.changed(name)}
        met = group.plain or group.encoded.met or {}
        return {id(value) for value in met.values() if not isinstance(value, _CODE) and has_identity(value)}

    def _is_within_agreed(self, names: tuple[str, ...]) -> bool:
        """Whether these names were agreed on together with others, and nothing of all that has changed. Else what only
        the other side has changed, through an object that no cell named, would be overwritten with what it was."""
        before = {self._group_of.get(name) for name in names}
        whole = {name for group in before for name in group or ()}
        if not before <= self._agreed.keys() or not whole <= self.names.keys() or not whole.isdisjoint(HIDDEN):
            return False
        if all(map(self._is_known_to_be_same, whole)):
            return True
        if len(whole) < ORDERED_MIN:
            self._survey(whole)
        groups = self._encoded(whole, HomeRules(), Outgoing(), must=False)
        is_same = {group.names for group in groups} == before and all(
            self._is_agreed(group)
            and not any(self._compared((group.names, n), one)[0] for n, one in enumerate(group.encoded.buffers))
            for group in groups
        )
        for group in groups if is_same else ():  # the next cell that reads a part of it need not encode it
            if self._surveyed.keys() >= set(group.names):
                self._note_graphs(group.names)
        return is_same

    def names_with_new_gradients(self, beside: Set[str] = frozenset()) -> set[str]:
        """Names that hold tensors whose gradients have changed since they crossed, and that ``beside``, the names that
        are looked at anyway, do not hold. What merely crossed together with such a tensor may be old here."""
        changed = self._identities.new_gradients()
        names = set(self._identities.names_of(dict(enumerate(changed)))) - beside
        if not names:
            return set()
        left = set(map(id, changed)) - self._ids_held_by(beside)
        return {name for name in names if left and not left.isdisjoint(self._ids_held_by({name}))}

    def _ids_held_by(self, names: Set[str]) -> set[int]:
        groups = self._encoded(set(names & self.names.keys()), HomeRules(), Outgoing(), must=False)
        return _ids_of(groups)

    def _compared(self, key: Key, buffer: EncodedBuffer) -> tuple[bool, bytes]:
        """Whether its memory holds something else than what both had, and the hashes of that if some are needed."""
        if is_covered_by_digest(buffer):
            return False, b""
        changed = self._lodging.changed(key, buffer)
        if changed is None and self._lodging.watches(key, buffer) and not self._finder.knows(buffer):
            return True, b""  # it will lie where it can be compared with, so its hashes are not needed
        if changed is not None:
            return changed, b""
        chunks, hashes = self._finder.compared(buffer)
        return bool(chunks), hashes

    def _is_still(self, name: str) -> bool:
        return (name,) in self._agreed and self._still[name].is_of(self.names.get(name))

    def _forget_figures(self) -> None:
        """Code of the program has run, or will: what was looked at may be another."""
        self._figures, self._classes, self._surveyed, self._verdicts = {}, ClassRules(), {}, {}
        self._kept = None

    def _begin_look(self) -> None:
        """The same, and until the next call none of it runs."""
        self._forget_figures()
        self._kept = Encodings()

    def _is_same(self, graph: Graph) -> bool:
        if graph not in self._verdicts:
            self._verdicts[graph] = graph.is_same()
        return self._verdicts[graph]

    def _has_same(self, name: str) -> bool:
        graph = self._graphs[name]
        return graph.values[name] is self.names.get(name, _NONE) and self._is_same(graph)

    def _is_known_to_be_same(self, name: str) -> bool:
        """Whether that can be told without encoding it."""
        return self._has_same(name) if name in self._graphs else name in self._still and self._is_still(name)

    def _unchanged_values(self, names: Set[str], anew: Set[str], rules: HomeRules, *, is_few: bool) -> list[Still]:
        """Of these names those whose values are known to be unchanged without encoding them, less those that are
        ``anew``."""
        found = []
        for name in self._still.keys() & names - anew:
            if self._is_still(name):
                value = self.names[name]
                found.append(Still((name,), {id(value): value} if type(value) in CHANGING else {}))
        if not is_few or not self._graphs:
            return found
        same = {name for name in self._graphs.keys() & names - anew if self._has_same(name)}
        for group in {group for name in names - same if (group := self._group_of.get(name, ())) in self._joined}:
            same.difference_update(group)  # to encode a part of it takes an encoding of the rest
        together: dict[int, list[str]] = {}
        for name in sorted(same):
            together.setdefault(id(self._graphs[name]), []).append(name)
        for some in together.values():
            part = self._graphs[some[0]].part(frozenset(some))
            rules.reads.add(part.reads)
            found.append(Still(tuple(some), part.held))
        return found

    def _survey(self, names: Set[str], beside: Set[str] = frozenset()) -> None:
        """Look at the values of these that are not looked at yet. And at long containers, among these and ``beside``,
        that others of them hold: from now on they are unchanged together."""
        values = {name: self.names[name] for name in sorted(names - self._surveyed.keys())}
        some = {
            name: one
            for name, one in values.items()
            if self._untold.get(name) != id(one) and (not is_long(one) or self._is_joined_and_flat(name, one))
        }
        found = graphs_of(some)
        others = {name: self.names[name] for name in (names | beside) - some.keys() - self._surveyed.keys()}
        long = {name: one for name, one in others.items() if is_long(one)}
        nodes = set[int]().union(*(graph.nodes for graph in found.values())) if long else ()
        held = {name: one for name, one in long.items() if id(one) in nodes and is_flat(one)}
        if held:
            found = graphs_of(some | held)
        self._surveyed |= found
        self._untold |= {name: id(one) for name, one in some.items() if name not in found}

    def _is_joined_and_flat(self, name: str, value: Any) -> bool:
        """Of a long container: alone it is told to be unchanged sooner by a snapshot."""
        return self._group_of.get(name, ()) in self._joined and is_flat(value)

    def _note_graphs(self, names: tuple[str, ...]) -> None:
        """They are agreed on as they were when they were looked at. What is joined is unchanged if all of it is."""
        known = []
        for name in names:
            before = self._graphs.get(name)
            if name in self._surveyed:
                known.append(self._surveyed[name])
            elif before is not None and before in self._verdicts and self._has_same(name):  # shares with what is new
                known.append(before)
        if len(known) < len(names):
            for name in names:
                self._graphs.pop(name, None)
        elif names in self._joined:
            self._graphs |= dict.fromkeys(names, joined(known))
        else:
            self._graphs |= zip(names, known, strict=True)

    def _forget_names(self, gone: Iterable[str]) -> None:
        """The other side does not have these any more: what comes under one of them next is new, also if it is as what
        was agreed on."""
        self._shared.remove(gone)
        self._identities.forget_names(gone)
        for name in gone:
            self._agreed.pop(self._group_of.get(name, ()), None)
            for known in (self._still, self._graphs, self._untold, self._values):
                known.pop(name, None)

    def _forget_graphs(self, names: Set[str]) -> None:
        """Of all that shares objects with these."""
        doubtful = {name for name, graph in self._graphs.items() if not names.isdisjoint(graph.values)}
        self._graphs = {name: graph for name, graph in self._graphs.items() if name not in doubtful}

    def _record_agreed(self, group: ObjectGroup, digest: bytes, *, is_known_by_graph: bool = False) -> None:
        """A name was in another group before, perhaps: what was agreed on then is over. ``is_told_by_graph``: it was
        not encoded, so its objects have no numbers."""
        names = group.names
        self._still = {name: one for name, one in self._still.items() if name not in names} if self._still else {}
        if group.plain is not None and len(names) == 1 and (taken := snapshot(self.names.get(names[0]))) is not None:
            self._still[names[0]] = taken
        self._note_group(names, is_joined=group.is_joined)
        self._note_graphs(names)
        self._agreed[names] = digest, None if is_known_by_graph else ObjectIds.of(group, can_change)
        for name in names:
            value = self.names.get(name)
            if type(value) in ATOMS and sys.getsizeof(value) > QUICK_BYTES:
                self._values.pop(name, None)
            else:
                self._values[name] = value
        if group.encoded.nbytes > LARGE_BYTES:
            self._large.add(names)
        elif not group.is_still:
            self._large.discard(names)
        if names in self._joined or len(names) == 1:
            self._reads[names] = _names_read(group)

    def _note_group(self, names: tuple[str, ...], *, is_joined: bool) -> None:
        for name in () if names in self._agreed else names:
            before = self._group_of.get(name)
            if before != names:
                self._agreed.pop(before or (), None)
                self._large.discard(before or ())
                self._joined.discard(before or ())
                self._reads.pop(before or (), None)
                self._group_of[name] = names
        if is_joined:
            self._joined.add(names)

    def _fill(self, found: Outgoing, groups: list[Found], named: set[int] | None = None) -> None:
        self._lodging.undo()
        try:
            found.parcels = self._parcels(groups, named)
        except BaseException:
            self.invalidate(found.names)
            raise
        found.word, found.freed, found.lent = (
            self._lodging.pool_message(),
            self._lodging.take_freed(),
            self._lodging.lent(),
        )

    def _can_wait(self, group: ObjectGroup) -> bool:
        """Whether it is as it was, but perhaps for memory of which the kernel knows what was written to."""
        large = [(n, one) for n, one in enumerate(group.encoded.buffers) if one.kind is not BufferKind.SMALL]
        if not large or not self._is_agreed(group):
            return False
        return all(self._lodging.can_wait((group.names, n), one) for n, one in large)

    def _parcels(self, groups: list[Found], named: set[int] | None) -> list[Parcel]:
        """What is known is looked up for all of them before any of them counts as having crossed. ``named``: ids of
        what names hold, where there is more: that crosses for the last time, since no name brings it again."""
        found = []
        for group, hashes in groups:
            encoded: Encoded = group.encoded
            known = self._identities.known(encoded.met or {})
            own = self._identities.next()
            keyed = [((group.names, n), one) for n, one in enumerate(encoded.buffers)]
            sent = [self._sent(key, one, table) for (key, one), table in zip(keyed, hashes, strict=True)]
            buffers, tables = zip(*sent, strict=True) if sent else ((), ())
            found.append(
                Parcel(
                    names=group.names,
                    head=encoded.head,
                    buffers=buffers,
                    own=own,
                    known=known,
                    hashes=tables,
                    is_plain=group.plain is not None,
                    is_joined=group.is_joined or group.names in self._joined,
                )
            )
        for (group, _), parcel in zip(groups, found, strict=True):
            met = group.encoded.met or {}
            kept = met if named is None else {n: one for n, one in met.items() if id(one) in named}
            self._identities.note(parcel.names, parcel.own, kept, parcel.known)
        return found

    def _sent(self, key: Key, buffer: EncodedBuffer, hashes: bytes) -> tuple[Lodged | memoryview, bytes]:
        """How it travels, and its hashes where they are to be told."""
        lodged = self._lodging.place(key, buffer)
        if lodged is not None:
            if self._lodging.watches(key, buffer):
                self._finder.forget_buffer(buffer)
            return lodged, b""
        self._lodging.forget_key(key)
        if not hashes and buffer.kind is not BufferKind.SMALL:
            hashes = self._finder.compared(buffer)[1]
        return buffer.view, hashes
