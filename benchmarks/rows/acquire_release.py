"""A lease acquired and released, every answer durable: ours against etcd, with 1, 8 and 64 clients.

Both sides keep their state on the same disk with fsync on, both are driven by the same generator (``benchmarks.load``)
over keep-alive connections, and both share the machine's cores with it. The transport is what each offers to a client
on the same machine: a unix socket here, TCP on loopback there.

Before the pairs, the same generator runs against a server that does nothing, which shows its ceiling, and against the
office with a question that needs no decision, no disk and no supervisor, which shows the ceiling of that; and each
window says how much of a core the generator used. A side whose generator was near a full core was not measured to its
end.
"""

from __future__ import annotations

import contextlib
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.closed import ClosedSample
from benchmarks.load.remote import ClosedGenerator
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.etcd import Etcd
from benchmarks.peers.null import NullServer
from benchmarks.procs import cpu_seconds

CLIENTS: Final = (1, 8, 64)
PAIRS: Final = 9
WINDOW_S: Final = 2.0


def rate_name(clients: int) -> str:
    return f"leases acquired and released, {_clients(clients)}"


def measure(bench: Bench) -> list[Figure]:
    bench.versions["etcd"] = Etcd.version()
    figures: list[Figure] = []
    window_s, pairs = bench.either(WINDOW_S, 0.5), bench.either(PAIRS, 1)
    with NullServer(bench.folder) as null:
        figures.extend(_ceiling(bench, null, "a server that does nothing", window_s))
    with Office(bench.folder) as office, Etcd(bench.folder) as etcd:
        figures.extend(_ceiling(bench, office, "the office, which only says who it is", window_s))
        for clients in CLIENTS:
            figures.extend(_one_level(bench, office, etcd, clients, window_s, pairs))
    bench.note(
        "A cycle is acquire and release for us (2 requests, 2 durable writes), and grant, put under the lease and "
        "revoke for etcd (3 and 3). etcd is spoken to through its JSON gateway, which translates to gRPC inside it; "
        "a gRPC client would have less to wait for."
    )
    bench.note(f"Windows of {window_s:g} s; {pairs} pairs. The generator shares the cores with both sides.")
    return figures


def _ceiling(bench: Bench, server: NullServer | Office, what: str, window_s: float) -> list[Figure]:
    """How many cycles of two requests pass between the generator and a server that decides nothing."""
    steps = server.nothing() if isinstance(server, Office) else server.cycle()
    figures = []
    for clients in CLIENTS:
        with ClosedGenerator(server.address, steps, [{}] * clients) as generator:
            samples = [generator.run(window_s) for _ in range(3)]
        rates = [_rate(sample) for sample in samples]
        share = max(sample.generator_cpu_s / sample.wall_s for sample in samples)
        bench.say(f"against {what}, {_clients(clients)}: {rates[-1]:,.0f} cycles/s, generator {share:.0%} of a core")
        figures.append(figure(f"the generator against {what}, {_clients(clients)}", "1/s", rates))
    return figures


def _one_level(bench: Bench, office: Office, etcd: Etcd, clients: int, window_s: float, pairs: int) -> list[Figure]:
    own = [dict(office.client(number)) for number in range(clients)]
    theirs = [dict(etcd.client(number)) for number in range(clients)]
    used = {"sublet": 0.0, "etcd": 0.0}
    with contextlib.ExitStack() as stack:
        our_load = stack.enter_context(ClosedGenerator(office.address, office.cycle(), own))
        peer_load = stack.enter_context(ClosedGenerator(etcd.address, etcd.cycle(), theirs))

        def run(name: str, load: ClosedGenerator, pid: int) -> ClosedSample:
            before = cpu_seconds(pid)
            sample = load.run(window_s)
            used[name] += (cpu_seconds(pid) - before) / sample.wall_s / (pairs + 1)
            return sample

        ours, peer = bench.pairs(
            _clients(clients),
            lambda: run("sublet", our_load, office.pid),
            lambda: run("etcd", peer_load, etcd.child.pid),
            pairs=pairs,
            show=lambda a, b: f"sublet {_rate(a):,.0f}/s, etcd {_rate(b):,.0f}/s",
        )
    bench.note(
        f"With {_clients(clients)} the generator used at most {_share(ours):.0%} of a core against us and "
        f"{_share(peer):.0%} against etcd; the servers used {used['sublet']:.0%} and {used['etcd']:.0%}."
    )
    return [
        figure(
            rate_name(clients),
            "1/s",
            [_rate(sample) for sample in ours],
            [_rate(sample) for sample in peer],
            peer_name="etcd",
            higher_is_better=True,
        ),
        figure(
            f"time of one, {_clients(clients)}",
            "ms",
            [_median_ms(sample) for sample in ours],
            [_median_ms(sample) for sample in peer],
            peer_name="etcd",
            operations=[one / 1e6 for sample in ours for one in sample.cycle_ns],
            peer_operations=[one / 1e6 for sample in peer for one in sample.cycle_ns],
        ),
    ]


def _rate(sample: ClosedSample) -> float:
    return sample.cycles / sample.wall_s


def _median_ms(sample: ClosedSample) -> float:
    return sorted(sample.cycle_ns)[len(sample.cycle_ns) // 2] / 1e6


def _share(samples: list[ClosedSample]) -> float:
    return max(sample.generator_cpu_s / sample.wall_s for sample in samples)


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


ROW: Final = Row(
    name="acquire_release",
    title="a lease acquired and released, durable, against etcd",
    goals=[Goal(figure=rate_name(clients), of="ratio", at_least=1) for clients in (1, 8, 64)],
    measure=measure,
    limit_s=700,
    distributions=DISTRIBUTIONS,
)
