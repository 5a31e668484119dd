"""Writes results into the objects they came from, so that other references see the change.

A cell on a device works on copies. The two sides keep count of which copy is whose (``spaces``), so when they come back
it is known of each object whether it *is* one of the notebook's, changed or not, or is new. One that is takes over what
its copy says, as far as its type and shape allow; where they do not, the copy takes its place, and the caller rebinds
every name that had it, and says so. What is new is never written into anything: ``a = []`` leaves alone the list that
``a`` was.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sublet.durable.rebuild import ClassState
from sublet.notebook.identity import Identities
from sublet.notebook.memories import (
    Window,
    is_given_memory,
    is_memory,
    is_tensor,
    overlapping,
    view_of,
    windows_of,
)
from sublet.notebook.operations import AttributeWrite, FigureContents, Operation, apply
from sublet.notebook.parcels import LOST, ReceivedParcel
from sublet.notebook.untouchable import Untouchable
from sublet.notebook.updater_choice import (
    CLASS,
    can_become,
    can_change,
    can_take_over,
    can_wait,
    is_as_it_was,
    ordinary_way,
    updater_for,
)
from sublet.notebook.updaters import ATOMS, Way
from sublet.state.transfer.figures import Assembly
from sublet.state.transfer.reducers import EncodingRules

__all__ = ["ATOMS", "can_change", "merge"]

DEPTH_MAX: Final = 150
"""Tuples within tuples deeper than this are not looked into, and taken as they came. Objects that can change are looked
at one after the other, so a chain of these may have any length."""

UNKNOWN: Final[Any] = object()
NO_CLASSES: Final[Mapping[type, ClassState]] = types.MappingProxyType({})


def merge(
    news: Mapping[str, Any],
    originals: Mapping[int, Any],
    met: Iterable[Any] = (),
    classes: Mapping[type, ClassState] = NO_CLASSES,
    figures: Assembly | None = None,
    settled: frozenset[int] = frozenset(),
) -> tuple[dict[str, Any], dict[int, Any], set[int]]:
    """What each name stands for from now on, what each new object stands for (by its id), and ids of objects that were
    here and are others now.

    ``originals``: by the id of an object that came, the one here whose copy it is; ``met``: all objects that came;
    ``classes``: what came for classes that are here; ``figures``: those that came; ``settled``: ids of
    objects here that are newer than their copies: they stand for them, and are not written to. First everything is
    planned, then checked, then written. An error (``Unpicklable``) leaves every object as it was.
    """
    untouchable = Untouchable()
    refused: frozenset[int] = frozenset()
    views: dict[int, Any] = {}
    came = frozenset(map(id, met))
    while True:
        plan = _Plan(originals, refused, views, came, classes, untouchable, settled)
        plan.choose_all((*news.values(), *classes, *(() if figures is None else figures.beside)))
        crossed, within = plan.overlaps()
        if crossed <= refused and within.keys() == views.keys():
            break
        refused |= crossed
        views = {key: view_of(*both) for key, both in within.items() if not crossed}
    if figures is not None and figures.beside:
        plan.write(FigureContents(figures), is_fresh=False)
    written = plan.apply()
    return {name: plan.stands_for(new) for name, new in news.items()}, plan.chosen, written


class _Plan:
    """What the notebook takes over, and how, of values that came together."""

    def __init__(
        self,
        originals: Mapping[int, Any],
        refused: frozenset[int],
        views: Mapping[int, Any],
        came: frozenset[int],
        classes: Mapping[type, ClassState],
        untouchable: Untouchable,
        settled: frozenset[int],
    ) -> None:
        """``refused``: ids of new objects that must be taken as they are; ``views``: what stands for new arrays that
        look at the memory of others."""
        self.chosen: dict[int, Any] = {}
        """By the id of the new object: what stands for it from now on."""
        self._originals = originals
        self._original_ids = {id(old) for old in originals.values()}
        self._refused = refused
        self._views = views
        self._came = came
        self._taken: set[int] = set()
        """Ids of originals that stand for something already: each can stand for one object only."""
        self._classes = classes
        self._untouchable = untouchable
        self._settled = settled
        self._operations: list[Operation] = []
        self._waiting: list[tuple[Way, Any, Any]] = []
        """Objects whose parts are still to be looked at: the way, what stands for the object, and the object."""
        self._windows: list[Window] = []
        self._keep: list[Any] = []
        self._ordinary: dict[type, Way | None] = {}
        self._rules = EncodingRules(gpu="refuse")
        """Those found for classes. While it is chosen what stands for what, no code of the program runs."""
        self._depth = 0

    def choose_all(self, news: Iterable[Any]) -> None:
        """Choose what stands for these and for everything that they hold."""
        for new in news:
            self.choose(new)
            while self._waiting:
                way, target, one = self._waiting.pop()
                way(self, target, one)

    def choose(self, new: Any) -> Any:
        """What is to stand for an object that came."""
        kind = type(new)
        if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, new))):
            return new
        key = id(new)
        if key in self.chosen:
            return self.chosen[key]
        if key in self._original_ids and not isinstance(new, type):  # it is one of ours, not a copy
            return new
        ordinary = self._ordinary.get(kind, UNKNOWN)
        if ordinary is UNKNOWN:
            ordinary = self._ordinary[kind] = ordinary_way(kind)
            if kind.__module__ == "__main__":  # came with its first instance, if it is new here
                self.choose(kind)
        if ordinary is not None:
            return self._choose_ordinary(ordinary, new, key)
        if self._untouchable.has(new) or (id(new) in self._originals and self._untouchable.has(self.original(new))):
            return new  # nor is looked into what a copy of such a thing holds
        if self._settled and (old := self.original(new)) is not None and id(old) in self._settled:
            self._keep.append(new)
            self.chosen[id(new)] = old
            if is_memory(new) and type(old) is type(new):
                self._windows += windows_of(old, new, is_fresh=False)
            return old
        self._keep.append(new)
        target = self._target(new)
        if target is new and (old := self.original(new)) is not None and is_as_it_was(old, new, self._rules):
            self.chosen[id(new)] = old
            return old
        self.chosen[id(new)] = target
        self._taken.add(id(target))
        if is_memory(new):
            is_fresh = target is new or id(new) in self._views or (is_tensor(new) and is_given_memory(target, new))
            self._windows += windows_of(target, new, is_fresh=is_fresh)
        way = None if id(new) in self._views else updater_for(new)
        if way is None:
            return target
        if can_wait(new):
            self._waiting.append((way, target, new))
        elif self._depth < DEPTH_MAX:
            self._depth += 1
            self.chosen[id(new)] = target = way(self, target, new)
            self._depth -= 1
            self._keep.append(target)
        return target

    def _choose_ordinary(self, way: Way, new: Any, key: int) -> Any:
        """The same, for objects of a kind whose instances are all alike, of which there may be very many."""
        old = self._originals.get(key)
        if self._untouchable.has(new) or (old is not None and self._untouchable.has(old)):
            return new
        self._keep.append(new)
        if old is not None and id(old) in self._settled:
            self.chosen[key] = old
            return old
        is_taken = old is None or id(old) in self._taken or key in self._refused or not can_become(old, type(new))
        target = new if is_taken else old
        if type(target) is not type(new):
            self.write(AttributeWrite(target, CLASS, type(new)), is_fresh=False)
        self.chosen[key] = target
        self._taken.add(id(target))
        self._waiting.append((way, target, new))
        return target

    def original(self, new: Any) -> Any:
        """The object here whose copy it is, or None."""
        return self._originals.get(id(new))

    def stands_for(self, new: Any) -> Any:
        """What was chosen."""
        return new if type(new) in ATOMS else self.chosen.get(id(new), new)

    def travels(self, value: Any) -> bool:
        """Whether it came as an object, not only as memory of another one."""
        return id(value) in self._came

    def claim(self, new: Any, target: Any) -> None:
        """The target stands for this part of an object that came, and for nothing else."""
        self.chosen.setdefault(id(new), target)
        self._taken.add(id(target))
        self._keep += (new, target)

    def class_state(self, kind: type) -> ClassState | None:
        """What came for a class that is here."""
        return self._classes.get(kind)

    def write(self, operation: Operation, *, is_fresh: bool) -> None:
        """Queue a write for ``apply``."""
        operation.is_fresh = is_fresh
        self._operations.append(operation)

    def overlaps(self) -> tuple[frozenset[int], dict[int, tuple[Any, Any, Any]]]:
        """Of arrays that overlap: those that must be taken as they are, and those that are views.

        Two that came with originals must overlap there just as they do here; else, written one after the other, they
        would not say what came. One that is new and lies within one that has an original is a view of that: by its
        key, the original, the copy, and itself.
        """
        crossed: set[int] = set()
        within: dict[int, tuple[Any, Any, Any]] = {}
        for one, other in overlapping(self._windows, lambda window: window.new):
            if one.is_fresh and other.is_fresh:
                continue
            if one.is_fresh or other.is_fresh:
                whole, part = (other, one) if one.is_fresh else (one, other)
                if whole.new[0] <= part.new[0] and part.new[1] <= whole.new[1]:
                    within[part.key] = (whole.target, whole.came, part.came)
                else:
                    crossed.add(whole.key)
            elif other.old[0] - one.old[0] != other.new[0] - one.new[0]:
                crossed |= {one.key, other.key}
        for one, other in overlapping(self._windows, lambda window: window.old):
            if not (one.is_fresh or other.is_fresh) and other.old[0] - one.old[0] != other.new[0] - one.new[0]:
                crossed |= {one.key, other.key}
        return frozenset(crossed), within

    def apply(self) -> set[int]:
        """Carry out all queued writes; ids of objects that were here and are others now."""
        return apply(self._operations, self._untouchable, self.stands_for)

    def _target(self, new: Any) -> Any:
        """The original, if it can take over; else what came."""
        if id(new) in self._views:
            return self._views[id(new)]
        old = self._originals.get(id(new))
        # ``_taken`` is redundant within one transfer, which names each original once. It stays because two objects that
        # became one would be a wrong result that goes unnoticed.
        if old is None or type(old) is not type(new) or id(old) in self._taken or id(new) in self._refused:
            return new
        return old if can_take_over(self, old, new) else new


# --------------------------------------------------------------------------------------------------------------- taking
#
# Writes received contents into existing objects.


def taken_over(
    names: dict[str, Any], identities: Identities, came: ReceivedParcel, settled: frozenset[int] = frozenset()
) -> tuple[dict[int, Any], list[str], set[int]]:
    """What stands here for each object of the parcel, the names that had to be bound anew, and ids of objects that are
    others now. ``settled``: ids of objects here that are newer than what came for them."""
    known, met = came.parcel.known, came.met
    originals = {id(met[n]): identities.find(tag) for n, tag in known.items() if n in met}
    if not came.classes and not any(old is not None for old in originals.values()):  # all is new: nothing to write into
        came.figures.finish()
        names.update({name: value for name, value in came.values.items() if not name.startswith(LOST)})
        return met | came.figures.met, [], set()
    lost_last = sorted(came.values, key=lambda name: name.startswith(LOST))  # what has a name says what it holds
    news = {name: came.values[name] for name in lost_last}
    merged, chosen, written = merge(news, originals, met.values(), came.classes, came.figures, settled)
    rebound = []
    for key, old in originals.items():
        if old is not None and chosen.get(key, old) is not old:
            rebound += _rebound(names, old, chosen[key])
    names.update({name: value for name, value in merged.items() if not name.startswith(LOST)})
    return {n: chosen.get(id(value), value) for n, value in met.items()} | came.figures.met, rebound, written


def _rebound(names: dict[str, Any], old: Any, new: Any) -> list[str]:
    """An object that could not take over: every name that had it has now what came."""
    found = [name for name, value in names.items() if value is old]
    names.update(dict.fromkeys(found, new))
    return found
