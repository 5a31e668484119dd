"""The revoke race: a holder that will not leave, against the next grant of its device.

Elsewhere this was measured as more than a second in which two programs had the device (kubernetes#141471): the
allocation was free while the last container still ran. Here the next grant may come only when nothing of the last
holder is left, and what is measured are the guests themselves: their own records of when they were there, by
CLOCK_BOOTTIME, and a lock that lasts as long as the last copy of the device's descriptor.

``SUBLET_RACE_ROUNDS`` says how often (default: 24), among which are all ways in which a lease ends.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from sublet.client.home import socket_path
from sublet.errors import Disconnected, LeaseEnded, Unauthorized
from sublet.values import GIB
from tests.crash.office_process import Line
from tests.integration.office_stage import Held, OfficeStage, asked, office_stage, started
from tests.traces import until

ROUNDS: Final = int(os.environ.get("SUBLET_RACE_ROUNDS", "24"))
SEED: Final = int(os.environ.get("SUBLET_RACE_SEED", "2"))
DEVICES: Final = 6
LANES: Final = 2 * DEVICES
"""Two want each device, so that there is always one in line."""
SHARES: Final = {"runs out": 0.04, "revoked": 0.48, "released": 0.48}
"""How leases end, and how many of them do."""
TTL_S: Final = 2.0
"""Of those that run out."""
LONG_S: Final = 30.0
"""Of the others: their guests begin however busy the machine is."""
MET_LEAST: Final = 0.5
"""The share of the rounds in which the device was used."""
PROCESSES: Final = 4
SAID: Final = 4
"""Words of a line. Of one that crosses a page of the file, the kernel may leave a part where a process is killed."""
GUEST: Final = Path(__file__).with_name("race_guest.py")


class Stay(NamedTuple):
    """When a lease's guest was on a device, by its own records."""

    lease: str
    first_ns: int
    last_ns: int


class Lanes:
    """Holders that come one after the other, several at a time."""

    def __init__(self, stage: OfficeStage, place: Path, rounds: int) -> None:
        self.stage = stage
        self.place = place
        self.ends = random.Random(SEED).choices(list(SHARES), list(SHARES.values()), k=rounds)
        self.begun = 0
        self.leases: list[str] = []
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._lane, name=f"lane {n}") for n in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _lane(self) -> None:
        line = Line(socket_path(self.stage.office.home))
        try:
            while not self.failures and (end := self._next()) is not None:
                self._round(line, end)
        except BaseException as error:
            self.failures.append(error)
        finally:
            line.close()

    def _next(self) -> str | None:
        """How the next lease ends; None if there have been enough."""
        with self._lock:
            self.begun += 1
            return self.ends[self.begun - 1] if self.begun <= len(self.ends) else None

    def _round(self, line: Line, end: str) -> None:
        ttl_s = TTL_S if end == "runs out" else LONG_S
        held = self.stage.acquire(line, memory=GIB, ttl_s=ttl_s)
        self.leases.append(held.id)
        (device,) = held.devices
        record = self.place / device.replace("/", "-") / held.id
        record.parent.mkdir(exist_ok=True)
        record.touch()
        try:
            self._use(line, held, end, ttl_s, record)
        except (LeaseEnded, Disconnected, Unauthorized):  # how it is told depends on when it ended
            found: list[dict[str, Any]] = []

            def is_known() -> bool:
                found.append(asked(line, "GET", f"/v1/leases/{held.id}").doc["lease"])
                return found[-1]["end"] is not None

            until("the office knows of the end", is_known)  # the supervisor knows it first
            assert found[-1]["end"]["reason"] == "expired", found[-1]

    def _use(self, line: Line, held: Held, end: str, ttl_s: float, record: Path) -> None:
        device = str(record.parent.with_name(f"{record.parent.name}.device"))
        with self.stage.hold(held) as talk:
            started(talk, sys.executable, "-I", "-S", str(GUEST), device, str(record), held.id)
            over_by = time.monotonic() + 2 * ttl_s
            until(
                "all four of them at work, or the lease's end",
                lambda: len(_who(record)) == PROCESSES or time.monotonic() > over_by,
            )
            if end == "released":
                asked(line, "POST", f"/v1/leases/{held.id}/release", {"request_id": f"e-{held.id}"})
            elif end == "revoked":
                asked(line, "POST", f"/v1/leases/{held.id}/revoke", {})


def _who(record: Path) -> set[str]:
    with open(record) as file:
        said = [line.split() for line in file]
    assert not [words for words in said if words[2:3] == ["taken"]], f"{record.name} found its device still taken"
    return {words[1] for words in said if words[2:3] == ["there"]}


def stays(records: Path) -> list[Stay]:
    """All of one device, in the order in which they began."""
    found = []
    for record in records.iterdir():
        lines = [line for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]
        said = [words for words in map(str.split, lines) if len(words) == SAID]
        if not said:
            continue
        assert not [words for words in said if words[2] == "taken"], f"{record.name} found the device still taken"
        times = [int(words[3]) for words in said]
        found.append(Stay(record.name, min(times), max(times)))
    return sorted(found, key=lambda stay: stay.first_ns)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with office_stage(tmp_path / "place", f"{DEVICES}x4GiB") as found:
        yield found


def test_nobody_meets_the_last_holder(stage: OfficeStage, tmp_path: Path) -> None:
    lanes = Lanes(stage, tmp_path, ROUNDS)
    assert set(lanes.ends) == set(SHARES), "not every way to end is met"
    lanes.run()
    records = sorted(path for path in tmp_path.glob("local-*") if path.is_dir())
    all_of_them = [stay for record in records for stay in stays(record)]
    assert len(lanes.leases) == ROUNDS
    assert {stay.lease for stay in all_of_them} <= set(lanes.leases)
    assert len(all_of_them) > ROUNDS * MET_LEAST, "so few guests ever began that nobody could meet anybody"
    overlaps = [
        (before, after, (before.last_ns - after.first_ns) / 1e6)
        for record in records
        for before, after in zip(stays(record), stays(record)[1:], strict=False)
        if before.last_ns >= after.first_ns
    ]
    assert overlaps == [], "milliseconds in which two leases were on one device"
    until("no residue", lambda: not stage.residue)
