"""One run of a job: cell by cell, from the first that is not finished.

After each cell, in this order: its outputs are on disk, the variables are saved, the record counts it as finished. What
a runner that dies in between leaves is what the record says, and at most one more checkpoint that is not used.

A cell whose lease was lost is run again from what the last finished cell left; it brought nothing back, and the
variables are either untouched, because the cell ran on the device only, or restored in a new kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sublet.background import start_task
from sublet.client.fabric import Fabric, connect
from sublet.errors import CapacityExceeded, InvalidRequest, LeaseEnded, QuotaExceeded, RemoteError, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.notebook.batch.job_options import cell_options, gpu_line
from sublet.notebook.batch.job_states import Happening, JobRecord, JobState, after
from sublet.notebook.batch.jobs import Job, Turn, put
from sublet.notebook.batch.kernels import JobKernel, OrdinaryKernel, WholeKernel
from sublet.notebook.batch.page import JobBill, page_of, written
from sublet.notebook.batch.prepare import code_cells, read_notebook
from sublet.notebook.batch.progress import JobProgress

AGAIN_MAX: Final = 20
"""How often one cell is run again. A lease that is lost more often under the same cell is lost because of the cell."""
REWOUND_MAX: Final = 5
"""The same for a whole notebook."""
STOP_PATIENCE_S: Final = 3.0
"""How long a cell that is to stop has to do so before its kernel is ended."""
TURN_LOOK_S: Final = 0.5


class Runner:
    """Takes the job and runs it. Its ``record`` is what is on disk."""

    def __init__(
        self, job: Job, progress: JobProgress | None = None, point: Callable[[str], None] | None = None
    ) -> None:
        """``point`` is called at each moment at which a crash matters; tests crash there."""
        self.job = job
        self.spec = job.spec()
        self.record = job.record()
        self.stopping = False
        """It was asked to end: by a signal, or by the job's ``stop`` file."""
        self._progress = progress or JobProgress()
        self._point = point or (lambda _name: None)
        self._options = self.spec.leases
        self._is_whole = self.spec.lease == "whole"
        self._fabric: Fabric | None = None
        self._kernel: JobKernel | None = None
        self._is_ready = False
        """The kernel may run cells."""
        self._not_restored: tuple[str, ...] = ()
        """Variables that the kernel lacks since it is not the one that the notebook began in."""
        self._rewound = 0
        self._again_at = 0
        self._in_turn = 0
        """How often that cell was run again."""
        self._notebook: Any = None
        self._bill_before: dict[str, Any] = {}

    def run(self) -> JobRecord:
        """Run until it is over, or interrupted. Raises if another process runs it."""
        with self.job.taken():
            self.record = self.job.record()
            if self.record.is_over:
                return self.record
            if self.record.state is JobState.RUNNING:  # the previous runner was killed before it could record it
                self._write(Happening.CUT, message="its runner was killed")
            try:
                asyncio.run(self._run())
            finally:
                if self._fabric is not None:
                    self._fabric.close()
            return self.record

    def stop(self) -> None:
        """From a signal: end the cell that runs, then the run."""
        if self.stopping:
            return
        self.stopping = True
        self._stopper = start_task("job_stop", self._stop, failed=lambda _: self._main.cancel())

    async def _stop(self) -> None:
        if self._kernel is not None and self._is_ready:
            with contextlib.suppress(Exception):
                await self._kernel.interrupt()
            await asyncio.sleep(STOP_PATIENCE_S)
        self._main.cancel()

    # ---- the run

    async def _run(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(RuntimeError, ValueError):  # not on the main thread: the caller handles signals
                loop.add_signal_handler(number, self.stop)
        try:
            self._notebook = self._opened()
            async with self._turn_in_queue():
                if self.record.runs:
                    await self._leftovers()
                await self._cells()
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            await self._closed(now=True)
            self._cut()
        except SubletError as error:
            await self._closed(now=True)
            if self.stopping:
                self._cut()
            else:
                self._fail(CellFailure(error.message, error.do, exit_of(error)))
        except OSError as error:
            await self._closed(now=True)
            self._fail(
                CellFailure(f"the job cannot go on: {error}", "Free space or fix it, and submit it again.", FAILED)
            )
        finally:
            await self._closed(now=True)
        self._point("over")

    def _opened(self) -> Any:
        """The notebook, with the outputs of those cells that are finished and no others."""
        has_run = self.record.done > 0 and self.job.executed.exists()
        notebook = read_notebook(self.job.executed if has_run else self.job.notebook)
        for cell in [notebook.cells[n] for n in code_cells(notebook)[self.record.done if has_run else 0 :]]:
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("sublet", None)
        return notebook

    @asynccontextmanager
    async def _turn_in_queue(self) -> AsyncIterator[None]:
        """Of those that came through the queue only so many run at once."""
        if not self.spec.waits_its_turn:
            yield
            return
        turn = Turn(self.job)
        try:
            while not turn.come():
                self._set_message(f"waits for its turn: {turn.ahead} before it")
                await asyncio.sleep(TURN_LOOK_S)
                self._check_stop()
            yield
        finally:
            turn.over()

    async def _cells(self) -> None:
        cells = code_cells(self._notebook)
        restored = await self._ready()
        self._write(Happening.BEGUN, cells=len(cells))
        self._progress.begun(self.record, restored)
        self._point("begun")
        while self.record.done < len(cells):
            self._check_stop()
            failed = await self._cell(cells[self.record.done])
            if failed is None:
                continue
            if self.stopping:
                raise asyncio.CancelledError
            if failed.lacks:
                await self._rewind(failed)
            elif failed.is_lost:
                await self._rerun(failed)
            else:
                return await self._failed(failed)
        with contextlib.suppress(SubletError):
            await self._call_kernel("give_back")
        await self._closed(now=False)
        self._put_notebook(with_page=True)
        self._point("page")
        self._write(Happening.FINISHED)
        return None

    async def _cell(self, at: int) -> CellFailure | None:
        """One cell, and everything that makes it count."""
        cell, number = self._notebook.cells[at], self.record.done + 1
        self._progress.cell(number, cell.source)
        self._point("before")
        began_s = time.monotonic()
        failed = await self._executed(cell, at)
        if failed is not None:
            self._put_notebook()
            return failed
        self._point("ran")
        seconds = time.monotonic() - began_s
        try:
            bill = await self._bill_of_cell()
            cell.metadata["sublet"] = {"seconds": round(seconds, 3), "bill": bill}
            self._put_notebook()
            self._point("outputs")
            saved = await self._call_kernel("save", f"after cell {number}")
        except RemoteError:
            assert self._kernel is not None
            lost = await self._kernel.lost()
            if lost is None:
                raise
            return lost_with(lost)  # a cell whose results are not saved has not run
        self._point("saved")
        self._write(Happening.CELL_DONE, checkpoint=saved["checkpoint"], unsaved=tuple(saved["unsaved"]))
        self._point("counted")
        self._progress.cell_done(number, seconds, bill)
        return None

    async def _executed(self, cell: Any, at: int) -> CellFailure | None:
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        assert self._kernel is not None
        try:
            await self._kernel.client.async_execute_cell(cell, at)
        except CellExecutionError as error:
            return await self._raised(cell, error)
        except DeadKernelError:
            return await self._died()
        return None

    async def _raised(self, cell: Any, error: Any) -> CellFailure:
        """A cell that raised: because of its lease, or by itself."""
        assert self._kernel is not None
        lost = await self._kernel.lost()
        if lost is not None:
            return lost_with(lost)
        message = f"{error.ename}: {error.evalue}" if error.evalue else str(error.ename)
        lacks = missing(message, self._not_restored)
        if lacks:
            return CellFailure(message, "", FAILED, lacks=lacks)
        why: dict[str, Any] | None = None
        with contextlib.suppress(SubletError):
            why = await self._call_kernel("why")
        if why is not None and why["is_end"] and not why["reason"]:  # it needed what an earlier lease took with it
            return CellFailure(why["message"], why["do"], LEASE_ENDED, lacks="what was on the device")
        if why is not None and why["is_end"] and why["reason"] not in OURS_TO_BLAME:
            on_device_only = gpu_line(cell.source) is not None
            return CellFailure(why["message"], why["do"], LEASE_ENDED, is_lost=True, needs_kernel=not on_device_only)
        code, do = FAILED, "Fix the cell and run the notebook again."
        if why is not None:
            code = REFUSED if why["kind"] in ("CapacityExceeded", "QuotaExceeded") else FAILED
            code, do = (LEASE_ENDED if why["is_end"] else code), why["do"] or do
            message = f"{error.ename}: {why['message']}"
        return CellFailure(message.strip(), do, code, traceback=traceback_of(cell))

    async def _died(self) -> CellFailure:
        assert self._kernel is not None
        lost = await self._kernel.lost()
        if lost is None:
            do = "It ran out of memory, perhaps, or a library crashed; run the cell by hand to see."
            return CellFailure("the kernel died", do, FAILED)
        return lost_with(lost)

    async def _rerun(self, failed: CellFailure) -> None:
        """The lease was lost under the cell: it is run again, from what the last finished cell left."""
        number = self.record.done + 1
        self._progress.again(number, failed.message)
        self._in_turn = self._in_turn + 1 if self._again_at == number else 1
        self._again_at = number
        if self._in_turn > AGAIN_MAX:
            raise LeaseEnded(f"cell {number} lost its lease {self._in_turn} times: {failed.message}", do=failed.do)
        self._write(Happening.AGAIN, message=f"cell {number} is run again: {failed.message}")
        self._point("again")
        if failed.needs_kernel:
            await self._closed(now=True)
            await self._ready()

    async def _rewind(self, failed: CellFailure) -> None:
        """What cannot be saved is made again by the cells that made it."""
        self._rewound += 1
        if self._rewound > REWOUND_MAX:
            raise LeaseEnded(f"{failed.message}; it was run again {REWOUND_MAX} times", do=failed.do)
        why = f"{failed.lacks} could not be saved, so the notebook is run again from its first cell"
        self._progress.again(self.record.done + 1, why)
        self._write(Happening.REWOUND, message=why)
        self._point("rewound")
        await self._closed(now=True)
        self._notebook = self._opened()
        await self._ready()

    async def _failed(self, failed: CellFailure) -> None:
        self._progress.failed(self.record.done + 1, failed.traceback)
        with contextlib.suppress(SubletError):
            await self._call_kernel("give_back")
        await self._closed(now=False)
        message = f"cell {self.record.done + 1} of {self.record.cells} failed: {failed.message}"
        self._fail(CellFailure(message, failed.do, failed.exit_code))

    # ---- the kernel

    async def _ready(self) -> int:
        """A kernel with the variables as the last finished cell left them; how many were restored."""
        self._bill_before = {}
        env = {"SUBLET_NOTEBOOK_JOB": self.job.id}
        self._kernel = kernel = self._made(env)
        await kernel.open()
        is_child = not self._is_whole
        answer = await self._call_kernel(
            "begin",
            kernel.place(str(self.job.state)),
            self.record.checkpoint,
            cell_options(self._options) if is_child else "",
            self.spec.label,
            os.getpid() if is_child else 0,
            self._is_bound,
        )
        self._is_ready = True
        self._not_restored = self.record.unsaved if self.record.checkpoint else ()
        return int(answer["restored"])

    def _made(self, env: dict[str, str]) -> JobKernel:
        if not self._is_whole:
            return OrdinaryKernel(
                self._notebook, folder=self.spec.folder, kernel=self.spec.kernel, env=env, log=self.job.log
            )
        loop = asyncio.get_running_loop()

        def note(text: str) -> None:
            loop.call_soon_threadsafe(self._set_message, text)

        return WholeKernel(
            self._notebook,
            folder=self.spec.folder,
            kernel=self.spec.kernel,
            options=self._options,
            label=self.spec.label,
            env=env,
            connect=self._office,
            note=note,
        )

    async def _call_kernel(self, what: str, *arguments: object) -> Any:
        if self._kernel is None:
            raise RemoteError("the notebook has no kernel")
        return await self._kernel.ask(what, *arguments)

    async def _closed(self, *, now: bool) -> None:
        kernel, self._kernel = self._kernel, None
        self._is_ready = False
        if kernel is not None:
            await kernel.close(now=now)
            if now:
                with contextlib.suppress(SubletError):
                    await self._leftovers()

    async def _leftovers(self) -> None:
        if self._used_leases():
            fabric = await asyncio.to_thread(self._office)
            await asyncio.to_thread(give_back_all, fabric, self.spec.label)

    def _used_leases(self) -> bool:
        """Whether there may be any: an office is not started to ask."""
        if self._is_whole:
            return True
        return any("%%gpu" in self._notebook.cells[n].source for n in code_cells(self._notebook))

    def _office(self) -> Fabric:
        if self._fabric is None:
            self._fabric = connect(bound=self._is_bound)
        return self._fabric

    @property
    def _is_bound(self) -> bool:
        """Whether its leases end with the process that holds them. Those of a job in the background do not: it goes on
        under another runner."""
        return not self.spec.waits_its_turn

    # ---- what is written

    async def _bill_of_cell(self) -> dict[str, Any]:
        """What the kernel's cells consumed since the one before."""
        found: dict[str, Any] = await self._call_kernel("bill") or {}
        before, self._bill_before = self._bill_before, found
        return {
            name: value - (before.get(name) or 0)
            for name, value in found.items()
            if isinstance(value, int | float) and value
        }

    def _put_notebook(self, *, with_page: bool = False) -> None:
        self.job.put(self.job.executed, written(self._notebook))
        if with_page:
            self._put_page()

    def _put_page(self) -> None:
        bill = self._bill()
        page = page_of(self._notebook, self.spec, self.record, bill)
        self.job.put(self.job.page, page.encode())
        if self.spec.out:
            out = Path(self.spec.out)
            put(out, self.job.executed.read_bytes())
            put(out.with_suffix(".html"), page.encode())

    def _bill(self) -> JobBill | None:
        """What the office has on its books for this job."""
        if not self._used_leases():
            return None
        with contextlib.suppress(SubletError):
            for line in self._office().bill(by="label:job", own=True):
                if line.key == self.spec.label:
                    return JobBill.of(line)
        return None

    def _write(self, what: Happening, **facts: Any) -> None:
        self.record = after(self.record, what, changed_wall_ns=time.time_ns(), **facts)
        self.job.write(self.record)

    def _set_message(self, message: str) -> None:
        """Where it stands, for `nb status`; an error of it is left unsaid."""
        if message != self.record.message:
            self._progress.waiting(message)
            self.record = replace(self.record, message=message)
            self.job.write(self.record)

    def _check_stop(self) -> None:
        if self.stopping or self.job.shall_stop:
            self.stopping = True
            raise asyncio.CancelledError

    def _cut(self) -> None:
        if self.job.shall_stop:
            message = f"stopped in cell {self.record.done + 1}" if self.record.runs else "stopped before its first cell"
            self._write(Happening.STOPPED, message=message, exit_code=FAILED)
            self._put_partial()
        else:
            do = f"`sublet nb resume {self.job.id}` goes on with it."
            self._write(Happening.CUT, message=f"interrupted in cell {self.record.done + 1}", do=do)

    def _fail(self, failed: CellFailure) -> None:
        self._write(Happening.FAILED, message=failed.message, do=failed.do, exit_code=failed.exit_code)
        self._put_partial()

    def _put_partial(self) -> None:
        """It is over, and what it came to is shown as well as can be."""
        with contextlib.suppress(SubletError, OSError):
            if self._notebook is not None:
                self._put_notebook(with_page=True)


# ------------------------------------------------------------------------------------------------------------ leftovers
#
# Releases leases of a kernel that could not release them itself.


def give_back_all(fabric: Fabric, label: str) -> None:
    """Release every lease of this job of ours, and leave every line it stands in."""
    for lease in fabric.leases(own=True):
        if lease.labels.get("job") == label:
            body = {"request_id": f"nb-{os.urandom(8).hex()}"}
            with contextlib.suppress(SubletError):  # it ended meanwhile
                fabric.request("POST", f"/v1/leases/{lease.id}/release", body, shape=dict)


# ------------------------------------------------------------------------------------------------------------- failures
#
# Why a cell, and with it a job, failed: who is to blame, and whether it may be retried.


FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 75
LEASE_ENDED: Final = 76
OURS_TO_BLAME: Final = frozenset(
    map(str, (EndReason.OUT_OF_MEMORY, EndReason.GUEST_FAILED, EndReason.QUOTA, EndReason.BUDGET, EndReason.REFUSED))
)
"""End reasons that a retry would meet again."""


@dataclass(frozen=True, slots=True)
class CellFailure:
    """Why a cell did not finish."""

    message: str
    do: str
    exit_code: int
    is_lost: bool = False
    """Its lease was; it may be run again."""
    needs_kernel: bool = False
    lacks: str = ""
    """A variable that was there before the run was broken off, and could not be saved."""
    traceback: str = ""


def lost_with(error: SubletError) -> CellFailure:
    """The kernel itself went with its lease."""
    end = error.end if isinstance(error, LeaseEnded) else None
    may_again = end is None or str(end.reason) not in OURS_TO_BLAME
    return CellFailure(error.message, error.do, LEASE_ENDED, is_lost=may_again, needs_kernel=True)


def exit_of(error: SubletError) -> int:
    match error:
        case CapacityExceeded() | QuotaExceeded():
            return REFUSED
        case LeaseEnded():
            return LEASE_ENDED
        case InvalidRequest():
            return USAGE
        case _:
            return FAILED


def missing(message: str, unsaved: Sequence[str]) -> str:
    """The variable that a cell failed for want of, if it is one of these (``name: why``)."""
    found = re.search(r"^NameError: name '(\w+)' is not defined", message)
    names = {one.partition(":")[0] for one in unsaved}
    return found[1] if found is not None and found[1] in names else ""


def traceback_of(cell: Any) -> str:
    """As the notebook has it."""
    errors = [output for output in cell.outputs if output.output_type == "error"]
    return "\n".join(errors[-1].traceback) if errors else ""
