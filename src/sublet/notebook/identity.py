"""Maps objects of one side to those of the other.

Everything that crosses is numbered by its head, alike on both sides. So an object is called by the parcel it first
crossed in and its number there, and a side that has that parcel's objects can tell what is meant.

The objects are held here, or their ids could be given out anew. They are let go of when each name they came with has
crossed again, with whatever it had by then, or is gone.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.notebook.memories import gradient_of, is_tensor
from sublet.state.transfer.reducers import loaded

Tag = int
"""What both sides call an object: side, parcel and the object's number in it, in one number. The garbage collector
tracks no number, and a dict of 100,000 of them is pickled in a few milliseconds."""
SIDE_BITS: Final = 1
NUMBER_BITS: Final = 40


@dataclass(slots=True, eq=False)
class _Crossing:
    """One parcel, sent or taken."""

    tags: list[Tag]
    names: set[str]
    """Those whose latest crossing it is."""
    unseen: frozenset[Tag] = frozenset()
    """What no encoding meets here, although it came: what put an object together, or what a library keeps inside of
    one, such as the empty dict of a parameter's hooks, or the array below the values of a frame."""


class Identities:
    """Those of one side."""

    def __init__(self, side: int, home: object = None) -> None:
        """``home``: the namespace itself, which functions bring along and which never crosses."""
        self._side = side
        self._home = home
        self._parcels = 0
        self._objects: dict[Tag, Any] = {}
        self._tags: dict[int, Tag] = {}
        """By the id of an object that is held."""
        self._uses: Counter[Tag] = Counter()
        self._latest: dict[str, _Crossing] = {}
        self._gradients: dict[Tag, tuple[Any, int]] = {}
        """Of tensors: the gradient when they crossed, and its version then."""

    def next(self) -> Tag:
        """For a parcel that is to be sent."""
        self._parcels += 1
        return (self._parcels << SIDE_BITS | self._side) << NUMBER_BITS

    def find(self, tag: Tag) -> Any:
        """The object of this name; None if there is none any more."""
        return self._objects.get(tag)

    def known(self, met: Mapping[int, Any]) -> dict[int, Tag]:
        """Of the objects under these numbers those that the other side has as well."""
        tags, objects = self._tags, self._objects
        crossed = {n: tags[id(value)] for n, value in met.items() if id(value) in tags}
        return {n: tag for n, tag in crossed.items() if objects[tag] is met[n]}

    def came_for(self, names: Iterable[str]) -> list[Any]:
        """The objects that crossed with these names when each of them did so last, and that can be met here."""
        crossings = {id(one): one for one in map(self._latest.get, names) if one is not None}
        tags = dict.fromkeys(tag for one in crossings.values() for tag in one.tags if tag not in one.unseen)
        return [self._objects[tag] for tag in tags if tag in self._objects]

    def on_arrival(self, names: Iterable[str], ids: Set[int]) -> None:
        """These names have just arrived, and this is what an encoding of them meets here."""
        for crossing in {id(one): one for one in map(self._latest.get, names) if one is not None}.values():
            crossing.unseen = frozenset(tag for tag in crossing.tags if id(self._objects[tag]) not in ids)

    def crossed_with(self, names: Iterable[str]) -> set[str]:
        """Names whose latest crossing is that of one of these, which are among them."""
        return {other for one in map(self._latest.get, names) if one is not None for other in one.names}

    def names_of(self, met: Mapping[int, Any]) -> tuple[str, ...]:
        """Names with which some of these objects crossed when each of them did so last."""
        return tuple(sorted(self.names_with(set(self.known(met).values()))))

    def shared(self, ids: Iterable[int]) -> set[Tag]:
        """Of the objects with these ids those that crossed for more names than those of one crossing."""
        tags, uses = self._tags, self._uses
        return {tag for key in ids if (tag := tags.get(key)) is not None and uses[tag] > 1}

    def names_with(self, tags: Set[Tag]) -> set[str]:
        """Names with which some of these crossed when each of them did so last."""
        crossings = {id(one): one for one in self._latest.values()} if tags else {}
        return {name for one in crossings.values() if not tags.isdisjoint(one.tags) for name in one.names}

    def note(self, names: Iterable[str], own: Tag, met: Mapping[int, Any], known: Mapping[int, Tag]) -> None:
        """These objects have crossed, for these names."""
        crossing = _Crossing([], {name for name in names if name.isidentifier()})
        if not crossing.names:
            return  # what has no name is let go of
        objects, home = self._objects, self._home
        # The first is made for the crossing.
        new = {own + n: value for n, value in met.items() if n not in known and n and value is not home}
        objects.update(new)
        self._tags.update(zip(map(id, new.values()), new, strict=True))
        for n, tag in known.items():
            value = met.get(n, home)
            if n == 0 or value is home:
                continue
            if objects.get(tag) is not value:
                self._drop_objects((tag,))
                objects[tag] = value
                self._tags[id(value)] = tag
            crossing.tags.append(tag)
        crossing.tags += new
        self._uses.update(crossing.tags)
        torch = loaded("torch")
        if torch is not None and not {torch.Tensor, torch.nn.Parameter}.isdisjoint(map(type, met.values())):
            for tag in crossing.tags:
                if is_tensor(objects[tag]):
                    self._gradients[tag] = _gradient(objects[tag])
        for name in crossing.names:
            self._leave(name)
            self._latest[name] = crossing

    def new_gradients(self) -> list[Any]:
        """Tensors whose gradients are others than when they crossed, or have changed: ``backward`` writes to tensors
        that no cell names."""
        return [
            self._objects[tag]
            for tag, (grad, version) in self._gradients.items()
            if (now := _gradient(self._objects[tag]))[0] is not grad or now[1] != version
        ]

    def forget_names(self, names: Iterable[str]) -> None:
        """These names are no more."""
        for name in names:
            self._leave(name)

    def forget(self) -> None:
        """The other side has nothing any more."""
        for kept in (self._objects, self._tags, self._uses, self._latest, self._gradients):
            kept.clear()

    def _leave(self, name: str) -> None:
        crossing = self._latest.pop(name, None)
        if crossing is None:
            return
        crossing.names.discard(name)
        if crossing.names:
            return
        uses = self._uses
        shared = [tag for tag in crossing.tags if uses[tag] > 1]
        for tag in shared:
            uses[tag] -= 1
        kept = {tag for tag in shared if uses[tag]}
        gone = [*dict.fromkeys(tag for tag in crossing.tags if tag not in kept)] if shared else crossing.tags
        # With calls for each of them, the 27,000 objects of a figure would take half as long again.
        collections.deque(map(uses.pop, gone), 0)
        self._drop_objects(gone)

    def _drop_objects(self, tags: Collection[Tag]) -> None:
        objects, tag_of = self._objects, self._tags
        held = [tag for tag in tags if tag in objects]
        values = list(map(objects.pop, held))
        keys = [key for key, tag in zip(map(id, values), held, strict=True) if tag_of.get(key) == tag]
        collections.deque(map(tag_of.pop, keys), 0)
        if self._gradients:
            for tag in tags:
                self._gradients.pop(tag, None)


def _gradient(tensor: Any) -> tuple[Any, int]:
    grad = gradient_of(tensor)
    return grad, 0 if grad is None else grad._version
