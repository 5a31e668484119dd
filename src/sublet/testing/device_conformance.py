"""What every device must do, as tests. Subclass it in a test file and say how a device is opened::

    class TestMyDevice(DeviceConformance):
        def open_device(self, account: Account) -> Device:
            return MyDevice(account)

Each test opens devices of its own and closes them, and then the account must be as it was. Where a device takes neither
Warp nor CUDA source, set ``sources`` to the same kernels (``testing.device_conformance``) in a form that it takes.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sublet.devices.account import MemoryAccount
from sublet.devices.grids import BLOCK_MAX, GRID_MAX
from sublet.devices.interface import Device, LoadedModule, ModuleHandle, Sources, Value
from sublet.devices.memory import BufferHandle
from sublet.errors import GpuError, InvalidRequest, NotFound, OutOfMemory, SubletError, Unsupported
from sublet.values import MIB
from sublet.wire.device import ModuleKind
from sublet.wire.scalars import ArgKind

B, U32, U64, I32, I64, F32, F64 = (
    ArgKind.BUFFER,
    ArgKind.U32,
    ArgKind.U64,
    ArgKind.I32,
    ArgKind.I64,
    ArgKind.F32,
    ArgKind.F64,
)
AXPY = (F32, B, B, U32)
STEP = (B, U32, U32)


@contextlib.contextmanager
def refused(error: type[SubletError] | tuple[type[SubletError], ...], *words: str) -> Iterator[None]:
    """The error, and what its message must say."""
    try:
        yield
    except error as found:
        message = str(found)
    else:
        raise AssertionError(f"it was let pass; {error} was expected")
    assert all(word in message for word in words), f"{message!r} does not say {words}"


# ------------------------------------------------------------------------------------------------------- device kernels
#
# The kernels with which devices are tested, once for each kind that a device may want.


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


class DeviceConformance:
    """The contract of ``devices.interface.Device``."""

    cap_bytes: int = 16 * MIB
    sources: Sources = KERNELS

    def open_device(self, account: MemoryAccount) -> Device:
        raise NotImplementedError("say how the device to be tested is opened")

    @contextlib.contextmanager
    def opened(self, cap_bytes: int = 0, account: MemoryAccount | None = None) -> Iterator[Device]:
        """A device, closed afterwards; then its account must be as it was."""
        account = account or MemoryAccount(cap_bytes or self.cap_bytes)
        before = account.used_bytes
        device = self.open_device(account)
        try:
            yield device
        finally:
            device.close()
        assert account.used_bytes == before

    # ---- memory ----

    def test_new_memory_is_zero(self) -> None:
        """Whatever was there before."""
        with self.opened() as device:
            first = device.alloc(5000)
            device.fill(first, 0, 5000, b"\xff")
            device.free(first)
            assert device.read(device.alloc(5000), 0, 5000) == bytes(5000)

    def test_what_is_written_is_read(self) -> None:
        """At any offset, and nothing beside it changes."""
        with self.opened() as device:
            x = device.alloc(100)
            device.write(x, 0, bytes(range(100)))
            device.write(x, 33, b"hello")
            wanted = bytes(range(33)) + b"hello" + bytes(range(38, 100))
            assert device.read(x, 0, 100) == wanted
            assert device.read(x, 30, 10) == wanted[30:40]
            out = bytearray(10)
            device.read_into(x, 90, out)
            assert out == wanted[90:]

    def test_written_bytes_are_the_callers_again(self) -> None:
        """What the caller does with them afterwards changes nothing on the device."""
        with self.opened() as device:
            x, data = device.alloc(4), bytearray(b"abcd")
            device.write(x, 0, data)
            data[:] = b"----"
            assert device.read(x, 0, 4) == b"abcd"

    def test_anything_with_bytes_in_one_piece_can_be_written(self) -> None:
        """Arrays of numbers count in bytes; what has gaps is refused."""
        with self.opened() as device:
            x = device.alloc(32)
            device.write(x, 8, array("d", [1.5, -2.0]))  # type: ignore[arg-type]
            assert struct.unpack("<2d", device.read(x, 8, 16)) == (1.5, -2.0)
            with refused(InvalidRequest, "mem_write"):
                device.write(x, 0, memoryview(b"abcdef")[::2])
            with refused(InvalidRequest, "mem_read"):
                device.read_into(x, 0, b"read-only")

    def test_copies(self) -> None:
        """Between buffers, and within one where the two places lie apart."""
        with self.opened() as device:
            x, y = device.alloc(64), device.alloc(64)
            device.write(x, 0, bytes(range(64)))
            device.copy(y, 10, x, 20, 30)
            assert device.read(y, 0, 64) == bytes(10) + bytes(range(20, 50)) + bytes(24)
            device.copy(x, 32, x, 0, 32)
            assert device.read(x, 0, 64) == bytes(range(32)) * 2
            with refused(InvalidRequest, "mem_copy", "overlap"):
                device.copy(x, 1, x, 0, 2)
            device.copy(x, 1, x, 0, 1)

    def test_fills(self) -> None:
        """With patterns of one, two and four bytes; offset and length in steps of the pattern."""
        with self.opened() as device:
            x = device.alloc(32)
            device.fill(x, 3, 5, b"a")
            device.fill(x, 8, 4, b"bc")
            device.fill(x, 12, 8, b"defg")
            assert device.read(x, 0, 32) == bytes(3) + b"aaaaabcbcdefgdefg" + bytes(12)
            for pattern, offset, length in ((b"", 0, 8), (b"abc", 0, 9), (b"ab", 1, 2), (b"abcd", 0, 6)):
                with refused(InvalidRequest, "mem_fill"):
                    device.fill(x, offset, length, pattern)

    def test_a_large_fill_reaches_the_end(self) -> None:
        """Longer than any step it may be done in."""
        size = 3 * MIB + 4
        with self.opened() as device:
            x = device.alloc(size + 4)
            device.fill(x, 0, size, b"abcd")
            assert device.read(x, 0, size + 4) == b"abcd" * (size // 4) + bytes(4)

    def test_nothing_out_of_bounds(self) -> None:
        """Refused before anything happens, in every call."""
        spans = ((-1, 1), (0, 17), (16, 1), (17, 0), (1 << 62, 1 << 62), (8, 9), (0, -1))
        with self.opened() as device:
            x, y = device.alloc(16), device.alloc(64)
            device.write(x, 0, b"0123456789abcdef")
            for offset, length in spans:
                with refused(InvalidRequest, "mem_read", "16 bytes"):
                    device.read(x, offset, length)
                with refused(InvalidRequest, "mem_fill"):
                    device.fill(x, offset, length, b"!")
                with refused(InvalidRequest, "mem_copy"):
                    device.copy(x, offset, y, 0, length)
                with refused(InvalidRequest, "mem_copy"):
                    device.copy(y, 0, x, offset, length)
                if 0 <= length < 100:
                    with refused(InvalidRequest, "mem_write"):
                        device.write(x, offset, b"!" * length)
                    with refused(InvalidRequest, "mem_read"):
                        device.read_into(x, offset, bytearray(length))
            assert device.read(x, 0, 16) == b"0123456789abcdef"
            assert device.read(y, 0, 64) == bytes(64)

    def test_nothing_at_all_may_be_moved(self) -> None:
        """A length of zero is no error, at the very end too."""
        with self.opened() as device:
            x = device.alloc(8)
            device.write(x, 8, b"")
            device.fill(x, 8, 0, b"ab")
            device.copy(x, 8, x, 8, 0)
            assert device.read(x, 8, 0) == b""

    def test_a_buffer_is_gone_when_it_was_freed(self) -> None:
        """Every use after it is refused, a second free too; and its handle never comes back."""
        with self.opened() as device:
            x = device.alloc(16)
            device.free(x)
            for use in self._uses(device, x):
                with refused(NotFound, "freed before"):
                    use()
            assert x not in {device.alloc(16) for _ in range(50)}

    def test_buffers_of_another_session_are_foreign(self) -> None:
        """Even where the number fits, and the other session lives."""
        with self.opened() as device, self.opened() as other:
            mine, theirs = device.alloc(16), other.alloc(16)
            for use in self._uses(device, theirs):
                with refused(NotFound, "another session"):
                    use()
            for use in self._uses(device, BufferHandle(mine.generation, mine.number + 1000)):
                with refused(NotFound, "no buffer"):
                    use()

    def _uses(self, device: Device, x: BufferHandle) -> Iterator[Callable[[], object]]:
        y = device.alloc(16)
        yield lambda: device.read(x, 0, 1)
        yield lambda: device.read_into(x, 0, bytearray(1))
        yield lambda: device.write(x, 0, b"!")
        yield lambda: device.fill(x, 0, 1, b"!")
        yield lambda: device.copy(x, 0, y, 0, 1)
        yield lambda: device.copy(y, 0, x, 0, 1)
        yield lambda: device.free(x)

    # ---- the account ----

    def test_the_account_is_kept_to_the_byte(self) -> None:
        """All of it can be taken; one byte more is refused and changes nothing."""
        with self.opened(cap_bytes=10_000) as device:
            x = device.alloc(9_999)
            with refused(OutOfMemory, "mem_alloc", "1 bytes"):
                device.alloc(2)
            assert device.account.used_bytes == 9_999
            device.alloc(1)
            with refused(OutOfMemory):
                device.alloc(1)
            device.free(x)
            assert (device.account.used_bytes, device.account.peak_bytes) == (1, 10_000)
            device.alloc(9_999)

    def test_a_size_that_is_none_is_refused(self) -> None:
        """Zero, less than that, and more than any machine has."""
        with self.opened() as device:
            for size in (0, -1):
                with refused(InvalidRequest, "mem_alloc"):
                    device.alloc(size)
            with refused(OutOfMemory, "mem_alloc"):
                device.alloc(1 << 62)
            assert device.account.used_bytes == 0

    def test_the_sessions_of_a_lease_share_its_account(self) -> None:
        """What one has the other has not; what one leaves at its close the other may have."""
        account = MemoryAccount(1000)
        with self.opened(account=account) as second:
            with contextlib.closing(self.open_device(account)) as first:
                first.alloc(800)
                with refused(OutOfMemory):
                    second.alloc(201)
                second.alloc(200)
            assert account.used_bytes == 200
            second.alloc(800)

    def test_a_closed_device_has_nothing_and_does_nothing(self) -> None:
        """Closing frees everything and may be done twice."""
        with self.opened() as device:
            x = device.alloc(100)
            loaded = device.load(self.sources)
            device.close()
            assert device.account.used_bytes == 0
            device.close()
            for use in (
                lambda: device.alloc(1),
                lambda: device.free(x),
                lambda: device.read(x, 0, 1),
                lambda: device.load(self.sources),
                lambda: device.unload(loaded.handle),
                device.sync,
            ):
                with refused(NotFound, "closed"):
                    use()

    # ---- modules ----

    def test_a_module_says_which_kernels_it_has(self) -> None:
        """Of the kinds it was given in, the device picks one that it can run."""
        with self.opened() as device:
            loaded = device.load(self.sources)
            assert loaded.kind in self.sources
            assert {one.kernel for one in loaded.kernels} == {"axpy", "step", "places", "numbers"}

    def test_a_kernel_that_is_not_there_names_those_that_are(self) -> None:
        """And nothing is launched."""
        with self.opened() as device:
            loaded = device.load(self.sources)
            with refused(NotFound, "'nonsense'", "axpy", "step", "places", "numbers"):
                device.plan(loaded.handle, "nonsense", 1, 1, ())

    def test_a_module_is_gone_when_it_was_unloaded(self) -> None:
        """Its plans with it; and another session's modules are foreign."""
        with self.opened() as device, self.opened() as other:
            loaded, theirs = device.load(self.sources), other.load(self.sources)
            x = device.alloc(64)
            plan = device.plan(loaded.handle, "step", 1, 16, STEP)
            device.unload(loaded.handle)
            with refused(NotFound, "launch", "unloaded before"):
                device.launch(plan, (x, 16, 1))
            with refused(NotFound, "unloaded before"):
                device.plan(loaded.handle, "step", 1, 16, STEP)
            with refused(NotFound, "module_unload", "unloaded before"):
                device.unload(loaded.handle)
            with refused(NotFound, "another session"):
                device.plan(theirs.handle, "step", 1, 16, STEP)
            with refused(NotFound, "no module"):
                device.unload(ModuleHandle(loaded.handle.generation, 99))
            again = device.load(self.sources)
            assert again.handle != loaded.handle
            self.launch(device, again, "step", 1, 16, STEP, (x, 16, 1))

    def test_two_sessions_may_load_the_same_module(self) -> None:
        """One unloads, the other still launches."""
        with self.opened() as device:
            with self.opened() as other:
                loaded, theirs = device.load(self.sources), other.load(self.sources)
                other.unload(theirs.handle)
            x = device.alloc(8)
            self.launch(device, loaded, "step", 1, 2, STEP, (x, 2, 1))
            assert device.read(x, 0, 8) == struct.pack("<2I", 0, 1)

    def test_what_is_no_module_is_refused(self) -> None:
        """In any kind, and nothing is left of it."""
        nonsense = (b"\0\1\2 nonsense (", b"")
        with self.opened() as device:
            for kind in ModuleKind:
                for data in nonsense:
                    with refused((InvalidRequest, GpuError, Unsupported), "module_load"):
                        device.load({kind: data})
            with refused(InvalidRequest, "module_load"):
                device.load({})
            device.load(self.sources)

    # ---- launches ----

    def launch(
        self,
        device: Device,
        loaded: LoadedModule,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        kinds: tuple[ArgKind, ...],
        values: Sequence[Value],
    ) -> None:
        device.launch(device.plan(loaded.handle, kernel, grid, block, kinds), values)

    def test_a_launch_computes(self) -> None:
        """On what was written before; and what is read after it is what it made."""
        n = 1000
        with self.opened() as device:
            loaded = device.load(self.sources)
            x, y = device.alloc(4 * n), device.alloc(4 * n)
            device.write(x, 0, struct.pack(f"<{n}f", *range(n)))
            device.fill(y, 0, 4 * n, struct.pack("<f", 1.0))
            self.launch(device, loaded, "axpy", (n + 127) // 128, 128, AXPY, (2.0, x, y, n))
            assert struct.unpack(f"<{n}f", device.read(y, 0, 4 * n)) == tuple(2.0 * i + 1.0 for i in range(n))

    def test_everything_happens_in_order(self) -> None:
        """Launches, writes, fills, copies and reads, without a sync between them."""
        with self.opened() as device:
            loaded = device.load(self.sources)
            x, y = device.alloc(16), device.alloc(16)
            plan = device.plan(loaded.handle, "step", 1, 4, STEP)
            device.write(x, 0, struct.pack("<4I", 1, 1, 1, 1))
            device.launch(plan, (x, 4, 10))
            device.copy(y, 0, x, 0, 16)
            device.launch(plan, (x, 4, 10))
            device.fill(x, 0, 4, b"\7\0\0\0")
            device.launch(plan, (y, 2, 3))
            assert struct.unpack("<4I", device.read(x, 0, 16)) == (7, 111, 122, 133)
            assert struct.unpack("<4I", device.read(y, 0, 16)) == (30, 34, 12, 13)
            device.sync()

    def test_a_plan_runs_with_other_values_and_other_buffers(self) -> None:
        """Each time with exactly those that were given."""
        with self.opened() as device:
            loaded = device.load(self.sources)
            plan = device.plan(loaded.handle, "step", 1, 1, STEP)
            for number in range(20):
                x = device.alloc(4)
                device.write(x, 0, struct.pack("<I", 2))
                device.launch(plan, (x, 1, number))
                assert device.read(x, 0, 4) == struct.pack("<I", 2 * number)
                device.free(x)

    def test_every_thread_has_its_place(self) -> None:
        """Grid times block on each axis, each place once."""
        with self.opened() as device:
            loaded = device.load(self.sources)
            hits = device.alloc(4 * 8 * 15)
            self.launch(device, loaded, "places", (2, 3), (4, 5), (B, U32), (hits, 15))
            assert struct.unpack("<120I", device.read(hits, 0, 480)) == tuple(range(120))

    def test_numbers_arrive_as_they_are(self) -> None:
        """The largest, the smallest, and zeros with a sign."""
        kinds = (U32, U64, I32, I64, F32, F64, B, B)
        rows = (
            (2**32 - 1, 2**64 - 1, -(2**31), -(2**63), -0.0, 1e300),
            (0, 0, 0, 0, 0.0, 0.0),
            (1, 2, -3, -4, 0.5, -0.0),
            (7, 8, 9, 10, float("inf"), 5e-324),
        )
        with self.opened() as device:
            loaded = device.load(self.sources)
            whole, parts = device.alloc(32), device.alloc(16)
            plan = device.plan(loaded.handle, "numbers", 1, 1, kinds)
            for a, b, c, d, e, f in rows:
                device.launch(plan, (a, b, c, d, e, f, whole, parts))
                assert device.read(whole, 0, 32) == struct.pack("<QQqq", a, b, c, d)
                assert device.read(parts, 0, 16) == struct.pack("<dd", e, f)

    def test_a_grid_that_cannot_be_is_refused(self) -> None:
        """Zero, negative, oversized, of no or too many axes: before the launch, on every device alike."""
        bad: list[tuple[object, object]] = [(0, 1), (1, 0), (-1, 1), ((1, 1, 0), 1), (1, (1, -1)), ((), 1)]
        bad += [((1, 1, 1, 1), 1), (1, 1025), (1, (32, 33)), (1, (1, 1, 65)), ((1.5,), 1), (True, 1)]
        bad += [(tuple(GRID_MAX[a] + 1 if a == axis else 1 for a in range(3)), 1) for axis in range(3)]
        bad += [(1, tuple(BLOCK_MAX[a] + 1 if a == axis else 1 for a in range(3))) for axis in range(3)]
        with self.opened() as device:
            loaded = device.load(self.sources)
            for grid, block in bad:
                with refused(InvalidRequest, "launch"):
                    device.plan(loaded.handle, "step", grid, block, STEP)  # type: ignore[arg-type]

    def test_arguments_that_do_not_fit_are_refused_with_the_signature(self) -> None:
        """Too few, too many, of another size: before the launch."""
        bad = ((), (B,), (B, U32), (B, U32, U32, U32), (B, U64, U32), (U32, B, U32), (B, F64, U32))
        with self.opened() as device:
            loaded = device.load(self.sources)
            for kinds in bad:
                with refused(InvalidRequest, "launch", "step("):
                    device.plan(loaded.handle, "step", 1, 1, kinds)
            plan = device.plan(loaded.handle, "step", 1, 1, STEP)
            x = device.alloc(4)
            with refused(InvalidRequest, "launch", "step("):
                device.launch(plan, (x, 1))

    def test_a_launch_takes_only_buffers_that_are_there(self) -> None:
        """Neither freed ones nor another session's, and nothing is launched."""
        with self.opened() as device, self.opened() as other:
            loaded = device.load(self.sources)
            plan = device.plan(loaded.handle, "axpy", 1, 1, AXPY)
            x, y, gone, theirs = device.alloc(4), device.alloc(4), device.alloc(4), other.alloc(4)
            device.free(gone)
            for bad in (gone, theirs):
                with refused(NotFound, "launch"):
                    device.launch(plan, (1.0, x, bad, 1))
                with refused(NotFound, "launch"):
                    device.launch(plan, (1.0, bad, y, 1))
            device.launch(plan, (1.0, x, y, 1))
