"""A served program: counts words, and goes on counting under the next lease.

Run it: ``sublet studio serve examples/serve_counter.py --vram 256MiB``, and ask it:
``curl -d 'one two two' http://127.0.0.1:8330/count``
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

words: Counter[str] = Counter()


def handle(request: Any) -> object:
    """One request: bytes, an iterator of bytes, or a tuple of status, headers and one of these."""
    if request.path == "/words":
        return stream()
    if request.method != "POST":
        return 405, {"allow": "POST"}, b""
    words.update(request.body.decode().split())
    said = {"words": words.total(), "lease": os.environ["SUBLET_LEASE"]}
    return 200, {"content-type": "application/json"}, json.dumps(said).encode()


def stream() -> Iterator[bytes]:
    """Piece by piece, as they are made."""
    for word, count in words.most_common():
        yield f"{word} {count}\n".encode()


def save() -> bytes:
    """Called when the lease is about to end, after the last answer."""
    return json.dumps(words).encode()


def restore(state: bytes) -> None:
    """Called with it under the next lease, before the first request."""
    words.update(json.loads(state))


if __name__ == "__main__":
    print("This is served and not run: sublet studio serve examples/serve_counter.py --vram 256MiB")
