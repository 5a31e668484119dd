"""Starts at ``%load_ext sublet`` what a first cell would wait for longest: a warm interpreter for kernels.

It is the supervisor that has it made, and where no office runs yet one is started for that, as the first cell would
have started it, and with the same end: it ends by itself when it is not needed. Nothing is leased, and nothing waits:
all of it happens beside the notebook, and whatever goes wrong there the first cell finds out for itself, and says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final

from sublet.background import start_thread
from sublet.client.address import Address, find_address
from sublet.client.office import ensure_office
from sublet.errors import SubletError
from sublet.wire.jupyter import KERNEL_IMPORTS
from sublet.wire.zygote import Warm, fingerprint

HEAD_START_S: Final = 0.1
"""So long the notebook waits at the most until the office's process is there: what it loads next would be in the
way."""


def begin(env: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """See to it in the background. None where there is nothing to begin: the office is elsewhere, or we are a tenant of
    it, whose guests come from no warm interpreter."""
    try:
        address = find_address(None, None, None, env)
    except SubletError:
        return None
    if address.home is None or address.token is not None or sys.platform != "linux":
        return None
    begun = threading.Event()
    thread = start_thread("warm", lambda: _warm(address, wish_of(env), begun))
    begun.wait(HEAD_START_S)
    return thread


def wish_of(env: Mapping[str, str]) -> Warm:
    """What kernels of a notebook with this environment come from."""
    return Warm(imports=KERNEL_IMPORTS, env=dict(fingerprint(env)))


def _warm(address: Address, wish: Warm, begun: threading.Event) -> None:
    assert address.home is not None
    with contextlib.suppress(SubletError, OSError):
        ensure_office(address.home, wish=wish, begun=begun.set)
        begun.set()
        from sublet.client.guests import warm

        warm(address, wish)
