"""The agent of a real machine: it knows the hardware and carries the office's orders to the supervisor.

What is ordered, heard and tried again is decided by ``core``, which the simulation runs too. Here are its connection,
its clock and its tasks. When the supervisor is gone, so are its guests, and another is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sublet.background import Guard, count, end_process, is_shortage, start_task
from sublet.errors import Disconnected, InvalidRequest, SubletError, Unsupported
from sublet.node.agent.core import SILENT_NS, AgentCore, LinkLoss, away
from sublet.node.agent.port import ReportSink
from sublet.values import NS_PER_S, NodeId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import CardUse
from sublet.wire.codec import dumps, loads
from sublet.wire.frames import close_all
from sublet.wire.guests import (
    Admit,
    Configure,
    Configured,
    Front,
    Guests,
    ListGuests,
    ListProcesses,
    ListTroubles,
    OfficeCall,
    OfficeReply,
    Processes,
    Quit,
    Reports,
    Revoke,
    Troubles,
)
from sublet.wire.link import Link
from sublet.wire.link_events import CallRefused, Event, Happening, Over, PeerHello, Replied
from sublet.wire.orders import Inventory, Order
from sublet.wire.sockets import receive_some, send_some

_log = logging.getLogger("sublet.node.agent")

CONFIGURE_S: Final = 30.0
"""How long a supervisor may take to answer who it is."""

INFORMED_S: Final = 5.0
"""How long a holder waits at the most for a new supervisor to be told of its lease."""
ASK_S: Final = 30.0
"""How long any other answer may take. It takes a millisecond; a supervisor that stands still is one that is away."""
CUT_AGAIN_S: Final = 1.0
SHORT_PAUSE_S: Final = 0.2
"""After the socket could not be read for want of memory."""

Connect = Callable[[], Awaitable[socket.socket]]
"""Finds the supervisor of this office, or starts one; a connected, non-blocking socket."""


class SupervisedAgent:
    """One machine's agent (``AgentPort``). All calls come from the office's loop."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        office: str,
        incarnation: Callable[[], int],
        connect: Connect,
        report: ReportSink,
        on_new_supervisor: Callable[[], Awaitable[object]],
        offered: Callable[[], Inventory] | None = None,
        caps: LeaseCaps | None = None,
        generations: Callable[[], Mapping[TenantId, int]] = dict,
        die: Callable[[str], object] = end_process,
    ) -> None:
        """``caps``: of what a lease does not have. ``offered`` is what may be lent now, never more than
        ``inventory``. ``on_new_supervisor`` is awaited when one with empty tables has taken the place of another; it is
        done once all grants that live were sent again. ``generations``: of the rights of tenants, where they ever
        changed. ``die`` ends the process with a line."""
        self.supervisor: Configured | None = None
        """What the supervisor said of itself; None while there is none."""
        self._inventory = inventory
        self._offered = offered
        self._caps = caps or LeaseCaps()
        self._office = office
        self._connect = connect
        self._on_new_supervisor = on_new_supervisor
        self._die = die
        self._generations = generations
        self._reading = Guard("supervisor_link")
        self._writing_short = Guard("supervisor_link")
        self._core = AgentCore(report=report, incarnation=incarnation)
        self._link: Link | None = None
        self._sock: socket.socket | None = None
        self._writing = False
        self._is_informed = asyncio.Event()
        """Holders wait for it: set when the supervisor knows which leases live, cleared when another is joined."""
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._again: asyncio.Task[None] | None = None
        self._cutting: set[asyncio.Task[None]] = set()
        self._turning = Guard("supervisor_turns")
        self._pid = 0
        self._ticked_ns = 0

    # ---- the port ----

    @property
    def node(self) -> NodeId:
        return self._inventory.node

    def inventory(self) -> Inventory:
        return self._inventory if self._offered is None else self._offered()

    def send(self, order: Order, *, incarnation: int | None = None) -> None:
        self._core.send(order)

    def tick(self, now_ns: int) -> int | None:
        """The office's turn is over: what it ordered goes out. The supervisor keeps its own time; whether it still
        does is asked once a second."""
        self._core.turn_over()
        if self._core.is_joined:
            self._watch(now_ns)
            self._push()
        return None

    # ---- life ----

    async def start(self) -> None:
        """Find or start the supervisor, and take over what runs."""
        while True:
            try:
                await self._join()
            except (Disconnected, OSError) as error:
                pause_s = self._core.pause_s(error)
                if pause_s is None:
                    raise
                self._drop()
                await asyncio.sleep(pause_s)
            else:
                return

    def listen(self) -> None:
        """The office knows the machine by now, and hears what is reported."""
        self._core.listen()

    async def close(self, *, now: bool = False) -> None:
        """The office ends. The supervisor stays for as long as anything lives; with ``now`` it ends at once."""
        self._core.close()
        for task in (self._again, *self._cutting):
            if task is not None:
                task.cancel()
        if self._link is not None:
            with contextlib.suppress(SubletError, TimeoutError):
                await asyncio.wait_for(self.ask(Quit(now=now)), 2)
        self._drop()

    async def ask(self, request: OfficeCall, fds: tuple[int, ...] = ()) -> OfficeReply:
        """Ask the supervisor something. Raises what it refuses with, or ``Disconnected``."""
        if self._link is None:
            raise away()
        call = self._link.call(dumps(request), fds)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[call] = future
        self._send()
        try:
            async with asyncio.timeout(ASK_S):
                answer = await future
        except TimeoutError:
            raise Disconnected(
                f"the supervisor of this machine has not answered for {ASK_S:.0f} s",
                do="Look whether its process stands still (`sublet status` names it), or try again.",
            ) from None
        finally:
            self._answers.pop(call, None)
        return loads(OfficeReply, answer)  # type: ignore[no-any-return]

    async def guests(self, request: ListGuests) -> Guests:
        """What runs here: one page of it."""
        found = await self.ask(request)
        assert isinstance(found, Guests)
        return found

    async def processes(self, uses: tuple[CardUse, ...] = (), *, let_go: bool = False) -> tuple[int, ...]:
        """Every process that runs here under a lease, and the supervisor's own. ``uses``: what the driver says each has
        of a card; a guest that uses more than its lease is ended. ``let_go``: nothing of ours keeps the driver open
        without need."""
        found = await self.ask(ListProcesses(uses=uses, let_go=let_go))
        assert isinstance(found, Processes)
        return found.pids

    async def troubles(self) -> Troubles:
        """What has failed in the supervisor since it was started."""
        found = await self.ask(ListTroubles())
        assert isinstance(found, Troubles)
        return found

    def silent_s(self, now_ns: int) -> float:
        """For how long the supervisor has answered nothing; 0 while it turns."""
        return self._core.watchdog.silent_ns(now_ns) / NS_PER_S

    def _watch(self, now_ns: int) -> None:
        self._ticked_ns = now_ns
        if self._core.watchdog.is_ping_due(now_ns):
            _ = start_task("supervisor_turns", self._ask_whether_it_turns)
        elif self._core.watchdog.silent_ns(now_ns) and not self._turning.is_failing:
            error = Disconnected(
                f"the supervisor (pid {self._pid}) has not answered for {SILENT_NS // NS_PER_S} s: it stands still"
            )
            self._turning.failed(
                error,
                "no deadline is enforced until it goes on; to end it ends all guests, so that is for the operator",
            )

    async def _ask_whether_it_turns(self) -> None:
        """Until it answers, however late, or is gone."""
        link = self._link
        while link is not None and self._link is link:
            try:
                await self.ask(ListTroubles())
            except Disconnected:  # not yet
                continue
            except SubletError:  # a refusal is an answer
                pass
            self._core.watchdog.answered(self._ticked_ns)
            self._turning.passed()
            return

    async def admit(self, front: Front, hello: PeerHello, fd: int) -> None:
        """Hand a holder's connection over; the descriptor here is still the caller's to close.

        A supervisor that has just been started is first told which leases live, or it would deny them. A
        connection that was checked before the tenant's rights changed, and would come only after the tenant's other
        connections were cut, is refused.
        """
        rights = self._core.rights(front)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_informed.wait(), INFORMED_S)
        self._core.check_admission(front, rights)
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # what is handed to a link is the link's to close
        await self.ask(Admit(front=front, oldest=hello.oldest, newest=hello.newest), (copy,))

    async def set_caps(self, caps: LeaseCaps) -> None:
        """Leases that begin from now on have these caps, and all guests together have theirs. The supervisor is told as
        when an office takes over, which every version of it understands. Returns when it knows."""
        if caps == self._caps:
            return
        self._caps = caps
        if not self._core.is_joined:  # the next one is told when it is joined
            return
        self._drop()
        self._again = start_task("supervisor_link", self._join_again, failed=self._ended)
        done, _ = await asyncio.wait((self._again,), timeout=CONFIGURE_S)
        if not done:
            raise Disconnected(
                "the supervisor of this machine does not answer; it gets the caps as soon as it does",
                do="Look whether its process stands still (`sublet status` names it).",
            )

    def cut_off(self, tenant: TenantId, generation: int) -> None:
        """The rights of a tenant have changed: no connection that was checked before is admitted, and open connections
        of older generations are cut. This is repeated until a supervisor answers; an office that ends before that
        repeats it when it is back."""
        self._core.cut_off(tenant)
        self._cut({tenant: generation})

    def _cut(self, generations: Mapping[TenantId, int]) -> None:
        task = start_task("cut_off", lambda: self._cut_all(generations), failed=self._ended)
        self._cutting.add(task)
        task.add_done_callback(self._cutting.discard)

    async def _cut_all(self, generations: Mapping[TenantId, int]) -> None:
        for tenant, generation in generations.items():
            await self._cut_off(tenant, generation)

    async def _cut_off(self, tenant: TenantId, generation: int) -> None:
        while True:
            try:
                await self.ask(Revoke(tenant=tenant, generation=generation))
            except (SubletError, OSError, MemoryError) as error:
                _log.error("connections of tenant %s may still be open: %s", tenant, error)
                await asyncio.sleep(CUT_AGAIN_S)
            else:
                return

    # ---- the connection ----

    async def _join(self) -> None:
        self._core.joining()
        sock = await self._connect()
        self._sock, self._link = sock, Link.connecting()
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable)
        request = Configure(office=self._office, inventory=self._inventory, caps=self._caps)
        try:
            configured = await asyncio.wait_for(self.ask(request), CONFIGURE_S)
        except InvalidRequest as error:
            self._drop()
            raise _of_another_version(pid, error) from error
        assert isinstance(configured, Configured)
        self.supervisor, self._pid = configured, pid
        joined = self._core.configured(configured, self._generations)
        if joined.revoke:
            self._cut(joined.revoke)
        if joined.is_successor:
            await self._on_new_supervisor()
        if self._core.grants_sent(joined) and joined.is_successor:
            self.tick(0)

    async def _join_again(self) -> None:
        pause_s = self._core.pause_s()
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._join()
            except (SubletError, OSError, MemoryError) as error:
                _log.error("the supervisor could not be started: %s", error)
                self._drop()
                pause_s = self._core.pause_s(error)
            else:
                return

    def _readable(self) -> None:
        """Called by the loop, which would log an exception and go on, and no caller would be told."""
        assert self._sock is not None and self._link is not None
        try:
            happened = receive_some(self._sock, self._link)
        except OSError as error:
            if not is_shortage(error):
                self._lost(Over(Disconnected(f"the connection to the supervisor failed ({error})"), by_peer=False))
                return
            self._reading.failed(error)
            fd = self._sock.fileno()
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.call_later(SHORT_PAUSE_S, self._read_again, self._sock)
            return
        except MemoryError:  # what had come is lost, and with it the place in the stream
            self._lost(Over(Disconnected("the connection to the supervisor failed: no memory"), by_peer=False))
            return
        self._reading.passed()
        try:
            for happening in happened:
                self._on_event(happening)
            self._send()
        except SubletError as error:  # one message cannot be read; what is still true is said again
            count("supervisor_link", error)
            _log.error("a message of the supervisor could not be read: %s", error)
        except Exception as error:  # noqa: BLE001 - reports that are lost are leases that never end
            self._ended(error)

    def _read_again(self, sock: socket.socket) -> None:
        if self._sock is sock:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._readable)

    def _ended(self, error: BaseException) -> None:
        self._die(f"the office stopped: its agent failed ({type(error).__name__}: {error})")

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case Event():
                self._core.on_reports(loads(Reports, happening.body).reports)
            case Replied():
                close_all(happening.fds)
                self._answered(happening.call, happening.body)
            case CallRefused():
                self._answered(happening.call, happening.error)
            case Over():
                self._lost(happening)
            case _:
                pass

    def _answered(self, call: int, answer: bytes | SubletError) -> None:
        future = self._answers.pop(call, None)
        if future is None or future.done():
            return
        if isinstance(answer, SubletError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _lost(self, over: Over) -> None:
        """The supervisor ended, or another office took over. While it is being joined, the joining task finds out."""
        loss = self._core.lost(over.error)
        if loss is LinkLoss.WHILE_JOINING:
            self._drop(over.error if isinstance(over.error, InvalidRequest) else None)
            return
        self._drop()
        if loss is LinkLoss.REPLACED:
            _log.error("the supervisor hung up: %s", over.error)
            return
        if over.error is None or isinstance(over.error, Disconnected):
            _log.error("the supervisor has ended, and the guests with it; another is started")
        else:  # perhaps one message broke it; without a supervisor nothing would ever be granted again
            _log.error("the supervisor hung up, and is asked again: %s", over.error)
        self._again = start_task("supervisor_link", self._join_again, failed=self._ended)

    def _drop(self, why: InvalidRequest | None = None) -> None:
        if self._sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock.fileno())
            loop.remove_writer(self._sock.fileno())
            self._sock.close()
        self._sock = self._link = None
        self._core.dropped()
        self._is_informed.clear()
        self._turning.passed()
        self._writing = False
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(why or Disconnected("the supervisor of this machine has ended"))

    def _send(self) -> None:
        if self._sock is None or self._link is None:
            return
        try:
            is_out = send_some(self._sock, self._link)
        except OSError as error:
            if not is_shortage(error):
                raise
            self._writing_short.failed(error)
            asyncio.get_running_loop().call_later(SHORT_PAUSE_S, self._push)
            return
        self._writing_short.passed()
        if is_out == self._writing:
            loop: Any = asyncio.get_running_loop()
            if is_out:
                loop.remove_writer(self._sock.fileno())
            else:
                loop.add_writer(self._sock.fileno(), self._push)
            self._writing = not is_out

    def _push(self) -> None:
        """What was ordered, in messages of a size that is taken, and no faster than they are."""
        self._send()
        while (
            self._link is not None and not self._link.has_output and (message := self._core.next_message()) is not None
        ):
            self._link.event(dumps(message))
            self._send()
        if self._core.is_informed:
            self._is_informed.set()


def _of_another_version(pid: int, error: InvalidRequest) -> Unsupported:
    """It lives on from before an upgrade that went too far, and its guests with it: that is not for us to end."""
    return Unsupported(
        f"the supervisor of this machine (pid {pid}) was started by another version of Sublet: {error.message}",
        do="Its guests go on to their deadlines. Before this version can begin they must end: `sublet down --now` "
        f"of that one, or `kill -9 {pid}`, which ends them too. Then start again.",
    )
