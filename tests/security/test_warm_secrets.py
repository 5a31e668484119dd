"""What one tenant's guest was given is nowhere in the memory of the next tenant's, warm or not."""

from __future__ import annotations

import os
import random
from typing import Any, Final

import pytest

import sublet
from sublet.wire.zygote import TENANT_WARM_VARIABLE
from tests.security.conftest import office
from tests.traces import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]  # warm interpreters are made

SIZES: Final = (300, 1_000, 2_000, 3_000, 30_000, 300_000)
"""Bytes of environment and arguments; memory of each of these comes from another part of the allocators."""
PIECE: Final = 90_000
"""Below what one variable or argument may have."""
FOLLOWERS: Final = int(os.environ.get("SUBLET_FOLLOWERS", "12"))
PLAIN_EVERY: Final = 10
"""Of them one is started plainly, which takes longest."""
GIVEN_EVERY: Final = 2
"""Followers between two of the first tenant's guests."""
PATIENCE_S: Final = 60.0


def marked(what: str, size: int) -> list[str]:
    """Text that is full of the marker, in pieces. The number in it makes each one another."""
    text = " ".join(f"ANASECRET{random.getrandbits(48):012x}-{what}" for _ in range(size // 28 + 1))[:size]
    return [text[at : at + PIECE] for at in range(0, size, PIECE)]


def is_warm() -> bool:
    import sys

    return "sublet.guest.zygote" in sys.modules


def scan() -> dict[str, Any]:
    """In a guest of the next tenant: all memory of this process that ever was written to. The pattern does not match
    itself."""
    import re
    import sys

    looked, hits = 0, 0
    pattern = re.compile(rb"ANASECRET[0-9a-f]{12}-[a-z]+")
    begins = bytes(reversed(b"TERCESANA"))  # looked for first, which is quicker
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.read().splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if not line.split()[1].startswith("rw"):
                continue
            for at in range(start, end, 1 << 20):
                try:
                    memory.seek(at)
                    piece = memory.read(min(1 << 20, end - at)) or b""
                except (OSError, ValueError):  # what the kernel keeps there cannot be read
                    continue
                looked += len(piece)
                hits += len(pattern.findall(piece)) if begins in piece else 0
    return {"bytes": looked, "hits": hits, "warm": "sublet.guest.zygote" in sys.modules}


def give(lease: sublet.Lease, size: int) -> bool:
    """One guest with markers in its environment, name and arguments, and one in its command line."""
    env = {f"V{n}": piece for n, piece in enumerate(marked("env", size))}
    came_warm = lease.options(env=env, name=marked("name", min(size, 1_000))[0]).run(is_warm)
    command = lease.start(["true", *marked("argv", size)], env=env, cwd="/")
    assert command.wait(timeout=60) == 0
    return came_warm


def hash_of_a_word() -> tuple[bool, int]:
    import sys

    return "sublet.guest.zygote" in sys.modules, hash("a word")


def is_plain(n: int) -> bool:
    return n % PLAIN_EVERY == PLAIN_EVERY - 1


def interpreter_of(lease: sublet.Lease) -> int:
    """Tells the warm interpreters apart: each hashes strings with a random number of its own, as all its copies do."""
    found: list[tuple[bool, int]] = []

    def came_warm() -> bool:
        found.append(lease.options(env={"TRY": os.urandom(4).hex()}).run(hash_of_a_word))
        return found[-1][0]

    until("a warm guest", came_warm, PATIENCE_S)
    return found[-1][1]


def test_guests_of_another_tenant_find_nothing_of_what_the_first_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though all come from one warm interpreter, as they do where memory is short. (The leases have memory for all of
    them: without control groups what guests have in common counts for each.)"""
    monkeypatch.setenv(TENANT_WARM_VARIABLE, "no")
    with office() as place, place.ana.memory("1GiB") as hers, place.ben.memory("1GiB") as his:
        until("her guests are warm", lambda: give(hers, 300), PATIENCE_S)
        assert interpreter_of(hers) == interpreter_of(his), "the tenants share it"
        found: list[dict[str, Any]] = []
        given: set[int] = set()
        for n in range(FOLLOWERS):
            if n % GIVEN_EVERY == 0:
                size = SIZES[n // GIVEN_EVERY % len(SIZES)]
                given.add(size)
                assert give(hers, size), "nothing is shown by guests that were started plainly"
            options = {"OMP_NUM_THREADS": "1"} if is_plain(n) else {}  # read at a start: no warm one will do
            found.append(his.options(env={"N": str(n), **options}).run(scan))
    assert given == {*SIZES}
    assert [one["hits"] for one in found] == [0] * FOLLOWERS
    assert min(one["bytes"] for one in found) > 3_000_000
    assert [one["warm"] for one in found] == [not is_plain(n) for n in range(FOLLOWERS)]
    assert {one["warm"] for one in found} == {True, False}


def test_tenants_share_no_warm_interpreter_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TENANT_WARM_VARIABLE, "1GiB")
    with office() as place, place.ana.memory("512MiB") as hers, place.ben.memory("512MiB") as his:
        first = interpreter_of(hers)
        assert first != interpreter_of(his)
        assert first == interpreter_of(hers)
