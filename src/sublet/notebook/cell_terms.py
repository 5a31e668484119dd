"""A cell's requirements, and whether the present lease satisfies them."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sublet.errors import CapacityExceeded, CheckpointFailed, InvalidRequest, SubletError
from sublet.lease.states import SliceState
from sublet.notebook.options import CellOptions
from sublet.notebook.settings import own_paths
from sublet.notebook.status import CellBill, Moving, Running, coarse
from sublet.values import NS_PER_S, Exclusivity, Kind, Tier, format_size

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.studio import Terms

DEVICES_MAX: Final = 4
"""In one sentence."""


class FinishedCell(NamedTuple):
    """A finished cell."""

    reply: Mapping[str, Any]
    """The content of the kernel's reply."""
    bill: CellBill
    text: str
    """What to report of its variables, if anything."""
    failed: CheckpointFailed | None
    """What stays on the device could not be saved."""
    sent: frozenset[str]
    """Names that the cell could see."""


def as_numbered(source: str) -> str:
    """With the line of ``%%gpu`` as a comment: tracebacks count as the notebook does. A magic must stay first."""
    return source if source.lstrip().startswith("%%") else f"# %%gpu\n{source}"


def check_names(options: CellOptions, names: Mapping[str, object]) -> None:
    """Check the names that ``--in`` lists, before anything is requested."""
    missing = [name for name in options.takes or () if name not in names]
    if missing:
        raise InvalidRequest(
            f"there is no variable {missing[0]}{nearest_name(missing[0], names)}",
            do="--in takes names of notebook variables.",
        )


def nearest_name(name: str, names: Iterable[str]) -> str:
    """What was probably meant, as the end of a sentence."""
    close = difflib.get_close_matches(name, [one for one in names if not one.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def without_expiry_notice(lease: Lease) -> Lease:
    """A lease that runs out between cells without a word: it is meant to, and a word would stand below some cell."""
    lease._held.quiet = True
    return lease


def fits(lease: Lease, had: CellOptions, wants: CellOptions) -> bool:
    """Whether a lease that is there will do."""
    if len(lease.devices) != wants.gpus or had.python != wants.python or had.shared != wants.shared:
        return False
    if wants.model is not None and had.model != wants.model:
        return False
    return wants.vram_bytes is None or all(device.amount >= wants.vram_bytes for device in lease.devices)


def with_terms_of(options: CellOptions, terms: Terms) -> CellOptions:
    """What a cell does not say is as the session has it."""
    return replace(
        options,
        vram_bytes=terms.vram if options.vram_bytes is None else options.vram_bytes,
        gpus=terms.count if options.gpus == 1 else options.gpus,
        ttl_ns=round(terms.ttl_s * NS_PER_S) if options.ttl_ns is None and terms.ttl_s else options.ttl_ns,
        tier=Tier(terms.tier) if options.tier is None else options.tier,
        pay_priority=options.pay_priority or terms.pay_priority,
        shared=options.shared or terms.exclusivity == Exclusivity.SHARED,
    )


@contextlib.contextmanager
def with_what_is_free(fabric: Fabric, own: Lease | None = None) -> Iterator[None]:
    """A refusal says what there is, and how much of it is free; what the notebook's ``own`` lease has is free to it."""
    try:
        yield
    except CapacityExceeded as error:
        with contextlib.suppress(SubletError):
            devices = fabric.status().devices
            found = [one for one in devices if one.kind == Kind.GPU and one.state != SliceState.LOST]
            had = {} if own is None else {device.id: device.amount for device in own.devices}
            each = [
                f"{one.id} {format_size(one.free + had.get(one.id, 0))} of {format_size(one.capacity)}"
                + (" (with what this notebook has)" if one.id in had else "")
                for one in found[:DEVICES_MAX]
            ]
            more = f" and {len(found) - DEVICES_MAX} more" if len(found) > DEVICES_MAX else ""
            error.do = f"{error.do} Free now: {', '.join(each) or 'no GPU at all'}{more}.".lstrip()
        raise


def running(lease: Lease) -> Running:
    """How it stands while a cell runs."""
    device = lease.devices[0]
    notice = lease.notice
    why = "" if notice is None else notice.detail or notice.reason
    left_s = lease.remaining if notice is not None else coarse(lease.remaining)
    return Running(device=device.id, host=device.host, vram_bytes=device.amount, left_s=left_s, notice=why)


def moving(lease: Lease, what: str) -> Moving:
    """How it stands while variables are sent or received."""
    device = lease.devices[0]
    return Moving(device=device.id, host=device.host, what=what)


def add_import_paths(paths: tuple[str, ...]) -> None:
    """In the guest: import from there as well."""
    import os

    if missing := [path for path in paths if not os.path.exists(path)]:
        raise InvalidRequest(
            f"--with {missing[0]}: there is no such file or folder where the cell runs",
            do="--with takes a folder or a file that the cell imports from.",
        )
    for path in reversed(paths):
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder not in sys.path:
            own_paths.add(folder)
            sys.path.insert(0, folder)
