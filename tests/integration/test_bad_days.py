"""Bad days of the machine: a full disk, a folder that cannot be used, two offices, a damaged journal, clocks that jump.

Each time a person hears one sentence of what happened and one of what to do, with the documented exit status; nothing
is changed and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.client.home import runtime_dir, socket_path
from sublet.engines.local import Office
from sublet.office.journal.files import JOURNAL_NAME
from sublet.office.journal.schema import VERSION
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, Want
from sublet.testing import HeldClock, MemoryAgent
from sublet.values import NS_PER_S, Kind, LeaseId, RequestId
from sublet.wire.version import WIRE_VERSION
from tests.commands import run_sublet
from tests.crash.office_judge import folded
from tests.crash.office_process import Call, Line, OfficeProcess, office_at
from tests.traces import LETS_GO, PATIENCE_S

MIB: Final = 1 << 20
NEED: Final = "sublet-need"
"""The key under which a left-out test says what it needed."""
DISK_BYTES: Final = 8 * MIB
FILE_BYTES: Final = MIB // 4
MANY: Final = 3000
"""Requests after which a log of four megabytes has long been full."""


@pytest.fixture
def office(tmp_path: Path) -> Iterator[OfficeProcess]:
    with office_at(tmp_path / "place") as found:
        yield found


def may(*spaces: str) -> bool:
    """Whether this user may make such namespaces."""
    return subprocess.run(["unshare", *spaces, "true"], capture_output=True).returncode == 0


def sublet(office: OfficeProcess, *words: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """What a shell gets: exit status, stdout, stderr."""
    if before:
        command = [*before, sys.executable, "-m", "sublet", *words]
        done = subprocess.run(command, env=office.env(), capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr
    env = {name: value for name, value in office.env().items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    ended = run_sublet(*words, env=env, timeout=60)
    return ended.status, ended.out.decode(), ended.err.decode()


def refused(said: str, *words: str) -> None:
    """One sentence of what happened, one of what to do; the words are in them."""
    told = ("The office is up", "Until `sublet down`")  # by the office itself, before
    lines = [line for line in said.splitlines() if not line.startswith(told)]
    assert len(lines) == 2, said
    what, do = lines
    assert re.fullmatch(r"sublet: \S.*", what), said
    assert re.fullmatch(r"  [A-Z].*\.", do), said
    for word in words:
        assert word in said, said


def is_refused(office: OfficeProcess, *words: str, before: tuple[str, ...] = (), status: int = 1) -> None:
    """Whether the office is asked for by name or would start by itself for the first lease."""
    for command in (["up", "--foreground"], ["up"], ["lease", "acquire", "--cpu", "1"]):
        got, out, err = sublet(office, *command, before=before)
        assert (got, out) == (status, ""), (command, got, out, err)
        refused(err, *words)


def lease_of(office: OfficeProcess, name: str, *, ttl: float = 600.0) -> dict[str, Any]:
    body = {"request_id": name, "wants": [{"kind": "memory", "amount": MIB}], "ttl": ttl, "renew": "always"}
    answer = office.ask("POST", "/v1/leases", body)
    assert answer.status == 201, answer
    found: dict[str, Any] = answer.doc["lease"]
    return found


def same_lease(office: OfficeProcess, lease: dict[str, Any]) -> None:
    """Still there, as it was told."""
    found = office.ask("GET", f"/v1/leases/{lease['id']}").doc["lease"]
    names = ("status", "epoch", "deadline")
    assert [found[name] for name in names] == [lease[name] for name in names]


def files_in(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, but for what an office says, locks or keeps in shared memory there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".log", ".lock") and not path.name.endswith(("-shm", "-wal"))
    }


# ---- the disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, where that may be mounted; else an ordinary one."""
    disk = tmp_path / "place"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(disk)], capture_output=True
        ).returncode
    )
    yield disk
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(office: OfficeProcess) -> Callable[[], None]:
    """Leave no room for the office; returns what makes room again. Without a disk of our own its files may not grow."""
    if os.path.ismount(office.place):
        filler = office.place / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return filler.unlink
    before = resource.prlimit(office.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(office.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
    return lambda: None


def test_an_office_on_a_full_disk_grants_nothing_more_or_ends_and_room_brings_everything_back(small_disk: Path) -> None:
    """On a disk that is full to the last byte it refuses new leases. Where its files may not grow it ends at once with
    status 1. Whatever it answered is there again when there is room."""
    with office_at(small_disk) as office:
        assert office.start()
        kept = lease_of(office, "kept")
        make_room = fill(office)
        told = []
        for n in range(MANY):
            body = {"request_id": f"r{n}", "wants": [{"kind": "memory", "amount": MIB}], "ttl": 600, "wait": 0}
            answer = office.line().ask(Call(method="POST", path="/v1/leases", body=body))
            if answer is None:
                break
            if answer.status == 201:
                told.append(answer.doc["lease"])
            elif os.path.ismount(small_disk):
                assert "the disk of the office is full" in answer.doc["error"]["message"]
                break
        else:
            raise AssertionError("the disk is full and the office grants more")
        if os.path.ismount(small_disk):
            same_lease(office, kept)
            make_room()
        else:
            assert office.ended() == 1
            make_room()
            refused(office.said, "the office stopped", "Free space on the disk")
            assert told, "the disk was full too early to tell"
            assert office.start()
        same_lease(office, kept)
        for lease in told[-1:]:
            same_lease(office, lease)
        shown = {view["id"] for view in office.ask("GET", "/v1/leases").doc}
        assert shown >= {lease["id"] for lease in told}
        office.stop()


def test_an_office_does_not_begin_on_a_full_disk(small_disk: Path) -> None:
    """And leaves nothing half-made: with room the same folder serves."""
    with office_at(small_disk) as office:
        if os.path.ismount(small_disk):
            make_room = fill(office)
            before: tuple[str, ...] = ()
        else:
            make_room, before = (lambda: None), ("sh", "-c", 'ulimit -f 4; exec "$@"', "sh")
        got, out, err = sublet(office, "up", "--foreground", before=before)
        assert (got, out) == (1, "")
        refused(err, "a new journal", "disk")
        make_room()
        assert not list(office.home.glob("journal.db*"))
        assert office.start()
        office.stop()


# ---- the state folder ----


@pytest.mark.needs("setpriv", "unshare")
def test_a_state_folder_that_cannot_be_written_is_refused(office: OfficeProcess) -> None:
    """By its rights, which hold root only without the right to pass over them; or by a read-only mount."""
    assert office.start()
    kept = lease_of(office, "kept")
    office.stop()
    left = files_in(office.home)
    befores: list[tuple[str, ...]] = [("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()]
    if os.geteuid() == 0 and may("--mount"):
        home = f'"{office.home}"'
        script = LETS_GO + f'mount --bind {home} {home} && mount -o remount,bind,ro {home} && exec "$@"'
        befores.append(("unshare", "--mount", "sh", "-c", script, "sh"))
    office.home.chmod(0o500)
    for before in befores:
        is_refused(office, str(office.home), before=before)
        office.home.chmod(0o700)
    assert files_in(office.home) == left
    assert office.start()
    same_lease(office, kept)


def test_a_state_folder_of_somebody_else_is_refused(office: OfficeProcess) -> None:
    if os.geteuid() == 0:
        office.home.mkdir(parents=True)
        os.chown(office.home, 12345, 12345)
    else:
        office.home = Path("/etc")
    left = os.listdir(office.home)
    is_refused(office, str(office.home), "SUBLET_HOME", status=2)
    assert os.listdir(office.home) == left


def test_a_second_office_on_the_same_folder_is_refused(office: OfficeProcess, tmp_path: Path) -> None:
    """Also when it cannot see the first one's socket: the journal has one owner."""
    assert office.start()
    kept = lease_of(office, "kept")
    got, out, err = sublet(office, "up", "--foreground")
    assert (got, out) == (1, "")
    refused(err, f"pid {office.pid}", "runs already")
    hidden = tmp_path / "hidden.sock"
    socket_path(office.home).rename(hidden)
    is_refused(office, f"another office (pid {office.pid})", "sublet down")
    hidden.rename(socket_path(office.home))
    same_lease(office, kept)


# ---- the journal ----


@pytest.fixture
def left(office: OfficeProcess) -> dict[str, Any]:
    """A lease in the journal of an office that ended."""
    assert office.start()
    lease = lease_of(office, "kept")
    office.stop()
    return lease


def test_a_journal_of_a_newer_version_is_left_alone(office: OfficeProcess, left: dict[str, Any]) -> None:
    path = office.home / JOURNAL_NAME
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = files_in(office.home)
    is_refused(office, f"version {VERSION + 1}", "newer Sublet")
    assert files_in(office.home) == before
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION}")
    assert office.start()
    same_lease(office, left)


def test_a_damaged_page_is_found_and_the_journal_left_as_it_is(office: OfficeProcess, left: dict[str, Any]) -> None:
    """Whichever page it is. With the right bytes back, or a backup, it goes on."""
    path = office.home / JOURNAL_NAME
    whole = path.read_bytes()
    pages = len(whole) // 4096
    for page in range(pages):
        at = page * 4096
        used = max(n for n in range(at, at + 4096) if whole[n] or n == at)
        damaged = bytearray(whole)
        damaged[used - 40 : used] = bytes(byte ^ 0x5A for byte in whole[used - 40 : used])
        if used - 40 < at:  # an empty table: its header is all there is
            damaged = bytearray(whole)
            damaged[at : at + 4] = b"\xff\xff\xff\xff"
        path.write_bytes(damaged)
        before = files_in(office.home)
        got, out, err = sublet(office, "up", "--foreground")
        assert (got, out) == (1, ""), (page, err)
        refused(err, "damaged", "sublet restore")
        assert files_in(office.home) == before
    path.write_bytes(whole)
    assert office.start()
    same_lease(office, left)


# ---- the clocks ----


def held(home: Path, clock: HeldClock, story: Callable[[Office], Coroutine[Any, Any, None]]) -> None:
    """An office in this process, on a clock of ours, for the length of a story."""

    async def life() -> None:
        office = Office(home, host_gpus="2x4GiB", clock=clock, make_agent=MemoryAgent)
        await office.start()
        try:
            await story(office)
        finally:
            await office.close()

    asyncio.run(life())
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


async def lend(office: Office, name: str, ttl_s: int) -> LeaseRecord:
    command = cmd.Acquire(
        tenant=LOCAL_TENANT,
        lease=LeaseId(name),
        request_id=RequestId(name),
        wants=(Want(kind=Kind.MEMORY, amount=MIB),),
        ttl_ns=ttl_s * NS_PER_S,
        wait_ns=0,
    )
    answer = await office.driver.submit(command)
    assert isinstance(answer, Granted)
    return answer.lease


async def look(office: Office) -> None:
    """As the beat of the office does, which comes with real time only."""
    await office.driver.submit(cmd.Tick())
    await asyncio.sleep(0.05)


async def ended(office: Office, lease: LeaseRecord) -> None:
    """Its end is in the journal once what it had is seen to be free."""
    limit_s = time.monotonic() + PATIENCE_S
    while lease.status != "ended":
        assert time.monotonic() < limit_s, lease
        await look(office)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year ahead, two years back, while the office runs and while it does not: deadlines are not of that clock."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    clock = HeldClock()
    home = tmp_path / "home"
    year_s = 365 * 86_400.0

    async def first(office: Office) -> None:
        lease = await lend(office, "l1", 60)
        deadline_ns = lease.deadline_ns
        for jump_s in (year_s, -2 * year_s):
            clock.jump_wall(jump_s)
            clock.advance("1s")
            await look(office)
            assert (lease.status, lease.deadline_ns) == ("active", deadline_ns)
        assert deadline_ns == lease.claimed_at_ns + 60 * NS_PER_S if lease.claimed_at_ns else False

    async def second(office: Office) -> None:
        lease = office.driver.ledger.state.leases[LeaseId("l1")]
        assert lease.status == "active"
        assert lease.extended_ns == 0
        clock.advance("57s")
        await look(office)
        assert lease.status == "active"
        clock.advance("2s")
        await ended(office, lease)
        assert lease.end is not None
        assert lease.end.reason == "expired"

    held(home, clock, first)
    clock.jump_wall(-year_s)
    held(home, clock, second)


def test_another_boot_gives_a_lease_what_was_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instants of another boot mean nothing here, so what counts is how much was left, and never more than one TTL is
    added by that."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    clock = HeldClock()
    home = tmp_path / "home"

    async def first(office: Office) -> None:
        await lend(office, "l1", 60)
        clock.advance("20s")
        await lend(office, "l2", 60)

    async def second(office: Office) -> None:
        for name, left_s in (("l1", 40), ("l2", 60)):
            lease = office.driver.ledger.state.leases[LeaseId(name)]
            assert lease.status == "active"
            assert lease.deadline_ns is not None
            left_ns = lease.deadline_ns - clock.now_ns()
            assert left_s * NS_PER_S <= left_ns <= (left_s + 3) * NS_PER_S, (name, left_ns / NS_PER_S)
            assert lease.extended_ns <= lease.ttl_ns
        clock.advance("45s")
        leases = office.driver.ledger.state.leases
        await ended(office, leases[LeaseId("l1")])
        assert leases[LeaseId("l2")].status == "active"

    held(home, clock, first)
    clock.reboot()
    held(home, clock, second)


@pytest.mark.needs("unshare")
def test_another_time_namespace_is_another_clock(office: OfficeProcess, request: pytest.FixtureRequest) -> None:
    """CLOCK_BOOTTIME a day ahead: taken for the same clock, every lease would have ended; taken for another, none has
    lost anything."""
    spaces = ("--time",) if os.geteuid() == 0 else ("--user", "--map-current-user", "--time")
    if not may(*spaces):
        request.node.user_properties.append((NEED, "time namespaces"))
        pytest.skip("needs time namespaces, which this user may not make")
    ahead = ("unshare", *spaces, "--boottime", "86400", "--fork", "--kill-child")
    assert office.start()
    began_s = time.monotonic()
    before = lease_of(office, "kept")
    office.stop()
    assert office.start(before=ahead)
    found = office.ask("GET", f"/v1/leases/{before['id']}").doc["lease"]
    took_s = time.monotonic() - began_s
    assert found["status"] == "active"
    assert found["epoch"] == before["epoch"]
    assert found["deadline"] - before["deadline"] > 86_000
    assert 590 - took_s < found["remaining"] <= 603
    office.kill()
    office.ended()
    state, _ = folded(office.home / JOURNAL_NAME)
    assert state.leases[before["id"]].extended_ns <= 3 * NS_PER_S


# ---- versions and platforms ----


def run_python(office: OfficeProcess, code: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=office.env(), capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_a_client_of_another_wire_version_is_told_which_side_is_older(office: OfficeProcess) -> None:
    """From the command line, from Python and on the wire; nothing is changed by its request."""
    assert office.start()
    head = office.ask("GET", "/v1/status").doc["audit_head"]
    newer = "import sublet.wire.version as v; v.WIRE_VERSION += 2; import sys; "
    code, out, err = run_python(office, newer + "from sublet.cli import main; sys.exit(main(['lease', 'ls']))")
    assert (code, out) == (1, "")
    refused(err, "wire version", "Upgrade the office")
    code, out, err = run_python(
        office,
        newer
        + "import sublet\ntry: sublet.connect(start=False)\nexcept sublet.Unsupported as e: print(e.message, e.do)",
    )
    assert (code, err) == (0, "")
    assert "version" in out
    with socket_line(office) as (ask, answers):
        ask(f"sublet-wire: {WIRE_VERSION + 2}")
        assert b" 501 " in answers()
    assert office.ask("GET", "/v1/status").doc["audit_head"] == head


@contextlib.contextmanager
def socket_line(office: OfficeProcess) -> Iterator[tuple[Callable[[str], None], Callable[[], bytes]]]:
    """A raw line, for headers that no client of ours sends."""
    line = Line(socket_path(office.home))
    body = b'{"request_id":"x","wants":[{"kind":"cpu","amount":1}]}'

    def ask(header: str) -> None:
        head = f"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{header}\r\n\r\n"
        line.sock.sendall(head.encode() + body)

    yield ask, lambda: line.sock.recv(1 << 16)
    line.close()


def test_an_office_is_refused_where_there_is_no_linux(office: OfficeProcess) -> None:
    """By name, for the first lease, and in Python; nothing is made."""
    for words in (["up"], ["up", "--foreground"], ["lease", "acquire", "--cpu", "1"]):
        code, out, err = run_python(
            office, f"import sys; sys.platform = 'darwin'; from sublet.cli import main; sys.exit(main({words}))"
        )
        assert (code, out) == (1, ""), (words, err)
        refused(err, "Linux", "SUBLET_URL")
    assert not office.home.exists()
