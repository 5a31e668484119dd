"""A notebook's shell as a process of its own, told what to run over its standard input, so that it can be interrupted
and killed; and a hand that takes its lease away at a chosen step of a cell."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import sublet
from sublet.client.fabric import Fabric
from sublet.compute.kernel_guest import KernelGuest
from sublet.errors import SubletError
from sublet.notebook.kernel_line import KernelLine

__all__ = ["main"]

GONE_S = 30.0


def main() -> None:
    """Run what each line says, and answer with a line."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shell = InteractiveShell.instance()
    sys.modules["__main__"] = shell.user_module
    shell.run_line_magic("load_ext", "sublet")
    _say(answers, {"pid": os.getpid()})
    hand = _Hand(shell)
    while line := _next_line():
        asked = json.loads(line)
        hand.step, hand.waits, hand.how = asked.get("step", ""), asked.get("waits", False), asked.get("how", "")
        error: BaseException | None
        with capture_output() as caught:
            try:
                result = shell.run_cell(asked["run"], store_history=True)  # type: ignore[no-untyped-call]
                error = result.error_before_exec or result.error_in_exec
            except KeyboardInterrupt as interrupt:  # it came when the cell was over
                error = interrupt
        names = [getattr(error, "ename", ""), type(error).__name__]
        said = {"error": "" if error is None else names[0] or names[1], "said": str(error or ""), "took": hand.took}
        _say(answers, {**said, "out": caught.stdout, "err": caught.stderr})
        hand.took = False


def _next_line() -> str:
    while True:
        try:
            return sys.stdin.readline()
        except KeyboardInterrupt:  # it came after the cell
            continue


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


class _Hand:
    """Takes the lease when a cell comes to a step: once."""

    def __init__(self, shell: Any) -> None:
        self.step = ""
        self.waits = False
        """Whether the cell goes on only when everything has ended."""
        self.how = ""
        """``interrupt``: nothing is taken, somebody types Ctrl-C."""
        self.took = False
        self._cells = shell.magics_manager.registry["GpuMagics"].cells
        self._around_calls(KernelGuest.begin, KernelGuest.result)
        KernelGuest.__init__ = self._around(KernelGuest.__init__, lambda *_: "start")  # type: ignore[method-assign]
        KernelLine.send = self._around(KernelLine.send, lambda _self, _channel, kind, *_: kind)  # type: ignore[method-assign]
        Fabric.gpu = self._around(Fabric.gpu, lambda *_: "gpu")  # type: ignore[method-assign]

    def _around_calls(self, begin: Callable[..., Any], result: Callable[..., Any]) -> None:
        names: dict[int, str] = {}

        def begun(kernel: KernelGuest, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            self._at(f"before {function.__name__}")
            pending = begin(kernel, function, *args, **keywords)
            names[id(pending)] = function.__name__
            self._at(f"during {function.__name__}")
            return pending

        def came(kernel: KernelGuest, pending: Any) -> Any:
            found = result(kernel, pending)
            self._at(f"after {names.pop(id(pending))}")
            return found

        KernelGuest.begin = begun  # type: ignore[assignment, method-assign]
        KernelGuest.result = came  # type: ignore[assignment, method-assign]

    def _around(self, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            step = name(*args)
            self._at(f"before {step}")
            found = call(*args, **keywords)
            if step == "gpu":
                self._cells.lease = found
            self._at(f"after {step}")
            return found

        return called

    def _at(self, step: str) -> None:
        lease = self._cells.lease
        if step != self.step or lease is None or self.took:
            return
        self.took = True
        if self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            return
        with sublet.connect() as fabric:
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
        until_s = time.monotonic() + GONE_S
        while self.waits and time.monotonic() < until_s:
            kernel = self._cells._kernel
            if lease.end is not None and (kernel is None or kernel.is_lost or not _answers(kernel)):
                return
            time.sleep(0.01)


def _answers(kernel: Any) -> bool:
    try:
        kernel._worker.exchange.line.send(lambda link: None)
    except SubletError:
        return False
    return kernel.channels.link.over is None


if __name__ == "__main__":
    main()
