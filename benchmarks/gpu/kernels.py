"""Kernels that are timed. The ordinary tests compile them for sm_90."""

from __future__ import annotations

from typing import Final

__all__ = ["SAXPY", "SOURCES"]

SAXPY: Final = b"""
extern "C" __global__ void saxpy(const float* x, float* y, float a, unsigned int n, unsigned long long step) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
SOURCES: Final = {"saxpy": SAXPY}
