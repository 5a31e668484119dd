"""Finds the name that could not travel."""

from __future__ import annotations

from collections.abc import Mapping

from sublet.errors import Unpicklable
from sublet.notebook.home import HomeRules
from sublet.notebook.parcels import LOST
from sublet.state.checkpoints.object_groups import encode_roots


def blamed(error: Unpicklable, roots: Mapping[str, object]) -> tuple[str, Unpicklable]:
    """The name at the head of the path; where the error has none, the first that cannot travel by itself."""
    if name := _at_head(error.path or "", roots):
        return name, error
    for name, value in roots.items():
        if what := _why_not_alone({name: value}):
            return name, Unpicklable(f"this cannot be sent: {name}: {what}", path=name, what=what)
    raise error


def blamed_beside(error: Unpicklable, roots: Mapping[str, object]) -> dict[str, str]:
    """All names that the error says cannot travel, and why."""
    found = {_at_head(path, roots): what for path, what in reversed(error.blockers)}
    return {name: what for name, what in found.items() if name}


def _at_head(path: str, roots: Mapping[str, object]) -> str:
    called = {name: repr(name)[1:-1] if name == LOST else name for name in roots}
    fitting = [n for n, said in called.items() if path == said or path.startswith((said + ".", said + "[", said + "("))]
    return max(fitting, key=len, default="")


def _why_not_alone(root: Mapping[str, object]) -> str:
    try:
        encode_roots(root, rules=HomeRules())
    except Unpicklable as error:
        return error.what or error.message
    return ""
