"""Checks and scrubs a card between two leases, in a short-lived program: ``python -m sublet.node.agent.clean_card``.

    GPU-1b4e28ba-… --look                       what it is set to
    GPU-1b4e28ba-… --scrub --settings '…' --since NS    no process on it, memory idle, settings back, memory overwritten

``--since`` is when the card was lent (nanoseconds of CLOCK_BOOTTIME). What drew on a screen with it before that still
does, and an MPS server serves; neither is what the lease has left. ``--beside 1``: nor is any other process of before.
``--sees 1``: the pids of the driver are those of this machine, as was found when the card was tried out.
``--most BYTES``: a rehearsal, on a card that no lease has had: no more than that is overwritten.

It writes one ``CardFound`` as JSON. A process of its own, because a driver may never answer, and because a process
that has used CUDA keeps some of the card's memory until it ends: this one ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from sublet.devices.cuda_driver import CudaDriver, DeviceTaken, find_device
from sublet.devices.plain_cuda import open_plain_driver
from sublet.errors import GpuError, OutOfMemory, SubletError
from sublet.node.agent.nvml import (
    CARD_BROKEN,
    MPS_SERVER,
    CardReading,
    Library,
    Nvml,
    NvmlFailed,
    UsedBy,
    sees_all_processes,
    who_is,
)
from sublet.values import MIB, NS_PER_S, format_size
from sublet.wire.cards import VISIBLE, CardFound
from sublet.wire.codec import dumps
from sublet.wire.open_files import handed_on

AT_REST: Final = 64 * MIB
"""In use beyond what an idle card uses: so much may be the driver's own, and no more."""
STEP: Final = 16 * MIB
REST_STEP: Final = 8 * MIB
"""In use beyond what was when the card was last clean: more is looked at again, since it may be of an ended process."""
STILL_LOOKS: Final = 5
STILL_S: Final = 0.2
"""Where the driver does not tell whose memory is in use, it must not become less for so many looks, so far apart."""
DRAWN: Final = 512 * MIB
"""Taken last, and for a moment, where something draws: a desktop that gets no memory ends."""
PIECES: Final = (1024 * MIB, 64 * MIB, 2 * MIB)
"""In what pieces the memory is taken to be overwritten: the largest that can be had, then smaller ones."""
SETTINGS: Final = {
    "compute mode": ("nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"),
    "persistence mode": ("nvmlDeviceGetPersistenceMode", "nvmlDeviceSetPersistenceMode"),
    "power limit": ("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceSetPowerManagementLimit"),
}
"""What a guest with the right to it may have changed, and how it is asked and set."""
_NO_ANSWER: Final = -1


def read_settings(uuid: str, library: Library | None = None) -> CardFound:
    """What it is set to. Settings of the card itself, also where it is lent in instances."""
    try:
        return CardFound(settings=json.dumps(_settings(uuid, library)))
    except NvmlFailed as failed:
        return CardFound(failed=failed.message)


def clean(
    uuid: str,
    settings: str = "",
    since_ns: int = 0,
    *,
    rest: int = 0,
    beside: bool = False,
    most: int = 0,
    library: Library | None = None,
    driver: Callable[[], CudaDriver] = open_plain_driver,
    now_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], object] = time.sleep,
    sees_processes: bool | None = None,
    node: str | None = None,
) -> CardFound:
    """Every step, in order; the first that does not succeed is the answer. ``rest``: bytes that were in use when the
    card was last seen clean. ``most``: bytes that are overwritten at most; 0: all that can be had."""
    try:
        sees_processes = sees_all_processes() if sees_processes is None else sees_processes

        def is_others(process: UsedBy) -> bool:
            return (beside or _stays(process)) and _is_older(process.pid, since_ns)

        looks = 1 if most else STILL_LOOKS
        left, draws, in_use = _find_remaining(uuid, library, sees_processes, is_others, sleep, rest, looks)
        left = left or _handed_on(_node(uuid, library) if node is None else node)
        if left:
            return CardFound(left=left)
        note = _set_back(uuid, json.loads(settings) if settings else {}, library)
    except NvmlFailed as failed:
        if failed.code in CARD_BROKEN:
            return CardFound(failed=failed.message, is_hard=True)
        return CardFound(left=failed.message)  # a driver may be loaded anew, or answer late: it is asked again
    began_ns = now_ns()
    try:
        opened = driver()
    except SubletError as error:  # what is missing there is no fault of the card
        return CardFound(left=f"its memory could not be overwritten ({error.message})")
    try:
        count = scrub(uuid, opened, spare=DRAWN if draws else 0, most=most)
    except (DeviceTaken, OutOfMemory) as error:  # by one that NVML does not list, such as a process that just ended
        return CardFound(left=f"its memory could not be overwritten ({error.message})")
    except SubletError as error:
        return CardFound(failed=f"its memory could not be overwritten ({error.message})", is_hard=True)
    return CardFound(scrubbed_bytes=count, scrub_ns=now_ns() - began_ns, note=note, in_use=in_use)


def scrub(uuid: str, driver: CudaDriver, spare: int = 0, most: int = 0) -> int:
    """Overwrite all memory of the card that can be had, or ``most`` of it, the last ``spare`` bytes when the rest is
    done (others may need some meanwhile); how much that was. Raises if that is too little."""
    device = find_device(driver, uuid)
    context = driver("scrub", "cuDevicePrimaryCtxRetain", device)
    try:
        driver("scrub", "cuCtxSetCurrent", context)
        free, _ = driver("scrub", "cuMemGetInfo")
        free = min(free, most) if most else free
        taken: list[tuple[int, int]] = []
        count = 0
        refused: SubletError | None = None
        for bound in sorted({max(0, free - spare), free}):
            begun = len(taken)
            for size in PIECES:
                # No more than was free: some drivers go on in the memory of the host when the card's is used up.
                while count + size <= bound:
                    try:
                        address = driver("scrub", "cuMemAlloc", size)
                    except OutOfMemory:
                        break
                    except SubletError as error:  # smaller pieces may come to all of it
                        refused = error
                        break
                    taken.append((int(address), size))
                    count += size
            for address, size in taken[begun:]:
                driver("scrub", "cuMemsetD8", address, 0, size)
            driver("scrub", "cuCtxSynchronize")
        for address, _ in taken:
            driver("scrub", "cuMemFree", address)
    finally:
        driver.call_or_none("cuDevicePrimaryCtxRelease", device)
    if refused is not None and free - count >= PIECES[-1]:
        raise refused
    if free - count > 2 * AT_REST + spare:
        raise GpuError(f"{format_size(free)} were free, and only {format_size(count)} could be taken", call="scrub")
    return count


def _find_remaining(
    uuid: str,
    library: Library | None,
    sees_processes: bool,
    is_others: Callable[[UsedBy], bool],
    sleep: Callable[[float], object],
    rest: int,
    looks: int,
) -> tuple[str, bool, int]:
    """What is still there, in words; whether others may have memory of it, such as a desktop of before; and how many
    bytes are in use. ``looks``: how often it is looked at again where the driver does not tell whose those are."""
    nvml = Nvml.open(library)
    try:
        reading = _read(nvml, uuid)
        listed = reading.processes if sees_processes else ()
        before = [process for process in listed if is_others(process)]
        first = next((process.pid for process in listed if process not in before), None)
        if first is not None:
            name, user = who_is(first)
            return f"process {first} ({name or '?'}) of {user or '?'} is on it", bool(before), 0
        theirs = sum(process.bytes or 0 for process in before)
        used = None if reading.used is None else reading.used - theirs
        is_little = used is None or used <= AT_REST
        if is_little and reading.in_use - theirs <= rest + REST_STEP:
            return "", bool(before), reading.in_use - theirs
        if not is_little and reading.is_attributed:
            text = f"{format_size(used or 0)} of its memory are in use, and no process is seen that uses it"
            return text, bool(before), 0
        # The driver does not tell whose it is: a desktop's, its own, or memory of ended processes that it will still
        # take back, which cannot be overwritten before.
        for _ in range(looks):
            sleep(STILL_S)
            if _read(nvml, uuid).in_use < reading.in_use - (REST_STEP if is_little else STEP):
                text = f"{format_size(reading.in_use - theirs)} of its memory are in use, and it is becoming less"
                return text, not is_little or bool(before), 0
        return "", not is_little or bool(before), reading.in_use - theirs
    finally:
        nvml.close()


def _read(nvml: Nvml, uuid: str) -> CardReading:
    reading = nvml.read(uuid)
    if reading.failed is not None:
        raise reading.failed
    return reading


def _stays(process: UsedBy) -> bool:
    """Whether it is none of what leases leave: a desktop, or the server through which all programs compute."""
    return process.draws or who_is(process.pid)[0] == MPS_SERVER


def _is_older(pid: int, than_ns: int) -> bool:
    """Whether the process was started before this instant, by at least a tick: its start is known no closer, and a
    guest can be started at once when a card is lent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return False
    return ticks < than_ns * os.sysconf("SC_CLK_TCK") // NS_PER_S


def _handed_on(node: str) -> str:
    """The process that has the card open by a descriptor that left its guest. The driver names processes that compute
    on it, and not those that could begin."""
    try:
        number = os.stat(node).st_rdev
    except OSError:
        return ""
    found = next(handed_on(number), None)
    return f"{found}, which it was handed by a command of a lease" if found is not None else ""


def _node(uuid: str, library: Library | None) -> str:
    if uuid.startswith("MIG-"):  # the file is its card's, which others may have open for parts of their own
        return ""
    lib, handle, close = _handle(uuid, library)
    try:
        minor = _value(lib, "nvmlDeviceGetMinorNumber", handle)
    finally:
        close()
    return "" if minor == _NO_ANSWER else f"/dev/nvidia{minor}"


def _settings(uuid: str, library: Library | None) -> dict[str, int]:
    """Those it can tell of."""
    lib, handle, close = _handle(uuid, library)
    try:
        found = {name: _value(lib, question, handle) for name, (question, _) in SETTINGS.items()}
        return {name: value for name, value in found.items() if value != _NO_ANSWER}
    finally:
        close()


def _set_back(uuid: str, wanted: dict[str, int], library: Library | None) -> str:
    """What would not be set back, in words. Some cards move their power limit by themselves."""
    if not wanted:
        return ""
    lib, handle, close = _handle(uuid, library)
    try:
        for name, (question, setting) in SETTINGS.items():
            if name in wanted and _value(lib, question, handle) not in (wanted[name], _NO_ANSWER):
                with contextlib.suppress(lib.NVMLError):  # what came of it is seen by asking
                    getattr(lib, setting)(handle, wanted[name])
                now = _value(lib, question, handle)
                if now not in (wanted[name], _NO_ANSWER):
                    return f"its {name} was changed to {now}, and does not go back to {wanted[name]}"
        return ""
    finally:
        close()


def _handle(uuid: str, library: Library | None) -> tuple[Any, Any, Callable[[], None]]:
    """Of the card itself, also where it is a part of one: that has neither settings nor a number."""
    nvml = Nvml.open(library)
    lib: Any = nvml._lib
    try:
        handle = nvml._call(lib.nvmlDeviceGetHandleByUUID, uuid)
        if uuid.startswith("MIG-"):
            handle = nvml._call(lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        return lib, handle, nvml.close
    except NvmlFailed:
        nvml.close()
        raise


def _value(lib: Any, question: str, handle: Any) -> int:
    try:
        return int(getattr(lib, question)(handle))
    except (lib.NVMLError, AttributeError):
        return _NO_ANSWER


def answer(arguments: Sequence[str]) -> str:
    """What the program writes, for its arguments."""
    uuid, what, *rest = arguments
    if what == "--look":
        found = read_settings(uuid)
    else:
        os.environ[VISIBLE] = uuid  # a neighbour that is sick, or split, is then none of its business
        given = dict(zip(rest[::2], rest[1::2], strict=True))
        since_ns, at_rest, most = (int(given.get(name, 0)) for name in ("--since", "--rest", "--most"))
        found = clean(
            uuid,
            given.get("--settings", ""),
            since_ns,
            rest=at_rest,
            beside="--beside" in given,
            most=most,
            sees_processes=given["--sees"] == "1" if "--sees" in given else None,
        )
    return dumps(found).decode()


def main(arguments: list[str]) -> int:
    """The program."""
    sys.stdout.write(answer(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
