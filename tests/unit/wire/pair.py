"""Two links with a pretended wire between them, which cuts what it carries as chance will have it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sublet.wire.link import Link
from sublet.wire.link_events import Happening, Over, PeerHello


@dataclass
class Pair:
    """``a`` connected, ``b`` accepted."""

    a: Link
    b: Link
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    told_a: list[Happening] = field(default_factory=list)
    told_b: list[Happening] = field(default_factory=list)

    def carry(self) -> None:
        """Until nothing is under way."""
        while self.a.has_output or self.b.has_output:
            self.told_b += move(self.a, self.b, self.chance)
            self.told_a += move(self.b, self.a, self.chance)
        self.told_a += self.a.news()
        self.told_b += self.b.news()

    def take_a(self) -> list[Happening]:
        """What ``a`` was told since last time."""
        told, self.told_a = self.told_a, []
        return told

    def take_b(self) -> list[Happening]:
        """What ``b`` was told since last time."""
        told, self.told_b = self.told_b, []
        return told


def move(source: Link, target: Link, chance: random.Random) -> list[Happening]:
    """All output of one to the other, as a socket would: descriptors with the first byte, and no copies of them."""
    told: list[Happening] = []
    for data, fds in source.take_output():
        at = chance.randint(1, len(data))
        told += target.receive(data[:at], fds)
        if at < len(data):
            told += target.receive(data[at:])
    return told


def greeted(**limits: int) -> Pair:
    """A pair that has exchanged its greetings."""
    pair = Pair(Link.connecting(b"me", **limits), Link.accepting(**limits))
    pair.carry()
    [hello] = pair.take_b()
    assert isinstance(hello, PeerHello)
    pair.b.welcome(b"you")
    pair.carry()
    pair.take_a()
    return pair


def how_it_ended(told: list[Happening]) -> Over:
    """The last happening, which says it."""
    over = told[-1]
    assert isinstance(over, Over)
    return over
