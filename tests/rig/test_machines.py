"""The table: each machine × start, lease, run, park, resume, release, kill, doctor, in a whole office.

What is to come of a cell follows from the lines of the personality, which say where they were read, by the rules in
``row_of``, each with its source. In the suite as few machines run as meet each outcome of each event (``covering``),
and with ``SUBLET_MACHINES=all`` (the soak) all of them. What an office does first on a machine is tried on every one in
``test_personalities``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.errors import CapacityExceeded, SubletError
from sublet.node.agent.foreign import STEP
from sublet.values import MIB, Exclusivity
from tests.commands import run_program
from tests.rig import card_functions
from tests.rig.personalities import NO_FABRIC, NO_UVM, PERSONALITIES, Personality
from tests.rig.quick_office import quick_office
from tests.rig.rig import Rig, forking_rig

pytestmark = pytest.mark.needs("gcc")

WAIT_S: Final = 120.0
SUSPENDS, MOVES = 12_080, 13_000
"""CUDA Driver API, process checkpoints: since 12.8; to another GPU since 13.0."""
EXCLUSIVE_PROCESS: Final = 3
CONTEXT: Final = 72 * MIB
HELPS: Final = {NO_FABRIC.name: "fabricmanager", NO_UVM.name: "nvidia-modprobe"}
"""What brings cards back of which CUDA does not begin: Fabric Manager User Guide; NVIDIA driver README."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is to come of it, by the personality's sources."""

    start: dict[str, str]
    """Each kind of card that is lent, and what its guests may go on with: "none", "same_device" or "same_type"."""
    lease: dict[str, bool]
    """Exclusivity → whether it is granted."""
    run: bool
    """Whether a guest computes on the card that its lease has, and on no other."""
    park: dict[str, bool]
    """Exclusivity → whether its guest lives on when its lease is taken."""
    resume: dict[str, bool]
    """Whether the same process goes on, with the memory that it had."""
    release: bool
    """Whether the card is free and overwritten then."""
    kill: bool
    """The same with a guest that was killed."""
    doctor: list[str]
    """State of each kind of card, the help that is named, whether VRAM is watched."""


def row_of(personality: Personality) -> Row:
    """By its lines alone."""
    machine, shown = personality.machine, [c for i, c in enumerate(personality.cards) if i not in personality.hidden]
    cuda, is_broken = machine["cuda"], bool(machine.get("init_code"))
    kinds = {}
    if not personality.not_lent:
        if whole := [card for card in shown if not {"split", "parent"} & card.fields.keys()]:
            # MPS: its clients are not suspended (guessed). A map of GPUs has to name each that the kernel driver has,
            # also those that a container has not (cuda.core, checkpoint), so there nothing moves.
            moves = cuda >= MOVES and len(whole) > 1 and not personality.hidden
            ability = "same_type" if moves else "same_device" if cuda >= SUSPENDS else "none"
            kinds["session"] = "none" if machine.get("mps") else ability
        if any("parent" in card.fields for card in shown):
            kinds["partition"] = "none"  # MIG User Guide and CUDA Driver API: no checkpoints there
    lent = {} if is_broken else kinds
    # NVML: in EXCLUSIVE_PROCESS one process at a time has a context, so neighbours cannot share.
    alone = any(card.fields.get("compute_mode") == EXCLUSIVE_PROCESS for card in shown)
    works = bool(lent)
    silent = any("ComputeRunningProcesses" in line.field for line in personality.answers)
    states = [] if not kinds else ["broken" if is_broken else "note" if alone else "ok"]
    return Row(
        start=lent,
        lease={
            "session": "session" in lent,
            "shared": "session" in lent and not alone,
            "partition": "partition" in lent,
        },
        run=works,
        park={kind: ability != "none" for kind, ability in lent.items() if kind != "partition"},
        resume={kind: True for kind, ability in lent.items() if ability != "none"},
        release=works,
        kill=works,
        doctor=[
            *states,
            *([HELPS[personality.name]] if is_broken else []),
            *(["watched"] if works and not silent else []),
        ],
    )


def cells_of(row: Row) -> set[tuple[str, ...]]:
    """Each event with what comes of it, as far as machines can differ in it. Of the help that ``doctor`` names there is
    one text for each broken machine, which ``test_personalities`` looks for on all of them."""
    found: set[tuple[str, ...]] = {("start", kind, ability) for kind, ability in row.start.items()} or {
        ("start", "nothing")
    }
    for event in ("lease", "park", "resume"):
        found |= {(event, kind, str(came)) for kind, came in getattr(row, event).items()}
    found |= {(event, str(getattr(row, event))) for event in ("run", "release", "kill")}
    return found | {("doctor", *(word for word in row.doctor if word not in HELPS.values()))}


def covering(personalities: Sequence[Personality]) -> list[Personality]:
    """Few machines that together meet every cell of all: each time the one that meets most of those left, and the first
    of several such."""
    left = set[tuple[str, ...]]().union(*(cells_of(row_of(one)) for one in personalities))
    found = list[Personality]()
    while left:
        best = max(personalities, key=lambda one: len(cells_of(row_of(one)) & left))
        found.append(best)
        left -= cells_of(row_of(best))
    return found


MACHINES: Final = PERSONALITIES if os.environ.get("SUBLET_MACHINES") == "all" else covering(PERSONALITIES)


def test_the_machines_that_run_meet_each_outcome_of_each_event() -> None:
    """Chosen by rule, so a personality with an outcome of its own is among them."""
    met = set[tuple[str, ...]]().union(*(cells_of(row_of(one)) for one in MACHINES))
    for personality in PERSONALITIES:
        assert cells_of(row_of(personality)) <= met, personality.name
    assert {event for event, *_ in met} == {field.name for field in fields(Row)}


STEPS: Final = ", ".join(rf"{step} \d+\.\d\d s" for step in ("NVML", "CUDA", "cleaning", "guest"))
TRIED: Final = rf"; tried: {STEPS}(, suspending \d+\.\d\d s \(once for its model\))?$"
"""Each step of a rehearsal, with its time."""
DOCTOR: Final = """
import json
from sublet.cli.doctor_devices import gpu_checks
print(json.dumps({name: check() for name, check in gpu_checks().items() if name.startswith("card ")}))
"""


class Machine:
    """An office on it, used from this process."""

    def __init__(self, rig: Rig, fabric: sublet.Fabric) -> None:
        self.rig, self.fabric = rig, fabric
        answers = {line.field for line in rig.personality.answers}
        hides = "nvmlDeviceGetComputeRunningProcesses_v3" in answers
        drawn = sum(line.value for line in rig.personality.desktop)
        unseen = max(card.fields.get("idle", 0) for card in rig.personality.cards) if hides else 0
        self.kept = drawn + unseen + STEP if drawn or hides else 0
        """What a desktop has of a card, also where the driver does not tell whose memory is in use: it is never lent.
        """

    def cards(self) -> list[dict[str, Any]]:
        found = self.fabric.request("GET", "/v1/status", shape=dict)
        return [device for device in found["devices"] if device["kind"] == "gpu"]

    def is_free(self, card: dict[str, Any]) -> bool:
        taken: int = card["capacity"] - card["free"]
        return card["state"] == "free" and not card["leases"] and taken <= self.kept

    def is_clean(self, uuid: str) -> bool:
        """Once its last lease is over: free, and nothing but zeros is left on it."""

        _until(lambda: all(self.is_free(one) for one in self.cards() if _digits(one["id"]) == uuid), "a free card")
        index = [bytes(card.uuid).hex() for card in self.rig.state.cards].index(uuid)
        return not self.rig.dirty(index)

    def granted(self, kind: str, *, at_once: bool = False) -> bool:
        """``at_once``: by an office that has just begun, whose first answer holds."""
        if not at_once:
            _until(lambda: all(map(self.is_free, self.cards())), "free cards")
        try:
            self.fabric.gpu(min_vram="1GiB", exclusivity=Exclusivity(kind), wait=0, ttl="60s").release()
        except (CapacityExceeded, SubletError):
            return False
        return True

    def go_through(self, kind: str, found: dict[str, Any]) -> None:
        """Run, park, resume, release and kill on a card of this kind."""
        fabric = self.fabric
        lease = fabric.gpu(min_vram="1GiB", exclusivity=Exclusivity(kind), ttl="60s", spot=True, renew="always")
        pid, uuid, _ = lease.run(card_functions.begin)
        dirty = [index for index, card in enumerate(self.rig.state.cards) if card.memory and self.rig.dirty(index)]
        leased = [bytes(card.uuid).hex() for card in self.rig.state.cards].index(_digits(lease.devices[0].id))
        found["run"] &= dirty == [leased] and uuid == _digits(lease.devices[0].id)
        if kind == "session":
            count = sum(not card["id"].rpartition("/")[2].startswith("MIG-") for card in self.cards())
            taken = fabric.gpu(
                min_vram="1GiB", count=count, exclusivity=Exclusivity(kind), ttl="60s", wait="60s", renew="always"
            )
            _until(lambda: lease.end is not None, "the end of its lease")
            assert lease.end is not None
            found["park"][kind] = lease.end.way == "suspend"
            taken.release()
            if lease.end.way == "suspend":
                lease = fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always")
                again, uuid, is_same = lease.run(card_functions.look)
                found["resume"][kind] = again == pid and is_same and uuid == _digits(lease.devices[0].id)
            else:
                lease = fabric.gpu(
                    min_vram="1GiB", exclusivity=Exclusivity(kind), ttl="60s", wait="60s", renew="always"
                )
                _, uuid, _ = lease.run(card_functions.begin)
        lease.release()
        found["release"] &= self.is_clean(uuid)
        lease = fabric.gpu(min_vram="1GiB", exclusivity=Exclusivity(kind), ttl="60s", renew="always")
        pid, uuid, _ = lease.run(card_functions.begin)
        os.kill(pid, signal.SIGKILL)
        lease.release()
        found["kill"] &= self.is_clean(uuid)

    def doctor(self) -> list[str]:
        done = run_program(DOCTOR, env=os.environ, timeout=WAIT_S)
        assert done.status == 0, done
        said: list[list[str]] = list(json.loads(done.out).values())
        states = sorted({state for state, *_ in said})
        do = next((more[0] for state, _, *more in said if state == "broken"), "")
        helps = [word for word in HELPS.values() if word in do]
        tried = [one[1] for one in said if one[0] != "broken" and ": lent" in one[1]]
        assert all(re.search(TRIED, text) for text in tried), tried
        return [*states, *helps, *(["watched"] if all("watch of VRAM: yes" in one[1] for one in said) and said else [])]


def small_contexts(rig: Rig) -> None:
    """A guess, made smaller, where no office asks the driver at the notice, or the driver is slow: what a guest took
    since the last look is set aside for it up to 96 MiB, and where it has more its lease ends unparked."""
    for card in rig.state.cards:
        card.context = min(card.context, CONTEXT)


def _digits(name: str) -> str:
    return name.rpartition("/")[2].partition("-")[2].replace("-", "")


def _until(what: Any, text: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end_s, f"{text} did not come to be"
        time.sleep(0.05)


@pytest.fixture
def machine(
    request: pytest.FixtureRequest, rig_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    home = tmp_path / "home"
    home.mkdir()
    with forking_rig(rig_place, request.param) as rig, quick_office(home, rig.env):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(rig.folder))
        for index, _ in enumerate(request.param.cards):  # what the rehearsal wrote there
            rig.wipe(index)
        with sublet.connect(home=home) as fabric:
            yield Machine(rig, fabric)
            fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)


@pytest.mark.parametrize("machine", MACHINES, indirect=True, ids=lambda one: one.name)
def test_a_machine_does_what_its_sources_say(machine: Machine) -> None:
    expected = row_of(machine.rig.personality)
    first = machine.granted("session", at_once=True)
    cards = machine.cards()
    kind = {True: "partition", False: "session"}
    start = {kind[card["id"].rpartition("/")[2].startswith("MIG-")]: card["suspend"] for card in cards}
    found: dict[str, Any] = {"start": start, "park": {}, "resume": {}}
    found["lease"] = {name: first if name == "session" else machine.granted(name) for name in expected.lease}
    found |= dict.fromkeys(("run", "release", "kill"), bool(start))
    for name in start:
        machine.go_through(name, found)
    found["doctor"] = machine.doctor()
    assert found == asdict(expected)
