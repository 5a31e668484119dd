"""What a machine is declared to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.engines.machine import HOST_DEVICE, machine_inventory, memory_bytes, parse_host_gpus
from sublet.errors import InvalidRequest
from sublet.values import GIB, Kind


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x16GiB", (16 * GIB,) * 2),
        ("16GiB", (16 * GIB,)),
        ("1 x 1.5GiB", (GIB * 3 // 2,)),
        ("2×1GB", (10**9,) * 2),
        ("3x1073741824", (GIB,) * 3),
        (" 64x1MiB ", (1 << 20,) * 64),
    ],
)
def test_host_devices_are_a_number_and_a_size(text: str, sizes: tuple[int, ...]) -> None:
    """As people write it, and as one program hands it to another."""
    assert parse_host_gpus(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "2x", "0x1GiB", "65x1GiB", "-1x1GiB", "2x0", "2x-1GiB", "2xmuch", "99999x1"])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    """One sentence of what is wrong, one of what to write."""
    with pytest.raises(InvalidRequest) as error:
        parse_host_gpus(text)
    assert error.value.do


def test_without_a_declaration_half_of_the_memory_stands_in_for_a_gpu(tmp_path: Path) -> None:
    """And says plainly that it is none; the other half, the cores and the disk are lent as what they are."""
    found = {device.kind: device for device in machine_inventory(tmp_path, None).devices}
    gpu = found[Kind.GPU]
    assert (gpu.host, gpu.model) == (True, HOST_DEVICE)
    assert gpu.capacity == found[Kind.MEMORY].capacity <= memory_bytes() / 2
    assert found[Kind.CPU].capacity >= 1
    assert found[Kind.BLOCK].capacity % GIB == 0


def test_declared_devices_are_as_declared(tmp_path: Path) -> None:
    """More than the machine has may be declared: nothing is allocated by a declaration."""
    devices = machine_inventory(tmp_path, (1 << 50, GIB)).devices
    assert [device.capacity for device in devices if device.kind is Kind.GPU] == [1 << 50, GIB]
    assert len({device.id for device in devices}) == len(devices)
