"""Training programs that are killed, preempted and frozen: weights stay bit for bit those of an undisturbed run.

Seventy interruptions run with the suite. ``SUBLET_CRASH_ALL=1`` interrupts two thousand times beside once at every
line, and on a device at every act instead of at those behind which something else is found; ``SUBLET_CRASH_SEED`` draws
other moments.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.replicated import FolderReplica, ReplicaGroup, ReplicatedCheckpoint
from sublet.training import lease_has_ended
from sublet.training.step_protocol import ACTS, Act, StepVerdict
from tests.integration.training_program import FENCED, OVER, Life, real_batch, real_weights
from tests.traces import until
from tests.unit.training.stage import after_death_before, batch, uninterrupted

pytestmark = pytest.mark.warm("warp", "numpy")

ROOT: Final = Path(__file__).parents[2]
ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "52"))
INTERRUPTIONS: Final = 100 if ALL else 15
BLOCKS: Final = 10 if ALL else 1
"""Each has its own moments, and begins anew: a thousand are shared among processes, and are seen to go on."""
LINES: Final = 1000 if ALL else 40
"""At most: of a step protocol's, each once."""
PAUSE_MS: Final = 120.0
ON_A_DEVICE: Final = ACTS if ALL else (Act.OPEN, Act.MODULE, Act.LAUNCH, Act.SAVE, Act.COMPLETE, Act.DONE)
"""The others are played without an office, by the kills above and from seeds in ``tests/unit/training``."""
KILLED: Final = 128 + signal.SIGKILL
PATIENCE_S: Final = 60.0
OUTCOME: Final = {StepVerdict.RUN: "Completed", StepVerdict.SETTLE: "Recovered", StepVerdict.DUPLICATE: "Duplicate"}


@dataclasses.dataclass
class Lives:
    """Talks to the process that forks lives."""

    asks: IO[str]
    says: IO[str]
    stopped: set[int] = dataclasses.field(default_factory=set)

    def live(self, life: Life) -> int:
        """To its exit status; 0 if it has stopped (``stopped``)."""
        return self._ask(dataclasses.asdict(life))

    def go_on(self, pid: int) -> int:
        self.stopped.remove(pid)
        return self._ask({"go_on": pid})

    def _ask(self, what: dict[str, object]) -> int:
        self.asks.write(json.dumps(what) + "\n")
        self.asks.flush()
        said = json.loads(self.says.readline())
        if "stopped" in said:
            self.stopped.add(said["stopped"])
            return 0
        return int(said["status"])


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.training_program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        made = Lives(process.stdin, process.stdout)
        yield made
        for pid in list(made.stopped):
            made.go_on(pid)


def saved(place: Path, name: str, schema: str) -> tuple[int, int, bytes]:
    """Version, step and bytes of what is saved; zeros if there is nothing."""
    replicas = [FolderReplica(place / f"replica-{n}") for n in range(3)]
    with ReplicaGroup(replicas) as group:
        found = ReplicatedCheckpoint("runs", schema=schema, replicas=group).load(name)
    if found is None:
        return 0, 0, b""
    assert found.effect is not None
    return found.version, found.effect.step, found.data


def outcomes(place: Path) -> list[str]:
    file = place / "outcomes"
    return file.read_text().splitlines() if file.exists() else []


# ---- real files, real kills


@pytest.mark.timeout(900 if ALL else 300)
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("how", ["between acts", "at any moment"])
def test_weights_are_those_of_an_undisturbed_run_after_many_kills(
    lives: Lives, tmp_path: Path, how: str, block: int
) -> None:
    """After each kill the checkpoint is a whole state of some step, never an older one, and its version is that step:
    no step was lost, none was done twice."""
    chance, before, kills, pause_ms = random.Random(SEED + block), 0, 0, PAUSE_MS
    for epoch in range(1, 20 * INTERRUPTIONS):
        if how == "between acts":
            life = Life(place=str(tmp_path), epoch=epoch, steps=1 << 30, die_after=chance.randrange(60))
        else:
            life = Life(place=str(tmp_path), epoch=epoch, steps=1 << 30, kill_after_ms=chance.uniform(0, pause_ms))
        assert lives.live(life) == KILLED, f"epoch {epoch}, SUBLET_CRASH_SEED={SEED}"
        version, step, weights = saved(tmp_path, batch(0).checkpoint_name, "w.v1")
        assert version == step >= before, f"epoch {epoch}, SUBLET_CRASH_SEED={SEED}"
        assert step == 0 or weights == uninterrupted(step), f"epoch {epoch}, SUBLET_CRASH_SEED={SEED}"
        pause_ms = PAUSE_MS if step > before else pause_ms * 1.3  # a machine that has no time gets more
        before, kills = step, kills + 1
        if kills == INTERRUPTIONS:
            break
    assert before > 0, "the programs never got anywhere"
    assert lives.live(Life(place=str(tmp_path), epoch=1 << 20, steps=before + 3)) == 0
    version, step, weights = saved(tmp_path, batch(0).checkpoint_name, "w.v1")
    assert (version, step, weights) == (before + 3, before + 3, uninterrupted(before + 3))


def test_whatever_line_of_a_step_it_is_killed_at_the_weights_are_those_of_an_undisturbed_run(
    lives: Lives, tmp_path: Path
) -> None:
    """Of the lines that doing a step, settling one and finding one done consist of, each once."""
    chance, epochs = random.Random(SEED), iter(range(1, 1 << 20))

    def live(**more: Any) -> int:
        return lives.live(Life(place=str(tmp_path), epoch=next(epochs), **more))

    def unsettled(step: int) -> None:
        assert live(steps=step, at_step=step, die_before=Act.COMPLETE) == KILLED

    assert live(steps=1) == 0
    assert live(steps=2, list_lines=str(tmp_path / "done")) == 0
    unsettled(3)
    assert live(steps=4, list_lines=str(tmp_path / "settled")) == 0
    found = {line for name in ("done", "settled") for line in json.loads((tmp_path / name).read_text())}
    assert len(found) > 70, "a step consists of more than that"
    before = 4
    for line in chance.sample(sorted(found), min(LINES, len(found))):
        at = before
        if live(steps=at + 2, kill_at_line=line) == 0:  # one of those by which a step is settled, or found done
            unsettled(at + 3)
            if live(steps=at + 4, kill_at_line=line) == 0:
                assert live(steps=at + 5, kill_at_line=line) == KILLED, f"line {line}"
        version, step, weights = saved(tmp_path, batch(0).checkpoint_name, "w.v1")
        assert version == step >= before, f"line {line}"
        assert weights == uninterrupted(step), f"line {line}"
        before = step
    assert live(steps=before + 3) == 0
    assert saved(tmp_path, batch(0).checkpoint_name, "w.v1") == (before + 3, before + 3, uninterrupted(before + 3))


# ---- real leases, real devices


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sublet.Fabric]:
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    with sublet.connect(home=home) as made:
        yield made
        made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


def home_of(fabric: sublet.Fabric) -> str:
    home: str = fabric.request("GET", "/v1/status", shape=dict)["home"]
    return home


def preempt(fabric: sublet.Fabric) -> None:
    """Take every lease there is."""
    for view in fabric.leases():
        if view.end is None:
            fabric.request("POST", f"/v1/leases/{view.id}/revoke", {"detail": "a test"}, shape=dict)
    until("no lease", lambda: not [view for view in fabric.leases() if view.end is None], PATIENCE_S)


@pytest.mark.timeout(300)
def test_on_a_device_whoever_is_killed_before_an_act_leaves_what_the_law_says(
    lives: Lives, fabric: sublet.Fabric, tmp_path: Path
) -> None:
    """One program for each act, killed there; its lease is taken, and the next goes on under another."""
    home = home_of(fabric)
    for step, act in enumerate(ON_A_DEVICE, start=1):
        life = Life(place=str(tmp_path), home=home, steps=step, at_step=step, die_before=act)
        assert lives.live(life) == KILLED, act
        preempt(fabric)
        assert lives.live(dataclasses.replace(life, die_before="")) == 0, act
        assert outcomes(tmp_path)[-1] == f"{OUTCOME[after_death_before(act)]} {step}", act
        assert saved(tmp_path, real_batch(0).checkpoint_name, "training-checkpoint.v1") == (
            step,
            step,
            real_weights(step),
        )
    until("a free device", lambda: is_free(fabric), PATIENCE_S)


def is_free(fabric: sublet.Fabric) -> bool:
    """Whether nothing of the steps is left: the whole device can be had."""
    try:
        fabric.gpu(min_vram="1GiB", wait=0).release()
    except sublet.CapacityExceeded:
        return False
    return True


def test_the_office_says_whether_anothers_lease_has_ended(fabric: sublet.Fabric) -> None:
    """Of a lease that somebody attached to, the old epoch has. What nobody knows has not, as far as can be told."""
    has_ended = lease_has_ended(fabric)
    lease = fabric.gpu(min_vram="64MiB", ttl="60s", exclusivity="shared")
    old = lease.epoch
    assert not has_ended(lease.id, old)
    lease.leave()
    with fabric.attach(lease.id) as attached:
        assert has_ended(attached.id, old)
        assert not has_ended(attached.id, attached.epoch)
    assert has_ended(attached.id, attached.epoch)
    assert not has_ended("l-unheard-of", old)
    assert not has_ended("", old)


FROZEN: Final = (
    (Act.OPEN, FENCED, "Completed"),
    (Act.RESERVE, FENCED, "Completed"),
    (Act.LAUNCH, OVER, "Completed"),
    (Act.CHECK_AGAIN, OVER, "Completed"),
    (Act.SAVE, FENCED, "Completed"),
    (Act.COMPLETE, FENCED, "Recovered"),
)
"""Before which act, how it is refused, and what its step came to for the next."""


def freeze(lives: Lives, home: str, folder: Path, act: Act) -> tuple[int, Path]:
    """A program that stands still before this act of its second step, and where it works. It may take longer to come
    there than a short lease is for: then another does."""
    for ttl in ("2s", "15s", "40s"):
        place = folder / f"{act}-{ttl}"
        place.mkdir()
        known = set(lives.stopped)
        if lives.live(Life(place=str(place), home=home, ttl=ttl, steps=2, at_step=2, stop_before=act)) == 0:
            [pid] = lives.stopped - known
            return pid, place
    raise AssertionError(f"it never came to {act}")


@pytest.mark.timeout(300)
def test_programs_that_are_frozen_past_their_leases_are_refused_when_they_wake(
    lives: Lives, fabric: sublet.Fabric, tmp_path: Path
) -> None:
    """Each has a job of its own. Others have done its step and one more; nothing of what it does afterwards counts."""
    home = home_of(fabric)
    frozen = {act: freeze(lives, home, tmp_path, act) for act, _, _ in FROZEN}
    until("no lease", lambda: not [view for view in fabric.leases() if view.end is None], PATIENCE_S)
    for act, refused, other in FROZEN:
        pid, place = frozen[act]
        assert lives.live(Life(place=str(place), home=home, steps=3)) == 0
        # What was saved last is asked for again first, so a step that the zombie has saved is settled, not done.
        assert outcomes(place)[-2:] == [f"{other} 2", "Completed 3"], act
        assert lives.go_on(pid) == refused, act
        after = saved(place, real_batch(0).checkpoint_name, "training-checkpoint.v1")
        assert after == (3, 3, real_weights(3)), act
