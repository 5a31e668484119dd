"""``sublet policy``: shows the operator's file, checks what it would change, and applies it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, name
from sublet.cli.show import Json, document, plural, table, visible
from sublet.client.home import home_dir
from sublet.errors import Disconnected, InvalidRequest, SubletError

if TYPE_CHECKING:
    from sublet.office.policy_file import PolicyLimits


def show(
    *,
    tenant: Annotated[
        str | None, Opt("--tenant", metavar="NAME", parse=name, help="Show the limits of this tenant.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show which limits, groups, reservations and budgets hold, and where each value comes from.

    They are the operator's: from policy.toml of the state folder, or from a command such as `sublet group set`; what is
    in neither has its default. With `--tenant` it shows the limits of that tenant, and its quota counts. Where no
    office runs, it shows what the next one will have.
    """
    note = ""
    try:
        office = CommandOffice.reach(start=False)
        found: list[Json] = office.get("/v1/policy") if tenant is None else office.get("/v1/policy", tenant=tenant)
    except NoOffice:
        if tenant is not None:
            raise
        found, note = _of_file(), "No office runs; the next one has these."
    if as_json:
        document(found)
        return DONE
    heads = ["KEY", "VALUE", "FROM", "MEANING"]
    print(table(heads, [[row["key"], visible(row["shown"]), visible(row["source"]), row["says"]] for row in found]))
    if note:
        print(note)
    return DONE


def check(
    *,
    file: Annotated[str, Arg("FILE", help="File to check, in the form of policy.toml in the state folder.")],
    as_json: AsJson = False,
) -> int:
    """Check a file and show what it would change in the running office.

    An office reads policy.toml in its state folder when it starts, and with `sublet policy apply`. A mistake there
    keeps it from starting, and is said with its line. Here nothing is put into force.
    """
    text, found = _read(file, "check")
    changes: list[Json] | None
    try:
        changes = CommandOffice.reach(start=False).post("/v1/policy/check", {"text": text})
    except NoOffice:
        changes = None
    if as_json:
        document({"limits": len(found.given), "changes": changes})
        return DONE
    print(f"{visible(file)} is right: {plural(len(found.given), 'limit')} set, the others have their defaults.")
    if changes is None:
        print("No office runs, so what it would change is not listed.")
    elif not changes:
        print("It would change nothing in the office that runs.")
    else:
        print("In the office that runs it would change:")
        _print_changes(changes)
    return DONE


def apply(
    *,
    file: Annotated[
        str | None,
        Arg("FILE", help="File that becomes policy.toml of the state folder (default: that file as it is)."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Apply policy.toml of the state folder to the running office, without a restart.

    With FILE, a copy of that takes its place first. The file is applied whole or, if it has a mistake or a
    contradiction, not at all: then policy.toml stays as it was. Its keys override what commands have set; keys that
    were removed from it return to their defaults. Running leases keep what they hold and the caps with which they
    began. The audit log records who applied what.
    """
    office = CommandOffice.reach(start=False)
    if file is None:
        changed: list[Json] = office.post("/v1/policy/apply", {})
    else:
        changed = _apply_copy(office, file)
    if as_json:
        document(changed)
    elif not changed:
        print("Nothing has changed: all of it held already.")
    else:
        _print_changes(changed)
    return DONE


def _apply_copy(office: CommandOffice, file: str) -> list[Json]:
    """Put the file into the place of policy.toml; where the office refuses it, the one before is put back."""
    from sublet.engines.operator_limits import POLICY_FILE, read_operator_file

    if os.environ.get("SUBLET_URL"):
        raise UsageError(
            "SUBLET_URL names an office elsewhere, and its policy.toml lies in its state folder",
            do="Run this on the machine of the office, without SUBLET_URL.",
        )
    text, _ = _read(file, "apply")
    office.post("/v1/policy/check", {"text": text})
    path = home_dir(None) / POLICY_FILE
    before = read_operator_file(path, trusted=False)
    _replace(path, text)
    try:
        changed: list[Json] = office.post("/v1/policy/apply", {})
    except Disconnected:  # whether it holds is not known; it was found right, and the next office starts with it
        raise
    except SubletError:
        _replace(path, before)
        raise
    return changed


def _replace(path: Path, text: str | None) -> None:
    from sublet.office.journal.files import publish

    if text is None:
        path.unlink(missing_ok=True)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.chmod(0o644)
        publish(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InvalidRequest(
            f"{path} cannot be written ({error.strerror})", do="Run this as the owner of the office."
        ) from error


def _read(file: str, verb: str) -> tuple[str, PolicyLimits]:
    from sublet.engines.operator_limits import read_operator_file
    from sublet.office.policy_file import parse_policy

    if not file.strip():
        raise UsageError("no file is named", do=f"Write `sublet policy {verb} FILE`.")
    text = read_operator_file(Path(file), must_exist=True, trusted=False) or ""
    return text, parse_policy(text, file)


def _print_changes(changed: list[Json]) -> None:
    print(
        table(["KEY", "BEFORE", "NOW"], [[row["key"], visible(row["before"]), visible(row["now"])] for row in changed])
    )


def _of_file() -> list[Json]:
    import msgspec

    from sublet.engines.operator_limits import POLICY_FILE, read_limits
    from sublet.office.api.policy import arrangement_views, limit_views

    limits = read_limits(home_dir(None) / POLICY_FILE)
    return [msgspec.to_builtins(view) for view in (*limit_views(limits), *arrangement_views(limits))]
