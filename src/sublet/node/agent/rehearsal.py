"""Rehearses cards before they are lent: uses, cleans and watches each once, in a process of its own.

    python -m sublet.node.agent.rehearsal GPU-1b4e28ba-… GPU-…

For each card a process is forked that opens the driver twice (NVML and CUDA), writes 2 MiB to the card, reads them
back, and looks whether NVML lists it under its own pid; a few at a time. The program loads what they need once, and
nothing of the driver's itself. It writes one ``Rehearsal`` as JSON in a line for each card. The office runs it in the
environment that its supervisor has, and lends no card on which it failed; ``sublet doctor --gpu`` shows every step.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sublet.devices.cuda_driver import LINGERS_S, CudaDriver, DeviceTaken, find_device, retain_context
from sublet.errors import GpuError, OutOfMemory, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.nvml import Library, Nvml
from sublet.values import MIB, TEXT_MAX
from sublet.wire.cards import VISIBLE
from sublet.wire.codec import dumps, loads
from sublet.wire.zygote import python_argv

if TYPE_CHECKING:
    from sublet.wire.orders import Inventory

PROGRAM: Final = "sublet.node.agent.rehearsal"
PIECE: Final = 2 * MIB
PATTERN: Final = 0x5A
REHEARSAL_S: Final = 90.0
"""Eight cards without persistence mode take some ten seconds to come up."""
AT_ONCE: Final = 4
_PR_SET_PDEATHSIG: Final = 1
ONE_PROCESS: Final = frozenset((1, 3))
"""Compute modes (exclusive thread, exclusive process) in which a second process is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalStep:
    """One step that succeeded."""

    name: str
    took_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What came of it on one card."""

    card: str
    steps: tuple[RehearsalStep, ...] = ()
    failed: str = ""
    """Why the card cannot be used, in a sentence; empty if it can, or if it was not tried."""
    do: str = ""
    busy: str = ""
    """Why nothing could be tried: others have the card, or all of its memory."""
    cuda: int = 0
    """The CUDA version of the driver: 13000."""
    shows_pids: bool = False
    """Whether NVML listed the program, under the pid that the program knows as its own."""
    compute_mode: int = -1
    persistence: int = -1
    draws: bool = False
    """Whether something draws on it."""


def rehearse(
    card: str,
    *,
    library: Library | None = None,
    driver: Callable[[], CudaDriver] | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Rehearsal:
    """Every step, in order, up to the first that fails."""
    if driver is None:  # loaded by the program alone: the office has no use for ctypes
        from sublet.devices.plain_cuda import open_plain_driver

        driver = open_plain_driver
    found, steps, began_ns = Rehearsal(card=card), list[RehearsalStep](), now_ns()

    def did(name: str) -> None:
        nonlocal began_ns
        steps.append(RehearsalStep(name=name, took_ns=now_ns() - began_ns))
        began_ns = now_ns()

    others = False
    try:
        nvml = Nvml.open(library)
        try:
            reading = nvml.read(card)
            if reading.failed is not None:
                raise reading.failed
            mode, persistence = nvml.modes(card)
            others = any(not process.draws for process in reading.processes)
            draws = any(process.draws for process in reading.processes)
            found = replace(found, compute_mode=mode, persistence=persistence, draws=draws)
            did("NVML")
            cuda = driver()
            found = replace(found, cuda=int(cuda("open", "cuDriverGetVersion")))
            did("CUDA")
            device = find_device(cuda, card)
            context = retain_context(cuda, "context", device, 0.0 if others else LINGERS_S)
            cuda("context", "cuCtxSetCurrent", context)
            did("context")
            _write_and_read(cuda)
            did("memory")
            pids = {process.pid for process in nvml.read(card).processes}
            found = replace(found, shows_pids=os.getpid() in pids)
            did("processes")
        finally:
            nvml.close()
    except SubletError as error:
        if others and isinstance(error, OutOfMemory | DeviceTaken):
            return replace(found, steps=tuple(steps), busy=error.message)
        return replace(found, steps=tuple(steps), failed=error.message, do=error.do or "")
    return replace(found, steps=tuple(steps))


def _write_and_read(cuda: CudaDriver) -> None:
    import ctypes

    address = cuda("memory", "cuMemAlloc", PIECE)
    try:
        cuda("memory", "cuMemsetD8", address, PATTERN, PIECE)
        cuda("memory", "cuCtxSynchronize")
        back = ctypes.create_string_buffer(PIECE)
        cuda("memory", "cuMemcpyDtoH", ctypes.addressof(back), address, PIECE)
    finally:
        cuda.says_no("cuMemFree", address)
    if back.raw != bytes([PATTERN]) * PIECE:
        raise GpuError(
            "what was written to its memory was not what was read", call="memory", do="Do not use this card."
        )


# ---- each card in a process of its own ----


@dataclass(slots=True)
class _Try:
    """A forked process that tries a card out."""

    card: str
    pid: int
    until_s: float
    said: bytes = b""


def rehearse_each(
    cards: Sequence[str], try_out: Callable[[str], Rehearsal] = rehearse, *, longest_s: float = REHEARSAL_S
) -> list[Rehearsal]:
    """Rehearse all cards, in this order. What a driver does to one card's process is reported for that card only."""
    waiting, running, found = deque(cards), dict[int, _Try](), dict[str, Rehearsal]()
    looks = select.poll()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            card = waiting.popleft()
            reading, pid = _forked(card, try_out)
            running[reading] = _Try(card, pid, time.monotonic() + longest_s)
            looks.register(reading, select.POLLIN)
        left_s = min(one.until_s for one in running.values()) - time.monotonic()
        ready = {reading for reading, _ in looks.poll(max(0, round(left_s * 1000) + 1))}
        for reading, one in tuple(running.items()):
            if reading in ready:
                piece = os.read(reading, 65_536)
                one.said += piece
                if piece:
                    continue
                found[one.card] = _came_of(one)
            elif time.monotonic() > one.until_s:
                os.kill(one.pid, signal.SIGKILL)  # not waited for: a driver may keep it for as long as it likes
                do = "See the kernel's log for what the driver is busy with."
                late = f"the driver did not answer in {longest_s:.0f} s"
                found[one.card] = Rehearsal(card=one.card, failed=late, do=do)
            else:
                continue
            looks.unregister(reading)
            os.close(reading)
            del running[reading]
    return [found[card] for card in cards]


def _forked(card: str, try_out: Callable[[str], Rehearsal]) -> tuple[int, int]:
    """Where its answer is read, and the process. A neighbour that is sick, or split, must not decide about this card;
    and only so a part is seen at all."""
    reading, writing = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(writing)
        return reading, pid
    try:
        os.close(reading)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)  # who reads what the program writes does not wait for a process that hangs
        _end_with(parent)
        os.environ[VISIBLE] = card
        os.write(writing, dumps(try_out(card)))
        os._exit(0)
    finally:
        os._exit(1)


def _end_with(parent: int) -> None:
    """The program may be ended while the driver keeps this process waiting."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _came_of(one: _Try) -> Rehearsal:
    """Of a process that has written all that it will ever write."""
    _, status = os.waitpid(one.pid, 0)
    with contextlib.suppress(SubletError):
        return loads(Rehearsal, one.said)
    code = os.waitstatus_to_exitcode(status)
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return Rehearsal(
        card=one.card, failed=f"the program that tried it out ended with {how}", do="See the kernel's log."
    )


# ---- from outside: what only the office needs is imported here ----


async def rehearse_all(cards: Sequence[str]) -> list[Rehearsal]:
    """By the program. Never raises for what a driver does."""
    import asyncio

    from sublet.node.agent.starting import supervisor_environment

    if not cards:
        return []
    argv, env = python_argv(sys.executable, PROGRAM, *cards), supervisor_environment()
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    said, why = b"", "it could not be tried out"
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=pipe, stderr=null, env=env)
    except OSError as error:
        why += f" ({error.strerror})"
    else:
        try:
            said, _ = await process.communicate()  # it has limits of its own
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    found = dict[str, Rehearsal]()
    for line in said.splitlines():
        with contextlib.suppress(SubletError):  # the program was ended while it wrote
            one = loads(Rehearsal, line)
            found[one.card] = one
    return [found.get(card) or Rehearsal(card=card, failed=why) for card in cards]


def offered(inventory: Inventory, tried: Collection[Rehearsal]) -> Inventory:
    """The inventory without the cards that failed; why the first of them did is on its label. Cards that let one
    process in at a time are marked."""
    from sublet.node.agent.inventory import TROUBLE_LABEL, card_of

    failed = {one.card: one for one in tried if one.failed}
    alone = {one.card for one in tried if one.compute_mode in ONE_PROCESS}
    devices = tuple(
        replace(device, one_process=device.one_process or card_of(device) in alone)
        for device in inventory.devices
        if card_of(device) not in failed
    )
    inventory = replace(inventory, devices=devices)
    if not failed:
        return inventory
    first = next(iter(failed.values()))
    labels = {TROUBLE_LABEL: f"{first.card}: {first.failed}"[:TEXT_MAX]} | inventory.labels
    return replace(inventory, labels=labels)


def shows_pids(tried: Collection[Rehearsal]) -> bool | None:
    """Whether pids of the driver are those of this process; None where no card could tell."""
    told = [one.shows_pids for one in tried if one.steps and not one.failed and not one.busy]
    return all(told) if told else None


def main(arguments: list[str]) -> int:
    """The program."""
    with contextlib.suppress(ImportError):  # then each card is told so
        import pynvml  # noqa: F401 - once for all of them
    for found in rehearse_each(arguments):
        sys.stdout.write(dumps(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
