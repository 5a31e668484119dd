"""Books that contradict themselves, or an index that contradicts the books, do not get past the check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from sublet.lease.states import LeaseStatus, SliceState, VolumeState
from sublet.lease_end import EndReason
from sublet.office.ledger import events as ev
from sublet.office.ledger.checks import check_after, check_books
from sublet.office.ledger.records import NoticeRecord
from sublet.office.ledger.state import STALE_ENTRIES_MAX, State
from sublet.values import GIB, Epoch, Kind, LeaseId, ResourceId, TenantId, Tier
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, gpu, inventory, seconds, shared

GPU, CPU, DISK = ResourceId("g"), ResourceId("c"), ResourceId("d")


def full() -> State:
    """A lease of every state, a volume, a promise, a quarantined slice."""
    devices = [device(name, capacity=16 * GIB) for name in ("g", "h", "q")]
    bench = Bench(inventory("n", *devices, device("c", Kind.CPU), device("d", Kind.BLOCK)))
    bench.granted(gpu(16), lease="held", tenant=ANN, tier=Tier.SPOT)
    bench.granted(shared(4), lease="shares", tenant=ANN)
    bench.granted(cores(2), lease="cores", tenant=BEN)
    bench.release(bench.granted(disk(1), lease="kept", tenant=BEN, name="v"))
    bench.release(bench.granted(cores(1), lease="ended", tenant=BEN))
    bench.granted(disk(2), lease="has", tenant=BEN, name="w")
    bench.obedient = False
    bench.release(bench.granted(cores(3), lease="ending", tenant=BEN))
    bench.granted(gpu(16), lease="third", tenant=BEN)
    bench.queued(gpu(16), lease="waits", tenant=BEN)
    state = bench.state
    statuses = {lease.status for lease in state.leases.values()}
    assert statuses >= {
        *(LeaseStatus.ACTIVE, LeaseStatus.NOTICED, LeaseStatus.QUEUED, LeaseStatus.ENDING, LeaseStatus.ENDED)
    }
    assert state.promises
    check_books(state)
    return state


def change(name: str, **what: object) -> Callable[[State], None]:
    def do(state: State) -> None:
        for field, value in what.items():
            assert getattr(state.leases[LeaseId(name)], field) != value
            setattr(state.leases[LeaseId(name)], field, value)

    return do


def piece_of(where: ResourceId, /, **what: object) -> Callable[[State], None]:
    """Another thing is said of the first slice there."""

    def do(state: State) -> None:
        piece = next(iter(state.resources[where].slices.values()))
        for field, value in what.items():
            assert getattr(piece, field) != value
            setattr(piece, field, value)

    return do


WRONG: dict[str, Callable[[State], object]] = {
    "an end without a reason": change("ended", end=None),
    "an end with a promise": lambda state: change("ended", promise=state.leases[LeaseId("waits")].promise)(state),
    "a teardown without a reason": change("ending", end=None),
    "a state of holders": change("cores", status=LeaseStatus.JEOPARDY),
    "live, and not": change("cores", status=LeaseStatus.ENDED),
    "ended, and live": change("ended", status=LeaseStatus.ACTIVE),
    "queued, and holding": change("cores", status=LeaseStatus.QUEUED),
    "no deadline": change("cores", deadline_ns=None),
    "a claim window of what is held": change("cores", claim_by_ns=1),
    "no notice": change("held", notice=None),
    "a notice of which it knows nothing": change("cores", notice=NoticeRecord(reason=EndReason.DRAINED, take_at_ns=1)),
    "more time than one TTL": change("cores", extended_ns=seconds(100_000)),
    "an epoch from the future": lambda state: change("ended", epoch=state.next_epoch())(state),
    "an epoch twice": lambda state: change("ended", epoch=state.leases[LeaseId("cores")].epoch)(state),
    "an older sequence": lambda state: setattr(state.books, "next_n", 2),
    "a request that became two leases": (
        lambda state: change("cores", request_id=state.leases[LeaseId("has")].request_id)(state)
    ),
    "a request that is known no more": lambda state: state.requests.clear(),
    "a promise that nobody filed": lambda state: state.promises.clear(),
    "a promise to nobody": lambda state: state.promises.setdefault(LeaseId("cores")),
    "a queue without him": lambda state: state.queue[Tier.INTERACTIVE, False].clear(),
    "a queue that lets one pass": lambda state: state.queue[Tier.INTERACTIVE, True].update(
        {group: state.queue[Tier.INTERACTIVE, False].pop(group) for group in [*state.queue[Tier.INTERACTIVE, False]]}
    ),
    "a queue that counts wrongly": lambda state: setattr(state, "queued_count", 2),
    "wants of nobody": lambda state: state.waiting_wants.update({state.leases[LeaseId("cores")].wants: 1}),
    "more that are particular": lambda state: setattr(state, "waiting_particular", 1),
    "nobody who was first": lambda state: state.waiting_since.clear(),
    "a node without him": lambda state: next(iter(state.on_node.values())).pop(LeaseId("cores"), None),
    "more that live than there are": lambda state: setattr(state, "live_count", 9),
    "a quota that is out of date": lambda state: setattr(state.held[ANN], "gpus", 0),
    "a quota that knows nobody": lambda state: state.held.pop(BEN),
    "kept, and not counted": lambda state: setattr(state.held[BEN], "kept_bytes", 0),
    "a meter that is out of step": lambda state: state.books.usage[ANN].level.append(7),
    "used, and in no slice": lambda state: setattr(state.resources[CPU], "used", 8),
    "used, where nobody is": lambda state: setattr(state.resources[ResourceId("q")], "used", 0),
    "a slice under another epoch": piece_of(CPU, epoch=Epoch(1, 1)),
    "a slice of another resource": piece_of(CPU, resource=GPU),
    "a slice that is free": piece_of(CPU, state=SliceState.FREE),
    "leased without a live lease": piece_of(CPU, lease=LeaseId("nobody")),
    "leased to one who has ended": piece_of(CPU, lease=LeaseId("ended")),
    "kept, and no volume": piece_of(CPU, state=SliceState.RETAINED),
    "a volume without a slice": piece_of(DISK, volume=""),
    "a slice of no volume": piece_of(DISK, volume="x"),
    "a volume of another size": lambda state: setattr(state.volumes["ben/v"], "size", 5),
    "a volume that is kept for ever": lambda state: setattr(state.volumes["ben/v"], "until_ns", None),
    "a volume that is lost, and takes room": lambda state: setattr(state.volumes["ben/v"], "state", VolumeState.LOST),
    "a volume under another name": lambda state: setattr(state.volumes["ben/v"], "name", "u"),
    "more lent than there is": lambda state: setattr(state.resources[CPU], "device", device("c", Kind.CPU, capacity=1)),
    "a room with more in it": lambda state: setattr(state.rooms[CPU], "free", 8),
    "a room of another kind": lambda state: setattr(state.rooms[CPU], "kind", Kind.GPU),
    "a room of others": lambda state: state.rooms[CPU].tenants.update({TenantId("x"): 1}),
    "a room that tolerates no other": lambda state: setattr(state.rooms[CPU], "exclusive", 1),
    "a room that is quarantined": lambda state: setattr(state.rooms[CPU], "quarantined", 1),
    "a room in which nothing stays": lambda state: setattr(state.rooms[DISK], "stays", 0),
    "strangers in an empty room": lambda state: setattr(state.rooms[CPU], "foreign", 1),
}


def test_requests_that_come_and_go_behind_one_that_waits_leave_nothing() -> None:
    bench = Bench(inventory("n", device("g", capacity=16 * GIB)))
    bench.granted(gpu(16), tenant=ANN)
    bench.queued(gpu(16), tenant=BEN)
    comes_and_goes, state = bench.queued(gpu(16), tenant=BEN), bench.state
    for _ in range(3 * STALE_ENTRIES_MAX):
        state.dequeue(comes_and_goes)
        state.enqueue(comes_and_goes)
    assert len(state.waiting_since) <= STALE_ENTRIES_MAX + 2 * state.queued_count + 1
    check_books(state)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_seen(what: str) -> None:
    state = full()
    WRONG[what](state)
    with pytest.raises(AssertionError):
        check_books(state)


@pytest.mark.parametrize(
    "news",
    [
        ev.ActivityNoted(lease=LeaseId("held"), busy_ns=0, idle=False),
        ev.FateSealed(lease=LeaseId("held"), reason=EndReason.IDLE),
        ev.Renewed(lease=LeaseId("held"), deadline_ns=1, number=1),
    ],
    ids=lambda news: type(news).__name__,
)
def test_after_a_renewal_its_lease_is_looked_at_and_no_other(news: ev.Event) -> None:
    """It changes nothing else: an index that is wrong is seen after the next event of another kind."""
    state = full()
    state.live_count += 1
    check_after(state, [news])
    with pytest.raises(AssertionError, match="the index of nodes is out of date"):
        check_after(state, [news, ev.Forgotten(leases=())])
    state.leases[LeaseId("held")].deadline_ns = None
    with pytest.raises(AssertionError, match=r"held .* has no deadline"):
        check_after(state, [news])


def test_an_exclusive_slice_has_no_neighbours() -> None:
    """Also where everything is counted."""
    state = full()
    alone, shares = (next(iter(state.slices_of(state.leases[LeaseId(name)]))) for name in ("held", "shares"))
    resource = state.resources[shares.resource]
    part = dataclasses.replace(alone.part, resource=resource.id, amount=1)
    piece = msgspec.structs.replace(shares, epoch=alone.epoch, lease=alone.lease, part=part)
    resource.slices[str(piece.epoch)] = piece
    resource.used += 1
    state.rooms[resource.id].put(piece)
    with pytest.raises(AssertionError, match="an exclusive slice has neighbours"):
        check_books(state)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("leased without a live lease", {"lease": LeaseId("nobody"), "state": SliceState.LEASED}),
        ("nothing is kept there", {"lease": LeaseId("nobody"), "state": SliceState.RETAINED}),
        ("no such volume", {"lease": LeaseId("nobody"), "state": SliceState.RETAINED, "volume": "gone"}),
    ],
)
def test_a_slice_that_no_lease_and_no_volume_has_is_seen(said: str, what: dict[str, object]) -> None:
    """Everything else is counted as if it were right."""
    state = full()
    resource = state.resources[CPU]
    piece = msgspec.structs.replace(next(iter(resource.slices.values())), epoch=Epoch(1, 0), **what)
    resource.slices[str(piece.epoch)] = piece
    resource.used += piece.part.amount
    state.rooms[CPU].put(piece)
    state.rooms[CPU].free -= piece.part.amount
    with pytest.raises(AssertionError, match=said):
        check_books(state)
