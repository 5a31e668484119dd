"""Closed-loop clients: each repeats a cycle of requests, sending the next when the last was answered."""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load.http1 import Address, BadAnswer, Step, Template, connect, take_answer

__all__ = ["ClosedLoop", "ClosedSample"]

STUCK_AFTER_S = 30.0
"""A server that says nothing for this long has failed the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSample:
    """What one window of load came to."""

    wall_s: float
    cycles: int
    requests: int
    cycle_ns: list[int]
    """How long each finished cycle took."""
    step_ns: list[list[int]]
    """The same by step."""
    generator_cpu_s: float
    taken: list[dict[str, str]]
    """What the last answer of each cycle left, if it was asked for."""


class _Client:
    __slots__ = ("buffer", "cycle_started", "idle", "sock", "step", "step_started", "values")

    def __init__(self, sock: socket.socket, values: dict[str, bytes]) -> None:
        self.sock = sock
        self.values = values
        self.step = 0
        self.cycle_started = 0
        self.step_started = 0
        self.buffer = b""
        self.idle = True


class ClosedLoop:
    """A number of clients on connections of their own, kept open between windows."""

    def __init__(self, address: Address, steps: Sequence[Step], clients: Sequence[Mapping[str, str]]) -> None:
        self._steps = [Template(step) for step in steps]
        self._numbers = itertools.count(time.time_ns())  # so that a number is never used twice, not even by two runs
        self._epoll = select.epoll()
        self._clients: dict[int, _Client] = {}
        for number, own in enumerate(clients):
            sock = connect(address)
            sock.setblocking(False)
            values = {name: value.encode() for name, value in own.items()} | {"client": b"%d" % number}
            self._clients[sock.fileno()] = _Client(sock, values)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def run(self, seconds: float, *, cycles_max: int | None = None, keep_taken: bool = False) -> ClosedSample:
        """Load for so long, or until so many cycles were begun. A cycle that is not finished in time is finished and
        not counted, so that no window leaves anything behind.
        """
        clients, steps, poll = self._clients, self._steps, self._epoll.poll
        cycle_ns: list[int] = []
        step_ns: list[list[int]] = [[] for _ in steps]
        taken: list[dict[str, str]] = []
        begun = requests = busy = 0
        last = len(steps) - 1
        now_ns = time.perf_counter_ns
        cpu_before = time.process_time()
        started = now_ns()
        stop = started + round(seconds * 1e9)
        for client in clients.values():
            if cycles_max is not None and begun >= cycles_max:
                break
            begun += 1
            busy += 1
            self._begin(client)
        while busy:
            events = poll(STUCK_AFTER_S)
            if not events:
                raise BadAnswer(f"no answer for {STUCK_AFTER_S:.0f} s")
            for fd, _ in events:
                client = clients[fd]
                data = client.sock.recv(1 << 16)
                if not data:
                    raise BadAnswer(f"the server closed a connection after {requests} requests")
                if client.buffer:
                    data = client.buffer + data
                answer = take_answer(data)
                if answer is None:
                    client.buffer = data
                    continue
                client.buffer = b""
                now = now_ns()
                step = steps[client.step]
                if not 200 <= answer.status < 300 or step.expect not in answer.body:
                    raise BadAnswer(f"step {client.step + 1} was answered {answer.status}: {answer.body[:400]!r}")
                body = answer.body
                for name, before, after in step.take:
                    at = body.index(before) + len(before)
                    client.values[name] = body[at : body.index(after, at)]
                if now <= stop:
                    requests += 1
                    step_ns[client.step].append(now - client.step_started)
                if client.step < last:
                    client.step += 1
                    self._send(client)
                    continue
                if now <= stop:
                    cycle_ns.append(now - client.cycle_started)
                if keep_taken:
                    taken.append({name: value.decode() for name, value in client.values.items()})
                if now < stop and (cycles_max is None or begun < cycles_max):
                    begun += 1
                    self._begin(client)
                else:
                    busy -= 1
        wall = min(now_ns(), stop) - started
        return ClosedSample(
            wall_s=wall / 1e9,
            cycles=len(cycle_ns),
            requests=requests,
            cycle_ns=cycle_ns,
            step_ns=step_ns,
            generator_cpu_s=time.process_time() - cpu_before,
            taken=taken,
        )

    def close(self) -> None:
        for client in self._clients.values():
            client.sock.close()
        self._epoll.close()

    def _begin(self, client: _Client) -> None:
        client.step = 0
        client.values["n"] = b"%d" % next(self._numbers)
        client.cycle_started = time.perf_counter_ns()
        self._send(client)

    def _send(self, client: _Client) -> None:
        request = self._steps[client.step].request(client.values)
        client.step_started = time.perf_counter_ns()
        if client.sock.send(request) != len(request):
            raise BadAnswer("a request did not fit into the socket buffer")
