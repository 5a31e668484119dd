"""Checks a command (words, folder, environment) before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from sublet.client.paths import valid_path
from sublet.errors import InvalidRequest
from sublet.values import parse_duration_ns, shown, valid_text
from sublet.wire.guests import GuestSpec, StdioKind

StdioText: TypeAlias = StdioKind | Literal["pipes", "pty", "null"]
_COMMAND_DO: Final = 'Write it as ["python", "train.py"].'


def command_spec(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: dict[str, str],
    cwd: str | os.PathLike[str] | None,
    stdio: StdioText,
    rows: int,
    cols: int,
    name: str,
    grace: float | str | None,
) -> GuestSpec:
    """A command as it is asked for, with this program's folder and umask."""
    return GuestSpec(
        argv=_checked_words(argv),
        cwd=own_folder() if cwd is None else absolute(cwd),
        env=env,
        stdio=_stdio(stdio),
        rows=_window(rows, "rows"),
        cols=_window(cols, "cols"),
        name=valid_text(name, "name"),
        grace_ns=0 if grace is None else parse_duration_ns(grace, "grace"),
        umask=_umask(),
    )


def own_folder() -> str:
    """This program's folder."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InvalidRequest(
            "the working folder of this program is not there any more", do="Change to another folder, or give cwd=."
        ) from None


def absolute(folder: str | os.PathLike[str]) -> str:
    """A folder by its whole path."""
    path = valid_path(folder, "cwd=")
    return os.path.normpath(path if os.path.isabs(path) else os.path.join(own_folder(), path))


def _checked_words(argv: object) -> tuple[str, ...]:
    if isinstance(argv, str | bytes | Mapping) or not isinstance(argv, Iterable):
        raise InvalidRequest(f"a command is a sequence of words, not {shown(argv)}", do=_COMMAND_DO)
    words = tuple(argv)
    for word in words:
        if not isinstance(word, str | os.PathLike):
            raise InvalidRequest(f"{shown(word)} is not a word of a command", do=_COMMAND_DO)
    if not words:
        raise InvalidRequest("a command has at least one word", do=_COMMAND_DO)
    return tuple(_word(os.fsdecode(os.fspath(word))) for word in words)


def _word(word: str) -> str:
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        raise InvalidRequest(f"{shown(word)} is not a word of a command", do=_COMMAND_DO) from None
    return word


def _stdio(stdio: object) -> StdioKind:
    try:
        return StdioKind(stdio)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidRequest(f"stdio={shown(stdio)} is not known", do=f"Use one of: {', '.join(StdioKind)}.") from None


def _window(size: object, what: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidRequest(f"{what} must be a whole number, not {shown(size)}", do="Use 1 to 4096.")
    return min(max(size, 0), 1 << 16)


def checked_env(env: object) -> dict[str, str]:
    """A whole environment."""
    if not isinstance(env, Mapping) or not all(isinstance(text, str) for pair in env.items() for text in pair):
        raise InvalidRequest("env= must map texts to texts", do='Write env={**os.environ, "NAME": "value"}.')
    for pair in env.items():
        for text in pair:
            _word(text)
    return dict(env)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found
