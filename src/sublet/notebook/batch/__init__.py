"""Whole notebooks as jobs: run from top to bottom under leases, and resumed after interruptions.

    law        states of a job, what may follow what, and which cell is next; values and a table
    asked      what a job asks for: the command line, and the comments of the first cell
    preparing  parameters into the notebook; which cells there are to run
    jobs       a job's folder: spec, record, lock
    inside     what runs in the notebook's kernel: its variables are saved and restored, its bill is told
    kernels    the two kinds of kernel: an ordinary one, or one that lives under one lease
    runner     one run of a job, cell by cell
    detached   the process that does it in the background, and its restart
    page       the HTML page with the bill
    failures   why a cell did not finish; leftovers: what its leases left
    turns      whose turn it is in the queue

Importing this package loads none of that.
"""

from __future__ import annotations

__all__ = ["restore"]


def restore(folder: str) -> None:
    """Bind the variables that the job in this folder ended with: the first cell of a notebook that goes on there."""
    from sublet.notebook.batch.inside import go_on

    print(go_on(folder))  # noqa: T201
