"""What a session returns: a piece of device memory, a module. Each is valid only with its session.

A handle knows what it stands for and what became of it, so that the mistakes one makes with handles are told apart
where they are made: freed before, never allocated after all, of another session.
"""

from __future__ import annotations

from typing import Final

from sublet.errors import InvalidRequest, NotFound
from sublet.values import format_size, shown
from sublet.wire.device import ModuleKind

_FREED: Final = "freed"
_UNLOADED: Final = "unloaded"


class Buffer:
    """A piece of device memory. Made by ``GpuSession.mem_alloc``."""

    __slots__ = ("_gone", "_owner", "number", "size")

    def __init__(self, owner: object, number: int, size: int) -> None:
        self._owner = owner
        self._gone = ""
        """Why it is not there any more."""
        self.number = number
        self.size = size

    @property
    def is_live(self) -> bool:
        """Whether it can be used, as far as is known here."""
        return not self._gone

    def __repr__(self) -> str:
        return f"<Buffer {self.number}: {self._gone or format_size(self.size)}>"

    def check(self, owner: object, call: str) -> None:
        """Whether ``owner`` may use it now."""
        if self._owner is not owner:
            raise NotFound(f"{call}: {self!r} belongs to another session", do="Allocate one in this session.")
        if self._gone == _FREED:
            raise NotFound(f"{call}: buffer {self.number} was freed before", do="Use a buffer only until it is freed.")
        if self._gone:
            raise NotFound(f"{call}: buffer {self.number} is not there: {self._gone}", do="Allocate another one.")

    def span(self, owner: object, offset: int, length: int, call: str) -> None:
        """Whether ``owner`` may touch these bytes of it."""
        if self._gone or self._owner is not owner:
            self.check(owner, call)
        if offset < 0 or length < 0 or offset + length > self.size:
            raise InvalidRequest(
                f"{call}: {length} bytes from {offset} on are not within the {self.size} bytes of buffer {self.number}",
                do="Fix offset and length.",
            )

    def end(self, why: str = _FREED) -> None:
        """It is gone."""
        self._gone = self._gone or why


class Module:
    """A loaded module. Made by ``GpuSession.module_load``."""

    __slots__ = ("_gone", "_owner", "kernels", "kind", "number")

    def __init__(self, owner: object, number: int, kind: ModuleKind, kernels: dict[str, str]) -> None:
        self._owner = owner
        self._gone = ""
        self.number = number
        self.kind = kind
        """In which of the kinds it was given in the device took it."""
        self.kernels = kernels
        """Each with what it takes, as people write it."""

    @property
    def is_live(self) -> bool:
        """Whether it can be used, as far as is known here."""
        return not self._gone

    def __repr__(self) -> str:
        state = self._gone or f"{self.kind}, {', '.join(self.kernels)}"
        return f"<Module {self.number}: {state}>"

    def check(self, owner: object, call: str) -> None:
        """Whether ``owner`` may use it now."""
        if self._owner is not owner:
            raise NotFound(f"{call}: {self!r} belongs to another session", do="Load it in this session.")
        if self._gone:
            raise NotFound(f"{call}: module {self.number} was {self._gone} before", do="Load it again.")

    def kernel(self, owner: object, name: str) -> str:
        """What a kernel takes, in words; raises with the names there are."""
        if self._gone or self._owner is not owner:
            self.check(owner, "launch")
        found = self.kernels.get(name)
        if found is None:
            names = ", ".join(sorted(self.kernels)) or "none"
            raise NotFound(f"launch: this module has no kernel {shown(name)}", do=f"It has: {names}.")
        return found

    def end(self, why: str = _UNLOADED) -> None:
        """It is gone."""
        self._gone = self._gone or why
