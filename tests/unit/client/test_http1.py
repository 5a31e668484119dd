"""Reading HTTP/1.1: whole answers however they arrive, and no guesses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.client.http1 import HEAD_BYTES_MAX, AnswerReader, ProtocolError, encode_request
from tests.cases import case

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;note=x\r\nhel\r\n2\r\nlo\r\n0\r\nChecksum: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + PLAIN
CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello"


def read(*pieces: bytes) -> tuple[AnswerReader, bytes]:
    reader = AnswerReader()
    body = b""
    for piece in pieces:
        reader.feed(piece)
        body += reader.take()
    return reader, body


@given(st.sampled_from([PLAIN, CHUNKED, INTERIM]), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_an_answer_is_the_same_however_it_is_cut(raw: bytes, sizes: list[int]) -> None:
    """The network may cut anywhere, inside a line break as well."""
    pieces, at = [], 0
    for size in [*sizes, len(raw)]:
        pieces.append(raw[at : at + size])
        at += size
    reader, body = read(*[piece for piece in pieces if piece])
    assert (reader.status, body, reader.complete, reader.reusable) == (200, b"hello", True, True)


def test_an_answer_without_length_ends_with_the_connection() -> None:
    reader, body = read(CLOSED)
    assert (body, reader.complete) == (b"hello", False)
    reader.feed(b"")
    assert (reader.complete, reader.reusable) == (True, False)


def test_close_is_heeded() -> None:
    """A server that says ``close`` gets no second request on that connection."""
    reader, _ = read(PLAIN.replace(b"Content-Type: application/json", b"Connection: close"))
    assert reader.complete
    assert not reader.reusable


def test_no_content_has_no_body() -> None:
    reader, body = read(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (reader.complete, body) == (True, b"")


def test_half_an_answer_is_none() -> None:
    """Wherever the connection breaks, the half is never taken for the whole."""
    for cut in range(1, len(PLAIN)):
        reader, _ = read(PLAIN[:cut])
        with case("cut at", cut), pytest.raises(ProtocolError):
            reader.feed(b"")


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n name: folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * HEAD_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * (HEAD_BYTES_MAX + 1),
        PLAIN + b"HTTP/1.1 200 OK\r\n",  # an answer nobody asked for
    ],
)
def test_what_is_not_an_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(raw)


@given(st.binary(max_size=300))
def test_noise_never_crashes_the_reader(noise: bytes) -> None:
    """Whatever answers on that port, the only error is ours."""
    reader = AnswerReader()
    try:
        reader.feed(noise)
        reader.feed(b"")
    except ProtocolError:
        pass


def test_a_request_is_written_as_it_must_be() -> None:
    raw = encode_request("POST", "/v1/leases", host="localhost", headers={"sublet-wire": "1"}, body=b"{}")
    assert raw == (
        b"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\nsublet-wire: 1\r\n"
        b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(("path", "token"), [("/v1/leases/x\r\nhost: evil", "t"), ("/", "t\r\nx: y"), ("/", "t\ny")])
def test_a_line_break_cannot_be_smuggled_in(path: str, token: str) -> None:
    with pytest.raises(ProtocolError):
        encode_request("GET", path, host="localhost", headers={"authorization": token})
