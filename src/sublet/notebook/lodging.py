"""Shared memory, made by the notebook, in which its large arrays live on the device.

The notebook's side fills a file of lasting memory (``wire.persistent_memory``) with an array and lends it; on the
device the array *is* that memory. When it has changed here, it is filled into another such file, once more for both
sides at the same time: there the two change places, and the first is free for the next. When it has changed there, it
is copied from where it lies. So it costs one copy each way, in memory that has long been there.

Where the kernel tracks pages neither side keeps hashes of it: each knows what was written to on its own side. The
notebook's side can look at what the other has, so what was written to and has not changed is no news, whose ever it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import field
from pickle import PickleBuffer
from typing import Any, NamedTuple

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.notebook.memories import take_exchanged
from sublet.state.transfer.encoded import EncodedBuffer
from sublet.state.transfer.memory import address_of
from sublet.state.transfer.pages import process_pages
from sublet.state.transfer.shared_arrays import (
    Exchanged,
    abandon,
    adopt,
    area_at,
    is_untouched,
    separate,
)
from sublet.wire.persistent_memory import Lasting

Key = tuple[tuple[str, ...], int]
"""The names of a group, and which of its buffers."""
Range = tuple[int, int]


class Lodged:
    """Stands in a parcel for a buffer that lies in such memory."""

    __slots__ = ("given", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, given: Any = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.given = given
        """The memory itself, where it is handed over."""

    def __reduce__(self) -> Any:
        return Lodged, (self.number, self.nbytes, None if self.given is None else PickleBuffer(self.given))


class Word(NamedTuple):
    """What the notebook's side has to say beside what it sends."""

    forget: tuple[int, ...] = ()
    """Files it will not speak of any more."""


class Freed(NamedTuple):
    """What the device's side has to say."""

    free: tuple[int, ...] = ()
    """Files in which nothing lies; each is told as long as that is so."""
    spoilt: tuple[int, ...] = ()
    """Files that are not there any more and must not be used again, told once."""


class Watch:
    """What was written to some memory since it was known to be what both have."""

    __slots__ = ("_doubted", "look")

    def __init__(self) -> None:
        self.look = 0
        """The kernel's answers from this look on are what is not known yet; 0: nothing is."""
        self._doubted = 0

    def written(self, address: int, length: int, *, shared: bool = False) -> list[Range] | None:
        """Where it may differ from what both have; None: anywhere. The next question is about what is written from
        here on, so if it does differ, that is to be said (``doubt``)."""
        since, self.look, self._doubted = self.look, 0, 0
        self.look, ranges = _written_since(shared)(address, length, since)
        if not since or ranges is None:
            return None
        clipped = [(max(low, address), min(high, address + length)) for low, high in ranges]
        return [(low, high) for low, high in clipped if low < high]

    def begin(self, address: int, length: int, *, shared: bool = False) -> None:
        """It is what both have now."""
        self.look, _ = _written_since(shared)(address, length, 0)

    def doubt(self) -> None:
        """It differs: until both have the same again (``believe``), what was written since is not all there is."""
        self._doubted, self.look = self.look, 0

    def believe(self) -> None:
        """Both have what it was at the last look."""
        self.look, self._doubted = self._doubted, 0

    def restart(self) -> None:
        """Nothing is known of it."""
        self.look = self._doubted = 0


def _written_since(shared: bool) -> Callable[[int, int, int], tuple[int, list[Range] | None]]:
    return process_pages().shared_written_since if shared else process_pages().written_since


@dataclass(slots=True, eq=False)
class _Home:
    area: Lasting
    watch: Watch = field(default_factory=Watch)

    @property
    def is_held(self) -> bool:
        return sys.getrefcount(self.area) > 2


class PoolUser:
    """The device's side of the memory pool; and any side to which nothing is lent."""

    def __init__(self) -> None:
        self._homes: list[_Home] = []

    def watches(self, key: Key, buffer: EncodedBuffer) -> bool:
        """Whether the content that both sides agreed on need not be remembered."""
        return self._home(buffer) is not None and process_pages().usable()

    def can_wait(self, key: Key, buffer: EncodedBuffer) -> bool:
        """What changed is told at once, or not at all."""
        return False

    def is_same(self, key: Key, lodged: Lodged, buffer: EncodedBuffer) -> bool:
        """It is for the other side to find out."""
        return False

    def changed(self, key: Key, buffer: EncodedBuffer) -> bool | None:
        """Whether it may have changed; None: it does not lie in such memory, or not any more."""
        home = self._home(buffer)
        if home is None:
            return None
        if home.area.parted:
            return True if is_untouched(home.area) else None
        written = home.watch.written(buffer.address, buffer.length, shared=True)
        return written != [] if home.watch.look else None

    def place(self, key: Key, buffer: EncodedBuffer) -> Lodged | None:
        home = self._home(buffer)
        if home is None or (home.area.parted and not is_untouched(home.area)):
            return None
        return Lodged(home.area.file.number, buffer.length)

    def sent(self) -> None:
        """Nothing is to be remembered."""

    def undo(self) -> None:
        """Nothing is to be remembered."""

    def view(self, lodged: Lodged) -> memoryview:
        """The memory that what came shall live in."""
        for home in self._homes:
            if home.area.file.number == lodged.number and len(home.area) == lodged.nbytes and not home.is_held:
                return memoryview(home.area)
        raise InvalidRequest("an array came in memory that is not there, or not free")

    def add_file(self, lodged: Lodged) -> None:
        """Memory in which something is going to come."""
        given: Any = memoryview(lodged.given).obj
        home = _Home(Lasting.of(given.file.fd, lodged.nbytes))
        home.area.file.number = lodged.number
        adopt(home.area)
        home.area.populate()
        if all(len(one.area) != lodged.nbytes for one in self._homes):  # else something is going to change places
            home.watch.begin(address_of(memoryview(home.area)), lodged.nbytes, shared=True)
        self._homes.append(home)

    def lent(self) -> list[Lodged]:
        """Nothing is lent from here."""
        return []

    def reclaim(self) -> None:
        """Arrays that took over what came have changed places with it; what is left over is made free."""
        for one in take_exchanged():
            self._finish(one)

    def _finish(self, one: Exchanged) -> None:
        home = next((home for home in self._homes if home.area is one.source), None)
        for other in self._homes:
            if other.area is one.target:
                other.watch.begin(address_of(memoryview(other.area)), len(other.area), shared=True)
        if home is None:
            one.finish()
            return
        home.watch.restart()
        if sys.getrefcount(one.source) > 3:  # one of the exchange, one of its home, one of this call
            separate(home.area)
            home.area = Lasting.on(one.file)
            adopt(home.area)
        else:
            one.finish()

    def confirm(self, key: Key, lodged: Lodged, buffer: EncodedBuffer) -> bool:
        return self.watches(key, buffer)

    def idle(self, lodged: Lodged) -> None:
        """Nothing is to be remembered."""

    def forget_key(self, key: Key) -> None:
        """Nothing is to be remembered."""

    def free(self, freed: Freed) -> None:
        """Nothing was lent from here."""

    def trim(self) -> None:
        """There is nothing to let go of."""

    def take_freed(self) -> Freed:
        """What is not used any more."""
        unused = [home for home in self._homes if not home.is_held]
        spoilt = [home for home in unused if home.area.file.is_spoilt]
        self._homes = [home for home in self._homes if home not in spoilt]
        return Freed(
            tuple(home.area.file.number for home in unused if home not in spoilt),
            tuple(home.area.file.number for home in spoilt),
        )

    def on_pool_message(self, word: Word) -> None:
        forgotten: Collection[int] = set(word.forget)
        for home in self._homes:
            number = home.area.file.number
            if number in forgotten:
                abandon(home.area)
        self._homes = [home for home in self._homes if home.area.file.number not in forgotten]

    def pool_message(self) -> Word:
        return Word()

    def forget(self) -> None:
        """The other side has nothing any more; what lies here stays."""

    def _home(self, buffer: EncodedBuffer) -> _Home | None:
        area = area_at(buffer.address, buffer.length)
        return next((home for home in self._homes if home.area is area), None) if area is not None else None
