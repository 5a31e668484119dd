"""The frames of a served program: any cut of them is read as it was written, and what is none is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.wire.served import (
    FRAME_MAX,
    FROM_PROGRAM,
    HEADER,
    TO_PROGRAM,
    BrokenFrames,
    ServedFrame,
    ServedFrameKind,
    ServedFrameReader,
    encode,
    split_head,
    with_head,
)

FRAMES = st.lists(
    st.tuples(st.sampled_from(sorted(FROM_PROGRAM)), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8
)


@given(FRAMES, st.lists(st.integers(0, 3000), max_size=6))
def test_frames_are_read_as_they_were_written_however_they_are_cut(
    frames: list[tuple[ServedFrameKind, int, bytes]], cuts: list[int]
) -> None:
    data, reader = b"".join(encode(*frame) for frame in frames), ServedFrameReader(FROM_PROGRAM)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = [frame for at, to in itertools.pairwise(edges) for frame in reader.feed(data[at:to])]
    assert found == [ServedFrame(*frame) for frame in frames]


@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_break(data: bytes) -> None:
    for kinds in (TO_PROGRAM, FROM_PROGRAM):
        reader = ServedFrameReader(kinds)
        with contextlib.suppress(BrokenFrames):
            assert all(frame.kind in kinds for frame in reader.feed(data))
    with contextlib.suppress(BrokenFrames):
        split_head(data)


def test_a_frame_is_of_its_direction_and_bounded() -> None:
    with pytest.raises(BrokenFrames, match="in this direction"):
        ServedFrameReader(FROM_PROGRAM).feed(encode(ServedFrameKind.REQUEST, 1))
    with pytest.raises(BrokenFrames, match="larger than frames are"):
        ServedFrameReader(FROM_PROGRAM).feed(HEADER.pack(ServedFrameKind.PIECE, 1, FRAME_MAX + 1))


@given(st.lists(st.binary(max_size=50), max_size=3))
def test_a_head_and_its_parts(parts: list[bytes]) -> None:
    assert split_head(with_head({"name": "ü"}, *parts)) == ({"name": "ü"}, parts)


@pytest.mark.parametrize("lengths", [[-1], [10**6], ["x"], None, 3])
def test_a_head_that_lies_about_its_parts_is_refused(lengths: object) -> None:
    text = json.dumps({"parts": lengths}).encode()
    with pytest.raises(BrokenFrames):
        split_head(struct.pack("!I", len(text)) + text + b"abc")
