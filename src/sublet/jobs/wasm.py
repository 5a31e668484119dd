"""WebAssembly tasklets: the same module and input give the same bytes and the same fuel on every machine.

Two conventions. A *core module* exports its memory, optionally ``init(length) -> address`` (where the input is put),
its entry ``(address, length) -> status`` (0 is success) and optionally ``finalize() -> place`` (where the output lies:
the address in the high 32 bits, the length in the low 32). It imports nothing. A *WASI command* (``entry="_start"``)
reads its input on stdin, gets arguments, and writes its output to stdout. It has no files and no network; its clock
stands still and its random numbers are always the same, since both are ours and not the runtime's.

What else would differ between machines is switched off or fixed: NaNs are canonical, there are no threads and no
relaxed SIMD, the depth of the stack has a bound of its own. Fuel is counted by the runtime instruction by instruction,
so it depends on its version; the lock file fixes that.

A tasklet that runs is interrupted by the end of its lease, and by a cancellation, with or without fuel: a signal is
noticed by a thread that moves the runtime's epoch, and the interpreter then raises what the signal means. What was
interrupted for nothing is run again from its beginning, which is the same run.

A worker compiles a module once, from its bytes. Nothing that was compiled elsewhere is ever loaded.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from sublet.background import start_thread
from sublet.errors import (
    InvalidRequest,
    OutOfFuel,
    Unsupported,
    WasmEntryMissing,
    WasmError,
    WasmImportForbidden,
    WasmInvalidModule,
    WasmMemoryLimit,
    WasmOutputTooLarge,
    WasmTrap,
)
from sublet.invocation import installing
from sublet.values import format_size, parse_memory, shown
from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile

if TYPE_CHECKING:
    import wasmtime

MODULE_MAX: Final = 16 << 20
"""Bytes of a module: compiling cannot be interrupted."""
MODULES_KEPT: Final = 32
"""Compiled modules that a worker keeps; of more, the one that was not used for longest is compiled anew."""
STACK_BYTES: Final = 512 << 10
TABLE_ELEMENTS_MAX: Final = 100_000
ERRORS_KEPT: Final = 4096
"""Of what a command writes to stderr; it is shown where the command fails."""
PAGE_BYTES: Final = 64 << 10
FUEL_MAX: Final = (1 << 63) - 1
WASI: Final = "wasi_snapshot_preview1"
_COMMAND: Final = "_start"
"""The entry of a WASI command."""


class TaskletResult(NamedTuple):
    """What a tasklet gave."""

    output: bytes
    fuel: int
    """How much it used."""


@dataclass(frozen=True, slots=True)
class WasmTasklet:
    """A WebAssembly module with its limits: ``tasklet(data)`` runs it. It can be mapped over items like a function."""

    module: bytes | str
    """The binary, or its text (WAT)."""
    entry: str = "run"
    """The function that does the work; ``_start`` is that of a WASI command."""
    fuel: int = 1_000_000_000
    """The most it may use, about one unit for each instruction."""
    memory: int | str = "64MiB"
    output_max: int | str = "16MiB"

    def __post_init__(self) -> None:
        module: object = self.module
        if not isinstance(module, bytes | str) or not module:
            raise InvalidRequest(
                f"{shown(self.module)} is not a module",
                do="Give the bytes of a .wasm file, or the text of a .wat file.",
            )
        entry: object = self.entry
        if not isinstance(entry, str) or not entry:
            raise InvalidRequest(f"entry={shown(self.entry)} is not a name", do='Write entry="run".')
        fuel: object = self.fuel
        if isinstance(fuel, bool) or not isinstance(fuel, int) or not 0 < fuel <= FUEL_MAX:
            raise InvalidRequest(f"fuel={shown(self.fuel)} is not a number from 1 on", do="Write fuel=1_000_000_000.")
        parse_memory(self.memory, "memory")
        parse_memory(self.output_max, "output_max")

    def __call__(self, data: bytes = b"", args: Sequence[str] = ()) -> TaskletResult:
        """Run it here: see `run_tasklet`."""
        return run_tasklet(self, data, args)

    @property
    def is_command(self) -> bool:
        """Whether it is a WASI command."""
        return self.entry == _COMMAND

    @property
    def content_id(self) -> str:
        """What it is, in 32 hexadecimal digits: module, entry and limits, and nothing else."""
        binary = self.module if isinstance(self.module, bytes) else self.module.encode()
        sizes = (parse_memory(self.memory, "memory"), parse_memory(self.output_max, "output_max"))
        limits = repr((type(self.module).__name__, self.entry, self.fuel, *sizes)).encode()
        return hashlib.blake2b(b"%d\n%b%b" % (len(limits), limits, binary), digest_size=16).hexdigest()

    @property
    def module_id(self) -> str:
        """The module alone, in as many digits: errors name it."""
        binary = self.module if isinstance(self.module, bytes) else self.module.encode()
        return hashlib.blake2b(binary, digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise what is wrong with the module, as far as can be seen without running it."""
        try:
            _compiled(self.module, self.entry)
        except WasmError as error:
            _add_module_id(error, self)
            raise


def run_tasklet(tasklet: WasmTasklet, data: bytes = b"", args: Sequence[str] = ()) -> TaskletResult:
    """Run a tasklet in this process, most often a worker: ``lease.run(run_tasklet, tasklet, data)``.

    ``data`` is its input, ``args`` are the arguments of a WASI command. Each failure is an error of its own, and none
    is transient: the same tasklet fails again in the same way.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"the input of a tasklet is bytes, not {shown(data)}", do="Encode it first.")
    if args and not tasklet.is_command:
        raise InvalidRequest("arguments are for WASI commands", do='Put them into the input, or use entry="_start".')
    if args and not all(type(one) is str and "\0" not in one for one in args):
        raise InvalidRequest("an argument of a tasklet is not a text without NUL", do="Give a list of str.")
    before = _listen_for_signals()
    try:
        module = _compiled(tasklet.module, tasklet.entry)
        while True:
            run = _Run(tasklet, module, bytes(data), tuple(args))
            try:
                output = run.finish()
            except _Interrupted:
                continue  # by a signal that meant nothing to this call; the next run is the same run
            except WasmError as error:
                error.fuel = _count(run.used)
                raise
            return TaskletResult(output, _count(run.used))
    except WasmError as error:
        _add_module_id(error, tasklet)
        raise
    finally:
        if before is not None:
            signal.set_wakeup_fd(before)  # a descriptor that this program had set itself


class _FuelCount:
    """The fuel that this process used, in the tally of its lease, from which it comes to the bill."""

    def __init__(self, tally: TallyFile) -> None:
        self._tally = tally
        self._total = 0
        self._lock = threading.Lock()
        tally.lock()
        try:
            self._row = tally.claim(os.getpid(), 0, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        finally:
            tally.unlock()

    def add(self, fuel: int) -> None:
        if self._row > 0:
            with self._lock:
                self._total += fuel
                self._tally.write_fuel(self._row, self._total)


@functools.cache
def _fuel_count() -> _FuelCount | None:
    """None in a program that is no guest of a lease."""
    path = os.environ.get(TALLY_VARIABLE, "")
    tally = TallyFile.open(path) if path else None
    return None if tally is None else _FuelCount(tally)


os.register_at_fork(after_in_child=_fuel_count.cache_clear)  # row and total are the parent's


def _count(fuel: int) -> int:
    if (count := _fuel_count()) is not None:
        count.add(fuel)
    return fuel


def _add_module_id(error: WasmError, tasklet: WasmTasklet) -> None:
    error.module = tasklet.module_id
    error.message = f"WASM module {error.module[:12]}: {error.message}"


# ------------------------------------------------------------------------------------------------------ the runtime


@functools.cache
def _wasmtime() -> Any:
    try:
        import wasmtime
    except ImportError as error:
        raise Unsupported(
            "WASM tasklets need wasmtime, which this Python does not have",
            do=f"Install it: `{installing('sublet[wasm]')}`.",
        ) from error
    return wasmtime


@functools.cache
def _engine() -> wasmtime.Engine:
    """One per process. Whatever could differ between machines is off or fixed."""
    config = _wasmtime().Config()
    config.consume_fuel = True
    config.epoch_interruption = True
    config.cranelift_nan_canonicalization = True
    config.wasm_threads = False
    config.wasm_relaxed_simd = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    config.wasm_exceptions = False
    config.wasm_gc = False
    config.wasm_function_references = False
    config.wasm_component_model = False
    config.wasm_stack_switching = False
    config.max_wasm_stack = STACK_BYTES
    config.parallel_compilation = False  # a lease may have one core
    made: wasmtime.Engine = _wasmtime().Engine(config)
    atexit.register(_drop_compiled)
    return made


def _drop_compiled() -> None:
    """Before the interpreter takes the runtime's own module apart, in which their finalisers lie."""
    _compiled.cache_clear()
    _linker.cache_clear()
    _engine.cache_clear()


class _Module(NamedTuple):
    """A compiled module of its convention, and which of the optional functions it has."""

    ready: wasmtime.InstancePre
    """With its imports resolved: an instance of it costs the least."""
    has_init: bool
    has_finalize: bool


@functools.lru_cache(maxsize=MODULES_KEPT)
def _compiled(content: bytes | str, entry: str) -> _Module:
    """The module, compiled once per process and content, and found to be of its convention."""
    runtime = _wasmtime()
    if len(content) > MODULE_MAX:
        raise WasmInvalidModule(
            f"the module has {format_size(len(content))}, more than {format_size(MODULE_MAX)}",
            do="Strip debug information from it (wasm-strip, or -Wl,--strip-all).",
        )
    try:
        binary = runtime.wat2wasm(content) if isinstance(content, str) else content
        module: wasmtime.Module = runtime.Module(_engine(), bytes(binary))
    except runtime.WasmtimeError as error:
        raise WasmInvalidModule(
            f"this is not a module that can be run: {_short(error)}",
            do="Give a core WebAssembly module (not a component), without threads and relaxed SIMD.",
        ) from None
    is_command = entry == _COMMAND
    _check_imports(module, is_command=is_command)
    names = _check_exports(module, entry, is_command=is_command)
    return _Module(_linker().instantiate_pre(module), "init" in names, "finalize" in names)


def _check_imports(module: wasmtime.Module, *, is_command: bool) -> None:
    for one in module.imports:
        name = f"{one.module}.{one.name}"
        if not is_command or one.module != WASI:
            allowed = "a WASI command may import WASI alone" if is_command else "a core module nothing"
            raise WasmImportForbidden(
                f"the module imports {name}, and {allowed}",
                function=name,
                do='Link what it needs into it. A WASI command is run with entry="_start".',
            )
        expected = _WASI_TYPES.get(one.name or "")
        if expected is None:
            raise WasmImportForbidden(
                f"the module imports {name}, which tasklets do not have: there are no files, no network and no threads",
                function=name,
                do="Take its input from stdin and the arguments, and write its output to stdout.",
            )
        if _signature(one.type) != expected:
            raise WasmImportForbidden(
                f"the module imports {name} with another type than WASI gives it", function=name, do="Build it anew."
            )


def _check_exports(module: wasmtime.Module, entry: str, *, is_command: bool) -> Container[str | None]:
    """The names of all of them."""
    exports = {one.name: one.type for one in module.exports}
    needed = {entry: ("", "")} if is_command else {entry: ("ii", "i")}
    if not is_command:
        needed |= {name: kind for name, kind in _OPTIONAL.items() if name in exports}
    for name, (params, results) in needed.items():
        if name not in exports:
            functions = sorted(one for one, kind in exports.items() if _signature(kind) is not None)
            raise WasmEntryMissing(
                f"the module exports no function {name!r}; it has {', '.join(functions) or 'none'}",
                function=name,
                do='Name another one with entry=; "_start" is that of a WASI command.',
            )
        if _signature(exports[name]) != (params, results):
            raise WasmEntryMissing(
                f"the module's {name!r} is no function {_text(params, results)}",
                function=name,
                do="See the conventions for WASM tasklets.",
            )
    if not isinstance(exports.get("memory"), _wasmtime().MemoryType):
        raise WasmEntryMissing(
            "the module exports no memory", function="memory", do='Export it as "memory": input and output lie there.'
        )
    return exports


_OPTIONAL: Final = {"init": ("i", "i"), "finalize": ("", "I")}
_LETTERS: Final = {"i32": "i", "i64": "I", "f32": "f", "f64": "F"}
_WORDS: Final = {letter: word for word, letter in _LETTERS.items()}


def _signature(kind: object) -> tuple[str, str] | None:
    """Parameters and results of a function type, a letter each; None for what is no function."""
    if not isinstance(kind, _wasmtime().FuncType):
        return None
    params, results = ([_LETTERS.get(str(one), "?") for one in some] for some in (kind.params, kind.results))
    return "".join(params), "".join(results)


def _text(params: str, results: str) -> str:
    words = [" ".join(_WORDS[letter] for letter in letters) or "nothing" for letters in (params, results)]
    return f"from ({words[0]}) to ({words[1]})"


# --------------------------------------------------------------------------------------------------------- one run


class _Interrupted(Exception):
    """The epoch moved, and no signal handler raised anything."""


class _Exit(Exception):
    """A command has called ``proc_exit``."""


_bytes_of: Final = functools.lru_cache(parse_memory)


class _Run:
    """One store, one instance: nothing of a run is left to the next."""

    __slots__ = ("_at", "_data", "_exports", "_memory_max", "_module", "_output_max", "_store", "_system", "_tasklet")

    def __init__(self, tasklet: WasmTasklet, module: _Module, data: bytes, args: tuple[str, ...]) -> None:
        self._tasklet = tasklet
        self._module = module
        self._data = data
        self._memory_max = _bytes_of(tasklet.memory)
        self._output_max = _bytes_of(tasklet.output_max)
        self._store = store = _wasmtime().Store(_engine())
        store.set_fuel(tasklet.fuel)
        store.set_epoch_deadline(1)
        store.set_limits(
            memory_size=self._memory_max, table_elements=TABLE_ELEMENTS_MAX, instances=1, tables=8, memories=1
        )
        self._exports: Mapping[str, Any] = {}
        self._at = "its start function"
        self._system = _System(data, args, self._output_max) if tasklet.is_command else None

    def finish(self) -> bytes:
        try:
            return self._command() if self._system is not None else self._core()
        except _wasmtime().Trap as trap:
            self._fail_by(trap)
        except _wasmtime().WasmtimeError as error:
            self._fail_to_begin(error)

    @property
    def used(self) -> int:
        return self._tasklet.fuel - int(self._store.get_fuel())

    def _core(self) -> bytes:
        self._begin()
        memory = self._exports["memory"]
        address = 0
        if self._module.has_init:
            address = self._called("init", len(self._data)) & 0xFFFF_FFFF
        elif self._data:
            raise WasmEntryMissing(
                "the module exports no function 'init', and there is input",
                function="init",
                do="Export init(length) -> address, where that many bytes of input may be put.",
            )
        if self._module.has_init and address + len(self._data) > memory.data_len(self._store):
            raise WasmTrap(
                f"init returned {address}, and {len(self._data)} bytes from there are beyond the module's memory",
                function="init",
                do="Grow the memory before init returns.",
            )
        if self._data:
            memory.write(self._store, bytearray(self._data), address)
        status = self._called(self._tasklet.entry, address, len(self._data))
        if status:
            raise WasmTrap(
                f"{self._tasklet.entry} returned status {status}",
                function=self._tasklet.entry,
                do="Zero is success; what the other numbers mean, the module says.",
            )
        if not self._module.has_finalize:
            return b""
        place = self._called("finalize") & 0xFFFF_FFFF_FFFF_FFFF
        start, length = place >> 32, place & 0xFFFF_FFFF
        if length > self._output_max:
            raise _too_large(length, self._output_max, "finalize")
        if start + length > memory.data_len(self._store):
            raise WasmTrap(
                f"finalize says that {length} bytes lie at {start}, which is beyond the module's memory",
                function="finalize",
                do="Return address * 2**32 + length.",
            )
        return bytes(memory.read(self._store, start, start + length)) if length else b""

    def _begin(self) -> None:
        self._exports = self._module.ready.instantiate(self._store).exports(self._store)

    def _called(self, name: str, *args: int) -> int:
        self._at = name
        return int(self._exports[name](self._store, *map(_signed, args)))

    def _command(self) -> bytes:
        system = self._system
        assert system is not None
        token = _systems.enter(system)
        try:
            self._begin()
            self._at = _COMMAND
            self._exports[_COMMAND](self._store)
        except _Exit:
            pass
        finally:
            _systems.restore(token)
        if system.status:
            raise WasmTrap(
                f"the command ended with exit status {system.status}{system.stderr_text}",
                function="_start",
                do="Zero is success; what the other numbers mean, the command says.",
            )
        return b"".join(system.output)

    def _fail_by(self, trap: Any) -> NoReturn:
        """What a trap means."""
        codes = _wasmtime().TrapCode
        code = trap.trap_code
        text = "" if self._system is None else self._system.stderr_text
        where = next((frame.func_name for frame in trap.frames if frame.func_name), None) or self._at
        if code is codes.INTERRUPT:
            raise _Interrupted from None
        error: WasmError
        if code is codes.OUT_OF_FUEL:
            error = OutOfFuel(
                f"the tasklet used up its fuel ({self._tasklet.fuel}) in {where}{text}",
                function=where,
                do="Give it more with fuel=, or less to do.",
            )
        elif self._is_memory_full():
            error = WasmMemoryLimit(
                f"the tasklet failed in {where} with all of its memory ({format_size(self._memory_max)}) in use{text}",
                function=where,
                do="Give it more with memory=, or less to do.",
            )
        else:
            error = WasmTrap(
                f"the tasklet failed in {where}: {_short(trap)}{text}", function=where, do="Fix the module."
            )
        raise error from None

    def _fail_to_begin(self, error: Exception) -> NoReturn:
        """What the runtime refuses before anything runs; traps come as ``Trap``."""
        text = _short(error)
        if "memory" in text and ("limit" in text or "minimum" in text):
            raise WasmMemoryLimit(
                f"the module needs more memory than it may have ({format_size(self._memory_max)}): {text}",
                function="memory",
                do="Give it more with memory=.",
            ) from None
        raise WasmInvalidModule(f"the module could not be begun: {text}", do="Fix the module.") from None

    def _is_memory_full(self) -> bool:
        memory = self._exports.get("memory")  # none while the start function runs
        return memory is not None and int(memory.data_len(self._store)) + PAGE_BYTES > self._memory_max


def _signed(value: int) -> int:
    """As the runtime takes an i32."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _too_large(length: int, most: int, function: str) -> WasmOutputTooLarge:
    return WasmOutputTooLarge(
        f"the output has {length} bytes or more, and may have {format_size(most)}",
        function=function,
        do="Give it more with output_max=, or write less.",
    )


def _short(error: object) -> str:
    """The first lines of what the runtime says, without its backtrace."""
    lines = [line.strip() for line in str(error).splitlines()]
    reported = [line for line in lines if line and not line.startswith(("error while", "wasm backtrace", "Caused by"))]
    reported = [line.split(": ", 1)[1] if line[0].isdigit() and ": " in line else line for line in reported]
    kept = [line for line in reported if "!" not in line.split(" - ")[-1] or " - " not in line]
    return " ".join(kept)[-300:] or "it does not say why"


# ------------------------------------------------------------------------------------------- the system of a command

_SUCCESS: Final = 0
_BADF: Final = 8
_FAULT: Final = 21
_SPIPE: Final = 70
_NOTCAPABLE: Final = 76
_CLOCK_NS: Final = 1_000_000_000 * 1_000_000_000
"""What every clock shows: 2001-09-09 01:46:40 UTC."""
_SEED: Final = 0x5B1E7


class _System:
    """What a command sees of the world: its input, its arguments, a clock that stands still, and fixed numbers."""

    def __init__(self, data: bytes, args: tuple[str, ...], output_max: int) -> None:
        self.output: list[bytes] = []
        self.status = 0
        self._errors = b""
        self._data = memoryview(data)
        self._args = [b"tasklet\0", *(one.encode("utf-8", "surrogateescape") + b"\0" for one in args)]
        self._written = 0
        self._output_max = output_max
        self._random = _SEED

    @property
    def stderr_text(self) -> str:
        """What it wrote to stderr, for the error."""
        text = self._errors.decode("utf-8", "replace").strip()
        return f". It said last:\n{text}" if text else ""

    def read(self, length: int) -> bytes:
        taken, self._data = self._data[:length], self._data[length:]
        return bytes(taken)

    def write(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._errors = (self._errors + data)[-ERRORS_KEPT:]
            return
        self._written += len(data)
        if self._written > self._output_max:
            raise _too_large(self._written, self._output_max, "fd_write")
        self.output.append(data)

    def random(self, length: int) -> bytes:
        """splitmix64, from the same seed in every run."""
        found = bytearray()
        while len(found) < length:
            self._random = (self._random + 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
            mixed = self._random
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFF_FFFF_FFFF_FFFF
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFF_FFFF_FFFF_FFFF
            found += (mixed ^ (mixed >> 31)).to_bytes(8, "little")
        return bytes(found[:length])

    # ---- the calls; each returns an errno. An address that is not in the memory is answered by _FAULT.

    def args_sizes_get(self, memory: _View, count: int, size: int) -> int:
        memory.put_u32(count, len(self._args))
        memory.put_u32(size, sum(map(len, self._args)))
        return _SUCCESS

    def args_get(self, memory: _View, table: int, buffer: int) -> int:
        for index, one in enumerate(self._args):
            memory.put_u32(table + 4 * index, buffer)
            memory.put(buffer, one)
            buffer += len(one)
        return _SUCCESS

    def environ_sizes_get(self, memory: _View, count: int, size: int) -> int:
        memory.put_u32(count, 0)
        memory.put_u32(size, 0)
        return _SUCCESS

    def environ_get(self, memory: _View, table: int, buffer: int) -> int:
        return _SUCCESS

    def clock_res_get(self, memory: _View, clock: int, out: int) -> int:
        memory.put(out, (1).to_bytes(8, "little"))
        return _SUCCESS

    def clock_time_get(self, memory: _View, clock: int, precision: int, out: int) -> int:
        memory.put(out, _CLOCK_NS.to_bytes(8, "little"))
        return _SUCCESS

    def random_get(self, memory: _View, buffer: int, length: int) -> int:
        length &= 0xFFFF_FFFF
        memory.check(buffer, length)
        memory.put(buffer, self.random(length))
        return _SUCCESS

    def fd_read(self, memory: _View, fd: int, vectors: int, count: int, out: int) -> int:
        if fd != 0:
            return _BADF
        total = 0
        for address, length in memory.vectors(vectors, count):
            memory.check(address, length)
            data = self.read(length)
            memory.put(address, data)
            total += len(data)
            if len(data) < length:
                break
        memory.put_u32(out, total)
        return _SUCCESS

    def fd_write(self, memory: _View, fd: int, vectors: int, count: int, out: int) -> int:
        if fd not in (1, 2):
            return _BADF
        total = 0
        for address, length in memory.vectors(vectors, count):
            self.write(fd, memory.get(address, length))
            total += length
        memory.put_u32(out, total)
        return _SUCCESS

    def fd_close(self, memory: _View, fd: int) -> int:
        return _SUCCESS if 0 <= fd <= 2 else _BADF

    def fd_seek(self, memory: _View, fd: int, offset: int, whence: int, out: int) -> int:
        return _SPIPE if 0 <= fd <= 2 else _BADF

    def fd_tell(self, memory: _View, fd: int, out: int) -> int:
        return _SPIPE if 0 <= fd <= 2 else _BADF

    def fd_fdstat_get(self, memory: _View, fd: int, out: int) -> int:
        if not 0 <= fd <= 2:
            return _BADF
        rights = 2 if fd == 0 else 64  # to read, to write
        memory.put(out, bytes((6, 0, 0, 0, 0, 0, 0, 0)) + rights.to_bytes(8, "little") + bytes(8))  # a stream
        return _SUCCESS

    def fd_fdstat_set_flags(self, memory: _View, fd: int, flags: int) -> int:
        return _SUCCESS if 0 <= fd <= 2 else _BADF

    def fd_filestat_get(self, memory: _View, fd: int, out: int) -> int:
        if not 0 <= fd <= 2:
            return _BADF
        memory.put(out, bytes(16) + bytes((6,)) + bytes(47))
        return _SUCCESS

    def fd_prestat_get(self, memory: _View, fd: int, out: int) -> int:
        return _BADF  # no folder was opened beforehand

    def fd_prestat_dir_name(self, memory: _View, fd: int, path: int, length: int) -> int:
        return _BADF

    def sched_yield(self, memory: _View) -> int:
        return _SUCCESS

    def proc_exit(self, memory: _View, status: int) -> None:
        self.status = status & 0xFFFF_FFFF
        raise _Exit


class _View:
    """A command's memory during one call. Addresses are checked: what is beyond it raises ``_Outside``."""

    def __init__(self, caller: Any) -> None:
        self._caller = caller
        self._memory = caller["memory"]

    def check(self, address: int, length: int) -> None:
        if not 0 <= address & 0xFFFF_FFFF <= self._memory.data_len(self._caller) - length:
            raise _Outside

    def get(self, address: int, length: int) -> bytes:
        address &= 0xFFFF_FFFF
        self.check(address, length)
        return bytes(self._memory.read(self._caller, address, address + length)) if length else b""

    def put(self, address: int, data: bytes) -> None:
        address &= 0xFFFF_FFFF
        self.check(address, len(data))
        if data:
            self._memory.write(self._caller, bytearray(data), address)

    def put_u32(self, address: int, value: int) -> None:
        self.put(address, value.to_bytes(4, "little"))

    def vectors(self, address: int, count: int) -> Iterator[tuple[int, int]]:
        """Places and lengths, as ``readv`` and ``writev`` take them."""
        count &= 0xFFFF_FFFF
        self.check(address, 8 * count)
        for index in range(count):
            one = self.get(address + 8 * index, 8)
            yield int.from_bytes(one[:4], "little"), int.from_bytes(one[4:], "little")


class _Outside(Exception):
    """An address beyond the memory."""


_WASI_TYPES: Final[dict[str, tuple[str, str]]] = {
    "args_get": ("ii", "i"),
    "args_sizes_get": ("ii", "i"),
    "environ_get": ("ii", "i"),
    "environ_sizes_get": ("ii", "i"),
    "clock_res_get": ("ii", "i"),
    "clock_time_get": ("iIi", "i"),
    "random_get": ("ii", "i"),
    "fd_read": ("iiii", "i"),
    "fd_write": ("iiii", "i"),
    "fd_close": ("i", "i"),
    "fd_seek": ("iIii", "i"),
    "fd_tell": ("ii", "i"),
    "fd_fdstat_get": ("ii", "i"),
    "fd_fdstat_set_flags": ("ii", "i"),
    "fd_filestat_get": ("ii", "i"),
    "fd_prestat_get": ("ii", "i"),
    "fd_prestat_dir_name": ("iii", "i"),
    "sched_yield": ("", "i"),
    "proc_exit": ("i", ""),
    # What a C or Rust library imports without needing it. Nothing can be opened, so each is refused.
    "path_open": ("iiiiiIIii", "i"),
    "path_filestat_get": ("iiiii", "i"),
    "path_create_directory": ("iii", "i"),
    "path_remove_directory": ("iii", "i"),
    "path_unlink_file": ("iii", "i"),
    "path_readlink": ("iiiiii", "i"),
    "path_rename": ("iiiiii", "i"),
    "fd_readdir": ("iiiIi", "i"),
    "fd_sync": ("i", "i"),
    "poll_oneoff": ("iiii", "i"),
}
"""The calls of WASI that there are, with their types."""


class _Systems:
    """Whose call a call from a module is: a linker is shared by all runs, and each thread runs one at a time."""

    def __init__(self) -> None:
        self._current = threading.local()

    def enter(self, system: _System) -> object:
        before = getattr(self._current, "system", None)
        self._current.system = system
        return before

    def restore(self, before: object) -> None:
        self._current.system = before

    @property
    def current(self) -> _System:
        found: _System = self._current.system
        return found


_systems = _Systems()


@functools.cache
def _linker() -> wasmtime.Linker:
    runtime = _wasmtime()
    linker: wasmtime.Linker = runtime.Linker(_engine())
    types = {"i": runtime.ValType.i32(), "I": runtime.ValType.i64()}
    for name, (params, results) in _WASI_TYPES.items():
        kind = runtime.FuncType([types[one] for one in params], [types[one] for one in results])
        linker.define_func(WASI, name, kind, _served(name), access_caller=True)
    return linker


def _served(name: str) -> Callable[..., int | None]:
    def serve(caller: Any, *args: int) -> int | None:
        call = getattr(_systems.current, name, None)
        if call is None:
            return _NOTCAPABLE
        try:
            found: int | None = call(_View(caller), *args)
        except _Outside:
            return _FAULT
        return found

    return serve


# ---------------------------------------------------------------------------------------------------- interruption


class _EpochMover:
    """A thread that moves the epoch when a signal has come that may end the call.

    While a module runs, the interpreter runs no signal handler. The kernel's notice of the signal (``set_wakeup_fd``)
    reaches this thread all the same; the module then stops, and the interpreter runs the handler.
    """

    def __init__(self) -> None:
        self.reading, self.writing = socket.socketpair()
        self.writing.setblocking(False)
        self.descriptor = self.writing.fileno()
        os.register_at_fork(after_in_child=self._forked)
        self.thread = start_thread("wasm_epochs", self._move, again=True)

    def _move(self) -> None:
        while numbers := self.reading.recv(256):
            if any(number in _ENDING for number in numbers):
                _engine().increment_epoch()

    def _forked(self) -> None:
        """The thread and the other end are the parent's: the child's signals are not for it."""
        _mover.cache_clear()
        found = signal.set_wakeup_fd(-1)
        if found != self.descriptor:
            signal.set_wakeup_fd(found)


_ENDING: Final = frozenset((signal.SIGTERM, signal.SIGINT))


@functools.cache
def _mover() -> _EpochMover:
    return _EpochMover()


def _listen_for_signals() -> int | None:
    """From here on what runs is stopped by a signal that ends a call. Handlers run on the main thread alone; a run on
    another is stopped by its fuel. Returns the wake-up descriptor that the program had, for it to be set again; where
    there was none ours stays, since between runs it does nothing, and setting it costs as much as a short run."""
    ours = _mover().descriptor
    try:
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    except ValueError:  # this is another thread
        return None
    return None if before in (-1, ours) else before
