"""A register in a pretended world, from a seed: replicas that fail and are replaced, and writers that do not wait.

After every answer what can be checked at once is checked; at the end everything is healed, a newcomer must get through,
and the history of each key must be linearizable.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import (
    CasOperation,
    OpenOperation,
    OperationDone,
    ReadOperation,
    RegisterOperation,
    Tenure,
)
from sublet.values import Epoch
from tests.simulation.linearizable import Call, is_linearizable
from tests.simulation.register_clients import Changer, Client, Reader, Writer
from tests.simulation.register_nodes import Moments, Net, Node

RULES: Final = {
    "order": "some order of all calls explains every answer",
    "fence": "after an epoch has opened the register, nothing of an older one is written",
    "durable": "what was acknowledged is on a write quorum",
    "never": "what was refused for certain never shows up",
    "once": "each version has one writer",
    "progress": "once everything is healed, a newcomer writes and a reader reads it, within a bound",
    "error": "no part raises what it did not mean to",
}
QUORUMS: Final = ((1, 1, 1), (3, 2, 2), (3, 2, 2), (3, 2, 2), (3, 1, 3), (5, 3, 3), (5, 2, 4), (4, 2, 3))
"""(replicas, read, write)."""
CALLS_MAX: Final = 90
"""Per key; a longer history takes the checker too long."""


class Broken(Exception):
    """A rule was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self.text = rule, text


class RegisterWorld:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = source = random.Random(f"register/{seed}")
        self.moments = Moments()
        self.seen: Counter[str] = Counter()
        self.closing = False
        self.deaths = source.choice((0.0, 0.05, 0.2))
        self.storm = source.choice((0.3, 1.5))
        self.pace = source.choice((0.05, 0.3, 1.0))
        self.seconds = source.choice((10.0, 20.0))
        self.keys = tuple(f"k{k}" for k in range(source.choice((1, 1, 2, 4))))
        self._calls: dict[str, list[Call]] = {key: [] for key in self.keys}
        self._writers: dict[bytes, Writer] = {}
        self._never: set[bytes] = set()
        self._opened: dict[str, list[tuple[float, Epoch, str, int]]] = {key: [] for key in self.keys}
        self._wrote: dict[tuple[str, int], bytes] = {}
        self._incarnation, self._n = 1, 0
        self._live: list[Writer] = []
        self._changer: Changer | None = None
        self._names = 0
        count, read, write = self._quorums()
        self.nodes = {f"n{k}": Node(f"n{k}", self.nonce) for k in range(count)}
        self.first_set = ReplicaSet(1, Seats(tuple(sorted(n.identity for n in self.nodes.values())), read, write))
        self.net = Net(self.moments, source, self.nodes)
        for node in self.nodes.values():
            node.known = self.first_set
            self.net.where[node.identity] = node.name
        self.faults = {name for name in FAULTS if source.random() < 0.5}
        if source.random() < 0.7:
            self.net.loss = source.choice((0.0, 0.05, 0.2, 0.35))
            self.net.duplicates = source.choice((0.0, 0.1, 0.4))
            self.net.late = source.choice((0.0, 0.02, 0.1))
        self.net.delay = source.choice((0.005, 0.05))

    def _quorums(self) -> tuple[int, int, int]:
        return self.random.choice(QUORUMS)

    # ---- what clients need ----

    def nonce(self) -> bytes:
        """Eight bytes that never come again."""
        return self.random.randbytes(8)

    def any_key(self) -> str:
        """One of the keys; some are used only later, so that they are new when the set is being changed."""
        begun = 1 + int(self.moments.now / self.seconds * len(self.keys))
        return self.random.choice(self.keys[:begun])

    def node_of(self, identity: str) -> Node:
        """Who had this identity when it was seated."""
        return self.nodes[self.net.where[identity]]

    def next_epoch(self) -> Epoch:
        """As an office gives them out."""
        self._n += 1
        return Epoch(self._incarnation, self._n)

    # ---- what clients saw ----

    def note(self, key: str, call: Call) -> None:
        """A call and its answer."""
        self._calls[key].append(call)
        if call.saw is not None and call.saw[0]:
            self._writes(key, *call.saw)
        elif call.wrote is not None and not call.maybe:
            self._writes(key, call.expected + 1, call.wrote)
        if len(self._calls[key]) >= CALLS_MAX:
            self.closing = True

    def wrote(self, write: bytes, writer: Writer) -> None:
        """A write is about to be tried."""
        self._writers[write] = writer

    def never(self, key: str, write: bytes) -> None:
        """A write was refused for certain."""
        self._never.add(write)
        shown = [version for (k, version), by in self._wrote.items() if k == key and by == write]
        if shown:
            raise Broken("never", f"{key} version {shown[0]} was refused to its writer")

    def opened(self, writer: Writer, version: int) -> None:
        """An opening was answered."""
        self.seen["opened"] += 1
        self._opened[writer.key].append((self.moments.now, writer.epoch, writer.office, version))

    def check_durable(self, writer: Writer) -> None:
        """Of a write that was just acknowledged."""
        accepted = writer.tenure.accepted
        assert accepted is not None
        has = set()
        for node in self.nodes.values():
            cell = node.cells.get(writer.key)
            if cell is not None and cell.accepted is not None and cell.accepted.stamp >= accepted.stamp:
                has.add(node.identity)
        # Nodes that were swapped for empty ones, or whose seat was given away, were there when they answered.
        gone = {identity for identity, name in self.net.where.items() if self.nodes[name].identity != identity}
        sets = {k: known for node in self.nodes.values() for k, known in node.sets.items()} | {1: self.first_set}
        if not sets[writer.tenure.generation].writable(has | gone):
            raise Broken("durable", f"{writer.key} is on {len(has)} replicas")

    def _writes(self, key: str, version: int, write: bytes) -> None:
        known = self._wrote.setdefault((key, version), write)
        if known != write:
            raise Broken("once", f"{key} version {version} has two writers")
        if write in self._never:
            raise Broken("never", f"{key} version {version} was refused to its writer")
        writer = self._writers[write]
        for at, epoch, office, was in self._opened[key]:
            if version > was and writer.office == office and writer.epoch < epoch:
                raise Broken(
                    "fence", f"{key} version {version} is of epoch {writer.epoch}, {epoch} opened {was} at {at:.3f}"
                )

    # ---- one seed ----

    def run(self) -> None:
        """To its end, or to the first broken rule."""
        Reader(self, "r0")
        self._newcomer()
        self._break_something()
        while self.moments.now < self.seconds and not self.closing:
            self.moments.run_until(self.moments.now + 0.5)
        self._heal()
        self._progress()
        for key, calls in self._calls.items():
            if not is_linearizable(calls):
                raise Broken("order", f"no order explains the {len(calls)} calls of {key}")

    def _newcomer(self) -> None:
        """A new lease, or a second writer under the one that there is."""
        if self.closing:
            return
        draw, live = self.random.random(), [writer for writer in self._live if writer.alive]
        epoch, office, adopt = self.next_epoch(), "a", False
        if "equal lease" in self.faults and live and draw < 0.5:
            epoch, office = live[-1].epoch, live[-1].office
            self.seen["equal lease"] += 1
        elif "restored office" in self.faults and draw < 0.3:
            self._incarnation, self._n = self._incarnation + 1, self._n // 2
            epoch = self.next_epoch()
            self.seen["restored office"] += 1
        elif "other office" in self.faults and draw > 0.8:
            office, adopt = "b", self.random.random() < 0.5
            self.seen["adoption" if adopt else "other office"] += 1
        self._live.append(self._writer(office, epoch, self.any_key(), adopt))
        self.moments.after(0.2 + self.random.random() * 4, self._newcomer)

    def _writer(self, office: str, epoch: Epoch, key: str, adopt: bool) -> Writer:
        self._names += 1
        return Writer(self, f"w{self._names}", office=office, epoch=epoch, key=key, adopt=adopt)

    def _break_something(self) -> None:
        if self.closing:
            return
        if self.faults:
            fault = self.random.choice(sorted(self.faults))
            FAULTS[fault](self)
            if "replace" in self.faults and self.random.random() < 0.3:
                _replace(self)
        self.moments.after(self.random.random() * self.storm, self._break_something)

    def any_node(self) -> Node:
        """One of the nodes."""
        return self.nodes[self.random.choice(sorted(self.nodes))]

    def new_changer(self, aim: Callable[[Seats], Seats]) -> None:
        """Change the set, unless a change is under way."""
        if self._changer is None or self._changer.over:
            self._changer = Changer(self, "c", self.next_epoch(), aim)
            self.seen["change begun"] += 1

    def _heal(self) -> None:
        self.closing = True
        self.net.cuts.clear()
        self.net.loss = self.net.duplicates = self.net.late = 0.0
        for node in self.nodes.values():
            node.up, node.slow = True, 1.0
        self.moments.run_until(self.moments.now + 6)

    def _progress(self) -> None:
        """A new client is served, after everything is well."""
        for key in self.keys:
            known = self.known_set()
            if not (known.readable(self._there()) and known.writable(self._there())):
                self.seen["lost quorum"] += 1
                continue
            results: list[RegisterOperation] = []
            client = Client(self, "last")
            tenure = Tenure(office="a", epoch=Epoch(self._incarnation + 1, 1), nonce=self.nonce)
            opening = OpenOperation(client.view, tenure, adopt=True)
            client.drive(key, opening, results.append, patience=30.0)
            self.moments.run_until(self.moments.now + 31)
            if not results or not isinstance(results[0].result, OperationDone):
                raise Broken("progress", f"{key} cannot be opened: {opening.result}")
            version = results[0].result.state.version
            write = self.nonce()
            cas = CasOperation(client.view, tenure, expected=version, write=write, body=b"last")
            client.drive(key, cas, results.append, patience=30.0)
            self.moments.run_until(self.moments.now + 31)
            reading = ReadOperation(client.view)
            client.drive(key, reading, results.append, patience=30.0)
            self.moments.run_until(self.moments.now + 31)
            last = reading.result
            if not (
                isinstance(last, OperationDone) and last.state.version == version + 1 and last.state.ids[0] == write
            ):
                raise Broken("progress", f"{key}: written {cas.result}, read {last}")

    def known_set(self) -> ReplicaSet:
        """What a reader of all replicas would find."""
        return max((n.known for n in self.nodes.values() if n.known is not None), key=lambda known: known.generation)

    def _there(self) -> set[str]:
        return {node.identity for node in self.nodes.values()}


# ---- what goes wrong ----


def _cut(world: RegisterWorld) -> None:
    node = world.any_node().name
    source = world.random.choice([f"w{k}" for k in range(1, 30)] + ["c", "r0"])
    pairs = {(source, node), (node, source)} if world.random.random() < 0.6 else {(node, source)}
    world.net.cuts |= pairs
    world.moments.after(world.random.random() * 4, world.net.cuts.difference_update, pairs)
    world.seen["cut made"] += 1


def _crash(world: RegisterWorld) -> None:
    node = world.any_node()
    node.crash()
    world.seen["crash"] += 1

    def up() -> None:
        node.up = True

    world.moments.after(world.random.random() * world.random.choice((0.02, 5)), up)


def _slow(world: RegisterWorld) -> None:
    node = world.any_node()
    node.slow = 40.0
    world.seen["slow"] += 1

    def swift() -> None:
        node.slow = 1.0

    world.moments.after(world.random.random() * 3, swift)


def _amnesia(world: RegisterWorld) -> None:
    """One disk is swapped. A second one goes only when the first was replaced, or the data would really be gone."""
    known = world.known_set()
    if known.before is not None or any(i not in world._there() for i in known.voters) or len(known.voters) < 3:
        return
    if len(known.voters) - known.now.write < 1:
        return
    node = world.any_node()
    if node.identity in known.voters:
        node.forget()
        world.seen["amnesia"] += 1


def _replace(world: RegisterWorld) -> None:
    """A replica that forgot loses its seat and gets a new one; or, where none did, a spare takes a member's place."""
    known = world.known_set()
    lost = [identity for identity in known.now.members if identity not in world._there()]
    spare = [node for node in world.nodes.values() if node.identity not in known.voters]
    if not lost and not spare and len(world.nodes) < 7 and len(known.voters) >= 3:
        name = f"n{len(world.nodes)}"
        spare = [world.nodes.setdefault(name, Node(name, world.nonce))]
        world.seen["spare"] += 1
    if not spare:
        return
    come = spare[0]
    world.net.where[come.identity] = come.name
    go = lost[0] if lost else world.random.choice(known.now.members)

    def aim(seats: Seats) -> Seats:
        if come.identity in seats.members or go not in seats.members:
            return seats
        members = tuple(sorted({*seats.members, come.identity} - {go}))
        return Seats(members, seats.read, seats.write)

    world.new_changer(aim)


FAULTS: Final[dict[str, Callable[[RegisterWorld], None]]] = {
    "cut": _cut,
    "crash": _crash,
    "slow": _slow,
    "amnesia": _amnesia,
    "replace": _replace,
    "equal lease": lambda world: None,
    "restored office": lambda world: None,
    "other office": lambda world: None,
}
