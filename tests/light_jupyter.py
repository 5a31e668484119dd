"""Starts Jupyter's programs without what takes three of their four seconds of a processor.

They load jsonschema, and with it, where it is installed, a package that makes forty parsers of addresses in all
alphabets. No test has such an address.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["python_module"]

_RUN: Final = (
    "import runpy, sys; sys.modules['rfc3987_syntax'] = None; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def python_module(name: str) -> list[str]:
    """The words that run this module, as ``python -m`` does; its arguments follow them."""
    return [sys.executable, "-W", "ignore", "-c", _RUN, name]
