"""The commands of ``%gpu``."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sublet.errors import CheckpointFailed, InvalidRequest, NotFound, SubletError
from sublet.notebook import options
from sublet.notebook.cell_io import fates_text, number_of
from sublet.notebook.remote_value import RemoteValue, clock_time
from sublet.values import NS_PER_S, format_duration, format_size
from sublet.wire.page import PageReader

if TYPE_CHECKING:
    from sublet.notebook.cells import Cells
    from sublet.notebook.checkpoint import NotebookCheckpoint
    from sublet.notebook.ownership import KernelVolume


class Command(NamedTuple):
    """One command of ``%gpu``."""

    word: str
    takes: str
    """Its argument's name in the help; empty if it takes none."""
    does: Callable[[Cells, Any, str], str]
    says: str


def run_command(cells: Cells, shell: Any, line: str) -> str:
    """Run the command; returns the text to show."""
    word, _, rest = line.strip().partition(" ")
    if word in ("-h", "--help", "?", "help"):
        return f"{help_text()}\n%%gpu above a cell runs it on a leased device:\n{options.help_text()}"
    command = _BY_WORD.get(word)
    if command is None:
        close = difflib.get_close_matches(word, [one.word for one in COMMANDS if one.word], n=1)
        meant = f"; did you mean %gpu {close[0]}?" if close else ""
        raise InvalidRequest(f"%gpu has no command {word!r}{meant}", do=f"The commands:\n{help_text()}")
    rest = rest.strip()
    if rest and not command.takes:
        raise InvalidRequest(f"%gpu {word} takes no argument, and {rest!r} was given", do=f"Write %gpu {word}.")
    return command.does(cells, shell, rest)


def completions(cells: Cells, line: str) -> list[str]:
    """Completions for TAB: commands, or names of variables on the device."""
    words = line.split()
    if line.endswith(" "):
        words.append("")
    if len(words) == 3 and words[1] == "fetch":
        return sorted(name for name in cells.handles.all() if name.startswith(words[2]))
    if len(words) == 2:
        return [one.word for one in COMMANDS if one.word.startswith(words[1]) and one.word]
    return []


def help_text() -> str:
    """The list of commands."""
    left = [f"%gpu {one.word} {one.takes}".rstrip() for one in COMMANDS]
    width = max(map(len, left))
    return "\n".join(f"  {words:<{width}}  {one.says}" for words, one in zip(left, COMMANDS, strict=True))


# ---- what each does


def _status(cells: Cells, _shell: Any, _rest: str) -> str:
    lease = cells.lease
    if lease is not None and lease.end is not None and lease.end.parked:
        lines = [
            f"no lease is held ({lease.end.reason}); what is on the device is parked, and the next cell resumes it"
        ]
    elif lease is None or lease.end is not None:
        lines = [_under() or "no lease is held"]
    else:
        device = lease.devices[0]
        host = " (host device, no GPU)" if device.host else ""
        left = format_duration(round(lease.remaining) * NS_PER_S)
        state = "busy" if lease.busy else "idle, the first to yield"
        notice = lease.notice
        lines = [f"{device.id}{host}, {format_size(device.amount)}, {left} left, {state}"]
        if notice is not None:
            lines.append(f"it will be taken: {notice.reason}{f' ({notice.detail})' if notice.detail else ''}")
    handles = cells.handles.all()
    lines += [f"{name}: {one.value_state()}" for name, one in sorted(handles.items())]
    volume = cells.owner.volume
    if volume is not None and any(not one.why_lost for one in handles.values()):
        lines.append(f"what stays on the device is saved {_where(volume)}")
    elif cells.owner.trouble and handles:
        lines.append(f"what stays on the device is NOT saved: {cells.owner.trouble}")
    return "\n".join(lines)


def _under() -> str:
    """The lease of the kernel itself, as where one serves a whole notebook job; empty where it runs under none."""
    path = os.environ.get("SUBLET_PAGE")
    if not path:
        return ""
    page = PageReader(path)
    view = page.read()
    left = format_duration(max(0, view.deadline_ns - page.now_ns()) // NS_PER_S * NS_PER_S)
    return f"every cell runs under one lease, on {', '.join(view.devices)}, {left} left"


def _release(cells: Cells, _shell: Any, _rest: str) -> str:
    news = cells.handles.save()
    handles = {name: one for name, one in cells.handles.all().items() if one.is_live}
    cells.release()
    lost = [name for name, one in handles.items() if not one.is_saved]
    lines = ["no lease is held"]
    if news is not None and news.failed:
        lines.append(f"what stayed on the device could not be saved: {news.failed}")
    if lost:
        lines.append(f"lost with it: {', '.join(sorted(lost))}; rerun the cells that made them")
    return "\n".join(lines)


def _checkpoint(cells: Cells, shell: Any, _rest: str) -> str:
    volume = _volume(cells)
    number = number_of(shell)
    news = cells.handles.save(everything=True)
    if news is not None and news.failed:
        raise CheckpointFailed(news.failed, do=news.do)
    generators = cells.surroundings.generators()
    saved, lost = cells.handles.checkpoint(sorted(cells.space.visible()), _shelf(cells, volume), number, generators)
    held = [] if news is None else sorted(news.held.keys() - news.lost.keys())
    if saved is None and not held:
        return "there is nothing to save"
    at = saved.wall_ns if saved is not None else news.saved.wall_ns if news is not None and news.saved else 0
    written = (saved.written_bytes if saved else 0) + (news.saved.written_bytes if news and news.saved else 0)
    if (last := saved or (news.saved if news is not None else None)) is not None:
        cells.note_saved(last.number, last.wall_ns)
    lines = [f"saved{f' at {clock_time(at)}' if at else ''} {_where(volume)}: {format_size(written)} written"]
    lines += [
        f"{name}: cannot be saved ({why})" for name, why in sorted({**lost, **(news.lost if news else {})}.items())
    ]
    return "\n".join(lines)


def _restore(cells: Cells, _shell: Any, _rest: str) -> str:
    volume = _volume(cells)
    shelf = _shelf(cells, volume)
    left = cells.owner.import_from(cells.fabric(), shelf, cells.handles.is_bound)
    restored = cells.handles.restore(shelf)
    copies = f"; copies, of what the kernel that has {volume.other} left" if volume.other else ""
    apart = f"; not brought, for what they share with names that are here: {', '.join(left)}" if left else ""
    if restored.names:
        random = ""
        if restored.generators is not None:
            cells.surroundings.restore(restored.generators)
            random = "; random generators go on from there"
        return f"{restored}{random}{copies}{apart}"
    if restored.kept:
        return f"nothing restored: the notebook has values of its own for {', '.join(restored.kept)} (del one first)"
    return f"there is nothing saved {f'by the kernel that has {volume.other}' if volume.other else _where(volume)}"


def _bill(cells: Cells, _shell: Any, _rest: str) -> str:
    office = []
    if cells.bills.rows:
        with contextlib.suppress(SubletError):  # it may be away; what the cells consumed is known here
            office = cells.fabric().bill(by="lease")
    return cells.bills.text(office)


def _fetch(cells: Cells, _shell: Any, name: str) -> str:
    if not name:
        raise InvalidRequest("%gpu fetch needs a name", do=f"On the device: {_on_device(cells)}.")
    value = cells.space.names.get(name)
    if type(value) is not RemoteValue:
        close = difflib.get_close_matches(name, list(cells.handles.all()), n=1)
        meant = f"; did you mean {close[0]}?" if close and name not in cells.space.names else ""
        what = "is in the notebook already" if name in cells.space.names else "is no name of this notebook"
        raise NotFound(f"{name} {what}{meant}", do=f"On the device: {_on_device(cells)}.")
    fetched = value.fetch()
    for other, one in cells.handles.all().items():
        if one is value:
            cells.space.names[other] = fetched
    return f"{name} is in the notebook now: {value.value_about.what}, {format_size(value.value_about.nbytes)}"


def _explain(cells: Cells, _shell: Any, rest: str) -> str:
    if not rest:
        raise InvalidRequest("%gpu explain needs code", do="Write %gpu explain f(x), or %%gpu explain above a cell.")
    return cells.explained(rest)


def _name(cells: Cells, _shell: Any, rest: str) -> str:
    words = rest.split()
    if not words:
        name, path = cells.owner.name, cells.owner.path
        if not name:
            return "this notebook has no name: what it saves goes with its kernel. Give it one with %gpu name X"
        return f"{name}{f' (from {path})' if path else ''}"
    if len(words) > 2:
        raise InvalidRequest(f"%gpu name takes a name and perhaps a size, not {rest!r}", do="Write %gpu name X 8GiB.")
    if handles := cells.handles.all():
        first = next(iter(handles))
        raise InvalidRequest(
            f"{', '.join(sorted(handles))} {'is' if len(handles) == 1 else 'are'} saved under the present name",
            do=f"Bring such variables here first (%gpu fetch {first}), or del them.",
        )
    had_lease = cells.lease is not None
    cells.release()
    cells.owner.rename(*words)
    answer = f"the state of this notebook is called {cells.owner.name}"
    return f"{answer}; the lease was given back, and the next cell takes another" if had_lease else answer


def _report(cells: Cells, _shell: Any, rest: str) -> str:
    if rest in ("on", "off"):
        cells.reports = rest == "on"
        return f"the report is {'' if cells.reports else 'not '}shown after every cell"
    if rest:
        raise InvalidRequest(f"%gpu report takes on or off, not {rest!r}", do="Write %gpu report, or %gpu report on.")
    return fates_text(cells.traffic.report())


COMMANDS: Final = (
    Command("", "", _status, "show the lease and the variables on the device"),
    Command("release", "", _release, "release the lease; variables on the device are saved first"),
    Command("checkpoint", "", _checkpoint, "save all variables, on the device and in the notebook"),
    Command("restore", "", _restore, "load what was saved under this notebook's name into a new kernel"),
    Command("bill", "", _bill, "show what each cell consumed, and the sum"),
    Command("fetch", "NAME", _fetch, "bring a variable from the device into the notebook"),
    Command("explain", "CODE", _explain, "show which variables the code would send, their sizes, and what stays"),
    Command("name", "X [SIZE]", _name, "set the name under which this notebook's state is saved"),
    Command("report", "[on|off]", _report, "show where each variable is: notebook, saved, to be recomputed, or lost"),
)
_BY_WORD: Final = {one.word: one for one in COMMANDS}


def _volume(cells: Cells) -> KernelVolume:
    volume = cells.owner.take(cells.fabric())
    if volume is None:
        raise CheckpointFailed(
            f"there is no volume to save to: {cells.owner.trouble}", do="Save files of your own, or ask for more disk."
        )
    return volume


def _shelf(cells: Cells, volume: KernelVolume) -> NotebookCheckpoint:
    shelf = cells.handles.save_in(volume)
    assert shelf is not None
    return shelf


def _where(volume: KernelVolume) -> str:
    return f"as {volume.name}" if volume.name else "for as long as this kernel lives (%gpu name X keeps it longer)"


def _on_device(cells: Cells) -> str:
    return ", ".join(sorted(n for n, one in cells.handles.all().items() if one.is_live or one.is_saved)) or "nothing"
