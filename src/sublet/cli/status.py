"""``sublet status``: shows whether an office runs, what it has, and how much is free."""

from __future__ import annotations

import sys

from sublet.cli.call import CommandOffice
from sublet.cli.data_door import data_door_trouble
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.parsing import AsJson
from sublet.cli.show import Json, amount, document, paint, plural, seconds, table, visible, where
from sublet.invocation import typeable
from sublet.values import device_state

TROUBLES = {"gpu-trouble", "gpu-libraries"}
"""Labels of a node that say what is the matter with its cards (``node.agent.inventory`` sets them; to import that
takes as long as all the rest of this command)."""

ESTIMATES_MIN = 10
"""Of fewer requests that waited, a median says little."""


def status(*, as_json: AsJson = False) -> int:
    """Show whether an office is running, and what is free. Starts nothing.

    Exit status 1 if the office answers but its data door, through which commands are reached, does not.
    """
    office = CommandOffice.reach(start=False)
    view: Json = office.get("/v1/status")
    if as_json:
        closed = data_door_trouble(office.address)
        document({**view, "data_door": None if closed is None else closed.message})
        return DONE if closed is None else FAILED
    print(
        f"{paint('The office is running', 'green')}: {_process(view)}for {seconds(round(view['uptime']))}, "
        f"version {visible(view['version'])}."
    )
    print(
        f"{plural(view['live'], 'live lease')}, {view['queued']} waiting, "
        f"{plural(view['quarantined'], 'slice')} in quarantine."
    )
    if (estimates := view.get("estimates")) and estimates["requests"] >= ESTIMATES_MIN:
        print(
            f"Estimates: of the last {plural(estimates['requests'], 'request')} that waited, half were granted within "
            f"{seconds(estimates['median_error'])} of what was estimated, nine tenths within "
            f"{seconds(estimates['p90_error'])}."
        )
    if view["embedded"]:
        print(typeable("It started by itself and ends after ten idle minutes; `sublet up` makes it stay."))
    if view["home"]:
        print(f"State folder: {visible(view['home'])}")
    print()
    heads = ["DEVICE", "SIZE", "FREE", "STATE", "LEASES"]
    print(table(heads, [_row(device) for device in view["devices"]], right=["SIZE", "FREE"]))
    troubled = [node for node in view["nodes"] if node["state"] != "up"]
    for node in troubled:
        print(f"Node {visible(node['id'])} is {node['state']}.")
    for node in view["nodes"]:
        for label in TROUBLES & node.get("labels", {}).keys():
            trouble = f"Node {visible(node['id'])}: {visible(node['labels'][label])}; see `sublet doctor --gpu`."
            print(typeable(trouble))
    if view["quarantined"]:
        print(typeable("See `sublet fence ls` for what is in quarantine, and why."))
    if view.get("supervisor_silent"):
        print(
            paint(
                f"The supervisor has not answered for {seconds(round(view['supervisor_silent']))}: no deadline is "
                "enforced until it goes on.",
                "red",
            )
        )
        print("Look why its process stands still; to end it ends all guests.")
    if view.get("disk_short"):
        print(paint(visible(f"No new lease is granted: {view['disk_short']}."), "red"))
        print(typeable("Make room there: end leases of blocks, remove volumes (`sublet volume rm`) or other files."))
    sys.stdout.flush()  # the office has answered, and its door may take a while
    closed = data_door_trouble(office.address)
    if closed is not None:
        print(paint(visible(f"{closed.message[0].upper()}{closed.message[1:]}."), "red"))
        print(typeable(visible(closed.do)))
    return DONE if closed is None else FAILED


def _process(view: Json) -> str:
    """What only operators are told."""
    return f"pid {view['pid']}, " if view["pid"] else ""


def _row(device: Json) -> list[str]:
    return [
        where({**device, "resource": device["id"]}),
        amount(device["kind"], device["capacity"]),
        amount(device["kind"], device["free"]) if device["free"] else "none",
        device_state(
            device["state"],
            device["detail"],
            capacity=device["capacity"],
            free=device["free"],
            is_leased=bool(device["leases"]),
        ),
        ", ".join(device["leases"]) or "-",
    ]
