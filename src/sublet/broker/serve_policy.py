"""The control API, the operator's limits: which hold, and where each is from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sublet.broker.policy_file import KEYS, Limits
from sublet.broker.records import LOCAL_TENANT, Quota
from sublet.broker.service import Call, Reply, Service, json_reply
from sublet.errors import NotFound, Unauthorized
from sublet.values import TenantId, shown
from sublet.wire.http import LimitChange, LimitView

OF_QUOTA: Final = {
    "tenant.gpus": "gpus",
    "tenant.vram": "vram_bytes",
    "tenant.cores": "cores",
    "tenant.memory": "memory_bytes",
    "tenant.block": "block_bytes",
    "tenant.leases": "leases",
    "tenant.gpu_time": "gpu_seconds",
    "tenant.queue": "queue",
    "tenant.requests_per_minute": "requests_per_minute",
}
"""Which of the limits a tenant may have of its own."""
NOT_OWNER: Final = ("tenant.", "lease.")
"""Tables that say nothing of the owner's leases."""


def policy(service: Service, call: Call) -> Reply:
    """The limits of the office, or of one tenant. Who is no operator is told its own."""
    name, caller = call.query.get("tenant", ""), call.caller
    if not caller.operator:
        if name and name != caller.tenant:
            raise Unauthorized("the limits of others are for operators", do="Leave the tenant out.")
        name = caller.tenant
    quota = None
    if name:
        record = service.driver.ledger.state.tenants.get(TenantId(name))
        if record is None:
            raise NotFound(f"there is no tenant {shown(name)}", do="See `sublet tenant ls`.")
        quota = record.quota
    found = limit_views(service.limits, quota, tenant=name)
    return json_reply([view for view in found if caller.operator or view.key.startswith(NOT_OWNER)])


async def apply(service: Service, call: Call) -> Reply:
    """The file as it is now, from now on. With a mistake in it nothing changes."""
    before = service.limits
    limits = await service.apply_limits(call.caller)
    return json_reply(
        [
            LimitChange(key=path, before=key.shown(before.value(path)), now=key.shown(limits.value(path)))
            for path, key in KEYS.items()
            if before.value(path) != limits.value(path)
        ]
    )


def limit_views(limits: Limits, quota: Quota | None = None, *, tenant: str = "") -> Iterator[LimitView]:
    """Every key with its value and source; with a tenant's quota, what holds for that tenant."""
    for path, key in KEYS.items():
        value, source, unset = limits.value(path), limits.source(path), key.unset
        own = getattr(quota, OF_QUOTA[path]) if quota is not None and path in OF_QUOTA else None
        if own is not None:
            value, source = own, f"quota of {tenant}"
        elif tenant == LOCAL_TENANT and path.startswith(NOT_OWNER):
            value, source, unset = None, "owner", "no limit"
        text = unset if value is None else key.shown(value)
        yield LimitView(key=path, value=value, shown=text, source=source, says=key.says)
