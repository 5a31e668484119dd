"""Describes a value and whether it could be saved, without copying it off a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from sublet.durable import rebuild
from sublet.errors import Unpicklable
from sublet.lazy_dataclass import dataclass
from sublet.notebook.counting import TOO_MANY, has_too_many
from sublet.notebook.home import HomeRules
from sublet.state.transfer.codec import Encoding
from sublet.state.transfer.reducers import GpuRule

MODULE: Final = "module"
"""What modules are; they are saved by name, and need no report."""
WORDS_MAX: Final = 60
"""Letters of a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found."""

    nbytes: int = 0
    refused: str = ""
    """Why it cannot be saved; empty if it can."""
    needs: frozenset[str] = frozenset()
    """Names of the notebook that functions in it read."""
    met: Mapping[int, Any] | None = None
    """Every object in it."""
    is_elsewhere: bool = False
    """Some of it is in memory of a device."""


def probe(name: str, value: object, *, is_bounded: bool = False) -> Probe:
    """Look at a value as a save would. ``is_bounded``: if it has too many objects (``counting``) it is refused."""
    if is_bounded and has_too_many(value):
        return Probe(refused=TOO_MANY)
    rules = _Measuring()
    encoding = Encoding(rules)
    try:
        encoding.dump({name: value}, roots=True)
    except Unpicklable as error:
        return Probe(refused=error.what or error.message)
    nbytes = encoding.nbytes + sum(rules.elsewhere.values())
    return Probe(nbytes=nbytes, needs=frozenset(rules.needs), met=encoding.met, is_elsewhere=bool(rules.elsewhere))


def describe(value: object) -> str:
    """What it is, in a few words, without asking it to print itself: that may take long, or be long."""
    kind = type(value)
    words = kind.__name__
    shape, dtype = _attribute(value, "shape"), _attribute(value, "dtype")
    if isinstance(shape, tuple):
        words += f" {tuple(shape)}"
        if dtype is not None:
            words += f" {str(dtype).removeprefix('torch.')}"
        device = _attribute(value, "device")
        if str(kind.__module__).startswith("torch") and device is not None:
            words += f" on {device}"
    elif kind in (list, tuple, dict, set, frozenset):
        n = len(value)  # type: ignore[arg-type]
        words += f" of {n}"
    elif kind in (bytes, bytearray, str):
        n = len(value)  # type: ignore[arg-type]
        words += f" of {n} {'letters' if kind is str else 'bytes'}"
    return words if len(words) <= WORDS_MAX else words[: WORDS_MAX - 1] + "…"


def _attribute(value: object, attribute: str) -> object:
    """Only of arrays, tensors and frames: a stranger's attribute may be a program."""
    if str(type(value).__module__).partition(".")[0] not in (
        "numpy",
        "torch",
        "pandas",
        "cupy",
        "jax",
        "jaxlib",
        "warp",
    ):
        return None
    try:
        return getattr(value, attribute, None)
    except Exception:  # noqa: BLE001 - it is only for a description
        return None


class _Measuring(HomeRules):
    """As for a save, but memory of a device is counted and left where it is."""

    def __init__(self, *, gpu: GpuRule = "copy", **more: Any) -> None:
        super().__init__(gpu=gpu, **more)
        self.elsewhere: dict[int, int] = {}
        """Bytes of each storage that is on a device."""

    def _storage(self, value: Any) -> Any:
        if str(value.device) == "cpu" or "torch" not in sys.modules:
            return super()._storage(value)
        self.elsewhere[value._cdata] = value.nbytes()
        return rebuild.itself, (None,)
