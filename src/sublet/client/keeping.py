"""Hands a lease that was acquired without a fabric (by `sublet run`) to a keeper, once its command runs for longer
than a moment."""

from __future__ import annotations

import logging
import os

import msgspec

from sublet.client.address import find_address
from sublet.client.clocks import client_clock
from sublet.client.core import Grant
from sublet.client.fabric import Fabric
from sublet.client.lease import Lease
from sublet.lease.policy import RenewalPolicy
from sublet.values import NS_PER_S, RenewMode
from sublet.wire.http import GrantAnswer


def keep(answer: bytes, *, sent_ns: int, busy_since_ns: int, renew: str) -> Lease:
    """The lease of this answer, renewed from now on. Something has run under it since ``busy_since_ns``, and does so
    until ``let_go``. What there is to say of it the supervisor says on the command's stderr, so it is not logged."""
    logging.getLogger("sublet.client").addHandler(logging.NullHandler())
    grant = Grant(view=msgspec.json.decode(answer, type=GrantAnswer).lease, sent_ns=sent_ns)
    fabric = Fabric(find_address(None, None, None, os.environ), client_clock())
    lease = fabric._open(grant, RenewalPolicy(mode=RenewMode(renew)))
    with fabric._lock:
        fabric._book.begin(lease._held, object(), since_ns=busy_since_ns)
    fabric._keeper.wake()
    return lease


def let_go(lease: Lease) -> float:
    """Renew it no more. How many seconds it was busy that the office has not heard of: the release says so."""
    fabric, held = lease._fabric, lease._held
    with fabric._lock:
        busy_ns = 0 if held.over else held.holder.busy_time.unsaid_ns(fabric._clock.now_ns())
    lease._leave()  # and not ``leave``, which would let it outlive us: it is about to be released
    fabric.close(0.1)
    return busy_ns / NS_PER_S
