"""Which zygotes to keep: one per kind of guest, bounded in number, none outdated. Pure.

A zygote may stand in for a fresh interpreter only where no guest could tell the difference. What tells is in its key:
the interpreter, what it has imported, whose it is, and the part of the environment that is read once, when an
interpreter or a library starts. All other variables a guest gets with its fork.

No zygote ever holds a request, so guests of several tenants may come from one. Still each tenant has its own where
memory allows: then two tenants share not even the addresses at which libraries lie. What those of single tenants cost
together has a bound (``ZygoteRegistry.tenant_bytes``, a part of what the office may use), and is added up from what the
finished ones measured. A tenant gets its own while that bound is kept, if need be in place of one whose tenant has
started nothing for a while; all others share one.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.values import MIB, NS_PER_S
from sublet.wire.jupyter import KERNEL_IMPORTS
from sublet.wire.zygote import LATER, OPTIONAL, Stamp, fingerprint

ZYGOTES_MAX: Final = 6
"""Warm interpreters at a time, those of single tenants aside. Each keeps what it imported in memory: some ten MB, with
torch some hundred."""
TENANT_ZYGOTES_MAX: Final = 64
"""Those of single tenants at a time, however much memory there is."""
TENANT_IDLE_NS: Final = 300 * NS_PER_S
"""So long its tenant has started nothing when one may be ended for another tenant's."""
ASSUMED_BYTES: Final = 64 * MIB
"""What one costs, as long as none with the same imports was measured."""
REMEMBERED_MAX: Final = 64
"""Kinds that are remembered as not to be had."""
BACKOFF_FIRST_NS: Final = 1 * NS_PER_S
BACKOFF_MAX_NS: Final = 60 * NS_PER_S
"""A zygote that died is made again after one second, then two, four, and so on up to this."""
DISCARDED_NS: Final = 600 * NS_PER_S
"""What failed its proof will fail it again, so it is only tried after this long: a package may have been upgraded."""
DEATHS_MAX: Final = 3
"""So often may one die before it was ever ready; then this counts as a failed proof."""

_TRAINING: Final = ("sublet.training.trainer?", "torch._dynamo?", "torch.utils.data?")
HARMLESS: Final = frozenset({*KERNEL_IMPORTS, "asyncio", "sublet.guest.worker", "sublet.jobs.inside?", *_TRAINING})
"""What a tenant may have imported outside of all walls, with the rights of the supervisor's user: what our own programs
ask for, from the interpreter that Sublet itself runs in. Whatever else is asked for is imported behind the walls."""
_WALLS: Final = "sublet.node.sandbox.carried"
"""What builds them."""
_WALLED_ENV: Final = (("HOME", "/nonexistent"), ("LANG", "C.UTF-8"), ("PYTHONNOUSERSITE", "1"))
_LIBRARIES: Final = "LD_LIBRARY_PATH"
_OURS_TO_SAY: Final = frozenset({"HOME", "LANG"})
"""What a tenant's guest is given whatever it asked for (``clean_env``)."""

_PYTHON_NAME: Final = re.compile(r"python(?:3(?:\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class ZygoteKey:
    """What kind of guest it is for."""

    python: str
    """The interpreter as it is called, not where links lead: that is how it knows its virtual environment."""
    imports: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    """The fingerprint of its environment."""
    uid: int = -1
    """Whose guests; -1: the supervisor's own user. It runs as that user, since it imports what that user may write."""
    walled: bool = False
    """Whether tenants' guests come from it: it stands outside of their walls."""
    tenant: str = ""
    """Of which single tenant, if it is only for that one."""

    @property
    def description(self) -> str:
        """For people."""
        imports = [name for name in self.imports if name != LATER]
        mine = f", for {self.tenant}" if self.tenant else ""
        return f"{self.python}{' with ' if imports else ''}{', '.join(imports)}{mine}"

    @property
    def options(self) -> tuple[str, ...]:
        """Of the interpreter. One outside of tenants' walls reads nothing but its own installation: no ``PYTHON…``
        variable, no folder of the user's, no working folder. One for the supervisor's own user has to be what that
        user's fresh interpreter would be."""
        return ("-I",) if self.walled else ()


def walled_key(
    entry: str, python: str, imports: Sequence[str], env: Mapping[str, str], driver: str = ""
) -> ZygoteKey | None:
    """The one for a tenant's guest: outside of all walls, with the supervisor's rights, so nothing in it is the
    tenant's choice. It is our own interpreter, in an environment that we made, with imports of our own programs; each
    copy of it builds the guest's walls around itself before anything else. None where the guest wants another.
    ``driver``: the folder of the driver's libraries, which guests with cards get as LD_LIBRARY_PATH, and which no
    tenant can change.
    """
    is_ours = python in ("", sys.executable) and HARMLESS.issuperset(imports)
    allowed = ((_LIBRARIES, driver),) if driver else ()
    read = [one for one in fingerprint(env) if one[0] not in _OURS_TO_SAY]
    if not entry or not is_ours or not set(read) <= set(allowed):
        return None
    return ZygoteKey(sys.executable, (_WALLS, *imports), (*_WALLED_ENV, *read), walled=True)


def without(imports: Sequence[str], cold: frozenset[str]) -> tuple[str, ...]:
    """What is imported where these packages are to stay out: only what is asked for "where it is there" can."""
    return tuple(
        name
        for name in imports
        if not name.endswith(OPTIONAL) or name.removesuffix(OPTIONAL).partition(".")[0] not in cold
    )


def is_python(program: str) -> bool:
    """Whether the first word of a command is called like an interpreter. What it is shows when it starts."""
    return _PYTHON_NAME.fullmatch(program.rpartition("/")[2]) is not None


def arguments_of(argv: Sequence[str]) -> tuple[str, ...] | None:
    """What a ``Fork`` carries for this command of Python; None where only a fresh interpreter will do.

    That is so for options (they shape the interpreter itself), for a program on stdin and for a conversation.
    """
    rest = tuple(argv[1:])
    if not rest or rest[0] in ("", "-"):
        return None
    if rest[0] in ("-m", "-c"):
        return rest if len(rest) > 1 else None
    return None if rest[0].startswith("-") else rest


class ZygoteState(enum.StrEnum):
    """How a kind stands."""

    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    """It is made again after a while."""
    DISCARDED = "discarded"
    """It failed its proof: guests of this kind start plainly."""


@dataclass(slots=True)
class _Entry:
    state: ZygoteState
    used_ns: int
    again_ns: int = 0
    deaths: int = 0
    reason: str = ""
    stamps: tuple[Stamp, ...] = ()
    private_bytes: int = 0
    """What it measured; 0: nothing yet."""

    @property
    def is_live(self) -> bool:
        return self.state in (ZygoteState.STARTING, ZygoteState.READY)


@dataclass(slots=True)
class ZygoteRegistry:
    """Which kinds there are, and how each stands."""

    zygotes_max: int = ZYGOTES_MAX
    tenant_bytes: int = 0
    """What those of single tenants may cost together; 0: there are none."""
    entries: dict[ZygoteKey, _Entry] = field(default_factory=dict)

    def want(self, key: ZygoteKey, now_ns: int) -> tuple[bool, tuple[ZygoteKey, ...]]:
        """A zygote of this key is wanted: whether to start it now, and which to end for it."""
        entry = self.entries.get(key)
        if entry is not None and (entry.is_live or now_ns < entry.again_ns):
            entry.used_ns = now_ns
            return False, ()
        ended = self._room_for(key, now_ns)
        if ended is None:
            return False, ()
        for other in ended:
            del self.entries[other]
        self.entries[key] = _Entry(ZygoteState.STARTING, now_ns, deaths=entry.deaths if entry else 0)
        self._forget()
        return True, ended

    def of_tenant(self, key: ZygoteKey, tenant: str, now_ns: int) -> ZygoteKey:
        """The key of this tenant's own one, if it has one or may have one; else ``key``, which tenants share."""
        own = replace(key, tenant=tenant)
        entry = self.entries.get(own)
        if (entry is not None and entry.is_live) or self._room_for(own, now_ns) is not None:
            return own
        return key

    def is_ready(self, key: ZygoteKey) -> bool:
        """Whether a guest can come from it now."""
        entry = self.entries.get(key)
        return entry is not None and entry.state is ZygoteState.READY

    def used(self, key: ZygoteKey, now_ns: int) -> None:
        """A guest came from it."""
        if (entry := self.entries.get(key)) is not None:
            entry.used_ns = now_ns

    def proved(self, key: ZygoteKey, stamps: tuple[Stamp, ...], private_bytes: int = 0) -> None:
        """It is ready, was made from files as old as this, and takes so much memory."""
        if (entry := self.entries.get(key)) is not None:
            entry.state, entry.stamps, entry.deaths = ZygoteState.READY, stamps, 0
            entry.private_bytes = private_bytes

    def stamps(self, key: ZygoteKey) -> tuple[Stamp, ...]:
        """What to compare before it is used."""
        entry = self.entries.get(key)
        return entry.stamps if entry is not None else ()

    def drop(self, key: ZygoteKey) -> None:
        """It went out of date, or is no longer wanted; it can be made anew at once."""
        self.entries.pop(key, None)

    def discarded(self, key: ZygoteKey, reason: str, now_ns: int) -> None:
        """It failed its proof."""
        if (entry := self.entries.get(key)) is not None:
            entry.state, entry.reason, entry.again_ns = ZygoteState.DISCARDED, reason, now_ns + DISCARDED_NS

    def died(self, key: ZygoteKey, reason: str, now_ns: int) -> None:
        """It ended without being asked to."""
        entry = self.entries.get(key)
        if entry is None or not entry.is_live:
            return
        entry.deaths += 1
        if entry.state is ZygoteState.STARTING and entry.deaths >= DEATHS_MAX:
            self.discarded(key, reason, now_ns)
            return
        pause_ns = min(BACKOFF_MAX_NS, BACKOFF_FIRST_NS << min(entry.deaths - 1, 16))
        entry.state, entry.reason, entry.again_ns = ZygoteState.DIED, reason, now_ns + pause_ns

    def lines(self) -> tuple[str, ...]:
        """For status and ``doctor``: what there is, and why some guests start plainly."""
        return tuple(
            f"{key.description}: {entry.state}{f' ({entry.reason})' if entry.reason else ''}"
            for key, entry in self.entries.items()
        )

    def _room_for(self, key: ZygoteKey, now_ns: int) -> tuple[ZygoteKey, ...] | None:
        """Which to end so that this one can be made; None if it cannot be."""
        live = [one for one, entry in self.entries.items() if entry.is_live and bool(one.tenant) == bool(key.tenant)]
        ready = [one for one in live if self.entries[one].state is ZygoteState.READY]
        ready.sort(key=lambda one: self.entries[one].used_ns)
        if not key.tenant:
            if len(live) < self.zygotes_max:
                return ()
            return tuple(ready[:1]) or None  # all are just being made; what is made last is no reason to throw away
        free, ended = self.tenant_bytes - sum(map(self._bytes, live)), list[ZygoteKey]()
        while free < self._bytes(key) or len(live) - len(ended) >= TENANT_ZYGOTES_MAX:
            if len(ended) == len(ready) or now_ns - self.entries[ready[len(ended)]].used_ns < TENANT_IDLE_NS:
                return None
            free += self._bytes(ready[len(ended)])
            ended.append(ready[len(ended)])
        return tuple(ended)

    def _bytes(self, key: ZygoteKey) -> int:
        """What it costs, or most likely will."""
        entry = self.entries.get(key)
        if entry is not None and entry.private_bytes:
            return entry.private_bytes
        alike = (one.private_bytes for other, one in self.entries.items() if other.imports == key.imports)
        return max(alike, default=0) or ASSUMED_BYTES

    def _forget(self) -> None:
        gone = [key for key, entry in self.entries.items() if not entry.is_live]
        gone.sort(key=lambda key: self.entries[key].used_ns)
        for key in gone[: max(0, len(gone) - REMEMBERED_MAX)]:
            del self.entries[key]
