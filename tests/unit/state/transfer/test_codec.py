"""A value becomes a head and buffers, and becomes the same value again: what shared memory shares it again."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import importlib
import os
import pickle
import random
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.durable import rebuild
from sublet.errors import InvalidRequest, Unsupported
from sublet.notebook.home import HomeRules
from sublet.state.transfer.codec import SMALL_BYTES, SPLICE_BYTES, encode
from sublet.state.transfer.encoded import BufferKind, Encoded, Head
from sublet.state.transfer.loading import decode
from sublet.state.transfer.reducers import EncodingRules, ReductionRefused
from sublet.values import Epoch, LeaseId
from sublet.wire.page import PageState, PageView, PageWriter


def copied(encoded: Encoded) -> list[memoryview]:
    """The buffers, as they are after a way through files or pipes."""
    return [memoryview(bytearray(view)) for view in encoded.views]


def again(value: Any, *, writable: bool = True) -> Any:
    encoded = encode(value)
    return decode(encoded.head, copied(encoded), writable=writable)


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: object


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back(value: object) -> None:
    assert again(value) == value


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Point(1, [Point(2, None)]),
        dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        range(10),
        slice(1, 2),
        1j,
        {"a": {1, 2}, "b": frozenset((3,))},
        b"x" * SPLICE_BYTES,
        b"y" * (SPLICE_BYTES + 1),
        "é" * SPLICE_BYTES,
        bytearray(b"z" * (3 * SPLICE_BYTES)),
        [b"a" * SPLICE_BYTES, 5, b"b" * (2 * SPLICE_BYTES), "end"],
        np.dtype("f4"),
        np.float32(1.5),
        len,
        dict,
        type(None),
        Colour,
        types.SimpleNamespace(a=1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_of_many_kinds_come_back(value: object) -> None:
    assert again(value) == value


def test_the_same_object_stays_one_object_and_cycles_stay_cycles() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    big = b"x" * (2 * SPLICE_BYTES)
    back = again([shared, shared, big, big])
    assert back[0] is back[1]
    assert back[0][1] is back[0]
    assert back[2] is back[3]


# ---- numpy ----

SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from(
    ["u1", "i8", "f4", "f8", "c16", "M8[ns]", "m8[s]", "U3", "S5", "?", [("a", "i4"), ("b", "f8")]]
)


@given(SHAPES, DTYPES, st.randoms())
def test_arrays_of_any_type_shape_and_stride_come_back(shape: tuple[int, ...], dtype: Any, chance: Any) -> None:
    count = int(np.prod(shape))
    kind = np.dtype(dtype)
    array = np.frombuffer(chance.randbytes(count * kind.itemsize) or b"", dtype=kind, count=count).reshape(shape)
    if kind.kind in "fc?U":
        array = np.arange(count).reshape(shape).astype(kind)
    for view in (array, array.T, array[..., ::-1] if shape else array, array[::2] if shape else array):
        back = again(view)
        assert back.dtype == view.dtype
        assert back.shape == view.shape
        assert back.tobytes() == view.tobytes()


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60), st.integers(-3, 3).filter(bool)), max_size=6))
def test_views_share_memory_again_exactly_where_they_did(cuts: list[tuple[int, int, int]]) -> None:
    """Compared cell by cell: write to one view, and look which cells of the others moved."""
    base = np.arange(100)
    views = [base[start : start + length][::step] for start, length, step in cuts]
    back = again([base, *views])
    for n, view in enumerate([base, *views]):
        assert (back[n] == view).all()
    for n, view in enumerate([base, *views]):
        if view.size:
            view.flat[0] = -n - 1
            back[n].flat[0] = -n - 1
            for ours, theirs in zip(back, [base, *views], strict=True):
                assert (ours == theirs).all()


def test_large_arrays_are_not_copied_on_either_way() -> None:
    array = np.zeros(SMALL_BYTES)
    encoded = encode({"a": array})
    assert [one.kind for one in encoded.buffers] == [BufferKind.NUMPY]
    assert encoded.buffers[0].address == array.__array_interface__["data"][0]
    assert np.shares_memory(decode(encoded.head, encoded.views)["a"], array)


def test_many_small_arrays_stand_in_one_buffer_and_still_share() -> None:
    base = np.arange(8)
    encoded = encode([base, base[2:4], *[np.arange(3) + n for n in range(50)]])
    assert len(encoded.buffers) == 1
    back = decode(encoded.head, copied(encoded))
    back[0][2] = -1
    assert back[1][0] == -1
    assert [list(one) for one in back[2:]] == [[n, n + 1, n + 2] for n in range(50)]


def test_a_view_of_little_does_not_take_much_memory_along() -> None:
    matrix = np.arange(1_000_000.0).reshape(1000, 1000)
    column = encode(matrix[:, 3])
    assert column.nbytes < 10_000
    assert (decode(column.head, copied(column)) == matrix[:, 3]).all()
    both = encode([matrix, matrix[:, 3]])
    assert len(both.buffers) == 1
    assert encode(matrix[10:20]).nbytes < 100_000


def test_read_only_arrays_come_back_read_only_and_others_writable() -> None:
    fixed = np.arange(10)
    fixed.flags.writeable = False
    back = again([fixed, np.arange(10)])
    assert not back[0].flags.writeable
    assert back[1].flags.writeable


def test_without_writable_nothing_is_copied_and_nothing_can_be_written() -> None:
    encoded = encode(np.zeros(SMALL_BYTES))
    sent = [memoryview(bytes(view)) for view in encoded.views]
    back = decode(encoded.head, sent, writable=False)
    assert not back.flags.writeable
    assert np.shares_memory(back, np.frombuffer(sent[0]))
    assert decode(encoded.head, sent).flags.writeable


def test_a_mapped_array_comes_back_as_one_in_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", dtype="f8", mode="w+", shape=(5000,))
    mapped[:] = 3
    encoded = encode(mapped)
    assert encoded.buffers[0].address == mapped.ctypes.data
    back = decode(encoded.head, copied(encoded))
    assert type(back) is np.ndarray
    assert (back == 3).all()


def test_arrays_of_objects_come_back() -> None:
    shared = [1]
    back = again([np.array([shared, None], dtype=object), shared])
    assert back[0][0] is back[1]


def test_a_memoryview_comes_back_over_the_same_bytes() -> None:
    data = bytearray(100_000)
    back = again([memoryview(data)[5:10], np.arange(6).reshape(2, 3).data])
    assert bytes(back[0]) == bytes(5)
    assert back[1].shape == (2, 3)
    assert back[1].format == "l"


# ---- pandas and Arrow ----


def test_frames_come_back() -> None:
    frame = pd.DataFrame({"n": np.arange(9000), "s": ["text"] * 9000, "f": 0.5, "c": pd.Categorical(["a"] * 9000)})
    frame.index = pd.date_range("2026-01-01", periods=9000, freq="h")
    back = again({"frame": frame, "series": frame["f"]})
    pd.testing.assert_frame_equal(back["frame"], frame)
    pd.testing.assert_series_equal(back["series"], frame["f"])


def test_frames_that_copied_on_write_do_not_change_each_other_afterwards() -> None:
    """pandas lets them share memory until a write; a value that was put together again must not share it for good."""
    frame = pd.DataFrame({"a": np.arange(9000), "b": np.arange(9000)})
    for other in (frame[["a"]], frame.copy(deep=False), frame.iloc[10:]):
        back, part = again([frame, other])
        part.loc[20, "a"] = -1
        assert back.loc[20, "a"] == 20
        back.loc[30, "a"] = -2
        assert part.loc[30, "a"] == 30


def test_arrow_tables_come_back_on_the_memory_they_came_with() -> None:
    table = pa.table({"n": list(range(50_000)), "s": ["x"] * 50_000})
    encoded = encode([table, table.slice(10, 5)])
    assert {one.kind for one in encoded.buffers} >= {BufferKind.ARROW}
    back = decode(encoded.head, copied(encoded))
    assert back[0].equals(table)
    assert back[1].equals(table.slice(10, 5))
    assert encoded.nbytes < 2 * table.nbytes


# ---- PyTorch ----


@pytest.mark.needs("torch")
def test_tensors_share_storages_again() -> None:
    torch = importlib.import_module("torch")
    tensor = torch.arange(10_000.0)
    layer = torch.nn.Linear(100, 100)
    back = again({"t": tensor, "part": tensor[5:], "n": tensor.numpy(), "layer": layer, "w": layer.weight})
    back["t"][5] = -1
    assert back["part"][0] == -1
    assert back["n"][5] == -1
    assert back["layer"].weight is back["w"]
    assert back["t"].untyped_storage()._cdata == back["part"].untyped_storage()._cdata
    assert torch.equal(back["w"], layer.weight)
    assert len(encode([tensor, tensor[5:], tensor.view(100, 100).T]).buffers) == 1


@pytest.mark.needs("torch")
def test_training_state_comes_back_with_gradients_and_moments() -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(4, 8)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    model_2, optimizer_2, generator = again((model, optimizer, torch.default_generator.get_state()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), model_2.parameters(), strict=True))
    assert torch.equal(generator, torch.default_generator.get_state())
    for _ in range(3):
        step(model, optimizer)
        step(model_2, optimizer_2)
    for ours, theirs in zip(model_2.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_tensors_of_every_type_come_back(kind: str) -> None:
    torch = importlib.import_module("torch")
    for tensor in (
        torch.ones(3, 4).to(getattr(torch, kind)),
        torch.empty(0),
        torch.tensor(5),
        torch.ones(2).expand(3, 2),
    ):
        back = again(tensor)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
    fixed = encode(torch.ones(10_000))
    loaded = decode(fixed.head, [memoryview(bytes(view)) for view in fixed.views], writable=False)
    loaded[0] = 5  # tensors know no read-only memory, so this must not be somebody else's


@pytest.mark.needs("torch")
def test_a_tensor_of_a_device_that_is_not_here_is_not_put_elsewhere_in_silence() -> None:
    importlib.import_module("torch")
    with pytest.raises(Unsupported, match="saved on nowhere:0"):
        rebuild.torch_storage(memoryview(b"1234"), "nowhere:0")


class OnACard:
    """A storage of torch's whose device was taken: reading it would wait for ever."""

    _cdata = 1
    device = types.SimpleNamespace(type="cuda")

    def cpu(self) -> None:
        pytest.fail("it waits for ever")


@pytest.mark.parametrize("state", [PageState.PARKED, PageState.LEAVING])
def test_memory_of_a_device_that_was_taken_is_refused_and_not_waited_for(
    state: PageState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = PageView(lease=LeaseId("p"), epoch=Epoch(1, 2), deadline_ns=1 << 60, now_ns=0, state=state)
    with PageWriter.create(str(tmp_path / "page"), view):
        monkeypatch.setenv("SUBLET_PAGE", str(tmp_path / "page"))
        with pytest.raises(ReductionRefused, match="which was taken before it could be read"):
            EncodingRules()._storage(OnACard())


# ---- functions and classes ----


def main_module(text: str) -> dict[str, Any]:
    """Things as they are defined in a notebook."""
    made = types.ModuleType("__main__")
    exec(text, made.__dict__)  # noqa: S102 - the text stands in this file
    return made.__dict__


def test_what_is_defined_in_main_travels_by_value_and_the_rest_by_name() -> None:
    names = main_module(
        "import json\nfactor = 3\ndef helper(x): return x * factor\ndef f(x): return json.dumps(helper(x))\n"
        "class Thing:\n    def __init__(self, n): self.n = n\n    def twice(self): return self.n * 2\n"
    )
    back = again({"f": names["f"], "thing": names["Thing"](4), "lambda": lambda x: x + 1, "named": pickle.dumps})
    assert back["f"](2) == "6"
    assert back["thing"].twice() == 8
    assert back["lambda"](1) == 2
    assert back["named"] is pickle.dumps
    assert b"cloudpickle" not in encode(pickle.dumps).head


def test_a_function_shares_its_closure_with_the_value() -> None:
    seen: list[int] = []
    back = again({"seen": seen, "add": lambda x: seen.append(x + 0)})
    back["add"](5)
    assert back["seen"] == [5]


def test_a_large_array_in_a_closure_is_not_copied() -> None:
    array = np.zeros(SMALL_BYTES)
    encoded = encode(lambda: array)
    assert [one.kind for one in encoded.buffers] == [BufferKind.NUMPY]
    assert len(encoded.head) < 3000


# ---- heads that are none ----


def test_a_damaged_head_is_refused_and_never_read_past_its_end() -> None:
    head = encode([np.arange(5000), b"x" * SPLICE_BYTES, np.zeros(0)]).head
    parsed = Head.parse(head)
    tables = len(head) - len(parsed.stream)
    for cut in range(tables):
        with pytest.raises(InvalidRequest):
            Head.parse(head[:cut])
    for at in range(tables):
        for bit in range(8):
            flipped = bytearray(head)
            flipped[at] ^= 1 << bit
            try:
                found = Head.parse(bytes(flipped))
            except InvalidRequest:
                continue
            for window in found.windows:  # whatever it says now, it says nothing outside its buffers
                assert window.length == 0 or window.offset + window.length <= found.buffers[window.buffer].length


def test_buffers_of_another_number_or_length_are_refused() -> None:
    encoded = encode(np.arange(5000))
    with pytest.raises(InvalidRequest, match="1 buffers, not 0"):
        decode(encoded.head, [])
    with pytest.raises(InvalidRequest, match="came with 5"):
        decode(encoded.head, [memoryview(b"12345")])


def test_a_class_of_a_part_that_its_library_has_not_imported_yet_goes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``numpy.recarray``, which says that it is in ``numpy.rec``."""
    (tmp_path / "lazylib").mkdir()
    (tmp_path / "lazylib" / "__init__.py").write_text("class Kind: pass\nKind.__module__ = 'lazylib.part'\n")
    (tmp_path / "lazylib" / "part.py").write_text("from lazylib import Kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        library = importlib.import_module("lazylib")
        assert "lazylib.part" not in sys.modules
        assert again(library.Kind) is library.Kind
    finally:
        for name in ("lazylib", "lazylib.part"):
            sys.modules.pop(name, None)


def test_what_an_installed_library_has_under_a_name_goes_by_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module of the program's own has goes by what it holds: nobody else may have it as it is here."""
    for one in (dataclasses.KW_ONLY, os.environ, pd.options, np.random.mtrand._rand):
        assert again([one, [one]])[1][0] is one
    assert again(random.random).__self__ is random.seed.__self__  # type: ignore[attr-defined]
    assert again(random.Random(3)) is not again(random.Random(3))
    (tmp_path / "ownmodule.py").write_text("class Config: pass\nconfig = Config()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        own = importlib.import_module("ownmodule")
        own.config.rate = 5
        assert again(own.config).rate == 5
        assert again(own.config) is not own.config
    finally:
        sys.modules.pop("ownmodule", None)


def test_no_library_is_loaded_that_the_program_has_not() -> None:
    import subprocess

    code = (
        "import sys; from sublet.state.transfer.codec import encode;"
        "import sublet.state.checkpoints.durable, sublet.state.checkpoints.store;"
        "encode([1, {'a': (2, 3)}]); print(*(n for n in ('numpy', 'torch', 'pandas', 'pyarrow', 'cloudpickle',"
        "'asyncio', 'zstandard') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_rule_for_a_class_of_a_library_is_looked_for_again_when_another_library_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type("Picture", (), {"__module__": "decimal"})
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    assert EncodingRules()._rule_of(kind) is None
    assert EncodingRules()._rule_of(kind) is None
    monkeypatch.setitem(sys.modules, "PIL.Image", types.SimpleNamespace(Image=kind))
    rules = EncodingRules()
    assert rules._rule_of(kind) == rules._image


@pytest.mark.parametrize("rules", [EncodingRules(), HomeRules()])
def test_the_bases_of_a_class_show_whether_it_has_a_rule(rules: EncodingRules) -> None:
    """Of all classes that are loaded."""
    for library in ("matplotlib.figure", "PIL.ImageDraw", "torch.nn.utils.parametrize", "IPython", "comm.base_comm"):
        importlib.import_module(library)
    found: dict[int, type] = {}
    waiting: list[type] = [object]
    while waiting:
        kind = waiting.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            waiting += type.__subclasses__(kind)
    for base in (tuple, list, dict, object):
        parts = {"__new__": functools.partial(base.__new__), "__setitem__": id, "__module__": "__main__"}
        own = type("Own", (base,), parts)
        found[id(own)] = own
    ruled = [kind for kind in found.values() if rules._find_rule(kind) is not None]
    assert len(ruled) > 500
    assert sum(kind.__name__ == "Own" for kind in ruled) >= 3
    without = [kind for kind in ruled if rules._rule_for(kind) is None]
    assert without == []


def test_an_object_that_its_library_has_under_a_name_goes_by_it_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Setting", (), {"__module__": "decimal"})
    one = kind()
    assert EncodingRules()._rule_of(kind) is None
    monkeypatch.setattr("decimal.ONE", one, raising=False)
    rule = EncodingRules()._rule_of(kind)
    assert rule is not None
    assert rule(one) == (rebuild.of_module, ("decimal", "ONE"))
