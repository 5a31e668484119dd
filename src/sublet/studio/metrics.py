"""The studio's Prometheus metrics.

Labels are few and closed: which part was asked, with which outcome, and the state of sessions. No person, tenant or
session is ever a label.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from sublet.logs import fields
from sublet.metrics import Count, Spread, metrics_page
from sublet.studio.service import Condition
from sublet.studio.states import SessionState

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PERSON: Final = "person"
"""In the state of a request: its caller, once that is known."""
REQUESTS: Final = "sublet.studio.requests"
"""The logger that has a line for each request, where that is wanted."""
_requests: Final = logging.getLogger(REQUESTS)
_ANSWER_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)
_PROBES: Final = ("/livez", "/readyz", "/metrics", "/metrics/office")
_LIVE: Final = "/live"
"""The end of the paths of open pages."""


class Watched(Protocol):
    """A studio, as far as its numbers go."""

    def condition(self) -> Condition:
        """What it is like now."""


class StudioMetrics:
    """The counters, and the page. One loop counts; the page may be made by another thread."""

    def __init__(self, studio: Watched) -> None:
        self._studio = studio
        self.requests = Count("sublet_studio_requests", "Requests answered.", "part", "status")
        self.answer_seconds = Spread(
            "sublet_studio_answer_seconds", "Time of an answer; open pages and probes are left out.", _ANSWER_S
        )
        self.sign_ins = Count("sublet_studio_sign_ins", "Tokens and invites that browsers showed.", "outcome")
        self.open_pages = 0
        """Now, and told of changes."""

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return metrics_page(self._families)

    def _families(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        yield from (one.family() for one in (self.requests, self.answer_seconds, self.sign_ins))
        now = self._studio.condition()
        sessions = GaugeMetricFamily("sublet_studio_sessions", "Sessions, by state.", labels=["state"])
        for state in SessionState:
            sessions.add_metric([state.value], now.sessions.get(state, 0))
        yield sessions
        for name, text, value in (
            ("ready", "1 while the studio can serve: its people and the office answer.", not now.wrong),
            ("people", "People whom the studio knows.", now.people),
            ("unreadable", "People whose sessions cannot be read.", now.unreadable),
            ("waiting", "Requests that wait for a lease, of all people.", now.waiting),
            ("waiting_max", "How many may wait; one more is refused.", now.waiting_max),
            ("open_pages", "Pages that are open in browsers.", self.open_pages),
        ):
            yield GaugeMetricFamily(f"sublet_studio_{name}", text, value=value)


class Counted:
    """The application, whose answers are counted."""

    def __init__(self, app: ASGIApp, metrics: StudioMetrics, paths: Mapping[object, str]) -> None:
        """``paths``: by endpoint, the pattern of its path."""
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, part, metrics = 500, _part(scope["path"]), self._metrics

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began_s = time.monotonic()
        metrics.open_pages += part == "live"
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            metrics.open_pages -= part == "live"
            metrics.requests.inc(part, f"{status // 100}xx")
            took_s = time.monotonic() - began_s
            if part in ("api", "page"):
                metrics.answer_seconds.observe(took_s)
            if part != "probe" and _requests.isEnabledFor(logging.INFO):
                _note(scope, self._paths.get(scope.get("endpoint"), "none"), status, took_s)


def _note(scope: Scope, route: str, status: int, took_s: float) -> None:
    """A line of the log, with the pattern of the path in its place: a path and its query come from outside."""
    person = scope.get("state", {}).get(PERSON)
    extra = fields(
        event="request",
        method=scope["method"],
        route=route,
        status=status,
        took_s=round(took_s, 4),
        person=None if person is None else person.name,
        tenant=None if person is None else person.tenant,
    )
    _requests.info("%s %s: %d", scope["method"], route, status, extra=extra)


def _part(path: str) -> str:
    if path.startswith("/v1/"):
        return "api"
    if path in _PROBES:
        return "probe"
    return "live" if path.endswith(_LIVE) else "page"
