"""The control API's bills: folded from the audit chain only, for the operator or for one tenant.

Reading the chain is work for a thread, since it is long. What was read is kept, so the next bill reads only what is
new.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Final

from sublet.errors import InvalidRequest
from sublet.office.api.asking import flag
from sublet.office.api.service import Call, Reply, Service, is_live, json_reply
from sublet.office.journal.history import History, wire_lines
from sublet.office.ledger.bills import Usage, check_window, fold, to_csv
from sublet.office.ledger.neighbours import RULES, noisy
from sublet.wire.http_views import NeighbourView, NoisyView

USAGES_KEPT: Final = 100_000
"""Leases that may be kept in memory between two bills; with more of them each bill reads the chain from its start."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


async def bill(service: Service, call: Call) -> Reply:
    """What was consumed. A tenant sees its own leases, an operator all, or with ``own`` those of its own tenant."""
    form = call.query.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest(f"a bill cannot be had as {form[:40]}", do="Ask for format=json or format=csv.")
    since_ns, until_ns = _wall_ns(call, "since"), _wall_ns(call, "until")
    mine = None if call.caller.operator and not flag(call.query, "own") else call.caller.tenant
    usages = [usage for usage in await _usages(service) if mine is None or usage.tenant == mine]
    by, per = call.query.get("by", "lease"), call.query.get("per")
    folded = await asyncio.to_thread(
        fold, usages, by=by, per=per, rates=service.rates, since_ns=since_ns, until_ns=until_ns
    )
    if form == "csv":
        return Reply(200, to_csv(folded).encode(), b"text/csv; charset=utf-8")
    return json_reply(wire_lines(folded))


async def neighbours(service: Service, call: Call) -> Reply:
    """Which tenants disturb others, by rules that are told with them."""
    since_ns, until_ns = _wall_ns(call, "since"), _wall_ns(call, "until")
    check_window(since_ns, until_ns)
    usages, state = await _usages(service), service.driver.ledger.state
    groups = {usage.tenant: state.group_of(usage.tenant) for usage in usages}
    group_weights = {group: state.group(group).weight for group in groups.values()}
    weights = {tenant: 1 if (known := state.tenants.get(tenant)) is None else known.weight for tenant in groups}
    found = await asyncio.to_thread(
        noisy,
        usages,
        group_of=groups.__getitem__,
        weight_of_tenant=weights.__getitem__,
        weight_of_group=group_weights.__getitem__,
        since_ns=since_ns,
        until_ns=until_ns,
    )
    views = [
        NeighbourView(
            tenant=one.tenant, group=groups[one.tenant], rule=one.rule, says=one.says, figures=dict(one.figures)
        )
        for one in found
    ]
    return json_reply(NoisyView(rules=dict(RULES), neighbours=views))


async def _usages(service: Service) -> list[Usage]:
    """Everything that was ever held, up to now: the clock is read after the chain, so that it is not behind it."""
    async with service.billing:
        history = service.history or History()
        service.history = None  # if reading fails half-way, what was read is not kept
        await asyncio.to_thread(history.read, service.archive.records(history.seq))
        now_ns = service.driver.clock.now_ns()
        leases = service.driver.ledger.state.leases.values()
        usages = history.usages(now_ns, {lease.id: lease.busy_ns for lease in leases if is_live(lease)})
        if len(usages) <= USAGES_KEPT:
            service.history = history
    return usages


def _wall_ns(call: Call, name: str) -> int | None:
    text = call.query.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidRequest(
            f"{name}={text[:40]} is not a moment", do="Write it with its zone, such as 2026-11-21T10:00:00Z."
        )
    since = moment - _EPOCH
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
