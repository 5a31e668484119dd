"""Checks and converts paths that callers pass to guests."""

from __future__ import annotations

import os
from typing import Final

from sublet.errors import InvalidRequest
from sublet.values import shown

PATH_MAX: Final = 4096


def valid_path(value: object, what: str) -> str:
    """A path, given as text or as a ``pathlib.Path``. Names that are no text (``os.fsdecode``) are names as well."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidRequest(f"{what} must be a path, not {shown(value)}", do="Give a str or a pathlib.Path.")
    path = os.fsdecode(os.fspath(value))
    try:
        is_path = bool(path) and "\0" not in path and len(os.fsencode(path)) <= PATH_MAX
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise InvalidRequest(f"{what} {shown(path)} is not a path", do="Give a str or a pathlib.Path.")
    return path
