"""The messages of `run`, `exec`, `ps`, `logs` and `stop` as plain JSON.

``wire.guests`` defines them and a test compares. It is not used here because its classes take 25 ms to be made, which
is more than everything else between the prompt and the first line of a command's output.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.wire.frames import CONTROL_MAX

Json = dict[str, Any]
OUTPUT_HEAD_BYTES: Final = 9
"""Before each piece of output: one byte for the stream, eight for its offset in the log."""
STREAM_STDOUT: Final = 1


def message(kind: str, **fields: object) -> bytes:
    """``message("Attach", guest=...)``; fields that are left out have the defaults of ``wire.guests``."""
    body = json.dumps({"is": kind, **fields}, separators=(",", ":")).encode("ascii")
    if len(body) > CONTROL_MAX:
        raise InvalidRequest(
            f"arguments and environment take {len(body)} bytes together, and {CONTROL_MAX} is the most",
            do="Unset what the command does not need, or hand it over in a file.",
        )
    return body


def greeting(*, capability: str = "", access: str | None = None, as_tenant: bool = False) -> bytes:
    """The tenant that connects."""
    later = {"as_tenant": True} if as_tenant else {}
    return message("Greeting", capability=capability, access=access or "", **later)


def read(body: bytes) -> Json:
    """A message that came; ``["is"]`` says which."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Disconnected("the supervisor sent a message that cannot be read")
    return found


def is_older(refusal: SubletError) -> bool:
    """Whether the other side refused this because it is older than what was said (``wire.compat``)."""
    return isinstance(refusal, InvalidRequest) and " has no field " in refusal.message


def output_head(piece: bytes) -> tuple[int, int]:
    """Which stream a piece of output is of, and its offset."""
    return piece[0], int.from_bytes(piece[1:OUTPUT_HEAD_BYTES], "big")
