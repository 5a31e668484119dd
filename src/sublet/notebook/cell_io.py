"""Sends variables into a cell and takes them out of it: what travels, what stays, and the outcome per name."""

from __future__ import annotations

import builtins
import contextlib
import enum
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from sublet.background import begin
from sublet.errors import LeaseEnded, SubletError, Unpicklable
from sublet.lazy_dataclass import dataclass
from sublet.notebook import guest_persistence, guest_side
from sublet.notebook.end_messages import cannot_travel
from sublet.notebook.namespace import NamesEncoder, Steady
from sublet.notebook.namespace_sync import BESIDE, Outgoing, Parcel, Taken
from sublet.notebook.remote_value import RemoteValue, again, clock_time
from sublet.notebook.remote_values import RemoteValues, Restored
from sublet.notebook.sources import compiler_flags, keep_sources, set_compiler_flags
from sublet.values import format_size

if TYPE_CHECKING:
    from sublet.compute.kernel_guest import CellCall, KernelGuest
    from sublet.notebook.environment import CellEnvironment
    from sublet.notebook.namespace_sync import Space
    from sublet.notebook.options import CellOptions
    from sublet.notebook.reading import Reading

LENT_MAX: Final = 8
"""Files handed over at a time: each takes a descriptor along."""
BROKEN_MAX: Final = 16
"""Times that a cell's results are sent again, without those that could not be loaded in the notebook."""
Placing = tuple[Any, ...]
"""Arguments of ``guest_side.place`` that go with the cell; empty where they went before it."""
_OWN: Final = re.compile(r"_\d+|_exit_code")
"""Names that IPython gives: of no interest as long as what they name is here."""


class Fate(enum.StrEnum):
    """What became of a name, as far as the end of the lease is concerned."""

    HERE = "in the notebook"
    SAVED = "saved"
    RECOMPUTE = "to be recomputed"
    """It is on the device and cannot be saved, or was not: the cell that made it makes it again."""
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResults:
    """What a cell left behind."""

    out: Outgoing
    news: guest_persistence.PersistenceNews
    reply: Mapping[str, Any]
    """What the kernel said of the cell: the content of an ``execute_reply``."""
    missing: tuple[str, ...] = ()
    """Names that should have come back, and are nowhere."""

    @property
    def text(self) -> str:
        """What is worth saying below the cell."""
        held, lost = self.news.held, self.news.lost
        sentences = [f"no {name} came back: the cell left no such variable" for name in self.missing]
        for name, why in self.out.stays.items():
            about = held.get(name)
            kept = "not saved"
            if name in lost:
                kept = "cannot be saved" if lost[name] == why else f"cannot be saved: {lost[name]}"
            elif about is not None and about.wall_ns:
                kept = f"saved {clock_time(about.wall_ns)}"
            sentences.append(f"{name} stays ({why}; {kept})")
        return ", ".join(sentences)

    @property
    def let_go(self) -> int:
        """Older checkpoints for which there was no room beside the new one."""
        return 0 if self.news.saved is None else self.news.saved.let_go


@dataclass(slots=True, eq=False)
class Traffic:
    """Of one notebook."""

    space: Space
    handles: RemoteValues
    fates: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """The fate of every name that cells on devices have left."""
    names_sent: NamesEncoder = field(default_factory=NamesEncoder)
    """The encoder of the names that cells read."""
    steady: Steady = field(default_factory=Steady)
    steady_names_sent: NamesEncoder = field(default_factory=NamesEncoder)
    """The encoder of the names that stand for the same constant on both sides."""
    surroundings: CellEnvironment | None = None
    """The notebook's settings and random states."""
    problems: dict[str, str] = field(default_factory=dict)
    """Settings that do not cross, and why, until they are shown."""
    unsent: dict[str, str] = field(default_factory=dict)
    """Names that a cell that can use any name does not see, and why, until they are shown."""
    progress: TransferProgress = field(init=False)
    """Of a transfer that takes long."""

    def __post_init__(self) -> None:
        self.progress = TransferProgress(self.space.names)
        self.space.on_group = self.progress.at

    def send(
        self, kernel: KernelGuest, reading: Reading, options: CellOptions, number: int
    ) -> tuple[Outgoing, Restored, Placing]:
        """What a cell reads, and what stood for it on an earlier device, to this one. Where nothing has to be sent, all
        that is to be said goes with the cell."""
        left_out: dict[str, str] = {}
        with self.progress.of("sending"):
            while True:
                try:
                    return self._send(kernel, reading, options, number, left_out)
                except Unpicklable as error:  # the device cannot put it together: once more without what none reads
                    if error.path not in reading.maybe or error.path in left_out:
                        raise
                    left_out[error.path] = error.what or error.message

    def _send(
        self, kernel: KernelGuest, reading: Reading, options: CellOptions, number: int, left_out: Mapping[str, str]
    ) -> tuple[Outgoing, Restored, Placing]:
        wanted = reading.reads if options.takes is None else frozenset(options.takes)
        requested = reading.requested if options.takes is None else None
        around = None if self.surroundings is None else self.surroundings.changes()
        try:
            maybe = reading.maybe if options.takes is None else frozenset()
            sent = self.space.outgoing(wanted, must=True, requested=requested, late=True, maybe=maybe, staying=left_out)
        except BaseException as error:
            self._surroundings_unsure()
            if not isinstance(error, Unpicklable):
                raise
            raise cannot_travel(error) from None
        if reading.opaque:
            self.unsent = sent.unsent
        try:
            handles, restored = self.handles.prepare(sent.handles, kernel, must=not reading.opaque)
            alive = self.handles.live()
            reads = self.names_sent.encode(sent.names, kernel)
            of_the_cell = reads, reading.binds, number, handles, tuple(alive), options.room_bytes
            _lend(kernel, sent)
            steady = self.steady_names_sent.encode(self.steady.current(self.space.names), kernel)
            more = sent.word, reading.is_quiet, reading.deletes, steady, around, sent.sources, compiler_flags()
            fetches = options.takes is None
            placing = sent.parcels, sent.gone, *of_the_cell, *more, fetches
            if not (sent.parcels or sent.late or handles or around):
                self.space.sent(sent)
                self.steady.crossed(sent.names, self.space.names)
                return sent, restored, placing
            self._at_largest(sent)
            pending = kernel.begin(guest_side.place, *placing)
            changed = self.space.changed_late(sent)
            placed: Taken = kernel.result(pending)
        except BaseException:
            self.space.invalidate(sent.names)
            self.names_sent.forget()
            self.steady_names_sent.forget()
            self.steady.forget()
            self._surroundings_unsure()
            raise
        self.problems |= placed.problems
        self.problems |= {} if around is None else around.problems
        self.space.sent(sent)
        self.steady.crossed(sent.names, self.space.names)
        self.space.on_freed(placed.freed)
        if changed:
            sent.parcels += self._send_late(kernel, self.space.parcels_of(changed))
        return sent, restored, ()

    def withdraw(self) -> None:
        """The cell is not run after all, and nothing was said of it to the device."""
        self.names_sent.forget()
        self.steady_names_sent.forget()

    def _send_late(self, kernel: KernelGuest, more: Outgoing) -> list[Parcel]:
        try:
            self._at_largest(more)
            _lend(kernel, more)
            placed: Taken = kernel.call(guest_side.place_late, more.parcels, more.word)
        except BaseException as error:
            self.space.invalidate(more.names)
            if isinstance(error, SubletError) and not kernel.is_lost:
                with contextlib.suppress(SubletError):
                    kernel.call(guest_side.given_up)
            raise
        self.space.sent(more)
        self.space.on_freed(placed.freed)
        return more.parcels

    def fetch(self, kernel: KernelGuest, sent: Outgoing, name: str, bound: Iterable[str]) -> None:
        """A running cell looks a name up that it was not ``sent``: send it now. ``bound``: names that the cell has
        bound itself."""
        try:
            if self.space.named((name,)):
                self._fetched(kernel, sent, name, frozenset(bound))
                return
            why = ""
        except LeaseEnded:
            raise
        except Unpicklable as error:
            why = cannot_travel(error).message
        except SubletError as error:
            why = error.message
        except Exception as error:  # noqa: BLE001 - whatever it is, the cell waits for an answer
            why = f"{type(error).__name__}: {error}"
        kernel.call(guest_side.not_fetched, why)

    def _fetched(self, kernel: KernelGuest, sent: Outgoing, name: str, bound: frozenset[str]) -> None:
        newer = dict.fromkeys((sent.names | bound) - {name}, "")
        more = self.space.outgoing((name,), must=True, requested=(), staying=newer)
        more.gone = ()
        try:
            handles, _ = self.handles.prepare(more.handles, kernel, must=True)
            _lend(kernel, more)
            placed: Taken = kernel.call(
                guest_side.place_fetched, more.parcels, more.names, more.word, more.sources, handles
            )
        except BaseException:
            self.space.invalidate(more.names)
            raise
        self.space.sent(more)
        self.space.on_freed(placed.freed)
        self.steady.crossed(more.names, self.space.names)
        sent.names |= more.names
        sent.parcels += more.parcels
        sent.handles |= more.handles

    def _at_largest(self, sent: Outgoing) -> None:
        """The device takes in what was sent, and does not say at what it is."""
        if sent.parcels:
            largest = max(sent.parcels, key=lambda parcel: parcel.nbytes)
            self.progress.at(largest.names, largest.nbytes)

    def take(
        self,
        kernel: KernelGuest,
        options: CellOptions,
        sent: Outgoing,
        number: int,
        binds: frozenset[str] = frozenset(),
        call: CellCall | None = None,
    ) -> CellResults:
        """What it changed; and what stays there is saved. ``binds``: names that the cell binds; ``call``: brings what
        it changed, unless it was not run."""
        with self.progress.of("collecting", options.gives or binds or sent.names):
            return self._receive(kernel, options, sent, number, call)

    def begin(self, kernel: KernelGuest, options: CellOptions, placing: Placing, request: dict[str, Any]) -> CellCall:
        """Have the cell run that this requests."""
        return kernel.begin_cell(guest_side.run, placing, request, _only(options), options.room_bytes)

    def _receive(
        self, kernel: KernelGuest, options: CellOptions, sent: Outgoing, number: int, call: CellCall | None
    ) -> CellResults:
        only = _only(options)
        reply: Mapping[str, Any] = {}
        try:
            if call is None:
                out: Outgoing = kernel.call(guest_side.collect, only, options.room_bytes)
            else:
                reply, (placed, out) = kernel.result(call.pending)
                if placed is not None:
                    self.problems |= placed.problems
                    self.space.on_freed(placed.freed)
            news, interrupted = guest_persistence.PersistenceNews(), None
            if out.stays or sent.handles:
                self.progress.at((*out.stays, *sent.handles), verb="saving")
                news, interrupted = _saved(kernel, self.handles, options)
            broken = self._merged(kernel, options, out)
            self._apply_side_effects(out)
        except BaseException:
            # What the cell changed is there and not here, and must not be gone on from. After an interrupt this is
            # redundant, since the guest is given up; it stays for errors that the guest outlives.
            self.space.invalidate(sent.names)
            self.steady.forget()
            self._surroundings_unsure()
            raise
        if only is None:
            self.steady.crossed((name for parcel in out.parcels for name in parcel.names), self.space.names)
        else:  # the device may have bound others
            self.steady.forget()
        if any(f"_{number}" in parcel.names for parcel in out.parcels):
            _keep_result(self.space.names, number)
        if only is not None:
            self.space.invalidate(sent.names - out.names)
        self.handles.record_left(out.stays, kernel, number)
        if broken and not kernel.is_lost:
            kernel.call(guest_persistence.hold, broken)
            news, interrupted = _saved(kernel, self.handles, options)
        self.handles.on_news(news, kernel)
        if not options.saves or news.failed:  # then there is something that a notice may save
            with contextlib.suppress(LeaseEnded):
                kernel.call(guest_persistence.taken)
        for parcel in out.parcels:
            size = format_size(parcel.nbytes)
            self.fates |= {name: (Fate.HERE, f"{size}, cell {number}") for name in parcel.names if name.isidentifier()}
        for name in out.gone:
            self.fates.pop(name, None)
        if interrupted is not None:
            raise interrupted
        missing = tuple(name for name in options.gives or () if name not in self.space.names)
        return CellResults(out=out, news=news, reply=reply, missing=missing)

    def _merged(self, kernel: KernelGuest, options: CellOptions, out: Outgoing) -> dict[str, str]:
        """Take it in; what could not be put together here, and why. From here on the cell has finished, whatever
        becomes of its lease."""
        if self.surroundings is not None and out.surroundings is not None:
            self.surroundings.apply(out.surroundings, files=True)
        keep_sources(out.sources)
        set_compiler_flags(out.flags)
        self.progress.at((), verb="receiving")
        quietly = (
            contextlib.nullcontext() if self.surroundings is None or not out.parcels else self.surroundings.undrawn()
        )
        with quietly:
            taken = self.space.take(out.parcels, out.gone)
        self.space.on_freed(out.freed)
        self.space.trim_pool()
        out.parcels = [parcel for parcel in out.parcels if parcel.names not in taken.idle]
        broken = taken.broken
        for _ in range(BROKEN_MAX):
            beside = frozenset(name for name, why in broken.items() if why == BESIDE)
            if not beside:
                break
            stuck = {name: why for name, why in broken.items() if name not in beside}
            try:
                more: Outgoing = kernel.call(guest_side.again, beside, stuck, options.room_bytes)
            except LeaseEnded:
                break
            broken = stuck | more.stays | self.space.take(more.parcels).broken
            out.parcels += more.parcels
        broken = {
            name: "it holds something that cannot be loaded here" if why == BESIDE else why
            for name, why in broken.items()
        }
        out.stays |= broken
        return broken

    def _apply_side_effects(self, out: Outgoing) -> None:
        """Set what the cell has changed beside variables, after everything that could draw a random number."""
        if self.surroundings is None:
            return
        if out.surroundings is not None:
            self.surroundings.apply(out.surroundings, files=False)
            self.problems |= out.surroundings.problems
        self.surroundings.apply_deferred()
        self.problems |= self.surroundings.problems()

    def _surroundings_unsure(self) -> None:
        if self.surroundings is not None:
            self.surroundings.send_all_next()

    def report(self) -> dict[str, tuple[Fate, str]]:
        """How every name stands that cells on devices have left: here, saved, to be recomputed, or lost."""
        found = {name: one for name, one in self.fates.items() if name in self.space.names and not _OWN.fullmatch(name)}
        for name, value in self.space.names.items():
            if type(value) is RemoteValue:
                found[name] = _fate(value)
        return found


def _only(options: CellOptions) -> frozenset[str] | None:
    return None if options.gives is None else frozenset(options.gives)


def _saved(
    kernel: KernelGuest, handles: RemoteValues, options: CellOptions
) -> tuple[guest_persistence.PersistenceNews, KeyboardInterrupt | None]:
    """Before the notebook takes what came: if the lease ends now the cell has not finished, here or there, and what was
    saved is given up. Raises that. An interrupt is for the person's own work, and a save that has begun is waited for;
    unless it comes twice."""
    try:
        news: guest_persistence.PersistenceNews = kernel.call(
            guest_persistence.save if options.saves else guest_persistence.read_status
        )
    except KeyboardInterrupt as interrupt:
        try:
            return kernel.call(guest_persistence.read_status), interrupt  # raised when the save is done
        except KeyboardInterrupt:
            handles.forget_committed()
            return guest_persistence.PersistenceNews(), interrupt
    return news, None


def _lend(kernel: KernelGuest, what: Outgoing) -> None:
    for n in range(0, len(what.lent), LENT_MAX):
        kernel.call(guest_side.keep, what.lent[n : n + LENT_MAX])
    what.lent.clear()


def _keep_result(names: dict[str, Any], number: int) -> None:
    """What the cell's last line gave is there as after any other cell: ``_`` and ``Out[number]``."""
    value = names.get(f"_{number}")
    results = names.get("_oh")
    if not isinstance(results, dict) or number in results:
        return
    results[number] = value
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    if shell is None or shell.user_ns is not names:
        names.update({"_": value, "__": names.get("_", ""), "___": names.get("__", "")})
        return
    # IPython binds these names only while they hold what it bound to them last. Else a program has bound them.
    hook, hidden = vars(shell.displayhook), shell.user_ns_hidden
    is_its_own = "_" not in vars(builtins) and all(
        hidden.get(name, hook[name]) is names[name] for name in ("_", "__", "___") if name in names
    )
    last = {"_": value, "__": hook["_"], "___": hook["__"]}
    hook.update(last)
    if is_its_own:
        shell.push(last, interactive=False)


def fates_text(fates: dict[str, tuple[Fate, str]]) -> str:
    """The report, for people."""
    if not fates:
        return "no cell has left anything yet"
    width = max(map(len, fates))
    order = list(Fate)
    lines = sorted(fates.items(), key=lambda one: (order.index(one[1][0]), one[0]))
    return "\n".join(f"{name:<{width}}  {fate:<16}  {detail}".rstrip() for name, (fate, detail) in lines)


def _fate(handle: RemoteValue) -> tuple[Fate, str]:
    about = handle.value_about
    what = ", ".join(one for one in (about.what, format_size(about.nbytes) if about.nbytes else "") if one)
    if about.wall_ns:
        back = "" if handle.is_live else "; comes back when it is read"
        return Fate.SAVED, f"{what}, {clock_time(about.wall_ns)}{back}"
    why = f"cannot be saved ({handle.why_lost})" if handle.why_lost else "was not saved"
    if handle.is_live:
        return Fate.RECOMPUTE, f"{what}; {why}; when the lease has ended {again(about)}"
    return Fate.LOST, f"{what}; {why}; {again(about)}"


def number_of(shell: Any) -> int:
    """Of the cell that runs, in every version of IPython."""
    return len(shell.history_manager.input_hist_parsed) - 1


# ------------------------------------------------------------------------------------------------------------- progress
#
# Shows which variable is being sent or received once that takes noticeably long.


SLOW_S: Final = 1.0
"""A transfer that takes less shows nothing."""
EVERY_S: Final = 0.25
"""The least time between two changes of what is shown."""
COUNTED: Final = frozenset((list, tuple, dict, set, frozenset))
ITEM_BYTES: Final = 8
"""What an item of a container counts, where it is compared with arrays."""
ARRAYS: Final = frozenset(("numpy", "torch"))


def describe_names(names: Collection[str], values: Mapping[str, Any], nbytes: int = 0) -> str:
    """The name of the largest value, its type and size, and how many others there are beside it. ``values``: as far as
    they are here; ``nbytes``: of all of them together, 0 if that is not known."""
    known = sorted(name for name in names if name.isidentifier())
    if not known:
        return ""
    largest = max(known, key=lambda name: _size(values.get(name)))
    value = values.get(largest)
    details = [] if value is None else [type(value).__name__]
    if type(value) in COUNTED:
        details.append(f"{len(value):,} items")  # type: ignore[arg-type]
    elif nbytes or _size(value):
        details.append(format_size(nbytes or _size(value)))
    about = f" ({', '.join(details)})" if details else ""
    return f"{largest}{about}" + (f" and {len(known) - 1} more" if len(known) > 1 else "")


def _size(value: Any) -> int:
    """About how many bytes, without a look at what the value holds; 0 if that does not say it."""
    if type(value) in COUNTED:
        return len(value) * ITEM_BYTES
    if type(value) in (str, bytes, bytearray):
        return len(value)
    found = getattr(value, "nbytes", 0) if str(type(value).__module__).partition(".")[0] in ARRAYS else 0
    return found if type(found) is int else 0


class TransferProgress:
    """Of the transfers of one notebook, one after the other. The sender or receiver reports its position (``at``), and
    this shows it when it is time. A timer does so where the work on one variable takes long. It is left to run out at
    the end of a transfer: it fires in time for the next one, which then needs no thread of its own."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], Any] = threading.Timer,
    ) -> None:
        """``values``: the notebook's variables."""
        self.show: Callable[[str, bool], object] = lambda _text, _is_first: None
        """Called with the text, and whether it is the first of this transfer; on any thread."""
        self._values = values
        self._clock, self._new_timer = clock, timer
        self._lock = threading.Lock()
        self._verb = ""
        """Empty: nothing is being transferred."""
        self._names: Collection[str] = ()
        self._nbytes = 0
        self._due_s = 0.0
        """Nothing is shown before."""
        self._shown = ""
        self._timer: Any = None

    @contextlib.contextmanager
    def of(self, verb: str, names: Collection[str] = ()) -> Iterator[None]:
        """A transfer. ``names``: what it begins with, as far as that is known."""
        self._due_s, self._shown = self._clock() + SLOW_S, ""
        self._verb, self._names, self._nbytes = verb, names, 0
        try:
            yield
        finally:
            with self._lock:
                self._verb, self._names = "", ()

    def at(self, names: Collection[str], nbytes: int = 0, verb: str = "") -> None:
        """It is at these now. ``verb``: what is done with them, if that is something else than before."""
        if not self._verb:
            return
        with self._lock:
            self._verb, self._names, self._nbytes = verb or self._verb, names, nbytes
            if names and self._timer is None:  # a transfer that sends nothing starts no thread
                self._start()
        self.refresh()

    def refresh(self) -> None:
        """Show it if it is time. The waiting thread calls this now and then."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        with self._lock:
            text = describe_names(self._names, self._values, self._nbytes) if self._verb else ""
            if not text or (line := f"{self._verb} {text}") == self._shown:
                return
            is_first, self._shown, self._due_s = not self._shown, line, now_s + EVERY_S
            self.show(line, is_first)

    def _start(self) -> None:
        self._timer = timer = self._new_timer(max(self._due_s - self._clock(), EVERY_S), self._ring)
        timer.daemon = True
        try:
            begin(timer)
        except (RuntimeError, MemoryError):  # no room for a thread: it is only told a little later how far it has come
            self._timer = None

    def _ring(self) -> None:
        self.refresh()
        with self._lock:
            self._timer = None
            if self._verb:
                self._start()
