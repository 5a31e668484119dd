"""``sublet studio serve`` beside an office: programs, those that misbehave among them, and who asks them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import socket_path
from sublet.values import GIB
from tests.commands import start_piped
from tests.integration.office_stage import OfficeStage, office_stage
from tests.traces import until

pytestmark = pytest.mark.slow

PATIENCE_S: Final = 60.0
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with office_stage(tmp_path_factory.mktemp("office"), "1x2GiB") as stage:
        yield stage


class Server:
    """The command as a process."""

    def __init__(self, office: OfficeStage, file: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._office, self._file, self._words, self._env = office, file, words, env or {}
        self.log = office.office.home / f"{file.stem}-said"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "sublet", "studio", "serve", str(self._file), *self._words]
        words += ["--vram", "256MiB", "--listen", "127.0.0.1:0"]
        env = {**self._office.office.env(), "SUBLET_HOME": str(self._office.office.home), **self._env}
        with self.log.open("a") as errors:
            self.process = start_piped(words, env, stderr=errors.fileno())
        assert self.process.stdout is not None
        said = self.process.stdout.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        assert found is not None, (said, self.log.read_text())
        self.port = int(found[1])

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status

    @contextlib.contextmanager
    def asked(self, path: str, body: bytes | None = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(line):
            line.request("GET" if body is None else "POST", path, body, headers)
            yield line.getresponse()

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        with self.asked(path, body, **headers) as answer:
            return answer.status, answer.read()

    def error(self, path: str) -> tuple[int, str, str]:
        """Status, kind and message of an answer of the server's own."""
        status, body = self.ask(path)
        error = json.loads(body)["error"]
        return status, error["kind"], error["message"]


@contextlib.contextmanager
def server(office: OfficeStage, file: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    made = Server(office, file, *words, env=env)
    try:
        yield made
    finally:
        if made.process is not None:
            made.kill(signal.SIGTERM)
        until("its lease is over", lambda: not live(office))


def live(office: OfficeStage) -> list[Any]:
    return [lease for lease in office.office.ask("GET", "/v1/leases").doc if lease["status"] != "ended"]


def ends(office: OfficeStage) -> list[str]:
    """Of all leases of devices, oldest first."""
    leases = office.office.ask("GET", "/v1/leases?all=1").doc[::-1]
    gpus = [lease for lease in leases if [want["kind"] for want in lease["wants"]] == ["gpu"]]
    return [lease["end"]["reason"] for lease in gpus if lease["end"] is not None]


def test_a_program_has_a_lease_while_requests_come_and_goes_on_with_what_it_saved(office: OfficeStage) -> None:
    """The example. Without requests its lease ends, and the next request takes another; so it is after the server was
    ended, and after it was killed, when what was saved last is restored: perhaps by the program after that."""
    with server(office, EXAMPLES / "serve_counter.py", "--idle", "6s", "--wait", "60s") as counter:
        leases = []

        def count(body: bytes) -> int:
            status, answer = counter.ask("/count", body)
            assert status == 200, answer
            leases.append(json.loads(answer)["lease"])
            return int(json.loads(answer)["words"])

        assert not live(office), "nothing was asked yet"
        assert count(b"one two two") == 3
        assert count(b"three") == 4
        assert leases[0] == leases[1]
        until("its lease ends", lambda: not live(office))
        assert ends(office)[-1] == "idle"
        assert count(b"four") == 5, "restored"
        assert leases[2] != leases[1]
        for words, number in enumerate((signal.SIGINT, signal.SIGTERM), 6):
            assert counter.kill(number) == 0
            until("its lease was given back", lambda: not live(office))
            counter.start()
            assert count(number.name.encode()) == words, "it saved when the server was ended"
        counter.kill()
        until("the lease went with its holder", lambda: not live(office))
        assert ends(office)[-1] == "holder_gone"
        counter.start()
        number_of_words = count(b"last")  # with SIGTERM if the program could save without its server, in the grace
        status, words_there = counter.ask("/words")
        there = b"one 1 two 2 three 1 four 1 SIGINT 1 last 1" + (b" SIGTERM 1" if number_of_words == 8 else b"")
        assert (number_of_words in (7, 8), status, sorted(words_there.split())) == (True, 200, sorted(there.split()))
        assert counter.ask("/count")[0] == 405


MISBEHAVES: Final = """
import os, sys, threading, time
def handle(request):
    match request.path:
        case "/dict": return {}
        case "/raise": raise ValueError("<b>no</b>")
        case "/hang": time.sleep(600)
        case "/exit": os._exit(7)
        case "/cut": return iter([b"a" * 10, 3])
        case "/large": return b"x" * 30_000_000
        case "/junk":
            for number in range(3, 20):
                try: os.write(number, b"junk" * 10)
                except OSError: pass
            time.sleep(600)
        case "/print":
            while True: print("x" * 100_000)
    return b"fine"
"""


def test_each_way_to_misbehave_has_its_end_and_the_next_request_is_answered(
    office: OfficeStage, tmp_path: Path
) -> None:
    file = tmp_path / "misbehaves.py"
    file.write_text(MISBEHAVES)
    with server(office, file, "--timeout", "5s", "--wait", "60s", "--concurrent", "1") as bad:
        assert bad.ask("/") == (200, b"fine")
        lease = live(office)[0]["id"]
        assert bad.error("/dict")[:2] == (500, "wrong")
        assert bad.error("/raise") == (500, "wrong", "the program failed at this request: ValueError: <b>no</b>")
        page = bad.ask("/raise", accept="text/html")[1].decode()
        assert "&lt;b&gt;no" in page
        with bad.asked("/cut") as answer, pytest.raises(http.client.IncompleteRead):
            answer.read()
        status, body = bad.ask("/large")
        assert (status, len(body)) == (200, 30_000_000)
        with bad.asked("/large") as answer:
            assert answer.read(100) == b"x" * 100
        assert bad.ask("/") == (200, b"fine"), "a reader who hangs up ends the answer"
        assert bad.ask("/", b"x" * ((16 << 20) + 1))[0] == 413
        assert live(office)[0]["id"] == lease, "all of this is one request's trouble"
        for path, status, kind, says in (
            ("/hang", 504, "late", "did not answer in time"),
            ("/exit", 503, "lost", "exit 7"),
            ("/junk", 503, "lost", "there is no frame of kind"),
            ("/print", 503, "lost", "it printed more than 64 MiB"),
        ):
            error = bad.error(path)
            assert (error[:2], says in error[2]) == ((status, kind), True), (path, error)
            assert bad.ask("/") == (200, b"fine"), f"after {path}"
        said = bad.log.read_text()
        assert "broke the protocol: there is no frame of kind" in said
        assert "it printed more than 64 MiB" in said
        assert "x" * 1000 not in said


BROKEN: Final = (
    ("def handle(:", "SyntaxError"),
    ("import nothing_like_it", "ModuleNotFoundError"),
    ("answer = 3", "neither a function `handle` nor"),
    ("while True: print('x' * 100_000)", "it printed more than 64 MiB"),
    ("import os; os._exit(4)", "exit 4"),
)


def test_a_file_that_cannot_be_loaded_says_why_and_is_loaded_again_when_it_is_mended(
    office: OfficeStage, tmp_path: Path
) -> None:
    """One mistake after another; each time the file is loaded as it is then."""
    file = tmp_path / "broken.py"
    file.write_text("")
    with server(office, file, "--wait", "60s") as broken:
        for source, says in BROKEN:
            file.write_text(source)
            status, _, message = broken.error("/")
            assert status in (500, 503), source
            assert says in message
            until("its lease is given back", lambda: not live(office))
        file.write_text("def handle(request): return b'mended'")
        until("it is loaded again", lambda: broken.ask("/") == (200, b"mended"))


def test_without_a_gpu_a_request_is_told_its_place_and_the_next_one_has_it(office: OfficeStage, tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text("def handle(request): return b'fine'")
    with server(office, file, "--wait", "2s") as waits, sublet.connect(home=office.office.home) as owner:
        with owner.gpu(min_vram=GIB, ttl="10m") as held, held.activity():
            with waits.asked("/") as answer:
                error = json.loads(answer.read())["error"]
                assert (answer.status, error["kind"], error["position"]) == (503, "no_lease", 1)
                assert int(answer.headers["retry-after"]) > 0
                assert error["reason"]
            assert "Place 1 in the queue" in waits.ask("/", accept="text/html")[1].decode()
        until("it is answered", lambda: waits.ask("/") == (200, b"fine"))


def test_requests_at_once_are_answered_side_by_side_and_an_asgi_application_streams(
    office: OfficeStage, tmp_path: Path
) -> None:
    """Four requests wait for one another in the program, so each has to be in it at the same time."""
    file = tmp_path / "meets.py"
    file.write_text(
        "import asyncio\n"
        "there, all_there = [], asyncio.Event()\n"
        "async def app(scope, receive, send):\n"
        "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
        "    await send({'type': 'http.response.body', 'body': b'begun', 'more_body': True})\n"
        "    there.append(scope['path'])\n"
        "    if len(there) == 4: all_there.set()\n"
        "    await all_there.wait()\n"
        "    await send({'type': 'http.response.body', 'body': b' met'})\n"
    )
    with server(office, file, "--wait", "60s", "--concurrent", "4") as meets:
        found: list[bytes] = []

        def ask() -> None:
            with meets.asked("/") as answer:
                assert answer.read(5) == b"begun", "the beginning is here before the end is made"
                found.append(answer.read())

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [b" met"] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's office gives guests of tenants users of their own")
def test_a_program_of_another_tenant_runs_as_that_tenants_guest(office: OfficeStage, tmp_path: Path) -> None:
    """With the tenant's token and a state folder apart: another user, who sees neither, and a lease on the tenant's
    bill. What it saves crosses as bytes and is restored."""
    token = office.office.ask("POST", "/v1/tenants", {"id": "physics"}).doc["token"]
    file = tmp_path / "told.py"
    file.write_text(
        "import json, os\n"
        "kept = b''\n"
        "def handle(request):\n"
        "    global kept\n"
        "    kept += request.body\n"
        f"    seen = os.path.exists({str(tmp_path)!r})\n"
        "    return json.dumps([os.getuid(), seen, kept.decode(), os.environ.get('SUBLET_TOKEN')]).encode()\n"
        "def save(): return kept\n"
        "def restore(state):\n"
        "    global kept\n"
        "    kept = state\n"
    )
    env = {"SUBLET_HOME": str(tmp_path / "home"), "SUBLET_URL": f"unix://{socket_path(office.office.home)}"}
    env |= {"SUBLET_TOKEN": token, "SUBLET_AS_TENANT": "1"}
    with server(office, file, "--wait", "60s", env=env) as told:
        uid, seen, kept, secret = json.loads(told.ask("/", b"a")[1])
        assert (uid != 0, seen, kept, secret) == (True, False, "a", None)
        assert {lease["tenant"] for lease in live(office)} == {"physics"}
        assert told.kill(signal.SIGTERM) == 0
        told.start()
        assert json.loads(told.ask("/", b"b")[1])[2] == "ab"
