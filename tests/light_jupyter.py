"""Starts Jupyter's programs without what takes three of their four seconds of a processor.

They load jsonschema, and with it, where it is installed, a package that makes forty parsers of addresses in all
alphabets. No test has such an address.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__all__ = ["python_module", "without_address_parsers"]

_RUN: Final = (
    "import runpy, sys; sys.modules['rfc3987_syntax'] = None; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def python_module(name: str) -> list[str]:
    """The words that run this module, as ``python -m`` does; its arguments follow them."""
    return [sys.executable, "-W", "ignore", "-c", _RUN, name]


def without_address_parsers(folder: Path) -> dict[str, str]:
    """The environment with which a program of Sublet starts Jupyter's so; ``folder`` is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rfc3987_syntax.py").write_text("raise ImportError\n")
    return {"PYTHONPATH": str(folder)}
