"""Compare-and-swap on three replicas in folders, every one durable, against one etcd node, with 1 and 16 clients.

Ours writes to three logs on the same disk, each synced, and waits for two; etcd is one member, which syncs one log. So
ours has three times the disk's work, for what survives the loss of any replica. Each client has a key of its own and
swaps 200 bytes, expecting what it wrote last.

Our clients are threads of one program on one group of replicas, as they are in a program; etcd's are connections of the
generator to its JSON gateway, as in the other rows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.closed import ClosedSample
from benchmarks.load.http1 import Step
from benchmarks.load.remote import ClosedGenerator
from benchmarks.peers.etcd import Etcd, encoded
from sublet.state.replicated.folder import FolderReplica
from sublet.state.replicated.group import ReplicaGroup, nonce
from sublet.state.replicated.register import CasOperation, OpenOperation, OperationDone, Tenure
from sublet.values import Epoch

CLIENTS: Final = (1, 16)
PAIRS: Final = 9
WINDOW_S: Final = 2.0
VALUE: Final = b"x" * 200


def rate_name(clients: int) -> str:
    return f"compare-and-swaps, {_clients(clients)}"


@dataclass(slots=True)
class _Sample:
    wall_s: float
    took_ns: list[int]

    @property
    def rate(self) -> float:
        return len(self.took_ns) / self.wall_s


class _Client:
    """One key, and what it is known to hold."""

    def __init__(self, group: ReplicaGroup, number: int) -> None:
        self.group, self.key, self.version = group, f"bench/{number}", 0
        self.tenure = Tenure(office="bench", epoch=Epoch(1, 1), nonce=nonce)
        opened = group.run(self.key, OpenOperation(group.view, self.tenure))
        assert isinstance(opened, OperationDone)
        self.version = opened.state.version

    def run(self, until: float, took_ns: list[int]) -> None:
        while time.monotonic() < until:
            began = time.perf_counter_ns()
            operation = CasOperation(self.group.view, self.tenure, expected=self.version, write=nonce(), body=VALUE)
            result = self.group.run(self.key, operation)
            took_ns.append(time.perf_counter_ns() - began)
            if not isinstance(result, OperationDone):
                raise RuntimeError(f"a compare-and-swap came to {result}")
            self.version = result.state.version


class _Ours:
    def __init__(self, folder: Path, clients: int) -> None:
        replicas = [FolderReplica(folder / f"replica-{n}") for n in range(3)]
        self.group = ReplicaGroup(replicas, office="bench")
        self.clients = [_Client(self.group, number) for number in range(clients)]

    def run(self, seconds: float) -> _Sample:
        took: list[list[int]] = [[] for _ in self.clients]
        began = time.monotonic()
        until = began + seconds
        if len(self.clients) == 1:
            self.clients[0].run(until, took[0])
        else:
            threads = [
                threading.Thread(target=client.run, args=(until, own))
                for client, own in zip(self.clients, took, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return _Sample(time.monotonic() - began, [one for own in took for one in own])


def _swap() -> Step:
    compare = '{"target":"MOD","key":"<<key>>","mod_revision":"<<revision>>"}'
    put = '{"request_put":{"key":"<<key>>","value":"<<value>>"}}'
    return Step(
        path="/v3/kv/txn",
        body=f'{{"compare":[{compare}],"success":[{put}]}}',
        expect='"succeeded":true',
        take={"revision": ('"revision":"', '"')},
    )


def measure(bench: Bench) -> list[Figure]:
    bench.versions["etcd"] = Etcd.version()
    figures: list[Figure] = []
    window_s, pairs = bench.either(WINDOW_S, 0.5), bench.either(PAIRS, 1)
    for clients in CLIENTS:
        figures.extend(_one_level(bench, clients, window_s, pairs))
    bench.note("etcd is spoken to through its JSON gateway; a gRPC client would have less to wait for.")
    bench.note(f"Windows of {window_s:g} s; {pairs} pairs.")
    return figures


def _one_level(bench: Bench, clients: int, window_s: float, pairs: int) -> list[Figure]:
    folder = bench.folder / f"{clients}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(Etcd(folder))
        ours = _Ours(folder, clients)
        stack.callback(ours.group.close)
        values = [
            {"key": encoded(f"bench/{n}"), "value": encoded(VALUE.decode()), "revision": "0"} for n in range(clients)
        ]
        load = stack.enter_context(ClosedGenerator(etcd.address, [_swap()], values))
        own, peer = bench.pairs(
            _clients(clients),
            lambda: ours.run(window_s),
            lambda: load.run(window_s),
            pairs=pairs,
            show=lambda a, b: f"sublet {a.rate:,.0f}/s, etcd {_rate(b):,.0f}/s",
        )
    return [
        figure(
            rate_name(clients),
            "1/s",
            [sample.rate for sample in own],
            [_rate(sample) for sample in peer],
            peer_name="etcd",
            higher_is_better=True,
        ),
        figure(
            f"time of one, {_clients(clients)}",
            "ms",
            [_median_ms(sample.took_ns) for sample in own],
            [_median_ms(sample.cycle_ns) for sample in peer],
            peer_name="etcd",
            operations=[one / 1e6 for sample in own for one in sample.took_ns],
            peer_operations=[one / 1e6 for sample in peer for one in sample.cycle_ns],
        ),
    ]


def _rate(sample: ClosedSample) -> float:
    return sample.cycles / sample.wall_s


def _median_ms(took_ns: list[int]) -> float:
    return sorted(took_ns)[len(took_ns) // 2] / 1e6


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


ROW: Final = Row(
    name="register_cas",
    title="compare-and-swap on three durable replicas, against one etcd node",
    goals=[Goal(figure=rate_name(1), of="ratio", at_least=1)],
    measure=measure,
    limit_s=500,
    distributions=("sublet", "blake3"),
)
