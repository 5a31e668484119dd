"""The program of a worker: a guest that runs Python functions for the holder of its lease.

It stays warm for the length of the lease. Each connection for ``work`` has functions, kept buffers and generators of
its own; one for ``device`` is served by the part that knows devices. Needs the standard library, and cloudpickle where
functions come by value.
"""

from __future__ import annotations

import os
import sys

from sublet.guest.caps import cap_torch
from sublet.guest.current import PAGE_VARIABLE, own_device
from sublet.guest.inbox import Inbox
from sublet.guest.main_thread import MainThreadQueue
from sublet.guest.serving import start_serving
from sublet.guest.streams import Speech, take_over
from sublet.guest.work import GuestWorker
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.page import PageReader


def main() -> None:
    """Until the lease ends."""
    page = PageReader(os.environ[PAGE_VARIABLE])
    cap_torch(page.read().devices, own=own_device())
    inbox = Inbox.from_stdin()
    main_queue = MainThreadQueue()
    main_queue.arrange()
    speech = Speech()
    _, _, records = take_over(speech)
    worker = GuestWorker(main_queue, page, speech, records)
    start_serving(inbox, {Service.WORK: worker.serve, Service.DEVICE: _serve_device})
    try:
        main_queue.work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _serve_device(conversation: Conversation, visit: Visit) -> None:
    from sublet.guest.device_service import serve_device

    serve_device(conversation, visit)
