"""``python -m tests.simulation.bursts``: the coordinator of chunks in a pretended world, from seeds.

The core of the job, the index of its store and the book of its leases are the real ones. Pretended are workers that die
in the middle of a batch, leases that are refused, granted late and preempted, results that come late and twice, a store
whose publications fail, a disk that loses data, and a coordinator that is killed between any two steps. In *liveness*
mode the faults stop at some moment, and the job must come to its end within a bound.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sublet.errors import CheckpointDamaged, LeaseRevoked, NotFound, WorkerLost
from sublet.jobs import volume_store as index_file
from sublet.jobs.chunks import Needs
from sublet.jobs.core import ChunkBatch, Coordinator, RunFailed, Works
from sublet.jobs.identity import ChunkId
from sublet.jobs.leases import Holdings
from sublet.jobs.policy import RetryPolicy
from sublet.jobs.running import load_state, save_state
from sublet.jobs.states import Cause, FailReason
from sublet.jobs.stores import not_stored
from sublet.values import NS_PER_S
from tests.simulation.burst_mutants import MUTANTS, switched_on

RULES: Final = {
    "once": "the output has each chunk exactly once, and the aggregate is the serial one",
    "first": "a published result never changes, and its chunk is never begun again",
    "retries": "a chunk is retried within the limit and after transient errors only",
    "blame": "only the chunk that was executing is charged",
    "leases": "when the job is over no lease is left",
    "progress": "with one worker left the job comes to its end",
    "books": "the coordinator's own books hold",
    "error": "no part raises what it did not mean to",
}
STEPS_MAX: Final = 4000
CHUNK: Final = 50
"""Seeds that one process takes at a time."""
AHEAD: Final = 2
RETRIES: Final = 3
JOB: Final = "pretended"


class Broken(Exception):
    """A rule was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self.text = rule, text


@dataclass(eq=False)
class Disk:
    """Files that survive the coordinator. A publication is atomic; data may be lost afterwards."""

    files: dict[str, bytes] = field(default_factory=dict)
    state: bytes = b""


class Store:
    """A `JobOutputStore` on a pretended disk, with the real index."""

    publish_after = 0.0

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._where: dict[ChunkId, index_file.Locator] = {}
        self._pending: dict[ChunkId, bytes] = {}
        for segment in index_file.whole_segments(disk.files):
            found = index_file.parse_index(JOB, segment, disk.files[index_file.index_name(segment)])
            for chunk, where in found.items():
                self._where.setdefault(chunk, where)
            self._segment = segment
        self._segment = max((where.segment for where in self._where.values()), default=0)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._where

    def __len__(self) -> int:
        return len(self._where)

    def begin(self, job: str) -> bytes:
        return self._disk.state

    def chunks(self) -> Iterator[ChunkId]:
        return iter(self._where)

    def get(self, chunk: ChunkId) -> bytes:
        where = self._where.get(chunk)
        if where is None or index_file.data_name(where.segment) not in self._disk.files:
            raise not_stored(chunk)
        return index_file.check_result(chunk, where, self._disk.files[index_file.data_name(where.segment)])

    def put(self, results: Sequence[tuple[ChunkId, bytes]]) -> None:
        for chunk, data in results:
            if index_file.is_first(chunk, self._where):
                self._pending.setdefault(chunk, data)

    def publish(self, state: bytes) -> None:
        if self._pending:
            self._segment += 1
            index, data = index_file.dump_index(JOB, list(self._pending.items()))
            self._disk.files[index_file.index_name(self._segment)] = index
            self._disk.files[index_file.data_name(self._segment)] = data
            self._where |= index_file.parse_index(JOB, self._segment, index)
            self._pending.clear()
        self._disk.state = state


@dataclass(eq=False)
class Lease:
    """A pretended lease, and what its worker has."""

    key: str
    batches: list[ChunkBatch] = field(default_factory=list)
    done: int = 0
    """Chunks of the first batch that were executed."""
    unsent: list[Any] = field(default_factory=list)


class BurstWorld:
    """One seed."""

    def __init__(self, seed: int, *, liveness: bool = False) -> None:
        self.random = chance = random.Random(f"burst/{seed}")
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.now_ns = 0
        self.disk = Disk()
        self.count = chance.choice((1, 3, 8, 25, 60))
        self.want = chance.choice((1, 2, 4))
        self.permanent = {n for n in range(self.count) if chance.random() < chance.choice((0.0, 0.1))}
        self.faults = chance.choice((0.0, 0.1, 0.3)) if not liveness else 0.3
        self.heals_at = STEPS_MAX // 8 if liveness else STEPS_MAX // 2
        self.live: dict[str, Lease] = {}
        """As the office has them."""
        self.ordered = 0
        """Requests of leases that are not answered."""
        self.leases = 0
        self.begun: Counter[int] = Counter()
        self.raised: set[int] = set()
        """Permanent errors that this life of the coordinator was told of."""
        self.losses: Counter[int] = Counter()
        self.published: dict[ChunkId, bytes] = {}
        self.late: list[tuple[ChunkBatch, list[Any]]] = []
        self._begin()

    # ---- a life of the coordinator

    def _begin(self) -> None:
        """From what is on the disk."""
        try:
            self.store = Store(self.disk)
            saved = load_state(self.store.begin(JOB))[1]
        except CheckpointDamaged:
            self.seen["damaged store refused"] += 1
            self.disk, self.published = Disk(), {}
            self.store, saved = Store(self.disk), {}
        self.core = Coordinator(RetryPolicy(RETRIES, "1s", "4s", 0.0), collect=True, saved=saved)
        self.book = Holdings()
        self.mine: dict[str, Lease] = {}
        self.raised.clear()
        self.losses = Counter({int.from_bytes(key, "big"): one.charges for key, one in saved.items()})
        every = list(range(self.count))
        works = Works([key_of(n) for n in every], every, list(every), None, Needs())
        self.core.add(works, stored=self.store)
        self.core.complete()

    def _crash(self) -> None:
        """Its leases end with it; what was not published is gone."""
        self.seen["crash"] += 1
        self.live.clear()
        self.mine.clear()
        self.late.clear()
        self.ordered = 0
        self._begin()

    # ---- the run

    def run(self) -> None:
        while not self.core.is_over:
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise Broken("progress", f"{self.core.counts} after {self.steps} steps")
            self._step()
            try:
                self.core.check()
            except AssertionError as error:
                raise Broken("books", str(error)) from None
        self._end()

    def _step(self) -> None:
        chance, faulty = self.random, self.random.random() < self.faults and self.steps < self.heals_at
        self.now_ns += chance.choice((1, 1_000_000, NS_PER_S // 4))
        self.core.tick(self.now_ns)
        self.book.want(Needs(), min(self.want, self.core.wanted().get(Needs(), 0)))
        if faulty:
            chance.choice(
                (
                    self._lose_worker,
                    self._lose_lease,
                    self._refuse,
                    self._late_result,
                    self._fault_of_store,
                    self._take_back,
                )
            )()
            return
        chance.choice((self._order, self._grant, self._take, self._execute, self._execute, self._send, self._send))()

    def _fault_of_store(self) -> None:
        if self.random.random() < 0.3:
            if self.random.random() < 0.3 and self.disk.files:
                data = sorted(name for name in self.disk.files if name.startswith("data"))
                del self.disk.files[self.random.choice(data)]
                self.seen["data lost"] += 1
            self._crash()

    def _order(self) -> None:
        if self.book.missing(Needs()) > self.ordered:
            self.ordered += 1

    def _refuse(self) -> None:
        if self.ordered:
            self.ordered -= 1
            self.seen["refused"] += 1

    def _grant(self) -> None:
        """The office grants, whatever the job has come to meanwhile."""
        if not self.ordered:
            return
        self.ordered -= 1
        self.leases += 1
        lease = self.live[f"l{self.leases}"] = Lease(f"l{self.leases}")
        if self.book.granted(Needs(), lease):
            self.mine[lease.key] = lease
        else:
            del self.live[lease.key]
            self.seen["granted in vain"] += 1

    def _any(self) -> Lease | None:
        return self.random.choice(list(self.mine.values())) if self.mine else None

    def _take(self) -> None:
        lease = self._any()
        if lease is None or len(lease.batches) >= AHEAD:
            return
        batch = self.core.take(lease.key, Needs(), self.random.choice((1, 2, 8)), self.now_ns)
        if batch is not None:
            for key, index in zip(batch.works.keys, batch.works.indexes, strict=True):
                if key in self.published:
                    raise Broken("first", f"chunk {index} is begun again after its result was published")
                if index in self.raised:
                    raise Broken("retries", f"chunk {index} is begun again after a permanent error")
            lease.batches.append(batch)

    def _execute(self) -> None:
        lease = self._any()
        if lease is None or not lease.batches or lease.done >= len(lease.batches[0].works):
            return
        index = lease.batches[0].works.indexes[lease.done]
        self.begun[index] += 1
        lease.done += 1
        if index in self.permanent:
            lease.unsent.append(RunFailed(Cause.RAISED, ValueError("permanent")))
        else:
            lease.unsent.append(b"%d attempt %d" % (value_of(index), self.begun[index]))

    def _send(self) -> None:
        """What its worker has made reaches the coordinator."""
        lease = self._any()
        if lease is None or not lease.batches or not lease.unsent:
            return
        batch, outcomes = lease.batches[0], lease.unsent[: self.random.choice((1, 3, 8))]
        del lease.unsent[: len(outcomes)]
        if self.random.random() < 0.2:
            self.late.append((batch, list(outcomes)))
        self._take_results(batch, outcomes)
        if not batch.is_open:
            lease.batches.pop(0)
            lease.done = 0

    def _take_results(self, batch: ChunkBatch, outcomes: list[Any]) -> None:
        before, is_news = batch.done, batch.is_open
        fresh = self.core.results(batch, outcomes, self.now_ns)
        for index, outcome in zip(batch.works.indexes[before:], outcomes, strict=False):
            if is_news and type(outcome) is RunFailed:
                self.raised.add(index)
        for works, results in fresh:
            self.store.put(list(zip(works.keys, results, strict=True)))
        if self.random.random() < self.faults / 4 and self.steps < self.heals_at:
            self.seen["publication failed"] += 1
            self._crash()
            return
        self.store.publish(save_state("", self.core.snapshot()))
        self.core.published((works for works, _ in fresh), self.now_ns)
        for key in (key for works, _ in fresh for key in works.keys):
            found = self.store.get(key)
            if self.published.setdefault(key, found) != found:
                index = int.from_bytes(key, "big")
                raise Broken("first", f"chunk {index} had {self.published[key]!r} and has {found!r}")

    def _take_back(self) -> None:
        """Of one batch its worker begins nothing more: what stands in line there goes to others."""
        lease = self._any()
        if lease is None or not lease.batches:
            return
        batch = self.random.choice(lease.batches)
        is_first = batch is lease.batches[0]
        self.core.take_back(batch, lease.done + self.random.choice((0, 1)) if is_first else 0, self.now_ns)
        self.seen["taken back"] += 1
        if not batch.is_open:
            lease.batches.remove(batch)
            lease.done = 0 if is_first else lease.done

    def _late_result(self) -> None:
        """A message comes again, or for a batch that was given up."""
        if self.late:
            batch, outcomes = self.late.pop(self.random.randrange(len(self.late)))
            if batch.is_open:
                return  # of an open batch the line to its worker keeps the order
            self.seen["late"] += 1
            self._take_results(batch, outcomes)
            self._look_at_published()

    def _look_at_published(self) -> None:
        for key, data in self.published.items():
            if key in self.store and self.store.get(key) != data:
                raise Broken("first", f"chunk {int.from_bytes(key, 'big')} had {data!r}, and has another result")

    def _lose_worker(self) -> None:
        self._lose(RunFailed(Cause.WORKER_LOST, WorkerLost("killed")), with_lease=False)

    def _lose_lease(self) -> None:
        self._lose(RunFailed(Cause.LEASE_LOST, LeaseRevoked("preempted")), with_lease=True)

    def _lose(self, failed: RunFailed, *, with_lease: bool) -> None:
        lease = self._any()
        if lease is None:
            return
        self.seen["lease lost" if with_lease else "worker lost"] += 1
        for n, batch in enumerate(list(lease.batches)):
            made = lease.unsent if n == 0 else []
            executing = n == 0 and lease.done < len(batch.works) and self.random.random() < 0.7
            if made and self.random.random() < 0.5:  # what it had made is there, or on its way
                self.late.append((batch, list(made)))
                executing = False
                rest = batch.rest
                lost_results = len(made)
            else:
                self._take_results(batch, list(made))
                if lease.key not in self.live:
                    return  # the coordinator died over it
                rest, lost_results = batch.rest, 0
            charged = {key: self.core.charges(key) for key in rest.keys}
            if lost_results:
                executing = True  # nothing tells which of them had ended
            if executing and rest:
                self.losses[rest.indexes[0]] += 1
                self.begun[rest.indexes[0]] += 1
            self.core.lost(batch, failed, begun=executing, now_ns=self.now_ns)
            for k, (key, index) in enumerate(zip(rest.keys, rest.indexes, strict=True)):
                if self.core.charges(key) > charged[key] and not (executing and k == 0):
                    raise Broken("blame", f"chunk {index} was charged, and had not begun")
                if self.core.charges(key) > RETRIES:
                    raise Broken("retries", f"chunk {index} goes on after {self.core.charges(key)} charges")
        lease.batches.clear()
        lease.unsent.clear()
        lease.done = 0
        if with_lease:
            self.mine.pop(lease.key, None)
            self.live.pop(lease.key, None)
            self.book.remove(Needs(), lease)

    # ---- the end

    def _end(self) -> None:
        for lease in self.book.close():
            self.live.pop(lease.key, None)
        while self.ordered:
            self._grant()
        if self.live:
            raise Broken("leases", f"{', '.join(self.live)} are left")
        failed = {one.index: one for one in self.core.failures}
        for index, one in failed.items():
            expected = {FailReason.RETRIES, FailReason.TOO_LONG}  # also of one that would have raised in the end
            if index in self.permanent:
                expected.add(FailReason.RAISED)
            if one.reason not in expected:
                raise Broken("retries", f"chunk {index} failed as {one.reason}")
            if one.reason is FailReason.RETRIES and self.losses[index] <= RETRIES:
                raise Broken("blame", f"chunk {index} was given up after {self.losses[index]} losses")
        outputs = []
        for n in range(self.count):
            if n in failed:
                continue
            if key_of(n) not in self.store:
                raise Broken("once", f"chunk {n} has neither a result nor a failure")
            try:
                outputs.append(int(self.store.get(key_of(n)).split()[0]))
            except (NotFound, CheckpointDamaged) as error:
                raise Broken("once", f"chunk {n} is said to be stored: {error}") from None
        if outputs != [value_of(n) for n in range(self.count) if n not in failed]:
            raise Broken("once", "the aggregate is not the serial one")
        if any(n not in failed for n in self.permanent):
            raise Broken("retries", "a chunk that always raises has a result")
        self.seen["over"] += 1


def key_of(n: int) -> ChunkId:
    return ChunkId(n.to_bytes(16, "big"))


def value_of(n: int) -> int:
    return n * n + 7


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed in which a rule was broken."""

    seed: int
    rule: str
    text: str
    mutant: str | None = None

    def __str__(self) -> str:
        mutant = f" --mutant {self.mutant}" if self.mutant else ""
        return (
            f"seed {self.seed}: {self.rule}: {self.text}\n  rule:  {RULES[self.rule]}\n"
            f"  again: python -m tests.simulation.bursts --from {self.seed} --seeds 1{mutant}"
        )


@dataclass(slots=True)
class Tally:
    """What seeds came to."""

    seeds: int = 0
    steps: int = 0
    failures: list[Failure] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


def run_seed(seed: int, mutant: str | None = None) -> Tally:
    """One seed, to its end or to the first broken rule. Every third is a seed of liveness."""
    tally = Tally(seeds=1)
    with switched_on(mutant):
        world = BurstWorld(seed, liveness=seed % 3 == 2)
        try:
            world.run()
        except Broken as broken:
            tally.failures.append(Failure(seed, broken.rule, broken.text, mutant))
        except Exception as error:
            tally.failures.append(Failure(seed, "error", f"{type(error).__name__}: {error}", mutant))
    tally.steps, tally.seen = world.steps, world.seen
    return tally


def run_many(seeds: Iterable[int], mutant: str | None = None, *, processes: int | None = 1) -> Tally:
    """All these seeds, on so many cores; None: on all."""
    total = Tally()

    def add(one: Tally) -> None:
        total.seeds += one.seeds
        total.steps += one.steps
        total.failures += one.failures
        total.seen += one.seen

    one_seed = functools.partial(run_seed, mutant=mutant)
    if processes == 1:
        for seed in seeds:
            add(one_seed(seed))
        return total
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for one in pool.imap_unordered(one_seed, seeds, chunksize=CHUNK):
            add(one)
    return total


def hunt(name: str, seeds: int) -> tuple[int, Failure | None]:
    """One seed after the other until the mutant is caught: how many it took, and by what."""
    for seed in range(seeds):
        failures = run_seed(seed, name).failures
        if failures:
            return seed + 1, failures[0]
    return seeds, None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every rule held (or every mutant was caught), else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.bursts", description="Simulate bursts.")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="N")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--mutants", action="store_true", help="try every mutant until it is caught")
    parser.add_argument(
        "--processes", type=int, default=None, metavar="N", help="as many as there are cores by default"
    )
    asked = parser.parse_args(arguments)
    if asked.mutants:
        missed = 0
        for name, mutant in MUTANTS.items():
            count, failure = hunt(name, asked.seeds)
            missed += failure is None
            caught = "NOT CAUGHT" if failure is None else f"{failure.rule}: {failure.text}"
            sys.stdout.write(f"{name:<4} {mutant.breaks:<62} {count:>4}  {caught[:80]}\n")
        return 1 if missed else 0
    processes = 1 if asked.seeds <= CHUNK else asked.processes
    tally = run_many(range(asked.start, asked.start + asked.seeds), asked.mutant, processes=processes)
    for failure in sorted(tally.failures, key=lambda failure: failure.seed)[:20]:
        sys.stdout.write(f"{failure}\n")
    seen = ", ".join(f"{what} {count}" for what, count in sorted(tally.seen.items()))
    sys.stdout.write(f"{tally.seeds} seeds, {tally.steps} steps, {len(tally.failures)} failures; {seen}\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
