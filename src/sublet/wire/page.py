"""The guest's page: 4096 bytes in which the supervisor shows a guest its lease, deadline and devices.

The supervisor writes, the guest maps it read-only and looks. Neither waits for the other, and either may be stopped in
the middle, so the page has two slots. Each holds a whole state with its number, before and behind, and a checksum over
all of it. The writer fills the slot that is *not* the newest; the reader takes the whole slot with the highest number.
A state that is half written is therefore never believed, and a writer that is stopped half-way leaves the one before.
(A sequence lock alone would leave nothing readable then, and asks for an order of memory that Python cannot promise.)

Deadlines are instants of CLOCK_BOOTTIME *in the time namespace of the supervisor*. A guest may live in another one and
see another number, so beside the deadline the page says what time the supervisor had (``now_ns``) and which namespace
it was in. See ``PageView.at``.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from binascii import crc32
from types import TracebackType
from typing import Final

from sublet.errors import (
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    LeaseExpired,
    LeaseNotActive,
    LeaseRevoked,
    NotFound,
    StaleEpoch,
)
from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, LeaseId

PAGE_BYTES: Final = 4096
UPDATE_NS: Final = 1 * NS_PER_S
"""How often the supervisor writes its present time at least, while it runs."""
MAGIC: Final = b"SUBLETPG"
VERSION: Final = 2
LEASE_MAX: Final = 128
OFFICE_MAX: Final = 128
DEVICES_MAX: Final = 1024
DETAIL_MAX: Final = 256
"""Bytes of the texts."""
TRIES_MAX: Final = 200
"""How often a reader looks again when it met the writer at work in both slots."""
TRY_PAUSE_S: Final = 0.000_2
PARKED_PAUSE_S: Final = 0.02

_HEAD: Final = struct.Struct("<8sI4x")  # magic, version
_SLOT: Final = struct.Struct(f"<QQQqqqQQQBBHHHHH{LEASE_MAX}s{OFFICE_MAX}s{DEVICES_MAX}s{DETAIL_MAX}s")
_TAIL: Final = struct.Struct("<IQ")  # checksum, number again
_SLOT_BYTES: Final = 2032
_SLOTS: Final = (_HEAD.size, _HEAD.size + _SLOT_BYTES)
assert _SLOT.size + _TAIL.size <= _SLOT_BYTES and _SLOTS[1] + _SLOT_BYTES <= PAGE_BYTES

_REASONS: Final = tuple(EndReason)
"""By place, counted from 1; new ones are added at the end of the enum, or the version of the page changes."""


class PageState(enum.StrEnum):
    """How the lease stands, as far as its guest is concerned."""

    LIVE = "live"
    NOTICED = "noticed"
    """It will be taken at ``take_at_ns``, or has been and the grace runs; ``reason`` says why."""
    OVER = "over"
    PARKED = "parked"
    """It has no device, and nothing may be done on any; the lease is the one under which it waits for another."""
    LEAVING = "leaving"
    """It was parked, and that lease ends: it may save what it can without a device, and is to leave; ``reason`` says
    why. Nothing may be done on any device."""


_STATES: Final = tuple(PageState)
_WARNINGS: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """One state of the page."""

    lease: LeaseId
    epoch: Epoch
    deadline_ns: int
    """CLOCK_BOOTTIME of the supervisor."""
    now_ns: int
    """What the supervisor's clock said when it wrote this."""
    state: PageState = PageState.LIVE
    reason: EndReason | None = None
    take_at_ns: int = 0
    """Of a notice: when the lease is taken; 0 without one."""
    devices: tuple[str, ...] = ()
    office: str = ""
    detail: str = ""
    """In words, what the reason does not say."""
    namespace: int = 0
    """The supervisor's time namespace; 0 where there is only one."""
    since: Epoch | None = None
    """Where a guest was parked and goes on: the first epoch whose connections are still good. None: the present one."""
    warnings: int = 0
    """How many SIGTERMs have said that the lease runs out, modulo 65,536. By this a guest that comes to handle one late
    tells it from any other: the lease may have been renewed since, or its guests parked, and it means nothing then."""

    @property
    def is_leaving(self) -> bool:
        """Whether guests are to leave: the lease is over, or it runs out and its deadline was not moved."""
        runs_out = self.state is PageState.NOTICED and self.reason is EndReason.EXPIRED
        return runs_out or self.state in (PageState.OVER, PageState.LEAVING)

    def at(self, own_ns: int, seen_ns: int, namespace: int) -> int:
        """The supervisor's present time, from the reader's clock; in doubt later than it is, never earlier.

        In the same time namespace both clocks are one. In another the reader counts from when it first saw this state
        (``seen_ns``, by its own clock). It may have seen it late, by as much as lies between two updates, and that is
        added: a promise may look shorter than it is, and must not look longer.
        """
        if namespace == self.namespace:
            return own_ns
        return self.now_ns + (own_ns - seen_ns) + UPDATE_NS

    def check(self, lease: LeaseId, epoch: Epoch, now_ns: int) -> None:
        """Whether this (lease, epoch) may still act at ``now_ns`` of the supervisor's clock; raises if not.

        ``StaleEpoch``: it is another lease's page by now, or another epoch's. ``LeaseExpired``, ``LeaseRevoked`` or
        ``LeaseNotActive``: it is over, and why. A notice takes nothing away yet: it is what the time is for.
        """
        if (lease != self.lease or epoch != self.epoch) and not self._is_followed(epoch):
            raise StaleEpoch(f"({lease}, {epoch}) is not live here; ({self.lease}, {self.epoch}) is")
        if self.state in (PageState.OVER, PageState.LEAVING):
            raise ended_error(lease, self.reason or EndReason.EXPIRED, self.detail)
        if self.state is PageState.PARKED:
            raise LeaseNotActive(
                f"what ran under lease {lease} is parked under {self.lease}, and has no device",
                do="Ask for a lease that resumes it.",
            )
        if now_ns >= self.deadline_ns:
            raise LeaseExpired(f"lease {lease} ran out")

    def _is_followed(self, epoch: Epoch) -> bool:
        """Whether what came under this epoch goes on under the present one. Only connections of the leases that this
        guest lived under, one after the other, come to it; so their epochs are enough to tell."""
        return self.since is not None and self.since <= epoch <= self.epoch


def ended_error(lease: LeaseId, reason: EndReason, detail: str = "") -> LeaseEnded:
    """The error for a lease that ended so."""
    why = f"{reason}: {detail}" if detail else f"{reason}"
    if reason in (EndReason.EXPIRED, EndReason.IDLE):
        return LeaseExpired(f"lease {lease} ran out ({why})")
    if reason in (EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.REFUSED, EndReason.HOLDER_GONE):
        return LeaseNotActive(f"lease {lease} is over ({why})")
    return LeaseRevoked(f"lease {lease} was taken ({why})")


# ------------------------------------------------------------------------------------------------- bytes, both ways


def encode(view: PageView, number: int) -> bytes:
    """The bytes of one slot."""
    texts = (
        _text(view.lease, LEASE_MAX, "lease"),
        _text(view.office, OFFICE_MAX, "office"),
        _text("\n".join(view.devices), DEVICES_MAX, "list of devices"),
        view.detail.encode()[:DETAIL_MAX],
    )
    body = _SLOT.pack(
        number,
        view.epoch.incarnation,
        view.epoch.n,
        view.deadline_ns,
        view.now_ns,
        view.take_at_ns,
        view.namespace,
        *(view.since or view.epoch),
        _STATES.index(view.state),
        0 if view.reason is None else _REASONS.index(view.reason) + 1,
        view.warnings % _WARNINGS,
        *(len(text) for text in texts),
        *texts,
    )
    return body + _TAIL.pack(crc32(body), number)


def decode(page: bytes) -> tuple[int, PageView] | None:
    """The newest whole state of a page and its number; None if no slot is whole at this moment.

    Raises ``InvalidRequest`` for what is no page at all, or one of another version.
    """
    magic, version = _HEAD.unpack_from(page) if len(page) == PAGE_BYTES else (b"", 0)
    if magic != MAGIC:
        raise InvalidRequest("this file is not the page of a guest", do="Leave SUBLET_PAGE as Sublet set it.")
    if version != VERSION:
        raise InvalidRequest(
            f"the page is of version {version}, and this Sublet reads {VERSION}",
            do="Install the version of Sublet that the office runs.",
        )
    found = [slot for slot in (_whole(page, start) for start in _SLOTS) if slot is not None]
    return max(found, key=lambda slot: slot[0]) if found else None


def _whole(page: bytes, start: int) -> tuple[int, PageView] | None:
    body = page[start : start + _SLOT.size]
    checksum, again = _TAIL.unpack_from(page, start + _SLOT.size)
    if crc32(body) != checksum:
        return None
    (
        number,
        incarnation,
        n,
        deadline_ns,
        now_ns,
        take_at_ns,
        namespace,
        since_incarnation,
        since_n,
        state,
        reason,
        warnings,
        *lengths,
        lease,
        office,
        devices,
        detail,
    ) = _SLOT.unpack(body)
    if number != again or number == 0 or state >= len(_STATES) or reason > len(_REASONS):
        return None
    return number, PageView(
        lease=LeaseId(_cut(lease, lengths[0])),
        epoch=Epoch(incarnation, n),
        deadline_ns=deadline_ns,
        now_ns=now_ns,
        state=_STATES[state],
        reason=None if reason == 0 else _REASONS[reason - 1],
        take_at_ns=take_at_ns,
        devices=tuple(_cut(devices, lengths[2]).split("\n") if lengths[2] else ()),
        office=_cut(office, lengths[1]),
        detail=_cut(detail, lengths[3]),
        namespace=namespace,
        since=None if (since_incarnation, since_n) == (incarnation, n) else Epoch(since_incarnation, since_n),
        warnings=warnings,
    )


def _text(text: str, limit: int, what: str) -> bytes:
    raw = text.encode()
    if len(raw) > limit:
        raise InvalidRequest(f"the {what} has {len(raw)} bytes, and a page has room for {limit}")
    return raw


def _cut(raw: bytes, length: int) -> str:
    return raw[:length].decode(errors="replace")  # a detail may have been cut in the middle of a letter


# ------------------------------------------------------------------------------------------------ the writer's end


class PageWriter:
    """The supervisor's end. One process writes; its maker closes it."""

    def __init__(self, fd: int, number: int) -> None:
        self._fd = fd
        self._number = number
        self.warnings = 0
        """For the next view. It goes along where the page becomes that of another lease."""

    @classmethod
    def create(cls, path: str, view: PageView, *, mode: int = 0o444) -> PageWriter:
        """A page at ``path``, whole from the moment it can be seen there; one that was there is replaced.

        ``mode`` is 0444 where the guest is another user, and may be 0400 where it is the same.
        """
        part = f"{path}.{os.getpid()}.part"
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            writer = cls(fd, 0)
            os.ftruncate(fd, PAGE_BYTES)
            os.pwrite(fd, _HEAD.pack(MAGIC, VERSION).ljust(PAGE_BYTES, b"\0"), 0)
            writer.write(view)
            os.fchmod(fd, mode)
            os.rename(part, path)
        except BaseException:
            os.close(fd)
            os.unlink(part)
            raise
        return writer

    def write(self, view: PageView) -> None:
        """From now on this is what the guest sees."""
        number = self._number + 1
        os.pwrite(self._fd, encode(view, number), _SLOTS[number % 2])
        self._number = number

    def close(self) -> None:
        """Let go of the file; what it says stays. Harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------ the reader's end


class PageReader:
    """The guest's end: mapped once, read as often as one likes. That costs no system call, and less than
    a microsecond while nothing was written."""

    def __init__(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no page at {path}", do="Leave SUBLET_PAGE as Sublet set it.") from None
        try:
            if os.fstat(fd).st_size != PAGE_BYTES:
                raise InvalidRequest(f"{path} is not the page of a guest", do="Leave SUBLET_PAGE as Sublet set it.")
            self._map = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._namespace = time_namespace()
        self._last: tuple[int, PageView] | None = None
        self._raw = b""
        """The bytes that the last state was read from: while they stand, there is nothing to decode."""
        self._seen_ns = 0

    def read(self) -> PageView:
        """The newest whole state. Where none can be had (the writer is too busy), the last that was read."""
        for _ in range(TRIES_MAX):
            raw = self._map[:]
            if raw == self._raw and self._last is not None:
                return self._last[1]
            found = decode(raw)
            if found is not None:
                self._raw = raw
                return self._take(found)
            time.sleep(TRY_PAUSE_S)
        if self._last is not None:
            return self._last[1]
        raise Disconnected("the page of this guest could not be read whole", do="Try again.")

    def now_ns(self) -> int:
        """The supervisor's present time, in doubt later than it is."""
        view = self.read()
        return view.at(_own_ns(), self._seen_ns, self._namespace)

    def check(self, lease: LeaseId, epoch: Epoch) -> PageView:
        """Whether (lease, epoch) may act now; raises as ``PageView.check`` does, else gives what it judged by. While
        the guest is parked there is nothing to judge: it waits until it goes on (or is ended)."""
        view = self.read()
        while view.state is PageState.PARKED:
            time.sleep(PARKED_PAUSE_S)
            view = self.read()
        view.check(lease, epoch, view.at(_own_ns(), self._seen_ns, self._namespace))
        return view

    def close(self) -> None:
        """Let go of the mapping. Harmless twice."""
        self._map.close()

    def _take(self, found: tuple[int, PageView]) -> PageView:
        if self._last is None or found[0] > self._last[0]:
            self._last, self._seen_ns = found, _own_ns()
        return self._last[1]


def time_namespace() -> int:
    """Which one this process is in; 0 where the kernel knows only one."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return 0


def _own_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
