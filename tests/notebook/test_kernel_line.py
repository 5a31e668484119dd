"""A real kernel in a guest, over a line."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.compute.kernel_guest import KernelGuest
from sublet.notebook import guest_side
from sublet.notebook.kernel_line import KernelLine, Message
from sublet.notebook.queued_cells import has_queued
from sublet.values import GuestId
from tests.traces import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sublet.Fabric]:
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    with sublet.connect(home=home) as made:
        yield made
        made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.fixture(scope="module")
def kernel(fabric: sublet.Fabric, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelGuest]:
    with fabric.gpu(min_vram="64MiB", ttl="2m") as lease:
        kernel = KernelGuest(lease, cwd=str(tmp_path_factory.mktemp("folder")))
        yield kernel
        kernel.close()


@pytest.fixture(scope="module")
def line(kernel: KernelGuest) -> Iterator[KernelLine]:
    with KernelLine(kernel.channels) as line:
        yield line


class Shown:
    """What a cell says."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, channel: str, message: Message) -> None:
        self.messages.append(message)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one["content"] for one in self.messages if one["header"]["msg_type"] == kind]

    @property
    def text(self) -> str:
        return "".join(one["text"] for one in self.of("stream"))


def test_one_that_was_started_ends_if_what_is_done_meanwhile_fails(fabric: sublet.Fabric, kernel: KernelGuest) -> None:
    at_that_moment: list[GuestId] = []

    def guests() -> list[GuestId]:
        return [one.id for one in fabric.guests(kernel.lease)]

    def fail() -> None:
        at_that_moment.extend(guests())
        raise ValueError("as told")

    with pytest.raises(ValueError, match="as told"):
        KernelGuest(kernel.lease, cwd="/", meanwhile=fail)
    assert len(at_that_moment) == 2
    until("only the first", lambda: guests() == [kernel.guest.id])


def test_it_computes_and_says_so(line: KernelLine) -> None:
    shown = Shown()
    reply = line.execute("x = 6 * 7\nprint('said')\nx", shown)
    assert reply["content"]["status"] == "ok"
    assert shown.text == "said\n"
    assert shown.of("execute_result")[0]["data"]["text/plain"] == "42"


def test_an_error_comes_with_its_traceback(line: KernelLine) -> None:
    shown = Shown()
    reply = line.execute("def f():\n    1 / 0\nf()", shown)
    assert reply["content"]["ename"] == "ZeroDivisionError"
    said = re.sub(r"\x1b\[[\d;]*m", "", "".join(shown.of("error")[0]["traceback"]))
    assert "1 / 0" in said


def test_what_is_large_comes_whole(line: KernelLine) -> None:
    """More than any window: it crosses in pieces, and the kernel waits for who reads."""
    shown = Shown()
    line.execute("for i in range(40): print(str(i) * 200_000)", shown)
    assert shown.text == "".join(str(i) * 200_000 + "\n" for i in range(40))
    shown = Shown()
    line.execute(f"y = {'z' * 3_000_000!r}\nlen(y)", shown)
    assert shown.of("execute_result")[0]["data"]["text/plain"] == "3000000"


def test_it_asks_for_input(line: KernelLine) -> None:
    shown = Shown()

    def answer(channel: str, message: Message) -> None:
        if message["header"]["msg_type"] == "input_request":
            line.answer_input(message, "Ada")
        else:
            shown(channel, message)

    line.execute("print('hello', input('who? '))", answer)
    assert shown.text == "hello Ada\n"


def test_what_the_one_who_shows_raises_stops_the_cell_and_not_the_next(line: KernelLine) -> None:
    def nobody_is_there(channel: str, message: Message) -> None:
        if channel == "stdin":
            raise EOFError

    with pytest.raises(EOFError):
        line.execute("input('who? ')", nobody_is_there)
    shown = Shown()
    line.execute("print('next')", shown)
    assert shown.text == "next\n"


def test_an_interrupt_stops_the_cell_and_nothing_else(line: KernelLine) -> None:
    shown = Shown()
    line.execute("x = 6 * 7", shown)
    asked = line.send(
        "shell",
        "execute_request",
        {"code": "print('on')\nimport time\nwhile True: time.sleep(0.01)", "silent": False, "store_history": True},
    )
    end_s = time.monotonic() + PATIENCE_S
    while "on" not in shown.text:
        assert time.monotonic() < end_s
        for channel, message in line.wait(1.0):
            shown(channel, message)
    line.interrupt()
    reply = line.finish(asked, shown)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    shown = Shown()
    line.execute("print(x)", shown)
    assert shown.text == "42\n"


def test_commands_and_top_level_await(line: KernelLine, tmp_path: Path) -> None:
    shown = Shown()
    line.execute("import asyncio\nawait asyncio.sleep(0)\n!echo from a shell\n", shown)
    assert shown.text.splitlines() == ["from a shell"]


ENDLESS = "import time\nwhile True: time.sleep(0.01)"


@pytest.mark.parametrize("code", [ENDLESS, "import asyncio\nawait asyncio.sleep(60)", "input('who?')"])
def test_an_interrupt_that_is_there_before_its_cell_stops_it_and_not_the_next(line: KernelLine, code: str) -> None:
    asked = line.send("shell", "execute_request", {"code": code, "allow_stdin": True})
    line.interrupt(asked)
    reply = line.finish(asked, lambda *_: None)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert reply["content"]["traceback"]
    line.interrupt(asked)  # it is over
    assert line.execute("x = 1", lambda *_: None)["content"]["status"] == "ok"


def test_one_that_cuts_a_result_short_is_not_held_against_a_later_cell(line: KernelLine) -> None:
    asked = ""

    def shown(_: str, message: Message) -> None:
        if message["header"]["msg_type"] == "stream":
            line.interrupt(asked)

    slow = "import time\nclass Slow:\n    def __repr__(self): print('on'); time.sleep(60)\nSlow()"
    asked = line.send("shell", "execute_request", {"code": slow})
    assert line.finish(asked, shown)["content"]["ename"] == "KeyboardInterrupt"
    assert line.execute("1 / 0", lambda *_: None)["content"]["ename"] == "ZeroDivisionError"
    assert line.execute("import asyncio\nawait asyncio.sleep(0)", lambda *_: None)["content"]["status"] == "ok"


# ---- cells that are asked for by a call


def called(kernel: KernelGuest, line: KernelLine, code: str, show: Callable[[str, Message], None]) -> dict[str, Any]:
    """Run a cell so; the content of its reply."""
    request = line.request({"code": code, "silent": False, "store_history": False, "allow_stdin": False})
    call = kernel.begin_cell(guest_side.run, (), request)
    assert line.finish(request["header"]["msg_id"], show, call=call) == {}
    reply, _ = kernel.result(call.pending)
    return dict(reply)


def test_everything_that_a_called_cell_says_is_there_when_it_is_over(kernel: KernelGuest, line: KernelLine) -> None:
    shown = Shown()
    said = called(kernel, line, "for i in range(40): print(str(i) * 50_000)\n1 / 0", shown)
    assert (said["status"], said["ename"]) == ("error", "ZeroDivisionError")
    assert shown.text == "".join(str(i) * 50_000 + "\n" for i in range(40))
    assert [one["ename"] for one in shown.of("error")] == ["ZeroDivisionError"]
    assert not shown.of("execute_input")
    shown = Shown()
    assert called(kernel, line, "import asyncio\nawait asyncio.sleep(0.01)\n'awaited'", shown)["status"] == "ok"
    assert shown.of("execute_result")[0]["data"]["text/plain"] == "'awaited'"


def test_called_cells_and_others_run_in_one_context(kernel: KernelGuest, line: KernelLine) -> None:
    """As all cells of ipykernel do: what one sets of a context variable the next one finds."""
    called(kernel, line, "import contextvars\nvariable = contextvars.ContextVar('v')\nvariable.set(1)", Shown())
    shown = Shown()
    line.execute("print(variable.get())\nvariable.set(2)", shown)
    called(kernel, line, "print(variable.get())", shown)
    assert shown.text == "1\n2\n"


def test_a_called_cell_is_interrupted_by_its_name(kernel: KernelGuest, line: KernelLine) -> None:
    shown, asked = Shown(), list[str]()

    def stop(channel: str, message: Message) -> None:
        shown(channel, message)
        if not asked and message["header"]["msg_type"] == "stream":
            asked.append(line.interrupt(message["parent_header"]["msg_id"]))

    said = called(kernel, line, "print('on')\nimport time\nwhile True: time.sleep(0.01)", stop)
    assert (said["ename"], shown.text) == ("KeyboardInterrupt", "on\n")
    assert called(kernel, line, "'next'", shown)["status"] == "ok"


def test_a_cell_alone_has_no_other_behind_it(line: KernelLine) -> None:
    """A notebook that runs as a job has its own kernel in a guest, and asks that whether more cells are queued."""
    shown = Shown()
    asks = "from sublet.notebook.queued_cells import has_queued\nprint(has_queued(get_ipython().kernel, running=1))"
    line.execute(asks, shown)
    assert shown.text == "False\n"


def test_a_kernel_that_ends_is_asked_for_nothing() -> None:
    """Its sockets are closed before the loop in which the question waits."""
    loop, of = asyncio.new_event_loop(), types.SimpleNamespace
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.close()
        pair = of(to_stream=None, to_socket=socket)
        manager = of(get_shell_channel_to_subshell_pair=lambda _: pair)
        kernel = of(shell_channel_thread=of(manager=manager), io_loop=of(asyncio_loop=loop))
        assert not has_queued(kernel, running=0)
    loop.close()
