"""A guest that serves: each connection is greeted and given to the service it is for, on a thread of its own.

The main thread stays free for what must be there: the holder's functions, and the signals that interrupt them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping

from sublet.errors import SubletError, Unsupported
from sublet.guest.frameworks import free_caches
from sublet.guest.inbox import Inbox
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link import Link

__all__ = ["ServeOne", "start_serving"]

_log = logging.getLogger("sublet.guest")

ServeOne = Callable[[Conversation, Visit], None]
"""Serves one connection until it is over, or until it returns; then it is hung up."""


def start_serving(inbox: Inbox, services: Mapping[Service, ServeOne]) -> threading.Thread:
    """From now on, until the inbox ends. The threads do not keep the guest from ending."""
    thread = threading.Thread(target=_accept, args=(inbox, services), name="sublet-inbox", daemon=True)
    thread.start()
    return thread


def _accept(inbox: Inbox, services: Mapping[Service, ServeOne]) -> None:
    while (came := inbox.take()) is not None:
        visit, sock = came
        name = f"sublet-{visit.service.value}"
        threading.Thread(target=_serve, args=(visit, sock, services), name=name, daemon=True).start()


def _serve(visit: Visit, sock: socket.socket, services: Mapping[Service, ServeOne]) -> None:
    if visit.service is Service.CACHES:
        with sock:
            free_caches()
        return
    conversation = Conversation(sock, Link.accepting())
    try:
        conversation.welcome()
        serve = services.get(visit.service)
        if serve is None:
            conversation.link.end(Unsupported(f"this guest does not serve {visit.service.value!r}"))
        else:
            serve(conversation, visit)
    except SubletError as error:
        conversation.link.end(error)
    except Exception:  # noqa: BLE001 - one connection must not be able to end what the others are served
        _log.exception("a connection for %s was given up", visit.service.value)
        conversation.link.end(SubletError("the guest made a mistake; its log has the details"))
    finally:
        with contextlib.suppress(OSError):
            conversation.hang_up()
