"""The studio's API: its requests and answers, and what each of them does. The table makes routes and document."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.studio.records import CheckpointLocator, Entry, Terms
from sublet.studio.service import PersonSessions
from sublet.studio.session_bill import LINES, LINES_MAX
from sublet.studio.views import Json
from sublet.values import MIB, Exclusivity, Tier, valid_text
from sublet.wire.decoders import decode_as
from sublet.wire.http import BillLine, ErrorView

MODEL_MAX: Final = 100
_T = TypeVar("_T")
_Wait = Annotated[float, msgspec.Meta(ge=0, le=30 * 86_400)]
_OrSmaller: TypeAlias = bool | Annotated[int, msgspec.Meta(ge=MIB, le=1 << 50)]
_OrModel: TypeAlias = bool | Annotated[str, msgspec.Meta(max_length=MODEL_MAX)]


class StartBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new session."""

    name: str
    vram: Annotated[int, msgspec.Meta(ge=MIB, le=1 << 50)]
    """Bytes on each device."""
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    ttl: Annotated[float, msgspec.Meta(ge=2, le=7 * 86_400)] | None = None
    """Seconds."""
    tier: Tier = Tier.INTERACTIVE
    pay_priority: bool = False
    """Whether its leases go before requests of their tier that do not pay, for the rate of the office."""
    exclusivity: Exclusivity | None = None
    model: str | None = None
    or_smaller: _OrSmaller = False
    """Whether less may be offered where no more is free: any amount, or at least these bytes on each device."""
    or_model: _OrModel = False
    """Whether another model may be offered where none of ``model`` is free: any, or those named."""
    wait: _Wait | None = None
    """Seconds in the queue; null: until it is granted."""
    later: bool = False
    """Ask for no lease now."""

    def terms(self) -> Terms:
        model = None if self.model is None else valid_text(self.model, "model", most=MODEL_MAX)
        exclusivity = None if self.exclusivity is None else self.exclusivity.value
        return Terms(
            vram=self.vram,
            count=self.count,
            ttl_s=self.ttl,
            tier=self.tier.value,
            pay_priority=self.pay_priority,
            exclusivity=exclusivity,
            model=model,
            or_smaller=self.or_smaller,
            or_model=_model(self.or_model, model),
        )


class ResumeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Another lease."""

    wait: _Wait | None = None
    or_smaller: _OrSmaller = False
    or_model: _OrModel = False
    """As of a new session, for this lease."""


class StopBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rest, or end."""

    now: bool = False
    """Also while something runs in it."""


class OfferView(msgspec.Struct, kw_only=True):
    """What the office offers in the place of what was asked for."""

    text: str
    offered: int
    """Bytes on each device."""
    asked: int
    model: str | None
    """Of the device that is offered, where it is another than was asked for."""
    asked_model: str | None
    estimate: float | None
    """Seconds until what was asked for may be granted."""
    price: str | None
    """Of what is offered, for an hour; known where the model is another."""
    asked_price: str | None
    currency: str | None
    until: str
    """RFC 3339: until when it may be accepted."""
    accepted: bool


class LeaseOfSession(msgspec.Struct, kw_only=True):
    """One lease that the session has or had."""

    id: str
    epoch: tuple[int, int]
    devices: list[str]
    begun: str = msgspec.field(name="from")
    until: str | None
    reason: str
    """Why it ended."""
    detail: str
    saved_at: str | None


class CellOfSession(msgspec.Struct, kw_only=True):
    """What one of its last cells consumed."""

    cell: int
    lease: str
    at: str
    held_seconds: float
    busy_seconds: float
    vram_leased_byte_seconds: float
    """Of GPU memory that was leased."""
    launches: int | None
    """Null where they were not counted."""
    bytes_saved: int
    waited_seconds: float
    """In the queue."""
    failed: bool


class SessionView(msgspec.Struct, kw_only=True):
    """One session, as ``sublet session show --json`` prints it."""

    id: str
    name: str
    state: str
    end: str | None
    person: str
    """Whose it is; empty: the office's owner's."""
    tenant: str
    terms: Terms
    started_at: str
    changed_at: str
    active_at: str
    """Now while something runs in it; else its last activity on record: it was asked for, taken over, a cell of it
    ended, or its served program had requests (to the minute)."""
    volume: str
    saved_at: str | None
    checkpoint: CheckpointLocator | None
    """The last that was saved in a volume; if no cell or `%gpu checkpoint` saved it, known once its lease is over."""
    lease: str | None
    """The lease that it has, or its request in the queue."""
    remaining: float | None
    busy: bool
    suspended: bool
    position: int | None
    estimate: float | None
    estimate_error: float | None
    """Seconds within which nine tenths of the office's estimates were right."""
    reason: str
    offer: OfferView | None
    leases: list[LeaseOfSession]
    cells: list[CellOfSession]
    bill: BillLine | None


class LineOfBill(msgspec.Struct, kw_only=True):
    """What one cell consumed, or what of a lease no cell had."""

    session: str
    name: str
    cell: int | None
    """Null: outside of cells."""
    lease: str
    """Empty: of leases that no record of the session names."""
    at: str | None
    """When the cell ended."""
    held_seconds: float
    busy_seconds: float
    gpu_seconds: float
    """Of whole devices."""
    vram_leased_byte_seconds: int
    """Of GPU memory that was leased."""
    launches: int | None
    """Null where they were not counted."""
    launch_errors: int | None
    """Known of a lease, in its line outside of cells; null in others, and where none were counted."""
    bytes_saved: int
    waited_seconds: float
    """In the queue."""
    cost: float
    currency: str
    end: str | None
    """How the lease ended, in its line outside of cells."""
    failed: bool


class BillOfSession(msgspec.Struct, kw_only=True):
    """Lines of the bill of one session as of one moment; all lines come to ``total``, to the unit."""

    session: str
    name: str
    until: str
    """The moment, RFC 3339."""
    total: BillLine | None
    """The session's line of the office's bill; null where nothing was held."""
    count: int
    """Of all lines."""
    before: int
    """Of lines before these."""
    lines: list[LineOfBill]
    next: str | None
    """For ``after``: the lines behind these, of the same moment; null: there are none."""


class ExplainView(msgspec.Struct, kw_only=True):
    """A session, and the office's explanation of its lease or request."""

    session: SessionView
    lease: dict[str, Any] | None


class StudioErrorView(ErrorView, kw_only=True):
    """An error, with the numbers that the command line prints of it."""

    would_fit: int | None = None
    """Bytes of GPU memory that would fit now."""
    estimate: float | None = None
    """Seconds until what was asked for may be granted."""


class StudioErrorBody(msgspec.Struct, kw_only=True):
    """What the API answers in place of what was asked for."""

    error: StudioErrorView


class Ask:
    """What a program asks of the API."""

    def __init__(self, ident: str, query: Mapping[str, str], body: bytes, only: str | None) -> None:
        """``only``: the one session that the token opens, if it does not open all."""
        self.id, self.query, self.only, self._body = ident, query, only, body

    def read(self, shape: type[_T]) -> _T:
        try:
            return decode_as(self._body or b"{}", shape)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the message does not fit: {error}", do="See the docs for its form.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the message is not JSON: {error}", do="Send one JSON object in UTF-8.") from None


Handler = Callable[[PersonSessions, Ask], object]


def _list(mine: PersonSessions, ask: Ask) -> list[Json]:
    found = mine.all(ended=ask.query.get("all") in ("1", "true"))
    return [view for view in found if ask.only in (None, view["id"])]


def _start(mine: PersonSessions, ask: Ask) -> Json:
    body = ask.read(StartBody)
    return mine.start(body.name, body.terms(), wait_s=_seconds(body.wait), later=body.later)


def _resume(mine: PersonSessions, ask: Ask) -> Json:
    body = ask.read(ResumeBody)
    return mine.resume(ask.id, wait_s=_seconds(body.wait), or_smaller=body.or_smaller, or_model=body.or_model)


def _rest(mine: PersonSessions, ask: Ask) -> Json:
    return mine.rest(ask.id, now=ask.read(StopBody).now)


def _end(mine: PersonSessions, ask: Ask) -> Json:
    return mine.end(ask.id, now=ask.read(StopBody).now)


def _bill(mine: PersonSessions, ask: Ask) -> Json:
    limit = ask.query.get("limit", str(LINES))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= LINES_MAX:
        raise InvalidRequest("limit is no number of lines", do=f"Give a number from 1 to {LINES_MAX}.")
    return mine.bill(ask.id, after=ask.query.get("after", ""), most=int(limit))


def _records(mine: PersonSessions, ask: Ask) -> list[Entry]:
    after = ask.query.get("after", "0")
    if not after.isascii() or not after.isdigit() or len(after) > 15:
        raise InvalidRequest("after is not the number of a record", do="Give the number of the last that is known.")
    return mine.records(int(after), ask.only)


def _add_record(mine: PersonSessions, ask: Ask) -> bool:
    return mine.add_record(ask.read(Entry), ask.only)


def _model(or_model: bool | str, model: str | None) -> bool | str:
    if or_model is not False and model is None:
        raise InvalidRequest("or_model is for a session that asks for a model", do="Give `model` as well.")
    return or_model if isinstance(or_model, bool) else valid_text(or_model, "or_model", most=MODEL_MAX)


def _seconds(wait: float | None) -> float:
    return float("inf") if wait is None else wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """One thing that a program may ask."""

    method: str
    path: str
    handler: Handler
    summary: str
    answer: Any
    request: Any = None
    query: Mapping[str, str] = field(default_factory=dict)
    asks_office: bool = True
    """Else it is answered from the studio's own files, also while the office does not answer."""


_SESSION: Final = "/v1/sessions/{id}"
API: Final = (
    ApiRoute(
        method="GET",
        path="/v1/sessions",
        handler=_list,
        summary="The sessions, newest first",
        answer=list[SessionView],
        query={"all": "1: also those that have ended"},
    ),
    ApiRoute(
        method="POST",
        path="/v1/sessions",
        handler=_start,
        summary="Start a session, and ask for its first lease",
        request=StartBody,
        answer=SessionView,
    ),
    ApiRoute(
        method="GET",
        path=_SESSION,
        handler=lambda mine, ask: mine.one(ask.id),
        summary="One session",
        answer=SessionView,
    ),
    ApiRoute(
        method="GET",
        path=f"{_SESSION}/explain",
        handler=lambda mine, ask: mine.explain(ask.id),
        summary="Why it waits, or what may end its lease",
        answer=ExplainView,
    ),
    ApiRoute(
        method="GET",
        path=f"{_SESSION}/bill",
        handler=_bill,
        summary="Its bill, a line for each cell",
        answer=BillOfSession,
        query={
            "after": "`next` of the answer before, for the lines behind it",
            "limit": f"how many lines at most (default {LINES}, at most {LINES_MAX})",
        },
    ),
    ApiRoute(
        method="POST",
        path=f"{_SESSION}/resume",
        handler=_resume,
        summary="Ask for another lease",
        request=ResumeBody,
        answer=SessionView,
    ),
    ApiRoute(
        method="POST",
        path=f"{_SESSION}/accept",
        handler=lambda mine, ask: mine.accept(ask.id),
        summary="Accept what is offered",
        answer=SessionView,
    ),
    ApiRoute(
        method="POST",
        path=f"{_SESSION}/decline",
        handler=lambda mine, ask: mine.decline(ask.id),
        summary="Decline what is offered, and wait for what was asked for",
        answer=SessionView,
    ),
    ApiRoute(
        method="POST",
        path=f"{_SESSION}/rest",
        handler=_rest,
        summary="Give the lease back, or leave the queue",
        request=StopBody,
        answer=SessionView,
    ),
    ApiRoute(
        method="POST",
        path=f"{_SESSION}/end",
        handler=_end,
        summary="End the session: it gets no further lease",
        request=StopBody,
        answer=SessionView,
    ),
    ApiRoute(
        method="GET",
        path="/v1/records",
        handler=_records,
        summary="The records behind the person's sessions, for the person's own notebooks",
        answer=list[Entry],
        query={"after": "the number of the last record that is known"},
        asks_office=False,
    ),
    ApiRoute(
        method="POST",
        path="/v1/records",
        handler=_add_record,
        summary="Append a record, if the table of states allows it; false: its number is taken",
        request=Entry,
        answer=bool,
        asks_office=False,
    ),
)


def openapi_document(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the table, as JSON-like data; ``version`` is that of the studio."""
    messages: list[Any] = [StudioErrorBody, *(one.answer for one in API), *(one.request for one in API if one.request)]
    schemas, components = msgspec.json.schema_components(messages, ref_template="#/components/schemas/{name}")
    by_message = {repr(message): schema for message, schema in zip(messages, schemas, strict=True)}

    def content(message: Any) -> dict[str, Any]:
        return {"application/json": {"schema": by_message[repr(message)]}}

    paths: dict[str, dict[str, Any]] = {}
    for one in API:
        words = [one.method.lower(), *re.findall("[a-z]+", one.path.removeprefix("/v1/"))]
        error = {"description": "An error: what happened, and what to do now.", "content": content(StudioErrorBody)}
        operation: dict[str, Any] = {
            "operationId": "_".join(words),
            "summary": one.summary,
            "responses": {"200": {"description": "Done.", "content": content(one.answer)}, "default": error},
            "security": [{"personToken": []}],
            "parameters": [
                {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
                for name, text in one.query.items()
            ],
        }
        if "{id}" in one.path:
            named = {"name": "id", "in": "path", "required": True, "description": "Id or name of the session."}
            operation["parameters"].append({**named, "schema": {"type": "string"}})
        if one.request is not None:
            operation["requestBody"] = {"required": True, "content": content(one.request)}
        paths.setdefault(one.path, {})[one.method.lower()] = operation
    described = "As the studio's page, `sublet person token` or an invite shows it once."
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sublet studio",
            "version": version,
            "summary": "Sessions of GPU work that outlive their leases, for many people.",
            "description": "Sizes are integer bytes, durations are seconds, times are RFC 3339 in UTC. Another "
            "person's session and no session look the same. A body has at most 16 KiB.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"personToken": {"type": "http", "scheme": "bearer", "description": described}},
        },
    }
