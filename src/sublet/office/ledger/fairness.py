"""Fair shares: what a tenant and its group used, what of it counts, and what that is worth.

**Decayed use.** What was used counts less the longer ago it was: by half for each half-life. The weight of an instant
grows instead, so that a sum once taken stays comparable: time is cut into periods of one half-life ``H``; within a
period the weight rises in a straight line from ``H`` to ``2 H``, and at its end all sums are halved. A straight line
instead of the exponential differs from it by at most 6 %, and makes everything a whole number: what a level ``L`` adds
from ``a`` to ``b`` nanoseconds into a period is ``L (b - a)(2 H + a + b)``, twice the area beneath the line. Halving
rounds down, and rounding down twice is rounding down once, so the sum is a function of what was held and of the
instant, whatever was asked in between: a fold of the journal gives the same order, bit for bit.

**Share.** The share of a resource is its decayed use per capacity and weight. Of the shares of GPUs, cores and memory
the largest counts (dominant share): a tenant that needs no GPU is not behind those that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec

from sublet.values import NS_PER_S, GroupId, Kind
from sublet.wire.orders import Part

SHARED_KINDS: Final = (Kind.GPU, Kind.CPU, Kind.MEMORY)
"""What counts: thousandths of a device, cores, bytes. Disk does not: it is kept, not used up."""
HALF_LIFE_NS: Final = 3600 * NS_PER_S
DEFAULT_GROUP: Final = GroupId("default")
"""Of tenants that were put into no other."""

_NOTHING: Final = (0,) * len(SHARED_KINDS)

Amounts = Sequence[int]
"""One number for each of ``SHARED_KINDS``."""


class Decay(NamedTuple):
    """When periods begin."""

    half_life_ns: int
    origin_ns: int = 0
    """The first instant of a period. It moves with the clock that instants belong to."""

    def period(self, at_ns: int) -> tuple[int, int]:
        """Its number, and how far into it the instant is."""
        return divmod(at_ns - self.origin_ns, self.half_life_ns)

    def weight(self, at_ns: int) -> int:
        """Of a nanosecond at this instant, in the unit of the sums."""
        return 2 * (self.half_life_ns + self.period(at_ns)[1])

    def everything(self, at_ns: int) -> int:
        """The sum of a level of one that was always held."""
        half, into = self.half_life_ns, self.period(at_ns)[1]
        return 3 * half * half + into * (2 * half + into)


class Account(msgspec.Struct):
    """What one tenant or group holds, and the decayed use up to ``at_ns``."""

    at_ns: int = 0
    level: list[int] = msgspec.field(default_factory=lambda: list(_NOTHING))
    used: list[int] = msgspec.field(default_factory=lambda: list(_NOTHING))

    def change(self, by: Amounts, at_ns: int, decay: Decay) -> None:
        """So much more (or less) is held from now on."""
        half, origin = decay
        first, begin = divmod(self.at_ns - origin, half)
        last, end = divmod(at_ns - origin, half)
        if first != last or end < begin:
            self.used = self.used_at(at_ns, decay)
        else:  # by far the most frequent: nothing is halved, and what is not held does not change
            area = (end - begin) * (2 * half + begin + end)
            for kind, level in enumerate(self.level):
                if level:
                    self.used[kind] += level * area
        self.at_ns = at_ns
        for kind, more in enumerate(by):
            self.level[kind] += more

    def used_at(self, at_ns: int, decay: Decay) -> list[int]:
        """The decayed use of each kind. Asking changes nothing."""
        half, origin = decay
        first, begin = divmod(self.at_ns - origin, half)
        last, end = divmod(max(at_ns, self.at_ns) - origin, half)
        if first == last:
            area = (end - begin) * (2 * half + begin + end)
            return [used + level * area for used, level in zip(self.used, self.level, strict=True)]
        rest, whole, part = (half - begin) * (3 * half + begin), 3 * half * half, end * (2 * half + end)
        found = []
        for used, level in zip(self.used, self.level, strict=True):
            used = (used + level * rest) >> 1
            if level:
                for _ in range(last - first - 1):
                    before, used = used, (used + level * whole) >> 1
                    if used == before:  # so it stays, in every period to come
                        break
            else:
                used >>= last - first - 1
            found.append(used + level * part)
        return found

    def shift(self, shift_ns: int) -> None:
        """The clock is another one; its instants are so much later."""
        self.at_ns += shift_ns


def amounts_of(parts: Iterable[Part]) -> list[int]:
    """What these parts of a lease count as."""
    found = list(_NOTHING)
    for part in parts:
        if part.kind is Kind.GPU:
            found[0] += part.millis
        elif part.kind is Kind.CPU:
            found[1] += part.amount
        elif part.kind is Kind.MEMORY:
            found[2] += part.amount
    return found


def share(account: Account, capacity: Amounts, weight: int, ahead: int, at_ns: int, decay: Decay) -> int:
    """The dominant share per weight, as a number that sorts at this instant: smaller goes first. ``ahead``: what a
    level of one counts as in advance, so that one step which frees four devices does not give all of them to the same
    tenant."""
    best = 0
    for used, level, most in zip(account.used_at(at_ns, decay), account.level, capacity, strict=True):
        if most and (used or level):
            found = (used + level * ahead) // (most * weight)
            if found > best:
                best = found
    return best


def share_of_everything(account: Account, capacity: Amounts, at_ns: int, decay: Decay) -> tuple[Kind, Fraction]:
    """The resource of which most was used, and the share: 1 for a tenant that always had all there is. Weights do not
    count."""
    everything = decay.everything(at_ns)
    used = account.used_at(at_ns, decay)
    shares = [
        (Fraction(total, most * everything), kind)
        for kind, total, most in zip(SHARED_KINDS, used, capacity, strict=True)
        if most
    ]
    best = max(shares, key=lambda found: found[0], default=(Fraction(0), Kind.GPU))
    return best[1], best[0]
