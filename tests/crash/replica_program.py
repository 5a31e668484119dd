"""What is killed: a folder replica through its first opening, promises, writes, packs, a compaction, a checkpoint.

The same scheme as ``journal_program``: forks of one process, traced from their first call on, with a diary that a kill
cannot reach. Every story is deterministic but for identities and nonces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import Accept, AcceptedWrite, Here, Install, MissingPacks, Prepare, Query, ReplicaCell
from sublet.state.replicated.folder import FolderReplica
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.replica import PackName
from sublet.values import Epoch
from tests.crash.serving import serve

Note = Callable[[dict[str, object]], None]
PACK: Final = str(PackName(1, 1, 1, "ab" * 8, "cd" * 16))
LOG_BYTES: Final = 1 << 14
KEYS: Final = ("a", "b")


def ballot(n: int) -> Ballot:
    """Of epoch 1.n."""
    return Ballot(1, "tests", Epoch(1, n), 0, b"nonce678")


def opened(home: Path) -> FolderReplica:
    """The replica, seated; both may be done already."""
    replica = FolderReplica(home, log_bytes=LOG_BYTES)
    if replica.known() is None:
        replica.ask([("", Install(ReplicaSet(1, Seats((replica.identity,), 1, 1))))])
    return replica


def cell_of(replica: FolderReplica, key: str) -> ReplicaCell:
    (here,) = replica.ask([(key, Query(1))])
    assert isinstance(here, Here)
    return ReplicaCell(here.promised, here.accepted)


def said(replica: FolderReplica, note: Note, *requests: tuple[str, Prepare | Accept]) -> None:
    """Ask, and note what the cells are now: that was answered."""
    answers = replica.ask(list(requests))
    assert not any(isinstance(answer, MissingPacks) for answer in answers)
    note({key: cell_of(replica, key).pack().hex() for key in KEYS})


def begin(home: Path, note: Note) -> None:
    """A folder becomes a replica, and promises."""
    replica = opened(home)
    note({key: ReplicaCell().pack().hex() for key in KEYS})
    said(replica, note, ("a", Prepare(1, ballot(1))))
    said(
        replica, note, ("a", Accept(1, AcceptedWrite(WriteStamp(ballot(1), 0), b"first"))), ("b", Prepare(1, ballot(1)))
    )
    replica.close()


def put(home: Path, note: Note) -> None:
    """Promises, writes of several sizes, a write with a pack, a sweep."""
    replica = opened(home)
    note({key: cell_of(replica, key).pack().hex() for key in KEYS})
    said(replica, note, ("a", Prepare(1, ballot(5))))
    said(replica, note, ("a", Accept(1, AcceptedWrite(WriteStamp(ballot(5), 0), bytes(1500)))))
    replica.put_pack("b", PACK, b"x" * 3000)
    packed = AcceptedWrite(WriteStamp(ballot(6), 0), b"packed", (PACK,))
    said(replica, note, ("b", Accept(1, packed)), ("a", Accept(1, AcceptedWrite(WriteStamp(ballot(5), 1), b"second"))))
    plain = AcceptedWrite(WriteStamp(ballot(6), 1), b"without")
    said(replica, note, ("b", Accept(1, plain)))
    replica.sweep("b", plain.stamp, [PACK])
    replica.close()


def fill(home: Path, note: Note) -> None:
    """So many writes that the log is made anew in the middle of them."""
    replica = opened(home)
    note({key: cell_of(replica, key).pack().hex() for key in KEYS})
    for seq in range(8):
        said(replica, note, ("a", Accept(1, AcceptedWrite(WriteStamp(ballot(9), seq), bytes([seq]) * 2400))))
    replica.close()


STORIES: Final = {"begin": begin, "put": put, "fill": fill}


def main() -> None:
    serve(STORIES)


if __name__ == "__main__":
    main()
