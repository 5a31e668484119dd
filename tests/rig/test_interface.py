"""The rig against the true bindings: it has every entry point and structure that the product's code names."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest

import sublet
from sublet.devices.plain_cuda import CALLS
from tests.commands import run_program
from tests.rig.personalities import PERSONALITIES, guessed
from tests.rig.rig import Rig, State, build
from tests.traces import plain_env

SOURCES: Final = Path(sublet.__file__).parent
ROOT: Final = Path(__file__).parents[2]
OF_A_CARD: Final = (SOURCES, ROOT / "tests/gpu", ROOT / "benchmarks/gpu")
CODE_LIMIT_S: Final = 120.0

pytestmark = pytest.mark.needs("gcc")


def run_on(rig: Rig, code: str, *arguments: str, limit_s: float = CODE_LIMIT_S, **variables: str) -> Any:
    """What a program on this machine prints, as JSON."""
    env = plain_env() | rig.env | {"PYTHONPATH": str(SOURCES.parent)} | variables
    done = run_program(code, *arguments, env=env, timeout=limit_s)
    assert done.status == 0, done.err.decode()
    return json.loads(done.out)


# ---- what the code names ----


def names_in(text: str, pattern: str) -> Iterator[str]:
    """Attributes, functions and whole texts of a source that are such a name."""
    for node in ast.walk(ast.parse(text)):
        found = None
        if isinstance(node, ast.Attribute):
            found = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = node.value
        elif isinstance(node, ast.FunctionDef):
            found = node.name
        if found is not None and re.fullmatch(pattern, found):
            yield found


OF_DRIVERS: Final = r"(cu|cupti|nvml)[A-Z]\w+"


@cache
def _of_drivers(path: Path) -> frozenset[str]:
    text = path.read_text()
    return frozenset(names_in(text, OF_DRIVERS) if re.search(rf"\b{OF_DRIVERS}", text) else ())


def named_in_sources(pattern: str, folders: Sequence[Path] = OF_A_CARD) -> set[str]:
    """Names of drivers' entry points that are such a name, too."""
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    return {name for path in paths for name in _of_drivers(path) if re.fullmatch(pattern, name)}


def symbols_of_nvml(name: str) -> set[str]:
    """What the function of ``pynvml`` looks up in the library, itself or through another one."""
    function = getattr(pynvml, name)
    if not inspect.isfunction(function):
        return set()
    source = inspect.getsource(function)
    found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', source))
    for other in set(re.findall(r"\b(nvml[A-Z]\w+)\(", source)) - {name}:
        found |= symbols_of_nvml(other)
    return found


def exported(library: str) -> set[str]:
    argv = ["nm", "--dynamic", "--defined-only", "--format=posix", str(build()[library])]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines()}


def missing_in_cuda(names: set[str]) -> list[str]:
    there = exported("libcuda.so.1")
    return sorted(name for name in names if not {name, f"{name}_v2"} & there)


def test_the_rig_has_every_entry_point_that_the_code_names() -> None:
    """A new call of the product's, or of the tests and figures for a card, fails here until the rig has it."""
    called = named_in_sources(r"cu[A-Z]\w+") | {name + version for name, (version, _, _) in CALLS.items()}
    asked = {symbol for name in named_in_sources(r"nvml[A-Z]\w+") for symbol in symbols_of_nvml(name)}
    assert len(called) > 25, called
    assert len(asked) > 25, asked
    assert missing_in_cuda(called) == []
    assert sorted(named_in_sources(r"cupti[A-Z]\w+") - exported("libcupti.so.13")) == []
    assert sorted(asked - exported("libnvidia-ml.so.1")) == []


def test_an_entry_point_that_the_rig_has_not_is_found() -> None:
    text = 'driver("open", "cuGraphCreate", 0)\nlib.nvmlDeviceGetFanSpeed(handle)\ndef cuMemAlloc(): ...'
    assert missing_in_cuda(set(names_in(text, r"cu[A-Z]\w+"))) == ["cuGraphCreate"]
    (asked,) = names_in(text, r"nvml[A-Z]\w+")
    assert symbols_of_nvml(asked) - exported("libnvidia-ml.so.1") == {"nvmlDeviceGetFanSpeed"}


SIZES: Final = """
import ctypes, json, pynvml
class Row(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("bytes", ctypes.c_size_t)]
library = ctypes.CDLL("libnvidia-ml.so.1")
library.rig_state_size.restype = ctypes.c_size_t
found = {}
for row in (Row * 16).in_dll(library, "rig_structures"):
    if not row.name:
        break
    found[row.name.decode()] = row.bytes
theirs = {name: ctypes.sizeof(getattr(pynvml, name)) for name in found}
print(json.dumps([found, theirs, library.rig_state_size()]))
"""


def test_structures_are_as_long_as_the_bindings_have_them(rig: Rig) -> None:
    """And the state is as long for C as for Python."""
    ours, theirs, state = run_on(rig, SIZES)
    assert ours == theirs
    assert len(ours) >= 5
    assert state == ctypes.sizeof(State)


# ---- personalities ----


def test_every_line_of_a_personality_says_where_it_was_read() -> None:
    for personality in PERSONALITIES:
        for owner, lines in personality.all_lines:
            fields = [line.field for line in lines]
            assert len(fields) == len(set(fields)), owner
            assert all(line.source for line in lines), owner
    print(*guessed(), sep="\n")
    assert guessed(), "what no source says is listed, and compared with the first real card"


def lendable(rig: Rig) -> list[str]:
    """The cards that the machine shows, by their order in it, with its parts in the place of one that is split."""
    found: list[str] = []
    if rig.personality.not_lent:
        return found
    for index, card in enumerate(rig.state.cards):
        if card.present and not card.hidden and not card.parent:
            parts = [part.name for part in rig.state.cards if part.parent == index + 1]
            found += parts if card.split else [card.name]
    return found


VISIBLE: Final = """
import json
from sublet.devices.cuda_driver import open_driver
try:
    driver = open_driver()
    count = driver("open", "cuDeviceGetCount")
    print(json.dumps([bytes(driver("open", "cuDeviceGetUuid", driver("open", "cuDeviceGet", i)).bytes).hex()
                      for i in range(count)]))
except Exception as error:
    print(json.dumps(str(error)))
"""


def test_cuda_shows_what_cuda_visible_devices_names_up_to_the_first_that_is_none(rig: Rig) -> None:
    bare = [bytes(rig.card(i).uuid).hex() for i in range(4)]
    names = [rig.card(i).name for i in range(4)]
    for visible, expected in (
        ("2,0", [bare[2], bare[0]]),
        (f"{names[3]},{names[1]}", [bare[3], bare[1]]),
        (f"{names[1]},GPU-????????-????,{names[0]}", [bare[1]]),
        (names[2][:12], [bare[2]]),
    ):
        assert run_on(rig, VISIBLE, CUDA_VISIBLE_DEVICES=visible) == expected, visible
    for nothing in ("", "-1", "7"):
        assert "no CUDA-capable device" in run_on(rig, VISIBLE, CUDA_VISIBLE_DEVICES=nothing)


MEMORY: Final = """
import json, os, sys
from sublet.node.agent.nvml import Nvml
from sublet.devices.cuda_driver import open_driver
uuid = sys.argv[1]
nvml = Nvml.open()
def look():
    reading = nvml.read(uuid)
    return [reading.used, [[use.pid, use.bytes] for use in reading.processes]]
said = [look()]
driver = open_driver()
said.append(look())
driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", driver("t", "cuDeviceGet", 0)))
memory = driver("t", "cuMemAlloc", 1 << 30)
driver("t", "cuMemsetD8", int(memory) + (1 << 29), 0x5A, 4096)
back = bytearray(4096)
driver("t", "cuMemcpyDtoH", back, int(memory) + (1 << 29), 4096)
said += [look(), os.getpid(), back == bytes([0x5A]) * 4096]
print(json.dumps(said))
"""


def test_nvml_tells_which_process_has_how_much_of_which_card(rig: Rig) -> None:
    """CUDA begun without a context has nothing of a card. What was written stays there after its process."""
    before, begun, with_memory, pid, came_back = run_on(
        rig, MEMORY, rig.card(2).name, CUDA_VISIBLE_DEVICES=rig.card(2).name
    )
    assert before == begun == [0, []]
    expected = rig.card(2).context + (1 << 30)
    assert with_memory[1] == [[pid, expected]]
    assert came_back
    assert rig.dirty(2)
    assert not rig.dirty(0)


PROBE: Final = """
import json
from sublet.devices.suspend import probe
print(json.dumps(probe().suspend.value))
"""


def test_a_process_is_suspended_and_resumed_with_what_it_had(rig: Rig) -> None:
    assert run_on(rig, PROBE) == "same_type"


CLEAN: Final = """
import json, sys
sys.modules |= dict.fromkeys(["cuda", *(name for name in sys.modules if name.startswith("cuda."))])
from sublet.node.agent.clean_card import clean
found = clean(sys.argv[1], sees_processes=True)
print(json.dumps([found.left, found.failed, found.is_hard, found.scrubbed_bytes]))
"""


def test_a_card_is_overwritten_whole_without_the_bindings(rig: Rig) -> None:
    """A Python without the extra quarantined each card at the end of its first lease."""
    run_on(rig, MEMORY, rig.card(1).name, CUDA_VISIBLE_DEVICES="1")
    assert rig.dirty(1)
    until_s = time.monotonic() + CODE_LIMIT_S
    left, failed, is_hard, count = run_on(rig, CLEAN, rig.card(1).name)
    while left:  # what its process had lingers for a moment
        assert time.monotonic() < until_s, left
        left, failed, is_hard, count = run_on(rig, CLEAN, rig.card(1).name)
    assert (failed, is_hard) == ("", False)
    assert count > 0.98 * (rig.card(1).memory - rig.card(1).reserved)
    assert not rig.dirty(1)


LOOKS_AS_A_SUPERVISOR: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from sublet.node.supervisor.real_hardware import run_program
assert "site" not in sys.modules and "pynvml" not in sys.modules
print(run_program((sys.argv[2], "--look")))
"""


def test_what_a_supervisor_forks_finds_the_binding_of_nvml_by_itself(rig: Rig) -> None:
    """A supervisor loads nothing that is installed. Those of the other tests find it loaded."""
    words = ("-I", "-S", "-c", LOOKS_AS_A_SUPERVISOR, str(SOURCES.parent), rig.card(0).name)
    env = plain_env() | rig.env
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=CODE_LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(json.loads(done.stdout)["settings"])["power limit"] == rig.card(0).power_mw
