"""The studio's own right at its office: a token of its own with narrow scope.

Beside an office of its own user the studio makes the token by itself, as the owner, when it is first started, and keeps
it in a file that only this user reads. A studio that runs as another user, or on another machine, is given one:
``SUBLET_TOKEN``, which the operator made with ``sublet tenant add NAME --studio``. Either way it reads what its pages
show and acts for tenants on their sessions. What only operators may do is asked of the office with the access token
that an operator typed in for it, which is used once and kept nowhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Final

from sublet.client.address import Address, find_address
from sublet.client.clocks import client_clock
from sublet.client.fabric import Fabric, connect, start_office
from sublet.client.home import make_private_dir
from sublet.client.responses import decode
from sublet.client.steps import HttpCall, HttpReply
from sublet.client.transport import Flight, Transport
from sublet.errors import Disconnected, InvalidRequest, Unauthorized, Unsupported
from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.atomic_files import move_into_place, read_whole, sync_folder, write_synced
from sublet.studio.office import sessions_folder
from sublet.wire.http import Hello, TenantRequest, TenantToken, TenantView, VolumeView
from sublet.wire.version import WIRE_VERSION

TENANT: Final = "studio"
"""What the office calls the studio that its owner started."""
FILE: Final = "office-token"
TOKEN_MAX_BYTES: Final = 4096
NEWS_S: Final = 5.0
"""The stream of news is asked for by then, or there is none for now."""
_MAKE: Final = "make one (`sublet tenant add NAME --studio`), and set SUBLET_TOKEN to it for the studio."


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeRight:
    """Which office, and the studio's token for it."""

    home: Path
    url: str | None
    """None: the office of this user on this machine."""
    token: str = field(repr=False)

    def connect(self, for_tenant: str = "", *, start: bool = True) -> Fabric:
        """The office, for the studio itself or for a tenant."""
        return self._connected(self.token, for_tenant, start=start)

    def fabric(self, for_tenant: str = "", *, start: bool = True) -> Fabric:
        """The same, and nothing is asked before the first request, so that this waits for no office."""
        return Fabric(self._address(for_tenant), client_clock(), start=start, bound=False)

    def greet(self, timeout_s: float) -> None:
        """Raise unless the office answers in this time, and to this studio. It is not started for that."""
        decode(self._request_once("/v1/groups", timeout_s), list)

    def news(self) -> Flight:
        """The office's news of all tenants, as they come. It is not started for that."""
        transport = Transport(self._address(""), client_clock(), wire=WIRE_VERSION)
        transport.close()  # the connection is the stream's alone
        return transport.launch(HttpCall(method="GET", path="/v1/events?all=1&places=0", timeout_s=NEWS_S))

    def metrics(self, timeout_s: float) -> bytes:
        """The office's numbers, as it writes them for Prometheus. It is not started for that."""
        reply = self._request_once("/metrics", timeout_s)
        if reply.status != 200:
            decode(reply, dict)  # raises what the office says
        return reply.body

    def start_office(self) -> None:
        """See that an office of this user runs, if that is the one that is meant."""
        start_office(self._address(""))

    def _request_once(self, path: str, timeout_s: float) -> HttpReply:
        transport = Transport(self._address(""), client_clock(), wire=WIRE_VERSION)
        transport.close()  # no connection is kept
        return transport.exchange(HttpCall(method="GET", path=path, timeout_s=timeout_s))

    def _address(self, for_tenant: str) -> Address:
        home = None if self.url else str(self.home)
        return find_address(self.url, self.token, home, {}, as_tenant=True, for_tenant=for_tenant)

    def as_operator(self, token: str) -> Fabric:
        """The office, with an operator's own access token."""
        if not token:
            raise Unauthorized("only an operator's access token of the office confirms that", do="Type yours in.")
        return self._connected(token, "", start=False)

    def _connected(self, token: str, for_tenant: str, *, start: bool) -> Fabric:
        home = None if self.url else self.home
        return connect(
            self.url, token=token, home=home, start=start, bound=False, as_tenant=True, for_tenant=for_tenant
        )


def find_right(home: Path, env: Mapping[str, str] = os.environ, *, start: bool = True) -> OfficeRight:
    """The studio's right, made where there is none yet. Raises where the office is too old to know such a right, where
    an operator has taken it away, and where the token that was given is no studio's. Without ``start`` no office is
    started for that: while none answers, the right is what was given or kept, or there is none (``Disconnected``)."""
    url, token = env.get("SUBLET_URL") or None, env.get("SUBLET_TOKEN") or None
    if url is not None and token is None:
        raise InvalidRequest("SUBLET_URL is set, and SUBLET_TOKEN is not", do=f"Have the operator {_MAKE}")
    if token is not None:
        right = OfficeRight(home=home, url=url, token=token)
        try:
            with right.connect(start=start) as fabric:
                check_knows_studios(fabric.request("GET", "/v1/hello", shape=Hello))
                _check_narrow(fabric)
        except Disconnected:
            if start:
                raise
        return right
    try:
        with connect(home=home, bound=False, start=start) as owner:
            check_knows_studios(owner.request("GET", "/v1/hello", shape=Hello))
            return _kept(home) or _made(home, owner)
    except Disconnected:
        if start or (text := _read(home)) is None:
            raise
        return OfficeRight(home=home, url=None, token=text)


def check_knows_studios(hello: Hello) -> None:
    """Raise where this office is of before."""
    if not hello.studios:
        raise Unsupported(
            f"the office is Sublet {hello.version}, which has no right of its own for a studio",
            do="Upgrade the office and start it again (`sublet down`, `sublet up`); leases go on meanwhile.",
        )


# ---- within


def _check_narrow(fabric: Fabric) -> None:
    """See that the token is a studio's. Those of tenants open too little, and those of operators far too much."""
    try:
        fabric.request("GET", "/v1/groups", shape=list)
    except Unauthorized as error:
        raise Unauthorized(
            f"SUBLET_TOKEN is no right of a studio: {error.message}", do=f"Have the operator {_MAKE}"
        ) from None
    with contextlib.suppress(Unauthorized):
        fabric.request("GET", "/v1/volumes", shape=list[VolumeView])
        raise InvalidRequest("SUBLET_TOKEN is an operator's, and a studio needs less", do=f"Unset it, or {_MAKE}")


def _kept(home: Path) -> OfficeRight | None:
    """What the file has, if it is still good."""
    text = _read(home)
    if text is None:
        return None
    right = OfficeRight(home=home, url=None, token=text)
    try:
        with right.connect() as fabric:
            fabric.request("GET", "/v1/groups", shape=list)
    except (Unauthorized, InvalidRequest):  # the office was made anew, or the file is not what it was
        return None
    return right


def _read(home: Path) -> str | None:
    try:
        return read_whole(_file(home), TOKEN_MAX_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"{_file(home)} cannot be read: {error.strerror}", do="Mend it, or remove it.") from None


def _made(home: Path, owner: Fabric) -> OfficeRight:
    """A new token, as the owner. What an operator disabled stays so."""
    known = {one.id: one for one in owner.request("GET", "/v1/tenants", shape=list[TenantView])}.get(TENANT)
    if known is None:
        request = TenantRequest(id=TENANT, studio=True)
        made = owner.request("POST", "/v1/tenants", request, shape=TenantToken)
    elif not known.studio:
        raise InvalidRequest(f"there is a tenant {TENANT} which is no studio", do=f"Under another name {_MAKE}")
    elif known.disabled:
        raise Unauthorized(
            f"an operator has disabled {TENANT}, the right of this studio",
            do=f"Give it back: `sublet tenant enable {TENANT}`; then start the studio again.",
        )
    else:
        made = owner.request("PATCH", f"/v1/tenants/{TENANT}", TenantRequest(new_token=True), shape=TenantToken)
    assert made.token is not None
    _keep(home, made.token)
    return OfficeRight(home=home, url=None, token=made.token)


def _keep(home: Path, token: str) -> None:
    path = _file(home)
    temporary = path.with_name(f"{FILE}.{secrets.token_hex(4)}~")
    write_synced(temporary, token.encode())
    move_into_place(temporary, path)
    sync_folder(path.parent)


def _file(home: Path) -> Path:
    return make_private_dir(sessions_folder(str(home))) / FILE
