"""A tenant's device time within the rolling window: exact, and logarithmic in the window's entries.

The number of device-thousandths a tenant holds is a step function of time. We keep its breakpoints with the running
integral, so the use in any window that ends now is the difference of two points of the integral.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec


class UsageMeter(msgspec.Struct):
    """One tenant's meter. Units: thousandths of a device, times nanoseconds."""

    at_ns: list[int] = []
    total: list[int] = []
    """The integral up to the breakpoint of the same index."""
    level: list[int] = []
    """What is held from that breakpoint on."""

    @property
    def held_millis(self) -> int:
        return self.level[-1] if self.level else 0

    def change(self, millis: int, now_ns: int, window_ns: int) -> None:
        """The tenant holds so much more (or less) from now on."""
        self._forget(now_ns - window_ns)
        level = self.held_millis + millis
        if self.at_ns and self.at_ns[-1] >= now_ns:
            self.level[-1] = level
            return
        self.total.append(self._integral(now_ns))
        self.at_ns.append(now_ns)
        self.level.append(level)

    def used(self, now_ns: int, window_ns: int) -> int:
        """Device-thousandths × nanoseconds within ``(now - window, now]``."""
        return self._integral(now_ns) - self._integral(now_ns - window_ns)

    def levels_since(self, from_ns: int) -> list[tuple[int, int]]:
        """From when on what was held; the first instant may be before ``from_ns``."""
        first = max(0, bisect_right(self.at_ns, from_ns) - 1)
        return list(zip(self.at_ns[first:], self.level[first:], strict=True))

    def shift(self, shift_ns: int) -> None:
        """The clock is another one; its instants are so much later."""
        self.at_ns = [at + shift_ns for at in self.at_ns]

    def _integral(self, at_ns: int) -> int:
        index = bisect_right(self.at_ns, at_ns) - 1
        if index < 0:
            return 0
        return self.total[index] + self.level[index] * (at_ns - self.at_ns[index])

    def _forget(self, before_ns: int) -> None:
        """Breakpoints before the window are no more needed, but for the last of them."""
        keep = bisect_right(self.at_ns, before_ns) - 1
        if keep > 64:  # in batches, so that a change stays cheap
            del self.at_ns[:keep], self.total[:keep], self.level[:keep]


def at_most_from(meters: Sequence[UsageMeter], most: int, now_ns: int, window_ns: int) -> int | None:
    """From when on the use of all of them within the window will be at most ``most``, if they hold what they hold now;
    None: never."""
    used = sum(meter.used(now_ns, window_ns) for meter in meters)
    changes: list[tuple[int, int]] = []
    for meter in meters:
        before = 0
        for at_ns, level in meter.levels_since(now_ns - window_ns):
            changes.append((max(at_ns, now_ns - window_ns), level - before))
            before = level
    leaves, held = 0, sum(meter.held_millis for meter in meters)
    at_ns = now_ns - window_ns  # what was used then leaves the window now
    for next_ns, change in [*sorted(changes), (now_ns, 0)]:
        sinks = leaves - held
        needed_ns = 0 if used <= most else -(-(used - most) // sinks) if sinks > 0 else None
        if needed_ns is not None and at_ns + needed_ns <= next_ns:
            return at_ns + needed_ns + window_ns
        used -= sinks * (next_ns - at_ns)
        at_ns, leaves = next_ns, leaves + change
    return None
