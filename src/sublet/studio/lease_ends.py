"""Records the ends of leases while they happen, whether or not anyone looks at their sessions.

The studio follows the office's news with a stream of its own. What ended while it was not followed (the studio or the
office was away, or the stream was read too slowly) is compared with the office each time that the stream begins.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Final

from sublet.client.http1 import ProtocolError
from sublet.client.sse import EventReader
from sublet.client.transport import Flight
from sublet.errors import Disconnected, SubletError
from sublet.studio.office import seen_as
from sublet.studio.sessions import Seen
from sublet.wire.decoders import decode_as
from sublet.wire.http import News
from sublet.wire.http_views import SESSION_LABEL

RETRY_S: Final = 1.0
"""Before the stream is opened again."""
SILENT_S: Final = 60.0
"""A stream that says nothing for so long is dead: the office gives a sign of life each 15 s."""


class LeaseEnds:
    """Follows the ends of the leases of sessions."""

    def __init__(
        self, open_news: Callable[[], Flight], ended: Callable[[Seen], object], compare: Callable[[], object]
    ) -> None:
        """``ended`` is called for each lease of a session that has ended; ``compare``, where an end may have been
        missed. Both may raise ``SubletError``; then the stream is opened again, and all is compared."""
        self._open_news, self._ended, self._compare = open_news, ended, compare

    def run(self, stopped: threading.Event) -> None:
        """Until it is stopped."""
        while not stopped.is_set():
            try:
                self._follow(stopped)
            except (SubletError, ProtocolError):
                stopped.wait(RETRY_S)

    def _follow(self, stopped: threading.Event) -> None:
        flight, reader, is_begun = self._open_news(), EventReader(), False
        try:
            poll = select.poll()
            poll.register(flight, select.POLLIN)
            while not stopped.is_set():
                if not poll.poll(SILENT_S * 1e3):
                    raise Disconnected("the stream of the office's news is silent")
                raw = flight.read()
                if flight.complete or flight.status not in (0, 200):
                    raise Disconnected("the stream of the office's news has ended")
                if not is_begun and flight.status == 200:  # what ends from here on is in it
                    is_begun = True
                    self._compare()
                for event in reader.feed(raw):
                    self._take(event.event, event.data)
        finally:
            flight.close()

    def _take(self, event: str, data: str) -> None:
        if event == "lagged":
            self._compare()
        elif event == "ended":
            lease = decode_as(data.encode(), News).lease
            if lease is not None and lease.parks is None and SESSION_LABEL in lease.labels:
                self._ended(seen_as(lease))
