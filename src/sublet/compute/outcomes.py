"""Turns a worker's answer into a value, or into an exception with the remote traceback."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sublet import errors
from sublet.errors import Disconnected, InvalidRequest, LeaseEnded, OutOfMemory, RemoteError, SubletError
from sublet.guest.cargo import fetch_buffers, load
from sublet.lease.value import rfc3339
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import LeaseId
from sublet.wire.frames import close_all
from sublet.wire.link_events import CallRefused, Replied
from sublet.wire.page import ended_error
from sublet.wire.sealed_memory import take_over
from sublet.wire.work import Flag, ReceivedMessage, WorkerMessage, unpack


class RemoteTraceback(Exception):
    """Where it was raised, in the words of the other process. It is the cause of what was raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class CallCancelled(NamedTuple):
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


class CallResults(NamedTuple):
    """Results of many calls, and the exception that ended them early."""

    results: list[Any]
    error: BaseException | None
    took_ns: int
    is_begun: bool = True
    """False where the worker was lost before it began any of them; ``error`` is then how it ended."""


def read(came: Replied | CallRefused, lease: LeaseId, *, of_tenant: bool = False) -> Any:
    """The result. Raises what the function raised, or what kept it from being called. ``of_tenant``: large parts come
    into memory of this process, so that a result that is kept does not keep memory of a tenant's lease."""
    if isinstance(came, CallRefused):
        raise came.error
    fds = came.fds
    try:
        if of_tenant and fds:
            given, fds = fds, ()
            fds = _taken_over(given)
        return _read(unpack(came.body), fds, lease)
    finally:
        close_all(fds)


def _taken_over(fds: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return take_over(fds)
    except OSError as error:
        raise OutOfMemory(f"what was sent found no memory here ({error})") from error


def _read(message: ReceivedMessage, fds: tuple[int, ...], lease: LeaseId) -> Any:
    match message.kind:
        case WorkerMessage.VALUE:
            return _value(message, fds)
        case WorkerMessage.RAISED:
            raise remote_exception(*_value(message, fds))
        case WorkerMessage.GENERATOR:
            return GeneratorBegun(message.subject, Flag.ASYNC in message.flags)
        case WorkerMessage.ITEMS:
            items, value = _value(message, fds)
            return Items(items, value, Flag.DONE in message.flags)
        case WorkerMessage.MANY:
            failure = _value(message, fds)
            return CallResults([], None if failure is None else remote_exception(*failure), message.amount)
        case WorkerMessage.CANCELLED:
            return CallCancelled(Flag.BEGAN in message.flags)
        case WorkerMessage.ENDED:
            raise _lease_ended(message, lease)
        case WorkerMessage.FAULT:
            raise _fault(message)
        case WorkerMessage.UNLIKE:
            return Unlike(json.loads(message.blob)["why"])
        case WorkerMessage.OPENED:
            return json.loads(message.blob)
        case _:
            raise Disconnected(f"the worker answered with {message.kind}, which this version does not know")


def read_many(
    parts: list[tuple[ReceivedMessage, tuple[int, ...]]],
    lost: tuple[int, Sequence[bytes]] = (0, ()),
    *,
    of_tenant: bool = False,
) -> CallResults:
    """The results of a call of many that were made, in order: those that were sent, and ``lost``, which the worker had
    made and not sent, with the item they begin at. One that cannot be loaded ends them, with its error. ``parts`` is
    empty afterwards. ``of_tenant``: as for ``read``."""
    results: list[Any] = []
    try:
        for index, (message, fds) in enumerate(parts):
            if of_tenant and fds:
                parts[index] = message, ()
                fds = _taken_over(fds)
                parts[index] = message, fds
            if message.kind == WorkerMessage.RESULTS and message.amount == len(results) and len(message.pieces) == 2:
                end = message.pieces[0].length
                _take(results, pickle.loads(message.data[:end]), message.data[end:])  # noqa: S301 - one program
            elif message.kind == WorkerMessage.RESULT and message.amount == len(results):
                results.append(_value(message, fds))
            elif message.amount > len(results):
                break  # one before it is missing, which no worker of ours leaves out
        first, pickles = lost
        if first <= len(results):
            results += map(pickle.loads, pickles[len(results) - first :])
    except ModuleNotFoundError as error:
        return CallResults(results, _no_module(error), 0)
    except Exception as error:  # noqa: BLE001 - a class of the holder's that cannot be loaded here
        return CallResults(results, error, 0)
    finally:
        while parts:
            close_all(parts.pop()[1])
    return CallResults(results, None, 0)


def _take(results: list[Any], values: list[Any], pickles: memoryview) -> None:
    """Add the values of a message; those that have a pickle of their own are loaded one by one."""
    done = 0
    for index, pickled in pickle.loads(pickles).items() if pickles else ():  # noqa: S301 - as above
        results += values[done:index]
        results.append(pickle.loads(pickled))  # noqa: S301 - as above
        done = index + 1
    results += values[done:]


def _no_module(error: ModuleNotFoundError) -> InvalidRequest:
    return InvalidRequest(
        f"the result needs the module {error.name!r}, which this Python does not have",
        do="Return plain values, or install it here as well.",
    )


def _value(message: ReceivedMessage, fds: tuple[int, ...]) -> Any:
    head, buffers = fetch_buffers(message, fds, _nothing_is_kept)
    try:
        return load(head, buffers)
    except ModuleNotFoundError as error:
        raise _no_module(error) from error


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


def _lease_ended(message: ReceivedMessage, lease: LeaseId) -> LeaseEnded:
    end = json.loads(message.blob)
    reason = EndReason(end["reason"])
    error = ended_error(lease, reason, end["detail"])
    error.end = LeaseEnd(reason=reason, at=rfc3339(time.time_ns()), detail=end["detail"])
    return error


def _fault(message: ReceivedMessage) -> SubletError:
    fault = json.loads(message.blob)
    kind = getattr(errors, fault["kind"], SubletError)
    if not (isinstance(kind, type) and issubclass(kind, SubletError)):
        kind = SubletError
    made: SubletError = kind(fault["message"], do=fault["do"])
    return made


def _nothing_is_kept(number: int) -> int:
    raise Disconnected(f"the worker speaks of buffer {number}, which was never sent")
