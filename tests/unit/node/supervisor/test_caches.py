"""Guests are asked to give back what their frameworks keep; nobody waits for long, and no answer is no obstacle."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.processes.guest_connections import GuestConnections
from sublet.node.supervisor import parking
from sublet.node.supervisor.parking import Caches
from sublet.values import Epoch, LeaseId, TenantId
from tests.left_open import left_of, open_now

PATIENCE_S = 20.0


class Asked:
    """A guest as far as this is concerned, and its end of the inbox."""

    def __init__(self, loop: Loop, *, serves: bool = True) -> None:
        inbox, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inbox = inbox.detach()
        self.visits = GuestConnections(loop, self.inbox) if serves else None
        self.main_runs = True
        self.tenant, self.lease, self.epoch = TenantId("local"), LeaseId("l-1"), Epoch(1, 1)

    def take(self) -> int:
        _, fds, _, _ = socket.recv_fds(self.theirs, 65536, 4)
        return fds[0]

    def close(self) -> None:
        os.close(self.inbox)
        self.theirs.close()


def turn_until(loop: Loop, done: list[bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done:
        assert time.monotonic() < end_s
        loop.turn(0.02)


@pytest.mark.parametrize("how", ["answer", "silence", "death", "no guest that serves", "nobody"])
def test_then_comes_once_whatever_they_do(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "WAIT_S", 0.1 if how == "silence" else PATIENCE_S)
    loop = Loop(SystemClock())
    guests: list[Any] = [] if how == "nobody" else [Asked(loop, serves=how != "no guest that serves") for _ in range(2)]
    before = open_now()
    done: list[bool] = []
    Caches(loop).free(guests, PATIENCE_S, lambda: done.append(True))
    assert not done, "not before it returns"
    if how == "answer":
        for guest in guests:
            os.close(guest.take())
            loop.turn(0.02)
    elif how == "death":
        for guest in guests:
            guest.theirs.close()
    turn_until(loop, done)
    for _ in range(3):
        loop.turn(0.01)
    assert done == [True]
    assert not left_of(open_now, before)
    for guest in guests:
        guest.close()
