"""Drives the one long-lived program that has the driver suspend and resume processes (``devices.suspend``).

It is started when it is first needed, and again if it ended. A question is a line, and so is its answer; questions wait
for each other, since the driver does one at a time anyway. Each has a deadline, since a driver may never answer: then
the program is killed and another one started, which first puts back what the question may have left half done (a
process that is locked would wait in its next call for ever). Only then is told that it failed. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.node.loop import READ, Loop, Timer
from sublet.wire.zygote import python_argv

PROGRAM: Final = "sublet.devices.suspend"
LINE_MAX: Final = 1 << 20
PIECE: Final = 64 * 1024
_STDIN, _STDOUT = 0, 1
START_S: Final = 60.0
"""To load the driver."""
GRACE_S: Final = 5.0
"""An answer may come so much later than it was asked for."""
RESUME_S: Final = 120.0
"""To put back what a card has at most, and to put back what a failed question left."""

OnAnswer = Callable[[Mapping[str, Any]], None]
"""Called with the answer: it has ``failed`` in it, with why, where it came to nothing; and ``stuck`` where it could not
be put back either, so that the processes are of no use any more."""


@dataclass(slots=True)
class _Question:
    request: dict[str, object]
    on_answer: OnAnswer
    within_s: float
    why: str = ""
    """Not empty: this puts back what a question left that failed for this reason."""
    is_last: bool = False
    """If this fails as well, it is not tried again."""


class Suspending:
    """Of one supervisor."""

    def __init__(
        self,
        loop: Loop,
        on_life: Callable[[int, bool], None],
        argv: Sequence[str] | None = None,
        *,
        grace_s: float = GRACE_S,
        resume_s: float = RESUME_S,
    ) -> None:
        """``on_life`` is told the pid of the program when it was made, and when it has ended."""
        self._loop = loop
        self._on_life = on_life
        self._argv = tuple(argv) if argv is not None else python_argv(sys.executable, PROGRAM)
        self._pid = self._to = self._from = -1
        self._is_ready = False
        self._received = b""
        self._grace_s, self._resume_s = grace_s, resume_s
        self._questions: deque[_Question] = deque()
        self._is_asking = False
        self._timer: Timer | None = None

    def suspend(
        self,
        pids: Sequence[int],
        timeout_ms: int,
        on_answer: OnAnswer,
        *,
        copy_s: float = 0.0,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take these off their cards, all or none: so long until their work is at an end, and ``copy_s`` to copy what
        they have there. ``groups``: processes of one program, of which only one may use a card."""
        request: dict[str, object] = {"do": "suspend", "pids": list(pids), "timeout_ms": timeout_ms}
        if groups:
            request["groups"] = [list(group) for group in groups]
        self._ask(_Question(request, on_answer, timeout_ms / 1000 + copy_s + self._grace_s))

    def resume(self, pids: Sequence[int], pairs: Sequence[tuple[str, str]], on_answer: OnAnswer) -> None:
        """Put them back. ``pairs``: which card, by UUID, has become which. All are named if one is another now."""
        moved = any(old != new for old, new in pairs)
        bare = [[_bare(old), _bare(new)] for old, new in pairs] if moved else []
        self._ask(_Question({"do": "resume", "pids": list(pids), "pairs": bare}, on_answer, self._resume_s))

    def end_if_idle(self) -> None:
        """End the program if nothing is asked of it: it keeps every card open, and so from being reset."""
        if not self._questions:
            self._over()

    def close(self) -> None:
        """End it. Callers that still wait are not told."""
        self._questions.clear()
        self._over()

    # ---- within ----

    def _ask(self, question: _Question) -> None:
        self._questions.append(question)
        self._start_if_needed()
        self._next()

    def _start_if_needed(self) -> None:
        if self._pid >= 0 or not self._questions:
            return
        try:
            self._start()
        except OSError as error:
            why = f"its helper could not be started ({error.strerror})"
            self._loop.soon(lambda: self._fail(why))
        else:
            self._timer = self._loop.after(START_S, lambda: self._broke("the driver could not be loaded in time"))

    def _next(self) -> None:
        if not self._questions or self._is_asking or not self._is_ready:
            return
        self._is_asking = True
        try:
            os.write(self._to, json.dumps(self._questions[0].request).encode() + b"\n")  # a line fits into the pipe
        except OSError:
            pid = self._pid
            self._loop.soon(lambda: self._ended(pid))
            return
        within_s = self._questions[0].within_s
        self._timer = self._loop.after(within_s, lambda: self._broke(f"the driver did not answer in {within_s:.0f} s"))

    def _start(self) -> None:
        made: list[int] = []
        try:
            made += os.pipe2(os.O_CLOEXEC)
            made += os.pipe2(os.O_CLOEXEC)
            ours_in, theirs_out, theirs_in, ours_out = made
            actions = [(os.POSIX_SPAWN_DUP2, theirs_in, _STDIN), (os.POSIX_SPAWN_DUP2, theirs_out, _STDOUT)]
            self._pid = os.posix_spawn(
                self._argv[0],
                self._argv,
                dict(os.environ),
                file_actions=actions,
                setsigdef=[signal.SIGCHLD],
                setsid=True,
            )
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        os.close(theirs_in)
        os.close(theirs_out)
        self._from, self._to = ours_in, ours_out
        try:
            self._loop.watch(self._from, READ, self._on_readable)
            os.set_blocking(self._from, False)
            self._on_life(self._pid, True)
        except OSError:  # unheard it is of no use; and unknown it would be a stranger, so nothing were verified clean
            self._over()
            raise

    def _on_readable(self, events: int) -> None:
        try:
            piece = os.read(self._from, PIECE)
        except BlockingIOError:
            return
        if not piece or len(self._received) > LINE_MAX:
            self._ended(self._pid)
            return
        self._received += piece
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._on_answer(line)

    def _on_answer(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = {"failed": "its helper said what cannot be read"}
        if not self._is_ready:
            if "ready" in answer:
                self._is_ready = True
                self._stop_timer()
            else:
                self._fail(str(answer.get("failed", "its helper does not answer")))
        elif self._is_asking:
            question = self._questions.popleft()
            self._is_asking = False
            self._stop_timer()
            question.on_answer(_outcome(question, answer))
        self._next()

    def _ended(self, pid: int) -> None:
        """The end of one program can be seen twice in one turn: by reading and by writing. By the second time the next
        one may run."""
        if self._pid == pid >= 0:
            self._broke("its helper ended")

    def _broke(self, why: str) -> None:
        """Nothing more is to be expected of this program. What it was asked is undone by the next one; what waits for
        its turn is asked of that one as well."""
        was_asking = self._is_asking
        self._over()
        if not was_asking:
            self._fail(why)
            return
        self._is_asking = False
        question = self._questions.popleft()
        if question.is_last:
            self._start_if_needed()
            question.on_answer(_outcome(question, {"failed": why}))
            return
        if question.request["do"] == "resume":  # where it stopped, it goes on
            question.is_last = True
        else:
            undo: dict[str, object] = {"do": "resume", "pids": question.request["pids"], "pairs": [], "undo": True}
            question = _Question(undo, question.on_answer, self._resume_s, why, is_last=True)
        self._questions.appendleft(question)
        self._start_if_needed()

    def _fail(self, why: str) -> None:
        questions, self._questions = list(self._questions), deque()
        self._is_asking = False
        for question in questions:
            question.on_answer(_outcome(question, {"failed": why}))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self._stop_timer()
        if self._pid < 0:
            return
        self._loop.forget(self._from)
        os.close(self._from)
        os.close(self._to)
        with contextlib.suppress(ProcessLookupError):  # a child that was not waited for keeps its number
            os.kill(self._pid, signal.SIGKILL)
        self._on_life(self._pid, False)
        self._pid = self._to = self._from = -1
        self._is_ready, self._received = False, b""


def _outcome(question: _Question, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer for the caller. Of a question that was undone: that it failed, and whether it could be undone."""
    if not question.why:
        return answer
    stuck = {"stuck": True} if "failed" in answer else {}
    return {"failed": question.why, **stuck}


def _bare(uuid: str) -> str:
    """``GPU-00010203-…`` as 32 digits."""
    return uuid.rpartition("GPU-")[2].replace("-", "")
