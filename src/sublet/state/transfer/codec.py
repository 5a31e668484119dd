"""Encodes a Python value as a head and buffers, with pickle 5 and without copying its memory.

``encode`` copies no array, tensor or long ``bytes``; it hands out views of them. What overlaps in memory is one buffer,
whichever objects and libraries look at it, so aliases and views are aliases and views again after ``loading.decode``.
Only an object that plain pickle has no form for (a function of ``__main__``, a lambda, a local class) is handed to
cloudpickle, alone. What cannot travel is named with the path to it (``unpicklable``).

Several values that may share objects are encoded together, as a dict of them; or by ``encode_roots``, which finds out
which of them do and keeps the others apart.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.state.transfer.encoded import (
    NO_BUFFER,
    BufferKind,
    BufferShape,
    BufferWindow,
    Encoded,
    EncodedBuffer,
    Head,
    Splice,
    bare_head,
)
from sublet.state.transfer.figures import numbered
from sublet.state.transfer.memory import address_of, lending, memory_at, raw_view
from sublet.state.transfer.pickle_errors import named
from sublet.state.transfer.reducers import OWNERS, EncodingRules, FlatRoot, GpuRule, owner_of

PROTOCOL: Final = 5
SMALL_BYTES: Final = 16 * 1024
"""Memory below this is copied into one buffer with all other such memory: a buffer of its own would cost more."""
SPLICE_BYTES: Final = 256 * 1024
"""A ``bytes`` from this length on is not copied into the head. Larger than any frame that pickle writes."""
NOT_HUGE: Final = bytes(4)
"""The upper half of the length of anything in a pickle that is not written as the very object."""
ATOMS: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
)
"""Types whose values are compared by what they say: which object says it makes no difference."""
ALIGN: Final = 64
"""What vector units like, for every piece of memory in the small buffer."""


def encode(value: object, *, gpu: GpuRule = "copy", rules: EncodingRules | None = None) -> Encoded:
    """Take a value apart. Its memory is looked at and not copied; that of other devices is, or refused.
    ``rules``: others than the usual, and new ones.

    Raises ``Unpicklable``, naming the first object that cannot travel and the path to it.
    """
    encoding = Encoding(EncodingRules(gpu=gpu) if rules is None else rules)
    encoding.dump(value)
    return encoding.finished(value)


def can_travel(value: object, rules: EncodingRules) -> bool:
    """Whether ``encode`` would do it; without finding out why not, which is much faster."""
    encoding = Encoding(rules)
    try:
        encoding.run(value)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever an object's own method raised
        return False
    return True


def with_identity(met: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """Of numbered objects those whose identity can matter: neither atoms nor tuples of nothing but atoms."""
    found = {n: value for n, value in met if type(value) not in ATOMS}
    tuples = [n for n, value in found.items() if type(value) is tuple]
    for n in tuples:
        if ATOMS.issuperset(map(type, found[n])):
            del found[n]
    return found


@dataclass(slots=True, eq=False)
class SeenWindow:
    """One window, in the order of the pickle."""

    address: int
    length: int
    view: memoryview
    private: bool
    is_column: bool = False
    """Arrow memory that a pandas column sees, and never writes to."""
    buffer: int = NO_BUFFER
    offset: int = 0

    @property
    def end(self) -> int:
        return self.address + self.length


class Encoding:
    """One run of the pickler, and what it left: parts of the pickle, and windows on memory."""

    def __init__(self, rules: EncodingRules, *, is_flat: bool = False) -> None:
        """``is_flat``: of the value it is known that it is plain containers of texts and numbers, each of them once."""
        self.rules = rules
        self._is_flat = is_flat
        self.parts: list[bytes | bytearray] = []
        self.seen: list[SeenWindow] = []
        self.met: dict[int, Any] | None = None
        self.owners: dict[int, Any] = {}
        """Byte arrays whose memory something looks at; whether they travel as well is seen at the end."""
        self.made: tuple[object, ...] = ()
        """Objects that are there for the pickle's sake."""

    def dump(self, value: object, *, roots: bool = False, remember: bool = True) -> Any:
        """Run the pickler; what it has met, by id, is in its ``memo``. ``remember``: if the rules do."""
        try:
            pickler = self.run(value)
        except MemoryError:
            raise
        except Exception as error:
            raise named(value, error, self.rules, roots=roots) from error
        if self.owners:
            met = {id(one) for _, one in pickler.memo.copy().values() if type(one) in OWNERS}
            self.owners = {key: one for key, one in self.owners.items() if key in met}
        if remember and self.rules.remembers:
            self.remember(pickler)
        return pickler

    def run(self, value: object) -> Any:
        """Run the pickler; errors come out as they are."""
        with lending():
            return self._run(value)

    def _run(self, value: object) -> Any:
        """The same, with errors as they come. A chain of objects that is too long for pickle, which calls itself for
        each of them, is taken apart one object after the other."""
        pickler = Pickler(self, PROTOCOL, buffer_callback=self.take)
        pickler.reducer_override = self.rules.reduce
        pickler.fast = self._is_flat  # without a table of what it has met, which takes most of the time here
        try:
            pickler.dump(value)
        except RecursionError:
            if self.rules.units:  # figures are taken apart by their own classes
                raise
            self.parts.clear()
            self.seen.clear()
            self.owners.clear()
            chain = self.rules.flatten()
            pickler = Pickler(self, PROTOCOL, buffer_callback=self.take)
            pickler.reducer_override = self.rules.reduce
            try:
                pickler.dump(root := FlatRoot(value, chain))
            finally:
                self.rules.chain = None
            self.made = root, value
        return pickler

    def remember(self, pickler: Any) -> dict[int, Any]:
        """What the pickler has met whose identity can matter, by number; kept if the rules want that."""
        found = with_identity(pickler.memo.copy().values())
        if made := {*self.rules.temporary, *map(id, self.made)}:
            found = {n: value for n, value in found.items() if id(value) not in made}
        if self.rules.remembers:
            self.met = found | dict(numbered(self.rules.units)) if self.rules.units else found
        return found

    def may_hold_byte_arrays(self) -> bool:
        """Whether something in the pickle looks as one does there: its code, and a length in eight bytes."""
        for part in self.parts:
            if isinstance(part, bytearray):
                return True
            at = part.find(pickle.BYTEARRAY8)
            while at >= 0:
                if part[at + 5 : at + 9] == NOT_HUGE:
                    return True
                at = part.find(pickle.BYTEARRAY8, at + 1)
        return False

    @property
    def nbytes(self) -> int:
        found = sum(map(len, self.parts))
        return found + sum(one.length for one in self.seen) if self.seen else found

    def write(self, part: bytes | bytearray) -> None:
        """Called by the pickler, with frames of up to 128 KiB, and with anything long as the very object."""
        self.parts.append(part)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        """Called by the pickler for memory: it stays out of the pickle."""
        view = raw_view(buffer)
        owner = owner_of(view)
        if type(owner) in OWNERS:
            self.owners[id(owner)] = owner
        address = address_of(view)
        is_column = address in self.rules.columns and type(view.obj).__module__ == "pyarrow.lib"
        self.seen.append(SeenWindow(address, view.nbytes, view, id(buffer) in self.rules.private, is_column))

    def wasteful(self) -> frozenset[int]:
        """Arrays whose window is mostly gaps, and shared with nothing."""
        if not self.rules.sparse:
            return frozenset()
        found = []
        for region in regions(self.seen):
            spans = {self.seen[n].address for n in region}
            sparse = [self.rules.sparse[address] for address in spans & self.rules.sparse.keys()]
            length = max(self.seen[n].end for n in region) - min(spans)
            if len(sparse) == len(region) and sum(nbytes for _, nbytes in sparse) * 2 <= length:
                found += [which for which, _ in sparse]
        return frozenset(found)

    def finished(self, value: object) -> Encoded:
        """The outcome; after a second run where the first took far more memory along than the value sees, or took for
        memory of its own what is that of a byte array."""
        compact = self.wasteful()
        if not compact and not self.owners:
            return self.finish()
        rules = self.rules.anew(compact)
        rules.owned = frozenset(self.owners)
        again = Encoding(rules)
        again.dump(value)
        return again.finish()

    def finish(self) -> Encoded:
        if not self.seen and max(map(len, self.parts), default=0) < SPLICE_BYTES:  # most values by far
            return Encoded(head=bare_head(self.parts), buffers=(), met=self.met)
        buffers = self._layout()
        stream, splices = [], []
        position = 0
        for part in self.parts:
            if len(part) < SPLICE_BYTES:
                stream.append(part)
                position += len(part)
                continue
            splices.append(Splice(position, len(buffers)))
            view = memoryview(part)
            kind = BufferKind.BYTES if isinstance(part, bytes) else BufferKind.BYTEARRAY
            buffers.append(EncodedBuffer(view=view, address=address_of(view), kind=kind, writable=not view.readonly))
        head = Head(
            windows=[BufferWindow(one.buffer, one.offset, one.length) for one in self.seen],
            splices=splices,
            buffers=[BufferShape(one.length, one.kind, one.writable) for one in buffers],
            stream=b"".join(stream),
        )
        return Encoded(head=head.dump(), buffers=tuple(buffers), met=self.met)

    def _layout(self) -> list[EncodedBuffer]:
        """Give every window its buffer: a region of its own, or a place in the one for small ones."""
        buffers: list[EncodedBuffer] = []
        small: list[list[int]] = []
        for region in regions(self.seen):
            start = min(self.seen[n].address for n in region)
            length = max(self.seen[n].end for n in region) - start
            if length < SMALL_BYTES:
                small.append(region)
                continue
            for n in region:
                self.seen[n].buffer, self.seen[n].offset = len(buffers), self.seen[n].address - start
            buffers.append(self._whole(region, start, length))
        if small:
            buffers.append(self._gather(small, len(buffers)))
        return buffers

    def _whole(self, region: list[int], start: int, length: int) -> EncodedBuffer:
        windows = [self.seen[n] for n in region]
        view = next((one.view for one in windows if one.address == start and one.length == length), None)
        owner = [one.view for one in windows] + self.rules.keep
        return EncodedBuffer(
            view=memory_at(start, length).toreadonly() if view is None else view,
            address=start,
            kind=kind_of(windows[0].view),
            writable=any(not one.view.readonly for one in windows),
            owner=owner,
        )

    def _gather(self, regions: list[list[int]], number: int) -> EncodedBuffer:
        memory = bytearray()
        writable = False
        for region in regions:
            start = min(self.seen[n].address for n in region)
            memory += bytes(-len(memory) % ALIGN)
            at = len(memory)
            for n in region:
                one = self.seen[n]
                one.buffer, one.offset = number, at + one.address - start
                if one.offset + one.length > len(memory):
                    memory += one.view[len(memory) - one.offset :]
                writable |= not one.view.readonly
        view = memoryview(memory)
        return EncodedBuffer(
            view=view, address=address_of(view), kind=BufferKind.SMALL, writable=writable, owner=memory
        )


class Pickler(pickle.Pickler):
    """C's pickler; a subclass, so that it has room for the rules."""

    reducer_override: Any


def regions(seen: list[SeenWindow]) -> list[list[int]]:
    """Windows that overlap, together, by their numbers; each region in the order of addresses, the regions in the
    order in which the pickle first meets them. Private windows and those without bytes stay alone or out."""
    found: list[list[int]] = [[n] for n, one in enumerate(seen) if one.private and one.length]
    end = -1
    for n in sorted((n for n, one in enumerate(seen) if not one.private and one.length), key=lambda n: seen[n].address):
        if seen[n].address < end:
            found[-1].append(n)
            end = max(end, seen[n].end)
        else:
            found.append([n])
            end = seen[n].end
    return sorted(found, key=min)


def kind_of(view: memoryview) -> BufferKind:
    owner: object = view.obj
    room = str(type(owner).__module__).partition(".")[0]
    if isinstance(owner, bytes):
        return BufferKind.BYTES
    if isinstance(owner, bytearray):
        return BufferKind.BYTEARRAY
    return {"numpy": BufferKind.NUMPY, "pyarrow": BufferKind.ARROW, "ctypes": BufferKind.TORCH}.get(
        room, BufferKind.OTHER
    )
