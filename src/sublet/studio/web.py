"""The studio over HTTP: the API under ``/v1`` for tokens, and the pages for browsers with a cookie.

The API takes the token in the ``Authorization`` header and looks at no cookie, so another site cannot use it through a
person's browser. The page takes the cookie and, for what changes anything, a form token that only this page's forms
have; the cookie is not sent from other sites, and a request that names another origin is refused. No secret is part of
an address that is sent: the invite stands behind the ``#`` of its link, which a browser keeps to itself, and a script
of the page puts it into a form. So a program that only looks at the link does not use it up. Bodies and names are
bounded; every text that comes from outside is escaped where it is shown (``page``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, MutableMapping
from importlib import resources
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qs, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send

from sublet import __version__
from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    IdempotencyConflict,
    InvalidRequest,
    JournalError,
    LeaseEnded,
    NotFound,
    QuotaExceeded,
    SubletError,
    Unauthorized,
    Unsupported,
)
from sublet.lazy_dataclass import dataclass
from sublet.logs import fields
from sublet.metrics import CONTENT_TYPE
from sublet.studio import course_page, overview_page, page
from sublet.studio.api import API, Ask, Handler, StartBody, StudioErrorBody, StudioErrorView, openapi_document
from sublet.studio.course_page import Course
from sublet.studio.hub_api import CALLBACK, Handshake
from sublet.studio.hub_people import HubPeople, ServerBody
from sublet.studio.metrics import PERSON, Counted, StudioMetrics
from sublet.studio.open_pages import WHOLE_OFFICE
from sublet.studio.overview import OfficeOverview
from sublet.studio.page import ConnectView
from sublet.studio.people import HUB_LABEL, NotSignedIn, Person, Token, TokenScope
from sublet.studio.service import PersonSessions, Studio
from sublet.studio.sessions import NameTaken, WouldBeLost
from sublet.studio.turns import PagePause, Turns
from sublet.studio.views import Json
from sublet.values import NS_PER_S, parse_duration_ns, parse_size
from sublet.wire.decoders import convert_to

BODY_MAX_BYTES: Final = 16 * 1024
BODY_S: Final = 10.0
"""The whole body of a request has arrived by then."""
RETRY_AFTER_S: Final = 2
SPACING_S: Final = 0.1
"""Between two looks for one open page, however much changes."""
COOKIE: Final = "sublet_studio"
PAGES_AT_ONCE: Final = {"person": 1, "tenant": 2, "everything": 8}
"""Open pages that are made anew at one moment, in threads of their own: no request waits for them. None is begun while
a request is on its way to the office (``turns.PagePause``)."""
HEARTBEAT_S: Final = 10.0
"""The browser of an open page hears something so often, also where nothing has changed."""
HANDSHAKE_COOKIE: Final = "sublet_studio_hub"
HANDSHAKE_S: Final = 600
"""A sign-in at the hub may take so long."""
_PAGES: Final = re.compile(r"/|/office(/audit)?|/course/[a-z0-9._-]{1,63}|/sessions/s-[0-9a-f]{12}/bill")
"""Where a browser may go on to when it is signed in."""
_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_RANGES: Final[Mapping[str, str]] = {
    "vram": "GPU memory is between 1MiB and 1PiB",
    "count": "a session has 1 to 1024 GPUs",
    "ttl": "a time to live is between 2s and 7d",
}
"""What ``StartBody`` takes, for people; a test compares them."""
TOKEN_VALID: Final = "90d"
"""A token that a person makes on the page is good for so long where nothing else is said."""
AUDIT_OF_MAX: Final = 100
STATUS_OF: Final[Mapping[type[SubletError], int]] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    LeaseEnded: 410,
    IdempotencyConflict: 409,
    CapacityExceeded: 409,
    QuotaExceeded: 409,
    Unsupported: 409,
    Disconnected: 503,
    JournalError: 503,
    SubletError: 500,
}
"""The status of an error is that of the nearest of its classes."""
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with none at all a browser would not say where a form comes from
    "cache-control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, nothing is shown in a frame, nothing is kept by a cache."""

_log: Final = logging.getLogger("sublet.studio")
OF_A_SESSION: Final = frozenset((("GET", "/v1/sessions"), ("GET", "/v1/records"), ("POST", "/v1/records")))
"""What names no session and is open to a token of one: it is answered as if there were no other."""

_T = TypeVar("_T")


class TooLarge(InvalidRequest):
    """The body has more bytes than any request of the studio."""


class TooSlow(InvalidRequest):
    """The body did not arrive in time."""


def studio_app(studio: Studio, hub: HubPeople | None = None) -> Starlette:
    """The application for an ASGI server. ``hub``: the JupyterHub that it is a service of. ``state.end_streams`` ends
    the streams of open pages, as is due before the server ends: it would cut them off, and log each as an error."""
    web = _Web(studio, hub)
    routes = [
        Route("/livez", _alive, methods=["GET"]),
        Route("/readyz", web.ready, methods=["GET"]),
        Route("/metrics", web.numbers, methods=["GET"]),
        Route("/metrics/office", web.office_numbers, methods=["GET"]),
        *(Route(one.path, web.api(one.handler, asks_office=one.asks_office), methods=[one.method]) for one in API),
        Route("/openapi.json", _document, methods=["GET"]),
        Route("/", web.page(_sessions), methods=["GET"]),
        Route("/sign-in", web.ask_token, methods=["GET"]),
        Route("/sign-in", web.sign_in, methods=["POST"]),
        Route("/join", web.ask_invite, methods=["GET"]),
        Route("/join", web.join, methods=["POST"]),
        Route(
            "/sign-out", web.form(_sign_out, "/" if hub is None else "/sign-in", asks_office=False), methods=["POST"]
        ),
        Route("/tokens", web.form(_new_token), methods=["POST"]),
        Route("/tokens/revoke", web.form(_revoke_token), methods=["POST"]),
        Route("/start", web.form(_started_by_form, refused=_not_started), methods=["POST"]),
        Route("/office", web.page(_office), methods=["GET"]),
        Route("/office/audit", web.page(_audit), methods=["GET"]),
        Route("/office/audit", web.form(_audited, "/office/audit"), methods=["POST"]),
        Route("/office/live", web.live(_office_part, of_office=True), methods=["GET"]),
        Route("/office/drain", web.form(_drain, "/office"), methods=["POST"]),
        Route("/office/clear", web.form(_clear, "/office"), methods=["POST"]),
        Route("/course/{group}", web.page(_course), methods=["GET"]),
        Route("/course/{group}/live", web.live(_course_part, of_office=True), methods=["GET"]),
        Route("/sessions/{id}/bill", web.page(_bill), methods=["GET"]),
        Route("/sessions/{id}/{what}", web.form(_changed_by_form), methods=["POST"]),
        Route("/live", web.live(_sessions_part), methods=["GET"]),
        Route("/studio.css", _file("studio.css", "text/css"), methods=["GET"]),
        Route("/studio.js", _file("studio.js", "text/javascript"), methods=["GET"]),
        Route("/join.js", _file("join.js", "text/javascript"), methods=["GET"]),
    ]
    if hub is not None:
        routes += [
            Route("/hub/sign-in", web.ask_hub, methods=["GET"]),
            Route(CALLBACK, web.from_hub, methods=["GET"]),
            Route("/v1/hub/servers", web.for_hub(HubPeople.begin_server), methods=["POST"]),
            Route("/v1/hub/servers/end", web.for_hub(HubPeople.end_server), methods=["POST"]),
        ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_BelowPrefix, "" if hub is None else hub.hub.prefix),
            Middleware(Counted, web.metrics, {route.endpoint: route.path for route in routes}),
        ],
        exception_handlers={Exception: _failed, HTTPException: _not_here},
    )
    app.state.end_streams = web.end_streams
    return app


class _BelowPrefix:
    """The application, which a proxy may also show below a path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        is_below = bool(self._prefix) and f"{path}/".startswith(f"{self._prefix}/")
        if is_below:
            scope = {**scope, "path": path.removeprefix(self._prefix) or "/", "raw_path": None}
        before = page.PREFIX.set(self._prefix if is_below else "")
        try:
            await self._app(scope, receive, send)
        finally:
            page.PREFIX.reset(before)


# ---- the page


@dataclass(frozen=True, slots=True)
class _Visit:
    """A browser that is signed in, and what it asks for."""

    studio: Studio
    token: Token
    cookie: str
    request: Request

    @property
    def person(self) -> Person:
        return self.token.person

    @property
    def form(self) -> str:
        """What the forms of this browser carry. The cookie is a secret of 256 bits and does not follow from it."""
        return hashlib.sha256(f"form {self.cookie}".encode()).hexdigest()

    @property
    def mine(self) -> PersonSessions:
        return self.studio.of(self.person)

    @property
    def office(self) -> OfficeOverview:
        """The whole office. For a person who is not an operator there is nothing here."""
        self.check_operator()
        return self.studio.office

    def check_operator(self) -> None:
        """Raise ``NotFound`` unless an operator looks, with a token that opens everything."""
        if not self.person.is_operator or self.token.scope.session is not None:
            raise _nothing_here()

    @property
    def connect(self) -> ConnectView:
        """How programs of the person connect."""
        return self.studio.connect_view(self.person, _address(self.request))

    @property
    def course(self) -> Course:
        """A group, for its teachers and for operators. For others there is nothing here."""
        group = self.request.path_params["group"]
        is_theirs = self.person.is_operator or group in self.person.teaches
        if not is_theirs or self.token.scope.session is not None:
            raise _nothing_here()
        return self.studio.course(group)

    @property
    def sessions(self) -> list[Json]:
        """Those that the token opens."""
        only = self.token.scope.session
        return [view for view in self.mine.shown() if only in (None, view["id"])]


def _sessions(visit: _Visit) -> str:
    visit.mine.check_allowed()
    return page.sessions_page(visit.token, visit.sessions, visit.form, visit.connect)


def _sessions_part(visit: _Visit) -> str:
    return page.sessions_part(visit.token, visit.sessions, visit.form)


def _bill(visit: _Visit) -> str:
    ident = visit.request.path_params["id"]
    _check_scope(visit.token.scope, visit.request, visit.mine)
    bill = visit.mine.bill(ident, after=visit.request.query_params.get("after", ""))
    return page.bill_page(visit.person, visit.form, bill)


def _office(visit: _Visit) -> str:
    seen = visit.office.shown()
    return overview_page.overview_page(visit.person, seen, visit.studio.connected(), visit.form)


def _office_part(visit: _Visit) -> str:
    seen = visit.office.shown()
    return overview_page.overview_part(seen, visit.studio.connected(), visit.form)


def _course(visit: _Visit) -> str:
    return course_page.course_page(visit.person, visit.course, visit.form)


def _course_part(visit: _Visit) -> str:
    return course_page.course_part(visit.course)


def _audit(visit: _Visit) -> str:
    visit.check_operator()
    return overview_page.audit_page(visit.person, "", None, visit.form)


# ---- its forms: each does something, or answers with a page that asks about it first


def _sign_out(visit: _Visit, form: Mapping[str, str]) -> None:
    visit.studio.people.sign_out(visit.cookie)


def _started_by_form(visit: _Visit, form: Mapping[str, str]) -> None:
    if visit.token.scope.session is not None:
        raise _nothing_here()
    given: Json = {"name": form.get("name", "").strip()}
    given["vram"] = parse_size(form.get("vram", "").strip(), "GPU memory")
    if count := form.get("count", "").strip():
        if not count.isascii() or not count.isdigit() or len(count) > 4:
            raise InvalidRequest(f"{count[:20]!r} is no number of GPUs", do="Write it as 2, or leave it out for one.")
        given["count"] = int(count)
    if ttl := form.get("ttl", "").strip():
        given["ttl"] = parse_duration_ns(ttl, "time to live") / NS_PER_S
    if model := form.get("model", "").strip():
        given["model"] = model
    if form.get("pay") == "1":
        given["pay_priority"] = True
    if form.get("less") == "1":
        given |= {"or_smaller": True, "or_model": "model" in given}
    try:
        body = convert_to(given, StartBody)
    except msgspec.ValidationError as error:
        wrong = re.search(r"\$\.(\w+)", str(error))
        reason = "" if wrong is None else _RANGES.get(wrong[1], "")
        raise InvalidRequest(f"that cannot be asked for: {reason or error}", do="Change it and start again.") from None
    visit.mine.start(body.name, body.terms())


def _not_started(visit: _Visit, form: Mapping[str, str], error: SubletError) -> str:
    """What was typed is there to be changed, unless the session is there, and only its request was refused."""
    name = form.get("name", "").strip()
    if not isinstance(error, NameTaken) and any(one["name"] == name and not one["end"] for one in visit.sessions):
        return page.error_page(error)
    return page.not_started_page(error, form, visit.form)


def _changed_by_form(visit: _Visit, form: Mapping[str, str]) -> None:
    ident, now = visit.request.path_params["id"], form.get("now") == "1"
    _check_scope(visit.token.scope, visit.request, visit.mine)
    match visit.request.path_params["what"]:
        case "resume":
            visit.mine.resume(ident, or_smaller=form.get("less") == "1", or_model=form.get("less") == "1")
        case "accept":
            visit.mine.accept(ident)
        case "decline":
            visit.mine.decline(ident)
        case "rest":
            visit.mine.rest(ident, now=now)
        case "end":
            visit.mine.end(ident, now=now)
        case _:
            raise _nothing_here()


def _new_token(visit: _Visit, form: Mapping[str, str]) -> str:
    _check_may_give_tokens(visit)
    people, person = visit.studio.people, visit.person
    label, session = form.get("label", "").strip(), form.get("session", "").strip() or None
    if label.startswith(HUB_LABEL) or any(one.label == label for one in people.tokens(person)):
        raise InvalidRequest(f"there is a token {label[:40]} already", do="Revoke it first, or use another name.")
    if session is not None:
        session = visit.mine.ident_of(session)
    valid_s = parse_duration_ns(form.get("valid", "").strip() or TOKEN_VALID, "validity") / NS_PER_S
    token = people.new_token(person.name, label, valid_s=valid_s, scope=TokenScope(session=session))
    return page.token_page(person, visit.form, label, token, visit.connect)


def _revoke_token(visit: _Visit, form: Mapping[str, str]) -> None:
    _check_may_give_tokens(visit)
    with contextlib.suppress(NotFound):  # it is gone already
        visit.studio.people.revoke(visit.person.name, form.get("label", ""))


def _check_may_give_tokens(visit: _Visit) -> None:
    """Raise unless the browser showed a token that opens everything; one that a hub has signed in has none."""
    if visit.token.scope.session is not None:
        raise _nothing_here()
    if visit.token.label == HUB_LABEL:
        raise Unauthorized(
            "the hub says who you are, and gives its servers their tokens", do="Start your server in the hub."
        )


def _audited(visit: _Visit, form: Mapping[str, str]) -> str:
    of = form.get("of", "").strip()[:AUDIT_OF_MAX]
    return overview_page.audit_page(visit.person, of, visit.office.audit(of, _operators_token(form)), visit.form)


def _operators_token(form: Mapping[str, str]) -> str:
    """The access token of the office that the operator typed in: the studio has no right to what is asked."""
    return form.get("token", "").strip()


def _drain(visit: _Visit, form: Mapping[str, str]) -> str | None:
    office, node, draining = visit.office, form.get("node", ""), form.get("draining", "")
    token = _operators_token(form)
    if not token:
        drains = f"Drain {node}? No new lease is granted there, and its holders get notice."
        question = drains if draining else f"End the drain of {node}? Leases are granted there again."
        button = "Drain it" if draining else "End the drain"
        return overview_page.ask_page(
            visit.person, visit.form, question, button, "/office/drain", node=node, draining=draining
        )
    _log_act(visit, f"{'drains' if draining else 'ends the drain of'} node {node!r}")
    office.drain(node, bool(draining), token)
    return None


def _clear(visit: _Visit, form: Mapping[str, str]) -> str | None:
    office, resource, vouch = visit.office, form.get("resource", ""), form.get("vouch", "")
    token = _operators_token(form)
    if not token:
        vouches = (
            f"Return {resource} to service on your word? It was found broken, and is not verified. The audit log keeps "
            "that it was cleared."
        )
        question = vouches if vouch else f"Verify {resource} again? It returns to service if it is found clean."
        button = "Clear it" if vouch else "Verify it"
        return overview_page.ask_page(
            visit.person, visit.form, question, button, "/office/clear", resource=resource, vouch=vouch
        )
    _log_act(visit, f"{'clears' if vouch else 'verifies'} {resource!r}")
    office.clear(resource, token, vouch=bool(vouch))
    return None


def _log_act(visit: _Visit, what: str) -> None:
    """In the log of the studio: the audit log of the office names the operator's tenant there."""
    _log.info("Operator %s %s.", visit.person.name, what, extra=fields(event="operator", person=visit.person.name))


PageHandler: TypeAlias = Callable[[_Visit], str]
FormHandler: TypeAlias = Callable[[_Visit, Mapping[str, str]], str | None]
RefusedHandler: TypeAlias = Callable[[_Visit, Mapping[str, str], SubletError], str]


class _Web:
    """What the routes share."""

    def __init__(self, studio: Studio, hub: HubPeople | None) -> None:
        self._studio, self._hub = studio, hub
        self._failing: list[str] = []
        self._pause = PagePause()
        self._streams: set[_Changed] = set()
        self._is_ending = False
        self.metrics = StudioMetrics(studio)

    @functools.cached_property
    def _turns(self) -> Turns:
        return Turns(self._studio.watch)

    @functools.cached_property
    def _page_turns(self) -> Turns:
        return Turns(self._studio.watch, pause=self._pause, **PAGES_AT_ONCE)

    async def _in_turn(self, person: Person, work: Callable[[], _T]) -> _T:
        """What asks the office."""
        return await self._turns.run(person.id, person.tenant, work, self._studio.settings.answer_s)

    # ---- for those that watch it

    async def ready(self, request: Request) -> Response:
        """Whether it can serve people now. The answer, which needs no token, names what fails; the log says why."""
        wrong = (await run_in_threadpool(self._studio.condition)).wrong
        failing = sorted(wrong)
        if failing != self._failing:
            self._failing = failing
            reason = "; ".join(f"{part}: {wrong[part]}" for part in failing)
            text = f"Not ready: {reason}." if failing else "Ready again."
            _log.info("%s", text, extra=fields(event="readiness", failing=failing))
        return _json({"ok": not failing, "failing": failing}, 503 if failing else 200)

    async def numbers(self, request: Request) -> Response:
        """For Prometheus, which has an operator's token. To others there is nothing here."""
        try:
            await run_in_threadpool(self._operator, request)
            return _metrics(await run_in_threadpool(self.metrics.page))
        except SubletError as error:
            return _json(_error_body(error), _status(error))

    async def office_numbers(self, request: Request) -> Response:
        """The office's, which listens on unix sockets alone."""
        try:
            person = await run_in_threadpool(self._operator, request)
            return _metrics(await self._in_turn(person, self._studio.office_metrics))
        except SubletError as error:
            return _json(_error_body(error), _status(error))

    def _operator(self, request: Request) -> Person:
        token = self._by_token(request)
        if not token.person.is_operator or token.scope.session is not None:
            raise _nothing_here()
        return token.person

    # ---- the API

    def api(self, handler: Handler, *, asks_office: bool = True) -> Callable[[Request], Any]:
        """A route that answers a person's token with JSON."""

        async def answer(request: Request) -> Response:
            self._pause.request_came()
            is_known = False
            try:
                body = await _body(request) if request.method == "POST" else b""
                token = await run_in_threadpool(self._by_token, request)
                is_known = True
                self._note_request(request, token)

                def answered() -> object:
                    mine = self._studio.of(token.person)
                    _check_scope(token.scope, request, mine)
                    ask = Ask(request.path_params.get("id", ""), request.query_params, body, token.scope.session)
                    return handler(mine, ask)

                work = self._in_turn(token.person, answered) if asks_office else run_in_threadpool(answered)
                return _json(await work, 200)
            except SubletError as error:
                # With a token that is good, its scope, or the office, refuses that.
                refused = 403 if is_known and isinstance(error, Unauthorized) else _status(error)
                return _json(_error_body(error), refused)

        return answer

    def _by_token(self, request: Request) -> Token:
        return self._studio.people.of_token(_bearer(request))

    # ---- the page

    def page(self, handler: PageHandler) -> Callable[[Request], Any]:
        """A route that shows a page; without a cookie the form that asks for the token."""

        async def answer(request: Request) -> Response:
            try:
                visit = await run_in_threadpool(self._visit, request)
                return _html(await self._in_turn(visit.person, lambda: handler(visit)))
            except NotSignedIn:  # below the hub's proxy it is the hub that knows who this is
                asks = f"/hub/sign-in?{urlencode({'to': request.url.path})}" if page.at("") else "/sign-in"
                return _seen(RedirectResponse(page.at(asks), 303))
            except SubletError as error:
                return _html(page.error_page(error), _status(error))

        return answer

    def _visit(self, request: Request) -> _Visit:
        cookie = request.cookies.get(COOKIE, "")
        token = self._studio.people.of_cookie(cookie)
        if self._hub is not None:
            self._hub.check(cookie, token)
        elif token.label == HUB_LABEL:
            raise NotSignedIn("this studio is no service of a hub any more", do="Sign in with your token.")
        self._note_request(request, token)
        return _Visit(self._studio, token, cookie, request)

    def _note_request(self, request: Request, token: Token) -> None:
        setattr(request.state, PERSON, token.person)
        self._studio.presences.on_request(token)

    # ---- with a JupyterHub

    async def ask_hub(self, request: Request) -> Response:
        """Send the browser to the hub, which asks who it is or knows it already."""
        if self._hub is None or not page.at(""):
            return _html(page.sign_in_page(), 200)
        try:
            await run_in_threadpool(self._hub.check_answers)
        except SubletError as error:  # the hub's proxy says no more than a number then
            return _html(page.error_page(error), _status(error))
        secret = request.cookies.get(HANDSHAKE_COOKIE, "")
        if not _SECRET.fullmatch(secret):
            secret = secrets.token_urlsafe(32)
        wanted = request.query_params.get("to", "")
        to = wanted if _PAGES.fullmatch(wanted) else "/"
        answer = _seen(RedirectResponse(self._hub.hub.sign_in_path(Handshake(secret), to), 303))
        answer.set_cookie(
            HANDSHAKE_COOKIE,
            secret,
            max_age=HANDSHAKE_S,
            path=page.at("/"),
            httponly=True,
            samesite="lax",  # the last step before the browser comes back may have been at another site's sign-in
            secure=_is_tls(request),
        )
        return answer

    async def from_hub(self, request: Request) -> Response:
        """The browser comes back with a code, which is exchanged for a cookie."""
        try:
            cookie, to = await run_in_threadpool(self._from_hub, request)
        except SubletError as error:
            self.metrics.sign_ins.inc("refused")
            return _html(page.error_page(error), _status(error))
        self.metrics.sign_ins.inc("accepted")
        answer = _with_cookie(_html(page.signed_in_page(to)), request, cookie, self._studio.settings.cookie_s)
        answer.delete_cookie(HANDSHAKE_COOKIE, path=page.at("/"))
        return answer

    def _from_hub(self, request: Request) -> tuple[str, str]:
        if self._hub is None:
            raise _nothing_here()
        query, handshake = request.query_params, Handshake(request.cookies.get(HANDSHAKE_COOKIE, ""))
        to = handshake.path_of(query.get("state", ""))
        if to is None:
            raise Unauthorized("that sign-in did not begin in this browser, or long ago", do="Sign in again.")
        if "code" not in query:
            raise Unauthorized("JupyterHub named no user", do="Sign in again, with a user who may use the studio.")
        return self._hub.sign_in(query["code"], handshake), to

    def for_hub(self, handler: Callable[[HubPeople, ServerBody], object]) -> Callable[[Request], Any]:
        """A route for the hub itself, which shows the token that it knows the studio by."""

        async def answer(request: Request) -> Response:
            try:
                if self._hub is None:
                    raise _nothing_here()
                self._hub.check_hub(_bearer(request))
                ask = Ask("", {}, await _body(request), None)
                return _json(await run_in_threadpool(handler, self._hub, ask.read(ServerBody)), 200)
            except SubletError as error:
                return _json(_error_body(error), _status(error))

        return answer

    # ---- tokens and invites

    async def ask_token(self, request: Request) -> Response:
        return _html(page.sign_in_page())

    async def sign_in(self, request: Request) -> Response:
        """Exchange a token for a cookie."""
        try:
            _check_origin(request)
            form = _form(await _body(request))
            token, valid_s = form.get("token", "").strip(), self._studio.settings.cookie_s
            cookie = await run_in_threadpool(self._studio.people.sign_in, token, valid_s)
        except SubletError as error:
            self.metrics.sign_ins.inc("refused")
            return _html(page.sign_in_page(error), _status(error))
        self.metrics.sign_ins.inc("accepted")
        return _with_cookie(_seen(RedirectResponse(page.at("/"), 303)), request, cookie, valid_s)

    async def ask_invite(self, request: Request) -> Response:
        return _html(page.join_page())

    async def join(self, request: Request) -> Response:
        """Exchange an invite for a token, which is shown, and a cookie."""
        try:
            _check_origin(request)
            form = _form(await _body(request))
            invite, valid_s = form.get("invite", "").strip(), self._studio.settings.cookie_s
            person, token, cookie = await run_in_threadpool(self._studio.people.accept, invite, valid_s)
        except SubletError as error:
            self.metrics.sign_ins.inc("refused")
            return _html(page.join_page(error), _status(error))
        self.metrics.sign_ins.inc("accepted")
        connect = None
        with contextlib.suppress(SubletError):  # the office does not answer: the page says the rest later
            connect = await self._in_turn(person, lambda: self._studio.connect_view(person, _address(request)))
        return _with_cookie(_html(page.joined_page(person, token, connect)), request, cookie, valid_s)

    def form(
        self, act: FormHandler, back: str = "/", *, asks_office: bool = True, refused: RefusedHandler | None = None
    ) -> Callable[[Request], Any]:
        """A route that takes a form of the page, and shows the page again. ``refused``: what is shown of an error, in
        place of the error alone."""

        async def answer(request: Request) -> Response:
            self._pause.request_came()
            form: dict[str, str] = {}
            visitor: _Visit | None = None
            try:
                _check_origin(request)
                form = _form(await _body(request))
                visit = await run_in_threadpool(self._visit, request)
                _check_form(visit, form)
                visitor = visit
                acting = functools.partial(act, visit, form)
                asks = await (self._in_turn(visit.person, acting) if asks_office else run_in_threadpool(acting))
            except NotSignedIn as error:
                return _html(page.sign_in_page(error), 401)
            except WouldBeLost as error:
                return _html(page.insist_page(error, request.url.path, form["form"]))
            except SubletError as error:
                if refused is None or visitor is None:
                    return _html(page.error_page(error), _status(error))
                return _html(refused(visitor, form, error), _status(error))
            return _seen(RedirectResponse(page.at(back), 303)) if asks is None else _html(asks)

        return answer

    def live(self, part: PageHandler, *, of_office: bool = False) -> Callable[[Request], Any]:
        """A route of server-sent events: a part of the page again, whenever it has changed. ``of_office``: it shows
        more of the office than sessions of the person."""

        async def answer(request: Request) -> Response:
            news: AsyncIterator[str]
            try:
                visit = await run_in_threadpool(self._visit, request)
                news = self._news(visit, part, of_office)
                await self._in_turn(visit.person, lambda: part(visit))
            except (Unauthorized, NotFound) as error:
                return _seen(Response(status_code=_status(error)))
            except JournalError as error:  # the browser asks again after some seconds
                news = _one_event(page.unavailable_part(error))
            except SubletError:
                pass  # it may be over soon; the page is told
            return _seen(StreamingResponse(news, media_type="text/event-stream"))

        return answer

    async def _news(self, visit: _Visit, part_of: PageHandler, of_office: bool) -> AsyncIterator[str]:
        changed, loop = _Changed(), asyncio.get_running_loop()
        shown = WHOLE_OFFICE if of_office else visit.mine

        def wake(may_see_other: bool = False) -> None:
            loop.call_soon_threadsafe(changed.note, may_see_other)

        self._streams.add(changed)
        try:
            with self._studio.pages.woken(visit.cookie, visit.token, shown, wake), visit.mine.wake_on_change(wake):
                async for part in self._parts(visit, part_of, changed, of_office):
                    yield part
        finally:
            self._streams.discard(changed)

    def end_streams(self) -> None:
        """On the event loop. Their browsers open others, of the studio that is there then."""
        self._is_ending = True
        for changed in self._streams:
            changed.note(False)

    async def _parts(
        self, visit: _Visit, part_of: PageHandler, changed: _Changed, of_office: bool
    ) -> AsyncIterator[str]:
        """The part of the page now, and again whenever something has ``changed``. A page that shows the office is made
        anew with each heartbeat too; one that says that something is wrong, as soon as a change would be shown."""
        request, last, part, is_due, is_wrong = visit.request, "", "", True, False
        looked_up: Hashable = None
        while not self._is_ending and not await request.is_disconnected():
            try:
                written = self._studio.people.mark()
                if changed.may_see_other or written != looked_up or self._hub is not None or is_wrong:
                    changed.may_see_other = False
                    visit = await run_in_threadpool(self._visit, request)
                    looked_up = written
                if is_due:
                    making = functools.partial(part_of, visit)
                    limit_s = self._studio.settings.answer_s
                    part = await self._page_turns.run(visit.person.id, visit.person.tenant, making, limit_s)
                is_wrong = False
            except NotSignedIn:  # signed out, or the token was taken back: the page asks for it
                yield "event: over\ndata:\n\n"
                return
            except SubletError as error:
                part, is_wrong = page.unavailable_part(error), True
            if part != last:
                last = part
                yield _event(part)
            else:
                yield ": as before\n\n"
            await asyncio.sleep(SPACING_S)
            pause_s = min(HEARTBEAT_S, self._studio.settings.update_s) if is_wrong else HEARTBEAT_S
            is_due = await changed.within(pause_s) or of_office or is_wrong


class _Changed:
    """Whether an open page is to be looked at again. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.may_see_other = False
        """What the browser may see is to be looked up again."""

    def note(self, may_see_other: bool) -> None:
        self.may_see_other = self.may_see_other or may_see_other
        self._event.set()

    async def within(self, seconds: float) -> bool:
        """Wait until something has changed since this was asked last, for so long at most; whether it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        is_set = self._event.is_set()
        self._event.clear()
        return is_set


# ---- within


def _event(part: str) -> str:
    return "".join(f"data: {line}\n" for line in part.splitlines()) + "\n"


async def _one_event(part: str) -> AsyncIterator[str]:
    yield _event(part)


async def _document(request: Request) -> Response:
    return _json(openapi_document(__version__), 200)


async def _alive(request: Request) -> Response:
    return _json({"ok": True}, 200)


def _file(name: str, media_type: str) -> Callable[[Request], Any]:
    content = resources.files("sublet.studio").joinpath(name).read_bytes()

    async def answer(request: Request) -> Response:
        return _seen(Response(content, media_type=media_type))

    return answer


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                size += len(piece)
                if size > BODY_MAX_BYTES:
                    raise TooLarge(f"the message is larger than {BODY_MAX_BYTES} bytes", do="Send less.")
                pieces.append(piece)
    except TimeoutError:
        raise TooSlow(f"the message did not arrive within {BODY_S:g} s", do="Send it again.") from None
    return b"".join(pieces)


def _form(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError:
        raise InvalidRequest("the form cannot be read", do="Open the page again.") from None
    return {name: values[0] for name, values in found.items()}


def _check_form(visit: _Visit, form: Mapping[str, str]) -> None:
    if not hmac.compare_digest(visit.form.encode(), form.get("form", "").encode("utf-8", "replace")):
        raise Unauthorized("that form is not of this page, or older than its sign-in", do="Open the page again.")


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized("the studio asks for a token", do="Send `Authorization: Bearer TOKEN`.")
    return token


def _check_origin(request: Request) -> None:
    """Refuse what another site sends. A browser names the origin with every form; a client that names none is no
    browser."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    host = request.headers.get("host", "")
    is_foreign = origin is not None and origin.partition("://")[2] != host
    if is_foreign or site not in (None, "same-origin", "none"):
        raise Unauthorized("that was sent by another site", do="Open the page of the studio itself.")


def _check_scope(scope: TokenScope, request: Request, mine: PersonSessions) -> None:
    """Refuse what the token does not open. Another session than its own is answered as one that never was."""
    if scope.read_only and request.method != "GET":
        raise Unauthorized("this token may only read", do="Use one that may change sessions.")
    if scope.session is None:
        return
    ident = request.path_params.get("id")
    if ident is not None:
        mine.check_is(ident, scope.session)
    elif (request.method, request.url.path) not in OF_A_SESSION:
        raise Unauthorized("this token opens one session and nothing else", do="Use one that opens all.")


def _with_cookie(answer: Response, request: Request, cookie: str, valid_s: int) -> Response:
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=valid_s,
        path=page.at("/"),
        httponly=True,
        samesite="strict",
        secure=_is_tls(request),
    )
    return answer


def _address(request: Request) -> str:
    """Of the studio, as this browser knows it."""
    host = request.headers.get("host", "")
    return f"{'https' if _is_tls(request) else 'http'}://{host}{page.at('')}"


def _is_tls(request: Request) -> bool:
    """Whether the browser speaks TLS, perhaps to the hub's proxy; a wrong word on it only makes a cookie useless."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0] if page.at("") else ""
    return "https" in (request.url.scheme, forwarded.strip())


def _status(error: SubletError) -> int:
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, TooSlow):
        return 408
    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)


def _error_body(error: SubletError) -> StudioErrorBody:
    """Under the name of the class that programs know: those of the studio's own are none elsewhere."""
    kind = next(one.__name__ for one in type(error).__mro__ if one.__module__ == SubletError.__module__)
    view = StudioErrorView(
        kind=kind, message=error.message, do=error.do, transient=error.transient, reason=error.reason
    )
    if isinstance(error, CapacityExceeded):
        view.would_fit, view.estimate = getattr(error.offer, "offered", None), error.estimate
    return StudioErrorBody(error=view)


def _json(what: object, status: int) -> Response:
    return _seen(Response(msgspec.json.encode(what), status, media_type="application/json"))


def _metrics(text: bytes) -> Response:
    return _seen(Response(text, media_type=CONTENT_TYPE))


def _html(text: str, status: int = 200) -> Response:
    return _seen(HTMLResponse(text, status))


_A = TypeVar("_A", bound=Response)


def _seen(answer: _A) -> _A:
    answer.headers.update(HEADERS)
    if answer.status_code == 503:
        answer.headers["retry-after"] = str(RETRY_AFTER_S)
    return answer


def _nothing_here() -> NotFound:
    return NotFound("there is nothing here", do="Go to the page of your sessions, or see the docs for the API.")


async def _not_here(request: Request, error: Exception) -> Response:
    """A path or a method that no route has."""
    assert isinstance(error, HTTPException)
    not_found = _nothing_here()
    if request.url.path.startswith("/v1/"):
        return _json(_error_body(not_found), error.status_code)
    return _html(page.error_page(not_found), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    """What was not foreseen; the server logs it, without what was sent."""
    internal_error = SubletError(
        "internal error in the studio", do="Look at the session before you repeat it; see its log."
    )
    if request.url.path.startswith("/v1/"):
        return _json(_error_body(internal_error), 500)
    return _html(page.error_page(internal_error), 500)
