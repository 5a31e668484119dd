"""The engine of `sublet train`: runs a program under successive leases until it is done.

Its state lies in a volume, held for as long as this runs. Each life of the program is a guest under a lease of its own;
when that lease is taken the next is waited for. What ends it all is the program's own end: status 0, or an error that
no lease's end explains. A second run of the name goes on from what the first left, and ends what still runs of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from sublet.background import start_thread, start_timer
from sublet.client.guests import command_spec, start_spec
from sublet.client.home import runtime_dir
from sublet.client.operations import new_request_id
from sublet.errors import Disconnected, InvalidRequest, LeaseEnded, NotFound, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.ranks import ENTRY
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason, LeaseEnd
from sublet.training.leaving import SIGTERM, TERMINATED
from sublet.training.progress import Sieve, TrainingProgress
from sublet.training.progress_events import VARIABLE
from sublet.training.script import for_tenant
from sublet.wire.cards import VISIBLE
from sublet.wire.guests import GuestSpec
from sublet.wire.http import LeaseView

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.guests import Guest
    from sublet.client.lease import Lease
    from sublet.client.model import Place

LOCAL: Final = "local"
ENDED: Final = LeaseStatus.ENDED.value
LABEL: Final = "train"
"""Of every lease of such a run: its name, for the bill and for the next run of it."""
NOT_THE_LEASE: Final = frozenset({EndReason.OUT_OF_MEMORY, EndReason.GUEST_FAILED, EndReason.RELEASED})
"""Ends that another lease would not mend."""
IMPORTS: Final = ("torch?", "torch.utils.data?", "torch._dynamo?", "sublet.training.trainer?")
"""What a warm interpreter has for every life: importing PyTorch takes seconds, and as many again with the first
optimizer, which wants its compiler. The first life waits for it, rather than import the same beside it."""
LEASE_ENDED: Final = 76
STATE_TTL: Final = "10m"
"""TTL of the volume's lease: how long it stays taken after this command was killed."""
STOP_S: Final = 30.0
"""Given to a program that is told to stop: the end of a step, and a save."""
PATIENCE_S: Final = 60.0
"""For what still runs of an earlier command to be gone."""
PAUSE_MAX_S: Final = 30.0
"""Before another lease is asked for, where the last ones brought no step."""
PIECES_MAX: Final = 256
"""Pieces of output that wait here; the program waits for the rest to be taken."""
LOOK_S: Final = 0.5


class Stopped(BaseException):
    """The program that started this wants it to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return "interrupted" if self.number == signal.SIGINT else f"stopped by {signal.Signals(self.number).name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What to run, and on what."""

    argv: Sequence[str]
    name: str
    vram: int | str
    count: int = 1
    """Devices; the program is begun once for each."""
    ttl: float | str | None = None
    tier: str = "batch"
    pay_priority: bool = False
    wait: float | None = None
    state: int | str = "4GiB"
    """Size of the volume, where there is none yet."""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    grace: float | str | None = None

    @property
    def volume(self) -> str:
        return f"train-{self.name}"


class Onlooker(Protocol):
    """Is shown what happens. Called from the thread that runs it."""

    def wrote(self, stream: str, data: bytes) -> None:
        """The program said this."""

    def news(self, text: str) -> None:
        """Something that a person wants to know."""

    def moved(self, progress: TrainingProgress, lease: Lease) -> None:
        """It is further."""

    def waits(self, place: Place) -> None:
        """For a lease, at this place; for a device, or for the volume of its state."""


@dataclass(slots=True)
class Life:
    """One life of the program, as it ended."""

    code: int
    reason: str
    """Why its lease ended under it; empty if it did not."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is to follow: it is done, or another lease would not help."""
        return self.code == 0 or not self.reason


class TrainingRun:
    """One command's run."""

    def __init__(self, fabric: Fabric, plan: TrainingPlan, onlooker: Onlooker) -> None:
        self.fabric, self.plan, self.onlooker = fabric, plan, onlooker
        self.progress = TrainingProgress()
        self.preemptions = 0
        self.waited_seconds = 0.0
        """For another lease, after one was taken."""
        self._labels = {LABEL: plan.name}
        self.began = False
        """Whether a program of this command was started."""
        self._empty = 0
        """Lives in a row that brought no step."""

    def run(self) -> int:
        """Until it is done; the exit status. Raises what another lease could not be had for, and `Stopped`."""
        with self._alone(), self._storage() as storage:
            while True:
                steps = self.progress.steps
                lease = self._acquire()
                with lease:
                    life = self._live(lease, storage)
                if life.is_over:
                    return life.code
                self.preemptions += 1
                self._empty = 0 if self.progress.steps > steps else self._empty + 1
                self.onlooker.news(self._taken(lease, life))

    def bill(self) -> Any:
        """What its leases cost, those of earlier commands of the name included; None if nothing was held."""
        lines = self.fabric.bill(by=f"label:{LABEL}", own=True)
        return next((line for line in lines if line.key == self.plan.name), None)

    @property
    def terms(self) -> dict[str, Any]:
        """Of each of its leases, of one for what is parked too: that is a new request."""
        plan = self.plan
        return {
            "ttl": plan.ttl,
            "tier": plan.tier,
            "pay_priority": plan.pay_priority,
            "wait": plan.wait,
            "labels": self._labels,
        }

    # ---- one life ----

    def _acquire(self) -> Lease:
        plan, began_s = self.plan, time.monotonic()
        if self._empty:
            time.sleep(min(PAUSE_MAX_S, 2.0 ** (self._empty - 1)))
        lease = self.fabric.gpu(
            min_vram=plan.vram,
            count=plan.count,
            on_place=self.onlooker.waits,
            **self.terms,
        )
        if self.preemptions:
            self.waited_seconds += time.monotonic() - began_s
        return lease

    def _live(self, lease: Lease, storage: Lease) -> Life:
        plan = self.plan
        is_local = self.fabric.lease(lease.id).tenant == LOCAL
        ours = os.environ if is_local else {}  # others begin with an empty one
        env = {"PYTHONUNBUFFERED": "1", **ours, **plan.env}
        spec = command_spec(
            plan.argv,
            env=env | {VARIABLE: "1"},
            cwd=plan.cwd,
            stdio="null",
            rows=24,
            cols=80,
            name=plan.name,
            grace=plan.grace,
        )
        if not is_local:
            spec = for_tenant(spec, plan.cwd)
        if plan.count > 1:
            spec = per_device(spec, plan)
        try:
            with lease.activity("training"):  # the first one waits for its interpreter, which is no idleness
                guest = start_spec(lease, replace(spec, imports=IMPORTS, patient=True), volume=storage)
        except LeaseEnded as over:
            return self._never_lived(lease, over)
        self.progress.new_life()
        self.began = True
        with contextlib.closing(guest):
            return _Attendance(self, lease, guest).run()

    def _never_lived(self, lease: Lease, over: LeaseEnded) -> Life:
        """The lease was taken before its program began. Raises what another lease would not mend."""
        until_s = time.monotonic() + PATIENCE_S
        while (end := self.fabric.lease(lease.id).end) is None and time.monotonic() < until_s:
            time.sleep(0.1)
        if end is None or end.reason in NOT_THE_LEASE:
            raise over
        return Life(LEASE_ENDED, end.reason)

    def _taken(self, lease: Lease, life: Life) -> str:
        progress = self.progress
        by_signal = life.reason == SIGTERM
        text = "the program was told to stop" if by_signal else f"lease {lease.id} was taken ({life.reason})"
        if progress.left:
            text += f"; step {progress.steps} is saved"
        elif progress.saved_steps >= 0:
            text += f"; step {progress.saved_steps} is saved, of {progress.steps}"
        else:
            text += "; nothing was saved yet"
        return text + ". Asking for another"

    # ---- before the first ----

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One command of a name at a time on this machine; a lock that ends with its process says so."""
        home = self.fabric.address.home
        if home is None:
            yield
            return
        folder, token = runtime_dir(Path(home).resolve()), self.fabric.address.token
        whose = hashlib.blake2s(token.encode()).hexdigest()[:12] if token else LOCAL
        fd = os.open(folder / f"{self.plan.volume}-{whose}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise InvalidRequest(
                f"{self.plan.name} is being trained by another `sublet train`",
                do="Wait for it, stop it, or give this one another --name.",
            ) from None
        try:
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _storage(self) -> Iterator[Lease]:
        """The volume, for as long as this runs; taken over from a command that was killed."""
        for view in self.fabric.leases(own=True):
            if view.labels == self._labels and view.name != self.plan.volume and view.status != ENDED:
                self._end(view)
        try:
            volume = self.fabric.volume(self.plan.volume)
        except NotFound:
            storage = self._block(self.plan.state)
        else:
            storage = self._block(None) if volume.lease is None else self.fabric.attach(volume.lease, renew="always")
        with storage:
            yield storage

    def _block(self, size: int | str | None) -> Lease:
        return self.fabric.block(
            size,
            name=self.plan.volume,
            ttl=STATE_TTL,
            renew="always",
            labels=self._labels,
            on_place=self.onlooker.waits,
        )

    def _end(self, view: LeaseView) -> None:
        """What still runs of an earlier command: it is told, saves, and is waited for."""
        self.onlooker.news(f"lease {view.id} of an earlier run of {self.plan.name} is still there; ending it first")
        with contextlib.suppress(NotFound):
            body = {"request_id": new_request_id()}
            self.fabric.request("POST", f"/v1/leases/{view.id}/release", body, shape=dict)
            until_s = time.monotonic() + PATIENCE_S
            while self.fabric.lease(view.id).status != ENDED and time.monotonic() < until_s:  # it saves until then
                time.sleep(0.1)


def per_device(spec: GuestSpec, plan: TrainingPlan) -> GuestSpec:
    """The same as one process for each device. A tenant's script has come with it, and is put down by what starts
    them."""
    args: dict[str, Any] = {"argv": list(plan.argv), "grace_s": STOP_S, "is_python": True}
    if spec.entry:
        script = json.loads(spec.args)
        args |= {"name": script["name"], "source": script["source"]}
    env = {name: value for name, value in spec.env.items() if name != VISIBLE}  # each has a card of its own
    return replace(spec, argv=(), entry=ENTRY, args=json.dumps(args), python=plan.argv[0], env=env)


class _Attendance:
    """A guest's life as it is heard: its output, its end, and that of its lease, each when it comes."""

    def __init__(self, run: TrainingRun, lease: Lease, guest: Guest) -> None:
        self.training, self.lease, self.guest = run, lease, guest
        self.sieve = Sieve()
        self._output: queue.Queue[Any] = queue.Queue(PIECES_MAX)
        self._noticed = False
        self._end: LeaseEnd | None = None
        self._deadline: threading.Timer | None = None
        """Of a program that was told to leave: it is ended then."""

    def run(self) -> Life:
        _ = start_thread("train_output", self._listen, failed=self._on_read_error)
        self._hold(self.lease)
        stopped: Stopped | None = None
        running = contextlib.ExitStack()
        running.enter_context(self.lease.activity("training"))
        with running:
            while True:
                try:
                    if not self._next_event():
                        break
                    if self._end is not None and self._end.parked:
                        self._resume(running)
                except (KeyboardInterrupt, Stopped) as stop:
                    if stopped is not None:
                        self.guest.stop(0)
                    else:
                        stopped = stop if isinstance(stop, Stopped) else Stopped()
                        self._ask_to_stop(stopped)
            life = self._outcome()
        if self._deadline is not None:
            self._deadline.cancel()
        if stopped is not None and life.code != 0:
            raise stopped
        return life

    def _next_event(self) -> bool:
        """One thing that happened; False when the program is gone."""
        try:
            piece = self._output.get(timeout=LOOK_S)
        except queue.Empty:
            self.training.onlooker.moved(self.training.progress, self.lease)
            return True
        if piece is None:
            rest = self.sieve.rest()
            if rest:
                self.training.onlooker.wrote("stderr", rest)
            return False
        if isinstance(piece, SubletError):
            raise piece
        if piece.stream in ("stdout", "stderr"):
            shown, records = self.sieve.feed(piece.data) if piece.stream == "stderr" else (piece.data, [])
            if shown:
                self.training.onlooker.wrote(piece.stream, shown)
            for one in records:
                self.training.progress.take(one)
            if records:
                self.training.onlooker.moved(self.training.progress, self.lease)
        return True

    def _listen(self) -> None:
        try:
            for piece in self.guest.output():
                self._output.put(piece)
        except SubletError as error:
            self._output.put(error)
        self._output.put(None)

    def _on_read_error(self, error: BaseException) -> None:
        self._output.put(Disconnected(f"the program's output could not be read ({type(error).__name__}: {error})"))
        self._output.put(None)

    def _hold(self, lease: Lease) -> None:
        self.lease, self._end = lease, None
        lease.on_end(self._ended)

    def _ended(self, end: LeaseEnd) -> None:
        self._end = end

    def _resume(self, running: contextlib.ExitStack) -> None:
        """It was parked in the middle of a step: it gets another device, and goes on in the middle of it."""
        training = self.training
        training.preemptions += 1
        training.onlooker.news(f"lease {self.lease.id} was taken, and what ran under it is parked. Asking for another")
        requested_s = time.monotonic()
        try:
            lease = training.fabric.gpu(resume=self.lease, **training.terms)
        except SubletError:
            if self._is_parked():
                raise
            self._end = None  # it saved and left, or was ended, and that is heard
            return
        training.waited_seconds += time.monotonic() - requested_s
        running.callback(lease.release)
        running.enter_context(lease.activity("training"))
        self._hold(lease)

    def _is_parked(self) -> bool:
        end = self._end or self.lease.end
        try:
            return end is not None and self.training.fabric.lease(end.parked.partition("@")[0]).end is None
        except NotFound:
            return False

    def _ask_to_stop(self, why: Stopped) -> None:
        """It saves and leaves; if it takes too long, or is no trainer, it is ended."""
        self.training.onlooker.news(f"{why}: the program may finish its step and save; once more ends it at once")
        with contextlib.suppress(SubletError):
            self.guest.send_signal(signal.SIGTERM)
        self._deadline = start_timer("train_stop", STOP_S, self._stop_now)

    def _stop_now(self) -> None:
        with contextlib.suppress(SubletError):
            self.guest.stop(0)

    def _outcome(self) -> Life:
        code = self.guest.wait(PATIENCE_S)
        lease, progress = self.lease, self.training.progress
        notice, reason = lease.notice, self.guest.reason
        if code == 0:
            return Life(code, "")
        end = lease.end or self._end
        if reason in NOT_THE_LEASE and (end is None or end.reason in NOT_THE_LEASE):
            return Life(code, "")
        if end is not None and end.reason not in NOT_THE_LEASE:
            return Life(code, end.reason.value)
        if notice is not None:
            return Life(code, notice.reason.value)
        if reason is not None:
            return Life(code, reason.value)
        return Life(code, progress.left if code in (LEASE_ENDED, TERMINATED) else "")
