"""A cell's status line, updated in place, as HTML and as equivalent text.

Values and how they look; nothing here displays anything.
"""

from __future__ import annotations

import html
import logging
from collections import deque
from dataclasses import fields
from typing import Final

from sublet.invocation import typeable
from sublet.lazy_dataclass import dataclass
from sublet.values import MIB, NS_PER_S, format_cost, format_duration, format_size

_STYLE: Final = (
    "font-family:ui-monospace,monospace;font-size:12px;line-height:1.5;padding:2px 8px;border-left:3px solid {colour}"
)
"""Of one line. Text has the colour that the page gives it, light or dark."""
_BLUE, _GREEN, _AMBER = "#3b82f6", "#16a34a", "#d97706"
_DIM: Final = "opacity:.75"
WHOLE_MAX: Final = 28
"""Letters of a part that is not broken over two lines."""
SHORT_S: Final = 10.0
"""Below this, seconds change one by one where they are shown again and again."""
WHOLE_S: Final = 9.95
"""Below this, seconds are shown with a fraction; two digits of more would be written ``1e+01``."""
MS_S: Final = 0.0995
"""And below this, milliseconds."""
SLOW_S: Final = 0.1
SLOW_SHARE: Final = 0.2
"""A transfer that takes less time, or a smaller share of the cell's time, is not worth a word."""
COST_MIN: Final = 0.005
"""A cell that costs less shows no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellBill:
    """What a cell consumed. Bills add up."""

    held_s: float = 0.0
    """The lease was ours for so long, from the bill before this one (or its grant) to the end of the cell."""
    busy_s: float = 0.0
    vram_byte_s: float = 0.0
    launches: int | None = None
    """None where they were not counted: frameworks launch by themselves, and nothing is guessed."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_saved: int = 0
    moved_s: float = 0.0
    """What the cell reads was sent, and what it changed was received, in so much time."""
    waited_s: float = 0.0
    stood_s: float = 0.0
    """It was suspended for so long: no lease, so nothing to pay for but the memory it was parked in."""
    cost: float = 0.0
    currency: str = ""

    def __add__(self, other: CellBill) -> CellBill:
        def total(name: str) -> object:
            one, two = getattr(self, name), getattr(other, name)
            if name == "currency":
                return one or two
            return two if one is None else one if two is None else one + two

        return CellBill(**{field.name: total(field.name) for field in fields(self)})  # type: ignore[arg-type]

    def parts(self) -> list[str]:
        """The time the cell took, and what is unusual. All figures are in the notebook's bill (``%gpu bill``)."""
        parts = [_seconds(self.busy_s + self.moved_s)]
        is_slow = self.moved_s >= max(SLOW_S, SLOW_SHARE * (self.busy_s + self.moved_s))
        if is_slow or max(self.bytes_in, self.bytes_out) >= MIB:
            took = f" in {_seconds(self.moved_s)}" if self.moved_s >= SLOW_S else ""
            parts.append(f"{format_size(self.bytes_in)} sent, {format_size(self.bytes_out)} received{took}")
        if self.bytes_saved:
            parts.append(f"{format_size(self.bytes_saved)} saved")
        if self.waited_s >= 0.1:
            parts.append(f"waited {_seconds(self.waited_s)}")
        if self.stood_s:
            parts.append(f"suspended {_seconds(self.stood_s)}, and went on")
        if self.cost > COST_MIN:
            parts.append(format_cost(self.cost, self.currency))
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """In the line."""

    place: int
    reason: str
    estimate_s: float | None = None
    error_s: float | None = None
    """Within how many seconds nine tenths of the office's estimates were right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferAccepted:
    """Less, or another model, was offered and accepted, as the options of the cell allow."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """The lease is there, the kernel is not yet."""

    device: str
    host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The cell runs."""

    device: str
    host: bool
    vram_bytes: int
    left_s: float
    notice: str = ""
    """Why the lease will be taken when the time is over; empty while that was not announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Variables are being sent to the device or received from it, and it takes long."""

    device: str
    host: bool
    what: str
    """The verb, the variable, its type and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """The device was taken, and the cell stands still until there is another."""

    why: str
    place: int
    """0: it is not known yet."""
    estimate_s: float | None = None
    error_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The cell is done."""

    device: str
    host: bool
    bill: CellBill
    moved: str = ""
    """What of the notebook's variables travelled, in short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnded:
    """The lease ended while the cell ran, or was not to be had."""

    message: str
    do: str
    bill: CellBill | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A cell is run for each of many items, or was."""

    done: int
    total: int
    failed: int
    skipped: int
    """Finished by an earlier run."""
    leases: int
    """Held now; of a run that is over the most at once."""
    waits: bool = False
    """No device is free for another lease."""
    took_s: float = 0.0
    bill: CellBill | None = None
    """None while it runs."""


CellStatus = Waiting | OfferAccepted | Starting | Moving | Running | Suspended | Finished | CellEnded | Mapped


_COLOURS: Final[dict[type[CellStatus], str]] = {
    Waiting: _AMBER,
    OfferAccepted: _AMBER,
    Starting: _BLUE,
    Moving: _BLUE,
    Running: _BLUE,
    Suspended: _AMBER,
    Finished: _GREEN,
    CellEnded: _AMBER,
    Mapped: _BLUE,
}


def as_text(status: CellStatus) -> str:
    """For terminals, logs, and readers that hear rather than see."""
    return "sublet: " + " · ".join(_parts(status))


def as_html(status: CellStatus) -> str:
    """The same for a notebook."""
    first, *rest = map(html.escape, _parts(status))
    colour = _COLOURS[type(status)]
    if (isinstance(status, Running) and status.notice) or (isinstance(status, Mapped) and status.failed):
        colour = _AMBER
    elif isinstance(status, Mapped) and status.bill is not None:
        colour = _GREEN
    rest_shown = "".join(f'<span style="{_DIM}"> · {_whole(part)}</span>' for part in rest)
    return line_of_html(f"<b>{first}</b>{rest_shown}", colour)


def line_of_html(markup: str, colour: str = _BLUE) -> str:
    """One line beside the cell's own output."""
    return f'<div style="{_STYLE.format(colour=colour)}">{markup}</div>'


def _whole(part: str) -> str:
    return part if len(part) > WHOLE_MAX else f'<span style="white-space:nowrap">{part}</span>'


def _estimate(status: Waiting | Suspended) -> list[str]:
    """With how accurate such estimates were, where that is known."""
    if status.estimate_s is None:
        return []
    text = f"about {_seconds(status.estimate_s)}"
    if status.error_s is not None:
        text += f" (nine tenths of such estimates were within {_seconds(status.error_s)})"
    return [text]


def _parts(status: CellStatus) -> list[str]:
    match status:
        case Waiting():
            return [f"queued, place {status.place}", *_estimate(status), status.reason, "interrupt to cancel"]
        case OfferAccepted():
            return ["offered", status.what, "accepted"]
        case Starting():
            return [_device(status.device, status.host), "starting"]
        case Moving():
            return [_device(status.device, status.host), status.what]
        case Running():
            return [
                _device(status.device, status.host),
                "running",
                f"VRAM {format_size(status.vram_bytes)}",
                *([f"will be taken in {_seconds(status.left_s)}", status.notice] if status.notice else []),
                *([] if status.notice else [f"{_seconds(status.left_s)} left"]),
            ]
        case Suspended():
            where = [f"place {status.place}"] if status.place else []
            return [
                "suspended, the cell stands still",
                status.why,
                "goes on by itself with the next device",
                *where,
                *_estimate(status),
                "interrupt to give it up",
            ]
        case Finished():
            moved = [status.moved] if status.moved else []
            return [_device(status.device, status.host), *status.bill.parts(), *moved]
        case Mapped():
            return _mapped(status)
        case CellEnded():
            bill = [] if status.bill is None else status.bill.parts()
            first_line = status.message.partition("\n")[0]  # the rest, such as the end of a log, is in the error below
            return [typeable(first_line), *bill, typeable(status.do)]


def _mapped(status: Mapped) -> list[str]:
    items = "item" if status.total == 1 else "items"
    leases = f"{status.leases} lease" if status.leases == 1 else f"{status.leases} leases"
    outcome = [f"{status.failed} failed"] if status.failed else []
    if status.bill is None:
        held = [leases] if status.leases else ["waiting for a device"] * status.waits
        return [f"{status.done} of {status.total} {items}", *outcome, *held, "an interrupt keeps what is finished"]
    outcome += [f"{status.skipped} finished by an earlier run"] if status.skipped else []
    outcome += [f"up to {leases}"] if status.leases else []
    cost = [format_cost(status.bill.cost, status.bill.currency)] if status.bill.cost > COST_MIN else []
    return [f"{status.total} {items} in {_seconds(status.took_s)}", *outcome, *cost]


def _device(name: str, host: bool) -> str:
    return f"{name} (host device, no GPU)" if host else name


def is_unusual(status: CellStatus) -> bool:
    """Whether a finished cell has more to tell than that it ran."""
    if not isinstance(status, Finished):
        return True
    return bool(status.moved) or status.bill.waited_s >= 0.1 or status.bill.stood_s > 0


def coarse(seconds: float) -> float:
    """As it is shown where it changes all the time: a line need not move every second."""
    step = 30.0 if seconds >= 60.0 else 5.0 if seconds >= SHORT_S else 1.0
    return seconds // step * step


def _seconds(seconds: float) -> str:
    if seconds < MS_S:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.2g}s" if seconds < WHOLE_S else format_duration(round(seconds) * NS_PER_S)


# -------------------------------------------------------------------------------------------------------------- notices
#
# Silences the client's log of notices for leases of cells, whose status line already shows them.


LEASES_MAX: Final = 64
"""Leases whose notices may still come."""


class Notices(logging.Filter):
    """Lets everything pass but the notices of these leases."""

    def __init__(self) -> None:
        super().__init__()
        self._leases: deque[str] = deque(maxlen=LEASES_MAX)
        logging.getLogger("sublet.client").addFilter(self)

    def suppress(self, lease: str) -> None:
        """Leave out the notices of this lease here: they are told elsewhere."""
        self._leases.append(lease)

    def filter(self, record: logging.LogRecord) -> bool:
        is_notice = record.msg.startswith("lease %s will be taken") if isinstance(record.msg, str) else False
        return not (is_notice and isinstance(record.args, tuple) and str(record.args[0]) in self._leases)
