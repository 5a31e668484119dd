"""What several processes of a training program have in common, and what each has of its own, in one checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.errors import InvalidRequest, Unsupported
from sublet.training import together

pytestmark = pytest.mark.needs("torch")


def state(mean: float) -> dict[str, Any]:
    """Of a process whose running mean is this."""
    import torch

    return {
        "parts": {"model": {"weight": torch.arange(6.0).reshape(2, 3), "mean": torch.tensor([mean])}},
        "position": {"chance": [torch.zeros(4, dtype=torch.uint8), (1, 2), None], "taken": int(mean)},
        "empty": torch.zeros(0, 3),
    }


def test_only_what_differs_is_kept_of_the_others() -> None:
    import torch

    first, second = state(0), state(1)
    kept = together.difference(second, together._digests(first))
    same = together.Same.SAME
    assert kept["parts"]["model"] == {"weight": same, "mean": second["parts"]["model"]["mean"]}
    assert kept["position"] == {"chance": [same, (1, 2), None], "taken": 1}
    assert kept["empty"] is same
    found = together.own_state({**first, together.RANKS: [kept]}, 1, 2)
    assert torch.equal(found["parts"]["model"]["mean"], torch.tensor([1.0]))
    assert torch.equal(found["parts"]["model"]["weight"], first["parts"]["model"]["weight"])
    assert found["position"]["taken"] == 1


def test_a_tensor_of_another_shape_type_or_bit_is_another() -> None:
    import torch

    digests = together._digests({"a": torch.zeros(4)})
    for other in (torch.zeros(1, 4), torch.zeros(4, dtype=torch.float64), torch.full((4,), -0.0), torch.zeros(0, 4)):
        assert torch.equal(together.difference({"a": other}, digests)["a"], other)
    assert together.difference({"a": torch.zeros(4)}, digests) == {"a": together.Same.SAME}
    assert together.difference({"b": torch.zeros(4)}, digests)["b"] is not together.Same.SAME


def test_a_checkpoint_of_more_or_fewer_processes_is_refused() -> None:
    for others, count in ((0, 2), (1, 1), (1, 3)):
        saved: dict[str, Any] = {together.RANKS: [{}] * others} if others else {}
        with pytest.raises(InvalidRequest, match=f"and this program has {count}"):
            together.own_state(saved, 0, count)


def test_processes_that_have_not_joined_are_refused_and_one_alone_is_not() -> None:
    for environ in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "all"}):
        assert together.group_here(environ).count == 1
    with pytest.raises(Unsupported, match="one of 4 processes"):
        together.group_here({"WORLD_SIZE": "4"})
