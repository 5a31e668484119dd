"""The asyncio twin of ``fabric``: the same calls over the same core, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from msgspec import structs

from sublet.background import start_task
from sublet.client import volumes
from sublet.client.address import Address, find_address
from sublet.client.aio_driver import run_program
from sublet.client.aio_keeper import AioKeeper
from sublet.client.aio_lease import Lease
from sublet.client.aio_transport import AioTransport
from sublet.client.asking import (
    Asked,
    Duration,
    ExclusivityText,
    RenewText,
    Size,
    Terms,
    ask_block,
    ask_cpu,
    ask_gpu,
    ask_memory,
    ask_resume,
    holder_name,
    holder_pid,
    parked_at,
    policy_of,
)
from sublet.client.book import Book
from sublet.client.clocks import client_clock
from sublet.client.core import REQUEST_TIMEOUT_S, Core, Grant, Hooks, new_request_id
from sublet.client.fabric import EXIT_PATIENCE_S, HELLO_TRIES, start_office
from sublet.client.guest_watch import Watch
from sublet.client.handle import LeaseFacts
from sublet.client.model import Offer
from sublet.client.paths import valid_path
from sublet.client.progress import QueueLine
from sublet.client.queries import bill_path, check_versions, leases_path
from sublet.client.steps import Program
from sublet.client.volumes import Attachable, Volume
from sublet.clock import Clock
from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.lease.policy import RenewalPolicy
from sublet.values import Epoch, LeaseId, RenewMode, valid_text
from sublet.wire.http import BillLine, LeaseView, StatusView
from sublet.wire.version import WIRE_VERSION

if TYPE_CHECKING:
    from sublet.wire.guests import GuestView

__all__ = ["Acquiring", "Fabric", "connect"]

T = TypeVar("T")
_log = logging.getLogger("sublet.client")


async def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    ca: str | None = None,
    start: bool = True,
    bound: bool = True,
) -> Fabric:
    """A fabric, on the office of this machine or on the one at ``url``; see `sublet.connect`."""
    address = find_address(url, token, None if home is None else valid_path(home, "home"), os.environ)
    fabric = Fabric(address, client_clock(), ca=ca, start=start, bound=bound)
    try:
        await fabric._greet()
    except BaseException:
        await fabric.close()
        raise
    return fabric


class Acquiring:
    """A lease on its way: ``await`` it, or enter it with ``async with``."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Lease]]) -> None:
        self._work = work
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._work().__await__()

    async def __aenter__(self) -> Lease:
        self._lease = await self._work()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(kind, error, trace)


class Fabric:
    """Where leases come from, inside one event loop. Made by ``await sublet.aio.connect()``.

    Close it (``async with``, or ``await close()``) before the loop ends: after that nobody can give its leases back,
    and they end by their time to live.
    """

    def __init__(
        self, address: Address, clock: Clock, *, ca: str | None = None, start: bool = True, bound: bool = True
    ) -> None:
        self.address = address
        self._clock = clock
        self._ca = ca
        self._start = start
        self._bound = bound
        self._core = Core(clock)
        self._transport = AioTransport(address, clock, wire=WIRE_VERSION, ca=ca)
        self._book = Book(clock, new_request_id)
        self._keeper = AioKeeper(self._book, self._core, self._transport, clock, self._revive)
        self._calls: set[asyncio.Task[None]] = set()
        self._unbinding: set[asyncio.Task[None]] = set()
        self._closed = False
        self._guest_watch: Watch | None = None

    def __repr__(self) -> str:
        return f"<aio.Fabric {self.address.url}{' closed' if self._closed else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, patience: float = EXIT_PATIENCE_S) -> None:
        """Give back all leases, for at most ``patience`` seconds, and stop. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._guest_watch is not None:
            self._guest_watch.close()
        held = self._book.live
        for one in held:
            self._book.let_go(one)
        releases = [
            run_program(
                self._core.release(one.id, request_id=one.release_id, busy_s=0.0, patience_s=patience),
                self._transport.exchange,
                _nobody,  # no office is started only to hear this
            )
            for one in held
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*releases, *self._unbinding, return_exceptions=True)
        await self._keeper.stop()
        await self._transport.close()

    # ---- acquiring

    def gpu(
        self,
        *,
        min_vram: Size | None = None,
        count: int = 1,
        exclusivity: ExclusivityText | None = None,
        model: str | None = None,
        or_smaller: bool | Size = False,
        on_offer: Callable[[Offer], bool] | None = None,
        resume: LeaseFacts | str | None = None,
        **terms: Unpack[Terms],
    ) -> Acquiring:
        """Acquire GPU memory on ``count`` devices of one machine, all or nothing; see `sublet.Fabric.gpu`."""
        if resume is not None:
            alone = (min_vram, exclusivity, model) == (None, None, None) and count == 1 and or_smaller is False
            asked = ask_resume(terms, resume=parked_at(resume, alone=alone))
            return self._acquire(asked, on_offer, goes_on=resume)
        if min_vram is None:
            raise InvalidRequest("a GPU lease needs min_vram", do='Write gpu(min_vram="2GiB"), or gpu(resume=...).')
        asked = ask_gpu(
            terms, min_vram=min_vram, count=count, exclusivity=exclusivity, model=model, or_smaller=or_smaller
        )
        return self._acquire(asked, on_offer)

    def cpu(
        self,
        cores: int = 1,
        *,
        or_smaller: bool | int = False,
        on_offer: Callable[[Offer], bool] | None = None,
        **terms: Unpack[Terms],
    ) -> Acquiring:
        """Acquire whole cores of one machine."""
        return self._acquire(ask_cpu(terms, cores=cores, or_smaller=or_smaller), on_offer)

    def memory(
        self,
        size: Size,
        *,
        or_smaller: bool | Size = False,
        on_offer: Callable[[Offer], bool] | None = None,
        **terms: Unpack[Terms],
    ) -> Acquiring:
        """Acquire host memory."""
        return self._acquire(ask_memory(terms, size=size, or_smaller=or_smaller), on_offer)

    def block(
        self,
        size: Size | None = None,
        *,
        min_blocks: int | None = None,
        retain: Duration | None = None,
        **terms: Unpack[Terms],
    ) -> Acquiring:
        """Acquire space on disk: by ``size``, or as a number of 4 KiB blocks.

        With ``name`` what is written there outlives the lease: it stays as a *volume*, for ``retain`` (7 days if that
        is not said), and the next ``block(name=...)`` goes on with it, whatever its size.
        """
        return self._acquire(ask_block(terms, size=size, min_blocks=min_blocks, retain=retain), None)

    def attach(
        self,
        lease: Attachable,
        *,
        renew: RenewText = RenewMode.WHILE_BUSY,
        renew_every: Duration | None = None,
        bound: bool | None = None,
    ) -> Acquiring:
        """Take over a lease of yours, under a new epoch. Whoever held it is fenced: their next write is refused.

        A volume that nobody has (itself, or its name) is taken by a new lease. From here on the lease is bound to this
        process (``bound``), and no longer to the one that had it.
        """
        policy = policy_of(renew, renew_every)

        async def work() -> Lease:
            program = volumes.attach(self._core, lease, holder_name(), self._holder_pid(bound))
            return self._open(await self._run(program), policy)

        return Acquiring(work)

    # ---- looking

    async def status(self) -> StatusView:
        """The office, its devices and how much of them is free."""
        return await self._run(self._core.query("/v1/status", StatusView))

    async def leases(self, *, all: bool = False, tenant: str | None = None) -> list[LeaseView]:  # noqa: A002 - as on the wire
        """Live leases, newest first; with ``all`` the ended ones that are still remembered."""
        return await self._run(self._core.query(leases_path(all, tenant), list[LeaseView]))

    async def lease(self, lease: LeaseId | str) -> LeaseView:
        """One lease as the office knows it."""
        return await self._run(self._core.look(LeaseId(lease)))

    async def volumes(self, *, tenant: str | None = None) -> list[Volume]:
        """What is kept under names, and what block leases with a name have now."""
        return await self._run(volumes.listed(self._core, tenant))

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

    async def bill(self, *, by: str = "lease", since: str | None = None, until: str | None = None) -> list[BillLine]:
        """What was consumed, by ``"lease"``, ``"tenant"`` or ``"label:KEY"``; times are RFC 3339."""
        return await self._run(self._core.query(bill_path(by, since, until), list[BillLine]))

    async def bill_csv(self, *, by: str = "lease", since: str | None = None, until: str | None = None) -> str:
        """The same as CSV."""
        return await self._run(self._core.text(bill_path(by, since, until, csv=True)))

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
        from sublet.client.guests import list_guests

        asked = lease.id if isinstance(lease, LeaseFacts) else "" if lease is None else valid_text(lease, "lease")
        return await asyncio.to_thread(list_guests, self.address, asked, ended=ended)

    @property
    def _watch(self) -> Watch:
        """Hears of the guests its leases started; made with the first. On any thread."""
        if self._guest_watch is None:
            self._guest_watch = Watch()
        return self._guest_watch

    def _acquire(
        self, asked: Asked, on_offer: Callable[[Offer], bool] | None, goes_on: LeaseFacts | str | None = None
    ) -> Acquiring:
        async def work() -> Lease:
            line, old = QueueLine(), asked.replaces
            on_place = line.show if asked.on_place is None and line.wanted else asked.on_place
            try:
                request = structs.replace(asked.request, holder_pid=self._holder_pid(asked.bound))
                with contextlib.nullcontext() if old is None else old._kept():
                    grant = await self._run(self._core.acquire(request, Hooks(on_place=on_place, on_offer=on_offer)))
            finally:
                line.clear()
            lease = self._open(grant, asked.policy)
            if isinstance(old, Lease):
                with contextlib.suppress(Disconnected):  # the office has ended it already
                    await old.release()
            if isinstance(goes_on, Lease):
                lease._go_on_from(goes_on)
            lease._takes_up = goes_on is not None and lease._ground is None
            return lease

        return Acquiring(work)

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

    def _open(self, grant: Grant, policy: RenewalPolicy) -> Lease:
        lease = Lease(self, self._book, self._book.open(grant, policy))
        self._keeper.start()
        return lease

    async def _run(self, program: Program[T]) -> T:
        return await run_program(program, self._transport.exchange, self._revive)

    async def _greet(self) -> None:
        for attempt in range(HELLO_TRIES):
            if self._start:
                await asyncio.to_thread(start_office, self.address)
            try:
                hello = await self._run(self._core.hello())
            except Disconnected as error:
                if error.sent and attempt + 1 < HELLO_TRIES:
                    continue  # it was on its way out when we came
                raise
            check_versions(hello, WIRE_VERSION)
            return

    async def _revive(self) -> None:
        if self._start:
            with contextlib.suppress(SubletError):  # the request that needed it says what is wrong
                await asyncio.to_thread(start_office, self.address)

    def _deliver(self, callback: Callable[[Any], Any], what: object) -> None:
        """Call the user's callback in a task of its own; one that raises is logged and harms nobody else."""

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


async def _nobody() -> None:
    return
