"""What every program of the crash tests does around its stories: a process that is warm, and a fork for each order.

An order is a line of JSON on stdin: which story, where, and what is to be spoiled of it. The fork plays it, traced from
its first call on; what came of that is a line of JSON again (:class:`tests.crash.tracer.Run`).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sublet.errors import SubletError
from tests.crash.journal_program import REFUSED, Diary
from tests.crash.tracer import Fault, run

__all__ = ["Note", "serve", "take_orders"]

Note = Callable[[dict[str, object]], None]
Story = Callable[[Path, Note], object]
AnchoredStory = Callable[[Path, Path, Note], object]


def serve(stories: Mapping[str, Story], *, refused: tuple[type[Exception], ...] = (SubletError,)) -> None:
    """Until stdin ends. ``refused``: what a story may be refused with."""
    take_orders({name: _without_anchors(story) for name, story in stories.items()}, refused=refused)


def _without_anchors(story: Story) -> AnchoredStory:
    return lambda home, anchors, note: story(home, note)


def take_orders(stories: Mapping[str, AnchoredStory], *, refused: tuple[type[Exception], ...]) -> None:
    """Until stdin ends: each line is an order."""
    gc.collect()
    gc.freeze()  # what is loaded by now is no garbage of any story's
    for line in iter(sys.stdin.buffer.readline, b""):
        os.write(1, json.dumps(_carried_out(stories, json.loads(line), refused)).encode() + b"\n")


def _carried_out(
    stories: Mapping[str, AnchoredStory],
    order: dict[str, Any],
    refused: tuple[type[Exception], ...],
) -> dict[str, Any]:
    place = Path(order["place"])
    story, diary = stories[order["story"]], Diary(place / "diary")
    fault = Fault(**order["fault"]) if order["fault"] else None

    def play() -> int:
        try:
            story(place / "home", place / "anchors", diary.note)
        except refused:
            return REFUSED
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    return dataclasses.asdict(run(play, order["calls"], fault, listed=order["listed"]))
