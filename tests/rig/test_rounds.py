"""Rounds on four pretended cards, drawn from a seed: a whole office races, loses processes, suspends, and meets a bad
driver.

At every grant no context of an ended lease is on the card, and nothing but zeros lies in its memory. After every round
all cards are free again: an application's fault quarantines none, and of the driver's only one that kept a card from
being overwritten does. The office answers all the time.

The first rounds of a kind take each variant of it in turn, so that few rounds meet all; the rest is drawn.
``SUBLET_RIG_ROUNDS`` says how many rounds of each kind (each variant once; the soak has 500), ``SUBLET_RIG_SEED`` with
which seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers, ensure_office
from sublet.devices.plain_cuda import CALLS
from sublet.errors import SubletError
from sublet.node.agent.rehearsal import PATTERN
from sublet.values import MIB
from tests.rig import card_functions
from tests.rig.personalities import FOUR_H100
from tests.rig.rig import SOON_MS, Rig, clear, forking_rig
from tests.rig.test_interface import exported
from tests.rig.test_machines import small_contexts
from tests.traces import supervisor_of

pytestmark = pytest.mark.needs("gcc")

ROUNDS: Final = int(os.environ.get("SUBLET_RIG_ROUNDS", "0"))
SEED: Final = int(os.environ.get("SUBLET_RIG_SEED", "1"))
CARDS: Final = 4
WAIT_S: Final = 120.0
OFFICE: Final = ("up", "--foreground")
OF_PROGRAMS: Final = (13, 31, 43, 45, 68, 69, 109)
"""Xids that any program can bring about: NVIDIA's k8s-device-plugin passes over them."""
ERRORS: Final = {
    "cu": (1, 2, 3, 46, 100, 201, 700, 719, 802, 999, 12_345),
    "nv": (2, 3, 4, 10, 19, 21, 25, 999, 12_345),
}
HANGS_S: Final = 0.5
LINGERS_MS: Final = (SOON_MS, 300)
"""How long the memory of a process that has ended stays in use, in this round."""
VARIANTS: Final = {
    "race": ("revoke", "kill", "release"),
    "kill": ("guest", "supervisor", "office"),
    "suspend": ("there", "elsewhere", "anywhere"),
    "trouble": ("program", "code", "delay", "hang"),
}
"""Of each kind of round: how the lease ends, what is killed, where the guest goes on, what goes wrong."""
COUNTED: Final = {"race": "ended: {}", "kill": "killed: {}", "suspend": "resumed: {}", "trouble": "trouble: {}, met"}
EVERY_LEASE_MEETS: Final = ("cuInit", "cuMemsetD8_v2")
"""Each trouble goes wrong in one of these until it was met, and then in whatever is drawn."""


class Rounds:
    """One office and what happens to it."""

    def __init__(self, rig: Rig, home: Path, fabric: sublet.Fabric) -> None:
        self.rig, self.home, self.fabric = rig, home, fabric
        of_cuda = {name + version for name, (version, _, _) in CALLS.items()}
        of_cuda |= {name for name in exported("libcuda.so.1") if name.startswith("cuCheckpointProcess")}
        of_nvml = {name for name in exported("libnvidia-ml.so.1") if name.startswith("nvmlDevice")}
        self.calls = sorted(of_cuda | of_nvml | {"nvmlInit_v2"})
        self.met: dict[str, int] = {}

    # ---- one round each ----

    def race(self, chance: random.Random, how: str) -> None:
        """A lease ends, the first one so, while a request for all cards waits."""
        mine = [self.take() for _ in range(chance.randint(1, 3))]
        pids = [lease.run(card_functions.begin)[0] for lease in mine]
        with ThreadPoolExecutor(1) as beside:
            other = beside.submit(self.take, count=CARDS)
            for lease, pid in zip(mine, pids, strict=True):
                time.sleep(chance.choice((0, 0.001, 0.01, 0.05)))
                self.end(lease, pid, how)
                how = chance.choice(VARIANTS["race"])
            other.result(WAIT_S).release()

    def kill(self, chance: random.Random, victim: str) -> None:
        """A guest, the supervisor or the office ends by SIGKILL at any moment."""
        lease = self.take()
        future = lease.submit(card_functions.begin)
        time.sleep(chance.choice((0, 0.05, 0.2, 0.5)))
        self.count("killed", victim)
        if victim == "guest":
            for row in self.rig.state.processes:
                if row.taken and not row.pretended:
                    _killed(row.pid)
        elif victim == "supervisor":
            _killed(supervisor_of(runtime_dir(self.home.resolve())) or 0)
        else:
            _killed(self.status()["pid"])
            path = socket_path(self.home.resolve())  # it takes connections until the last thread of the office is gone
            _until(lambda: not answers(path), "the end of the office")
            ensure_office(self.home, words=OFFICE)
        for ends in (lambda: future.result(WAIT_S), lease.release):
            with contextlib.suppress(SubletError):
                ends()

    def suspend(self, chance: random.Random, where: str) -> None:
        """Taken by a request for all cards; goes on with what it had, on the card that is there: only its own, another
        one, or what others leave."""
        lease = self.take(spot=True)
        pid, _, _ = lease.run(card_functions.begin)
        all_cards = self.take(count=CARDS)
        _until(lambda: lease.end is not None, "the end of its lease")
        assert lease.end is not None
        assert lease.end.way == "suspend", lease.end
        all_cards.release()
        others = [self.take() for _ in range(CARDS)]
        own = next(one for one in others if one.devices[0].id == lease.devices[0].id)
        others.remove(own)
        if where == "there":
            kept, let_go = others, [own]
        else:
            kept = chance.sample(others, chance.randint(0, CARDS - 2))
            let_go = [one for one in others if one not in kept]
            (kept if where == "elsewhere" else let_go).append(own)
        for one in let_go:
            one.release()
        again = self.fabric.gpu(resume=lease, ttl="60s", wait="120s", renew="always")
        now, uuid, is_same = again.run(card_functions.look)
        assert (now, is_same) == (pid, True)
        assert uuid == _digits(again.devices[0].id)
        found = "there" if again.devices[0].id == own.devices[0].id else "elsewhere"
        assert where in ("anywhere", found)
        self.count("resumed", where)
        for one in (again, *kept):
            one.release()

    def trouble(self, chance: random.Random, kind: str) -> None:
        """The driver answers late, with errors, or not for a while; a program makes mistakes of its own."""
        calls = self.calls if f"trouble: {kind}, met" in self.met else EVERY_LEASE_MEETS
        call, rows, may_be_hard = chance.choice(calls), [], False
        lease = None
        if kind == "program":
            lease = self.take()
            pid, _, _ = lease.run(card_functions.begin)
            index = self.index_of(lease.devices[0].id)
            self.rig.xid(index, chance.choice(OF_PROGRAMS))
            rows = [self.rig.trouble("cuMemcpyDtoH_v2", code=chance.choice((700, 719)), pid=pid)]
        elif kind == "code":
            code = chance.choice(ERRORS[call[:2]])
            rows = [self.rig.trouble(call, code=code, skip=chance.choice((0, 1, 3)), times=chance.choice((1, 2, 5)))]
            may_be_hard = call[:2] == "cu"  # its memory could not be overwritten
        elif kind == "delay":
            rows = [self.rig.trouble(call, delay_ms=chance.choice((20, 200)), times=chance.choice((1, 5)))]
        else:
            rows = [self.rig.trouble(call, hangs=1, times=1)]
            threading.Timer(HANGS_S, setattr, (rows[0], "hangs", 0)).start()
        try:
            if lease is None:
                lease = self.take(spot=chance.random() < 0.5)
                pid, _, _ = lease.run(card_functions.begin)
            takes_all = chance.random() < 0.3
            if takes_all and (kind != "program" or "trouble: program, met" in self.met):  # a parked program meets none
                self.take(count=CARDS, wait="5s").release()  # one of them may have come into quarantine
            looked = lease.submit(card_functions.look)
            _until(lambda: looked.done() or lease.end is not None, "an answer, or the end of the lease")
            if looked.done():  # a call to a guest that was parked meanwhile waits until somebody resumes it
                looked.result()
        except SubletError:  # a program of a lease is told so; that it is, is not this test's matter
            pass
        assert self.status()["pid"]
        if lease is not None:
            self.end(lease, 0, chance.choice(VARIANTS["race"]))
        self.count("trouble", kind + (", met" if any(row.met for row in rows) else ""))
        for row in rows:
            clear(row)
        self.vouch(may_be_hard)

    # ---- within ----

    def take(self, *, count: int = 1, wait: str = "120s", spot: bool = False) -> sublet.Lease:
        """A lease of whole cards: at its grant nothing of anybody is on them."""
        lease = self.fabric.gpu(min_vram="256MiB", count=count, ttl="60s", wait=wait, spot=spot, renew="always")
        for device in lease.devices:
            index = self.index_of(device.id)
            assert not self.dirty(index), f"card {index} was lent with bytes on it"
            there = [row.pid for row in self.rig.state.processes if row.taken and row.contexts[index]]
            assert not [pid for pid in there if _lives(pid)], f"card {index} was lent with processes on it"
        return lease

    def end(self, lease: sublet.Lease, pid: int, how: str) -> None:
        self.count("ended", how)
        try:
            if how == "revoke":
                self.fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
            elif how == "kill" and pid:
                _killed(pid)
            lease.release()
        except SubletError:  # it had ended
            pass

    def settle(self) -> None:
        """No lease, no queue: every card is free, and as if it had never been used."""
        _until(lambda: all(map(_is_free, self.cards())), "four free cards")
        for index in range(CARDS):
            assert not self.dirty(index), index

    def dirty(self, index: int) -> bool:
        """Whether anything of a tenant's is on it. An office that is started anew tries each card out."""
        return self.rig.dirty(index, but=bytes([PATTERN]))

    def vouch(self, may_be_hard: bool) -> None:
        """What could not be overwritten is overwritten by the operator, who then vouches for it."""
        _until(lambda: all(_is_free(card) or card["id"] in self.hard() for card in self.cards()), "an outcome")
        for name, why in self.hard().items():
            assert may_be_hard, why
            assert "Xid" not in why
            self.count("trouble", "quarantined")
            self.rig.wipe(self.index_of(name))
            path = f"/v1/fences/clear?resource={quote(name, safe='')}"
            self.fabric.request("POST", path, {"vouch": True}, shape=list)

    def hard(self) -> dict[str, str]:
        """What is in quarantine until an operator vouches for it, and why. What was only late clears itself."""
        fences = self.fabric.request("GET", "/v1/fences", shape=list)
        return {one["resource"]: one["detail"] for one in fences if one["hard"]}

    def index_of(self, name: str) -> int:
        return [bytes(card.uuid).hex() for card in self.rig.state.cards].index(_digits(name))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.fabric.request("GET", "/v1/status", shape=dict)
        return found

    def cards(self) -> list[dict[str, Any]]:
        return [device for device in self.status()["devices"] if device["kind"] == "gpu"]

    def count(self, what: str, which: str) -> str:
        self.met[f"{what}: {which}"] = self.met.get(f"{what}: {which}", 0) + 1
        return which


def _is_free(card: dict[str, Any]) -> bool:
    return bool(card["state"] == "free" and card["free"] == card["capacity"] and not card["leases"])


def _digits(name: str) -> str:
    return name.rpartition("GPU-")[2].replace("-", "")


def _killed(pid: int) -> None:
    try:
        if pid:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _until(what: Callable[[], object], text: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end_s, f"{text} did not come to be"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, rig_place: Path) -> Iterator[Rounds]:
    home = tmp_path_factory.mktemp("home")
    with forking_rig(rig_place, FOUR_H100) as rig, pytest.MonkeyPatch.context() as patch:
        for card in rig.state.cards[:CARDS]:
            card.memory, card.reserved = 768 * MIB, 32 * MIB
        small_contexts(rig)
        patch.setenv("LD_LIBRARY_PATH", str(rig.folder))
        ensure_office(home, words=OFFICE)
        for index in range(CARDS):  # what the rehearsal wrote there
            rig.wipe(index)
        with sublet.connect(home=home, start=False) as fabric:
            yield Rounds(rig, home, fabric)
            fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.mark.xdist_group("tests/rig/test_rounds.py")
@pytest.mark.parametrize("kind", VARIANTS)
def test_no_card_is_lent_with_anything_of_others_on_it(rounds: Rounds, kind: str) -> None:
    variants = VARIANTS[kind]
    for number in range(ROUNDS or len(variants)):
        chance = random.Random(f"{SEED} {kind} {number}")
        rounds.rig.state.lingers_ms = chance.choice(LINGERS_MS)
        try:
            getattr(rounds, kind)(chance, variants[number] if number < len(variants) else chance.choice(variants))
            rounds.settle()
        except BaseException as error:
            error.add_note(f"round {number} of {kind}, SUBLET_RIG_SEED={SEED}")
            raise
    if not ROUNDS or len(variants) <= ROUNDS:
        assert [one for one in variants if not rounds.met.get(COUNTED[kind].format(one))] == [], rounds.met
    print(kind, ROUNDS or len(variants), dict(sorted(rounds.met.items())))
