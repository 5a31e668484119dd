"""The source of the package, read and parsed once in a process, for all tests that look at it.

Their files say ``pytestmark = LOOKS_AT_SOURCE``: of the processes of a run, one parses it.
"""

from __future__ import annotations

import ast
import gc
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import pytest

import sublet

SOURCE: Final = Path(sublet.__file__).parent
LOOKS_AT_SOURCE: Final = pytest.mark.xdist_group("source of the package")


class SourceFile:
    """One file; its text and its syntax tree are there once they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(SOURCE).as_posix()
        parts = path.relative_to(SOURCE).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_package else parts)
        """Dotted, below ``sublet``; empty for ``sublet/__init__.py``."""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        gc.disable()  # a million nodes, all of which stay: looking for garbage among them took half as long again
        try:
            return ast.parse(self.text)
        finally:
            gc.freeze()  # and so would each later test of this process that looks for all garbage
            gc.enable()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The whole tree, walked through once for all rules; in the order of ``ast.walk``, at half of its cost."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, ast.AST):
                    found.append(value)
                elif isinstance(value, list):
                    found += [one for one in value if isinstance(one, ast.AST)]
        return found


@cache
def source_files() -> tuple[SourceFile, ...]:
    return tuple(SourceFile(path) for path in sorted(SOURCE.rglob("*.py")))
