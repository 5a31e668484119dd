"""State on three replicas of which one is killed: nothing is lost, and a new one takes its seat.

Run it: ``python examples/three_replicas.py``
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import sublet
from sublet.replicated import FolderReplica, ReplicaGroup, ReplicaPolicy, ReplicatedCheckpoint


def main(here: Path) -> None:
    """Three folders stand for three disks."""
    replicas = [FolderReplica(here / name) for name in ("one", "two", "three")]
    policy = ReplicaPolicy(min_replicas=3, read_quorum=2, write_quorum=2)
    old, new = sublet.Epoch(1, 1), sublet.Epoch(1, 2)  # in a program: lease.epoch

    with ReplicaGroup(replicas, policy) as group:
        checkpoints = ReplicatedCheckpoint("training", schema="counter.v1", replicas=group, epoch=old)
        for step in range(1, 4):
            checkpoints.save_bytes("job", str(step).encode(), effect=(f"job/{step}", "f", step))

        shutil.rmtree(here / "three")
        print("one of three disks is gone")
        checkpoints.save_bytes("job", b"4", effect=("job/4", "f", 4))
        for view in group.health():
            print(f"  {view.identity[:6]} {view.health}")

        group.replace(replicas[2], FolderReplica(here / "four"), epoch=new)
        print("a new one has its seat:", ", ".join(view.health for view in group.health() if view.role == "voter"))
        shutil.rmtree(here / "two")

        successor = ReplicatedCheckpoint("training", schema="counter.v1", replicas=group, epoch=new)
        successor.open("job")
        found = successor.load("job")
        assert found is not None
        print(f"and with another disk gone, version {found.version} is still {found.data.decode()!r}")
        try:
            checkpoints.save_bytes("job", b"late")
        except sublet.StaleEpoch as error:
            print(f"the old lease is told: {error.message}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
