"""The records of a person's sessions in a studio, for notebooks and commands of other users."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from sublet.client.address import find_address
from sublet.client.clocks import client_clock
from sublet.client.responses import decode
from sublet.client.steps import HttpCall
from sublet.client.transport import Transport
from sublet.errors import Disconnected, InvalidRequest
from sublet.studio.records import Entry
from sublet.values import shown
from sublet.wire.version import WIRE_VERSION

STUDIO_VARIABLE: Final = "SUBLET_STUDIO"
TOKEN_VARIABLE: Final = "SUBLET_STUDIO_TOKEN"
PAGE: Final = 500
"""Records in one answer."""
ANSWER_S: Final = 15.0
_T = TypeVar("_T")


class RemoteStore:
    """A `Store` behind a studio. Safe to use from several threads."""

    def __init__(self, url: str, token: str | None) -> None:
        if not token:
            raise InvalidRequest(
                f"{STUDIO_VARIABLE} names a studio, and {TOKEN_VARIABLE} is not set",
                do="Set it to the token that the operator of the studio gave you.",
            )
        try:
            find_address(url, None, None, {})
        except InvalidRequest as error:
            raise InvalidRequest(
                f"{STUDIO_VARIABLE}={shown(url)} is no address of a studio, or would have tokens travel in the clear",
                do="Set it as the studio's page says, such as http://127.0.0.1:8320.",
            ) from error
        self._url = url
        self._transport = Transport(find_address(url, token, None, {}), client_clock(), wire=WIRE_VERSION)
        self._transport.close()  # no connection is kept: it is asked for something twice a day

    def read(self, after: int) -> list[Entry]:
        found: list[Entry] = []
        while True:
            page = self._request("GET", f"/v1/records?after={after + len(found)}", None, list[Entry])
            found += page
            if len(page) < PAGE:
                return found

    def append(self, entry: Entry) -> bool:
        return self._request("POST", "/v1/records", msgspec.json.encode(entry), bool)

    def _request(self, method: str, path: str, body: bytes | None, shape: type[_T]) -> _T:
        try:
            reply = self._transport.exchange(HttpCall(method=method, path=path, body=body, timeout_s=ANSWER_S))
        except Disconnected as error:
            raise Disconnected(
                f"the studio at {self._url} did not answer",
                do="Look there whether it runs, or start it with `sublet studio`; leases go on to their deadlines.",
                sent=error.sent,
            ) from error
        return decode(reply, shape)
