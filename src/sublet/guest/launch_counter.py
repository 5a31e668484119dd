"""Counts the kernels that frameworks launch in this process, by CUPTI, where the operator has turned that on.

CUPTI writes a record of each kernel that ran into buffers of ours, and hands back those that are full. It is asked for
the others after each call and each cell, and twice a second. So no launch waits for Python, and a guest that is killed
loses the count of its last half second. A process has one tracer: if a profiler registers itself (that of PyTorch
does), the records are its from then on.

Kernels of other processes, those that the guest starts among them, are not seen.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from sublet.background import start_thread
from sublet.guest.usage_counters import LeaseAccounts, SharedAccount

_KINDS: Final = (3, 10)
"""Records of kernels: CUPTI_ACTIVITY_KIND_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL."""
CONCURRENT_KERNEL: Final = 10
"""The kind that leaves kernels beside one another."""
_BUFFER_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.5
_LIBRARIES: Final = ("libcupti.so.13", "libcupti.so.12")
_PACKAGED: Final = ("nvidia/cu13/lib/libcupti.so.13", "nvidia/cuda_cupti/lib/libcupti.so.12")
"""Where NVIDIA's packages have it, below a folder of packages."""

_Requested: Final = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Completed: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class LaunchCounter:
    """The counter of this process. It is kept until the process ends, since CUPTI may call it at any time."""

    def __init__(self, library: Any, account: SharedAccount) -> None:
        """Raises ``OSError`` where CUPTI does not trace here: an old driver, another tracer, no right to."""
        self.library = library
        library.cuptiActivityGetNextRecord.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._account = account
        self._lock = threading.Lock()
        self._counted = 0
        self._lent: dict[int, Any] = {}
        self._spare: list[Any] = []
        self._callbacks = _Requested(self._requested), _Completed(self._completed)
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        self._call("cuptiActivityEnable", CONCURRENT_KERNEL)
        account.begin_counting()
        atexit.register(self._stop)
        start_thread("launches", self._run, again=True)

    def flush(self) -> None:
        """What ran up to now is in the tally of the lease, but for kernels that are still under way."""
        self.library.cuptiActivityFlushAll(0)
        with self._lock:
            counted, self._counted = self._counted, 0
        self._account.count(launches=counted, failures=0, bytes_in=0, bytes_out=0)

    def _stop(self) -> None:
        """Nothing calls back into an interpreter that is being taken down."""
        self.library.cuptiActivityDisable(CONCURRENT_KERNEL)
        self.flush()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise OSError(f"{name} said {code}")

    def _requested(self, buffer: Any, size: Any, records_max: Any) -> None:
        with self._lock:
            made = self._spare.pop() if self._spare else ctypes.create_string_buffer(_BUFFER_BYTES)
            address = ctypes.addressof(made)
            self._lent[address] = made
        buffer[0], size[0], records_max[0] = address, _BUFFER_BYTES, 0

    def _completed(self, context: int, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        place = ctypes.byref(record)
        find_next, kind_at = self.library.cuptiActivityGetNextRecord, ctypes.c_uint32.from_address
        counted = 0
        while find_next(buffer, valid, place) == 0:
            counted += kind_at(record.value or 0).value in _KINDS
        with self._lock:
            self._counted += counted
            self._spare.append(self._lent.pop(buffer))

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            self.flush()


def start_counting(own: int = 0) -> LaunchCounter | None:
    """From now on, if there is a CUPTI: else the bill says "not counted", and the guest's log why. ``own``: the device
    of the lease that this process finds first."""
    why = "there is no libcupti: it comes with PyTorch for CUDA, and as nvidia-cuda-cupti"
    for path in _libraries():
        try:
            library = ctypes.CDLL(path)
            _counters.append(LaunchCounter(library, LeaseAccounts.from_environment().of(own)))
            return _counters[0]
        except (OSError, AttributeError) as error:  # the second: a library without these calls
            if path.startswith("/"):
                why = f"{path}: {error}"
    sys.stderr.write(f"sublet: launches of frameworks are not counted here: {why}\n")
    return None


def flush_launches() -> None:
    """After a call or a cell, so that its lease is billed for it. Nothing where nothing is counted."""
    for counter in _counters:
        counter.flush()


def is_counting() -> bool:
    """Whether the launches of sessions in this process are counted with all others."""
    return bool(_counters)


_counters: list[LaunchCounter] = []
"""One at most."""


def _libraries() -> Iterator[str]:
    """The one that is loaded already; those of the installed packages, newest first; what the loader finds."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        loaded = re.search(r"/\S*/libcupti\.so\.\d+\S*$", file.read(), re.MULTILINE)
    if loaded:
        yield loaded[0]
    yield from filter(os.path.exists, (os.path.join(folder, name) for name in _PACKAGED for folder in sys.path))
    yield from _LIBRARIES
