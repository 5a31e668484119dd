"""The office's numbers, each with a unit, and checked against one another at construction."""

from __future__ import annotations

import msgspec

from sublet.errors import InvalidRequest
from sublet.office.ledger.fairness import HALF_LIFE_NS
from sublet.office.ledger.records import NO_QUOTA, Quota
from sublet.values import NS_PER_S, Kind, Tier

_MIN_NS = 60 * NS_PER_S


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Durations and limits (DESIGN §4)."""

    ttl_gpu_ns: int = 5 * _MIN_NS
    ttl_cpu_ns: int = 2 * _MIN_NS
    ttl_memory_ns: int = 5 * _MIN_NS
    ttl_block_ns: int = 60 * _MIN_NS
    ttl_min_ns: int = 2 * NS_PER_S
    ttl_max_ns: int = 24 * 60 * _MIN_NS
    ttl_parking_ns: int = 30 * _MIN_NS
    """Of a parking lease: for so long what was taken off a device waits to go on, unless it is renewed."""
    retain_ns: int = 7 * 24 * 60 * _MIN_NS
    """How long a volume is kept after the end of its last lease, where nothing else was asked for."""
    retain_max_ns: int = 366 * 24 * 60 * _MIN_NS
    suspend_ns: int = 30 * NS_PER_S
    """To take guests off a device. A guest that is not off by then is ended."""
    notice_ns: int = 30 * NS_PER_S
    notice_spot_ns: int = 5 * NS_PER_S
    grace_max_ns: int = 5 * NS_PER_S
    claim_window_ns: int = 10 * NS_PER_S
    offer_valid_ns: int = 30 * NS_PER_S
    min_run_batch_ns: int = 10 * _MIN_NS
    max_hold_ns: int = 30 * _MIN_NS
    turn_least_ns: int = 5 * _MIN_NS
    """A holder that has had the maximum before, and goes on, keeps its next lease for so long at least when a request
    waits that has not had it."""
    pause_ns: int = 4 * _MIN_NS
    """A holder that has not had the maximum keeps an idle lease for so long when a request waits that has: more than
    half of the published pauses between two cells are shorter. And for so long such a request waits itself before it
    preempts a tenant that has used less."""
    cool_down_ns: int = 60 * NS_PER_S
    usage_window_ns: int = 60 * _MIN_NS
    """The rolling window of device time, for quota."""
    half_life_ns: int = HALF_LIFE_NS
    """After this long, what was used counts half as much in the order of the queue."""
    reserved_clear_ns: int = _MIN_NS
    """Leases on the devices of a reservation end so long before its start, for their devices to be verified free by
    then; the choice of the devices is earlier by the notice."""
    reserved_keep_ns: int = 10 * _MIN_NS
    """For so long after its start, reserved devices are kept free for the group; then unused ones are lent as spot."""
    priority_after_ns: int = 30 * _MIN_NS
    """Where priority is for sale, a request that does not pay has it too after this long in line."""
    gang_patience_ns: int = 5 * _MIN_NS
    """After this long in line, no request of the same or a lower tier is let past to what the head could use."""
    held_counts_as_ns: int = _MIN_NS
    """In the order of the queue, what a tenant holds counts as if it had been used for this long already."""
    idle_least_ns: int = NS_PER_S // 5
    """An idle holder yields to a waiting request once it has been idle for so long, or for as long as its guests' last
    move (suspend and resume, or save and restore) took, if that is longer: so moving costs at most half of the time."""
    idle_most_ns: int = 5 * NS_PER_S
    """The most that is waited for that reason."""
    replan_every_ns: int = NS_PER_S
    """While requests wait, what changes is looked at for preemption at most this often, and holders pass their minimum
    run in steps of it."""
    resend_every_ns: int = 2 * NS_PER_S
    """An order the agent has not confirmed is sent again."""
    ended_keep_ns: int = 24 * 60 * _MIN_NS
    ended_keep_max: int = 10_000
    queue_max: int = 10_000
    queue_tenant_max: int = 1_000
    volumes_tenant_max: int = 100_000
    quota_default: Quota = NO_QUOTA
    """What holds for a tenant where its own quota says nothing. The owner's own tenant is left out."""
    leases_max: int = 2_000_000
    count_max: int = 64
    many_max: int = 1024
    """Leases that one request may ask for."""
    wants_max: int = 8
    cheapest_first: bool = False
    """Whether interactive requests that name no model go to the devices with the lowest price, if they fit there."""
    share_across_tenants: bool = False
    """Whether ``shared`` GPU neighbours may belong to different tenants."""

    def __post_init__(self) -> None:
        for low, high in (
            ("ttl_min_ns", "ttl_cpu_ns"),
            ("ttl_min_ns", "ttl_gpu_ns"),
            ("ttl_min_ns", "ttl_memory_ns"),
            ("ttl_min_ns", "ttl_block_ns"),
            ("ttl_block_ns", "ttl_max_ns"),
            ("ttl_gpu_ns", "ttl_max_ns"),
            ("ttl_min_ns", "ttl_parking_ns"),
            ("ttl_parking_ns", "ttl_max_ns"),
            ("notice_spot_ns", "notice_ns"),
            ("cool_down_ns", "max_hold_ns"),
            ("retain_ns", "retain_max_ns"),
            ("notice_ns", "max_hold_ns"),
            ("idle_least_ns", "idle_most_ns"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise InvalidRequest(f"the policy has {low} above {high}", do="Make the first at most the second.")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise InvalidRequest(f"the policy has {name} = {value}", do="Give a number above zero.")

    def ttl_default_ns(self, kind: Kind) -> int:
        """The time to live where none was asked for."""
        return {
            Kind.GPU: self.ttl_gpu_ns,
            Kind.CPU: self.ttl_cpu_ns,
            Kind.MEMORY: self.ttl_memory_ns,
            Kind.BLOCK: self.ttl_block_ns,
        }[kind]

    def notice_for_ns(self, tier: Tier) -> int:
        """How long before it is taken a lease of this tier is told."""
        return self.notice_spot_ns if tier is Tier.SPOT else self.notice_ns

    def idle_before_yielding_ns(self, moving_ns: int, save_ns: int) -> int:
        """How long a holder must have been idle before its lease is taken for a waiting request. ``moving_ns``: what
        its last suspend and resume took; where it has had none, saving and restoring count, both as the last save."""
        return min(self.idle_most_ns, max(self.idle_least_ns, moving_ns or 2 * save_ns))

    def grace_ns(self, ttl_ns: int) -> int:
        """How long guests may take to end: min(5 s, 10 % of the TTL)."""
        return min(self.grace_max_ns, ttl_ns // 10)
