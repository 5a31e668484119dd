"""Runs the demo's steps in order, and those in which two users share one device."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from sublet.background import start_thread
from sublet.cli import bill
from sublet.cli.demo import notebook_step, training_step
from sublet.cli.demo.commands import Commands
from sublet.cli.demo.office import DemoOffice
from sublet.cli.demo.report import BUSY, CheckFailed, Report
from sublet.cli.lease import listing
from sublet.cli.show import Json, plural, seconds
from sublet.client.fabric import Fabric, connect
from sublet.client.home import socket_path
from sublet.client.lease import Lease
from sublet.client.model import Notice, Offer, Place
from sublet.client.office import answers
from sublet.errors import LeaseEnded, NotFound
from sublet.invocation import installing
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import format_size

T = TypeVar("T")

STEPS: Final = 4
"""Those that need nothing but the core."""
PATIENCE_S: Final = 30.0
"""For anything that should take a moment. On a busy machine a moment is longer."""
CLOCK_SLACK_S: Final = 1.5
"""Between our stopwatch and the office's account stand two processes that had to be scheduled."""
ABOUT: Final = (
    "Sublet lends a GPU for minutes at a time: a program asks for a lease, and when the lease ends, the device is "
    "taken back. This demo runs in a temporary folder and needs no GPU: a “host device” stands in, which is this "
    "machine's CPU with a memory limit."
)


def play(out: str, *, verbose: bool) -> None:
    """Run all steps. Raises if a check fails. ``out``: the folder in which the notebook is left to look at."""
    started = time.monotonic()
    # The client would log on stderr what the steps print anyway.
    logging.getLogger("sublet.client").addHandler(logging.NullHandler())
    with_notebook, with_training = notebook_step.can_play(), training_step.can_play()
    place = notebook_step.place_for(out) if with_notebook else None
    left: list[tuple[str, str]] = []
    with Report(STEPS + with_notebook + with_training, verbose=verbose) as report:
        report.open(ABOUT)
        if place is None:
            report.open(f"(The step with a notebook is left out. It needs `{installing('sublet[notebook]')}`.)")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sublet-demo-")))
            if place is not None:
                left = notebook_step.play(report, folder, place)
            if with_training:
                training_step.play(report, folder)
            report.progress("starting the next office")
            office = stack.enter_context(DemoOffice(folder, "1x4GiB"))
            commands = Commands(report, office, folder, stack)
            sharing = _Sharing(report, office, stack, commands)
            commands.a_time_limit_that_holds()
            sharing.two_users_one_device()
            sharing.the_office_is_killed()
            sharing.the_bill()
            report.progress("cleaning up")
        report.close(time.monotonic() - started, left)


class _Sharing:
    """What these steps share: one office, Ana and Ben, their leases."""

    def __init__(self, report: Report, office: DemoOffice, stack: contextlib.ExitStack, commands: Commands) -> None:
        self._commands = commands
        self._report = report
        self._office = office
        self._stack = stack
        self._opened = time.monotonic()
        self._ana: Fabric
        self._ben: Fabric
        self._bens: Lease
        self._anas: list[Lease] = []
        self._bens_next: Future[Lease]

    def two_users_one_device(self) -> None:
        report = self._report
        report.step(
            "Two users, one device", "Ben has the device with low priority (Slurm: preemptible). Then Ana asks for it."
        )
        self._ana = self._connect(self._add_tenant("ana"))
        self._ben = self._connect(self._add_tenant("ben"))
        known = {tenant["id"] for tenant in self._office.operator.get("/v1/tenants")}
        report.check({"ana", "ben"} <= known, "Each has a token; the office keeps only its hash.")
        self._ben_takes_the_device()
        place, notice = self._ana_preempts_ben()
        report.result(
            f"Ana waited at place {place.position} of the queue; Ben got notice, and {notice.in_seconds:.0f} s to save "
            "his work."
        )
        self._ben_is_too_late()
        report.result("Ben's lease ended: preempted. After that Ana got the device; his late renewal was refused.")
        self._ana_is_offered_less()
        report.result("Ana asked for 2GiB more where 1GiB was left; she was offered that, and took it.")

    def _ben_takes_the_device(self) -> None:
        report = self._report
        self._bens = lease = self._ben.gpu(min_vram="4GiB", ttl="1m", spot=True, wait=0, name="nightly-job")
        self._stack.enter_context(lease.activity("the job"))
        report.check(
            lease.devices[0].host and lease.remaining > 30,
            f"Ben holds lease {lease.id} for {seconds(lease.ttl)}, with the fencing number (epoch) {lease.epoch}.",
        )
        try:
            self._ana.lease(lease.id)
        except NotFound as error:
            report.check(True, f"With Ana's token it is not visible: “{error.message}”.")
        else:
            report.check(False, "Ben's lease is hidden from Ana")

    def _ana_preempts_ben(self) -> tuple[Place, Notice]:
        report, bens = self._report, self._bens
        places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        ends: queue.SimpleQueue[LeaseEnd] = queue.SimpleQueue()
        bens.on_notice(notices.put)
        bens.on_end(ends.put)
        requested_s = time.monotonic()
        request = _in_background(
            lambda: self._ana.gpu(
                min_vram="3GiB", exclusivity="shared", ttl="2m", wait="1m", name="notebook", on_place=places.put
            )
        )
        place = _received(places, "Ana's place in the queue")
        report.check(
            place.position == 1 and bool(place.reason) and place.estimate is not None,
            f"Ana waits at place {place.position}: {place.reason}; about {seconds(place.estimate)}.",
        )
        notice = _received(notices, "Ben's notice")
        noticed = time.monotonic()
        report.check(
            notice.reason is EndReason.PREEMPTED and notice.in_seconds > 3,
            f"Ben gets notice: {notice.reason} in {seconds(round(notice.in_seconds, 1))}.",
        )
        report.wait("Ben saves his work", lambda: not ends.empty(), within_s=PATIENCE_S, estimate_s=notice.in_seconds)
        end = _received(ends, "the end of Ben's lease")
        kept = time.monotonic() - noticed
        report.check(
            end.reason is EndReason.PREEMPTED, f"Ben's lease ended with its reason: {end.reason} ({end.detail})."
        )
        report.check(
            time.monotonic() - requested_s >= notice.in_seconds - 1,  # a busy machine may tell Ben of it late
            f"The notice was kept: {notice.in_seconds:.1f} s were announced, and Ben had {kept:.1f} s.",
        )
        self._keep(_granted(request, "Ana's lease"))
        return place, notice

    def _ben_is_too_late(self) -> None:
        report, bens, anas = self._report, self._bens, self._anas[0]
        gone: Json = self._office.operator.get(f"/v1/leases/{bens.id}")["lease"]
        report.check(
            gone["status"] == "ended", "The device was checked to be clean before Ana got it.", but=gone["status"]
        )
        report.check(
            anas.epoch > bens.epoch,
            f"Ana holds lease {anas.id} with epoch {anas.epoch}; a write with Ben's epoch {bens.epoch} is rejected.",
        )
        try:
            bens.renew()
        except LeaseEnded as error:
            report.check(True, f"Ben's late renewal is refused: “{error.message}”.")
        else:
            report.check(False, "A lease that ended does not come back")

    def _ana_is_offered_less(self) -> None:
        report = self._report
        offers: list[Offer] = []

        def take(offer: Offer) -> bool:
            offers.append(offer)
            return True

        lease = self._keep(
            self._ana.gpu(
                min_vram="2GiB",
                or_smaller=True,
                exclusivity="shared",
                ttl="2m",
                wait=0,
                name="second-notebook",
                on_offer=take,
            )
        )
        report.check(len(offers) == 1 and offers[0].offered == 1 << 30, f"The office offers {offers[0]}, for 30 s.")
        report.check(
            lease.devices[0].amount == 1 << 30,
            f"Lease {lease.id} has {format_size(lease.devices[0].amount)} of {lease.devices[0].id}.",
        )

    def the_office_is_killed(self) -> None:
        """SIGKILL, and a new start from the journal."""
        report, office = self._report, self._office
        report.step(
            "The server in the background, the office, is killed",
            "It decides who has what. It gets SIGKILL while Ana has two leases and a command runs.",
        )
        places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self._bens_next = _in_background(
            lambda: self._ben.gpu(
                min_vram="4GiB", ttl="1m", spot=True, wait="5m", name="nightly-job", on_place=places.put
            )
        )
        place = _received(places, "Ben's place in the queue")
        report.check(place.position == 1, f"Ben waits again: {place}.")
        self._commands.one_that_goes_on()
        before, leases, pid = self._state()
        report.detail(listing(leases))
        office.kill()
        report.check(not answers(socket_path(office.home)), f"After SIGKILL to pid {pid} nothing answers.")
        report.check(
            all(lease.remaining > 60 for lease in self._anas),
            "Ana's leases go on: until their deadlines they need no office.",
        )
        started = time.monotonic()
        office.start()
        after, _, new_pid = self._state()
        took = time.monotonic() - started
        report.check(
            after == before and new_pid != pid,
            f"{took:.1f} s later it is back (pid {new_pid}) with the same leases, epochs and queue, and the same "
            "deadlines to the microsecond.",
            but=f"{before} before and {after} after",
        )
        report.result(f"Restarted, it had the same leases, deadlines and queue after {took:.1f} s; no lease ended.")
        lines = self._commands.lines_after_restart()
        report.result(f"The command ran on meanwhile; its output ({plural(lines, 'line')}) is complete.")
        for lease in self._anas:
            lease.renew()
        report.check(all(lease.remaining > 100 for lease in self._anas), "Ana renews both leases.")

    def the_bill(self) -> None:
        """What each user held and used, from the events that decided the leases."""
        report, operator = self._report, self._office.operator
        report.step("The bill", "It is computed from the recorded events. An hour of the whole device is one credit.")
        for lease in self._anas:
            lease.release()
        last = _granted(self._bens_next, "Ben's next lease")
        with last.activity("the job"):
            report.check(
                last.epoch > max(lease.epoch for lease in self._anas),
                f"Ana gives both leases back, and Ben's job has the device again: {last.id}, epoch {last.epoch}.",
            )
            time.sleep(1)
        last.release()
        wall = time.monotonic() - self._opened
        by_lease: list[Json] = operator.get("/v1/bill", by="lease")
        by_tenant: list[Json] = operator.get("/v1/bill", by="tenant")
        report.detail(bill.for_people("lease", by_lease))
        shares = {self._bens.id: 1.0, self._anas[0].id: 0.75, self._anas[1].id: 0.25, last.id: 1.0}
        shares |= self._commands.shares
        report.check(
            {line["key"] for line in by_lease} == set(shares)
            and all(_close(line["gpu_seconds"], line["held_seconds"] * shares[line["key"]]) for line in by_lease),
            "Every lease is billed once: the time it was held, times its share of the device.",
            but=by_lease,
        )
        total = {column: sum(line[column] for line in by_lease) for column in ("held_seconds", "gpu_seconds", "cost")}
        report.check(
            all(_close(sum(line[column] for line in by_tenant), total[column]) for column in total),
            f"The sum over users is the sum over leases: {total['gpu_seconds']:.2f} s of the device.",
            but=by_tenant,
        )
        report.check(
            0 < total["gpu_seconds"] <= wall + CLOCK_SLACK_S,
            f"No second of the device was billed twice: {wall:.1f} s have passed by our own clock.",
        )
        audit: Json = operator.get("/v1/audit/verify")
        report.check(
            audit["ok"],
            f"The audit log is whole: {plural(audit['records'], 'record')}, each with the hash of the one before.",
            but=audit["problem"],
        )
        report.detail(bill.for_people("tenant", by_tenant))
        used = {line["key"]: seconds(round(line["gpu_seconds"], 1)) for line in by_tenant}
        report.result(f"Device time: Ana {used['ana']}, Ben {used['ben']}, the commands above {used['local']}.")
        report.result(f"In all {total['cost']:.4f} credits, summed by user as by lease. The audit log is complete.")

    # ---- what the steps use ----

    def _add_tenant(self, name: str) -> str:
        token: str = self._office.operator.post("/v1/tenants", {"id": name})["token"]
        return token

    def _connect(self, token: str) -> Fabric:
        return self._stack.enter_context(connect(self._office.url, token=token, as_tenant=True))

    def _keep(self, lease: Lease) -> Lease:
        """Ana computes under it: an idle lease would yield to any request, Ben's too."""
        self._stack.enter_context(lease.activity("a cell"))
        self._anas.append(lease)
        return lease

    def _state(self) -> tuple[Json, list[Json], int]:
        """What must not change over a restart, the leases as they are listed, and the pid of the office."""
        leases: list[Json] = self._office.operator.get("/v1/leases")
        facts = {lease["id"]: (lease["status"], lease["epoch"], lease["deadline"]) for lease in leases}
        pid: int = self._office.operator.get("/v1/status")["pid"]
        return facts, leases, pid


def _in_background(acquire: Callable[[], Lease]) -> Future[Lease]:
    """A request that waits in the queue while the steps go on; a demo that ends first does not wait for it."""
    request: Future[Lease] = Future()

    def run() -> None:
        try:
            request.set_result(acquire())
        except BaseException as error:  # noqa: BLE001 - it is raised where the lease was expected
            request.set_exception(error)

    _ = start_thread("demo_request", run)
    return request


def _received(source: queue.SimpleQueue[T], what: str) -> T:
    try:
        return source.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise CheckFailed(f"{what} did not come within {PATIENCE_S:.0f} s", do=BUSY) from None


def _granted(request: Future[Lease], what: str) -> Lease:
    try:
        return request.result(timeout=PATIENCE_S)
    except TimeoutError:
        raise CheckFailed(f"{what} did not come within {PATIENCE_S:.0f} s", do=BUSY) from None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-3)
