"""`sublet train --gpus 2`: two processes of PyTorch, taken and killed, come to the weights of two undisturbed."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.training.progress import TrainingProgress
from sublet.training.running import TrainingPlan, TrainingRun
from sublet.values import MIB
from tests.integration.test_train import ROOT, Audience

pytestmark = pytest.mark.needs("torch")

EXAMPLE: Final = ROOT / "examples" / "two_gpus.py"
EPOCHS: Final = 3
STEPS: Final = EPOCHS * 8

HELD: Final = """
import os, runpy, signal, time, sublet
with open(__file__ + ".lives", "a") as lives:
    lives.write(sublet.current().lease + "\\n")
with open(__file__ + ".lives") as lives:
    life = len(set(lives.read().split()))
steps, sleep = 0, time.sleep
def pause(seconds):
    global steps
    sleep(seconds)
    steps += seconds == 0.01
    while life == 1 and steps == 11 and sublet.current().noticed is None:
        sleep(0.01)
    if life == 2 and steps == 7 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep = pause
runpy.run_path({example!r}, run_name="__main__")
"""
"""In its first life it waits in its second epoch until its lease is taken; in the second one of the two is killed."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=("up", "--host-gpus", "2x1GiB", "--foreground"))
    yield home
    with sublet.connect(home=home) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


@pytest.fixture
def fabric(home: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=home) as made:
        yield made


def plan(name: str, script: Path, *words: object, count: int = 2, **more: Any) -> TrainingPlan:
    argv = [sys.executable, str(script), *map(str, words)]
    env = {"PYTHONPATH": str(ROOT / "src")}
    return TrainingPlan(argv=argv, name=name, vram=64 * MIB, count=count, ttl="1m", state=64 * MIB, env=env, **more)


def weights(out: bytes) -> dict[str, str]:
    return dict(re.findall(r"rank (\d): 24 steps, weights (\S+)", out.decode()))


@pytest.mark.timeout(120)
def test_two_processes_come_to_the_same_weights_to_the_bit_whatever_is_taken_from_them(
    fabric: sublet.Fabric, tmp_path: Path
) -> None:
    """Each has its own half of the data, its own random numbers and its own running means, and all of it is saved."""
    alone = Audience()
    assert TrainingRun(fabric, plan("alone", EXAMPLE, EPOCHS, 0.01), alone).run() == 0, alone.err
    taken: list[str] = []

    def take(progress: TrainingProgress, lease: sublet.Lease) -> None:
        if not taken and progress.steps:
            taken.append(lease.id)
            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {"detail": "a test"}, shape=dict)

    audience, script = Audience(take), tmp_path / "held.py"
    script.write_text(HELD.format(example=str(EXAMPLE)))
    first = TrainingRun(fabric, plan("taken", script, EPOCHS, 0.01), audience)
    assert first.run() == 128 + signal.SIGKILL, audience.err
    assert b"sublet: rank 1 of 2 ended by SIGKILL, and rank 0 was ended with it\n" in audience.err
    assert first.preemptions == 1
    assert 1 <= first.progress.saved_steps <= 11
    last = TrainingRun(fabric, plan("taken", script, EPOCHS, 0.01), audience)
    assert last.run() == 0, audience.err
    assert last.progress.steps == STEPS
    assert last.progress.first_step == first.progress.saved_steps
    found = weights(audience.out)
    assert set(found) == {"0", "1"}
    assert found == weights(alone.out)
    assert found["0"] != found["1"], "each has running means of its own"


OF_A_TENANT: Final = """
import os, socket, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        other = server.accept()[0]
        os.write(1, b"met " + other.recv(9) + b" " + sys.argv[1].encode() + b"\\n")
else:
    while True:
        try:
            with socket.create_connection(place) as other:
                other.sendall(os.environ["RANK"].encode())
                other.recv(1)  # until that one has ended
            break
        except ConnectionRefusedError:
            pass
sys.exit(0 if os.environ["RANK"] == "0" else 7)
"""


@pytest.mark.timeout(120)
def test_the_processes_of_a_tenant_meet_where_no_other_process_is(
    home: Path, fabric: sublet.Fabric, tmp_path: Path
) -> None:
    """On the loopback interface of their own network; the script travels there with them, and each status counts."""
    made = fabric.request("POST", "/v1/tenants", {"id": "ann"}, shape=dict)
    audience, script = Audience(), tmp_path / "theirs.py"
    script.write_text(OF_A_TENANT)
    with sublet.connect(home=home, token=made["token"], as_tenant=True) as theirs:
        assert TrainingRun(theirs, plan("walled", script, "hello"), audience).run() == 7, audience.err
    assert audience.out == b"met 1 hello\n"
    assert b"sublet: rank 1 of 2 ended with exit code 7" in audience.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", b"one of 2 processes (WORLD_SIZE), and it has not joined the others"),
        ("torch.distributed.init_process_group('gloo')", b"made by 1 processes, and this program has 2"),
    ],
)
def test_processes_that_cannot_be_saved_as_one_are_refused(
    fabric: sublet.Fabric, tmp_path: Path, text: str, said: bytes
) -> None:
    """Those that do not know of one another, and more than there were when the checkpoint was made."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, torch
from sublet.training import PreemptibleTrainer
if os.environ.get("WORLD_SIZE"):
    {text or "pass"}
model = torch.nn.Linear(1, 1)
with PreemptibleTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trainer:
    for n in trainer.batches(range(1)):
        trainer.step(model(torch.ones(1)).sum())
""")
    name = f"refused-{len(text)}"
    if text:
        assert TrainingRun(fabric, plan(name, script, count=1), Audience()).run() == 0
    audience = Audience()
    assert TrainingRun(fabric, plan(name, script), audience).run() == 1
    assert said in audience.err
