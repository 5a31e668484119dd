"""What a worker's answer means to the caller: a value, or an exception with the words of the other side."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any, NamedTuple

from sublet import errors
from sublet.errors import Disconnected, InvalidRequest, LeaseEnded, RemoteError, SubletError
from sublet.guest.cargo import load, unstow
from sublet.lease.value import LeaseEnd, rfc3339
from sublet.values import EndReason, LeaseId
from sublet.wire.frames import close_all
from sublet.wire.happenings import Refused, Replied
from sublet.wire.page import ended_error
from sublet.wire.work import Flag, Said, Told, unpack

__all__ = ["Cancelled", "GeneratorBegun", "Items", "Many", "RemoteTraceback", "Unlike", "read", "remote_exception"]


class RemoteTraceback(Exception):
    """Where it was raised, in the words of the other process. It is the cause of what was raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class Cancelled(NamedTuple):
    """It was cancelled."""

    began: bool


class Unlike(NamedTuple):
    """The function was named, and there the name means another."""

    why: str


class GeneratorBegun(NamedTuple):
    """The result is a generator, which is over there."""

    number: int
    is_async: bool


class Items(NamedTuple):
    """Some more items of one."""

    items: list[Any]
    value: Any
    """What it returned, with ``is_done``."""
    is_done: bool


class Many(NamedTuple):
    """Results of many calls, and the exception that ended them early."""

    results: list[Any]
    error: BaseException | None
    took_ns: int


def read(came: Replied | Refused, lease: LeaseId) -> Any:
    """The result. Raises what the function raised, or what kept it from being called."""
    if isinstance(came, Refused):
        raise came.error
    try:
        return _read(unpack(came.body), came.fds, lease)
    finally:
        close_all(came.fds)


def _read(said: Said, fds: tuple[int, ...], lease: LeaseId) -> Any:
    match said.kind:
        case Told.VALUE:
            return _value(said, fds)
        case Told.RAISED:
            raise remote_exception(*_value(said, fds))
        case Told.GENERATOR:
            return GeneratorBegun(said.subject, Flag.ASYNC in said.flags)
        case Told.ITEMS:
            items, value = _value(said, fds)
            return Items(items, value, Flag.DONE in said.flags)
        case Told.MANY:
            results, told = _value(said, fds)
            return Many(results, None if told is None else remote_exception(*told), said.amount)
        case Told.CANCELLED:
            return Cancelled(Flag.BEGAN in said.flags)
        case Told.ENDED:
            raise _lease_ended(said, lease)
        case Told.FAULT:
            raise _fault(said)
        case Told.UNLIKE:
            return Unlike(json.loads(said.blob)["why"])
        case Told.OPENED:
            return json.loads(said.blob)
        case _:
            raise Disconnected(f"the worker answered with {said.kind}, which this version does not know")


def _value(said: Said, fds: tuple[int, ...]) -> Any:
    head, buffers = unstow(said, fds, _nothing_is_kept)
    try:
        return load(head, buffers)
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"the result needs the module {error.name!r}, which this Python does not have",
            do="Return plain values, or install it here as well.",
        ) from error


def remote_exception(pickled: bytes | None, name: str, text: str, trace: str) -> BaseException:
    """The exception as itself if it can be had; with the remote traceback as its cause."""
    error: BaseException
    try:
        loaded = None if pickled is None else pickle.loads(pickled)  # noqa: S301 - holder and worker are one program
    except Exception:  # noqa: BLE001 - its class is not here, or does not take what it kept
        loaded = None
    if isinstance(loaded, BaseException):
        error = loaded
    else:
        error = RemoteError(f"{name}: {text}", type_name=name, traceback=trace, do="")
    error.__cause__ = RemoteTraceback(trace)
    return error


def _lease_ended(said: Said, lease: LeaseId) -> LeaseEnded:
    told = json.loads(said.blob)
    reason = EndReason(told["reason"])
    error = ended_error(lease, reason, told["detail"])
    error.end = LeaseEnd(reason=reason, at=rfc3339(time.time_ns()), detail=told["detail"])
    return error


def _fault(said: Said) -> SubletError:
    told = json.loads(said.blob)
    kind = getattr(errors, told["kind"], SubletError)
    if not (isinstance(kind, type) and issubclass(kind, SubletError)):
        kind = SubletError
    made: SubletError = kind(told["message"], do=told["do"])
    return made


def _nothing_is_kept(number: int) -> int:
    raise Disconnected(f"the worker speaks of buffer {number}, which was never sent")
