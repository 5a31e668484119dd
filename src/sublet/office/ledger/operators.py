"""Commands of operators: tenants, revocations, drains, fences; and the opening of the office."""

from __future__ import annotations

from typing import Final

import msgspec

from sublet.errors import InvalidRequest, NotFound, Quarantined
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger import arrangement, burst_credit, reservations, volumes
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, NodeRecord, TenantRecord
from sublet.office.ledger.step import Step
from sublet.values import DURATION_MAX_NS, GroupId, NodeId, TenantId, valid_name
from sublet.wire import orders

UID_MAX: Final = (1 << 32) - 2
"""The number after it stands for no user."""


def open_office(step: Step, command: cmd.OpenOffice) -> Answer:
    """Take up the books under the clock of this machine.

    On the same clock deadlines are absolute and nothing moves. On another one (a reboot, another machine) every lease
    goes on with the time that was left when the journal last knew the time. How much the old clock ran on after that is
    not known, so each restart may lengthen a lease by up to ``slack_ns``; in all by no more than one time to live.
    """
    state, books = step.state, step.state.books
    if command.incarnation < books.incarnation:
        raise InvalidRequest(f"incarnation {command.incarnation} is older than the journal's {books.incarnation}")
    moved = bool(books.clock_domain) and books.clock_domain != command.clock_domain
    if moved:
        spent = _over_extended(step, command.slack_ns)
        last_ns = step.now.ns if command.last_ns is None else command.last_ns
        step.emit(
            ev.Rebased(clock_domain=command.clock_domain, shift_ns=step.now.ns - last_ns, extended_ns=command.slack_ns)
        )
        for lease in spent:  # only now, since an end is an instant of the new clock
            step.end(lease, EndReason.EXPIRED, "restarts had lengthened it by a whole time to live")
    if command.restored:
        for lease in list(state.leases.values()):
            if lease.status not in (LeaseStatus.ENDING, LeaseStatus.ENDED):
                step.end(lease, EndReason.OPERATOR, "the office was restored from a backup")
    step.emit(ev.OfficeOpened(incarnation=command.incarnation, clock_domain=command.clock_domain))
    volumes.migrate(step)
    if LOCAL_TENANT not in state.tenants:
        step.emit(ev.TenantSet(tenant=TenantRecord(id=LOCAL_TENANT, operator=True)))
    return Done()


def add_tenant(step: Step, command: cmd.AddTenant) -> Answer:
    """A new tenant; the token's hash comes from the driver, which alone saw the token."""
    valid_name(command.tenant, "tenant name")
    if command.tenant in step.state.tenants:
        raise InvalidRequest(
            f"there is a tenant {command.tenant} already", do=f"Change it with `sublet tenant set {command.tenant}`."
        )
    arrangement.check_quota(command.quota)
    if command.studio and command.operator:
        raise InvalidRequest("a studio has no operator rights", do="Leave one of the two out.")
    tenant = TenantRecord(
        id=command.tenant,
        quota=command.quota,
        tier_max=command.tier_max,
        operator=command.operator,
        token_hash=command.token_hash,
        generation=step.state.books.removed.get(command.tenant, -1) + 1,
        uid=command.uid,
        needs_token=command.needs_token,
        group=command.group or arrangement.declared_group(step.state, command.tenant),
        weight=command.weight,
        studio=command.studio,
    )
    _check_user(step, tenant)
    _check_group(step, tenant)
    step.emit(ev.TenantSet(tenant=tenant))
    arrangement.apply_to_new_tenant(step, tenant.id)
    return Done()


def set_tenant(step: Step, command: cmd.SetTenant) -> Answer:
    """Change what is given. Running leases stay; the new limits hold from the next request or renewal on."""
    known = _tenant(step, command.tenant)
    if command.quota is not None:
        arrangement.check_quota(command.quota)
    if known.id == LOCAL_TENANT and command.operator is False:
        raise InvalidRequest("the local tenant is the operator of this machine", do="Make other tenants for others.")
    if known.studio and command.operator:
        raise InvalidRequest(f"{known.id} is a studio, which has no operator rights", do="Add a tenant for that.")
    if known.disabled and command.token_hash is not None:
        raise InvalidRequest(
            f"tenant {known.id} is disabled", do=f"`sublet tenant enable {known.id}` gives it a new token."
        )
    given = {
        name: getattr(command, name)
        for name in ("quota", "tier_max", "operator", "token_hash", "uid", "needs_token", "group", "weight")
        if getattr(command, name) is not None
    }
    if command.no_uid:
        given |= {"uid": None, "needs_token": True}
    changed = msgspec.structs.replace(known, **given)
    _check_user(step, changed)
    _check_group(step, changed)
    if changed != known:
        if (
            changed.token_hash != known.token_hash
            or (known.operator and not changed.operator)
            or changed.uid != known.uid
            or (changed.needs_token and not known.needs_token)
        ):
            changed = _of_next_generation(changed)
        step.emit(ev.TenantSet(tenant=changed))
        burst_credit.go_by_quota(step, changed.id)
    return Done()


def set_group(step: Step, command: cmd.SetGroup) -> Answer:
    """Make a group or change it as a whole. Running leases stay; the order of the queue changes at once."""
    group = command.group
    valid_name(group.id, "group name")
    known = group.id == DEFAULT_GROUP or group.id in step.state.books.groups
    if command.is_new and known:
        raise InvalidRequest(
            f"there is a group {group.id} already", do=f"Change it with `sublet group set {group.id}`."
        )
    if command.is_new is False and not known:
        raise NotFound(f"there is no group {_short(group.id)}", do="`sublet group ls` shows all.")
    arrangement.check_group(group)
    state = step.state
    groups = {**state.books.groups, group.id: group}
    arrangement.check_floors(state, groups)
    reservations.check(state, state.books.reservations, groups, step.now.wall_ns)
    if state.books.groups.get(group.id) != group:
        step.emit(ev.GroupSet(group=group))
    return Done()


def remove_group(step: Step, command: cmd.RemoveGroup) -> Answer:
    """Forget a group in which no tenant is. What it used is forgotten with it."""
    state = step.state
    if command.group == DEFAULT_GROUP:
        raise InvalidRequest(
            "the default group is always there", do="`sublet group set default --weight 1` changes what it has."
        )
    if command.group not in state.books.groups:
        raise NotFound(f"there is no group {_short(command.group)}", do="`sublet group ls` shows all.")
    members = [tenant.id for tenant in state.tenants.values() if tenant.group == command.group]
    if members:
        few = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
        raise InvalidRequest(
            f"group {command.group} still has {few}",
            do=f"`sublet tenant set {members[0]} --group default` puts a tenant into the default group.",
        )
    reserved = next((each.id for each in state.books.reservations.values() if each.group == command.group), None)
    if reserved is not None:
        raise InvalidRequest(
            f"group {command.group} has reservation {reserved}", do=f"`sublet reservation rm {reserved}` first."
        )
    step.emit(ev.GroupRemoved(group=command.group))
    return Done()


def disable_tenant(step: Step, command: cmd.DisableTenant) -> Answer:
    """It has no token any more, what was opened with it is cut, and its leases end as at the end of an office: those
    that wait or are not claimed at once, the others with the notice of their tier. What it keeps stays."""
    known = _tenant(step, command.tenant)
    if known.id == LOCAL_TENANT:
        raise InvalidRequest("the local tenant is the owner of this office", do="End the office: `sublet down`.")
    if not known.disabled:
        changed = _of_next_generation(msgspec.structs.replace(known, disabled=True, token_hash=None))
        step.emit(ev.TenantSet(tenant=changed))
    why = f"tenant {known.id} was disabled"
    for lease in [lease for lease in step.state.leases.values() if lease.tenant == known.id]:
        if lease.status is LeaseStatus.ACTIVE and command.notice:
            step.notice(lease, EndReason.OPERATOR, step.policy.notice_for_ns(lease.tier), why)
        elif lease.status in (LeaseStatus.QUEUED, LeaseStatus.GRANTED) or (
            lease.status in LIVE_STATES and not command.notice
        ):
            step.end(lease, EndReason.OPERATOR, why)
    return Done()


def enable_tenant(step: Step, command: cmd.EnableTenant) -> Answer:
    """Only a disabled one: for the others a new token is `tenant set --new-token`."""
    known = _tenant(step, command.tenant)
    if not known.disabled:
        raise InvalidRequest(
            f"tenant {known.id} is not disabled", do=f"`sublet tenant set {known.id} --new-token` gives it a new token."
        )
    changed = msgspec.structs.replace(known, disabled=False, token_hash=command.token_hash)
    step.emit(ev.TenantSet(tenant=_of_next_generation(changed)))
    return Done()


def remove_tenant(step: Step, command: cmd.RemoveTenant) -> Answer:
    """Refused while anything of it is left: leases and volumes need a tenant to ask, and to bill."""
    known = _tenant(step, command.tenant)
    if known.id == LOCAL_TENANT:
        raise InvalidRequest("the local tenant is the owner of this office", do="`sublet purge` removes the office.")
    left = _remaining_of(step, known.id)
    if left:
        raise InvalidRequest(
            f"tenant {known.id} still has {', '.join(left)}",
            do=f"`sublet tenant disable {known.id}` ends its leases, `sublet volume rm NAME --tenant {known.id}` "
            "removes a volume; then try again.",
        )
    step.emit(ev.TenantRemoved(tenant=known.id, generation=known.generation + 1))
    return Done()


def revoke(step: Step, command: cmd.Revoke) -> Answer:
    """Take a lease, at once or with notice. An ended one stays as it ended."""
    lease = step.state.leases.get(command.lease)
    if lease is None:
        raise NotFound(f"there is no lease {_short(command.lease)}", do="`sublet lease ls` shows them.")
    if not 0 <= command.notice_ns <= DURATION_MAX_NS:
        raise InvalidRequest("the notice must be zero or more, and at most ten years", do="Give it in seconds.")
    if lease.status is LeaseStatus.ACTIVE and command.notice_ns:
        step.notice(lease, command.reason, command.notice_ns, command.detail)
    elif lease.status is LeaseStatus.NOTICED and command.notice_ns:
        raise InvalidRequest("the lease has notice already", do="Revoke it without notice to take it now.")
    elif lease.status not in (LeaseStatus.ENDING, LeaseStatus.ENDED):
        step.end(lease, command.reason, command.detail)
    return Done(lease=lease)


def apply_policy(step: Step, command: cmd.ApplyPolicy) -> Answer:
    """The groups, reservations and budgets of the file, all or none of them. Its limits are no part of the books, which
    a file may change at any start; what is said of them is for the audit chain."""
    is_new = arrangement.apply(step, command)
    if is_new or command.changed or command.by is not None:
        step.emit(ev.PolicyApplied(changed=command.changed, declared=command.declared if is_new else None))
    return Done()


def drain(step: Step, command: cmd.Drain) -> Answer:
    """Empty a node with notice and keep it empty; or put it back into service, with the leases that are still there."""
    node = _node(step, command.node)
    if command.notice_ns is not None and not 0 <= command.notice_ns <= DURATION_MAX_NS:
        raise InvalidRequest("the notice must be zero or more, and at most ten years", do="Give it in seconds.")
    if node.draining == command.draining:
        return Done()
    step.emit(ev.NodeDrained(node=node.id, draining=command.draining))
    for lease_id in list(step.state.promises):  # first: a lease that is spared by it gets notice of the drain below
        if step.state.leases[lease_id].promise_node == node.id:
            step.drop_promise(step.state.leases[lease_id])
    for lease in [step.state.leases[lease] for lease in step.state.on_node[node.id]]:
        if not command.draining:
            if lease.notice is not None and lease.notice.reason is EndReason.DRAINED and lease.status in LIVE_STATES:
                step.cancel_notice(lease)
            continue
        if lease.status is LeaseStatus.GRANTED:
            step.end(lease, EndReason.DRAINED, f"{node.id} is being emptied")
            continue
        if lease.notice is not None and lease.notice.reservation is not None and lease.status in LIVE_STATES:
            step.cancel_notice(lease)  # another device will be chosen
        if lease.status is LeaseStatus.ACTIVE:
            notice_ns = command.notice_ns
            if notice_ns is None:
                notice_ns = step.policy.notice_for_ns(lease.tier)
            step.notice(lease, EndReason.DRAINED, notice_ns, f"{node.id} is being emptied")
    return Done()


def clear_fence(step: Step, command: cmd.ClearFence) -> Answer:
    """End a quarantine: by a new verification, or by the operator's word."""
    resource = step.state.resources.get(command.resource)
    if resource is None:
        raise NotFound(f"there is no resource {_short(command.resource)}", do="`sublet status` shows them.")
    held = [piece for piece in resource.slices.values() if piece.state is SliceState.QUARANTINED]
    if command.lease is not None:
        held = [piece for piece in held if piece.lease == command.lease]
    at_fault = resource.state is SliceState.QUARANTINED and command.lease is None
    if not held and not at_fault:
        raise InvalidRequest(f"nothing is quarantined on {resource.id}", do="`sublet fence ls` shows what is.")
    if not command.vouch and (at_fault or any(piece.hard for piece in held)):
        raise Quarantined(
            f"{resource.id} reported a fault, which no check can clear",
            do="Inspect the device; then `sublet fence clear --vouch` takes your word for it, on record.",
        )
    for piece in held:
        look = orders.Verify(lease=piece.lease, epoch=piece.epoch, parts=(piece.part,), vouched=command.vouch)
        if not command.vouch:
            step.orders.append(look)
        elif not volumes.confirm_removal(step, piece):
            step.emit(ev.Cleared(resource=resource.id, lease=piece.lease, epoch=piece.epoch))
            step.orders.append(look)
    if at_fault:
        step.emit(ev.Cleared(resource=resource.id, lease=None))
    return Done()


def _over_extended(step: Step, slack_ns: int) -> list[LeaseRecord]:
    """Live leases whose extensions with this slack would exceed one time to live in all: their time is up."""
    return [
        lease
        for lease in step.state.leases.values()
        if lease.status in LIVE_STATES and lease.extended_ns + slack_ns > lease.ttl_ns
    ]


def _tenant(step: Step, tenant: TenantId) -> TenantRecord:
    found = step.state.tenants.get(tenant)
    if found is None:
        raise NotFound(f"there is no tenant {_short(tenant)}", do="`sublet tenant ls` shows all.")
    return found


def _of_next_generation(tenant: TenantRecord) -> TenantRecord:
    return msgspec.structs.replace(tenant, generation=tenant.generation + 1)


def _remaining_of(step: Step, tenant: TenantId) -> list[str]:
    """What there still is of a tenant, in words."""
    state = step.state
    counts = {
        "lease": sum(
            lease.tenant == tenant and lease.status is not LeaseStatus.ENDED for lease in state.leases.values()
        ),
        "volume": sum(volume.tenant == tenant for volume in state.volumes.values()),
        "quarantined device": sum(
            piece.tenant == tenant and piece.state is SliceState.QUARANTINED
            for resource in state.resources.values()
            for piece in resource.slices.values()
        ),
    }
    return [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items() if count]


def _check_user(step: Step, tenant: TenantRecord) -> None:
    """See that the user a tenant is bound to is one, and no other tenant's; and that only such a one needs no token."""
    uid = tenant.uid
    if uid is None:
        if not tenant.needs_token:
            raise InvalidRequest(
                f"tenant {tenant.id} is bound to no user, so only its token says who it is",
                do="Name its user as well: --uid 1001 --no-token-needed.",
            )
        return
    if tenant.id == LOCAL_TENANT:
        raise InvalidRequest("the local tenant is the owner of the office", do="Bind another tenant to this user.")
    if not 0 <= uid <= UID_MAX:
        raise InvalidRequest(f"{uid} is no user number", do="`id -u NAME` prints the number of a user.")
    other = next((one for one in step.state.tenants.values() if one.uid == uid and one.id != tenant.id), None)
    if other is not None:
        raise InvalidRequest(
            f"user {uid} is tenant {other.id} already",
            do=f"`sublet tenant set {other.id} --uid none` ends that; or give {tenant.id} no user and use its token.",
        )
    if tenant.operator and not tenant.needs_token:
        raise InvalidRequest(
            "an operator always shows its token", do="Leave --no-token-needed out, or take its operator rights away."
        )


def _check_group(step: Step, tenant: TenantRecord) -> None:
    """See that the group is there, and that the tenant has a weight."""
    arrangement.check_weight(tenant.weight, f"tenant {tenant.id}")
    if tenant.group is not None and tenant.group != DEFAULT_GROUP and tenant.group not in step.state.books.groups:
        raise NotFound(
            f"there is no group {_short(tenant.group)}", do=f"Make it: `sublet group add {_short(tenant.group)}`."
        )


def _node(step: Step, node: NodeId) -> NodeRecord:
    found = step.state.nodes.get(node)
    if found is None:
        raise NotFound(f"there is no node {_short(node)}", do="`sublet status` shows them.")
    return found


def _short(text: str | TenantId | GroupId) -> str:
    return text[:64]
