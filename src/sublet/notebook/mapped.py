"""``%%gpu --map params --out a,b``: runs a cell once per dict of a list, on as many leases as are free.

The cell becomes the work of a burst (`sublet.jobs`): one item, one chunk. What the cell reads, with what functions in
that read in turn, is encoded once and sent once to each worker; there each item gets a namespace of its own, made of
that and of the item's own names. So no item sees what another one did, and none writes to the notebook.

An item is known by the cell's code, the content of what it reads and the item itself, and not by its position: a list
that was put in another order, or got more items, finds what is finished. Results lie in a volume that has the
notebook's name, and outlive the kernel; of a notebook without a name they lie in the kernel.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import inspect
import keyword
import linecache
import os
import pickle
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sublet.durable import rebuild
from sublet.errors import CapacityExceeded, InvalidRequest, JobFailed, NotFound, SubletError, Unpicklable
from sublet.notebook.cell_io import number_of
from sublet.notebook.cell_terms import add_import_paths, as_numbered, check_names, nearest_name, with_what_is_free
from sublet.notebook.home import HomeRules
from sublet.notebook.interrupts import interrupts_wait
from sublet.notebook.namespace import HIDDEN
from sublet.notebook.options import VRAM_DEFAULT
from sublet.notebook.output import StatusLine, show_line
from sublet.notebook.ownership import FOLDER_VARIABLE, SIZES
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.sources import compiler_flags
from sublet.notebook.status import CellBill, CellEnded, Mapped
from sublet.state.transfer.codec import Encoding, can_travel
from sublet.state.transfer.loading import decode
from sublet.values import NS_PER_S, shown

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.jobs import ChunkFailed, ChunkId, JobEvent, JobOutputStore
    from sublet.notebook.cells import Cells
    from sublet.notebook.options import CellOptions
    from sublet.notebook.reading import Reading
    from sublet.wire.http import BillLine

FILE: Final = "<cell>"
SHOW_EVERY_NS: Final = NS_PER_S // 4
WAIT_S: Final = 10.0
"""For the volume, which is being put away if the last run ended just now."""
FAILURES_SHOWN: Final = 5
VOLUME: Final = "burst-"
"""As the command calls the volume of a burst, so ``sublet burst ls`` lists it."""
NOT_MAPPED: Final = {
    "gpus": "--gpus",
    "smaller_ok": "--smaller-ok",
    "model": "--model",
    "or_model": "--or-model",
    "shared": "--shared",
    "wait_ns": "--wait",
}
"""What a mapped cell cannot be given."""


# ------------------------------------------------------------------------------------------------------ in a worker


class MappedCell:
    """The cell, as workers execute it: bytes of an item in, bytes of its results out."""

    def __init__(
        self,
        source: str,
        flags: int,
        head: bytes,
        buffers: Sequence[Any],
        gives: tuple[str, ...],
        paths: tuple[str, ...],
    ) -> None:
        self._source = source
        self._flags = flags
        self._head = head
        self._buffers = buffers
        self._gives = gives
        self._paths = paths

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        buffers = [pickle.PickleBuffer(one) for one in self._buffers]
        return MappedCell, (self._source, self._flags, self._head, buffers, self._gives, self._paths)

    def __call__(self, data: bytes) -> bytes:
        add_import_paths(self._paths)
        linecache.cache[FILE] = (len(self._source), None, self._source.splitlines(keepends=True), FILE)
        flags = self._flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(self._source, FILE, "exec", flags, dont_inherit=True)
        main = types.ModuleType("__main__")
        names = vars(main)
        names["__builtins__"] = builtins
        before = sys.modules["__main__"]
        sys.modules["__main__"] = main  # it is where the notebook's functions find their globals
        try:
            # read-only memory is copied where it can be written to, so an item changes nothing of the next one's
            names |= decode(self._head, [memoryview(one).toreadonly() for one in self._buffers])
            names |= _unpacked(data)
            found = eval(code, names)  # noqa: S307 - the cell
            if inspect.iscoroutine(found):
                asyncio.run(_awaited(found))
            missing = [name for name in self._gives if name not in names]
            if missing:
                raise NameError(f"the cell ended without a value for {missing[0]}, which --out names")
            return _packed({name: names[name] for name in self._gives})
        finally:
            sys.modules["__main__"] = before


async def _awaited(coroutine: Any) -> None:
    await coroutine


def _encoded(values: dict[str, Any], rules: HomeRules) -> tuple[bytes, tuple[memoryview, ...]]:
    encoding = Encoding(rules)
    encoding.dump(values, roots=True)
    found = encoding.finished(values)
    return found.head, found.views


def _packed(values: dict[str, Any]) -> bytes:
    """Tensors of a GPU go as tensors of the host."""
    head, views = _encoded(values, HomeRules(gpu="copy"))
    return pickle.dumps((head, [bytes(view) for view in views]), 5)


def _unpacked(data: bytes) -> dict[str, Any]:
    head, buffers = pickle.loads(data)  # noqa: S301 - written by this notebook, or by its own cell
    with rebuild.on_host():
        found: dict[str, Any] = decode(head, [memoryview(one) for one in buffers])
    return found


# ------------------------------------------------------------------------------------------------- in the notebook


class _Item:
    """One item as a chunk."""

    def __init__(self, key: ChunkId, data: bytes) -> None:
        self._key = key
        self._data = data

    def chunk_id(self) -> ChunkId:
        return self._key

    def to_bytes(self) -> bytes:
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes) -> _Item:
        raise NotImplementedError  # the worker is given the bytes


def map_cell(cells: Cells, source: str, options: CellOptions, given: CellOptions) -> None:
    """Run it, and bind the results. ``given``: the options of its own line, without any defaults. Raises ``JobFailed``
    where items failed; the results of the others are bound all the same."""
    from sublet import jobs

    for field, flag in NOT_MAPPED.items():
        if getattr(given, field) != getattr(type(options)(), field):
            raise InvalidRequest(
                f"{flag} is not for --map: each item gets a whole GPU of its own, on as many leases as there are",
                do=f"Leave {flag} out.",
            )
    python = cells.python(source)
    reading = cells.reading(python)
    if "get_ipython()" in python:
        raise InvalidRequest("a cell with --map is plain Python, without magics and !commands", do="Leave them out.")
    names = cells.space.names
    check_names(options, names)
    items = items_of(names, options.over)
    gives = _outputs(options, reading, items, names)
    wanted = set(options.takes) if options.takes is not None else set(reading.reads)
    wanted -= set(items[0]).intersection(*items[1:])
    optional = reading.maybe if options.takes is None else frozenset()
    found, head, views = _all_that_is_read(names, wanted, optional)
    text, flags = as_numbered(python), compiler_flags()
    cell = MappedCell(text, flags, head, views, gives, options.paths)
    code = compile(python, FILE, "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    same = _digest(code, gives, {name: _content(name, names[name]) for name in sorted(found)})
    chunks = _chunks(items, same, options.over)
    name = cells.owner.name or f"notebook-{os.getpid()}"
    status = StatusLine(cells.shell)
    fabric = cells.fabric()
    before = _billed(fabric, name)
    with interrupts_wait() as interrupts, _showing_end(status), _store(cells, fabric, name) as store:
        progress = _Progress(status, len(chunks))
        terms: dict[str, Any] = {} if options.ttl_ns is None else {"ttl": options.ttl_ns / NS_PER_S}
        coordinator = jobs.JobCoordinator(
            name=name,
            gpu=VRAM_DEFAULT if options.vram_bytes is None else options.vram_bytes,
            tier="batch" if options.tier is None else options.tier.value,
            pay_priority=options.pay_priority,
            errors="collect",
            fabric=fabric,
            on_event=progress.on_event,
            options={"python": options.python} if options.python else {},
            **terms,
        )
        # a second interrupt waits until the leases are given back: this kernel would go on renewing them
        try:
            with with_what_is_free(fabric), interrupts.patient(), interrupts.open():
                result = coordinator.run(chunks, store, cell, lambda _: None)
        except BaseException:  # what it used until then is on the bill all the same
            with contextlib.suppress(SubletError):
                bill = _row(before, _billed(fabric, name), options)
                if bill.held_s:
                    cells.bills.add_burst(number_of(cells.shell), name, bill)
            raise
        failures = {failure.index: failure for failure in result.failures}
        values = [
            failures[n] if n in failures else _unpacked(store.get(one.chunk_id())) for n, one in enumerate(chunks)
        ]
    for one in gives:
        names[one] = [value[one] if isinstance(value, dict) else value for value in values]
    bill = _row(before, result.bill, options)
    cells.bills.add_burst(number_of(cells.shell), name, bill)
    status.show(
        Mapped(
            done=len(chunks),
            total=len(chunks),
            failed=len(failures),
            skipped=result.chunks_skipped,
            leases=result.leases_most,
            took_s=result.duration_s,
            bill=bill,
        )
    )
    if failures:
        raise _failed(failures, len(chunks), gives)


@contextlib.contextmanager
def _showing_end(status: StatusLine) -> Iterator[None]:
    """The line says how a run ended that has no results."""
    try:
        yield
    except KeyboardInterrupt:
        status.show(CellEnded(message="interrupted: finished items are kept", do="Run the cell again for the others."))
        raise
    except SubletError as error:
        status.show_abandoned(CellEnded(message=error.message, do=error.do))
        raise


def items_of(names: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The dicts of a list, or the rows of a frame. Everything else is refused, with what is wrong."""
    if name not in names:
        raise InvalidRequest(
            f"there is no variable {name}{nearest_name(name, names)}", do="--map takes the name of a list of dicts."
        )
    value = names[name]
    if type(value) is RemoteValue:
        raise _on_device(name)
    library = type(value).__module__.partition(".")[0]
    if library == "pandas" and hasattr(value, "columns"):
        value = value.to_dict("records")
    elif library == "polars" and hasattr(value, "to_dicts"):
        value = value.to_dicts()
    if not isinstance(value, list | tuple):
        raise InvalidRequest(
            f"{name} is {shown(value)}, which --map cannot take",
            do="Give a list of dicts, such as [{'lr': 0.1}, {'lr': 0.2}], or a frame with a row for each.",
        )
    if not value:
        raise InvalidRequest(f"{name} is empty: there is nothing to run the cell for", do="Put dicts into it.")
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRequest(
                f"{name}[{place}] is {shown(item)}, and no dict", do="Each item says the cell's variables by name."
            )
        for key in item:
            if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key):
                raise InvalidRequest(
                    f"{name}[{place}] has the key {shown(key)}, which is no name of a variable",
                    do="Rename it: the cell reads each item's values under these names.",
                )
    return [dict(item) for item in value]


def _outputs(
    options: CellOptions, reading: Reading, items: Sequence[dict[str, Any]], names: Mapping[str, Any]
) -> tuple[str, ...]:
    if options.gives is None:
        raise InvalidRequest("--map needs --out", do="Name what is to come back: --out loss,model.")
    can_be = {*reading.binds, *reading.reads, *(options.takes or ()), *(key for item in items for key in item)}
    for name in options.gives:
        if name not in can_be and not reading.opaque:
            raise InvalidRequest(
                f"the cell gives no value to {name}{nearest_name(name, can_be)}", do="--out names what the cell binds."
            )
        if name == options.over:
            raise InvalidRequest(f"--out {name} would replace the list of --map", do="Give the result another name.")
    return options.gives


def _all_that_is_read(
    names: Mapping[str, Any], wanted: set[str], optional: frozenset[str]
) -> tuple[set[str], bytes, tuple[memoryview, ...]]:
    """These names and what functions among them read in turn, and all of it encoded. Raises ``Unpicklable`` for one
    that cannot be sent; of ``optional`` names those go along that can."""
    found = wanted | {name for name in optional if can_travel({name: names[name]}, HomeRules())}
    while True:
        for name in found:
            if type(names[name]) is RemoteValue:
                raise _on_device(name)
        rules = HomeRules()
        head, views = _encoded({name: names[name] for name in sorted(found)}, rules)
        more = {name for name in rules.needs - HIDDEN if name in names} - found
        if not more:
            return found, head, views
        found |= more


def _on_device(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is on the device of this notebook's own lease, and the items run on others",
        do=f"Bring it to the notebook first: %gpu fetch {name}.",
    )


def _digest(*content: Any) -> ChunkId:
    """Of content, the same in every process."""
    from sublet import jobs

    return jobs.Chunk(MappedCell, content).chunk_id()


def _content(name: str, value: Any) -> ChunkId:
    """A digest of a variable; of one whose content cannot be told apart from its form, of the bytes that are sent."""
    try:
        return _digest(value)
    except SubletError:
        head, views = _encoded({name: value}, HomeRules())
        return _digest(head, [bytes(view) for view in views])


def _chunks(items: Sequence[dict[str, Any]], same: bytes, over: str) -> list[_Item]:
    """Equal items are different chunks: the first, the second of them."""
    chunks, seen = [], Counter[bytes]()
    for place, item in enumerate(items):
        try:
            data = _packed(item)
        except Unpicklable as error:
            error.message = f"{over}[{place}]: {error.message}"
            raise
        content = _digest({key: _content(key, one) for key, one in item.items()})
        seen[content] += 1
        chunks.append(_Item(_digest(same, content, seen[content]), data))
    return chunks


@contextlib.contextmanager
def _store(cells: Cells, fabric: Fabric, name: str) -> Iterator[JobOutputStore]:
    """Where the results lie: a volume with the notebook's name, a folder where that is said, else this kernel."""
    from sublet import jobs

    folder = os.environ.get(FOLDER_VARIABLE, "")
    if folder and cells.owner.name:
        kept = jobs.VolumeOutputStore(os.path.join(folder, f"{VOLUME}{name}"))
        try:
            yield kept
        finally:
            kept.close()
        return
    with contextlib.ExitStack() as stack:
        if cells.owner.name:
            try:
                block = stack.enter_context(_volume(cells, fabric, f"{VOLUME}{name}"[:63].rstrip("-.")))
            except CapacityExceeded as error:
                show_line(cells.shell, f"finished items are kept in this kernel alone: {error.message}")
            else:
                store = jobs.VolumeOutputStore(block)
                stack.callback(store.close)
                yield store
                return
        if cells.finished is None:
            cells.finished = jobs.MemoryOutputStore()
        yield cells.finished


def _volume(cells: Cells, fabric: Fabric, name: str) -> Any:
    terms: dict[str, Any] = {"name": name, "renew": "always", "wait": WAIT_S, "labels": cells.labels}
    with contextlib.suppress(NotFound):
        return fabric.block(**terms)
    sizes = (cells.owner.size,) if cells.owner.size else SIZES
    for size in sizes[:-1]:
        with contextlib.suppress(CapacityExceeded):
            return fabric.block(size, **terms)
    return fabric.block(sizes[-1], **terms)


class _Progress:
    """One line that changes in place, folded from the job's events."""

    def __init__(self, status: StatusLine, total: int) -> None:
        self._status = status
        self._total = total
        self._counts: Counter[str] = Counter()
        self._waits = False
        self._shown_ns = 0

    def on_event(self, event: JobEvent) -> None:
        """On a thread of the job."""
        if event.what == "leases":
            self._counts["leases"] = event.count
            self._waits = bool(event.detail)  # one was taken, and is asked for again; else there is one or no need
        elif event.what == "capacity":
            self._waits = True
        else:
            self._counts[event.what] += event.count
        if event.at_ns - self._shown_ns < SHOW_EVERY_NS:
            return
        self._shown_ns = event.at_ns
        counts = self._counts
        self._status.show(
            Mapped(
                done=counts["done"] + counts["skipped"] + counts["failed"],
                total=self._total,
                failed=counts["failed"],
                skipped=counts["skipped"],
                leases=counts["leases"],
                waits=self._waits,
            ),
            quiet=True,
        )


def _billed(fabric: Fabric, name: str) -> BillLine | None:
    """What bursts of this name have cost so far."""
    return next((line for line in fabric.bill(by="label:job", own=True) if line.key == name), None)


def _row(before: BillLine | None, now: BillLine | None, options: CellOptions) -> CellBill:
    """Of this run alone: the office's bill by its name has all runs."""
    if now is None:
        return CellBill()

    def grown(field: str) -> float:
        return float(getattr(now, field)) - (0.0 if before is None else float(getattr(before, field)))

    held_s = grown("held_seconds")
    vram = VRAM_DEFAULT if options.vram_bytes is None else options.vram_bytes
    return CellBill(
        held_s=held_s,
        busy_s=grown("busy_seconds"),
        vram_byte_s=held_s * vram,
        cost=grown("cost"),
        currency=now.currency,
    )


def _failed(failures: Mapping[int, ChunkFailed], total: int, gives: Sequence[str]) -> JobFailed:
    """What is raised when the others are bound."""
    by_reason: dict[str, list[int]] = {}
    for n, failure in sorted(failures.items()):
        by_reason.setdefault(_why(failure), []).append(n)
    sentences = [f"{_numbers(items)}: {why}" for why, items in by_reason.items()]
    more = [f"and {len(sentences) - FAILURES_SHOWN} other errors"] if len(sentences) > FAILURES_SHOWN else []
    return JobFailed(
        f"{len(failures)} of {total} items failed: {'; '.join([*sentences[:FAILURES_SHOWN], *more])}",
        failures=[failures[n] for n in sorted(failures)],
        do=f"In {', '.join(gives)} the errors stand in their places. Run the cell again when what failed is mended: "
        f"finished items are not run again.\n{_trace(failures[min(failures)])}".rstrip(),
    )


def _numbers(items: Sequence[int]) -> str:
    shown = ", ".join(map(str, items[:FAILURES_SHOWN]))
    more = len(items) - FAILURES_SHOWN
    return f"item{'s' * (len(items) > 1)} {shown}{f' and {more} more' if more > 0 else ''}"


def _why(failure: ChunkFailed) -> str:
    error = failure.error
    if failure.reason.value != "raised" or error is None:
        return failure.detail
    return error.message if isinstance(error, SubletError) else f"{type(error).__name__}: {error}"


def _trace(failure: ChunkFailed) -> str:
    """Of the worker, from the cell's own line on."""
    notes = getattr(failure.error, "__notes__", None) or [""]
    _, at, frames = notes[-1].partition(f'  File "{FILE}"')
    return f"Traceback of item {failure.index}:\n{at}{frames}" if at else ""
