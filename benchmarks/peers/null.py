"""A server that does nothing: whatever it is asked, it gives the same answer. It shows how fast the generator can go.

It runs as a process of its own (``python -m benchmarks.peers.null SOCKET``) and ends with its input.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.load.http1 import Address, Step, connect
from benchmarks.procs import Child, wait_until

__all__ = ["NullServer"]

_BODY: Final = b'{"answer":"grant","lease":{"id":"0123456789abcdef"}}' + b" " * 400
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


class NullServer:
    """The server as a child of the harness."""

    name: Final = "null server"

    def __init__(self, folder: Path) -> None:
        socket_path = folder / "null.sock"
        self.address = Address(unix=str(socket_path))
        self.child = Child(
            [sys.executable, "-m", "benchmarks.peers.null", str(socket_path)], name=self.name, pipes=True
        )
        try:
            wait_until(self._listens, within_s=60, what="the null server did not listen")
        except BaseException:
            self.child.end()
            raise

    def cycle(self) -> list[Step]:
        """Two requests of about the size of ours, so that the generator has the same to do."""
        body = '{"request_id":"bench-<<n>>","wants":[{"kind":"memory","amount":1048576}],"ttl":60.0,"wait":0}'
        take = {"id": ('"id":"', '"')}
        return [
            Step(path="/v1/leases", body=body, expect='"answer":"grant"', take=take),
            Step(path="/v1/leases/<<id>>/release", body="{}"),
        ]

    def _listens(self) -> bool:
        try:
            connect(self.address).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.end()


def serve(path: str) -> None:
    """One thread, epoll, no parsing: a request is small enough to arrive in one piece."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(256)
    epoll = select.epoll()
    epoll.register(listener.fileno(), select.EPOLLIN)
    epoll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    connections: dict[int, socket.socket] = {}
    while True:
        for fd, _ in epoll.poll():
            connection = connections.get(fd)
            if connection is not None:
                try:
                    goes_on = connection.recv(1 << 16) and connection.send(_ANSWER)
                except OSError:  # the client has closed it with an answer unread; the others are served on
                    goes_on = 0
                if not goes_on:
                    epoll.unregister(fd)
                    connections.pop(fd).close()
            elif fd == listener.fileno():
                connection, _ = listener.accept()
                connections[connection.fileno()] = connection
                epoll.register(connection.fileno(), select.EPOLLIN)
            else:
                return


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.argv[1])
