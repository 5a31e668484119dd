"""``sublet volume``: lists, verifies, copies and removes volumes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt
from sublet.cli.exit_status import DONE, FAILED, REFUSED
from sublet.cli.parsing import AsJson, name, size
from sublet.cli.show import Json, document, epoch, paint, plural, seconds, table, visible
from sublet.errors import CapacityExceeded, CheckpointFailed, SubletError
from sublet.invocation import typed
from sublet.values import format_size

_Name = Annotated[str, Arg("NAME", parse=name, help="Name of the volume.")]
_Names = Annotated[list[str], Arg("NAME...", parse=name, help="Names of volumes.")]
_Tenant = Annotated[
    str | None,
    Opt("--tenant", metavar="NAME", parse=name, help="Tenant whose volume it is, for operators (default: you)."),
]


def ls(
    *,
    tenant: Annotated[
        str | None,
        Opt("--tenant", metavar="NAME", parse=name, help="Only volumes of this tenant (default for operators: all)."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List named volumes."""
    found = CommandOffice.listing("/v1/volumes", tenant=tenant)
    if as_json:
        document(found)
        return DONE
    if not found:
        print("No volumes.")
        print(f"  Make one: {typed('sublet run --block 1GiB --name results -- COMMAND')}")
        return DONE
    heads = ["NAME", "SIZE", "STATE", "LEASE", "KEPT FOR ANOTHER", "TENANT"]
    rows = [
        [
            view["name"],
            format_size(view["size"]),
            view["state"] + (f" ({view['detail']})" if view["detail"] else ""),
            view["lease"] or "-",
            "-" if view["remaining"] is None else seconds(view["remaining"]),
            view["tenant"],
        ]
        for view in found
    ]
    print(table(heads, rows, right=["SIZE"]))
    return DONE


def show(*, volume: _Name, tenant: _Tenant = None, as_json: AsJson = False) -> int:
    """Show one volume in full."""
    view: Json = CommandOffice.reach().get(_path(volume), tenant=tenant)
    if as_json:
        document(view)
        return DONE
    facts = [
        ("volume", view["name"]),
        ("state", view["state"] + (f": {view['detail']}" if view["detail"] else "")),
        ("size", format_size(view["size"])),
        ("tenant", view["tenant"]),
        ("lease", view["lease"] or f"none now, {view['last_lease']} was the last"),
        ("epoch", epoch(view["epoch"])),
        ("on", view["resource"]),
        ("made at", view["made_at"]),
        ("kept since", view["kept_at"] or "-"),
        ("kept until", view["keep_until"] or f"{seconds(view['retain'])} after its lease"),
    ]
    width = max(len(fact) for fact, _ in facts)
    for fact, value in facts:
        print(f"{paint(fact.ljust(width), 'dim')}  {visible(str(value))}")
    return DONE


def cp(
    *,
    source: Annotated[str, Arg("SOURCE", parse=name, help="Volume whose newest checkpoint is copied.")],
    volume: Annotated[str, Arg("NAME", parse=name, help="Name of the new volume.")],
    space: Annotated[
        int | None, Opt("--size", metavar="SIZE", parse=size, help="Size of the new volume (default: that of SOURCE).")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Copy the newest checkpoint of a volume into a new one.

    Files that are not part of a checkpoint are not copied. The holder of the source volume may go on using it.
    """
    import sublet

    with sublet.connect() as fabric:
        fabric.copy_volume(source, volume, size=space)
    view: Json = CommandOffice.reach().get(_path(volume))
    if as_json:
        document(view)
    else:
        print(f"Volume {view['name']} has what was last saved in {source}.")
    return DONE


def rm(*, volumes: _Names, tenant: _Tenant = None, as_json: AsJson = False) -> int:
    """Remove volumes with all their contents. Refused for a volume that is leased."""
    office, found = CommandOffice.reach(), []
    for volume in volumes:
        view: Json = office.post(f"{_path(volume)}/remove", {}, tenant=tenant)
        found.append(view)
        if not as_json:
            print(f"Volume {view['name']} is {'removed' if view['state'] == 'removed' else 'being removed'}.")
    if as_json:
        document(found)
    return DONE


def verify(*, volumes: _Names, as_json: AsJson = False) -> int:
    """Read all of a volume and compare it with its checksums. Nothing is loaded or changed.

    If no lease has the volume, one is acquired, which restarts its retention; otherwise it runs
    under that lease.

    Exit status: 0 if all is whole, 1 if something is not, 75 if a volume cannot be read now.
    """
    office, found, status = CommandOffice.reach(), [], DONE
    for volume in volumes:
        view: Json = office.get(_path(volume))
        try:
            report = {"name": volume, **_checked(view)}
        except CapacityExceeded as error:
            report, status = {"name": volume, "ok": None, "problems": [f"{error}"]}, REFUSED
        else:
            status = status or (DONE if report["ok"] else FAILED)
        found.append(report)
        if not as_json:
            _print_problem(report)
    if as_json:
        document(found)
    return status


def _checked(view: Json) -> Json:
    """What the verifier says that runs under the lease that has it, or under one that takes it."""
    if view["state"] not in ("live", "retained"):
        raise CapacityExceeded(f"volume {view['name']} is {view['state']}", do="There is nothing to look at.")
    looks = [sys.executable, "-m", "sublet.state.checkpoints.verifying"]
    if view["lease"] is not None:
        under = ["exec", "--no-tty", view["lease"], "--", *looks]
    else:
        wants = ["--block", f"{view['size']}B", "--name", view["name"]]
        under = ["run", *wants, "--no-wait", "--no-tty", "--", *looks]
    argv = [sys.executable, "-m", "sublet", *under]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    line = done.stdout.strip().rpartition("\n")[2]
    if line.startswith("{"):
        report: Json = json.loads(line)
        return report
    error: type[SubletError] = CapacityExceeded if done.returncode == REFUSED else CheckpointFailed
    first = done.stderr.strip().removeprefix("sublet: ").partition("\n")[0]
    raise error(f"volume {view['name']} could not be looked at: {first or f'exit status {done.returncode}'}")


def _print_problem(report: dict[str, Any]) -> None:
    if report["ok"] is None:
        sys.stderr.write(f"sublet: {visible(report['problems'][0])}\n")
        return
    counts = f"{plural(len(report['checkpoints']), 'checkpoint')}, {format_size(report['read_bytes'])} read"
    if report["ok"] and not report["checkpoints"]:
        print(f"Volume {report['name']} has no checkpoints; other files carry no checksums.")
        return
    if report["ok"]:
        print(f"Volume {report['name']} is whole: {counts}.")
        return
    print(f"Volume {report['name']} is not whole: {counts}, {plural(len(report['problems']), 'problem')}.")
    for problem in report["problems"]:
        print(f"  {visible(problem)}")


def _path(volume: str) -> str:
    return f"/v1/volumes/{CommandOffice.quote(volume)}"
