"""Turns a command line of ``sublet nb`` into a job, checked before anything is written."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sublet.cli.declare import UsageError
from sublet.cli.show import visible
from sublet.errors import Unsupported
from sublet.invocation import installing
from sublet.values import NS_PER_S, Tier

if TYPE_CHECKING:
    from sublet.notebook.batch.asked import Asked
    from sublet.notebook.batch.jobs import Job


def made(
    path: str,
    asked: Asked,
    lease: str | None,
    params: list[str],
    name: str | None,
    kernel: str | None,
    *,
    out: str,
    waits_its_turn: bool,
) -> Job:
    """The job, on disk. What cannot work is said before anything is written."""
    _needs_the_extra()
    from sublet.notebook.batch.asked import Asked, from_cell
    from sublet.notebook.batch.jobs import JobSpec, make_job
    from sublet.notebook.batch.page import written
    from sublet.notebook.batch.preparing import (
        code_cells,
        has_gpu_cells,
        read_notebook,
        unknown_parameters,
        with_parameters,
    )

    source = Path(path).absolute()
    notebook = read_notebook(source)
    in_cell, notes = from_cell(notebook.cells[code_cells(notebook)[0]].source)
    prepared = with_parameters(notebook, params)
    for note in (*notes, *unknown_parameters(notebook, params)):
        sys.stderr.write(f"sublet: {visible(note)}\n")
    found = asked.over(in_cell.over(Asked(tier=Tier.BATCH if waits_its_turn else None)))
    wants_whole = found.vram_bytes is not None and not has_gpu_cells(notebook)
    spec = JobSpec(
        notebook=str(source),
        folder=str(source.parent),
        name=name or found.name or source.stem,
        kernel=kernel or "",
        lease=lease or found.lease or ("whole" if wants_whole else "cells"),
        asked=found.as_json(),
        parameters=tuple(params),
        out=out,
        label=f"nb-{os.urandom(5).hex()}",
        submitted_wall_ns=time.time_ns(),
        waits_its_turn=waits_its_turn,
    )
    return make_job(spec, written(prepared), len(code_cells(prepared)), wall_ns=time.time_ns())


def _needs_the_extra() -> None:
    """Find the packages without loading them: only the runner of the notebook loads them."""
    from importlib.util import find_spec

    missing = [name for name in ("ipykernel", "nbclient", "nbconvert") if find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"notebooks cannot be run: there is no {missing[0]}", do=f"Install it: `{installing('sublet[notebook]')}`."
        )


def asked_for(
    gpu: int | None,
    gpus: int | None,
    ttl: float | None,
    tier: Tier | None,
    waiting: float | None,
    *,
    no_wait: bool,
    smaller_ok: bool,
) -> Asked:
    from sublet.notebook.batch.asked import Asked

    if no_wait and waiting is not None:
        raise UsageError("--wait and --no-wait contradict each other", do="Give one of them.")
    wait_ns = 0 if no_wait else None if waiting in (None, float("inf")) else round((waiting or 0) * NS_PER_S)
    return Asked(
        vram_bytes=gpu,
        gpus=gpus,
        ttl_ns=None if ttl is None else round(ttl * NS_PER_S),
        tier=tier,
        wait_ns=wait_ns,
        smaller_ok=True if smaller_ok else None,
    )


def tier_of(tier: str | None, *, spot: bool) -> Tier | None:
    if spot and tier not in (None, Tier.SPOT):
        raise UsageError(f"--spot and --tier {tier} contradict each other", do="Give one of them.")
    return Tier.SPOT if spot else None if tier is None else Tier(tier)


def target_of(notebook: str, out: str | None) -> Path:
    """Where the executed notebook goes. That it can be written there is tried before anything runs."""
    source = Path(notebook)
    if out is None:
        return _tried(source.with_name(f"{source.stem}.executed.ipynb"), source)
    target = Path(out)
    if target.is_dir() or out.endswith("/"):
        target = target / f"{source.stem}.ipynb"
    if target.suffix != ".ipynb":
        raise UsageError(f"--out: {out} is not the name of a notebook", do="Let it end in .ipynb, or name a folder.")
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError("--out is the notebook itself", do="Name another file: the notebook is not written over.")
    if not target.parent.is_dir():
        try:
            target.parent.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--out: {target.parent} cannot be made: {error.strerror}", do="Name another.") from None
    return _tried(target, source)


def _tried(target: Path, source: Path) -> Path:
    """Raises the error for a notebook that does not exist."""
    if not source.exists():
        return target
    trial = target.with_name(f"{target.name}.{os.getpid()}~")
    try:
        trial.touch()
    except OSError as error:
        raise UsageError(f"--out: {target} cannot be written: {error.strerror}", do="Name another place.") from None
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
    return target
