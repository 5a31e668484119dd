"""Messages about guests: between holder and supervisor, and between office and supervisor.

A holder's connection is opened with a token at the office's agent, which hands it on with an ``Admit``; from then on
the supervisor answers it by itself, whether there is an office or not. Questions are answered one by one; news of
guests (``GuestNews``) and their output come without being asked for, to those who attached.

Standard library only: supervisor, zygotes and guests read these.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import field
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.cards import CardUse
from sublet.wire.compat import later
from sublet.wire.orders import Inventory, Order, Report
from sublet.wire.volumes import HolderVolumeCall, HolderVolumeReply
from sublet.wire.zygote import Warm

STDOUT: Final = 1
STDERR: Final = 2
GUESTS_PAGE: Final = 128
"""Guests in one answer: so many fit into a message, and listing them does not delay other work."""
OUTPUT_HEAD: Final = struct.Struct("!BQ")
"""Before each piece of output on its channel: the stream (0: said by Sublet, on stderr) and the offset in the log."""


class StdioKind(enum.StrEnum):
    """What a guest reads from and writes to."""

    PIPES = "pipes"
    PTY = "pty"
    """A terminal of its own."""
    NULL = "null"
    """Nothing to read; what it writes is logged all the same."""


class Profile(enum.StrEnum):
    """How far a guest is kept apart."""

    LOCAL = "local"
    """The same user, the caller's environment: the whole tree can be ended and capped, files are not kept from it."""
    TENANT = "tenant"
    """A user of its own, namespaces, Landlock, an empty environment."""


# ---- between holder and supervisor ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """First message of a connection: a lease's capability token, a tenant's access token, or neither (the owner)."""

    capability: str = ""
    access: str = ""
    as_tenant: bool = later(False)
    """A process of root's or the owner's means to be the tenant whose token it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSpec:
    """What to run, and how."""

    argv: tuple[str, ...] = ()
    """A command and its arguments; or, with ``entry``, nothing."""
    entry: str = ""
    """A Python callable, as ``package.module:name``; it runs in ``python``, forked from a warm one where possible."""
    args: str = ""
    """The callable's arguments: a JSON object."""
    python: str = ""
    """The interpreter of an entry point; empty: the one Sublet runs in."""
    imports: tuple[str, ...] = ()
    """What a warm interpreter should have imported; with a ``?`` at the end where it is there."""
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    """The whole environment in profile ``local``; what is added to the empty one in profile ``tenant``."""
    stdio: StdioKind = StdioKind.PIPES
    rows: int = 24
    cols: int = 80
    name: str = ""
    grace_ns: int = 0
    """How long it may take to leave when it is stopped alone; 0: the lease's own grace."""
    umask: int = 0o022
    serves: bool = False
    """It takes connections of holders (``Connect``). They come to it where others have their stdin."""
    patient: bool = False
    """It will import what a warm interpreter has: rather than do that beside one that is being made, it waits for it,
    within a bound. What needs none of that begins sooner by itself."""
    device: int = later(-1)
    """Its own among the devices of the lease, by number: it finds that card first. -1: none in particular."""


class Service(enum.StrEnum):
    """What a connection to a guest is for. One connection serves one purpose."""

    WORK = "work"
    """Calls of Python functions."""
    DEVICE = "device"
    """Device memory, modules, launches."""
    JUPYTER = "jupyter"
    """The channels of a Jupyter kernel."""
    CACHES = "caches"
    """Nothing is said on it: the guest gives back what its frameworks keep of a device for later, and hangs up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run this under the connection's (lease, epoch)."""

    spec: GuestSpec
    volume: str = ""
    """A ticket (``VolumeLent``): it may save to that volume, besides what is its own lease's."""
    awaits: bool = later(False)
    """It writes nothing before a reader attaches without loss, or this connection is over: before that it might write
    more than is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """It runs."""

    guest: GuestId
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """It could not be run; nothing of it is left."""

    exit_code: int
    """What a shell would answer: 127 if there is no such command, 126 otherwise."""
    message: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Send me its output from this offset of its log on, and take what I send for its stdin."""

    guest: GuestId
    offset: int = 0
    """-1: only what comes from now on."""
    follow: bool = True
    """False: what there is, then ``Detach``."""
    stdin: bool = False
    lossless: bool = False
    """The guest waits for this reader rather than let it miss something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The channels, as numbers of this connection; 0 where there is none."""

    output: int
    stdin: int
    view: GuestView


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Hand this connection to a guest that serves. Once ``Connected`` is the answer both sides greet each other anew,
    and the other side is the guest."""

    guest: GuestId
    service: Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """What is sent from here on only the guest receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A connection that comes to a guest, beside its descriptor: what for, and by whose right."""

    service: Service
    tenant: TenantId
    lease: LeaseId
    epoch: Epoch
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """No more output of this guest on this connection."""

    guest: GuestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The window has another size now."""

    guest: GuestId
    rows: int
    cols: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalGuest:
    """Send this signal: to its main process, or (``tree``) to every process it has."""

    guest: GuestId
    number: int
    tree: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGuest:
    """SIGTERM, then the grace, then the end of the whole tree. The lease stays."""

    guest: GuestId
    grace_ns: int = -1
    """-1: its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListGuests:
    """What runs, and what ran under leases that are remembered; empty fields ask for all one may see."""

    lease: str = ""
    guest: str = ""
    ended: bool = False
    """Also those that are gone and whose log is still kept."""
    after: int = 0
    """Only those that were started after the one of this number: the next page, with what ``Guests.more`` said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestView:
    """A guest as people see it. Wall times in nanoseconds; 0: not yet."""

    id: GuestId
    lease: LeaseId
    epoch: Epoch
    tenant: TenantId
    name: str
    argv: tuple[str, ...]
    profile: Profile
    state: str
    pid: int
    processes: int
    started_at: int
    ended_at: int
    exit_code: int
    """Of its main process: 128+n for signal n; -1 while it runs."""
    reason: str
    """Why it was ended, if it did not end by itself."""
    cpu_ns: int
    peak_bytes: int
    log_bytes: int
    log_dropped: int
    """Bytes of its output that the log no longer has."""
    number: int = 0
    """In this order they are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guests:
    """The answer to ``ListGuests``: a page of at most ``GUESTS_PAGE``, oldest first."""

    guests: tuple[GuestView, ...]
    more: int = 0
    """Where to go on (``ListGuests.after``); 0: that was all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestNews:
    """Something happened to a guest one is attached to."""

    guest: GuestId
    what: str
    """``exited`` (its main process), ``gone`` (its last), ``notice`` or ``spared``."""
    exit_code: int = -1
    reason: EndReason | None = None
    take_at_ns: int = 0
    """Of a notice: when the lease is taken, CLOCK_BOOTTIME."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It was done."""


HolderCall = Start | Attach | Connect | Detach | Resize | SignalGuest | EndGuest | ListGuests | Warm | HolderVolumeCall
HolderReply = Started | NotStarted | Attached | Connected | Guests | Done | HolderVolumeReply


# ---- between office and supervisor ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Whose connection it is and what it may do, as the agent read it from the token."""

    tenant: TenantId
    operator: bool
    profile: Profile
    lease: LeaseId | None = None
    epoch: Epoch | None = None
    operations: tuple[str, ...] = ()
    generation: int = later(0)
    """Of the tenant's rights, when it was let in."""
    actor: str = later("")
    """The operator whose connection it is, where one acts for the tenant."""
    actor_generation: int = later(0)
    """Of the actor's rights."""

    def is_by(self, tenant: TenantId, before: int) -> bool:
        """Whether it was let in by rights of this tenant: of a generation ``before`` this one; 0: of any."""
        rights = ((self.tenant, self.generation), (self.actor, self.actor_generation))
        return any(one == tenant and (not before or of < before) for one, of in rights)


_CAPS: Final = LeaseCaps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """An office takes over. It says who it is and what the machine has."""

    office: str
    inventory: Inventory
    caps: LeaseCaps = later(_CAPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What the supervisor is, and what it still has."""

    pid: int
    version: str
    started_ns: int
    live: tuple[LeaseId, ...]
    guests: int
    lines: tuple[str, ...] = ()
    """For ``sublet doctor``: which protection is active, and why not."""
    is_new: bool = True
    """Whether its tables are empty, so that it needs every live lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A batch, in order."""

    orders: tuple[Order, ...]
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """A batch, in order."""

    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Serve the connection whose descriptor comes with this, and whose greeting the agent has read."""

    front: Front
    oldest: int
    newest: int
    """The versions that the other side speaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Cut connections of this tenant, also those that it has for other tenants: its rights changed."""

    tenant: TenantId
    generation: int = later(0)
    """Those that were let in under an older generation of its rights; 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """End: at once (guests are ended first), or when the last lease is over."""

    now: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListProcesses:
    """Every process that is the supervisor's or a guest's, now."""

    uses: tuple[CardUse, ...] = ()
    """What the driver of the cards says each process has, for guests that have more than their lease."""
    let_go: bool = later(False)
    """Whether an operator may want to reset a card: nothing of ours keeps the driver open without need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Their numbers, as the supervisor sees them."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTroubles:
    """What has failed in the supervisor since it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleNote:
    """The failures of one loop."""

    loop: str
    shortages: int
    """Of descriptors, memory, processes: the loop waited."""
    errors: int
    """Others."""
    failing: int
    """How many loops of this name do not work now."""
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """One for each loop in which something failed."""

    troubles: tuple[TroubleNote, ...]


OfficeCall = Configure | Admit | Revoke | ListGuests | ListProcesses | ListTroubles | EndGuest | Quit
OfficeReply = Configured | Guests | Processes | Troubles | Done
