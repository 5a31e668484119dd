"""Reads cards through NVML: a thin edge.

Everything that can go wrong with a driver becomes a plain sentence with what to do (``NvmlFailed``); nothing of NVML's
own error classes gets past this module. ``pynvml`` is imported where it is used and only if there is something to ask,
so that a machine without cards pays nothing for it. A call may block for as long as the driver does: a caller that
must not block calls from a thread of its own (``node.agent.health``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.values import MIB

_LIBRARY: Final = "libnvidia-ml.so.1"
_LIBRARY_FOLDERS: Final = ("usr/lib", "usr/lib64", "lib", "lib64", "usr/local/nvidia/lib64", "usr/lib/wsl/lib")
_DEVICES: Final = ("dev/nvidiactl", "dev/dxg")
_CAPABILITIES: Final = "proc/driver/nvidia/capabilities/gpu{}/mig"
_CAPABILITY: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)

UNINITIALIZED: Final = 1
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
MISMATCH: Final = 18
UNKNOWN: Final = 999
NO_CARD_HERE: Final = frozenset((DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND))
"""What a machine without a card says as well."""
CARD_BROKEN: Final = frozenset((NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED))
"""What is said about one card, not about the driver."""
_CANNOT_TELL: Final = frozenset((NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND))
"""The card is as well as it was; it only does not know this."""
_BROKEN: Final = frozenset((UNINITIALIZED, DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST, RESET_REQUIRED))
"""The only answers to a question that a card need not know which say that something is wrong. WSL answers 999 to some,
and others to a part of a card (2); newer drivers have codes that are not known here."""
IDLE_SHARE: Final = 64 * MIB
"""In use on an idle card (a few MiB, more on an instance): not lent, so that its user need not be found."""
IDLE_SHARE_OLD: Final = 768 * MIB
"""The same for a driver that does not tell apart what it keeps for itself."""
MPS_SERVER: Final = "nvidia-cuda-mps"
"""What the kernel calls a process of ``nvidia-cuda-mps-server``: names are cut off after 15 letters."""
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""The number of the machine's own pid namespace, on every Linux."""
_XIDS_MAX: Final = 64
"""Events taken in one look; a card in a storm of them is broken anyway."""

_SENTENCES: Final[Mapping[int, tuple[str, str]]] = {
    NOT_SUPPORTED: ("the GPU has no memory of its own that it can tell of", "Such a GPU cannot be lent."),
    NO_PERMISSION: ("this user may not use the NVIDIA devices", "Give it access to /dev/nvidia*."),
    NOT_FOUND: ("the GPU is no longer there", "See `nvidia-smi` and the kernel's log."),
    DRIVER_NOT_LOADED: ("no NVIDIA driver is loaded", "Load it (modprobe nvidia), or install it."),
    TIMEOUT: ("the NVIDIA driver did not answer in time", "See the kernel's log for what it is busy with."),
    11: ("the kernel has trouble with the interrupts of a GPU", "See the kernel's log; reboot."),
    LIBRARY_NOT_FOUND: (f"the driver's library {_LIBRARY} is not here", "Install it, or hand it into the container."),
    14: ("the configuration memory of a GPU is damaged", "The card has to be mended by its vendor."),
    GPU_IS_LOST: ("the GPU is lost: it fell off its bus", "Switch the machine off and on; see the kernel's log."),
    RESET_REQUIRED: (
        "the GPU has to be reset before it works again",
        "Stop the office (`sublet down`), which has the card open, and reset it (nvidia-smi -r); or reboot.",
    ),
    17: (
        "the operating system does not let the driver's library do its work",
        "See what a sandbox or container denies.",
    ),
    MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions",
        "The driver was upgraded and not loaded anew: reboot, or reload its modules.",
    ),
    20: ("the NVIDIA driver has no memory left", "End something on this machine."),
}
_ELSE: Final = "See `nvidia-smi`."


class NvmlFailed(SubletError):
    """The driver, or one card, does not answer as it should."""

    scope = "office"

    def __init__(self, code: int, text: str = "") -> None:
        sentence, do = _SENTENCES.get(code, (f"the NVIDIA driver does not answer: {text or f'error {code}'}", _ELSE))
        super().__init__(sentence, do=do)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One thing that work can run on: a whole card, or an instance of one that is split (MIG)."""

    uuid: str
    model: str
    capacity: int
    """Bytes that can be used: without what the driver keeps for itself, and what is in use on an idle card."""
    physical: str
    """The UUID of the card itself: its own, or that of the card it is an instance of."""
    nodes: tuple[str, ...] = ()
    """The device files below /dev that a program needs for it alone; empty where the driver does not tell."""

    @property
    def is_instance(self) -> bool:
        return self.physical != self.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedBy:
    """One process on a card."""

    pid: int
    bytes: int | None
    """None where the driver does not say how much."""
    draws: bool = False
    """It draws on a screen, and computes nothing: a desktop, a browser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One look at one card. None stands for what it cannot tell."""

    uuid: str
    used: int | None = None
    """Bytes in use, by any process, beyond what is in use on an idle card."""
    in_use: int = 0
    """All bytes in use, those on an idle card included."""
    processes: tuple[UsedBy, ...] = ()
    is_attributed: bool = True
    """Whether the driver tells whose the memory in use is. WSL lists no process, and of what draws some drivers do not
    tell how much it has."""
    busy: int | None = None
    """Percent of the time in which anything ran."""
    uncorrected: int | None = None
    """Memory errors since the driver was loaded that could not be corrected."""
    needs_reset: bool = False
    """Broken memory was found, and is taken out of use at the next reset."""
    worn_out: bool = False
    """Broken memory was found, and there is nothing left to replace it."""
    split: bool = False
    """It was offered as a whole card, and is in MIG mode now: no program can use it."""
    xids: tuple[int, ...] = ()
    """Errors that the driver reported since the last look, by its numbers."""
    failed: NvmlFailed | None = None
    """The card did not answer; all the rest is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found when this machine was searched for cards."""

    driver: str = ""
    """The driver's version; empty if there is none."""
    cards: tuple[Card, ...] = ()
    """What can be lent: whole cards, and instances of cards that are split."""
    split: tuple[str, ...] = ()
    """Cards in MIG mode, by UUID: their instances are lent, they themselves are not."""
    troubles: tuple[NvmlFailed, ...] = ()
    """What kept a card, or all of them, from being found. Without a card and without a driver there is none."""


class Library(Protocol):
    """As much of ``pynvml`` as is used here."""

    NVMLError: type[Exception]
    nvmlMemory_v2: int  # noqa: N815

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...  # noqa: N802
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> Sequence[Any]: ...  # noqa: N802
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> Sequence[Any]: ...  # noqa: N802
    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any) -> Sequence[Any]: ...  # noqa: N802
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int: ...  # noqa: N802, N803
    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Sequence[int]: ...  # noqa: N802
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlEventSetCreate(self) -> Any: ...  # noqa: N802
    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None: ...  # noqa: N802, N803
    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any: ...  # noqa: N802, N803
    def nvmlEventSetFree(self, eventSet: Any) -> None: ...  # noqa: N802, N803


_UNCORRECTED: Final = 1
_VOLATILE: Final = 0
_XID: Final = 0x8
_MIG_ON: Final = 1
_PART: Final = "MIG-"


def is_driver_here(root: str = "/") -> bool:
    """Whether there is anything to ask: a device node of the driver, or its library. Looks at names only."""
    base = Path(root)
    if any((base / name).exists() for name in _DEVICES):
        return True
    listed = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]
    folders = [base / name for name in _LIBRARY_FOLDERS] + [base / folder.lstrip("/") for folder in listed]
    return any((folder / _LIBRARY).exists() or any(folder.glob(f"*-linux-*/{_LIBRARY}")) for folder in folders)


def survey(library: Library | None = None, root: str = "/") -> Survey:
    """Search this machine for cards. Never raises for what a driver does: that is among the troubles."""
    if library is None and not is_driver_here(root):
        return Survey()
    try:
        nvml = Nvml.open(library)
    except NvmlFailed as failed:
        has_node = any((Path(root) / name).exists() for name in _DEVICES)
        nothing = failed.code in NO_CARD_HERE and not has_node
        return Survey(troubles=() if nothing else (failed,))
    try:
        return nvml.survey(root)
    finally:
        nvml.close()


class Nvml:
    """NVML, opened."""

    def __init__(self, library: Library) -> None:
        """Use ``open``."""
        self._lib = library
        self._events: Any = None
        self._watched: set[str] = set()

    @classmethod
    def open(cls, library: Library | None = None) -> Nvml:
        """Connect to the driver; raises ``NvmlFailed``."""
        if library is None:
            import pynvml

            library = pynvml
        nvml = cls(library)
        nvml._call(library.nvmlInit)
        return nvml

    def close(self) -> None:
        """Let go of the driver. Harmless if it is gone."""
        if self._events is not None:
            self._call_or(self._lib.nvmlEventSetFree, self._events, default=None)
            self._events = None
        self._call_or(self._lib.nvmlShutdown, default=None)

    def survey(self, root: str = "/") -> Survey:
        """Every card and instance, and what kept others from being found."""
        cards: list[Card] = []
        split: list[str] = []
        troubles: list[NvmlFailed] = []
        driver = ""
        try:
            driver = self._call(self._lib.nvmlSystemGetDriverVersion)
            count = self._call(self._lib.nvmlDeviceGetCount)
        except NvmlFailed as failed:
            return Survey(driver=driver, troubles=(failed,))
        for index in range(count):
            try:
                handle = self._call(self._lib.nvmlDeviceGetHandleByIndex, index)
                uuid = self._call(self._lib.nvmlDeviceGetUUID, handle)
                if self._is_split(handle):
                    split.append(uuid)
                    cards += self._instances(handle, uuid, root)
                else:
                    cards.append(self._card(handle, uuid, uuid, root))
            except NvmlFailed as failed:
                failed.message = f"GPU {index}: {failed.message}"
                troubles.append(failed)
        return Survey(driver=driver, cards=tuple(cards), split=tuple(split), troubles=tuple(troubles))

    def read(self, uuid: str) -> CardReading:
        """One look at one card. What is wrong with it is in the reading; nothing is raised."""
        lib = self._lib
        try:
            handle = self._call(lib.nvmlDeviceGetHandleByUUID, uuid)
            memory = self._memory(handle)
            processes = self._processes(handle)
            return CardReading(
                uuid=uuid,
                used=None if memory is None else max(0, int(memory.used) - _idle_share(memory)),
                in_use=0 if memory is None else int(memory.used),
                processes=processes or (),
                is_attributed=processes is not None and not any(one.draws and one.bytes is None for one in processes),
                busy=self._busy(handle),
                uncorrected=self._ask(lib.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _VOLATILE, default=None),
                needs_reset=self._needs_reset(handle),
                worn_out=self._is_worn_out(handle),
                split=not uuid.startswith(_PART) and self._is_split(handle),
            )
        except NvmlFailed as failed:
            return CardReading(uuid=uuid, failed=failed)

    def modes(self, uuid: str) -> tuple[int, int]:
        """Compute mode and persistence mode of a card; -1 for what it cannot tell."""
        lib = self._lib
        handle = self._call(lib.nvmlDeviceGetHandleByUUID, uuid)
        return (
            self._ask(lib.nvmlDeviceGetComputeMode, handle, default=-1),
            self._ask(lib.nvmlDeviceGetPersistenceMode, handle, default=-1),
        )

    def watch(self, uuids: Sequence[str]) -> None:
        """From now on ``xids`` tells of these cards. One that cannot be watched is left out: that is no fault of it."""
        lib = self._lib
        if self._events is None:
            self._events = self._call_or(lib.nvmlEventSetCreate, default=None)
        if self._events is None:
            return
        for uuid in uuids:
            if uuid not in self._watched:
                handle = self._call_or(lib.nvmlDeviceGetHandleByUUID, uuid, default=None)
                if handle is not None:
                    self._call_or(lib.nvmlDeviceRegisterEvents, handle, _XID, self._events, default=None)
                self._watched.add(uuid)

    def xids(self) -> Iterator[tuple[str, int]]:
        """Errors that came since the last time, each with the UUID of its card; waits for nothing."""
        if self._events is None:
            return
        for _ in range(_XIDS_MAX):
            event = self._call_or(self._lib.nvmlEventSetWait_v2, self._events, 0, default=None)  # a time-out: no more
            if event is None:
                return
            uuid = self._call_or(self._lib.nvmlDeviceGetUUID, event.device, default="")
            if uuid and event.eventType == _XID:
                yield uuid, int(event.eventData)

    # ---- one question each ----

    def _card(self, handle: Any, uuid: str, physical: str, root: str) -> Card:
        memory = self._memory(handle)
        if memory is None:
            raise NvmlFailed(NOT_SUPPORTED)
        usable = max(MIB, int(memory.total) - int(getattr(memory, "reserved", 0)) - _idle_share(memory))
        model = self._ask(self._lib.nvmlDeviceGetName, handle, default="GPU")
        nodes = self._nodes(handle, root, is_instance=uuid != physical)
        return Card(uuid=uuid, model=model, capacity=usable // MIB * MIB, physical=physical, nodes=nodes)

    def _nodes(self, handle: Any, root: str, *, is_instance: bool) -> tuple[str, ...]:
        """Its number is not its index. An instance needs its card's file, and one for each right to a part of it."""
        lib = self._lib
        card = handle
        if is_instance:
            card = self._call_or(lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle, default=None)
        minor = None if card is None else self._call_or(lib.nvmlDeviceGetMinorNumber, card, default=None)
        if minor is None:
            return ()
        if not is_instance:
            return (f"nvidia{minor}",)
        gpu = self._call_or(lib.nvmlDeviceGetGpuInstanceId, handle, default=None)
        compute = self._call_or(lib.nvmlDeviceGetComputeInstanceId, handle, default=None)
        rights = Path(root, _CAPABILITIES.format(minor), f"gi{gpu}")
        numbers = [_capability(rights / "access"), _capability(rights / f"ci{compute}" / "access")]
        return () if None in numbers else (f"nvidia{minor}", *(f"nvidia-caps/nvidia-cap{one}" for one in numbers))

    def _instances(self, handle: Any, physical: str, root: str) -> Iterator[Card]:
        for index in range(self._ask(self._lib.nvmlDeviceGetMaxMigDeviceCount, handle, default=0)):
            try:
                instance = self._call(self._lib.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            except NvmlFailed as failed:
                if failed.code == NOT_FOUND:  # an index for which no instance was created
                    continue
                raise
            yield self._card(instance, self._call(self._lib.nvmlDeviceGetUUID, instance), physical, root)

    def _is_split(self, handle: Any) -> bool:
        modes = self._ask(self._lib.nvmlDeviceGetMigMode, handle, default=())
        return bool(modes) and modes[0] == _MIG_ON

    def _memory(self, handle: Any) -> Any:
        """The newer question tells apart what the driver keeps for itself; older drivers do not know it."""
        found = self._ask(self._lib.nvmlDeviceGetMemoryInfo, handle, self._lib.nvmlMemory_v2, default=None)
        if found is not None:
            return found
        try:  # that it answers this is what tells a card that works from one that does not
            return self._call(self._lib.nvmlDeviceGetMemoryInfo, handle)
        except NvmlFailed as failed:
            if failed.code in _CANNOT_TELL:
                return None
            raise

    def _processes(self, handle: Any) -> tuple[UsedBy, ...] | None:
        """The processes on it; None where the driver does not tell which compute."""
        lib, found, compute = self._lib, dict[int, int | None](), set[int]()
        for question in (
            lib.nvmlDeviceGetComputeRunningProcesses_v3,
            lib.nvmlDeviceGetGraphicsRunningProcesses_v3,
            lib.nvmlDeviceGetMPSComputeRunningProcesses_v3,
        ):
            listed = self._ask(question, handle, default=None)
            if listed is None and question == lib.nvmlDeviceGetComputeRunningProcesses_v3:
                return None
            for process in listed or ():
                pid, used = int(process.pid), process.usedGpuMemory
                known = found.get(pid)
                found[pid] = known if used is None else max(int(used), known or 0)
                if question != lib.nvmlDeviceGetGraphicsRunningProcesses_v3:
                    compute.add(pid)
        return tuple(UsedBy(pid=pid, bytes=used, draws=pid not in compute) for pid, used in sorted(found.items()))

    def _busy(self, handle: Any) -> int | None:
        rates = self._ask(self._lib.nvmlDeviceGetUtilizationRates, handle, default=None)
        return None if rates is None else int(rates.gpu)

    def _needs_reset(self, handle: Any) -> bool:
        retiring = self._ask(self._lib.nvmlDeviceGetRetiredPagesPendingStatus, handle, default=0)
        rows = self._ask(self._lib.nvmlDeviceGetRemappedRows, handle, default=None)
        return bool(retiring) or bool(rows and rows[2])

    def _is_worn_out(self, handle: Any) -> bool:
        rows = self._ask(self._lib.nvmlDeviceGetRemappedRows, handle, default=None)
        return bool(rows and rows[3])

    # ---- how to ask ----

    def _call(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer; raises ``NvmlFailed`` and nothing else."""
        try:
            return question(*arguments)
        except self._lib.NVMLError as error:
            raise NvmlFailed(int(getattr(error, "value", UNKNOWN)), str(error)) from error
        except (OSError, UnicodeDecodeError, AttributeError) as error:  # a library that is none, or far too old
            raise NvmlFailed(FUNCTION_NOT_FOUND, f"{type(error).__name__}: {error}") from error

    def _ask(self, question: Callable[..., Any], *arguments: Any, default: Any) -> Any:
        """The answer, or ``default`` where the card cannot tell. Raises if it is broken."""
        try:
            return self._call(question, *arguments)
        except NvmlFailed as failed:
            if failed.code in _BROKEN:
                raise
            return default

    def _call_or(self, question: Callable[..., Any], *arguments: Any, default: Any) -> Any:
        """The answer, or ``default`` whatever is the matter."""
        try:
            return self._call(question, *arguments)
        except NvmlFailed:
            return default


def _capability(path: Path) -> int | None:
    """The number of the device file that gives this right."""
    try:
        found = _CAPABILITY.search(path.read_text())
    except OSError:
        return None
    return None if found is None else int(found[1])


def _idle_share(memory: Any) -> int:
    return IDLE_SHARE if hasattr(memory, "reserved") else IDLE_SHARE_OLD


def who_is(pid: int) -> tuple[str, str]:
    """The command and the user of a process, as far as they can be told. A process calls itself what it likes."""
    import pwd

    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = "".join(c if c.isprintable() else "?" for c in file.read(64).removesuffix("\n"))
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "", ""
    try:
        return name, pwd.getpwuid(uid).pw_name
    except KeyError:
        return name, str(uid)


def sees_all_processes() -> bool:
    """Whether the pids of the driver are those that this process would use. They are not inside a container."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
