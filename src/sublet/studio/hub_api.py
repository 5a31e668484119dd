"""The client of a JupyterHub: OAuth, users, running servers, and reports of activity.

Plain HTTP, as the hub documents it: `jupyterhub.services.auth` is made for Tornado, and would bring the hub's database
and web server into the studio's process for four requests. Each request has a time limit as a whole.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from sublet.client.address import find_address
from sublet.client.clocks import client_clock
from sublet.client.steps import HttpCall, HttpReply
from sublet.client.transport import Transport
from sublet.errors import Disconnected, Unauthorized
from sublet.lazy_dataclass import dataclass
from sublet.wire.decoders import decode_as
from sublet.wire.version import WIRE_VERSION

PAGE: Final = 200
"""Users in one answer: as many as a hub gives."""
CALLBACK: Final = "/oauth_callback"
"""Below the prefix of the service: where the hub sends browsers back to, unless it is told otherwise."""
_API: Final = "hub/api"
_DIGEST_LENGTH: Final = 64
_T = TypeVar("_T")


class HubAway(Disconnected):
    """The hub does not answer, or not as a hub does. Nothing is known of the user."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"JupyterHub {how}",
            do="Try again in a moment; if that lasts, tell the operator of the hub. What runs goes on.",
        )


class HubRefused(Unauthorized):
    """The hub does not know the token or the code, or it is not for this service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUser:
    """The person, as the hub names them."""

    name: str
    groups: tuple[str, ...]


class _User(msgspec.Struct):
    kind: str
    name: str
    groups: list[str] = []
    scopes: list[str] = []
    servers: dict[str, dict[str, Any]] = {}


class _Token(msgspec.Struct):
    access_token: str


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a browser carries to the hub and back. It follows from a secret that only this browser has, in a cookie, so
    two of its pages may sign in at once, and the studio keeps nothing meanwhile."""

    secret: str = field(repr=False)

    def state(self, path: str) -> str:
        """What the hub gives back with the code. ``path``: where the browser goes when it is signed in."""
        return self._derived(f"state {path}") + path

    def path_of(self, state: str) -> str | None:
        """The path in this state; None where it is none of this browser's."""
        path = state[_DIGEST_LENGTH:]
        is_ours = hmac.compare_digest(self.state(path).encode("utf-8", "replace"), state.encode("utf-8", "replace"))
        return path if self.secret and is_ours else None

    @property
    def verifier(self) -> str:
        """Of PKCE: a code that was seen on its way is worth nothing without it."""
        return self._derived("verifier")

    @property
    def challenge(self) -> str:
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")

    def _derived(self, what: str) -> str:
        return hashlib.sha256(f"hub {what} {self.secret}".encode("utf-8", "replace")).hexdigest()


class Hub:
    """One hub, asked as its service ``service``. Safe to use from several threads."""

    def __init__(self, api: str, token: str, service: str, *, answer_s: Callable[[], float]) -> None:
        """``token``: what the hub's configuration names as the service's ``api_token``. ``answer_s``: a hub that has
        not answered whole by then did not answer."""
        self.service, self._token, self._answer_s = service, token, answer_s
        self._address = find_address(api.rstrip("/"), token, None, {})
        self._base = self._address.prefix.removesuffix(_API)

    @property
    def prefix(self) -> str:
        """Where the hub's proxy serves the studio."""
        return f"{self._base}services/{self.service}"

    def sign_in_path(self, handshake: Handshake, path: str) -> str:
        """Where a browser is sent, on the host by which it reaches hub and studio; then it goes on to ``path``."""
        query = {
            "client_id": self._client,
            "redirect_uri": self.prefix + CALLBACK,
            "response_type": "code",
            "state": handshake.state(path),
            "code_challenge": handshake.challenge,
            "code_challenge_method": "S256",
        }
        return f"{self._base}{_API}/oauth2/authorize?{urlencode(query)}"

    def check(self) -> None:
        """Raise ``HubAway`` unless it answers."""
        self._exchange("GET", "/")

    def token_for(self, code: str, handshake: Handshake) -> str:
        """The token that this browser's user gave to the service. Raises ``HubRefused``, ``HubAway``."""
        grant = {
            "client_id": self._client,
            "client_secret": self._token,
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.prefix + CALLBACK,
            "code_verifier": handshake.verifier,
        }
        form, content_type = urlencode(grant).encode("ascii"), "application/x-www-form-urlencoded"
        reply = self._exchange("POST", "/oauth2/token", form, content_type=content_type)
        if 400 <= reply.status < 500:
            raise _stale()
        return _read(reply, _Token).access_token

    def user_of(self, token: str) -> HubUser:
        """Whose token it is. Raises ``HubRefused`` where it is no user's, or not for this service."""
        reply = self._exchange("GET", "/user", token=token)
        if 400 <= reply.status < 500:
            raise _stale()
        user = _read(reply, _User)
        opens = {"access:services", f"access:services!service={self.service}"}
        if user.kind != "user" or not opens.intersection(user.scopes):
            raise HubRefused("JupyterHub's answer is not of a user of this service", do="Tell the operator of the hub.")
        return HubUser(name=user.name, groups=tuple(user.groups))

    def servers(self) -> dict[str, list[str]]:
        """The names of the servers that run, by user."""
        return {user.name: list(user.servers) for page in self._pages() for user in page if user.servers}

    def report_active(self, user: str, servers: list[str], at: str) -> None:
        """Something runs in these servers at that time. One that has stopped meanwhile needs no report."""
        body = {"last_activity": at, "servers": {name: {"last_activity": at} for name in servers}}
        path = f"/users/{quote(user, safe='')}/activity"
        reply = self._exchange("POST", path, msgspec.json.encode(body))
        if reply.status >= 300 and reply.status not in (400, 404):
            raise HubAway(f"answered a report of activity with {reply.status}")

    @property
    def _client(self) -> str:
        return f"service-{self.service}"

    def _pages(self) -> Iterator[list[_User]]:
        offset = 0
        while True:
            query = {"state": "active", "limit": str(PAGE), "offset": str(offset)}
            page = _read(self._exchange("GET", f"/users?{urlencode(query)}"), list[_User])
            yield page
            if len(page) < PAGE:
                return
            offset += len(page)

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        token: str = "",
        content_type: str = "application/json",
    ) -> HttpReply:
        address = replace(self._address, token=token) if token else self._address
        transport = Transport(address, client_clock(), wire=WIRE_VERSION)
        transport.close()  # no connection is kept: it is asked for something once in minutes
        call = HttpCall(method=method, path=path, body=body, timeout_s=self._answer_s(), content_type=content_type)
        try:
            reply = transport.exchange(call)
        except Disconnected as error:
            raise HubAway("did not answer in time") from error
        if reply.status >= 500:
            raise HubAway(f"answered with {reply.status}")
        return reply


def _read(reply: HttpReply, shape: type[_T]) -> _T:
    if reply.status >= 300:
        raise HubAway(f"answered with {reply.status}")
    try:
        return decode_as(reply.body, shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HubAway("gave an answer that cannot be read") from error


def _stale() -> HubRefused:
    return HubRefused("JupyterHub does not know this sign-in any more", do="Sign in again.")
