"""The kernels with which devices are tested, once for each kind that a device may want."""

from __future__ import annotations

from typing import Final

from sublet.wire.device import ModuleKind

WARP_KERNELS: Final = b"""
import warp as wp

@wp.kernel
def axpy(a: wp.float32, x: wp.array(dtype=wp.float32), y: wp.array(dtype=wp.float32), n: wp.uint32):
    i = wp.tid()
    if wp.uint32(i) < n:
        y[i] = a * x[i] + y[i]

@wp.kernel
def step(x: wp.array(dtype=wp.uint32), n: wp.uint32, a: wp.uint32):
    i = wp.tid()
    if wp.uint32(i) < n:
        x[i] = x[i] * a + wp.uint32(i)

@wp.kernel
def places(hits: wp.array(dtype=wp.uint32), width: wp.uint32):
    i, j = wp.tid()
    k = wp.uint32(i) * width + wp.uint32(j)
    hits[wp.int32(k)] = hits[wp.int32(k)] + k

@wp.kernel
def numbers(a: wp.uint32, b: wp.uint64, c: wp.int32, d: wp.int64, e: wp.float32, f: wp.float64,
            whole: wp.array(dtype=wp.uint64), parts: wp.array(dtype=wp.float64)):
    i = wp.tid()
    if i == 0:
        whole[0] = wp.uint64(a)
        whole[1] = b
        whole[2] = wp.uint64(wp.int64(c))
        whole[3] = wp.uint64(d)
        parts[0] = wp.float64(e)
        parts[1] = f
"""

CUDA_KERNELS: Final = b"""
extern "C" __global__ void axpy(float a, const float* x, float* y, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __fadd_rn(__fmul_rn(a, x[i]), y[i]);
}
extern "C" __global__ void step(unsigned int* x, unsigned int n, unsigned int a) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * a + i;
}
extern "C" __global__ void places(unsigned int* hits, unsigned int width) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int j = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned int k = i * width + j;
    hits[k] = hits[k] + k;
}
extern "C" __global__ void numbers(unsigned int a, unsigned long long b, int c, long long d, float e, double f,
                                   unsigned long long* whole, double* parts) {
    if (blockIdx.x * blockDim.x + threadIdx.x == 0) {
        whole[0] = a;
        whole[1] = b;
        whole[2] = (unsigned long long)(long long)c;
        whole[3] = (unsigned long long)d;
        parts[0] = e;
        parts[1] = f;
    }
}
"""

KERNELS: Final = {ModuleKind.WARP: WARP_KERNELS, ModuleKind.CUDA: CUDA_KERNELS}
"""One module in two kinds; the device picks."""
