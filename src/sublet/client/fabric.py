"""`connect`, and the fabric from which leases are acquired."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from msgspec import structs

from sublet.background import shortage_explained
from sublet.client import sharing, volumes
from sublet.client.address import Address, find_address
from sublet.client.clocks import client_clock
from sublet.client.driver import run_program
from sublet.client.handle import CallbackThread, LeaseFacts
from sublet.client.home import was_ended
from sublet.client.lease import Lease
from sublet.client.lease_entry import LeaseEntry, Owed
from sublet.client.lease_table import LeaseTable, is_held
from sublet.client.many import Leases, own_leases
from sublet.client.model import Offer
from sublet.client.operations import REQUEST_TIMEOUT_S, Hooks, OfficeOperations, ReceivedGrant, new_request_id
from sublet.client.paths import valid_path
from sublet.client.progress import QueueLine
from sublet.client.queries import ENDS_WAIT_S, bill_path, check_versions, ends_query, listing_path
from sublet.client.renewal_thread import RenewalThread
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
from sublet.client.steps import HttpCall, HttpReply, Program
from sublet.client.transport import Transport
from sublet.client.volumes import Attachable, Volume
from sublet.clock import Clock
from sublet.errors import Disconnected, InvalidRequest, LeaseEnded, NotFound, SubletError, Unsupported
from sublet.lease.policy import RenewalPolicy
from sublet.values import NS_PER_S, LeaseId, RenewMode, RequestId, parse_duration_ns, valid_name, valid_text
from sublet.wire.decoders import decode_as
from sublet.wire.http import (
    BillLine,
    BudgetView,
    ExplainAnswer,
    GrantAnswer,
    GroupView,
    LeaseView,
    QuotaView,
    ReservationView,
    StatusView,
    TokenView,
)
from sublet.wire.version import WIRE_VERSION

if TYPE_CHECKING:
    from sublet.client.guest_watch import GuestWatch
    from sublet.wire.guests import GuestView

T = TypeVar("T")
G = TypeVar("G")
H = TypeVar("H")

EXIT_PATIENCE_S: Final = 2.0
"""How long the end of the program may be held up to give leases back. What is left ends by its time to live."""
EXIT_TRIES: Final = 5
"""Interrupts that the end of a program outlasts while it gives leases back."""
HELLO_TRIES: Final = 3
"""An office may be on its way out when we come: then there is another try."""


def connect(
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
    """A fabric, on the office of this machine or on the one at ``url``.

    Without ``url`` (and ``SUBLET_URL``) the office is the one whose state folder is ``home`` (else ``SUBLET_HOME``,
    else the user's). If none runs there, it is started in the background, unless ``start`` is False. ``token`` (else
    ``SUBLET_TOKEN``) says which tenant is calling; without one, the office of this machine knows you as its owner.
    ``ca`` is a file of certificates to trust instead of the system's.

    On one machine a lease is bound to the process that acquires it: it ends as soon as that process ends, also where it
    is killed. With ``bound=False`` the leases of this fabric live on to their time to live.

    A process of root's, or of the office's owner, is refused with the token of another tenant: what comes back from
    that tenant's guests would be loaded with its rights. ``as_tenant=True`` says that this is meant.

    An operator acts for a tenant with ``for_tenant=NAME``: what it asks for then is that tenant's, with that tenant's
    rights and no others, and the audit records name both.
    """
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
            fabric._check_office()
        except BaseException:
            fabric.close()
            raise
    return fabric


class Fabric(LeaseRequests[Lease, Leases]):
    """Where leases come from. Made by `connect`; safe to use from several threads.

    It renews its leases on one background thread. Closing it, or the end of the program, gives them back.
    """

    def __init__(
        self, address: Address, clock: Clock, *, ca: str | None = None, start: bool = True, bound: bool = True
    ) -> None:
        self._is_over = True  # until it is furnished
        self.address = address
        self._ca = ca
        self._clock = clock
        self._start = start
        self._bound = bound
        self._core = OfficeOperations(clock, partial(was_ended, address.home))
        self._transport = Transport(address, clock, wire=WIRE_VERSION, ca=ca)
        self._init_process_state(closed=False)
        self._is_over = False
        _fabrics.add(self)

    def _init_process_state(self, *, closed: bool) -> None:
        """What belongs to one process: a fork begins with its own."""
        self._lock = threading.RLock()
        self._book = LeaseTable(self._clock, new_request_id)
        self._book.closing = closed
        self._callbacks = CallbackThread()
        self._guest_watch: GuestWatch | None = None
        self._keeper = RenewalThread(self._book, self._core, self._transport, self._clock, self._lock, self._reviver())

    def __repr__(self) -> str:
        return f"<Fabric {self.address.url}{' closed' if self._closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """Each lease keeps its fabric, so none is held here any more; what was dropped is still given back."""
        if not getattr(self, "_is_over", True):
            self._keeper.retire()
            self._transport.close()

    def close(self, patience: float = EXIT_PATIENCE_S) -> None:
        """Give back all leases, for at most ``patience`` seconds, and stop. Requests of other threads that wait in the
        queue are withdrawn; from now on none is accepted.

        Twice is harmless, and finishes what an interrupted close has left.
        """
        if self._is_over:
            return
        patience_ns = parse_duration_ns(patience, "patience", zero_ok=True)
        until_ns = self._clock.now_ns() + patience_ns
        with self._lock:
            self._book.closing = True
            for held in self._book.live:
                self._book.begin_release(held)
        self._give_back_all(until_ns)
        if self._guest_watch is not None:
            self._guest_watch.close()
        if self._book.owed:  # unconfirmed: the thread goes on until the last of it has ended
            self._keeper.retire()
        else:
            self._keeper.stop(max(0.1, (until_ns - self._clock.now_ns()) / NS_PER_S))
            self._is_over = True
        self._transport.close()

    # ---- acquiring

    def attach(
        self,
        lease: Attachable,
        *,
        renew: RenewText = RenewMode.WHILE_BUSY,
        renew_every: Duration | None = None,
        bound: bool | None = None,
    ) -> Lease:
        """Take over a lease of yours, under a new epoch. Its earlier holder is fenced: their next write is refused.

        A free volume (itself, or its name) is taken by a new lease. From here on the lease is bound to this
        process (``bound``), and no longer to the one that had it.
        """
        policy = policy_of(renew, renew_every)

        def program(owed: Owed) -> Program[ReceivedGrant]:
            owed.is_held = is_held
            return volumes.attach(self._core, lease, holder_name(), self._holder_pid(bound), owed)

        return self._run_and_open(program, lambda grant, owed: self._open(grant, policy, owed))

    def release(self, leases: Iterable[Lease]) -> None:
        """Give back leases of this fabric in one message; see `Lease.release`."""
        mine = own_leases(self, leases, Lease)
        self._release(mine, tuple(lease._held for lease in mine))

    # ---- looking

    def status(self) -> StatusView:
        """The office, its devices and how much of them is free."""
        return self._run(self._core.query("/v1/status", StatusView))

    def leases(
        self,
        *,
        all: bool = False,  # noqa: A002 - as on the wire
        tenant: str | None = None,
        own: bool = False,
    ) -> list[LeaseView]:
        """Live leases, newest first; with ``all`` the ended ones that are still remembered. An operator sees those of
        all tenants, with ``own`` only those of its own."""
        path = listing_path("/v1/leases", tenant, own, ended_too=all)
        return self._run(self._core.query(path, list[LeaseView]))

    def lease(self, lease: LeaseId | str) -> LeaseView:
        """One lease as the office knows it."""
        return self._run(self._core.get_lease(LeaseId(lease)))

    def wait_ended(
        self,
        labels: Mapping[str, str],
        *,
        timeout: Duration = ENDS_WAIT_S,
        all: bool = False,  # noqa: A002 - as on the wire
    ) -> int:
        """Wait until no lease of yours with all of these labels is left, those that are still ending included, or the
        time is over. How many are left: 0 proves that none holds anything any more. ``timeout=0`` counts them;
        ``all``: those of all tenants (operators)."""
        return self._run(self._core.wait_ended(*ends_query(labels, timeout), everyones=all))

    def guests(self, lease: LeaseFacts | LeaseId | str | None = None, *, ended: bool = False) -> list[GuestView]:
        """The commands that run under leases of yours; with ``ended`` also those whose output is still kept."""
        with shortage_explained():
            from sublet.client.guests import list_guests

        wanted = lease.id if isinstance(lease, LeaseFacts) else "" if lease is None else valid_text(lease, "lease")
        return list_guests(self.address, wanted, ended=ended)

    def volumes(self, *, tenant: str | None = None, own: bool = False) -> list[Volume]:
        """What is kept under names, and what block leases with a name have now. An operator sees those of all tenants,
        with ``own`` only those of its own."""
        return self._run(volumes.listed(self._core, tenant, own))

    def volume(self, name: str) -> Volume:
        """The volume of this name."""
        return self._run(volumes.find(self._core, name))

    def remove_volume(self, volume: Volume | str) -> Volume:
        """Give a volume up now, with all that is in it. Refused while a lease has it."""
        return self._run(volumes.remove(self._core, volume))

    def copy_volume(
        self, source: Volume | str, name: str, *, size: Size | None = None, retain: Duration | None = None
    ) -> Volume:
        """Make a volume of this name with what was last saved in another of yours: its newest checkpoint. Its
        holder goes on with it meanwhile. As large as that one, unless a ``size`` is said.
        """

        return copied_volume(self, source, name, size, retain)

    def bill(
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
        return self._run(self._core.query(bill_path(by, since, until, per, own=own), list[BillLine]))

    def bill_csv(
        self, *, by: str = "lease", per: str | None = None, since: str | None = None, until: str | None = None
    ) -> str:
        """The same as CSV."""
        return self._run(self._core.text(bill_path(by, since, until, per, csv=True)))

    def explain(self, lease: LeaseFacts | LeaseId | str) -> ExplainAnswer:
        """Why a request waits and what is ahead of it, or what may end a lease; and what its holder can do."""
        return self._run(sharing.explain(self._core, lease.id if isinstance(lease, LeaseFacts) else lease))

    # ---- sharing: for operators; `budgets` also for tenants

    def groups(self) -> list[GroupView]:
        """The groups of tenants, with what they may have and hold."""
        return self._run(sharing.groups(self._core))

    def add_group(
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
        return self._run(sharing.add_group(self._core, name, weight, floor, ceiling, quota))

    def set_group(
        self,
        name: str,
        *,
        weight: int | None = None,
        floor: int | None = None,
        ceiling: Ceiling = None,
        quota: QuotaView | None = None,
    ) -> GroupView:
        """Change what is given; ``ceiling="none"`` takes the ceiling away. A ``quota`` replaces the whole of it."""
        return self._run(sharing.set_group(self._core, name, weight, floor, ceiling, quota))

    def remove_group(self, name: str) -> GroupView:
        """Remove a group that has no tenants, with its budgets. The answer is how it was."""
        return self._run(sharing.remove_group(self._core, name))

    def reservations(self) -> list[ReservationView]:
        """The reservations, with their next times and the devices that are kept now."""
        return self._run(sharing.reservations(self._core))

    def add_reservation(
        self, name: str, when: str, *, group: str, gpus: int, zone: str, model: str | None = None
    ) -> ReservationView:
        """Reserve GPUs for a group: ``when="every Tue 10:00-12:00"``, in a time zone such as ``"Europe/Berlin"``."""
        return self._run(sharing.add_reservation(self._core, name, when, group, gpus, zone, model))

    def remove_reservation(self, name: str) -> ReservationView:
        """Remove a reservation. Leases that had notice because of it stay."""
        return self._run(sharing.remove_reservation(self._core, name))

    def budgets(self) -> list[BudgetView]:
        """What may be spent, and what is: a tenant has its own, an operator all."""
        return self._run(sharing.budgets(self._core))

    def set_budget(
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
        return self._run(sharing.set_budget(self._core, amount, tenant, group, per, currency))

    def credit_budget(
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
        return self._run(sharing.credit_budget(self._core, amount, tenant, group, per, currency, request_id))

    def remove_budget(self, *, tenant: str | None = None, group: str | None = None, per: str = "month") -> BudgetView:
        """Remove a budget. Leases that had notice because of it stay."""
        return self._run(sharing.remove_budget(self._core, tenant, group, per))

    # ---- everything else

    def request(
        self, method: str, path: str, body: object = None, *, shape: type[T], timeout: float = REQUEST_TIMEOUT_S
    ) -> T:
        """One call of the control API as it is, for what has no method here; ``shape`` is the type of its answer."""
        return self._run(self._core.command(method, path, body, shape, timeout))

    # ---- within

    @property
    def _closed(self) -> bool:
        return self._book.closing

    @property
    def _watch(self) -> GuestWatch:
        """Hears of the guests its leases started; made with the first."""
        with self._lock:
            if self._guest_watch is None:
                from sublet.client.guest_watch import GuestWatch

                self._guest_watch = GuestWatch()
            return self._guest_watch

    def _acquire(
        self, spec: LeaseRequest, on_offer: Callable[[Offer], bool] | None, goes_on: LeaseFacts | str | None = None
    ) -> Lease:
        line, old = QueueLine(), spec.replaces
        on_place = line.show if spec.on_place is None and line.wanted else spec.on_place
        request = structs.replace(spec.request, holder_pid=self._holder_pid(spec.bound))
        hooks = Hooks(on_place=on_place, on_offer=on_offer)

        def complete(lease: Lease) -> None:
            if isinstance(old, Lease):
                with contextlib.suppress(Disconnected):  # the office has ended it already
                    old.release()
            if isinstance(goes_on, Lease):
                lease._resume_from(goes_on)
            lease._takes_up = goes_on is not None and lease._workers is None

        try:
            with contextlib.nullcontext() if old is None else old._kept():
                return self._run_and_open(
                    lambda owed: self._core.acquire(request, hooks, owed),
                    lambda grant, owed: self._open(grant, spec.policy, owed),
                    complete,
                )
        finally:
            line.clear()

    def _acquire_many(self, spec: LeaseRequest, count: int, at_least: int) -> Leases:
        line = QueueLine()
        on_place = line.show if spec.on_place is None and line.wanted else spec.on_place
        spec = replace(spec, request=structs.replace(spec.request, holder_pid=self._holder_pid(spec.bound)))
        request, hooks = ask_many(spec, count, at_least), Hooks(on_place=on_place)
        try:
            return self._run_and_open(
                lambda owed: self._core.acquire_many(request, hooks, owed),
                lambda grants, owed: self._open_many(grants, spec.policy, owed),
            )
        finally:
            line.clear()

    def _run_and_open(
        self,
        program: Callable[[Owed], Program[G]],
        opened: Callable[[G, Owed], H],
        complete: Callable[[H], None] | None = None,
    ) -> H:
        """Run a program that brings a lease, or many, and make the handle. From before the request is sent until the
        caller has the handle, the book knows what is owed: whatever ends this, an interrupt included, it is given
        back."""
        owed, is_sent = Owed(RequestId(new_request_id())), False

        def exchange(call: HttpCall) -> HttpReply:
            nonlocal is_sent
            if self._closed and not is_sent:  # close() may not have seen it
                raise closed_error()
            is_sent = True
            return self._transport.exchange(call)

        try:
            with self._lock:
                if self._closed:
                    raise closed_error()
                self._keeper.prepare()
                self._book.owed.add(owed)
                self._keeper.wake_for_releases()
            made = [opened(self._run(program(owed), exchange), owed)]
            if complete is not None:
                complete(made[0])
            self._book.owed.discard(owed)
            return made.pop()  # no variable keeps it: if the caller does not get it, nothing does
        except BaseException as error:
            owed.left = True
            self._release_in_background(owed)
            if self._closed and isinstance(error, LeaseEnded):  # close() has withdrawn the request
                raise closed_error() from error
            raise

    def _holder_pid(self, bound: bool | None) -> int | None:
        return holder_pid(self.address, self._bound if bound is None else bound)

    def _open(self, grant: ReceivedGrant, policy: RenewalPolicy, owed: Owed | None = None) -> Lease:
        with self._lock:
            if self._closed:  # the answer came late
                raise closed_error()
            lease = Lease(self, self._book, self._book.open(grant, policy, owed))
            self._keeper.start()
        return lease

    def _open_many(self, grants: Sequence[tuple[ReceivedGrant, Owed]], policy: RenewalPolicy, whole: Owed) -> Leases:
        with self._lock:
            if self._closed:
                raise closed_error()
            leases = Leases(self, [Lease(self, self._book, self._book.open(one, policy, owed)) for one, owed in grants])
            self._book.owed.update(member for member in whole.members or () if member.left)
            self._keeper.start()
        return leases

    def _release(self, mine: Sequence[Lease], held: Sequence[LeaseEntry]) -> None:
        try:
            back = [lease for lease in mine if not lease._is_returned()]
            owed = [lease._to_let_go() for lease in back]
            for lease, view in zip(back, self._run(self._core.release_many(owed)), strict=True):
                lease._released(view)
        except BaseException:
            self._book.abandoned.append(held)  # at once: the next interrupt may come with the call
            if self._closed:
                self._give_back_all(self._clock.now_ns() + round(EXIT_PATIENCE_S * NS_PER_S))
            else:
                self._keeper.wake()
            raise
        finally:
            for lease in mine:
                lease._close_what_runs()

    def _release_in_background(self, owed: Owed) -> None:
        """See that it is given back: by the keeper, or here where there is none any more."""
        if owed.done:
            self._book.owed.discard(owed)
            return
        self._book.owed.add(owed)
        if self._closed:
            self._give_back_all(self._clock.now_ns() + round(EXIT_PATIENCE_S * NS_PER_S), (owed,))
        else:
            self._keeper.wake()

    def _give_back_all(self, until_ns: int, only: Sequence[Owed] = ()) -> None:
        give_back_all(self._core, self._book, self._transport, self._clock, until_ns, only)

    def _run(self, program: Program[T], exchange: Callable[[HttpCall], HttpReply] | None = None) -> T:
        return run_program(program, exchange or self._transport.exchange, self._reviver())

    def _check_office(self) -> None:
        """See that an office of a version we can talk to is there."""
        is_ours = self._start and self.address.home is not None
        for attempt in range(HELLO_TRIES):
            if self._start:
                start_office(self.address)
            try:
                hello = self._run(self._core.hello())
            except Disconnected as error:
                if (error.sent or is_ours) and attempt + 1 < HELLO_TRIES:
                    continue  # it was on its way out when we came: killed, it takes connections to the last
                raise
            check_versions(hello, WIRE_VERSION)
            return

    def _reviver(self) -> Callable[[], None]:
        """How to see that there is an office: a function that does not hold on to this fabric."""
        address, start = self.address, self._start

        def revive() -> None:
            if start:
                with contextlib.suppress(SubletError):  # the request that needed it says what is wrong
                    start_office(address)

        return revive

    def _after_fork(self) -> None:
        self._transport.after_fork()
        self._init_process_state(closed=self._closed)


def closed_error() -> SubletError:
    """A lease was asked of a fabric that is closed."""
    return InvalidRequest("this fabric is closed, so it has no leases", do="Use a new one: sublet.connect().")


def give_back_all(
    core: OfficeOperations,
    book: LeaseTable,
    transport: Transport,
    clock: Clock,
    until_ns: int,
    only: Sequence[Owed] = (),
) -> None:
    """Give back what is owed, with blocking calls, and no later than then. No answer is awaited for longer,
    and no office is started for it."""
    owed = list(only or book.owed)
    plain = [one for one in owed if one.is_plain]
    groups = [plain, *([one] for one in owed if not one.is_plain)] if len(plain) > 1 else [[one] for one in owed]
    for group in groups:
        left_s = (until_ns - clock.now_ns()) / NS_PER_S
        if left_s <= 0:
            return

        def exchange(call: HttpCall, left_s: float = left_s) -> HttpReply:
            return transport.exchange(replace(call, timeout_s=min(call.timeout_s, left_s)))

        with contextlib.suppress(SubletError):
            if len(group) > 1:
                run_program(core.release_many(group, left_s / 2), exchange, lambda: None)
            else:
                run_program(core.give_back(group[0], left_s / 2), exchange, lambda: None)
        for one in group:
            if one.done:
                book.release_done(one)
            else:
                one.tries += 1


_fabrics: weakref.WeakSet[Fabric] = weakref.WeakSet()


def start_office(address: Address) -> None:
    """See that the office of this machine runs, if that is the one that is meant."""
    if address.home is None:
        return
    if sys.platform != "linux":
        raise Unsupported(
            "an office runs on Linux only",
            do='Connect to one elsewhere: set SUBLET_URL, or sublet.connect("https://gpu.example.org").',
        )
    from sublet.client.office import ensure_office

    ensure_office(address.home)


def _at_exit() -> None:
    """Give back what the program still holds. A fork has nothing of its parent's in its books."""
    close_at_exit([fabric.close for fabric in list(_fabrics)])


_exit_began_s: list[float] = []


def close_at_exit(closers: Sequence[Callable[[float], None]]) -> None:
    """Call each with the time that is left to it. One that is interrupted is called again, since nothing comes after
    it; the interrupt is raised in the end."""
    _exit_began_s.append(time.monotonic())
    interrupt: BaseException | None = None
    for close in closers:
        for _ in range(EXIT_TRIES):
            patience_s = EXIT_PATIENCE_S - (time.monotonic() - _exit_began_s[0])
            if patience_s <= 0:
                break
            try:
                close(patience_s)
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
    if interrupt is not None:
        raise interrupt


_kept_still: list[Any] = []


def _before_fork() -> None:
    """Leases keep their fabric's lock: held by another thread in a fork, it would keep the child waiting for ever."""
    for fabric in list(_fabrics):
        fabric._lock.acquire()
        _kept_still.append(fabric._lock)


def _release_locks() -> None:
    while _kept_still:
        _kept_still.pop().release()


def _in_child() -> None:
    _release_locks()
    for fabric in list(_fabrics):
        fabric._after_fork()


for _ in range(2):  # an interrupt may end the first call before it has begun
    atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_release_locks, after_in_child=_in_child)


# -------------------------------------------------------------------------------------------------------------- keeping
#
# Hands a lease that was acquired without a fabric (by `sublet run`) to a keeper, once its command runs for longer
# than a moment.


def keep_acquired(answer: bytes, *, sent_ns: int, busy_since_ns: int, renew: str) -> Lease:
    """The lease of this answer, renewed from now on. Something has run under it since ``busy_since_ns``, and does so
    until ``stop_keeping``. What there is to say of it the supervisor says on the command's stderr, so nothing is
    logged."""
    logging.getLogger("sublet.client").addHandler(logging.NullHandler())
    grant = ReceivedGrant(view=decode_as(answer, GrantAnswer).lease, sent_ns=sent_ns)
    fabric = Fabric(find_address(None, None, None, os.environ), client_clock())
    lease = fabric._open(grant, RenewalPolicy(mode=RenewMode(renew)))
    with fabric._lock:
        fabric._book.begin(lease._held, object(), since_ns=busy_since_ns)
    fabric._keeper.wake()
    return lease


def stop_keeping(lease: Lease) -> float:
    """Renew it no more. How many seconds it was busy that the office has not heard of: the release says so."""
    fabric, held = lease._fabric, lease._held
    with fabric._lock:
        busy_ns = 0 if held.over else held.holder.busy_time.unsaid_ns(fabric._clock.now_ns())
    lease._leave()  # and not ``leave``, which would let it outlive us: it is about to be released
    fabric.close(0.1)
    return busy_ns / NS_PER_S


# -------------------------------------------------------------------------------------------------------- volume copies
#
# Copies published checkpoints from one volume to another, also while the source's holder saves.


COPY_TTL: Final = "2m"
"""TTL of the lease on a free source volume while it is read; renewed meanwhile."""
EMPTY_GONE_S: Final = 5.0
"""How long is waited for a volume to go in which nothing was written."""


@contextlib.contextmanager
def readable_volume(fabric: Fabric, name: str) -> Iterator[str]:
    """A ticket with which its checkpoints may be copied. A free one is leased meanwhile.
    ``NotFound`` if the tenant has no volume of this name."""
    from sublet.client.volume_line import lend

    found = fabric.volume(name)
    if found.lease is not None:
        yield lend(fabric.address, _lease_token(fabric, found.lease), reads=True)
        return
    with fabric.block(name=name, ttl=COPY_TTL, wait=COPY_TTL, renew="always") as lease:
        yield lend(fabric.address, _lease_token(fabric, lease.id), reads=True)


def copied_volume(
    fabric: Fabric, source: Volume | str, name: str, size: Size | None, retain: Duration | None
) -> Volume:
    """Behind ``Fabric.copy_volume``."""
    from sublet.state.checkpoints.store import copy_checkpoint
    from sublet.state.checkpoints.volume import VolumeStore

    old = fabric.volume(source if isinstance(source, str) else source.name)
    with contextlib.suppress(NotFound):
        fabric.volume(valid_name(name, "name"))
        raise InvalidRequest(
            f"there is a volume called {name} already", do=f"Choose another name, or `sublet volume rm {name}` first."
        )
    lease = fabric.block(old.size if size is None else size, name=name, retain=retain, ttl=COPY_TTL, renew="always")
    try:
        with lease, readable_volume(fabric, old.name) as ticket:
            if not copy_checkpoint(VolumeStore(lease.volume_line()), ticket).number:
                raise NotFound(
                    f"volume {old.name} has no checkpoint",
                    do="Save one there first; files of other kinds are not copied.",
                )
    except SubletError:  # nothing was written, so nothing of it is kept; another try shall not find it
        _wait_gone(fabric, name)
        raise
    return fabric.volume(name)


def _wait_gone(fabric: Fabric, name: str) -> None:
    until_s = time.monotonic() + EMPTY_GONE_S
    with contextlib.suppress(SubletError):
        while time.monotonic() < until_s:
            fabric.volume(name)
            time.sleep(0.05)


def _lease_token(fabric: Fabric, lease: LeaseId) -> str:
    return fabric._run(fabric._core.query(f"/v1/leases/{lease}/token", TokenView)).token
