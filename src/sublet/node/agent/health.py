"""Checks with each heartbeat whether every card is well, and which foreign processes use it.

What a look means is pure (``fault_in``). The looking itself (``CardWatch``) asks the driver from a thread of its own,
since a driver that is in trouble may block its caller for ever, and an office must not block with it. One question at
a time: while one is unanswered, nothing more is asked, and after a while that is the fault of every card.

A fault is reported for as long as it lasts, so an operator who clears a card that is still broken is told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from operator import is_
from typing import Final, Protocol

from sublet.background import Guard, end_process, start_task, start_thread
from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.foreign import ForeignNews, Own, foreign_use, merged
from sublet.node.agent.inventory import card_of
from sublet.node.agent.nvml import CARD_BROKEN, UNKNOWN, CardReading, Nvml, NvmlFailed, sees_all_processes, who_is
from sublet.node.agent.port import ReportSink
from sublet.values import NS_PER_S, LeaseId, NodeId, ResourceId
from sublet.wire.cards import UNSEEN, CardUse
from sublet.wire.orders import Device, Fault, Foreign, Inventory, Parkable, Report

LOOK_EVERY_NS: Final = 5 * NS_PER_S
AGAIN_NS: Final = NS_PER_S
"""After a look that found others on a card anew: memory of a process that has just ended (`nvidia-smi`, `sublet doctor
--gpu`) is in use for a moment longer, and no request is to wait long for that."""
SOON_NS: Final = NS_PER_S // 10
AT_ONCE_NS: Final = NS_PER_S // 100
"""Between two looks at whether the driver has answered a question for which a lease waits."""
HELD_NS: Final = NS_PER_S * 9 // 10
"""What guests need to be parked is passed on as the supervisor knows it if the driver takes longer than this to answer:
with the supervisor's next report, a second after its first."""
FIRST_S: Final = 2.0
"""An office that starts waits so long at most until it has seen its cards, and until what its own rehearsal had there
is gone. A driver that is slower, and a stranger that cannot be named, keep no office from starting."""
PATIENCE_NS: Final = 30 * NS_PER_S
"""A driver that takes longer to answer is broken."""
SILENT_LOOKS: Final = 3
"""A driver may be reloaded under us; so many looks in a row without an answer are a fault."""

CONTAINED: Final = 94
"""A memory error that was contained: what had the memory is dead, and the card goes on until it is next reset."""
_XID_TEXTS: Final[Mapping[int, str]] = {
    48: "an uncorrectable memory error",
    62: "its controller stopped",
    64: "broken memory that could not be taken out of use",
    74: "an error of its link to other cards",
    79: "it fell off its bus",
    95: "an uncorrectable memory error that was not contained",
    110: "a security fault",
    119: "its controller does not answer",
    120: "its controller failed",
    121: "an error of its link to the processor",
    140: "an uncorrectable memory error",
    143: "its memory could not be made ready",
}
"""Those that say that the hardware failed. Every other one is a program's own doing (13, 31, 43, 45, 109 and more:
any tenant can bring them about), tells of what was contained (63, 94), or is not known here: what is then wrong with
the card the next look shows by itself."""


def fault_of_xid(xid: int) -> str:
    """What an error that the driver reported says of the card; empty if nothing."""
    text = _XID_TEXTS.get(xid)
    return f"the driver reported {text} (Xid {xid})" if text else ""


def fault_in(reading: CardReading, before: CardReading | None = None) -> str:
    """What is wrong with the card, in words; empty if nothing is. ``before``: the look before this one.

    A count of memory errors only tells something by rising: what it was when the watch began was there before us. If
    the driver says in the same look, or in the one before, that the error was contained, the card is well.
    """
    if reading.failed is not None:
        return reading.failed.message
    for xid in reading.xids:
        if fault_of_xid(xid):
            return fault_of_xid(xid)
    if reading.split:
        return "it was split into parts (MIG), which are lent after `sublet down` and `sublet up`"
    if reading.worn_out:
        return "its memory is broken, and there is nothing left to replace it"
    known = None if before is None else before.uncorrected
    is_contained = CONTAINED in reading.xids or (before is not None and CONTAINED in before.xids)
    if known is not None and reading.uncorrected is not None and reading.uncorrected > known and not is_contained:
        return f"{reading.uncorrected - known} memory errors could not be corrected"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What came of the last look at one device."""

    resource: ResourceId
    reading: CardReading
    foreign: Foreign
    fault: str = ""


class CardWatch:
    """Watches the cards of an inventory. Without one it does nothing, and costs nothing."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        own: Callable[[ResourceId], Own],
        open_driver: Callable[[], Nvml] = Nvml.open,
        name_of: Callable[[int], tuple[str, str]] | None = None,
        allowed: Callable[[], bool] = lambda: False,
        sees_processes: bool | None = None,
    ) -> None:
        """``own`` tells what is ours on a device. It is asked after the look, from the caller's thread. ``allowed``:
        whether the operator lends a card for oneself also where others compute."""
        self.node: NodeId = inventory.node
        self.health: dict[ResourceId, Health] = {}
        self._cards: dict[str, Device] = {card_of(d): d for d in inventory.devices if card_of(d)}
        self._own = own
        self._open = open_driver
        self._name_of = who_is if name_of is None else name_of
        self._allowed = allowed
        self.sees_processes = sees_all_processes() if sees_processes is None else sees_processes
        self._nvml: Nvml | None = None
        self._silent: dict[str, int] = {}
        self._elsewhere: dict[ResourceId, Foreign] = {}
        self._news = ForeignNews()
        self._thread: threading.Thread | None = None
        self._query_ns = 0
        self._own_then: dict[ResourceId, Own] = {}
        """What was ours when the question went out."""
        self._answer: list[CardReading] = []
        self._every_ns = LOOK_EVERY_NS
        self._is_wanted = False
        self.seen_ns = -1
        """When the driver was asked for what was judged last."""
        self.is_for_a_lease = False
        """Whether the look that is under way, or the last one, was asked for by ``request_reading``."""
        self._hurries_until_ns = 0
        self.has_seen = False
        """Whether a look has shown who is on the cards, and none of it was memory of a process that has just ended."""

    def tick(self, now_ns: int) -> tuple[list[Fault | Foreign], int | None]:
        """What there is to report, and when to come again (None: never). Waits for nothing."""
        if not self._cards:
            return [], None
        reports: list[Fault | Foreign] = []
        waited_ns = now_ns - self._query_ns
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self.seen_ns = None, self._query_ns
            reports = self.judge(self._answer, now_ns)
        elif self._thread is not None and waited_ns >= PATIENCE_NS:
            reason = f"the driver has not answered for {waited_ns // NS_PER_S} s"
            reports = [self._fault(device.id, reason) for device in self._cards.values()]
        soon_ns = AT_ONCE_NS if self._is_wanted or self.is_for_a_lease else SOON_NS
        if self._thread is None and (self._query_ns == 0 or self._is_wanted or waited_ns >= self._every_ns):
            self._ask(now_ns)
            waited_ns = 0
        if self._thread is None:
            return reports, self._query_ns + self._every_ns
        return reports, now_ns + min(LOOK_EVERY_NS, max(soon_ns, waited_ns))  # soon, and later if it takes long

    def request_reading(self) -> None:
        """With the next ``tick`` that can: a look that is under way began too early."""
        self._is_wanted = True

    def read_cards(self) -> list[CardReading]:
        """Ask the driver of every card, and wait for the answers. Never raises for what a driver does."""
        try:
            if self._nvml is None:
                self._nvml = self._open()
                self._nvml.watch(tuple({device.machine_id or uuid: None for uuid, device in self._cards.items()}))
            readings = [self._nvml.read(uuid) for uuid in self._cards]
            xids: dict[str, tuple[int, ...]] = {}
            for uuid, xid in self._nvml.xids():  # after the counts: what explains a rise is then there as well
                xids[uuid] = (*xids.get(uuid, ()), xid)
            readings = [
                replace(reading, xids=xids.get(device.machine_id or reading.uuid, ()))
                for reading, device in zip(readings, self._cards.values(), strict=True)
            ]
        except NvmlFailed as failed:
            return [CardReading(uuid=uuid, failed=failed) for uuid in self._cards]
        if all(reading.failed is not None for reading in readings):
            self.close()  # the driver may have been loaded anew, and the connection be one to the old one
        return readings

    def judge(self, readings: Iterable[CardReading], now_ns: int) -> list[Fault | Foreign]:
        """What follows from a look."""
        reports: list[Fault | Foreign] = []
        blocked = self._blocked()
        for reading in readings:
            device = self._cards[reading.uuid]
            before = self.health.get(device.id)
            fault = fault_in(reading, None if before is None else before.reading)
            if reading.failed is not None:
                self._silent[reading.uuid] = self._silent.get(reading.uuid, 0) + 1
                if reading.failed.code not in CARD_BROKEN and self._silent[reading.uuid] < SILENT_LOOKS:
                    continue
                # What others have of a card that does not answer is not known to have changed.
                foreign = before.foreign if before is not None else Foreign(node=self.node, resource=device.id)
            else:
                self._silent.pop(reading.uuid, None)
                foreign = self._foreign(reading, device)
            self.health[device.id] = Health(resource=device.id, reading=reading, foreign=foreign, fault=fault)
            if fault:
                reports.append(self._fault(device.id, fault))
        self._every_ns = min(AGAIN_NS, LOOK_EVERY_NS) if self._blocked() - blocked else LOOK_EVERY_NS
        if not self.has_seen:
            self._hurries_until_ns = self._hurries_until_ns or now_ns + round(FIRST_S * NS_PER_S)
            self.has_seen = not self._blocked(by_unnamed=True) or now_ns >= self._hurries_until_ns
            self._every_ns = self._every_ns if self.has_seen else SOON_NS
        return [*reports, *self._news.of(self._others(), now_ns)]

    def _blocked(self, *, by_unnamed: bool = False) -> set[ResourceId]:
        """``by_unnamed``: only by memory of which no process can be named."""
        return {
            resource
            for resource, health in self.health.items()
            if health.foreign.blocks and not (by_unnamed and self.sees_processes and health.reading.processes)
        }

    def on_report(self, report: Foreign, now_ns: int) -> list[Foreign]:
        """The supervisor says whether another office lends the device (of whatever kind it is). What follows from it,
        together with what was seen of processes, is for the ledger; one report of a device replaces the other there.
        """
        self._elsewhere[report.resource] = report
        return self._news.of(self._others(), now_ns)

    def close(self) -> None:
        """Let go of the driver; of one that still owes an answer, when this process ends."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            nvml.close()

    def _ask(self, now_ns: int) -> None:
        self._query_ns = now_ns
        self.is_for_a_lease, self._is_wanted = self._is_wanted, False
        self._own_then = {device.id: self._own(device.id) for device in self._cards.values()}
        broken = NvmlFailed(UNKNOWN, "the question itself failed")
        self._answer = [CardReading(uuid=uuid, failed=broken) for uuid in self._cards]  # unless something better comes

        def ask() -> None:
            self._answer = self.read_cards()

        self._thread = start_thread("card_look", ask, called="cards")

    def _foreign(self, reading: CardReading, device: Device) -> Foreign:
        own, then = self._own(device.id), self._own_then.get(device.id, Own())
        # A lease that ended meanwhile had its memory when the driver counted, and its guests were on the card: one that
        # is free now is not full, and they are no strangers.
        own = replace(own, pids=own.pids | then.pids, leased=max(own.leased, then.leased))
        return foreign_use(
            reading,
            own,
            node=self.node,
            resource=device.id,
            capacity=device.capacity,
            name_of=self._name_of,
            sees_processes=self.sees_processes,
            allowed=self._allowed(),
        )

    def _others(self) -> list[Foreign]:
        found = {resource: health.foreign for resource, health in self.health.items()}
        for resource, foreign in self._elsewhere.items():
            found[resource] = merged(foreign, found[resource]) if resource in found else foreign
        return list(found.values())

    def _fault(self, resource: ResourceId, detail: str) -> Fault:
        return Fault(node=self.node, resource=resource, detail=detail)


# ---------------------------------------------------------------------------------------------------------------- cards
#
# Watches this machine's cards in an office: asks the supervisor which processes are guests, and reports faults.
#
# What the supervisor says of other offices goes through here too, since of one device the ledger keeps one report, and
# whose processes are on it and which office lends it are two things to say.


class AskProcesses(Protocol):
    """Asks the supervisor for every pid of ours."""

    def __call__(self, uses: tuple[CardUse, ...], *, let_go: bool) -> Awaitable[Iterable[int]]: ...


AT_MOST_S: Final = 60.0
"""How long it sleeps at most, whatever it was told."""


def has_cards(inventory: Inventory) -> bool:
    """Whether there is anything to watch."""
    return any(card_of(device) for device in inventory.devices)


@dataclass(slots=True)
class _HeldReport:
    """What guests need to be parked, until it is known what they have on cards now."""

    report: Parkable
    since_ns: int
    is_counted: bool = False
    """Whether a look has been handed on that began after the report came: the supervisor's next one is right."""


class Cards:
    """Inside the office's loop. Only where there are cards."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        processes: AskProcesses,
        leased: Callable[[ResourceId], int],
        report: ReportSink,
        now_ns: Callable[[], int],
        open_driver: Callable[[], Nvml] = Nvml.open,
        sees_processes: bool | None = None,
        allowed: Callable[[], bool] = lambda: False,
        lets_go: Callable[[], bool] = lambda: False,
        die: Callable[[str], object] = end_process,
    ) -> None:
        """``processes`` asks for every pid of ours, and hands on what each has of a card; ``leased`` asks for the bytes
        under leases here, teardown included; ``allowed``, whether others on a card keep no lease from it; ``lets_go``,
        whether an operator may want to reset a card, whose driver is then closed between two looks. ``die`` ends the
        process with a line."""
        self._processes = processes
        self._lets_go = lets_go
        self._leased = leased
        self._report = report
        self._now_ns = now_ns
        self._die = die
        self._guard = Guard("cards")
        self._ours: frozenset[int] = frozenset()
        self._before: frozenset[int] = frozenset()
        self._reported: tuple[CardReading, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._seen = asyncio.Event()
        self._wake = asyncio.Event()
        self._held: dict[LeaseId, _HeldReport] = {}
        self.watch = CardWatch(
            inventory, own=self._own, open_driver=open_driver, sees_processes=sees_processes, allowed=allowed
        )

    def start(self) -> None:
        """Look from now on, every few seconds."""

        def failed(error: BaseException) -> None:
            self._die(f"the office stopped: the watch over its cards ended ({type(error).__name__}: {error})")

        self._task = start_task("cards", self._run, failed=failed)

    async def seen(self) -> None:
        """Once it is known who is on the cards, for an office that has not lent any yet."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._seen.wait(), FIRST_S)

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.watch.close()

    def on_report(self, report: Report) -> None:
        """What the supervisor says, on its way to the ledger."""
        if isinstance(report, Parkable) and self._waits(report):
            return
        if not isinstance(report, Foreign):
            self._report(report)
            return
        for one in self.watch.on_report(report, self._now_ns()):
            self._report(one)

    async def turn(self) -> float | None:
        """One look, as far as it has come; how many seconds until the next, or None for never."""
        await self._learn()
        now_ns = self._now_ns()
        reports, wake_ns = self.watch.tick(now_ns)
        if uses := self._uses():  # at once: by this it is decided what parking a guest takes
            self._counted()
            await self._learn(uses)
        else:
            self._pass_on()
        if self._lets_go():
            self.watch.close()
        for report in reports:
            self._report(report)
        if self.watch.has_seen:
            self._seen.set()
        return None if wake_ns is None else max(0, wake_ns - now_ns) / NS_PER_S

    async def _run(self) -> None:
        """One look after another. A look that fails tells nothing, and is followed by the next."""
        pause_s: float | None = 0.0
        while pause_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(pause_s, AT_MOST_S))
            self._wake.clear()
            try:
                pause_s = await self.turn()
            except Exception as error:  # noqa: BLE001 - an unwatched card would be lent while others use it
                pause_s = self._guard.failed(error, "the cards are looked at again")
            else:
                self._guard.passed()

    def _waits(self, report: Parkable) -> bool:
        """Whether it is held back until the driver was asked what guests have: the supervisor knows what that was some
        seconds ago, and of what they have taken since nothing would be set aside. It reports again when it is told."""
        now_ns = self._now_ns()
        self._held = {lease: one for lease, one in self._held.items() if now_ns - one.since_ns < 2 * HELD_NS}
        held = self._held.get(report.lease)
        if not report.amount or (held is not None and (held.is_counted or now_ns - held.since_ns >= HELD_NS)):
            self._held.pop(report.lease, None)
            return False
        self._held[report.lease] = _HeldReport(report, now_ns if held is None else held.since_ns)
        if held is None:
            self.watch.request_reading()
            self._wake.set()
        return True

    def _counted(self) -> None:
        for held in self._held.values():
            held.is_counted |= self.watch.seen_ns > held.since_ns

    def _pass_on(self) -> None:
        """Nothing of them is on a card, so what the supervisor knows is right."""
        for lease, held in tuple(self._held.items()):
            if self.watch.seen_ns > held.since_ns and not held.is_counted:
                del self._held[lease]
                self._report(held.report)

    async def _learn(self, uses: tuple[CardUse, ...] = ()) -> None:
        """Processes of our guests, also those of the last time: a guest may have ended since the driver was asked."""
        with contextlib.suppress(SubletError):  # the supervisor is being started anew
            found = frozenset(await self._processes(uses, let_go=self._lets_go()))
            self._before, self._ours = self._ours, found

    def _uses(self) -> tuple[CardUse, ...]:
        """What the last look showed of whom, each look once; where pids say nothing to us, of each card as a whole."""
        readings = tuple(health.reading for health in self.watch.health.values())
        previous, self._reported = self._reported, readings
        if len(previous) == len(readings) and all(map(is_, previous, readings)):
            return ()
        if self.watch.sees_processes:
            return tuple(
                CardUse(card=reading.uuid, pid=process.pid, bytes=process.bytes)
                for reading in readings
                for process in reading.processes
                if process.bytes is not None
            )
        return tuple(CardUse(card=reading.uuid, pid=UNSEEN, bytes=reading.used) for reading in readings if reading.used)

    def _own(self, resource: ResourceId) -> Own:
        return Own(pids=self._ours | self._before, leased=self._leased(resource))
