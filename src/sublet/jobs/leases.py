"""The leases of a job: acquired while there is work for them, given back when there is not, counted at the end.

The pool holds leases on a fabric of its own, so that closing it gives back whatever was acquired and withdraws what
still waits in the queue. For each size of lease one thread asks: at once for what is free, and then, with what there
is, for one more in the queue. A refusal for want of capacity or quota is no error: the job runs with what it has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sublet.background import start_thread
from sublet.client.clocks import client_clock
from sublet.client.fabric import Fabric, connect
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, LeaseEnded, QuotaExceeded, SubletError
from sublet.jobs.chunks import Needs

if TYPE_CHECKING:
    from sublet.client.lease import Lease
    from sublet.wire.http import LeaseView

__all__ = ["LABEL", "PROGRAM", "LeasePool", "job_leases"]

LABEL: Final = "job"
"""The label of a job's leases, by which bills and listings find them."""
PROGRAM: Final = {"program": "burst"}
AGAIN_S: Final = 1.0
"""After a refusal that is not for want of capacity now: how long until it is asked again."""
TOO_BIG: Final = "too_big"
CLOSE_S: Final = 10.0


class LeasePool:
    """Leases of one job. Safe to use from several threads."""

    def __init__(
        self,
        office: Fabric,
        job: str,
        *,
        tier: str,
        ttl: float | str | None,
        on_lease: Callable[[Needs, Lease], object],
        on_refusal: Callable[[Needs, SubletError, bool], object],
    ) -> None:
        """``on_lease`` gets each new lease; ``on_refusal`` a refusal, and whether it is for good. Both are called on
        the thread that asked."""
        self._holding = Fabric(office.address, client_clock(), ca=office._ca)
        self._terms: dict[str, Any] = {"tier": tier, "labels": {**PROGRAM, LABEL: job}, "renew": "always"}
        if ttl is not None:
            self._terms["ttl"] = ttl
        self._on_lease = on_lease
        self._on_refusal = on_refusal
        self._changed = threading.Condition()
        self._wanted: dict[Needs, int] = {}
        self._held: dict[Needs, int] = {}
        self._asking: set[Needs] = set()
        """Sizes for which a thread is asking."""
        self._is_closed = False

    def want(self, needs: Needs, count: int) -> None:
        """So many leases of this size are of use now, those that are held included."""
        with self._changed:
            if self._wanted.get(needs) == count or self._is_closed:
                return
            self._wanted[needs] = count
            begins = count > self._held.get(needs, 0) and needs not in self._asking
            if begins:
                self._asking.add(needs)
            self._changed.notify_all()
        if begins:
            start_thread("burst_leases", lambda: self._ask(needs), failed=lambda _: self._asking.discard(needs))

    def missing(self, needs: Needs) -> int:
        """How many more are of use."""
        with self._changed:
            return 0 if self._is_closed else self._wanted.get(needs, 0) - self._held.get(needs, 0)

    def gone(self, needs: Needs) -> None:
        """One of this size has ended by itself."""
        with self._changed:
            self._held[needs] = self._held.get(needs, 0) - 1
            again = not self._is_closed and self._held[needs] < self._wanted.get(needs, 0) and needs not in self._asking
            if again:
                self._asking.add(needs)
            self._changed.notify_all()
        if again:
            start_thread("burst_leases", lambda: self._ask(needs), failed=lambda _: self._asking.discard(needs))

    def give_back(self, needs: Needs, lease: Lease) -> None:
        """It has nothing to do any more. An office that does not answer hears of it later."""
        with self._changed:
            self._held[needs] = self._held.get(needs, 0) - 1
        with contextlib.suppress(Disconnected, LeaseEnded):
            lease.release()

    def close(self) -> None:
        """Give everything back and ask for nothing more. Harmless twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._holding.close(patience=CLOSE_S)

    # ---- on a thread of its own, one for each size

    def _ask(self, needs: Needs) -> None:
        wait: float | None = 0
        while True:
            with self._changed:
                if self._is_closed or self._held.get(needs, 0) >= self._wanted.get(needs, 0):
                    self._asking.discard(needs)
                    return
            try:
                lease = self._acquire(needs, wait)
            except CapacityExceeded as error:
                if error.reason == TOO_BIG:
                    self._over(needs, error)
                    return
                self._on_refusal(needs, error, False)
                wait = None  # from now on in the queue, one at a time
                continue
            except (QuotaExceeded, Disconnected, LeaseEnded) as error:
                self._refused(needs, error)
                continue
            except SubletError as error:
                if self._may_ask:  # a fabric that is closed refuses as well
                    self._over(needs, error)
                    return
                continue
            wait = 0
            self._take_in(needs, lease)

    @property
    def _may_ask(self) -> bool:
        return not self._is_closed

    def _refused(self, needs: Needs, error: SubletError) -> None:
        """It may be granted later, but no place in the queue was given."""
        if self._may_ask:
            self._on_refusal(needs, error, False)
        with self._changed:
            if not self._is_closed:
                self._changed.wait(AGAIN_S)

    def _over(self, needs: Needs, error: SubletError) -> None:
        """There will be none of this size, ever. It stays among those that are asked for, so nothing asks again."""
        self._on_refusal(needs, error, True)

    def _take_in(self, needs: Needs, lease: Lease) -> None:
        with self._changed:
            is_spare = self._is_closed or self._held.get(needs, 0) >= self._wanted.get(needs, 0)
            if not is_spare:
                self._held[needs] = self._held.get(needs, 0) + 1
        if is_spare:
            with contextlib.suppress(Disconnected, LeaseEnded):
                lease.release()
        else:
            self._on_lease(needs, lease)

    def _acquire(self, needs: Needs, wait: float | None) -> Lease:
        if needs.vram:
            return self._holding.gpu(min_vram=needs.vram, wait=wait, on_place=_ignore, **self._terms)
        if needs.memory:
            raise InvalidRequest(
                "this version leases cores or memory, not both under one lease", do="Leave memory= out."
            )
        return self._holding.cpu(needs.cores, wait=wait, on_place=_ignore, **self._terms)


def job_leases(office: Fabric, job: str) -> list[LeaseView]:
    """The live leases with this job's label, as the office has them: a list of one's own proves nothing."""
    labels = {**PROGRAM, LABEL: job}
    return [view for view in office.leases() if view.end is None and labels.items() <= view.labels.items()]


def office_of(fabric: Fabric | None) -> tuple[Fabric, bool]:
    """The fabric to ask, and whether it is ours to close."""
    return (connect(), True) if fabric is None else (fabric, False)


def _ignore(_: object) -> None:
    """A burst shows its own view instead of a line for each place in the queue."""
