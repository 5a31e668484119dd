"""Where the notebook is: its folder and its environment, which a cell on a device sees as any other cell does.

A guest begins with both as they are then. Later it is told what has changed in the notebook since, and only that: what
a cell does to its own (``%cd``, ``os.environ``) stays with the guest.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from sublet.compute.shown import sees_our_folders

if TYPE_CHECKING:
    from sublet.client.lease import Lease
    from sublet.compute.kernel_guest import KernelGuest

__all__ = ["Moved", "Whereabouts", "follow"]

GIVEN: Final = ("SUBLET_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""What the lease says, and not the notebook."""


class Moved(NamedTuple):
    """What is another since the guest was told."""

    folder: str
    """Empty: the same."""
    values: dict[str, str]
    gone: tuple[str, ...]


class Whereabouts:
    """As one guest was told of them."""

    def __init__(self) -> None:
        self._folder, self._env = _folder(), dict(os.environ)

    def moved(self, folder: str, env: Mapping[str, str]) -> Moved | None:
        """None: nothing has."""
        if folder == self._folder and env == self._env:
            return None
        values = {name: value for name, value in env.items() if self._env.get(name) != value}
        gone = tuple(name for name in self._env if name not in env)
        return Moved(folder if folder != self._folder else "", _told(values), tuple(_told(dict.fromkeys(gone, ""))))

    def tell(self, kernel: KernelGuest, lease: Lease) -> None:
        """Before a cell. Guests of another user's tenant have a home of their own, and nothing of ours."""
        now = _folder(), dict(os.environ)
        if sees_our_folders(lease) and (moved := self.moved(*now)) is not None:
            kernel.call(follow, moved)
            self._folder, self._env = now


def follow(moved: Moved) -> None:
    """In the guest, between cells."""
    if moved.folder:
        try:
            os.chdir(moved.folder)
        except OSError as error:
            print(f"sublet: this cell is not in {moved.folder}: {error.strerror}", file=sys.stderr)  # noqa: T201
    os.environ.update(moved.values)
    for name in moved.gone:
        os.environ.pop(name, None)


def _told(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if not name.startswith(GIVEN)}


def _folder() -> str:
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return ""
