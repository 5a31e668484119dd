"""The studio's application, asked without a server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sublet.studio import web


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/sessions"), ("POST", "/sign-in"), ("POST", "/join")])
def test_a_message_that_never_ends_is_broken_off(method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is looked up for it."""
    monkeypatch.setattr(web, "BODY_S", 0.01)
    begins = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(begins, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "scheme": "http"}
    asyncio.run(web.studio_app(cast("Any", None))(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"did not arrive within 0.01 s" in sent[1]["body"].lower()
