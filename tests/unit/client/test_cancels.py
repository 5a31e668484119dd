"""A cancellation at any await of a program that holds leases leaves none at the office: the real asyncio client, over a
real socket, against a real ledger. Once and twice; while the loop goes on, with a second close, at the loop's end.

A failure prints the seed and the await. SUBLET_INTERRUPTS is the number of rounds of each kind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Final

import pytest

import sublet
import sublet.aio
from sublet.client.aio_fabric import Fabric
from sublet.client.clocks import client_clock
from tests.unit.client.office_thread import OfficeThread, office_thread
from tests.unit.client.test_interrupts import Helper, collect, look

ROUNDS: Final = int(os.environ.get("SUBLET_INTERRUPTS", "6"))
SEED: Final = int(os.environ.get("SUBLET_SEED", "1"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets, and leases, that an interrupt has dropped
]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeThread]:
    with office_thread(tmp_path_factory.mktemp("office")) as found:
        yield found
    collect()


def fabric_of(office: OfficeThread) -> Fabric:
    return Fabric(office.address, client_clock(), start=False, bound=False)


# ---- the programs that are cancelled


async def uses_it(fabric: Fabric, helper: Helper) -> None:
    async with fabric.memory("1MiB", renew="always") as lease:
        with lease.activity():
            await lease.renew()


async def releases_it(fabric: Fabric, helper: Helper) -> None:
    lease = await fabric.gpu(min_vram="1MiB", renew="always")
    await lease.release()


async def waits_in_the_queue(fabric: Fabric, helper: Helper) -> None:
    async with fabric.cpu(2, renew="always", on_place=helper.waited_for):
        pass


async def attaches(fabric: Fabric, helper: Helper) -> None:
    async with fabric.attach(helper.id, renew="always"):
        pass


async def replaces(fabric: Fabric, helper: Helper) -> None:
    async with fabric.memory("1MiB", renew="always") as old, fabric.memory("2MiB", renew="always", replaces=old):
        pass


async def several(fabric: Fabric, helper: Helper) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(releases_it(fabric, helper))


async def closes(fabric: Fabric, helper: Helper) -> None:
    async with fabric:
        kept = await fabric.memory("1MiB", renew="always")
        await fabric.memory("1MiB", renew="always")
        await fabric.close()
        assert kept.end is not None


async def uses_many(fabric: Fabric, helper: Helper) -> None:
    async with fabric.many(3).memory("1MiB", renew="always") as leases:
        await leases[1].release()


async def releases_many(fabric: Fabric, helper: Helper) -> None:
    leases = await fabric.many(3, at_least=2).memory("1MiB", renew="always")
    await leases.release()


Program = Callable[[Fabric, Helper], Coroutine[Any, Any, None]]
PROGRAMS: Final[list[Program]] = [
    uses_it,
    releases_it,
    waits_in_the_queue,
    attaches,
    replaces,
    several,
    closes,
    uses_many,
    releases_many,
]


class Cancelling:
    """Awaits a program, and cancels the task that awaits it at the n-th suspension, some turns of the loop later."""

    def __init__(self, program: Coroutine[Any, Any, None], at: dict[int, int]) -> None:
        self.count = 0
        self._program = program
        self._at = at

    def __await__(self) -> Generator[Any, Any, None]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        thrown: BaseException | None = None
        while True:
            try:
                step = self._program.send(None) if thrown is None else self._program.throw(thrown)
            except StopIteration:
                return
            self.count += 1
            turns = self._at.get(self.count)
            if turns == 0:
                task.cancel()
            elif turns is not None:
                _later(loop, turns, task.cancel)
            try:
                yield step
            except BaseException as error:
                thrown = error
            else:
                thrown = None


def _later(loop: asyncio.AbstractEventLoop, turns: int, call: Callable[[], object]) -> None:
    if turns == 0:
        call()
    else:
        loop.call_soon(_later, loop, turns - 1, call)


async def cancelled(awaited: Awaitable[None]) -> None:
    """Run it in a task of its own, and take what a cancellation makes of it."""

    async def run() -> None:
        await awaited

    await asyncio.wait([asyncio.create_task(run())])


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_cancellation_at_any_await_leaves_no_lease(office: OfficeThread, program: Program, times: int) -> None:
    chance = random.Random(f"{SEED} {program.__name__} {times}")
    helper = Helper(office)

    def prepare() -> None:
        if program is attaches:
            helper.leave()
        if program is waits_in_the_queue:
            helper.done()
            helper.block()

    async def count() -> int:
        async with fabric_of(office) as fabric:
            counted = Cancelling(program(fabric, helper), {})
            await counted
            return counted.count

    async def once(at: dict[int, int], how: int) -> list[str]:
        fabric = fabric_of(office)
        await cancelled(Cancelling(program(fabric, helper), at))
        if how == 0 and program is not attaches:  # the keeper gives back, while the loop goes on
            left = await asyncio.to_thread(look, office, helper)
            await fabric.close()
            return left
        if how == 1:  # a close that is cancelled too, and a second one
            await cancelled(Cancelling(fabric.close(), {chance.randrange(4) + 1: chance.randrange(3)}))
            await fabric.close()
            assert fabric._is_over
        return []  # or the loop ends without a close

    try:
        prepare()
        most = asyncio.run(count())
        assert look(office, helper) == []
        for turn in range(ROUNDS):
            prepare()
            first = chance.randrange(most) + 1
            at = {first: chance.randrange(4)}
            if times == 2:
                at[first + 1 + chance.randrange(3)] = chance.randrange(4)
            told = f"seed {SEED}, {program.__name__}, awaits {at}, way {turn % 3}"
            left = asyncio.run(once(at, turn % 3))
            assert left == [], told
            assert look(office, helper) == [], told
    finally:
        helper.done()
        helper.fabric.close()
        gc.collect()


def test_a_closed_fabric_refuses_and_gives_back_what_arrives_late(office: OfficeThread) -> None:
    """What waits in the queue while another task closes is withdrawn, and told why."""

    async def main() -> None:
        helper, fabric, waits = Helper(office), fabric_of(office), asyncio.Event()
        await asyncio.to_thread(helper.block)
        waiting = asyncio.ensure_future(fabric.cpu(2, on_place=lambda _: waits.set()).__aenter__())
        await waits.wait()
        await fabric.close()
        with pytest.raises(sublet.InvalidRequest, match="closed"):
            await waiting
        with pytest.raises(sublet.InvalidRequest, match="closed"):
            await fabric.memory("1MiB")
        assert await asyncio.to_thread(look, office, helper) == []
        helper.done()
        helper.fabric.close()

    asyncio.run(main())
    gc.collect()


@pytest.mark.parametrize("count", [1, 3])
def test_a_close_has_given_back_when_it_returns(office: OfficeThread, count: int) -> None:
    """In its own loop: what a thread gives back comes later, or not at all where the program ends."""

    async def main() -> None:
        helper, fabric = Helper(office), fabric_of(office)
        leases = [await fabric.memory("1MiB", renew="always") for _ in range(count)]
        await fabric.close(patience=60.0)
        assert (fabric._returning, fabric._book.owed) == (None, set())
        assert all(lease.end is not None for lease in leases)
        assert await asyncio.to_thread(look, office, helper) == []
        helper.fabric.close()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tasks of a loop that was closed
def test_a_close_that_its_loop_did_not_finish_is_finished_in_another(office: OfficeThread) -> None:
    helper, fabric = Helper(office), fabric_of(office)
    first = asyncio.new_event_loop()

    async def hold() -> sublet.aio.Lease:
        return await fabric.memory("1MiB", renew="always")

    lease = first.run_until_complete(hold())
    closing = first.create_task(fabric.close())
    first.run_until_complete(asyncio.sleep(0))
    first.close()

    async def main() -> None:
        async with asyncio.timeout(60):
            await fabric.close()

    asyncio.run(main())
    assert lease.end is not None
    assert not closing.done()
    assert look(office, helper) == []
    helper.fabric.close()
    del closing
    gc.collect()


def test_what_a_loop_held_when_it_ended_is_given_back_while_the_program_goes_on(office: OfficeThread) -> None:
    """By a thread: the lease was neither released nor dropped, and no task renews it any more."""
    helper, fabric = Helper(office), fabric_of(office)

    async def main() -> sublet.aio.Lease:
        return await fabric.memory("1MiB", renew="always")

    lease = asyncio.run(main())
    assert look(office, helper) == []
    assert lease.end is not None
    helper.fabric.close()
