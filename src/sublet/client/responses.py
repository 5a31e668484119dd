"""Decodes the office's answers into values and errors; nothing else decodes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from sublet import errors
from sublet.client.model import Offer
from sublet.client.steps import HttpReply
from sublet.errors import CapacityExceeded, Disconnected, LeaseEnded, QuotaExceeded, SubletError, Unsupported
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import Kind
from sublet.wire.decoders import decode_as
from sublet.wire.http import (
    AcquireRequest,
    AcquisitionRequest,
    EndView,
    ErrorBody,
    ErrorView,
    GrantAnswer,
    GrantsAnswer,
    LeaseView,
    OfferAnswer,
    PlaceAnswer,
    RefusalAnswer,
)

T = TypeVar("T")
Acquired = GrantAnswer | PlaceAnswer | OfferAnswer
AcquiredMany = GrantsAnswer | Acquired
_NEWER: Final = "Bring client and office to the same version of Sublet."
_NAMES: Final = {Kind.GPU: "GPU", Kind.CPU: "cores", Kind.MEMORY: "memory", Kind.BLOCK: "storage"}


def decode(reply: HttpReply, shape: type[T]) -> T:
    """The answer, or the error it carries."""
    if not 200 <= reply.status < 300:
        raise _error(reply)
    answer: T = _decoded(reply, shape)
    return answer


def decode_acquired(reply: HttpReply, request: AcquireRequest) -> Acquired:
    """The answer to an acquire. A refusal is raised, with its numbers."""
    answer: Acquired = _acquired(reply, request, Acquired | RefusalAnswer)
    return answer


def decode_acquired_many(reply: HttpReply, request: AcquisitionRequest) -> AcquiredMany:
    """The answer to a request for many leases. A refusal is raised, with its numbers."""
    answer: AcquiredMany = _acquired(reply, request.request, AcquiredMany | RefusalAnswer)
    return answer


def _acquired(reply: HttpReply, request: AcquireRequest, shape: Any) -> Any:
    if 200 <= reply.status < 300:
        answer = _decoded(reply, shape)
    else:
        try:
            answer = decode_as(reply.body, RefusalAnswer)
        except msgspec.DecodeError:
            raise _error(reply) from None
    if isinstance(answer, RefusalAnswer):
        raise refused(answer, request)
    return answer


def decode_lease(reply: HttpReply) -> LeaseView:
    """The lease in whatever answer tells of it."""
    if not 200 <= reply.status < 300:
        raise _error(reply)
    answer: Acquired = _decoded(reply, Acquired)
    return answer.lease


def refused(answer: RefusalAnswer, request: AcquireRequest) -> SubletError:
    """A well-formed request that was refused."""
    do = answer.do or None
    if answer.code == "quota":
        return QuotaExceeded(answer.reason, do=do, reason=answer.code)
    if answer.code == "unsupported":
        return Unsupported(answer.reason, do=do, reason=answer.code)
    offer, kind = None, kind_of(request)
    if answer.would_fit and request.wants:
        offer = Offer(kind=kind, asked=request.wants[0].amount, offered=answer.would_fit)
    error = unavailable(kind, answer.reason, offer=offer, estimate=answer.estimate, do=do)
    error.reason, error.transient = answer.code, answer.code != "too_big"
    return error


def kind_of(request: AcquireRequest) -> Kind:
    """The main kind of resource that it asks for. A parked lease was on a GPU."""
    return Kind(request.wants[0].kind) if request.wants else Kind.GPU


def unavailable(
    kind: Kind, reason: str, *, offer: Offer | None = None, estimate: float | None = None, do: str | None = None
) -> CapacityExceeded:
    """``GPU unavailable: …``, and the like for the other kinds."""
    head = f"{_NAMES[kind]} unavailable: "
    text = reason if reason.startswith(head) else head + reason
    return CapacityExceeded(text, offer=offer, estimate=estimate, do=do)


def end_of(view: EndView) -> LeaseEnd:
    """The end of a lease as the office tells it."""
    end = LeaseEnd(reason=EndReason(view.reason), at=view.at, detail=view.detail, way=view.way, parked=view.parked)
    if view.saved_at is not None:
        end = replace(end, saved_at=view.saved_at)
    return replace(end, resume_hint=view.resume_hint) if view.resume_hint else end


def error_of(view: ErrorView) -> SubletError:
    """The error the office named. One this version does not know is still a `SubletError` with its text."""
    found = getattr(errors, view.kind, None)
    if not (isinstance(found, type) and issubclass(found, SubletError)):
        return SubletError(view.message, do=view.do, reason=view.reason)
    error = found(view.message, do=view.do)
    error.reason = view.reason
    if isinstance(error, LeaseEnded) and view.end is not None:
        error.end = end_of(view.end)
    return error


def _error(reply: HttpReply) -> SubletError:
    try:
        return error_of(decode_as(reply.body, ErrorBody).error)
    except msgspec.DecodeError:
        pass
    if reply.status in (502, 503, 504):  # a proxy speaks for an office that does not
        return Disconnected(f"the office did not answer: status {reply.status} from what stands before it")
    return Unsupported(f"what answered is not an office: status {reply.status}", do="Check the address.")


def _decoded(reply: HttpReply, shape: Any) -> Any:
    try:
        return decode_as(reply.body, shape)
    except msgspec.DecodeError as error:
        raise Unsupported(f"the office's answer cannot be read: {error}", do=_NEWER) from error
