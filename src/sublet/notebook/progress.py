"""Shows which variable is being sent or received once that takes noticeably long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from sublet.background import begin
from sublet.values import format_size

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


class Progress:
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
        self.look()

    def look(self) -> None:
        """Show it if it is time. The waiting thread calls this now and then."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        with self._lock:
            text = describe_names(self._names, self._values, self._nbytes) if self._verb else ""
            if not text or (said := f"{self._verb} {text}") == self._shown:
                return
            is_first, self._shown, self._due_s = not self._shown, said, now_s + EVERY_S
            self.show(said, is_first)

    def _start(self) -> None:
        self._timer = timer = self._new_timer(max(self._due_s - self._clock(), EVERY_S), self._ring)
        timer.daemon = True
        try:
            begin(timer)
        except (RuntimeError, MemoryError):  # no room for a thread: it is only told a little later how far it has come
            self._timer = None

    def _ring(self) -> None:
        self.look()
        with self._lock:
            self._timer = None
            if self._verb:
                self._start()
