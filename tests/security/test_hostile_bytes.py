"""Whatever a holder sends over its connection or makes of its token harms neither the supervisor nor others.

``SUBLET_FRAMES=100000`` sends so many frames, ``SUBLET_TOKENS=20000`` tries so many tokens; both print their seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import sublet
from sublet.client.address import find_address
from sublet.client.home import runtime_dir
from sublet.client.line import connect_data
from sublet.errors import SubletError
from sublet.values import Epoch, GuestId, LeaseId
from sublet.wire.codec import dumps
from sublet.wire.frames import FrameKind, encode
from sublet.wire.guests import Attach, Connect, GuestSpec, ListGuests, Service, Start
from sublet.wire.volumes import OpenVolume, Publish
from tests.security.conftest import Place
from tests.traces import supervisor_of, until
from tests.unit.wire.test_frames import mutated

FRAMES: Final = int(os.environ.get("SUBLET_FRAMES", "1500"))
TOKENS: Final = int(os.environ.get("SUBLET_TOKENS", "60"))
OF_A_CONNECTION: Final = 30
MEMORY_KIB_MAX: Final = 64 * 1024


def capability_of(fabric: sublet.Fabric, lease: sublet.Lease) -> str:
    token: str = fabric.request("GET", f"/v1/leases/{lease.id}/token", shape=dict)["token"]
    return token


def calls(lease: LeaseId, epoch: Epoch) -> list[bytes]:
    """Well-formed ones, from which the others are made."""
    made = (
        ListGuests(ended=True),
        Start(spec=GuestSpec(argv=("/bin/true",))),
        Attach(guest=GuestId("g-0123456789"), stdin=True),
        Connect(guest=GuestId("g-0123456789"), service=Service.WORK),
        OpenVolume(lease=lease, epoch=epoch),
        Publish(lease=lease, epoch=epoch, staging="x", manifest="m"),
    )
    return [encode(FrameKind.CALL, number, dumps(one)) for number, one in enumerate(made, start=1)]


@contextlib.contextmanager
def descriptors() -> Iterator[list[int]]:
    """Of every kind that a program can have."""
    with contextlib.ExitStack() as stack:
        left, right = (stack.enter_context(one) for one in socket.socketpair())
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        ends = [*os.pipe(), os.memfd_create("m"), os.open("/", os.O_RDONLY), os.open("/dev/null", os.O_RDWR)]
        for fd in ends:
            stack.callback(os.close, fd)
        yield [left.fileno(), right.fileno(), *(file.fileno() for file in files), *ends]


def open_in(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_after_the_welcome_any_frames_with_any_descriptors(place: Place) -> None:
    seed = random.randrange(1 << 32) if FRAMES > 10_000 else 20261123
    print(f"seed {seed}, {FRAMES} frames")
    chance, sent, connections = random.Random(seed), 0, 0
    runtime = runtime_dir(place.home.resolve())
    supervisor = supervisor_of(runtime)
    assert supervisor is not None
    address = find_address(None, None, str(place.home), os.environ, as_tenant=True)
    with place.ben.block("1MiB", ttl="1h") as lease, descriptors() as some:
        capability = capability_of(place.ben, lease)
        valid = calls(lease.id, lease.epoch)
        before = open_in(supervisor)
        while sent < FRAMES:
            if connections % 500 == 499:
                capability = capability_of(place.ben, lease)
            with connect_data(address, capability) as talk, socket.socket(fileno=os.dup(talk.fileno())) as sock:
                sock.settimeout(5.0)
                for _ in range(OF_A_CONNECTION):
                    data = mutated(chance, chance.choice(valid)) if chance.random() < 0.9 else chance.randbytes(40)
                    fds = chance.choices(some, k=chance.choice((0, 0, 0, 1, 2, 17)))
                    sent += 1
                    try:
                        socket.send_fds(sock, [data or b"\0"], fds)
                    except OSError:  # it has hung up, or waits for the rest of a message
                        break
            connections += 1
        print(f"{sent} frames over {connections} connections")
        until("descriptors that are closed again", lambda: open_in(supervisor) <= before + 2)
        with place.ana.block("1MiB") as other:
            assert other.start(["true"], cwd="/").wait(timeout=60) == 0
        assert lease.start(["true"], cwd="/").wait(timeout=60) == 0
    assert supervisor_of(runtime) == supervisor
    assert memory_kib(supervisor) < MEMORY_KIB_MAX


def changed(chance: random.Random, token: str) -> str:
    """Another token than this."""
    at = chance.randrange(len(token))
    ways: tuple[Callable[[], str], ...] = (
        lambda: token[:at] + chr(ord(token[at]) ^ 1 << chance.randrange(7)) + token[at + 1 :],
        lambda: token[:at],
        lambda: token[:at] + token[at + 1 :],
        lambda: token + token,
        lambda: token + chance.choice("Aa0=_-"),
        lambda: token[at:] + token[:at],
        lambda: token[:at] + token[at : at + 8][::-1] + token[at + 8 :],
    )
    return chance.choice(ways)()


def test_no_changed_token_of_a_lease_opens_a_connection(place: Place) -> None:
    seed = random.randrange(1 << 32) if TOKENS > 1000 else 20261123
    print(f"seed {seed}, {TOKENS} tokens")
    chance, said, token = random.Random(seed), Counter[str](), ""
    address = find_address(None, None, str(place.home), os.environ, as_tenant=True)
    with place.ben.block("1B", ttl="1h") as lease:
        for number in range(TOKENS):
            if number % 1000 == 0:
                token = capability_of(place.ben, lease)
                connect_data(address, token).close()
            tried = changed(chance, token)
            if not tried or tried.rstrip("=") == token.rstrip("="):  # none at all; padding is no part of it
                continue
            try:
                connect_data(address, tried).close()
            except SubletError as error:
                said[error.kind] += 1
            else:
                said[tried] += 1
    assert said.keys() <= {"Unauthorized", "InvalidRequest"}, (token, said)
