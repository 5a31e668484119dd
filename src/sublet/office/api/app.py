"""The control API as an ASGI application: finds the route, checks the caller and the message, and answers.

It is plain ASGI on purpose. The route table is data (``routes``), so that one loop here and nothing else decides what
is checked, in which order, and the same table makes the OpenAPI document and the test of rights. Under
Starlette the same small answer took 27 µs of a core, here it takes 15 µs: a request and a response object, a middleware
stack and a router of regular expressions would cost more than deciding.

Order of the checks: wire version, route, method, size, caller, right, query, body. Nothing about an object is said
before the caller is known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from sublet.background import start_task
from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    IdempotencyConflict,
    InvalidRequest,
    JournalError,
    LeaseEnded,
    NotFound,
    Quarantined,
    QuotaExceeded,
    StaleEpoch,
    SubletError,
    Unauthorized,
    Unsupported,
)
from sublet.office.access import UNKNOWN_ORIGIN, Caller
from sublet.office.api.leases import error_view
from sublet.office.api.openapi import openapi_document
from sublet.office.api.processes import PeerConnection
from sublet.office.api.routes import ROUTES, Right, Route, check_message, reader_or_actor
from sublet.office.api.service import JSON, ApiCall, ApiReply, ApiService, CommandCall
from sublet.office.api.sse import EventStream
from sublet.office.ledger.rate_limits import TooMany
from sublet.office.ledger.records import LOCAL_TENANT
from sublet.office.shared_socket import TooManyOfUser
from sublet.values import TenantId
from sublet.wire.decoders import decoder
from sublet.wire.http import WIRE_HEADER, WIRE_VERSION, ErrorBody
from sublet.wire.version import AS_TENANT_HEADER, FOR_TENANT_HEADER

BODY_MAX_BYTES: Final = 1 << 20
"""One message."""

STATUS_OF: Final[Mapping[type[SubletError], int]] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    LeaseEnded: 410,
    StaleEpoch: 409,
    IdempotencyConflict: 409,
    Quarantined: 409,
    CapacityExceeded: 409,
    QuotaExceeded: 409,
    Disconnected: 503,
    JournalError: 503,
    Unsupported: 501,
    SubletError: 500,
}
"""The status of an error is that of the nearest of its classes."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger("sublet.http")
_encode = msgspec.json.Encoder().encode
_WIRE = (WIRE_HEADER.encode(), str(WIRE_VERSION).encode())
_WIRE_NAME = WIRE_HEADER.encode()
_AS_TENANT = AS_TENANT_HEADER.encode()
_FOR_TENANT = FOR_TENANT_HEADER.encode()
_NOBODY: Final = Caller(TenantId(""), False)
_ID: Final = "{id}"


class _Refused(Exception):
    """A request that is answered with an error of another status than its class has."""

    def __init__(self, status: int, error: SubletError, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error
        self.headers = headers


class App:
    """One office's ASGI application."""

    def __init__(self, service: ApiService) -> None:
        self.service = service
        service.document = functools.cache(lambda: _encode(openapi_document(service.identity.version)))
        self._routes: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._routes.setdefault(route.path, {})[route.method] = route
            if route.request is not None:
                decoder(route.request)  # made before the first request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the office speaks HTTP, not {scope['type']}")
        self.service.requests += 1
        headers: tuple[tuple[bytes, bytes], ...] = ()
        try:
            reply = await self._answer(scope, receive)
        except Exception as error:  # noqa: BLE001 - told to the caller as what it is
            reply = _failed(error, scope["method"], scope["raw_path"])
            if isinstance(error, _Refused):
                headers = error.headers
            elif isinstance(error, TooMany | TooManyOfUser):
                await self.service.pace_refusal(error)
                headers = ((b"retry-after", str(error.retry_s).encode()),)
        if reply.stream is not None:
            await self._stream(reply.stream, receive, send)
            return
        size = str(len(reply.body)).encode()
        await send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(b"content-type", reply.content_type), (b"content-length", size), _WIRE, *headers],
            }
        )
        await send({"type": "http.response.body", "body": reply.body})

    async def _answer(self, scope: Scope, receive: Receive) -> ApiReply:
        headers = scope["headers"]
        route, object_id = self._find(scope["method"], scope["raw_path"])
        peer: PeerConnection | None = scope.get("state", {}).get("peer")
        caller, query, recheck = self._check(route, scope["query_string"], headers, peer)
        body = None
        if route.request is not None:
            body = read_message(route.request, await self._read(receive))
        elif any(name == b"content-length" and value != b"0" for name, value in headers):
            await self._read(receive)
        service = self.service
        if caller.studio is not None and caller.tenant != caller.studio:
            check_message(caller, route, object_id, body, service.driver.ledger.state)
        if route.right is not Right.OPEN and (route.method == "GET" or caller.tenant != LOCAL_TENANT):
            await service.turn(caller.tenant)
        recheck()  # a body may come a minute after its head
        made = route.handler(
            service, ApiCall(caller, object_id, query, body, lambda: _wait_disconnect(receive), recheck, peer)
        )
        if isinstance(made, CommandCall):
            return made.finish(await service.driver.submit(made.command, made.render, made.without))
        return made if isinstance(made, ApiReply) else await made

    def _check(
        self, route: Route, query_string: bytes, headers: Iterable[tuple[bytes, bytes]], peer: PeerConnection | None
    ) -> tuple[Caller, dict[str, str], Callable[[], None]]:
        """The caller, the query, and what raises once the caller has lost the rights that were found; raises if there
        is no right to the request, or it is malformed."""
        authorization, as_tenant, for_tenant = None, False, None
        for name, value in headers:
            if name == b"content-length":
                if int(value) > BODY_MAX_BYTES:
                    raise self._too_large()
            elif name == b"authorization":
                if authorization is not None:
                    raise InvalidRequest("there are two Authorization headers", do="Send one.")
                authorization = value
            elif name == _AS_TENANT:
                as_tenant = value == b"1"
            elif name == _FOR_TENANT:
                for_tenant = value
            elif name == _WIRE_NAME and route.right is not Right.OPEN:
                _check_wire(value)
        access, recheck = self.service.access, _nothing_to_check
        caller, origin = _NOBODY, UNKNOWN_ORIGIN if peer is None else peer.origin
        if route.right is Right.OPEN:
            if origin.shared:
                self.service.count_shared(origin, self.service.driver.clock.now_ns())
        else:
            shown = caller = self.service.caller(authorization, origin, as_tenant=as_tenant, keeps=route.keeps)
            if peer is not None:
                peer.note_tenant(caller.tenant)
            if for_tenant is not None:
                caller = access.acting_for(caller, for_tenant)
            changes, found = access.changes, caller

            def recheck() -> None:
                if access.changes == changes:
                    return
                now = access.caller(authorization, origin, as_tenant=as_tenant)
                if now != shown or (for_tenant is not None and access.acting_for(now, for_tenant) != found):
                    raise Unauthorized("your rights have changed since you asked", do="Ask again.")

            self.service.count_requests(caller.tenant, keeps=route.keeps)
            if caller.studio is not None:
                caller = reader_or_actor(caller, route)
            if route.right is Right.OPERATOR and not caller.operator:
                raise Unauthorized("that is for operators", do="Use the token of a tenant with operator rights.")
        return caller, _query(query_string, route) if query_string else {}, recheck

    def _find(self, method: str, raw_path: bytes) -> tuple[Route, str]:
        path, object_id = raw_path.decode("ascii", "replace"), ""
        by_method = self._routes.get(path)
        if by_method is None or _ID in path:
            pieces = path.split("/")
            by_method = None
            if len(pieces) > 3:
                object_id, pieces[3] = _unquoted(raw_path.split(b"/")[3]), _ID
                by_method = self._routes.get("/".join(pieces)) if object_id else None
        if by_method is None:
            raise NotFound(f"there is no {_printable(path)} here", do="The routes are listed in /openapi.json.")
        route = by_method.get(method)
        if route is None:
            allowed = ", ".join(sorted(by_method))
            error = InvalidRequest(f"{_printable(path)} does not take {method}", do=f"It takes {allowed}.")
            raise _Refused(405, error, (b"allow", allowed.encode()))
        return route, object_id

    async def _read(self, receive: Receive) -> bytes:
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body
        pieces, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > BODY_MAX_BYTES:
                raise self._too_large()
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the request broke off", do="Send it again.")
        return b"".join(pieces)

    def _too_large(self) -> _Refused:
        self.service.limit("message_bytes")
        error = InvalidRequest(
            f"the message is larger than {BODY_MAX_BYTES} bytes", do="Send less at a time; data never goes this way."
        )
        return _Refused(413, error, (b"connection", b"close"))

    async def _stream(self, stream: EventStream, receive: Receive, send: Send) -> None:
        service, lease = self.service, stream.lease
        presence = service.driver.presence
        record = None if lease is None else service.driver.ledger.state.leases.get(lease)
        own = record is not None and record.tenant == stream.caller.tenant
        watched = [record.id] if record is not None and own else []
        gone = start_task("stream_end", lambda: _wait_disconnect(receive))
        gone.add_done_callback(lambda _: stream.close())
        for lease_id in watched:
            presence.connected(lease_id)
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), _WIRE]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b": news\n\n", "more_body": True})
            while (frames := await stream.next()) is not None:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            service.hub.leave(stream)
            for lease_id in watched:
                presence.disconnected(lease_id, service.driver.clock.now_ns())
            gone.cancel()


def read_message(shape: Any, raw: bytes) -> Any:
    """The message of a request, as its route says. Raises ``InvalidRequest``."""
    try:
        return decoder(shape).decode(raw or b"{}")
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the message does not fit: {error}", do="See /openapi.json for its form.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the message is not JSON: {error}", do="Send one JSON object in UTF-8.") from None


def _nothing_to_check() -> None:
    """What is open to everybody needs no rights."""


async def _wait_disconnect(receive: Receive) -> None:
    """Until the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_wire(value: bytes) -> None:
    try:
        version = int(value)
    except ValueError:
        raise InvalidRequest(f"the header {WIRE_HEADER} is not a number", do=f"Send {WIRE_VERSION}.") from None
    if abs(version - WIRE_VERSION) > 1:
        older = "client" if version < WIRE_VERSION else "office"
        raise Unsupported(
            f"client and office are too far apart: wire version {version} there, {WIRE_VERSION} here",
            do=f"Upgrade the {older}; it is the older of the two.",
        )


def _query(query_string: bytes, route: Route) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in query_string.split(b"&"):
        raw_name, _, raw_value = piece.partition(b"=")
        if not piece:
            continue
        name = _unquoted(raw_name.replace(b"+", b" "))
        if name not in route.query:
            known = ", ".join(route.query) or "none"
            raise InvalidRequest(f"{_printable(name)} is not a parameter here", do=f"Known are: {known}.")
        if name in found:
            raise InvalidRequest(f"the parameter {name} is given twice", do="Give it once.")
        found[name] = _unquoted(raw_value.replace(b"+", b" "))
    return found


def _unquoted(raw: bytes) -> str:
    """Percent-decoding that refuses what is not one; what it lets through is text without control characters."""
    if b"%" in raw:
        for piece in raw.split(b"%")[1:]:
            if len(piece) < 2 or not all(c in b"0123456789abcdefABCDEF" for c in piece[:2]):
                raise InvalidRequest("the address has a broken percent-encoding", do="Write %25 for a percent sign.")
        raw = unquote_to_bytes(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the address is not UTF-8", do="Encode it as UTF-8, then percent-encode.") from None
    if not text.isprintable():
        raise InvalidRequest("the address has control characters", do="Leave them out.")
    return text


def _printable(text: str) -> str:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return shown if shown.isprintable() else ascii(shown)


def _status_of(error: SubletError) -> int:
    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)


def _failed(error: Exception, method: str, path: bytes) -> ApiReply:
    """The reply to an exception. An unforeseen one is logged."""
    if isinstance(error, _Refused):
        return _error_reply(error.error, error.status)
    if isinstance(error, TooMany):
        return _error_reply(error, 429)
    if isinstance(error, SubletError):
        return _error_reply(error, _status_of(error))
    _log.error("a request could not be answered: %s %s", method, path.decode("ascii", "replace"), exc_info=error)
    mistake = SubletError(
        "internal error in the office; see its log",
        do="Look at the resource before you repeat the request; the office's log has the details.",
    )
    return _error_reply(mistake, 500)


def _error_reply(error: SubletError, status: int) -> ApiReply:
    return ApiReply(status, _encode(ErrorBody(error=error_view(error))), JSON)
