"""A thousand leases in one request, durable and confirmed by their machine: ours against etcd.

Each lease has an id, an epoch and a deadline of its own, and its record is on disk before the answer. etcd has no
request for many leases, so the same number is granted one by one, each with a record under it (two requests), by one
client and by 64 at once. Ours is one client with one request. The release of all in one message is shown beside it.
"""

from __future__ import annotations

import json
import time
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.http1 import Request, ask
from benchmarks.load.remote import ClosedGenerator
from benchmarks.ours import DISTRIBUTIONS, LEASE_BYTES, Office
from benchmarks.peers.etcd import Etcd

LEASES: Final = 1000
PAIRS: Final = 9
CLIENTS: Final = (1, 64)
LIMIT_S: Final = 30.0


def rate_name(clients: int) -> str:
    return f"leases granted, 1,000 in one request; etcd by {clients} client{'s' if clients > 1 else ''}"


def measure(bench: Bench) -> list[Figure]:
    bench.versions["etcd"] = Etcd.version()
    leases, pairs = bench.either(LEASES, 100), bench.either(PAIRS, 1)
    figures: list[Figure] = []
    released: list[float] = []
    with Office(bench.folder) as office, Etcd(bench.folder) as etcd:
        number = 0

        def ours() -> float:
            nonlocal number
            number += 1
            rate, rate_back = _one_request(office, number, leases)
            released.append(rate_back)
            return rate

        for clients in CLIENTS:
            steps, each = etcd.cycle()[:2], [dict(etcd.client(one)) for one in range(clients)]
            with ClosedGenerator(etcd.address, steps, each) as generator:

                def theirs(generator: ClosedGenerator = generator) -> float:
                    sample = generator.run(LIMIT_S, cycles_max=leases)
                    return sample.cycles / sample.wall_s

                own, peer = bench.pairs(
                    rate_name(clients),
                    ours,
                    theirs,
                    pairs=pairs,
                    show=lambda a, b: f"sublet {a:,.0f}/s, etcd {b:,.0f}/s",
                )
            figures.append(figure(rate_name(clients), "1/s", own, peer, peer_name="etcd", higher_is_better=True))
    figures.append(figure("leases released, 1,000 in one message", "1/s", released))
    bench.note("etcd: grant, then put under the lease, for each; its JSON gateway translates to gRPC inside it.")
    return figures


def _one_request(office: Office, number: int, leases: int) -> tuple[float, float]:
    """Leases granted per second, and given back."""
    wants = [{"kind": "memory", "amount": LEASE_BYTES}]
    request = {"request_id": f"batch-{number}", "wants": wants, "ttl": 60.0, "wait": 0.0, "holder": "benchmark"}
    body = json.dumps({"request": request, "count": leases, "at_least": leases})
    began = time.monotonic()
    answer = ask(office.address, Request(method="POST", path="/v1/acquisitions", body=body), timeout_s=LIMIT_S)
    took = time.monotonic() - began
    granted = json.loads(answer.body)["leases"]
    if len(granted) != leases:
        raise RuntimeError(f"only {len(granted)} of {leases} leases were granted.")
    items = [{"lease": one["id"], "epoch": one["epoch"]} for one in granted]
    body = json.dumps({"items": items})
    began = time.monotonic()
    ask(office.address, Request(method="POST", path="/v1/releases", body=body), timeout_s=LIMIT_S)
    return leases / took, leases / (time.monotonic() - began)


ROW: Final = Row(
    name="batch_acquire",
    title="a thousand leases in one request, durable, against etcd",
    goals=[Goal(figure=rate_name(1), of="ratio", at_least=10)],
    measure=measure,
    limit_s=300,
    distributions=DISTRIBUTIONS,
)
