"""A notebook's cells on leased devices: acquires a lease, starts a kernel, sends and returns variables.

Between cells the lease is left to its time to live and counts as idle. Whatever a finished cell changed is in the
notebook; so when the lease is lost, the next cell takes another one and goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sublet.compute.kernel_guest import KernelGuest
from sublet.compute.shown import sees_our_folders
from sublet.errors import (
    CheckpointFailed,
    GpuSessionEnded,
    InvalidRequest,
    LeaseEnded,
    OutOfMemory,
    StaleEpoch,
    SubletError,
    WorkerLost,
)
from sublet.lease_end import EndReason
from sublet.notebook.additions import Additions
from sublet.notebook.bill import NotebookBill, bill_in_the_end
from sublet.notebook.cell_io import Placing, Traffic, fates_text, number_of
from sublet.notebook.cell_terms import (
    FinishedCell,
    add_import_paths,
    as_numbered,
    check_names,
    fits,
    moving,
    running,
    with_terms_of,
    with_what_is_free,
    without_expiry_notice,
)
from sublet.notebook.end_messages import RERUN, process_lost, session_ended, unnamed, what_ended
from sublet.notebook.environment import CellEnvironment
from sublet.notebook.guest_side import be_plain, look_around
from sublet.notebook.import_hook import PreImports
from sublet.notebook.in_place import can_change
from sublet.notebook.in_use import TASK, THREAD, in_use
from sublet.notebook.interrupts import Interrupts, interrupts_wait
from sublet.notebook.kernel_line import LOOK_S, Between, KernelLine, Message
from sublet.notebook.lending import PoolOwner
from sublet.notebook.lookups import possible_lookups
from sublet.notebook.monkeypatches import ReplacedAttributes
from sublet.notebook.namespace_sync import NOTEBOOK, Space
from sublet.notebook.on_demand import MESSAGE
from sublet.notebook.options import VRAM_DEFAULT, CellOptions
from sublet.notebook.output import SILENT, Hints, ShellFront, StatusLine, failed_cell, show_line
from sublet.notebook.ownership import Owner
from sublet.notebook.queued_cells import QueuedCells
from sublet.notebook.reading import Reading, read_cell
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.remote_values import RemoteValues, Restored
from sublet.notebook.resume import (
    GAVE_WAY,
    end_parked,
    estimate_error_s,
    is_known_to_be_over,
    is_parked,
    resume_parked,
    wait_until_gone,
    wait_until_taken,
)
from sublet.notebook.status import CellBill, CellEnded, Finished, Notices, OfferAccepted, Starting, Waiting
from sublet.values import NS_PER_S, Exclusivity, Tier, format_size
from sublet.wire.http_views import SESSION_LABEL

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.client.model import Offer, Place
    from sublet.compute.kernel_guest import CellCall
    from sublet.jobs import MemoryOutputStore
    from sublet.lease_end import LeaseEnd
    from sublet.notebook.parcels import Outgoing
    from sublet.studio import NotebookSession

UNSENT_MAX: Final = 8
"""Names in the line of those that cannot be sent."""
QUICK_S: Final = 0.1
"""A cell that is over by then, without output, is not shown as running: only as done."""
LATE_S: Final = 2.0
"""In kernel mode a cell that is over by then shows no line, unless it has something unusual to tell."""


class _Early(Exception):
    """An interrupt came before the cell began; everything is in order."""


class Cells:
    """Those of one shell."""

    def __init__(self, shell: Any, connect: Callable[[], Fabric]) -> None:
        self.shell = shell
        self.bills = NotebookBill()
        self.labels = {"program": "notebook"}
        """Of every lease that is taken here."""
        self.lease: Lease | None = None
        self.finished: MemoryOutputStore | None = None
        """Results of ``--map``, of a notebook that has no volume for them."""
        self.connect = connect
        """Connects to the office. A job replaces it before its first cell."""
        self._fabric: Fabric | None = None
        self._front = ShellFront(shell)
        self._front.answer = self._answer
        self._front.to_guest = self._to_guest
        self._between = Between(shell, self._front.show)
        self._queued = QueuedCells(shell)
        Hints(shell)
        self._kernel: KernelGuest | None = None
        self._behind = ""
        """The lease of the guest before this one, if that may still be saving."""
        self._line: KernelLine | None = None
        self.surroundings = CellEnvironment(is_notebook=True)
        """Settings and random states of this process."""
        self._ahead = PreImports(self.surroundings.undrawn)
        self._replaced = ReplacedAttributes(shell.user_ns, self.surroundings.assigned)
        self._additions = Additions(shell)
        self._copied: set[str] = set()
        """Names that were told to be copied while running code of the notebook changes them."""
        self._space = Space(shell.user_ns, NOTEBOOK, lender=PoolOwner())
        self.handles = RemoteValues(shell.user_ns)
        self.owner = Owner(shell.user_ns)
        self.traffic = Traffic(self._space, self.handles, surroundings=self.surroundings)
        self.reports = False
        """Whether the report is shown after every cell."""
        self._lease_options = CellOptions()
        self._billed_s = 0.0
        self._stood_s = 0.0
        """How long the cell was suspended."""
        self._notices = Notices() if self._front.kernel is not None else None
        self._interrupts = Interrupts()
        """Of the cell that runs."""
        self._is_begun = False
        """Whether its first line may have run. Before the kernel's first message about it, ``_call`` knows better."""
        self._call: CellCall | None = None
        self._session: NotebookSession | None = None
        """The session that ``SUBLET_SESSION`` names; found with the first cell."""
        self._activities = contextlib.ExitStack()
        """What keeps the leases of the cell that runs from being idle."""

    # ---- a cell

    def run(self, source: str, options: CellOptions, *, is_whole: bool = False) -> None:
        """Run it on a device. What it raises is raised here, with its own traceback. ``is_whole``: no line with
        ``%%gpu`` stands above it."""
        with interrupts_wait() as self._interrupts:
            self._front.may_stop = self._interrupts.cut_short
            try:
                self._run_one(source, options, is_whole)
            finally:
                self._ahead.wait()  # what is imported finds ``get_ipython`` only as long as a cell runs

    def _run_one(self, source: str, options: CellOptions, is_whole: bool) -> None:
        python = self.shell.transform_cell(source)
        self.reading(python)
        check_names(options, self._space.names)
        KernelGuest.check(options.python)
        self._ahead.start_for(python, gives=options.gives is None)
        status = StatusLine(self.shell, late_s=LATE_S if is_whole else 0.0)
        self._front.on_cleared = status.cleared
        self._front.begin_cell()
        began_s, began_wall_ns = time.monotonic(), time.time_ns()
        self._stood_s = 0.0
        try:
            numbered, ran, waited_s = source if is_whole else as_numbered(source), None, 0.0
            while ran is None:
                with status.show_if_abandoned(), self._interrupts.open():
                    lease = self._leased(options, status)
                self._ahead.begin(is_sent=False)
                waited_s = time.monotonic() - began_s - self._stood_s
                with self._activities:
                    self._activities.enter_context(lease.activity())
                    ran = self._run_unless_taken(lease, numbered, python, options, status)
        except GpuSessionEnded as error:  # what it reads went with an earlier lease; this one is as it was
            status.show(CellEnded(message=error.message, do=error.do))
            raise
        except LeaseEnded as error:
            handles = {name: one for name, one in self.handles.all().items() if one.was_of(self._kernel)}
            self._detach_kernel()
            inside = self.handles.ended(began_wall_ns)
            bill = self._bill_so_far(began_s, error.end)
            self._leave_ended()
            status.show(CellEnded(message=what_ended(error), do=RERUN, bill=bill))
            raise session_ended(error, handles, inside) from error
        except (WorkerLost, OutOfMemory) as error:
            status.show(CellEnded(message=error.message, do=error.do, bill=self._bill_so_far(began_s, None)))
            raise
        except SubletError as error:
            status.show_abandoned(CellEnded(message=error.message, do=error.do))
            raise
        lease = self.lease or lease
        self._queued.hold_while_queued(lease)
        price = self.bills.price(lease.id, self.fabric())
        cost, currency = price * ran.bill.held_s, self.bills.currency
        bill = replace(ran.bill, waited_s=waited_s if waited_s >= 0.1 else 0.0, cost=cost, currency=currency)
        device = lease.devices[0]
        self._add_bill(lease.id, bill, failed=ran.reply["status"] == "error" or ran.failed is not None)
        status.show(Finished(device=device.id, host=device.host, bill=bill, moved=ran.text))
        if self.reports:
            print(fates_text(self.traffic.report()))  # noqa: T201
        self._front.take_reply(ran.reply)
        if ran.reply["status"] == "error":
            raise failed_cell(ran.reply, unnamed(ran.reply, self._space.visible(), ran.sent))
        if ran.failed is not None:
            raise ran.failed

    def _leave_ended(self) -> None:
        """The office may have said that the lease is over before it was told to its holder: the next cell shall not
        come with it again. What is parked is known to be over, and is resumed."""
        lease = self.lease
        if lease is not None and lease.end is None:
            with contextlib.suppress(SubletError):
                lease.release()
            self.lease = None

    def _bill_so_far(self, began_s: float, end: LeaseEnd | None) -> CellBill | None:
        """Of a cell that was ended, with its lease or alone."""
        lease, since_s = self.lease, self._billed_s
        if lease is None or not lease.devices or not since_s:
            return None
        end = lease.end or end
        self._billed_s = time.monotonic() if end is None else 0.0
        amount = sum(one.amount for one in lease.devices)
        bill = bill_in_the_end(since_s, began_s, self._stood_s, amount, end)
        self._add_bill(lease.id, bill, failed=True)
        return bill

    def _add_bill(self, lease: str, bill: CellBill, *, failed: bool) -> None:
        """To the notebook's, and to its session's."""
        number = number_of(self.shell)
        self.bills.add(number, lease, bill)
        if self._session is not None:
            self._session.ran(
                cell=number,
                lease=lease,
                at_ns=time.time_ns(),
                held_s=bill.held_s,
                busy_s=bill.busy_s,
                vram_byte_s=bill.vram_byte_s,
                launches=bill.launches,
                bytes_saved=bill.bytes_saved,
                waited_s=bill.waited_s,
                failed=failed,
            )

    def note_saved(self, number: int, wall_ns: int) -> None:
        """Of the notebook's session, if it has one: a checkpoint was saved."""
        if self._session is not None:
            self._session.saved(self.owner.name, number, wall_ns)

    @property
    def bill(self) -> CellBill:
        """Of all cells so far."""
        return self.bills.total

    @property
    def space(self) -> Space:
        """The notebook's side."""
        return self._space

    @property
    def kernel(self) -> KernelGuest | None:
        """The guest that is there now."""
        kernel = self._kernel
        return None if kernel is None or kernel.is_lost else kernel

    def fabric(self) -> Fabric:
        """Connected when it is first needed."""
        if self._fabric is None:
            self._fabric = self.connect()
        return self._fabric

    def python(self, source: str) -> str:
        """A cell as Python, with what IPython makes of magics."""
        return str(self.shell.transform_cell(source))

    def reading(self, python: str) -> Reading:
        """What a cell reads, of names that are there. Raises ``SyntaxError`` before anything is asked for."""
        found = read_cell(python)
        space = self._space
        reads = space.named(found.reads)
        if found.opaque:
            reads |= {name for name in space.visible() if type(space.names[name]) is RemoteValue}
        deletes = frozenset(space.named(found.deletes) - reads)
        maybe = frozenset(space.visible()) if found.opaque else possible_lookups(found.lookups, reads, space.names)
        maybe -= reads
        requested = None if found.opaque else found.reads
        return replace(found, reads=frozenset(reads), deletes=deletes, maybe=maybe, requested=requested)

    def explained(self, source: str) -> str:
        """What would be sent for this cell, what stays, and why."""
        return explain(self._space, self.reading(self.python(source)), has_guest=self.kernel is not None)

    def release(self) -> None:
        """Give the lease back. What was only on the device is saved, if it was not and can be; else it is lost."""
        lease, self.lease = self.lease, None
        try:
            self._queued.release()
            with contextlib.suppress(SubletError):
                self.handles.save()
            self._detach_kernel()
        finally:  # also when an interrupt has ended the saving
            if lease is not None and is_parked(lease):
                end_parked(self.fabric(), lease)
            elif lease is not None:
                self._behind = self._behind if lease.end is not None else ""
                lease.release()

    def debug(self) -> None:
        """Open the debugger in the frames that the error of a leased cell left on the device."""
        if self.kernel is None:
            raise InvalidRequest(
                "the cell failed on a device that this notebook no longer has",
                do="Run the cell again, and then %debug.",
            )
        self.run("%debug", replace(self._lease_options, takes=None, gives=None, over=""))

    # ---- the lease and the kernel

    def _session_for(self, options: CellOptions) -> NotebookSession | None:
        """The session whose leases these are; None without ``SUBLET_SESSION``. The first cell of a new name starts one,
        with what it asks for."""
        name, before = os.environ.get("SUBLET_SESSION", ""), self._session
        if name and (before is None or before.was_refused):
            from sublet.studio import NotebookSession, Terms

            terms = Terms(
                vram=VRAM_DEFAULT if options.vram_bytes is None else options.vram_bytes,
                count=options.gpus,
                ttl_s=None if options.ttl_ns is None else options.ttl_ns / NS_PER_S,
                tier=(options.tier or Tier.INTERACTIVE).value,
                pay_priority=options.pay_priority,
                exclusivity=Exclusivity.SHARED.value if options.shared else None,
                model=options.model,
                or_smaller=options.smaller_ok,
                or_model=options.or_model,
            )
            found = NotebookSession(name, self.fabric(), terms)
            if not self.owner.has_own_name or (before is not None and self.owner.name == before.session.volume):
                self.owner.rename(found.session.volume)
            self._session = found
        return self._session if name else None

    def _leased(self, options: CellOptions, status: StatusLine) -> Lease:
        session = self._session_for(options)
        if session is not None:
            options = with_terms_of(options, session.session.terms)
        lease = self.lease
        if lease is not None and lease.end is None and lease.notice is not None:
            wait_until_taken(lease)
        if lease is not None and is_parked(lease) and self._kernel is not None and not self._kernel.is_lost:
            with contextlib.suppress(LeaseEnded):  # then there is nothing to go on with, and another is asked for
                lease = self._resume(lease, self._kernel, options, status)
        if (
            lease is not None
            and lease.end is None
            and lease.notice is None
            and fits(lease, self._lease_options, options)
        ):
            return lease
        old = lease if lease is not None and lease.end is None and lease.notice is None else None
        if old is not None:
            with contextlib.suppress(SubletError):
                self.handles.save()  # what is only there goes with it, if it is replaced
        elif lease is not None:
            self.release()
        fabric = self.fabric()

        def waiting(place: Place) -> None:
            estimate_s = place.estimate
            error_s = None if estimate_s is None else estimate_error_s(fabric)
            status.show(Waiting(place=place.position, reason=place.reason, estimate_s=estimate_s, error_s=error_s))

        def offered(offer: Offer) -> bool:
            status.show(OfferAccepted(what=str(offer)))
            return True

        wait = None if options.wait_ns is None else options.wait_ns / NS_PER_S
        terms: dict[str, Any] = {} if options.ttl_ns is None else {"ttl": options.ttl_ns / NS_PER_S}
        if old is not None:
            terms["replaces"] = old
        with with_what_is_free(fabric, old):
            try:
                lease = (fabric if session is None else session).gpu(
                    min_vram=VRAM_DEFAULT if options.vram_bytes is None else options.vram_bytes,
                    count=options.gpus,
                    exclusivity=Exclusivity.SHARED if options.shared else None,
                    tier=options.tier or Tier.INTERACTIVE,
                    pay_priority=options.pay_priority,
                    wait=wait,
                    or_smaller=options.smaller_ok,
                    model=options.model,
                    or_model=options.or_model,
                    on_place=waiting,
                    on_offer=offered,
                    labels=self.labels,
                    **terms,
                )
            except (LeaseEnded, StaleEpoch):  # the present lease ended a moment ago
                if old is None:
                    raise
                if not is_known_to_be_over(old):
                    self._part_from(old)
                return self._leased(options, status)  # what is parked goes on first
        try:
            if old is not None:
                self._part_from(old)
            self.lease, self._lease_options = without_expiry_notice(lease), options
        except BaseException:  # a trace that is kept must not keep the lease
            lease.release()
            raise
        if self._notices is not None:
            self._notices.suppress(self.lease.id)
        self._billed_s = time.monotonic()
        return self.lease

    def _part_from(self, old: Lease) -> None:
        """Let go of a lease that was replaced or is over."""
        self.lease = None
        self._queued.release()
        self._detach_kernel()
        if is_parked(old):
            end_parked(self.fabric(), old)
        elif old.end is None or old.end.reason is EndReason.RELEASED:
            self._behind = ""  # it was saved before, and its guest saves nothing more

    def _ready(self, lease: Lease, options: CellOptions, status: StatusLine) -> tuple[KernelGuest, KernelLine]:
        kernel, line = self._kernel, self._line
        if kernel is None or line is None or kernel.is_lost or kernel.lease is not lease:
            try:
                kernel, line = self._begun(lease, options, status)
            except BaseException:
                self._detach_kernel()  # half of one would be taken for a whole one by the next cell
                raise
        if options.paths:
            kernel.call(add_import_paths, options.paths)
        return kernel, line

    def _begun(self, lease: Lease, options: CellOptions, status: StatusLine) -> tuple[KernelGuest, KernelLine]:
        self._detach_kernel()
        status.show(Starting(device=lease.devices[0].id, host=lease.devices[0].host), quiet=True)
        volume = self.owner.take(self.fabric())

        def prepare() -> None:
            self.surroundings.begin(sees_files=sees_our_folders(lease))
            self._replaced.begin()
            self._additions.begin()
            self.handles.save_in(volume)

        kernel = self._kernel = KernelGuest(
            lease,
            python=options.python,
            name="notebook",
            volume=None if volume is None else volume.lease,
            patient=self._ahead.is_slow,
            meanwhile=prepare,
        )
        line = self._line = KernelLine(kernel.channels)
        if self._front.is_terminal:
            kernel.call(be_plain)
        kernel.begin(look_around)  # nothing waits for the answer
        if volume is not None and volume.message:
            show_line(self.shell, volume.message)
            volume.message = ""
        behind, self._behind = self._behind, ""
        if volume is not None and behind not in ("", lease.id):
            wait_until_gone(self.fabric(), behind)
        try:
            self.handles.discard_uncollected()
        except SubletError:
            if volume is None or not volume.is_over:
                raise
            return self._begun(lease, options, status)  # what was in it went while the guest started: with another
        self.handles.attach_kernel(kernel, volume)
        if news := self.handles.first_sight():
            show_line(self.shell, news)
        return kernel, line

    def _detach_kernel(self) -> None:
        self._between.stop()
        kernel, self._kernel, self._line = self._kernel, None, None
        self._space.forget()
        self.handles.detach_kernel()
        if kernel is not None:
            self._behind = kernel.lease.id
            kernel.close()

    def _run_unless_taken(
        self, lease: Lease, source: str, python: str, options: CellOptions, status: StatusLine
    ) -> FinishedCell | None:
        """Run the cell. None if the lease ended before its first line, because it had been idle: while the cell was on
        its way here, the office gave the device to a request that waited."""
        self._is_begun = False
        try:
            return self._run(lease, source, python, options, status)
        except GpuSessionEnded:
            raise
        except LeaseEnded as error:
            is_begun = self._is_begun if self._call is None else self._call.may_have_begun()
            if is_begun or error.end is None or error.end.reason not in GAVE_WAY:
                raise
            self._detach_kernel()
            self._leave_ended()
            return None

    def _run(self, lease: Lease, source: str, python: str, options: CellOptions, status: StatusLine) -> FinishedCell:
        self._call = None
        number = number_of(self.shell)
        kernel, line = self._ready(lease, options, status)
        kernel.when_parked = lambda: self._wait_while_suspended(options, status)
        progress = self.traffic.progress
        kernel.when_waiting = progress.refresh
        progress.show = lambda what, is_first: status.show(moving(self.lease or lease, what), quiet=not is_first)
        try:
            self._print_restored(self.handles.resume())
            for one in self._replaced.news(self.shell.history_manager.input_hist_parsed, python):
                show_line(self.shell, str(one))
            for sentence in self._additions.news(python):
                show_line(self.shell, sentence)
            sending_s, reading = time.monotonic(), self.reading(python)
            sent, restored, placing = self.traffic.send(kernel, reading, options, number)
            self._print_restored(restored)
            self._show_problems()
            self._show_copies(sent.names)
            if self._interrupts.are_waiting:
                status.show_abandoned(CellEnded(message="interrupted before its first line", do="Rerun this cell."))
                if placing:
                    self.traffic.withdraw()
                else:
                    self.traffic.take(kernel, options, sent, number, reading.binds)  # as of any cell that has ended
                raise _Early
            began_s = time.monotonic()
            stood_s = self._stood_s
            self._is_begun = True
            call = self._execute(kernel, line, source, options, status, sent, placing)
            taking_s = time.monotonic()
            lease = self.lease or lease  # another one, if it was suspended
            self._ahead.wait()
            came = self.traffic.take(kernel, options, sent, number, reading.binds, call)
            busy_s = taking_s - began_s - (self._stood_s - stood_s)
            for name in self._replaced.unreported(python):
                show_line(
                    self.shell, f"{name} was set on the device; that does not hold in the notebook: set it there, too"
                )
            for sentence in self._additions.sentences_after(came.out.added):
                show_line(self.shell, sentence)
            self._show_problems()
        except _Early:
            raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            self._abandon_cell()
            raise
        except SubletError:
            if kernel.is_lost:
                raise self._why_lost(lease, kernel) from None
            raise
        now_s = time.monotonic()
        held_s, self._billed_s = now_s - self._billed_s, now_s
        bill = CellBill(
            held_s=held_s,
            busy_s=busy_s,
            vram_byte_s=held_s * sum(one.amount for one in lease.devices),
            bytes_in=sent.nbytes,
            bytes_out=came.out.nbytes,
            moved_s=began_s - sending_s + now_s - taking_s,
            bytes_saved=came.news.saved.written_bytes if came.news.saved is not None else 0,
            stood_s=self._stood_s,
        )
        if came.news.saved is not None:
            self.note_saved(came.news.saved.number, came.news.saved.wall_ns)
        if came.out.stays and self.owner.volume is None and self.owner.trouble:
            show_line(self.shell, f"what stays on the device is not saved: {self.owner.trouble}")
        failed = CheckpointFailed(came.news.failed, do=came.news.do) if came.news.failed else None
        sentence = came.text if failed is None else f"{came.text}; NOT SAVED: {failed.message}".lstrip("; ")
        if came.let_go:
            sentence = "; ".join(filter(None, (sentence, self.owner.tight())))
        return FinishedCell(came.reply, bill, sentence, failed, sent.names)

    def _abandon_cell(self) -> None:
        """Give up the kernel: a repeated interrupt came, so it is unknown now what the other side has."""
        lease, self.lease = self.lease, None
        try:
            self._detach_kernel()
        finally:
            if lease is not None:
                lease.release()

    def _print_restored(self, restored: Restored) -> None:
        """One line for what came back."""
        if restored.names:
            show_line(self.shell, str(restored))

    def _show_copies(self, sent: frozenset[str]) -> None:
        """Print one line about variables that running code of the notebook still changes: the cell has a copy."""
        if not sent and not self._copied:
            return
        used = in_use(self._space.names, can_change).changing
        changing = {name: why for name, why in used.items() if why in (THREAD, TASK)}
        self._copied &= changing.keys()
        if names := sorted((sent & changing.keys()) - self._copied):
            self._copied.update(names)
            why = changing[names[0]]
            show_line(
                self.shell, f"{', '.join(names)}: {why} of the notebook; the cell has a copy as of its first line"
            )

    def _show_problems(self) -> None:
        """Print one line for each setting that could not be carried."""
        problems = self.traffic.problems
        for what, why in problems.items():
            show_line(self.shell, f"{what} is not the same in the notebook and on the device ({why}); set it on both")
        problems.clear()
        if unsent := self.traffic.unsent:
            each = ", ".join(f"{name} ({why})" for name, why in sorted(unsent.items())[:UNSENT_MAX])
            more = len(unsent) - UNSENT_MAX
            listing = f"{each} and {more} more" if more > 0 else each
            show_line(self.shell, f"this cell can use any name, and these cannot be sent to the device: {listing}")
        unsent.clear()

    def _why_lost(self, lease: Lease, kernel: KernelGuest) -> SubletError:
        error = kernel.why_lost()
        if lease.end is None:
            handles = {name: one for name, one in self.handles.all().items() if one.was_of(kernel)}
            self._detach_kernel()
            error = process_lost(error, handles)
        return error

    def _execute(
        self,
        kernel: KernelGuest,
        line: KernelLine,
        source: str,
        options: CellOptions,
        status: StatusLine,
        sent: Outgoing,
        placing: Placing,
    ) -> CellCall:
        content: dict[str, Any] = {"code": source, "silent": False, "store_history": False, "stop_on_error": True}
        content["allow_stdin"] = self._front.takes_input
        late_s = time.monotonic() + QUICK_S

        def update_status() -> float:
            self._wait_while_suspended(options, status)
            if time.monotonic() < late_s:
                return QUICK_S
            self._show_running(status)
            return LOOK_S

        def show(channel: str, message: Message) -> None:
            self._call = None
            if message["header"]["msg_type"] == MESSAGE:
                self._ahead.wait()
                self.traffic.fetch(kernel, sent, message["content"]["name"], message["content"]["bound"])
                return
            if message["header"]["msg_type"] not in SILENT:
                self._show_running(status)  # above what the cell says
            self._front.show(channel, message)

        self._between.stop()
        try:
            request = line.request(content)
            call = self._call = self.traffic.begin(kernel, options, placing, request)
            self._ahead.begin(is_sent=True)
            with self._interrupts.patient():  # each stops the cell, and the lease stays
                request_id = request["header"]["msg_id"]
                line.finish(request_id, show, look=update_status, interrupts=self._interrupts, call=call)
            return call
        finally:
            self._between.watch(line)

    def _show_running(self, status: StatusLine) -> None:
        """Now and then in the middle of a cell."""
        if self.lease is not None and self.lease.end is None:
            status.show(running(self.lease), quiet=True)

    def _wait_while_suspended(self, options: CellOptions, status: StatusLine) -> None:
        """In the middle of a cell: if the device was taken and the guest lives on without one, wait for another."""
        lease, kernel, fabric = self.lease, self._kernel, self._fabric
        if lease is None or kernel is None or fabric is None or not is_parked(lease):
            return
        try:
            with self._interrupts.open():
                new = self._resume(lease, kernel, replace(options, wait_ns=None), status)
        except KeyboardInterrupt:
            self.lease = None
            self._detach_kernel()
            end_parked(fabric, lease)
            status.show(CellEnded(message="interrupted while its device was taken", do="Rerun this cell to reacquire."))
            raise
        self._activities.enter_context(new.activity())
        status.show(running(new), quiet=True)

    def _resume(self, lease: Lease, kernel: KernelGuest, options: CellOptions, status: StatusLine) -> Lease:
        assert self._fabric is not None
        began_s = time.monotonic()
        session = self._session
        labels = self.labels if session is None else {**self.labels, SESSION_LABEL: session.session.id}
        new = self.lease = without_expiry_notice(
            resume_parked(self._fabric, lease, kernel, options, status.show, labels)
        )
        if session is not None:
            session.moved(new)
        stood_s = time.monotonic() - began_s
        self._stood_s, self._billed_s = self._stood_s + stood_s, self._billed_s + stood_s
        self.bills.suspended.add(lease.id)
        return new

    def _answer(self, question: Message, text: str) -> None:
        if self._line is not None:
            self._line.answer_input(question, text)

    def _to_guest(self, message: Message) -> None:
        if self._line is not None:
            kind = message["header"]["msg_type"]
            self._line.send("shell", kind, message["content"], buffers=tuple(message.get("buffers") or ()))
            self._between.on_sent()


# -------------------------------------------------------------------------------------------------------------- explain
#
# ``%gpu explain``: what a cell would send, its size, what stays, and why, before anything runs.


def explain(space: Space, reading: Reading, *, has_guest: bool) -> str:
    """Lines for people. Nothing of it counts as sent. ``is_there``: a guest that has what was sent before."""
    found = Space(space.names, NOTEBOOK).outgoing(reading.reads, maybe=reading.maybe)
    agreed = space.unchanged([parcel.names for parcel in found.parcels]) if has_guest else set()
    lines = []
    total = 0
    for parcel in sorted(found.parcels, key=lambda one: -one.nbytes):
        names, size = ", ".join(parcel.names), format_size(parcel.nbytes)
        together = " (they share objects, or are small, and are sent together)" if len(parcel.names) > 1 else ""
        if parcel.names in agreed:
            lines.append(f"{names}: {size}, is there already; only changes are sent{together}")
        else:
            total += parcel.nbytes
            lines.append(f"{names}: {size}{together}")
    lines += [f"{name}: cannot be sent ({why})" for name, why in found.stays.items()]
    lines += [f"{name}: {_handle(handle)}" for name, handle in found.handles.items()]
    lines += [f"line {one.line}: {one.what} can reach any name, so all are sent" for one in reading.opaque]
    lines += [f"{name}() can reach any name of the namespace it runs in" for name in found.opaque]
    if found.looked_up and not reading.opaque:
        lines.append(f"found in strings: {', '.join(sorted(found.looked_up))}")
    if reading.binds:
        lines.append(f"may come back: {', '.join(sorted(reading.binds))}")
    if not found.parcels and not lines:
        return "nothing is sent"
    return "\n".join([f"{format_size(total)} would be sent" if total else "nothing is sent", *lines])


def _handle(handle: RemoteValue) -> str:
    about = handle.value_about
    what = ", ".join(one for one in (about.what, format_size(about.nbytes) if about.nbytes else "") if one)
    if handle.is_live:
        return f"{what}; is on the device and stays there ({about.why})"
    if handle.is_saved:
        return f"{what}; is restored from what was saved"
    return f"{what}; was lost with its lease, so the cell would not run"
