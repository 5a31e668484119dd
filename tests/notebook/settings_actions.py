"""Actions on every setting of the table, and the state they leave, for a process that a test drives."""

from __future__ import annotations

import collections
import decimal
import importlib
import logging
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

from sublet.notebook.environment import CellEnvironment

WHAT_TO_DO: Any = ("ignore", "always", "default", "once")
LIBRARIES = ("numpy", "torch", "pandas", "matplotlib")


def _load(name: str) -> Any:
    return importlib.import_module(name)


def _draw(n: int) -> Any:
    return [random.random() for _ in range(n)], random.gauss(0, 1)


def _draw_numpy(n: int) -> Any:
    return _load("numpy").random.standard_normal(n).tolist(), float(_load("numpy").random.rand())


def _rc(n: int) -> None:
    parameters = _load("matplotlib").rcParams
    parameters["lines.linewidth"] = n
    parameters["figure.figsize"] = [1.0, 2.0]  # a new one: the first is that of the defaults as well
    parameters["figure.figsize"][0] = float(n + 1)


def _style(n: int) -> None:
    style = _load("matplotlib.style")
    style.use(["ggplot", "classic", "default", "bmh"][n])


def _environment(n: int) -> None:
    if n:
        os.environ["TEST_SETTING"] = str(n)
    else:
        os.environ.pop("TEST_SETTING", None)


def _trap(n: int) -> None:
    decimal.getcontext().traps[decimal.Inexact] = n == 1


ACTIONS: dict[str, Callable[[int], Any]] = {
    "draw": _draw,
    "draw again": _draw,
    "draw numpy": _draw_numpy,
    "draw numpy again": _draw_numpy,
    "draw torch": lambda n: _load("torch").randn(n).tolist(),
    "look": lambda n: repr(observe(LIBRARIES[n])),
    "look again": lambda n: repr(observe(LIBRARIES[n])),
    "import numpy": lambda n: _load("numpy") and None,
    "import torch": lambda n: _load("torch") and None,
    "import pandas": lambda n: _load("pandas") and None,
    "import matplotlib": lambda n: _load("matplotlib") and None,
    "seed": random.seed,
    "seed numpy": lambda n: _load("numpy").random.seed(seed=n),
    "seed torch": lambda n: _load("torch").manual_seed(n) and None,
    "generator of numpy": lambda n: (
        _load("numpy").random.set_bit_generator(_load("numpy").random.PCG64(n))
        if n
        else _load("numpy").random.set_bit_generator(_load("numpy").random.MT19937(n))
    ),
    "dtype": lambda n: _load("torch").set_default_dtype([_load("torch").float32, _load("torch").float64][n % 2]),
    "gradients": lambda n: _load("torch").set_grad_enabled(bool(n % 2)) and None,
    "deterministic": lambda n: _load("torch").use_deterministic_algorithms(bool(n % 2), warn_only=n > 1),
    "cudnn": lambda n: setattr(_load("torch").backends.cudnn, "benchmark", bool(n % 2)),
    "precision": lambda n: _load("torch").set_float32_matmul_precision(["high", "highest"][n % 2]),
    "threads": lambda n: _load("torch").set_num_threads(n + 1),
    "torch print": lambda n: _load("torch").set_printoptions(precision=n + 2),
    "hook": lambda n: _load("torch").utils.hooks.RemovableHandle(collections.OrderedDict()).id,
    "errors": lambda n: _load("numpy").seterr(divide=["warn", "ignore", "raise", "print"][n]) and None,
    "numpy print": lambda n: _load("numpy").set_printoptions(precision=n),
    "pandas rows": lambda n: _load("pandas").set_option("display.max_rows", n + 5),
    "pandas format": lambda n: setattr(_load("pandas").options.display, "float_format", f"<{n}:{{:.1f}}>".format),
    "rc": _rc,
    "style": _style,
    "decimal": lambda n: setattr(decimal.getcontext(), "prec", 20 + n),
    "trap": _trap,
    "flag": lambda n: decimal.getcontext().flags.update({decimal.Rounded: bool(n % 2)}),
    "warnings": lambda n: warnings.filterwarnings(WHAT_TO_DO[n % 2], message=f"m{n}"),
    "warnings reset": lambda n: warnings.simplefilter(WHAT_TO_DO[n], UserWarning),
    "level": lambda n: logging.getLogger(f"test.{n}").setLevel(n * 10),
    "disable": lambda n: logging.disable(n * 10),
    "limit": lambda n: sys.setrecursionlimit(2000 + n),
    "argv": lambda n: setattr(sys, "argv", ["program", f"test-{n}"]),
    "argv more": lambda n: sys.argv.append(f"test-{n}"),
    "path": lambda n: sys.path.insert(0, f"/folder/{n}"),
    "path end": lambda n: sys.path.append(f"/end/{n}"),
    "path away": lambda n: sys.path.remove(f"/folder/{n}") if f"/folder/{n}" in sys.path else None,
    "environment": _environment,
    "folder": lambda n: os.chdir("sub") if os.path.isdir("sub") else os.chdir(".."),
}


def state() -> dict[str, Any]:
    """What is the same in both processes, as far as the library is imported here."""
    found: dict[str, Any] = {
        "folder": os.getcwd(),
        "environment": os.environ.get("TEST_SETTING"),
        "path": [one for one in sys.path if one.startswith(("/folder", "/end"))],
        "limit": sys.getrecursionlimit(),
        "argv": [one for one in sys.argv if one.startswith("test-")],
        "levels": [logging.getLogger(f"test.{n}").level for n in range(4)],
        "disabled": logging.root.manager.disable,
        "decimal": (
            decimal.getcontext().prec,
            decimal.getcontext().traps[decimal.Inexact],
            decimal.getcontext().flags[decimal.Rounded],
        ),
        "warnings": [
            (one[0], one[1] and one[1].pattern) for one in warnings.filters if one[2] is UserWarning or _is_test(one)
        ],
    }
    return found


def _is_test(one: Any) -> bool:
    return one[1] is not None and not isinstance(one[1], str) and one[1].pattern.startswith("m")


def observe(name: str) -> Any:
    """The settings of one library."""
    module = _load(name)
    if name == "numpy":
        return module.geterr(), module.get_printoptions(), module.random.get_state(legacy=False)["bit_generator"]
    if name == "torch":
        options = sys.modules["torch._tensor_str"].PRINT_OPTS
        return (
            str(module.get_default_dtype()),
            module.is_grad_enabled(),
            module.are_deterministic_algorithms_enabled(),
            module.is_deterministic_algorithms_warn_only_enabled(),
            module.backends.cudnn.benchmark,
            module.get_float32_matmul_precision(),
            module.get_num_threads(),
            options.precision,
            module.utils.hooks.RemovableHandle.next_id,
        )
    if name == "pandas":
        return module.options.display.max_rows, str(module.DataFrame({"a": [1.25]}))
    return {key: str(one) for key, one in dict.items(module.rcParams) if key not in ("backend", "interactive")}


def serve(is_notebook: bool | None) -> None:
    """Answer what a test asks. None: one process that runs all cells."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    for name in ("TEST_SETTING", *(one for one in os.environ if one.startswith("OMP_"))):
        os.environ.pop(name, None)
    side = None if is_notebook is None else CellEnvironment(is_notebook=is_notebook)
    problems: dict[str, str] = {}
    while True:
        try:
            what, args = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        answer: Any = None
        try:
            if what == "actions":
                answer = list(ACTIONS)
            elif what == "act":
                answer = ACTIONS[args[0]](args[1])
            elif what == "state":
                answer = state()
            elif side is None:
                raise LookupError(what)
            elif what == "begin":
                side.begin(sees_files=True)
            elif what == "changes":
                answer = side.changes()
                problems |= {} if answer is None else answer.problems
            elif what == "apply" and args[0] is not None:
                side.apply(args[0], files=True)
                side.apply(args[0], files=False)
                problems |= args[0].problems | side.problems()
            elif what == "problems":
                answer = problems
            said: tuple[bool, Any] = True, answer
        except Exception as error:
            said = False, f"{what} {args!r}: {type(error).__name__}: {error}"
        pickle.dump(said, answers)
        answers.flush()
