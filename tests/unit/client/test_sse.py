"""Reading server-sent events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.client.http1 import ProtocolError
from sublet.client.sse import EVENT_BYTES_MAX, EventReader, ServerEvent

STREAM = b': hello\n\nevent: place\ndata: {"a": 1}\n\n: still here\n\ndata: one\r\ndata:two\r\nid: 7\r\n\r\n'
EVENTS = [ServerEvent("place", '{"a": 1}'), ServerEvent("message", "one\ntwo")]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_events_are_the_same_however_the_stream_is_cut(sizes: list[int]) -> None:
    """Comments make no event; several data lines make one; line ends may be cut in two."""
    reader, at, found = EventReader(), 0, []
    for size in [*sizes, len(STREAM)]:
        found += reader.feed(STREAM[at : at + size])
        at += size
    assert found == EVENTS


def test_an_unfinished_event_is_kept_back() -> None:
    reader = EventReader()
    assert reader.feed(b"event: notice\ndata: {}\n") == []
    assert reader.feed(b"\n") == [ServerEvent("notice", "{}")]


def test_an_event_without_end_is_not_collected_for_ever() -> None:
    reader = EventReader()
    line = b"data: " + b"x" * 65536 + b"\n"
    for _ in range(EVENT_BYTES_MAX // len(line)):
        reader.feed(line)
    with pytest.raises(ProtocolError):
        reader.feed(line)
