"""``sublet reservation``: manages GPUs reserved for a group at stated times."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, count, name
from sublet.cli.show import Json, document, plural, table

_Name = Annotated[
    str, Arg("NAME", parse=name, help="Name of the reservation: lower-case letters, digits, dots, dashes, underscores.")
]


def add(
    *,
    reservation: _Name,
    when: Annotated[
        str,
        Arg(
            "WHEN",
            help="'every Tue 10:00-12:00', 'every weekday 9:00-10:30 until 2027-02-12', '2026-12-01 9:00-17:00'.",
        ),
    ],
    group: Annotated[str, Opt("--group", metavar="NAME", parse=name, help="Group that the GPUs are for.")],
    gpus: Annotated[int, Opt("--gpus", metavar="N", parse=count, help="Number of GPUs.")],
    zone: Annotated[str, Opt("--zone", metavar="ZONE", help="Time zone of WHEN, such as Europe/Berlin or UTC.")],
    model: Annotated[
        str | None, Opt("--model", metavar="NAME", help="Only devices of this model; part of the name is enough.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Reserve GPUs for a group.

    Leases of other groups get notice in time for the GPUs to be verified free at the start. Ten minutes after it, GPUs
    that the group does not use are lent to requests of tier spot, until the group asks for them.
    """
    body: Json = {"id": reservation, "group": group, "gpus": gpus, "when": when, "zone": zone}
    if model is not None:
        body["model"] = model
    answer: Json = CommandOffice.reach().post("/v1/reservations", body)
    if as_json:
        document(answer)
        return DONE
    first = answer["times"][0]
    print(
        f"Reservation {reservation}: {plural(answer['gpus'], 'GPU')} for {answer['group']}, {answer['when']} "
        f"({answer['zone']}), first from {_minute(first['begins_at'])} to {_minute(first['ends_at'])}."
    )
    return DONE


def rm(*, reservation: _Name, as_json: AsJson = False) -> int:
    """Remove a reservation. Leases that had notice because of it stay."""
    answer: Json = CommandOffice.reach().post(f"/v1/reservations/{CommandOffice.quote(reservation)}/remove", {})
    if as_json:
        document(answer)
    else:
        print(f"Reservation {reservation} is removed.")
    return DONE


def ls(*, as_json: AsJson = False) -> int:
    """List the reservations with their next time and the GPUs that are kept now."""
    found: list[Json] = CommandOffice.reach().get("/v1/reservations")
    if as_json:
        document(found)
        return DONE
    heads = ["RESERVATION", "GROUP", "GPUS", "WHEN", "ZONE", "NEXT", "STATE", "READY"]
    rows = [
        [
            view["id"],
            view["group"],
            str(view["gpus"]),
            view["when"],
            view["zone"],
            _minute(view["times"][0]["begins_at"]) if view["times"] else "-",
            view["state"],
            f"{view['ready']} of {len(view['devices'])}" if view["devices"] else "-",
        ]
        for view in found
    ]
    print(table(heads, rows, right=["GPUS"]))
    return DONE


def _minute(moment: str) -> str:
    """To the minute, in UTC."""
    return f"{moment[:16].replace('T', ' ')} UTC"
