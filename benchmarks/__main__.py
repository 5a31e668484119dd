"""``python -m benchmarks`` lists the rows; ``NAME…`` or ``all`` runs them, one after the other."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys

from benchmarks import record, rows
from benchmarks.harness import Row, TookTooLong, be_first_in_line, run_row
from benchmarks.load.remote import LoadFailed
from benchmarks.machine import adopt_orphans


def main() -> int:
    known = all_rows()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to run, or `all`; without one, the list")
    parser.add_argument("--quick", "--short", action="store_true", help="a short look that records nothing")
    parser.add_argument(
        "--wait-quiet", type=float, default=0.0, metavar="SECONDS", help="how long each row may wait for quiet moments"
    )
    parser.add_argument(
        "--first-in-line", action="store_true", help="run both sides before all other work (needs the right to)"
    )
    arguments = parser.parse_args()
    if not arguments.names:
        for row in known.values():
            print(f"{row.name:<16} {row.title}")
            for goal in row.goals:
                bound = f"at most {goal.at_most:g}" if goal.at_most is not None else f"at least {goal.at_least:g}"
                print(f"{'':<16}   goal: {goal.figure}, {goal.of} {bound}")
        return 0
    names = arguments.names
    if names == ["all"]:
        names = [name for name, row in known.items() if row.is_in_all]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; `python -m benchmarks` lists them.")
    # Programs are compiled once, as where people have installed them; otherwise each start would be timed compiling.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    adopt_orphans()
    if arguments.first_in_line:
        be_first_in_line()
    # Told to end, we end as after an error: what was started is ended, folders are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    failed = 0
    for name in names:
        try:
            report = run_row(known[name], quick=arguments.quick, patience_s=arguments.wait_quiet)
        except (TookTooLong, LoadFailed, OSError, RuntimeError, ImportError) as error:
            print(f"{name}: no result. {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
            continue
        print(record.as_text(report))
        if not report.quick:
            record.write(report)
    return 1 if failed else 0


def all_rows() -> dict[str, Row]:
    """Every module in ``rows`` has one; they come in the order of their names."""
    found: dict[str, Row] = {}
    for module in pkgutil.iter_modules(rows.__path__):
        row = importlib.import_module(f"{rows.__name__}.{module.name}").ROW
        assert isinstance(row, Row)
        assert row.name == module.name, f"the row in {module.name}.py calls itself {row.name}"
        found[row.name] = row
    return found


if __name__ == "__main__":
    raise SystemExit(main())
