"""Kernels as a front end drives them, and a notebook's shell in this very process, to time what is within a cell."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["DISTRIBUTIONS", "Kernel", "Within", "shell_in"]

DISTRIBUTIONS: Final = ("sublet", "ipykernel", "jupyter_client", "ipython", "numpy", "torch")
PATIENCE_S: Final = 120.0


class Kernel:
    """One ipykernel, and a client of it."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        folder.mkdir(exist_ok=True)
        self._manager: Any = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env=dict(env))
        self.client: Any = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def run(self, code: str) -> str:
        """Run a cell; what it printed. Raises what it raised."""
        said: list[str] = []

        def hear(message: Mapping[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                said.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, output_hook=hear, timeout=PATIENCE_S)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
        return "".join(said)

    def timed_ms(self, code: str) -> float:
        """How long a cell takes, as the front end sees it."""
        began = time.perf_counter()
        self.run(code)
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Within:
    """A shell here, whose cells run on a device, and how long they were busy with variables."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.send_ms = self.take_ms = self.granted_at = 0.0
        self.sent_bytes = 0
        self.cells: Any = shell.magics_manager.registry["GpuMagics"].cells
        traffic = self.cells.traffic
        traffic_kind = type(traffic)
        send, take = traffic_kind.send, traffic_kind.take

        def timed_send(one: Any, *args: Any) -> Any:
            began = time.perf_counter()
            found = send(one, *args)
            self.send_ms, self.sent_bytes = (time.perf_counter() - began) * 1e3, found[0].nbytes
            return found

        def timed_take(one: Any, *args: Any) -> Any:
            began = time.perf_counter()
            found = take(one, *args)
            self.take_ms = (time.perf_counter() - began) * 1e3
            return found

        leased = self.cells._leased

        def timed_lease(*args: Any) -> Any:
            found = leased(*args)
            self.granted_at = time.time()
            return found

        self.cells._leased = timed_lease
        self._undo: tuple[Any, Any, Any] = (traffic_kind, send, take)
        traffic_kind.send, traffic_kind.take = timed_send, timed_take

    def value(self, name: str) -> Any:
        """Of the notebook's own."""
        return self._shell.user_ns[name]

    def run(self, code: str) -> None:
        from IPython.utils.capture import capture_output

        with capture_output():
            result = self._shell.run_cell(code, store_history=True)
        result.raise_error()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.cells.release()
        kind, send, take = self._undo
        kind.send, kind.take = send, take


@contextlib.contextmanager
def shell_in(home: str) -> Iterator[Within]:
    """A shell in this process, with an office that runs already."""
    from IPython.core.interactiveshell import InteractiveShell

    before, main = os.environ.get("SUBLET_HOME"), sys.modules["__main__"]
    os.environ["SUBLET_HOME"] = home
    shell = InteractiveShell.instance()
    sys.modules["__main__"] = shell.user_module
    try:
        shell.run_line_magic("load_ext", "sublet")
        within = Within(shell)
        try:
            yield within
        finally:
            within.close()
    finally:
        sys.modules["__main__"] = main
        InteractiveShell.clear_instance()
        if before is None:
            del os.environ["SUBLET_HOME"]
        else:
            os.environ["SUBLET_HOME"] = before
