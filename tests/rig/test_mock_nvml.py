"""NVIDIA's own mock of NVML (NVIDIA/k8s-test-infra, pkg/gpu/mocknvml) beneath the code that the rig tests.

It is other people's material, and no part of the project: it is looked for in the folder that ``SUBLET_MATERIAL``
names. What is expected stands in its profiles. The twins of these tests on the rig are in ``test_personalities`` and
``test_office``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.traces import plain_env

pytestmark = pytest.mark.needs("mock-nvml")

RIG: Final = Path(os.environ.get("SUBLET_MATERIAL", "/nowhere"), "gpu-rig")
PROFILES: Final = ("a100", "b200", "gb200", "gb300", "h100", "l40s", "t4")
SOURCES: Final = Path(__file__).parents[2] / "src"
WITHIN_S: Final = 60.0


def profile(name: str) -> str:
    return (RIG / "configs" / f"mock-nvml-config-{name}.yaml").read_text()


def stated(text: str, field: str) -> str:
    """The first value of this field."""
    found = re.search(rf'^\s*{field}:\s*"?([^"#\n]+?)"?\s*(?:#.*)?$', text, re.MULTILINE)
    assert found is not None, field
    return found[1]


def run(code: str, config: Path) -> Any:
    env = plain_env() | {
        "LD_LIBRARY_PATH": str(RIG),
        "MOCK_NVML_CONFIG": str(config),
        "PYTHONPATH": str(SOURCES),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SURVEYS: Final = """
import dataclasses, json
from sublet.node.agent.clean_card import read_settings
from sublet.node.agent.nvml import Nvml, survey
found = survey()
nvml = Nvml.open()
nvml.watch([card.uuid for card in found.cards])
readings = [nvml.read(card.uuid) for card in found.cards]
print(json.dumps({
    "driver": found.driver,
    "cards": [[card.model, card.capacity, card.is_instance] for card in found.cards],
    "wrong": [str(trouble) for trouble in found.troubles] + [str(one.failed) for one in readings if one.failed],
    "used": [one.used for one in readings],
    "processes": [len(one.processes) for one in readings],
    "uncorrected": [one.uncorrected for one in readings],
    "worn_out": [one.worn_out or one.needs_reset for one in readings],
    "xids": list(nvml.xids()),
    "modes": nvml.modes(found.cards[0].uuid),
    "settings": json.loads(read_settings(found.cards[0].uuid).settings),
}))
"""


@pytest.mark.parametrize("name", PROFILES)
def test_each_of_its_models_is_found_as_its_profile_says(name: str) -> None:
    """Model, memory without what the driver keeps, nobody on it, no error; and what is set is read."""
    text = profile(name)
    found = run(SURVEYS, RIG / "configs" / f"mock-nvml-config-{name}.yaml")
    total, reserved = int(stated(text, "total_bytes")), int(stated(text, "reserved_bytes"))
    assert found["driver"] == stated(text, "driver_version")
    assert found["wrong"] == []
    for model, capacity, is_instance in found["cards"]:
        assert model == stated(text, "name")
        assert total - reserved - (64 << 20) <= capacity <= total - reserved
        assert not is_instance
    count = len(re.findall(r"^ *- index:", text, re.MULTILINE))
    assert len(found["cards"]) == count > 0
    assert found["used"] == found["processes"] == found["uncorrected"] == [0] * count
    assert found["worn_out"] == [False] * count
    assert found["xids"] == []
    assert found["modes"] == [0, 1], "compute mode default, persistence enabled"
    assert found["settings"]["compute mode"] == 0
    assert found["settings"]["power limit"] == int(stated(text, "enforced_limit_mw"))


WATCHES: Final = """
import json
from pathlib import Path
from sublet.node.agent.foreign import Own
from sublet.node.agent.health import CardWatch
from sublet.node.agent.inventory import machine_inventory
watch = CardWatch(machine_inventory(Path("/tmp"), None), own=lambda resource: Own(), sees_processes=True)
said = []
for look in range(40):
    said += [report.detail for report in watch.judge(watch.read_cards(), look) if type(report).__name__ == "Fault"]
    if said:
        break
print(json.dumps([look, said]))
"""


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("{mode: lost, after_calls: 60}", "the GPU is lost: it fell off its bus"),
        ("{mode: fallen_off_bus, after_calls: 60, xid: {code: 79}}", "the GPU is lost: it fell off its bus"),
        ("{mode: ecc_uncorrectable, after_calls: 60}", "its memory is broken, and there is nothing left to replace it"),
        ("{mode: ecc_uncorrectable, after_calls: 60, xid: {code: 48}}", "(Xid 48)"),
    ],
)
def test_a_failure_of_its_is_a_fault_of_the_card(tmp_path: Path, failure: str, said: str) -> None:
    """After some looks at a card that was well."""
    config = tmp_path / "config.yaml"
    config.write_text(profile("h100").replace("device_defaults:\n", f"device_defaults:\n  failure: {failure}\n", 1))
    look, faults = run(WATCHES, config)
    assert look > 0
    assert all(said in fault for fault in faults)
