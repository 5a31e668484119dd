"""Admission: whether a request is well formed, allowed to its tenant, and could ever fit; and the reasons of
waiting ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from datetime import UTC, datetime
from typing import Final

import msgspec

from sublet.errors import InvalidRequest
from sublet.lease.states import SliceState
from sublet.office.ledger import budgets, burst_credit, replacement
from sublet.office.ledger.answers import Refusal, RefusalCode
from sublet.office.ledger.commands import Acquire
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.groups import gpu_millis, held_millis, only_within_ceiling, over_ceiling, wanted_millis
from sublet.office.ledger.parked_placement import only_where_it_goes_on
from sublet.office.ledger.placement import (
    ANY_MODEL,
    MODEL_OR,
    RoomsByNode,
    fit,
    fit_on_node,
    is_class_honoured,
    is_model,
    largest,
    largest_each,
    models_of,
)
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import kinds_of
from sublet.office.ledger.records import LOCAL_TENANT, NO_QUOTA, LeaseRecord, Now, Quota, Want
from sublet.office.ledger.state import Held, State
from sublet.office.ledger.usage import at_most_from
from sublet.office.ledger.volume_placement import held_beside, only_where_its_volume_is, why_not_yet
from sublet.values import (
    BYTES_MAX,
    DURATION_MAX_NS,
    MIB,
    MILLIS_PER_DEVICE,
    NS_PER_S,
    Exclusivity,
    Kind,
    NodeId,
    Tier,
    format_duration,
    format_size,
    valid_labels,
    valid_name,
)
from sublet.wire.orders import Part, card_uuid


def fingerprint(command: Acquire, *more: object) -> str:
    """The content of a request, so that the same id with another content is noticed. The ids do not count. ``more`` is
    what a request for several leases says beside."""
    content: tuple[object, ...] = (
        command.wants,
        command.ttl_ns,
        command.tier,
        command.wait_ns,
        command.selector,
        command.renew,
        command.name,
        command.labels,
    )
    if command.resume is not None:
        content = (*content, command.resume, command.resume_epoch)
    if command.replaces is not None:
        content = (*content, "replaces", command.replaces, command.replaces_epoch)
    if command.expect_ns is not None:
        content = (*content, "expect", command.expect_ns)
    if command.retain_ns is not None:
        content = (*content, "retain", command.retain_ns)
    if command.pays_priority:
        content = (*content, "pays_priority")
    return hashlib.blake2b(msgspec.json.encode((*content, *more)), digest_size=16).hexdigest()


def leaves_size_out(command: Acquire) -> bool:
    """Whether it asks for as much disk as its volume has, which is not known by looking at the request."""
    return any(want.kind is Kind.BLOCK and want.amount == 0 for want in command.wants)


def check_request(command: Acquire, policy: Policy) -> None:
    """Refuse what contradicts itself; raises InvalidRequest."""
    if not command.wants or len(command.wants) > policy.wants_max:
        raise InvalidRequest("a request needs something to lease", do=f"Ask for 1 to {policy.wants_max} kinds.")
    if len({want.kind for want in command.wants}) != len(command.wants):
        raise InvalidRequest("the same kind stands twice in one request", do="Add the amounts up, or use count.")
    for want in command.wants:
        _check_want(want, policy)
    if not policy.ttl_min_ns <= command.ttl_ns <= policy.ttl_max_ns:
        raise InvalidRequest(
            f"a time to live of {format_duration(command.ttl_ns)} is out of range",
            do=f"Ask for {format_duration(policy.ttl_min_ns)} to {format_duration(policy.ttl_max_ns)}; "
            "a lease in use is renewed anyway.",
        )
    if command.expect_ns is not None and not 0 < command.expect_ns <= DURATION_MAX_NS:
        raise InvalidRequest(
            "the time it is expected to be used is nothing, or longer than ten years",
            do="Leave it out if it is unknown.",
        )
    if command.wait_ns is not None and not 0 <= command.wait_ns <= DURATION_MAX_NS:
        raise InvalidRequest(
            "the wait is negative or longer than ten years", do="Use 0 to try once; leave it out to wait without bound."
        )
    if not command.request_id or len(command.request_id) > 128 or not command.request_id.isprintable():
        raise InvalidRequest("the request id is empty, too long or not printable", do="Use up to 128 characters.")
    if command.name is not None:
        valid_name(command.name, "name")
    if len(command.holder) > 256:
        raise InvalidRequest("the holder's description is too long", do="Keep it to 256 characters.")
    valid_labels(command.labels)
    valid_labels(command.selector)


def _check_want(want: Want, policy: Policy) -> None:
    gpu = want.kind is Kind.GPU
    if want.amount < 1:
        raise InvalidRequest(f"the amount of {want.kind} must be at least 1", do="Ask for something.")
    if want.amount > BYTES_MAX:
        raise InvalidRequest(f"the amount of {want.kind} is more than any machine has", do="Ask for less.")
    if not 1 <= want.count <= policy.count_max:
        raise InvalidRequest(f"count={want.count} is not possible", do=f"Ask for 1 to {policy.count_max} devices.")
    if not gpu and (want.count != 1 or want.exclusivity is not None or want.model is not None):
        raise InvalidRequest(
            f"count, exclusivity and model are for GPUs, not for {want.kind}", do="Ask for one larger amount."
        )
    if want.model is not None and not (0 < len(want.model) <= 128 and want.model.isprintable()):
        raise InvalidRequest(
            "the model is empty, too long or not printable", do="Use a part of the name `sublet status` shows."
        )
    if want.model is not None and not all(models_of(want.model)):
        raise InvalidRequest(
            f"one of the models in {want.model!r} is empty", do='Write them with | in between, such as "H200|A100".'
        )
    if want.other is not None and want.model is None:
        raise InvalidRequest("or_model needs a model", do='Write model="A100" beside it.')
    if want.other is not None and not all(models_of(want.other)):
        raise InvalidRequest(
            f"one of the models in {want.other!r} is empty", do='Write or_model="T4|L4", or True for any.'
        )
    if want.least is not None and not 1 <= want.least <= want.amount:
        raise InvalidRequest(
            f"the smallest amount that would do ({want.least}) is not between 1 and what is asked ({want.amount})",
            do="Give or_smaller an amount below the one you ask for.",
        )


def over_quota(wants: tuple[Want, ...], quota: Quota, held: Held) -> str | None:
    """What stands against it, with numbers, if the tenant held so much already; None if nothing does."""
    if quota == NO_QUOTA:
        return None
    ask = _amounts_of(wants)
    for name, unit in _QUOTA_UNITS:
        limit = getattr(quota, name)
        if limit is not None and getattr(ask, name) and getattr(held, name) + getattr(ask, name) > limit:
            say = format_size if unit == "bytes" else str
            kept = (
                f" ({say(held.kept_bytes)} of it kept in volumes)" if name == "block_bytes" and held.kept_bytes else ""
            )
            return (
                f"the quota of {name.removesuffix('_bytes')} is {say(limit)}, "
                f"{say(getattr(held, name))} held{kept} and {say(getattr(ask, name))} asked"
            )
    return None


def over_quotas(state: State, lease: LeaseRecord) -> str | None:
    """What the quotas of its tenant and of its group say against it beside all that is held."""
    beyond = over_quota(lease.wants, state.quota_of(lease.tenant), state.held_by(lease.tenant))
    if beyond is not None:
        return beyond
    group = state.group_of(lease.tenant)
    beyond = over_quota(lease.wants, state.group(group).quota, state.held_by_group.get(group) or Held())
    return None if beyond is None else f"group {group}: {beyond}"


def own_limit(
    state: State, lease: LeaseRecord, now: Now, *, with_promises: bool = False, beside: int = 0
) -> str | None:
    """What the limits of its tenant and of its group say against a grant; ``with_promises``, if all their promises were
    kept as well; ``beside`` so many leases like it that are to be granted with it."""
    over_budget = budgets.used_up(state, lease, now)
    if over_budget is not None:
        return budgets.sentence(over_budget, now)
    group = state.group_of(lease.tenant)
    of_tenant, of_group = state.quota_of(lease.tenant), state.group(group)
    if of_tenant == NO_QUOTA and of_group.quota == NO_QUOTA and of_group.ceiling is None:
        return None
    promised = [state.leases[other] for other in state.promises] if with_promises else []
    ours = [other for other in promised if state.group_of(other.tenant) == group]

    def over(quota: Quota, held: Held, promises: list[LeaseRecord]) -> str | None:
        if quota == NO_QUOTA:
            return None
        held = copy(held_beside(state, lease, held))
        for other in promises:
            held.add(other.promise, +1)
        for _ in range(beside):
            add_wants(held, lease.wants)
        return over_quota(lease.wants, quota, held)

    mine = [other for other in ours if other.tenant == lease.tenant]
    beyond = over(of_tenant, state.held_by(lease.tenant), mine) or over_seconds(state, lease, now, beside=beside)
    if beyond is not None:
        return beyond
    beyond = over(of_group.quota, state.held_by_group.get(group) or Held(), ours)
    if beyond is not None:
        return f"group {group}: {beyond}"
    if of_group.ceiling is None:
        return None
    taken = replacement.millis_beside(state, lease)
    taken += sum(gpu_millis(other.promise) for other in ours) + beside * wanted_millis(state, lease.wants)
    return over_ceiling(state, lease, taken)


def is_groups_limit(state: State, lease: LeaseRecord) -> bool:
    """Whether, of what ``own_limit`` says of quotas and ceilings, it is its group's limit and not its tenant's own."""
    held = held_beside(state, lease, state.held_by(lease.tenant))
    return over_quota(lease.wants, state.quota_of(lease.tenant), held) is None


def would_fit_without_own(state: State, lease: LeaseRecord) -> bool:
    """Whether the limits of its group would let it in if its tenant held nothing."""
    group = state.group(state.group_of(lease.tenant))
    of_group, own = copy(state.held_by_group.get(group.id) or Held()), state.held_by(lease.tenant)
    for name, _ in _QUOTA_UNITS:
        setattr(of_group, name, getattr(of_group, name) - getattr(own, name))
    account = state.books.accounts.get(lease.tenant)
    millis = held_millis(state, group.id) - (0 if account is None else account.level[0])
    return over_quota(lease.wants, group.quota, of_group) is None and over_ceiling(state, lease, millis) is None


def fewer_gpus(lease: LeaseRecord, rooms: RoomsByNode, policy: Policy) -> str | None:
    """How many of the GPUs that it asks for are free now, on one node; None if it asks for one, or none is."""
    want, mix = lease.wants[0], policy.share_across_tenants
    for count in range(want.count - 1, 0, -1):
        fewer = (msgspec.structs.replace(want, count=count), *lease.wants[1:])
        if fit(fewer, lease.tenant, rooms, mix=mix) is not None:
            return f"{describe(fewer[0])}, which {'is' if count == 1 else 'are'} free now"
    return None


def over_seconds(state: State, lease: LeaseRecord, now: Now, *, beside: int = 0) -> str | None:
    """Whether the tenant's device time in the window is used up, for requests and leases with a GPU; ``beside`` so many
    leases like it that are to be granted with it.

    A request that says how long it will probably take must fit in with that; the time to live says nothing, since a
    lease is given back when its work is done. Once it is held, what counts is what was used.
    """
    if Kind.GPU not in kinds_of(lease):
        return None
    group = state.group_of(lease.tenant)
    of_group = state.group(group).quota.gpu_seconds
    if of_group is not None:
        members = (tenant for tenant in state.books.usage if state.group_of(tenant) == group)
        used = sum(state.used_milli_ns(tenant, now.ns) for tenant in members)
        beyond = _over_seconds(state, lease, used, of_group, beside)
        if beyond is not None:
            return f"group {group}: {beyond}"
    beyond = over_own_seconds(state, lease, now, beside=beside)
    if beyond is None or burst_credit.covers(state, lease, (1 + beside) * drawing(state, lease), now.ns):
        return None
    if not state.quota_of(lease.tenant).burst_seconds:
        return beyond
    left = format_duration(burst_credit.remaining_seconds(state, lease.tenant, now.ns) * NS_PER_S)
    return f"{beyond}, and {left} of burst credit are left"


def limit_sentence(state: State, lease: LeaseRecord, now: Now) -> str | None:
    """What ``own_limit`` says, for a person who waits: with when the limit resets, where time alone does that."""
    limit = own_limit(state, lease, now)
    if limit is None or limit != over_seconds(state, lease, now):
        return limit
    at_ns = seconds_free_at(state, lease, now)
    if at_ns is None:
        return limit
    return f"{limit}; the limit resets at {_second(now.wall_ns + max(0, at_ns - now.ns))}"


def _second(wall_ns: int) -> str:
    """Not before it."""
    return f"{datetime.fromtimestamp(-(-wall_ns // NS_PER_S), UTC):%Y-%m-%d %H:%M:%S} UTC"


def over_own_seconds(state: State, lease: LeaseRecord, now: Now, *, beside: int = 0) -> str | None:
    """What its tenant's quota of device time says, whatever burst credit there is."""
    limit = state.quota_of(lease.tenant).gpu_seconds
    if limit is None:
        return None
    return _over_seconds(state, lease, state.used_milli_ns(lease.tenant, now.ns), limit, beside)


def drawing(state: State, lease: LeaseRecord) -> int:
    """What it would draw on the burst credit beside what is drawn already."""
    return (gpu_millis(lease.parts) or wanted_millis(state, lease.wants)) - lease.draws


def seconds_free_at(state: State, lease: LeaseRecord, now: Now) -> int | None:
    """When time alone will have taken away what ``over_seconds`` says against a waiting request; None: never."""
    group, window_ns, usage = state.group_of(lease.tenant), state.books.usage_window_ns, state.books.usage
    own, of_group = state.quota_of(lease.tenant).gpu_seconds, state.group(group).quota.gpu_seconds
    found: list[int | None] = []
    for limit, tenants, is_own in (
        (own, [lease.tenant], True),
        (of_group, [tenant for tenant in usage if state.group_of(tenant) == group], False),
    ):
        if limit is not None:
            most = min(limit * NS_PER_S - 1, limit * NS_PER_S - _expected_ns(lease)) * MILLIS_PER_DEVICE
            meters = [usage[tenant] for tenant in tenants if tenant in usage]
            at_ns = at_most_from(meters, most, now.ns, window_ns)
            if is_own:
                burst_ns = burst_credit.covered_from(state, lease, drawing(state, lease), now.ns)
                at_ns = min((at for at in (at_ns, burst_ns) if at is not None), default=None)
            found.append(at_ns)
    return None if None in found else max((at for at in found if at is not None), default=None)


def _expected_ns(lease: LeaseRecord) -> int:
    """How much device time a request says that it will need."""
    if lease.expect_ns is None or lease.parts:
        return 0
    return lease.expect_ns * sum(want.count for want in lease.wants if want.kind is Kind.GPU)


def _over_seconds(state: State, lease: LeaseRecord, used_milli_ns: int, limit: int, beside: int) -> str | None:
    used_s = used_milli_ns / MILLIS_PER_DEVICE / NS_PER_S
    expected_s = (1 + beside) * _expected_ns(lease) / NS_PER_S
    if used_s < limit and used_s + expected_s <= limit:
        return None
    window = format_duration(state.books.usage_window_ns)
    sentence = f"{used_s:.0f} of {limit} GPU-seconds are used in the last {window}"
    return f"{sentence}, and this is expected to need {expected_s:.0f}" if expected_s else sentence


LESS_OR_HIGHER: Final = "Ask for less, or the operator for a higher limit; waiting does not help."


def never_allowed(lease: LeaseRecord, state: State) -> Refusal | None:
    """A refusal if nothing here is of the class asked for, or its tenant may never have so much."""
    for want in lease.wants:
        if not is_class_honoured(want, (resource.device for resource in state.resources.values())):
            return _not_honoured(want)
    group = state.group_of(lease.tenant)
    beyond = over_quota(lease.wants, state.quota_of(lease.tenant), Held()) or over_ceiling(state, lease, 0)
    if beyond is None and (of_group := over_quota(lease.wants, state.group(group).quota, Held())) is not None:
        beyond = f"group {group}: {of_group}"
    if beyond is not None:
        return Refusal(code=RefusalCode.QUOTA, reason=beyond, do=LESS_OR_HIGHER)
    return None


def _not_honoured(want: Want) -> Refusal:
    if want.exclusivity is Exclusivity.SHARED:
        reason = "every GPU here lets one process in at a time (compute mode EXCLUSIVE_PROCESS), so none is shared"
        do = "Ask for exclusivity session or device. An operator can set `nvidia-smi -c DEFAULT` and restart."
    else:
        reason, do = "no device here can be partitioned", "Ask for exclusivity shared, session or device."
    return Refusal(code=RefusalCode.UNSUPPORTED, reason=reason, do=do)


def never_fits(lease: LeaseRecord, state: State, policy: Policy) -> Refusal | None:
    """A refusal if the request would not fit even on empty nodes."""
    rooms, mix = _empty_rooms(state, lease), policy.share_across_tenants
    if fit(lease.wants, lease.tenant, rooms, mix=mix) is not None:
        within = only_within_ceiling(state, lease, rooms, 0)
        if within is rooms or fit(lease.wants, lease.tenant, within, mix=mix) is not None:
            return None
        return Refusal(
            code=RefusalCode.QUOTA,
            reason=f"{together(lease.wants)} would be above the ceiling of its group on the devices that are here",
            do=LESS_OR_HIGHER,
        )
    if fit(lease.wants, LOCAL_TENANT, rooms, mix=mix) is not None:
        return _walled_off(lease, state, rooms)
    alone = (want for want in lease.wants if fit((want,), lease.tenant, rooms, mix=True) is None)
    return _beyond(next(alone, None), lease, rooms)


def _walled_off(lease: LeaseRecord, state: State, rooms: RoomsByNode) -> Refusal:
    """Tenant local could have it: elsewhere guests cannot use the cards, and the first of them says why."""
    models = next((want.model for want in lease.wants if want.model is not None), None)
    walled = (room for node_rooms in rooms.values() for room in node_rooms if room.walled)
    device = next(state.resources[room.resource].device for room in walled if models is None or is_model(models, room))
    return Refusal(
        code=RefusalCode.UNSUPPORTED,
        reason=f"a guest of a tenant cannot use {card_uuid(device.id) or device.id}, as was found when it was tried "
        f"out: {device.walled_trouble}",
        do="`sublet doctor --gpu` tries it again; once it can, start the office again.",
    )


def _beyond(want: Want | None, lease: LeaseRecord, rooms: RoomsByNode) -> Refusal:
    """Why nothing here could ever carry it: the want that is too much by itself, or all of them together."""
    do = "Ask for less; `sublet status` shows what there is."
    if want is None:
        return Refusal(code=RefusalCode.TOO_BIG, reason=f"no node has {together(lease.wants)} together", do=do)
    alike = [room for node_rooms in rooms.values() for room in node_rooms if room.kind is want.kind]
    if want.model is not None and not any(is_model(want.model, room) for room in alike):
        return Refusal(
            code=RefusalCode.UNSUPPORTED,
            reason=f"no device here is called {want.model!r}",
            do="`sublet status` shows what they are called; a part of the name will do.",
        )
    most = max((largest(want, lease.tenant, node_rooms, mix=True) for node_rooms in rooms.values()), default=0)
    if want.kind is Kind.BLOCK and not most:
        return Refusal(
            code=RefusalCode.TOO_BIG,
            reason=f"{describe(want)} cannot be had: no node has any to lend, as where the disk is full",
            do="Free space on the disk of the office; `sublet status` shows what there is.",
        )
    has = amount_text(want.kind, most) if most else "none"
    if want.kind is Kind.GPU and most:
        fitting = [room for room in alike if want.model is None or is_model(want.model, room)]
        count = max(sum(room in fitting for room in node_rooms) for node_rooms in rooms.values())
        has = f"the largest has {count} with {has} each" if count > 1 else f"the largest has {has}"
        if want.count > count:
            has = has if count > 1 else f"the largest has one, with {amount_text(want.kind, most)}"
            return Refusal(
                code=RefusalCode.TOO_BIG,
                reason=f"{want.count} GPUs are more than any node has ({has})",
                do=f"Ask for at most {count} at once; `sublet status` shows what there is.",
            )
    return Refusal(
        code=RefusalCode.TOO_BIG,
        reason=f"{describe(want)} is more than any node has ({has})",
        do=do,
        would_fit=most or None,
    )


def smaller(lease: LeaseRecord, rooms: RoomsByNode, policy: Policy) -> tuple[Want, ...] | None:
    """The largest wants that fit on one of these nodes and are not below what the holder would take, or None.

    For a request that does not fit there as it is. Wants of one request are of different kinds, so within a node none
    takes room from another, and each may be as large as it can.
    """
    if all(want.least is None for want in lease.wants):
        return None
    mix = policy.share_across_tenants
    found = (_smaller_on(lease, node_rooms, mix=mix) for node_rooms in rooms.values())
    return max((less for less in found if less is not None), key=lambda less: [w.amount for w in less], default=None)


def of_other_model(lease: LeaseRecord, rooms: RoomsByNode, policy: Policy) -> tuple[Want, ...] | None:
    """The same wants of another model, if the holder would take that and it fits on one of these nodes."""
    if all(want.other is None for want in lease.wants):
        return None
    found = tuple(
        want
        if want.other is None
        else msgspec.structs.replace(
            want, model=None if want.other == ANY_MODEL else want.other, other=None, least=None
        )
        for want in lease.wants
    )
    return None if fit(found, lease.tenant, rooms, mix=policy.share_across_tenants) is None else found


def most_ever(lease: LeaseRecord, state: State, policy: Policy) -> tuple[Want, ...] | None:
    """Of another model, or the largest, that the holder would take and that would fit on empty nodes; None if there is
    none."""
    rooms = only_within_ceiling(state, lease, _empty_rooms(state, lease), 0)
    return of_other_model(lease, rooms, policy) or smaller(lease, rooms, policy)


def other_model_that_fits(lease: LeaseRecord, state: State, rooms: RoomsByNode, policy: Policy) -> str | None:
    """How a request would have to be written for another model that is free now; None if it asks for none, or none
    is."""
    if all(want.model is None for want in lease.wants):
        return None
    found = fit(
        [msgspec.structs.replace(want, model=None) for want in lease.wants],
        lease.tenant,
        rooms,
        mix=policy.share_across_tenants,
    )
    model = (
        ""
        if found is None
        else next((state.resources[part.resource].device.model for part in found[1] if part.kind is Kind.GPU), "")
    )
    return f'model="{model}", which is free now' if model else None


def place(lease: LeaseRecord, state: State, rooms: RoomsByNode, policy: Policy) -> tuple[NodeId, list[Part]] | None:
    """Where it fits as it is; as the policy has it, on the cheapest devices first."""
    mix, cheapest = policy.share_across_tenants, _cheapest_first(lease, state) if policy.cheapest_first else None
    found = None if cheapest is None else fit(cheapest, lease.tenant, rooms, mix=mix)
    return fit(lease.wants, lease.tenant, rooms, mix=mix) if found is None else found


def _cheapest_first(lease: LeaseRecord, state: State) -> list[Want] | None:
    """The same wants with all models in the order of their prices; None where that is no matter."""
    gpus = [want for want in lease.wants if want.kind is Kind.GPU]
    if lease.tier is not Tier.INTERACTIVE or not gpus or gpus[0].model is not None:
        return None
    models = {each.device.model for each in state.resources.values() if each.device.kind is Kind.GPU}
    prices = {model: state.rates.of(Kind.GPU, model) for model in models}
    if len(set(prices.values())) < 2 or any(not model or MODEL_OR in model for model in models):
        return None
    names = MODEL_OR.join(sorted(models, key=lambda model: (prices[model], model)))
    return [want if want.kind is not Kind.GPU else msgspec.structs.replace(want, model=names) for want in lease.wants]


def check_pays_priority(lease: LeaseRecord, state: State) -> None:
    """See that what the request would pay for is for sale; raises InvalidRequest."""
    if state.rates.priority is None:
        raise InvalidRequest(
            "priority is not for sale in this office",
            do="Ask without it, or ask the operator for a rate: `priority` in rates.toml.",
        )
    if Kind.GPU not in kinds_of(lease):
        raise InvalidRequest("priority is paid for by the GPU, and this request has none", do="Ask without it.")


def price_of(state: State, want: Want, model: str, *, pays_priority: bool) -> int:
    """Millionths of a unit of money, for an hour of what is wanted on devices of this model."""
    sizes = [each.device.capacity for each in state.resources.values() if each.device.model == model]
    millis = MILLIS_PER_DEVICE
    if want.exclusivity is Exclusivity.SHARED and sizes:
        millis = min(millis, -(-want.amount * millis // max(sizes)))
    price = state.rates.of(Kind.GPU, model)
    if pays_priority:
        price += state.rates.priority or 0
    return price * want.count * millis // MILLIS_PER_DEVICE


def _smaller_on(lease: LeaseRecord, rooms: Sequence[Room], *, mix: bool) -> tuple[Want, ...] | None:
    wants = list(lease.wants)
    for index, want in enumerate(wants):
        if want.least is None:
            continue
        amount = min(want.amount, largest_each(want, lease.tenant, rooms, mix=mix))
        if amount < want.least:
            return None
        if want.kind is not Kind.CPU and MIB < amount < want.amount:
            amount -= amount % MIB  # people compare round numbers
            amount = max(amount, want.least)
        wants[index] = msgspec.structs.replace(want, amount=amount)
    found = tuple(wants)
    return None if fit_on_node(found, lease.tenant, rooms, mix=mix) is None else found


def what_would_fit(lease: LeaseRecord, rooms: RoomsByNode, policy: Policy) -> int | None:
    """The largest amount of the first want that is free now."""
    mix = policy.share_across_tenants
    return (
        max((largest(lease.wants[0], lease.tenant, node_rooms, mix=mix) for node_rooms in rooms.values()), default=0)
        or None
    )


def why_waiting(lease: LeaseRecord, state: State, now: Now, policy: Policy, place: int) -> str:
    """One sentence for the person in the line; it names no other tenant."""
    own = limit_sentence(state, lease, now) or why_not_yet(state, lease)
    if own is not None:
        return own
    if lease.promise and lease.victims == (lease.replaces,):
        return "what your present lease has is being cleared for it"
    if lease.promise:
        leaving = "1 lease has" if len(lease.victims) == 1 else f"{len(lease.victims)} leases have"
        return f"{leaving} notice to make room for yours"
    ahead = place - 1
    reason = not_free(lease) + above_ceiling(lease, state) + out_of_service(lease, state) + in_the_way(lease, state)
    if not ahead:
        return f"{reason}; yours is next"
    return f"{reason}; 1 request goes first" if ahead == 1 else f"{reason}; {ahead} requests go first"


def not_free(lease: LeaseRecord) -> str:
    """``2 GPUs with 8GiB are not free now``; several kinds have to be free together, on one node."""
    wants, want = lease.wants, lease.wants[0]
    beyond = f"{together(lease.full_wants)} is more than any node has; " if lease.full_wants else ""
    if len(wants) > 1:
        return f"{beyond}{together(wants)} are not free together now"
    several = want.count > 1 or (want.kind is Kind.CPU and want.amount > 1)
    return f"{beyond}{describe(want)} {'are' if several else 'is'} not free now"


def above_ceiling(lease: LeaseRecord, state: State) -> str:
    """How many devices are so small that its part of them is more than the ceiling of its group leaves."""
    rooms = state.rooms_by_node
    allowed = only_within_ceiling(state, lease, rooms, replacement.millis_beside(state, lease))
    above = sum(map(len, rooms.values())) - sum(map(len, allowed.values()))
    if not above:
        return ""
    count = "1 smaller GPU" if above == 1 else f"{above} smaller GPUs"
    return f" (its part of {count} would be more than the ceiling of group {state.group_of(lease.tenant)} leaves)"


def out_of_service(lease: LeaseRecord, state: State) -> str:
    """How many of what is asked for are unavailable until a person has looked after them, or their node is back."""
    kind = lease.wants[0].kind
    rooms = [state.rooms[resource.id] for resource in state.resources.values() if resource.device.kind is kind]
    shut = sum(_is_shut(state, room) for room in rooms)
    held = sum(room.quarantined for room in rooms if not _is_shut(state, room))
    parts = [f"{shut} of {len(rooms)} out of service"] if shut else []
    walled = 0 if lease.tenant == LOCAL_TENANT else sum(room.walled for room in rooms)
    if walled:
        parts.append(f"{walled} of {len(rooms)} cannot be used by guests of tenants")
    if held:
        parts.append("some of it is quarantined")
    return f" ({', '.join(parts)})" if parts else ""


def _is_shut(state: State, room: Room) -> bool:
    is_quarantined = room.kind is Kind.GPU and room.quarantined > 0
    return is_quarantined or state.resources[room.resource].state is not SliceState.FREE


def in_the_way(lease: LeaseRecord, state: State) -> str:
    """Other programs that keep a device from this request: the first by name, and how many more there are."""
    want = lease.wants[0]
    details = []
    for resource in state.resources.values():
        if resource.foreign is not None and resource.state is SliceState.FREE:
            without, with_them = Room.empty(resource), Room.without_leases(resource)
            if (
                largest(want, lease.tenant, [without], mix=True)
                >= want.amount
                > largest(want, lease.tenant, [with_them], mix=True)
            ):
                details.append(resource.foreign.detail)
    if not details:
        return ""
    more = len(details) - 1
    return f"; {details[0]}" + (f" (and {more} more device{'s' if more > 1 else ''} alike)" if more else "")


def together(wants: tuple[Want, ...]) -> str:
    """``2 GPUs with 8GiB and 4 cores``."""
    return " and ".join(describe(each) for each in wants)


def describe(want: Want) -> str:
    """``2 GPUs with 8GiB``, ``4 cores``, ``512MiB of memory``."""
    match want.kind:
        case Kind.GPU:
            count = "a GPU" if want.count == 1 else f"{want.count} GPUs"
            model = f" ({want.model})" if want.model else ""
            return f"{count}{model} with {format_size(want.amount)}"
        case Kind.CPU:
            return amount_text(want.kind, want.amount)
        case Kind.MEMORY:
            return f"{format_size(want.amount)} of memory"
        case Kind.BLOCK:
            return f"{format_size(want.amount)} of disk"


def amount_text(kind: Kind, amount: int) -> str:
    if kind is Kind.CPU:
        return f"{amount} core{'s' if amount != 1 else ''}"
    return format_size(amount)


def add_wants(held: Held, wants: tuple[Want, ...]) -> None:
    """What is held with these as well."""
    ask = _amounts_of(wants)
    for name, _ in _QUOTA_UNITS:
        setattr(held, name, getattr(held, name) + getattr(ask, name))


def _amounts_of(wants: tuple[Want, ...]) -> Held:
    ask = Held(leases=1)
    for want in wants:
        match want.kind:
            case Kind.GPU:
                ask.gpus += want.count
                if want.exclusivity is Exclusivity.SHARED:
                    ask.vram_bytes += want.count * want.amount
            case Kind.CPU:
                ask.cores += want.amount
            case Kind.MEMORY:
                ask.memory_bytes += want.amount
            case Kind.BLOCK:
                ask.block_bytes += want.amount
    return ask


def _empty_rooms(state: State, lease: LeaseRecord) -> RoomsByNode:
    rooms = {
        node.id: [Room.empty(state.resources[r]) for r in node.resources]
        for node in state.nodes.values()
        if all(node.labels.get(key) == value for key, value in lease.selector.items())
    }
    return only_where_it_goes_on(state, lease, only_where_its_volume_is(state, lease, rooms, ever=True), ever=True)


_QUOTA_UNITS = (
    ("leases", ""),
    ("gpus", ""),
    ("vram_bytes", "bytes"),
    ("cores", ""),
    ("memory_bytes", "bytes"),
    ("block_bytes", "bytes"),
)
