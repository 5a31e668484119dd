"""A ``GpuSession`` on one side of a socketpair, the guest's service on the other, in one process."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

from sublet.compute.session import GpuSession
from sublet.compute.session_engine import Engine
from sublet.compute.session_line import DeviceLine
from sublet.devices.account import MemoryAccount
from sublet.devices.host import HostDevice
from sublet.devices.interface import Device
from sublet.guest.device_service import DeviceService
from sublet.guest.serving import _serve
from sublet.guest.usage_counters import LeaseAccounts
from sublet.values import MIB, NS_PER_S, Epoch, LeaseId, TenantId
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link import Link
from sublet.wire.page import PageReader, PageView, PageWriter, time_namespace
from sublet.wire.usage_counters import TallyFile

LEASE, EPOCH = LeaseId("l-7"), Epoch(1, 42)
VISIT = Visit(service=Service.DEVICE, tenant=TenantId("local"), lease=LEASE, epoch=EPOCH, operations=("run",))


class SessionPair:
    """One guest, and as many sessions as are asked for."""

    def __init__(self, place: Path, cache: str, cap_bytes: int = 16 * MIB, open_device: Any = None) -> None:
        self._cache = cache
        self.writer = PageWriter.create(str(place / "page"), self.view())
        self.tally = TallyFile.create(str(place / "tally"))
        mine = TallyFile.open(str(place / "tally"))
        self.service = DeviceService(PageReader(str(place / "page")), LeaseAccounts((cap_bytes,), mine))
        self.service.open_device = open_device or self._open
        self._threads: list[threading.Thread] = []

    def view(self, **changes: Any) -> PageView:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        facts: dict[str, Any] = {
            "lease": LEASE,
            "epoch": EPOCH,
            "deadline_ns": now_ns + 3600 * NS_PER_S,
            "now_ns": now_ns,
            "namespace": time_namespace(),
            "devices": ("local/gpu0",),
        }
        return PageView(**{**facts, **changes})

    def _open(self, name: str, account: MemoryAccount) -> Device:
        return HostDevice(name, account, cache=self._cache)

    def line(self) -> DeviceLine:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(
            target=_serve, args=(VISIT, theirs, {Service.DEVICE: self.service.serve}), daemon=True
        )
        thread.start()
        self._threads.append(thread)
        talk = Conversation(ours, Link.connecting())
        talk.greet()
        return DeviceLine(talk)

    def session(self, **options: Any) -> GpuSession:
        return GpuSession._over(Engine(self.line(), LEASE, EPOCH, **options))

    def close(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a connection is still served"
        self.writer.close()
        self.tally.close()
