"""``sublet tenant``: manages tenants, their tokens and their quotas."""

from __future__ import annotations

import sys
from typing import Annotated

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, NoLimit, count, limit, limit_duration, limit_size, name, user
from sublet.cli.show import Json, document, plural, seconds, table
from sublet.values import Tier, format_size

_TIERS = [t.value for t in Tier]
_Name = Annotated[
    str, Arg("NAME", parse=name, help="Name of the tenant: lower-case letters, digits, dots, dashes, underscores.")
]
Gpus = Annotated[int | NoLimit | None, Opt("--gpus", metavar="N", parse=limit, help="Maximum number of GPUs at once.")]
Vram = Annotated[
    int | NoLimit | None, Opt("--vram", metavar="SIZE", parse=limit_size, help="Maximum GPU memory at once.")
]
Cores = Annotated[
    int | NoLimit | None, Opt("--cores", metavar="N", parse=limit, help="Maximum number of cores at once.")
]
Memory = Annotated[
    int | NoLimit | None, Opt("--memory", metavar="SIZE", parse=limit_size, help="Maximum memory at once.")
]
Block = Annotated[
    int | NoLimit | None, Opt("--block", metavar="SIZE", parse=limit_size, help="Maximum storage at once.")
]
Leases = Annotated[
    int | NoLimit | None, Opt("--leases", metavar="N", parse=limit, help="Maximum number of leases at once.")
]
GpuTime = Annotated[
    int | NoLimit | None,
    Opt("--gpu-time", metavar="DURATION", parse=limit_duration, help="Maximum device time within a rolling hour."),
]
Burst = Annotated[
    int | NoLimit | None,
    Opt("--burst", metavar="DURATION", parse=limit_duration, help="Credit of device time beyond --gpu-time."),
]
BurstRefill = Annotated[
    int | NoLimit | None,
    Opt("--burst-refill", metavar="DURATION", parse=limit_duration, help="Refill of that credit per hour."),
]
Queue = Annotated[
    int | NoLimit | None, Opt("--queue", metavar="N", parse=limit, help="Maximum number of waiting requests at once.")
]
Requests = Annotated[
    int | NoLimit | None,
    Opt("--requests-per-minute", metavar="N", parse=limit, help="Maximum number of requests to the office a minute."),
]
_Uid = Annotated[
    int | NoLimit | None,
    Opt(
        "--uid",
        metavar="UID",
        parse=user,
        help="Number of the only user who may act as this tenant (default: any user with its token).",
    ),
]
_NoTokenNeeded = Annotated[
    bool, Opt("--no-token-needed", help="Accept that user as this tenant on the shared socket without a token.")
]
_Group = Annotated[
    str | None, Opt("--group", metavar="NAME", parse=name, help="Group of the tenant (default: the default group).")
]
_Weight = Annotated[
    int | None,
    Opt("--weight", metavar="N", parse=count, help="Weight against others of its group (default: 1)."),
]
_TierMax = Annotated[str | None, Opt("--tier-max", choices=_TIERS, help="Highest tier that it may ask for.")]


def add(
    *,
    tenant: _Name,
    gpus: Gpus = None,
    vram: Vram = None,
    cores: Cores = None,
    memory: Memory = None,
    block: Block = None,
    leases: Leases = None,
    gpu_time: GpuTime = None,
    burst: Burst = None,
    burst_refill: BurstRefill = None,
    queue: Queue = None,
    requests: Requests = None,
    tier_max: _TierMax = None,
    group: _Group = None,
    weight: _Weight = None,
    uid: _Uid = None,
    no_token_needed: _NoTokenNeeded = False,
    operator: Annotated[
        bool, Opt("--operator", help="Give operator rights: see and end all leases, add tenants.")
    ] = False,
    studio: Annotated[
        bool, Opt("--studio", help="Give the rights of a studio: read what its page shows, act on sessions.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Add a tenant and print its access token, once.

    The token alone goes to stdout, so TOKEN=$(sublet tenant add ana) keeps it. The office stores only its hash. A limit
    that is not given is the office's own (`sublet policy show`).
    """
    quota = quota_of({}, gpus, vram, cores, memory, block, leases, gpu_time, queue, requests, burst, burst_refill)
    body: Json = {"id": tenant, "quota": quota, "tier_max": tier_max, "operator": operator, **_user(uid)}
    body |= {"group": group, "weight": weight}
    if studio:
        body["studio"] = True
    if no_token_needed:
        body["needs_token"] = False
    answer: Json = CommandOffice.reach().post("/v1/tenants", body)
    if as_json:
        document(answer)
    else:
        _print_token(tenant, f"Tenant {tenant} is added.", answer["token"])
    return DONE


def change(
    *,
    tenant: _Name,
    gpus: Gpus = None,
    vram: Vram = None,
    cores: Cores = None,
    memory: Memory = None,
    block: Block = None,
    leases: Leases = None,
    gpu_time: GpuTime = None,
    burst: Burst = None,
    burst_refill: BurstRefill = None,
    queue: Queue = None,
    requests: Requests = None,
    tier_max: _TierMax = None,
    group: _Group = None,
    weight: _Weight = None,
    uid: _Uid = None,
    no_token_needed: _NoTokenNeeded = False,
    token_needed: Annotated[bool, Opt("--token-needed", help="Require the token from that user as well.")] = False,
    operator: Annotated[bool, Opt("--operator", help="Give operator rights.")] = False,
    no_operator: Annotated[bool, Opt("--no-operator", help="Take operator rights away.")] = False,
    new_token: Annotated[bool, Opt("--new-token", help="Print a new token once; the old one stops working.")] = False,
    as_json: AsJson = False,
) -> int:
    """Change what a tenant may have.

    What is not given stays as it is. `none` removes the tenant's own limit, as in --gpus none; then the office's
    default holds (`sublet policy show`).
    """
    if operator and no_operator:
        raise UsageError("--operator and --no-operator contradict each other", do="Give one of them.")
    if token_needed and no_token_needed:
        raise UsageError("--token-needed and --no-token-needed contradict each other", do="Give one of them.")
    office = CommandOffice.reach()
    path = f"/v1/tenants/{CommandOffice.quote(tenant)}"
    body: Json = {"tier_max": tier_max, "new_token": new_token, "group": group, "weight": weight, **_user(uid)}
    if token_needed or no_token_needed:
        body["needs_token"] = token_needed
    if operator or no_operator:
        body["operator"] = operator
    given_limits = (gpus, vram, cores, memory, block, leases, gpu_time, queue, requests, burst, burst_refill)
    if any(given is not None for given in given_limits):
        body["quota"] = quota_of(office.get(path)["quota"], *given_limits)
    answer: Json = office.patch(path, body)
    if as_json:
        document(answer)
    elif answer["token"]:
        _print_token(tenant, f"Tenant {tenant} is changed, and its old token stops now.", answer["token"])
    else:
        print(f"Tenant {tenant} is changed: {limits(answer['tenant']['quota'])}.")
    return DONE


def disable(
    *,
    tenant: _Name,
    now: Annotated[bool, Opt("--now", help="End its leases at once, without notice.")] = False,
    as_json: AsJson = False,
) -> int:
    """Stop a tenant's token and end its leases.

    Open connections are cut and waiting requests end at once; running leases get the notice of their tier. Volumes and
    the bill stay. `sublet tenant enable` gives it a new token.
    """
    answer: Json = CommandOffice.reach().post(f"/v1/tenants/{CommandOffice.quote(tenant)}/disable", {"notice": not now})
    if as_json:
        document(answer)
    else:
        print(f"Tenant {tenant} is disabled: its token opens nothing, and its leases end.")
    return DONE


def enable(*, tenant: _Name, as_json: AsJson = False) -> int:
    """Enable a disabled tenant and print its new access token, once."""
    answer: Json = CommandOffice.reach().post(f"/v1/tenants/{CommandOffice.quote(tenant)}/enable", {})
    if as_json:
        document(answer)
    else:
        _print_token(tenant, f"Tenant {tenant} is enabled.", answer["token"])
    return DONE


def rm(*, tenant: _Name, as_json: AsJson = False) -> int:
    """Remove a tenant that has no leases, volumes or quarantined devices left.

    What it used stays in the bill. A tenant that is added later under the same name is the same account to the bill.
    """
    answer: Json = CommandOffice.reach().post(f"/v1/tenants/{CommandOffice.quote(tenant)}/remove", {})
    if as_json:
        document(answer)
    else:
        print(f"Tenant {tenant} is removed. Its bill stays.")
    return DONE


def ls(
    *,
    connected: Annotated[
        bool, Opt("--connected", help="List the processes of other users that are connected to the office instead.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the tenants with their limits and what they use."""
    if connected:
        return _ls_connected(as_json)
    found: list[Json] = CommandOffice.reach().get("/v1/tenants")
    if as_json:
        document(found)
        return DONE
    heads = ["TENANT", "GROUP", "USER", "LEASES", "WAITING", "GPU TIME, LAST HOUR", "TIER UP TO", "LIMITS"]
    rows = [
        [
            view["id"] + "".join(f" ({role})" for role in ("operator", "studio", "disabled") if view.get(role)),
            view["group"] + (f" (weight {view['weight']})" if view["weight"] != 1 else ""),
            _user_of(view),
            str(view["leases"]),
            str(view["queued"]),
            seconds(view["gpu_seconds_used"]),
            view["tier_max"],
            limits(view["quota"]),
        ]
        for view in found
    ]
    print(table(heads, rows, right=["LEASES", "WAITING", "GPU TIME, LAST HOUR"]))
    return DONE


def _ls_connected(as_json: bool) -> int:
    """Over the shared socket: the kernel says which user's process each connection is."""
    found: list[Json] = CommandOffice.reach().get("/v1/connections")
    if as_json:
        document(found)
    elif not found:
        print("No process of another user is connected.")
    else:
        heads = ["USER", "PROCESS", "TENANT", "CONNECTIONS", "SINCE"]
        rows = [
            [
                "-" if one["uid"] is None else str(one["uid"]),
                "-" if one["pid"] is None else str(one["pid"]),
                ", ".join(one["tenants"]) or "-",
                str(one["connections"]),
                one["since"],
            ]
            for one in found
        ]
        print(table(heads, rows, right=["CONNECTIONS"]))
    return DONE


def _user(uid: int | NoLimit | None) -> Json:
    """The part of a request that names a tenant's user."""
    if uid is None:
        return {}
    return {"no_uid": True} if isinstance(uid, NoLimit) else {"uid": uid}


def _user_of(view: Json) -> str:
    """``1001``, or ``1001 (no token)`` where its user needs none."""
    if view.get("uid") is None:
        return "-"
    return f"{view['uid']}" + ("" if view.get("needs_token", True) else " (no token)")


def _print_token(tenant: str, sentence: str, token: str) -> None:
    sys.stderr.write(f"{sentence} Its token, shown this once:\n")
    print(token)
    sys.stderr.write(f"A program that sets SUBLET_TOKEN to it asks as {tenant}.\n")


def quota_of(
    known: Json,
    gpus: int | NoLimit | None,
    vram: int | NoLimit | None,
    cores: int | NoLimit | None,
    memory: int | NoLimit | None,
    block: int | NoLimit | None,
    leases: int | NoLimit | None,
    gpu_time: int | NoLimit | None,
    queue: int | NoLimit | None,
    requests: int | NoLimit | None,
    burst: int | NoLimit | None = None,
    burst_refill: int | NoLimit | None = None,
) -> Json:
    """What is known, with what was given put over it."""
    given = {
        "gpus": gpus,
        "vram_bytes": vram,
        "cores": cores,
        "memory_bytes": memory,
        "block_bytes": block,
        "leases": leases,
        "gpu_seconds": gpu_time,
        "queue": queue,
        "requests_per_minute": requests,
        "burst_seconds": burst,
        "burst_refill_seconds": burst_refill,
    }
    return known | {k: None if isinstance(v, NoLimit) else v for k, v in given.items() if v is not None}


def limits(quota: Json) -> str:
    """``2 GPUs, 8GiB VRAM``, or ``none``."""
    parts = []
    for key, noun in (("gpus", "GPU"), ("cores", "core"), ("leases", "lease")):
        if quota[key] is not None:
            parts.append(plural(quota[key], noun))
    for key, noun in (("vram_bytes", "VRAM"), ("memory_bytes", "memory"), ("block_bytes", "storage")):
        if quota[key] is not None:
            parts.append(f"{format_size(quota[key])} {noun}")
    if quota["gpu_seconds"] is not None:
        parts.append(f"{seconds(quota['gpu_seconds'])} of GPU time an hour")
    if quota.get("burst_seconds") is not None:
        refill = seconds(quota["burst_refill_seconds"] or 0)
        parts.append(f"{seconds(quota['burst_seconds'])} of burst credit ({refill} back an hour)")
    if quota["queue"] is not None:
        parts.append(f"{plural(quota['queue'], 'request')} waiting")
    if quota["requests_per_minute"] is not None:
        parts.append(f"{quota['requests_per_minute']} requests a minute")
    return ", ".join(parts) or "no limits"
