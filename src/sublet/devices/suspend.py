"""Suspends processes off their GPU and resumes them through the driver: lock, checkpoint, restore, unlock.

The driver does the work inside the process that is suspended: a thread of its own copies device memory to the host and
closes every device file, while CUDA calls of the program wait. So the process must not stand still before it is
suspended, nor before it is resumed. What can fail is undone: of several processes of one guest all are suspended or
none is, since a partly suspended guest is of no use.

``main`` is the one long-lived program that does it for a supervisor, since a driver takes long to load and blocks
its caller. It reads one question per line and answers each with one line. ``probe`` tries the whole way with
a small process that finds its card as a guest does, and says what may be offered.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TextIO

from sublet.devices.cuda_driver import LINGERS_S, CudaDriver, DeviceTaken, dotted, open_driver, uuid_digits
from sublet.errors import GpuError, SubletError, Unsupported
from sublet.values import Suspend
from sublet.wire.cards import VISIBLE, prefer_cards

NEEDED: Final = 12_080
"""The CUDA version, 12.8, since which the driver has these calls."""
REMAPS: Final = 13_000
"""Since 13.0 it can put a process back on another GPU of the same type."""
LOCK_MS: Final = 10_000
"""How long the program's work on the device may take to come to an end. After that it is not suspended."""
NAME_MAX: Final = 256
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
"""``CUprocessState``."""
_UUID_BYTES: Final = 16


class SuspendFailed(GpuError):
    """It could not be taken off its device, and was put back as far as the driver does that; or it could not be put
    back, and is lost."""

    @property
    def kind(self) -> str:
        return GpuError.__name__


class ProcessLost(SuspendFailed):
    """And it is of no use any more: the driver failed in it, or could not put it back."""


class Suspender:
    """Over one driver."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        if not hasattr(driver.module, "cuCheckpointProcessLock"):
            raise Unsupported(
                "these bindings for CUDA have no calls to suspend a process", do="Install a newer sublet[gpu]."
            )
        self.version: Final = int(driver("suspend", "cuDriverGetVersion"))
        if self.version < NEEDED:
            raise Unsupported(
                f"the driver speaks CUDA {dotted(self.version)}, and suspends processes only since {dotted(NEEDED)}",
                do="Bring the driver up to date.",
            )

    @property
    def can_move(self) -> bool:
        """Whether the driver has the call that puts what is suspended on another device."""
        return self.version >= REMAPS

    def suspend(
        self, pids: Iterable[int], timeout_ms: int = LOCK_MS, groups: Iterable[Sequence[int]] = ()
    ) -> list[int]:
        """Take these processes off their devices, all or none; those that have none are left as they are. Returns
        which were suspended. ``groups``: processes of one program, of which only one may use a device (those that
        compute together may wait for one another, and then neither comes to a stand).

        Raises ``SuspendFailed``; then all of them were put back. ``ProcessLost``: one of them could not be, or the
        driver failed in it. A process that the driver ends meanwhile (NVIDIA promises nothing) is seen to end."""
        # Asked before the first lock: of processes that compute together, the driver answers nothing about one while
        # another is locked, not even its state.
        states = {pid: state for pid in pids if (state := self._state(pid)) is not None}
        for group in groups:
            if len(found := [pid for pid in group if pid in states]) > 1:
                raise SuspendFailed(
                    f"suspend: {len(found)} processes of one program ({found[0]}, {found[1]} …) use a device",
                    call="suspend",
                )
        done: list[int] = []
        try:
            for pid, state in states.items():
                done.append(pid)
                if state == RUNNING:
                    self._do(
                        "cuCheckpointProcessLock", pid, self._arguments("CUcheckpointLockArgs", timeoutMs=timeout_ms)
                    )
            for pid, state in states.items():
                if state != CHECKPOINTED:
                    self._do("cuCheckpointProcessCheckpoint", pid, self._arguments("CUcheckpointCheckpointArgs"))
        except SubletError as error:
            why = self._undone(done)
            kind = ProcessLost if why else SuspendFailed
            raise kind(f"suspend: {error.message}{why}", call="suspend") from error
        return list(states)

    def resume(
        self, pids: Iterable[int], pairs: Sequence[tuple[bytes, bytes]] = (), *, were_suspended: bool = True
    ) -> None:
        """Put them back, and let them go on. ``pairs`` says for each device they saw which one it is now, by UUID.
        ``were_suspended``: all of them were, so one that lives and that the driver does not report is not passed over:
        it would wait for ever. Raises ``SuspendFailed``: what could not be put back is lost."""
        if pairs and not self.can_move:
            raise SuspendFailed(
                f"resume: a driver of CUDA {dotted(self.version)} puts a process back only where it was", call="resume"
            )
        found = {pid: self._state(pid) for pid in pids}
        states = {pid: state for pid, state in found.items() if state is not None}
        unknown = [pid for pid, state in found.items() if state is None and were_suspended and _lives(pid)]
        if unknown:
            raise SuspendFailed(
                f"resume: the driver does not report process {unknown[0]}, which is suspended", call="resume"
            )
        try:
            for pid, state in states.items():
                if state == CHECKPOINTED:
                    self._do("cuCheckpointProcessRestore", pid, self._restore_arguments(pairs))
            for pid, state in states.items():
                if state != RUNNING:
                    self._do("cuCheckpointProcessUnlock", pid, self._arguments("CUcheckpointUnlockArgs"))
        except SubletError as error:
            raise SuspendFailed(f"resume: {error.message}", call="resume") from error

    def _undone(self, pids: Iterable[int]) -> str:
        """Back to where they were; what to say of those that are not."""
        try:
            self.resume(pids)
        except SubletError as error:
            return f"; and it could not be undone: {error.message}"
        return ""

    def _state(self, pid: int) -> int | None:
        """None: it does not use CUDA, or is gone."""
        state = self._driver.call_or_none("cuCheckpointProcessGetState", pid)
        if state is None:
            return None
        if int(state) == FAILED:
            raise ProcessLost(f"suspend: process {pid} is of no use any more, says the driver", call="suspend")
        return int(state)

    def _do(self, name: str, pid: int, arguments: Any) -> None:
        self._driver("suspend", name, pid, arguments)

    def _arguments(self, name: str, **values: object) -> Any:
        made = getattr(self._driver.module, name)()
        for field, value in values.items():
            setattr(made, field, value)
        return made

    def _restore_arguments(self, pairs: Sequence[tuple[bytes, bytes]]) -> Any:
        if not pairs:
            return self._arguments("CUcheckpointRestoreArgs")
        made = [
            self._arguments("CUcheckpointGpuPair", oldUuid=self._uuid(old), newUuid=self._uuid(new))
            for old, new in whole_map(pairs, self._gpus())
        ]
        return self._arguments("CUcheckpointRestoreArgs", gpuPairs=made, gpuPairsCount=len(made))

    def same_model_pairs(self, card: str = "") -> list[tuple[bytes, bytes]]:
        """This GPU (the first, if none is named) with each other one of its model, by UUID."""
        gpus = self._gpus()
        models = [self._driver("probe", "cuDeviceGetName", NAME_MAX, ordinal) for ordinal in range(len(gpus))]
        own = bytes.fromhex(uuid_digits(card)) if card else gpus[0]
        if own not in gpus:
            return []
        model = models[gpus.index(own)]
        return [(own, gpu) for gpu, name in zip(gpus, models, strict=True) if name == model and gpu != own]

    def _gpus(self) -> list[bytes]:
        """The UUIDs of all GPUs that this process sees."""
        count = self._driver("resume", "cuDeviceGetCount")
        devices = [self._driver("resume", "cuDeviceGet", ordinal) for ordinal in range(count)]
        return [bytes(self._driver("resume", "cuDeviceGetUuid", device).bytes) for device in devices]

    def _uuid(self, raw: bytes) -> Any:
        """The bindings only read ``bytes`` of it; so it is written where it lies."""
        made = self._driver.module.CUuuid()
        ctypes.memmove(made.getPtr(), raw, _UUID_BYTES)
        return made


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def whole_map(pairs: Sequence[tuple[bytes, bytes]], gpus: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pairs, and one more for each GPU that is not in them: the driver wants every one that the process could see,
    each as the new one of one pair only. One that is displaced gets a place that became free."""
    became = dict(pairs)
    free = [gpu for gpu in gpus if gpu not in became.values()]
    others = [gpu for gpu in gpus if gpu not in became]
    for gpu in [gpu for gpu in others if gpu in free]:
        became[gpu] = gpu
        free.remove(gpu)
    for gpu in others:
        if gpu not in became and free:
            became[gpu] = free.pop(0)
    return list(became.items())


# ---- the program ----


def answer(suspender: Suspender, line: str) -> dict[str, object]:
    """What one question comes to."""
    try:
        question = json.loads(line)
        pids = [int(pid) for pid in question["pids"]]
        if question["do"] == "suspend":
            groups = question.get("groups", ())
            return {"done": suspender.suspend(pids, int(question.get("timeout_ms", LOCK_MS)), groups)}
        if question["do"] == "resume":
            pairs = [(bytes.fromhex(old), bytes.fromhex(new)) for old, new in question.get("pairs", ())]
            suspender.resume(pids, pairs, were_suspended=not question.get("undo", False))
            return {"done": pids}
        return {"failed": f"{question['do']!r} is nothing that can be asked"}
    except ProcessLost as error:
        return {"failed": error.message, "stuck": True}
    except SubletError as error:
        return {"failed": error.message}
    except (ValueError, KeyError, TypeError) as error:
        return {"failed": f"the question cannot be read ({type(error).__name__})"}
    except Exception as error:  # noqa: BLE001 - without this program no guest could be resumed
        return {"failed": f"the bindings for CUDA failed ({type(error).__name__}: {error})"}


def main(arguments: Sequence[str] = (), lines: Iterable[str] | None = None, out: TextIO | None = None) -> int:
    """Answer questions until there are no more; or, with ``--probe CARD,CARD``, only what may be offered of these cards
    of one model. What follows these two is a command that runs Python code, the last argument, where a guest would."""
    out = out or sys.stdout
    if arguments and arguments[0] == "--probe":
        cards, argv = arguments[1].split(","), tuple(arguments[2:])
        found = probe(cards, argv=(*argv, TINY) if argv else PLAINLY)
        print(json.dumps({"suspend": found.suspend.value, "why": found.why}), file=out, flush=True)
        return 0
    try:
        suspender = Suspender(open_driver())
    except SubletError as error:
        print(json.dumps({"failed": error.message}), file=out, flush=True)
        return 1
    print(json.dumps({"ready": suspender.version, "can_move": suspender.can_move}), file=out, flush=True)
    for line in sys.stdin if lines is None else lines:
        print(json.dumps(answer(suspender, line)), file=out, flush=True)
    return 0


# ---- the probe ----

TINY: Final = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)
from sublet.devices.cuda_driver import retain_context
from sublet.devices.plain_cuda import open_plain_driver
driver = open_plain_driver()
context = retain_context(driver, "probe", driver("probe", "cuDeviceGet", 0))
driver("probe", "cuCtxSetCurrent", context)
memory = driver("probe", "cuMemAlloc", 1 << 20)
driver("probe", "cuMemsetD8", memory, 0x5A, 1 << 20)
driver("probe", "cuCtxSynchronize")
print("ready", flush=True)
for _ in sys.stdin:
    back = ctypes.create_string_buffer(1 << 20)
    driver("probe", "cuMemcpyDtoH", ctypes.addressof(back), memory, 1 << 20)
    print("same" if back.raw == bytes([0x5A]) * (1 << 20) else "other", flush=True)
"""
"""Fills a piece of device memory, waits, and says each time whether it is still what it was. It ends with its parent,
since a process that is left locked would have its part of a card for good."""


PLAINLY: Final = (sys.executable, "-c", TINY)
TRIED_MAX: Final = 3
"""Cards of one model that are tried until it works on one: others may have all the memory of the first."""


class Probed(NamedTuple):
    """What may be offered."""

    suspend: Suspend
    why: str
    """Why no more than that: what failed last. Empty if everything was seen to work, or the rest was not tried."""


def probe(
    cards: Sequence[str] = ("",), make: Callable[[], Suspender] | None = None, argv: Sequence[str] = PLAINLY
) -> Probed:
    """Suspend and resume a small process that has one of these cards of one model first, as a guest has that of its
    lease; where it was, and on another of the model. Only what was seen to work is the answer, whatever goes wrong."""
    try:
        suspender = make() if make is not None else Suspender(open_driver())
    except SubletError as error:
        return Probed(Suspend.NONE, error.message)
    why = ""
    for card in cards[:TRIED_MAX]:
        if why := _tried(suspender, argv, card):
            continue
        try:
            twins = suspender.same_model_pairs(card)[:TRIED_MAX] if suspender.can_move else []
        except SubletError as error:
            return Probed(Suspend.SAME_DEVICE, error.message)
        for pair in twins:
            if not (why := _tried(suspender, argv, card, (pair, pair[::-1]))):
                return Probed(Suspend.SAME_TYPE, "")
        return Probed(Suspend.SAME_DEVICE, why)
    return Probed(Suspend.NONE, why)


def _tried(suspender: Suspender, argv: Sequence[str], card: str, pairs: Sequence[tuple[bytes, bytes]] = ()) -> str:
    """Why a small process did not go there and back; empty if it did. A process that has ended may keep the other card
    for a moment; what could not be resumed there is of no use any more, so it is tried with a new one."""
    until_s = time.monotonic() + LINGERS_S
    env = {**os.environ, VISIBLE: prefer_cards([card])} if card else None
    while True:
        try:
            tiny = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            return f"the process for the trial could not be started ({error.strerror})"
        with tiny:
            try:
                assert tiny.stdout is not None
                if tiny.stdout.readline().strip() != "ready":
                    return "the process for the trial could not use the card"
                return _there_and_back(suspender, tiny, pairs)
            except SubletError as error:
                if not isinstance(error.__cause__, DeviceTaken) or time.monotonic() > until_s:
                    return error.message
            except (OSError, ValueError) as error:
                return f"the process for the trial ended ({type(error).__name__})"
            finally:
                tiny.kill()


def _there_and_back(
    suspender: Suspender, tiny: subprocess.Popen[str], pairs: Sequence[tuple[bytes, bytes]] = ()
) -> str:
    """Why not; empty if it did."""
    assert tiny.stdin is not None
    assert tiny.stdout is not None
    done = suspender.suspend(_below(tiny.pid))
    if len(done) != 1:
        return "the driver reported no process that uses the card"
    suspender.resume(done, pairs)
    tiny.stdin.write("\n")
    tiny.stdin.flush()
    if tiny.stdout.readline().strip() != "same":
        return "its memory did not come back as it was"
    return ""


def _below(root: int) -> list[int]:
    """A process and all that it started: behind walls, that is not the one that uses the card."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
