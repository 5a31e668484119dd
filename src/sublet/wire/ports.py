"""Ports of this machine: whose process listens on one.

Any user may take a port that is free, such as that of a studio which is just being started again, and a client that
speaks plain HTTP to this machine sends its token to whichever process has it. So before the first byte it looks up
whose sockets these are, as it does for unix sockets (``wire.unix``). With TLS the certificate says who it is.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.wire.unix import ROOT, named_user, stands_for_root

TRUSTED_VARIABLE: Final = "SUBLET_TRUSTED_UID"
"""Another user whose process is meant."""
SYSTEM_UIDS: Final = range(1000)
"""Users that services run as, and no person."""
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS: Final = "0A"
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""Before an address of version 4, where a socket of version 6 has it."""


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    is_accepted: bool


def check_port(sock: socket.socket) -> None:
    """See that the process at the other end, on this machine, is this user's, root's, a service's, or of the user that
    ``SUBLET_TRUSTED_UID`` names. Raises ``InvalidRequest`` otherwise: then nothing was sent.

    A connection that was not accepted yet ends with its listener. So it is the present listener's, or else its own row
    in the table says whose it is.
    """
    if sys.platform != "linux":  # no such table
        return
    host, port = sock.getpeername()[:2]
    theirs, ours = _forms(host, port), _forms(*sock.getsockname()[:2])
    listening = _forms("0.0.0.0", port) | _forms("::", port) | theirs
    found = list(_sockets())
    listeners = {one.uid for one in found if one.state == _LISTENS and one.local in listening}
    accepted = {one.uid for one in found if one.is_accepted and one.local in theirs and one.remote in ours}
    if not listeners:
        raise InvalidRequest(
            f"no socket of this machine listens on port {port} of {host}, as far as can be seen from here; "
            "nothing was sent to it",
            do="Use a unix socket, or https.",
        )
    for uid in sorted(listeners | accepted):
        if not _is_trusted(uid):
            raise InvalidRequest(
                f"port {port} of {host} is served by a process of {named_user(uid)}; nothing was sent to it",
                do=f"If that is meant, set {TRUSTED_VARIABLE}={uid}; else use a unix socket, or https.",
            )


def _is_trusted(uid: int) -> bool:
    return (
        uid in SYSTEM_UIDS
        or uid == os.getuid()
        or os.environ.get(TRUSTED_VARIABLE) == str(uid)
        or (uid != ROOT and stands_for_root(uid))
    )


def _sockets() -> Iterator[_Socket]:
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                next(file, None)  # names of columns
                for line in file:
                    words = line.split()
                    yield _Socket(words[1], words[2], words[3], int(words[7]), words[9] != "0")
        except FileNotFoundError:  # without version 6 there is no table of it
            continue


def _forms(host: str, port: int) -> frozenset[str]:
    """How the tables write this address."""
    if ":" in host:
        forms = [socket.inet_pton(socket.AF_INET6, host)]
    else:
        packed = socket.inet_aton(host)
        forms = [packed, _MAPPED + packed]
    return frozenset(f"{_hex_words(form)}:{port:04X}" for form in forms)


def _hex_words(packed: bytes) -> str:
    """Each word as a number of this machine's byte order."""
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
