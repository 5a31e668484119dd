"""What one lease has on this machine: folder, page, control group, guests."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sublet.lease_end import EndReason
from sublet.node.processes.cgroups import ControlGroup, Groups
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.limits import GroupLimits
from sublet.values import NS_PER_S, Epoch, GuestId, Kind, LeaseId, TenantId
from sublet.wire.orders import Metered, Notify, Part
from sublet.wire.page import PageState, PageView, PageWriter, time_namespace
from sublet.wire.usage_counters import TALLY_BYTES, TALLY_VARIABLE, TallyFile, total
from sublet.wire.volumes import VOLUME_VARIABLE

if TYPE_CHECKING:
    from sublet.node.sandbox import Ids
    from sublet.node.storage.store import StoredFolder

COUNT_MAX = (1 << 62) - 1
"""What a guest may claim to have done."""


def lease_of_folder(name: str) -> LeaseId:
    """Whose the folder is: it is named for the lease and the epoch under which it was made (``lease.1.42``)."""
    return LeaseId(name.rsplit(".", 2)[0])


class LeaseRuntime:
    """One live lease. Folder, page and group are made when the first guest needs them: most leases of an office whose
    holders use the device themselves never have one.
    """

    __slots__ = (
        *("_counted", "_group", "_office", "_page", "_tally", "blocks", "cards", "deadline_ns"),
        *("detail", "epoch", "expiring", "folder", "guests", "has_stores", "is_parked", "lease", "limits", "metered"),
        *("name", "notice", "others", "over", "parking", "parts", "pinned", "segment", "since"),
        *("stores", "suspended", "tenant", "unlimited", "writable"),
    )
    """Beyond thirty names Python would keep a table of its own for each: 1.3 KB."""

    def __init__(
        self,
        *,
        lease: LeaseId,
        tenant: TenantId,
        epoch: Epoch,
        parts: tuple[Part, ...],
        deadline_ns: int,
        office: str,
        name: str = "",
    ) -> None:
        self.lease = lease
        self.name = name
        self.tenant = tenant
        self.epoch = epoch
        self.parts = parts
        self.deadline_ns = deadline_ns
        self.guests: dict[GuestId, GuestProcess] = {}
        self.notice: Notify | None = None
        self.expiring = False
        """Whether guests were told that its deadline is near, and that it has not been extended. Of those that are
        parked that is for good: they are on their way out."""
        self.over: EndReason | None = None
        """Why it ended, once it has; it stays here until nothing of it is left."""
        self.parking = False
        """Whether its guests are just being taken off its devices, to live on."""
        self.is_parked = False
        """Whether its guests are those of another lease, without a device."""
        self.suspended: tuple[int, ...] = ()
        """Processes that the driver has taken off their cards."""
        self.cards: tuple[str, ...] = ()
        """Where they were, by UUID, while they are parked."""
        self.since = epoch
        """Connections that came under this epoch, or a later one, are good."""
        self.detail = ""
        self.folder = ""
        self.limits = GroupLimits()
        """The caps of its guests, once it has had any."""
        self.unlimited: list[str] = []
        """Caps that were asked for and cannot be had here."""
        self.pinned: tuple[int, ...] = ()
        """The cores its guests are kept on where their time cannot be capped."""
        self.writable: tuple[str, ...] = ()
        """Folders that came with the lease: those of its blocks."""
        self.stores: list[StoredFolder] = []
        self.has_stores = False
        """Whether what it has of disk and memory was made, or is being made."""
        self.blocks: tuple[str, ...] = ()
        """The folders of its blocks, once they are there."""
        self.segment = ""
        """The path of its memory."""
        self.others = 0
        """Guests that were started and are not the far end of sessions, which count what they do."""
        self.metered: Metered | None = None
        """What was done on its devices, once nothing is done there any more; else the fuel that was used, if any."""
        self._office = office
        self._page: PageWriter | None = None
        self._tally: TallyFile | None = None
        self._group: ControlGroup | None = None
        """That of the lease for which it was made."""
        self._counted = Metered()
        """What its guests had done when they came under this lease."""

    @property
    def resources(self) -> set[str]:
        return {part.resource for part in self.parts}

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(part.resource for part in self.parts if part.kind is Kind.GPU)

    @property
    def page_path(self) -> str:
        return os.path.join(self.folder, "page")

    @property
    def tally_path(self) -> str:
        """In a folder of its own, which a guest may write to."""
        return os.path.join(self.folder, "tally", "rows")

    @property
    def closed(self) -> str:
        """Why nothing more starts under it, in a word or two; empty if something may."""
        if self.parking or self.over is not None:
            return "over"
        return "a parking lease, under which nothing starts" if self.is_parked else ""

    def running(self) -> Iterator[GuestProcess]:
        """Those of which something runs."""
        return (guest for guest in self.guests.values() if not guest.is_gone)

    @property
    def memory_max(self) -> int:
        """Bytes that its guests may use together; 0: any. While they are parked, what the parking lease has."""
        if self.is_parked:
            return sum(part.amount for part in self.parts if part.kind is Kind.MEMORY)
        return self.limits.memory_bytes

    def open(
        self, base: str, groups: Groups, now_ns: int, cores: Callable[[int], tuple[int, ...]], limits: GroupLimits
    ) -> None:
        """Make what guests need, once. ``cores`` chooses so many, where they can only be kept on some. If a part of it
        cannot be made no guest starts, and the next one tries again."""
        if self._page is not None:
            return
        self.limits = limits
        self.folder = self.folder or os.path.join(base, f"{self.lease}.{self.epoch}")
        group = self._group = self._group or groups.group(self.lease)  # at once: one of its name may be there
        os.makedirs(os.path.join(self.folder, "tmp"), mode=0o700, exist_ok=True)
        if group is not None:
            group.create()
            self.unlimited = group.set_limits(limits)
        else:
            self.unlimited = [name for name, cap in (("memory", limits.memory_bytes), ("cpu", limits.cores)) if cap]
        if "cpu" in self.unlimited:
            self.pinned = cores(limits.cores)
        if self._tally is None:
            os.makedirs(os.path.dirname(self.tally_path), mode=0o700, exist_ok=True)
            self._tally = TallyFile.create(self.tally_path)
        self._page = PageWriter.create(self.page_path, self._view(now_ns))

    def make_home(self, ids: Ids | None) -> tuple[str, str]:
        """The folder over which a guest's home is mounted, and the file of what its guests count ("" where nothing is
        counted). Both are given to ``ids``.

        Both lie in the lease's folder, where no guest may write, so their names lead to what we made. The file is only
        touched by a descriptor that we have kept: root would give away whatever a name of the guests' leads to.
        """
        home = os.path.join(self.folder, "home")
        os.makedirs(home, mode=0o700, exist_ok=True)
        if ids is not None:
            if self._tally is not None:
                os.fchown(self._tally.fileno(), *ids)
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(fd, *ids)
            finally:
                os.close(fd)
        return home, self.tally_path if self._tally is not None else ""

    def cut_tally(self) -> bool:
        """Whether a guest had written more into the file of usage counters than belongs there. That is cut off: the
        file lies on the machine's disk, or in its memory, and no guest may fill it."""
        if self._tally is None or os.fstat(self._tally.fileno()).st_size <= TALLY_BYTES:
            return False
        os.ftruncate(self._tally.fileno(), TALLY_BYTES)
        return True

    def is_at_rest(self) -> bool:
        """Whether none of its guests is answering a call, as far as they say."""
        return self._tally is not None and not self._tally.is_at_work()

    def is_unsaved(self) -> bool:
        """Whether a guest has something left to save, as far as they say."""
        return self._tally is None or self._tally.is_unsaved()

    def is_leaving(self) -> bool:
        """Whether a guest was told to save and leave, and perhaps does. Entry points of Python say so when they begin
        to, and heed no warning that was taken back before; of a command nothing is known but that it was told."""
        says_so = self._tally is not None and self._tally.is_leaving()
        return says_so or any(guest.was_warned and not guest.spec.entry for guest in self.running())

    def uses_devices(self) -> bool:
        """Whether a guest has memory of a device that Sublet gave it."""
        return self._tally is None or self._tally.is_any_used()

    def move_to(self, other: LeaseRuntime, *, is_parked: bool) -> None:
        """Guests, page, folder and groups are the other's from now on. What was counted up to here is this lease's."""
        if self._tally is not None:
            so_far = self._so_far(self._tally)
            self.metered = None if self.is_parked else _without(so_far, self._counted)
            other._counted = so_far
        other.others = self.others
        other.folder, other._page, other._tally = self.folder, self._page, self._tally
        other._group, other.limits = self._group, self.limits
        other.unlimited, other.pinned = self.unlimited, self.pinned
        other.is_parked, other.since = is_parked, self.since
        other.suspended, self.suspended = self.suspended if is_parked else (), ()
        other.guests, self.guests = self.guests, {}
        self.folder, self._page, self._tally, self._group = "", None, None, None
        self.parking = self.is_parked = False

    def warn(self, now_ns: int) -> None:
        """Its deadline is near and was not moved. Its guests are sent a SIGTERM after this, and look on the page then
        why it came, and whether that is still so."""
        self.expiring = True
        for guest in self.running():
            guest.was_warned = True
        if self._page is not None:
            self._page.warnings += 1
        self.show(now_ns)

    def show(self, now_ns: int) -> None:
        """Bring the page up to date."""
        if self._page is not None:
            self._page.write(self._view(now_ns))

    def close(
        self, put_away: Callable[[str], object], leave: Callable[[ControlGroup], object], *, alone: bool = True
    ) -> list[str]:
        """Take away what was made; what would not go. Only once no guest is left. ``put_away`` removes the folder, or
        gives it another name and has it removed. ``leave`` removes the group, now or later: no process is in it, so it
        is nothing but a name. ``alone``: nothing else is here under the name of the lease, so its group can go, too.
        """
        if not self.folder:
            return []
        if self._page is not None:
            self._page.close()
            self._page = None
        if self._tally is not None:
            if not self.is_parked:  # who has no device does nothing there
                done = _without(self._so_far(self._tally), self._counted)
                self.metered = done if self.devices or done.fuel else None
            self._tally.close()
            self._tally = None
        put_away(self.folder)
        left = [self.folder] if os.path.lexists(self.folder) else []
        if alone and self._group is not None:
            inhabited = self._group.inhabited()
            if inhabited:
                return [inhabited, *left]
            leave(self._group)
            self._group = None
        return left

    def environment(self) -> dict[str, str]:
        """What a guest finds: the first values, and where the present ones are."""
        found = {
            "SUBLET_EPOCH": str(self.epoch),
            "SUBLET_DEADLINE": f"{self.deadline_ns / 1e9:.3f}",
            "SUBLET_DEVICES": ",".join(self.devices),
            "SUBLET_PAGE": self.page_path,
        }
        if self._tally is not None:
            found[TALLY_VARIABLE] = self.tally_path
        if self.devices:
            found["SUBLET_VRAM"] = ",".join(str(part.amount) for part in self.parts if part.kind is Kind.GPU)
        if self.blocks:
            found["SUBLET_BLOCK"] = found[VOLUME_VARIABLE] = self.blocks[0]
        if len(self.blocks) > 1:
            found["SUBLET_BLOCKS"] = os.pathsep.join(self.blocks)
        if self.segment:
            found["SUBLET_MEMORY"] = self.segment
        return found

    def _so_far(self, tally: TallyFile) -> Metered:
        """What the guests wrote down. It is theirs to write, so nothing but the bill of their own lease hangs on it."""
        found = total(tally.rows(), now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        return Metered(
            vram_byte_seconds=min(found.byte_ns // NS_PER_S, COUNT_MAX),
            peak_bytes=min(found.peak_bytes, COUNT_MAX),
            launches=min(found.launches, COUNT_MAX),
            failures=min(found.failures, COUNT_MAX),
            bytes_in=min(found.bytes_in, COUNT_MAX),
            bytes_out=min(found.bytes_out, COUNT_MAX),
            fuel=min(found.fuel, COUNT_MAX),
            is_whole=found.counting == self.others,
        )

    def _view(self, now_ns: int) -> PageView:
        state, reason, take_at_ns = PageState.LIVE, self.over, 0
        if self.is_parked and (self.expiring or self.over is not None):
            state, reason, take_at_ns = PageState.LEAVING, self.over or EndReason.EXPIRED, self.deadline_ns
        elif self.over is not None:
            state = PageState.OVER
        elif self.is_parked:
            state = PageState.PARKED
        elif self.expiring:
            state, reason, take_at_ns = PageState.NOTICED, EndReason.EXPIRED, self.deadline_ns
        elif self.notice is not None:
            state, reason, take_at_ns = PageState.NOTICED, self.notice.reason, self.notice.take_at_ns or 0
        return PageView(
            lease=self.lease,
            epoch=self.epoch,
            deadline_ns=self.deadline_ns,
            now_ns=now_ns,
            state=state,
            reason=reason,
            take_at_ns=take_at_ns,
            devices=self.devices,
            office=self._office,
            detail=self.detail,
            namespace=_namespace(),
            since=self.since,
            warnings=0 if self._page is None else self._page.warnings,
        )


@functools.cache
def _namespace() -> int:
    """It is ours for good: only what we start could be in another one."""
    return time_namespace()


class Borrowed(NamedTuple):
    """The volume of another lease of the same tenant, as a guest gets it."""

    tenancy: LeaseRuntime
    epoch: Epoch
    """Under which it was lent; under a later one it is not."""


def _without(now: Metered, before: Metered) -> Metered:
    """What was done since then."""
    return replace(
        now,
        vram_byte_seconds=max(0, now.vram_byte_seconds - before.vram_byte_seconds),
        launches=max(0, now.launches - before.launches),
        failures=max(0, now.failures - before.failures),
        bytes_in=max(0, now.bytes_in - before.bytes_in),
        bytes_out=max(0, now.bytes_out - before.bytes_out),
        fuel=max(0, now.fuel - before.fuel),
    )
