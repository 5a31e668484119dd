"""Starts Jupyter's programs without what takes three of their four seconds of a processor.

They load jsonschema, and with it, where it is installed, a package that makes forty parsers of addresses in all
alphabets. No test has such an address. And JupyterLab asks Node.js, where that is installed, for the settings of two
package managers, each time it starts and each time it is opened. No test installs an extension.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["light_environment", "python_module"]

_RUN: Final = (
    "import runpy, sys; sys.modules['rfc3987_syntax'] = None; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def python_module(name: str) -> list[str]:
    """The words that run this module, as ``python -m`` does; its arguments follow them."""
    return [sys.executable, "-W", "ignore", "-c", _RUN, name]


def light_environment(folder: Path, *paths: str) -> dict[str, str]:
    """The environment with which a program of Sublet starts Jupyter's so; ``folder`` is made where it is not there.
    ``paths``: what else is to be found by imports."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rfc3987_syntax.py").write_text("raise ImportError\n")
    for name in ("node", "npm"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    return {
        "PYTHONPATH": os.pathsep.join((str(folder), *paths)),
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
