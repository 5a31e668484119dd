"""The home of a tenant's guest is memory of its lease, and no guest can fill the machine's disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.values import MIB
from sublet.wire.usage_counters import TALLY_BYTES
from tests.security.conftest import Place, going_by
from tests.traces import until

POLICY = '[lease]\nhome = "8MiB"\n'


@pytest.fixture(scope="module")
def small(place: Place) -> Iterator[Place]:
    with going_by(place, POLICY):
        yield place


def on_host(place: Place) -> int:
    """Bytes of the machine's disk, or of its ``/run``, in the folders of leases that have guests."""
    found = 0
    for folder, _, files in os.walk(runtime_dir(place.home.resolve()) / "leases"):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found += (Path(folder) / name).lstat().st_blocks * 512
    return found


def until_little_is_on_host(place: Place) -> None:
    """Folders of leases that have just ended may still be there, and go; what this one has written there would stay."""
    until("nothing much on the host", lambda: on_host(place) < MIB)


def output_of(lease: sublet.Lease, script: str) -> str:
    guest = lease.start(["sh", "-c", script], cwd="/")
    guest.wait(timeout=60)
    return b"".join(piece.data for piece in guest.output()).decode()


def test_a_full_home_takes_nothing_of_the_host(small: Place) -> None:
    with small.ben.block("1B") as lease:
        guest = lease.start(
            ["sh", "-c", "cd; exec 2>&1; head -c 64M /dev/zero > f; stat -c %s f; echo full; sleep 60"], cwd="/"
        )
        said = ""
        for piece in guest.output():
            said += piece.data.decode()
            if "full" in said:
                break
        assert "No space left on device" in said
        assert str(8 * MIB) in said
        until_little_is_on_host(small)


def test_a_home_has_no_more_files_than_room(small: Place) -> None:
    with small.ben.block("1B") as lease:
        said = output_of(
            lease, "cd; i=0; while true > f$i; do i=$((i+1)); [ $i -lt 9000 ] || exit; done; echo $i files"
        )
        made = int(said.split()[-2])
        assert 1000 < made < 2100, said
        until_little_is_on_host(small)


def test_every_guest_finds_an_empty_home_that_is_its_own(small: Place) -> None:
    with small.ben.block("1MiB") as lease:
        script = 'cd; pwd; echo "$HOME"; ls -A; stat -c "%u %a" .; id -u; echo x > f; echo y > "$SUBLET_BLOCK"/f'
        first, second = output_of(lease, script).split(), output_of(lease, script).split()
        assert first == second
        assert first[0] == first[1]
        assert first[2:] == [first[4], "700", first[4]]


def test_beside_what_is_counted_nothing_is_written_on_the_host(small: Place) -> None:
    """At the most into memory of the guest's own."""
    with small.ben.gpu(min_vram="64MiB") as lease:
        said = output_of(lease, 'cd "$(dirname "$SUBLET_TALLY")" && ls -A; : > more; ln -s rows link')
        assert "rows" in said.split()
        leases = runtime_dir(small.home.resolve()) / "leases"
        names = {name for _, folders, files in os.walk(leases) for name in (*folders, *files)}
        assert "rows" in names
        assert not names & {"more", "link"}


def test_who_fills_what_is_counted_is_ended(small: Place) -> None:
    with small.ben.gpu(min_vram="64MiB") as lease:
        guest = lease.start(["sh", "-c", 'head -c 32M /dev/zero >> "$SUBLET_TALLY"; sleep 600'], cwd="/")
        assert guest.wait(timeout=90) != 0
        said = b"".join(piece.data for piece in guest.output()).decode()
        assert "it wrote into the file of what its lease has counted" in said
        until("what it wrote is cut off", lambda: on_host(small) <= MIB + TALLY_BYTES)
