"""How kernels that tests start are reached: by sockets in a folder of their own.

A port is chosen while it is free and bound by the kernel a second later; another program of the machine may have it by
then, and the kernel dies.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

__all__ = ["KernelSockets"]


class KernelSockets:
    """The folder of one kernel. Its path is short: that of a socket has at most 107 bytes."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="sublet-nb-")

    def use_for(self, manager: Any) -> None:
        """Tell the manager of a kernel that was not started yet."""
        manager.transport, manager.ip = "ipc", f"{self._folder}/k"

    def remove(self) -> None:
        """The kernel has ended. Harmless twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
