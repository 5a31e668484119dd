"""The asyncio twin of ``fabric``: the same calls over the same core, awaited."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from msgspec import structs

from sublet.background import shortage_explained, start_task, start_thread
from sublet.client import sharing, volumes
from sublet.client.address import Address, find_address
from sublet.client.aio_driver import run_program
from sublet.client.aio_keeper import AioKeeper
from sublet.client.aio_lease import Lease, Leases
from sublet.client.aio_transport import AioTransport
from sublet.client.clocks import client_clock
from sublet.client.fabric import EXIT_PATIENCE_S, HELLO_TRIES, close_at_exit, closed_error, give_back_all, start_office
from sublet.client.guest_watch import GuestWatch
from sublet.client.handle import LeaseFacts
from sublet.client.home import was_ended
from sublet.client.lease_entry import Owed
from sublet.client.lease_table import LeaseTable, is_held
from sublet.client.many import own_leases
from sublet.client.model import Offer
from sublet.client.operations import REQUEST_TIMEOUT_S, Hooks, OfficeOperations, ReceivedGrant, new_request_id
from sublet.client.paths import valid_path
from sublet.client.progress import QueueLine
from sublet.client.queries import ENDS_WAIT_S, bill_path, check_versions, ends_query, listing_path
from sublet.client.requests import (
    Duration,
    LeaseRequest,
    LeaseRequests,
    RenewText,
    Size,
    ask_many,
    holder_name,
    holder_pid,
    policy_of,
)
from sublet.client.sharing import Amount, Ceiling
from sublet.client.steps import Program
from sublet.client.transport import Transport
from sublet.client.volumes import Attachable, Volume
from sublet.clock import Clock
from sublet.errors import Disconnected, LeaseEnded, SubletError
from sublet.lease.policy import RenewalPolicy
from sublet.values import NS_PER_S, Epoch, LeaseId, RenewMode, RequestId, valid_text
from sublet.wire.http import (
    BillLine,
    BudgetView,
    ExplainAnswer,
    GroupView,
    LeaseView,
    QuotaView,
    ReservationView,
    StatusView,
)
from sublet.wire.version import WIRE_VERSION

if TYPE_CHECKING:
    from sublet.wire.guests import GuestView

T = TypeVar("T")
G = TypeVar("G")
H = TypeVar("H")
A = TypeVar("A", bound=Lease | Leases)
LOOK_AGAIN_S: Final = 0.02
LOOK_AGAIN_MAX_S: Final = 5.0
"""Between two tries to give back what a loop has left."""
_log = logging.getLogger("sublet.client")


async def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    ca: str | None = None,
    start: bool = True,
    bound: bool = True,
    as_tenant: bool = False,
    for_tenant: str = "",
) -> Fabric:
    """A fabric, on the office of this machine or on the one at ``url``; see `sublet.connect`."""
    address = find_address(
        url,
        token,
        None if home is None else valid_path(home, "home"),
        os.environ,
        as_tenant=as_tenant,
        for_tenant=for_tenant,
    )
    with shortage_explained():
        fabric = Fabric(address, client_clock(), ca=ca, start=start, bound=bound)
        try:
            await fabric._check_office()
        except BaseException:
            await fabric.close()
            raise
    return fabric


class Acquiring(Generic[A]):
    """A lease, or several, on the way: ``await`` it, or enter it with ``async with``."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, A]]) -> None:
        self._work = work
        self._lease: A | None = None

    def __await__(self) -> Generator[Any, None, A]:
        return self._work().__await__()

    async def __aenter__(self) -> A:
        self._lease = await self._work()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(kind, error, trace)


class Fabric(LeaseRequests[Acquiring[Lease], Acquiring[Leases]]):
    """Where leases come from, inside one event loop. Made by ``await sublet.aio.connect()``.

    Close it (``async with``, or ``await close()``) before the loop ends. What it still holds when the loop has ended is
    given back by a thread, at the latest when the program ends.
    """

    def __init__(
        self, address: Address, clock: Clock, *, ca: str | None = None, start: bool = True, bound: bool = True
    ) -> None:
        self.address = address
        self._clock = clock
        self._ca = ca
        self._start = start
        self._bound = bound
        self._core = OfficeOperations(clock, partial(was_ended, address.home))
        self._transport = AioTransport(address, clock, wire=WIRE_VERSION, ca=ca)
        self._book = LeaseTable(clock, new_request_id)
        self._keeper = AioKeeper(self._book, self._core, self._transport, clock, self._revive, self._give_back_later)
        self._calls: set[asyncio.Task[None]] = set()
        self._unbinding: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._is_over = False
        self._returning: threading.Thread | None = None
        self._guest_watch: GuestWatch | None = None
        _fabrics.add(self)

    def __repr__(self) -> str:
        return f"<aio.Fabric {self.address.url}{' closed' if self._closed else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, patience: float = EXIT_PATIENCE_S) -> None:
        """Give back all leases, for at most ``patience`` seconds, and stop. Requests of other tasks that wait in the
        queue are withdrawn; from now on none is accepted.

        Twice is harmless. A close that is cancelled goes on in the background; a second one waits for it, or finishes
        what it has left.
        """
        if self._is_over:
            return
        self._book.closing = True
        for held in self._book.live:
            self._book.begin_release(held)
        if self._closing is None or self._closing.done() or self._closing.get_loop() is not asyncio.get_running_loop():
            self._closing = asyncio.create_task(self._close(patience))
        await asyncio.shield(self._closing)

    async def _close(self, patience: float) -> None:
        try:
            if self._guest_watch is not None:
                self._guest_watch.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    owed = list(self._book.owed)
                    plain = [one for one in owed if one.is_plain]
                    returns = [self._return(one, patience) for one in owed if len(plain) < 2 or not one.is_plain]
                    if len(plain) > 1:
                        returns.append(self._return_many(plain, patience))
                    await asyncio.gather(*returns, *self._unbinding, return_exceptions=True)
            await self._keeper.stop()
            await self._transport.close()
            self._is_over = True
        finally:
            if self._book.owed:  # unconfirmed, or the loop ends: a thread goes on until the last of it has ended
                self._give_back_later()

    async def _return(self, owed: Owed, patience_s: float) -> None:
        """No office is started only to hear this."""
        await run_program(self._core.give_back(owed, patience_s), self._transport.exchange, _not_started)
        self._book.release_done(owed)

    async def _return_many(self, owed: Sequence[Owed], patience_s: float) -> None:
        await run_program(self._core.release_many(owed, patience_s), self._transport.exchange, _not_started)
        for one in owed:
            self._book.release_done(one)

    # ---- acquiring

    def attach(
        self,
        lease: Attachable,
        *,
        renew: RenewText = RenewMode.WHILE_BUSY,
        renew_every: Duration | None = None,
        bound: bool | None = None,
    ) -> Acquiring[Lease]:
        """Take over a lease of yours, under a new epoch. Its earlier holder is fenced: their next write is refused.

        A free volume (itself, or its name) is taken by a new lease. From here on the lease is bound to this
        process (``bound``), and no longer to the one that had it.
        """
        policy = policy_of(renew, renew_every)

        def program(owed: Owed) -> Program[ReceivedGrant]:
            owed.is_held = is_held
            return volumes.attach(self._core, lease, holder_name(), self._holder_pid(bound), owed)

        return Acquiring(lambda: self._run_and_open(program, lambda grant, owed: self._open(grant, policy, owed)))

    async def release(self, leases: Iterable[Lease]) -> None:
        """Give back leases of this fabric in one message; see `Lease.release`."""
        mine = own_leases(self, leases, Lease)
        held = [lease._held for lease in mine]
        try:
            back = [lease for lease in mine if not lease._is_returned()]
            owed = [lease._to_let_go() for lease in back]
            for lease, view in zip(back, await self._run(self._core.release_many(owed)), strict=True):
                lease._released(view)
        except BaseException:
            self._book.abandoned.append(held)  # at once: the next interrupt may come with the call
            if self._is_over:
                self._give_back_later()
            else:
                self._keeper.wake()
            raise
        finally:
            for lease in mine:
                await lease._close_what_runs()

    # ---- looking

    async def status(self) -> StatusView:
        """The office, its devices and how much of them is free."""
        return await self._run(self._core.query("/v1/status", StatusView))

    async def leases(
        self,
        *,
        all: bool = False,  # noqa: A002 - as on the wire
        tenant: str | None = None,
        own: bool = False,
    ) -> list[LeaseView]:
        """Live leases, newest first; with ``all`` the ended ones that are still remembered. An operator sees those of
        all tenants, with ``own`` only those of its own."""
        path = listing_path("/v1/leases", tenant, own, ended_too=all)
        return await self._run(self._core.query(path, list[LeaseView]))

    async def lease(self, lease: LeaseId | str) -> LeaseView:
        """One lease as the office knows it."""
        return await self._run(self._core.get_lease(LeaseId(lease)))

    async def wait_ended(
        self,
        labels: Mapping[str, str],
        *,
        timeout: Duration = ENDS_WAIT_S,  # noqa: ASYNC109
        all: bool = False,  # noqa: A002 - as on the wire
    ) -> int:
        """Wait until no lease of yours with all of these labels is left, those that are still ending included, or the
        time is over. How many are left: 0 proves that none holds anything any more. ``timeout=0`` counts them;
        ``all``: those of all tenants (operators)."""
        return await self._run(self._core.wait_ended(*ends_query(labels, timeout), everyones=all))

    async def volumes(self, *, tenant: str | None = None, own: bool = False) -> list[Volume]:
        """What is kept under names, and what block leases with a name have now. An operator sees those of all tenants,
        with ``own`` only those of its own."""
        return await self._run(volumes.listed(self._core, tenant, own))

    async def volume(self, name: str) -> Volume:
        """The volume of this name."""
        return await self._run(volumes.find(self._core, name))

    async def remove_volume(self, volume: Volume | str) -> Volume:
        """Give a volume up now, with all that is in it. Refused while a lease has it."""
        return await self._run(volumes.remove(self._core, volume))

    async def copy_volume(
        self, source: Volume | str, name: str, *, size: Size | None = None, retain: Duration | None = None
    ) -> Volume:
        """Make a volume with what was last saved in another of yours; see `sublet.Fabric.copy_volume`. It waits for a
        disk, and does so on a thread of its own."""
        from sublet.client.fabric import Fabric as OnThread

        def copy() -> Volume:
            with OnThread(self.address, self._clock, ca=self._ca, start=self._start) as fabric:
                return fabric.copy_volume(source, name, size=size, retain=retain)

        return await asyncio.to_thread(copy)

    async def bill(
        self,
        *,
        by: str = "lease",
        per: str | None = None,
        since: str | None = None,
        until: str | None = None,
        own: bool = False,
    ) -> list[BillLine]:
        """What was consumed, by ``"lease"``, ``"tenant"``, ``"group"``, ``"device"``, ``"session"`` or ``"label:KEY"``
        (or several: ``"label:KEY,KEY"``), as a whole or per ``"day"`` or ``"month"`` (UTC); times are RFC 3339. An
        operator has the bills of all tenants, with ``own`` only that of its own."""
        return await self._run(self._core.query(bill_path(by, since, until, per, own=own), list[BillLine]))

    async def bill_csv(
        self, *, by: str = "lease", per: str | None = None, since: str | None = None, until: str | None = None
    ) -> str:
        """The same as CSV."""
        return await self._run(self._core.text(bill_path(by, since, until, per, csv=True)))

    async def explain(self, lease: LeaseFacts | LeaseId | str) -> ExplainAnswer:
        """Why a request waits and what is ahead of it, or what may end a lease; and what its holder can do."""
        return await self._run(sharing.explain(self._core, lease.id if isinstance(lease, LeaseFacts) else lease))

    # ---- sharing: for operators; `budgets` also for tenants

    async def groups(self) -> list[GroupView]:
        """The groups of tenants, with what they may have and hold."""
        return await self._run(sharing.groups(self._core))

    async def add_group(
        self,
        name: str,
        *,
        weight: int | None = None,
        floor: int | None = None,
        ceiling: Ceiling = None,
        quota: QuotaView | None = None,
    ) -> GroupView:
        """Make a group. ``weight`` counts against other groups that wait, ``floor`` is the number of GPUs that it can
        always have, ``ceiling`` the most at once; ``quota`` holds for all its tenants together."""
        return await self._run(sharing.add_group(self._core, name, weight, floor, ceiling, quota))

    async def set_group(
        self,
        name: str,
        *,
        weight: int | None = None,
        floor: int | None = None,
        ceiling: Ceiling = None,
        quota: QuotaView | None = None,
    ) -> GroupView:
        """Change what is given; ``ceiling="none"`` takes the ceiling away. A ``quota`` replaces the whole of it."""
        return await self._run(sharing.set_group(self._core, name, weight, floor, ceiling, quota))

    async def remove_group(self, name: str) -> GroupView:
        """Remove a group that has no tenants, with its budgets. The answer is how it was."""
        return await self._run(sharing.remove_group(self._core, name))

    async def reservations(self) -> list[ReservationView]:
        """The reservations, with their next times and the devices that are kept now."""
        return await self._run(sharing.reservations(self._core))

    async def add_reservation(
        self, name: str, when: str, *, group: str, gpus: int, zone: str, model: str | None = None
    ) -> ReservationView:
        """Reserve GPUs for a group: ``when="every Tue 10:00-12:00"``, in a time zone such as ``"Europe/Berlin"``."""
        return await self._run(sharing.add_reservation(self._core, name, when, group, gpus, zone, model))

    async def remove_reservation(self, name: str) -> ReservationView:
        """Remove a reservation. Leases that had notice because of it stay."""
        return await self._run(sharing.remove_reservation(self._core, name))

    async def budgets(self) -> list[BudgetView]:
        """What may be spent, and what is: a tenant has its own, an operator all."""
        return await self._run(sharing.budgets(self._core))

    async def set_budget(
        self,
        amount: Amount,
        *,
        tenant: str | None = None,
        group: str | None = None,
        per: str = "month",
        currency: str | None = None,
    ) -> BudgetView:
        """Set what one tenant or one group may spend per ``"day"``, ``"month"`` or in ``"total"``. The ``amount`` is
        exact: ``"12.50"``, a ``Decimal`` or a whole number. With ``currency`` it is refused if prices are in another.
        """
        return await self._run(sharing.set_budget(self._core, amount, tenant, group, per, currency))

    async def credit_budget(
        self,
        amount: Amount,
        *,
        tenant: str | None = None,
        group: str | None = None,
        per: str = "month",
        currency: str | None = None,
        request_id: str | None = None,
    ) -> BudgetView:
        """Add to the present window of a budget. Asked again with the same ``request_id``, it counts once."""
        return await self._run(sharing.credit_budget(self._core, amount, tenant, group, per, currency, request_id))

    async def remove_budget(
        self, *, tenant: str | None = None, group: str | None = None, per: str = "month"
    ) -> BudgetView:
        """Remove a budget. Leases that had notice because of it stay."""
        return await self._run(sharing.remove_budget(self._core, tenant, group, per))

    # ---- everything else

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        shape: type[T],
        timeout: float = REQUEST_TIMEOUT_S,  # noqa: ASYNC109
    ) -> T:
        """One call of the control API as it is, for what has no method here; ``shape`` is the type of its answer."""
        return await self._run(self._core.command(method, path, body, shape, timeout))

    # ---- within

    async def guests(self, lease: LeaseFacts | LeaseId | str | None = None, *, ended: bool = False) -> list[GuestView]:
        """The commands that run under leases of yours; with ``ended`` also those whose output is still kept."""
        with shortage_explained():
            from sublet.client.guests import list_guests

        lease_id = lease.id if isinstance(lease, LeaseFacts) else "" if lease is None else valid_text(lease, "lease")
        return await asyncio.to_thread(list_guests, self.address, lease_id, ended=ended)

    @property
    def _watch(self) -> GuestWatch:
        """Hears of the guests its leases started; made with the first. On any thread."""
        if self._guest_watch is None:
            self._guest_watch = GuestWatch()
        return self._guest_watch

    def _acquire(
        self, spec: LeaseRequest, on_offer: Callable[[Offer], bool] | None, goes_on: LeaseFacts | str | None = None
    ) -> Acquiring[Lease]:
        async def work() -> Lease:
            line, old = QueueLine(), spec.replaces
            on_place = line.show if spec.on_place is None and line.wanted else spec.on_place
            request = structs.replace(spec.request, holder_pid=self._holder_pid(spec.bound))
            hooks = Hooks(on_place=on_place, on_offer=on_offer)

            async def complete(lease: Lease) -> None:
                if isinstance(old, Lease):
                    with contextlib.suppress(Disconnected):  # the office has ended it already
                        await old.release()
                if isinstance(goes_on, Lease):
                    lease._resume_from(goes_on)
                lease._takes_up = goes_on is not None and lease._blocking_lease is None

            try:
                with contextlib.nullcontext() if old is None else old._kept():
                    return await self._run_and_open(
                        lambda owed: self._core.acquire(request, hooks, owed),
                        lambda grant, owed: self._open(grant, spec.policy, owed),
                        complete,
                    )
            finally:
                line.clear()

        return Acquiring(work)

    def _acquire_many(self, spec: LeaseRequest, count: int, at_least: int) -> Acquiring[Leases]:
        spec = replace(spec, request=structs.replace(spec.request, holder_pid=self._holder_pid(spec.bound)))
        request = ask_many(spec, count, at_least)

        async def work() -> Leases:
            line = QueueLine()
            hooks = Hooks(on_place=line.show if spec.on_place is None and line.wanted else spec.on_place)
            try:
                return await self._run_and_open(
                    lambda owed: self._core.acquire_many(request, hooks, owed),
                    lambda grants, owed: self._open_many(grants, spec.policy, owed),
                )
            finally:
                line.clear()

        return Acquiring(work)

    async def _run_and_open(
        self,
        program: Callable[[Owed], Program[G]],
        opened: Callable[[G, Owed], H],
        complete: Callable[[H], Awaitable[None]] | None = None,
    ) -> H:
        """Run a program that brings a lease, or many, and make the handle; see `sublet.Fabric`."""
        owed = Owed(RequestId(new_request_id()))
        try:
            if self._closed:
                raise closed_error()
            self._keeper.prepare()
            self._book.owed.add(owed)
            made = [opened(await self._run(program(owed)), owed)]
            if complete is not None:
                await complete(made[0])
            self._book.owed.discard(owed)
            return made.pop()  # no variable keeps it: if the caller does not get it, nothing does
        except BaseException as error:
            owed.left = True
            self._release_in_background(owed)
            if self._closed and isinstance(error, LeaseEnded):  # close() has withdrawn the request
                raise closed_error() from error
            raise

    def _release_in_background(self, owed: Owed) -> None:
        if owed.done:
            self._book.owed.discard(owed)
            return
        self._book.owed.add(owed)
        if self._is_over:
            self._give_back_later()
        else:
            self._keeper.wake()

    @property
    def _closed(self) -> bool:
        return self._book.closing

    def _give_back_later(self) -> None:
        """Its tasks have ended, and this loop perhaps as well: what is left is given back by a thread."""
        if self._returning is None or not self._returning.is_alive():
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and does it itself
                self._returning = start_thread("return", self._give_back_apart, again=True)

    def _give_back_apart(self) -> None:
        """On a thread. While the loop runs, it may still release leases by itself."""
        loop, pause_s = self._keeper.loop, LOOK_AGAIN_S
        while loop is not None and not self._is_over and loop.is_running():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_MAX_S)
        pause_s = LOOK_AGAIN_S
        while self._has_left:
            self._give_back_now()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_MAX_S)

    @property
    def _has_left(self) -> bool:
        return bool(self._book.owed or self._book.live or self._book.dropped or self._book.abandoned)

    def _give_back_now(self, patience_s: float = EXIT_PATIENCE_S) -> None:
        """With blocking calls: where no loop runs that could do it."""
        self._book.closing = True
        for held in self._book.live:
            self._book.begin_release(held)
        for owed in list(self._book.owed):
            owed.under_way, owed.retry_ns = False, 0
        transport = Transport(self.address, self._clock, wire=WIRE_VERSION, ca=self._ca)
        until_ns = self._clock.now_ns() + round(patience_s * NS_PER_S)
        try:
            give_back_all(self._core, self._book, transport, self._clock, until_ns, self._book.due_releases())
        finally:
            transport.close()

    def _holder_pid(self, bound: bool | None) -> int | None:
        return holder_pid(self.address, self._bound if bound is None else bound)

    def _unbind(self, lease: LeaseId, epoch: Epoch) -> None:
        """In the background; ``close`` waits for it."""

        async def unbind() -> None:
            with contextlib.suppress(Disconnected):
                await self._run(self._core.unbind(lease, epoch))

        task = start_task("unbind", unbind)
        self._unbinding.add(task)
        task.add_done_callback(self._unbinding.discard)

    def _open(self, grant: ReceivedGrant, policy: RenewalPolicy, owed: Owed | None = None) -> Lease:
        if self._closed:  # the answer came late
            raise closed_error()
        lease = Lease(self, self._book, self._book.open(grant, policy, owed))
        self._keeper.start()
        return lease

    def _open_many(self, grants: Sequence[tuple[ReceivedGrant, Owed]], policy: RenewalPolicy, whole: Owed) -> Leases:
        if self._closed:  # the answer came late
            raise closed_error()
        leases = Leases(self, [Lease(self, self._book, self._book.open(one, policy, owed)) for one, owed in grants])
        self._book.owed.update(member for member in whole.members or () if member.left)
        self._keeper.start()
        return leases

    async def _run(self, program: Program[T]) -> T:
        return await run_program(program, self._transport.exchange, self._revive)

    async def _check_office(self) -> None:
        is_ours = self._start and self.address.home is not None
        for attempt in range(HELLO_TRIES):
            if self._start:
                await asyncio.to_thread(start_office, self.address)
            try:
                hello = await self._run(self._core.hello())
            except Disconnected as error:
                if (error.sent or is_ours) and attempt + 1 < HELLO_TRIES:
                    continue  # it was on its way out when we came: killed, it takes connections to the last
                raise
            check_versions(hello, WIRE_VERSION)
            return

    async def _revive(self) -> None:
        if self._start:
            with contextlib.suppress(SubletError):  # the request that needed it says what is wrong
                await asyncio.to_thread(start_office, self.address)

    def _deliver(self, callback: Callable[[Any], Any], what: object) -> None:
        """Call the user's callback in a task of its own; one that raises is logged."""

        async def call() -> None:
            try:
                result = callback(what)
                if isinstance(result, Awaitable):
                    await result
            except Exception:  # noqa: BLE001 - it is the user's, and the next one has done nothing wrong
                _log.exception("a callback of a lease failed: %r", callback)

        task = start_task("callbacks", call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _not_started() -> None:
    return


_fabrics: weakref.WeakSet[Fabric] = weakref.WeakSet()


def _at_exit() -> None:
    """Give back what loops have left, which do not run any more."""
    close_at_exit([one._give_back_now for one in list(_fabrics) if one._has_left])


for _ in range(2):
    atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fabrics.clear)
