"""In kernel mode: which cells are for the device."""

from __future__ import annotations

import pytest

from sublet.notebook.routing import MAGIC, routed, stays_here

HERE = [
    "",
    "\n  \n",
    "# only words\n# and more",
    "%gpu bill",
    "%gpu",
    "# first\n%load_ext sublet\n%gpu name mine\n",
    "%%cpu\nx = 1",
    "\n%%cpu\nx = 1",
    "%%gpu --vram 2GiB\nx = 1",
    "%reset -f",
    "# the last three\n%history -n 1-3\n%xdel x\n",
]
THERE = [
    "x = 1",
    "# a comment\nx = 1",
    "%gpu bill\nx = 1",
    "%gpus",
    "%%time\nx = 1",
    "!nvidia-smi",
    "%%cpus\nx",
    "await f()",
    "%load_ext autoreload",
    "%reset -f\nx = 1",
    "%resets",
    "%who",
]


@pytest.mark.parametrize("cell", HERE)
def test_what_stays(cell: str) -> None:
    assert stays_here(cell)


@pytest.mark.parametrize("cell", THERE)
def test_what_goes(cell: str) -> None:
    assert not stays_here(cell)
    [line] = routed(cell.splitlines(keepends=True))
    told: list[tuple[str, str, str]] = []
    shell = type("Shell", (), {"run_cell_magic": lambda _self, *words: told.append(words)})
    exec(line, {"get_ipython": shell})  # noqa: S102 - as IPython would
    assert told == [(MAGIC, "", cell)]


@pytest.mark.parametrize(
    ("cell", "read"),
    [
        ("%%cpu\nx = 1\n", "# %%cpu\nx = 1\n"),
        ("\n%%cpu here\n\nx = 1", "\n# %%cpu here\n\nx = 1"),
        ("%%cpu\n%%time\nx = 1", "%%time\nx = 1"),
        ("%%cpu", "# %%cpu"),
        ("%gpu bill", "%gpu bill"),
        ("%%gpu\nx", "%%gpu\nx"),
    ],
)
def test_what_stays_is_read_as_it_stands_and_lines_keep_their_numbers(cell: str, read: str) -> None:
    assert "".join(routed(cell.splitlines(keepends=True))) == read
