"""The few CUDA calls that test and overwrite a card, through ctypes, shaped like ``cuda.bindings.driver``.

A card has to come clean wherever it can be lent, so this needs the driver's own library and no package. It is also
loaded in a tenth of the time.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, Final

from sublet.devices.cuda_driver import CudaDriver
from sublet.errors import Unsupported

_LIBRARY: Final = "libcuda.so.1"
_Bytes = bytes


class _Uuid(ctypes.Structure):
    """``CUuuid``."""

    _fields_ = [("raw", c_ubyte * 16)]

    @property
    def bytes(self) -> _Bytes:
        return _Bytes(self.raw)


CALLS: Final[dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]]] = {
    "cuInit": ("", (), (c_uint,)),
    "cuDriverGetVersion": ("", (c_int,), ()),
    "cuDeviceGetCount": ("", (c_int,), ()),
    "cuDeviceGet": ("", (c_int,), (c_int,)),
    "cuDeviceGetUuid": ("_v2", (_Uuid,), (c_int,)),
    "cuDevicePrimaryCtxRetain": ("", (c_void_p,), (c_int,)),
    "cuDevicePrimaryCtxRelease": ("_v2", (), (c_int,)),
    "cuCtxSetCurrent": ("", (), (c_void_p,)),
    "cuCtxSynchronize": ("", (), ()),
    "cuMemGetInfo": ("_v2", (c_size_t, c_size_t), ()),
    "cuMemAlloc": ("_v2", (c_uint64,), (c_size_t,)),
    "cuMemsetD8": ("_v2", (), (c_uint64, c_ubyte, c_size_t)),
    "cuMemcpyDtoH": ("_v2", (), (c_void_p, c_uint64, c_size_t)),
    "cuMemFree": ("_v2", (), (c_uint64,)),
}
"""By the name in the bindings: the rest of the symbol, its answers (pointers, which come first), what it takes."""


class PlainCuda:
    """Stands in for the module ``cuda.bindings.driver``."""

    def __init__(self, library: Any = None) -> None:
        """Raises ``OSError`` where there is no library."""
        self._library = library or ctypes.CDLL(_LIBRARY)

    def __getattr__(self, name: str) -> Any:
        version, answers, takes = CALLS[name]
        try:
            function = getattr(self._library, name + version)
        except AttributeError:
            raise Unsupported(
                f"{_LIBRARY} has no {name}{version}: it is far too old, or not NVIDIA's", do="Install a newer driver."
            ) from None
        function.argtypes = [*(ctypes.POINTER(kind) for kind in answers), *takes]

        def call(*arguments: Any) -> tuple[Any, ...]:
            made = [kind() for kind in answers]
            code = function(*(ctypes.byref(one) for one in made), *arguments)
            return (code, *(one if isinstance(one, _Uuid) else one.value for one in made))

        return call

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:  # noqa: N802  as the driver calls it
        """What an error is called; its pointer comes last. A library without this call has no words for it."""
        text, ask = c_char_p(), getattr(self._library, "cuGetErrorString", None)
        failed = ask(c_int(code), ctypes.byref(text)) if ask is not None else code
        return int(failed), text.value or b""


def open_plain_driver() -> CudaDriver:
    """The driver of this machine, begun. Raises ``Unsupported`` where there is none."""
    try:
        driver = CudaDriver(PlainCuda())
    except OSError as error:
        raise Unsupported(
            f"the driver's library {_LIBRARY} cannot be loaded ({error})",
            do="Install it, or hand it into the container.",
        ) from error
    driver("open", "cuInit", 0)
    return driver
