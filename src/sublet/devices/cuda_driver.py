"""Calls the CUDA driver, checks every status, and raises our error with the name of the failed call.

Some errors are the end of a CUDA context: every call after them fails, whatever it is. They are told apart here, so
that a device can say so once instead of blaming each later call.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any, Final

from sublet.errors import GpuError, NotFound, OutOfMemory, SubletError, Unsupported
from sublet.invocation import installing

CUDA_OLDEST: Final = 12_040
"""What the driver must speak at least, 12.4: since then it can say which kernels a module has, and what they take."""
LINGERS_S: Final = 5.0
"""A process that has ended may keep its memory, and a card that lets only one process in, for so long."""
_LOOK_S: Final = 0.1
_OUT_OF_MEMORY: Final = 2
_TAKEN: Final = 46
_DO_NEW: Final = "Run what follows in a new guest: a CUDA context does not recover from this."
_LOST: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTAINED",
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
        "CONTEXT_IS_DESTROYED",
        "UNKNOWN",
    )
)


_DO_BEGIN: Final = {
    34: "This is the toolkit's stub of libcuda.so.1: take its folder out of LD_LIBRARY_PATH.",
    100: "See whether this user may open /dev/nvidia*, and CUDA_VISIBLE_DEVICES.",
    802: "On a machine with NVSwitch start nvidia-fabricmanager, and wait until it is ready.",
    803: "The driver was upgraded and not loaded again: reboot, or reload its modules.",
    804: "Take the CUDA compatibility library out of LD_LIBRARY_PATH: this card does not support it.",
    999: "Load the module nvidia-uvm (`nvidia-modprobe -u -c0` as root); if it is loaded, see the kernel's log.",
}
"""What helps where CUDA cannot even begin, by the code of ``cuInit``."""


class ContextLost(GpuError):
    """The context is of no use any more. Travels as ``GpuError``."""

    @property
    def kind(self) -> str:
        return GpuError.__name__


class DeviceTaken(GpuError):
    """The card's compute mode lets no further process in. Travels as ``GpuError``."""

    @property
    def kind(self) -> str:
        return GpuError.__name__


class CudaDriver:
    """``cuda.bindings.driver``, or what stands in for it in a test."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, call: str, name: str, *args: Any) -> Any:
        """Call the driver's ``name`` on behalf of ``call``: what it answers, or the error."""
        try:
            code, *answer = getattr(self.module, name)(*args)
        except ValueError as error:  # the bindings' own way to say that they do not know this code
            message = (
                f"{call}: the driver answered {name} with an error that these bindings for CUDA are too old to know"
            )
            raise GpuError(f"{message} ({error})", call=call, do="Bring sublet[gpu] up to date.") from error
        if int(code) != 0:
            raise self._error(call, name, code)
        return answer[0] if len(answer) == 1 else tuple(answer)

    def call_or_none(self, name: str, *args: Any) -> Any:
        """The same where an error is an answer: None."""
        try:
            code, *answer = getattr(self.module, name)(*args)
        except ValueError:
            return None
        if int(code) != 0:
            return None
        return answer[0] if len(answer) == 1 else tuple(answer)

    def _error(self, call: str, name: str, code: Any) -> SubletError:
        return driver_error(name, int(code), getattr(code, "name", str(code)), self._error_text(code), call)

    def _error_text(self, code: Any) -> str:
        failed, words = self.module.cuGetErrorString(code)
        return "the driver failed" if int(failed) != 0 else words.decode(errors="replace")


def driver_error(name: str, code: int, word: str, words: str, call: str = "") -> SubletError:
    """What the driver's function ``name`` answered, as our error. ``word``: the name of the code, or its number;
    ``words``: what the driver says of it; ``call``: for whom it was called."""
    message = f"{call}: {words} ({name} said {word})" if call else f"{words} ({name} said {word})"
    if code == _OUT_OF_MEMORY:
        return OutOfMemory(
            message, do="Free something: others on this device, or the driver itself, have the rest of its memory."
        )
    if code == _TAKEN:
        return DeviceTaken(
            message, call=call, do="End what has the card to itself, or allow more (`nvidia-smi -c DEFAULT`)."
        )
    if name == "cuInit":
        return GpuError(message, call=call, do=_DO_BEGIN.get(code))
    if word in _LOST:
        return ContextLost(message, call=call, do=_DO_NEW)
    return GpuError(message, call=call)


def has_bindings() -> bool:
    """Whether this Python has the bindings for CUDA. Does not load the driver."""
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        return False


def open_driver() -> CudaDriver:
    """The driver of this machine, begun. Raises ``Unsupported`` with what is missing."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Unsupported(
            "this Python has no bindings for CUDA", do=f"Install them: `{installing('sublet[gpu]')}`."
        ) from None
    driver = CudaDriver(module)
    try:
        driver("open", "cuInit", 0)
        version = driver("open", "cuDriverGetVersion")
    except RuntimeError as error:  # the bindings' own way to say that they found no library
        raise Unsupported(
            f"there is no NVIDIA driver on this machine ({error})", do="Lease a host device, or install the driver."
        ) from error
    if version < CUDA_OLDEST:
        raise Unsupported(
            f"the NVIDIA driver speaks CUDA {dotted(version)}, and sessions need {dotted(CUDA_OLDEST)}",
            do="Install a newer driver.",
        )
    return driver


def retain_context(driver: CudaDriver, call: str, device: Any, wait_s: float = LINGERS_S) -> Any:
    """The primary context of a device, once a process that has ended keeps it no more."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return driver(call, "cuDevicePrimaryCtxRetain", device)
        except (DeviceTaken, OutOfMemory):
            if time.monotonic() >= until_s:
                raise
            time.sleep(_LOOK_S)


def find_device(driver: CudaDriver, uuid: str) -> Any:
    """The driver's own name for the GPU, or the instance of one, with this UUID."""
    wanted = uuid_digits(uuid)
    for ordinal in range(driver("open", "cuDeviceGetCount")):
        device = driver("open", "cuDeviceGet", ordinal)
        if bytes(driver("open", "cuDeviceGetUuid", device).bytes).hex() == wanted:
            return device
    raise NotFound(
        f"the CUDA driver shows no GPU {uuid} to this process", do="See `sublet doctor`, and CUDA_VISIBLE_DEVICES."
    )


def dotted(version: int) -> str:
    """13000 as people write it: 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def uuid_digits(uuid: str) -> str:
    """``GPU-1b4e28ba-…`` and ``MIG-1b4e28ba-…`` as the driver's own 16 bytes, in hex."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
