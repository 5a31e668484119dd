"""Values of many objects, and what their crossings cost: ``python -m tests.notebook.many_objects KIND [LARGEST]``."""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import sys
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tests.notebook.crossing import Sides

SMALLEST: Final = 1000
LARGEST: Final = 1_024_000
STEPS: Final = ("first", "unchanged", "one changed", "made there")
"""Sent for the first time; sent and brought back unchanged; sent with one part changed; bound anew on the device."""
REPEATS_S: Final = 0.3
"""A size is measured again, with a new value, until its measurements took this long."""
TRIES: Final = 2
SHORT_MS: Final = 5.0
"""Of what is shorter no ratio is taken: it is mostly what any transfer costs."""


class Thing:
    def __init__(self, n: int) -> None:
        self.n = n
        self.text = str(n)


class Slim:
    __slots__ = ("n", "text")

    def __init__(self, n: int) -> None:
        self.n = n
        self.text = str(n)


@dataclasses.dataclass
class Record:
    n: int
    text: str


Pair = namedtuple("Pair", "n text")


class Node:
    def __init__(self, value: int) -> None:
        self.value = value
        self.next: Any = None
        self.left: Any = None
        self.right: Any = None


def linked_list(n: int) -> Node:
    head = last = Node(0)
    for i in range(1, n):
        last.next = Node(i)
        last = last.next
    return head


def tree(n: int) -> Node:
    nodes = [Node(i) for i in range(n)]
    for i, node in enumerate(nodes):
        node.left = nodes[2 * i + 1] if 2 * i + 1 < n else None
        node.right = nodes[2 * i + 2] if 2 * i + 2 < n else None
    return nodes[0]


def graph(n: int) -> list[Node]:
    """Each node refers to three others."""
    drawn = random.Random(n)
    nodes = [Node(i) for i in range(n)]
    for node in nodes:
        node.next, node.left, node.right = (nodes[drawn.randrange(n)] for _ in range(3))
    return nodes


def closures(n: int) -> list[Any]:
    def made(i: int) -> Callable[[int], int]:
        return lambda x: x + i

    return [made(i) for i in range(n)]


def module(n: int) -> types.ModuleType:
    made = types.ModuleType("made_by_hand")
    exec("\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(n)), vars(made))  # noqa: S102
    return made


def frame(n: int) -> Any:
    import pandas as pd

    return pd.DataFrame({"a": [str(i) for i in range(n)], "b": range(n)})


def frame_of_objects(n: int) -> Any:
    import pandas as pd

    return pd.DataFrame({"a": pd.Series([str(i) for i in range(n)], dtype=object), "b": range(n)})


def array_of_objects(n: int) -> Any:
    import numpy as np

    made = np.empty(n, object)
    made[:] = [str(i) for i in range(n)]
    return made


def array_of_things(n: int) -> Any:
    import numpy as np

    made = np.empty(n, object)
    made[:] = [Thing(i) for i in range(n)]
    return made


def arrays(n: int) -> list[Any]:
    import numpy as np

    return [np.full(4, i) for i in range(n)]


def tensors(n: int) -> list[Any]:
    import torch

    return [torch.full((4,), float(i)) for i in range(n)]


def figure(n: int) -> Any:
    """With a picture for each hundred."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(4, 4))
    count = max(1, n // 100)
    for i in range(count):
        made.add_subplot(count, 1, i + 1).plot([1, 2, 3])
    return made


KINDS: dict[str, Callable[[int], Any]] = {
    "list of ints": lambda n: list(range(n)),
    "list of floats": lambda n: [i / 7 for i in range(n)],
    "list of strings": lambda n: [str(i) for i in range(n)],
    "list of tuples": lambda n: [(i, str(i)) for i in range(n)],
    "list of lists": lambda n: [[i, str(i)] for i in range(n)],
    "list of dicts": lambda n: [{"n": i, "text": str(i)} for i in range(n)],
    "list of sets": lambda n: [{i, str(i)} for i in range(n)],
    "tuple": lambda n: tuple(map(str, range(n))),
    "tuple of lists": lambda n: tuple([i] for i in range(n)),
    "set of ints": lambda n: set(range(n)),
    "set of floats": lambda n: {i / 7 for i in range(n)},
    "set of strings": lambda n: set(map(str, range(n))),
    "set of tuples": lambda n: {(i, str(i)) for i in range(n)},
    "frozenset": lambda n: frozenset(map(str, range(n))),
    "dict": lambda n: {str(i): i for i in range(n)},
    "dict by tuples": lambda n: {(i, str(i)): i / 7 for i in range(n)},
    "dict of lists": lambda n: {str(i): [i] for i in range(n)},
    "dict of dicts": lambda n: {str(i): {"n": i} for i in range(n)},
    "Counter": lambda n: Counter(map(str, range(n))),
    "OrderedDict": lambda n: OrderedDict((str(i), i) for i in range(n)),
    "defaultdict": lambda n: defaultdict(int, {str(i): i for i in range(n)}),
    "defaultdict of lists": lambda n: defaultdict(list, {str(i): [i] for i in range(n)}),
    "deque": lambda n: deque(map(str, range(n))),
    "instances": lambda n: [Thing(i) for i in range(n)],
    "instances with slots": lambda n: [Slim(i) for i in range(n)],
    "dataclasses": lambda n: [Record(i, str(i)) for i in range(n)],
    "namedtuples": lambda n: [Pair(i, str(i)) for i in range(n)],
    "linked list": linked_list,
    "tree": tree,
    "graph": graph,
    "closures": closures,
    "module": module,
    "frame": frame,
    "frame of objects": frame_of_objects,
    "array of objects": array_of_objects,
    "array of instances": array_of_things,
    "small arrays": arrays,
    "small tensors": tensors,
    "figure": figure,
}
LIBRARIES: Final = {
    **dict.fromkeys(("frame", "frame of objects"), "pandas"),
    **dict.fromkeys(("array of objects", "array of instances", "small arrays"), "numpy"),
    "small tensors": "torch",
    "figure": "matplotlib",
}
"""What a kind needs that may not be there."""


def change(value: Any) -> None:
    """One part of it."""
    kind = type(value)
    if isinstance(value, dict):
        value[next(reversed(value))] = -5
    elif kind is set:
        value.add(-5)
    elif kind is list and type(value[0]) in (list, dict, set, int, float, str, tuple, Pair):
        value[len(value) // 2] = type(value[0])() if type(value[0]) is not Pair else Pair(0, "")
    elif kind is list and hasattr(value[0], "text"):
        value[len(value) // 2].text = "changed"
    elif kind is list and type(value[0]) is Node:
        value[len(value) // 2].value = -5
    elif kind is list and callable(value[0]):
        value[-1] = value[0]
    elif kind is list:  # arrays, tensors
        value[len(value) // 2][0] = -5
    elif kind is deque:
        value.append("changed")
    elif kind is tuple and type(value[0]) is list:
        value[len(value) // 2].append(5)
    elif kind is Node:
        (value.next or value).value = -5
    elif kind is types.ModuleType:
        value.changed = 5
    elif kind.__name__ == "DataFrame":
        value.iloc[len(value) // 2, 0] = "changed"
    elif kind.__name__ == "ndarray":
        value[len(value) // 2] = "changed"
    elif kind.__name__ == "Figure":
        value.axes[0].set_title("changed")


class Steps(NamedTuple):
    """One crossing after the other, each as something that is done once."""

    sides: Sides

    def first(self) -> None:
        self.sides.go("value")

    def unchanged(self) -> None:
        self.sides.back("value")
        self.sides.go("value")

    def one_changed(self) -> None:
        self.sides.go("value")

    def made_there(self) -> None:
        self.sides.back("value", "made", new=("made",))

    def all(self, make: Callable[[int], Any], n: int, measured: Callable[[Callable[[], None]], float]) -> list[float]:
        names = self.sides.here
        names["value"] = make(n)
        found = [measured(self.first), measured(self.unchanged)]
        change(names["value"])
        found.append(measured(self.one_changed))
        self.sides.there["made"] = make(n)
        found.append(measured(self.made_there))
        return found


def took_ms(step: Callable[[], None]) -> float:
    """Processor time."""
    began = time.process_time()
    step()
    return (time.process_time() - began) * 1e3


def measure(kind: str, n: int) -> list[float]:
    """Milliseconds of each step, the least of a few."""
    best: list[float] = []
    until = time.monotonic() + REPEATS_S
    while not best or time.monotonic() < until:
        gc.collect()
        found = Steps(Sides()).all(KINDS[kind], n, took_ms)
        best = list(map(min, best, found)) if best else found
    return best


def main(kind: str, largest: str = str(LARGEST)) -> None:
    """Print a line of JSON for each size: the size, and the milliseconds of each step. What took more than twice as
    long as half the size is measured again: others on the machine make a step slower, never faster."""
    n, before = SMALLEST, measure(kind, SMALLEST)
    while n <= int(largest):
        best = measure(kind, n)
        for _ in range(TRIES):
            if all(now <= 2.3 * half or now < SHORT_MS for now, half in zip(best, before, strict=True)):
                break
            best = list(map(min, best, measure(kind, n)))
        print(json.dumps([n, *best]), flush=True)
        n, before = 2 * n, best


if __name__ == "__main__":  # so that the classes are those of the program, as in a notebook
    main(*sys.argv[1:])
