"""Pretended writers, readers and changers: they drive the product's operations and note what they saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sublet.errors import SubletError
from sublet.state.replicated.cell import Install
from sublet.state.replicated.membership import Change, InstallRound, Listing, RunOperation, change
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import (
    CasOperation,
    OpenOperation,
    OperationDone,
    OperationRefused,
    OperationUnknown,
    OutcomeReason,
    ReadOperation,
    RegisterOperation,
    Tenure,
    View,
)
from sublet.state.replicated.state import RegisterState
from sublet.values import Epoch
from tests.simulation.linearizable import Call

if TYPE_CHECKING:
    from tests.simulation.register_world import RegisterWorld

ROUND_S: Final = 0.4
"""After so long a replica that has not answered is taken for silent."""


class Client:
    """Drives one operation at a time."""

    def __init__(self, world: RegisterWorld, name: str) -> None:
        self.world, self.name = world, name
        stale = world.random.random() < 0.5 and not world.closing
        self.view = View(world.first_set if stale else world.known_set())
        self.alive = True

    def drive(
        self,
        key: str,
        operation: RegisterOperation,
        then: Callable[[RegisterOperation], None],
        *,
        patience: float = 3.0,
    ) -> None:
        """Until it has a result."""
        self.world.moments.after(patience, self._give_up, operation, then)
        self._pump(key, operation, then)

    def _pump(self, key: str, operation: RegisterOperation, then: Callable[[RegisterOperation], None]) -> None:
        if not self.alive:
            return
        world = self.world
        while sends := operation.take():
            turn = operation.turn
            for send in sends:

                def heard(said: object, turn: int = turn, replica: str = send.replica) -> None:
                    if operation.result is None and self.alive:
                        operation.on_answer(turn, replica, said)  # type: ignore[arg-type]
                        self._pump(key, operation, then)

                world.net.send(self.name, send.replica, key, send.request, heard)
                world.moments.after(ROUND_S, self._lost, key, operation, turn, send.replica, then)
        if operation.result is not None:
            self._over(operation, then)
        elif operation.resting:
            operation.resting = False
            world.moments.after(world.random.random() * 0.3, self._resume, key, operation, then)

    def _lost(
        self, key: str, operation: RegisterOperation, turn: int, replica: str, then: Callable[[RegisterOperation], None]
    ) -> None:
        if operation.result is None and self.alive and operation.turn == turn:
            operation.lost(turn, replica)
            self._pump(key, operation, then)

    def _resume(self, key: str, operation: RegisterOperation, then: Callable[[RegisterOperation], None]) -> None:
        if operation.result is None and self.alive:
            operation.resume()
            self._pump(key, operation, then)

    def _give_up(self, operation: RegisterOperation, then: Callable[[RegisterOperation], None]) -> None:
        if operation.result is None and self.alive:
            operation.give_up()
            self._over(operation, then)

    def _over(self, operation: RegisterOperation, then: Callable[[RegisterOperation], None]) -> None:
        if not getattr(operation, "told", False):
            operation.told = True  # type: ignore[attr-defined]
            then(operation)


def _saw(state: RegisterState) -> tuple[int, bytes]:
    return state.version, state.ids[0] if state.ids else b""


class Reader(Client):
    """Reads now and then, without any claim."""

    def __init__(self, world: RegisterWorld, name: str) -> None:
        super().__init__(world, name)
        self.read()

    def read(self) -> None:
        """Once, and again later."""
        if self.world.closing:
            return
        key, asked = self.world.any_key(), self.world.moments.now

        def told(operation: RegisterOperation) -> None:
            if isinstance(operation.result, OperationDone):
                self.world.note(key, Call(asked, self.world.moments.now, _saw(operation.result.state)))
                self.world.seen["read"] += 1
            self.world.moments.after(0.1 + self.world.random.random(), self.read)

        self.drive(key, ReadOperation(self.view), told, patience=2.0)


class Writer(Client):
    """Opens a register under its epoch, then writes, with the right expectation or a wrong one."""

    def __init__(self, world: RegisterWorld, name: str, *, office: str, epoch: Epoch, key: str, adopt: bool) -> None:
        super().__init__(world, name)
        self.key, self.epoch, self.office, self._adopt = key, epoch, office, adopt
        self.tenure = Tenure(office=office, epoch=epoch, nonce=world.nonce)
        self.version = 0
        self._under_way: tuple[float, int, bytes] | None = None
        self.open()

    def open(self) -> None:
        """Prepare before the first read."""
        if not self.alive:
            return
        asked = self.world.moments.now

        def told(operation: RegisterOperation) -> None:
            match operation.result:
                case OperationDone(state=state):
                    self.world.note(self.key, Call(asked, self.world.moments.now, _saw(state)))
                    self.world.opened(self, state.version)
                    self.version = state.version
                    self._later(self.write)
                case OperationRefused(why=OutcomeReason.FENCED | OutcomeReason.FOREIGN):
                    self._end(operation.result.why)
                case _:
                    self._later(self.open)

        self.drive(self.key, OpenOperation(self.view, self.tenure, adopt=self._adopt), told)
        self._adopt = False

    def write(self) -> None:
        """Compare and swap."""
        if self.world.closing or not self.alive:
            return
        world, asked, write = self.world, self.world.moments.now, self.world.nonce()
        expected = self.version if world.random.random() < 0.9 else self.version + 1
        world.wrote(write, self)
        operation = CasOperation(self.view, self.tenure, expected=expected, write=write, body=b"x")

        def told(operation: RegisterOperation) -> None:
            now, self._under_way = world.moments.now, None
            match operation.result:
                case OperationDone(state=state):
                    world.note(self.key, Call(asked, now, None, expected=expected, wrote=write))
                    world.check_durable(self)
                    self.version = state.version
                    world.seen["cas done"] += 1
                case OperationRefused(why=OutcomeReason.VERSION, state=state) if state is not None:
                    world.note(self.key, Call(asked, now, _saw(state)))
                    self.version = state.version
                    world.seen["cas refused"] += 1
                case OperationRefused(why=OutcomeReason.FENCED | OutcomeReason.FOREIGN):
                    world.never(self.key, write)
                    self._end(operation.result.why)
                    return
                case OperationRefused():
                    world.never(self.key, write)
                case OperationUnknown(why=why):
                    world.note(self.key, Call(asked, now, None, expected=expected, wrote=write, maybe=True))
                    world.seen["cas unknown"] += 1
                    if why in (OutcomeReason.FENCED, OutcomeReason.FOREIGN):
                        self._end(why)
                        return
                    self._later(self.write if world.random.random() < 0.5 else self.open)
                    return
                case None:
                    raise AssertionError("an operation without a result told of it")
            self._later(self.write)

        self._under_way = asked, expected, write
        if world.random.random() < world.deaths:
            world.moments.after(world.random.random() * 0.05, self.die)
        self.drive(self.key, operation, told)

    def die(self) -> None:
        """In the middle of a write: what it sent goes on its way."""
        if self.alive:
            self.alive = False
            self.world.seen["writer died"] += 1
            if self._under_way is not None:
                asked, expected, write = self._under_way
                self.world.note(self.key, Call(asked, asked, None, expected=expected, wrote=write, maybe=True))

    def _end(self, why: OutcomeReason) -> None:
        self.alive = False
        self.world.seen[f"writer {why}"] += 1

    def _later(self, do: Callable[[], None]) -> None:
        if not self.world.closing:
            self.world.moments.after(self.world.random.random() * self.world.pace, do)


class Changer(Client):
    """Gives the seat of one replica to another."""

    def __init__(self, world: RegisterWorld, name: str, epoch: Epoch, aim: Callable[[Seats], Seats]) -> None:
        super().__init__(world, name)
        self.done: ReplicaSet | None = None
        self.over = False
        self._plan: Change = change(self.view, Tenure(office="a", epoch=epoch, nonce=world.nonce), aim)
        self._go(None)

    def _go(self, answer: object) -> None:
        try:
            step = self._plan.send(answer)
        except StopIteration as end:
            self.done, self.over = end.value, True
            self.world.seen["change done"] += 1
            return
        except SubletError:
            self.over = True
            self.world.seen["change failed"] += 1
            return
        match step:
            case RunOperation(key=key, operation=operation):
                self.drive(key, operation, lambda over: self._go(over.result), patience=4.0)
            case InstallRound(replicas=replicas):
                self._ask_all(replicas.voters, lambda name: self._install(name, replicas), set)
            case Listing():
                self._ask_all(self.view.replicas.voters, self._list, dict)

    def _install(self, identity: str, replicas: ReplicaSet) -> object:
        self.world.node_of(identity).ask("", Install(replicas))
        return True

    def _list(self, identity: str) -> object:
        return {*self.world.node_of(identity).cells}

    def _ask_all(
        self, voters: tuple[str, ...], ask: Callable[[str], object], shape: Callable[[dict[str, object]], object]
    ) -> None:
        heard: dict[str, object] = {}

        def one(identity: str) -> None:
            node = self.world.node_of(identity)
            cut = (self.name, node.name) in self.world.net.cuts
            if node.up and node.identity == identity and not cut and self.world.random.random() >= self.world.net.loss:
                heard[identity] = ask(identity)

        for identity in voters:
            self.world.moments.after(self.world.random.random() * 0.05, one, identity)
        self.world.moments.after(0.1, lambda: self._go(shape(heard)))
