"""Decodes bytes into objects: the only module that unpickles.

Loading runs code of the pickle's writer. So it is called in a guest or in the holder's own process, on state of
the same tenant, and nowhere else: broker, agent, supervisor and stores keep the bytes closed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sublet.durable import rebuild
from sublet.errors import InvalidRequest
from sublet.state.transfer.encoded import NO_BUFFER, Head
from sublet.state.transfer.figures import Assembly, assembling
from sublet.state.transfer.memory import copy_bytes, fresh_memory
from sublet.state.transfer.names import MAINS, MOVED


def decode(
    head: bytes | memoryview,
    buffers: Sequence[memoryview],
    *,
    writable: bool = True,
    met: dict[int, Any] | None = None,
    assembly: Assembly | None = None,
) -> Any:
    """The value again, on the very memory of ``buffers``.

    With ``writable`` it comes back as it was: what the program could write to it can write to again, for which buffers
    that are read-only are copied. Without, nothing is copied and arrays are read-only (tensors are copied all the
    same, since they cannot be). ``met`` gets every object under the number that ``Encoded.met`` gives it. ``assembly``:
    one of ``assembly_here``, for figures that are here already; the caller then has it ``finish``.
    """
    parsed = Head.parse(head)
    if len(buffers) != len(parsed.buffers):
        raise InvalidRequest(f"the value has {len(parsed.buffers)} buffers, not {len(buffers)}")
    memory: list[memoryview] = []
    for shape, given in zip(parsed.buffers, buffers, strict=True):
        view = memoryview(given).cast("B") if given.nbytes else memoryview(b"")
        if view.nbytes != shape.length:
            raise InvalidRequest(f"a buffer of {shape.length} bytes came with {view.nbytes}")
        if writable and shape.writable and view.readonly and view.nbytes:
            own = fresh_memory(view.nbytes)
            copy_bytes(own, view)
            view = own
        memory.append(view if writable else view.toreadonly())

    def windows() -> Iterator[memoryview]:
        for one in parsed.windows:
            place = slice(one.offset, one.offset + one.length)
            yield memory[one.buffer][place] if one.buffer != NO_BUFFER else memoryview(b"")

    with assembling(assembly_here() if assembly is None else assembly) as figures:
        if not parsed.splices and met is None:
            try:
                value = pickle.loads(parsed.stream, buffers=windows())  # noqa: S301 - in a guest, or the holder's process
            except (ModuleNotFoundError, AttributeError) as error:
                if not _names_what_moved(error):
                    raise
                value = _ByOldNames(io.BytesIO(parsed.stream), buffers=windows()).load()
        else:
            source = _Spliced(parsed, memory) if parsed.splices else io.BytesIO(parsed.stream)
            unpickler = _Unpickler(source, buffers=windows())
            try:
                value = unpickler.load()
            finally:
                if met is not None:  # of what cannot be loaded it tells how far it came
                    met.update(unpickler.memo.copy())
                # A module that was imported meanwhile may keep a frame, and with it those below it: a caller that then
                # tells by reference counts what has no other reference must not meet this memo.
                unpickler.memo.clear()
        if type(value) is rebuild.Flat:
            root, value = value, value.value
            if met is not None:
                for n in [n for n, one in met.items() if one is root or one is value]:
                    del met[n]
        if assembly is None:
            figures.finish()
            if met is not None:
                met.update(figures.met)
    return value


def assembly_here(find: Callable[[int], Any] | None = None) -> Assembly:
    """For ``decode``. ``find``: gives the object here under a number of ``Encoded.met``, or None."""
    return Assembly(lambda stream: _Unpickler(io.BytesIO(stream)).load(), find)


def _names_what_moved(error: ModuleNotFoundError | AttributeError) -> bool:
    """Whether a class was not found because it has moved since it was saved: its module is gone, or lacks it."""
    if isinstance(error, ModuleNotFoundError):
        return error.name in {module for module, _ in MOVED}
    text = str(error)
    return any(f"'{module}'" in text and f"'{name}'" in text for module, name in MOVED)


class _ByOldNames(pickle.Unpickler):
    """Finds classes whose module has moved since they were saved."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(MOVED.get((module, name), module), name)


class _Unpickler(_ByOldNames):
    """Takes nothing of ``__main__`` by its name: what stands there under that name here may be something else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in MAINS:
            raise InvalidRequest(f"{name} of the program itself travels by name only", do="Make it in a module.")
        return super().find_class(module, name)


class _Spliced:
    """The whole pickle, read from the head and from the buffers that stand between its parts."""

    def __init__(self, head: Head, memory: Sequence[memoryview]) -> None:
        stream, at = memoryview(head.stream), 0
        self._parts: list[memoryview] = []
        for splice in head.splices:
            self._parts += [stream[at : splice.position], memory[splice.buffer]]
            at = splice.position
        self._parts.append(stream[at:])
        self._parts.reverse()

    def readinto(self, into: Any) -> int:
        target = memoryview(into).cast("B")
        done = 0
        while done < target.nbytes and self._parts:
            part = self._parts[-1]
            n = min(part.nbytes, target.nbytes - done)
            target[done : done + n] = part[:n]
            self._advance(n)
            done += n
        return done

    def read(self, n: int = -1) -> bytes:
        if n < 0:
            n = sum(part.nbytes for part in self._parts)
        found = bytearray()
        while len(found) < n and self._parts:
            part = self._parts[-1][: n - len(found)]
            found += part
            self._advance(part.nbytes)
        return bytes(found)

    def readline(self) -> bytes:
        """Only protocols before ours have lines, but unpicklers ask for the method."""
        found = bytearray()
        while not found.endswith(b"\n") and (one := self.read(1)):
            found += one
        return bytes(found)

    def _advance(self, n: int) -> None:
        rest = self._parts[-1][n:]
        if rest.nbytes:
            self._parts[-1] = rest
        else:
            self._parts.pop()
