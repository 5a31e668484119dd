"""A guest that serves: each connection is greeted and given to the service it is for, on a thread of its own.

The main thread stays free for what must be there: the holder's functions, and the signals that interrupt them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from sublet.background import Guard, is_shortage, start_thread
from sublet.errors import SubletError, Unsupported
from sublet.guest.frameworks import free_caches
from sublet.guest.inbox import Inbox
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link import Link

_log = logging.getLogger("sublet.guest")

ServeOne = Callable[[Conversation, Visit], None]
"""Serves one connection until it is over, or until it returns; then it is hung up."""


def start_serving(inbox: Inbox, services: Mapping[Service, ServeOne]) -> threading.Thread:
    """From now on, until the inbox ends. The threads do not keep the guest from ending."""
    return start_thread("inbox", lambda: _accept(inbox, services), again=True)


def _accept(inbox: Inbox, services: Mapping[Service, ServeOne]) -> None:
    guard = Guard("inbox")
    while True:
        try:
            came = inbox.take()
        except (OSError, MemoryError) as error:
            if not is_shortage(error):
                raise
            time.sleep(guard.failed(error))
            continue
        if came is None:
            return
        try:
            _begin_serving(*came, services)
        except (OSError, MemoryError, RuntimeError) as error:  # no room for another thread
            came[1].close()
            time.sleep(guard.failed(error, "a connection was closed"))
        else:
            guard.passed()


def _begin_serving(visit: Visit, sock: socket.socket, services: Mapping[Service, ServeOne]) -> None:
    name = f"sublet-{visit.service.value}"
    _ = start_thread("served", lambda: _serve(visit, sock, services), called=name)


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
