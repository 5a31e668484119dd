"""Another user's output on one's own terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.cli.terminal_filter import TerminalFilter


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"plain text\n\ttabs and \r\n", "plain text\n\ttabs and \r\n"),
        ("Grüße, 你好, 🚀\n".encode(), "Grüße, 你好, 🚀\n"),
        (b"\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mrgb\x1b[m", "\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mrgb\x1b[m"),
        (b"\x1b[2J\x1b[H", "·[2J·[H"),
        (b"\x1b]0;title\x07", "·]0;title·"),
        (b"\x1b]52;c;AAAA\x1b\\", "·]52;c;AAAA·\\"),
        (b"\x1b[6n\x1bc\x1bP$q\x1b\\", "·[6n·c·P$q·\\"),
        (b"\x1b[31\x1b[2Jm", "·[31·[2Jm"),
        (b"a\x00b\x08c\x7fd\x0be", "a·b·c·d·e"),
        ("\x9b2J\x9d0;x".encode(), "·2J·0;x"),
    ],
)
def test_text_and_colours_go_through_and_nothing_else_that_a_terminal_obeys(written: bytes, shown: str) -> None:
    assert TerminalFilter().passed(written + b".").decode() == shown + "."


SEQUENCES = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from([b"\x1b", b"\x1b[", b"\x1b[3", b"1m", b"\x1b[31m", b"\xc2", b"\x9b", b"\x1b]0;x\x07", b"ok\n"]),
    ),
    max_size=20,
)


@given(SEQUENCES, st.integers(1, 5))
def test_however_it_is_cut_the_same_is_written(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces) + b"end"
    at_once, cut = TerminalFilter(), TerminalFilter()
    assert b"".join(cut.passed(whole[i : i + size]) for i in range(0, len(whole), size)) == at_once.passed(whole)


@given(SEQUENCES)
def test_a_terminal_is_never_given_an_escape_that_is_no_colour(pieces: list[bytes]) -> None:
    one = TerminalFilter()
    written = b"".join(one.passed(piece) for piece in pieces)
    for rest in written.split(b"\x1b[")[1:]:
        assert rest.lstrip(b"0123456789;:").startswith(b"m"), written
    assert b"\x1b" not in written.replace(b"\x1b[", b"")
    assert not any(byte in written for byte in (b"\x00", b"\x07", b"\x08", b"\x0e", b"\x7f"))
