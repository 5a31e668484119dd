"""The state of global random generators as a row of the settings table: read, compared, set.

The generators are those of ``random``, NumPy (the legacy global one) and torch (CPU and CUDA). A state is plain data,
so it can be kept until the library is imported. Nothing here draws a number.

The CPU generators cross with every cell in which they moved. Those of CUDA cross as a seed: where the notebook has
seeded torch, the device seeds its cards. Afterwards their state (16 bytes for each card) comes to the notebook with
each finished cell. The notebook keeps it for its next device, and sets it nowhere else.
"""

from __future__ import annotations

import ctypes
import inspect
import random
import sys
from typing import Any, Final

MT19937: Final = "MT19937"
MT19937_BYTES: Final = 624 * 4 + 4
"""The state of NumPy's default generator in memory: its words and the position among them."""

WORDS_COMPARED: Final = 8
"""Of the 624: they are all new when one is."""

_python_state: tuple[Any, ...] = (0, (), None)


def read_python() -> tuple[Any, ...]:
    """Of ``random``. The same object as before where it has not moved, which makes comparing cheap."""
    global _python_state
    now, before = random.getstate(), _python_state
    words, had = now[1], before[1]
    if words[-1:] != had[-1:] or words[:WORDS_COMPARED] != had[:WORDS_COMPARED] or now[2] != before[2]:
        _python_state = now
    return _python_state


def write_python(state: Any) -> None:
    """Of ``random``."""
    random.setstate(state)


class NumpyGenerator:
    """NumPy's global generator: ``numpy.random.seed``, ``numpy.random.rand``."""

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = None

    def read(self) -> Any:
        """To ask NumPy costs 0.13 ms, so its memory is compared first: 0.5 µs. A cached normal number is no part of
        that memory; while there is one NumPy is asked."""
        chance: Any = sys.modules["numpy.random"]
        memory = b""
        generator: Any = chance.get_bit_generator() if hasattr(chance, "get_bit_generator") else None
        if type(generator).__name__ == MT19937:
            memory = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
            if self._state is not None and memory == self._memory and not self._state.get("has_gauss"):
                return self._state
        self._memory = memory
        now = _without_arrays(chance.get_state(legacy=False))
        if now != self._state:
            self._state = now
        return self._state

    def write(self, state: Any) -> None:
        """Also where a program has put another kind of generator in the place of the default one."""
        chance: Any = sys.modules["numpy.random"]
        kind = state["bit_generator"]
        if hasattr(chance, "get_bit_generator") and type(chance.get_bit_generator()).__name__ != kind:
            chance.set_bit_generator(getattr(chance, kind)())
        chance.set_state(_with_arrays(state))


def read_torch() -> bytes:
    """Of torch on the CPU."""
    state: Any = sys.modules["torch"].get_rng_state()
    return bytes(state.numpy()) if "numpy" in sys.modules else bytes(state.tolist())


def write_torch(state: bytes) -> None:
    """Of torch on the CPU."""
    torch: Any = sys.modules["torch"]
    torch.set_rng_state(_tensor(torch, state))


class CudaGenerators:
    """Those of torch's CUDA devices. CUDA is never initialised for them: what is set before waits for that."""

    def __init__(self, *, is_notebook: bool) -> None:
        self._is_notebook = is_notebook
        self._value: tuple[Any, ...] | None = None
        """``("seed", how many before it, seed)`` or ``("states", one for each card)``; None: it was not seeded."""
        self._seeding: object = None
        self._count = 0

    def read(self) -> tuple[Any, ...] | None:
        """What the other side is to have."""
        torch: Any = sys.modules["torch"]
        if self._is_notebook:
            seeding = _last_seeding(torch)
            if seeding is not None and seeding != self._seeding:
                self._count += 1
                self._value = ("seed", self._count, _seed_of(torch, seeding))
            self._seeding = seeding
        elif torch.cuda.is_available() and torch.cuda.is_initialized():
            self._value = ("states", *map(_bytes_of, torch.cuda.get_rng_state_all()))
        return self._value

    def write(self, value: tuple[Any, ...]) -> None:
        """The notebook keeps it; the device sets it."""
        torch: Any = sys.modules["torch"]
        self._value = value
        if self._is_notebook:
            self._seeding = _last_seeding(torch)
        elif value[0] == "seed":
            torch.cuda.manual_seed_all(value[2])
        elif torch.cuda.is_available():
            for number, state in enumerate(value[1 : 1 + torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(torch, state), number)


def _last_seeding(torch: Any) -> object:
    """Another object, or another number, after each time torch was seeded; None: it never was.

    While CUDA is not initialised torch keeps the last request to seed it, a new object each time. Where it does not,
    the seed itself must do, and the same seed set again is not noticed.
    """
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    if tracker is None or torch.cuda.is_initialized():
        return int(torch.initial_seed())
    calls = [one for one in tracker.get_calls() if one is not None]
    return calls[-1] if calls else None


def _seed_of(torch: Any, seeding: object) -> int:
    if isinstance(seeding, tuple):
        seed = inspect.getclosurevars(seeding[0]).nonlocals.get("seed")
        if isinstance(seed, int):
            return seed
    return int(torch.initial_seed())


def _tensor(torch: Any, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _bytes_of(state: Any) -> bytes:
    return bytes(state.tolist())


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_arrays(one) for name, one in state.items()}
    if hasattr(state, "tobytes") and hasattr(state, "dtype"):
        return ("array", state.dtype.str, state.tobytes())
    return state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _with_arrays(one) for name, one in state.items()}
    if isinstance(state, tuple) and state[:1] == ("array",):
        numpy: Any = sys.modules["numpy"]
        return numpy.frombuffer(state[2], dtype=state[1]).copy()
    return state
