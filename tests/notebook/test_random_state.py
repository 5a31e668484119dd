"""Random generators: their states are read without drawing, and set where the library is."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import pytest

from sublet.notebook.environment import CellEnvironment
from sublet.notebook.random_state import (
    CudaGenerators,
    NumpyGenerator,
    read_python,
    read_torch,
    write_python,
    write_torch,
)
from sublet.notebook.settings import table


def test_python_is_read_without_drawing_and_goes_on_where_it_stood() -> None:
    before = random.getstate()
    try:
        state = read_python()
        assert read_python() is state
        assert random.getstate() == before
        expected = [random.random() for _ in range(700)]
        assert read_python() is not state
        write_python(state)
        assert [random.random() for _ in range(700)] == expected
        write_python(state)
        first = random.gauss(0, 1)
        halfway = read_python()
        second = random.gauss(0, 1)
        assert read_python() != halfway, "a cached normal number was used, and nothing else has changed"
        write_python(state)
        assert [random.gauss(0, 1), random.gauss(0, 1)] == [first, second]
    finally:
        random.setstate(before)


def test_numpy_is_read_without_drawing_whichever_generator_it_has() -> None:
    np: Any = pytest.importorskip("numpy")
    before, first = np.random.get_state(legacy=False), np.random.get_bit_generator()
    try:
        np.random.seed(3)
        generator = NumpyGenerator()
        state = generator.read()
        assert generator.read() is state
        normal = np.random.standard_normal()
        cached = generator.read()
        assert cached["has_gauss"] == 1
        other = np.random.standard_normal()
        assert generator.read() != cached, "only the cached number has gone"
        generator.write(state)
        assert [np.random.standard_normal(), np.random.standard_normal()] == [normal, other]
        np.random.set_bit_generator(np.random.PCG64(5))
        state = generator.read()
        expected = np.random.rand()
        np.random.set_bit_generator(np.random.MT19937(0))
        generator.write(state)
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(first)
        np.random.set_state(before)


@pytest.mark.needs("torch")
def test_torch_is_read_without_drawing() -> None:
    torch: Any = pytest.importorskip("torch")
    before = torch.get_rng_state()
    try:
        state = read_torch()
        assert read_torch() == state
        expected = torch.rand(3)
        write_torch(state)
        assert torch.equal(torch.rand(3), expected)
    finally:
        torch.set_rng_state(before)


def test_a_crossing_draws_no_number() -> None:
    """Of any of the generators, on either side."""
    pytest.importorskip("numpy")
    sides = CellEnvironment(is_notebook=True), CellEnvironment(is_notebook=False)
    try:
        sides[0].begin(sees_files=True)
        state = random.getstate()
        changes = sides[0].changes()
        assert changes is not None
        assert "random" in changes.rows
        sides[1].apply(changes, files=True)
        sides[1].apply(changes, files=False)
        assert sides[1].changes() is None
        assert random.getstate() == state
    finally:
        for side in sides:
            side.close()


class Cuda(types.ModuleType):
    """torch.cuda as torch has it: what is asked for before CUDA is initialised is done then, seeds last."""

    def __init__(self, cards: int) -> None:
        super().__init__("torch.cuda")
        self.states = [b"\0"] * cards
        self._is_initialized = False
        self._later: list[Any] = []
        self._lazy_seed_tracker = self
        self._calls: list[Any] = []

    def get_calls(self) -> list[Any]:
        return self._calls

    def is_available(self) -> bool:
        return bool(self.states)

    def is_initialized(self) -> bool:
        return self._is_initialized

    def device_count(self) -> int:
        return len(self.states)

    def initialize(self) -> None:
        """The first use of a card."""
        self._is_initialized = True
        for called in (*self._later, *(one[0] for one in self._calls if one)):
            called()

    def manual_seed_all(self, seed: int) -> None:
        def cb() -> None:
            self.states = [bytes([seed])] * len(self.states)

        if self._is_initialized:
            cb()
        else:
            self._calls = [None, (cb, ["stack"])]

    def get_rng_state_all(self) -> list[Any]:
        assert self._is_initialized, "reading them would initialise CUDA"
        return [State(one) for one in self.states]

    def set_rng_state(self, state: Any, number: int) -> None:
        def set_it() -> None:
            self.states[number] = bytes(state.tolist())

        if self._is_initialized:
            set_it()
        else:
            self._later.append(set_it)


class State:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def tolist(self) -> list[int]:
        return list(self.data)


class Torch(types.ModuleType):
    def __init__(self, cards: int) -> None:
        super().__init__("torch")
        self.cuda = Cuda(cards)
        self.uint8 = None
        self._seed = 12345

    def initial_seed(self) -> int:
        return self._seed

    def manual_seed(self, seed: int) -> None:
        self._seed = seed
        self.cuda.manual_seed_all(seed)

    def frombuffer(self, data: bytearray, dtype: object) -> State:
        return State(bytes(data))


class Card:
    """A notebook without a card and a device with some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.here, self.there = Torch(0), Torch(2)
        self.notebook, self.device = CudaGenerators(is_notebook=True), CudaGenerators(is_notebook=False)

    def send(self) -> Any:
        self._monkeypatch.setitem(sys.modules, "torch", self.here)
        value = self.notebook.read()
        self._monkeypatch.setitem(sys.modules, "torch", self.there)
        if value is not None and value != self.device.read():
            self.device.write(value)
        return value

    def back(self) -> None:
        self._monkeypatch.setitem(sys.modules, "torch", self.there)
        value = self.device.read()
        self._monkeypatch.setitem(sys.modules, "torch", self.here)
        if value is not None and value != self.notebook.read():
            self.notebook.write(value)


def test_a_seed_of_the_notebook_seeds_the_cards_which_nobody_initialises(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    assert card.send() is None
    card.here.manual_seed(7)
    card.send()
    card.back()
    assert not card.there.cuda.is_initialized()
    card.there.cuda.initialize()
    assert card.there.cuda.states == [b"\7", b"\7"]


def test_the_same_seed_set_again_seeds_again_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.here.manual_seed(7)
    card.send()
    card.there.cuda.initialize()
    card.there.cuda.states = [b"\x08", b"\x09"]  # the cell drew
    card.back()
    card.send()
    assert card.there.cuda.states == [b"\x08", b"\x09"]
    card.here.manual_seed(7)
    card.send()
    assert card.there.cuda.states == [b"\7", b"\7"]


@pytest.mark.parametrize("cards", [2, 1, 0])
def test_another_device_goes_on_where_the_last_one_stood(cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.there.cuda.initialize()
    card.there.cuda.states = [b"\x01", b"\x02"]
    card.back()
    card.there, card.device = Torch(cards), CudaGenerators(is_notebook=False)
    card.send()
    card.there.cuda.initialize()
    assert card.there.cuda.states == [b"\x01", b"\x02"][:cards]


@pytest.mark.parametrize("saves", ["a job", "%gpu checkpoint", "the guest"])
def test_a_checkpoint_has_the_states_of_the_cards(saves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel that is restored from it gives them to its first device."""

    def side(torch: Torch, *, is_notebook: bool) -> CellEnvironment:
        monkeypatch.setitem(sys.modules, "torch", torch)
        rows = [row for row in table(is_notebook=is_notebook) if row.key == "torch CUDA generators"]
        return CellEnvironment(is_notebook=is_notebook, rows=rows)

    def at(torch: Torch) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)

    here, there, again, other = Torch(0), Torch(2), Torch(0), Torch(2)
    notebook, device = side(here, is_notebook=True), side(there, is_notebook=False)
    second, device2 = side(again, is_notebook=True), side(other, is_notebook=False)
    try:
        there.cuda.initialize()
        there.cuda.states = [b"\x01", b"\x02"]  # cells drew
        at(there)
        came = device.changes()
        assert came is not None
        at(here)
        notebook.apply(came, files=False)
        kept = notebook.whole() if saves == "a job" else notebook.generators()
        if saves == "the guest":  # with what stays on the device
            at(there)
            kept = device.generators()
        at(again)
        second.restore(kept)
        second.begin(sees_files=True)
        sent = second.changes()
        assert sent is not None
        at(other)
        device2.apply(sent, files=False)
        other.cuda.initialize()
        assert other.cuda.states == [b"\x01", b"\x02"]
    finally:
        for one in (notebook, device, second, device2):
            one.close()


@pytest.mark.needs("torch")
def test_torch_keeps_the_last_request_to_seed_its_cards_as_the_stand_in_does() -> None:
    """The one name that is read and is not public."""
    torch: Any = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is initialised")
    before = torch.get_rng_state()
    try:
        generators = CudaGenerators(is_notebook=True)
        torch.manual_seed(11)
        first = generators.read()
        assert first is not None
        assert (first[0], first[2]) == ("seed", 11)
        assert generators.read() == first
        torch.manual_seed(11)
        again = generators.read()
        assert again is not None
        assert again[1] == first[1] + 1
        assert again[2] == 11
    finally:
        torch.set_rng_state(before)
