"""The values that all parts share: ids, enums, sizes, durations, epochs.

Two rules hold everywhere below the edges. Amounts are integers in their smallest unit, so that sums are exact: bytes,
cores, nanoseconds, thousandths of a device. And a duration or an instant says so in its name (``ttl_ns``,
``deadline_ns``): an instant is nanoseconds of CLOCK_BOOTTIME, never of the wall clock.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Final, NamedTuple, NewType

from sublet.errors import InvalidRequest

LeaseId = NewType("LeaseId", str)
GuestId = NewType("GuestId", str)
TenantId = NewType("TenantId", str)
GroupId = NewType("GroupId", str)
ReservationId = NewType("ReservationId", str)
BudgetId = NewType("BudgetId", str)
"""Whose it is and of which window: ``tenant/ana/month``."""
NodeId = NewType("NodeId", str)
ResourceId = NewType("ResourceId", str)
RequestId = NewType("RequestId", str)

NS_PER_S: Final = 1_000_000_000
MIB: Final = 1 << 20
GIB: Final = 1 << 30
BLOCK_BYTES: Final = 4096
"""The unit of ``min_blocks``: one page, the smallest piece a volume writes atomically."""
MILLIS_PER_DEVICE: Final = 1000
"""A device is metered in thousandths, so that shares of one card add up to integers."""

BYTES_MAX: Final = 1 << 60
CORES_MAX: Final = 1 << 20
COUNTED_MAX: Final = 64
"""A number without a unit up to here may be meant as a number of devices."""
DURATION_MAX_NS: Final = 10 * 365 * 86_400 * NS_PER_S
LABELS_MAX: Final = 16
SHOWN_MAX: Final = 40
TEXT_MAX: Final = 128


class Epoch(NamedTuple):
    """The fencing number of a lease: ``(incarnation, n)``, from one durable sequence per office.

    It rises with every grant and every attach and is never reused, so any two epochs of an office compare. A restored
    backup starts a new incarnation, because ``n`` alone might repeat what the lost journal already gave out.
    """

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"

    @classmethod
    def parse(cls, text: object) -> Epoch:
        match = re.fullmatch(r"(\d{1,18})\.(\d{1,18})", text) if isinstance(text, str) else None
        if match is None:
            raise InvalidRequest(
                f"{shown(text)} is not an epoch", do="Write it as two numbers and a dot, such as 1.42."
            )
        return cls(int(match[1]), int(match[2]))


class Kind(enum.StrEnum):
    """What can be leased."""

    GPU = "gpu"
    """VRAM bytes on one device."""
    CPU = "cpu"
    """Whole cores."""
    MEMORY = "memory"
    """Bytes of host memory."""
    BLOCK = "block"
    """Bytes on disk, behind a volume."""


class Exclusivity(enum.StrEnum):
    """How a GPU lease tolerates neighbours. A class that cannot be honoured is refused, never downgraded."""

    SHARED = "shared"
    """VRAM-capped neighbours on the same device, of one tenant unless the operator allows more."""
    SESSION = "session"
    """The device is reserved from grant to end; a parked guest reserves nothing."""
    DEVICE = "device"
    """As session, and never suspended in favour of others."""
    PARTITION = "partition"
    """A hardware partition (MIG)."""


class Tier(enum.StrEnum):
    """Priority. Preemptibility is a separate matter: see ``office.ledger.preemption``."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    SPOT = "spot"

    @property
    def rank(self) -> int:
        """Higher goes first."""
        return _TIER_RANK[self]


_TIER_RANK: Final = {Tier.SPOT: 0, Tier.BATCH: 1, Tier.INTERACTIVE: 2}


class Suspend(enum.StrEnum):
    """Whether guests on a device can be taken off it and live on, and where they can go on afterwards."""

    NONE = "none"
    """They cannot: a guest that is taken off ends."""
    SAME_DEVICE = "same_device"
    """Only there, where they were."""
    SAME_TYPE = "same_type"
    """On any device of the same node and model."""


class Way(enum.StrEnum):
    """How a device was taken back from those who were on it."""

    SUSPEND = "suspend"
    """They live on under a parking lease, and can go on with another device."""
    SAVED = "saved"
    """They ended, and what they saved before is there (``saved_at`` says of when)."""
    NOT_SAVED = "not saved"
    """They ended, and what they had in memory is gone."""


class RenewMode(enum.StrEnum):
    """When the holder's process renews by itself."""

    WHILE_BUSY = "while-busy"
    """While a call, cell or guest command of its runs (the default)."""
    ALWAYS = "always"
    NEVER = "never"


class BudgetWindow(enum.StrEnum):
    """For how long a budget is; then it begins anew."""

    DAY = "day"
    """Of UTC, as on a bill."""
    MONTH = "month"
    TOTAL = "total"
    """It never begins anew."""


class BudgetLevel(enum.StrEnum):
    """How much of a budget is used."""

    OPEN = "open"
    WARNED = "warned"
    """80 % or more."""
    USED_UP = "used_up"
    """Nothing that costs something is granted, and what is held ends with notice."""


_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


def valid_name(text: object, what: str) -> str:
    """A tenant, node or volume name: it goes into paths, metrics and messages, so it is kept dull."""
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        raise InvalidRequest(
            f"{shown(text)} is not a valid {what}",
            do="Use 1 to 63 lower-case letters, digits, dots, dashes or underscores, beginning and ending with a "
            "letter or digit.",
        )
    return text


def valid_labels(labels: object) -> dict[str, str]:
    """Labels are shown to people and summed in bills: short strings, and few of them."""
    if not isinstance(labels, dict) or len(labels) > LABELS_MAX:
        raise InvalidRequest("labels must be a mapping of text to text", do=f"Give at most {LABELS_MAX} labels.")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            raise InvalidRequest(f"label {shown(key)} is not text", do="Give every label as text = text.")
        if len(key) > TEXT_MAX or len(value) > TEXT_MAX or not (key + value).isprintable():
            raise InvalidRequest(
                f"label {shown(key)} is too long or has control characters",
                do=f"Keep keys and values to {TEXT_MAX} printable characters.",
            )
    return dict(labels)


_BINARY: Final = {letter: 1 << 10 * power for power, letter in enumerate("kmgtp", start=1)}
_SIZE_UNITS: Final[dict[str, int]] = {
    "b": 1,
    **_BINARY,  # "8G", "512M", "80g": binary, as Slurm and Docker read them
    **{f"{letter}i": scale for letter, scale in _BINARY.items()},  # "8Gi": Kubernetes
    **{f"{letter}ib": scale for letter, scale in _BINARY.items()},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
_DURATION_UNITS_NS: Final[dict[str, int]] = {
    "ms": 1_000_000,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
    "d": 86_400 * NS_PER_S,
}
_QUANTITY = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_SIZE_DO = 'Write a number with a unit, such as "8GiB", "512MiB" or "1.5GB".'
_DURATION_DO = 'Write seconds as a number or a text such as "90s", "5m", "1h30m" or "500ms".'


def parse_size(value: int | str, what: str = "size", *, counted_by: str = "") -> int:
    """Bytes from a text with a unit, or from an ``int``, which is bytes already.

    ``"2GiB"``, ``"2G"`` and ``"2g"`` are 2 × 2³⁰, ``"2GB"`` is 2 × 10⁹. A text without a unit is refused: 8 may be
    meant as bytes, as GiB or as a number of devices. So are zero, negative and unparsable sizes. ``counted_by`` is the
    option that takes the number of devices, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"{shown(value)} is not a {what}", do=_SIZE_DO)
    if isinstance(value, str):
        amount = _size_text(value, what, counted_by)
    else:
        amount = value
    if amount < 1:
        raise InvalidRequest(f"the {what} must be at least one byte, not {shown(value)}", do=_SIZE_DO)
    if amount > BYTES_MAX:
        raise InvalidRequest(f"the {what} {shown(value)} is more than any machine has", do=_SIZE_DO)
    return amount


def parse_memory(value: int | str, what: str = "size") -> int:
    """As ``parse_size``, for VRAM and memory in Python: an ``int`` below 1 MiB was probably not meant as bytes.

    ``min_vram=8`` is refused; ``min_vram="8B"`` says bytes and is taken.
    """
    amount = parse_size(value, what)
    if isinstance(value, int) and amount < MIB:
        raise InvalidRequest(
            f"the {what} {amount} is {amount} bytes",
            do=f'Write "{amount}GiB" or "{amount}MiB"; if bytes are meant, "{amount}B".',
        )
    return amount


def _size_text(text: str, what: str, counted_by: str) -> int:
    if not text.strip():
        raise InvalidRequest(f"an empty text is not a {what}", do=_SIZE_DO)
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match[2] and match[2].lower() not in _SIZE_UNITS):
        raise InvalidRequest(f"{shown(text)} is not a {what}", do=_SIZE_DO)
    number, unit = match[1], match[2].lower()
    if unit:
        return _scaled(number, _SIZE_UNITS[unit])
    do = _sizes_meant(number)
    if counted_by and number.isdecimal() and 1 <= int(number) <= COUNTED_MAX:
        do += f" For {number} device{'s' * (number != '1')} add {counted_by} {number}."
    raise InvalidRequest(f"the {what} {number} has no unit", do=do)


def _sizes_meant(number: str) -> str:
    """What to write in place of a number without a unit."""
    if "." in number:
        return f"Write {number}GiB or {number}MiB."
    amount = int(number)
    if amount < MIB:
        return f"Write {number}GiB or {number}MiB; if bytes are meant, {number}B." if amount else _SIZE_DO
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):
        count, rest = divmod(amount, _SIZE_UNITS[unit.lower()])
        if not rest:
            return f"If bytes are meant, write {count}{unit}."
    return f"If bytes are meant, write {number}B."


def parse_duration_ns(value: float | str, what: str = "duration", *, zero_ok: bool = False) -> int:
    """Nanoseconds from seconds or from ``"5m"``, ``"1h30m"``. NaN, negative, unparsable and absurd are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidRequest(f"{shown(value)} is not a {what}", do=_DURATION_DO)
    if isinstance(value, str):
        ns = _duration_text_ns(value, what)
    elif not math.isfinite(value):
        raise InvalidRequest(f"the {what} must be a finite number, not {value}", do=_DURATION_DO)
    else:
        ns = round(max(-1.0, min(value, DURATION_MAX_NS)) * NS_PER_S)  # bounded first: 1e300 s would become infinity
    if ns < 0 or (ns == 0 and not zero_ok):
        raise InvalidRequest(f"the {what} must be more than zero, not {shown(value)}", do=_DURATION_DO)
    if ns > DURATION_MAX_NS:
        raise InvalidRequest(f"the {what} {shown(value)} is longer than ten years", do=_DURATION_DO)
    return ns


def _duration_text_ns(text: str, what: str) -> int:
    rest, ns = text.strip().replace(" ", ""), 0
    if re.fullmatch(r"\d{1,20}(\.\d{1,9})?", rest, re.ASCII):
        return _scaled(rest, NS_PER_S)
    if not rest:
        raise InvalidRequest(f"an empty text is not a {what}", do=_DURATION_DO)
    while rest:
        match = re.match(r"(\d{1,20}(?:\.\d{1,9})?)([a-z]+)", rest, re.ASCII)
        if match is None or match[2] not in _DURATION_UNITS_NS:
            raise InvalidRequest(f"{shown(text)} is not a {what}", do=_DURATION_DO)
        ns += _scaled(match[1], _DURATION_UNITS_NS[match[2]])
        rest = rest[match.end() :]
    return ns


def _scaled(number: str, unit: int) -> int:
    """``number × unit`` without a float between: 0.1 GiB is exactly what the digits say, rounded down."""
    whole, _, fraction = number.partition(".")
    scaled = int(whole) * unit
    return scaled + int(fraction) * unit // 10 ** len(fraction) if fraction else scaled


def format_size(amount: int) -> str:
    """Binary units, at most two decimals: ``2GiB``, ``1.5GiB``, ``300B``."""
    for unit, scale in (("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if amount >= scale:
            return f"{amount / scale:.2f}".rstrip("0").rstrip(".") + unit
    return f"{amount}B"


def device_state(state: str, detail: str, *, capacity: int, free: int, is_leased: bool) -> str:
    """For people: a device in service is free, lent, partly lent, or used by others; one that is not says what it is,
    and why."""
    if state != "free":
        return f"{state}: {detail}" if detail else state
    if detail and not is_leased:
        return f"used by others: {detail}"
    if not capacity:
        return "full"
    if free == capacity:
        return "free"
    return "partly lent" if free else "lent"


def format_cost(cost: float, currency: str) -> str:
    """For people: ``0.0123 EUR``. An office that is older than its client names no currency."""
    return f"{cost:.4f} {currency}".rstrip()


def format_duration(ns: int) -> str:
    """For people: ``4m 30s``, ``2.5s``, ``300ms``, ``3d 4h``."""
    if ns < 0:
        return "-" + format_duration(-ns)
    if ns < NS_PER_S:
        return f"{round(ns / 1e6)}ms"
    if ns < 10 * NS_PER_S:
        return f"{ns / NS_PER_S:.1f}".rstrip("0").rstrip(".") + "s"
    seconds = round(ns / NS_PER_S)
    parts = ((seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    texts = [f"{n}{unit}" for n, unit in parts if n]
    return " ".join(texts[:2])


def shown(value: object) -> str:
    """A caller's value as an error shows it: never long."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN_MAX:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write the longest ones out
    text = repr(value[:SHOWN_MAX] if isinstance(value, str | bytes) else value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "…'"


def valid_text(value: object, what: str, *, most: int = 4096) -> str:
    """A text that can be sent and shown: no half characters, no zero bytes, not longer than ``most`` characters."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} must be a text, not {shown(value)}", do="Give a str.")
    if len(value) > most or "\0" in value or not _is_whole(value):
        raise InvalidRequest(f"{what} {shown(value)} cannot be sent", do=f"Give at most {most} whole characters.")
    return value


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
