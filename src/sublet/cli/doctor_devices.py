"""The doctor's lines on devices: the cards there are or why there is none, their processes, and their office."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Final

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.show import plural
from sublet.client.home import home_dir
from sublet.devices import nvrtc
from sublet.devices.cuda_driver import dotted, has_bindings
from sublet.errors import SubletError
from sublet.invocation import installing
from sublet.node.agent.health import fault_in
from sublet.node.agent.inventory import NO_BINDINGS
from sublet.node.agent.limits import memory_bytes, usable_cores
from sublet.node.agent.nvml import (
    Card,
    CardReading,
    Library,
    Nvml,
    NvmlFailed,
    Survey,
    sees_all_processes,
    survey,
    who_is,
)
from sublet.node.agent.rehearsal import (
    NO_NODES,
    ONE_PROCESS,
    Rehearsal,
    await_gone,
    rehearse_all,
    shows_pids,
)
from sublet.node.agent.suspend_probe import Ability, ability
from sublet.node.supervisor.locks import all_held, lock_folder
from sublet.values import NS_PER_S, Suspend, format_size
from sublet.wire.caps import LeaseCaps

CheckResult = tuple[str, str] | tuple[str, str, str]


def check_machine(root: str = "/") -> CheckResult:
    """What this process may use, and of how much."""
    cores, all_cores = usable_cores(root), os.cpu_count() or 1
    memory, whole = memory_bytes(root), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{plural(cores, 'core')}, {format_size(memory)} of memory"
    if cores < all_cores or memory < whole:
        text += f" (of the machine's {all_cores} and {format_size(whole)})"
    return "ok", text


def check_locks() -> CheckResult:
    """Which things of this machine are lent, and by whom. A folder that is of no use raises."""
    folder = lock_folder()
    held = [f"{holder.device} by {holder}" for holder in all_held(folder)]
    return "ok", f"{folder}: {'; '.join(held) or 'no device of this machine is lent'}"


def device_checks(library: Library | None = None, root: str = "/") -> dict[str, Callable[[], CheckResult]]:
    """The checks that make sense here: without a card there is one, which says why."""
    found = survey(library, root)
    checks: dict[str, Callable[[], CheckResult]] = {"GPU": lambda: _cards(found, root)}
    if found.cards or found.split:
        readings = _read(found, library)
        checks |= {
            "GPU health": lambda: _health(readings),
            "GPU in use": lambda: _in_use(readings),
            "GPU partitions": lambda: _partitions(found),
            "GPUs of the office": lambda: _of_the_office(found),
            "GPU libraries": _libraries,
            "GPU suspend": lambda: ("note", "tried when an office starts; `sublet status --json` has what was found"),
        }
    return checks


def _libraries() -> CheckResult:
    if has_bindings():
        return "ok", "the bindings for CUDA are installed"
    return (
        "note",
        f"{NO_BINDINGS}; commands and frameworks run without it",
        f"Install them: `{installing('sublet[gpu]')}`.",
    )


def nvidia_cards_on_the_bus(root: str = "/") -> int:
    """How many there are, whether a driver knows of them or not."""
    count = 0
    for device in Path(root, "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def _cards(found: Survey, root: str) -> CheckResult:
    if found.troubles:
        text = "; ".join(trouble.message for trouble in found.troubles)
        well = f" ({plural(len(found.cards), 'other')} can be lent)" if found.cards else ""
        return "broken", text + well, found.troubles[0].do
    if not found.driver:
        on_bus = nvidia_cards_on_the_bus(root)
        if on_bus:
            cards = f"{plural(on_bus, 'NVIDIA card')} on the bus"
            return "note", f"{cards}, and no driver for it: host devices (CPU standing in)", "Install NVIDIA's driver."
        return "note", "no NVIDIA driver: host devices (CPU standing in for cards)"
    models: dict[str, int] = {}
    for card in found.cards:
        model = f"{card.model} ({format_size(card.capacity)})"
        models[model] = models.get(model, 0) + 1
    listed = ", ".join(f"{count} × {model}" for model, count in models.items())
    return "ok", f"driver {found.driver}: {listed or 'no card'}"


def _read(found: Survey, library: Library | None) -> list[CardReading]:
    try:
        nvml = Nvml.open(library)
    except NvmlFailed as failed:
        return [CardReading(uuid=card.uuid, failed=failed) for card in found.cards]
    try:
        return [nvml.read(card.uuid) for card in found.cards]
    finally:
        nvml.close()


def _health(readings: list[CardReading]) -> CheckResult:
    faults = [f"{reading.uuid}: {fault}" for reading in readings if (fault := fault_in(reading))]
    if faults:
        return "broken", "; ".join(faults), "Such a card is not lent; see `nvidia-smi -q` and the kernel's log."
    resets = [reading.uuid for reading in readings if reading.needs_reset]
    if resets:
        return "note", f"{', '.join(resets)}: broken memory is taken out of use at the next reset", "Reset it in time."
    errors = sum(reading.uncorrected or 0 for reading in readings)
    if errors:
        return "note", f"{plural(errors, 'memory error')} that could not be corrected since the driver was loaded"
    return "ok", "no error reported"


def _in_use(readings: list[CardReading], sees: bool | None = None) -> CheckResult:
    """GPU memory that is in use. What foreign processes use is not lent, and `sublet status` says so. ``sees``: whether
    the driver names processes as this machine does, if that was tried out."""
    if not (sees_all_processes() if sees is None else sees):
        used = [f"{format_size(r.used)} of {r.uuid}" for r in readings if r.used]
        why = "processes cannot be told apart from inside this container"
        return "note", f"{why}; in use: {', '.join(used) or 'nothing'}"
    uses = [f"{reading.uuid}: {_who(reading)}" for reading in readings if reading.processes or reading.used]
    return ("note", "; ".join(uses)) if uses else ("ok", "no process uses a card")


def _who(reading: CardReading) -> str:
    used = format_size(reading.used or 0)
    names = []
    for process in reading.processes:
        name, user = who_is(process.pid)
        size = "" if process.bytes is None else f" with {format_size(process.bytes)}"
        names.append(f"process {process.pid} ({name or '?'}) of {user or '?'}{size}")
    return f"{used} in use by {', '.join(names) or 'no visible process'}"


def _partitions(found: Survey) -> CheckResult:
    if not found.split:
        return "ok", "no card is split (MIG)"
    parts = []
    for uuid in found.split:
        sizes = [format_size(card.capacity) for card in found.cards if card.physical == uuid]
        parts.append(f"{uuid}: {', '.join(sizes) or 'no instance'}")
    empty = any(all(card.physical != uuid for card in found.cards) for uuid in found.split)
    if empty:
        return "note", "; ".join(parts), "A split card without instances is not lent: make some (nvidia-smi mig)."
    return "ok", f"{'; '.join(parts)}, for those who ask for exclusivity partition"


def _of_the_office(found: Survey) -> CheckResult:
    """Whether the office that runs here has all that there is now: it looks for cards when it starts."""
    try:
        office = CommandOffice.reach(start=False)
        view = office.get("/v1/status")
    except NoOffice:
        return "note", "no office runs"
    if office.address.socket is None:
        return "note", "the office is on another machine"
    known = {device["id"].rpartition("/")[2] for device in view["devices"]}
    missing = [card.uuid for card in found.cards if card.uuid not in known]
    if missing:
        do = (
            "If it came after the office, as a part of a card (MIG) may: `sublet down` and `sublet up`. If not, "
            "`sublet status` says why it is not lent (gpu-trouble)."
        )
        return "note", f"{', '.join(missing)}: not among the devices of the office that runs", do
    return "ok", "it has every card and part that is here"


# ----------------------------------------------------------------------------------------------------------- doctor gpu
#
# ``sublet doctor --gpu``: rehearses every card as an office does before it lends it, and times each step.
#
# Nothing is left on a card, and no office is needed. A card that others have is said to be in use, and is not tried.


PACKAGES: Final = ("nvidia-ml-py", "cuda-bindings", "warp-lang", "torch")
_MODES: Final = ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS")
_MPS: Final = "/tmp/nvidia-mps"
_SUSPENDS: Final = {
    Suspend.NONE: "no",
    Suspend.SAME_DEVICE: "yes, and resumed on the same card (tried with a card of the model)",
    Suspend.SAME_TYPE: "yes, and resumed on the same card or on another of its model (tried with two of them)",
}
_PART: Final = "the driver suspends nothing on a part of a card"
_CAPS: Final = (
    "PyTorch in workers and kernels, CuPy everywhere; JAX (XLA) and TensorFlow have none, and allocate as they grow"
)
_WALLED: Final = {
    Suspend.NONE: "guests of other tenants are not suspended",
    Suspend.SAME_DEVICE: "guests of other tenants too, on the same card",
    Suspend.SAME_TYPE: "guests of other tenants too",
}


def gpu_checks() -> dict[str, Callable[[], CheckResult]]:
    """The checks of cards that are made anyway, then versions, surroundings, and each card."""
    found = survey()
    checks = device_checks()
    checks.pop("GPU suspend", None)
    if not found.cards:
        return checks
    nodes = {card.uuid: card.nodes for card in found.cards}
    readings = _read(found, None)
    before = {reading.uuid: reading.used or 0 for reading in readings}
    tried = {one.card: one for one in asyncio.run(rehearse_all(nodes, _caps()))}
    if (sees := shows_pids(tried.values())) is not None:
        checks["GPU in use"] = lambda: _in_use(readings, sees)
    models: dict[str, list[Card]] = {}
    for card in sorted(found.cards, key=lambda card: bool(tried[card.uuid].busy)):
        if not card.is_instance and not tried[card.uuid].failed:
            models.setdefault(card.model, []).append(card)

    @cache
    def suspends(model: str) -> Ability:
        return asyncio.run(ability([card.uuid for card in models[model]], models[model][0].nodes))

    checks["GPU versions"] = lambda: _versions(found, max(one.cuda for one in tried.values()))
    checks["GPU surroundings"] = lambda: _surroundings(tried)
    checks["GPU guests"] = lambda: _guests(tried)
    for index, card in enumerate(found.cards):
        checks[f"card {index}"] = partial(_card, card, tried[card.uuid], suspends, before.get(card.uuid, 0))
    return checks


def _caps() -> LeaseCaps:
    """Those that leases of this office have; where its policy.toml has a mistake, an office does not start with it."""
    from sublet.engines.operator_limits import POLICY_FILE, read_limits

    with contextlib.suppress(SubletError):
        return read_limits(home_dir() / POLICY_FILE).caps()
    return LeaseCaps()


def _versions(found: Survey, cuda: int) -> CheckResult:
    compiler = nvrtc.version()
    parts = [f"driver {found.driver}" + (f" (CUDA {dotted(cuda)})" if cuda else "")]
    parts.append(f"NVRTC {compiler[0]}.{compiler[1]}" if compiler else "no NVRTC")
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    text = ", ".join(parts)
    if compiler and cuda and compiler[0] > cuda // 1000:
        do = (
            f"CUDA C++ and Warp in a GpuSession need a driver of CUDA {compiler[0]}.0 or later; PTX, cubins, PyTorch "
            "and commands do not."
        )
        return "note", text, do
    return "ok", text


def _surroundings(tried: dict[str, Rehearsal]) -> CheckResult:
    """What is between this process and the cards."""
    parts = ["the machine's own processes" if sees_all_processes() else "inside a container (pids of its own)"]
    parts.append("pids of the driver are ours" if any(one.shows_pids for one in tried.values()) else "")
    parts.append("WSL" if _is_wsl() else "")
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS)
    mps = os.path.exists(Path(pipe, "control"))
    parts.append(f"an MPS server at {pipe}" if mps else "no MPS")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    parts.append("" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} (an office does not heed it)")
    text = ", ".join(filter(None, parts))
    if mps:
        return (
            "note",
            text,
            "With MPS guests are not suspended, and an error of one can end others: stop it if you can.",
        )
    return "ok", text


def _is_wsl() -> bool:
    """Without the device file of its cards too, as in a container there: WSL names itself in each session."""
    return os.path.exists("/dev/dxg") or "WSL_DISTRO_NAME" in os.environ


def _guests(tried: dict[str, Rehearsal]) -> CheckResult:
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
    walled: dict[str, list[str]] = {}
    for one in tried.values():
        if one.walled:
            walled.setdefault(one.walled, []).append(one.card)
    if walled:
        refused = "; ".join(f"{', '.join(cards)}: {why}" for why, cards in walled.items())
        makes = " (`nvidia-modprobe -u -c0` makes device files)" if NO_NODES in walled and not _is_wsl() else ""
        do = f"They are not lent to other tenants. Mend it{makes}, then `sublet down` and `sublet up`."
        return "note", f"{text}. When that was tried, they could not use {refused}", do
    if is_watched:
        return "ok", text
    return "note", text, "Give users tenants of their own (`sublet tenant add`) where this matters."


def _card(card: Card, tried: Rehearsal, suspends: Callable[[str], Ability], before: int) -> CheckResult:
    """``before``: how much of it was in use before it was tried out."""
    what = f"{card.uuid}, {card.model}, {format_size(card.capacity)}"
    steps = ", ".join(f"{step.name} {step.took_ns / NS_PER_S:.2f} s" for step in tried.steps)
    if tried.failed:
        done = f"; before that: {steps}" if steps else ""
        return "broken", f"{what}: not lent, {tried.failed}{done}", tried.do
    if tried.busy:
        return "note", f"{what}: in use by others, and not tried ({tried.busy})", "See `nvidia-smi` for who has it."
    lent = "lent as a part of a card, for exclusivity partition" if card.is_instance else "lent"
    watch = "yes, every 5 s" if tried.shows_pids else "no, the driver does not list processes of this machine here"
    can = Ability(why=_PART) if card.is_instance else suspends(card.model)
    if can.took_ns:
        steps += f", suspending {can.took_ns / NS_PER_S:.2f} s (once for its model)"
    if tried.compute_mode in ONE_PROCESS:
        await_gone({card.uuid: before})
    may = [
        "scrub: yes",
        f"watch of VRAM: {watch}",
        f"cap: {_CAPS}",
        f"suspend: {_suspends(can)}",
    ]
    modes = [] if tried.compute_mode < 0 else [f"compute mode {_MODES[min(tried.compute_mode, 3)]}"]
    modes += [] if tried.persistence < 0 else [f"persistence {'on' if tried.persistence else 'off'}"]
    modes += ["a desktop draws on it"] if tried.draws else []
    text = "; ".join([f"{what}: {lent}", *may, *([", ".join(modes)] if modes else []), f"tried: {steps}"])
    if tried.compute_mode in ONE_PROCESS:
        do = "In this mode only one process computes on a card: `nvidia-smi -c DEFAULT` lets a lease have several."
        return "note", text, do
    return "ok", text


def _suspends(can: Ability) -> str:
    """For guests of tenant local, and for others."""
    text = _SUSPENDS[can.local] + (f" ({can.why})" if can.why else "")
    if can.local is Suspend.NONE:
        return text
    return f"{text}; {_WALLED[can.walled]}" + (f" ({can.walled_why})" if can.walled_why else "")
