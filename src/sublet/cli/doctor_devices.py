"""The doctor's lines on devices: the cards there are or why there is none, their processes, and their office."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sublet.cli.show import plural
from sublet.devices.cuda_driver import has_bindings
from sublet.invocation import installing
from sublet.node.agent.health import fault_in, sees_all_processes, who_is
from sublet.node.agent.inventory import NO_BINDINGS
from sublet.node.agent.limits import memory_bytes, usable_cores
from sublet.node.agent.nvml import Library, Nvml, NvmlFailed, Reading, Survey, survey
from sublet.node.supervisor.locks import all_held, lock_folder
from sublet.values import format_size

Said = tuple[str, str] | tuple[str, str, str]


def check_machine(root: str = "/") -> Said:
    """What this process may use, and of how much."""
    cores, there = usable_cores(root), os.cpu_count() or 1
    memory, whole = memory_bytes(root), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    said = f"{plural(cores, 'core')}, {format_size(memory)} of memory"
    if cores < there or memory < whole:
        said += f" (of the machine's {there} and {format_size(whole)})"
    return "ok", said


def check_locks() -> Said:
    """Which things of this machine are lent, and by whom. A folder that is of no use raises."""
    folder = lock_folder()
    held = [f"{holder.device} by {holder}" for holder in all_held(folder)]
    return "ok", f"{folder}: {'; '.join(held) or 'no device of this machine is lent'}"


def device_checks(library: Library | None = None, root: str = "/") -> dict[str, Callable[[], Said]]:
    """The checks that make sense here: without a card there is one, which says why."""
    found = survey(library, root)
    checks: dict[str, Callable[[], Said]] = {"GPU": lambda: _cards(found, root)}
    if found.cards or found.split:
        readings = _read(found, library)
        checks |= {
            "GPU health": lambda: _health(readings),
            "GPU in use": lambda: _in_use(readings),
            "GPU partitions": lambda: _partitions(found),
            "GPU libraries": _libraries,
            "GPU suspend": lambda: ("note", "tried when an office starts; `sublet status --json` has what was found"),
        }
    return checks


def _libraries() -> Said:
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


def _cards(found: Survey, root: str) -> Said:
    if found.troubles:
        said = "; ".join(trouble.message for trouble in found.troubles)
        well = f" ({plural(len(found.cards), 'other')} can be lent)" if found.cards else ""
        return "broken", said + well, found.troubles[0].do
    if not found.driver:
        there = nvidia_cards_on_the_bus(root)
        if there:
            cards = f"{plural(there, 'NVIDIA card')} on the bus"
            return "note", f"{cards}, and no driver for it: host devices (CPU standing in)", "Install NVIDIA's driver."
        return "note", "no NVIDIA driver: host devices (CPU standing in for cards)"
    models: dict[str, int] = {}
    for card in found.cards:
        model = f"{card.model} ({format_size(card.capacity)})"
        models[model] = models.get(model, 0) + 1
    listed = ", ".join(f"{count} × {model}" for model, count in models.items())
    return "ok", f"driver {found.driver}: {listed or 'no card'}"


def _read(found: Survey, library: Library | None) -> list[Reading]:
    try:
        nvml = Nvml.open(library)
    except NvmlFailed as failed:
        return [Reading(uuid=card.uuid, failed=failed) for card in found.cards]
    try:
        return [nvml.read(card.uuid) for card in found.cards]
    finally:
        nvml.close()


def _health(readings: list[Reading]) -> Said:
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


def _in_use(readings: list[Reading]) -> Said:
    """GPU memory that is in use. What foreign processes use is not lent, and `sublet status` says so."""
    if not sees_all_processes():
        used = [f"{format_size(r.used)} of {r.uuid}" for r in readings if r.used]
        why = "processes cannot be told apart from inside this container"
        return "note", f"{why}; in use: {', '.join(used) or 'nothing'}"
    said = [f"{reading.uuid}: {_who(reading)}" for reading in readings if reading.processes or reading.used]
    return ("note", "; ".join(said)) if said else ("ok", "no process uses a card")


def _who(reading: Reading) -> str:
    used = format_size(reading.used or 0)
    names = []
    for process in reading.processes:
        name, user = who_is(process.pid)
        size = "" if process.bytes is None else f" with {format_size(process.bytes)}"
        names.append(f"process {process.pid} ({name or '?'}) of {user or '?'}{size}")
    return f"{used} in use by {', '.join(names) or 'no visible process'}"


def _partitions(found: Survey) -> Said:
    if not found.split:
        return "ok", "no card is split (MIG)"
    said = []
    for uuid in found.split:
        sizes = [format_size(card.capacity) for card in found.cards if card.physical == uuid]
        said.append(f"{uuid}: {', '.join(sizes) or 'no instance'}")
    empty = any(all(card.physical != uuid for card in found.cards) for uuid in found.split)
    if empty:
        return "note", "; ".join(said), "A split card without instances is not lent: make some (nvidia-smi mig)."
    return "ok", f"{'; '.join(said)}, for those who ask for exclusivity partition"
