"""WASM tasklets: what they give, what they use, and how each hostile module ends. The worker survives every one."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sublet.errors import (
    InvalidRequest,
    OutOfFuel,
    SubletError,
    Unsupported,
    WasmEntryMissing,
    WasmError,
    WasmImportForbidden,
    WasmInvalidModule,
    WasmMemoryLimit,
    WasmOutputTooLarge,
    WasmTrap,
)
from sublet.jobs import wasm
from sublet.jobs.wasm import WasmTasklet, run_tasklet
from sublet.wire.usage_counters import TallyFile, total

pytestmark = pytest.mark.needs("wasmtime")

UPPER = """
(module
  (memory (export "memory") 2)
  (global $length (mut i32) (i32.const 0))
  (func (export "init") (param $n i32) (result i32)
    (drop (memory.grow (i32.div_u (i32.add (local.get $n) (i32.const 65535)) (i32.const 65536))))
    (i32.const 1024))
  (func (export "run") (param $at i32) (param $n i32) (result i32)
    (local $i i32)
    (global.set $length (local.get $n))
    (block $done
      (loop $next
        (br_if $done (i32.ge_u (local.get $i) (local.get $n)))
        (i32.store8 (i32.add (local.get $at) (local.get $i))
          (i32.and (i32.load8_u (i32.add (local.get $at) (local.get $i))) (i32.const 0xdf)))
        (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br $next)))
    (i32.const 0))
  (func (export "finalize") (result i64)
    (i64.or (i64.shl (i64.const 1024) (i64.const 32)) (i64.extend_i32_u (global.get $length)))))
"""
"""Clears bit 5 of every byte: letters become capital ones."""


def core(body: str, *, more: str = "", pages: str = "1") -> str:
    """A core module with this body of ``run``."""
    return f"""(module {more} (memory (export "memory") {pages})
      (func (export "run") (param i32 i32) (result i32) {body}))"""


def command(body: str, *, more: str = "", data: str = "") -> str:
    """A WASI command with this body of ``_start``."""
    return f"""(module
      (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
      (import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))
      (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "args_sizes_get" (func $sizes (param i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
      {more} (memory (export "memory") 1) {data}
      (func $put (param $at i32) (param $n i32)
        (i32.store (i32.const 0) (local.get $at)) (i32.store (i32.const 4) (local.get $n))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))
      (func (export "_start") {body}))"""


EXAMPLES = Path(__file__).parents[3] / "examples"
LOOP = "(loop $again (br $again)) (i32.const 0)"


def run(module: str | bytes, data: bytes = b"", args: tuple[str, ...] = (), **limits: Any) -> wasm.TaskletResult:
    return run_tasklet(WasmTasklet(module, **limits), data, args)


def fails(kind: type[SubletError], module: str | bytes, data: bytes = b"", **limits: Any) -> Any:
    """The error, which is of this kind exactly, and after which another tasklet runs as ever."""
    with pytest.raises(kind) as caught:
        run(module, data, **limits)
    assert type(caught.value) is kind
    assert not caught.value.transient
    assert caught.value.do
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))
    assert run(UPPER, b"abc").output == b"ABC"
    return caught.value


# ---- what they give


def test_a_core_module_takes_its_input_through_its_memory() -> None:
    result = run(UPPER, b"hello" * 30_000)
    assert result.output == b"HELLO" * 30_000
    assert result.fuel > 150_000


def test_a_module_without_input_and_output_is_one_function() -> None:
    assert run(core("(i32.const 0)")).output == b""


def test_an_entry_may_have_any_name() -> None:
    assert run(UPPER.replace('"run"', '"work"'), b"abc", entry="work").output == b"ABC"


def test_binary_and_text_are_the_same_module() -> None:
    import wasmtime

    assert run(bytes(wasmtime.wat2wasm(UPPER)), b"abc") == run(UPPER, b"abc")


def test_fuel_and_bytes_are_the_same_in_every_run_and_process() -> None:
    results = {run(UPPER, b"abc" * 1000) for _ in range(5)}
    code = "from tests.unit.jobs.test_wasm import *; print(run(UPPER, b'abc' * 1000).fuel)"
    here = Path(__file__).parents[3]
    other = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=60)
    assert other.returncode == 0, other.stderr
    (result,) = results
    assert int(other.stdout) == result.fuel == 57_024


def test_fuel_is_counted_for_the_lease_also_of_what_failed_and_after_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = TallyFile.create(str(tmp_path / "rows"))
    monkeypatch.setenv("SUBLET_TALLY", str(tmp_path / "rows"))
    wasm._fuel_count.cache_clear()
    once = run(UPPER, b"").fuel
    used = once + sum(run(UPPER, bytes(n)).fuel for n in range(20))
    with pytest.raises(OutOfFuel) as caught:
        run(UPPER, bytes(1000), fuel=500)
    assert caught.value.fuel == 500
    assert total(tally.rows(), 0).fuel == used + 500
    if (child := os.fork()) == 0:
        run(UPPER, b"")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert total(tally.rows(), 0).fuel == used + 500 + once
    wasm._fuel_count.cache_clear()
    tally.close()


def test_a_tasklet_is_a_function_that_can_be_pickled() -> None:
    tasklet = pickle.loads(pickle.dumps(WasmTasklet(UPPER)))  # noqa: S301 - our own
    assert tasklet(b"xyz").output == b"XYZ"


def test_a_command_reads_stdin_and_arguments_and_writes_stdout() -> None:
    body = """
      (i32.store (i32.const 0) (i32.const 100)) (i32.store (i32.const 4) (i32.const 50))
      (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
      (call $put (i32.const 100) (i32.load (i32.const 8)))
      (drop (call $sizes (i32.const 200) (i32.const 204)))
      (drop (call $args (i32.const 300) (i32.const 400)))
      (call $put (i32.const 400) (i32.load (i32.const 204)))"""
    assert run(command(body), b"input", ("one", "two"), entry="_start").output == b"inputtasklet\0one\0two\0"


CLOCK_AND_CHANCE = """
  (drop (call $clock (i32.const 0) (i64.const 1) (i32.const 100)))
  (drop (call $random (i32.const 108) (i32.const 16)))
  (call $put (i32.const 100) (i32.const 24))"""
FLOATS = """(local $n i32) (local $x f64)
  (local.set $x (f64.const 2))
  (loop $next
    (local.set $x (f64.add (f64.sqrt (local.get $x)) (f64.div (f64.const 1) (f64.convert_i32_s (local.get $n)))))
    (local.set $n (i32.add (local.get $n) (i32.const 1)))
    (br_if $next (i32.lt_u (local.get $n) (i32.const 1000))))
  (f64.store (i32.const 0) (local.get $x))
  (f32.store (i32.const 8) (f32.demote_f64 (f64.sub (local.get $x) (local.get $x))))
  (i32.const 0)"""
GROWS = """(loop $again (br_if $again (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))
  (memory.fill (i32.const 0) (i32.const 7) (i32.const 100000))
  (i32.store (i32.const 0) (memory.size)) (i32.const 0)"""
TWELVE = '(func (export "finalize") (result i64) (i64.const 12))'
CORPUS = {
    "no input": (UPPER, "run", b"", "", 23),
    "a loop over bytes": (UPPER, "run", b"abc" * 1000, "414243414243…414243414243", 57_024),
    "floats, and what is no number": (core(FLOATS, more=TWELVE), "run", b"", "000000000000f07f0000c07f", 16_015),
    "memory that grows to its limit": (core(GROWS, more=TWELVE), "run", b"", "000400000707070707070707", 106_155),
    "clock and chance": (
        command(CLOCK_AND_CHANCE),
        "_start",
        b"",
        "000064a7b3b6e00d8fecee59641214f93ba6e8a37083cf15",
        23,
    ),
    "primes": ((EXAMPLES / "primes.wat").read_text(), "run", b"10000", "31323239", 403_409),
}
"""Module, entry, input; the output's first and last bytes, and the fuel: the same on every machine and Python."""


@pytest.mark.parametrize("name", CORPUS)
def test_fuel_and_bytes_of_the_corpus_are_these(name: str) -> None:
    module, entry, data, output, fuel = CORPUS[name]
    result = run(module, data, entry=entry)
    shown = result.output.hex()
    assert (shown if len(shown) < 64 else f"{shown[:12]}…{shown[-12:]}", result.fuel) == (output, fuel)


def test_clock_and_random_numbers_are_fixed() -> None:
    first = run(command(CLOCK_AND_CHANCE), entry="_start")
    assert int.from_bytes(first.output[:8], "little") == 10**18
    assert len(set(first.output[8:])) > 8
    time.sleep(0.001)
    assert run(command(CLOCK_AND_CHANCE), entry="_start") == first


def test_a_command_opens_no_file() -> None:
    body = """
      (i32.store8 (i32.const 100) (call $open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
        (i64.const 0) (i64.const 0) (i32.const 0) (i32.const 200)))
      (call $put (i32.const 100) (i32.const 1))"""
    assert run(command(body), entry="_start").output == bytes((76,))


def test_a_command_that_exits_with_0_has_succeeded() -> None:
    assert run(command("(call $exit (i32.const 0)) (unreachable)"), entry="_start").output == b""


def test_what_a_command_says_on_stderr_is_in_its_error() -> None:
    body = """
      (i32.store (i32.const 0) (i32.const 100)) (i32.store (i32.const 4) (i32.const 5))
      (drop (call $write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 8)))
      (call $exit (i32.const 3))"""
    error = fails(WasmTrap, command(body, data='(data (i32.const 100) "ouch!")'), entry="_start")
    assert "exit status 3" in error.message
    assert error.message.endswith("It said last:\nouch!")


def test_nans_are_canonical() -> None:
    """Which bits 0/0 has differs between processors."""
    body = """(i64.store (i32.const 0)
        (i64.reinterpret_f64 (f64.div (f64.convert_i32_s (local.get 1)) (f64.convert_i32_s (local.get 1)))))
      (i32.const 0)"""
    finalize = '(func (export "finalize") (result i64) (i64.const 8))'
    assert run(core(body, more=finalize)).output == bytes.fromhex("000000000000f87f")


def test_nothing_of_a_run_is_left_to_the_next() -> None:
    counting = """(module (memory (export "memory") 1)
      (func (export "run") (param i32 i32) (result i32)
        (i32.store8 (i32.const 0) (i32.add (i32.load8_u (i32.const 0)) (i32.const 1))) (i32.const 0))
      (func (export "finalize") (result i64) (i64.const 1)))"""
    assert [run(counting).output for _ in range(3)] == [b"\1"] * 3


def test_a_module_is_compiled_once_per_content() -> None:
    before = wasm._compiled.cache_info().misses
    module = core("(i32.const 0)", more='(func (export "once"))')
    for fuel in range(1000, 1010):
        run(module, fuel=fuel)
    run(core("(i32.const 0)", more='(func (export "twice"))'))
    assert wasm._compiled.cache_info().misses == before + 2


def test_of_many_modules_the_newest_stay_compiled() -> None:
    for number in range(wasm.MODULES_KEPT + 2):
        run(core("(i32.const 0)", more=f'(func (export "n{number}"))'))
    assert wasm._compiled.cache_info().currsize == wasm.MODULES_KEPT


def test_the_id_of_a_tasklet_is_that_of_its_content() -> None:
    base = WasmTasklet(UPPER)
    same = WasmTasklet(UPPER, memory=64 << 20, output_max=16 << 20)
    others = [
        WasmTasklet(UPPER + " "),
        WasmTasklet(UPPER.encode()),
        WasmTasklet(UPPER, entry="other"),
        WasmTasklet(UPPER, fuel=5),
        WasmTasklet(UPPER, memory="1MiB"),
        WasmTasklet(UPPER, output_max="1MiB"),
    ]
    assert same.content_id == base.content_id
    assert len({base.content_id, *(one.content_id for one in others)}) == 7
    assert len(base.content_id) == 32


# ---- hostile modules


def test_an_endless_loop_uses_up_its_fuel() -> None:
    error = fails(OutOfFuel, core(LOOP), fuel=100_000)
    assert "fuel (100000) in run" in error.message
    assert 99_000 < error.fuel <= 100_000


def test_a_start_function_that_loops_uses_up_its_fuel() -> None:
    fails(OutOfFuel, core("(i32.const 0)", more="(func $start (loop $again (br $again))) (start $start)"), fuel=100_000)


def test_deep_recursion_is_a_trap() -> None:
    error = fails(WasmTrap, core("(call $down) (i32.const 0)", more="(func $down (call $down))"))
    assert "stack" in error.message
    assert error.function == "down"


def test_a_memory_bomb_meets_its_limit() -> None:
    body = """(loop $again (br_if $again (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) (unreachable)"""
    error = fails(WasmMemoryLimit, core(body), memory="2MiB")
    assert "all of its memory (2MiB)" in error.message


def test_a_module_that_begins_with_too_much_memory_is_refused() -> None:
    fails(WasmMemoryLimit, core("(i32.const 0)", pages="100"), memory="1MiB")


def test_a_table_grows_to_a_bound() -> None:
    body = """(drop (table.grow $t (ref.null func) (i32.const 2000000000)))
      (if (i32.ne (table.size $t) (i32.const 1)) (then (unreachable))) (i32.const 0)"""
    assert run(core(body, more="(table $t 1 funcref)")).output == b""


@pytest.mark.parametrize(
    ("name", "entry", "module"),
    [
        ("env.system", "run", core("(i32.const 0)", more='(import "env" "system" (func))')),
        (
            "wasi_snapshot_preview1.fd_write",
            "run",
            core(
                "(i32.const 0)",
                more='(import "wasi_snapshot_preview1" "fd_write" (func (param i32 i32 i32 i32) (result i32)))',
            ),
        ),
        ("env.system", "_start", command("", more='(import "env" "system" (func))')),
        (
            "wasi_snapshot_preview1.sock_accept",
            "_start",
            command("", more='(import "wasi_snapshot_preview1" "sock_accept" (func (param i32 i32 i32) (result i32)))'),
        ),
        (
            "wasi.thread-spawn",
            "_start",
            command("", more='(import "wasi" "thread-spawn" (func (param i32) (result i32)))'),
        ),
        (
            "wasi_snapshot_preview1.fd_close",
            "_start",
            command("", more='(import "wasi_snapshot_preview1" "fd_close" (func (param i64) (result i32)))'),
        ),
    ],
)
def test_an_import_that_tasklets_do_not_have_is_named(name: str, entry: str, module: str) -> None:
    assert name in fails(WasmImportForbidden, module, entry=entry).message


def test_an_output_that_is_too_large_is_refused_before_it_is_copied() -> None:
    finalize = '(func (export "finalize") (result i64) (i64.const 0xffffffff))'
    fails(WasmOutputTooLarge, core("(i32.const 0)", more=finalize), output_max="1MiB")
    body = "(loop $again (call $put (i32.const 0) (i32.const 60000)) (br $again))"
    fails(WasmOutputTooLarge, command(body), entry="_start", output_max="1MiB")


@pytest.mark.parametrize("place", ["0x0000fff0_00000020", "0xffffffff_00000001", "0xfffffff0_00000100"])
def test_an_output_beyond_the_memory_is_refused(place: str) -> None:
    finalize = f'(func (export "finalize") (result i64) (i64.const {place}))'
    assert fails(WasmTrap, core("(i32.const 0)", more=finalize)).function == "finalize"


@pytest.mark.parametrize("address", ["65530", "-1", "-2147483648"])
def test_an_input_that_init_puts_beyond_the_memory_is_refused(address: str) -> None:
    init = f'(func (export "init") (param i32) (result i32) (i32.const {address}))'
    assert fails(WasmTrap, core("(i32.const 0)", more=init), b"0123456789").function == "init"


@pytest.mark.parametrize("address", ["65534", "-1", "-16"])
def test_a_command_that_points_beyond_its_memory_is_told_so(address: str) -> None:
    body = f"""
      (i32.store8 (i32.const 100) (call $random (i32.const {address}) (i32.const 1000)))
      (i32.store8 (i32.const 101) (call $write (i32.const 1) (i32.const {address}) (i32.const 1) (i32.const 8)))
      (i32.store8 (i32.const 102) (call $clock (i32.const 0) (i64.const 0) (i32.const {address})))
      (call $put (i32.const 100) (i32.const 3))"""
    assert run(command(body), entry="_start").output == bytes((21, 21, 21))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (b"\0asm\1\0\0\0\xff\xff\xff", ""),
        (b"MZ\x90\0", ""),
        (b"\0asm\x0d\0\1\0", ""),
        ("(module (func (result i32)))", ""),
        ("this is no module", ""),
        (core("(i32.const 0)", more="(memory $shared 1 1 shared)"), ""),
        (b"\0asm\1\0\0\0" + bytes(17 << 20), "16MiB"),
    ],
)
def test_what_is_no_module_is_refused(module: bytes | str, words: str) -> None:
    assert words in fails(WasmInvalidModule, module).message


def test_relaxed_simd_is_refused() -> None:
    body = """(drop (i8x16.relaxed_swizzle (v128.const i64x2 0 0) (v128.const i64x2 0 0))) (i32.const 0)"""
    fails(WasmInvalidModule, core(body))


@pytest.mark.parametrize(
    ("module", "entry", "words"),
    [
        (UPPER, "work", "it has finalize, init, run"),
        ('(module (memory (export "memory") 1))', "run", "it has none"),
        ('(module (memory (export "memory") 1) (func (export "run")))', "run", "from (i32 i32) to (i32)"),
        (core("(i32.const 0)", more='(func (export "finalize") (result i32) (i32.const 0))'), "run", "to (i64)"),
        ('(module (func (export "run") (param i32 i32) (result i32) (i32.const 0)))', "run", "no memory"),
        (UPPER, "_start", "'_start'"),
    ],
)
def test_a_module_that_lacks_what_its_convention_needs_is_refused(module: str, entry: str, words: str) -> None:
    assert words in fails(WasmEntryMissing, module, entry=entry).message


def test_input_for_a_module_without_init_is_refused() -> None:
    assert fails(WasmEntryMissing, core("(i32.const 0)"), b"data").function == "init"


def test_a_status_that_is_not_0_is_a_failure() -> None:
    assert "run returned status 7" in fails(WasmTrap, core("(i32.const 7)")).message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("(unreachable)", "unreachable"),
        ("(i32.div_u (i32.const 1) (i32.const 0))", "divide by zero"),
        ("(i32.load (i32.const -8))", "out of bounds"),
    ],
)
def test_a_trap_says_what_it_was(body: str, words: str) -> None:
    error = fails(WasmTrap, core(body))
    assert words in error.message
    assert error.function == "run"
    assert len(error.module) == 32


# ---- interruption


def interrupted_after(seconds: float, number: signal.Signals) -> threading.Thread:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


class Ended(BaseException):
    pass


def raise_ended(number: int, frame: object) -> None:
    raise Ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_the_call_interrupts_a_loop_at_once(number: signal.Signals) -> None:
    """As the end of the lease does, and a cancellation: whatever fuel is left, the error is the handler's."""
    run(UPPER, b"x")
    before = signal.signal(number, raise_ended)
    threads: list[threading.Thread] = []

    def loop() -> None:  # on a busy machine the signal may come before it begins
        threads.append(interrupted_after(0.05, number))
        run(core(LOOP), fuel=1 << 62)

    try:
        with pytest.raises(Ended):
            loop()
    finally:
        for thread in threads:
            thread.join()
        signal.signal(number, before)
    assert run(UPPER, b"abc").output == b"ABC"


def test_a_signal_that_means_nothing_to_the_call_changes_no_result() -> None:
    """The module is begun anew, and gives the same bytes and the same fuel."""
    data = b"abcdefgh" * 12_500
    expected = run(UPPER, data)
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))

    is_over = threading.Event()

    def kill_often() -> None:
        while len(came) < 20 and not is_over.wait(0.002):  # of several that wait to be met there is one
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=kill_often)
    thread.start()
    try:
        while thread.is_alive():
            assert run(UPPER, data) == expected
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_the_epochs_move_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that moves them is started again: a loop that never ends must stay interruptible."""
    moved = threading.Event()
    calls: list[int] = []

    class Engine:
        def increment_epoch(self) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise MemoryError("no memory")
            moved.set()

    monkeypatch.setattr(wasm, "_engine", Engine)
    mover = wasm._EpochMover()
    try:
        mover.writing.send(bytes((signal.SIGTERM,)))
        while not moved.wait(0.05):
            mover.writing.send(bytes((signal.SIGINT,)))
    finally:
        mover.writing.close()
        mover.thread.join(30)
        mover.reading.close()


def test_the_wakeup_descriptor_of_the_program_is_put_back() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        run(UPPER, b"abc")
        assert signal.set_wakeup_fd(writing) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def test_a_forked_child_is_interrupted_by_its_own_signals_and_its_parent_is_not() -> None:
    """Whatever the parent ran before: the child has a thread and a descriptor of its own, or none."""
    run(UPPER, b"abc")
    moved = wasm._mover()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
            assert signal.set_wakeup_fd(-1) == -1
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            run(core("(loop $l (br $l)) (i32.const 0)"), fuel=wasm.FUEL_MAX)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert wasm._mover() is moved
    assert moved.thread.is_alive()


def test_another_thread_may_run_tasklets() -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(run(UPPER, b"abc").output)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"ABC"] * 4


# ---- bad input


@pytest.mark.parametrize(
    "bad",
    [
        {"module": ""},
        {"module": b""},
        {"module": 7},
        {"entry": ""},
        {"entry": 7},
        {"fuel": 0},
        {"fuel": 1.5},
        {"fuel": True},
        {"fuel": 1 << 63},
        {"memory": "much"},
        {"memory": 5},
        {"output_max": "-1MiB"},
    ],
)
def test_bad_limits_are_refused_at_once(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        WasmTasklet(**{"module": UPPER, **bad})


def test_bad_input_is_refused() -> None:
    tasklet = WasmTasklet(UPPER)
    with pytest.raises(InvalidRequest, match="bytes"):
        tasklet("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="WASI"):
        tasklet(b"", ["an argument"])
    with pytest.raises(InvalidRequest, match="NUL"):
        WasmTasklet(command(""), entry="_start")(b"", ["a\0b"])


def test_check_finds_what_is_wrong_before_anything_runs() -> None:
    WasmTasklet(UPPER).check()
    with pytest.raises(WasmError):
        WasmTasklet(UPPER, entry="work").check()


def test_without_wasmtime_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wasmtime", None)
    wasm._wasmtime.cache_clear()
    with pytest.raises(Unsupported, match=r"install .*\[wasm\]"):
        run(UPPER + " ")


# ---- the examples

PRIMES = Path(__file__).parents[3] / "examples" / "primes.c"


@pytest.mark.needs("clang")
def test_the_example_in_c_counts_primes(tmp_path: Path) -> None:
    """Compiled by Debian's clang, without a C library; the same module as in the guide."""
    module = tmp_path / "primes.wasm"
    flags = ["--target=wasm32", "-O2", "-nostdlib", "-Wl,--no-entry", "-Wl,--strip-all"]
    exports = [f"-Wl,--export={name}" for name in ("init", "run", "finalize")]
    clang = shutil.which("clang")
    assert clang is not None
    subprocess.run([clang, *flags, *exports, "-o", str(module), str(PRIMES)], check=True, timeout=60)
    counts_primes(WasmTasklet(module.read_bytes()))


def test_the_same_example_as_text_counts_primes() -> None:
    counts_primes(WasmTasklet(PRIMES.with_suffix(".wat").read_text()))


def counts_primes(tasklet: WasmTasklet) -> None:
    found = [tasklet(b"%d" % n).output for n in (0, 10, 100, 1000, 100_000, 1_000_000)]
    assert found == [b"0", b"4", b"25", b"168", b"9592", b"78498"]
    assert tasklet(b"1000").fuel == tasklet(b"1000").fuel
    for wrong, status in ((b"ten", 1), (b"", 1), (b"1000001", 2)):
        with pytest.raises(WasmTrap, match=f"status {status}"):
            tasklet(wrong)
