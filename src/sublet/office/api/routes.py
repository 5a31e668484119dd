"""The routes of the control API as data: everything about a route is in its row.

The application dispatches on this table, the OpenAPI document is made from it, and the test of rights walks it: a route
that is added here is served, described and tested for what strangers may do, without another word.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Any, Final

from sublet.errors import NotFound, Unauthorized
from sublet.lazy_dataclass import dataclass
from sublet.office.access import Caller
from sublet.office.api import bills, leases, listings, office, reservations
from sublet.office.api import policy as limits
from sublet.office.api.service import ApiCall, ApiReply, ApiService, CommandCall
from sublet.office.ledger.state import State
from sublet.values import Kind, LeaseId
from sublet.wire import http as wire
from sublet.wire.http import (
    AcquireRequest,
    AttachRequest,
    ClaimRequest,
    ReleasesRequest,
    RenewalsRequest,
    RenewRequest,
)
from sublet.wire.http_views import SESSION_LABEL

Handler = Callable[[ApiService, ApiCall], Awaitable[ApiReply] | CommandCall | ApiReply]
"""What is one command says which (``CommandCall``), what is known at once replies; anything else is a coroutine."""


class ForStudios(enum.Flag):
    """What a studio may use a route for (``studio_right``)."""

    NOTHING = 0
    READS = enum.auto()
    """In its own name, to show all of the office."""
    ACTS = enum.auto()
    """For a tenant, on sessions of it."""
    BOTH = READS | ACTS


class Right(enum.StrEnum):
    """What the caller must be."""

    OPEN = "open"
    """Any caller: says nothing about any tenant."""
    TENANT = "tenant"
    """Any tenant, for what is its own."""
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One line of the table."""

    method: str
    path: str
    """With ``{id}`` as its fourth piece, or without."""
    right: Right
    handler: Handler
    summary: str
    request: type | None = None
    answers: Mapping[int, Any] = field(default_factory=dict)
    """Status → message type, or a content type where it is not JSON."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Parameter → what it means."""
    of: str = ""
    """What ``{id}`` names: lease, volume, tenant, group, reservation or node."""
    keeps: bool = False
    """Whether it keeps, or gives back, what the caller has: then it is answered where other requests are too many."""
    studios: ForStudios = ForStudios.NOTHING


def _table() -> tuple[Route, ...]:
    current = wire.GrantAnswer | wire.PlaceAnswer | wire.OfferAnswer
    lease = "/v1/leases/{id}"

    def route(method: str, path: str, right: Right, handler: Handler, summary: str, **rest: Any) -> Route:
        return Route(method=method, path=path, right=right, handler=handler, summary=summary, **rest)

    def of_lease(
        verb: str, handler: Handler, summary: str, request: type | None, answer: Any, *, keeps: bool = True
    ) -> Route:
        return route(
            "POST",
            f"{lease}/{verb}",
            Right.TENANT,
            handler,
            summary,
            request=request,
            answers={200: answer},
            of="lease",
            keeps=keeps,
            studios=ForStudios.ACTS,
        )

    return (
        route("GET", "/v1/hello", Right.OPEN, office.hello, "Versions of the wire", answers={200: wire.Hello}),
        route("GET", "/openapi.json", Right.OPEN, office.document, "This document", answers={200: "application/json"}),
        route(
            "GET",
            "/metrics",
            Right.OPERATOR,
            office.metrics,
            "Numbers for Prometheus",
            answers={200: "text/plain"},
            studios=ForStudios.READS,
        ),
        route(
            "GET",
            "/v1/troubles",
            Right.OPERATOR,
            listings.troubles,
            "What has failed in background loops",
            answers={200: list[wire.TroubleView]},
        ),
        route(
            "GET",
            "/v1/checkpoint-key",
            Right.TENANT,
            office.checkpoint_key,
            "The key with which the caller's tenant signs checkpoints",
            answers={200: wire.CheckpointKey},
        ),
        route(
            "GET",
            "/v1/status",
            Right.TENANT,
            office.status,
            "The office",
            answers={200: wire.StatusView},
            studios=ForStudios.BOTH,
        ),
        route(
            "POST",
            "/v1/leases",
            Right.TENANT,
            leases.acquire,
            "Ask for a lease",
            request=wire.AcquireRequest,
            answers={
                201: wire.GrantAnswer,
                202: wire.PlaceAnswer,
                200: wire.OfferAnswer,
                409: wire.RefusalAnswer,
            },
            studios=ForStudios.ACTS,
        ),
        route(
            "GET",
            "/v1/leases",
            Right.TENANT,
            leases.leases,
            "Live leases, newest first",
            answers={200: list[wire.LeaseView]},
            query={
                "all": "1 shows ended ones too",
                "tenant": "only this tenant's",
                "own": "1: only those of the caller's tenant (operators)",
            },
            studios=ForStudios.BOTH,
        ),
        route(
            "GET",
            f"{lease}/explain",
            Right.TENANT,
            listings.explain,
            "Why it waits, or what may end it",
            answers={200: wire.ExplainAnswer},
            of="lease",
            studios=ForStudios.BOTH,
        ),
        route(
            "GET",
            lease,
            Right.TENANT,
            leases.show,
            "One lease, or the next change of its status",
            answers={200: current},
            query={"wait": "seconds to wait for a change, at most 60", "after": "the status that is already known"},
            of="lease",
            studios=ForStudios.BOTH,
        ),
        of_lease("claim", leases.claim, "Take a grant or an offer", wire.ClaimRequest, wire.GrantAnswer),
        of_lease("decline", leases.decline, "Say no to an offer", None, current),
        of_lease("renew", leases.renew, "Move the deadline", wire.RenewRequest, wire.RenewAnswer),
        of_lease("activity", leases.activity, "Say that it is busy or idle", wire.ActivityRequest, wire.LeaseView),
        of_lease("release", leases.release, "Give it back, or leave the queue", wire.ReleaseRequest, wire.LeaseView),
        of_lease(
            "attach",
            leases.attach,
            "Take it over under a new epoch",
            wire.AttachRequest,
            wire.GrantAnswer,
            keeps=False,
        ),
        of_lease("unbind", leases.unbind, "Let it outlive its process", wire.UnbindRequest, wire.LeaseView),
        route(
            "POST",
            f"{lease}/revoke",
            Right.OPERATOR,
            office.revoke,
            "Take it, at once or with notice",
            request=wire.RevokeRequest,
            answers={200: wire.LeaseView},
            of="lease",
        ),
        route(
            "GET",
            f"{lease}/token",
            Right.TENANT,
            leases.token,
            "A fresh capability token",
            answers={200: wire.TokenView},
            of="lease",
            keeps=True,
        ),
        route(
            "POST",
            "/v1/acquisitions",
            Right.TENANT,
            leases.acquire_many,
            "Ask for many leases that are alike, at once",
            request=wire.AcquisitionRequest,
            answers={
                201: wire.GrantsAnswer | wire.GrantAnswer,
                202: wire.PlaceAnswer,
                409: wire.RefusalAnswer,
            },
        ),
        route(
            "POST",
            "/v1/releases",
            Right.TENANT,
            leases.releases,
            "Many releases, each answered on its own",
            request=wire.ReleasesRequest,
            answers={200: wire.ReleasesAnswer},
            studios=ForStudios.ACTS,
        ),
        route(
            "POST",
            "/v1/ends",
            Right.TENANT,
            leases.ends,
            "Wait until no lease with these labels is left",
            request=wire.EndsRequest,
            answers={200: wire.EndsAnswer},
        ),
        route(
            "POST",
            "/v1/renewals",
            Right.TENANT,
            leases.renewals,
            "Many renewals, each answered on its own",
            request=wire.RenewalsRequest,
            answers={200: wire.RenewalsAnswer},
            keeps=True,
            studios=ForStudios.ACTS,
        ),
        route(
            "GET",
            "/v1/events",
            Right.TENANT,
            leases.events,
            "News as server-sent events",
            answers={200: "text/event-stream"},
            query={
                "lease": "only of this lease",
                "all": "1: of all tenants (operators)",
                "places": "0: nothing of places in the queue",
            },
            studios=ForStudios.BOTH,
        ),
        route(
            "GET",
            "/v1/guests",
            Right.TENANT,
            listings.guests,
            "What runs under leases",
            answers={200: list[wire.GuestEntry]},
            query={
                "all": "1: also what has ended and whose output is kept",
                "lease": "only under this lease",
                "limit": "how many at most (1000)",
                "after": "only those that follow the one of this `number`",
            },
        ),
        route(
            "GET",
            "/v1/volumes",
            Right.TENANT,
            leases.list_volumes,
            "What is kept under names",
            answers={200: list[wire.VolumeView]},
            query={"tenant": "only this tenant's", "own": "1: only those of the caller's tenant (operators)"},
        ),
        route(
            "GET",
            "/v1/volumes/{id}",
            Right.TENANT,
            leases.show_volume,
            "One volume",
            answers={200: wire.VolumeView},
            query={"tenant": "whose it is (operators)"},
            of="volume",
        ),
        route(
            "POST",
            "/v1/volumes/{id}/remove",
            Right.TENANT,
            leases.remove_volume,
            "Give it up now",
            answers={200: wire.VolumeView},
            query={"tenant": "whose it is (operators)"},
            of="volume",
        ),
        route(
            "GET",
            "/v1/queue",
            Right.TENANT,
            listings.queue,
            "The queue: requests with their places, the next first",
            answers={200: list[wire.PlaceAnswer]},
            query={"limit": "how many at most (1000)"},
            studios=ForStudios.READS,
        ),
        route(
            "GET",
            "/v1/connections",
            Right.OPERATOR,
            listings.connections,
            "Processes of other users that are connected over the shared socket",
            answers={200: list[wire.ConnectedView]},
            studios=ForStudios.READS,
        ),
        route(
            "GET",
            "/v1/tenants",
            Right.OPERATOR,
            office.tenants,
            "All tenants",
            answers={200: list[wire.TenantView]},
            studios=ForStudios.READS,
        ),
        route(
            "POST",
            "/v1/tenants",
            Right.OPERATOR,
            office.add_tenant,
            "A new tenant; its token is shown this once",
            request=wire.TenantRequest,
            answers={201: wire.TenantToken},
        ),
        route(
            "GET",
            "/v1/tenants/{id}",
            Right.OPERATOR,
            office.tenant,
            "One tenant",
            answers={200: wire.TenantView},
            of="tenant",
            studios=ForStudios.READS,
        ),
        route(
            "PATCH",
            "/v1/tenants/{id}",
            Right.OPERATOR,
            office.set_tenant,
            "Change what is given",
            request=wire.TenantRequest,
            answers={200: wire.TenantToken},
            of="tenant",
        ),
        route(
            "POST",
            "/v1/tenants/{id}/disable",
            Right.OPERATOR,
            office.disable_tenant,
            "Stop its token and end its leases",
            request=wire.TenantDisableRequest,
            answers={200: wire.TenantView},
            of="tenant",
        ),
        route(
            "POST",
            "/v1/tenants/{id}/enable",
            Right.OPERATOR,
            office.enable_tenant,
            "Give a disabled tenant a new token, shown this once",
            answers={200: wire.TenantToken},
            of="tenant",
        ),
        route(
            "POST",
            "/v1/tenants/{id}/remove",
            Right.OPERATOR,
            office.remove_tenant,
            "Forget a tenant of which nothing is left",
            answers={200: wire.TenantView},
            of="tenant",
        ),
        route(
            "GET",
            "/v1/groups",
            Right.OPERATOR,
            office.groups,
            "All groups",
            answers={200: list[wire.GroupView]},
            studios=ForStudios.READS,
        ),
        route(
            "POST",
            "/v1/groups",
            Right.OPERATOR,
            office.add_group,
            "A new group",
            request=wire.GroupRequest,
            answers={201: wire.GroupView},
        ),
        route(
            "PATCH",
            "/v1/groups/{id}",
            Right.OPERATOR,
            office.set_group,
            "Change what is given",
            request=wire.GroupRequest,
            answers={200: wire.GroupView},
            of="group",
        ),
        route(
            "POST",
            "/v1/groups/{id}/remove",
            Right.OPERATOR,
            office.remove_group,
            "Forget a group in which no tenant is",
            answers={200: wire.GroupView},
            of="group",
        ),
        route(
            "GET",
            "/v1/reservations",
            Right.OPERATOR,
            reservations.reservations,
            "All reservations",
            answers={200: list[wire.ReservationView]},
            studios=ForStudios.READS,
        ),
        route(
            "POST",
            "/v1/reservations",
            Right.OPERATOR,
            reservations.add,
            "GPUs for a group at stated times",
            request=wire.ReservationRequest,
            answers={201: wire.ReservationView},
        ),
        route(
            "POST",
            "/v1/reservations/{id}/remove",
            Right.OPERATOR,
            reservations.remove,
            "Forget a reservation",
            answers={200: wire.ReservationView},
            of="reservation",
        ),
        route(
            "GET",
            "/v1/budgets",
            Right.TENANT,
            bills.budgets,
            "What may be spent, and what is: a tenant sees its own, an operator all",
            answers={200: list[wire.BudgetView]},
        ),
        route(
            "POST",
            "/v1/budgets",
            Right.OPERATOR,
            bills.set_budget,
            "Make a budget, or change its amount",
            request=wire.BudgetRequest,
            answers={200: wire.BudgetView},
        ),
        route(
            "POST",
            "/v1/budgets/credit",
            Right.OPERATOR,
            bills.credit,
            "Add to the present window of a budget",
            request=wire.BudgetRequest,
            answers={200: wire.BudgetView},
        ),
        route(
            "POST",
            "/v1/budgets/remove",
            Right.OPERATOR,
            bills.remove,
            "Forget a budget",
            request=wire.BudgetRequest,
            answers={200: wire.BudgetView},
        ),
        route(
            "GET",
            "/v1/policy",
            Right.TENANT,
            limits.policy,
            "The limits that hold, and where each is from",
            answers={200: list[wire.LimitView]},
            query={"tenant": "what holds for this tenant (operators)"},
        ),
        route(
            "POST",
            "/v1/policy/apply",
            Right.OPERATOR,
            limits.apply,
            "Read policy.toml again and go by it; answers what has changed",
            answers={200: list[wire.LimitChange]},
        ),
        route(
            "POST",
            "/v1/policy/check",
            Right.OPERATOR,
            limits.check,
            "What a policy.toml with this text would change",
            request=wire.PolicyRequest,
            answers={200: list[wire.LimitChange]},
        ),
        route(
            "GET",
            "/v1/fences",
            Right.OPERATOR,
            office.fences,
            "What is not lent, and why",
            answers={200: list[wire.FenceView]},
            studios=ForStudios.READS,
        ),
        route(
            "POST",
            "/v1/fences/clear",
            Right.OPERATOR,
            office.clear_fence,
            "Verify again, or vouch; answers what is still fenced",
            request=wire.ClearFenceRequest,
            answers={200: list[wire.FenceView]},
            query={"resource": "its id"},
        ),
        route(
            "POST",
            "/v1/nodes/{id}/drain",
            Right.OPERATOR,
            office.drain,
            "Empty a node, or open it again",
            request=wire.DrainRequest,
            answers={200: wire.NodeView},
            of="node",
        ),
        route(
            "GET",
            "/v1/bill",
            Right.TENANT,
            bills.bill,
            "What was consumed",
            answers={200: list[wire.BillLine]},
            query={
                "by": "lease (default), tenant, group, device, label:KEY or label:KEY,KEY",
                "per": "day or month, in UTC: lines of their own for each",
                "since": "RFC 3339",
                "until": "RFC 3339",
                "own": "1: only of the caller's tenant (operators)",
                "format": "json (default) or csv",
            },
            studios=ForStudios.BOTH,
        ),
        route(
            "GET",
            "/v1/bill/neighbours",
            Right.OPERATOR,
            bills.neighbours,
            "Which tenants disturb others, by rules that are told with them",
            answers={200: wire.NoisyView},
            query={"since": "RFC 3339", "until": "RFC 3339"},
            studios=ForStudios.READS,
        ),
        route(
            "GET",
            "/v1/audit/verify",
            Right.OPERATOR,
            office.audit,
            "Walk the audit chain",
            answers={200: wire.AuditReport},
        ),
        route(
            "GET",
            "/v1/audit",
            Right.OPERATOR,
            office.audit_log,
            "The newest records of the audit chain, oldest first",
            answers={200: list[wire.AuditEntry]},
            query={
                "limit": "how many at most (1000)",
                "of": "only records that name this lease, tenant, resource, group, reservation or budget",
            },
        ),
        route(
            "POST",
            "/v1/backup",
            Right.OPERATOR,
            office.backup,
            "Copy the journal to a file of this machine",
            request=wire.BackupRequest,
            answers={200: wire.BackupAnswer},
        ),
        route(
            "POST",
            "/v1/down",
            Right.OPERATOR,
            office.down,
            "End the office",
            request=wire.DownRequest,
            answers={200: wire.DownAnswer},
        ),
    )


ROUTES: Final = _table()


# --------------------------------------------------------------------------------------------------------- studio right
#
# The right of a studio: to read what its pages show, and to act for a tenant on its sessions. Pure.
#
# A studio is known by a token of its own, which is stored and taken back like a tenant's. In its own name it reads the
# routes that the table marks, of all tenants. In the name of a tenant it acquires, keeps and gives back leases of GPUs
# with the label of a session, and no others: so what a notebook or a job holds is not there for it. It gets no
# capability token, by which a connection to data or to guests is opened, and what the table does not mark is refused.
# So a stolen token makes no tenant, and reads no volume and no secret.


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
