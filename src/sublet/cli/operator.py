"""The operator's commands: quarantine, drain, the audit chain, backup and restore."""

from __future__ import annotations

import os
import time
from typing import Annotated

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, count, duration_or_zero
from sublet.cli.show import Json, document, epoch, plural, table, visible
from sublet.client.home import home_dir
from sublet.errors import JournalError
from sublet.invocation import typeable
from sublet.values import format_size


def fence_ls(*, as_json: AsJson = False) -> int:
    """List quarantined devices, with the reason."""
    found = CommandOffice.listing("/v1/fences")
    if as_json:
        document(found)
        return DONE
    if not found:
        print("Nothing is in quarantine.")
        return DONE
    heads = ["RESOURCE", "LEASE", "EPOCH", "CLEARED BY", "WHY"]
    rows = [
        [
            view["resource"],
            view["lease"] or "the whole device",
            epoch(view["epoch"]),
            "your word (--vouch)" if view["hard"] else "a new verification",
            view["detail"],
        ]
        for view in found
    ]
    print(table(heads, rows))
    return DONE


def fence_clear(
    *,
    resource: Annotated[str, Arg("RESOURCE", help="Id of the resource, from `sublet fence ls`.")],
    lease: Annotated[str | None, Opt("--lease", metavar="LEASE", help="Only what this lease left behind.")] = None,
    vouch: Annotated[
        bool, Opt("--vouch", help="Clear it without verification, on your responsibility; recorded in the audit log.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Verify quarantined hardware again, and return it to service if it is clean."""
    left: list[Json] = CommandOffice.reach().post(
        "/v1/fences/clear", {"lease": lease, "vouch": vouch}, resource=resource
    )
    if as_json:
        document(left)
    elif not left:
        print(f"{visible(resource)} is no longer in quarantine.")
    else:
        print(typeable(f"{visible(resource)} is being verified again; see `sublet fence ls`."))
    return DONE


def drain(
    *,
    node: Annotated[str, Arg("NODE", help="Id of the node, from `sublet status --json`.")],
    notice: Annotated[
        float | None,
        Opt(
            "--notice",
            metavar="DURATION",
            parse=duration_or_zero,
            help="Notice to holders (default: that of their tier).",
        ),
    ] = None,
    undo: Annotated[bool, Opt("--undo", help="End the drain: grant leases there again.")] = False,
    as_json: AsJson = False,
) -> int:
    """Drain a node: no new leases there, and notice to holders."""
    view: Json = CommandOffice.reach().post(
        f"/v1/nodes/{CommandOffice.quote(node)}/drain", {"draining": not undo, "notice": notice}
    )
    if as_json:
        document(view)
    else:
        print(f"Node {visible(view['id'])} is {view['state']}.")
    return DONE


def audit_verify(*, as_json: AsJson = False) -> int:
    """Verify the hash chain of the audit log. Exit status 1 if it does not hold."""
    report: Json = CommandOffice.reach().get("/v1/audit/verify", patience=600.0)
    if not report["ok"]:
        raise JournalError(
            f"the audit chain does not hold: {report['problem']}",
            do="Compare it with a backup and with the head you noted outside; do not go on writing to it.",
        )
    if as_json:
        document(report)
    else:
        print(f"The audit chain holds: {plural(report['records'], 'record')}, head {report['head']}.")
        print("  Note the head outside this machine: then the chain cannot be shortened unseen.")
    return DONE


def audit_log(
    *,
    of: Annotated[
        str | None,
        Opt("--of", metavar="ID", help="Only records of this lease, tenant, resource, group, reservation or budget."),
    ] = None,
    lines: Annotated[
        int, Opt("--lines", metavar="COUNT", parse=count, help="Maximum number of records (default: 20).")
    ] = 20,
    as_json: AsJson = False,
) -> int:
    """Show the newest records of the audit log: what happened, and who did it."""
    found = CommandOffice.listing("/v1/audit", patience=600.0, limit=lines, of=of)
    if as_json:
        document(found)
    elif not found:
        print("No such records." if of else "No records yet.")
    else:
        rows = [
            [str(one["seq"]), one["at"], one["by"] or "not recorded", one["kind"], visible(_about(one["event"]))]
            for one in found
        ]
        print(table(["SEQ", "AT", "BY", "WHAT", "OF"], rows))
    return DONE


def _about(event: Json) -> str:
    named = [
        event.get(key) for key in ("lease", "tenant", "name", "resource", "node", "group", "reservation", "budget")
    ]
    names = [str(one["id"] if isinstance(one, dict) else one) for one in named if one]
    end = event.get("end") or event.get("notice") or {}
    return " ".join(names + [end[key] for key in ("reason",) if key in end])


def backup(
    *,
    file: Annotated[str, Arg("FILE", help="Path of a new file on the office's machine.")],
    with_studio: Annotated[
        bool, Opt("--studio", help="Include the studio's people, sessions and plans, consistent with the journal.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Copy the journal while the office runs; with --studio also the studio's, which may run too.

    FILE appears only after a check that the copy can be restored. The contents of volumes are not included.
    """
    path = os.path.abspath(file)
    if with_studio:
        answer = _with_studio(path)
    else:
        answer = CommandOffice.reach().post("/v1/backup", {"path": path}, patience=600.0)
    if as_json:
        document(answer)
    else:
        print(f"Saved {format_size(answer['bytes'])} to {visible(answer['path'])}.")
    return DONE


def _with_studio(path: str) -> Json:
    from pathlib import Path

    from sublet.lease.value import rfc3339
    from sublet.studio.backup import write_backup

    if os.environ.get("SUBLET_URL") or os.environ.get("SUBLET_TOKEN"):
        raise UsageError(
            "the studio is copied where it lies, by its owner", do="Unset SUBLET_URL and SUBLET_TOKEN for it."
        )
    office = CommandOffice.reach()

    def copy_journal(target: Path) -> None:
        office.post("/v1/backup", {"path": str(target)}, patience=600.0)

    size = write_backup(home_dir(), Path(path), copy_journal, made_at=rfc3339(time.time_ns()))
    return {"path": path, "bytes": size}


def restore(
    *, file: Annotated[str, Arg("FILE", help="Path of a file that `sublet backup` wrote.")], as_json: AsJson = False
) -> int:
    """Restore the journal from a backup; from one with --studio also the studio. Stop both first.

    The whole file is checked before anything is changed. A restored office starts a new incarnation: its epochs are
    higher than all that were given after the backup was made, so earlier holders are fenced. Leases in the backup have
    ended, and sessions of the studio rest. The present journal is moved aside, never deleted.
    """
    from pathlib import Path

    from sublet.office.journal.backup import restore as put_back
    from sublet.studio.backup import JOURNAL, is_backup, put_in_place, unpacked
    from sublet.studio.office import FOLDER
    from sublet.studio.store import studio_lock

    if os.environ.get("SUBLET_URL"):
        raise UsageError(
            "SUBLET_URL names an office elsewhere, and a journal is restored where it lies", do="Unset SUBLET_URL."
        )
    home, source, what = home_dir(), Path(file), "the office"
    if is_backup(source):
        what = "office and studio"
        with studio_lock(home / FOLDER), unpacked(source, home) as folder:

            def studio_too(aside: Path) -> None:
                put_in_place(folder, home, aside)

            incarnation = put_back(folder / JOURNAL, home, wall_ns=time.time_ns(), beside=studio_too)
    else:
        incarnation = put_back(source, home, wall_ns=time.time_ns())
    if as_json:
        document({"home": str(home), "incarnation": incarnation})
    else:
        restored = (
            f"Restored {what} to {visible(str(home))}: incarnation {incarnation} begins with the next `sublet up`."
        )
        print(typeable(restored))
    return DONE
