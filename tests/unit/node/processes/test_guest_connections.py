"""Connections that were handed to a guest: whose they are, and that exactly those are cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.processes.guest_connections import GuestConnections
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import loads
from sublet.wire.guests import Front, Profile, Service, Visit

A, B = LeaseId("l-a"), LeaseId("l-b")
ANN, BEN = TenantId("ann"), TenantId("ben")


class Bench:
    def __init__(self) -> None:
        self.loop = Loop(SystemClock())
        self.inbox, self.guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.visits = GuestConnections(self.loop, self.inbox.fileno())
        self.holders: list[socket.socket] = []

    def connected(self, lease: LeaseId = A, tenant: TenantId = ANN, n: int = 5) -> socket.socket:
        """A holder's end; its connection is the guest's from now on."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        visit = Visit(service=Service.WORK, tenant=tenant, lease=lease, epoch=Epoch(1, n), operations=())
        self.visits.pass_socket(visit, theirs)
        data, fds, _, _ = socket.recv_fds(self.guest, 65536, 1)
        assert loads(Visit, data) == visit
        socket.socket(fileno=fds[0]).close()
        self.visits.keep(visit, theirs, Front(tenant=tenant, operator=False, profile=Profile.TENANT))
        self.holders.append(ours)
        return ours

    def is_cut(self, holder: socket.socket) -> bool:
        try:
            return holder.recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.visits.cut()
        for sock in (self.inbox, self.guest, *self.holders):
            sock.close()
        self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_those_of_a_lease_or_of_a_tenant_are_cut_and_no_others(bench: Bench) -> None:
    mine, other, bens = bench.connected(), bench.connected(B), bench.connected(tenant=BEN)
    bench.visits.cut(lease=B)
    assert [bench.is_cut(one) for one in (mine, other, bens)] == [False, True, False]
    bench.visits.cut(tenant=ANN, lease=B)
    assert not bench.is_cut(mine)
    bench.visits.cut(tenant=ANN)
    assert [bench.is_cut(one) for one in (mine, bens)] == [True, False]
    assert bench.visits.tenants == [BEN]
    bench.visits.cut()
    assert bench.is_cut(bens)
    assert len(bench.visits) == 0


def test_after_its_guest_was_resumed_a_connection_is_cut_with_the_lease_that_the_guest_has_now(bench: Bench) -> None:
    """Its guest was parked and goes on under another lease. An attach to that one must cut it; what becomes of the
    lease before is nothing to it."""
    holder = bench.connected(A)
    bench.visits.now_under(B, Epoch(1, 9))
    bench.visits.cut(lease=A)
    assert not bench.is_cut(holder)
    bench.visits.cut(lease=B)
    assert bench.is_cut(holder)
