"""The thread of one replica: takes all waiting requests at once, so that they share a write and a sync."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from sublet.background import start_thread
from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.cell import Answer, Query
from sublet.state.replicated.folder import FolderReplica, StartedRequests
from sublet.state.replicated.phases import SendToReplica
from sublet.state.replicated.replica import Replica, ReplicaFaulty, ReplicaHealth, ReplicaSilent

BATCH_MAX: Final = 64
WAITING_MAX: Final = 512
"""Requests that may wait for one replica; one that is so far behind counts as silent."""

ReplicaReply: TypeAlias = tuple[int, str, Answer | None]


@dataclass(slots=True)
class ReplicaRequest:
    """Something to be asked of one replica, and where the answer goes."""

    key: str
    send: SendToReplica
    turn: int
    replies: queue.SimpleQueue[ReplicaReply]
    supply: Callable[[str, str], bytes | None]


NOTHING: Final = ReplicaRequest("", SendToReplica("", Query(0)), 0, queue.SimpleQueue(), lambda _key, _name: None)
"""Stands for an empty queue where None stands for the end."""


class ReplicaThread:
    """The thread of one replica.

    Where a replica can be begun with (``begin``: everything but the sync), that is done at once in the thread of the
    asker, and only the sync is waited for here: handing work from thread to thread costs more than the work.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.identity = replica.identity
        self.health, self.detail = ReplicaHealth.UNKNOWN, ""
        self._requests: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._waiting = 0
        """Requests that are in the queue or in the thread's hands. What is begun elsewhere must find none, or the
        thread would wait for the replica while what frees the replica waits for the thread."""
        self._quick = replica if isinstance(replica, FolderReplica) else None
        self._thread = start_thread("replica", self._run, again=True, called=f"replica-{self.identity[:8]}")

    def ask(self, request: ReplicaRequest) -> None:
        """Have it asked; the answer comes in the request's queue."""
        with self._gate:
            if self._waiting > WAITING_MAX:
                request.replies.put((request.turn, self.identity, None))
                return
            if self._quick is not None and not self._waiting and not request.send.packs:
                try:
                    started = self._quick.begin([(request.key, request.send.request)])
                except ReplicaSilent as error:
                    self._deliver([request], None, error)
                    return
                if started is not None and not started.unsettled:
                    self._deliver([request], started.replies)
                    return
                if started is not None:
                    self._waiting += 1
                    self._requests.put((request, started))
                    return
            self._waiting += 1
            self._requests.put(request)

    def close(self, patience_s: float) -> None:
        """Let it finish what waits."""
        self.stop_soon()
        self._thread.join(patience_s)

    def stop_soon(self) -> None:
        """Have the thread end when it has done what waits, and wait for nothing."""
        self._requests.put(None)

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Wait for something, and do it; False at the end. Between two turns nothing is held of what was asked, so a
        thread that waits keeps no group alive."""
        item = self._requests.get()
        while item is not NOTHING:
            if item is None:
                return False
            if isinstance(item, tuple):
                self._finish(*item)
                return True
            batch = [item]
            item = self._more(batch)
            self._carry_out(batch)
        return True

    def _more(self, batch: list[ReplicaRequest]) -> _Item:
        while len(batch) < BATCH_MAX:
            try:
                item = self._requests.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, ReplicaRequest):
                return item
            batch.append(item)
        return NOTHING

    def _finish(self, request: ReplicaRequest, started: StartedRequests) -> None:
        assert self._quick is not None
        try:
            replies = self._quick.finish(started)
        except ReplicaSilent as error:
            self._done(1)
            self._deliver([request], None, error)
        else:
            self._done(1)
            self._deliver([request], replies)

    def _carry_out(self, batch: list[ReplicaRequest]) -> None:
        try:
            for request in batch:
                self._put_packs(request)
            replies = self.replica.ask([(request.key, request.send.request) for request in batch])
        except ReplicaSilent as error:
            self._done(len(batch))
            self._deliver(batch, None, error)
        except Exception as error:  # noqa: BLE001 - a replica of any make; without its thread no request is answered
            self._done(len(batch))
            self._deliver(batch, None, ReplicaFaulty(f"the replica failed: {type(error).__name__}: {error}"))
        else:
            self._done(len(batch))
            self._deliver(batch, replies)

    def _done(self, count: int) -> None:
        with self._gate:
            self._waiting -= count

    def _deliver(
        self, batch: list[ReplicaRequest], replies: Sequence[Answer] | None, error: ReplicaSilent | None = None
    ) -> None:
        self.health = ReplicaHealth.HEALTHY if error is None else error.health
        self.detail = "" if error is None else error.message
        answers = replies if replies is not None else [None] * len(batch)
        for request, answer in zip(batch, answers, strict=True):
            request.replies.put((request.turn, self.identity, answer))

    def _put_packs(self, request: ReplicaRequest) -> None:
        for name in request.send.packs:
            data = request.supply(request.key, name)
            if data is not None:
                self.replica.put_pack(request.key, name, data)


_Item: TypeAlias = "ReplicaRequest | tuple[ReplicaRequest, StartedRequests] | None"
