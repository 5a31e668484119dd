"""What is killed: the studio's databases, through the sessions of a person, people with tokens, and an upgrade.

The same scheme as ``journal_program``: forks of one process, traced from their first call on, with a diary that a kill
cannot reach. Every story is deterministic but for the names of temporary files.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Final

from sublet.studio.people import People, TokenScope
from sublet.studio.records import (
    Abandoned,
    Accepted,
    Asked,
    Ended,
    Entry,
    Granted,
    LeaseRecord,
    Lost,
    Offered,
    ProcessIdentity,
    Record,
    Refused,
    Session,
    Started,
    Terms,
    fold_all,
)
from sublet.studio.states import SessionEnd
from sublet.studio.store import SqliteStore
from sublet.values import GIB, NS_PER_S
from tests.crash.serving import Note, serve

ME: Final = ProcessIdentity(host="here", pid=7, started=100, name="the studio")
LEASE: Final = LeaseRecord(id="l-1", epoch=(1, 1), at_ns=1, devices=("n1/gpu0",), holder=ME)
WALL_NS: Final = 1_700_000_000 * NS_PER_S
VERSION_1: Final = """
ALTER TABLE teaches RENAME TO later;
DROP TABLE later;
PRAGMA user_version = 1;
"""
"""Of ``people.db``: before teachers taught groups."""


class Days:
    """The sessions of one person, and all people. Each step is noted when it has returned."""

    def __init__(self, home: Path, note: Note, story: str) -> None:
        self.store = SqliteStore(home)
        self._chance, self._story = 0, story
        self.people = People(home, wall_ns=lambda: WALL_NS, random=self._random)
        self._note = note
        self._seq = len(self.store.read(0))

    def _random(self, size: int) -> bytes:
        """Another one each time, and the same in each run."""
        self._chance += 1
        return hashlib.shake_128(f"{self._story} {self._chance}".encode()).digest(size)

    def done(self) -> None:
        self._note({"done": True})

    def append(self, *records: Record) -> None:
        for record in records:
            self._seq += 1
            assert self.store.append(Entry(seq=self._seq, session="s-1", at_ns=self._seq, record=record))
            self.done()

    def person(self, name: str) -> str:
        """A new one with a token, as the command adds it."""
        self.people.add(name, "physics")
        self.done()
        token = self.people.new_token(name)
        self.done()
        return token


def begin(home: Path, note: Note) -> None:
    """The first session and the first person of a folder."""
    days = Days(home, note, "begin")
    days.append(Started(name="thesis", terms=Terms(vram=GIB)), Asked(by=ME))
    days.person("ana")


def sessions(home: Path, note: Note) -> None:
    """From the queue to an offer, a lease, its end, and the end of the session."""
    days = Days(home, note, "sessions")
    days.append(
        Abandoned(),
        Asked(by=ME),
        Refused(reason="capacity"),
        Asked(by=ME),
        Offered(offered=1, asked=2, valid_s=30.0),
        Accepted(),
        Granted(lease=LEASE, tenant="physics"),
        Lost(lease="l-1", reason="preempted", saved_at="10:00"),
        Ended(reason=SessionEnd.ENDED),
    )


def persons(home: Path, note: Note) -> None:
    """Tokens, browsers, invites and roles, and what takes them back."""
    days = Days(home, note, "persons")
    token = days.person("ben")
    people = days.people
    cookie = people.sign_in(token)
    days.done()
    people.set_role("ben", teaches=["ml1"])
    days.done()
    ((_, invite),) = people.invite_all([("cem", "physics")])
    days.done()
    people.accept(invite)
    days.done()
    people.new_token("cem", "looks", scope=TokenScope(read_only=True))
    days.done()
    people.sign_out(cookie)
    days.done()
    people.revoke("ben")
    days.done()
    people.remove("ana")
    days.done()


def upgrade(home: Path, note: Note) -> None:
    """The people of an older Sublet, and one more."""
    Days(home, note, "upgrade").person("dora")


def before_upgrade(home: Path) -> None:
    """As that Sublet left them."""
    db = sqlite3.connect(home / "people.db")
    db.executescript(VERSION_1)
    db.close()


def books(home: Path) -> str:
    """All that the two databases say, as one short text to compare. They may not be there yet."""
    said: list[object] = []
    found: dict[str, Session] = {}
    fold_all(found, SqliteStore(home).read(0))
    said.append(sorted(map(str, found.values())))
    people, cookies = list[object](), list[str]()
    if (home / "people.db").exists():
        found_people = People(home, wall_ns=lambda: WALL_NS, random=bytes)
        people += [
            [str(one), str(found_people.tokens(one)), found_people.invited_until_ns(one)] for one in found_people.all()
        ]
        db = sqlite3.connect(home / "people.db")
        cookies += sorted(map(str, db.execute("SELECT * FROM cookie").fetchall()))
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.close()
    said += [people, cookies]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


STORIES: Final = {"begin": begin, "sessions": sessions, "persons": persons, "upgrade": upgrade}


if __name__ == "__main__":
    serve(STORIES)
