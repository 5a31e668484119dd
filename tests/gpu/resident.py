"""A process that has memory on a card and knows what is in it, and the program by which a supervisor suspends it.

python -m tests.gpu.resident BYTES

It fills so much of the first GPU, says ``ready``, and then answers each line by one: ``check`` whether all of it is
still what it was; ``out`` and ``in`` copy it to pinned memory of the host, and back, and say how many milliseconds that
took. ``out`` takes the host's memory first, as a suspend has to; ``in`` gives it back afterwards, outside of the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from sublet.devices.cuda_driver import CudaDriver, open_driver
from tests.gpu.gpus import LARGE

__all__ = ["Helper", "Resident"]

SAMPLE: Final = 64 * 1024
"""Bytes at either end of a piece that are looked at; the rest was written by the same call."""
WAIT_S: Final = 300.0


class Resident:
    """The process, seen from here."""

    def __init__(self, size: int) -> None:
        words = [sys.executable, "-m", "tests.gpu.resident", str(size)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._line()
        if said != "ready":
            self.end()
            raise RuntimeError(f"{size} bytes could not be had on the card: {said or 'it ended'}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: str) -> str:
        """Its answer; empty where it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


class Helper:
    """``sublet.devices.suspend``, the one long-lived program of a supervisor."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "sublet.devices.suspend"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._line()
        if "ready" not in self.hello:
            self.end()
            raise RuntimeError(f"nothing can be suspended here: {self.hello.get('failed')}")

    def suspend(self, *pids: int) -> dict[str, Any]:
        """Its answer, whatever it is."""
        return self._ask({"do": "suspend", "pids": pids})

    def resume(self, *pids: int) -> dict[str, Any]:
        return self._ask({"do": "resume", "pids": pids})

    def end(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(said) if said else {"failed": "its helper ended"}
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


# ---- within the process ----


class _Memory:
    """All it has on the card, in pieces, each filled with a byte of its own."""

    def __init__(self, driver: CudaDriver, size: int) -> None:
        self._driver = driver
        context = driver("open", "cuDevicePrimaryCtxRetain", driver("open", "cuDeviceGet", 0))
        driver("open", "cuCtxSetCurrent", context)
        sizes = [LARGE] * (size // LARGE) + ([size % LARGE] if size % LARGE else [])
        self._pieces = [(int(driver("open", "cuMemAlloc", length)), length) for length in sizes]
        self._host: list[int] = []
        for place, (address, length) in enumerate(self._pieces):
            driver("fill", "cuMemsetD8", address, _mark(place), length)
        driver("fill", "cuCtxSynchronize")

    def check(self) -> str:
        for place, (address, length) in enumerate(self._pieces):
            wide = min(SAMPLE, length)
            for at in (address, address + length - wide):
                found = bytearray(wide)
                self._driver("check", "cuMemcpyDtoH", found, at, wide)
                if found != bytes([_mark(place)]) * wide:
                    return f"piece {place} is not what it was"
        return "same"

    def out(self) -> str:
        began = time.perf_counter()
        self._host = [int(self._driver("out", "cuMemAllocHost", length)) for _, length in self._pieces]
        for host, (address, length) in zip(self._host, self._pieces, strict=True):
            self._driver("out", "cuMemcpyDtoH", host, address, length)
        return _ms(began)

    def back(self) -> str:
        began = time.perf_counter()
        for host, (address, length) in zip(self._host, self._pieces, strict=True):
            self._driver("in", "cuMemcpyHtoD", address, host, length)
        said = _ms(began)
        for host in self._host:
            self._driver("in", "cuMemFreeHost", host)
        self._host = []
        return said


def _mark(place: int) -> int:
    return 1 + place % 255


def _ms(began: float) -> str:
    return f"{(time.perf_counter() - began) * 1e3:.3f}"


def main(arguments: Sequence[str], lines: Iterable[str] | None = None) -> int:
    """Until there are no more questions."""
    memory = _Memory(open_driver(), int(arguments[0]))
    print("ready", flush=True)
    answers = {"check": memory.check, "out": memory.out, "in": memory.back}
    for line in sys.stdin if lines is None else lines:
        print(answers[line.strip()](), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
