"""What decides before a device hears of it: numbers, accounts, tables, grids, signatures."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from sublet.devices.account import MemoryAccount
from sublet.devices.grids import BLOCK_THREADS_MAX, GRID_MAX, warp_dim, whole_extent
from sublet.devices.memory import PIECES_MAX, BufferHandle, MemoryTable
from sublet.devices.signature import Parameter, Signature, Takes, check_kinds
from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, OutOfMemory
from sublet.wire.scalars import ArgKind, Scalar, f32, f64, i32, i64, packing, u32, u64

# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (u32, 0, 2**32 - 1),
        (u64, 0, 2**64 - 1),
        (i32, -(2**31), 2**31 - 1),
        (i64, -(2**63), 2**63 - 1),
    ],
)
def test_a_whole_number_fits_its_type_or_is_refused(make: Callable[[int], Scalar], low: int, high: int) -> None:
    for value in (low, 0, 1, high):
        made = make(value)
        assert made.value == value
        one = packing((made.kind,))
        assert one.unpack(one.pack(value)) == (value,)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequest, match=f"outside {low} to {high}"):
            make(value)


@pytest.mark.parametrize("value", [1.0, "1", None, True, b"1"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="not a whole number"):
        u32(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1", None, True, b"1", 10**400])
def test_what_is_no_fraction_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="not a number"):
        f64(value)  # type: ignore[arg-type]


def test_a_fraction_of_32_bits_is_the_nearest_one() -> None:
    assert f32(0.1).value == struct.unpack("<f", struct.pack("<f", 0.1))[0] != 0.1
    assert f32(float("inf")).value == float("inf")
    assert f32(3).value == 3.0
    with pytest.raises(InvalidRequest, match="too large for f32"):
        f32(1e39)


def test_arguments_are_packed_without_gaps() -> None:
    assert packing((ArgKind.U32, ArgKind.U64, ArgKind.F32, ArgKind.BUFFER, ArgKind.INT)).size == 4 + 8 + 4 + 8 + 8


# ------------------------------------------------------------------------------------------------------------ account


def test_an_account_against_a_sum() -> None:
    """Thousands of takings and givings: never over the cap, never refused where there was room."""
    chance, account, taken = random.Random(3), MemoryAccount(1000), list[int]()
    for _ in range(5000):
        if taken and chance.random() < 0.5:
            account.give(taken.pop(chance.randrange(len(taken))))
        else:
            size = chance.randint(1, 400)
            fits = sum(taken) + size <= 1000
            try:
                account.take(size, "mem_alloc")
            except OutOfMemory:
                assert not fits
            else:
                assert fits
                taken.append(size)
        assert account.used_bytes == sum(taken) == 1000 - account.free_bytes <= account.peak_bytes <= 1000


def test_a_refusal_says_how_much_there_is() -> None:
    account = MemoryAccount(4 << 20)
    account.take(3 << 20, "mem_alloc")
    with pytest.raises(OutOfMemory, match=r"2MiB \(2097152 bytes\) asked, and 1048576 bytes of the 4MiB"):
        account.take(2 << 20, "mem_alloc")


def test_a_device_of_no_bytes_lends_nothing() -> None:
    with pytest.raises(InvalidRequest):
        MemoryAccount(0)


# ------------------------------------------------------------------------------------------------------------- memory


def test_handles_are_never_used_again() -> None:
    table, seen = MemoryTable(7), set[BufferHandle]()
    for _ in range(100):
        handle = table.add(10, 256)
        assert handle not in seen
        seen.add(handle)
        table.remove(handle, "mem_free")
    assert len(table) == 0


def test_the_three_ways_to_hold_what_one_does_not_have_are_told_apart() -> None:
    table = MemoryTable(7)
    gone = table.add(10, 256)
    table.remove(gone, "mem_free")
    for handle, words in (
        (gone, "freed before"),
        (BufferHandle(7, 2), "there is no buffer 2"),
        (BufferHandle(7, 0), "there is no buffer 0"),
        (BufferHandle(7, -1), "there is no buffer"),
        (BufferHandle(6, 1), "another session"),
    ):
        with pytest.raises(NotFound, match=f"mem_read: .*{words}"):
            table.get(handle, "mem_read")


def test_a_session_has_so_many_buffers_and_no_more() -> None:
    table = MemoryTable(1)
    for _ in range(PIECES_MAX):
        table.admit(1, "mem_alloc")
        table.add(1, 0)
    with pytest.raises(CapacityExceeded, match=f"there are {PIECES_MAX} buffers"):
        table.admit(1, "mem_alloc")


def test_a_span_against_counting() -> None:
    table = MemoryTable(1)
    handle = table.add(5, 256)
    for offset in range(-2, 8):
        for length in range(-2, 8):
            fits = length >= 0 and all(0 <= at < 5 for at in range(offset, offset + length)) and 0 <= offset <= 5
            if fits:
                table.span(handle, offset, length, "mem_read")
            else:
                with pytest.raises(InvalidRequest, match="mem_read"):
                    table.span(handle, offset, length, "mem_read")


# -------------------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize(
    ("grid", "block", "dim"),
    [
        ((1, 1, 1), (1, 1, 1), (1,)),
        ((4, 1, 1), (64, 1, 1), (256,)),
        ((2, 3, 1), (4, 5, 1), (8, 15)),
        ((1, 1, 5), (1, 1, 1), (1, 1, 5)),
        ((1, 5, 1), (1, 1, 1), (1, 5)),
        ((2, 1, 1), (1, 3, 2), (2, 3, 2)),
    ],
)
def test_a_warp_launch_is_grid_times_block_without_the_ones_at_the_end(
    grid: tuple[int, int, int], block: tuple[int, int, int], dim: tuple[int, ...]
) -> None:
    assert warp_dim(grid, block) == dim


def test_warp_counts_to_31_bits_on_each_axis() -> None:
    assert warp_dim((2**21, 1, 1), (1023, 1, 1)) == (2**21 * 1023,)
    with pytest.raises(InvalidRequest, match="2147483648 in x"):
        warp_dim((2**21, 1, 1), (1024, 1, 1))


def test_an_extent_has_three_axes_and_limits() -> None:
    assert whole_extent(7, "grid") == (7, 1, 1)
    assert whole_extent((7, 2), "grid") == (7, 2, 1)
    assert whole_extent(GRID_MAX, "grid") == GRID_MAX
    assert whole_extent((32, 32), "block") == (32, 32, 1)
    with pytest.raises(InvalidRequest, match=f"2048 threads, and {BLOCK_THREADS_MAX} are possible"):
        whole_extent((32, 32, 2), "block")
    with pytest.raises(InvalidRequest, match="grid has 0 in y"):
        whole_extent((1, 0), "grid")


# ---------------------------------------------------------------------------------------------------------- signatures

KNOWN = Signature(
    kernel="f",
    parameters=(
        Parameter(name="x", takes=Takes.BUFFER, shown="array(float32)", bytes=4),
        Parameter(name="n", takes=Takes.U32, shown="uint32"),
        Parameter(name="a", takes=Takes.F32, shown="float32"),
    ),
)
SIZED = Signature(
    kernel="g",
    parameters=(
        Parameter(takes=Takes.BYTES, shown="8 bytes", bytes=8),
        Parameter(takes=Takes.BYTES, shown="4 bytes", bytes=4),
        Parameter(takes=Takes.BYTES, shown="24 bytes", bytes=24),
    ),
)


def test_what_fits_passes() -> None:
    assert check_kinds(KNOWN, (ArgKind.BUFFER, ArgKind.U32, ArgKind.F32)) == {}
    adapts = check_kinds(KNOWN, (ArgKind.BUFFER, ArgKind.INT, ArgKind.INT))
    assert set(adapts) == {1, 2}
    assert (adapts[1](7), adapts[2](7)) == (7, 7.0)
    two = Signature(kernel="g", parameters=SIZED.parameters[:2] if SIZED.parameters else ())
    assert check_kinds(two, (ArgKind.BUFFER, ArgKind.F32)) == {}
    assert check_kinds(two, (ArgKind.I64, ArgKind.U32)) == {}


@pytest.mark.parametrize(
    ("signature", "kinds", "words"),
    [
        (KNOWN, (ArgKind.BUFFER,), r"f\(x: array\(float32\), n: uint32, a: float32\) takes 3 arguments, and 1"),
        (
            KNOWN,
            (ArgKind.U64, ArgKind.U32, ArgKind.F32),
            r"argument 1 \(x: array\(float32\)\).*u64 was given.*a buffer",
        ),
        (KNOWN, (ArgKind.BUFFER, ArgKind.I32, ArgKind.F32), r"argument 2 \(n: uint32\).*i32 was given"),
        (KNOWN, (ArgKind.BUFFER, ArgKind.FLOAT, ArgKind.F32), r"argument 2.*a bare float"),
        (SIZED, (ArgKind.U32, ArgKind.U32, ArgKind.U32), r"argument 1 \(8 bytes\).*u32 has 4 bytes"),
        (SIZED, (ArgKind.INT, ArgKind.U32, ArgKind.U32), r"argument 1.*bare number has no type.*sublet.u32"),
        (SIZED, (ArgKind.U64, ArgKind.U32, ArgKind.BUFFER), r"argument 3 \(24 bytes\)"),
        (Signature(kernel="h"), (ArgKind.FLOAT,), r"argument 1 of h\(…\): a bare number has no type"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_signature(
    signature: Signature, kinds: tuple[ArgKind, ...], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"launch: .*{words}"):
        check_kinds(signature, kinds)


def test_where_the_driver_cannot_tell_types_are_trusted() -> None:
    assert check_kinds(Signature(kernel="h"), (ArgKind.U32, ArgKind.BUFFER)) == {}
