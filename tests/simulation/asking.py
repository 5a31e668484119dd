"""How a client program in the pretended world asks: with patience, under one request id, and from the first send on.

An answer counts from when the request was sent first, although a repetition may be what was answered: that is the safe
side. An answer that comes when the job it was for is over is not taken for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sublet.office.ledger import commands as cmd
from tests.simulation.job import Job
from tests.simulation.process import MachineClock, Process

if TYPE_CHECKING:
    from tests.simulation.replies import Reply
    from tests.simulation.world import World

_S: Final = 1_000_000_000
RESEND_NS: Final = 2 * _S
PATIENCE: Final = 20
"""Repetitions of an unanswered request before the program gives up on it."""


@dataclass(slots=True)
class _Asked:
    then: Callable[[Reply], None]
    command: cmd.Command | None
    job: Job | None
    sent_ns: int
    times: int = 0


class AskingProcess(Process):
    """The requests of one program."""

    def __init__(self, world: World, name: str, clock: MachineClock) -> None:
        super().__init__(world, name, clock)
        self.job: Job | None = None
        self.last_sent_ns = 0
        """When the request was sent that is being answered now."""
        self.forget_requests()

    def forget_requests(self) -> None:
        """A new program begins."""
        self._tokens = 0
        self._open: dict[int, _Asked] = {}

    def done(self) -> None:
        """The job is over, one way or another."""
        raise NotImplementedError

    def ask(self, command: cmd.Command, then: Callable[[Reply], None]) -> None:
        """Send it, and again until it is answered."""
        self.post(self.open_request(then, command), command)

    def open_request(self, then: Callable[[Reply], None], command: cmd.Command | None) -> int:
        """The token under which an answer will be known."""
        self._tokens += 1
        self._open[self._tokens] = _Asked(then, command, self.job, self.clock.now_ns())
        return self._tokens

    def drop_request(self, token: int) -> bool:
        """Wait for it no more; False if it was answered."""
        return self._open.pop(token, None) is not None

    def post(self, token: int, command: cmd.Command) -> None:
        """Send it once. Renewals are repeated by their own rules."""
        office = self.world.office_of(self)
        lease = getattr(command, "lease", None)
        self.world.net.send(self, office, office.request, self, self.boot, token, command, lease=lease)
        if not isinstance(command, cmd.Renew):
            self.after(RESEND_NS, self._repeat, token)

    def _repeat(self, token: int) -> None:
        """The answer is late: send the same request again, up to ``PATIENCE`` times."""
        asked = self._open.get(token)
        if asked is None or asked.command is None:
            return
        current = asked.job is self.job
        if not current and not isinstance(asked.command, cmd.Release):
            del self._open[token]
        elif asked.times >= PATIENCE:
            del self._open[token]
            self.world.coverage.seen["gave up asking"] += 1
            if current and not isinstance(asked.command, cmd.Attach):
                self.done()
        else:
            asked.times += 1
            self.post(token, asked.command)

    def answered(self, token: int, reply: Reply) -> None:
        """An answer arrives; the second copy finds no open request."""
        asked = self._open.get(token)
        if asked is None or (reply.kind == "unknown" and not isinstance(asked.command, cmd.Renew)):
            return  # "unknown" is not an answer; the request is repeated
        del self._open[token]
        self.last_sent_ns = asked.sent_ns
        if asked.job is self.job:
            asked.then(reply)
