"""The clock of one process moved: deadlines are the supervisor's, whatever time a guest or a holder believes it is.

A time namespace sets the clock that counts since the machine was started, for the processes in it, ahead or back.
CLOCK_MONOTONIC is left alone in these, so it tells the tests what time it really is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.client.home import socket_path
from sublet.errors import Disconnected, LeaseEnded, Unauthorized
from sublet.node.agent.starting import package_folder
from sublet.values import GIB
from tests.crash.office_process import Line
from tests.integration.office_stage import OfficeStage, office_stage, started
from tests.traces import PATIENCE_S, until

pytestmark = [
    pytest.mark.needs("unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a time namespace without a user namespace"),
    pytest.mark.skipif(not os.path.exists("/proc/self/ns/time"), reason="this kernel has no time namespaces"),
]

OFFSETS: Final = (86_400, -60)
"""Seconds: a day ahead, when every deadline has long passed, and a minute back, when none ever seems to come."""
TTLS_S: Final = (2.0, 30.0)
"""The second where the first was over before anything was said, on a machine that stood still."""
LATE_S: Final = 30.0
"""More than any machine that is at work takes to end what is due, and half of what the clock is set back."""

GUEST: Final = """
import json, signal, sys, time
from sublet.guest.current import current
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here = current()
with open(sys.argv[1], "a", buffering=1) as record:
    while True:
        at, own, remaining = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), here.remaining
        record.write(json.dumps({"at": at, "own": own, "remaining": remaining, "until": time.monotonic()}) + "\\n")
        time.sleep(0.02)
"""

HOLDER: Final = """
import json, time
import sublet
found = {"own": time.clock_gettime(time.CLOCK_BOOTTIME)}
fabric = sublet.connect()
with fabric.gpu(min_vram="1GiB", ttl="12s", renew_every="500ms") as lease, lease.activity("working"):
    longer, left = 0, lease.remaining
    while longer < 3:
        lease.check()
        time.sleep(0.02)
        longer += lease.remaining > left
        left = lease.remaining
    found["renewals"] = fabric.lease(lease.id).renewals
found["last"] = None
for ttl in ("4s", "30s"):  # on a machine that stood still the first may be over before it is looked at
    lease = fabric.gpu(min_vram="1GiB", ttl=ttl, renew="never")
    try:
        while True:
            now = time.monotonic()
            lease.check()
            found["last"] = now
            if "deadline" not in found:
                found["deadline"] = fabric.lease(lease.id).deadline
            time.sleep(0.005)
    except sublet.LeaseEnded as error:
        found["error"] = type(error).__name__
    if found["last"] is not None:
        break
print(json.dumps(found))
"""


def moved(offset: int, *argv: str) -> tuple[str, ...]:
    return ("unshare", "--time", f"--boottime={offset}", "--fork", "--kill-child", *argv)


def since_start() -> float:
    """How far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC: what stands still between the two looks makes it less."""
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() for _ in range(5))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with office_stage(tmp_path / "place", "2x4GiB") as found:
        yield found


def lines_of(record: Path) -> list[dict[str, Any]]:
    """All whole ones."""
    text = record.read_text() if record.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_guest_with_another_clock_is_ended_at_the_deadline_and_knows_it(
    stage: OfficeStage, tmp_path: Path, offset: int
) -> None:
    record, line = tmp_path / "record", Line(socket_path(stage.office.home))
    sent = answered = over = ttl_s = 0.0
    for ttl_s in TTLS_S:
        sent = time.monotonic()
        held = stage.acquire(line, memory=GIB, ttl_s=ttl_s)
        answered = time.monotonic()
        program = moved(offset, sys.executable, "-c", GUEST, str(record))
        with contextlib.suppress(LeaseEnded, Disconnected, Unauthorized), stage.hold(held) as talk:  # it was over
            started(talk, *program, env={"PYTHONPATH": package_folder()})
            until("its end", lambda: not stage.traces.marked(held.id))  # type: ignore[union-attr]  # noqa: B023
        over = time.monotonic()
        if lines_of(record):
            break
    found = lines_of(record)
    own = since_start() + offset
    assert found[0]["own"] - found[0]["until"] - 1 < own < found[0]["own"] - found[0]["at"] + 1, "another clock"
    assert sent + ttl_s - 0.1 < over, "it had what was promised"
    assert found[-1]["at"] < answered + ttl_s + LATE_S, "and no more"
    for one in found:  # up to a second less, in a time namespace of its own, and a busy machine has the page late
        least, most = sent + ttl_s - one["until"] - 2.0, answered + ttl_s - one["at"] + 0.1
        assert max(0.0, least) <= one["remaining"] <= max(0.0, most), one
    until("no residue", lambda: not stage.residue)
    line.close()


def test_a_holder_with_another_clock_keeps_its_lease_and_never_outlives_it(stage: OfficeStage) -> None:
    holders = [
        subprocess.Popen(
            moved(offset, sys.executable, "-c", HOLDER),
            env=stage.office.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for offset in OFFSETS
    ]
    try:
        for offset, holder in zip(OFFSETS, holders, strict=True):
            out, err = holder.communicate(timeout=2 * PATIENCE_S)
            assert holder.returncode == 0, err
            found = json.loads(out.splitlines()[-1])
            really = time.clock_gettime(time.CLOCK_BOOTTIME)
            assert abs(found["own"] - really - offset) < 2 * PATIENCE_S
            assert found["renewals"] >= 3, "it was renewed, and each time it had longer"
            assert found["last"] is not None, "it was not made to stop at once"
            assert found["last"] + since_start() < found["deadline"], "and stopped before the office would end it"
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=PATIENCE_S)
