"""Whose turn it is in a volume: compared with the fence when asked and when begun, and one after the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from sublet.errors import LeaseNotActive, StaleEpoch, SubletError, Unauthorized
from sublet.lease_end import EndReason
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.storage import publish_queue
from sublet.node.storage.publish_queue import (
    SAVE_MAX_NS,
    TICKETS_MAX,
    WAITING_MAX,
    AnyReply,
    Asker,
    Handed,
    LentVolume,
    Publishing,
)
from sublet.node.storage.store import StoredFolder, StoreState
from sublet.node.storage.stores_work import Made, StoreNote
from sublet.values import MIB, Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.manifest import manifest_name
from sublet.wire.orders import Notify, Part
from sublet.wire.refusals import Refusal
from sublet.wire.volumes import (
    Collect,
    Collected,
    CopiedIn,
    CopyIn,
    FilesOpened,
    ListVolume,
    OpenFiles,
    OpenVolume,
    Publish,
    Published,
    VolumeCall,
    VolumeOpened,
    VolumeReply,
)
from tests.left_open import nothing_left_open

A, C = LeaseId("l-a"), LeaseId("l-c")
E5, E6 = Epoch(1, 5), Epoch(1, 6)
ANNA, BOB = TenantId("anna"), TenantId("bob")
PART = Part(resource=ResourceId("n/block"), kind=Kind.BLOCK, amount=8 * MIB)
PUBLISH = Publish(lease=A, epoch=E5, staging="s", manifest="m", save_ns=7)


@dataclass
class Work:
    """Stands for loop, forked jobs, stores and clock: what was begun waits until the test says that it is done."""

    begun: list[Callable[[str | None], None]] = field(default_factory=list)
    works: list[Callable[[], str]] = field(default_factory=list)
    """What a copy of the supervisor would do."""
    kept: list[int] = field(default_factory=list)
    """What it would have besides: -1 where it has nothing."""
    fails: bool = False
    shares: list[tuple[str, int]] = field(default_factory=list)
    """For which tenant each was begun, and until when it is due."""
    stopped: list[object] = field(default_factory=list)
    timers: list[Callable[[], None]] = field(default_factory=list)
    rests: int = 0
    lock: str = "/nowhere/lock"

    def guarded(self, _: object) -> Work:
        return self

    def now_ns(self) -> int:
        return 100

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append(call)

    def run(
        self, work: Callable[[], str], done: Callable[[str | None], None], *, tenant: str, by_ns: int, keep: int
    ) -> object:
        if self.fails:
            raise RuntimeError("a mistake")
        self.begun.append(done)
        self.works.append(work)
        self.kept.append(keep)
        self.shares.append((tenant, by_ns))
        return done

    def stop(self, key: object) -> None:
        self.stopped.append(key)

    def open(self, tenancy: LeaseRuntime, ids: object, then: object) -> bool:
        return False

    def on_idle(self, store: StoredFolder) -> None:
        self.rests += 1


class Bench:
    def __init__(self) -> None:
        self.work = Work()
        self.live = {A: E5}
        self.tenancy = LeaseRuntime(lease=A, tenant=ANNA, epoch=E5, parts=(PART,), deadline_ns=1 << 60, office="o")
        self.store = StoredFolder(
            "/volume", StoreNote(lease=A, epoch=E5, tenant=ANNA, parts=(PART,), name="ckpt"), StoreState.THERE
        )
        self.store.made = Made(paths=("/volume/0",))
        self.tenancy.stores = [self.store]
        self.saved: list[tuple[LeaseId, int]] = []
        work = cast("Any", self.work)
        self.publishing = Publishing(
            loop=work,
            forked_jobs=work,
            stores=work,
            tenancies={A: self.tenancy},
            fence=self.check,
            on_saved=lambda lease, took: self.saved.append((lease, took)),
        )
        self.told: list[AnyReply | Handed] = []

    def check(self, lease: LeaseId, epoch: Epoch) -> None:
        if self.live.get(lease) is None:
            raise LeaseNotActive(f"lease {lease} is over")
        if self.live[lease] != epoch:
            raise StaleEpoch(f"{epoch} is not live")

    def ask(self, call: VolumeCall, asker: Asker | None = None) -> None:
        self.publishing.ask(asker or Asker(leases={A: None}), call, self.told.append)

    def done(self, answer: VolumeReply | None = None) -> None:
        said = None if answer is None else dumps(answer).decode()
        self.work.begun.pop(0)(said)

    @property
    def kinds(self) -> list[str]:
        return [one.kind if isinstance(one, Refusal) else type(one).__name__ for one in self.told]


@pytest.fixture
def bench() -> Bench:
    return Bench()


DONE = Published(number=1, wall_ns=5, size=10)


def test_one_after_the_other(bench: Bench) -> None:
    for _ in range(3):
        bench.ask(PUBLISH)
    for n in range(3):
        assert len(bench.work.begun) == 1
        assert bench.store.at_work
        bench.done(DONE)
        assert len(bench.told) == n + 1
    assert not bench.store.at_work
    assert bench.kinds == ["Published"] * 3


def test_a_save_is_due_when_the_first_of_its_leases_ends_or_is_taken(bench: Bench) -> None:
    """That of the volume, or that of the guest which saves."""
    gpu = LeaseRuntime(lease=C, tenant=ANNA, epoch=E6, parts=(), deadline_ns=1 << 50, office="o")
    bench.publishing._tenancies = {A: bench.tenancy, C: gpu}
    for notice in (None, Notify(lease=C, epoch=E6, number=1, reason=EndReason.PREEMPTED, take_at_ns=1 << 40)):
        gpu.notice = notice
        bench.ask(PUBLISH, Asker(leases={A: None}, under=C))
        bench.done(DONE)
    bench.ask(PUBLISH)
    assert bench.work.shares == [("anna", 1 << 50), ("anna", 1 << 40), ("anna", 1 << 60)]


def test_what_waits_past_the_end_of_its_lease_is_refused(bench: Bench) -> None:
    """Compared again when it is its turn: what comes before it may take long."""
    bench.ask(PUBLISH)
    bench.ask(PUBLISH)
    bench.live[A] = E6
    bench.done(DONE)
    assert bench.kinds == ["Published", "StaleEpoch"]
    assert bench.work.begun == []


def test_who_comes_under_a_newer_epoch_waits_for_what_an_older_one_began(bench: Bench) -> None:
    """So no checkpoint appears behind the back of somebody who has looked."""
    bench.ask(PUBLISH)
    bench.live[A] = bench.tenancy.epoch = E6
    bench.ask(OpenVolume(lease=A, epoch=E6))
    assert bench.told == []
    bench.done(DONE)
    assert bench.kinds == ["Published"]
    assert len(bench.work.begun) == 1


@pytest.mark.parametrize("call", [PUBLISH, OpenVolume(lease=A, epoch=E5), Collect(lease=A, epoch=E5, keep=1)])
def test_the_fence_is_asked_first(call: VolumeCall, bench: Bench) -> None:
    bench.live[A] = E6
    bench.ask(call)
    bench.live.clear()
    bench.ask(call)
    assert bench.kinds == ["StaleEpoch", "LeaseNotActive"]
    assert bench.work.begun == []


def test_what_was_lent_under_an_older_epoch_is_not_lent_under_the_next(bench: Bench) -> None:
    """Even if whoever it was lent to has found out which epoch lives."""
    bench.live[A] = bench.tenancy.epoch = E6
    asker = Asker(leases={A: E5, C: None})
    bench.ask(OpenVolume(), asker)
    bench.ask(OpenVolume(lease=A, epoch=E6), asker)
    assert bench.kinds == ["StaleEpoch", "StaleEpoch"]


def test_nobody_asks_for_a_lease_that_is_not_his(bench: Bench) -> None:
    bench.ask(PUBLISH, Asker(leases={C: None}))
    bench.ask(OpenVolume(), Asker(leases={C: None}))
    bench.ask(OpenVolume(lease=C, epoch=E5), Asker(leases={C: None}))
    assert bench.kinds == ["Unauthorized", "NotFound", "LeaseNotActive"]


def test_when_its_lease_is_over_what_waits_is_refused_and_what_is_under_way_has_a_moment(bench: Bench) -> None:
    bench.ask(PUBLISH)
    bench.ask(PUBLISH)
    key = bench.work.begun[0]
    bench.store.state = StoreState.LEAVING
    bench.publishing.lease_ended(bench.store)
    assert bench.kinds == ["LeaseNotActive"]
    assert bench.work.stopped == []
    for call in bench.work.timers:
        call()
    assert bench.work.stopped == [key]
    bench.done(None)
    assert bench.kinds[-1] == "Disconnected", "nobody knows whether it was done"
    assert bench.work.rests == 1, "now it is put away"
    bench.ask(PUBLISH)
    assert bench.kinds[-1] == "LeaseNotActive"


def test_too_many_wait_for_nothing(bench: Bench) -> None:
    for _ in range(WAITING_MAX + 2):
        bench.ask(PUBLISH)
    assert bench.kinds == ["CapacityExceeded"]


def test_a_forked_job_that_dies_is_told_as_what_it_is(bench: Bench) -> None:
    bench.ask(Collect(lease=A, epoch=E5, keep=1))
    bench.done(None)
    bench.ask(Collect(lease=A, epoch=E5, keep=1))
    bench.done(Collected(checkpoints=(1,), packs=1, freed_bytes=5))
    assert bench.kinds == ["CheckpointFailed", "Collected"]


def test_what_was_saved_is_told_of_the_volume_and_of_who_saved(bench: Bench) -> None:
    asker = Asker(leases={A: E5, C: None}, under=C)
    for number in (1, 2):
        bench.ask(PUBLISH, asker)
        bench.done(Published(number=number, wall_ns=number, size=10))
    bench.ask(PUBLISH)
    bench.done(Published(number=3, wall_ns=3, size=1))
    assert {lease: (one.version, one.count, one.size) for lease, one in bench.publishing.saved.items()} == {
        C: (2, 2, 20),
        A: (3, 3, 21),
    }
    assert bench.saved == [(A, 7), (C, 7), (A, 7), (C, 7), (A, 7)]
    assert {one.volume for one in bench.publishing.saved.values()} == {"ckpt"}


def test_a_ticket_is_good_for_its_tenant_and_its_epoch(bench: Bench) -> None:
    lent = LentVolume(lease=A, epoch=E5, tenant=ANNA)
    ticket = bench.publishing.lend(lent)
    assert bench.publishing.borrowed(ticket, ANNA).epoch == E5
    with pytest.raises(Unauthorized):
        bench.publishing.borrowed(ticket, BOB)
    with pytest.raises(Unauthorized):
        bench.publishing.borrowed("0" * 32, ANNA)
    bench.live[A] = E6
    with pytest.raises(StaleEpoch):
        bench.publishing.borrowed(ticket, ANNA)
    with pytest.raises(StaleEpoch):
        bench.publishing.lend(lent)
    bench.live[A] = E5
    tickets = [bench.publishing.lend(lent) for _ in range(TICKETS_MAX)]
    with pytest.raises(SubletError):
        bench.publishing.borrowed(ticket, ANNA)
    bench.publishing.lease_ended(bench.store)
    with pytest.raises(Unauthorized):
        bench.publishing.borrowed(tickets[-1], ANNA)


def test_after_a_mistake_of_ours_the_next_in_line_has_its_turn(bench: Bench) -> None:
    """Whose request met it is told so, and does not wait for ever."""
    bench.ask(PUBLISH)
    bench.ask(PUBLISH)
    bench.work.fails = True
    bench.done(DONE)
    bench.work.fails = False
    bench.ask(PUBLISH)
    bench.done(DONE)
    assert bench.kinds == ["Published", "SubletError", "Published"]
    assert not bench.store.at_work, "else the volume would never be put away"


@pytest.mark.parametrize(("said_ns", "counts_ns"), [(-5, 0), (1 << 62, SAVE_MAX_NS)])
def test_how_long_a_save_took_is_believed_within_bounds(said_ns: int, counts_ns: int, bench: Bench) -> None:
    """It decides how early a holder is warned, so a false one must not cost others their time."""
    bench.ask(replace(PUBLISH, save_ns=said_ns))
    bench.done(DONE)
    assert bench.saved == [(A, counts_ns)]


def test_what_was_saved_is_forgotten_first_of_the_lease_that_saved_least_recently(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_queue, "SAVED_KEPT", 2)
    for guest in ("g-1", "g-2"):
        bench.ask(PUBLISH, Asker(leases={A: None}, under=LeaseId(guest)))
        bench.done(DONE)
    assert bench.publishing.saved.keys() == {A, "g-2"}


# --------------------------------------------------------------------------------------------- what a forked job does


IDS = (65_534, 65_534)


def folder_of(bench: Bench, place: Path) -> Path:
    """The bench's volume, on a disk."""
    bench.store.folder, bench.work.lock = str(place), str(place / "jobs")
    folder = place / "0"
    folder.mkdir()
    bench.store.made = Made(paths=(str(folder),))
    return folder


@pytest.mark.parametrize(
    ("asker", "staging"),
    [
        (Asker(leases={A: None}), "1.5"),
        (Asker(leases={A: None}, holder=True), "1.5"),
        (Asker(leases={A: None}, holder=True, ids=IDS), "1.5.holder"),
    ],
    ids=["a guest of our user", "its holder", "a holder whose guests are another user's"],
)
def test_a_holder_has_a_staging_of_its_own_where_guests_are_another_users(
    asker: Asker, staging: str, bench: Bench, tmp_path: Path
) -> None:
    """Its files are our user's, so no guest may write them."""
    folder = folder_of(bench, tmp_path)
    bench.ask(OpenVolume(lease=A, epoch=E5), asker)
    said = loads(VolumeReply, bench.work.works[0]().encode())
    assert isinstance(said, VolumeOpened)
    assert said.staging == str(folder / "staging" / staging)
    made = (folder / "staging" / staging).stat()
    assert (made.st_uid, made.st_gid) == (os.geteuid(), os.getegid())


def test_what_a_holder_of_another_user_has_staged_goes_when_it_is_published_or_refused(
    bench: Bench, tmp_path: Path
) -> None:
    """Since it cannot remove it itself."""
    folder = folder_of(bench, tmp_path)
    stranger = Asker(leases={A: None}, holder=True, is_stranger=True)
    bench.ask(OpenVolume(lease=A, epoch=E5), stranger)
    bench.done(loads(VolumeReply, bench.work.works.pop()().encode()))
    for asker, stays in ((Asker(leases={A: None}, holder=True), True), (stranger, False)):
        staged = folder / "staging" / str(E5) / "s"
        staged.mkdir(exist_ok=True)
        bench.ask(PUBLISH, asker)
        assert isinstance(loads(VolumeReply, bench.work.works.pop()().encode()), Refusal), "no manifest was staged"
        bench.done(DONE)
        assert staged.exists() is stays


def test_files_are_opened_for_holders_of_another_user_alone(bench: Bench) -> None:
    """All others come to them by the volume's folder."""
    bench.publishing.ask(Asker(leases={A: None}), OpenFiles(lease=A, epoch=E5, names=("a",)), bench.told.append)
    bench.publishing.ask(Asker(leases={A: None}), ListVolume(lease=A, epoch=E5), bench.told.append)
    assert bench.kinds == ["InvalidRequest", "InvalidRequest"]
    assert not bench.work.begun


def test_descriptors_are_handed_on_only_where_there_is_one_for_each_name(bench: Bench) -> None:
    """Those of an answer that lacks one are closed, and so are both ends of what they came through."""
    with nothing_left_open():
        for names in (("a",), ("a", "b")):
            asked = OpenFiles(lease=A, epoch=E5, names=names)
            bench.publishing.ask(Asker(leases={A: None}, is_stranger=True), asked, bench.told.append)
            with socket.socket(fileno=os.dup(bench.work.kept[-1])) as its:
                socket.send_fds(its, [b"f"], [its.fileno()])
            bench.work.begun.pop()(dumps(FilesOpened(names=names)).decode())
        handed, refused = bench.told
        assert isinstance(handed, Handed)
        assert handed.reply.names == ("a",)
        for fd in handed.fds:
            os.close(fd)
        assert isinstance(refused, Refusal)


# ---------------------------------------------------------------------------------------- copied from another volume


class Two(Bench):
    """The bench's volume, and another of the same tenant, which is copied from."""

    def __init__(self) -> None:
        super().__init__()
        self.live[C] = E5
        self.other = LeaseRuntime(lease=C, tenant=ANNA, epoch=E5, parts=(PART,), deadline_ns=1 << 60, office="o")
        note = StoreNote(lease=C, epoch=E5, tenant=ANNA, parts=(PART,), name="other")
        self.there = StoredFolder("/other", note, StoreState.THERE)
        self.there.made = Made(paths=("/other/0",))
        self.other.stores = [self.there]
        self.publishing._tenancies = {A: self.tenancy, C: self.other}

    def ticket(self, *, reads: bool = True, tenant: TenantId = ANNA) -> str:
        return self.publishing.lend(LentVolume(lease=C, epoch=E5, tenant=tenant, reads=reads))

    def copy(self, ticket: str) -> None:
        self.ask(CopyIn(lease=A, epoch=E5, volume=ticket, staging="s"))


@pytest.fixture
def two() -> Two:
    return Two()


def test_while_one_is_copied_neither_is_put_away(two: Two) -> None:
    two.copy(two.ticket())
    assert (two.store.at_work, two.there.at_work) == (1, 1)
    two.publishing.ask(Asker(leases={C: None}), replace(PUBLISH, lease=C), two.told.append)
    assert two.there.at_work == 2  # whose volume it is goes on saving meanwhile
    two.done(CopiedIn(number=3))
    assert (two.store.at_work, two.there.at_work, two.work.rests) == (0, 1, 2)
    two.done(DONE)
    assert two.kinds == ["CopiedIn", "Published"]
    assert not two.there.at_work


def test_when_the_volume_that_is_read_is_to_be_put_away_the_copy_has_a_moment(two: Two) -> None:
    two.copy(two.ticket())
    two.there.state = StoreState.LEAVING
    two.publishing.lease_ended(two.there)
    (timer,) = two.work.timers
    assert not two.work.stopped
    timer()
    assert len(two.work.stopped) == 1
    two.done(None)
    assert two.kinds == ["CheckpointFailed"]
    assert two.work.rests == 2


def test_what_is_lent_to_be_read_is_not_saved_to(two: Two) -> None:
    with pytest.raises(Unauthorized):
        two.publishing.borrowed(two.ticket(), ANNA)
    assert two.publishing.borrowed(two.ticket(reads=False), ANNA).tenancy is two.other
    two.copy(two.ticket(reads=False))  # who may save there may read
    assert two.store.at_work


def test_the_copy_is_of_the_volume_that_was_named(two: Two, tmp_path: Path) -> None:
    """Which has nothing in it: had its own been looked into, the copy would be of what its tenant saved there."""
    folder_of(two, tmp_path)
    (tmp_path / "other").mkdir()
    two.there.made = Made(paths=(str(tmp_path / "other"),))
    two.ask(OpenVolume(lease=A, epoch=E5))
    two.done(loads(VolumeReply, two.work.works.pop()().encode()))
    manifests = tmp_path / "0" / "checkpoints"
    (manifests / manifest_name(1)).write_bytes(b"damaged")
    two.copy(two.ticket())
    assert loads(VolumeReply, two.work.works.pop()().encode()) == CopiedIn(number=0)


def test_nobody_copies_what_was_not_lent_to_him(two: Two) -> None:
    two.copy(two.ticket(tenant=BOB))
    two.copy("made-up")
    two.copy(two.publishing.lend(LentVolume(lease=A, epoch=E5, tenant=ANNA, reads=True)))
    ticket = two.ticket()
    two.live[C] = E6
    two.copy(ticket)
    assert two.kinds == ["Unauthorized", "Unauthorized", "InvalidRequest", "StaleEpoch"]
    assert not two.work.begun


def test_a_copy_that_waits_past_the_end_of_what_it_reads_is_refused(two: Two) -> None:
    two.ask(PUBLISH)
    two.copy(two.ticket())
    two.copy(two.ticket())
    two.live[C] = E6
    two.done(DONE)
    assert two.kinds == ["Published", "StaleEpoch", "StaleEpoch"]
    refused = two.told[-1]
    assert isinstance(refused, Refusal)
    assert "changed hands while it was copied" in refused.message
    assert "Copy it again" in refused.do, "not that the copier's own lease was lost"
    two.live[C] = E5
    two.ask(PUBLISH)
    two.copy(two.ticket())
    two.there.state = StoreState.LEAVING
    two.done(DONE)
    assert two.kinds[-1] == "LeaseNotActive"
    assert not two.work.begun
