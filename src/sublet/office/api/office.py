"""The control API's office: status, tenants, fences, nodes, bills, audit chain, shutdown."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sublet.errors import InvalidRequest, NotFound, Unauthorized
from sublet.lease.states import LeaseStatus
from sublet.metrics import CONTENT_TYPE
from sublet.office.access import new_token, token_hash
from sublet.office.api.from_wire import choice, number, quota, text
from sublet.office.api.listings import all_troubles
from sublet.office.api.service import ApiCall, ApiReply, ApiService, is_live, json_reply
from sublet.office.api.to_wire import (
    audit_entry,
    device_view,
    fence_views,
    group_view,
    node_view,
    rfc3339,
    seconds,
    tenant_view,
)
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import LOCAL_TENANT, GroupRecord, LeaseRecord, TenantRecord
from sublet.values import GroupId, LeaseId, NodeId, ResourceId, TenantId, Tier, parse_duration_ns, shown, valid_name
from sublet.wire.http import (
    WIRE_OLDEST,
    WIRE_VERSION,
    BackupAnswer,
    BackupRequest,
    CheckpointKey,
    ClearFenceRequest,
    DownAnswer,
    DownRequest,
    DrainRequest,
    GroupRequest,
    GroupView,
    Hello,
    RevokeRequest,
    StatusView,
    TenantDisableRequest,
    TenantRequest,
    TenantToken,
    TenantView,
)

_TOKEN_BYTES: Final = 32
_DETAIL_MAX: Final = 500
_BACKUPS: Final = "backups"
"""Below the state folder."""
_RECORDS_MAX: Final = 1000
"""Records of the audit chain in one answer."""
_TORN_DOWN_S: Final = 5.0
"""How long the end of an office waits for what has ended already: less than a command waits for an answer."""


# ---- looking ----


def hello(service: ApiService, call: ApiCall) -> ApiReply:
    """What a client has to know before it asks; open to any caller, so it says nothing about any tenant."""
    return json_reply(Hello(wire=WIRE_VERSION, wire_oldest=WIRE_OLDEST, version=service.identity.version, studios=True))


def checkpoint_key(service: ApiService, call: ApiCall) -> ApiReply:
    """The caller's own, and no other tenant's, whatever rights the caller has."""
    return json_reply(CheckpointKey(key=service.signer.checkpoint_key(call.caller.tenant)))


def document(service: ApiService, call: ApiCall) -> ApiReply:
    """The OpenAPI document."""
    return ApiReply(200, service.document())


async def status(service: ApiService, call: ApiCall) -> ApiReply:
    """The office and its devices. Only operators are shown the leases of others and how many there are, the process
    and folder of the office, and the head of the audit chain."""
    me, state, now = service.identity, service.driver.ledger.state, service.driver.now()
    tenant, is_operator = call.caller.tenant, call.caller.operator
    shown: set[LeaseId] | None = None
    if not is_operator:
        shown = {lease.id for lease in state.leases.values() if lease.tenant == tenant}
    quarantined = [view for resource in state.resources.values() for view in fence_views(resource)]
    return json_reply(
        StatusView(
            pid=me.pid if is_operator else 0,
            version=me.version,
            wire=WIRE_VERSION,
            home=str(me.home) if is_operator else "",
            incarnation=state.books.incarnation,
            started_at=rfc3339(me.started_wall_ns),
            uptime=seconds(now.ns - me.started_ns),
            embedded=me.embedded,
            host_gpus=me.host_gpus,
            shared=me.shared,
            nodes=[node_view(node) for node in state.nodes.values()],
            devices=[device_view(resource, shown) for resource in state.resources.values()],
            live=state.live_count if is_operator else state.held_by(tenant).leases,
            queued=state.queued_count if is_operator else state.waiting_of(tenant),
            quarantined=sum(1 for view in quarantined if shown is None or view.lease in shown),
            audit_head=service.archive.head() if is_operator else "",
            supervisor_silent=service.supervisor_silent_s(),
            disk_short=service.why_no_room(),
            estimates=service.counting.estimates(),
            tenant=tenant,
        )
    )


async def metrics(service: ApiService, call: ApiCall) -> ApiReply:
    service.counting.streams = len(service.hub)
    service.counting.troubles = tuple(await all_troubles(service))
    service.counting.supervisor_silent_s = service.supervisor_silent_s()
    service.counting.disk_short = bool(service.why_no_room())
    return ApiReply(200, service.counting.metrics.page(), CONTENT_TYPE.encode())


# ---- tenants ----


async def tenants(service: ApiService, call: ApiCall) -> ApiReply:
    return json_reply([_tenant(service, record) for record in service.driver.ledger.state.tenants.values()])


async def tenant(service: ApiService, call: ApiCall) -> ApiReply:
    return json_reply(_tenant(service, _known(service, call.id)))


async def add_tenant(service: ApiService, call: ApiCall) -> ApiReply:
    """A new tenant with a token that is shown this once."""
    request: TenantRequest = call.body
    token = new_token(secrets.token_bytes(_TOKEN_BYTES))
    command = cmd.AddTenant(
        by=call.caller.tenant,
        peer=call.caller.peer,
        tenant=TenantId(valid_name(request.id, "tenant name")),
        token_hash=token_hash(token),
        operator=bool(request.operator),
        studio=bool(request.studio),
        uid=_user(service, request),
        needs_token=request.needs_token is not False,
        **_given(request),
    )
    await service.driver.submit(command)
    return json_reply(TenantToken(tenant=_tenant(service, _known(service, command.tenant)), token=token), 201)


async def set_tenant(service: ApiService, call: ApiCall) -> ApiReply:
    """Change what is given; a new token ends the old one at once."""
    request: TenantRequest = call.body
    if request.id is not None and request.id != call.id:
        raise InvalidRequest("a tenant cannot be renamed", do="Add a new tenant and retire the old one.")
    if request.studio is not None and request.studio is not _known(service, call.id).studio:
        raise InvalidRequest(
            "a tenant does not become a studio, nor a studio a tenant", do="Add another: `sublet tenant add NAME`."
        )
    if call.id == LOCAL_TENANT != call.caller.tenant:
        raise Unauthorized(
            "what the owner of the office has is not for operators to change",
            do="Do it as the owner, without an access token.",
        )
    token = new_token(secrets.token_bytes(_TOKEN_BYTES)) if request.new_token else None
    command = cmd.SetTenant(
        by=call.caller.tenant,
        peer=call.caller.peer,
        tenant=TenantId(call.id),
        operator=request.operator,
        token_hash=None if token is None else token_hash(token),
        uid=_user(service, request),
        no_uid=request.no_uid,
        needs_token=request.needs_token,
        **_given(request),
    )
    await service.driver.submit(command)
    return json_reply(TenantToken(tenant=_tenant(service, _known(service, call.id)), token=token))


async def disable_tenant(service: ApiService, call: ApiCall) -> ApiReply:
    """Its token stops now, and its leases end."""
    request: TenantDisableRequest = call.body
    known = _known(service, call.id)
    await service.driver.submit(
        cmd.DisableTenant(by=call.caller.tenant, peer=call.caller.peer, tenant=known.id, notice=request.notice)
    )
    return json_reply(_tenant(service, _known(service, call.id)))


async def enable_tenant(service: ApiService, call: ApiCall) -> ApiReply:
    """A disabled tenant has its rights again, with a token that is shown this once."""
    known = _known(service, call.id)
    token = new_token(secrets.token_bytes(_TOKEN_BYTES))
    command = cmd.EnableTenant(
        by=call.caller.tenant, peer=call.caller.peer, tenant=known.id, token_hash=token_hash(token)
    )
    await service.driver.submit(command)
    return json_reply(TenantToken(tenant=_tenant(service, _known(service, call.id)), token=token))


async def remove_tenant(service: ApiService, call: ApiCall) -> ApiReply:
    """Only one of which nothing is left. The answer is how it was."""
    view = _tenant(service, _known(service, call.id))
    await service.driver.submit(
        cmd.RemoveTenant(by=call.caller.tenant, peer=call.caller.peer, tenant=TenantId(call.id))
    )
    return json_reply(view)


def _user(service: ApiService, request: TenantRequest) -> int | None:
    """The user that a tenant is to be bound to, who must be another than the owner of the office."""
    if request.uid is None:
        return None
    if request.no_uid:
        raise InvalidRequest("the tenant cannot be bound to a user and to none", do="Say one of the two.")
    if service.access.is_owner(request.uid):
        raise InvalidRequest(
            f"user {request.uid} has the rights of the office's owner, whatever tenant it is",
            do="Bind the tenant to an ordinary user, and leave the owner out.",
        )
    return request.uid


def _given(request: TenantRequest) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.quota is not None:
        given["quota"] = quota(request.quota)
    if request.tier_max is not None:
        given["tier_max"] = choice(Tier, request.tier_max, "tier")
    if request.group is not None:
        given["group"] = GroupId(valid_name(request.group, "group name"))
    if request.weight is not None:
        given["weight"] = request.weight
    return given


def _known(service: ApiService, tenant_id: str) -> TenantRecord:
    record = service.driver.ledger.state.tenants.get(TenantId(tenant_id))
    if record is None:
        raise NotFound(f"there is no tenant {tenant_id}", do="See `sublet tenant ls`.")
    return record


def _tenant(service: ApiService, record: TenantRecord) -> TenantView:
    return tenant_view(record, service.driver.ledger.state, service.driver.clock.now_ns())


# ---- groups ----


async def groups(service: ApiService, call: ApiCall) -> ApiReply:
    """The default group first, then the others by name."""
    others = sorted(service.driver.ledger.state.books.groups.keys() - {DEFAULT_GROUP})
    return json_reply([_group(service, name) for name in (DEFAULT_GROUP, *others)])


async def add_group(service: ApiService, call: ApiCall) -> ApiReply:
    """A new group, in which no tenant is yet."""
    request: GroupRequest = call.body
    name = GroupId(valid_name(request.id, "group name"))
    return await _set_group(service, call, GroupRecord(id=name), is_new=True)


async def set_group(service: ApiService, call: ApiCall) -> ApiReply:
    """Change what is given."""
    request: GroupRequest = call.body
    if request.id is not None and request.id != call.id:
        raise InvalidRequest("a group cannot be renamed", do="Add a new group and move its tenants.")
    known = service.driver.ledger.state.group(GroupId(call.id))
    return await _set_group(service, call, known, is_new=False)


async def remove_group(service: ApiService, call: ApiCall) -> ApiReply:
    """Only one in which no tenant is. The answer is how it was."""
    view = _group(service, GroupId(call.id))
    command = cmd.RemoveGroup(by=call.caller.tenant, peer=call.caller.peer, group=GroupId(call.id))
    await service.driver.submit(command)
    return json_reply(view)


async def _set_group(service: ApiService, call: ApiCall, known: GroupRecord, *, is_new: bool) -> ApiReply:
    request: GroupRequest = call.body
    given: dict[str, Any] = {
        name: getattr(request, name) for name in ("weight", "floor", "ceiling") if getattr(request, name) is not None
    }
    if request.no_ceiling:
        if request.ceiling is not None:
            raise InvalidRequest("a group cannot have a ceiling and none", do="Say one of the two.")
        given["ceiling"] = None
    if request.quota is not None:
        given["quota"] = quota(request.quota)
    command = cmd.SetGroup(
        by=call.caller.tenant, peer=call.caller.peer, group=msgspec.structs.replace(known, **given), is_new=is_new
    )
    await service.driver.submit(command)
    return json_reply(_group(service, known.id), 201 if is_new else 200)


def _group(service: ApiService, name: GroupId) -> GroupView:
    state = service.driver.ledger.state
    return group_view(state.group(name), state, service.driver.clock.now_ns())


# ---- what operators do to hardware and leases ----


async def revoke(service: ApiService, call: ApiCall) -> ApiReply:
    request: RevokeRequest = call.body
    command = cmd.Revoke(
        by=call.caller.tenant,
        peer=call.caller.peer,
        lease=service.lease(call).id,
        notice_ns=parse_duration_ns(request.notice, "notice", zero_ok=True),
        detail=request.detail[:_DETAIL_MAX],
    )
    leases = service.driver.ledger.state.leases
    return json_reply(await service.driver.submit(command, lambda _, now: service.view(leases[command.lease], now)))


async def fences(service: ApiService, call: ApiCall) -> ApiReply:
    return json_reply([f for resource in service.driver.ledger.state.resources.values() for f in fence_views(resource)])


async def clear_fence(service: ApiService, call: ApiCall) -> ApiReply:
    """Verify again, or (``vouch``) take the operator's word. The answer lists what is still fenced of the resource."""
    request: ClearFenceRequest = call.body
    name = call.query.get("resource", "")
    resource = service.driver.ledger.state.resources.get(ResourceId(name))
    if resource is None:
        raise NotFound(f"there is no resource {shown(name)}", do="Name one that `sublet fence ls` shows.")
    command = cmd.ClearFence(
        resource=resource.id,
        lease=None if request.lease is None else LeaseId(request.lease),
        vouch=request.vouch,
        by=call.caller.tenant,
        peer=call.caller.peer,
    )
    await service.driver.submit(command)
    return json_reply(list(fence_views(resource)))


async def drain(service: ApiService, call: ApiCall) -> ApiReply:
    request: DrainRequest = call.body
    node = NodeId(call.id)
    if node not in service.driver.ledger.state.nodes:
        raise NotFound(f"there is no node {call.id}", do="See `sublet status`.")
    notice_ns = None if request.notice is None else parse_duration_ns(request.notice, "notice", zero_ok=True)
    command = cmd.Drain(
        by=call.caller.tenant, peer=call.caller.peer, node=node, draining=request.draining, notice_ns=notice_ns
    )
    await service.driver.submit(command)
    return json_reply(node_view(service.driver.ledger.state.nodes[node]))


# ---- money, proof, copies ----


async def audit(service: ApiService, call: ApiCall) -> ApiReply:
    return json_reply(await asyncio.to_thread(service.archive.verify))


async def audit_log(service: ApiService, call: ApiCall) -> ApiReply:
    """The newest records of the chain, oldest first: what happened, and whose doing it was."""
    most = int(number(call.query, "limit", most=_RECORDS_MAX)) or _RECORDS_MAX
    records = await asyncio.to_thread(service.archive.latest, most, text(call.query.get("of", ""), "name"))
    return json_reply([audit_entry(record) for record in records])


async def backup(service: ApiService, call: ApiCall) -> ApiReply:
    request: BackupRequest = call.body
    path = Path(request.path)
    if not path.is_absolute():
        raise InvalidRequest(f"{request.path} is not an absolute path", do="Write it from the root: /...")
    if call.caller.tenant != LOCAL_TENANT:
        path = _in_backups(service.identity.home, path)
    size = await asyncio.to_thread(service.archive.backup, path)
    return json_reply(BackupAnswer(path=str(path), bytes=size))


def _in_backups(home: Path, path: Path) -> Path:
    """An operator's token gives the rights of an operator and not those of the user whose office it is, who may be
    root: with it a file can be made in one folder only."""
    folder = home / _BACKUPS
    if path.parent != folder or path.name in (".", ".."):
        raise Unauthorized(
            f"with an access token a backup can be written to {folder} only",
            do=f"Name a file there, such as {folder}/NAME; or do it as the owner of the office, without a token.",
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    return path


# ---- the end ----


def _live(service: ApiService) -> list[LeaseRecord]:
    return [lease for lease in service.driver.ledger.state.leases.values() if is_live(lease)]


def _check_none(live: Sequence[LeaseRecord]) -> None:
    """Raises where leases live, or have ended and not all is cleared away yet."""
    held = sum(lease.status is not LeaseStatus.ENDING for lease in live)
    if held:
        raise InvalidRequest(
            "1 lease lives" if held == 1 else f"{held} leases live",
            do="Use --drain (end them with notice), --keep (leave them) or --now (end them).",
        )
    if live:
        have = "1 lease has" if len(live) == 1 else f"{len(live)} leases have"
        raise InvalidRequest(
            f"{have} ended, and what was there is still being cleared away",
            do="Try again in a moment, or use --drain (wait for it) or --keep (the supervisor goes on with it).",
        )


async def down(service: ApiService, call: ApiCall) -> ApiReply:
    """End the office: refused while leases live, or ``keep`` them to their deadlines, or end them first."""
    request: DownRequest = call.body
    live = _live(service)
    if request.how == "idle" and live:
        if all(lease.status is LeaseStatus.ENDING for lease in live):
            await service.ended(live, call, asyncio.get_running_loop().time() + _TORN_DOWN_S)
            live = _live(service)
        _check_none(live)
    service.ends_for_good = request.how != "keep"
    if request.how in ("drain", "now"):
        service.drain_and_stop(notice=request.how == "drain", by=call.caller.tenant)
    else:
        service.stop()
    return json_reply(DownAnswer(leases=len(live)))
