"""Rehearses cards before they are lent: uses, cleans and watches each once, in processes of its own.

    python -m sublet.node.agent.rehearsal '{"is": "LeaseCaps"}' GPU-1b4e28ba-…,nvidia0 GPU-…

For each card, a few at a time: the program that cleans it after a lease runs, as a supervisor has it run, and
overwrites 2 MiB. A process opens the driver twice, by NVML and by CUDA. Then a small guest of each profile, in a
control group with the limits of a lease under these caps, writes 2 MiB and reads them back: one of tenant local, and,
where the card's own device files (named behind its UUID) are here, one behind the walls of other tenants. While the
first runs, NVML is asked whether it lists its pid. The program writes one ``Rehearsal`` as JSON in a line for each
card. The office runs it in the environment that its supervisor has, and lends no card on which it failed; ``sublet
doctor --gpu`` shows every step.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sublet.devices.cuda_driver import (
    LINGERS_S,
    CudaDriver,
    DeviceTaken,
    driver_error,
    find_device,
    uuid_digits,
)
from sublet.errors import GpuError, OutOfMemory, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.nvml import Library, Nvml, NvmlFailed
from sublet.node.agent.scope import scope_prefix
from sublet.values import MIB, TEXT_MAX
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import NVML, VISIBLE, CardFound, GuestTrial, device_nodes
from sublet.wire.codec import dumps, loads
from sublet.wire.zygote import finds_packages, python_argv, run_here

if TYPE_CHECKING:
    from sublet.wire.orders import Inventory

PROGRAM: Final = "sublet.node.agent.rehearsal"
TRIAL: Final = "sublet.node.sandbox.trial"
"""What starts guests: a program of the node's."""
CLEANING: Final = "sublet.node.agent.clean_card"
PIECE: Final = 2 * MIB
PATTERN: Final = 0x5A
REHEARSAL_S: Final = 90.0
"""Eight cards without persistence mode take some ten seconds to come up."""
AT_ONCE: Final = 4
_CLEAN_AGAIN_S: Final = 0.2
_GONE_EVERY_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
PROHIBITED: Final = 2
"""The compute mode in which no process may use a card."""
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
    """Whether NVML listed a guest under its pid."""
    compute_mode: int = -1
    persistence: int = -1
    draws: bool = False
    """Whether something draws on it."""
    others: bool = False
    """Whether others compute on it."""
    unseen: bool = False
    """Whether memory of it was in use by none that is seen: others, or a process that has just ended."""
    walled: str = ""
    """Why a guest of a tenant other than local, for whom the card's device files are here, could not use it."""


def rehearse(
    card: str,
    *,
    library: Library | None = None,
    driver: Callable[[], CudaDriver] | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Rehearsal:
    """What needs no memory of the card: whether both ways to the driver show it, and in which state."""
    # Loaded by the program alone: the office has no use for ctypes.
    from sublet.devices.plain_cuda import open_plain_driver
    from sublet.node.agent.clean_card import AT_REST

    driver = driver or open_plain_driver
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
            unseen = not reading.processes and (reading.used or 0) > AT_REST
            found = replace(
                found, compute_mode=mode, persistence=persistence, draws=draws, others=others, unseen=unseen
            )
            if mode == PROHIBITED:
                raise GpuError(
                    "its compute mode is PROHIBITED: to every program it is busy or unavailable",
                    call="open",
                    do="Allow programs (`nvidia-smi -c DEFAULT` as root), then start the office again.",
                )
            did("NVML")
            cuda = driver()
            found = replace(found, cuda=int(cuda("open", "cuDriverGetVersion")))
            find_device(cuda, card)
            did("CUDA")
        finally:
            nvml.close()
    except SubletError as error:
        return replace(found, steps=tuple(steps), failed=error.message, do=error.do or "")
    return replace(found, steps=tuple(steps))


# ---- as it is lent: the program that cleans it, and guests ----

GUEST: Final = """
import ctypes, os, sys, time
def end(why, status=1):
    print(why, flush=True)
    sys.exit(status)
def ask(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        end(f"{name} {code} {(text.value or b'the driver failed').decode()}", 2)
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    end(error)
card, uuid, context = ctypes.c_int(), ctypes.create_string_buffer(16), ctypes.c_void_p()
memory, (size, byte), until_s = ctypes.c_uint64(), map(int, sys.argv[2:4]), time.monotonic() + float(sys.argv[4])
ask("cuInit", 0)
ask("cuDeviceGet", ctypes.byref(card), 0)
ask("cuDeviceGetUuid_v2", uuid, card)
if uuid.raw.hex() != sys.argv[1]:
    end("the first card that it sees is another one")
while cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), card) and time.monotonic() < until_s:
    time.sleep(0.1)  # a process that has ended keeps it for a moment
if not context:
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), card)
ask("cuCtxSetCurrent", context)
ask("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
ask("cuMemsetD8_v2", memory, byte, ctypes.c_size_t(size))
back = ctypes.create_string_buffer(size)
ask("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(size))
if back.raw != bytes([byte]) * size:
    end("what was written to its memory was not what was read")
print("there", os.getpid(), flush=True)
sys.stdin.read()
"""
"""A guest that starts at once: it loads no packages, only the driver's library. It stays until its input ends. It exits
with 2 for an error of the driver's."""
PID_PREFIX: Final = b"there "
NO_NODES: Final = "its device files cannot be found, so it would see no GPU"
_DRIVERS_ERROR: Final = 2
_DO_LOOK: Final = "Look whether LD_LIBRARY_PATH leads to the driver's libraries, and who may open /dev/nvidia*."


@dataclass(frozen=True, slots=True, kw_only=True)
class _GuestResult:
    """What came of a guest."""

    failed: SubletError | None
    is_taken: bool
    """Whether it failed because other processes have the card, or all of its memory."""
    took_ns: int


def rehearse_as_lent(card: str, nodes: Sequence[str] = (), starter: GuestStarter | None = None) -> Rehearsal:
    """All that happens with a card that is lent. The cleaning comes first, on a card that is at rest: after guests it
    would wait until what they had there is gone. ``nodes``: the card's own device files."""
    os.environ.pop(VISIBLE, None)  # a supervisor has none, and guests are given theirs
    cleaned, took_ns = _cleaned(card)
    one = _Try(card, *_forked(card, rehearse))
    with os.fdopen(one.reading, "rb") as file:
        one.output = file.read()
    found = _came_of(one)
    if found.failed or found.busy:
        return found
    until_s = time.monotonic() + LINGERS_S
    while cleaned.left and time.monotonic() < until_s:
        time.sleep(_CLEAN_AGAIN_S)
        cleaned, took_ns = _cleaned(card)
    why = cleaned.failed or cleaned.left
    if why and (found.others or found.unseen) and not cleaned.failed:
        return replace(found, busy=why)
    if why:
        do = "What cleans a card runs in the supervisor: it must find there what the office finds (`sublet doctor`)."
        return replace(found, failed=f"it could not be cleaned as after a lease: {why}", do=do)
    found = _with_step(found, "cleaning", took_ns)
    starter = starter or GuestStarter(LeaseCaps())
    wait_s = 0.0 if found.others else LINGERS_S
    pids = set[int]()

    def watch(pid: int) -> None:
        nvml = Nvml.open()
        try:
            pids.update({pid} & {process.pid for process in nvml.read(card).processes})
        finally:
            nvml.close()

    try:
        guest = _guest(starter, card, "local", nodes, wait_s, watch)
    except SubletError as error:
        return replace(found, failed=error.message, do=error.do or "")
    if guest.failed is not None and guest.is_taken and found.others:
        return replace(found, busy=f"a guest of tenant local found it taken: {guest.failed.message}")
    if guest.failed is not None:
        failed = f"a guest of tenant local could not use it: {guest.failed.message}"
        return replace(found, failed=failed, do=guest.failed.do or _DO_LOOK)
    found = replace(_with_step(found, "guest", guest.took_ns), shows_pids=bool(pids))
    if not device_nodes([nodes]):
        return replace(found, walled=NO_NODES)
    guest = _guest(starter, card, "tenant", nodes, wait_s)
    if guest.is_taken and found.others:
        return found
    if guest.failed is not None:
        return replace(found, walled=guest.failed.message)
    return _with_step(found, "guest of a tenant", guest.took_ns)


def _with_step(found: Rehearsal, name: str, took_ns: int) -> Rehearsal:
    return replace(found, steps=(*found.steps, RehearsalStep(name=name, took_ns=took_ns)))


def _cleaned(card: str) -> tuple[CardFound, int]:
    """What the cleaning program reports of this card, and how long it took. Processes that use the card may stay."""
    began_ns = time.monotonic_ns()
    since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    arguments = (card, "--scrub", "--since", str(since_ns), "--beside", "1", "--most", str(PIECE))
    reading, writing = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            _end_with(parent)
            os.write(writing, run_here(CLEANING, arguments, writing, needed=NVML).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    output, code = _read_to_end(reading, pid)
    try:
        cleaned = loads(CardFound, output)
    except SubletError:
        cleaned = CardFound(failed=f"the program for it ended with {_exit_in_words(code)}")
    if not cleaned.failed and not cleaned.left and not cleaned.scrubbed_bytes:
        cleaned = CardFound(left="no memory of it could be had")
    return cleaned, time.monotonic_ns() - began_ns


class GuestStarter:
    """The program that starts guests, for this process and its forks. It is begun like a supervisor, and ends when all
    of them have. ``caps``: those that leases will have."""

    def __init__(self, caps: LeaseCaps) -> None:
        self._caps = caps
        argv = python_argv(sys.executable, TRIAL, "--serve", options=("-I", "-S"))
        scope = scope_prefix(os.environ)
        if scope:
            ready, says = os.pipe()
            self._begin([*scope, *argv], says)
            os.close(says)
            with os.fdopen(ready, "rb") as file:
                if file.read(1):
                    return  # else there was no scope to be had
        null = os.open(os.devnull, os.O_WRONLY)
        self._begin(argv, null)
        os.close(null)

    def _begin(self, argv: Sequence[str], out: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        streams = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, out, 1)]
        os.posix_spawn(argv[0], list(argv), os.environ, file_actions=streams)
        theirs.close()

    def run(self, trial: GuestTrial, watch: Callable[[int], None] | None) -> tuple[int, str]:
        """The exit status of a guest, and what it said last. ``watch`` is told its pid while it has memory there."""
        (their_in, our_in), (our_out, their_out), (status_fd, tells) = os.pipe(), os.pipe(), os.pipe()
        refused = b""
        try:
            socket.send_fds(self._socket, [dumps(replace(trial, caps=self._caps))], [their_in, their_out, tells])
        except OSError:
            refused = b"the program that starts guests has ended"
        for fd in (their_in, their_out, tells):
            os.close(fd)
        with os.fdopen(our_out, "rb") as file, os.fdopen(status_fd, "rb") as status:
            try:
                output = file.readline()
                if output.startswith(PID_PREFIX) and watch is not None:
                    watch(int(output.removeprefix(PID_PREFIX)))
            finally:
                os.close(our_in)
            output += file.read() or refused
            return int(status.read() or 1), output.decode(errors="replace").strip()


def _guest(
    starter: GuestStarter,
    card: str,
    profile: str,
    nodes: Sequence[str],
    wait_s: float,
    watch: Callable[[int], None] | None = None,
) -> _GuestResult:
    """A guest of this profile with this card. ``wait_s``: for so long others may still have the card."""
    began_ns = time.monotonic_ns()
    words = (uuid_digits(card), str(PIECE), str(PATTERN), str(wait_s))
    trial = GuestTrial(profile=profile, card=card, nodes=tuple(nodes), code=GUEST, words=words)
    status, output = starter.run(trial, watch)
    failed: SubletError | None = None
    if status == _DRIVERS_ERROR:
        name, code, in_words = output.split(" ", 2)
        failed = driver_error(name, int(code), code, in_words)
    elif status:
        failed = GpuError(output or f"it ended with {_exit_in_words(status)}", call="guest", do=_DO_LOOK)
    is_taken = isinstance(failed, OutOfMemory | DeviceTaken)
    return _GuestResult(failed=failed, is_taken=is_taken, took_ns=time.monotonic_ns() - began_ns)


def _read_to_end(reading: int, pid: int) -> tuple[bytes, int]:
    """All that a child writes, and its exit status."""
    with os.fdopen(reading, "rb") as file:
        output = file.read()
    return output, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _exit_in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


# ---- each card in a process of its own ----


@dataclass(slots=True)
class _Try:
    """A forked process that tries a card out."""

    card: str
    reading: int
    """Where its answer is read."""
    pid: int
    until_s: float = 0.0
    output: bytes = b""


def rehearse_each(
    cards: Sequence[str], try_out: Callable[[str], Rehearsal] = rehearse_as_lent, *, longest_s: float = REHEARSAL_S
) -> list[Rehearsal]:
    """Rehearse all cards, in this order. What a driver does to one card's process is reported for that card only."""
    waiting, running, found = deque(cards), dict[int, _Try](), dict[str, Rehearsal]()
    looks = select.poll()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            card = waiting.popleft()
            one = _Try(card, *_forked(card, try_out), time.monotonic() + longest_s)
            running[one.reading] = one
            looks.register(one.reading, select.POLLIN)
        left_s = min(one.until_s for one in running.values()) - time.monotonic()
        ready = {reading for reading, _ in looks.poll(max(0, round(left_s * 1000) + 1))}
        for reading, one in tuple(running.items()):
            if reading in ready:
                piece = os.read(reading, 65_536)
                one.output += piece
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
        os.dup2(null, 1)  # the reader of this program's output does not wait for a process that hangs
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
        return loads(Rehearsal, one.output)
    how = _exit_in_words(os.waitstatus_to_exitcode(status))
    return Rehearsal(
        card=one.card, failed=f"the program that tried it out ended with {how}", do="See the kernel's log."
    )


# ---- from outside: what only the office needs is imported here ----


async def rehearse_all(cards: Mapping[str, Sequence[str]], caps: LeaseCaps) -> list[Rehearsal]:
    """By the program: cards with their own device files. ``caps``: those of leases. Never raises for what a driver
    does."""
    import asyncio

    from sublet.node.agent.starting import supervisor_environment

    if not cards:
        return []
    words = (",".join([card, *nodes]) for card, nodes in cards.items())
    # Begun like a supervisor, which runs what cleans a card.
    argv = python_argv(sys.executable, PROGRAM, dumps(caps).decode(), *words, options=("-I", "-S"))
    env = supervisor_environment()
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    output, why = b"", "it could not be tried out"
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=null, stdout=pipe, stderr=null, env=env)
    except OSError as error:
        why += f" ({error.strerror})"
    else:
        try:
            output, _ = await process.communicate()  # it has limits of its own
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    found = dict[str, Rehearsal]()
    for line in output.splitlines():
        with contextlib.suppress(SubletError):  # the program was ended while it wrote
            one = loads(Rehearsal, line)
            found[one.card] = one
    return [found.get(card) or Rehearsal(card=card, failed=why) for card in cards]


def in_use(cards: Collection[str]) -> dict[str, int]:
    """Bytes of each card that are in use, where the driver answers. To be asked before cards are tried out, for
    ``await_gone``."""
    try:
        nvml = Nvml.open()
    except NvmlFailed:
        return {}
    try:
        return {card: nvml.read(card).used or 0 for card in cards}
    finally:
        nvml.close()


def await_gone(before: Mapping[str, int]) -> None:
    """Wait until the last processes that tried these cards out have left them, which they may do a moment after they
    have ended. A card that lets one process in would be found taken by the program that comes next."""
    if not before:
        return
    from sublet.node.agent.clean_card import AT_REST

    until_s = time.monotonic() + LINGERS_S
    while before and time.monotonic() < until_s:
        now = in_use(before)
        before = {card: used for card, used in before.items() if now.get(card, 0) > max(used, AT_REST)}
        if before:
            time.sleep(_GONE_EVERY_S)


def offered(inventory: Inventory, tried: Collection[Rehearsal]) -> Inventory:
    """The inventory without the cards that failed; why the first of them did is on its label. Cards that let one
    process in at a time are marked, and those that guests of tenants other than local cannot use."""
    from sublet.node.agent.inventory import TROUBLE_LABEL, card_of

    failed = {one.card: one for one in tried if one.failed}
    alone = {one.card for one in tried if one.compute_mode in ONE_PROCESS}
    walled = {one.card: one.walled[:TEXT_MAX] for one in tried}
    devices = tuple(
        replace(
            device,
            one_process=device.one_process or card_of(device) in alone,
            walled_trouble=walled.get(card_of(device), device.walled_trouble),
        )
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
    answers = [one.shows_pids for one in tried if one.steps and not one.failed and not one.busy]
    return all(answers) if answers else None


def main(arguments: list[str]) -> int:
    """The program."""
    import sublet.node.agent.clean_card  # noqa: F401 - once for all of them

    if not finds_packages(NVML) and sys.flags.no_site:  # as in a supervisor; with ``site`` too each card is told so
        argv = python_argv(sys.executable, PROGRAM, *arguments)
        os.execv(argv[0], argv)
    caps, *words = arguments
    cards = {card: nodes for card, *nodes in (word.split(",") for word in words)}
    starter = GuestStarter(loads(LeaseCaps, caps.encode()))
    for found in rehearse_each(list(cards), lambda card: rehearse_as_lent(card, cards[card], starter)):
        sys.stdout.write(dumps(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
