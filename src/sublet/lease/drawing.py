"""Draws the state machines from their tables, so that picture and code cannot differ.

``python -m sublet.lease.drawing docs/states.md`` puts the drawings into the page, between its markers.
"""

from __future__ import annotations

import ast
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import (
    COUPLING,
    GUEST_TABLE,
    HOLDER_TABLE,
    LEASE_TABLE,
    SLICE_TABLE,
    VOLUME_TABLE,
    GuestEvent,
    GuestState,
    HolderEvent,
    LeaseEvent,
    LeaseStatus,
    SliceEvent,
    SliceState,
    VolumeEvent,
    VolumeState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """One table with what is needed to draw it."""

    name: str
    states: type[enum.StrEnum]
    events: type[enum.StrEnum]
    start: enum.StrEnum
    arrows: tuple[tuple[enum.StrEnum, enum.StrEnum, enum.StrEnum], ...]
    """(state, event, next state)."""

    def reachable(self) -> frozenset[enum.StrEnum]:
        """The states that can be reached from the start, the start included."""
        seen: set[enum.StrEnum] = set()
        waiting = [self.start]
        while waiting:
            state = waiting.pop()
            if state not in seen:
                seen.add(state)
                waiting += [target for source, _, target in self.arrows if source is state]
        return frozenset(seen)

    def last(self) -> frozenset[enum.StrEnum]:
        """The states without a way to another one."""
        return self.reachable() - {source for source, _, then in self.arrows if then != source}


MACHINES: Final = (
    StateTable(
        name="lease",
        states=LeaseStatus,
        events=LeaseEvent,
        start=LeaseStatus.QUEUED,
        arrows=tuple((state, event, then) for (state, event), then in LEASE_TABLE.items()),
    ),
    StateTable(
        name="holder",
        states=LeaseStatus,
        events=HolderEvent,
        start=LeaseStatus.QUEUED,
        arrows=tuple((state, event, then) for (state, event), then in HOLDER_TABLE.items()),
    ),
    StateTable(
        name="slice",
        states=SliceState,
        events=SliceEvent,
        start=SliceState.FREE,
        arrows=tuple((state, event, then) for (state, event), then in SLICE_TABLE.items()),
    ),
    StateTable(
        name="guest",
        states=GuestState,
        events=GuestEvent,
        start=GuestState.STARTING,
        arrows=tuple((state, event, then) for (state, event), then in GUEST_TABLE.items()),
    ),
    StateTable(
        name="volume",
        states=VolumeState,
        events=VolumeEvent,
        start=VolumeState.LIVE,
        arrows=tuple((state, event, then) for (state, event), then in VOLUME_TABLE.items()),
    ),
)


def mermaid(machine: StateTable) -> str:
    """A Mermaid state diagram. Events that lead the same way share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {machine.start}"]
    lines += [
        f"    {source} --> {target}: {', '.join(events)}"
        for (source, target), events in _merged(machine).items()
        if source != target
    ]
    lines += [f"    {state} --> [*]" for state in machine.states if state in machine.last()]
    return "\n".join(lines)


def plain(machine: StateTable) -> str:
    """The same for a terminal: each state, and its ways out below it."""
    lines: list[str] = []
    for state in machine.states:
        if state not in machine.reachable():
            continue
        marks = ["starts here"] * (state is machine.start) + ["the last"] * (state in machine.last())
        lines.append(f"{state} ({', '.join(marks)})" if marks else state)
        ways = [(event, target) for source, event, target in machine.arrows if source is state]
        width = max((len(event) for event, _ in ways), default=0)
        lines += [f"    {event:<{width}}  → {target}" for event, target in ways]
    return "\n".join(lines)


def coupling() -> str:
    """What an event of a lease does to its slices and guests."""
    rows = [(event, *(effect or "" for effect in effects)) for event, effects in COUPLING.items()]
    return _table(("event of the lease", "each of its slices", "each guest that uses one"), rows)


def exits(machine: StateTable) -> str:
    """Every state against every event: where it leads; empty where the event is an error."""
    leads = {(state, event): then for state, event, then in machine.arrows}
    events = [event for event in machine.events if any(event is known for _, known in leads)]
    rows = [
        (f"**{state}**", *(leads.get((state, event), "") for event in events))
        for state in machine.states
        if state in machine.reachable()
    ]
    return _table(("", *events), rows)


def meanings(name: str) -> dict[str, str]:
    """What each member of an enum of the law means: the text below it in ``states.py``."""
    source = resources.files("sublet.lease").joinpath("states.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return dict(_member_texts(node))
    raise InvalidRequest(f"there is no {name} in lease/states.py", do="Name one of its enums.")


def with_sections(page: str, sections: Mapping[str, str]) -> str:
    """The page with everything between the markers of each section made anew. A marker without its end is an error."""
    for key, text in sections.items():
        begin, end = f"<!-- drawn: {key} -->", f"<!-- end: {key} -->"
        if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
            raise InvalidRequest(
                f"the page has no place for {key!r}", do=f"Put {begin} and {end} there, once, each on a line."
            )
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def page_with_drawings(page: str) -> str:
    """The page with the state machines and tables of a lease drawn anew."""
    return with_sections(page, _sections())


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page named; ``docs/states.md`` if none is."""
    path = Path(arguments[0] if arguments else "docs/states.md")
    old = path.read_text(encoding="utf-8")
    new = page_with_drawings(old)
    path.write_text(new, encoding="utf-8")
    sys.stdout.write(f"{path}: {'drawn anew' if new != old else 'nothing has changed'}\n")
    return 0


def _sections() -> dict[str, str]:
    sections: dict[str, str] = {}
    for machine in MACHINES:
        sections[machine.name] = (
            f"```mermaid\n{mermaid(machine)}\n```\n\n```text\n{plain(machine)}\n```\n\n{exits(machine)}"
        )
    for title, kinds in (
        ("lease states", LeaseStatus),
        ("lease events", LeaseEvent),
        ("holder events", HolderEvent),
        ("slice states", SliceState),
        ("slice events", SliceEvent),
        ("guest states", GuestState),
        ("guest events", GuestEvent),
        ("volume states", VolumeState),
        ("volume events", VolumeEvent),
    ):
        meaning_of = meanings(kinds.__name__)
        sections[title] = _table((title.split()[1].removesuffix("s"), "meaning"), [(k, meaning_of[k]) for k in kinds])
    sections["coupling"] = coupling()
    return sections


def _merged(machine: StateTable) -> dict[tuple[str, str], list[str]]:
    """(from, to) and the events between them."""
    merged: dict[tuple[str, str], list[str]] = {}
    for source, event, target in machine.arrows:
        merged.setdefault((source, target), []).append(event)
    return merged


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _member_texts(enum_class: ast.ClassDef) -> Iterator[tuple[str, str]]:
    value = ""
    for node in enum_class.body:
        match node:
            case ast.Assign(value=ast.Constant(value=str(member))):
                value = member
            case ast.Expr(value=ast.Constant(value=str(text))) if value:
                yield value, " ".join(text.split())
                value = ""
            case _:
                pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
