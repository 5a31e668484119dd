"""Whose state it is: (tenant, name), in a volume of that name.

The name is the path of the notebook, where Jupyter or VS Code gives it; otherwise it is what ``%gpu name X`` says. A
notebook without a name saves all the same, for as long as its kernel lives.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sublet.durable.durable import store_of
from sublet.durable.store import CheckpointStore
from sublet.errors import InvalidRequest, SubletError
from sublet.values import GIB, parse_size, valid_name

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease

__all__ = ["FOLDER_VARIABLE", "Owner", "Volume", "notebook_path", "volume_name"]

FOLDER_VARIABLE: Final = "SUBLET_NOTEBOOK_STATE"
"""A folder to save in instead of a volume: where the office lends no disk."""
SIZE: Final = 4 * GIB
"""Of a volume that is made, unless ``%gpu name X SIZE`` says otherwise."""
NAME_MAX: Final = 40
"""Letters of the notebook's own name in that of its volume."""


@dataclass(slots=True, kw_only=True)
class Volume:
    """Where this kernel saves."""

    name: str
    """Empty: it goes with the kernel."""
    lease: Lease | None = None
    folder: str = ""
    """Instead of a lease."""
    said: str = ""
    """What the person should know of it."""

    @property
    def store(self) -> CheckpointStore:
        """For this process."""
        return store_of(self.folder if self.lease is None else self.lease)  # type: ignore[arg-type]

    def release(self) -> None:
        """What is in it stays, if it has a name."""
        if self.lease is not None:
            self.lease.release()


class Owner:
    """Of one kernel's state."""

    def __init__(self, user_ns: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        self._user_ns = user_ns
        self._environ = environ
        self._name = ""
        self._size = 0
        self.volume: Volume | None = None
        self.trouble = ""
        """Why there is none, where there is none."""

    @property
    def name(self) -> str:
        """As the volume is called; empty where nobody gave one."""
        if self._name:
            return self._name
        path = notebook_path(self._user_ns, self._environ)
        return volume_name(path) if path else ""

    @property
    def path(self) -> str:
        """Of the notebook, if it is known."""
        return notebook_path(self._user_ns, self._environ)

    def rename(self, name: str, size: str = "") -> None:
        """Say whose state it is from now on."""
        self._name = valid_name(name, "name")
        self._size = parse_size(size) if size else 0
        self.leave()

    def leave(self) -> None:
        """Let go of the volume; what is in it stays."""
        volume, self.volume = self.volume, None
        if volume is not None:
            volume.release()

    def take(self, fabric: Fabric) -> Volume | None:
        """The volume, taken when it is first asked for. None where none is to be had, and ``trouble`` says why: cells
        run all the same."""
        if self.volume is not None and (self.volume.lease is None or self.volume.lease.end is None):
            return self.volume
        self.trouble = ""
        folder = self._environ.get(FOLDER_VARIABLE, "")
        try:
            self.volume = self._in_folder(folder) if folder else self._leased(fabric)
        except SubletError as error:
            self.volume, self.trouble = None, error.message
        return self.volume

    def _in_folder(self, folder: str) -> Volume:
        name = self.name
        return Volume(name=name, folder=os.path.join(folder, name or f"kernel-{os.getpid()}"))

    def _leased(self, fabric: Fabric) -> Volume:
        raise InvalidRequest("volumes are not lent yet")


def notebook_path(user_ns: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Where the notebook lies, as the Jupyter server or VS Code tells its kernel; empty if nobody does."""
    told = environ.get("JPY_SESSION_NAME", "") or user_ns.get("__vsc_ipynb_file__", "")
    if not isinstance(told, str) or not told.endswith(".ipynb"):
        return ""
    return os.path.realpath(told)


def volume_name(path: str) -> str:
    """Dull, as names of volumes must be, and another one for each path: ``nb-training-3f0c2a91``."""
    stem = os.path.basename(path).removesuffix(".ipynb").lower()
    plain = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:NAME_MAX].strip("-") or "notebook"
    return f"nb-{plain}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}"
