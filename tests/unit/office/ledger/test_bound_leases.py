"""Leases that are bound to a process: what is parked, what waits to go on with it, the index, and older journals."""

from __future__ import annotations

import msgspec

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.bound_leases import BoundLeases
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, ProcessRecord
from sublet.values import GIB, Kind, LeaseId, NodeId, RequestId, Suspend, Tier
from sublet.wire.orders import Parkable
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, inventory, seconds

NODE = NodeId("n1")


def process(pid: int) -> ProcessRecord:
    return ProcessRecord(pid=pid, start_ticks=pid * 100, boot_id="boot", namespaces="pid:[1] time:[1]")


def bench_with(gpus: int = 1) -> Bench:
    devices = [device(f"gpu{n}", model="pretend", suspend=Suspend.SAME_TYPE) for n in range(gpus)]
    rest = (device("memory", Kind.MEMORY, 8 * GIB), device("cpu", Kind.CPU))
    return Bench(inventory("n1", *devices, *rest), policy=Policy(ttl_parking_ns=seconds(300)))


def die(bench: Bench, one: ProcessRecord) -> None:
    leases = tuple(lease.id for lease in bench.state.leases.values() if lease.process == one)
    bench.do(cmd.HolderGone(process=one, leases=leases))


def noticed(bench: Bench, holder: ProcessRecord) -> LeaseRecord:
    """Ben has a device as spot, Ann wants it; a parking lease is set aside for Ben's guests."""
    lease = bench.granted(tenant=BEN, tier=Tier.SPOT, renew="always", process=holder)
    bench.queued(tenant=ANN, lease="ann")
    assert lease.epoch is not None
    bench.report(Parkable(node=NODE, lease=lease.id, epoch=lease.epoch, amount=2 * GIB))
    return lease


def parking_of(bench: Bench, lease: LeaseRecord) -> LeaseRecord:
    assert lease.parked_under is not None
    return bench.state.leases[lease.parked_under]


def reason(lease: LeaseRecord) -> EndReason | None:
    return None if lease.end is None else lease.end.reason


def test_what_a_holder_parked_ends_with_its_process() -> None:
    """Its guests are parked, its process ends: nobody goes on with them, so their memory is free."""
    bench = bench_with()
    lease = noticed(bench, process(1))
    bench.wait(6)
    parking = parking_of(bench, lease)
    assert parking.status is LeaseStatus.ACTIVE
    assert parking.process == process(1)
    die(bench, process(1))
    assert reason(parking) is EndReason.HOLDER_GONE
    assert bench.state.held_by(BEN).memory_bytes == 0
    assert bench.lease("ann").end is None, "another holder's grant stays"


def test_a_parking_lease_that_is_only_set_aside_goes_with_the_lease() -> None:
    """The notice still runs: the lease ends at once, and nothing is parked."""
    bench = bench_with()
    lease = noticed(bench, process(1))
    die(bench, process(1))
    assert reason(lease) is EndReason.HOLDER_GONE
    assert reason(parking_of(bench, lease)) is EndReason.WITHDRAWN
    assert bench.lease("ann").status is LeaseStatus.GRANTED


def test_a_parking_lease_follows_the_lease_to_another_process() -> None:
    """Attached while it has notice: what is parked later belongs to the new holder, and outlives the first."""
    bench = bench_with()
    lease = noticed(bench, process(1))
    bench.do(cmd.Attach(tenant=BEN, lease=lease.id, request_id=RequestId("again"), process=process(2)))
    bench.wait(6)
    parking = parking_of(bench, lease)
    die(bench, process(1))
    assert parking.status is LeaseStatus.ACTIVE
    die(bench, process(2))
    assert reason(parking) is EndReason.HOLDER_GONE


def test_what_another_process_waits_to_go_on_with_is_kept_for_it() -> None:
    """The request names the parking lease; its first holder dies meanwhile. The end of the second ends both."""
    bench = bench_with()
    lease = noticed(bench, process(1))
    bench.wait(6)
    parking = parking_of(bench, lease)
    bench.claim(bench.lease("ann"))
    command = cmd.Acquire(
        tenant=BEN,
        lease=LeaseId("again"),
        request_id=RequestId("again"),
        wants=(),
        ttl_ns=seconds(300),
        resume=parking.id,
        process=process(2),
    )
    bench.do(command)
    die(bench, process(1))
    assert (parking.status, parking.process) == (LeaseStatus.ACTIVE, process(2))
    assert bench.lease("again").status is LeaseStatus.QUEUED
    die(bench, process(2))
    assert (reason(bench.lease("again")), reason(parking)) == (EndReason.HOLDER_GONE, EndReason.HOLDER_GONE)


def test_only_the_process_that_has_the_lease_now_ends_it() -> None:
    """Whoever says so names leases and process; those of another process stay, and so do those that are unknown."""
    bench = bench_with()
    lease = bench.granted(process=process(1))
    bench.do(cmd.HolderGone(process=process(2), leases=(lease.id, LeaseId("unknown"))))
    assert lease.end is None
    reused = msgspec.structs.replace(process(1), start_ticks=7)
    bench.do(cmd.HolderGone(process=reused, leases=(lease.id,)))
    assert lease.end is None, "the same pid of another process"


def test_storage_ends_when_nothing_may_save_to_it_any_more() -> None:
    """What runs under a lease of the holder has its grace, and its volume as long. Storage alone ends at once."""
    bench = Bench(inventory("n1", device("gpu0"), device("block", Kind.BLOCK)))
    bench.obedient = False
    one = process(1)
    device_lease, storage = bench.granted(process=one), bench.granted(disk(), name="state", process=one)
    other = bench.granted(disk(), process=process(2))
    die(bench, one)
    assert reason(device_lease) is EndReason.HOLDER_GONE
    assert storage.status is LeaseStatus.ACTIVE
    die(bench, one)
    assert storage.status is LeaseStatus.ACTIVE, "the guests have not been seen to be gone"
    bench.obey()
    assert device_lease.status is LeaseStatus.ENDED
    die(bench, one)
    assert reason(storage) is EndReason.HOLDER_GONE
    die(bench, process(2))
    assert reason(other) is EndReason.HOLDER_GONE


def test_an_end_that_began_before_keeps_its_reason() -> None:
    """Released, and being torn down; then the process ends, as programs do."""
    bench = bench_with()
    bench.obedient = False
    lease = bench.granted(process=process(1))
    bench.release(lease)
    die(bench, process(1))
    assert reason(lease) is EndReason.RELEASED


def test_a_repeated_acquire_does_not_bind_anew() -> None:
    """The answer was lost and the request comes again, from wherever: it has one effect."""
    bench = bench_with()
    lease = bench.granted(cores(1), request="one", process=process(1))
    assert bench.granted(cores(1), request="one", process=process(2)).id == lease.id
    assert lease.process == process(1)


def test_the_index_is_what_the_state_says() -> None:
    """Through every fact that changes it, and when an office starts."""
    bench, index = bench_with(), BoundLeases()
    seen = 0

    def follow() -> set[ProcessRecord]:
        nonlocal seen
        touched = index.note(event for _, events in bench.history[seen:] for event in events)
        seen = len(bench.history)
        fresh = BoundLeases()
        for lease in bench.state.leases.values():
            fresh.restored(lease)
        for one in (process(1), process(2), process(3)):
            said = {lease.id for lease in bench.state.leases.values() if lease.process == one and lease.end is None}
            assert set(index.of(one)) == set(fresh.of(one)) == said
        return touched

    first, second = bench.granted(cores(1), process=process(1)), bench.granted(cores(1), process=process(1))
    assert follow() == {process(1)}
    bench.do(cmd.Attach(tenant=first.tenant, lease=first.id, request_id=RequestId("a"), process=process(2)))
    assert follow() == {process(1), process(2)}
    bench.release(second)
    assert follow() == {process(1)}
    bench.granted(cores(1))
    assert follow() == set()
    assert list(index) == [process(2)]
    die(bench, process(2))
    assert follow() == {process(2)}
    assert len(index) == 0
    noticed(bench, process(3))
    follow()


def test_a_journal_from_before_there_were_processes_still_folds() -> None:
    """Its leases are bound to nothing: as before, they end by their time to live."""
    assert (
        msgspec.json.decode(b'{"lease":"L1","epoch":[1,2],"number":2,"request_id":"r","type":"attached"}') is not None
    )
    raw = b'{"type":"attached","lease":"L1","epoch":[1,2],"number":2,"request_id":"r"}'
    old = msgspec.json.decode(raw, type=ev.Attached)
    assert old.process is None
    record = {
        "id": "L1",
        "tenant": "ann",
        "request_id": "r",
        "fingerprint": "f",
        "wants": [],
        "ttl_ns": 5,
        "tier": "interactive",
        "arrival": 1,
        "asked_at_ns": 1,
        "asked_wall_ns": 1,
    }
    assert msgspec.convert(record, LeaseRecord).process is None
    assert "process" not in msgspec.to_builtins(msgspec.convert(record, LeaseRecord)), "and is not written for them"
