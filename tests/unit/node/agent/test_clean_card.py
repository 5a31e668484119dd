"""A card between two leases: what has to be so before anybody else gets it. Over pretended drivers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from sublet.devices.cuda_driver import CudaDriver
from sublet.errors import Unsupported
from sublet.node.agent.clean_card import AT_REST, DRAWN, STILL_LOOKS, clean, read_settings
from sublet.values import GIB, MIB, NS_PER_S
from sublet.wire.cards import CardFound
from tests.unit.devices.fake_cuda import Code, FakeCuda
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml, uuid_of

FREE = 3 * GIB + 100 * MIB
CARD = uuid_of(0)


class ScrubCuda(FakeCuda):
    """A driver with so much memory, of which none is really taken."""

    def __init__(self, free: int = FREE, largest: int = 1 << 40) -> None:
        super().__init__()
        self.free, self.largest = free, largest
        self.taken: dict[int, int] = {}
        self.overwritten = 0
        self.most_when_begun = 0

    def cuDeviceGetUuid(self, device: int) -> Any:  # noqa: N802
        found = super().cuDeviceGetUuid(device)
        if device == 1:
            found.bytes = bytes.fromhex(CARD.removeprefix("GPU-").replace("-", ""))
        return found

    def cuMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
        return Code(0), self.free, 80 * GIB

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        if size > min(self.largest, self.free - sum(self.taken.values())):
            return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
        address = 0x1000 * (1 + len(self.taken))
        self.taken[address] = size
        return address

    def cuMemsetD8(self, address: int, number: int, count: int) -> None:  # noqa: N802
        assert number == 0
        self.most_when_begun = self.most_when_begun or sum(self.taken.values())
        self.overwritten += min(count, self.taken[address])

    def cuCtxSynchronize(self) -> None:  # noqa: N802
        pass

    def cuMemFree(self, address: int) -> None:  # noqa: N802
        del self.taken[address]


class Desk:
    def __init__(self, **facts: Any) -> None:
        self.card = FakeCard(0, **facts)
        self.library = FakeNvml([self.card])
        self.cuda = ScrubCuda()

    def clean(self, settings: str = "", sees: bool = True) -> Any:
        found = clean(CARD, settings, library=self.library, driver=lambda: CudaDriver(self.cuda), sees_processes=sees)
        assert self.library.opened == 0, "the driver is let go of"
        return found


def test_a_card_at_rest_is_overwritten_whole_and_given_back() -> None:
    """In pieces as large as can be had, then in smaller ones."""
    desk = Desk()
    found = desk.clean()
    assert (found.left, found.failed) == ("", "")
    assert found.scrubbed_bytes == desk.cuda.overwritten == FREE - FREE % (2 * MIB)
    assert not desk.cuda.taken
    assert desk.cuda.contexts == 0
    assert found.scrub_ns > 0


@pytest.mark.parametrize("draws", [False, True])
def test_a_rehearsal_overwrites_no_more_than_it_says(*, draws: bool) -> None:
    """Others may have the rest by then; and a desktop is left what it draws into."""
    desk = Desk(graphics={os.getpid(): MIB}) if draws else Desk()
    found = clean(
        CARD,
        since_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        most=2 * MIB,
        library=desk.library,
        driver=lambda: CudaDriver(desk.cuda),
        sees_processes=True,
    )
    assert (found.left, found.failed) == ("", "")
    assert found.scrubbed_bytes == desk.cuda.overwritten == 2 * MIB
    assert not desk.cuda.taken


def test_memory_in_pieces_is_overwritten_too() -> None:
    desk = Desk()
    desk.cuda.largest = 64 * MIB
    assert desk.clean().scrubbed_bytes == FREE - FREE % (2 * MIB)


def test_who_is_still_on_it_is_waited_for_by_name() -> None:
    desk = Desk(processes={4711: GIB})
    assert "process 4711" in desk.clean().left
    assert desk.cuda.overwritten == 0
    assert desk.clean(sees=False).left == "", "whose pids these are nobody can tell in a container"


def test_a_desktop_that_was_there_before_the_lease_is_not_what_the_lease_left() -> None:
    """It goes on, and has memory to draw in until the last moment; all that is free is overwritten nevertheless. What
    draws since the lease is waited for like anybody else."""
    desk = Desk(graphics={os.getpid(): GIB}, used=GIB + 64 * MIB)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    found = clean(
        CARD,
        since_ns=now_ns,
        library=desk.library,
        driver=lambda: CudaDriver(desk.cuda),
        sees_processes=True,
    )
    assert (found.left, found.failed) == ("", "")
    assert 0 < desk.cuda.most_when_begun <= FREE - DRAWN
    assert found.scrubbed_bytes == desk.cuda.overwritten == FREE - FREE % (2 * MIB)
    assert f"process {os.getpid()}" in desk.clean().left
    desk.card.processes = {os.getpid(): MIB}
    assert f"process {os.getpid()}" in clean(CARD, since_ns=now_ns, library=desk.library, sees_processes=True).left


def test_who_was_started_in_the_tick_of_the_lend_is_no_desktop_of_before() -> None:
    """The start of a process is known to a tick, so a guest that is forked at once would seem to be older."""
    with open(f"/proc/{os.getpid()}/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    tick_ns = NS_PER_S // os.sysconf("SC_CLK_TCK")
    desk = Desk(graphics={os.getpid(): MIB})
    for since_ns, is_left in ((ticks * tick_ns + tick_ns - 1, True), ((ticks + 1) * tick_ns, False)):
        found = clean(
            CARD,
            since_ns=since_ns,
            library=desk.library,
            driver=lambda: CudaDriver(desk.cuda),
            sees_processes=True,
        )
        assert bool(found.left) is is_left, since_ns


def test_no_more_is_overwritten_than_was_free() -> None:
    """Some drivers go on in the memory of the host: what was free is as much as the card has."""
    desk = Desk()
    real = desk.cuda.free

    class Endless(ScrubCuda):
        def cuMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
            return Code(0), real, 80 * GIB

    desk.cuda = Endless(free=1 << 50)
    assert desk.clean().scrubbed_bytes <= real


def test_memory_that_nobody_is_seen_to_use_is_waited_for() -> None:
    desk = Desk(reserved=GIB, used=AT_REST + 65 * MIB)
    assert "no process is seen" in desk.clean().left
    desk.card.used = AT_REST
    assert desk.clean().left == ""


def test_settings_go_back() -> None:
    desk = Desk(settings={"compute mode": 0, "power limit": 700_000})
    before = read_settings(CARD, desk.library).settings
    assert json.loads(before) == {"compute mode": 0, "power limit": 700_000}
    desk.card.settings = {"compute mode": 3, "power limit": 300_000}
    assert desk.clean(before).failed == ""
    assert desk.card.settings == {"compute mode": 0, "power limit": 700_000}
    desk.card.settings["compute mode"] = 3
    desk.card.stuck = {"compute mode"}
    found = desk.clean(before)
    assert (found.failed, found.left) == ("", ""), "a card whose settings somebody else has changed is no broken one"
    assert "its compute mode was changed to 3, and does not go back to 0" in found.note
    del desk.card.settings["compute mode"]
    assert desk.clean(before).note == "", "what cannot be asked any more was not changed"


def test_where_the_driver_does_not_tell_whose_memory_it_is_it_has_to_come_to_rest() -> None:
    """WSL lists no process, and its desktop has memory at all times. What becomes less is waited for."""
    desk = Desk(used=GIB, unknown={"nvmlDeviceGetComputeRunningProcesses_v3"})
    slept: list[float] = []

    def shrink(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            desk.card.used -= 100 * MIB

    def found(sleep: Callable[[float], object]) -> CardFound:
        return clean(CARD, library=desk.library, driver=lambda: CudaDriver(desk.cuda), sees_processes=True, sleep=sleep)

    assert "becoming less" in found(shrink).left
    assert desk.cuda.overwritten == 0
    at_rest = found(slept.append)
    assert (at_rest.left, at_rest.failed) == ("", "")
    assert len(slept) == 2 + STILL_LOOKS
    assert 0 < desk.cuda.most_when_begun <= FREE - DRAWN, "the desktop keeps some to draw in"
    desk.card.unknown = set()
    desk.card.graphics = {os.getpid(): None}
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    told = clean(
        CARD, since_ns=now_ns, library=desk.library, driver=lambda: CudaDriver(desk.cuda), sees_processes=True,
        sleep=slept.append,
    )  # fmt: skip
    assert told.left == "", "a desktop of before, of which it is not told how much it has"


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuMemsetD8", "cuCtxSynchronize"])
def test_a_scrub_that_fails_is_a_fault(call: str) -> None:
    desk = Desk()
    desk.cuda.fail[call] = Code.CUDA_ERROR_INVALID_VALUE
    found = desk.clean()
    assert "could not be overwritten" in found.failed
    assert found.is_hard
    assert desk.cuda.contexts == 0


def test_memory_that_cannot_be_had_is_not_said_to_be_clean() -> None:
    desk = Desk()
    desk.cuda.largest = 1 * MIB
    assert "only 0B could be taken" in desk.clean().failed


@pytest.mark.parametrize("odd_size", [64 * MIB, 2 * MIB])
def test_memory_that_is_refused_for_another_reason_than_want_of_it_may_be_somebodys(odd_size: int) -> None:
    """However little it is. Where smaller pieces come to all of it, nothing is left. It was called clean either way."""
    desk = Desk()
    desk.cuda.free = 100 * MIB
    taken = desk.cuda.cuMemAlloc
    desk.cuda.cuMemAlloc = lambda size: (Code.CUDA_ERROR_INVALID_VALUE,) if size == odd_size else taken(size)  # type: ignore[method-assign]
    found = desk.clean()
    if odd_size == 64 * MIB:
        assert found.scrubbed_bytes == desk.cuda.overwritten == 100 * MIB
    else:
        assert "could not be overwritten" in found.failed
        assert found.is_hard
    assert not desk.cuda.taken
    assert desk.cuda.contexts == 0


@pytest.mark.parametrize("code", [2, 46])
def test_a_card_that_another_process_keeps_for_a_moment_is_waited_for(code: int) -> None:
    """One that has ended may be listed no more and still keep a card of EXCLUSIVE_PROCESS. It was a fault for good."""
    desk = Desk()
    desk.cuda.fail["cuDevicePrimaryCtxRetain"] = Code(code)
    found = desk.clean()
    assert "could not be overwritten" in found.left
    assert not found.failed
    assert desk.clean().scrubbed_bytes > 0


@pytest.mark.parametrize("code", [1, 9, 10, 999])
def test_a_driver_that_does_not_answer_once_is_asked_again(code: int) -> None:
    """One that was loaded anew, or late, quarantined the card until an operator came."""
    desk = Desk(broken=code)
    found = desk.clean()
    assert found.left
    assert not found.failed
    desk.card.broken = 0
    assert desk.clean().scrubbed_bytes > 0


def test_a_card_that_fell_off_is_a_fault_and_a_driver_that_is_gone_is_waited_for() -> None:
    desk = Desk(broken=15)
    assert "fell off its bus" in desk.clean().failed
    assert desk.clean().is_hard
    assert read_settings(CARD, desk.library).failed

    def none() -> CudaDriver:
        raise Unsupported("there is no NVIDIA driver on this machine")

    found = clean(CARD, library=Desk().library, driver=none, sees_processes=True)
    assert "no NVIDIA driver" in found.left
    assert not found.failed, "what is missing beside a card is no fault of it"
