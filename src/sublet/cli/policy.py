"""``sublet policy``: the operator's limits, where each is from, whether a file of them is right, and putting it into
force."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sublet.cli.call import NoOffice, Office
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exits import DONE
from sublet.cli.parsing import AsJson, name
from sublet.cli.show import Json, document, plural, table, visible
from sublet.client.home import home_dir


def show(
    *,
    tenant: Annotated[
        str | None, Opt("--tenant", metavar="NAME", parse=name, help="Show what holds for this tenant.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show which limits hold, and where each comes from.

    They are the operator's, in policy.toml of the state folder; what is not there has its default. With `--tenant` the
    quota of that tenant counts. Where no office runs, it shows what the next one will have.
    """
    note = ""
    try:
        office = Office.reach(start=False)
        found: list[Json] = office.get("/v1/policy") if tenant is None else office.get("/v1/policy", tenant=tenant)
    except NoOffice:
        if tenant is not None:
            raise
        found, note = _of_file(), "No office runs; the next one has these."
    if as_json:
        document(found)
        return DONE
    heads = ["KEY", "VALUE", "FROM", "MEANING"]
    print(table(heads, [[row["key"], row["shown"], visible(row["source"]), row["says"]] for row in found]))
    if note:
        print(note)
    return DONE


def check(
    *, file: Annotated[str, Arg("FILE", help="File to check (policy.toml in the state folder has no other form).")]
) -> int:
    """Check a file of limits. It is not put into force.

    An office reads policy.toml in its state folder when it starts, and with `sublet policy apply`. A mistake there
    keeps it from starting, and is said with its line.
    """
    from sublet.engines.operator_limits import read_limits

    path = Path(file)
    if not file.strip():
        raise UsageError("no file is named", do="Write `sublet policy check FILE`.")
    found = read_limits(path, must_exist=True, trusted=False)
    print(f"{visible(file)} is right: {plural(len(found.given), 'limit')} set, the others have their defaults.")
    return DONE


def apply(*, as_json: AsJson = False) -> int:
    """Put policy.toml of the state folder into force, without a restart.

    The file is taken as a whole; with a mistake in it nothing changes, and its line is said. Leases keep what they
    have, and the caps that they began with. Who applied what is in the audit log.
    """
    changed: list[Json] = Office.reach(start=False).post("/v1/policy/apply", {})
    if as_json:
        document(changed)
    elif not changed:
        print("Nothing has changed: these limits held already.")
    else:
        print(table(["KEY", "BEFORE", "NOW"], [[row["key"], row["before"], row["now"]] for row in changed]))
    return DONE


def _of_file() -> list[Json]:
    import msgspec

    from sublet.broker.serve_policy import limit_views
    from sublet.engines.operator_limits import POLICY_FILE, read_limits

    limits = read_limits(home_dir(None) / POLICY_FILE)
    return [msgspec.to_builtins(view) for view in limit_views(limits)]
