"""Rehearses cards before they are lent: uses, cleans and watches each once, in a program of its own.

    python -m sublet.node.agent.rehearsal GPU-1b4e28ba-…

It opens the driver twice (NVML and CUDA), writes 2 MiB to the card, reads them back, and looks whether NVML lists it
under its own pid. It writes one ``Rehearsal`` as JSON. The office runs it in the environment that its supervisor has,
and lends no card on which it failed; ``sublet doctor --gpu`` shows every step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sublet.devices.cuda_driver import LINGERS_S, CudaDriver, DeviceTaken, find_device, retain_context
from sublet.errors import GpuError, OutOfMemory, SubletError
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
ONE_PROCESS: Final = frozenset((1, 3))
"""Compute modes (exclusive thread, exclusive process) in which a second process is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that succeeded."""

    name: str
    took_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What came of it on one card."""

    card: str
    steps: tuple[Step, ...] = ()
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
    found, steps, began_ns = Rehearsal(card=card), list[Step](), now_ns()

    def did(name: str) -> None:
        nonlocal began_ns
        steps.append(Step(name=name, took_ns=now_ns() - began_ns))
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


# ---- from outside: what only the office needs is imported here, since the program runs once for each card ----


async def rehearse_all(
    cards: Sequence[str], argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> list[Rehearsal]:
    """Each card in a process of its own, a few at a time. Never raises for what a driver does."""
    import asyncio

    from sublet.node.agent.starting import supervisor_environment

    slots = asyncio.Semaphore(AT_ONCE)
    program = tuple(argv) if argv is not None else python_argv(sys.executable, PROGRAM)
    given = supervisor_environment() if env is None else dict(env)

    async def one(card: str) -> Rehearsal:
        async with slots:
            # A neighbour that is sick, or split, must not decide about this card; and only so a part is seen at all.
            return await _run((*program, card), given | {VISIBLE: card}, card)

    return list(await asyncio.gather(*(one(card) for card in cards)))


async def _run(argv: Sequence[str], env: Mapping[str, str], card: str) -> Rehearsal:
    import asyncio

    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=pipe, stderr=null, env=env)
    except OSError as error:
        return Rehearsal(card=card, failed=f"it could not be tried out ({error.strerror})")
    try:
        said, _ = await asyncio.wait_for(process.communicate(), REHEARSAL_S)
        return loads(Rehearsal, said)
    except TimeoutError:
        do = "See the kernel's log for what the driver is busy with."
        return Rehearsal(card=card, failed=f"the driver did not answer in {REHEARSAL_S:.0f} s", do=do)
    except SubletError:
        status = process.returncode
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return Rehearsal(
            card=card, failed=f"the program that tried it out ended with {how}", do="See the kernel's log."
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


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
    sys.stdout.write(dumps(rehearse(arguments[0])).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
