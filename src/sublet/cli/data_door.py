"""Probes an office's data socket, through which commands, calls and logs are reached.

It is another socket than the one for control, so an office may answer one and not the other.
"""

from __future__ import annotations

import os
from typing import Final

from sublet.client.address import Address
from sublet.errors import Disconnected, SubletError
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Greeting

WITHIN_S: Final = 30.0
"""How long a welcome may take. It comes within some milliseconds; on a machine that has much to do, within seconds."""


def data_door_trouble(address: Address, within_s: float = WITHIN_S) -> SubletError | None:
    """What is wrong with the door; None if it welcomes us, or is on another machine."""
    if address.socket is None:
        return None
    greeting = dumps(Greeting(access=address.token or "", as_tenant=address.as_tenant))
    try:
        path = os.fspath(address.socket.with_name("data.sock"))
        Conversation.connect(path, greeting, timeout_s=within_s, named=address.home is None).close()
    except Disconnected as error:
        return Disconnected(
            f"the data door of the office does not answer ({error.message}), so no command, call or log can be reached",
            do="Leases and running commands go on. If it stays so, look into office.log in the state folder, then "
            "restart the office and keep what runs: `sublet down --keep`, then `sublet up`.",
        )
    except SubletError as error:
        return error
    return None
