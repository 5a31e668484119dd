"""How long work ran under a lease, so that it can be said once and billed once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BusyMeter:
    """The time during which at least one thing ran. Calls that overlap count once."""

    running: int = 0
    _ended_ns: int = 0
    """Up to the last moment at which everything had finished."""
    _since_ns: int = 0
    _said_ns: int = 0

    def begin(self, now_ns: int) -> bool:
        """One more runs; True if it is the only one."""
        self.running += 1
        if self.running == 1:
            self._since_ns = now_ns
        return self.running == 1

    def finish(self, now_ns: int) -> None:
        """One fewer runs."""
        if self.running == 0:
            raise ValueError("finish() without begin()")
        self.running -= 1
        if self.running == 0:
            self._ended_ns += max(0, now_ns - self._since_ns)

    def total_ns(self, now_ns: int) -> int:
        """All of it, up to now."""
        return self._ended_ns + (max(0, now_ns - self._since_ns) if self.running else 0)

    def unsaid_ns(self, now_ns: int) -> int:
        """What no answered report has carried yet. An unanswered report may have been counted all the same, and its
        time is carried again; so the receiver that adds up counts no more of one than has passed since the last."""
        return max(0, self.total_ns(now_ns) - self._said_ns)

    def said(self, total_ns: int) -> None:
        """A word was answered that carried everything up to this total."""
        self._said_ns = max(self._said_ns, total_ns)
