"""A program's connection to a guest service: ``work``, ``device`` or a kernel's channels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sublet.client.address import Address
from sublet.errors import Disconnected, Unsupported
from sublet.values import GuestId
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.guests import (
    Connect,
    Connected,
    Greeting,
    HolderReply,
    Service,
)

if TYPE_CHECKING:
    from sublet.client.handle import LeaseHandle


def open_line(lease: LeaseHandle, guest: GuestId, service: Service) -> Conversation:
    """Connect to a guest of the lease. Only the guest receives what is sent on it; it outlives the office.

    Raises ``NotFound`` if the guest has ended, ``LeaseEnded`` if the lease has.
    """
    from sublet.wire.http import TokenView  # the parts for a bare machine do without what it needs

    fabric = lease._fabric
    token = fabric._run(fabric._core.query(f"/v1/leases/{lease.id}/token", TokenView)).token
    conversation = connect_data(fabric.address, token)
    try:
        answer = loads(HolderReply, conversation.call(dumps(Connect(guest=guest, service=service))).body)
        if not isinstance(answer, Connected):
            raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
        conversation.begin_anew()
    except BaseException:
        conversation.close()
        raise
    return conversation


def connect_data(address: Address, capability: str) -> Conversation:
    """A connection to the supervisor: with a lease's token; or, to look and stop, as whom the address says we are."""
    if address.socket is None:
        raise Unsupported(
            f"commands run on the machine of their office, and {address.url} is elsewhere",
            do="Start them from a program on that machine.",
        )
    greeting = Greeting(
        capability=capability, access="" if capability else address.token or "", as_tenant=address.as_tenant
    )
    path = os.fspath(address.socket.with_name("data.sock"))
    return Conversation.connect(path, dumps(greeting), named=address.home is None)
