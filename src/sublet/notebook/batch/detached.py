"""A job in the background: the process that runs it, and a smaller one that restarts it if it is killed.

    python -m sublet.notebook.batch.detached FOLDER

forks before anything is loaded. The parent only waits: a runner that was ended by a signal is followed by another,
which goes on from the last finished cell. If both are killed, or the machine fails, the next query of the job
(``sublet nb status``) starts them anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sublet.notebook.batch.jobs import Job

KILLED_IN_VAIN_MAX: Final = 5
"""Runners that were killed one after the other and finished no cell: then it is left to a person."""
PAUSE_S: Final = 0.5
BEGINS_S: Final = 20.0
_left_alone: list[int] = []
"""Processes that may outlive this one. Those that have ended are put away when the next one is started."""


def launch(job: Job) -> int:
    """Start both in a session of their own; returns when the runner has the job. Its pid, 0 if it is over already."""
    _left_alone[:] = [pid for pid in _left_alone if _runs(pid)]
    words = [sys.executable, "-m", "sublet.notebook.batch.detached", str(job.folder)]
    with open(job.log, "ab") as log:
        started = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    try:
        until = time.monotonic() + BEGINS_S
        while time.monotonic() < until:
            runner = job.runner
            if runner > 0 or started.poll() is not None:
                return max(0, runner)
            time.sleep(PAUSE_S / 20)
        return 0
    finally:
        if started.returncode is None:
            _left_alone.append(started.pid)
            started.returncode = 0  # else Python would complain of it when this process ends


def _runs(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def main(words: Sequence[str] | None = None) -> int:
    """Keep a runner on the job until it ends by itself."""
    folder = Path((sys.argv[1:] if words is None else words)[0])
    in_vain, done = 0, -1
    while True:
        status = _in_child(folder)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        now_done = _done(folder)
        in_vain = in_vain + 1 if now_done == done else 1
        done = now_done
        print(f"the runner was ended by signal {os.WTERMSIG(status)}; another one goes on", flush=True)  # noqa: T201
        if in_vain > KILLED_IN_VAIN_MAX:
            message = f"its runner was killed {in_vain} times in the same cell"
            return _fail(folder, message, "See why (`dmesg` tells of memory), and submit it again.")
        time.sleep(PAUSE_S * in_vain)


def _in_child(folder: Path) -> int:
    """Run it in a fork; the status it ended with. A wish to end is passed on."""
    pid = os.fork()
    if not pid:
        os._exit(_run(folder))
    before = signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    try:
        return os.waitpid(pid, 0)[1]
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(folder: Path) -> int:
    from sublet.errors import SubletError
    from sublet.notebook.batch.jobs import Job
    from sublet.notebook.batch.runner import Runner

    try:
        record = Runner(Job(folder)).run()
    except SubletError as error:
        print(error, flush=True)  # noqa: T201
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it is: a job does not hang between two states
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        return _fail(folder, f"its runner failed: {type(error).__name__}: {error}", f"See {folder / 'log'}.")
    print(f"{record.state}: {record.done} of {record.cells} cells. {record.message}".rstrip(), flush=True)  # noqa: T201
    return record.exit_code or 0


def _done(folder: Path) -> int:
    from sublet.notebook.batch.jobs import Job

    return Job(folder).record().done


def _fail(folder: Path, message: str, do: str) -> int:
    from sublet.notebook.batch.job_states import Happening, after
    from sublet.notebook.batch.jobs import Job

    job = Job(folder)
    with job.taken():
        record = job.record()
        if not record.is_over:
            facts = {"message": message, "do": do, "exit_code": 1, "changed_wall_ns": time.time_ns()}
            job.write(after(record, Happening.FAILED, **facts))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
