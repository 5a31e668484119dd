"""A job's folder: its request, its progress, and the lock of its runner.

HOME/jobs/7/spec.json          what was asked for; written once
HOME/jobs/7/record.json        how far it is; written whole, each time
HOME/jobs/7/notebook.ipynb     the notebook as it was handed in, with its parameters
HOME/jobs/7/executed.ipynb     the same with outputs; whole after every cell
HOME/jobs/7/executed.html      the page
HOME/jobs/7/state/             the variables: checkpoints, see ``state.checkpoints.store``
HOME/jobs/7/lock               held by its one runner, for as long as that lives
HOME/jobs/7/stop               exists once the job is asked to stop
HOME/jobs/7/log                what the runner had to say
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from sublet.client.home import home_dir, make_private_dir
from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.notebook.batch.job_options import JobLeaseOptions
from sublet.notebook.batch.job_states import JobRecord, JobState
from sublet.state.checkpoints.atomic_files import move_into_place, read_whole, sync_folder, write_synced

T = TypeVar("T")
SCHEMA: Final = 1
FILE_MAX: Final = 4 << 20
LOOKS: Final = 20
"""At a lock that a runner has: one that has just ended lets it go in a moment."""
LOOK_S: Final = 0.02
TESTERS_S: Final = 600.0
"""How long a runner waits for processes that only test the lock, and stand still while they do."""
KEPT_MAX: Final = 100
"""Jobs that are over and still kept; the oldest go when another one comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What was asked for."""

    notebook: str
    """The path it was handed in from."""
    folder: str
    """Where its cells run: the notebook's folder."""
    name: str
    kernel: str = ""
    """The name of a kernel; empty: the notebook's own, or this Python's."""
    lease: str = "cells"
    asked: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    out: str = ""
    """Where the executed notebook goes besides the job's folder; empty: nowhere."""
    label: str = ""
    """What its leases are labelled with, so that they are found again and make up one bill."""
    submitted_wall_ns: int = 0
    waits_its_turn: bool = False
    """It came through the queue: of those only so many run at once."""

    @property
    def leases(self) -> JobLeaseOptions:
        return JobLeaseOptions.from_json(self.asked)


class Job:
    """One folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = folder.name
        self.notebook = folder / "notebook.ipynb"
        self.executed = folder / "executed.ipynb"
        self.page = folder / "executed.html"
        self.state = folder / "state"
        self.log = folder / "log"
        self._stop = folder / "stop"

    def spec(self) -> JobSpec:
        return _read(self.folder / "spec.json", JobSpec)

    def record(self) -> JobRecord:
        return _read(self.folder / "record.json", JobRecord)

    def write(self, record: JobRecord) -> None:
        """When this returns it is on disk."""
        _write(self.folder / "record.json", record)

    def put(self, path: Path, data: bytes) -> None:
        """One of the job's other files, whole."""
        put(path, data)

    # ---- who has it

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run it exclusively. Raises if another process runs it. The lock ends with the process, however that ends."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(fd):
                raise InvalidRequest(f"job {self.id} is being run already", do=f"See `sublet nb status {self.id}`.")
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(fd)

    @property
    def runner(self) -> int:
        """The process that has it; 0 if none has."""
        try:
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 20, 0)
            return int(text) if text.isdigit() else -1
        finally:
            os.close(fd)
        return 0

    def ask_to_stop(self) -> None:
        with contextlib.suppress(FileExistsError):
            write_synced(self._stop, b"")
        sync_folder(self.folder)

    @property
    def shall_stop(self) -> bool:
        return self._stop.exists()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _locked(fd: int) -> bool:
    """Take the lock. False where a runner has it.

    A process that tests the lock holds it for a moment itself, shared, and may stand still just then. A runner holds it
    alone, so where it can be shared there is none, and the testers are waited for.
    """
    until_s = time.monotonic() + TESTERS_S
    looks = 0
    while looks < LOOKS and time.monotonic() < until_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            looks += 1
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(LOOK_S)
    return False


def jobs_dir(home: str | os.PathLike[str] | None = None) -> Path:
    return home_dir(home) / "jobs"


def make_job(spec: JobSpec, notebook: bytes, cells: int, *, wall_ns: int) -> Job:
    """A new one, on disk when this returns. A job whose maker was interrupted has no record and is none."""
    root = jobs_dir()
    try:
        make_private_dir(root.parent)
        make_private_dir(root)
        job = Job(_claimed(root))
        job.put(job.notebook, notebook)
        _write(job.folder / "spec.json", spec)
        job.write(JobRecord(cells=cells, changed_wall_ns=wall_ns))
        sync_folder(root)
    except OSError as error:
        raise CheckpointFailed(
            f"the job cannot be kept in {root}: {error.strerror}", do="Make room there, and submit it again."
        ) from error
    _prune(root)
    return job


def all_jobs() -> list[Job]:
    """Every job there is, oldest first."""
    root = jobs_dir()
    try:
        names = [name for name in os.listdir(root) if name.isdecimal()]
    except FileNotFoundError:
        return []
    return [Job(root / name) for name in sorted(names, key=int) if (root / name / "record.json").exists()]


def find_job(text: str) -> Job:
    """By its number, or by its name where only one has it."""
    number = text.strip().removeprefix("#")
    if not number.isdecimal():
        number = _number_of(text)
    job = Job(jobs_dir() / number)
    if not number.isdecimal() or not (job.folder / "record.json").exists():
        raise NotFound(f"there is no job {text[:40]}", do="`sublet nb status` lists them.")
    return job


def _number_of(name: str) -> str:
    found = []
    for job in all_jobs():
        with contextlib.suppress(CheckpointDamaged):
            if job.spec().name == name:
                found.append(job.id)
    if len(found) > 1:
        raise NotFound(f"{len(found)} jobs are called {name[:40]}: {', '.join(found[-5:])}", do="Give the number.")
    return found[0] if found else ""


def _claimed(root: Path) -> Path:
    while True:
        number = max((int(name) for name in os.listdir(root) if name.isdecimal()), default=0) + 1
        with contextlib.suppress(FileExistsError):  # another process was quicker
            (root / str(number)).mkdir(mode=0o700)
            return root / str(number)


def _prune(root: Path) -> None:
    over = []
    for job in all_jobs():
        with contextlib.suppress(CheckpointDamaged):
            if job.record().is_over and not job.runner:
                over.append(job)
    for job in over[: max(0, len(over) - KEPT_MAX)]:
        job.remove()


# ------------------------------------------------------------------------------------------------------------- files


def put(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, in place of what was there."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}~")
    try:
        write_synced(temporary, data)
        move_into_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write(path: Path, value: JobSpec | JobRecord) -> None:
    body = json.dumps(asdict(value), sort_keys=True)
    data = {"schema": SCHEMA, "sum": _sum(body), "body": body}
    put(path, json.dumps(data).encode())


def _read(path: Path, kind: type[T]) -> T:
    try:
        data = json.loads(read_whole(path, FILE_MAX))
        if data["schema"] != SCHEMA or data["sum"] != _sum(data["body"]):
            raise ValueError("its checksum does not hold")
        body = json.loads(data["body"])
        known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in body.items() if name in known
        }
        if "state" in values:
            values["state"] = JobState(values["state"])
        return kind(**values)
    except FileNotFoundError:
        raise NotFound(f"there is no {path}", do="`sublet nb status` lists the jobs there are.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: {error}", do="Remove the folder it lies in, and submit the notebook again."
        ) from None


def _sum(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- turns
#
# Orders notebooks that came through the queue: the oldest first, and a bounded number at once.
#
# A place is a lock on a small file, so it is free again when its holder is gone, however that went.


AT_ONCE: Final = 4
"""Notebooks of one user on one machine that run at the same time: each is a kernel with its variables in memory."""


class Turn:
    """One job's place among them."""

    def __init__(self, job: Job) -> None:
        self.ahead = 0
        """Jobs that wait and were here before."""
        self._job = job
        self._fd = -1

    def come(self) -> bool:
        """Whether it is our turn. From then on the place is held."""
        places = [self._job.folder.parent / f"turn-{number}" for number in range(AT_ONCE)]
        have = {place.read_text() for place in places if place.exists()}
        older = [job for job in all_jobs() if int(job.id) < int(self._job.id) and job.id not in have]
        self.ahead = sum(map(_waits, older))
        if self.ahead:
            return False
        for place in places:
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._job.id.encode(), 0)
            self._fd = fd
            return True
        return False

    def over(self) -> None:
        """End this turn, so that another job has one. Harmless twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.ftruncate(fd, 0)
            os.close(fd)


def _waits(job: Job) -> bool:
    """It has a runner, and that has not begun: a job without a runner delays no other."""
    with contextlib.suppress(SubletError):
        return job.record().state in (JobState.QUEUED, JobState.INTERRUPTED) and job.runner > 0
    return False
