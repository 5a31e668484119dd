"""Writes the tables of ``states`` into the docs, so that page and code cannot differ.

``python -m sublet.jobs.drawing docs/burst.md`` rewrites the page between its markers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sublet.jobs.states import CHUNK_TABLE, VERDICTS, Cause, ChunkEvent, ChunkState, RetryVerdict, When, verdict_of
from sublet.lease.drawing import StateTable, mermaid, with_sections

MACHINE = StateTable(
    name="chunk",
    states=ChunkState,
    events=ChunkEvent,
    start=ChunkState.WAITING,
    arrows=tuple((state, event, then) for (state, event), then in CHUNK_TABLE.items()),
)
CAUSES = {
    Cause.CAPACITY: "`CapacityExceeded`, `QuotaExceeded`",
    Cause.LEASE_LOST: "`LeaseEnded` (expired, revoked, preempted, node lost), `Disconnected`",
    Cause.WORKER_LOST: "`WorkerLost`",
    Cause.OUT_OF_MEMORY: "`OutOfMemory`",
    Cause.RAISED: "the chunk's function raised",
    Cause.RAISED_TRANSIENT: "it raised an exception that was declared transient",
    Cause.REFUSED: "`Quarantined`, `Unsupported`, `InvalidRequest`, a result that cannot be serialized",
}


def verdicts() -> str:
    """What went wrong, when, and what becomes of the chunk; a pair that cannot happen is left out."""
    rows = ["| event | when | result |", "| --- | --- | --- |"]
    for cause in Cause:
        by_verdict: dict[RetryVerdict, list[When]] = {}
        for when in When:
            if (cause, when) in VERDICTS:
                by_verdict.setdefault(verdict_of(cause, when), []).append(when)
        rows += [f"| {CAUSES[cause]} | {', '.join(whens)} | {verdict.value} |" for verdict, whens in by_verdict.items()]
    return "\n".join(rows)


def page_with_tables(page: str) -> str:
    """The page with the states of a chunk and the verdicts made anew."""
    return with_sections(page, {"chunk": f"```mermaid\n{mermaid(MACHINE)}\n```", "verdicts": verdicts()})


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page named; ``docs/burst.md`` if none is."""
    path = Path(arguments[0] if arguments else "docs/burst.md")
    path.write_text(page_with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
