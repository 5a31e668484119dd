"""The guest's half of sessions, in a process of its own and without an office.

python -m tests.gpu.far_end FD FOLDER CAP
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from sublet.compute.session import GpuSession
from sublet.compute.session_engine import Engine
from sublet.compute.session_line import DeviceLine
from sublet.errors import Disconnected, GpuSessionEnded, SubletError
from sublet.guest.device_service import DeviceService
from sublet.guest.usage_counters import LeaseAccounts
from sublet.values import NS_PER_S, Epoch, LeaseId, TenantId
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link import Link
from sublet.wire.page import PageReader, PageView, PageWriter, time_namespace
from sublet.wire.usage_counters import TallyFile

__all__ = ["FarEnd"]

LEASE, EPOCH = LeaseId("l-7"), Epoch(1, 42)
VISIT = Visit(service=Service.DEVICE, tenant=TenantId("local"), lease=LEASE, epoch=EPOCH, operations=("run",))
LONG_NS = 3600 * NS_PER_S


class FarEnd:
    """One process with the device, and sessions in it, one after the other."""

    def __init__(self, folder: Path, uuid: str, *, cap_bytes: int) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        view = PageView(
            lease=LEASE,
            epoch=EPOCH,
            deadline_ns=now_ns + LONG_NS,
            now_ns=now_ns,
            namespace=time_namespace(),
            devices=(f"local/{uuid}",),
        )
        self._folder, self._cap = folder, cap_bytes
        self._page = PageWriter.create(str(folder / "page"), view)
        TallyFile.create(str(folder / "tally")).close()
        self._process: subprocess.Popen[bytes] | None = None

    def session(self) -> GpuSession:
        """On a connection, and in a process, of its own."""
        self.kill()
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(self._folder), str(self._cap)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.far_end", *words], pass_fds=(theirs.fileno(),)
            )
        talk = Conversation(ours, Link.connecting())
        talk.greet(60)
        return GpuSession._over(Engine(DeviceLine(talk), LEASE, EPOCH, explain=_explained))

    def kill(self) -> None:
        """SIGKILL; harmless where it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._page.close()


def _explained(error: SubletError) -> SubletError:
    return GpuSessionEnded(f"the far end is gone: {error}") if isinstance(error, Disconnected) else error


def main(fd: int, folder: str, cap: int) -> None:
    """Serve one connection."""
    accounts = LeaseAccounts((cap,), TallyFile.open(os.path.join(folder, "tally")))
    os.environ.setdefault("SUBLET_KERNEL_CACHE", os.path.join(folder, "kernels"))
    service = DeviceService(PageReader(os.path.join(folder, "page")), accounts)
    conversation = Conversation(socket.socket(fileno=fd), Link.accepting())
    conversation.welcome()
    with contextlib.suppress(SubletError):
        service.serve(conversation, VISIT)
    conversation.hang_up()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
