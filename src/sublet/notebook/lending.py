"""The notebook's side of shared memory for large arrays (``lodging``): fills, compares and reuses it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import field
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.notebook.lodging import Freed, Key, Lodged, Range, Watch, Word
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import address_of, copy_bytes
from sublet.state.transfer.pages import process_pages
from sublet.state.transfer.sealed import is_sealed
from sublet.state.transfer.shared_arrays import is_same, separate
from sublet.values import MIB
from sublet.wire.persistent_memory import Lasting

LODGED_MIN: Final = 16 * MIB
"""Smaller arrays go as any other: they are copied in no time."""
SPARE_SHARE: Final = 4
"""Free files take at most one part in so many of the memory that is available to any process."""
SPARE_FOR_S: Final = 60.0
"""A free file that was not used for so long is let go of with the next cell; all are when the lease ends."""
KINDS: Final = (BufferKind.NUMPY, BufferKind.TORCH)


@dataclass(slots=True, eq=False)
class _File:
    area: Lasting
    is_known: bool = False
    """The other side has it open."""
    is_lent: bool = False
    key: Key | None = None
    """Whose array lies in it there."""
    address: int = 0
    """Where that lies here."""
    watch: Watch = field(default_factory=Watch)
    used_s: float = 0.0

    @property
    def number(self) -> int:
        return self.area.file.number

    @property
    def is_held(self) -> bool:
        return sys.getrefcount(self.area) > 2


class PoolOwner:
    """The notebook's side of the memory pool."""

    def __init__(self, spare_max: int | None = None) -> None:
        """``spare_max``: bytes of free files; None: what there is room for."""
        self._spare_max = spare_max
        self._files: dict[int, _File] = {}
        self._at: dict[Key, _File] = {}
        self._flight: list[tuple[Key, _File, int, Watch]] = []
        self._landed: list[_File] = []
        """What the last message brought."""
        self._refused: dict[Key, int] = {}
        """Arrays, by where they lie here, that lie there where they cannot be taken away from."""
        self._viewed: list[_File] = []
        self._last = 0
        self._forget: list[int] = []
        self._idle: list[int] = []

    def takes(self, key: Key, buffer: EncodedBuffer) -> bool:
        """Whether it is of the kind that is lodged."""
        if self._refused.get(key) == buffer.address:
            return False
        fits = buffer.length >= LODGED_MIN and buffer.writable and buffer.kind in KINDS
        return fits and not is_sealed(buffer.address)

    def watches(self, key: Key, buffer: EncodedBuffer) -> bool:
        """Whether the content that both sides agreed on need not be remembered."""
        return self.takes(key, buffer) and process_pages().usable()

    def can_wait(self, key: Key, buffer: EncodedBuffer) -> bool:
        """Whether the kernel is going to say whether it changed."""
        file = self._at.get(key)
        known = file is not None and bool(file.watch.look) and file.address == buffer.address
        return known and file is not None and len(file.area) == buffer.length and self.takes(key, buffer)

    def changed(self, key: Key, buffer: EncodedBuffer) -> bool | None:
        """Whether it was written to here, and differs from what lies on the other side; None: it does not lie there in
        such memory, or it is unknown what was written to."""
        file = self._at.get(key)
        if file is None or len(file.area) != buffer.length or not self.takes(key, buffer):
            return None
        watch = file.watch
        if file.address != buffer.address:
            watch.restart()
            file.address = buffer.address
        try:
            is_changed = self._differs(file, buffer)
        except BaseException:  # what was found out is lost
            watch.restart()
            raise
        if is_changed:
            watch.doubt()
        return is_changed

    def _differs(self, file: _File, buffer: EncodedBuffer) -> bool | None:
        address = buffer.address
        parts = file.watch.written(address, buffer.length)
        if not file.watch.look:
            return None
        whole = [(address, address + buffer.length)]
        return not _are_same(whole if parts is None else parts, address_of(memoryview(file.area)) - address)

    def is_same(self, key: Key, lodged: Lodged, buffer: EncodedBuffer) -> bool:
        """Whether what lies there is what is here."""
        remote_address = address_of(self.view(lodged))
        return lodged.nbytes == buffer.length and is_same(buffer.address, remote_address, buffer.length)

    def place(self, key: Key, buffer: EncodedBuffer) -> Lodged | None:
        """Fill it into a file. It counts as the other side's when it was ``sent``. None: it goes another way."""
        old = self._at.get(key)
        if not self.takes(key, buffer):
            return None
        watch = Watch() if old is None else old.watch
        if old is None:
            watch.begin(buffer.address, buffer.length)
            if not watch.look and process_pages().usable():  # memory that others may write to
                self._refused[key] = buffer.address
                return None
            watch.doubt()
        spares = [one for one in self._files.values() if not one.is_lent and len(one.area) == buffer.length]
        content = buffer.view.cast("B")
        if spares:
            file = spares[0]
            file.is_lent = True
            self._flight.append((key, file, buffer.address, watch))
            file.area.populate()
            copy_bytes(memoryview(file.area), content)
        else:
            self._last += 1
            file = self._files[self._last] = _File(Lasting.filled(content), is_lent=True)
            file.area.file.number = self._last
            self._flight.append((key, file, buffer.address, watch))
        return Lodged(file.number, buffer.length)

    def lent(self) -> list[Lodged]:
        """What the other side must be given before it is told what lies there."""
        files = [file for _, file, _, _ in self._flight if not file.is_known]
        return [Lodged(one.number, len(one.area), Lasting.on(one.area.file)) for one in files]

    def sent(self) -> None:
        """What was lodged is what the other side has now."""
        for key, file, address, watch in self._flight:
            self._associate(key, file, address)
            file.is_known, file.watch = True, watch
            watch.believe()
        self._landed = [file for _, file, _, _ in self._flight]
        self._flight.clear()
        self._forget.clear()
        self._idle.clear()

    def undo(self) -> None:
        """Drop the files that were sent last: it is unknown whether the other side has them."""
        for _, file, _, _ in self._flight:
            self._drop(file)
        self._flight.clear()

    def view(self, lodged: Lodged) -> memoryview:
        """What lies there: the other side's array itself, so not to be written to, and to be let go of soon."""
        file = self._files.get(lodged.number)
        if file is None or not file.is_lent or len(file.area) != lodged.nbytes:
            raise InvalidRequest("an array came in memory that was not lent for it")
        self._viewed.append(file)
        file.area.populate()
        return memoryview(file.area)

    def reclaim(self) -> None:
        """What was viewed is the other side's alone again. A view that is still held here keeps memory of its own."""
        viewed, self._viewed = self._viewed, []
        for file in viewed:
            if file.is_held:
                kept, area = file.area.file, file.area
                file.area = Lasting.on(kept)
                separate(area)

    def confirm(self, key: Key, lodged: Lodged, buffer: EncodedBuffer) -> bool:
        """What lies there and this are the same now."""
        file = self._files[lodged.number]
        if self._at.get(key) is not file or file.address != buffer.address or file.number not in self._idle:
            file.watch = Watch()
            file.watch.begin(buffer.address, buffer.length)
        self._associate(key, file, buffer.address)
        return bool(file.watch.look)

    def idle(self, lodged: Lodged) -> None:
        """It might have changed there, and has not."""
        self._idle.append(lodged.number)

    def forget_key(self, key: Key) -> None:
        """It went, or came, another way."""
        file = self._at.pop(key, None)
        if file is not None:
            file.key = None

    def free(self, freed: Freed) -> None:
        """The other side uses these no more: they are free again, or dropped if spoilt."""
        flying = [file for _, file, _, _ in self._flight]
        for file in [self._files[number] for number in freed.spoilt if number in self._files]:
            self._drop(file)
        news = [self._files[number] for number in freed.free if number in self._files]
        news = [file for file in news if file.is_lent and file not in flying]
        for file in news:
            if file.key is not None:
                del self._at[file.key]
                if file in self._landed:  # it was copied into something else
                    self._refused[file.key] = file.address
            file.is_lent, file.key, file.used_s = False, None, time.monotonic()
        self._landed.clear()
        if news:
            self.trim()

    def take_freed(self) -> Freed:
        """Nothing was lent to it."""
        return Freed()

    def pool_message(self) -> Word:
        return Word(tuple(self._forget))

    def forget(self) -> None:
        """The other side is gone."""
        kept: Any
        for kept in (self._files, self._at, self._flight, self._landed, self._refused, self._viewed):
            kept.clear()
        for kept in (self._forget, self._idle):
            kept.clear()

    def _associate(self, key: Key, file: _File, address: int) -> None:
        self.forget_key(key)
        if file.key is not None:
            self._at.pop(file.key, None)
        self._at[key] = file
        file.key, file.address = key, address

    def trim(self) -> None:
        """Let go of free files that are too many, or too old: when there are new ones, and after each cell."""
        spares = sorted((one for one in self._files.values() if not one.is_lent), key=lambda one: one.used_s)
        if not spares:
            return
        most = _available() // SPARE_SHARE if self._spare_max is None else self._spare_max
        before_s = time.monotonic() - SPARE_FOR_S
        while spares and (spares[0].used_s < before_s or sum(len(one.area) for one in spares) > most):
            self._drop(spares.pop(0))

    def _drop(self, file: _File) -> None:
        del self._files[file.number]
        if file.key is not None:
            self._at.pop(file.key, None)
        self._forget.append(file.number)


def _are_same(parts: Iterable[Range], beyond: int) -> bool:
    return all(is_same(low, low + beyond, high - low) for low, high in parts)


def _available() -> int:
    """Bytes that could be had without taking any from another process."""
    with open("/proc/meminfo", "rb") as file:
        text = file.read()
    at = text.index(b"MemAvailable:")
    return int(text[at + 13 : text.index(b"kB", at)]) * 1024
