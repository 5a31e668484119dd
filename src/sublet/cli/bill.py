"""``sublet bill``: what was held, what was used, what it costs. Folded from the same events that decided the leases."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Any

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, instant
from sublet.cli.show import Json, cost_head, document, seconds, table
from sublet.wire.http_views import BILL_COLUMNS, BILL_PERIODS, check_grouping


def _by(text: str) -> str:
    check_grouping(text)
    return text


def bill(
    *,
    by: Annotated[
        str,
        Opt(
            "--by",
            metavar="lease|tenant|group|device|session|label:KEY",
            parse=_by,
            help="Grouping of the lines (default: lease).",
        ),
    ] = "lease",
    per: Annotated[
        str | None, Opt("--per", choices=BILL_PERIODS, help="Separate lines for each day or month, in UTC.")
    ] = None,
    since: Annotated[
        str | None,
        Opt("--since", metavar="WHEN", parse=instant, help="Start: a date, a time, or how long ago, such as 24h."),
    ] = None,
    until: Annotated[str | None, Opt("--until", metavar="WHEN", parse=instant, help="End, in the same forms.")] = None,
    noisy: Annotated[
        bool,
        Opt(
            "--noisy",
            help="List tenants that disturb others, and by which rule (operators).",
        ),
    ] = False,
    as_csv: Annotated[bool, Opt("--csv", help="Print comma-separated values with a header line.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show what was held and used, and what it costs.

    The sum over tenants equals the sum over devices, since both are computed from the same journal. Prices and their
    currency are in rates.toml in the state folder (default: credits).
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json contradict each other", do="Give one of them.")
    if since and until and since >= until:
        raise UsageError("--since must be before --until", do="Swap them.")
    if noisy:
        if as_csv or per is not None or by != "lease":
            raise UsageError("--noisy is no bill: it has no --by, --per or --csv", do="Leave them out.")
        found: Json = CommandOffice.reach().get("/v1/bill/neighbours", since=since, until=until)
        if as_json:
            document(found)
        else:
            print(_noisy(found))
        return DONE
    lines = CommandOffice.listing("/v1/bill", by=by, per=per, since=since, until=until)
    if as_json:
        document(lines)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, BILL_COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**line, "launches": _launches(line), "ended": _ended(line)} for line in lines)
    else:
        print(for_people(by, lines))
    return DONE


def _launches(line: Json) -> Any:
    return "not counted" if line.get("launches", 0) is None else line.get("launches")


def _noisy(found: Json) -> str:
    lines = ["No tenant disturbs others by these rules."]
    if found["neighbours"]:
        rows = [[one["tenant"], one["group"], one["rule"], one["says"]] for one in found["neighbours"]]
        lines = [table(["TENANT", "GROUP", "RULE", "WHAT IT DID"], rows)]
    lines.append("")
    lines += (f"{name}: a tenant that {rule}." for name, rule in found["rules"].items())
    return "\n".join(lines)


def for_people(by: str, lines: list[Json]) -> str:
    """The bill as a table, with its sum."""
    if not lines:
        return "Nothing was held in this period."
    first = by.removeprefix("label:").upper()
    cost = cost_head(lines)
    right = ["LEASES", "HELD", "BUSY", "GPU TIME", cost]
    has_fuel = any(line.get("fuel") for line in lines)
    right += ["FUEL"] * has_fuel
    has_wait = any(line.get("waited_seconds") for line in lines)
    right += ["WAITED"] * has_wait
    has_priority = any(line.get("priority_cost") for line in lines)
    right += ["OF IT PRIORITY"] * has_priority
    has_period = any(line.get("period") for line in lines)
    has_tenant = by != "tenant" and any(line["tenant"] for line in lines)
    heads = [*["PERIOD"] * has_period, first, *["TENANT"] * has_tenant, *right, "END"]
    rows = [
        [
            *[line.get("period", "")] * has_period,
            line["key"] or "(none)",
            *[line["tenant"] or "-"] * has_tenant,
            str(line["leases"]),
            *(seconds(line[column]) for column in ("held_seconds", "busy_seconds", "gpu_seconds")),
            f"{line['cost']:.4f}",
            *[f"{line.get('fuel', 0):,}"] * has_fuel,
            *[seconds(line.get("waited_seconds", 0.0))] * has_wait,
            *[f"{line.get('priority_cost', 0.0):.4f}"] * has_priority,
            _end(line),
        ]
        for line in lines
    ]
    # A lease of two devices, or of two days, stands in both lines: then leases have no sum here.
    overlap = has_period or by == "device"
    total = [
        *["total", *[""] * (has_tenant + has_period)],
        "" if overlap else str(sum(line["leases"] for line in lines)),
        *(seconds(sum(line[column] for line in lines)) for column in ("held_seconds", "busy_seconds", "gpu_seconds")),
        f"{sum(line['cost'] for line in lines):.4f}",
        *[f"{sum(line.get('fuel', 0) for line in lines):,}"] * has_fuel,
        *[seconds(sum(line.get("waited_seconds", 0.0) for line in lines))] * has_wait,
        *[f"{sum(line.get('priority_cost', 0.0) for line in lines):.4f}"] * has_priority,
        "",
    ]
    return table(heads, [*rows, total], right=right)


def _end(line: dict[str, Any]) -> str:
    """``preempted (suspend)``: why it ended, and what became of those who were on its devices; of several, how many."""
    if line["live"]:
        return "still held"
    if line["end"] is None:
        return _ended(line) or "-"
    return f"{line['end']} ({line['way']})" if line.get("way") else str(line["end"])


def _ended(line: Json) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(line.get("ended", {}).items()))
