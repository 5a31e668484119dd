"""Updates the office's metrics from the ledger's events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from sublet.lease.states import LeaseStatus, SliceState
from sublet.metrics import OfficeMetrics, Readings
from sublet.office.driver import Driver
from sublet.office.ledger import events as ev
from sublet.office.ledger.budgets import standing_now
from sublet.office.ledger.estimate import estimate_ns
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, BudgetLevel, Kind, LeaseId, Way
from sublet.wire.http import EstimatesView, TroubleView

ESTIMATES_KEPT: Final = 1_000
"""Granted requests whose estimates are compared with what came."""


class Counting:
    """A listener of the driver. Device time is an integral of one level, so reading it costs the same at any time."""

    def __init__(self, driver: Driver) -> None:
        self.metrics = OfficeMetrics(self._read)
        self.streams = 0
        self.troubles: tuple[TroubleView, ...] = ()
        self.supervisor_silent_s = 0.0
        self.disk_short = False
        """As they were last looked up."""
        self._driver = driver
        self._millis: dict[LeaseId, int] = {}
        self._level = 0
        self._integral = 0
        self._since_ns = driver.clock.now_ns()
        self._teardown_from_ns: dict[LeaseId, int] = {}
        self._estimated_ns: dict[LeaseId, int] = {}
        """Of requests that wait: how long they were expected to, when they came."""
        self._late_ns: deque[int] = deque(maxlen=ESTIMATES_KEPT)
        """By how much the wait was longer than expected; below zero where it was shorter."""
        for lease in driver.ledger.state.leases.values():
            if lease.status in (LeaseStatus.GRANTED, LeaseStatus.ACTIVE, LeaseStatus.NOTICED):
                self._hold(lease, self._since_ns)
        self._of: dict[type, Callable[[Any, Now], None]] = {
            ev.Queued: self._queued,
            ev.Renewed: self._renewed,
            ev.Granted: self._granted,
            ev.Ungranted: self._ungranted,
            ev.Ending: self._ending,
            ev.Ended: self._ended,
            ev.Noticed: self._noticed,
            ev.Quarantined: self._quarantined,
            ev.ResourceFaulted: self._quarantined,
            ev.Metered: self._metered,
            ev.Parked: lambda event, now: self.metrics.parkings.inc("parked"),
            ev.BudgetReached: self._budget_reached,
            ev.Resumed: lambda event, now: self.metrics.parkings.inc("resumed"),
        }
        driver.listen(self.note)
        driver.time_commits(self._committed)

    def note(self, now: Now, events: Sequence[ev.Event]) -> None:
        """One batch of facts."""
        for event in events:
            count = self._of.get(type(event))
            if count is not None:
                count(event, now)

    def estimates(self) -> EstimatesView | None:
        """How good the estimates were."""
        if not self._late_ns:
            return None
        errors, count = sorted(map(abs, self._late_ns)), len(self._late_ns)
        return EstimatesView(
            requests=count,
            median_error=round(errors[(count - 1) // 2] / NS_PER_S, 3),
            p90_error=round(errors[-(-9 * count // 10) - 1] / NS_PER_S, 3),
            early=round(sum(late_ns < 0 for late_ns in self._late_ns) / count, 3),
        )

    def _queued(self, event: ev.Queued, now: Now) -> None:
        ledger = self._driver.ledger
        lease = ledger.state.leases.get(event.lease.id)
        if lease is not None and lease.status is LeaseStatus.QUEUED:
            expected_ns = estimate_ns(lease, ledger.state, now, ledger.policy)
            if expected_ns is not None:
                self._estimated_ns[lease.id] = expected_ns

    def _renewed(self, event: ev.Renewed, now: Now) -> None:
        self.metrics.renewals.inc()

    def _granted(self, event: ev.Granted, now: Now) -> None:
        lease = self._driver.ledger.state.leases.get(event.lease)
        if lease is not None:
            self.metrics.grants.inc(_kind(lease), lease.tier.value)
            waited_ns = now.ns - lease.asked_at_ns
            self.metrics.wait_seconds.observe(waited_ns / NS_PER_S)
            expected_ns = self._estimated_ns.pop(lease.id, None)
            if expected_ns is not None:
                self._late_ns.append(waited_ns - expected_ns)
                self.metrics.estimate_error.observe(abs(waited_ns - expected_ns) / NS_PER_S)
            self._hold(lease, now.ns)

    def _ungranted(self, event: ev.Ungranted, now: Now) -> None:
        self._stop_counting(event.lease, now.ns)

    def _ending(self, event: ev.Ending, now: Now) -> None:
        self._stop_counting(event.lease, now.ns)
        self._teardown_from_ns[event.lease] = now.ns

    def _ended(self, event: ev.Ended, now: Now) -> None:
        self._estimated_ns.pop(event.lease, None)
        began_ns = self._teardown_from_ns.pop(event.lease, None)
        if began_ns is not None:
            self.metrics.teardown_seconds.observe((now.ns - began_ns) / NS_PER_S)
        lease = self._driver.ledger.state.leases.get(event.lease)
        if event.end.way is Way.NOT_SAVED:
            way = event.end.reported_way(None if lease is None else lease.saved_wall_ns)
            self.metrics.parkings.inc("saved" if way is Way.SAVED else "not_saved")
        if lease is not None:
            self.metrics.ends.inc(_kind(lease), event.end.reason.value)

    def _noticed(self, event: ev.Noticed, now: Now) -> None:
        self.metrics.notices.inc(event.notice.reason.value)

    def _budget_reached(self, event: ev.BudgetReached, now: Now) -> None:
        if event.level is not BudgetLevel.OPEN:
            self.metrics.budgets_reached.inc(event.level.value)

    def _quarantined(self, event: ev.Quarantined | ev.ResourceFaulted, now: Now) -> None:
        self.metrics.quarantines.inc()

    def _metered(self, event: ev.Metered, now: Now) -> None:
        counts, metrics = event.counts, self.metrics
        metrics.launches.add(counts.launches)
        lease = self._driver.ledger.state.leases.get(event.lease)
        if lease is not None and not counts.is_whole and any(part.kind is Kind.GPU for part in lease.parts):
            metrics.uncounted.inc()
        metrics.fuel.add(counts.fuel)
        metrics.launch_errors.add(counts.failures)
        metrics.device_bytes.add(counts.bytes_in, "in")
        metrics.device_bytes.add(counts.bytes_out, "out")
        metrics.vram_byte_seconds.add(counts.vram_byte_seconds)
        for step, took_ns in event.steps.items():
            if step in metrics.teardown_steps:
                metrics.teardown_steps[step].observe(took_ns / NS_PER_S)

    def _hold(self, lease: LeaseRecord, now_ns: int) -> None:
        millis = sum(part.millis for part in lease.parts)
        if millis:
            self._millis[lease.id] = millis
            self._change(millis, now_ns)

    def _stop_counting(self, lease: LeaseId, now_ns: int) -> None:
        millis = self._millis.pop(lease, 0)
        if millis:
            self._change(-millis, now_ns)

    def _change(self, millis: int, now_ns: int) -> None:
        self._integral += self._level * (now_ns - self._since_ns)
        self._since_ns = now_ns
        self._level += millis

    def _committed(self, took_ns: int, events: int) -> None:
        self.metrics.commit_seconds.observe(took_ns / NS_PER_S)
        self.metrics.commit_events.observe(events)

    def _read(self) -> Readings:
        state = self._driver.ledger.state
        held = self._integral + self._level * (self._driver.clock.now_ns() - self._since_ns)
        live = dict.fromkeys((kind.value for kind in Kind), 0)
        for leases in state.on_node.values():
            for lease in leases:
                live[_kind(state.leases[lease])] += 1
        capacity: dict[str, int] = {}
        used: dict[str, int] = {}
        quarantined = lost = 0
        for resource in state.resources.values():
            kind = resource.device.kind.value
            is_lost = resource.state is SliceState.LOST
            lost += is_lost
            capacity[kind] = capacity.get(kind, 0) + (0 if is_lost else resource.device.capacity)
            used[kind] = used.get(kind, 0) + (0 if is_lost else resource.used)
            quarantined += resource.state is SliceState.QUARANTINED
            quarantined += sum(piece.state is SliceState.QUARANTINED for piece in resource.slices.values())
        clock = self._driver.clock
        now, budgets = Now(clock.now_ns(), clock.wall_ns()), dict.fromkeys((level.value for level in BudgetLevel), 0)
        for budget in state.books.budgets.values():
            budgets[standing_now(state, budget, now).level.value] += 1
        return Readings(
            queued=state.queued_count,
            live=live,
            quarantined=quarantined,
            lost=lost,
            streams=self.streams,
            commits=self._driver.commits,
            gpu_seconds=held / MILLIS_PER_DEVICE / NS_PER_S,
            capacity=capacity,
            used=used,
            troubles=self.troubles,
            supervisor_silent_s=self.supervisor_silent_s,
            disk_short=self.disk_short,
            budgets=budgets,
            estimates=self.estimates(),
        )


def _kind(lease: LeaseRecord) -> str:
    return lease.wants[0].kind.value
