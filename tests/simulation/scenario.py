"""What a seed comes to: who is there, how well the network and the clocks behave, and which faults may happen.

Each fault is switched on for about half of the seeds (a swarm): a world in which everything happens all the time hides
what happens when one thing does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Want
from sublet.testing.pretended import Timings
from sublet.values import GIB, Exclusivity, Kind, NodeId, ResourceId, Suspend
from sublet.wire.orders import Device, Inventory

if TYPE_CHECKING:
    from tests.simulation.world import World

Mode = Literal["safety", "liveness"]
_S: Final = 1_000_000_000
_MS: Final = 1_000_000

POLICY: Final = Policy(
    ttl_min_ns=2 * _S,
    ttl_parking_ns=20 * _S,
    suspend_ns=4 * _S,
    notice_ns=6 * _S,
    notice_spot_ns=2 * _S,
    grace_max_ns=2 * _S,
    claim_window_ns=10 * _S,
    offer_valid_ns=12 * _S,
    min_run_batch_ns=15 * _S,
    max_hold_ns=45 * _S,
    turn_least_ns=10 * _S,
    pause_ns=4 * _S,
    cool_down_ns=10 * _S,
    usage_window_ns=3600 * _S,
    gang_patience_ns=20 * _S,
    held_counts_as_ns=10 * _S,
    ended_keep_ns=240 * _S,
    retain_ns=40 * _S,
    reserved_keep_ns=8 * _S,
)
"""The office's rules at the pace of a simulation: everything that takes minutes takes seconds."""

RATES_PER_MINUTE: Final = {
    "cut": 1.5,
    "office crash": 0.8,
    "office pause": 0.6,
    "slow disk": 1.0,
    "reboot": 0.4,
    "restore": 0.35,
    "wall jump": 0.7,
    "holder crash": 1.2,
    "holder pause": 2.0,
    "node crash": 0.7,
    "node pause": 0.6,
    "amnesia": 0.3,
    "link broken": 0.7,
    "node gone": 0.4,
    "node drained": 0.5,
    "revoked": 1.0,
    "hardware": 2.5,
    "cleared": 2.0,
}
"""How often each fault happens in a seed in which it is on."""


MANY_FROM: Final = 1_000_000
"""From this seed on holders ask for several leases at once as well; the seeds before it tell the same story as ever."""
SHARED_FROM: Final = 2_000_000
"""From this seed on there are groups, reservations, budgets, and programs that want more than their share."""


@dataclass(slots=True, kw_only=True)
class Scenario:
    """One seed, spelt out."""

    seed: int
    mode: Mode
    embedded: bool
    """One machine and one clock: an office, a supervisor that outlives it, holders. Else one office and agents on other
    machines."""
    true_clocks: bool
    """All clocks keep their rates within what the rules assume; else agents run up to 20 % off, and only what must hold
    whatever the clocks do is checked."""
    seconds: int
    inventories: tuple[Inventory, ...]
    holders: int
    tenants: int
    loss: float
    duplicates: float
    late: float
    delay_ns: int
    rates: dict[str, float]
    """Fault → times per simulated minute."""
    sync_failure: float
    deposed: bool
    """After a restore, the replaced office lives on."""
    think_ns: int
    policy: Policy = POLICY
    timings: Timings = field(
        default_factory=lambda: Timings(
            leave_ns=_S // 2,
            kill_ns=_S // 5,
            kill_slow_ns=15 * _S,
            retry_ns=2 * _S,
            attempts=4,
            verify_ns=_S // 10,
            park_ns=_S,
        )
    )
    volumes: bool = False
    """Nodes have disks, and some of the work leaves something there under a name."""
    bound: bool = False
    """Holders are on the office's machine, and most bind their leases to their process."""
    many: bool = False
    """Holders sometimes ask for several leases in one request."""
    shared: bool = False
    """Tenants are in groups; see ``sharing``."""
    slow_disk_until: int = 0
    ttl_asked_ns: int = 0

    def ttl_ns(self, world: World) -> int:
        """The time to live of the next request: mostly seconds."""
        self.ttl_asked_ns = int((4 + world.random.random() ** 2 * 40) * _S)
        return self.ttl_asked_ns

    def wants(self, world: World) -> tuple[Want, ...]:
        """What the next request asks for."""
        draw = world.random.random
        kind = draw()
        if kind < 0.5:
            exclusivity = Exclusivity.DEVICE if draw() < 0.3 else None
            return (Want(kind=Kind.GPU, amount=4 * GIB, count=2 if draw() < 0.15 else 1, exclusivity=exclusivity),)
        if kind < 0.75:
            amount = (1 + int(draw() * 12)) * GIB
            least = GIB if draw() < 0.4 else None
            return (Want(kind=Kind.GPU, amount=amount, exclusivity=Exclusivity.SHARED, least=least),)
        amount = 1 + int(draw() * 8)
        cores = Want(kind=Kind.CPU, amount=amount, least=1 if draw() < 0.4 else None)
        if draw() < 0.5:
            return (cores,)
        return (cores, Want(kind=Kind.MEMORY, amount=(1 + int(draw() * 6)) * GIB))

    def volume(self, request: str) -> tuple[str, tuple[Want, ...]] | None:
        """The name of the volume that this request is for, and what it asks for, if it is for one. Drawn from the
        request alone, so that it moves nothing else."""
        if not self.volumes:
            return None
        source = random.Random(f"volume/{self.seed}/{request}")
        if source.random() > 0.4:
            return None
        name, size = source.choice((("a", GIB), ("b", 2 * GIB)))
        block = Want(kind=Kind.BLOCK, amount=0 if source.random() < 0.2 else size)
        return name, (block, Want(kind=Kind.CPU, amount=1)) if source.random() < 0.3 else (block,)

    def sync_ns(self, world: World) -> int:
        """How long the next sync takes."""
        draw = world.random.random()
        if world.now < self.slow_disk_until:
            return int(draw * 12 * _S)
        return int(draw * draw * 8 * _MS)

    def sync_fails(self, world: World) -> bool:
        """Whether the next sync comes back with an error."""
        return bool(self.sync_failure) and world.random.random() < self.sync_failure


def _with_ability(inventory: Inventory, ability: Suspend) -> Inventory:
    devices = [replace(one, suspend=ability) if one.kind is Kind.GPU else one for one in inventory.devices]
    return replace(inventory, devices=tuple(devices))


def draw(seed: int, mode: Mode) -> tuple[Scenario, random.Random]:
    """The scenario of a seed, and the source of everything else that is random in it."""
    source = random.Random(f"{mode}/{seed}")
    chance = source.random
    embedded = chance() < 0.35
    nodes = 1 if embedded or chance() < 0.3 else 2 + (chance() < 0.3)
    noisy = chance() < 0.7
    scenario = Scenario(
        seed=seed,
        mode=mode,
        embedded=embedded,
        true_clocks=embedded or chance() < 0.7,
        seconds=300 if chance() < 0.8 else 480,
        inventories=tuple(_inventory(index, gpus=1 + (chance() < 0.4)) for index in range(nodes)),
        holders=3 + int(chance() * 4),
        tenants=1 + int(chance() * 3),
        loss=chance() * 0.3 if noisy and chance() < 0.6 else 0.0,
        duplicates=chance() * 0.5 if noisy and chance() < 0.5 else 0.0,
        late=chance() * 0.05 if noisy and chance() < 0.4 else 0.0,
        delay_ns=int((1 + chance() ** 3 * 1500) * _MS),
        rates={fault: rate * (0.5 + chance()) for fault, rate in RATES_PER_MINUTE.items() if chance() < 0.5},
        sync_failure=0.003 if chance() < 0.3 else 0.0,
        deposed=chance() < 0.5,
        think_ns=int((2 + chance() * 15) * _S),
    )
    # Drawn last, so that the seeds of before tell the same story up to here.
    ability = source.choice((Suspend.NONE, Suspend.SAME_DEVICE, Suspend.SAME_TYPE, Suspend.SAME_TYPE))
    scenario.inventories = tuple(_with_ability(found, ability) for found in scenario.inventories)
    scenario.many = MANY_FROM <= seed < SHARED_FROM
    scenario.shared = seed >= SHARED_FROM
    scenario.volumes = random.Random(f"volumes/{mode}/{seed}").random() < 0.35
    scenario.bound = scenario.embedded and random.Random(f"bound/{mode}/{seed}").random() < 0.5
    park_s = random.Random(f"parking/{mode}/{seed}").choice((0.05, 1, 1, 3, 6))  # the last takes too long
    scenario.timings = replace(scenario.timings, park_ns=int(park_s * _S))
    if scenario.volumes:
        scenario.inventories = tuple(_with_disk(found) for found in scenario.inventories)
    return scenario, source


def _with_disk(inventory: Inventory) -> Inventory:
    disk = Device(id=ResourceId(f"{inventory.node}/block"), kind=Kind.BLOCK, capacity=4 * GIB)
    return replace(inventory, devices=(*inventory.devices, disk))


def _inventory(index: int, *, gpus: int) -> Inventory:
    name = f"n{index}"
    gpu = tuple(
        Device(id=ResourceId(f"{name}/gpu{number}"), kind=Kind.GPU, capacity=16 * GIB, model="pretend")
        for number in range(gpus)
    )
    rest = (
        Device(id=ResourceId(f"{name}/cpu"), kind=Kind.CPU, capacity=8),
        Device(id=ResourceId(f"{name}/memory"), kind=Kind.MEMORY, capacity=8 * GIB),
    )
    return Inventory(node=NodeId(name), domain=name, devices=gpu + rest)
