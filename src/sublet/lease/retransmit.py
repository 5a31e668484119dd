"""Reports that are repeated at growing intervals until they are acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from sublet.lazy_dataclass import dataclass
from sublet.values import NS_PER_S
from sublet.wire.orders import Report

FIRST_NS: Final = 1 * NS_PER_S
MAX_NS: Final = 60 * NS_PER_S
"""A report that needs an answer is given again after one second, then two, four, and so on up to this."""
ENOUGH: Final = 5
"""So often in a row, some fifteen seconds: a supervisor that hears it has answered by then."""

_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Entry:
    report: Report
    next_ns: int
    until_ns: int | None
    pause_ns: int = FIRST_NS
    sends: int = 0


class Repeats(Generic[_Key]):
    """What has to be said again, and when."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def may_be_answered(self, key: _Key) -> bool:
        """Whether it is being said, and not for so long that the other side cannot know what it is about."""
        entry = self._entries.get(key)
        return entry is not None and entry.sends < ENOUGH

    def about_to_say(self, now_ns: int) -> list[_Key]:
        """Of what there is something to say now."""
        return [key for key, entry in self._entries.items() if now_ns >= entry.next_ns]

    def put(self, key: _Key, report: Report) -> None:
        """This is what is said of it from the next time on."""
        self._entries[key].report = report

    def repeat(self, key: _Key, report: Report, now_ns: int, *, for_ns: int | None = None) -> None:
        """From now on, and for so long at most."""
        until_ns = None if for_ns is None else now_ns + for_ns
        self._entries[key] = _Entry(report, now_ns, until_ns)

    def stop(self, key: _Key) -> None:
        """It was answered, or is no longer true; harmless if it was not being said."""
        self._entries.pop(key, None)

    def due(self, now_ns: int) -> Iterator[Report]:
        """What to say now."""
        for entry in tuple(self._entries.values()) if self._entries else ():
            if now_ns >= entry.next_ns:
                entry.next_ns = now_ns + entry.pause_ns
                entry.pause_ns = min(2 * entry.pause_ns, MAX_NS)
                entry.sends += 1
                yield entry.report

    def again(self, now_ns: int) -> None:
        """The other side may be new and may not have heard: say everything again, at short intervals at first."""
        for entry in self._entries.values():
            entry.next_ns, entry.pause_ns, entry.sends = now_ns, FIRST_NS, 0

    def resend_now(self, now_ns: int) -> None:
        """All of it once more, between two times."""
        for entry in self._entries.values():
            entry.next_ns = now_ns

    def drop_unanswered(self, now_ns: int) -> None:
        """What stayed unanswered for as long as it was to be said is not said again."""
        if not self._entries:
            return
        over = [k for k, entry in self._entries.items() if entry.until_ns is not None and now_ns >= entry.until_ns]
        for key in over:
            del self._entries[key]

    def next_ns(self) -> int | None:
        """When there is something to say again."""
        return min(entry.next_ns for entry in self._entries.values()) if self._entries else None
