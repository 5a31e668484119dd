"""What a machine is found, or declared, to have."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.node.agent.inventory import (
    DRIVER_LABEL,
    HOST_DEVICE,
    HOST_GPUS_MAX,
    TROUBLE_LABEL,
    HostGpus,
    card_of,
    machine_inventory,
    parse_host_gpus,
)
from sublet.node.agent.limits import memory_bytes
from sublet.node.agent.nvml import IDLE_SHARE, IDLE_SHARE_OLD, Survey, survey
from sublet.values import GIB, MIB, Kind
from sublet.wire.orders import Device, Inventory
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml, uuid_of

NO_CARDS = Survey()


def locked(inventory: Inventory) -> list[str]:
    """The things of the whole machine in it, device by device: what is locked before any of it is lent."""
    return [device.machine_id for device in inventory.devices if device.machine_id]


def gpus(inventory: Inventory) -> list[Device]:
    return [device for device in inventory.devices if device.kind is Kind.GPU]


# ---------------------------------------------------------------------------------------------------- what is declared


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2x16GiB", HostGpus(count=2, size=16 * GIB)),
        ("16GiB", HostGpus(count=1, size=16 * GIB)),
        ("1 x 1.5GiB", HostGpus(count=1, size=GIB * 3 // 2)),
        ("2x16G", HostGpus(count=2, size=16 * GIB)),
        ("2×1GB", HostGpus(count=2, size=10**9)),
        ("3x1073741824B", HostGpus(count=3, size=GIB)),
        (" 64x1MiB ", HostGpus(count=64, size=MIB)),
        ("2x16GiB@lab", HostGpus(count=2, size=16 * GIB, namespace="lab")),
        ("16GiB @room-4", HostGpus(count=1, size=16 * GIB, namespace="room-4")),
    ],
)
def test_host_devices_are_a_number_and_a_size(text: str, meant: HostGpus) -> None:
    """As people write it, and as one program hands it to another."""
    assert parse_host_gpus(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "2x", "0x1GiB", "65x1GiB", "-1x1GiB", "2x0", "2x-1GiB", "2xmuch", "99999x1"),
        *("2x1GiB@", "2x1GiB@Lab", "2x1GiB@-lab", "2x1GiB@lab-", "2x1GiB@a/b", "2x1GiB@..", "2x1GiB@a@b", "@lab"),
        *("2x1GiB@" + "a" * 33, "2x1GiB@l\nab", "2x1GiB@läb", "2x1GiB@ lab"),
    ],
)
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    """One sentence of what is wrong, one of what to write."""
    with pytest.raises(InvalidRequest) as error:
        parse_host_gpus(text)
    assert error.value.do


NAMESPACES = st.one_of(st.just(""), st.from_regex(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True))


@given(st.integers(1, HOST_GPUS_MAX), st.integers(1, 1 << 60), NAMESPACES)
def test_what_is_handed_on_comes_back_to_the_byte(count: int, size: int, namespace: str) -> None:
    meant = HostGpus(count=count, size=size, namespace=namespace)
    assert parse_host_gpus(str(meant)) == meant


@given(st.text(max_size=40))
def test_any_text_is_a_declaration_or_is_refused_as_none(text: str) -> None:
    try:
        found = parse_host_gpus(text)
    except InvalidRequest:
        return
    assert 1 <= found.count <= HOST_GPUS_MAX
    assert found.size >= 1


@given(st.lists(st.tuples(NAMESPACES, st.integers(1, HOST_GPUS_MAX)), max_size=4, unique=True))
def test_two_devices_have_one_name_on_the_machine_only_if_they_are_declared_to_be_one(
    declared: list[tuple[str, int]],
) -> None:
    """``a-1``'s device 0 is not ``a``'s device 1."""
    seen: dict[str, tuple[str, str]] = {}
    for namespace, count in declared:
        for device in HostGpus(count=count, size=GIB, namespace=namespace).devices():
            assert bool(device.machine_id) == bool(namespace)
            if namespace:
                assert seen.setdefault(device.machine_id, (namespace, device.id)) == (namespace, device.id)


def test_declared_devices_are_as_declared(tmp_path: Path) -> None:
    """More than the machine has may be declared: nothing is allocated by a declaration."""
    inventory = machine_inventory(tmp_path, HostGpus(count=2, size=1 << 50))
    assert [device.capacity for device in gpus(inventory)] == [1 << 50] * 2
    assert len({device.id for device in inventory.devices}) == len(inventory.devices)
    assert locked(inventory) == []


def test_devices_of_a_namespace_are_things_of_the_machine(tmp_path: Path) -> None:
    inventory = machine_inventory(tmp_path, parse_host_gpus("2x1GiB@lab"))
    assert locked(inventory) == ["host-lab-0", "host-lab-1"]
    assert [device.id for device in gpus(inventory)] == ["local/lab-gpu0", "local/lab-gpu1"]


def test_whoever_declares_host_devices_gets_no_card_and_nobody_asks_for_one(tmp_path: Path) -> None:
    """A request must not land on a stand-in by chance, and another office may lend the cards."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    inventory = machine_inventory(tmp_path, HostGpus(count=1, size=GIB), root=str(tmp_path))
    assert [device.host for device in gpus(inventory)] == [True]
    assert inventory.labels == {}


# ------------------------------------------------------------------------------------------------------ what is found


def test_without_a_card_half_of_the_memory_stands_in_for_one(tmp_path: Path) -> None:
    """And says plainly that it is none; the other half, the cores and the disk are lent as what they are."""
    found = {device.kind: device for device in machine_inventory(tmp_path, None, found=NO_CARDS).devices}
    gpu = found[Kind.GPU]
    assert (gpu.host, gpu.model, gpu.machine_id) == (True, HOST_DEVICE, "")
    assert gpu.capacity == found[Kind.MEMORY].capacity <= memory_bytes() / 2
    assert found[Kind.CPU].capacity >= 1
    assert found[Kind.BLOCK].capacity % GIB == 0


@pytest.mark.parametrize("count", [1, 8])
def test_cards_are_lent_by_their_uuid(tmp_path: Path, count: int) -> None:
    library = FakeNvml([FakeCard(n, total=80 * GIB, reserved=600 * MIB) for n in range(count)])
    inventory = machine_inventory(tmp_path, None, found=survey(library))
    cards = gpus(inventory)
    assert [device.id for device in cards] == [f"local/{uuid_of(n)}" for n in range(count)]
    assert [card_of(device) for device in cards] == [uuid_of(n) for n in range(count)]
    assert {device.model for device in cards} == {"NVIDIA Pretend"}
    assert {device.capacity for device in cards} == {80 * GIB - 600 * MIB - IDLE_SHARE}, (
        "what the driver keeps cannot be lent"
    )
    assert not any(device.host or device.partition for device in cards)
    assert inventory.labels == {DRIVER_LABEL: "580.65.06"}
    assert locked(inventory) == [uuid_of(n) for n in range(count)]
    assert library.opened == 0, "whoever searched lets go of the driver"


def test_an_older_driver_that_does_not_tell_its_own_share_is_taken_at_its_word(tmp_path: Path) -> None:
    library = FakeNvml([FakeCard(0, total=24 * GIB, reserved=GIB)], unknown={"nvmlDeviceGetMemoryInfo_v2"})
    assert gpus(machine_inventory(tmp_path, None, found=survey(library)))[0].capacity == 24 * GIB - IDLE_SHARE_OLD


def test_a_split_card_is_lent_as_its_instances_and_locked_as_itself(tmp_path: Path) -> None:
    """One physical card, one office: whoever has one instance has the card."""
    library = FakeNvml([FakeCard(0, instances={0: 10 * GIB, 3: 20 * GIB}), FakeCard(1)])
    inventory = machine_inventory(tmp_path, None, found=survey(library))
    first, second, whole = gpus(inventory)
    assert (first.partition, second.partition, whole.partition) == (True, True, False)
    assert (first.capacity, second.capacity) == (10 * GIB - IDLE_SHARE, 20 * GIB - IDLE_SHARE)
    assert first.id != second.id
    assert {first.machine_id, second.machine_id} == {uuid_of(0)}
    assert locked(inventory) == [uuid_of(0), uuid_of(0), uuid_of(1)]


def test_a_split_card_without_instances_is_not_replaced_by_a_stand_in(tmp_path: Path) -> None:
    found = survey(FakeNvml([FakeCard(0, instances={})]))
    assert found.split == (uuid_of(0),)
    assert gpus(machine_inventory(tmp_path, None, found=found)) == []


def test_a_driver_without_our_libraries_is_on_the_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cards are lent all the same: commands and frameworks bring their own."""
    monkeypatch.setattr("sublet.node.agent.inventory.has_bindings", lambda: False)
    inventory = machine_inventory(tmp_path, None, found=survey(FakeNvml([FakeCard(0)])))
    assert "sublet[gpu]" in inventory.labels["gpu-libraries"]
    assert len(gpus(inventory)) == 1
    assert "gpu-libraries" not in machine_inventory(tmp_path, None, found=survey(FakeNvml([]))).labels


def test_a_lost_card_costs_only_itself(tmp_path: Path) -> None:
    library = FakeNvml([FakeCard(0), FakeCard(1, broken=pynvml.NVML_ERROR_GPU_IS_LOST), FakeCard(2)])
    inventory = machine_inventory(tmp_path, None, found=survey(library))
    assert [card_of(device) for device in gpus(inventory)] == [uuid_of(0), uuid_of(2)]
    assert inventory.labels[TROUBLE_LABEL] == "GPU 1: the GPU is lost: it fell off its bus"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "may not use"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "is lost"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_machine_without_cards(tmp_path: Path, code: int, said: str) -> None:
    """Work that was meant for a card would run on a CPU, and nobody would know why it takes so long."""
    inventory = machine_inventory(tmp_path, None, found=survey(FakeNvml([], broken=code)))
    assert gpus(inventory) == []
    assert said in inventory.labels[TROUBLE_LABEL]
    assert len(inventory.devices) == 3, "cores, memory and disk are lent all the same"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_no_trouble_unless_its_device_is_there(tmp_path: Path, code: int) -> None:
    """A container that was given the device and not the library has a card that must not be overlooked."""
    library = FakeNvml([], broken=code)
    assert survey(library, root=str(tmp_path)) == Survey()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    [trouble] = survey(library, root=str(tmp_path)).troubles
    assert trouble.code == code
    assert trouble.do
