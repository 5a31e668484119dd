"""A whole office as a process of its own, spoken to through its socket, killed, restarted and misused."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sublet.client.home import runtime_dir, socket_path
from sublet.engines import local
from sublet.errors import InvalidRequest, Unsupported
from sublet.node.agent.tokens import verify
from sublet.office.api.server import HEAD_MAX_BYTES
from sublet.office.api.signing import Signer
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.commands import SetBudget
from sublet.office.ledger.records import GroupRecord
from sublet.office.ledger.state import Books
from sublet.testing import MemoryAgent
from sublet.values import BudgetWindow, GroupId, ReservationId, TenantId
from sublet.wire import unix
from tests.commands import start_program
from tests.traces import plain_env

GIB = 1 << 30
MIB = 1 << 20
PATIENCE_S = 90.0

PROGRAM = """
import sys
from pathlib import Path
from sublet.engines import local
{more}
sys.exit(local.run_office(Path(sys.argv[1]), host_gpus="1x4GiB", ready=lambda: print("ready", flush=True), {options}))
"""


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("office", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = unix.connect(os.fspath(self._path), timeout_s=PATIENCE_S)


class Office:
    """The process, and the way to talk to it."""

    def __init__(self, home: Path, *, more: str = "", options: str = "") -> None:
        self.home = home
        env = {**plain_env(), "XDG_STATE_HOME": str(home.parent / "state")}
        text = PROGRAM.format(more=more, options=options)
        ours, theirs = os.pipe()
        with open(theirs, "wb") as out, tempfile.NamedTemporaryFile(dir=home.parent, delete=False) as err:
            self.process = start_program(text, str(home), env=env, out=out, err=err.file)
        self._said = Path(err.name)
        self.socket = socket_path(home)
        with open(ours, "rb") as said:
            self.ready = said.readline() == b"ready\n"

    def ask(self, method: str, path: str, body: object = None, token: str | None = None) -> Answer:
        connection = Connection(self.socket)
        try:
            headers = {} if token is None else {"Authorization": f"Bearer {token}", "Sublet-As-Tenant": "1"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return Answer(response.status, response.read())
        finally:
            connection.close()

    def acquire(self, request: str, **more: object) -> Any:
        body = {"request_id": request, "wants": [{"kind": "gpu", "amount": GIB}], **more}
        return self.ask("POST", "/v1/leases", body).json

    def raw(self, data: bytes, *, and_end: bool = True) -> bytes:
        """Send bytes as they are (and say that no more will come); what comes back until the office hangs up."""
        with unix.connect(os.fspath(self.socket), timeout_s=PATIENCE_S) as sock:
            received = b""
            # It may have seen enough before all was sent, and its answer is here to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
                if and_end:
                    sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while piece := sock.recv(65536):
                    received += piece
            return received

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit status, and what it said on stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        status = self.process.wait(timeout=PATIENCE_S)
        return status, self._said.read_text()


Start = Callable[..., Office]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts offices of one home, one after another, and leaves nothing behind."""
    started: list[Office] = []
    home = (tmp_path / "home").resolve()

    def one(**how: str) -> Office:
        started.append(Office(home, **how))
        return started[-1]

    yield one
    for office in started:
        if office.process.poll() is None:
            office.process.kill()
            office.wait()
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


# ---- living and dying ----


def test_the_socket_is_the_owners_alone(start: Start) -> None:
    """Folder 0700, socket 0600, state folder 0700: no token is needed because nobody else gets that far."""
    office = start()
    assert office.ready
    assert stat.S_IMODE(office.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(office.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(office.home.stat().st_mode) == 0o700
    assert office.ask("GET", "/v1/tenants").status == 200
    status = office.ask("GET", "/v1/status").json
    assert (status["pid"], status["embedded"]) == (office.process.pid, False)
    assert office.end() == (0, "")
    assert not office.socket.exists()


def test_a_restart_keeps_leases_and_their_deadlines(start: Start) -> None:
    """SIGTERM, then another office: the same lease, epoch and deadline; renewals go on; no epoch comes twice."""
    first = start()
    lease = first.acquire("one", ttl=300)["lease"]
    place = first.acquire("two")
    assert place["answer"] == "place"
    assert first.end() == (0, "")
    second = start()
    again = second.ask("GET", f"/v1/leases/{lease['id']}").json["lease"]
    assert (again["status"], again["epoch"], again["deadline"]) == ("active", lease["epoch"], lease["deadline"])
    assert second.ask("GET", f"/v1/leases/{place['lease']['id']}").json["position"] == 1
    renewed = second.ask("POST", f"/v1/leases/{lease['id']}/renew", {"epoch": lease["epoch"]})
    assert renewed.json["deadline"] > lease["deadline"]
    second.ask("POST", f"/v1/leases/{lease['id']}/release", {})
    ready = second.ask("GET", f"/v1/leases/{place['lease']['id']}?wait=60&after=queued").json["lease"]
    assert ready["epoch"] > lease["epoch"]


def test_what_was_answered_survives_a_kill(start: Start) -> None:
    """SIGKILL between requests: every answered grant is there, a repeated request has one effect, the chain holds."""
    office = start()
    wants = [{"kind": "memory", "amount": 4096}]
    leases = {f"r{i}": office.acquire(f"r{i}", wants=wants)["lease"]["id"] for i in range(20)}
    assert office.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert office.socket.exists(), "a killed office leaves its socket behind"
    office = start()
    assert office.ready
    assert {request: office.acquire(request, wants=wants)["lease"]["id"] for request in leases} == leases
    assert office.ask("GET", "/v1/audit/verify").json["ok"]
    assert office.ask("GET", "/v1/status").json["live"] == 20


def test_a_second_office_of_the_same_folder_names_the_first(start: Start) -> None:
    """And does not touch its socket."""
    first = start()
    second = start()
    assert not second.ready
    status, said = second.wait()
    assert status != 0
    assert f"pid {first.process.pid}" in said
    assert first.ask("GET", "/v1/hello").status == 200


def test_a_journal_that_cannot_be_written_ends_the_office_with_a_word_of_advice(start: Start) -> None:
    """Exit status 1, what happened and what to do; what could not be made durable is never answered."""
    office = start(
        more="""
from sublet.office.ledger.events import Queued
from sublet.office.journal.journal import Journal
from sublet.errors import JournalFailed
commit, left = Journal.commit, [1]
def failing(self, events, now):
    left[0] -= sum(isinstance(event, Queued) for event in events)
    if left[0] < 0:
        raise JournalFailed("no space left on device")
    commit(self, events, now)
Journal.commit = failing
"""
    )
    assert office.acquire("one")["answer"] == "grant"
    with pytest.raises((http.client.HTTPException, OSError)):
        office.acquire("two")
    status, said = office.wait()
    assert status == 1
    what, do = said.splitlines()
    assert what == "sublet: the office stopped: no space left on device; nothing was answered on it"
    assert do.startswith("  Free space on the disk")
    again = start()
    assert again.ready, "what was durable before is still good"


def test_down_ends_it_after_its_leases(start: Start) -> None:
    """``now``: leases are ended and torn down first, the answer says how many there were, the process ends cleanly."""
    office = start()
    office.acquire("one")
    refused = office.ask("POST", "/v1/down", {"how": "idle"})
    assert (refused.status, "1 lease" in refused.json["error"]["message"]) == (400, True)
    assert office.ask("POST", "/v1/down", {"how": "now"}).json == {"leases": 1}
    assert office.wait() == (0, "")
    assert start().ask("GET", "/v1/status").json["live"] == 0


def test_an_embedded_office_ends_when_nobody_needs_it(start: Start, tmp_path: Path) -> None:
    """With a lease it stays; without lease, queue, quarantine or request it goes, and cleanly."""
    begun = tmp_path / "begun"  # not sooner: on a machine that is busy the first request may be long in coming
    soon = f"""
import os
look = local.Office._end_if_idle
def looks(self):
    local.IDLE_ENDS_S = 0.2 if os.path.exists({str(begun)!r}) else 600.0
    look(self)
local.Office._end_if_idle, local.IDLE_LOOK_S = looks, 0.05
"""
    office = start(more=soon, options="embedded=True")
    lease = office.acquire("one", ttl=600)["lease"]
    begun.touch()
    time.sleep(1.0)
    assert office.process.poll() is None
    office.ask("POST", f"/v1/leases/{lease['id']}/release", {})
    assert office.wait() == (0, "")


def test_requests_in_progress_end_with_the_office(start: Start) -> None:
    """A long poll and a stream are open when it is told to end: both are finished properly, none holds it up."""
    office = start()
    office.acquire("one")
    place = office.acquire("two")["lease"]["id"]
    asking = [Connection(office.socket) for _ in range(2)]
    asking[0].request("GET", f"/v1/leases/{place}?wait=60")
    asking[1].request("GET", f"/v1/events?lease={place}")  # the last: where this is open, so is the other
    deadline = time.monotonic() + PATIENCE_S
    while "sublet_event_streams 1.0" not in office.ask("GET", "/metrics").body.decode():
        assert time.monotonic() < deadline
    assert office.end() == (0, "")
    for connection in asking:
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (200, True)
        connection.close()


# ---- talking ----


def test_a_queued_holder_hears_over_the_socket(start: Start) -> None:
    """Place, then ready, then (claimed) active, as they happen."""
    office = start()
    first = office.acquire("one")["lease"]
    second = office.acquire("two")["lease"]
    connection = Connection(office.socket)
    connection.request("GET", f"/v1/events?lease={second['id']}")
    stream = connection.getresponse()
    assert next_event(stream) == "place"
    office.ask("POST", f"/v1/leases/{first['id']}/release", {})
    assert next_event(stream) == "ready"
    office.ask("POST", f"/v1/leases/{second['id']}/claim", {})
    assert next_event(stream) == "active"
    connection.close()


def next_event(stream: http.client.HTTPResponse) -> str:
    while True:
        line = stream.readline().decode()
        if line.startswith("event: "):
            return line.removeprefix("event: ").strip()
        assert line, "the stream ended"


def test_a_token_has_its_tenants_rights_on_the_owners_socket_too(start: Start) -> None:
    """Without a token the owner, with one exactly its tenant, with a wrong one nobody."""
    office = start()
    token = office.ask("POST", "/v1/tenants", {"id": "ann"}).json["token"]
    assert office.ask("GET", "/v1/tenants").status == 200
    assert office.ask("GET", "/v1/tenants", token=token).status == 401
    assert office.ask("GET", "/v1/leases", token=token).json == []
    assert office.ask("GET", "/v1/leases", token=token + "x").status == 401
    assert token not in (office.home / "journal.db").read_bytes().decode("latin-1")
    office.end()
    assert start().ask("GET", "/v1/leases", token=token).status == 200, "it is known after a restart"


def test_a_capability_token_is_good_offline(start: Start) -> None:
    """Whoever has the office's public key can judge it, also after the office has gone."""
    office = start()
    granted = office.acquire("one", token=True)
    office.end()
    journal = Signer.open(office.home / "keys", "")
    claims = verify(granted["token"], journal.public_keys, int(time.time()))
    assert (claims.lease, list(claims.epoch)) == (granted["lease"]["id"], granted["lease"]["epoch"])


def test_the_books_balance_over_http(start: Start) -> None:
    """Bill, audit and backup come from the same journal; what is held is billed up to now, what ended up to its end."""
    office = start()
    token = office.ask("POST", "/v1/tenants", {"id": "ann"}).json["token"]
    lease = office.acquire("one", labels={"team": "x"})["lease"]
    office.ask("POST", f"/v1/leases/{lease['id']}/release", {})
    office.ask("GET", f"/v1/leases/{lease['id']}?wait=60&after=ending")  # until what it had is looked at, and free
    (line,) = office.ask("GET", "/v1/bill").json
    assert (line["key"], line["tenant"], line["live"], line["end"]) == (lease["id"], "local", False, "released")
    assert line["gpu_seconds"] == line["held_seconds"] > 0
    assert office.ask("GET", "/v1/bill?by=label:team").json[0]["key"] == "x"
    assert office.ask("GET", "/v1/bill", token=token).json == []
    assert office.ask("GET", "/v1/bill?format=csv").body.startswith(b"key,tenant,")
    office.acquire("two")
    lines = office.ask("GET", "/v1/bill?by=tenant").json
    assert [(one["key"], one["leases"], one["live"]) for one in lines] == [("local", 2, True)]
    target = office.home.parent / "copy.db"
    assert office.ask("POST", "/v1/backup", {"path": str(target)}).json["bytes"] == target.stat().st_size
    assert office.ask("POST", "/v1/backup", {"path": str(target)}).status >= 400, "nothing is overwritten"
    assert office.ask("POST", "/v1/backup", {"path": "relative.db"}).status == 400


def test_many_clients_at_once_get_what_there_is_and_no_more(start: Start) -> None:
    """Sixteen clients, one device: never two holders, each acquire one of the four answers, everything given back."""
    office = start()
    granted: list[int] = []

    def client(number: int) -> None:
        connection = Connection(office.socket)
        for turn in range(10):
            body = {"request_id": f"{number}-{turn}", "wants": [{"kind": "gpu", "amount": GIB}], "wait": 0}
            connection.request("POST", "/v1/leases", json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert (response.status, answer["answer"]) in ((201, "grant"), (409, "refusal"))
            if answer["answer"] == "grant":
                granted.append(number)
                connection.request("POST", f"/v1/leases/{answer['lease']['id']}/release", "{}")
                assert connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert granted
    bill = office.ask("GET", "/v1/bill").json
    assert len(bill) == len(granted)
    held = sum(line["held_seconds"] for line in bill)
    assert held <= office.ask("GET", "/v1/status").json["uptime"], "one device was held more than once at a time"


# ---- bad input at the socket ----


def test_what_is_not_http_is_told_so_and_harms_nobody(start: Start) -> None:
    """Garbage, broken request lines, huge and endless headers, huge bodies: one clear answer, then it hangs up."""
    office = start()
    status = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"
    assert office.raw(b"\x00\xff\x00garbage\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert office.raw(b"GET /v1/status HTTP/9.9\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert office.raw(b"GET  \r\n\r\n").startswith(b"HTTP/1.1 400")
    large = office.raw(status + b"X: " + b"y" * HEAD_MAX_BYTES + b"\r\n\r\n")
    assert large.startswith(b"HTTP/1.1 431")
    assert json.loads(large.partition(b"\r\n\r\n")[2])["error"]["do"]
    office.raw(status + b"X: " + b"y" * (64 << 20))  # it hangs up long before the end, perhaps before we read why
    many = b"".join(b"X%d: y\r\n" % n for n in range(20_000))
    assert office.raw(status + many + b"\r\n").startswith(b"HTTP/1.1 431")
    post = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\n"
    assert office.raw(post + b"Content-Length: 99999999\r\n\r\n{}").startswith(b"HTTP/1.1 413")
    assert office.raw(post + b"Content-Length: -1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert b"200" not in office.raw(post + b"Content-Length: 100\r\n\r\n{}")[:20], "half a message is none"
    websocket = status + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert office.raw(websocket).startswith(b"HTTP/1.1 200")
    resident = int(Path(f"/proc/{office.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 200 << 20, "what strangers sent was kept"
    page = office.ask("GET", "/metrics").body.decode()
    assert 'sublet_limits_hit_total{limit="head_bytes"}' in page
    assert office.ask("GET", "/v1/status").json["live"] == 0
    assert office.end() == (0, "")


def test_requests_in_one_breath_are_answered_in_their_order(start: Start) -> None:
    """Pipelining: three requests in one packet, three answers, each whole."""
    office = start()
    one, last = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n", b"GET %s HTTP/1.1\r\nConnection: close\r\n\r\n"
    data = office.raw(one % b"/v1/hello" + one % b"/v1/nothing" + last % b"/v1/leases", and_end=False)
    assert [piece[:3] for piece in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


# ---- what it will not start on ----


def test_an_office_runs_on_linux_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere one clear sentence, and nothing was made."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unsupported, match="Linux"):
        local.run_office(tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("rates", ["gpu = -1", "gpu = 'x'", "not toml at all"])
def test_prices_that_cannot_be_read_are_said_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: str
) -> None:
    """A wrong bill is worse than no office; and what was opened is closed again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "rates.toml").write_text(rates)

    async def story() -> None:
        with pytest.raises(InvalidRequest):
            await local.Office(home).start()
        (home / "rates.toml").write_text("gpu = 2")
        office = local.Office(home)
        await office.start()
        assert office.service.rates.gpu == 2_000_000
        await office.close()

    asyncio.run(story())
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


def test_an_office_with_budgets_does_not_start_with_prices_that_cannot_count_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another currency, or a price that is not there any more; with the old prices it goes on as it was."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    whole = 'currency = "EUR"\ngpu = 2\ncpu = 0.02\nmemory = 0.002\nblock = 0\n'

    async def story() -> None:
        (home / "rates.toml").write_text(whole)
        office = local.Office(home)
        await office.start()
        set_budget = SetBudget(tenant=TenantId("local"), per=BudgetWindow.MONTH, amount=5_000_000, currency="EUR")
        await office.driver.submit(set_budget)
        await office.close()
        for wrong, says in (
            (whole.replace("EUR", "USD"), "rates.toml counts in USD, and the budget of tenant local is in EUR"),
            (whole.replace("cpu = 0.02\n", ""), "rates.toml has no price of cpu"),
        ):
            (home / "rates.toml").write_text(wrong)
            with pytest.raises(InvalidRequest, match=says):
                await local.Office(home).start()
        (home / "rates.toml").write_text(whole.replace("gpu = 2", "gpu = 3"))
        office = local.Office(home)
        await office.start()
        books = office.driver.ledger.state.books
        assert [budget.amount for budget in books.budgets.values()] == [5_000_000]
        assert books.prices is not None
        assert (books.prices.gpu, books.prices.currency) == (3_000_000, "EUR")
        await office.close()

    asyncio.run(story())
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


def test_an_office_goes_by_the_groups_reservations_and_budgets_of_its_file_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts with fewer devices than floors need that it knew; a floor that rises above what there is stops it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    file = home / "policy.toml"
    whole = (
        "[group.course]\nweight = 3\nfloor = 2\n[budget.group.course]\nmonth = 5\n"
        '[reservation.lab]\ngroup = "course"\ngpus = 1\nwhen = "every day 00:00-24:00"\nzone = "Europe/Berlin"\n'
    )

    async def books_of(gpus: int) -> Books:
        office = local.Office(home, host_gpus=f"{gpus}x1GiB", make_agent=MemoryAgent)
        await office.start()
        await office.close()
        return office.driver.ledger.state.books

    async def story() -> None:
        file.write_text(whole.replace("floor = 2", "floor = 9"))
        with pytest.raises(InvalidRequest, match=f"{file}: floors would add up to 9 GPUs, and there are 2"):
            await books_of(2)
        file.write_text(whole)
        for gpus in (2, 1):
            books = await books_of(gpus)
            assert books.groups[GroupId("course")] == GroupRecord(id=GroupId("course"), weight=3, floor=2)
            assert [budget.amount for budget in books.budgets.values()] == [5_000_000]
            assert len(books.reservations[ReservationId("lab")].spans) > 300
        file.unlink()
        books = await books_of(2)
        assert (books.groups, books.budgets, books.reservations) == ({}, {}, {})

    asyncio.run(story())
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


def test_a_device_keeps_what_its_leases_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started anew with smaller devices. A lease on a device that is gone has ended, and nobody is offered it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"

    async def story() -> None:
        from sublet.lease_end import EndReason
        from sublet.office.api.to_wire import device_view
        from sublet.office.ledger.commands import Acquire
        from sublet.office.ledger.records import LOCAL_TENANT, Want
        from sublet.values import Exclusivity, Kind, LeaseId, RequestId, ResourceId

        first = local.Office(home, host_gpus="2x4GiB")
        await first.start()
        for name in ("a", "b"):
            want = Want(kind=Kind.GPU, amount=3 * GIB, exclusivity=Exclusivity.SHARED)
            command = Acquire(
                tenant=LOCAL_TENANT,
                lease=LeaseId(name),
                request_id=RequestId(name),
                wants=(want,),
                ttl_ns=300 * 10**9,
            )
            await first.driver.submit(command)
        await first.close()
        second = local.Office(home, host_gpus="1x1GiB")
        await second.start()
        state = second.driver.ledger.state
        found = {
            resource.id: (resource.device.capacity, resource.state.value, resource.detail)
            for resource in state.resources.values()
            if resource.device.kind is Kind.GPU
        }
        gone = (4 * GIB, "lost", "the device is no longer there")
        assert found == {"local/gpu0": (3 * GIB, "free", ""), "local/gpu1": gone}
        on_gone = state.leases[LeaseId("b")]
        assert on_gone.end is not None
        assert on_gone.end.reason is EndReason.DEVICE_LOST
        assert state.leases[LeaseId("a")].end is None
        page = second.service.counting.metrics.page().decode()
        assert "sublet_lost 1.0" in page
        assert f'sublet_capacity{{kind="gpu"}} {3 * GIB / 1e9}e+09' in page
        views = {view.id: view for view in (device_view(one, None) for one in state.resources.values())}
        assert (views["local/gpu1"].state, views["local/gpu1"].free) == ("lost", 0)
        check_books(state)
        await second.close()
        third = local.Office(home, host_gpus="2x4GiB")
        await third.start()
        resource = third.driver.ledger.state.resources[ResourceId("local/gpu1")]
        assert (resource.state.value, resource.detail) == ("free", "")
        check_books(third.driver.ledger.state)
        await third.close()

    asyncio.run(story())
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


def test_what_is_offered_of_the_disk_shrinks_as_it_fills_and_leases_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a small file system that other programs write to as well."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(local, "DISK_LOOK_S", 0.01)
    home = tmp_path / "home"
    free = 45 * MIB  # 5 MiB of it are kept back, besides the file that is reserved for the journal
    statvfs = os.statvfs

    class Disk:
        f_frsize, f_blocks = 1, 48 * MIB

        @property
        def f_bavail(self) -> int:
            return free

    monkeypatch.setattr(os, "statvfs", lambda path: Disk() if str(path) == str(home) else statvfs(path))

    async def story() -> None:
        nonlocal free
        from sublet.office.ledger.commands import Acquire, Release
        from sublet.office.ledger.records import LOCAL_TENANT, Want
        from sublet.values import Kind, LeaseId, RequestId, ResourceId

        office = local.Office(home, host_gpus="1x64MiB")
        await office.start()
        state = office.driver.ledger.state
        block = state.resources[ResourceId("local/block")]
        assert block.device.capacity == 40 * MIB

        async def becomes(capacity: int) -> None:
            for _ in range(3000):
                if block.device.capacity == capacity:
                    break
                await asyncio.sleep(0.01)
            assert block.device.capacity == capacity
            check_books(state)

        async def acquire(name: str, amount: int) -> Any:
            return await office.driver.submit(
                Acquire(
                    tenant=LOCAL_TENANT,
                    lease=LeaseId(name),
                    request_id=RequestId(name),
                    wants=(Want(kind=Kind.BLOCK, amount=amount),),
                    ttl_ns=300 * 10**9,
                    wait_ns=0,
                )
            )

        assert (await acquire("a", 16 * MIB)).lease.epoch is not None
        free = 25 * MIB + 5
        await becomes(20 * MIB)
        assert type(await acquire("b", 5 * MIB)).__name__ == "Refusal"
        assert (await acquire("c", 4 * MIB)).lease.epoch is not None
        free = 8 * MIB
        await becomes(20 * MIB)  # what is leased stays accounted for
        assert type(await acquire("d", MIB)).__name__ == "Refusal"
        await office.driver.submit(Release(tenant=LOCAL_TENANT, lease=LeaseId("a")))
        await becomes(4 * MIB)
        free = 45 * MIB
        await becomes(40 * MIB)
        assert (await acquire("e", 36 * MIB)).lease.epoch is not None
        await office.close()

    asyncio.run(story())
    shutil.rmtree(runtime_dir(home), ignore_errors=True)


def test_the_audit_log_says_whose_doing_it_was(start: Start) -> None:
    """A tenant's request, an operator who takes the lease of another, and what the office did by itself."""
    office = start()
    token = office.ask("POST", "/v1/tenants", {"id": "ann"}).json["token"]
    body = {"request_id": "a", "wants": [{"kind": "gpu", "amount": GIB}]}
    lease = office.ask("POST", "/v1/leases", body, token).json["lease"]["id"]
    assert office.ask("POST", f"/v1/leases/{lease}/revoke", {"detail": "maintenance"}).status == 200

    def records() -> list[Any]:
        found: list[Any] = office.ask("GET", f"/v1/audit?of={lease}").json
        return found

    until = time.monotonic() + PATIENCE_S
    while records()[-1]["kind"] != "ended" and time.monotonic() < until:
        time.sleep(0.05)
    ann = f"tenant:ann (uid {os.geteuid()}, pid {os.getpid()})"
    assert [(one["kind"], one["by"]) for one in records()] == [
        ("queued", ann),
        ("granted", ann),
        ("claimed", ann),
        ("ending", "operator:local"),
        ("torn_down", "office"),
        ("ended", "office"),
    ]
    assert records()[3]["event"]["end"]["detail"] == "maintenance"
    newest = office.ask("GET", "/v1/audit?limit=2").json
    assert [one["seq"] for one in newest] == sorted(one["seq"] for one in newest)
    assert len(newest) == 2
    assert office.ask("GET", "/v1/audit", None, token).status == 401
    assert office.ask("GET", "/v1/audit?limit=many").status == 400
    assert office.ask("GET", "/v1/audit/verify").json["ok"] is True
