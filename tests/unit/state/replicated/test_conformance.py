"""Every replica keeps the contract: in memory, in a folder, in an object store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from sublet.state.replicated.folder import FolderReplica
from sublet.state.replicated.memory import MemoryReplica
from sublet.state.replicated.replica import Replica
from sublet.state.replicated.s3 import S3Replica
from sublet.testing import ReplicaConformance
from tests.unit.state.replicated.s3_stage import client, object_store


class TestMemoryReplica(ReplicaConformance):
    def new_replica(self) -> Replica:
        return MemoryReplica()

    def again(self, replica: Replica) -> Replica:
        return replica


class TestFolderReplica(ReplicaConformance):
    log_bytes = 1 << 20

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Iterator[None]:
        self._opened: list[FolderReplica] = []
        self._places = (tmp_path / str(n) for n in itertools.count())
        yield
        for replica in self._opened:
            replica.close()

    def new_replica(self) -> Replica:
        return self._at(next(self._places))

    def again(self, replica: Replica) -> Replica:
        assert isinstance(replica, FolderReplica)
        return self._at(replica.folder)

    def _at(self, place: Path) -> Replica:
        replica = FolderReplica(place, log_bytes=self.log_bytes)
        self._opened.append(replica)
        return replica


class TestFolderReplicaWhoseLogIsSoonFull(TestFolderReplica):
    """Compaction in the middle of everything, and under the feet of other handles."""

    log_bytes = 1 << 14


class TestObjectsInMemory(ReplicaConformance):
    """The object store's replica, on a store without a network."""

    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self._objects = MemoryStore()
        self._prefixes = {}
        self._count = itertools.count()

    _prefixes: dict[str, str]

    def new_replica(self) -> Replica:
        prefix = f"some/where/{next(self._count)}"
        replica = S3Replica(self._objects, prefix)
        self._prefixes[replica.identity] = prefix
        return replica

    def again(self, replica: Replica) -> Replica:
        return S3Replica(self._objects, self._prefixes[replica.identity])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store() as address:
        yield address


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestS3Replica(ReplicaConformance):
    """Over HTTP, as any S3-compatible store is spoken to."""

    @pytest.fixture(autouse=True)
    def _store(self, endpoint: str, request: pytest.FixtureRequest) -> None:
        self._client = client(endpoint)
        self._name = request.node.name
        self._prefixes = {}
        self._count = itertools.count()

    _prefixes: dict[str, str]

    def new_replica(self) -> Replica:
        prefix = f"{self._name}/{next(self._count)}"
        replica = S3Replica(self._client, prefix)
        self._prefixes[replica.identity] = prefix
        return replica

    def again(self, replica: Replica) -> Replica:
        return S3Replica(self._client, self._prefixes[replica.identity])
