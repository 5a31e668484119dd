"""What a guest's kernel says between cells is heard, also when it came with what was said to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sublet.notebook.kernel_line import Between


class Loop:
    """An event loop that is told what there is to do, and does it when a test says so."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], object]] = []

    def add_callback(self, callback: Callable[[], object]) -> None:
        self.todo.append(callback)

    def add_handler(self, *_: object) -> None:
        """The test's line has nothing to read: all was read already."""

    def remove_handler(self, *_: object) -> None:
        pass


class Line:
    """One that has heard something in the instant in which something was said."""

    def __init__(self, *kept: str) -> None:
        self.kept = list(kept)

    @property
    def has_kept(self) -> bool:
        return bool(self.kept)

    def fileno(self) -> int:
        return 7

    def wait(self, _: float) -> list[tuple[str, dict[str, Any]]]:
        kept, self.kept = self.kept, []
        return [("iopub", {"header": {"msg_type": kind}}) for kind in kept]


def test_what_came_with_something_that_was_said_is_not_left_lying() -> None:
    loop, shown = Loop(), list[str]()
    shell = SimpleNamespace(kernel=SimpleNamespace(io_loop=loop))
    between = Between(shell, lambda _, message: shown.append(message["header"]["msg_type"]))
    line = Line("display_data")
    between.watch(line)  # type: ignore[arg-type]
    line.kept += ["comm_msg"]
    between.on_sent()
    between.on_sent()
    for callback in loop.todo:
        callback()
    assert shown == ["display_data", "comm_msg"]
    between.stop()
    between.on_sent()
