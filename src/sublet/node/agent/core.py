"""Decides what an office's agent does with the supervisor of its machine, without I/O.

It says which orders are sent and in which messages, when reports are passed on, which holders are admitted, and what
follows when a supervisor has joined, was lost or does not start. The runner (``supervised``, or a simulated office) has
the connection and the clock: it tells what happened, and does what is returned. The rules of leases are kept over there
(``lease.node`` in the supervisor's process), since they must hold when the office is down.

A supervisor that has ended is replaced. The new one is sent no order until the office has seen the node come up anew
and has sent its grants again: an older order beside them would be one too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from typing import Final

from sublet.errors import Disconnected, OfficeElsewhere, SubletError, Unauthorized
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.port import ReportSink
from sublet.values import NS_PER_S, TenantId
from sublet.wire.guests import Configured, Front, Orders
from sublet.wire.orders import End, Order, RemoveVolume, Report, Verify

AGAIN_S: Final = (0.05, 0.2, 1.0, 5.0)
"""Pauses before another supervisor is started, if one ends or will not start."""
ORDERS_MAX: Final = 256
"""In one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSupervisor:
    """What follows once a supervisor has said who it is. When it is done, ``grants_sent`` is called with this."""

    is_successor: bool
    """Another one was there before: the office is told that the node came up, and sends all grants that live."""
    revoke: Mapping[TenantId, int]
    """Connections of these tenants under older rights are to be cut: an office may have ended before it did that."""


class LinkLoss(Enum):
    """What follows when the connection is over."""

    WHILE_JOINING = "while joining"
    """The attempt to join has failed, or the office ends."""
    REPLACED = "replaced"
    """Another office took over. It is not joined again: the two would replace each other without end."""
    JOIN_AGAIN = "join again"
    """Without a supervisor nothing would ever be granted again, whatever it hung up for."""


class AgentCore:
    """One office's agent, and what it knows of its supervisor."""

    def __init__(self, *, report: ReportSink, incarnation: Callable[[], int]) -> None:
        self.is_joined = False
        """Whether a supervisor has said who it is, and is still there."""
        self.is_informed = False
        """Whether that supervisor knows which leases live: all grants have been sent to it."""
        self._sink = report
        self._incarnation = incarnation
        self._out: OrderedDict[Hashable, Order] = OrderedDict()
        """Orders to send. A later order with the same key replaces an earlier one: the office repeats what is not
        confirmed, and a supervisor that stands still for an hour must not fill the memory."""
        self._early: list[Report] | None = []
        """What was reported before the office could listen."""
        self._joined: JoinedSupervisor | None = None
        """The present supervisor, until the connection is over."""
        self._had_one = False
        self._has_grants = False
        """Whether the grants that live were handed in for this supervisor."""
        self._is_telling = False
        """Whether the turn in which they were is over: what a holder asks must not come before the last of them."""
        self._tries = 0
        """Attempts to join that have failed in a row."""
        self._revoked: dict[TenantId, int] = {}
        """How often the rights of a tenant have changed."""
        self._closed = False
        self.watchdog = Watchdog()

    # ---- orders and reports ----

    def send(self, order: Order) -> None:
        """With the next messages, unless another order takes its place before."""
        parts = order.parts if isinstance(order, End | Verify | RemoveVolume) else ()
        self._out[type(order), order.lease, order.epoch, parts] = order

    def turn_over(self) -> None:
        """The office has ordered what it had to: that may go out, if there is a supervisor."""
        if not self.is_joined:
            self._out.clear()  # a new supervisor receives everything that is live
        elif self._has_grants:
            self._is_telling = True

    def next_message(self) -> Orders | None:
        """The next orders to send, as many as one message takes. To be asked for when the connection takes more."""
        if not self.is_joined:
            return None
        batch = tuple(self._out.popitem(last=False)[1] for _ in range(min(len(self._out), ORDERS_MAX)))
        if self._is_telling and not self._out:
            self.is_informed = True
        return Orders(orders=batch, incarnation=self._incarnation()) if batch else None

    def on_reports(self, reports: Iterable[Report]) -> None:
        """The supervisor reports; the office hears of it as soon as it listens."""
        for report in reports:
            (self._sink if self._early is None else self._early.append)(report)

    def listen(self) -> None:
        """The office knows the machine by now, and hears what is reported."""
        early, self._early = self._early, None
        for report in early or ():
            self._sink(report)

    # ---- the connection ----

    def joining(self) -> None:
        """A supervisor is looked for, and will be asked who it is."""
        self.dropped()

    def configured(
        self, configured: Configured, generations: Callable[[], Mapping[TenantId, int]] = dict
    ) -> JoinedSupervisor:
        """It has said who it is. ``generations``: of the rights of tenants, where they ever changed."""
        had_one, self._had_one = self._had_one, True
        self.is_joined, self._tries = True, 0
        self._joined = JoinedSupervisor(is_successor=had_one, revoke={} if configured.is_new else generations())
        return self._joined

    def grants_sent(self, joined: JoinedSupervisor) -> bool:
        """The office has handed in the grants that live, if ``joined`` is a successor. Whether it is still there: else
        another is being joined, and will get them."""
        if joined is not self._joined:
            return False
        self._has_grants = True
        return True

    def dropped(self) -> None:
        """There is no connection any more: it was given up here."""
        self.is_joined = self.is_informed = self._has_grants = self._is_telling = False
        self._joined = None
        self.watchdog.disconnected()

    def lost(self, error: SubletError | None) -> LinkLoss:
        """The connection is over: the supervisor ended, or hung up with this error."""
        was_joined = self.is_joined
        self.dropped()
        if self._closed or not was_joined:
            return LinkLoss.WHILE_JOINING
        return LinkLoss.REPLACED if isinstance(error, Unauthorized) else LinkLoss.JOIN_AGAIN

    def pause_s(self, error: BaseException | None = None) -> float | None:
        """How long to wait before the next attempt to join, after this error of the last one; None: there is none, and
        the office ends with the error. An office that starts soon says why it cannot; one that runs goes on trying."""
        if not self._had_one:
            is_ending = isinstance(error, Disconnected | OSError) and not isinstance(error, OfficeElsewhere)
            may = is_ending and self._tries < len(AGAIN_S) - 1  # one that was just about to end; one elsewhere will not
        else:
            may = error is None or isinstance(error, SubletError | OSError | MemoryError)
        if not may:
            return None
        pause_s = AGAIN_S[min(self._tries, len(AGAIN_S) - 1)]
        self._tries += 1
        return pause_s

    def close(self) -> None:
        """The office ends."""
        self._closed = True

    # ---- holders ----

    def cut_off(self, tenant: TenantId) -> None:
        """The rights of a tenant have changed: no connection that was checked before is admitted."""
        self._revoked[tenant] = self._revoked.get(tenant, 0) + 1

    def rights(self, front: Front) -> tuple[int, int]:
        """How often the rights by which it comes have changed."""
        return self._revoked.get(front.tenant, 0), self._revoked.get(TenantId(front.actor), 0)

    def check_admission(self, front: Front, rights: tuple[int, int]) -> None:
        """Raises unless the supervisor would know the holder's lease, and its rights are still those of ``rights``."""
        if not self.is_informed:  # it may have been replaced while this holder waited
            raise away()
        if self.rights(front) != rights:
            raise Unauthorized("the rights of this tenant have just changed", do="Connect anew.")


def away() -> Disconnected:
    """What is answered while there is no supervisor."""
    return Disconnected("the supervisor of this machine is being started", do="Try again in a moment.")


# ---- Whether the supervisor's loop still runs: it is asked a question every second, and has some time to answer.
# Only its clock ends guests, so a supervisor that stands still (stopped, or waiting for a disk that does not answer)
# enforces no deadline. It is not ended for that, since its end is the end of all guests: the operator is told.

EVERY_NS: Final = 1 * NS_PER_S
SILENT_NS: Final = 10 * NS_PER_S
"""A question that was not answered for so long was met by a supervisor that stands still."""


class Watchdog:
    """The questions to one supervisor."""

    def __init__(self) -> None:
        self._pinged_ns: int | None = None
        """When the question was asked that was not answered yet."""
        self._answered_ns: int | None = None
        """When the last one was answered, or the first look was taken."""
        self._looked_ns: int | None = None

    def is_ping_due(self, now_ns: int) -> bool:
        """Whether a question is to be asked now. To be called every second or so, while there is a supervisor."""
        paused = self._looked_ns is not None and now_ns - self._looked_ns > SILENT_NS // 2
        self._looked_ns = now_ns
        if self._pinged_ns is not None:
            if paused:  # the office, or the machine, stood still itself: from now on it counts
                self._pinged_ns = now_ns
            return False
        if self._answered_ns is None:
            self._answered_ns = now_ns
        if now_ns - self._answered_ns < EVERY_NS:
            return False
        self._pinged_ns = now_ns
        return True

    def answered(self, now_ns: int) -> None:
        """Its loop runs."""
        self._pinged_ns, self._answered_ns = None, now_ns

    def disconnected(self) -> None:
        """There is no supervisor any more, or another one."""
        self._pinged_ns = self._answered_ns = self._looked_ns = None

    def silent_ns(self, now_ns: int) -> int:
        """For how long it has not answered; 0 while that is no reason to speak of it."""
        if self._pinged_ns is None or now_ns - self._pinged_ns < SILENT_NS:
            return 0
        return now_ns - self._pinged_ns
