"""What is asked of the office while it is killed, and what it said: all that a later look holds it to.

The load is drawn from a seed and from what was answered. Several tenants ask at the same moment, one request on each
line, so that commands share commits; nobody asks the next thing before every answer of a round is here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from tests.crash.office_process import Answer, Call, Json, OfficeProcess

GIB: Final = 1 << 30
MIB: Final = 1 << 20
TTL_S: Final = 600.0
ROUNDS: Final = 9
LOCAL: Final = "local"
TENANTS: Final = ("ana", "ben")
HELD_MAX: Final = 6
"""Leases of one tenant before it gives some back."""

OVER: Final = "over"
"""Released or revoked, and said so."""


@dataclass(slots=True)
class ToldLease:
    """What its holder, or whoever looked, was last answered."""

    id: str
    tenant: str
    status: str
    epoch: tuple[int, int] | None = None
    deadline: float | None = None
    end: str | None = None
    perhaps: set[str] = field(default_factory=set)
    """What was asked of it and not answered, so it may have happened or not."""


@dataclass(slots=True)
class Told:
    """Everything that was answered over all lives of one home."""

    leases: dict[str, ToldLease] = field(default_factory=dict)
    tokens: dict[str, str | None] = field(default_factory=lambda: {LOCAL: None})
    epochs: dict[tuple[int, int], str] = field(default_factory=dict)
    requests: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Request id of an acquire → its tenant and lease."""
    acquires: dict[str, Ask] = field(default_factory=dict)
    """The same, as they were asked."""
    unanswered: list[Ask] = field(default_factory=list)
    may_be_full: bool = False
    """A write was made to fail as on a full disk: the office then refuses new leases for a while."""
    answers: int = 0

    def of(self, tenant: str, *statuses: str) -> list[ToldLease]:
        return [lease for lease in self.leases.values() if lease.tenant == tenant and lease.status in statuses]

    def view(self, view: Json) -> ToldLease:
        """A lease as the office showed it."""
        lease = self.leases.setdefault(view["id"], ToldLease(view["id"], view["tenant"], view["status"]))
        lease.status = OVER if view["status"] in ("ending", "ended") else view["status"]
        lease.deadline = view["deadline"]
        lease.end = view["end"]["reason"] if view["end"] else None
        if view["epoch"] is not None:
            lease.epoch = (view["epoch"][0], view["epoch"][1])
            known = self.epochs.setdefault(lease.epoch, lease.id)
            assert known == lease.id, f"epoch {lease.epoch} was given to {known} and to {lease.id}"
        lease.perhaps.clear()
        return lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One wish of one tenant."""

    word: str
    tenant: str
    call: Call
    lease: str | None = None

    def unanswered(self, told: Told) -> None:
        told.unanswered.append(self)
        if self.lease is not None and self.lease in told.leases:
            told.leases[self.lease].perhaps.add(self.word)

    @staticmethod
    def told_full(told: Told, doc: Json) -> bool:
        return told.may_be_full and "the disk of the office is full" in doc["error"]["message"]

    def answered(self, told: Told, answer: Answer) -> None:
        """Take it down. An answer that no honest office gives here is a failure."""
        told.answers += 1
        doc: Json = answer.doc if isinstance(answer.doc, dict) else {}
        known = told.leases.get(self.lease or "")
        if "error" in doc:
            # A lease that was seen no more may have ended meanwhile: by a request that was not answered, or unclaimed.
            kind = doc["error"]["kind"]
            if self.word == "acquire" and self.told_full(told, doc):
                return
            if kind == "Disconnected":  # the supervisor did not confirm it in time: it may have happened or not
                self.unanswered(told)
                return
            assert kind in ("LeaseNotActive", "LeaseRevoked", "StaleEpoch"), f"{self.word}: {answer}"
            assert known is None or known.status != "active" or known.perhaps, f"{self.word} {known}: {answer}"
            return
        match self.word:
            case "acquire":
                if doc["answer"] == "refusal":
                    return
                lease = told.view(doc["lease"])
                assert self.call.body is not None
                request = self.call.body["request_id"]
                before = told.requests.setdefault(request, (self.tenant, lease.id))
                assert before == (self.tenant, lease.id), f"request {request} made {before[1]} and {lease.id}"
                told.acquires[request] = self
            case "claim" | "attach" | "look":
                told.view(doc["lease"])
            case "release" | "revoke":
                told.view(doc)
                assert told.leases[doc["id"]].status == OVER, f"{self.word} left it {doc['status']}"
            case "renew":
                assert known is not None
                known.deadline = doc["deadline"]
                known.perhaps.discard("renew")
            case "tenant":
                told.tokens[self.tenant] = doc["token"]
            case _:
                assert answer.status == 200, answer


def draw(rng: random.Random, told: Told, name: str) -> Iterator[list[Ask]]:
    """The rounds of one life; ``name`` makes its request ids its own."""
    number = 0

    def new_id() -> str:
        nonlocal number
        number += 1
        return f"{name}-{number}"

    def ask(word: str, tenant: str, path: str, body: Json | None = None, lease: str | None = None) -> Ask:
        method = "GET" if body is None else "POST"
        return Ask(
            word=word,
            tenant=tenant,
            lease=lease,
            call=Call(method=method, path=path, body=body, token=told.tokens[tenant]),
        )

    def acquire(tenant: str) -> Ask:
        kind, amount, wait = rng.choice(
            [("gpu", 4 * GIB, 60.0), ("gpu", 4 * GIB, 60.0), ("gpu", GIB, 0), ("memory", MIB, 0), ("block", MIB, 0)]
        )
        body: Json = {"request_id": new_id(), "wants": [{"kind": kind, "amount": amount}], "ttl": TTL_S, "wait": wait}
        return ask("acquire", tenant, "/v1/leases", body | {"renew": "always", "labels": {"life": name}})

    def on(lease: ToldLease, word: str) -> Ask:
        path = f"/v1/leases/{lease.id}/{word}"
        match word:
            case "renew":
                return ask(word, lease.tenant, path, {"epoch": lease.epoch, "busy": 0.001}, lease.id)
            case "attach":
                return ask(word, lease.tenant, path, {"request_id": new_id()}, lease.id)
            case "revoke":
                return ask(word, LOCAL, path, {"request_id": new_id()}, lease.id)
            case "release":
                return ask(word, lease.tenant, path, {"request_id": new_id(), "busy": 0.001}, lease.id)
            case "claim":
                return ask(word, lease.tenant, path, {"epoch": lease.epoch}, lease.id)
            case _:
                return ask("look", lease.tenant, f"/v1/leases/{lease.id}", None, lease.id)

    def wish(tenant: str) -> Ask:
        granted, waiting, active = (told.of(tenant, status) for status in ("granted", "queued", "active"))
        if granted:
            return on(granted[0], "claim")
        if waiting and rng.random() < 0.5:
            return on(rng.choice(waiting), "look")
        if len(active) >= HELD_MAX:
            return on(rng.choice(active), rng.choice(("release", "release", "revoke")))
        if active and rng.random() < 0.55:
            return on(rng.choice(active), rng.choice(("renew", "renew", "renew", "release", "revoke", "attach")))
        return acquire(tenant)

    for tenant in TENANTS:
        if tenant not in told.tokens:
            call = Call(method="POST", path="/v1/tenants", body={"id": tenant})
            yield [Ask(word="tenant", tenant=tenant, call=call)]
    for turn in range(ROUNDS):
        # One lease is asked one thing at a time: what two at once come to is their order, which nobody here knows.
        asks: list[Ask] = []
        for tenant in (*TENANTS, LOCAL):
            one = wish(tenant)
            if one.lease is None or one.lease not in {other.lease for other in asks}:
                asks.append(one)
        if turn == ROUNDS // 2:
            asks.append(ask("bill", LOCAL, "/v1/bill?by=tenant"))
            asks.append(ask("verify", LOCAL, "/v1/audit/verify"))
        yield asks


def carry_out(office: OfficeProcess, asks: list[Ask], told: Told, *, pause: Callable[[], None] | None = None) -> bool:
    """Send a round, each wish on a line of its own, then hear the answers. False if the office is gone."""
    lines = []
    try:
        lines = [office.line(n) for n in range(len(asks))]
    except OSError:  # gone between two rounds: nothing of this one was sent
        return False
    for line, one in zip(lines, asks, strict=True):
        line.send(one.call)
    if pause is not None:
        pause()
    alive = True
    for line, one in zip(lines, asks, strict=True):
        answer = line.answer()
        if answer is None:
            alive = False
            one.unanswered(told)
        else:
            one.answered(told, answer)
    return alive


def repeat(office: OfficeProcess, told: Told) -> bool:
    """Ask again, word for word, what was not answered, and a little of what was: a request id has one effect. False if
    the office is gone."""
    active = [lease for lease in told.leases.values() if lease.status == "active" and not lease.perhaps]
    recent = {lease.id for lease in active[-2:]}
    again = [one for request, one in told.acquires.items() if told.requests[request][1] in recent]
    asks, told.unanswered = [*told.unanswered, *again], []
    while asks:
        one = asks.pop(0)
        before = told.requests.get((one.call.body or {}).get("request_id", ""))
        was = None if before is None else replace(told.leases[before[1]])
        answer = office.line().ask(one.call)
        if answer is not None and one.word == "tenant" and answer.status == 400:  # made; its token went with the answer
            change = Call(method="PATCH", path=f"/v1/tenants/{one.tenant}", body={"new_token": True})
            answer = office.line().ask(change)
        if answer is None:
            told.unanswered += [one, *(other for other in asks if other not in again)]
            return False
        if "error" in answer.doc and answer.doc["error"]["kind"] == "Disconnected":
            one.unanswered(told)
            continue
        if one.word == "acquire" and "error" in answer.doc:  # it was granted from the line, and nobody came
            assert one.told_full(told, answer.doc) or answer.doc["error"]["end"] is not None, answer
            continue
        one.answered(told, answer)
        if was is not None:
            now = told.leases[was.id]
            assert (now.status, now.epoch, now.deadline) == (was.status, was.epoch, was.deadline), (was, now)
    return True
