"""The parts of a training program's state: anything that can say where it stands, and be put back there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sublet.errors import InvalidRequest, SubletError


class Part(NamedTuple):
    """How one object is saved, and restored in place."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def part_of(name: str, thing: Any) -> Part:
    """By what it can: ``state_dict``, the state of a generator, or, of a dict or a list, what it holds."""
    thing = _unwrapped(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Part(thing.state_dict, thing.load_state_dict)
    if isinstance(thing, random.Random):
        return Part(thing.getstate, thing.setstate)
    if hasattr(thing, "get_state") and hasattr(thing, "set_state"):  # of torch, and the old ones of numpy
        return Part(thing.get_state, thing.set_state)
    if hasattr(thing, "bit_generator"):
        bits = thing.bit_generator
        return Part(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(thing, dict):
        return Part(lambda: dict(thing), lambda state: _fill(thing, state))
    if isinstance(thing, list):
        return Part(lambda: list(thing), lambda state: thing.__setitem__(slice(None), state))
    raise InvalidRequest(
        f"{name} is a {type(thing).__name__}, which cannot say where it stands",
        do="Give it state_dict() and load_state_dict(), or hand over a dict or a list with what matters.",
    )


def put_back(parts: Mapping[str, Part], saved: Mapping[str, Any]) -> None:
    """All of them, or the first that does not fit is raised by name. Training must not begin after that."""
    if parts.keys() != saved.keys():
        missing, strange = sorted(parts.keys() - saved.keys()), sorted(saved.keys() - parts.keys())
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has {', '.join(strange)}, which this program has not"] if strange else []
        raise InvalidRequest(
            f"the checkpoint {' and '.join(said)}",
            do="Give the trainer what it was saved with, or begin under another name.",
        )
    for name, part in parts.items():
        try:
            part.set(saved[name])
        except SubletError:
            raise
        except Exception as error:
            raise InvalidRequest(
                f"the checkpoint does not fit this program's {name}: {error}",
                do="Build it as it was when it was saved, or begin under another name.",
            ) from error


def _unwrapped(thing: Any) -> Any:
    """The module behind ``torch.compile``, whose names would not fit the plain one, and the other way round."""
    return getattr(thing, "_orig_mod", thing)


def _fill(thing: dict[Any, Any], state: Mapping[Any, Any]) -> None:
    thing.clear()
    thing.update(state)
