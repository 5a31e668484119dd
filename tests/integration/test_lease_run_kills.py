"""SIGKILL of worker, zygote, office, supervisor and holder in the middle of a call: what is told, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sublet
from sublet.errors import SubletError, WorkerLost
from tests.integration.office_stage import OfficeStage, office_stage
from tests.traces import PATIENCE_S, until

HOLDER = """
import sys, time
import sublet
fabric = sublet.connect(home=sys.argv[1], start=False)
lease = fabric.cpu(1, ttl="10m")
print(lease.run(__import__("os").getpid), flush=True)
lease.run(time.sleep, 600)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with office_stage(tmp_path, "2x1GiB") as stage:
        yield stage


@pytest.fixture
def fabric(stage: OfficeStage) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=stage.office.home, start=False) as fabric:
        yield fabric


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to interrupt a function, and to say how a process has ended."""
    monkeypatch.setattr("sublet.compute.calls.GRACE_S", PATIENCE_S)
    monkeypatch.setattr("sublet.compute.worker_guest.END_REPORTED_S", PATIENCE_S)


def begun(lease: sublet.Lease, gate: Path) -> Callable[[], object]:
    """A call that waits for a file to appear."""

    def wait(gate: str) -> str:
        while not os.path.exists(gate):
            time.sleep(0.01)
        return "done"

    future = lease.submit(wait, str(gate))
    until("a call that runs", future.running)
    return lambda: future.result(PATIENCE_S)


def test_of_the_worker(stage: OfficeStage, fabric: sublet.Fabric, tmp_path: Path, patient: None) -> None:
    with fabric.gpu(min_vram="64MiB", ttl="1m") as lease:
        pid = lease.run(os.getpid)
        result = begun(lease, tmp_path / "gate")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="SIGKILL"):
            result()
        assert lease.run(os.getpid) != pid
        assert lease.end is None
    until("nothing left", lambda: not stage.residue)


def test_of_the_zygote(stage: OfficeStage, fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Workers do not notice; new ones come all the same."""
    with fabric.gpu(min_vram="64MiB", ttl="1m") as lease:
        result = begun(lease, tmp_path / "gate")
        until("a zygote", lambda: zygotes(stage))
        for pid in zygotes(stage):
            with contextlib.suppress(ProcessLookupError):  # a copy that waits ends with the one it comes from
                os.kill(pid, signal.SIGKILL)
        (tmp_path / "gate").touch()
        assert result() == "done"
        assert lease.options(env={**os.environ, "OTHER": "1"}).run(len, "abc") == 3
    until("nothing left", lambda: not stage.residue)


def test_of_the_office(stage: OfficeStage, fabric: sublet.Fabric, tmp_path: Path) -> None:
    """Calls go on, and new ones too; a new office finds everything as it is."""
    with fabric.gpu(min_vram="64MiB", ttl="60s") as lease:
        pid = lease.run(os.getpid)
        result = begun(lease, tmp_path / "gate")
        stage.kill_office()
        (tmp_path / "gate").touch()
        assert result() == "done"
        assert lease.run(os.getpid) == pid
        stage.start()
        assert lease.run(os.getpid) == pid
    until("nothing left", lambda: not stage.residue)


def test_of_the_supervisor(stage: OfficeStage, fabric: sublet.Fabric, tmp_path: Path) -> None:
    """It takes the guests along. The caller is told, with what is to be done and not that all is lost, and the devices
    come back."""
    lease = fabric.gpu(min_vram="64MiB", ttl="10s")
    result = begun(lease, tmp_path / "gate")
    stage.kill_supervisor()
    with pytest.raises(SubletError) as told:
        result()
    assert isinstance(told.value, WorkerLost | sublet.LeaseEnded | sublet.Disconnected)
    if isinstance(told.value, WorkerLost):
        assert "the next call gets a fresh worker" in told.value.do
    lease.leave()
    until("both devices back", lambda: can_lease_both(fabric), 3 * PATIENCE_S)
    until("nothing left", lambda: not stage.residue)


def test_of_the_holder(stage: OfficeStage, fabric: sublet.Fabric) -> None:
    """The function is interrupted at once, since nobody wants its result; and the lease ends with its holder."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(stage.office.home)],
        stdout=subprocess.PIPE,
        env=stage.office.env(),
        text=True,
    )
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    time.sleep(0.2)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    until("the end of the worker", lambda: not os.path.exists(f"/proc/{pid}"))
    until("nothing left", lambda: not stage.residue)
    until("no lease", lambda: not fabric.leases())
    (ended,) = [view for view in fabric.leases(all=True) if view.bound_to == holder.pid]
    assert ended.end is not None
    assert ended.end.reason == "holder_gone"


def zygotes(stage: OfficeStage) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            words = stage.procs.text(int(name), "cmdline").split("\0")
            if "sublet.guest.zygote" in " ".join(words) and is_child(stage, int(name)):
                found.append(int(name))
    return found


def is_child(stage: OfficeStage, pid: int) -> bool:
    stat = stage.procs.text(pid, "stat")
    return bool(stat) and int(stat.rpartition(")")[2].split()[1]) == stage.supervisor


def can_lease_both(fabric: sublet.Fabric) -> bool:
    try:
        with fabric.gpu(min_vram="1GiB", count=2, ttl="5s", wait=0):
            return True
    except SubletError:
        return False


# ---- calls of many: what was finished is with the holder


def numbered(number: int, at: int, size: int, log: str) -> object:
    """Its number, as a value of about so many bytes; at one of them the process dies."""
    with open(log, "a") as file:
        file.write(f"{number}\n")
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return number if not size else (number, bytes(size))


def test_results_before_a_kill_in_mid_batch_are_there(fabric: sublet.Fabric, tmp_path: Path, patient: None) -> None:
    """Small results, results that fill the buffer, and results in shared memory: only the item that was executing is
    lost, those behind it were not begun, and nothing was executed twice."""
    log, at = tmp_path / "log", 45  # batches have 1, 2, 4 … items, so this is in the middle of one
    with fabric.cpu(1, ttl="1m") as lease:
        for size in (0, 500, 40_000, 200_000):
            log.write_text("")
            taken: list[object] = []
            with pytest.raises(WorkerLost, match="SIGKILL"):
                taken.extend(lease.map(numbered, range(200), [at] * 200, [size] * 200, [str(log)] * 200))
            assert taken == [n if not size else (n, bytes(size)) for n in range(at)], size
            assert [int(line) for line in log.read_text().split()] == list(range(at + 1)), size


def test_a_kill_at_a_random_moment_loses_the_executing_item_alone(fabric: sublet.Fabric, tmp_path: Path) -> None:
    """From outside, four times: results and executed items differ by one at most."""
    log = tmp_path / "log"
    with fabric.cpu(1, ttl="1m") as lease:
        for turn in range(4):
            log.write_text("")
            pid = lease.run(os.getpid)
            taken: list[object] = []
            mapped = lease.map(numbered, range(5000), [-1] * 5000, [turn * 150] * 5000, [str(log)] * 5000)
            with contextlib.suppress(WorkerLost):
                for value in mapped:
                    taken.append(value)
                    if len(taken) == 50 + 137 * turn:
                        os.kill(pid, signal.SIGKILL)
            executed = [int(line) for line in log.read_text().split()]
            assert executed == list(range(len(executed))), "an item was executed twice, or out of order"
            assert len(executed) - len(taken) in (0, 1), f"turn {turn}: {len(taken)} of {len(executed)}"


def wait_at(number: int, at: int, begun: str) -> int:
    if number == at:
        Path(begun).touch()
        time.sleep(600)
    return number


def test_the_end_of_the_lease_in_mid_batch_leaves_what_was_finished(fabric: sublet.Fabric, tmp_path: Path) -> None:
    begun, at = tmp_path / "begun", 45
    taken: list[int] = []
    lease = fabric.cpu(1, ttl="20s")

    def revoke() -> None:
        until("the item that waits", begun.exists)
        fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)

    thread = threading.Thread(target=revoke)
    thread.start()
    try:
        with pytest.raises(sublet.LeaseEnded) as ended:
            taken.extend(lease.map(wait_at, range(100), [at] * 100, [str(begun)] * 100))
    finally:
        thread.join()
    assert taken == list(range(at))
    assert ended.value.begun


# ---- WASM


@pytest.mark.needs("wasmtime")
def test_a_tasklet_without_end_ends_with_its_call_and_with_its_lease(fabric: sublet.Fabric, patient: None) -> None:
    """Whatever fuel it has. The worker answers the next call in the first case."""
    from sublet.errors import OutOfFuel
    from sublet.jobs import WasmTasklet

    loop = """(module (memory (export "memory") 1)
      (func (export "run") (param i32 i32) (result i32) (loop $again (br $again)) (i32.const 0)))"""
    endless = WasmTasklet(loop, fuel=1 << 62)
    lease = fabric.cpu(1, ttl="1m")
    pid = lease.run(os.getpid)
    with pytest.raises(OutOfFuel) as caught:
        lease.run(WasmTasklet(loop, fuel=10_000), b"")
    assert caught.value.fuel > 9_000
    with pytest.raises(sublet.CallTimeout):
        lease.options(timeout="0.3s").run(endless, b"")
    assert lease.run(os.getpid) == pid
    future = lease.submit(endless, b"")
    until("a tasklet that runs", future.running)
    fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
    with pytest.raises(sublet.LeaseEnded):
        future.result(PATIENCE_S)
