"""A fault in a step of a rehearsal keeps the card from being lent, and says what failed and what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest

from tests.rig.personalities import EXCLUSIVE, FOUR_H100, MPS, OLD_DRIVER, Personality
from tests.rig.rig import NewRig, Rig
from tests.rig.test_interface import SOURCES, run_on
from tests.rig.test_personalities import HAS_BEEN_THERE, STEPS

pytestmark = pytest.mark.needs("gcc")

REHEARSES: Final = """
import dataclasses, json, os, sys
from sublet.node.agent import rehearsal
from sublet.node.agent.inventory import TROUBLE_LABEL
from sublet.values import GIB, Kind, NodeId, ResourceId
from sublet.wire.orders import Device, Inventory
runs = rehearsal.run_here
exec(sys.argv[3])
found = rehearsal.rehearse_as_lent(sys.argv[1])
devices = [Device(id=ResourceId(f"n/{card}"), kind=Kind.GPU, capacity=GIB) for card in sys.argv[1:3]]
offered = rehearsal.offered(Inventory(node=NodeId("n"), domain="n", devices=tuple(devices)), [found])
lent = [device.id.removeprefix("n/") for device in offered.devices]
print(json.dumps([dataclasses.asdict(found), lent, offered.labels.get(TROUBLE_LABEL, "")]))
"""


def rehearsed(rig: Rig, planted: str = "") -> Any:
    """The first card, beside a second one."""
    return run_on(rig, REHEARSES, rig.card(0).name, rig.card(1).name, planted)


CLEANS_WITHOUT_CUDA: Final = """
def without(*arguments, **needed):
    from sublet.devices import plain_cuda
    plain_cuda._LIBRARY = "libnone.so.1"
    return runs(*arguments, **needed)
rehearsal.run_here, rehearsal.LINGERS_S = without, 1.0
"""
KILLED: Final = "rehearsal.run_here = lambda *arguments, **needed: os.kill(os.getpid(), 9)"
GIVEN: Final = """
given = '''
import sys
from sublet.node.sandbox import trial
trial.card_environment = lambda shares, given: {}
trial.main(sys.argv[1:])
'''
rehearsal.python_argv = lambda python, module, *words, options: (python, "-c", given, *words)
"""
"""A guest with other variables than those that a card gives it."""


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        (
            CLEANS_WITHOUT_CUDA,
            "it could not be cleaned as after a lease: its memory could not be overwritten (the driver",
        ),
        (KILLED, "it could not be cleaned as after a lease: the program for it ended with signal 9"),
        (GIVEN.format({"CUDA_VISIBLE_DEVICES": ""}), "a guest of tenant local could not use it: no CUDA-"),
        (
            GIVEN.format({"LD_LIBRARY_PATH": ""}),
            "a guest of tenant local could not use it: libcuda.so.1: cannot open shared object",
        ),
    ],
    ids=["what cleans has no driver", "what cleans is killed", "a guest is shown no card", "a guest has no driver"],
)
def test_a_fault_of_one_step_is_found_before_the_first_lease(rig: Rig, planted: str, why: str) -> None:
    """What cleans a card was first started when a lease of it had ended, and a guest when the lease had begun."""
    rig.state.lingers_ms = 0  # else the last look of a slow machine may still see what the step before had
    found, lent, label = rehearsed(rig, planted)
    assert found["failed"].startswith(why)
    assert found["do"]
    assert lent == [rig.card(1).name]
    assert len(label) > len(rig.card(0).name) + 40
    assert f"{rig.card(0).name}: {found['failed']}".startswith(label)


@pytest.mark.parametrize(
    ("call", "how", "why", "do", "steps"),
    [
        ("nvmlDeviceGetHandleByUUID", {"code": 15}, "the GPU is lost", "", []),  # NVML_ERROR_GPU_IS_LOST
        ("cuInit", {"code": 802}, "open: system not yet initialized (cuInit said 802)", "fabricmanager", ["NVML"]),
        ("cuDeviceGetCount", {"kills": 11}, "the program that tried it out ended with signal 11", "kernel's log", []),
        ("cuMemcpyDtoH_v2", {"code": 214}, "a guest of tenant local could not use it: ", "LD_LIBRARY_PATH", STEPS[:-1]),
        (
            "cuMemcpyDtoH_v2",
            {"kills": 9},
            "a guest of tenant local could not use it: it ended with signal 9",
            "",
            STEPS[:-1],
        ),
    ],
    ids=["NVML", "cuInit", "the driver ends its caller", "a guest cannot read", "the driver ends a guest"],
)
def test_an_error_of_the_driver_in_each_step_is_told(
    rig: Rig, call: str, how: dict[str, int], why: str, do: str, steps: list[str]
) -> None:
    rig.state.lingers_ms = 0
    rig.trouble(call, **how)
    found, lent, _ = rehearsed(rig)
    assert found["failed"].startswith(why)
    assert do in found["do"]
    assert [step["name"] for step in found["steps"]] == steps
    assert lent == [rig.card(1).name]


def test_a_guest_that_is_shown_another_card_first_is_a_fault(rig: Rig) -> None:
    found, lent, _ = rehearsed(rig, GIVEN.format({"CUDA_VISIBLE_DEVICES": rig.card(1).name}))
    assert found["failed"] == "a guest of tenant local could not use it: the first card that it sees is another one"
    assert lent == [rig.card(1).name]


def test_memory_that_cannot_be_overwritten_is_found_before_the_first_lease(rig: Rig) -> None:
    """The cleaning runs first, and its fault is told once the other steps went well."""
    rig.trouble("cuMemsetD8_v2", code=1, times=1)
    found, lent, _ = rehearsed(rig)
    assert found["failed"].startswith("it could not be cleaned as after a lease: its memory could not be overwritten (")
    assert [step["name"] for step in found["steps"]] == STEPS[:2]
    assert lent == [rig.card(1).name]


def test_what_an_ended_process_still_has_is_waited_for_in_each_step(new_rig: NewRig) -> None:
    """On a card that lets one process in at a time, each of these has it after the other. The first of them finds
    memory of a process that is gone, as after a restart of the office: the guest then waited for nothing."""
    rig = new_rig(EXCLUSIVE)
    rig.state.lingers_ms = 2_000
    run_on(rig, HAS_BEEN_THERE)
    found, lent, _ = rehearsed(rig)
    assert (found["failed"], found["busy"]) == ("", "")
    assert [step["name"] for step in found["steps"]] == STEPS
    assert lent == [rig.card(0).name, rig.card(1).name]


TAKES_ALL_AFTER_DOCTOR: Final = """
import ctypes, json
from sublet.cli.doctor_devices import gpu_checks
checks = gpu_checks()
_, in_use, *_ = checks["GPU in use"]()
said = [check() for name, check in checks.items() if name.startswith("card ")]
cuda = ctypes.CDLL("libcuda.so.1")
codes = [cuda.cuInit(0)]
codes += [cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device) for device in range(len(said))]
print(json.dumps([codes, [text for _, text, *_ in said], in_use]))
"""


TAKES_ALL_AFTER_START: Final = """
import asyncio, ctypes, json
from pathlib import Path
from types import SimpleNamespace
from sublet.engines.local import Office
from sublet.node.agent.inventory import machine_inventory
from sublet.wire.caps import LeaseCaps
office, state = SimpleNamespace(_limits=SimpleNamespace(caps=LeaseCaps)), SimpleNamespace(resources={})
found = asyncio.run(Office._tried(office, machine_inventory(Path("/tmp"), None), state))
cuda = ctypes.CDLL("libcuda.so.1")
codes = [cuda.cuInit(0)]
codes += [cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device) for device in range(2)]
print(json.dumps([codes, [device.suspend.value for device in found.devices[:2]]]))
"""


def test_an_office_takes_requests_when_its_own_processes_have_left_the_cards(new_rig: NewRig) -> None:
    """The first user of a card that lets one process in met an error: what had tried to suspend there still had it."""
    rig = new_rig(EXCLUSIVE)
    rig.state.lingers_ms = 1_000
    assert run_on(rig, TAKES_ALL_AFTER_START) == [[0, 0, 0], ["same_type"] * 2]


def test_doctor_ends_when_its_own_processes_have_left_the_cards(new_rig: NewRig) -> None:
    """A card that lets one process in was still taken for the program that came next. And what they had there counted
    as memory in use by others."""
    rig = new_rig(EXCLUSIVE)
    rig.state.lingers_ms = 2_000
    codes, said, in_use = run_on(rig, TAKES_ALL_AFTER_DOCTOR)
    assert in_use == "no process uses a card"
    assert codes == [0, 0, 0]
    assert all("; suspend: yes" in text and ", suspending " in text for text in said)


@pytest.mark.parametrize(
    ("personality", "why"),
    [
        (MPS, "suspend: operation not supported (cuCheckpointProcessLock said "),
        (OLD_DRIVER, "the driver speaks CUDA 12.4, and suspends processes only since 12.8)"),
    ],
    ids=["MPS", "driver 550"],
)
def test_doctor_says_why_nothing_is_suspended_on_a_card(new_rig: NewRig, personality: Personality, why: str) -> None:
    """It gave one reason everywhere: where an MPS server was in the way, that a newer driver was needed."""
    _, said, _ = run_on(new_rig(personality), TAKES_ALL_AFTER_DOCTOR)
    assert [why in text.partition("; suspend: no (")[2] for text in said] == [True] * 2, said


SHADOW: Final = """
import os, sys
with open({said!r}, "a") as file:
    file.write(f"{{sys.flags.no_site}} {{os.environ.get('CUDA_MPS_PIPE_DIRECTORY')}}\\n")
__file__ = {real!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""
"""A package of this name that says who loads it, in a folder that only a variable leads to."""
TRIES_OUT: Final = """
import asyncio, json, sys
from sublet.node.agent.rehearsal import rehearse_all
from sublet.wire.caps import LeaseCaps
(found,) = asyncio.run(rehearse_all({sys.argv[1]: ()}, LeaseCaps()))
print(json.dumps(found.failed))
"""


def test_what_tries_a_card_out_finds_libraries_where_the_office_finds_them(rig: Rig, tmp_path: Path) -> None:
    """It has the environment of a supervisor, which had none of these variables: another NVML was asked, or none, and
    the MPS server of this machine was not found."""
    said = tmp_path / "said"
    (tmp_path / "pynvml.py").write_text(SHADOW.format(said=str(said), real=pynvml.__file__))
    paths = os.pathsep.join((str(tmp_path), str(SOURCES.parent)))
    pipe = str(tmp_path / "mps")
    assert run_on(rig, TRIES_OUT, rig.card(0).name, PYTHONPATH=paths, CUDA_MPS_PIPE_DIRECTORY=pipe) == ""
    assert set(said.read_text().splitlines()) == {f"1 {pipe}"}, "a supervisor runs without ``site``"


def test_nothing_but_what_it_wrote_itself_is_left(new_rig: NewRig) -> None:
    rig = new_rig(FOUR_H100)
    found, *_ = rehearsed(rig)
    assert "device files cannot be found" in found["walled"], "so it is lent to tenant local alone"
    assert not rig.dirty(0, but=b"\x5a")
    assert not rig.dirty(1)
