"""A pretended NVML library: it answers as ``pynvml`` does, from a table, and raises its real errors.

It shows what *our* code does with an answer. It shows nothing of what a driver would answer: only a card can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from sublet.values import GIB

__all__ = ["FakeCard", "FakeNvml", "uuid_of"]


def uuid_of(number: int) -> str:
    """The UUID of the pretended card of this number."""
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


@dataclass(eq=False)
class FakeCard:
    number: int
    total: int = 80 * GIB
    reserved: int = 0
    used: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)
    """Pid and bytes of what computes."""
    graphics: dict[int, int | None] = field(default_factory=dict)
    instances: dict[int, int] | None = None
    """None: not split. Otherwise the size of the instance in each place."""
    busy: int = 0
    uncorrected: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    broken: int = 0
    """An error code with which every question is answered."""
    settings: dict[str, int] = field(default_factory=dict)
    """Compute mode, persistence mode, power limit, as far as it has them."""
    stuck: set[str] = field(default_factory=set)
    """Settings that cannot be set."""
    unknown: set[str] = field(default_factory=set)
    """Questions that this card does not support."""

    @property
    def uuid(self) -> str:
        return uuid_of(self.number)


class _Handle:
    """What the library hands out; opaque to whoever has it."""

    def __init__(self, card: FakeCard, place: int | None = None) -> None:
        self.card, self.place = card, place

    @property
    def uuid(self) -> str:
        return self.card.uuid if self.place is None else f"MIG-{self.card.number:08x}-{self.place}"


class FakeNvml:
    """The library object."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2: int = pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self, cards: Sequence[FakeCard], *, broken: int = 0, unknown: set[str] | None = None) -> None:
        self.cards = list(cards)
        self.broken = broken
        """An error code with which everything is answered, the opening too."""
        self.unknown = unknown or set()
        self.opened = 0
        self.events: list[tuple[FakeCard, int]] = []
        """Errors (Xid) that the driver has to report."""
        self.watched: list[str] = []

    def _fail(self, code: int) -> None:
        if code:
            raise pynvml.NVMLError(code)

    def _check(self, question: str, handle: _Handle | None = None) -> None:
        assert self.opened > 0, f"{question} before the library was opened"
        self._fail(self.broken)
        if question in self.unknown:
            self._fail(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if handle is not None:
            self._fail(handle.card.broken)
            if question in handle.card.unknown:
                self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if handle.card not in self.cards:
                self._fail(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlInit(self) -> None:  # noqa: N802
        self._fail(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._check("nvmlSystemGetDriverVersion")
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:  # noqa: N802
        handle = _Handle(self.cards[index])
        self._check("nvmlDeviceGetHandleByIndex", handle)
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> _Handle:  # noqa: N802
        self._check("nvmlDeviceGetHandleByUUID")
        for card in self.cards:
            for place in (None, *(card.instances or ())):
                handle = _Handle(card, place)
                if handle.uuid == uuid:
                    self._check("nvmlDeviceGetHandleByUUID", handle)
                    return handle
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:  # noqa: N802
        self._check("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:  # noqa: N802
        self._check("nvmlDeviceGetName", handle)
        return "NVIDIA Pretend" if handle.place is None else "NVIDIA Pretend MIG"

    def nvmlDeviceGetMinorNumber(self, handle: _Handle) -> int:  # noqa: N802
        self._check("nvmlDeviceGetMinorNumber", handle)
        if handle.place is not None:
            self._fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 10 + handle.card.number

    def nvmlDeviceGetGpuInstanceId(self, handle: _Handle) -> int:  # noqa: N802
        self._check("nvmlDeviceGetGpuInstanceId", handle)
        assert handle.place is not None
        return 1 + handle.place

    def nvmlDeviceGetComputeInstanceId(self, handle: _Handle) -> int:  # noqa: N802
        self._check("nvmlDeviceGetComputeInstanceId", handle)
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: _Handle) -> _Handle:  # noqa: N802
        self._check("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return _Handle(handle.card)

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle, version: int | None = None) -> Any:  # noqa: N802
        self._check("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", handle)
        card = handle.card
        total = card.total if handle.place is None else (card.instances or {})[handle.place]
        if version:
            return SimpleNamespace(total=total, reserved=card.reserved, used=card.used)
        return SimpleNamespace(total=total, used=card.used + card.reserved)

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:  # noqa: N802
        self._check("nvmlDeviceGetMigMode", handle)
        split = handle.card.instances is not None
        return [int(split), int(split)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _Handle) -> int:  # noqa: N802
        self._check("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _Handle, index: int) -> _Handle:  # noqa: N802
        self._check("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        if index not in (handle.card.instances or {}):
            self._fail(pynvml.NVML_ERROR_NOT_FOUND)
        return _Handle(handle.card, index)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: _Handle) -> list[Any]:  # noqa: N802
        self._check("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        return _listed(handle.card.processes)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: _Handle) -> list[Any]:  # noqa: N802
        self._check("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
        return _listed(handle.card.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: _Handle) -> list[Any]:  # noqa: N802
        self._check("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)
        return []

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> Any:  # noqa: N802
        self._check("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=handle.card.busy, memory=0)

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, errorType: int, counterType: int) -> int:  # noqa: N802, N803
        self._check("nvmlDeviceGetTotalEccErrors", handle)
        assert (errorType, counterType) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return handle.card.uncorrected

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: _Handle) -> int:  # noqa: N802
        self._check("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: _Handle) -> tuple[int, int, int, int]:  # noqa: N802
        self._check("nvmlDeviceGetRemappedRows", handle)
        return handle.card.rows

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        self._check("nvmlEventSetCreate")
        return object()

    def nvmlDeviceRegisterEvents(self, handle: _Handle, eventTypes: int, eventSet: object) -> None:  # noqa: N802, N803
        self._check("nvmlDeviceRegisterEvents", handle)
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        self.watched.append(handle.uuid)

    def nvmlEventSetWait_v2(self, eventSet: object, timeoutms: int) -> Any:  # noqa: N802, N803
        self._check("nvmlEventSetWait_v2")
        assert timeoutms == 0, "nobody here has time to wait"
        if not self.events:
            self._fail(pynvml.NVML_ERROR_TIMEOUT)
        card, xid = self.events.pop(0)
        return SimpleNamespace(
            device=_Handle(card),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
            gpuInstanceId=0xFFFFFFFF,
        )

    def nvmlEventSetFree(self, eventSet: object) -> None:  # noqa: N802, N803
        pass

    # ---- settings ----

    def _setting(self, handle: _Handle, name: str) -> int:
        if name not in handle.card.settings:
            self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return handle.card.settings[name]

    def _set(self, handle: _Handle, name: str, value: int) -> None:
        if name in handle.card.stuck:
            self._fail(pynvml.NVML_ERROR_NO_PERMISSION)
        handle.card.settings[name] = value

    def nvmlDeviceGetComputeMode(self, handle: _Handle) -> int:  # noqa: N802
        return self._setting(handle, "compute mode")

    def nvmlDeviceSetComputeMode(self, handle: _Handle, value: int) -> None:  # noqa: N802
        self._set(handle, "compute mode", value)

    def nvmlDeviceGetPersistenceMode(self, handle: _Handle) -> int:  # noqa: N802
        return self._setting(handle, "persistence mode")

    def nvmlDeviceSetPersistenceMode(self, handle: _Handle, value: int) -> None:  # noqa: N802
        self._set(handle, "persistence mode", value)

    def nvmlDeviceGetPowerManagementLimit(self, handle: _Handle) -> int:  # noqa: N802
        return self._setting(handle, "power limit")

    def nvmlDeviceSetPowerManagementLimit(self, handle: _Handle, value: int) -> None:  # noqa: N802
        self._set(handle, "power limit", value)


def _listed(processes: dict[int, int | None]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes.items()]
