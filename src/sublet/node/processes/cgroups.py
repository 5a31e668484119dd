"""Control groups for guests: a process cannot leave its group, whatever it does to hide.

A group is ``sublet-<office>/<lease's name>/<guest's name>`` in every hierarchy that is of use, and one object here.
Limits are set on the lease, or on the guest, before the first process joins. Nothing here waits: what is not done at
once is asked again by the caller.

Every user of the machine can read the names of groups, so no id is in them: each name is a keyed hash of the id, with a
key that only this process has. Another process finds the groups by the office's folder, and learns from the notes of
guests (``notes``) which lease each belongs to.

    groups = Groups.probe("k3v9")
    group = groups.group(lease, guest)
    group.create()
    ...                                 # the child writes "0" into each of group.join_paths() before its exec
    group.kill()
    if group.is_empty():
        left = group.remove()           # [] when nothing is left of it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from sublet.node.keyed_names import keyed_names
from sublet.node.processes.cgroups_places import CONTROLLERS, CgroupFiles, CgroupPlace, find_places
from sublet.node.processes.group import ControlGroup, Hierarchies
from sublet.node.processes.limits import GroupLimits
from sublet.values import GuestId, LeaseId

__all__ = ["CgroupFinding", "ControlGroup", "Groups"]

_ELSEWHERE_MAX: Final = 4096
"""Folders looked into for the groups of a supervisor that lived in another group."""


class CgroupFinding(NamedTuple):
    """One part of what groups can do here, for ``sublet doctor``."""

    part: str
    is_active: bool
    text: str


class Groups:
    """What can be made of control groups on this machine, for one office."""

    def __init__(
        self,
        office: str,
        places: Iterable[CgroupPlace],
        files: CgroupFiles | None = None,
        *,
        named: Callable[[str], str] | None = None,
    ) -> None:
        """``named``: the name of the group of a lease or guest with this id (default: a keyed hash of it)."""
        self.office = office
        self.places = tuple(places)
        self.files = files or CgroupFiles()
        self.v2 = self._usable_v2()
        self.v1 = self._usable_v1()
        self._hierarchies = Hierarchies(self.v2, self.v1, self.files)
        self._named = named or keyed_names()

    @classmethod
    def probe(
        cls,
        office: str,
        *,
        proc: str = "/proc",
        files: CgroupFiles | None = None,
        named: Callable[[str], str] | None = None,
    ) -> Groups:
        """Find out, and make the office's own folder wherever that can be done."""
        files = files or CgroupFiles()
        places = find_places(proc, files)
        return cls(office, (_tried(place, office, files) for place in places), files, named=named)

    @classmethod
    def none(cls, office: str) -> Groups:
        """No groups: trees are found by descent alone."""
        return cls(office, ())

    @property
    def is_active(self) -> bool:
        """Whether a guest gets a group at all. With v1 alone that needs a freezer or else ends by single signals."""
        return self.v2 is not None or bool(self.v1)

    def has(self, controller: str) -> bool:
        """Whether limits of this kind hold."""
        return controller in self.v1 or (self.v2 is not None and controller in self.v2.controllers)

    def group(self, lease: LeaseId, guest: GuestId | None = None) -> ControlGroup | None:
        """The group of a guest, or that of its whole lease; not yet made. None where there are no groups."""
        if not self.is_active:
            return None
        names = [self._named(one) for one in (lease, guest) if one is not None]
        return self._called(*names, is_guests=guest is not None)

    def cap_office(self, limits: GroupLimits) -> None:
        """Cap all guests of the office together, as far as that can be had here (``describe``)."""
        if self.is_active:
            self._called(is_guests=False).set_limits(limits)

    def found(self) -> list[ControlGroup]:
        """The groups of guests that exist, whichever process made them. ``OSError`` where that cannot be seen."""
        names = set[tuple[str, str]]()
        for base in self.bases():
            for lease in self.files.folders(f"{base}/sublet-{self.office}", sure=True):
                guests = self.files.folders(lease, sure=True)
                names.update((os.path.basename(lease), os.path.basename(guest)) for guest in guests)
        return [self._called(lease, guest, is_guests=True) for lease, guest in sorted(names)]

    def leases(self) -> list[ControlGroup]:
        """The groups of leases that are there. ``OSError`` where that cannot be seen."""
        offices = (f"{base}/sublet-{self.office}" for base in self.bases())
        folders = (folder for office in offices for folder in self.files.folders(office, sure=True))
        return [self._called(name, is_guests=False) for name in sorted({os.path.basename(one) for one in folders})]

    def _called(self, *names: str, is_guests: bool) -> ControlGroup:
        return ControlGroup(
            self._hierarchies, "/".join((f"sublet-{self.office}", *map(_checked, names))), is_guests=is_guests
        )

    def elsewhere(self) -> list[Groups]:
        """What an earlier supervisor of this office, which lived in another group, may have left."""
        found = []
        for place in self.places:
            for folder in self._called_ours(place.top):
                if os.path.dirname(folder) != place.base:
                    moved = place._replace(base=os.path.dirname(folder), why_not="")
                    found.append(Groups(self.office, (moved,), self.files))
        return found

    def remove(self) -> list[str]:
        """Take away the office's own folders; returns those that would not go because something is in them."""
        left = []
        for place in self.places:
            folder = f"{place.base}/sublet-{self.office}"
            try:
                self.files.remove(folder)
            except OSError:
                left.append(folder)
        return left

    def bases(self) -> list[str]:
        """Every folder below which our groups lie."""
        return list(dict.fromkeys(([self.v2.base] if self.v2 else []) + list(self.v1.values())))

    def describe(self) -> list[CgroupFinding]:
        """What holds here, part by part, and why the rest does not."""
        return [
            self._check_end(),
            *(self._check_controller(name) for name in ("memory", "pids", "cpu", "cpuset", "devices")),
        ]

    def _check_end(self) -> CgroupFinding:
        part = "ending a guest as a whole"
        if self.v2 is not None:
            return CgroupFinding(part, True, f"by control group (cgroup v2 in {self.v2.base})")
        if "freezer" in self.v1:
            return CgroupFinding(part, True, f"by control group (v1 freezer in {self.v1['freezer']})")
        if self.v1:
            return CgroupFinding(part, True, "by control group (v1 without freezer: signals to each process in it)")
        return CgroupFinding(part, False, f"by descent, session and environment only: {self._why_not()}")

    def _check_controller(self, controller: str) -> CgroupFinding:
        if controller in self.v1:
            return CgroupFinding(controller, True, f"cgroup v1 in {self.v1[controller]}")
        if self.v2 is not None and controller in self.v2.controllers:
            return CgroupFinding(controller, True, f"cgroup v2 in {self.v2.base}")
        return CgroupFinding(controller, False, self._why_without(controller))

    def _why_without(self, controller: str) -> str:
        refused = [place.why_not for place in self.places if controller in place.controllers and place.why_not]
        if refused:
            return refused[0]
        if controller == "devices" and self.v2 is not None:
            return "cgroup v2 restricts devices by programs in the kernel, which Sublet does not load"
        if self.v2 is not None:
            return f"{self.v2.base} does not hand the controller {controller} on to groups below it"
        return self._why_not()

    def _why_not(self) -> str:
        refused = [place.why_not for place in self.places if place.why_not]
        return refused[0] if refused else "no hierarchy of control groups is mounted"

    def _usable_v2(self) -> CgroupPlace | None:
        """The unified hierarchy, if it hands controllers on or nothing else could freeze a guest.

        Beside a freezer of v1 it is left alone: joining it waits for a grace period of the kernel (5 to 20 ms, if
        no process joined a group for a while), and joining a group of v1 by ``tasks`` does not.
        """
        usable = next((place for place in self.places if place.is_v2 and not place.why_not), None)
        has_freezer = any("freezer" in place.controllers and not place.why_not for place in self.places)
        return usable if usable is not None and (usable.controllers or not has_freezer) else None

    def _usable_v1(self) -> dict[str, str]:
        """Controller → folder. What the unified hierarchy does as well, and at no cost, is left to it."""
        spared = {"cpuacct", "freezer"} if self.v2 is not None else set[str]()
        usable = [place for place in self.places if not place.is_v2 and not place.why_not]
        return {name: place.base for place in usable for name in CONTROLLERS if name in place.controllers - spared}

    def _called_ours(self, top: str) -> Iterator[str]:
        waiting, seen = [top], 0
        while waiting and seen < _ELSEWHERE_MAX:
            folders = self.files.folders(waiting.pop())
            seen += len(folders)
            for folder in folders:
                if os.path.basename(folder) == f"sublet-{self.office}":
                    yield folder
                else:
                    waiting.append(folder)


def _checked(name: str) -> str:
    """A name of a folder, and of no other place."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} cannot name a control group")
    return name


def _tried(place: CgroupPlace, office: str, files: CgroupFiles) -> CgroupPlace:
    """Whether the kernel agrees that groups can be made there."""
    if place.why_not or not (place.is_v2 or place.controllers):
        return place
    folder = f"{place.base}/sublet-{_checked(office)}"
    try:
        files.make(folder)
    except OSError as error:
        return place._replace(why_not=f"{folder} could not be made: {error.strerror}")
    kind = (files.read(f"{folder}/cgroup.type") or "domain").strip() if place.is_v2 else "domain"
    if kind != "domain":  # processes are in the group above, which hands controllers on that threads can share
        with contextlib.suppress(OSError):
            files.remove(folder)
        return place._replace(why_not=f"a group made in {place.base} takes no processes (it is {kind})")
    return place
