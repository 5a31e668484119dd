"""Runs a story about the ledger: a text file of what people, agents and the clock do, and of what must come of it.

A command stands on a line that begins with ``>`` and a moment. What came of it follows, up to the next blank line or
command: first the answer to whoever asked, then whatever else happened, in order. Lines that begin with ``#`` tell the
story. Run the tests with ``SUBLET_REWRITE=1`` to write what really came of it, then read the difference.

The agent does as it is told and says so at once, unless the story says ``agent waits``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from sublet.errors import SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Done, Granted, Offer, Place, Refusal
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.budgets import money, prices_record
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import (
    LOCAL_TENANT,
    EndRecord,
    GroupRecord,
    LeaseRecord,
    ProcessRecord,
    Quota,
    ReservationRecord,
    Span,
    Want,
)
from sublet.office.ledger.state import State
from sublet.values import (
    BudgetWindow,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RenewMode,
    RequestId,
    ReservationId,
    ResourceId,
    TenantId,
    Tier,
    format_duration,
    format_size,
    parse_duration_ns,
    parse_size,
)
from sublet.wire.orders import (
    Device,
    End,
    EndedHere,
    Extend,
    Failed,
    Fault,
    Grant,
    Inventory,
    Notify,
    Order,
    Part,
    RemoveVolume,
    Report,
    StoredVolume,
    TornDown,
    Verify,
    VolumeRef,
    Volumes,
)
from tests.unit.office.ledger.bench import Bench

Words = dict[str, str]

START_S = 1000


def replayed(text: str) -> str:
    """The story with what really came of each command."""
    teller = Teller()
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *(f"  {said}" for said in teller.do(line[2:]))]
            skipping = True
        elif not line or line.startswith("#"):
            lines.append(line)
            skipping = False
        elif not skipping:
            raise ValueError(f"a line of a story is a command, a comment, or what came of a command: {line!r}")
    return "\n".join(lines) + "\n"


class Teller:
    """Carries the commands of one story out. A story begins anew wherever a node is added at 0s."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.bench = Bench(Inventory(node=NodeId("none"), domain=""), start_s=START_S)
        self.base_ns = self.bench.now_ns
        self.nodes: dict[str, Inventory] = {}
        self.boots = 1
        self.told = len(self.bench.history)
        self.said_orders = len(self.bench.sent)
        self.tells_orders = False

    def do(self, command: str) -> Iterator[str]:
        moment, who, *rest = shlex.split(command)
        if (moment, who) == ("0s", "node") and self.bench.state.leases:
            self._begin()
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        plain = [word for word in rest if "=" not in word]
        at_ns = self.base_ns + _time(moment)
        if who == "wait":
            self.bench.wait((at_ns - self.bench.now_ns) / 1e9)
        else:
            self.bench.now_ns = at_ns
            tell: Callable[[list[str], Words], Iterator[str]] | None = getattr(
                self, f"do_{who.replace('-', '_')}", None
            )
            yield from tell(plain, words) if tell else self.holder(who, plain, words)
        yield from self.news()

    # ---- what came of it

    def news(self) -> Iterator[str]:
        """What happened since, with its moment if that was not now."""
        for now, events in self.bench.history[self.told :]:
            when = "" if now.ns == self.bench.now_ns else f"{self.moment(now.ns)}: "
            for event in events:
                if said := self.fact(event):
                    yield when + said
        self.told = len(self.bench.history)
        if self.tells_orders:
            yield from (f"→ {self.order(order)}" for order in self.bench.sent[self.said_orders :])
        self.said_orders = len(self.bench.sent)

    def fact(self, event: ev.Event) -> str | None:
        leases = self.bench.state.leases
        match event:
            case ev.Granted() if leases[event.lease].claimed_at_ns is None and not event.offered:
                return f"{event.lease} is granted {_parts(event.parts)}: claim by {self.moment(event.claim_by_ns)}"
            case ev.Ungranted():
                return f"{event.lease} is back in the line: {event.detail}"
            case ev.Noticed():
                notice = event.notice
                return (
                    f"{event.lease} has notice: {notice.reason} at {self.moment(notice.take_at_ns)} ({notice.detail})"
                )
            case ev.PriorityGained():
                return f"{event.lease} has priority by now"
            case ev.Spared():
                return f"{event.lease} may stay"
            case ev.BudgetReached():
                used, limit = money(event.used, ""), money(event.limit, "")
                return f"budget {event.budget} is {event.level}: {used}of {limit}".rstrip()
            case ev.Bound(process=None):
                return f"{event.lease} is bound to no process"
            case ev.Bound(process=ProcessRecord(pid=pid)):
                return f"{event.lease} is bound to process {pid}"
            case ev.Promised():
                return f"{event.lease} is promised {_parts(event.parts)}, which {', '.join(event.victims)} will leave"
            case ev.PromiseDropped():
                return f"{event.lease} is promised nothing any more"
            case ev.FateSealed():
                return f"{event.lease} is not renewed: {event.reason}"
            case ev.Ending():
                return f"{event.lease} is over: {_end(event.end)}"
            case ev.Ended() if leases[event.lease].epoch is None:
                return f"{event.lease} is over: {_end(event.end)}"
            case ev.TornDown():
                return f"{event.resource} is free of {event.lease} {event.epoch}"
            case ev.Quarantined():
                hard = "for good" if event.hard else "until it is verified"
                return f"{event.resource} is quarantined {hard}: {event.detail}"
            case ev.Cleared():
                return f"{event.resource} is cleared ({event.by})"
            case ev.ResourceFaulted():
                return f"{event.resource} is out of service: {event.detail}"
            case ev.ResourceLost():
                return f"{event.resource} is gone"
            case ev.ResourceReturned():
                return f"{event.resource} is there again"
            case ev.NodeLost():
                return f"{event.node} is lost: {event.detail}"
            case ev.NodeReturned():
                return f"{event.node} is back"
            case ev.NodeDrained():
                return f"{event.node} is being emptied" if event.draining else f"{event.node} is in service again"
            case ev.VolumeTaken():
                return f"volume {event.name} is {event.lease}'s, {format_size(event.size)} on {event.resource}"
            case ev.VolumeKept():
                return f"volume {event.name} is kept"
            case ev.VolumeMissed():
                return f"volume {event.name} is looked for"
            case ev.VolumeRemoving():
                return f"volume {event.name} is to be removed: {event.detail}"
            case ev.VolumeRemoved():
                return f"volume {event.name} is removed, and {event.resource} free of it ({event.detail})"
            case ev.VolumeLost():
                return f"volume {event.name} is lost: {event.detail}"
            case ev.VolumeFound():
                return f"volume {event.name} of {event.tenant} is found, {format_size(event.size)} on {event.resource}"
            case ev.Rebased():
                return f"every instant moves by {format_duration(event.shift_ns)}"
            case _:
                return None

    def order(self, order: Order) -> str:
        name = f"{type(order).__name__} {order.lease} {order.epoch}"
        match order:
            case Grant() | Extend():
                return f"{name} #{order.number} until {self.moment(order.deadline_ns)}"
            case Notify() if order.take_at_ns is None:
                return f"{name} #{order.number}: it may stay"
            case Notify():
                return f"{name} #{order.number}: {order.reason} at {self.moment(order.take_at_ns)}"
            case End():
                return f"{name} #{order.number}: {order.reason}, within {format_duration(order.grace_ns)}"
            case Verify(vouched=True):
                return f"{name}: vouched for"
            case Verify() | RemoveVolume():
                return name

    def answer(self, answer: object) -> str:
        match answer:
            case Granted() if answer.lease.status is LeaseStatus.GRANTED:
                return f"set aside {_parts(answer.lease.parts)}"
            case Granted():
                lease, until = answer.lease, self.moment(answer.lease.deadline_ns)
                return f"has {_parts(lease.parts)}, epoch {lease.epoch}, until {until}"
            case Place():
                wait = "unknown" if answer.estimate_ns is None else format_duration(answer.estimate_ns)
                return f"place {answer.position}, estimate {wait}: {answer.reason}"
            case Offer():
                asked, offered = _amount(answer.kind, answer.requested), _amount(answer.kind, answer.offered)
                return f"offered {offered} instead of {asked}, until {self.moment(answer.lease.claim_by_ns)}"
            case Refusal():
                fits = "" if answer.would_fit is None else f" [would fit: {answer.would_fit}]"
                when = "" if answer.estimate_ns is None else f" [in {format_duration(answer.estimate_ns)}]"
                return f"refused ({answer.code}): {answer.reason}. {answer.do}{fits}{when}"
            case SubletError():
                return f"{answer.kind}: {answer}"
            case Done():
                return "done"
            case _:
                raise ValueError(f"not an answer: {answer!r}")

    def moment(self, at_ns: int | None) -> str:
        return "never" if at_ns is None else f"{(at_ns - self.base_ns) / 1e9:g}s"

    # ---- holders

    def holder(self, who: str, plain: list[str], words: Words) -> Iterator[str]:
        verb, name, *flags = plain
        tenant, lease = TenantId(who), LeaseId(name)
        known = self.bench.state.leases.get(lease)
        epoch = Epoch.parse(words["epoch"]) if "epoch" in words else known.epoch if known else None
        command: cmd.Command
        match verb:
            case "asks":
                command = self._acquire(tenant, lease, flags, words)
            case "claims":
                command = cmd.Claim(tenant=tenant, lease=lease, epoch=epoch, process=_process(words))
            case "declines":
                command = cmd.Decline(tenant=tenant, lease=lease)
            case "renews":
                command = cmd.Renew(
                    tenant=tenant,
                    lease=lease,
                    epoch=epoch or Epoch(1, 0),
                    active="idle" not in flags,
                    ttl_ns=_time(words["ttl"]) if "ttl" in words else None,
                )
            case "is":
                active = flags == ["busy"]
                command = cmd.NoteActivity(tenant=tenant, lease=lease, epoch=epoch or Epoch(1, 0), active=active)
            case "attaches":
                request = RequestId(words["id"])
                command = cmd.Attach(tenant=tenant, lease=lease, request_id=request, process=_process(words))
            case "unbinds":
                command = cmd.Unbind(tenant=tenant, lease=lease, epoch=epoch or Epoch(1, 0))
            case "releases":
                command = cmd.Release(tenant=tenant, lease=lease)
            case "left":
                command = cmd.Release(tenant=tenant, lease=lease, gone=True)
            case "gives-up":
                command = cmd.RemoveVolume(tenant=tenant, name=name)
            case "looks":
                yield self.answer(self.bench.ledger.answer_for(self.bench.lease(name), self.bench.now))
                return
            case _:
                raise ValueError(f"nobody {verb} anything")
        yield self.answer(self.bench.do(command).answer)

    def _acquire(self, tenant: TenantId, lease: LeaseId, flags: list[str], words: Words) -> cmd.Acquire:
        wants = []
        for kind in Kind:
            if kind in words:
                read = int if kind is Kind.CPU else _size
                exclusive = next((Exclusivity(flag) for flag in flags if flag in tuple(Exclusivity)), None)
                wants.append(
                    Want(
                        kind=kind,
                        amount=read(words[kind]),
                        least=read(words["least"]) if "least" in words else None,
                        count=int(words.get("count", "1")) if kind is Kind.GPU else 1,
                        exclusivity=exclusive if kind is Kind.GPU else None,
                        model=words.get("model") if kind is Kind.GPU else None,
                    )
                )
        wait = words.get("wait")
        return cmd.Acquire(
            tenant=tenant,
            lease=lease,
            request_id=RequestId(words.get("id", f"for {lease}")),
            wants=tuple(wants),
            ttl_ns=_time(words.get("ttl", "5m")),
            tier=next((Tier(flag) for flag in flags if flag in tuple(Tier)), Tier.INTERACTIVE),
            wait_ns=None if wait is None else _time(wait),
            selector={"zone": words["zone"]} if "zone" in words else {},
            renew=RenewMode(words.get("renew", "while-busy")),
            name=words.get("name"),
            retain_ns=_time(words["retain"]) if "retain" in words else None,
            replaces=LeaseId(words["replaces"]) if "replaces" in words else None,
            process=_process(words),
            pays_priority="pays" in flags,
        )

    # ---- operators

    def do_node(self, plain: list[str], words: Words) -> Iterator[str]:
        labels = {"zone": words.pop("zone")} if "zone" in words else {}
        model = words.pop("model", "")
        devices = []
        for name, capacity in words.items():
            kind = Kind(name.split("-")[-1].rstrip("0123456789"))
            amount = int(capacity) if kind is Kind.CPU else parse_size(capacity)
            devices.append(Device(id=ResourceId(name), kind=kind, capacity=amount, model=model))
        node = Inventory(node=NodeId(plain[0]), domain=plain[0], labels=labels, devices=tuple(devices))
        self.nodes[plain[0]] = node
        yield self.answer(self.bench.do(cmd.NodeUp(inventory=node)).answer)

    def do_quota(self, plain: list[str], words: Words) -> Iterator[str]:
        quota = Quota(**{name: int(limit) for name, limit in words.items()})
        yield self.answer(self.bench.do(cmd.SetTenant(tenant=TenantId(plain[0]), quota=quota)).answer)

    def do_rates(self, plain: list[str], words: Words) -> Iterator[str]:
        """In millionths of a credit for an hour; what is not named costs what it costs without a file."""
        rates = Rates(**{name: int(float(price) * 1_000_000) for name, price in words.items()})  # type: ignore[arg-type]
        yield self.answer(self.bench.do(cmd.SetPrices(prices=prices_record(rates))).answer)

    def do_budget(self, plain: list[str], words: Words) -> Iterator[str]:
        """Of a tenant, in credits: for each day, or (``credit``) more for this one."""
        tenant, per = TenantId(plain[0]), BudgetWindow.DAY
        if "credit" in words:
            more = cmd.CreditBudget(tenant=tenant, per=per, amount=int(float(words["credit"]) * 1_000_000))
            yield self.answer(self.bench.do(more).answer)
        else:
            made = cmd.SetBudget(tenant=tenant, per=per, amount=int(float(words["amount"]) * 1_000_000))
            yield self.answer(self.bench.do(made).answer)

    def do_group(self, plain: list[str], words: Words) -> Iterator[str]:
        """``group default ceiling=1``, or ``group lab floor=1 weight=2``."""
        numbers = {name: int(number) for name, number in words.items()}
        group = replace(GroupRecord(id=GroupId(plain[0])), **numbers)
        yield self.answer(self.bench.do(cmd.SetGroup(group=group)).answer)

    def do_member(self, plain: list[str], words: Words) -> Iterator[str]:
        """``member ann course``: a tenant, who is made if there is none, and its group."""
        tenant, group = TenantId(plain[0]), GroupId(plain[1])
        if tenant not in self.bench.state.tenants:
            yield self.answer(self.bench.do(cmd.AddTenant(tenant=tenant, token_hash=tenant, group=group)).answer)
        else:
            yield self.answer(self.bench.do(cmd.SetTenant(tenant=tenant, group=group)).answer)

    def do_reserve(self, plain: list[str], words: Words) -> Iterator[str]:
        """``reserve lab-time course gpus=2 from=1h to=2h``."""
        ahead_ns = self.bench.now.wall_ns - self.bench.now_ns + self.base_ns
        span = Span(ahead_ns + _time(words["from"]), ahead_ns + _time(words["to"]))
        record = ReservationRecord(
            id=ReservationId(plain[0]), group=GroupId(plain[1]), gpus=int(words["gpus"]), spans=(span,)
        )
        yield self.answer(self.bench.do(cmd.SetReservation(reservation=record)).answer)

    def do_explain(self, plain: list[str], words: Words) -> Iterator[str]:
        found = self.bench.ledger.explain(self._of(plain[0]), self.bench.now)
        yield found.summary
        yield from (
            f"first, by {ahead.because}: {', '.join(one.id for one in ahead.requests)}" for ahead in found.ahead
        )
        yield from (f"because of {reason.kind}: {reason.text}" for reason in found.reasons)
        yield from (f"could {advice}" for advice in found.advice)

    def do_highest(self, plain: list[str], words: Words) -> Iterator[str]:
        yield self.answer(self.bench.do(cmd.SetTenant(tenant=TenantId(plain[0]), tier_max=Tier(plain[1]))).answer)

    def do_revoke(self, plain: list[str], words: Words) -> Iterator[str]:
        notice_ns = _time(words.get("notice", "0s"))
        detail = words.get("detail", "")
        command = cmd.Revoke(lease=LeaseId(plain[0]), notice_ns=notice_ns, detail=detail)
        yield self.answer(self.bench.do(command).answer)

    def do_drain(self, plain: list[str], words: Words) -> Iterator[str]:
        notice_ns = _time(words["notice"]) if "notice" in words else None
        yield self.answer(self.bench.do(cmd.Drain(node=NodeId(plain[0]), notice_ns=notice_ns)).answer)

    def do_undrain(self, plain: list[str], words: Words) -> Iterator[str]:
        yield self.answer(self.bench.do(cmd.Drain(node=NodeId(plain[0]), draining=False)).answer)

    def do_clear(self, plain: list[str], words: Words) -> Iterator[str]:
        command = cmd.ClearFence(resource=ResourceId(plain[0]), vouch="vouch" in plain, by=LOCAL_TENANT)
        yield self.answer(self.bench.do(command).answer)

    def do_used(self, plain: list[str], words: Words) -> Iterator[str]:
        yield f"{self.bench.usage_ms(TenantId(plain[0])) / 1000:g} device-seconds"

    # ---- the processes of holders

    def do_process(self, plain: list[str], words: Words) -> Iterator[str]:
        """``process 7 ends``, or ``process 7 unseen``."""
        process = _process({"process": plain[0]})
        assert process is not None
        bound = tuple(lease.id for lease in self.bench.state.leases.values() if lease.process == process)
        kind = cmd.HolderGone if plain[1] == "ends" else cmd.HolderUnseen
        yield self.answer(self.bench.do(kind(process=process, leases=bound)).answer)

    # ---- the agent and the clock

    def do_agent(self, plain: list[str], words: Words) -> Iterator[str]:
        """``waits``: it does nothing until it is told to go on, or its words are told one by one."""
        self.bench.obedient = plain[0] == "obeys"
        if self.bench.obedient:
            self.bench.obey()
        yield from ()

    def do_orders(self, plain: list[str], words: Words) -> Iterator[str]:
        self.tells_orders = True
        yield from ()

    def do_again(self, plain: list[str], words: Words) -> Iterator[str]:
        """What the ledger would send once more."""
        for order in self.bench.ledger.orders_due(self.bench.now):
            yield f"→ {self.order(order)}"

    def do_torn_down(self, plain: list[str], words: Words) -> Iterator[str]:
        lease = self._of(plain[0])
        resources = tuple(part.resource for part in lease.parts)
        epoch = Epoch.parse(words["epoch"]) if "epoch" in words else self._epoch(lease)
        yield from self._report(TornDown(node=self._node(lease), lease=lease.id, epoch=epoch, resources=resources))

    def do_leaves(self, plain: list[str], words: Words) -> Iterator[str]:
        """Whether guests leave something in their volumes from here on."""
        self.bench.keeps = plain == ["something"]
        yield from ()

    def do_disk(self, plain: list[str], words: Words) -> Iterator[str]:
        """The agent names what it keeps: ``disk n1 tenant/name=SIZE@EPOCH``."""
        node = NodeId(plain[0])
        block = next(d.id for d in self.nodes[plain[0]].devices if d.kind is Kind.BLOCK)
        stored = []
        for key, value in words.items():
            tenant, name = key.split("/")
            size, epoch = value.split("@")
            ref = VolumeRef(tenant=TenantId(tenant), name=name)
            stored.append(
                StoredVolume(
                    volume=ref, resource=block, size=parse_size(size), lease=LeaseId("old"), epoch=Epoch.parse(epoch)
                )
            )
        yield from self._report(Volumes(node=node, volumes=tuple(stored)))

    def do_volumes(self, plain: list[str], words: Words) -> Iterator[str]:
        for volume in self.bench.state.volumes.values():
            until = f" until {self.moment(volume.until_ns)}" if volume.until_ns is not None else ""
            said = f" ({volume.detail})" if volume.detail else ""
            whose = f"{volume.lease} {volume.epoch}"
            yield f"{volume.key}: {volume.state}, {format_size(volume.size)}, {whose}{until}{said}"
        for tenant in self.bench.state.tenants:
            held = self.bench.state.held_by(tenant)
            if held.block_bytes:
                yield f"{tenant} holds {format_size(held.block_bytes)}, {format_size(held.kept_bytes)} of it kept"

    def do_failed(self, plain: list[str], words: Words) -> Iterator[str]:
        lease = self._of(plain[0])
        yield from self._report(
            Failed(
                node=self._node(lease),
                lease=lease.id,
                epoch=self._epoch(lease),
                resource=lease.parts[0].resource,
                detail=words.get("detail", ""),
                hard="hard" in plain,
            )
        )

    def do_ended_here(self, plain: list[str], words: Words) -> Iterator[str]:
        lease = self._of(plain[0])
        reason = EndReason(plain[1])
        yield from self._report(
            EndedHere(node=self._node(lease), lease=lease.id, epoch=self._epoch(lease), reason=reason)
        )

    def do_fault(self, plain: list[str], words: Words) -> Iterator[str]:
        resource = self.bench.state.resources[ResourceId(plain[0])]
        yield from self._report(Fault(node=resource.node, resource=resource.id, detail=words["detail"]))

    def do_silent(self, plain: list[str], words: Words) -> Iterator[str]:
        yield self.answer(self.bench.do(cmd.NodeGone(node=NodeId(plain[0]), detail="no answer for 30s")).answer)

    def do_answers(self, plain: list[str], words: Words) -> Iterator[str]:
        yield self.answer(self.bench.do(cmd.NodeUp(inventory=self.nodes[plain[0]])).answer)

    def do_tick(self, plain: list[str], words: Words) -> Iterator[str]:
        self.bench.do(cmd.Tick())
        yield from ()

    def do_restart(self, plain: list[str], words: Words) -> Iterator[str]:
        """The office dies and takes up its journal: on the same clock, after a boot, or out of a backup."""
        bench = self.bench
        bench.ledger = Ledger(bench.policy, State.restore(bench.state.snapshot()))
        bench.unsent.clear()
        last_ns = None
        if "boot" in plain:
            self.boots += 1
            last_ns, bench.now_ns = bench.now_ns, 50 * 10**9
            self.base_ns += bench.now_ns - last_ns
        command = cmd.OpenOffice(
            incarnation=int(words.get("incarnation", "1")),
            clock_domain=f"boot-{self.boots}",
            last_ns=last_ns,
            slack_ns=_time(words.get("slack", "0s")),
            restored="restored" in plain,
        )
        yield self.answer(bench.do(command).answer)

    def do_leases(self, plain: list[str], words: Words) -> Iterator[str]:
        for lease in self.bench.state.leases.values():
            due = self.bench.state.due_at(lease)
            epoch = f" {lease.epoch}" if lease.epoch else ""
            yield f"{lease.id} of {lease.tenant}: {lease.status}{epoch}" + (f" until {self.moment(due)}" if due else "")

    def _report(self, report: Report) -> Iterator[str]:
        self.bench.report(report)
        yield from ()

    def _of(self, text: str) -> LeaseRecord:
        return self.bench.lease(text)

    def _node(self, lease: LeaseRecord) -> NodeId:
        assert lease.node is not None
        return lease.node

    def _epoch(self, lease: LeaseRecord) -> Epoch:
        assert lease.epoch is not None
        return lease.epoch


def _end(end: EndRecord) -> str:
    return f"{end.reason} ({end.detail})" if end.detail else str(end.reason)


def _parts(parts: tuple[Part, ...]) -> str:
    return " and ".join(f"{_amount(part.kind, part.amount)} of {part.resource}" for part in parts)


def _amount(kind: Kind, amount: int) -> str:
    return f"{amount} cores" if kind is Kind.CPU else format_size(amount)


def _size(text: str) -> int:
    """As people write it, and whatever bad input a story wants to try."""
    return int(text) if text.lstrip("-").isdigit() else parse_size(text)


def _process(words: Words) -> ProcessRecord | None:
    """``process=7``."""
    pid = words.get("process")
    return None if pid is None else ProcessRecord(pid=int(pid), start_ticks=int(pid), boot_id="b", namespaces="n")


def _time(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else parse_duration_ns(text, zero_ok=True)
