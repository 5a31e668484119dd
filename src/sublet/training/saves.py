"""Saves while training continues: when to save, one at a time in the background, raising every failure."""

from __future__ import annotations

from typing import Any, Final

from sublet.clock import Clock
from sublet.errors import NotFound
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.writer import SaveReport
from sublet.training.telling import Account
from sublet.values import NS_PER_S

FORMAT: Final = "sublet.training/1"


class Saves:
    """The checkpoints of one trainer, at one place."""

    def __init__(
        self,
        place: Any,
        *,
        schema: str,
        keep: int,
        every: tuple[int | None, int],
        clock: Clock,
        writes: bool = True,
    ) -> None:
        """``every``: so many steps, or else so many nanoseconds. ``writes=False``: another process does that."""
        self._every, self._every_ns = every
        self._clock = clock
        self.account = Account()
        self.found: dict[str, Any] | None = None
        """What is saved there; its taker resets it to None."""
        self.is_dirty = False
        """There is something that is not saved."""
        self.durable_steps = -1
        """So many are known to be durable; -1 if none are."""
        self._is_asked = False
        self._in_flight = False
        self._steps = 0
        """Of the last save that was begun."""
        self._began_ns = clock.now_ns()
        self._seen: SaveReport | None = None
        whole = f"{FORMAT} {schema}".strip()
        self._durable: Durable[Any] | None = None
        try:
            restored: Durable[Any] = Durable.restore(place, schema=whole, keep=keep)
        except NotFound:
            if writes:
                self._durable = Durable(None, place, schema=whole, keep=keep)
            return
        found: dict[str, Any] = restored.value
        restored.value = None  # the parts get copies of their own
        if writes:
            self._durable = restored
        else:
            restored.close(save=False)
        self.found, self.account = found, Account(**found["account"])
        self.account.resumed += 1
        self._steps = self.durable_steps = self.account.steps

    def ask(self) -> None:
        """At the next occasion, whether it is time or not."""
        self._is_asked = self.is_dirty = True

    def is_due(self) -> bool:
        """Whether to save now. Not while the last one is still being written: training does not wait for it."""
        if self.is_running() or not self.is_dirty:
            return False
        if self._durable is None:
            return self._is_asked
        if self._is_asked:
            return True
        if self._every is not None:
            return self.account.steps - self._steps >= self._every
        return self._clock.now_ns() - self._began_ns >= self._every_ns

    def is_running(self) -> bool:
        """Whether the last save is still being written. Raises if it failed: nothing is trained that cannot be kept."""
        if self._in_flight and self._durable is not None:
            self._durable.value  # noqa: B018 - this is where the error of a save in the background is raised
            if self._durable.last is not self._seen:
                self._note()
        return self._in_flight

    def write(self, state: dict[str, Any], *, wait: bool) -> None:
        """Save this. Without ``wait`` it is only copied now. Raises what went wrong, also with the one before."""
        began_ns = self._clock.now_ns()
        self.wait()
        self._steps, self._began_ns = self.account.steps, began_ns
        if self._durable is not None:
            self._durable.value = state
            self._in_flight = True
            self._durable.checkpoint(wait=wait, note=f"step {self._steps}")
        self.is_dirty = self._is_asked = False
        self.account.save_seconds += (self._clock.now_ns() - began_ns) / NS_PER_S
        if wait and self._durable is not None:
            self._note()

    def wait(self) -> None:
        """Until what was begun is durable. Raises why it is not."""
        if self._in_flight and self._durable is not None:
            self._durable.flush()
            self.is_running()

    def close(self) -> None:
        """Finish what was begun. Raises what went wrong with it."""
        if self._durable is not None:
            self._durable.close(save=False)

    def _note(self) -> None:
        report = None if self._durable is None else self._durable.last
        assert report is not None
        self._in_flight, self._seen, self.durable_steps = False, report, self._steps
        self.account.saves += 1
        self.account.bytes_saved += report.written_bytes
