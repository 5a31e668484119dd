"""Libraries that are none, or not all of them: each is a sentence of what is the matter and one of what to do."""

from __future__ import annotations

import shutil
import struct
import subprocess
from typing import Any, Final

import pytest

from sublet.devices.plain_cuda import CALLS
from tests.rig.rig import Rig
from tests.rig.test_interface import run_on

pytestmark = pytest.mark.needs("gcc")

AARCH64: Final = 183
MACHINE_AT: Final = 18
"""Where an ELF file says for which processor it is."""

TRIES: Final = """
import asyncio, dataclasses, json, sys
from sublet.node.agent.nvml import survey
from sublet.node.agent.rehearsal import rehearse_all
from sublet.wire.caps import LeaseCaps
found = survey(root=sys.argv[1])
tried = asyncio.run(rehearse_all({card.uuid: card.nodes for card in found.cards[:1]}, LeaseCaps()))
print(json.dumps([[one.message for one in found.troubles], [[one.failed, one.do] for one in tried]]))
"""


def tried(rig: Rig) -> Any:
    (rig.folder / "dev").mkdir()
    (rig.folder / "dev/nvidiactl").touch()
    return run_on(rig, TRIES, str(rig.folder))


def test_a_stub_of_libcuda_is_said_to_be_one(rig: Rig) -> None:
    """The toolkit's, for linking: each of its calls answers 34."""
    source = rig.folder / "stub.c"
    source.write_text(
        "".join(f"int {name}{version}(void) {{ return 34; }}\n" for name, (version, _, _) in CALLS.items())
    )
    library = rig.folder / "libcuda.so.1"
    library.unlink()
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    _, ((failed, do),) = tried(rig)
    assert "cuInit said 34" in failed
    assert "stub of libcuda.so.1: take its folder out of LD_LIBRARY_PATH" in do


def test_a_libcuda_of_another_processor_cannot_be_loaded(rig: Rig) -> None:
    library = rig.folder / "libcuda.so.1"
    with open(library, "r+b") as file:
        file.seek(MACHINE_AT)
        file.write(struct.pack("<H", AARCH64))
    _, ((failed, do),) = tried(rig)
    assert "libcuda.so.1 cannot be loaded" in failed
    assert "Install it" in do


def test_nvml_without_cuda_finds_cards_and_lends_none(rig: Rig) -> None:
    (rig.folder / "libcuda.so.1").unlink()
    _, ((failed, do),) = tried(rig)
    assert "libcuda.so.1 cannot be loaded" in failed
    assert "container" in do


def test_cuda_without_nvml_is_a_trouble_and_not_a_machine_without_cards(rig: Rig) -> None:
    (rig.folder / "libnvidia-ml.so.1").unlink()
    troubles, found = tried(rig)
    assert troubles == ["the driver's library libnvidia-ml.so.1 is not here"]
    assert found == []


def test_libraries_without_a_driver_behind_them_are_one_that_is_not_loaded(rig: Rig) -> None:
    shutil.move(rig.folder / "state", rig.folder / "state.away")
    troubles, found = tried(rig)
    assert troubles == ["no NVIDIA driver is loaded"]
    assert found == []
