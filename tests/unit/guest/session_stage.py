"""A session and all around it but the processes: a page that is written, a device, and a connection in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sublet.devices.account import MemoryAccount
from sublet.devices.host import HostDevice
from sublet.devices.interface import Device
from sublet.errors import NotFound, SubletError
from sublet.guest.device_service import SessionCalls
from sublet.values import MIB, NS_PER_S, Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.device import Batch, BatchDone, CloseSession, DeviceReply, LaunchShape, Op, OpenSession, SessionClosed
from sublet.wire.link_events import Called, CallRefused, Replied
from sublet.wire.page import PageReader, PageView, PageWriter, time_namespace
from tests.unit.wire.pair import Pair, greeted

LEASE, EPOCH = LeaseId("l-7"), Epoch(1, 42)


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Stage:
    """The guest's side, and the holder's."""

    def __init__(self, place: Path, cache: str, cap_bytes: int = 16 * MIB) -> None:
        self._path = str(place / "page")
        self.writer = PageWriter.create(self._path, self.view())
        self.account = MemoryAccount(cap_bytes)
        self.cache = cache
        self.opened: list[Device] = []
        self.calls = SessionCalls(PageReader(self._path), self._open_device)
        self.pair: Pair = greeted()

    def view(self, **changes: Any) -> PageView:
        facts: dict[str, Any] = {
            "lease": LEASE,
            "epoch": EPOCH,
            "deadline_ns": now_ns() + 3600 * NS_PER_S,
            "now_ns": now_ns(),
            "namespace": time_namespace(),
        }
        return PageView(**{**facts, **changes})

    def _open_device(self, place: int) -> Device:
        if place != 0:
            raise NotFound(f"this lease has no device {place}")
        made = HostDevice("host-0", self.account, cache=self.cache)
        self.opened.append(made)
        return made

    def ask(self, call: object, fds: Sequence[int] = ()) -> tuple[Any, tuple[int, ...]]:
        """One call over the connection and its answer; raises what it is refused with."""
        number = self.pair.a.call(dumps(call), fds)
        self.pair.carry()
        [asked] = self.pair.take_b()
        assert isinstance(asked, Called)
        try:
            body, out = self.calls.answer(asked.body, asked.fds)
        except SubletError as error:
            self.pair.b.refuse(asked.call, error)
        else:
            self.pair.b.reply(asked.call, body, out)
        self.pair.carry()
        [told] = self.pair.take_a()
        if isinstance(told, CallRefused):
            raise told.error
        assert isinstance(told, Replied)
        assert told.call == number
        return loads(DeviceReply, told.body), told.fds

    def session(self) -> HeldSession:
        opened, _ = self.ask(OpenSession(lease=LEASE, epoch=EPOCH))
        return HeldSession(self, opened.session)

    def close(self) -> None:
        self.calls.close()
        self.writer.close()


class HeldSession:
    """As the holder has it."""

    lease, epoch = LEASE, EPOCH

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self.number = number
        self.fds: tuple[int, ...] = ()

    def run(self, batch: Batch, fds: Sequence[int] = ()) -> BatchDone:
        done, self.fds = self._stage.ask(batch, fds)
        assert isinstance(done, BatchDone)
        return done

    def do(self, *ops: Op, shapes: tuple[LaunchShape, ...] = (), fds: Sequence[int] = ()) -> BatchDone:
        return self.run(Batch(session=self.number, lease=LEASE, epoch=EPOCH, ops=ops, shapes=shapes), fds)

    def close(self) -> SessionClosed:
        closed, _ = self._stage.ask(CloseSession(session=self.number))
        assert isinstance(closed, SessionClosed)
        return closed
