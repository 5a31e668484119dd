"""Was there an order? An independent check of what clients of a register saw, after Wing and Gong.

It knows nothing of ballots or quorums: a history is a list of calls with the moments of asking and of answering, and
the register is a version with the id of its writer. The question is whether all calls can be put in one order that
respects real time and in which each answer is what a plain variable would have said. States that were tried are
remembered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call. A write whose fate its writer does not know has ``maybe`` set, and no end."""

    asked: float
    answered: float
    saw: tuple[int, bytes] | None
    """Of a read, or of a write that was refused for its version: the version and who wrote it."""
    expected: int = 0
    wrote: bytes | None = None
    """The id of the write; None for a call that changes nothing."""
    maybe: bool = False


def is_linearizable(calls: Sequence[Call]) -> bool:
    """Whether some order explains every answer."""
    history = sorted(calls, key=lambda call: call.asked)
    ends = [math.inf if call.maybe else call.answered for call in history]
    must = sum(1 << index for index, call in enumerate(history) if not call.maybe)
    seen: set[tuple[int, int, bytes]] = set()
    stack: list[tuple[int, int, bytes]] = [(0, 0, b"")]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        done, version, writer = node
        if done & must == must:
            return True
        # Whatever was asked after the first answer that is still open must wait for that answer.
        bound = min(ends[index] for index in range(len(history)) if not done >> index & 1)
        for index, call in enumerate(history):
            if call.asked > bound:
                break
            if done >> index & 1:
                continue
            if call.wrote is None:
                if call.saw == (version, writer):
                    stack.append((done | 1 << index, version, writer))
            elif call.expected == version:
                stack.append((done | 1 << index, version + 1, call.wrote))
    return False
