"""Serves a guest's connections: each is greeted, and handed to its service on a thread of its own.

The main thread stays free for what must be there: the holder's functions, and the signals that interrupt them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sublet.background import Guard, is_shortage, start_thread
from sublet.errors import SubletError, Unsupported
from sublet.guest.inbox import Inbox
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.link import Link

_log = logging.getLogger("sublet.guest")

CAPTURE_S: Final = 1.0
"""So long PyTorch is asked again for what it keeps: a part of what the supervisor waits for it."""
CAPTURE_LOOK_S: Final = 0.02

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
        conversation.link.end(SubletError("internal error in the guest; see its log"))
    finally:
        with contextlib.suppress(OSError):
            conversation.hang_up()


# --------------------------- What frameworks keep of a device for later, given back before this process is taken off it
# PyTorch, CuPy and Warp hold on to memory that the program has freed, so that it need not be asked for again. To take
# it along when a process leaves its GPU would cost host memory and time for nothing. Only what is loaded is asked, by
# its own public calls, and only where it has begun to use the device: asking must not begin it.


def free_caches(modules: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Which frameworks gave something back. One that cannot is left as it is, and the others are asked."""
    loaded = sys.modules if modules is None else modules
    done = []
    for name, free in _FREE.items():
        framework = loaded.get(name)
        if framework is None:
            continue
        try:
            if free(framework):
                done.append(name)
        except Exception:  # noqa: BLE001 - it goes along as it is, which only costs
            _log.warning("%s could not give back what it keeps", name, exc_info=True)
    return tuple(done)


def _torch(torch: Any) -> bool:
    if not torch.cuda.is_initialized():
        return False
    until_s = time.monotonic() + CAPTURE_S
    while True:
        try:
            torch.cuda.empty_cache()
        except RuntimeError:  # while another thread captures a graph it frees nothing
            if time.monotonic() >= until_s:
                raise
            time.sleep(CAPTURE_LOOK_S)
        else:
            return True


def _cupy(cupy: Any) -> bool:
    from sublet.devices.primary_contexts import contexts, loaded_driver  # where there is no CuPy it is of no use

    if not contexts(loaded_driver()):  # asked for its pool, one that was only imported would begin CUDA
        return False
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return True


def _warp(warp: Any) -> bool:
    """Its pool gives back what is above a threshold whenever the device is waited for."""
    if not _has_begun(warp):
        return False
    found = False
    for device in warp.get_cuda_devices():
        if device.has_context and warp.is_mempool_enabled(device):
            before = warp.get_mempool_release_threshold(device)
            warp.set_mempool_release_threshold(device, 0)
            try:
                warp.synchronize_device(device)
            finally:
                warp.set_mempool_release_threshold(device, before)
            found = True
    return found


def _has_begun(warp: Any) -> bool:
    """Whether ``warp.init`` was called, which none of its public names tells; where that is kept depends on its age."""
    inner = getattr(warp, "_src", warp)
    return getattr(getattr(inner, "context", None), "runtime", None) is not None


_FREE: Final[Mapping[str, Callable[[Any], bool]]] = {"torch": _torch, "cupy": _cupy, "warp": _warp}
