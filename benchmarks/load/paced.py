"""Open-loop load: requests at stated moments, again and again, whether or not the last were answered."""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load.http1 import Address, BadAnswer, Request, connect, take_answer

__all__ = ["Due", "Paced", "PacedSample"]

STUCK_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """One request, due ``at_s`` after the start and from then on every ``period_s``."""

    at_s: float
    period_s: float
    request: Request
    expect: str = ""
    expect_count: int = 1
    """How often the answer must have ``expect``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedSample:
    wall_s: float
    requests: int
    answer_ns: list[int]
    """From when a request was due until it was answered, so that waiting for a connection is counted."""
    late_ns_max: int
    """How far the generator itself was behind, at worst."""
    generator_cpu_s: float


class Paced:
    """A schedule on a few connections. It goes on where the last window stopped, so windows can follow each other."""

    def __init__(self, address: Address, schedule: Sequence[Due], *, connections: int) -> None:
        self._schedule = [
            (due, due.request.to_bytes(), due.expect.encode(), round(due.period_s * 1e9)) for due in schedule
        ]
        self._epoll = select.epoll()
        self._free: deque[socket.socket] = deque()
        self._out: dict[int, tuple[socket.socket, int, int, bytes]] = {}  # fd → socket, index, due, bytes so far
        for _ in range(connections):
            sock = connect(address)
            sock.setblocking(False)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self._free.append(sock)
        begin = time.perf_counter_ns()
        self._heap = [(begin + round(due.at_s * 1e9), index) for index, due in enumerate(schedule)]
        heapq.heapify(self._heap)

    def run(self, seconds: float) -> PacedSample:
        now_ns = time.perf_counter_ns
        cpu_before = time.process_time()
        started = now_ns()
        stop = started + round(seconds * 1e9)
        answer_ns: list[int] = []
        late_max = 0
        while (now := now_ns()) < stop:
            while self._heap[0][0] <= now and self._free:
                due_ns, index = heapq.heappop(self._heap)
                heapq.heappush(self._heap, (due_ns + self._schedule[index][3], index))
                late_max = max(late_max, now - due_ns)
                sock = self._free.popleft()
                data = self._schedule[index][1]
                if sock.send(data) != len(data):
                    raise BadAnswer("a request did not fit into the socket buffer")
                self._out[sock.fileno()] = (sock, index, due_ns, b"")
            wait_ns = min(self._heap[0][0], stop) - now if self._free else stop - now
            for fd, _ in self._epoll.poll(max(wait_ns, 0) / 1e9):
                self._receive(fd, answer_ns)
            if self._out and now - min(due for _, _, due, _ in self._out.values()) > STUCK_AFTER_S * 1e9:
                raise BadAnswer(f"no answer for {STUCK_AFTER_S:.0f} s")
        return PacedSample(
            wall_s=(now_ns() - started) / 1e9,
            requests=len(answer_ns),
            answer_ns=answer_ns,
            late_ns_max=late_max,
            generator_cpu_s=time.process_time() - cpu_before,
        )

    def close(self) -> None:
        for sock in [*self._free, *(sock for sock, _, _, _ in self._out.values())]:
            sock.close()
        self._epoll.close()

    def _receive(self, fd: int, answer_ns: list[int]) -> None:
        sock, index, due_ns, buffer = self._out[fd]
        data = sock.recv(1 << 18)
        if not data:
            raise BadAnswer("the server closed a connection")
        answer = take_answer(buffer + data)
        if answer is None:
            self._out[fd] = (sock, index, due_ns, buffer + data)
            return
        due, _, expect, _ = self._schedule[index]
        if not 200 <= answer.status < 300 or (expect and answer.body.count(expect) != due.expect_count):
            raise BadAnswer(f"answered {answer.status}: {answer.body[:400]!r}")
        answer_ns.append(time.perf_counter_ns() - due_ns)
        del self._out[fd]
        self._free.append(sock)
