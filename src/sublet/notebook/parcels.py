"""Encodes what crosses between the two namespaces, and decodes it with a result for each name."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from dataclasses import field
from typing import Any, Final

from sublet.durable.rebuild import ClassState, leaving_classes
from sublet.lazy_dataclass import dataclass
from sublet.notebook.environment import Changes
from sublet.notebook.identity import Tag
from sublet.notebook.lodging import Freed, Lodged, Word
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.sources import CellSource
from sublet.state.checkpoints.object_groups import ObjectGroup, met_by_name
from sublet.state.transfer.codec import with_identity
from sublet.state.transfer.loading import assembly_here, decode
from sublet.state.transfer.memory import lend

NO_WORD: Final = Word()
NOTHING_FREED: Final = Freed()
LOST: Final = "\0"
"""Begins what stands in a parcel in place of a name, for an object that has none any more."""
BESIDE: Final = "it came with what could not be put together"
"""Why something is not there that may be all right."""
ALONE: Final = 2
"""References to an object that only a dict holds: the dict's, and the caller's."""


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
    """Of each buffer those of its chunks, so that the receiver need not read it to remember what both have."""
    is_plain: bool = False
    """The values are flat, so objects are numbered by their names (``met_by_name``), not by the pickle."""
    is_joined: bool = False
    """Its names share objects or memory."""

    @property
    def nbytes(self) -> int:
        lodged = sum(one.nbytes for one in self.buffers if isinstance(one, Lodged))
        return len(self.head) + lodged + sum(memoryview(one).nbytes for one in self.buffers if type(one) is not Lodged)

    def __reduce__(self) -> Any:
        """Its memory is lent out only while it is pickled; see ``unpicklable`` for what may happen else."""
        lent = tuple(one if isinstance(one, Lodged) else lend(one) for one in self.buffers)
        kinds = self.is_plain, self.is_joined
        return _parcel, (self.names, self.head, lent, self.own, self.known, self.hashes, *kinds)


def _parcel(
    names: tuple[str, ...],
    head: bytes,
    buffers: tuple[Any, ...],
    own: Tag,
    known: dict[int, Tag],
    hashes: tuple[bytes, ...],
    is_plain: bool,
    is_joined: bool,
) -> Parcel:
    kinds = {"is_plain": is_plain, "is_joined": is_joined}
    return Parcel(names=names, head=head, buffers=buffers, own=own, known=known, hashes=hashes, **kinds)


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """What must travel, and what was found on the way."""

    parcels: list[Parcel] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    """Everything the other side will have as it is here, sent now or before."""
    sources: dict[str, CellSource] = field(default_factory=dict)
    """Texts of cells in which functions among them were defined."""
    flags: int = 0
    """Of the compiler, as cells have set them."""
    looked_up: frozenset[str] = frozenset()
    """Of these names those that nothing reads by name, but that stand in strings."""
    stays: dict[str, str] = field(default_factory=dict)
    """Names that cannot travel, and why."""
    unsent: dict[str, str] = field(default_factory=dict)
    """Of names that nothing reads by name those that cannot be sent, and why."""
    opaque: tuple[str, ...] = ()
    """Functions among them that may read any name."""
    gone: tuple[str, ...] = ()
    """Names the other side still has and this one no longer."""
    handles: dict[str, RemoteValue] = field(default_factory=dict)
    """Names that stand here for something that is only on the other side."""
    lent: list[Lodged] = field(default_factory=list)
    """Memory that the other side must have before it can take what lies there."""
    word: Word = NO_WORD
    """What is to be said about memory that was lent."""
    freed: Freed = NOTHING_FREED
    """Of that what is not used any more."""
    late: list[ObjectGroup] = field(default_factory=list)
    """What may have changed and is not looked at yet."""
    surroundings: Changes | None = None
    """Random states and settings that have changed."""
    added: tuple[tuple[str, str], ...] = ()
    """What the cell has added to its process beside variables: sort and name of each."""

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
    idle: frozenset[tuple[str, ...]] = frozenset()
    """Groups that might have changed and had not, so that nothing was taken."""
    freed: Freed = NOTHING_FREED
    """Memory that was lent and is not used any more."""
    problems: dict[str, str] = field(default_factory=dict)
    """Settings that could not be set there, and why."""


class ReceivedParcel:
    """A parcel, unpacked."""

    def __init__(
        self, parcel: Parcel, view: Callable[[Lodged], memoryview], find: Callable[[Tag], Any] = lambda _: None
    ) -> None:
        """``find``: the object here that both sides call so, or None."""
        self.parcel = parcel
        self.figures = assembly_here(lambda n: find(parcel.known[n]) if n in parcel.known else None)
        self.met: dict[int, Any] = {}
        self.values: dict[str, Any] = {}
        self.broken: dict[str, str] = {}
        views = [view(one) if isinstance(one, Lodged) else memoryview(one) for one in parcel.buffers]
        self.classes: dict[type, ClassState] = {}
        """What came for classes that are here."""
        if parcel.is_plain:
            self.values = decode(parcel.head, views)
            self.met = met_by_name(self.values)
            return
        met: dict[int, Any] = {}
        try:
            with leaving_classes() as self.classes:
                self.values = decode(parcel.head, views, met=met, assembly=self.figures)
        except Exception as error:  # noqa: BLE001 - whatever an object's own methods raise
            self.broken = self._broken(met, f"{type(error).__name__}: {error}")
        beside = set(map(id, self.figures.beside))  # made to put the figures together
        self.met = with_identity((n, one) for n, one in met.items() if id(one) not in beside)
        met.clear()
        drop_temporaries(self.met)

    def _broken(self, met: dict[int, Any], why: str) -> dict[str, str]:
        """All of its names are, but one was at work: the last whose turn had come."""
        begun = {value: n for n, value in met.items() if type(value) is str and value in self.parcel.names}
        culprit = max(begun, key=lambda name: begun[name], default="")
        return {name: why if name == culprit else BESIDE for name in self.parcel.names if not name.startswith(LOST)}


def drop_temporaries(met: dict[int, Any]) -> None:
    """Let go of what was made only to take the values apart or to put them together, such as the state that an object
    is given: nothing else holds it, and on the other side its number may stand for something that lives. And of the
    namespaces of functions, which never cross: each side has its own."""
    if types.FunctionType in set(map(type, met.values())):
        namespaces = {id(one.__globals__) for one in met.values() if type(one) is types.FunctionType}
        for n in [n for n, one in met.items() if id(one) in namespaces]:
            del met[n]
    alone = [n for n, count in zip(met, map(sys.getrefcount, met.values()), strict=True) if count <= ALONE]
    number = {id(one): n for n, one in met.items()} if alone else {}
    while alone:
        removed = [met.pop(n) for n in alone]
        held = dict.fromkeys(map(number.get, map(id, gc.get_referents(*removed))))  # what was with them, in its order
        del removed
        alone = [n for n in held if n is not None and sys.getrefcount(met[n]) <= ALONE]
