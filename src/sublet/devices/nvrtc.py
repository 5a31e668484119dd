"""NVIDIA's compiler for CUDA C++, where installed. It needs no driver, so it also checks sources without a GPU."""

from __future__ import annotations

import importlib
from typing import Any, Final

from sublet.errors import GpuError
from sublet.invocation import installing

CHECK_ARCH: Final = 90
"""What is compiled for where there is no device to ask: compute capability 9.0."""
LOG_SHOWN: Final = 4000
"""Characters of a compiler's log that an error carries."""


def has_nvrtc() -> bool:
    """Whether CUDA C++ can be compiled here."""
    return _library() is not None


def version() -> tuple[int, int] | None:
    """That of the compiler, such as (13, 5); None where there is none."""
    nvrtc = _library()
    return None if nvrtc is None else tuple(nvrtc.nvrtcVersion()[1:])


def compile_cuda(source: bytes, arch: int, *, ptx: bool = False) -> bytes:
    """CUDA C++ to a cubin (or PTX) for one architecture; PTX for the nearest older one where the compiler does not know
    it yet. What the compiler says against it is in the ``GpuError``."""
    nvrtc = _library()
    if nvrtc is None:
        raise GpuError(
            "module_load: CUDA C++ cannot be compiled, there is no NVRTC",
            call="module_load",
            do=f"Install it: `{installing('sublet[gpu]')}`; or give the module as PTX or cubin.",
        )
    known = [one for one in _ok(nvrtc, nvrtc.nvrtcGetSupportedArchs()) if one <= arch]
    if not known:
        raise GpuError(
            f"module_load: the compiler (NVRTC {'.'.join(map(str, version() or ()))}) does not compile for compute "
            f"capability {arch / 10} any more",
            call="module_load",
            do="Give the module as PTX or cubin for this card.",
        )
    if arch not in known:
        arch, ptx = max(known), True
    program = _ok(nvrtc, nvrtc.nvrtcCreateProgram(source, b"module.cu", 0, [], []))
    try:
        kind = "compute" if ptx else "sm"
        (code,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={kind}_{arch}".encode()])
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_ok(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _ok(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            message = log.decode(errors="replace").strip("\0 \n")[:LOG_SHOWN]
            raise GpuError(
                f"module_load: the CUDA source does not compile:\n{message}\n", call="module_load", do="Fix the source."
            )
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        made = bytearray(_ok(nvrtc, size(program)))
        _ok(nvrtc, get(program, made))
        return bytes(made)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ok(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    code, *rest = answer
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuError(f"module_load: the compiler failed ({code.name})", call="module_load")
    return rest[0] if rest else None


def _library() -> Any:
    """The bindings, if the library behind them is there as well."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        return None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:  # the bindings' own way to say that they found no library
        return None
    return nvrtc
