"""Machines with cards, as tables: what each says of itself, and where that was read.

A line is a value and its source. ``guessed`` marks what no source says; the tests list these, and the first real card
is compared with that list first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sublet.values import GIB, MIB

__all__ = ["FOUR_H100", "PERSONALITIES", "SOME_IN_CONTAINER", "CardKind", "Line", "Personality", "guessed"]


class Line(NamedTuple):
    """One fact about a machine or a card: a field of ``state.h``."""

    field: str
    value: Any
    source: str


GUESSED: Final = "guessed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardKind:
    """One model of card."""

    name: str
    lines: tuple[Line, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return {line.field: line.value for line in self.lines}


@dataclass(frozen=True, slots=True, kw_only=True)
class Personality:
    """One kind of machine."""

    name: str
    cards: tuple[CardKind, ...]
    lines: tuple[Line, ...]
    hidden: frozenset[int] = field(default_factory=frozenset)
    """Cards that the machine has and this container has not."""

    @property
    def all_lines(self) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        """Those of the machine and of each card, with the name of what they are about."""
        return ((self.name, self.lines), *((card.name, card.lines) for card in self.cards))

    @property
    def machine(self) -> Mapping[str, Any]:
        return {line.field: line.value for line in self.lines}


MOCK: Final = "NVIDIA/k8s-test-infra at 3b2b865, pkg/gpu/mocknvml, profile H100: "

H100: Final = CardKind(
    name="H100",
    lines=(
        Line("model", b"NVIDIA H100 80GB HBM3", MOCK + "name"),
        Line("memory", 80 * GIB, MOCK + "memory.total_bytes"),
        Line("reserved", GIB, MOCK + "memory.reserved_bytes"),
        Line("power_mw", 700_000, MOCK + "power.default_limit_mw"),
        Line("major", 9, "CUDA C++ Programming Guide, compute capabilities: 9.0"),
        Line("minor", 0, "the same"),
        Line("idle", 4 * MIB, GUESSED),
        Line("context", 520 * MIB, GUESSED),
        Line("persistence", 1, GUESSED),
    ),
)

LINGERS: Final = Line("lingers_ms", 300, GUESSED)

FOUR_H100: Final = Personality(
    name="4 × H100, driver 580, bare metal",
    cards=(H100,) * 4,
    lines=(
        Line("driver", b"580.65.06", "CUDA 13.0 release notes: the oldest driver for it on Linux"),
        Line("cuda", 13_000, "the same"),
        LINGERS,
    ),
)

SOME_IN_CONTAINER: Final = Personality(
    name="2 of 4 × H100, driver 570, in a container",
    cards=(H100,) * 4,
    hidden=frozenset((0, 2)),
    lines=(
        Line("driver", b"570.86.10", "CUDA 12.8 release notes: the driver that came with it on Linux"),
        Line("cuda", 12_080, "the same"),
        Line("namespaced", 1, "NVIDIA/open-gpu-kernel-modules, _gpuConvertPid: pids as the asker's namespace has them"),
        LINGERS,
    ),
)

PERSONALITIES: Final = (FOUR_H100, SOME_IN_CONTAINER)


def guessed() -> list[str]:
    """What no source says, a line each."""
    found = {
        f"{owner}: {line.field} = {line.value!r}"
        for personality in PERSONALITIES
        for owner, lines in personality.all_lines
        for line in lines
        if line.source == GUESSED
    }
    return sorted(found)
