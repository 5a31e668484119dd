"""``sublet.current()``: what a program may know of the lease it runs under, while it runs.

All of it is read from the guest's page, which the supervisor keeps. Looking costs some microseconds and no message; and
what it says is advisory, because the resource checks the fence itself. It is there to decide what is worth beginning::

    here = sublet.current()
    while here.remaining > 30 and not here.noticed:
        step()
    save()
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sublet.errors import LeaseEnded, NotFound, Unsupported
from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import NS_PER_S, Epoch, LeaseId, format_duration
from sublet.wire.cards import OWN_DEVICE
from sublet.wire.page import PageReader, PageState, PageView

if TYPE_CHECKING:
    from sublet.guest.checkpoints import GuestVolume

PAGE_VARIABLE = "SUBLET_PAGE"
F = TypeVar("F", bound=Callable[[], object])


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestNotice:
    """The lease will be taken: save what is worth saving."""

    reason: EndReason
    take_at: float
    """When, in seconds of this process's CLOCK_BOOTTIME; it may have passed, and then the grace runs."""
    detail: str = ""


class Current:
    """The lease this program runs under, as of the moment of asking. From ``sublet.current()``."""

    def __init__(self, page: PageReader, path: str = "") -> None:
        self._page = page
        self._path = path

    @property
    def lease(self) -> LeaseId:
        return self._page.read().lease

    @property
    def epoch(self) -> Epoch:
        """Its fencing number. A guest that was suspended and went on has another one."""
        return self._page.read().epoch

    @property
    def remaining(self) -> float:
        """Seconds to the deadline as it stands, 0 when it has passed; it grows when the holder renews.

        It is never more than the supervisor would say, and in a time namespace of its own up to a second less.
        """
        now_ns = self._page.now_ns()
        return max(0, self._page.read().deadline_ns - now_ns) / NS_PER_S

    @property
    def deadline(self) -> float:
        """The same as an instant: seconds of this process's CLOCK_BOOTTIME, or somewhat earlier."""
        return self._own(self._page.read().deadline_ns)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the lease, by name."""
        return self._page.read().devices

    @property
    def noticed(self) -> GuestNotice | None:
        """Whether it will be taken, when and why; None while that was not announced."""
        view = self._page.read()
        if view.state is PageState.LIVE:
            return None
        at_ns = view.take_at_ns or view.deadline_ns
        return GuestNotice(reason=view.reason or EndReason.EXPIRED, take_at=self._own(at_ns), detail=view.detail)

    @property
    def end(self) -> LeaseEnd | None:
        """How it ended, once it has."""
        view = self._page.read()
        over = view.state is PageState.OVER or self._page.now_ns() >= view.deadline_ns
        return end_of(view) if over else None

    def check(self, epoch: Epoch | None = None) -> None:
        """Raise if nothing may be done under it any more: ``LeaseExpired``, ``LeaseRevoked``, ``LeaseNotActive``.

        With the ``epoch`` that something was begun under, also ``StaleEpoch`` if that is not the live one.
        """
        view = self._page.read()
        try:
            self._page.check(view.lease, view.epoch if epoch is None else epoch)
        except LeaseEnded as error:
            error.end = end_of(view)
            raise

    @property
    def volume(self) -> GuestVolume:
        """Where this program may save: the blocks of its lease, or those it was started with (``volume=``)::

            state = Durable.restore(sublet.current().volume)

        Raises ``NotFound`` where there is none."""
        from sublet.guest.checkpoints import volume_of

        return volume_of(self._pair)

    def on_checkpoint(self, save: F) -> F:
        """Call this to save: when ``checkpoint()`` is called, and when it is announced that the lease will be taken or
        runs out. In the second case it runs on a thread of its own, within the time that the notice leaves, so it must
        be able to save at any moment; a lease's end waits for it no longer than its grace. An idle lease that another
        request waits for ends when it has returned, or at the end of its notice if it raises or returns False: then
        something is not saved. One is remembered; the newest counts."""
        from sublet.guest.checkpoints import checkpoints_of

        checkpoints_of(self._path).register(save)
        return save

    def checkpoint(self) -> object:
        """Save now: what was registered with ``on_checkpoint`` is called, and what it returns is returned. Raises
        ``Unsupported`` where nothing was."""
        from sublet.guest.checkpoints import checkpoints_of

        return checkpoints_of(self._path).save(by_hand=True)

    def ask_again(self) -> None:
        """For what was registered with ``on_checkpoint`` and is called because the lease will be taken: it cannot save
        at this moment, and is to be called again in a moment, and once more before the program leaves."""
        from sublet.guest.checkpoints import checkpoints_of

        checkpoints_of(self._path).ask_again()

    @property
    def is_saving_by_hand(self) -> bool:
        """For what was registered with ``on_checkpoint``: whether it is called because the program called
        ``checkpoint()``. Otherwise the lease will be taken, or is over, and the program is wherever that found it."""
        from sublet.guest.checkpoints import checkpoints_of

        return checkpoints_of(self._path).is_by_hand

    def _pair(self) -> tuple[LeaseId, Epoch]:
        view = self._page.read()
        return view.lease, view.epoch

    def _own(self, at_ns: int) -> float:
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) + at_ns - self._page.now_ns()) / NS_PER_S

    def __repr__(self) -> str:
        view, left = self._page.read(), format_duration(round(self.remaining * NS_PER_S))
        return f"<lease {view.lease} (epoch {view.epoch}), {view.state}, {left} left>"


def current() -> Current:
    """The lease this program runs under. Raises ``Unsupported`` outside a guest."""
    path = os.environ.get(PAGE_VARIABLE, "")
    if not path:
        raise Unsupported(
            "this program does not run under a lease, so there is no current one",
            do="Start it with `sublet run --gpu 2GiB -- python3 ...`; where the lease is held, ask the lease itself.",
        )
    found = _known.get(path)
    if found is None:
        found = _known[path] = Current(PageReader(path), path)
    return found


def device(index: int | None = None) -> str:
    """The leased device as PyTorch and Warp call it: ``"cuda:0"``, or ``"cpu"`` where it is a host device or the lease
    has none. With several devices ``index`` says which; without, it is the process's own where each has one
    (``lease.map``, ``--per-device``), and the first elsewhere. Touches neither CUDA nor NVML. Raises ``Unsupported``
    outside a guest, and ``NotFound`` where there are fewer devices."""
    from sublet.wire.orders import card_uuid

    devices = current().devices
    index = own_device() if index is None else index
    if index and not 0 <= index < len(devices):
        raise NotFound(f"this lease has {len(devices)} devices, and none at place {index}")
    uuid = card_uuid(devices[index]) if devices else ""
    if not uuid:
        return "cpu"
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    cards = [found for name in devices if (found := card_uuid(name))]
    return f"cuda:{(visible if uuid in visible else cards).index(uuid)}"


def own_device() -> int:
    """Which of the lease's devices is this process's own: the first, unless it was given another."""
    found = os.environ.get(OWN_DEVICE, "")
    return int(found) if found.isascii() and found.isdigit() else 0


def note_host_device(error: BaseException) -> None:
    """Add a note to an error that says there is no GPU, if this lease is of a host device."""
    from sublet.devices.no_gpu import HOST_DEVICE_HINT, misses_a_gpu

    with contextlib.suppress(Exception):  # an exception with a broken __str__, or no page
        is_noted = HOST_DEVICE_HINT in getattr(error, "__notes__", ())
        if not is_noted and misses_a_gpu(str(error)) and current().devices and device() == "cpu":
            error.add_note(HOST_DEVICE_HINT)


def note_graph_elsewhere(error: BaseException) -> None:
    """Add a note to an error of PyTorch's about an autograd graph, if part of it is where the notebook is."""
    rebuild = sys.modules.get("sublet.durable.rebuild")
    with contextlib.suppress(Exception):  # an exception with a broken __str__
        hint = "" if rebuild is None else rebuild.graph_hint(error)
        if hint and hint not in getattr(error, "__notes__", ()):
            error.add_note(hint)


_known: dict[str, Current] = {}
"""By path: a program has one page, whatever a test makes of its environment."""


def end_of(view: PageView) -> LeaseEnd:
    """The end that a page tells of, or will tell of if nothing happens."""
    return LeaseEnd(reason=view.reason or EndReason.EXPIRED, at=rfc3339(time.time_ns()), detail=view.detail)
