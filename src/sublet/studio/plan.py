"""The saved result of ``sublet simulate --save GROUP``, for the page of a course's teachers."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final, Literal

import msgspec

from sublet.client.home import make_private_dir
from sublet.errors import InvalidRequest, JournalError
from sublet.state.checkpoints.atomic_files import move_into_place, read_whole, sync_folder, write_synced
from sublet.values import valid_name
from sublet.wire.decoders import decode_as

FOLDER: Final = "plans"
"""In the folder of the sessions."""
BYTES_MAX: Final = 64 * 1024


class Queue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long people wait with so many GPUs."""

    gpus: int
    at_once: float
    """The share of cells that started within five seconds."""
    median_s: float
    p95_s: float
    longest: int
    """Requests that waited at once, at most."""


class CoursePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the planner."""

    version: Literal[1] = 1
    made_at: str
    now: Queue
    less: Queue | None
    """With one GPU less; None where there was only one."""


def save_plan(sessions: Path, group: str, plan: CoursePlan) -> Path:
    """In place of the one before it. ``sessions`` is the folder of the sessions."""
    folder = make_private_dir(make_private_dir(sessions) / FOLDER)
    path = folder / _name(group)
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}~"
    try:
        write_synced(temporary, msgspec.json.encode(plan))
        move_into_place(temporary, path)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise JournalError(f"{path} cannot be written: {error.strerror}", do="Make room on its disk.") from error
    return path


def last_plan(sessions: Path, group: str) -> CoursePlan | None:
    """The newest one for this group; None where none was saved."""
    path = sessions / FOLDER / _name(group)
    try:
        return decode_as(read_whole(path, BYTES_MAX), CoursePlan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(
            f"the saved plan of {group} cannot be read", do=f"Make it again: `sublet simulate … --save {group}`."
        ) from error


def _name(group: str) -> str:
    return f"{valid_name(group, 'group name')}.json"
