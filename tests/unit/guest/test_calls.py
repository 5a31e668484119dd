"""What a worker answers to one request of its holder."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

from sublet.guest.calls import CallRunner
from sublet.guest.main_thread import MainThreadQueue
from sublet.wire.work import Flag, HolderMessage, WorkerMessage, pack, unpack


def test_a_generator_that_was_cancelled_before_its_next_item_began_can_still_be_closed() -> None:
    """The interrupt does not pass through the generator then, and nothing else would run its ``finally``."""
    main_queue = MainThreadQueue()
    runner = CallRunner(main_queue)
    closed = []

    def endless() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            closed.append(True)

    number = runner._result(endless()).subject
    ask_next = unpack(pack(HolderMessage.NEXT, subject=number, amount=1))
    assert runner.answer(1, ask_next, (), None).kind is WorkerMessage.ITEMS

    before = signal.signal(signal.SIGINT, main_queue._on_unwanted)
    gc.disable()  # it would find the generator, some time
    try:
        main_queue.running = 2
        main_queue.interrupt(2)
        answer = runner.answer(2, ask_next, (), None)
        main_queue.done()
        assert (answer.kind, answer.flags) == (WorkerMessage.CANCELLED, Flag.BEGAN)
        runner.answer(3, unpack(pack(HolderMessage.CLOSE, subject=number)), (), None)
        assert closed == [True]
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
