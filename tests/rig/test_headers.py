"""The rig against NVIDIA's own headers: prototypes, layouts and numbers of all that the product's code touches."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pynvml
import pytest

from sublet.devices import cuda_driver
from sublet.devices.plain_cuda import CALLS
from tests.rig.headers import HERE, Prototype, facts_of, headers_folder, numbers_of, prototypes
from tests.rig.test_interface import OF_A_CARD, exported

pytestmark = pytest.mark.needs("gcc")

OURS: Final = {
    "nvml.h": ('#include "nvml.c"', ("libnvidia-ml.so.1", "nv"), (HERE / "state.c",)),
    "cuda.h": ('#include "cuda.c"', ("libcuda.so.1", "cu"), (HERE / "state.c", HERE / "modules.c")),
}
"""By the header: the source that declares the same, the library that is made of it, and what it is linked with."""
THEIRS: Final = {
    "nvml.h": "#include <nvml.h>",
    "cuda.h": "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>",  # each symbol by its own name, old ones too
}
STRUCTURES: Final = {
    "nvml.h": {
        "struct memory": ("nvmlMemory_t", {"total": "total", "free": "free", "used": "used"}),
        "struct memory_v2": (
            "nvmlMemory_v2_t",
            {name: name for name in ("version", "total", "reserved", "free", "used")},
        ),
        "struct process_info": (
            "nvmlProcessInfo_t",
            {"pid": "pid", "bytes": "usedGpuMemory", "instance": "gpuInstanceId", "compute": "computeInstanceId"},
        ),
        "struct utilization": ("nvmlUtilization_t", {"gpu": "gpu", "memory": "memory"}),
        "struct event": (
            "nvmlEventData_t",
            {
                "device": "device",
                "type": "eventType",
                "data": "eventData",
                "instance": "gpuInstanceId",
                "compute": "computeInstanceId",
            },
        ),
    },
    "cuda.h": {
        "Uuid": ("CUuuid", {"bytes": "bytes"}),
        "LockArgs": (
            "CUcheckpointLockArgs",
            {"timeout_ms": "timeoutMs", "reserved0": "reserved0", "reserved1": "reserved1"},
        ),
        "Pair": ("CUcheckpointGpuPair", {"before": "oldUuid", "after": "newUuid"}),
        "RestoreArgs": ("CUcheckpointRestoreArgs", {"pairs": "gpuPairs", "count": "gpuPairsCount"}),
    },
}
"""Of the rig's: what the header calls it, and each of its fields."""
NUMBERS: Final = {
    "nvml.h": {
        "NVML_COMPUTEMODE_EXCLUSIVE_THREAD": 1,
        "NVML_COMPUTEMODE_PROHIBITED": 2,
        "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": 3,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "nvmlEventTypeXidCriticalError": 8,
        "nvmlMemory_v2": pynvml.nvmlMemory_v2,
    },
    "cuda.h": {
        "CU_PROCESS_STATE_RUNNING": 0,
        "CU_PROCESS_STATE_LOCKED": 1,
        "CU_PROCESS_STATE_CHECKPOINTED": 2,
        "CU_PROCESS_STATE_FAILED": 3,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
        "CU_STREAM_NON_BLOCKING": 1,
    },
}
"""Those that the rig's sources and the product's have as they are."""


def include_of(header: str) -> tuple[str, ...]:
    return (f"-I{headers_folder()}",)


def linked_with(header: str) -> tuple[str, ...]:
    return (*map(str, OURS[header][2]), "-ldl", "-pthread")


@pytest.mark.parametrize("header", OURS)
def test_every_entry_point_takes_and_answers_what_the_header_says(header: str, tmp_path: Path) -> None:
    """As the machine passes it. And each is one that the header has."""
    text, (library, prefix), _ = OURS[header]
    ours, theirs = (
        prototypes(text, place=tmp_path),
        prototypes(THEIRS[header], *include_of(header), place=tmp_path),
    )
    names = {name for name in exported(library) if name.startswith(prefix)}
    assert len(names) > 25
    assert names - theirs.keys() == set()
    of_ours = facts_of(_types(ours[name] for name in names), text, *linked_with(header), place=tmp_path)
    of_theirs = facts_of(_types(theirs[name] for name in names), THEIRS[header], *include_of(header), place=tmp_path)
    for name in sorted(names):
        assert len(ours[name].takes) == len(theirs[name].takes), name
        for our, their in zip((ours[name][0], *ours[name].takes), (theirs[name][0], *theirs[name].takes), strict=True):
            one, other = of_ours[our], of_theirs[their]
            assert one[:2] == other[:2], (name, our, their)
            assert one.pointee == other.pointee or 0 in (one.pointee, other.pointee), (name, our, their)
            if one.pointee > 8 and other.pointee:
                assert STRUCTURES[header][_led_to(our)][0] == _led_to(their), name


@pytest.mark.parametrize("header", OURS)
def test_every_structure_is_laid_out_as_in_the_header(header: str, tmp_path: Path) -> None:
    ours: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for our, (their, fields) in STRUCTURES[header].items():
        ours[our], theirs[our] = f"sizeof({our})", f"sizeof({their})"
        for mine, field in fields.items():
            ours[f"{our}.{mine}"] = f"offsetof({our}, {mine}) * 1000 + sizeof((({our} *)0)->{mine})"
            theirs[f"{our}.{mine}"] = f"offsetof({their}, {field}) * 1000 + sizeof((({their} *)0)->{field})"
    text = OURS[header][0]
    found = numbers_of(ours, text, *linked_with(header), place=tmp_path)
    assert found == numbers_of(theirs, THEIRS[header], *include_of(header), place=tmp_path)


def codes_in(source: str, prefix: str) -> dict[str, int]:
    """The names and numbers of the answers, as the header calls them."""
    (listed,) = re.findall(r"\bCode; /\* \w+ \*/\nenum \{(.*?)\};", (HERE / source).read_text(), re.DOTALL)
    found = re.findall(r"(\w+) = (\d+)", listed)
    return {f"{prefix}_{'' if name == 'SUCCESS' else 'ERROR_'}{name}": int(number) for name, number in found}


@pytest.mark.parametrize(("header", "source", "prefix"), [("nvml.h", "nvml.c", "NVML"), ("cuda.h", "cuda.c", "CUDA")])
def test_every_number_is_the_headers(header: str, source: str, prefix: str, tmp_path: Path) -> None:
    """Of answers, modes, states and attributes; also those that the product's sources name."""
    named = set[str]()
    for folder in OF_A_CARD:
        for path in folder.rglob("*.py"):
            named |= set(re.findall(rf"\b{prefix}_[A-Z][A-Z0-9_]+\b", path.read_text()))
    expected = codes_in(source, prefix) | NUMBERS[header]
    if header == "nvml.h":
        expected |= {name: getattr(pynvml, name) for name in named}
    else:
        lost = {name: name for name in cuda_driver._LOST}
        assert all(numbers_of(lost, THEIRS[header], *include_of(header), place=tmp_path).values())
    assert len(expected) > 15
    assert (
        numbers_of({name: name for name in expected}, THEIRS[header], *include_of(header), place=tmp_path) == expected
    )


def test_what_is_called_without_bindings_is_called_as_the_header_says(tmp_path: Path) -> None:
    """``ctypes`` has no header: a number of the wrong length would be passed as it is."""
    theirs = prototypes(THEIRS["cuda.h"], *include_of("cuda.h"), place=tmp_path)
    called = {name + version: (answers, takes) for name, (version, answers, takes) in CALLS.items()}
    facts = facts_of(_types(theirs[name] for name in called), THEIRS["cuda.h"], *include_of("cuda.h"), place=tmp_path)
    for name, (answers, takes) in called.items():
        listed = [facts[their] for their in theirs[name].takes]
        assert len(listed) == len(answers) + len(takes), name
        for kind, fact in zip(answers, listed[: len(answers)], strict=True):
            assert fact.is_pointer, name
            assert fact.pointee == ctypes.sizeof(kind), name
        for kind, fact in zip(takes, listed[len(answers) :], strict=True):
            assert (fact.is_pointer, fact.size) == (kind is ctypes.c_void_p, ctypes.sizeof(kind)), name


STRUCTURE: Final = re.compile(r"\b(CUcheckpoint\w+|CUuuid|c_nvml\w+_t|nvmlMemory_v2)\b")


def test_a_structure_that_the_code_names_is_one_that_is_compared() -> None:
    """A new one fails here until its layout is compared; the first and the last are handed over empty."""
    named = {
        name for folder in OF_A_CARD for path in folder.rglob("*.py") for name in STRUCTURE.findall(path.read_text())
    }
    compared = {their.removesuffix("_t") for row in STRUCTURES.values() for their, _ in row.values()}
    assert named - compared - {"CUcheckpointCheckpointArgs", "CUcheckpointUnlockArgs"} == set()
    assert len(named) > 4


def test_a_prototype_that_differs_is_found(tmp_path: Path) -> None:
    text = "typedef struct { int a, b; } Two;\nint f(Two *two, unsigned short n, void (*then)(int)) { return n; }"
    (found,) = prototypes(text, place=tmp_path).values()
    assert found.takes == ("Two *", "short unsigned int", "void *")
    facts = facts_of(found.takes, text, place=tmp_path)
    assert facts["Two *"] == (True, 8, 8)
    assert facts["short unsigned int"] == (False, 2, 0)


def _types(found: Iterable[Prototype]) -> set[str]:
    return {one for answer, takes in found for one in (answer, *takes)}


def _led_to(pointer: str) -> str:
    return pointer.removeprefix("const ").removesuffix("*").strip()
