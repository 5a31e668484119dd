"""A clock that moves only when it is told to."""

from __future__ import annotations

from typing import Final

from sublet.values import parse_duration_ns

_START_NS: Final = 1_000 * 1_000_000_000
_WALL_NS: Final = 1_750_000_000 * 1_000_000_000


class HeldClock:
    """A ``sublet.clock.Clock`` for tests: ``clock.advance("30s")``.

    Instants and wall time move together, and part company when ``jump_wall`` or ``reboot`` is called.
    """

    def __init__(self, *, now_ns: int = _START_NS, wall_ns: int = _WALL_NS) -> None:
        self._now_ns = now_ns
        self._wall_ns = wall_ns
        self._boots = 1

    @property
    def domain(self) -> str:
        return f"held/{self._boots}"

    def now_ns(self) -> int:
        return self._now_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, duration: float | str) -> int:
        """Let time pass: seconds, or a text such as ``"5m"``. Returns the new instant."""
        return self.advance_ns(parse_duration_ns(duration, zero_ok=True))

    def advance_ns(self, ns: int) -> int:
        """The same in nanoseconds."""
        if ns < 0:
            raise ValueError("an instant never goes back; jump_wall moves the wall clock, reboot starts a new domain")
        self._now_ns += ns
        self._wall_ns += ns
        return self._now_ns

    def jump_wall(self, seconds: float) -> None:
        """The wall clock is set to another time. Nothing may be decided by it."""
        self._wall_ns += round(seconds * 1e9)

    def reboot(self, *, now_ns: int = 1_000_000_000, down_s: float = 30.0) -> None:
        """The machine starts again: instants begin anew, in another domain, and the wall clock has gone on."""
        self._boots += 1
        self._now_ns = now_ns
        self._wall_ns += round(down_s * 1e9)
