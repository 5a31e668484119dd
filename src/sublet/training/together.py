"""The processes of one training program: they leave and save at the same step, as one checkpoint.

Each has its own part of the data and its own random numbers; the weights are the same in all of them. So the checkpoint
is the first one's state and, of every other, what differs from that. It is written by the first one alone, and read by
each. What is agreed on goes through a process group of its own, on the CPU, whatever the program trains with.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

from sublet.errors import InvalidRequest, Unsupported

T = TypeVar("T")
RANKS: Final = "ranks"
"""Where a checkpoint has what the other processes differ in."""
_CONTAINERS: Final = (list, tuple)


class Same(enum.Enum):
    """In the place of a tensor that is as the first process has it."""

    SAME = "same"


class TrainingGroup(Protocol):
    """Those that train together. Every process calls each of these at the same places of its program."""

    rank: int
    count: int

    def most(self, number: int) -> int:
        """The greatest of what they say."""

    def first(self, value: T | None) -> T | None:
        """What the first of them said that said something."""

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of all, in the process that saves it; of no use elsewhere."""

    def wait(self) -> None:
        """Until all have come here."""


class Alone:
    """One process."""

    rank, count = 0, 1

    def most(self, number: int) -> int:
        return number

    def first(self, value: T | None) -> T | None:
        return value

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def wait(self) -> None:
        """There is no other process."""


class Together:
    """Several processes, in a group of ``torch.distributed``."""

    def __init__(self) -> None:
        """Every process makes one at the same time."""
        from torch import distributed

        self._dist: Any = distributed
        self._group = distributed.new_group(backend="gloo")
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def most(self, number: int) -> int:
        import torch

        largest = torch.tensor([number])
        self._dist.all_reduce(largest, op=self._dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def first(self, value: T | None) -> T | None:
        values: list[T | None] = [None] * self.count
        self._dist.all_gather_object(values, value, group=self._group)
        return next((one for one in values if one is not None), None)

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        digests = [_digests(state) if self.rank == 0 else {}]
        self._dist.broadcast_object_list(digests, src=0, group=self._group)
        own = None if self.rank == 0 else difference(state, digests[0])
        others: list[Any] | None = [None] * self.count if self.rank == 0 else None
        self._dist.gather_object(own, others, dst=0, group=self._group)
        return state if others is None else state | {RANKS: others[1:]}

    def wait(self) -> None:
        self._dist.barrier(group=self._group)


def group_here(environ: Mapping[str, str] | None = None) -> TrainingGroup:
    """This process, or all that it trains with. Raises ``Unsupported`` where others were started with it and do not
    know of one another: each would overwrite what the other saves."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return Together() if distributed.get_world_size() > 1 else Alone()
    world_size = (os.environ if environ is None else environ).get("WORLD_SIZE", "")
    if world_size.isascii() and world_size.isdigit() and int(world_size) > 1:
        raise Unsupported(
            f"this is one of {world_size} processes (WORLD_SIZE), and it has not joined the others",
            do="Call torch.distributed.init_process_group() before the trainer is made, or run one process (--gpus 1).",
        )
    return Alone()


def own_state(saved: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """What this process had in a checkpoint of all. Raises ``InvalidRequest`` where they were more or fewer."""
    others = saved.get(RANKS, [])
    if len(others) + 1 != count:
        raise InvalidRequest(
            f"the checkpoint was made by {len(others) + 1} processes, and this program has {count}",
            do="Run it with as many as before (--gpus), or begin under another name.",
        )
    own: dict[str, Any] = filled(others[rank - 1], saved) if rank else saved
    return own


def difference(state: Any, digests: Mapping[tuple[Any, ...], bytes], path: tuple[Any, ...] = ()) -> Any:
    """A state without those tensors that are in the same place elsewhere, with the same content."""
    if isinstance(state, dict):
        return {name: difference(value, digests, (*path, name)) for name, value in state.items()}
    if type(state) in _CONTAINERS:
        return type(state)(difference(value, digests, (*path, at)) for at, value in enumerate(state))
    if not _is_tensor(state):
        return state
    tensor = state.detach().cpu()
    return Same.SAME if digests.get(path) == _digest(tensor) else tensor


def filled(state: Any, whole: Any) -> Any:
    """The other way round: what is the same is taken from there."""
    if state is Same.SAME:
        return whole
    if isinstance(state, dict):
        return {name: filled(value, _at(whole, name)) for name, value in state.items()}
    if type(state) in _CONTAINERS:
        return type(state)(filled(value, _at(whole, at)) for at, value in enumerate(state))
    return state


def _at(whole: Any, name: Any) -> Any:
    """What stands there; None where nothing does, and then nothing is the same there."""
    try:
        return whole[name]
    except (KeyError, IndexError, TypeError):
        return None


def _digests(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], bytes]:
    pairs: Any = ()
    if isinstance(state, dict):
        pairs = state.items()
    elif type(state) in _CONTAINERS:
        pairs = enumerate(state)
    elif _is_tensor(state):
        return {path: _digest(state.detach().cpu())}
    return {key: value for name, one in pairs for key, value in _digests(one, (*path, name)).items()}


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _digest(tensor: Any) -> bytes:
    import torch
    from blake3 import blake3

    words = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return blake3(words).update(memoryview(data)).digest()
