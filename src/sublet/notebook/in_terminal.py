"""Hides the notebook from programs in a guest whose cells are shown in a terminal.

The guest is a Jupyter kernel whatever shows its output. But tqdm and rich look at IPython to choose between a widget
and text, and a widget in a terminal is the word ``Output()``.
"""

from __future__ import annotations

import sys
from typing import Any


def be_plain() -> None:
    """Look like an IPython in a terminal. Called by name in the guest, between cells."""
    shell: Any = sys.modules["IPython"].get_ipython()
    shell.config.pop("IPKernelApp", None)  # tqdm used to look for this
    kind = type(shell)
    # The name of its class: rich knows that of a notebook's kernel, and tqdm takes one with "qt" in it for a console.
    shell.__class__ = type("ConsoleLikeQt", (kind,), {"__module__": kind.__module__})
