"""Lock, checkpoint, restore, unlock: over a pretended driver that is as strict as the real one says it is."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.devices import cuda_driver, suspend
from sublet.devices.cuda_driver import CudaDriver
from sublet.devices.suspend import ProcessLost, Suspender, SuspendFailed, answer, main, probe, whole_map
from sublet.errors import Unsupported
from sublet.values import Suspend

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
OLD, NEW = bytes(16), bytes(range(16))


class Arguments(SimpleNamespace):
    """A struct of the driver: only fields it has may be set."""

    def __init__(self, *fields: str) -> None:
        super().__init__(**dict.fromkeys(fields))
        object.__setattr__(self, "_fields", fields)

    def __setattr__(self, name: str, value: object) -> None:
        assert name in self._fields, f"the driver knows no {name}"
        super().__setattr__(name, value)


class Uuid:
    """The bindings let nobody set its bytes; what is at its address counts."""

    def __init__(self, raw: bytes = bytes(16)) -> None:
        self._raw = ctypes.create_string_buffer(raw, 16)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._raw)

    @property
    def bytes(self) -> bytes:
        return self._raw.raw


class FakeDriver:
    """Processes and their states; a call in the wrong state is an error, as the driver's documentation has it."""

    def __init__(self, *pids: int, version: int = 13_000) -> None:
        self.states = dict.fromkeys(pids, RUNNING)
        self.version = version
        self.calls: list[tuple[str, int]] = []
        self.fails: dict[tuple[str, int], int] = {}
        self.pairs: list[tuple[bytes, bytes]] = []
        self.timeouts: list[int] = []
        self.is_silent = self.is_silent_once_locked = False

    CUcheckpointLockArgs = staticmethod(lambda: Arguments("timeoutMs"))
    CUcheckpointCheckpointArgs = staticmethod(Arguments)
    CUcheckpointRestoreArgs = staticmethod(lambda: Arguments("gpuPairs", "gpuPairsCount"))
    CUcheckpointUnlockArgs = staticmethod(Arguments)
    CUcheckpointGpuPair = staticmethod(lambda: Arguments("oldUuid", "newUuid"))
    CUuuid = Uuid
    gpus = (OLD, NEW)
    models = (b"one", b"one")

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, self.models[device]

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, len(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:  # noqa: N802
        return 0, ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Uuid]:  # noqa: N802
        return 0, Uuid(self.gpus[device])

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"in words"

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[int, ...]:  # noqa: N802
        is_silent = self.is_silent or (self.is_silent_once_locked and self.states.get(pid) == LOCKED)
        return (0, self.states[pid]) if pid in self.states and not is_silent else (1,)

    def _step(self, name: str, pid: int, expected: int, then: int) -> tuple[int]:
        self.calls.append((name, pid))
        if (code := self.fails.get((name, pid))) is not None:
            return (code,)
        if self.states.get(pid) != expected:
            return (401,)  # CUDA_ERROR_ILLEGAL_STATE
        self.states[pid] = then
        return (0,)

    def cuCheckpointProcessLock(self, pid: int, arguments: Any) -> tuple[int]:  # noqa: N802
        self.timeouts.append(arguments.timeoutMs)
        return self._step("lock", pid, RUNNING, LOCKED)

    def cuCheckpointProcessCheckpoint(self, pid: int, arguments: Any) -> tuple[int]:  # noqa: N802
        return self._step("checkpoint", pid, LOCKED, CHECKPOINTED)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> tuple[int]:  # noqa: N802
        if arguments.gpuPairs:
            assert arguments.gpuPairsCount == len(arguments.gpuPairs)
            self.pairs += [(pair.oldUuid.bytes, pair.newUuid.bytes) for pair in arguments.gpuPairs]
        return self._step("restore", pid, CHECKPOINTED, LOCKED)

    def cuCheckpointProcessUnlock(self, pid: int, arguments: Any) -> tuple[int]:  # noqa: N802
        return self._step("unlock", pid, LOCKED, RUNNING)


def over(fake: FakeDriver) -> Suspender:
    return Suspender(CudaDriver(fake))


def test_there_and_back() -> None:
    """All are locked before any is copied; those without CUDA are left alone."""
    fake = FakeDriver(1, 2)
    suspender = over(fake)
    assert suspender.suspend([1, 2, 7], 1234) == [1, 2]
    assert fake.states == {1: CHECKPOINTED, 2: CHECKPOINTED}
    assert fake.timeouts == [1234, 1234]
    suspender.resume([1, 2])
    assert fake.states == {1: RUNNING, 2: RUNNING}
    assert [name for name, _ in fake.calls] == [*["lock"] * 2, *["checkpoint"] * 2, *["restore"] * 2, *["unlock"] * 2]


def test_twice_is_once() -> None:
    """Whoever asks again, because an answer was lost, changes nothing."""
    fake = FakeDriver(1)
    suspender = over(fake)
    suspender.suspend([1])
    assert suspender.suspend([1]) == [1]
    suspender.resume([1])
    suspender.resume([1])
    assert len(fake.calls) == 4


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_half_a_guest_is_never_suspended(step: str) -> None:
    """The second fails: the first goes on as if nothing had been."""
    fake = FakeDriver(1, 2)
    fake.fails[step, 2] = 999
    with pytest.raises(SuspendFailed, match="in words"):
        over(fake).suspend([1, 2])
    assert fake.states == {1: RUNNING, 2: RUNNING}


def test_a_suspended_process_that_the_driver_does_not_report_is_no_success() -> None:
    """It was taken for one without CUDA: it was said to go on, and waited for the driver for ever."""
    here, ended = os.getpid(), subprocess.Popen(["true"])
    ended.wait()
    fake = FakeDriver(here)
    suspender = over(fake)
    suspender.suspend([here])
    fake.is_silent = True
    with pytest.raises(SuspendFailed, match=f"does not report process {here}, which is suspended"):
        suspender.resume([here])
    asked = {"do": "resume", "pids": [here]}
    assert f"process {here}" in str(answer(suspender, json.dumps(asked))["failed"])
    assert answer(suspender, json.dumps(asked | {"undo": True})) == {"done": [here]}, "it may never have had a device"
    fake.is_silent = False
    suspender.resume([here, ended.pid])
    assert fake.states == {here: RUNNING}


def test_a_process_that_the_driver_does_not_report_any_more_could_not_be_put_back() -> None:
    """It was locked, the next step failed, and it was said to be as before."""
    here = os.getpid()
    fake = FakeDriver(here)
    fake.fails["checkpoint", here] = 999
    fake.is_silent_once_locked = True
    with pytest.raises(ProcessLost, match=f"could not be undone: resume: the driver does not report process {here}"):
        over(fake).suspend([here])


def test_what_could_not_be_undone_is_said() -> None:
    """The guest is lost then, and has to be ended."""
    fake = FakeDriver(1, 2)
    fake.fails["checkpoint", 2] = fake.fails["restore", 1] = 999
    with pytest.raises(ProcessLost, match="could not be undone"):
        over(fake).suspend([1, 2])


def test_a_guest_that_the_driver_broke_is_told_from_one_that_stays() -> None:
    """One that is of no use any more was told to save, and its calls of the driver waited for ever."""
    fake = FakeDriver(1)
    fake.fails["checkpoint", 1] = 999
    suspender = over(fake)
    asked = json.dumps({"do": "suspend", "pids": [1]})
    assert "stuck" not in answer(suspender, asked)
    assert fake.states == {1: RUNNING}
    fake.states[1] = FAILED
    assert answer(suspender, asked)["stuck"] is True


def test_processes_of_one_program_that_use_a_device_together_are_not_suspended() -> None:
    """One that is locked can keep another from coming to a stand (NVIDIA/cuda-checkpoint #30). None is touched."""
    fake = FakeDriver(1, 2, 3)
    with pytest.raises(SuspendFailed, match=r"2 processes of one program \(1, 2 …\) use a device"):
        over(fake).suspend([1, 2, 3], groups=[[1, 2], [3]])
    assert not fake.calls
    assert over(fake).suspend([1, 7, 3], groups=[[1, 7], [3]]) == [1, 3], "one that has nothing there is no obstacle"


def test_a_process_that_the_driver_gave_up_is_no_success() -> None:
    """``FAILED`` is a state of its own."""
    fake = FakeDriver(1)
    fake.states[1] = FAILED
    with pytest.raises(SuspendFailed, match="of no use any more"):
        over(fake).suspend([1])


def test_another_device_only_where_the_driver_can() -> None:
    """And then it is told which became which."""
    fake = FakeDriver(1)
    suspender = over(fake)
    suspender.suspend([1])
    suspender.resume([1], [(OLD, NEW)])
    assert fake.pairs == [(OLD, NEW), (NEW, OLD)], "each GPU that it could see has to be named"
    older = over(FakeDriver(1, version=12_080))
    older.suspend([1])
    with pytest.raises(SuspendFailed, match=r"CUDA 12\.8 puts a process back only where it was"):
        older.resume([1], [(OLD, NEW)])


@pytest.mark.parametrize(
    ("pairs", "gpus", "whole"),
    [
        ("ab", "ab", "ab ba"),
        ("ab", "abc", "ab cc ba"),
        ("aa bc", "abcd", "aa bc dd cb"),
        ("ab ba", "abc", "ab ba cc"),
        ("xa", "ab", "xa bb"),  # what it was on is no longer there
        ("ab bc ca", "abc", "ab bc ca"),
    ],
)
def test_every_gpu_has_its_place_when_one_moves(pairs: str, gpus: str, whole: str) -> None:
    """The driver wants all that a process could see, and none of them twice."""

    def read(text: str) -> list[tuple[bytes, bytes]]:
        return [(pair[0].encode(), pair[1].encode()) for pair in text.split()]

    assert whole_map(read(pairs), [gpu.encode() for gpu in gpus]) == read(whole)


def test_the_driver_is_told_by_the_real_bindings() -> None:
    """Their structures need no driver; which of their fields can be set is found out nowhere else."""
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    module = SimpleNamespace(**{name: getattr(bindings, name) for name in dir(bindings) if name.startswith("CU")})
    fake = FakeDriver(1)
    for name in ("CUuuid", "CUcheckpointGpuPair", "CUcheckpointRestoreArgs", "CUcheckpointLockArgs"):
        setattr(fake, name, getattr(module, name))
    suspender = over(fake)
    suspender.suspend([1], 1234)
    suspender.resume([1], [(OLD, NEW)])
    assert (fake.timeouts, fake.pairs) == ([1234], [(OLD, NEW), (NEW, OLD)])
    for name in ("CUcheckpointCheckpointArgs", "CUcheckpointUnlockArgs"):
        assert callable(getattr(bindings, name))
    assert [state.value for state in list(bindings.CUprocessState)[:4]] == [RUNNING, LOCKED, CHECKPOINTED, FAILED]
    known = {code.name for code in bindings.CUresult}
    assert known >= cuda_driver._LOST


def test_a_failure_of_the_bindings_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else is suspended needs it."""
    fake = FakeDriver(1)
    suspender = over(fake)
    suspender.suspend([1])
    monkeypatch.setattr(fake, "cuDeviceGetCount", lambda: 1 / 0)
    asked = json.dumps({"do": "resume", "pids": [1], "pairs": [[OLD.hex(), NEW.hex()]]})
    assert "ZeroDivisionError" in str(answer(suspender, asked)["failed"])
    assert answer(suspender, '{"do": "resume", "pids": [1]}') == {"done": [1]}


def test_a_driver_without_the_calls_says_so() -> None:
    """Too old, or bindings that do not know them."""
    with pytest.raises(Unsupported, match=r"CUDA 12\.4.*only since 12\.8"):
        over(FakeDriver(version=12_040))
    with pytest.raises(Unsupported, match="bindings"):
        Suspender(CudaDriver(SimpleNamespace()))


def test_a_question_a_line() -> None:
    """What cannot be read is answered, too; the program goes on."""
    suspender = over(FakeDriver(1))
    assert answer(suspender, '{"do": "suspend", "pids": [1, 2]}') == {"done": [1]}
    assert answer(suspender, '{"do": "resume", "pids": [1]}') == {"done": [1]}
    for bad in ("", "[]", "{}", '{"do": "dance", "pids": []}', '{"do": "suspend", "pids": ["x"]}'):
        assert "failed" in answer(suspender, bad)


def test_the_program_says_first_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or why it can nothing."""
    out = io.StringIO()
    monkeypatch.setattr(suspend, "open_driver", lambda: CudaDriver(FakeDriver(1)))
    assert main((), ['{"do": "suspend", "pids": [1]}'], out) == 0
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"ready": 13_000, "can_move": True},
        {"done": [1]},
    ]
    out = io.StringIO()
    monkeypatch.setattr(suspend, "open_driver", lambda: CudaDriver(FakeDriver(version=12_000)))
    assert main((), [], out) == 1
    assert "12.8" in out.getvalue()


SAYS = "import sys; print('ready', flush=True); [print({!r}, flush=True) for _ in sys.stdin]"


class AnyProcess(FakeDriver):
    """Whoever asks is a CUDA process."""

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[int, ...]:  # noqa: N802
        return 0, self.states.setdefault(pid, RUNNING)


@pytest.mark.parametrize(
    ("said", "version", "found"),
    [
        ("same", 13_000, Suspend.SAME_TYPE),
        ("same", 12_080, Suspend.SAME_DEVICE),
        ("other", 13_000, Suspend.NONE),
        ("same", 12_040, Suspend.NONE),
    ],
)
def test_the_probe_offers_what_it_has_seen_work(said: str, version: int, found: Suspend) -> None:
    """Memory that comes back changed is no success."""
    fake = AnyProcess(version=version)
    assert probe(make=lambda: over(fake), argv=(sys.executable, "-c", SAYS.format(said))).suspend is found
    if found is Suspend.SAME_TYPE:
        assert fake.pairs == [(OLD, NEW), (NEW, OLD)], "every GPU is named, and the process is on the other one"


def test_another_card_is_offered_only_where_one_of_the_model_was_seen_to_work() -> None:
    """By the driver's version alone it was promised; where it then failed, what had been parked was lost."""
    tiny = (sys.executable, "-c", SAYS.format("same"))
    fake = AnyProcess()
    fake.models = (b"one", b"other")
    assert probe(make=lambda: over(fake), argv=tiny).suspend is Suspend.SAME_DEVICE
    assert fake.pairs == []

    class DoesNotMove(AnyProcess):
        def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> tuple[int]:  # noqa: N802
            return (1,) if arguments.gpuPairs else super().cuCheckpointProcessRestore(pid, arguments)

    assert probe(make=lambda: over(DoesNotMove()), argv=tiny).suspend is Suspend.SAME_DEVICE


def test_a_card_on_which_it_fails_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first card could be full, or in MIG mode: then nothing was offered on any."""
    cards = ["GPU-" + "0" * 32, "GPU-" + NEW.hex()]
    full = "import os; os.environ['CUDA_VISIBLE_DEVICES'] == {!r} or exit(1); {}"
    tiny = (sys.executable, "-c", full.format(cards[1], SAYS.format("same")))
    fake = AnyProcess()
    assert probe(cards, lambda: over(fake), tiny).suspend is Suspend.SAME_TYPE
    assert fake.pairs == [(NEW, OLD), (OLD, NEW)]
    assert probe(cards[:1], lambda: over(fake), tiny).suspend is Suspend.NONE


@pytest.mark.parametrize(
    ("fake", "program", "why"),
    [
        (AnyProcess(), ("/no/such/program",), "the process for the trial could not be started (No such file"),
        (AnyProcess(), (sys.executable, "-c", ""), "the process for the trial could not use the card"),
        (
            FakeDriver(),
            (sys.executable, "-c", SAYS.format("same")),
            "the driver reported no process that uses the card",
        ),
        (AnyProcess(), (sys.executable, "-c", SAYS.format("other")), "its memory did not come back as it was"),
        (AnyProcess(version=12_040), (), "the driver speaks CUDA 12.4, and suspends processes only since 12.8"),
    ],
    ids=["no such program", "one that dies", "not to be locked", "changed memory", "an old driver"],
)
def test_a_probe_that_fails_offers_nothing_and_says_why(fake: Any, program: tuple[str, ...], why: str) -> None:
    found = probe(make=lambda: over(fake), argv=program)
    assert found.suspend is Suspend.NONE
    assert found.why.startswith(why)
