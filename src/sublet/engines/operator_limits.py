"""Loads the operator's settings files, and computes what a limit leaves of a machine."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest
from sublet.office import policy_file
from sublet.office.policy_file import PolicyLimits, parse_policy
from sublet.settings import FILE_BYTES_MAX
from sublet.values import Kind
from sublet.wire.orders import Inventory

POLICY_FILE: Final = policy_file.FILE
"""In the state folder."""


def read_limits(path: Path, *, must_exist: bool = False, trusted: bool = True) -> PolicyLimits:
    """The limits of this file, or the defaults where there is none; as ``read_operator_file`` otherwise."""
    text = read_operator_file(path, must_exist=must_exist, trusted=trusted)
    return PolicyLimits() if text is None else parse_policy(text, str(path))


def read_operator_file(path: Path, *, must_exist: bool = False, trusted: bool = True) -> str | None:
    """The text of this file, or None where there is none. ``must_exist``: then that is an error. ``trusted``: a file
    that another user could have written is refused, since it decides what an office gives away."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise InvalidRequest(f"there is no file {path}", do="Name one that is there.") from None
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidRequest(f"{path} is not a file", do="Remove it, or put a file in its place.")
        if trusted and (about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise InvalidRequest(
                f"other users can write {path}, and it decides what the office gives away",
                do=f"Run `chown {os.geteuid()} {path}` and `chmod 644 {path}`, and look at what it says.",
            )
        data = os.read(fd, FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text (at byte {error.start})", do="Save it as UTF-8.") from error


def within(inventory: Inventory, limits: PolicyLimits) -> Inventory:
    """The same machine, with no more memory and cores than the operator lets the office have."""
    most = {Kind.MEMORY: limits.value("office.memory"), Kind.CPU: limits.value("office.cores")}
    devices = (
        one if (cap := most.get(one.kind)) is None else replace(one, capacity=min(one.capacity, cap))
        for one in inventory.devices
    )
    return replace(inventory, devices=tuple(devices))


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be read ({error.strerror})", do="See its owner and permissions.")
