"""What a guest's kernel says, said again where the notebook is."""

from __future__ import annotations

import io
from typing import Any

import pytest

from sublet.errors import CapacityExceeded
from sublet.notebook.output import CellFailed, ShellFront, StatusLine, failed_cell
from sublet.notebook.status import CellBill, Finished, Running, Starting, Waiting


class Publisher:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def publish(self, **what: Any) -> None:
        self.said.append(("publish", what))

    def clear_output(self, wait: bool = False) -> None:
        self.said.append(("clear", {"wait": wait}))


class Socket:
    """A session and a socket in one: what was sent is kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, _socket: object, kind: str, content: dict[str, Any], **_: object) -> None:
        self.sent.append((kind, content))


class Kernel:
    def __init__(self) -> None:
        self.session = Socket()
        self.iopub_socket = object()
        self.comm_manager = type("Comms", (), {"comms": {}})()

    def get_parent(self) -> dict[str, Any]:
        return {}


class Shell:
    def __init__(self, kernel: Kernel | None = None) -> None:
        self.display_pub = Publisher()
        self.displayhook = type("Hook", (), {"write_output_prompt": lambda _: print("Out[3]: ", end="")})()
        if kernel is not None:
            self.kernel = kernel


def message(kind: str, **content: Any) -> dict[str, Any]:
    return {"header": {"msg_type": kind}, "content": content, "metadata": {}, "buffers": []}


def test_text_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    front = ShellFront(shell)
    front.show("iopub", message("stream", name="stdout", text="out\n"))
    front.show("iopub", message("stream", name="stderr", text="err\n"))
    front.show("iopub", message("execute_result", data={"text/plain": "1"}, metadata={}, execution_count=3))
    front.show("iopub", message("display_data", data={"image/png": "x"}, transient={"display_id": "d"}))
    front.show("iopub", message("update_display_data", data={"text/plain": "2"}, transient={"display_id": "d"}))
    front.show("iopub", message("clear_output", wait=True))
    front.show("iopub", message("status", execution_state="busy"))
    assert capsys.readouterr() == ("out\nOut[3]: 1\n", "err\n")
    assert [what for what, _ in shell.display_pub.said] == ["publish"] * 2 + ["clear"]
    assert [said.get("update") for _, said in shell.display_pub.said] == [False, True, None]
    assert shell.display_pub.said[0][1]["transient"] == {"display_id": "d"}


class Stream(io.StringIO):
    """As ipykernel's: what is written waits until it is flushed, which takes a round trip to another thread."""

    name, topic, parent_header, echo = "stdout", b"stream.stdout", {"msg_id": "of the cell"}, None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.flushes = 0
        self._flush_pending = False
        self._hooks: list[Any] = []

    def write(self, text: str) -> int:
        self._flush_pending = True
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1
        if self._flush_pending:
            self._flush_pending = False
            self.kernel.session.sent.append(("stream", {"name": self.name, "text": self.getvalue()}))
            self.seek(0)
            self.truncate()


def test_text_for_a_front_end_waits_for_no_other_thread_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    shell = Shell(kernel)
    shell.display_pub.pub_socket = kernel.iopub_socket  # type: ignore[attr-defined]
    shell.history_manager = type("History", (), {"input_hist_parsed": ["", "cell"]})()  # type: ignore[attr-defined]
    out, err = Stream(kernel), Stream(kernel)
    err.name = "stderr"
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    front = ShellFront(shell)
    front.show("iopub", message("stream", name="stdout", text="a"))
    front.show("iopub", message("stream", name="stderr", text="b"))
    front.show("iopub", message("execute_result", data={"text/plain": "1"}, metadata={}, execution_count=3))
    assert [kind for kind, _ in kernel.session.sent] == ["stream", "stream", "execute_result"]
    assert [said.get("text") for _, said in kernel.session.sent] == ["a", "b", None]
    assert out.flushes == err.flushes == 0
    for more in (
        message("stream", name="stdout", text="c"),
        message("execute_result", data={"text/plain": "2"}, metadata={}, execution_count=3),
    ):  # text of a thread that waits there comes first
        kernel.session.sent.clear()
        out.write("of a thread, ")
        front.show("iopub", more)
        assert kernel.session.sent[0][1]["text"].startswith("of a thread, ")
    assert not out.getvalue()
    out._hooks.append(lambda _: None)
    kernel.session.sent.clear()
    front.show("iopub", message("stream", name="stdout", text="d"))
    assert out.flushes == 3
    assert kernel.session.sent == [("stream", {"name": "stdout", "text": "d"})]


def test_questions_are_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    front = ShellFront(Shell())
    answers: list[str] = []
    front.answer = lambda _question, text: answers.append(text)
    monkeypatch.setattr("builtins.input", lambda prompt: f"typed at {prompt}")
    front.show("stdin", message("input_request", prompt="who? ", password=False))
    assert answers == ["typed at who? "]


def test_a_widget_talks_to_its_model_in_the_guest() -> None:
    kernel = Kernel()
    front = ShellFront(Shell(kernel))
    passed: list[Any] = []
    front.to_guest = passed.append
    front.show("iopub", message("comm_open", comm_id="c1", target_name="jupyter.widget", data={}))
    said = message("comm_msg", comm_id="c1", data={"value": 3})
    kernel.comm_manager.comms["c1"].handle_msg(said)
    front.show("iopub", message("comm_close", comm_id="c1", data={}))
    assert passed == [said]
    assert [kind for kind, _ in kernel.session.sent] == ["comm_open", "comm_close"]
    assert not kernel.comm_manager.comms


def test_an_error_has_the_name_and_the_traceback_it_had_in_the_cell() -> None:
    failed = failed_cell({"ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": ["a", "b"]})
    assert isinstance(failed, CellFailed)
    assert (type(failed).__name__, str(failed)) == ("ZeroDivisionError", "division by zero")
    assert failed._render_traceback_() == ["a", "b"]


ZERO = {"ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": ["line 1", "division by zero"]}
KEY = {"ename": "KeyError", "evalue": "4", "traceback": ["line 2", "KeyError: 4"]}


def test_an_error_that_did_not_end_its_cell_is_shown_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Of ``%run``, of ``%tb``, of ``showtraceback()``: nothing raises it, so its message is all there is of it."""
    kernel = Kernel()
    front = ShellFront(Shell(kernel))
    front.begin_cell()
    front.show("iopub", message("error", **ZERO))
    assert kernel.session.sent == []
    front.show("iopub", message("stream", name="stdout", text="after\n"))
    assert kernel.session.sent == [("error", ZERO)]
    front.show("iopub", message("error", **KEY))
    front.take_reply({"status": "ok"})
    assert kernel.session.sent == [("error", ZERO), ("error", KEY)]
    terminal = ShellFront(Shell())
    terminal.show("iopub", message("error", **KEY))
    terminal.take_reply({"status": "ok"})
    assert capsys.readouterr().out == "after\nline 2\nKeyError: 4\n"


def test_the_error_that_ends_a_cell_is_in_its_reply_only() -> None:
    kernel = Kernel()
    front = ShellFront(Shell(kernel))
    front.show("iopub", message("error", **ZERO))
    front.show("iopub", message("error", **KEY))
    front.show("iopub", message("display_data", data={"image/png": "x"}))
    front.take_reply({"status": "error", **KEY})
    assert kernel.session.sent == [("error", ZERO)]
    front.show("iopub", message("error", **ZERO))  # of a cell that is lost with its device
    front.begin_cell()
    front.take_reply({"status": "ok"})
    assert kernel.session.sent == [("error", ZERO)]


def test_the_status_changes_in_place_in_a_notebook() -> None:
    shell = Shell(Kernel())
    line = StatusLine(shell)
    for place in (2, 2, 1):
        line.show(Waiting(place=place, reason="held"))
    line.show(Starting(device="gpu0", host=True))
    said = [what for _, what in shell.display_pub.said]
    assert [what["update"] for what in said] == [False, True, True]
    assert len({what["transient"]["display_id"] for what in said}) == 1
    assert all({"text/plain", "text/html"} == set(what["data"]) for what in said)


def test_a_cell_that_wipes_its_output_does_not_keep_the_bill_from_being_seen() -> None:
    """What only passes is left out between its frames; what stays is shown anew."""
    shell = Shell(Kernel())
    front, line = ShellFront(shell), StatusLine(shell)
    front.on_cleared = line.cleared
    line.show(Starting(device="gpu0", host=True), quiet=True)
    front.show("iopub", message("clear_output", wait=True))
    line.show(Running(device="gpu0", host=True, vram_bytes=1, left_s=9.0), quiet=True)  # nothing is wiped yet
    front.show("iopub", message("display_data", data={"text/plain": "frame"}))
    line.show(Running(device="gpu0", host=True, vram_bytes=1, left_s=8.0), quiet=True)
    line.show(Finished(device="gpu0", host=True, bill=CellBill()))
    said = [(what["update"], what["data"]["text/plain"]) for name, what in shell.display_pub.said if name == "publish"]
    assert [update for update, _ in said] == [False, True, False, False]
    assert said[2][1] == "frame"
    assert "host device" in said[3][1]


def test_who_left_the_line_does_not_seem_to_stand_in_it() -> None:
    shell = Shell(Kernel())
    for error, seen in ((KeyboardInterrupt(), "not in line any more"), (CapacityExceeded("all are taken"), "all are")):
        line = StatusLine(shell)
        line.show(Waiting(place=1, reason="held"))
        with pytest.raises(type(error)), line.show_if_abandoned():
            raise error
        assert seen in shell.display_pub.said[-1][1]["data"]["text/plain"]


def test_an_interrupt_that_comes_while_the_line_is_shown_leaves_none_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = Shell(Kernel())
    line, publish = StatusLine(shell), shell.display_pub.publish

    def interrupted(**what: Any) -> None:
        publish(**what)
        monkeypatch.setattr(shell.display_pub, "publish", publish)
        raise KeyboardInterrupt

    monkeypatch.setattr(shell.display_pub, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt), line.show_if_abandoned():
        line.show(Waiting(place=1, reason="held"))
    first, last = (what for _, what in shell.display_pub.said)
    assert "not in line any more" in last["data"]["text/plain"]
    assert (last["update"], last["transient"]) == (True, first["transient"])


def test_on_a_terminal_the_same_line_is_never_written_twice() -> None:
    stream = io.StringIO()
    line = StatusLine(Shell(), stream=stream)
    for place in (2, 2, 1):
        line.show(Waiting(place=place, reason="held"))
    line.show(Starting(device="gpu0", host=True), quiet=True)
    assert stream.getvalue().count("\n") == 2
