"""Paths of read-only requests, and the check that client and office speak compatible versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlencode

from sublet.errors import Unsupported
from sublet.values import parse_duration_ns, valid_labels, valid_text
from sublet.wire.http import Hello
from sublet.wire.http_views import check_grouping

ENDS_WAIT_S: Final = 60.0
"""How long ends are waited for unless another time is said."""


def listing_path(path: str, tenant: str | None, own: bool, *, ended_too: bool = False) -> str:
    """GET /v1/leases or /v1/volumes."""
    query = {"all": "1"} if ended_too else {}
    if tenant is not None:
        query["tenant"] = valid_text(tenant, "tenant")
    if own:
        query["own"] = "1"
    return _path(path, query)


def bill_path(
    by: str, since: str | None, until: str | None, per: str | None = None, *, csv: bool = False, own: bool = False
) -> str:
    """GET /v1/bill."""
    valid_text(by, "by")
    check_grouping(by, per)
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            valid_text(moment, name)
    query = {"by": by, "per": per, "since": since, "until": until, "format": "csv" if csv else None}
    query |= {"own": "1" if own else None}
    return _path("/v1/bill", {name: value for name, value in query.items() if value is not None})


def ends_query(labels: object, timeout: float | str) -> tuple[dict[str, str], int]:
    """Labels and nanoseconds of POST /v1/ends."""
    query = dict(labels) if isinstance(labels, Mapping) else labels
    return valid_labels(query), parse_duration_ns(timeout, "timeout", zero_ok=True)


def check_versions(hello: Hello, wire: int) -> None:
    """Refuse an office that is more than one version of the wire away."""
    if hello.wire_oldest <= wire <= hello.wire + 1:
        return
    older = "client" if wire < hello.wire else "office"
    raise Unsupported(
        f"the office speaks version {hello.wire} of the protocol and this client version {wire}",
        do=f"Bring the {older} up to date (the office is Sublet {hello.version}).",
    )


def _path(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path
