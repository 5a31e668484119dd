"""Guests of tenants on pretended cards: behind their walls they find the driver's libraries, and are suspended.

A real card's memory lies behind its device file. That of a pretended one is a folder, which these guests can write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.node.agent.rehearsal import PATTERN
from tests.commands import run_sublet
from tests.rig.device_files import DEVICES
from tests.rig.personalities import FOUR_H100
from tests.rig.rig import NewRig, Rig, clear
from tests.rig.test_interface import run_on
from tests.rig.test_personalities import STEPS
from tests.traces import plain_env, supervisor_of, until

pytestmark = pytest.mark.needs("gcc")


@pytest.fixture
def rig(new_rig: NewRig) -> Rig:
    """Any user may look into its folder, as into those of a driver, and write to its cards."""
    made = new_rig(FOUR_H100)
    made.folder.chmod(0o755)
    for path in made.folder.iterdir():
        path.chmod(0o755 if ".so" in path.name else 0o666)
    return made


@pytest.fixture
def place() -> Iterator[Path]:
    """Where a supervisor has its folders, which any user may pass through."""
    with tempfile.TemporaryDirectory(prefix="sublet-walls-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


ROOM: Final = """
import ctypes, json, os, sys
from types import SimpleNamespace
from dataclasses import replace
from sublet.errors import Unsupported
from sublet.node.sandbox.enter import enter
from sublet.node.sandbox.plan import Bind
from sublet.node.sandbox.walls import Walls
from sublet.values import GIB, Kind, ResourceId, TenantId
from sublet.wire.guests import GuestSpec
from sublet.wire.orders import Part
place, *arguments = sys.argv[1:]
def walls_here():
    os.makedirs(place + "/state", exist_ok=True)
    return Walls(runtime=place + "/run", state=place + "/state")
def lease_of(*cards):
    open(place + "/page", "w").close()
    parts = tuple(Part(resource=ResourceId("n/" + card), kind=Kind.GPU, amount=GIB) for card in cards)
    return SimpleNamespace(
        parts=parts, page_path=place + "/page", writable=(), make_home=lambda ids: (place + "/home", ""), unlimited=(),
        limits=SimpleNamespace(memory_bytes=0, home_bytes=0, pids_max=0))
def said_by(spec, walls, tenancy):
    room = walls.behind(TenantId("ana")).room(tenancy, spec, counted=False)
    folder = os.environ["LD_LIBRARY_PATH"]
    binds = [Bind(folder, writable=True) if bind.path == folder else bind for bind in room.plan.binds]
    made = replace(room.plan, binds=tuple(binds), writes=(*room.plan.writes, folder))
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(write, 1)
        enter(made, parent=os.getppid())
        os.execve(spec.argv[0], spec.argv, room.env)
    os.close(write)
    with open(read) as said:
        found = said.read()
    os.waitpid(pid, 0)
    return found, [name for name, value in room.env.items() if value == folder]
"""
"""The room of a guest of a tenant, as a supervisor makes it, and what a guest says there."""

GUEST: Final = f"""{ROOM}
card, hands_on = arguments
walls, tenancy = walls_here(), lease_of(card)
walls.card_nodes = {{ResourceId("n/" + card): ("null",)}}
walls.nodes = lambda tenancy: ("/dev/null",)
CODE = '''
import ctypes
try:
    said = ctypes.CDLL("libcuda.so.1").cuInit(0)
except OSError as error:
    said = str(error)
print(repr(said), flush=True)
'''
spec = GuestSpec(argv=(sys.executable, "-c", CODE))
try:
    if hands_on == "yes":
        spec = walls.with_driver(spec, tenancy)
    print(json.dumps(said_by(spec, walls, tenancy)))
except Unsupported as error:
    print(json.dumps([error.message, error.do]))
"""


def found_by_a_guest(rig: Rig, place: Path, *, hands_on: bool) -> Any:
    return run_on(rig, GUEST, str(place), rig.card(1).name, "yes" if hands_on else "no")


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
def test_a_tenants_guest_finds_libraries_that_only_a_variable_leads_to(rig: Rig, place: Path) -> None:
    """By LD_LIBRARY_PATH the office had found the card and lent it; the guest's environment did not name the folder."""
    assert found_by_a_guest(rig, place, hands_on=True) == ["0\n", ["LD_LIBRARY_PATH"]]
    assert "cannot open shared object" in str(found_by_a_guest(rig, place, hands_on=False))


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
def test_libraries_that_a_tenants_guest_may_not_see_are_a_refusal_with_the_folder(rig: Rig, place: Path) -> None:
    rig.folder.chmod(0o700)
    message, do = found_by_a_guest(rig, place, hands_on=True)
    assert f"other users cannot read {rig.folder}" in message
    assert "ldconfig" in do
    rig.folder.chmod(0o777)
    message, _ = found_by_a_guest(rig, place, hands_on=True)
    assert f"other users can write {rig.folder}" in message


FINDS: Final = f"""{ROOM}{DEVICES}
from sublet.node.agent.nvml import survey
CODE = '''
import ctypes, json, os
cuda = ctypes.CDLL("libcuda.so.1")
said, count, uuid = cuda.cuInit(0), ctypes.c_int(), ctypes.create_string_buffer(16)
cuda.cuDeviceGetCount(ctypes.byref(count))
cards = []
for device in range(count.value):
    cuda.cuDeviceGetUuid_v2(uuid, device)
    cards.append(uuid.raw.hex())
print(json.dumps([said, cards, sorted(name for name in os.listdir("/dev") if "nvidia" in name)]), flush=True)
'''
walls, tenancy = walls_here(), lease_of(*arguments)
walls.card_nodes = {{ResourceId("n/" + card.uuid): card.nodes for card in survey().cards}}
spec = walls.with_driver(GuestSpec(argv=(sys.executable, "-c", CODE)), tenancy)
print(said_by(spec, walls, tenancy)[0])
"""
"""A lease of some of these cards, and what its guest finds."""


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
@pytest.mark.parametrize("leased", [(1,), (0, 3)])
def test_a_tenants_guest_finds_exactly_the_cards_of_its_lease(rig: Rig, place: Path, leased: tuple[int, ...]) -> None:
    """It found no GPU at all: no file of a card was shown behind its walls, and CUDA opens these files."""
    rig.state.nodes = 1
    for index in range(4):
        rig.card(index).node = 10 + index  # not its place in a list
    said, cards, files = run_on(rig, FINDS, str(place), *(rig.card(index).name for index in leased))
    assert said == 0
    assert cards == [bytes(rig.card(index).uuid).hex() for index in leased]
    own = [f"nvidia{10 + index}" for index in leased]
    assert files == sorted(("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *own))


CARDS_CAN_BE_WRITTEN: Final = """
import sys
from dataclasses import replace
from sublet.node.sandbox import trial
from sublet.node.sandbox.plan import Bind
from sublet.node.sandbox.walls import Walls
folder, *words = sys.argv[1:]
plan = Walls.plan
def and_the_cards(walls, wish, policy=None):
    made = plan(walls, wish, policy)
    binds = [Bind(folder, writable=True) if bind.path == folder else bind for bind in made.binds]
    assert {"pid", "mount", "net"} <= {part.value for part in made.namespaces}, made.namespaces
    return replace(made, binds=tuple(binds), writes=(*made.writes, folder))
Walls.plan = and_the_cards
"""
"""The trial of a guest of a tenant, except that the folder of the pretended driver, where the memory is, is its own."""

BEHIND: Final = f"""{CARDS_CAN_BE_WRITTEN}
import os
Walls.nodes = lambda walls, tenancy: ("/dev/null",)
trial.main([os.environ["CUDA_VISIBLE_DEVICES"], "null", *words])
"""

PROBES: Final = "import sys; from sublet.devices.suspend import main; main(['--probe', *sys.argv[1:]])"


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
def test_a_process_behind_the_walls_of_a_tenant_is_suspended_and_resumed(rig: Rig) -> None:
    """Another user in a process namespace of its own: the trial was a child of the office, and stood for these too."""
    cards = ",".join(rig.card(index).name for index in range(4))
    behind = (sys.executable, "-c", BEHIND, str(rig.folder))
    assert run_on(rig, PROBES, cards, *behind) == {"suspend": "same_type", "why": ""}
    rig.trouble("cuCheckpointProcessRestore", code=304)  # CUDA_ERROR_OPERATING_SYSTEM
    found = run_on(rig, PROBES, cards, *behind)
    assert found["suspend"] == "none"
    assert "cuCheckpointProcessRestore said CUDA_ERROR_OPERATING_SYSTEM" in found["why"]


IS_LENT: Final = f"""{DEVICES}
import dataclasses, json
from sublet.node.agent import rehearsal
from sublet.node.agent.nvml import survey
from sublet.wire.caps import LeaseCaps
card, its_nodes, wrapped, folder, processes = sys.argv[1:]
rehearsal.python_argv = lambda python, module, *words, options: (python, "-c", wrapped, folder, *words)
nodes = next(one.nodes for one in survey().cards if one.uuid == its_nodes)
caps = LeaseCaps(processes_per_core=int(processes), cores_per_gpu=1)
print(json.dumps(dataclasses.asdict(rehearsal.rehearse_as_lent(card, nodes, rehearsal.GuestStarter(caps)))))
"""
WRAPPED: Final = f"{CARDS_CAN_BE_WRITTEN}\ntrial.main(words)\n"


def rehearsed(rig: Rig, *, nodes_of: int = 1, processes: int = 256) -> Any:
    """What the rehearsal of its second card comes to where there are device files; a tenant's guest has these, and so
    many processes at most."""
    rig.state.nodes = 1
    for index in range(4):
        rig.card(index).node = 10 + index
    names = (rig.card(1).name, rig.card(nodes_of).name)
    return run_on(rig, IS_LENT, *names, WRAPPED, str(rig.folder), str(processes))


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
def test_before_a_card_is_lent_a_guest_of_each_profile_uses_it(rig: Rig) -> None:
    """What a tenant's guest lacked there was found out by the first of them."""
    found = rehearsed(rig)
    assert (found["failed"], found["busy"], found["walled"]) == ("", "", "")
    assert [step["name"] for step in found["steps"]] == [*STEPS, "guest of a tenant"]


@pytest.mark.skipif(os.geteuid() != 0, reason="guests of tenants are other users, whom only root can be")
def test_a_card_that_guests_of_tenants_cannot_use_is_found_before_the_first_of_them(rig: Rig) -> None:
    """Tenant local can, and is lent it."""
    found = rehearsed(rig, nodes_of=2)
    assert "cuInit said 100" in found["walled"], "it has the files of another card"
    assert [step["name"] for step in found["steps"]] == STEPS
    found = rehearsed(rig, processes=1)
    assert "Resource temporarily unavailable" in found["walled"], "as a lease under these caps would"
    rig.folder.chmod(0o700)
    found = rehearsed(rig)
    assert f"other users cannot read {rig.folder}" in found["walled"]
    assert found["failed"] == ""


COMPUTES: Final = 0
"""The list of NVML that such a process is in."""
NO_BINDINGS: Final = "raise ModuleNotFoundError(\"No module named 'cuda'\", name='cuda')\n"
WRITES: Final = """
from sublet.devices.cuda_driver import has_bindings
from sublet.devices.plain_cuda import open_plain_driver
assert not has_bindings()
driver = open_plain_driver()
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
driver("t", "cuMemsetD8", driver("t", "cuMemAlloc", 64 << 20), 0xA7, 64 << 20)
"""
IN_TURN: Final = """
set -e
"$0" -m sublet run --gpu 1GiB -- "$0" -c "$1" </dev/null
"$0" -m sublet run --gpu 1GiB --gpus 4 --wait 20s -- true
"$0" -m sublet down --now
"""
"""Two leases; the second one has all cards, so what the first left was cleaned. This shell is process 1."""


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of processes is made by root")
def test_beside_programs_of_others_cards_come_clean_in_a_namespace_of_processes(rig: Rig, tmp_path: Path) -> None:
    """As in a container whose driver names processes as they are called there, and where policy.toml has cards lent on
    which other programs compute. The program that cleans went by the kind of namespace, saw memory in use and no
    process that uses it, and no lease ever ended.

    Nor does this Python have the bindings for CUDA, which ``sublet[gpu]`` brings: without them the first lease of each
    card ended in a quarantine."""
    (tmp_path / "policy.toml").write_text("[office]\nlend_beside = true\n")
    (tmp_path / "without").mkdir()
    (tmp_path / "without/cuda.py").write_text(NO_BINDINGS)
    stranger = rig.draws(0, 256 << 20, 1)
    stranger.list = COMPUTES
    env = {**plain_env(), **rig.env, "SUBLET_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "without")}
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", IN_TURN]
    done = subprocess.run([*words, sys.executable, WRITES], env=env, capture_output=True, text=True, timeout=120)
    stranger.taken = 0
    assert done.returncode == 0, done
    assert not any(rig.dirty(index, but=bytes([PATTERN])) for index in range(4))


def test_a_card_in_quarantine_keeps_no_other_card_from_another_office(new_rig: NewRig, tmp_path: Path) -> None:
    """Its own office has ended. The supervisor that stays kept all four of them, and `sublet down` said nothing. And it
    stayed for good, with the card, when an operator had vouched for it."""
    rig = new_rig(FOUR_H100)
    envs = [plain_env() | rig.env | {"SUBLET_HOME": str(tmp_path / name)} for name in ("first", "second")]

    def run(env: dict[str, str], *words: str) -> str:
        done = run_sublet(*words, env=env)
        assert done.status == 0, done
        return done.out.decode()

    def free(office: sublet.Fabric) -> int:
        devices = office.request("GET", "/v1/status", shape=dict)["devices"]
        return sum(device["kind"] == "gpu" and device["free"] == device["capacity"] for device in devices)

    def asked(name: str) -> sublet.Fabric:
        return sublet.connect(home=tmp_path / name, start=False)

    run(envs[0], "run", "--gpu", "1GiB", "--", "true")  # the office has tried its cards out
    with asked("first") as office:
        until("four clean cards", lambda: free(office) == 4)
        trouble = rig.trouble("cuMemsetD8_v2", code=1)
        run(envs[0], "run", "--gpu", "1GiB", "--wait", "20s", "--", "true")
        until("a quarantine", lambda: office.request("GET", "/v1/fences", shape=list))
    said = run(envs[0], "down")
    supervisor = supervisor_of(runtime_dir(tmp_path / "first"))
    assert "Its supervisor stays for 1 slice in quarantine" in said
    assert supervisor is not None
    clear(trouble)
    try:
        run(envs[1], "run", "--gpu", "1GiB", "--gpus", "3", "--wait", "20s", "--", "true")
        with asked("second") as office:
            until("all but one are free", lambda: free(office) == 3)
        run(envs[1], "down")
        run(envs[0], "up")
        (fence,) = json.loads(run(envs[0], "fence", "ls", "--json"))
        run(envs[0], "fence", "clear", fence["resource"], "--vouch")
        assert "in quarantine" not in run(envs[0], "down")
        until("the end of its supervisor", lambda: not os.path.exists(f"/proc/{supervisor}"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
