"""A program that counts on replicas: ``FOLDER EPOCH`` → one line per save that was answered, until it is ended. Of a
save whose fate it cannot know, since others have written so much meanwhile, it says so, and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

from sublet.errors import SubletError, VersionConflict
from sublet.replicated import FolderReplica, ReplicaGroup, ReplicatedCheckpoint
from sublet.state.replicated.results import UNKNOWN
from sublet.values import Epoch


def main() -> None:
    here, epoch = Path(sys.argv[1]), Epoch.parse(sys.argv[2])
    replicas = [FolderReplica(here / f"replica-{n}", log_bytes=1 << 15) for n in range(3)]
    with ReplicaGroup(replicas, patience=120.0) as group:
        store = ReplicatedCheckpoint("count", schema="n.v1", replicas=group, epoch=epoch)
        print("ready", flush=True)
        while True:
            found = store.load("n")
            version, count = (found.version, int(found.data)) if found is not None else (0, 0)
            try:
                store.save_bytes("n", b"%d" % (count + 1), expected=version)
            except VersionConflict:
                continue
            except SubletError as error:
                if error.kind == "CheckpointFailed" and error.reason == UNKNOWN:
                    print(UNKNOWN, flush=True)
                    continue
                print(error.kind, error.reason, flush=True)
                return
            print(count + 1, flush=True)


if __name__ == "__main__":
    main()
