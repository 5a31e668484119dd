"""Kernels that are objects of a program become source, which means the same where nothing else of the program is."""

from __future__ import annotations

import types

import pytest

from sublet.compute.session_data import source_of_kernels, sources_of
from sublet.errors import InvalidRequest
from sublet.wire.device import ModuleKind
from tests.unit.compute.session_pair import SessionPair


@pytest.mark.needs("warp")
def test_what_a_kernel_uses_comes_along() -> None:
    """Its functions and theirs, structs, numbers, what it captured; each once, before it is used."""
    from tests.unit.compute.own_kernels import first, made

    text = source_of_kernels([first, made(5)])
    assert text is not None
    assert text.count("def twice") == 1
    assert text.index("COUNT = 7") < text.index("def more") < text.index("def first")
    assert "number = 5" in text
    assert 'ENDLESS = float("inf")' in text
    assert sources_of(first, None) == {ModuleKind.WARP: (source_of_kernels(first) or "").encode()}
    assert sources_of({"warp": first, "ptx": b"x"}, None)[ModuleKind.WARP] == (source_of_kernels(first) or "").encode()


@pytest.mark.needs("warp")
def test_what_cannot_be_written_is_named() -> None:
    from tests.unit.compute.own_kernels import first, made, with_a_table

    with pytest.raises(InvalidRequest, match="uses 'TABLE', and a dict cannot be written"):
        source_of_kernels(with_a_table)
    with pytest.raises(InvalidRequest, match="'captured' is two different things"):
        source_of_kernels([made(1), made(2)])
    assert source_of_kernels([]) is None
    assert source_of_kernels([first, 5]) is None
    assert source_of_kernels(types.ModuleType("empty")) is None


@pytest.mark.needs("warp")
def test_they_compute_what_they_say(pair: SessionPair) -> None:
    """On a device that knows nothing of this module; a module's kernels all at once, too."""
    import numpy as np

    from tests.unit.compute.own_kernels import first, made

    holder = types.ModuleType("holder")
    holder.first, holder.captured = first, made(5)  # type: ignore[attr-defined]
    with pair.session() as gpu:
        x = gpu.mem_alloc(4 * 4)
        module = gpu.module_load(holder)
        gpu.launch(module, "first", 1, 4, [x])
        assert np.frombuffer(gpu.mem_read(x), np.float32).tolist() == [7.0, 9.0, 11.0, 13.0]
        gpu.launch(module, "captured", 1, 4, [x])
        assert np.frombuffer(gpu.mem_read(x), np.float32).tolist() == [10.0] * 4
