"""The messages of calls: bytes both ways, and what a confused peer may send."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.wire.work import (
    BEGUN,
    WITHHELD,
    Board,
    Flag,
    HolderMessage,
    Piece,
    Where,
    WorkerMessage,
    numbers_in,
    pack,
    pack_numbers,
    unpack,
)

SHARED = st.builds(
    Piece,
    where=st.sampled_from([Where.SHARED, Where.KEPT]),
    length=st.integers(1, 1 << 36),
    number=st.integers(0, (1 << 64) - 1),
    fd=st.integers(0, 15),
    offset=st.integers(0, 1 << 40),
    is_readonly=st.booleans(),
)


@given(
    inline=st.lists(st.binary(max_size=40), max_size=5),
    shared=st.lists(SHARED, max_size=5),
    subject=st.integers(0, (1 << 32) - 1),
    amount=st.integers(0, (1 << 64) - 1),
    flags=st.sampled_from(list(Flag)),
)
def test_what_is_packed_is_unpacked(
    inline: list[bytes], shared: list[Piece], subject: int, amount: int, flags: Flag
) -> None:
    pieces = [*(Piece(Where.INLINE, len(data)) for data in inline), *shared]
    body = pack(HolderMessage.RUN, flags=flags, subject=subject, amount=amount, pieces=pieces, inline=inline)
    said = unpack(body)
    assert (said.kind, said.flags, said.subject, said.amount) == (HolderMessage.RUN, flags, subject, amount)
    assert list(said.pieces) == pieces
    assert said.blob == b"".join(inline)


def test_a_message_of_inline_pieces_needs_no_table() -> None:
    said = unpack(pack(WorkerMessage.LOG, inline=(b"ab", b"c")))
    assert [piece.length for piece in said.pieces] == [2, 1]
    assert said.blob == b"abc"


@given(body=st.binary(max_size=200))
def test_no_bytes_do_harm(body: bytes) -> None:
    try:
        said = unpack(body)
    except InvalidRequest:
        return
    assert sum(piece.length for piece in said.pieces if piece.where is Where.INLINE) == len(said.data)


def test_a_message_that_is_cut_is_refused() -> None:
    body = pack(HolderMessage.RUN, pieces=[Piece(Where.INLINE, 5), Piece(Where.SHARED, 10)], inline=(b"hello",))
    for length in range(len(body)):
        with pytest.raises(InvalidRequest):
            unpack(body[:length])
    with pytest.raises(InvalidRequest):
        unpack(body + b"!")


def test_numbers() -> None:
    assert numbers_in(pack_numbers([1, 1 << 63, 0])) == [1, 1 << 63, 0]
    with pytest.raises(InvalidRequest):
        numbers_in(b"1234567")


def test_a_board_is_one_page_for_both() -> None:
    ours, fd = Board.create()
    theirs = Board.opened(fd)
    os.close(fd)
    assert ours.read() == (0, 0)
    theirs.begin(7, 123)
    assert ours.read() == (7, 123)
    theirs.finish()
    assert ours.read() == (0, 0)
    ours.close()
    theirs.close()
    theirs.close()


def test_on_the_board_a_holder_withholds_what_is_not_begun() -> None:
    """Nothing is withheld from a worker that does not look there: of it nobody knows what it begins."""
    ours, fd = Board.create()
    assert not ours.stop_further_items(7)
    theirs = Board.opened(fd)
    os.close(fd)
    theirs.begin(7, 123)
    theirs.words[BEGUN] = 3
    assert ours.stop_further_items(8)
    assert ours.stop_further_items(7)
    assert theirs.words[WITHHELD] == 8
    assert (ours.begun(6), ours.begun(7), ours.begun(8)) == (None, 3, 0)
    theirs.finish()
    assert ours.begun(8) is None, "it may be the next"
    ours.close()
    theirs.close()


def test_what_is_no_board_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidRequest):
        Board.opened(fd)
    os.close(fd)


def test_a_call_whose_answer_may_be_lost_is_the_last_begun_one() -> None:
    """A worker that is killed between its answer and the holder's look has done the work: it is no call in line."""
    board, fd = Board.create()
    os.close(fd)
    try:
        assert board.last_begun() == 0
        board.begin(3, 1)
        board.finish()
        assert (board.read()[0], board.last_begun()) == (0, 3)
        board.begin(4, 1)
        assert board.last_begun() == 4
    finally:
        board.close()
