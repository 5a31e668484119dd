"""A card that is not well is said to be, a program that is not well is no fault of its card, and nobody waits."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from sublet.node.agent.foreign import REPEAT_NS, Own
from sublet.node.agent.health import (
    AGAIN_NS,
    LOOK_EVERY_NS,
    PATIENCE_NS,
    SILENT_LOOKS,
    CardWatch,
    fault_in,
)
from sublet.node.agent.inventory import machine_inventory
from sublet.node.agent.nvml import GPU_IS_LOST, MISMATCH, CardReading, Nvml, NvmlFailed, is_driver_here, survey, who_is
from sublet.values import GIB, ResourceId
from sublet.wire.orders import Fault, Foreign
from tests.cases import case
from tests.left_open import threads_now
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml, uuid_of

FIRST, SECOND = ResourceId(f"local/{uuid_of(0)}"), ResourceId(f"local/{uuid_of(1)}")


class Stage:
    """Two pretended cards, and a watch over them."""

    def __init__(self, folder: Path) -> None:
        self.cards = [FakeCard(0), FakeCard(1)]
        self.library = FakeNvml(self.cards)
        self.own: dict[ResourceId, Own] = {}
        self.watch = CardWatch(
            machine_inventory(folder, None, found=survey(self.library)),
            own=lambda resource: self.own.get(resource, Own()),
            open_driver=lambda: Nvml.open(self.library),
            name_of=lambda pid: ("python", "ada"),
            sees_processes=True,
        )
        self.now_ns = 0
        self._threads = threads_now("cards")

    def asking(self) -> int:
        """How many questions to the driver are out. Those of other tests, which may still end, are not counted."""
        return len(threads_now("cards") - self._threads)

    def look(self, *, later_ns: int = LOOK_EVERY_NS) -> list[Fault | Foreign]:
        self.now_ns += later_ns
        return self.watch.judge(self.watch.read_cards(), self.now_ns)

    def faults(self) -> dict[ResourceId, str]:
        return {report.resource: report.detail for report in self.look() if isinstance(report, Fault)}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.watch.close()
    assert found.library.opened == 0


def test_two_well_cards_are_no_news(stage: Stage) -> None:
    first = stage.look()
    assert [(type(report), report.resource) for report in first] == [(Foreign, FIRST), (Foreign, SECOND)]
    assert stage.look() == []


def test_a_lost_card_is_a_fault_at_once_and_the_other_is_not(stage: Stage) -> None:
    stage.look()
    stage.cards[1].broken = pynvml.NVML_ERROR_GPU_IS_LOST
    assert stage.faults() == {SECOND: "the GPU is lost: it fell off its bus"}
    assert stage.faults(), "for as long as it is lost, since an operator may think it mended"
    stage.cards[1].broken = 0
    assert stage.faults() == {}


def test_a_card_that_vanished_is_a_fault(stage: Stage) -> None:
    stage.look()
    del stage.library.cards[0]
    assert stage.faults() == {FIRST: "the GPU is no longer there"}


def test_a_driver_that_is_away_for_a_moment_is_no_fault_and_is_opened_anew(stage: Stage) -> None:
    stage.look()
    stage.library.broken = pynvml.NVML_ERROR_UNINITIALIZED
    assert stage.faults() == {}
    stage.library.broken = 0
    stage.library.opened = 0  # it was loaded anew, and knows nothing of us
    assert stage.look() == []
    assert stage.library.opened == 1


def test_a_driver_that_stays_away_is_a_fault_of_every_card(stage: Stage) -> None:
    stage.look()
    stage.library.broken = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    for _ in range(SILENT_LOOKS - 1):
        assert stage.faults() == {}
    found = stage.faults()
    assert set(found) == {FIRST, SECOND}
    assert "different versions" in found[FIRST]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 68, 69, 92, 94, 109, 137, 154, 999])
def test_what_a_program_did_to_itself_is_no_fault_of_the_card(stage: Stage, xid: int) -> None:
    stage.look()
    stage.library.events.append((stage.cards[0], xid))
    assert stage.faults() == {}


@pytest.mark.parametrize("xid", [48, 62, 64, 74, 79, 95, 110, 119, 120, 121, 140, 143])
def test_what_the_driver_reports_of_a_card_is_a_fault_of_that_card(stage: Stage, xid: int) -> None:
    """One that nobody here knows too: a new kind of error is not a reason to trust the card."""
    stage.look()
    stage.library.events += [(stage.cards[1], 31), (stage.cards[1], xid)]
    found = stage.faults()
    assert set(found) == {SECOND}
    assert f"(Xid {xid})" in found[SECOND]


def test_an_error_of_a_split_card_is_one_of_all_its_instances(tmp_path: Path) -> None:
    card = FakeCard(0, instances={0: 10 * GIB, 1: 10 * GIB})
    library = FakeNvml([card])
    watch = CardWatch(
        machine_inventory(tmp_path, None, found=survey(library)),
        own=lambda _: Own(),
        open_driver=lambda: Nvml.open(library),
    )
    watch.judge(watch.read_cards(), 0)
    library.events.append((card, 79))
    reports = watch.judge(watch.read_cards(), 1)
    assert len([report for report in reports if isinstance(report, Fault)]) == 2
    assert library.watched == [uuid_of(0)]


def test_memory_errors_count_from_when_we_began_to_look() -> None:
    def look(uncorrected: int | None) -> CardReading:
        return CardReading(uuid="GPU-1", uncorrected=uncorrected)

    assert fault_in(look(5)) == ""
    assert fault_in(look(5), look(5)) == ""
    assert fault_in(look(7), look(5)) == "2 memory errors could not be corrected"
    assert fault_in(look(None), look(5)) == ""
    assert fault_in(look(0), look(5)) == "", "the driver was loaded anew"
    contained = replace(look(7), xids=(94,))
    assert fault_in(contained, look(5)) == "", "what had the memory is dead, and the card is well"
    assert "Xid 95" in fault_in(replace(look(7), xids=(94, 95)), look(5))
    early = replace(look(5), xids=(94,))
    assert fault_in(look(7), early) == "", "it was told between the counts of one look and its end"


def test_broken_memory_is_a_fault_when_nothing_can_replace_it(stage: Stage) -> None:
    stage.look()
    stage.cards[0].rows = (1, 1, 1, 0)
    assert stage.faults() == {}
    assert stage.watch.health[FIRST].reading.needs_reset
    stage.cards[0].rows = (1, 1, 1, 1)
    assert "nothing left" in stage.faults()[FIRST]


def test_strangers_are_told_and_told_again_when_they_leave(stage: Stage) -> None:
    stage.look()
    stage.cards[0].processes = {4711: 2 * GIB}
    stage.cards[0].used = 2 * GIB
    [busy] = stage.look()
    assert isinstance(busy, Foreign)
    assert (busy.resource, busy.amount, busy.blocks) == (FIRST, 2 * GIB, True)
    assert "process 4711 (python) of user ada" in busy.detail
    stage.own[FIRST] = Own(pids=frozenset({4711}), leased=2 * GIB)
    [quiet] = stage.look()
    assert quiet == Foreign(node=stage.watch.node, resource=FIRST)
    assert len(stage.look(later_ns=REPEAT_NS)) == 2, "what was said may have been lost"


def test_what_the_supervisor_says_of_other_offices_is_told_together_with_what_is_seen(stage: Stage) -> None:
    stage.cards[0].processes, stage.cards[0].used = {4711: GIB}, GIB
    stage.look()
    nothing = Foreign(node=stage.watch.node, resource=FIRST)
    taken = Foreign(node=stage.watch.node, resource=FIRST, amount=80 * GIB, blocks=True, detail="lent by ada")
    [said] = stage.watch.on_report(taken, stage.now_ns)
    assert (said.amount, said.detail.startswith("lent by ada; 1GiB")) == (80 * GIB, True)
    assert stage.look() == [], "a look at the card does not take it back"
    [said] = stage.watch.on_report(nothing, stage.now_ns)
    assert (said.amount, said.detail.startswith("1GiB")) == (GIB, True)


def test_a_display_counts_as_a_stranger_and_is_counted_once(stage: Stage) -> None:
    stage.cards[0].processes = {7: GIB, 8: None}
    stage.cards[0].graphics = {7: 3 * GIB, 8: 5}
    stage.cards[0].used = 3 * GIB
    found = {report.resource: report for report in stage.look() if isinstance(report, Foreign)}
    processes = stage.watch.health[FIRST].reading.processes
    assert [(process.pid, process.bytes) for process in processes] == [(7, 3 * GIB), (8, 5)]
    assert found[FIRST].blocks


def test_a_card_that_does_not_answer_keeps_what_is_known_of_strangers(stage: Stage) -> None:
    stage.cards[0].processes, stage.cards[0].used = {4711: GIB}, GIB
    stage.look()
    stage.cards[0].broken = pynvml.NVML_ERROR_GPU_IS_LOST
    assert [type(report) for report in stage.look()] == [Fault]
    assert stage.watch.health[FIRST].foreign.amount == GIB


QUESTIONS = [name for name in dir(FakeNvml) if name.startswith("nvml") and name not in ("nvmlInit", "nvmlMemory_v2")]


ANSWERED_BY_EVERY_CARD = ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo")


@pytest.mark.parametrize("code", [3, 2, 19, 21, 25, 26, 29, 999, 12_345, "raise"])
def test_whatever_single_question_fails_nothing_is_raised(tmp_path: Path, code: int | str) -> None:
    """Not while searching, not while looking, and not while letting go."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no such symbol") if code == "raise" else pynvml.NVMLError(code)

    for question in (*QUESTIONS, "nvmlDeviceGetMemoryInfo_v2"):
        with case(question), pytest.MonkeyPatch.context() as patch:
            stage = Stage(tmp_path)
            if question == "nvmlDeviceGetMemoryInfo_v2":
                stage.library.unknown.add(question)
            else:
                patch.setattr(stage.library, question, fail)
            survey(stage.library)
            reports = [report for _ in range(SILENT_LOOKS) for report in stage.look()]
            if question not in ANSWERED_BY_EVERY_CARD:
                assert not any(isinstance(report, Fault) for report in reports), "a card need not know this"
            stage.watch.close()
            stage.library.opened = 0
            stage.watch.close()


# ------------------------------------------------------------------------------------------- nobody waits for a driver


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_lease_that_ended_since_the_driver_counted_leaves_no_full_card(stage: Stage) -> None:
    """What its guests had then counted as more than their lease had; for one look nobody could have the card."""
    stage.watch.tick(10**9)
    _answered(stage.watch)
    stage.own[FIRST] = Own(pids=frozenset((4711,)), leased=8 * GIB)
    stage.cards[0].used, stage.cards[0].processes = 8 * GIB, {4711: 8 * GIB}
    stage.watch.tick(10**9 + LOOK_EVERY_NS)
    stage.own[FIRST] = Own(pids=frozenset((4711,)))
    _answered(stage.watch)
    stage.watch.tick(2 * 10**9 + LOOK_EVERY_NS)
    assert stage.watch.health[FIRST].foreign == Foreign(node=stage.watch.node, resource=FIRST)


def _answered(watch: CardWatch) -> None:
    if watch._thread is not None:
        watch._thread.join()


def test_the_heartbeat_asks_in_the_background_and_takes_the_answer_when_it_is_there(stage: Stage) -> None:
    watch = stage.watch
    reports, wake = watch.tick(10**9)
    assert reports == []
    assert wake is not None
    assert wake < 10**9 + LOOK_EVERY_NS, "the answer comes soon"
    wait(lambda: stage.asking() == 0)
    reports, wake = watch.tick(wake)
    assert [report.resource for report in reports] == [FIRST, SECOND]
    assert wake == 10**9 + LOOK_EVERY_NS
    assert watch.tick(wake - 1) == ([], wake), "called too early it asks nobody"


def test_memory_that_has_come_to_be_in_use_is_looked_at_again_soon(stage: Stage) -> None:
    """It may be that of a process that has just ended. If it is still there then, it is looked at as always."""

    def looked(at_ns: int) -> int:
        stage.watch.tick(at_ns)
        _answered(stage.watch)
        _, wake = stage.watch.tick(at_ns)
        assert wake is not None
        return wake - at_ns

    assert looked(10**9) == LOOK_EVERY_NS
    stage.cards[0].used = GIB
    assert looked(10**9 + LOOK_EVERY_NS) == AGAIN_NS
    assert looked(10**9 + LOOK_EVERY_NS + AGAIN_NS) == LOOK_EVERY_NS


def test_a_driver_that_never_answers_is_a_fault_and_keeps_nobody_waiting(stage: Stage) -> None:
    release = threading.Event()

    def hang(_: object) -> None:
        release.wait()

    stage.library.nvmlDeviceGetUtilizationRates = hang  # type: ignore[method-assign, assignment]
    try:
        assert stage.watch.tick(1)[0] == []
        assert stage.watch.tick(1 + LOOK_EVERY_NS)[0] == []
        reports, _ = stage.watch.tick(1 + PATIENCE_NS)
        assert [(type(report), report.detail) for report in reports] == [
            (Fault, "the driver has not answered for 30 s")
        ] * 2
        assert stage.asking() == 1, "one question at a time"
    finally:
        release.set()
        wait(lambda: stage.asking() == 0)


def test_without_cards_nothing_is_asked_and_no_thread_made(tmp_path: Path) -> None:
    from sublet.node.agent.inventory import HostGpus

    watch = CardWatch(machine_inventory(tmp_path, HostGpus(count=2, size=GIB)), own=lambda _: Own())
    before = threads_now("cards")
    assert watch.tick(1) == ([], None)
    assert not threads_now("cards") - before


# --------------------------------------------------------------------------------------------------------- small things


def test_every_error_is_a_sentence_with_what_to_do() -> None:
    for name in dir(pynvml):
        if name.startswith("NVML_ERROR_"):
            failed = NvmlFailed(getattr(pynvml, name), "said")
            assert failed.message
            assert failed.message[-1] not in ".!"
            assert failed.do.endswith((".", "`."))
    assert NvmlFailed(GPU_IS_LOST).message != NvmlFailed(MISMATCH).message


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("dev/nvidiactl", True),
        ("dev/dxg", True),
        ("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", True),
        ("usr/lib64/libnvidia-ml.so.1", True),
        ("opt/own/libnvidia-ml.so.1", True),
        ("usr/lib/libc.so.6", False),
    ],
)
def test_a_driver_is_looked_for_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, there: bool
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/own::relative")
    assert not is_driver_here(str(tmp_path))
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert is_driver_here(str(tmp_path)) is there


def test_a_machine_without_a_driver_loads_nothing_for_it(tmp_path: Path) -> None:
    import sys

    script = (
        "import sys; from pathlib import Path; from sublet.node.agent.inventory import machine_inventory\n"
        f"machine_inventory(Path({str(tmp_path)!r}), None, root={str(tmp_path)!r})\n"
        "print([name for name in ('pynvml', 'ctypes', 'psutil', 'threading') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_process_is_told_by_command_and_user_and_may_be_gone(tmp_path: Path) -> None:
    import pwd

    program = tmp_path / "a\x1b[2J b"
    program.symlink_to("/bin/sleep")
    words: Sequence[str] = [str(program), "60"]
    process = subprocess.Popen(words)
    try:
        wait(lambda: "sleep" in who_is(process.pid)[0] or "?" in who_is(process.pid)[0])
        name, user = who_is(process.pid)
        assert name == "a?[2J b"
        assert user == pwd.getpwuid(os.getuid()).pw_name
    finally:
        process.kill()
        process.wait()
    assert who_is(process.pid) == ("", "")
