"""A name in the notebook for a value that stays on the device."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from sublet.errors import GpuSessionEnded
from sublet.values import format_size

if TYPE_CHECKING:
    from sublet.notebook.checkpoint import About

_all: weakref.WeakSet[RemoteValue] = weakref.WeakSet()


def any_handles() -> bool:
    """Whether any name of any namespace here can stand for such a value: mostly none does, and then 10,000 names
    need not be searched."""
    return bool(_all)


class Keeper(Protocol):
    """The process that has the value itself."""

    def fetch(self, handle: RemoteValue) -> Any:
        """A copy of it, in the notebook's own memory."""

    def is_live(self, kernel: Any) -> bool:
        """Whether that guest is there, on its device."""

    def is_parked(self, kernel: Any) -> bool:
        """Whether it is there, without its device."""


class RemoteValue:
    """Stands in the notebook for a value that is only in the guest. Cells on the device use it under the same name.

    Its own attributes have names that values rarely have: asked for ``file.name``, it must not give its own name."""

    __slots__ = ("__weakref__", "_about", "_keeper", "_kernel", "_lost")

    def __init__(self, about: About, kernel: Any, keeper: Keeper, *, lost: str = "") -> None:
        """``kernel``: the guest that has it, None where it is only saved; ``lost``: why it cannot be saved."""
        self._about = about
        self._kernel = kernel
        self._keeper = keeper
        self._lost = lost
        _all.add(self)

    def fetch(self) -> Any:
        """The value itself, copied into the notebook's memory; tensors of a GPU come as tensors of the CPU. The name
        goes on standing for what is on the device; ``%gpu fetch NAME`` puts the value in its place."""
        return self._keeper.fetch(self)

    @property
    def value_name(self) -> str:
        """Under which it is known where it is."""
        return self._about.name

    @property
    def value_needs(self) -> tuple[str, ...]:
        """Names of the notebook that functions in it read."""
        return self._about.needs

    @property
    def value_about(self) -> About:
        return self._about

    @property
    def is_saved(self) -> bool:
        return bool(self._about.wall_ns)

    @property
    def is_live(self) -> bool:
        """Whether it is on the device now."""
        return self._keeper.is_live(self._kernel)

    @property
    def is_parked(self) -> bool:
        """Whether its device was taken and it waits for the next."""
        return self._keeper.is_parked(self._kernel)

    @property
    def why_lost(self) -> str:
        """Why it cannot be saved; empty if it can."""
        return self._lost

    def is_of(self, kernel: Any) -> bool:
        """Whether it is in this guest."""
        return self._kernel is kernel and self.is_live

    def was_of(self, kernel: Any) -> bool:
        """Whether it is, or was until that went, in this guest."""
        return kernel is not None and self._kernel is kernel

    def is_now(self, about: About, kernel: Any, *, lost: str = "") -> None:
        """It was saved, changed, or brought to another device."""
        self._about, self._kernel, self._lost = about, kernel, lost

    def __repr__(self) -> str:
        return f"<{self.value_name}: {self.value_state()}>"

    def value_state(self) -> str:
        """What it is, where it is, and how to have it."""
        about = self._about
        what = ", ".join(one for one in (about.what, format_size(about.nbytes) if about.nbytes else "") if one)
        saved = f"saved {clock_time(about.wall_ns)}" if self.is_saved else ""
        if self.is_live:
            kept = saved or (f"cannot be saved ({self._lost})" if self._lost else "not saved")
            how = "; .fetch() brings a copy" if not self._lost else ""
            return f"{what}; stays on the device ({about.why}), {kept}{how}"
        if self.is_parked:
            return f"{what}; its device was taken, and the next cell on a device goes on with it"
        if saved:
            return f"{what}; {saved}; the next cell on a device that reads it has it back"
        return f"{what}; was lost with its lease ({self._lost or 'it was not saved'}); {again(about)}"

    if not TYPE_CHECKING:  # else every attribute that is asked for here would do

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("_"):  # protocols ask for those, and go on without
                raise AttributeError(attribute)
            raise AttributeError(self._without(attribute))

    def __setattr__(self, attribute: str, value: Any) -> None:
        if not attribute.startswith("_"):
            raise AttributeError(self._without(attribute))
        super().__setattr__(attribute, value)

    def __delattr__(self, attribute: str) -> None:
        raise AttributeError(self._without(attribute))

    def _without(self, attribute: str) -> str:
        return f"{self.value_name} stays on the device, so it has no {attribute!r} here; {self._way_out()}"

    def _raise_unavailable(self, *_args: Any, **_named: Any) -> Any:
        """For whatever a program does with the value itself."""
        where = "is on the device" if self.is_live else "is not in the notebook"
        raise TypeError(f"{self.value_name} ({self._about.what}) {where} and cannot be used here; {self._way_out()}")

    def _way_out(self) -> str:
        return "use it in a %%gpu cell" + ("" if self._lost else f", or {self.value_name}.fetch() for a copy")

    __iter__ = __next__ = __call__ = __len__ = __bool__ = __contains__ = __reversed__ = _raise_unavailable
    __getitem__ = __setitem__ = __delitem__ = _raise_unavailable
    __enter__ = __exit__ = __aenter__ = __aexit__ = __await__ = __aiter__ = __anext__ = _raise_unavailable
    __int__ = __float__ = __complex__ = __index__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = (
        _raise_unavailable
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _raise_unavailable
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = (
        _raise_unavailable
    )
    __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _raise_unavailable
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _raise_unavailable

    def __dir__(self) -> list[str]:
        return ["fetch"]

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.value_name} is only on the device ({self._about.why})")


def again(about: About) -> str:
    """How to have anew what cannot be restored."""
    if not about.made:
        return "rerun the cell that made it"
    later = f", and then cell {about.cell}, which changed it or might have" if about.cell > about.made else ""
    return f"rerun cell {about.made}, which made it{later}"


def lost_handle(handle: RemoteValue) -> GpuSessionEnded:
    """For a cell that needs one that is gone."""
    why = handle.why_lost or "it was not saved"
    cell = f" (cell {handle.value_about.made})" if handle.value_about.made else ""
    return GpuSessionEnded(
        f"{handle.value_name} was only on the device, and went with its lease ({why})",
        do=f"Rerun the cell that made {handle.value_name}{cell}, then this one.",
    )


def clock_time(wall_ns: int) -> str:
    """For a person who looks at the clock: today's time, or the date with it."""
    then, now = time.localtime(wall_ns / 1e9), time.localtime()
    is_today = then[:3] == now[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)
