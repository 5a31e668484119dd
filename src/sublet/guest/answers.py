"""Encodes a worker's answers."""

from __future__ import annotations

import json
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sublet.errors import SubletError
from sublet.guest.cargo import Cargo, encode, load, place_buffers
from sublet.guest.current import note_host_device
from sublet.wire.work import Flag, Piece, Where, WorkerMessage, pack

if TYPE_CHECKING:
    import asyncio

TEXT_MAX: Final = 64 * 1024
"""Letters of a traceback; the beginning of a longer one is left out."""


class WorkerAnswer(NamedTuple):
    """One answer. Either a value, taken apart, or a small JSON object."""

    kind: WorkerMessage
    cargo: Cargo | None = None
    blob: dict[str, Any] | None = None
    flags: Flag = Flag.NONE
    subject: int = 0
    took_ns: int = 0
    before: bytes | None = None
    """What is said before it, as a message of its own."""
    later: asyncio.Future[object] | None = None
    """What it is made of when this is done."""

    def packed(self) -> tuple[bytes, tuple[int, ...]]:
        """Its bytes, and descriptors that are the taker's. A value for which there is no room becomes a fault."""
        if self.cargo is None:
            data = b"" if self.blob is None else json.dumps(self.blob).encode()
            body = pack(
                self.kind,
                flags=self.flags,
                subject=self.subject,
                amount=self.took_ns,
                pieces=(Piece(Where.INLINE, len(data)),),
                inline=(data,),
            )
            return body, ()
        try:
            placed = place_buffers(self.cargo)
        except SubletError as error:
            return fault(error)._replace(took_ns=self.took_ns).packed()
        body = pack(
            self.kind,
            flags=self.flags,
            subject=self.subject,
            amount=self.took_ns,
            pieces=placed.pieces,
            inline=placed.inline,
        )
        return body, placed.fds


def fault(error: SubletError) -> WorkerAnswer:
    """The call could not be made, or what came of it cannot be told."""
    return WorkerAnswer(
        WorkerMessage.FAULT, blob={"kind": error.kind, "message": error.message[:TEXT_MAX], "do": error.do}
    )


def raised(error: BaseException) -> WorkerAnswer:
    """The function raised this."""
    return WorkerAnswer(WorkerMessage.RAISED, encode(encode_error(error), "the exception"))


def encode_error(error: BaseException) -> tuple[bytes | None, str, str, str]:
    """An exception as it travels: itself if it can, and in words."""
    _drop_our_frames(error)
    note_host_device(error)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception with a broken __str__
        text = "(its text cannot be had)"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above
        trace = f"{name}: {text}"
    return _itself(error), name, text[:TEXT_MAX], trace[-TEXT_MAX:]


def _itself(error: BaseException) -> bytes | None:
    """Its pickle. Many can be pickled and not be loaded (their ``__init__`` wants more than it keeps), so it is
    tried."""
    trace, error.__traceback__ = error.__traceback__, None
    try:
        head, buffers = encode(error, "the exception")
        if buffers:
            return None
        load(head)
    except BaseException:  # noqa: BLE001 - whatever goes wrong, it is then told in words
        return None
    finally:
        error.__traceback__ = trace
    return head


def _drop_our_frames(error: BaseException) -> None:
    """Remove the frames between the worker's loop and the function: they tell the user nothing."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("sublet.guest."):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
