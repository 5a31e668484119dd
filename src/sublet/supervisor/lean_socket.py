"""As much of ``socket`` as the supervisor uses.

The real module gives names to three hundred numbers and loads ``selectors``, which together takes half a megabyte.
"""

from __future__ import annotations

import _socket

from sublet.supervisor.stand_in import StandIn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class socket(_socket.socket):  # noqa: N801 - what it is called everywhere
    """A socket, as Python has it: with ``accept``, and for ``with``."""

    __slots__ = ()

    def accept(self) -> tuple[socket, Any]:
        """The next that connected, and from where."""
        fd, address = self._accept()  # type: ignore[attr-defined]
        return socket(self.family, self.type, self.proto, fd), address

    def __enter__(self) -> socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socketpair(family: int = _socket.AF_UNIX, kind: int = _socket.SOCK_STREAM, proto: int = 0) -> tuple[socket, socket]:
    """Two that are connected to each other."""
    first, second = _socket.socketpair(family, kind, proto)
    return socket(fileno=first.detach()), socket(fileno=second.detach())


class Sockets(StandIn):
    """Whatever is no class or function of Python's own is the kernel's, and the same."""

    socket = socket
    socketpair = staticmethod(socketpair)

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else getattr(_socket, name, None)
        if found is None:
            return super().__getattr__(name)
        setattr(self, name, found)  # it is found at once the next time
        return found
