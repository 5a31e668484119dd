"""``GpuSession``: what a program writes, what it is told, and when."""

from __future__ import annotations

import array
import gc
import importlib
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.compute.arguments import f32, f64, i32, i64, u32, u64
from sublet.devices import host
from sublet.devices.interface import DeviceIdentity
from sublet.errors import (
    Disconnected,
    GpuError,
    GpuSessionEnded,
    InvalidRequest,
    LeaseNotActive,
    NotFound,
    OutOfMemory,
    StaleEpoch,
    SubletError,
    Unsupported,
)
from sublet.guest import device_service
from sublet.lease_end import EndReason
from sublet.testing.device_conformance import CUDA_KERNELS, KERNELS, WARP_KERNELS
from sublet.values import MIB, Epoch
from sublet.wire.codec import loads
from sublet.wire.device import ModuleKind
from sublet.wire.page import PageState
from tests.left_open import nothing_left_open
from tests.session_programs import run_session_program
from tests.unit.compute import session_pair
from tests.unit.compute.session_pair import EPOCH, LEASE, SessionPair

PROGRAMS = 100
SOAK = 10_000


def test_what_recipe_52_does(pair: SessionPair) -> None:
    """Memory, a module, a launch with typed arguments, the result, and everything given back."""
    data = np.arange(100, dtype=np.uint32)
    with pair.session() as gpu:
        x = gpu.mem_alloc(data.nbytes)
        gpu.mem_write(x, 0, data)
        module = gpu.module_load(WARP_KERNELS, kind="warp")
        gpu.launch(module, "step", 4, 32, [x, u32(100), u32(3)])
        gpu.sync()
        out = np.frombuffer(gpu.mem_read(x, 0, data.nbytes), np.uint32)
        gpu.module_unload(module)
        with pytest.raises(NotFound, match="was unloaded before"):
            gpu.launch(module, "step", 4, 32, [x, u32(100), u32(3)])
        gpu.mem_free(x)
    assert (out == data * 3 + np.arange(100, dtype=np.uint32)).all()
    assert pair.service._accounts.of(0).used_bytes == 0


def test_what_it_is_on_is_said(pair: SessionPair) -> None:
    with pair.session() as gpu:
        assert (gpu.device, gpu.label, gpu.is_host) == ("local/gpu0", "host device, no GPU", True)
        assert gpu.memory_bytes == 16 * MIB
        x = gpu.mem_alloc(2048)
        module = gpu.module_load(WARP_KERNELS)
        assert repr(gpu) == "<GpuSession on local/gpu0 (host device, no GPU): 1 buffer of 2KiB>"
        assert repr(x) == "<Buffer 1: 2KiB>"
        assert repr(module) == "<Module 1: warp, axpy, step, places, numbers>"
        gpu.mem_free(x)
        assert (repr(x), x.is_live) == ("<Buffer 1: freed>", False)
    assert repr(gpu) == "<GpuSession on local/gpu0 (host device, no GPU): closed>"
    assert repr(module) == "<Module 1: gone with its session>"


LIMIT = "the driver speaks CUDA 12.8, and Warp compiled by CUDA 13.4 needs a driver of CUDA 13.0 or later"


def test_what_cannot_run_is_said_when_it_opens(pair: SessionPair, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = DeviceIdentity(id="local/gpu0", label="RTX", is_host=False, limits=(LIMIT,))
    monkeypatch.setattr(host.HostDevice, "identity", property(lambda _: limited, lambda *_: None), raising=False)
    with pytest.warns(RuntimeWarning, match=re.escape(LIMIT)) as warned:
        gpu = pair.session()
    assert [one.filename for one in warned] == [session_pair.__file__], "what opened it"
    with gpu:
        assert gpu.limits == (LIMIT,)
        assert repr(gpu) == f"<GpuSession on local/gpu0 (RTX): 0 buffers of 0B; {LIMIT}>"


def test_a_guest_of_an_older_version_is_asked_for_what_it_knows(
    pair: SessionPair, monkeypatch: pytest.MonkeyPatch
) -> None:

    def older(shape: Any, body: bytes) -> Any:
        if b"takes_limits" in body:
            raise InvalidRequest("OpenSession has no field 'takes_limits'")
        return loads(shape, body)

    monkeypatch.setattr(device_service, "loads", older)
    with pair.session() as gpu:
        assert gpu.limits == ()
        gpu.mem_alloc(8)
        gpu.sync()


@pytest.mark.parametrize(
    "data",
    [
        b"abcdefgh",
        bytearray(b"abcdefgh"),
        memoryview(b"xabcdefgh")[1:],
        array.array("H", b"abcdefgh"),
        np.frombuffer(b"abcdefgh", ">u2"),
        np.frombuffer(b"aXbXcXdXeXfXgXhX", np.uint8)[::2],
        np.frombuffer(b"aebfcgdh", np.uint8).reshape(4, 2).T,
    ],
)
def test_whatever_has_bytes_is_written(pair: SessionPair, data: Any) -> None:
    """In the order in which it counts its elements, however they lie in memory."""
    with pair.session() as gpu:
        x = gpu.mem_alloc(8)
        gpu.mem_write(x, 0, data)
        assert gpu.mem_read(x) == b"abcdefgh"


@pytest.mark.needs("torch")
def test_a_tensor_is_written_and_read_into(pair: SessionPair) -> None:
    torch = importlib.import_module("torch")
    with pair.session() as gpu:
        x = gpu.mem_alloc(16)
        gpu.mem_write(x, 0, torch.arange(4, dtype=torch.float32))
        out = torch.zeros(4)
        gpu.mem_read_into(x, 0, out)
        assert out.tolist() == [0, 1, 2, 3]
        with pytest.raises(InvalidRequest, match="requires grad"):
            gpu.mem_write(x, 0, torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1, 3 * MIB + 5])
def test_much_goes_through_shared_memory(pair: SessionPair, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """In several pieces where it is very much, and nothing of it stays open."""
    monkeypatch.setattr("sublet.compute.session.CHUNK", MIB)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    with pair.session() as gpu:
        x = gpu.mem_alloc(size + 8)
        gpu.mem_write(x, 4, data)
        gpu.sync()
        with nothing_left_open():
            assert gpu.mem_read(x, 4, size) == data.tobytes()
            into = np.empty(size, np.uint8)
            gpu.mem_read_into(x, 4, into)
            assert (into == data).all()
            assert gpu.mem_read(x, 0, 4) + gpu.mem_read(x, size + 4) == bytes(8)
            gpu.sync()


def test_what_was_written_may_be_changed_at_once(pair: SessionPair) -> None:
    with pair.session() as gpu:
        for size in (8, MIB):
            data = bytearray(b"a" * size)
            x = gpu.mem_alloc(size)
            gpu.mem_write(x, 0, data)
            data[:] = b"b" * size
            assert gpu.mem_read(x) == b"a" * size


def test_fill_and_copy(pair: SessionPair) -> None:
    with pair.session() as gpu:
        x, y = gpu.mem_alloc(8), gpu.mem_alloc(8)
        gpu.mem_fill(x, 0, 8, 7)
        gpu.mem_fill(x, 4, 4, b"ab")
        gpu.mem_copy(y, 2, x, 3, 5)
        assert gpu.mem_read(y) == b"\0\0\x07abab\0"


def test_every_kind_of_number_arrives(pair: SessionPair) -> None:
    with pair.session() as gpu:
        module = gpu.module_load(WARP_KERNELS, "warp")
        whole, parts = gpu.mem_alloc(32), gpu.mem_alloc(16)
        for args in (
            [u32(1), u64(1 << 63), i32(-3), i64(-4), f32(0.5), f64(0.25)],
            [np.uint32(1), np.uint64(1 << 63), np.int32(-3), np.int64(-4), np.float32(0.5), np.float64(0.25)],
            [1, u64(1 << 63), -3, -4, 0.5, 0.25],
        ):
            gpu.launch(module, "numbers", 1, 1, [*args, whole, parts])
            found = np.frombuffer(gpu.mem_read(whole), np.int64).tolist()
            assert found == [1, -(1 << 63), -3, -4]
            assert np.frombuffer(gpu.mem_read(parts), np.float64).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([1 << 64, 1, 1], "does not fit 64 bits"),
        (["x", 1, 1], "a str cannot be passed"),
        ([None, 1, 1], "a NoneType cannot be passed"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(pair: SessionPair, args: list[Any], said: str) -> None:
    """With the signature, before anything is sent."""
    with pair.session() as gpu:
        module = gpu.module_load(WARP_KERNELS, "warp")
        with pytest.raises(InvalidRequest, match=said) as caught:
            gpu.launch(module, "step", 1, 1, args)
        assert "step(x: array(uint32), n: uint32, a: uint32)" in str(caught.value)


def test_bare_numbers_are_refused_for_cuda(pair: SessionPair) -> None:
    """Nobody could say what they should be. The module is made up: no host device has one."""
    from sublet.compute.buffers import Module

    with pair.session() as gpu:
        module = Module(gpu, 1, ModuleKind.CUDA, {"step": "step(8 bytes, 4 bytes, 4 bytes)"})
        with pytest.raises(InvalidRequest, match="bare number") as caught:
            gpu.launch(module, "step", 1, 1, [u64(1), 7, u32(1)])
        assert "argument 2 of step(8 bytes, 4 bytes, 4 bytes)" in str(caught.value)
        assert "sublet.u32" in caught.value.do


def test_a_module_in_several_kinds_and_in_none_that_suits(pair: SessionPair) -> None:
    with pair.session() as gpu:
        assert gpu.module_load(KERNELS).kind is ModuleKind.WARP
        assert gpu.module_load({"warp": WARP_KERNELS.decode(), "cuda": CUDA_KERNELS}).kind is ModuleKind.WARP
        for wrong, kind, error, said in (
            (CUDA_KERNELS, "cuda", Unsupported, "host device, no GPU"),
            (CUDA_KERNELS, None, Unsupported, "cuda runs on GPUs only"),
            (b"not a module", "warp", SubletError, "module_load"),
            (b"\x7fELF nonsense", None, SubletError, "module_load"),
            (b"?", None, InvalidRequest, "kind of this module"),
            (b"x", "metal", InvalidRequest, "no kind 'metal'"),
            (7, "warp", InvalidRequest, "int is no module"),
            (WARP_KERNELS + b"\n#" + b"x" * 100_000, "warp", None, ""),
        ):
            if error is None:
                gpu.module_load(wrong, kind)  # type: ignore[arg-type]  # large: through shared memory
                continue
            with pytest.raises(error, match=said):
                gpu.module_load(wrong, kind)  # type: ignore[arg-type]
        assert gpu.mem_read(gpu.mem_alloc(4)) == bytes(4), "the session goes on"


# ---- errors, where and when ----


def test_what_the_session_sees_itself_is_refused_at_the_call(pair: SessionPair) -> None:
    with pair.session() as gpu, pair.session() as other:
        x, foreign = gpu.mem_alloc(8), other.mem_alloc(8)
        gone = gpu.mem_alloc(8)
        gpu.mem_free(gone)
        module = gpu.module_load(WARP_KERNELS)
        for call, error, said in (
            (lambda: gpu.mem_alloc(0), InvalidRequest, "0 bytes"),
            (lambda: gpu.mem_alloc(-1), InvalidRequest, "-1 bytes"),
            (lambda: gpu.mem_alloc(1.5), InvalidRequest, "1.5 is no size"),  # type: ignore[arg-type]
            (lambda: gpu.mem_alloc(17 * MIB), OutOfMemory, "16MiB"),
            (lambda: gpu.mem_write(x, 1, bytes(8)), InvalidRequest, "8 bytes from 1 on are not within the 8 bytes"),
            (lambda: gpu.mem_write(x, 0, object()), InvalidRequest, "object has no bytes"),
            (lambda: gpu.mem_write(x, 0, np.array([object()])), InvalidRequest, "array of Python objects"),
            (lambda: gpu.mem_read(x, 0, 9), InvalidRequest, "not within"),
            (lambda: gpu.mem_read_into(x, 0, bytes(4)), InvalidRequest, "cannot be written"),
            (lambda: gpu.mem_fill(x, 0, 8, 256), InvalidRequest, "no byte"),
            (lambda: gpu.mem_fill(x, 1, 8, 0), InvalidRequest, "not within"),
            (lambda: gpu.mem_copy(x, 0, x, 4, 8), InvalidRequest, "not within"),
            (lambda: gpu.mem_copy(x, 4, x, 0, 8), InvalidRequest, "not within"),
            (lambda: gpu.mem_free(gone), NotFound, "buffer 2 was freed before"),
            (lambda: gpu.mem_read(gone), NotFound, "freed before"),
            (lambda: gpu.mem_free(foreign), NotFound, "belongs to another session"),
            (lambda: gpu.launch(module, "step", 1, 1, [foreign, 1, 1]), NotFound, "another session"),
            (lambda: gpu.launch(module, "stop", 1, 1), NotFound, "It has: axpy, numbers, places, step"),
            (lambda: gpu.launch(module, "step", 0, 1), InvalidRequest, "grid has 0 in x"),
            (lambda: gpu.launch(module, "step", (1, 1, -2), 1), InvalidRequest, "grid has -2 in z"),
            (lambda: gpu.launch(module, "step", 1, (32, 33)), InvalidRequest, "1056 threads"),
        ):
            with pytest.raises(error, match=said):
                call()
        gpu.sync()
        assert gpu.mem_read(x) == bytes(8)


def test_of_ever_new_launches_only_so_many_are_remembered(pair: SessionPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have in common is, so that launching again is quick."""
    monkeypatch.setattr("sublet.compute.session.SHAPES_KEPT", 2)
    with pair.session() as gpu:
        module, x = gpu.module_load(WARP_KERNELS), gpu.mem_alloc(40)
        for block in range(1, 6):
            gpu.launch(module, "step", 1, block, [x, u32(10), u32(1)])
            assert 1 <= len(gpu._shapes) <= 2
        gpu.sync()


def test_an_error_comes_with_the_next_call_that_waits_and_names_the_launch(pair: SessionPair) -> None:
    """What stood before it has happened, what stood behind it has not, and what was freed is free."""
    with pair.session() as gpu:
        module = gpu.module_load(WARP_KERNELS)
        x, y = gpu.mem_alloc(8), gpu.mem_alloc(8)
        gpu.mem_fill(x, 0, 8, 1)
        gpu.launch(module, "step", 2, 16, [x, 2])
        gpu.mem_fill(x, 0, 8, 2)
        z = gpu.mem_alloc(8)
        gpu.mem_free(y)
        with pytest.raises(InvalidRequest, match=r"step\(x: array\(uint32\), n: uint32, a: uint32\) takes 3") as caught:
            gpu.sync()
        assert "operation 4 since the last wait: launch 'step', grid 2×1×1, block 16×1×1" in str(caught.value)
        gpu.sync()
        assert gpu.mem_read(x) == b"\1" * 8
        with pytest.raises(NotFound, match="not allocated"):
            gpu.mem_read(z)
        gpu.mem_alloc(8)
        gpu.sync()
        assert pair.service._accounts.of(0).used_bytes == 16, "y was freed, and z never there"


def test_an_error_nobody_waited_for_comes_with_the_end(pair: SessionPair) -> None:
    with pytest.raises(InvalidRequest, match="takes 3 arguments"), pair.session() as gpu:
        gpu.launch(gpu.module_load(WARP_KERNELS), "step", 1, 1, [])


def test_the_error_of_the_block_is_not_hidden(pair: SessionPair) -> None:
    def fail() -> None:
        with pair.session() as gpu:
            gpu.launch(gpu.module_load(WARP_KERNELS), "step", 1, 1, [])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_an_error_of_the_device_names_the_call(pair: SessionPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, plan: object, values: object) -> None:
        raise GpuError("launch: it fell off its bus", call="launch")

    monkeypatch.setattr(host.HostDevice, "_launch", fails)
    with pair.session() as gpu:
        gpu.launch(gpu.module_load(WARP_KERNELS), "step", 1, 1, [gpu.mem_alloc(4), 1, 1])
        with pytest.raises(GpuError, match="it fell off its bus") as caught:
            gpu.sync()
        assert caught.value.call == "launch"


def test_memory_is_the_leases_and_not_the_sessions(pair: SessionPair) -> None:
    """Of two sessions the second finds what the first left; the refusal is told at the next wait."""
    with pair.session() as gpu, pair.session() as other:
        x = gpu.mem_alloc(10 * MIB)
        gpu.sync()
        y = other.mem_alloc(10 * MIB)
        with pytest.raises(OutOfMemory, match="mem_alloc: 10MiB"):
            other.sync()
        assert not y.is_live
        gpu.mem_free(x)
        gpu.sync()
        other.mem_alloc(10 * MIB)
        other.sync()


# ---- when it goes off ----


def test_what_nobody_waits_for_goes_off_a_moment_later(pair: SessionPair) -> None:
    with pair.session() as gpu:
        gpu.mem_alloc(4096)
        until = time.monotonic() + 60
        while pair.service._accounts.of(0).used_bytes != 4096:
            assert time.monotonic() < until, "it was never sent"
            time.sleep(0.005)


def test_very_many_operations_go_off_in_several_batches(pair: SessionPair) -> None:
    with pair.session() as gpu:
        module = gpu.module_load(WARP_KERNELS)
        x = gpu.mem_alloc(4)
        for _ in range(20_000):
            gpu.launch(module, "step", 1, 1, [x, u32(1), u32(1)])
        for _ in range(64):
            gpu.mem_write(x, 0, b"abcd" * 1)
        gpu.sync()
    assert gpu.totals is not None
    assert (gpu.totals.launches, gpu.totals.failures, gpu.totals.bytes_in) == (20_000, 0, 256)


def test_several_threads_take_turns(pair: SessionPair) -> None:
    with pair.session() as gpu:
        module = gpu.module_load(WARP_KERNELS)
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                for step in range(50):
                    x = gpu.mem_alloc(64)
                    gpu.mem_fill(x, 0, 64, number)
                    gpu.launch(module, "step", 1, 16, [x, u32(0), u32(1)])
                    if gpu.mem_read(x, step % 8, 8) != bytes((number,)) * 8:
                        wrong.append(number)
                    gpu.mem_free(x)
            except SubletError as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong


def test_it_counts_as_use_while_something_is_done(pair: SessionPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer, a moment after."""
    uses: list[str] = []

    def rest_after(seconds: float) -> None:
        monkeypatch.setattr("sublet.compute.session_engine.IDLE_S", seconds)

    def in_use() -> Any:
        uses.append("begin")
        return lambda: uses.append("end")

    def is_over() -> bool:
        return len(uses) % 2 == 0

    with pair.session(in_use=in_use) as gpu:
        assert uses == []
        for number in (1, 2):
            rest_after(3600.0)
            gpu.mem_alloc(4)
            assert uses == ["begin", "end"] * (number - 1) + ["begin"]
            rest_after(0.05)
            until = time.monotonic() + 60
            while not is_over():
                assert time.monotonic() < until, "it was never over"
                time.sleep(0.01)
        rest_after(3600.0)
        gpu.sync()
    assert uses == ["begin", "end"] * 3


# ---- its end ----


def test_the_end_of_the_lease_is_the_end_of_the_session(pair: SessionPair) -> None:
    gpu = pair.session()
    x = gpu.mem_alloc(4)
    gpu.sync()
    pair.writer.write(pair.view(state=PageState.OVER, reason=EndReason.PREEMPTED))
    gpu.mem_fill(x)
    with pytest.raises(GpuSessionEnded, match="taken"):
        gpu.sync()
    with pytest.raises(GpuSessionEnded):
        gpu.mem_alloc(4)
    assert pair.service._accounts.of(0).used_bytes == 0, "it is freed at once"
    gpu.close()
    gpu.close()


def test_nothing_is_sent_under_a_lease_that_is_known_to_be_over(pair: SessionPair) -> None:
    from sublet.lease_end import LeaseEnd

    over = False

    def check() -> None:
        if over:
            raise LeaseNotActive("lease l-7 was released", end=LeaseEnd(reason=EndReason.RELEASED, at="", detail=""))

    gpu = pair.session(check=check)
    gpu.sync()
    over = True
    with pytest.raises(GpuSessionEnded) as caught:
        gpu.sync()
    assert caught.value.end is not None
    assert caught.value.end.reason is EndReason.RELEASED
    gpu.close()


def test_another_epoch_may_not_open_one_here(pair: SessionPair) -> None:
    from sublet.compute.session_engine import Engine

    line = pair.line()
    with pytest.raises(StaleEpoch):
        Engine(line, LEASE, Epoch(EPOCH.incarnation, EPOCH.n + 1))
    line.close()
    line = pair.line()
    with pytest.raises(NotFound, match="1 device,"):
        Engine(line, LEASE, EPOCH, device=1)
    line.close()


def test_a_connection_that_breaks_ends_it(pair: SessionPair) -> None:
    def explain(error: SubletError) -> SubletError:
        assert isinstance(error, Disconnected)
        return GpuSessionEnded("its guest ended by SIGSEGV")

    gpu = pair.session(explain=explain)
    x = gpu.mem_alloc(4)
    gpu.sync()
    gpu._engine._line._talk._sock.shutdown(socket.SHUT_RDWR)
    gpu.mem_fill(x)
    with pytest.raises(GpuSessionEnded, match="SIGSEGV"):
        gpu.sync()
    with pytest.raises(GpuSessionEnded, match="SIGSEGV"):
        gpu.mem_alloc(1)
    gpu.close()


def test_one_that_is_dropped_warns_and_is_freed(pair: SessionPair) -> None:
    def use() -> None:
        gpu = pair.session()
        gpu.mem_alloc(64)
        gpu.sync()
        del gpu
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        use()
    until = time.monotonic() + 60
    while pair.service._accounts.of(0).used_bytes:
        assert time.monotonic() < until, "it was never freed"
        time.sleep(0.01)


def test_a_fork_is_told_that_it_is_not_its_own(pair: SessionPair) -> None:
    with pair.session() as gpu:
        gpu._engine._pid += 1
        with pytest.raises(LeaseNotActive, match="fork"):
            gpu.mem_alloc(4)


# ---- random programs ----


@pytest.mark.slow
def test_random_programs_do_what_numpy_says(tmp_path: Path, kernel_cache: str) -> None:
    _programs(tmp_path, kernel_cache, range(PROGRAMS))


@pytest.mark.soak
def test_ten_thousand_programs_do_what_numpy_says(tmp_path: Path, kernel_cache: str) -> None:
    _programs(tmp_path, kernel_cache, range(PROGRAMS, PROGRAMS + SOAK))


def _programs(place: Path, cache: str, seeds: range) -> None:
    pair = SessionPair(place, cache)
    with pair.session() as keeper:  # keeps the kernels loaded
        keeper.module_load(KERNELS)
        for seed in seeds:
            with pair.session() as gpu:
                run_session_program(gpu, seed)
            assert pair.service._accounts.of(0).used_bytes == 0, f"seed {seed} left something"
    pair.close()


def gives_nothing_back(self: Any, start: int) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        ("sublet.compute.session_queue.Sent", "never_made", lambda self, start: []),
        ("sublet.compute.session_queue.Sent", "given_back", gives_nothing_back),
        ("sublet.compute.buffers.Buffer", "span", lambda self, owner, offset, length, call: None),
    ],
)
def test_programs_find_a_session_that_is_wrong(
    tmp_path: Path, kernel_cache: str, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, broken: Any
) -> None:
    """What could not fail would prove nothing."""
    monkeypatch.setattr(f"{owner}.{name}", broken)
    with pytest.raises((AssertionError, SubletError)):
        _programs(tmp_path, kernel_cache, range(60))


@pytest.mark.parametrize("when", ["asked", "answered"])
def test_an_interrupt_in_the_middle_of_a_message_ends_the_session_and_never_hangs(
    pair: SessionPair, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Where Ctrl-C came between a message and what is noted of it, nobody waits for an answer that was taken already,
    or that will never come."""
    gpu = pair.session()
    x = gpu.mem_alloc(64)
    gpu.sync()
    line, name = gpu._engine._line, {"asked": "ask", "answered": "answer"}[when]
    plain = getattr(line, name)

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(line, name, plain)
        if when == "answered":
            plain(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(line, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.mem_read(x)
    with pytest.raises((GpuSessionEnded, Disconnected), match="interrupt"):
        gpu.mem_read(x)
    gpu.close()
