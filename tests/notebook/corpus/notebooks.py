"""The notebooks of the corpus: our own, beside this file, and other people's in the folder ``SUBLET_MATERIAL``.

Each of other people's notebooks has a twin that was written here, in the same style and about the same subject, which
runs where that folder is not there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

__all__ = [
    "ALL",
    "LIGHT",
    "MATERIAL",
    "OWN_NAMES",
    "TWINS",
    "Mode",
    "Notebook",
    "choose_cells",
    "find",
    "material_folder",
]

FOLDER: Final = Path(__file__).parent / "notebooks"
Mode = Literal["plain", "all", "half", "rest"]
"""``plain``: no ``%%gpu``; ``all``: on every cell; ``half``: on a seeded half; ``rest``: on the other half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """One notebook: its code cells, and the files that it reads."""

    name: str
    path: Path
    seed_modules: tuple[str, ...] = ()
    """Generators that are seeded before its first cell, besides Python's own, where it draws without a seed."""
    files: tuple[tuple[str, str], ...] = ()
    """Source beside the notebook, and where it goes, from the working folder of the run."""
    once: str = ""
    """Why a cell of it cannot be run a second time as if the first had not been; empty where it can."""
    together: tuple[tuple[int, ...], ...] = ()
    """Cells that run on one side: an autograd graph stays where it was computed, so ``backward()`` is called there."""
    cells: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        found: Any = json.loads(self.path.read_text())
        sources = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
        object.__setattr__(self, "cells", tuple(one for one in sources if one.strip()))

    @property
    def prelude(self) -> str:
        """A cell that runs before the first, on all sides alike."""
        seeds = {
            "random": "import random as r; r.seed(14); del r",
            "numpy": "import numpy as r; r.random.seed(14); del r",
            "torch": "import torch as r; r.manual_seed(14); del r",
        }
        return "\n".join(seeds[name] for name in ("random", *self.seed_modules))

    def lay_out(self, folder: Path) -> Path:
        """A working folder for one run, with the files in it."""
        work = folder / "work"
        work.mkdir(parents=True)
        for source, target in self.files:
            place = work / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path.parent / source, place)
        return work


def material_folder() -> Path | None:
    """Where other people's notebooks are, if they are on this machine."""
    named = os.environ.get("SUBLET_MATERIAL", "")
    folder = Path(named) / "data" / "notebooks"
    return folder if named and folder.is_dir() else None


OWN_NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
TWINS: Final = {
    "rasbt_bpe": "byte_pairs",
    "rasbt_appA": "torch_intro",
    "micrograd_demo": "scalar_autograd",
    "karpathy_mm1": "bigrams",
    "karpathy_mm4": "backprop",
    "ageron_pandas": "frames",
    "norvig_prob": "text_statistics",
    "ageron_trees": "trees",
}
"""Of each of other people's notebooks the one of our own that stands in for it."""
ONCE: Final = {
    "display": "its cells name earlier results by number",
    "names_and_errors": "its cells name earlier results",
    "environment": "its cells change files and folders",
    "generators_threads": "its generators live on the device and end with the lease",
    "ecosystem": "its cells count calls, and draw from generators that go on",
    "shop_tables": "its cells change frames in place",
}
SEEDED: Final = {
    **dict.fromkeys(("display", "frames", "figures", "scalar_autograd", "trees"), ("numpy",)),
    **dict.fromkeys(("figures_over_cells", "frames_deep", "shop_tables", "training_loop"), ("numpy",)),
    **dict.fromkeys(("backprop", "bigrams", "from_imports", "tiny_transformer", "torch_intro"), ("numpy", "torch")),
}
"""Our own that load a library and leave its generator as they find it."""
TOGETHER: Final = {
    "backprop": ((5, 6), (12, 13), (14, 15)),
    "torch_intro": ((5, 6, 7),),
}
"""Numbers of cells that compute with gradients, and of those that call ``backward()`` on what they computed."""
LIGHT: Final = (
    *("byte_pairs", "classes", "errors", "generators_threads", "language_games", "linked", "names_and_errors"),
    *("testing_tools", "text_statistics", "ecosystem"),
)
"""Of our own those that load no large library."""

MATERIAL: Final[dict[str, dict[str, Any]]] = {
    "rasbt_bpe": {"files": (("the-verdict.txt", "../01_main-chapter-code/the-verdict.txt"),)},
    "rasbt_appA": {"seed_modules": ("numpy", "torch"), "together": ((16, 17),)},
    "micrograd_demo": {},
    "karpathy_mm1": {
        "files": (("names.txt", "names.txt"),),
        "seed_modules": ("numpy", "torch"),
        "together": ((51, 53),),
    },
    "karpathy_mm4": {"files": (("names.txt", "names.txt"),), "seed_modules": ("numpy", "torch")},
    "ageron_pandas": {"seed_modules": ("numpy",)},
    "norvig_prob": {},
    "ageron_trees": {"seed_modules": ("numpy",)},
}
"""Other people's, cheapest first, and what each needs."""

ALL: Final = (*OWN_NAMES, *MATERIAL)


def find(name: str) -> Notebook | None:
    """The notebook of this name, or None where it is other people's and not on this machine."""
    if name in OWN_NAMES:
        return Notebook(
            name=name,
            path=FOLDER / f"{name}.ipynb",
            once=ONCE.get(name, ""),
            seed_modules=SEEDED.get(name, ()),
            together=TOGETHER.get(name, ()),
        )
    folder = material_folder()
    return None if folder is None else Notebook(name=name, path=folder / f"{name}.ipynb", **MATERIAL[name])


def choose_cells(notebook: Notebook, mode: Mode, seed: int) -> frozenset[int]:
    """The numbers of the cells that run on a device."""
    every = range(len(notebook.cells))
    if mode in ("plain", "all"):
        return frozenset(every if mode == "all" else ())
    drawn = set(random.Random(f"{notebook.name} {seed}").sample(every, len(every) // 2))
    for cells in notebook.together:  # all go where the first was drawn to
        drawn = drawn | set(cells) if cells[0] in drawn else drawn - set(cells)
    half = frozenset(drawn)
    return half if mode == "half" else frozenset(every) - half
