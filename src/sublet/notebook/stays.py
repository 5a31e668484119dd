"""What stays on the device: a name in the notebook for something that could not come back."""

from __future__ import annotations

from typing import Any

from sublet.errors import GpuSessionEnded

__all__ = ["Stays", "lost_handle"]


class Stays:
    """Stands in the notebook for a value that is only in the guest. Cells on the device use it under the same name."""

    __slots__ = ("_kernel", "_name", "_why")

    def __init__(self, name: str, why: str, kernel: Any) -> None:
        self._name = name
        self._why = why
        self._kernel = kernel

    def __repr__(self) -> str:
        where = "was lost with its lease" if self._kernel.is_lost else "stays on the device"
        return f"<{self._name} {where}: {self._why}>"

    def is_of(self, kernel: Any) -> bool:
        """Whether it is still there, in this kernel."""
        return self._kernel is kernel and not kernel.is_lost

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._name} is only on the device ({self._why})")


def lost_handle(name: str) -> GpuSessionEnded:
    """For a cell that needs one that is gone."""
    return GpuSessionEnded(
        f"{name} was only on the device, and went with its lease", do=f"Rerun the cell that made {name}, then this one."
    )
