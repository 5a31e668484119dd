"""A guest that serves: what a holder says on its line it says again, and a little more."""

from __future__ import annotations

import os
import signal
import sys
import threading

from sublet.guest.inbox import Inbox
from sublet.guest.serving import start_serving
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link_events import Called, Over


def echo(conversation: Conversation, visit: Visit) -> None:
    while True:
        for happening in conversation.wait(1.0):
            if isinstance(happening, Over):
                return
            if isinstance(happening, Called):
                if happening.body == b"leave":
                    return
                if happening.body == b"exit":
                    os._exit(7)
                warm = "warm" if "sublet.guest.zygote" in sys.modules else "fresh"
                said = f"{visit.lease} {visit.service} {sys.stdin.read()!r} {warm} ".encode()
                conversation.link.reply(happening.call, said + happening.body, happening.fds)
        conversation.flush()


def main() -> None:
    start_serving(Inbox.from_stdin(), {Service.WORK: echo, Service.JUPYTER: echo})
    threading.Event().wait()


def deaf() -> None:
    """The same, and no wish to leave."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main()
