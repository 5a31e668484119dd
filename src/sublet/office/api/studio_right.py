"""The right of a studio: to read what its pages show, and to act for a tenant on its sessions. Pure.

A studio is known by a token of its own, which is stored and taken back like a tenant's. In its own name it reads the
routes that the table marks, of all tenants. In the name of a tenant it acquires, keeps and gives back leases of GPUs
with the label of a session, and no others: so what a notebook or a job holds is not there for it. It gets no
capability token, by which a connection to data or to guests is opened, and what the table does not mark is refused. So
a stolen token makes no tenant, and reads no volume and no secret.
"""

from __future__ import annotations

from typing import Final

from sublet.errors import NotFound, Unauthorized
from sublet.office.access import Caller
from sublet.office.api.routes import ForStudios, Route
from sublet.office.ledger.state import State
from sublet.values import Kind, LeaseId
from sublet.wire.http import (
    AcquireRequest,
    AttachRequest,
    ClaimRequest,
    ReleasesRequest,
    RenewalsRequest,
    RenewRequest,
)
from sublet.wire.http_views import SESSION_LABEL

_DO: Final = "Use the access token of that tenant, or an operator's."


def reader_or_actor(caller: Caller, route: Route) -> Caller:
    """The studio with the rights that it has on this route; raises where it has none."""
    if caller.tenant != caller.studio and ForStudios.ACTS in route.studios:
        return caller
    if caller.tenant == caller.studio and ForStudios.READS in route.studios:
        return caller._replace(operator=True)  # to read: no route that is marked so changes anything
    raise Unauthorized("that is not for studios", do=_DO)


def check_message(caller: Caller, route: Route, lease: str, body: object, state: State) -> None:
    """Raise where a studio that acts for a tenant asks for more than sessions."""
    match body:
        case AcquireRequest():
            others = [want.kind for want in body.wants if want.kind != Kind.GPU]
            if others or not body.labels.get(SESSION_LABEL) or body.resume is not None or body.replaces is not None:
                raise Unauthorized("a studio asks for the GPUs of a session, and for nothing else", do=_DO)
        case RenewalsRequest() | ReleasesRequest():
            for item in body.items:
                _check_session(caller, item.lease, state)
        case _:
            pass
    if isinstance(body, AcquireRequest | AttachRequest | ClaimRequest | RenewRequest) and body.token:
        raise Unauthorized("a studio opens no connection to data or guests", do=_DO)
    if route.of == "lease":
        _check_session(caller, lease, state)


def _check_session(caller: Caller, lease: str, state: State) -> None:
    """What is no session's is answered as one that never was."""
    record = state.leases.get(LeaseId(lease))
    if record is None or record.tenant != caller.tenant or SESSION_LABEL not in record.labels:
        raise NotFound(f"there is no lease {lease[:64]}", do="`sublet lease ls` shows yours.")
