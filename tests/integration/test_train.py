"""`sublet train`: a real office, a real script with PyTorch, leases that are taken, and commands that are killed."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.model import Place
from sublet.client.office import ensure_office
from sublet.training.progress import TrainingProgress
from sublet.training.running import TrainingPlan, TrainingRun
from sublet.values import MIB
from tests.traces import until

pytestmark = pytest.mark.needs("torch")

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "preemptible_training.py"
EPOCHS: Final = 10
STEPS: Final = EPOCHS * 8
PREEMPTIONS: Final = 6
PATIENCE_S: Final = 90.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of an office with one host device, in a folder where state may be kept."""
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield home
    with sublet.connect(home=home) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.fixture
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home) as made:
        yield made


class Audience:
    """Keeps what it is shown; ``on_move`` may take the lease away."""

    def __init__(self, on_move: Callable[[TrainingProgress, sublet.Lease], object] = lambda *_: None) -> None:
        self.out, self.err, self.heard = b"", b"", list[str]()
        self.on_move = on_move

    def wrote(self, stream: str, data: bytes) -> None:
        if stream == "stdout":
            self.out += data
        else:
            self.err += data

    def news(self, text: str) -> None:
        self.heard.append(text)

    def moved(self, progress: TrainingProgress, lease: sublet.Lease) -> None:
        self.on_move(progress, lease)

    def waits(self, place: Place) -> None:
        """Nobody else is here."""


def plan(name: str, *words: object, script: Path = EXAMPLE, **more: Any) -> TrainingPlan:
    env = {"PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, str(script), *map(str, words)]
    return TrainingPlan(argv=argv, name=name, vram=64 * MIB, ttl="1m", state=64 * MIB, env=env, **more)


def weights(out: bytes) -> str:
    found = re.search(rb"done: (\d+) steps, weights (\S+)", out)
    assert found is not None, out
    return found[2].decode()


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> str:
    """The weights that everybody must come to."""
    audience = Audience()
    with sublet.connect(home=home) as fabric:
        assert TrainingRun(fabric, plan("alone", EPOCHS), audience).run() == 0
    return weights(audience.out)


HELD: Final = """
import os, runpy, time, sublet
with open(__file__ + ".lives", "a") as lives:
    lives.write(".")
life, steps, sleep = os.path.getsize(__file__ + ".lives"), 0, time.sleep
def pause(seconds):
    global steps
    sleep(seconds)
    steps += seconds == {pause}
    while {preemptions} >= life == steps and sublet.current().noticed is None:
        sleep(0.01)
time.sleep = pause
runpy.run_path({example!r}, run_name="__main__")
"""
"""Each life that is to be taken goes no further than to the step of its own number: else, where a machine is busy, all
would be done before the lease has been taken as often as it is to be."""


@pytest.mark.timeout(300)
def test_a_network_is_trained_to_the_end_through_forced_preemptions(
    fabric: sublet.Fabric, undisturbed: str, tmp_path: Path
) -> None:
    """By an operator, at whatever moment: every life leaves in good order, no step is done twice, the bill knows."""
    taken: dict[str, int] = {}

    def take(progress: TrainingProgress, lease: sublet.Lease) -> None:
        if len(taken) < PREEMPTIONS and lease.id not in taken and progress.steps > max(taken.values(), default=0):
            taken[lease.id] = progress.steps
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "a test"}, shape=dict)

    audience, script = Audience(take), tmp_path / "held.py"
    script.write_text(HELD.format(pause=0.02, preemptions=PREEMPTIONS, example=str(EXAMPLE)))
    run = TrainingRun(fabric, plan("twenty", EPOCHS, 0.02, script=script), audience)
    assert run.run() == 0, audience.err + b"".join(map(str.encode, audience.heard))
    assert weights(audience.out) == undisturbed
    assert len(taken) == PREEMPTIONS
    assert run.preemptions == PREEMPTIONS
    assert run.progress.steps == run.progress.steps_here == STEPS
    assert run.progress.is_done
    assert run.progress.saves >= PREEMPTIONS, audience.heard
    assert 0 < run.progress.bytes_saved < 64 * MIB
    epochs = [int(n) for n in re.findall(rb"epoch (\d+):", audience.out)]
    assert epochs == sorted(epochs)
    line = run.bill()
    assert line.leases == PREEMPTIONS + 2  # and the volume
    assert line.gpu_seconds > 0
    assert b"\x1e" not in audience.err
    until("a volume that was put away", lambda: fabric.volume("train-twenty").state.value == "retained")


OF_A_TENANT: Final = """
import sublet, sys, time
place = sublet.current().volume
try:
    state = sublet.Durable.restore(place)
except sublet.NotFound:
    state = sublet.Durable([], place)
state.mutate(lambda lives: lives.append(1))
state.checkpoint()
print("life", len(state.value), sys.argv[1:], open(__file__).read()[1:7], flush=True)
if len(state.value) == 1:
    time.sleep(600)
raise ValueError("as written")
"""


def test_a_tenants_script_travels_and_is_run_behind_walls(home: Path, fabric: sublet.Fabric, tmp_path: Path) -> None:
    """None of its files is seen there. A lease that is taken, and a line that fails, are as for anybody."""
    made = fabric.request("POST", "/v1/tenants", {"id": "ann"}, shape=dict)
    taken: list[str] = []

    def take(_: TrainingProgress, lease: sublet.Lease) -> None:
        if not taken and b"life 1" in audience.out:
            taken.append(lease.id)
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "a test"}, shape=dict)

    audience, script = Audience(take), tmp_path / "theirs.py"
    script.write_text(OF_A_TENANT)
    with sublet.connect(home=home, token=made["token"], as_tenant=True) as theirs:
        run = TrainingRun(theirs, plan("walled", "a", script=script), audience)
        assert (run.run(), run.preemptions) == (1, 1), audience.err
        with pytest.raises(sublet.SubletError, match="cannot be read"):
            TrainingRun(theirs, plan("none", script=tmp_path / "none.py"), audience).run()
    assert audience.out.splitlines() == [b"life 1 ['a'] import", b"life 2 ['a'] import"]
    assert b'raise ValueError("as written")' in audience.err


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def command() -> Iterator[Begin]:
    """Begins a command; whatever still runs at the end is ended."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*args: Any, **more: Any) -> subprocess.Popen[str]:
        begun.append(begin_command(*args, **more))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def begin_command(home: Path, *words: object, script: Path = EXAMPLE) -> subprocess.Popen[str]:
    env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
    options = ["--gpu", "64MiB", "--ttl", "60s", "--state", "64MiB"]
    return subprocess.Popen(
        [sys.executable, "-m", "sublet", "train", str(script), *options, *map(str, words)],
        env=env,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_said(process: subprocess.Popen[str], word: str) -> None:
    """Read what it prints until it says this."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"it ended without saying {word!r}")


PACED: Final = """
import runpy, sys
sys.argv[1:] = [sys.argv[1], open(__file__ + ".pace").read()]
runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_a_command_that_was_killed_goes_on_when_it_is_run_again(
    home: Path, fabric: sublet.Fabric, undisturbed: str, command: Begin, tmp_path: Path
) -> None:
    """SIGKILL while its script trains on: the script is told, saves, and the next command has all of it. One that was
    interrupted with Ctrl-C has saved, and says how to go on; a second one beside it is refused."""
    script = tmp_path / "paced.py"
    script.write_text(PACED.format(example=str(EXAMPLE)))

    def begin(pause_s: float) -> subprocess.Popen[str]:
        (tmp_path / "paced.py.pace").write_text(str(pause_s))
        return command(home, EPOCHS, script=script)

    first = begin(0.3)  # so slowly that it is not at its end before the second is refused
    has_said(first, "epoch 0:")
    second = begin(0.3)
    _, said = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert "is being trained by another `sublet train`" in said
    first.kill()
    first.communicate(timeout=PATIENCE_S)
    until("no lease", lambda: not [view for view in fabric.leases() if view.end is None])
    ends = {view.end.reason for view in fabric.leases(all=True) if view.end and view.bound_to == first.pid}
    assert ends == {"holder_gone"}

    again = begin(0.3)  # nor at its end before the signal is sent
    has_said(again, "epoch")
    again.send_signal(signal.SIGINT)
    out, said = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 130, said
    assert "sublet: interrupted: the program may finish its step and save" in said
    assert "\nsublet: interrupted; " in said
    assert "the same command goes on from the last checkpoint in volume train-" in said
    assert "preempted (" not in said

    last = begin(0.0)
    out, said = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0, said
    assert weights(out.encode()) == undisturbed
    assert "epoch 0:" not in out
    assert f"{STEPS} steps done, " in said
    until("no lease", lambda: not [view for view in fabric.leases() if view.end is None])


@pytest.mark.timeout(120)
def test_a_script_that_fails_is_not_run_again(home: Path, tmp_path: Path, command: Begin) -> None:
    """Its status is the command's, and what it said is there."""
    script = tmp_path / "wrong.py"
    script.write_text("import sys\nprint('begins')\nsys.stderr.write('it is wrong\\n')\nsys.exit(7)\n")
    failed = command(home, script=script)
    out, said = failed.communicate(timeout=PATIENCE_S)
    assert (failed.returncode, out, said) == (7, "begins\n", "it is wrong\n")


LONG: Final = """
import sublet, time, torch
from sublet.training import PreemptibleTrainer
model = torch.nn.Linear(1, 1)
with PreemptibleTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trainer:
    for n in trainer.batches(range(2)):
        print("begins", n)
        lease = sublet.current().lease
        while not n and sublet.current().lease == lease:  # the first is longer than any notice: it is parked in it
            time.sleep(0.1)
        trainer.step(model(torch.ones(1)).sum())
print("done", trainer.steps)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_step_that_is_longer_than_the_notice_is_parked_and_goes_on(fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Somebody interactive wants the device. What cannot be finished and saved in time stands still in the middle, and
    goes on there: the step is made once."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    came = threading.Event()

    def other() -> None:
        came.wait(PATIENCE_S)
        fabric.gpu(min_vram="1GiB", ttl="20s").release()

    class Waiting(Audience):
        def wrote(self, stream: str, data: bytes) -> None:
            super().wrote(stream, data)
            came.set()

    audience = Waiting()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(other)
        run = TrainingRun(fabric, plan("long", script=script, tier="spot"), audience)
        assert run.run() == 0, audience.err
        asked.result(PATIENCE_S)
    assert audience.out.split() == [b"begins", b"0", b"begins", b"1", b"done", b"2"]
    assert run.preemptions == 1
    assert any("parked" in said for said in audience.heard)
