"""A real office that goes by short durations, and people who work in it as a simulated workload says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from sublet.errors import LeaseEnded, SubletError
from sublet.office.ledger.policy import Policy
from sublet.simulate.replay import POLICY, Costs
from sublet.simulate.workload import WorkloadSession
from sublet.values import NS_PER_S
from tests.traces import end_office, plain_env, until

PATIENCE_S: Final = 120.0
TIMES: Final = 60
"""How much faster time goes: a minute of a day at the office is a second here."""
AS_THEY_ARE: Final = frozenset({"ttl_min_ns", "claim_window_ns", "suspend_ns", "idle_least_ns", "resend_every_ns"})
"""What a machine needs, however short the work is."""
VRAM: Final = "64MiB"
CALIBRATES_S: Final = 0.4
"""A cell by which it is measured what a hand-over takes: long enough for another to be waiting by its end."""
CELL: Final = 'read now _ < /proc/uptime; echo $now; exec sleep "$0"'
OFFICE: Final = """
import json, sys
import sublet.engines.local as local
from sublet.office.ledger.policy import Policy
local.Policy = lambda: Policy(**json.loads(sys.argv[1]))
from sublet.cli import main
sys.exit(main(["up", "--host-gpus", sys.argv[2], "--foreground"]))
"""
WALLS: Final = '[lease]\nallow_missing = ["uid", "pid", "ipc", "mount", "proc", "net", "seccomp", "landlock"]\n'
"""What runs here is our own, and has to run on any machine."""


def hurried(times: int = TIMES) -> Policy:
    """The policy of a replay, that many times as fast."""
    given: dict[str, Any] = {}
    for name in Policy.__struct_fields__:
        value = getattr(POLICY, name)
        if name.endswith("_ns") and name not in AS_THEY_ARE:
            given[name] = max(POLICY.ttl_min_ns if name.startswith("ttl_") else 1, value // times)
    given["idle_most_ns"] = POLICY.idle_least_ns
    given["ended_keep_ns"] = POLICY.ended_keep_ns
    return Policy(**given)


class Start(NamedTuple):
    """How a cell came to run."""

    owner: str
    wished_s: float
    """Since all began."""
    granted_s: float
    """From the wish until it had a lease."""
    waited_s: float
    """From the wish until its first line."""
    warm: bool
    """The lease of the cell before was still there."""


def machine_s() -> float:
    """On the clock of /proc/uptime, which a guest can read as well."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Run:
    """One cell as a guest that waits and computes nothing, as if all of its work were on the device: with two cores for
    all devices, cells that compute would slow one another down."""

    def __init__(self, lease: sublet.Lease, seconds: float) -> None:
        """Raises ``LeaseEnded`` if the lease ends before the first line."""
        self._seconds, self._lease = seconds, lease
        self._guest = lease.start(["sh", "-c", CELL, f"{seconds:.3f}"], cwd="/")
        text = b""
        for output in self._guest.output():
            if output.stream == "stdout":  # a notice may come before the first line
                text += output.data
            if b"\n" in text:
                break
        if b"\n" not in text:
            self._guest.close()
            lease.check()
            raise LeaseEnded("the guest said nothing")
        self.first_line_s = float(text)

    def end(self) -> float:
        """Wait for it; how many of its seconds are left."""
        with contextlib.suppress(SubletError):
            if self._guest.wait() == 0 and self._guest.reason is None:
                self._guest.close()
                return 0.0
        ran_s = machine_s() - self.first_line_s
        self._guest.close()
        return max(0.001, self._seconds - ran_s)


class PlannedOffice:
    """Its processes, and the connections of its tenants."""

    def __init__(self, folder: Path, gpus: int, policy: Policy) -> None:
        self.home, self._policy, self._gpus = (folder / "home").resolve(), policy, gpus
        self._held: list[sublet.Lease] = []
        self.home.mkdir(mode=0o700, parents=True)
        (self.home / "policy.toml").write_text(WALLS)
        default = Policy()
        fields = {name: getattr(policy, name) for name in policy.__struct_fields__}
        given = {name: value for name, value in fields.items() if value != getattr(default, name)}
        env = plain_env() | {"SUBLET_HOME": str(self.home), "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", OFFICE, json.dumps(given), f"{gpus}x1GiB"]
        self._process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until("an office", lambda: answers(socket_path(self.home)), PATIENCE_S)
        self._owner = sublet.connect(home=self.home)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._owner.request("POST", "/v1/down", {"how": "now"}, shape=dict)
        self._owner.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._process.kill()
        self._process.wait()
        end_office(runtime_dir(self.home))
        shutil.rmtree(runtime_dir(self.home), ignore_errors=True)

    def connect(self, tenant: str) -> sublet.Fabric:
        token = self._owner.request("POST", "/v1/tenants", {"id": tenant}, shape=dict)["token"]
        return sublet.connect(home=self.home, token=token, as_tenant=True)

    def gpu(self, fabric: sublet.Fabric) -> sublet.Lease:
        """As the replay's holders ask for one: they wait for as long as it takes."""
        return fabric.gpu(min_vram=VRAM, ttl=self._policy.ttl_gpu_ns / NS_PER_S, exclusivity="device")

    def costs(self, rounds: int = 7) -> Costs:
        """From a grant until the first line of its guest; and from the end of a cell until the next request has its
        device, without the rest that the policy gives an idle holder. Medians."""
        starts_s, hand_overs_s = [], []
        with self.connect("first") as first, self.connect("second") as second:
            held = [self.gpu(first) for _ in range(self._gpus)]
            lease, *others = held
            runs = [Run(other, PATIENCE_S) for other in others]  # none is idle, so none yields but the first
            for number in range(rounds):
                granted_s = machine_s()
                run = Run(lease, CALIBRATES_S)
                starts_s.append(run.first_line_s - granted_s)
                with ThreadPoolExecutor(1) as waits:
                    asked = waits.submit(self._granted, (second, first)[number % 2])
                    run.end()
                    lease, granted_s = asked.result()
                hand_overs_s.append(granted_s - run.first_line_s - CALIBRATES_S)
            for each in (lease, *others):
                each.release()
            for run in runs:
                run.end()
        start_ns, hand_over_ns = (round(median(found) * NS_PER_S) for found in (starts_s, hand_overs_s))
        clear_ns = max(1, hand_over_ns - self._policy.idle_least_ns)
        return Costs(clear_ns=clear_ns, move_ns=start_ns, start_ns=start_ns, source="measured here")

    def _granted(self, fabric: sublet.Fabric) -> tuple[sublet.Lease, float]:
        return self.gpu(fabric), machine_s()

    def starts(self, sessions: Sequence[WorkloadSession]) -> list[Start]:
        """Of all their cells, once the last has ended."""
        starts: list[Start] = []
        fabrics = {owner: self.connect(owner) for owner in dict.fromkeys(session.owner for session in sessions)}
        errors: list[BaseException] = []

        def live(session: WorkloadSession) -> None:
            try:
                starts.extend(self._work(fabrics[session.owner], session, begin_s))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=live, args=(session,), daemon=True) for session in sessions]
        begin_s = machine_s() + 0.1
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for lease in self._held:
            lease.release()
        for fabric in fabrics.values():
            fabric.close()
        if errors:
            raise errors[0]
        return starts

    def _work(self, fabric: sublet.Fabric, session: WorkloadSession, begin_s: float) -> Iterator[Start]:
        """One person's cells: a minute of the workload is a minute here. The lease of the last cell stays, idle, until
        its time is over."""
        lease: sublet.Lease | None = None
        time.sleep(max(0.0, begin_s + 60 * session.start_min - machine_s()))
        for cell in session.cells:
            time.sleep(60 * cell.pause_min)
            if not cell.gpus:
                time.sleep(60 * cell.duration_min)
                continue
            wished_s, left_s, start = machine_s(), 60 * cell.duration_min, None
            while left_s > 0:
                warm = lease is not None and lease.end is None
                if lease is None or not warm:
                    lease = self.gpu(fabric)
                    self._held.append(lease)
                granted_s = machine_s()
                with contextlib.suppress(LeaseEnded):  # it was taken meanwhile: what is left runs under another
                    run = Run(lease, left_s)
                    if start is None:
                        start = Start(
                            session.owner, wished_s - begin_s, granted_s - wished_s, run.first_line_s - wished_s, warm
                        )
                    left_s = run.end()
            assert start is not None
            yield start


@contextlib.contextmanager
def planned_office(folder: Path, gpus: int, policy: Policy) -> Iterator[PlannedOffice]:
    office = PlannedOffice(folder, gpus, policy)
    try:
        yield office
    finally:
        office.close()
