"""``sublet nb``: runs whole notebooks, now or in the background."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.parsing import AsJson, PayPriority, count, duration, vram, wait
from sublet.cli.show import document, paint, seconds, visible
from sublet.errors import InvalidRequest, NotFound, SubletError, Unsupported
from sublet.invocation import installing, typeable
from sublet.values import NS_PER_S, Tier

if TYPE_CHECKING:
    from sublet.notebook.batch.job_options import JobLeaseOptions
    from sublet.notebook.batch.job_states import JobRecord
    from sublet.notebook.batch.jobs import Job

STOPPED_WITHIN_S: Final = 30.0
"""How long `nb stop` waits unless it is told otherwise: a cell is interrupted, and the state is saved."""

NotebookArg = Annotated[str, Arg("NOTEBOOK", help="Path of the notebook (.ipynb).")]
JobArg = Annotated[str, Arg("JOB", help="Number of the job, from `sublet nb status`, or its name.")]
Params = Annotated[list[str], Opt("--param", "-p", metavar="NAME=VALUE", help="Parameter of the notebook. Repeatable.")]
Vram = Annotated[
    int | None, Opt("--gpu", "--vram", metavar="SIZE", parse=vram, help="GPU memory, such as 8GiB (default: 1GiB).")
]
Gpus = Annotated[
    int | None, Opt("--gpus", metavar="N", parse=count, help="Number of GPUs, all on one machine (default: 1).")
]
Ttl = Annotated[
    float | None,
    Opt("--ttl", metavar="DURATION", parse=duration, help="Time to live of a lease between renewals (default: 5m)."),
]
TierOpt = Annotated[
    str | None, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: batch).")
]
Spot = Annotated[bool, Opt("--spot", help="Short for --tier spot: lowest priority, preempted at short notice.")]
Wait = Annotated[
    float | None, Opt("--wait", metavar="DURATION", parse=wait, help="Longest wait in the queue (default: no limit).")
]
NoWait = Annotated[bool, Opt("--no-wait", help="Fail immediately if nothing is free.")]
SmallerOk = Annotated[bool, Opt("--smaller-ok", help="Accept less memory if no more is free.")]
LeaseOpt = Annotated[
    str | None,
    Opt(
        "--lease",
        choices=["cells", "whole"],
        help="`cells`: one lease for each %%gpu cell; `whole`: one lease, under which every cell runs "
        "(default: cells; whole if --gpu is given and no cell has %%gpu).",
    ),
]
Name = Annotated[str | None, Opt("--name", metavar="NAME", help="Name of the job (default: the file's).")]
Kernel = Annotated[str | None, Opt("--kernel", metavar="NAME", help="Jupyter kernel (default: the notebook's own).")]


def run(
    *,
    notebook: NotebookArg,
    out: Annotated[
        str | None,
        Opt("--out", "-o", metavar="PATH", help="Executed notebook (default: NAME.executed.ipynb beside NOTEBOOK)."),
    ] = None,
    param: Params = [],  # noqa: B006 - never changed; both parsers make their own
    gpu: Vram = None,
    gpus: Gpus = None,
    ttl: Ttl = None,
    tier: TierOpt = None,
    spot: Spot = False,
    pay_priority: PayPriority = False,
    waiting: Wait = None,
    no_wait: NoWait = False,
    smaller_ok: SmallerOk = False,
    lease: LeaseOpt = None,
    name: Name = None,
    kernel: Kernel = None,
) -> int:
    """Run a notebook from top to bottom, now, and write it with its outputs and a page with the bill.

    A cell that fails stops the run with its traceback. A cell whose lease is lost is run again, from what the cell
    before it left. Options may also stand in the first code cell: `#SUBLET --vram 8GiB --tier spot`.

    Exit status: 0 if every cell ran, 1 if one failed, 75 if a lease was not granted, 76 if one was lost for good.
    """
    from sublet.cli.nb_show import ProgressLines
    from sublet.notebook.batch.runner import Runner

    target = target_of(notebook, out)
    options = options_of(
        gpu,
        gpus,
        ttl,
        tier_of(tier, spot=spot),
        waiting,
        pay_priority=pay_priority,
        no_wait=no_wait,
        smaller_ok=smaller_ok,
    )
    job = made(notebook, options, lease, param, name, kernel, out=str(target.absolute()), waits_its_turn=False)
    with ProgressLines(job) as teller:
        record = Runner(job, teller).run()
        teller.end(record)
    _copy(job, target)
    _print_paths(job, target)
    return _status_of(record)


def submit(
    *,
    notebook: NotebookArg,
    param: Params = [],  # noqa: B006
    gpu: Vram = None,
    gpus: Gpus = None,
    ttl: Ttl = None,
    tier: TierOpt = None,
    spot: Spot = False,
    pay_priority: PayPriority = False,
    waiting: Wait = None,
    no_wait: NoWait = False,
    smaller_ok: SmallerOk = False,
    lease: LeaseOpt = None,
    name: Name = None,
    kernel: Kernel = None,
    as_json: AsJson = False,
) -> int:
    """Run a notebook in the background, and return at once.

    It goes on when this terminal is closed, and from the last finished cell when it is killed or loses its lease.
    `sublet nb status` shows its progress, `sublet nb fetch` copies what it has written so far.
    """
    from sublet.cli.nb_show import as_document
    from sublet.notebook.batch.detached import launch

    options = options_of(
        gpu,
        gpus,
        ttl,
        tier_of(tier, spot=spot),
        waiting,
        pay_priority=pay_priority,
        no_wait=no_wait,
        smaller_ok=smaller_ok,
    )
    job = made(notebook, options, lease, param, name, kernel, out="", waits_its_turn=True)
    launch(job)
    if as_json:
        document(as_document(job))
    else:
        print(typeable(f"Job {job.id}: {visible(job.spec().name)}. `sublet nb status {job.id}` shows its progress."))
    return DONE


def status(
    *,
    job: Annotated[str | None, Arg("JOB", help="Number of a job (default: all jobs).")] = None,
    as_json: AsJson = False,
) -> int:
    """Show the progress of background notebooks.

    A job whose runner is gone, after a restart of the machine for instance, is started again.
    """
    from sublet.cli.nb_show import as_document, for_people, one_for_people
    from sublet.notebook.batch.jobs import all_jobs, find_job

    chosen = all_jobs() if job is None else [find_job(job)]
    for one in chosen:
        _revived(one)
    if as_json:
        shown = [as_document(one) for one in chosen]
        document(shown if job is None else shown[0])
    elif job is not None:
        print(one_for_people(chosen[0]))
    else:
        print(for_people(chosen))
    return DONE


def resume(*, job: JobArg) -> int:
    """Resume an interrupted job in the background, from the last finished cell."""
    from sublet.notebook.batch.detached import launch
    from sublet.notebook.batch.jobs import find_job

    found = find_job(job)
    record = found.record()
    if record.is_over:
        raise InvalidRequest(f"job {found.id} is over: {record.state}", do="Submit its notebook again.")
    if found.runner:
        raise InvalidRequest(f"job {found.id} is being run", do=f"See `sublet nb status {found.id}`.")
    launch(found)
    print(f"Job {found.id} goes on from cell {record.done + 1} of {record.cells}.")
    return DONE


def fetch(
    *, job: JobArg, folder: Annotated[str, Arg("DIR", help="Folder to write to (default: this folder).")] = "."
) -> int:
    """Copy the executed notebook and its page to a folder, with the cells run so far."""
    from sublet.notebook.batch.jobs import find_job

    found = find_job(job)
    if not found.executed.exists():
        record = found.record()
        raise NotFound(
            f"job {found.id} has made nothing yet: it is {record.state}", do=f"See `sublet nb status {found.id}`."
        )
    target = Path(folder) / f"{Path(found.spec().notebook).stem}.executed.ipynb"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(found, target)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written: {error.strerror}", do="Name another folder.") from None
    _print_paths(found, target)
    return DONE


def stop(
    *,
    job: JobArg,
    wait: Annotated[
        float, Opt("--wait", metavar="DURATION", parse=wait, help="Longest wait until it has stopped (default: 30s).")
    ] = STOPPED_WITHIN_S,
) -> int:
    """Stop a job. Its outputs so far stay and can be fetched."""
    from sublet.notebook.batch.jobs import find_job

    found = find_job(job)
    record = found.record()
    if record.is_over:
        print(f"Job {found.id} is over already: {record.state}.")
        return DONE
    record = _stopped(found, wait)
    if not record.is_over:
        sys.stderr.write(_still_runs(found, record, wait))
        return FAILED
    print(f"Job {found.id} is {record.state}: {record.done} of {record.cells} cells ran.")
    return DONE


def open_(
    *,
    job: JobArg,
    out: Annotated[
        str | None, Opt("--out", "-o", metavar="PATH", help="Notebook to write (default: NAME.continued.ipynb).")
    ] = None,
    no_browser: Annotated[bool, Opt("--no-browser", help="Write the notebook and do not open it.")] = False,
) -> int:
    """Write a notebook that starts with the final variables of a job, and open it in JupyterLab if installed."""
    from sublet.cli.nb_show import continued
    from sublet.notebook.batch.jobs import find_job

    found = find_job(job)
    target = Path(out) if out is not None else Path(f"{Path(found.spec().notebook).stem}.continued.ipynb")
    if target.exists() and out is None:
        raise InvalidRequest(f"{target} is there already", do="Name another with --out.")
    data = continued(found)
    try:
        target.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"{target} cannot be written: {error.strerror}", do="Name another with --out.") from None
    print(f"{target}: its first cell restores what job {found.id} ended with.")
    lab = shutil.which("jupyter-lab") or shutil.which("jupyter-lab", path=str(Path(sys.executable).parent))
    if lab is not None and not no_browser and sys.stdout.isatty():
        sys.stdout.flush()
        os.execv(lab, [lab, str(target)])
    print(f"Open it in Jupyter, for instance with `jupyter lab {target}`.")
    return DONE


# ------------------------------------------------------------------------------------------------- from the job


def _copy(job: Job, target: Path) -> None:
    from sublet.notebook.batch.jobs import put

    if not job.page.exists():
        _make_page(job)
    try:
        if job.executed.exists():
            put(target, job.executed.read_bytes())
        if job.page.exists():
            put(target.with_suffix(".html"), job.page.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"{target} cannot be written: {error.strerror}",
            do=f"Make room, or another folder; nothing is lost: `sublet nb fetch {job.id} DIR` brings it.",
        ) from None


def _make_page(job: Job) -> None:
    """Of one that is not over: as far as it is."""
    from sublet.notebook.batch.page import page_of
    from sublet.notebook.batch.prepare import read_notebook

    with contextlib.suppress(SubletError):
        page = page_of(read_notebook(job.executed), job.spec(), job.record(), None)
        if not job.record().is_over:
            job.put(job.page, page.encode())


def _print_paths(job: Job, target: Path) -> None:
    if not target.exists():
        return
    print(f"{paint('notebook', 'bold')}  {target}")
    page = target.with_suffix(".html")
    if page.exists():
        print(f"{paint('page', 'bold')}      {page}")
    if job.record().checkpoint:
        print(typeable(f"{paint('variables', 'bold')} `sublet nb open {job.id}` starts from them"))


def _status_of(record: JobRecord) -> int:
    if record.exit_code:
        _print_error(record)
        return record.exit_code
    if not record.is_over:
        _print_error(record)
        return 130
    return DONE


def _print_error(record: JobRecord) -> None:
    sys.stderr.write(f"{paint('sublet:', 'red', stream=sys.stderr)} {visible(typeable(record.message))}\n")
    if record.do:
        sys.stderr.write(f"  {visible(typeable(record.do))}\n")


def _revived(job: Job) -> None:
    """A job in the background whose runner is gone gets another: looking after it is looking after it."""
    from sublet.notebook.batch.detached import launch

    with contextlib.suppress(SubletError):
        record = job.record()
        if record.is_over or job.runner or not job.spec().waits_its_turn:
            return
        if launch(job):
            sys.stderr.write(f"sublet: job {job.id} had lost its runner; it goes on from cell {record.done + 1}\n")


def _stopped(job: Job, within_s: float) -> JobRecord:
    import signal

    from sublet.notebook.batch.job_states import Happening, after

    job.ask_to_stop()
    until = time.monotonic() + within_s
    signalled = 0
    is_first = True
    while is_first or time.monotonic() < until:
        is_first = False
        runner, is_over = job.runner, job.record().is_over
        if runner > 0:
            if runner != signalled and not is_over:
                signalled = runner
                with contextlib.suppress(ProcessLookupError):
                    os.kill(runner, signal.SIGTERM)
            time.sleep(0.05)
            continue
        if is_over:
            break
        with contextlib.suppress(InvalidRequest), job.taken():
            record = job.record()
            if not record.is_over:
                if record.state == "running":
                    record = after(record, Happening.CUT)
                facts: dict[str, Any] = {"message": "stopped", "exit_code": FAILED, "changed_wall_ns": time.time_ns()}
                job.write(after(record, Happening.STOPPED, **facts))
    return job.record()


def _still_runs(job: Job, record: JobRecord, waited_s: float) -> str:
    runner = job.runner
    who = f"process {runner}" if runner > 0 else "its runner"
    within = f" within {seconds(round(waited_s))}" if waited_s >= 1 else ""
    at = f"in cell {min(record.done + 1, record.cells)} of {record.cells}"
    do = (
        f"It stops as soon as that cell can be interrupted: see `sublet nb status {job.id}`, or wait longer: "
        f"`sublet nb stop {job.id} --wait 5m`."
    )
    if runner > 0:
        do += f" If the process stands still, `kill -9 {runner}` ends it."
    head = paint("sublet:", "red", stream=sys.stderr)
    return f"{head} job {job.id} was asked to stop and has not done so{within}: {who} is {at}\n  {typeable(do)}\n"


# --------------------------------------------------------------------------------------------------------------- nb job
#
# Turns a command line of ``sublet nb`` into a job, checked before anything is written.


def made(
    path: str,
    options: JobLeaseOptions,
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
    from sublet.notebook.batch.job_options import JobLeaseOptions, for_one_lease, from_cell
    from sublet.notebook.batch.jobs import JobSpec, make_job
    from sublet.notebook.batch.page import written
    from sublet.notebook.batch.prepare import (
        code_cells,
        has_gpu_cells,
        read_notebook,
        unknown_parameters,
        with_parameters,
    )
    from sublet.notebook.options import configured

    source = Path(path).absolute()
    notebook = read_notebook(source)
    in_cell, notes = from_cell(notebook.cells[code_cells(notebook)[0]].source)
    prepared = with_parameters(notebook, params)
    for note in (*notes, *unknown_parameters(notebook, params)):
        sys.stderr.write(f"sublet: {visible(note)}\n")
    found = options.over(in_cell.over(JobLeaseOptions(tier=Tier.BATCH if waits_its_turn else None)))
    wants_whole = found.vram_bytes is not None and not has_gpu_cells(notebook)
    one_for = lease or found.lease or ("whole" if wants_whole else "cells")
    if one_for == "whole":
        if os.environ.get("SUBLET_SESSION"):
            raise InvalidRequest(
                "a notebook under one lease is no part of a session, and SUBLET_SESSION is set",
                do="Give each cell a lease of its own (--lease cells), or unset SUBLET_SESSION.",
            )
        found = for_one_lease(found, [prepared.cells[n].source for n in code_cells(prepared)], configured())
    spec = JobSpec(
        notebook=str(source),
        folder=str(source.parent),
        name=name or found.name or source.stem,
        kernel=kernel or "",
        lease=one_for,
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


def options_of(
    gpu: int | None,
    gpus: int | None,
    ttl: float | None,
    tier: Tier | None,
    waiting: float | None,
    *,
    pay_priority: bool,
    no_wait: bool,
    smaller_ok: bool,
) -> JobLeaseOptions:
    from sublet.notebook.batch.job_options import JobLeaseOptions

    if no_wait and waiting is not None:
        raise UsageError("--wait and --no-wait contradict each other", do="Give one of them.")
    wait_ns = 0 if no_wait else None if waiting in (None, float("inf")) else round((waiting or 0) * NS_PER_S)
    return JobLeaseOptions(
        vram_bytes=gpu,
        gpus=gpus,
        ttl_ns=None if ttl is None else round(ttl * NS_PER_S),
        tier=tier,
        pay_priority=True if pay_priority else None,
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
