"""How the public face is typed, for mypy to check: this file is never run, and each line must stay as it says."""

from __future__ import annotations

import datetime as dt
from typing import assert_type

import sublet
from sublet import aio
from sublet.wire.http import BillLine, LeaseView, StatusView


def blocking() -> None:
    fabric = sublet.connect("https://gpu.example.org", token="sublet_x")
    assert_type(fabric, sublet.Fabric)
    with fabric.gpu(min_vram="2GiB", ttl="5m", count=2, tier="batch", or_smaller=True, wait=0) as lease:
        assert_type(lease, sublet.Lease)
        assert_type(lease.epoch, sublet.Epoch)
        assert_type(lease.status, sublet.LeaseStatus)
        assert_type(lease.end, sublet.LeaseEnd | None)
        assert_type(lease.devices, tuple[sublet.LeasedDevice, ...])
        assert_type(lease.remaining, float)
        assert_type(lease.expires_at, dt.datetime)
        for change in lease.events():
            assert_type(change, sublet.LeaseChange)
        with lease.activity("training"):
            lease.check(needs="10s")

        @lease.on_end
        def ended(end: sublet.LeaseEnd) -> None:
            assert_type(end.reason, sublet.EndReason)

    fabric.gpu(min_vram=1 << 30, tier=sublet.Tier.SPOT, exclusivity="device", renew="always", renew_every=60)
    fabric.gpu(min_vram="1GiB", tier="gold")  # type: ignore[arg-type]
    fabric.gpu(min_vram="1GiB", vram="1GiB")  # type: ignore[call-arg]
    fabric.gpu(min_vram=1.5)  # type: ignore[arg-type]
    assert_type(fabric.cpu(4), sublet.Lease)
    assert_type(fabric.cpu(4, memory="1GiB"), sublet.Lease)
    with fabric.many(64, at_least=2).cpu(1, memory="1GiB", ttl="2m") as leases:
        assert_type(leases, sublet.Leases)
        assert_type(leases[0], sublet.Lease)
        assert_type(leases.release(), None)
        fabric.release(leases[1:])
    assert_type(fabric.memory("8GiB"), sublet.Lease)
    assert_type(fabric.block(min_blocks=512), sublet.Lease)
    assert_type(fabric.attach("l-1"), sublet.Lease)
    with fabric.cpu(1).start(["true"], stdio="null") as guest:
        assert_type(guest, sublet.Guest)
        assert_type(guest.wait(1.0), int)
    assert_type(fabric.status(), StatusView)
    assert_type(fabric.leases(), list[LeaseView])
    assert_type(fabric.bill(by="tenant"), list[BillLine])
    manager = sublet.RenewalManager()
    manager.register(lease, sublet.RenewalPolicy(renew_at_fraction=0.7))


def inside_a_guest() -> None:
    here = sublet.current()
    assert_type(here.epoch, sublet.Epoch)
    assert_type(here.remaining, float)
    assert_type(here.deadline, float)
    assert_type(here.devices, tuple[str, ...])
    assert_type(here.end, sublet.LeaseEnd | None)
    if here.noticed is not None:
        assert_type(here.noticed.reason, sublet.EndReason)
    here.check(here.epoch)


def train(steps: int, lr: float = 1e-3) -> float:
    return steps * lr


async def fetch(url: str) -> bytes:
    return url.encode()


@sublet.gpu(min_vram="8GiB", ttl=lambda texts: 2.0 * len(texts), expect="10s")
def embed(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def functions(lease: sublet.Lease) -> None:
    assert_type(lease.run(train, 3, lr=0.1), float)
    assert_type(lease.run(fetch, "x"), bytes)
    assert_type(lease.submit(train, 3).result(), float)
    assert_type(lease.submit(fetch, "x").result(), bytes)
    assert_type(next(lease.map(train, [1, 2])), float)
    assert_type(lease.options(timeout="1m", python="/usr/bin/python3").run(train, 3), float)
    lease.run(train, "three")  # type: ignore[call-overload]
    lease.run(train, 3, rate=0.1)  # type: ignore[arg-type, call-arg]
    assert_type(embed(["a"]), list[int])
    embed(3)  # type: ignore[arg-type]
    assert_type(sublet.device(), str)


def errors(error: sublet.CapacityExceeded | sublet.LeaseRevoked) -> None:
    if isinstance(error, sublet.CapacityExceeded):
        assert_type(error.estimate, float | None)
    else:
        assert_type(error.end, sublet.LeaseEnd | None)
    assert_type(error.transient, bool)


async def awaited() -> None:
    async with await aio.connect() as fabric:
        assert_type(fabric, aio.Fabric)
        async with fabric.gpu(min_vram="2GiB", wait="10m") as lease:
            assert_type(lease, aio.Lease)
            await lease.renew()
            assert_type(await lease.run(train, 3), float)
            assert_type(await lease.run(fetch, "x"), bytes)
            async for result in lease.map(train, [1, 2]):
                assert_type(result, float)
            async for change in lease.events():
                assert_type(change, sublet.LeaseChange)
        assert_type(await fabric.cpu(1), aio.Lease)
        assert_type(await fabric.many(2).memory("1MiB"), aio.Leases)
        async with fabric.many(64).gpu(min_vram="1GiB") as leases:
            assert_type(leases[0], aio.Lease)
            assert_type(await leases.release(), None)
        assert_type(await fabric.status(), StatusView)


def sessions(lease: sublet.Lease) -> None:
    with sublet.GpuSession(lease, device=0) as gpu:
        assert_type(gpu, sublet.GpuSession)
        x = gpu.mem_alloc(64)
        gpu.mem_write(x, 0, b"abc")
        assert_type(gpu.mem_read(x, 0, 3), bytes)
        gpu.mem_fill(x, 0, 64, b"ab")
        module = gpu.module_load("...", kind="warp")
        gpu.module_load({"warp": "...", "cuda": b"..."})
        gpu.module_load("...", kind="metal")  # type: ignore[arg-type]
        gpu.launch(module, "step", 4, (8, 8), [x, sublet.u32(1), sublet.f32(0.5), 7])
        gpu.launch(module, "step", 4, 8, ["7"])  # type: ignore[list-item]
        gpu.sync()
        assert_type(gpu.is_host, bool)


def kept_on_replicas(lease: sublet.Lease) -> None:
    replicas = [sublet.replicated.FolderReplica(f"replica-{n}") for n in range(3)]
    with sublet.replicated.ReplicaGroup(replicas, sublet.replicated.ReplicaPolicy(min_replicas=3)) as group:
        checkpoints = sublet.replicated.ReplicatedCheckpoint("c", schema="s.v1", replicas=group, epoch=lease.epoch)
        assert_type(checkpoints.save_bytes("job", b"", expected=0, effect=("k", "f", 1)), sublet.replicated.Save)
        assert_type(checkpoints.load("job"), sublet.replicated.Checkpoint | None)
        assert_type(checkpoints.versions("job"), list[sublet.replicated.Save])
        effects = sublet.replicated.ReplicatedIdempotencyStore("e", replicas=group, epoch=lease.epoch)
        match effects.reserve("k", "f", ttl="1m"):
            case sublet.replicated.New() | sublet.replicated.Conflict():
                effects.complete("k", "f", "done")
            case sublet.replicated.Pending(owner=owner):
                assert_type(owner, str)
            case sublet.replicated.Completed(outcome=outcome):
                assert_type(outcome, str)


def a_training_step(fabric: sublet.Fabric, lease: sublet.Lease) -> None:
    replicas = [sublet.replicated.FolderReplica(f"replica-{n}") for n in range(3)]
    checkpoint, idempotency = sublet.training.training_records("runs", replicas, lease, fabric=fabric)
    assert_type(checkpoint, sublet.replicated.ReplicatedCheckpoint)
    batch = sublet.training.TrainingBatch(job_id="spot-resnet", step=42, input=b"1234", output_len=4)
    outcome = sublet.training.run_training_step(
        lease, checkpoint, idempotency, batch, {"warp": "...", "ptx": b"..."}, "train_step", expected=0
    )
    assert_type(outcome.version, int | None)
    match outcome:
        case sublet.training.Completed(state=state, save=save):
            assert_type(state, bytes)
            assert_type(save, sublet.replicated.Save)
        case sublet.training.Recovered() | sublet.training.Duplicate():
            assert_type(outcome.step, int)
    more = [sublet.training.Launch("forward", 4, (8, 8)), sublet.training.Launch("backward", args=(sublet.f32(0.1),))]
    sublet.training.run_training_step(lease, checkpoint, idempotency, batch, "...", more, kind="warp", needs="2s")
    sublet.training.run_training_step(lease, checkpoint, idempotency, batch, "...", kind="metal")  # type: ignore[arg-type]
