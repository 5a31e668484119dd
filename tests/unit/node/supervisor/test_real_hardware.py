"""The supervisor's half of cleaning a card: begun once, seen to be done, and believed only what was said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sublet.lease.hardware import Clean, NotYet, Unclean
from sublet.node.agent.starting import package_folder
from sublet.node.supervisor.real_hardware import CardCleaning
from sublet.values import Epoch, LeaseId
from sublet.wire.cards import CardFound
from sublet.wire.codec import dumps

CARD = "GPU-00000000-1111-2222-3333-444444444444"
LEASE, EPOCH = LeaseId("l-1"), Epoch(1, 1)


class PretendedForkedJobs:
    """They are done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], str], Callable[[str | None], None]]] = []

    def run(self, work: Callable[[], str], done: Callable[[str | None], None]) -> None:
        self.waiting.append((work, done))

    def end(self, said: str | None = None) -> None:
        work, done = self.waiting.pop(0)
        done(work() if said is None else said)


class Desk:
    def __init__(self, *, is_root: bool = True, begun_ns: int | None = None) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.answer = CardFound(scrubbed_bytes=1, scrub_ns=7)
        self.forked_jobs = PretendedForkedJobs()
        self.cleaning = CardCleaning(self.forked_jobs, self._run, is_root=is_root, begun_ns=begun_ns)  # type: ignore[arg-type]

    def _run(self, arguments: Sequence[str]) -> str:
        self.asked.append(tuple(arguments))
        return dumps(self.answer).decode()

    def look(self, neighbours: bool = False) -> Any:
        return self.cleaning.verify(CARD, LEASE, EPOCH, neighbours=neighbours, now_ns=100)


IN_A_SUPERVISOR = """
import sys
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
from sublet.node.supervisor import real_hardware
from sublet.wire.cards import NVML
from sublet.wire.zygote import finds_packages
cleaning = real_hardware.CardCleaning(SimpleNamespace(run=lambda work, told: None))
before = set(sys.modules)
cleaning.before_use("GPU-0", 1)
known = set(sys.modules)
finds_packages(NVML)
from sublet.node.agent import clean_card
print([name for name in set(sys.modules) - known if name.startswith(("sublet", "ctypes", "shutil", "subprocess"))])
print(NVML in known, real_hardware.PROGRAM in before)
"""


def test_a_supervisor_loads_what_its_forked_jobs_need_when_a_card_is_lent_and_nothing_that_is_installed() -> None:
    """A third of the time of each forked job went into that; and a supervisor without cards has no use for it."""
    argv = [sys.executable, "-I", "-S", "-c", IN_A_SUPERVISOR, package_folder()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_it_is_clean_when_the_program_said_so_and_not_before() -> None:
    desk = Desk()
    assert isinstance(desk.look(), NotYet)
    assert isinstance(desk.look(), NotYet)
    assert len(desk.forked_jobs.waiting) == 1, "it is begun once"
    desk.forked_jobs.end()
    assert desk.look() == Clean(scrub_ns=7)
    assert desk.asked == [(CARD, "--scrub")]
    assert isinstance(desk.look(), NotYet), "asked again, it is looked at again"


def test_settings_of_before_are_handed_on() -> None:
    desk = Desk()
    desk.answer = CardFound(settings='{"power limit": 7}')
    desk.cleaning.before_use(CARD, 5)
    desk.cleaning.before_use(CARD, 6)
    desk.forked_jobs.end()
    assert not desk.forked_jobs.waiting, "they are looked at once"
    desk.look()
    desk.forked_jobs.end()
    assert desk.asked == [(CARD, "--look"), (CARD, "--scrub", "--settings", '{"power limit": 7}', "--since", "5")]


def test_what_drew_before_the_lease_is_told_by_when_the_card_was_lent() -> None:
    """From one clean look to the next, since the card may be several leases' between them."""
    desk = Desk()
    desk.cleaning.before_use(CARD, 5)
    desk.forked_jobs.end()
    desk.look()
    desk.forked_jobs.end()
    assert isinstance(desk.look(), Clean)
    desk.cleaning.before_use(CARD, 9)
    desk.forked_jobs.end()
    desk.look()
    desk.forked_jobs.end()
    assert [asked[-2:] for asked in desk.asked if "--since" in asked] == [("--since", "5"), ("--since", "9")]


def test_settings_are_those_of_the_latest_lend_and_nobodys_where_guests_cannot_change_them() -> None:
    """An operator who set a power limit between two leases had it undone; without root nobody else could have."""
    desk = Desk()
    for power in (7, 5):
        desk.answer = CardFound(settings=f'{{"power limit": {power}}}')
        desk.cleaning.before_use(CARD, power)
        desk.forked_jobs.end()
        desk.answer = CardFound(note="its power limit was changed")
        desk.look()
        desk.forked_jobs.end()
        assert isinstance(desk.look(), Clean), "that is a note, and no fault"
    assert [asked[3] for asked in desk.asked if "--settings" in asked] == ['{"power limit": 7}', '{"power limit": 5}']
    ordinary = Desk(is_root=False)
    ordinary.cleaning.before_use(CARD, 5)
    assert not ordinary.forked_jobs.waiting


def test_what_an_operator_did_to_a_card_before_vouching_for_it_is_not_undone() -> None:
    """The next lease counted as the one that had left something: at its end settings of before that one came back, and
    a desktop that was begun meanwhile kept the card from being clean."""
    desk = Desk()
    desk.answer = CardFound(settings='{"power limit": 7}')
    desk.cleaning.before_use(CARD, 100)
    desk.forked_jobs.end()
    desk.answer = CardFound(failed="it could not be overwritten", is_hard=True)
    desk.look()
    desk.forked_jobs.end()
    assert isinstance(desk.look(), Unclean)
    desk.cleaning.vouched(CARD)
    desk.answer = CardFound(settings='{"power limit": 5}')
    desk.cleaning.before_use(CARD, 200)
    desk.forked_jobs.end()
    desk.look()
    desk.forked_jobs.end()
    assert desk.asked[-1][1:] == ("--scrub", "--settings", '{"power limit": 5}', "--since", "200")


def test_what_an_earlier_supervisor_lent_is_known_by_its_guests() -> None:
    """After its restart a desktop that had been there all the time counted as what the lease had left."""
    desk = Desk()
    desk.cleaning.was_lent(CARD, 3)
    desk.cleaning.before_use(CARD, 9)
    desk.look()
    desk.forked_jobs.end()
    assert desk.asked == [(CARD, "--scrub", "--since", "3")]
    after = Desk(begun_ns=8)
    after.look()
    after.forked_jobs.end()
    assert after.asked == [(CARD, "--scrub", "--since", "8")], "its guests were gone before the supervisor ended"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (CardFound(left="process 7 is on it"), NotYet),
        (CardFound(failed="it fell off its bus", is_hard=True), Unclean),
    ],
)
def test_what_it_says_is_what_follows(answer: CardFound, kind: type) -> None:
    desk = Desk()
    desk.answer = answer
    desk.look()
    desk.forked_jobs.end()
    found: object = desk.look()
    assert isinstance(found, kind)
    assert CARD in str(found)


@pytest.mark.parametrize("said", ["", "Traceback …", "{}nonsense"])
def test_a_program_that_says_nothing_of_use_makes_nothing_clean(said: str) -> None:
    """It is tried again, until the patience of the law is at its end."""
    desk = Desk()
    desk.look()
    desk.forked_jobs.end(said)
    assert isinstance(desk.look(), NotYet)
    desk.look()
    desk.forked_jobs.end()
    assert isinstance(desk.look(), Clean)


def test_among_neighbours_nothing_is_overwritten() -> None:
    desk = Desk()
    assert desk.look(neighbours=True) == Clean()
    assert not desk.forked_jobs.waiting


ASKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sublet.node.forked_jobs import ANSWER_FD
from sublet.node.supervisor import real_hardware
real_hardware.NVML = sys.argv[2]
os.dup2(1, ANSWER_FD)
said = real_hardware.run_program((sys.argv[3], "--look"))
os.write(ANSWER_FD, b"in the forked job: " + said.encode())
"""
"""In an interpreter as a supervisor has it: without ``site``, and so without packages."""


@pytest.mark.parametrize(("needed", "said"), [("pynvml", "in the forked job: "), ("no_such_package", "=")])
def test_the_forked_job_does_it_itself_where_it_finds_the_packages(needed: str, said: str) -> None:
    """Else it becomes the program that does: a machine may have them where only a fresh interpreter looks."""
    argv = [sys.executable, "-I", "-S", "-c", ASKS, package_folder(), needed, CARD]
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said), done
    assert json.loads(done.stdout.removeprefix(said))["failed"], "there is no such card"
