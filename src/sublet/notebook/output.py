"""Replays what a guest's kernel displays in the notebook, as if the cell had run there.

Text goes through ``sys.stdout`` and pictures through the shell's display publisher, so ``%%capture`` and other
wrappers take them as usual. Where there is a Jupyter front end, display ids and comms are passed on as they
are: a progress bar updates in place, and a widget talks to its model in the guest.
"""

from __future__ import annotations

import contextlib
import getpass
import html
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from sublet.background import start_timer
from sublet.durable.rebuild import graph_hint
from sublet.errors import SubletError
from sublet.notebook.kernel_line import Message
from sublet.notebook.status import (
    CellEnded,
    CellStatus,
    Running,
    Starting,
    Suspended,
    Waiting,
    as_html,
    as_text,
    is_unusual,
    line_of_html,
)

_SHOWN: Final = frozenset({"stream", "display_data", "execute_result", "error"})
"""What takes the place of an output that is to be cleared."""
_AFTER_ERROR: Final = frozenset({"stream", "execute_result", "error", "input_request", "clear_output"})
"""Before these an error is shown that came before them. Pictures are left out: IPython draws the figures of a cell when
it has ended, with an error too."""
_PASSED_ON: Final = frozenset({"page", "set_next_input"})
"""Kinds of payload that a person gets to see."""
SILENT: Final = frozenset({"status", "execute_input"})
"""Messages that show nothing."""


_COLOURS: Final = r"(?:\x1b\[[0-9;]*m)*"
_FIRST_LINE: Final = re.compile(rf"(?m)^[ ]*{_COLOURS}[ ]*1{_COLOURS}[ ]*{_COLOURS}# %%gpu{_COLOURS}[ ]*\n")
"""The line of ``%%gpu``, which is a comment where the cell runs, so that lines have the numbers that they have in the
notebook. Around the line that failed it is not worth showing."""


class CellFailed(Exception):
    """The cell raised; its traceback is the one from the guest, and points at the cell's own lines."""

    def __init__(self, name: str, value: str, traceback: list[str]) -> None:
        super().__init__(value)
        self.ename = name
        self.evalue = value
        self.traceback = traceback

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of ours."""
        return self.traceback


def number_of_cell(shell: Any) -> int:
    """Of the cell that runs. IPython counts on before or after it, depending on its version; its inputs tell."""
    return len(shell.history_manager.input_hist_parsed) - 1


def failed_cell(content: Mapping[str, Any], note: str = "") -> CellFailed:
    """The error of a reply, under the name that the cell's own exception has, so that front ends and nbclient show it
    as what it was. ``note``: stands below its traceback."""
    name = str(content.get("ename", "Exception"))
    kind = type(name, (CellFailed,), {"__module__": "builtins"})
    traceback = [_FIRST_LINE.sub("", part) for part in content.get("traceback", ())]
    failed: CellFailed = kind(name, str(content.get("evalue", "")), traceback)
    if note:
        failed.add_note(note)
        failed.traceback.append(note)
    return failed


class ShellFront:
    """One IPython shell: in a kernel, or in a terminal."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.answer: Callable[[Message, str], None] = lambda _question, _text: None
        """Gives what was typed to the guest."""
        self.to_guest: Callable[[Message], None] = lambda _message: None
        """Passes on what a widget's view says."""
        self.may_stop: Callable[[Callable[[], object]], None] = _wait
        """Waits for something that may take long, or until an interrupt comes."""
        self.on_cleared: Callable[[], None] = lambda: None
        """Told when a cell has wiped its output, and the status line with it."""
        self._clears_next = False
        self._error: Mapping[str, Any] | None = None
        """What may be the error that the cell ends with."""

    @property
    def kernel(self) -> Any:
        """ipykernel's, where the shell lives in one; None in a terminal."""
        return getattr(self._shell, "kernel", None)

    def show(self, channel: str, message: Message) -> None:
        """Anything that a cell says while it runs."""
        content, kind = message["content"], message["header"]["msg_type"]
        if self._clears_next and kind in _SHOWN:
            self._clears_next = False
            self.on_cleared()
        if kind in _AFTER_ERROR:
            self._show_error()
        match kind:
            case "stream":
                self._show_text(sys.stderr if content["name"] == "stderr" else sys.stdout, content["text"])
            case "execute_result" if self._has_numbers:
                self._show_result(content)
            case "execute_result" if self.is_terminal:
                self._shell.displayhook.write_output_prompt()
                print(content["data"].get("text/plain", ""))  # noqa: T201
            case "display_data" | "update_display_data" | "execute_result":
                self._shell.display_pub.publish(
                    data=content["data"],
                    metadata=content.get("metadata") or {},
                    transient=content.get("transient") or {},
                    update=kind == "update_display_data",
                )
            case "error":
                self._error = content
            case "clear_output":
                self._shell.display_pub.clear_output(wait=bool(content.get("wait")))
                if content.get("wait"):
                    self._clears_next = True
                else:
                    self.on_cleared()
            case "input_request":
                self._pass_question(message)
            case "comm_open" | "comm_msg" | "comm_close":
                self._pass_comm(kind, message)
            case _:
                pass  # status, execute_input, replies to others: nothing for a person

    @property
    def is_terminal(self) -> bool:
        """Whether what is shown is text, line after line; not while ``%%capture`` takes it."""
        return self.kernel is None and not hasattr(self._shell.display_pub, "outputs")

    @property
    def takes_input(self) -> bool:
        """Whether the front end can answer a question. If not, the cell is told so when it asks."""
        return self.kernel is None or bool(getattr(self.kernel, "_allow_stdin", True))

    @property
    def _has_numbers(self) -> bool:
        """Whether a result can be shown under the number of its cell: in a kernel, unless ``%%capture`` takes it."""
        return self.kernel is not None and hasattr(self._shell.display_pub, "pub_socket")

    def _show_text(self, stream: Any, text: str) -> None:
        """Straight to the front end where the stream would only hand it on: to flush one takes a round trip to the
        thread of the outputs, which sends everything in the order in which it was given it."""
        kernel = self.kernel
        if kernel is None or not _is_empty(stream) or stream.echo is not None or stream._hooks:
            stream.write(text)
            stream.flush()
            return
        content = {"name": stream.name, "text": text}
        kernel.session.send(kernel.iopub_socket, "stream", content, parent=stream.parent_header, ident=stream.topic)

    def _show_result(self, content: dict[str, Any]) -> None:
        """The value of the last line: with the number that the cell has here, not there."""
        _flush_streams()
        kernel = self.kernel
        result = {
            "execution_count": number_of_cell(self._shell),
            "data": content["data"],
            "metadata": content.get("metadata") or {},
        }
        kernel.session.send(
            kernel.iopub_socket, "execute_result", result, parent=kernel.get_parent(), ident=b"execute_result"
        )

    def _show_error(self) -> None:
        """One that did not end its cell: of a script that ``%run`` ran, of ``%tb``, of ``showtraceback()``."""
        error, self._error = self._error, None
        if error is None:
            return
        traceback = [_FIRST_LINE.sub("", part) for part in error["traceback"]]
        _flush_streams()
        if (kernel := self.kernel) is None:
            print("\n".join(traceback))  # noqa: T201
            return
        content = {"ename": error["ename"], "evalue": error["evalue"], "traceback": traceback}
        kernel.session.send(kernel.iopub_socket, "error", content, parent=kernel.get_parent(), ident=b"error")

    def begin_cell(self) -> None:
        """Of a cell that was lost with its device nothing is left to show."""
        self._error = None

    def take_reply(self, reply: Mapping[str, Any]) -> None:
        """The cell has ended. Its own error is in its reply, and is raised by the caller; another one is shown here."""
        if reply["status"] == "error" and self._error is not None:
            own = any(
                all(reply.get(key) == self._error.get(key) for key in keys)
                for keys in (("ename", "evalue"), ("traceback",))
            )
            self._error = None if own else self._error
        self._show_error()
        self._take_payload(reply.get("payload") or [])

    def _take_payload(self, payload: list[dict[str, Any]]) -> None:
        """What the cell's reply asks of the front end besides its outputs: a page of help (``obj?``), the next cell."""
        for one in payload:
            if one.get("source") not in _PASSED_ON:
                continue  # to leave, for instance, is for the process on the device alone
            manager = getattr(self._shell, "payload_manager", None)
            if self.kernel is not None and manager is not None:
                manager.write_payload(one, single=False)
            elif one["source"] == "page":
                from IPython.core.page import page

                page(one.get("data", {}), start=int(one.get("start") or 0))

    def _pass_question(self, message: Message) -> None:
        """Unless it is interrupted: then the cell is as well, and its question with it."""
        question, typed = message["content"], list[str]()
        prompt, is_password = question.get("prompt", ""), bool(question.get("password"))
        self.may_stop(lambda: typed.append(self._ask(prompt, is_password)))
        if typed:
            self.answer(message, typed[0])

    def _ask(self, prompt: str, is_password: bool) -> str:
        return getpass.getpass(prompt) if is_password else input(prompt)

    def _pass_comm(self, kind: str, message: Message) -> None:
        kernel = self.kernel
        if kernel is None:
            return
        content = message["content"]
        comm_id = content["comm_id"]
        comms = kernel.comm_manager.comms
        if kind == "comm_open":
            comms[comm_id] = _GuestComm(comm_id, str(content.get("target_name", "")), self)
        elif kind == "comm_close":
            comms.pop(comm_id, None)
        kernel.session.send(
            kernel.iopub_socket,
            kind,
            content,
            parent=kernel.get_parent(),
            metadata=message.get("metadata"),
            buffers=message.get("buffers"),
            ident=f"comm-{comm_id}".encode(),
        )


class _GuestComm:
    """A comm whose kernel side is in the guest: what its view says goes there."""

    def __init__(self, comm_id: str, target_name: str, front: ShellFront) -> None:
        self.comm_id = comm_id
        self.target_name = target_name
        """What a page that is loaded anew asks for, to find its widgets again."""
        self._front = front

    def handle_msg(self, message: Message) -> None:
        self._front.to_guest(message)

    def handle_close(self, message: Message) -> None:
        self._front.to_guest(message)


class StatusLine:
    """The line of one cell. In a notebook it changes in place; elsewhere only what is worth a line of its own is
    written, and the same line never twice.

    ``late_s``: in a kernel whose every cell runs on a device, an ordinary cell shows what it would show in any kernel
    and nothing else. The line appears when the cell waits for a device or loses it, or is not over after so long.
    """

    def __init__(self, shell: Any, *, stream: Any = None, late_s: float = 0.0) -> None:
        self._shell = shell
        self._stream = stream
        self._late_s = late_s
        self._began_s = time.monotonic()
        self._lock = threading.RLock()
        """Between the cell and the timer that shows the line when it is late."""
        self._timer: threading.Timer | None = None
        self._id = ""
        self._last = ""
        self._was_cleared = False

    @contextlib.contextmanager
    def show_if_abandoned(self) -> Iterator[None]:
        """Show that the request left the queue if the block raises, so that it does not seem to wait on."""
        try:
            yield
        except KeyboardInterrupt:
            self.show_abandoned(
                CellEnded(message="interrupted, and not in line any more", do="Rerun this cell to ask again.")
            )
            raise
        except SubletError as error:
            self.show_abandoned(CellEnded(message=error.message, do=error.do))
            raise

    def show_abandoned(self, status: CellEnded) -> None:
        """The cell is given up: what was said of it does not hold any more."""
        if self._id or self._last:  # of what an interrupt cut short just after it was shown, the id alone
            self.show(status, quiet=True)

    def cleared(self) -> None:
        """The cell wiped it away. What only passes is not shown again between its frames; what stays is."""
        self._id = self._last = ""
        self._was_cleared = True

    def show(self, status: CellStatus, *, quiet: bool = False) -> None:
        """It stands like this now. ``quiet``: only where it can take the place of what was there."""
        text = as_text(status)
        if text == self._last:
            return
        if getattr(self._shell, "kernel", None) is None:
            if not quiet:
                print(text, file=self._stream or sys.stderr)
                self._last = text
            return
        with self._lock:
            self._stop_timer()
            if self._may_wait(status):
                return
            self._publish(status, text, quiet=quiet)

    def _may_wait(self, status: CellStatus) -> bool:
        """Whether nothing is shown of this yet. If it lasts, a timer shows it."""
        left_s = self._began_s + self._late_s - time.monotonic()
        if self._id or left_s <= 0 or isinstance(status, (Waiting, Suspended)) or getattr(status, "notice", ""):
            return False
        if isinstance(status, (Starting, Running)):
            self._timer = start_timer("status", left_s, lambda: self._show_late(status))
            return True
        return isinstance(status, CellEnded) or not is_unusual(status)

    def _show_late(self, status: CellStatus) -> None:
        with self._lock:
            if self._timer is threading.current_thread():
                self._timer = None
                self._publish(status, as_text(status), quiet=True)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _publish(self, status: CellStatus, text: str, *, quiet: bool) -> None:
        if quiet and self._was_cleared and not getattr(status, "notice", ""):
            return
        is_new = not self._id
        if is_new:
            self._id = _new_id()
        data = {"text/plain": text, "text/html": as_html(status)}
        self._display(data, {"display_id": self._id}, update=not is_new)
        self._last = text

    def _display(self, data: dict[str, str], transient: dict[str, str], *, update: bool) -> None:
        """In an ordinary kernel without the wait for the thread of the outputs with which ``publish`` begins: what is
        printed here was flushed when it was printed, and the line stands in a place of its own."""
        publisher = self._shell.display_pub
        if not hasattr(publisher, "pub_socket") or getattr(publisher, "_hooks", None):
            publisher.publish(data=data, metadata={}, transient=transient, update=update)
            return
        kind = "update_display_data" if update else "display_data"
        content = {"data": data, "metadata": {}, "transient": transient}
        publisher.session.send(
            publisher.pub_socket, kind, content, parent=publisher.parent_header, ident=publisher.topic
        )


def show_line(shell: Any, text: str) -> None:
    """One line beside the output, not in it: a notebook shows it as it shows the status."""
    line = f"sublet: {text}"
    if getattr(shell, "kernel", None) is None:
        print(line, file=sys.stderr)  # noqa: T201
        return
    shell.display_pub.publish(data={"text/plain": line, "text/html": line_of_html(html.escape(text))})


def _wait(for_it: Callable[[], object]) -> None:
    for_it()


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if not _is_empty(stream):
            stream.flush()


def _is_empty(stream: Any) -> bool:
    """Whether no text waits in it, such as that of another thread. Known of ipykernel's streams alone."""
    return not getattr(stream, "_flush_pending", True) and hasattr(stream, "topic")


def _new_id() -> str:
    import uuid

    return f"sublet-{uuid.uuid4().hex}"


# ---------------------------------------------------------------------------------------------------------------- hints
#
# A one-line hint below a plain cell whose result is puzzling because cells run in two processes.


LOOKS_AT_GPUS: Final = re.compile(r"\.(?:system|getoutput)\(\s*['\"]\s*(nvidia-smi|nvtop|gpustat|nvcc)\b")
"""What IPython makes of ``!nvidia-smi``."""
ON_A_DEVICE: Final = "run_cell_magic("


class Hints:
    """Of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        shell.events.register("post_run_cell", self._on_cell)

    def _on_cell(self, result: Any) -> None:
        python = str(getattr(result.info, "transformed_cell", None) or "")
        if ON_A_DEVICE in python:
            return
        if command := LOOKS_AT_GPUS.search(python):
            show_line(
                self._shell,
                f"{command[1]} ran beside the notebook, which has no lease and may not see a GPU; to see the leased "
                "device put %%gpu above it, or run %gpu",
            )
        error = result.error_in_exec
        if error is not None and (hint := graph_hint(error)):
            show_line(self._shell, hint)
