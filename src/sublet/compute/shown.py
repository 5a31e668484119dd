"""Which facts about this program's machine a guest receives: all for the owner's guests, few for a tenant's.

A tenant's guest sees the folders of the system, those that came with its lease, and an interpreter that was named.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from sublet.client.command_words import own_folder

if TYPE_CHECKING:
    from sublet.client.handle import LeaseHandle

_LOCAL: Final = "local"


def sees_our_folders(lease: LeaseHandle) -> bool:
    """Whether guests of this lease see what this program sees."""
    return lease._held.view.tenant == _LOCAL


def folder_for(lease: LeaseHandle, named: str = "") -> str:
    """Where a guest begins: the folder that was named, else this program's, else (empty) its own home."""
    return named or (own_folder() if sees_our_folders(lease) else "")


def interpreter_for(lease: LeaseHandle, named: str = "") -> str:
    """The interpreter that was named, or ours; it is said by name where it would not be seen otherwise."""
    return named or ("" if sees_our_folders(lease) else sys.executable)
