"""Many leases of one request, with blocking calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, overload

from sublet.client.handle import FabricLink, LeaseFacts
from sublet.client.lease import Lease
from sublet.client.lease_entry import LeaseEntry
from sublet.errors import InvalidRequest, SubletError
from sublet.values import shown

L = TypeVar("L", bound=LeaseFacts)


class LeaseSequence(Sequence[L], Generic[L]):
    """Leases in the order of their grant."""

    def __init__(self, leases: Iterable[L]) -> None:
        self._leases = tuple(leases)

    def __repr__(self) -> str:
        return f"<{len(self._leases)} leases>"

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[L]:
        return iter(self._leases)

    @overload
    def __getitem__(self, index: int) -> L: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[L]: ...
    def __getitem__(self, index: int | slice) -> L | Sequence[L]:
        return self._leases[index]


class _Fabric(FabricLink, Protocol):
    def _release(self, mine: Sequence[Lease], held: Sequence[LeaseEntry], /) -> None: ...


class Leases(LeaseSequence[Lease]):
    """The leases that one request was granted, in the order of their grant. Each is a lease like any other.

    Use it as a context manager, so that all are given back at the end of the block, in one message::

        with fabric.many(64).cpu(1) as leases:
            results = [lease.submit(work, n) for n, lease in enumerate(leases)]
    """

    def __init__(self, fabric: _Fabric, leases: Iterable[Lease]) -> None:
        super().__init__(leases)
        self._fabric = fabric
        self._pid = os.getpid()
        self._held = tuple(lease._held for lease in self._leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back. What the body raised goes on as it is, whatever becomes of the release."""
        try:
            if os.getpid() == self._pid:
                self._fabric._release([lease for lease in self._leases if not lease._left], self._held)
        except SubletError as failed:
            could_not_release(failed, error)
        except BaseException:
            self._fabric._book.abandoned.append(self._held)  # at once: the next interrupt may come with the call
            self._fabric._keeper.wake()
            raise

    def release(self) -> None:
        """Give all of them back, in one message. Twice is harmless, and so is after the end; see `Lease.release`."""
        try:
            own_leases(self._fabric, self._leases, Lease)
            self._fabric._release(self._leases, self._held)
        except BaseException:
            self._fabric._book.abandoned.append(self._held)
            self._fabric._keeper.wake()
            raise


def own_leases(fabric: object, leases: Iterable[L], kind: type[L]) -> list[L]:
    """The leases as a list, if they are of this fabric."""
    mine = list(leases)
    for lease in mine:
        if not isinstance(lease, kind) or getattr(lease, "_fabric", None) is not fabric:
            raise InvalidRequest(f"{shown(lease)} is not a lease of this fabric", do="Give leases that it granted.")
        lease._own()
    return mine


def could_not_release(failed: SubletError, error: BaseException | None) -> None:
    """Say, at the end of a block, that leases are to be given back later."""
    text = f"leases could not be given back yet; it is tried again until their time to live ends: {failed}"
    if error is not None:
        error.add_note(text)
    else:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
