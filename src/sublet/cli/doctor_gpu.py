"""``sublet doctor --gpu``: rehearses every card as an office does before it lends it, and times each step.

Nothing is left on a card, and no office is needed. A card that others have is said to be in use, and is not tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Final

from sublet.cli.doctor_devices import device_checks
from sublet.devices import nvrtc
from sublet.devices.cuda_driver import dotted
from sublet.node.agent.health import sees_all_processes
from sublet.node.agent.nvml import Card, Survey, survey
from sublet.node.agent.rehearsal import ONE_PROCESS, Rehearsal, rehearse_all
from sublet.node.agent.suspend_probe import ability
from sublet.values import NS_PER_S, Suspend, format_size

Said = tuple[str, str] | tuple[str, str, str]

PACKAGES: Final = ("nvidia-ml-py", "cuda-bindings", "warp-lang", "torch")
_MODES: Final = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")
_MPS: Final = "/tmp/nvidia-mps"
_SUSPENDS: Final = {
    Suspend.NONE: "no (needs CUDA 12.8, sublet[gpu], and a whole card; tried with the first card)",
    Suspend.SAME_DEVICE: "yes, and resumed on the same card (tried with the first card)",
    Suspend.SAME_TYPE: "yes, and resumed on the same card or on another of its model (tried with two of them)",
}


def gpu_checks() -> dict[str, Callable[[], Said]]:
    """The checks of cards that are made anyway, then versions, surroundings, and each card."""
    found = survey()
    checks = device_checks()
    checks.pop("GPU suspend", None)
    if not found.cards:
        return checks
    tried = {one.card: one for one in asyncio.run(rehearse_all([card.uuid for card in found.cards]))}
    suspends = cache(lambda: asyncio.run(ability()))
    checks["GPU versions"] = lambda: _versions(found, max(one.cuda for one in tried.values()))
    checks["GPU surroundings"] = lambda: _surroundings(tried)
    checks["GPU guests"] = lambda: _guests(tried)
    for index, card in enumerate(found.cards):
        checks[f"card {index}"] = partial(_card, card, tried[card.uuid], suspends)
    return checks


def _versions(found: Survey, cuda: int) -> Said:
    compiler = nvrtc.version()
    said = [f"driver {found.driver}" + (f" (CUDA {dotted(cuda)})" if cuda else "")]
    said.append(f"NVRTC {compiler[0]}.{compiler[1]}" if compiler else "no NVRTC")
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            said.append(f"{package} {importlib.metadata.version(package)}")
    text = ", ".join(said)
    if compiler and cuda and compiler[0] > cuda // 1000:
        do = (
            f"CUDA C++ and Warp in a GpuSession need a driver of CUDA {compiler[0]}.0 or later; PTX, cubins, PyTorch "
            "and commands do not."
        )
        return "note", text, do
    return "ok", text


def _surroundings(tried: dict[str, Rehearsal]) -> Said:
    """What is between this process and the cards."""
    said = ["the machine's own processes" if sees_all_processes() else "inside a container (pids of its own)"]
    said.append("pids of the driver are ours" if any(one.shows_pids for one in tried.values()) else "")
    said.append("WSL" if os.path.exists("/dev/dxg") else "")
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS)
    mps = os.path.exists(Path(pipe, "control"))
    said.append(f"an MPS server at {pipe}" if mps else "no MPS")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    said.append("" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} (an office does not heed it)")
    text = ", ".join(filter(None, said))
    if mps:
        return (
            "note",
            text,
            "With MPS guests are not suspended, and an error of one can end others: stop it if you can.",
        )
    return "ok", text


def _guests(tried: dict[str, Rehearsal]) -> Said:
    """What holds a guest to the cards of its lease, and what does not."""
    is_watched = all(one.shows_pids for one in tried.values() if one.steps and not one.failed)
    seen = (
        "one with memory there is warned, and ended some seconds later"
        if is_watched
        else "and what it has there is not seen, since the driver does not list processes of this machine here"
    )
    text = (
        "a guest of tenant local sees the cards of its lease first (CUDA_VISIBLE_DEVICES), and nothing keeps it from "
        f"opening others; {seen}. Guests of other tenants find the device files of their own cards alone"
    )
    if is_watched:
        return "ok", text
    return "note", text, "Give users tenants of their own (`sublet tenant add`) where this matters."


def _card(card: Card, tried: Rehearsal, suspends: Callable[[], Suspend]) -> Said:
    what = f"{card.uuid}, {card.model}, {format_size(card.capacity)}"
    steps = ", ".join(f"{step.name} {step.took_ns / NS_PER_S:.2f} s" for step in tried.steps)
    if tried.failed:
        done = f"; before that: {steps}" if steps else ""
        return "broken", f"{what}: not lent, {tried.failed}{done}", tried.do
    if tried.busy:
        return "note", f"{what}: in use by others, and not tried ({tried.busy})", "See `nvidia-smi` for who has it."
    lent = "lent as a part of a card, to who asks for exclusivity partition" if card.is_instance else "lent"
    watch = "yes, every 5 s" if tried.shows_pids else "no, the driver does not list processes of this machine here"
    may = [
        "scrub: yes",
        f"watch of VRAM: {watch}",
        "cap: PyTorch in workers and kernels",
        f"suspend: {_SUSPENDS[Suspend.NONE] if card.is_instance else _SUSPENDS[suspends()]}",
    ]
    modes = [] if tried.compute_mode < 0 else [f"compute mode {_MODES[min(tried.compute_mode, 3)]}"]
    modes += [] if tried.persistence < 0 else [f"persistence {'on' if tried.persistence else 'off'}"]
    modes += ["a desktop draws on it"] if tried.draws else []
    said = "; ".join([f"{what}: {lent}", *may, *([", ".join(modes)] if modes else []), f"tried: {steps}"])
    if tried.compute_mode in ONE_PROCESS:
        do = "In this mode only one process computes on a card: `nvidia-smi -c DEFAULT` lets a lease have several."
        return "note", said, do
    return "ok", said
