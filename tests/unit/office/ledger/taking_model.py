"""The ledger's preemption a second time, without any cleverness: who is taken for whom, when, and for what reason.

Where ``model`` knows shares, quotas and budgets and no preemption, this knows whole GPUs of one node and what lets a
request have them: tiers, floors, ceilings, reservations, maximum holds, further turns, cool-down, patience. Nothing is
remembered but what was asked and what came of it, and every request is looked at whenever anything happens: the ledger,
which looks only when something may have changed, must come to the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet.office.ledger.policy import Policy
from sublet.values import MILLIS_PER_DEVICE, Tier
from tests.unit.office.ledger.model import area

__all__ = ["Asked", "TakingModel"]

RANKS = {Tier.SPOT: 1, Tier.BATCH: 2, Tier.INTERACTIVE: 3}


@dataclass
class Asked:
    """A request, and what became of it."""

    id: str
    tenant: str
    gpus: int
    tier: Tier
    ttl_ns: int
    asked_ns: int
    wait_until_ns: int | None
    arrival: int
    status: str = "queued"
    has: list[str] = field(default_factory=list)
    granted_ns: int = 0
    claim_by_ns: int = 0
    claimed_ns: int = 0
    deadline_ns: int = 0
    attained_ns: int = 0
    is_taken_up: bool = False
    """A request goes on with its work."""
    promise: list[str] = field(default_factory=list)
    promised: int = 0
    """Number of the promise: what comes free goes to the one that was promised something first."""
    victims: list[str] = field(default_factory=list)
    take_at_ns: int = 0
    """It has notice: of its end, for which reason, for which request or which reservation."""
    why: str = ""
    beneficiary: str = ""
    reservation: str = ""
    fate: str = ""
    """Why it was not renewed."""
    end: str = ""
    end_ns: int = 0

    @property
    def rank(self) -> int:
        return RANKS[self.tier]

    @property
    def is_live(self) -> bool:
        return self.status in ("active", "noticed")

    @property
    def due_ns(self) -> int | None:
        match self.status:
            case "queued":
                return self.wait_until_ns
            case "granted":
                return self.claim_by_ns
            case "active":
                return self.deadline_ns
            case "noticed":
                return min(self.take_at_ns, self.deadline_ns)
            case _:
                return None


@dataclass
class Group:
    weight: int = 1
    floor: int = 0
    ceiling: int | None = None


@dataclass
class Reserved:
    id: str
    group: str
    gpus: int
    start_ns: int
    """By the clock of leases."""
    end_ns: int
    chosen: list[str] = field(default_factory=list)
    state: str = "ahead"
    """Then chosen, begun, lent, over."""
    ready: int = 0
    """Devices that were free of others at the start."""


@dataclass
class Victim:
    lease: Asked
    standing: int
    why: str
    ran_ns: int
    by_floor: bool = False
    is_lent: bool = False


@dataclass
class TakingModel:
    policy: Policy
    gpus: list[str]
    groups: dict[str, Group]
    members: dict[str, str]
    """The group of each tenant."""
    now_ns: int = 0
    leases: list[Asked] = field(default_factory=list)
    reservations: list[Reserved] = field(default_factory=list)
    uses: list[tuple[str, int, int, int | None]] = field(default_factory=list)
    """Tenant, GPUs, since when, until when: all that was ever held."""
    cooling: dict[tuple[str, str], int] = field(default_factory=dict)
    """Whose lease was taken for whom, and until when that may not be turned round."""
    patient: Asked | None = None
    """For whom the node is kept."""
    looked_ns: int = 0
    """When the ledger has looked at all that wait. Time alone changes the order of the queue, which is of consequence
    only then."""
    promises: int = 0
    """How many were made."""
    order_ns: int | None = None
    """The moment of the order by which something is decided, if that is not now."""

    # ---- what is asked ----

    def acquire(self, lease: Asked, *, wait: bool) -> str:
        self.reserve()
        ceiling = self.groups[self.members[lease.tenant]].ceiling
        if ceiling is not None and lease.gpus > ceiling:
            return "refused quota"
        taken = [old for old in self.leases if self._goes_on_with(lease, old)]
        before = min(taken, key=lambda old: old.end_ns, default=None)
        if before is not None:
            lease.attained_ns = self._attained_with(before)
        within = not self._above_ceiling(lease)
        found = self._fit(lease) if within else None
        answer = "refused capacity" if within else "refused quota"
        if found is not None or wait:
            self.leases.append(lease)
            if before is not None:
                before.is_taken_up = True
            answer = "queued"
        if found is not None:
            self._grant(lease, found)
            self._activate(lease)
            answer = "granted"
        elif wait:
            self._look_for_the_newcomer(lease)
        self.settle(plans=False)
        return answer

    def claim(self, lease: Asked) -> str:
        self.reserve()
        if lease.status == "granted":
            self._activate(lease)
        self.settle(plans=False)
        return "granted" if lease.is_live else "error"

    def renew(self, lease: Asked) -> str:
        self.reserve()
        is_held_long = self.now_ns - lease.claimed_ns >= self.policy.max_hold_ns
        refused = not lease.is_live or (is_held_long and self._others_wait_for(lease))
        if not refused:
            lease.deadline_ns = max(lease.deadline_ns, self.now_ns + lease.ttl_ns)
            lease.fate = ""
        elif lease.is_live:
            lease.fate = "fair_share"
        self.settle(plans=False)
        return "error" if refused else "granted"

    def release(self, lease: Asked) -> str:
        self.reserve()
        self._end(lease, "released" if lease.is_live else "withdrawn")
        self.settle(plans=False)
        return "done"

    def tick(self) -> None:
        self.reserve()
        due = [lease for lease in self.leases if (lease.due_ns or self.now_ns + 1) <= self.now_ns]
        for lease in sorted(due, key=lambda lease: (lease.due_ns, lease.id)):
            if lease.status == "queued":
                self._end(lease, "refused")
            elif lease.status == "granted":
                self._end(lease, "holder_gone")
            else:
                is_taken = lease.status == "noticed" and lease.take_at_ns <= lease.deadline_ns
                self._end(lease, lease.why if is_taken else lease.fate or "expired")
        self.settle()

    def torn_down(self, lease: Asked) -> None:
        self.reserve()
        lease.status = "ended"
        self.settle()

    def set_group(self, name: str, group: Group) -> None:
        self.reserve()
        self.groups[name] = group
        self.settle(plans=False)

    def add(self, reservation: Reserved) -> None:
        self.reservations.append(reservation)
        self.settle(plans=False)

    def next_due_ns(self) -> int | None:
        """When time alone changes something, but for preemptions."""
        moments = [lease.due_ns for lease in self.leases if lease.due_ns is not None]
        waiting = sum(lease.status == "queued" for lease in self.leases)
        weights_differ = any(group.weight != 1 for group in self.groups.values())
        if (waiting and weights_differ) or (waiting > 1 and self.patient is not None):
            moments.append(self.looked_ns + self.policy.turn_least_ns)
        return min([*moments, *(self._steps_at(one) for one in self.reservations if one.state != "over")], default=None)

    # ---- what follows ----

    def settle(self, *, plans: bool = True) -> None:
        self.reserve()
        self.order_ns = self.looked_ns
        for lease in sorted((lease for lease in self.leases if lease.promise), key=lambda lease: lease.promised):
            self._keep(lease)
        self._admit()
        for lease in [lease for lease in self.leases if lease.promise and self._above_ceiling(lease)]:
            self._drop(lease)
        if plans:
            for lease in self.line():
                if not lease.promise:
                    self._make_room(lease)
        self.order_ns = None
        self.reserve()

    def _keep(self, lease: Asked) -> None:
        """Grant what was promised, once it is free; or what came free elsewhere; or take the promise back."""
        found = None if self._above_ceiling(lease) else self._fit(lease)
        if self._above_ceiling(lease):
            self._drop(lease)
        elif not any(self._on(gpu) for gpu in lease.promise):
            self._grant(lease, lease.promise)
        elif found is not None:
            self._grant(lease, found)
        elif all(other.status == "ended" for other in self.leases if other.id in lease.victims):
            self._drop(lease)

    def _admit(self) -> None:
        self.patient = None
        tried: set[str] = set()
        while True:
            lease = next((lease for lease in self.line() if lease.id not in tried), None)
            if lease is None:
                return
            tried.add(lease.id)
            # one that has come since was looked at by the order of that moment, and is again with all others
            if lease.promise or lease.asked_ns > self.looked_ns or self._above_ceiling(lease):
                continue
            found = self._fit(lease)
            if found is not None:
                self._grant(lease, found)
            elif self.now_ns - lease.asked_ns >= self.policy.gang_patience_ns and self.patient is None:
                self.patient = lease if len(self._seen(lease)) >= lease.gpus else None

    def _look_for_the_newcomer(self, lease: Asked) -> None:
        """At once, if all before it are promised something; else only on what is reserved for its group."""
        first = next((one for one in self.line() if not one.promise), None)
        mine = any(one.chosen and one.group == self.members[lease.tenant] for one in self.reservations)
        if first is lease:
            self._make_room(lease)
        elif mine:
            self._make_room(lease, only_reserved=True)

    def _make_room(self, lease: Asked, *, only_reserved: bool = False) -> None:
        if self._above_ceiling(lease, with_promises=True):
            return
        open_to = self._open_to(lease, for_taking=True)
        seen = [gpu for gpu in open_to if not only_reserved or self._reserved_for(gpu) is not None]
        if only_reserved:
            seen = [gpu for gpu in seen if self._reserved_for(gpu) == self.members[lease.tenant]]
        spoken_for = {victim for other in self.leases if other.promise for victim in other.victims}
        leaving = [one.id for one in self.leases if one.status == "ending" and one.id not in spoken_for]
        free = {gpu for gpu in seen if self._holder(gpu) in ("", *leaving) and not self._promised(gpu, lease)}
        if len(free) >= lease.gpus:
            return
        plans = [self._victims(lease, seen, free, inside=True)] if self._is_inside_floor(lease) else []
        for victims in [*plans, self._victims(lease, seen, free, inside=False)]:
            if victims:
                open_then = free.union(*(victim.lease.has for victim in victims)).intersection(seen)
                lease.promise = self._best(lease, open_then)
                self.promises += 1
                lease.promised = self.promises
                lease.victims = [victim.lease.id for victim in victims]
                for victim in victims:
                    self._notice(victim.lease, victim.why, beneficiary=lease)
                return

    def _victims(self, lease: Asked, seen: list[str], free: set[str], *, inside: bool) -> list[Victim]:
        found = [one for one in self.leases if set(one.has) & set(seen) and one.status == "active"]
        victims = [victim for one in found if (victim := self._victim(one, lease, inside=inside)) is not None]
        victims.sort(key=lambda victim: (victim.by_floor, victim.standing, victim.ran_ns, victim.lease.id))
        chosen: list[Victim] = []

        def open_now() -> int:
            return len(free.union(*(victim.lease.has for victim in chosen)).intersection(seen))

        for victim in victims:
            if open_now() < lease.gpus and self._may_lose(victim, chosen, lease):
                chosen.append(victim)
        if open_now() < lease.gpus:
            return []
        for victim in sorted(chosen, key=lambda victim: (victim.by_floor, victim.standing), reverse=True):
            chosen.remove(victim)
            if open_now() < lease.gpus:
                chosen.append(victim)
        chosen.sort(key=victims.index)
        return chosen

    def _victim(self, lease: Asked, request: Asked, *, inside: bool) -> Victim | None:
        own, other = self.members[request.tenant], self.members[lease.tenant]
        ran_ns, policy = self.now_ns - lease.claimed_ns, self.policy
        reserved = self._has_reserved(lease)
        if reserved is not None and own != other:
            if reserved == own:
                return Victim(lease, 0, "preempted", ran_ns, is_lent=True)
            if reserved == other:
                return None
        if self.cooling.get((request.tenant, lease.tenant), 0) > self.now_ns:
            return None
        standing, why = lease.rank, "preempted"
        least_ns = policy.min_run_batch_ns if lease.tier is Tier.BATCH else policy.turn_least_ns
        has_had_its_turn = (ran_ns >= policy.max_hold_ns and self._yields_to(lease, request)) or (
            self._is_further(lease) and ran_ns >= least_ns and not self._is_further(request)
        )
        if lease.tenant != request.tenant and has_had_its_turn:
            standing, why = standing - 1, "fair_share"
        elif lease.tier is not Tier.SPOT and ran_ns < policy.min_run_batch_ns:
            return None
        elif lease.tier is Tier.INTERACTIVE:
            standing = request.rank
        if standing < request.rank:
            return Victim(lease, standing, why, ran_ns)
        return Victim(lease, standing, "preempted", ran_ns, by_floor=True) if inside and own != other else None

    def _may_lose(self, victim: Victim, chosen: list[Victim], request: Asked) -> bool:
        group = self.members[victim.lease.tenant]
        if (
            victim.is_lent
            or group == self.members[request.tenant]
            or not any(one.floor for one in self.groups.values())
        ):
            return True
        lost = [one.lease for one in chosen if self.members[one.lease.tenant] == group]
        return self._level(group) - self.groups[group].floor >= sum(len(one.has) for one in [*lost, victim.lease])

    # ---- floors, ceilings, shares ----

    def _level(self, group: str) -> int:
        """What it holds once all promises are kept."""
        promised = [one for one in self.leases if one.promise]
        victims = {victim for one in promised for victim in one.victims}
        ours = [one for one in self.leases if self.members[one.tenant] == group]
        held = sum(len(one.has) for one in ours if one.status == "granted" or (one.is_live and one.id not in victims))
        return held + sum(len(one.promise) for one in ours)

    def _held(self, group: str) -> int:
        ours = [one for one in self.leases if self.members[one.tenant] == group]
        return sum(len(one.has) for one in ours if one.status == "granted" or one.is_live)

    def _is_inside_floor(self, lease: Asked) -> bool:
        group = self.members[lease.tenant]
        return self._level(group) + lease.gpus <= self.groups[group].floor

    def _above_ceiling(self, lease: Asked, *, with_promises: bool = False) -> bool:
        group = self.members[lease.tenant]
        ceiling = self.groups[group].ceiling
        promised = [one for one in self.leases if one.promise and self.members[one.tenant] == group]
        more = sum(len(one.promise) for one in promised) if with_promises else 0
        asked = len(lease.promise) or lease.gpus
        return ceiling is not None and self._held(group) + more + asked > ceiling

    def _others_wait_for(self, lease: Asked) -> bool:
        group = self.members[lease.tenant]
        is_kept = self._has_reserved(lease) == group or 0 < self._held(group) <= self.groups[group].floor
        waiting = [one for one in self.leases if one.status == "queued" and one.tenant != lease.tenant]
        return any(
            (not is_kept or self.members[one.tenant] == group) and self._yields_to(lease, one) for one in waiting
        )

    def _yields_to(self, lease: Asked, request: Asked) -> bool:
        """After the maximum. A heavier group does once it would have the larger share per weight two fifths of a turn
        later, the request in the lease's place and in those of leases that are not renewed."""
        own, other = self.members[lease.tenant], self.members[request.tenant]
        if self.groups[own].weight <= self.groups[other].weight:
            return True
        waited_ns, turn_ns = self.now_ns - request.asked_ns, self.policy.max_hold_ns
        yielding = sum(
            len(one.has)
            for one in self.leases
            if one is not lease
            and one.status == "active"
            and one.fate == "fair_share"
            and self.members[one.tenant] == own
        )
        theirs, ours = self._then(other, request.gpus + yielding), self._then(own, -len(lease.has) - yielding)
        return waited_ns >= 8 * turn_ns or theirs < ours

    def _then(self, group: str, more: int) -> int:
        uses = [use for use in self.uses if self.members[use[0]] == group]
        level = (self._level(group) + more) * MILLIS_PER_DEVICE
        half, now = self.policy.half_life_ns, self._order_ns()
        ahead = level * (self.policy.max_hold_ns * 2 // 5) * 2 * (half + now % half)
        return (self._used(uses) + ahead) // (MILLIS_PER_DEVICE * len(self.gpus) * self.groups[group].weight)

    def line(self) -> list[Asked]:
        """Tier, then the group with the smallest share, in it the tenant with the smallest share, then arrival."""
        return sorted((lease for lease in self.leases if lease.status == "queued"), key=self._place)

    def _place(self, lease: Asked) -> tuple[object, ...]:
        return -lease.rank, *self._shares(lease.tenant), lease.arrival

    def _shares(self, tenant: str) -> tuple[int, str, int]:
        group = self.members[tenant]
        of_group = [use for use in self.uses if self.members[use[0]] == group]
        own = [use for use in self.uses if use[0] == tenant]
        return self._share(of_group, self.groups[group].weight), group, self._share(own, 1)

    def _share(self, uses: list[tuple[str, int, int, int | None]], weight: int) -> int:
        half, now = self.policy.half_life_ns, self._order_ns()
        held = sum(gpus * MILLIS_PER_DEVICE for _, gpus, _, until in uses if until is None)
        ahead = held * self.policy.held_counts_as_ns * 2 * (half + now % half)
        return (self._used(uses) + ahead) // (MILLIS_PER_DEVICE * len(self.gpus) * weight)

    def _used(self, uses: list[tuple[str, int, int, int | None]]) -> int:
        half, now, total = self.policy.half_life_ns, self._order_ns(), 0
        for _, gpus, since, until in uses:
            until = now if until is None else min(now, until)
            total += gpus * MILLIS_PER_DEVICE * max(0, area(half, until) - area(half, since))
        return total >> now // half

    def _order_ns(self) -> int:
        return self.now_ns if self.order_ns is None else self.order_ns

    # ---- turns ----

    def _is_further(self, lease: Asked) -> bool:
        return lease.attained_ns >= self.policy.max_hold_ns

    def _goes_on_with(self, lease: Asked, old: Asked) -> bool:
        is_like_it = (old.tenant, old.gpus, old.tier) == (lease.tenant, lease.gpus, lease.tier)
        is_recent = old.end_ns >= self.now_ns - self.policy.max_hold_ns
        is_over = old.end in ("preempted", "fair_share", "released")
        return is_like_it and is_recent and is_over and not old.is_taken_up and self._attained_with(old) > 0

    def _attained_with(self, old: Asked) -> int:
        """What was released counts less by the time since."""
        rested_ns = self.now_ns - old.end_ns if old.end == "released" else 0
        return old.attained_ns + old.end_ns - old.claimed_ns - rested_ns

    # ---- reservations ----

    def _steps_at(self, one: Reserved) -> int:
        match one.state:
            case "ahead":
                return one.start_ns - self.policy.notice_ns - self.policy.reserved_clear_ns
            case "chosen":
                return one.start_ns
            case "begun":
                return min(one.start_ns + self.policy.reserved_keep_ns, one.end_ns)
            case _:
                return one.end_ns

    def reserve(self) -> None:
        for one in self.reservations:
            if one.state not in ("ahead", "over") and one.end_ns <= self.now_ns:
                one.state, one.chosen = "over", []
                self._spare_all(one)
        for one in self.reservations:
            if one.state == "over" or (one.state == "ahead" and self._steps_at(one) > self.now_ns):
                continue
            one.state = "chosen" if one.state == "ahead" else one.state
            self._choose(one)
            if one.state == "chosen" and one.start_ns <= self.now_ns:
                one.state = "begun"
                one.ready = sum(all(self.members[on.tenant] == one.group for on in self._on(gpu)) for gpu in one.chosen)
            if one.state == "begun" and self._steps_at(one) <= self.now_ns:
                one.state = "lent"
            for lease in [lease for lease in self.leases if set(lease.promise) & set(one.chosen)]:
                is_lent = one.state == "lent" and lease.tier is Tier.SPOT
                if self.members[lease.tenant] != one.group and not is_lent:
                    self._drop(lease)
        for one in self.reservations:
            for gpu in one.chosen:
                for lease in self._strangers(one, gpu):
                    if lease.status == "active" and not (one.state == "lent" and lease.tier is Tier.SPOT):
                        in_time_ns = one.start_ns - self.policy.reserved_clear_ns - self.now_ns
                        self._notice(lease, "preempted", reservation=one.id, least_ns=in_time_ns)

    def _choose(self, one: Reserved) -> None:
        taken = {gpu for other in self.reservations if other is not one for gpu in other.chosen}
        leaving: set[str] = set()
        while len(one.chosen) < one.gpus:
            others = [gpu for gpu in self.gpus if gpu not in taken and gpu not in one.chosen]
            if not others:
                return
            best = min(others, key=lambda gpu: (*self._cost(one, gpu, leaving), gpu))
            leaving |= {lease.id for lease in self._strangers(one, best)}
            one.chosen.append(best)

    def _cost(self, one: Reserved, gpu: str, leaving: set[str]) -> tuple[int, int, int]:
        lease = next((lease for lease in self._on(gpu) if lease.status != "ending" and lease.id not in leaving), None)
        if lease is None:
            return 0, 0, 0
        if self.members[lease.tenant] == one.group:
            return 0, -1, 0
        ran_ns = self.now_ns - lease.claimed_ns if lease.claimed_ns else 0
        within_minimum = lease.tier is not Tier.SPOT and ran_ns < self.policy.min_run_batch_ns
        group = self.members[lease.tenant]
        within_floor = 0 < self._held(group) <= self.groups[group].floor
        return 2 + 2 * (lease.rank - 1) + within_minimum + 10 * within_floor, 0, ran_ns

    def _strangers(self, one: Reserved, gpu: str) -> list[Asked]:
        there = [lease for lease in self._on(gpu) if lease.status != "ending"]
        return [lease for lease in there if self.members[lease.tenant] != one.group]

    def _reserved_for(self, gpu: str) -> str | None:
        return next((one.group for one in self.reservations if gpu in one.chosen), None)

    def _has_reserved(self, lease: Asked) -> str | None:
        return next((group for gpu in lease.has if (group := self._reserved_for(gpu)) is not None), None)

    # ---- devices ----

    def _on(self, gpu: str) -> list[Asked]:
        return [
            one for one in self.leases if gpu in one.has and one.status in ("granted", "active", "noticed", "ending")
        ]

    def _holder(self, gpu: str) -> str:
        return next((one.id for one in self._on(gpu)), "")

    def _promised(self, gpu: str, lease: Asked) -> bool:
        return any(gpu in one.promise for one in self.leases if one is not lease)

    def _seen(self, lease: Asked) -> list[str]:
        """Without those that reservations keep for other groups."""
        return [gpu for gpu in self.gpus if self._may_see(gpu, lease)]

    def _may_see(self, gpu: str, lease: Asked) -> bool:
        one = next((one for one in self.reservations if gpu in one.chosen), None)
        if one is None or one.group == self.members[lease.tenant]:
            return True
        return one.state == "lent" and lease.tier is Tier.SPOT

    def _open_to(self, lease: Asked, *, for_taking: bool = False) -> list[str]:
        """Without those that are kept for a patient request as well; what is reserved for its group stays. One that
        goes before the patient request has what is free."""
        seen = self._seen(lease)
        first = self.patient
        if first is None or first is lease or first.rank < lease.rank:
            return seen
        if not for_taking and self._place(lease) < self._place(first):
            return seen
        is_long = self.now_ns - first.asked_ns >= self.policy.max_hold_ns
        if self._is_further(first) and not is_long and not self._is_further(lease):
            return seen
        return [gpu for gpu in seen if self._reserved_for(gpu) == self.members[lease.tenant]]

    def _fit(self, lease: Asked) -> list[str] | None:
        free = {gpu for gpu in self._open_to(lease) if not self._on(gpu) and not self._promised(gpu, lease)}
        return self._best(lease, free) if len(free) >= lease.gpus else None

    def _best(self, lease: Asked, free: set[str]) -> list[str]:
        group = self.members[lease.tenant]
        return sorted(free, key=lambda gpu: (self._reserved_for(gpu) != group, gpu))[: lease.gpus]

    # ---- what happens to leases ----

    def _grant(self, lease: Asked, gpus: list[str]) -> None:
        victims, lease.victims, lease.promise = lease.victims, [], []
        lease.status, lease.has = "granted", list(gpus)
        lease.granted_ns, lease.claim_by_ns = self.now_ns, self.now_ns + self.policy.claim_window_ns
        self.uses.append((lease.tenant, len(gpus), self.now_ns, None))
        self._spare(lease, victims)

    def _activate(self, lease: Asked) -> None:
        lease.status, lease.claimed_ns, lease.deadline_ns = "active", self.now_ns, self.now_ns + lease.ttl_ns

    def _end(self, lease: Asked, why: str) -> None:
        if lease.promise:
            self._drop(lease)
        lease.end, lease.end_ns = why, self.now_ns
        if lease.status == "queued":
            lease.status = "ended"
            return
        if not lease.is_live:
            lease.is_taken_up = True  # it was never claimed, so no work goes on
        lease.status = "ending"
        index = self.uses.index((lease.tenant, len(lease.has), lease.granted_ns, None))
        self.uses[index] = (*self.uses[index][:3], self.now_ns)

    def _notice(
        self,
        lease: Asked,
        why: str,
        *,
        beneficiary: Asked | None = None,
        reservation: str = "",
        least_ns: int = 0,
    ) -> None:
        policy = self.policy
        usual_ns = policy.notice_spot_ns if lease.tier is Tier.SPOT else policy.notice_ns
        lease.status, lease.why, lease.take_at_ns = "noticed", why, self.now_ns + max(usual_ns, least_ns)
        lease.beneficiary, lease.reservation = "" if beneficiary is None else beneficiary.id, reservation
        if beneficiary is not None and beneficiary.tenant != lease.tenant:
            self.cooling[lease.tenant, beneficiary.tenant] = self.now_ns + policy.cool_down_ns

    def _drop(self, lease: Asked) -> None:
        victims, lease.victims, lease.promise = lease.victims, [], []
        self._spare(lease, victims)

    def _spare(self, lease: Asked, victims: list[str]) -> None:
        for victim in self.leases:
            if victim.id in victims and victim.status == "noticed" and victim.beneficiary == lease.id:
                victim.status, victim.beneficiary = "active", ""

    def _spare_all(self, one: Reserved) -> None:
        for lease in self.leases:
            if lease.status == "noticed" and lease.reservation == one.id:
                lease.status, lease.reservation = "active", ""
