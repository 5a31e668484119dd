"""Make the pictures of the studio's pages: each page in each of its states, from an office with a day in it.

Run it as `.venv/bin/python tools/studio_pictures.py` to replace the pictures in docs/, or with a FOLDER, for those of
all states. It needs Chromium. The office, its journal and the studio are real and talk over sockets. The four devices
are pretended, and the hour before the pictures passes at once, on a held clock: 20 people of a course and a lab, a
queue, a device in quarantine, and a reservation that began some minutes ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from sublet.client.home import runtime_dir
from sublet.engines.local import Office
from sublet.lease.value import rfc3339
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.records import Want
from sublet.studio.office import sessions_folder
from sublet.studio.people import People
from sublet.studio.records import CellRecord, CheckpointLocator, Entry, Lost, Ran
from sublet.studio.remote import RemoteStore
from sublet.testing import HeldClock
from sublet.testing.machine import FaultName
from sublet.testing.memory import MemoryAgent
from sublet.values import GIB, NS_PER_S, Kind, LeaseId, RequestId, ResourceId, TenantId
from sublet.wire.http_views import SESSION_LABEL
from sublet.wire.orders import Inventory

DOCS = Path(__file__).resolve().parent.parent / "docs"
OF_DOCS = ("studio-member", "studio-offer", "studio-course", "studio-office", "studio-phone")
STUDENTS = ["ana", "ben", "cem", "dora", "eli", "fay", "gus", "hana", "ivo"]
STUDENTS += ["jun", "kofi", "lea", "mia", "noor", "omar", "pia", "quinn", "rosa"]
LAB = ["sven", "tara"]
GPUS = 4
MINUTES = 50
"""Before people start sessions at the studio."""
SINCE = 12
"""Minutes from then to the pictures; a queue comes after them."""
BROKEN = ResourceId("local/gpu3")
CELLS = (
    (0.81, 0.42, 310, 0),
    (0.12, 0.06, 44, 0),
    (1.24, 1.13, 9120, 2 * GIB),
    (0.05, 0.02, 2, 0),
)
"""Of ana's notebook: seconds held and busy, launches, bytes saved."""
WIDE = {"width": 1000, "height": 800}
PHONE = {"width": 360, "height": 740}
PATIENCE_MS = 60_000


def main(words: list[str]) -> int:
    folder = Path(words[0]) if words else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sublet-pictures-", dir="/tmp") as place:
        Path(place).chmod(0o755)  # for the socket of all users of the machine
        home = Path(place) / "home"
        with a_day(home) as day, a_studio(home) as (studio, address):
            day.people_arrive(address)
            pictures(day, studio, address, folder, everything=folder != DOCS)
    return 0


# ---- the office and its day


class Day:
    """An office on a thread of its own, its hour, and its people."""

    def __init__(self, home: Path) -> None:
        self.home = home
        started = datetime.now(UTC) - timedelta(minutes=MINUTES + SINCE)
        self.clock = HeldClock(wall_ns=round(started.timestamp() * 1e9))
        self.people = People(sessions_folder(str(home)), wall_ns=time.time_ns, random=secrets.token_bytes)
        self.tokens: dict[str, str] = {}
        self.loop = asyncio.new_event_loop()
        self.ready, self.over = threading.Event(), asyncio.Event()
        self.chance = random.Random(20)
        self._address = ""

    def run(self) -> None:
        self.loop.run_until_complete(self._live())

    async def _live(self) -> None:
        agents: list[MemoryAgent] = []

        def make_agent(inventory: Inventory, **more: Any) -> MemoryAgent:
            agents.append(MemoryAgent(inventory, **more))
            return agents[0]

        self.office = Office(
            self.home,
            host_gpus=f"{GPUS}x80GiB",
            clock=self.clock,
            make_agent=make_agent,
            shared=self.home.parent / "sublet",
        )
        await self.office.start()
        self.agent = agents[0]
        try:
            await self._found()
            for minute in range(MINUTES):
                await self._minute(minute)
            self.ready.set()
            while not self.over.is_set():  # from here on time passes as it does elsewhere
                began_s = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), 0.5)
                await self._pass(time.monotonic() - began_s)
        finally:
            self.ready.set()
            await self.office.close()

    async def _found(self) -> None:
        """The groups, the tenants, and what is reserved for the course: from now on, for two hours."""
        do = self._do
        await do("POST", "/v1/groups", {"id": "ml1", "weight": 3, "floor": 1})
        await do("POST", "/v1/groups", {"id": "vision", "weight": 1, "ceiling": 2})
        await do("POST", "/v1/groups", {"id": "ml2", "weight": 3})  # of the next term: nobody is in it yet
        for number, name in enumerate(STUDENTS):
            user = {"uid": 2001 + number, "needs_token": False}
            await do("POST", "/v1/tenants", {"id": name, "group": "ml1", **user})
        for name in LAB:
            await do("POST", "/v1/tenants", {"id": name, "group": "vision"})

    async def _do(self, method: str, path: str, body: object) -> None:
        await asyncio.to_thread(self.ask, method, path, body)

    def ask(self, method: str, path: str, body: object) -> Any:
        """Of the office, as its owner."""
        import sublet

        with sublet.connect(home=self.home, start=False) as fabric:
            return fabric.request(method, path, body, shape=dict)

    async def _minute(self, minute: int) -> None:
        """Students come for some minutes each; the lab trains throughout; one card breaks."""
        if minute == MINUTES + SINCE - 20:  # a turn of 30 minutes is not over at the pictures
            await self._lend("sven", "l-detector", minutes=45)
        if minute % 3 == 0 and minute < MINUTES - 5:
            await self._lend(
                STUDENTS[(minute // 3) % len(STUDENTS)], f"l-day-{minute}", minutes=self.chance.randint(3, 9)
            )
        if minute == 40:
            self.agent.faults.turn_on(FaultName.SCRUB_FAILURE, BROKEN)
        await self._pass(60.0)

    async def _lend(self, tenant: str, lease: str, *, minutes: int) -> None:
        command = cmd.Acquire(
            tenant=TenantId(tenant),
            lease=LeaseId(lease),
            request_id=RequestId(lease),
            wants=(Want(kind=Kind.GPU, amount=40 * GIB),),
            ttl_ns=minutes * 60 * NS_PER_S,
            wait_ns=0,
            labels={SESSION_LABEL: f"s-{lease}"},
        )
        answer = await self.office.driver.submit(command)
        if isinstance(answer, Granted):
            epoch = answer.lease.epoch
            assert epoch is not None
            self.agent.touch(LeaseId(lease), epoch)

    async def _pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for _ in range(4):
            await self.office.driver.submit(cmd.Tick())
            await asyncio.sleep(0.002)

    def later(self, minutes: int) -> None:
        """So many pass at once."""

        async def go_on() -> None:
            for _ in range(minutes):
                await self._pass(60.0)

        asyncio.run_coroutine_threadsafe(go_on(), self.loop).result(60)

    # ---- people at the studio

    def people_arrive(self, address: str) -> None:
        """Each with a tenant of the same name; some start sessions."""
        self._address = address
        for name in (*STUDENTS, *LAB):
            self.people.add(name, name)
            self.tokens[name] = self.people.new_token(name)
        for name, role in (("tea", {"teaches": ["ml1"]}), ("noel", {"teaches": ["ml2"]}), ("olga", {"operator": True})):
            self.ask("POST", "/v1/tenants", {"id": name})
            self.people.add(name, name)
            self.people.set_role(name, **role)
            self.tokens[name] = self.people.new_token(name)
        self.operators = self.ask("POST", "/v1/tenants", {"id": "head", "operator": True})["token"]
        self.plan()
        self.start("ana", "baseline", 40, later=True)
        self.at_studio("ana", "POST", f"/v1/sessions/{self.find('ana', 'baseline')}/end", {})
        self.start("ana", "ablation", 24)
        self.save_and_rest("ana", "ablation")
        begins = (datetime.now(UTC) - timedelta(minutes=SINCE)).replace(second=0, microsecond=0)
        ends = min(begins + timedelta(hours=2), begins.replace(hour=23, minute=59))
        when = f"{begins:%Y-%m-%d %H:%M}-{ends:%H:%M}"
        self.ask("POST", "/v1/reservations", {"id": "lab-3", "group": "ml1", "gpus": 1, "when": when, "zone": "UTC"})
        for name in ("ana", "ben"):
            self.start(name, "thesis", 40, exclusivity="shared")
            self.busy(name, "thesis")
        self.later(SINCE)
        self.cells("ana", "thesis")
        for name, vram in (("cem", 40), ("dora", 40), ("tara", 80), ("eli", 24)):
            self.start(name, "lab-3" if name != "tara" else "sweep", vram)

    def plan(self) -> None:
        """What the course's page shows of the planner is what it has found."""
        words = ["simulate", "--course", "500", "--lab", "Tue 10:00-12:00", "--gpus", str(GPUS), "--save", "ml1"]
        environment = {**os.environ, "SUBLET_HOME": str(self.home)}
        subprocess.run([sys.executable, "-m", "sublet", *words], env=environment, stdout=subprocess.DEVNULL, check=True)

    def at_studio(self, name: str, method: str, path: str, body: object = None) -> Any:
        """A request of this person's program."""
        raw = None if body is None else json.dumps(body).encode()
        head = {"authorization": f"Bearer {self.tokens[name]}", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._address + path, raw, head, method=method)) as answer:
            return json.load(answer)

    def start(self, name: str, session: str, gib: int, **more: object) -> None:
        self.at_studio(name, "POST", "/v1/sessions", {"name": session, "vram": gib * GIB, "ttl": 1500, **more})

    def offer(self, name: str) -> None:
        """The person asks for a whole GPU, or less: the rest of the one that the person has a part of is free."""
        body = {"name": "sweep", "vram": 80 * GIB, "ttl": 1500, "or_smaller": True, "exclusivity": "shared"}
        state = self.at_studio(name, "POST", "/v1/sessions", body)["state"]
        assert state == "offered", state

    @contextlib.contextmanager
    def silent_office(self) -> Iterator[None]:
        """It runs and answers nothing, as one whose disk hangs."""
        goes_on = threading.Event()
        self.loop.call_soon_threadsafe(goes_on.wait)
        try:
            yield
        finally:
            goes_on.set()

    def find(self, name: str, session: str) -> str:
        found: str = self.at_studio(name, "GET", f"/v1/sessions/{session}")["id"]
        return found

    def busy(self, name: str, session: str) -> None:
        """Its notebook took the lease over, and a cell runs."""
        import sublet

        lease = self.at_studio(name, "GET", f"/v1/sessions/{session}")["lease"]
        with sublet.connect(home=self.home, start=False, for_tenant=name, bound=False) as fabric:
            held = fabric.attach(lease)
            body = {"epoch": list(held.epoch), "active": True}
            fabric.request("POST", f"/v1/leases/{lease}/activity", body, shape=dict)
            held.leave()

    def save_and_rest(self, name: str, session: str) -> None:
        """Its notebook ends, and its variables are saved."""
        import sublet

        lease = self.at_studio(name, "GET", f"/v1/sessions/{session}")["lease"]
        store, ident, now_ns = RemoteStore(self._address, self.tokens[name]), self.find(name, session), time.time_ns()
        saved = CheckpointLocator(volume=f"session-{ident}", number=3)
        over = Lost(lease=lease, reason="released", saved_at=rfc3339(now_ns), ended_ns=now_ns, checkpoint=saved)
        assert store.append(Entry(seq=store.read(0)[-1].seq + 1, session=ident, at_ns=now_ns, record=over))
        with sublet.connect(home=self.home, start=False, for_tenant=name, bound=False) as fabric:
            fabric.attach(lease).release()

    def cells(self, name: str, session: str) -> None:
        """What its notebook tells of the cells that ran under its lease."""
        lease = self.at_studio(name, "GET", f"/v1/sessions/{session}")["lease"]
        store, ident = RemoteStore(self._address, self.tokens[name]), self.find(name, session)
        for number, (held_s, busy_s, launches, saved) in enumerate(CELLS, 1):
            last, now_ns = store.read(0)[-1], time.time_ns()
            cell = CellRecord(
                cell=number,
                lease=lease,
                at_ns=now_ns - round((sum(one[0] for one in CELLS[number:])) * 1e9),
                held_s=held_s,
                busy_s=busy_s,
                vram_byte_s=held_s * 40 * GIB,
                launches=launches,
                bytes_saved=saved,
                failed=number == 4,
            )
            assert store.append(Entry(seq=last.seq + 1, session=ident, at_ns=now_ns, record=Ran(cell=cell)))


@contextlib.contextmanager
def a_day(home: Path) -> Iterator[Day]:
    home.mkdir(mode=0o700)
    day = Day(home)
    thread = threading.Thread(target=day.run, name="office", daemon=True)
    thread.start()
    assert day.ready.wait(300)
    assert thread.is_alive(), "the office did not start"
    try:
        yield day
    finally:
        day.loop.call_soon_threadsafe(day.over.set)
        thread.join(60)
        shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@contextlib.contextmanager
def a_studio(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "sublet", "studio", "--no-start", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "SUBLET_HOME": str(home)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found is not None, said
        yield process, found[0]
    finally:
        process.terminate()
        process.wait(60)


# ---- the pictures


def pictures(day: Day, studio: subprocess.Popen[str], address: str, folder: Path, *, everything: bool) -> None:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )

        def visit(name: str = "", path: str = "/", **more: Any) -> Any:
            page = chromium.new_context(**{"viewport": WIDE, "device_scale_factor": 1, **more}).new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.goto(address)
            if name:
                page.get_by_label("Your token").fill(day.tokens[name])
                page.keyboard.press("Enter")
                page.get_by_text(f"{name} · tenant").wait_for()
                page.goto(address + path)
            return page

        def keep(page: Any, name: str) -> None:
            if everything or name in OF_DOCS:
                page.screenshot(path=folder / f"{name}.png", full_page=True)
                print(f"{name}.png")

        dark: dict[str, Any] = {"color_scheme": "dark"}
        phone: dict[str, Any] = {"viewport": PHONE}
        member = visit("ana")
        member.get_by_text("active, busy").wait_for()
        keep(member, "studio-member")
        keep(visit("ana", **phone, **dark), "studio-phone")
        connect = visit("ana")
        connect.get_by_text("Connect a notebook").click()
        keep(connect, "connect")
        keep(visit("tea", "/course/ml1"), "studio-course")
        office = visit("olga", "/office")
        keep(office, "studio-office")
        day.offer("ana")
        offered = visit("ana")
        card = offered.locator("article").filter(has_text="Accept the offer")
        card.wait_for()
        card.screenshot(path=folder / "studio-offer.png")
        print("studio-offer.png")
        if not everything:
            return
        keep(visit(), "sign-in")
        wrong = visit()
        wrong.get_by_label("Your token").fill("wrong")
        wrong.keyboard.press("Enter")
        wrong.get_by_role("alert").wait_for()
        keep(wrong, "sign-in-refused")
        keep(offered, "offered")
        keep(visit("ana", **phone, **dark), "offered-phone-dark")
        keep(visit("noel", "/course/ml2"), "course-empty")
        keep(visit("noel", "/course/ml2", **phone, **dark), "course-empty-phone-dark")
        for name, more in (("uma", {}), ("vera", {**phone, **dark})):
            day.people.add(name, "ana")
            invited = visit(**more)
            suffix = "-phone-dark" if more else ""
            invited.goto(f"{address}/join#{day.people.invite(name)}")
            invited.wait_for_url(f"{address}/join")
            keep(invited, f"join{suffix}")
            invited.get_by_role("button", name="Join").click()
            invited.get_by_text(f"Welcome, {name}").wait_for()
            keep(invited, f"joined{suffix}")
        used = visit()
        used.goto(f"{address}/join")
        used.get_by_label("Your invite").fill("sublet_invite_used")
        used.keyboard.press("Enter")
        used.get_by_role("alert").wait_for()
        keep(used, "join-refused")
        made = visit("gus")
        made.get_by_text("Connect a notebook").click()
        made.get_by_label("New token, called").fill("laptop")
        made.get_by_role("button", name="Make a token").click()
        made.get_by_text("Your new token, laptop").wait_for()
        keep(made, "token")
        keep(visit("cem"), "waiting")
        keep(visit("cem", **phone), "waiting-phone")
        keep(visit("pia"), "empty")
        bill = f"/sessions/{day.find('ana', 'thesis')}/bill"
        keep(visit("ana", bill), "bill")
        keep(visit("ana", bill, **phone, **dark), "bill-phone-dark")
        keep(visit("ana", f"/sessions/{day.find('ana', 'baseline')}/bill"), "bill-empty")
        keyboard = visit("pia")
        for _ in range(2):
            keyboard.keyboard.press("Tab")
        keep(keyboard, "keyboard")
        keep(visit("ana", **dark), "member-dark")
        keep(visit("tea", "/course/ml1", **phone, **dark), "course-phone-dark")
        keep(visit("olga", "/office", **phone), "office-phone")
        keep(visit("olga", "/office", **dark), "office-dark")
        office.get_by_role("button", name="Clear it on your word").first.click()
        keep(office, "office-asks")
        audit = visit("olga", "/office/audit")
        audit.get_by_label("Lease, tenant or device").fill("ana")
        audit.get_by_label("Your access token of the office").fill(day.operators)
        audit.keyboard.press("Enter")
        audit.get_by_role("cell").first.wait_for()
        keep(audit, "office-audit")
        asks = visit("ana")
        asks.locator("article", has_text="thesis").get_by_role("button", name="End", exact=True).click()
        asks.get_by_role("button", name="End it now").wait_for()
        keep(asks, "end-asks")
        refused = visit("pia")
        refused.get_by_label("Name").fill("huge")
        refused.get_by_label("GPU memory").fill("8")
        refused.keyboard.press("Enter")
        refused.get_by_role("alert").wait_for()
        keep(refused, "start-refused")
        opened = [(visit("ana"), "office-silent"), (visit("ana", **phone, **dark), "office-silent-phone-dark")]
        opened += [(visit("olga", "/office"), "office-silent-operator")]
        with day.silent_office():
            for page, name in opened:
                page.get_by_role("alert").wait_for()
                keep(page, name)
        member.get_by_text("active, busy").wait_for()
        studio.terminate()
        studio.wait(60)
        member.locator("#lost").wait_for(state="visible")
        keep(member, "reconnecting")
        chromium.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
