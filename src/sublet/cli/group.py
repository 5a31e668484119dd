"""``sublet group``: manages groups of tenants, such as a course or a lab."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, NoLimit, count, limit, name
from sublet.cli.show import Json, document, plural, table, window_text
from sublet.cli.tenant import Block, Cores, Gpus, GpuTime, Leases, Memory, Queue, Requests, Vram, limits, quota_of

_Name = Annotated[
    str, Arg("NAME", parse=name, help="Name of the group: lower-case letters, digits, dots, dashes, underscores.")
]
_Weight = Annotated[
    int | None, Opt("--weight", metavar="N", parse=count, help="Weight against other groups that wait (default: 1).")
]
_Floor = Annotated[
    int | NoLimit | None,
    Opt(
        "--floor",
        metavar="N",
        parse=limit,
        help="Number of GPUs it can always get, by preemption if necessary.",
    ),
]
_Ceiling = Annotated[
    int | NoLimit | None,
    Opt("--ceiling", metavar="N", parse=limit, help="Maximum number of GPUs of the group at once."),
]


def add(
    *,
    group: _Name,
    weight: _Weight = None,
    floor: _Floor = None,
    ceiling: _Ceiling = None,
    gpus: Gpus = None,
    vram: Vram = None,
    cores: Cores = None,
    memory: Memory = None,
    block: Block = None,
    leases: Leases = None,
    gpu_time: GpuTime = None,
    queue: Queue = None,
    requests: Requests = None,
    as_json: AsJson = False,
) -> int:
    """Add a group. `sublet tenant set NAME --group GROUP` puts a tenant into it.

    Limits such as --gpus hold for all its tenants together.
    """
    quota = quota_of({}, gpus, vram, cores, memory, block, leases, gpu_time, queue, requests)
    body: Json = {"id": group, "quota": quota, **_given(weight, floor, ceiling)}
    answer: Json = CommandOffice.reach().post("/v1/groups", body)
    return _print_result(answer, f"Group {group} is added", as_json)


def change(
    *,
    group: _Name,
    weight: _Weight = None,
    floor: _Floor = None,
    ceiling: _Ceiling = None,
    gpus: Gpus = None,
    vram: Vram = None,
    cores: Cores = None,
    memory: Memory = None,
    block: Block = None,
    leases: Leases = None,
    gpu_time: GpuTime = None,
    queue: Queue = None,
    requests: Requests = None,
    as_json: AsJson = False,
) -> int:
    """Change what a group may have.

    What is not given stays as it is; `none` takes a limit away, as in --ceiling none. Running leases stay; the order of
    the queue changes at once.
    """
    office = CommandOffice.reach()
    body = _given(weight, floor, ceiling)
    given = (gpus, vram, cores, memory, block, leases, gpu_time, queue, requests)
    if any(one is not None for one in given):
        known: list[Json] = [view["quota"] for view in office.get("/v1/groups") if view["id"] == group]
        body["quota"] = quota_of(known[0] if known else {}, *given)
    answer: Json = office.patch(f"/v1/groups/{CommandOffice.quote(group)}", body)
    return _print_result(answer, f"Group {group} is changed", as_json)


def rm(*, group: _Name, as_json: AsJson = False) -> int:
    """Remove a group that has no tenants, and its budgets."""
    office = CommandOffice.reach()
    budgets: list[Json] = [one for one in office.get("/v1/budgets") if one["tenant"] is None and one["group"] == group]
    answer: Json = office.post(f"/v1/groups/{CommandOffice.quote(group)}/remove", {})
    if as_json:
        document(answer)
        return DONE
    print(f"Group {group} is removed.")
    for one in budgets:
        print(f"  With it its budget of {one['amount']} {one['currency']} {window_text(one)}, {one['used']} used.")
    return DONE


def ls(*, as_json: AsJson = False) -> int:
    """List the groups with their weights, what they hold and what share they had."""
    found: list[Json] = CommandOffice.reach().get("/v1/groups")
    if as_json:
        document(found)
        return DONE
    heads = ["GROUP", "TENANTS", "WEIGHT", "GPUS", "FLOOR", "CEILING", "SHARE", "WAITING", "LIMITS"]
    rows = [
        [
            view["id"],
            str(len(view["tenants"])),
            str(view["weight"]),
            f"{view['gpus']:g}",
            str(view["floor"] or "-"),
            "-" if view["ceiling"] is None else str(view["ceiling"]),
            f"{view['share']:.1%} of {view['share_of']}",
            str(view["queued"]),
            limits(view["quota"]),
        ]
        for view in found
    ]
    print(table(heads, rows, right=["TENANTS", "WEIGHT", "GPUS", "FLOOR", "CEILING", "WAITING"]))
    return DONE


def _given(weight: int | None, floor: int | NoLimit | None, ceiling: int | NoLimit | None) -> Json:
    body: Json = {}
    if weight is not None:
        body["weight"] = weight
    if floor is not None:
        body["floor"] = 0 if isinstance(floor, NoLimit) else floor
    if ceiling is not None:
        body |= {"no_ceiling": True} if isinstance(ceiling, NoLimit) else {"ceiling": ceiling}
    return body


def _print_result(answer: Json, sentence: str, as_json: bool) -> int:
    if as_json:
        document(answer)
        return DONE
    floor = f", floor {plural(answer['floor'], 'GPU')}" if answer["floor"] else ""
    ceiling = "" if answer["ceiling"] is None else f", ceiling {plural(answer['ceiling'], 'GPU')}"
    print(f"{sentence}: weight {answer['weight']}{floor}{ceiling}, {limits(answer['quota'])}.")
    return DONE
