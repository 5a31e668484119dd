"""What processes of an earlier version said to one another, and what today's code makes of it.

``conversations`` has them as the code of commit 696765d spoke when a program took two devices and a volume, ran a
function in a worker, saved, and a command ran (paths of that machine were replaced by others of the same length). The
studio is younger; its conversation is recorded by the code that it came with. Client, office, supervisor and guests of
two versions next to each other work together, so each message is read today, means the same, and is answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from sublet.client.home import runtime_dir
from sublet.office.api.routes import ROUTES
from sublet.studio.right import OfficeRight, find_right
from sublet.studio.service import Studio
from sublet.studio.web import studio_app
from sublet.testing import HeldClock
from sublet.testing.memory import MemoryAgent
from sublet.values import Epoch, LeaseId
from sublet.wire import page
from sublet.wire.codec import dumps, loads
from sublet.wire.frames import FrameKind, close_all, encode
from sublet.wire.guests import (
    Configure,
    Greeting,
    GuestNews,
    HolderCall,
    HolderReply,
    OfficeCall,
    OfficeReply,
    Orders,
    Reports,
)
from sublet.wire.http import ErrorView
from sublet.wire.link import CREDIT_BODY, FINISHED, VERSION_BODY, VERSIONS_BODY, Link
from sublet.wire.link_events import Called, Event, Happening, Over, PeerHello, Replied
from sublet.wire.orders import Held, Report, TornDown
from sublet.wire.work import pack, unpack
from sublet.wire.zygote import Discarded, Fork, Forked, Ready
from tests.unit.client.office_thread import office_thread
from tests.unit.office.api.bench import bench, exchange, run

FOLDER: Final = Path(__file__).with_name("conversations")

HOLDER: Final = {"calls": HolderCall, "replies": HolderReply, "<": GuestNews}
TYPES: Final[dict[str, dict[str, Any]]] = {
    "office-supervisor": {"calls": OfficeCall, "replies": OfficeReply, ">": Orders, "<": Reports},
    "holder-command": HOLDER,
    "holder-connect": HOLDER,
    "holder-guest": HOLDER,
    "holder-volume": HOLDER,
    "holder-worker": {},
    "zygote-supervisor": {"calls": Fork, "replies": Forked, ">": Ready | Discarded},
}
"""Conversation → the types of its messages: calls, replies, and events of the side that connected (>) and accepted."""


class Said(NamedTuple):
    """One frame."""

    side: str
    """``>``: by the side that connected."""
    kind: FrameKind
    number: int
    fds: int
    body: bytes


def said(name: str) -> Iterator[Said]:
    for line in (FOLDER / f"{name}.txt").read_text(encoding="ascii").splitlines():
        side, kind, number, fds, text = line.split(" ", 4)
        body = bytes.fromhex(text[1:]) if text.startswith("x") else text.encode("ascii")
        yield Said(side, FrameKind[kind], int(number), int(fds), body)


def contains(new: Any, old: Any) -> bool:
    """Whether all that was there is still there, with the same value."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and contains(new[key], old[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(contains, new, old))
    return bool(new == old)


def say(link: Link, frame: Said) -> None:
    """Through the methods of today's link."""
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(frame.fds)]
    match frame.kind:
        case FrameKind.HELLO:
            pass  # that of ``Link.connecting``
        case FrameKind.WELCOME:
            link.welcome(frame.body[VERSION_BODY.size :])
        case FrameKind.CALL:
            assert link.call(frame.body, fds) == frame.number
        case FrameKind.REPLY:
            link.reply(frame.number, frame.body)
        case FrameKind.EVENT:
            link.event(frame.body, channel=frame.number)
        case FrameKind.OPEN:
            assert link.open_channel(frame.body, window=0) == frame.number
        case FrameKind.DATA:
            link.send_data(frame.number, frame.body)
        case FrameKind.CREDIT:
            link.grant(frame.number, *CREDIT_BODY.unpack(frame.body))
        case FrameKind.CLOSE:
            assert frame.body == FINISHED
            link.finish(frame.number)
        case _:
            raise AssertionError(frame)


@pytest.mark.parametrize("name", TYPES)
def test_a_link_says_and_hears_the_same_bytes(name: str) -> None:
    """Both ends are today's: what each sends is what was sent then, byte for byte, and the other takes it."""
    frames = list(said(name))
    assert frames[0].kind is FrameKind.HELLO
    ends = {">": Link.connecting(frames[0].body[VERSIONS_BODY.size :]), "<": Link.accepting()}
    heard: dict[str, list[Happening]] = {">": [], "<": []}
    for frame in frames:
        say(ends[frame.side], frame)
        other = "<" if frame.side == ">" else ">"
        sent = ends[frame.side].take_output()
        expected = encode(frame.kind, frame.number, frame.body, fds=(0,) * frame.fds)
        assert [data for data, _ in sent] == [expected], frame
        for data, fds in sent:
            for happening in ends[other].receive(data, fds):
                heard[other].append(happening)
                close_all(getattr(happening, "fds", ()))
    assert not [one for side in heard.values() for one in side if isinstance(one, Over)]
    for frame in frames:
        heard_here = heard["<" if frame.side == ">" else ">"]
        kinds = {FrameKind.HELLO: PeerHello, FrameKind.CALL: Called, FrameKind.REPLY: Replied, FrameKind.EVENT: Event}
        if frame.kind in kinds:
            body = frame.body[VERSIONS_BODY.size :] if frame.kind is FrameKind.HELLO else frame.body
            taken = [one for one in heard_here if isinstance(one, kinds[frame.kind])]
            assert body in [getattr(one, "body", None) for one in taken], frame


@pytest.mark.parametrize("name", TYPES)
def test_each_message_is_read_and_still_says_what_it_said(name: str) -> None:
    for frame in said(name):
        if frame.kind is FrameKind.HELLO and len(frame.body) > VERSIONS_BODY.size + len("zygote"):
            assert loads(Greeting, frame.body[VERSIONS_BODY.size :]).capability
        elif frame.kind in (FrameKind.CALL, FrameKind.REPLY, FrameKind.EVENT):
            if not TYPES[name]:
                message = unpack(frame.body)
                inline = [bytes(message.data)]
                again = pack(
                    message.kind, flags=message.flags, subject=message.subject, amount=message.amount, inline=inline
                )
                assert again == frame.body
                continue
            kind = {FrameKind.CALL: "calls", FrameKind.REPLY: "replies"}.get(frame.kind, frame.side)
            found = loads(TYPES[name][kind], frame.body)
            assert contains(json.loads(dumps(found)), json.loads(frame.body)), frame


def test_a_node_holds_and_tears_down_what_it_was_ordered_to() -> None:
    """The orders of then go to the law of today's supervisor: what it reports has all that was reported then."""
    frames = list(said("office-supervisor"))
    configure = loads(Configure, next(one.body for one in frames if one.kind is FrameKind.CALL))
    clock, reported = HeldClock(), list[Report]()
    agent = MemoryAgent(configure.inventory, report=reported.append, clock=clock)
    for frame in frames:
        if (frame.side, frame.kind) == (">", FrameKind.EVENT):
            batch = loads(Orders, frame.body)
            for order in batch.orders:
                agent.send(order, incarnation=batch.incarnation)
            for _ in range(10):
                clock.advance("1s")
                agent.tick(clock.now_ns())
    then = [
        one
        for frame in frames
        if (frame.side, frame.kind) == ("<", FrameKind.EVENT)
        for one in loads(Reports, frame.body).reports
    ]
    held = {(one.lease, one.epoch, one.number) for one in then if isinstance(one, Held)}
    assert held
    assert held <= {(one.lease, one.epoch, one.number) for one in reported if isinstance(one, Held)}
    gone = {(one.lease, one.epoch, one.resources) for one in then if isinstance(one, TornDown)}
    assert gone == {(one.lease, one.epoch, one.resources) for one in reported if isinstance(one, TornDown)}


def test_the_page_of_a_guest_is_read() -> None:
    size, _, text = (FOLDER / "guest-page.hex").read_text(encoding="ascii").strip().partition(" ")
    assert page.decode(bytes.fromhex(text).ljust(int(size), b"\0")) == (
        4,
        page.PageView(
            lease=LeaseId("l-60db0e3e8832b5ca"),
            epoch=Epoch(1, 1),
            deadline_ns=77242768794885,
            now_ns=76946580120885,
            state=page.PageState.LIVE,
            devices=("local/gpu0",),
            office="eb3a7b79342a5cae2271c975f1cdaa00",
            namespace=4026531834,
        ),
    )


class Exchange(NamedTuple):
    """A request and its answer."""

    method: str
    path: str
    body: str
    status: int
    answer: Any


def exchanges(name: str) -> list[Exchange]:
    rows = map(json.loads, (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    return [Exchange(method, path, body, status, json.loads(answer)) for method, path, body, status, answer in rows]


def is_alike(new: Any, old: Any) -> bool:
    """Whether a program that read the old document finds the same keys in the new one, with values of those types."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and is_alike(new[key], old[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and bool(new) >= bool(old) and all(map(is_alike, new, old))
    return old is None or new is None or type(new) is type(old)


def test_an_office_answers_the_requests_of_then() -> None:
    async def story() -> None:
        async with bench() as b:
            ids: dict[str, str] = {}

            def now(text: str) -> str:
                for old, new in ids.items():
                    text = text.replace(old, new)
                return text

            for one in exchanges("client-office"):
                if "?wait=" in one.path:  # its client had left the queue meanwhile, over another connection
                    place = now(one.path).partition("?")[0]
                    await b.ask("POST", f"{place}/release", {"request_id": "left"})
                if one.method == "POST" and one.path == "/v1/leases":
                    await b.pass_time("10ms")  # so that what was released is free
                path = now(one.path)
                if one.method == "GET" and one.path == "/v1/leases":
                    path += "?all=1"  # pretended devices are torn down at once
                answer = await b.ask(one.method, path, raw=[now(one.body).encode()])
                assert answer.status == one.status, (one, answer.body)
                if not one.path.startswith("/v1/bill"):  # it is folded from a journal, and here none is kept
                    assert is_alike(answer.json, one.answer), (one, answer.body)
                if isinstance(one.answer, dict) and isinstance(one.answer.get("lease"), dict):
                    lease = answer.json["lease"]
                    ids[one.answer["lease"]["id"]] = lease["id"]
                    if lease["name"] == "notes":
                        b.agent.touch(lease["id"], Epoch(*lease["epoch"]))  # its holder saves

    run(story)


def test_a_client_reads_the_answers_of_then() -> None:
    """By the types of today's routes."""
    for one in exchanges("client-office"):
        path = one.path.partition("?")[0].split("/")
        route = next(
            route
            for route in ROUTES
            if route.method == one.method
            and len(route.path.split("/")) == len(path)
            and all(part in (here, "{id}") for part, here in zip(route.path.split("/"), path, strict=True))
        )
        kind = route.answers[one.status] if one.status < 400 or one.status in route.answers else dict[str, ErrorView]
        found = msgspec.convert(one.answer, kind)
        assert contains(json.loads(msgspec.json.encode(found)), one.answer), one


SESSION: Final = "s-1"
STUDIO: Final = (
    ("GET", "/v1/sessions", ""),
    ("POST", "/v1/sessions", '{"name": "study", "vram": 1073741824, "later": true}'),
    ("POST", "/v1/sessions", '{"name": "study", "vram": "much"}'),
    ("GET", "/v1/sessions", ""),
    ("GET", f"/v1/sessions/{SESSION}", ""),
    ("GET", f"/v1/sessions/{SESSION}/explain", ""),
    ("POST", f"/v1/sessions/{SESSION}/accept", ""),
    ("POST", f"/v1/sessions/{SESSION}/rest", "{}"),
    ("POST", f"/v1/sessions/{SESSION}/end", "{}"),
    ("GET", "/v1/sessions?all=1", ""),
    ("GET", "/v1/records", ""),
    ("GET", "/v1/sessions/none", ""),
)
"""What is asked, once, when the conversation is recorded."""


async def ask_studio(folder: Path, asked: Iterable[tuple[str, str, str]]) -> list[Exchange]:
    """A studio's answers to these requests of a person, over an office with pretended hardware."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        fabric: Any = OfficeRight.fabric
        patch.setattr(OfficeRight, "fabric", lambda *args, **more: stack.enter_context(fabric(*args, **more)))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        runtime = runtime_dir(folder / "home")
        shutil.rmtree(runtime, ignore_errors=True)
        runtime.mkdir(mode=0o700, parents=True)
        stack.callback(shutil.rmtree, runtime)  # root's lies in /run, and not in the folder of the test
        (folder / "home").mkdir(mode=0o700)
        with office_thread(runtime, name="office.sock"):
            studio = await asyncio.to_thread(
                lambda: Studio(folder / "home", find_right(folder / "home", {}), start=False)
            )
            studio.people.add("ana", "local")
            token, app, answers = studio.people.new_token("ana"), studio_app(studio), []
            session = SESSION
            for method, path, body in asked:
                now = path.replace(SESSION, session)
                answer = await exchange(app, method, now, [body.encode()], token=token)
                answers.append(Exchange(method, path, body, answer.status, answer.json))
                if (method, path, answer.status) == ("POST", "/v1/sessions", 200):
                    session = answer.json["id"]
            return answers


def test_a_studio_answers_the_requests_of_then(tmp_path: Path) -> None:
    recorded = exchanges("person-studio")
    answers = asyncio.run(ask_studio(tmp_path, [one[:3] for one in recorded]))
    for new, old in zip(answers, recorded, strict=True):
        assert new.status == old.status, (new, old)
        assert is_alike(new.answer, old.answer), (new, old)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, (FOLDER / "person-studio.jsonl").open("x", encoding="utf-8") as out:
        for one in asyncio.run(ask_studio(Path(folder), STUDIO)):
            out.write(json.dumps([*one[:4], json.dumps(one.answer)]) + "\n")
