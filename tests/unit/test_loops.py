"""Every background loop of the source is listed here, and each that goes on in a circle is failed at its heart."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet import background
from sublet.background import SHORTAGES
from sublet.client.guest_watch import GuestWatch
from sublet.compute.calls import PendingCall
from sublet.compute.completion_thread import CompletionThread
from sublet.errors import CheckpointFailed
from sublet.guest import serving
from sublet.guest.checkpoints import Checkpoints
from sublet.node.agent.supervised import SupervisedAgent
from sublet.office.api.processes import HolderWatch, ProcessFate
from sublet.office.ledger.records import ProcessRecord
from sublet.replicated import MemoryReplica
from sublet.state.checkpoints.durable import _Queue
from sublet.state.checkpoints.packs import PackWriter
from sublet.state.replicated.worker import ReplicaThread
from sublet.values import Epoch, LeaseId, NodeId
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service
from sublet.wire.link import Link
from sublet.wire.link_events import Happening, Over
from sublet.wire.orders import Inventory
from sublet.wire.page import PageReader, PageState, PageView, PageWriter
from tests.traces import until as until_it_is
from tests.unit.package_source import LOOKS_AT_SOURCE, source_files

HERE: Final = "tests.unit.test_loops"
ERRORS: Final = [
    *(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)),
    MemoryError("no memory"),
    KeyError("a mistake"),
]

LOOPS: Final = {
    "burst": "tests.unit.jobs.test_running:test_a_mistake_on_the_jobs_thread_is_raised_where_results_are_waited_for",
    "burst_leases": "tests.unit.jobs.test_leases:test_leases_are_asked_for_again_after_a_shortage",
    "callbacks": "tests.unit.client.test_keepers_going_on:test_callbacks_come_after_one_that_ends_its_thread",
    "calls": f"{HERE}:test_calls_that_nobody_waits_for_are_completed",
    "cards": "tests.unit.node.agent.test_cards:test_a_look_that_fails_is_followed_by_another",
    "control_door": "tests.unit.office.api.test_control_door:test_it_answers_again_after_a_shortage",
    "cut_off": "tests.unit.node.agent.test_supervised:test_who_lost_rights_is_cut_off_in_the_end",
    "data_door": "tests.unit.node.agent.test_data_door:test_a_connection_that_cannot_be_accepted_waits_until_it_can",
    "data_door_connections": (
        "tests.unit.node.agent.test_data_door:test_who_comes_when_there_is_no_descriptor_to_hand_over_is_told_so"
    ),
    "durable": f"{HERE}:test_a_save_in_the_background_that_fails_is_raised_and_the_next_one_works",
    "guests": f"{HERE}:test_news_of_guests_are_heard_after_a_failure",
    "holder_watch": f"{HERE}:test_processes_of_holders_are_looked_at_after_a_failure",
    "inbox": f"{HERE}:test_a_guest_serves_after_a_failure",
    "keeper": "tests.unit.client.test_keepers_going_on:test_a_failed_turn_of_the_thread_ends_no_renewing",
    "launches": f"{HERE}:test_what_is_started_again_is_started_again",
    "news": f"{HERE}:test_the_news_are_asked_for_again",
    "notice": f"{HERE}:test_a_notice_is_seen_after_a_failure",
    "pack": f"{HERE}:test_a_pack_that_cannot_be_written_says_so_and_nobody_waits_for_ever",
    "publish_door": "tests.unit.node.test_loop:test_what_cannot_be_accepted_now_is_accepted_later",
    "replica": f"{HERE}:test_a_replica_is_asked_after_a_failure",
    "return": f"{HERE}:test_what_is_started_again_is_started_again",
    "session": f"{HERE}:test_what_is_started_again_is_started_again",
    "served_tick": f"{HERE}:test_what_is_started_again_is_started_again",
    "studio_pages": f"{HERE}:test_what_is_started_again_is_started_again",
    "studio_ends": f"{HERE}:test_what_is_started_again_is_started_again",
    "studio_revoked": f"{HERE}:test_what_is_started_again_is_started_again",
    "studio_hub": f"{HERE}:test_what_is_started_again_is_started_again",
    "supervisor_door": "tests.unit.node.test_loop:test_what_cannot_be_accepted_now_is_accepted_later",
    "supervisor_link": f"{HERE}:test_the_link_to_the_supervisor_outlives_a_shortage",
    "supervisor_loop": "tests.unit.node.test_loop:test_what_cannot_be_read_now_is_read_later",
    "top_watch": f"{HERE}:test_what_is_started_again_is_started_again",
    "wasm_epochs": "tests.unit.jobs.test_wasm:test_the_epochs_move_again_after_an_error",
}
"""Loops that go on in a circle, and the test in which each is failed."""

ONCE: Final = {
    "acquire": "one call; what it raises belongs to its future",
    "background_request": "one request of the keeper; the plan of each lease has its next attempt",
    "burst_aio": "reads one map for asyncio; what it raises is raised where the map is awaited",
    "burst_end": "gives the leases of one executor back; the end of the program does it otherwise",
    "burst_function": "takes one function apart ahead of time; what it raises is raised where a worker needs it",
    "burst_store": "one publication of results; if it fails the job ends with that",
    "burst_worker": "starts one worker; if it fails the lease is given back, or the job is told",
    "card_look": "one look at the cards; the next one is another thread, and one without an answer is a fault",
    "control_connections": "one connection; it is closed",
    "demo_request": "one request; what it raises belongs to its future",
    "durable_timer": "one save; what it raises is raised at the next touch",
    "import": "imports ahead of a cell; who needs the module imports it",
    "interrupt": "wakes one cell that is to be interrupted; the next Ctrl-C does it again",
    "supervisor_turns": "one question to the supervisor, asked until it answers; the next second brings the next one",
    "job": "one blocking call of a notebook job; what it raises belongs to its future",
    "job_reader": "one request to a kernel; if it fails the kernel counts as dead",
    "job_stop": "the end of a job; if it fails the job is cancelled at once",
    "keep": "begins to keep the lease of a command, and returns",
    "lent_memory": "one look at what no job has used again; the next look is another timer",
    "live_line": "paints a line; without it the command is the same",
    "price": "asks for a price once; without it none is shown",
    "replica_pack": "one write to one replica; what it raises is told to who waits",
    "request_end": "waits for the end of one request",
    "revive": "starts an office once; the next attempt of a renewal does it again",
    "say_waiting": "shows a line once",
    "session_cell": "records what one cell consumed; if it fails, the bill by leases has it all the same",
    "session_saved": "records one checkpoint; if it fails, the volume has it all the same",
    "served": "one connection to a guest; what it raises is told to the holder",
    "served_acquire": "one lease for a served program; if it fails, who waits is told, and the next request asks again",
    "served_end": "ends one run of a served program; it is gone with its lease otherwise",
    "served_launch": "one run of a served program; what ends it is told to who waits",
    "served_note": "records that a request came; the next one after a minute does it again",
    "served_withdraw": "gives up one place in the queue; it lapses with the studio's sign of life otherwise",
    "status": "shows a line once",
    "stop_guest": "stops one guest whose start was cancelled",
    "stream_end": "waits for the end of one stream",
    "studio_office": "starts an office once; the next request does it again",
    "studio_probe": "asks the office until it answers; the next request that takes long begins another",
    "studio_request": "one request for a session; what it raises is told to the person, or recorded with the session",
    "train_output": "the output of one command; if it fails the run is told",
    "train_stop": "ends one command",
    "unbind": "one request",
    "warm": "warms up once; the first cell does it otherwise",
}
"""Threads, tasks and timers that do one thing, and what follows if that fails."""

HELPERS: Final = {
    "start_thread": 0,
    "start_task": 0,
    "start_timer": 0,
    "Guard": 0,
    "accept_connections": 0,
    "Accepting": 1,
}
"""What takes the name of a loop, and as which argument."""


HANDED_ON: Final = {("node.loop", "Accepting"), ("client.aio_keeper", "_spawn")}
"""What takes the name of a loop and hands it on to a helper."""


def names_in_source() -> Iterator[tuple[str, str]]:
    called = {*HELPERS, *(name for _, name in HANDED_ON)}
    for file in source_files():
        module = file.module
        if module == "background" or not any(name in file.text for name in called):
            continue
        for node in file.nodes:
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = 0 if (module, name) in HANDED_ON else HELPERS.get(name)
            if at is not None:
                said = node.args[at]
                if isinstance(said, ast.Constant):
                    yield module, str(said.value)
                else:
                    assert module in {where for where, _ in HANDED_ON}, f"{module} names a loop by no plain text"


@LOOKS_AT_SOURCE
def test_every_loop_is_listed() -> None:
    found = {name for _, name in names_in_source()}
    assert found == set(LOOPS) | set(ONCE), "list it in LOOPS with the test that fails it, or in ONCE with the reason"
    assert not set(LOOPS) & set(ONCE)


def test_every_listed_test_is_there() -> None:
    for place in LOOPS.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


# ------------------------------------------------------------------------------------------------------- the stories


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))
    monkeypatch.setattr(background, "_troubles", {})


def until(is_so: Callable[[], object]) -> None:
    until_it_is("what the thread is to do", is_so, 20)


class Failing:
    """A function that fails so many times, and works then. How many is drawn, from the error itself."""

    def __init__(self, works: Callable[..., Any], error: BaseException) -> None:
        self._works, self._error = works, error
        self.left = random.Random(repr(error)).randint(1, 4)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self._error
        return self._works(*args, **named)


@pytest.mark.parametrize("error", [*ERRORS, SystemExit(1)], ids=repr)
def test_what_is_started_again_is_started_again(error: BaseException) -> None:
    """For loops that are a thread with ``again=True`` and no more."""
    done = threading.Event()
    run = Failing(done.set, error)
    background.start_thread("loop", run, again=True).join(20)
    assert done.is_set()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", ["_wait", "_pump"])
def test_news_of_guests_are_heard_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    watch, told = GuestWatch(), list[Happening]()
    failing = Failing(getattr(watch, place), error)
    monkeypatch.setattr(watch, place, failing)
    ours, theirs = socket.socketpair()
    conversation = Conversation(ours, Link.connecting())

    def hear(happening: Happening) -> bool:
        told.append(happening)
        return isinstance(happening, Over)

    watch.add(conversation, hear)
    theirs.close()
    until(lambda: told)
    until(lambda: watch._thread is None)
    assert isinstance(told[-1], Over)
    assert not failing.left


def test_a_connection_to_a_guest_that_cannot_be_read_is_over_and_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, told, others = GuestWatch(), list[Happening](), list[Happening]()
    ours, theirs = socket.socketpair()
    more, those = socket.socketpair()
    broken, whole = Conversation(ours, Link.connecting()), Conversation(more, Link.connecting())
    monkeypatch.setattr(broken, "pump", Failing(list, MemoryError()))
    theirs.send(b"!")
    watch.add(broken, lambda happening: _noted(told, happening))
    watch.add(whole, lambda happening: _noted(others, happening))
    until(lambda: told)
    assert isinstance(told[0], Over)
    assert told[0].error is not None
    those.close()
    until(lambda: others)
    theirs.close()
    until(lambda: watch._thread is None)


def _noted(told: list[Happening], happening: Happening) -> bool:
    told.append(happening)
    return True


class _Exchange:
    """What the completions needs of one."""

    lost: object = None
    under_way = 0

    def __init__(self) -> None:
        self.is_closed = False

    def kept_by(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def listen(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        return False

    def next_doom_ns(self) -> int | None:
        return None

    def end_doomed(self) -> None:
        pass

    def due_ns(self, pending: PendingCall) -> int | None:
        return None

    def close(self) -> None:
        self.is_closed = True


class _Watched:
    """A call that is done as soon as it is begun."""

    def __init__(self, keeper: CompletionThread, begin: Callable[[], bool]) -> None:
        self._keeper, self._begin = keeper, begin
        self.pending = PendingCall()
        self.finished = 0

    def begin(self) -> bool:
        if self._begin():
            self._keeper.done(self)
        return True

    def finish(self) -> None:
        self.finished += 1

    def time_is_up(self) -> None:
        raise AssertionError("there is no limit")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_calls_that_nobody_waits_for_are_completed(error: BaseException) -> None:
    exchange = _Exchange()
    keeper = CompletionThread(exchange)  # type: ignore[arg-type]
    failing = Failing(lambda: True, error)
    one, two = _Watched(keeper, failing), _Watched(keeper, lambda: True)
    keeper.add(one)
    keeper.add(two)
    until(lambda: (one.finished, two.finished) == (1, 1))
    assert not failing.left
    assert exchange.is_closed == isinstance(error, KeyError), "by a mistake its calls are lost, and told so"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("place", ["take", "begin"])
def test_a_guest_serves_after_a_failure(monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException) -> None:
    served = threading.Event()
    left = [threading.Event()]

    class Inbox:
        def __init__(self) -> None:
            self.turn = 0

        def take(self) -> Any:
            self.turn += 1
            if self.turn > 8:
                left[0].wait(20)
                return None
            sock, other = socket.socketpair()
            other.close()
            return visit, sock

    class visit:  # noqa: N801 - what it is for is all that is looked at
        service = Service.CACHES

    def serve(_visit: object, sock: socket.socket, _services: object) -> None:
        sock.close()
        served.set()

    monkeypatch.setattr(serving, "_serve", serve)
    inbox = Inbox()
    if place == "take":
        failing = Failing(inbox.take, error)
        monkeypatch.setattr(inbox, "take", failing)
    else:
        failing = Failing(serving._begin_serving, error)
        monkeypatch.setattr(serving, "_begin_serving", failing)
    thread = serving.start_serving(inbox, {})  # type: ignore[arg-type]
    assert served.wait(20)
    left[0].set()
    thread.join(20)
    assert not failing.left


@pytest.mark.parametrize("error", [*ERRORS, SystemExit(1)], ids=repr)
def test_a_save_in_the_background_that_fails_is_raised_and_the_next_one_works(error: BaseException) -> None:
    saved: list[str] = []
    failing = Failing(lambda _capture, note: saved.append(note), error)
    failing.left = 1
    saver = _Queue(failing)
    saver.put(lambda: None, "first")  # type: ignore[arg-type,return-value]
    saver.drain()
    assert saver.take_failure() is error
    saver.put(lambda: None, "second")  # type: ignore[arg-type,return-value]
    saver.drain()
    assert saved == ["second"]
    saver.stop()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_pack_that_cannot_be_written_says_so_and_nobody_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    writer = PackWriter(tmp_path)
    failing = Failing(writer._write, error)
    failing.left = 1
    monkeypatch.setattr(writer, "_write", failing)

    def write() -> None:
        for number in range(64):
            room = writer.room(1 << 20)
            room[:4] = b"data"
            writer.keep(number.to_bytes(32, "big"), 1 << 20)
        writer.finish()

    with pytest.raises(CheckpointFailed):
        write()
    writer.close()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_replica_is_asked_after_a_failure(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    worker = ReplicaThread(MemoryReplica())
    turns: list[int] = []
    failing = Failing(lambda _batch: turns.append(1), error)
    monkeypatch.setattr(worker, "_carry_out", failing)

    def asked() -> object:  # again and again: those of a batch that failed are gone
        worker._requests.put(_a_replica_request())
        return turns

    until(asked)
    assert not failing.left
    worker.close(20)


def _a_replica_request() -> Any:
    from sublet.state.replicated.worker import ReplicaRequest

    return object.__new__(ReplicaRequest)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_notice_is_seen_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr("sublet.guest.checkpoints.LOOK_S", 0.001)
    noticed = PageView(lease=LeaseId("l-a"), epoch=Epoch(1, 5), deadline_ns=1 << 60, now_ns=0, state=PageState.NOTICED)
    PageWriter.create(str(tmp_path / "page"), noticed)
    reader = PageReader(str(tmp_path / "page"))
    found, saved = Checkpoints(reader), threading.Event()
    failing = Failing(reader.read, error)
    monkeypatch.setattr(reader, "read", failing)
    found.register(saved.set)
    assert saved.wait(20)
    assert not failing.left
    monkeypatch.setattr(reader, "read", lambda: PageView(**{**_facts(noticed), "state": PageState.OVER}))
    assert found._watcher is not None
    found._watcher.join(20)
    assert not found._watcher.is_alive()


def _facts(view: PageView) -> dict[str, Any]:
    return {"lease": view.lease, "epoch": view.epoch, "deadline_ns": view.deadline_ns, "now_ns": view.now_ns}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_processes_of_holders_are_looked_at_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """One that cannot be looked at is no reason not to look at another, and is looked at again."""
    monkeypatch.setattr("sublet.office.api.processes.LOOK_EVERY_S", 0.001)
    looked: list[ProcessRecord] = []

    def look(process: ProcessRecord) -> ProcessFate:
        looked.append(process)
        return ProcessFate.ALIVE

    class Processes:
        open = Failing(look, error)

    async def story() -> None:
        watch = HolderWatch(_Driver(), Processes())  # type: ignore[arg-type]
        watch.start()
        records = [ProcessRecord(pid=n, start_ticks=1, boot_id="b", namespaces="") for n in (1, 2)]
        watch._looked_at |= set(records)
        watch._check_holders()
        async with asyncio.timeout(20):
            while not set(records) <= set(looked):  # noqa: ASYNC110 - what is waited for is no event
                await asyncio.sleep(0.002)
        watch.close()

    asyncio.run(story())
    assert not Processes.open.left


class _Driver:
    class ledger:  # noqa: N801 - an attribute with attributes
        class state:  # noqa: N801
            leases: Final = dict[str, object]()

    def listen(self, listener: object) -> None:
        pass


@pytest.mark.parametrize("error", ERRORS[:-2], ids=repr)
@pytest.mark.parametrize("place", ["receive_some", "send_some"])
def test_the_link_to_the_supervisor_outlives_a_shortage(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    """The same supervisor answers afterwards, and the office has not ended."""
    from sublet.node.agent import supervised
    from sublet.wire.guests import ListProcesses, OfficeReply
    from tests.unit.node.agent.test_supervised import Supervisors

    monkeypatch.setattr(supervised, "SHORT_PAUSE_S", 0.001)
    ended: list[str] = []

    async def story() -> None:
        supervisors = Supervisors()
        agent = SupervisedAgent(
            Inventory(node=NodeId("n"), domain="d", devices=()),
            office="o",
            incarnation=lambda: 1,
            connect=supervisors.connect,
            report=lambda _: None,
            on_new_supervisor=lambda: asyncio.sleep(0),
            die=ended.append,
        )
        await agent.start()
        failing = Failing(getattr(supervised, place), error)
        monkeypatch.setattr(supervised, place, failing)
        async with asyncio.timeout(20):
            answer: OfficeReply = await agent.ask(ListProcesses())
        assert answer is not None
        assert not failing.left
        assert supervisors.count == 1
        supervisors.hang_up(None)
        await agent.close()

    asyncio.run(story())
    assert ended == []


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_the_news_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    from sublet.client import aio_keeper
    from tests.unit.client.test_keepers_going_on import Desk

    monkeypatch.setattr(aio_keeper, "LISTEN_AFTER_S", 0.0)

    async def nobody() -> None:
        pass

    async def story() -> None:
        desk, asked = Desk(), asyncio.Event()

        async def open_stream(path: str, timeout_s: float) -> Any:
            asked.set()
            await asyncio.Event().wait()

        failing = Failing(open_stream, error)
        monkeypatch.setattr(desk.office, "open_stream", failing)
        keeper = aio_keeper.AioKeeper(desk.book, desk.core, desk.office, desk.clock, nobody)  # type: ignore[arg-type]
        keeper.start()
        async with asyncio.timeout(20):
            await asked.wait()
        assert not failing.left
        await keeper.stop()

    asyncio.run(story())
