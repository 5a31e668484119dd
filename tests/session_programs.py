"""Random programs for a ``GpuSession`` as users hold it, and a plain numpy model that says what each must do.

Beside right calls there are two kinds of wrong ones. What the session can see by itself is refused at the call, and
nothing changes. What only the guest can see (a launch with an argument too few) is told at the next call that waits;
until then everything written down behind it must not happen, except that what is freed is freed. A failure of a program
names its seed, which repeats it.
"""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np

from sublet.compute.arguments import u32
from sublet.compute.buffers import Buffer
from sublet.compute.session import GpuSession
from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.testing.device_conformance import KERNELS

SIZE_MAX: Final = 4 * 64
LARGE: Final = 200_000
"""Now and then: it goes through shared memory."""
CALLS: Final = 40
U32: Final = np.uint32


class _Program:
    def __init__(self, gpu: GpuSession, seed: int) -> None:
        self.gpu = gpu
        self.chance = random.Random(seed)
        self.model: dict[Buffer, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self.gone: list[Buffer] = []
        """Freed, or never allocated after all."""
        self.never: list[Buffer] = []
        """Allocated behind a failure that no call has raised yet."""
        self.has_failed = False
        self.module = gpu.module_load(KERNELS)

    def call(self) -> None:
        name = self.chance.choices(
            ("alloc", "free", "write", "read", "copy", "fill", "launch", "sync", "wrong", "late"),
            (3, 1, 4, 3, 2, 2, 6, 1, 1, 0.6),
        )[0]
        if name not in ("alloc", "sync") and not self.model:
            name = "alloc"
        getattr(self, f"_{name}")()

    def wait(self, call: Any) -> Any:
        """A call that waits: if something failed before, that is what it says."""
        if not self.has_failed:
            return call()
        told = ""
        try:
            call()
        except InvalidRequest as error:
            told = error.message
        assert "takes 3 arguments, and 2 were given" in told, f"a launch that was wrong was never told, but {told!r}"
        self.has_failed = False
        for buffer in self.never:
            assert not buffer.is_live, f"{buffer} was made behind a failure"
        self.gone += self.never
        self.never.clear()
        return None

    def _some(self) -> Buffer:
        return self.chance.choice(list(self.model))

    def _span(self, *buffers: Buffer) -> tuple[int, ...]:
        length = self.chance.randint(0, min(one.size for one in buffers))
        return (*(self.chance.randint(0, one.size - length) for one in buffers), length)

    def _alloc(self) -> None:
        size = 4 * self.chance.randint(1, SIZE_MAX // 4) if self.chance.random() < 0.95 else LARGE
        buffer = self.gpu.mem_alloc(size)
        if self.has_failed:
            self.never.append(buffer)
        else:
            self.model[buffer] = np.zeros(size, np.uint8)

    def _free(self) -> None:
        buffer = self._some()
        self.gpu.mem_free(buffer)
        del self.model[buffer]
        self.gone.append(buffer)

    def _write(self) -> None:
        buffer = self._some()
        offset, length = self._span(buffer)
        data = np.frombuffer(self.chance.randbytes(length), np.uint8)
        self.gpu.mem_write(buffer, offset, self.chance.choice((data, data.tobytes(), bytearray(data))))
        if not self.has_failed:
            self.model[buffer][offset : offset + length] = data

    def _read(self) -> None:
        buffer = self._some()
        offset, length = self._span(buffer)
        expected = self.model[buffer][offset : offset + length].tobytes()
        if self.chance.random() < 0.5:
            found = self.wait(lambda: self.gpu.mem_read(buffer, offset, length)) if length else expected
        else:
            into = np.empty(length, np.uint8)

            def read() -> bool:
                self.gpu.mem_read_into(buffer, offset, into)
                return True

            told = length and self.wait(read)
            found = into.tobytes() if told else (None if length else expected)
        assert found is None or found == expected, f"{buffer} at {offset}"

    def _copy(self) -> None:
        target, source = self._some(), self._some()
        if target is source:
            return
        at, offset, length = self._span(target, source)
        self.gpu.mem_copy(target, at, source, offset, length)
        if not self.has_failed:
            self.model[target][at : at + length] = self.model[source][offset : offset + length]

    def _fill(self) -> None:
        buffer = self._some()
        pattern = self.chance.randbytes(self.chance.choice((1, 2, 4)))
        offset, length = (4 * (n // 4) for n in self._span(buffer))
        self.gpu.mem_fill(buffer, offset, length, pattern)
        if not self.has_failed:
            self.model[buffer][offset : offset + length] = np.frombuffer(pattern * (length // len(pattern)), np.uint8)

    def _launch(self) -> None:
        buffer, a = self._some(), self.chance.getrandbits(32)
        n = self.chance.randint(0, buffer.size // 4)
        grid, block = self.chance.randint(1, 3), self.chance.choice((1, 8, 32))
        self.gpu.launch(self.module, "step", grid, block, [buffer, u32(n), u32(a)])
        if not self.has_failed:
            x = self.model[buffer].view(U32)[: min(n, grid * block)]
            x[:] = (x.astype(np.uint64) * a + np.arange(len(x), dtype=np.uint64)).astype(U32)

    def _sync(self) -> None:
        self.wait(self.gpu.sync)

    def _late(self) -> None:
        """Only the guest knows that this is wrong."""
        self.gpu.launch(self.module, "step", 1, 1, [self._some(), u32(1)])
        self.has_failed = True

    def _wrong(self) -> None:
        """What the session refuses by itself."""
        buffer, gpu = self._some(), self.gpu
        wrong: list[Any] = [
            lambda: gpu.mem_alloc(0),
            lambda: gpu.mem_write(buffer, buffer.size, b"x"),
            lambda: gpu.mem_read(buffer, -1, 1),
            lambda: gpu.mem_fill(buffer, 0, 3, b"abc"),
            lambda: gpu.mem_copy(buffer, 0, buffer, 0, buffer.size + 1),
            lambda: gpu.launch(self.module, "stop", 1, 1, []),
            lambda: gpu.launch(self.module, "step", 0, 1, [buffer, u32(1), u32(1)]),
            lambda: gpu.launch(self.module, "step", 1, 2048, [buffer, u32(1), u32(1)]),
            lambda: gpu.launch(self.module, "step", 1, 1, [buffer, "1", u32(1)]),  # type: ignore[list-item]  # that is wrong
        ]
        if self.gone:
            gone = self.chance.choice(self.gone)
            wrong += [
                lambda: gpu.mem_free(gone),
                lambda: gpu.mem_read(gone),
                lambda: gpu.launch(self.module, "step", 1, 1, [gone, u32(1), u32(1)]),
            ]
        try:
            self.chance.choice(wrong)()
        except (InvalidRequest, NotFound):
            return
        raise AssertionError("something wrong was taken")


def run_session_program(gpu: GpuSession, seed: int, calls: int = CALLS) -> int:
    """One program on a fresh session that has the lease's memory for itself; how many calls it made. Raises
    ``AssertionError`` with the seed where session and model part."""
    program = _Program(gpu, seed)
    try:
        for _ in range(calls):
            program.call()
        program._sync()
        for buffer in list(program.model):
            assert gpu.mem_read(buffer) == program.model[buffer].tobytes(), f"{buffer}"
        gpu.mem_alloc(gpu.memory_bytes - sum(buffer.size for buffer in program.model))  # all that must be free is
        gpu.sync()
    except (AssertionError, SubletError) as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return calls
