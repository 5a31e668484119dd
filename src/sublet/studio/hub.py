"""For ``jupyterhub_config.py``: configures the studio as a service, and single-user servers that may use GPUs.

    from sublet.studio.hub import configure

    configure(c, token_file="/etc/sublet/hub-token")

Each server then starts with ``SUBLET_URL`` (the office's shared socket), ``SUBLET_STUDIO`` and, as
``SUBLET_STUDIO_TOKEN``, a token of its own, which the hub asks the studio for and gives up when the server has stopped.
Nothing else of the hub's reaches a server. Where the studio cannot give one, the server starts without, and the hub's
log says why. This module runs in the hub's process: it imports nothing of JupyterHub, and never blocks its loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import Any, Final, TypeAlias

import msgspec

from sublet.client.address import find_address
from sublet.client.clocks import client_clock
from sublet.client.responses import decode
from sublet.client.steps import HttpCall
from sublet.client.transport import Transport
from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.studio.remote import STUDIO_VARIABLE, TOKEN_VARIABLE
from sublet.values import valid_name
from sublet.wire.version import WIRE_VERSION

__all__ = ["configure"]

STUDIO: Final = "http://127.0.0.1:8320"
OFFICE: Final = "unix:///run/sublet/office.sock"
ANSWER_S: Final = 15.0
SCOPES: Final = ("list:users", "read:servers", "users:activity")
"""What the studio may ask of the hub: which servers run, and to say in which of them something runs."""
Hook: TypeAlias = Callable[[Any], Any]


def configure(
    c: Any,
    *,
    token_file: str,
    studio: str = STUDIO,
    office: str = OFFICE,
    service: str = "studio",
) -> None:
    """Make the studio a service of the hub, and give each single-user server what it needs to use GPUs.

    ``token_file`` holds the token that hub and studio share; ``studio.toml`` names the same file. ``studio`` and
    ``office`` are where both listen on this machine. Hooks that are set already run first.
    """
    token = _token(token_file)
    studio = _browsable(studio)
    find_address(office, None, None, {})
    valid_name(service, "service name")
    servers = _Servers(studio=studio, office=office, token=token)
    entry = {"name": service, "url": studio, "api_token": token, "oauth_no_confirm": True}
    role = {"name": f"sublet-{service}", "scopes": list(SCOPES), "services": [service]}
    roles = _listed(c.JupyterHub, "load_roles")
    users = next((one for one in roles if one["name"] == "user"), None)
    if users is None:
        users = {"name": "user", "scopes": ["self"]}
        roles.append(users)
    users["scopes"] = [*users["scopes"], f"access:services!service={service}"]
    c.JupyterHub.load_roles = [*roles, role]
    c.JupyterHub.services = [*_listed(c.JupyterHub, "services"), entry]
    c.Spawner.pre_spawn_hook = _after(c.Spawner.get("pre_spawn_hook"), servers.before_start)
    c.Spawner.post_stop_hook = _after(c.Spawner.get("post_stop_hook"), servers.after_stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Servers:
    """The two hooks."""

    studio: str
    office: str
    token: str = field(repr=False)

    async def before_start(self, spawner: Any) -> None:
        """Give the server what it needs; without the studio it starts without a token."""
        given = {"SUBLET_URL": self.office, STUDIO_VARIABLE: self.studio}
        kept = {name: value for name, value in spawner.environment.items() if name not in (*given, TOKEN_VARIABLE)}
        spawner.environment = {**kept, **given}
        body = {
            "user": spawner.user.name,
            "server": spawner.name,
            "groups": [group.name for group in spawner.user.groups],
        }
        try:
            answer = await asyncio.to_thread(self._ask, "/v1/hub/servers", body)
        except SubletError as error:
            spawner.log.warning("The server of %s starts without the studio: %s", spawner.user.name, error)
            return
        spawner.environment = {**spawner.environment, TOKEN_VARIABLE: answer["token"]}

    async def after_stop(self, spawner: Any) -> None:
        """Its token is given up; one whose end the studio does not hear of ends by itself."""
        body = {"user": spawner.user.name, "server": spawner.name}
        try:
            await asyncio.to_thread(self._ask, "/v1/hub/servers/end", body)
        except SubletError as error:
            spawner.log.warning("The studio was not told that a server of %s stopped: %s", spawner.user.name, error)

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        transport = Transport(find_address(self.studio, self.token, None, {}), client_clock(), wire=WIRE_VERSION)
        transport.close()  # no connection is kept
        call = HttpCall(method="POST", path=path, body=msgspec.json.encode(body), timeout_s=ANSWER_S)
        try:
            reply = transport.exchange(call)
        except Disconnected as error:
            raise Disconnected(f"the studio at {self.studio} did not answer", sent=error.sent) from error
        found: dict[str, Any] = decode(reply, dict)
        return found


def _after(first: Hook | None, then: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    async def both(spawner: Any) -> None:
        if first is not None:
            came = first(spawner)
            if hasattr(came, "__await__"):
                await came
        await then(spawner)

    return both


def _listed(section: Any, name: str) -> list[dict[str, Any]]:
    """What the configuration has there already; also where it was made by `append`."""
    found = section.get(name) or []
    return list(found.get_value([]) if hasattr(found, "get_value") else found)


def _browsable(studio: str) -> str:
    """The hub's proxy reaches the studio by a port."""
    found = find_address(studio, None, None, {})
    if found.socket is not None:
        raise InvalidRequest(
            f"the hub's proxy cannot reach {studio}",
            do="Let it listen on a loopback address (`listen.address`).",
        )
    return found.url.rstrip("/")


def _token(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the token that hub and studio share cannot be read from {os.fspath(path)}: {error}",
            do="Make it with `openssl rand -hex 32`, in a file that only the hub and the studio can read.",
        ) from error
    if not token:
        raise InvalidRequest(f"{path} is empty", do="Write a token into it: `openssl rand -hex 32`.")
    return token
