"""Machines with cards, as tables: what each says of itself, and where that was read.

A line is a value and its source. ``guessed`` marks what no source says; the tests list these, and the first real card
is compared with that list first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sublet.values import GIB, MIB

__all__ = [
    "ALL_IN_CONTAINER",
    "DRIVER_570",
    "DRIVER_575",
    "EIGHT_H100",
    "EXCLUSIVE",
    "FOUR_H100",
    "H100",
    "JETSON",
    "LAPTOP",
    "MPS",
    "NEWER",
    "NO_FABRIC",
    "NO_UVM",
    "OLD_DRIVER",
    "PARTS",
    "PERSONALITIES",
    "RTX",
    "SHOWN",
    "SOME_IN_CONTAINER",
    "WORKSTATION",
    "CardKind",
    "Line",
    "Personality",
    "guessed",
]


class Line(NamedTuple):
    """One fact about a machine or a card: a field of ``state.h``."""

    field: str
    value: Any
    source: str


GUESSED: Final = "guessed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardKind:
    """One model of card."""

    name: str
    lines: tuple[Line, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return {line.field: line.value for line in self.lines}


@dataclass(frozen=True, slots=True, kw_only=True)
class Personality:
    """One kind of machine."""

    name: str
    cards: tuple[CardKind, ...]
    lines: tuple[Line, ...]
    hidden: frozenset[int] = field(default_factory=frozenset)
    """Cards that the machine has and this container has not."""
    answers: tuple[Line, ...] = ()
    """Questions that the driver answers with an error on this machine, and with which."""
    not_lent: str = ""
    """Why no card of it can be found to lend, as its sources say; empty where they can."""
    desktop: tuple[Line, ...] = ()
    """Programs that draw on its first card, by name: how much of it each has."""
    variables: tuple[Line, ...] = ()
    """What the machine sets in the environment of each session."""

    @property
    def all_lines(self) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        """Those of the machine and of each card, with the name of what they are about."""
        own = (*self.lines, *self.answers, *self.desktop, *self.variables)
        return ((self.name, own), *((card.name, card.lines) for card in self.cards))

    @property
    def machine(self) -> Mapping[str, Any]:
        return {line.field: line.value for line in self.lines}


MOCK: Final = "NVIDIA/k8s-test-infra at 3b2b865, pkg/gpu/mocknvml, profile H100: "

H100: Final = CardKind(
    name="H100",
    lines=(
        Line("model", b"NVIDIA H100 80GB HBM3", MOCK + "name"),
        Line("memory", 80 * GIB, MOCK + "memory.total_bytes"),
        Line("reserved", GIB, MOCK + "memory.reserved_bytes"),
        Line("power_mw", 700_000, MOCK + "power.default_limit_mw"),
        Line("major", 9, "CUDA C++ Programming Guide, compute capabilities: 9.0"),
        Line("minor", 0, "the same"),
        Line("idle", 4 * MIB, GUESSED),
        Line("context", 520 * MIB, GUESSED),
        Line("persistence", 1, GUESSED),
    ),
)

LINGERS: Final = Line("lingers_ms", 300, GUESSED)

FOUR_H100: Final = Personality(
    name="4 × H100, driver 580, bare metal",
    cards=(H100,) * 4,
    lines=(
        Line("driver", b"580.65.06", "CUDA 13.0 release notes: the oldest driver for it on Linux"),
        Line("cuda", 13_000, "the same"),
        LINGERS,
    ),
)

SOME_IN_CONTAINER: Final = Personality(
    name="2 of 4 × H100, driver 570, in a container",
    cards=(H100,) * 4,
    hidden=frozenset((0, 2)),
    lines=(
        Line("driver", b"570.86.10", "CUDA 12.8 release notes: the driver that came with it on Linux"),
        Line("cuda", 12_080, "the same"),
        Line("namespaced", 1, "NVIDIA/open-gpu-kernel-modules, _gpuConvertPid: pids as the asker's namespace has them"),
        LINGERS,
    ),
)

NVML_H: Final = "nvml.h: "
SPLIT: Final = CardKind(
    name="H100 in MIG mode", lines=(*H100.lines, Line("split", 1, "MIG User Guide: nvidia-smi -mig 1"))
)
PART: Final = CardKind(
    name="3g.40gb of the first H100",
    lines=(
        Line("model", b"NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG User Guide, names of profiles"),
        Line("parent", 1, "the first card of the machine"),
        Line("memory", 40 * GIB, "MIG User Guide, profiles of the H100 80GB"),
        Line("major", 9, "CUDA C++ Programming Guide, compute capabilities: 9.0"),
        Line("idle", 44 * MIB, GUESSED),
        Line("context", 400 * MIB, GUESSED),
    ),
)
PARTS: Final = Personality(
    name="an H100 in MIG mode with two parts beside a whole one",
    cards=(SPLIT, H100, PART, PART),
    lines=FOUR_H100.lines,
)

RTX: Final = CardKind(
    name="RTX 4090",
    lines=(
        Line("model", b"NVIDIA GeForce RTX 4090", "CUDA GPUs, table of GeForce products"),
        Line("memory", 24 * GIB, "the same"),
        Line("major", 8, "the same: 8.9"),
        Line("minor", 9, "the same"),
        Line("power_mw", 450_000, GUESSED),
        Line("reserved", 400 * MIB, GUESSED),
        Line("idle", 2 * MIB, GUESSED),
        Line("context", 320 * MIB, GUESSED),
    ),
)
NO_ECC: Final = (
    Line("nvmlDeviceGetTotalEccErrors", 3, NVML_H + "NVML_ERROR_NOT_SUPPORTED without ECC"),
    Line("nvmlDeviceGetRetiredPagesPendingStatus", 3, NVML_H + "NVML_ERROR_NOT_SUPPORTED"),
    Line("nvmlDeviceGetRemappedRows", 3, NVML_H + "for fully supported devices of Ampere and later"),
)
DRAWS: Final = "NVIDIA/nvidia-docker #1264, nvidia-smi -q: of type G, beside the other; how much is "
"""Both in NVML's list of processes with a graphics context. There they had 28 and 46 MiB of a small screen's card."""
WORKSTATION: Final = Personality(
    name="2 × RTX 4090, driver 575, Xorg and a compositor on one",
    cards=(RTX,) * 2,
    lines=(
        Line("driver", b"575.51.03", "CUDA 12.9 release notes: the driver that came with it on Linux"),
        Line("cuda", 12_090, "the same"),
        LINGERS,
    ),
    answers=NO_ECC,
    desktop=(Line("Xorg", 400 * MIB, DRAWS + GUESSED), Line("gnome-shell", 240 * MIB, DRAWS + GUESSED)),
)
LAPTOP: Final = Personality(
    name="RTX Laptop under WSL2",
    cards=(
        CardKind(
            name="RTX 4090 Laptop",
            lines=(
                *(line for line in RTX.lines if line.field not in ("memory", "idle")),
                Line("memory", 16 * GIB, "CUDA GPUs, table of GeForce products"),
                Line("idle", 1200 * MIB, GUESSED),  # the desktop of Windows
            ),
        ),
    ),
    lines=(
        Line("driver", b"580.65.06", "CUDA 13.0 release notes"),
        Line("cuda", 13_000, "the same"),
        LINGERS,
    ),
    answers=(
        *NO_ECC,
        *(
            Line(f"nvmlDeviceGet{which}RunningProcesses_v3", 999, "dask/distributed #5567: Unknown Error under WSL2")
            for which in ("Compute", "Graphics", "MPSCompute")
        ),
        Line("nvmlDeviceGetUtilizationRates", 999, "CUDA on WSL User Guide, limitations of NVML"),
        Line("nvmlDeviceSetPersistenceMode", 3, NVML_H + "for Linux only"),
        Line("nvmlDeviceSetPowerManagementLimit", 3, NVML_H + "NVML_ERROR_NOT_SUPPORTED"),
    ),
    variables=(Line("WSL_DISTRO_NAME", "Debian", "microsoft/WSL, src/linux/init/config.cpp: set in each session"),),
)
OLD_DRIVER: Final = Personality(
    name="2 × RTX 4090, driver 550",
    cards=(RTX,) * 2,
    lines=(
        Line("driver", b"550.54.14", "CUDA 12.4 release notes: the driver that came with it on Linux"),
        Line("cuda", 12_040, "the same"),
        LINGERS,
    ),
    answers=NO_ECC,
)
NO_FABRIC: Final = Personality(
    name="2 × H100 without fabric manager",
    cards=(H100,) * 2,
    lines=(*FOUR_H100.lines, Line("init_code", 802, "Fabric Manager User Guide: CUDA_ERROR_SYSTEM_NOT_READY")),
)
NO_UVM: Final = Personality(
    name="RTX 4090, nvidia-uvm not loaded",
    cards=(RTX,),
    lines=(*WORKSTATION.lines, Line("init_code", 999, "NVIDIA driver README, nvidia-modprobe; CUDA answers 999")),
    answers=NO_ECC,
)
EXCLUSIVE: Final = Personality(
    name="2 × H100, EXCLUSIVE_PROCESS",
    cards=(
        CardKind(
            name="H100, EXCLUSIVE_PROCESS",
            lines=(*H100.lines, Line("compute_mode", 3, NVML_H + "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS")),
        ),
    )
    * 2,
    lines=FOUR_H100.lines,
)

EIGHT_H100: Final = Personality(name="8 × H100, driver 580, bare metal", cards=(H100,) * 8, lines=FOUR_H100.lines)
DRIVER_570: Final = Personality(
    name="4 × H100, driver 570, bare metal",
    cards=(H100,) * 4,
    lines=tuple(line for line in SOME_IN_CONTAINER.lines if line.field != "namespaced"),
)
DRIVER_575: Final = Personality(name="4 × H100, driver 575, bare metal", cards=(H100,) * 4, lines=WORKSTATION.lines)
ALL_IN_CONTAINER: Final = Personality(
    name="2 × H100, all of them, in a container", cards=(H100,) * 2, lines=SOME_IN_CONTAINER.lines
)
MPS: Final = Personality(
    name="2 × H100 with an MPS server",
    cards=(H100,) * 2,
    lines=(
        *FOUR_H100.lines,
        Line("mps", 1, "MPS documentation: nvidia-smi shows clients as M+C; that none is suspended: guessed"),
    ),
)
NEWER: Final = Personality(
    name="2 × H100, a driver newer than our bindings",
    cards=(H100,) * 2,
    lines=(Line("driver", b"700.10.01", GUESSED), Line("cuda", 15_000, GUESSED), LINGERS),
    answers=tuple(Line(f"nvmlDeviceGet{what}", 12_345, GUESSED) for what in ("TotalEccErrors", "UtilizationRates")),
)
JETSON: Final = Personality(
    name="a Jetson",
    cards=(
        CardKind(
            name="Orin",
            lines=(
                Line("model", b"Orin (nvgpu)", GUESSED),
                Line("memory", 64 * GIB, "Jetson AGX Orin data sheet: one memory for processor and GPU"),
                Line("major", 8, "CUDA GPUs, table of Jetson products: 8.7"),
                Line("minor", 7, "the same"),
                Line("context", 200 * MIB, GUESSED),
            ),
        ),
    ),
    lines=(Line("driver", b"540.4.0", "JetPack 6.2 release notes"), Line("cuda", 12_060, "the same"), LINGERS),
    answers=(
        *NO_ECC,
        *(Line(f"nvmlDeviceGetMemoryInfo{version}", 3, NVML_H + "NVML_ERROR_NOT_SUPPORTED") for version in ("", "_v2")),
    ),
    not_lent="the GPU has no memory of its own that it can tell of",
)

PERSONALITIES: Final = (
    FOUR_H100,
    EIGHT_H100,
    DRIVER_570,
    DRIVER_575,
    ALL_IN_CONTAINER,
    MPS,
    NEWER,
    JETSON,
    SOME_IN_CONTAINER,
    PARTS,
    WORKSTATION,
    LAPTOP,
    OLD_DRIVER,
    NO_FABRIC,
    NO_UVM,
    EXCLUSIVE,
)

SHOWN: Final[Mapping[str, Personality]] = {
    "4xH100": FOUR_H100,
    "8xH100": EIGHT_H100,
    "4xH100-570": DRIVER_570,
    "4xH100-575": DRIVER_575,
    "container-all": ALL_IN_CONTAINER,
    "mps": MPS,
    "newer-driver": NEWER,
    "jetson": JETSON,
    "container": SOME_IN_CONTAINER,
    "mig": PARTS,
    "workstation": WORKSTATION,
    "wsl2": LAPTOP,
    "driver550": OLD_DRIVER,
    "no-fabric-manager": NO_FABRIC,
    "no-uvm": NO_UVM,
    "exclusive": EXCLUSIVE,
}
"""By the names that a person types: `make demo RIG=4xH100`."""


def guessed() -> list[str]:
    """What no source says, a line each."""
    found = {
        f"{owner}: {line.field} = {line.value!r}"
        for personality in PERSONALITIES
        for owner, lines in personality.all_lines
        for line in lines
        if GUESSED in line.source
    }
    return sorted(found)
