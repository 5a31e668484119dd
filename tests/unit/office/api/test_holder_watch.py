"""The edge that watches processes of holders: real processes and pidfds, a driver that only listens."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sublet.lease_end import EndReason
from sublet.office.api import processes
from sublet.office.api.processes import HolderWatch, ProcessTable
from sublet.office.ledger import events as ev
from sublet.office.ledger.commands import Command, HolderGone, HolderUnseen
from sublet.office.ledger.records import EndRecord, LeaseRecord, Now, ProcessRecord
from sublet.values import LeaseId, RequestId, TenantId, Tier
from tests.left_open import open_now

NOW = Now(1, 1)


class Programs:
    """Sleeping programs, and what the office knows of them."""

    def __init__(self) -> None:
        self.processes = ProcessTable()
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> tuple[subprocess.Popen[bytes], ProcessRecord]:
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self._running.append(program)
        stat = self.processes.stat(program.pid)
        assert stat is not None
        return program, self.processes._record(program.pid, stat.start_ticks)

    def end(self) -> None:
        for program in self._running:
            program.kill()
            program.communicate()


@pytest.fixture
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    made.end()


class Office:
    """A driver as far as the watch needs one."""

    def __init__(self, *leases: LeaseRecord, processes: ProcessTable) -> None:
        state = SimpleNamespace(leases={lease.id: lease for lease in leases})
        self.ledger = SimpleNamespace(state=state)
        self.posted: list[Command] = []
        self.came = asyncio.Event()
        self.watch = HolderWatch(self, processes)  # type: ignore[arg-type]

    def listen(self, listener: Any) -> None:
        self._listener = listener

    def tell(self, *events: ev.Event) -> None:
        self._listener(NOW, events)

    def post(self, command: Command) -> None:
        self.posted.append(command)
        self.came.set()

    async def hears(self) -> Command:
        await asyncio.wait_for(self.came.wait(), 100)
        self.came.clear()
        return self.posted[-1]


def lease(name: str, process: ProcessRecord | None) -> LeaseRecord:
    return LeaseRecord(
        id=LeaseId(name),
        tenant=TenantId("ann"),
        request_id=RequestId(name),
        fingerprint="",
        wants=(),
        ttl_ns=1,
        tier=Tier.INTERACTIVE,
        arrival=1,
        asked_at_ns=1,
        asked_wall_ns=1,
        process=process,
    )


def queued(name: str, process: ProcessRecord | None) -> ev.Queued:
    return ev.Queued(lease=lease(name, process))


def ended(name: str) -> ev.Ended:
    return ev.Ended(lease=LeaseId(name), end=EndRecord(reason=EndReason.RELEASED, at_ns=1, wall_ns=1))


def ending(name: str) -> ev.Ending:
    return ev.Ending(lease=LeaseId(name), end=ended(name).end, number=2)


def descriptors() -> int:
    """Those of processes. Of others some may be opened and closed by what earlier tests have left in this process."""
    return sum("pidfd" in path for _, path in open_now())


def test_the_end_of_a_process_names_all_its_leases(programs: Programs) -> None:
    """One pidfd for a process, however many leases; and none is left when it has ended."""

    async def main() -> None:
        (first, one), (_, other) = programs.start(), programs.start()
        office = Office(processes=programs.processes)
        office.watch.start()
        before = descriptors()
        office.tell(queued("L1", one), queued("L2", one), queued("L3", other), queued("L4", None), ended("L2"))
        assert descriptors() == before + 2
        office.tell(ev.Bound(lease=LeaseId("L3"), process=one))
        first.kill()
        assert await office.hears() == HolderGone(process=one, leases=(LeaseId("L1"), LeaseId("L3")))
        office.tell(ending("L1"))
        assert len(office.posted) == 1
        office.tell(ended("L1"))
        assert office.posted[1:] == [HolderGone(process=one, leases=(LeaseId("L3"),))], "which waited for the other"
        office.tell(ended("L3"))
        office.watch.close()
        assert descriptors() == before
        assert len(office.posted) == 2

    asyncio.run(main())


def test_a_process_whose_descriptor_has_the_number_of_an_earlier_one_is_watched(programs: Programs) -> None:
    """The earlier one was forgotten by the loop as well, before its descriptor was closed."""

    async def main() -> None:
        (first, one), (second, other) = programs.start(), programs.start()
        office = Office(processes=programs.processes)
        office.watch.start()
        office.tell(queued("L1", one))
        first.kill()
        assert await office.hears() == HolderGone(process=one, leases=(LeaseId("L1"),))
        office.tell(ended("L1"), queued("L2", other))
        second.kill()
        assert await office.hears() == HolderGone(process=other, leases=(LeaseId("L2"),))
        office.watch.close()

    asyncio.run(main())


def test_an_office_that_starts_looks_again(programs: Programs) -> None:
    """One process is there, one has ended, one cannot be seen from here."""

    async def main() -> None:
        (_, alive), (gone, dead), (_, far) = programs.start(), programs.start(), programs.start()
        gone.kill()
        gone.wait()
        far = msgspec.structs.replace(far, namespaces="pid:[1] time:[1]")
        leases = (lease("L1", alive), lease("L2", dead), lease("L3", far), lease("L4", None))
        office = Office(*leases, processes=programs.processes)
        office.watch.start()
        assert {type(command): command for command in office.posted} == {
            HolderGone: HolderGone(process=dead, leases=(LeaseId("L2"),)),
            HolderUnseen: HolderUnseen(process=far, leases=(LeaseId("L3"),)),
        }
        office.watch.close()

    asyncio.run(main())


def test_a_lease_that_is_bound_to_a_process_that_has_ended_meanwhile(programs: Programs) -> None:
    """It sent its request and was killed; or its last lease ended, and another request of it was still on its way."""

    async def main() -> None:
        program, one = programs.start()
        office = Office(processes=programs.processes)
        office.watch.start()
        office.tell(queued("L1", one))
        office.tell(ended("L1"))
        program.kill()
        program.wait()
        await asyncio.sleep(0.05)
        assert not office.posted, "nothing was bound to it when it ended"
        office.tell(queued("L2", one))
        assert await office.hears() == HolderGone(process=one, leases=(LeaseId("L2"),))
        office.watch.close()

    asyncio.run(main())


def test_without_pidfds_processes_are_looked_at(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of open files is reached: their end is found a moment later, and the next gets a pidfd again."""
    monkeypatch.setattr(processes, "LOOK_EVERY_S", 0.02)
    exhausted = True

    def pidfd_open(pid: int) -> int:
        if exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.pidfd_open(pid)

    async def main() -> None:
        nonlocal exhausted
        (first, one), (second, other) = programs.start(), programs.start()
        office = Office(processes=ProcessTable(pidfd_open=pidfd_open))
        office.watch.start()
        before = descriptors()
        office.tell(queued("L1", one), queued("L2", other))
        await asyncio.sleep(0.1)
        assert not office.posted
        assert descriptors() == before
        first.kill()
        assert await office.hears() == HolderGone(process=one, leases=(LeaseId("L1"),))
        exhausted = False
        while descriptors() == before:  # noqa: ASYNC110 - the next look finds one
            await asyncio.sleep(0.01)
        second.kill()
        assert await office.hears() == HolderGone(process=other, leases=(LeaseId("L2"),))
        office.watch.close()
        assert descriptors() == before

    asyncio.run(asyncio.wait_for(main(), 200))


def test_without_watches_processes_are_looked_at(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets a user watch so many files and no more."""
    monkeypatch.setattr(processes, "LOOK_EVERY_S", 0.02)

    async def main() -> None:
        program, one = programs.start()
        office = Office(processes=programs.processes)
        office.watch.start()
        before = descriptors()

        def refused(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refused)
        office.tell(queued("L1", one))
        await asyncio.sleep(0.1)
        assert descriptors() == before
        assert not office.posted
        program.kill()
        assert await office.hears() == HolderGone(process=one, leases=(LeaseId("L1"),))
        office.watch.close()

    asyncio.run(main())


def test_programs_that_take_one_lease_after_the_other_are_watched_on(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of them: a program that takes and gives back leases costs no pidfd for each."""
    monkeypatch.setattr(processes, "IDLE_MAX", 1)

    async def main() -> None:
        found = [programs.start()[1] for _ in range(3)]
        office = Office(processes=programs.processes)
        office.watch.start()
        before = descriptors()
        for number, one in enumerate(found):
            office.tell(queued(f"L{number}", one))
            office.tell(ended(f"L{number}"))
        assert descriptors() == before + 1
        office.tell(queued("L9", found[0]), queued("L10", found[2]))
        assert descriptors() == before + 2
        office.watch.close()
        assert descriptors() == before

    asyncio.run(main())
