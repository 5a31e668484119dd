"""A guest's line to the supervisor through which it saves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from sublet.guest.checkpoints import GuestLine
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.volumes import MESSAGE_MAX, OpenVolume, VolumeCall, VolumeOpened

WAIT_S = 60.0
OPENED = VolumeOpened(lease=LeaseId("l-1"), epoch=Epoch(1, 2), name="ckpt", folder="/v", staging="/v/s", size=1 << 20)


def test_a_guest_saves_although_many_ask_the_supervisor_at_once(tmp_path: Path) -> None:
    """A full backlog is waited for: a save that failed for it would be a checkpoint that is not there."""
    path = os.fspath(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        there.bind(path)
        there.listen(0)
        there.settimeout(WAIT_S)
        other = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        other.connect(path)
        heard: list[VolumeCall] = []

        def serve() -> None:
            there.accept()[0].close()
            with there.accept()[0] as asking:
                asking.settimeout(WAIT_S)
                heard.append(loads(VolumeCall, asking.recv(MESSAGE_MAX)))
                asking.send(dumps(OPENED))

        serving = threading.Timer(0.05, serve)
        serving.start()
        line = GuestLine(path, lambda: (OPENED.lease, OPENED.epoch))
        stack.callback(line._drop)
        volume = line.open()
        serving.join(WAIT_S)
    assert heard == [OpenVolume()]
    assert volume.name == "ckpt"
