"""An office's own journal as a workload: what was requested, when, and how long it ran."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest, JournalError
from sublet.office.journal import audit
from sublet.office.journal.reader import JournalReader
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import LeaseRecord
from sublet.simulate.replay import MODEL, ModelGpus, ReplayHardware
from sublet.simulate.workload import CELLS_MAX, Cell, WorkloadSession
from sublet.values import GIB, NS_PER_S, Exclusivity, Kind, LeaseId, NodeId
from sublet.wire.decoders import decoder
from sublet.wire.orders import Inventory

_PastEvent = ev.NodeJoined | ev.Queued | ev.Claimed | ev.Ending
_KINDS: Final = frozenset(str(fact.__struct_config__.tag) for fact in _PastEvent.__args__)
_decode: Final = decoder(_PastEvent).decode
_MIN: Final = 60 * NS_PER_S


def read_journal(path: Path) -> tuple[list[WorkloadSession], ReplayHardware]:
    """Each lease with GPUs that has ended, as a session of one cell, and the GPUs that the office had. The cell is as
    long as the lease was busy, or, where that was not told, as long as it was held."""
    leases: dict[LeaseId, LeaseRecord] = {}
    claimed_ns: dict[LeaseId, int] = {}
    nodes: dict[NodeId, Inventory] = {}
    found: list[tuple[int, LeaseRecord, int]] = []
    if not path.is_file():
        raise InvalidRequest(f"{path} is no file", do="Give the path of a journal.db, or of a backup of one.")
    reader, walk = JournalReader(path), audit.Walk()
    try:
        for record in reader.records():
            problem = walk.step(record)
            if problem is not None:
                raise JournalError(
                    f"the audit chain of {path} does not hold ({problem})", do="`sublet audit verify` says more."
                )
            match _decode(record.body) if record.kind in _KINDS else None:
                case ev.NodeJoined(inventory=inventory):
                    nodes[inventory.node] = inventory
                case ev.Queued(lease=lease) if any(want.kind is Kind.GPU for want in lease.wants):
                    leases[lease.id] = lease
                case ev.Claimed(lease=name) if name in leases:
                    claimed_ns[name] = record.ns
                case ev.Ending(lease=name) as ending if name in claimed_ns:
                    ran_ns = ending.busy_ns or record.ns - claimed_ns.pop(name)
                    lease = leases.pop(name)
                    found.append((lease.asked_wall_ns, lease, max(1, ran_ns)))
                case _:
                    pass
    finally:
        reader.close()
    if not found:
        raise InvalidRequest(
            f"no lease with a GPU has ended in {path}", do="Give the journal of an office with a past."
        )
    if len(found) > CELLS_MAX:
        raise InvalidRequest(f"{path} has more than {CELLS_MAX:,} leases with GPUs", do="Use a generated workload.")
    first_ns = min(requested_ns for requested_ns, _, _ in found)
    sessions = [
        _session(lease, (requested_ns - first_ns) / _MIN, ran_ns / _MIN) for requested_ns, lease, ran_ns in found
    ]
    return sorted(sessions, key=lambda session: session.start_min), _hardware(nodes)


def _session(lease: LeaseRecord, start_min: float, duration_min: float) -> WorkloadSession:
    [want] = [want for want in lease.wants if want.kind is Kind.GPU]
    cell = Cell(0.0, duration_min, want.count, want.amount / GIB, want.exclusivity is Exclusivity.SHARED, want.model)
    return WorkloadSession(
        lease.id,
        start_min,
        (cell,),
        start_min + duration_min,
        lease.tenant,
        lease.tier,
        pays_priority=lease.pays_priority,
    )


def _hardware(nodes: dict[NodeId, Inventory]) -> ReplayHardware:
    gpus_by_node = [[device for device in node.devices if device.kind is Kind.GPU] for node in nodes.values()]
    alike = Counter((device.model, device.capacity) for node in gpus_by_node for device in node)
    per_node = max(1, *map(len, gpus_by_node), 1)
    if not alike:
        return ReplayHardware(gpus=1, per_node=per_node)
    first, *others = (
        ModelGpus(gpus=count, model=model or MODEL, vram_gib=capacity / GIB)
        for (model, capacity), count in alike.most_common()
    )
    return ReplayHardware(
        gpus=first.gpus, model=first.model, vram_gib=first.vram_gib, per_node=per_node, beside=tuple(others)
    )
