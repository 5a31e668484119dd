"""Explains CUDA's usual error messages to a program that looks for a GPU on a host device."""

from __future__ import annotations

from typing import Final

HOST_DEVICE_HINT: Final = (
    "This lease is of a host device, which is a CPU: use device=sublet.device(), which works on GPUs too."
)
NO_GPU_PROGRAMS: Final = frozenset({"nvidia-smi", "nvtop", "gpustat", "nvcc"})
"""Commands that a machine without a GPU does not have."""

_SAYINGS: Final = (
    "Found no NVIDIA driver",
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "no CUDA-capable device is detected",
    "CUDA driver version is insufficient",
    "Attempting to deserialize object on a CUDA device",
    "libcuda.so",
    "cudaErrorNoDevice",
    "CUDA_ERROR_NO_DEVICE",
    "nvidia-smi: command not found",
    "nvidia-smi: not found",
    "No such file or directory: 'nvidia-smi'",
)


def misses_a_gpu(text: str) -> bool:
    """Whether an error message says that there is no GPU or no driver."""
    return any(saying in text for saying in _SAYINGS)
