"""Splits named values as far as the objects that they share allow.

Saving every name by itself would lose that two of them hold the same list; saving all of them together would make one
change rewrite everything and one restore read everything. So names are encoded in bundles, by runs of the sorted names;
then it is looked whether any two bundles met the same object or the same memory. Only where they did, or where a bundle
came out large, its names are looked at one by one: those that share go together, large ones go alone.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import gc
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.records import leaf_starts
from sublet.state.transfer.codec import Encoding
from sublet.state.transfer.encoded import Encoded
from sublet.state.transfer.memory import address_of
from sublet.state.transfer.names import MAINS, found_by_name
from sublet.state.transfer.reducers import OWNERS, EncodingRules, GpuRule

LARGE_BYTES: Final = 256 * 1024
"""A name with more than this is encoded by itself."""
KEPT_BYTES: Final = 64 << 20
"""Of pickles that ``Encodings`` keep. The memory of arrays is not copied, and does not count."""
NOTHING: Final[Mapping[int, Any]] = types.MappingProxyType({})
SCALARS: Final = frozenset((str, bytes, int, float, bool, type(None)))
CHANGING: Final = frozenset((dict, list, set))
TEXTS: Final = frozenset((str, bytes))
LONG_KINDS: Final = CHANGING | {tuple, frozenset}
LONG: Final = 10_000
"""Items of a container. One with fewer is pickled in a moment."""


class StandsFor:
    """Base of what is pickled in the place of something that each side has, and has no identity of its own."""


PLAIN: Final = SCALARS | CHANGING | {tuple, frozenset}
IDENTITY_FREE: Final = (
    *(str, bytes, int, float, complex, tuple, frozenset, range, slice, type, type(None), type(...)),
    *(types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.GenericAlias, types.UnionType),
    *(enum.Enum, dt.date, dt.time, dt.timedelta, dt.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, pathlib.PurePath, re.Pattern, StandsFor),
)
"""Types that cannot change; whether two names hold one of these or two equal ones, no program should ask. (What a tuple
holds is looked at by itself.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectGroup:
    """Names that are saved and restored together. The value behind ``encoded`` is a dict of them."""

    names: tuple[str, ...]
    encoded: Encoded
    plain: Mapping[str, object] | None = None
    """The values themselves, if they are nothing but numbers, texts, and plain containers of these."""
    is_still: bool = False
    """The caller knew it as unchanged, and it was not encoded: ``encoded`` says what it met and no more."""
    is_joined: bool = False
    """Its names were found to share objects or memory; else they stand together because each is small."""

    def remembering(self, rules: EncodingRules) -> ObjectGroup:
        """The same, with ``encoded.met`` if the rules remember. Where all is plain that is left out at first, since
        most groups are unchanged and need none."""
        if self.plain is None or not rules.remembers or self.encoded.met is not None:
            return self
        return replace(self, encoded=replace(self.encoded, met=met_by_name(self.plain)))


def met_by_name(values: Mapping[str, object]) -> dict[int, Any]:
    """Objects of flat values that can change, numbered by their names' positions, from 1.

    Nothing within a flat value has an identity, so a set of a million strings is one object. An object with two names
    has the number of the first."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for n, value in enumerate(values.values(), 1):
        if type(value) in CHANGING and id(value) not in seen:
            seen.add(id(value))
            found[n] = value
    return found


class Order:
    """Names and the bundles they stand in, remembered from one time to the next: mostly they are the same, and to sort
    10,000 takes as long as to encode some of them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._runs: list[tuple[str, ...]] = []

    def runs(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """The bundles of these, in the order of names."""
        found = list(names)
        if found != self._names:
            self._runs = list(_runs(sorted(found)))
            self._names = found
        return self._runs


class Still:
    """Values that the caller knows as unchanged, in the place of their bundle."""

    plain = False
    is_large = False
    spans: Sequence[tuple[int, int, bool]] = ()

    def __init__(self, names: tuple[str, ...], met: Mapping[int, Any]) -> None:
        """``met``: by id, the objects in them that another bundle could have met as well. They have no memory that
        arrays look at."""
        self.names = names
        self.met = self.ids = met
        self.count = len(met)

    def group(self) -> ObjectGroup:
        encoded = Encoded(head=b"", buffers=(), met=self.met)
        return ObjectGroup(names=self.names, encoded=encoded, is_still=True)


def encode_roots(
    roots: Mapping[str, object],
    *,
    names: Iterable[str] | None = None,
    gpu: GpuRule = "copy",
    rules: EncodingRules | None = None,
    order: Order | None = None,
    still: Collection[Still] = (),
    together: Iterable[tuple[str, ...]] = (),
    stays: Callable[[ObjectGroup], bool] = lambda _: True,
    before: Callable[[tuple[str, ...]], object] | None = None,
    apart: Collection[str] = (),
    alone: Collection[str] = (),
    kept: Encodings | None = None,
) -> list[ObjectGroup]:
    """Every root in exactly one group, in the order of names; objects and memory are shared within groups only.

    ``names``: of these roots alone, each once; ``rules``: others than the usual ones; ``order``: of the last time, for
    the caller that asks again and again; ``still``: values that are not encoded unless one of the others shares
    something with them (they share nothing with one another); ``together``: groups of an earlier time, each encoded at
    once, since to find groups takes up to three encodings; ``stays``: whether such a group of several names is to stay
    one; ``before``: called with names before they are encoded together; ``apart``: names that are in groups without
    others, unless they share something with them; ``alone``: names that are looked at one by one at once; ``kept``:
    encodings of earlier calls, since which no value has changed, which are used again.
    Raises ``Unpicklable`` with the root's name at the head of the path.
    """
    rules = EncodingRules(gpu=gpu) if rules is None else rules
    runs = (Order() if order is None else order).runs(roots if names is None else names)
    bundles: list[_Bundle | Still] = list(still)
    known = list(together)
    placed = {name for one in still for name in one.names}.union(*known)
    if placed:
        runs = [left for names in runs if (left := tuple(name for name in names if name not in placed))]
    encoder = _Encoder(roots, rules, before, kept)
    bundles += map(encoder.bundle, known)
    first = len(still)
    parted = {n for n, one in enumerate(bundles[first:], first) if len(one.names) > 1 and not stays(one.group())}
    first = len(bundles)
    if apart:
        halves = [([n for n in names if n in apart], [n for n in names if n not in apart]) for names in runs]
        runs = [tuple(part) for both in halves for part in both if part]
    if alone:
        singles = [name for names in runs for name in names if name in alone]
        runs = [left for names in runs if (left := tuple(name for name in names if name not in alone))]
        runs += [(name,) for name in singles]
    bundles += map(encoder.bundle, runs)
    parted |= {n for n, one in enumerate(bundles[first:], first) if len(one.names) > 1 and one.is_large}
    doubtful = {n for pair in _links(bundles) for n in pair} | parted
    groups = [one.group() for n, one in enumerate(bundles) if n not in doubtful]
    if doubtful:
        groups += _one_by_one([bundles[n] for n in sorted(doubtful)], encoder)
    encoder.finish()
    return sorted(groups, key=lambda group: group.names[0])


class Encodings:
    """Encodings of bundles, for as long as no value changes: to find out which names share something, and which other
    names their functions read, the same bundles are asked for again and again."""

    def __init__(self) -> None:
        self._by_names: dict[tuple[str, ...], _Bundle] = {}
        self._nbytes = 0
        self.fresh: list[ObjectGroup] = []
        """What the last call has added."""

    def find(self, names: tuple[str, ...], roots: Mapping[str, object]) -> _Bundle | None:
        """The encoding of these names, if they stand for the same objects as then."""
        found = self._by_names.get(names)
        return found if found is not None and all(roots[name] is one for name, one in found.value.items()) else None

    def add(self, bundles: Iterable[_Bundle]) -> None:
        """What they met is no longer needed to tell them from one another."""
        self.fresh = []
        for one in bundles:
            self.fresh.append(one.group())
            if self._nbytes + one.head_bytes <= KEPT_BYTES:
                self._nbytes += one.head_bytes
                one.release()
                self._by_names[one.names] = one


class _Encoder:
    """Encodes bundles of some roots, each once."""

    def __init__(
        self,
        roots: Mapping[str, object],
        rules: EncodingRules,
        before: Callable[[tuple[str, ...]], object] | None,
        kept: Encodings | None,
    ) -> None:
        self._roots, self._rules, self._before, self._kept = roots, rules, before, kept
        self._unused = rules.part()
        self._made: dict[tuple[str, ...], _Bundle] = {}

    def bundle(self, names: tuple[str, ...]) -> _Bundle:
        """The names' values, encoded by rules that were not used before. Unused ones are as new."""
        found = self._made.get(names)
        if found is None and self._kept is not None:
            found = self._kept.find(names, self._roots)
        if found is not None:
            self._rules.note(found.rules)
            return found
        if self._before is not None:
            self._before(names)
        found = self._made[names] = _Bundle(names, self._roots, self._unused)
        if self._unused.has_met_objects:
            self._rules.note(self._unused)
            self._unused = self._rules.part()
        return found

    def finish(self) -> None:
        """Hand on what was encoded."""
        if self._kept is not None:
            self._kept.add(self._made.values())


def _runs(names: Sequence[str]) -> Iterable[tuple[str, ...]]:
    starts = leaf_starts(names)
    if starts[:1] != [0] and names:
        starts.insert(0, 0)
    for start, end in zip(starts, [*starts[1:], len(names)], strict=True):
        yield tuple(names[start:end])


class _Bundle:
    """Some roots, encoded together by rules that were not used before, and everything that was met on the way."""

    def __init__(self, names: tuple[str, ...], roots: Mapping[str, object], rules: EncodingRules) -> None:
        self.names = names
        self.rules = rules
        # A name may stand in a value as well, as an attribute, say: then it is one string in each encoding, or in none.
        self.value = {sys.intern(name) if type(name) is str else name: roots[name] for name in names}
        self._group: ObjectGroup | None = None
        is_flat = len(names) == 1 and _has_each_once(roots[names[0]])
        self._encoding: Encoding | None = (encoding := Encoding(rules, is_flat=is_flat))
        pickler = encoding.dump(self.value, roots=True, remember=False)
        rules.forget_parts()
        values = self.value.values()
        kinds = set(map(type, values))
        self.plain = is_flat or (not rules.has_met_objects and kinds <= PLAIN and _are_flat(values, encoding))
        self.is_large = encoding.nbytes > LARGE_BYTES
        self.head_bytes = sum(map(len, encoding.parts))
        self._met: Mapping[int, Any] | None = NOTHING
        self._spans: list[tuple[int, int, bool]] | None = None
        self._own: Collection[object] = values
        """Of plain values, those that another name could have as well."""
        if not self.plain:
            self._met = {id(value): value for value in encoding.remember(pickler).values()}
            return
        # Nothing but they themselves can be shared, and asking the pickler costs much.
        if not kinds <= CHANGING:
            self._own = [value for value in values if type(value) in CHANGING]

    @property
    def met(self) -> Mapping[int, Any]:
        """Id → object, of those that another bundle could have met as well. It holds them, so that no id is given out
        twice."""
        if self._met is None:
            self._met = {id(value): value for value in (self.group().encoded.met or {}).values()}
        return self._met

    @property
    def ids(self) -> Iterable[int]:
        return map(id, self._own) if self.plain else self.met

    @property
    def count(self) -> int:
        return len(self._own) if self.plain else len(self.met)

    @property
    def spans(self) -> list[tuple[int, int, bool]]:
        """The memory that is looked at, from one address to another, and whether it may be written to."""
        if self._encoding is None:
            return self._spans or []
        seen = self._encoding.seen
        found = [(one.address, one.end, not one.is_column) for one in seen if one.length and not one.private]
        if self.plain:
            return found
        if set(OWNERS).isdisjoint(map(type, self.met.values())):
            return found
        for value in self.met.values():
            if type(value) in OWNERS and (view := memoryview(value)).nbytes:
                start = address_of(view)
                found.append((start, start + view.nbytes, True))
        return found

    def group(self) -> ObjectGroup:
        if self._group is None:
            assert self._encoding is not None
            encoded = self._encoding.finished(self.value)
            self._group = ObjectGroup(names=self.names, encoded=encoded, plain=self.value if self.plain else None)
        return self._group

    def release(self) -> None:
        """Let go of what was made for the encoding. What its group holds stays: who drops something from that must be
        the only one that holds it."""
        self.group()
        self._spans = self.spans
        self._encoding = None
        if not self.plain:
            self._met = None


def _links(bundles: Sequence[_Bundle | Still]) -> list[tuple[int, int]]:
    links: list[tuple[int, int]] = []
    if len(bundles) < 2:
        return links
    if len(set().union(*(bundle.ids for bundle in bundles))) < sum(bundle.count for bundle in bundles):
        links += _met_twice(bundles)
    spans = sorted((start, end, n, writes) for n, bundle in enumerate(bundles) for start, end, writes in bundle.spans)
    for region in _regions(spans):
        first, *others = sorted({n for _, _, n, _ in region})
        if others and any(writes for *_, writes in region):
            links += [(first, other) for other in others]
    return links


def _regions(spans: Iterable[tuple[int, int, int, bool]]) -> Iterator[list[tuple[int, int, int, bool]]]:
    """Those that overlap, together."""
    region: list[tuple[int, int, int, bool]] = []
    reach = -1
    for span in spans:
        if span[0] >= reach and region:
            yield region
            region = []
        region.append(span)
        reach = max(reach, span[1])
    if region:
        yield region


def _met_twice(bundles: Sequence[_Bundle | Still]) -> Iterator[tuple[int, int]]:
    first: dict[int, int] = {}
    everything: set[int] = set()
    for n, bundle in enumerate(bundles):
        for which in everything.intersection(bundle.ids):
            if bundle.plain or has_identity(bundle.met[which]):
                if which not in first:
                    first[which] = next(m for m in range(n) if which in bundles[m].ids)
                yield first[which], n
        everything.update(bundle.ids)


def is_long(value: Any) -> bool:
    """Whether it is a plain container of so many items that it pays to look at it before it is pickled."""
    return type(value) in LONG_KINDS and len(value) >= LONG


def _has_each_once(value: Any) -> bool:
    """Whether it is a long container of numbers and texts with no text twice. Numbers are written out each time."""
    if not is_long(value):
        return False
    kinds = set(map(type, value))
    if not SCALARS.issuperset(kinds) or kinds.isdisjoint(TEXTS):
        return False
    if type(value) is dict:
        return TEXTS.isdisjoint(kinds := set(map(type, value.values()))) and SCALARS.issuperset(kinds)
    return type(value) in (set, frozenset) or len(set(map(id, value))) == len(value)


def _are_flat(values: Iterable[Any], encoding: Encoding) -> bool:
    """Whether plain containers hold nothing but numbers and texts; of what the pickler took apart without a rule.
    Asked of 10,000 small objects at once, so without a loop. Most need not even be opened: the garbage collector does
    not track a dict in which is nothing that could hold anything, and of that only byte arrays are not asked about."""
    doubtful = values if encoding.may_hold_byte_arrays() else filter(gc.is_tracked, values)
    return SCALARS.issuperset(map(type, gc.get_referents(*doubtful)))


def is_identity_free(value: object) -> bool:
    """Whether it is of a type that cannot change. Of a program's own class of such a type its attributes can."""
    if not isinstance(value, IDENTITY_FREE):
        return False
    kind = type(value)
    is_own = kind.__dictoffset__ != 0 and kind.__module__ in MAINS
    return not is_own or isinstance(value, enum.Enum | type | StandsFor)


def has_identity(value: object) -> bool:
    """Whether it matters whether two names hold this or an equal one."""
    if is_identity_free(value):
        return False
    kind = type(value)
    if kind is types.FunctionType or kind.__name__ == "cython_function_or_method":
        return not found_by_name(value)
    pandas = sys.modules.get("pandas.core.dtypes.base")
    if pandas is not None and isinstance(value, pandas.ExtensionDtype):
        return False
    return kind.__module__ not in ("numpy.dtypes", "torch")  # numpy's dtypes; dtypes, sizes and devices of PyTorch


def _one_by_one(bundles: Sequence[_Bundle | Still], encoder: _Encoder) -> list[ObjectGroup]:
    """Components of names that share, large names, and what is left of each bundle."""
    single: list[_Bundle] = []
    for bundle in bundles:
        if isinstance(bundle, _Bundle) and len(bundle.names) == 1:
            single.append(bundle)
        else:
            single += [encoder.bundle((name,)) for name in bundle.names]
    parent = list(range(len(single)))

    def top(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for a, b in _links(single):
        parent[top(a)] = top(b)
    components: dict[int, list[int]] = {}
    for n in range(len(single)):
        components.setdefault(top(n), []).append(n)
    alone = {n: members for members in components.values() if len(members) > 1 for n in members}
    groups = [
        replace(encoder.bundle(tuple(sorted(single[n].names[0] for n in members))).group(), is_joined=True)
        for members in components.values()
        if len(members) > 1
    ]
    at = 0
    for bundle in bundles:
        rest = []
        for n in range(at, at + len(bundle.names)):
            if n in alone:
                continue
            if single[n].is_large:
                groups.append(single[n].group())
            else:
                rest.append(single[n].names[0])
        at += len(bundle.names)
        if rest:
            groups.append(encoder.bundle(tuple(rest)).group())
    return groups
