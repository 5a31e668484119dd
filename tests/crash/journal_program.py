"""What is killed: the real ledger and the real journal, through a grant, a renewal, a revoke, and what keeps a journal.

``python -m tests.crash.journal_program`` reads one order per line from its standard input and carries it out in a fork
that it traces. So a run costs no interpreter start, and the first system call that is counted is the first of the
story. What the child was answered goes into a shared page of memory, which takes no system call and outlives a kill.

Everything is deterministic: time, ids, order. A run that is not killed is therefore what every killed run is compared
with.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sublet.errors import JournalError
from sublet.office.journal import journal as journal_opening
from sublet.office.journal.backup import restore
from sublet.office.journal.journal import Journal
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.events import Event
from sublet.office.ledger.fold import apply
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, Now, Want
from sublet.office.ledger.state import State
from sublet.values import GIB, NS_PER_S, BudgetWindow, Epoch, Kind, LeaseId, NodeId, RequestId, ResourceId
from sublet.wire.orders import Device, Inventory, TornDown

WALL_NS: Final = 1_700_000_000 * NS_PER_S
DOMAIN: Final = "boot-1/time:[0]"
NODE: Final = NodeId("n1")
GPU: Final = ResourceId("n1/gpu0")
SHORT_LOG: Final = 1 << 18
"""A shorter log is laid out by the same calls, and a thousand of them sooner."""
REFUSED: Final = 3
"""Exit status of a run that ended with a JournalError, as it should after a failed write."""


class Diary:
    """What was answered, kept where a kill does not reach and no system call is made."""

    def __init__(self, path: Path, *, size: int = 1 << 16) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, size)
        self._page = mmap.mmap(fd, size)
        os.close(fd)
        self._at = 0

    def note(self, what: dict[str, object]) -> None:
        line = json.dumps(what).encode() + b"\n"
        self._page[self._at : self._at + len(line)] = line
        self._at += len(line)

    @staticmethod
    def read(path: Path) -> list[dict[str, object]]:
        """Whole lines only: one that was being noted when the kill came was not answered."""
        text = path.read_bytes().rstrip(b"\0") if path.exists() else b""
        return [json.loads(line) for line in text.split(b"\n")[:-1]]


def digest(state: State) -> str:
    return hashlib.sha256(state.snapshot()).hexdigest()


class SmallOffice:
    """A ledger on a journal: a batch is committed before its answer is noted."""

    def __init__(self, home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
        self.journal = Journal.open(home, wall_ns=WALL_NS, anchors=anchors)
        self.note = note
        found = self.journal.recover()
        state = State.restore(found.snapshot) if found.snapshot is not None else None
        self.ledger = Ledger(Policy(), state)
        last_ns = found.last_ns or NS_PER_S
        for entry in found.entries:
            apply(self.ledger.state, entry.event, Now(entry.ns, entry.wall_ns))
        self.ns = last_ns + NS_PER_S
        self.opening = cmd.OpenOffice(
            incarnation=found.incarnation, clock_domain=DOMAIN, last_ns=found.last_ns, restored=found.restored
        )

    def open(self) -> None:
        device = Device(id=GPU, kind=Kind.GPU, capacity=16 * GIB, model="tests")
        self.do(self.opening, cmd.NodeUp(inventory=Inventory(node=NODE, domain="d1", devices=(device,))))

    def now(self) -> Now:
        self.ns += NS_PER_S // 10
        return Now(self.ns, WALL_NS + self.ns)

    def do(self, *commands: cmd.Command) -> LeaseRecord | None:
        """One batch. What the last command was granted, if it was."""
        now, events, lease = self.now(), list[Event](), None
        for command in commands:
            outcome = self.ledger.handle(command, now)
            if isinstance(outcome.answer, Exception):
                raise outcome.answer
            events += outcome.events
            lease = outcome.answer.lease if isinstance(outcome.answer, Granted) else None
        self.journal.commit(events, now)
        said: dict[str, object] = {"books": self.books()}
        if lease is not None:
            assert lease.epoch is not None
            said["epoch"] = str(lease.epoch)
        self.note(said)
        return lease

    def books(self) -> str:
        """What the ledger knows, as one short text to compare."""
        return digest(self.ledger.state)

    def acquire(self, name: str) -> LeaseRecord:
        lease = self.do(
            cmd.Acquire(
                tenant=LOCAL_TENANT,
                lease=LeaseId(name),
                request_id=RequestId(f"request-{name}"),
                wants=(Want(kind=Kind.GPU, amount=GIB),),
                ttl_ns=300 * NS_PER_S,
                wait_ns=0,
            )
        )
        assert lease is not None
        return lease

    def tear_down(self) -> None:
        """Report everything clean that waits for it."""
        for resource in list(self.ledger.state.resources.values()):
            for piece in list(resource.slices.values()):
                if piece.state == "teardown":
                    report = TornDown(node=NODE, lease=piece.lease, epoch=piece.epoch, resources=(resource.id,))
                    self.do(cmd.AgentReport(report=report))

    def revoke_all(self) -> None:
        for lease in list(self.ledger.state.leases.values()):
            if lease.status in ("active", "granted", "noticed"):
                self.do(cmd.Revoke(lease=lease.id, notice_ns=0))
        self.tear_down()


# ---- the stories ----


def begin(home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
    """The first office of a folder, and its first lease."""
    office = SmallOffice(home, anchors, note)
    office.open()
    office.acquire("l0")
    office.journal.close()


def life(home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
    """A restart; then a grant, a renewal, a revoke, a snapshot, another grant, an idle beat, a backup, the end."""
    office = SmallOffice(home, anchors, note)
    office.open()
    office.revoke_all()
    lease = office.acquire("l1")
    assert lease.epoch is not None
    office.do(cmd.Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch, busy_ns=5))
    office.revoke_all()
    office.journal.compact(office.ledger.state.snapshot(), office.now())
    lease = office.acquire("l2")
    assert lease.epoch is not None
    office.do(cmd.Renew(tenant=LOCAL_TENANT, lease=lease.id, epoch=lease.epoch, busy_ns=7))
    office.ns += 60 * NS_PER_S
    office.journal.beat(office.now())
    backup = home.parent / "made.backup"
    office.journal.backup(backup)
    note({"backup": str(backup)})
    office.revoke_all()
    office.journal.close()


CREDITS: Final = {"c1": 300, "c2": 40_000}


def credit(office: SmallOffice, name: str) -> None:
    office.do(
        cmd.CreditBudget(tenant=LOCAL_TENANT, per=BudgetWindow.TOTAL, amount=CREDITS[name], request_id=RequestId(name))
    )


def spend(home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
    """A budget that runs out under a lease, with credit before and after it; a snapshot and a restart between."""
    office = SmallOffice(home, anchors, note)
    office.open()
    office.revoke_all()
    office.do(cmd.SetBudget(tenant=LOCAL_TENANT, per=BudgetWindow.TOTAL, amount=2_000))
    credit(office, "c1")
    office.acquire("l1")
    office.ns += 7 * NS_PER_S
    office.do(cmd.Tick())
    office.journal.compact(office.ledger.state.snapshot(), office.now())
    office.ns += 2 * NS_PER_S
    office.do(cmd.Tick())
    credit(office, "c2")
    credit(office, "c1")
    office.journal.close()
    office = SmallOffice(home, anchors, note)
    office.open()
    credit(office, "c2")
    office.revoke_all()
    office.journal.close()


def put_back(home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
    """An older backup takes the place of the journal."""
    restore(home.parent / "old.backup", home, wall_ns=WALL_NS, anchors=anchors)
    note({"restored": True})


def go_on(home: Path, anchors: Path, note: Callable[[dict[str, object]], None]) -> None:
    """What the next office does first: it opens, ends what lives, and grants."""
    office = SmallOffice(home, anchors, note)
    office.open()
    office.revoke_all()
    office.acquire("l9")
    office.journal.close()


STORIES: Final[dict[str, Callable[[Path, Path, Callable[[dict[str, object]], None]], None]]] = {
    "begin": begin,
    "life": life,
    "put_back": put_back,
    "go_on": go_on,
    "spend": spend,
}


def epochs_in(notes: Sequence[dict[str, object]]) -> list[Epoch]:
    """Every epoch that somebody was answered with."""
    return [Epoch.parse(str(note["epoch"])) for note in notes if "epoch" in note]


if __name__ == "__main__":
    from tests.crash.serving import take_orders  # which stands on this module

    journal_opening.LOG_BYTES = SHORT_LOG  # type: ignore[misc]
    take_orders(STORIES, refused=(JournalError,))
