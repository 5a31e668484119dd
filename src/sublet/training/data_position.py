"""The position of a training program in its data, and how to return to it.

What is saved is never the loader but a *position*: how many batches of this pass were taken, and a mark made of what
they were. A resumed program begins the pass as it was begun (the same random numbers), leaves out what was taken, and
compares the mark: a data set that has grown, another batch size or another order is noticed before a step is made of
it. How batches are left out depends on the loader:

==========  ======================================================================================================
by index    A `DataLoader` over a data set with indices: the sampler is asked for what was taken, and nothing is read.
by itself   A loader with ``state_dict`` and ``load_state_dict`` knows its own way back.
by place    A list, a range, an array.
again       Anything else that can be iterated over twice is read again from the beginning of the pass. So is a
            `DataLoader` with workers, whose random numbers are where they were only if the workers drew them again;
            ``deterministic=True`` says that they draw none.
==========  ======================================================================================================
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from blake3 import blake3

from sublet.errors import InvalidRequest
from sublet.training.rng_state import Apart, generators_of

Then = Callable[[], None]
_OTHER_DATA: Final = "Give it the data, batch size and order it had, or begin under another name."


class BatchSource(Protocol):
    """One loader."""

    kind: str

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, then: Then) -> Iterator[Any]:
        """The batches of a pass; with ``saved``, those that were not taken. Called where the random numbers are as they
        were at the beginning of the pass; ``then`` puts them where they were behind the last batch, and is called
        before anything is drawn for the next. Raises, at the latest with the next batch, where the data are others."""

    def state(self) -> dict[str, Any]:
        """The position behind the batch that was handed out last."""

    def generators(self) -> list[Any]:
        """Its own random numbers, which are saved with the global ones."""


def source_of(loader: Any, *, deterministic: bool) -> BatchSource:
    """How to find the way in this loader. Raises ``InvalidRequest`` for one in which there is none."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return Stateful(loader)
    if _is_data_loader(loader):
        _refuse_what_is_lost(loader, deterministic=deterministic)
        if _has_indices(loader):
            return Indexed(loader, reads_again=loader.num_workers > 0 and not deterministic)
        return Again(loader)
    if isinstance(loader, Sequence) or _is_array(loader):
        return Placed(loader)
    if not hasattr(loader, "__iter__"):
        raise InvalidRequest(f"a {type(loader).__name__} has no batches", do="Give a DataLoader, or a list of batches.")
    if hasattr(loader, "__next__"):
        raise InvalidRequest(
            f"a {type(loader).__name__} can be read only once, so a position in it cannot be found again",
            do="Give something that begins anew each time it is iterated over, or has state_dict() and "
            "load_state_dict().",
        )
    return Again(loader)


class Indexed:
    """A ``DataLoader`` over a data set with indices."""

    kind = "by index"

    def __init__(self, loader: Any, *, reads_again: bool) -> None:
        # A copy, made once: the loader is the program's, and workers that stay belong to one object.
        self._loader = copy.copy(loader)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._samplers = [one for one in (loader.sampler, loader.batch_sampler) if hasattr(one, "set_epoch")]
        self._watched = _Watched(getattr(loader, name))
        self._loader.__dict__[name] = self._watched  # past DataLoader's own check that it is not exchanged
        self._generators = generators_of(loader)
        self._reads_again = reads_again
        self._taken = 0
        self._mark = b""

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, then: Then) -> Iterator[Any]:
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
        self._taken, self._mark = 0, b""
        if self._loader.__dict__.get("_iterator") is not None:
            # Workers that stayed: for new ones the loader would draw a number here, and it will after a resume.
            self._draw()
        if saved is None:
            self._watched.begin()
            return self._rest(iter(self._loader))
        taken, mark = int(saved["taken"]), bytes(saved["mark"])
        if not self._reads_again:
            self._taken, self._mark = taken, mark
            self._watched.begin(taken, mark, then)
            return self._rest(iter(self._loader))
        self._watched.begin()
        batches = iter(self._loader)
        for _ in itertools.islice(batches, taken):
            self._take()
        _same(taken, mark, self._taken, self._mark)
        then()
        return self._rest(batches)

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._take()
            yield batch

    def _take(self) -> None:
        self._taken += 1
        self._mark = self._watched.marks.popleft()

    def _draw(self) -> None:
        import torch

        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken, "mark": self._mark}

    def generators(self) -> list[Any]:
        return self._generators


class _Watched:
    """A sampler that notes what it names, and does not name again what was taken."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.marks: deque[bytes] = deque()
        """Behind each batch that was named and not yet taken: a hash of all that were, in their order."""
        self._skip = 0
        self._expected = b""
        self._then: Then = _nothing

    def begin(self, skip: int = 0, expected: bytes = b"", then: Then | None = None) -> None:
        self.marks.clear()
        self._skip, self._expected, self._then = skip, expected, then or _nothing

    def __iter__(self) -> Iterator[Any]:
        mark, number = b"", 0
        batches, skip, then = iter(self.sampler), self._skip, self._then
        for indices in itertools.islice(batches, skip):
            mark = blake3(mark + glimpse(indices)).digest()
            number += 1
        if skip:
            _same(skip, self._expected, number, mark)
        then()
        for indices in batches:
            mark = blake3(mark + glimpse(indices)).digest()
            self.marks.append(mark)
            yield indices

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)  # batch_size and the like, which some loaders look at


class Stateful:
    """A loader that knows where it stands."""

    kind = "by itself"

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, then: Then) -> Iterator[Any]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        if saved is not None:
            self._loader.load_state_dict(saved["loader"])
        batches: Iterator[Any] = iter(self._loader)
        then()
        return batches

    def state(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict()}

    def generators(self) -> list[Any]:
        return generators_of(self._loader)


class Placed:
    """A list, a range, an array: what has a number can be found by it."""

    kind = "by place"

    def __init__(self, items: Any) -> None:
        self._items = items
        self._taken = 0

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, then: Then) -> Iterator[Any]:
        self._taken = 0 if saved is None else int(saved["taken"])
        if saved is not None and (length := len(self._items)) != saved["length"]:
            raise _other_data(f"there were {saved['length']} batches, and there are {length} now")
        then()
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self._taken < len(self._items):
            self._taken += 1
            yield self._items[self._taken - 1]

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken, "length": len(self._items)}

    def generators(self) -> list[Any]:
        return []


class Again:
    """What can only be read from its beginning. It draws its random numbers apart from the program's, so that reading
    it again gives the same."""

    kind = "again"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._taken = 0
        self._mark = b""

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, then: Then) -> Iterator[Any]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        self._taken, self._mark = 0, b""
        batches = self._read(Apart())
        if saved is not None:
            for _ in itertools.islice(batches, saved["taken"]):
                pass
            _same(saved["taken"], saved["mark"], self._taken, self._mark)
        then()
        return batches

    def _read(self, apart: Apart) -> Iterator[Any]:
        with apart:
            batches = iter(self._loader)
        while True:
            with apart:
                batch = next(batches, _NOTHING)
            if batch is _NOTHING:
                return
            self._taken += 1
            self._mark = blake3(self._mark + glimpse(batch)).digest()
            yield batch

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken, "mark": self._mark}

    def generators(self) -> list[Any]:
        return generators_of(self._loader)


_NOTHING: Final = object()


def _nothing() -> None:
    """A pass from its beginning."""


def _same(taken: int, mark: bytes, found: int, now: bytes) -> None:
    if found < taken:
        raise _other_data(f"of {taken} batches that were taken there are only {found}")
    if now != mark:
        raise _other_data("the batches that were taken are others now")


def _refuse_what_is_lost(loader: Any, *, deterministic: bool) -> None:
    """Kinds of ``DataLoader`` of which no two passes need be the same."""
    if loader.num_workers == 0:
        return
    if not getattr(loader, "in_order", True):
        raise InvalidRequest(
            "a DataLoader with in_order=False gives batches in the order in which its workers happen to be done",
            do="Leave in_order as it is; no run could be repeated otherwise.",
        )
    if loader.persistent_workers and not deterministic:
        raise InvalidRequest(
            "the workers of a DataLoader with persistent_workers=True keep their random numbers from pass to pass, "
            "and they cannot be saved",
            do="Leave persistent_workers out, or say batches(loader, deterministic=True) if its data set draws none.",
        )


def _is_data_loader(loader: Any) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader)


def _has_indices(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset)


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "__array__") and hasattr(thing, "__getitem__") and hasattr(thing, "__len__")


def _other_data(what: str) -> InvalidRequest:
    return InvalidRequest(f"the place in the data cannot be found again: {what}", do=_OTHER_DATA)


LOOK_BYTES: Final = 4096
"""Of bytes."""
SAMPLES: Final = 128
"""Numbers of each tensor or array. Two batches that differ in others only are taken for one another."""
DEPTH_MAX: Final = 8
ITEMS_MAX: Final = 10_000


def glimpse(batch: Any) -> bytes:
    """A hash of a few bytes of a batch: small things whole, of large ones a sample. It changes nothing and draws no
    random numbers."""
    found = blake3()
    _update_digest(batch, found, DEPTH_MAX)
    return found.digest()


def _update_digest(thing: Any, found: Any, depth: int) -> None:
    found.update(type(thing).__name__.encode())
    if isinstance(thing, int | float | complex | str | type(None)):
        found.update(repr(thing).encode())
    elif isinstance(thing, bytes | bytearray | memoryview):
        found.update(bytes(memoryview(thing).cast("B")[:LOOK_BYTES]))
    elif depth and isinstance(thing, Mapping):
        for key, value in list(thing.items())[:ITEMS_MAX]:
            _update_digest(key, found, depth - 1)
            _update_digest(value, found, depth - 1)
    elif depth and isinstance(thing, Sequence):
        if len(thing) and all(type(one) is int for one in thing):  # the indices of a batch
            found.update(repr(thing[:ITEMS_MAX]).encode())
            return
        for one in thing[:ITEMS_MAX]:
            _update_digest(one, found, depth - 1)
    elif hasattr(thing, "dtype") and hasattr(thing, "shape"):
        found.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        found.update(_sample(thing))


def _sample(array: Any) -> bytes:
    """Some numbers of a tensor or an array, from all over it, wherever it is."""
    flat = array.reshape(-1)
    flat = flat[:: max(1, len(flat) // SAMPLES)][: 2 * SAMPLES]
    if hasattr(flat, "detach"):
        flat = flat.detach().cpu()
    return repr(flat.tolist()).encode()
