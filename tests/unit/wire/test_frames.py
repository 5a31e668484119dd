"""Frames: whatever pieces the bytes come in, the same frames come out; what is none is refused, and nothing leaks."""

from __future__ import annotations

import os
import random
import struct

import pytest

from sublet.errors import InvalidRequest
from sublet.wire.frames import (
    BODY_MAX,
    CONTROL_MAX,
    DATA_MAX,
    FDS_MAX,
    HEADER_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    close_all,
    encode,
)
from tests.left_open import nothing_left_open, some_fd

FRAMES = (
    Frame(FrameKind.CALL, 1, b'{"is":"ListGuests"}'),
    Frame(FrameKind.REPLY, 2, b""),
    Frame(FrameKind.DATA, 7, bytes(range(256))),
    Frame(FrameKind.CREDIT, 7, b"\0\1\0\0"),
    Frame(FrameKind.CLOSE, (1 << 32) - 1, b"\0"),
)
STREAM = b"".join(encode(frame.kind, frame.channel, frame.body) for frame in FRAMES)


def header(version: int = 1, kind: int = 3, flags: int = 0, channel: int = 1, length: int = 0) -> bytes:
    return struct.pack("!BBHII", version, kind, flags, channel, length)


def test_a_frame_has_twelve_bytes_before_its_body() -> None:
    assert encode(FrameKind.CALL, 5, b"ab") == b"\x01\x03\x00\x00\x00\x00\x00\x05\x00\x00\x00\x02ab"
    assert HEADER_BYTES == 12


def test_frames_come_out_whole_wherever_the_bytes_are_cut() -> None:
    for at in range(len(STREAM) + 1):
        reader = FrameReader(1)
        found = reader.feed(STREAM[:at])
        assert reader.feed(STREAM[at:]) == list(FRAMES)[len(found) :], f"cut at {at}"
        assert tuple(found) == FRAMES[: len(found)], f"cut at {at}"
        assert reader.is_between, f"cut at {at}"


def test_frames_come_out_whole_byte_by_byte() -> None:
    reader = FrameReader(1)
    found = [frame for byte in STREAM for frame in reader.feed(bytes([byte]))]
    assert tuple(found) == FRAMES


def test_an_end_in_the_middle_of_a_frame_is_seen() -> None:
    for length in range(len(STREAM)):
        reader = FrameReader(1)
        said = sum(HEADER_BYTES + len(frame.body) for frame in reader.feed(STREAM[:length]))
        assert reader.is_between == (said == length)


@pytest.mark.parametrize("kind", FrameKind)
def test_the_longest_body_passes_and_one_byte_more_does_not(kind: FrameKind) -> None:
    body = bytes(BODY_MAX[kind])
    [frame] = FrameReader(1).feed(encode(kind, 1, body))
    assert frame.body == body
    with pytest.raises(InvalidRequest, match="over the limit"):
        encode(kind, 1, body + b"x")
    with pytest.raises(InvalidRequest, match="over the limit"):  # the header is enough: nothing large is waited for
        FrameReader(1).feed(header(kind=kind, length=len(body) + 1))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(kind=0), "no frame of kind 0"),
        (header(kind=11), "no frame of kind 11"),
        (header(kind=14), "no frame of kind 14"),
        (header(kind=255), "no frame of kind 255"),
        (header(version=2), "of version 2 came where 1"),
        (header(version=0), "of version 0 came where 1"),
        (header(version=0, kind=1), "of version 0"),
        (header(length=(1 << 32) - 1), "over the limit of 1048576"),
        (header(kind=8, length=DATA_MAX + 1), "over the limit of 262144"),
        (header(flags=1), "announced 1 descriptors and 0 came"),
        (header(flags=FDS_MAX + 1), "at most 16"),
        (header(flags=0x0100), "flags 0x0100"),
    ],
)
def test_what_is_no_frame_is_refused_by_its_header_and_for_good(data: bytes, words: str) -> None:
    reader = FrameReader(1)
    with pytest.raises(InvalidRequest, match=words):
        reader.feed(data)
    with pytest.raises(InvalidRequest, match=words):
        reader.feed(STREAM)


def test_before_anything_is_agreed_only_a_greeting_or_a_refusal_is_taken_in_any_version() -> None:
    for kind in FrameKind:
        for version in (1, 2, 77):
            data = encode(kind, 0, b"", version=version)
            if kind in (FrameKind.HELLO, FrameKind.WELCOME, FrameKind.ERROR):
                [frame] = FrameReader().feed(data)
                assert (frame.kind, frame.version) == (kind, version)
            else:
                with pytest.raises(InvalidRequest, match="before version and name were agreed"):
                    FrameReader().feed(data)


# ------------------------------------------------------------------------------------------------------- descriptors


def test_each_frame_gets_exactly_the_descriptors_it_announced() -> None:
    with nothing_left_open():
        a, b, c = some_fd(), some_fd(), some_fd()
        data = (
            encode(FrameKind.CALL, 1, b"x", fds=(a, b))
            + encode(FrameKind.CALL, 3)
            + encode(FrameKind.EVENT, 0, fds=(c,))
        )
        frames = FrameReader(1).feed(data, [a, b, c])
        assert [frame.fds for frame in frames] == [(a, b), (), (c,)]
        for frame in frames:
            close_all(frame.fds)


@pytest.mark.parametrize("at", range(1, 20))
def test_descriptors_wait_for_their_frame_wherever_it_is_cut(at: int) -> None:
    with nothing_left_open():
        fd = some_fd()
        data = encode(FrameKind.CALL, 1, b"12345678", fds=(fd,))
        reader = FrameReader(1)
        assert reader.feed(data[:at], [fd]) == []
        [frame] = reader.feed(data[at:])
        assert frame.fds == (fd,)
        os.close(fd)


@pytest.mark.parametrize("announced", [0, 1, 2])
def test_descriptors_that_no_frame_announced_are_closed_and_end_it(announced: int) -> None:
    with nothing_left_open():
        fds = [some_fd() for _ in range(announced + 1)]
        data = encode(FrameKind.CALL, 1, b"x", fds=fds[:announced])
        with pytest.raises(InvalidRequest, match="1 descriptors came that no frame announced"):
            FrameReader(1).feed(data, fds)


def test_descriptors_that_were_announced_and_did_not_come_end_it_and_the_others_are_closed() -> None:
    with nothing_left_open():
        fd = some_fd()
        with pytest.raises(InvalidRequest, match="announced 2 descriptors and 1 came"):
            FrameReader(1).feed(header(flags=2), [fd])


def test_descriptors_do_not_pile_up_before_a_header_is_complete() -> None:
    with nothing_left_open():
        reader = FrameReader(1)
        reader.feed(b"\1", [some_fd() for _ in range(FDS_MAX)])
        with pytest.raises(InvalidRequest, match="17 descriptors came at once"):
            reader.feed(b"\3", [some_fd()])


def test_what_comes_after_an_error_or_the_end_is_closed_too() -> None:
    with nothing_left_open():
        reader = FrameReader(1)
        with pytest.raises(InvalidRequest):
            reader.feed(header(kind=99))
        with pytest.raises(InvalidRequest):
            reader.feed(b"", [some_fd()])
        half = FrameReader(1)
        half.feed(header(flags=1, length=9), [some_fd()])
        half.close()
        half.close()
        with pytest.raises(InvalidRequest):
            half.feed(b"", [some_fd()])


def test_a_frame_with_too_many_descriptors_is_not_made() -> None:
    with pytest.raises(InvalidRequest, match="17 descriptors are too many"):
        encode(FrameKind.CALL, 1, fds=range(17))


# -------------------------------------------------------------------------------------------------------------- fuzz


STREAMS = int(os.environ.get("SUBLET_FRAMES", "20000"))


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The data with a few bytes changed, taken out, doubled or moved."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(5):
            case 0 if at < len(made):
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                del made[at : at + chance.randint(1, 16)]
            case 2:
                made[at:at] = chance.randbytes(chance.randint(1, 16))
            case 3:
                made[at:at] = made[max(0, at - 12) : at]
            case _ if at < len(made):
                made[at] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
            case _:
                pass
    return bytes(made)


def test_whatever_comes_is_frames_or_the_declared_error_and_nothing_leaks() -> None:
    """Streams with mistakes in them, cut anywhere, some with descriptors."""
    chance = random.Random(20_000)
    outcomes = {"frames": 0, "refused": 0}
    with nothing_left_open():
        for _ in range(STREAMS):
            data = mutated(chance, STREAM) if chance.random() < 0.9 else chance.randbytes(chance.randrange(64))
            cut = chance.randrange(len(data) + 1)
            reader = FrameReader(chance.choice((1, 1, 1, None, 2)))
            fds = [some_fd()] if chance.random() < 0.05 else []
            try:
                for piece, with_it in ((data[:cut], fds), (data[cut:], [])):
                    for frame in reader.feed(piece, with_it):
                        assert len(frame.body) <= BODY_MAX[frame.kind] <= CONTROL_MAX
                        close_all(frame.fds)
                outcomes["frames"] += 1
            except InvalidRequest:
                outcomes["refused"] += 1
            reader.close()
    assert min(outcomes.values()) > 1000, outcomes
