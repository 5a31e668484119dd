"""The story of the demo: a notebook, two tenants, one device, a preemption, an offer, a crash, a bill."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from sublet.cli import bill
from sublet.cli.demo import notebook_scene, training_scene
from sublet.cli.demo.child import DemoOffice
from sublet.cli.demo.commands import Commands
from sublet.cli.demo.stage import BUSY, ClaimFailed, Stage
from sublet.cli.lease import listing
from sublet.cli.show import Json, plural, seconds
from sublet.client.fabric import Fabric, connect
from sublet.client.home import socket_path
from sublet.client.lease import Lease
from sublet.client.model import Notice, Offer, Place
from sublet.client.office import answers
from sublet.errors import LeaseEnded, NotFound
from sublet.lease.value import LeaseEnd
from sublet.values import EndReason, format_size

__all__ = ["tell"]

T = TypeVar("T")

ACTS: Final = 9
"""Those that need nothing but the core."""
PATIENCE_S: Final = 30.0
"""For anything that should take a moment. On a busy machine a moment is longer."""
CLOCK_SLACK_S: Final = 1.5
"""Between our own stopwatch and the office's books lie two processes that each had to be woken."""


def tell(out: str) -> None:
    """Play it. Raises if anything that is said does not hold. ``out``: where the notebook is left to look at."""
    started = time.monotonic()
    # The client would say on stderr what the story tells anyway.
    logging.getLogger("sublet.client").addHandler(logging.NullHandler())
    with_notebook, with_training = notebook_scene.can_play(), training_scene.can_play()
    stage = Stage(acts=ACTS + with_notebook + with_training)
    stage.open("Sublet lends scarce hardware for minutes at a time. This is a rehearsal in a temporary folder.")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sublet-demo-")))
        if with_notebook:
            notebook_scene.play(stage, folder, out)
        else:
            stage.tell('(The notebook is left out: it needs pip install "sublet[notebook]".)')
        if with_training:
            training_scene.play(stage, folder)
        office = stack.enter_context(DemoOffice(folder, "1x4GiB"))
        commands = Commands(stage, office, folder, stack)
        story = _Story(stage, office, stack, commands)
        story.an_office_opens()
        commands.one_that_will_not_leave()
        commands.one_that_is_killed()
        story.two_tenants()
        story.ben_takes_what_is_left()
        story.ana_goes_first()
        story.an_offer()
        story.a_crash()
        story.the_bill()
    took = time.monotonic() - started
    stage.close(f"All of it held: {plural(stage.claims, 'claim')} checked in {took:.0f} s, and all else is cleaned up.")


class _Story:
    """What the acts share."""

    def __init__(self, stage: Stage, office: DemoOffice, stack: contextlib.ExitStack, commands: Commands) -> None:
        self._commands = commands
        self._stage = stage
        self._office = office
        self._stack = stack
        self._opened = time.monotonic()
        self._ana: Fabric
        self._ben: Fabric
        self._bens: Lease
        self._anas: list[Lease] = []
        self._bens_next: Future[Lease]

    def an_office_opens(self) -> None:
        stage = self._stage
        stage.act("An office opens")
        stage.tell(
            "It has one host device of 4GiB: a stand-in for a card, so no GPU is needed here, "
            "and the rules are the same."
        )
        status: Json = self._office.operator.get("/v1/status")
        gpus = [device for device in status["devices"] if device["kind"] == "gpu"]
        stage.claim(
            len(gpus) == 1 and gpus[0]["host"] and gpus[0]["free"] == 4 << 30,
            f"The office answers (pid {status['pid']}), and {gpus[0]['id']} is free: host device, no GPU.",
        )

    def two_tenants(self) -> None:
        stage = self._stage
        stage.act("Two tenants")
        stage.tell(
            "Ana works in a notebook (tier interactive). Ben has a job that runs whenever nobody else needs the device "
            "(tier spot). Each has a token of their own."
        )
        self._ana = self._connect(self._add_tenant("ana"))
        self._ben = self._connect(self._add_tenant("ben"))
        known = {tenant["id"] for tenant in self._office.operator.get("/v1/tenants")}
        stage.claim({"ana", "ben"} <= known, "The office knows both, and has kept only the hashes of their tokens.")

    def ben_takes_what_is_left(self) -> None:
        stage = self._stage
        stage.act("Ben takes the device")
        self._bens = lease = self._ben.gpu(min_vram="4GiB", ttl="1m", spot=True, wait=0, name="nightly-job")
        self._stack.enter_context(lease.activity("the job"))
        stage.claim(
            lease.devices[0].host and lease.remaining > 50,
            f"Lease {lease.id} is his for {seconds(lease.ttl)} at a time, with epoch {lease.epoch}: the number that "
            "everything he does there must carry.",
        )
        try:
            self._ana.lease(lease.id)
        except NotFound as error:
            stage.claim(True, f"Asked with Ana's token, it does not exist: “{error.message}”.")
        else:
            stage.claim(False, "Ben's lease is hidden from Ana")

    def ana_goes_first(self) -> None:
        stage, bens = self._stage, self._bens
        stage.act("Ana needs it, and waits her turn")
        places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        ends: queue.SimpleQueue[LeaseEnd] = queue.SimpleQueue()
        bens.on_notice(notices.put)
        bens.on_end(ends.put)
        asked = _in_background(
            lambda: self._ana.gpu(
                min_vram="3GiB", exclusivity="shared", ttl="2m", wait="1m", name="notebook", on_place=places.put
            )
        )
        place = _told(places, "Ana hears of her place in the queue")
        stage.claim(
            place.position == 1 and bool(place.reason) and place.estimate is not None,
            f"Ana is in the queue at place {place.position}: {place.reason}; about {seconds(place.estimate)}.",
        )
        notice = _told(notices, "Ben gets notice")
        noticed = time.monotonic()
        stage.claim(
            notice.reason is EndReason.PREEMPTED and notice.in_seconds > 3,
            f"Ben is told: {notice.reason} in {seconds(round(notice.in_seconds, 1))}. Time to save his work.",
        )
        stage.count_down(
            "Ben saves and leaves", lambda: not ends.empty(), within_s=PATIENCE_S, estimate_s=notice.in_seconds
        )
        end = _told(ends, "Ben hears of the end")
        kept = time.monotonic() - noticed
        stage.claim(
            end.reason is EndReason.PREEMPTED, f"Ben's lease has ended, and says why: {end.reason} ({end.detail})."
        )
        stage.claim(
            kept >= notice.in_seconds - 1,
            f"The promise was not cut short: he was told {notice.in_seconds:.1f} s, and had {kept:.1f} s.",
        )
        lease = self._keep(_granted(asked, "Ana gets the device"))
        gone: Json = self._office.operator.get(f"/v1/leases/{bens.id}")["lease"]
        stage.claim(
            gone["status"] == "ended",
            "The agent reported the device clean before anybody else got it.",
            but=gone["status"],
        )
        stage.claim(
            lease.epoch > bens.epoch,
            f"Ana has the device: lease {lease.id}, epoch {lease.epoch}. "
            f"Ben's old epoch {bens.epoch} can never write again.",
        )
        try:
            bens.renew()
        except LeaseEnded as error:
            stage.claim(True, f"Ben's late renewal is refused, with the reason: “{error.message}”.")
        else:
            stage.claim(False, "A lease that ended does not come back")

    def an_offer(self) -> None:
        stage = self._stage
        stage.act("An offer is made, and taken")
        stage.tell("Ana's second notebook asks for 2GiB on the same device. Next to her first there is only 1GiB left.")
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
        stage.claim(
            len(offers) == 1 and offers[0].offered == 1 << 30,
            f"The office offers {offers[0]}; she has 30 s to say yes.",
        )
        stage.claim(
            lease.devices[0].amount == 1 << 30,
            f"Taken: lease {lease.id} has {format_size(lease.devices[0].amount)} of {lease.devices[0].id}.",
        )

    def a_crash(self) -> None:
        stage, office = self._stage, self._office
        stage.act("The office is killed")
        places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self._bens_next = _in_background(
            lambda: self._ben.gpu(
                min_vram="4GiB", ttl="1m", spot=True, wait="5m", name="nightly-job", on_place=places.put
            )
        )
        place = _told(places, "Ben hears of his place in the queue")
        stage.claim(place.position == 1, f"Ben asks again and waits: {place}.")
        self._commands.one_that_goes_on()
        before, leases, pid = self._books()
        stage.exhibit(listing(leases))
        office.kill()
        stage.claim(
            not answers(socket_path(office.home)),
            f"SIGKILL to pid {pid}: nobody answers any more, and nothing could be tidied up.",
        )
        stage.claim(
            all(lease.remaining > 60 for lease in self._anas),
            "Ana's leases go on: until their deadlines they need no office.",
        )
        started = time.monotonic()
        office.start()
        after, _, new_pid = self._books()
        took = time.monotonic() - started
        stage.claim(
            after == before and new_pid != pid,
            f"{took:.1f} s later it is back (pid {new_pid}) with the same leases: same ids, same epochs, same "
            "deadlines to the microsecond, and Ben has his place in the queue.",
            but=f"{before} before and {after} after",
        )
        self._commands.it_went_on()
        for lease in self._anas:
            lease.renew()
        stage.claim(all(lease.remaining > 100 for lease in self._anas), "Ana renews, as if nothing had happened.")

    def the_bill(self) -> None:
        stage, operator = self._stage, self._office.operator
        stage.act("The bill")
        for lease in self._anas:
            lease.release()
        last = _granted(self._bens_next, "Ben gets the device back")
        with last.activity("the job"):
            stage.claim(
                last.epoch > max(lease.epoch for lease in self._anas),
                f"Ana gives both leases back, and Ben's job has the device again: {last.id}, epoch {last.epoch}.",
            )
            time.sleep(1)
        last.release()
        wall = time.monotonic() - self._opened
        by_lease: list[Json] = operator.get("/v1/bill", by="lease")
        by_tenant: list[Json] = operator.get("/v1/bill", by="tenant")
        stage.exhibit(bill.for_people("lease", by_lease))
        shares = {self._bens.id: 1.0, self._anas[0].id: 0.75, self._anas[1].id: 0.25, last.id: 1.0}
        shares |= self._commands.shares
        stage.claim(
            {line["key"] for line in by_lease} == set(shares)
            and all(_close(line["gpu_seconds"], line["held_seconds"] * shares[line["key"]]) for line in by_lease),
            "Every lease is on it, once: device time is what was held, times the share of the device.",
            but=by_lease,
        )
        total = {column: sum(line[column] for line in by_lease) for column in ("held_seconds", "gpu_seconds", "cost")}
        stage.claim(
            all(_close(sum(line[column] for line in by_tenant), total[column]) for column in total),
            f"The sum over tenants is the sum over leases: {total['gpu_seconds']:.2f} device-seconds either way.",
            but=by_tenant,
        )
        stage.claim(
            0 < total["gpu_seconds"] <= wall + CLOCK_SLACK_S,
            f"No second was sold twice: one device, {wall:.1f} s by our own stopwatch, and less than that on the bill.",
        )
        report: Json = operator.get("/v1/audit/verify")
        stage.claim(
            report["ok"],
            f"The audit chain holds: {plural(report['records'], 'record')}, each with the hash of the one before.",
            but=report["problem"],
        )

    # ---- what the acts use ----

    def _add_tenant(self, name: str) -> str:
        token: str = self._office.operator.post("/v1/tenants", {"id": name})["token"]
        return token

    def _connect(self, token: str) -> Fabric:
        return self._stack.enter_context(connect(self._office.url, token=token))

    def _keep(self, lease: Lease) -> Lease:
        """Ana computes under it, so it is never idle: an idle holder would yield to anybody, even to Ben."""
        self._stack.enter_context(lease.activity("a cell"))
        self._anas.append(lease)
        return lease

    def _books(self) -> tuple[Json, list[Json], int]:
        """What must not change over a restart, the leases as they are shown, and who says so."""
        leases: list[Json] = self._office.operator.get("/v1/leases")
        facts = {lease["id"]: (lease["status"], lease["epoch"], lease["deadline"]) for lease in leases}
        pid: int = self._office.operator.get("/v1/hello")["pid"]
        return facts, leases, pid


def _in_background(acquire: Callable[[], Lease]) -> Future[Lease]:
    """Somebody waits in the queue while the story goes on. If the story ends first, nobody waits for him."""
    asked: Future[Lease] = Future()

    def run() -> None:
        try:
            asked.set_result(acquire())
        except BaseException as error:  # noqa: BLE001 - it is raised where the lease was expected
            asked.set_exception(error)

    threading.Thread(target=run, name="sublet-demo-waits", daemon=True).start()
    return asked


def _told(source: queue.SimpleQueue[T], what: str) -> T:
    try:
        return source.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise ClaimFailed(f"nothing came of “{what}” within {PATIENCE_S:.0f} s", do=BUSY) from None


def _granted(asked: Future[Lease], what: str) -> Lease:
    try:
        return asked.result(timeout=PATIENCE_S)
    except TimeoutError:
        raise ClaimFailed(f"nothing came of “{what}” within {PATIENCE_S:.0f} s", do=BUSY) from None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-3)
