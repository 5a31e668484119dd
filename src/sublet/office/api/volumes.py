"""The control API's volumes: lists and removes them. A lease of blocks makes and uses one."""

from __future__ import annotations

from sublet.errors import NotFound
from sublet.office.api.asking import flag
from sublet.office.api.service import Asked, Call, Reply, Service, json_reply
from sublet.office.api.views import volume_view
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Answer
from sublet.office.ledger.records import Now, VolumeRecord, volume_key
from sublet.values import TenantId
from sublet.wire.http import VolumeView


async def volumes(service: Service, call: Call) -> Reply:
    """By name. A tenant sees its own, an operator all, its own, or those of one tenant."""
    wanted = call.caller.tenant if flag(call.query, "own") else call.query.get("tenant")
    found = [
        volume
        for volume in service.driver.ledger.state.volumes.values()
        if (call.caller.operator or volume.tenant == call.caller.tenant) and (wanted is None or volume.tenant == wanted)
    ]
    found.sort(key=lambda volume: (volume.tenant != call.caller.tenant, volume.key))
    now = service.driver.now()
    return json_reply([volume_view(volume, service.driver.ledger.state, now) for volume in found])


async def show(service: Service, call: Call) -> Reply:
    """One of them."""
    return json_reply(volume_view(_volume(service, call), service.driver.ledger.state, service.driver.now()))


def remove(service: Service, call: Call) -> Asked:
    """Give it up. The answer shows it as it is now: being removed, or gone."""
    owner = _owner(call)
    command = cmd.RemoveVolume(
        tenant=call.caller.tenant, operator=call.caller.operator, peer=call.caller.peer, name=call.id, owner=owner
    )
    before = service.driver.ledger.state.volumes.get(volume_key(owner, call.id))

    def render(answer: Answer, now: Now) -> VolumeView:
        state = service.driver.ledger.state
        volume = state.volumes.get(volume_key(owner, call.id))
        if volume is not None:
            return volume_view(volume, state, now)
        assert before is not None, "what is not there cannot be removed"
        view = volume_view(before, state, now)
        view.state, view.keep_until, view.remaining = "removed", None, None
        return view

    return Asked(command, render, json_reply)


def _owner(call: Call) -> TenantId:
    """Whose it is. Only an operator may name another; for any other caller that is a tenant without volumes."""
    named = call.query.get("tenant", call.caller.tenant)
    if named != call.caller.tenant and not call.caller.operator:
        raise _unknown(call)
    return TenantId(named)


def _volume(service: Service, call: Call) -> VolumeRecord:
    volume = service.driver.ledger.state.volumes.get(volume_key(_owner(call), call.id))
    if volume is None:
        raise _unknown(call)
    return volume


def _unknown(call: Call) -> NotFound:
    return NotFound(f"there is no volume {call.id[:64]}", do="`sublet volume ls` shows yours.")
