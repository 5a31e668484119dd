"""Two namespaces that follow each other: the notebook's, and that of the kernel on the device.

Each side keeps, of every group of names that share objects, what both had when they last agreed. What is encoded now
and was so then does not travel. Large memory is compared by the change finder, chunk by chunk, so an array nobody wrote
to is neither sent nor, where the kernel tracks pages, read.

Objects have a name that both sides know (``Tag``): what stands under a number in the head of a parcel is the same thing
on the side it came from and on the side it came to. So a change is written into the object that was changed, wherever
it is held, and a new object replaces none (``merging``).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any, Final

from sublet.durable.changes import ChangeFinder, chunk_hash
from sublet.durable.codec import can_travel, encode
from sublet.durable.encoded import Encoded
from sublet.durable.loading import decode
from sublet.durable.roots import Group, Order, encode_roots
from sublet.errors import Unpicklable
from sublet.notebook.home import HomeRules
from sublet.notebook.identity import Identities, Tag
from sublet.notebook.memories import is_array, is_memory
from sublet.notebook.merging import can_change, merge
from sublet.notebook.namespace import HIDDEN, Shared, results, visible, visible_among
from sublet.notebook.stays import Stays, any_handles
from sublet.values import format_size

__all__ = ["BESIDE", "GUEST", "NOTEBOOK", "Outgoing", "Parcel", "Space", "Taken"]

NOTEBOOK, GUEST = 0, 1
"""The two sides."""
LOST: Final = "\0"
"""Begins what stands in a parcel in place of a name, for an object that has none any more."""
NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})
NO_WHYS: Final[Mapping[str, str]] = types.MappingProxyType({})
SMALL_BYTES: Final = 256 * 1024
"""This much always travels: names that have less stand together in one group."""
BESIDE: Final = "it came with what could not be put together"
"""Why something is not there that may be all right."""
ALONE: Final = 2
"""References to an object that only a dict holds: the dict's, and that of whoever asks."""
ORDERED_MIN: Final = 1024
"""Of so many names the order is worth remembering."""
ROUNDS_MAX: Final = 64
"""Functions that read functions that read functions: each step finds more names; nobody has more steps than that."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parcel:
    """One group on its way."""

    names: tuple[str, ...]
    head: bytes
    buffers: tuple[Any, ...]
    own: Tag
    """What stands under number n and is new is called this, with n in it."""
    known: dict[int, Tag]
    """What both sides have already, by its number."""
    hashes: tuple[bytes, ...] = ()
    """Of each buffer those of its chunks, so that who takes it need not read it to remember what both have."""

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def __reduce__(self) -> Any:
        """Its memory is lent out only while it is pickled; see ``unpicklable`` for what may happen else."""
        lent = tuple(map(PickleBuffer, self.buffers))
        return _parcel, (self.names, self.head, lent, self.own, self.known, self.hashes)


def _parcel(
    names: tuple[str, ...],
    head: bytes,
    buffers: tuple[Any, ...],
    own: Tag,
    known: dict[int, Tag],
    hashes: tuple[bytes, ...] = (),
) -> Parcel:
    return Parcel(names=names, head=head, buffers=buffers, own=own, known=known, hashes=hashes)


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """What must travel, and what was found on the way."""

    parcels: list[Parcel] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    """Everything the other side will have as it is here, sent now or before."""
    stays: dict[str, str] = field(default_factory=dict)
    """Names that cannot travel, and why."""
    opaque: tuple[str, ...] = ()
    """Functions among them that may read any name."""
    gone: tuple[str, ...] = ()
    """Names the other side still has and this one no longer."""
    handles: dict[str, Stays] = field(default_factory=dict)
    """Names that stand here for something that is only on the other side."""

    @property
    def nbytes(self) -> int:
        return sum(parcel.nbytes for parcel in self.parcels)


@dataclass(slots=True, kw_only=True)
class Taken:
    """What became of what arrived."""

    changed: tuple[str, ...]
    """Names whose object took over what came, or that are new."""
    rebound: tuple[str, ...]
    """Names that had another object before, which could not take over; other holders of it still have that."""
    nbytes: int
    broken: dict[str, str] = field(default_factory=dict)
    """Names whose objects could not be put together here, and why; ``BESIDE`` where that may be another's fault that
    came with it. Nothing of them was taken."""


class _Came:
    """A parcel, unpacked."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.met: dict[int, Any] = {}
        self.values: dict[str, Any] = {}
        self.broken: dict[str, str] = {}
        views = [memoryview(buffer) for buffer in parcel.buffers]
        try:
            self.values = decode(parcel.head, views, met=self.met)
        except Exception as error:  # noqa: BLE001 - whatever an object's own methods raise
            self.broken = self._broken(f"{type(error).__name__}: {error}")
        _without_scaffolding(self.met)

    def _broken(self, why: str) -> dict[str, str]:
        """All of its names are, but one was at work: the last whose turn had come."""
        begun = {value: n for n, value in self.met.items() if type(value) is str and value in self.parcel.names}
        culprit = max(begun, key=lambda name: begun[name], default="")
        return {name: why if name == culprit else BESIDE for name in self.parcel.names if not name.startswith(LOST)}


def _without_scaffolding(met: dict[int, Any]) -> None:
    """Let go of what was made only to take the values apart or to put them together, such as the state that an object
    is given: nobody else holds it, and on the other side its number may stand for something that lives."""
    while alone := [n for n in met if sys.getrefcount(met[n]) <= ALONE]:
        for n in alone:
            del met[n]


class Space:
    """One side."""

    def __init__(self, names: dict[str, Any], side: int, finder: ChangeFinder | None = None) -> None:
        """``names`` is the namespace itself; the two sides have different numbers."""
        self.names = names
        self._identities = Identities(side, names)
        self._finder = ChangeFinder() if finder is None else finder
        self._agreed: dict[tuple[str, ...], bytes] = {}
        """Groups, and the digest of the head each had when the sides agreed; its memory the finder remembers."""
        self._group_of: dict[str, tuple[str, ...]] = {}
        """The group in which each name was agreed on last."""
        self._shared = Shared()
        """Names that the other side has."""
        self._order = Order()

    def visible(self) -> set[str]:
        """The names that are the notebook's own."""
        return visible(self.names)

    def named(self, names: Iterable[str]) -> set[str]:
        """What of these a cell that names them means: names of the notebook's own, and results the shell keeps."""
        return visible_among(self.names, names) | self.results(names)

    def results(self, names: Iterable[str]) -> set[str]:
        """Of these those under which the shell keeps what cells gave and were: they travel if they are named."""
        return results(self.names, names)

    def outgoing(
        self,
        wanted: Iterable[str],
        *,
        must: bool = False,
        lost_of: Iterable[str] = (),
        new: Iterable[str] = (),
        room: int | None = None,
        stuck: Mapping[str, str] = NO_WHYS,
    ) -> Outgoing:
        """What of these names, and of what functions among them read, differs from what the other side has.

        ``must``: what cannot travel is raised (``Unpicklable``), not noted. ``lost_of``: objects that came for these
        names and that nothing holds any more go as well, if they were changed before they were let go of: on the other
        side somebody else may hold them. ``new``: names that were bound anew, and go even if they stand for what was
        agreed on before: the other side may have bound them otherwise since. ``room``: bytes; what has more stays,
        unless the other side has it already, and so does what is ``stuck``, which stayed before, and why.
        """
        found = Outgoing()
        names = self._without_handles(wanted, found)
        rules = HomeRules()
        groups: list[Group] = []
        for _ in range(ROUNDS_MAX):
            rules = HomeRules()
            groups = self._encoded(names, rules, found, must=must)
            more = self._without_handles(rules.needs - HIDDEN, found)
            more -= names | found.stays.keys()
            if not more:
                break
            names |= more
        lost = self._lost(groups, lost_of)
        if lost:
            groups = self._encoded(names, rules, found, must=must, beside=lost)
        if room is not None:
            groups = [group for group in groups if self._has_room(group, room, stuck, found)]
        found.names = frozenset(names - found.stays.keys() if found.stays else names)
        found.opaque = tuple(sorted(rules.opaque))
        found.gone = self._shared.gone(self.names)
        bound = frozenset(new)
        looked = [(group, *self._looked(group)) for group in groups]
        changed = [one for one in looked if not one[1] or not bound.isdisjoint(one[0].names)]
        found.parcels = self._parcels([(group.remembering(rules), hashes) for group, _, hashes in changed])
        return found

    def sent(self, what: Outgoing) -> None:
        """The other side has it now."""
        self._shared.add(what.names)
        self._shared.remove(what.gone)

    def take(self, parcels: Iterable[Parcel], gone: Iterable[str] = ()) -> Taken:
        """Merge what arrived."""
        changed: list[str] = []
        rebound: list[str] = []
        nbytes = 0
        crossed = []
        broken: dict[str, str] = {}
        for parcel in parcels:
            came = _Came(parcel)
            if came.broken:
                broken |= came.broken
                continue
            here, names = self._merge(came)
            crossed.append((parcel, here))
            rebound += names
            changed += [name for name in parcel.names if not name.startswith(LOST)]
            nbytes += parcel.nbytes
        for parcel, here in crossed:
            self._identities.note(parcel.names, parcel.own, here, parcel.known)
        for name in gone:
            self.names.pop(name, None)
        self._shared.remove(gone)
        self._identities.gone(gone)
        self._shared.add(changed)
        self._agree(changed, {one.names: one for one, _ in crossed})
        return Taken(changed=tuple(changed), rebound=tuple(sorted(set(rebound))), nbytes=nbytes, broken=broken)

    def _merge(self, came: _Came) -> tuple[dict[int, Any], list[str]]:
        """What stands here for each object of the parcel, and the names that had to be bound anew."""
        known, met = came.parcel.known, came.met
        originals = {id(met[n]): self._identities.find(tag) for n, tag in known.items() if n in met}
        merged, chosen = merge(came.values, originals, met.values())
        rebound = []
        for key, old in originals.items():
            if old is not None and chosen.get(key, old) is not old:
                rebound += self._rebind(old, chosen[key])
        self.names.update({name: value for name, value in merged.items() if not name.startswith(LOST)})
        return {n: chosen.get(id(value), value) for n, value in met.items()}, rebound

    def _agree(self, names: Iterable[str], came: Mapping[tuple[str, ...], Parcel]) -> None:
        """Both sides have the same of these now: remember how it is encoded here."""
        rules = HomeRules()
        known = {name for name in names if name in self.names}
        for group in self._encoded(known, rules, Outgoing(), must=False):
            parcel = came.get(group.names)
            if parcel is None or parcel.head != group.encoded.head or len(parcel.hashes) != len(parcel.buffers):
                self._looked(group)
                continue
            self._remember(group.names, _digest(group))
            for buffer, hashes in zip(group.encoded.buffers, parcel.hashes, strict=True):
                self._finder.believe(buffer, hashes)

    def disagree(self, names: Iterable[str]) -> None:
        """The other side may have changed these and not said so: they are sent again when they are wanted."""
        doubtful = set(names)
        self._agreed = {group: one for group, one in self._agreed.items() if doubtful.isdisjoint(group)}

    def unchanged(self, groups: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
        """Of these groups those that the other side has; they may have changed since."""
        return {group for group in groups if self._shared.has_all(group)}

    def forget(self) -> None:
        """The other side has nothing any more."""
        self._agreed.clear()
        self._group_of.clear()
        self._shared.clear()
        self._finder.forget()
        self._identities.forget()

    def crossed_with(self, values: Mapping[int, Any]) -> tuple[str, ...]:
        """Names that the other side has and that hold some of these objects."""
        return self._identities.names_of(values)

    def _without_handles(self, names: Iterable[str], found: Outgoing) -> set[str]:
        """Names that are here, without those that stand for what is only there; and what functions in that read."""
        left = set(filter(self.names.__contains__, names))
        while any_handles() and Stays in set(map(type, map(self.names.__getitem__, left))):  # so without a loop
            fresh = {n for n in left if type(self.names[n]) is Stays}
            handles = {name: self.names[name] for name in fresh}
            left -= fresh
            found.handles |= handles
            needs = {need for handle in handles.values() for need in handle.needs}
            left |= {name for name in needs if name in self.names and name not in found.handles}
        return left

    def _has_room(self, group: Group, room: int, stuck: Mapping[str, str], found: Outgoing) -> bool:
        nbytes = group.encoded.nbytes
        stayed = [stuck[name] for name in group.names if name in stuck]
        if nbytes <= SMALL_BYTES or (not stayed and (nbytes <= room or self._shared.has_any(group.names))):
            return True
        names = [name for name in group.names if not name.startswith(LOST)]
        why = stayed[0] if stayed else f"{format_size(nbytes)}, more than {format_size(room)}"
        found.stays |= dict.fromkeys(names, why)
        return False

    def _lost(self, groups: Iterable[Group], names: Iterable[str]) -> dict[str, Any]:
        came = self._identities.came_for(names)
        if not came:
            return {}
        met = {id(value) for group in groups for value in (group.plain or group.encoded.met or {}).values()}
        held = {id(held) for value in came if (held := getattr(value, "__dict__", None)) is not None}
        known = met | held
        lost = [value for value in came if id(value) not in known and can_change(value)]
        found = [value for value in lost if not self._is_untouched(value)]
        if not can_travel(found, HomeRules()):  # what cannot is nobody's question any more
            found = [value for value in found if can_travel(value, HomeRules())]
        return {LOST: found} if found else {}  # one by one each would have to say again what they share

    def _is_untouched(self, value: Any) -> bool:
        """Of an array or a tensor: its memory is all there is to it, and costs too much to send for nothing."""
        if not is_memory(value) or (is_array(value) and value.dtype.hasobject):
            return False
        changed = [self._finder.changed(buffer) for buffer in encode(value, gpu="copy").buffers]
        return not any(changed)

    def _encoded(
        self, names: set[str], rules: HomeRules, found: Outgoing, *, must: bool, beside: Mapping[str, Any] = NOTHING
    ) -> list[Group]:
        left = names - found.stays.keys() if found.stays else names
        few = len(left) < ORDERED_MIN
        here: dict[str, Any] = {name: self.names[name] for name in left} if few else self.names.copy()
        line = list(here) if few else list(filter(left.__contains__, here))
        here |= beside
        line += beside
        while True:
            try:
                groups = encode_roots(here, names=line, rules=rules, order=None if few else self._order)
                for group in groups:
                    if isinstance(group.encoded.met, dict) and group.plain is None:
                        _without_scaffolding(group.encoded.met)
                return groups
            except Unpicklable as error:
                name, error = _blamed(error, {name: here[name] for name in line})
                if must and name != LOST:
                    raise error from None
                if name != LOST:
                    found.stays[name] = error.what or error.message
                line.remove(name)

    def _looked(self, group: Group) -> tuple[bool, tuple[bytes, ...]]:
        """Whether it is as it was, and the hashes of its buffers; from here on it counts as agreed."""
        digest = _digest(group)
        same = self._agreed.get(group.names) == digest
        looked = [self._finder.compared(buffer) for buffer in group.encoded.buffers]
        self._remember(group.names, digest)
        return same and not any(changed for changed, _ in looked), tuple(hashes for _, hashes in looked)

    def _remember(self, names: tuple[str, ...], digest: bytes) -> None:
        """A name was in another group before, perhaps: what was agreed on then is over."""
        for name in () if names in self._agreed else names:
            before = self._group_of.get(name)
            if before != names:
                self._agreed.pop(before or (), None)
                self._group_of[name] = names
        self._agreed[names] = digest

    def _rebind(self, old: Any, new: Any) -> list[str]:
        """An object that could not take over: every name that had it has now what came."""
        names = [name for name, value in self.names.items() if value is old]
        self.names.update(dict.fromkeys(names, new))
        return names

    def _parcels(self, groups: list[tuple[Group, tuple[bytes, ...]]]) -> list[Parcel]:
        """What is known is looked up for all of them before any of them counts as having crossed."""
        found = []
        for group, hashes in groups:
            encoded: Encoded = group.encoded
            known = self._identities.known(encoded.met or {})
            own = self._identities.next()
            found.append(
                Parcel(
                    names=group.names,
                    head=encoded.head,
                    buffers=encoded.views,
                    own=own,
                    known=known,
                    hashes=hashes,
                )
            )
        for (group, _), parcel in zip(groups, found, strict=True):
            self._identities.note(parcel.names, parcel.own, group.encoded.met or {}, parcel.known)
        return found


def _digest(group: Group) -> bytes:
    return chunk_hash(group.encoded.head)


def _blamed(error: Unpicklable, roots: Mapping[str, object]) -> tuple[str, Unpicklable]:
    """The name at the head of the path; where the error has none, the first that cannot travel by itself."""
    path = error.path or ""
    called = {name: repr(name)[1:-1] if name == LOST else name for name in roots}
    fitting = [n for n, said in called.items() if path == said or path.startswith((said + ".", said + "[", said + "("))]
    if fitting:
        return max(fitting, key=len), error
    for name, value in roots.items():
        if what := _blamed_alone({name: value}):
            return name, Unpicklable(f"this cannot be sent: {name}: {what}", path=name, what=what)
    raise error


def _blamed_alone(root: Mapping[str, object]) -> str:
    try:
        encode_roots(root, rules=HomeRules())
    except Unpicklable as error:
        return error.what or error.message
    return ""
