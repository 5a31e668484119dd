"""What a served program says is not believed: each text of it is checked before anything is done with it."""

from __future__ import annotations

import json

import pytest

from sublet.studio.serve import answer_head, message_in
from sublet.studio.serving import ProgramTransitionError
from sublet.wire.served import MESSAGE_MAX


def test_the_head_of_an_answer() -> None:
    said = {"status": 201, "headers": [["X-Said", "ü"], ["Connection", "close"], ["Transfer-Encoding", "chunked"]]}
    head = answer_head(json.dumps(said).encode())
    assert (head.status, head.headers) == (201, [(b"x-said", b"\xfc")]), "without what is between two machines"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b"{}",
        b"[" * 100_000,
        b'{"status": 1e999, "headers": []}',
        b'{"status": 99, "headers": []}',
        b'{"status": 600, "headers": []}',
        b'{"status": 200, "headers": 3}',
        b'{"status": 200, "headers": [["a"]]}',
        b'{"status": 200, "headers": [["a", "b\\r\\nset-cookie: c"]]}',
        b'{"status": 200, "headers": [["a\\n", "b"]]}',
        '{"status": 200, "headers": [["a", "\u2603"]]}'.encode(),
    ],
)
def test_what_is_no_head_is_refused(body: bytes) -> None:
    with pytest.raises(ProgramTransitionError, match="head of an answer"):
        answer_head(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff"])
def test_a_message_that_cannot_be_read_is_said_so(body: bytes) -> None:
    assert message_in(body) == "it said nothing that can be read"


def test_a_message_has_no_control_characters_and_an_end() -> None:
    body = json.dumps({"message": "\x1b[2J\nno" + "x" * 100_000}).encode()
    assert message_in(body).startswith(" [2J no")
    assert len(message_in(body)) == MESSAGE_MAX
