"""A session in the guest: batches, fences, errors by place, and everything freed in the end."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.devices.host import HostDevice
from sublet.devices.interface import DeviceIdentity
from sublet.errors import (
    CapacityExceeded,
    GpuError,
    GpuSessionEnded,
    InvalidRequest,
    LeaseExpired,
    NotFound,
    StaleEpoch,
    SubletError,
)
from sublet.guest import device_service
from sublet.guest import session as session_module
from sublet.lease_end import EndReason
from sublet.testing.device_conformance import KERNELS, WARP_KERNELS
from sublet.values import MIB, Epoch, LeaseId
from sublet.wire.codec import dumps
from sublet.wire.device import (
    INLINE_MAX,
    OPS_MAX,
    SHAPES_MAX,
    Alloc,
    Batch,
    BatchDone,
    CloseSession,
    Copy,
    Fill,
    Free,
    Launch,
    LaunchShape,
    Load,
    ModuleKind,
    Op,
    OpenSession,
    Read,
    SharedSource,
    Source,
    Sync,
    Unload,
    Write,
    WriteShared,
)
from sublet.wire.page import PageState
from sublet.wire.scalars import ArgKind, packing
from sublet.wire.sealed_memory import SharedBuffer, map_shared
from tests.left_open import nothing_left_open
from tests.unit.guest.session_stage import EPOCH, LEASE, HeldSession, Stage, now_ns

KINDS = (ArgKind.BUFFER, ArgKind.U32, ArgKind.U32)
PACKING = packing(KINDS)
SOURCES = tuple(Source(kind=kind, data=data) for kind, data in KERNELS.items())
LOAD = Load(module=1, sources=SOURCES)


def step(*, module: int = 1, kernel: str = "step", kinds: tuple[ArgKind, ...] = KINDS) -> LaunchShape:
    return LaunchShape(module=module, kernel=kernel, grid=(1,), block=(4,), kinds=kinds)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels") / "cache")


@pytest.fixture
def stage(tmp_path: Path, kernel_cache: str) -> Iterator[Stage]:
    with nothing_left_open():
        made = Stage(tmp_path, kernel_cache)
        yield made
        made.close()
        assert made.account.used_bytes == 0
        made.calls._page.close()


@pytest.fixture
def held(stage: Stage) -> HeldSession:
    return stage.session()


def failed(done: BatchDone) -> tuple[int, str, str]:
    assert done.failed is not None
    return done.failed.index, done.failed.call, done.failed.refusal.kind


# ------------------------------------------------------------------------------------------------------------ batches


def test_a_whole_life_fits_one_batch(held: HeldSession) -> None:
    """A buffer is made, filled, computed on, read and freed, and nobody waited in between."""
    done = held.do(
        LOAD,
        Alloc(buffer=1, size=16),
        Alloc(buffer=2, size=16),
        Write(buffer=1, offset=0, data=struct.pack("<4I", 1, 2, 3, 4)),
        Launch(shape=0, values=PACKING.pack(1, 4, 10)),
        Copy(target=2, at=8, source=1, offset=0, length=8),
        Fill(buffer=2, offset=0, length=4, pattern=b"\1"),
        Sync(),
        Read(buffer=1, offset=0, length=16),
        Read(buffer=2, offset=0, length=16),
        Unload(module=1),
        Free(buffer=1),
        shapes=(step(),),
    )
    assert done.failed is None
    assert done.done == 12
    assert struct.unpack("<8I", done.data) == (10, 21, 32, 43, 0x01010101, 0, 10, 21)
    [loaded] = done.loaded
    assert (loaded.module, loaded.kind) == (1, ModuleKind.WARP)
    assert [one.shown for one in loaded.kernels if one.name == "step"] == [
        "step(x: array(uint32), n: uint32, a: uint32)"
    ]


def test_a_session_says_what_it_is_and_what_it_did(stage: Stage) -> None:
    opened, _ = stage.ask(OpenSession(lease=LEASE, epoch=EPOCH))
    assert (opened.device, opened.label, opened.is_host) == ("host-0", "host device, no GPU", True)
    assert opened.memory_bytes == 16 * MIB
    held = HeldSession(stage, opened.session)
    held.do(LOAD, Alloc(buffer=1, size=100), Write(buffer=1, offset=0, data=b"12345"))
    held.do(Launch(shape=0, values=PACKING.pack(1, 4, 10)), Read(buffer=1, offset=0, length=7), shapes=(step(),))
    assert failed(held.do(Free(buffer=2)))[2] == "NotFound"
    closed = held.close()
    assert (closed.launches, closed.failures, closed.bytes_in, closed.bytes_out) == (1, 1, 5, 7)
    assert closed.peak_bytes == 100
    assert stage.account.used_bytes == 0


def test_what_cannot_run_is_told_to_holders_that_understand_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one refuses an answer with a field that it does not know, and had no session at all."""
    limited = DeviceIdentity(id="gpu", label="old", is_host=False, limits=("none",))
    monkeypatch.setattr(HostDevice, "identity", property(lambda _: limited, lambda *_: None), raising=False)
    older, _ = stage.calls.answer(dumps(OpenSession(lease=LEASE, epoch=EPOCH)))
    assert b"limits" not in older
    opened, _ = stage.ask(OpenSession(lease=LEASE, epoch=EPOCH, takes_limits=True))
    assert opened.limits == ("none",)


def test_the_first_operation_that_fails_ends_the_batch(held: HeldSession) -> None:
    """What stands before it has happened and is handed back, what stands behind it has not."""
    done = held.do(
        Alloc(buffer=1, size=4),
        Write(buffer=1, offset=0, data=b"abcd"),
        Read(buffer=1, offset=1, length=2),
        Write(buffer=1, offset=2, data=b"wxyz"),
        Write(buffer=1, offset=0, data=b"----"),
    )
    assert (done.done, done.data) == (3, b"bc")
    assert failed(done) == (3, "mem_write", "InvalidRequest")
    assert done.failed is not None
    assert "4 bytes from 2 on are not within buffer 1" in done.failed.refusal.message
    assert held.do(Read(buffer=1, offset=0, length=4)).data == b"abcd"


@pytest.mark.parametrize(
    ("op", "call", "kind"),
    [
        (Alloc(buffer=1, size=8), "mem_alloc", "InvalidRequest"),
        (Alloc(buffer=-1, size=8), "mem_alloc", "InvalidRequest"),
        (Alloc(buffer=9, size=0), "mem_alloc", "InvalidRequest"),
        (Alloc(buffer=9, size=1 << 40), "mem_alloc", "OutOfMemory"),
        (Free(buffer=7), "mem_free", "NotFound"),
        (Write(buffer=1, offset=-1, data=b"x"), "mem_write", "InvalidRequest"),
        (WriteShared(buffer=1, offset=0, start=0, length=1), "mem_write", "InvalidRequest"),
        (Read(buffer=1, offset=0, length=17), "mem_read", "InvalidRequest"),
        (Read(buffer=1, offset=0, length=-1), "mem_read", "InvalidRequest"),
        (Read(buffer=1, offset=0, length=(1 << 63) - 1), "mem_read", "InvalidRequest"),
        (Copy(target=1, at=0, source=8, offset=0, length=1), "mem_copy", "NotFound"),
        (Fill(buffer=1, offset=0, length=3, pattern=b"abc"), "mem_fill", "InvalidRequest"),
        (Load(module=1, sources=SOURCES), "module_load", "InvalidRequest"),
        (Load(module=2, sources=()), "module_load", "InvalidRequest"),
        (Load(module=2, sources=(SOURCES[0], SOURCES[0])), "module_load", "InvalidRequest"),
        (Load(module=2, sources=(SOURCES[1],)), "module_load", "Unsupported"),
        (Load(module=2, sources=(Source(kind=ModuleKind.CUDA, data=b"("),)), "module_load", "GpuError"),
        (
            Load(module=2, sources=(SharedSource(kind=ModuleKind.WARP, start=0, length=9),)),
            "module_load",
            "InvalidRequest",
        ),
        (Unload(module=2), "module_unload", "NotFound"),
        (Launch(shape=0, values=PACKING.pack(7, 1, 1)), "launch", "NotFound"),
        (Launch(shape=0, values=b"short"), "launch", "InvalidRequest"),
        (Launch(shape=1, values=PACKING.pack(1, 1, 1)), "launch", "NotFound"),
        (Launch(shape=2, values=PACKING.pack(1, 1, 1)), "launch", "NotFound"),
        (Launch(shape=3, values=b""), "launch", "InvalidRequest"),
        (Launch(shape=4, values=b""), "launch", "InvalidRequest"),
        (Launch(shape=-1, values=b""), "launch", "InvalidRequest"),
    ],
)
def test_an_operation_that_cannot_be_is_refused_by_place_and_call(
    held: HeldSession, op: Op, call: str, kind: str
) -> None:
    """And the session goes on as it was."""
    held.do(LOAD, Alloc(buffer=1, size=16))
    shapes = (step(), step(kernel="stop"), step(module=3), step(kinds=KINDS[:1]))
    done = held.do(Sync(), op, Sync(), shapes=shapes)
    assert failed(done) == (1, call, kind)
    assert done.failed is not None
    assert done.failed.refusal.message.startswith(f"{call}: ")
    assert done.failed.refusal.do
    assert held.do(Read(buffer=1, offset=0, length=16)).data == bytes(16)


def test_numbers_are_given_upwards_and_never_twice(held: HeldSession) -> None:
    """A number that was free again could mean an older buffer to a holder who is behind."""
    assert held.do(Alloc(buffer=5, size=1), Free(buffer=5)).failed is None
    for number in (5, 4):
        assert failed(held.do(Alloc(buffer=number, size=1)))[2] == "InvalidRequest"
    done = held.do(Free(buffer=5))
    assert done.failed is not None
    assert "freed before" in done.failed.refusal.message


def test_a_launch_after_an_unload_in_the_same_batch_is_refused(held: HeldSession) -> None:
    held.do(LOAD, Alloc(buffer=1, size=16))
    launch = Launch(shape=0, values=PACKING.pack(1, 4, 1))
    assert failed(held.do(launch, Unload(module=1), launch, shapes=(step(),))) == (2, "launch", "NotFound")
    assert failed(held.do(launch, shapes=(step(),))) == (0, "launch", "NotFound")


def test_more_shapes_than_are_kept_still_run(held: HeldSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PLANS_MAX", 3)
    held.do(LOAD, Alloc(buffer=1, size=16))
    shapes = tuple(LaunchShape(module=1, kernel="step", grid=(n,), block=(1,), kinds=KINDS) for n in (1, 2, 3, 4, 5))
    ops = [Launch(shape=n, values=PACKING.pack(1, 4, 1)) for n in (0, 1, 2, 3, 4, 0, 1)]
    done = held.do(*ops, Read(buffer=1, offset=0, length=16), shapes=shapes)
    assert struct.unpack("<4I", done.data) == (0, 5, 6, 6)


def test_a_batch_has_limits(held: HeldSession) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {OPS_MAX}"):
        held.do(*[Sync()] * (OPS_MAX + 1))
    with pytest.raises(InvalidRequest, match="launch shapes"):
        held.do(shapes=(step(),) * (SHAPES_MAX + 1))


# -------------------------------------------------------------------------------------------------------- shared memory


def test_large_data_lies_beside_the_message_both_ways(held: HeldSession) -> None:
    size = 3 * MIB
    with SharedBuffer.create(size + 100) as made:
        made.view[50 : 50 + size] = bytes(range(256)) * (size // 256)
        fd = made.publish()
    done = held.do(
        Alloc(buffer=1, size=size),
        WriteShared(buffer=1, offset=0, start=50, length=size),
        Read(buffer=1, offset=0, length=size),
        Read(buffer=1, offset=255, length=2),
        fds=(fd,),
    )
    assert (done.failed, done.data) == (None, b"")
    [got] = held.fds
    with map_shared(got, 0, size + 2) as view:
        assert view[:size] == bytes(range(256)) * (size // 256)
        assert bytes(view[size:]) == b"\xff\0"
    os.close(got)


def test_what_was_read_before_a_failure_comes_back_in_shared_memory_too(held: HeldSession) -> None:
    size = INLINE_MAX + 1
    done = held.do(
        Alloc(buffer=1, size=size),
        Fill(buffer=1, offset=0, length=size, pattern=b"x"),
        Read(buffer=1, offset=0, length=size),
        Read(buffer=1, offset=1, length=size),
    )
    assert failed(done) == (3, "mem_read", "InvalidRequest")
    [got] = held.fds
    with map_shared(got, 0, size) as view:
        assert view == b"x" * size
    os.close(got)


def test_a_read_beyond_the_lease_takes_no_memory_for_it(held: HeldSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four gigabytes that cannot be read are not laid aside before that is found out."""
    taken: list[int] = []
    monkeypatch.setattr(SharedBuffer, "create", lambda size, **names: taken.append(size))
    done = held.do(Alloc(buffer=1, size=10), Read(buffer=1, offset=0, length=64 << 30))
    assert failed(done) == (1, "mem_read", "InvalidRequest")
    assert taken == []


def test_a_module_may_lie_beside_the_message(held: HeldSession) -> None:
    with SharedBuffer.create(len(WARP_KERNELS)) as made:
        made.view[:] = WARP_KERNELS
        fd = made.publish()
    shared = SharedSource(kind=ModuleKind.WARP, start=0, length=len(WARP_KERNELS))
    assert held.do(Load(module=1, sources=(shared,)), fds=(fd,)).failed is None


def test_shared_memory_through_which_harm_could_be_done_is_refused(held: HeldSession) -> None:
    fd = os.memfd_create("loose")
    os.write(fd, b"x" * 100)
    with pytest.raises(InvalidRequest, match="refused"):
        held.do(Alloc(buffer=1, size=10), fds=(fd,))
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    with pytest.raises(InvalidRequest, match="refused"):
        held.do(Alloc(buffer=1, size=10), fds=(empty,))
    assert held.do(Alloc(buffer=1, size=10)).failed is None, "nothing of those batches happened"


# -------------------------------------------------------------------------------------------------------------- fences


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"state": PageState.OVER, "reason": EndReason.PREEMPTED}, GpuSessionEnded),
        ({"state": PageState.OVER, "reason": EndReason.RELEASED}, GpuSessionEnded),
        ({"deadline_ns": 1}, GpuSessionEnded),
        ({"epoch": Epoch(1, 43)}, StaleEpoch),
        ({"lease": LeaseId("l-8")}, StaleEpoch),
    ],
)
def test_when_the_lease_is_over_everything_is_freed_and_nothing_more_is_done(
    stage: Stage, held: HeldSession, changes: dict[str, Any], error: type[SubletError]
) -> None:
    held.do(LOAD, Alloc(buffer=1, size=1000))
    stage.writer.write(stage.view(**changes))
    with pytest.raises(error):
        held.do(Write(buffer=1, offset=0, data=b"late"))
    assert stage.account.used_bytes == 0
    stage.writer.write(stage.view())  # no resurrection
    with pytest.raises(error):
        held.do(Sync())


def test_a_lease_that_ends_in_the_middle_of_a_batch_stops_it_there(
    stage: Stage, held: HeldSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next submission is refused; what was read before is handed back."""
    held.do(LOAD, Alloc(buffer=1, size=16))
    launch = HostDevice.launch

    def and_then_it_ends(self: HostDevice, plan: Any, values: Any) -> None:
        launch(self, plan, values)
        stage.writer.write(stage.view(state=PageState.OVER, reason=EndReason.PREEMPTED))

    monkeypatch.setattr(HostDevice, "launch", and_then_it_ends)
    one = Launch(shape=0, values=PACKING.pack(1, 4, 1))
    done = held.do(Read(buffer=1, offset=0, length=4), one, one, shapes=(step(),))
    assert failed(done) == (2, "launch", "GpuSessionEnded")
    assert (done.done, done.data) == (2, bytes(4))
    assert done.failed is not None
    assert "preempted" in done.failed.refusal.message
    assert stage.account.used_bytes == 0
    assert held.close().launches == 1


def test_a_notice_takes_nothing_away_yet(stage: Stage, held: HeldSession) -> None:
    stage.writer.write(stage.view(state=PageState.NOTICED, reason=EndReason.PREEMPTED, take_at_ns=now_ns() + 10**10))
    assert held.do(Alloc(buffer=1, size=1000)).failed is None


def test_only_the_live_pair_opens_a_session_and_only_its_own_batches_run_in_it(stage: Stage) -> None:
    for lease, epoch in ((LEASE, Epoch(1, 41)), (LEASE, Epoch(1, 43)), (LeaseId("l-8"), EPOCH)):
        with pytest.raises(StaleEpoch):
            stage.ask(OpenSession(lease=lease, epoch=epoch))
    assert stage.opened == []
    held = stage.session()
    with pytest.raises(StaleEpoch):
        stage.ask(Batch(session=held.number, lease=LEASE, epoch=Epoch(1, 41), ops=(Sync(),)))
    with pytest.raises(NotFound, match="no session 1 "):
        stage.ask(Batch(session=1, lease=LEASE, epoch=EPOCH, ops=(Sync(),)))
    stage.writer.write(stage.view(deadline_ns=1))
    with pytest.raises(LeaseExpired):
        stage.ask(OpenSession(lease=LEASE, epoch=EPOCH))


@pytest.mark.parametrize("by", [(LEASE, Epoch(1, 41)), (LeaseId("l-8"), EPOCH)])
def test_a_connection_opens_sessions_of_its_own_pair_and_of_no_other(by: tuple[LeaseId, Epoch], stage: Stage) -> None:
    """A program that held the lease before cannot open a session by naming the epoch that is live now."""
    asked = dumps(OpenSession(lease=LEASE, epoch=EPOCH))
    with pytest.raises(StaleEpoch, match="no other's"):
        stage.calls.answer(asked, (), by=by)
    assert stage.opened == []
    stage.calls.answer(asked, (), by=(LEASE, EPOCH))
    assert len(stage.opened) == 1


# ------------------------------------------------------------------------------------------------------------ sessions


def test_sessions_are_apart_and_share_the_account(stage: Stage) -> None:
    first, second = stage.session(), stage.session()
    first.do(LOAD, Alloc(buffer=1, size=10 * MIB))
    assert failed(second.do(Free(buffer=1))) == (0, "mem_free", "NotFound")
    assert failed(second.do(Alloc(buffer=1, size=7 * MIB))) == (0, "mem_alloc", "OutOfMemory")
    assert second.do(Alloc(buffer=2, size=6 * MIB)).failed is None
    first.close()
    assert stage.account.used_bytes == 6 * MIB
    with pytest.raises(NotFound):
        first.do(Sync())
    with pytest.raises(NotFound):
        stage.ask(CloseSession(session=first.number))
    assert second.do(Alloc(buffer=3, size=10 * MIB)).failed is None


def test_when_the_connection_goes_everything_of_every_session_goes(stage: Stage) -> None:
    for _ in range(3):
        stage.session().do(LOAD, Alloc(buffer=1, size=1000))
    assert stage.account.used_bytes == 3000
    stage.calls.close()
    assert stage.account.used_bytes == 0


def test_a_guest_has_so_many_sessions_and_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_service, "SESSIONS_MAX", 2)
    stage.session()
    stage.session()
    with pytest.raises(CapacityExceeded, match="2 sessions are open"):
        stage.session()
    stage.calls.close()
    with pytest.raises(NotFound, match="no device 1"):
        stage.ask(OpenSession(lease=LEASE, epoch=EPOCH, device=1))


def test_a_device_that_fails_names_its_own_call(held: HeldSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be another one than the operation: what was launched before was to blame."""

    def late(self: HostDevice) -> None:
        raise GpuError("launch: an illegal address", call="launch")

    monkeypatch.setattr(HostDevice, "_sync", late)
    assert failed(held.do(Alloc(buffer=1, size=1), Sync())) == (1, "launch", "GpuError")
