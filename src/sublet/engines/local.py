"""The office: broker and agent in one process, on one machine.

What is here only puts parts together and takes them apart in the right order. Starting: the state folder and its
journal first, since they say whether we may run at all; then the books; then the agent; the socket last, so that
every process that can connect is served. Ending (SIGTERM, SIGINT, ``sublet down``): the socket first, the journal last.
Leases stay as they are: on the same boot the next office finds the same deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop

from sublet import __version__
from sublet.background import count, end_process
from sublet.client.home import data_path, home_dir, note_end, socket_path
from sublet.clock import Clock, SystemClock
from sublet.engines.beginning import Beginning, begun
from sublet.engines.operator_limits import POLICY_FILE, read_limits, within
from sublet.engines.shared_folder import listen_for_all, prepare
from sublet.errors import InvalidRequest, Unauthorized, Unsupported
from sublet.lease.states import SliceState
from sublet.lease.token import TokenClaims
from sublet.node.agent.data_door import Door, Visitor
from sublet.node.agent.health import Cards, has_cards
from sublet.node.agent.inventory import LOCAL_NODE, card_of, machine_inventory, parse_host_gpus
from sublet.node.agent.limits import block_bytes, disk_bytes, offer_again
from sublet.node.agent.rehearsal import await_gone, in_use, offered, rehearse_all, shows_pids
from sublet.node.agent.supervised import SupervisedAgent
from sublet.node.agent.suspend_probe import probe_cards
from sublet.node.agent.tokens import verify
from sublet.office.access import AccessList, Caller, Origin
from sublet.office.api.app import App
from sublet.office.api.policy import to_apply
from sublet.office.api.processes import HolderWatch, ProcessTable
from sublet.office.api.reservations import plan_recurrences
from sublet.office.api.server import HttpServer
from sublet.office.api.service import ApiService, OfficeIdentity
from sublet.office.api.signing import Signer
from sublet.office.driver import Driver
from sublet.office.journal.journal import Journal
from sublet.office.ledger.bills import Rates, parse_rates
from sublet.office.ledger.budgets import check_prices, prices_record
from sublet.office.ledger.commands import NodeUp, OpenOffice, SetPrices, Tick
from sublet.office.ledger.fold import apply
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Now
from sublet.office.ledger.reports import with_what_is_held
from sublet.office.ledger.state import State
from sublet.office.policy_file import KEYS, PolicyLimits
from sublet.office.ports import Agent
from sublet.office.shared_socket import SharedSocket
from sublet.values import NS_PER_S, Kind, ResourceId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.orders import Device, Inventory, Report
from sublet.wire.program_files import check_program
from sublet.wire.sockets import PeerProcess
from sublet.wire.unix import short_path

IDLE_ENDS_S: Final = 600.0
"""An office that started by itself ends after this long without lease, queue entry, teardown, quarantine or request."""
IDLE_LOOK_S: Final = 30.0
DISK_LOOK_S: Final = 10.0
CLOCK_SLACK_NS: Final = 2 * NS_PER_S
"""The journal knows the time to the second while anything lives: that much a reboot may hide of a lease's time."""
COLLECT_AFTER: Final = (5_000, 20, 200)
RATES_FILE: Final = "rates.toml"
"""In the state folder: what a device, a core, a GiB cost per hour."""
BACKLOG: Final = 1024
FILES_WANTED: Final = 8192
"""Descriptors: each connection takes one."""

_log: Final = logging.getLogger(__name__)


class Office:
    """Broker, agent and socket of one state folder, inside a running loop."""

    def __init__(
        self,
        home: Path,
        *,
        host_gpus: str | None = None,
        embedded: bool = False,
        local_rule: bool = True,
        policy: Policy | None = None,
        limits: PolicyLimits | None = None,
        clock: Clock | None = None,
        die: Callable[[str], None] | None = None,
        make_agent: Callable[..., Agent] | None = None,
        beginning: Beginning | None = None,
        before_serving: Callable[[], None] = lambda: None,
        shared: Path | None = None,
    ) -> None:
        """``limits``: instead of those of the home's ``policy.toml``. ``shared``: the folder of a second pair of
        sockets, for every user of the machine. ``make_agent``: makes an agent without a supervisor
        (``sublet.testing.MemoryAgent``); nothing can run under a lease then.
        ``beginning``: what was begun already, and is closed by the caller."""
        self.home = home
        self.clock = SystemClock() if clock is None else clock
        self.ended = asyncio.Event()
        self._gpus = None if host_gpus is None else parse_host_gpus(host_gpus)
        self._embedded = embedded
        self._local_rule = local_rule
        self._limits = read_limits(home / POLICY_FILE) if limits is None else limits
        self._durations = Policy() if policy is None else policy
        self._policy = self._limits.policy(Policy()) if policy is None else policy
        self._die = end_process if die is None else die
        self._make_agent = make_agent
        self._beginning = beginning
        self._before_serving = before_serving
        self._shared = shared
        self._shared_server: HttpServer | None = None
        self._cards: Cards | None = None
        self._shows_pids: bool | None = None
        self._set_caps: Callable[[LeaseCaps], Awaitable[None]] | None = None
        self._idle_since_ns = 0
        self._requests_seen = -1
        self._idle_timer: asyncio.TimerHandle | None = None
        self._disk_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """From nothing to serving. If it raises, nothing is left open."""
        self._stack = contextlib.AsyncExitStack()
        async with self._stack:
            beginning = self._beginning or self._stack.enter_context(
                begun(self.home, self.clock, supervised=self._make_agent is None)
            )
            journal, self._room = beginning.journal, beginning.room
            ledger, opening, entries = self._recover(journal)
            self.driver = Driver(
                ledger=ledger,
                journal=journal,
                clock=self.clock,
                die=self._die,
                since_snapshot=entries,
                is_short=beginning.room.is_short,
            )
            self._stack.callback(self.driver.stop)
            if self._shared is not None:
                prepare(self._shared, self.home)
                _log_who_asks()
            rates = _rates(self.home / RATES_FILE)
            check_prices(ledger.state, rates, rates.missing)
            self.service = ApiService(
                driver=self.driver,
                identity=OfficeIdentity(
                    pid=os.getpid(),
                    version=__version__,
                    home=self.home,
                    embedded=self._embedded,
                    host_gpus="" if self._gpus is None else str(self._gpus),
                    shared="" if self._shared is None else str(self._shared),
                    started_ns=self.clock.now_ns(),
                    started_wall_ns=self.clock.wall_ns(),
                ),
                access=AccessList(local_rule=self._local_rule, owner=os.geteuid()),
                signer=Signer.open(self.home / "keys", journal.id),
                archive=journal,
                rates=rates,
                limits=self._limits,
                shared=SharedSocket(self._limits.shared()),
                apply_limits=self.apply_limits,
                stop=self.stop,
                why_no_room=beginning.room.why_short,
            )
            self._machine = await self._tried(
                machine_inventory(self.home, self._gpus, disk_kept_back=self._limits.number("office.disk_reserve")),
                ledger.state,
            )
            self._inventory = with_what_is_held(within(self._machine, self._limits), ledger.state)
            agent = await self._agent(with_what_is_held(self._machine, ledger.state), beginning, ledger.state)
            await self.driver.start(opening, [agent])
            await self.driver.submit(SetPrices(prices=prices_record(rates), missing=rates.missing))
            await self._apply(self._limits, {})
            plan_recurrences(self.driver)
            if isinstance(agent, SupervisedAgent):
                agent.listen()
                if self._cards is not None:
                    self._cards.start()
                    await self._cards.seen()  # or a card would be lent for oneself beside others for a moment
            processes = ProcessTable()
            watch = HolderWatch(self.driver, processes)
            self._stack.callback(watch.close)
            watch.start()
            app = App(self.service)
            of_user = self._limits.value("user.connections")
            self.server = HttpServer(
                app, on_limit=self.service.limit, processes=processes, die=self._die, of_user=of_user
            )
            self._before_serving()
            note_end(self.home, is_ended=False)
            await self._serve_on(self.server, socket_path(self.home), _listen)
            if self._shared is not None:
                self._shared_server = HttpServer(
                    app, on_limit=self.service.limit, processes=processes, die=self._die, of_user=of_user, shared=True
                )
                await self._serve_on(self._shared_server, self._shared / socket_path(self.home).name, listen_for_all)
            self._stack.callback(self.service.close)
            if self._embedded:
                self._end_if_idle()
            self._check_disk()
            self._stack.callback(self._note_end)  # before a client can find that nothing answers
            self._stack = self._stack.pop_all()

    async def _serve_on(self, server: HttpServer, path: Path, listen: Callable[[Path], socket.socket]) -> None:
        listening = listen(path)
        self._stack.callback(path.unlink, missing_ok=True)
        await server.start(listening)
        self._stack.push_async_callback(server.close)

    def _note_end(self) -> None:
        with contextlib.suppress(OSError):  # then a late holder starts an office, which tells it
            note_end(self.home, is_ended=self.service.ends_for_good)

    def stop(self) -> None:
        """Ask it to end; leases stay as they are."""
        self.ended.set()

    async def close(self) -> None:
        """Undo the start, last thing first."""
        for timer in (self._idle_timer, self._disk_timer):
            if timer is not None:
                timer.cancel()
        await self._stack.aclose()

    async def _tried(self, machine: Inventory, state: State) -> Inventory:
        """What there is, without the cards that cannot be used. A card under a lease was tried before."""
        used = {device.id for device in machine.devices if card_of(device) and _used(device.id, state)}
        devices = (_as_tried(one, state.resources[one.id].device) if one.id in used else one for one in machine.devices)
        machine = replace(machine, devices=tuple(devices))
        cards = {
            uuid: device.nodes for device in machine.devices if (uuid := card_of(device)) and device.id not in used
        }
        before = in_use(cards) if cards else {}
        tried = await rehearse_all(cards, self._limits.caps())
        self._shows_pids = shows_pids(tried)
        busy = {one.card for one in tried if one.busy}
        # Afterwards: a card may let only one process in at a time.
        probed = await probe_cards(offered(machine, tried), busy=busy)
        alone = {card_of(device) for device in probed.devices if device.one_process}
        await asyncio.to_thread(await_gone, {card: used for card, used in before.items() if card in alone - busy})
        return probed

    async def _agent(self, inventory: Inventory, beginning: Beginning, state: State) -> Agent:
        """With a supervisor and a door for holders, unless the caller makes another."""
        if self._make_agent is not None:
            return self._make_agent(self._inventory, report=self.driver.report, clock=self.clock)
        assert beginning.supervisor is not None
        # Orders are only checked against the whole machine there: how much of it is lent changes, and is decided here.
        agent = SupervisedAgent(
            _with_disk(inventory, disk_bytes(self.home)),
            offered=lambda: self._inventory,
            caps=self._caps(self._limits),
            office=beginning.journal.id,
            incarnation=lambda: state.books.incarnation,
            connect=beginning.supervisor,
            report=self._on_report,
            on_new_supervisor=lambda: self.driver.submit(NodeUp(inventory=self._inventory)),
            generations=lambda: _generations(state),
            die=self._die,
        )
        await agent.start()
        self._stack.push_async_callback(agent.close)
        self._watch_cards(inventory, agent, state)
        self.service.list_guests = agent.guests
        self.service.list_troubles = agent.troubles
        self.service.supervisor_silent_s = lambda: agent.silent_s(self.clock.now_ns())
        self.service.cut_off = agent.cut_off
        self._set_caps = agent.set_caps
        path = data_path(self.home)
        self._open_door(path, _listen(path), agent, shared=False)
        if self._shared is not None:
            path = self._shared / path.name
            self._open_door(path, listen_for_all(path), agent, shared=True)
        return agent

    def _open_door(self, path: Path, listening: socket.socket, agent: SupervisedAgent, *, shared: bool) -> None:
        door = Door(listening, _Rights(self.service, shared=shared), agent, die=self._die, on_limit=self.service.limit)
        door.open()
        self._stack.callback(path.unlink, missing_ok=True)
        self._stack.callback(door.close)

    def _caps(self, limits: PolicyLimits) -> LeaseCaps:
        """What the supervisor is to go by."""
        return replace(limits.caps(), shows_pids=self._shows_pids)

    def _watch_cards(self, inventory: Inventory, agent: SupervisedAgent, state: State) -> None:
        if has_cards(inventory):
            self._cards = Cards(
                inventory,
                processes=agent.processes,
                leased=lambda resource: _used(resource, state),
                sees_processes=self._shows_pids,
                allowed=lambda: bool(self._limits.number("office.lend_beside")),
                lets_go=lambda: _allows_maintenance(state),
                report=self.driver.report,
                now_ns=self.clock.now_ns,
                die=self._die,
            )
            self._stack.push_async_callback(self._cards.close)

    def _on_report(self, report: Report) -> None:
        """The supervisor says something. Of devices that others have, the watch over the cards knows more."""
        if self._cards is not None:
            self._cards.on_report(report)
        else:
            self.driver.report(report)

    def _recover(self, journal: Journal) -> tuple[Ledger, OpenOffice, int]:
        found = journal.recover()
        if found.snapshot is None:
            state = State.fresh(self._policy)
        else:
            state = State.restore(found.snapshot)
        entries = 0
        for entry in found.entries:
            apply(state, entry.event, Now(entry.ns, entry.wall_ns))
            entries += 1
        opening = OpenOffice(
            incarnation=found.incarnation,
            clock_domain=self.clock.domain,
            last_ns=found.last_ns,
            slack_ns=CLOCK_SLACK_NS,
            restored=found.restored,
        )
        return Ledger(self._policy, state), opening, entries

    def _end_if_idle(self) -> None:
        """End an embedded office that is idle; looked at twice a minute."""
        now_ns = self.clock.now_ns()
        is_busy = self.server.busy or (self._shared_server is not None and self._shared_server.busy)
        if self.service.in_use or is_busy or self.service.requests != self._requests_seen:
            self._requests_seen = self.service.requests
            self._idle_since_ns = now_ns
        elif now_ns - self._idle_since_ns >= IDLE_ENDS_S * NS_PER_S:
            self.stop()
            return
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_LOOK_S, self._end_if_idle)

    async def apply_limits(self, caller: Caller) -> PolicyLimits:
        """Read ``policy.toml`` again and go by it. With a mistake in it, or if it cannot be written down who did it,
        nothing changes. Leases keep what they have, and the caps that they began with."""
        limits = read_limits(self.home / POLICY_FILE)
        changed = {
            path: key.shown(limits.value(path))
            for path, key in KEYS.items()
            if limits.value(path) != self._limits.value(path)
        }
        await self._apply(limits, changed, caller)
        self._limits = limits
        self.driver.ledger.set_policy(limits.policy(self._durations))
        await self.driver.submit(Tick())  # a limit may have been all that a waiting request lacked
        self.service.set_limits(limits)
        for server in filter(None, (self.server, self._shared_server)):
            server.bound_users(limits.value("user.connections"))
        self._offer()
        if self._set_caps is not None:
            await self._set_caps(self._caps(limits))
        return limits

    async def _apply(self, limits: PolicyLimits, changed: Mapping[str, str], caller: Caller | None = None) -> None:
        """The groups, reservations and budgets of the file; refused, they say in which file they are."""
        command = to_apply(limits, changed, self.driver.now(), self.service.rates.missing, caller)
        try:
            await self.driver.submit(command)
        except InvalidRequest as error:
            reason = limits.with_lines(error)
            raise InvalidRequest(f"{self.home / POLICY_FILE}: {reason.message}", do=reason.do) from error

    def _offer(self) -> None:
        """What may be lent of this machine, where that has changed."""
        offered = with_what_is_held(within(self._machine, self._limits), self.driver.ledger.state)
        if offered.devices != self._inventory.devices:
            self._inventory = offered
            self.driver.post(NodeUp(inventory=offered))

    def _check_disk(self) -> None:
        """What is lent of the disk is never more than is there. What leases have of it stays theirs."""
        self._disk_timer = asyncio.get_running_loop().call_later(DISK_LOOK_S, self._check_disk)
        if not self._room.is_short():
            self._room.lay_out()
        try:
            available = block_bytes(self.home, self._limits.number("office.disk_reserve"))
        except OSError as error:
            _log.warning("the room on the disk could not be seen: %s", error)
            return
        resources = self.driver.ledger.state.resources.values()
        offered = sum(resource.device.capacity for resource in resources if resource.device.kind is Kind.BLOCK)
        if offer_again(offered, available):
            self._machine = _with_disk(self._machine, available)
        self._offer()


def _used(resource: ResourceId, state: State) -> int:
    """How much of it is under leases, teardown included."""
    return state.resources[resource].used if resource in state.resources else 0


def _as_tried(device: Device, before: Device) -> Device:
    """A device under a lease with what an earlier rehearsal found."""
    return replace(device, one_process=before.one_process, walled_trouble=before.walled_trouble)


def _allows_maintenance(state: State) -> bool:
    """Whether an operator may want to work on a card of this machine: one is at fault, or no more leases are given."""
    node = state.nodes.get(LOCAL_NODE)
    return node is not None and (
        node.draining
        or any(
            card_of(resource.device)
            and SliceState.QUARANTINED in (resource.state, *(piece.state for piece in resource.slices.values()))
            for resource in map(state.resources.__getitem__, node.resources)
        )
    )


def _generations(state: State) -> dict[TenantId, int]:
    """Of the rights of tenants, where they ever changed."""
    changed = {tenant.id: tenant.generation for tenant in state.tenants.values() if tenant.generation}
    return state.books.removed | changed


class _Rights:
    """The rights of holders, as the broker knows them, for one of the agent's doors."""

    def __init__(self, service: ApiService, *, shared: bool) -> None:
        self._service = service
        self._shared = shared

    def claims(self, capability: str, peer: PeerProcess, *, as_tenant: bool) -> TokenClaims:
        service = self._service
        claims = verify(capability, service.signer.public_keys, service.driver.clock.wall_ns() // NS_PER_S)
        for tenant, generation in filter(None, ((claims.tenant, claims.generation), claims.actor)):
            if generation != service.access.generation(tenant):
                raise Unauthorized(
                    "the rights of this tenant have changed", do="Get a fresh token with the next renewal."
                )
        service.check_tenant(claims.tenant, self._origin(peer), as_tenant=as_tenant)
        return claims

    def visitor(self, access: str, peer: PeerProcess, *, as_tenant: bool) -> Visitor:
        authorization = b"Bearer " + access.encode("utf-8", "replace") if access else None
        caller = self._service.caller(authorization, self._origin(peer), as_tenant=as_tenant)
        generation = self._service.access.generation(caller.tenant)
        if generation is None:
            raise Unauthorized("there is no such tenant any more")
        return Visitor(caller.tenant, caller.operator, generation)

    def _origin(self, peer: PeerProcess) -> Origin:
        return Origin(shared=self._shared, uid=peer.uid, pid=peer.pid)


def run_office(
    home: str | os.PathLike[str] | None = None,
    *,
    host_gpus: str | None = None,
    embedded: bool = False,
    policy: Policy | None = None,
    ready: Callable[[], None] | None = None,
    beginning: Beginning | None = None,
    before_serving: Callable[[], None] = lambda: None,
    shared: Path | None = None,
    ended_for_good: Callable[[], object] | None = None,
) -> int:
    """Be the office of this home until told to end; the exit status. ``ready`` is called once it answers.
    ``shared``: the folder of its sockets for other users. ``beginning``: what was begun of it already.
    ``before_serving`` is called before it answers any request; if it raises, nothing was started. ``ended_for_good`` is
    called after an end that was asked for, and was to leave nothing."""
    if sys.platform != "linux":
        raise Unsupported("an office runs on Linux only", do="Connect to one elsewhere: set SUBLET_URL to its address.")
    check_program()
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        office = Office(
            home_dir(home),
            host_gpus=host_gpus,
            embedded=embedded,
            policy=policy,
            beginning=beginning,
            before_serving=before_serving,
            shared=shared,
        )
        runner.run(_serve(office, ready))
    if ended_for_good is not None and office.service.ends_for_good:
        ended_for_good()
    return 0


async def _serve(office: Office, ready: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, office.stop)
    loop.set_exception_handler(_note_failure)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # a closed terminal is no reason to end
    await office.start()
    # A full collection walks through every lease, which takes 80 ms with ten thousand of them, in which nothing is
    # answered. The books hold no cycles; what does (errors with their frames) dies young. So the young are collected as
    # ever, everything seldom, and what lives now, to the end, never.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()  # who loaded us may have done without
    try:
        if ready is not None:
            ready()
        await office.ended.wait()
    finally:
        await office.close()


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Count failures in callbacks of the loop, which no caller could catch, besides logging them."""
    error = context.get("exception")
    if isinstance(error, BaseException):
        count("office_loop", error)
    loop.default_exception_handler(context)


def _with_disk(inventory: Inventory, amount: int) -> Inventory:
    devices = (replace(one, capacity=amount) if one.kind is Kind.BLOCK else one for one in inventory.devices)
    return replace(inventory, devices=tuple(devices))


def _rates(path: Path) -> Rates:
    try:
        return parse_rates(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Rates()
    except InvalidRequest as error:
        raise InvalidRequest(f"{path} cannot be used: {error.message}", do=error.do) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the rates in {path} cannot be read ({error})", do="Fix or remove the file.") from error


def _listen(path: Path) -> socket.socket:
    """The owner's socket. The holder of the journal's lock is the only office, so a socket that lies there is stale."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        with short_path(os.fspath(path)) as address:
            listening.bind(address)
    finally:
        os.umask(mask)
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def _log_who_asks() -> None:
    """Callers over the shared sockets are written to the office's log."""
    logger = logging.getLogger("sublet.shared")
    if logging.getLogger().handlers:  # of the whole process
        logger.setLevel(logging.INFO)
        return
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
