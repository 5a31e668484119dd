"""Kill the journal, or fail it, at every system call that writes; then look at what the next office finds.

After each point:

- the journal opens, or (in the middle of a restore) says that a restore is to be repeated, which then works;
- what was answered is there, and of the batch that was under way all or nothing: the books are what they were after
  the last answered batch, or after the next one;
- the audit chain holds, against its anchors, and the bill reconciles;
- no epoch that was answered is given out again, and a later one compares higher;
- a backup is whole or not there, and a failure leaves no half-made file.

A sample runs with the suite; ``SUBLET_CRASH_ALL=1`` runs every point, ``SUBLET_CRASH_SEED`` draws another sample.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import JournalError
from sublet.office.journal import journal as journal_opening
from sublet.office.journal.backup import restore
from sublet.office.journal.history import AuditHistory
from sublet.office.journal.journal import Journal
from sublet.office.ledger.bills import Usage, fold, reconcile
from sublet.office.ledger.budgets import standing_now
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LOCAL_TENANT, Now
from sublet.values import Epoch
from tests.crash import journal_program as program
from tests.crash.journal_program import WALL_NS, Diary, SmallOffice, epochs_in
from tests.crash.points import ALL, KILLS, Point, Zygote, lay_out, zygote

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.needs("tracer")]

SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20261"))
SAMPLE: Final = {"begin": 30, "life": 80, "put_back": 50, "go_on": 20, "spend": 60}
SAMPLE_TWICE: Final = 20
AFTERWARDS: Final = ("fdatasync", "fsync", "pwrite64", "ftruncate", "unlink")
"""What would write, or make durable, after a failed sync."""


@dataclass(slots=True, kw_only=True)
class Story:
    """Where a story starts, and what it makes of it when nothing goes wrong."""

    name: str
    start: Path
    """A copy of the folders as they are before it."""
    before: list[Epoch]
    """Epochs that were answered earlier."""
    books: list[str]
    """The books before it and after each batch."""
    points: list[Point]

    def set_out(self, place: Path) -> None:
        """Lay the folders out at the one place where every run happens: anchors are named by the home's path."""
        lay_out(self.start, place)


@pytest.fixture(scope="module", autouse=True)
def _short_log() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_opening, "LOG_BYTES", program.SHORT_LOG)
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[Zygote]:
    with zygote("tests.crash.journal_program") as running:
        yield running


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """In memory if possible: a kill loses nothing that was written, so only the calls count and a slow disk would
    make hundreds of runs slow."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "place"


@pytest.fixture(scope="module")
def stories(runner: Zygote, place: Path) -> dict[str, Story]:
    """Each story, with every one of its crash points."""
    kept = place.parent
    notes: list[dict[str, object]] = []
    (kept / "begin").mkdir()
    home, anchors = place / "home", place / "anchors"
    program.begin(home, anchors, notes.append)
    with Journal.open(home, wall_ns=WALL_NS, anchors=anchors) as journal:
        journal.backup(place / "old.backup")
    office = SmallOffice(home, anchors, notes.append)
    office.open()
    office.revoke_all()
    office.acquire("later")
    # As an office leaves its folder that is killed now: with a lease, and with a log beside the file. The backup is
    # older than its last epochs.
    for name in ("life", "put_back", "go_on", "spend"):
        shutil.copytree(place, kept / name, ignore=shutil.ignore_patterns("*-shm"))
    books = office.books()
    office.journal.close()

    found = {}
    for name in SAMPLE:
        story = Story(name=name, start=kept / name, before=epochs_in(notes), books=[books], points=[])
        if name == "begin":
            story.before, story.books = [], [program.digest(Ledger(Policy()).state)]
        story.set_out(place)
        story.points = runner.points(name, place)
        story.books += [str(note["books"]) for note in Diary.read(place / "diary") if "books" in note]
        if name == "put_back":
            office = SmallOffice(home, anchors, notes.append)
            story.books.append(office.books())
            office.journal.close()
        found[name] = story
    return found


def drawn(points: list[Point], count: int) -> list[Point]:
    return points if ALL else sorted(random.Random(SEED).sample(points, min(count, len(points))))


@pytest.mark.parametrize("name", SAMPLE)
def test_after_any_kill_or_failed_write_the_books_are_right(
    name: str, runner: Zygote, stories: dict[str, Story], place: Path
) -> None:
    """One run per point, judged by everything in the head of this file."""
    story = stories[name]
    chosen = drawn(story.points, SAMPLE[name])
    for point in chosen:
        story.set_out(place)
        status = runner.run_point(point, place)
        try:
            judge(story, point, status, place)
        except (AssertionError, JournalError) as error:
            raise AssertionError(f"{point} (SUBLET_CRASH_SEED={SEED}): {error}") from error
    print(f"{name}: {len(chosen)} of {len(story.points)} points")


def test_a_second_kill_while_the_first_is_mended_changes_nothing(
    runner: Zygote, stories: dict[str, Story], place: Path
) -> None:
    """Crash a story, then crash the office that opens after it."""
    chance = random.Random(SEED)
    firsts = [p for p in stories["life"].points if p.fault == "kill"]
    seconds = [p for p in stories["go_on"].points if p.fault == "kill"]
    pairs = [(chance.choice(firsts), chance.choice(seconds)) for _ in range(1000 if ALL else SAMPLE_TWICE)]
    story = stories["life"]
    for first, second in pairs:
        story.set_out(place)
        runner.run_point(first, place)
        answered = Diary.read(place / "diary")
        (place / "diary").unlink()
        # The second story may be over before its point is reached, since a log that was not left needs no mending.
        assert runner.run("go_on", place, second.spoil()).status in (0, -9)
        answered += Diary.read(place / "diary")
        try:
            look(epochs_in(answered) + story.before, place)
        except (AssertionError, JournalError) as error:
            raise AssertionError(f"{first}, then {second} (SUBLET_CRASH_SEED={SEED}): {error}") from error


def test_after_a_failed_sync_nothing_more_is_written(runner: Zygote, stories: dict[str, Story], place: Path) -> None:
    """A second sync would succeed without the pages that the first one lost, so there is none: not by a retry, not by
    closing the connection, not by the end of the process."""
    story, failed = stories["life"], 0
    for point in story.points:
        if point.call not in ("fdatasync", "fsync") or point.fault != "EIO":
            continue
        story.set_out(place)
        found = runner.run("life", place, point.spoil(), calls=AFTERWARDS, listed=True)
        assert found.struck is not None
        if "/home/journal.db" not in found.seen[found.struck].path:
            continue  # another file's sync, such as a backup's
        # Only closing may fail in silence: all that was answered is in the log, and the next opening moves it.
        failed += found.status == program.REFUSED
        more = [one for one in found.seen[found.struck + 1 :] if "/home/journal.db" in one.path]
        assert not more, f"{point}: {more[0]}"
    assert failed >= len(story.books) - 1, "each batch has a sync of its own"


def judge(story: Story, point: Point, status: int, place: Path) -> None:
    notes = Diary.read(place / "diary")
    home, anchors = place / "home", place / "anchors"
    if story.name == "put_back":
        try:
            Journal.open(home, wall_ns=WALL_NS, anchors=anchors).close()
        except JournalError as error:
            if "gone" not in error.message or notes:
                raise
            restore(place / "old.backup", home, wall_ns=WALL_NS, anchors=anchors)
    office = SmallOffice(home, anchors, notes.append)
    books = office.books()
    office.journal.close()
    batches = sum("books" in note or "restored" in note for note in notes)
    allowed = story.books[batches : batches + 2] if status else story.books[-1:]
    assert books in allowed, f"after {batches} answered batches the books are those of none of {len(allowed)}"
    backup = place / "made.backup"
    if backup.exists():
        restore(backup, place / "elsewhere", wall_ns=WALL_NS, anchors=anchors)
    assert backup.exists() or not any("backup" in note for note in notes)
    if point.fault not in KILLS and point.call != "unlink":
        assert not list(place.glob(".*")) + list(home.glob("*.new")) + list(home.glob("*.restoring*"))
    look(story.before + epochs_in(notes), place)


def look(answered: list[Epoch], place: Path) -> None:
    """Open, end what lives, grant once more, close, open again."""
    home, anchors = place / "home", place / "anchors"
    notes: list[dict[str, object]] = []
    office = SmallOffice(home, anchors, notes.append)
    report = office.journal.verify()
    assert report.ok, report.problem
    office.open()
    office.revoke_all()
    send_credits_again(office)
    office.acquire("last")
    (fresh,) = epochs_in(notes)
    assert all(fresh > epoch for epoch in answered), f"{fresh} is not above {max(answered)}"
    check_books(office.ledger.state)
    past = AuditHistory().read(office.journal.records())
    usages = past.usages(office.ns)
    account = reconcile(usages, past.devices(office.ns))
    assert account.ok, account
    check_budget(office, usages)
    books = office.books()
    office.journal.close()
    again = SmallOffice(home, anchors, notes.append)
    assert again.books() == books, "the books are not the fold of the journal"
    again.journal.close()


def send_credits_again(office: SmallOffice) -> None:
    """Where there is a budget: as who did not learn whether they count. Each counts once."""
    for budget in list(office.ledger.state.books.budgets.values()):
        for name in (*program.CREDITS, *program.CREDITS):
            program.credit(office, name)
        found = office.ledger.state.books.budgets[budget.id].credits
        assert sum(found.values()) == sum(program.CREDITS.values())


def check_budget(office: SmallOffice, usages: list[Usage]) -> None:
    """What is used is what the bill has."""
    for budget in office.ledger.state.books.budgets.values():
        bill = fold(usages, by="tenant", rates=office.ledger.state.rates, since_ns=budget.since_wall_ns)
        billed = sum(line.grains for line in bill.lines if line.key == LOCAL_TENANT)
        assert standing_now(office.ledger.state, budget, Now(office.ns, WALL_NS + office.ns)).used == billed
