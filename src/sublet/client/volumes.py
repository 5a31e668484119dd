"""Volumes as a program sees them: found by name, listed, acquired, removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, urlencode

import msgspec

from sublet.client.handle import LeaseFacts
from sublet.client.lease_entry import Owed
from sublet.client.operations import REQUEST_TIMEOUT_S, Hooks, OfficeOperations, ReceivedGrant
from sublet.client.queries import listing_path
from sublet.client.requests import ask_block
from sublet.client.steps import Program
from sublet.errors import InvalidRequest, NotFound, Unauthorized
from sublet.lease.states import VolumeState
from sublet.values import Epoch, LeaseId, TenantId, format_size, valid_name
from sublet.wire.http import VolumeView


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The storage behind the block leases of one name, as it was when it was looked at."""

    name: str
    tenant: TenantId
    state: VolumeState
    size: int
    """Bytes. It keeps the size it was made with."""
    lease: LeaseId | None
    """The lease that has it now; None while it is free."""
    epoch: Epoch
    """Under which it is held, or was held last."""
    node: str
    made_at: str
    kept_at: str | None
    """Since when it is free."""
    keep_until: str | None
    """When it is removed, unless a lease takes it before."""
    retain: float
    """Seconds for which it is kept after each lease."""
    detail: str = ""

    def __str__(self) -> str:
        whose = f" ({self.lease} has it)" if self.lease is not None else ""
        until = f" until {self.keep_until}" if self.keep_until is not None else ""
        return f"{self.name}: {format_size(self.size)}, {self.state}{until}{whose}"


Attachable: TypeAlias = LeaseFacts | Volume | LeaseId | str
"""What `attach` takes: a lease, a volume, or the id or name of one."""


def listed(core: OfficeOperations, tenant: str | None, own: bool) -> Program[list[Volume]]:
    """What there is, by name."""
    views = yield from core.query(listing_path("/v1/volumes", tenant, own), list[VolumeView])
    return [_volume(view) for view in views]


def find(core: OfficeOperations, name: str) -> Program[Volume]:
    """The one of this name; ``NotFound`` if there is none."""
    view = yield from core.query(_path(name), VolumeView)
    return _volume(view)


def remove(core: OfficeOperations, volume: Volume | str) -> Program[Volume]:
    """Give it up, whatever is in it."""
    path = f"{_path(volume.name if isinstance(volume, Volume) else volume)}/remove"
    if isinstance(volume, Volume):
        path += f"?{urlencode({'tenant': volume.tenant})}"
    view = yield from core.command("POST", path, None, VolumeView, REQUEST_TIMEOUT_S)
    return _volume(view)


def attach(
    core: OfficeOperations, what: Attachable, holder: str, holder_pid: int | None = None, owed: Owed | None = None
) -> Program[ReceivedGrant]:
    """Take over a lease under a new epoch. A free volume is taken by a new lease."""
    if isinstance(what, LeaseFacts):
        return (yield from core.attach(what.id, holder, holder_pid, owed))
    if isinstance(what, Volume):
        return (yield from _take(core, what.name, holder, holder_pid, owed))
    if not isinstance(what, str):
        raise InvalidRequest(f"{what!r:.40} is neither a lease nor a volume", do="Give one, or its id or name.")
    try:
        return (yield from core.attach(LeaseId(what), holder, holder_pid, owed))
    except NotFound as unknown:
        try:
            return (yield from _take(core, valid_name(what, "name"), holder, holder_pid, owed))
        except (InvalidRequest, Unauthorized):  # no volume either, or none for this caller
            raise unknown from None


def _take(
    core: OfficeOperations, name: str, holder: str, holder_pid: int | None, owed: Owed | None
) -> Program[ReceivedGrant]:
    view = yield from core.query(_path(name), VolumeView)
    if view.lease is not None:
        return (yield from core.attach(LeaseId(view.lease), holder, holder_pid, owed))
    spec = ask_block({"name": name}, size=None, min_blocks=None)
    request = msgspec.structs.replace(spec.request, holder_pid=holder_pid)
    return (yield from core.acquire(request, Hooks(), owed))


def _path(name: str) -> str:
    return f"/v1/volumes/{quote(valid_name(name, 'name'), safe='')}"


def _volume(view: VolumeView) -> Volume:
    return Volume(
        name=view.name,
        tenant=TenantId(view.tenant),
        state=VolumeState(view.state),
        size=view.size,
        lease=None if view.lease is None else LeaseId(view.lease),
        epoch=view.epoch,
        node=view.node,
        made_at=view.made_at,
        kept_at=view.kept_at,
        keep_until=view.keep_until,
        retain=view.retain,
        detail=view.detail,
    )
