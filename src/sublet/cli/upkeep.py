"""The operator's commands: quarantine, drain, the audit chain, backup and restore."""

from __future__ import annotations

import os
import time
from typing import Annotated

from sublet.cli.call import Office
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exits import DONE
from sublet.cli.parsing import AsJson, count, duration_or_zero
from sublet.cli.show import Json, document, epoch, plural, table, visible
from sublet.client.home import home_dir
from sublet.errors import JournalError
from sublet.invocation import typeable
from sublet.values import format_size

__all__ = ["audit_log", "audit_verify", "backup", "drain", "fence_clear", "fence_ls", "restore"]


def fence_ls(*, as_json: AsJson = False) -> int:
    """List what is in quarantine, and why."""
    found = Office.listing("/v1/fences")
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
    resource: Annotated[str, Arg("RESOURCE", help="The resource, as `sublet fence ls` shows it.")],
    lease: Annotated[str | None, Opt("--lease", metavar="LEASE", help="Only what this lease left behind.")] = None,
    vouch: Annotated[
        bool, Opt("--vouch", help="You looked at the hardware and give your word for it; this is recorded.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Verify the hardware again, and lend it again if it is clean."""
    left: list[Json] = Office.reach().post("/v1/fences/clear", {"lease": lease, "vouch": vouch}, resource=resource)
    if as_json:
        document(left)
    elif not left:
        print(f"Nothing of {visible(resource)} is in quarantine any more.")
    else:
        print(typeable(f"{visible(resource)} is being looked at again; see `sublet fence ls`."))
    return DONE


def drain(
    *,
    node: Annotated[str, Arg("NODE", help="The node, as `sublet status --json` shows it.")],
    notice: Annotated[
        float | None,
        Opt("--notice", metavar="DURATION", parse=duration_or_zero, help="Notice to holders, instead of their tier's."),
    ] = None,
    undo: Annotated[bool, Opt("--undo", help="Lend what is on it again.")] = False,
    as_json: AsJson = False,
) -> int:
    """Empty a node: nothing new starts there, and holders get notice."""
    view: Json = Office.reach().post(f"/v1/nodes/{Office.quote(node)}/drain", {"draining": not undo, "notice": notice})
    if as_json:
        document(view)
    else:
        print(f"Node {visible(view['id'])} is {view['state']}.")
    return DONE


def audit_verify(*, as_json: AsJson = False) -> int:
    """Check the whole audit chain against its hashes. Exit status 1 if it was touched."""
    report: Json = Office.reach().get("/v1/audit/verify", patience=600.0)
    if not report["ok"]:
        raise JournalError(
            f"the audit chain does not hold: {report['problem']}",
            do="Compare it with a backup and with the head you noted outside; do not go on writing to it.",
        )
    if as_json:
        document(report)
    else:
        print(f"The audit chain holds: {plural(report['records'], 'record')}, head {report['head']}.")
        print("  Note the head outside this machine: then nobody can shorten the chain unseen.")
    return DONE


def audit_log(
    *,
    of: Annotated[str | None, Opt("--of", metavar="ID", help="Only what names this lease, tenant or resource.")] = None,
    lines: Annotated[int, Opt("--lines", metavar="COUNT", parse=count, help="How many at most; 20 if not said.")] = 20,
    as_json: AsJson = False,
) -> int:
    """Show the newest records of the audit chain: what happened, and whose doing it was."""
    found = Office.listing("/v1/audit", patience=600.0, limit=lines, of=of)
    if as_json:
        document(found)
    elif not found:
        print("No record is of that." if of else "Nothing was recorded yet.")
    else:
        rows = [
            [str(one["seq"]), one["at"], one["by"] or "not recorded", one["kind"], visible(_about(one["event"]))]
            for one in found
        ]
        print(table(["SEQ", "AT", "BY", "WHAT", "OF"], rows))
    return DONE


def _about(event: Json) -> str:
    """What a record is about, in a few words."""
    named = [event.get(key) for key in ("lease", "tenant", "name", "resource", "node")]
    names = [str(one["id"] if isinstance(one, dict) else one) for one in named if one]
    end = event.get("end") or event.get("notice") or {}
    return " ".join(names + [end[key] for key in ("reason",) if key in end])


def backup(
    *, file: Annotated[str, Arg("FILE", help="A new file on the office's machine.")], as_json: AsJson = False
) -> int:
    """Copy the journal while the office runs."""
    answer: Json = Office.reach().post("/v1/backup", {"path": os.path.abspath(file)}, patience=600.0)
    if as_json:
        document(answer)
    else:
        print(f"Saved {format_size(answer['bytes'])} to {visible(answer['path'])}.")
    return DONE


def restore(
    *, file: Annotated[str, Arg("FILE", help="A file that `sublet backup` wrote.")], as_json: AsJson = False
) -> int:
    """Put a backup in the place of the journal. No office may be running.

    A restored office starts a new incarnation: every epoch it gives is higher than any that was given after the backup
    was made, so nobody who held a lease then can write now, and no lease in it goes on. The journal that was there is
    moved aside, never deleted.
    """
    from pathlib import Path

    from sublet.broker.backup import restore as put_back

    if os.environ.get("SUBLET_URL"):
        raise UsageError(
            "SUBLET_URL names an office elsewhere, and a journal is restored where it lies", do="Unset SUBLET_URL."
        )
    home = home_dir()
    incarnation = put_back(Path(file), home, wall_ns=time.time_ns())
    if as_json:
        document({"home": str(home), "incarnation": incarnation})
    else:
        restored = f"Restored to {visible(str(home))}: incarnation {incarnation} begins with the next `sublet up`."
        print(typeable(restored))
    return DONE
