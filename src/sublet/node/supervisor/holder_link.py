"""A holder's connection: its requests are answered here, with or without an office.

Its tenant and rights were read from its token when it connected (``Front``). That never suffices: to start something
its (lease, epoch) must be live now, and what belongs to another tenant is as if it did not exist.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Final, assert_never

from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    NotFound,
    SubletError,
    Unauthorized,
    Unsupported,
)
from sublet.lease.node import Node
from sublet.node.connections import Connection, internal_error
from sublet.node.loop import Loop, log_internal_error
from sublet.node.output_budget import OutputBudget
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.guests import GuestTable
from sublet.node.processes.log_readers import Following
from sublet.node.processes.messages import what_to_do
from sublet.node.processes.spawn import SpawnFailed
from sublet.node.storage.publish_queue import AnyCall, AnyReply, Handed
from sublet.node.supervisor.real_hardware import RealHardware
from sublet.node.supervisor.volume_service import VolumeService
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.frames import close_all
from sublet.wire.guests import (
    OUTPUT_HEAD,
    Attach,
    Attached,
    Connect,
    Connected,
    Detach,
    Done,
    EndGuest,
    Front,
    GuestNews,
    HolderCall,
    HolderReply,
    ListGuests,
    NotStarted,
    Profile,
    Resize,
    Service,
    SignalGuest,
    Start,
    Started,
    Visit,
)
from sublet.wire.guests import Guests as GuestList
from sublet.wire.link import Link
from sublet.wire.link_events import Called, Closed, Credit, Data, Event, Happening, Opened, Over, PeerHello
from sublet.wire.refusals import Refusal, error_of
from sublet.wire.sockets import peer_of
from sublet.wire.volumes import Collect, CopyIn, LendVolume, ListVolume, OpenFiles, OpenVolume, Publish, VolumeLent
from sublet.wire.zygote import Warm

PIECE_MAX: Final = 64 * 1024
"""Bytes of output in one frame."""
RUN: Final = "run"
LOGS: Final = "logs"
OPERATIONS: Final = {Service.WORK: RUN, Service.DEVICE: "device", Service.JUPYTER: "kernel"}
"""What one must be allowed to do, to be connected to a guest for this."""


class HolderLink:
    """Serves one connection until it is cut, or hangs up."""

    def __init__(
        self,
        *,
        loop: Loop,
        sock: socket.socket,
        hello: PeerHello,
        front: Front,
        node: Node,
        premises: RealHardware,
        guests: GuestTable,
        on_over: Callable[[HolderLink], None],
        unread: OutputBudget,
        volumes: VolumeService,
        warm: Callable[[Warm], None],
    ) -> None:
        self.front = front
        self._uid = peer_of(sock).uid
        self._warm_up = warm
        self._volumes = volumes
        self._node = node
        self._premises = premises
        self._guests = guests
        self._on_over = on_over
        self._now_ns = loop.now_ns
        self._attached: dict[str, _Attached] = {}
        self._awaiting: list[GuestProcess] = []
        link = Link.adopted(hello)
        self._connection = Connection(loop, sock, link, self._on_event, unread, self._has_room)
        self._link = link
        link.welcome()
        self._connection.push()

    def cut(self, error: SubletError) -> None:
        """The lease is over, or its rights are."""
        self._connection.cut(error)

    # ---- what comes ----

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case Called():
                close_all(happening.fds)
                self._called(happening)
            case Event() | Opened():
                close_all(happening.fds)
            case Data():
                self._typed(happening)
            case Credit():
                self._credited(happening)
            case Closed():
                self._closed(happening)
            case Over():
                self._over()
            case _:
                pass

    def _called(self, called: Called) -> None:
        try:
            self._answer(called.call, loads(HolderCall, called.body))
        except SubletError as error:
            self._link.refuse(called.call, error)
        except Exception as error:  # noqa: BLE001 - what one holder asks must not be able to end the guests of all
            log_internal_error(error)
            self._link.refuse(called.call, internal_error())
        self._connection.push()

    def _answer(self, call: int, request: HolderCall) -> None:
        match request:
            case Start():
                self._start(call, request)
            case Attach():
                self._reply(call, self._attach(request))
            case Connect():
                self._connect(call, request)
            case ListGuests():
                self._reply(call, self._list(request))
            case Detach():
                self._detach(request.guest)
                self._reply(call, Done())
            case Resize():
                self._own_guest(request.guest, RUN).stdio.resize(request.rows, request.cols)
                self._reply(call, Done())
            case SignalGuest():
                self._signal(request)
                self._reply(call, Done())
            case EndGuest():
                self._guests.end_alone(self._own_guest(request.guest, RUN), request.grace_ns)
                self._reply(call, Done())
            case Warm():
                self._warm(request)
                self._reply(call, Done())
            case LendVolume():
                self._reply(call, VolumeLent(ticket=self._volumes.lend(self.front, reads=request.reads)))
            case OpenVolume() | Publish() | Collect() | CopyIn() | ListVolume() | OpenFiles():
                self._of_volume(call, request)
            case _:
                assert_never(request)

    def _reply(self, call: int, reply: HolderReply) -> None:
        self._link.reply(call, dumps(reply))

    # ---- rights ----

    @property
    def _sees(self) -> TenantId | None:
        """The tenant whose guests it may know of; None: all tenants."""
        return None if self.front.operator else self.front.tenant

    def _may(self, operation: str) -> None:
        if not self.front.operator and operation not in self.front.operations:
            raise Unauthorized(f"this connection may not {operation}", do="Ask for a token that allows it.")

    def _live(self) -> tuple[LeaseId, Epoch]:
        """The connection's lease and epoch, if something may be begun under it now."""
        lease, epoch = self.front.lease, self.front.epoch
        if lease is None or epoch is None:
            raise InvalidRequest("this connection is not of a lease", do="Connect with the lease's capability token.")
        if self._node.is_pending(lease, epoch):
            raise Disconnected(
                "what was on the hardware of this lease before is still being cleared away", do="Try again in a moment."
            )
        self._node.check(lease, epoch, self._now_ns())
        return lease, epoch

    def _own_guest(self, guest: str, operation: str) -> GuestProcess:
        found = self._guests.get(guest, self._sees, lease=self.front.lease)
        self._may(operation)
        return found

    # ---- what is asked ----

    def _of_volume(self, call: int, request: AnyCall) -> None:
        if isinstance(request, OpenFiles) and self._link.has_output:  # it holds descriptors until they are taken
            raise CapacityExceeded("earlier answers were not read yet", do="Read them, then ask for more files.")

        def answer(reply: AnyReply | Handed) -> None:
            with self._connection.guard():
                if isinstance(reply, Refusal):
                    self._link.refuse(call, error_of(reply))
                elif isinstance(reply, Handed):
                    self._link.reply(call, dumps(reply.reply), reply.fds)
                else:
                    self._reply(call, reply)
                self._connection.push()

        self._volumes.of_holder(self.front, self._uid, request, answer)

    def _start(self, call: int, request: Start) -> None:
        self._may(RUN)
        lease, _ = self._live()
        tenancy = self._premises.tenancies[lease]

        def begun(guest: GuestProcess | None, failed: SpawnFailed | SubletError | None) -> None:
            with self._connection.guard():
                answer(guest, failed)

        def answer(guest: GuestProcess | None, failed: SpawnFailed | SubletError | None) -> None:
            if isinstance(failed, SubletError):
                self._link.refuse(call, failed)
            elif isinstance(failed, SpawnFailed):
                do = what_to_do(failed, self.front.profile)
                self._reply(call, NotStarted(exit_code=failed.exit_code, message=str(failed), do=do))
            elif guest is not None:
                if request.awaits:
                    guest.stdio.await_reader()
                    self._awaiting.append(guest)
                self._reply(call, Started(guest=guest.id, pid=guest.tree.root.pid))
            self._connection.push()

        self._guests.start(
            tenancy, self.front.profile, request.spec, begun, self._volumes.borrowed(self.front, request.volume)
        )

    def _attach(self, request: Attach) -> Attached:
        guest = self._own_guest(request.guest, RUN if request.stdin or request.lossless else LOGS)
        self._detach(guest.id)
        output = self._link.open_channel()
        stdin = output if request.stdin else 0
        attached = _Attached(self._link, self._connection, guest, output)
        self._attached[guest.id] = attached
        attached.follow(request)
        return Attached(output=output, stdin=stdin, view=guest.view())

    def _connect(self, call: int, request: Connect) -> None:
        """The guest gets its descriptor first: if that fails the holder is told, and nothing has changed."""
        if request.service not in OPERATIONS:
            raise Unsupported(
                f"a holder cannot connect for {request.service.value!r}", do="Connect for calls or a device."
            )
        guest = self._own_guest(request.guest, OPERATIONS[request.service])
        lease, epoch = self._live()
        if not guest.main_runs:
            raise NotFound(f"guest {guest.id} has ended", do="Start another one.")
        if guest.visits is None:
            raise Unsupported(f"guest {guest.id} takes no connections", do="Start it as one that serves.")
        if self._attached:
            raise InvalidRequest("this connection still follows a guest", do="Connect to a guest on one of its own.")
        visit = Visit(
            service=request.service,
            tenant=self.front.tenant,
            lease=lease,
            epoch=epoch,
            operations=self.front.operations,
        )
        ours = guest.visits.connect(visit, self._connection.sock)
        self._reply(call, Connected())
        sock = self._connection.hand_over()
        if sock is not None:
            guest.visits.keep(visit, sock, self.front, ours)
            self._on_over(self)
        elif ours is not None:
            ours.close()

    def _detach(self, guest: str) -> None:
        attached = self._attached.pop(guest, None)
        if attached is not None:
            attached.close()

    def _list(self, request: ListGuests) -> GuestList:
        found = self._guests.of(self._sees, lease=request.lease, guest=request.guest, ended=request.ended)
        if self.front.lease is not None:  # a token of a lease opens what is under that lease
            found = (guest for guest in found if guest.lease == self.front.lease)
        return self._guests.page(found, request.after)

    def _signal(self, request: SignalGuest) -> None:
        try:
            number = signal.Signals(request.number)
        except ValueError:
            raise InvalidRequest(f"{request.number} is no signal", do="`kill -l` lists them.") from None
        self._guests.signal(self._own_guest(request.guest, RUN), number, tree=request.tree)

    def _warm(self, request: Warm) -> None:
        self._may(RUN)
        if self.front.profile is not Profile.LOCAL:  # it would import, as the supervisor's user, what a tenant names
            raise Unsupported("warm interpreters are for this machine's own user", do="Start the guest without one.")
        self._warm_up(request)

    # ---- streams ----

    def _of(self, channel: int) -> _Attached | None:
        return next((one for one in self._attached.values() if one.channel == channel), None)

    def _typed(self, data: Data) -> None:
        attached = self._of(data.channel)
        if attached is not None:
            attached.typed(data)

    def _credited(self, credit: Credit) -> None:
        attached = self._of(credit.channel)
        if attached is not None:
            attached.resume()

    def _has_room(self) -> None:
        for attached in tuple(self._attached.values()):
            attached.resume()

    def _closed(self, closed: Closed) -> None:
        attached = self._of(closed.channel)
        if attached is not None:
            attached.input_ended()
            if closed.is_whole:
                self._detach(attached.guest.id)

    def _over(self) -> None:
        try:
            for awaited in self._awaiting:
                awaited.stdio.stop_awaiting_reader()
            for guest in tuple(self._attached):
                self._detach(guest)
        finally:
            self._on_over(self)


class _Attached:
    """One guest's streams on this connection: a follower of its output, and the way to its input."""

    def __init__(self, link: Link, connection: Connection, guest: GuestProcess, channel: int) -> None:
        self.guest = guest
        self.channel = channel
        self._link = link
        self._connection = connection
        self._following: Following | None = None
        self._waiting = bytearray()
        """Input that the guest has no room for yet; the holder was granted no more than this may be."""
        self._input_over = False
        self._stdin = False

    def follow(self, request: Attach) -> None:
        """Begin."""
        self._stdin = request.stdin
        if request.stdin:
            self.guest.stdio.on_stdin_room = self._feed_more
        self.guest.listeners.append(self._news)
        self._following = self.guest.stdio.attach(
            self, request.offset, lossless=request.lossless, follow=request.follow
        )

    def close(self) -> None:
        """End; the guest goes on."""
        if self._following is not None:
            self.guest.stdio.detach(self._following)
            self._following = None
        if self._news in self.guest.listeners:
            self.guest.listeners.remove(self._news)
        if self._stdin and self.guest.stdio.on_stdin_room == self._feed_more:  # who came later has it now
            self.guest.stdio.on_stdin_room = None
        self._link.close(self.channel)
        self._connection.push()

    def resume(self) -> None:
        """The holder has room again."""
        if self._following is not None:
            self.guest.stdio.resume(self._following)

    # ---- a follower of its output ----

    # It is called in the guest's turn, so whatever fails in here is this connection's end, and not the guest's.

    def room(self) -> int:
        may = 0
        with self._connection.guard():
            may = self._connection.may_add(self._link.may_send(self.channel))
        return may - OUTPUT_HEAD.size * (1 + may // PIECE_MAX) if may > OUTPUT_HEAD.size else 0

    def take(self, stream: int, offset: int, data: bytes) -> None:
        with self._connection.guard():
            for start in range(0, len(data), PIECE_MAX):
                piece = data[start : start + PIECE_MAX]
                self._link.send_data(self.channel, OUTPUT_HEAD.pack(stream, offset + start) + piece)
            self._connection.push()

    def gap(self, offset: int, dropped: int) -> None:
        with self._connection.guard():
            self._link.event(
                dumps(GuestNews(guest=self.guest.id, what="gap", detail=f"{dropped} bytes are no longer kept")),
                channel=self.channel,
            )
            self._connection.push()

    def end(self) -> None:
        """That was all its output. If it is gone, that is said last, to those too who came after it."""
        with self._connection.guard():
            if self.guest.is_gone:
                self._send_news(self.guest.last_news())
            self._link.finish(self.channel)
            self._connection.push()

    # ---- its input ----

    def typed(self, data: Data) -> None:
        """What the holder sends for stdin."""
        if self._stdin and not self._input_over:
            self._waiting += data.data
            self._feed()
        else:
            self._link.consumed(self.channel, data.cost)

    def input_ended(self) -> None:
        """Nothing more comes for stdin."""
        if self._stdin and not self._input_over:
            self._input_over = True
            self._feed()

    def _feed_more(self) -> None:
        with self._connection.guard():
            self._feed()

    def _feed(self) -> None:
        if self._waiting:
            accepted = self.guest.stdio.feed(bytes(self._waiting))
            del self._waiting[:accepted]
            self._link.consumed(self.channel, accepted)
            self._connection.push()
        if self._input_over and not self._waiting:
            self.guest.stdio.close_stdin()

    def _news(self, news: GuestNews) -> None:
        with self._connection.guard():
            if news.what != "gone":  # it is said when the last of its output is
                self._send_news(news)

    def _send_news(self, news: GuestNews) -> None:
        self._link.event(dumps(news), channel=self.channel)
        self._connection.push()
