"""One guest: a process tree under a lease, its output and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from sublet.lease.states import GuestEvent, GuestState, next_guest
from sublet.lease_end import EndReason
from sublet.node.processes.guest_connections import GuestConnections
from sublet.node.processes.limits import GroupUsage
from sublet.node.processes.logs import GuestLog
from sublet.node.processes.reaper import ProcessExit
from sublet.node.processes.stdio import Stdio
from sublet.node.processes.tree import Tree
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire.guests import GUESTS_PAGE, GuestNews, Guests, GuestSpec, GuestView, Profile

SHOWN_ARGUMENTS: Final = 64
SHOWN_CHARACTERS: Final = 256
"""Of a command line: very many guests must fit into one answer."""


def _shown(argv: tuple[str, ...]) -> tuple[str, ...]:
    """As much of it as people read."""
    shown, left = [], SHOWN_CHARACTERS
    for word in argv[:SHOWN_ARGUMENTS]:
        shown.append(word if len(word) <= left else f"{word[:left]}…")
        left -= len(word)
        if left < 0:
            break
    return tuple(shown)


class GuestProcess:
    """Its state follows the guest's table; it is ``GONE`` only when a look has shown that nothing of it runs."""

    def __init__(
        self,
        *,
        id: GuestId,  # noqa: A002 - what it is called everywhere
        lease: LeaseId,
        epoch: Epoch,
        tenant: TenantId,
        profile: Profile,
        spec: GuestSpec,
        tree: Tree,
        stdio: Stdio,
        log: GuestLog,
        wall_ns: int,
    ) -> None:
        self.id = id
        self.lease = lease
        self.epoch = epoch
        self.tenant = tenant
        self.profile = profile
        self.spec = spec
        self.tree = tree
        self.stdio = stdio
        self.log = log
        self.state = GuestState.STARTING
        self.exit_code = -1
        """Of its main process; -1 while that runs."""
        self.reason: EndReason | None = None
        """Why it was ended, if it did not end by itself."""
        self.processes = 1
        """At the last look."""
        self.started_wall_ns = wall_ns
        self.ended_wall_ns = 0
        self.number = 0
        """Its sequence number at its supervisor, in whose order guests are listed."""
        self.has_run = True
        """False once it is known that its command could not be run: then nothing of it is kept."""
        self.is_broken = False
        """Whether an internal error keeps the supervisor from looking after it."""
        self.kills = 0
        """How often its end was forced."""
        self.hides = False
        """Whether its group held a process that nothing else had shown."""
        self.memory_max = 0
        """Bytes that the guests of its lease may use together; 0: any."""
        self.is_warned_of_memory = False
        """Whether a line on its stderr has said that it had too little."""
        self.was_warned = False
        """Whether it was told that its lease runs out, even if the lease was renewed after that."""
        self.on_gone: Callable[[], object] = lambda: None
        """Told once nothing of it runs."""
        self.visits: GuestConnections | None = None
        """Connections of holders that it serves itself; None if it takes none."""
        self._used: GroupUsage | None = None
        self.listeners: list[Callable[[GuestNews], None]] = []
        self.volumes: dict[LeaseId, Epoch] = {}
        """Of other leases, where it may save, and under which epoch of each."""

    @property
    def is_gone(self) -> bool:
        return self.state is GuestState.GONE

    @property
    def main_runs(self) -> bool:
        """Whether its first process is still there: what it leaves behind runs on under the lease."""
        return self.exit_code < 0

    def now(self, event: GuestEvent) -> None:
        """Something happened to it, as the table knows."""
        self.state = next_guest(self.state, event, f"guest {self.id}")

    def ends(self, reason: EndReason) -> None:
        """It is being ended, for this reason unless there was another."""
        self.reason = self.reason or reason
        if self.state is not GuestState.ENDING and not self.is_gone:
            self.now(GuestEvent.END)

    def exited(self, how: ProcessExit) -> None:
        """Its main process ended, and so does what it served."""
        self.exit_code = how.code
        self._hang_up()
        self.tree.exited(how.cpu_ns, how.peak_bytes)
        if self.reason is None and self.tree.oom_kills():
            self.reason = EndReason.OUT_OF_MEMORY
        self.notify(GuestNews(guest=self.id, what="exited", exit_code=self.exit_code, reason=self.reason))

    def usage(self) -> GroupUsage:
        """What it used so far; once it is gone, in all."""
        return self.tree.usage() if self._used is None else self._used

    def count(self) -> None:
        """Nothing of it runs, and its group is still there: what it used, for good."""
        if self._used is None:
            self._used = self.tree.used()

    def release_live_state(self) -> None:
        """It is gone. It may stay listed for long, so what only a living one needs is let go."""
        self._hang_up()
        if len(self.spec.argv) > SHOWN_ARGUMENTS:
            self.spec = replace(self.spec, argv=self.spec.argv[:SHOWN_ARGUMENTS])
        self.on_gone()
        self.on_gone = lambda: None

    def _hang_up(self) -> None:
        if self.visits is not None:
            self.visits.end()

    def notify(self, news: GuestNews) -> None:
        """Tell every attached listener."""
        for listener in tuple(self.listeners):
            listener(news)

    def give_up(self) -> None:
        """It is gone, and its streams are not to be relied on: listeners are told that it is gone, and no more."""
        self.stdio.abandon()
        self.notify(self.last_news())

    def last_news(self) -> GuestNews:
        """What there is to say of it in the end."""
        return GuestNews(guest=self.id, what="gone", exit_code=self.exit_code, reason=self.reason)

    def view(self) -> GuestView:
        """As people see it."""
        used = self.usage()
        return GuestView(
            id=self.id,
            lease=self.lease,
            epoch=self.epoch,
            tenant=self.tenant,
            name=self.spec.name[:SHOWN_CHARACTERS],
            argv=_shown(self.spec.argv or (self.spec.entry,)),
            profile=self.profile,
            state=self.state.value if self.main_runs or self.is_gone else "left behind",
            pid=self.tree.root.pid,
            processes=0 if self.is_gone else self.processes,
            started_at=self.started_wall_ns,
            ended_at=self.ended_wall_ns,
            exit_code=self.exit_code,
            reason="" if self.reason is None else self.reason.value,
            cpu_ns=used.cpu_ns,
            peak_bytes=used.memory_peak_bytes,
            log_bytes=self.log.offset,
            log_dropped=self.log.dropped,
            number=self.number,
        )


def page_of(found: Iterable[GuestProcess], after: int) -> Guests:
    """The first of these that come after this number, as people see them."""
    shown: list[GuestProcess] = []
    for guest in found:
        if guest.number > after:
            if len(shown) == GUESTS_PAGE:
                return Guests(guests=tuple(one.view() for one in shown), more=shown[-1].number)
            shown.append(guest)
    return Guests(guests=tuple(one.view() for one in shown))
