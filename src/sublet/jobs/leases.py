"""The leases of a job: acquired while there is work, released when there is none, counted at the end.

The pool holds leases on a fabric of its own, so that closing it gives back whatever was acquired and withdraws what
still waits in the queue. For each size of lease one thread asks: at once for what is free, and then, with what there
is, for one more in the queue. A refusal for want of capacity or quota is no error: the job runs with what it has.
What is missing is asked for in one request, and given back in one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sublet.background import start_thread
from sublet.client.clocks import client_clock
from sublet.client.fabric import Fabric
from sublet.errors import CapacityExceeded, Disconnected, LeaseEnded, QuotaExceeded, SubletError
from sublet.jobs.chunks import Needs

if TYPE_CHECKING:
    from sublet.client.lease import Lease

LABEL: Final = "job"
"""The label of a job's leases, by which bills and listings find them."""
PROGRAM: Final = {"program": "burst"}
AGAIN_S: Final = 1.0
"""After a refusal that is not for want of capacity now: how long until it is asked again."""
TOO_BIG: Final = "too_big"
CLOSE_S: Final = 10.0
MANY_MAX: Final = 1024
"""Leases of one request."""


class Holdings:
    """How many leases of each size are of use, and which there are. Pure; not for two threads at once."""

    def __init__(self) -> None:
        self._wanted: dict[Needs, int] = {}
        self._held: dict[Needs, list[Any]] = {}
        self.is_closed = False

    def want(self, needs: Needs, count: int) -> None:
        """So many of this size are of use now, held ones included."""
        if not self.is_closed:
            self._wanted[needs] = count

    def missing(self, needs: Needs) -> int:
        """How many more are of use."""
        return 0 if self.is_closed else self._wanted.get(needs, 0) - len(self._held.get(needs, ()))

    def granted(self, needs: Needs, lease: Any) -> bool:
        """One was granted. False if it is of no use any more: then it must be given back at once."""
        if self.missing(needs) <= 0:
            return False
        self._held.setdefault(needs, []).append(lease)
        return True

    def remove(self, needs: Needs, lease: Any) -> None:
        """One has ended, or was given back. Harmless twice."""
        held = self._held.get(needs, [])
        held[:] = [one for one in held if one is not lease]

    def close(self) -> list[Any]:
        """None is of use any more: those that must be given back."""
        self.is_closed = True
        found = [lease for held in self._held.values() for lease in held]
        self._held.clear()
        return found


class LeasePool:
    """Leases of one job. Safe to use from several threads."""

    def __init__(
        self,
        office: Fabric,
        job: str,
        *,
        tier: str,
        pay_priority: bool = False,
        ttl: float | str | None,
        on_lease: Callable[[Needs, Lease], object],
        on_refusal: Callable[[Needs, SubletError, bool], object],
    ) -> None:
        """``on_lease`` gets each new lease; ``on_refusal`` a refusal, and whether it is for good. Both are called on
        the thread that asked."""
        self._holding = Fabric(office.address, client_clock(), ca=office._ca)
        self._terms: dict[str, Any] = {"tier": tier, "labels": {**PROGRAM, LABEL: job}, "renew": "always"}
        self._pays_priority = pay_priority
        if ttl is not None:
            self._terms["ttl"] = ttl
        self._on_lease = on_lease
        self._on_refusal = on_refusal
        self._changed = threading.Condition()
        self._book = Holdings()
        self._asking: set[Needs] = set()
        """Sizes for which a thread is asking, or will never ask again."""
        self._threads: list[threading.Thread] = []

    def want(self, needs: Needs, count: int) -> None:
        """So many leases of this size are of use now, those that are held included."""
        with self._changed:
            self._book.want(needs, count)
            begins = self._book.missing(needs) > 0 and needs not in self._asking
            if begins:
                self._asking.add(needs)
        if begins:
            try:
                self._threads.append(start_thread("burst_leases", lambda: self._ask(needs), again=True))
            except RuntimeError:  # no room for a thread; the job's next step tries again
                self._asking.discard(needs)

    def remove(self, needs: Needs, lease: Lease) -> None:
        """One has ended by itself. Whether another is of use the job says next."""
        with self._changed:
            self._book.remove(needs, lease)

    def give_back(self, leases: Sequence[tuple[Needs, Lease]]) -> None:
        """They have nothing to do any more: one message. An office that does not answer hears of it later."""
        for needs, lease in leases:
            self.remove(needs, lease)
        with contextlib.suppress(Disconnected, LeaseEnded):
            self._holding.release(lease for _, lease in leases)

    def close(self) -> None:
        """Give everything back and ask for nothing more. Harmless twice."""
        with self._changed:
            left = self._book.close()
            self._changed.notify_all()
        if left:
            with contextlib.suppress(Disconnected, LeaseEnded):  # closing the fabric tries on
                self._holding.release(left)
        self._holding.close(patience=CLOSE_S)
        for thread in self._threads:  # their requests were withdrawn, so they have nothing to wait for
            thread.join(CLOSE_S)

    # ---- on a thread of its own, one for each size

    def _ask(self, needs: Needs) -> None:
        """Until there are as many as are of use. It is started again after a shortage."""
        wait: float | None = 0
        while self._may_continue(needs):
            try:
                leases = self._acquire(needs, wait)
            except CapacityExceeded as error:
                if error.reason == TOO_BIG:
                    self._on_refusal(needs, error, True)  # it stays among those asked for, so none asks again
                    return
                self._on_refusal(needs, error, False)
                wait = None  # from now on in the queue, one at a time
            except (QuotaExceeded, Disconnected, LeaseEnded) as error:
                self._refused(needs, error)
            except SubletError as error:
                if self._book.is_closed:  # a fabric that is closed refuses as well
                    continue
                self._on_refusal(needs, error, True)
                return
            else:
                wait = 0
                for lease in leases:
                    self._take_in(needs, lease)

    def _may_continue(self, needs: Needs) -> bool:
        with self._changed:
            if self._book.missing(needs) > 0:
                return True
            self._asking.discard(needs)
            return False

    def _refused(self, needs: Needs, error: SubletError) -> None:
        """It may be granted later, but no place in the queue was given."""
        if not self._book.is_closed:
            self._on_refusal(needs, error, False)
        with self._changed:
            if not self._book.is_closed:
                self._changed.wait(AGAIN_S)

    def _take_in(self, needs: Needs, lease: Lease) -> None:
        with self._changed:
            is_kept = self._book.granted(needs, lease)
        if is_kept:
            self._on_lease(needs, lease)
        else:
            _release(lease)

    def _acquire(self, needs: Needs, wait: float | None) -> Sequence[Lease]:
        """Up to as many as are missing, in one request; of those that wait in the queue one."""
        with self._changed:
            missing = self._book.missing(needs)
        if missing <= 0:  # since it was looked at
            return ()
        asking = self._holding.many(min(missing, MANY_MAX))
        if needs.vram:
            terms = {**self._terms, "pay_priority": self._pays_priority}
            found = list(asking.gpu(min_vram=needs.vram, wait=wait, on_place=_ignore, **terms))
        else:
            memory = needs.memory or None
            found = list(asking.cpu(needs.cores, memory=memory, wait=wait, on_place=_ignore, **self._terms))
        for lease in found:  # one that is taken while it has nothing to do is no news
            lease._held.quiet = True
        return found


def leases_left(office: Fabric, job: str, *, wait: float | None = None) -> int:
    """How many leases of ours with this job's label have not ended, as the office has them: a list of one's own proves
    nothing. One that is still ending counts, since its worker may live; it is waited for."""
    return office.wait_ended({**PROGRAM, LABEL: job}, timeout=CLOSE_S if wait is None else wait)


def _release(lease: Lease) -> None:
    """An office that is away hears of it from the fabric, which tries on; one that has ended it knows."""
    with contextlib.suppress(Disconnected, LeaseEnded):
        lease.release()


def _ignore(_: object) -> None:
    """A burst shows its own view instead of a line for each place in the queue."""
