"""Where an office is: a unix socket of this machine, or a host with TLS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from urllib.parse import urlsplit

from sublet.client.home import home_dir, socket_path
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.values import shown, valid_name
from sublet.wire.version import AS_TENANT_VARIABLE

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN = re.compile(r"[!-~]{1,4096}")
_URL_DO = 'Write it as "https://gpu.example.org" or "unix:///path/to/office.sock", or leave it out for this machine.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to connect, and as whom."""

    url: str
    """As shown to people."""
    socket: Path | None = None
    host: str = ""
    port: int = 0
    tls: bool = False
    prefix: str = ""
    """The path under which a proxy serves the office."""
    home: Path | None = None
    """The state folder of the office that this client starts itself when there is none; None where it may not."""
    token: str | None = field(default=None, repr=False)
    as_tenant: bool = False
    """A process of root's, or of the office's owner, means to be the tenant whose token it shows."""
    for_tenant: str = ""
    """The tenant for which an operator acts; empty: none."""

    @property
    def host_header(self) -> str:
        if self.socket is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def find_address(
    url: str | None,
    token: str | None,
    home: str | None,
    env: Mapping[str, str],
    *,
    as_tenant: bool = False,
    for_tenant: str = "",
) -> Address:
    """The office that is meant: what was given, else ``SUBLET_URL``, else the one of this machine."""
    as_tenant = as_tenant or env.get(AS_TENANT_VARIABLE) == "1"
    if for_tenant:
        valid_name(for_tenant, "tenant name")
    token = token if token is not None else env.get("SUBLET_TOKEN") or None
    if token is not None and _TOKEN.fullmatch(token) is None:
        raise InvalidRequest("the access token has characters that no token has", do="Copy it again, without spaces.")
    url = url if url is not None else (None if home is not None else env.get("SUBLET_URL") or None)
    if url is None:
        folder = home_dir(home, env)
        path = socket_path(folder)
        found = Address(url=f"unix://{path}", socket=path, home=folder, token=token)
    else:
        found = _parse(url, token)
    return replace(found, as_tenant=as_tenant, for_tenant=for_tenant)


def _parse(url: str, token: str | None) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f"{shown(url)} is not the address of an office", do=_URL_DO) from None
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return Address(url=url, socket=Path(parts.path), token=token)
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise InvalidRequest(f"{shown(url)} is not the address of an office", do=_URL_DO)
    tls = parts.scheme == "https"
    if not tls and host not in _LOOPBACK:
        raise InvalidRequest(
            f"{shown(url)} would send leases and tokens in the clear", do="Use https, or http only to this machine."
        )
    return Address(
        url=url, host=host, port=port or (443 if tls else 80), tls=tls, prefix=parts.path.rstrip("/"), token=token
    )
