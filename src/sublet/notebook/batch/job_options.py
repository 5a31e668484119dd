"""What a job requests: from the command line, and from comments in the notebook's first code cell.

    #SUBLET --vram 8GiB --tier spot
    #SUBLET --lease whole

So a notebook carries its own options, as a batch script does, and is the same notebook in a browser. Lines that begin
with ``#SBATCH`` are understood as far as they mean something here, and what they say that does not is told. What the
command line says goes before the cell.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.notebook.options import VRAM_DEFAULT, CellOptions, parse_line
from sublet.values import NS_PER_S, Tier, format_duration, format_size, parse_duration_ns, parse_size

LEASES: Final = ("cells", "whole")
GPUS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLeaseOptions:
    """What the leases of a job shall be. None: as if nothing had been said."""

    vram_bytes: int | None = None
    gpus: int | None = None
    ttl_ns: int | None = None
    tier: Tier | None = None
    pay_priority: bool | None = None
    wait_ns: int | None = None
    """0: not at all; None: as long as it takes."""
    smaller_ok: bool | None = None
    lease: str | None = None
    """``cells``: each ``%%gpu`` cell its own, as where people sit; ``whole``: one for all, in which every cell runs."""
    name: str | None = None

    def over(self, other: JobLeaseOptions) -> JobLeaseOptions:
        """These, and where they say nothing the other's."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(other, **given)

    def as_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> JobLeaseOptions:
        tier = found.get("tier")
        return cls(**{**found, "tier": None if tier is None else Tier(tier)})


def gpu_line(source: str) -> str | None:
    """What stands behind ``%%gpu`` where a cell begins with it; None where it does not."""
    first = next((line for line in source.split("\n") if line.strip()), "")
    magic, _, rest = first.strip().partition(" ")
    return rest if magic == "%%gpu" else None


def for_one_lease(options: JobLeaseOptions, cells: Sequence[str], configured: CellOptions) -> JobLeaseOptions:
    """What one lease for all of these cells asks for: what the job says, else the most that one of them does.
    ``configured``: what the user has set for all cells. Raises ``InvalidRequest`` for a cell that would not get what it
    asks for."""
    vram_bytes, gpus = options.vram_bytes or configured.vram_bytes or VRAM_DEFAULT, options.gpus or 1
    for number, source in enumerate(cells, 1):
        line = gpu_line(source)
        if not line or "{" in line or "$" in line:  # what IPython puts in there is not known yet
            continue
        try:
            cell = parse_line(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"cell {number}: {error.message}", do=error.do) from None
        own = {"--map": cell.over, "--model": cell.model, "--python": cell.python, "--with": cell.paths}
        flag = next((flag for flag, is_given in own.items() if is_given), None)
        if flag is not None:
            raise InvalidRequest(
                f"cell {number} has {flag}, which only a cell with a lease of its own can have",
                do="Give each cell a lease of its own (--lease cells), or leave it out.",
            )
        wants_bytes = cell.vram_bytes or 0
        if options.vram_bytes is None:
            vram_bytes = max(vram_bytes, wants_bytes)
        elif wants_bytes > vram_bytes:
            raise _too_much(number, f"VRAM {format_size(wants_bytes)}", f"--vram {format_size(vram_bytes)}")
        if options.gpus is None:
            gpus = max(gpus, cell.gpus)
        elif cell.gpus > gpus:
            raise _too_much(number, f"{cell.gpus} devices", f"--gpus {gpus}")
    of_all = JobLeaseOptions(
        ttl_ns=configured.ttl_ns,
        tier=configured.tier,
        wait_ns=configured.wait_ns,
        smaller_ok=configured.smaller_ok or None,
    )
    return replace(options.over(of_all), vram_bytes=vram_bytes, gpus=gpus)


def _too_much(number: int, wanted: str, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"cell {number} asks for {wanted}, more than the one lease of all cells has ({given})",
        do="Ask for as much for the notebook, or give each cell a lease of its own (--lease cells).",
    )


def cell_options(options: JobLeaseOptions) -> str:
    """The same as they stand behind ``%%gpu``: what a cell has that says nothing itself."""
    words = []
    if options.vram_bytes is not None:
        words += ["--vram", f"{options.vram_bytes}B"]
    if options.gpus is not None:
        words += ["--gpus", str(options.gpus)]
    if options.ttl_ns is not None:
        words += ["--ttl", _exact(options.ttl_ns)]
    if options.tier is not None:
        words += ["--tier", options.tier.value]
    if options.pay_priority:
        words.append("--pay-priority")
    if options.wait_ns is not None:
        words += ["--wait", _exact(options.wait_ns)] if options.wait_ns else ["--no-wait"]
    if options.smaller_ok:
        words.append("--smaller-ok")
    return " ".join(words)


def _exact(duration_ns: int) -> str:
    """For people a duration is rounded; this one is read again."""
    return f"{max(1, duration_ns * 1000 // NS_PER_S)}ms"


# ---------------------------------------------------------------------------------------------------------- options


def _gpus(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= GPUS_MAX:
        raise InvalidRequest(f"{text!r} is not a number of devices", do=f"Give 1 to {GPUS_MAX}.")
    return int(text)


def _one_of(text: str, what: str, known: Sequence[str]) -> str:
    if text not in known:
        raise InvalidRequest(f"{text!r} is not a {what}{nearest(text, known)}", do=f"Use {' or '.join(known)}.")
    return text


def _tier(text: str) -> Tier:
    return Tier(_one_of(text, "tier", [tier.value for tier in Tier]))


_VALUES: Final[dict[str, tuple[str, Any]]] = {
    "--vram": ("vram_bytes", lambda text: parse_size(text, "--vram", counted_by="--gpus")),
    "--gpu": ("vram_bytes", lambda text: parse_size(text, "--gpu", counted_by="--gpus")),
    "--gpus": ("gpus", _gpus),
    "--ttl": ("ttl_ns", lambda text: parse_duration_ns(text, "--ttl")),
    "--tier": ("tier", _tier),
    "--wait": ("wait_ns", lambda text: parse_duration_ns(text, "--wait")),
    "--lease": ("lease", lambda text: _one_of(text, "way to lease", LEASES)),
    "--name": ("name", str),
}
_SWITCHES: Final[dict[str, tuple[str, Any]]] = {
    "--spot": ("tier", Tier.SPOT),
    "--pay-priority": ("pay_priority", True),
    "--no-wait": ("wait_ns", 0),
    "--smaller-ok": ("smaller_ok", True),
}


def read_options(words: Sequence[str]) -> JobLeaseOptions:
    """Options as they stand in a cell. Raises ``InvalidRequest`` with the nearest good one."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag in _SWITCHES and not equals:
            name, what = _SWITCHES[flag]
        elif flag in _VALUES:
            name, read = _VALUES[flag]
            if not equals:
                if not rest or rest[0].startswith("--"):
                    raise InvalidRequest(f"{flag} needs a value", do=f"Write {flag} and what it shall be.")
                value = rest.pop(0)
            what = read(value)
        else:
            known = [*_VALUES, *_SWITCHES]
            raise InvalidRequest(
                f"a notebook has no option {flag}{nearest(flag, known)}", do=f"It has {', '.join(known)}."
            )
        if found.setdefault(name, what) != what:
            raise InvalidRequest(f"{flag} contradicts what was said before it", do="Say it once.")
    return JobLeaseOptions(**found)


def nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ------------------------------------------------------------------------------------------------------ in the cell

_OURS: Final = re.compile(r"^\s*#\s*SUBLET\b[:\s]*(.*)$")
_SLURMS: Final = re.compile(r"^#SBATCH\s+(.*)$")


def from_cell(source: str) -> tuple[JobLeaseOptions, tuple[str, ...]]:
    """What the comments of a cell ask for, and what of them means nothing here, in sentences."""
    options, notes = JobLeaseOptions(), list[str]()
    for line in source.splitlines():
        if (ours := _OURS.match(line)) is not None:
            options = read_options(_split_words(line, ours[1])).over(options)
        elif (slurms := _SLURMS.match(line)) is not None:
            found, unused = _of_slurm(_split_words(line, slurms[1]))
            options = found.over(options)
            notes += [f"#SBATCH {one} means nothing here" for one in unused]
    return options, tuple(notes)


def _split_words(line: str, text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InvalidRequest(f"{line.strip()}: {error}", do="Close the quotation marks.") from None


_SHORT: Final = {"-J": "--job-name", "-G": "--gpus", "-t": "--time", "-p": "--partition", "-c": "--cpus-per-task"}


def _of_slurm(words: Sequence[str]) -> tuple[JobLeaseOptions, list[str]]:
    """Of what people write for sbatch: how many GPUs, and the name. The rest is for a cluster."""
    found, unused = JobLeaseOptions(), list[str]()
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = _SHORT.get(flag, flag)
        if not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        match flag:
            case "--gres" if value.partition(":")[0] == "gpu":
                last = value.rpartition(":")[2]
                found = replace(found, gpus=_gpus(last) if last.isdecimal() else 1)
            case "--gpus" | "--gpus-per-node":
                found = replace(found, gpus=_gpus(value.rpartition(":")[2]))
            case "--job-name":
                found = replace(found, name=value)
            case _:
                unused.append(f"{flag}={value}" if value else flag)
    return found, unused


def in_words(options: JobLeaseOptions) -> str:
    """For people."""
    parts = [
        None if options.vram_bytes is None else f"VRAM {format_size(options.vram_bytes)}",
        None if options.gpus in (None, 1) else f"{options.gpus} devices",
        None if options.tier is None else f"tier {options.tier}",
        "pays for priority" if options.pay_priority else None,
        None if options.ttl_ns is None else f"{format_duration(options.ttl_ns)} at a time",
        None if not options.wait_ns else f"waits {options.wait_ns / NS_PER_S:.0f} s at most",
        "one lease for all cells" if options.lease == "whole" else None,
    ]
    return ", ".join(one for one in parts if one)
