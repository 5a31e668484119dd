"""An interrupt anywhere in a program that holds leases leaves none at the office: the real client, over a real socket,
against a real ledger.

Three ways to interrupt it. *Every place*: a trace function raises at the n-th place in the client's bytecode where the
interpreter would run the handler of a signal (at the start of a function, after a call, after a jump back), for sampled
n. *Twice*: then a profile function raises a few places further on, amid what the first interrupt had the client do;
where a function of the client begins, or one in C has returned to it. *Real signals*: a timer, once, twice, or as a
storm. A failure prints the seed and the place. SUBLET_INTERRUPTS is the number of rounds of each kind.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final

import pytest

import sublet
from sublet.client import lease_table, renewal_thread
from sublet.client.clocks import client_clock
from sublet.client.fabric import Fabric
from sublet.values import NS_PER_S, Epoch
from tests.unit.client.office_thread import OfficeThread, office_thread

ROUNDS: Final = int(os.environ.get("SUBLET_INTERRUPTS", "6"))
SEED: Final = int(os.environ.get("SUBLET_SEED", "1"))
SOURCE: Final = str(Path(sublet.__file__).parent)
GONE_S: Final = 60.0
"""What is promised. The keeper looks every 5 s for leases without a handle, and asks again as often."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # sockets, and leases, that an interrupt has dropped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeThread]:
    with office_thread(tmp_path_factory.mktemp("office")) as found:
        yield found
    collect()


def collect() -> None:
    """End what interrupts have dropped here, and not in the middle of another module's tests."""
    for thread in threading.enumerate():
        # One whose start was interrupted is among them, and never ran.
        if thread.name in ("sublet-keeper", "sublet-return") and thread.is_alive():
            thread.join(5)
    gc.collect()


@pytest.fixture(autouse=True)
def silent_finalisers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a finaliser is printed and forgotten."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def fabric_of(office: OfficeThread) -> Fabric:
    """Of a program whose leases would outlive it."""
    return Fabric(office.address, client_clock(), start=False, bound=False)


# ---- the programs that are interrupted


class Helper:
    """Another program at the same office: what it holds stands in the way, or is left to be attached to."""

    all_left: ClassVar[set[tuple[str, Epoch]]] = set()

    def __init__(self, office: OfficeThread) -> None:
        self.fabric = fabric_of(office)
        self.id = ""
        self._let_go = threading.Event()
        self._lease: sublet.Lease | None = None
        self._thread: threading.Thread | None = None

    def block(self) -> None:
        """Take all cores, until somebody waits for them."""
        self._lease = self.fabric.cpu(4, name="helper")
        self._let_go.clear()
        self._thread = threading.Thread(target=self._release)
        self._thread.start()

    def leave(self) -> None:
        """A lease of nobody, to be attached to."""
        lease = self.fabric.memory("1MiB", renew="always")
        self.id = lease.leave()
        self.all_left.add((self.id, lease.epoch))

    def waited_for(self, place: object) -> None:
        self._let_go.set()

    def _release(self) -> None:
        self._let_go.wait(120)
        if self._lease is not None:
            self._lease.release()

    def done(self) -> None:
        self._let_go.set()
        if self._thread is not None:
            self._thread.join()


def uses_it(fabric: Fabric, helper: Helper) -> None:
    with fabric.memory("1MiB", renew="always") as lease:
        with lease.activity():
            lease.check()
        lease.renew()


def releases_it(fabric: Fabric, helper: Helper) -> None:
    fabric.gpu(min_vram="1MiB", renew="always").release()


def waits_in_the_queue(fabric: Fabric, helper: Helper) -> None:
    helper.block()
    try:
        with fabric.cpu(2, renew="always", on_place=helper.waited_for):
            pass
    finally:
        helper.done()


def declines_an_offer(fabric: Fabric, helper: Helper) -> None:
    with contextlib.suppress(sublet.CapacityExceeded):
        fabric.cpu(4096, or_smaller=True, wait=0, on_offer=lambda _: False).release()


def attaches(fabric: Fabric, helper: Helper) -> None:
    with fabric.attach(helper.id, renew="always"):
        pass


def replaces(fabric: Fabric, helper: Helper) -> None:
    with fabric.memory("1MiB", renew="always") as old, fabric.memory("2MiB", renew="always", replaces=old):
        pass


def closes(fabric: Fabric, helper: Helper) -> None:
    with fabric:
        fabric.memory("1MiB", renew="always")
        kept = [fabric.memory("1MiB", renew="always")]
        fabric.close()
        kept.clear()


def uses_many(fabric: Fabric, helper: Helper) -> None:
    with fabric.many(3).memory("1MiB", renew="always") as leases, leases[1].activity():
        leases[0].release()


def releases_many(fabric: Fabric, helper: Helper) -> None:
    fabric.many(3, at_least=3).memory("1MiB", renew="always").release()


def waits_for_one_of_many(fabric: Fabric, helper: Helper) -> None:
    helper.block()
    try:
        with fabric.many(2).cpu(3, renew="always", on_place=helper.waited_for):
            pass
    finally:
        helper.done()


PROGRAMS: Final = [
    uses_it,
    releases_it,
    waits_in_the_queue,
    declines_an_offer,
    attaches,
    replaces,
    closes,
    uses_many,
    releases_many,
    waits_for_one_of_many,
]


# ---- every place

BEGINS: Final = "()"
GIVING_BACK: Final = (f" release{BEGINS}", f" __exit__{BEGINS}")
AT: Final = frozenset({dis.opmap["RESUME"]})
AFTER: Final = frozenset(
    number
    for name, number in dis.opmap.items()
    if (name.startswith("CALL") and "INTRINSIC" not in name) or name.startswith("JUMP_BACKWARD")
)
"""Where the interpreter looks for signals: at these instructions, and after these."""


class Tracer:
    """Counts the places of this thread at which a signal's handler would run in the client, and raises at one, and so
    many places later once more, if they are met before the block ends."""

    def __init__(self, at: int = -1, then: int = 0) -> None:
        self.count = 0
        self.place = ""
        self.second = ""
        self._at = at
        self._then = then
        self._last: dict[FrameType, int] = {}

    def run(self, program: Callable[[Fabric, Helper], None], fabric: Fabric, helper: Helper) -> None:
        """In a generator, which has its own state of exceptions that are being handled: raised by a trace function in
        an ``except`` clause, an interrupt leaves CPython with the clause's exception in that state."""
        next(self._traced(program, fabric, helper))

    def _traced(self, program: Callable[[Fabric, Helper], None], fabric: Fabric, helper: Helper) -> Iterator[None]:
        sys.settrace(self._begin)
        try:
            program(fabric, helper)
        finally:
            sys.settrace(None)
            sys.setprofile(None)
        yield

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            code, last = frame.f_code.co_code, self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if code[frame.f_lasti] not in AT and (last is None or code[last] not in AFTER):
                return self._step
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                self._last.clear()
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                if code[frame.f_lasti] in AT:
                    self.place += BEGINS
                if self._then:  # a trace function that has raised is no more
                    sys.setprofile(self._again)
                raise KeyboardInterrupt
        return self._step

    def _again(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(SOURCE):
            self._then -= 1
            if self._then == 0:
                sys.setprofile(None)
                self.second = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} {event}"
                raise KeyboardInterrupt


def look(office: OfficeThread, helper: Helper) -> list[str]:
    """What is left there, but for what the helper has or has left; waits for it to be nothing."""
    end, pause = time.monotonic() + GONE_S, 0.001
    while True:
        left = [one for one in office.left() if one.name != "helper" and (one.id, one.epoch) not in helper.all_left]
        if not left or time.monotonic() > end:
            return [f"{one.id} {one.status}" for one in left]
        time.sleep(pause)
        pause = min(0.2, pause * 2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_anywhere_leaves_no_lease(office: OfficeThread, program: Callable[[Fabric, Helper], None]) -> None:
    chance = random.Random(f"{SEED} {program.__name__}")
    helper = Helper(office)
    try:
        helper.leave()
        fabric = fabric_of(office)
        counted = Tracer()
        counted.run(program, fabric, helper)
        fabric.close()
        assert look(office, helper) == []
        for turn in range(ROUNDS):
            at = chance.randrange(counted.count) + 1
            fabric = fabric_of(office)
            if program is attaches:
                helper.leave()
            interrupted: BaseException | None = None
            tracer = Tracer(at)
            try:
                tracer.run(program, fabric, helper)
            except BaseException as error:
                interrupted = error
            helper.done()
            how = "kept" if turn % 2 else "dropped"
            if not turn % 2:
                interrupted = None
            if program is attaches:  # the keeper gives the attach 5 s to arrive
                fabric.close()
            told = f"seed {SEED}, {program.__name__}, place {at} ({tracer.place}), trace {how}"
            if tracer.place.endswith(GIVING_BACK):  # not a line of it has run, so a trace that is kept has the lease
                interrupted = None
            assert look(office, helper) == [], told
            del interrupted
            fabric.close()
            assert look(office, helper) == [], told
    finally:
        helper.done()
        helper.fabric.close()
        gc.collect()


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_interrupts_leave_no_lease(
    office: OfficeThread, program: Callable[[Fabric, Helper], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second one leaves undone is found by the keeper, which looks every few seconds. It does not wait for
    the garbage collector."""
    for module in (lease_table, renewal_thread):
        monkeypatch.setattr(module, "SWEEP_NS", NS_PER_S // 20)
    chance = random.Random(f"two {SEED} {program.__name__}")
    helper, fabric = Helper(office), fabric_of(office)
    gc.disable()
    try:
        helper.leave()
        counted = Tracer()
        counted.run(program, fabric, helper)
        fabric.close()
        for _ in range(ROUNDS // 2):
            at, then = chance.randrange(counted.count) + 1, 1 + int(40 * chance.random() ** 2)
            fabric = fabric_of(office)
            if program is attaches:
                helper.leave()
            tracer = Tracer(at, then)
            with contextlib.suppress(BaseException):
                tracer.run(program, fabric, helper)
            helper.done()
            if program is attaches:  # the keeper gives the attach 5 s to arrive
                fabric.close()
            told = f"seed {SEED}, {program.__name__}, place {at} ({tracer.place}), {then} further ({tracer.second})"
            assert look(office, helper) == [], told
            fabric.close()
    finally:
        gc.enable()
        helper.done()
        fabric.close()
        helper.fabric.close()
        gc.collect()


def test_what_two_interrupts_leave_is_given_back_by_a_keeper_that_slept(
    office: OfficeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the lease has been given up, and the keeper was not told yet. It held nothing, and had
    no reason to wake."""
    for module in (lease_table, renewal_thread):
        monkeypatch.setattr(module, "SWEEP_NS", NS_PER_S // 5)
    helper = Helper(office)
    fabric = fabric_of(office)
    try:
        fabric.memory("1MiB", renew="always").release()
        end = time.monotonic() + GONE_S
        while fabric._keeper._asleep_until_ns < 1 << 60 and time.monotonic() < end:
            time.sleep(0.05)  # until its next look it minds what it had

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(fabric, "_open", interrupted)
            patched.setattr(fabric, "_release_in_background", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fabric.memory("1MiB", renew="always")
        assert look(office, helper) == []
    finally:
        fabric.close()
        helper.fabric.close()


def test_a_lease_that_was_replaced_is_over_when_the_new_one_is_there(office: OfficeThread) -> None:
    """Nothing starts under it any more, though the office has not said so yet."""
    with fabric_of(office) as fabric:
        old = fabric.memory("1MiB")
        with fabric.memory("2MiB", replaces=old):
            assert old.end is not None


# ---- real signals


class Alarm(BaseException):
    """What the handler of the signal raises."""


class Alarms:
    """Real signals, at most so many for each program that is run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = 0
        """So many are still raised. A plain store ends them: no signal can come before it, as before a call."""
        self._interval = 0.0
        self._before = signal.signal(signal.SIGALRM, self._ring)

    def run(self, program: Callable[[], object], first: float, interval: float) -> None:
        """With the first after so many seconds, and then each so long after the one before. The timer goes off once and
        is set again: with one that repeats by itself, a machine that needs longer than the interval for the handler
        would do nothing else any more."""
        self.left, self._interval = self.most, interval
        try:
            signal.setitimer(signal.ITIMER_REAL, first)
            program()
            self.left = 0
        except Alarm:
            self.left = 0
        except BaseException as error:
            self.left = 0
            print(repr(error))
        signal.setitimer(signal.ITIMER_REAL, 0)

    def close(self) -> None:
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.left > 0:
            self.left -= 1
            if self.left:
                signal.setitimer(signal.ITIMER_REAL, self._interval)
            raise Alarm


@pytest.mark.parametrize("most", [1, 2, 20])
def test_signals_leave_no_lease(office: OfficeThread, most: int) -> None:
    chance = random.Random(f"{SEED} {most}")
    helper = Helper(office)
    fabric = fabric_of(office)
    alarms = Alarms(most)
    try:
        for turn in range(ROUNDS * 2):
            program = chance.choice([uses_it, releases_it, replaces, uses_many, releases_many])
            first, interval = chance.uniform(0, 0.003), chance.uniform(0, 0.001) + 1e-6
            alarms.run(partial(program, fabric, helper), first, interval)
            if turn % 6 == 5:
                assert look(office, helper) == [], f"seed {SEED}, {program.__name__}, {first:.6f} s, {interval:.6f} s"
    finally:
        alarms.close()
        fabric.close()
        helper.fabric.close()
        gc.collect()
